"""Registry nodes of members: their identity, the partitions that they own, and
takeovers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

import logcore
from logcore import LogDir
from logcore.consumer import RebalanceListener, TopicPartition
from logcore.consumer.offset_stores import OffsetStores
from logcore.errors import CorruptRegistryError, RegistryLockedError
from logcore.legacy import Blacklist
from logcore.registry import FileRegistry, open_registry, paths
from logcore.testing import SimulatedDisk
from support.group_sharers import HastyAssignor

SETTINGS: dict[str, Any] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "max_poll_interval_ms": 3_000,
    "assignors": ("range",),
}


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk({"data": None})


@pytest.fixture
def data(disk: SimulatedDisk) -> Iterator[LogDir]:
    with logcore.open_dir("data", create=True, shared=True, fs=disk) as data:
        data.create_topic("t", 2)
        data.create_topic("u", 1)
        for number in range(6):
            data.append("t", b"%d" % number, partition=number % 2)
        yield data


@pytest.fixture
def registry(disk: SimulatedDisk, data: LogDir) -> Iterator[FileRegistry]:
    with open_registry("data", fs=disk, lock_timeout_ms=0) as registry:
        yield registry


def owners(registry: FileRegistry, topic: str = "t") -> dict[int, str]:
    parent = f"/consumers/g/owners/{topic}"
    return {
        int(name): registry.get(f"{parent}/{name}").value.decode()
        for name in registry.children(parent)
    }


def ids(registry: FileRegistry) -> dict[str, Any]:
    return {
        name: json.loads(registry.get(f"/consumers/g/ids/{name}").value)
        for name in registry.children("/consumers/g/ids")
    }


def test_member_registers_its_identity_and_partitions(
    disk: SimulatedDisk, data: LogDir, registry: FileRegistry
) -> None:
    consumer = data.consumer(**SETTINGS)
    consumer.subscribe(["t", "u"])
    assert consumer.poll(0).count == 6
    ((consumer_id, node),) = ids(registry).items()
    assert consumer_id.startswith(f"simulated-{os.getpid()}-")
    assert consumer._membership.member is not None
    assert node == {
        "version": 1,
        "subscription": {"t": 1, "u": 1},
        "pattern": "static",
        "timestamp": str(disk.now_ms()),
        "members": {"0": consumer._membership.member.member_id},
    }
    assert owners(registry) == {0: f"{consumer_id}-0", 1: f"{consumer_id}-0"}
    assert owners(registry, "u") == {0: f"{consumer_id}-0"}
    consumer.subscribe(pattern="t|v")
    consumer.poll(0)
    ((_, node),) = ids(registry).items()
    assert (node["subscription"], node["pattern"]) == ({"t|v": 1}, "white_list")
    assert owners(registry, "u") == {}
    assert sorted(owners(registry)) == [0, 1]
    consumer.close()
    assert owners(registry) == ids(registry) == {}


def test_streams_of_a_connector_register_one_consumer(
    disk: SimulatedDisk, data: LogDir, registry: FileRegistry
) -> None:
    with data.connector("g", auto_offset_reset="earliest") as connector:
        streams = connector.create_message_streams({"t": 2})["t"]
        for stream in streams:
            stream._consumer.poll(0)
        for stream in streams * 2:
            stream._consumer.poll(0)
        ((consumer_id, node),) = ids(registry).items()
        assert node["subscription"] == {"t": 2}
        assert sorted(node["members"]) == ["0", "1"]
        assert sorted(owners(registry).values()) == [
            f"{consumer_id}-0",
            f"{consumer_id}-1",
        ]
    assert ids(registry) == owners(registry) == {}
    with data.connector("g") as connector:
        (stream,) = connector.create_message_streams_by_filter(Blacklist("u.*"))
        stream._consumer.poll(0)
        ((_, node),) = ids(registry).items()
        assert (node["subscription"], node["pattern"]) == ({"u.*": 1}, "black_list")


def test_partition_is_read_only_after_its_owner_released_it(
    disk: SimulatedDisk, data: LogDir, registry: FileRegistry
) -> None:
    """Between the new assignment and the release, the partition has no reader. The new
    owner begins at the last offset that the old owner committed.
    """
    settings = {
        **SETTINGS,
        "assignors": (HastyAssignor(),),
        "enable_auto_commit": False,
    }

    class InterruptedListener(RebalanceListener):
        def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
            assert {partition.partition for partition in partitions} <= owners(
                registry
            ).keys()
            first.commit()
            raise InterruptedError

    first = data.consumer(**settings)
    first.subscribe(["t"], listener=InterruptedListener())
    assert first.poll(0).count == 6
    second = data.consumer(**settings)
    second.subscribe(["t"])
    second.poll(0)
    # The first consumer assigns the partitions, and must release one of them.
    with pytest.raises(InterruptedError):
        first.poll(0)
    (remaining,) = first.assignment()
    released = TopicPartition("t", 1 - remaining.partition)
    assert len(set(owners(registry).values())) == 1
    assert second.poll(0).count == 0
    assert second.assignment() == frozenset()
    assert any("owners/t" in path for path in second.watched_paths())
    first.poll(0)
    for _ in range(3):
        second.poll(0)
        first.poll(0)
    assert len(set(owners(registry).values())) == 2
    assert second.assignment() == {released}
    assert second.position(released) == 3
    assert not any("owners/t" in path for path in second.watched_paths())
    second.close()
    with contextlib.suppress(InterruptedError):
        first.close()


def test_partition_with_a_failed_commit_is_released_later(
    disk: SimulatedDisk,
    data: LogDir,
    registry: FileRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process holds the lock of the group when a partition must be released.
    The member keeps the partition until the finished records are committed and the
    listener was called.
    """
    revoked: list[frozenset[TopicPartition]] = []

    class Listener(RebalanceListener):
        def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
            revoked.append(partitions)

    def refuse(*_: object) -> None:
        raise RegistryLockedError("another process holds the group")

    settings = {**SETTINGS, "assignors": (HastyAssignor(),)}
    first = data.consumer(**settings)
    first.subscribe(["t"], listener=Listener())
    assert first.poll(0).count == 6
    second = data.consumer(**settings)
    second.subscribe(["t"])
    second.poll(0)
    with monkeypatch.context() as patch, pytest.raises(RegistryLockedError):
        patch.setattr(OffsetStores, "commit", refuse)
        first.poll(0)
    assert len(first.assignment()) == 2
    assert revoked == []
    for _ in range(4):
        first.poll(0)
        assert second.poll(0).count == 0, "all records are processed and committed"
    (remaining,) = first.assignment()
    released = TopicPartition("t", 1 - remaining.partition)
    assert revoked == [{released}]
    assert second.assignment() == {released}
    second.close()
    first.close()


def test_removed_member_does_not_block_other_members(
    disk: SimulatedDisk, data: LogDir, registry: FileRegistry
) -> None:
    stuck = data.consumer(**SETTINGS)
    stuck.subscribe(["t"])
    stuck.poll(0)
    other = data.consumer(**SETTINGS)
    other.subscribe(["t"])
    other.poll(0)
    for _ in range(6):  # during these polls, the first member is inactive
        disk.advance(1_000)
        other.poll(0)
    assert len(other.assignment()) == 2
    other_id = other._assignment._registration.consumer_id  # type: ignore[union-attr]
    assert set(owners(registry).values()) == {f"{other_id}-0"}
    # The first member is notified of the loss, and deletes no node of the other member.
    stuck.poll(0)
    assert set(owners(registry).values()) == {f"{other_id}-0"}
    assert stuck.assignment() == frozenset()
    stuck.close()
    assert set(owners(registry).values()) == {f"{other_id}-0"}
    other.close()


def test_failed_release_is_repeated_by_the_next_poll(
    disk: SimulatedDisk, data: LogDir, registry: FileRegistry
) -> None:
    consumer = data.consumer(**SETTINGS)
    consumer.subscribe(["t", "u"])
    consumer.poll(0)
    consumer.subscribe(["t"])
    with registry.holding("/consumers/g"), pytest.raises(RegistryLockedError):
        consumer.poll(0)
    assert sorted(owners(registry, "u")) == [0]
    consumer.poll(0)
    assert owners(registry, "u") == {}
    assert len(consumer.assignment()) == 2
    consumer.close()


def test_consumer_without_membership_owns_no_partition(
    disk: SimulatedDisk, data: LogDir, registry: FileRegistry
) -> None:
    with data.consumer(auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t"])
        assert consumer.poll(0).count == 6
    with data.consumer(**SETTINGS) as consumer:
        consumer.assign([("t", 0)])
        assert consumer.poll(0).count == 3
    assert ids(registry) == owners(registry) == {}


def test_owner_node_of_unknown_form_is_an_error(
    disk: SimulatedDisk, data: LogDir, registry: FileRegistry
) -> None:
    registry.create(paths.owner("g", "t", 0), b"somebody", ephemeral=True)
    with data.consumer(**SETTINGS) as consumer:
        consumer.subscribe(["t"])
        with pytest.raises(CorruptRegistryError, match="owner"):
            consumer.poll(0)
        assert consumer.assignment() == frozenset()
        registry.delete(paths.owner("g", "t", 0))
        assert consumer.poll(0).count == 6
