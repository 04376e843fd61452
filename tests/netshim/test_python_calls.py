"""The number of Python functions that a usual request calls, from its bytes to its response.

A broker that handles few requests runs with cold caches, so its processor time follows
the number of functions. The counts do not depend on the machine. They include appends
by idempotent producers, and exclude the event loop and the socket.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from logcore.recordbatch import encode
from netshim import wire
from netshim.broker import reports_changes
from netshim.connection import Connection, ConnectionMemory, Workload
from support.broker_harness import SESSION, BrokerHarness
from support.kernels import runs_compiled

pytestmark = runs_compiled

#: Requests that are counted together: every index entry of a log costs some calls.
ROUNDS: Final = 100


class Client:
    """Two connections to a broker: one for Produce, one for Fetch."""

    def __init__(self, path: Path, durability: str) -> None:
        self.broker_harness = BrokerHarness(path, durability=durability)
        self.broker_harness.logdir.create_topic("t", 1)
        self.sequence = 0
        self.producer, self.consumer = self._connect(), self._connect()
        self.produce(-1)
        self.fetch(0)

    def _connect(self) -> Connection:
        budget = ConnectionMemory(1 << 28)
        broker = self.broker_harness.broker
        return Connection(
            partial(broker.handle, SESSION),
            broker.state.settings,
            budget,
            Workload(1000, budget),
            0,
            lambda: None,
            reports_changes,
        )

    def _send(self, connection: Connection, frame: bytes) -> None:
        buffer = connection.get_buffer()
        buffer[: len(frame)] = frame
        connection.received(len(frame), self.broker_harness.now_ms)

    def produce_frame(self, acks: int, producer_id: int = -1) -> bytes:
        sequence = self.sequence if producer_id >= 0 else -1
        batch = encode(
            [(b"k", b"v" * 100)],
            now_ms=1,
            producer_id=producer_id,
            producer_epoch=min(producer_id, 0),
            base_sequence=sequence,
        )
        self.sequence += producer_id >= 0
        request = BrokerHarness.produce_request(bytes(batch), acks=acks)
        return wire.encode_request(wire.PRODUCE, 9, 1, "client", request)

    @staticmethod
    def fetch_frame(offset: int) -> bytes:
        request = BrokerHarness.fetch_request(range(1))
        request.max_wait_ms = 500
        request.min_bytes = 1
        request.isolation_level = 1
        request.topics[0].partitions[0].fetch_offset = offset
        return wire.encode_request(wire.FETCH, 12, 1, "client", request)

    def produce(self, acks: int) -> None:
        self._send(self.producer, self.produce_frame(acks))
        assert self.producer.next_buffer() is not None

    def fetch(self, offset: int) -> None:
        self._send(self.consumer, self.fetch_frame(offset))
        assert self.consumer.next_buffer() is not None

    def calls(self, *frames: tuple[Connection, Callable[[], bytes]]) -> float:
        """Return the calls for the frames, which all are answered at the end."""
        count = 0

        def profile(frame: Any, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        for _ in range(ROUNDS):
            for connection, make in frames:
                frame = make()
                buffer = connection.get_buffer()
                buffer[: len(frame)] = frame
                sys.setprofile(profile)
                connection.received(len(frame), self.broker_harness.now_ms)
                sys.setprofile(None)
            for connection, _ in frames:
                sys.setprofile(profile)
                assert connection.next_buffers()
                sys.setprofile(None)
        return count / ROUNDS


@pytest.fixture(params=["os", "group"])
def client(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    opened = Client(tmp_path, request.param)
    yield opened
    opened.broker_harness.close()


@pytest.mark.parametrize("client", ["os"], indirect=True)
@pytest.mark.parametrize("acks", [1, -1])
def test_a_produce_calls_few_functions(client: Client, acks: int) -> None:
    calls = client.calls((client.producer, lambda: client.produce_frame(acks)))
    assert calls <= 25


@pytest.mark.parametrize("client", ["os"], indirect=True)
def test_a_produce_of_an_idempotent_producer_calls_few_functions(
    client: Client,
) -> None:
    client._send(client.producer, client.produce_frame(-1, producer_id=7))
    assert client.producer.next_buffer() is not None
    calls = client.calls(
        (client.producer, lambda: client.produce_frame(-1, producer_id=7))
    )
    assert calls <= 35


@pytest.mark.parametrize("client", ["os"], indirect=True)
def test_a_fetch_calls_few_functions(client: Client) -> None:
    log = client.broker_harness.logdir.partition("t", 0)
    calls = client.calls(
        (client.consumer, lambda: client.fetch_frame(log.log_end_offset - 1))
    )
    assert calls <= 25


@pytest.mark.parametrize("client", ["os"], indirect=True)
def test_a_large_fetch_calls_few_functions(client: Client) -> None:
    """The fetch returns more records than are copied at once."""
    batch = bytes(encode([(b"k", b"v" * 50_000)], now_ms=1))
    for _ in range(4):
        client.broker_harness.produce(batch)
    calls = client.calls((client.consumer, lambda: client.fetch_frame(1)))
    assert calls <= 85


def test_a_produce_that_wakes_a_fetch_calls_few_functions(client: Client) -> None:
    log = client.broker_harness.logdir.partition("t", 0)
    calls = client.calls(
        (client.consumer, lambda: client.fetch_frame(log.log_end_offset)),
        (client.producer, lambda: client.produce_frame(-1)),
    )
    limit = 80 if client.broker_harness.logdir.durability.kind == "os" else 130
    assert calls <= limit
