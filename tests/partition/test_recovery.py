"""Recovery after a crash: it keeps exactly the longest prefix that was written, and
raises an error for damage that a crash cannot explain.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

import logcore
from logcore.config import Durability
from logcore.kernels import layout
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import LOG_START, RECOVERY_POINT
from logcore.partition.recovery import FAILED_SYNC, Action, TailFacts, decide
from logcore.recordbatch import encode, read_batches
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from support.crashed_logs import LOG, values_in
from support.vectors import VECTORS


def write_killed_log(path: Path, sizes: list[int]) -> bytes:
    """Return the .log file of a killed writer, with one batch for each size of a value."""
    with logcore.open(path, create=True, durability="os") as log:
        for index, size in enumerate(sizes):
            log.append(
                bytes([65 + index % 26]) * size, timestamp_ms=1_700_000_000_000 + index
            )
    return (path / LOG).read_bytes()


def write_crashed_partition(path: Path, data: bytes, *, policy: str = "group") -> Path:
    """Create a partition that has only a .log file and the metadata of its durability
    policy.
    """
    path.mkdir(parents=True)
    (path / LOG).write_bytes(data)
    (path / "logcore.policy").write_text(
        json.dumps({"durability": policy, "max_bytes": 1 << 20, "dense_from": 0})
    )
    return path


@pytest.mark.long
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_log_truncated_at_every_byte_opens_with_the_longest_whole_prefix(
    tmp_path: Path, step: int
) -> None:
    data = write_killed_log(tmp_path / "w-0", [3, 0, 40, 7])
    ends = [batch.position + batch.size_bytes for batch in read_batches(data)]
    for cut in sorted({*range(0, len(data), step), *ends}):
        path = write_crashed_partition(tmp_path / f"c-{cut}", data[:cut])
        want = values_in(data[:cut])
        with logcore.open(path) as log:
            assert [record.value for record in log.read(0)] == want
            assert log.log_end_offset == len(want)
            report = log.recovery_report
            assert report is not None
            kept_size = sum(batch.size_bytes for batch in read_batches(data[:cut]))
            assert (report.cut_position, report.cut_bytes) == (
                (None, 0) if kept_size == cut else (kept_size, cut - kept_size)
            )
            if report.quarantine_path:
                assert (
                    Path(report.quarantine_path).read_bytes() == data[kept_size:cut]
                ), "the truncated bytes are kept in a quarantine file"
            else:
                assert not any(data[kept_size:cut])
            assert log.append(b"next").offset == len(want)
        with logcore.open(path) as log:
            assert [record.value for record in log.read(0)] == [*want, b"next"]
            assert log.recovery_report is not None
            assert log.recovery_report.cut_position is None, (
                "opening again changes nothing"
            )


@pytest.mark.parametrize(
    "tail",
    [b"\0" * 100, b"\0" * 5000, b"garbage", b"\xff" * 200, bytes(range(256)) * 20],
)
def test_garbage_tail_is_truncated_and_reported(tmp_path: Path, tail: bytes) -> None:
    data = write_killed_log(tmp_path / "w-0", [3, 40])
    path = write_crashed_partition(tmp_path / "c-0", data + tail)
    with logcore.open(path) as log:
        assert [record.value for record in log.read(0)] == values_in(data)
        assert log.recovery_report is not None
        assert (log.recovery_report.cut_position, log.recovery_report.cut_bytes) == (
            len(data),
            len(tail),
        )
        assert log.recovery_report.checked_bytes == len(data) + len(tail)
        assert bool(log.recovery_report.quarantine_path) == any(tail)
        assert "truncated" in str(log.recovery_report)


@pytest.mark.long
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_flip_is_truncated_and_reported_or_an_error(
    tmp_path: Path, step: int
) -> None:
    data = write_killed_log(tmp_path / "w-0", [3, 0, 12])
    want = values_in(data)
    beside = {
        f"c-0/{path.name}": path.read_bytes()
        for path in write_crashed_partition(tmp_path / "c-0", data).iterdir()
    }
    for bit in range(0, len(data) * 8, step):
        damaged_data = bytearray(data)
        damaged_data[bit // 8] ^= 1 << bit % 8
        try:
            with logcore.open(
                "c-0", fs=SimulatedDisk({**beside, f"c-0/{LOG}": bytes(damaged_data)})
            ) as log:
                values = [record.value for record in log.read(log.log_start_offset)]
                report = log.recovery_report
        except logcore.CorruptLogError:
            continue
        assert values == want[: len(values)], bit
        assert len(values) == len(want) or (report is not None and report.cut_bytes), (
            bit
        )


def test_truncated_batch_does_not_reappear_after_later_appends() -> None:
    """The batch after the damaged one is whole. If the truncation were not synced
    before the next batch replaces the damaged one, a power cut could restore the old
    batch after the new one.
    """
    lost_batch, later_batch = (
        encode([(None, value)], base_offset=index, leader_epoch=0)
        for index, value in enumerate([b"lost", b"old"])
    )
    disk = SimulatedDisk({f"t-0/{LOG}": lost_batch[:-1] + b"?" + later_batch})
    log = logcore.open("t-0", durability="os", fs=disk)
    assert log.recovery_report is not None and log.recovery_report.cut_bytes == len(
        lost_batch + later_batch
    )
    log.append(b"next")
    for crashed_disk in disk.after_crash():
        with logcore.open("t-0", fs=crashed_disk) as reopened:
            assert [record.value for record in reopened.read(0)] in ([], [b"next"])
    log.close()


def test_recovery_truncates_a_batch_whose_offset_decreases(tmp_path: Path) -> None:
    data = encode([(None, b"a")], leader_epoch=0) + encode(
        [(None, b"b")], base_offset=0, leader_epoch=0
    )
    with logcore.open(write_crashed_partition(tmp_path / "c-0", data)) as log:
        assert [record.value for record in log.read(0)] == [b"a"]
        assert log.recovery_report is not None
        assert log.recovery_report.cut_position == len(data) // 2


def test_gap_in_a_log_of_this_library_is_an_error(tmp_path: Path) -> None:
    data = encode([(None, b"a")], leader_epoch=0) + encode(
        [(None, b"b")], base_offset=5, leader_epoch=0
    )
    with pytest.raises(
        logcore.CorruptLogError,
        match=r"does not continue.*expected base offset 1, found 5",
    ):
        logcore.open(write_crashed_partition(tmp_path / "c-0", data))
    path = tmp_path / "kafka-0"
    path.mkdir()
    (path / LOG).write_bytes(data)
    with logcore.open(path) as log:
        assert [record.offset for record in log.read(0)] == [0, 5], (
            "a Kafka follower may have gaps"
        )


def test_missing_bytes_below_the_recovery_point_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True) as log:
        for number in range(10):
            log.append(b"%d" % number * 20)
    data = bytearray((path / LOG).read_bytes())
    for cut in (len(data) - 1, len(data) // 2, 0):
        (path / LOG).write_bytes(data[:cut])
        with pytest.raises(logcore.CorruptLogError, match="synced earlier"):
            logcore.open(path)
        assert (path / LOG).read_bytes() == data[:cut], "the file is unchanged"
    (path / LOG).write_bytes(data + b"torn")
    with logcore.open(path) as log:
        assert log.log_end_offset == 10
    (path / LOG).unlink()
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(path)


def test_damage_below_the_recovery_point_is_found_by_reading(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True) as log:
        for number in range(10):
            log.append(b"%d" % number * 20)
    data = bytearray((path / LOG).read_bytes())
    data[300] ^= 1
    (path / LOG).write_bytes(data)
    with logcore.open(path, read_only=True) as log:
        with pytest.raises(logcore.CorruptBatchError) as caught:
            list(log.read(0))
        assert caught.value.path == str(path / LOG)
        assert caught.value.position == 300 - 300 % (len(data) // 10)
        assert "expected" in str(caught.value)
        with pytest.raises(logcore.CorruptBatchError):
            list(log.scan())
        assert [record.offset for record in log.read(5)] == list(range(5, 10))


@pytest.mark.parametrize(
    ("policy", "opens"),
    [("always", False), ("group", True), ("every(5)", True), ("os", True)],
)
def test_damage_before_a_whole_batch_depends_on_the_policy(
    tmp_path: Path, policy: str, opens: bool
) -> None:
    data = bytearray(write_killed_log(tmp_path / "w-0", [30, 30, 30]))
    data[len(data) // 3 + 70] ^= 1
    path = write_crashed_partition(tmp_path / "c-0", bytes(data), policy=policy)
    if not opens:
        with pytest.raises(logcore.CorruptLogError):
            logcore.open(path)
        return
    with logcore.open(path) as log:
        assert log.log_end_offset == 1
        assert log.recovery_report is not None
        assert log.recovery_report.cut_bytes == len(data) // 3 * 2
        assert log.recovery_report.quarantine_path is not None


def test_more_bytes_after_damage_than_one_sync_group_is_an_error(
    tmp_path: Path,
) -> None:
    data = bytearray(write_killed_log(tmp_path / "w-0", [30, 700_000, 700_000, 30]))
    data[150] ^= 1
    size = len(data)
    path = write_crashed_partition(tmp_path / "c-0", bytes(data), policy="group")
    # The next whole batch begins 700 kB later, so that one group can hold both.
    with logcore.open(path) as log:
        assert log.log_end_offset == 1
    data[750_000] ^= 1
    path = write_crashed_partition(tmp_path / "d-0", bytes(data), policy="group")
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(path)
    assert (path / LOG).stat().st_size == size


def test_unsynced_bytes_are_counted_from_the_damage(tmp_path: Path) -> None:
    data = bytearray(write_killed_log(tmp_path / "w-0", [700_000, 700_000, 30, 30]))
    third_position = list(read_batches(bytes(data)))[2].position
    assert third_position > 1 << 20
    data[third_position + 70] ^= 1
    with logcore.open(
        write_crashed_partition(tmp_path / "c-0", bytes(data), policy="group")
    ) as log:
        assert log.log_end_offset == 2


def test_damage_before_the_last_segment_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True, config={"segment.bytes": 250}) as log:
        for number in range(6):
            log.append(b"%d" % number * 32)
    (path.parent / RECOVERY_POINT).unlink()
    data = bytearray((path / LOG).read_bytes())
    second = len(data) // 2
    assert data[second + 7] == 1, "the base offset of the second batch"
    back, beyond = (
        data[: second + 7] + bytes([number]) + data[second + 8 :] for number in (0, 2)
    )
    for damaged_data in (
        data[:-1],
        data[:50] + b"\0" + data[51:],
        data + b"tail",
        back,
        beyond,
    ):
        (path / LOG).write_bytes(damaged_data)
        with pytest.raises(logcore.CorruptLogError, match="middle"):
            logcore.open(path)
        assert (path / LOG).read_bytes() == bytes(damaged_data)
    (path / LOG).write_bytes(data)
    with logcore.open(path) as log:
        assert log.log_end_offset == 6


@pytest.mark.parametrize(
    "name", ["logcore.policy", "logcore.durable", "leader-epoch-checkpoint"]
)
@pytest.mark.parametrize(
    "content",
    [None, b"", b"\0" * 50, b"nonsense", b'{"durability": 7}', b"0\n1\nx y\n"],
)
def test_lost_or_damaged_metadata_changes_no_records(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True) as log:
        log.append_many([(None, b"%d" % number) for number in range(5)])
    if content is None:
        (path / name).unlink(missing_ok=True)
    else:
        (path / name).write_bytes(content)
    with logcore.open(path, read_only=True) as log:
        assert len(list(log.read(0))) == 5
    with logcore.open(path) as log:
        assert len(list(log.read(0))) == 5
        assert log.append(b"x").offset == 5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1\n0\n",
        b"0\n2\norders 0 5\n",
        b"0\n1\norders 0\n",
        b"\xff\xfe",
        b"0\n1\norders 0 x\n",
    ],
)
def test_damaged_recovery_checkpoint_causes_a_full_check(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True) as log:
        log.append_many([(None, b"%d" % number) for number in range(5)])
    (tmp_path / RECOVERY_POINT).write_bytes(content)
    with logcore.open(path) as log:
        assert log.log_end_offset == 5
        assert log.recovery_report is not None
        assert log.recovery_report.checked_bytes == (path / LOG).stat().st_size
    with logcore.open(path) as log:
        assert log.recovery_report is not None
        assert log.recovery_report.checked_bytes == 0, (
            "a clean close leaves nothing to check"
        )
        assert (
            str(log.recovery_report)
            == f"{path / LOG}: 0 bytes checked, nothing truncated"
        )


def test_kafka_partition_after_a_crash_recovers_to_its_clean_copy(
    tmp_path: Path,
) -> None:
    shutil.copytree(VECTORS / "partition-crash" / "orders-0", tmp_path / "orders-0")
    with (
        logcore.open(
            tmp_path / "orders-0", config={"index.interval.bytes": 100}
        ) as log,
        logcore.open(VECTORS / "partition-clean" / "orders-0", read_only=True) as clean,
    ):
        assert log.log_end_offset == clean.log_end_offset == 29
        assert list(log.read(0)) == list(clean.read(0))
    for name in (
        f"{number:020d}{suffix}"
        for number in (0, 16)
        for suffix in (".log", ".index", ".timeindex")
    ):
        recovered_path = tmp_path / "orders-0" / name
        kafka_path = VECTORS / "partition-clean" / "orders-0" / name
        assert recovered_path.read_bytes() == kafka_path.read_bytes(), name


def test_rebuilt_indexes_equal_those_of_kafka(tmp_path: Path) -> None:
    """Kafka wrote partition-clean with an index interval of 100. Rebuilding must give
    the same files, byte for byte.
    """
    shutil.copytree(VECTORS / "partition-crash" / "orders-0", tmp_path / "orders-0")
    with logcore.open(tmp_path / "orders-0", config={"index.interval.bytes": 100}):
        pass
    for suffix in (".index", ".timeindex"):
        name = f"{16:020d}{suffix}"
        kafka_bytes = (VECTORS / "partition-clean" / "orders-0" / name).read_bytes()
        assert (tmp_path / "orders-0" / name).read_bytes() == kafka_bytes, name


def test_decision_table_has_one_action_per_combination() -> None:
    """Each combination of facts has one action. Acknowledged data is never truncated,
    and zeros are never copied.
    """
    policies = [
        Durability.parse(text)
        for text in ("always", "group", "every(3)", "interval(5)", "os")
    ]
    for damage_at, recovery_point, is_zeros, tail_size, policy in itertools.product(
        (None, 0, 99, 100, 101),
        (0, 100),
        (False, True),
        (None, 50, 1 << 20, (1 << 20) + 1),
        policies,
    ):
        action = decide(
            TailFacts(
                damage_at,
                recovery_point,
                is_zeros,
                None if is_zeros else tail_size,
                policy,
            )
        )
        if damage_at is None:
            assert action is Action.KEEP
        elif damage_at < recovery_point:
            assert action is Action.FAIL
        elif is_zeros:
            assert action is Action.CUT
        elif tail_size is None:
            assert action is Action.QUARANTINE_AND_CUT
        else:
            acknowledged = policy.kind == "always" or (
                policy.kind == "group" and tail_size > policy.max_bytes
            )
            assert (action is Action.FAIL) == acknowledged


def test_each_walk_result_has_a_reason_text() -> None:
    assert set(layout.WALK_REASONS) == set(range(7))


def test_log_that_ends_below_its_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True) as log:
        log.append_many([(None, b"x")] * 3)
    (tmp_path / LOG_START).write_text("0\n1\norders 0 4\n")
    before = (path / LOG).read_bytes()
    with pytest.raises(logcore.CorruptLogError, match="below its start"):
        logcore.open(path)
    assert (path / LOG).read_bytes() == before
    (tmp_path / LOG_START).write_text("0\n1\norders 0 3\n")
    with logcore.open(path) as log:
        assert (log.log_start_offset, log.log_end_offset, list(log.read(3))) == (
            3,
            3,
            [],
        )


def test_lost_epoch_file_is_rebuilt_from_the_batches(tmp_path: Path) -> None:
    """Only rising epochs count: a lower epoch can only be damage in a header field that
    no CRC covers.
    """
    data = b"".join(
        encode([(None, b"x")], base_offset=index, leader_epoch=epoch)
        for index, epoch in enumerate([0, 2, 1, 2, 5])
    )
    with logcore.open(write_crashed_partition(tmp_path / "c-0", data)) as log:
        assert log.leader_epoch == 5
        assert [log.end_of_epoch(epoch) for epoch in range(6)] == [
            (0, 1),
            (0, 1),
            (2, 4),
            (2, 4),
            (2, 4),
            (5, 5),
        ]


def test_epochs_above_the_log_end_are_moved_to_the_end(tmp_path: Path) -> None:
    """If they kept their offsets, they would later apply to records of another epoch,
    once the log end has passed them.
    """
    path = str(tmp_path / "t-0")
    with logcore.open(path, create=True) as log:
        for number in range(5):
            log.append(b"%d" % number)
    checkpoint.write_epochs(logcore.fs.OS, path, [(0, 0), (1, 3), (2, 7), (3, 9)])
    with logcore.open(path) as log:
        assert log.leader_epoch == 3, "an epoch that clients have seen never decreases"
        for number in range(5):
            log.append(b"%d" % number)
        assert [log.end_of_epoch(epoch) for epoch in range(4)] == [
            (0, 3),
            (1, 5),
            (1, 5),
            (3, 10),
        ]
    assert checkpoint.read_epochs(logcore.fs.OS, path) == [(0, 0), (1, 3), (3, 5)]


def test_segments_below_the_log_start_are_ignored() -> None:
    """Segments are deleted one by one, and a crash can keep any of their names. Here it
    keeps the segment with a transaction but not the one with its end, so that the
    transaction seemed to be open and held back all later records.
    """
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        log.append_batch(
            encode(
                [(None, b"sent")],
                producer_id=7,
                producer_epoch=0,
                base_sequence=0,
                transactional=True,
            )
        )
        log.roll()
        log.end_transaction(7, 0, commit=True)
        log.roll()
        for number in range(3):
            log.append(b"%d" % number, timestamp_ms=1_000 + number)
            log.roll()
        before = disk.files()
        log.delete_records(3)
    files = {
        **before,
        "/log-start-offset-checkpoint": disk.files()["/log-start-offset-checkpoint"],
    }
    del files[f"/t-0/{1:020d}.log"]
    disk_after_crash = SimulatedDisk(files)
    for read_only in (True, False):
        with logcore.open("t-0", read_only=read_only, fs=disk_after_crash) as log:
            assert (
                log.log_start_offset,
                log.last_stable_offset,
                log.statistics().segments,
            ) == (3, 5, 3)
            assert [
                record.value for record in log.read(3, isolation="read_committed")
            ] == [b"1", b"2"]
            assert log.offset_for_timestamp(0) == 3
            if not read_only:
                log.retain()
    assert not [
        path
        for path in disk_after_crash.files()
        if path.startswith((f"/t-0/{0:020d}", f"/t-0/{1:020d}"))
    ]


@pytest.mark.parametrize(
    ("suffix", "start", "stop"),
    [
        (".index", 0, 8),
        (".timeindex", 0, 8),
        (".timeindex", 0, 12),
        (".timeindex", 20, 24),
    ],
    ids=["position", "time", "first_time", "offset_of_a_time"],
)
def test_hole_in_an_index_is_rebuilt(suffix: str, start: int, stop: int) -> None:
    """A write of entries was lost or torn, and a later write was not. The missing bytes
    are zeros that could pass for an entry. With a time of 0, Kafka does not find
    records older than the record of that entry.
    """
    disk = SimulatedDisk()
    config = {"index.interval.bytes": 100}
    with logcore.open("t-0", create=True, config=config, fs=disk) as log:
        for number in range(12):
            log.append(b"%d" % number * 30, timestamp_ms=1_000 + number)
        with log.host.writer.state.lock:
            log.host.writer.save_recovery_point_locked()
        log.host.writer.active.write_indexes()
        disk.kill()
    path = f"/t-0/{Path(LOG).stem}{suffix}"
    written = bytearray(disk.files()[path] or b"")
    assert any(written[start:stop])
    torn_disk = SimulatedDisk(
        {
            **disk.files(),
            path: bytes(written[:start] + bytes(stop - start) + written[stop:]),
        }
    )
    with logcore.open("t-0", config=config, fs=torn_disk) as log:
        assert [
            log.offset_for_timestamp(1_000 + number) for number in range(12)
        ] == list(range(12))
        assert [log.get(number).offset for number in range(12)] == list(range(12))
    assert torn_disk.content(path)[: len(written)] == written, "rebuilt"


def test_batch_larger_than_one_read_is_recovered(
    tmp_path: Path,
) -> None:
    """Opening reads one index interval at a time, from an index entry on. A batch may
    be larger than an interval.
    """
    disk = SimulatedDisk()
    with logcore.open(
        "t-0", create=True, config={"index.interval.bytes": 1_000}, fs=disk
    ) as log:
        for number in range(3):
            # The last record gets an index entry, and the next entry follows much
            # later.
            log.append(b"%d" % number * 500)
        log.append(b"3" * 9_000)
        # The writer does this every few seconds, and writes the indexes too.
        with log.host.writer.state.lock:
            log.host.writer.save_recovery_point_locked()
        for number in range(4, 7):
            log.append(b"%d" % number * 9_000)
        log.flush()
        disk.kill()
    with logcore.open("t-0", config={"index.interval.bytes": 1_000}, fs=disk) as log:
        assert log.host.writer.active.is_resumed
        assert log.recovery_report is not None
        assert log.recovery_report.cut_position is None
        assert 27_000 < log.recovery_report.checked_bytes < 28_500, (
            "only bytes above the recovery point"
        )
        assert [len(record.value or b"") for record in log.read(0)] == [500] * 3 + [
            9_000
        ] * 4
        assert log.append(b"next").offset == 7


def test_tail_removed_by_another_program_during_its_copy() -> None:
    data = encode([(None, b"kept")], leader_epoch=0)
    tail = b"tail" * 25

    class Shortened(SimulatedDisk):
        def pread(self, handle: int, size: int, position: int) -> bytes:
            is_copied = any(path.endswith(".quarantine") for path in self.files())
            return (
                b""
                if is_copied and position >= len(data)
                else super().pread(handle, size, position)
            )

    disk = Shortened({f"t-0/{LOG}": data + tail})
    with logcore.open("t-0", fs=disk) as log:
        assert log.recovery_report is not None
        assert (log.recovery_report.cut_position, log.recovery_report.cut_bytes) == (
            len(data),
            len(tail),
        )
        assert log.recovery_report.quarantine_path is not None
        assert disk.content(log.recovery_report.quarantine_path) == b""
        assert [record.value for record in log.read(0)] == [b"kept"]
        assert log.append(b"next").offset == 1


def test_durable_batch_removed_by_another_program_is_an_error() -> None:
    """The batch was durable, so that the bytes after it must not be treated as a mere
    torn tail.
    """
    data = b"".join(
        encode([(None, b"kept")], base_offset=number, leader_epoch=0)
        for number in range(3)
    )

    class Shortened(SimulatedDisk):
        is_tail_read = False

        def pread(self, handle: int, size: int, position: int) -> bytes:
            if self.is_tail_read:
                return b""
            self.is_tail_read = position == len(data)
            return super().pread(handle, size, position)

    disk = Shortened({f"t-0/{LOG}": data + b"torn", RECOVERY_POINT: b"0\n1\nt 0 3\n"})
    with pytest.raises(
        logcore.CorruptLogError, match="this batch was on disk"
    ) as caught:
        logcore.open("t-0", fs=disk)
    assert (caught.value.position, caught.value.offset) == (len(data) // 3 * 2, 2)
    assert disk.content(f"t-0/{LOG}") == data + b"torn"


def test_file_that_shrinks_while_it_is_copied_fails_the_open() -> None:
    """After a failed sync, recovery copies the valid part to a new file. A short copy
    must not replace the original.
    """

    class Shrinking(SimulatedDisk):
        def pread(self, handle: int, size: int, position: int) -> bytes:
            if any(path.endswith(".log.tmp") for path in self.files()):
                return b""
            return super().pread(handle, size, position)

    data = encode([(None, b"kept")], leader_epoch=0)
    disk = Shrinking({f"t-0/{LOG}": data, f"t-0/{FAILED_SYNC}": b""})
    with pytest.raises(logcore.StorageReadError, match="became shorter"):
        logcore.open("t-0", fs=disk)
    assert disk.files()[f"/t-0/{LOG}"] == data
    with logcore.open("t-0", fs=SimulatedDisk(disk.files())) as log:
        assert [record.value for record in log.read(0)] == [b"kept"]


def test_missing_segment_in_the_middle_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True, config={"segment.bytes": 250}) as log:
        for number in range(8):
            log.append(b"%d" % number * 32)
    middle = path / f"{2:020d}.log"
    # Deleted, and truncated at a batch boundary.
    for data in (
        None,
        middle.read_bytes()[:100],
    ):
        sound = middle.read_bytes()
        middle.unlink()
        if data is not None:
            middle.write_bytes(data)
        for read_only in (True, False):
            with logcore.open(path, read_only=read_only) as log:
                with pytest.raises(logcore.CorruptLogError, match="missing"):
                    list(log.read(0))
                with pytest.raises(logcore.CorruptLogError, match="missing"):
                    list(log.scan())
                assert [record.offset for record in log.read(4)] == [4, 5, 6, 7]
        middle.write_bytes(sound)
    with logcore.open(path) as log:
        assert len(list(log.read(0))) == 8


def test_truncation_inside_a_compaction_gap_keeps_the_offsets(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kafka-0"
    path.mkdir()
    rows = [(b"k", b"v")] * 5
    (path / LOG).write_bytes(
        encode(rows, leader_epoch=0) + encode(rows, base_offset=10, leader_epoch=0)
    )
    with logcore.open(path) as log:
        log.truncate(7)
        assert log.append(b"next").offset == 7
    with logcore.open(path) as log:
        assert [record.offset for record in log.read(0)] == [0, 1, 2, 3, 4, 7]
        assert log.log_end_offset == 8


# An impossible length, and one beyond the end of the file.
@pytest.mark.parametrize("length", [b"\xff", b"\x01"])
def test_truncation_does_not_discard_batches_after_damage(
    tmp_path: Path, length: bytes
) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(
        path, create=True, config={"index.interval.bytes": 1 << 20}
    ) as log:
        for number in range(100):  # more than the segment remembers the positions of
            log.append(b"%d" % number * 10)
        position = next(log.batches(3)).position
        with (path / LOG).open("r+b") as file:
            file.seek(position + 8)
            file.write(length)
        size = (path / LOG).stat().st_size
        with pytest.raises(logcore.CorruptBatchError):
            log.truncate(15)
        assert (path / LOG).stat().st_size == size


def test_quarantine_files_are_never_overwritten(tmp_path: Path) -> None:
    path = write_crashed_partition(tmp_path / "c-0", b"first tail")
    for tail in (b"second tail", b"third"):
        with logcore.open(path):
            pass
        with (path / LOG).open("ab") as file:
            file.write(tail)
    with logcore.open(path):
        pass
    quarantined = sorted(file.read_bytes() for file in path.glob("*.quarantine"))
    assert quarantined == [b"first tail", b"second tail", b"third"]


def test_zeros_before_data_are_quarantined_with_it(tmp_path: Path) -> None:
    data = write_killed_log(tmp_path / "w-0", [3])
    path = write_crashed_partition(tmp_path / "c-0", data + bytes(3 << 20) + b"data")
    with logcore.open(path) as log:
        assert log.recovery_report is not None
        assert log.recovery_report.quarantine_path is not None
        assert Path(log.recovery_report.quarantine_path).read_bytes().endswith(b"data")


def test_raised_offset_below_the_recovery_point_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kafka-0"
    path.mkdir()
    batches = [
        encode([(None, b"%d" % number)], base_offset=number, leader_epoch=0)
        for number in range(10)
    ]
    (path / LOG).write_bytes(b"".join(batches))
    with logcore.open(path):
        pass
    (path / "logcore.policy").unlink()  # the state that Kafka leaves
    data = bytearray((path / LOG).read_bytes())
    data[len(batches[0]) * 3 + 6] ^= 0x10
    (path / LOG).write_bytes(data)
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(path)
    assert (path / LOG).read_bytes() == data


def test_recovered_data_remains_durable_under_a_weaker_policy(
    tmp_path: Path,
) -> None:
    """The log was written under `always` and recovered by an opening under `os`, which
    was killed. Records that were durable before must still count as durable.
    """
    data = write_killed_log(tmp_path / "w-0", [30, 30, 30])
    path = write_crashed_partition(tmp_path / "c-0", data, policy="always")
    with logcore.open(path, durability="os"):
        killed = tmp_path / "killed"
        shutil.copytree(
            tmp_path, killed, ignore=shutil.ignore_patterns("killed", "w-0")
        )
    damaged_data = bytearray((killed / "c-0" / LOG).read_bytes())
    damaged_data[len(data) // 3 + 70] ^= 1
    (killed / "c-0" / LOG).write_bytes(damaged_data)
    with (
        logcore.open(killed / "c-0", read_only=True) as log,
        pytest.raises(logcore.CorruptBatchError),
    ):
        list(log.read(0))
    (killed / "c-0" / LOG).write_bytes(damaged_data[:-5])
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(killed / "c-0")


def write_damaged_log(
    path: Path, flips: list[int], *, size: int | None = None
) -> bytes:
    """Write five acknowledged batches under `always`, and flip a bit in some of them.
    Return the .log file.
    """
    data = bytearray(write_killed_log(path.parent / "w-0", [30] * 5))
    step = len(data) // 5
    for at in flips:
        data[at * step + 70] ^= 1
    write_crashed_partition(path, bytes(data[:size]), policy="always")
    (path.parent / RECOVERY_POINT).write_text(f"0\n1\n{path.name[:-2]} 0 5\n")
    return bytes(data[:size])


@pytest.mark.parametrize("flips", [[0], [2], [1, 2], [1, 3]])
def test_quarantine_opens_a_log_with_damage_in_the_middle(
    tmp_path: Path, flips: list[int]
) -> None:
    path = tmp_path / "d-0"
    data = write_damaged_log(path, flips)
    (tmp_path / RECOVERY_POINT).write_text("0\n1\nd 0 0\n")
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(path)
    with logcore.open(path, on_corruption="quarantine") as log:
        assert log.recovery_report is not None
        (damage,) = log.recovery_report.damage
        assert (damage.first_offset, damage.next_offset) == (flips[0], flips[-1] + 1)
        assert (damage.position, damage.reason) == (
            flips[0] * len(data) // 5,
            layout.WALK_REASONS[layout.WALK_CRC],
        )
        assert f"offsets from {flips[0]} to {flips[-1]}" in str(log.recovery_report)
        assert log.append(b"next").offset == 5
    for read_only in (False, True):
        with logcore.open(path, read_only=read_only) as log:
            for offset in range(6):
                if offset in flips:
                    with pytest.raises(logcore.CorruptBatchError):
                        next(log.read(offset))
                else:
                    assert next(log.read(offset)).offset == offset
            with pytest.raises(logcore.CorruptBatchError):
                list(log.read(0))
    assert (path / LOG).read_bytes() == data, "the damaged file is never written again"


# Below the recovery point, batch headers are checked.
@pytest.mark.parametrize(("point", "first"), [(0, 1), (5, 3)])
def test_quarantine_resumes_after_an_offset_that_decreased(
    tmp_path: Path, point: int, first: int
) -> None:
    path = tmp_path / "d-0"
    data = bytearray(write_damaged_log(path, [1]))
    step = len(data) // 5
    data[3 * step + 7] = (
        0  # in the base offset of the fourth batch, which no CRC covers
    )
    (path / LOG).write_bytes(data)
    (tmp_path / RECOVERY_POINT).write_text(f"0\n1\nd 0 {point}\n")
    with logcore.open(path, on_corruption="quarantine") as log:
        assert log.recovery_report is not None
        (damage,) = log.recovery_report.damage
        assert (damage.first_offset, damage.next_offset) == (first, 4)
        assert [next(log.read(offset)).offset for offset in (0, 4)] == [0, 4]
        for offset in (1, 3):
            with pytest.raises((logcore.CorruptBatchError, logcore.CorruptLogError)):
                next(log.read(offset))
        assert log.append(b"next").offset == 5
    assert (path / LOG).read_bytes() == data


@pytest.mark.parametrize("intact_count", [0, 3])
def test_log_that_lost_its_end_never_reuses_offsets(
    tmp_path: Path, intact_count: int
) -> None:
    path = tmp_path / "d-0"
    step = len(write_damaged_log(path, [])) // 5
    (path / LOG).write_bytes((path / LOG).read_bytes()[: intact_count * step + 20])
    data = (path / LOG).read_bytes()
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(path)
    with logcore.open(path, on_corruption="quarantine") as log:
        assert log.recovery_report is not None
        assert [damage.next_offset for damage in log.recovery_report.damage] == [None]
        assert log.log_end_offset == 5
        with pytest.raises(logcore.LogFailedError, match="logcore recover") as caught:
            log.append(b"next")
        assert isinstance(caught.value.__cause__, logcore.LogFailedError)
        assert isinstance(caught.value.__cause__.__cause__, logcore.CorruptLogError)
        assert [record.offset for record in log.read(0, intact_count)] == list(
            range(intact_count)
        )
        with pytest.raises((logcore.CorruptBatchError, logcore.CorruptLogError)):
            list(log.read(0))
        with pytest.raises((logcore.CorruptBatchError, logcore.CorruptLogError)):
            list(log.read(intact_count))
    assert (path / LOG).read_bytes() == data
    with pytest.raises(logcore.CorruptLogError):
        logcore.open(path)


def test_directory_with_a_log_that_failed_to_open_is_not_marked_clean() -> None:
    """Kafka would trust its indexes."""
    disk = SimulatedDisk(
        {f"b-0/{LOG}": b"", "recovery-point-offset-checkpoint": b"0\n1\nb 0 5\n"}
    )
    disk.put("/.kafka_cleanshutdown", b"{}")
    with logcore.open("a-0", create=True, fs=disk) as log:
        log.append(b"x")
    assert disk.exists("/.kafka_cleanshutdown")
    with logcore.open("a-0", fs=disk), pytest.raises(logcore.CorruptLogError):
        logcore.open("b-0", fs=disk)
    assert not disk.exists("/.kafka_cleanshutdown")


def test_failed_sync_during_open_is_recorded() -> None:
    """The next opening would otherwise read data from the page cache that is not on
    disk, and its own sync would succeed.
    """
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, durability="os", fs=disk)
    log.append(b"x")
    disk.kill()
    disk.faults = FaultPlan(Fault("fsync", path=f"*{LOG}"))
    with pytest.raises(logcore.StorageWriteError):
        logcore.open("t-0", durability="os", fs=disk)
    assert disk.exists(f"t-0/{FAILED_SYNC}")
    with logcore.open("t-0", durability="os", fs=disk) as log:
        visible_values = [record.value for record in log.read(0)]
        for crashed_disk in disk.after_crash(kind="power"):
            with logcore.open("t-0", fs=crashed_disk) as reopened:
                assert [record.value for record in reopened.read(0)] == visible_values


def many_batches(count: int) -> tuple[bytearray, int]:
    """Return more batches than one check covers, and the size of each."""
    batch = bytearray(encode([(None, b"x")], leader_epoch=0))
    data = bytearray()
    for number in range(count):
        batch[:8] = number.to_bytes(8, "big")
        data += batch
    return data, len(batch)


def test_torn_batch_above_the_recovery_point_is_truncated(
    tmp_path: Path,
) -> None:
    """The batch is above the recovery point whatever its offset is. It is therefore
    truncated, while damage below the recovery point would be an error.
    """
    data, size = many_batches(4_200)
    torn = bytearray(data[3 * size : 4 * size])
    torn[-1] ^= 1
    path = write_crashed_partition(tmp_path / "d-0", bytes(data + torn))
    (tmp_path / RECOVERY_POINT).write_text("0\n1\nd 0 4200\n")
    with logcore.open(path) as log:
        assert log.recovery_report is not None
        assert (log.recovery_report.cut_position, log.recovery_report.cut_bytes) == (
            len(data),
            size,
        )
        assert log.recovery_report.checked_bytes == size
        assert log.append(b"next").offset == 4_200


def test_damage_far_into_a_segment_is_reported_at_its_position(tmp_path: Path) -> None:
    (tmp_path / "orders-0").mkdir()
    data, size = many_batches(5_000)
    data[4_500 * size + 61] ^= 1
    (tmp_path / "orders-0" / LOG).write_bytes(data)
    (tmp_path / "orders-0" / f"{5_000:020d}.log").write_bytes(b"")
    with logcore.open(tmp_path / "orders-0", on_corruption="quarantine") as log:
        assert log.recovery_report is not None
        (damage,) = log.recovery_report.damage
        assert (damage.first_offset, damage.next_offset, damage.position) == (
            4_500,
            5_000,
            4_500 * size,
        )
        assert [record.offset for record in log.read(4_501, 4_503)] == [4_501, 4_502]


def test_missing_first_segments_are_an_error_or_quarantined(
    tmp_path: Path,
) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True, config={"segment.bytes": 250}) as log:
        for number in range(6):
            log.append(b"%d" % number * 32)
    (path / LOG).unlink()
    with pytest.raises(
        logcore.CorruptLogError, match="the first segments of the log are missing"
    ) as caught:
        logcore.open(path)
    assert caught.value.offset == 0
    with logcore.open(path, on_corruption="quarantine") as log:
        assert log.recovery_report is not None
        (damage,) = log.recovery_report.damage
        assert (damage.first_offset, damage.next_offset, damage.position) == (0, 2, 0)
        assert log.log_start_offset == 0, (
            "the log start moves only when records are deleted"
        )
        with pytest.raises(logcore.CorruptLogError):
            list(log.read(0))
        assert [record.offset for record in log.read(2)] == [2, 3, 4, 5]
        assert log.append(b"next").offset == 6


def test_quarantine_keeps_a_damaged_segment_before_the_last(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    with logcore.open(path, create=True, config={"segment.bytes": 250}) as log:
        for number in range(6):
            log.append(b"%d" % number * 32)
    (path.parent / RECOVERY_POINT).unlink()
    data = bytearray((path / LOG).read_bytes())
    data[80] ^= 1
    (path / LOG).write_bytes(data)
    with pytest.raises(logcore.CorruptLogError, match="middle"):
        logcore.open(path)
    with logcore.open_dir(tmp_path, on_corruption="quarantine") as logdir:
        log = logdir.partition("orders", 0)
        assert log.recovery_report is not None
        assert [
            (damage.first_offset, damage.next_offset)
            for damage in log.recovery_report.damage
        ] == [(0, 2)]
        assert [record.offset for record in log.read(2)] == [2, 3, 4, 5]
        with pytest.raises(logcore.CorruptBatchError):
            list(log.read(0))
        assert log.append(b"next").offset == 6
    with pytest.raises(logcore.InvalidConfigError, match="'fail' or 'quarantine'"):
        logcore.open(path, on_corruption="ignore")  # type: ignore[arg-type]
