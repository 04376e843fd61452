"""Tests of the stream writer without Spark. They call the writer like Spark, for batches
and replays of batches.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import attrs
import pyspark

import logcore
from logcore.errors import CorruptLogError, InvalidConfigError, LogcoreError
from logcore.fs import OS, OsFS
from logcore.metadata.filenames import staging_path
from logcore.staging.manifest import Manifest
from logcore.staging.publishing import Staging
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from pyspark_logcore import staged, stream_writer
from pyspark_logcore.identity import OtherDirectoryError
from pyspark_logcore.stream_writer import LogcoreStreamWriter
from support.simulated_spark import frame, source, spark_types, write
from support.staged import create, publish

QUERY = "5a0c3a4e-query"


class Task:
    """The context of a task, in place of pyspark.TaskContext."""

    current: Task | None = None

    def __init__(
        self, number: int, attempt: int, batch_id: int | None, query: str | None
    ) -> None:
        self.number = number
        self.attempt = attempt
        self.properties = {
            "streaming.sql.batchId": None if batch_id is None else str(batch_id)
        }
        self.properties["sql.streaming.queryId"] = query

    @classmethod
    def get(cls) -> Task | None:
        return cls.current

    def partitionId(self) -> int:
        return self.number

    def taskAttemptId(self) -> int:
        return self.attempt

    def getLocalProperty(self, name: str) -> str | None:
        return self.properties[name]


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pyspark, "TaskContext", Task)
    yield
    Task.current = None


def writer_for(path: Path, **options: object) -> LogcoreStreamWriter:
    return source(path, **{"topic": "t", **options}).streamWriter(
        spark_types(frame(value=[b""], key=[b""])), False
    )


def run(
    path: Path,
    batch_id: int,
    values_by_task: Sequence[Sequence[bytes]],
    query: str | None = QUERY,
    attempt: int = 0,
    **options: object,
) -> list[Any]:
    """Run the tasks of one batch, and return their messages."""
    planned = pickle.dumps(writer_for(path, **options))
    messages = []
    for number, values in enumerate(values_by_task):
        Task.current = Task(number, attempt * 100 + number, batch_id, query)
        batch = frame(value=list(values), key=[None] * len(values))
        messages.append(
            pickle.loads(pickle.dumps(pickle.loads(planned).write(iter([batch]))))
        )
    Task.current = None
    return messages


def batch(
    path: Path, batch_id: int, values_by_task: Sequence[Sequence[bytes]], **options: Any
) -> None:
    messages = run(path, batch_id, values_by_task, **options)
    writer_for(path).commit(messages, batch_id)


def content(path: Path) -> list[bytes]:
    with logcore.open_dir(path, read_only=True) as directory:
        if "t" not in directory:
            return []
        return [
            record.value
            for number in directory.partitions("t")
            for record in directory.partition("t", number).read(0)
        ]


def remaining_files(path: Path) -> list[str]:
    return sorted(
        name
        for name in os.listdir(staging_path(str(path)))
        if not name.endswith((".state", ".garbage"))
    )


def test_batches_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "data"
    batch(path, 0, [[b"a", b"b"], [b"c"]])
    batch(path, 1, [[b"d"]])
    batch(path, 1, [[b"d"]])
    assert sorted(content(path)) == [b"a", b"b", b"c", b"d"]
    assert remaining_files(path) == []


def test_replay_with_other_tasks_and_rows_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "data"
    batch(path, 0, [[b"a", b"b"], [b"c"]])
    batch(path, 0, [[b"a"], [b"b"], [b"c", b"x"]], attempt=1)
    assert sorted(content(path)) == [b"a", b"b", b"c"]
    assert remaining_files(path) == []


def test_batch_without_rows_writes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    batch(path, 0, [[], []])
    assert (content(path), remaining_files(path)) == ([], [])
    batch(path, 1, [[b"a"]])
    batch(path, 2, [])
    assert content(path) == [b"a"]


def test_another_checkpoint_is_another_query(tmp_path: Path) -> None:
    path = tmp_path / "data"
    batch(path, 0, [[b"a"]], query="one")
    batch(path, 0, [[b"a"]], query="two")
    assert content(path) == [b"a", b"a"]


def test_late_commit_of_a_replaced_driver_stores_no_row_twice(tmp_path: Path) -> None:
    """The first driver is suspended after its tasks, and the second driver replays the
    batch. Then both commit.
    """
    path = tmp_path / "data"
    first_messages = run(path, 0, [[b"a"], [b"b"]])
    batch(path, 0, [[b"a", b"b"]], attempt=1)
    writer_for(path).commit(first_messages, 0)
    assert sorted(content(path)) == [b"a", b"b"]
    assert remaining_files(path) == []


@pytest.mark.parametrize("kind", ["stream", "batch"])
def test_replay_does_not_depend_on_the_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After a power cut, a manifest may exist without its files. The next opening
    refused the manifest. The replay of the batch then failed with the same error and
    did not write the batch.
    """
    path = tmp_path / "data"
    options = {"topic": "t", "txnAppId": QUERY, "txnVersion": 0}
    with monkeypatch.context() as patch:
        patch.setattr(staged, "carry_out", lambda *_: None)
        if kind == "stream":
            batch(path, 0, [[b"a"]])
        else:
            write(path, frame(value=[b"a"]), **options)
    (txid,) = [name for name in remaining_files(path) if not name.endswith(".json")]
    shutil.rmtree(os.path.join(staging_path(str(path)), txid))
    with logcore.open_dir(path):
        pass
    assert [name for name in remaining_files(path) if name.endswith(".refused")]
    if kind == "stream":
        batch(path, 0, [[b"a"]], attempt=1)
    else:
        write(path, frame(value=[b"a"]), **options)
    assert (content(path), remaining_files(path)) == ([b"a"], [])


def test_abort_after_the_publish_point_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    messages = run(path, 0, [[b"a"]])

    def fails(*_: object) -> None:
        raise LogcoreError("the driver fails")

    with monkeypatch.context() as patch:
        patch.setattr(staged, "carry_out", fails)
        with pytest.raises(LogcoreError, match="the driver fails"):
            writer_for(path).commit(messages, 0)
    writer_for(path).abort(messages, 0)
    with logcore.open_dir(path):
        pass
    assert content(path) == [b"a"]
    batch(path, 0, [[b"a"]], attempt=1)
    assert content(path) == [b"a"]


def test_abort_before_the_publish_point_removes_staged_files(tmp_path: Path) -> None:
    path = tmp_path / "data"
    messages = run(path, 0, [[b"a"], [b"b"]])
    writer_for(path).abort([*messages, None], 0)
    assert [name for name in remaining_files(path) if name != messages[0].txid] == []
    assert (content(path), remaining_files(path)) == ([], [])


def test_commit_of_tasks_of_two_queries_or_batches_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    first = run(path, 0, [[b"a"]])
    other = run(path, 0, [[b"b"]], query="other")
    with pytest.raises(InvalidConfigError, match="do not belong together"):
        writer_for(path).commit([*first, *other], 0)
    with pytest.raises(InvalidConfigError, match="one query, batch 1"):
        writer_for(path).commit(first, 1)
    assert content(path) == []


def test_task_outside_a_stream_fails(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"no streaming\.sql\.batchId"):
        writer_for(tmp_path / "data").write(iter([frame(value=[b"a"], key=[None])]))
    messages = run(tmp_path / "data", 0, [[b"a"]], query=None)
    with pytest.raises(InvalidConfigError, match="do not belong together"):
        writer_for(tmp_path / "data").commit(messages, 0)


@pytest.mark.parametrize("name", ["txnAppId", "txnVersion"])
def test_stream_refuses_options_for_the_names_of_writes(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidConfigError, match="a stream names its writes"):
        writer_for(tmp_path / "data", **{name: "1"})


@pytest.mark.long
def test_rows_without_a_key_may_change_the_partition_between_attempts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t", partitions=3)
    for batch_id in range(3):
        first = run(path, batch_id, [[b"x"]])
        second = run(path, batch_id, [[b"x"]], attempt=1)
        partitions = {
            chunk.partition
            for message in (*first, *second)
            for chunk in message.carried
        }
        assert partitions == {batch_id % 3}


def test_stream_writes_rows_without_arrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_writer, "_HAS_ARROW", False)
    path = tmp_path / "data"
    row = pyspark.Row("value", "key")
    planned = writer_for(path)
    Task.current = Task(0, 0, 0, QUERY)
    message = planned.write(iter([row(b"a", b"k"), row(None, None)]))
    writer_for(path).commit([message], 0)
    with logcore.open_dir(path, read_only=True) as directory:
        records = [
            (record.key, record.value) for record in directory.partition("t", 0).read(0)
        ]
    assert records == [(b"k", b"a"), (None, None)]


# -- small writes are sent in messages -------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("partitions", [1, 8, 64])
def test_small_batch_needs_few_syncs(
    tmp_path: Path, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition needs syncs of the file that blocks readers, its name, the append,
    two indexes at closing, and the name of a replaced index. A batch needs syncs of the
    staged files, the manifest, the offsets, the recovery points, the state, and the
    files that closing the directory writes.
    """
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t", partitions=partitions)
    rows_by_key = frame(
        value=[b"x"] * partitions * 4, partition=list(range(partitions)) * 4
    )
    write(path, rows_by_key, rows_by_key, topic="t", txnAppId="a", txnVersion=0)
    calls: list[str] = []
    for name in ("fsync", "fdatasync", "sync_dir"):
        original = getattr(OsFS, name)
        monkeypatch.setattr(
            OsFS,
            name,
            lambda fs, what, original=original: (
                calls.append(str(what)),
                original(fs, what),
            )[1],
        )
    write(path, rows_by_key, rows_by_key, topic="t", txnAppId="a", txnVersion=1)
    assert len(calls) <= 6 * partitions + 15
    assert len(content(path)) == partitions * 16


def test_small_task_carries_its_rows_without_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    (message,) = run(path, 0, [[b"a" * 1000]])
    assert (message.files, len(message.carried)) == ([], 1)
    assert os.listdir(os.path.join(staging_path(str(path)), message.txid)) == []
    (message,) = run(path, 0, [[b"a" * 1000]], carryBytes=999)
    assert (len(message.files), message.carried) == (1, [])


def test_carried_and_staged_rows_keep_the_order_of_tasks(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    values_by_task = [[b"a"], [b"b" * 600, b"c"], [b"d"], [b"e"]]
    messages = run(path, 0, values_by_task, carryBytes=500)
    assert [len(message.files) for message in messages] == [0, 1, 0, 0]
    writer_for(path).commit(list(reversed(messages)), 0)
    assert content(path) == [value for values in values_by_task for value in values]


def test_task_without_access_to_the_directory_carries_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    monkeypatch.setattr(Staging, "is_begun", lambda *_: False)
    rows = [b"%d" % number * 100 for number in range(50)]
    messages = run(path, 0, [rows, rows], carryBytes=10)
    assert [message.files for message in messages] == [[], []]
    writer_for(path).commit(messages, 0)
    assert content(path) == rows * 2
    monkeypatch.setattr("pyspark_logcore.rows._MAX_CARRIED", 500)
    with pytest.raises(
        OtherDirectoryError, match=r"does not see the staging directory.*maxResultSize"
    ):
        run(path, 1, [rows])


def test_carried_rows_damaged_in_transit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    (message,) = run(path, 0, [[b"a", b"b"]])
    chunk = message.carried[0]
    message.carried = [attrs.evolve(chunk, data=chunk.data[:-1] + b"x")]
    with pytest.raises(
        CorruptLogError, match="differs from the one that its task sent"
    ):
        writer_for(path).commit([message], 0)
    assert content(path) == []


def test_stored_rows_corrupted_before_apply_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    (message,) = run(path, 0, [[b"a", b"b"]])
    staging = Staging(OS, str(path))
    files = staging.store(message.txid, message.carried)
    staging.publish(
        Manifest(
            app_id=QUERY, version=0, txid=message.txid, files=files, topics={"t": 1}
        )
    )
    carried = Path(staging_path(str(path)), message.txid, "carried.log")
    raw = bytearray(carried.read_bytes())
    raw[-1] ^= 1
    carried.write_bytes(raw)
    with logcore.open_dir(path):
        pass
    with pytest.raises(
        CorruptLogError, match="differs from the one that its task wrote"
    ):
        staging.outcome(QUERY, 0)
    assert content(path) == []


def test_apply_on_a_full_disk_raises_the_disk_full_error() -> None:
    """The opening of the directory failed while it appended the batch, and the error
    did not contain its cause.
    """
    disk = SimulatedDisk()
    create(Path("/data"), fs=disk)
    staging = publish(Path("/data"), "first", fs=disk)
    disk.faults = FaultPlan(
        Fault("pwrite", errno.ENOSPC, path="*/t-0/*.log", times=None)
    )
    with pytest.raises(LogcoreError, match="no space left"):
        staged.carry_out(disk, staging, "app", 0, "first", 0)
    disk.faults = None
    staged.carry_out(disk, staging, "app", 0, "first", 0)
    assert staging.is_done("app", 0)
