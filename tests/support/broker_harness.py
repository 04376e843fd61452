"""A broker without sockets that gets one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import logcore
from netshim import wire
from netshim.broker import Broker
from netshim.scheduling import PendingResponse
from netshim.session import ClientSession
from netshim.settings import Settings

SESSION = ClientSession("127.0.0.1", 9092, "127.0.0.1")


class BrokerHarness:
    """A broker that handles requests without sockets.

    With `at_once`, submitted work runs in the call that submits it; otherwise run() runs
    it.
    """

    def __init__(
        self,
        path: Path,
        *,
        at_once: bool = True,
        durability: str = "os",
        replicated: bool = False,
        **settings: Any,
    ) -> None:
        self.logdir = logcore.open_dir(
            path, create=True, durability=durability, replicated=replicated
        )
        self.now_ms = 1_000_000
        self.at_once = at_once
        self.submitted: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.broker = Broker(self.logdir, Settings(**settings), self._submit)
        self._handle = partial(self.broker.handle, SESSION)

    def _submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.submitted.append((work, done))
        if self.at_once:
            self.run()

    def run(self, limit: int = 1_000_000) -> None:
        while self.submitted and limit:
            limit -= 1
            work, done = self.submitted.pop(0)
            try:
                result = work()
            except Exception as error:
                result = error
            done(result)

    def send(
        self, api: Any, version: int, request: Any, client_id: str = "test"
    ) -> Any:
        """Send a request. Return the parts of the response, or a PendingResponse."""
        frame = bytearray(wire.encode_request(api, version, 1, client_id, request))
        reply = self._handle(memoryview(frame)[4:], self.now_ms)
        # The next request of a connection overwrites the buffer.
        frame[:] = b"\xee" * len(frame)
        return reply

    def ask(self, api: Any, version: int, request: Any, client_id: str = "test") -> Any:
        """Send a request, and return the response. It must be available at once."""
        return self.read(api, version, self.send(api, version, request, client_id))

    @staticmethod
    def read(api: Any, version: int, reply: Any) -> Any:
        if isinstance(reply, PendingResponse):
            assert reply.is_set, "the response is not available yet"
            reply = reply.value
        return wire.decode_response(api, version, b"".join(reply)[4:])[1]

    def fetch(
        self, offset: int, topic: str = "t", version: int = 12, **more: Any
    ) -> Any:
        request = wire.FETCH.Request
        part = request.Topic.Partition(
            partition=0, fetch_offset=offset, partition_max_bytes=1 << 20, **more
        )
        response = self.ask(
            wire.FETCH,
            version,
            request(topics=[request.Topic(topic=topic, partitions=[part])]),
        )
        return response.responses[0].partitions[0]

    @staticmethod
    def fetch_request(partitions: range, topic: str = "t") -> Any:
        request = wire.FETCH.Request
        parts = [
            request.Topic.Partition(partition=partition, partition_max_bytes=1 << 20)
            for partition in partitions
        ]
        return request(topics=[request.Topic(topic=topic, partitions=parts)])

    @staticmethod
    def produce_request(
        records: Any, topic: str = "t", partitions: int = 1, acks: int = 1
    ) -> Any:
        request = wire.PRODUCE.Request
        parts = [
            request.Topic.Partition(index=number, records=records)
            for number in range(partitions)
        ]
        return request(
            acks=acks,
            timeout_ms=1000,
            topic_data=[request.Topic(name=topic, partition_data=parts)],
        )

    def produce(self, records: Any, version: int = 9, **more: Any) -> Any:
        """Append records to partition 0, and return its part of the response."""
        response = self.ask(
            wire.PRODUCE, version, self.produce_request(records, **more)
        )
        return response.responses[0].partition_responses[0]

    def epochs(self, topic: str = "t") -> set[int]:
        """Return the leader epochs that three requests report for the partition, after
        checking that the broker accepts each request with the current epoch.
        """
        metadata = wire.METADATA.Request
        reported = (
            self.ask(wire.METADATA, 9, metadata(topics=[metadata.Topic(name=topic)]))
            .topics[0]
            .partitions[0]
        )
        epoch = reported.leader_epoch
        assert self.fetch(0, topic, current_leader_epoch=epoch).error_code == 0
        offsets = wire.LIST_OFFSETS.Request
        part = offsets.Topic.Partition(
            partition_index=0, timestamp=-1, current_leader_epoch=epoch
        )
        body = offsets(topics=[offsets.Topic(name=topic, partitions=[part])])
        listed = self.ask(wire.LIST_OFFSETS, 5, body).topics[0].partitions[0]
        ends = wire.OFFSET_FOR_LEADER_EPOCH.Request
        partition = ends.Topic.Partition(
            partition=0, leader_epoch=epoch, current_leader_epoch=epoch
        )
        body = ends(topics=[ends.Topic(topic=topic, partitions=[partition])])
        ended = self.ask(wire.OFFSET_FOR_LEADER_EPOCH, 4, body).topics[0].partitions[0]
        assert (listed.error_code, ended.error_code) == (0, 0)
        assert (listed.offset, ended.end_offset) == (
            self.logdir.partition(topic, 0).log_end_offset,
        ) * 2
        return {epoch, listed.leader_epoch, ended.leader_epoch}

    def close(self) -> None:
        self.broker.stop(self.now_ms)
        self.run()
        self.broker.state.security.close()
        self.logdir.close()
