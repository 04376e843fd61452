"""Large requests in chunks: the answers are the same, other requests are served between
two chunks, and order and memory limits are kept.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logcore.errors import LogClosedError
from logcore.format.group_records import Subscription, subscription_value
from logcore.recordbatch import encode
from netshim import scheduling, wire
from netshim.connection import Connection, ConnectionMemory, Workload
from netshim.scheduling import (
    ChunkCounter,
    CloseConnection,
    PendingResponse,
    StepRunner,
)
from netshim.settings import Settings
from netshim.testing import Kafka
from netshim.wire import codes
from support.broker_harness import SESSION, BrokerHarness
from support.client import DEADLINE_S
from support.conformance.report import SCRIPTS, served
from support.group_harness import GroupHarness, with_each_kind_of_directory
from support.hostile_clients import (
    HostileSimulation,
    LoggedErrors,
    ScriptRun,
    WireClient,
)

#: Chunks are small here, so that few partitions make several chunks.
CHUNK_ENTRIES = 10
MANY = 35


def use_chunks_of_one(patch: pytest.MonkeyPatch) -> None:
    """Make each chunk one partition, topic or name."""
    patch.setattr(scheduling, "CHUNK_ENTRIES", 1)


class Turns:
    """Turns of an event loop, run one by one when the test requests it."""

    def __init__(self, broker_harness: BrokerHarness) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        broker_harness.broker.state.step_runner._call_later = self.waiting.append

    def turn(self) -> None:
        self.waiting.popleft()()

    def run(self) -> int:
        """Run all turns, and return their number."""
        count = 0
        while self.waiting:
            self.turn()
            count += 1
        return count


@pytest.fixture
def turns(broker_harness: BrokerHarness, monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(scheduling, "CHUNK_ENTRIES", CHUNK_ENTRIES)
    broker_harness.logdir.create_topic("t", MANY)
    broker_harness.ask(wire.OFFSET_FETCH, 5, offsets_of(1))  # loads the groups
    return Turns(broker_harness)


def offsets_of(count: int) -> Any:
    request = wire.OFFSET_FETCH.Request
    return request(
        group_id="g",
        topics=[request.Topic(name="t", partition_indexes=list(range(count)))],
    )


def commit_of(offset: int, numbers: range, topic: str = "t") -> Any:
    request = wire.OFFSET_COMMIT.Request
    parts = [
        request.Topic.Partition(partition_index=number, committed_offset=offset)
        for number in numbers
    ]
    return request(
        group_id="g",
        generation_id_or_member_epoch=-1,
        topics=[request.Topic(name=topic, partitions=parts)],
    )


def waiting_fetch(min_bytes: int) -> Any:
    """Return a fetch of three partitions that waits for `min_bytes`."""
    request = BrokerHarness.fetch_request(range(3))
    request.max_wait_ms = 10_000
    request.min_bytes = min_bytes
    return request


# -- chunks --------------------------------------------------------------------------


def counted(entries: int, processed: list[int]) -> Any:
    pace = ChunkCounter()
    for number in range(entries):
        if pace.is_over():
            yield
        processed.append(number)
    return entries


@given(st.lists(st.integers(0, 9_000), min_size=1, max_size=12))
def test_each_turn_processes_one_chunk_of_one_request(sizes: list[int]) -> None:
    later: deque[Callable[[], None]] = deque()
    step_runner = StepRunner(later.append)
    processed: list[list[int]] = [[] for _ in sizes]
    replies = [
        step_runner.run(counted(size, into))
        for size, into in zip(sizes, processed, strict=True)
    ]
    while later:
        before = sum(map(len, processed))
        assert len(later) == 1, "only one turn is scheduled"
        later.popleft()()
        assert sum(map(len, processed)) - before <= scheduling.CHUNK_ENTRIES
    for reply, size, into in zip(replies, sizes, processed, strict=True):
        assert into == list(range(size))
        value = reply.value if isinstance(reply, PendingResponse) else reply
        assert value == size
        assert isinstance(reply, PendingResponse) == (size >= scheduling.CHUNK_ENTRIES)


def test_request_beyond_the_limit_of_chunked_requests_is_processed_whole() -> None:
    later: deque[Callable[[], None]] = deque()
    step_runner = StepRunner(later.append)
    for _ in range(scheduling.MAX_IN_STEPS):
        assert isinstance(step_runner.run(counted(1_500, [])), PendingResponse)
    assert step_runner.is_full
    assert step_runner.run(counted(9_000, [])) == 9_000
    while later:
        later.popleft()()
    assert not step_runner.is_full


def test_error_in_a_later_chunk_is_returned_and_others_continue() -> None:
    def failing() -> Any:
        yield
        raise CloseConnection("no answer would be right")

    later: deque[Callable[[], None]] = deque()
    step_runner = StepRunner(later.append)
    failed = step_runner.run(failing())
    other = step_runner.run(counted(1_500, []))
    while later:
        later.popleft()()
    assert isinstance(failed, PendingResponse) and isinstance(
        failed.value, CloseConnection
    )
    assert isinstance(other, PendingResponse) and other.value == 1_500


def test_error_in_a_callback_does_not_block_other_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: object) -> None:
        raise ValueError("the host cannot take it")

    later: deque[Callable[[], None]] = deque()
    step_runner = StepRunner(later.append)
    first = step_runner.run(counted(1_500, []))
    other = step_runner.run(counted(1_500, []))
    assert isinstance(first, PendingResponse) and isinstance(other, PendingResponse)
    first.then(refuse)
    while later:
        later.popleft()()
    assert other.value == 1_500
    assert "a waiting action failed" in caplog.text


# -- equal answers -------------------------------------------------------------------


def answers_of_scripts() -> list[Any]:
    """Run all scripts, and return their responses."""
    simulation = HostileSimulation(5, 0, LoggedErrors())
    responses: list[Any] = []

    class RecordingClient(WireClient):
        def responses(self) -> Any:
            for correlation_id, response in super().responses():
                responses.append((correlation_id, response))
                yield correlation_id, response

        def ask(
            self,
            api: Any,
            version: int,
            request: Any,
            *,
            response_timeout_ms: int = 6_000,
        ) -> Any:
            return super().ask(
                api, version, request, response_timeout_ms=response_timeout_ms
            )

    class RecordingScript(ScriptRun):
        def _open_connection(self) -> Any:
            return RecordingClient(self.simulation)

    number = 0
    for api in served():
        for version in {api.min_version, api.max_version}:
            for script in SCRIPTS[api]:
                number += 1
                recording_script = RecordingScript(simulation, api, version, number)
                script(recording_script)
                recording_script.close()
    simulation.end()
    return responses


@pytest.mark.long
def test_scripts_of_all_apis_get_the_same_answers_in_chunks_of_one() -> None:
    whole = answers_of_scripts()
    with pytest.MonkeyPatch.context() as patch:
        use_chunks_of_one(patch)
        run_in_steps = answers_of_scripts()
    assert len(whole) > 1_000
    for before, after in zip(whole, run_in_steps, strict=True):
        assert before == after


# -- effects on other requests --------------------------------------------------------


def test_other_requests_are_answered_between_two_chunks(
    broker_harness: BrokerHarness, turns: Turns
) -> None:
    large = broker_harness.send(wire.OFFSET_FETCH, 5, offsets_of(MANY))
    assert isinstance(large, PendingResponse) and not large.is_set
    for _ in range(3):
        assert not large.is_set
        assert (
            broker_harness.ask(wire.OFFSET_FETCH, 5, offsets_of(2))
            .topics[0]
            .partitions[1]
            .committed_offset
            == -1
        )
        turns.turn()
    assert not turns.waiting
    assert (
        len(broker_harness.read(wire.OFFSET_FETCH, 5, large).topics[0].partitions)
        == MANY
    )


def listing(count: int) -> Any:
    request = wire.LIST_OFFSETS.Request
    parts = [
        request.Topic.Partition(partition_index=number, timestamp=-1)
        for number in range(count)
    ]
    return request(topics=[request.Topic(name="t", partitions=parts)])


NAMES = [f"name-{number}" for number in range(MANY)]
LARGE = [
    (wire.OFFSET_FETCH, 5, offsets_of(MANY)),
    (wire.OFFSET_COMMIT, 7, commit_of(5, range(MANY))),
    (wire.FETCH, 11, BrokerHarness.fetch_request(range(MANY))),
    (
        wire.PRODUCE,
        9,
        BrokerHarness.produce_request(encode([(None, b"v")]), partitions=MANY),
    ),
    (wire.METADATA, 9, wire.METADATA.Request(topics=None)),
    (wire.LIST_OFFSETS, 5, listing(MANY)),
    (wire.DESCRIBE_GROUPS, 5, wire.DESCRIBE_GROUPS.Request(groups=NAMES)),
    (
        wire.DESCRIBE_TRANSACTIONS,
        0,
        wire.DESCRIBE_TRANSACTIONS.Request(transactional_ids=NAMES),
    ),
    (
        wire.FIND_COORDINATOR,
        4,
        wire.FIND_COORDINATOR.Request(key_type=0, coordinator_keys=NAMES),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("api", "version", "request_"), LARGE, ids=[api.name for api, _, _ in LARGE]
)
def test_large_request_takes_several_turns(
    broker_harness: BrokerHarness, turns: Turns, api: Any, version: int, request_: Any
) -> None:
    for number in range(MANY):
        broker_harness.logdir.partition("t", number)
    reply = broker_harness.send(api, version, request_)
    assert isinstance(reply, PendingResponse)
    assert turns.run() >= 3
    broker_harness.read(api, version, reply)


def pipelined(
    broker_harness: BrokerHarness, turns: Turns, api: Any, version: int, *requests: Any
) -> list[Any]:
    """Send requests at once on one connection, with a slow disk. Return the responses."""
    state = broker_harness.broker.state
    connection = Connection(
        lambda frame, now_ms: broker_harness.broker.handle(SESSION, frame, now_ms),
        state.settings,
        ConnectionMemory(1 << 30),
        Workload(500, ConnectionMemory(1 << 30)),
        0,
        lambda: None,
    )
    broker_harness.at_once = False
    sent = b"".join(
        wire.encode_request(api, version, number, "c", request)
        for number, request in enumerate(requests)
    )
    while sent:
        room = connection.get_buffer()
        size = min(len(room), len(sent))
        room[:size] = sent[:size]
        sent = sent[size:]
        connection.received(size, 0)
    assert not connection.is_idle
    while broker_harness.submitted or turns.waiting:
        broker_harness.run()
        turns.run()
        connection.process(0)
    received = bytearray()
    while (piece := connection.next_buffer()) is not None:
        received += piece
    responses = []
    while received:
        size = int.from_bytes(received[:4], "big")
        number, response = wire.decode_response(api, version, received[4 : 4 + size])
        assert number == len(responses)
        responses.append(response)
        received = received[4 + size :]
    assert len(responses) == len(requests)
    connection.close()
    broker_harness.at_once = True
    return responses


def committed_to(broker_harness: BrokerHarness, turns: Turns) -> list[int]:
    """Return the committed offsets of the first two partitions."""
    reply = broker_harness.send(wire.OFFSET_FETCH, 5, offsets_of(2))
    turns.run()
    return [
        part.committed_offset
        for part in broker_harness.read(wire.OFFSET_FETCH, 5, reply)
        .topics[0]
        .partitions
    ]


@pytest.mark.parametrize("is_loaded", [True, False])
def test_later_commit_of_a_connection_waits_for_a_chunked_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    """Without the wait, the commit of 5 would take effect after the later commit of 6.
    The order is also kept if both commits wait until the groups are loaded.
    """
    monkeypatch.setattr(scheduling, "CHUNK_ENTRIES", CHUNK_ENTRIES)
    with contextlib.closing(BrokerHarness(tmp_path / "other")) as broker_harness:
        broker_harness.logdir.create_topic("t", MANY)
        turns = Turns(broker_harness)
        if is_loaded:
            broker_harness.ask(wire.OFFSET_FETCH, 5, offsets_of(1))
        pipelined(
            broker_harness,
            turns,
            wire.OFFSET_COMMIT,
            7,
            commit_of(5, range(MANY)),
            commit_of(6, range(1)),
        )
        assert committed_to(broker_harness, turns) == [6, 5]


def transactional(broker_harness: BrokerHarness) -> dict[str, int]:
    """Return the id and epoch of a producer with the transactional id x."""
    request = wire.INIT_PRODUCER_ID.Request(
        transactional_id="x", transaction_timeout_ms=60_000
    )
    initialized = broker_harness.ask(wire.INIT_PRODUCER_ID, 4, request)
    return {
        "producer_id": initialized.producer_id,
        "producer_epoch": initialized.producer_epoch,
    }


def test_later_transactional_commit_waits_for_a_chunked_commit(
    broker_harness: BrokerHarness, turns: Turns
) -> None:
    """The commit waits until its group was added to the transaction, and only then is
    processed in chunks.
    """
    producer_fields = transactional(broker_harness)
    request = wire.TXN_OFFSET_COMMIT.Request

    def of(offset: int, numbers: range) -> Any:
        parts = [
            request.Topic.Partition(partition_index=number, committed_offset=offset)
            for number in numbers
        ]
        topics = [request.Topic(name="t", partitions=parts)]
        return request(
            transactional_id="x",
            group_id="g",
            generation_id=-1,
            topics=topics,
            **producer_fields,
        )

    pipelined(
        broker_harness,
        turns,
        wire.TXN_OFFSET_COMMIT,
        5,
        of(5, range(MANY)),
        of(6, range(1)),
    )
    end = wire.END_TXN.Request(transactional_id="x", committed=True, **producer_fields)
    assert broker_harness.ask(wire.END_TXN, 4, end).error_code == 0
    assert committed_to(broker_harness, turns) == [6, 5]


def test_later_transactional_batch_waits_for_a_chunked_batch(
    broker_harness: BrokerHarness, turns: Turns
) -> None:
    producer_fields = transactional(broker_harness)
    for number in range(MANY):
        broker_harness.logdir.partition("t", number)

    def of(value: bytes, sequence: int, numbers: range) -> Any:
        batch = encode(
            [(None, value)],
            transactional=True,
            base_sequence=sequence,
            **producer_fields,
        )
        request = wire.PRODUCE.Request
        parts = [
            request.Topic.Partition(index=number, records=batch) for number in numbers
        ]
        topics = [request.Topic(name="t", partition_data=parts)]
        return request(
            acks=-1, timeout_ms=1_000, transactional_id="x", topic_data=topics
        )

    last = MANY - 1
    requests = of(b"first", 0, range(MANY)), of(b"second", 1, range(last, MANY))
    for response in pipelined(broker_harness, turns, wire.PRODUCE, 12, *requests):
        assert not any(
            part.error_code for part in response.responses[0].partition_responses
        )
    assert [
        record.value for record in broker_harness.logdir.partition("t", last).read(0)
    ] == [
        b"first",
        b"second",
    ]


def test_records_of_later_chunks_outlive_the_connection_buffer(
    broker_harness: BrokerHarness, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_chunks_of_one(monkeypatch)
    for number in range(3):
        broker_harness.logdir.partition("t", number)
    reply = broker_harness.send(
        wire.PRODUCE,
        9,
        BrokerHarness.produce_request(encode([(None, b"value")]), partitions=3),
    )
    assert turns.run()
    partitions = (
        broker_harness.read(wire.PRODUCE, 9, reply).responses[0].partition_responses
    )
    assert [part.error_code for part in partitions] == [0, 0, 0]
    for number in range(3):
        assert [
            record.value
            for record in broker_harness.logdir.partition("t", number).read(0)
        ] == [b"value"]


def test_chunked_produce_that_waits_for_a_log_is_not_overtaken(
    broker_harness: BrokerHarness, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_chunks_of_one(monkeypatch)
    broker_harness.at_once = False
    first = broker_harness.send(
        wire.PRODUCE,
        9,
        BrokerHarness.produce_request(encode([(None, b"first")]), partitions=3),
    )
    broker_harness.run()
    assert turns.waiting, "it has begun, and is not finished"
    request = wire.PRODUCE.Request
    part = request.Topic.Partition(index=2, records=encode([(None, b"second")]))
    second = broker_harness.send(
        wire.PRODUCE,
        9,
        request(
            acks=1,
            timeout_ms=1_000,
            topic_data=[request.Topic(name="t", partition_data=[part])],
        ),
    )
    while turns.waiting or broker_harness.submitted:
        broker_harness.run()
        turns.run()
    for reply in (first, second):
        partitions = (
            broker_harness.read(wire.PRODUCE, 9, reply).responses[0].partition_responses
        )
        assert not any(part.error_code for part in partitions)
    values = [
        [
            record.value
            for record in broker_harness.logdir.partition("t", number).read(0)
        ]
        for number in range(3)
    ]
    assert values == [[b"first"], [b"first"], [b"first", b"second"]]


def test_each_chunk_reports_the_logs_that_failed_to_open(
    broker_harness: BrokerHarness, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_chunks_of_one(monkeypatch)
    opened = broker_harness.logdir.partition

    def failing(topic: str, number: int) -> Any:
        if number == 2:
            raise LogClosedError("the partition was deleted")
        return opened(topic, number)

    monkeypatch.setattr(broker_harness.logdir, "partition", failing)
    reply = broker_harness.send(wire.FETCH, 11, BrokerHarness.fetch_request(range(4)))
    turns.run()
    partitions = broker_harness.read(wire.FETCH, 11, reply).responses[0].partitions
    assert [part.error_code for part in partitions] == [
        0,
        0,
        codes.NOT_LEADER_OR_FOLLOWER,
        0,
    ]


@pytest.mark.parametrize("min_bytes", [1, 40])
@pytest.mark.parametrize("partition", [0, 1, 2])
def test_append_during_the_first_read_of_a_fetch_is_seen(
    broker_harness: BrokerHarness,
    turns: Turns,
    monkeypatch: pytest.MonkeyPatch,
    partition: int,
    min_bytes: int,
) -> None:
    """The append is also seen if another fetch waits for the same partition, so that no
    tick reports a new append.
    """
    use_chunks_of_one(monkeypatch)
    logs = [broker_harness.logdir.partition("t", number) for number in range(3)]
    other = waiting_fetch(100_000)
    broker_harness.send(wire.FETCH, 11, other)
    turns.run()
    request = waiting_fetch(min_bytes)
    reply = broker_harness.send(wire.FETCH, 11, request)
    turns.turn()
    logs[partition].append(b"new", durability="os")
    broker_harness.broker.state.fetches.appended(
        "t", partition, logs[partition], 1, broker_harness.now_ms
    )
    turns.run()
    partitions = broker_harness.read(wire.FETCH, 11, reply).responses[0].partitions
    assert [len(part.records) > 0 for part in partitions] == [
        number == partition for number in range(3)
    ]


def test_fetch_in_progress_is_answered_when_the_broker_stops(
    broker_harness: BrokerHarness, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_chunks_of_one(monkeypatch)
    for number in range(3):
        broker_harness.logdir.partition("t", number)
    request = waiting_fetch(1)
    reply = broker_harness.send(wire.FETCH, 11, request)
    turns.turn()
    broker_harness.broker.stop(broker_harness.now_ms)
    assert reply.is_set


@pytest.mark.parametrize("partition", [0, 1, 2])
def test_append_between_two_reads_of_a_fetch_is_seen(
    broker_harness: BrokerHarness,
    turns: Turns,
    monkeypatch: pytest.MonkeyPatch,
    partition: int,
) -> None:
    """An append is also seen if the present read has passed its partition."""
    use_chunks_of_one(monkeypatch)
    logs = [broker_harness.logdir.partition("t", number) for number in range(3)]
    request = waiting_fetch(1)
    reply = broker_harness.send(wire.FETCH, 11, request)
    turns.run()
    assert not reply.is_set
    broker_harness.broker.state.fetches.wake([("t", 1)], broker_harness.now_ms)
    turns.turn()
    logs[partition].append(b"new", durability="os")
    broker_harness.broker.state.fetches.appended(
        "t", partition, logs[partition], 1, broker_harness.now_ms
    )
    turns.run()
    assert reply.is_set
    partitions = broker_harness.read(wire.FETCH, 11, reply).responses[0].partitions
    assert [len(part.records) > 0 for part in partitions] == [
        number == partition for number in range(3)
    ]


def test_topic_deleted_between_two_chunks_leaves_no_offsets(
    broker_harness: BrokerHarness, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_chunks_of_one(monkeypatch)
    broker_harness.logdir.create_topic("short", 2)
    broker_harness.logdir.create_topic("stays", 2)
    request = commit_of(5, range(2), "short")
    request.topics += commit_of(5, range(2), "stays").topics
    reply = broker_harness.send(wire.OFFSET_COMMIT, 7, request)
    turns.turn()
    turns.turn()
    broker_harness.logdir.delete_topic("short")
    turns.run()
    topics = broker_harness.read(wire.OFFSET_COMMIT, 7, reply).topics
    unknown = codes.UNKNOWN_TOPIC_OR_PARTITION
    assert [[part.error_code for part in topic.partitions] for topic in topics] == [
        [unknown] * 2,
        [0, 0],
    ]
    broker_harness.logdir.create_topic("short", 2)
    request = wire.OFFSET_FETCH.Request
    unanswered = request(
        group_id="g", topics=[request.Topic(name="short", partition_indexes=[0, 1])]
    )
    reply = broker_harness.send(wire.OFFSET_FETCH, 5, unanswered)
    turns.run()
    partitions = broker_harness.read(wire.OFFSET_FETCH, 5, reply).topics[0].partitions
    assert [part.committed_offset for part in partitions] == [-1, -1]


@pytest.mark.parametrize("again", [2, 5])
def test_commit_to_a_topic_recreated_between_two_chunks(
    broker_harness: BrokerHarness,
    turns: Turns,
    monkeypatch: pytest.MonkeyPatch,
    again: int,
) -> None:
    """Only partitions that the new topic has get offsets."""
    use_chunks_of_one(monkeypatch)
    broker_harness.logdir.create_topic("short", 5)
    reply = broker_harness.send(wire.OFFSET_COMMIT, 7, commit_of(5, range(5), "short"))
    turns.turn()
    broker_harness.logdir.delete_topic("short")
    broker_harness.logdir.create_topic("short", again)
    turns.run()
    partitions = broker_harness.read(wire.OFFSET_COMMIT, 7, reply).topics[0].partitions
    unknown = codes.UNKNOWN_TOPIC_OR_PARTITION
    assert [part.error_code for part in partitions] == [0] * again + [unknown] * (
        5 - again
    )


@pytest.mark.parametrize("event", ["deleted", "committed again", "a member"])
def test_offset_deletion_affects_the_group_that_exists_in_the_last_chunk(
    broker_harness: BrokerHarness,
    turns: Turns,
    monkeypatch: pytest.MonkeyPatch,
    event: str,
) -> None:
    def all_offsets() -> list[int]:
        reply = broker_harness.send(wire.OFFSET_FETCH, 5, offsets_of(5))
        turns.run()
        return [
            part.committed_offset
            for part in broker_harness.read(wire.OFFSET_FETCH, 5, reply)
            .topics[0]
            .partitions
        ]

    broker_harness.ask(wire.OFFSET_COMMIT, 7, commit_of(1, range(5)))
    request = wire.OFFSET_DELETE.Request
    parts = [request.Topic.Partition(partition_index=number) for number in range(5)]
    with monkeypatch.context() as patch:
        use_chunks_of_one(patch)
        reply = broker_harness.send(
            wire.OFFSET_DELETE,
            0,
            request(group_id="g", topics=[request.Topic(name="t", partitions=parts)]),
        )
    if event == "a member":
        join = wire.JOIN_GROUP.Request
        reads = subscription_value(Subscription(topics=("t",)))
        broker_harness.send(
            wire.JOIN_GROUP,
            3,
            join(
                group_id="g",
                session_timeout_ms=10_000,
                rebalance_timeout_ms=10_000,
                protocol_type="consumer",
                protocols=[join.Protocol(name="range", metadata=reads)],
            ),
        )
    else:
        broker_harness.ask(
            wire.DELETE_GROUPS, 2, wire.DELETE_GROUPS.Request(groups_names=["g"])
        )
    if event == "committed again":
        broker_harness.ask(wire.OFFSET_COMMIT, 7, commit_of(9, range(5)))
    turns.run()
    response = broker_harness.read(wire.OFFSET_DELETE, 0, reply)
    error_codes = {
        part.error_code for topic in response.topics for part in topic.partitions
    }
    if event == "deleted":
        assert response.error_code == codes.GROUP_ID_NOT_FOUND
    elif event == "committed again":
        assert (response.error_code, error_codes, all_offsets()) == (0, {0}, [-1] * 5)
    else:
        assert (response.error_code, error_codes, all_offsets()) == (
            0,
            {codes.GROUP_SUBSCRIBED_TO_TOPIC},
            [1] * 5,
        )


def test_chunked_answer_that_cannot_be_encoded_closes_the_connection(
    broker_harness: BrokerHarness, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the connection remained open, the client would wait forever."""

    def refuse(*_: object) -> None:
        raise MemoryError("no room for the answer")

    monkeypatch.setattr(broker_harness.broker, "_finished_response", refuse)
    reply = broker_harness.send(wire.OFFSET_FETCH, 5, offsets_of(MANY))
    turns.run()
    assert isinstance(reply, PendingResponse) and isinstance(
        reply.value, CloseConnection
    )


def test_stopping_broker_answers_chunked_requests(
    broker_harness: BrokerHarness, turns: Turns
) -> None:
    reply = broker_harness.send(wire.OFFSET_FETCH, 5, offsets_of(MANY))
    broker_harness.broker.stop(broker_harness.now_ms)
    assert (
        len(broker_harness.read(wire.OFFSET_FETCH, 5, reply).topics[0].partitions)
        == MANY
    )
    turns.run()


@pytest.mark.parametrize("commits", [True, False])
def test_markers_in_several_partitions_are_written_in_chunks(
    broker_harness: BrokerHarness,
    turns: Turns,
    monkeypatch: pytest.MonkeyPatch,
    commits: bool,
) -> None:
    producer = broker_harness.ask(
        wire.INIT_PRODUCER_ID,
        4,
        wire.INIT_PRODUCER_ID.Request(
            transactional_id="x", transaction_timeout_ms=60_000
        ),
    )
    producer_fields = {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.producer_epoch,
    }
    records = encode(
        [(None, b"v")], transactional=True, base_sequence=0, **producer_fields
    )
    request = BrokerHarness.produce_request(records, partitions=3, acks=-1)
    request.transactional_id = "x"
    partitions = (
        broker_harness.ask(wire.PRODUCE, 12, request).responses[0].partition_responses
    )
    assert [part.error_code for part in partitions] == [0, 0, 0]
    use_chunks_of_one(monkeypatch)
    ended = broker_harness.send(
        wire.END_TXN,
        4,
        wire.END_TXN.Request(
            transactional_id="x", committed=commits, **producer_fields
        ),
    )
    assert turns.run() >= 3
    assert broker_harness.read(wire.END_TXN, 4, ended).error_code == 0
    for number in range(3):
        log = broker_harness.logdir.partition("t", number)
        assert (log.last_stable_offset, log.log_end_offset) == (2, 2)
        assert len(list(log.read(0, isolation="read_committed"))) == commits


@with_each_kind_of_directory
def test_chunked_commits_take_effect_in_both_kinds_of_directories(
    group_harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared directory, another thread processes the whole request."""
    use_chunks_of_one(monkeypatch)
    for number in range(3):
        assert group_harness.commit(
            {("orders", each): number for each in range(3)}
        ).is_set
    assert group_harness.committed() == {("orders", each): 2 for each in range(3)}
    refused = group_harness.commit(
        {("orders", each): 1 for each in range(3)}, group="x" * 32_760
    ).value
    assert {part.error_code for part in refused.topics[0].partitions} == {
        codes.INVALID_GROUP_ID
    }


@pytest.mark.long
def test_clients_are_served_in_chunks(
    kafka_factory: Callable[..., Kafka], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka and kafka-python write, read and commit in twenty partitions, and
    receive a late record.
    """
    confluent_kafka = pytest.importorskip("confluent_kafka")
    kafka_python = pytest.importorskip("kafka")
    monkeypatch.setattr(scheduling, "CHUNK_ENTRIES", 3)
    broker = kafka_factory(tmp_path / "data", num_partitions=20)
    address = broker.bootstrap_servers
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "transactional.id": "x"}
    )
    producer.init_transactions(DEADLINE_S)
    producer.begin_transaction()
    for number in range(20):
        producer.produce("wide", b"%d" % number, partition=number)
    producer.commit_transaction(DEADLINE_S)
    reader = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    reader.subscribe(["wide"])
    values = {reader.poll(DEADLINE_S).value() for _ in range(20)}
    assert values == {b"%d" % number for number in range(20)}
    reader.commit(asynchronous=False)
    places = [confluent_kafka.TopicPartition("wide", number) for number in range(20)]
    # The offset after the record, or after the marker if the client has read it too.
    assert {
        committed.offset for committed in reader.committed(places, timeout=DEADLINE_S)
    } <= {
        1,
        2,
    }
    reader.close()
    other = kafka_python.KafkaConsumer(
        "wide",
        bootstrap_servers=address,
        group_id="g",
        consumer_timeout_ms=DEADLINE_S * 1_000,
    )
    other.poll(timeout_ms=0)
    producer.begin_transaction()
    producer.produce("wide", b"late", partition=7)
    producer.commit_transaction(DEADLINE_S)
    assert next(other).value == b"late"
    other.close()


# -- limits ----------------------------------------------------------------------------


def test_request_with_too_large_an_array_closes_the_connection(
    tmp_path: Path,
) -> None:
    broker_harness = BrokerHarness(tmp_path, max_request_entries=5_000)
    broker_harness.logdir.create_topic("t")
    broker_harness.ask(wire.OFFSET_FETCH, 5, offsets_of(4_999))
    with pytest.raises(
        CloseConnection,
        match=r"OffsetFetch v5 request, topics\.partition_indexes: an array of 5000",
    ):
        broker_harness.send(wire.OFFSET_FETCH, 5, offsets_of(5_000))
    broker_harness.close()


def test_large_requests_are_refused_while_the_chunk_limit_is_reached(
    broker_harness: BrokerHarness, turns: Turns
) -> None:
    replies = [
        broker_harness.send(wire.OFFSET_FETCH, 5, offsets_of(MANY))
        for _ in range(scheduling.MAX_IN_STEPS)
    ]
    with pytest.raises(CloseConnection, match="OffsetFetch of 10001 entries"):
        broker_harness.send(wire.OFFSET_FETCH, 5, offsets_of(10_000))
    assert (
        len(
            broker_harness.ask(wire.OFFSET_FETCH, 5, offsets_of(MANY))
            .topics[0]
            .partitions
        )
        == MANY
    )
    turns.run()
    assert all(reply.is_set for reply in replies)


def test_limit_of_request_entries_is_a_setting() -> None:
    assert Settings().max_request_entries == 100_000
    with pytest.raises(ValueError, match="max_request_entries"):
        Settings(max_request_entries=999)
