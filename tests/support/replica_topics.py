"""A topic that is deleted and created again under the same name.

The world is that of replica_world, with topic ids. A client requests the deletion of the
topic, the controller removes its nodes in steps, and a client creates a topic of the
same name, whose leader epochs begin again. Brokers that are paused, cut off or restarted
read some of these changes late, or all at once. They call logcore.replication.identity.

    run_topics(seed)                   # raises InvariantBroken, with the seed and steps

Each topic has its own records, and the invariants of replica_world are checked for each.
The path of a state contains the id of its topic, so the registry refuses the write of a
broker that has read an earlier topic.

Invariant, besides those of replica_world:
    R14  a topic that was created again contains no record of the former one
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import attrs

from logcore.errors import RegistryUnavailableError, SessionExpiredError
from logcore.replication.following import LeaderResponse
from logcore.replication.identity import (
    ReplicaTreatment,
    is_replica_of,
    replica_treatment,
)
from logcore.replication.leading import FollowerFetch
from logcore.replication.state import LeaderAndIsr, ReplicationError
from support.replica_world import (
    FAULTS_END_MS,
    SESSION_MS,
    Disk,
    IdempotentProducer,
    InvariantBroken,
    Options,
    Process,
    Record,
    SimulatedRegistry,
    Waiter,
    World,
    check_pair,
    require,
)

#: The deletion of the topic, and faults because of which a broker reads it late.
FAULTS = (
    "delete_topic", "delete_topic", "delete_topic", "kill", "kill@leader", "power",
    "pause", "pause@leader", "long_pause", "long_pause@leader", "cut", "cut_registry",
    "cut_registry@leader", "cut_one_way", "move_leader", "lossy_network",
)  # fmt: skip
#: The longest time between the reads of two nodes.
_READ_MS = 40


@attrs.define
class CheckedTopic:
    """The state of the checks for one topic."""

    visible_records: list[Any] = attrs.field(factory=list)
    visible_epoch: int = -1
    acknowledged_end: int = 0
    appenders: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    committed_floor: int = -1


def _checked_topic_field(name: str) -> Any:
    """Return a property of a world that reads and writes a field of its CheckedTopic."""

    def read(world: TopicsWorld) -> Any:
        return getattr(world.checked_topic(), name)

    def write(world: TopicsWorld, value: Any) -> None:
        setattr(world.checked_topic(), name, value)

    return property(read, write)


class TopicsRegistry(SimulatedRegistry):
    """The nodes of one topic name."""

    def __init__(self) -> None:
        super().__init__()
        self.topic_id: int | None = 1
        self.last_id = 1
        #: The time of each creation or deletion, and the id since then.
        self.ids: list[tuple[int, int | None]] = [(0, 1)]
        self.is_deleting = False
        #: Each deleted id, and the time of its deletion record.
        self.deleted_ids: dict[int, int] = {}

    def set_topic(self, topic_id: int | None, now_ms: int) -> None:
        self.topic_id = topic_id
        self.ids.append((now_ms, topic_id))

    def topic_at(self, at_ms: int) -> int | None:
        return next(
            topic_id
            for changed_ms, topic_id in reversed(self.ids)
            if changed_ms <= at_ms
        )

    def remove_state(self) -> None:
        self.value = b""
        self.version = -1
        self.parsed = None
        self.history.clear()


class TopicDisk(Disk):
    """A disk, and the topic whose replica it contains."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.topic_id: int | None = None


class TopicView:
    """The topic as a process has read it from the registry."""

    def __init__(self) -> None:
        self.topic_id: int | None = None
        self.deleted_ids: frozenset[int] = frozenset()
        self.is_update_scheduled = False
        self.is_deleting = False


class TopicsWorld(World):
    """Topics of one name, each created after the deletion of the last; checks R14."""

    visible_records = _checked_topic_field("visible_records")
    visible_epoch = _checked_topic_field("visible_epoch")
    acknowledged_end = _checked_topic_field("acknowledged_end")
    appenders = _checked_topic_field("appenders")
    committed_floor = _checked_topic_field("committed_floor")

    def __init__(
        self,
        seed: int,
        options: Options | None = None,
        steps: list[str] | None = None,
    ) -> None:
        rng = random.Random(seed)
        #: The topic whose records are checked now.
        self.topic_id: int | None = 1
        self._checked_topics: dict[int | None, CheckedTopic] = {}
        self._views: dict[Process, TopicView] = {}
        #: The topic of each record.
        self.topic_of: dict[int, int | None] = {}
        self.creations = 0
        super().__init__(
            seed,
            options
            or Options(
                faults=FAULTS,
                fault_count=rng.randint(3, 9),
                loss=rng.choice([0.0, 0.02, 0.1]),
            ),
            steps,
        )
        self.registry: TopicsRegistry = TopicsRegistry()

    def checked_topic(self) -> CheckedTopic:
        return self._checked_topics.setdefault(self.topic_id, CheckedTopic())

    def view_of(self, process: Process) -> TopicView:
        return self._views.setdefault(process, TopicView())

    def disk_of(self, process: Process) -> TopicDisk:
        assert isinstance(process.disk, TopicDisk)
        return process.disk

    def new_disk(self, broker: int) -> Disk:
        self.disks += 1
        return TopicDisk(f"disk-{broker}-{self.disks}")

    # -- the topic ---------------------------------------------------------------------

    def fault_delete_topic(self, victim: Process) -> None:
        """Request the deletion, and create the topic again soon after it."""
        registry = self.registry
        if registry.is_deleting or registry.parsed is None:
            return
        registry.is_deleting = True
        self.notify_watches()
        self.call_later(1, None, self.create_topic)

    def create_topic(self) -> None:
        registry = self.registry
        if registry.is_deleting or registry.topic_id is not None:
            self.call_later(1 + int(self.rng.random() * 30), None, self.create_topic)
            return
        registry.last_id += 1
        registry.set_topic(registry.last_id, self.now_ms)
        self.creations += 1
        self.trace("topic {} is created", registry.last_id)
        self.notify_watches()

    def run_controller(self, process: Process) -> None:
        registry, view = self.registry, self.view_of(process)
        if not registry.is_deleting:
            if view.topic_id is not None:
                super().run_controller(process)
            return
        if process.session is None or view.is_deleting:
            return
        with contextlib.suppress(RegistryUnavailableError, SessionExpiredError):
            with self.call_registry(process):
                is_controller = registry.become_controller(
                    process.session, process.broker
                )
            if is_controller:
                view.is_deleting = True
                self.delete_next(process, process.session, 0)

    def delete_next(self, process: Process, session: int, step: int) -> None:
        """Delete the nodes of a topic one after the other, the request last."""
        registry, view = self.registry, self.view_of(process)
        try:
            with self.call_registry(process):
                registry.check_session(session)
                self.delete_node(step)
                self.notify_watches()
        except (RegistryUnavailableError, SessionExpiredError):
            view.is_deleting = False
            return
        if step == 3:
            view.is_deleting = False
        else:
            delay_ms = 1 + int(self.rng.random() * _READ_MS)
            self.call_later(
                delay_ms, process, self.delete_next, process, session, step + 1
            )

    def delete_node(self, step: int) -> None:
        registry = self.registry
        if step == 0 and registry.topic_id is not None:
            registry.deleted_ids.setdefault(registry.topic_id, self.now_ms)
        elif step == 1:
            registry.remove_state()
        elif step == 2:
            registry.set_topic(None, self.now_ms)
        elif step == 3:
            registry.is_deleting = False
            self.trace("the topic is deleted")

    # -- the view of a process ---------------------------------------------------------

    def read_registry(self, process: Process) -> None:
        """Read the deletion records, the topic and its state, one after the other."""
        sent_ms = self.now_ms - int(self.rng.random() * 60)
        registry = self.registry
        with self.call_registry(process):
            if process.session is not None:
                registry.renew(process.session, self.now_ms)
            live = registry.live()
            topic_ms = self.now_ms - int(self.rng.random() * _READ_MS)
            deletions_ms = topic_ms - int(self.rng.random() * _READ_MS)
            topic_id = registry.topic_at(max(0, topic_ms))
            current_state, version = None, -1
            if topic_id == registry.topic_id:
                current_state, version = registry.parsed, registry.version
        process.live = live
        view = self.view_of(process)
        view.deleted_ids = frozenset(
            topic_id
            for topic_id, at_ms in registry.deleted_ids.items()
            if at_ms <= deletions_ms
        )
        view.topic_id = topic_id
        process.state, process.version = current_state, version
        if process.session is not None:
            process.lease_until_ms = sent_ms + SESSION_MS
        self.evaluate(process)

    def evaluate(self, process: Process) -> None:
        view, disk = self.view_of(process), self.disk_of(process)
        if (
            view.topic_id is not None
            and process.state is not None
            and is_replica_of(disk.topic_id, view.topic_id)
        ):
            super().evaluate(process)
            return
        process.leader = process.follower = process.taking_over = None
        process.waiters = []
        process.commits = None
        if disk.topic_id != view.topic_id and not view.is_update_scheduled:
            view.is_update_scheduled = True
            delay_ms = 1 + int(self.rng.random() * 20)
            self.call_later(delay_ms, process, self.update_replica, process)

    def update_replica(self, process: Process) -> None:
        """Replace the replica on the disk by a replica of the topic in the view."""
        view, disk = self.view_of(process), self.disk_of(process)
        view.is_update_scheduled = False
        if disk.topic_id is not None:
            treatment = replica_treatment(
                disk.topic_id, view.topic_id, view.deleted_ids
            )
            if treatment is not ReplicaTreatment.KEEP:
                self.trace("broker {} removes topic {}", process.broker, disk.topic_id)
                process.truncations += 1
                process.high_watermark = 0
                disk.restart_at(0)
                disk.topic_id = None
        if disk.topic_id is None or view.topic_id is not None:
            disk.topic_id = view.topic_id
        if view.topic_id is not None:
            self.evaluate(process)

    # -- messages ----------------------------------------------------------------------

    def send(
        self,
        source: int,
        target: int,
        call: Callable[..., None],
        *args: Any,
        **options: Any,
    ) -> None:
        """Add the topic id to fetches, and to writes of the state."""
        if call == self.on_fetch:
            call = self.on_fetch_of
            args = (*args, self.view_of(self.processes[source]).topic_id)
        elif call == self.set_state:
            call = self.set_state_of
            args = (*args, self.view_of(args[0]).topic_id)
        elif call == self.on_written:
            call = self.on_written_of
            args = (*args, self.registry.topic_id)
        super().send(source, target, call, *args, **options)

    def on_fetch_of(
        self,
        process: Process,
        fetch: FollowerFetch,
        incarnation: int,
        topic_id: int | None,
    ) -> None:
        if topic_id == self.view_of(process).topic_id:
            self.on_fetch(process, fetch, incarnation)
            return
        # UNKNOWN_TOPIC_ID, which a follower handles like this error.
        answer = LeaderResponse(ReplicationError.NOT_LEADER_OR_FOLLOWER)
        self.send(
            process.broker,
            fetch.replica,
            self.on_fetch_response,
            fetch,
            incarnation,
            answer,
        )

    def set_state_of(
        self,
        process: Process,
        session: int | None,
        new: LeaderAndIsr,
        expected: int | None,
        topic_id: int | None,
    ) -> None:
        if topic_id == self.registry.topic_id:
            self.set_state(process, session, new, expected)

    def on_written_of(
        self,
        process: Process,
        incarnation: int,
        new: LeaderAndIsr | None,
        version: int,
        topic_id: int | None,
    ) -> None:
        if topic_id == self.view_of(process).topic_id:
            self.on_written(process, incarnation, new, version)

    # -- checks ------------------------------------------------------------------------

    def idempotent_client(self, producer: IdempotentProducer) -> None:
        """Do nothing, because brokers forget the sequences of a deleted topic."""

    def produce(self, process: Process, **fields: Any) -> bool:
        self.topic_id = self.view_of(process).topic_id
        self.topic_of[self.last_number + 1] = self.topic_id
        return super().produce(process, **fields)

    def append_records(self, process: Process, records: Any) -> None:
        for record in records:
            self.check_topic(process, record)
        super().append_records(process, records)

    def check_topic(self, process: Process, record: Record) -> None:
        topic_id = self.view_of(process).topic_id
        require(
            self.topic_of[record.number] == topic_id,
            "R14",
            "broker {} has record {} of topic {} in topic {}",
            process.broker,
            record.number,
            self.topic_of[record.number],
            topic_id,
        )

    def set_high_watermark(self, process: Process, high_watermark: int) -> None:
        self.topic_id = self.view_of(process).topic_id
        before = max(process.high_watermark, process.disk.start)
        for record in process.disk.records[before:high_watermark]:
            self.check_topic(process, record)
        super().set_high_watermark(process, high_watermark)

    def complete_waiters(self, process: Process) -> None:
        self.topic_id = self.view_of(process).topic_id
        super().complete_waiters(process)

    def acknowledge(self, waiter: Waiter) -> None:
        super().acknowledge(waiter)
        if self.topic_id != self.registry.topic_id:
            self.is_acknowledged_since_heal = False

    def check_leader(self, process: Process, epoch: int) -> None:
        self.topic_id = self.view_of(process).topic_id
        for record in process.disk.records[process.disk.start :]:
            self.check_topic(process, record)
        super().check_leader(process, epoch)

    def fetch_offset(self, process: Process) -> int | None:
        self.topic_id = self.view_of(process).topic_id
        return super().fetch_offset(process)

    def check_logs(self) -> None:
        disks = [self.disk_of(process) for process in self.processes.values()]
        for number, disk in enumerate(disks):
            for other in disks[:number]:
                if disk.topic_id == other.topic_id:
                    check_pair(disk, other)

    def is_done(self) -> bool:
        if self.registry.is_deleting or self.registry.topic_id is None:
            require(
                self.now_ms < FAULTS_END_MS + 4 * SESSION_MS,
                "R09",
                "the topic is not deleted and created again",
            )
            return False
        return super().is_done()


def run_topics(seed: int, options: Options | None = None) -> TopicsWorld:
    """Run one schedule. If it fails, run it again to report its steps."""
    try:
        world = TopicsWorld(seed, options)
        world.run()
    except InvariantBroken as error:
        steps: list[str] = []
        with contextlib.suppress(InvariantBroken):
            TopicsWorld(seed, options, steps).run()
        error.add_note(f"repeat with run_topics({seed}, {options})")
        error.add_note("\n".join(steps))
        raise
    return world
