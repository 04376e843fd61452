"""The fast path of Produce and Fetch answers as the general path does.

Two brokers get the same requests. One of them has no fast path, and defines the
responses. With the plain kernels, no request is usual and both take the general path.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import DurabilityUnknownError
from logcore.fs import OsFS
from logcore.kernels import kernel
from logcore.recordbatch import encode
from netshim import wire
from netshim.fast_path import FastPath
from netshim.scheduling import CloseConnection
from netshim.security.acls import (
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from support.broker_harness import SESSION, BrokerHarness
from support.same_brokers import (
    NOW_MS,
    SAME_ID,
    BrokerPair,
    ComparedBroker,
    Outcome,
    batch_of,
)

IS_COMPILED = kernel.__name__.endswith("_compiled")
compiled = pytest.mark.skipif(
    not IS_COMPILED, reason="the plain kernels read no request"
)

PRODUCE_VERSIONS = range(7, 14)
FETCH_VERSIONS = range(10, 19)
#: `make slow` tries more seeds.
SEEDS = [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 100))]


@pytest.fixture(autouse=True)
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Markers and batches of the logs get the same timestamps on both sides."""
    monkeypatch.setattr(OsFS, "now_ms", lambda self: NOW_MS)


@pytest.fixture(params=["os", "group"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BrokerPair]:
    opened = BrokerPair(tmp_path, request.param)
    opened.directory(lambda directory: directory.create_topic("t", 2))
    opened.directory(lambda directory: directory.create_topic("u", 2))
    opened.produce()
    opened.run()
    opened.fetch(0)
    yield opened
    opened.close()


def is_usual(pair: BrokerPair, action: Callable[[], object]) -> bool:
    before = pair.sides[0].readable_count
    action()
    return pair.sides[0].readable_count > before


@pytest.mark.long
@compiled
@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
@pytest.mark.parametrize("acks", [1, -1])
def test_every_version_of_produce_gets_equal_responses(
    pair: BrokerPair, version: int, acks: int
) -> None:
    assert is_usual(pair, lambda: pair.produce(version, acks=acks))
    pair.run()
    assert pair.log(lambda log: log.log_end_offset) == 2


@compiled
@pytest.mark.parametrize("version", FETCH_VERSIONS)
@pytest.mark.parametrize("isolation", [0, 1])
def test_every_version_of_fetch_gets_equal_responses(
    pair: BrokerPair, version: int, isolation: int
) -> None:
    more = {"wait_ms": 500, "isolation": isolation}
    assert is_usual(pair, lambda: pair.fetch(0, version, **more))
    assert pair.fetch(1, version, **more) == "waits"
    assert pair.fetch(1, version, **more) == "waits"
    pair.produce(acks=-1)
    assert pair.run()
    assert pair.fetch(2, version, **more) == "waits"
    assert pair.sleep(499) == []
    assert len(pair.sleep(1)) == 1
    assert is_usual(pair, lambda: pair.fetch(2, version, isolation=isolation))


@compiled
@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_every_version_of_a_large_fetch_gets_equal_responses(
    pair: BrokerPair, version: int
) -> None:
    """The fetch returns more records than are copied at once, from several segments."""
    pair.log(lambda log: log.reconfigure({"segment.bytes": 100_000}))
    for _ in range(5):
        pair.produce(records=bytes(encode([(None, b"v" * 30_000)], now_ms=NOW_MS)))
    pair.run()
    for offset in range(6):
        for max_bytes in (1, 40_000, 70_000, 1 << 20):
            pair.fetch(offset, version, max_bytes=max_bytes)
    pair.log(lambda log: log.delete_records(3))
    pair.fetch(2, version)
    pair.fetch(3, version)


@compiled
@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_every_version_of_a_session_gets_equal_responses(
    pair: BrokerPair, version: int
) -> None:
    more: dict[str, Any] = {"version": version, "wait_ms": 500}
    assert not is_usual(pair, lambda: pair.fetch(0, epoch=0, **more))
    assert is_usual(pair, lambda: pair.fetch(0, epoch=1, **more))
    assert pair.fetch(1, epoch=2, **more) == "waits"
    pair.produce(acks=-1)
    (last_fetch,) = [entry for entry in pair.run() if "records=" in entry[1]][-1:]
    assert "high_watermark=2" in last_fetch[1]
    assert pair.fetch(2, epoch=3, **more) == "waits"
    assert len(pair.sleep(500)) == 1
    # Without a partition in the request, and without news in the response.
    for epoch in (4, 5):
        fetch = partial(pair.fetch, 0, epoch=epoch, is_listed=False, **more)
        assert is_usual(pair, fetch)
        ((_, response),) = pair.sleep(500)
        assert response == f"Fetch.Response(session_id={SAME_ID})"
    pair.log(lambda log: log.delete_records(1))
    pair.fetch(0, epoch=6, is_listed=False, **more)
    ((_, response),) = pair.sleep(500)
    assert "log_start_offset=1" in response


@pytest.mark.parametrize("version", [12, 13])
@pytest.mark.parametrize("does_leave", [False, True])
def test_a_session_continues_on_the_general_path(
    pair: BrokerPair, version: int, does_leave: bool
) -> None:
    """The general path takes over while a request waits, or between two requests."""
    more: dict[str, Any] = {"version": version, "wait_ms": 500}
    pair.fetch(1, epoch=0, **more)
    pair.sleep(500)
    assert pair.fetch(1, epoch=1, **more) == "waits"
    begin_transaction(pair)
    if does_leave:
        pair.directory(lambda directory: directory.delete_topic("t"))
    pair.sleep(500)
    assert not any(side.waiting for side in pair.sides)
    for offset in (1, 2):
        pair.fetch(offset, epoch=pair.session_epoch, min_bytes=2, **more)
        pair.sleep(500)
        pair.fetch(offset, epoch=pair.session_epoch, **more)
        pair.sleep(500)


def test_request_of_a_session_ends_the_previous_request(pair: BrokerPair) -> None:
    pair.fetch(1, epoch=0, wait_ms=500)
    pair.sleep(500)
    assert pair.fetch(1, epoch=1, wait_ms=500) == "waits"
    assert pair.fetch(1, epoch=2, wait_ms=500) == "waits"
    pair.produce(acks=-1)
    responses = [response for _, response in pair.run()]
    assert sum("error_code=71" in response for response in responses) == 1
    pair.fetch(2, epoch=2, wait_ms=500)  # sent again
    pair.fetch(2, epoch=3, is_listed=False)


def test_sessions_of_several_partitions_get_equal_responses(pair: BrokerPair) -> None:
    pair.fetch(0, epoch=0)
    pair.fetch(0, epoch=1, partition=1)
    for epoch in (2, 3):
        pair.produce(partition=1, acks=-1)
        pair.run()
        pair.fetch(1, epoch=epoch, is_listed=False)
        pair.fetch(1, epoch=pair.session_epoch, topic="u")


@pytest.mark.long
@pytest.mark.parametrize("version", [12, 13])
@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_waiting_fetch_ends_with_its_topic(
    pair: BrokerPair, version: int, is_noticed: bool
) -> None:
    """The broker may notice the deletion only after there is a new topic of that name."""
    assert pair.fetch(1, version, wait_ms=500, isolation=0) == "waits"
    pair.directory(lambda directory: directory.delete_topic("t"))
    if is_noticed:
        pair.run()
    pair.directory(lambda directory: directory.create_topic("t", 2))
    pair.log(lambda log: log.append_batch(batch_of(3)).offset)
    pair.run()
    pair.sleep(500)
    pair.fetch(0, wait_ms=500)
    pair.produce(acks=-1)
    pair.sleep(500)
    assert not any(side.waiting for side in pair.sides)


def rules_for(*operations: AclOperation) -> AclIndex:
    """Return rules that allow operations on the topic t."""
    return AclIndex(
        Acl(
            ResourceType.TOPIC,
            Pattern.LITERAL,
            "t",
            SESSION.principal,
            "*",
            operation,
            Permission.ALLOW,
        )
        for operation in operations
    )


def enforce(pair: BrokerPair, *operations: AclOperation) -> None:
    for side in pair.sides:
        side.broker_harness.broker.state.security.acls = rules_for(*operations)


@compiled
@pytest.mark.parametrize("version", [12, 13])
def test_both_paths_enforce_the_rules(pair: BrokerPair, version: int) -> None:
    enforce(pair, AclOperation.READ)
    assert is_usual(pair, lambda: pair.fetch(0, version))
    assert "error_code=29" in str(pair.produce(version))
    assert "error_code=29" in str(pair.fetch(0, version, topic="u"))
    enforce(pair, AclOperation.WRITE)
    pair.produce(version)
    assert "error_code=29" in str(pair.fetch(0, version))
    enforce(pair, AclOperation.READ, AclOperation.WRITE)
    pair.fetch(0, version, epoch=0)
    assert pair.fetch(2, version, epoch=1, wait_ms=500) == "waits"
    enforce(pair)
    ((_, response),) = pair.sleep(500)
    assert "error_code=29" in response


class Login:
    """A connection that must authenticate."""

    is_authenticated = expects_token = False

    def __init__(self) -> None:
        self.is_done = False

    def passes_requests(self, now_ms: int) -> bool:
        return self.is_done

    def handle(self, frame: memoryview, now_ms: int) -> Any:
        if not self.is_done:
            raise CloseConnection("a request before authentication")
        return True


def test_a_connection_must_authenticate_first(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = Login()
    monkeypatch.setattr(SESSION, "authentication", login)
    assert pair.fetch(0) == "closed"
    assert pair.produce() == "closed"
    login.is_done = True
    pair.produce(acks=-1)
    assert "records=" in str([pair.fetch(0), *pair.run()])


def begin_transaction(pair: BrokerPair) -> None:
    batch = batch_of(1, producer=(7, 0, 0), transactional=True)
    pair.log(lambda log: log.append_batch(batch).offset)


def test_waiting_fetch_leaves_the_fast_path_when_a_transaction_begins(
    pair: BrokerPair,
) -> None:
    assert pair.fetch(1, wait_ms=500) == "waits"
    assert pair.sleep(400) == []
    begin_transaction(pair)
    assert pair.run() == []
    assert len(pair.sleep(100)) == 1
    pair.log(lambda log: log.end_transaction(7, 0, commit=True).offset)
    pair.fetch(1, wait_ms=500)


def add_transaction(pair: BrokerPair, producer_id: int, *, commit: bool) -> None:
    batch = batch_of(1, producer=(producer_id, 0, 0), transactional=True)
    pair.log(lambda log: log.append_batch(batch).offset)
    pair.log(lambda log: log.end_transaction(producer_id, 0, commit=commit).offset)


@pytest.mark.parametrize("commit", [True, False])
def test_aborted_transactions_are_named(pair: BrokerPair, commit: bool) -> None:
    """Without their names, a client would return their records as committed."""
    add_transaction(pair, 7, commit=commit)
    pair.produce(acks=-1)
    pair.run()
    for offset in (1, 1, 2, 3, 0):
        _, response = pair.fetch(offset)
        named = "aborted_transactions=[Fetch.Response" in response
        assert named == (not commit and offset < 3)
    assert is_usual(pair, lambda: pair.fetch(3))


def test_an_open_transaction_is_not_returned(pair: BrokerPair) -> None:
    begin_transaction(pair)
    _, response = pair.fetch(1)
    assert "last_stable_offset=1" in response
    for _ in range(3):
        pair.produce(acks=-1)
        pair.run()
        _, response = pair.fetch(1)
        assert "last_stable_offset=1" in response
    assert pair.fetch(2, wait_ms=500) == "waits"
    pair.log(lambda log: log.end_transaction(7, 0, commit=True).offset)
    pair.sleep(500)


def test_a_waiting_fetch_is_answered_after_an_internal_error(
    pair: BrokerPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise MemoryError

    assert pair.fetch(1, wait_ms=500) == "waits"
    with monkeypatch.context() as patch:
        patch.setattr(FastPath, "read", fail)
        pair.produce(acks=-1)
        pair.run()
    assert not any(side.waiting for side in pair.sides)
    assert not IS_COMPILED or "the fast path of a waiting fetch failed" in caplog.text


@compiled
@pytest.mark.parametrize("byte", [3, 7, 11, 16, 26])
def test_damaged_heads_are_not_sent(tmp_path: Path, byte: int) -> None:
    """The CRC of a batch does not cover all of its head."""
    with logcore.open(tmp_path / "t-0", create=True, durability="os") as log:
        for _ in range(4):
            log.append(b"v")
        request = BrokerHarness.fetch_request(range(1))
        request.min_bytes = 1
        request.topics[0].partitions[0].fetch_offset = 1
        frame = wire.encode_request(wire.FETCH, 12, 1, "c", request)[4:]
        parsed = kernel.read_request(frame)
        assert parsed is not None
        writer = log.host.writer
        assert writer.respond_recent(parsed, 4, 1 << 20) is not None
        writer.slow_until_ns = 1 << 62
        assert writer.respond_recent(parsed, 4, 1 << 20) is None, "a slow disk"
        writer.slow_until_ns = 0
        (path,) = (tmp_path / "t-0").glob("*.log")
        third = path.stat().st_size // 4 * 2
        with path.open("r+b") as file:
            file.seek(third + byte)
            (before,) = file.read(1)
            file.seek(third + byte)
            file.write(bytes((before ^ 1,)))
        assert writer.respond_recent(parsed, 4, 1 << 20) is None


def test_a_fetch_after_a_truncation_gets_the_new_records(pair: BrokerPair) -> None:
    for _ in range(5):
        pair.produce(acks=-1)
        pair.run()
    pair.fetch(3)
    pair.log(lambda log: log.truncate(3))
    for offset in range(7):
        pair.fetch(offset)
    pair.produce(acks=-1, records=batch_of(2))
    pair.run()
    for offset in range(7):
        pair.fetch(offset, last_fetched_epoch=0)


def test_a_waiting_fetch_of_a_closed_log_is_answered(pair: BrokerPair) -> None:
    """Each side may open the log again, or report that it must be fetched again."""
    assert pair.fetch(1, wait_ms=500) == "waits"
    pair.log(lambda log: log.close())
    for side in pair.sides:
        side.broker_harness.now_ms += 500
        for _ in range(2):
            side.broker_harness.broker.tick(side.broker_harness.now_ms)
            side.broker_harness.run()
        assert not side.waiting or side.take_responses()


def test_a_stopping_broker_answers_waiting_fetches(pair: BrokerPair) -> None:
    assert pair.fetch(1, wait_ms=500) == "waits"
    for side in pair.sides:
        side.broker_harness.broker.stop(side.broker_harness.now_ms)
    assert pair.each(lambda side: len(side.take_responses())) == 1


@pytest.mark.parametrize("pair", ["group"], indirect=True)
def test_both_paths_report_a_failed_sync(pair: BrokerPair) -> None:
    for version in PRODUCE_VERSIONS:
        assert pair.produce(version, acks=-1) == "waits"
    for side in pair.sides:
        while side.broker_harness.submitted:
            _, done = side.broker_harness.submitted.pop(0)
            done(DurabilityUnknownError("the disk failed"))
    responses = pair.each(lambda side: side.take_responses())
    assert len(responses) == len(PRODUCE_VERSIONS)
    assert all("error_code=56" in response for _, response in responses)


def test_a_batch_whose_write_failed_is_not_written_again(pair: BrokerPair) -> None:
    """The write may have been complete. The client gets an error, and decides whether
    to send the batch again.
    """
    for side in pair.sides:
        log = side.broker_harness.logdir.partition("t", 0)
        with read_only_file(log.host.writer.active):
            outcome = side_produces(side)
            side.broker_harness.run()
        assert "error_code=56" in str(outcome or side.take_responses())
    for side in pair.sides:
        side.broker_harness.run()
        log = side.broker_harness.logdir.partition("t", 0)
        assert log.has_failed
        log = side.broker_harness.logdir.host.open_again("t", 0)
        assert [record.value for record in log.read(0)].count(b"once") == 0
    pair.produce(acks=-1)
    pair.run()


@contextlib.contextmanager
def read_only_file(segment: Any) -> Iterator[None]:
    """Make each write and truncation of a segment fail."""
    kept = os.dup(segment.handle)
    read_only = os.open(segment.path, os.O_RDONLY)
    try:
        os.dup2(read_only, segment.handle)
        yield
    finally:
        os.dup2(kept, segment.handle)
        os.close(kept)
        os.close(read_only)


def side_produces(side: ComparedBroker) -> Outcome:
    batch = bytes(encode([(None, b"once")], now_ms=NOW_MS))
    frame = wire.encode_request(
        wire.PRODUCE, 9, 1, "client", BrokerHarness.produce_request(batch, acks=1)
    )
    outcome = side.send(frame[4:], wire.PRODUCE, 9)
    return None if outcome == "waits" else outcome


def random_request(pair: BrokerPair, rng: random.Random) -> None:
    topic = rng.choices(["t", "u", "missing", "__consumer_offsets"], (12, 2, 1, 1))[0]
    partition = rng.choices([0, 1, 5], (8, 2, 1))[0]
    if rng.random() < 0.5:
        producer = (-1, -1, -1)
        if rng.random() < 0.4:
            producer = rng.randrange(2), rng.randrange(2), rng.randrange(6)
        records = batch_of(
            rng.choice((1, 1, 1, 2, 40)),
            producer=producer,
            codec=rng.choice(("uncompressed", "uncompressed", "gzip", "zstd")),
            transactional=producer[0] >= 0 and rng.random() < 0.2,
        )
        if rng.random() < 0.1:  # a wrong CRC, or another change
            at = rng.randrange(len(records))
            records = records[:at] + bytes((records[at] ^ 1,)) + records[at + 1 :]
        pair.produce(
            rng.choice((3, *PRODUCE_VERSIONS)),
            topic=topic,
            partition=partition,
            acks=rng.choice((-1, -1, 1, 1, 0, 2)),
            records=records,
        )
        return
    end = pair.sides[0].broker_harness.logdir.partition("t", 0).log_end_offset
    epoch = rng.choice((-1, -1, pair.session_epoch, pair.session_epoch, 0, 2))
    pair.fetch(
        max(-1, end - rng.choice((0, 0, 0, 1, 2, 3, 70, -1))),
        rng.choice((4, *FETCH_VERSIONS)),
        topic=topic,
        partition=partition,
        wait_ms=rng.choice((0, 100, 100, 500)),
        isolation=rng.randrange(2),
        min_bytes=rng.choice((0, 1, 1, 1, 100)),
        max_bytes=rng.choice((0, 100, 300, 1 << 20)),
        current_leader_epoch=rng.choice((-1, -1, 0, 1)),
        last_fetched_epoch=rng.choice((-1, 0, 0, 1)),
        epoch=epoch,
        is_listed=epoch <= 0 or rng.random() < 0.6,
    )


def random_event(pair: BrokerPair, rng: random.Random) -> None:
    kind = rng.randrange(9)
    end = pair.log(lambda log: log.high_watermark)
    if kind == 0:
        below = max(rng.randrange(end + 1), end - 3)
        pair.log(lambda log: log.truncate(max(below, log.log_start_offset)))
    elif kind == 1:
        start = rng.randrange(end + 1)
        pair.log(lambda log: log.delete_records(start))
    elif kind == 2:
        pair.log(
            lambda log: (
                log.append(b"another writer", key=b"k", timestamp_ms=NOW_MS).offset
            )
        )
    elif kind == 3:
        pair.log(lambda log: log.reconfigure({"segment.bytes": 2000}))
    elif kind == 4:
        pair.log(lambda log: log.roll())
    elif kind in (5, 6):
        before = pair.log(lambda log: log.log_end_offset)
        add_transaction(pair, rng.randrange(100, 1 << 40), commit=rng.random() < 0.3)
        for _ in range(3):
            pair.fetch(before, isolation=rng.randrange(2))
            pair.run()
    else:
        pair.sleep(rng.choice((1, 50, 300)))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_requests_get_equal_responses(pair: BrokerPair, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        random_request(pair, rng)
        if rng.random() < 0.1:
            random_event(pair, rng)
        if rng.random() < 0.7:
            pair.run()
    pair.sleep(40_000)
    fast, general = pair.sides
    assert not fast.waiting
    assert not general.waiting
    assert fast.counts.requests == general.counts.requests
    assert fast.counts.received_bytes == general.counts.received_bytes
    assert (
        fast.counted_requests()
        == general.counted_requests()
        == fast.counts.requests.total()
    )
    if IS_COMPILED:
        assert fast.readable_count > 100


@pytest.mark.parametrize("pair", ["os"], indirect=True)
def test_changed_frames_get_equal_responses(pair: BrokerPair) -> None:
    """Both paths give the same response to a frame that is truncated, or damaged at any
    byte.
    """
    rng = random.Random(1)
    for version in (7, 9, 12):
        produced = wire.encode_request(
            wire.PRODUCE,
            version,
            1,
            "c",
            BrokerHarness.produce_request(batch_of(1), acks=1),
        )[4:]
        request = BrokerHarness.fetch_request(range(1))
        request.isolation_level = 1
        fetched = wire.encode_request(wire.FETCH, max(10, version), 1, "c", request)[4:]
        request.session_id, request.session_epoch = 5, 1  # unknown to the brokers
        listed = wire.encode_request(wire.FETCH, max(10, version), 1, "c", request)[4:]
        request.topics = []
        unlisted = wire.encode_request(wire.FETCH, max(10, version), 1, "c", request)[
            4:
        ]
        for frame, api in (
            (produced, wire.PRODUCE),
            *((frame, wire.FETCH) for frame in (fetched, listed, unlisted)),
        ):
            head = len(frame)
            if api is wire.PRODUCE:
                head -= len(batch_of(1)) - 61
            for at in range(4, head):
                changed = bytearray(frame)
                changed[at] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
                for data in (bytes(changed), frame[:at]):
                    pair.each(
                        partial(
                            ComparedBroker.send, frame=data, api=api, version=version
                        )
                    )
                pair.sleep(0)
