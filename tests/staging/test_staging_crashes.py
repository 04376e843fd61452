"""Staged writes and crashes at each operation, by a kill or a power cut: each write is
stored completely or not at all, and once.

The tests use the simulated disk. drive() does the work of the driver and the tasks, and
a crash ends it in the middle of an operation on the disk. `make check` crashes in some
operations. `make slow` crashes in all of them, and checks more of the disks that each
crash may leave.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import logcore
from logcore.errors import CorruptLogError, LogcoreError, LogFailedError
from logcore.inspect.verify import verify
from logcore.metadata.filenames import staging_path
from logcore.staging.publishing import Staging
from logcore.testing import (
    CrashState,
    Fault,
    FaultPlan,
    Operation,
    SimulatedCrash,
    SimulatedDisk,
)
from support.staged import PARTITIONS, SMALL, create, publish, rows, staged, values

PATH = Path("/data")
CONFIGS = [None, SMALL]
CONFIG_NAMES = ["appended", "moved"]
#: Rows in each partition.
COUNT = 60
ALL = [pytest.mark.slow, pytest.mark.timeout(3600)]


def drive(
    disk: SimulatedDisk, config: dict[str, str] | None, *, carries: bool = False
) -> None:
    """Do the work of the driver and its tasks: stage, publish, open the directory, and
    append more.
    """
    publish(PATH, "first", fs=disk, config=config, count=COUNT, carries=carries)
    with logcore.open_dir(PATH, fs=disk) as directory:
        directory.partition("t", 0).append(b"after")


def life(
    config: dict[str, str] | None, *, carries: bool = False, crash_at: int | None = None
) -> SimulatedDisk:
    """Return a disk on which drive() ran, up to its operation number `crash_at`. The
    `operations` of the disk are only the operations of drive().
    """
    disk = SimulatedDisk()
    create(PATH, config, fs=disk)
    disk.operations.clear()
    disk.crash_in(crash_at)
    with contextlib.suppress(SimulatedCrash):
        drive(disk, config, carries=carries)
    return disk


def killed(disk: SimulatedDisk) -> SimulatedDisk:
    """Return the disk that the kill of a process leaves, with all bytes that were
    written.
    """
    return next(disk.after_crash(limit=1))


def seen(disk: SimulatedDisk) -> list[int]:
    """Return the number of staged rows of each partition, and check each row."""
    counts = []
    for partition in PARTITIONS:
        found = [
            value
            for value in values(PATH, partition, fs=disk)
            if value not in (b"before", b"after")
        ]
        assert found == rows("first", partition, COUNT)[: len(found)]
        counts.append(len(found))
    return counts


def listed(disk: SimulatedDisk) -> list[str]:
    if not disk.is_directory(staging_path(str(PATH))):
        return []
    return staged(PATH, fs=disk)


def crashes(
    config: dict[str, str] | None, *, carries: bool, step: int, limit: int
) -> Iterator[tuple[int, CrashState, SimulatedDisk]]:
    """Yield the number of an operation, the state that a crash in that operation may
    leave, and its disk. Only every `step`-th operation crashes. Each operation has at
    most `limit` disks, which include a kill and a power cut that loses all unsynced
    changes.
    """
    count = len(life(config, carries=carries).operations)
    assert count > 60
    for at in range(0, count, step):
        disk = life(config, carries=carries, crash_at=at)
        for state in disk.crash_states(limit=limit, seed=at):
            yield at, state, state.disk()


@pytest.mark.long
@pytest.mark.parametrize(("step", "limit"), [(11, 3), pytest.param(1, 60, marks=ALL)])
@pytest.mark.parametrize(
    ("config", "carries"),
    [(None, False), (SMALL, False), (None, True), (SMALL, True)],
    ids=["appended", "moved", "carried", "carried to segments"],
)
def test_a_crash_at_any_operation_leaves_all_or_nothing(
    config: dict[str, str] | None, carries: bool, step: int, limit: int
) -> None:
    """After the next opening, all partitions have all rows, or none of them if
    publish() had not returned. The driver then runs again under the same name.
    Afterwards, each row is stored once.
    """
    outcomes = set()
    published_at = publishes_at(config, carries=carries)
    for at, state, disk in crashes(config, carries=carries, step=step, limit=limit):
        has_manifest = any(
            name.endswith((".json", ".claim", ".assigned", ".state"))
            for name in listed(disk)
        )
        with logcore.open_dir(PATH, fs=disk) as directory:
            for partition in PARTITIONS:
                directory.partition("t", partition)
        counts = seen(disk)
        if at > published_at or (has_manifest and state.kind == "kill"):
            assert counts == [COUNT, COUNT], state.what
        elif not has_manifest:
            assert counts == [0, 0], state.what
        else:  # a manifest on disk without its files is refused
            assert counts in ([0, 0], [COUNT, COUNT]), state.what
        outcomes.add(tuple(counts))
        assert Staging(disk, str(PATH)).is_done("app", 0) == bool(counts[0]), state.what
        publish(
            PATH,
            "second",
            fs=disk,
            name="first",
            config=config,
            count=COUNT,
            carries=carries,
        )
        with logcore.open_dir(PATH, fs=disk) as directory:
            directory.partition("t", 1).append(b"after")
        assert seen(disk) == [COUNT, COUNT], state.what
        # Other files are deleted after a day.
        assert set(staged(PATH, fs=disk)) <= {"app.state", "first"}, state.what
        verdicts = {verdict.status for verdict in verify(str(PATH), fs=disk)}
        # A torn tail and lost indexes are warnings.
        assert verdicts <= {"ok", "warning"}, state.what
    assert outcomes == {(0, 0), (COUNT, COUNT)}


@pytest.mark.long
@pytest.mark.parametrize(("step", "limit"), [(7, 3), pytest.param(1, 40, marks=ALL)])
@pytest.mark.parametrize("durability", ["group", "os"])
@pytest.mark.parametrize("config", CONFIGS, ids=CONFIG_NAMES)
def test_readers_after_any_crash_see_a_complete_write_or_none(
    config: dict[str, str] | None, durability: str, step: int, limit: int
) -> None:
    """A driver was killed between two partitions. Readers in other processes then saw a
    part of the write, until the directory was opened for writing.
    """

    def driven(crash_at: int | None) -> SimulatedDisk:
        disk = SimulatedDisk()
        create(PATH, config, fs=disk)
        publish(PATH, "first", fs=disk, config=config, count=COUNT)
        disk.operations.clear()
        disk.crash_in(crash_at)
        with (
            contextlib.suppress(SimulatedCrash),
            logcore.open_dir(PATH, fs=disk, durability=durability) as directory,
        ):
            directory.partition("t", 0).append(b"after", durability="disk")
        return disk

    outcomes = set()
    for at in range(0, len(driven(None).operations), step):
        disk = driven(at)
        for state in disk.crash_states(limit=limit, seed=at):
            counts = seen(state.disk())
            assert counts in ([0, 0], [COUNT, COUNT]), (
                f"operation {at}: {state.what}: {counts}"
            )
            outcomes.add(counts[0])
    assert outcomes == {0, COUNT}


def rename_at(operations: Sequence[Operation], suffix: str) -> int:
    """Return the number of the operation that renames the manifest to its final name."""
    return next(
        number
        for number, operation in enumerate(operations)
        if operation.name == "rename" and operation.path.endswith(suffix)
    )


def publishes_at(config: dict[str, str] | None, *, carries: bool) -> int:
    """Return the number of the last operation of publish(), which syncs the name of the
    manifest.
    """
    return rename_at(life(config, carries=carries).operations, ".json") + 1


def assigned_at(config: dict[str, str] | None) -> int:
    """Return the number of the operation that assigns the offsets of the staged rows."""
    return rename_at(life(config).operations, ".assigned")


@pytest.mark.long
@pytest.mark.parametrize(("step", "limit"), [(4, 3), pytest.param(1, 60, marks=ALL)])
@pytest.mark.parametrize("config", CONFIGS, ids=CONFIG_NAMES)
def test_crash_during_roll_forward_is_rolled_forward(
    config: dict[str, str] | None, step: int, limit: int
) -> None:
    """A process dies after it assigned the offsets and before it placed a file. The
    repair then crashes at each operation.
    """
    crash_at = assigned_at(config) + 3

    def broken() -> SimulatedDisk:
        disk = killed(life(config, crash_at=crash_at))
        assert any(name.endswith(".assigned") for name in listed(disk))
        disk.operations.clear()
        return disk

    whole = broken()
    with logcore.open_dir(PATH, fs=whole):
        count = len(whole.operations)
    assert count > 10
    for at in range(0, count, step):
        dying = broken()
        dying.crash_in(at)
        with pytest.raises(SimulatedCrash):
            logcore.open_dir(PATH, fs=dying)
        for state in dying.crash_states(limit=limit, seed=at):
            disk = state.disk()
            with logcore.open_dir(PATH, fs=disk):
                pass
            assert seen(disk) == [COUNT, COUNT], f"operation {at}: {state.what}"


@pytest.mark.parametrize("config", CONFIGS, ids=CONFIG_NAMES)
def test_another_programs_records_are_not_overwritten(
    config: dict[str, str] | None,
) -> None:
    """After the crash, Kafka appends at the offsets of the staged records. Neither Kafka's
    records nor the staged ones may be lost.
    """
    disk = killed(life(config, crash_at=assigned_at(config) + 2))
    last = max(
        path
        for path in disk.files()
        if path.startswith("/data/t-1/") and path.endswith(".log")
    )
    elsewhere = SimulatedDisk()
    with logcore.open_dir(PATH, create=True, fs=elsewhere) as other:
        other.create_topic("x")
        other.partition("x", 0).append_many([(None, b"foreign"), (None, b"too")])
    foreign = bytearray(elsewhere.content(f"/data/x-0/{0:020d}.log"))
    foreign[:8] = (1).to_bytes(8, "big")  # after "before"
    content = disk.content(last) + foreign
    disk.put(last, content)
    with logcore.open_dir(PATH, fs=disk) as directory:
        directory.create_topic("other")
        assert directory.partition("other", 0).append(b"goes on").offset == 0
        for partition in PARTITIONS:
            with pytest.raises(CorruptLogError, match=r"another program.*\.assigned"):
                directory.partition("t", partition)
    assert disk.content(last) == content
    # Deleting the topic resolves the conflict.
    with logcore.open_dir(PATH, fs=disk) as directory:
        directory.delete_topic("t")
        directory.create_topic("t", 2)
        assert directory.partition("t", 1).append(b"new").offset == 0
    with logcore.open_dir(PATH, fs=disk) as directory:
        assert directory.partition("t", 1).log_end_offset == 1


def test_version_published_again_after_a_failed_placement_is_placed_once() -> None:
    """A write failed while tick() placed the version. The driver gave up and published
    the version again. Opening the failed log placed the first attempt. tick() then
    placed the second attempt, because it used a state that it had read earlier.
    """
    disk = SimulatedDisk()
    create(PATH, fs=disk)
    with logcore.open_dir(PATH, fs=disk) as service:
        for partition in PARTITIONS:
            service.partition("t", partition)
        publish(PATH, "first", fs=disk, name="rows", count=COUNT)
        disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*/t-0/*.log"))
        service.tick()
        publish(PATH, "second", fs=disk, name="rows", count=COUNT)
        for partition in PARTITIONS:
            with contextlib.suppress(LogFailedError):
                service.partition("t", partition).close()
        service.tick()
    for partition in PARTITIONS:
        assert values(PATH, partition, fs=disk) == [
            b"before",
            *rows("rows", partition, COUNT),
        ]


def test_later_version_waits_for_a_partially_applied_one() -> None:
    """The state records only the last version. When the later version was done, the
    missing half of the earlier version was lost.
    """
    disk = SimulatedDisk()
    create(PATH, fs=disk)
    with logcore.open_dir(PATH, fs=disk) as service:
        publish(PATH, "one", fs=disk, version=1, count=COUNT)
        disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*/t-0/*.log"))
        service.tick()
        publish(PATH, "two", fs=disk, version=2, count=COUNT)
        service.tick()
        assert Staging(disk, str(PATH)).outcome("app", 2) == "pending"
    with logcore.open_dir(PATH, fs=disk):
        pass
    for partition in PARTITIONS:
        found = values(PATH, partition, fs=disk)
        assert found == [
            b"before",
            *rows("one", partition, COUNT),
            *rows("two", partition, COUNT),
        ]


@pytest.mark.long
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", CONFIGS, ids=CONFIG_NAMES)
def test_retry_after_failed_syncs_makes_the_records_durable(
    config: dict[str, str] | None, step: int
) -> None:
    """After a failed sync, the bytes are in the page cache and marked clean. The retry
    found these bytes, wrote nothing, and recorded the write as done. A power cut then
    lost the rows.
    """
    failed = 0
    for operation in ("fsync", "fdatasync", "sync_dir"):
        for at in range(1, 30, step):
            disk = SimulatedDisk()
            create(PATH, config, fs=disk)
            publish(PATH, "first", fs=disk, config=config, count=COUNT)
            disk.faults = FaultPlan(Fault(operation, errno.EIO, at=at))
            for _ in range(3):
                with contextlib.suppress(LogcoreError), logcore.open_dir(PATH, fs=disk):
                    pass
            failed += len(disk.faults.hits)
            for after in disk.after_crash(limit=6):
                if Staging(after, str(PATH)).is_done("app", 0):
                    with logcore.open_dir(PATH, fs=after):
                        assert seen(after) == [COUNT, COUNT], (
                            f"{operation} {at}: {after}"
                        )
    assert failed > 20 // step
