"""The fast path answers followers, and consumers of a cluster, as the general path does.

Two brokers lead the same partitions and get the same requests. One of them has no fast
path, and defines the responses.
"""

from __future__ import annotations

import random
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from logcore.config import LogConfig
from logcore.errors import LogFailedError
from logcore.fs import OsFS
from logcore.kernels import kernel
from logcore.replication.state import InSyncReplica, LeaderAndIsr
from netshim import fetch_sessions, wire
from netshim.cluster.registry_nodes import BrokerNode, TopicNode
from netshim.cluster.replicas import ClusterReplicas, RoleCallbacks
from netshim.cluster.view import ClusterView, StoredState, TopicOfCluster
from netshim.security.acls import AclIndex
from netshim.wire import codes
from support.same_brokers import (
    NOW_MS,
    SAME_ID,
    BrokerPair,
    ComparedBroker,
    Outcome,
    batch_of,
)

IS_COMPILED = kernel.__name__.endswith("_compiled")
compiled = pytest.mark.skipif(
    not IS_COMPILED, reason="the plain kernels read no request"
)

LEADER, FOLLOWERS = 1, (2, 3)
BROKER_EPOCH = 5
TOPICS = {"t": 3, "u": 1}
PLACE = ("t", 1)
IN_SYNC = {
    number: InSyncReplica(BROKER_EPOCH, f"disk {number}")
    for number in (LEADER, *FOLLOWERS)
}
#: `make slow` tries more seeds.
SEEDS = [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 100))]


class ClusterSide(ComparedBroker):
    """The leader of all partitions, without other brokers and without a registry."""

    def __init__(self, path: Path, durability: str, *, is_fast: bool) -> None:
        super().__init__(path, durability, is_fast=is_fast, replicated=True)
        state = self.broker_harness.broker.state
        self.broker_harness.broker.tick(self.broker_harness.now_ms)
        member: Any = types.SimpleNamespace(
            settings=types.SimpleNamespace(node_id=LEADER),
            epoch=BROKER_EPOCH,
            propose=lambda key, stored: stored.version + 1,
        )
        self.view = self._view()
        self.replicas = ClusterReplicas(
            state,
            self.broker_harness.logdir,
            member,
            lambda broker: pytest.fail("nothing is followed"),
            RoleCallbacks(
                on_lead=lambda key, log: None,
                on_resign=lambda key: None,
                on_failure=lambda error: pytest.fail(str(error)),
            ),
        )
        state.leadership = self.replicas
        state.logs.check_leader = self.replicas.check_leader
        self.replicas.apply_view(self.view)
        self.broker_harness.run()
        #: Requests that the general path handles from the beginning.
        self.in_general = 0
        general = self.broker_harness.broker._handle_in_general

        def handle(*args: Any) -> Any:
            self.in_general += 1
            return general(*args)

        self.broker_harness.broker._handle_in_general = handle  # type: ignore[method-assign]

    @staticmethod
    def _view() -> ClusterView:
        brokers = {
            number: BrokerNode(BROKER_EPOCH, member.disk, "127.0.0.1", 9000)
            for number, member in IN_SYNC.items()
        }
        topics = {}
        states = {}
        for name, count in TOPICS.items():
            replicas = dict.fromkeys(range(count), (LEADER, *FOLLOWERS))
            node = TopicNode(uuid.uuid5(uuid.NAMESPACE_DNS, name), replicas)
            overrides = {"min.insync.replicas": "2"}
            config = LogConfig.parse(overrides)
            topics[name] = TopicOfCluster(node, overrides, config)
            for number in replicas:
                state = LeaderAndIsr(LEADER, 3, IN_SYNC, replicas[number])
                states[name, number] = StoredState(state, 1, f"/{name}/{number}")
        return ClusterView(brokers=brokers, topics=topics, states=states)

    def change_state(self, key: tuple[str, int], **changes: Any) -> None:
        """Publish a newer state of a partition."""
        stored = self.view.states[key]
        led = self.replicas._led_partitions.get(key)
        version = max(stored.version, 0 if led is None else led.leader_state.version)
        state = attrs.evolve(stored.state, **changes)
        changed = attrs.evolve(stored, state=state, version=version + 1)
        self.view = attrs.evolve(self.view, states={**self.view.states, key: changed})
        self.replicas.apply_view(self.view)


class Follower:
    """The requests of one follower; the responses of the fast side are applied."""

    def __init__(self, pair: BrokerPair, number: int) -> None:
        self.pair = pair
        self.number = number
        self.version = 17
        self.session_ids = [0, 0]
        self.epoch = 0
        self._request = -1
        self.offsets = {
            (name, number): 0
            for name, count in TOPICS.items()
            for number in range(count)
        }
        #: The offsets that the session contains.
        self.listed: dict[tuple[str, int], int] = {}

    def fetch(
        self,
        *,
        version: int | None = None,
        wait_ms: int = 0,
        broker_epoch: int = BROKER_EPOCH,
        leader_epoch: int | None = None,
        last_epoch: int = -1,
        max_bytes: int = 1 << 20,
        only: list[tuple[str, int]] | None = None,
    ) -> Outcome:
        """List the partitions whose offset changed, or `only` these."""
        is_new = self.epoch == 0
        places = [key for key, at in self.offsets.items() if self.listed.get(key) != at]
        if only is not None and not is_new:
            places = only
        for key in places:
            self.listed[key] = self.offsets[key]
        epoch = self.epoch
        kind = wire.FETCH.Request
        sides = iter(self.session_ids)

        def request(side: Any) -> Any:
            return kind(
                replica_state=kind.ReplicaState(
                    replica_id=self.number, replica_epoch=broker_epoch
                ),
                max_wait_ms=wait_ms,
                min_bytes=1,
                max_bytes=10 << 20,
                session_id=next(sides),
                session_epoch=epoch,
                topics=[
                    kind.Topic(
                        topic_id=side.topic_id(name),
                        partitions=[
                            kind.Topic.Partition(
                                partition=number,
                                current_leader_epoch=leader_epoch
                                or side.view.states[name, number].state.leader_epoch,
                                fetch_offset=self.offsets[name, number],
                                last_fetched_epoch=last_epoch,
                                partition_max_bytes=max_bytes,
                            )
                        ],
                    )
                    for name, number in places
                ],
            )

        self._request = len(self.pair.outcomes)
        outcome = self.pair.send(wire.FETCH, version or self.version, request)
        if is_new:
            self.session_ids = [side.session_id for side in self.pair.sides]
        self.epoch += 1
        if outcome != "waits" and "session_id" not in outcome[1]:
            self.epoch = 0  # such as another version
        return outcome

    @property
    def is_waiting(self) -> bool:
        """Whether the last request has no response."""
        readable_count = {
            outcome[0] for outcome in self.pair.outcomes if isinstance(outcome, tuple)
        }
        return self._request >= 0 and self._request not in readable_count

    def begin(self) -> None:
        """Begin a session, and fetch until no partition has changed."""
        self.fetch()
        for key in self.offsets:
            self.catch_up(key)
        for _ in range(3):
            self.fetch()

    def catch_up(self, key: tuple[str, int]) -> None:
        """Move the position of a partition to the end of the leader's log."""
        self.offsets[key] = end_of(self.pair, key)


def end_of(pair: BrokerPair, key: tuple[str, int]) -> int:
    end: int = pair.each(
        lambda side: side.broker_harness.logdir.partition(*key).log_end_offset
    )
    return end


@pytest.fixture(autouse=True)
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OsFS, "now_ms", lambda self: NOW_MS)


@pytest.fixture(params=["os", "group"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BrokerPair]:
    pair_of_brokers = BrokerPair(tmp_path, request.param, side=ClusterSide)
    for name, count in TOPICS.items():
        for number in range(count):
            pair_of_brokers.produce(topic=name, partition=number)
    yield pair_of_brokers
    pair_of_brokers.close()


def test_follower_is_answered_in_the_fast_path(pair: BrokerPair) -> None:
    followers = [Follower(pair, number) for number in FOLLOWERS]
    for follower in followers:
        follower.begin()
    pair.sleep(50)
    for follower in followers * 2:
        follower.fetch(only=[PLACE], wait_ms=100)
        pair.sleep(100)
    before = pair.sides[0].in_general
    for _ in range(3):
        for follower in followers:
            assert follower.fetch(only=[PLACE], wait_ms=500) == "waits"
        assert pair.produce(partition=1, acks=-1) == "waits"
        assert len(pair.run()) == 2
        for follower in followers:
            follower.catch_up(PLACE)
            assert follower.fetch(wait_ms=500) == "waits"
        # Both followers have the record, so the producer gets its answer. The followers
        # get the new high watermark later.
        assert len(pair.run()) == 1
        assert len(pair.sleep(50)) == 2
    if IS_COMPILED:
        assert pair.sides[0].in_general == before


def test_view_is_applied_although_a_log_has_failed(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the first partition of a view had failed, and the other partitions
    kept their previous state.
    """
    side = pair.sides[0]
    replicas, follower = side.replicas, Follower(pair, 2)
    follower.begin()
    failures: list[Exception] = []
    roles = attrs.evolve(replicas._roles, on_failure=failures.append)
    monkeypatch.setattr(replicas, "_roles", roles)
    log = replicas._led_partitions["t", 0].log
    error = LogFailedError("an earlier write or sync failed")
    pair.produce(partition=0)
    pair.run()
    monkeypatch.setattr(log.host.writer, "advance_high_watermark", raising(error))
    states = {
        key: attrs.evolve(
            stored,
            state=attrs.evolve(stored.state, isr={LEADER: IN_SYNC[LEADER]}),
            version=stored.version + 9,
        )
        for key, stored in side.view.states.items()
    }
    # The leader alone is in sync, so its high watermark rises to its end.
    for led in replicas._led_partitions.values():
        led.leader_state = led.leader_state._replace(min_insync_replicas=1)
    replicas.apply_view(attrs.evolve(side.view, states=states))
    assert failures == [error]
    assert {
        len(led.leader_state.state.isr) for led in replicas._led_partitions.values()
    } == {1}


def raising(error: Exception) -> Any:
    """Return a function that raises an error."""

    def fail(*args: Any) -> Any:
        raise error

    return fail


@compiled
def test_position_of_a_follower_is_applied_once(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting fetch is processed again after each append, although its position is
    the same.
    """
    follower = Follower(pair, 2)
    follower.begin()
    replicas = pair.sides[0].replicas
    take = replicas.follower_fetched
    taken: list[int] = []

    def record(key: Any, log: Any, fetch: Any) -> Any:
        taken.append(fetch.offset)
        return take(key, log, fetch)

    monkeypatch.setattr(replicas, "follower_fetched", record)
    assert follower.fetch(only=[PLACE], wait_ms=500) == "waits"
    pair.produce(partition=1)
    assert len(pair.run()) == 1
    assert taken == [follower.offsets[PLACE]]


@compiled
def test_all_changed_partitions_of_a_follower_are_answered(pair: BrokerPair) -> None:
    """A response of the fast path contains one changed partition. The next response
    must contain the other changed partitions.
    """
    follower = Follower(pair, 2)
    follower.begin()
    assert follower.fetch(only=[PLACE], wait_ms=500) == "waits"
    for number in range(3):
        pair.produce(partition=number)
    ((_, response),) = pair.run()
    assert response.count("records=") == 1
    follower.catch_up(("t", 0))
    _, response = follower.fetch(wait_ms=500)
    assert "partition_index=1" in response
    assert "partition_index=2" in response
    assert response.count("records=") == 2


@pytest.mark.parametrize("change", ["leader epoch", "topics", "rules"])
def test_waiting_follower_notices_a_change(pair: BrokerPair, change: str) -> None:
    follower = Follower(pair, 2)
    follower.begin()
    assert follower.fetch(only=[PLACE], wait_ms=500) == "waits"
    for side in pair.sides:
        if change == "leader epoch":
            side.change_state(PLACE, leader_epoch=4)
        elif change == "topics":
            side.broker_harness.logdir.host.place_topic(
                "another", uuid.uuid4(), 1, (0,), {}
            )
        else:
            side.broker_harness.broker.state.security.acls = AclIndex((), ())
    pair.produce(partition=1)
    pair.run()
    pair.sleep(600)
    assert not pair.sides[0].waiting
    if change == "rules":
        assert "error_code" in follower.fetch()[1]


def random_step(
    pair: BrokerPair, followers: list[Follower], rng: random.Random
) -> None:
    follower = rng.choice(followers)
    key = rng.choice([*follower.offsets, PLACE, PLACE, PLACE])
    kind = rng.randrange(20)
    if kind < 5:
        producer = (-1, -1, -1)
        if rng.random() < 0.3:
            producer = rng.randrange(2), 0, rng.randrange(4)
        pair.produce(
            rng.choice((9, 10, 13)),
            topic=key[0],
            partition=key[1],
            acks=rng.choice((-1, 1)),
            records=batch_of(rng.choice((1, 1, 3, 200)), producer=producer),
        )
    elif kind < 14:
        if follower.is_waiting and rng.random() < 0.95:
            return
        if rng.random() < 0.6:
            follower.catch_up(key)
        elif rng.random() < 0.2:  # repeat a batch, or use an invalid offset
            follower.offsets[key] = max(0, follower.offsets[key] + rng.choice((-1, 1)))
        follower.fetch(
            version=16 if rng.random() < 0.05 else None,
            wait_ms=rng.choice((0, 100, 500, 500)),
            broker_epoch=BROKER_EPOCH - (rng.random() < 0.03),
            leader_epoch=4 if rng.random() < 0.03 else None,
            last_epoch=rng.choice((-1, -1, -1, 3, 4)),
            max_bytes=rng.choice((100, 1 << 20, 1 << 20)),
            only=rng.choice((None, None, [], [key])),
        )
    elif kind < 17:
        offset = rng.randrange(end_of(pair, key) + 1)
        pair.fetch(
            offset,
            rng.choice((12, 13, 17)),
            topic=key[0],
            partition=key[1],
            # A search for transactions would wait on one side only.
            isolation=0,
            wait_ms=rng.choice((0, 100)),
            current_leader_epoch=rng.choice((-1, 3, 3, 4)),
        )
    elif kind == 17:
        members = rng.choice(((1, 2, 3), (1, 2), (1, 3), (1,)))
        for side in pair.sides:
            side.change_state(key, isr={member: IN_SYNC[member] for member in members})
    elif kind == 18 and rng.random() < 0.1:
        epoch = pair.sides[0].view.states[key].state.leader_epoch + 1
        for side in pair.sides:
            side.change_state(key, leader_epoch=epoch)
    else:
        pair.sleep(rng.choice((1, 20, 120, 500)))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_requests_in_a_cluster_get_equal_responses(
    pair: BrokerPair, seed: int
) -> None:
    rng = random.Random(seed)
    followers = [Follower(pair, number) for number in FOLLOWERS]
    followers[0].version = 15 + seed % 4
    for _ in range(400):
        random_step(pair, followers, rng)
        if rng.random() < 0.7:
            pair.run()
    pair.sleep(40_000)
    fast, general = pair.sides
    assert not fast.waiting
    assert not general.waiting
    assert fast.counts.requests == general.counts.requests
    assert fast.counts.received_bytes == general.counts.received_bytes
    if IS_COMPILED:
        assert fast.in_general < general.in_general - 50


@pytest.mark.parametrize("version", [9, 10, 13])
def test_refusal_of_a_waiting_batch_names_the_leader(
    pair: BrokerPair, version: int
) -> None:
    """A producer then needs no metadata to continue (KIP-951)."""
    number = len(pair.outcomes)
    assert pair.produce(version, partition=1, acks=-1) == "waits"
    for side in pair.sides:
        side.change_state(PLACE, leader_epoch=4)
    refusal = dict(pair.run())[number]
    assert f"error_code={codes.NOT_LEADER_OR_FOLLOWER}" in refusal
    assert ("CurrentLeader(leader_id=1, leader_epoch=" in refusal) == (version >= 10)


def test_consumer_of_many_idle_partitions_costs_no_comparison(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle cluster has thousands of partitions, and each waits for records."""
    kind = wire.FETCH.Request
    side = pair.sides[0]
    compared: list[Any] = []
    offsets_of = fetch_sessions.offsets_of

    def fetch(epoch: int) -> Outcome:
        topics = []
        if epoch == 0:
            parts = [kind.Topic.Partition(partition=number) for number in range(3)]
            topics = [kind.Topic(topic_id=side.topic_id("t"), partitions=parts)]
        request = kind(session_id=side.session_id, session_epoch=epoch, topics=topics)
        if epoch == 0:
            request.session_id = 0
        frame = wire.encode_request(wire.FETCH, 17, epoch, "client", request)
        return side.send(frame[4:], wire.FETCH, 17)

    for epoch in range(3):
        fetch(epoch)
    monkeypatch.setattr(
        fetch_sessions,
        "offsets_of",
        lambda log: compared.append(log) or offsets_of(log),  # type: ignore[func-returns-value]
    )
    assert fetch(3) == (3, f"Fetch.Response(session_id={SAME_ID})")
    assert not compared
    pair.produce(partition=1)
    assert fetch(4) == (4, f"Fetch.Response(session_id={SAME_ID})")
    assert len(compared) == 1  # the log end moved, the high watermark did not
