"""The commands netshim user, acl and quota."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from logcore.registry import open_registry, registry_path
from netshim.command import main
from netshim.security.acls import AclOperation, Pattern, Permission, ResourceType
from netshim.security.stored import SecurityStore
from support.client import DEADLINE_S


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def run(*arguments: object, code: int = 0, typed: str | None = None) -> str:
    done = CliRunner().invoke(
        main, [str(argument) for argument in arguments], input=typed
    )
    assert done.exit_code == code, done.output
    return done.output


def stored(data: Path) -> Any:
    store = SecurityStore(data)
    try:
        return store.load()
    finally:
        store.close()


def test_user_is_created_with_a_typed_password(data: Path) -> None:
    run("user", "add", data, "alice", typed="secret\nsecret\n")
    assert set(stored(data).users["alice"]) == {"SCRAM-SHA-256", "SCRAM-SHA-512"}
    assert "alice" in run("user", "list", data)


def test_stored_files_are_private_and_have_no_password(data: Path) -> None:
    run("user", "add", data, "alice", typed="secret\nsecret\n")
    files = [
        path for path in data.with_name("data.registry").rglob("*") if path.is_file()
    ]
    assert not any(
        b"secret" in file.read_bytes() for file in files if file.stat().st_size
    )
    nodes = [file for file in files if file.suffix == ".node"]
    assert nodes and all(node.stat().st_mode & 0o077 == 0 for node in nodes)


def test_password_is_replaced_by_a_second_add(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "password"
    for text in ("first\n", "second\n"):
        file.write_text(text)
        run("user", "add", data, "alice", "--password-file", file)
    before = stored(data).users["alice"]["SCRAM-SHA-256"]
    run("user", "add", data, "alice", "--password-file", file)
    assert stored(data).users["alice"]["SCRAM-SHA-256"].salt != before.salt


@pytest.mark.parametrize("text", [b"", b"\n", b"a\0b\n", b"\xff\n", b"x" * 1_025])
def test_unusable_password_is_refused(data: Path, tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "password"
    file.write_bytes(text)
    run("user", "add", data, "alice", "--password-file", file, code=2)


def test_removed_user_leaves_quotas(data: Path) -> None:
    run("user", "add", data, "alice", typed="secret\nsecret\n")
    run("quota", "set", data, "--user", "alice", "producer_byte_rate=1e6")
    run("user", "remove", data, "alice")
    facts = stored(data)
    assert facts.users == {}
    assert facts.quotas == {("alice", None, None): {"producer_byte_rate": 1e6}}
    run("user", "remove", data, "alice", code=2)


def test_unknown_directory_is_an_error(data: Path) -> None:
    for command in ("user", "acl", "quota"):
        assert "no log directory" in run(command, "list", data, code=2)
    assert not data.exists()


def test_rules_of_a_producer_and_a_consumer(data: Path) -> None:
    run("acl", "add", data, "User:a", "--producer", "--topic", "t")
    run("acl", "add", data, "User:b", "--consumer", "--topic", "t", "--group", "g")
    stored_rules = {
        (acl.principal, acl.resource_type, acl.operation) for acl in stored(data).acls
    }
    assert stored_rules == {
        ("User:a", ResourceType.TOPIC, AclOperation.WRITE),
        ("User:a", ResourceType.TOPIC, AclOperation.CREATE),
        ("User:a", ResourceType.TOPIC, AclOperation.DESCRIBE),
        ("User:b", ResourceType.TOPIC, AclOperation.READ),
        ("User:b", ResourceType.TOPIC, AclOperation.DESCRIBE),
        ("User:b", ResourceType.GROUP, AclOperation.READ),
    }


def test_rule_is_removed_by_the_options_that_stored_it(data: Path) -> None:
    options = ("User:a", "--deny", "--operation", "read", "--topic", "or", "--prefixed")
    run("acl", "add", data, *options)
    (rule,) = stored(data).acls
    assert (rule.pattern, rule.permission) == (Pattern.PREFIXED, Permission.DENY)
    assert "deny\tUser:a\tRead\ttopic or*" in run("acl", "list", data)
    run("acl", "remove", data, *options)
    assert stored(data).acls == ()


@pytest.mark.parametrize(
    "options",
    [
        ("alice", "--producer", "--topic", "t"),
        ("User:a",),
        ("User:a", "--topic", "t"),
        ("User:a", "--producer"),
        ("User:a", "--cluster"),
    ],
)
def test_incomplete_rule_is_refused(data: Path, options: tuple[str, ...]) -> None:
    run("acl", "add", data, *options, code=2)


@pytest.mark.parametrize("name", ["*", "a/b", "a%2Fb", "ä", "a b", "kafka.x"])
def test_names_are_stored_exactly(data: Path, name: str) -> None:
    run("acl", "add", data, f"User:{name}", "--consumer", "--topic", name)
    assert {(acl.name, acl.principal) for acl in stored(data).acls} == {
        (name, f"User:{name}")
    }


@pytest.mark.parametrize("name", ["a\nallow\tUser:b", "\x1b[2J", "a\tRead"])
def test_names_change_neither_lines_nor_the_terminal(data: Path, name: str) -> None:
    run("user", "add", data, name, typed="secret\nsecret\n")
    run("acl", "add", data, f"User:{name}", "--operation", "read", "--topic", name)
    run("quota", "set", data, "--user", name, "producer_byte_rate=1")
    for command, cells in (("user", 2), ("acl", 5), ("quota", 2)):
        (line,) = run(command, "list", data).splitlines()
        assert len(line.split("\t")) == cells
        assert line.replace("\t", "").isprintable()


def test_quotas_are_set_listed_and_removed(data: Path) -> None:
    run("quota", "set", data, "--user-default", "request_percentage=50")
    run("quota", "set", data, "--user", "a", "--client-id", "c", "consumer_byte_rate=9")
    run("quota", "set", data, "--ip", "10.0.0.1", "connection_creation_rate=2")
    assert run("quota", "list", data).splitlines() == [
        "user <default>\trequest_percentage=50",
        "user a, client-id c\tconsumer_byte_rate=9",
        "ip 10.0.0.1\tconnection_creation_rate=2",
    ]
    run("quota", "remove", data, "--user-default")
    run("quota", "remove", data, "--ip", "10.0.0.1", "connection_creation_rate")
    assert len(stored(data).quotas) == 1


@pytest.mark.long
def test_running_broker_uses_the_first_quota(kafka_factory: Any, data: Path) -> None:
    """The directory of the broker had no user, rule or quota when the broker started."""
    kafka = kafka_factory(data)
    run("quota", "set", data, "--user-default", "producer_byte_rate=1e6")
    quotas = kafka.server.server.security.quotas
    until = time.monotonic() + DEADLINE_S
    while not quotas.keys:
        assert time.monotonic() < until, "the quota has no effect"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "options",
    [
        ("producer_byte_rate=1",),
        ("--user", "a", "producer_byte_rate"),
        ("--user", "a", "producer_byte_rate=0"),
        ("--user", "a", "producer_byte_rate=nan"),
        ("--user", "a", "rate=1"),
        ("--user", "a", "connection_creation_rate=1"),
        ("--ip", "10.0.0.1", "producer_byte_rate=1"),
        ("--ip", "10.0.0.1", "--user", "a", "connection_creation_rate=1"),
        ("--ip", "10.0.0", "connection_creation_rate=1"),
    ],
)
def test_unusable_quota_is_refused(data: Path, options: tuple[str, ...]) -> None:
    run("quota", "set", data, *options, code=2)


def test_damaged_user_cannot_log_in_and_others_can(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("alice", "bob"):
        run("user", "add", data, name, typed="secret\nsecret\n")
    store = SecurityStore(data)
    store._registry.update("/config/users/alice", lambda _: b"junk")
    store.close()
    assert set(stored(data).users) == {"bob"}
    assert "/config/users/alice" in caplog.text


def test_damaged_rules_deny_everything_of_their_topic(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deny rule that is skipped would grant access."""
    for topic in ("t", "u"):
        run("acl", "add", data, "User:a", "--consumer", "--topic", topic)
    store = SecurityStore(data)
    store._registry.update("/kafka-acl/Topic/t", lambda _: b'{"version":2,"acls":[]}')
    store.close()
    listed = run("acl", "list", data)
    assert "deny\tUser:*\tAll\ttopic t\t" in listed
    assert "allow\tUser:a\tRead\ttopic u\t" in listed
    assert "/kafka-acl/Topic/t" in caplog.text and "version" in caplog.text
    # The damaged file is not replaced, because a deny rule may be lost.
    output = run("acl", "add", data, "User:a", "--consumer", "--topic", "t", code=2)
    assert "kafka-acl/Topic/t" in output


def test_users_of_a_cluster_are_in_its_registry(tmp_path: Path) -> None:
    """The command accepts the directory of the cluster or the path of its registry."""
    open_registry(tmp_path / "cluster", topics="truth").close()
    for directory, name in ((tmp_path, "alice"), (tmp_path / "cluster", "bob")):
        run("user", "add", directory, name, typed="secret\nsecret\n")
    with open_registry(tmp_path / "cluster", topics="truth") as registry:
        assert registry.children("/config/users") == ["alice", "bob"]
    assert registry_path(str(tmp_path)) not in map(str, tmp_path.parent.iterdir())
    output = run("user", "add", tmp_path / "1", "carol", typed="x\nx\n", code=2)
    assert "one broker" in output and str(tmp_path) in output
