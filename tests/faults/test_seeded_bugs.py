"""Seeded bugs: a test changes the log so that it breaks one rule, and the exploration of
its disks must find the bug. It must find no bug in the unchanged log.

Each bug breaks one rule of writing or of recovery, and must be found within a minute.
Each bug has a number in a list of bugs that the tests must find. B10 to B12, B41 and
B44 are in tests/log/test_compaction_crashes.py, B37 and B38 in
tests/faults/test_processes.py. These bugs have no test:
- B17: a segment is synced before the next one is created. If the disk reports a sync
  that it did not make, readers raise an error at the gap.
- B45: committed offsets are stored in a log. There is no file of offsets.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import logcore
from logcore import cleaner
from logcore.fs import OsFS
from logcore.index import OffsetIndex, TimeIndex
from logcore.log import Log
from logcore.metadata import checkpoint
from logcore.partition import (
    aborted_transactions,
    epochs,
    gaps,
    opening,
    producers,
    recovery,
    scan,
)
from logcore.partition.group_commit import GroupCommit
from logcore.partition.order import NEVER
from logcore.partition.producer_state import ProducerState
from logcore.partition.recovery import Action
from logcore.partition.writer import Writer
from logcore.segment import ActiveSegment, Segment
from logcore.testing import (
    Fault,
    FaultPlan,
    FoundLog,
    LogHistory,
    SimulatedDisk,
)
from logcore.testing.oracle import check_memory
from support.exploring import (
    PLAIN_ACTIONS,
    TRANSACTION_ACTIONS,
    explore_program,
    is_log,
    run_with_fault,
)
from support.programs import (
    COMPACTED,
    CONFIG,
    FAILING_OPERATIONS,
    POLICIES,
    Program,
    Recoveries,
    SharedCaches,
)
from support.seeded_recovery_bug import recover_from_memory

Seeder = Callable[[pytest.MonkeyPatch], None]


class SkippingDisk(SimulatedDisk):
    """A disk that skips some calls, as if the program did not make them."""

    def __init__(self, skips: Callable[[SimulatedDisk, str, str], bool]) -> None:
        super().__init__()
        self.skips = skips

    def fdatasync(self, handle: int) -> None:
        if not self.skips(self, "fdatasync", self._handles[handle][1]):
            super().fdatasync(handle)

    def fsync(self, handle: int) -> None:
        if not self.skips(self, "fsync", self._handles[handle][1]):
            super().fsync(handle)

    def sync_dir(self, path: str) -> None:
        if not self.skips(self, "sync_dir", path):
            super().sync_dir(path)

    def unlink(self, path: str) -> None:
        if not self.skips(self, "unlink", path):
            super().unlink(path)


def has_run(disk: SimulatedDisk, count: int, *operations: str) -> bool:
    """Return whether one of the last `count` operations is one of `operations`."""
    return any(operation.name in operations for operation in disk.operations[-count:])


SKIPPED_CALLS: dict[str, Callable[[SimulatedDisk, str, str], bool]] = {
    "B01 acknowledged before fdatasync": lambda disk, name, path: name == "fdatasync",
    "B03 no sync_dir at create": lambda disk, name, path: (
        name == "sync_dir" and path == "/t-0" and has_run(disk, 3, "create")
    ),
    "B04 no sync_dir of the parent at mkdir": lambda disk, name, path: (
        name == "sync_dir"
        and path == "/"
        and not any(
            operation.name == "rename" and operation.path.count("/") == 1
            for operation in disk.operations[-2:]
        )
    ),
    "B05 old segment not synced at roll": lambda disk, name, path: (
        name == "fsync" and is_log(path)
    ),
    "B08 temporary file not synced": lambda disk, name, path: (
        name == "fsync" and path.endswith(".tmp")
    ),
    "B09 no sync_dir after rename": lambda disk, name, path: (
        name == "sync_dir" and has_run(disk, 1, "rename")
    ),
    "B33 clean shutdown marker not removed": lambda disk, name, path: (
        name == "unlink" and path.endswith("cleanshutdown")
    ),
}


def b02_acknowledged_before_write(patch: pytest.MonkeyPatch) -> None:
    delayed: list[tuple[Any, ...]] = []

    def pwrite(disk: SimulatedDisk, handle: int, data: Any, position: int) -> None:
        if disk.observer is not None and is_log(disk._handles[handle][1]):
            delayed.append((disk, handle, bytes(data), position))
            if len(delayed) < 2:
                return
            disk, handle, data, position = delayed.pop(0)
        original(disk, handle, data, position)

    original = SimulatedDisk.pwrite
    patch.setattr(SimulatedDisk, "pwrite", pwrite)


def b06_recovery_point_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Writer,
        "save_recovery_point_locked",
        lambda self: self.set_checkpoint(checkpoint.RECOVERY_POINT, self.state.end),
    )


def b07_checkpoint_in_place(patch: pytest.MonkeyPatch) -> None:
    def write(fs: Any, directory: str, name: str, content: bytes) -> None:
        handle = fs.open(f"{directory}/{name}", write=True, create=True)
        fs.truncate(handle, 0)
        fs.pwrite(handle, content, 0)
        fs.fsync(handle)
        fs.close(handle)
        fs.sync_dir(directory)

    patch.setattr(checkpoint, "write", write)


def b13_recovery_trusts_the_size(patch: pytest.MonkeyPatch) -> None:
    def accept_all(
        segment: Any, start: int, stop: int, **options: Any
    ) -> tuple[None, int]:
        original(segment, start, stop, **options)
        return None, 0

    original = recovery._index_valid_batches
    patch.setattr(recovery, "_index_valid_batches", accept_all)


def b14_no_crc_check(patch: pytest.MonkeyPatch) -> None:
    original = recovery._index_valid_batches
    patch.setattr(
        recovery,
        "_index_valid_batches",
        lambda *args, crc, dense_from: original(
            *args, crc=False, dense_from=dense_from
        ),
    )


def b20_failed_sync_retried(patch: pytest.MonkeyPatch) -> None:
    def lead_with_retry(commit: GroupCommit) -> None:
        sync = commit._sync

        def sync_with_retry() -> None:
            try:
                sync()
            except logcore.StorageWriteError:
                sync()

        commit._sync = sync_with_retry
        try:
            original(commit)
        finally:
            commit._sync = sync

    original = GroupCommit._lead_sync
    patch.setattr(GroupCommit, "_lead_sync", lead_with_retry)


def b21_partial_batch_not_truncated(patch: pytest.MonkeyPatch) -> None:
    def append(self: ActiveSegment, *args: Any) -> None:
        truncate, self.fs.truncate = self.fs.truncate, lambda handle, size: None  # type: ignore[method-assign]
        size = self._size
        try:
            original(self, *args)
        except logcore.DiskFullError:
            self._size = self.fs.size(self.handle)
            raise
        finally:
            self.fs.truncate = truncate  # type: ignore[method-assign]
            del size

    original = ActiveSegment.append
    patch.setattr(ActiveSegment, "append", append)


def b22_index_trusted(patch: pytest.MonkeyPatch) -> None:
    def start_position(self: Segment, offset: int) -> int:
        index = self.offset_index
        slot = index.find(offset - self.base_offset)
        return max(0, min(index.entry(slot)[1], self.size_bytes)) if slot >= 0 else 0

    patch.setattr(Segment, "start_position", start_position)
    patch.setattr(Segment, "read_one", lambda self, *args: 0)


def leave_untruncated(
    patch: pytest.MonkeyPatch, index_type: type[OffsetIndex] | type[TimeIndex]
) -> None:
    original = index_type._matching_bytes
    patch.setattr(
        index_type,
        "_matching_bytes",
        lambda self, fs, keeps_other_entries: original(self, fs, True),
    )


def b23_index_not_truncated(patch: pytest.MonkeyPatch) -> None:
    leave_untruncated(patch, OffsetIndex)


def b24_time_index_not_truncated(patch: pytest.MonkeyPatch) -> None:
    leave_untruncated(patch, TimeIndex)


def b28_page_cache_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_sync_and_reread", recover_from_memory)


def b29_segments_removed_before_the_log_start_is_durable(
    patch: pytest.MonkeyPatch,
) -> None:
    def delete_records(self: Log, before: int) -> int:
        writer = self.host.writer
        state = writer.state
        for segment, following in itertools.pairwise(state.segments):
            if following.base_offset <= before:
                writer.files._rename_to_deleted(
                    segment.base_offset, writer.files._list_by_segment()
                )
        with state.lock:
            if before > state.log_start:
                writer.set_checkpoint(checkpoint.LOG_START, before)
        state.segments = [
            segment for segment in state.segments if writer.fs.exists(segment.path)
        ]
        state.log_start = max(state.log_start, before)
        return state.log_start

    patch.setattr(Log, "delete_records", delete_records)


def b30_retention_deletes_the_active_segment(patch: pytest.MonkeyPatch) -> None:
    def delete_records(self: Log, before: int) -> int:
        start = original(self, before)
        writer = self.host.writer
        if before == writer.state.end and writer.active.size_bytes:
            for path in writer.files._rename_to_deleted(
                writer.active.base_offset, writer.files._list_by_segment()
            ):
                writer.fs.unlink(path)
            writer.fs.sync_dir(writer.path)
        return start

    original = Log.delete_records
    patch.setattr(Log, "delete_records", delete_records)


def b31_recovery_not_idempotent(patch: pytest.MonkeyPatch) -> None:
    def recover(fs: Any, segment: Any, **options: Any) -> Any:
        handle = fs.open(segment.path + ".recovered", write=True, create=True)
        fs.pwrite(handle, b"once more\n", fs.size(handle))
        fs.close(handle)
        return original(fs, segment, **options)

    original = recovery.recover
    patch.setattr(recovery, "recover", recover)


def b32_records_served_before_they_are_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_sync_and_reread", lambda fs, segment, position: True)


def b34_clean_marker_before_sync(patch: pytest.MonkeyPatch) -> None:
    def finish(self: Writer) -> None:
        self.claim.leave()
        original(self)

    original = Writer._finish_locked
    patch.setattr(Writer, "_finish_locked", finish)


def b36_sync_target_read_after_sync(patch: pytest.MonkeyPatch) -> None:
    def lead(commit: GroupCommit) -> None:
        commit._sync()
        written_bytes, target = commit._written()
        commit._record_sync(target, written_bytes)

    patch.setattr(GroupCommit, "_lead_sync", lead)


def b39_read_error_truncates(patch: pytest.MonkeyPatch) -> None:
    def recover(fs: Any, segment: Any, **options: Any) -> Any:
        try:
            return original(fs, segment, **options)
        except logcore.StorageReadError:
            segment.cut(0)
            segment.reset()
            return recovery.RecoveryReport(segment.path, 0)

    original = recovery.recover
    patch.setattr(recovery, "recover", recover)


def b40_tail_not_quarantined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        recovery,
        "decide",
        lambda facts: Action.KEEP if facts.bad_position is None else Action.CUT,
    )


def b15_no_base_offset_check(patch: pytest.MonkeyPatch) -> None:
    for module in (recovery, gaps):
        patch.setattr(module, "in_order", lambda facts, *args, **options: len(facts))
        patch.setattr(
            module, "first_fault", lambda facts, *args, **options: (len(facts), None)
        )
    original = recovery._index_valid_batches
    patch.setattr(
        recovery,
        "_index_valid_batches",
        lambda *args, crc, dense_from: original(*args, crc=crc, dense_from=NEVER),
    )
    patch.setattr(
        scan.LogRange,
        "_check_order",
        lambda self, batch, expected, next_base, dense: dense,
    )


def b16_scan_continues_after_damage(patch: pytest.MonkeyPatch) -> None:
    def take(
        segment: Any, start: int, stop: int, **options: Any
    ) -> tuple[int | None, int]:
        bad, why = original(segment, start, stop, **options)
        for number in range(stop if bad is None else bad + 1, stop):
            facts, _, _ = next(segment.walk(number, crc=True))
            if len(facts):
                return original(segment, number, stop, crc=True, dense_from=NEVER)
        return bad, why

    original = recovery._index_valid_batches
    patch.setattr(recovery, "_index_valid_batches", take)


def b25_snapshot_ahead_trusted(patch: pytest.MonkeyPatch) -> None:
    original = ProducerState._loaded
    patch.setattr(
        ProducerState, "_loaded", lambda self, low, high: original(self, low, 1 << 40)
    )
    patch.setattr(ProducerState, "_remove_all_but", lambda self, kept: None)
    patch.setattr(opening, "remove_snapshots_above", lambda fs, path, offset: None)


def b26_epochs_not_truncated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(epochs, "truncate_end", lambda entries, end: entries)


def b27_snapshot_crc_unchecked(patch: pytest.MonkeyPatch) -> None:
    def entries(content: bytes, path: str | None = None) -> Any:
        head = min(len(content), producers.SNAPSHOT_HEAD.itemsize)
        count = (len(content) - head) // producers.SNAPSHOT_ENTRY.itemsize
        return np.frombuffer(content[head:], producers.SNAPSHOT_ENTRY, count)

    patch.setattr(producers, "snapshot_entries", entries)


def b42_marker_removed_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        cleaner._SeenTransactions, "had_batches", lambda self, producer_id, kind: False
    )


def b43_transaction_index_not_rebuilt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(aborted_transactions, "index_aborted", lambda active, segments: None)


#: Bugs that the exploration finds only after two seconds or more.
SLOW_SKIPS = ("B08", "B09")
SLOW = (
    b06_recovery_point_ahead,
    b07_checkpoint_in_place,
    b24_time_index_not_truncated,
    b25_snapshot_ahead_trusted,
    b29_segments_removed_before_the_log_start_is_durable,
    b30_retention_deletes_the_active_segment,
    b32_records_served_before_they_are_synced,
    b28_page_cache_trusted,
    b36_sync_target_read_after_sync,
    b39_read_error_truncates,
    b43_transaction_index_not_rebuilt,
)
CRASH_BUGS: tuple[Seeder, ...] = (
    b02_acknowledged_before_write,
    b06_recovery_point_ahead,
    b07_checkpoint_in_place,
    b13_recovery_trusts_the_size,
    b14_no_crc_check,
    b29_segments_removed_before_the_log_start_is_durable,
    b30_retention_deletes_the_active_segment,
    b31_recovery_not_idempotent,
    b32_records_served_before_they_are_synced,
    b34_clean_marker_before_sync,
    b36_sync_target_read_after_sync,
    b40_tail_not_quarantined,
)
#: Bugs that only some calls reveal, with the calls and settings to explore.
LIFE_BUGS: dict[Seeder, tuple[Sequence[str], dict[str, Any]]] = {
    b16_scan_continues_after_damage: (
        ("append_big", "append", "append_os"),
        {**CONFIG, "segment.bytes": 4_000},
    ),
    b23_index_not_truncated: (
        ("append", "append_os"),
        {**CONFIG, "index.interval.bytes": 0},
    ),
    b24_time_index_not_truncated: (
        ("append", "append_os"),
        {**CONFIG, "index.interval.bytes": 0},
    ),
    b25_snapshot_ahead_trusted: (
        (*TRANSACTION_ACTIONS, "epoch", "epoch", "roll"),
        CONFIG,
    ),
    b26_epochs_not_truncated: (("epoch", "append", "reopen", "truncate"), CONFIG),
    b43_transaction_index_not_rebuilt: (
        ("transact", "abort", "append", "kill", "truncate"),
        CONFIG,
    ),
}
FAULT_BUGS: tuple[Seeder, ...] = (
    b20_failed_sync_retried,
    b21_partial_batch_not_truncated,
    b28_page_cache_trusted,
    b39_read_error_truncates,
)


#: Seeds with which one of the first programs reveals the bug. With seed 1, the seed of
#: the other bugs, the exploration needs many programs.
SEEDS: dict[Any, int] = {
    "B03 no sync_dir at create": 5,
    "B05 old segment not synced at roll": 2,
    "B08 temporary file not synced": 5,
    "B33 clean shutdown marker not removed": 2,
    b34_clean_marker_before_sync: 2,
}


def explore_until_failure(
    make_disk: Callable[[], SimulatedDisk | None],
    calls: Sequence[str] = PLAIN_ACTIONS,
    config: dict[str, Any] = CONFIG,
    *,
    seed: int = 1,
    programs: int = 200,
) -> None:
    """Explore random programs until a check fails."""
    rng = random.Random(seed)
    caches_by_durability = {durability: SharedCaches() for durability in POLICIES}
    for _ in range(programs):
        actions = rng.choices(calls, k=rng.randrange(1, 12))
        durability = rng.choice(POLICIES)
        options: dict[str, Any] = {
            "limit": rng.choice([8, 24]),
            "disk": make_disk(),
            "caches": caches_by_durability[durability],
        }
        explore_program(actions, durability, config=config, thorough_every=2, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.startswith(SLOW_SKIPS))
        for name in SKIPPED_CALLS
    ],
)
def test_exploration_finds_a_skipped_call(name: str) -> None:
    with pytest.raises((AssertionError, logcore.LogcoreError)) as caught:
        explore_until_failure(
            lambda: SkippingDisk(SKIPPED_CALLS[name]), seed=SEEDS.get(name, 1)
        )
    print(caught.value)


def parameters(bugs: tuple[Seeder, ...]) -> list[Any]:
    return [
        pytest.param(bug, id=bug.__name__, marks=[pytest.mark.slow] * (bug in SLOW))
        for bug in bugs
    ]


@pytest.mark.parametrize("seed_bug", parameters(CRASH_BUGS))
def test_exploration_finds_a_seeded_bug(
    seed_bug: Seeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises((AssertionError, logcore.LogcoreError)) as caught:
        explore_until_failure(lambda: None, seed=SEEDS.get(seed_bug, 1))
    assert "still open" not in str(caught.value), "the check failed for another reason"
    print(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("seed_bug", parameters(tuple(LIFE_BUGS)))
def test_exploration_finds_a_seeded_bug_of_later_calls(
    seed_bug: Seeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises((AssertionError, logcore.LogcoreError)) as caught:
        explore_until_failure(lambda: None, *LIFE_BUGS[seed_bug])
    print(caught.value)


@pytest.mark.slow  # `make check` tests similar bugs
def test_exploration_finds_B42_marker_removed_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actions = ["transact", "commit", "append", "compact", "append", "compact", "append"]
    explore_program(actions, "os", config=COMPACTED, limit=4)
    b42_marker_removed_early(monkeypatch)
    with pytest.raises(AssertionError, match="read_committed"):
        explore_program(actions, "os", config=COMPACTED, limit=4)


@pytest.mark.long
@pytest.mark.parametrize("is_synced", [True, False])
def test_crash_reveals_B18_truncation_without_sync(
    is_synced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three batches is torn, so that recovery truncates two batches. The
    next append has the size of the second batch. A crash that keeps the append but not
    the truncation would restore the third batch after it.
    """
    with logcore.open(
        "t-0", create=True, fs=(disk := SimulatedDisk()), durability="os"
    ) as log:
        sizes = [
            (log.append(value), log.host.writer.active.size_bytes)[1]
            for value in (b"first", b"torn.", b"third")
        ]
    name = f"/t-0/{0:020d}.log"
    data = disk.files()[name]
    torn = data[: sizes[1] - 1] + b"?" + data[sizes[1] :]
    disk = SimulatedDisk(
        {
            name: torn,
            "/t-0/logcore.policy": b'{"durability":"os","max_bytes":1,"dense_from":0}',
        }
    )
    if not is_synced:
        monkeypatch.setattr(disk, "fsync", lambda handle: None)
    log = logcore.open("t-0", fs=disk, durability="os")
    log.append(b"other")
    states = list(disk.crash_states())
    disk.crash()
    possible_logs = set()
    for state in states:
        with logcore.open("t-0", fs=state.disk(), durability="os") as log:
            possible_logs.add(tuple(record.value for record in log.read(0)))
    assert ((b"first", b"other", b"third") in possible_logs) != is_synced
    assert {(b"first",), (b"first", b"other")} <= possible_logs


@pytest.mark.long
@pytest.mark.parametrize("limit", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_txnindex_is_durable_before_the_next_segment(
    limit: int,
) -> None:
    actions = ["transact", "append_big", "abort", "compact", "append"]
    explore_program(actions, "group", config=CONFIG, limit=limit, thorough_every=1)


# Bugs that a crash reveals only on a disk that reports syncs without making them, or
# that flips bits.


def lying_disk(glob: str) -> Callable[[], SimulatedDisk]:
    return lambda: SimulatedDisk(
        faults=FaultPlan(Fault("fsync", "lie", path=glob, times=None))
    )


def crashed_disks(
    actions: Sequence[str], glob: str
) -> Iterator[tuple[LogHistory, SimulatedDisk]]:
    """Yield disks after a crash that lost the syncs of files that match `glob`."""
    program = Program("os", explore=False, disk=lying_disk(glob)())
    for action in ["open", *actions]:
        getattr(program, action)()
    states = list(program.disk.crash_states(limit=150))
    program.disk.crash()
    for state in states:
        yield program.history, state.disk()


def check_log(history: LogHistory, disk: SimulatedDisk) -> None:
    try:
        log = logcore.open("t-0", create=True, config=CONFIG, durability="os", fs=disk)
    except logcore.CorruptLogError:
        return
    with log:
        found_log = FoundLog.of(log)
        assert found_log.records == history.between(found_log.start, found_log.end), (
            "the log contains other records"
        )
        for record in found_log.records:
            assert log.get(record.offset) == record, (
                "get() returns another record than read()"
            )
        check_memory(log)


BUGS_OF_LYING_DISKS: dict[str, tuple[Seeder, Sequence[str], str]] = {
    "B22": (
        b22_index_trusted,
        ["append_big", "append_big", "append_big", "reopen", "append"],
        "*index",
    ),
    "B27": (
        b27_snapshot_crc_unchecked,
        ["idempotent", "transact", "roll", "idempotent", "commit"],
        "*.snapshot.tmp",
    ),
}


@pytest.mark.parametrize("name", [pytest.param("B22", marks=pytest.mark.slow), "B27"])
def test_lying_disk_reveals_a_seeded_bug(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_bug, actions, glob = BUGS_OF_LYING_DISKS[name]
    for history, disk in crashed_disks(actions, glob):
        check_log(history, disk)
    seed_bug(monkeypatch)
    with pytest.raises((AssertionError, logcore.LogcoreError)) as caught:
        for history, disk in crashed_disks(actions, glob):
            check_log(history, disk)
    print(caught.value)


def check_flipped_offsets() -> None:
    """Flip each bit of each base offset, which no CRC covers, on the disk of a killed
    process, and check the log.
    """
    program = Program("os", explore=False)
    for action in ("open", "append", "append_two", "append_big"):
        getattr(program, action)()
    files = program.disk.files()
    program.disk.crash()
    path = next(path for path in files if is_log(path))
    position = 0
    while position < len(files[path]):
        for bit in range(64):
            disk = SimulatedDisk(files)
            disk.flip(path, position + bit // 8, bit % 8)
            with contextlib.suppress(
                logcore.CorruptBatchError
            ):  # if a read detects the flip
                check_log(program.history, disk)
        position += 12 + int.from_bytes(
            files[path][position + 8 : position + 12], "big"
        )


def test_flipped_offsets_reveal_B15_no_base_offset_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_flipped_offsets()
    b15_no_base_offset_check(monkeypatch)
    with pytest.raises(AssertionError):
        check_flipped_offsets()


def test_read_reveals_B19_ignored_short_write(
    partition: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_read(path: Path) -> None:
        with logcore.open(path, create=True, fs=OsFS()) as log:
            log.append_many([(None, b"x" * 50)] * 5)
            assert len(list(log.read(0))) == 5

    original = os.pwrite
    monkeypatch.setattr(
        os,
        "pwrite",
        lambda handle, data, position: original(
            handle, memoryview(data)[:100], position
        ),
    )
    write_and_read(partition)
    monkeypatch.setattr(
        OsFS,
        "pwrite",
        lambda self, handle, data, position: os.pwrite(handle, data, position),
    )
    with pytest.raises((AssertionError, logcore.LogcoreError)):
        write_and_read(partition.with_name("other-0"))


def test_crash_reveals_B35_waiter_woken_by_an_earlier_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The waiter appended during a sync that does not cover its append."""

    class HookedDisk(SimulatedDisk):
        while_syncing: Callable[[], None] = staticmethod(lambda: None)

        def fdatasync(self, handle: int) -> None:
            super().fdatasync(handle)
            self.while_syncing()  # the range of the sync is fixed

    def two_appends() -> None:
        disk = HookedDisk()
        has_begun = threading.Event()
        is_appended = threading.Event()
        log = logcore.open("t-0", create=True, fs=disk)
        possible_sizes: list[int] = []

        def append_second() -> None:
            log.append(b"second")
            possible_sizes.extend(
                len(state.files[path])
                for state in disk.crash_states()
                for path in state.files
                if is_log(path)
            )  # type: ignore[arg-type]
            is_appended.set()

        def while_syncing() -> None:
            if not has_begun.is_set():
                has_begun.set()
                other.start()
                while not log.host.writer.commit._blocked:
                    time.sleep(0)

        other = threading.Thread(target=append_second)
        disk.while_syncing = while_syncing
        log.append(b"first")
        is_appended.wait()
        size = len(disk.files()[next(filter(is_log, disk.files()))])
        other.join()
        log.close()
        assert min(possible_sizes) == size, (
            "the record is acknowledged, and not on disk"
        )

    def wait_for_any_sync(commit: GroupCommit, target: int) -> None:
        own_thread = threading.get_ident()
        try:
            with commit._mutex:
                if commit._leader not in (None, own_thread):
                    commit._block()
                    return
                commit._leader = own_thread
            commit._lead_sync()
        finally:
            commit._release(own_thread)

    two_appends()
    monkeypatch.setattr(GroupCommit, "wait", wait_for_any_sync)
    with pytest.raises(AssertionError, match="not on disk"):
        two_appends()


@pytest.mark.long
@pytest.mark.parametrize("seed_bug", parameters(FAULT_BUGS))
def test_failing_disk_reveals_a_seeded_bug(
    seed_bug: Seeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_bug(monkeypatch)
    recoveries = {
        durability: Recoveries(durability, CONFIG) for durability in ("group", "os")
    }
    with pytest.raises((AssertionError, logcore.LogcoreError)):
        for durability, operation in itertools.product(recoveries, FAILING_OPERATIONS):
            for nth, code in itertools.product(range(1, 40), (errno.EIO, errno.ENOSPC)):
                run_with_fault(
                    Fault(operation, code, at=nth), durability, recoveries[durability]
                )


@pytest.mark.long
@pytest.mark.parametrize(
    "programs",
    [1, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_exploration_finds_no_bug_in_the_sound_log(programs: int) -> None:
    """The same exploration finds no bug in a log without seeded bugs."""
    explore_until_failure(lambda: None, programs=programs)
    explore_until_failure(
        lambda: SkippingDisk(lambda disk, name, path: False), programs=programs
    )
    explore_until_failure(
        lambda: None, TRANSACTION_ACTIONS, COMPACTED, programs=programs
    )
