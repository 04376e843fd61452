"""Makes examples/data/kafka again: a log directory that an Apache Kafka broker has
written.

    .venv/bin/python tools/kafka_sample.py

An hour of 1,800 orders in two partitions, compressed by librdkafka with zstd. Needs
Java and Maven, like `make interop`.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "examples" / "data" / "kafka"
#: 2023-11-14 22:00 UTC.
START_MS = 1_699_999_200_000
CUSTOMERS = ("anna", "ben", "cleo", "dan", "eva", "finn")
FRUITS = ("apples", "pears", "plums", "melons")


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.kafka_jvm import Broker

    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder)) as broker:
        admin = AdminClient({"bootstrap.servers": broker.address})
        topic = NewTopic(
            "orders",
            num_partitions=2,
            replication_factor=1,
            config={"retention.ms": "-1"},
        )
        admin.create_topics([topic])["orders"].result(30)
        producer = Producer(
            {
                "bootstrap.servers": broker.address,
                "compression.type": "zstd",
                "partitioner": "murmur2_random",
                "linger.ms": 200,
                "enable.idempotence": True,
            }
        )
        rng = random.Random(1)
        for timestamp_ms in sorted(
            START_MS + int(rng.triangular(0, 3_600_000, 2_400_000))
            for _ in range(1_800)
        ):
            producer.produce(
                "orders",
                key=rng.choice(CUSTOMERS),
                value=f'{{"fruit": "{rng.choice(FRUITS)}", "count": {rng.randrange(1, 9)}}}',
                timestamp=timestamp_ms,
            )
        assert producer.flush(60) == 0
        broker.stop()
        shutil.rmtree(TARGET, ignore_errors=True)
        TARGET.mkdir(parents=True)
        for path in sorted(broker.data.iterdir()):
            if path.name.startswith("orders-"):
                shutil.copytree(path, TARGET / path.name)
            elif path.name == "meta.properties" or path.name.endswith("-checkpoint"):
                lines = path.read_text()
                shutil.copy(path, TARGET)
                print(path.name, lines)
    size = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{TARGET}: {size} bytes")


if __name__ == "__main__":
    main()
