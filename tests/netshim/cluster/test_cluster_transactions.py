"""Transactions in a cluster: partitions, groups and coordinators on different brokers."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest

from netshim import wire
from netshim.wire import codes
from support.cluster_load import FAST_RETRIES, confluent_kafka
from support.clusters import Cluster, until

PARTITIONS = 3


def producer(cluster: Cluster, name: str, **settings: Any) -> Any:
    opened = confluent_kafka.Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "transactional.id": name,
            "linger.ms": 0,
            **FAST_RETRIES,
            "message.timeout.ms": 60_000,
            **settings,
        }
    )
    opened.init_transactions(90)
    return opened


def consumer(cluster: Cluster, group: str, **settings: Any) -> Any:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            **settings,
        }
    )


def read_committed(cluster: Cluster, topic: str) -> list[str]:
    """Return all values that are committed, once no transaction is open."""
    values: list[str] = []
    client = consumer(cluster, "check")
    client.assign(
        [confluent_kafka.TopicPartition(topic, n, 0) for n in range(PARTITIONS)]
    )
    ended: set[int] = set()
    while len(ended) < PARTITIONS:
        message = client.poll(60)
        assert message is not None, "no message within a minute"
        if message.error() is None:
            values.append(message.value().decode())
        elif message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
            ended.add(message.partition())
    client.close()
    return values


def test_transactions_commit_and_abort_over_all_leaders(calm: Cluster) -> None:
    calm.create("t", PARTITIONS)
    entry = producer(calm, "tx")
    for number in range(6):
        entry.begin_transaction()
        for partition in range(PARTITIONS):
            entry.produce("t", f"{number}-{partition}".encode(), partition=partition)
        if number % 2:
            entry.abort_transaction(60)
        else:
            entry.commit_transaction(60)
    expected = {f"{n}-{p}" for n in (0, 2, 4) for p in range(PARTITIONS)}
    values = read_committed(calm, "t")
    assert (len(values), set(values)) == (len(expected), expected)


def test_offsets_of_a_transaction_are_committed_with_it(calm: Cluster) -> None:
    calm.create("source", PARTITIONS)
    entry = producer(calm, "offsets")
    client = consumer(calm, "billing")
    places = [confluent_kafka.TopicPartition("source", n, 7) for n in range(PARTITIONS)]
    metadata = client.consumer_group_metadata()
    entry.begin_transaction()
    entry.send_offsets_to_transaction(places, metadata, 60)
    entry.abort_transaction(60)
    assert {each.offset for each in client.committed(places, 60)} == {-1001}
    entry.begin_transaction()
    entry.produce("source", b"x", partition=0)
    entry.send_offsets_to_transaction(places, metadata, 60)
    entry.commit_transaction(60)
    until(
        lambda: {each.offset for each in client.committed(places, 60)} == {7},
        "the offsets of the transaction are valid",
    )
    client.close()


@pytest.mark.long
def test_new_producer_fences_the_former_producer(calm: Cluster) -> None:
    calm.create("fenced", PARTITIONS)
    former = producer(calm, "same")
    former.begin_transaction()
    former.produce("fenced", b"lost", partition=1)
    former.flush(60)
    successor = producer(calm, "same")
    successor.begin_transaction()
    successor.produce("fenced", b"kept", partition=1)
    successor.commit_transaction(60)
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        former.commit_transaction(60)
    assert refused.value.args[0].code() == confluent_kafka.KafkaError._FENCED
    assert read_committed(calm, "fenced") == ["kept"]


def test_a_partition_outside_of_the_transaction_is_refused(calm: Cluster) -> None:
    """The leader of the partition asks the coordinator, which may be another broker."""
    calm.create("outside", PARTITIONS)
    find = wire.FIND_COORDINATOR.Request(key_type=1, coordinator_keys=["raw"])

    def coordinator() -> Any:
        result = calm.ask(1, wire.FIND_COORDINATOR, find).coordinators[0]
        return result.node_id if result.error_code == codes.NONE else None

    home = until(coordinator, "a coordinator")
    init = wire.INIT_PRODUCER_ID.Request(
        transactional_id="raw", transaction_timeout_ms=60_000
    )

    def identity() -> Any:
        result = calm.ask(home, wire.INIT_PRODUCER_ID, init)
        return result if result.error_code == codes.NONE else None

    ids = until(identity, "the coordinator is loaded")
    other = next(number for number in (1, 2, 3) if number != home)
    refused = calm.ask(other, wire.INIT_PRODUCER_ID, init)
    assert refused.error_code == codes.NOT_COORDINATOR
    kind = wire.ADD_PARTITIONS_TO_TXN.Request.Transaction

    def add(partition: int, epoch: int, *, verify_only: bool) -> list[int]:
        request = wire.ADD_PARTITIONS_TO_TXN.Request(
            transactions=[
                kind(
                    transactional_id="raw",
                    producer_id=ids.producer_id,
                    producer_epoch=epoch,
                    verify_only=verify_only,
                    topics=[kind.Topic(name="outside", partitions=[partition])],
                )
            ]
        )
        response = calm.ask(home, wire.ADD_PARTITIONS_TO_TXN, request)
        return [
            each.partition_error_code
            for entry in response.results_by_transaction
            for topic in entry.topic_results
            for each in topic.results_by_partition
        ]

    epoch = ids.producer_epoch
    assert add(0, epoch, verify_only=True) == [codes.TRANSACTION_ABORTABLE]
    assert add(0, epoch, verify_only=False) == [codes.NONE]
    assert add(0, epoch, verify_only=True) == [codes.NONE]
    assert add(1, epoch, verify_only=True) == [codes.TRANSACTION_ABORTABLE]
    assert add(0, epoch + 1, verify_only=True) == [codes.PRODUCER_FENCED]


class TransactionLoad:
    """Producers that commit and abort transactions over all partitions until the end."""

    def __init__(self, cluster: Cluster, topic: str, count: int = 2) -> None:
        self._cluster = cluster
        self._topic = topic
        #: Numbers of transactions by outcome. The outcome of others is unknown.
        self.committed: set[str] = set()
        self.aborted: set[str] = set()
        self.errors: list[Any] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(f"p{n}",), daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str) -> None:
        try:
            number = 0
            while not self._is_over.is_set():
                entry = producer(self._cluster, name)
                try:
                    while not self._is_over.is_set():
                        number += 1
                        self._transact(entry, f"{name}-{number}", number)
                except confluent_kafka.KafkaException as error:
                    if not error.args[0].fatal():
                        raise
                # A producer that was fenced by its own timeout begins again.
        except Exception as error:
            self.errors.append(error)

    def _transact(self, entry: Any, name: str, number: int) -> None:
        entry.begin_transaction()
        for partition in range(PARTITIONS):
            entry.produce(
                self._topic, f"{name}/{partition}".encode(), partition=partition
            )
        try:
            if number % 4 == 0:
                entry.abort_transaction(120)
                self.aborted.add(name)
            else:
                entry.commit_transaction(120)
                self.committed.add(name)
        except confluent_kafka.KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            entry.abort_transaction(120)
            self.aborted.add(name)

    def until_more(self, count: int = 20) -> None:
        before = len(self.committed)

        def more() -> bool:
            assert not self.errors, self.errors
            return len(self.committed) >= before + count

        until(more, "more transactions")

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors, self.errors

    def check(self) -> None:
        """Check that committed transactions are stored once and completely, and that no
        record of an aborted transaction is visible.
        """
        self.end()
        counts = Counter(read_committed(self._cluster, self._topic))
        assert max(counts.values()) == 1, "records are stored twice"
        parts = Counter(value.split("/")[0] for value in counts)
        assert set(parts.values()) == {PARTITIONS}, "a transaction is there in part"
        assert self.committed <= parts.keys(), sorted(self.committed - parts.keys())[:5]
        assert not self.aborted & parts.keys(), sorted(self.aborted & parts.keys())[:5]


@pytest.mark.slow
def test_transactions_survive_killed_coordinators_and_leaders(cluster: Cluster) -> None:
    cluster.create("t", PARTITIONS)
    load = TransactionLoad(cluster, "t")
    load.until_more()
    for topic in ("__transaction_state", "t", "__transaction_state"):
        leader = cluster.until_in_sync(topic, 3).leader_id
        cluster.kill(leader)
        load.until_more()
        cluster.start(leader)
        cluster.until_in_sync(topic, 3)
    load.check()


@pytest.mark.slow
def test_a_stopped_coordinator_cannot_end_transactions(cluster: Cluster) -> None:
    """SIGSTOP for longer than the session: markers of the former coordinator are
    refused.
    """
    cluster.create("t", PARTITIONS)
    load = TransactionLoad(cluster, "t")
    load.until_more()
    for _ in range(2):
        before = cluster.until_in_sync("__transaction_state", 3).leader_id
        cluster.send(before, signal.SIGSTOP)
        other = next(n for n in (1, 2, 3) if n != before)
        until(
            lambda before=before, other=other: (
                cluster.partition("__transaction_state", 0, other).leader_id
                not in (-1, before)
            ),
            "another coordinator",
        )
        load.until_more()
        cluster.send(before, signal.SIGCONT)
        time.sleep(0.1)
        load.until_more()
    load.check()
