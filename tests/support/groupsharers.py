"""Simulated processes whose consumers share one group, and what has to hold whatever happens to them.

A ledger outlives the processes: which records were processed, which commits were acknowledged, who had what.

The invariants, by name:
- owned once: at most one member has a partition in one generation.
- one living owner: nobody else reads a partition whose records a member is handed, in whatever generation, and its node
  below `owners` names that member. A member that the group has removed does not count.
- never back: when a commit is acknowledged, no lower offset is stored than was acknowledged by then. It may itself be
  lower: a commit that was stored before another one may be told of after it.
- kept: what is committed at the end is at least what was acknowledged, and at most what was processed.
- all: every record is processed, at least once, while one process lives.
- again: the same holds behind a rewind to the beginning, whatever the members commit meanwhile.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

import logcore
from logcore.consumer import RebalanceListener
from logcore.consumer.assignors import ASSIGNORS, Assignment
from logcore.consumer.membership import Member, TopicPartition
from logcore.coordination.packing import GroupNode
from logcore.errors import CommitFailedError, RebalanceInProgressError, RegistryLockedError
from logcore.fs import SharedFS
from logcore.groupoffsets import committed_in
from logcore.names import OFFSETS_TOPIC
from logcore.registry import offsets as registry_offsets
from logcore.registry import open_registry, paths
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine, SimulatedProcess

PATH: Final = "data"
SETTINGS: Final[dict[str, Any]] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    "max_poll_interval_ms": 3_000,
}


@attrs.frozen
class HastyAssignor:
    """Gives a partition to another member while the first still has it, which no cooperative assignor may do."""

    name: str = "hasty"
    is_cooperative: bool = True

    def assign(self, partitions: Mapping[str, int], members: Iterable[Member]) -> Assignment:
        found: Assignment = ASSIGNORS["range"].assign(partitions, members)  # type: ignore[assignment]
        return found


class LateCommits(RebalanceListener):
    """Commits when partitions are to be given up, and not before."""

    def __init__(self, group: Group, consumer: logcore.Consumer) -> None:
        self.group = group
        self.consumer = consumer

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self.group.commit(self.consumer)

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        pass


class Group:
    """See the top of this module. is_hasty: partitions move by HastyAssignor, and commits are late. stores: settings of
    where offsets are, of which each life has one; the last of them reads what all of them commit.
    """

    def __init__(
        self,
        seed: int,
        *,
        chances: Chances,
        processes: int = 2,
        partitions: int = 3,
        records: int = 12,
        is_hasty: bool = False,
        stores: Sequence[Mapping[str, Any]] = ({},),
        rewinds: bool = False,
    ) -> None:
        self.rewinds = rewinds
        self.again: dict[TopicPartition, set[int]] = {}  # processed since the rewind began
        self.is_rewound = not rewinds
        self.stores = stores
        self.is_hasty = is_hasty
        self.settings = (
            {**SETTINGS, "max_poll_interval_ms": 300, "assignors": (HastyAssignor(),)} if is_hasty else SETTINGS
        )
        self.readers: list[tuple[SharedFS, logcore.Consumer]] = []
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
        if rewinds:
            self.machine.start(self._rewind)

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
            settings = {**self.settings, **self.rng.choice(self.stores)}
            with logcore.open_dir(PATH, shared=True, fs=fs) as data, data.consumer(**settings) as consumer:
                self._subscribe(fs, consumer)
                for _ in range(self.rng.randrange(2, 8)):
                    self._turn(consumer)

    def _consume_all(self, fs: SharedFS) -> None:
        """Goes on until all was processed."""
        settings = {**self.settings, **self.stores[-1]}
        with logcore.open_dir(PATH, shared=True, fs=fs) as data, data.consumer(**settings) as consumer:
            self._subscribe(fs, consumer)
            until = self.machine.steps + 60_000
            while not self._is_complete():
                self._turn(consumer)
                assert self.machine.steps < until, f"all: {self.processed} {consumer.assignment()}"

    def _rewind(self, fs: SharedFS) -> None:
        """Sets the group back to the beginning, once."""
        with logcore.open_dir(PATH, shared=True, fs=fs) as data:
            until = self.machine.steps + self.rng.randrange(2_000)
            while self.machine.steps < until:
                data.refresh()
            with contextlib.suppress(RegistryLockedError):
                self.again = {}
                data.alter_group_offsets("g", dict.fromkeys(self.partitions, 0), force=True)
                self.is_rewound = True

    def _is_complete(self) -> bool:
        found = self.again if self.is_rewound and self.rewinds else self.processed
        return sum(map(len, found.values())) == self.records

    def _subscribe(self, fs: SharedFS, consumer: logcore.Consumer) -> None:
        self.readers.append((fs, consumer))
        consumer.subscribe(["t"], listener=LateCommits(self, consumer) if self.is_hasty else None)

    def _turn(self, consumer: logcore.Consumer) -> None:
        with contextlib.suppress(RegistryLockedError):  # a process was stopped in the middle of its change
            found = consumer.poll(100, 3)
            self._note_owners(consumer)
            self._check_owners(consumer, set(found))
            for record in found.records():
                for processed in (self.processed, self.again):
                    processed.setdefault(TopicPartition(record.topic, record.partition), set()).add(record.offset)
            if found and not (self.is_hasty and self.rng.random() < 0.7):
                self.commit(consumer)

    def commit(self, consumer: logcore.Consumer) -> None:
        with contextlib.suppress(CommitFailedError, RebalanceInProgressError):  # another has them, or commits later
            positions = {one: consumer.position(one) for one in consumer.assignment()}
            consumer.commit()
            self._note_commit(positions)

    def _check_owners(self, consumer: logcore.Consumer, handed: set[TopicPartition]) -> None:
        """One living owner. The look at the registry is no step: it meets the moment as it is."""
        with open_registry(PATH, read_only=True, fs=self.disk) as registry:
            value = registry.get(paths.group_state("g")).value
            members = GroupNode.unpack("g", value).group.members
            mine = consumer._member
            if mine is None or mine.member_id not in members:
                return
            for one in handed:
                node = registry.get(paths.owner("g", one.topic, one.partition))
                assert consumer._registration is not None
                named, number = paths.unpack_owner(node.value)
                assert (named, number) == (consumer._registration.consumer_id, 0), f"one living owner: {one}, {node}"
            for process, other in self.readers:
                if other is consumer or process.forks or other._member is None:
                    continue
                both = handed & other.assignment() if other._member.member_id in members else set()
                assert not both, f"one living owner: {both} of {mine.member_id} and {other._member.member_id}"

    def _note_owners(self, consumer: logcore.Consumer) -> None:
        member = consumer._member
        if member is None or not member.is_stable:
            return
        for one in consumer.assignment():
            owner = self.owners.setdefault((member.generation, one), member.member_id)
            assert owner == member.member_id, f"owned once: {one} in generation {member.generation}"

    def _note_commit(self, offsets: dict[TopicPartition, int]) -> None:
        if self.rewinds:
            return
        lower = {one: offset for one, offset in offsets.items() if offset < self.acked.get(one, 0)}
        if lower:
            stored = self._stored()
            for one, offset in lower.items():
                assert stored.get(one, 0) >= self.acked[one], f"never back: {one} from {self.acked[one]} to {offset}"
        for one, offset in offsets.items():
            self.acked[one] = max(offset, self.acked.get(one, 0))

    def _stored(self) -> dict[TopicPartition, int]:
        """What the group has committed, the larger of log and registry. The look is no step, as in _check_owners()."""
        found: dict[TopicPartition, int] = {}
        with logcore.open_dir(PATH, read_only=True, fs=self.disk) as data:
            if OFFSETS_TOPIC in data:
                logs = [data.partition(OFFSETS_TOPIC, number) for number in data.partitions(OFFSETS_TOPIC)]
                for (topic, partition), groups in committed_in(logs).items():
                    found[TopicPartition(topic, partition)] = groups["g"]
        with open_registry(PATH, read_only=True, fs=self.disk) as registry:
            for (topic, partition), offset in registry_offsets.committed(registry, "g").items():
                one = TopicPartition(topic, partition)
                found[one] = max(offset, found.get(one, 0))
        return found

    # -- what has to hold --------------------------------------------------------------------------------------------

    def judge(self, disk: Any, *, after_power: bool) -> None:
        settings = {**SETTINGS, **self.stores[-1]}
        with logcore.open_dir(PATH, fs=disk) as data, data.consumer(**settings) as consumer:
            consumer.assign(self.partitions)
            committed = consumer.committed(self.partitions)
            for one in self.partitions:
                found = committed.get(one)
                offset = 0 if found is None else found.offset
                most = max(self.processed.get(one, {-1})) + 1
                assert self.acked.get(one, 0) <= offset <= most, f"kept: {one} {self.acked.get(one)} {offset} {most}"
        if not after_power and not self.machine.is_off:
            assert sum(map(len, self.processed.values())) == self.records, f"all: {self.processed}"
