"""Brings the records of a topic into PostgreSQL, each exactly once: how far it came is
stored with the rows.

A crash changes nothing: rows and places are one transaction. A consumer that lost its
partition while it worked stores nothing, because a place moves only from where it was
expected. Workers that share the directory divide the partitions.
tests/interop/test_interop_postgres.py kills it at every change on disk and at every
statement.

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
    CREATE TABLE IF NOT EXISTS places (name text, topic text, partition int, next bigint,
        PRIMARY KEY (name, topic, partition));
"""
INSERT = "INSERT INTO payments VALUES (%s, %s, %s, %s)"
PLACE = (
    "SELECT next FROM places WHERE name = 'payments' AND topic = %s AND partition = %s"
)
# Two owners meet at this row: the later one waits for the earlier one's transaction,
# and then finds another place.
MOVE = """
    INSERT INTO places VALUES ('payments', %(topic)s, %(partition)s, %(next)s)
    ON CONFLICT (name, topic, partition) DO UPDATE SET next = excluded.next WHERE places.next = %(expected)s
"""


class Places(RebalanceListener):
    """Where the rows of the database end, for each partition that this consumer gets."""

    def __init__(
        self, consumer: logcore.consumer.Consumer, database: psycopg.Connection[Any]
    ) -> None:
        self.consumer = consumer
        self.database = database
        self.next: dict[TopicPartition, int] = {}

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        for one in sorted(partitions):
            with self.database.transaction():
                found = self.database.execute(PLACE, one).fetchone()
            self.next[one] = 0 if found is None else found[0]
            self.consumer.seek(one, self.next[one])

    def move(self, one: TopicPartition, after: int) -> None:
        """In the transaction of the rows. Another owner may have passed: then nothing
        of it is stored.
        """
        place = {
            "topic": one.topic,
            "partition": one.partition,
            "next": after,
            "expected": self.next[one],
        }
        if self.database.execute(MOVE, place).rowcount == 0:
            raise RuntimeError(
                f"another owner of {one.topic}-{one.partition} has passed {self.next[one]}"
            )


def exactly_once(directory: logcore.LogDir, database: psycopg.Connection[Any]) -> None:
    """Until there are no more records. Raises RuntimeError when it lost a partition;
    then it is begun again.
    """
    with directory.consumer(group_id="payments", enable_auto_commit=False) as consumer:
        places = Places(consumer, database)
        consumer.subscribe(["orders"], listener=places)
        while records := consumer.poll(max_records=7):
            after = records.next_offsets()
            with database.transaction(), database.cursor() as cursor:
                rows = [
                    (record.topic, record.partition, record.offset, record.value)
                    for record in records.records()
                ]
                cursor.executemany(INSERT, rows)
                for one, offset in sorted(after.items()):
                    places.move(one, offset)
            places.next.update(after)
            consumer.commit()  # for who looks at the lag; nothing depends on it


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
