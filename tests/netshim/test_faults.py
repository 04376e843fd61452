"""Fault rules: errors, delays, lost responses and closed connections, by request."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logcore import InvalidConfigError, recordbatch
from netshim import wire
from netshim.faults.control import FaultControl, observed_requests
from netshim.faults.requests import TOPIC_RESOURCE, filters_of, find_api
from netshim.response_errors import errors_in
from netshim.scheduling import CloseConnection, PendingResponse
from netshim.security.acls import (
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.guards import GUARDS
from netshim.session import ANONYMOUS
from netshim.state import Call
from netshim.testing import Kafka
from netshim.wire import codes
from support.broker_harness import SESSION, BrokerHarness
from support.client import Client
from support.messages import draw

RECORDS = recordbatch.encode([(None, b"v")], base_offset=0)
#: Authentication answers these two before any rule is checked.
FAULTY = [
    wire.APIS[key]
    for key in sorted(GUARDS)
    if wire.APIS[key] not in (wire.SASL_HANDSHAKE, wire.SASL_AUTHENTICATE)
]


class AtOnce:
    """Calls functions as the thread of a broker does."""

    def call(self, function: Callable[[], Any]) -> Any:
        return function()


@pytest.fixture
def broker_harness(tmp_path: Path) -> Iterator[BrokerHarness]:
    harness = BrokerHarness(tmp_path / "data")
    harness.logdir.create_topic("t", 3)
    harness.logdir.create_topic("u")
    SESSION.is_closing = False
    yield harness
    SESSION.is_closing = False
    harness.close()


@pytest.fixture
def faults(broker_harness: BrokerHarness) -> FaultControl:
    return FaultControl(AtOnce(), broker_harness.broker)


def produced(
    broker_harness: BrokerHarness, partitions: int = 1, **more: Any
) -> dict[int, int]:
    """Produce to some partitions of t; return the error of each."""
    request = broker_harness.produce_request(RECORDS, partitions=partitions)
    response = broker_harness.ask(wire.PRODUCE, 9, request, **more)
    return {
        entry.index: entry.error_code
        for topic in response.responses
        for entry in topic.partition_responses
    }


def ends(broker_harness: BrokerHarness) -> list[int]:
    return [
        broker_harness.logdir.partition("t", number).log_end_offset
        for number in range(3)
    ]


# -- errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("api", FAULTY, ids=lambda api: api.name)
def test_every_api_answers_an_error(
    broker_harness: BrokerHarness, faults: FaultControl, api: Any
) -> None:
    """The requests are drawn; none of them reaches its handler."""
    rule = faults.answer(api.key, "UNKNOWN_SERVER_ERROR")
    reached: list[int] = []
    faults.call(api.key, lambda request, call: reached.append(call.version))
    served = 0
    for version in range(api.min_version, api.max_version + 1):
        for seed in range(10):
            rng = random.Random(seed)
            request = draw(
                api.request.schema, version, api.request.is_flexible(version), rng
            )
            with contextlib.suppress(CloseConnection):  # acks=0 has no other error
                reply = broker_harness.send(api, version, request)
                if reply is None:
                    continue
                response = broker_harness.read(api, version, reply)
                error_codes = {code for code, _ in errors_in(response)}
                assert error_codes <= {codes.UNKNOWN_SERVER_ERROR}, (version, seed)
                served += bool(error_codes)
    if api is not wire.METADATA:  # its errors belong to topics that exist
        assert not reached
        assert served
    assert rule.hits


def test_faulted_partition_stores_nothing_and_others_are_served(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    faults.answer("Produce", "NOT_LEADER_OR_FOLLOWER", topic="t", partition=1)
    assert produced(broker_harness, 3) == {0: 0, 1: codes.NOT_LEADER_OR_FOLLOWER, 2: 0}
    assert ends(broker_harness) == [1, 0, 1]


@pytest.mark.parametrize("version", [9, 13])
def test_faulted_topic_has_one_entry_in_the_response(
    broker_harness: BrokerHarness, faults: FaultControl, version: int
) -> None:
    faults.answer("produce", 6, partition=2)
    request = broker_harness.produce_request(RECORDS, partitions=3)
    topic = request.topic_data[0]
    topic.topic_id = broker_harness.broker.state.topic_ids.id_of("t")
    response = broker_harness.ask(wire.PRODUCE, version, request)
    (entry,) = response.responses
    assert sorted(
        (response.index, response.error_code) for response in entry.partition_responses
    ) == [
        (0, 0),
        (1, 0),
        (2, 6),
    ]


def test_committed_offset_of_one_topic_is_refused(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    faults.answer("OffsetCommit", "COORDINATOR_NOT_AVAILABLE", topic="u", group="g*")
    request = wire.OFFSET_COMMIT.Request
    topics = [
        request.Topic(
            name=name,
            partitions=[request.Topic.Partition(partition_index=0, committed_offset=0)],
        )
        for name in "tu"
    ]
    response = broker_harness.ask(
        wire.OFFSET_COMMIT,
        8,
        request(
            group_id="g1",
            generation_id_or_member_epoch=-1,
            member_id="",
            topics=topics,
        ),
    )
    assert {
        topic.name: topic.partitions[0].error_code for topic in response.topics
    } == {
        "t": 0,
        "u": codes.COORDINATOR_NOT_AVAILABLE,
    }


def test_fetched_offset_of_one_topic_is_refused(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    """The other topics of the group, and the other groups, are answered."""
    faults.answer("OffsetFetch", "UNSTABLE_OFFSET_COMMIT", topic="u")
    request = wire.OFFSET_FETCH.Request
    group = request.Group
    topics = [group.Topic(name=name, partition_indexes=[0]) for name in "tu"]
    response = broker_harness.ask(
        wire.OFFSET_FETCH,
        8,
        request(
            groups=[
                group(group_id="g1", topics=topics),
                group(group_id="g2", topics=topics[:1]),
            ]
        ),
    )
    error_codes = {
        (group.group_id, topic.name): topic.partitions[0].error_code
        for group in response.groups
        for topic in group.topics
    }
    unstable = codes.UNSTABLE_OFFSET_COMMIT
    assert error_codes == {("g1", "t"): 0, ("g1", "u"): unstable, ("g2", "t"): 0}
    assert not any(group.error_code for group in response.groups)


@pytest.mark.parametrize(
    "api",
    [api for api in FAULTY if "topic" in filters_of(api.name)],
    ids=lambda api: api.name,
)
def test_every_api_answers_an_error_for_one_topic(
    broker_harness: BrokerHarness, faults: FaultControl, api: Any
) -> None:
    """A rule that matches always has an effect, even if the API has no errors for
    topics.
    """
    rule = faults.answer(api.key, "UNKNOWN_SERVER_ERROR", topic="[a-m]*")
    shown = 0
    for version in range(api.min_version, api.max_version + 1):
        for seed in range(40):
            rng = random.Random(seed)
            request = draw(
                api.request.schema, version, api.request.is_flexible(version), rng
            )
            for resource in getattr(request, "resources", ()):
                resource.resource_type = TOPIC_RESOURCE
            if not _can_fail_in_part(api, version, request):
                continue
            hits = rule.hits
            with contextlib.suppress(CloseConnection):  # acks=0 has no other error
                reply = broker_harness.send(api, version, request)
                broker_harness.broker.tick(broker_harness.now_ms)
                if rule.hits == hits or reply is None:
                    continue
                errors = errors_in(broker_harness.read(api, version, reply))
                assert codes.UNKNOWN_SERVER_ERROR in {code for code, _ in errors}, (
                    version,
                    seed,
                )
                shown += 1
    assert shown or api in (wire.METADATA, wire.DESCRIBE_LOG_DIRS)


def _can_fail_in_part(api: Any, version: int, request: Any) -> bool:
    """Return whether the error of one topic can be in the response."""
    if api is wire.DESCRIBE_LOG_DIRS:
        return version >= 3  # older responses have no error
    if api is wire.DESCRIBE_TOPIC_PARTITIONS and request.cursor is not None:
        return bool(request.cursor.partition_index >= 0)  # refused as a whole
    return True


def test_partition_of_a_transaction_is_refused(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    faults.answer("AddPartitionsToTxn", "CONCURRENT_TRANSACTIONS", topic="t")
    request = wire.ADD_PARTITIONS_TO_TXN.Request
    answer = broker_harness.ask(
        wire.ADD_PARTITIONS_TO_TXN,
        3,
        request(
            v3_and_below_transactional_id="x",
            v3_and_below_topics=[request.Topic(name="t", partitions=[0, 1])],
        ),
    )
    (topic,) = answer.results_by_topic_v3_and_below
    error_codes = [entry.partition_error_code for entry in topic.results_by_partition]
    assert error_codes == [codes.CONCURRENT_TRANSACTIONS] * 2


def test_metadata_of_all_topics_shows_the_error_of_one_topic(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    rule = faults.answer("Metadata", "LEADER_NOT_AVAILABLE", topic="u")
    partly = faults.answer("Metadata", "LEADER_NOT_AVAILABLE", topic="t", partition=1)
    request = wire.METADATA.Request(topics=None)
    shown = {
        topic.name: topic.error_code
        for topic in broker_harness.ask(wire.METADATA, 9, request).topics
    }
    assert shown == {"t": 0, "u": codes.LEADER_NOT_AVAILABLE}
    rule.remove()
    (topic,) = (
        topic
        for topic in broker_harness.ask(wire.METADATA, 9, request).topics
        if topic.name == "t"
    )
    error_codes = [partition.error_code for partition in topic.partitions]
    assert error_codes == [0, codes.LEADER_NOT_AVAILABLE, 0]
    assert (rule.hits, partly.hits) == (1, 1)


# -- which requests --------------------------------------------------------------------


def test_first_rule_wins_and_observers_prevent_none(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    observer = faults.observe("Produce")
    first = faults.answer("Produce", 6, times=1)
    second = faults.answer("*", 7)
    assert [produced(broker_harness)[0] for _ in range(3)] == [6, 7, 7]
    assert (observer.hits, first.hits, second.hits) == (3, 1, 2)
    assert [request.codes for request in observer.requests] == [(6,), (7,), (7,)]


def test_rule_acts_after_every_and_times(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    faults.answer("Produce", 6, after=2, every=3, times=2)
    error_codes = [produced(broker_harness)[0] for _ in range(12)]
    assert error_codes == [0, 0, 0, 0, 6, 0, 0, 6, 0, 0, 0, 0]


def test_probability_repeats_with_its_seed(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    def drawn(seed: int) -> list[int]:
        rule = faults.answer("Produce", 6, probability=0.5, seed=seed)
        error_codes = [produced(broker_harness)[0] for _ in range(40)]
        rule.remove()
        return error_codes

    assert drawn(1) == drawn(1) != drawn(2)
    assert 5 < drawn(1).count(6) < 35


def test_filters_by_client_and_version(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    faults.answer("Produce", 6, client_id="slow-*", version=9)
    assert produced(broker_harness, client_id="fast") == {0: 0}
    assert produced(broker_harness, client_id="slow-1") == {0: 6}


@pytest.mark.parametrize(
    ("api", "error", "filters", "text"),
    [
        ("Prodduce", 6, {}, "unknown API .*expected Produce"),
        ("SaslHandshake", 6, {}, "unknown API 'SaslHandshake'"),
        (9_999, 6, {}, "unknown API key"),
        (
            "Produce",
            "NOT_LEADER",
            {},
            "unknown error .*expected NOT_LEADER_OR_FOLLOWER",
        ),
        ("Produce", 0, {}, "unknown error code"),
        ("Produce", 30_000, {}, "unknown error code"),
        ("Produce", 6, {"topics": "t"}, "unknown filter .*expected topic"),
        ("Heartbeat", 27, {"topic": "t"}, "Heartbeat have no topic"),
        ("CreateTopics", 41, {"partition": 1}, "CreateTopics have no partition"),
        ("Fetch", 6, {"group": "g"}, "Fetch have no group"),
        ("Fetch", 6, {"times": 0}, "times"),
        ("Fetch", 6, {"after": -1}, "after"),
        ("Fetch", 6, {"every": 1.5}, "every"),
        ("Fetch", 6, {"probability": 0}, "probability"),
    ],
)
def test_invalid_rule_names_the_nearest_known_name(
    faults: FaultControl, api: Any, error: Any, filters: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidConfigError, match=text):
        faults.answer(api, error, **filters)


def test_invalid_actions_are_refused(faults: FaultControl) -> None:
    for wrong in (
        lambda: faults.delay("Fetch", -1),
        lambda: faults.delay("Fetch", 0.5),  # type: ignore[arg-type]
        lambda: faults.disconnect("Fetch", after_bytes=-1),
        lambda: faults.lose_answer("Fetch", then="nothing"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidConfigError):
            wrong()


def test_number_of_rules_is_limited(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    for _ in range(1_000):
        faults.observe("Produce")
    with pytest.raises(InvalidConfigError, match="too many rules"):
        faults.observe("Produce")
    faults.clear()
    assert produced(broker_harness) == {0: 0}


def test_names_of_apis() -> None:
    assert [find_api(name) for name in ("FETCH", 1, "*")] == ["Fetch", "Fetch", "*"]


# -- time and connections --------------------------------------------------------------


def test_delayed_request_is_served_later(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    faults.delay("Produce", 500, times=1)
    waits = broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(RECORDS)
    )
    assert isinstance(waits, PendingResponse) and waits.runs_in_steps
    broker_harness.now_ms += 499
    broker_harness.broker.tick(broker_harness.now_ms)
    assert not waits.is_set and ends(broker_harness) == [0, 0, 0]
    broker_harness.now_ms += 1
    broker_harness.broker.tick(broker_harness.now_ms)
    broker_harness.read(wire.PRODUCE, 9, waits)
    assert ends(broker_harness) == [1, 0, 0]


@pytest.mark.parametrize("end", ["release", "remove", "clear", "stop"])
def test_held_request_is_served_when_released(
    broker_harness: BrokerHarness, faults: FaultControl, end: str
) -> None:
    rule = faults.hold("Produce")
    waits = broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(RECORDS)
    )
    assert not waits.is_set
    {
        "release": rule.release,
        "remove": rule.remove,
        "clear": faults.clear,
        "stop": partial(broker_harness.broker.stop, broker_harness.now_ms),
    }[end]()
    broker_harness.read(wire.PRODUCE, 9, waits)
    assert ends(broker_harness) == [1, 0, 0]


def test_held_request_of_a_closed_connection_is_not_served(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    rule = faults.hold("Produce")
    waits = broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(RECORDS)
    )
    (active,) = broker_harness.broker.faults.rules
    assert len(active.waiting) == 1
    waits.cancel()
    assert not active.waiting, "the rule keeps the request of a closed connection"
    rule.release()
    assert ends(broker_harness) == [0, 0, 0]


def test_lost_response_has_stored_its_records(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    closes = faults.lose_answer("Produce", then="close", times=1)
    lost = broker_harness.send(wire.PRODUCE, 9, broker_harness.produce_request(RECORDS))
    assert isinstance(lost.value, CloseConnection)
    faults.lose_answer("Produce", times=1)
    lost = broker_harness.send(wire.PRODUCE, 9, broker_harness.produce_request(RECORDS))
    assert not lost.is_set and ends(broker_harness) == [2, 0, 0]
    faults.clear()
    assert isinstance(lost.value, CloseConnection)
    assert closes.hits == 1


def test_closed_connection_cancels_a_request_whose_response_is_lost(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    """If it were not cancelled, a fetch would wait for records that its client can
    never get.
    """
    faults.lose_answer("Fetch")
    request = broker_harness.fetch_request(range(1))
    request.max_wait_ms = 60_000
    request.min_bytes = 1
    lost = broker_harness.send(wire.FETCH, 12, request)
    assert broker_harness.broker.state.fetches.awaited_keys()
    lost.cancel()
    assert not broker_harness.broker.state.fetches.awaited_keys()
    (active,) = broker_harness.broker.faults.rules
    assert not active.waiting


def test_response_of_a_failed_handler_is_lost_too(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    def fail(request: Any, call: Any, state: Any) -> Any:
        raise ValueError("a defect")

    faults.lose_answer("Produce", then="close")
    assert broker_harness.broker.faults is not None
    call = Call(SESSION, wire.PRODUCE.key, 9, "test", broker_harness.now_ms)
    lost = broker_harness.broker.faults.handle(
        fail, broker_harness.produce_request(RECORDS), call, broker_harness.broker.state
    )
    assert isinstance(lost.value, CloseConnection)
    (observed,) = observed_requests(broker_harness.broker)
    assert observed.codes == (codes.UNKNOWN_SERVER_ERROR,)


def test_response_is_cut_after_refused_topics_were_added(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    """The parts that a user may not see are added to a response afterwards."""
    broker_harness.broker.state.security.acls = AclIndex(
        [
            Acl(
                ResourceType.TOPIC,
                Pattern.LITERAL,
                "t",
                ANONYMOUS,
                "*",
                AclOperation.WRITE,
                Permission.ALLOW,
            )
        ]
    )
    request = broker_harness.produce_request(RECORDS)
    request.topic_data += broker_harness.produce_request(RECORDS, topic="u").topic_data
    faults.disconnect("Produce", after_bytes=10_000)
    reply = broker_harness.send(wire.PRODUCE, 9, request)
    response = broker_harness.read(wire.PRODUCE, 9, reply)
    error_codes = {
        entry.name: entry.partition_responses[0].error_code
        for entry in response.responses
    }
    assert error_codes == {"t": 0, "u": codes.TOPIC_AUTHORIZATION_FAILED}


def test_disconnect_before_and_within_the_response(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    faults.disconnect("Produce", times=1)
    with pytest.raises(CloseConnection):
        broker_harness.send(wire.PRODUCE, 9, broker_harness.produce_request(RECORDS))
    assert ends(broker_harness) == [0, 0, 0]
    faults.disconnect("Produce", after_bytes=7, times=1)
    pieces = broker_harness.send(
        wire.PRODUCE, 9, broker_harness.produce_request(RECORDS)
    )
    assert len(b"".join(pieces)) == 7
    assert SESSION.is_closing and ends(broker_harness) == [1, 0, 0]


def test_function_of_a_rule_gets_requests_and_may_answer(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    names: list[str] = []

    def watch(request: Any, call: Any) -> Any:
        names.append(call.client_id)
        if len(names) == 2:
            return wire.METADATA.Response(cluster_id="another")
        return None

    faults.call("Metadata", watch)
    request = wire.METADATA.Request(topics=[])
    cluster_ids = [
        broker_harness.ask(wire.METADATA, 9, request).cluster_id for _ in range(3)
    ]
    assert cluster_ids[1] == "another" and cluster_ids[0] == cluster_ids[2] != "another"


def test_wait_lists_other_requests_if_it_fails(
    broker_harness: BrokerHarness, faults: FaultControl
) -> None:
    rule = faults.answer("Fetch", 6, topic="never")
    produced(broker_harness)
    with pytest.raises(AssertionError, match=r"Produce v9 of 'test' \(t-0\)"):
        rule.wait(hits=1, timeout=0)


def test_broker_lists_the_requests_that_it_has_served(
    broker_harness: BrokerHarness,
) -> None:
    assert observed_requests(broker_harness.broker) == []
    produced(broker_harness, 2)
    broker_harness.fetch(0)
    (observed,) = observed_requests(broker_harness.broker, "Produce")
    assert (observed.client_id, observed.principal) == ("test", "User:ANONYMOUS")
    assert observed.partitions == (("t", 0), ("t", 1)) and observed.codes == ()
    assert len(observed_requests(broker_harness.broker)) == 2


# -- a running broker ------------------------------------------------------------------


def test_delayed_request_delays_later_requests_of_its_connection(kafka: Kafka) -> None:
    """Without the delay, the later requests would overtake the delayed request."""
    kafka.create_topic("t", 1)
    with kafka.faults() as faults, contextlib.closing(Client(kafka.port)) as client:
        rule = faults.hold("Produce", times=1)
        for value in (b"first", b"second"):
            client.begin_produce([value])
        rule.wait()
        assert kafka.records("t") == []
        rule.release()
        for _ in range(2):
            client.receive_produced()
        assert [record.value for record in kafka.records("t")] == [b"first", b"second"]


def test_connection_ends_after_the_first_bytes(kafka: Kafka) -> None:
    with kafka.faults() as faults, contextlib.closing(Client(kafka.port)) as client:
        faults.disconnect("ApiVersions", after_bytes=5)
        client.send(wire.API_VERSIONS, 0, wire.API_VERSIONS.Request())
        client.sock.settimeout(60)
        came = b""
        while piece := client.sock.recv(100):
            came += piece
        assert len(came) == 5


def test_broker_stops_while_a_response_is_lost(kafka: Kafka) -> None:
    with contextlib.closing(Client(kafka.port)) as client:
        rule = kafka.faults().lose_answer("Metadata")
        client.send(wire.METADATA, 0, wire.METADATA.Request(topics=[]))
        rule.wait()
        kafka.stop()
        client.sock.settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert client.sock.recv(1) == b""
    assert not kafka.server.is_running
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", kafka.port), timeout=60)


def test_block_ends_after_its_broker_has_stopped(kafka: Kafka) -> None:
    with kafka.faults() as faults:
        faults.hold("Produce")
        kafka.stop()


def test_wait_for_group_counts_members_of_both_protocols(kafka: Kafka) -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    kafka.create_topic("t", 1)
    kafka.wait_for_group("classic", state="Dead")
    for protocol in ("classic", "consumer"):
        client = confluent_kafka.Consumer(
            {
                "bootstrap.servers": kafka.bootstrap,
                "group.id": protocol,
                "group.protocol": protocol,
            }
        )
        client.subscribe(["t"])
        with contextlib.ExitStack() as stack:
            stack.callback(client.close)
            while not client.assignment():
                client.poll(0.1)
            kafka.wait_for_group(protocol, members=1, timeout=60)
            with pytest.raises(AssertionError, match="found Stable with 1"):
                kafka.wait_for_group(protocol, members=2, timeout=0)
    kafka.wait_for_group("classic", state="Empty", members=0, timeout=60)
