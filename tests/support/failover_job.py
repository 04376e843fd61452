"""A client of a cluster in its own process, with kafka-python or aiokafka.

    python failover_job.py CLIENT produce|consume ADDRESS TOPIC GROUP

See tests/interop/test_interop_failover.py for the input and the output of each role.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any


def report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def kafka_python_produces(address: str, topic: str) -> None:
    import kafka

    producer = kafka.KafkaProducer(
        bootstrap_servers=address.split(","),
        acks="all",
        enable_idempotence=True,
        delivery_timeout_ms=180_000,
        max_block_ms=180_000,
    )

    def failed(value: str, error: object) -> None:
        report(f"failed {value} {error!r}")

    for line in sys.stdin:
        value = line.strip()
        future = producer.send(topic, value.encode())
        future.add_callback(lambda _, value=value: report(f"acked {value}"))
        future.add_errback(partial(failed, value))
    producer.flush(180)
    producer.close()


def kafka_python_consumes(address: str, topic: str, group: str) -> None:
    import kafka

    consumer = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=address.split(","),
        group_id=group,
        auto_offset_reset="earliest",
        auto_commit_interval_ms=200,
    )
    for message in consumer:
        report(f"read {message.partition} {message.offset} {message.value.decode()}")


async def aiokafka_produces(address: str, topic: str) -> None:
    import aiokafka

    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=address,
        acks="all",
        enable_idempotence=True,
        request_timeout_ms=180_000,
    )
    await producer.start()
    loop = asyncio.get_running_loop()

    def delivered(value: str, future: Any) -> None:
        error = future.exception()
        report(f"acked {value}" if error is None else f"failed {value} {error!r}")

    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        if not line:
            break
        value = line.strip()
        future = await producer.send(topic, value.encode())
        future.add_done_callback(partial(delivered, value))
    await producer.stop()


async def aiokafka_consumes(address: str, topic: str, group: str) -> None:
    import aiokafka

    consumer = aiokafka.AIOKafkaConsumer(
        topic,
        bootstrap_servers=address,
        group_id=group,
        auto_offset_reset="earliest",
        auto_commit_interval_ms=200,
    )
    await consumer.start()
    async for message in consumer:
        report(f"read {message.partition} {message.offset} {message.value.decode()}")


def main(client: str, role: str, address: str, topic: str, group: str) -> None:
    match client, role:
        case "kafka-python", "produce":
            kafka_python_produces(address, topic)
        case "kafka-python", "consume":
            kafka_python_consumes(address, topic, group)
        case "aiokafka", "produce":
            asyncio.run(aiokafka_produces(address, topic))
        case "aiokafka", "consume":
            asyncio.run(aiokafka_consumes(address, topic, group))
        case _:
            raise SystemExit(f"no such client or role: {client} {role}")


if __name__ == "__main__":
    main(*sys.argv[1:])
