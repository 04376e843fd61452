"""Registry nodes after every possible crash, after every failing call, and after
writers were killed before their sync.
"""

from __future__ import annotations

import errno
from typing import Any

import pytest

from logcore.errors import DiskFullError, NodeNotFoundError, StorageWriteError
from logcore.registry import Node, open_registry
from logcore.testing import Fault, FaultPlan, SimulatedDisk, explore
from logcore.testing.explore import Promiser

LARGE = b"x" * 6_000


def life(disk: SimulatedDisk, promise: Promiser) -> None:
    """A persistent node is created, changed, enlarged and deleted. Each promise is the
    state that must be read from then on.
    """
    with open_registry("/data", fs=disk) as registry:
        promise((0, None))
        registry.create("/a/p", b"0")
        promise((1, b"0"))
        registry.set("/a/p", b"1")
        promise((2, b"1"))
        registry.set("/a/p", LARGE)
        promise((3, LARGE))
        registry.update("/a/p", lambda value: b"3")
        promise((4, b"3"))
        registry.delete("/a/p")
        promise((5, None))


STATES = (None, b"0", b"1", LARGE, b"3", None)


def found(disk: SimulatedDisk) -> Any:
    disk.seed += 1
    with open_registry("/data", fs=disk) as registry:
        try:
            value = registry.get("/a/p").value
        except NodeNotFoundError:
            value = None
        # The registry can be used, whatever it contains.
        registry.update("/a/p", lambda before: before or b"made")
        registry.set("/a/p", b"later")
        assert registry.get("/a/p").value == b"later"
        registry.delete("/a/p")
        return value


def check(promised: list[tuple[int, bytes | None]], value: bytes | None) -> None:
    last = max((number for number, _ in promised), default=0)
    assert value in STATES[last : last + 2], f"{value!r} behind {promised[-1:]!r}"


@pytest.mark.long
@pytest.mark.parametrize("names", ["posix", "journal"])
def test_crash_at_any_step_keeps_a_persistent_node_valid(names: Any) -> None:
    report = explore(
        life, found, check, files={"data": None}, names=names, limit=60, again_every=0
    )
    assert report.states > 100


def test_unsynced_version_of_a_dead_writer_does_not_affect_others() -> None:
    """The second writer syncs before it writes. If neither slot were on disk, a power
    cut would leave no version.
    """
    disk = SimulatedDisk({"data": None})
    with open_registry("/data", fs=disk) as other:
        first = open_registry("/data", fs=disk)
        other.create("/p", b"0")
        # The lost sync simulates a kill before the sync.
        disk.faults = FaultPlan(Fault("fdatasync", "lie", path="*p.node"))
        first.set("/p", b"1")
        disk.faults = None
        disk.operations.clear()
        seen: set[bytes] = set()

        def observe(operation: str, is_done: bool) -> None:
            if operation == "pwrite" and is_done:
                for after in disk.after_crash(limit=40):
                    with open_registry("/data", fs=after) as registry:
                        seen.add(registry.get("/p").value)

        disk.observer = observe
        other.set("/p", b"2")
        disk.observer = None
        first.close()
    assert seen <= {b"1", b"2"}, (
        "a power cut lost both values, or left a file without a version"
    )


def test_change_with_a_failed_sync_is_not_visible() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        open_registry("/data", fs=disk) as first,
        open_registry("/data", fs=disk) as other,
    ):
        first.create("/p", b"0")
        first.set("/p", b"1")
        disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, path="*p.node"))
        with pytest.raises(StorageWriteError):
            first.set("/p", b"2")
        assert other.get("/p") == Node(b"1", 1), (
            "a value that may not be on disk is visible"
        )
        # The next writer must not overwrite the only version that is on disk.
        for after in disk.after_crash(limit=60, kind="power"):
            with open_registry("/data", fs=after) as registry:
                assert registry.get("/p").value in (b"1", b"2")
        assert other.set("/p", b"3") == 2
        for after in disk.after_crash(limit=60, kind="power"):
            with open_registry("/data", fs=after) as registry:
                assert registry.get("/p") == Node(b"3", 2)


@pytest.mark.parametrize(
    "operation",
    ["fdatasync", "sync_dir", "rename", "pwrite", "create", "mkdir", "unlink"],
)
@pytest.mark.parametrize("at", range(1, 12))
def test_failing_call_leaves_the_state_before_or_after_it(
    operation: str, at: int
) -> None:
    """After an error at any operation, the next opening finds the state before or after
    the call.
    """
    disk = SimulatedDisk(
        {"data": None}, faults=FaultPlan(Fault(operation, errno.EIO, at=at))
    )
    promised: list[Any] = []
    try:
        life(disk, lambda value, survives="power": promised.append(value))
    except StorageWriteError:
        pass
    disk.faults = None
    check(promised, found(disk))


@pytest.mark.parametrize("at", range(1, 8))
def test_full_disk_loses_no_acknowledged_change(at: int) -> None:
    disk = SimulatedDisk(
        {"data": None},
        faults=FaultPlan(Fault("pwrite", errno.ENOSPC, at=at, times=None)),
    )
    promised: list[Any] = []
    with pytest.raises(DiskFullError):
        life(disk, lambda value, survives="power": promised.append(value))
    disk.faults = None
    check(promised, found(disk))


def test_a_power_cut_ends_every_session() -> None:
    disk = SimulatedDisk({"data": None})
    registry = open_registry("/data", fs=disk)
    registry.create("/e", b"x", ephemeral=True)
    registry.create("/consumers/g/group", b"state")
    disk.write_back()
    disk.crash()
    (after,) = disk.after_crash(limit=1)
    after.seed += 1
    with open_registry("/data", fs=after) as again:
        with pytest.raises(NodeNotFoundError):
            again.get("/e")
        assert again.get("/consumers/g/group").value == b"state"
        assert [
            info.state for info in again.sessions() if info.id != again.session.id
        ] == ["dead"]
        again.clean()
        assert [info.id for info in again.sessions()] == [again.session.id]


def test_the_state_of_a_group_is_not_synced() -> None:
    disk = SimulatedDisk({"data": None})
    with open_registry("/data", fs=disk) as registry:
        registry.create("/consumers/g/group", b"0")
        disk.operations.clear()
        registry.set("/consumers/g/group", b"1")
        registry.update("/consumers/g/group", lambda value: b"2")
        assert {operation.name for operation in disk.operations} == {"pwrite"}
