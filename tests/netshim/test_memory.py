"""Memory limits of a broker: one limit covers the state of all groups, transactional
ids and active requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import netshim
from logcore.recordbatch import encode
from netshim import wire
from netshim.connection import Connection, ConnectionMemory, Workload
from netshim.scheduling import PendingResponse
from netshim.settings import Settings
from netshim.wire import codes
from support.broker_harness import SESSION, BrokerHarness
from support.client import Client
from support.clusters import until

LIMIT = 1 << 20  # the smallest permitted limit
#: Session timeout of the members that fill the memory.
SESSION_MS = 60_000


@pytest.fixture
def small(tmp_path: Path) -> Any:
    broker_harness = BrokerHarness(
        tmp_path / "data",
        durability="os",
        max_remembered_bytes=LIMIT,
        group_consumer_session_timeout_ms=SESSION_MS,
    )
    # This request loads the groups.
    broker_harness.ask(
        wire.OFFSET_FETCH, 5, wire.OFFSET_FETCH.Request(group_id="g", topics=[])
    )
    yield broker_harness
    broker_harness.close()


def join(
    broker_harness: BrokerHarness,
    number: int,
    version: int = 3,
    size: int = 100_000,
    group: str = "",
) -> int:
    request = wire.JOIN_GROUP.Request
    asked = request(
        group_id=group or f"g{number}",
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=SESSION_MS,
        protocol_type="consumer",
        protocols=[request.Protocol(name="range", metadata=bytes(size))],
    )
    return int(broker_harness.ask(wire.JOIN_GROUP, version, asked).error_code)


def join_for_an_id(broker_harness: BrokerHarness, number: int) -> int:
    code = join(broker_harness, number, version=5, size=1)
    return 0 if code == codes.MEMBER_ID_REQUIRED else code


def heartbeat(broker_harness: BrokerHarness, number: int) -> int:
    asked = wire.CONSUMER_GROUP_HEARTBEAT.Request(
        group_id=f"g{number}",
        member_id=f"m{number}",
        rebalance_timeout_ms=1_000,
        subscribed_topic_names=[f"{name:0200}" for name in range(400)],
        topic_partitions=[],
    )
    return int(broker_harness.ask(wire.CONSUMER_GROUP_HEARTBEAT, 1, asked).error_code)


def take_id(broker_harness: BrokerHarness, number: int) -> int:
    asked = wire.INIT_PRODUCER_ID.Request(
        transactional_id=f"id-{number}", transaction_timeout_ms=1_000
    )
    return int(broker_harness.ask(wire.INIT_PRODUCER_ID, 4, asked).error_code)


def fill(
    broker_harness: BrokerHarness, ask: Callable[[BrokerHarness, int], int]
) -> None:
    """Request new groups or ids until the broker refuses them."""
    number = 0
    while (code := ask(broker_harness, number)) == 0:
        number += 1
    assert code == codes.COORDINATOR_NOT_AVAILABLE and number
    assert {ask(broker_harness, number + more) for more in range(5)} == {code}


@pytest.mark.parametrize("ask", [join, join_for_an_id, heartbeat, take_id])
def test_members_of_all_groups_share_one_limit(
    small: BrokerHarness, ask: Callable[[BrokerHarness, int], int]
) -> None:
    """The limits of a member and of a group do not limit their number: 1,990 requests
    of 1 MB occupied 2,979 MiB for 30 minutes.
    """
    fill(small, ask)
    state = small.broker.state
    assert (
        LIMIT * 0.8 < sum(held() for held in state.remembered.size_functions) <= LIMIT
    )


@pytest.mark.parametrize("ask", [join, join_for_an_id, heartbeat])
def test_removed_members_free_memory_for_others(
    small: BrokerHarness, ask: Callable[[BrokerHarness, int], int]
) -> None:
    fill(small, ask)
    small.now_ms += 6 * SESSION_MS
    small.broker.tick(small.now_ms)
    assert join(small, 0, group="other") == 0


def test_member_that_rejoins_repeatedly_is_counted_once(small: BrokerHarness) -> None:
    request = wire.JOIN_GROUP.Request
    asked = request(
        group_id="g",
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=SESSION_MS,
        protocol_type="consumer",
        protocols=[request.Protocol(name="range", metadata=bytes(300_000))],
    )
    asked.member_id = small.ask(wire.JOIN_GROUP, 3, asked).member_id
    for _ in range(20):
        small.now_ms += 6_000
        joined = small.ask(wire.JOIN_GROUP, 3, asked)
        assert joined.error_code == 0


def test_heartbeats_need_no_additional_memory(small: BrokerHarness) -> None:
    first = wire.CONSUMER_GROUP_HEARTBEAT.Request(
        group_id="g",
        member_id="m",
        rebalance_timeout_ms=1_000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    epoch = small.ask(wire.CONSUMER_GROUP_HEARTBEAT, 1, first).member_epoch
    fill(small, join)
    fill(
        small,
        lambda broker_harness, number: join_for_an_id(broker_harness, 10_000 + number),
    )
    # Continue until there is no memory left for a member.
    fill(small, lambda broker_harness, number: join_for_an_id(broker_harness, 0))
    again = wire.CONSUMER_GROUP_HEARTBEAT.Request(
        group_id="g", member_id="m", member_epoch=epoch
    )
    assert small.ask(wire.CONSUMER_GROUP_HEARTBEAT, 1, again).error_code == 0


def test_assignments_share_the_memory_limit(small: BrokerHarness) -> None:
    request = wire.JOIN_GROUP.Request
    error_codes = []
    for number in range(4):
        asked = request(
            group_id=f"g{number}",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=SESSION_MS,
            protocol_type="consumer",
            protocols=[request.Protocol(name="range", metadata=b"x")],
        )
        joined = small.ask(wire.JOIN_GROUP, 3, asked)
        sync = wire.SYNC_GROUP.Request
        lead = sync.Assignment(member_id=joined.member_id, assignment=bytes(400_000))
        led = sync(
            group_id=f"g{number}",
            generation_id=1,
            member_id=joined.member_id,
            assignments=[lead],
        )
        error_codes.append(small.ask(wire.SYNC_GROUP, 3, led).error_code)
    assert error_codes == [
        0,
        0,
        codes.COORDINATOR_NOT_AVAILABLE,
        codes.COORDINATOR_NOT_AVAILABLE,
    ]


# -- active requests -----------------------------------------------------------------


class Crowd:
    """Connections of a broker whose disk stalls."""

    def __init__(
        self, broker_harness: BrokerHarness, count: int, limit_bytes: int
    ) -> None:
        self.broker_harness = broker_harness
        self.budget = ConnectionMemory(limit_bytes)
        workload = Workload(500, self.budget)
        self.answers: list[Any] = []
        self.connections = [
            Connection(self.handle, Settings(), self.budget, workload, 0, lambda: None)
            for _ in range(count)
        ]

    def handle(self, frame: memoryview, now_ms: int) -> Any:
        reply = self.broker_harness.broker.handle(
            SESSION, frame, self.broker_harness.now_ms
        )
        self.answers.append(reply)
        return reply

    def feed(self, connection: Connection, data: bytes) -> bool:
        """Send data, and return whether all of it could be read."""
        at = 0
        while at < len(data):
            room = connection.get_buffer()
            if not room:
                return False
            size = min(len(room), len(data) - at)
            room[:size] = data[at : at + size]
            connection.received(size, 0)
            at += size
        return True


def test_waiting_produce_requests_share_the_buffer_limit(
    broker_harness: BrokerHarness,
) -> None:
    """Requests counted only until they were read, so that 500 requests of 100 MB could
    wait for one slow disk.
    """
    broker_harness.logdir.create_topic("t")
    broker_harness.at_once = False
    frame = wire.encode_request(
        wire.PRODUCE,
        9,
        1,
        "c",
        broker_harness.produce_request(encode([(None, bytes(900_000))], now_ms=1)),
    )
    crowd = Crowd(broker_harness, 20, 8 << 20)
    read = [crowd.feed(connection, frame) for connection in crowd.connections]
    held = sum(
        isinstance(pending, PendingResponse) and not pending.is_set
        for pending in crowd.answers
    )
    assert held == len(crowd.answers) and 3 <= held <= 9, (
        "not more than the limit waits for the disk"
    )
    assert crowd.budget.request_bytes > held * 900_000
    assert not all(read)
    assert crowd.budget.select_slow_connections(10**9, 30_000) == {}, (
        "closing a connection would not help"
    )
    broker_harness.run()
    assert all(pending.is_set for pending in crowd.answers)
    assert crowd.budget.request_bytes == 0
    for connection in crowd.connections:
        connection.close()
    assert crowd.budget.used_bytes == 0


def test_entries_of_unanswered_requests_share_the_buffer_limit(
    broker_harness: BrokerHarness,
) -> None:
    """A small frame may list 10,000 partitions, and Python uses 300 bytes for each."""
    broker_harness.logdir.create_topic("t")
    broker_harness.at_once = False
    asked = wire.LIST_OFFSETS.Request
    parts = [
        asked.Topic.Partition(partition_index=number, timestamp=-1)
        for number in range(900)
    ]
    frame = wire.encode_request(
        wire.LIST_OFFSETS,
        6,
        1,
        "c",
        asked(topics=[asked.Topic(name="t", partitions=parts)]),
    )
    crowd = Crowd(broker_harness, 20, 1 << 20)
    for connection in crowd.connections:
        crowd.feed(connection, frame)
    assert 3 <= len(crowd.answers) <= 5
    while len(crowd.answers) < 20 or crowd.budget.request_bytes:
        broker_harness.run()
        for connection in crowd.connections:
            connection.process(0)


def test_closed_connection_frees_the_memory_of_its_requests(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t")
    broker_harness.at_once = False
    frame = wire.encode_request(
        wire.PRODUCE,
        9,
        1,
        "c",
        broker_harness.produce_request(encode([(None, bytes(9_000))], now_ms=1)),
    )
    crowd = Crowd(broker_harness, 1, 8 << 20)
    crowd.feed(crowd.connections[0], frame * 3)
    assert crowd.budget.request_bytes > 27_000
    crowd.connections[0].close()
    assert crowd.budget.used_bytes == crowd.budget.request_bytes == 0
    broker_harness.run()


# -- open files ------------------------------------------------------------------------


def test_only_logs_without_waiting_requests_are_closed(tmp_path: Path) -> None:
    broker_harness = BrokerHarness(tmp_path / "data", durability="group")
    broker_harness.logdir.create_topic("t", 5)
    state = broker_harness.broker.state
    waiting = broker_harness.fetch_request(range(1))
    waiting.max_wait_ms = 10_000
    waiting.min_bytes = 1
    fetch = broker_harness.send(
        wire.FETCH, 12, waiting
    )  # waits for an append to partition 0
    for number in (1, 2):
        broker_harness.ask(
            wire.FETCH, 12, broker_harness.fetch_request(range(number, number + 1))
        )
    broker_harness.at_once = False
    batch = encode([(None, b"v")], now_ms=1)
    request = broker_harness.produce_request(batch, acks=-1)
    request.topic_data[0].partition_data[0].index = 1
    # This request waits for the sync of partition 1.
    produce = broker_harness.send(wire.PRODUCE, 9, request)
    assert not produce.is_set and not fetch.is_set
    state.logs.max_open_logs = lambda: 3
    broker_harness.ask(
        wire.OFFSET_FETCH, 5, wire.OFFSET_FETCH.Request(group_id="g", topics=[])
    )
    later = broker_harness.send(
        wire.FETCH, 12, broker_harness.fetch_request(range(3, 4))
    )
    broker_harness.run()
    assert {number for _, number in broker_harness.logdir.host.open_logs()} == {0, 1, 3}
    assert (
        broker_harness.read(wire.PRODUCE, 9, produce)
        .responses[0]
        .partition_responses[0]
        .error_code
        == 0
    )
    assert (
        broker_harness.read(wire.FETCH, 12, later).responses[0].partitions[0].error_code
        == 0
    )
    broker_harness.at_once = True
    assert broker_harness.produce(batch, acks=-1).error_code == 0
    assert broker_harness.read(wire.FETCH, 12, fetch).responses[0].partitions[0].records
    broker_harness.close()


def test_broker_at_the_limit_of_open_logs_seldom_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.logdir.create_topic("t", 100)
    broker_harness.broker.state.logs.max_open_logs = lambda: 20
    calls = 0
    host = type(broker_harness.logdir.host)
    open_logs = host.open_logs

    def counted(host: Any) -> Any:
        nonlocal calls
        calls += 1
        return open_logs(host)

    monkeypatch.setattr(host, "open_logs", counted)
    for number in [*range(100), *range(100)]:
        broker_harness.ask(
            wire.FETCH, 12, broker_harness.fetch_request(range(number, number + 1))
        )
        assert len(open_logs(broker_harness.logdir.host)) <= 20
    assert calls <= 200 / 8 + 1
    broker_harness.close()


def test_limit_of_open_logs_holds_after_topics_were_deleted(tmp_path: Path) -> None:
    """Room that was counted before the deletion does not exist afterwards."""
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.broker.state.logs.max_open_logs = lambda: 20
    for partitions in (22, 60):  # the 21st opening closes logs, and leaves room
        broker_harness.logdir.create_topic("t", partitions)
        for number in range(partitions):
            request = broker_harness.fetch_request(range(number, number + 1))
            broker_harness.ask(wire.FETCH, 12, request)
            assert len(broker_harness.logdir.host.open_logs()) <= 20
        broker_harness.logdir.delete_topic("t")
    broker_harness.close()


def test_recently_used_logs_remain_open(tmp_path: Path) -> None:
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.logdir.create_topic("t", 30)
    broker_harness.broker.state.logs.max_open_logs = lambda: 20
    for number in [*range(19), *range(10), 19, 20]:
        broker_harness.now_ms += 1
        broker_harness.broker.tick(broker_harness.now_ms)
        broker_harness.ask(
            wire.FETCH, 12, broker_harness.fetch_request(range(number, number + 1))
        )
    assert {number for _, number in broker_harness.logdir.host.open_logs()} >= {
        *range(10),
        19,
        20,
    }
    assert len(broker_harness.logdir.host.open_logs()) == 13
    broker_harness.close()


def test_partitions_of_one_request_are_open_together_if_they_fit(
    tmp_path: Path,
) -> None:
    """Some are open and were not used lately, and the request opens the others."""
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.logdir.create_topic("t", 30)
    broker_harness.broker.state.logs.max_open_logs = lambda: 20
    for numbers in (range(4), range(12, 28), range(12)):
        broker_harness.now_ms += 1
        broker_harness.broker.tick(broker_harness.now_ms)
        for each in (
            [numbers] if len(numbers) <= 12 else [[number] for number in numbers]
        ):
            response = broker_harness.ask(
                wire.FETCH, 12, broker_harness.fetch_request(each)
            )
            codes = {
                partition.error_code for partition in response.responses[0].partitions
            }
            assert codes == {0}, each
    broker_harness.close()


def test_new_client_closes_logs_to_get_a_file_descriptor(tmp_path: Path) -> None:
    with netshim.serve(tmp_path / "data", durability="os") as server:
        server.logdir.create_topic("t", 30)
        for number in range(30):
            server.logdir.partition("t", number)
        server.call(
            lambda: setattr(
                server.server.broker.state.logs, "max_open_logs", lambda: 20
            )
        )
        client = Client(server.port)
        client.ask(wire.API_VERSIONS, 0, wire.API_VERSIONS.Request())
        # The test's time limit bounds this.
        while len(server.logdir.host.open_logs()) > 20:
            time.sleep(0.01)
        client.sock.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("durability", "shared"), [("os", False), ("group", False), ("group", True)]
)
def test_open_logs_take_the_assumed_number_of_descriptors(
    tmp_path: Path, durability: str, shared: bool
) -> None:
    with netshim.serve(
        tmp_path / "data", durability=durability, shared=shared
    ) as kafka:
        logdir = kafka.server.logdir
        logdir.create_topic("t", 20)
        for number in range(20):
            logdir.partition("t", number).append(b"v")

        def taken() -> int:
            """Count the open files in directories of partitions."""
            folder = "/proc/self/fd"
            # No error if a file was closed after the list was made.
            files = [os.path.realpath(f"{folder}/{fd}") for fd in os.listdir(folder)]
            return sum(file.startswith(f"{tmp_path}/data/t-") for file in files)

        # Maintenance may have other files of a partition open for a moment.
        until(
            lambda: taken() == 20 * kafka.server._connections.files_per_log,
            "as many files",
        )
