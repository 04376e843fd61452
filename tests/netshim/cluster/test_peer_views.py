"""Leaders that other brokers report to a broker without a registry."""

from __future__ import annotations

from typing import Any, NoReturn

import attrs
import pytest

from logcore.errors import RemoteUnavailableError
from logcore.metadata.checkpoint import Key
from logcore.replication.state import InSyncReplica, LeaderAndIsr, Role, role_of
from netshim import wire
from netshim.cluster import peer_views
from netshim.cluster.peer_views import PeerViews
from netshim.cluster.registry_nodes import BrokerNode
from netshim.cluster.view import ClusterView, StoredState
from support.clusters import until

#: The leader and the leader epoch of partition 0 of each topic, by the reporting broker.
Reports = dict[int, dict[str, tuple[int, int]]]

STATE = LeaderAndIsr(
    leader=1,
    leader_epoch=4,
    controller_epoch=1,
    isr={number: InSyncReplica(7, f"disk-{number}") for number in (1, 2, 3)},
    replicas=(1, 2, 3),
)
VIEW = ClusterView(
    brokers={
        number: BrokerNode(7, f"disk-{number}", "127.0.0.1", 9_000 + number)
        for number in (1, 2, 3)
    },
    states={
        ("t", 0): StoredState(STATE, 5, "/t"),
        ("u", 0): StoredState(STATE, 6, "/u"),
    },
)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Play the other brokers. A broker without an entry does not answer."""
    reported: Reports = {}

    class PlayedBroker:
        def __init__(self, broker: int, connect: Any) -> None:
            assert connect is not_called
            self._broker = broker

        def request(self, api: object, request: object) -> Any:
            if self._broker not in reported:
                raise RemoteUnavailableError("no answer")
            kind = wire.METADATA.Response.Topic
            return wire.METADATA.Response(
                topics=[
                    kind(
                        name=name,
                        partitions=[
                            kind.Partition(
                                partition_index=0,
                                leader_id=leader,
                                leader_epoch=epoch,
                            )
                        ],
                    )
                    for name, (leader, epoch) in reported[self._broker].items()
                ]
            )

        def close(self) -> None:
            pass

    monkeypatch.setattr(peer_views, "PeerConnection", PlayedBroker)
    return reported


def not_called(_: int) -> NoReturn:
    raise AssertionError("the played brokers have no connections")


def read(view: ClusterView) -> dict[Key, tuple[int, int]]:
    """Return the leaders of a view after the answers of the other brokers."""
    views = PeerViews(1, not_called)
    views.newer_view(view)
    until(lambda: not views._asking, "the answers")
    return {
        key: (stored.state.leader, stored.state.leader_epoch)
        for key, stored in views.newer_view(view).states.items()
    }


def test_a_newer_leader_ends_the_leadership(reports: Reports) -> None:
    reports[2] = {"t": (1, 4)}
    reports[3] = {"t": (2, 5), "u": (1, 4)}
    assert read(VIEW) == {("t", 0): (2, 5), ("u", 0): (1, 4)}
    state = attrs.evolve(STATE, leader=2, leader_epoch=5)
    assert role_of(state, 1, 7) is Role.FOLLOWER


def test_leader_with_the_highest_epoch_is_used(reports: Reports) -> None:
    reports[2] = {"t": (3, 6)}
    reports[3] = {"t": (2, 5)}
    assert read(VIEW)["t", 0] == (3, 6)


@pytest.mark.parametrize("leader", [1, -1])
@pytest.mark.parametrize("epoch", [3, 4, 5])
def test_no_report_makes_this_broker_a_leader(
    reports: Reports, leader: int, epoch: int
) -> None:
    reports[2] = {"t": (leader, epoch), "unknown": (2, 1)}
    state = attrs.evolve(STATE, leader=3)
    view = attrs.evolve(VIEW, states={("t", 0): StoredState(state, 5, "/t")})
    assert read(view) == {("t", 0): (3, 4)}


def test_view_remains_if_no_peer_answers(reports: Reports) -> None:
    views = PeerViews(1, not_called)
    assert views.newer_view(VIEW) is VIEW
    until(lambda: not views._asking, "the ends of the questions")
    assert views.newer_view(VIEW) is VIEW
