"""Interrupted compaction: crashes, disk errors, damage, and seeded bugs of the segment
swap.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import cleaner
from logcore.cleaner import OffsetMap, clean
from logcore.inspect.verify import verify
from logcore.log import Rewriting
from logcore.metadata import checkpoint
from logcore.partition.recovery import SwapAction, SwapFacts, decide_swap
from logcore.recordbatch import encode, read_batches
from logcore.testing import Fault, FaultPlan, SimulatedDisk, explore
from support.compacting import COMPACT, T0, compact, open_log, pairs

# -- crashes ---------------------------------------------------------------------------


def run_keyed(disk: SimulatedDisk, promise: Any, *, rounds: int = 2) -> None:
    """Append and compact in rounds with durability `group`, and promise each record."""
    log = logcore.open("t-0", create=True, config=COMPACT, durability="group", fs=disk)
    for round_number in range(rounds):
        for number in range(9):
            receipt = log.append(
                b"%d.%d" % (round_number, number) * 9,
                key=b"k%d" % (number % 3),
                timestamp_ms=T0,
            )
            promise(
                (
                    receipt.offset,
                    b"k%d" % (number % 3),
                    b"%d.%d" % (round_number, number) * 9,
                )
            )
        compact(log)
    log.close()


def recovered_records(
    disk: SimulatedDisk,
) -> tuple[list[tuple[int, bytes | None, bytes | None]], int]:
    with logcore.open(
        "t-0", create=True, config=COMPACT, durability="group", fs=disk
    ) as log:
        records = pairs(log)
        end = log.log_end_offset
        committed_offsets = [
            record.offset
            for record in log.read(log.log_start_offset, isolation="read_committed")
        ]
        assert committed_offsets == [offset for offset, _, _ in records]
    leftovers = [
        name
        for name in disk.files()
        if name.endswith((".cleaned", ".swap", ".deleted")) and name.count("/") > 1
    ]
    assert not [
        name for name in leftovers if not name.endswith(checkpoint.CHECKSUMS_VALID)
    ]
    damaged_files = [
        verdict for verdict in verify("t-0", fs=disk) if verdict.status == "damaged"
    ]
    assert not damaged_files
    with logcore.open("t-0", config=COMPACT, durability="group", fs=disk) as log:
        assert pairs(log) == records, "the second opening returned other records"
    return records, end


def check_records(promised: list[Any], result: tuple[list[Any], int]) -> None:
    """P45: the log has one complete generation. An acknowledged record is missing only
    if a later record supersedes it.
    """
    records, end = result
    offsets = [offset for offset, _, _ in records]
    assert offsets == sorted(set(offsets)), "duplicate or unordered offsets"
    appended = dict(enumerate((key, value) for _, key, value in promised))
    for offset, key, value in records:
        assert offset not in appended or appended[offset] == (key, value), (
            "a record has another key or value"
        )
    assert end >= len(promised), "acknowledged records are lost"
    newest = {key: offset for offset, key, _ in records}
    for offset, key, _ in promised:
        assert offset in offsets or newest.get(key, -1) > offset, (
            f"the record at {offset} is lost"
        )


#: Number of disks to try for each moment. The seeded bugs below are found with this
#: number.
LIMIT = 2


def explore_compaction(seed: int = 0, **options: Any) -> Any:
    return explore(
        run_keyed,
        recovered_records,
        check_records,
        seed=seed,
        **{"limit": LIMIT, "again_every": 24, **options},
    )


@pytest.mark.parametrize(
    ("names", "limit"),
    [
        ("posix", LIMIT),
        pytest.param("posix", 6, marks=pytest.mark.slow),
        pytest.param("journal", 6, marks=pytest.mark.slow),
    ],
)
def test_P45_crash_leaves_one_generation(names: Any, limit: int) -> None:
    report = explore_compaction(names=names, limit=limit)
    print(report)
    assert report.states > 300


@pytest.mark.long
def test_readers_see_one_generation_after_a_crash_without_recovery() -> None:
    """A reader opens a disk that a crash during a swap left. No writer has recovered
    it.
    """

    def read(disk: SimulatedDisk) -> Any:
        try:
            with logcore.open("t-0", read_only=True, fs=disk) as log:
                return pairs(log), 1 << 40
        except (logcore.LogNotFoundError, logcore.CorruptBatchError):
            return [], 1 << 40  # before the directory exists, or with an unsynced tail

    def check(promised: list[Any], result: tuple[list[Any], int]) -> None:
        offsets = [offset for offset, _, _ in result[0]]
        assert offsets == sorted(set(offsets)), "duplicate or unordered offsets"
        if offsets and len(promised) > 9:
            check_records(promised[:9], result)

    assert explore(run_keyed, read, check, limit=12, again_every=0).states > 200


def replace_without(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Break the order in which compaction moves new segments into place."""
    original_replace = Rewriting.replace

    def replace(self: Rewriting, old: Any, new: Any) -> None:
        fs = self.fs
        disk: Any = fs
        methods = {
            name: getattr(disk, name) for name in ("fsync", "sync_dir", "rename")
        }
        with pytest.MonkeyPatch.context() as patch:
            if bug == "B10":
                patch.setattr(disk, "fsync", lambda handle: None)
                patch.setattr(disk, "fdatasync", lambda handle: None)
            # The old segments are deleted before the names of the new one are on disk.
            elif bug == "B11":
                synced = iter([True, False, False, True])
                patch.setattr(
                    disk,
                    "sync_dir",
                    lambda path: (
                        methods["sync_dir"](path) if next(synced, True) else None
                    ),
                )
                patch.setattr(
                    disk,
                    "rename",
                    lambda source, target: (
                        disk.unlink(source)
                        if target.endswith(".deleted")
                        else methods["rename"](source, target)
                    ),
                )
            original_replace(self, old, new)

    monkeypatch.setattr(Rewriting, "replace", replace)


def supersede_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    original_newest = OffsetMap.newest
    monkeypatch.setattr(
        OffsetMap, "newest", lambda self, hashes: original_newest(self, hashes) + 1
    )
    monkeypatch.setattr(cleaner, "_BITS_SHARE", 1 << 60)


def advance_checkpoint_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original_record_keys = cleaner._Round._record_keys

    def record_cleaned_first(self: Any, newest: OffsetMap) -> Iterator[Any]:
        self.view.record_cleaned(self.plan.first_uncleanable)
        yield from original_record_keys(self, newest)

    monkeypatch.setattr(cleaner._Round, "_record_keys", record_cleaned_first)


@pytest.mark.long
@pytest.mark.parametrize("bug", [pytest.param("B10", marks=pytest.mark.slow), "B11"])
def test_seeded_bugs_of_the_swap_are_found(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_without(monkeypatch, bug)
    with pytest.raises(AssertionError):
        explore_compaction()


@pytest.mark.long
def test_seeded_bug_B12_order_of_renames_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without .swap names, a crash between two renames leaves a gap in the log, and
    recovery finds no .swap file from which to complete the replacement.
    """
    original_rename = SimulatedDisk.rename

    def rename(self: SimulatedDisk, source: str, target: str) -> None:
        # Use the final name at once, as if there were no .swap name.
        if target.endswith(".swap"):
            target = target.removesuffix(".swap")
        if not source.endswith(".swap"):
            original_rename(self, source, target)

    monkeypatch.setattr(SimulatedDisk, "rename", rename)
    with pytest.raises((AssertionError, FileNotFoundError)):
        explore_compaction()


@pytest.mark.long
def test_seeded_bug_B41_lost_last_value_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supersede_every_record(monkeypatch)
    with pytest.raises(AssertionError):
        explore_compaction()


@pytest.mark.long
def test_seeded_bug_B44_early_checkpoint_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No reader loses a record, but the records are never compacted, because the
    checkpoint claims that they were.
    """
    advance_checkpoint_early(monkeypatch)

    def recover(disk: SimulatedDisk) -> Any:
        with logcore.open(
            "t-0", create=True, config=COMPACT, durability="group", fs=disk
        ) as log:
            checked = checkpoint.read_offsets(disk, ".", checkpoint.CLEANER).get(
                ("t", 0), 0
            )
            keys = [key for offset, key, _ in pairs(log) if offset < checked]
        return keys

    def check_unique_keys(promised: list[Any], keys: list[bytes]) -> None:
        assert len(keys) == len(set(keys)), "duplicate keys marked as compacted"

    with pytest.raises(AssertionError, match="marked as compacted"):
        explore(run_keyed, recover, check_unique_keys, limit=40, again_every=0)


@pytest.mark.long
@pytest.mark.parametrize("limit", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_cleaner_checkpoint_never_exceeds_the_compacted_range(limit: int) -> None:
    def recover(disk: SimulatedDisk) -> Any:
        with logcore.open(
            "t-0", create=True, config=COMPACT, durability="group", fs=disk
        ) as log:
            checked = checkpoint.read_offsets(disk, ".", checkpoint.CLEANER).get(
                ("t", 0), 0
            )
            return [key for offset, key, _ in pairs(log) if offset < checked]

    def check_unique_keys(promised: list[Any], keys: list[bytes]) -> None:
        assert len(keys) == len(set(keys)), "duplicate keys marked as compacted"

    explore(run_keyed, recover, check_unique_keys, limit=limit, again_every=0)


#: The number of the first operation that fails, for each error.
FIRST_FAILING = {errno.EIO: 1, errno.ENOSPC: 2, errno.EMFILE: 3}


@pytest.mark.long
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", FIRST_FAILING)
def test_error_at_each_operation_of_a_compaction_loses_no_record(
    code: int, step: int
) -> None:
    """The log continues, or it refuses appends until it is reopened. In both cases no
    record is lost.
    """
    disk = SimulatedDisk()
    expected = {}
    with open_log(disk) as log:
        for index in range(40):
            log.append(b"%d" % index * 8, key=b"k%d" % (index % 4))
            expected[b"k%d" % (index % 4)] = b"%d" % index * 8
        log.roll()
    files = disk.files()
    for nth in range(min(step, FIRST_FAILING[code]), 800, step):
        disk = SimulatedDisk(files)
        log = open_log(disk)
        disk.faults = FaultPlan(Fault("*", code, at=nth))
        try:
            clean(log, force=True)
        except logcore.LogcoreError:
            pass
        reached = disk.faults is not None and bool(disk.faults.hits)
        disk.faults = None
        assert {key: value for _, key, value in pairs(log)} == expected
        if not log.has_failed:
            log.append(b"after", key=b"k0")
            clean(log, force=True)
        log.close()
        with open_log(disk) as log:
            state = {key: value for _, key, value in pairs(log)}
            assert {**state, b"k0": expected[b"k0"]} == expected
        if not reached:
            print(f"{nth // step} failures of single operations in a compaction")
            return
    raise AssertionError("the round has more operations than were tried")


def test_damage_aborts_a_round_without_changing_a_file(tmp_path: Path) -> None:
    with logcore.open(
        tmp_path / "t-0", create=True, config=COMPACT, durability="os"
    ) as log:
        for number in range(60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        log.roll()
    files = sorted((tmp_path / "t-0").glob("*.log"))
    raw = bytearray(files[1].read_bytes())
    raw[150] ^= 1
    files[1].write_bytes(raw)
    with logcore.open(tmp_path / "t-0", config=COMPACT, durability="os") as log:
        before = {
            path.name: path.read_bytes() for path in (tmp_path / "t-0").glob("*.log")
        }
        with pytest.raises(logcore.CorruptBatchError, match=files[1].name):
            clean(log, force=True)
        assert {
            path.name: path.read_bytes() for path in (tmp_path / "t-0").glob("*.log")
        } == before
        assert not list((tmp_path / "t-0").glob("*.cleaned"))
        log.append(b"on", key=b"k")


def test_transaction_index_without_its_new_segment_is_deleted() -> None:
    """A crash kept the name of the new transaction index, but not the name of the new
    .log file. The old .log file had no transaction index, so that the new index
    referred to a marker that did not exist.
    """
    disk = SimulatedDisk()
    files_of_swap = {}
    log = logcore.open(
        "t-0", create=True, config={**COMPACT, "segment.bytes": 10_000}, fs=disk
    )
    log.append(b"v", key=b"k")
    log.roll()
    log.append_batch(
        encode(
            [(b"a", b"v")],
            transactional=True,
            producer_id=5,
            producer_epoch=0,
            base_sequence=0,
        )
    )
    log.append(b"between", key=b"b")
    log.end_transaction(5, 0, commit=False)
    log.roll()

    def observe(operation: str, is_done: bool) -> None:
        if (
            is_done
            and disk.operations[-1].path.endswith(".txnindex.swap")
            and not files_of_swap
        ):
            files_of_swap.update(disk.files())

    disk.observer = observe
    clean(log, force=True)
    disk.observer = None
    log.close()
    name = f"/t-0/{0:020d}.log"
    files_of_swap[name + ".cleaned"] = files_of_swap.pop(name + ".swap")
    crashed = SimulatedDisk(files_of_swap)
    with logcore.open("t-0", fs=crashed) as log:
        assert [record.offset for record in log.read(0)] == [0, 1, 2]
    assert f"/t-0/{0:020d}.txnindex" not in crashed.files()
    assert not [
        name for name in crashed.files() if name.endswith((".swap", ".cleaned"))
    ]


@pytest.mark.long
@pytest.mark.parametrize("is_dense", [True, False])
def test_flipped_offset_supersedes_no_record(tmp_path: Path, is_dense: bool) -> None:
    """No CRC covers the offset. If compaction trusted it, the flipped offset would drop
    newer records of the same keys.
    """
    with logcore.open(
        tmp_path / "t-0", create=True, config=COMPACT, durability="os"
    ) as log:
        for number in range(60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        if not is_dense:
            compact(log)
            for number in range(60, 120):
                log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        log.roll()
    file = sorted((tmp_path / "t-0").glob("*.log"))[-4]
    undamaged = file.read_bytes()
    first = next(read_batches(undamaged)).size_bytes
    for bit in range(40):
        raw = bytearray(undamaged)
        # Flip a bit in the base offset of the second batch.
        raw[first + 7 - bit // 8] ^= 1 << bit % 8
        file.write_bytes(raw)
        with logcore.open(tmp_path / "t-0", config=COMPACT, durability="os") as log:
            before = {
                path.name: path.read_bytes()
                for path in (tmp_path / "t-0").glob("*.log")
            }
            with pytest.raises(logcore.CorruptBatchError, match="does not continue"):
                clean(log, force=True)
            assert {
                path.name: path.read_bytes()
                for path in (tmp_path / "t-0").glob("*.log")
            } == before


def test_truncation_during_a_round_abandons_it() -> None:
    """Entries of the offset map for truncated records must not remove the records that
    the truncated records superseded.
    """
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        log.roll()
        steps = cleaner.cleaning(log, force=True)
        for _ in range(5):
            next(steps)
        log.truncate(30)
        with pytest.raises(logcore.CompactionAbandonedError):
            for _ in steps:
                pass
        assert [offset for offset, _, _ in pairs(log)] == list(range(30))
        assert not [name for name in disk.files() if name.endswith(".cleaned")]


def test_deletion_of_segments_during_a_round_abandons_it() -> None:
    """Otherwise the deleted records would return, above a log start that readers have
    seen.
    """
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        log.roll()
        steps = cleaner.cleaning(log, force=True)
        while not any(name.endswith(".cleaned") for name in disk.files()):
            next(steps)
        log.delete_records(30)
        with pytest.raises(
            logcore.CompactionAbandonedError, match="during the compaction"
        ):
            for _ in steps:
                pass
        assert [offset for offset, _, _ in pairs(log)] == list(range(30, 60))
        assert not [name for name in disk.files() if name.endswith(".cleaned")]
        assert clean(log, force=True) is not None, "another round can begin"


@pytest.mark.parametrize(
    ("faults", "continues"),
    [
        ([Fault("rename", errno.EIO, path="*.index.swap")], True),
        # Remaining .swap files would restore, at the next opening, records that a later
        # round has removed.
        (
            [
                Fault("rename", errno.EIO, path="*.index.swap"),
                Fault("unlink", errno.EIO, path="*.swap", times=None),
            ],
            False,
        ),
        # The names in the directory already make the new segment valid.
        ([Fault("rename", errno.EIO, path="*.log.deleted")], False),
    ],
    ids=["undone", "not undone", "partly renamed"],
)
def test_round_that_fails_during_its_renames_loses_no_record(
    faults: list[Fault], continues: bool
) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    for number in range(60):
        log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
    log.roll()
    before = pairs(log)
    disk.faults = FaultPlan(*faults)
    with pytest.raises(logcore.StorageWriteError):
        clean(log, force=True)
    disk.faults = None
    assert pairs(log) == before
    assert any(name.endswith(".swap") for name in disk.files()) is not continues
    if continues:
        log.append(b"after", key=b"new")
        assert clean(log, force=True) is not None
    else:
        with pytest.raises(logcore.LogFailedError):
            log.append(b"after", key=b"new")
    log.close()
    with open_log(disk) as log:
        assert not any(name.endswith((".swap", ".cleaned")) for name in disk.files())
        values = {key: value for _, key, value in pairs(log)}
        assert values == {key: value for _, key, value in before} | (
            {b"new": b"after"} if continues else {}
        )


def test_records_after_a_truncation_are_dirty() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        compact(log)
        log.truncate(30)
        assert checkpoint.read_offsets(disk, ".", checkpoint.CLEANER) == {("t", 0): 30}
        for number in range(30, 60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        compact(log)
        assert len(pairs(log)) == 4


def test_second_concurrent_round_is_refused() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        log.roll()
        steps = cleaner.cleaning(log, force=True)
        while not any(name.endswith(".cleaned") for name in disk.files()):
            next(steps)
        with pytest.raises(logcore.LogLockedError, match="compacted"):
            clean(log, force=True)
        steps.close()
        assert not [name for name in disk.files() if name.endswith(".cleaned")]
        assert clean(log, force=True) is not None


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("was_begun", [True, False])
@pytest.mark.parametrize("has_retired", [True, False])
def test_every_combination_of_swap_facts_has_one_action(
    is_whole: bool, was_begun: bool, has_retired: bool
) -> None:
    action = decide_swap(SwapFacts(is_whole, was_begun, has_retired))
    if is_whole and not was_begun:
        assert action is SwapAction.FINISH
    elif has_retired:
        assert action is SwapAction.FAIL, "neither generation is whole"
    else:
        assert action is SwapAction.DISCARD


def test_index_in_place_is_kept_beside_a_leftover_swap_file() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(20):
            log.append(b"%d" % number * 10, key=b"k")
        before = pairs(log)
    index = disk.content(f"t-0/{0:020d}.index")
    disk.put(f"t-0/{0:020d}.index.swap", b"\x7f" * 8)
    with open_log(disk) as log:
        assert pairs(log) == before
        assert disk.content(f"t-0/{0:020d}.index") == index != b""
        assert not any(name.endswith(".swap") for name in disk.files())


def test_damaged_swap_file_is_not_moved_into_place() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        log.append(b"v", key=b"k")
        log.append(b"w", key=b"k")
    files = disk.files()
    name = next(name for name in files if name.endswith(f"{0:020d}.log"))
    raw = bytearray(files[name])
    raw[-1] ^= 1
    log = open_log(SimulatedDisk({**files, name + ".swap": bytes(raw)}))
    assert len(pairs(log)) == 2
    log.close()
    files_without_segment = {
        **files,
        name + ".swap": bytes(raw),
        name + ".deleted": files[name],
    }
    del files_without_segment[name]
    with pytest.raises(logcore.CorruptLogError, match="compaction"):
        open_log(SimulatedDisk(files_without_segment))


@pytest.mark.parametrize("removed_with", [".log.cleaned", ".seal.cleaned"])
def test_new_segment_removed_by_another_program_replaces_no_segment(
    removed_with: str,
) -> None:
    """Another program removes the new segment once its .log or checksum file exists."""

    class CleanedUpDisk(SimulatedDisk):
        removed_with = ""

        def _remove_cleaned(self) -> None:
            if self.removed_with and any(
                name.endswith(self.removed_with) for name in self.files()
            ):
                for name in [
                    name for name in self.files() if name.endswith(".log.cleaned")
                ]:
                    self.unlink(name)

        def modified_ms(self, path: str) -> int:
            self._remove_cleaned()
            return super().modified_ms(path)

        def sync_dir(self, path: str) -> None:
            self._remove_cleaned()
            super().sync_dir(path)

    disk = CleanedUpDisk()
    with open_log(disk) as log:
        for number in range(60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 4))
        log.roll()
        before = pairs(log)
        disk.removed_with = removed_with
        with pytest.raises(
            logcore.CompactionAbandonedError, match="removed by another program"
        ):
            clean(log, force=True)
        disk.removed_with = ""
        assert pairs(log) == before
        assert not [
            name for name in disk.files() if name.endswith((".cleaned", ".swap"))
        ]
        assert clean(log, force=True) is not None, "another round can begin"
        assert pairs(log) != before
