"""Send orders to a Kafka broker with confluent-kafka, an unmodified client. `netshim
serve data` starts such a broker.

python examples/produce_orders.py 127.0.0.1:9092 10
"""

from __future__ import annotations

import random
import sys
from typing import Any

from confluent_kafka import Producer

FRUIT = ("apples", "pears", "melons", "plums")
NAMES = ("anna", "ben", "cleo", "dan")


def main(address: str, count: int) -> int:
    producer = Producer({"bootstrap.servers": address, "acks": "all"})
    failed = []

    def told(error: Any, message: Any) -> None:
        if error is not None:
            failed.append(error)
        else:
            print(
                f"{message.topic()}-{message.partition()} offset {message.offset()}: {message.value().decode()}"
            )

    for _ in range(count):
        order = f"{random.randint(1, 9)} {random.choice(FRUIT)}"
        producer.produce(
            "orders",
            order.encode(),
            key=random.choice(NAMES).encode(),
            on_delivery=told,
        )
        producer.poll(0)
    left = producer.flush(10)
    if failed or left:
        print(
            f"{len(failed) + left} of {count} were not delivered: {failed[:1]}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(
        main(
            sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092",
            int((sys.argv[2:] or ["10"])[0]),
        )
    )
