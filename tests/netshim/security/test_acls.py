"""The index of access control lists decides as a check of the rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netshim.security.acls import (
    Acl,
    AclFilter,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)

NAMES = ("orders", "orders-eu", "ord", "o", "*", "other")
USERS = ("User:alice", "User:bob", "User:*")
HOSTS = ("*", "10.0.0.1", "10.0.0.2")

acls = st.builds(
    Acl,
    st.sampled_from((ResourceType.TOPIC, ResourceType.GROUP)),
    st.sampled_from((Pattern.LITERAL, Pattern.PREFIXED)),
    st.sampled_from(NAMES),
    st.sampled_from(USERS),
    st.sampled_from(HOSTS),
    st.sampled_from(
        [operation for operation in AclOperation if operation != AclOperation.ANY]
    ),
    st.sampled_from((Permission.ALLOW, Permission.DENY)),
)


def allows(rules: list[Acl], user: str, host: str, operation: int, name: str) -> bool:
    """Return the decision that Kafka's documentation defines, without an index."""
    implied = {
        AclOperation.DESCRIBE: {
            AclOperation.READ,
            AclOperation.WRITE,
            AclOperation.DELETE,
            AclOperation.ALTER,
        },
        AclOperation.DESCRIBE_CONFIGS: {AclOperation.ALTER_CONFIGS},
    }
    applying = [
        rule
        for rule in rules
        if rule.resource_type == ResourceType.TOPIC
        and rule.principal in (user, "User:*")
        and rule.host in (host, "*")
        and (
            name.startswith(rule.name)
            if rule.pattern == Pattern.PREFIXED
            else rule.name in (name, "*")
        )
    ]
    if any(
        rule.permission == Permission.DENY
        and rule.operation in (operation, AclOperation.ALL)
        for rule in applying
    ):
        return False
    sufficient = {operation, AclOperation.ALL} | implied.get(
        AclOperation(operation), set()
    )
    return any(
        rule.permission == Permission.ALLOW and rule.operation in sufficient
        for rule in applying
    )


@given(
    st.lists(acls, max_size=50),
    st.sampled_from(("User:alice", "User:bob")),
    st.sampled_from(("10.0.0.1", "10.0.0.3")),
    st.sampled_from(
        [operation for operation in AclOperation if operation > AclOperation.ALL]
    ),
    st.sampled_from(("orders", "orders-eu", "order", "x")),
)
def test_index_decides_as_the_rules_one_by_one(
    rules: list[Acl], user: str, host: str, operation: AclOperation, name: str
) -> None:
    index = AclIndex(rules)
    expected = allows(rules, user, host, operation, name)
    for _ in range(2):  # the second decision comes from the cache
        actual = index.allows(user, host, operation, ResourceType.TOPIC, name)
        assert actual == expected


def rule(
    name: str,
    operation: AclOperation = AclOperation.WRITE,
    *,
    pattern: Pattern = Pattern.LITERAL,
    denies: bool = False,
    user: str = "User:alice",
) -> Acl:
    permission = Permission.DENY if denies else Permission.ALLOW
    return Acl(ResourceType.TOPIC, pattern, name, user, "*", operation, permission)


def test_super_user_may_do_everything() -> None:
    index = AclIndex([rule("*", AclOperation.ALL, denies=True)], ["User:alice"])
    assert index.allows("User:alice", "h", AclOperation.READ, ResourceType.TOPIC, "t")
    assert index.allows_some_topic("User:alice", "h")


def test_deny_of_describe_leaves_read() -> None:
    index = AclIndex(
        [rule("t", AclOperation.READ), rule("t", AclOperation.DESCRIBE, denies=True)]
    )
    question = "User:alice", "h"
    topic = ResourceType.TOPIC, "t"
    assert index.allows(*question, AclOperation.READ, *topic)
    assert not index.allows(*question, AclOperation.DESCRIBE, *topic)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], False),
        ([rule("t")], True),
        ([rule("t", AclOperation.READ)], False),
        ([rule("t", user="User:*")], True),
        ([rule("t"), rule("t", denies=True)], False),
        ([rule("t"), rule("u", denies=True)], True),
        ([rule("t"), rule("*", denies=True)], False),
        ([rule("ab"), rule("a", denies=True, pattern=Pattern.PREFIXED)], False),
        ([rule("*"), rule("a", denies=True, pattern=Pattern.PREFIXED)], True),
        (
            [
                rule("ab", pattern=Pattern.PREFIXED),
                rule("a", denies=True, pattern=Pattern.PREFIXED),
            ],
            False,
        ),
        ([rule("ab", pattern=Pattern.PREFIXED), rule("ab", denies=True)], True),
    ],
)
def test_some_topic_is_writable_unless_denied(rules: list[Acl], expected: bool) -> None:
    assert AclIndex(rules).allows_some_topic("User:alice", "h") is expected


@pytest.mark.parametrize("host", ["::1", "0:0:0:0:0:0:0:1", "::0001"])
def test_rule_applies_to_an_address_in_each_of_its_forms(host: str) -> None:
    """A DENY rule with an address as Java writes it had no effect."""
    topic = ResourceType.TOPIC, Pattern.LITERAL, "t"
    index = AclIndex(
        [rule("t"), Acl(*topic, "User:alice", host, AclOperation.ALL, Permission.DENY)]
    )
    question = AclOperation.WRITE, ResourceType.TOPIC, "t"
    assert not index.allows("User:alice", "::1", *question)
    assert index.allows("User:alice", "::2", *question)
    assert not index.allows_some_topic("User:alice", "::1")


def test_answers_for_long_names_are_not_cached() -> None:
    """A client may ask for 10,000 groups with names of 32 KiB."""
    index = AclIndex([rule("a", pattern=Pattern.PREFIXED)])
    question = "User:alice", "h", AclOperation.WRITE, ResourceType.TOPIC
    assert index.allows(*question, "a" * 32_000)
    assert not index._decisions
    assert index.allows(*question, "a" * 249)
    assert len(index._decisions) == 1


def test_match_filter_selects_rules_that_cover_a_name() -> None:
    rules = [
        rule("orders"),
        rule("*"),
        rule("ord", pattern=Pattern.PREFIXED),
        rule("other"),
        rule("orders-eu", pattern=Pattern.PREFIXED),
    ]
    match_filter = AclFilter(
        ResourceType.TOPIC, Pattern.MATCH, "orders", None, None,
        AclOperation.ANY, Permission.ANY,
    )  # fmt: skip
    assert [rule.name for rule in rules if match_filter.matches(rule)] == [
        "orders",
        "*",
        "ord",
    ]
