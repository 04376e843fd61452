"""Explore the failure of one call of the disk during a program that continues.

A scenario prepares a disk, and uses the disk while one call fails. The scenario retries as the
error advises, and records each acknowledgement. Afterwards the disk works again, or its
power is cut. check_disk() opens each disk and compares it with the acknowledgements.

A scenario may get only errors of the library. The log must contain every acknowledged
value in order. A value whose append failed is stored at most once for each attempt. The
log contains no other value.
"""

from __future__ import annotations

import errno
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import attrs

from logcore.errors import InvalidConfigError, LogcoreError
from logcore.fs import FS
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from logcore.testing.processes import Chances, Machine

#: Errors in the order: a defect, a full disk, a full quota, no descriptors, no memory.
ERRNOS: Final = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM)
#: Number of attempts at one step. The fault occurs in the first attempt, and may affect
#: the second attempt.
ATTEMPTS: Final = 4


@attrs.define
class Ledger:
    """The values that a scenario attempted to append to each partition, and the values
    whose append was acknowledged.
    """

    attempted: dict[str, list[bytes]] = attrs.Factory(dict)
    acked: dict[str, list[bytes]] = attrs.Factory(dict)

    def append(
        self, partition: str, values: Sequence[bytes], work: Callable[[], object]
    ) -> None:
        """Run `work`, which appends values to a partition.

        The attempt is recorded before the call, and the acknowledgement after it.
        """
        self.attempted.setdefault(partition, []).extend(values)
        work()
        self.acked.setdefault(partition, []).extend(values)

    @property
    def count(self) -> int:
        return sum(map(len, self.acked.values()))

    def check(
        self, partition: str, found: Sequence[bytes | None], *, lost: bool = False
    ) -> None:
        """Compare the values of a partition with the ledger.

        With `lost`, acknowledged values may be missing, as after durability="os".
        """
        acked = self.acked.get(partition, [])
        attempted = Counter(self.attempted.get(partition, []))
        counts = Counter(found)
        for value, count in counts.items():
            assert value is not None and count <= attempted[value], (
                f"{partition}: {value!r} is stored {count} times"
            )
        if lost:
            return
        positions = []
        for value in acked:
            assert counts[value], (
                f"{partition}: acknowledged {value!r} is missing from {found}"
            )
            positions.append(max(at for at, data in enumerate(found) if data == value))
        assert positions == sorted(positions), (
            f"{partition}: not in the order of the acknowledgements: {found}"
        )


class Scenario(Protocol):
    """A program that continues after a failed call."""

    # The number of acknowledged steps.
    @property
    def acknowledged_count(self) -> int: ...

    # Runs without faults.
    def prepare(self, fs: FS) -> None: ...
    # Runs with faults.
    def run(self, fs: FS) -> None: ...
    # Checks a disk that works again, or a disk after a crash.
    def check_disk(self, fs: FS, *, is_crash: bool) -> None: ...


def persist(
    work: Callable[[], object], repair: Callable[[], object] = lambda: None
) -> bool:
    """Try a step until it succeeds, and return whether it succeeded. `repair` runs
    after each failure.
    """
    for _ in range(ATTEMPTS):
        try:
            work()
        except InvalidConfigError:  # a mistake in the scenario
            raise
        except LogcoreError:
            try:
                repair()
            except LogcoreError:
                continue
        else:
            return True
    return False


class BusyDisk(SimulatedDisk):
    """A disk whose clock advances by 100 ms with each reading of the monotonic clock.

    So calls that wait reach their timeouts.
    """

    def monotonic_ms(self) -> int:
        self.advance(100)
        return super().monotonic_ms()


def prepare_scenario(make: Callable[[], Scenario]) -> tuple[SimulatedDisk, Scenario]:
    disk = BusyDisk()
    scenario = make()
    scenario.prepare(disk)
    disk.write_back()
    disk.operations.clear()
    return disk, scenario


def count_calls(make: Callable[[], Scenario]) -> int:
    """Return the number of calls of the disk that a scenario makes without faults."""
    disk, scenario = prepare_scenario(make)
    counter = _Counter()
    disk.faults = counter
    scenario.run(disk)
    disk.faults = None
    scenario.check_disk(disk, is_crash=False)
    assert scenario.acknowledged_count > 1, "a scenario that does nothing tests nothing"
    return counter.count


class _Counter(FaultPlan):
    count = 0

    def action_for(self, operation: str, path: str) -> int | str | None:
        self.count += 1
        return None


def faults(count: int, *, step: int, first: int = 0) -> Iterator[Fault]:
    """Yield a fault at every `step`-th call. The errors alternate."""
    for number, at in enumerate(range(1 + first, count + 1, step)):
        yield Fault("*", ERRNOS[(number + at) % len(ERRNOS)], at=at)


def explore(
    make: Callable[[], Scenario],
    *,
    step: int,
    crashes: int,
    first: int = 0,
    times: int | None = 1,
) -> int:
    """Run a scenario with each fault. Check the disk that works again, and the possible disks
    after a power cut.

    `times` consecutive calls fail. Return the number of checked disks.
    """
    checked = 0
    for fault in faults(count_calls(make), step=step, first=first):
        disk, scenario = prepare_scenario(make)
        fault = attrs.evolve(fault, times=times)
        disk.faults = FaultPlan(fault)
        where = f"{fault}"
        try:
            scenario.run(disk)
            if disk.faults.hits:
                where = f"{disk.faults.hits[0][1]} fails with {errno.errorcode[fault.action]}, call {fault.at}"
            disk.faults = None
            states = list(disk.crash_states(limit=crashes, seed=fault.at))
            scenario.check_disk(disk, is_crash=False)
            checked += 1
            for state in states:
                where = f"{where.partition(';')[0]}; {state.kind}: {state.what}"
                scenario.check_disk(state.disk(), is_crash=True)
                checked += 1
            gc.collect()  # a directory that was not closed emits a warning
        except Exception as error:
            error.add_note(where)
            raise
    return checked


def explore_two_processes(
    make: Callable[[], Scenario], *, step: int, crashes: int, first: int = 0
) -> int:
    """Explore two processes that share the directory and run a scenario each. One call of
    either process fails.

    Each scenario checks its own acknowledgements, so the processes write to the same
    partitions in any order.
    """
    checked = 0
    for fault in faults(_count_calls_of_two(make), step=step, first=first):
        disk, scenarios = _prepare_two(make)
        plan = FaultPlan(fault)
        disk.faults = plan
        try:
            _run_two(disk, scenarios, seed=fault.at)
            disk.faults = None
            states = list(disk.crash_states(limit=crashes, seed=fault.at))
            for after in (disk, *(state.disk() for state in states)):
                checked += 1
                for scenario in scenarios:
                    scenario.check_disk(after, is_crash=after is not disk)
        except Exception as error:
            error.add_note(f"{plan.hits[:1] or fault}, call {fault.at}")
            raise
    return checked


def _prepare_two(make: Callable[[], Scenario]) -> tuple[SimulatedDisk, list[Scenario]]:
    disk = BusyDisk()
    scenarios = [make(), make()]
    for scenario in scenarios:
        scenario.prepare(disk)
    disk.write_back()
    disk.operations.clear()
    return disk, scenarios


def _count_calls_of_two(make: Callable[[], Scenario]) -> int:
    disk, scenarios = _prepare_two(make)
    counter = _Counter()
    disk.faults = counter
    _run_two(disk, scenarios, seed=0)
    assert all(scenario.acknowledged_count > 1 for scenario in scenarios), (
        "a scenario that does nothing tests nothing"
    )
    return counter.count


def _run_two(disk: SimulatedDisk, scenarios: list[Scenario], *, seed: int) -> None:
    machine = Machine(disk, seed=seed, chances=Chances(switch=0.1, pass_time=0))
    for scenario in scenarios:
        machine.start(scenario.run)
    machine.run()
