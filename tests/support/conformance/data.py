"""Scripts of requests about records, offsets and partitions."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from logcore import recordbatch
from netshim import wire
from support.conformance import RecordingClient, Script

#: The time of records, 2026-01-01. It is fixed, so that both logs contain the same bytes.
NOW_MS = 1_767_225_600_000
#: The version of Produce and of Fetch from which on requests contain topic ids.
_TOPIC_IDS_SINCE = 13
_CRC_POSITION = 17


def batch(*values: bytes, time_ms: int = NOW_MS, **more: Any) -> bytes:
    """Return a batch whose records are a millisecond apart."""
    rows = [
        (b"k%d" % number, value, (), time_ms + number)
        for number, value in enumerate(values)
    ]
    return recordbatch.encode(rows, **more)


def _patched(records: bytes, position: int, form: str, value: int) -> bytes:
    """Replace a number after the CRC of a batch, and update the CRC."""
    from crc32c import crc32c

    changed = bytearray(records)
    struct.pack_into(form, changed, position, value)
    struct.pack_into(
        ">I", changed, _CRC_POSITION, crc32c(bytes(changed[_CRC_POSITION + 4 :]))
    )
    return bytes(changed)


def _message_v1(value: bytes) -> bytes:
    """Return a message in the format before batches, magic 1."""
    from zlib import crc32

    body = (
        struct.pack(">bbqi", 1, 0, NOW_MS, -1) + struct.pack(">i", len(value)) + value
    )
    message = struct.pack(">I", crc32(body)) + body
    return struct.pack(">qi", 0, len(message)) + message


def produce(client: RecordingClient) -> None:
    name = client.create_topic(max_message_bytes="2000")
    short = client.create_topic("-create-time", message_timestamp_after_max_ms="1000")
    stamped = client.create_topic(
        "-append-time", message_timestamp_type="LogAppendTime"
    )
    compacted = client.create_topic("-compacted", cleanup_policy="compact")

    ids_of = {
        each: client.wait_for_topic(each, 2)
        for each in (name, short, stamped, compacted)
    }

    def topic_fields(topic: str) -> dict[str, Any]:
        if client.version >= _TOPIC_IDS_SINCE:
            return {"topic_id": ids_of.get(topic, b"\1" * 16)}
        return {"name": topic}

    def ask(
        step: str,
        records: bytes | None,
        topic: str = name,
        partition: int = 0,
        **more: Any,
    ) -> None:
        part = {"index": partition, "records": records}
        fields = {"acks": -1, "timeout_ms": 30_000, **more}
        client.ask(
            step,
            topic_data=[{**topic_fields(topic), "partition_data": [part]}],
            **fields,
        )

    ask("a batch", batch(b"a", b"b"))
    ask("acks=1", batch(b"c"), acks=1)
    ask("acks=2", batch(b"c"), acks=2)
    ask("no such topic", batch(b"a"), topic=f"{name}-none")
    ask("no such partition", batch(b"a"), partition=7)
    ask("a partition below zero", batch(b"a"), partition=-1)
    ask("no records", None)
    ask("empty records", b"")
    ask("a batch without records", _patched(batch(b"a"), 57, ">i", 0)[:61])
    ask("two batches", batch(b"a") + batch(b"b"))
    ask("a wrong CRC", batch(b"a")[:-1] + b"\xff")
    ask("a truncated batch", batch(b"a", b"b")[:-3])
    ask("a few bytes", b"\0" * 5)
    ask("a message of magic 1", _message_v1(b"v"))
    ask("magic 3", _patched(batch(b"a"), 16, ">b", 3))
    ask("a base offset that is not 0", struct.pack(">q", 7) + batch(b"a")[8:])
    ask("a wrong record count", _patched(batch(b"a", b"b"), 57, ">i", 5))
    ask("a wrong last offset delta", _patched(batch(b"a", b"b"), 23, ">i", 9))
    ask("a control batch", _patched(batch(b"a"), 21, ">h", 0x20))
    ask("too large", batch(b"x" * 3_000))
    ask(
        "no key in a compacted topic",
        recordbatch.encode([(None, b"v", (), NOW_MS)]),
        topic=compacted,
    )
    ask(
        "a timestamp far in the future",
        batch(b"a", time_ms=4_000_000_000_000),
        topic=short,
    )
    ask("the time of append", batch(b"a"), topic=stamped)
    for codec in ("gzip", "snappy", "lz4", "zstd"):
        ask(f"a batch in {codec}", batch(b"a" * 100, b"b" * 100, codec=codec))
    ids = {"producer_id": 700, "producer_epoch": 3}
    ask("a producer's first batch", batch(b"p", base_sequence=0, **ids))
    ask("the same again", batch(b"p", base_sequence=0, **ids))
    ask("its next batch", batch(b"p", base_sequence=1, **ids))
    ask("a gap in its sequence", batch(b"p", base_sequence=7, **ids))
    ask(
        "an older epoch",
        batch(b"p", base_sequence=2, producer_id=700, producer_epoch=2),
    )
    ask(
        "a newer epoch, sequence not 0",
        batch(b"p", base_sequence=5, producer_id=700, producer_epoch=4),
    )
    ask(
        "a newer epoch", batch(b"p", base_sequence=0, producer_id=700, producer_epoch=4)
    )
    ask(
        "an unknown producer, sequence not 0",
        batch(b"p", base_sequence=4, producer_id=701, producer_epoch=0),
    )
    ask(
        "without a transactional id",
        batch(
            b"t", base_sequence=0, transactional=True, producer_id=702, producer_epoch=0
        ),
    )
    client.ask("no topics", acks=-1, timeout_ms=30_000, topic_data=[])
    both = [{"index": 0, "records": batch(b"a")}, {"index": 9, "records": batch(b"a")}]
    client.ask(
        "one of two fails",
        acks=-1,
        timeout_ms=30_000,
        topic_data=[{**topic_fields(name), "partition_data": both}],
    )


def fetch(client: RecordingClient) -> None:
    name = client.create_topic()
    topic_id = client.wait_for_topic(name, 2)
    client.produce(name, batch(b"a", b"b"))
    client.produce(name, batch(b"c"))
    client.produce(name, batch(b"d" * 500, b"e" * 500, codec="gzip"))
    has_ids = client.version >= _TOPIC_IDS_SINCE

    def topic_fields(
        topic: str = name, partition_id: bytes = topic_id
    ) -> dict[str, Any]:
        return {"topic_id": partition_id} if has_ids else {"topic": topic}

    def ask(
        step: str, offset: int, topic_entry: dict[str, Any] | None = None, **more: Any
    ) -> Any:
        part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        request_fields = {"max_wait_ms": 0, "max_bytes": 1 << 20, "session_epoch": -1}
        for key, value in more.items():
            (
                request_fields
                if key in request_fields or key in ("isolation_level", "session_id")
                else part
            )[key] = value
        topics = [
            {
                **(topic_fields() if topic_entry is None else topic_entry),
                "partitions": [part],
            }
        ]
        return client.ask(step, topics=topics, **request_fields)

    ask("from the start", 0)
    ask("inside a batch", 1)
    ask("at the end", 5)
    ask("after the end", 6)
    ask("below zero", -1)
    ask("one byte of a partition", 0, partition_max_bytes=1)
    ask("one byte in all", 0, max_bytes=1)
    ask("two batches by their size", 0, partition_max_bytes=170)
    ask("read committed", 0, isolation_level=1)
    ask("no such topic", 0, topic_fields(f"{name}-none", b"\1" * 16))
    ask("no such partition", 0, partition=7)
    ask("the epoch of the leader", 0, current_leader_epoch=0)
    ask("a future epoch", 0, current_leader_epoch=5)
    ask("last fetched epoch", 5, last_fetched_epoch=0)
    ask("a future last fetched epoch", 5, last_fetched_epoch=3)
    ask("an unknown session", 0, session_id=12_345, session_epoch=3)
    ask("close an unknown session", 0, session_id=12_345)
    client.ask("no topics", max_wait_ms=0, max_bytes=1000, session_epoch=-1, topics=[])


def fetch_session(client: RecordingClient) -> None:
    """Fetch in a new session, if the broker creates sessions."""
    name = client.create_topic("-session")
    topic_id = client.wait_for_topic(name, 2)
    client.produce(name, batch(b"a", b"b"))
    topic_entry = (
        {"topic_id": topic_id}
        if client.version >= _TOPIC_IDS_SINCE
        else {"topic": name}
    )

    def ask(
        step: str,
        session_id: int,
        epoch: int,
        offsets: dict[int, int],
        forgotten: Sequence[int] = (),
    ) -> Any:
        parts = [
            {
                "partition": number,
                "fetch_offset": offset,
                "partition_max_bytes": 1 << 20,
            }
            for number, offset in offsets.items()
        ]
        topics = [{**topic_entry, "partitions": parts}] if parts else []
        forgotten_topics = (
            [{**topic_entry, "partitions": forgotten}] if forgotten else []
        )
        return client.ask(
            f"session: {step}",
            topics=topics, max_wait_ms=0, max_bytes=1 << 20, session_id=session_id, session_epoch=epoch,
            **({"forgotten_topics_data": forgotten_topics} if forgotten_topics else {}),
        )  # fmt: skip

    made = ask("a new session", 0, 0, {0: 0, 1: 0})
    if not made.session_id:
        return
    first = made.session_id
    ask("the next epoch", first, 1, {0: 2})
    ask("nothing new", first, 2, {})
    client.produce(name, batch(b"c"), partition=1)
    ask("a new record in one partition", first, 3, {})
    ask("the same epoch again", first, 3, {})
    ask("records that were not fetched", first, 4, {})
    client.ask_unrecorded(
        wire.DELETE_RECORDS, 2, timeout_ms=30_000, topics=[_deletion(name, 1)]
    )
    ask("another log start", first, 5, {1: 1})
    ask("an unknown partition", first, 6, {7: 0})
    ask("an error again", first, 7, {})
    ask("a forgotten partition", first, 8, {}, [7])
    ask("nothing new after an error", first, 9, {})
    ask("after the end", first, 10, {0: 9})
    ask("a valid offset after an error", first, 11, {0: 2})
    ask("all are forgotten", first, 12, {}, [0, 1])
    ask("after all were forgotten", first, 13, {})
    second = ask("a second session", first, 0, {0: 0})
    third = ask("a session that replaces the second one", second.session_id, 0, {0: 0})
    ask("the second session is closed", second.session_id, 1, {})
    ask("closed", third.session_id, -1, {0: 0})
    ask("after it was closed", third.session_id, 1, {})
    ask("without partitions", 0, 0, {})
    ask("another epoch than 0 without a session", 0, 1, {})


def list_offsets(client: RecordingClient) -> None:
    name = client.create_topic()
    client.produce(name, batch(b"a", b"b"))
    client.produce(name, batch(b"c", time_ms=NOW_MS + 60_000))
    client.ask_unrecorded(
        wire.DELETE_RECORDS, 2, timeout_ms=30_000, topics=[_deletion(name, 1)]
    )

    def ask(step: str, timestamp: int, topic: str = name, **more: Any) -> None:
        isolation_level = more.pop("isolation_level", 0)
        part = {"partition_index": 0, "timestamp": timestamp, **more}
        topics = [{"name": topic, "partitions": [part]}]
        client.ask(step, replica_id=-1, isolation_level=isolation_level, topics=topics)

    ask("the end", -1)
    ask("the start", -2)
    ask("the largest time", -3)
    ask("the local start", -4)
    ask("the last tiered offset", -5)
    ask("the earliest pending upload", -6)
    ask("an unknown negative timestamp", -9)
    ask("a time before all", 0)
    ask("a time between", NOW_MS + 10_000)
    ask("the time of a record", NOW_MS + 60_000)
    ask("a time after all", NOW_MS + 70_000)
    ask("no such topic", -1, topic=f"{name}-none")
    ask("no such partition", -1, partition_index=7)
    ask("the epoch of the leader", -1, current_leader_epoch=0)
    ask("a future epoch", -1, current_leader_epoch=5)
    ask("read committed", -1, isolation_level=1)
    duplicate = {
        "name": name,
        "partitions": [{"partition_index": 0, "timestamp": -1}] * 2,
    }
    client.ask("a partition twice", replica_id=-1, topics=[duplicate])


def _deletion(name: str, offset: int) -> dict[str, Any]:
    return {"name": name, "partitions": [{"partition_index": 0, "offset": offset}]}


def offset_for_leader_epoch(client: RecordingClient) -> None:
    name = client.create_topic()
    client.produce(name, batch(b"a", b"b"))

    def ask(
        step: str,
        leader_epoch: int,
        topic: str = name,
        partition: int = 0,
        current: int = -1,
    ) -> None:
        part = {
            "partition": partition,
            "leader_epoch": leader_epoch,
            "current_leader_epoch": current,
        }
        client.ask(step, replica_id=-1, topics=[{"topic": topic, "partitions": [part]}])

    ask("the epoch", 0)
    ask("a future epoch", 5)
    ask("no epoch", -1)
    ask("no such topic", 0, f"{name}-none")
    ask("no such partition", 0, partition=7)
    ask("another epoch of the leader", 0, current=4)


def delete_records(client: RecordingClient) -> None:
    name = client.create_topic()
    compacted = client.create_topic("-compacted", cleanup_policy="compact")
    client.produce(name, batch(b"a", b"b", b"c"))

    def ask(step: str, offset: int, topic: str = name, partition: int = 0) -> None:
        part = {"partition_index": partition, "offset": offset}
        client.ask(
            step, timeout_ms=30_000, topics=[{"name": topic, "partitions": [part]}]
        )

    ask("some", 1)
    ask("below the log start", 0)
    ask("after the end", 9)
    ask("all", -1)
    ask("below zero", -5)
    ask("no such topic", 0, f"{name}-none")
    ask("no such partition", 0, partition=7)
    ask("of a compacted topic", 0, topic=compacted)


def metadata(client: RecordingClient) -> None:
    name = client.create_topic()
    topic_id = client.wait_for_topic(name, 2)
    has_flag = client.version >= 4
    has_ids = client.version >= 10

    def ask(step: str, topics: list[dict[str, Any]] | None, **more: Any) -> None:
        flags = {"allow_auto_topic_creation": False} if has_flag else {}
        client.ask(step, topics=topics, **flags, **more)

    ask("a topic", [{"name": name}])
    ask("no topic", [])
    # In version 0, an empty list means all topics, including topics of other scripts.
    step, recorded = client.recorded.pop()
    client.recorded.append(
        (
            step,
            {
                **recorded,
                "topics": [each for each in recorded["topics"] if each["name"] == name],
            },
        )
    )
    ask("an impossible name", [{"name": "a b"}])
    ask("a name of 250 characters", [{"name": "x" * 250}])
    ask("a topic twice", [{"name": name}, {"name": name}])
    if has_flag:
        ask("no such topic", [{"name": f"{name}-none"}])
    if has_ids:
        ask("by its id", [{"topic_id": topic_id, "name": None}])
        ask("by an unknown id", [{"topic_id": b"\1" * 16, "name": None}])
        ask("by id and name", [{"topic_id": topic_id, "name": name}])
    if client.version >= 8:
        ask(
            "with operations",
            [{"name": name}],
            include_topic_authorized_operations=True,
        )


def describe_topic_partitions(client: RecordingClient) -> None:
    name = client.create_topic(partitions=3)
    limit = {"response_partition_limit": 2000}
    client.ask("a topic", topics=[{"name": name}], **limit)
    client.ask("no such topic", topics=[{"name": f"{name}-none"}], **limit)
    client.ask("an impossible name", topics=[{"name": "a b"}], **limit)
    client.ask(
        "two partitions at a time", topics=[{"name": name}], response_partition_limit=2
    )
    cursor = {"topic_name": name, "partition_index": 2}
    client.ask("from a cursor", topics=[{"name": name}], cursor=cursor, **limit)
    outside = {"topic_name": name, "partition_index": -1}
    client.ask(
        "from a cursor below zero", topics=[{"name": name}], cursor=outside, **limit
    )


def write_markers(client: RecordingClient) -> None:
    name = client.create_topic()
    id_and_epoch = {"producer_id": 9_000, "producer_epoch": 1}
    client.produce(name, batch(b"a"))

    def ask(
        step: str, topic: str = name, partition: int = 0, coordinator_epoch: int = 0
    ) -> None:
        topics = [{"name": topic, "partition_indexes": [partition]}]
        marker = {
            **id_and_epoch,
            "transaction_result": True,
            "topics": topics,
            "coordinator_epoch": coordinator_epoch,
        }
        client.ask(step, markers=[marker])

    ask("of an unknown producer")
    ask("a later coordinator", coordinator_epoch=4)
    ask("an earlier coordinator", coordinator_epoch=1)
    ask("no such topic", f"{name}-none")
    ask("no such partition", partition=7)
    id_and_epoch["producer_epoch"] = 0
    ask("an older epoch", coordinator_epoch=5)
    client.ask("no markers", markers=[])


SCRIPTS: dict[Any, list[Script]] = {
    wire.PRODUCE: [produce],
    wire.FETCH: [fetch, fetch_session],
    wire.LIST_OFFSETS: [list_offsets],
    wire.OFFSET_FOR_LEADER_EPOCH: [offset_for_leader_epoch],
    wire.DELETE_RECORDS: [delete_records],
    wire.METADATA: [metadata],
    wire.DESCRIBE_TOPIC_PARTITIONS: [describe_topic_partitions],
    wire.WRITE_TXN_MARKERS: [write_markers],
}
