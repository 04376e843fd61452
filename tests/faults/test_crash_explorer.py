"""Tests of crashes of a log, with every possible state of the disk. The log opens with
exactly the acknowledged records, unchanged.

The tests run programs of a few calls on a log on a simulated disk. At each change of
the disk, and inside each write, they open and check all possible disks after a crash
(logcore.testing.explore, logcore.testing.oracle; docs/crashes.md has the rules and the
figures). The programs are all sequences of at most three calls, random longer
sequences, and programs with one failing operation of the disk. The calls include later
changes of data: retention, compaction, transactions, leader epochs.
tests/faults/test_directory_crashes.py does the same with directories of topics.

tests/faults/test_seeded_bugs.py shows that the explorer detects bugs.

LOGCORE_EXPLORE_STATES=n explores n states instead of 1,500, or 50,000 in `make slow`.
`make slow` also continues a longer search from its last stop, towards 20,000,000 states;
LOGCORE_EXPLORE_SECONDS limits its time. A failure prints the program and its seed.
"""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from logcore.cleaner import clean
from logcore.recordbatch import encode
from logcore.testing import (
    Fault,
    FaultPlan,
    FoundLog,
    Report,
    SimulatedCrash,
    SimulatedDisk,
)
from logcore.testing.explore import Seen
from logcore.testing.oracle import RecoveredLogCache
from logcore.testing.result_cache import ResultCache
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
    ERRNOS,
    FAILING_OPERATIONS,
    MANY_STATES,
    POLICIES,
    STATES,
    Recoveries,
    SharedCaches,
)

SMALL = (
    "append",
    "append_big",
    "flush",
    "roll",
    "delete",
    "truncate",
    "tick",
    "reopen",
    "kill",
)


def small_world(calls: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield all sequences of at most three calls, shorter sequences first."""
    for length in (1, 2, 3):
        yield from itertools.product(calls, repeat=length)


def explored_by_seed(seed: int) -> Report:
    """Explore a random program of up to 20 calls."""
    rng = random.Random(seed)
    config = {
        "segment.bytes": rng.choice([250, 400, 1000, 2000]),
        "index.interval.bytes": rng.choice([0, 100, 4096]),
        "batch.size": rng.choice([150, 1000]),
    }
    actions = rng.choices(PLAIN_ACTIONS, k=rng.randrange(4, 20))
    if seed % 2:
        config |= {
            "cleanup.policy": "compact,delete",
            "delete.retention.ms": rng.choice([0, 1_000]),
        }
        actions = rng.choices(
            [*PLAIN_ACTIONS, *TRANSACTION_ACTIONS], k=rng.randrange(4, 20)
        )
    try:
        return explore_program(
            actions,
            rng.choice(POLICIES),
            config=config,
            seed=seed,
            limit=rng.choice([6, 12, 24]),
        )
    except BaseException as error:
        error.add_note(f"repeat with explored_by_seed({seed})")
        raise


each_count = pytest.mark.parametrize(
    "count",
    [
        STATES,
        pytest.param(
            MANY_STATES, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
        ),
    ],
)

#: Calls and settings of small worlds, and the policies under which each is explored.
WORLDS: dict[str, tuple[Sequence[str], Sequence[str], dict[str, Any]]] = {
    "log": (SMALL, POLICIES, CONFIG),
    "life": (TRANSACTION_ACTIONS, ("group", "os"), COMPACTED),
}


@each_count
@pytest.mark.parametrize(
    ("world", "durability"),
    [(world, durability) for world in WORLDS for durability in WORLDS[world][1]],
)
def test_crash_after_any_short_program_keeps_promises(
    world: str, durability: str, count: int
) -> None:
    """Sequences share their prefixes, so the search opens equal disks once for all
    sequences of a policy.
    """
    calls, policies, config = WORLDS[world]
    total = Report()
    start_s = time.perf_counter()
    caches = SharedCaches()
    for actions in small_world(calls):
        total += explore_program(
            actions, durability, config=config, caches=caches, limit=24
        )
        if total.states >= count * 4 // 10 // len(policies):
            break
    print_rate(f"small world of a {world} under {durability}", total, start_s)


@each_count
@pytest.mark.parametrize("part", range(2))
def test_crash_after_random_programs_keeps_promises(part: int, count: int) -> None:
    """Every second program is of a compacted log."""
    total = Report()
    start_s = time.perf_counter()
    for seed in itertools.count(part * 3_000_000):
        total += explored_by_seed(seed)
        if total.states >= count // 10:
            break
    print_rate(f"random programs {part}", total, start_s)


# -- disks that are not opened ---------------------------------------------------------


class VerifyingCache(ResultCache[Any]):
    """Runs the function again for each cached result, and compares."""

    hits = 0

    def get(self, files: Mapping[str, bytes | None], now_ms: int) -> None:
        return None

    def run(self, disk: SimulatedDisk, function: Callable[[SimulatedDisk], Any]) -> Any:
        cached = super().get(disk.view(), disk.now_ms())
        if cached is None:
            return super().run(disk, function)
        VerifyingCache.hits += 1
        result = ResultCache[Any]().run(disk, function)
        assert result == cached, (
            f"{result} is found, and the cache had {cached} for an equal disk"
        )
        return result


@pytest.mark.long
@pytest.mark.parametrize(
    ("durability", "config", "limit"),
    [
        ("group", CONFIG, 2),
        pytest.param("group", CONFIG, 14, marks=pytest.mark.slow),
        pytest.param("os", COMPACTED, 14, marks=pytest.mark.slow),
    ],
)
def test_disks_that_the_cache_skips_equal_opened_disks(
    durability: str, config: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerifyingCache, "hits", 0)
    seen = Seen[FoundLog](results=VerifyingCache(), thorough_results=VerifyingCache())
    caches = SharedCaches(
        seen, RecoveredLogCache(opened=VerifyingCache(), verified=VerifyingCache())
    )
    for actions in (
        ["append_big", "append_os", "truncate"],
        ["transact", "append_big", "commit", "compact", "append"],
    ):
        explore_program(actions, durability, config=config, caches=caches, limit=limit)
    assert VerifyingCache.hits > len(seen.states) > 30 * limit


def test_cache_compares_only_the_files_that_were_read() -> None:
    """The cache compares the content of one file, the size of another, and the new
    content of a third. Other files may differ.
    """
    call_count: list[SimulatedDisk] = []

    def function(disk: SimulatedDisk) -> tuple[bytes, int, bytes]:
        call_count.append(disk)
        handles = [disk.open(path, write=True) for path in ("/a", "/b", "/c")]
        disk.truncate(handles[2], 0)
        disk.pwrite(handles[2], b"new", 0)
        return (
            disk.pread(handles[0], 9, 0),
            disk.size(handles[1]),
            disk.pread(handles[2], 9, 0),
        )

    def count(disk: SimulatedDisk) -> int:
        results.run(disk, function)
        return len(call_count)

    results: ResultCache[tuple[bytes, int, bytes]] = ResultCache()
    files: dict[str, bytes | None] = {"/a": b"1", "/b": b"2", "/c": b"3", "/d": b"4"}
    assert count(SimulatedDisk(files)) == 1
    assert count(SimulatedDisk({**files, "/b": b"x", "/c": b"longer", "/d": b""})) == 1
    assert count(SimulatedDisk({**files, "/a": b"x"})) == 2
    assert count(SimulatedDisk({**files, "/b": b"longer"})) == 3
    assert count(SimulatedDisk({**files, "/e": b""})) == 4
    assert count(SimulatedDisk({**files, "/d": None})) == 5
    assert count(SimulatedDisk(files, now_ms=1)) == 6
    assert results.get({**files, "/c": b""}, SimulatedDisk().now_ms()) == (
        b"1",
        1,
        b"new",
    )
    assert results.get({**files, "/a": b"y"}, SimulatedDisk().now_ms()) is None


# -- for hours -------------------------------------------------------------------------


def print_rate(name: str, total: Report, start_s: float) -> None:
    seconds = time.perf_counter() - start_s
    print(
        f"{name}: {total}, {seconds:.1f} s, {(total.states + total.again) / seconds:.0f} states a second"
    )


def explored_or_error(seed: int) -> Report | str:
    """Return the report, or the text of the error. An error that refers to a disk
    cannot be pickled for another process.
    """
    try:
        return explored_by_seed(seed)
    except Exception as error:
        return f"seed {seed}: {error}"


@pytest.mark.slow
def test_exploration_continues_where_the_last_run_ended() -> None:
    """A file stores the counts of the last run. The exploration uses all cores."""
    goal = int(os.environ.get("LOGCORE_EXPLORE_STATES", "20000000"))
    seconds = float(os.environ.get("LOGCORE_EXPLORE_SECONDS", "1800"))
    file = Path(os.environ.get("LOGCORE_EXPLORE_FILE", "build/explored.json"))
    saved = (
        json.loads(file.read_text())
        if file.exists()
        else {"seed": 10_000_000, "report": attrs.asdict(Report())}
    )
    total = Report(**saved["report"])
    seed = saved["seed"]
    start_s = time.perf_counter()
    before = total.states
    first_seed = seed
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        while total.states < goal and time.perf_counter() - start_s < seconds:
            chunk = range(seed, seed + 64)
            for report in pool.imap_unordered(explored_or_error, chunk):
                assert isinstance(report, Report), report
                total += report
            seed += len(chunk)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"seed": seed, "report": attrs.asdict(total)}))
    rate = (
        (total.states - before)
        / (time.perf_counter() - start_s)
        / (os.cpu_count() or 1)
    )
    print(
        f"{total.states} of {goal} states after {seed} seeds: {total}; {rate:.0f} states a second and core"
    )
    # A seed has 900 disks on average, and very few seeds have less than 100.
    assert total.states - before >= 300 * (seed - first_seed)


# -- bugs that the exploration found ---------------------------------------------------


@pytest.mark.parametrize("durability", ["os", "every(3)", "interval(20)"])
def test_log_opens_after_unsynced_records_were_deleted(durability: str) -> None:
    """The log start was durable, and the records below it were not. After a power cut
    the log ended below its start, so that it could not be opened.
    """
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, durability=durability, fs=disk)
    log.append_many([(None, b"one"), (None, b"two")], durability="os")
    log.delete_records(1)
    *_, after_power_cut = disk.after_crash(limit=2)
    disk.crash()
    with logcore.open("t-0", durability=durability, fs=after_power_cut) as log:
        assert log.log_start_offset == 1 <= log.log_end_offset


def test_interrupted_truncation_leaves_no_stale_txnindex() -> None:
    """A kill between the deletions of the .log file and of the other files of a segment
    left a .txnindex file. The next segment at that offset used the file, so that Kafka
    treated committed records as aborted.
    """
    disk = SimulatedDisk()
    config = {"segment.bytes": 250}
    log = logcore.open("t-0", create=True, config=config, fs=disk)
    rows = [(None, b"x" * 20, (), disk.now_ms())]
    for number in range(4):
        log.append_batch(
            encode(
                rows,
                producer_id=7,
                producer_epoch=0,
                base_sequence=number,
                transactional=True,
            )
        )
    log.end_transaction(7, 0, commit=False)
    last = log._state.segments[-1]
    assert disk.exists(last.file(".txnindex")) and last.base_offset > 0
    disk.faults = FaultPlan(Fault("rename", "crash", path=last.file(".index") + "*"))
    with pytest.raises(SimulatedCrash):
        log.truncate(0)  # from the last segment on
    killed = next(disk.after_crash(kind="kill"))
    disk.crash()
    assert killed.exists(last.file(".txnindex")) and not killed.exists(last.path)
    with logcore.open("t-0", config=config, fs=killed) as log:
        assert log.log_end_offset == last.base_offset
        log.roll()
        assert log.append(b"committed").offset == last.base_offset
    assert killed.exists(last.path) and not killed.exists(last.file(".txnindex"))


@pytest.mark.parametrize("lost_bytes", [8, 9, 10, 11])
def test_batch_torn_inside_its_offset_field_is_recovered(lost_bytes: int) -> None:
    """The first sector of the write is lost, and the other sectors are on disk. The
    header then contains offset 0. Recovery treated such a batch as damage to durable
    data.
    """
    size = 1
    for _ in range(4):
        disk = SimulatedDisk()
        log = logcore.open("t-0", create=True, durability="os", fs=disk)
        log.append(b"first")
        log.flush()
        log.close()
        log = logcore.open("t-0", durability="os", fs=disk)
        log.append(b"x" * size)
        path = next(filter(is_log, disk.files()))
        position = len(disk.files()[path])
        if (position + lost_bytes) % 512:
            # A longer record may need a longer length field, so try once more.
            size += -(position + lost_bytes) % 512
            disk.crash()
            continue
        log.append(b"torn")
        content = disk.files()[path]
        disk.crash()
        torn = SimulatedDisk(
            {
                **disk.files(),
                path: content[:position]
                + bytes(lost_bytes)
                + content[position + lost_bytes :],
            }
        )
        with logcore.open("t-0", durability="os", fs=torn) as reopened:
            assert reopened.log_end_offset == 2
        return
    raise AssertionError("no such size")


@pytest.mark.long
def test_truncation_into_compacted_gap_survives_crash() -> None:
    """Compaction removed all records below the offset. After a crash lost the segments
    above the offset, the log ended below its recovery point and could not be opened.
    """
    config = {"segment.bytes": 300, "cleanup.policy": "compact"}
    for changes in itertools.count():
        disk = SimulatedDisk()
        log = logcore.open("t-0", create=True, config=config, fs=disk)
        for _ in range(7):
            log.append(b"v", key=b"a")
        log.roll()
        clean(log, force=True)
        disk.crash_in(changes)
        try:
            log.truncate(1)
        except SimulatedCrash:
            for crashed_disk in disk.after_crash(limit=20):
                with logcore.open("t-0", config=config, fs=crashed_disk) as reopened:
                    assert reopened.log_end_offset >= 1
            continue
        disk.crash_in(None)
        log.close()
        return


def test_opening_succeeds_on_a_disk_without_space_for_a_file_name() -> None:
    """Recovery writes the records that it keeps into a new file. If the disk has no
    room for the file's name, recovery continues with the old file.
    """
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        log.append(b"one")
        log.append(b"two", durability="os")
        disk.kill()
    disk.faults = FaultPlan(Fault("create", errno.ENOSPC, path="*.log.tmp"))
    with logcore.open("t-0", fs=disk) as log:
        assert [record.value for record in log.read(0)] == [b"one", b"two"]


# -- failing operations ----------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("durability", "step", "first_errors"),
    [
        ("group", 10, (0,)),
        *(
            pytest.param(name, 1, (0, 4, 7), marks=pytest.mark.slow)
            for name in ("group", "os", "always")
        ),
    ],
)
def test_failing_operation_loses_no_acknowledged_record(
    durability: str, step: int, first_errors: Sequence[int]
) -> None:
    """The call that fails is the n-th, for each multiple n of `step`. Each run rotates
    through the list of errors, and `first_errors` are the positions at which the runs
    start.
    """
    cases = 0
    recoveries = Recoveries(durability, CONFIG)
    for operation, times in itertools.product(FAILING_OPERATIONS, (1, None)):
        for number in itertools.count(1, step):
            codes = [
                ERRNOS[(number + first_error) % len(ERRNOS)]
                for first_error in first_errors
            ]
            hits = [
                run_with_fault(
                    Fault(operation, code, at=number, times=times),
                    durability,
                    recoveries,
                )
                for code in codes
            ]
            cases += sum(hits)
            if not any(hits):
                break
    print(f"{cases} failures of single operations")
    assert cases >= 500 // step
