"""Tests with records of `__cluster_metadata` that a broker of Kafka 4.1 wrote.

tests/interop/test_interop_dump.py compares all records of a broker with Kafka's own tool.
"""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from logcore.format.cluster_metadata_records import (
    describe_control,
    describe_metadata,
)

FEATURE = "010c00116d657461646174612e76657273696f6e001b00"
TOPIC = "010200076f7264657273e95072f6b6234e15bc8b5ee9e505bf0a00"
CHANGE = (
    "0105020000000043a8d13826b34142813f87e0723fadf4040001010104ffffffff0605020000"
    "000107050200000001"
)
PARTITION = (
    "01030200000000e95072f6b6234e15bc8b5ee9e505bf0a020000000102000000010101000000"
    "010000000000000000024e2412314e9f9bdcee6251ecb20b78e800"
)


@pytest.mark.parametrize(
    ("value", "kind", "version", "data"),
    [
        (
            FEATURE,
            "FEATURE_LEVEL_RECORD",
            0,
            {"name": "metadata.version", "featureLevel": 27},
        ),
        (
            TOPIC,
            "TOPIC_RECORD",
            0,
            {"name": "orders", "topicId": "6VBy9rYjThW8i17p5QW_Cg"},
        ),
        (
            CHANGE,
            "PARTITION_CHANGE_RECORD",
            2,
            {
                "partitionId": 0,
                "topicId": "Q6jROCazQUKBP4fgcj-t9A",
                "isr": [],
                "leader": -1,
                "eligibleLeaderReplicas": [1],
                "lastKnownElr": [1],
            },
        ),
        (
            PARTITION,
            "PARTITION_RECORD",
            2,
            {
                "partitionId": 0,
                "topicId": "6VBy9rYjThW8i17p5QW_Cg",
                "replicas": [1],
                "isr": [1],
                "removingReplicas": [],
                "addingReplicas": [],
                "leader": 1,
                "leaderEpoch": 0,
                "partitionEpoch": 0,
                "directories": ["TiQSMU6fm9zuYlHssgt46A"],
            },
        ),
        ("01140000", "NO_OP_RECORD", 0, {}),
    ],
)
def test_metadata_is_described_like_the_dump_tool(
    value: str, kind: str, version: int, data: object
) -> None:
    assert describe_metadata(bytes.fromhex(value)) == {
        "type": kind,
        "version": version,
        "data": data,
    }


def test_control_records_of_a_quorum_are_described() -> None:
    value = bytes.fromhex("00000000000102000000010002000000010000")
    voters = [{"voterId": 1}]
    assert describe_control(2, value) == {
        "type": "LeaderChange",
        "data": {
            "version": 0,
            "leaderId": 1,
            "voters": voters,
            "grantingVoters": voters,
        },
    }
    header = bytes.fromhex("0000000001a21efa563700")
    assert describe_control(3, header) == {
        "type": "SnapshotHeader",
        "data": {"version": 0, "lastContainedLogTimestamp": 1795816052279},
    }
    assert describe_control(0, value) is None


@pytest.mark.parametrize("value", [None, b"", b"\1\6\0\0", b"\2\x0c\0", b"\1\x66\0"])
def test_unknown_records_are_none(value: bytes | None) -> None:
    assert describe_metadata(value) is None


@hypothesis.given(st.data())
def test_damaged_records_raise_no_error(data: st.DataObject) -> None:
    encoded = bytes.fromhex(
        data.draw(st.sampled_from([FEATURE, TOPIC, CHANGE, PARTITION]))
    )
    at = data.draw(st.integers(0, len(encoded) - 1))
    damage = data.draw(st.binary(max_size=4))
    value = encoded[:at] + damage + encoded[at + data.draw(st.integers(0, 4)) :]
    describe_metadata(value)
    for kind in range(2, 7):
        describe_control(kind, value)
    describe_metadata(data.draw(st.binary(max_size=60)))
