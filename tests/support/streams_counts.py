"""The results of the Kafka Streams application of tests/data/kafka/Streams.java."""

from __future__ import annotations

import confluent_kafka


class Counts:
    """The committed counts of words in the topic `counts`, read while it grows."""

    def __init__(self, address: str, partitions: int) -> None:
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "check",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "reconnect.backoff.max.ms": 200,
            }
        )
        self._consumer.assign(
            [
                confluent_kafka.TopicPartition("counts", number, 0)
                for number in range(partitions)
            ]
        )
        self.seen: dict[str, list[int]] = {}

    def latest(self) -> dict[str, int]:
        """Read new messages, and return the last count of each word."""
        message = self._consumer.poll(0.5)
        while message is not None:
            if message.error() is None:
                counts = self.seen.setdefault(message.key().decode(), [])
                counts.append(int(message.value()))
            message = self._consumer.poll(0.1)
        return {word: counts[-1] for word, counts in self.seen.items()}

    def close(self) -> None:
        self._consumer.close()
