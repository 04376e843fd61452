"""A broker of Apache Kafka writes a directory, logcore appends to it, and the broker
opens it again. The broker runs in KRaft mode, and the clients use librdkafka. The
broker is shut down in one case, and killed in the other. Needs Java 17 and Maven. Run
by `make interop`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.cleaner import clean
from logcore.fs import OS
from logcore.inspect.verify import verify
from logcore.metadata import checkpoint
from logcore.recordbatch import encode
from support.kafka_jvm import Broker

kafka = pytest.importorskip("confluent_kafka")
admin = pytest.importorskip("confluent_kafka.admin")

pytestmark = pytest.mark.interop

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
TOPICS: dict[str, dict[str, str]] = {
    "plain": {"internal.segment.bytes": "20000", "index.interval.bytes": "500"},
    "compacted": {
        "cleanup.policy": "compact",
        "internal.segment.bytes": "4000",
        "index.interval.bytes": "500",
        "min.cleanable.dirty.ratio": "0.01",
        "file.delete.delay.ms": "100",
    },
}
Row = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int]


def client_options(broker: Broker) -> dict[str, Any]:
    return {"bootstrap.servers": broker.address, "log_level": 0}


class ExpectedRows:
    """The rows of each topic that consumers must read."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, Row]] = {topic: {} for topic in TOPICS}
        self.undecided: list[tuple[str, int]] = []

    def producer(self, broker: Broker, **options: Any) -> Any:
        return kafka.Producer(
            {**client_options(broker), "linger.ms": 5, "batch.size": 1500, **options}
        )

    def send(
        self,
        producer: Any,
        topic: str,
        rows: Iterable[tuple[bytes | None, bytes | None, int]],
    ) -> None:
        for key, value, timestamp_ms in rows:
            headers: list[tuple[str, bytes | None]] = (
                [("h", b"1"), ("none", None)] if timestamp_ms % 3 == 0 else []
            )
            producer.produce(
                topic,
                value,
                key,
                timestamp=timestamp_ms,
                headers=headers,
                on_delivery=self._record_delivery(headers),
            )
        assert producer.flush(30) == 0

    def _record_delivery(self, headers: list[tuple[str, bytes | None]]) -> Any:
        def delivered(error: Any, message: Any) -> None:
            assert error is None, error
            timestamp_ms = message.timestamp()[1]
            row = (
                message.offset(),
                message.key(),
                message.value(),
                tuple(headers),
                timestamp_ms,
            )
            self.rows[message.topic()][message.offset()] = row
            self.undecided.append((message.topic(), message.offset()))

        return delivered

    def discard_undecided(self) -> None:
        """Discard the rows of an aborted transaction."""
        for topic, offset in self.undecided:
            del self.rows[topic][offset]
        self.undecided.clear()

    def add_appended(
        self, topic: str, log: logcore.Log, receipt: logcore.Receipt
    ) -> None:
        for record in log.read(receipt.offset, receipt.last_offset + 1):
            self.rows[topic][record.offset] = row_of(record)

    def newest_values(self, topic: str) -> dict[bytes | None, bytes | None]:
        return {row[1]: row[2] for _, row in sorted(self.rows[topic].items())}

    def rows_from(self, topic: str, start: int) -> list[Row]:
        return [
            row for offset, row in sorted(self.rows[topic].items()) if offset >= start
        ]


def row_of(record: Any) -> Row:
    return (
        record.offset,
        record.key,
        record.value,
        tuple(record.headers),
        record.timestamp_ms,
    )


def consume_all(broker: Broker, topic: str) -> list[Row]:
    """Return all committed records that a consumer reads."""
    consumer = kafka.Consumer(
        {
            **client_options(broker),
            "group.id": "all",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    rows: list[Row] = []
    try:
        consumer.assign([kafka.TopicPartition(topic, 0, kafka.OFFSET_BEGINNING)])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for message in consumer.consume(1000, 0.5):
                if message.error() is None:
                    headers = tuple(message.headers() or ())
                    rows.append(
                        (
                            message.offset(),
                            message.key(),
                            message.value(),
                            headers,
                            message.timestamp()[1],
                        )
                    )
                elif message.error().code() == kafka.KafkaError._PARTITION_EOF:
                    return rows
                else:
                    raise kafka.KafkaException(message.error())
    finally:
        consumer.close()
    raise TimeoutError(topic)


def write_all(expected: ExpectedRows, broker: Broker, now_ms: int) -> None:
    """Write records with every codec by idempotent producers, two concurrent
    transactions, of which some are aborted, and many values of few keys.
    """
    for index, codec in enumerate(CODECS):
        producer = expected.producer(
            broker, **{"compression.type": codec, "enable.idempotence": True}
        )
        rows = [
            (
                b"k%d" % (number % 7),
                b"%s %d %d" % (codec.encode(), index, number),
                now_ms + number,
            )
            for number in range(150)
        ]
        expected.send(
            producer, "plain", [*rows, (None, b"", now_ms), (b"k", None, now_ms)]
        )
        expected.send(producer, "compacted", rows)
    expected.undecided.clear()
    producers = [
        expected.producer(broker, **{"transactional.id": name})
        for name in ("first", "second")
    ]
    for producer in producers:
        producer.init_transactions(30)
    undecided: list[list[tuple[str, int]]] = [[], []]
    for index in range(5):
        for number, producer in enumerate(producers):
            producer.begin_transaction()
            for topic in TOPICS:
                expected.send(
                    producer,
                    topic,
                    [
                        (
                            b"t%d" % row_number,
                            b"txn %d %d" % (index, number),
                            now_ms + row_number,
                        )
                        for row_number in range(9)
                    ],
                )
            undecided[number], expected.undecided = expected.undecided, []
        for number, producer in enumerate(producers):
            expected.undecided = undecided[number]
            if (index + number) % 3 == 0:
                producer.abort_transaction(30)
                expected.discard_undecided()
            else:
                producer.commit_transaction(30)
            expected.undecided = []


def checkpointed_offset(broker: Broker, name: str, topic: str) -> int:
    return checkpoint.read_offsets(OS, str(broker.data), name).get((topic, 0), -1)


def check_directory(
    expected: ExpectedRows, directory: logcore.LogDir, start: int
) -> None:
    plain, compacted = (
        [
            row_of(record)
            for record in log.read(log.log_start_offset, isolation="read_committed")
        ]
        for log in (directory.partition(topic, 0) for topic in TOPICS)
    )
    assert plain == expected.rows_from("plain", start)
    check_compacted(expected, compacted)


def check_compacted(expected: ExpectedRows, rows: list[Row]) -> None:
    for row in rows:
        assert row == expected.rows["compacted"][row[0]]
    assert {row[1]: row[2] for row in rows} == expected.newest_values("compacted")


def append_all_kinds(
    expected: ExpectedRows, log: logcore.Log, topic: str, now_ms: int
) -> None:
    """Append records of every kind with logcore."""
    rows = [
        (b"k%d" % (number % 9), b"logcore %d" % number, (("h", b"2"),), now_ms + number)
        for number in range(200)
    ]
    expected.add_appended(topic, log, log.append_many(rows))
    for codec in CODECS[1:]:
        expected.add_appended(
            topic, log, log.append_batch(encode(rows[:20], codec=codec))
        )
    for index, commit in enumerate([True, False]):
        producer: dict[str, Any] = {
            "producer_id": 9_000_000,
            "producer_epoch": 0,
            "transactional": True,
        }
        receipt = log.append_batch(
            encode(rows[:5], base_sequence=5 * index, **producer)
        )
        if commit:
            expected.add_appended(topic, log, receipt)
        log.end_transaction(9_000_000, 0, commit=commit)


def end_open_transaction(log: logcore.Log) -> None:
    """Abort the transaction that was open when the broker was killed. Its batch is the
    last transactional one.
    """
    last = [
        batch for batch in log.batches(log.log_start_offset) if batch.is_transactional
    ][-1]
    assert (
        not last.is_control
        and log.last_stable_offset <= last.base_offset < log.log_end_offset
    )
    log.end_transaction(last.producer_id, last.producer_epoch, commit=False)
    assert log.last_stable_offset == log.log_end_offset


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_kafka_continues_with_a_directory_after_appends_of_logcore(
    tmp_path: Path, ending: str
) -> None:
    now_ms = int(time.time() * 1000)
    expected = ExpectedRows()
    start = 100
    with Broker(tmp_path) as broker:
        client = admin.AdminClient(client_options(broker))
        new_topics = [
            admin.NewTopic(topic, 1, 1, config=config)
            for topic, config in TOPICS.items()
        ]
        for future in client.create_topics(new_topics, request_timeout=30).values():
            future.result(30)
        write_all(expected, broker, now_ms)
        deletions = client.delete_records([kafka.TopicPartition("plain", 0, start)])
        assert [future.result(30).low_watermark for future in deletions.values()] == [
            start
        ]
        deadline = time.monotonic() + 30
        while (
            checkpointed_offset(broker, checkpoint.CLEANER, "compacted") < 700
            or checkpointed_offset(broker, checkpoint.LOG_START, "plain") < start
        ):
            assert time.monotonic() < deadline, broker.output()
            time.sleep(0.1)
        if ending == "kill":
            producer = expected.producer(broker, **{"transactional.id": "first"})
            producer.init_transactions(30)
            producer.begin_transaction()
            for topic in TOPICS:
                expected.send(producer, topic, [(b"k1", b"open", now_ms)])
            expected.discard_undecided()
            broker.kill()

    with logcore.open_dir(broker.data, durability="os") as directory:
        assert directory.host.was_clean == (ending == "stop")
        check_directory(expected, directory, start)
        for topic, config in TOPICS.items():  # the broker stores the settings elsewhere
            directory.alter_topic(
                topic,
                {
                    name.removeprefix("internal."): value
                    for name, value in config.items()
                },
            )
            log = directory.partition(topic, 0)
            epochs = [
                batch.partition_leader_epoch
                for batch in log.batches(log.log_start_offset)
            ]
            assert epochs == sorted(epochs) and log.leader_epoch == epochs[-1]
            if ending == "kill":
                end_open_transaction(log)
            append_all_kinds(expected, log, topic, now_ms)
        compacted = directory.partition("compacted", 0)
        compacted.roll()
        before = compacted.statistics().size_bytes
        assert clean(compacted, force=True) is not None
        assert compacted.statistics().size_bytes < before
        start += 50
        directory.partition("plain", 0).delete_records(start)
        check_directory(expected, directory, start)
    assert not [
        verdict for verdict in verify(broker.data) if verdict.status == "damaged"
    ]

    for _ in range(2):
        with Broker(tmp_path) as broker:
            assert consume_all(broker, "plain") == expected.rows_from("plain", start)
            check_compacted(expected, consume_all(broker, "compacted"))
            write_all(expected, broker, now_ms)
            assert consume_all(broker, "plain") == expected.rows_from("plain", start)
        assert "ERROR" not in broker.output()
        with logcore.open_dir(broker.data) as directory:
            assert directory.host.was_clean
            check_directory(expected, directory, start)
