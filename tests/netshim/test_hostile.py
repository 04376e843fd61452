"""Malformed and excessive requests: a broker limits them, closes the connection with
the right answer or none, and continues to serve other clients.

The tests use raw sockets to a running broker, with a well-behaved client beside them.
Mutated frames are in test_mutated_frames.py.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
import netshim
from logcore import recordbatch
from logcore.fs import OS
from netshim import wire
from netshim.scheduling import PendingResponse
from netshim.secured_testing import SecuredKafka, start_secured
from netshim.security.quotas import CLIENT_KEYS
from netshim.security.stored import DEFAULT
from netshim.testing import Kafka
from netshim.wire import codes
from support.client import DEADLINE_S, Client

LIMITS: dict[str, Any] = {
    "request_timeout_ms": 400,
    "idle_timeout_ms": 60_000,
    "max_connections": 60,
    "max_connections_per_address": 50,
    "max_request_bytes": 1 << 20,
    "max_buffered_bytes": 4 << 20,
    "max_unread_bytes": 1 << 20,
}
#: Bounds that no client here reaches.
QUOTAS = dict.fromkeys(CLIENT_KEYS, 1e12)


def start_with_access_control(path: Path) -> SecuredKafka:
    """Start a broker with TLS, a user, rules and quotas."""
    kafka = start_secured(path, **LIMITS)
    for resource in ("topic", "group", "transactional_id"):
        kafka.allow("alice", "all", **{resource: "*"})
    kafka.allow("alice", "create", "idempotent_write", cluster=True)
    kafka.server.call(
        lambda: kafka.server.server.security.quotas.set_bounds(
            {(DEFAULT, None, None): QUOTAS}
        )
    )
    return kafka


@pytest.fixture(params=["open", pytest.param("secured", marks=pytest.mark.slow)])
def kafka(
    kafka_factory: Callable[..., Kafka], tmp_path: Path, request: Any
) -> Iterator[Kafka]:
    """A broker without access control, or with TLS, logins, rules and quotas."""
    if request.param == "open":
        yield kafka_factory(tmp_path / "data", **LIMITS)
        return
    secured = start_with_access_control(tmp_path / "data")
    yield secured
    secured.stop()


@pytest.fixture
def server(kafka: Kafka) -> netshim.ServerThread:
    return kafka.server


@pytest.fixture
def connect(kafka: Kafka) -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []
    password = ""
    if isinstance(kafka, SecuredKafka):
        password = kafka.add_user("alice")

    def make() -> Client:
        client = Client(kafka.port)
        clients.append(client)
        if isinstance(kafka, SecuredKafka):
            client.use_tls(kafka.ca_file)
            client.log_in("alice", password)
        return client

    yield make
    for client in clients:
        client.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "the condition is still false"
        time.sleep(0.01)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "negative size": b"\xff\xff\xff\xff" + bytes(100),
    "zero size": bytes(4) + bytes(100),
    "too large": struct.pack(">i", (1 << 20) + 1) + bytes(100),
    "unknown api": struct.pack(">ihhih", 10, 999, 0, 1, -1),
    "api of another broker": struct.pack(">ihhih", 10, 4, 0, 1, -1),
    "version too new": struct.pack(">ihhih", 10, 3, 99, 1, -1),
    "version too old": struct.pack(">ihhih", 10, 0, 2, 1, -1),
    "short header": struct.pack(">ih", 2, 18),
    "client id beyond the frame": struct.pack(">ihhih", 10, 18, 0, 1, 30_000),
    "body that ends": struct.pack(">ihhih", 10, 1, 11, 1, -1),
    "an array of two billion": struct.pack(">ihhihi", 14, 3, 1, 1, -1, 2**31 - 1),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_the_connection_and_others_are_served(
    connect: Any, name: str
) -> None:
    good = connect()
    good.create()
    assert good.produce([b"before"]).error_code == 0
    bad = connect()
    bad.sock.sendall(GARBAGE[name])
    assert bad.is_closed_by_broker()
    late = connect()  # garbage after valid requests, which are answered first
    late.send(wire.API_VERSIONS, 0, wire.API_VERSIONS.Request())
    late.sock.sendall(GARBAGE[name])
    if name != "zero size":
        while late.sock.recv(1_000):
            pass
    assert good.produce([b"after"]).base_offset == 1


def test_unsupported_api_versions_request_is_answered_in_version_zero(
    connect: Any,
) -> None:
    client = connect()
    client.sock.sendall(struct.pack(">ihhih", 12, 18, 77, 5, -1) + b"??")
    correlation_id, response = wire.decode_response(
        wire.API_VERSIONS, 0, client.read_frame()
    )
    assert correlation_id == 5 and response.error_code == codes.UNSUPPORTED_VERSION
    assert [
        (each.api_key, each.min_version, each.max_version) for each in response.api_keys
    ] == [(18, 0, 4)]
    assert client.ask(wire.API_VERSIONS, 0, wire.API_VERSIONS.Request()).error_code == 0


def test_client_with_an_invalid_software_name_is_refused(connect: Any) -> None:
    request = wire.API_VERSIONS.Request(
        client_software_name="-bad-", client_software_version="1"
    )
    assert (
        connect().ask(wire.API_VERSIONS, 3, request).error_code == codes.INVALID_REQUEST
    )


def test_slow_and_partial_requests_are_closed_in_time(connect: Any) -> None:
    whole = wire.encode_request(
        wire.METADATA, 1, 1, "x", wire.METADATA.Request(topics=None)
    )
    stuck = connect()
    dripping = connect()
    good = connect()
    stuck.sock.sendall(whole[:7])
    dripping.sock.settimeout(0.02)
    cut = False
    until = time.monotonic() + DEADLINE_S
    for byte in (whole[:4] + b"\0\3\0\1" + bytes(5000))[:2000]:
        assert time.monotonic() < until
        try:
            dripping.sock.sendall(bytes([byte]))
            cut = dripping.sock.recv(1) == b""
        except TimeoutError:
            continue
        except OSError:
            cut = True
        if cut:
            break
    assert cut and stuck.is_closed_by_broker()
    assert (
        good.ask(wire.METADATA, 1, wire.METADATA.Request(topics=None)).controller_id
        == 1
    )


@pytest.mark.parametrize("kafka", ["open"], indirect=True)
def test_half_open_client_gets_its_outstanding_answers(connect: Any) -> None:
    """TLS has no half-open connections."""
    client = connect()
    client.create()
    client.produce([b"v"] * 10)
    for _ in range(3):
        client.send(wire.METADATA, 1, wire.METADATA.Request(topics=None))
    client.sock.shutdown(socket.SHUT_WR)
    for _ in range(3):
        assert client.receive(wire.METADATA, 1).controller_id == 1
    assert client.is_closed_by_broker()


def test_client_that_never_reads_is_closed_and_uses_little_memory(
    connect: Any, server: Any
) -> None:
    good = connect()
    bad = connect()
    good.create()
    for _ in range(20):
        good.produce([bytes(500_000)])
    request = wire.FETCH.Request
    asked = request.Topic.Partition(
        partition=0, fetch_offset=0, partition_max_bytes=50 << 20
    )
    frame = wire.encode_request(
        wire.FETCH,
        11,
        1,
        "x",
        request(
            max_bytes=50 << 20, topics=[request.Topic(topic="t", partitions=[asked])]
        ),
    )
    bad.sock.settimeout(5)
    cut = False
    until = time.monotonic() + DEADLINE_S
    while not cut and time.monotonic() < until:
        try:
            bad.sock.sendall(frame * 100)
        except OSError:
            cut = True
        assert good.produce([b"on"]).error_code == 0
        held = [
            client.connection.unsent_bytes
            for client in list(server.server._connections.clients)
        ]
        assert sum(held) < 40 << 20
    wait_until(lambda: len(server.server._connections.clients) == 1)


def test_excess_connections_are_refused_and_existing_connections_work(
    connect: Any, server: Any
) -> None:
    before = open_files()
    good = connect()
    good.create()
    crowd = [Client(server.port) for _ in range(120)]
    assert good.produce([b"v"]).error_code == 0
    assert len(server.server._connections.clients) <= 50
    assert sum(client.is_closed_by_broker() for client in crowd[60:]) == 60
    for client in crowd:
        client.close()
    wait_until(lambda: len(server.server._connections.clients) == 1)
    good.close()
    wait_until(lambda: open_files() <= before + 3)
    assert (
        connect()
        .ask(wire.METADATA, 1, wire.METADATA.Request(topics=None))
        .controller_id
        == 1
    )


def test_connections_reset_during_a_request_do_no_harm(
    connect: Any, server: Any
) -> None:
    good = connect()
    good.create()
    whole = wire.encode_request(
        wire.METADATA, 1, 1, "x", wire.METADATA.Request(topics=None)
    )
    for n in range(40):
        client = connect()
        client.sock.sendall(whole * n + whole[: n % len(whole)])
        client.sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        client.close()
    assert good.produce([b"v"]).error_code == 0
    wait_until(lambda: len(server.server._connections.clients) == 1)


@pytest.mark.long
def test_partial_large_requests_share_a_bounded_memory(
    connect: Any, server: Any
) -> None:
    good = connect()
    good.create()
    crowd = [connect() for _ in range(30)]
    for client in crowd:
        client.sock.settimeout(0.05)
        try:
            client.sock.sendall(struct.pack(">i", 1 << 20) + bytes(900_000))
        except OSError:
            pass
        assert server.server.budget.used_bytes <= 4 << 20
    assert good.produce([b"v"]).error_code == 0
    wait_until(lambda: len(server.server._connections.clients) == 1)
    wait_until(lambda: server.server.budget.used_bytes == 0)


def test_active_requests_delay_others_until_they_are_answered(
    kafka_factory: Callable[..., Kafka], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stalls. A request that waits for the disk counts, but a fetch that waits
    for records does not.
    """
    disk = threading.Event()
    disk.set()
    monkeypatch.setattr(os, "fdatasync", lambda handle: disk.wait())
    broker = kafka_factory(
        tmp_path / "work", fs=OS, durability="always", max_requests_in_work=2
    )
    broker.create_topic("t", 1)
    clients = [Client(broker.port) for _ in range(5)]
    parked, *busy, late = clients
    request = wire.METADATA.Request(topics=[], allow_auto_topic_creation=False)
    partition = wire.FETCH.Request.Topic.Partition(
        partition=0, partition_max_bytes=1 << 20
    )
    topic = wire.FETCH.Request.Topic(topic="t", partitions=[partition])
    parked.send(
        wire.FETCH,
        11,
        wire.FETCH.Request(topics=[topic], max_wait_ms=60_000, min_bytes=1 << 20),
    )
    disk.clear()
    try:
        for client in busy:
            client.begin_produce([b"v"])
        wait_until(lambda: broker.server.server.workload.count == 2)
        late.send(wire.METADATA, 12, request)
        late.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            late.read_frame()
        assert broker.server.server.workload.count == 2
        disk.set()
        late.sock.settimeout(DEADLINE_S)
        assert late.receive(wire.METADATA, 12).cluster_id
        for client in busy:
            assert client.receive_produced().error_code == 0
        assert broker.server.server.workload.count == 0
    finally:
        disk.set()
        for client in clients:
            client.close()


# -- error codes ---------------------------------------------------------------------


def _batch(**change: Any) -> bytearray:
    return bytearray(recordbatch.encode([(b"k", b"v")], now_ms=1, **change))


def _stamped(batch: bytearray) -> bytes:
    recordbatch.stamp_crc(batch)
    return bytes(batch)


def _set(batch: bytearray, position: int, data: bytes) -> bytearray:
    batch[position : position + len(data)] = data
    return batch


BAD_BATCHES = {
    "bit flip": (bytes(_set(_batch(), 64, b"\xff")), codes.CORRUPT_MESSAGE),
    "cut off": (bytes(_batch())[:-1], codes.INVALID_RECORD),
    "nothing": (b"", codes.INVALID_RECORD),
    "a few bytes": (b"abc", codes.INVALID_RECORD),
    "zeros": (bytes(100), codes.INVALID_RECORD),
    "a length below the least": (
        bytes(_set(_batch(), 8, b"\0\0\0\5")),
        codes.INVALID_RECORD,
    ),
    "magic 9": (bytes(_set(_batch(), 16, b"\x09")), codes.INVALID_RECORD),
    "two batches": (bytes(_batch()) * 2, codes.INVALID_RECORD),
    "old magic": (bytes(_set(_batch(), 16, b"\1")), codes.INVALID_RECORD),
    "an offset": (bytes(_set(_batch(), 7, b"\5")), codes.INVALID_RECORD),
    "control": (_stamped(_set(_batch(), 21, b"\0\x20")), codes.INVALID_RECORD),
    "count": (_stamped(_set(_batch(), 57, b"\0\0\0\7")), codes.INVALID_RECORD),
    "delta": (_stamped(_set(_batch(), 23, b"\0\0\0\7")), codes.INVALID_RECORD),
    "unknown codec": (
        _stamped(_set(_batch(), 21, b"\0\6")),
        codes.UNSUPPORTED_COMPRESSION_TYPE,
    ),
    "zstd that is none": (_stamped(_set(_batch(), 21, b"\0\4")), codes.INVALID_RECORD),
    "too large": (
        recordbatch.encode([(b"k", bytes(6_000))], now_ms=1),
        codes.MESSAGE_TOO_LARGE,
    ),
    "no key": (recordbatch.encode([(None, b"v")], now_ms=1), codes.INVALID_RECORD),
    "time": (
        recordbatch.encode([(b"k", b"v", (), 5)], now_ms=1),
        codes.INVALID_TIMESTAMP,
    ),
    "two hours ahead": (
        recordbatch.encode([(b"k", b"v", (), 2**62)], now_ms=1),
        codes.INVALID_TIMESTAMP,
    ),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_invalid_batches_get_the_codes_of_kafka_and_are_not_stored(
    connect: Any, server: Any, name: str
) -> None:
    records, code = BAD_BATCHES[name]
    client = connect()
    config = {"max_message_bytes": "5000"}
    if name == "no key":
        config["cleanup_policy"] = "compact"
    if name == "time":
        config["message_timestamp_before_max_ms"] = "1000"
    client.create(**config)
    result = client.produce([], records=records)
    assert (codes.name(result.error_code), result.base_offset) == (codes.name(code), -1)
    assert result.error_message
    assert server.logdir.partition("t", 0).log_end_offset == 0
    assert (
        client.produce(
            [],
            records=recordbatch.encode([(b"k", b"v")], now_ms=int(time.time() * 1000)),
        ).base_offset
        == 0
    )


def test_repeated_batch_of_an_idempotent_producer_is_stored_once(
    connect: Any, server: Any
) -> None:
    client = connect()
    other = connect()
    client.create()
    initialized = client.ask(
        wire.INIT_PRODUCER_ID, 4, wire.INIT_PRODUCER_ID.Request(transactional_id=None)
    )
    initialized_again = other.ask(
        wire.INIT_PRODUCER_ID, 0, wire.INIT_PRODUCER_ID.Request(transactional_id=None)
    )
    assert (
        initialized.error_code == initialized_again.error_code == 0
        and initialized.producer_id != initialized_again.producer_id
    )

    def batch(sequence: int, epoch: int = 0) -> bytes:
        now_ms = int(time.time() * 1000)
        return recordbatch.encode(
            [(b"k", b"v")],
            now_ms=now_ms,
            producer_id=initialized.producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )

    first = batch(0)
    assert client.produce([], records=first).base_offset == 0
    again = other.produce([], records=first)  # the answer was lost with its connection
    assert (again.error_code, again.base_offset) == (0, 0)
    assert (
        client.produce([], records=batch(2)).error_code
        == codes.OUT_OF_ORDER_SEQUENCE_NUMBER
    )
    assert client.produce([], records=batch(1)).base_offset == 1
    assert client.produce([], records=batch(0, epoch=1)).base_offset == 2
    assert (
        client.produce([], records=batch(2)).error_code == codes.INVALID_PRODUCER_EPOCH
    )
    assert server.logdir.partition("t", 0).log_end_offset == 3
    refused = client.ask(
        wire.INIT_PRODUCER_ID, 4, wire.INIT_PRODUCER_ID.Request(transactional_id="")
    )
    assert refused.error_code == codes.INVALID_REQUEST


def test_acks_decide_whether_a_produce_is_answered(connect: Any, server: Any) -> None:
    client = connect()
    client.create()
    assert client.produce([b"v"], acks=7).error_code == codes.INVALID_REQUIRED_ACKS
    assert client.produce([b"v"], acks=1).error_code == 0
    client.produce([b"v"], acks=0)
    assert client.produce([b"v"]).base_offset == 2, (
        "acks=0 gets no answer, so that the next answer belongs to the next request"
    )
    client.produce([b"v"], acks=0, topic="unknown")
    assert client.is_closed_by_broker()


def test_unknown_topics_partitions_and_offsets_are_refused(connect: Any) -> None:
    client = connect()
    client.create()
    client.produce([b"v"] * 5)
    assert (
        client.produce([b"v"], topic="unknown").error_code
        == codes.UNKNOWN_TOPIC_OR_PARTITION
    )
    assert client.produce([b"v"], topic="__consumer_offsets").error_code != 0
    assert client.fetch(topic="unknown").error_code == codes.UNKNOWN_TOPIC_OR_PARTITION
    assert client.fetch(partition=9).error_code == codes.UNKNOWN_TOPIC_OR_PARTITION
    assert client.fetch(partition=-1).error_code == codes.UNKNOWN_TOPIC_OR_PARTITION
    for offset in (-1, 6, 2**62):
        result = client.fetch(offset)
        assert (result.error_code, result.high_watermark, result.records) == (
            codes.OFFSET_OUT_OF_RANGE,
            -1,
            b"",
        )
    result = client.fetch(5)
    assert (result.error_code, result.high_watermark, bytes(result.records)) == (
        0,
        5,
        b"",
    )
    result = client.fetch(3)
    (batch,) = recordbatch.read_batches(result.records)
    assert (batch.base_offset, batch.last_offset) == (0, 4), (
        "a batch that contains the offset is returned whole"
    )
    request = wire.FETCH.Request
    refused = client.ask(wire.FETCH, 11, request(session_id=7, session_epoch=3))
    assert (refused.error_code, refused.responses) == (
        codes.FETCH_SESSION_ID_NOT_FOUND,
        [],
    )
    started = client.ask(wire.FETCH, 11, request(session_id=0, session_epoch=0))
    assert (started.error_code, started.session_id > 0) == (0, True)


def test_leader_epochs_of_fetches_are_checked(connect: Any) -> None:
    client = connect()
    client.create()
    client.produce([b"v"] * 5)
    request = wire.FETCH.Request
    for epoch, code in ((0, 0), (1, codes.UNKNOWN_LEADER_EPOCH), (-1, 0)):
        part = request.Topic.Partition(
            partition=0, current_leader_epoch=epoch, partition_max_bytes=1000
        )
        response = client.ask(
            wire.FETCH,
            11,
            request(topics=[request.Topic(topic="t", partitions=[part])]),
        )
        assert response.responses[0].partitions[0].error_code == code
    request = wire.OFFSET_FOR_LEADER_EPOCH.Request
    part = request.Topic.Partition(partition=0, leader_epoch=0)
    response = client.ask(
        wire.OFFSET_FOR_LEADER_EPOCH,
        3,
        request(topics=[request.Topic(topic="t", partitions=[part])]),
    )
    assert (
        response.topics[0].partitions[0].leader_epoch,
        response.topics[0].partitions[0].end_offset,
    ) == (0, 5)


def test_list_offsets_supports_every_special_timestamp(connect: Any) -> None:
    client = connect()
    client.create()
    rows = [(b"k", b"v", (), time_ms) for time_ms in (50, 90, 70, 80)]
    client.produce([], records=recordbatch.encode(rows))
    request = wire.LIST_OFFSETS.Request

    def ask(timestamp: int, version: int = 9) -> tuple[int, int, int]:
        part = request.Topic.Partition(partition_index=0, timestamp=timestamp)
        body = request(topics=[request.Topic(name="t", partitions=[part])])
        partition = client.ask(wire.LIST_OFFSETS, version, body).topics[0].partitions[0]
        return partition.error_code, partition.offset, partition.timestamp

    assert ask(-1) == (0, 4, -1)
    assert ask(-2) == (0, 0, -1)
    assert ask(-3) == (0, 1, 90)
    assert ask(-4) == (0, 0, -1)
    assert ask(-5) == (0, -1, -1)
    assert ask(-3, 6)[0] == codes.UNSUPPORTED_VERSION
    assert ask(-77)[0] == codes.UNSUPPORTED_VERSION
    assert ask(60) == (0, 1, 90)
    assert ask(91) == (0, -1, -1)
    assert ask(0) == (0, 0, 50)
    parts = [request.Topic.Partition(partition_index=0, timestamp=-1)] * 2
    twice = client.ask(
        wire.LIST_OFFSETS,
        5,
        request(topics=[request.Topic(name="t", partitions=parts)]),
    )
    assert [part.error_code for part in twice.topics[0].partitions] == [
        codes.INVALID_REQUEST
    ]


def test_fetch_waits_for_an_append_or_its_timeout(connect: Any) -> None:
    reader = connect()
    writer = connect()
    writer.create()
    request = wire.FETCH.Request
    part = request.Topic.Partition(
        partition=0, fetch_offset=0, partition_max_bytes=1 << 20
    )
    body = request(
        max_wait_ms=DEADLINE_S * 1000,
        min_bytes=200,
        topics=[request.Topic(topic="t", partitions=[part])],
    )
    reader.send(wire.FETCH, 11, body)
    writer.produce([b"a"])  # fewer than min_bytes
    writer.produce([b"b" * 200])
    partition = reader.receive(wire.FETCH, 11).responses[0].partitions[0]
    assert len(list(recordbatch.read_batches(partition.records))) == 2
    reader.send(
        wire.FETCH, 11, request(max_wait_ms=50, min_bytes=10_000, topics=body.topics)
    )
    partition = reader.receive(wire.FETCH, 11).responses[0].partitions[0]
    assert len(list(recordbatch.read_batches(partition.records))) == 2, (
        "after the timeout, the present records are returned"
    )
    part.fetch_offset = 2
    reader.send(wire.FETCH, 11, body)
    doomed = wire.DELETE_TOPICS.Request(topic_names=["t"], timeout_ms=1000)
    assert writer.ask(wire.DELETE_TOPICS, 4, doomed).responses[0].error_code == 0
    assert (
        reader.receive(wire.FETCH, 11).responses[0].partitions[0].error_code
        == codes.UNKNOWN_TOPIC_OR_PARTITION
    )


def test_damaged_batch_is_returned_and_other_requests_succeed(
    connect: Any, server: Any
) -> None:
    client = connect()
    client.create()
    for n in range(10):
        client.produce([b"%d" % n * 100])
    path = Path(server.logdir.path, "t-0", f"{0:020d}.log")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 80] ^= 1
    with open(path, "r+b") as file:
        file.write(content)
    result = client.fetch(0)
    assert result.error_code == 0 and len(result.records) == len(content)
    damaged = []
    for batch in recordbatch.read_batches(result.records):
        try:
            batch.verify()
        except logcore.CorruptBatchError:
            damaged.append(batch.base_offset)
    assert len(damaged) == 1
    with open(path, "r+b") as file:
        file.seek(len(content) // 10 * 9)  # the header of the last batch
        file.write(b"\x7f" * 30)
    assert client.fetch(9).error_code == codes.CORRUPT_MESSAGE
    assert client.produce([b"on"]).error_code == 0


def test_transactional_batch_without_a_transactional_id_is_refused(
    connect: Any,
) -> None:
    client = connect()
    client.create()
    batch = recordbatch.encode(
        [(b"k", b"v")],
        now_ms=1,
        transactional=True,
        producer_id=5,
        producer_epoch=0,
        base_sequence=0,
    )
    assert (
        client.produce([], records=batch).error_code
        == codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    )
    client.produce([b"v"])
    assert client.fetch(0, isolation_level=1).last_stable_offset == 1


@pytest.mark.parametrize("limit", [0, -1, -(2**31)])
def test_fetch_limits_below_one_count_as_one(connect: Any, limit: int) -> None:
    client = connect()
    client.create()
    client.produce([b"v"])
    assert len(client.fetch(0, max_bytes=limit).records) > 0


def test_long_error_messages_are_truncated(connect: Any) -> None:
    client = connect()
    request = wire.CREATE_TOPICS.Request
    config = request.Topic.Config(name="retention.ms", value="x" * 32_700)
    topic = request.Topic(
        name="t", num_partitions=1, replication_factor=1, configs=[config]
    )
    response = client.ask(
        wire.CREATE_TOPICS, 4, request(topics=[topic], timeout_ms=1000)
    )
    assert (
        response.topics[0].error_code == codes.INVALID_CONFIG
        and len(response.topics[0].error_message) < 1_100
    )
    topic = request.Topic(name="n" * 32_700, num_partitions=1, replication_factor=1)
    response = client.ask(
        wire.CREATE_TOPICS, 4, request(topics=[topic], timeout_ms=1000)
    )
    assert response.topics[0].error_code == codes.INVALID_TOPIC_EXCEPTION


@pytest.mark.long
def test_waits_of_disconnected_clients_are_removed(connect: Any, server: Any) -> None:
    client = connect()
    client.create()
    request = wire.FETCH.Request
    part = request.Topic.Partition(
        partition=0, fetch_offset=0, partition_max_bytes=1 << 20
    )
    body = request(
        max_wait_ms=2**31 - 1,
        min_bytes=1 << 20,
        topics=[request.Topic(topic="t", partitions=[part] * 50)],
    )
    crowd = [connect() for _ in range(20)]
    for entry in crowd:
        for _ in range(20):
            entry.send(wire.FETCH, 11, body)
    state = server.server.broker.state
    wait_until(lambda: len(state.timers._actions) >= 400)
    for entry in crowd:
        entry.close()
    wait_until(lambda: not state.fetches.awaited_keys() and not state.timers._actions)
    assert client.produce([b"v"]).error_code == 0


def test_waiting_fetch_does_not_read_a_recreated_topic(
    connect: Any, server: Any
) -> None:
    reader = connect()
    writer = connect()
    writer.create()
    request = wire.FETCH.Request
    part = request.Topic.Partition(
        partition=0, fetch_offset=0, partition_max_bytes=1 << 20
    )
    topic = request.Topic(topic_id=server.logdir.topic_id("t").bytes, partitions=[part])
    reader.send(
        wire.FETCH,
        13,
        request(max_wait_ms=DEADLINE_S * 1000, min_bytes=1, topics=[topic]),
    )
    wait_until(lambda: bool(server.server.broker.state.fetches.awaited_keys()))
    server.logdir.delete_topic("t")
    server.logdir.create_topic("t")
    writer.produce([b"of the new one"])
    partition = reader.receive(wire.FETCH, 13).responses[0].partitions[0]
    assert (partition.error_code, partition.records) == (codes.UNKNOWN_TOPIC_ID, b"")


def test_failed_log_is_reopened(connect: Any, server: Any, caplog: Any) -> None:
    client = connect()
    client.create()
    client.produce([b"before"])
    server.logdir.partition("t", 0).host.writer.commit.poison(
        OSError("the disk failed once")
    )
    assert client.produce([b"after"]).error_code == 0
    assert [record.value for record in server.logdir.partition("t", 0).read(0)] == [
        b"before",
        b"after",
    ]
    assert "opened again" in caplog.text


def test_error_of_one_waiting_fetch_does_not_affect_others(
    connect: Any, server: Any, monkeypatch: Any
) -> None:
    from netshim.handlers import fetch

    readers = [connect() for _ in range(3)]
    writer = connect()
    writer.create()
    request = wire.FETCH.Request
    part = request.Topic.Partition(
        partition=0, fetch_offset=0, partition_max_bytes=1 << 20
    )
    for number, reader in enumerate(readers):
        topics = [request.Topic(topic="t", partitions=[part])]
        reader.send(
            wire.FETCH,
            11,
            request(
                max_wait_ms=20_000, min_bytes=2, max_bytes=1000 + number, topics=topics
            ),
        )
    wait_until(lambda: len(server.server.broker.state.timers._actions) == 3)
    real = fetch._collect

    def collect(request: Any, *others: Any) -> Any:
        if request.max_bytes == 1001:
            raise ValueError("an error of ours")
        return real(request, *others)

    monkeypatch.setattr(fetch, "_collect", collect)
    assert writer.produce([b"v"]).error_code == 0
    assert readers[1].receive(wire.FETCH, 11).error_code == codes.UNKNOWN_SERVER_ERROR
    for reader in (readers[0], readers[2]):
        assert (
            len(reader.receive(wire.FETCH, 11).responses[0].partitions[0].records) > 0
        )


def test_answer_may_be_set_before_its_callback_is_added() -> None:
    pending = PendingResponse()
    pending.set(1)
    pending.set(2)
    results: list[int] = []
    pending.then(results.append)
    assert results == [1]


class StoppedClock:
    """Replaces the module `time` of the server."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def test_requests_that_block_the_loop_are_logged(
    server: netshim.ServerThread,
    connect: Callable[[], Client],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = StoppedClock()
    monkeypatch.setattr("netshim.server.time", clock)
    caplog.set_level(logging.INFO, "netshim")
    topics = server.logdir.topics
    held_s = 0.04

    def slow() -> Any:
        clock.now_s += held_s
        return topics()

    client = connect()
    every = wire.METADATA.Request(topics=None)
    client.ask(wire.METADATA, 9, every)
    monkeypatch.setattr(server.logdir, "topics", slow)
    client.ask(wire.METADATA, 9, wire.METADATA.Request(topics=[]))
    held_s = 0.2
    client.ask(wire.METADATA, 9, every)
    held = [
        record.getMessage()
        for record in caplog.records
        if "held" in record.getMessage()
    ]
    (message,) = held
    assert re.fullmatch(
        r"the loop was held for \d+ ms by requests of a connection; .* was Metadata",
        message,
    )
