"""Copy the records of a topic to PostgreSQL, each exactly once: the progress is stored
with the rows.

A crash has no effect, because rows and progress are stored in one transaction. A
consumer that lost its partition while it worked stores nothing, because the progress is
updated only if it has the expected value. Workers that share the directory divide the
partitions. tests/interop/test_interop_postgres.py kills the program at every change on
disk and at every statement.

    pip install 'psycopg[binary]'
    python examples/delivery_postgres.py data 'dbname=shop'
"""

from __future__ import annotations

import sys
from typing import Any

import psycopg

import logcore
from logcore.consumer import RebalanceListener, TopicPartition

TABLES = """
    CREATE TABLE IF NOT EXISTS payments (topic text, partition int, "offset" bigint, value bytea);
    CREATE TABLE IF NOT EXISTS consumed_offsets (name text, topic text, partition int, next bigint,
        PRIMARY KEY (name, topic, partition));
"""
INSERT = "INSERT INTO payments VALUES (%s, %s, %s, %s)"
PLACE = "SELECT next FROM consumed_offsets WHERE name = 'payments' AND topic = %s AND partition = %s"
# Two owners of a partition update the same row: the later owner waits for the earlier
# owner's transaction, and then finds another value.
MOVE = """
    INSERT INTO consumed_offsets VALUES ('payments', %(topic)s, %(partition)s, %(next)s)
    ON CONFLICT (name, topic, partition) DO UPDATE SET next = excluded.next WHERE consumed_offsets.next = %(expected)s
"""


class StoredOffsets(RebalanceListener):
    """End of the database's rows, for each partition that is assigned to this consumer."""

    def __init__(
        self, consumer: logcore.consumer.Consumer, database: psycopg.Connection[Any]
    ) -> None:
        self.consumer = consumer
        self.database = database
        self.next: dict[TopicPartition, int] = {}

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        for partition in sorted(partitions):
            with self.database.transaction():
                found = self.database.execute(PLACE, partition).fetchone()
            self.next[partition] = 0 if found is None else found[0]
            self.consumer.seek(partition, self.next[partition])

    def move(self, topic_partition: TopicPartition, after: int) -> None:
        """Store the new end in the transaction of the rows.

        If another owner of the partition has stored a later end, the transaction is
        rolled back.
        """
        row = {
            "topic": topic_partition.topic,
            "partition": topic_partition.partition,
            "next": after,
            "expected": self.next[topic_partition],
        }
        if self.database.execute(MOVE, row).rowcount == 0:
            raise RuntimeError(
                f"another owner of {topic_partition.topic}-{topic_partition.partition}"
                f" has passed {self.next[topic_partition]}"
            )


def exactly_once(directory: logcore.LogDir, database: psycopg.Connection[Any]) -> None:
    """Copy records until all are copied.

    Raises:
        RuntimeError: the consumer lost a partition; the caller starts again.
    """
    with directory.consumer(group_id="payments", enable_auto_commit=False) as consumer:
        stored = StoredOffsets(consumer, database)
        consumer.subscribe(["orders"], listener=stored)
        while records := consumer.poll(max_records=7):
            after = records.next_offsets()
            with database.transaction(), database.cursor() as cursor:
                rows = [
                    (record.topic, record.partition, record.offset, record.value)
                    for record in records.records()
                ]
                cursor.executemany(INSERT, rows)
                for partition, offset in sorted(after.items()):
                    stored.move(partition, offset)
            stored.next.update(after)
            consumer.commit()  # only shows the lag in tools; correctness does not depend on it


def main(directory_path: str, connection: str) -> None:
    with (
        logcore.open_dir(directory_path, shared=True) as directory,
        psycopg.connect(connection, autocommit=True) as database,
    ):
        database.execute(TABLES)
        exactly_once(directory, database)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: delivery_postgres.py DIR CONNECTION", file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
