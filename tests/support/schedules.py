"""Schedules of simulated processes, by kind and seed. The invariants are checked at the
end of each schedule.

    run("groups quiet", 17)      raises AssertionError, with the kind and the seed, when an invariant is violated
    run_first("sharing acks", 4) runs the first four seeds of a kind
    numbered(1_000_000)          returns the kind and the seed of a schedule in a search through all kinds

Tests run some schedules of each kind, an endless search, and schedules with seeded bugs.
The docstrings of group_sharers.py, partition_sharers.py, transaction_sharers.py and
registry_histories.py list the invariants.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from typing import Any, Final

from logcore.testing import Fault, FaultPlan
from logcore.testing.processes import Chances
from support.consumer_histories import ConsumerHistory
from support.group_sharers import GroupSimulation
from support.partition_sharers import PartitionSimulation
from support.producer_histories import ProducerHistory
from support.registry_exploring import PATHS, RegistrySimulation
from support.registry_watched import WatchSimulation
from support.transaction_sharers import PipelineSimulation

QUIET: Final = Chances(switch=0.3)
# The probabilities of faults in each step. They depend on the simulation, because some
# schedules have dozens of times as many steps as others.
REGISTRY: Final = {
    "quiet": QUIET,
    "kills": Chances(switch=0.3, kill=0.004),
    "stops": Chances(switch=0.3, kill=0.002, stop=0.01),
}
SHARING: Final = {
    "quiet": QUIET,
    "kills": Chances(switch=0.3, kill=0.003),
    "stops": Chances(switch=0.3, kill=0.001, stop=0.01),
}
GROUPS: Final = {
    "quiet": QUIET,
    "kills": Chances(switch=0.3, kill=0.0007),
    "stops": Chances(switch=0.3, kill=0.0003, stop=0.003, lost=0.2),
    "clocks": Chances(switch=0.3, kill=0.0003, jump=0.001, pause=0.0007),
}
#: Some processes stop for longer than the time after which the group removes them, for
#: example in the middle of a commit.
FREEZES: Final = Chances(switch=0.3, stop=0.01, stop_steps=(5, 50, 500, 3_000))
POLICIES: Final = ("group", "os", "always", "every(3)")
#: The actions of processes on a shared partition, as letters of PartitionSimulation.
ACTS: Final = {
    "appends": "amo",
    "retries": "ab",
    "files": "aamrdf",
    "cuts": "amtfr",
    "compactions": "amrc",
    "transactions": "ax",
}
_DUAL: Final = {"dual_commit": True}
_REGISTRY: Final = {"offsets_storage": "registry"}
_BACK: Final = {"offsets_storage": "registry", "dual_commit": True}
#: The settings of members while the offsets of their group are moved between log and
#: registry. A member with the last settings reads all commits.
STORES: Final[dict[str, list[dict[str, Any]]]] = {
    "to the log": [_REGISTRY, _DUAL],
    "in the log": [{}, _DUAL],
    "to the registry": [{}, _BACK],
    "back": [_REGISTRY, _BACK],
}


# -- one schedule of each simulation ---------------------------------------------------


def registry(seed: int, chances: Chances) -> None:
    paths = PATHS if seed % 3 else PATHS[2:3]
    simulation = RegistrySimulation(
        seed, chances=chances, processes=2 + seed % 2, paths=paths
    )
    simulation.run()
    simulation.check_outcome()


def registry_power(seed: int) -> int:
    """Return the number of disks that the power cut may have left."""
    chances = Chances(switch=0.3, kill=0.001, power=0.003)
    simulation = RegistrySimulation(
        seed,
        chances=chances,
        processes=2 + seed % 2,
        operations=8,
        ephemerals=seed % 4 < 2,
    )
    simulation.run()
    simulation.machine.cut_power()
    states = list(simulation.disk.crash_states(limit=8, seed=seed))
    for state in states:
        _check_after_crash(
            state.what, lambda state=state: simulation.check_after_power(state)
        )
    return len(states)


def watches(seed: int) -> None:
    simulation = WatchSimulation(seed, Chances(switch=0.3, kill=0.002, stop=0.002))
    simulation.machine.protected = simulation.watcher
    simulation.machine.run()


def sharing(seed: int, chances: Chances, acts: str) -> None:
    simulation = _partition_simulation(seed, chances, acts)
    simulation.run()
    simulation.check_disk(simulation.disk, after_power=False)


def sharing_power(seed: int) -> int:
    """Return the number of disks that the power cut may have left."""
    return _run_until_power_cut(
        _partition_simulation(
            seed, Chances(switch=0.3, kill=0.001, power=0.002), "amorbdf"
        ),
        seed,
    )


def sharing_acks(seed: int, acts: str) -> None:
    """Check that records are durable when they are acknowledged, even if a sync that began
    before a truncation ends after it.
    """
    chances = Chances(switch=0.4, stop=0.04)
    simulation = PartitionSimulation(
        seed, chances=chances, processes=2 + seed % 2, kinds=acts, checks_acks=True
    )
    simulation.run()


def sharing_failed_sync(seed: int) -> None:
    simulation = _partition_simulation(seed, QUIET, "amorf")
    simulation.disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, at=1 + seed % 9))
    simulation.expects_errors = True
    _run_until_power_cut(simulation, seed)


def group(seed: int, chances: Chances, **options: Any) -> None:
    simulation = GroupSimulation(
        seed, chances=chances, processes=1 + seed % 3, **options
    )
    simulation.run()
    simulation.check_disk(simulation.disk, after_power=False)


def group_power(seed: int, chances: Chances, **options: Any) -> None:
    simulation = GroupSimulation(seed, chances=chances, **options)
    simulation.run()
    simulation.machine.cut_power()
    for state in simulation.disk.crash_states(limit=4, seed=seed):
        _check_after_crash(
            state.what,
            lambda state=state: simulation.check_disk(state.disk(), after_power=True),
        )


def transactions(seed: int, chances: Chances) -> None:
    simulation = PipelineSimulation(
        seed, chances=chances, processes=1 + seed % 3, ids=1 + seed % 2
    )
    simulation.run()
    simulation.check_disk(simulation.disk, after_power=False)


def transactions_power(seed: int, *, shared: bool) -> None:
    chances = Chances(switch=0.3, power=0.002 if not shared else 0.0005)
    simulation = PipelineSimulation(
        seed, chances=chances, processes=1 + seed % 2 if shared else 1, shared=shared
    )
    simulation.run()
    simulation.machine.cut_power()
    for state in simulation.disk.crash_states(limit=6, seed=seed):
        _check_after_crash(
            state.what,
            lambda state=state: simulation.check_disk(state.disk(), after_power=True),
        )


def consumer_history(seed: int) -> None:
    _run_history(ConsumerHistory(seed), 60)


def producer_history(seed: int) -> None:
    _run_history(ProducerHistory(seed), 80)


def _run_history(history: ConsumerHistory | ProducerHistory, steps: int) -> None:
    for _ in range(steps):
        history.step()
    history.finish()


def _partition_simulation(
    seed: int, chances: Chances, acts: str
) -> PartitionSimulation:
    policy = POLICIES[seed % len(POLICIES)]
    return PartitionSimulation(
        seed, chances=chances, processes=2 + seed % 2, durability=policy, kinds=acts
    )


def _run_until_power_cut(simulation: PartitionSimulation, seed: int) -> int:
    simulation.run()
    simulation.machine.cut_power()
    states = list(simulation.disk.crash_states(limit=8, seed=seed))
    for state in states:
        _check_after_crash(
            state.what,
            lambda state=state: simulation.check_disk(state.disk(), after_power=True),
        )
    return len(states)


def _check_after_crash(crash: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        raise AssertionError(f"{crash}: {error!r}") from error


# -- schedules by kind -----------------------------------------------------------------


def _kinds() -> dict[str, Callable[[int], object]]:
    kinds: dict[str, Callable[[int], object]] = {}
    for name, chances in REGISTRY.items():
        kinds[f"registry {name}"] = lambda seed, chances=chances: registry(
            seed, chances
        )
    kinds["registry power"] = registry_power
    kinds["registry watches"] = watches
    for (act, acts), (name, chances) in itertools.product(
        ACTS.items(), SHARING.items()
    ):
        kinds[f"sharing {act} {name}"] = lambda seed, chances=chances, acts=acts: (
            sharing(seed, chances, acts)
        )
    kinds["sharing power"] = sharing_power
    kinds["sharing acks"] = lambda seed: sharing_acks(seed, "am")
    kinds["sharing acks cuts"] = lambda seed: sharing_acks(seed, "aat")
    kinds["sharing acks flushed"] = lambda seed: sharing_acks(seed, "oof")
    kinds["sharing failed sync"] = sharing_failed_sync
    for name, chances in GROUPS.items():
        kinds[f"groups {name}"] = lambda seed, chances=chances: group(seed, chances)
        kinds[f"groups hasty {name}"] = lambda seed, chances=chances: group(
            seed, chances, is_hasty=True
        )
        kinds[f"groups static {name}"] = lambda seed, chances=chances: group(
            seed, chances, is_static=True
        )
        kinds[f"groups rewind {name}"] = lambda seed, chances=chances: group(
            seed, chances, rewinds=True
        )
        kinds[f"groups rewind dual {name}"] = lambda seed, chances=chances: group(
            seed, chances, rewinds=True, stores=[_DUAL]
        )
    kinds["groups hasty freezes"] = lambda seed: group(seed, FREEZES, is_hasty=True)
    for name, stores in STORES.items():
        kinds[f"groups {name} kills"] = lambda seed, stores=stores: group(
            seed, Chances(switch=0.3, kill=0.0005), stores=stores
        )
        kinds[f"groups {name} power"] = lambda seed, stores=stores: group_power(
            seed,
            Chances(switch=0.3, kill=0.0005, power=0.0003),
            processes=1 + seed % 3,
            stores=stores,
        )
    kinds["groups power"] = lambda seed: group_power(
        seed, Chances(switch=0.3, kill=0.0003, power=0.0003), processes=1 + seed % 2
    )
    for name, chances in GROUPS.items():
        kinds[f"transactions {name}"] = lambda seed, chances=chances: transactions(
            seed, chances
        )
    kinds["groups in one process"] = consumer_history
    kinds["producers"] = producer_history
    kinds["transactions power shared"] = lambda seed: transactions_power(
        seed, shared=True
    )
    kinds["transactions power alone"] = lambda seed: transactions_power(
        seed, shared=False
    )
    return kinds


KINDS: Final = _kinds()
#: The number of schedules of each simulation in forty schedules. A schedule of a group
#: takes as long as twenty schedules of a registry.
_OF_FORTY: Final = {
    "registry": 28,
    "sharing": 6,
    "producers": 2,
    "groups": 3,
    "transactions": 1,
}
#: Smaller seeds belong to the tests that run a fixed number of each kind.
_FIRST_SEED: Final = 10_000_000


def numbered(number: int) -> tuple[str, int]:
    """Return the kind and the seed of a schedule of the endless search."""
    cycle, index = divmod(number, sum(_OF_FORTY.values()))
    for simulation, count in _OF_FORTY.items():
        if index < count:
            kinds = [name for name in KINDS if name.split()[0] == simulation]
            nth = cycle * count + index
            return kinds[nth % len(kinds)], _FIRST_SEED + nth // len(kinds)
        index -= count
    raise AssertionError("the counts add up")


def run(kind: str, seed: int) -> object:
    try:
        return KINDS[kind](seed)
    except Exception as error:
        raise AssertionError(f"{kind}, seed {seed}: {error!r}") from error


def run_first(kind: str, count: int) -> list[object]:
    """Run the first seeds of a kind, and return the result of each run."""
    return [run(kind, seed) for seed in range(count)]
