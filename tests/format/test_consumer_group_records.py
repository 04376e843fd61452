"""Tests of the records of groups of the consumer protocol: encoding to and decoding from
known bytes, and decoding invalid bytes.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logcore.format.consumer_group_records import (
    ClassicMember,
    ConsumerKey,
    ConsumerMember,
    ConsumerValue,
    Current,
    GroupEpoch,
    MemberState,
    RecordKind,
    Resolved,
    consumer_key,
    consumer_value,
    describe_consumer_record,
    read_consumer_key,
    read_consumer_value,
)

U = bytes(range(16))
#: Rows of key, bytes of the key, value and bytes of the value. A struct without tagged
#: fields ends with 00.
ROWS: list[tuple[ConsumerKey, str, ConsumerValue, str]] = [
    (
        ConsumerKey(RecordKind.GROUP, "grp"),
        "0003 0003 677270",
        GroupEpoch(7),
        "0000 00000007 00",
    ),
    (
        ConsumerKey(RecordKind.GROUP, ""),
        "0003 0000",
        GroupEpoch(7, -2),
        "0000 00000007 01 00 08 fffffffffffffffe",
    ),
    (
        ConsumerKey(RecordKind.MEMBER, "g", "m"),
        "0005 0001 67 0001 6d",
        ConsumerMember(
            client_id="c",
            client_host="/1.2.3.4",
            topic_names=("a", "bc"),
            rebalance_timeout_ms=300_000,
        ),
        "0000 00 00 02 63 09 2f312e322e332e34 03 02 61 03 6263 01 000493e0 00 01 00 01 00",
    ),
    (
        ConsumerKey(RecordKind.MEMBER, "g", "m"),
        "0005 0001 67 0001 6d",
        ConsumerMember(
            instance_id="i",
            rack_id="r",
            client_id="",
            client_host="",
            pattern="a.*",
            assignor="range",
        ),
        "0000 02 69 02 72 01 01 01 04 612e2a ffffffff 06 72616e6765 01 00 01 00",
    ),
    (
        ConsumerKey(RecordKind.MEMBER, "g", "m"),
        "0005 0001 67 0001 6d",
        ConsumerMember(classic=ClassicMember(45_000, (("range", b"\0\1"), ("x", b"")))),
        "0000 00 00 01 01 01 01 ffffffff 00 01 00 15 01 0000afc8 03 06 72616e6765 03 0001 00 02 78 01 00 00",
    ),
    (ConsumerKey(RecordKind.TARGET_EPOCH, "g"), "0006 0001 67", 9, "0000 00000009 00"),
    (
        ConsumerKey(RecordKind.TARGET, "g", "m"),
        "0007 0001 67 0001 6d",
        frozenset({(U, 1), (U, 0)}),
        f"0000 02 {U.hex()} 03 00000000 00000001 00 00",
    ),
    (
        ConsumerKey(RecordKind.TARGET, "g", "m"),
        "0007 0001 67 0001 6d",
        frozenset(),
        "0000 01 00",
    ),
    (
        ConsumerKey(RecordKind.CURRENT, "g", "m"),
        "0008 0001 67 0001 6d",
        Current(
            member_epoch=3,
            previous_epoch=2,
            state=MemberState.UNREVOKED,
            assigned=frozenset({(U, 0)}),
            revoking=frozenset({(U, 5)}),
        ),
        f"0000 00000003 00000002 01 02 {U.hex()} 02 00000000 00 02 {U.hex()} 02 00000005 00 00",
    ),
    (
        ConsumerKey(RecordKind.PATTERN, "g", "a.*"),
        "0010 0001 67 0003 612e2a",
        Resolved(("a", "ab"), 4, 1_700_000_000_000),
        "0000 03 02 61 03 6162 0000000000000004 0000018bcfe56800 00",
    ),
]


@pytest.mark.parametrize(("key", "key_hex", "value", "value_hex"), ROWS)
def test_records_equal_the_bytes_of_kafka(
    key: ConsumerKey, key_hex: str, value: ConsumerValue, value_hex: str
) -> None:
    assert consumer_key(key).hex(" ") == bytes.fromhex(key_hex).hex(" ")
    encoded = consumer_value(value)
    assert encoded is not None and encoded.hex(" ") == bytes.fromhex(value_hex).hex(" ")
    assert read_consumer_key(consumer_key(key)) == key
    assert read_consumer_value(key.kind, encoded) == value


@pytest.mark.parametrize(("key", "key_hex", "value", "value_hex"), ROWS)
def test_truncated_record_is_not_decoded(
    key: ConsumerKey, key_hex: str, value: ConsumerValue, value_hex: str
) -> None:
    encoded = consumer_value(value)
    assert encoded is not None
    for size in range(len(encoded)):
        assert read_consumer_value(key.kind, encoded[:size]) in (None, value)
    for size in range(len(consumer_key(key))):
        assert read_consumer_key(consumer_key(key)[:size]) in (
            None,
            ConsumerKey(key.kind, key.group_id),
        )


def test_tags_of_newer_brokers_are_skipped() -> None:
    member = bytes.fromhex(f"0000 02 {U.hex()} 02 00000001 01 05 02 abcd 01 09 01 ff")
    assert read_consumer_value(RecordKind.TARGET, member) == frozenset({(U, 1)})
    member = bytes.fromhex(
        "0000 00 00 01 01 01 01 ffffffff 00 02 00 07 01 00000005 01 00 07 02 aabb"
    )
    assert read_consumer_value(RecordKind.MEMBER, member) == ConsumerMember(
        classic=ClassicMember(5, ())
    )
    member = bytes.fromhex("0000 00 00 01 01 01 01 ffffffff 00 01 07 02 aabb")
    assert read_consumer_value(RecordKind.MEMBER, member) == ConsumerMember()


def test_other_versions_are_none_and_unknown_states_unknown() -> None:
    assert (
        read_consumer_value(RecordKind.TARGET_EPOCH, bytes.fromhex("0001 00000009 00"))
        is None
    )
    current = read_consumer_value(
        RecordKind.CURRENT, bytes.fromhex("0000 00000003 00000002 09 01 01 00")
    )
    assert isinstance(current, Current) and current.state is MemberState.UNKNOWN


def test_keys_of_other_kinds_are_none() -> None:
    for text in ("", "00", "0000", "0002 0001 67", "0009 0001 67", "ffff"):
        assert read_consumer_key(bytes.fromhex(text)) is None
    assert read_consumer_key(bytes.fromhex("0004 0001 67")) == ConsumerKey(
        RecordKind.TOPICS, "g"
    )
    assert consumer_value(None) is None


def test_records_are_described_as_dicts() -> None:
    current = Current(
        member_epoch=3,
        previous_epoch=2,
        state=MemberState.UNREVOKED,
        revoking=frozenset({(U, 5)}),
    )
    key = consumer_key(ConsumerKey(RecordKind.CURRENT, "g", "m"))
    assert describe_consumer_record(key, consumer_value(current)) == {
        "group": "g",
        "kind": "current",
        "name": "m",
        "value": {
            "member_epoch": 3,
            "previous_epoch": 2,
            "state": "unrevoked",
            "assigned": {},
            "revoking": {U.hex(): [5]},
        },
    }
    key = consumer_key(ConsumerKey(RecordKind.GROUP, "g"))
    assert describe_consumer_record(key, None) == {
        "group": "g",
        "kind": "group",
        "value": None,
    }
    assert (
        describe_consumer_record(key, b"junk") is None
        and describe_consumer_record(b"junk", None) is None
    )
    classic = ConsumerMember(classic=ClassicMember(5, (("range", b"\0\1"),)))
    shown = describe_consumer_record(
        consumer_key(ConsumerKey(RecordKind.MEMBER, "g", "m")), consumer_value(classic)
    )
    assert shown is not None and shown["value"]["classic"] == {
        "session_timeout_ms": 5,
        "protocols": ["range"],
    }
    for kind, value in (
        (RecordKind.TARGET_EPOCH, 3),
        (RecordKind.PATTERN, Resolved(("a",), 1, 2)),
        (RecordKind.MEMBER, classic),
    ):
        assert json.dumps(
            describe_consumer_record(
                consumer_key(ConsumerKey(kind, "g", "")), consumer_value(value)
            )
        )


def test_text_longer_than_a_key_allows_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 32767"):
        consumer_key(ConsumerKey(RecordKind.MEMBER, "g", "m" * 32_768))


@given(
    st.sampled_from([kind for kind in RecordKind if kind is not RecordKind.CLASSIC]),
    st.binary(max_size=60),
)
def test_any_bytes_raise_no_error(kind: RecordKind, data: bytes) -> None:
    read_consumer_value(kind, b"\0\0" + data)
    read_consumer_key(kind.to_bytes(2, "big") + data)
