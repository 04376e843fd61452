"""No request leaves reference cycles, which only the cycle collector can free.

A broker that serves 1,000 records a second would leave 50,000 such objects a second.
The collector then freed them all at once and blocked the event loop for 60 to 75 ms,
every second.
"""

from __future__ import annotations

import gc
import socket
import struct
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logcore import LogFailedError
from logcore.recordbatch import encode
from netshim import wire
from netshim.scheduling import LoopTimers, PendingResponse, Waiters
from netshim.secured_testing import SecuredKafka
from netshim.wire.codec import Api
from support.broker_harness import BrokerHarness
from support.client import DEADLINE_S, Client
from support.conformance.report import SCRIPTS, served
from support.hostile_clients import HostileSimulation, LoggedErrors, WireClient

PASSWORD = "a password"
OUTCOMES = ["answered", "disconnected", "failed"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the cycle collector, and exclude the objects of earlier tests."""
    gc.disable()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def cyclic() -> Counter[str]:
    """Return the types of the objects in cycles that were created since the last call."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(type(each).__qualname__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


class DisconnectingSimulation(HostileSimulation):
    """Before each request of a script, another client sends the same request, and
    disconnects or gets an error before the answer.
    """

    def __init__(self, outcome: str) -> None:
        self.outcome = outcome
        self.holds = False
        super().__init__(3, 0, LoggedErrors(), "group")

    def run(self) -> None:
        while self.submitted and not self.holds:
            work, done = self.submitted.popleft()
            try:
                result = work()
            except Exception as error:
                result = error.with_traceback(None)
            done(result)

    def send_changed_copies(self, frame: bytes) -> None:
        if self.outcome == "answered":
            return
        client = WireClient(self)
        self.holds = True
        try:
            client.feed(frame)
        finally:
            if self.outcome == "disconnected":
                client.close()
            while self.outcome == "failed" and self.submitted:
                self.submitted.popleft()[1](LogFailedError("the disk failed"))
            self.holds = False
        self.run()
        client.close()


@pytest.fixture(params=OUTCOMES)
def simulation(request: pytest.FixtureRequest) -> HostileSimulation:
    return DisconnectingSimulation(request.param)


@pytest.mark.long
def test_requests_of_all_apis_leave_no_cycles(
    simulation: HostileSimulation, no_collector: None
) -> None:
    """Each API is tested in its newest and its oldest served version, under a policy
    that waits for syncs.
    """
    number = 0
    cycles: dict[str, Counter[str]] = {}
    for api in served():
        for version in {api.min_version, api.max_version}:
            for script in SCRIPTS[api]:
                number += 1
                simulation.run_script(api, version, script, number)
                left = cyclic()
                if left:
                    cycles[f"{api.name} v{version}"] = left
    simulation.end()
    assert not cycles


def fetch_of(offset: int, min_bytes: int, isolation_level: int) -> Any:
    request = BrokerHarness.fetch_request(range(1))
    request.max_wait_ms = 500
    request.min_bytes = min_bytes
    request.isolation_level = isolation_level
    request.topics[0].partitions[0].fetch_offset = offset
    return request


def woken(broker_harness: BrokerHarness, pending: PendingResponse) -> None:
    for _ in range(3):
        broker_harness.produce(encode([(None, bytes(100))], now_ms=1), acks=-1)


def expired(broker_harness: BrokerHarness, pending: PendingResponse) -> None:
    broker_harness.now_ms += 1_000
    broker_harness.broker.tick(broker_harness.now_ms)


def cancelled(broker_harness: BrokerHarness, pending: PendingResponse) -> None:
    pending.cancel()


def stopped(broker_harness: BrokerHarness, pending: PendingResponse) -> None:
    broker_harness.broker.stop(broker_harness.now_ms)


@pytest.mark.long
@pytest.mark.parametrize("durability", ["os", "group"])
@pytest.mark.parametrize(("min_bytes", "isolation_level"), [(1, 0), (300, 1)])
def test_waiting_fetches_leave_no_cycles(
    tmp_path: Path,
    no_collector: None,
    min_bytes: int,
    isolation_level: int,
    durability: str,
) -> None:
    broker_harness = BrokerHarness(tmp_path / "data", durability=durability)
    broker_harness.logdir.create_topic("t")
    broker_harness.produce(encode([(None, b"first")], now_ms=1))
    cyclic()  # cycles of the first opening
    for end in (woken, expired, cancelled, stopped):
        end_offset = broker_harness.logdir.partition("t", 0).log_end_offset
        pending = broker_harness.send(
            wire.FETCH, 12, fetch_of(end_offset, min_bytes, isolation_level)
        )
        assert isinstance(pending, PendingResponse) and not pending.is_set
        end(broker_harness, pending)
        assert pending.is_set or pending.is_cancelled
        del pending
        assert not cyclic(), end
    broker_harness.close()


@pytest.mark.long
@pytest.mark.parametrize("api", [wire.PRODUCE, wire.FETCH], ids=lambda api: api.name)
def test_logs_that_fail_to_open_leave_no_cycles(
    broker_harness: BrokerHarness,
    no_collector: None,
    monkeypatch: pytest.MonkeyPatch,
    api: Api[Any, Any],
) -> None:
    def fail(*_: object) -> None:
        raise LogFailedError("the disk failed")

    broker_harness.logdir.create_topic("t")
    monkeypatch.setattr(type(broker_harness.logdir), "partition", fail)
    cyclic()
    request = (
        broker_harness.fetch_request(range(1))
        if api is wire.FETCH
        else broker_harness.produce_request(encode([(None, b"v")], now_ms=1))
    )
    part = broker_harness.ask(api, 9, request).responses[0]
    assert "error_code=0" not in repr(part)
    del part, request
    assert not cyclic()


def test_fetch_cancelled_while_its_log_is_opened_does_not_wait(
    broker_harness: BrokerHarness,
) -> None:
    """A wait that begins after its answer was cancelled is cancelled too."""
    broker_harness.logdir.create_topic("t")
    broker_harness.at_once = False
    request = fetch_of(0, 1, 0)
    pending = broker_harness.send(wire.FETCH, 12, request)
    assert isinstance(pending, PendingResponse) and broker_harness.submitted
    pending.cancel()
    broker_harness.run()
    assert broker_harness.logdir.host.opened("t", 0) is not None
    assert (
        not broker_harness.broker.state.fetches.awaited_keys()
        and broker_harness.broker.next_ms is None
    )


@pytest.mark.parametrize("kind", ["timer", "append"])
def test_finished_waiters_are_released(kind: str) -> None:
    """A broker runs for months, and each waiting Fetch has a timer and waits for
    appends.
    """

    class Waiter:
        def look(self, now_ms: int) -> None:
            pass

    waiter = Waiter()
    reference = weakref.ref(waiter)
    if kind == "timer":
        timers = LoopTimers()
        timers.cancel(timers.at(10, waiter.look))
    else:
        waiting = Waiters()
        waiting.add([("t", 0), ("t", 1)], waiter.look)
        waiting.remove([("t", 0), ("t", 1)], waiter.look)
        assert not waiting.awaited_keys()
    del waiter
    assert reference() is None


def plain_bytes(client: Client, kafka: SecuredKafka) -> None:
    client.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")


def nothing(client: Client, kafka: SecuredKafka) -> None:
    """The client leaves before its handshake."""


def no_login(client: Client, kafka: SecuredKafka) -> None:
    client.use_tls(kafka.ca_file)


def wrong_password(client: Client, kafka: SecuredKafka) -> None:
    client.use_tls(kafka.ca_file)
    with pytest.raises(AssertionError, match="SaslAuthenticate"):
        client.log_in("alice", "wrong")


def login(client: Client, kafka: SecuredKafka) -> None:
    client.use_tls(kafka.ca_file)
    client.log_in("alice", PASSWORD)
    client.ask(wire.METADATA, 1, wire.METADATA.Request(topics=[]))


def reset(client: Client, kafka: SecuredKafka) -> None:
    login(client, kafka)
    linger = struct.pack("ii", 1, 0)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop of brokers that are started later."""
    if request.param == "uvloop":
        monkeypatch.delitem(sys.modules, "uvloop")
        pytest.importorskip("uvloop")


@pytest.mark.long
@pytest.mark.parametrize(
    "use", [nothing, plain_bytes, no_login, wrong_password, login, reset]
)
def test_tls_connections_leave_no_cycles(
    loop: None,
    kafka_secured: SecuredKafka,
    no_collector: None,
    use: Callable[[Client, SecuredKafka], None],
) -> None:
    """30 KB of each connection remained until a full collection."""
    kafka_secured.add_user("alice", PASSWORD)
    client_sockets = kafka_secured.server.server._connections.clients
    for _ in range(2):  # the first one also imports modules
        cyclic()
        client = Client(kafka_secured.port)
        use(client, kafka_secured)
        client.close()
        # Accepted after the first connection, which was therefore accepted too.
        last = Client(kafka_secured.port)
        last.use_tls(kafka_secured.ca_file)
        last.close()
        until = time.monotonic() + DEADLINE_S
        while client_sockets:
            assert time.monotonic() < until, "the connection has not ended"
            time.sleep(0.01)
        kafka_secured.server.call(lambda: None)
        cycles = cyclic()
    kept = {"ClientSocket", "SSLProtocol", "SSLObject", "Connection", "ClientSession"}
    assert not kept & cycles.keys(), cycles
