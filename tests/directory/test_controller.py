"""Tests of the controller of a shared directory: its election, and the topics that it
publishes in the registry.
"""

from __future__ import annotations

import contextlib
import functools
import os

import pytest

import logcore
from logcore.errors import LogcoreError, LogLockedError
from logcore.fs import SharedFS
from logcore.registry import open_registry, paths
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine

ROUNDS = int(os.environ.get("LOGCORE_REGISTRY_ROUNDS", "6"))


def published(disk: SimulatedDisk) -> dict[str, tuple[int, dict[str, str]]]:
    """Return topic -> (number of partitions, settings), from the registry."""
    with open_registry("data", read_only=True, fs=disk) as registry:
        found = {}
        for element in registry.children(paths.TOPICS):
            name = paths.element_name(element)
            replicas = paths.unpack_topic(registry.get(paths.topic(name)).value, name)
            states = registry.children(f"{paths.topic(name)}/partitions")
            assert sorted(map(int, states)) == sorted(replicas)
            for number in states:
                assert registry.get(paths.partition_state(name, int(number))).value
            config = paths.unpack_config(
                registry.get(paths.topic_config(name)).value, name
            )
            found[name] = (len(replicas), config)
        assert registry.children(paths.TOPIC_CONFIGS) == registry.children(paths.TOPICS)
        return found


def test_controller_publishes_topics_of_directory_in_registry() -> None:
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir("data", create=True, shared=True, fs=disk) as data:
        data.create_topic("a", 2, {"retention.ms": 5_000})
        data.create_topic("b")
        data.tick()
        assert published(disk) == {"a": (2, {"retention.ms": "5000"}), "b": (1, {})}
        with open_registry("data", fs=disk) as registry:
            assert (
                paths.unpack_controller(registry.get(paths.CONTROLLER).value)
                == data.node_id
            )
            assert (
                paths.unpack_cluster_id(registry.get(paths.CLUSTER_ID).value)
                == data.cluster_id
            )
            assert paths.unpack_topic(registry.get(paths.topic("a")).value, "a") == {
                0: [1],
                1: [1],
            }
        data.alter_topic("b", {"cleanup.policy": "compact"})
        data.add_partitions("b", 3)
        data.delete_topic("a")
        data.tick()
        assert published(disk) == {"b": (3, {"cleanup.policy": "compact"})}
        assert data.incidents() == ()
    with logcore.open_dir("data", shared=True, fs=disk) as data:
        data.tick()
        with open_registry("data", fs=disk) as registry:
            assert registry.get(paths.CONTROLLER_EPOCH).value == b"2"
            assert (
                b'"controller_epoch":2'
                in registry.get(paths.partition_state("b", 0)).value
            )


def test_controller_publishes_many_topics_in_chunks() -> None:
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir("data", create=True, shared=True, fs=disk) as data:
        data.create_topics({f"t{number}": (1, None) for number in range(25)})
        counts = []
        for _ in range(4):
            data.tick()
            counts.append(len(published(disk)))
        assert counts == [10, 20, 25, 25]


def test_controller_removes_nodes_of_dead_sessions() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        logcore.open_dir("data", create=True, shared=True, fs=disk) as data,
        open_registry("data", fs=disk) as dead,
    ):
        dead.create("/brokers/ids/7", b"{}", ephemeral=True)
        dead._release()  # as a kill does
        for _ in range(2):
            data.tick()
            disk.advance(11_000)
        data.tick()
        with open_registry("data", read_only=True, fs=disk) as registry:
            assert len(registry.sessions()) == 1
        assert "7.node" not in disk.listdir("data.registry/brokers/ids")


def test_registry_of_another_cluster_is_reported_and_kept() -> None:
    disk = SimulatedDisk({"data": None})
    with open_registry("data", fs=disk) as registry:
        registry.create(paths.CLUSTER_ID, paths.pack_cluster_id("other"))
        with logcore.open_dir("data", create=True, shared=True, fs=disk) as data:
            data.create_topic("a")
            data.tick()
            (incident,) = data.incidents()
            assert "another cluster" in str(incident)
            assert registry.children("/brokers") == []
            assert data.append("a", b"1").offset == 0


def test_process_that_is_not_elected_publishes_nothing() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        logcore.open_dir("data", create=True, shared=True, fs=disk) as data,
        open_registry("data", fs=disk) as before,
    ):
        data.create_topic("a")
        assert paths.elect(before, 1, 0) == 1
        data.tick()
        assert published(disk) == {}
        before.close()
        disk.advance(1_000)
        data.tick()
        assert published(disk) == {"a": (1, {})}


def test_failed_publication_is_retried_later() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        logcore.open_dir("data", create=True, shared=True, fs=disk) as data,
        open_registry("data", fs=disk) as other,
    ):
        data.create_topic("a")
        with other.holding("/config"):
            data.tick()
        assert "RegistryLockedError" in str(data.incidents()[0])
        disk.advance(1_000)
        data.tick()
        assert published(disk) == {"a": (1, {})}


def test_a_directory_of_one_process_has_no_registry() -> None:
    disk = SimulatedDisk({"data": None})
    with logcore.open_dir("data", create=True, fs=disk) as data:
        data.create_topic("a")
        data.tick()
        assert not disk.exists("data.registry")


def change_topics(number: int, fs: SharedFS) -> None:
    """Create topics, add partitions to them and delete them. Do the maintenance if no
    other process does.
    """
    with logcore.open_dir("data", shared=True, fs=fs) as data:
        for turn in range(2):
            name = f"t{number % 2}"
            with contextlib.suppress(LogcoreError):
                if name in data and turn:
                    data.delete_topic(name)
                elif name in data:
                    data.add_partitions(name, 3)
                else:
                    data.create_topic(name, 1 + turn)
            with contextlib.suppress(LogLockedError):
                data.tick()


def run_maintenance(machine: Machine, fs: SharedFS) -> None:
    """Do the maintenance until all other processes have ended, and for 30 more rounds."""
    with logcore.open_dir("data", shared=True, fs=fs) as data:
        quiet = 0
        until = machine.steps + 100_000
        # The locks of a killed process are released after some steps.
        while quiet < 30:
            others = [
                each
                for each in machine.processes
                if each is not machine.protected and not each.has_ended
            ]
            quiet = 0 if others else quiet + 1
            with contextlib.suppress(LogLockedError):
                data.tick()
            machine.disk.advance(1_100 if quiet else 10)
            assert machine.steps < until, "no end"
        reported = {
            name: (
                len(data.partitions(name)),
                dict(data.describe_topic(name).overrides),
            )
            for name in data.topics()
        }
        assert published(machine.disk) == reported


@pytest.mark.long
@pytest.mark.parametrize("kill", [0.0, 0.0015], ids=["quiet", "kills"])
def test_registry_matches_topics_after_any_process_is_killed(
    kill: float,
) -> None:
    for seed in range(ROUNDS):
        disk = SimulatedDisk({"data": None}, seed=seed)
        logcore.open_dir("data", create=True, fs=disk).close()
        machine = Machine(disk, seed=seed, chances=Chances(switch=0.2, kill=kill))
        for number in range(3):
            machine.start(functools.partial(change_topics, number))
        machine.protected = machine.start(functools.partial(run_maintenance, machine))
        try:
            machine.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
