"""Tests of local writes and gather() without a JVM. test_local.py has the tests with Spark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

import logcore
from logcore.errors import CorruptLogError, InvalidConfigError, LogNotFoundError
from logcore.fs import OS
from logcore.inspect.verify import verify
from logcore.staging import shipping
from logcore.staging.publishing import Staging
from logcore.testing import SimulatedDisk
from pyspark_logcore import gather, gathering, local
from pyspark_logcore.gathering import Gathering, MissingReceiptsError
from pyspark_logcore.local import WriteReceipt
from pyspark_logcore.staged import PublishTimeoutError
from support.simulated_local_writes import as_dicts, rows, values, write, writer
from support.simulated_spark import frame


def all_values(batches: int, tasks: int = 2) -> list[bytes]:
    return [
        value
        for batch in range(batches)
        for task in range(tasks)
        for value in rows(batch, task)
    ]


def test_each_task_writes_a_complete_log_directory(tmp_path: Path) -> None:
    receipts = write(tmp_path / "local")
    assert [
        (
            receipt.task,
            receipt.partition,
            receipt.first_offset,
            receipt.last_offset,
            receipt.records,
        )
        for receipt in receipts
    ] == [
        (0, 0, 0, 19, 20),
        (1, 0, 0, 19, 20),
    ]
    assert {receipt.host for receipt in receipts} == {os.uname().nodename}
    for receipt in receipts:
        assert receipt.path == str(
            tmp_path / "local" / f"job@{0:020d}" / "t" / str(receipt.task)
        )
        assert values(receipt.path) == {0: rows(0, receipt.task)}
        assert receipt.bytes == os.path.getsize(
            Path(receipt.path) / "t-0" / f"{0:020d}.log"
        )
        assert not [
            verdict for verdict in verify(receipt.path) if verdict.status == "damaged"
        ]
    assert sorted(os.listdir(tmp_path / "local" / f"job@{0:020d}" / "t")) == ["0", "1"]


def test_local_write_stores_rows_like_the_sink(
    tmp_path: Path,
) -> None:
    share = frame(
        key=[b"a", b"b", None],
        value=[b"1", None, b"3"],
        partition=[2, 1, 0],
        headers=[[{"key": "h", "value": b"v"}], None, None],
        timestamp=pa.array(
            [1_700_000_000_000_000, 1_700_000_001_000_000, 1], pa.timestamp("us", "UTC")
        ),
    )
    receipts = write(
        tmp_path / "local",
        0,
        [share],
        partitions=3,
        options={"useTimestampColumn": True},
    )
    gather(receipts, str(tmp_path / "into"))
    with logcore.open_dir(tmp_path / "into", read_only=True) as directory:
        records = [directory.partition("t", number).get(0) for number in range(3)]
    assert [(record.key, record.value) for record in records] == [
        (None, b"3"),
        (b"b", None),
        (b"a", b"1"),
    ]
    assert [record.timestamp_ms for record in records] == [
        0,
        1_700_000_001_000,
        1_700_000_000_000,
    ]
    assert records[2].headers == (("h", b"v"),)


def test_retried_task_returns_its_receipt_and_writes_nothing(
    tmp_path: Path,
) -> None:
    planned = writer(tmp_path)
    first = planned.write(iter([frame(value=[b"a"])]), 0, 1)
    before = os.stat(first[0].path)
    remaining_input = iter([frame(value=[b"b"])])
    assert planned.write(remaining_input, 0, 2) == first
    assert not list(remaining_input), (
        "the worker of Spark requires that its input is read to the end"
    )
    assert os.stat(first[0].path).st_ino == before.st_ino
    assert values(first[0].path) == {0: [b"a"]}


def test_receipt_of_the_first_finished_attempt_counts(tmp_path: Path) -> None:
    planned = writer(tmp_path)
    won: list[Any] = []

    def slow() -> Any:
        yield frame(value=[b"slow"])
        won.extend(planned.write(iter([frame(value=[b"quick"])]), 0, 2))

    assert planned.write(slow(), 0, 1) == won
    assert values(won[0].path) == {0: [b"quick"]}
    assert os.listdir(os.path.dirname(won[0].path)) == ["0"]


def test_failed_attempt_leaves_no_files(tmp_path: Path) -> None:
    def failing() -> Any:
        yield frame(value=[b"a"])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        writer(tmp_path).write(failing(), 0, 1)
    assert not os.listdir(tmp_path / f"job@{0:020d}" / "t")


def test_repeated_batch_replaces_the_earlier_run(
    tmp_path: Path,
) -> None:
    first = write(tmp_path, 0, [frame(value=[b"a"])])
    Path(f"{first[0].path}.0123.7.part").mkdir()  # left by a killed attempt
    second = write(tmp_path, 0, [frame(value=[b"b"])])
    assert second[0].path == first[0].path
    assert values(second[0].path) == {0: [b"b"]}
    assert os.listdir(os.path.dirname(first[0].path)) == ["0"]
    with pytest.raises(MissingReceiptsError, match="was written again since"):
        gather(first, str(tmp_path / "into"))
    gather(second, str(tmp_path / "into"))
    assert values(tmp_path / "into") == {0: [b"b"]}


def test_gather_stores_batches_once_and_in_order(tmp_path: Path) -> None:
    receipts = [
        receipt for batch in (1, 0) for receipt in write(tmp_path / "local", batch)
    ]
    results = gather(as_dicts(receipts), str(tmp_path / "into"))
    assert [(result.batch, result.records, result.is_new) for result in results] == [
        (0, 40, True),
        (1, 40, True),
    ]
    assert not any(result.is_new for result in gather(receipts, str(tmp_path / "into")))
    assert values(tmp_path / "into") == {0: all_values(2)}
    assert [
        os.path.basename(name) for name in os.listdir(f"{tmp_path}/into.staging")
    ] == ["write_local%20job%20t%20t.state"]


def test_gather_appends_to_a_topic_that_has_records(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "into", create=True) as directory:
        directory.create_topic("all", 2)
        directory.partition("all", 0).append(b"before")
    gather(write(tmp_path / "local"), str(tmp_path / "into"), topic="all")
    assert values(tmp_path / "into", "all") == {0: [b"before", *all_values(1)], 1: []}


def test_empty_tasks_and_batches_are_gathered(tmp_path: Path) -> None:
    empty = frame(value=[])
    receipts = write(tmp_path / "local", 0, [empty, frame(value=[b"a"])])
    assert [receipt.records for receipt in receipts] == [0, 1]
    receipts += write(tmp_path / "local", 1, [empty])
    receipts += write(tmp_path / "local", 2, [frame(value=[b"b"])])
    gather(receipts, str(tmp_path / "into"))
    assert values(tmp_path / "into") == {0: [b"a", b"b"]}


def test_large_segments_are_sent_as_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_shipment = gathering.Shipment
    monkeypatch.setattr(
        gathering,
        "Shipment",
        lambda fs, into, txid: original_shipment(fs, into, txid, carry_bytes=300),
    )
    config = {"segment.bytes": 1000, "batch.size": 200}
    receipts = []
    for batch in range(2):
        shares = [frame(value=rows(batch, task, 60, 30)) for task in range(2)]
        receipts += write(tmp_path / "local", batch, shares, config=config)
    gather(receipts, str(tmp_path / "into"))
    expected = [
        value
        for batch in range(2)
        for task in range(2)
        for value in rows(batch, task, 60, 30)
    ]
    assert values(tmp_path / "into") == {0: expected}
    assert not [
        verdict
        for verdict in verify(str(tmp_path / "into"))
        if verdict.status == "damaged"
    ]


def test_gather_by_paths_needs_the_number_of_tasks(tmp_path: Path) -> None:
    receipts = write(tmp_path / "local")
    with pytest.raises(InvalidConfigError, match="give tasks"):
        gather(str(tmp_path / "local"), str(tmp_path / "into"))
    with pytest.raises(MissingReceiptsError, match="all tasks"):
        gather([receipts[0].path], str(tmp_path / "into"), tasks=2)
    with pytest.raises(LogNotFoundError, match="no files of write_local"):
        gather([tmp_path / "nowhere"], str(tmp_path / "into"), tasks=2)
    gather(str(tmp_path / "local"), str(tmp_path / "into"), tasks=2)
    gather([receipt.path for receipt in receipts], str(tmp_path / "into"), tasks=2)
    assert values(tmp_path / "into") == {0: all_values(1)}


def test_only_one_of_two_attempts_is_gathered(tmp_path: Path) -> None:
    planned = writer(tmp_path / "a", partitions=2)
    other = attrs.evolve(
        planned, options=attrs.evolve(planned.options, path=str(tmp_path / "b"))
    )
    planned.write(iter([frame(value=[b"0"], partition=[0])]), 0, 1)
    # The rows of a second attempt may have another order and other partitions.
    other.write(iter([frame(value=[b"0"], partition=[1])]), 0, 2)
    gather([tmp_path / "b", tmp_path / "a"], str(tmp_path / "into"), tasks=1)
    assert [
        value
        for values_of_partition in values(tmp_path / "into").values()
        for value in values_of_partition
    ] == [b"0"]


def test_gather_times_out_and_leaves_a_held_directory_unchanged(
    tmp_path: Path,
) -> None:
    into = str(tmp_path / "into")
    receipts = write(tmp_path / "local")
    with logcore.open_dir(into, create=True) as holder:
        with pytest.raises(PublishTimeoutError):
            gather(receipts, into, publish_timeout=0.05)
        holder.tick()
        assert holder.topics() == []
        assert not [
            name
            for name in os.listdir(f"{into}.staging")
            if not name.startswith("logcore")
        ]
    gather(receipts, into)
    assert values(into) == {0: all_values(1)}


def test_gather_limits_the_memory_of_carried_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "_HELD_BYTES", 2000)
    shares = [frame(value=rows(0, task)) for task in range(8)]
    receipts = write(tmp_path / "local", 0, shares)
    staging = Staging(OS, str(tmp_path / "into"))
    (tmp_path / "into").mkdir()
    staging.begin("x")
    shipment = shipping.Shipment(OS, str(tmp_path / "into"), "x")
    chunk_types = []
    for receipt in receipts:
        report = local.read_report(OS, receipt.path)
        assert report is not None
        chunk_types += [
            type(chunk).__name__
            for chunk in shipment.add(
                f"{receipt.path}/t-0", report.partitions[0], "t", 0, str(receipt.task)
            )
        ]
    shipment.close()
    assert chunk_types[0] == "Carried"
    assert chunk_types[-1] == "StagedFile"


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_local_writes_are_gathered_exactly_once(data: st.DataObject) -> None:
    """Batches have random numbers of tasks and rows, and some run again. Each gather
    takes several batches, and is repeated.
    """
    disk = SimulatedDisk()
    partitions = data.draw(st.integers(1, 2))
    config = data.draw(st.sampled_from([{}, {"segment.bytes": 900, "batch.size": 200}]))
    carry_bytes = data.draw(st.sampled_from([0, 400, 1 << 20]))
    original_shipment = shipping.Shipment
    receipts_by_batch: dict[int, list[WriteReceipt]] = {}
    model: dict[int, list[bytes]] = {number: [] for number in range(partitions)}
    gathered_end = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gathering,
            "Shipment",
            lambda fs, into, txid: original_shipment(
                fs, into, txid, carry_bytes=carry_bytes
            ),
        )
        rounds = data.draw(st.integers(1, 4))
        for batch in range(rounds):
            for run in range(data.draw(st.integers(1, 2))):
                shares = []
                expected: dict[int, list[bytes]] = {
                    number: [] for number in range(partitions)
                }
                for task in range(data.draw(st.integers(1, 3))):
                    counts = data.draw(
                        st.lists(
                            st.integers(0, 25), min_size=partitions, max_size=partitions
                        )
                    )
                    task_partitions = [
                        number
                        for number, count in enumerate(counts)
                        for _ in range(count)
                    ]
                    values_of_task = [
                        b"%d.%d.%d.%d" % (batch, run, task, row)
                        for row in range(len(task_partitions))
                    ]
                    for number, value in zip(
                        task_partitions, values_of_task, strict=True
                    ):
                        expected[number].append(value)
                    shares.append(
                        frame(value=values_of_task, partition=task_partitions)
                    )
                receipts_by_batch[batch] = write(
                    "/local",
                    batch,
                    shares,
                    fs=disk,
                    partitions=partitions,
                    config=config,
                )
            for number in range(partitions):
                model[number] += expected[number]
            if data.draw(st.booleans()) or batch == rounds - 1:
                first = data.draw(st.integers(0, gathered_end))
                receipts = data.draw(
                    st.permutations(
                        [
                            receipt
                            for number_of_batch in range(first, batch + 1)
                            for receipt in receipts_by_batch[number_of_batch]
                        ]
                    )
                )
                results = Gathering(disk, "/into", None, None, 1.0).run(receipts)
                assert [(result.batch, result.is_new) for result in results] == [
                    (number_of_batch, number_of_batch >= gathered_end)
                    for number_of_batch in range(first, batch + 1)
                ]
                gathered_end = batch + 1
                visible = values("/into", fs=disk)
                assert visible == {number: model[number] for number in visible}
                assert sum(map(len, visible.values())) == sum(map(len, model.values()))
    assert not disk.open_handles


def test_gather_refuses_incomplete_input(tmp_path: Path) -> None:
    zero = write(tmp_path / "local")
    first = write(tmp_path / "local", 1)
    into = str(tmp_path / "into")
    with pytest.raises(MissingReceiptsError, match="all tasks"):
        gather(zero[:1], into)
    with pytest.raises(MissingReceiptsError, match="in their order"):
        gather(first, into)
    other = [attrs.evolve(zero[1], run="another")]
    with pytest.raises(MissingReceiptsError, match="one run"):
        gather([zero[0], *other], into)
    with pytest.raises(MissingReceiptsError, match="two runs"):
        gather([*zero, *other], into)
    assert values(into) == {}


def test_gather_error_contains_host_and_path_of_missing_files(tmp_path: Path) -> None:
    receipts = [
        attrs.evolve(receipt, host="far") for receipt in write(tmp_path / "local")
    ]
    (tmp_path / "local").rename(tmp_path / "brought")
    with pytest.raises(LogNotFoundError, match=f"on far at {tmp_path}/local"):
        gather(receipts, str(tmp_path / "into"))

    def move_to_host(receipt: WriteReceipt) -> str:
        return receipt.path.replace(str(tmp_path / "local"), str(tmp_path / "brought"))

    gather(receipts, str(tmp_path / "into"), located=move_to_host)
    assert values(tmp_path / "into") == {0: all_values(1)}


def test_gather_detects_damage_and_swapped_directories(tmp_path: Path) -> None:
    receipts = write(tmp_path / "local")
    into = str(tmp_path / "into")
    swapped = [attrs.evolve(receipts[0], path=receipts[1].path), receipts[1]]
    with pytest.raises(CorruptLogError, match="another task's directory"):
        gather(swapped, into)
    with pytest.raises(CorruptLogError, match="differs from the report"):
        gather([attrs.evolve(receipts[0], records=19), receipts[1]], into)
    segment = Path(receipts[1].path) / "t-0" / f"{0:020d}.log"
    content = bytearray(segment.read_bytes())
    content[70] ^= 1
    segment.write_bytes(content)
    with pytest.raises(
        CorruptLogError, match="differs from the one that its task wrote"
    ) as caught:
        gather(receipts, into)
    assert caught.value.path == str(segment)
    assert values(into) == {}
    assert not [
        name for name in os.listdir(f"{into}.staging") if not name.startswith("logcore")
    ], "staged files are left"
    content[70] ^= 1
    segment.write_bytes(content)
    gather(receipts, into)
    assert values(into) == {0: all_values(1)}


def test_report_with_damage_is_an_error(tmp_path: Path) -> None:
    receipts = write(tmp_path / "local")
    Path(receipts[0].path, local.REPORT_FILE).write_bytes(b"{}")
    with pytest.raises(CorruptLogError, match="report of a task"):
        gather(receipts, str(tmp_path / "into"))


def test_gathered_directories_are_removed_if_requested(tmp_path: Path) -> None:
    receipts = write(tmp_path / "local")
    into = str(tmp_path / "into")
    gather(receipts, into, remove=True)
    assert not any(os.path.exists(receipt.path) for receipt in receipts)
    gather(receipts, into, remove=True)
    new_receipts = write(tmp_path / "local")
    gather(receipts, into, remove=True)
    assert all(os.path.exists(receipt.path) for receipt in new_receipts), (
        "the directories belong to another run"
    )
    assert values(into) == {0: all_values(1)}


def test_compacted_topic_accepts_only_records_with_keys(
    tmp_path: Path,
) -> None:
    into = str(tmp_path / "into")
    compact = {"cleanup.policy": "compact"}
    with logcore.open_dir(into, create=True) as directory:
        directory.create_topic("t", 1, compact)
    with pytest.raises(InvalidConfigError, match="is compacted"):
        gather(write(tmp_path / "local"), into)
    receipts = write(
        tmp_path / "local", 0, [frame(key=[b"k"], value=[b"v"])], config=compact
    )
    gather(receipts, into)
    assert values(into) == {0: [b"v"]}


def test_wrong_arguments_are_reported_before_any_task_runs(tmp_path: Path) -> None:
    for arguments in (
        {"topic": "a/b"},
        {"options": {"path": "x"}},
        {"options": {"nosuch": 1}},
        {"config": {"nosuch": 1}},
    ):
        with pytest.raises(logcore.LogcoreError):
            writer(tmp_path, **arguments)
    with pytest.raises(InvalidConfigError, match="value"):
        writer(tmp_path, sample=frame(key=[b"a"]))
    with pytest.raises(InvalidConfigError, match="fewer partitions"):
        with logcore.open_dir(tmp_path / "into", create=True) as directory:
            directory.create_topic("t", 1)
        gather(write(tmp_path / "local", partitions=2), str(tmp_path / "into"))
