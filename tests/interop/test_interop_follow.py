"""`netshim follow` with Apache Kafka: equal bytes, kills, and a promoted copy.

Needs Java 17 or later and Maven. Run by `make interop`.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

import logcore
from netshim.follow import Follower, Source, promote
from netshim.testing import start
from support import kafka_jvm
from support.clusters import until
from support.streams_counts import Counts

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kafka_jvm.Broker]:
    with kafka_jvm.Broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


def create(
    kafka: kafka_jvm.Broker, name: str, partitions: int = 1, **config: str
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.address})
    settings = {key.replace("_", "."): value for key, value in config.items()}
    topic = NewTopic(name, partitions, 1, config=settings)
    admin.create_topics([topic])[name].result(60)


def producer(kafka: kafka_jvm.Broker, **config: Any) -> confluent_kafka.Producer:
    settings = {key.replace("_", "."): value for key, value in config.items()}
    return confluent_kafka.Producer({"bootstrap.servers": kafka.address, **settings})


def content(folder: Path, name: str) -> bytes:
    """Return the bytes of all segments of a partition, in order."""
    files = sorted(Path(folder, name).glob("*.log"))
    assert files, name
    return b"".join(file.read_bytes() for file in files)


def follow(data: Path, kafka: kafka_jvm.Broker, *topics: str, **options: Any) -> None:
    with (
        logcore.open_dir(data, create=True) as logdir,
        Source(kafka.address) as source,
    ):
        Follower(logdir, source, topics=topics, **options).run(until_end=True)


def test_copy_has_the_bytes_of_every_codec_and_of_transactions(
    kafka: kafka_jvm.Broker, tmp_path: Path
) -> None:
    create(kafka, "mixed", 3, segment_bytes="1048576")
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        client = producer(kafka, compression_type=codec, linger_ms=5)
        for number in range(2_000):
            client.produce(
                "mixed",
                os.urandom(200) + bytes(300),
                b"%d" % number,
                partition=number % 3,
                headers={"number": str(number)},
            )
            if number % 500 == 0:
                client.poll(0)
        assert not client.flush(60)
    client = producer(kafka, transactional_id="of-the-test")
    client.init_transactions(60)
    for index in range(10):
        client.begin_transaction()
        for partition in range(3):
            client.produce("mixed", b"turn %d" % index, partition=partition)
        client.flush(60)
        if index % 3:
            client.commit_transaction(60)
        else:
            client.abort_transaction(60)
    data = tmp_path / "copy"
    follow(data, kafka, "mix*")
    for partition in range(3):
        name = f"mixed-{partition}"
        assert content(data, name) == content(kafka.data, name)
    with logcore.open_dir(data, read_only=True) as logdir:
        for partition in range(3):
            log = logdir.partition("mixed", partition)
            values = [
                record.value
                for record in log.read(0, isolation="read_committed")
                if record.value is not None and record.value.startswith(b"turn")
            ]
            assert values == [b"turn %d" % index for index in range(10) if index % 3]


def test_compacted_topic_is_copied_with_its_gaps(
    kafka: kafka_jvm.Broker, tmp_path: Path
) -> None:
    create(
        kafka,
        "table",
        cleanup_policy="compact",
        segment_ms="200",
        min_cleanable_dirty_ratio="0.001",
        delete_retention_ms="100000",
    )
    client = producer(kafka)
    deadline = time.monotonic() + 120
    written: dict[bytes, bytes] = {}
    round_number = 0
    while len(list(Path(kafka.data, "table-0").glob("*.log"))) < 2 or round_number < 20:
        assert time.monotonic() < deadline, "the topic is not compacted"
        for number in range(50):
            key, value = b"key %d" % number, b"%d" % round_number
            written[key] = value
            client.produce("table", value, key)
        assert not client.flush(30)
        round_number += 1
        time.sleep(0.3)
    data = tmp_path / "copy"
    follow(data, kafka, "table")
    with logcore.open_dir(data, read_only=True) as logdir:
        copied = {
            record.key: record.value
            for record in logdir.partition("table", 0).read(
                logdir.partition("table", 0).log_start_offset
            )
        }
    assert copied == written


def test_killed_follower_copies_each_record_once(
    kafka: kafka_jvm.Broker, tmp_path: Path
) -> None:
    create(kafka, "killed", 2)
    data = tmp_path / "copy"
    command = [sys.executable, "-m", "netshim", "follow", str(data)]
    command += ["--from", kafka.address, "--topic", "killed"]
    client = producer(kafka, linger_ms=1)
    rng = random.Random(7)
    for _ in range(8):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + rng.uniform(0.3, 2.0)
        while time.monotonic() < deadline:
            for partition in range(2):
                client.produce("killed", os.urandom(2_000), partition=partition)
            client.poll(0.001)
        process.kill()
        process.wait()
    assert not client.flush(60)
    subprocess.run(
        [*command, "--until-end"], check=True, timeout=120, stdout=subprocess.DEVNULL
    )
    for partition in range(2):
        name = f"killed-{partition}"
        assert content(data, name) == content(kafka.data, name)


def test_groups_continue_on_the_promoted_copy(
    kafka: kafka_jvm.Broker, tmp_path: Path
) -> None:
    create(kafka, "moved", 2)
    client = producer(kafka)
    for number in range(100):
        client.produce("moved", b"%d" % number, partition=number % 2)
    assert not client.flush(60)
    group = {
        "group.id": "movers",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    before = confluent_kafka.Consumer({"bootstrap.servers": kafka.address, **group})
    before.subscribe(["moved"])
    consumed = []
    while len(consumed) < 40:
        consumed += before.consume(40 - len(consumed), 1.0)
    before.commit(asynchronous=False)
    before.close()
    data = tmp_path / "copy"
    follow(data, kafka, "moved", with_internal=True)
    with logcore.open_dir(data) as logdir, Source(kafka.address) as source:
        assert "moved" in promote(logdir, source)
    process = start(data)
    try:
        address = process.bootstrap_servers
        new_consumer = confluent_kafka.Consumer({"bootstrap.servers": address, **group})
        new_consumer.subscribe(["moved"])
        while len(consumed) < 100:
            consumed += new_consumer.consume(100 - len(consumed), 1.0)
        new_consumer.close()
        assert all(message.error() is None for message in consumed)
        assert sorted(int(message.value()) for message in consumed) == list(range(100))
        late_producer = confluent_kafka.Producer({"bootstrap.servers": address})
        offsets = []
        late_producer.produce(
            "moved",
            b"late",
            partition=0,
            on_delivery=lambda error, message: offsets.append(
                (error, message.offset())
            ),
        )
        assert not late_producer.flush(30)
        assert offsets == [(None, 50)]
    finally:
        process.stop()


def test_streams_application_continues_on_the_promoted_copy(
    kafka: kafka_jvm.Broker, tmp_path: Path
) -> None:
    """The copy contains the input, offsets, transactions, changelog and results of the
    application. No count is wrong.
    """
    for name in ("text", "counts"):
        create(kafka, name, 2)
    rng = random.Random(6)
    sent_words: Counter[str] = Counter()

    def feed(address: str) -> None:
        client = confluent_kafka.Producer({"bootstrap.servers": address})
        for _ in range(50):
            line = rng.choices(["apple", "pear", "plum", "fig"], k=3)
            sent_words.update(line)
            client.produce("text", " ".join(line).encode(), partition=rng.randrange(2))
        assert not client.flush(60)

    def until_counted(address: str) -> dict[str, list[int]]:
        counts = Counts(address, 2)
        until(lambda: counts.latest() == sent_words, "all words are counted", 300)
        counts.close()
        return counts.seen

    data = tmp_path / "copy"
    with kafka_jvm.run_streams(kafka.address, tmp_path / "state", "before"):
        feed(kafka.address)
        until_counted(kafka.address)
    topics = ["text", "counts", "words-*"]
    follow(data, kafka, *topics, with_internal=True)
    with logcore.open_dir(data) as logdir, Source(kafka.address) as source:
        promoted = promote(logdir, source)
        assert {"text", "counts", "words-counts-store-changelog"} <= {*promoted}
    process = start(data)
    try:
        address = process.bootstrap_servers
        feed(address)
        with kafka_jvm.run_streams(address, tmp_path / "new state", "after"):
            counts_of_words = until_counted(address)
    finally:
        process.stop()
    # Each change of a count was reported once, on both sides.
    for word, counts in counts_of_words.items():
        assert counts == sorted(set(counts)), (word, counts)


def test_kafka_serves_the_copy_and_its_groups_continue(
    kafka: kafka_jvm.Broker, tmp_path: Path
) -> None:
    """Another Kafka serves the segments of the copy, as docs/follow.md describes for a
    return to Kafka.
    """
    create(kafka, "leaving", 2)
    client = producer(kafka, transactional_id="leaver")
    client.init_transactions()
    for number in range(60):
        client.begin_transaction()
        client.produce("leaving", b"%d" % number, partition=number % 2)
        client.commit_transaction() if number % 3 else client.abort_transaction()
    group = {"group.id": "leavers", "isolation.level": "read_committed"}
    committed = [
        confluent_kafka.TopicPartition("leaving", partition, 20)
        for partition in range(2)
    ]
    member = confluent_kafka.Consumer({"bootstrap.servers": kafka.address, **group})
    member.commit(offsets=committed, asynchronous=False)
    member.close()
    data = tmp_path / "copy"
    follow(data, kafka, "leaving", with_internal=True)

    def read(address: str) -> list[tuple[int, int, bytes]]:
        """Continue the group to the ends of its partitions."""
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": address, "enable.partition.eof": True, **group}
        )
        consumer.subscribe(["leaving"])
        consumed = []
        ends = 0
        while ends < 2:
            message = consumer.poll(60)
            assert message is not None
            if message.error() is None:
                position = message.partition(), message.offset()
                consumed.append((*position, message.value()))
            else:
                assert (
                    message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
                )
                ends += 1
        consumer.close()
        return sorted(consumed)

    other = tmp_path / "other"
    with kafka_jvm.Broker(other) as target:
        # The topics exist first, so that the directories have the topic ids of the target.
        create(target, "leaving", 2)
        maker = confluent_kafka.Consumer(
            {"bootstrap.servers": target.address, "group.id": "maker"}
        )
        maker.commit(offsets=committed, asynchronous=False)
        maker.close()
    for name in ("leaving-0", "leaving-1", "__consumer_offsets-0"):
        for target_file in Path(other, "data", name).glob("*.*"):
            if target_file.name != "partition.metadata":
                target_file.unlink()
        for file in Path(data, name).glob("*.log"):
            shutil.copy(file, Path(other, "data", name))
    for file in Path(other, "data").glob("*checkpoint*"):
        file.unlink()
    Path(other, "data", ".kafka_cleanshutdown").unlink()
    with kafka_jvm.Broker(other) as target:
        consumed = read(target.address)
    assert consumed == read(kafka.address)
    assert {offset >= 20 for _, offset, _ in consumed} == {True}
