"""The simulated disk simulates every permitted behavior of a disk. The test kit on it
reports faulty code, and only faulty code.

The tests compare the disk with the operating system under the same calls, and with the
rules for crashes at the top of logcore/testing/disk.py. The crash explorer over the log
is in test_crash_explorer.py.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib.metadata
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

import logcore
from logcore.fs import FS, OsFS, SharedFS
from logcore.testing import (
    CrashTestError,
    Fault,
    FaultPlan,
    FoundLog,
    LogHistory,
    LogStateMachine,
    SimulatedCrash,
    SimulatedDisk,
    explore,
    recover_log,
    strategies,
)
from logcore.testing.crash_states import SECTOR

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(logcore.__file__).resolve().parents[1]


def contents(disk: SimulatedDisk, path: str, **options: Any) -> set[bytes | None]:
    """Return the contents that one file may have after a crash."""
    return {state.files.get(path) for state in disk.crash_states(**options)}


def written(disk: SimulatedDisk, path: str, data: bytes, *, sync: bool = False) -> int:
    handle = disk.open(path, write=True, create=True)
    disk.pwrite(handle, data, 0)
    if sync:
        disk.fsync(handle)
    return handle


# -- visible content -------------------------------------------------------------------


def call_at_random(fs: FS, root: str, rng: random.Random, handles: list[int]) -> Any:
    """Make one random call; return its result, or the type of its error."""
    path, other = (
        f"{root}/{rng.choice(['a', 'b', 'd/a', 'd/c', 'd', 'e'])}" for _ in range(2)
    )
    size = rng.randrange(0, 1500)
    position = rng.randrange(0, 3000)
    handle = rng.choice(handles) if handles else -1
    calls: list[Any] = [
        lambda: handles.append(fs.open(path, write=True, create=True)) or None,
        lambda: (
            handles.append(fs.open(path, write=True, create=True, exclusive=True))
            or None
        ),
        lambda: fs.file_size(path) if not fs.is_directory(path) else None,
        lambda: sorted(fs.listdir(path)),
        lambda: fs.mkdir(path),
        lambda: fs.unlink(path),
        lambda: fs.rmdir(path),
        lambda: fs.rename(path, other),
        lambda: (fs.exists(path), fs.is_directory(path)),
        lambda: fs.sync_dir(path),
    ]
    if handles:
        calls += [
            lambda: fs.pwrite(handle, bytes([rng.randrange(1, 256)]) * size, position),
            lambda: fs.pread(handle, size, position),
            lambda: fs.truncate(handle, position),
            lambda: fs.size(handle),
            lambda: fs.fdatasync(handle),
            lambda: bytes(fs.map(handle, fs.size(handle))) if fs.size(handle) else b"",
        ] * 2
    try:
        return rng.choice(calls)()
    except (logcore.LogcoreError, FileNotFoundError, FileExistsError) as error:
        return type(error).__name__


@pytest.mark.parametrize("seed", range(40))
def test_disk_behaves_like_the_operating_system(seed: int, tmp_path: Path) -> None:
    real = OsFS()
    disk = SimulatedDisk()
    disk.mkdir("/r")
    first = random.Random(seed)
    other = random.Random(seed)
    disk_handles: list[int] = []
    real_handles: list[int] = []
    for _ in range(120):
        assert call_at_random(disk, "/r", first, disk_handles) == call_at_random(
            real, str(tmp_path), other, real_handles
        )
    for handle in real_handles:
        real.close(handle)


# -- many processes --------------------------------------------------------------------


def lock_at_random(
    fs: SharedFS, root: str, rng: random.Random, handles: list[int]
) -> Any:
    """Make one random call about byte locks; return its result."""
    path = f"{root}/{rng.choice('ab')}"
    byte = rng.choice([0, 1, 17, (1 << 62) - 1])
    if len(handles) < 3 or rng.random() < 0.1:
        return handles.append(fs.open(path, write=True, create=True))
    handle = rng.choice(handles)
    calls: list[Any] = [
        lambda: fs.lock_byte(handle, byte),
        lambda: fs.lock_byte(handle, byte, shared=True),
        lambda: fs.unlock_byte(handle, byte),
        lambda: fs.is_byte_locked(handle, byte),
        lambda: handles.remove(handle) or fs.close(handle),
    ]
    return rng.choices(calls, [3, 3, 2, 4, 1])[0]()


@pytest.mark.skipif(
    not hasattr(fcntl, "F_OFD_SETLK"), reason="no open-file-description locks"
)
@pytest.mark.parametrize("seed", range(10))
def test_bytes_are_locked_as_the_operating_system_locks_them(
    seed: int, tmp_path: Path
) -> None:
    real = OsFS()
    disk = SimulatedDisk()
    disk.mkdir("/r")
    first = random.Random(seed)
    other = random.Random(seed)
    disk_handles: list[int] = []
    real_handles: list[int] = []
    for _ in range(200):
        assert lock_at_random(disk, "/r", first, disk_handles) == lock_at_random(
            real, str(tmp_path), other, real_handles
        )
    for handle in real_handles:
        real.close(handle)


def test_time_passes_while_a_lock_is_awaited() -> None:
    disk = SimulatedDisk()
    holder = disk.open("a", write=True, create=True)
    other = disk.open("a", write=True)
    assert disk.lock_byte(holder, 5)
    assert not disk.lock_byte(other, 5, timeout_ms=300)
    assert disk.monotonic_ms() == 300
    disk.kill()
    assert disk.lock_byte(disk.open("a", write=True), 5)


def test_permissions_for_others_override_the_umask(
    tmp_path: Path,
) -> None:
    real = OsFS()
    before = os.umask(0o077)
    try:
        real.mkdir(f"{tmp_path}/shared", permissions=0o770)
        real.close(
            real.open(
                f"{tmp_path}/shared/a",
                write=True,
                create=True,
                exclusive=True,
                permissions=0o660,
            )
        )
        real.mkdir(f"{tmp_path}/own", permissions=0o700)
        real.close(
            real.open(
                f"{tmp_path}/own/a",
                write=True,
                create=True,
                exclusive=True,
                permissions=0o600,
            )
        )
    finally:
        os.umask(before)
    found = {
        name: real.permissions(f"{tmp_path}/{name}")
        for name in ("shared", "shared/a", "own", "own/a")
    }
    assert found == {"shared": 0o770, "shared/a": 0o660, "own": 0o700, "own/a": 0o600}


@pytest.mark.skipif(sys.platform != "linux", reason="inotify")
def test_watch_for_closed_writers_ignores_their_writes(tmp_path: Path) -> None:
    real = OsFS()
    handle = real.open(f"{tmp_path}/a", write=True, create=True)
    watch = real.watch(closing=[str(tmp_path)])
    try:
        assert watch.fileno() >= 0
        real.pwrite(handle, b"x", 0)
        assert not watch.wait(0)
        assert not watch.saw_close
        real.close(handle)
        assert watch.wait(0)
        assert watch.saw_close
    finally:
        watch.close()


# -- mappings, locks, clocks -----------------------------------------------------------


def test_mapping_shows_later_writes_and_garbage_after_a_truncation() -> None:
    disk = SimulatedDisk()
    handle = written(disk, "a", b"x" * 9000)
    view = disk.map(handle, 9000)[100:]
    disk.pwrite(handle, b"later", 100)
    assert bytes(view[:5]) == b"later"
    disk.truncate(handle, 4000)
    assert bytes(view[3899:3902]) == b"x\0\0", "the rest of the page is zeros"
    assert set(view[4096:]) == {0xDE}, "truncated pages contain garbage"
    with pytest.raises(TypeError):
        view[0] = 1


def test_lock_excludes_a_second_writer_until_the_crash() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        with pytest.raises(logcore.LogLockedError):
            logcore.open("t-0", fs=disk)
        log.append(b"x")
        (after,) = disk.after_crash(limit=1)
        with logcore.open("t-0", fs=after) as again:
            assert again.log_end_offset == 1
    with logcore.open("t-0", fs=disk):
        pass


def test_killed_process_leaves_its_writes_and_no_lock() -> None:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk, durability="os")
    log.append(b"x")
    disk.kill()
    with logcore.open("t-0", fs=disk) as again:
        assert again.log_end_offset == 1
    del log
    gc.collect()  # no ResourceWarning, because the process of the handle has ended


def test_time_passes_on_request_and_during_waits() -> None:
    disk = SimulatedDisk(now_ms=5_000)
    disk.advance(10)
    assert (disk.now_ms(), disk.monotonic_ms()) == (5_010, 10)
    disk.set_wall_clock(1)
    assert (disk.now_ms(), disk.monotonic_ms()) == (1, 10)
    with logcore.open("t-0", create=True, fs=disk) as log:
        log.append(b"x")
        with logcore.open("t-0", read_only=True, fs=disk) as reader:
            assert [record.value for record in reader.tail(0, timeout=60)] == [b"x"]
    assert disk.monotonic_ms() >= 60_000


def test_real_directory_can_be_loaded_and_stored(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append(b"x")
    disk = SimulatedDisk.load(tmp_path)
    with logcore.open("t-0", fs=disk) as log:
        log.append(b"y")
    disk.save(tmp_path / "out")
    with logcore.open(tmp_path / "out" / "t-0", read_only=True) as log:
        assert [record.value for record in log.read(0)] == [b"x", b"y"]


def test_the_same_seed_gives_the_same_disks() -> None:
    def disks_after_crash(seed: int) -> list[Any]:
        disk = SimulatedDisk(seed=seed)
        with logcore.open("t-0", create=True, fs=disk, durability="os") as log:
            log.append_many([(None, b"%d" % at * 300) for at in range(5)])
            return [
                (state.kind, state.what, state.files) for state in disk.crash_states()
            ]

    assert disks_after_crash(1) == disks_after_crash(1)
    assert disks_after_crash(1) != disks_after_crash(2)


# -- files after a crash ---------------------------------------------------------------


def test_unsynced_changes_may_be_lost_or_not() -> None:
    disk = SimulatedDisk()
    handle = written(disk, "a", b"one", sync=True)
    assert contents(disk, "/a") == {b"one", None}, (
        "the file is synced, but its name is not"
    )
    disk.sync_dir("/")
    assert contents(disk, "/a") == {b"one"}
    disk.pwrite(handle, b"two", 3)
    disks_after_crash = contents(disk, "/a")
    assert {b"one", b"onetwo", b"onet", b"one\0\0\0"} <= disks_after_crash
    assert all(
        content is not None and content.startswith(b"one") and len(content) <= 6
        for content in disks_after_crash
    )
    disk.fdatasync(handle)
    assert contents(disk, "/a") == {b"onetwo"}, "fdatasync also makes the size durable"


def test_overwrite_is_torn_only_between_its_sectors() -> None:
    disk = SimulatedDisk({"a": b"o" * 4 * SECTOR})
    handle = disk.open("/a", write=True)
    disk.pwrite(handle, b"n" * 2 * SECTOR, SECTOR // 2)
    disks_after_crash = contents(disk, "/a")
    assert len(disks_after_crash) > 8
    for content in disks_after_crash:
        assert content is not None and len(content) == 4 * SECTOR
        assert (
            set(content[: SECTOR // 2]) == set(content[SECTOR * 5 // 2 :]) == {ord("o")}
        )
        assert set(content) <= {0, ord("n"), ord("o")}


def test_rename_is_atomic_and_may_precede_the_data() -> None:
    disk = SimulatedDisk({"a": b"old"})
    disk.close(written(disk, "a.tmp", b"new"))
    disk.rename("a.tmp", "a")
    states = list(disk.crash_states())
    assert {state.files["/a"] for state in states} >= {b"old", b"new", b""}
    assert all(
        ("/a.tmp" in state.files) <= (state.files["/a"] == b"old") for state in states
    )


def test_a_journal_keeps_the_order_of_names_and_the_data_before_a_rename() -> None:
    disk = SimulatedDisk({"a": b"old"}, names="journal")
    disk.close(written(disk, "a.tmp", b"new"))
    disk.rename("a.tmp", "a")
    disk.mkdir("later")
    states = list(disk.crash_states())
    assert {state.files["/a"] for state in states} == {b"old", b"new"}
    assert all(
        state.files["/a"] == b"new" for state in states if "/later" in state.files
    )
    disk.fsync(written(disk, "b", b""))
    assert all("/later" in state.files for state in disk.crash_states()), (
        "any fsync makes all earlier names durable"
    )


def test_a_failed_sync_loses_the_data_and_the_next_one_succeeds() -> None:
    disk = SimulatedDisk(faults=FaultPlan(Fault("fsync", errno.EIO)))
    handle = written(disk, "a", b"data")
    disk.sync_dir("/")
    with pytest.raises(logcore.StorageWriteError):
        disk.fsync(handle)
    disk.fsync(handle)
    assert disk.files() == {"/a": b"data"}, "programs can still read the data"
    assert contents(disk, "/a", kind="power") == {b"\0\0\0\0"}


@pytest.mark.parametrize("changes", range(8))
def test_log_can_be_opened_after_a_crash_inside_open(changes: int) -> None:
    disk = SimulatedDisk()
    disk.crash_in(changes)
    with pytest.raises(SimulatedCrash):
        logcore.open("t-0", create=True, fs=disk)
    assert len(disk.operations) == changes + 1
    with pytest.raises(SimulatedCrash):
        disk.listdir("/")
    for after in disk.after_crash():
        with logcore.open("t-0", create=True, fs=after) as log:
            assert log.append(b"x").offset == 0


def test_bytes_written_back_by_the_system_are_durable() -> None:
    disk = SimulatedDisk()
    written(disk, "a", b"data")
    disk.write_back()
    assert contents(disk, "/a") == {b"data"}


def test_power_cut_keeps_what_was_synced() -> None:
    disk = SimulatedDisk({"/d": None})
    for name in ("a", "b"):
        handle = disk.open(f"/d/{name}", write=True, create=True)
        disk.pwrite(handle, b"synced", 0)
        disk.fdatasync(handle)
        disk.sync_dir("/d")
        disk.pwrite(handle, b"later", 6)
    disk.unlink("/d/b")
    cuts = [disk.after_power_cut(random.Random(seed)) for seed in range(60)]
    again = disk.after_power_cut(random.Random(7))
    assert again.files() == cuts[7].files()
    assert all(cut.content("/d/a").startswith(b"synced") for cut in cuts)
    ends = {cut.content("/d/a")[6:] for cut in cuts}
    assert {b"", b"later"} < ends  # the other contents are torn writes
    assert {cut.exists("/d/b") for cut in cuts} == {True, False}


def test_states_are_limited_and_distinct() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk, durability="os") as log:
        log.append_many([(None, b"%d" % at * 300) for at in range(5)])
        states = list(disk.crash_states())
        assert (
            len({frozenset(state.files.items()) for state in states})
            == len(states)
            > 20
        )
        assert len(list(disk.crash_states(limit=10))) == 10
        kills = list(disk.crash_states(kind="kill"))
        assert [state.what for state in kills] == ["killed"]
        assert "after" not in repr(disk) and "killed" in repr(kills[0].disk())


# -- faults ----------------------------------------------------------------------------


def test_a_plan_counts_by_operation_and_path() -> None:
    plan = FaultPlan(
        Fault("pwrite", errno.ENOSPC, path="*.log", at=2),
        Fault("rename", errno.EIO, times=None),
    )
    disk = SimulatedDisk(faults=plan)
    handles = [written(disk, name, b"x") for name in ("a.log", "b.txt")]
    disk.pwrite(handles[1], b"y", 1)
    with pytest.raises(logcore.DiskFullError):
        disk.pwrite(handles[0], b"1234", 1)
    assert disk.files()["/a.log"] == b"x12", "a full disk stores the first half"
    disk.pwrite(handles[0], b"1234", 1)
    for _ in range(3):
        with pytest.raises(logcore.StorageWriteError):
            disk.rename("a.log", "c")
    assert [hit[1].name for hit in plan.hits] == [
        "pwrite",
        "rename",
        "rename",
        "rename",
    ]
    with pytest.raises(ValueError, match="unknown operation"):
        Fault("fsnyc")


def test_every_operation_can_fail() -> None:
    disk = SimulatedDisk({"a": b"x", "d": None, "e": None})
    handle = disk.open("a", write=True)
    calls: dict[str, Any] = {
        "open": lambda: disk.open("a"),
        "create": lambda: disk.open("new", write=True, create=True),
        "pread": lambda: disk.pread(handle, 1, 0),
        "pwrite": lambda: disk.pwrite(handle, b"yy", 0),
        "truncate": lambda: disk.truncate(handle, 0),
        "fdatasync": lambda: disk.fdatasync(handle),
        "fsync": lambda: disk.fsync(handle),
        "size": lambda: disk.size(handle),
        "map": lambda: disk.map(handle, 1),
        "file_size": lambda: disk.file_size("a"),
        "identity": lambda: disk.identity("a"),
        "listdir": lambda: disk.listdir("/"),
        "modified_ms": lambda: disk.modified_ms("a"),
        "mkdir": lambda: disk.mkdir("f"),
        "rename": lambda: disk.rename("a", "b"),
        "unlink": lambda: disk.unlink("a"),
        "rmdir": lambda: disk.rmdir("e"),
        "sync_dir": lambda: disk.sync_dir("/"),
    }
    for operation, call in calls.items():
        for code, names in ((errno.EIO, 1), (errno.EMFILE, 2)):
            disk.faults = FaultPlan(Fault(operation, code))
            with pytest.raises(logcore.LogcoreError) as met:
                call()
            assert (
                isinstance(met.value.__cause__, OSError)
                and met.value.__cause__.errno == code
            ), (operation, names)
    disk.faults = None
    assert set(disk.files()) == {"/a"}, "failed operations left no file"


def test_false_syncs_bit_rot_and_misdirected_writes() -> None:
    disk = SimulatedDisk(faults=FaultPlan(Fault("fsync", "lie")))
    written(disk, "a", b"data", sync=True)
    disk.sync_dir("/")
    assert b"" in contents(disk, "/a"), "the false sync made nothing durable"
    disk = SimulatedDisk(faults=FaultPlan(Fault("pwrite", "rot")))
    written(disk, "a", b"data")
    assert (
        bin(
            int.from_bytes(disk.files()["/a"], "big") ^ int.from_bytes(b"data", "big")
        ).count("1")
        == 1
    )
    disk = SimulatedDisk(faults=FaultPlan(Fault("pwrite", "misdirect")))
    written(disk, "a", b"data")
    assert disk.files()["/a"] == bytes(SECTOR) + b"data"
    disk = SimulatedDisk(faults=FaultPlan(Fault("rename", "crash")))
    written(disk, "a", b"data")
    with pytest.raises(SimulatedCrash):
        disk.rename("a", "b")
    disk = SimulatedDisk({"a": b"data"})
    disk.flip("/a", 1, 3)
    assert disk.files() == {"/a": b"di" + b"ta"}


def test_append_after_a_full_disk_continues_without_a_gap() -> None:
    disk = SimulatedDisk(capacity_bytes=18_384)
    with logcore.open("t-0", create=True, fs=disk) as log:
        with pytest.raises(logcore.DiskFullError):
            for _ in range(100):
                log.append(b"x" * 100)
        stored = log.log_end_offset
        assert stored > 3
        disk.capacity_bytes = None
        assert log.append(b"y").offset == stored


# -- explore ---------------------------------------------------------------------------


def run(disk: SimulatedDisk, promise: Any) -> None:
    with logcore.open("t-0", create=True, fs=disk) as log:
        for value in (b"one", b"two"):
            promise(log.append(value).offset)


def recover(disk: SimulatedDisk) -> list[int]:
    with logcore.open("t-0", create=True, fs=disk) as log:
        return [record.offset for record in log.read(0)]


def check(promised: list[int], found: list[int]) -> None:
    assert set(promised) <= set(found)


@pytest.mark.long
@pytest.mark.parametrize("names", ["posix", "journal"])
def test_explore_accepts_a_correct_program(names: Any) -> None:
    report = explore(run, recover, check, names=names)
    assert report.states > 100
    assert report.again > 20
    assert report.moments > report.operations // 2


def test_explore_finds_a_premature_promise() -> None:
    def promise_before_sync(disk: SimulatedDisk, promise: Any) -> None:
        with logcore.open("t-0", create=True, fs=disk, durability="os") as log:
            promise(log.append(b"one").offset)

    with pytest.raises(
        CrashTestError,
        match=r"(?s)after a crash \(power\).*the last operations.*pwrite",
    ) as met:
        explore(promise_before_sync, recover, check)
    assert recover(met.value.state.disk()) == []
    assert met.value.operations[-1].name == "pwrite"

    def promise_after_sync(disk: SimulatedDisk, promise: Any) -> None:
        with logcore.open("t-0", create=True, fs=disk, durability="os") as log:
            promise(log.append(b"one").offset, survives="kill")

    assert explore(promise_after_sync, recover, check).states > 20


def test_explore_finds_a_recovery_that_fails() -> None:
    def recover_without_create(disk: SimulatedDisk) -> list[int]:
        # Without create=True: a crash may precede the creation of the directory.
        with logcore.open("t-0", fs=disk) as log:
            return [record.offset for record in log.read(0)]

    with pytest.raises(CrashTestError, match="recovery fails: LogNotFoundError"):
        explore(run, recover_without_create, check)


@pytest.mark.parametrize(
    ("start", "records", "kind", "match"),
    [
        (0, 1, "power", "acknowledged records are lost"),
        (0, 4, "power", "invented"),
        (1, 2, "power", "missing at the front"),
        (0, 2, "kill", "acknowledged records are lost"),
        (0, 2, "power", None),
        (0, 3, "kill", None),
    ],
)
def test_history_reports_missing_and_surplus_records(
    start: int, records: int, kind: Any, match: str | None
) -> None:
    rows = [strategies.Row(None, b"%d" % at, (), at).at(at) for at in range(5)]
    history = LogHistory("group")
    history.issue(rows[:3])
    history.acknowledge(2)
    history.acknowledge(3, "os")
    found = FoundLog(start, rows[start : start + records])
    if match is None:
        history.check(found, kind)
    else:
        with pytest.raises(AssertionError, match=match):
            history.check(found, kind)


def test_history_detects_a_changed_record() -> None:
    history = LogHistory("os")
    history.issue([strategies.Row(None, b"mine", (), 1).at(0)])
    with pytest.raises(AssertionError, match="records were changed"):
        history.check(
            FoundLog(0, [strategies.Row(None, b"other", (), 1).at(0)]), "power"
        )


# -- strategies, machine, plugin, example ----------------------------------------------


@pytest.mark.long
@given(strategies.logs(), strategies.faults())
@settings(max_examples=40)
def test_random_logs_contain_their_records(
    log: strategies.StoredLog, fault: Fault
) -> None:
    found = recover_log(
        log.disk, log.path, config=log.config, durability=log.durability, thorough=True
    )
    assert found.records == log.records
    log.disk.faults = FaultPlan(fault)
    try:
        with logcore.open(log.path, read_only=True, fs=log.disk) as reader:
            assert list(reader.read(0))[:-1] == log.records
    except logcore.LogcoreError:
        pass


@given(strategies.batches(), st.lists(strategies.records(), min_size=1, max_size=3))
@settings(max_examples=20)
def test_drawn_batches_and_records_are_accepted(
    batch: bytes, rows: list[strategies.Row]
) -> None:
    with logcore.open("t-0", create=True, fs=SimulatedDisk()) as log:
        end = log.append_batch(batch).last_offset + 1
        log.append_many(rows)
        assert list(log.read(end)) == [row.at(end + at) for at, row in enumerate(rows)]


#: Number of state machines, of about thirty steps each. LOGCORE_MACHINES changes it.
EXAMPLES = int(os.environ.get("LOGCORE_MACHINES", "36"))
MANY = int(os.environ.get("LOGCORE_MACHINES", "2000"))
PARTS = 2  # two processes can run one part each
MACHINE = settings(
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.mark.parametrize(
    "examples",
    [
        EXAMPLES,
        pytest.param(
            MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
        ),
    ],
)
@pytest.mark.parametrize("part", range(PARTS))
def test_log_equals_a_list_after_random_calls_and_crashes(
    part: int, examples: int
) -> None:
    @seed(2 + part)  # without its own seed, each part would repeat the same examples
    class Machine(LogStateMachine):
        counts: ClassVar[dict[str, int]] = {}

    least = {"steps": 10.0, "crashes": 0.5}
    # With few examples, some counts may by chance be near 0. The counts also depend on
    # the modules loaded.
    if examples > EXAMPLES:
        least |= {"crashes in recovery": 0.1, "transactions ended": 0.3, "refused": 0.1}
        least["sent again" if part == 0 else "compactions"] = 0.03
    if part:
        Machine.configs = strategies.configs(compacted=True)
    found = settings(MACHINE, max_examples=examples // PARTS)
    run_state_machine_as_test(Machine, settings=found)
    print(Machine.counts)
    assert all(
        Machine.counts[what] >= each * found.max_examples
        for what, each in least.items()
    ), Machine.counts


def test_state_machine_finds_a_log_that_loses_records() -> None:
    class LosingMachine(LogStateMachine):
        durabilities = st.just("group")
        counts: ClassVar[dict[str, int]] = {}

        def _open(self) -> None:
            super()._open()
            disk = self.disk
            disk.fdatasync = lambda handle: None  # type: ignore[method-assign]

    quick = settings(MACHINE, max_examples=200, phases=[], report_multiple_bugs=False)
    with pytest.raises((AssertionError, logcore.LogcoreError)):
        run_state_machine_as_test(
            LosingMachine, settings=settings(quick, phases=tuple(settings().phases)[:3])
        )
    gc.collect()


@pytest.mark.long
def test_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import logcore\n"
        "def test_dir(logcore_dir):\n"
        "    logcore_dir.create_topic('orders')\n"
        "    assert logcore_dir.partition('orders', 0).append(b'x').offset == 0\n"
        "def test_disk(simulated_disk):\n"
        "    with logcore.open('t-0', create=True, fs=simulated_disk) as log:\n"
        "        log.append(b'x')\n"
        "        assert len(list(simulated_disk.after_crash())) > 3\n"
    )
    pytest_run(tmp_path / "test_it.py", "2 passed", tmp_path / "inner", *plugin())


@pytest.mark.long
def test_the_example(tmp_path: Path) -> None:
    pytest_run(ROOT / "examples" / "test_outbox.py", "3 passed", tmp_path / "inner")


def plugin() -> list[str]:
    """Return the options that load the plugin if the installed package does not."""
    known = importlib.metadata.entry_points(group="pytest11")
    return (
        []
        if any(entry.value == "logcore.testing.pytest_plugin" for entry in known)
        else [
            "-p",
            "logcore.testing.pytest_plugin",
        ]
    )


def pytest_run(path: Path, expected: str, basetemp: Path, *options: str) -> None:
    """Run pytest on a file. Without another `basetemp`, this inner run would remove
    directories of the outer run.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={basetemp}",
        *options,
    ]
    command.append(str(path))
    found = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": found}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
        env=environment,
    )
    assert expected in done.stdout, done.stdout + done.stderr


def test_simulated_disk_works_without_hypothesis() -> None:
    command = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import logcore.testing as t\n"
        "t.SimulatedDisk()\n"
        "try: t.strategies\n"
        "except t.MissingDependencyError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    assert "[testing]" in done.stdout, done.stdout + done.stderr
    assert not hasattr(__import__("logcore.testing").testing, "nothing_of_that_name")


def test_failed_opening_of_lock_file_leaves_no_lock() -> None:
    disk = SimulatedDisk(
        faults=FaultPlan(Fault("create", errno.ENOSPC, path="*/.lock"))
    )
    with pytest.raises(logcore.LogcoreError):
        logcore.open_dir("/data", create=True, shared=True, fs=disk)
    logcore.open_dir("/data", create=True, fs=disk).close()
