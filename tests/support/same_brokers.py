"""Two brokers that get the same requests, one with the fast path and one without it.
Their responses must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from logcore.kernels import kernel
from logcore.recordbatch import encode
from netshim import wire
from netshim.request_counts import RequestCounts
from netshim.scheduling import CloseConnection, PendingResponse
from support.broker_harness import SESSION, BrokerHarness

NO_ID = bytes(16)
SAME_ID = 1
NOW_MS = 1_700_000_000_000
#: The response to a request, "waits", or "closed".
Outcome = Any


class ComparedBroker:
    """One of the two brokers, and its waiting requests."""

    def __init__(
        self, path: Path, durability: str, *, is_fast: bool, replicated: bool = False
    ) -> None:
        self.broker_harness = BrokerHarness(
            path, durability=durability, at_once=False, replicated=replicated
        )
        self.counts = self.broker_harness.broker.counts = RequestCounts()
        if not is_fast:
            self.broker_harness.broker._fast_path = None
        self.waiting: list[tuple[Any, int, PendingResponse]] = []
        #: The number of requests that the fast path can read.
        self.readable_count = 0
        #: The session id of the last response that had one.
        self.session_id = 0

    def counted_requests(self) -> int:
        """Return the number of requests whose time was counted."""
        counts = self.counts
        found = [*counts.seconds.values(), *counts.parked_seconds.values()]
        return sum(sum(histogram.counts) for histogram in found)

    def topic_id(self, name: str) -> bytes:
        try:
            return self.broker_harness.broker.state.topic_ids.id_of(name)
        except Exception:
            return bytes(range(16))

    def send(self, frame: bytes, api: Any, version: int) -> Outcome:
        self.readable_count += kernel.read_request(memoryview(frame)) is not None
        buffer = bytearray(frame)
        try:
            reply = self.broker_harness.broker.handle(
                SESSION, memoryview(buffer), self.broker_harness.now_ms
            )
        except CloseConnection:
            return "closed"
        finally:
            buffer[:] = b"\xee" * len(buffer)
        if isinstance(reply, PendingResponse):
            if reply.is_set:
                return self._decode(api, version, reply.value)
            self.waiting.append((api, version, reply))
            return "waits"
        return self._decode(api, version, reply)

    def take_responses(self) -> list[Outcome]:
        """Remove the requests that do not wait any longer, and return their responses."""
        done = [
            (number, row) for number, row in enumerate(self.waiting) if row[2].is_set
        ]
        for number, _ in reversed(done):
            del self.waiting[number]
        return [
            self._decode(api, version, reply.value) for _, (api, version, reply) in done
        ]

    def _decode(self, api: Any, version: int, reply: Any) -> Outcome:
        if reply is None or isinstance(reply, Exception):
            return repr(reply)
        frame = b"".join(map(bytes, reply))
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        correlation_id, response = wire.decode_response(api, version, frame[4:])
        if getattr(response, "session_id", 0):
            self.session_id = response.session_id
            response.session_id = SAME_ID  # the brokers choose different ids
        for topic in response.responses:
            topic.topic_id = NO_ID  # the brokers choose different ids
            for part in getattr(topic, "partitions", ()):
                part.records = bytes(part.records)
        return correlation_id, repr(response)


class BrokerPair:
    """A broker with the fast path and a broker without it, which get the same requests."""

    def __init__(
        self,
        path: Path,
        durability: str,
        side: Callable[..., ComparedBroker] = ComparedBroker,
    ) -> None:
        self.sides = [
            side(path / "fast", durability, is_fast=True),
            side(path / "general", durability, is_fast=False),
        ]
        self.outcomes: list[Outcome] = []

    def each(self, action: Callable[[ComparedBroker], object]) -> Any:
        """Do an action with both brokers, and return the result, which must be equal."""
        fast, general = (action(side) for side in self.sides)
        assert fast == general
        return fast

    def send(
        self, api: Any, version: int, build_request: Callable[[ComparedBroker], Any]
    ) -> Outcome:
        number = len(self.outcomes)

        def action(side: ComparedBroker) -> Outcome:
            frame = wire.encode_request(
                api, version, number, "client", build_request(side)
            )
            return side.send(frame[4:], api, version)

        outcome = self.each(action)
        self.outcomes.append(outcome)
        return outcome

    def produce(
        self,
        version: int = 9,
        *,
        topic: str = "t",
        partition: int = 0,
        acks: int = 1,
        records: bytes | None = None,
    ) -> Outcome:
        batch = batch_of(1) if records is None else records

        def build(side: ComparedBroker) -> Any:
            request = BrokerHarness.produce_request(batch, topic, acks=acks)
            request.topic_data[0].topic_id = side.topic_id(topic)
            request.topic_data[0].partition_data[0].index = partition
            return request

        return self.send(wire.PRODUCE, version, build)

    def fetch(
        self,
        offset: int,
        version: int = 12,
        *,
        topic: str = "t",
        partition: int = 0,
        wait_ms: int = 0,
        isolation: int = 1,
        min_bytes: int = 1,
        max_bytes: int = 1 << 20,
        epoch: int = -1,
        is_listed: bool = True,
        **part: Any,
    ) -> Outcome:
        """Fetch from a partition. An epoch above 0 continues the last session.

        A session uses the partition of its last request if the request lists none.
        """

        def build(side: ComparedBroker) -> Any:
            request = BrokerHarness.fetch_request(range(1), topic)
            request.session_epoch = epoch
            if epoch > 0:
                request.session_id = side.session_id
            request.max_wait_ms = wait_ms
            request.isolation_level = isolation
            request.min_bytes = min_bytes
            request.topics[0].topic_id = side.topic_id(topic)
            only = request.topics[0].partitions[0]
            only.partition = partition
            only.fetch_offset = offset
            only.partition_max_bytes = max_bytes
            for name, value in part.items():
                setattr(only, name, value)
            if not is_listed:
                request.topics = []
            return request

        return self.send(wire.FETCH, version, build)

    @property
    def session_epoch(self) -> int:
        """The epoch that continues the last session."""

        def epoch_of(side: ComparedBroker) -> int:
            session = side.broker_harness.broker.state.fetch_sessions.get(
                side.session_id
            )
            return 1 if session is None else session.epoch

        epoch: int = self.each(epoch_of)
        return epoch

    def log(self, action: Callable[[Any], object], topic: str = "t") -> Any:
        return self.each(
            lambda side: action(side.broker_harness.logdir.partition(topic, 0))
        )

    def directory(self, action: Callable[[Any], object]) -> None:
        for side in self.sides:
            action(side.broker_harness.logdir)

    def run(self) -> list[Outcome]:
        """Run submitted work, and return the responses that are ready."""

        def action(side: ComparedBroker) -> list[Outcome]:
            side.broker_harness.run()
            side.broker_harness.broker.tick(side.broker_harness.now_ms)
            side.broker_harness.run()
            return side.take_responses()

        found: list[Outcome] = self.each(action)
        self.outcomes += found
        return found

    def sleep(self, ms: int) -> list[Outcome]:
        for side in self.sides:
            side.broker_harness.now_ms += ms
        return self.run()

    def close(self) -> None:
        for side in self.sides:
            side.broker_harness.close()


def batch_of(
    count: int, *, producer: tuple[int, int, int] = (-1, -1, -1), **more: Any
) -> bytes:
    producer_id, epoch, sequence = producer
    rows = [(b"key %d" % row, b"v" * (row % 7 * 30)) for row in range(count)]
    return bytes(
        encode(
            rows,
            now_ms=NOW_MS,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            **more,
        )
    )
