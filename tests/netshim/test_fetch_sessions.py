"""Fetch sessions (KIP-227). conformance/data.py compares the answers with Kafka's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logcore.testing import SimulatedDisk
from netshim import fetch_sessions, wire
from netshim.fetch_sessions import EVICTION_MS, FetchSessions, SessionFetch, next_epoch
from netshim.fetch_wakeups import ANY_PARTITION
from netshim.secured_testing import start_secured
from netshim.testing import start
from netshim.wire import codes
from support.client import Client
from support.simulated_disk_broker import SimulatedDiskBroker

_VERSION = 11
T0 = 1_700_000_000_000


def topics_of(offsets: dict[tuple[str, int], int]) -> list[Any]:
    kind = wire.FETCH.Request.Topic
    return [
        kind(
            topic=name,
            partitions=[
                kind.Partition(
                    partition=number, fetch_offset=offset, partition_max_bytes=1 << 20
                )
            ],
        )
        for (name, number), offset in offsets.items()
    ]


def request_of(
    session_id: int,
    epoch: int,
    partitions: int = 0,
    *,
    replica: int = -1,
    forgotten: int = 0,
) -> Any:
    left = wire.FETCH.Request.ForgottenTopic
    return wire.FETCH.Request(
        replica_id=replica,
        session_id=session_id,
        session_epoch=epoch,
        topics=topics_of({("t", number): 0 for number in range(partitions)}),
        forgotten_topics_data=[left(topic="t", partitions=list(range(forgotten)))],
    )


@pytest.fixture
def sessions() -> FetchSessions:
    numbers = itertools.count(1)
    return FetchSessions(2, lambda size: next(numbers).to_bytes(size, "big"))


def begun(sessions: FetchSessions, request: Any, now_ms: int = 0) -> int:
    """Begin a session, and return its id; 0 if there is no room."""
    session_fetch = sessions.begin(request, _VERSION, now_ms)
    assert not isinstance(session_fetch, int)
    return 0 if session_fetch is None else session_fetch.session.id


# -- slots -----------------------------------------------------------------------------


def test_epoch_after_the_largest_is_1() -> None:
    assert next_epoch(1) == 2
    assert next_epoch(2**31 - 1) == 1


def test_session_is_declined_while_all_slots_are_in_use(
    sessions: FetchSessions,
) -> None:
    kept = [begun(sessions, request_of(0, 0, 3)) for _ in range(2)]
    assert 0 not in kept
    assert begun(sessions, request_of(0, 0, 5), EVICTION_MS) == 0
    assert (len(sessions), sessions.partitions) == (2, 6)


def test_larger_session_replaces_the_smallest_old_session(
    sessions: FetchSessions,
) -> None:
    small = begun(sessions, request_of(0, 0, 2))
    large = begun(sessions, request_of(0, 0, 4))
    for number in (small, large):  # not idle
        sessions.begin(request_of(number, 1), _VERSION, EVICTION_MS)
    later_ms = EVICTION_MS + 1
    assert begun(sessions, request_of(0, 0, 1), later_ms) == 0
    assert begun(sessions, request_of(0, 0, 3), later_ms)
    assert sessions.get(small) is None and sessions.get(large) is not None
    assert sessions.partitions == 7


def test_idle_session_is_replaced_by_a_smaller_session(sessions: FetchSessions) -> None:
    begun(sessions, request_of(0, 0, 4), 10)
    idle = begun(sessions, request_of(0, 0, 4))
    assert begun(sessions, request_of(0, 0, 1), EVICTION_MS + 1)
    assert sessions.get(idle) is None


def test_follower_replaces_a_session_of_a_consumer_at_once(
    sessions: FetchSessions,
) -> None:
    follower = begun(sessions, request_of(0, 0, 1, replica=2))
    consumer = begun(sessions, request_of(0, 0, 9))
    assert begun(sessions, request_of(0, 0, 1, replica=3))
    assert sessions.get(follower) is not None and sessions.get(consumer) is None
    # Consumers do not replace sessions of followers, and young followers remain.
    assert begun(sessions, request_of(0, 0, 9), 1) == 0
    assert begun(sessions, request_of(0, 0, 9, replica=4), 1) == 0


def test_no_slots_decline_every_session() -> None:
    sessions = FetchSessions(0, lambda size: bytes([1] * size))
    assert begun(sessions, request_of(0, 0, 1)) == 0


def test_partitions_of_all_sessions_are_limited(
    sessions: FetchSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_sessions, "_MAX_PARTITIONS", 5)
    assert begun(sessions, request_of(0, 0, 6)) == 0
    first = begun(sessions, request_of(0, 0, 3))
    assert begun(sessions, request_of(0, 0, 3)) == 0
    # A session that grows beyond the limit is closed, and its client begins again.
    grown = sessions.begin(request_of(first, 1, 6), _VERSION, 0)
    assert grown == codes.FETCH_SESSION_ID_NOT_FOUND
    assert (len(sessions), sessions.partitions) == (0, 0)


def test_partitions_of_one_session_are_limited(
    sessions: FetchSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request compares all partitions of its session in one step of the loop."""
    monkeypatch.setattr(fetch_sessions, "_MAX_OF_SESSION", 5)
    assert begun(sessions, request_of(0, 0, 6)) == 0
    first = begun(sessions, request_of(0, 0, 5))
    assert begun(sessions, request_of(0, 0, 5))
    grown = sessions.begin(request_of(first, 1, 6), _VERSION, 0)
    assert grown == codes.FETCH_SESSION_ID_NOT_FOUND
    assert (len(sessions), sessions.partitions) == (1, 5)


def test_forgotten_topics_take_no_memory(sessions: FetchSessions) -> None:
    kind = wire.FETCH.Request
    number = begun(sessions, request_of(0, 0, 1))
    for epoch in range(1, 101):
        topic = kind.Topic(
            topic=f"new{epoch}", partitions=[kind.Topic.Partition(partition=0)]
        )
        former = kind.ForgottenTopic(topic=f"new{epoch - 1}", partitions=[0])
        request = kind(
            session_id=number,
            session_epoch=epoch,
            topics=[topic],
            forgotten_topics_data=[former],
        )
        assert isinstance(sessions.begin(request, _VERSION, 0), SessionFetch)
    session = sessions.get(number)
    assert session is not None
    assert sessions.partitions == 2
    assert len(session._topics) == 2


def test_session_without_partitions_is_closed(sessions: FetchSessions) -> None:
    number = begun(sessions, request_of(0, 0, 2))
    assert sessions.begin(request_of(number, 1, forgotten=2), _VERSION, 0) is None
    assert (len(sessions), sessions.partitions) == (0, 0)


def test_names_and_ids_are_not_mixed(sessions: FetchSessions) -> None:
    number = begun(sessions, request_of(0, 0, 2))
    refused = sessions.begin(request_of(number, 1), 13, 0)
    assert refused == codes.FETCH_SESSION_TOPIC_ID_ERROR
    assert isinstance(sessions.begin(request_of(number, 1), 12, 0), SessionFetch)


def test_answer_to_an_overtaken_request_is_refused(sessions: FetchSessions) -> None:
    number = begun(sessions, request_of(0, 0, 2))
    first = sessions.begin(request_of(number, 1), _VERSION, 0)
    second = sessions.begin(request_of(number, 2), _VERSION, 0)
    assert isinstance(first, SessionFetch) and isinstance(second, SessionFetch)
    response = first.complete(wire.FETCH.Response())
    assert response.error_code == codes.INVALID_FETCH_SESSION_EPOCH
    assert not second.complete(wire.FETCH.Response()).error_code


# -- a broker --------------------------------------------------------------------------


class Fetcher:
    """A client with a fetch session at a broker without sockets."""

    def __init__(self, broker: SimulatedDiskBroker, version: int = _VERSION) -> None:
        self.broker = broker
        self.version = version
        self.id = self.epoch = 0

    def fetch(
        self, offsets: dict[tuple[str, int], int] | None = None, **more: Any
    ) -> dict[tuple[str, int], Any]:
        fields = {"max_wait_ms": 0, "max_bytes": 1 << 20, **more}
        response = self.broker.ask(
            wire.FETCH,
            self.version,
            session_id=self.id,
            session_epoch=self.epoch,
            topics=topics_of(offsets or {}),
            **fields,
        )
        assert not response.error_code, response.error_code
        self.id = response.session_id
        self.epoch = next_epoch(self.epoch)
        return {
            (topic.topic, part.partition_index): part
            for topic in response.responses
            for part in topic.partitions
        }


@pytest.fixture
def still() -> Iterator[SimulatedDiskBroker]:
    broker = SimulatedDiskBroker(SimulatedDisk(), T0, "os")
    broker.logdir.create_topic("t", 3)
    yield broker
    broker.stop()


def places(count: int = 3) -> dict[tuple[str, int], int]:
    return {("t", number): 0 for number in range(count)}


def test_only_changed_partitions_are_answered(still: SimulatedDiskBroker) -> None:
    fetcher = Fetcher(still)
    assert len(fetcher.fetch(places())) == 3
    assert fetcher.id
    assert fetcher.fetch() == {}
    still.logdir.append("t", b"v", partition=1)
    for _ in range(2):  # until the client takes the records
        assert list(fetcher.fetch()) == [("t", 1)]
    # As in Kafka, a partition without records is also sent if its ends have changed.
    assert fetcher.fetch({("t", 1): 1}) == {}
    still.logdir.append("t", b"v", partition=2)
    assert list(fetcher.fetch()) == [("t", 2)]


def test_partition_is_read_again_only_after_a_change(
    still: SimulatedDiskBroker,
) -> None:
    """Reading a log without news costs more than comparing its offsets."""
    fetcher = Fetcher(still)
    fetcher.fetch(places())
    fetcher.fetch()
    session = still.broker.state.fetch_sessions.get(fetcher.id)
    assert session is not None
    assert all(partition.unchanged_since for partition in session.partitions.values())
    still.logdir.append("t", b"v", partition=1)
    fetcher.fetch()
    assert [
        bool(partition.unchanged_since) for partition in session.partitions.values()
    ] == [
        True,
        True,
        False,  # answered partitions move to the end
    ]


@pytest.fixture
def followed(
    still: SimulatedDiskBroker, monkeypatch: pytest.MonkeyPatch
) -> tuple[Fetcher, list[Any]]:
    """A follower without news, and the logs whose offsets are compared for it.

    As in a cluster, each append wakes the fetches that wait.
    """
    state = still.broker.state
    state.fetches.has_other_writers = False
    monkeypatch.setattr(state.leadership, "is_in_sync", lambda *_: True)
    compared: list[Any] = []
    offsets_of = fetch_sessions.offsets_of
    monkeypatch.setattr(
        fetch_sessions,
        "offsets_of",
        lambda log: compared.append(log) or offsets_of(log),  # type: ignore[func-returns-value]
    )
    fetcher = Fetcher(still)
    fetcher.fetch(places(), replica_id=2)
    fetcher.fetch(replica_id=2)
    compared.clear()
    return fetcher, compared


def append(still: SimulatedDiskBroker, number: int) -> None:
    still.logdir.append("t", b"v", partition=number)
    still.broker.state.fetches.wake([("t", number)], still.now_ms)


def test_idle_follower_costs_no_comparison(
    followed: tuple[Fetcher, list[Any]], still: SimulatedDiskBroker
) -> None:
    """The cost must not depend on the number of partitions, because an idle cluster has
    thousands.
    """
    fetcher, compared = followed
    for _ in range(3):
        assert fetcher.fetch(replica_id=2) == {}
    assert not compared
    append(still, 1)
    assert list(fetcher.fetch(replica_id=2)) == [("t", 1)]
    assert list(fetcher.fetch({("t", 1): 1}, replica_id=2)) == []
    compared.clear()
    assert fetcher.fetch(replica_id=2) == {}
    assert not compared
    # The retention deletes records without an append.
    still.logdir.partition("t", 1).delete_records(1)
    assert fetcher.fetch(replica_id=2) == {}
    still.tick(5_000)
    (part,) = fetcher.fetch(replica_id=2).values()
    assert part.log_start_offset == 1


@pytest.mark.parametrize("change", ["append", "topic", "forget"])
def test_waiting_fetch_of_a_follower_ends_when_a_partition_changes(
    followed: tuple[Fetcher, list[Any]], still: SimulatedDiskBroker, change: str
) -> None:
    fetcher, _ = followed
    request = wire.FETCH.Request(
        replica_id=2,
        max_wait_ms=1_000,
        min_bytes=1,
        session_id=fetcher.id,
        session_epoch=fetcher.epoch,
    )
    if change == "forget":
        left = wire.FETCH.Request.ForgottenTopic
        request.forgotten_topics_data = [left(topic="t", partitions=[0])]
    frame = memoryview(wire.encode_request(wire.FETCH, _VERSION, 1, "me", request))[4:]
    reply: Any = still.broker.handle(still.session, frame, still.now_ms)
    still.tick(1)
    assert not reply.is_set
    if change == "topic":
        still.logdir.delete_topic("t")
        still.broker.state.fetches.wake([("t", 2)], still.now_ms)
    else:
        append(still, 2)
    assert reply.is_set
    data = b"".join(bytes(piece) for piece in reply.value)
    _, response = wire.decode_response(wire.FETCH, _VERSION, memoryview(data)[4:])
    partitions = [
        partition for topic in response.responses for partition in topic.partitions
    ]
    if change == "topic":
        assert {entry.error_code for entry in partitions} == {
            codes.UNKNOWN_TOPIC_OR_PARTITION
        }
    else:
        assert [entry.partition_index for entry in partitions] == [2]
        assert partitions[0].records


@pytest.mark.parametrize("has_news", [True, False])
def test_waiting_fetch_of_a_session_gets_new_records(
    still: SimulatedDiskBroker, has_news: bool
) -> None:
    fetcher = Fetcher(still)
    fetcher.fetch(places())
    request = wire.FETCH.Request(
        max_wait_ms=1_000,
        min_bytes=1,
        session_id=fetcher.id,
        session_epoch=1,
    )
    frame = memoryview(wire.encode_request(wire.FETCH, _VERSION, 1, "me", request))[4:]
    reply: Any = still.broker.handle(still.session, frame, T0)
    still.tick(999)
    assert not reply.is_set
    if has_news:
        still.logdir.append("t", b"v", partition=2)
    still.tick(0 if has_news else 1)
    assert reply.is_set
    data = b"".join(bytes(piece) for piece in reply.value)
    _, response = wire.decode_response(wire.FETCH, _VERSION, memoryview(data)[4:])
    answered = [
        part.partition_index
        for topic in response.responses
        for part in topic.partitions
    ]
    assert answered == ([2] if has_news else [])


def test_limit_of_bytes_keeps_no_partition_from_being_read(
    still: SimulatedDiskBroker,
) -> None:
    for number in range(3):
        for _ in range(9):
            still.logdir.append("t", b"v" * 100, partition=number)
    fetcher = Fetcher(still)
    fetched = fetcher.fetch(places(), max_bytes=1)
    read_keys = [key for key, part in fetched.items() if part.records]
    offsets = dict.fromkeys(read_keys, 1)
    for _ in range(2):
        fetched = fetcher.fetch(offsets, max_bytes=1)
        (key,) = (key for key, part in fetched.items() if part.records)
        read_keys.append(key)
        offsets = {key: 1}
    assert sorted(read_keys) == sorted(places())


def test_topic_that_is_created_again_has_another_id(still: SimulatedDiskBroker) -> None:
    kind = wire.FETCH.Request.Topic
    part = kind.Partition(partition=0, partition_max_bytes=100)
    topic_id = still.logdir.topic_id("t").bytes

    def fetch(session_id: int, epoch: int, topics: list[Any]) -> Any:
        return still.ask(
            wire.FETCH,
            13,
            max_wait_ms=0,
            session_id=session_id,
            session_epoch=epoch,
            topics=topics,
        )

    first = fetch(0, 0, [kind(topic_id=topic_id, partitions=[part])])
    assert not first.responses[0].partitions[0].error_code
    assert fetch(first.session_id, 1, []).responses == []
    still.logdir.delete_topic("t")
    still.logdir.create_topic("t", 1)
    for epoch in (2, 3):
        (topic,) = fetch(first.session_id, epoch, []).responses
        assert topic.topic_id == topic_id
        assert topic.partitions[0].error_code == codes.UNKNOWN_TOPIC_ID


# -- parts around the handler ----------------------------------------------------------


def ask_in_session(client: Client, session_id: int, epoch: int, **places: int) -> Any:
    return client.ask(
        wire.FETCH,
        _VERSION,
        wire.FETCH.Request(
            max_wait_ms=0,
            max_bytes=1 << 20,
            session_id=session_id,
            session_epoch=epoch,
            topics=topics_of({(name, 0): at for name, at in places.items()}),
        ),
    )


def codes_of(response: Any) -> dict[str, int]:
    return {
        topic.topic: part.error_code
        for topic in response.responses
        for part in topic.partitions
    }


def test_rules_apply_to_every_fetch_of_a_session(tmp_path: Path) -> None:
    """A topic remains in the session while the user may not read it."""
    kafka = start_secured(tmp_path / "data")
    try:
        kafka.server.logdir.create_topic("open")
        kafka.server.logdir.create_topic("shut")
        kafka.add_user("alice", "correct")
        kafka.allow("alice", "read", topic="open")
        client = Client(kafka.server.server.listeners[0].port)
        client.use_tls(kafka.ca_file)
        client.log_in("alice", "correct")
        first = ask_in_session(client, 0, 0, open=0, shut=0)
        refused = codes.TOPIC_AUTHORIZATION_FAILED
        assert codes_of(first) == {"open": 0, "shut": refused}
        assert first.session_id
        again = ask_in_session(client, first.session_id, 1)
        assert codes_of(again) == {"shut": refused}
        kafka.allow("alice", "read", topic="shut")
        allowed = ask_in_session(client, first.session_id, 2)
        assert codes_of(allowed) == {"shut": 0}
        assert ask_in_session(client, first.session_id, 3).responses == []
        client.sock.close()
    finally:
        kafka.stop()


def test_fault_rules_apply_to_the_partitions_of_a_session(tmp_path: Path) -> None:
    kafka = start(tmp_path / "data")
    try:
        for name in ("a", "b"):
            kafka.logdir.create_topic(name)
        client = Client(int(kafka.bootstrap_servers.rpartition(":")[2]))
        first = ask_in_session(client, 0, 0, a=0, b=0)
        with kafka.faults() as faults:
            faults.answer("Fetch", "KAFKA_STORAGE_ERROR", topic="a")
            failed = ask_in_session(client, first.session_id, 1)
        assert codes_of(failed) == {"a": codes.KAFKA_STORAGE_ERROR}
        assert codes_of(ask_in_session(client, first.session_id, 2)) == {"a": 0}
        assert ask_in_session(client, first.session_id, 3).responses == []
        client.sock.close()
    finally:
        kafka.stop()


def test_append_wakes_idle_session_of_a_follower(still: SimulatedDiskBroker) -> None:
    """An idle session waits for any partition, apart from the fetches of consumers."""
    fetches = still.broker.state.fetches
    woken: list[int] = []
    fetches.of_followers.add([ANY_PARTITION], woken.append)
    fetches.wake_consumers(("t", 0), 1)
    assert not woken
    fetches.wake_followers(("t", 0), 2)
    fetches.wake([("t", 0)], 3)
    assert woken == [2, 3]
