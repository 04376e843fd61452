"""A topic that is deleted and created again while a broker does not run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from netshim import wire
from support.cluster_load import Load, check_load, check_replica_files
from support.clusters import Cluster, until

confluent_kafka = pytest.importorskip("confluent_kafka")

#: Their coordinators are on all brokers.
GROUPS = [f"g{number}" for number in range(6)]


def controller_of(cluster: Cluster) -> int:
    request = wire.METADATA.Request(topics=[])
    controller_id: int = cluster.ask(1, wire.METADATA, request).controller_id
    return controller_id


def assign(cluster: Cluster, number: int, topic: str, brokers: list[int]) -> None:
    """Send broker `number` a request to create a topic. The first of `brokers` is its
    leader.
    """
    kind = wire.CREATE_TOPICS.Request.Topic
    request = wire.CREATE_TOPICS.Request(
        topics=[
            kind(
                name=topic,
                num_partitions=-1,
                replication_factor=-1,
                assignments=[kind.Assignment(partition_index=0, broker_ids=brokers)],
            )
        ],
        timeout_ms=30_000,
    )
    created = cluster.ask(number, wire.CREATE_TOPICS, request).topics[0]
    assert not created.error_code, created


def committed(cluster: Cluster, group: str, offset: int | None = None) -> int:
    """Return the committed offset of a group in t-0, after a commit if one is given."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": group}
    )
    partition = confluent_kafka.TopicPartition("t", 0)
    if offset is not None:
        partition.offset = offset
        consumer.commit(offsets=[partition], asynchronous=False)
    (fetched,) = consumer.committed([partition], timeout=30)
    consumer.close()
    number: int = fetched.offset
    return number


@pytest.mark.long
@pytest.mark.parametrize("role", ["leader", "follower"])
def test_broker_that_missed_a_deletion_starts_the_new_topic_empty(
    tmp_path: Path, role: str
) -> None:
    """The next view of the broker has another topic of the same name, with the same
    leader epoch.
    """
    with Cluster(
        tmp_path / "cluster",
        broker_session_timeout_ms=20_000,
        replica_lag_time_max_ms=60_000,
    ) as cluster:
        controller = controller_of(cluster)
        stopped, other = [n for n in cluster.processes if n != controller]
        brokers = [stopped, other, controller]
        if role == "follower":
            brokers = [other, stopped, controller]
        assign(cluster, controller, "t", brokers)
        cluster.until_in_sync("t", 3)
        before = Load(cluster, "t")
        before.until_more()
        before.end()
        for group in GROUPS:
            assert committed(cluster, group, 7) == 7
        cluster.send(stopped, signal.SIGSTOP)
        try:
            request = wire.DELETE_TOPICS.Request(
                topics=[wire.DELETE_TOPICS.Request.Topic(name="t")],
                timeout_ms=30_000,
            )
            deleted = cluster.ask(controller, wire.DELETE_TOPICS, request)
            assert not deleted.responses[0].error_code, deleted
            assign(cluster, controller, "t", brokers)
        finally:
            cluster.send(stopped, signal.SIGCONT)
        after = Load(cluster, "t")
        after.until_more()
        cluster.until_in_sync("t", 3)
        for group in GROUPS:
            until(
                lambda group=group: committed(cluster, group) < 0,
                "the offsets of the former topic are deleted",
            )
        check_load(cluster, "t", after)
        check_replica_files(cluster, "t")
