"""Tests of netshim.connection: frames from bytes in any split, responses in order, and
bounded memory.
"""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netshim.connection import Connection, ConnectionMemory, Workload
from netshim.scheduling import CloseConnection, PendingResponse
from netshim.settings import Settings


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


class Host:
    """A connection whose handler stores frames and answers each with its own bytes, at
    once or when the test sets the answer.
    """

    def __init__(
        self,
        *,
        later: bool = False,
        budget: int | ConnectionMemory = 1 << 30,
        workload: int | Workload = 500,
        **settings: Any,
    ) -> None:
        self.frames: list[bytes] = []
        self.answers: list[PendingResponse] = []
        self.later = later
        self.readied = 0
        self.budget = ConnectionMemory(budget) if isinstance(budget, int) else budget
        self.workload = (
            Workload(workload, self.budget) if isinstance(workload, int) else workload
        )
        self.connection = Connection(
            self.handle,
            Settings(**settings),
            self.budget,
            self.workload,
            0,
            self.ready,
            self.tells,
        )

    def handle(self, view: memoryview, now_ms: int) -> Any:
        body = bytes(view)
        self.frames.append(body)
        if body.startswith(b"silent"):
            return None
        if not self.later:
            return [frame(body)]
        self.answers.append(PendingResponse(is_parked=body.startswith(b"parked")))
        return self.answers[-1]

    def tells(self, view: memoryview) -> bool:
        return bytes(view).startswith(b"tell")

    def ready(self) -> None:
        self.readied += 1

    def feed(self, data: bytes, step: int | None = None, now_ms: int = 0) -> None:
        at = 0
        while at < len(data):
            room = self.connection.get_buffer()
            size = min(len(room), len(data) - at, step or len(data))
            assert size, "there is room"
            room[:size] = data[at : at + size]
            self.connection.received(size, now_ms)
            at += size

    def sent(self) -> bytes:
        return b"".join(
            bytes(buffer) for buffer in iter(self.connection.next_buffer, None)
        )


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=30), st.integers(1, 1000))
def test_frames_are_complete_for_any_split_of_the_bytes(
    bodies: list[bytes], step: int
) -> None:
    host = Host()
    host.feed(b"".join(map(frame, bodies)), step)
    assert host.frames == bodies
    assert host.sent() == b"".join(
        frame(body) for body in bodies if not body.startswith(b"silent")
    )


@pytest.mark.parametrize(
    "size", [65_531, 65_532, 65_533, 100_000, 1_000_000, 5_000_000]
)
def test_buffer_grows_with_received_bytes_and_is_released(
    size: int,
) -> None:
    host = Host()
    body = random.Random(size).randbytes(size)
    host.feed(frame(b"small") + frame(body)[:100])
    assert host.budget.used_bytes == 0, "an announced size alone allocates nothing"
    host.feed(frame(body)[100:] + frame(b"after"))
    assert host.frames == [b"small", body, b"after"]
    # A buffer up to 4 MiB is kept for the next request, until the connection pauses.
    assert (host.budget.used_bytes > 0) == (size < 5_000_000)
    assert host.connection.overdue(999) is None
    assert (host.budget.used_bytes > 0) == (size < 5_000_000)
    host.feed(frame(b"again"))
    assert host.frames[-1] == b"again"
    assert host.connection.overdue(1_000) is None
    assert host.budget.used_bytes == 0
    host.feed(frame(body))
    assert host.frames[-1] == body


def test_buffer_is_released_at_once_if_memory_is_short() -> None:
    host = Host(budget=1_500_000)
    host.feed(frame(bytes(1_000_000)))
    assert host.budget.used_bytes == 0


def test_a_paused_connection_keeps_an_incomplete_frame() -> None:
    host = Host()
    body = random.Random(1).randbytes(500_000)
    host.feed(frame(body)[:400_000])
    assert host.connection.overdue(5_000) is None
    host.feed(frame(body)[400_000:], now_ms=5_000)
    assert host.frames == [body]


@pytest.mark.parametrize(
    "head", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x80\0\0\0", b"GEX ", b"\x06@\0\x01"]
)
def test_impossible_frame_sizes_close_the_connection(head: bytes) -> None:
    host = Host()
    with pytest.raises(CloseConnection, match="frame of"):
        host.feed(head + b"x" * 100)
    assert not host.frames


def test_responses_are_sent_in_the_order_of_requests() -> None:
    host = Host(later=True)
    host.feed(b"".join(frame(b"%d" % n) for n in range(6)))
    for n in (3, 1, 5):
        host.answers[n].set([frame(b"answer %d" % n)])
    assert host.sent() == b""
    host.answers[0].set([frame(b"answer 0")])
    assert host.sent() == frame(b"answer 0") + frame(b"answer 1")
    host.answers[2].set(None)
    host.answers[4].set([frame(b"answer 4")])
    assert host.sent() == frame(b"answer 3") + frame(b"answer 4") + frame(b"answer 5")
    assert host.connection.is_idle


def test_ready_response_waits_for_earlier_responses() -> None:
    host = Host(later=True)
    host.feed(frame(b"slow"))
    host.later = False
    host.feed(frame(b"fast"))
    assert host.sent() == b""
    host.answers[0].set([frame(b"slow")])
    assert host.sent() == frame(b"slow") + frame(b"fast")


def test_query_waits_for_earlier_changes() -> None:
    host = Host(later=True)
    host.feed(b"".join(map(frame, [b"change", b"again", b"tell", b"next"])))
    assert host.frames == [b"change", b"again"], "changes do not wait for one another"
    assert host.connection.is_waiting
    assert host.connection.is_full
    host.answers[1].set([frame(b"2")])
    assert host.connection.is_full
    host.answers[0].set([frame(b"1")])
    assert not host.connection.is_full
    host.connection.process(0)
    assert host.frames == [b"change", b"again", b"tell", b"next"], (
        "later changes do not wait for the query"
    )
    host.answers[3].set([frame(b"4")])
    host.answers[2].set([frame(b"3")])
    assert host.sent() == b"".join(map(frame, [b"1", b"2", b"3", b"4"]))


def test_query_does_not_wait_for_parked_requests() -> None:
    host = Host(later=True)
    host.feed(b"".join(map(frame, [b"parked", b"tell"])))
    assert host.frames == [b"parked", b"tell"]


def test_answer_that_is_already_set_is_sent() -> None:
    host = Host()
    answer = PendingResponse()
    answer.set([frame(b"done")])
    host.handle = lambda view, now_ms: answer  # type: ignore[method-assign]
    host.connection._handle = host.handle
    host.feed(frame(b"x"))
    assert host.sent() == frame(b"done")


def test_requests_beyond_the_pipeline_limit_wait_in_the_buffer() -> None:
    host = Host(later=True, max_pipelined_requests=4)
    host.feed(b"".join(frame(b"%d" % n) for n in range(10)))
    assert len(host.frames) == 4 and host.connection.is_full
    host.answers[0].set([b"a"])
    assert host.readied == 1 and not host.connection.is_full
    host.connection.process(0)
    assert len(host.frames) == 5
    for n in range(1, 10):
        host.answers[n].set([b"a"])
        host.connection.process(0)
    assert len(host.frames) == 10


def crowd(count: int, limit: int, **settings: Any) -> list[Host]:
    workload = Workload(limit, ConnectionMemory(1 << 30))
    return [Host(later=True, workload=workload, **settings) for _ in range(count)]


def test_active_requests_are_limited_over_all_connections() -> None:
    first, second, third = crowd(3, 4)
    first.feed(frame(b"parked") * 3 + frame(b"a") * 3)
    second.feed(frame(b"b") * 3)
    third.feed(frame(b"c"))
    assert (len(first.answers), len(second.frames), len(third.frames)) == (6, 1, 0)
    assert first.workload.count == 4, "parked requests do not count"
    assert not first.connection.is_full
    assert second.connection.is_full and third.connection.is_full, (
        "neither connection reads more while it waits"
    )
    first.answers[-1].set([b"a"])
    assert (second.readied, third.readied) == (1, 0), "in turn"
    third.connection.process(0)
    assert not third.frames
    second.connection.process(0)
    assert (len(second.frames), first.workload.count) == (2, 4)
    first.answers[-2].set([b"a"])
    assert third.readied == 1, (
        "the second connection processed one request, and then the third was next"
    )
    third.connection.process(0)
    assert (len(second.frames), len(third.frames)) == (2, 1)


def test_closed_connection_releases_its_requests_and_its_turn() -> None:
    first, second, third = crowd(3, 2)
    first.feed(frame(b"a") * 3 + frame(b"parked"))
    second.feed(frame(b"b"))
    third.feed(frame(b"c"))
    first.connection.close()
    assert first.workload.count == 0
    assert second.readied and not third.readied
    second.connection.close()
    assert third.readied
    third.connection.process(0)
    assert third.frames == [b"c"]
    first.answers[0].set([b"late"])
    assert first.workload.count == 1, "counted once"


def test_connection_with_unread_responses_yields_its_turn() -> None:
    first, second, third = crowd(3, 2, max_unread_bytes=1 << 16)
    second.feed(frame(b"parked"))
    first.feed(frame(b"a") * 2)
    second.feed(frame(b"b"))
    third.feed(frame(b"c"))
    second.answers[0].set([bytes(1 << 17)])  # its client does not read this response
    first.answers[0].set([b"a"])
    second.connection.process(0)
    assert third.readied == 1
    third.connection.process(0)
    assert (second.frames, third.frames) == ([b"parked"], [b"c"])
    second.sent()
    second.connection.process(0)
    assert second.frames == [b"parked"]
    first.answers[1].set([b"a"])
    second.connection.process(0)
    assert second.frames == [b"parked", b"b"]


@given(st.data())
def test_every_request_is_processed_for_any_order_of_events(
    data: st.DataObject,
) -> None:
    hosts = crowd(4, 3, max_pipelined_requests=3)
    owed: set[int] = set()
    for number in range(data.draw(st.integers(1, 40))):
        host = data.draw(st.sampled_from(hosts))
        if data.draw(st.booleans()):
            host.feed(
                frame(data.draw(st.sampled_from([b"parked", b"work"])) + b"%d" % number)
            )
        else:
            unset = [answer for answer in host.answers if not answer.is_set]
            if unset:
                data.draw(st.sampled_from(unset)).set([b"done"])
        assert hosts[0].workload.count <= 3
        owed.add(number)
    for _ in range(50):
        for host in hosts:
            if host.readied:
                host.readied = 0
                host.connection.process(0)
            for answer in host.answers:
                if not answer.is_set:
                    answer.set([b"done"])
    assert hosts[0].workload.count == 0
    assert not any(host.connection.is_waiting for host in hosts)


def test_answered_requests_wake_a_reader_that_waits_for_memory() -> None:
    host = Host(budget=200_000)
    host.budget.reserve_for_request(190_000)
    host.feed(frame(b"x" * 100_000)[: 64 << 10])
    assert not host.connection.can_receive()
    host.readied = 0
    host.budget.release(190_000)
    assert host.readied == 1 and host.connection.can_receive()


def test_shared_memory_budget_blocks_and_resumes_reading() -> None:
    host = Host(budget=100_000, max_request_bytes=10_000_000)
    host.feed(frame(b"x" * 1_000_000)[:100_000], 10_000)
    while host.connection.can_receive():
        room = host.connection.get_buffer()
        room[:] = b"x" * len(room)
        host.connection.received(len(room), 0)
    assert host.budget.used_bytes <= 100_000
    host.budget.limit_bytes = 1 << 30
    assert host.connection.can_receive() and len(host.connection.get_buffer())
    host.connection.close()
    assert host.budget.used_bytes == 0


class Crowd:
    """Connections that share a budget, each with bytes that are still to arrive. A step
    is a tick of the server.
    """

    def __init__(self, budget_bytes: int, **settings: Any) -> None:
        self.budget = ConnectionMemory(budget_bytes)
        self.settings = {"request_timeout_ms": 30_000, **settings}
        self.hosts: list[Host] = []
        self.coming: dict[Host, bytes] = {}
        self.ended: dict[Host, str] = {}
        self.now_ms = 0

    def join(self, data: bytes) -> Host:
        host = Host(budget=self.budget, **self.settings)
        self.hosts.append(host)
        self.coming[host] = data
        return host

    def step(self) -> None:
        self.now_ms += 50
        for host in [host for host in self.hosts if host not in self.ended]:
            while self.coming[host] and host.connection.can_receive():
                room = host.connection.get_buffer()
                buffer = self.coming[host][: len(room)]
                self.coming[host] = self.coming[host][len(buffer) :]
                room[: len(buffer)] = buffer
                host.connection.received(len(buffer), self.now_ms)
        for connection, reason in self.budget.select_slow_connections(
            self.now_ms, 30_000
        ).items():
            connection.fail(reason)
        for host in self.hosts:
            reason = (
                None if host in self.ended else host.connection.overdue(self.now_ms)
            )
            if reason is not None:
                self.ended[host] = reason
                host.connection.close()
        assert self.budget.used_bytes <= self.budget.limit_bytes
        held = sum(
            len(host.connection._buffer) - (64 << 10)
            for host in self.hosts
            if host not in self.ended
        )
        assert self.budget.used_bytes == held


HUGE = (100 << 20).to_bytes(4, "big")


def test_slow_clients_do_not_block_the_request_memory() -> None:
    """Connections that announced large requests and send few bytes are closed. A fast
    connection is served and never treated as slow.
    """
    crowd = Crowd(8 << 20)
    slow = [
        crowd.join(HUGE + bytes(size)) for size in [520 << 10] * 10 + [66 << 10] * 20
    ]
    for _ in range(40):
        crowd.step()
    for _ in range(3):
        good = crowd.join(frame(b"g" * 500_000))
        for _ in range(40):
            for host in slow:
                crowd.coming[host] += bytes(60)
            crowd.step()
        assert len(good.frames) == 1 and good not in crowd.ended
        for host in [
            host for host in slow if host in crowd.ended
        ]:  # they connect again
            slow[slow.index(host)] = crowd.join(HUGE + bytes(66 << 10))
    assert crowd.ended and all(
        "others wait" in reason for reason in crowd.ended.values()
    )


def test_deadlock_over_request_memory_closes_one_connection() -> None:
    """Each connection has a part of the memory that it needs, and none is slow. After a
    while one of them is closed in favor of the others.
    """
    crowd = Crowd(3 << 19)
    whole = frame(b"f" * 700_000)
    hosts = [crowd.join(whole[:300_000]) for _ in range(3)]
    crowd.step()
    for host in hosts:
        crowd.coming[host] += whole[300_000:]
    for _ in range(100):
        crowd.step()
    assert not any(host.frames for host in hosts) and not crowd.ended
    for _ in range(1_000):
        crowd.step()
    served = [host for host in hosts if host.frames]
    assert len(served) == 2 and len(crowd.ended) == 1


def test_fast_requests_wait_for_memory_and_none_is_lost() -> None:
    crowd = Crowd(1 << 20)
    hosts = [crowd.join(b"") for _ in range(8)]
    for first in range(0, 8, 2):
        for host in hosts[first : first + 2]:
            crowd.coming[host] = frame(b"f" * 400_000)
        crowd.step()
    for _ in range(20):
        crowd.step()
    assert all(len(host.frames) == 1 for host in hosts) and not crowd.ended


def test_request_larger_than_the_memory_closes_only_its_connection() -> None:
    crowd = Crowd(1 << 20)
    good = crowd.join(frame(b"g" * 300_000)[:-1])
    greedy = crowd.join(frame(b"x" * (2 << 20)))
    for _ in range(10):
        crowd.step()
    crowd.coming[good] = b"g"
    crowd.step()
    assert list(crowd.ended) == [greedy] and len(good.frames) == 1


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (bytes.fromhex("160301020001"), "security.protocol=PLAINTEXT"),
        (b"GET / HTTP/1.1\r\n", "speaks HTTP"),
        (b"\x7f\xff\xff\xff", "a frame of 2147483647 bytes"),
    ],
)
def test_clients_of_another_protocol_are_identified_in_the_error(
    start: bytes, words: str
) -> None:
    """A TLS client was logged as a frame of 369295618 bytes."""
    with pytest.raises(CloseConnection, match=words):
        Host().feed(start)


def test_closed_connection_is_released() -> None:
    """The connection and its host referred to each other, so that both remained in
    memory, with 64 KiB, until the cycle collector ran.
    """

    class Peer:
        def __init__(self, budget: ConnectionMemory) -> None:
            self.connection = Connection(
                self.handle, Settings(), budget, Workload(1, budget), 0, self.ready
            )

        def handle(self, view: memoryview, now_ms: int) -> Any:
            return self.answer

        def ready(self) -> None:
            raise AssertionError("it is closed")

    gc.disable()
    try:
        budget = ConnectionMemory(1 << 20)
        peer = Peer(budget)
        connection = peer.connection
        peer.answer = PendingResponse()
        data = frame(b"asks") + HUGE
        connection.get_buffer()[: len(data)] = data
        connection.received(len(data), 0)
        connection.close()
        assert len(connection._buffer) == 0
        peer.answer.set([b"too late"])
        peer_reference = weakref.ref(peer)
        del peer
        assert peer_reference() is None
        connection_reference = weakref.ref(connection)
        del connection
        assert connection_reference() is None
    finally:
        gc.enable()


def test_only_slow_requests_are_overdue() -> None:
    host = Host(request_timeout_ms=1_000, idle_timeout_ms=50_000)
    host.feed(frame(b"x" * 500_000)[:10], now_ms=100)
    assert host.connection.overdue(1_000) is None
    for now_ms in (500, 900):  # an occasional byte does not help
        host.feed(b"x", now_ms=now_ms)
    assert "came in 1100 ms" in (host.connection.overdue(1_200) or "")
    host = Host(request_timeout_ms=1_000, idle_timeout_ms=50_000)
    host.feed(frame(b"x" * 500_000)[:10], now_ms=100)
    host.feed(b"x" * 100_000, now_ms=1_050)
    assert host.connection.overdue(1_200) is None
    assert host.connection.overdue(2_300) is not None


def test_consecutive_frames_are_not_a_slow_request() -> None:
    host = Host(request_timeout_ms=1_000)
    whole = frame(b"y" * 50)
    host.feed(whole[:20], now_ms=0)
    for now_ms in range(500, 20_000, 500):
        host.feed(whole[20:] + whole[:20], now_ms=now_ms)
        assert host.connection.overdue(now_ms + 400) is None


def test_idle_connection_is_overdue_unless_it_waits_for_an_answer() -> None:
    host = Host(idle_timeout_ms=1_000, later=True)
    assert host.connection.overdue(999) is None
    assert "no request" in (host.connection.overdue(1_000) or "")
    host.feed(frame(b"x"), now_ms=10)
    assert host.connection.overdue(90_000) is None


def test_no_request_starts_after_an_answer_that_closes_the_connection() -> None:
    """The host closes the connection at its next check, and until then another request
    was handled.
    """
    host = Host(later=True)
    host.feed(frame(b"one"))
    host.answers[0].set(CloseConnection("refused"))
    host.feed(frame(b"two"))
    assert host.frames == [b"one"]
    assert host.connection.overdue(0) == "refused"


def test_draining_connection_accepts_no_more_requests() -> None:
    host = Host(later=True)
    host.feed(frame(b"one"))
    host.connection.drain()
    host.feed(frame(b"two"))
    assert host.frames == [b"one"]
    host.answers[0].set([b"1"])
    assert host.sent() == b"1" and host.connection.is_idle


def test_small_buffers_are_joined_and_large_buffers_are_not_copied() -> None:
    host = Host()
    large = memoryview(bytes(100_000))
    host.connection._handle = lambda view, now_ms: [b"head", large, b"tail"]
    host.feed(frame(b"x") * 2)
    buffers = list(iter(host.connection.next_buffer, None))
    assert [len(buffer) for buffer in buffers] == [4, 100_000, 8, 100_000, 4]
    assert buffers[1] is large
    host.feed(frame(b"x"))
    buffers = list(iter(lambda: host.connection.next_buffer(40_000), None))
    assert [len(buffer) for buffer in buffers] == [4, 40_000, 40_000, 20_000, 4]


def test_unread_responses_of_a_client_are_limited() -> None:
    host = Host(max_unread_bytes=1 << 20)
    host.connection._handle = lambda view, now_ms: [memoryview(bytes(400_000))]
    host.feed(frame(b"fetch") * 100)
    assert host.connection.unsent_bytes == 1_200_000 and host.connection.is_full
    answered = 3
    while host.connection.next_buffer(100_000) is not None:
        host.connection.process(0)
        assert host.connection.unsent_bytes <= 1_200_000 + 400_000
        answered += 1
    assert host.connection.is_idle and not host.connection.is_full
