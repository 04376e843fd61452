"""Real clients, unmodified, against netshim: admin, codecs, groups, restarts; and their
files, read in process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
import netshim
import netshim.server
from netshim.testing import Kafka

confluent_kafka = pytest.importorskip("confluent_kafka")
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic  # noqa: E402

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
DEADLINE_S = 60  # a limit for events that must happen; no test depends on their speed


@pytest.fixture
def broker(kafka_factory: Callable[..., Kafka], tmp_path: Path) -> Kafka:
    return kafka_factory(tmp_path / "data", num_partitions=2)


def eventually(condition: Callable[[], Any]) -> Any:
    """Call condition until it returns a true value."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        result = condition()
        if result:
            return result
        time.sleep(0.01)
    raise AssertionError("the condition did not become true")


def values_of(server: Kafka, topic: str) -> list[bytes | None]:
    return [
        record.value
        for number in server.logdir.partitions(topic)
        for record in server.logdir.partition(topic, number).read(0)
    ]


def test_offset_fetch_returns_the_previous_commit(broker: Kafka) -> None:
    """librdkafka sends OffsetFetch directly after OffsetCommit on the same connection,
    and does not wait for the first answer.
    """
    broker.create_topic("t")
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "g",
            "enable.auto.commit": False,
        }
    )
    partition = confluent_kafka.TopicPartition
    consumer.commit(offsets=[partition("t", 0, 1)], asynchronous=False)
    for offset in range(2, 22):
        consumer.commit(offsets=[partition("t", 0, offset)], asynchronous=True)
        assert (
            consumer.committed([partition("t", 0)], timeout=DEADLINE_S)[0].offset
            == offset
        )
    consumer.close()


# -- confluent-kafka -------------------------------------------------------------------


def confluent_producer(server: Kafka, **options: Any) -> Any:
    return confluent_kafka.Producer(
        {"bootstrap.servers": server.bootstrap_servers, "linger.ms": 1, **options}
    )


def produce(
    producer: Any, topic: str, values: list[bytes], **options: Any
) -> list[int]:
    told: list[Any] = []
    for value in values:
        producer.produce(
            topic,
            value,
            on_delivery=lambda error, message: told.append((error, message)),
            **options,
        )
    assert producer.flush(DEADLINE_S) == 0
    assert [error for error, _ in told if error] == []
    return [message.offset() for _, message in told]


def confluent_consumer(server: Kafka, group: str, **options: Any) -> Any:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": server.bootstrap_servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 100,
            **options,
        }
    )


def take(consumer: Any, count: int) -> list[Any]:
    messages: list[Any] = []
    until = time.monotonic() + DEADLINE_S
    while len(messages) < count and time.monotonic() < until:
        message = consumer.poll(0.1)
        if message is not None:
            assert message.error() is None, message.error()
            messages.append(message)
    assert len(messages) == count
    return messages


@pytest.mark.parametrize(
    ("codec", "idempotent"),
    [*((codec, True) for codec in CODECS), ("none", False), ("zstd", False)],
)
def test_confluent_produces_and_consumes_every_codec(
    broker: Any, codec: str, idempotent: bool
) -> None:
    values = [b"%d " % n * 50 for n in range(200)]
    producer = confluent_producer(
        broker, **{"compression.type": codec, "enable.idempotence": idempotent}
    )
    offsets = produce(
        producer,
        "t",
        values,
        key=b"k",
        headers=[("h", b"1")],
        timestamp=1_700_000_000_000,
    )
    assert offsets == list(range(200))
    consumer = confluent_consumer(broker, "g")
    consumer.subscribe(["t"])
    messages = take(consumer, 200)
    assert [message.value() for message in messages] == values
    assert {message.key() for message in messages} == {b"k"}
    assert messages[0].headers() == [("h", b"1")]
    assert messages[0].timestamp() == (
        confluent_kafka.TIMESTAMP_CREATE_TIME,
        1_700_000_000_000,
    )
    consumer.close()
    with logcore.open_dir(
        broker.logdir.path, read_only=True
    ) as beside:  # the files, while the broker runs
        logs = [beside.partition("t", number) for number in beside.partitions("t")]
        assert [record.value for log in logs for record in log.read(0)] == values
        assert any(
            batch.codec == (0 if codec == "none" else CODECS.index(codec))
            for log in logs
            for batch in log.batches(0)
        )


def test_uvloop_serves_as_the_asyncio_loop_does(
    kafka_factory: Callable[..., Kafka], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transports of uvloop belong to no class of asyncio, and an assertion once
    refused each connection.
    """
    monkeypatch.delitem(sys.modules, "uvloop")
    uvloop = pytest.importorskip("uvloop")
    factory = netshim.server.loop_factory()
    assert factory is uvloop.new_event_loop
    server = kafka_factory(tmp_path / "data")
    # The values are more than a socket takes at once.
    values = [b"%d" % number * 100_000 for number in range(30)]
    assert produce(confluent_producer(server), "t", values) == list(range(30))
    consumer = confluent_consumer(server, "g")
    consumer.subscribe(["t"])
    polled = [eventually(lambda: consumer.poll(1)).value() for _ in values]
    consumer.close()
    assert polled == values


def test_confluent_reads_from_offsets_and_times(broker: Any) -> None:
    producer = confluent_producer(broker)
    for n in range(100):
        producer.produce("t", b"%d" % n, partition=0, timestamp=1_000_000 + 10 * n)
    assert producer.flush(DEADLINE_S) == 0
    consumer = confluent_consumer(broker, "g")
    partition = confluent_kafka.TopicPartition
    assert consumer.get_watermark_offsets(partition("t", 0)) == (0, 100)
    asked = [partition("t", 0, 1_000_000 + 555), partition("t", 1, 1_000_000)]
    offsets = consumer.offsets_for_times(asked, timeout=DEADLINE_S)
    assert [each.offset for each in offsets] == [56, -1]
    consumer.assign([partition("t", 0, 56)])
    assert [message.value() for message in take(consumer, 44)] == [
        b"%d" % n for n in range(56, 100)
    ]
    consumer.close()


def test_confluent_admin_manages_topics(broker: Any) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})

    def outcome(futures: Any) -> dict[Any, Any]:
        results = {}
        for key, future in futures.items():
            try:
                results[key] = future.result(DEADLINE_S)
            except confluent_kafka.KafkaException as error:
                results[key] = error.args[0].name()
        return results

    created = outcome(
        admin.create_topics(
            [
                NewTopic("a", 3, 1, config={"retention.ms": "1000"}),
                NewTopic("bad name", 1, 1),
                NewTopic("nothing", 1, 1, config={"no.such": "1"}),
                NewTopic("wide", 1, 9),
            ]
        )
    )
    assert created == {
        "a": None,
        "bad name": "TOPIC_EXCEPTION",
        "nothing": "INVALID_CONFIG",
        "wide": "INVALID_REPLICATION_FACTOR",
    }
    assert outcome(admin.create_topics([NewTopic("a", 3, 1)])) == {
        "a": "TOPIC_ALREADY_EXISTS"
    }
    assert outcome(admin.create_topics([NewTopic("b", 3, 1)], validate_only=True)) == {
        "b": None
    }
    assert set(admin.list_topics(timeout=DEADLINE_S).topics) == {"a"}
    assert outcome(
        admin.create_partitions([NewPartitions("a", 5), NewPartitions("x", 5)])
    ) == {
        "a": None,
        "x": "UNKNOWN_TOPIC_OR_PART",
    }
    assert len(admin.list_topics("a", timeout=DEADLINE_S).topics["a"].partitions) == 5
    resource = ConfigResource("topic", "a")
    described = outcome(admin.describe_configs([resource]))[resource]
    assert (
        described["retention.ms"].value == "1000"
        and described["segment.bytes"].is_default
    )
    resource.add_incremental_config(_entry("retention.ms", "2000"))
    assert outcome(admin.incremental_alter_configs([resource])) == {resource: None}
    assert broker.logdir.describe_topic("a").overrides == {"retention.ms": "2000"}
    produce(confluent_producer(broker), "a", [b"v"] * 10, partition=4)
    partition = confluent_kafka.TopicPartition("a", 4, 7)
    (deleted,) = outcome(admin.delete_records([partition])).values()
    assert (
        deleted.low_watermark == 7
        and broker.logdir.partition("a", 4).log_start_offset == 7
    )
    cluster = admin.describe_cluster().result(DEADLINE_S)
    assert cluster.cluster_id == broker.logdir.cluster_id and [
        node.id for node in cluster.nodes
    ] == [1]
    assert outcome(admin.delete_topics(["a", "x"])) == {
        "a": None,
        "x": "UNKNOWN_TOPIC_OR_PART",
    }
    assert broker.logdir.topics() == []


def _entry(name: str, value: str) -> Any:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry

    return ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)


class Member(threading.Thread):
    """A consumer in a group that collects its records until it is killed, and then
    never leaves the group.
    """

    def __init__(self, consumer: Any, topic: str) -> None:
        super().__init__(daemon=True)
        self.consumer = consumer
        self.topic = topic
        self.values: list[bytes] = []
        self.partitions: list[int] = []
        self.told = threading.Event()
        self.start()

    def run(self) -> None:
        def assigned(_: Any, partitions: list[Any]) -> None:
            self.partitions = [each.partition for each in partitions]

        self.consumer.subscribe([self.topic], on_assign=assigned)
        while not self.told.is_set():
            message = self.consumer.poll(0.05)
            if message is not None and message.error() is None:
                self.values.append(message.value())

    def kill(self) -> None:
        self.told.set()
        self.join()


def test_partitions_of_a_killed_member_move_to_the_other(
    kafka_factory: Any, tmp_path: Path
) -> None:
    broker = kafka_factory(tmp_path / "data", num_partitions=4)
    produce(confluent_producer(broker), "t", [b"%d" % n for n in range(100)])
    script = (
        "import sys, confluent_kafka\n"
        "consumer = confluent_kafka.Consumer({'bootstrap.servers': sys.argv[1], 'group.id': 'g',\n"
        "    'session.timeout.ms': 1000, 'heartbeat.interval.ms': 100})\n"
        "consumer.subscribe(['t'], on_assign=lambda c, parts: print(len(parts), flush=True))\n"
        "while True: consumer.poll(0.1)\n"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", script, broker.bootstrap_servers],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert victim.stdout is not None and int(victim.stdout.readline()) == 4
        survivor = Member(
            confluent_consumer(broker, "g", **{"session.timeout.ms": 6_000}), "t"
        )
        eventually(lambda: len(survivor.partitions) == 2)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        eventually(lambda: len(survivor.partitions) == 4)
        more = [b"more %d" % n for n in range(50)]
        produce(confluent_producer(broker), "t", more)
        eventually(lambda: set(more) <= set(survivor.values))
        survivor.kill()
        survivor.consumer.close()
    finally:
        victim.kill()
        victim.wait()
        if victim.stdout is not None:
            victim.stdout.close()


def test_commits_survive_a_broker_restart(kafka_factory: Any, tmp_path: Path) -> None:
    values = [b"%d" % n for n in range(60)]
    first = kafka_factory(tmp_path / "data")
    produce(confluent_producer(first), "t", values)
    consumer = confluent_consumer(first, "g")
    consumer.subscribe(["t"])
    polled = [message.value() for message in take(consumer, 25)]
    consumer.commit(asynchronous=False)
    consumer.close()  # otherwise its member would keep its place until its session ends, six seconds
    port = first.port
    first.stop()
    second = kafka_factory(tmp_path / "data", port=port)
    consumer = confluent_consumer(second, "g")
    consumer.subscribe(["t"])
    polled += [message.value() for message in take(consumer, 35)]
    assert polled == values
    committed = consumer.committed(
        [confluent_kafka.TopicPartition("t", 0)], timeout=DEADLINE_S
    )
    assert committed[0].offset == 25
    consumer.close()
    records = list(second.logdir.partition("__consumer_offsets", 0).read(0))
    assert any(
        record.key and record.key.startswith(b"\x00\x01\x00\x01g") for record in records
    )


def test_client_continues_after_a_broker_restart(
    kafka_factory: Any, tmp_path: Path
) -> None:
    first = kafka_factory(tmp_path / "data")
    producer = confluent_producer(first, **{"reconnect.backoff.max.ms": 100})
    produce(producer, "t", [b"before"])
    port = first.port
    first.stop()
    told: list[Any] = []
    producer.produce(
        "t", b"during", on_delivery=lambda error, message: told.append(error)
    )
    second = kafka_factory(tmp_path / "data", port=port)
    assert producer.flush(DEADLINE_S) == 0 and told == [None]
    assert values_of(second, "t") == [b"before", b"during"]


# -- kafka-python ----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("codec", [None, "gzip", "lz4", "zstd"])
def test_kafka_python_produces_and_consumes(broker: Any, codec: str | None) -> None:
    kafka = pytest.importorskip("kafka")
    pytest.importorskip({"lz4": "lz4", "zstd": "zstandard"}.get(codec or "", "kafka"))
    producer = kafka.KafkaProducer(
        bootstrap_servers=broker.bootstrap_servers, compression_type=codec, acks="all"
    )
    sent = [
        producer.send(
            "t",
            b"%d" % n,
            key=b"k",
            partition=0,
            headers=[("h", b"x")],
            timestamp_ms=5_000 + n,
        )
        for n in range(50)
    ]
    producer.flush()
    assert [future.get(timeout=DEADLINE_S).offset for future in sent] == list(range(50))
    producer.close()
    consumer = kafka.KafkaConsumer(
        "t",
        bootstrap_servers=broker.bootstrap_servers,
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=DEADLINE_S * 1000,
    )
    messages = [next(consumer) for _ in range(50)]
    assert [message.value for message in messages] == [b"%d" % n for n in range(50)]
    assert messages[0].timestamp == 5_000 and list(messages[0].headers) == [("h", b"x")]
    partition = kafka.TopicPartition("t", 0)
    assert consumer.offsets_for_times({partition: 5_020})[partition].offset == 20
    assert consumer.end_offsets([partition]) == {partition: 50}
    consumer.commit()
    assert consumer.committed(partition) == 50
    consumer.close()


def test_kafka_python_admin_manages_topics(broker: Any) -> None:
    kafka = pytest.importorskip("kafka")
    from kafka.admin import KafkaAdminClient

    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    admin.create_topics([kafka.admin.NewTopic("made", 3, 1)])
    assert "made" in admin.list_topics()
    assert broker.logdir.partitions("made") == (0, 1, 2)
    assert admin.describe_cluster()["cluster_id"] == broker.logdir.cluster_id
    admin.delete_topics(["made"])
    assert "made" not in admin.list_topics()
    admin.close()


# -- aiokafka --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
def test_aiokafka_produces_and_consumes_beside_a_broker_in_its_own_loop(
    tmp_path: Path, codec: str | None
) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    if codec == "snappy":
        pytest.importorskip("cramjam")

    async def main() -> list[Any]:
        async with netshim.Server(tmp_path / "data") as server:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=server.bootstrap_servers,
                compression_type=codec,
                enable_idempotence=True,
            )
            await producer.start()
            await asyncio.gather(
                *[
                    await producer.send("t", b"%d" % n, timestamp_ms=7_000 + n)
                    for n in range(50)
                ]
            )
            await producer.stop()
            consumer = aiokafka.AIOKafkaConsumer(
                "t",
                bootstrap_servers=server.bootstrap_servers,
                group_id="g",
                auto_offset_reset="earliest",
            )
            await consumer.start()
            messages = [
                await asyncio.wait_for(consumer.getone(), DEADLINE_S) for _ in range(50)
            ]
            await consumer.commit()
            partition = aiokafka.TopicPartition("t", 0)
            assert await consumer.committed(partition) == 50
            assert (await consumer.offsets_for_times({partition: 7_030}))[
                partition
            ].offset == 30
            await consumer.stop()
            return messages

    messages = asyncio.run(main())
    assert [message.value for message in messages] == [b"%d" % n for n in range(50)]


# -- in process, and the process -------------------------------------------------------


def test_records_appended_by_the_process_reach_waiting_consumers(broker: Any) -> None:
    broker.logdir.create_topic("mine")
    consumer = confluent_consumer(broker, "g")
    consumer.assign([confluent_kafka.TopicPartition("mine", 0, 0)])
    assert consumer.poll(0.2) is None
    broker.logdir.partition("mine", 0).append(b"from inside", key=b"k")
    assert take(consumer, 1)[0].value() == b"from inside"
    consumer.close()


@pytest.fixture
def command(
    tmp_path: Path,
) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Run `netshim serve`. Return the process and the address that it printed."""
    running: list[subprocess.Popen[str]] = []

    def start(*options: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "netshim",
                "serve",
                str(tmp_path / "data"),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("netshim: serving "), (
            line,
            process.stderr and process.stderr.read(),
        )
        return process, line.rsplit(" ", 1)[1].strip()

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_command_serves_until_a_signal_stops_it(command: Any, tmp_path: Path) -> None:
    process, address = command("--port", "0", "--num-partitions", "3")
    producer = confluent_kafka.Producer({"bootstrap.servers": address})
    produce(producer, "t", [b"%d" % n for n in range(20)])
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    with logcore.open_dir(tmp_path / "data") as logdir:
        assert len(logdir.partitions("t")) == 3
        assert sum(logdir.partition("t", n).high_watermark for n in range(3)) == 20
    assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()


@pytest.mark.long
def test_command_reports_each_startup_error(command: Any, tmp_path: Path) -> None:
    _, address = command("--port", "0")
    port = address.rsplit(":", 1)[1]
    for arguments, expected in (
        ([str(tmp_path / "data"), "--port", "0"], "being written by process"),
        ([str(tmp_path / "other"), "--port", port], "cannot listen on"),
        (
            [str(tmp_path / "other"), "--port", "0", "--durability", "maybe"],
            "unknown durability",
        ),
        (
            [str(tmp_path / "other"), "--port", "0", "--config", "retention.mss=1"],
            "did you mean 'retention.ms'",
        ),
        (
            [str(tmp_path / "other"), "--port", "0", "--num-partitions", "0"],
            "--num-partitions",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "netshim", "serve", *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 2 and expected in done.stderr, (
            arguments,
            done.stderr,
        )
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "policy", [pytest.param("group", marks=pytest.mark.slow), "os"]
)
def test_kill_9_under_load_loses_no_acknowledged_record(
    command: Any, tmp_path: Path, policy: str
) -> None:
    process, address = command("--port", "0", "--durability", policy)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "linger.ms": 0, "acks": "all"}
    )
    acknowledged: dict[int, bytes] = {}

    def told(error: Any, message: Any) -> None:
        if error is None:
            acknowledged[message.offset()] = message.value()

    sent = 0
    until = time.monotonic() + DEADLINE_S
    while len(acknowledged) < 3_000 and time.monotonic() < until:
        for _ in range(50):
            producer.produce("t", b"%d" % sent, on_delivery=told)
            sent += 1
        producer.poll(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    producer.poll(0.1)
    producer.purge()
    assert len(acknowledged) >= 3_000
    with logcore.open_dir(tmp_path / "data") as logdir:
        stored = {
            record.offset: record.value for record in logdir.partition("t", 0).read(0)
        }
    assert {offset: stored.get(offset) for offset in acknowledged} == acknowledged
    assert len(set(stored.values())) == len(stored) <= sent, (
        "no record twice, and none invented"
    )


def test_brokers_in_one_process_are_independent(kafka_factory: Any) -> None:
    first = kafka_factory()
    two = kafka_factory()
    produce(confluent_producer(first), "t", [b"1"])
    produce(confluent_producer(two), "t", [b"2"])
    assert (values_of(first, "t"), values_of(two, "t")) == ([b"1"], [b"2"])
    assert os.path.realpath(first.logdir.path) != os.path.realpath(two.logdir.path)


@pytest.mark.long
def test_records_of_spark_reach_clients_of_a_live_broker(
    command: Any, tmp_path: Path
) -> None:
    """The broker holds the directory, so it executes the request of a Spark job. Its
    clients read the records.
    """
    pytest.importorskip("pyspark")
    from support.simulated_spark import frame, write

    _, address = command("--port", "0")
    produce(confluent_kafka.Producer({"bootstrap.servers": address}), "t", [b"before"])
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["t"])
    assert take(consumer, 1)[0].value() == b"before"
    write(tmp_path / "data", frame(value=[b"1", b"2"]), frame(value=[b"3"]), topic="t")
    assert {message.value() for message in take(consumer, 3)} == {b"1", b"2", b"3"}
    assert produce(
        confluent_kafka.Producer({"bootstrap.servers": address}), "t", [b"after"]
    ) == [4]
    assert take(consumer, 1)[0].value() == b"after"
    consumer.close()


@pytest.mark.parametrize("port", [-1, 65_536, "9092", 1.5])
def test_port_out_of_range_is_refused_by_name(tmp_path: Path, port: Any) -> None:
    with pytest.raises(logcore.InvalidConfigError, match=r"port \(expected 0 to 65535"):
        netshim.serve(tmp_path / "data", port=port)
