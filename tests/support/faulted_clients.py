"""Runs clients with faults of a broker, and writes the table of their outcomes.

Each job runs in its own client, with its own broker:
- `produce` sends one record to partition 0 of the topic t, and waits for its delivery.
  `produce-idempotent` does so with an idempotent producer.
- `consume` reads the topic t in the group g until its last record, and commits.

Timeouts are long, so that a slow machine creates the same table. Only rows with a silent
broker have requests with short timeouts.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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
from netshim.faults.requests import ObservedRequest
from netshim.testing import Kafka, start
from support import golang, kafka_jvm
from support.environments import ROOT

PAGE: Final = ROOT / "docs" / "client-faults.md"
VALUES: Final = ("a", "b", "c")
#: Requests that clients repeat without a fault.
_POLLED: Final = frozenset(("Fetch", "Metadata"))
#: Timeout of requests.
REQUEST_MS: Final = 30_000
#: Timeout of requests to a broker that is silent.
SILENCE_MS: Final = 5_000
#: Time within which a producer delivers its record.
_DELIVERY_S: Final = 120
#: Time within which a consumer reads its records.
_READ_S: Final = 60
PRODUCE: Final = "produce"
IDEMPOTENT: Final = "produce-idempotent"
CONSUME: Final = "consume"


@attrs.frozen
class Outcome:
    """The result of a job: the report of the client, and the records."""

    #: "acknowledged", "committed", or the name of an error.
    result: str
    #: Whether the client has repeated the request that failed. False for requests that
    #: clients repeat without a fault.
    is_retried: bool = False
    #: The number of times that the record of the producer is stored.
    stored: int = 0
    #: The values that the consumer has read, in order.
    read: tuple[str, ...] = ()
    #: The offset that the group has committed.
    committed: int | None = None
    #: The number of times that the later record of another client is stored.
    stored_by_other: int = 0


# -- clients ---------------------------------------------------------------------------


def librdkafka(address: str, job: str, request_ms: int, value: bytes = b"new") -> str:
    if job == CONSUME:
        return _librdkafka_consumes(address, request_ms)
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": address,
            "socket.timeout.ms": request_ms,
            "request.timeout.ms": request_ms,
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


def _librdkafka_consumes(address: str, request_ms: int) -> str:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "socket.timeout.ms": request_ms,
            "fetch.wait.max.ms": 100,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["t"])
    found: list[str] = []
    result = "committed"
    end_s = time.monotonic() + _READ_S
    while VALUES[-1] not in found and time.monotonic() < end_s:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append(message.value().decode())
    try:
        consumer.commit(asynchronous=False)
    except confluent_kafka.KafkaException as error:
        result = error.args[0].name()
    consumer.close()
    return f"{result} {','.join(found)}"


def kafka_python_client(address: str, job: str, request_ms: int) -> str:
    common = {"bootstrap_servers": address, "request_timeout_ms": request_ms}
    if job == CONSUME:
        return _kafka_python_consumes(common)
    producer = kafka_python.KafkaProducer(
        **common,
        acks="all",
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
        **common,
        group_id="g",
        session_timeout_ms=10_000,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    # kafka-python 3.0.12 never ends a second rebalance if a poll() times out within it. The
    # first rebalance suffices if the client has the metadata of the topic.
    consumer.partitions_for_topic("t")
    found: list[str] = []
    result = "committed"
    end_s = time.monotonic() + _READ_S
    try:
        while VALUES[-1] not in found and time.monotonic() < end_s:
            for records in consumer.poll(200).values():
                found += [record.value.decode() for record in records]
        consumer.commit()
    except PythonKafkaError as error:
        result = type(error).__name__
    consumer.close()
    return f"{result} {','.join(found)}"


def aiokafka_client(address: str, job: str, request_ms: int) -> str:
    if job == CONSUME:
        return asyncio.run(_aiokafka_consumes(address, request_ms))
    return asyncio.run(_aiokafka_produces(address, request_ms, job == IDEMPOTENT))


async def _aiokafka_produces(address: str, request_ms: int, is_idempotent: bool) -> str:
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=address,
        request_timeout_ms=request_ms,
        acks="all",
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


async def _aiokafka_consumes(address: str, request_ms: int) -> str:
    consumer = aiokafka.AIOKafkaConsumer(
        "t",
        bootstrap_servers=address,
        request_timeout_ms=request_ms,
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    found: list[str] = []
    result = "committed"
    end_s = time.monotonic() + _READ_S
    try:
        while VALUES[-1] not in found and time.monotonic() < end_s:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += [record.value.decode() for record in records]
        await consumer.commit()
    except AiokafkaError as error:
        result = type(error).__name__
    await consumer.stop()
    return f"{result} {','.join(found)}"


def java(address: str, job: str, request_ms: int) -> str:
    program = str(kafka_jvm.SOURCES / "FaultedClient.java")
    jars = f"{kafka_jvm.kafka_jars()}/*"
    return _output(["java", "-cp", jars, program, address, job, str(request_ms)])


def franz_go(address: str, job: str, request_ms: int) -> str:
    return _output([str(golang.program("franz")), address, job, str(request_ms)])


def _output(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout.splitlines()[-1]


#: Runs a job with the broker at an address and a timeout of requests. Returns the result
#: and the values that were read.
Client = Callable[[str, str, int], str]
CLIENTS: Final[Mapping[str, Client]] = {
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
    #: The number of hits after which the rule is removed, for a rule without `times` and
    #: for a rule that holds requests.
    removed_after: int | None = None
    #: Whether a request that fails may have stored its record.
    may_store: bool = False
    request_ms: int = REQUEST_MS
    #: The offset that the group has committed before the job.
    committed: int | None = None

    @property
    def stored_before(self) -> tuple[str, ...]:
        """The values in the topic before the job."""
        return VALUES if self.job == CONSUME else ("first",)

    @property
    def unread(self) -> tuple[str, ...]:
        """The values after the offset that the group has committed."""
        return VALUES[self.committed or 0 :]


def _answer(api: str, error: str, times: int = 1, **options: Any) -> AddRule:
    return lambda faults: faults.answer(api, error, times=times, **options)


ROWS: Final = (
    FaultRow(
        "Produce: NOT_LEADER_OR_FOLLOWER, twice",
        PRODUCE,
        _answer("Produce", "NOT_LEADER_OR_FOLLOWER", 2),
    ),
    FaultRow(
        "Produce, idempotent: NOT_LEADER_OR_FOLLOWER, twice",
        IDEMPOTENT,
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
        removed_after=1,
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
        may_store=True,
    ),
    FaultRow(
        "Produce, idempotent: answer lost, connection closed",
        IDEMPOTENT,
        lambda faults: faults.lose_answer("Produce", then="close", times=1),
        may_store=True,
    ),
    FaultRow(
        "Produce: answer lost, silence",
        PRODUCE,
        lambda faults: faults.lose_answer("Produce", times=1),
        may_store=True,
        request_ms=SILENCE_MS,
    ),
    FaultRow(
        "Produce, idempotent: answer lost, silence",
        IDEMPOTENT,
        lambda faults: faults.lose_answer("Produce", times=1),
        may_store=True,
        request_ms=SILENCE_MS,
    ),
    FaultRow(
        "Produce, idempotent: connection closed in the answer",
        IDEMPOTENT,
        lambda faults: faults.disconnect("Produce", after_bytes=20, times=1),
        may_store=True,
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
        "Metadata: UNKNOWN_TOPIC_OR_PARTITION, twice",
        PRODUCE,
        _answer("Metadata", "UNKNOWN_TOPIC_OR_PARTITION", 2, topic="t"),
    ),
    FaultRow(
        "disk: a write fails with ENOSPC",
        PRODUCE,
        lambda faults: faults.disk("pwrite", "ENOSPC", path="*/t-0/*.log", times=1),
    ),
    FaultRow(
        "disk, idempotent: a write fails with EIO",
        IDEMPOTENT,
        lambda faults: faults.disk("pwrite", "EIO", path="*/t-0/*.log", times=1),
    ),
    FaultRow(
        "disk: full until two writes have failed",
        PRODUCE,
        lambda faults: faults.disk("pwrite", "ENOSPC", path="*/t-0/*.log"),
        removed_after=2,
    ),
    FaultRow(
        "disk, idempotent: writes fail with EIO until two have failed",
        IDEMPOTENT,
        lambda faults: faults.disk("pwrite", "EIO", path="*/t-0/*.log"),
        removed_after=2,
    ),
    FaultRow(
        "disk: a sync fails with EIO",
        PRODUCE,
        lambda faults: faults.disk("fdatasync", "EIO", path="*/t-0/*.log", times=1),
        may_store=True,
    ),
    FaultRow(
        "disk, idempotent: a sync fails with EIO",
        IDEMPOTENT,
        lambda faults: faults.disk("fdatasync", "EIO", path="*/t-0/*.log", times=1),
        may_store=True,
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
        "Fetch: held, and released",
        CONSUME,
        lambda faults: faults.hold("Fetch", times=1),
        removed_after=1,
    ),
    FaultRow(
        "Fetch: connection closed before",
        CONSUME,
        lambda faults: faults.disconnect("Fetch", times=1),
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
        "FindCoordinator: COORDINATOR_LOAD_IN_PROGRESS",
        CONSUME,
        _answer("FindCoordinator", "COORDINATOR_LOAD_IN_PROGRESS"),
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
        "JoinGroup: connection closed in the answer",
        CONSUME,
        lambda faults: faults.disconnect("JoinGroup", after_bytes=40, times=1),
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
        "OffsetFetch: NOT_COORDINATOR, one record is committed",
        CONSUME,
        _answer("OffsetFetch", "NOT_COORDINATOR"),
        committed=1,
    ),
    FaultRow(
        "OffsetFetch: COORDINATOR_LOAD_IN_PROGRESS, one record is committed",
        CONSUME,
        _answer("OffsetFetch", "COORDINATOR_LOAD_IN_PROGRESS"),
        committed=1,
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
    """Run the job of a row in a client, with its fault, and then another client.

    Raises:
        AssertionError: the fault did not occur.
    """
    broker = start(path)
    try:
        broker.create_topic("t")
        # These appends open the log, so that no request waits for the opening.
        for value in row.stored_before:
            broker.append("t", value.encode())
        if row.committed is not None:
            commit(broker.bootstrap_servers, row.committed)
        with broker.faults() as faults:
            rule = row.add(faults)
            text = _run(broker, client, row, rule)
            assert rule.hits >= 1, f"{client}, {row.name}: the fault did not occur"
            is_retried = _is_retried(broker.requests(), rule.requests)
        result, _, read = text.partition(" ")
        committed = broker.logdir.committed_offsets("t", 0).get("g")
        # After the acknowledgement of this record, all earlier records are visible.
        librdkafka(broker.bootstrap_servers, PRODUCE, REQUEST_MS, b"other")
        values = [record.value for record in broker.records("t")]
        return Outcome(
            result,
            is_retried=is_retried,
            stored=values.count(b"new"),
            read=tuple(filter(None, read.split(","))),
            committed=committed,
            stored_by_other=values.count(b"other"),
        )
    finally:
        broker.stop()


def commit(address: str, offset: int) -> None:
    """Commit an offset of the group, which has no members."""
    settings = {"bootstrap.servers": address, "group.id": "g"}
    consumer = confluent_kafka.Consumer(settings)
    position = confluent_kafka.TopicPartition("t", 0, offset)
    consumer.commit(offsets=[position], asynchronous=False)
    consumer.close()


def _run(broker: Kafka, client: str, row: FaultRow, rule: ActiveRule | DiskRule) -> str:
    """Run a job, and remove the rule after `removed_after` hits."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            CLIENTS[client], broker.bootstrap_servers, row.job, row.request_ms
        )
        if row.removed_after is not None:
            try:
                rule.wait(hits=row.removed_after, timeout=_DELIVERY_S)
            finally:
                rule.remove()
        return job.result()


def _is_retried(
    requests: Sequence[ObservedRequest], failed: Sequence[ObservedRequest]
) -> bool:
    """Return whether a client has repeated a request.

    `failed` are the requests that a rule has changed. A rule for the disk changes none.
    """
    if not failed:
        return sum(request.api == "Produce" for request in requests) > 1
    last = failed[-1]
    later = requests[requests.index(last) + 1 :]
    return last.api not in _POLLED and any(request.api == last.api for request in later)


def cell(outcome: Outcome, row: FaultRow) -> str:
    """Return an outcome in words."""
    retried = "retried, " if outcome.is_retried else ""
    if row.job == CONSUME:
        read = "reads some"
        if not outcome.read:
            read = "reads nothing"
        elif set(outcome.read) >= set(row.unread):
            read = "reads all"
        if not set(outcome.read) <= set(row.unread):
            read += " and **committed records again**"
        elif len(set(outcome.read)) < len(outcome.read):
            read += ", some again"
        if outcome.result == "committed":
            return f"{retried}{read}, commits"
        return f"{retried}{read}; commit: {outcome.result}"
    stored = {0: "not stored", 1: "stored once", 2: "**stored twice**"}
    times = stored.get(outcome.stored, f"**stored {outcome.stored} times**")
    if outcome.result == "acknowledged" and outcome.stored == 1:
        return f"{retried}stored once"
    return f"{retried}{outcome.result}, {times}"


def heading() -> str:
    """Return the first two lines of the table."""
    return f"| fault | {' | '.join(CLIENTS)} |\n|---|{'---|' * len(CLIENTS)}"


def line(row: FaultRow, cells: Sequence[str]) -> str:
    """Return the line of a row of the table."""
    return f"| {row.name} | {' | '.join(cells)} |"


def shown_lines() -> dict[str, str]:
    """Return the lines of the table on the page, by the names of their rows.

    Raises:
        ValueError: the page has no table of these clients.
    """
    page = PAGE.read_text("utf-8")
    table = page[page.index(heading()) :].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    return {line.removeprefix("| ").partition(" | ")[0]: line for line in lines}


def write_line(row: FaultRow, text: str) -> None:
    """Replace or add the line of a row on the page, and remove lines of unknown rows."""
    lines = {**shown_lines(), row.name: text}
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(heading())
    _, _, after = rest.partition("\n\n")
    table = [lines[row.name] for row in ROWS if row.name in lines]
    PAGE.write_text(before + "\n".join((heading(), *table)) + "\n\n" + after, "utf-8")
