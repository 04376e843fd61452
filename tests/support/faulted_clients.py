"""Clients under the faults of a broker: the jobs, the faults and the table.

Each job runs in a client of its own with a broker of its own:
- `produce` sends one record to partition 0 of the topic t, and waits for its delivery
  for at most 20 s. Requests time out after 2 s. `produce-idempotent` does so with an
  idempotent producer.
- `consume` reads three records of the topic t in the group g, and commits.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import aiokafka
import attrs
import confluent_kafka
import kafka as kafka_python
from aiokafka.errors import KafkaError as AiokafkaError
from kafka.errors import KafkaError as PythonKafkaError

from netshim.faults.control import ActiveRule, DiskRule, FaultControl
from netshim.testing import Kafka, start
from support import golang, kafka_jvm
from support.environments import ROOT

PAGE: Final = ROOT / "docs" / "client-faults.md"
VALUES: Final = ("a", "b", "c")
_REQUEST_MS: Final = 2_000
_DELIVERY_S: Final = 20
PRODUCE: Final = "produce"
IDEMPOTENT: Final = "produce-idempotent"
CONSUME: Final = "consume"


@attrs.frozen
class Outcome:
    """The result of a job: the report of the client, and the records."""

    #: "acknowledged", "committed", or the name of an error.
    result: str
    #: Records that the producer has stored.
    stored: int = 0
    #: Values that the consumer has read, in order.
    read: tuple[str, ...] = ()


# -- clients ---------------------------------------------------------------------------


def librdkafka(address: str, job: str, value: bytes = b"new") -> str:
    if job == CONSUME:
        return _librdkafka_consumes(address)
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": address,
            "socket.timeout.ms": _REQUEST_MS,
            "request.timeout.ms": _REQUEST_MS,
            "message.timeout.ms": _DELIVERY_S * 1_000,
            "enable.idempotence": job == IDEMPOTENT,
            "linger.ms": 0,
        }
    )
    reports: list[Any] = []
    producer.produce(
        "t", value, partition=0, on_delivery=lambda error, _: reports.append(error)
    )
    producer.flush(_DELIVERY_S + 10)
    (error,) = reports
    return "acknowledged" if error is None else str(error.name())


def _librdkafka_consumes(address: str) -> str:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "socket.timeout.ms": _REQUEST_MS,
            "fetch.wait.max.ms": 100,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["t"])
    found: list[str] = []
    result = "committed"
    end_s = time.monotonic() + _DELIVERY_S
    while not set(VALUES) <= set(found) and time.monotonic() < end_s:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append(message.value().decode())
    try:
        consumer.commit(asynchronous=False)
    except confluent_kafka.KafkaException as error:
        result = error.args[0].name()
    consumer.close()
    return f"{result} {','.join(found)}"


def kafka_python_client(address: str, job: str) -> str:
    common = {"bootstrap_servers": address, "request_timeout_ms": _REQUEST_MS}
    if job == CONSUME:
        return _kafka_python_consumes(common)
    producer = kafka_python.KafkaProducer(
        **common,
        enable_idempotence=job == IDEMPOTENT,
        delivery_timeout_ms=_DELIVERY_S * 1_000,
        max_block_ms=_DELIVERY_S * 1_000,
    )
    try:
        producer.send("t", b"new", partition=0).get(_DELIVERY_S + 10)
        return "acknowledged"
    except PythonKafkaError as error:
        return type(error).__name__
    finally:
        producer.close(5)


def _kafka_python_consumes(common: Mapping[str, Any]) -> str:
    consumer = kafka_python.KafkaConsumer(
        "t",
        **{**common, "request_timeout_ms": 11_000},
        group_id="g",
        session_timeout_ms=10_000,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    found: list[str] = []
    result = "committed"
    end_s = time.monotonic() + _DELIVERY_S
    try:
        while not set(VALUES) <= set(found) and time.monotonic() < end_s:
            for records in consumer.poll(200).values():
                found += [record.value.decode() for record in records]
        consumer.commit()
    except PythonKafkaError as error:
        result = type(error).__name__
    consumer.close()
    return f"{result} {','.join(found)}"


def aiokafka_client(address: str, job: str) -> str:
    if job == CONSUME:
        return asyncio.run(_aiokafka_consumes(address))
    return asyncio.run(_aiokafka_produces(address, is_idempotent=job == IDEMPOTENT))


async def _aiokafka_produces(address: str, *, is_idempotent: bool) -> str:
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=address,
        request_timeout_ms=_REQUEST_MS,
        enable_idempotence=is_idempotent,
    )
    await producer.start()
    try:
        sent = producer.send_and_wait("t", b"new", partition=0)
        await asyncio.wait_for(sent, _DELIVERY_S)
        return "acknowledged"
    except (AiokafkaError, TimeoutError) as error:
        return type(error).__name__
    finally:
        await producer.stop()


async def _aiokafka_consumes(address: str) -> str:
    consumer = aiokafka.AIOKafkaConsumer(
        "t",
        bootstrap_servers=address,
        request_timeout_ms=_REQUEST_MS,
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    found: list[str] = []
    result = "committed"
    end_s = time.monotonic() + _DELIVERY_S
    try:
        while not set(VALUES) <= set(found) and time.monotonic() < end_s:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += [record.value.decode() for record in records]
        await consumer.commit()
    except AiokafkaError as error:
        result = type(error).__name__
    await consumer.stop()
    return f"{result} {','.join(found)}"


def java(address: str, job: str) -> str:
    program = str(kafka_jvm.SOURCES / "FaultedClient.java")
    jars = f"{kafka_jvm.classes()}/*"
    return _output(["java", "-cp", jars, program, address, job])


def franz_go(address: str, job: str) -> str:
    return _output([str(golang.program("franz")), address, job])


def _output(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout.splitlines()[-1]


CLIENTS: Final[Mapping[str, Callable[[str, str], str]]] = {
    "confluent-kafka": librdkafka,
    "kafka-python": kafka_python_client,
    "aiokafka": aiokafka_client,
    "Java": java,
    "franz-go": franz_go,
}

# -- faults ----------------------------------------------------------------------------

#: Adds a rule to a broker.
AddRule = Callable[[FaultControl], ActiveRule | DiskRule]


@attrs.frozen
class FaultRow:
    """A row of the table."""

    name: str
    job: str
    add: AddRule
    #: Whether the rule is released after its first request.
    is_released: bool = False


def _answer(api: str, error: str, times: int = 1, **options: Any) -> AddRule:
    return lambda faults: faults.answer(api, error, times=times, **options)


ROWS: Final = (
    FaultRow(
        "Produce: NOT_LEADER_OR_FOLLOWER, twice",
        PRODUCE,
        _answer("Produce", "NOT_LEADER_OR_FOLLOWER", 2),
    ),
    FaultRow(
        "Produce: TOPIC_AUTHORIZATION_FAILED",
        PRODUCE,
        _answer("Produce", "TOPIC_AUTHORIZATION_FAILED"),
    ),
    FaultRow(
        "Produce: MESSAGE_TOO_LARGE", PRODUCE, _answer("Produce", "MESSAGE_TOO_LARGE")
    ),
    FaultRow(
        "Produce: delayed by 500 ms",
        PRODUCE,
        lambda faults: faults.delay("Produce", 500, times=1),
    ),
    FaultRow(
        "Produce: held, and released",
        PRODUCE,
        lambda faults: faults.hold("Produce", times=1),
        is_released=True,
    ),
    FaultRow(
        "Produce: connection closed before",
        PRODUCE,
        lambda faults: faults.disconnect("Produce", times=1),
    ),
    FaultRow(
        "Produce: answer lost, connection closed",
        PRODUCE,
        lambda faults: faults.lose_answer("Produce", then="close", times=1),
    ),
    FaultRow(
        "Produce, idempotent: answer lost, connection closed",
        IDEMPOTENT,
        lambda faults: faults.lose_answer("Produce", then="close", times=1),
    ),
    FaultRow(
        "Produce: answer lost, silence",
        PRODUCE,
        lambda faults: faults.lose_answer("Produce", times=1),
    ),
    FaultRow(
        "Produce, idempotent: answer lost, silence",
        IDEMPOTENT,
        lambda faults: faults.lose_answer("Produce", times=1),
    ),
    FaultRow(
        "Produce, idempotent: connection closed in the answer",
        IDEMPOTENT,
        lambda faults: faults.disconnect("Produce", after_bytes=20, times=1),
    ),
    FaultRow(
        "InitProducerId: COORDINATOR_LOAD_IN_PROGRESS",
        IDEMPOTENT,
        _answer("InitProducerId", "COORDINATOR_LOAD_IN_PROGRESS"),
    ),
    FaultRow(
        "Metadata: LEADER_NOT_AVAILABLE, twice",
        PRODUCE,
        _answer("Metadata", "LEADER_NOT_AVAILABLE", 2, topic="t"),
    ),
    FaultRow(
        "disk: a write fails with ENOSPC",
        PRODUCE,
        lambda faults: faults.disk("pwrite", "ENOSPC", path="*/t-0/*", times=1),
    ),
    FaultRow(
        "disk, idempotent: a write fails with EIO",
        IDEMPOTENT,
        lambda faults: faults.disk("pwrite", "EIO", path="*/t-0/*", times=1),
    ),
    FaultRow(
        "Fetch: NOT_LEADER_OR_FOLLOWER, twice",
        CONSUME,
        _answer("Fetch", "NOT_LEADER_OR_FOLLOWER", 2),
    ),
    FaultRow(
        "Fetch: OFFSET_OUT_OF_RANGE", CONSUME, _answer("Fetch", "OFFSET_OUT_OF_RANGE")
    ),
    FaultRow(
        "Fetch: delayed by 500 ms",
        CONSUME,
        lambda faults: faults.delay("Fetch", 500, times=1),
    ),
    FaultRow(
        "Fetch: connection closed in the answer",
        CONSUME,
        lambda faults: faults.disconnect("Fetch", after_bytes=40, times=1),
    ),
    FaultRow(
        "FindCoordinator: COORDINATOR_NOT_AVAILABLE, twice",
        CONSUME,
        _answer("FindCoordinator", "COORDINATOR_NOT_AVAILABLE", 2),
    ),
    FaultRow(
        "JoinGroup: COORDINATOR_LOAD_IN_PROGRESS",
        CONSUME,
        _answer("JoinGroup", "COORDINATOR_LOAD_IN_PROGRESS"),
    ),
    FaultRow(
        "JoinGroup: connection closed before",
        CONSUME,
        lambda faults: faults.disconnect("JoinGroup", times=1),
    ),
    FaultRow(
        "SyncGroup: REBALANCE_IN_PROGRESS",
        CONSUME,
        _answer("SyncGroup", "REBALANCE_IN_PROGRESS"),
    ),
    FaultRow(
        "OffsetFetch: NOT_COORDINATOR",
        CONSUME,
        _answer("OffsetFetch", "NOT_COORDINATOR"),
    ),
    FaultRow(
        "OffsetCommit: COORDINATOR_LOAD_IN_PROGRESS",
        CONSUME,
        _answer("OffsetCommit", "COORDINATOR_LOAD_IN_PROGRESS"),
    ),
    FaultRow(
        "OffsetCommit: UNKNOWN_MEMBER_ID",
        CONSUME,
        _answer("OffsetCommit", "UNKNOWN_MEMBER_ID"),
    ),
)


# -- the table -------------------------------------------------------------------------


def observe(path: Path, client: str, row: FaultRow) -> Outcome:
    """Run the job of a row in a client, with its fault.

    Raises:
        AssertionError: the fault did not occur, or the broker does not serve another
            client afterwards.
    """
    broker = start(path)
    try:
        broker.create_topic("t")
        if row.job == CONSUME:
            for value in VALUES:
                broker.append("t", value.encode())
        with broker.faults() as faults:
            rule = row.add(faults)
            if row.is_released:
                text = _released(broker, client, row, rule)
            else:
                text = CLIENTS[client](broker.bootstrap_servers, row.job)
            assert rule.hits >= 1, f"{client}, {row.name}: the fault did not occur"
        result, _, read = text.partition(" ")
        # The records before this one are visible after its acknowledgement.
        other = librdkafka(broker.bootstrap_servers, PRODUCE, b"other")
        assert other == "acknowledged"
        values = [one.value for one in broker.records("t")]
        if row.job == CONSUME:
            return Outcome(result, read=tuple(filter(None, read.split(","))))
        return Outcome(result, stored=values.count(b"new"))
    finally:
        broker.stop()


def _released(broker: Kafka, client: str, row: FaultRow, rule: Any) -> str:
    """Run a job, and release its request once it is held."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(CLIENTS[client], broker.bootstrap_servers, row.job)
        rule.wait(timeout=60)
        rule.release()
        return job.result()


def cell(outcome: Outcome, job: str) -> str:
    """Return an outcome in words."""
    if job == CONSUME:
        read = "reads nothing"
        if set(outcome.read) == set(VALUES):
            read = "reads all"
        elif outcome.read:
            read = "reads some"
        if len(set(outcome.read)) < len(outcome.read):
            read += ", some again"
        if outcome.result == "committed":
            return f"{read}, commits"
        return f"{read}; commit: {outcome.result}"
    stored = {0: "not stored", 1: "stored once", 2: "**stored twice**"}
    times = stored.get(outcome.stored, f"stored {outcome.stored} times")
    if outcome.result == "acknowledged" and outcome.stored == 1:
        return "stored once"
    return f"{outcome.result}, {times}"


def table(cells: Mapping[tuple[str, str], str]) -> str:
    """Return the table of the page, by cells of (row, client)."""
    lines = [f"| fault | {' | '.join(CLIENTS)} |", f"|---|{'---|' * len(CLIENTS)}"]
    for row in ROWS:
        each = " | ".join(cells[row.name, client] for client in CLIENTS)
        lines.append(f"| {row.name} | {each} |")
    return "\n".join(lines)
