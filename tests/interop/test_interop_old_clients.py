"""Java clients from 0.11 on, old versions of kafka-python, and rskafka use one broker.
Run by `make interop`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import logcore
from support import cargo, kafka_jvm
from support.environments import environment

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1_800)]

CODECS = ["uncompressed", "gzip", "snappy", "lz4", "zstd"]
COUNT = 50
VALUES = [f"{number}" for number in range(COUNT)]
#: Longer than any operation takes on a busy machine. Only a test that fails waits so long.
TIMEOUT_S = 600


@attrs.frozen
class Broker:
    """A `netshim serve` process."""

    address: str
    data: Path

    def stored(self, topic: str) -> tuple[set[str], list[str]]:
        """Return the codecs of the batches in partition 0 of a topic, and the values of its records."""
        with logcore.open(self.data / f"{topic}-0", read_only=True) as log:
            codecs = {batch.codec_name for batch in log.batches(0)}
            return codecs, [(record.value or b"").decode() for record in log.read(0)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Start a broker with a topic logcore-CODEC for each codec, with records of
    logcore's producer.
    """
    data = tmp_path_factory.mktemp("clients") / "data"
    with logcore.open_dir(data, create=True) as directory:
        for codec in CODECS:
            directory.create_topic(f"logcore-{codec}")
            with directory.producer(compression_type=codec) as producer:
                for value in VALUES:
                    producer.send(f"logcore-{codec}", value.encode())
    command = [sys.executable, "-m", "netshim", "serve", str(data), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("netshim: serving "), line
            yield Broker(line.split()[-1], data)
            assert process.poll() is None, "the broker has ended"
        finally:
            process.kill()


#: An old kafka-python: the packages of its environment. All of these send Fetch version 4.
OLD_VERSIONS = {
    "1.4.7": [
        "kafka-python==1.4.7",
        "zstandard",
        "lz4",
        "xxhash",
        "python-snappy",
        "setuptools<81",
    ],
    "2.0.2": [
        "kafka-python==2.0.2",
        "zstandard",
        "lz4",
        "python-snappy",
        "setuptools<81",
    ],
}
READ_PROGRAM = """
import sys
from kafka import KafkaConsumer, TopicPartition
consumer = KafkaConsumer(bootstrap_servers=sys.argv[1], auto_offset_reset="earliest", consumer_timeout_ms=300_000)
partition = TopicPartition(sys.argv[2], 0)
consumer.assign([partition])
for record in consumer:
    print(record.value.decode())
    if record.offset + 1 == int(sys.argv[3]):
        break
"""


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="these versions need a Python below 3.12"
)
@pytest.mark.parametrize("version", OLD_VERSIONS)
@pytest.mark.parametrize("codec", CODECS)
def test_old_kafka_python_reads_batches_of_each_codec(
    broker: Broker, version: str, codec: str
) -> None:
    """netshim refused zstd batches to every Fetch below version 10, so that such a
    client returned no record and mostly no error. kafka-python from 2.0 on sends such a
    Fetch, and reads zstd if the package `zstandard` is installed.
    """
    if codec == "zstd" and version.startswith("1."):
        pytest.skip("kafka-python 1.4 cannot read zstd")
    python = environment(f"kafka-python-{version}-codecs", *OLD_VERSIONS[version])
    command = [
        python,
        "-c",
        READ_PROGRAM,
        broker.address,
        f"logcore-{codec}",
        f"{COUNT}",
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert result.stdout.split() == VALUES, result.stderr


#: Versions of the crate. Both send Fetch version 4.
RSKAFKA = ["0.5.0", "0.6.0"]


def rskafka(version: str, address: str, *arguments: str) -> str:
    """Run one operation of tests/data/rskafka with a version of the crate, and return its output."""
    command = [cargo.program("rskafka", version), address, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("version", RSKAFKA)
@pytest.mark.parametrize("codec", CODECS)
def test_rskafka_reads_batches_of_each_codec(
    broker: Broker, version: str, codec: str
) -> None:
    """rskafka 0.6 got 0 of 50 records of zstd batches, because netshim refused them to a Fetch below version 10."""
    assert (
        rskafka(version, broker.address, "read", f"logcore-{codec}", f"{COUNT}").split()
        == VALUES
    )


@pytest.mark.parametrize("version", RSKAFKA)
def test_rskafka_creates_topics_and_writes_each_codec(
    broker: Broker, version: str
) -> None:
    """Compare the stored keys, values, headers and timestamps with the sent ones."""
    for codec in CODECS:
        topic = f"rskafka-{version}-{codec}"
        rskafka(version, broker.address, "create", topic)
        assert (
            f"{topic} {{0, 1}}"
            in rskafka(version, broker.address, "list", topic).splitlines()
        )
        rskafka(version, broker.address, "write", topic, codec)
        assert broker.stored(topic) == (
            {"none" if codec == "uncompressed" else codec},
            VALUES,
        )
        with logcore.open(broker.data / f"{topic}-0", read_only=True) as log:
            for number, record in enumerate(log.read(0)):
                assert record.key == b"key %d" % number
                assert list(record.headers) == [("header", b"value")]
                assert record.timestamp_ms == 1_000_000 + number
        assert (
            rskafka(version, broker.address, "read", topic, f"{COUNT}").split()
            == VALUES
        )


#: Java clients of each major line. 2.0 is the last minor version without zstd, and 2.1 is the first with it.
JAVA = [
    "0.11.0.3",
    "1.1.1",
    "2.0.1",
    "2.1.1",
    "2.5.1",
    "2.8.2",
    "3.6.2",
    "3.9.1",
    "4.0.2",
    "4.1.1",
    "4.4.0",
]
NEWEST = JAVA[-1]
WITHOUT_ZSTD = ["0.11.0.3", "1.1.1", "2.0.1"]


def java(
    version: str, address: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run one operation of ClientLines.java with a version of the Java client."""
    program = str(kafka_jvm.SOURCES / "ClientLines.java")
    command = [
        "java",
        "-Xmx256m",
        "-cp",
        f"{kafka_jvm.client_jars(version)}/*",
        program,
        address,
        *arguments,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.fixture(scope="module")
def java_topics(broker: Broker) -> list[str]:
    """Write a topic java-CODEC for each codec with the newest Java producer, and return
    the topics.
    """
    codecs = CODECS[1:]
    result = java(NEWEST, broker.address, "compress", "java", f"{COUNT}", *codecs)
    assert result.returncode == 0, result.stderr[-2000:]
    return [f"java-{codec}" for codec in codecs]


@pytest.mark.parametrize("version", JAVA)
def test_java_client_line_writes_and_reads(broker: Broker, version: str) -> None:
    """Create and list a topic, write with three kinds of producers, and read committed
    records in a group.
    """
    topic = f"written-{version}"
    write_result = java(version, broker.address, "write", topic)
    assert write_result.stdout.split("\n")[0] == "listed true", write_result.stderr[
        -2000:
    ]
    assert write_result.returncode == 0, write_result.stderr[-2000:]
    read_result = java(version, broker.address, "read", version, "3", topic)
    expected = ["idempotent-false", "idempotent-true", "committed", "committed true"]
    assert read_result.stdout.splitlines() == [
        f"{topic} {line}" for line in expected
    ], read_result.stderr[-2000:]


@pytest.mark.parametrize("version", JAVA)
def test_java_client_line_writes_batches_of_each_codec(
    broker: Broker, version: str
) -> None:
    """The broker stores each batch with the producer's codec."""
    codecs = (
        ["none", "gzip", "snappy", "lz4"]
        if version in WITHOUT_ZSTD
        else ["none", "gzip", "snappy", "lz4", "zstd"]
    )
    result = java(
        version,
        broker.address,
        "compress",
        f"compressed-{version}",
        f"{COUNT}",
        *codecs,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    for codec in codecs:
        assert broker.stored(f"compressed-{version}-{codec}") == ({codec}, VALUES)


@pytest.mark.parametrize("version", JAVA)
def test_java_client_line_reads_batches_of_each_codec(
    broker: Broker, java_topics: list[str], version: str
) -> None:
    """Read batches of logcore's producer and of the newest Java producer.

    A client older than 2.1 has no zstd, so that its poll() must raise an error instead
    of blocking.
    """
    topics = [*(f"logcore-{codec}" for codec in CODECS[1:]), *java_topics]
    readable = [
        topic
        for topic in topics
        if version not in WITHOUT_ZSTD or not topic.endswith("zstd")
    ]
    read_result = java(version, broker.address, "read", version, f"{COUNT}", *readable)
    expected = [
        f"{topic} {line}" for topic in readable for line in [*VALUES, "committed true"]
    ]
    assert read_result.stdout.splitlines() == expected, read_result.stderr[-2000:]
    for topic in set(topics) - set(readable):
        read_result = java(version, broker.address, "read", version, f"{COUNT}", topic)
        assert (
            read_result.returncode == 1
            and "Unknown compression type id: 4" in read_result.stderr
        ), read_result.stderr[-2000:]
