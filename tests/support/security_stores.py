"""Tests of two stores of users, rules and quotas that share one registry of any kind.

A module that imports them defines the fixture `open_store`, which opens another store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from logcore.errors import CorruptRegistryError
from logcore.registry.paths import pack_json
from netshim.security.acls import (
    ANY_USER,
    Acl,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.scram import Credential
from netshim.security.stored import BROKERS, SecuritySnapshot, SecurityStore
from support.clusters import until

__all__ = [
    "test_both_stores_share_one_broker_login",
    "test_change_of_one_store_reaches_the_other",
    "test_concurrent_changes_of_two_stores_are_all_kept",
    "test_damaged_login_of_brokers_is_kept",
    "test_damaged_rules_deny_and_cannot_be_changed",
    "test_unchanged_store_reports_nothing",
]

OpenStore = Callable[[], SecurityStore]


def credential(iterations: int) -> Credential:
    return Credential(b"s" * 16, b"k" * 32, b"v" * 32, iterations)


def rule(topic: str, user: str = "alice") -> Acl:
    return Acl(
        ResourceType.TOPIC, Pattern.LITERAL, topic, f"User:{user}", "*",
        AclOperation.READ, Permission.ALLOW,
    )  # fmt: skip


def until_changed(store: SecurityStore) -> SecuritySnapshot:
    until(store.has_changed, "the store reports a change")
    return store.load()


def load_settled(store: SecurityStore) -> SecuritySnapshot:
    """Load a store until no change is reported. The watch then covers all nodes."""
    while True:
        snapshot = store.load()
        if not store.has_changed():
            return snapshot


def test_change_of_one_store_reaches_the_other(open_store: OpenStore) -> None:
    first, other = open_store(), open_store()
    assert load_settled(other) == SecuritySnapshot()
    assert not other.has_quotas
    first.set_credentials("alice", {"SCRAM-SHA-256": credential(4_096)})
    assert until_changed(other).users["alice"]["SCRAM-SHA-256"].iterations == 4_096
    assert other.has_quotas
    load_settled(other)
    # This changes the value of a node, and creates no node.
    first.set_credentials("alice", {"SCRAM-SHA-256": credential(8_192)})
    assert until_changed(other).users["alice"]["SCRAM-SHA-256"].iterations == 8_192
    load_settled(other)
    first.add_acls([rule("t"), rule("u")])
    assert until_changed(other).acls
    assert load_settled(other).acls == (rule("t"), rule("u"))
    first.add_acls([rule("t", "bob")])
    assert len(until_changed(other).acls) == 3
    load_settled(other)
    first.set_quotas(("alice", "c", None), {"producer_byte_rate": 5.0})
    until_changed(other)
    assert load_settled(other).quotas == {
        ("alice", "c", None): {"producer_byte_rate": 5.0}
    }
    first.remove_acls([rule("t"), rule("u"), rule("t", "bob")])
    first.set_quotas(("alice", "c", None), {"producer_byte_rate": None})
    first.set_credentials("alice", {"SCRAM-SHA-256": None})
    until_changed(other)
    snapshot = load_settled(other)
    assert not (snapshot.users or snapshot.acls or snapshot.quotas)


def test_unchanged_store_reports_nothing(open_store: OpenStore) -> None:
    first, other = open_store(), open_store()
    first.add_acls([rule("t")])
    load_settled(other)
    first.remove_acls([rule("missing")])
    first.add_acls([rule("t")])
    assert not other.has_changed()


def test_concurrent_changes_of_two_stores_are_all_kept(open_store: OpenStore) -> None:
    """Each change is a compare-and-set of a node that the other stores also change."""
    stores = [open_store() for _ in range(3)]

    def change(number: int, store: SecurityStore) -> None:
        for turn in range(10):
            store.add_acls([rule("t", f"{number}-{turn}")])
            store.set_quotas(("u", None, None), {f"{number}-{turn}": 1.0})

    threads = [
        threading.Thread(target=change, args=(number, store))
        for number, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = stores[0].load()
    assert len(snapshot.acls) == 30
    assert len(snapshot.quotas["u", None, None]) == 30


def test_both_stores_share_one_broker_login(open_store: OpenStore) -> None:
    first, other = open_store(), open_store()
    assert first.load().brokers is None
    for store in (first, other, first):
        store.ensure_broker_login()
    found = first.load().brokers
    assert found is not None and found == other.load().brokers


def test_damaged_login_of_brokers_is_kept(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A new password would end the connections of the brokers that use the first one."""
    store = open_store()
    store._registry.create(BROKERS, b"{}")
    store.ensure_broker_login()
    for _ in range(2):
        assert store.load().brokers is None
    assert store._registry.get(BROKERS).value == b"{}"
    assert len(caplog.records) == 1 and BROKERS in caplog.text


def test_damaged_rules_deny_and_cannot_be_changed(open_store: OpenStore) -> None:
    store = open_store()
    store.add_acls([rule("t"), rule("u")])
    path = "/kafka-acl/Topic/t"
    whole = store._registry.get(path).value
    for damage in (b"{}", b"\xff", pack_json({"version": 2, "acls": []})):
        store._registry.set(path, damage)
        (denied, allowed) = sorted(store.load().acls, key=lambda acl: acl.name)
        assert (denied.name, denied.principal) == ("t", ANY_USER)
        assert (denied.operation, denied.permission) == (
            AclOperation.ALL,
            Permission.DENY,
        )
        assert allowed == rule("u")
        for change in (store.add_acls, store.remove_acls):
            with pytest.raises(CorruptRegistryError, match="kafka-acl/Topic/t"):
                change([rule("t")])
    store._registry.set(path, whole)
    assert store.load().acls == (rule("t"), rule("u"))
