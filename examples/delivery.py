"""Four ways to copy the records of a topic to a database, and one way to copy rows to a
topic.

| function | effect of a crash |
|---|---|
| at_most_once | records that were read but not yet stored are lost |
| at_least_once | some records are stored twice |
| upserted | some records are stored twice, without effect: their offset is their key |
| exactly_once | none: the progress is stored with the rows, in one transaction |
| outbox | none: the progress is read from the topic itself |

tests/consumer/test_delivery.py kills each function at every change that it makes on disk.

    python examples/delivery.py data payments.sqlite exactly_once
"""

from __future__ import annotations

import sqlite3
import sys

import logcore
from logcore.consumer import RebalanceListener, TopicPartition

TABLES = """
    CREATE TABLE IF NOT EXISTS payments (topic TEXT, partition INTEGER, "offset" INTEGER, value BLOB);
    CREATE TABLE IF NOT EXISTS once (topic TEXT, partition INTEGER, "offset" INTEGER, value BLOB,
        PRIMARY KEY (topic, partition, "offset"));
    CREATE TABLE IF NOT EXISTS consumed_offsets (name TEXT, topic TEXT, partition INTEGER, next INTEGER,
        PRIMARY KEY (name, topic, partition));
    CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, value BLOB);
"""
INSERT = "INSERT INTO payments VALUES (?, ?, ?, ?)"
UPSERT = "INSERT OR REPLACE INTO once VALUES (?, ?, ?, ?)"
MOVE = """
    INSERT INTO consumed_offsets VALUES (:name, :topic, :partition, :next)
    ON CONFLICT DO UPDATE SET next = excluded.next WHERE consumed_offsets.next = :expected
"""


def rows(
    records: logcore.consumer.ConsumerRecords,
) -> list[tuple[str, int, int, bytes | None]]:
    return [
        (record.topic, record.partition, record.offset, record.value)
        for record in records.records()
    ]


def at_most_once(directory: logcore.LogDir, database: sqlite3.Connection) -> None:
    with directory.consumer(
        group_id="payments", auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        consumer.subscribe(["orders"])
        while records := consumer.poll(max_records=7):
            consumer.commit()  # before the rows are stored
            with database:
                database.executemany(INSERT, rows(records))


def at_least_once(directory: logcore.LogDir, database: sqlite3.Connection) -> None:
    with directory.consumer(
        group_id="payments", auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        consumer.subscribe(["orders"])
        while records := consumer.poll(max_records=7):
            with database:
                database.executemany(INSERT, rows(records))
            consumer.commit()  # after the rows are stored


def upserted(directory: logcore.LogDir, database: sqlite3.Connection) -> None:
    with directory.consumer(
        group_id="payments", auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        consumer.subscribe(["orders"])
        while records := consumer.poll(max_records=7):
            with database:
                database.executemany(UPSERT, rows(records))
            consumer.commit()


class StoredOffsets(RebalanceListener):
    """End of the database's rows, for each partition that is assigned to this consumer."""

    def __init__(
        self, consumer: logcore.consumer.Consumer, database: sqlite3.Connection
    ) -> None:
        self.consumer = consumer
        self.database = database
        self.next: dict[TopicPartition, int] = {}

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        for partition in partitions:
            found = self.database.execute(
                "SELECT next FROM consumed_offsets WHERE name = 'payments' AND topic = ? AND partition = ?",
                partition,
            ).fetchone()
            self.next[partition] = 0 if found is None else found[0]
            self.consumer.seek(partition, self.next[partition])

    def move(self, topic_partition: TopicPartition, after: int) -> None:
        """Store the new end in the transaction of the rows.

        If another owner of the partition has stored a later end, the transaction is
        rolled back.
        """
        expected = self.next[topic_partition]
        row = {
            "name": "payments",
            "topic": topic_partition.topic,
            "partition": topic_partition.partition,
        }
        moved = self.database.execute(
            MOVE, {**row, "next": after, "expected": expected}
        )
        if moved.rowcount == 0:
            raise RuntimeError(
                f"another owner of {topic_partition.topic}-{topic_partition.partition}"
                f" has stored records after {expected}"
            )
        self.next[topic_partition] = after


def exactly_once(directory: logcore.LogDir, database: sqlite3.Connection) -> None:
    with directory.consumer(group_id="payments", enable_auto_commit=False) as consumer:
        stored = StoredOffsets(consumer, database)
        consumer.subscribe(["orders"], listener=stored)
        while records := consumer.poll(max_records=7):
            with database:
                database.executemany(INSERT, rows(records))
                for partition, after in records.next_offsets().items():
                    stored.move(partition, after)


def outbox(directory: logcore.LogDir, database: sqlite3.Connection) -> None:
    """Append the rows of the table `outbox` in the order of their ids.

    Row n is appended to partition n modulo the number of partitions.
    """
    partitions = directory.partitions("sent")
    last = {}
    for number in partitions:
        log = directory.partition("sent", number)
        log.flush()
        end = log.high_watermark
        newest = log.get(end - 1) if end > log.log_start_offset else None
        last[number] = 0 if newest is None else int(dict(newest.headers)["id"] or 0)
    # The query begins after the smallest progress of all partitions. Other partitions
    # may already have some of these rows.
    found = database.execute(
        "SELECT id, value FROM outbox WHERE id > ? ORDER BY id", [min(last.values())]
    )
    with directory.producer() as producer:
        for number, value in found:
            partition = partitions[number % len(partitions)]
            if number > last[partition]:
                producer.send(
                    "sent", value, partition=partition, headers=[("id", b"%d" % number)]
                )


RECIPES = {
    deliver.__name__: deliver
    for deliver in (at_most_once, at_least_once, upserted, exactly_once, outbox)
}


def main(directory_path: str, database_path: str, recipe: str) -> None:
    with logcore.open_dir(directory_path) as directory:
        database = sqlite3.connect(database_path)
        database.executescript(TABLES)
        RECIPES[recipe](directory, database)
        database.close()


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[3] not in RECIPES:
        print(f"usage: delivery.py DIR DATABASE {'|'.join(RECIPES)}", file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
