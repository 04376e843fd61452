"""Kafka's dump tool reads files of logcore and finds no error. Needs Java 17 or later
and Maven (Debian: apt-get install default-jdk-headless maven). Run by `make interop`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import logcore
import netshim
from support import kafka_jvm
from support.kafka_jvm import Storage
from support.staged import SMALL, create, publish
from support.vectors import DATA, VECTORS

pytestmark = pytest.mark.interop

T0 = 1_700_000_000_000
CODECS = ["uncompressed", "gzip", "snappy", "lz4", "zstd"]


@pytest.fixture(scope="module")
def kafka_classes() -> Path:
    """Return a directory with the jars of Kafka and of its dependencies."""
    return kafka_jvm.kafka_jars()


@pytest.fixture(scope="module")
def storage() -> Iterator[Storage]:
    with Storage() as storage:
        yield storage


def write_partition(path: Path, codec: str) -> list[logcore.Record]:
    """Write a partition of several segments with every kind of record, and return its
    records.
    """
    config = {
        "compression.type": codec,
        "segment.bytes": 6000,
        "index.interval.bytes": 300,
        "batch.size": 900,
    }
    with logcore.open(path, create=True, config=config) as log:
        for number in range(40):
            key = None if number % 7 == 0 else b"key-%d" % number
            value = (
                None
                if number % 11 == 0
                else b""
                if number % 13 == 0
                else b"value %d" % number
            )
            headers = [("h", b"%d" % number), ("none", None)] if number % 3 == 0 else []
            log.append(
                value,
                key=key,
                headers=headers,
                timestamp_ms=T0 + number * 10 - number % 5,
            )
        log.append_many(
            [
                (b"k%d" % number, b"many %d" % number * 3, (), T0 + 1000 - number)
                for number in range(300)
            ]
        )
        log.truncate(333)
        log.append_batch(
            (VECTORS / "records" / "v1-gzip-wrapper-20.kafka-java.bin").read_bytes()
        )
        log.append_batch(
            (VECTORS / "records" / "v2-zstd-40-records.librdkafka.bin").read_bytes()
        )
        return list(log.read(0))


@pytest.mark.parametrize("codec", CODECS)
def test_kafka_reads_every_record(tmp_path: Path, storage: Storage, codec: str) -> None:
    records = write_partition(tmp_path / "orders-0", codec)
    read_by_kafka = []
    for path in sorted((tmp_path / "orders-0").glob("*.log")):
        text = storage.dump(path, "--deep-iteration", "--print-data-log")
        batches = re.findall(r"^baseOffset: .*$", text, re.M)
        assert batches
        assert all("isvalid: true" in batch for batch in batches)
        assert "Found" not in text, text
        assert "invalid" not in text.replace("isvalid", "").lower(), text
        pattern = r"^\| offset: (\d+) CreateTime: (-?\d+) keySize: (-?\d+) valueSize: (-?\d+) .*?headerKeys: \[(.*?)\]"
        read_by_kafka += [
            (int(offset), int(time), int(key), int(value), names)
            for offset, time, key, value, names in re.findall(pattern, text, re.M)
        ]
    assert read_by_kafka == [
        (
            record.offset,
            record.timestamp_ms,
            -1 if record.key is None else len(record.key),
            -1 if record.value is None else len(record.value),
            ",".join(name for name, _ in record.headers),
        )
        for record in records
    ]


@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
def test_dump_tool_finds_no_error_in_the_indexes(
    tmp_path: Path, storage: Storage, codec: str
) -> None:
    write_partition(tmp_path / "orders-0", codec)
    indexes = sorted((tmp_path / "orders-0").glob("*.index")) + sorted(
        (tmp_path / "orders-0").glob("*.timeindex")
    )
    assert len(indexes) >= 4
    for path in indexes:
        for option in ("--index-sanity-check", "--verify-index-only"):
            text = storage.dump(path, option)
            assert "mismatch" not in text.lower(), text
            assert "exception" not in text.lower(), text


def test_kafka_and_logcore_read_the_same_records_in_files_of_kafka(
    storage: Storage,
) -> None:
    for path in sorted((VECTORS / "partition-clean" / "orders-0").glob("*.log")):
        text = storage.dump(path, "--deep-iteration")
        offsets = [
            int(offset) for offset in re.findall(r"^\| offset: (\d+)", text, re.M)
        ]
        with logcore.open(path.parent, read_only=True) as log:
            first = int(path.name[:20])
            own_offsets = [
                record.offset
                for batch in log.batches(first)
                for record in batch.records()
            ]
        assert offsets == [offset for offset in own_offsets if offset <= offsets[-1]]


def test_java_clients_use_the_broker(tmp_path: Path, kafka_classes: Path) -> None:
    source = DATA / "kafka" / "Client.java"
    with netshim.serve(tmp_path / "data") as server:
        command = [
            "java",
            "-cp",
            f"{kafka_classes}/*",
            str(source),
            server.bootstrap_servers,
        ]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.splitlines() == [
            "topics [java]",
            "retention.ms 1000 DYNAMIC_TOPIC_CONFIG",
            "partitions 2",
            f"cluster {server.logdir.cluster_id}",
            "log dirs 1",
            "consumed {gzip=100, lz4=100, none=100, snappy=100, zstd=100}",
            "committed 250",
            "by time 50",
            "ends {b=0, e=250}",
            "group Empty",
            "offsets 2",
            "newest 249",
        ]


def test_kafka_reads_the_files_of_brokers_clients_and_groups(
    tmp_path: Path, storage: Storage
) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    with netshim.serve(
        tmp_path / "data", config={"segment.bytes": 20_000, "index.interval.bytes": 500}
    ) as server:
        producer = kafka.Producer(
            {"bootstrap.servers": server.bootstrap_servers, "enable.idempotence": True}
        )
        for number in range(2_000):
            producer.produce("t", b"value %d" % number, key=b"%d" % number)
            if number % 20 == 0:
                producer.flush()
        producer.flush()
        consumer = kafka.Consumer(
            {
                "bootstrap.servers": server.bootstrap_servers,
                "group.id": "billing",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe(["t"])
        assert len(consumer.consume(500, timeout=30)) == 500
        consumer.commit(asynchronous=False)
        consumer.close()
    paths = sorted((tmp_path / "data" / "t-0").glob("*.log"))
    assert len(paths) > 2
    _check_files(storage, paths, 2_000)
    (offsets,) = (tmp_path / "data" / "__consumer_offsets-0").glob("*.log")
    text = storage.dump(offsets, "--offsets-decoder")
    assert '"group":"billing","topic":"t","partition":0' in text, text
    assert '"offset":500' in text, text
    assert '"protocolType":"consumer"' in text, text


def test_kafka_reads_segments_that_were_staged_and_adopted(
    tmp_path: Path, storage: Storage
) -> None:
    path = create(tmp_path / "data", SMALL)
    publish(path, "first", config=SMALL, count=500)
    with logcore.open_dir(path) as directory:
        directory.partition("t", 0).append(b"after")
    paths = sorted((path / "t-0").glob("*.log"))
    assert len(paths) > 2
    _check_files(storage, paths, 502)


def _check_files(storage: Storage, paths: list[Path], records: int) -> None:
    """Check that Kafka's tool reports complete batches, offsets without a gap, and
    correct indexes.
    """
    offsets: list[int] = []
    for path in paths:
        text = storage.dump(path, "--deep-iteration")
        batches = re.findall(r"^baseOffset: .*$", text, re.M)
        assert batches and all("isvalid: true" in batch for batch in batches)
        offsets += [
            int(offset) for offset in re.findall(r"^\| offset: (\d+)", text, re.M)
        ]
        for suffix in (".index", ".timeindex"):
            text = storage.dump(path.with_suffix(suffix), "--index-sanity-check")
            assert "mismatch" not in text.lower() and "exception" not in text.lower(), (
                text
            )
    assert offsets == list(range(records))
