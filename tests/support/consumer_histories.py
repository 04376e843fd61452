"""Random histories of several consumers of one directory. They run in one process, on a
simulated disk with a simulated clock.

The consumers poll, process, commit, pause, close and end without a close, and the topic
gets partitions and records. After each step, a model checks the invariants.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import logcore
from logcore.consumer import Consumer, OffsetAndMetadata, TopicPartition
from logcore.errors import CommitFailedError, RebalanceInProgressError
from logcore.logdir import LogDir
from logcore.testing import SimulatedDisk

INTERVAL_MS: Final = 10_000
ASSIGNORS: Final = ("range", "roundrobin", "sticky", "cooperative-sticky")


def open_data(disk: SimulatedDisk) -> LogDir:
    return logcore.open_dir("/data", create=True, fs=disk)


class Worker:
    """A consumer and its state."""

    def __init__(self, consumer: Consumer, *, is_automatic: bool) -> None:
        self.consumer = consumer
        self.is_automatic = is_automatic
        #: Records that the consumer has received and not processed.
        self.unprocessed: list[Any] = []
        self.polled_ms = -1


class ConsumerHistory:
    """A group with its consumers; see the description of the module."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk()
        self.data = open_data(self.disk)
        self.partitions = 3
        self.data.create_topic("t", self.partitions)
        self.assignor = self.rng.choice(ASSIGNORS)
        self.workers: list[Worker] = []
        self.processed: Counter[tuple[int, int]] = Counter()
        #: Acknowledged offsets by partition.
        self.committed: dict[int, int] = {}
        #: Offsets whose commits were acknowledged by callbacks.
        self.confirmed_commits: list[dict[int, int]] = []
        self.steps: list[str] = []

    def step(self) -> None:
        steps = [
            self.start_worker,
            self.poll,
            self.poll,
            self.poll,
            self.append,
            self.commit,
            self.end_worker,
            self.wait,
            self.crash,
        ]
        chosen = self.rng.choices(steps, [2, 8, 8, 8, 5, 4, 1.5, 3, 0.5])[0]
        self.steps.append(chosen.__name__)
        chosen()
        self.check()

    def start_worker(self) -> None:
        if len(self.workers) < 4:
            is_automatic = self.rng.random() < 0.7
            consumer = self.data.consumer(
                group_id="g",
                auto_offset_reset="earliest",
                max_poll_interval_ms=INTERVAL_MS,
                max_poll_records=3,
                enable_auto_commit=is_automatic,
                auto_commit_interval_ms=1000,
                assignors=[self.assignor],
            )
            consumer.subscribe(["t"])
            self.workers.append(Worker(consumer, is_automatic=is_automatic))

    def poll(self) -> None:
        if self.workers:
            worker = self.rng.choice(self.workers)
            self.process(worker)
            worker.polled_ms = self.disk.monotonic_ms()
            worker.unprocessed = list(worker.consumer.poll().records())
            positions = [
                (record.partition, record.offset) for record in worker.unprocessed
            ]
            partitions = [partition for partition, _ in positions]
            assert positions == sorted(
                positions,
                key=lambda position: (
                    partitions.index(position[0]) * 10**6 + position[1]
                ),
            )

    def process(self, worker: Worker) -> None:
        self.processed.update(
            (record.partition, record.offset) for record in worker.unprocessed
        )
        worker.unprocessed = []

    def append(self) -> None:
        if self.rng.random() < 0.1 and self.partitions < 6:
            self.partitions += 1
            self.data.add_partitions("t", self.partitions)
        partition = self.rng.randrange(self.partitions)
        self.data.partition("t", partition).append_many(
            [(None, b"x")] * self.rng.randrange(1, 6)
        )
        self.data.partition("t", partition).flush()

    def commit(self) -> None:
        if not self.workers:
            return
        worker = self.rng.choice(self.workers)
        self.process(worker)
        positions = self.positions(worker)
        try:
            if self.rng.random() < 0.4:
                worker.consumer.commit_async(callback=self.on_commit)
                return
            worker.consumer.commit()
        except (CommitFailedError, RebalanceInProgressError):
            return
        self.record_confirmed()
        self.record_commit(positions)

    def on_commit(
        self,
        error: Exception | None,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> None:
        """Only record the event, because an exception of a callback would be ignored."""
        if error is None:
            self.confirmed_commits.append(
                {
                    partition.partition: each.offset
                    for partition, each in offsets.items()
                }
            )

    def record_confirmed(self) -> None:
        while self.confirmed_commits:
            self.record_commit(self.confirmed_commits.pop(0))

    def record_commit(self, positions: Mapping[int, int]) -> None:
        for partition, offset in positions.items():
            assert offset >= self.committed.get(partition, 0), (
                "an acknowledged commit moved back"
            )
            self.committed[partition] = offset

    def positions(self, worker: Worker) -> dict[int, int]:
        return {
            partition.partition: read_position.position
            for partition, read_position in worker.consumer._read_positions.items()
            if read_position.position is not None
        }

    def end_worker(self) -> None:
        if self.workers:
            worker = self.workers.pop(self.rng.randrange(len(self.workers)))
            if self.rng.random() < 0.5:
                self.close(worker)
            else:
                worker.consumer.leave_unfinished()

    def close(self, worker: Worker) -> None:
        """Close a consumer. Its processed records are committed, even in the middle of
        a rebalance.
        """
        self.process(worker)
        positions = self.positions(worker)
        is_member = self.disk.monotonic_ms() - worker.polled_ms < INTERVAL_MS
        worker.consumer.close()
        if worker.is_automatic and is_member:
            stored_offsets = self.stored_offsets()
            for partition, offset in positions.items():
                assert stored_offsets.get(partition, 0) >= offset, (
                    f"closing lost processed records of {partition}"
                )

    def wait(self) -> None:
        self.disk.advance(
            self.rng.choice([100, 1000, INTERVAL_MS // 2, INTERVAL_MS + 1000])
        )
        if self.rng.random() < 0.2:
            self.disk.set_wall_clock(
                self.disk.now_ms() + self.rng.choice([-1, 1]) * 3_600_000
            )

    def crash(self) -> None:
        """Cut the power: all consumers are lost, and acknowledged data must remain."""
        states = list(self.disk.after_crash(limit=6, seed=self.rng.randrange(1000)))
        self.disk.crash()
        self.disk = self.rng.choice(states)
        self.workers = []
        self.data = open_data(self.disk)

    def check(self) -> None:
        self.record_confirmed()
        owners: dict[TopicPartition, list[int]] = {}
        generations = {}
        for number, worker in enumerate(self.workers):
            member = worker.consumer._membership.member
            if member is not None and member.is_stable:
                generations[number] = member.generation
        newest = max(generations.values(), default=-1)
        for number, worker in enumerate(self.workers):
            if generations.get(number) == newest:
                for topic_partition in worker.consumer.assignment():
                    owners.setdefault(topic_partition, []).append(number)
        assert all(len(members) == 1 for members in owners.values()), (
            f"two owners in generation {newest}: {owners}"
        )
        stored_offsets = self.stored_offsets()
        for partition, offset in self.committed.items():
            assert stored_offsets.get(partition, -1) >= offset, (
                f"a commit of {partition} is lost: {stored_offsets}, {self.committed}"
            )
        for partition, offset in stored_offsets.items():
            missing = [
                number
                for number in range(offset)
                if not self.processed[partition, number]
            ]
            assert not missing, (
                f"committed beyond records that no member has processed: {partition}, {missing}"
            )

    def stored_offsets(self) -> dict[int, int]:
        return {
            partition: offsets["g"]
            for partition in range(self.partitions)
            if "g" in (offsets := self.data.committed_offsets("t", partition))
        }

    def finish(self) -> None:
        """Run without faults. Check that every record is processed, and that each
        partition has an owner.
        """
        self.disk.advance(2 * INTERVAL_MS)
        self.start_worker()
        for _ in range(300):
            for worker in self.workers:
                self.process(worker)
                worker.unprocessed = list(worker.consumer.poll().records())
            self.disk.advance(100)
        for worker in self.workers:
            self.process(worker)
        owned = [
            partition.partition
            for worker in self.workers
            for partition in worker.consumer.assignment()
        ]
        assert sorted(owned) == list(range(self.partitions))
        for partition in range(self.partitions):
            end = self.data.partition("t", partition).high_watermark
            assert all(self.processed[partition, offset] for offset in range(end))
        for worker in self.workers:
            worker.consumer.close()
        self.data.close()
