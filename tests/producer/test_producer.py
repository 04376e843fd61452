"""Guarantees of a producer, one per test. Random histories are in
test_producer_histories.py.
"""

from __future__ import annotations

import asyncio
import concurrent.futures as futures
import errno
import itertools
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import logcore
from logcore.errors import (
    BufferFullError,
    DeliveryTimeoutError,
    DurabilityUnknownError,
    ForkedWriterError,
    InvalidConfigError,
    InvalidRecordError,
    LogClosedError,
    ProducerClosedError,
    ProducerStateError,
    ReadOnlyLogError,
    RecordTooLargeError,
    SerializationError,
    TopicNotFoundError,
)
from logcore.log import Log
from logcore.logdir import LogDir
from logcore.producer import Producer, ProducerRecord, RecordMetadata
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from support.pages import run_blocks


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def data(disk: SimulatedDisk) -> Iterator[LogDir]:
    with logcore.open_dir("/data", create=True, fs=disk) as directory:
        directory.create_topic("t", 3)
        yield directory


def unthreaded(data: LogDir, **given: Any) -> Producer:
    """Create a producer without a thread. Its retries wait for the simulated clock."""
    return data.producer(
        threaded=False, retry_backoff_ms=1, retry_backoff_max_ms=1, **given
    )


def values(data: LogDir, partition: int = 0) -> list[bytes | None]:
    log = data.partition("t", partition)
    log.flush()
    return [record.value for record in log.read(log.log_start_offset)]


def settle(disk: SimulatedDisk, producer: Producer, rounds: int = 10) -> None:
    disk.faults = None
    for _ in range(rounds):
        disk.advance(10)
        producer.poll()


# -- results and callbacks -------------------------------------------------------------


def test_result_contains_the_position_of_the_record(tmp_path: Path) -> None:
    with (
        logcore.open_dir(tmp_path / "data", create=True) as data,
        data.producer() as producer,
    ):
        data.create_topic("t", 3)
        first = producer.send(
            "t", b"v", key=b"abc", timestamp_ms=1_700_000_000_000
        ).result(30)
        assert first == RecordMetadata(
            "t", 0, 0, 1_700_000_000_000, "create", 3, 1, "disk"
        )
        assert producer.send("t", None, key=b"abc").result(30)[1:3] == (0, 1)
        record = data.partition("t", 0).get(0)
        assert (record.key, record.value, record.timestamp_ms) == (
            b"abc",
            b"v",
            1_700_000_000_000,
        )


def test_futures_work_with_the_standard_library_functions(tmp_path: Path) -> None:
    with (
        logcore.open_dir(tmp_path / "data", create=True) as data,
        data.producer(batch_size=500) as producer,
    ):
        data.create_topic("t", 2)
        sent = [producer.send("t", b"x" * 50) for _ in range(100)]
        done, undone = futures.wait(sent, timeout=30)
        assert len(done) == 100 and not undone
        assert {
            future.result().offset >= 0
            for future in futures.as_completed(sent, timeout=30)
        } == {True}
        called: list[object] = []
        last = producer.send("t", b"y")
        last.add_done_callback(called.append)
        producer.flush()
        last.add_done_callback(called.append)
        assert called == [last, last]
        assert (
            not last.cancel()
            and not last.cancelled()
            and last.done()
            and not last.running()
        )

        async def through_a_loop() -> RecordMetadata:
            return await asyncio.wrap_future(producer.send("t", b"z", partition=1))

        assert asyncio.run(through_a_loop()).partition == 1


def test_log_append_time_is_returned(data: LogDir) -> None:
    data.create_topic("clocked", 1, {"message.timestamp.type": "LogAppendTime"})
    producer = unthreaded(data)
    future = producer.send("clocked", b"v", timestamp_ms=5)
    producer.close()
    reported = future.result()
    assert reported.timestamp_type == "append"
    assert (
        reported.timestamp_ms == data.partition("clocked", 0).get(0).timestamp_ms != 5
    )


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_acks_decide_how_long_a_result_waits(
    disk: SimulatedDisk, data: LogDir, acks: Any
) -> None:
    producer = unthreaded(data, acks=acks, linger_ms=0)
    future = producer.send("t", b"v", partition=0)
    disk.operations.clear()
    producer.poll()
    syncs = sum(operation.name == "fdatasync" for operation in disk.operations)
    assert (future.result().durability, syncs) == (
        ("disk", 1) if acks == "all" else ("os", 0)
    )
    producer.close()
    assert values(data) == [b"v"]


def test_records_with_acks_1_are_visible_once_the_producer_is_idle(
    tmp_path: Path,
) -> None:
    with (
        logcore.open_dir(tmp_path / "data", create=True) as data,
        data.producer(acks=1) as producer,
    ):
        data.create_topic("t", 1)
        producer.send("t", b"v").result(30)
        producer.flush()
        assert [record.value for record in data.read("t")] == [b"v"]


@pytest.mark.parametrize(
    "fails", [False, True], ids=["the interpreter's hook", "a hook that fails"]
)
def test_callback_that_raises_does_not_stop_later_callbacks(
    data: LogDir,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    """The interpreter's own hook refuses arguments of another type, so that the
    callbacks after one that raised were never called.
    """

    def fail(_: object) -> None:
        raise OSError("no place to report to")

    def delivered(error: Exception | None, metadata: RecordMetadata) -> None:
        reported.append(metadata.offset)
        raise ZeroDivisionError("of the callback")

    reported: list[int] = []
    monkeypatch.setattr(
        sys, "unraisablehook", fail if fails else sys.__unraisablehook__
    )
    producer = unthreaded(data)
    for number in range(3):
        producer.send("t", b"%d" % number, partition=0, on_delivery=delivered)
    producer.flush()
    assert reported == [0, 1, 2]
    assert capsys.readouterr().err.count("ZeroDivisionError: of the callback") == (
        0 if fails else 3
    )
    producer.close()


def test_callbacks_are_called_once_and_in_order(data: LogDir) -> None:
    reported: list[int] = []
    errors: list[object] = []

    def delivered(error: Exception | None, metadata: RecordMetadata) -> None:
        reported.append(metadata.offset)
        if metadata.offset == 3:
            raise ZeroDivisionError

    hook = sys.unraisablehook
    raised: list[Any] = []
    sys.unraisablehook = raised.append
    try:
        producer = unthreaded(
            data,
            batch_size=150,
            on_delivery=lambda error, metadata: errors.append(error),
        )
        for number in range(10):
            producer.send("t", b"%d" % number, partition=0, on_delivery=delivered)
        producer.flush()
    finally:
        sys.unraisablehook = hook
    assert reported == list(range(10)) and errors == [None] * 10
    assert [entry.exc_type for entry in raised] == [ZeroDivisionError]
    producer.close()


def test_callback_may_not_wait_for_later_records(data: LogDir) -> None:
    found: list[object] = []
    producer = unthreaded(data, linger_ms=0)

    def delivered(error: Exception | None, metadata: RecordMetadata) -> None:
        later = producer.send("t", b"more", partition=0)
        for call in (producer.flush, producer.poll, later.result):
            try:
                call()
            except ProducerStateError as refused:
                found.append(refused)

    producer.send("t", b"v", partition=0, on_delivery=delivered)
    producer.poll()
    assert len(found) == 3
    producer.close()
    assert values(data) == [b"v", b"more"]


def test_callback_may_close_the_producer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as data:
        data.create_topic("t", 1)
        producer = data.producer()
        ended = threading.Event()

        def delivered(error: Exception | None, metadata: RecordMetadata) -> None:
            producer.close()
            ended.set()

        producer.send("t", b"v", on_delivery=delivered)
        assert ended.wait(30)
        with pytest.raises(ProducerClosedError):
            producer.send("t", b"w")
        assert producer._thread is not None
        producer._thread.join(30)
    assert [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ] == []


def test_callback_that_closes_fails_queued_records_and_reports_them(
    disk: SimulatedDisk, data: LogDir
) -> None:
    reported: list[tuple[str, str]] = []
    producer = unthreaded(data, linger_ms=0, batch_size=0)

    def delivered(name: str) -> Callable[[Exception | None, RecordMetadata], None]:
        def report(error: Exception | None, metadata: RecordMetadata) -> None:
            reported.append((name, type(error).__name__))
            if name == "first":
                producer.send("t", b"v", partition=1, on_delivery=delivered("late"))
                producer.close()

        return report

    producer.send("t", b"v", partition=0, on_delivery=delivered("first"))
    producer.send("t", b"v", partition=1, on_delivery=delivered("second"))
    producer.poll()
    assert reported == [
        ("first", "NoneType"),
        ("second", "NoneType"),
        ("late", "ProducerClosedError"),
    ]


def test_null_is_not_passed_to_a_serializer(data: LogDir) -> None:
    producer = unthreaded(data, value_serializer=lambda value: str(value).encode())
    producer.send("t", None, partition=0)
    producer.close()
    assert values(data) == [None]


def test_send_many_stops_at_the_memory_limit(disk: SimulatedDisk, data: LogDir) -> None:
    producer = unthreaded(data, buffer_memory=1_000, max_block_ms=0, batch_size=100)
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log", times=None))
    future = producer.send_many(
        "t", [(b"%d" % number, b"x" * 100) for number in range(50)]
    )
    settle(disk, producer)
    producer.close()
    assert isinstance(future.exception(), BufferFullError)
    stored = sum(len(values(data, number)) for number in range(3))
    assert 0 < stored < 10


def test_interceptors_get_unserialized_records_and_outcomes(data: LogDir) -> None:
    class Marks:
        def __init__(self) -> None:
            self.outcomes: list[tuple[int, object]] = []

        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return record._replace(value=record.value + 1)

        def on_acknowledgement(
            self, metadata: RecordMetadata, error: Exception | None
        ) -> None:
            self.outcomes.append((metadata.offset, error))

    class Fails(Marks):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            raise ZeroDivisionError

    marks = Marks()
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        producer = unthreaded(
            data,
            interceptors=[Fails(), marks],
            value_serializer=lambda value: str(value).encode(),
            key_serializer=str.encode,
        )
        producer.send("t", 41, key="k", partition=0)
        producer.close()
    finally:
        sys.unraisablehook = hook
    assert values(data) == [b"42"]
    assert marks.outcomes == [(0, None)]


# -- batches ---------------------------------------------------------------------------


def test_batch_lingers_unless_it_is_full(disk: SimulatedDisk, data: LogDir) -> None:
    producer = unthreaded(data, linger_ms=100, batch_size=300)
    future = producer.send("t", b"v", partition=0)
    producer.poll()
    assert not future.done()
    disk.advance(99)
    producer.poll()
    assert not future.done()
    disk.advance(1)
    producer.poll()
    assert future.done()
    sent = [producer.send("t", b"x" * 100, partition=0) for _ in range(3)]
    assert [future.done() for future in sent] == [True, True, False], (
        "each record did not fit into the previous batch"
    )
    producer.close()
    assert all(future.done() for future in sent)


def test_batch_is_compressed_once_as_a_whole(data: LogDir) -> None:
    producer = unthreaded(data, compression_type="zstd", batch_size=16_384)
    for _ in range(100):
        producer.send("t", b"a" * 100, partition=0)
    producer.close()
    (batch,) = data.partition("t", 0).batches(0)
    assert (batch.codec_name, batch.record_count) == ("zstd", 100)
    assert batch.size_bytes < 500


def test_compression_estimates_make_batches_larger(data: LogDir) -> None:
    producer = unthreaded(data, compression_type="zstd", batch_size=1_000)
    counts = []
    for _ in range(3_000):
        producer.send("t", b"a" * 100, partition=0)
    producer.close()
    counts = [batch.record_count for batch in data.partition("t", 0).batches(0)]
    assert counts[-2] > 2 * counts[0]


def test_invalid_record_fails_alone(data: LogDir) -> None:
    data.create_topic("small", 1, {"max.message.bytes": 300})
    producer = unthreaded(data)
    sent = [
        producer.send("small", b"x" * (400 if number == 5 else 50))
        for number in range(12)
    ]
    producer.close()
    failures = [
        number for number, future in enumerate(sent) if future.exception() is not None
    ]
    assert failures == [5]
    assert isinstance(sent[5].exception(), RecordTooLargeError)
    log = data.partition("small", 0)
    assert [
        future.result().offset for future in sent if future.exception() is None
    ] == list(range(11))
    assert log.high_watermark == 11
    data.create_topic("compacted", 1, {"cleanup.policy": "compact"})
    producer = unthreaded(data)
    sent = [
        producer.send("compacted", b"v", key=None if number == 2 else b"k")
        for number in range(5)
    ]
    producer.close()
    assert [type(future.exception()) for future in sent].count(InvalidRecordError) == 1


def test_added_partitions_are_used(data: LogDir) -> None:
    producer = unthreaded(data, partitioner="round_robin", batch_size=0)
    for _ in range(3):
        producer.send("t", b"v")
    data.add_partitions("t", 5)
    sent = [producer.send("t", b"v") for _ in range(6)]
    late = producer.send("t", b"v", partition=4)
    producer.close()
    assert {future.result().partition for future in sent} == {0, 1, 2, 3, 4}
    assert late.result().partition == 4
    with pytest.raises(TopicNotFoundError, match="no such partition"):
        unthreaded(data).send("t", b"v", partition=9)


def test_sticky_partition_changes_when_its_batch_is_full(data: LogDir) -> None:
    producer = unthreaded(data, batch_size=1_000)
    sent = [producer.send("t", b"x" * 100) for _ in range(400)]
    producer.close()
    partitions = [future.result().partition for future in sent]
    runs = sum(before != after for before, after in itertools.pairwise(partitions))
    assert set(partitions) == {0, 1, 2}
    assert runs < 400 / 7, "a batch contains eight such records"


# -- memory ----------------------------------------------------------------------------


def test_full_memory_refuses_or_waits(disk: SimulatedDisk, data: LogDir) -> None:
    producer = unthreaded(data, buffer_memory=1_000, max_block_ms=0)
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log", times=None))
    sent = 0
    with pytest.raises(BufferFullError, match="records in use"):
        for _ in range(10):
            producer.send("t", b"x" * 150, partition=0)
            sent += 1
    assert sent == 4 and producer.metrics().queued_records == 4
    settle(disk, producer)
    producer.send("t", b"y", partition=0)
    producer.close()
    assert len(values(data)) == 5


def test_number_of_unfinished_records_is_limited(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, buffer_records=3, max_block_ms=0)
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log", times=None))
    for _ in range(3):
        producer.send("t", b"x", partition=0)
    with pytest.raises(BufferFullError, match="3 records in use"):
        producer.send("t", b"x", partition=0)
    settle(disk, producer)
    # The records are sent in parts of three.
    many = producer.send_many("t", [(None, b"y")] * 10, partition=0)
    settle(disk, producer)
    producer.close()
    assert many.exception() is None and len(values(data)) == 13


def test_threads_that_wait_for_memory_are_served_in_the_end(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as data:
        data.create_topic("t", 2)
        with data.producer(buffer_memory=2_000, linger_ms=60_000) as producer:

            def send() -> None:
                for _ in range(100):
                    producer.send("t", b"x" * 100)

            threads = [threading.Thread(target=send) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert producer.metrics().queued_bytes <= 2_000
        assert sum(1 for _ in data.read("t")) == 400


def test_too_large_record_is_refused_at_once(data: LogDir) -> None:
    producer = unthreaded(data, max_request_size=1_000)
    with pytest.raises(RecordTooLargeError, match="max_request_size"):
        producer.send("t", b"x" * 1_000)
    with pytest.raises(RecordTooLargeError):
        producer.send_many("t", [(None, b"x"), (None, b"x" * 1_000)])
    assert producer.metrics().queued_records == 0
    producer.close()


# -- send_many and send_columns
# ---------------------------------------------------------


def test_send_many_chooses_the_same_partitions_as_send(data: LogDir) -> None:
    one_by_one = unthreaded(data)
    numbers = [
        one_by_one.send("t", b"v", key=b"key %d" % number) for number in range(200)
    ]
    one_by_one.close()
    wanted = [number.result().partition for number in numbers]
    producer = unthreaded(data)
    rows = [(b"key %d" % number, b"%d" % number) for number in range(200)]
    future = producer.send_many("t", rows)
    producer.flush()
    receipts = future.result()
    found: dict[bytes, int] = {}
    for receipt in receipts:
        log = data.partition("t", receipt.partition)
        assert receipt.durability == "disk"
        for record in log.read(receipt.offset, receipt.last_offset + 1):
            found[record.value or b""] = receipt.partition
    assert [found[b"%d" % number] for number in range(200)] == wanted
    producer.close()


def test_send_columns_chooses_the_same_partitions_as_send(data: LogDir) -> None:
    producer = unthreaded(data)
    keys = [b"key %d" % number for number in range(100)]
    edges = np.concatenate([[0], np.cumsum([len(key) for key in keys])])
    column = (b"".join(keys), edges)
    future = producer.send_columns(
        "t", keys=column, values=column, timestamps_ms=np.arange(100)
    )
    producer.flush()
    assert (
        sum(receipt.last_offset - receipt.offset + 1 for receipt in future.result())
        == 100
    )
    single = [producer.send("t", key, key=key) for key in keys]
    producer.close()
    for future_of_one, key in zip(single, keys, strict=True):
        partition = future_of_one.result().partition
        assert (
            sum(
                record.value == key for record in data.partition("t", partition).read(0)
            )
            == 2
        )
    with pytest.raises(InvalidRecordError, match="same number of rows"):
        unthreaded(data).send_columns(
            "t", keys=(b"a", [0, 1]), values=(b"ab", [0, 1, 2])
        )
    with pytest.raises(InvalidRecordError, match="keys or values"):
        unthreaded(data).send_columns("t")


def test_send_many_without_keys_spreads_records(data: LogDir) -> None:
    producer = unthreaded(data, batch_size=1_000)
    rows = [(None, b"x" * 100)] * 300
    first = producer.send_many("t", rows)
    columns = producer.send_columns(
        "t", values=(b"x" * 30_000, np.arange(0, 30_001, 100))
    )
    producer.close()
    for future in (first, columns):
        assert {receipt.partition for receipt in future.result()} == {0, 1, 2}
        assert (
            max(receipt.last_offset - receipt.offset + 1 for receipt in future.result())
            <= 4 * 8
        )


def test_invalid_record_of_send_many_fails_alone(data: LogDir) -> None:
    data.create_topic("small", 1, {"max.message.bytes": 300})
    producer = unthreaded(data)
    future = producer.send_many(
        "small", [(None, b"x" * (400 if number == 7 else 20)) for number in range(40)]
    )
    producer.close()
    with pytest.raises(RecordTooLargeError):
        future.result()
    assert data.partition("small", 0).high_watermark == 39
    with pytest.raises(InvalidRecordError, match="a record is a tuple"):
        unthreaded(data).send_many("small", [b"v"])
    assert unthreaded(data).send_many("small", []).result() == []


# -- disks that fail -------------------------------------------------------------------


def test_full_disk_is_retried(disk: SimulatedDisk, data: LogDir) -> None:
    producer = unthreaded(data, linger_ms=0)
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log"))
    future = producer.send("t", b"v", partition=0)
    producer.poll()
    assert not future.done()
    settle(disk, producer)
    assert future.result().offset == 0
    assert producer.metrics().retries == 1
    producer.close()
    assert values(data) == [b"v"]


def test_failed_sync_of_more_batches_than_a_log_remembers_is_retried(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, linger_ms=1_000)
    sent = []
    for number in range(9):
        sent.append(producer.send("t", b"%d" % number, partition=0))
        producer._accumulator.begin(
            producer._accumulator.queue("t", 0), disk.monotonic_ms()
        )
    disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, path="*.log"))
    disk.advance(1_000)
    producer.poll()
    assert not any(future.done() for future in sent)
    settle(disk, producer)
    assert [future.result().offset for future in sent] == list(range(9))
    producer.close()
    assert values(data) == [b"%d" % number for number in range(9)]


def test_buffer_of_a_batch_that_is_retried_is_not_reused(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, linger_ms=0)
    producer.send("t", b"0" * 100, partition=1)
    producer.poll()  # its buffer is free now
    disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, path="*t-0*.log"))
    retried = producer.send("t", b"1" * 100, partition=0)
    producer.poll()
    disk.faults = None
    for number in (2, 3):
        producer.send("t", b"%d" % number * 100, partition=1)
        producer.poll()
    data.host.open_again("t", 0).truncate(0)  # simulates a disk that lost the batch
    assert not retried.done()
    settle(disk, producer)
    assert retried.result().offset == 0
    producer.close()
    assert values(data, 0) == [b"1" * 100]
    assert values(data, 1) == [b"%d" % number * 100 for number in (0, 2, 3)]


def test_batch_lost_by_a_failed_sync_is_written_again(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, linger_ms=0)
    producer.send("t", b"first", partition=0)
    producer.poll()
    disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, path="*.log"))
    future = producer.send("t", b"second", partition=0)
    producer.poll()
    disk.faults = None
    log = data.host.open_again("t", 0)
    log.truncate(1)  # simulates a disk that lost the batch
    log.append(b"other")
    settle(disk, producer)
    assert future.result().offset == 2
    producer.close()
    assert values(data) == [b"first", b"other", b"second"]


def test_unknown_outcome_is_reported(disk: SimulatedDisk, data: LogDir) -> None:
    producer = unthreaded(data, linger_ms=0, delivery_timeout_ms=100)
    producer.send("t", b"first", partition=0)
    producer.poll()
    disk.faults = FaultPlan(Fault("pwrite", errno.EIO, path="*.log", times=None))
    future = producer.send("t", b"second", partition=0)
    producer.poll()
    disk.advance(200)
    producer.poll()
    with pytest.raises(DurabilityUnknownError, match="may be stored"):
        future.result()
    settle(disk, producer)
    last = producer.send("t", b"third", partition=0)
    settle(disk, producer)
    assert last.result().partition == 0, "later records have a new producer id"
    producer.close()


def test_refusal_leaves_the_outcome_of_an_earlier_attempt_unknown(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, linger_ms=0, delivery_timeout_ms=1_000)
    disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, path="*.log"))
    data.host.open_logs()
    future = producer.send("t", b"v" * 200, partition=0)
    batch = next(iter(producer._accumulator.active_queues)).batches[0]
    disk.faults = FaultPlan(Fault("pwrite", errno.EIO, path="*.log"))
    producer.poll()
    assert batch.may_be_stored
    disk.faults = None
    data.alter_topic("t", {"max.message.bytes": 100})
    disk.advance(100)
    producer.poll()
    assert not future.done()
    disk.advance(1_000)
    producer.poll()
    with pytest.raises(DurabilityUnknownError):
        future.result()
    producer.close()


def test_producer_without_idempotence_writes_nothing_twice(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, linger_ms=0, enable_idempotence=False)
    disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, path="*.log"))
    future = producer.send("t", b"v", partition=0)
    producer.poll()
    with pytest.raises(DurabilityUnknownError, match="without idempotence"):
        future.result()
    settle(disk, producer)
    data.host.open_again("t", 0)
    assert values(data).count(b"v") <= 1
    producer.close()


def test_record_not_written_within_the_delivery_timeout_fails(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, linger_ms=0, delivery_timeout_ms=50)
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log", times=None))
    future = producer.send("t", b"v", partition=0)
    producer.poll()
    disk.advance(51)
    producer.poll()
    with pytest.raises(DeliveryTimeoutError) as raised:
        future.result()
    assert "No space" in str(raised.value.__cause__) or "space" in str(
        raised.value.__cause__
    )
    settle(disk, producer)
    after = producer.send("t", b"w", partition=0)
    producer.close()
    assert after.result().offset == 0
    assert producer.metrics().errors == {"DeliveryTimeoutError": 1}


def test_deleted_topic_and_closed_directory_are_reported(disk: SimulatedDisk) -> None:
    data = logcore.open_dir("/data", create=True, fs=disk)
    data.create_topic("t", 1)
    data.create_topic("u", 1)
    producer = unthreaded(data, linger_ms=0)
    lost = producer.send("t", b"v")
    data.delete_topic("t")
    producer.poll()
    with pytest.raises(TopicNotFoundError):
        lost.result()
    late = producer.send("u", b"v")
    data.close()
    producer.poll()
    with pytest.raises(LogClosedError):
        late.result()
    producer.close()


@pytest.mark.parametrize("step", ["append_batch", "flush"])
def test_topic_deleted_during_a_batch_write_is_reported_at_once(
    disk: SimulatedDisk, data: LogDir, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch was retried until its delivery timeout, and then failed with "the batch
    may be stored".
    """
    producer = unthreaded(data, linger_ms=0)
    lost = producer.send("t", b"v", partition=0)
    act = getattr(Log, step)

    def delete_first(log: Log, *given: Any, **named: Any) -> Any:
        if "t" in data:
            data.delete_topic("t")
        return act(log, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Log, step, delete_first)
        producer.poll()
    settle(disk, producer)
    with pytest.raises(TopicNotFoundError):
        lost.result()
    producer.close()


# -- close ----------------------------------------------------------------------------


def test_close_writes_queued_records(data: LogDir) -> None:
    producer = unthreaded(data, linger_ms=60_000)
    future = producer.send("t", b"v", partition=0)
    producer.close()
    producer.close()
    assert future.done() and values(data) == [b"v"]
    for call in (
        lambda: producer.send("t", b"w"),
        lambda: producer.send_many("t", [(None, b"w")]),
    ):
        with pytest.raises(ProducerClosedError):
            call()


def test_immediate_close_fails_queued_records(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, linger_ms=60_000)
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log", times=None))
    future = producer.send("t", b"v", partition=0)
    producer.close(0)
    assert isinstance(future.exception(), ProducerClosedError)
    disk.faults = None
    assert values(data) == []


def test_producer_that_was_not_closed_warns(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as data:
        data.create_topic("t", 1)
        producer = data.producer(linger_ms=60_000)
        future = producer.send("t", b"v")
        with pytest.warns(ResourceWarning, match="was not closed"):
            del producer
        assert future.result(30).offset == 0


def test_open_producer_is_flushed_at_exit(tmp_path: Path) -> None:
    program = """
        import logcore, sys
        data = logcore.open_dir(sys.argv[1], create=True)
        data.create_topic("t", 1)
        producer = data.producer(linger_ms=60_000)
        producer.send("t", b"v")
    """
    command = [
        sys.executable,
        "-W",
        "always",
        "-c",
        textwrap.dedent(program),
        str(tmp_path / "data"),
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    )
    assert "was not closed" in ended.stderr
    with logcore.open_dir(tmp_path / "data") as data:
        assert [record.value for record in data.read("t")] == [b"v"]


def test_forked_child_does_not_send_queued_records(
    disk: SimulatedDisk, data: LogDir
) -> None:
    producer = unthreaded(data, linger_ms=60_000)
    producer.send("t", b"v", partition=0)
    disk.forks += 1  # the file system reports a fork
    calls: list[Callable[[], object]] = [
        lambda: producer.send("t", b"w"),
        producer.flush,
        producer.poll,
    ]
    for call in calls:
        with pytest.raises(ForkedWriterError):
            call()
    before = len(disk.operations)
    producer.close()
    assert len(disk.operations) == before
    disk.forks -= 1
    producer._thread_state.is_closing = False
    producer.close()
    assert values(data) == [b"v"]


# -- settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"linger": 5}, "linger_ms"),
        ({"acks": 2}, "0, 1 or 'all'"),
        ({"acks": True}, "0, 1 or 'all'"),
        ({"acks": 1, "enable_idempotence": True}, "acks='all'"),
        ({"acks": 1, "durability": "os"}, "exclude each other"),
        ({"durability": "ram"}, "'os' or 'disk'"),
        ({"linger_ms": -1}, "whole number, at least 0"),
        ({"linger_ms": 1.5}, "whole number"),
        ({"delivery_timeout_ms": 1}, "linger_ms"),
        ({"retry_backoff_ms": 2_000}, "retry_backoff_ms"),
        ({"partitioner": "murmur"}, "consistent_random"),
        ({"partitioner": 7}, "a name, or a function"),
        ({"compression_type": "brotli"}, "zstd"),
        ({"key_serializer": 7}, "a function"),
        ({"bootstrap_servers": "x"}, "network"),
        ({"config": {"lingerms": 5}}, "linger.ms"),
        ({"config": {"linger.ms": "five"}}, "whole number"),
        ({"config": {"enable.idempotence": "yes"}}, "true or false"),
        ({"threaded": 1}, "True or False"),
    ],
)
def test_invalid_producer_settings_are_refused(
    data: LogDir, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidConfigError, match=text):
        data.producer(**given)


def test_configuration_of_a_kafka_client_is_accepted(data: LogDir) -> None:
    config = {
        "bootstrap.servers": "x:9092",
        "linger.ms": "7",
        "acks": "1",
        "security.protocol": "SSL",
        "ssl.key": "k",
    }
    with pytest.warns(
        UserWarning, match=r"bootstrap.servers, security.protocol, ssl.key"
    ):
        producer = data.producer(config=config, batch_size=99)
    settings = producer._settings
    assert (
        settings.linger_ms,
        settings.acks,
        settings.batch_size,
        settings.idempotent,
    ) == (7, 1, 99, False)
    producer.close()


def test_invalid_records_are_refused(data: LogDir) -> None:
    producer = unthreaded(data, value_serializer=None)
    for given, kind in [
        ({"value": "text"}, InvalidRecordError),
        ({"value": b"v", "key": 7}, InvalidRecordError),
        ({"value": b"v", "headers": [("a", "b")]}, InvalidRecordError),
        ({"value": b"v", "headers": [7]}, InvalidRecordError),
        ({"value": b"v", "headers": [(b"a", b"b")]}, InvalidRecordError),
        ({"value": b"v", "timestamp_ms": "now"}, InvalidRecordError),
    ]:
        with pytest.raises(kind):
            producer.send("t", **given)  # type: ignore[arg-type]
    with pytest.raises(TopicNotFoundError):
        producer.send("none", b"v")
    with pytest.raises(SerializationError, match="ZeroDivisionError"):
        unthreaded(data, value_serializer=lambda value: 1 // 0).send("t", b"v")
    assert producer.metrics().queued_records == 0
    producer.close()


def test_error_of_a_wrong_type_advises_only_settings_that_exist(data: LogDir) -> None:
    producer = unthreaded(data)
    with pytest.raises(InvalidRecordError, match="use value_serializer"):
        producer.send("t", "text")
    with pytest.raises(InvalidRecordError) as error:
        producer.send("t", b"v", headers={"a": "b"})  # type: ignore[dict-item]
    assert "a header value must be bytes" in str(error.value)
    assert "serializer" not in str(error.value)
    producer.close()


def test_buffer_of_the_caller_is_copied(data: LogDir) -> None:
    producer = unthreaded(data)
    value = bytearray(b"before")
    producer.send("t", value, partition=0, headers=[("h", value)])
    value[:] = b"behind"
    producer.close()
    (record,) = data.partition("t", 0).read(0)
    assert (record.value, record.headers) == (b"before", (("h", b"before"),))


def test_documentation_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(Path(__file__).resolve().parents[2] / "docs" / "producer.md", tmp_path)


def test_producer_of_a_read_only_directory_is_refused(
    disk: SimulatedDisk, data: LogDir
) -> None:
    with (
        logcore.open_dir("/data", read_only=True, fs=disk) as reader,
        pytest.raises(ReadOnlyLogError),
    ):
        reader.producer()
