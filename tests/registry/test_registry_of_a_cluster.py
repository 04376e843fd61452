"""The registry of a cluster: topics are synced, and each is a domain of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from logcore.errors import (
    CorruptRegistryError,
    NodeNotFoundError,
    RegistryLockedError,
    UnsupportedRegistryError,
)
from logcore.registry import FileRegistry, open_registry
from logcore.registry.files import Layout
from logcore.registry.node_file import NodeKind
from logcore.testing import SimulatedDisk, explore
from logcore.testing.explore import Promiser

STATE = "/brokers/topics/orders/partitions/0/state"


def test_each_topic_is_a_domain() -> None:
    domain_of = Layout("truth").domain_of
    assert domain_of(("brokers", "topics", "orders", "partitions", "0", "state")) == (
        domain_of(("brokers", "topics", "orders"))
    )
    assert domain_of(("brokers", "topics", "orders")) == "brokers/topics/orders"
    assert domain_of(("brokers", "ids", "1")) == domain_of(("brokers", "topics"))
    assert domain_of(("consumers", "g", "ids")) == "consumers/g"


def test_only_announcements_of_changes_are_not_synced() -> None:
    layout = Layout("truth")
    for path in ("brokers/topics/t", "config/topics/t", "brokers/epochs/1"):
        assert layout.kind_of(tuple(path.split("/"))) is NodeKind.PERSISTENT
    assert layout.kind_of(("brokers", "changes", "1")) is NodeKind.UNSYNCED


def life(disk: SimulatedDisk, promise: Promiser) -> None:
    with open_registry("/cluster", topics="truth", fs=disk) as registry:
        promise(None)
        registry.create(STATE, b"0")
        promise(b"0")
        registry.set(STATE, b"1", version=0)
        promise(b"1")
        registry.set(STATE, b"2", version=1)
        promise(b"2")


def found(disk: SimulatedDisk) -> bytes | None:
    disk.seed += 1
    with open_registry("/cluster", topics="truth", fs=disk) as registry:
        try:
            return registry.get(STATE).value
        except NodeNotFoundError:
            return None


def check(promised: list[bytes | None], value: bytes | None) -> None:
    states = [None, b"0", b"1", b"2"]
    last = states.index(promised[-1]) if promised else 0
    assert value in states[last : last + 2], f"{value!r} after {promised!r}"


@pytest.mark.long
@pytest.mark.parametrize("names", ["posix", "journal"])
def test_no_power_cut_brings_an_old_state_back(names: Any) -> None:
    report = explore(
        life,
        found,
        check,
        files={"cluster": None},
        names=names,
        limit=40,
        again_every=0,
    )
    assert report.states > 50


def test_a_power_cut_brings_an_old_state_back_in_a_view() -> None:
    """With topics as a view, the same steps restore an old state. This shows that the
    exploration above can find the error.
    """
    with pytest.raises(AssertionError):
        explore(
            life_as_view,
            found_in_view,
            check,
            files={"cluster": None},
            names="posix",
            limit=40,
            again_every=0,
        )


def life_as_view(disk: SimulatedDisk, promise: Promiser) -> None:
    with open_registry("/cluster", fs=disk) as registry:
        promise(None)
        registry.create(STATE, b"0")
        promise(b"0")
        registry.set(STATE, b"1", version=0)
        promise(b"1")


def found_in_view(disk: SimulatedDisk) -> bytes | None:
    disk.seed += 1
    with open_registry("/cluster", fs=disk) as registry:
        try:
            return registry.get(STATE).value
        except NodeNotFoundError:
            return None


def test_a_damaged_state_is_an_error(tmp_path: Path) -> None:
    with open_registry(tmp_path / "cluster", topics="truth") as registry:
        registry.create(STATE, b"0")
        file = next((tmp_path / "cluster.registry").rglob("state.node"))
        data = bytearray(file.read_bytes())
        data[len(data) // 4 :] = bytes(len(data) - len(data) // 4)
        file.write_bytes(data)
        with pytest.raises(CorruptRegistryError):
            registry.get(STATE)
        assert registry.children("/brokers/topics") == ["orders"]


@pytest.mark.parametrize("first", ["view", "truth"])
def test_registry_of_another_kind_is_refused(tmp_path: Path, first: Any) -> None:
    open_registry(tmp_path / "d", topics=first).close()
    other: Any = "truth" if first == "view" else "view"
    with pytest.raises(UnsupportedRegistryError, match="not the format"):
        open_registry(tmp_path / "d", topics=other)


def test_change_of_a_topic_does_not_wait_for_other_topics(tmp_path: Path) -> None:
    def opened() -> FileRegistry:
        return open_registry(tmp_path / "c", topics="truth", lock_timeout_ms=100)

    with opened() as first, opened() as other:
        for topic in ("a", "b"):
            first.create(f"/brokers/topics/{topic}", b"")
        with first.holding("/brokers/topics/a"):
            done: list[object] = []

            def change() -> None:
                done.append(other.set("/brokers/topics/b", b"1"))
                try:
                    other.set("/brokers/topics/a", b"1")
                except RegistryLockedError as error:
                    done.append(error)

            thread = threading.Thread(target=change)
            thread.start()
            thread.join()
        assert done[0] == 1
        assert isinstance(done[1], RegistryLockedError)


def test_garbage_is_removed_in_each_topic(tmp_path: Path) -> None:
    with open_registry(tmp_path / "c", topics="truth") as registry:
        registry.create(STATE, b"0")
        garbage = tmp_path / "c.registry/brokers/topics/orders/partitions/1.node.tmp"
        garbage.write_bytes(b"")
        registry.clean()
        assert not garbage.exists()
        assert registry.get(STATE).value == b"0"
        registry.delete(STATE)
        registry.delete("/brokers/topics/orders/partitions/0")
        registry.delete("/brokers/topics/orders/partitions")
        registry.delete("/brokers/topics/orders")
        assert registry.children("/brokers/topics") == []
