"""Old clients of other makers, each in an environment of its own. Run by `make interop`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import logcore
import netshim
from support.environments import environment

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1_800)]

#: An old kafka-python: the packages of its environment. All of these send Fetch version 4.
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


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="these versions need a Python below 3.12")
@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("codec", CODECS)
def test_old_kafka_python_reads_batches_of_each_codec(tmp_path: Path, version: str, codec: str) -> None:
    """Their Fetch is older than version 10, and they read zstd if the package `zstandard` is installed (from 2.0 on).

    netshim refused zstd batches to every Fetch below version 10, so such a client saw no record and mostly no error.
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == [value.decode() for value in values], done.stderr
