"""Old kafka-python and Java clients, each version with its own packages. Run by `make
interop`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import logcore
import netshim
from support import kafka_jvm
from support.environments import environment

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1_800)]

#: An old kafka-python: the packages of its environment. All of these send Fetch version
#: 4.
OLD = {
    "1.4.7": ["kafka-python==1.4.7", "zstandard", "lz4", "xxhash", "setuptools<81"],
    "2.0.2": ["kafka-python==2.0.2", "zstandard", "lz4", "setuptools<81"],
}
CODECS = ["uncompressed", "gzip", "lz4", "zstd"]
READ = """
import sys
from kafka import KafkaConsumer, TopicPartition
consumer = KafkaConsumer(bootstrap_servers=sys.argv[1], auto_offset_reset="earliest", consumer_timeout_ms=10_000)
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
@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("codec", CODECS)
def test_old_kafka_python_reads_batches_of_each_codec(
    tmp_path: Path, version: str, codec: str
) -> None:
    """Their Fetch is older than version 10, and they read zstd if the package
    `zstandard` is installed (from 2.0 on).

    netshim refused zstd batches to every Fetch below version 10, so such a client saw
    no record and mostly no error.
    """
    if codec == "zstd" and version.startswith("1."):
        pytest.skip("kafka-python 1.4 cannot read zstd")
    python = environment(f"kafka-python-{version}", *OLD[version])
    values = [b"%d" % number for number in range(50)]
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("t")
        with directory.producer(compression_type=codec) as producer:
            for value in values:
                producer.send("t", value)
    with netshim.serve(tmp_path / "data") as server:
        command = [python, "-c", READ, server.bootstrap_servers, "t", "50"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.stdout.split() == [value.decode() for value in values], done.stderr


#: Java clients of each major line. 2.0 is the last minor version without zstd, and 2.1
#: is the first with it.
JAVA = ["0.11.0.3", "1.1.1", "2.0.1", "2.1.1", "2.8.2", "3.9.1", "4.1.1"]


def java(
    version: str, address: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run one operation of ClientLines.java with a version of the Java client."""
    program = str(kafka_jvm.SOURCES / "ClientLines.java")
    command = [
        "java",
        "-Xmx256m",
        "-cp",
        f"{kafka_jvm.clients(version)}/*",
        program,
        address,
        *arguments,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("version", JAVA)
def test_java_client_line_writes_and_reads(tmp_path: Path, version: str) -> None:
    """Create and list a topic, write with three kinds of producers, and read committed
    records in a group.
    """
    with netshim.serve(tmp_path / "data") as server:
        wrote = java(version, server.bootstrap_servers, "write", "t")
        assert wrote.stdout.split("\n")[0] == "listed true", wrote.stderr[-2000:]
        assert wrote.returncode == 0, wrote.stderr[-2000:]
        read = java(version, server.bootstrap_servers, "read", "t", "3")
    expected = ["idempotent-false", "idempotent-true", "committed", "committed true"]
    assert read.stdout.splitlines() == expected, read.stderr[-2000:]


@pytest.mark.parametrize("version", JAVA)
@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_java_client_line_reads_batches_of_each_codec(
    tmp_path: Path, version: str, codec: str
) -> None:
    """A client older than 2.1 has no zstd: its poll() must raise an error instead of
    blocking.
    """
    values = [f"{number}" for number in range(50)]
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("t")
        with directory.producer(compression_type=codec) as producer:
            for value in values:
                producer.send("t", value.encode())
    with netshim.serve(tmp_path / "data") as server:
        read = java(version, server.bootstrap_servers, "read", "t", "50")
    if codec == "zstd" and version in ("0.11.0.3", "1.1.1", "2.0.1"):
        assert (
            read.returncode == 1 and "Unknown compression type id: 4" in read.stderr
        ), read.stderr[-2000:]
    else:
        assert read.stdout.splitlines() == [*values, "committed true"], read.stderr[
            -2000:
        ]
