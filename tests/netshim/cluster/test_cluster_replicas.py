"""The replicas that a broker places and removes, and the roles that they may have."""

from __future__ import annotations

import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from logcore import Log, LogDir
from logcore.config import LogConfig
from logcore.replication.state import InSyncReplica, LeaderAndIsr
from netshim.cluster.registry_nodes import BrokerNode, TopicNode
from netshim.cluster.replicas import ClusterReplicas, RoleCallbacks
from netshim.cluster.topology import ClusterTopology
from netshim.cluster.view import ClusterView, StoredState, TopicOfCluster
from netshim.topology import NO_NODE
from support.broker_harness import BrokerHarness

OWN, OTHER = 1, 2
KEY = ("t", 0)
#: The partition was created on the other broker.
TOPIC = TopicOfCluster(TopicNode(uuid.UUID(int=7), {0: (OTHER,)}), {}, LogConfig())
IN_SYNC = {OWN: InSyncReplica(5, "disk 1"), OTHER: InSyncReplica(5, "disk 2")}
ASSIGNED = LeaderAndIsr(OWN, 3, IN_SYNC, (OWN, OTHER))
UNASSIGNED = LeaderAndIsr(OTHER, 5, {OTHER: IN_SYNC[OTHER]}, (OTHER,))


def view_of(version: int, state: LeaderAndIsr | None) -> ClusterView:
    stored = {} if state is None else {KEY: StoredState(state, version, "/t/0")}
    brokers = {
        number: BrokerNode(5, member.disk, "127.0.0.1", 9000)
        for number, member in IN_SYNC.items()
    }
    # Each view has its own value of the topic, so replicas are compared with each view.
    topics = {"t": attrs.evolve(TOPIC)}
    return ClusterView(brokers=brokers, topics=topics, states=stored)


class Replicas:
    """The replicas of broker 1. Submitted work waits for run()."""

    def __init__(self, path: Path) -> None:
        self.broker_harness = BrokerHarness(path, at_once=False, replicated=True)
        member: Any = types.SimpleNamespace(
            settings=types.SimpleNamespace(node_id=OWN), epoch=5
        )
        self.cluster_replicas = ClusterReplicas(
            self.broker_harness.broker.state,
            self.broker_harness.logdir,
            member,
            lambda broker: pytest.fail("nothing is followed"),
            RoleCallbacks(
                on_lead=lambda key, log: None,
                on_resign=lambda key: None,
                on_failure=lambda error: pytest.fail(str(error)),
            ),
        )

    def apply_state(self, version: int, state: LeaderAndIsr | None) -> None:
        self.cluster_replicas.apply_view(view_of(version, state))

    @property
    def has_replica(self) -> bool:
        logdir = self.broker_harness.logdir
        return "t" in logdir and 0 in logdir.partitions("t")

    def append(self) -> None:
        self.broker_harness.logdir.partition(*KEY).append(b"a record")

    @property
    def log_end(self) -> int:
        return self.broker_harness.logdir.partition(*KEY).log_end_offset


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    leading = Replicas(tmp_path)
    leading.apply_state(1, ASSIGNED)
    leading.broker_harness.run()
    assert leading.cluster_replicas.is_leader(KEY)
    leading.append()
    yield leading
    leading.cluster_replicas.close()
    leading.broker_harness.close()


def test_unassigned_broker_removes_its_replica(replicas: Replicas) -> None:
    replicas.apply_state(2, UNASSIGNED)
    assert not replicas.cluster_replicas.is_leader(KEY)
    replicas.broker_harness.run()
    assert not replicas.has_replica


def test_replica_without_a_state_is_kept(replicas: Replicas) -> None:
    """The registry may have lost the state, or it may be damaged."""
    replicas.apply_state(2, None)
    replicas.broker_harness.run()
    assert not replicas.cluster_replicas.is_leader(KEY)
    assert replicas.log_end == 1


def test_replica_has_no_role_until_its_removal_is_complete(replicas: Replicas) -> None:
    """A broker that is assigned again would lead a log that is being removed."""
    replicas.apply_state(2, UNASSIGNED)
    replicas.broker_harness.run(1)  # the end of the role
    (removal,) = replicas.broker_harness.submitted
    replicas.broker_harness.submitted.clear()
    replicas.apply_state(3, attrs.evolve(ASSIGNED, leader_epoch=6))
    replicas.broker_harness.run()
    assert replicas.has_replica
    assert not replicas.cluster_replicas.is_leader(KEY)
    replicas.broker_harness.submitted.append(removal)
    replicas.broker_harness.run()
    assert replicas.cluster_replicas.is_leader(KEY)
    assert replicas.log_end == 0


def test_removal_waits_for_the_work_of_a_role(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work would open the log again while the directory of the log is removed."""
    opened_late = []
    open_log = LogDir.partition

    def partition(logdir: LogDir, topic: str, number: int) -> Log:
        if not replicas.has_replica:
            opened_late.append((topic, number))
        return open_log(logdir, topic, number)

    monkeypatch.setattr(LogDir, "partition", partition)
    replicas.apply_state(2, attrs.evolve(ASSIGNED, leader_epoch=4))
    replicas.apply_state(3, UNASSIGNED)
    submitted = replicas.broker_harness.submitted
    while submitted:
        # A removal that did not wait would be the newest work.
        submitted.insert(0, submitted.pop())
        replicas.broker_harness.run(1)
    assert not replicas.has_replica
    assert not opened_late


@pytest.mark.parametrize(("registered", "leader"), [(OWN, OWN), (OTHER, NO_NODE)])
def test_leader_that_is_not_registered_is_not_named(
    registered: int, leader: int
) -> None:
    """After a kill of the leader, Metadata named it until the election, but did not list
    it among the brokers. kafka-python failed with UnknownBrokerIdError.
    """
    view = view_of(1, ASSIGNED)
    view = attrs.evolve(view, brokers={registered: view.brokers[registered]})
    member: Any = types.SimpleNamespace(view=view)
    directory: Any = None
    replicas = ClusterTopology(member, directory).partition(*KEY)
    assert (replicas.leader, replicas.leader_epoch) == (leader, 3)
