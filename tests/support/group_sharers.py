"""Simulated processes whose consumers share one group, and the invariants of every
schedule.

A ledger, which is not lost if a process is killed, records which records were processed,
which commits were acknowledged, and which partitions each member had.

Invariants, by name. The numbers refer to crashes.md:
- owned once (C01): at most one member has a partition in one generation.
- one living owner (C02): while a member reads a partition, no other member reads that
  partition in any generation, and the partition's node below `owners` contains the id of
  the member. A member that the group has removed does not count.
- generation (C03): after a power cut, no generation that a member had is used again.
- never back (C05, C06): when a commit is acknowledged, the stored offset is not lower
  than any offset that was acknowledged before. The commit itself may be lower, because
  the acknowledgement of a commit may arrive after a later commit is acknowledged.
- kept (C04, C11, C30): the committed offset at the end is at least each acknowledged
  offset, and at most the offset after the last processed record.
- seen (C04, C06): the committed offset at the end is also at least each committed offset
  that a member has read, even if another member committed it.
- all (C07): if one process is never killed, every record is processed at least once.
- heirs (C08): one second after a process was killed, the next poll of any other process
  removes its members.
- absence: a static member whose process was killed remains a member for its session
  timeout, unless a new member joins with its instance id. The poll that removes other
  members marks it as absent. One second after the timeout, the next poll removes it.
- patience (C09, C10): no member is removed before two thirds of its
  max_poll_interval_ms. Clock jumps do not count, nor does time in which all processes
  were paused, even in the middle of a rebalance.
- in order (C14): a member gets each record of a partition once, in the order of
  offsets, from its first position.
- no second owner (C27): a cooperative assignment gives no partition to a member while
  another member has it.
- again: the invariants also hold after a reset of the group to the beginning, even if
  members commit concurrently.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import attrs

import logcore
from logcore.consumer import OffsetAndMetadata, RebalanceListener
from logcore.consumer.assignors import ASSIGNORS, Assignment
from logcore.consumer.topic_partition import Member, TopicPartition
from logcore.coordination.classic_group import STABLE
from logcore.coordinators.group_codec import GroupNode
from logcore.coordinators.shared_groups import SharedGroups
from logcore.coordinators.stored_offsets import committed_in
from logcore.errors import (
    CommitFailedError,
    FencedInstanceError,
    NodeNotFoundError,
    RebalanceInProgressError,
    RegistryLockedError,
)
from logcore.format.group_records import read_assignment
from logcore.fs import SharedFS
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.registry import FileRegistry, open_registry, paths
from logcore.registry import offsets as registry_offsets
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine, SimulatedProcess

PATH: Final = "data"
SETTINGS: Final[dict[str, Any]] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    "max_poll_interval_ms": 3_000,
}
_STATIC: Final[dict[str, Any]] = {
    "session_timeout_ms": 900,
    "heartbeat_interval_ms": 300,
}
#: Most schedules take 5,000 steps. Steps also count while all processes are stopped.
_MAX_STEPS: Final = 300_000
#: Every process checks for dead members at least this often (clients reference, C08).
_HEIRS_MS: Final = 1_000


@attrs.frozen
class HastyAssignor:
    """Gives a partition to another member while the first one still has it. No
    cooperative assignor may do that.
    """

    name: str = "hasty"
    is_cooperative: bool = True

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Assignment:
        found: Assignment = ASSIGNORS["range"].assign(partitions, members)  # type: ignore[assignment]
        return found


class LedgerListener(RebalanceListener):
    """Removes the read positions of newly assigned partitions from the ledger. With
    `is_late`, it commits when partitions are revoked.
    """

    def __init__(
        self, group: GroupSimulation, consumer: logcore.Consumer, *, is_late: bool
    ) -> None:
        self.group = group
        self.consumer = consumer
        self.is_late = is_late

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        for partition in partitions:
            self.group.last_offsets.pop((self.consumer, partition), None)

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        if self.is_late:
            self.group.commit(self.consumer)

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        pass


class GroupSimulation:
    """A group of simulated processes; see the description of the module.

    With `is_hasty`, HastyAssignor moves partitions, and commits are late. With
    `is_static`, each member has one of three instance ids, chosen at random. `stores` are
    settings of where offsets are stored. Each member has one of them, chosen at random. A
    member with the last settings reads the commits of all members. With `rewinds`, a
    process resets the group to the beginning.
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
        is_static: bool = False,
        stores: Sequence[Mapping[str, Any]] = ({},),
        rewinds: bool = False,
    ) -> None:
        self.rewinds = rewinds
        self.checks_read_commits = not rewinds and all(store == {} for store in stores)
        self.processed_after_rewind: dict[TopicPartition, set[int]] = {}
        self.is_rewound = not rewinds
        self.stores = stores
        self.is_hasty = is_hasty
        self.is_static = is_static
        self.settings = (
            {**SETTINGS, "max_poll_interval_ms": 300, "assignors": (HastyAssignor(),)}
            if is_hasty
            else SETTINGS
        )
        self.readers: list[tuple[SimulatedProcess, logcore.Consumer]] = []
        #: The last offset that a consumer has read since the partition was assigned.
        self.last_offsets: dict[tuple[logcore.Consumer, TopicPartition], int] = {}
        #: The result of _awake_ms() when the last poll of a consumer began.
        self.polled_ms: dict[logcore.Consumer, int] = {}
        #: The id of each consumer that was a member of the group at the last check.
        self.member_ids: dict[logcore.Consumer, str] = {}
        self.leaving: set[logcore.Consumer] = set()
        #: The time at which the locks of a killed process were released.
        self.freed_ms: dict[SimulatedProcess, int] = {}
        #: The highest generation of a member.
        self.generation = -1
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk({"data": None}, seed=seed)
        self.machine = Machine(self.disk, seed=seed, chances=chances)
        self.machine.on_locks_released = self._replace_killed
        self.records = records
        self.processed: dict[TopicPartition, set[int]] = {}
        self.acked: dict[TopicPartition, int] = {}
        #: The commits that callbacks have acknowledged, until they are recorded.
        self.confirmed_commits: list[dict[TopicPartition, int]] = []
        self.owners: dict[tuple[int, TopicPartition], str] = {}
        self.partitions = [TopicPartition("t", number) for number in range(partitions)]
        with logcore.open_dir(PATH, create=True, fs=self.disk) as data:
            data.create_topic("t", partitions)
            for number in range(records):
                data.append("t", b"%d" % number, partition=number % partitions)
        self.started = 0
        self.members: set[SimulatedProcess] = set()
        for _ in range(processes):
            self._start_member()
        self.machine.protected = self.machine.start(self._consume_all)
        if rewinds:
            self.machine.start(self._rewind)

    def run(self) -> None:
        self.machine.run()

    def _start_member(self) -> None:
        self.started += 1
        self.members.add(self.machine.start(self._run_process))

    def _replace_killed(self, process: SimulatedProcess) -> None:
        self.freed_ms[process] = self.disk.monotonic_ms()
        if (
            process in self.members
            and self.started < 8
            and not self.machine.is_powered_off
        ):
            self._start_member()

    # -- actions of processes ----------------------------------------------------------

    def _run_process(self, fs: SharedFS) -> None:
        for _ in range(self.rng.randrange(1, 3)):
            settings = dict(self.rng.choice(self.stores))
            if self.is_static:
                settings |= {
                    **_STATIC,
                    "group_instance_id": f"i{self.rng.randrange(3)}",
                }
            # Another member may take this instance id: because this member was removed
            # as dead, or because its process chose the same id.
            with (
                contextlib.suppress(FencedInstanceError),
                self._open_consumer(fs, settings) as consumer,
            ):
                for _ in range(self.rng.randrange(2, 8)):
                    self._poll_once(consumer)

    def _consume_all(self, fs: SharedFS) -> None:
        """Continue until all records are processed."""
        settings = dict(self.stores[-1])
        if self.is_static:
            settings |= {**_STATIC, "group_instance_id": "spared"}
        with self._open_consumer(fs, settings) as consumer:
            last_step = self.machine.steps + _MAX_STEPS
            while not self._is_complete():
                self._poll_once(consumer)
                assert self.machine.steps < last_step, (
                    f"all: {self.processed} {consumer.assignment()}"
                )

    @contextlib.contextmanager
    def _open_consumer(
        self, fs: SharedFS, given: Mapping[str, Any]
    ) -> Generator[logcore.Consumer]:
        """Yield a consumer of the group, and close it at the end of the `with` block.

        The close may fail while another process is paused in the middle of a change to
        the group. Then the member is removed after its session timeout.
        """
        settings = {**self.settings, **given}
        with (
            contextlib.suppress(RegistryLockedError),
            logcore.open_dir(PATH, shared=True, fs=fs) as data,
            data.consumer(**settings) as consumer,
        ):
            self.readers.append((cast(SimulatedProcess, fs), consumer))
            consumer.subscribe(
                ["t"], listener=LedgerListener(self, consumer, is_late=self.is_hasty)
            )
            yield consumer
            self.leaving.add(consumer)
            consumer.close()
            self._record_confirmed()

    def _rewind(self, fs: SharedFS) -> None:
        """Reset the group to the beginning, once."""
        with logcore.open_dir(PATH, shared=True, fs=fs) as data:
            last_step = self.machine.steps + self.rng.randrange(2_000)
            while self.machine.steps < last_step:
                data.refresh()
            with contextlib.suppress(RegistryLockedError):
                self.processed_after_rewind = {}
                data.alter_group_offsets(
                    "g", dict.fromkeys(self.partitions, 0), force=True
                )
                self.is_rewound = True

    def _is_complete(self) -> bool:
        found = (
            self.processed_after_rewind
            if self.is_rewound and self.rewinds
            else self.processed
        )
        return sum(map(len, found.values())) == self.records

    def _poll_once(self, consumer: logcore.Consumer) -> None:
        # Another process may be stopped in the middle of a change, with the lock.
        with contextlib.suppress(RegistryLockedError):
            began_ms = self.disk.monotonic_ms()
            awake_ms = self._awake_ms()
            found = consumer.poll(0.1, 3)
            self._record_confirmed()
            self.polled_ms[consumer] = awake_ms
            self._record_owners(consumer)
            self._check_group(consumer, set(found), began_ms)
            for record in found.records():
                topic_partition = TopicPartition(record.topic, record.partition)
                before = self.last_offsets.get(
                    (consumer, topic_partition), record.offset - 1
                )
                assert before == record.offset - 1, (
                    f"in order: {topic_partition} {record.offset} after {before}"
                )
                self.last_offsets[consumer, topic_partition] = record.offset
                for processed in (self.processed, self.processed_after_rewind):
                    processed.setdefault(topic_partition, set()).add(record.offset)
            if self.checks_read_commits and self.rng.random() < 0.5:
                self._record_read_commits(consumer)
            if found and not (self.is_hasty and self.rng.random() < 0.7):
                self.commit(consumer)

    def commit(self, consumer: logcore.Consumer) -> None:
        """Commit at once, or with the next call of the consumer."""
        # The partitions may belong to another member, or a rebalance may be in progress.
        with contextlib.suppress(CommitFailedError, RebalanceInProgressError):
            if self.rng.random() < 0.4:
                consumer.commit_async(callback=self._on_commit)
                return
            positions = {
                partition: consumer.position(partition)
                for partition in consumer.assignment()
            }
            consumer.commit()
            self._record_confirmed()
            self._record_commit(positions)

    def _record_read_commits(self, consumer: logcore.Consumer) -> None:
        """Treat the committed offsets of the group as acknowledged, because a member may
        continue from them.
        """
        for partition, committed in consumer.committed(self.partitions).items():
            if committed is not None:
                self.acked[partition] = max(
                    committed.offset, self.acked.get(partition, 0)
                )

    def _on_commit(
        self,
        error: Exception | None,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> None:
        """Only record the event, because an exception of a callback would be ignored."""
        if error is None:
            self.confirmed_commits.append(
                {
                    partition: committed.offset
                    for partition, committed in offsets.items()
                }
            )

    def _record_confirmed(self) -> None:
        while self.confirmed_commits:
            self._record_commit(self.confirmed_commits.pop(0))

    def _awake_ms(self) -> int:
        """Return the monotonic time without the time in which all processes were
        paused.
        """
        return self.disk.monotonic_ms() - self.machine.paused_ms

    def _check_group(
        self,
        consumer: logcore.Consumer,
        polled: set[TopicPartition],
        began_ms: int,
    ) -> None:
        """Check the group after a poll that began at `began_ms` and returned records of
        the partitions `polled`.

        No other process runs while the registry is read here, because the reads are not
        steps of the schedule.
        """
        with open_registry(PATH, read_only=True, fs=self.disk) as registry:
            try:
                value = registry.get(paths.group_state("g")).value
            except NodeNotFoundError:  # after a power cut
                return
            node = GroupNode.unpack("g", value)
            self._check_owners(registry, node, consumer, polled)
        self._check_heirs(node, began_ms)
        if self.is_static:
            self._check_absence(node)
        self._check_patience(node)
        if not self.is_hasty:
            self._check_assignment(node)

    def _check_owners(
        self,
        registry: FileRegistry,
        node: GroupNode,
        consumer: logcore.Consumer,
        polled: set[TopicPartition],
    ) -> None:
        members = node.group.members
        mine = consumer._membership.member
        if mine is None or mine.member_id not in members:
            return
        for partition in polled:
            owner = registry.get(paths.owner("g", partition.topic, partition.partition))
            registration = consumer._assignment._registration
            assert registration is not None
            named, number = paths.unpack_owner(owner.value)
            assert (named, number) == (registration.consumer_id, 0), (
                f"one living owner: {partition}, {owner}"
            )
        for other in self._running_consumers():
            if other is consumer or other._membership.member is None:
                continue
            both = (
                polled & other.assignment()
                if other._membership.member.member_id in members
                else set()
            )
            assert not both, (
                f"one living owner: {both} of {mine.member_id} and {other._membership.member.member_id}"
            )

    def _check_heirs(self, node: GroupNode, began_ms: int) -> None:
        dead = {
            consumer._groups._session
            for process, consumer in self.readers
            if isinstance(consumer._groups, SharedGroups)
            and self.freed_ms.get(process, began_ms) + _HEIRS_MS < began_ms
        }
        left = [
            member.member_id
            for member in node.group.members.values()
            if node.sessions.get(member.member_id) in dead
            and not (
                member.is_absent
                and node.clock_ms + began_ms <= member.deadline_ms + _HEIRS_MS
            )
        ]
        assert not left, f"heirs: {left}"

    def _check_absence(self, node: GroupNode) -> None:
        for process, consumer in self.readers:
            member_id = self.member_ids.get(consumer)
            if (
                member_id is None
                or member_id in node.group.members
                or consumer in self.leaving
            ):
                continue
            # A new member joined under its instance id.
            if consumer._membership.instance_id in node.group.static:
                del self.member_ids[consumer]
            elif process in self.freed_ms:
                del self.member_ids[consumer]
                away_ms = self.disk.monotonic_ms() - self.freed_ms[process]
                assert away_ms >= _STATIC["session_timeout_ms"], (
                    f"absence: {member_id} was removed after {away_ms} ms"
                )

    def _check_patience(self, node: GroupNode) -> None:
        members = node.group.members
        for consumer in self._running_consumers():
            member_id = (
                ""
                if consumer._membership.member is None
                else consumer._membership.member.member_id
            )
            was_member = bool(member_id) and self.member_ids.get(consumer) == member_id
            was_member = (
                was_member and consumer._membership.instance_id not in node.group.static
            )
            if (
                was_member
                and member_id not in members
                and consumer not in self.leaving
                and not self.rewinds
            ):
                silent_ms = self._awake_ms() - self.polled_ms[consumer]
                least_ms = self.settings["max_poll_interval_ms"] * 2 // 3
                assert silent_ms >= least_ms, (
                    f"patience: {member_id} was removed after {silent_ms} ms"
                )
                del self.member_ids[consumer]
            if member_id in members and consumer in self.polled_ms:
                self.member_ids[consumer] = member_id

    def _check_assignment(self, node: GroupNode) -> None:
        if node.group.state != STABLE:
            return
        given = {
            TopicPartition(*partition): member.member_id
            for member in node.group.members.values()
            for partition in read_assignment(member.assignment) or ()
        }
        for consumer in self._running_consumers():
            if (
                consumer._membership.member is None
                or consumer._membership.member.member_id not in node.group.members
            ):
                continue
            member_id = consumer._membership.member.member_id
            other = {
                partition: given[partition]
                for partition in consumer.assignment()
                if given.get(partition, member_id) != member_id
            }
            assert not other, f"no second owner: {member_id} has {other}"

    def _running_consumers(self) -> list[logcore.Consumer]:
        return [consumer for process, consumer in self.readers if not process.is_killed]

    def _record_owners(self, consumer: logcore.Consumer) -> None:
        member = consumer._membership.member
        if member is None or not member.is_stable:
            return
        self.generation = max(self.generation, member.generation)
        # A static member that joins again has another member id, and the assignment of
        # the former member with its instance id.
        name = consumer._membership.instance_id or member.member_id
        for partition in consumer.assignment():
            owner = self.owners.setdefault((member.generation, partition), name)
            assert owner == name, (
                f"owned once: {partition} in generation {member.generation}"
            )

    def _record_commit(self, offsets: dict[TopicPartition, int]) -> None:
        if self.rewinds:
            return
        lower = {
            partition: offset
            for partition, offset in offsets.items()
            if offset < self.acked.get(partition, 0)
        }
        if lower:
            stored = self._stored_offsets()
            for partition, offset in lower.items():
                assert stored.get(partition, 0) >= self.acked[partition], (
                    f"never back: {partition} from {self.acked[partition]} to {offset}"
                )
        for partition, offset in offsets.items():
            self.acked[partition] = max(offset, self.acked.get(partition, 0))

    def _stored_offsets(self) -> dict[TopicPartition, int]:
        """Return the committed offset of each partition: the larger one of the offsets in
        the log and in the registry. No other process runs during the reads, as in
        _check_group().
        """
        found: dict[TopicPartition, int] = {}
        with logcore.open_dir(PATH, read_only=True, fs=self.disk) as data:
            if OFFSETS_TOPIC in data:
                logs = [
                    data.partition(OFFSETS_TOPIC, number)
                    for number in data.partitions(OFFSETS_TOPIC)
                ]
                for (topic, partition), groups in committed_in(logs).items():
                    found[TopicPartition(topic, partition)] = groups["g"]
        with open_registry(PATH, read_only=True, fs=self.disk) as registry:
            for (topic, partition), offset in registry_offsets.committed(
                registry, "g"
            ).items():
                topic_partition = TopicPartition(topic, partition)
                found[topic_partition] = max(offset, found.get(topic_partition, 0))
        return found

    # -- invariants --------------------------------------------------------------------

    def check_disk(self, disk: Any, *, after_power: bool) -> None:
        settings = {**SETTINGS, **self.stores[-1]}
        with (
            logcore.open_dir(PATH, fs=disk) as data,
            data.consumer(**settings) as consumer,
        ):
            consumer.assign(self.partitions)
            committed = consumer.committed(self.partitions)
            for partition in self.partitions:
                found = committed.get(partition)
                offset = 0 if found is None else found.offset
                most = max(self.processed.get(partition, {-1})) + 1
                assert self.acked.get(partition, 0) <= offset <= most, (
                    f"kept: {partition} {self.acked.get(partition)} {offset} {most}"
                )
        if after_power:
            self._check_generation(disk)
        if not after_power and not self.machine.is_powered_off:
            assert sum(map(len, self.processed.values())) == self.records, (
                f"all: {self.processed}"
            )

    def _check_generation(self, disk: Any) -> None:
        """Check the generation of the first member that joins after a power cut."""
        disk.seed += 1_000_003  # other random decisions than before the power cut
        with (
            logcore.open_dir(PATH, shared=True, fs=disk) as data,
            data.consumer(**SETTINGS) as consumer,
        ):
            consumer.subscribe(["t"])
            while not consumer.assignment():
                consumer.poll(0.01)
            assert consumer._membership.member is not None
            found = consumer._membership.member.generation
            assert found > self.generation, (
                f"generation: {found} after {self.generation}"
            )
