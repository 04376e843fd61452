"""The requests of a follower, with a leader that a test plays."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import Log, recordbatch
from logcore.errors import RemoteUnavailableError
from logcore.fs import OS
from logcore.replication import following
from logcore.replication.state import InSyncReplica, LeaderAndIsr
from netshim import wire
from netshim.cluster.fetcher import (
    FetcherSettings,
    FollowedPartition,
    LeaderFetcher,
    last_epoch,
)
from netshim.wire import codes

LIMIT_S = 60
TOPIC_ID = uuid.UUID(int=7).bytes


class PlayedLeader:
    """Takes the place of PeerConnection. The test reads requests and sends responses."""

    def __init__(self, broker: int, address_of: object) -> None:
        self.requests: queue.Queue[Any] = queue.Queue()
        self.responses: queue.Queue[Any] = queue.Queue()
        self.closed = 0
        #: The time that the last request may wait.
        self.wait_ms = 0

    def request(self, api: object, request: Any, *, max_version: int) -> Any:
        self.requests.put(request)
        response = self.responses.get(timeout=LIMIT_S)
        if response is None:
            raise RemoteUnavailableError("the connection is lost")
        return response

    def interrupt(self) -> None:
        self.responses.put(None)

    def close(self) -> None:
        self.closed += 1

    # -- for the test ------------------------------------------------------------------

    def next_request(self) -> tuple[tuple[int, int], dict[int, int], list[int]]:
        """Return the session, the offsets by partition, and the forgotten partitions."""
        request = self.requests.get(timeout=LIMIT_S)
        self.wait_ms = request.max_wait_ms
        listed = {
            part.partition: part.fetch_offset
            for topic in request.topics
            for part in topic.partitions
        }
        forgotten = [
            number
            for topic in request.forgotten_topics_data
            for number in topic.partitions
        ]
        return (request.session_id, request.session_epoch), listed, sorted(forgotten)

    def answer(self, session_id: int = 5, error_code: int = 0, **parts: Any) -> None:
        """Send a response. The argument `_1` contains fields of partition 1."""
        kind = wire.FETCH.Response.Topic
        partitions = [
            kind.Partition(
                partition_index=int(name[1:]),
                **{"high_watermark": 0, "records": b"", **fields},
            )
            for name, fields in parts.items()
        ]
        topics = [kind(topic_id=TOPIC_ID, partitions=partitions)] if partitions else []
        self.responses.put(
            wire.FETCH.Response(
                session_id=session_id, error_code=error_code, responses=topics
            )
        )


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[Log]]:
    with logcore.open_dir(
        tmp_path / "d", create=True, replicated=True, durability="os"
    ) as directory:
        directory.host.place_topic("t", uuid.UUID(bytes=TOPIC_ID), 3, (0, 1, 2), {})
        yield [directory.partition("t", number) for number in range(3)]


@pytest.fixture
def fetcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[LeaderFetcher]:
    monkeypatch.setattr("netshim.cluster.fetcher.PeerConnection", PlayedLeader)
    opened = LeaderFetcher(1, OS, FetcherSettings(), lambda _: None, lambda *_: None)
    yield opened
    opened.close()


@pytest.fixture
def leader(fetcher: LeaderFetcher) -> PlayedLeader:
    played: Any = fetcher._connection
    return played


def followed(number: int, log: Log, leader_epoch: int = 0) -> FollowedPartition:
    members = {1: InSyncReplica(1, "d1"), 2: InSyncReplica(1, "d2")}
    state = LeaderAndIsr(1, leader_epoch, members, tuple(members))
    follower_state = following.follow(
        state,
        2,
        1,
        is_durable_first=False,
        log_start=log.log_start_offset,
        log_end=log.log_end_offset,
        last_epoch=last_epoch(log),
        high_watermark=log.high_watermark,
    )
    return FollowedPartition(("t", number), TOPIC_ID, log, follower_state)


def follow(fetcher: LeaderFetcher, partitions: list[FollowedPartition]) -> None:
    """Call LeaderFetcher.follow() for all partitions in one step, uninterrupted."""
    with fetcher._changed:
        for partition in partitions:
            fetcher._partitions[partition.key] = partition
            fetcher._due[partition] = None
        fetcher._changed.notify_all()


@pytest.fixture
def begin(
    fetcher: LeaderFetcher, leader: PlayedLeader, logs: list[Log]
) -> Callable[[], None]:
    """Return a function that follows all partitions, and begins a session."""

    def follow_all() -> None:
        follow(fetcher, [followed(number, log) for number, log in enumerate(logs)])
        assert leader.next_request() == ((0, 0), {0: 0, 1: 0, 2: 0}, [])
        leader.answer(_0={}, _1={}, _2={})

    return follow_all


def batch(value: bytes = b"v") -> bytes:
    return recordbatch.encode([(None, value)], now_ms=1, leader_epoch=0)


def test_idle_partitions_are_listed_once(
    begin: Callable[[], None], leader: PlayedLeader
) -> None:
    begin()
    for epoch in (1, 2, 3):
        assert leader.next_request() == ((5, epoch), {}, [])
        leader.answer()


def test_only_the_partition_with_records_is_listed_again(
    begin: Callable[[], None], leader: PlayedLeader, logs: list[Log]
) -> None:
    begin()
    assert leader.next_request() == ((5, 1), {}, [])
    leader.answer(_1={"records": batch(), "high_watermark": 0})
    assert leader.next_request() == ((5, 2), {1: 1}, [])
    leader.answer(_1={"high_watermark": 1})
    assert leader.next_request() == ((5, 3), {}, [])
    assert (logs[1].log_end_offset, logs[1].high_watermark) == (1, 1)
    leader.answer()


def test_partition_with_an_error_is_forgotten_until_it_is_tried_again(
    begin: Callable[[], None], leader: PlayedLeader
) -> None:
    """The leader repeats an error at once, in each response of the session."""
    begin()
    leader.next_request()
    leader.answer(_1={"error_code": codes.NOT_LEADER_OR_FOLLOWER})
    assert leader.next_request() == ((5, 2), {}, [1])
    epoch = 2
    while True:
        leader.answer()
        epoch += 1
        session, listed, forgotten = leader.next_request()
        assert (session, forgotten) == ((5, epoch), [])
        if listed:
            break
    assert listed == {1: 0}
    leader.answer()


def test_fetch_waits_longer_after_an_empty_response(
    begin: Callable[[], None], leader: PlayedLeader
) -> None:
    """An idle follower would otherwise send two requests a second to each leader."""
    begin()
    waits = []
    for parts in ({}, {"_1": {"records": batch(), "high_watermark": 0}}, {}, {}):
        leader.next_request()
        waits.append(leader.wait_ms)
        leader.answer(**parts)
    assert waits == [500, 2_500, 500, 2_500]


def test_fetch_waits_no_longer_while_a_partition_backs_off(
    begin: Callable[[], None], leader: PlayedLeader
) -> None:
    begin()
    leader.next_request()
    leader.answer(_1={"error_code": codes.NOT_LEADER_OR_FOLLOWER})
    is_listed = False
    while not is_listed:
        _, listed, _ = leader.next_request()
        is_listed = 1 in listed
        assert leader.wait_ms == 500
        leader.answer()


def test_unknown_session_is_begun_again(
    begin: Callable[[], None], leader: PlayedLeader
) -> None:
    begin()
    leader.next_request()
    leader.answer(0, codes.FETCH_SESSION_ID_NOT_FOUND)
    assert leader.next_request() == ((5, 0), {0: 0, 1: 0, 2: 0}, [])
    leader.answer(6, _0={}, _1={}, _2={})
    assert leader.next_request() == ((6, 1), {}, [])
    assert not leader.closed
    leader.answer(6)


def test_lost_connection_begins_another_session(
    begin: Callable[[], None], leader: PlayedLeader
) -> None:
    begin()
    leader.next_request()
    leader.interrupt()
    assert leader.next_request() == ((5, 0), {0: 0, 1: 0, 2: 0}, [])
    assert leader.closed
    leader.answer(6, _0={}, _1={}, _2={})


def test_without_a_session_all_partitions_are_listed_each_time(
    fetcher: LeaderFetcher, leader: PlayedLeader, logs: list[Log]
) -> None:
    follow(fetcher, [followed(0, logs[0])])
    for _ in range(3):
        assert leader.next_request() == ((0, 0), {0: 0}, [])
        leader.answer(0, _0={})


def test_dropped_partition_is_forgotten(
    begin: Callable[[], None], leader: PlayedLeader, fetcher: LeaderFetcher
) -> None:
    begin()
    leader.next_request()
    fetcher.drop(("t", 2))
    leader.answer(_2={"records": batch()})
    assert leader.next_request() == ((5, 2), {}, [2])
    leader.answer()


def test_next_role_of_a_partition_begins_another_session(
    begin: Callable[[], None],
    leader: PlayedLeader,
    fetcher: LeaderFetcher,
    logs: list[Log],
) -> None:
    """The next role does not have the high watermark that the former role received."""
    begin()
    leader.next_request()
    fetcher.drop(("t", 2))
    follow(fetcher, [followed(2, logs[2], leader_epoch=1)])
    leader.answer()
    session, listed, _ = leader.next_request()
    assert session[1] == 0 and listed == {0: 0, 1: 0, 2: 0}
    leader.answer(6, _0={}, _1={}, _2={})


def test_session_continues_while_partitions_are_added(
    leader: PlayedLeader,
    fetcher: LeaderFetcher,
    logs: list[Log],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A starting broker adds a thousand partitions. Only the first addition interrupts
    a fetch.
    """
    monkeypatch.setattr("netshim.cluster.fetcher._GROWTH_MS", 3_600_000)
    fetcher._added_ms = -3_600_000
    follow(fetcher, [followed(0, logs[0])])
    leader.next_request()
    leader.answer(_0={})
    assert leader.next_request() == ((5, 1), {}, [])
    assert leader.wait_ms == 500
    fetcher.follow(followed(1, logs[1]))
    assert leader.next_request() == ((5, 0), {0: 0, 1: 0}, [])
    assert leader.wait_ms < 500
    fetcher.follow(followed(2, logs[2]))
    leader.answer(6, _0={}, _1={})
    assert leader.next_request() == ((6, 1), {2: 0}, [])
    leader.answer(6)
