"""Random histories of producers on a simulated disk that fills up, fails and loses its
power, with a ledger of the records that were sent and acknowledged.

Invariants:
- C15: an acknowledged record is in the log once, at the acknowledged offset, in order
  per producer and partition.
- C28: every future and every callback gets one outcome; flush() returns after all of
  them.
- C29: the memory of the queues never exceeds buffer_memory.
- A record that failed with another error than "unknown" is not in the log.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from typing import Any

import attrs

import logcore
from logcore.errors import (
    BufferFullError,
    DeliveryTimeoutError,
    DurabilityUnknownError,
    InvalidTimestampError,
    LogcoreError,
    ProducerClosedError,
    RecordTooLargeError,
)
from logcore.logdir import LogDir
from logcore.producer import Producer, RecordFuture, RecordMetadata
from logcore.testing import Fault, FaultPlan, SimulatedDisk

PARTITIONS = 3
EXPECTED_ERRORS = (
    DurabilityUnknownError,
    DeliveryTimeoutError,
    InvalidTimestampError,
    RecordTooLargeError,
    ProducerClosedError,
)


@attrs.define
class Sent:
    """One record in the ledger."""

    name: bytes
    #: The number of its producer.
    producer: int
    partition: int
    future: RecordFuture | None
    outcomes: list[tuple[Exception | None, RecordMetadata]] = attrs.Factory(list)
    #: Acknowledged as durable.
    is_durable: bool = False
    is_acked: bool = False


@attrs.define
class Worker:
    number: int
    producer: Producer
    settings: dict[str, Any]
    sent: list[Sent] = attrs.Factory(list)


class ProducerHistory:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk()
        self.policy = self.rng.choice(["group", "os", "always", "every(3)"])
        self.data = self.open_data(create=True)
        # Small segments, so that the batches of one round are in several segments.
        config = {
            "segment.bytes": self.rng.choice([300, 1_000, 1 << 20]),
            "max.message.bytes": self.rng.choice([250, 1 << 20]),
            "message.timestamp.before.max.ms": 3_600_000,
        }
        self.data.create_topic("t", PARTITIONS, config)
        self.workers: list[Worker] = []
        self.ledger: dict[bytes, Sent] = {}
        self.worker_count = 0
        self.outcome_counts: Counter[str] = Counter()

    def open_data(self, **given: Any) -> LogDir:
        return logcore.open_dir("/data", durability=self.policy, fs=self.disk, **given)

    def step(self) -> None:
        steps = [self.send] * 8 + [
            self.send_many_batches,
            self.send_many_batches,
            self.send_many,
            self.poll,
            self.poll,
            self.flush,
            self.start_worker,
            self.wait,
        ]
        self.rng.choice(
            [*steps, self.fail_disk, self.end_worker, self.disturb, self.crash]
        )()
        self.check_memory()

    def start_worker(self) -> None:
        if len(self.workers) == 3:
            return
        acks = self.rng.choice([1, "all", "all"])
        settings: dict[str, Any] = {
            "acks": acks,
            "batch_size": self.rng.choice([0, 100, 200, 16_384]),
            "linger_ms": self.rng.choice([0, 5, 1_000]),
            "buffer_memory": self.rng.choice([200, 1_000, 1 << 20]),
            "max_block_ms": 0,
            "delivery_timeout_ms": self.rng.choice([1_000, 120_000]),
            "retry_backoff_ms": 1,
            "retry_backoff_max_ms": 4,
            "enable_idempotence": acks == "all" and self.rng.random() < 0.8,
            "compression_type": self.rng.choice([None, "gzip", "zstd"]),
            "threaded": False,
        }
        producer = self.data.producer(**settings)
        self.workers.append(Worker(self.worker_count, producer, settings))
        self.worker_count += 1

    def send(self) -> None:
        if not self.workers:
            self.start_worker()
        self.send_to(self.rng.choice(self.workers), self.rng.randrange(PARTITIONS))

    def send_many_batches(self) -> None:
        """Send more batches than a log remembers for a producer."""
        if self.workers:
            worker = self.rng.choice(self.workers)
            partition = self.rng.randrange(PARTITIONS)
            for _ in range(8):
                self.send_to(worker, partition)

    def send_to(self, worker: Worker, partition: int) -> None:
        name = b"%d:%d" % (worker.number, len(worker.sent))
        sent = Sent(name, worker.number, partition, None)
        self.ledger[name] = sent
        worker.sent.append(sent)
        try:
            sent.future = worker.producer.send(
                "t",
                name + b"." * self.rng.choice([0, 0, 60, 60, 60, 300]),
                partition=sent.partition,
                timestamp_ms=self.rng.choice([None] * 20 + [0]),
                on_delivery=lambda error, metadata: self.record_outcome(
                    sent, error, metadata
                ),
            )
        except (BufferFullError, RecordTooLargeError):
            del self.ledger[name]
            worker.sent.pop()

    def send_many(self) -> None:
        if not self.workers:
            return
        worker = self.rng.choice(self.workers)
        partition = self.rng.randrange(PARTITIONS)
        names = [
            b"%d:%d" % (worker.number, len(worker.sent) + n)
            for n in range(self.rng.randrange(1, 6))
        ]
        sent = [Sent(name, worker.number, partition, None) for name in names]
        for entry in sent:
            self.ledger[entry.name] = entry
        worker.sent += sent
        try:
            worker.producer.send_many(
                "t", [(None, name) for name in names], partition=partition
            )
        except (BufferFullError, RecordTooLargeError):
            for entry in sent:
                del self.ledger[entry.name]
                worker.sent.remove(entry)

    def record_outcome(
        self, sent: Sent, error: Exception | None, metadata: RecordMetadata
    ) -> None:
        sent.outcomes.append((error, metadata))
        assert len(sent.outcomes) == 1, "two outcomes"
        assert error is None or isinstance(error, EXPECTED_ERRORS), (
            f"an unexpected error: {error!r}"
        )
        self.outcome_counts[
            "unknown"
            if isinstance(error, DurabilityUnknownError)
            else type(error).__name__
        ] += 1
        if error is None:
            sent.is_acked = True
            sent.is_durable = metadata.durability == "disk"

    def poll(self) -> None:
        if self.workers:
            self.rng.choice(self.workers).producer.poll()

    def flush(self) -> None:
        self.end_faults()
        for worker in self.workers:
            worker.producer.flush()
            undone = [
                sent
                for sent in worker.sent
                if sent.future is not None and len(sent.outcomes) != 1
            ]
            assert not undone, f"flush() left {undone}"
        self.check()

    def end_faults(self) -> None:
        """End the faults of the disk, and poll until no batch waits for a retry."""
        self.disk.faults = None
        for _ in range(30):
            self.disk.advance(3)
            for worker in self.workers:
                worker.producer.poll()

    def wait(self) -> None:
        self.disk.advance(self.rng.choice([1, 10, 2_000]))

    def fail_disk(self) -> None:
        code = self.rng.choice([errno.ENOSPC, errno.EIO])
        operation = self.rng.choice(["pwrite", "fdatasync"])
        if operation == "fdatasync":
            code = errno.EIO
        times = self.rng.choice([1, 1, 3, None])
        self.disk.faults = FaultPlan(
            Fault(
                operation,
                code,
                path="/data/t-*/*.log",
                at=self.rng.randrange(1, 4),
                times=times,
            )
        )

    def end_worker(self) -> None:
        if not self.workers:
            return
        is_patient = self.rng.random() < 0.5
        if is_patient:
            self.end_faults()
        worker = self.workers.pop(self.rng.randrange(len(self.workers)))
        worker.producer.close(None if is_patient else 0)
        assert all(
            len(sent.outcomes) == 1 for sent in worker.sent if sent.future is not None
        )

    def disturb(self) -> None:
        """Append, roll, flush or close the log as another user of it does."""
        log = self.data.partition("t", self.rng.randrange(PARTITIONS))
        if log.has_failed:
            return
        try:
            self.rng.choice(
                [log.roll, log.close, lambda: log.append(b"other"), log.flush]
            )()
        except LogcoreError:
            self.outcome_counts["disturbed"] += 1

    def crash(self) -> None:
        """Cut the power. A record that was acknowledged as durable must exist."""
        if self.rng.random() < 0.5:
            return
        states = list(self.disk.after_crash(limit=4, seed=self.rng.randrange(1000)))
        for worker in self.workers:
            # The process of the producer is lost with the power.
            worker.producer._thread_state.is_closing = True
        self.disk.crash()
        self.disk = self.rng.choice(states)
        self.workers = []
        self.data = self.open_data()
        for sent in self.ledger.values():
            sent.is_acked = sent.is_durable
            if not sent.outcomes:
                sent.outcomes.append(
                    (DurabilityUnknownError("the process has ended"), None)
                )  # type: ignore[arg-type]
            elif not sent.is_durable and sent.outcomes[0][0] is None:
                sent.outcomes[0] = (
                    DurabilityUnknownError("the power failed"),
                    sent.outcomes[0][1],
                )
        self.check()

    def check_memory(self) -> None:
        for worker in self.workers:
            metrics = worker.producer.metrics()
            assert metrics.queued_bytes <= worker.settings["buffer_memory"]

    def check(self) -> None:
        for partition in range(PARTITIONS):
            log = self.data.partition("t", partition)
            if log.has_failed:
                continue
            log.flush()
            stored = [
                (record.offset, (record.value or b"").rstrip(b"."))
                for record in log.read(log.log_start_offset)
                if record.value != b"other"
            ]
            names = [name for _, name in stored]
            duplicates = [name for name, count in Counter(names).items() if count > 1]
            assert not duplicates, f"stored twice: {duplicates}"
            offsets = {name: offset for offset, name in stored}
            for sent in self.ledger.values():
                if sent.partition != partition:
                    continue
                if sent.is_acked:
                    assert sent.name in offsets, (
                        f"{sent.name} was acknowledged and is missing"
                    )
                    assert offsets[sent.name] == sent.outcomes[0][1].offset
                elif sent.outcomes and not isinstance(
                    sent.outcomes[0][0], DurabilityUnknownError
                ):
                    assert sent.name not in offsets, (
                        f"{sent.name} failed with {sent.outcomes[0][0]} and is stored"
                    )
            for number in range(self.worker_count):
                numbers = [
                    int(name.split(b":")[1])
                    for name in names
                    if name.startswith(b"%d:" % number)
                ]
                assert numbers == sorted(numbers), f"out of order: {numbers}"

    def finish(self) -> None:
        self.end_faults()
        for worker in self.workers:
            worker.producer.close()
            assert worker.producer.metrics().queued_bytes == 0
        self.check()
        self.data.close()
