"""The response to each request, by tables: a broker without sockets that gets one
request at a time.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.errors import StorageReadError, TopicNotFoundError
from logcore.fs import OS, OsFS
from logcore.reader import unsearched_offsets
from logcore.recordbatch import encode
from netshim import wire
from netshim.handlers import HANDLERS
from netshim.handlers.failures import code_of, message_of
from netshim.handlers.fetch import _Extent, _Growth
from netshim.request_log import RepeatedLineFilter
from netshim.scheduling import CloseConnection, PendingResponse
from netshim.session import ClientSession
from netshim.topic_ids import NO_ID
from netshim.wire import codes
from support.broker_harness import SESSION, BrokerHarness
from support.client import Client

# -- waits for the disk
# -----------------------------------------------------------------


def batch_of(*values: bytes, **more: Any) -> bytes:
    return encode([(None, value) for value in values], now_ms=1_000, **more)


def test_one_fetch_over_many_new_partitions_does_not_keep_others_waiting(
    broker_harness: BrokerHarness,
) -> None:
    """Logs were opened in the broker's thread: a Fetch over 300 logs blocked all other
    clients for 16 s.
    """
    broker_harness.logdir.create_topic("t", partitions=100)
    broker_harness.logdir.create_topic("small")
    broker_harness.at_once = False
    large = broker_harness.send(
        wire.FETCH, 11, broker_harness.fetch_request(range(100))
    )
    assert (
        isinstance(large, PendingResponse)
        and not broker_harness.logdir.host.open_logs()
    ), "nothing is opened in the broker's thread"
    broker_harness.run(limit=3)
    small = broker_harness.send(
        wire.FETCH, 11, broker_harness.fetch_request(range(1), "small")
    )
    broker_harness.run(limit=3)
    assert small.is_set and not large.is_set, "they take turns"
    assert len(broker_harness.submitted) == 1, (
        "one log is opened at a time; other threads are for syncs"
    )
    broker_harness.run()
    assert (
        len(broker_harness.read(wire.FETCH, 11, large).responses[0].partitions) == 100
    )


def test_requests_that_wait_for_a_log_keep_their_order_and_their_bytes(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t", partitions=3)
    broker_harness.at_once = False
    replies = [
        broker_harness.send(
            wire.PRODUCE,
            9,
            broker_harness.produce_request(batch_of(b"%d" % number), partitions=3),
        )
        for number in range(5)
    ]
    broker_harness.run()
    for number, reply in enumerate(replies):
        reported = (
            broker_harness.read(wire.PRODUCE, 9, reply).responses[0].partition_responses
        )
        assert [(entry.error_code, entry.base_offset) for entry in reported] == [
            (0, number)
        ] * 3
    for partition in range(3):
        log = broker_harness.logdir.partition("t", partition)
        assert [record.value for record in log.read(0)] == [
            b"0",
            b"1",
            b"2",
            b"3",
            b"4",
        ]


@pytest.mark.parametrize("opened", range(4))
@pytest.mark.parametrize("partition", range(3))
def test_a_produce_that_waits_for_many_logs_is_not_overtaken(
    broker_harness: BrokerHarness, opened: int, partition: int
) -> None:
    """A request also does not wait for a log that was opened for an earlier request,
    while that request waits for other logs.
    """
    broker_harness.logdir.create_topic("t", partitions=3)
    broker_harness.at_once = False
    broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(batch_of(b"0"), partitions=3)
    )
    broker_harness.run(limit=opened)
    for number in (1, 2):
        request = broker_harness.produce_request(batch_of(b"%d" % number))
        request.topic_data[0].partition_data[0].index = partition
        broker_harness.send(wire.PRODUCE, 9, request)
    broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(batch_of(b"3"), partitions=3)
    )
    broker_harness.run()
    values = [
        [
            record.value
            for record in broker_harness.logdir.partition("t", number).read(0)
        ]
        for number in range(3)
    ]
    expected = [[b"0", b"3"]] * 3
    expected[partition] = [b"0", b"1", b"2", b"3"]
    assert values == expected
    assert not broker_harness.broker.state.logs.queued


def test_many_requests_may_wait_for_one_log(broker_harness: BrokerHarness) -> None:
    broker_harness.logdir.create_topic("t")
    broker_harness.at_once = False
    for number in range(2_000):
        broker_harness.send(
            wire.PRODUCE,
            9,
            broker_harness.produce_request(batch_of(b"%d" % number), acks=0),
        )
    broker_harness.run()
    assert [
        record.value for record in broker_harness.logdir.partition("t", 0).read(0)
    ] == [b"%d" % n for n in range(2_000)]


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize(
    "error", [TopicNotFoundError, StorageReadError, ZeroDivisionError]
)
def test_failed_check_does_not_delay_later_requests(
    broker_harness: BrokerHarness,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    at: int,
) -> None:
    """The check fails, for example because another thread has deleted the topic between
    two steps of the request.
    """
    broker_harness.logdir.create_topic("t")
    real = broker_harness.logdir.partitions
    looks = 0

    def partitions(name: str) -> tuple[int, ...]:
        nonlocal looks
        looks += 1
        if looks == at:
            raise error("in this moment")
        return real(name)

    monkeypatch.setattr(broker_harness.logdir, "partitions", partitions)
    with contextlib.suppress(ZeroDivisionError):
        reply = broker_harness.send(
            wire.PRODUCE, 9, broker_harness.produce_request(batch_of(b"v"))
        )
        assert not isinstance(reply, PendingResponse) or reply.is_set
    monkeypatch.undo()
    assert not broker_harness.broker.state.logs.queued
    assert broker_harness.produce(batch_of(b"w")).error_code == 0


def test_append_that_rolls_runs_in_a_thread_and_delays_later_appends(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t", config={"segment.bytes": 300})
    log = broker_harness.logdir.partition("t", 0)
    broker_harness.at_once = False
    replies = [
        broker_harness.send(
            wire.PRODUCE,
            9,
            broker_harness.produce_request(batch_of(b"%d" % number * 100)),
        )
        for number in range(6)
    ]
    assert (
        log.statistics().rolls == 0
        and not isinstance(replies[0], PendingResponse)
        and isinstance(replies[-1], PendingResponse)
    )
    broker_harness.run()
    assert log.statistics().rolls > 1
    assert [record.value[:1] for record in log.read(0)] == [
        b"%d" % number for number in range(6)
    ]
    assert [
        broker_harness.read(wire.PRODUCE, 9, reply)
        .responses[0]
        .partition_responses[0]
        .base_offset
        for reply in replies
    ] == [*range(6)]


def test_log_that_cannot_be_opened_is_reported_and_others_are_served(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t", partitions=2)
    shutil.rmtree(f"{broker_harness.logdir.path}/t-0")
    reported = (
        broker_harness.ask(wire.FETCH, 11, broker_harness.fetch_request(range(3)))
        .responses[0]
        .partitions
    )
    assert [entry.error_code for entry in reported] == [
        codes.KAFKA_STORAGE_ERROR,
        codes.NONE,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def test_a_produce_without_answer_that_fails_later_ends_its_connection(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t")
    broker_harness.at_once = False
    reply = broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(b"garbage" * 20, acks=0)
    )
    stored = broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(batch_of(b"v"), acks=0)
    )
    broker_harness.run()
    assert (
        isinstance(reply.value, CloseConnection)
        and stored.is_set
        and stored.value is None
    )


def test_event_loop_opens_creates_and_syncs_no_file(
    kafka_factory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: set[tuple[str, str]] = set()
    for name in (
        "mkdir",
        "rename",
        "unlink",
        "fsync",
        "fdatasync",
        "sync_dir",
        "truncate",
    ):
        real = getattr(OsFS, name)

        def noted(
            self: Any, *given: Any, real: Any = real, name: str = name, **more: Any
        ) -> Any:
            touched.add((threading.current_thread().name, name))
            return real(self, *given, **more)

        monkeypatch.setattr(OsFS, name, noted)
    server = kafka_factory(
        tmp_path / "data", config={"segment.bytes": 2_000, "flush.messages": 5}, fs=OS
    )
    touched.clear()  # the directory itself is opened before clients can connect
    with contextlib.closing(Client(server.port)) as client:
        metadata = wire.METADATA.Request
        client.ask(
            wire.METADATA,
            9,
            metadata(
                topics=[metadata.Topic(name="made")], allow_auto_topic_creation=True
            ),
        )
        for number in range(12):
            more = (
                {"producer_id": 7, "producer_epoch": 0, "base_sequence": number}
                if number > 7
                else {}
            )
            client.ask(
                wire.PRODUCE,
                9,
                BrokerHarness.produce_request(
                    batch_of(b"v" * 300, **more), "made", acks=-1 + number % 2 * 2
                ),
            )
        client.ask(wire.FETCH, 11, BrokerHarness.fetch_request(range(1), "made"))
        client.ask(wire.INIT_PRODUCER_ID, 4, wire.INIT_PRODUCER_ID.Request())
        commit = wire.OFFSET_COMMIT.Request
        part = commit.Topic.Partition(partition_index=0, committed_offset=1)
        client.ask(
            wire.OFFSET_COMMIT,
            7,
            commit(group_id="g", topics=[commit.Topic(name="made", partitions=[part])]),
        )
        doomed = wire.DELETE_RECORDS.Request
        part = doomed.Topic.Partition(partition_index=0, offset=8)
        body = doomed(
            topics=[doomed.Topic(name="made", partitions=[part])], timeout_ms=1000
        )
        assert (
            client.ask(wire.DELETE_RECORDS, 2, body)
            .topics[0]
            .partitions[0]
            .low_watermark
            == 8
        )
        alter = wire.INCREMENTAL_ALTER_CONFIGS.Request
        change = alter.Resource.Config(
            name="retention.ms", value="5", config_operation=0
        )
        resource = alter.Resource(
            resource_type=2, resource_name="made", configs=[change]
        )
        client.ask(wire.INCREMENTAL_ALTER_CONFIGS, 1, alter(resources=[resource]))
        calls = set(touched)  # before the broker stops
    assert {name for _, name in calls} >= {
        "mkdir",
        "rename",
        "fsync",
        "fdatasync",
        "sync_dir",
    }
    assert {
        name for thread, name in calls if not thread.startswith("netshim-disk")
    } == set()


# -- leader epochs ---------------------------------------------------------------------


def _cut(log: Any) -> None:
    log.append(b"lost")
    log.truncate(1)


EPOCHS: dict[str, Callable[[Any], object]] = {
    "begins at the end": lambda log: None,
    "the second without records": lambda log: log.begin_epoch(6),
    "begins above the end of a truncation": _cut,
}


@pytest.mark.parametrize("case", EPOCHS)
@pytest.mark.parametrize("records", [0, 3])
def test_every_api_reports_the_same_leader_epoch(
    tmp_path: Path, case: str, records: int
) -> None:
    """Clients refuse an epoch below the latest epoch that they have received. An epoch
    that decreased blocked clients until they were restarted.
    """
    if "truncation" in case and not records:
        records = 2
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as logdir:
        logdir.create_topic("t")
        log = logdir.partition("t", 0)
        if records:
            log.append_many([(None, b"v")] * records)
        log.begin_epoch(4)
        EPOCHS[case](log)
        known = log.leader_epoch
        assert known >= 4
    for _ in range(2):
        broker_harness = BrokerHarness(path)
        assert broker_harness.logdir.host.leader_epoch("t", 0) == known, (
            "before the log is opened"
        )
        assert broker_harness.epochs() == {known}
        broker_harness.logdir.partition("t", 0).begin_epoch(known + 1)
        known += 1
        assert broker_harness.epochs() == {known}
        broker_harness.logdir.partition("t", 0).close()
        assert broker_harness.logdir.host.leader_epoch("t", 0) == known, (
            "when it is closed again"
        )
        assert broker_harness.epochs() == {known}
        broker_harness.logdir.partition("t", 0).append(b"v")
        broker_harness.close()


@pytest.mark.parametrize("is_clustered", [True, False])
def test_metadata_of_a_cluster_waits_for_no_file(
    tmp_path: Path, is_clustered: bool
) -> None:
    """The epochs of a topic in a cluster are in the registry. Work on the disk, such as
    opening a thousand new partitions, would delay the response.
    """
    with logcore.open_dir(tmp_path, create=True) as logdir:
        logdir.create_topic("t", 3)
    broker_harness = BrokerHarness(tmp_path, at_once=False)
    broker_harness.broker.state.leadership.is_clustered = is_clustered
    request = wire.METADATA.Request(topics=None)
    reply = broker_harness.send(wire.METADATA, 9, request)
    assert isinstance(reply, PendingResponse) != is_clustered
    assert (len(broker_harness.submitted) == 0) == is_clustered
    broker_harness.run()
    broker_harness.close()


@pytest.mark.parametrize(
    ("offset", "last_epoch", "expected"),
    [
        (3, 0, "records"),
        (5, 0, "records"),
        (6, 0, (0, 5)),  # epoch 0 ended before that
        (3, 1, (0, 5)),  # there are no records of epoch 1
        (5, 1, (0, 5)),
        (7, 2, "records"),
        (10, 2, "nothing"),
        (11, 2, (2, 10)),
        (3, 3, codes.OFFSET_OUT_OF_RANGE),  # an epoch that this log has not reached
        (11, 3, codes.OFFSET_OUT_OF_RANGE),
        (1, 0, codes.OFFSET_OUT_OF_RANGE),  # below the log start
        (1, 1, codes.OFFSET_OUT_OF_RANGE),
        (11, -1, codes.OFFSET_OUT_OF_RANGE),
        (3, -1, "records"),
    ],
)
def test_fetch_with_a_diverging_epoch_gets_the_point_of_divergence(
    broker_harness: BrokerHarness, offset: int, last_epoch: int, expected: Any
) -> None:
    """Kafka's rule, with epochs 0 at [0, 5) and 2 at [5, 10), the log start at 2."""
    broker_harness.logdir.create_topic("t")
    log = broker_harness.logdir.partition("t", 0)
    log.append_many([(None, b"v")] * 5)
    log.begin_epoch(2)
    log.append_many([(None, b"v")] * 5)
    log.delete_records(2)
    partition = broker_harness.fetch(offset, last_fetched_epoch=last_epoch)
    diverging = (partition.diverging_epoch.epoch, partition.diverging_epoch.end_offset)
    if isinstance(expected, int):
        assert (partition.error_code, diverging, partition.records) == (
            expected,
            (-1, -1),
            b"",
        )
        assert partition.high_watermark == -1
        return
    assert partition.error_code == 0 and partition.high_watermark == 10
    assert diverging == (expected if isinstance(expected, tuple) else (-1, -1))
    assert bool(partition.records) == (expected == "records")


# -- responses of Produce
# ---------------------------------------------------------------


@pytest.mark.parametrize("codec", ["uncompressed", "gzip"])
@pytest.mark.parametrize(
    ("config", "code", "wrong"),
    [
        ({"cleanup.policy": "compact"}, codes.INVALID_RECORD, [1, 3]),
        ({"message.timestamp.after.max.ms": 1_000}, codes.INVALID_TIMESTAMP, [0, 3]),
        (
            {"cleanup.policy": "compact", "message.timestamp.before.max.ms": 5},
            codes.INVALID_TIMESTAMP,
            [1, 2, 3],
        ),
    ],
)
def test_refused_batch_lists_its_invalid_records(
    broker_harness: BrokerHarness,
    codec: str,
    config: dict[str, object],
    code: int,
    wrong: list[int],
) -> None:
    """Without the list, clients consider all records invalid, and a program that drops
    invalid records drops valid ones.
    """
    future = 1 << 60
    rows = [
        (b"k", b"0", (), future),
        (None, b"1", (), -1),
        (b"k", b"2", (), 7),
        (None, b"3", (), future),
    ]
    broker_harness.logdir.create_topic("t", config=config)
    reported = broker_harness.produce(encode(rows, codec=codec))
    assert (reported.error_code, reported.base_offset) == (code, -1)
    assert [error.batch_index for error in reported.record_errors] == wrong
    assert all(error.batch_index_error_message for error in reported.record_errors)
    assert broker_harness.logdir.partition("t", 0).log_end_offset == 0
    assert (
        broker_harness.produce(encode(rows, codec=codec), version=7).error_code == code
    ), "which has no field for them"


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (batch_of(b"v") + b"garbage", 0),
        (batch_of(b"v") + batch_of(b"w")[:-1], 0),  # an incomplete batch is dropped
        (batch_of(b"v") + batch_of(b"w"), codes.INVALID_RECORD),
        (batch_of(b"v") + bytes(40), codes.INVALID_RECORD),
        (None, codes.INVALID_RECORD),
    ],
)
def test_bytes_after_a_batch_are_dropped_or_refused(
    broker_harness: BrokerHarness, records: bytes | None, code: int
) -> None:
    broker_harness.logdir.create_topic("t")
    assert broker_harness.produce(records).error_code == code
    assert [
        record.value for record in broker_harness.logdir.partition("t", 0).read(0)
    ] == ([] if code else [b"v"])


def test_last_of_two_batches_for_a_partition_is_stored(
    broker_harness: BrokerHarness,
) -> None:
    """Kafka does the same, because it keeps batches in a map. One batch is stored, and
    one partition is answered.
    """
    broker_harness.logdir.create_topic("t")
    request = broker_harness.produce_request(batch_of(b"first"))
    request.topic_data[0].partition_data += (
        broker_harness.produce_request(batch_of(b"second")).topic_data[0].partition_data
    )
    (reported,) = (
        broker_harness.ask(wire.PRODUCE, 9, request).responses[0].partition_responses
    )
    assert (reported.error_code, reported.base_offset) == (0, 0)
    assert [
        record.value for record in broker_harness.logdir.partition("t", 0).read(0)
    ] == [b"second"]


@pytest.mark.parametrize(
    ("transactional_id", "transactional", "code"),
    [
        (None, True, codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        ("x", True, codes.INVALID_PRODUCER_ID_MAPPING),
        ("x", False, codes.NONE),
    ],
)
def test_batches_of_transactions_that_were_not_begun(
    broker_harness: BrokerHarness,
    transactional_id: str | None,
    transactional: bool,
    code: int,
) -> None:
    broker_harness.logdir.create_topic("t")
    more = {
        "producer_id": 5,
        "producer_epoch": 0,
        "base_sequence": 0,
        "transactional": transactional,
    }
    request = broker_harness.produce_request(batch_of(b"v", **more))
    request.transactional_id = transactional_id
    assert (
        broker_harness.ask(wire.PRODUCE, 9, request)
        .responses[0]
        .partition_responses[0]
        .error_code
        == code
    )


def test_a_batch_outside_an_open_transaction_of_its_producer(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t")
    more: dict[str, Any] = {"producer_id": 5, "producer_epoch": 0}
    broker_harness.logdir.partition("t", 0).append_batch(
        batch_of(b"v", base_sequence=0, transactional=True, **more)
    )
    assert (
        broker_harness.produce(batch_of(b"v", base_sequence=1, **more)).error_code
        == codes.INVALID_TXN_STATE
    )


def test_library_error_with_a_kafka_code_gets_that_code() -> None:
    named = {}
    for name in logcore.__all__:
        kind = getattr(logcore, name)
        if isinstance(kind, type) and issubclass(kind, logcore.LogcoreError):
            match = re.search(r"Kafka:\s+([A-Z_]+)\.", kind.__doc__ or "")
            if match:
                named[kind] = match[1]
    assert len(named) > 10
    for kind, code in named.items():
        assert codes.name(code_of(kind("x"))) == code, kind


def test_error_texts_name_no_folder_of_the_server(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t", partitions=2)
    shutil.rmtree(f"{broker_harness.logdir.path}/t-1")
    reported = (
        broker_harness.ask(
            wire.PRODUCE,
            9,
            broker_harness.produce_request(batch_of(b"v"), partitions=2),
        )
        .responses[0]
        .partition_responses[1]
    )
    assert (
        reported.error_code == codes.KAFKA_STORAGE_ERROR
        and "t-1" in reported.error_message
    )
    topics = wire.CREATE_TOPICS.Request
    topic = topics.Topic(name="t", num_partitions=1, replication_factor=1)
    refused = broker_harness.ask(
        wire.CREATE_TOPICS, 4, topics(topics=[topic], timeout_ms=1)
    ).topics[0]
    assert refused.error_code == codes.TOPIC_ALREADY_EXISTS
    for text in (reported.error_message, refused.error_message):
        assert not any(
            part in text
            for part in Path(broker_harness.logdir.path).parts[:-1]
            if len(part) > 1
        ), text
    inner = "/srv/kafka data/t-0/00000000000000000000.log"
    error = logcore.StorageReadError(f"[Errno 5] cannot read '{inner}'", path=inner)
    assert "srv" not in message_of(error) and "00000000000000000000.log" in message_of(
        error
    )
    assert (
        message_of(OSError("cannot open /srv/kafka/t-0/x.log")) == "cannot open x.log"
    )


def test_no_similar_topic_is_searched_if_no_text_is_read(
    broker_harness: BrokerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests with mutated frames found that each unknown partition of a request took
    a millisecond for 100 topics, in the event loop.
    """
    searches: list[str] = []
    find = difflib.get_close_matches
    monkeypatch.setattr(
        difflib,
        "get_close_matches",
        lambda name, *rest: searches.append(name) or find(name, *rest),
    )
    broker_harness.logdir.create_topic("orders")
    request = wire.OFFSET_FOR_LEADER_EPOCH.Request
    parts = [request.Topic.Partition(partition=number) for number in range(3)]
    response = broker_harness.ask(
        wire.OFFSET_FOR_LEADER_EPOCH,
        3,
        request(topics=[request.Topic(topic="order", partitions=parts)]),
    )
    assert {each.error_code for each in response.topics[0].partitions} == {
        codes.UNKNOWN_TOPIC_OR_PARTITION
    }
    doomed = broker_harness.ask(
        wire.DELETE_TOPICS,
        4,
        wire.DELETE_TOPICS.Request(topic_names=["order"], timeout_ms=1),
    )
    assert doomed.responses[0].error_code == codes.UNKNOWN_TOPIC_OR_PARTITION
    assert searches == []
    with pytest.raises(logcore.TopicNotFoundError) as caught:
        broker_harness.logdir.partitions("order")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)
    assert "did you mean 'orders'?" in str(copied)


def test_topics_created_by_a_connection_are_limited(tmp_path: Path) -> None:
    """Requests that name a topic create it. Topics that could not be created do not
    count.
    """
    broker_harness = BrokerHarness(tmp_path, auto_create_limit=3)

    def asked(session: ClientSession, *names: str) -> list[int]:
        request = wire.METADATA.Request
        body = request(topics=[request.Topic(name=name) for name in names])
        frame = memoryview(wire.encode_request(wire.METADATA, 9, 1, "test", body))[4:]
        reported = BrokerHarness.read(
            wire.METADATA,
            9,
            broker_harness.broker.handle(session, frame, broker_harness.now_ms),
        )
        return [topic.error_code for topic in reported.topics]

    first = ClientSession("127.0.0.1", 9092, "127.0.0.1")
    refused = codes.POLICY_VIOLATION
    assert asked(first, "a", "no topic", "b") == [0, codes.INVALID_TOPIC_EXCEPTION, 0]
    invalid = codes.INVALID_TOPIC_EXCEPTION
    assert asked(first, "no topic", "nor this", "!", "c") == [
        invalid,
        invalid,
        invalid,
        0,
    ]
    assert asked(first, "a", "c", "d", "e") == [0, 0, refused, refused]
    assert asked(first, "d", "!", "c") == [refused, invalid, 0]
    assert asked(ClientSession("127.0.0.1", 9092, "127.0.0.1"), "d") == [0]
    assert list(broker_harness.logdir.topics()) == ["a", "b", "c", "d"]
    broker_harness.close()


def test_partitions_created_by_a_request_are_limited(
    broker_harness: BrokerHarness,
) -> None:
    """The tests with mutated frames found that one request for 100,000 partitions
    prevented all other clients from creating a topic.
    """
    most = broker_harness.broker.state.settings.max_partitions_per_request
    topics = wire.CREATE_TOPICS.Request
    requested = [
        topics.Topic(name=name, num_partitions=most // 2 + 1, replication_factor=1)
        for name in ("t", "u")
    ]
    refused = broker_harness.ask(
        wire.CREATE_TOPICS, 4, topics(topics=requested, timeout_ms=1)
    ).topics
    assert {each.name: each.error_code for each in refused} == dict.fromkeys(
        "tu", codes.POLICY_VIOLATION
    )
    assert not broker_harness.logdir.topics()
    broker_harness.logdir.create_topic("t", partitions=2)
    partitions = wire.CREATE_PARTITIONS.Request
    grown = [partitions.Topic(name="t", count=most + 3, assignments=None)]
    (refused,) = broker_harness.ask(
        wire.CREATE_PARTITIONS, 1, partitions(topics=grown, timeout_ms=1)
    ).results
    assert refused.error_code == codes.POLICY_VIOLATION
    assert len(broker_harness.logdir.partitions("t")) == 2


# -- the rest of the wire --------------------------------------------------------------


def test_listed_and_deleted_offsets_wait_for_appends_with_acks_1(
    tmp_path: Path,
) -> None:
    broker_harness = BrokerHarness(tmp_path / "data", durability="group")
    broker_harness.logdir.create_topic("t")
    log = broker_harness.logdir.partition("t", 0)
    broker_harness.at_once = False
    assert broker_harness.produce(batch_of(b"a", b"b")).error_code == 0
    assert (log.high_watermark, log.log_end_offset) == (0, 2)
    request = wire.LIST_OFFSETS.Request
    part = request.Topic.Partition(partition_index=0, timestamp=-1)
    listed = broker_harness.send(
        wire.LIST_OFFSETS,
        5,
        request(topics=[request.Topic(name="t", partitions=[part])]),
    )
    assert not listed.is_set
    broker_harness.run()
    assert (
        broker_harness.read(wire.LIST_OFFSETS, 5, listed).topics[0].partitions[0].offset
        == 2
    )
    broker_harness.produce(batch_of(b"c"))
    doomed = wire.DELETE_RECORDS.Request
    part = doomed.Topic.Partition(partition_index=0, offset=-1)
    body = doomed(topics=[doomed.Topic(name="t", partitions=[part])], timeout_ms=1000)
    deleted = broker_harness.send(wire.DELETE_RECORDS, 2, body)
    broker_harness.run()
    assert (
        broker_harness.read(wire.DELETE_RECORDS, 2, deleted)
        .topics[0]
        .partitions[0]
        .low_watermark
        == 3
    )
    broker_harness.close()


@pytest.mark.parametrize("version", [5, 6])
def test_a_topic_that_is_named_twice_is_not_deleted(
    broker_harness: BrokerHarness, version: int
) -> None:
    for name in ("once", "twice", "by both"[:2]):
        broker_harness.logdir.create_topic(name)
    request = wire.DELETE_TOPICS.Request
    names = ["once", "twice", "twice"]
    body = request(topic_names=names, timeout_ms=1_000)
    if version == 6:
        topics = [request.Topic(name=name) for name in [*names, "by"]]
        body.topics = [
            *topics,
            request.Topic(
                name=None, topic_id=broker_harness.logdir.topic_id("by").bytes
            ),
        ]
    reported = broker_harness.ask(wire.DELETE_TOPICS, version, body).responses
    refused = {
        entry.name for entry in reported if entry.error_code == codes.INVALID_REQUEST
    }
    assert refused == ({"twice"} if version == 5 else {"twice", "by"})
    assert [entry.name for entry in reported].count("twice") == 1
    assert broker_harness.logdir.topics() == ["by", "twice"]


def test_sizes_of_the_log_directory(broker_harness: BrokerHarness) -> None:
    broker_harness.logdir.create_topic("t")
    broker_harness.produce(batch_of(b"v" * 1_000))
    request = wire.DESCRIBE_LOG_DIRS.Request
    (reported,) = broker_harness.ask(
        wire.DESCRIBE_LOG_DIRS, 4, request(topics=None)
    ).results
    assert (
        reported.topics[0].partitions[0].partition_size
        == broker_harness.logdir.size_bytes("t", 0)
        > 1_000
    )
    assert reported.total_bytes > reported.usable_bytes > 0


@pytest.mark.parametrize(
    "keys", [None, [], ["consumer.session.timeout.ms"], ["no.such"]]
)
def test_settings_of_groups_are_described(
    tmp_path: Path, keys: list[str] | None
) -> None:
    """Kafka's admin tools request them, also for groups that do not exist."""
    expected = {
        "consumer.session.timeout.ms": "9000",
        "consumer.heartbeat.interval.ms": "3000",
    }
    if keys:
        expected = {key: expected[key] for key in keys if key in expected}
    request = wire.DESCRIBE_CONFIGS.Request
    asked = request.Resource(
        resource_type=32, resource_name="g", configuration_keys=keys
    )
    body = request(resources=[asked], include_synonyms=True, include_documentation=True)
    with contextlib.closing(
        BrokerHarness(tmp_path / "data", group_consumer_session_timeout_ms=9_000)
    ) as harness:
        (result,) = harness.ask(wire.DESCRIBE_CONFIGS, 4, body).results
    assert result.error_code == codes.NONE
    assert {each.name: each.value for each in result.configs} == expected
    assert {each.config_source for each in result.configs} <= {5}, (
        "Kafka's source of settings that the group does not have"
    )
    assert all(
        each.documentation and each.config_type == 3 and not each.read_only
        for each in result.configs
    )
    synonyms = {
        synonym.name: synonym.value
        for each in result.configs
        for synonym in each.synonyms
    }
    assert synonyms == expected


def test_a_group_without_a_name_is_not_described(broker_harness: BrokerHarness) -> None:
    request = wire.DESCRIBE_CONFIGS.Request
    asked = request.Resource(
        resource_type=32, resource_name="", configuration_keys=None
    )
    (result,) = broker_harness.ask(
        wire.DESCRIBE_CONFIGS, 4, request(resources=[asked])
    ).results
    assert result.error_code == codes.INVALID_REQUEST and not result.configs


def test_empty_group_id_may_only_commit_and_fetch(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t")
    commit = wire.OFFSET_COMMIT.Request
    part = commit.Topic.Partition(partition_index=0, committed_offset=3)
    body = commit(group_id="", topics=[commit.Topic(name="t", partitions=[part])])
    assert (
        broker_harness.ask(wire.OFFSET_COMMIT, 7, body)
        .topics[0]
        .partitions[0]
        .error_code
        == 0
    )
    fetched = broker_harness.ask(
        wire.OFFSET_FETCH, 5, wire.OFFSET_FETCH.Request(group_id="", topics=None)
    )
    assert fetched.topics[0].partitions[0].committed_offset == 3
    described = broker_harness.ask(
        wire.DESCRIBE_GROUPS, 4, wire.DESCRIBE_GROUPS.Request(groups=[""])
    ).groups[0]
    assert described.error_code == 0
    assert (
        broker_harness.ask(
            wire.HEARTBEAT, 3, wire.HEARTBEAT.Request(group_id="")
        ).error_code
        == codes.INVALID_GROUP_ID
    )
    gone = broker_harness.ask(
        wire.DELETE_GROUPS, 1, wire.DELETE_GROUPS.Request(groups_names=[""])
    ).results[0]
    assert gone.error_code == 0


@pytest.mark.parametrize("appended", range(3))
@pytest.mark.parametrize("by", ["a client", "the process"])
@pytest.mark.parametrize("min_bytes", [1, 100])  # a batch has 69 bytes
def test_a_fetch_waits_for_each_of_its_partitions(
    broker_harness: BrokerHarness, appended: int, by: str, min_bytes: int
) -> None:
    broker_harness.logdir.create_topic("t", partitions=3)
    request = broker_harness.fetch_request(range(3))
    request.min_bytes = min_bytes
    request.max_wait_ms = 20_000
    reply = broker_harness.send(wire.FETCH, 11, request)
    assert isinstance(reply, PendingResponse) and not reply.is_set
    broker_harness.broker.tick(broker_harness.now_ms)
    assert not reply.is_set
    for number in range(1 if min_bytes == 1 else 2):
        assert not reply.is_set, number
        if by == "a client":
            produced = broker_harness.produce_request(batch_of(b"v"))
            produced.topic_data[0].partition_data[0].index = appended
            broker_harness.ask(wire.PRODUCE, 9, produced)
        else:
            broker_harness.logdir.partition("t", appended).append(b"v")
            broker_harness.broker.tick(broker_harness.now_ms)
    reported = broker_harness.read(wire.FETCH, 11, reply).responses[0].partitions
    assert [bool(entry.records) for entry in reported] == [
        number == appended for number in range(3)
    ]


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [(1, [69, 0, 0]), (150, [138, 0, 0]), (210, [138, 69, 0]), (1000, [138, 138, 138])],
)
def test_size_limit_of_a_fetch_covers_all_partitions(
    broker_harness: BrokerHarness, max_bytes: int, expected: list[int]
) -> None:
    """Only the first batch of all may be larger than the remaining limit."""
    broker_harness.logdir.create_topic("t", partitions=3)
    for _ in range(2):
        broker_harness.ask(
            wire.PRODUCE,
            9,
            broker_harness.produce_request(batch_of(b"v"), partitions=3),
        )
    request = broker_harness.fetch_request(range(3))
    request.max_bytes = max_bytes
    reported = broker_harness.ask(wire.FETCH, 11, request).responses[0].partitions
    assert [len(entry.records or b"") for entry in reported] == expected


def test_unknown_topic_ids_cause_one_reading_of_the_topics(
    broker_harness: BrokerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may name thousands of topics, and each search reads all topics."""
    state = broker_harness.broker.state
    real = broker_harness.logdir.topics
    looks = 0

    def topics() -> list[str]:
        nonlocal looks
        looks += 1
        return real()

    broker_harness.logdir.create_topic("t")
    monkeypatch.setattr(broker_harness.logdir, "topics", topics)
    request = wire.FETCH.Request
    part = request.Topic.Partition(partition=0, partition_max_bytes=100)
    unknown = [
        request.Topic(topic_id=bytes([number]) * 16, partitions=[part])
        for number in range(1, 51)
    ]
    reported = broker_harness.ask(wire.FETCH, 13, request(topics=unknown)).responses
    assert {each.partitions[0].error_code for each in reported} == {
        codes.UNKNOWN_TOPIC_ID
    }
    assert looks <= 1
    before = state.topic_ids.id_of("t")
    assert state.topic_ids.name_of(before) == "t"
    broker_harness.logdir.delete_topic("t")
    assert state.topic_ids.name_of(before) is None
    broker_harness.logdir.create_topic("t")
    assert (
        state.topic_ids.name_of(before),
        state.topic_ids.name_of(state.topic_ids.id_of("t")),
    ) == (None, "t")
    assert state.topic_ids.name_of(NO_ID) is None


def test_waiting_fetch_is_answered_when_its_offset_is_deleted(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t")
    broker_harness.produce(batch_of(b"v"))
    request = broker_harness.fetch_request(range(1))
    request.min_bytes = 1000
    request.max_wait_ms = 20_000
    reply = broker_harness.send(wire.FETCH, 11, request)
    assert isinstance(reply, PendingResponse) and not reply.is_set
    topic = wire.DELETE_RECORDS.Request.Topic
    body = wire.DELETE_RECORDS.Request(
        topics=[
            topic(name="t", partitions=[topic.Partition(partition_index=0, offset=1)])
        ],
        timeout_ms=1000,
    )
    assert (
        broker_harness.ask(wire.DELETE_RECORDS, 2, body)
        .topics[0]
        .partitions[0]
        .low_watermark
        == 1
    )
    reported = broker_harness.read(wire.FETCH, 11, reply).responses[0].partitions[0]
    assert reported.error_code == codes.OFFSET_OUT_OF_RANGE


def test_fetch_counts_bytes_that_a_sync_makes_readable(tmp_path: Path) -> None:
    """The bytes were written before the request arrived."""
    broker_harness = BrokerHarness(tmp_path, at_once=False, durability="group")
    broker_harness.logdir.create_topic("t")
    log = broker_harness.logdir.partition("t", 0)
    produced = broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(batch_of(b"v" * 2000))
    )
    while log.log_end_offset == 0:
        broker_harness.run(1)
    assert log.high_watermark == 0
    request = broker_harness.fetch_request(range(1))
    request.min_bytes = 1000
    request.max_wait_ms = 20_000
    reply = broker_harness.send(wire.FETCH, 11, request)
    assert isinstance(reply, PendingResponse) and not reply.is_set
    broker_harness.run()
    assert (
        broker_harness.read(wire.PRODUCE, 9, produced)
        .responses[0]
        .partition_responses[0]
        .error_code
        == 0
    )
    assert (
        len(
            broker_harness.read(wire.FETCH, 11, reply)
            .responses[0]
            .partitions[0]
            .records
        )
        > 2000
    )
    broker_harness.logdir.close()


def test_fetch_counts_bytes_that_a_marker_makes_readable(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t")
    log = broker_harness.logdir.partition("t", 0)
    producer_fields = {"producer_id": 7, "producer_epoch": 0}
    log.append_batch(
        encode(
            [(None, b"v" * 2000)],
            transactional=True,
            base_sequence=0,
            **producer_fields,
        )
    )
    request = broker_harness.fetch_request(range(1))
    request.min_bytes = 1000
    request.max_wait_ms = 20_000
    request.isolation_level = 1
    reply = broker_harness.send(wire.FETCH, 11, request)
    assert isinstance(reply, PendingResponse) and not reply.is_set
    log.append_batch(
        encode(
            [(None, b"v" * 2000)],
            transactional=True,
            base_sequence=1,
            **producer_fields,
        )
    )
    broker_harness.broker.tick(broker_harness.now_ms)
    assert not reply.is_set
    log.end_transaction(7, 0, commit=True)
    broker_harness.broker.tick(broker_harness.now_ms)
    assert (
        len(
            broker_harness.read(wire.FETCH, 11, reply)
            .responses[0]
            .partitions[0]
            .records
        )
        > 4000
    )


def test_waiting_fetch_is_read_once_it_may_have_enough_bytes() -> None:
    """A check at each append of a byte would cost more than the appends."""

    def at(written: int, readable: int, end: int, taken: int = 0) -> _Extent:
        return _Extent(written, taken, [readable, 5], [end, 5])

    growth = _Growth(at(100, 1, 1))
    assert not growth.may_reach(50, at(140, 1, 2)), "nothing more is readable"
    assert not growth.may_reach(50, at(140, 2, 2)), "40 bytes are"
    assert growth.may_reach(50, at(150, 2, 2))
    assert growth.may_reach(50, at(140, 2, 2, taken=1)), "and records were removed"
    assert growth.may_reach(50, at(10, 2, 2)), "the log was opened again"
    assert growth.may_reach(50, None)
    growth = _Growth(at(100, 1, 3))
    assert not growth.may_reach(50, at(100, 1, 3))
    assert growth.may_reach(50, at(100, 2, 3)), "the number of bytes is unknown"
    growth.record_read(at(120, 3, 4))
    assert not growth.may_reach(50, at(140, 4, 5)), (
        "the second check has found the bytes that were written before the first one"
    )
    assert growth.may_reach(50, at(150, 4, 5))
    growth.record_read(at(160, 5, 5))
    assert not growth.may_reach(50, at(200, 6, 6))
    assert _Growth(None).may_reach(50, at(200, 6, 6))


def test_fetch_of_a_disconnected_client_stops_waiting(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t")
    state = broker_harness.broker.state
    before = state.timers.next_ms
    request = broker_harness.fetch_request(range(1))
    request.min_bytes = 1
    request.max_wait_ms = 20_000
    reply = broker_harness.send(wire.FETCH, 11, request)
    assert isinstance(reply, PendingResponse) and state.fetches.awaited_keys() == [
        ("t", 0)
    ]
    reply.cancel()
    assert state.fetches.awaited_keys() == []
    assert state.timers.next_ms == before


# -- the log of the broker -------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == level and record.name == "netshim"
    ]


def test_events_for_operators_are_logged(
    broker_harness: BrokerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "netshim")
    metadata = wire.METADATA.Request
    broker_harness.ask(
        wire.METADATA,
        9,
        metadata(topics=[metadata.Topic(name="made")], allow_auto_topic_creation=True),
        "app",
    )
    join = wire.JOIN_GROUP.Request
    protocols = [join.Protocol(name="range", metadata=b"")]
    body = join(
        group_id="g",
        session_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=protocols,
        rebalance_timeout_ms=9,
    )
    member_id = broker_harness.ask(wire.JOIN_GROUP, 3, body).member_id
    sync = wire.SYNC_GROUP.Request
    own = [sync.Assignment(member_id=member_id, assignment=b"")]
    broker_harness.ask(
        wire.SYNC_GROUP,
        3,
        sync(group_id="g", generation_id=1, member_id=member_id, assignments=own),
    )
    broker_harness.send(wire.JOIN_GROUP, 3, body)
    broker_harness.ask(
        wire.DELETE_TOPICS,
        5,
        wire.DELETE_TOPICS.Request(topic_names=["made"], timeout_ms=1),
    )
    output = "\n".join(lines(caplog, "INFO"))
    for expected in (
        "topic made created by a Metadata request, by client 'app' at 127.0.0.1",
        "group 'g' formed: generation 1, 1 members, 'range'",
        "group 'g' rebalances",
        "topic made deleted",
    ):
        assert expected in output
    assert lines(caplog, "WARNING") == []


def test_refusal_is_logged_with_client_request_and_reason(
    broker_harness: BrokerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    broker_harness.logdir.create_topic("t")
    broker_harness.ask(
        wire.PRODUCE, 9, broker_harness.produce_request(b"junk"), "app\nforged line"
    )
    broker_harness.ask(
        wire.INIT_PRODUCER_ID,
        4,
        wire.INIT_PRODUCER_ID.Request(transactional_id="x"),
        "app",
    )
    topics = wire.CREATE_TOPICS.Request
    topic = topics.Topic(name="t", num_partitions=1, replication_factor=1)
    broker_harness.ask(
        wire.CREATE_TOPICS, 4, topics(topics=[topic], timeout_ms=1), "app"
    )
    output = lines(caplog, "WARNING")
    assert output[0].startswith(
        "Produce v9 of client 'app\\nforged line' at 127.0.0.1 refused: INVALID_RECORD, expected"
    )
    assert (
        output[1]
        == "InitProducerId v4 of client 'app' at 127.0.0.1 refused: INVALID_TRANSACTION_TIMEOUT"
    )
    assert output[2].startswith(
        "CreateTopics v4 of client 'app' at 127.0.0.1 refused: TOPIC_ALREADY_EXISTS"
    )


@pytest.mark.parametrize(
    ("api_key", "groups"),
    [(76, "share groups"), (79, "share groups"), (88, "streams groups")],
)
def test_requests_of_other_kinds_of_groups_are_refused_and_logged(
    broker_harness: BrokerHarness,
    caplog: pytest.LogCaptureFixture,
    api_key: int,
    groups: str,
) -> None:
    assert api_key not in HANDLERS
    with pytest.raises(CloseConnection):
        broker_harness.broker.handle(
            SESSION,
            memoryview(api_key.to_bytes(2, "big") + bytes(10)),
            broker_harness.now_ms,
        )
    assert lines(caplog, "WARNING") == [
        f"a request of 127.0.0.1 refused: {groups} are not served"
    ]


def test_log_lines_caused_by_clients_are_limited(
    broker_harness: BrokerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    broker_harness.logdir.create_topic("t")
    for _ in range(500):
        broker_harness.produce(b"junk")
    assert len(lines(caplog, "WARNING")) == 10
    broker_harness.now_ms += 60_000
    broker_harness.broker.tick(broker_harness.now_ms)
    assert lines(caplog, "WARNING")[10:] == [
        "refused Produce 87: 490 more lines like these within a minute"
    ]
    broker_harness.produce(b"junk")
    assert len(lines(caplog, "WARNING")) == 12


def test_repeated_lines_of_a_handler_are_limited() -> None:
    repeated = RepeatedLineFilter(max_lines=3)

    def is_said(second: float, text: str, value: int) -> bool:
        record = logging.LogRecord(
            "logcore.log", logging.ERROR, "f", 1, text, (value,), None
        )
        record.created = second
        return bool(repeated.filter(record))

    assert [is_said(0.1 * number, "poisoned %d", number) for number in range(6)] == [
        True
    ] * 3 + [False] * 3
    assert is_said(1, "something else %d", 1) and is_said(61, "poisoned %d", 7)


def test_work_that_may_block_on_the_disk_runs_in_a_thread(tmp_path: Path) -> None:
    """Leader epochs of logs that are not open, a search by time, and long searches for
    transactions.
    """
    first = BrokerHarness(tmp_path)
    first.logdir.create_topic("t")
    log = first.logdir.partition("t", 0)
    log.append_many([(None, b"v", (), 1_000 + at) for at in range(2_000)])
    first.close()
    broker_harness = BrokerHarness(tmp_path, at_once=False)
    with contextlib.closing(broker_harness):
        metadata = wire.METADATA.Request(topics=[wire.METADATA.Request.Topic(name="t")])
        described = wire.DESCRIBE_TOPIC_PARTITIONS.Request(
            topics=[wire.DESCRIBE_TOPIC_PARTITIONS.Request.Topic(name="t")],
            response_partition_limit=10,
        )
        later = broker_harness.send(wire.DESCRIBE_TOPIC_PARTITIONS, 0, described)
        assert isinstance(later, PendingResponse) and not later.is_set
        broker_harness.run()
        assert later.is_set
        assert broker_harness.ask(wire.METADATA, 9, metadata).topics[0].error_code == 0

        def list_offsets(timestamp: int, isolation: int = 0) -> Any:
            part = wire.LIST_OFFSETS.Request.Topic.Partition(
                partition_index=0, timestamp=timestamp, current_leader_epoch=-1
            )
            topic = wire.LIST_OFFSETS.Request.Topic(name="t", partitions=[part])
            request = wire.LIST_OFFSETS.Request(
                topics=[topic], isolation_level=isolation
            )
            return broker_harness.send(wire.LIST_OFFSETS, 7, request)

        def offset(reply: Any) -> int:
            return int(
                broker_harness.read(wire.LIST_OFFSETS, 7, reply)
                .topics[0]
                .partitions[0]
                .offset
            )

        opening = list_offsets(-1)
        broker_harness.run()
        assert offset(opening) == 2_000
        assert offset(list_offsets(-1)) == 2_000, "nothing is read for the end"
        for timestamp, expected in ((1_500, 500), (-3, 1_999)):
            searched = list_offsets(timestamp)
            assert isinstance(searched, PendingResponse) and not searched.is_set
            broker_harness.run()
            assert offset(searched) == expected
        log = broker_harness.logdir.partition("t", 0)
        assert unsearched_offsets(log) == 2_000
        committed = list_offsets(-1, isolation=1)
        assert not committed.is_set
        broker_harness.run()
        assert offset(committed) == 2_000 and unsearched_offsets(log) == 0
        log.append(b"v", timestamp_ms=9)
        assert offset(list_offsets(-1, isolation=1)) == 2_001, (
            "a little is walked at once"
        )
        log.append_many([(None, b"v", (), 9)] * 1_001)
        committed = list_offsets(-1, isolation=1)
        assert not committed.is_set
        broker_harness.run()
        assert offset(committed) == 3_002


def test_fetch_with_a_full_response_waits_for_no_more_bytes(tmp_path: Path) -> None:
    """A client may wait for more bytes than the broker puts into a response. As in
    KafkaApis.handleFetchRequest, it gets them when the response is full.
    """
    harness = BrokerHarness(tmp_path / "data", fetch_max_bytes=1_024)
    with contextlib.closing(harness):
        harness.logdir.create_topic("t")
        for _ in range(10):
            harness.logdir.append("t", b"x" * 500, partition=0)
        request = harness.fetch_request(range(1))
        request.max_wait_ms, request.min_bytes = 60_000, 4_000
        response = harness.ask(wire.FETCH, 12, request)
        (part,) = response.responses[0].partitions
        assert 500 < len(part.records) <= 1_024


def test_fetch_counts_readable_partitions_that_do_not_fit(tmp_path: Path) -> None:
    """The first partition fills its own limit, and no batch of the second one fits."""
    harness = BrokerHarness(tmp_path / "data")
    with contextlib.closing(harness):
        harness.logdir.create_topic("t", 2)
        for number in (0, 1):
            harness.logdir.append("t", b"x" * 500, partition=number)
        size = len(harness.fetch(0).records)
        request = harness.fetch_request(range(2))
        request.topics[0].partitions[0].partition_max_bytes = size
        request.max_wait_ms, request.min_bytes = 60_000, size + 100
        request.max_bytes = size + 100
        response = harness.ask(wire.FETCH, 12, request)
        sizes = [len(part.records) for part in response.responses[0].partitions]
        assert sizes == [size, 0]
