"""Work that confluent-kafka does on a broker: producing, groups and transactions."""

from __future__ import annotations

from typing import Any

import confluent_kafka


def produce(servers: str, topic: str, count: int, **settings: Any) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, **settings})
    for number in range(count):
        producer.produce(topic, b"value %d" % number, key=b"key %d" % (number % 50))
    assert producer.flush(60) == 0


def consume(servers: str, topic: str, count: int, members: int, **more: Any) -> None:
    """Read a topic as a group that commits its offsets."""
    settings = {
        "bootstrap.servers": servers,
        "auto.offset.reset": "earliest",
        **more,
    }
    consumers = [confluent_kafka.Consumer(settings) for _ in range(members)]
    for consumer in consumers:
        consumer.subscribe([topic])
    while count > 0:
        for consumer in consumers:
            count -= len(consumer.consume(500, 0.1))
    for consumer in consumers:
        consumer.close()


def copy_in_transactions(servers: str, source: str, target: str) -> None:
    """Copy records in transactions. The second transaction is aborted."""
    settings = {"bootstrap.servers": servers}
    producer = confluent_kafka.Producer({**settings, "transactional.id": "copier"})
    producer.init_transactions()
    reader = confluent_kafka.Consumer(
        {
            **settings,
            "group.id": "copier",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    reader.subscribe([source])
    for number in range(3):
        records: list[Any] = []
        while len(records) < 100:
            records += reader.consume(100 - len(records), 0.1)
        producer.begin_transaction()
        for record in records:
            producer.produce(target, record.value())
        producer.send_offsets_to_transaction(
            reader.position(reader.assignment()), reader.consumer_group_metadata()
        )
        if number == 1:
            assert producer.flush(60) == 0  # otherwise the records are not sent
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    reader.close()
