"""The stores of a broker alone and of a cluster. A third store is tested in
tests/interop/test_interop_zookeeper.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from logcore.errors import RegistryClosedError
from logcore.registry import FileRegistry, open_registry
from netshim.security.stored import SecurityStore
from support.security_stores import *  # noqa: F403
from support.security_stores import OpenStore, load_settled, rule


@pytest.fixture(params=["alone", "cluster"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    with contextlib.ExitStack() as opened:

        def open_one() -> SecurityStore:
            if request.param == "alone":
                store = SecurityStore(tmp_path / "data")
            else:
                registry = open_registry(tmp_path / "cluster", topics="truth")
                opened.enter_context(registry)
                store = SecurityStore.of_cluster(lambda: registry)
            opened.callback(store.close)
            return store

        yield open_one


def test_store_continues_in_the_next_session_of_its_broker(tmp_path: Path) -> None:
    """A broker opens the registry again after its session has expired."""

    def opened() -> FileRegistry:
        return open_registry(tmp_path / "cluster", topics="truth")

    sessions = [opened()]
    store = SecurityStore.of_cluster(lambda: sessions[-1])
    load_settled(store)
    sessions[0].close()
    with pytest.raises(RegistryClosedError):
        store.load()
    with opened() as second:
        sessions.append(second)
        assert store.has_changed()
        load_settled(store)
        other = SecurityStore(tmp_path / "cluster")
        other.add_acls([rule("t")])
        other.close()
        assert load_settled(store).acls == (rule("t"),)
        store.close()
        assert second.children("/kafka-acl") == ["Topic"]  # still open
