"""Responses to a user whose rules allow only some of the topics and groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netshim import wire
from netshim.handlers.authentication import describe_user_scram_credentials
from netshim.handlers.quotas import alter_client_quotas
from netshim.security.acls import (
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.session import ANONYMOUS
from netshim.state import Call
from netshim.wire import codes
from support.bench import SESSION, Bench


def allow(bench: Bench, *rules: tuple[ResourceType, str, AclOperation]) -> None:
    """Replace all rules."""
    bench.broker.state.security.acls = AclIndex(
        Acl(kind, Pattern.LITERAL, name, ANONYMOUS, "*", operation, Permission.ALLOW)
        for kind, name, operation in rules
    )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A broker with the topics a, b, c and d, of which the user may describe b and d."""
    found = Bench(tmp_path / "data")
    for name in "abcd":
        found.logdir.create_topic(name, 2)
    describe = AclOperation.DESCRIBE
    allow(found, *((ResourceType.TOPIC, name, describe) for name in "bd"))
    yield found
    found.close()


def test_pages_of_topics_skip_forbidden_ones(bench: Bench) -> None:
    """The cursor of a page named the next topic, whether or not the user may see it."""
    request = wire.DESCRIBE_TOPIC_PARTITIONS.Request
    cursor: Any = None
    pages = []
    while not pages or cursor is not None:
        response = bench.ask(
            wire.DESCRIBE_TOPIC_PARTITIONS,
            0,
            request(topics=[], response_partition_limit=1, cursor=cursor),
        )
        cursor = None
        if response.next_cursor is not None:
            cursor = request.Cursor(
                topic_name=response.next_cursor.topic_name,
                partition_index=response.next_cursor.partition_index,
            )
        (topic,) = response.topics
        (partition,) = topic.partitions
        pages.append((topic.name, partition.partition_index))
    assert pages == [("b", 0), ("b", 1), ("d", 0), ("d", 1)]


def test_user_who_may_describe_no_topic_gets_no_page(bench: Bench) -> None:
    allow(bench)
    response = bench.ask(
        wire.DESCRIBE_TOPIC_PARTITIONS,
        0,
        wire.DESCRIBE_TOPIC_PARTITIONS.Request(topics=[], response_partition_limit=1),
    )
    assert response.topics == [] and response.next_cursor is None


class CountedName(str):
    """A name that counts how often any name is compared with another."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)


def distinct_names() -> list[CountedName]:
    CountedName.comparisons = 0
    return [CountedName(f"n{number}") for number in range(2_000)]


CALL = Call(SESSION, 0, 0, "test", 0)


def test_many_named_users_are_not_compared_in_pairs(bench: Bench) -> None:
    """A request of 100,000 names occupied the broker for minutes."""
    request = wire.DESCRIBE_USER_SCRAM_CREDENTIALS.Request
    response = describe_user_scram_credentials(
        request(users=[request.User(name=name) for name in distinct_names()]),
        CALL,
        bench.broker.state,
    )
    assert {one.error_code for one in response.results} == {codes.RESOURCE_NOT_FOUND}
    assert CountedName.comparisons < 10_000


def test_many_named_quotas_are_not_compared_in_pairs(bench: Bench) -> None:
    request = wire.ALTER_CLIENT_QUOTAS.Request
    entity = request.Entry.Entity
    entries = [
        request.Entry(entity=[entity(entity_type="user", entity_name=name)], ops=[])
        for name in distinct_names()
    ]
    response = alter_client_quotas(
        request(entries=entries, validate_only=True), CALL, bench.broker.state
    )
    assert isinstance(response, wire.ALTER_CLIENT_QUOTAS.Response)
    assert {one.error_code for one in response.entries} == {0}
    assert CountedName.comparisons < 10_000
