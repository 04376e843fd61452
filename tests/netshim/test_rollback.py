"""Rollback of a running broker to a snapshot, while clients remain connected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.testing import SimulatedDisk
from netshim import wire
from netshim.follow.connection import ClientSettings, SourceConnection
from netshim.rollback import DirectorySnapshot
from netshim.secured_testing import SecuredKafka
from netshim.testing import Kafka, start
from support.confluent import LIMIT_S, consumer, produce, producer, read
from support.pytesters import ALONE

confluent_kafka = pytest.importorskip("confluent_kafka")
admin_client = pytest.importorskip("confluent_kafka.admin")

pytest_plugins = ["pytester"]


def values(kafka: Kafka, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in kafka.records(topic)]


def test_records_topics_and_settings_are_restored(kafka: Kafka) -> None:
    kafka.create_topic("t", 2, {"retention.ms": "1000000"})
    kafka.create_topic("deleted")
    client = producer(kafka)
    produce(client, "t", b"1", b"2")
    produce(client, "deleted", b"kept")
    topic_ids = {name: kafka.logdir.topic_id(name) for name in ("t", "deleted")}
    before = kafka.snapshot()
    produce(client, "t", b"3", b"4")
    kafka.create_topic("new")
    kafka.logdir.delete_topic("deleted")
    kafka.logdir.alter_topic("t", {"retention.ms": "5"})
    kafka.logdir.add_partitions("t", 5)
    kafka.rollback(before)
    assert kafka.topics() == ["deleted", "t"]
    # Records without a key go to any partition, and values() lists one after another.
    assert {*values(kafka)} == {b"1", b"2"} and len(values(kafka)) == 2
    assert values(kafka, "deleted") == [b"kept"]
    assert kafka.logdir.partitions("t") == (0, 1)
    assert kafka.logdir.settings("t").retention_ms == 1_000_000
    assert {name: kafka.logdir.topic_id(name) for name in topic_ids} == topic_ids


def test_producer_remains_connected_and_continues(kafka: Kafka) -> None:
    kafka.create_topic("t")
    client = producer(kafka)
    produce(client, "t", b"1")
    before = kafka.snapshot()
    connections = kafka.server.call(
        lambda: len(kafka.server.server._connections.clients)
    )
    for number in range(3):
        produce(client, "t", b"%d" % (number + 10))
        kafka.rollback(before)
        produce(client, "t", b"after")
        assert values(kafka) == [b"1", b"after"]
        kafka.rollback(before)
    assert (
        kafka.server.call(lambda: len(kafka.server.server._connections.clients))
        >= connections
    )


def test_idempotent_producer_continues_after_its_batches_are_removed(
    kafka: Kafka,
) -> None:
    """The broker has lost the last sequences of the producer."""
    kafka.create_topic("t")
    client = producer(kafka, **{"enable.idempotence": True})
    produce(client, "t", b"1")
    before = kafka.snapshot()
    produce(client, "t", b"2", b"3")
    kafka.rollback(before)
    produce(client, "t", b"4")
    produce(client, "t", b"5")
    assert values(kafka) == [b"1", b"4", b"5"]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_consumer_of_a_group_continues(kafka: Kafka, protocol: str) -> None:
    kafka.create_topic("t")
    writer = producer(kafka)
    produce(writer, "t", b"1", b"2")
    client = consumer(kafka, "g", **{"group.protocol": protocol})
    client.subscribe(["t"])
    assert read(client, 1) == [b"1"]
    client.commit(asynchronous=False)
    before = kafka.snapshot()
    assert read(client, 1) == [b"2"]
    client.commit(asynchronous=False)
    produce(writer, "t", b"3")
    assert read(client, 1) == [b"3"]
    kafka.rollback(before)
    partition = confluent_kafka.TopicPartition("t", 0)
    (committed,) = client.committed([partition], LIMIT_S)
    assert committed.offset == 1
    produce(writer, "t", b"other", b"more")
    # The client was at offset 3, and continues at the end of its leader epoch.
    assert read(client, 2) == [b"other", b"more"]
    client.commit(asynchronous=False)
    client.close()
    another = consumer(kafka, "g")
    another.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    assert read(another, 4) == [b"1", b"2", b"other", b"more"]
    another.close()


@pytest.mark.long
def test_waiting_fetch_gets_records_after_the_rollback(kafka: Kafka) -> None:
    kafka.create_topic("t")
    before = kafka.snapshot()
    client = consumer(kafka, "g", **{"fetch.wait.max.ms": 60_000})
    client.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    assert client.poll(0.2) is None
    kafka.rollback(before)
    kafka.append("t", b"1")
    assert read(client, 1) == [b"1"]
    client.close()


def test_open_transaction_ends_and_a_new_transaction_commits(kafka: Kafka) -> None:
    kafka.create_topic("t")
    settings = {"transactional.id": "tx", "transaction.timeout.ms": 60_000}
    client = producer(kafka, **settings)
    client.init_transactions(LIMIT_S)
    client.begin_transaction()
    client.produce("t", b"committed")
    client.commit_transaction(LIMIT_S)
    before = kafka.snapshot()
    client.begin_transaction()
    client.produce("t", b"open")
    client.flush(LIMIT_S)
    kafka.rollback(before)
    with pytest.raises(confluent_kafka.KafkaException):
        client.commit_transaction(LIMIT_S)
    successor = producer(kafka, **settings)
    successor.init_transactions(LIMIT_S)
    successor.begin_transaction()
    successor.produce("t", b"next")
    successor.commit_transaction(LIMIT_S)
    records = kafka.records("t", isolation="read_committed")
    assert [record.value for record in records] == [b"committed", b"next"]


def test_idle_transactional_producer_continues(kafka: Kafka) -> None:
    """The idle producer has begun no transaction, so the rollback does not fence it.
    The rollback removes the newer producer.
    """
    kafka.create_topic("t")
    client = producer(kafka, **{"transactional.id": "idle"})
    client.init_transactions(LIMIT_S)
    before = kafka.snapshot()
    newer = producer(kafka, **{"transactional.id": "newer"})
    newer.init_transactions(LIMIT_S)
    newer.begin_transaction()
    newer.produce("t", b"gone")
    newer.flush(LIMIT_S)
    kafka.rollback(before)
    client.begin_transaction()
    client.produce("t", b"kept")
    client.commit_transaction(LIMIT_S)
    assert kafka.records("t", isolation="read_committed")[0].value == b"kept"
    results: list[Any] = []
    kafka.server.call(
        lambda: kafka.server.server.broker.state.transactions.find_stored(
            None, results.append
        )
    )
    assert results[0].keys() == {"idle"}


@pytest.mark.long
def test_work_that_submits_more_work_ends_before_the_rollback(kafka: Kafka) -> None:
    """The threads were shut down while the work ran, and the broker ended."""
    before = kafka.snapshot()
    server = kafka.server.server
    done = threading.Event()

    def work() -> None:
        end_s = time.monotonic() + 1
        while time.monotonic() < end_s and not server._workers._is_closed:
            time.sleep(0.005)

    def submit() -> None:
        state = server.broker.state
        state.submit(work, lambda _: state.submit(int, lambda _: done.set()))

    kafka.server.call(submit)
    kafka.rollback(before)
    assert done.is_set()
    kafka.append("t", b"1")
    assert len(values(kafka)) == 1


def test_failed_copy_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("netshim.rollback._copy", fail)
    with pytest.raises(OSError, match="no space"):
        DirectorySnapshot([str(tmp_path / "data")])
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_rollback_restores_deleted_and_compacted_records(kafka: Kafka) -> None:
    kafka.create_topic("t", 1, {"segment.bytes": "1000"})
    # With a ratio of 1, no tick compacts the log.
    settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}
    kafka.create_topic("c", 1, {**settings, "segment.bytes": "1000"})
    for number in range(30):
        kafka.append("t", b"%d" % number * 50)
        kafka.append("c", b"%d" % number * 50, key=b"k")
    expected = values(kafka), values(kafka, "c")
    assert len(expected[0]) == 30
    before = kafka.snapshot()
    kafka.logdir.partition("t", 0).delete_records(20)
    log = kafka.logdir.partition("c", 0)
    log.roll()
    logcore.cleaner.clean(log, force=True)
    assert len(values(kafka)) == 10 and len(values(kafka, "c")) < 30
    kafka.rollback(before)
    assert (values(kafka), values(kafka, "c")) == expected
    assert kafka.logdir.partition("t", 0).scrub().findings == ()


def test_each_snapshot_can_be_restored_in_any_order(kafka: Kafka) -> None:
    kafka.create_topic("t")
    snapshots = []
    for number in range(3):
        kafka.append("t", b"%d" % number)
        snapshots.append(kafka.snapshot())
    for number in (0, 2, 1, 1, 2, 0):
        kafka.rollback(snapshots[number])
        assert len(values(kafka)) == number + 1
        kafka.append("t", b"more")


def test_leader_epoch_rises_if_records_are_removed(kafka: Kafka) -> None:
    """Clients truncate their view by the epoch, see KIP-320."""
    kafka.create_topic("t", 2)
    kafka.logdir.append("t", b"1", partition=0)
    before = kafka.snapshot()
    kafka.logdir.append("t", b"2", partition=0)
    kafka.rollback(before)
    assert kafka.logdir.host.leader_epoch("t", 0) == 1
    assert kafka.logdir.host.leader_epoch("t", 1) == 0
    kafka.logdir.append("t", b"3", partition=0)
    kafka.rollback(before)
    assert kafka.logdir.host.leader_epoch("t", 0) == 2


def test_producer_ids_are_not_given_out_again(kafka: Kafka) -> None:
    def next_id() -> int:
        connection = SourceConnection("127.0.0.1", kafka.port, ClientSettings())
        request = wire.INIT_PRODUCER_ID.Request(transactional_id=None)
        producer_id: int = connection.request(
            wire.INIT_PRODUCER_ID, request
        ).producer_id
        connection.close()
        return producer_id

    before = kafka.snapshot()
    ids = []
    for _ in range(3):
        ids.append(next_id())
        kafka.rollback(before)
    assert len({*ids, next_id()}) == 4


def test_faults_and_requests_are_dropped(kafka: Kafka) -> None:
    before = kafka.snapshot()
    with kafka.faults() as faults:
        faults.answer("Metadata", "UNKNOWN_SERVER_ERROR")
        kafka.rollback(before)
        client = producer(kafka)
        assert "topics" in dir(client.list_topics(timeout=LIMIT_S))
    assert kafka.requests("Produce") == []


def test_secured_clients_remain_authenticated(kafka_secured: SecuredKafka) -> None:
    kafka = kafka_secured
    kafka.create_topic("t")
    kafka.add_user("carol")
    kafka.allow("carol", "write", topic="t")
    client = confluent_kafka.Producer(kafka.client_config("carol"))
    produce(client, "t", b"1")
    before = kafka.snapshot()
    kafka.add_user("dave")
    kafka.allow("dave", "write", topic="t")
    produce(client, "t", b"2")
    kafka.rollback(before)
    produce(client, "t", b"3")
    assert values(kafka) == [b"1", b"3"]
    users = kafka.server.call(lambda: kafka.server.server.security.snapshot.users)
    assert "carol" in users
    assert "dave" not in users


def test_snapshot_of_another_broker_is_refused(
    kafka_factory: Callable[..., Kafka],
) -> None:
    first, other = kafka_factory(), kafka_factory()
    taken = other.snapshot()
    with pytest.raises(logcore.LogNotFoundError, match="not a snapshot of this broker"):
        first.rollback(taken)
    other.stop()
    with pytest.raises(logcore.LogNotFoundError, match="deleted"):
        taken.restore()
    with pytest.raises(RuntimeError, match="stopped"):
        other.snapshot()


def test_snapshot_of_a_shared_broker_is_refused(kafka_session: Kafka) -> None:
    with pytest.raises(RuntimeError, match="kafka_module"):
        kafka_session.snapshot()


def test_snapshot_of_a_simulated_disk_is_refused(
    kafka_factory: Callable[..., Kafka],
) -> None:
    disk = SimulatedDisk()
    kafka = kafka_factory("/data", fs=disk)
    with pytest.raises(logcore.InvalidConfigError, match="real files"):
        kafka.snapshot()


def test_second_call_during_a_rollback_is_refused(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kafka.snapshot()
    began, release = threading.Event(), threading.Event()
    restore = DirectorySnapshot.restore

    def held(self: DirectorySnapshot) -> Any:
        began.set()
        assert release.wait(LIMIT_S)
        return restore(self)

    monkeypatch.setattr(DirectorySnapshot, "restore", held)
    first = threading.Thread(target=kafka.rollback, args=(before,))
    first.start()
    assert began.wait(LIMIT_S)
    with pytest.raises(logcore.ResourceError, match="another call"):
        kafka.rollback(before)
    # A client that connects now is served afterwards.
    connecting = threading.Thread(
        target=lambda: producer(kafka).list_topics(timeout=LIMIT_S)
    )
    connecting.start()
    release.set()
    first.join(LIMIT_S)
    connecting.join(LIMIT_S)
    assert not first.is_alive() and not connecting.is_alive()


def test_stop_waits_for_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback would open the directory again after it was closed."""
    kafka = start(tmp_path / "data")
    kafka.append("t", b"1")
    before = kafka.snapshot()
    kafka.append("t", b"2")
    began, release = threading.Event(), threading.Event()
    restore = DirectorySnapshot.restore

    def held(self: DirectorySnapshot) -> Any:
        began.set()
        assert release.wait(LIMIT_S)
        return restore(self)

    monkeypatch.setattr(DirectorySnapshot, "restore", held)
    calls = [
        threading.Thread(target=kafka.rollback, args=(before,)),
        threading.Thread(target=kafka.stop),
    ]
    calls[0].start()
    assert began.wait(LIMIT_S)
    calls[1].start()
    release.set()
    for call in calls:
        call.join(LIMIT_S)
        assert not call.is_alive()
    with logcore.open_dir(tmp_path / "data") as logdir:
        assert [record.value for record in logdir.read("t")] == [b"1"]


def test_failed_rollback_ends_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = start(tmp_path / "data")
    before = kafka.snapshot()

    def fail(_: DirectorySnapshot) -> None:
        raise OSError("no space")

    monkeypatch.setattr(DirectorySnapshot, "restore", fail)
    with pytest.raises(OSError, match="no space"):
        kafka.rollback(before)
    failed = kafka.server.call(lambda: kafka.server.server.failure)
    assert "cannot continue" in str(failed)
    kafka.stop()


def test_copies_are_removed_when_the_broker_stops(tmp_path: Path) -> None:
    kafka = start(tmp_path / "data")
    kafka.snapshot()
    kafka.snapshot()
    assert len(list(tmp_path.glob(".data.snapshot-*"))) == 2
    kafka.stop()
    assert list(tmp_path.glob(".data.snapshot-*")) == []


SUITE = """
    import pytest, random
    from confluent_kafka import Producer

    @pytest.fixture(scope="module")
    def orders(kafka_module):
        kafka_module.create_topic("orders")
        kafka_module.append("orders", b"first")
        return kafka_module

    @pytest.mark.parametrize("number", range({count}))
    def test_each_begins_with_one_record(orders, kafka_clean, number):
        assert [record.value for record in kafka_clean.records("orders")] == [b"first"]
        assert kafka_clean.topics() == ["orders"]
        client = Producer({{"bootstrap.servers": kafka_clean.bootstrap_servers}})
        client.produce("orders", b"%d" % number)
        client.produce("other", b"x")
        assert client.flush(60) == 0
        assert len(kafka_clean.wait_for("orders", 2)) == 2
"""


def test_tests_of_a_module_are_isolated(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE.format(count=10))
    pytester.runpytest_inprocess(*ALONE).assert_outcomes(passed=10)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_a_shuffled_suite_is_isolated(pytester: pytest.Pytester) -> None:
    """200 tests in 20 orders: each one begins with the records of its module."""
    pytester.makepyfile(SUITE.format(count=200))
    pytester.makeconftest("""
        import os, random

        def pytest_collection_modifyitems(items):
            random.Random(os.environ["ORDER"]).shuffle(items)
    """)
    for order in range(20):
        pytester._monkeypatch.setenv("ORDER", str(order))
        pytester.runpytest_inprocess(*ALONE).assert_outcomes(passed=200)
