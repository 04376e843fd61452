"""Retention: which segments at the start of a log are deleted, when, and which are
always kept.

The rules are pure functions and are tested as such. P30 to P35 are the properties of
the reliability reference.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore import retention
from logcore.cleaner import clean
from logcore.config import LogConfig
from logcore.directory.maintenance import MaintenanceConfig
from logcore.log import Log
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import CHECKSUMS_VALID
from logcore.partition import epochs
from logcore.partition.schedule import RETIRED_AT_ONCE
from logcore.partition.segment_files import UNLINK_MS
from logcore.recordbatch import encode
from logcore.retention import (
    PartitionFacts,
    SegmentFacts,
    hold_for,
    kafka_rules,
    to_fit,
)
from logcore.testing import SimulatedDisk

T0 = 1_700_000_000_000
MINUTE_MS = 60_000
SMALL: dict[str, Any] = {"segment.bytes": 300, "retention.ms": 3_600_000}


def facts_of(
    sizes: list[int],
    times: list[int],
    *,
    log_start: int = 0,
    high_watermark: int | None = None,
    **config: Any,
) -> Any:
    segments = [
        SegmentFacts(
            base_offset=10 * index,
            end_offset=10 * index + 10,
            size_bytes=size,
            largest_timestamp=time,
        )
        for index, (size, time) in enumerate(zip(sizes, times, strict=True))
    ]
    return PartitionFacts(
        segments=segments,
        log_start=log_start,
        high_watermark=10 * len(sizes) if high_watermark is None else high_watermark,
        now_ms=1_000,
        config=LogConfig.parse(
            {
                "retention.ms": -1,
                **{name.replace("_", "."): value for name, value in config.items()},
            }
        ),
    )


@pytest.mark.parametrize(
    ("partition", "count"),
    [
        (facts_of([9, 9, 9], [0, 0, 0]), 0),
        (facts_of([9, 9, 9], [0, 0, 0], retention_ms=999), 3),
        (facts_of([9, 9, 9], [0, 0, 0], retention_ms=1000), 0),
        (facts_of([9, 9, 9], [0, 999, 0], retention_ms=500), 1),
        # An empty active segment is never deleted.
        (facts_of([9, 9, 0], [0, 0, 0], retention_ms=1), 2),
        (facts_of([9, 0, 9], [0, 0, 0], retention_ms=1), 3),
        (facts_of([9, 9, 9], [0, 0, 0], retention_ms=1, high_watermark=19), 1),
        # A timestamp in the future keeps all later segments.
        (facts_of([9, 9, 9], [9999, 0, 0], retention_ms=1), 0),
        (facts_of([9, 9, 9], [0, 0, 0], retention_bytes=18), 1),
        (facts_of([9, 9, 9], [0, 0, 0], retention_bytes=19), 0),
        (facts_of([9, 9, 9], [0, 0, 0], retention_bytes=0), 3),
        (facts_of([9, 9, 9], [0, 0, 0], log_start=20), 2),
        (facts_of([9, 9, 9], [0, 0, 0], log_start=19), 1),
        (facts_of([9, 9, 9], [0, 0, 0], log_start=30), 2),
        (
            facts_of(
                [9, 9, 9],
                [0, 0, 0],
                log_start=10,
                retention_ms=1,
                cleanup_policy="compact",
            ),
            1,
        ),
        (
            facts_of(
                [9, 9, 9], [0, 0, 0], retention_ms=1, cleanup_policy="compact,delete"
            ),
            3,
        ),
    ],
)
def test_P31_P32_kafka_rules_count_deletable_segments(
    partition: PartitionFacts, count: int
) -> None:
    assert kafka_rules(partition) == count


def test_hold_for_keeps_records_until_groups_have_committed_them() -> None:
    uncommitted = facts_of([9, 9, 9], [0, 0, 0], retention_ms=1)
    assert hold_for("billing")(uncommitted) == 0, (
        "a group without commits keeps all segments"
    )
    committed = attrs.evolve(uncommitted, committed={"billing": 25, "audit": 12})
    assert hold_for("billing")(committed) == 2
    assert hold_for("billing", "audit")(committed) == 1
    assert hold_for("billing", policy=lambda facts: 1)(committed) == 1
    assert (
        hold_for("billing")(attrs.evolve(committed, log_start=20, committed={})) == 2
    ), "segments below the log start are deleted without a commit"


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2)),
        st.lists(
            st.tuples(st.integers(1, 50), st.integers(0, 100)), min_size=1, max_size=5
        ),
        max_size=4,
    ),
    st.integers(0, 300),
)
def test_to_fit_deletes_only_the_oldest_segments(partitions: Any, excess: int) -> None:
    partition_facts = {
        key: facts_of([size for size, _ in rows], [time for _, time in rows])
        for key, rows in partitions.items()
    }
    chosen = to_fit(partition_facts, excess)
    deleted = sum(
        size for key, count in chosen.items() for size, _ in partitions[key][:count]
    )
    deletable = sum(size for rows in partitions.values() for size, _ in rows[:-1])
    assert deleted >= min(excess, deletable)
    if chosen:
        newest_deleted = max(
            max(time for _, time in partitions[key][:count])
            for key, count in chosen.items()
        )
        oldest_remaining = [
            max(time for _, time in rows[: chosen.get(key, 0) + 1])
            for key, rows in partitions.items()
            if chosen.get(key, 0) < len(rows) - 1
        ]
        assert all(time >= newest_deleted for time in oldest_remaining)


def fill_log(disk: SimulatedDisk, records: int = 20, **config: Any) -> Log:
    log = logcore.open(
        "t-0", create=True, config={**SMALL, **config}, fs=disk, durability="os"
    )
    for number in range(records):
        log.append(b"%d" % number * 40, timestamp_ms=disk.now_ms() + number)
    return log


def test_P30_P33_log_start_is_saved_before_whole_segments_are_deleted() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk, **{"retention.bytes": 700}) as log:
        assert len(log._state.segments) > 4
        bases = [segment.base_offset for segment in log._state.segments]
        moves: list[tuple[str, int]] = []

        def observe(operation: str, is_done: bool) -> None:
            if is_done and operation == "rename":
                start = checkpoint.read_offsets(disk, ".", checkpoint.LOG_START).get(
                    ("t", 0), 0
                )
                deleted = [
                    name for name in disk.files() if name.endswith(".log.deleted")
                ]
                moves.extend((name, start) for name in deleted)

        disk.observer = observe
        count = log.retain()
        disk.observer = None
        assert count > 0
        assert log.log_start_offset == bases[count]
        assert moves and all(start == bases[count] for _, start in moves)
        assert [record.offset for record in log.read(log.log_start_offset)] == list(
            range(bases[count], 20)
        )
        assert log.statistics().size_bytes >= 700


def test_active_segment_is_deleted_only_after_a_roll() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk) as log:
        disk.advance(2 * 3_600_000)
        assert log.retain() > 0
        assert (log.log_start_offset, log.log_end_offset) == (20, 20)
        assert log.retain() == 0
        assert log.append(b"on").offset == 20
    with logcore.open("t-0", config=SMALL, fs=disk) as log:
        assert [record.offset for record in log.read(20)] == [20]


def test_P34_readers_of_deleted_segments_continue(tmp_path: Path) -> None:
    with logcore.open(
        tmp_path / "t-0", create=True, config={**SMALL, "file.delete.delay.ms": 0}
    ) as log:
        for number in range(20):
            log.append(b"%d" % number * 40)
        streams = [log.read(0) for _ in range(5)]
        for index, stream in enumerate(streams):
            for _ in range(index * 4):
                next(stream)
        log.retain(policy=lambda facts: 99)
        log.tick()
        assert not list((tmp_path / "t-0").glob("*.deleted"))
        assert [len(list(stream)) for stream in streams] == [20, 16, 12, 8, 4]


@pytest.mark.parametrize("reason", ["deleted", "compacted"])
def test_deleted_files_are_kept_for_file_delete_delay_ms(reason: str) -> None:
    disk = SimulatedDisk()
    config = {**SMALL, "file.delete.delay.ms": 1_000, "cleanup.policy": "compact"}
    with logcore.open("t-0", create=True, config=config, fs=disk) as log:
        for number in range(20):
            log.append(b"%d" % number * 40, key=b"k")
        log.delete_records(10) if reason == "deleted" else clean(log)
        renamed = {
            path
            for path in disk.files()
            if path.endswith(".deleted") and CHECKSUMS_VALID not in path
        }
        assert {path.rpartition(".log.")[2] for path in renamed} >= {"deleted"}
        for wait_ms in (0, 999):
            disk.advance(wait_ms)
            log.tick()
            assert renamed <= set(disk.files())
        disk.advance(1)
        assert log.tick()
        assert not renamed & set(disk.files())


@pytest.mark.parametrize(
    "after_ms",
    [retention.FIRST_CHECK_MS, retention.FIRST_CHECK_MS + retention.CHECK_MS],
)
def test_tick_applies_retention_after_half_a_minute_and_every_five_minutes(
    after_ms: int,
) -> None:
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk, **{"segment.ms": 1 << 40, "retention.ms": -1}) as log:
        if after_ms > retention.FIRST_CHECK_MS:
            disk.advance(retention.FIRST_CHECK_MS)
            log.tick()
            after_ms -= retention.FIRST_CHECK_MS
        log.reconfigure({**SMALL, "segment.ms": 1 << 40, "retention.ms": 0})
        disk.advance(after_ms - 1)
        log.tick()
        assert log.log_start_offset == 0
        disk.advance(1)
        log.tick()
        assert log.log_start_offset == 20


@pytest.mark.parametrize("closes", [True, False])
def test_producers_outlive_their_batches(closes: bool) -> None:
    """The snapshot of a roll contains all producers, also those that have not appended
    since the log was opened.
    """
    disk = SimulatedDisk()
    batch = encode(
        [(b"k", b"v", (), disk.now_ms())],
        producer_id=7,
        producer_epoch=0,
        base_sequence=4,
    )
    log = logcore.open("t-0", create=True, fs=disk)
    log.append_batch(batch)
    log.flush()
    if closes:
        log.close()
    else:
        disk.kill()
    with logcore.open("t-0", fs=disk) as log:
        log.append(b"no producer")
        log.roll()
        log.delete_records(2)
    for path in [path for path in disk.files() if path.endswith(f"{1:020d}.snapshot")]:
        disk.put(path, None)  # the snapshot of the close, if there was one
    with logcore.open("t-0", fs=disk) as log:
        assert log.append_batch(batch).offset == 0, "a duplicate"
        with pytest.raises(logcore.OutOfOrderSequenceError):
            log.append_batch(
                encode([(b"k", b"v")], producer_id=7, producer_epoch=0, base_sequence=6)
            )
        for sequence in range(5, 9):
            log.append_batch(
                encode(
                    [(b"k", b"v")],
                    producer_id=7,
                    producer_epoch=0,
                    base_sequence=sequence,
                )
            )
            log.roll()
        log.delete_records(5)
    snapshots = [
        path.rpartition("/")[2] for path in disk.files() if path.endswith(".snapshot")
    ]
    assert sorted(snapshots) == [f"{offset:020d}.snapshot" for offset in (5, 6)], (
        "snapshots of the existing segments and of the log end"
    )


@pytest.mark.parametrize("jump_ms", [2 * 3_600_000, 90 * 86_400_000, -90 * 86_400_000])
def test_P35_clock_change_deletes_nothing(
    jump_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk) as log:
        steady_now_ms = disk.now_ms
        monkeypatch.setattr(disk, "now_ms", lambda: steady_now_ms() + jump_ms)
        disk.advance(retention.FIRST_CHECK_MS)
        log.tick()
        assert log.log_start_offset == 0
        monkeypatch.setattr(disk, "now_ms", steady_now_ms)
        disk.advance(retention.CHECK_MS)
        log.tick()
        assert log.log_start_offset == 0


def test_tick_deletes_expired_segments() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with fill_log(disk, **{"segment.ms": 1 << 40}) as log:
        for _ in range(11):
            disk.advance(5 * MINUTE_MS)
            log.tick()
        assert log.log_start_offset == 0
        for _ in range(3):
            disk.advance(5 * MINUTE_MS)
            log.tick()
        assert log.log_start_offset == 20


def log_of_segments(disk: SimulatedDisk, count: int) -> Log:
    """Create a log with more than `count` segments, all of which retention deletes."""
    config = {"segment.bytes": 300, "retention.bytes": 0, "file.delete.delay.ms": 0}
    log = logcore.open("t-0", create=True, config=config, fs=disk)
    while log.statistics().segments <= count:
        log.append(b"x" * 60)
    return log


def names_with(disk: SimulatedDisk, suffix: str) -> int:
    return sum(name.endswith(suffix) for name in disk.listdir("t-0"))


def test_tick_removes_a_limited_number_of_segments() -> None:
    """Appends to the log wait while the files are renamed and deleted."""
    disk = SimulatedDisk(now_ms=T0)
    with log_of_segments(disk, 3 * RETIRED_AT_ONCE) as log:
        disk.advance(retention.FIRST_CHECK_MS)
        for _ in range(3):
            before = log.statistics().segments
            log.tick()
            assert log.statistics().segments == before - RETIRED_AT_ONCE
        log.tick()
        assert log.statistics().segments == 1
        while log.tick():
            pass
        assert log.host.maintenance.next_due_ms() > disk.monotonic_ms()


def test_tick_syncs_while_retention_continues() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with log_of_segments(disk, 2 * RETIRED_AT_ONCE) as log:
        log.append(b"v", durability="os")
        assert log.durable_end_offset < log.log_end_offset
        disk.advance(retention.FIRST_CHECK_MS)
        log.tick()
        assert log.statistics().segments > 1
        assert log.durable_end_offset == log.log_end_offset


def test_tick_deletes_files_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting 1,200 files at once delayed appends by a second."""
    disk = SimulatedDisk(now_ms=T0)
    unlink = disk.unlink

    def unlink_slowly(path: str) -> None:
        unlink(path)
        disk.advance(1)

    with log_of_segments(disk, 4 * UNLINK_MS) as log:
        log.retain()
        remaining = names_with(disk, ".deleted")
        assert remaining > 3 * UNLINK_MS
        monkeypatch.setattr(disk, "unlink", unlink_slowly)
        while remaining:
            assert log.tick()
            deleted = remaining - names_with(disk, ".deleted")
            assert deleted == min(remaining, UNLINK_MS)
            remaining -= deleted
        monkeypatch.undo()


def test_retention_lists_the_directory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing for each segment took 0.3 s in a log of 300 segments."""
    disk = SimulatedDisk(now_ms=T0)
    listed: list[str] = []
    list_names = disk.listdir

    def listdir(path: str) -> list[str]:
        listed.append(path)
        return list_names(path)

    with log_of_segments(disk, 20) as log:
        monkeypatch.setattr(disk, "listdir", listdir)
        assert log.retain() > 10
        monkeypatch.undo()
    assert len(listed) == 1


def test_epochs_follow_the_log_start(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True, config=SMALL) as log:
        for epoch in range(4):
            log.begin_epoch(epoch)
            for _ in range(5):
                log.append(b"v" * 50)
        assert [log.end_of_epoch(epoch) for epoch in range(5)] == [
            (0, 5),
            (1, 10),
            (2, 15),
            (3, 20),
            (-1, -1),
        ]
        assert {batch.partition_leader_epoch for batch in log.batches(10)} == {2, 3}
        log.delete_records(12)
        assert checkpoint.read_epochs(logcore.fs.OS, str(tmp_path / "t-0")) == [
            (2, 12),
            (3, 15),
        ]
        assert log.truncate_to_epoch(2, 14) == 14
        assert log.leader_epoch == 2
        with pytest.raises(logcore.OffsetOutOfRangeError, match="epoch"):
            log.begin_epoch(1)
    (tmp_path / "t-0" / checkpoint.LEADER_EPOCH).write_text("garbage")
    with logcore.open(tmp_path / "t-0", config=SMALL) as log:
        assert log.leader_epoch == 2, "read from the batches"


@pytest.mark.parametrize(
    ("epoch", "end", "expected"),
    [
        (0, 4, 3),
        (0, 2, 2),
        (1, 9, 6),
        (1, 4, 4),
        (5, 9, 6),
        (5, 7, 6),
        (-1, 4, 4),
        (-1, 9, 6),
    ],
)
def test_truncate_to_epoch_uses_the_smaller_epoch_end(
    epoch: int, end: int, expected: int
) -> None:
    with logcore.open("t-0", create=True, fs=SimulatedDisk()) as log:
        for own_epoch in range(
            2
        ):  # epoch 0 ends at 3, and epoch 1 at the end of the log
            log.begin_epoch(own_epoch)
            log.append_many([(None, b"v")] * 3)
        assert log.truncate_to_epoch(epoch, end) == log.log_end_offset == expected


entries = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 100)), max_size=8).map(
    lambda rows: list(
        zip(
            sorted({epoch for epoch, _ in rows}),
            sorted(start for _, start in rows),
            strict=False,
        )
    )
)


@given(entries, st.integers(0, 25), st.integers(0, 110))
def test_epoch_functions_match_their_definition(
    known_entries: list[tuple[int, int]], epoch: int, offset: int
) -> None:
    assigned = epochs.assign(known_entries, epoch, offset)
    for changed_entries in (
        assigned,
        epochs.truncate_end(known_entries, offset),
        epochs.truncate_start(known_entries, offset),
    ):
        assert all(
            earlier[0] < later[0] and earlier[1] <= later[1]
            for earlier, later in itertools.pairwise(changed_entries)
        )
    if not known_entries or epoch > known_entries[-1][0]:
        assert assigned[-1] == (epoch, offset)
    assert all(
        start < offset for _, start in epochs.truncate_end(known_entries, offset)
    )
    current_epochs = [number for number, start in known_entries if start <= offset]
    if current_epochs:
        assert epochs.truncate_start(known_entries, offset)[0] == (
            current_epochs[-1],
            offset,
        )
    found_epoch, end = epochs.end_of(known_entries, epoch, 1000)
    later_starts = [start for number, start in known_entries if number > epoch]
    if known_entries and epoch <= known_entries[-1][0]:
        assert end == (later_starts[0] if later_starts else 1000)
        assert found_epoch == max(
            [number for number, _ in known_entries if number <= epoch], default=epoch
        )
    else:
        assert (found_epoch, end) == (-1, -1)


# -- a directory -----------------------------------------------------------------------


def open_directory(disk: SimulatedDisk, **maintenance: Any) -> logcore.LogDir:
    return logcore.open_dir(
        "d",
        create=True,
        fs=disk,
        durability="os",
        maintenance=MaintenanceConfig(**maintenance),
    )


def test_directory_remains_within_its_size_limit() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with open_directory(disk, max_bytes=3000) as logdir:
        logdir.create_topic("a", partitions=2, config={"segment.bytes": 300})
        logdir.create_topic(
            "kept", config={"segment.bytes": 300, "cleanup.policy": "compact"}
        )
        for number in range(30):
            for name, partition in (("a", 0), ("a", 1), ("kept", 0)):
                logdir.partition(name, partition).append(
                    b"x" * 60, key=b"%d" % number, timestamp_ms=T0 + number
                )
            disk.advance(1_000)
            logdir.tick()
        sizes = [
            logdir.size_bytes("a", 0),
            logdir.size_bytes("a", 1),
            logdir.size_bytes("kept", 0),
        ]
        assert sizes[2] > 3000, "no record is deleted from a compacted topic"
        assert all(0 < size <= 700 for size in sizes[:2]), sizes
        assert [
            record.offset for record in logdir.partition("kept", 0).read(0)
        ] == list(range(30))


def test_appends_are_refused_before_the_disk_is_full() -> None:
    disk = SimulatedDisk(now_ms=T0, capacity_bytes=36_384)
    with open_directory(disk, min_free_bytes=10_000, max_bytes=None) as logdir:
        logdir.create_topic("a", config={"segment.bytes": 600})
        log = logdir.partition("a", 0)
        with pytest.raises(logcore.DiskFullError, match="min_free_bytes"):
            for _ in range(400):
                log.append(b"x" * 100)
                disk.advance(1_000)
                logdir.tick()
        assert disk.free_bytes("/") > 9_000
        end = log.log_end_offset
        assert len(list(log.read(0))) == end
        log.delete_records(end)
        for _ in range(70):
            disk.advance(1_000)
            logdir.tick()
        assert log.append(b"room again").offset == end


def test_tick_applies_retention_to_unopened_partitions() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with open_directory(disk) as logdir:
        logdir.create_topic(
            "a", partitions=3, config={"segment.bytes": 300, "retention.ms": MINUTE_MS}
        )
        for partition in range(3):
            for _ in range(9):
                logdir.partition("a", partition).append(b"x" * 60)
    with open_directory(disk) as logdir:
        for _ in range(8):
            disk.advance(MINUTE_MS // 2)
            logdir.tick()
        assert [
            logdir.partition("a", partition).log_start_offset for partition in range(3)
        ] == [
            9,
            9,
            9,
        ]


def test_retention_without_a_setting_keeps_all_records() -> None:
    """A directory with Kafka's defaults must not delete the records of a log created by
    logcore.open.
    """
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open(
        "d/found-0", create=True, config={"segment.bytes": 300}, fs=disk
    ) as log:
        for _ in range(9):
            log.append(b"x" * 60, timestamp_ms=5)
        assert log.config.retention_ms == -1
        disk.advance(retention.CHECK_MS)
        log.tick()
        assert log.log_start_offset == 0
    with open_directory(disk) as logdir:
        logdir.create_topic("made", config={"segment.bytes": 300})
        for _ in range(9):
            logdir.partition("made", 0).append(b"x" * 60, timestamp_ms=5)
        logdir.alter_topic("found", {"segment.bytes": 400})
        logdir.add_partitions("found", 2)
        logdir.fork("found", None, "forked")
        assert logdir.describe_topic("forked").config.retention_ms == -1
        assert logdir.describe_topic("made").config.retention_ms == 7 * 86_400_000
        assert logdir.describe_topic("found").config.retention_ms == -1
        for _ in range(20):
            disk.advance(MINUTE_MS)
            logdir.tick()
        assert logdir.partition("made", 0).log_start_offset == 9
        assert logdir.partition("found", 0).log_start_offset == 0
        logdir.alter_topic("found", {"retention.ms": MINUTE_MS})
        for _ in range(20):
            disk.advance(MINUTE_MS)
            logdir.tick()
        assert logdir.partition("found", 0).log_start_offset == 9, (
            "retention is now set explicitly"
        )


def test_tick_compacts_the_dirtiest_log_and_skips_a_damaged_one() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with open_directory(disk) as logdir:
        logdir.create_topic(
            "a",
            partitions=3,
            config={"segment.bytes": 300, "cleanup.policy": "compact"},
        )
        for partition in range(3):
            for number in range(40 + 40 * partition):
                logdir.partition("a", partition).append(
                    b"%d" % number * 9, key=b"k%d" % (number % 3)
                )
        damaged_file = next(
            name for name in disk.files() if "a-1" in name and name.endswith(".log")
        )
        handle = disk.open(damaged_file, write=True)
        disk.pwrite(handle, b"\xff", 100)
        disk.close(handle)
        for _ in range(400):
            disk.advance(1_000)
            logdir.tick()
        batch_counts = [
            len(list(logdir.partition("a", partition).batches(0)))
            for partition in (0, 2)
        ]
        assert all(count < 12 for count in batch_counts), batch_counts
        with pytest.raises(logcore.CorruptBatchError):
            list(logdir.partition("a", 1).read(0))
        assert logdir.partition("a", 1).append(b"on", key=b"k").offset == 80


@pytest.mark.parametrize(
    ("own_us", "passed_ms", "continues"),
    [
        (0, 0, True),
        # The time of other threads does not count.
        (4_999, 400, True),
        (5_000, 5, True),  # no other thread used the processor
        (20_000, 24, True),
        (20_000, 25, False),  # other work of this directory is waiting
        (5_000, 8, False),
        (20_000, 400, False),
    ],
)
def test_compaction_budget_counts_the_cpu_time_of_its_thread(
    monkeypatch: pytest.MonkeyPatch, own_us: int, passed_ms: int, continues: bool
) -> None:
    """With wall time, a round of 0.3 s took up to 19 s on a busy machine."""
    disk = SimulatedDisk(now_ms=T0)
    with open_directory(disk) as logdir:
        disk.advance(passed_ms)
        monkeypatch.setattr(disk, "thread_us", lambda: 77 + own_us)
        assert logdir._maintenance._may_clean(0, 77) is continues


def test_round_continues_while_other_threads_use_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimulatedDisk(now_ms=T0)
    with open_directory(disk, compaction_backoff_ms=0) as logdir:
        logdir.create_topic(
            "a", config={"segment.bytes": 300, "cleanup.policy": "compact"}
        )
        log = logdir.partition("a", 0)
        for number in range(400):
            log.append(b"%d" % number * 9, key=b"k%d" % (number % 3))
        used_us = [0]

        # Each step uses 0.1 ms of 10 ms. Other threads use the other 9.9 ms.
        def thread_us() -> int:
            used_us[0] += 100
            disk.advance(10)
            return used_us[0]

        monkeypatch.setattr(disk, "thread_us", thread_us)
        ticks = 0
        while len(list(log.batches(0))) > 20 and ticks < 100:
            logdir.tick()
            ticks += 1
        assert ticks < 30, "if it counted wall time, each tick would do one step"


def test_compaction_respects_its_rate_limit() -> None:
    disk = SimulatedDisk(now_ms=T0)
    config = {"segment.bytes": 40_000, "cleanup.policy": "compact"}
    with open_directory(disk, compaction_bytes_per_s=200_000) as logdir:
        logdir.create_topic("a", config=config)
        log = logdir.partition("a", 0)
        for number in range(40_000 * 30 // 1100):
            log.append(b"%d" % number * 200, key=b"k%d" % (number % 3))
        size_bytes = logdir.size_bytes("a", 0)
        seconds = 0
        disk.advance(15_000)
        while logdir.size_bytes("a", 0) > size_bytes // 2 and seconds < 200:
            disk.advance(1_000)
            logdir.tick()
            seconds += 1
        assert size_bytes / 200_000 < seconds < 200, (size_bytes, seconds)


@pytest.mark.parametrize(
    "config", [{"max_bytes": -1}, {"min_free_bytes": -1}, {"compaction_bytes_per_s": 0}]
)
def test_invalid_maintenance_config_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(logcore.InvalidConfigError, match=next(iter(config))):
        MaintenanceConfig(**config)


def test_new_records_with_old_timestamps_do_not_roll_at_each_tick() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open(
        "t-0", create=True, config={"segment.ms": MINUTE_MS}, durability="os", fs=disk
    ) as log:
        for _ in range(20):
            log.append(b"v", timestamp_ms=5)
            disk.advance(1_000)
            log.tick()
        assert log.statistics().segments == 1
        disk.advance(MINUTE_MS)
        log.tick()
        assert log.statistics().segments == 2


@pytest.mark.parametrize("damage", ["cut", "zeros"])
def test_truncated_time_index_deletes_no_young_records(damage: str) -> None:
    """The file is damaged after a clean close, so that opening uses the indexes as they
    are.
    """
    hour_ms = 3_600_000
    disk = SimulatedDisk()
    now_ms = disk.now_ms()
    with logcore.open_dir(
        "/d", create=True, fs=disk, config={"index.interval.bytes": 0}
    ) as logdir:
        logdir.create_topic("t", config={"retention.ms": 48 * hour_ms})
        for hours in (100, 100, 90, 95, 1, 92, 92, 92):
            logdir.partition("t", 0).append(
                b"x" * 40, timestamp_ms=now_ms - hours * hour_ms
            )
    path = f"/d/t-0/{0:020d}.timeindex"
    content = disk.files()[path]
    assert content
    files = {
        **disk.files(),
        path: content[:-12] + (b"" if damage == "cut" else bytes(12)),
    }
    with logcore.open_dir("/d", fs=SimulatedDisk(files)) as logdir:
        log = logdir.partition("t", 0)
        assert log.host.writer.active.is_resumed
        assert log.retain() == 0
        assert log.offset_for_timestamp(now_ms - 2 * hour_ms) == 4
        assert log.newest() == (4, now_ms - hour_ms)


@pytest.mark.parametrize("checkpoint_content", [None, b"", b"\0" * 20, b"0\n0\n"])
def test_log_without_its_log_start_checkpoint_is_not_damaged(
    checkpoint_content: bytes | None,
) -> None:
    """The checkpoint is a cache. Without it, the log starts at its first segment."""
    disk = SimulatedDisk()
    with logcore.open(
        "/data/t-0", create=True, config={"segment.bytes": 200}, fs=disk
    ) as log:
        for number in range(20):
            log.append(b"x" * 50, timestamp_ms=number)
        log.delete_records(10)
        first = log.host.maintenance.facts().segments[0].base_offset
        assert first > 0
    files = {
        path: content
        for path, content in disk.files().items()
        if not path.endswith(checkpoint.LOG_START)
    }
    if checkpoint_content is not None:
        files[f"/data/{checkpoint.LOG_START}"] = checkpoint_content
    with logcore.open("/data/t-0", read_only=True, fs=SimulatedDisk(files)) as log:
        assert log.log_start_offset == first
    with logcore.open("/data/t-0", fs=SimulatedDisk(files)) as log:
        assert log.log_start_offset == first
        assert [record.timestamp_ms for record in log.read(first)] == [
            *range(first, 20)
        ]
