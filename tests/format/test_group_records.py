"""Tests that logcore.format.group_records encodes and decodes the bytes that Kafka wrote,
and agrees with the wire codec, which has its own tables.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logcore.format.group_records import (
    CommitKey,
    Committed,
    StoredGroup,
    StoredMember,
    commit_key,
    commit_value,
    group_key,
    group_value,
    partition_of,
    read_commit,
    read_group,
    read_key,
    subscribed_topics,
)
from netshim import wire
from support import group_messages

T0 = 1_700_000_000_000
TEXTS = st.text(max_size=8)
NULLABLE = st.none() | TEXTS
INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
MEMBERS = st.builds(
    StoredMember,
    member_id=TEXTS,
    instance_id=NULLABLE,
    client_id=TEXTS,
    client_host=TEXTS,
    rebalance_timeout_ms=INTS,
    session_timeout_ms=INTS,
    subscription=st.binary(max_size=9),
    assignment=st.binary(max_size=9),
)
GROUPS = st.builds(
    StoredGroup,
    protocol_type=TEXTS,
    generation=INTS,
    protocol=NULLABLE,
    leader=NULLABLE,
    state_ms=LONGS,
    members=st.lists(MEMBERS, max_size=3).map(tuple),
)
COMMITS = st.builds(
    Committed,
    LONGS,
    INTS,
    TEXTS,
    LONGS,
    st.just(-1) | st.integers(0, 2**63 - 1),
    st.just(b"") | st.binary(min_size=16, max_size=16).filter(any),
)


def test_records_equal_kafkas_byte_for_byte() -> None:
    """Kafka's own serializers wrote the examples of storage format section 12.1."""
    assert (
        commit_key("grp", "orders", 0).hex() == "0001000367727000066f726465727300000000"
    )
    assert (
        commit_value(Committed(29, 4, "m", T0)).hex()
        == "0003000000000000001d0000000400016d0000018bcfe56800"
    )
    assert commit_value(Committed(29, 4, "m", T0, topic_id=bytes(range(16)))).hex() == (
        "0004000000000000001d00000004026d0000018bcfe56800010010"
        "000102030405060708090a0b0c0d0e0f"
    )
    assert commit_value(Committed(29, 4, "m", T0, T0 + 1)).hex() == (
        "0001000000000000001d00016d0000018bcfe568000000018bcfe56801"
    )
    assert group_key("grp").hex() == "00020003677270"
    member = StoredMember(
        member_id="m1",
        client_id="c",
        client_host="/127.0.0.1",
        rebalance_timeout_ms=60_000,
        session_timeout_ms=45_000,
        subscription=b"\0\1",
        assignment=b"\2",
    )
    group = StoredGroup(
        protocol_type="consumer",
        generation=1,
        protocol="range",
        leader="m1",
        state_ms=T0,
        members=(member,),
    )
    assert group_value(group).hex() == (
        "00030008636f6e73756d657200000001000572616e676500026d310000018bcfe568000000000100026d31ffff000163000a"
        "2f3132372e302e302e310000ea600000afc80000000200010000000102"
    )


@pytest.mark.parametrize(
    ("group_id", "partition"),
    # Kafka stores "my-group" in partition 12 of 50. "polygenelubricants" hashes to -2^31,
    # whose absolute value counts as 0.
    [
        ("my-group", 12),
        ("", 0),
        ("polygenelubricants", 0),
        ("a", 97 % 50),
        ("\U0001f600", (31 * 0xD83D + 0xDE00) % 50),
    ],
)
def test_partition_of_a_group_equals_kafkas(group_id: str, partition: int) -> None:
    assert partition_of(group_id, 50) == partition


@given(group_id=TEXTS, topic=TEXTS, partition=INTS)
def test_keys_round_trip_and_equal_the_wire_codec(
    group_id: str, topic: str, partition: int
) -> None:
    message = group_messages.OFFSET_COMMIT_KEY
    written = commit_key(group_id, topic, partition)
    value = message.Value(group=group_id, topic=topic, partition=partition)
    assert written == wire.encode_versioned(message, 1, value)
    assert read_key(written) == CommitKey(group_id, topic, partition)
    assert read_key(b"\0\0" + written[2:]) == CommitKey(group_id, topic, partition)
    message = group_messages.GROUP_METADATA_KEY
    assert group_key(group_id) == wire.encode_versioned(
        message, 2, message.Value(group=group_id)
    )
    assert read_key(group_key(group_id)) == group_id


@given(committed=COMMITS, version=st.integers(0, 4))
def test_commits_of_every_version_are_read(committed: Committed, version: int) -> None:
    message = group_messages.OFFSET_COMMIT_VALUE
    value = message.Value(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        commit_timestamp=committed.commit_ms,
        expire_timestamp=committed.expire_ms,
        topic_id=committed.topic_id or bytes(16),
    )
    kept = committed._replace(
        leader_epoch=committed.leader_epoch if version >= 3 else -1,
        expire_ms=committed.expire_ms if version == 1 else -1,
        topic_id=committed.topic_id if version == 4 else b"",
    )
    assert read_commit(wire.encode_versioned(message, version, value)) == kept
    written = commit_value(committed)
    expected_version = 1
    if committed.expire_ms < 0:
        expected_version = 4 if committed.topic_id else 3
    assert written == wire.encode_versioned(message, expected_version, value)


@given(group=GROUPS, version=st.integers(0, 4))
def test_groups_of_every_version_are_read(group: StoredGroup, version: int) -> None:
    message = group_messages.GROUP_METADATA_VALUE
    value = message.Value(
        protocol_type=group.protocol_type,
        generation=group.generation,
        protocol=group.protocol,
        leader=group.leader,
        current_state_timestamp=group.state_ms,
        members=[
            message.Value.Member(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout=member.rebalance_timeout_ms,
                session_timeout=member.session_timeout_ms,
                subscription=member.subscription,
                assignment=member.assignment,
            )
            for member in group.members
        ],
    )
    found = read_group(wire.encode_versioned(message, version, value))
    assert found is not None
    if version >= 3:
        assert found == group
        assert group_value(group) == wire.encode_versioned(message, 3, value)
    assert found.state_ms == (group.state_ms if version >= 2 else -1)
    for before, after in zip(group.members, found.members, strict=True):
        assert after.rebalance_timeout_ms == (
            before.rebalance_timeout_ms if version >= 1 else -1
        )
        assert after.instance_id == (before.instance_id if version >= 3 else None)
        assert (after.subscription, after.assignment) == (
            before.subscription,
            before.assignment,
        )


@pytest.mark.parametrize("version", range(5))
def test_truncated_records_of_groups_are_refused(version: int) -> None:
    """A record that ends inside an unknown tagged field is refused too."""
    commits = group_messages.OFFSET_COMMIT_VALUE
    written = wire.encode_versioned(commits, version, commits.Value(metadata="m"))
    groups = group_messages.GROUP_METADATA_VALUE
    member = groups.Value.Member(member_id="m", subscription=b"s", assignment=b"a")
    group = groups.Value(
        protocol_type="consumer", protocol="range", leader="m", members=[member]
    )
    stored = wire.encode_versioned(groups, version, group)
    if version == 4:
        assert read_commit(written) == Committed(0, -1, "m", 0)
        written = written[:-1] + b"\1\7\2ab"
        stored = stored[:-1] + b"\1\7\2ab"
    for whole, read in ((written, read_commit), (stored, read_group)):
        assert read(whole) is not None
        for size in range(len(whole)):
            assert read(whole[:size]) is None, (size, whole)
    key = commit_key("g", "orders", 1)
    assert all(read_key(key[:size]) is None for size in range(len(key)))
    assert read_key(b"\0\3" + key[2:]) is None
    assert read_commit(b"\0\5" + written[2:]) is None
    assert read_group(b"\0\5" + stored[2:]) is None


@given(data=st.data(), version=st.integers(0, 9))
def test_subscriptions_are_read_like_the_wire_codec(data: Any, version: int) -> None:
    message = wire.CONSUMER_PROTOCOL_SUBSCRIPTION
    topic_type = message.Value.Topic
    owned = st.builds(topic_type, topic=TEXTS, partitions=st.lists(INTS, max_size=2))
    value = message.Value(
        topics=data.draw(st.lists(TEXTS, max_size=3)),
        user_data=data.draw(st.none() | st.binary(max_size=3)),
        owned_partitions=data.draw(st.lists(owned, max_size=2)),
        rack_id=data.draw(NULLABLE),
    )
    written = version.to_bytes(2, "big") + wire.encode_data(
        message, min(version, 3), value
    )
    assert subscribed_topics(written) == value.topics
    cut = data.draw(st.integers(0, len(written) - 1))
    assert subscribed_topics(written[:cut]) is None
    assert subscribed_topics(b"\xff\xff" + written[2:]) is None
