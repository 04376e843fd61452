"""Simulated processes whose consumers share one group, and what has to hold whatever happens to them.

A ledger outlives the processes: which records were processed, which commits were acknowledged, who had what.

The invariants, by name:
- owned once: at most one member has a partition in one generation.
- never back: an acknowledged commit is never followed by an acknowledged one of a lower offset.
- kept: what is committed at the end is at least what was acknowledged, and at most what was processed.
- all: every record is processed, at least once, while one process lives.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any, Final

import logcore
from logcore.consumer.membership import TopicPartition
from logcore.errors import CommitFailedError, RebalanceInProgressError, RegistryLockedError
from logcore.fs import SharedFS
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine, SimulatedProcess

PATH: Final = "data"
SETTINGS: Final[dict[str, Any]] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    "max_poll_interval_ms": 3_000,
}


class Group:
    """See the top of this module."""

    def __init__(
        self, seed: int, *, chances: Chances, processes: int = 2, partitions: int = 3, records: int = 12
    ) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk({"data": None}, seed=seed)
        self.machine = Machine(self.disk, seed=seed, chances=chances)
        self.machine.on_freed = self._follow
        self.records = records
        self.processed: dict[TopicPartition, set[int]] = {}
        self.acked: dict[TopicPartition, int] = {}
        self.owners: dict[tuple[int, TopicPartition], str] = {}
        self.partitions = [TopicPartition("t", number) for number in range(partitions)]
        with logcore.open_dir(PATH, create=True, fs=self.disk) as data:
            data.create_topic("t", partitions)
            for number in range(records):
                data.append("t", b"%d" % number, partition=number % partitions)
        self.lives = 0
        self.members: set[SimulatedProcess] = set()
        for _ in range(processes):
            self._begin()
        self.machine.spared = self.machine.start(self._consume_all)

    def run(self) -> None:
        self.machine.run()

    def _begin(self) -> None:
        self.lives += 1
        self.members.add(self.machine.start(self._live))

    def _follow(self, process: SimulatedProcess) -> None:
        if process in self.members and self.lives < 8 and not self.machine.is_off:
            self._begin()

    # -- what processes do -------------------------------------------------------------------------------------------

    def _live(self, fs: SharedFS) -> None:
        for _ in range(self.rng.randrange(1, 3)):
            with logcore.open_dir(PATH, shared=True, fs=fs) as data, data.consumer(**SETTINGS) as consumer:
                consumer.subscribe(["t"])
                for _ in range(self.rng.randrange(2, 8)):
                    self._turn(consumer)

    def _consume_all(self, fs: SharedFS) -> None:
        """Goes on until all was processed."""
        with logcore.open_dir(PATH, shared=True, fs=fs) as data, data.consumer(**SETTINGS) as consumer:
            consumer.subscribe(["t"])
            until = self.machine.steps + 60_000
            while sum(map(len, self.processed.values())) < self.records:
                self._turn(consumer)
                assert self.machine.steps < until, f"all: {self.processed} {consumer.assignment()}"

    def _turn(self, consumer: logcore.Consumer) -> None:
        with contextlib.suppress(RegistryLockedError):  # a process was stopped in the middle of its change
            found = consumer.poll(100, 3)
            self._note_owners(consumer)
            for record in found.records():
                self.processed.setdefault(TopicPartition(record.topic, record.partition), set()).add(record.offset)
            positions = {one: consumer.position(one) for one in consumer.assignment()}
            if found:
                with contextlib.suppress(
                    CommitFailedError, RebalanceInProgressError
                ):  # another has them, or commits later
                    consumer.commit()
                    self._note_commit(positions)

    def _note_owners(self, consumer: logcore.Consumer) -> None:
        member = consumer._member
        if member is None or not member.is_stable:
            return
        for one in consumer.assignment():
            owner = self.owners.setdefault((member.generation, one), member.member_id)
            assert owner == member.member_id, f"owned once: {one} in generation {member.generation}"

    def _note_commit(self, offsets: dict[TopicPartition, int]) -> None:
        for one, offset in offsets.items():
            assert offset >= self.acked.get(one, 0), f"never back: {one} from {self.acked[one]} to {offset}"
            self.acked[one] = offset

    # -- what has to hold --------------------------------------------------------------------------------------------

    def judge(self, disk: Any, *, after_power: bool) -> None:
        with logcore.open_dir(PATH, fs=disk) as data, data.consumer(**SETTINGS) as consumer:
            consumer.assign(self.partitions)
            committed = consumer.committed(self.partitions)
            for one in self.partitions:
                found = committed.get(one)
                offset = 0 if found is None else found.offset
                most = max(self.processed.get(one, {-1})) + 1
                assert self.acked.get(one, 0) <= offset <= most, f"kept: {one} {self.acked.get(one)} {offset} {most}"
        if not after_power and not self.machine.is_off:
            assert sum(map(len, self.processed.values())) == self.records, f"all: {self.processed}"
