"""Tests that records of `__transaction_state` equal Kafka's bytes and round-trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logcore import CorruptLogError
from logcore.format.transaction_records import (
    Status,
    StoredTransaction,
    read_transaction,
    read_transaction_key,
    transaction_key,
    transaction_value,
)

ONGOING = StoredTransaction(
    producer_id=4000,
    producer_epoch=7,
    timeout_ms=60_000,
    status=Status.ONGOING,
    partitions=frozenset({("orders", 0), ("orders", 1)}),
    update_ms=1_700_000_000_001,
    start_ms=1_700_000_000_000,
)
#: A value that Kafka wrote, without its times, from storage format section 12.2.
KAFKAS = "0000 0000000000000fa0 0007 0000ea60 01 00000001 0006 6f7264657273 00000002 00000000 00000001"
TIMES = "0000018bcfe56801 0000018bcfe56800"

STORED = st.builds(
    StoredTransaction,
    producer_id=st.integers(0, 2**63 - 1),
    producer_epoch=st.integers(-1, 32_767),
    timeout_ms=st.integers(1, 900_000),
    status=st.sampled_from([each for each in Status if each is not Status.EMPTY]),
    partitions=st.frozensets(
        st.tuples(st.text(min_size=1, max_size=9), st.integers(0, 300)), max_size=6
    ),
    update_ms=st.integers(-1, 2**62),
    start_ms=st.integers(-1, 2**62),
    previous_producer_id=st.integers(-1, 9),
    next_producer_id=st.integers(-1, 9),
    client_version=st.integers(0, 2),
)


def test_record_of_an_older_kafka_is_read() -> None:
    assert read_transaction(bytes.fromhex(KAFKAS + TIMES)) == ONGOING


def test_tags_equal_the_bytes_that_kafka_reads() -> None:
    stored = StoredTransaction(
        producer_id=1,
        producer_epoch=2,
        timeout_ms=3,
        previous_producer_id=3999,
        client_version=2,
    )
    assert transaction_value(stored).endswith(
        bytes.fromhex("02 00 08 0000000000000f9f 02 02 0002")
    )


def test_partitions_are_null_in_empty_and_an_empty_array_in_complete() -> None:
    for status, byte in ((Status.EMPTY, 0), (Status.COMPLETE_COMMIT, 1)):
        value = transaction_value(
            StoredTransaction(
                producer_id=1, producer_epoch=0, timeout_ms=3, status=status
            )
        )
        assert value[17] == byte


@given(STORED)
def test_records_round_trip_and_truncated_records_are_refused(
    stored: StoredTransaction,
) -> None:
    value = transaction_value(stored)
    assert read_transaction(value) == stored
    with pytest.raises(CorruptLogError):
        read_transaction(value[:-1])


@pytest.mark.parametrize(
    "value", ["0002" + "00" * 60, "0001" + "00" * 14 + "07" + "00" * 40, "", "00"]
)
def test_invalid_value_is_an_error(value: str) -> None:
    with pytest.raises(CorruptLogError):
        read_transaction(bytes.fromhex(value))


def test_keys_round_trip_and_other_keys_are_none() -> None:
    assert transaction_key("txn-1") == bytes.fromhex("0000 0005 74786e2d31")
    assert read_transaction_key(transaction_key("ä")) == "ä"
    assert [
        read_transaction_key(key)
        for key in (b"\0\1\0\0", b"\0\0\0\5a", b"\0\0\0\1\xff", b"")
    ] == [None] * 4
