"""Replays of recordings: real clients, differences, and wrong input."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from logcore import recordbatch
from logcore.errors import CorruptBatchError, RemoteUnavailableError
from netshim import wire
from netshim.recording.recorder import TrafficRecorder
from netshim.recording.traffic_file import TrafficFile, TrafficKind, TrafficRecord
from netshim.replay.comparison import differences, should_retry
from netshim.replay.frame_list import rows_of
from netshim.replay.full_fetches import with_full_fetches
from netshim.replay.id_mapping import IdMapping
from netshim.replay.replayer import (
    ReplayReport,
    ResponseDifference,
    TrafficReplayer,
)
from netshim.session import ClientSession
from netshim.testing import Kafka
from netshim.wire import codes
from support.client import Client
from support.client_jobs import consume, copy_in_transactions, produce

confluent_kafka = pytest.importorskip("confluent_kafka")
click_testing = pytest.importorskip("click.testing")
from logcore.cli.commands import main as logcore_main  # noqa: E402
from netshim.command import main  # noqa: E402

Made = list[tuple[Any, ...]]


def contents(kafka: Kafka, topic: str) -> Made:
    return [
        (record.partition, record.offset, record.key, record.value, record.timestamp_ms)
        for record in kafka.records(topic)
    ]


def replayed(
    path: Path | str, kafka: Kafka, **options: Any
) -> tuple[ReplayReport, list[ResponseDifference]]:
    """Replay a recording and compare the responses."""
    differing: list[ResponseDifference] = []
    replayer = TrafficReplayer(
        ("127.0.0.1", kafka.port), compares=True, report=differing.append, **options
    )
    with TrafficFile(path) as traffic:
        return replayer.run(traffic), differing


def run(*arguments: str | Path) -> Any:
    """Run `netshim replay` in this process."""
    done = click_testing.CliRunner().invoke(main, ["replay", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), (
        done.exception
    )
    return done


@pytest.fixture
def brokers(kafka_factory: Callable[..., Kafka]) -> Iterator[tuple[Kafka, Kafka]]:
    """The broker that is recorded, and an empty broker for the replay."""
    options = {"num_partitions": 2}
    yield kafka_factory(**options), kafka_factory(**options)


@pytest.mark.long
def test_work_of_real_clients_is_replayed_without_differences(
    brokers: tuple[Kafka, Kafka], tmp_path: Path
) -> None:
    first, second = brokers
    with first.record(tmp_path / "t.ksh"):
        produce(
            first.bootstrap_servers, "orders", 1_000, **{"enable.idempotence": True}
        )
        produce(first.bootstrap_servers, "orders", 200, **{"compression.type": "zstd"})
        consume(first.bootstrap_servers, "orders", 1_200, 2, **{"group.id": "classic"})
        consume(
            first.bootstrap_servers, "orders", 1_200, 2,
            **{"group.id": "modern", "group.protocol": "consumer"},
        )  # fmt: skip
        copy_in_transactions(first.bootstrap_servers, "orders", "copies")
        consume(
            first.bootstrap_servers, "copies", 200, 1,
            **{"group.id": "last", "isolation.level": "read_committed"},
        )  # fmt: skip
    done = run(
        tmp_path / "t.ksh", "--to", second.bootstrap_servers, "--compare",
        "--format", "ndjson",
    )  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, ""), done.stdout
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    summary = rows[-1]
    assert summary["kind"] == "summary" and summary["differences"] == 0
    assert summary["compared"] and summary["redacted"] == 0
    counts = {row["api"]: row for row in rows if row["kind"] == "api"}
    for api in ("Produce", "Fetch", "SyncGroup", "EndTxn", "TxnOffsetCommit"):
        assert counts[api]["requests"] > 0, api
    assert counts["ConsumerGroupHeartbeat"]["responses"] > 0
    for topic in ("orders", "copies"):
        assert contents(first, topic) == contents(second, topic)
    assert len(contents(second, "orders")) == 1_200
    committed = second.records("copies", isolation="read_committed")
    assert len(committed) == 200 and len(second.records("copies")) == 300


@pytest.mark.long
@pytest.mark.parametrize("client", ["kafka-python", "aiokafka"])
def test_other_clients_are_replayed_without_differences(
    brokers: tuple[Kafka, Kafka], tmp_path: Path, client: str
) -> None:
    first, second = brokers
    jobs = {"kafka-python": use_kafka_python, "aiokafka": use_aiokafka}
    with first.record(tmp_path / "t.ksh"):
        jobs[client](first.bootstrap_servers)
    report, differing = replayed(tmp_path / "t.ksh", second)
    assert differing == []
    assert report.total("requests") > 5
    assert contents(first, "orders") == contents(second, "orders") != []


def use_kafka_python(servers: str) -> None:
    kafka = pytest.importorskip("kafka")
    producer = kafka.KafkaProducer(bootstrap_servers=servers)
    for number in range(100):
        producer.send("orders", b"%d" % number).get(60)
    producer.close()
    consumer = kafka.KafkaConsumer(
        "orders", bootstrap_servers=servers, group_id="g", auto_offset_reset="earliest"
    )
    # kafka-python 3.0.12 never ends a second rebalance if a poll() times out within it.
    # The first one suffices if the partitions are known.
    consumer.partitions_for_topic("orders")
    count = 0
    while count < 100:
        count += sum(map(len, consumer.poll(1_000).values()))
    consumer.commit()
    consumer.close()


def use_aiokafka(servers: str) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    import asyncio

    async def work() -> None:
        async with (
            aiokafka.AIOKafkaProducer(
                bootstrap_servers=servers, transactional_id="t"
            ) as producer,
            producer.transaction(),
        ):
            for number in range(100):
                await producer.send_and_wait("orders", b"%d" % number)
        async with aiokafka.AIOKafkaConsumer(
            "orders",
            bootstrap_servers=servers,
            group_id="g",
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        ) as consumer:
            for _ in range(100):
                await consumer.getone()
            await consumer.commit()

    asyncio.run(work())


# -- differences -----------------------------------------------------------------------


@pytest.fixture
def small(brokers: tuple[Kafka, Kafka], tmp_path: Path) -> Path:
    """A recording of one connection: create, produce twice, fetch."""
    path = tmp_path / "small.ksh"
    first, _ = brokers
    with first.record(path):
        client = Client(first.port)
        client.create()
        client.produce([b"4 apples"])
        client.produce([b"2 pears"])
        client.fetch()
        client.close()
    return path


def test_difference_names_field_and_both_values(
    brokers: tuple[Kafka, Kafka], small: Path
) -> None:
    second = brokers[1]
    second.append("t", b"something else")  # with two partitions, unlike the recording
    done = run(small, "--to", second.bootstrap_servers, "--compare", "--timeout", "1")
    assert done.exit_code == 1
    assert "CreateTopics v4" in done.stdout
    assert "topics[t].error_code: recorded 0, replayed 36" in done.stdout
    expected = (
        "Produce v9, correlation id 2: responses[t].partition_responses[0]."
        "base_offset: recorded 0, replayed 1"
    )
    assert expected in done.stdout
    assert "Fetch v11, correlation id 4: responses[t].partitions[0]" in done.stdout
    without = run(small, "--to", second.bootstrap_servers)
    assert without.exit_code == 0
    assert "without --compare, only missing ones count" in without.stdout


def test_difference_in_records_is_found(
    brokers: tuple[Kafka, Kafka], small: Path
) -> None:
    second = brokers[1]
    client = Client(second.port)
    client.create()
    client.produce([b"5 apples"])  # of the same size
    client.produce([b"2 pears"])
    client.close()
    with TrafficFile(small) as file:
        records = list(file)
    fetches = [record for record in records if api_of(record) in (1, None)]
    differing: list[ResponseDifference] = []
    replayer = TrafficReplayer(
        ("127.0.0.1", second.port), compares=True, report=differing.append
    )
    replayer.run(fetches)
    (difference,) = differing
    assert difference.api == "Fetch"
    assert [field.path for field in difference.fields] == [
        "responses[t].partitions[0].records[0]"
    ]


def test_repeated_difference_counts_once_after_the_limit_of_lines(
    brokers: tuple[Kafka, Kafka], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netshim.replay_command._MAX_PRINTED", 1)
    first, second = brokers
    with first.record(tmp_path / "t.ksh"):
        client = Client(first.port)
        client.create()
        client.produce([b"4 apples"])
        for _ in range(3):
            client.fetch()
        client.close()
    client = Client(second.port)
    client.create()
    client.produce([b"5 apples"])
    client.close()
    done = run(tmp_path / "t.ksh", "--to", second.bootstrap_servers, "--compare")
    # CreateTopics, Produce, and the same difference in three responses to Fetch.
    assert "the first 1 of 3 differences" in done.stdout
    assert "2 more differences repeat these fields and values" in done.stdout


def api_of(record: TrafficRecord) -> int | None:
    if record.kind is not TrafficKind.REQUEST:
        return None
    return int.from_bytes(record.frame[:2], "big")


@pytest.mark.long
def test_missing_response_is_a_difference(
    brokers: tuple[Kafka, Kafka], small: Path
) -> None:
    second = brokers[1]
    with second.faults() as faults:
        faults.disconnect("Produce", times=1)
        report, differing = replayed(small, second, timeout_s=1)
    assert report.total("requests") == 4
    lost = differing[0]
    assert (lost.api, lost.correlation_id) == ("Produce", 2)
    assert lost.fields[0].replayed == "the broker has closed the connection"
    # Later requests use a new connection.
    assert [difference.correlation_id for difference in differing[1:]] == [3, 4]
    assert [record.value for record in second.records("t")] == [b"2 pears"]


def test_late_response_is_a_difference(
    brokers: tuple[Kafka, Kafka], small: Path
) -> None:
    second = brokers[1]
    with second.faults() as faults:
        faults.lose_answer("Produce", times=1)
        _, differing = replayed(small, second, timeout_s=0.5)
    late = [
        difference
        for difference in differing
        if difference.fields[0].path == "response"
    ]
    assert [difference.correlation_id for difference in late] == [2]


def test_requests_of_a_lost_connection_are_reported(
    brokers: tuple[Kafka, Kafka], tmp_path: Path
) -> None:
    first, second = brokers
    with first.record(tmp_path / "t.ksh"):
        client = Client(first.port)
        client.create()
        for _ in range(3):
            client.begin_produce([b"x"])
        for _ in range(3):
            client.receive_produced()
        client.close()
    with TrafficFile(tmp_path / "t.ksh") as file:
        records = list(file)
    requests = [record for record in records if record.kind is TrafficKind.REQUEST]
    responses = [record for record in records if record.kind is TrafficKind.RESPONSE]
    differing: list[ResponseDifference] = []
    replayer = TrafficReplayer(
        ("127.0.0.1", second.port), compares=True, report=differing.append
    )
    with second.faults() as faults:
        faults.disconnect("Produce", times=1)
        created = requests.pop(0), responses.pop(0)
        replayer.run([*created, *requests, *responses])
    assert [difference.correlation_id for difference in differing] == [2, 3, 4]


def test_requests_without_responses_are_processed(
    brokers: tuple[Kafka, Kafka], tmp_path: Path
) -> None:
    first, second = brokers
    with first.record(tmp_path / "t.ksh"):
        client = Client(first.port)
        client.create()
        for number in range(100):
            client.produce([b"%d" % number], acks=0)
        first.wait_for("t", 100)
        client.close()
    report, differing = replayed(tmp_path / "t.ksh", second)
    assert differing == [] and report.apis["Produce"].responses == 0
    second.wait_for("t", 100)  # they are visible once they are synced
    assert contents(first, "t") == contents(second, "t")
    assert len(contents(second, "t")) == 100


@pytest.mark.long
def test_request_to_an_unready_coordinator_is_repeated(
    brokers: tuple[Kafka, Kafka], tmp_path: Path
) -> None:
    first, second = brokers
    with first.record(tmp_path / "t.ksh"):
        produce(first.bootstrap_servers, "orders", 10)
        consume(first.bootstrap_servers, "orders", 10, 1, **{"group.id": "g"})
    with second.faults() as faults:
        rule = faults.answer("OffsetFetch", "COORDINATOR_LOAD_IN_PROGRESS", times=3)
        report, differing = replayed(tmp_path / "t.ksh", second)
        assert rule.hits == 3
    assert differing == []
    assert report.apis["OffsetFetch"].responses == 1


def test_order_across_connections_is_kept(
    brokers: tuple[Kafka, Kafka], tmp_path: Path
) -> None:
    """Records of many producers get the same offsets in each replay."""
    first, second = brokers
    first.create_topic("t")
    second.create_topic("t")
    with first.record(tmp_path / "t.ksh"):
        clients = [Client(first.port) for _ in range(5)]
        for number in range(100):
            clients[number * 7 % 5].produce([b"%d" % number])
    for _ in range(2):
        report, differing = replayed(tmp_path / "t.ksh", second)
        offsets = [difference.fields[0].path for difference in differing]
        assert report.connections == 5
        assert offsets == [] or all("base_offset" in offset for offset in offsets)
    assert [record.value for record in second.records("t")] == [
        b"%d" % (number % 100) for number in range(200)
    ]
    for client in clients:
        client.close()


def test_speed_keeps_the_recorded_times(
    brokers: tuple[Kafka, Kafka], tmp_path: Path, small: Path
) -> None:
    with TrafficFile(small) as file:
        records = list(file)
    at_s = 100.0
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal at_s
        waits.append(seconds)
        at_s += seconds

    spread = [
        attrs.evolve(record, time_ns=number * 1_000_000_000)
        for number, record in enumerate(records)
    ]
    address = ("127.0.0.1", brokers[1].port)
    replayer = TrafficReplayer(address, speed=10, clock_s=lambda: at_s, sleep=sleep)
    replayer.run(spread)
    assert waits == pytest.approx([0.1, 0.2, 0.2, 0.2])


def test_logins_are_not_replayed(
    kafka_factory: Callable[..., Kafka], tmp_path: Path
) -> None:
    """A recording of users is replayed to a listener without authentication."""
    pytest.importorskip("trustme")
    from netshim.secured_testing import start_secured

    secured = start_secured(tmp_path / "secured")
    with secured.record(tmp_path / "t.ksh"):
        producer = confluent_kafka.Producer(secured.client_config())
        producer.produce("orders", b"4 apples")
        assert producer.flush(60) == 0
    secured.stop()
    open_broker = kafka_factory()
    report, _ = replayed(tmp_path / "t.ksh", open_broker, timeout_s=1)
    assert report.redacted > 0
    assert [record.value for record in open_broker.records("orders")] == [b"4 apples"]


# -- wrong input -----------------------------------------------------------------------


def test_wrong_input_exits_2(
    brokers: tuple[Kafka, Kafka], tmp_path: Path, small: Path
) -> None:
    servers = brokers[1].bootstrap_servers

    def check(words: str, *arguments: str | Path) -> None:
        done = run(*arguments)
        assert done.exit_code == 2, done
        assert words in done.stderr and "Traceback" not in done.stderr, done.stderr

    check("there is no such file", tmp_path / "none.ksh", "--to", servers)
    check("not a recording", __file__, "--list")
    check("expected one of --to", small, "--list", "--to", servers)
    check("expected HOST:PORT", small, "--to", "nowhere")
    check("a number above 0", small, "--to", servers, "--speed", "nan")
    check("refused", small, "--to", "127.0.0.1:1")
    data = bytearray(small.read_bytes())
    data[40] ^= 1
    (tmp_path / "bad.ksh").write_bytes(data)
    check("position 20", tmp_path / "bad.ksh", "--list")
    check("a directory", tmp_path, "--list")


def test_incomplete_recording_is_replayed_with_a_note(
    brokers: tuple[Kafka, Kafka], tmp_path: Path, small: Path
) -> None:
    data = small.read_bytes()
    (tmp_path / "cut.ksh").write_bytes(data + data[20:40])
    done = run(tmp_path / "cut.ksh", "--to", brokers[1].bootstrap_servers, "--compare")
    assert done.exit_code == 0
    assert "requests: 4, connections: 1, responses that differ: 0" in done.stdout
    (tmp_path / "cut.ksh").write_bytes(data[:-1])
    done = run(tmp_path / "cut.ksh", "--list")
    assert done.exit_code == 0 and "was not closed" in done.stderr


def test_replay_to_a_port_without_a_broker_fails(small: Path) -> None:
    with TrafficFile(small) as file, pytest.raises(RemoteUnavailableError):
        TrafficReplayer(("127.0.0.1", 1)).run(file)


# -- the list --------------------------------------------------------------------------


def test_list_has_a_row_for_each_frame(small: Path) -> None:
    with TrafficFile(small) as file:
        rows = list(rows_of(file))
    assert [row["api"] for row in rows if row["direction"] == "request"] == [
        "CreateTopics", "Produce", "Produce", "Fetch",
    ]  # fmt: skip
    first = rows[0]
    assert first["client_id"] == "test" and first["listener"] == "PLAINTEXT"
    assert first["peer"].startswith("127.0.0.1:") and first["time"].endswith("Z")
    assert [row["correlation_id"] for row in rows] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all(row["error"] is None for row in rows)
    text = run(small, "--list").stdout.splitlines()
    assert len(text) == len(rows) and "->  CreateTopics v4  id 1" in text[0]


def test_list_names_errors(kafka: Kafka, tmp_path: Path) -> None:
    with kafka.record(tmp_path / "t.ksh"):
        client = Client(kafka.port)
        client.create()
        with pytest.raises(AssertionError):
            client.create()
        client.close()
    with TrafficFile(tmp_path / "t.ksh") as file:
        assert [entry["error"] for entry in rows_of(file)][1::2] == [
            None, "TOPIC_ALREADY_EXISTS",
        ]  # fmt: skip


def test_list_has_no_error_for_redacted_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many logins, all responses of a connection are redacted. The list took bytes
    of a throttle time for the error code of a SaslAuthenticate.
    """
    monkeypatch.setattr("netshim.recording.recorder._MAX_SECRET_IDS", 0)
    recorder = TrafficRecorder(tmp_path / "t.ksh")
    connection = recorder.connection(ClientSession("", 0, "peer"), 1)
    login = wire.SASL_AUTHENTICATE.Response(error_code=codes.SASL_AUTHENTICATION_FAILED)
    responses = (
        (wire.SASL_AUTHENTICATE, login),
        (wire.HEARTBEAT, wire.HEARTBEAT.Response(throttle_time_ms=9 << 16)),
    )
    for api, response in responses:
        request = wire.encode_request(api, 1, 5, "c", api.Request())
        connection.request(memoryview(request)[4:], is_only_pending=True)
        body = b"".join(bytes(part) for part in api.response.encode(1, response))
        connection.response([struct.pack(">ii", 4 + len(body), 5), body])
    recorder.close()
    with TrafficFile(tmp_path / "t.ksh") as file:
        rows = [row for row in rows_of(file) if row["direction"] == "response"]
    assert all(row["redacted"] for row in rows)
    errors = [(row["api"], row["error"]) for row in rows]
    assert errors == [
        ("SaslAuthenticate", "SASL_AUTHENTICATION_FAILED"),
        ("Heartbeat", None),
    ]


def test_list_is_a_table_of_logcore_sql(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    (tmp_path / "traffic.ndjson").write_text(
        run(small, "--list", "--format", "ndjson").stdout
    )
    (tmp_path / "empty").mkdir()
    query = (
        f"select api, count(*) as n from '{tmp_path}/traffic.ndjson' "
        "where direction = 'request' group by api order by api"
    )
    done = click_testing.CliRunner().invoke(
        logcore_main, ["sql", str(tmp_path / "empty"), query]
    )
    assert done.exit_code == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"api": "CreateTopics", "n": 1},
        {"api": "Fetch", "n": 1},
        {"api": "Produce", "n": 2},
    ]


# -- ids and fields --------------------------------------------------------------------


def frame_of(api: Any, version: int, request: Any) -> memoryview:
    return memoryview(wire.encode_request(api, version, 1, "c", request))[4:]


def rewritten(ids: IdMapping, api: Any, version: int, request: Any) -> Any:
    frame = frame_of(api, version, request)
    data = ids.rewrite(wire.decode_header(frame), frame)
    view = memoryview(data)
    return wire.decode_request(wire.decode_header(view), view)


def test_ids_of_members_and_generations_are_replaced() -> None:
    ids = IdMapping()
    shape = wire.JOIN_GROUP.response.schema
    kind = wire.JOIN_GROUP.Response
    recorded_response = kind(
        generation_id=7, leader="a-1", member_id="a-1",
        members=[kind.Member(member_id="a-1"), kind.Member(member_id="b-1")],
    )  # fmt: skip
    replayed_response = kind(
        generation_id=1, leader="a-9", member_id="a-9",
        members=[kind.Member(member_id="a-9"), kind.Member(member_id="b-9")],
    )  # fmt: skip
    assert (
        differences(wire.JOIN_GROUP, 5, recorded_response, replayed_response, ids) == []
    )
    ids.record_ids(shape, recorded_response, replayed_response)
    assert (
        differences(wire.JOIN_GROUP, 5, recorded_response, replayed_response, ids) == []
    )
    replayed_response.leader = "b-9"
    (difference,) = differences(
        wire.JOIN_GROUP, 5, recorded_response, replayed_response, ids
    )
    assert (difference.path, difference.recorded, difference.replayed) == (
        "leader",
        "a-1",
        "b-9",
    )
    request = wire.SYNC_GROUP.Request
    assignments = [
        request.Assignment(member_id=name, assignment=b"x") for name in ("b-1", "new")
    ]
    sent = request(
        group_id="g", generation_id=7, member_id="a-1", assignments=assignments
    )
    sent = rewritten(ids, wire.SYNC_GROUP, 3, sent)
    assert (sent.member_id, sent.generation_id) == ("a-9", 1)
    assert [assignment.member_id for assignment in sent.assignments] == ["b-9", "new"]
    commit = wire.OFFSET_COMMIT.Request(
        group_id="g", member_id="a-1", generation_id_or_member_epoch=7
    )
    commit = rewritten(ids, wire.OFFSET_COMMIT, 8, commit)
    assert (commit.member_id, commit.generation_id_or_member_epoch) == ("a-9", 1)


def test_ids_of_topics_are_replaced_by_the_names_of_topics() -> None:
    ids = IdMapping()
    kind = wire.METADATA.Response

    def answer(*topics: tuple[str, bytes]) -> Any:
        return kind(
            topics=[kind.Topic(name=name, topic_id=data * 16) for name, data in topics]
        )

    recorded_response, replayed_response = (
        answer(("a", b"1"), ("b", b"2")),
        answer(("b", b"8"), ("a", b"9")),
    )
    assert (
        differences(wire.METADATA, 12, recorded_response, replayed_response, ids) == []
    )
    ids.record_ids(wire.METADATA.response.schema, recorded_response, replayed_response)
    request = wire.FETCH.Request
    topics = [
        request.Topic(
            topic_id=data * 16,
            partitions=[request.Topic.Partition(current_leader_epoch=5)],
        )
        for data in (b"1", b"2")
    ]
    sent = rewritten(ids, wire.FETCH, 16, request(topics=topics))
    assert [topic.topic_id for topic in sent.topics] == [b"9" * 16, b"8" * 16]
    assert sent.topics[0].partitions[0].current_leader_epoch == -1
    swapped = answer(("a", b"8"), ("b", b"9"))
    paths = [
        difference.path
        for difference in differences(
            wire.METADATA, 12, recorded_response, swapped, ids
        )
    ]
    assert len(paths) == 2 or "topics[a].topic_id" in paths


def test_producer_ids_in_batches_are_replaced_with_a_valid_checksum() -> None:
    ids = IdMapping()
    kind = wire.INIT_PRODUCER_ID.Response
    ids.record_ids(
        wire.INIT_PRODUCER_ID.response.schema,
        kind(producer_id=5, producer_epoch=3),
        kind(producer_id=1_000, producer_epoch=0),
    )
    batches = [
        recordbatch.encode(
            [(None, b"x")], now_ms=1, producer_id=producer, producer_epoch=3,
            base_sequence=0,
        )
        for producer in (5, 6)
    ]  # fmt: skip
    plain = recordbatch.encode([(None, b"y")], now_ms=1)

    def sent_batches(records: bytes) -> list[recordbatch.RecordBatch]:
        request = wire.PRODUCE.Request
        partition = request.Topic.Partition(index=0, records=records)
        topics = [request.Topic(name="t", partition_data=[partition])]
        sent = rewritten(ids, wire.PRODUCE, 9, request(topic_data=topics))
        partition = sent.topic_data[0].partition_data[0]
        return list(recordbatch.read_batches(partition.records))

    batches_sent = sent_batches(b"".join((plain, *batches)))
    assert [(batch.producer_id, batch.producer_epoch) for batch in batches_sent] == [
        (-1, -1), (1_000, 0), (6, 3),
    ]  # fmt: skip
    for batch in batches_sent:
        batch.verify()
    damaged = bytearray(batches[0])
    damaged[-1] ^= 1
    (same,) = sent_batches(bytes(damaged))
    assert same.producer_id == 5
    with pytest.raises(CorruptBatchError):
        same.verify()


def test_request_without_ids_is_sent_byte_for_byte() -> None:
    frame = frame_of(wire.METADATA, 9, wire.METADATA.Request())
    assert IdMapping().rewrite(wire.decode_header(frame), frame) == bytes(frame)
    cut = frame[:-1]
    assert IdMapping().rewrite(wire.decode_header(cut), cut) == bytes(cut)


def fetched(records: bytes = b"", **fields: Any) -> Any:
    kind = wire.FETCH.Response
    partition = kind.Topic.Partition(records=records, **fields)
    return kind(responses=[kind.Topic(topic="t", partitions=[partition])])


def test_fetch_may_return_more_but_not_less() -> None:
    first = recordbatch.encode([(None, b"1")], now_ms=1)
    second = recordbatch.encode([(None, b"2")], now_ms=1, base_offset=1)
    changed = recordbatch.encode([(None, b"X")], now_ms=1, base_offset=1)

    def compare(
        recorded_response: Any, replayed_response: Any
    ) -> tuple[bool, list[str]]:
        differing = differences(
            wire.FETCH, 11, recorded_response, replayed_response, IdMapping()
        )
        return should_retry(wire.FETCH, recorded_response, replayed_response), [
            each.path for each in differing
        ]

    path = "responses[t].partitions[0]"
    assert compare(fetched(first), fetched(first + second)) == (False, [])
    assert compare(fetched(), fetched(first)) == (False, [])
    assert compare(fetched(first + second), fetched(first)) == (
        True,
        [f"{path}.records"],
    )
    assert compare(fetched(first + second), fetched(first + changed)) == (
        False, [f"{path}.records[1]"],
    )  # fmt: skip
    assert compare(fetched(first), fetched(second)) == (False, [f"{path}.records"])
    assert compare(fetched(high_watermark=2), fetched(high_watermark=1)) == (
        True, [f"{path}.high_watermark"],
    )  # fmt: skip
    failed = fetched(error_code=codes.OFFSET_OUT_OF_RANGE)
    assert compare(fetched(first), failed) == (
        False, [f"{path}.error_code", f"{path}.records"],
    )  # fmt: skip


def test_broker_that_was_ready_earlier_is_not_a_difference() -> None:
    kind = wire.HEARTBEAT.Response
    unready = kind(error_code=codes.NOT_COORDINATOR)
    ready, refused = kind(), kind(error_code=codes.UNKNOWN_MEMBER_ID)

    def paths(recorded_response: Any, replayed_response: Any) -> list[str]:
        differing = differences(
            wire.HEARTBEAT, 3, recorded_response, replayed_response, IdMapping()
        )
        return [each.path for each in differing]

    assert paths(unready, ready) == [] and paths(unready, unready) == []
    assert paths(ready, unready) == paths(unready, refused) == ["error_code"]
    assert should_retry(wire.HEARTBEAT, ready, unready)
    assert not should_retry(wire.HEARTBEAT, unready, unready)
    assert not should_retry(wire.HEARTBEAT, ready, refused)
    moving = kind(error_code=codes.REBALANCE_IN_PROGRESS)
    for recorded_response, replayed_response in ((ready, moving), (moving, ready)):
        assert paths(recorded_response, replayed_response) == ["error_code"]
        ids = IdMapping()
        assert not differences(
            wire.HEARTBEAT,
            3,
            recorded_response,
            replayed_response,
            ids,
            is_concurrent=True,
        )
    assert differences(wire.HEARTBEAT, 3, moving, refused, ids, is_concurrent=True)


def test_machine_specific_values_are_not_compared() -> None:
    kind = wire.METADATA.Response

    def answer(node: int, port: int, **fields: Any) -> Any:
        partition = kind.Topic.Partition(
            leader_id=node, replica_nodes=[node], isr_nodes=[node], **fields
        )
        return kind(
            brokers=[kind.Broker(node_id=node, host=f"h{node}", port=port)],
            cluster_id=f"cluster {node}",
            topics=[kind.Topic(name="t", partitions=[partition])],
        )

    def paths(replayed_response: Any) -> list[str]:
        differing = differences(
            wire.METADATA, 9, answer(1, 9092), replayed_response, IdMapping()
        )
        return [each.path for each in differing]

    assert paths(answer(5, 12_345, leader_epoch=9)) == []
    assert paths(answer(5, 12_345, partition_index=1)) == [
        "topics[t].partitions[0]", "topics[t].partitions[1]",
    ]  # fmt: skip
    assert paths(answer(-1, 9092)) == [
        "brokers[1].node_id", "topics[t].partitions[0].leader_id",
    ]  # fmt: skip


def test_sessions_of_a_recording_become_full_fetches() -> None:
    """A fetch of a session cannot be sent again while the other broker is slower."""
    kind = wire.FETCH.Request.Topic
    reported = wire.FETCH.Response.Topic
    encoded = recordbatch.encode([(None, b"1")], now_ms=1)
    requests = [(0, 0, {0: 0, 1: 0}), (7, 1, {0: 1}), (7, 2, {}), (7, -1, {})]
    responses = [{0: encoded, 1: b""}, {}, {1: encoded}, None]
    records = []
    for at, ((session_id, epoch, offsets), returned) in enumerate(
        zip(requests, responses, strict=True)
    ):
        parts = [
            kind.Partition(partition=number, fetch_offset=offset)
            for number, offset in offsets.items()
        ]
        request = wire.FETCH.Request(
            session_id=session_id,
            session_epoch=epoch,
            topics=[kind(topic="t", partitions=parts)] if parts else [],
        )
        payload = wire.encode_request(wire.FETCH, 11, at, "me", request)
        records.append(TrafficRecord(TrafficKind.REQUEST, False, 1, at, payload))
        answered = [
            reported.Partition(partition_index=number, high_watermark=1, records=data)
            for number, data in (returned or {}).items()
        ]
        response = wire.FETCH.Response(
            session_id=0 if returned is None else 7,
            responses=[reported(topic="t", partitions=answered)] if answered else [],
        )
        pieces = wire.encode_response(wire.FETCH, 11, at, response)
        payload = b"".join(bytes(piece) for piece in pieces)
        records.append(TrafficRecord(TrafficKind.RESPONSE, False, 1, at, payload))
    listed = []
    results = []
    for record in with_full_fetches(records):
        if record.kind is TrafficKind.REQUEST:
            request = wire.decode_request(
                wire.decode_header(record.frame), record.frame
            )
            assert (request.session_id, request.session_epoch) == (0, -1)
            listed.append(
                [entry.fetch_offset for entry in partitions_of(request.topics)]
            )
        else:
            _, response = wire.decode_response(wire.FETCH, 11, record.frame)
            results.append(
                [
                    (entry.high_watermark, len(entry.records))
                    for entry in partitions_of(response.responses)
                ]
            )
    size = len(encoded)
    assert listed == [[0, 0], [1, 0], [1, 0], []]
    assert results == [
        [(1, size), (1, 0)],
        [(1, 0), (1, 0)],
        [(1, 0), (1, size)],
        [],
    ]


def partitions_of(topics: list[Any]) -> list[Any]:
    return [part for topic in topics for part in topic.partitions]
