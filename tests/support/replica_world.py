"""One replicated partition on three to five simulated brokers.

The world calls the modules of logcore.replication, and contains no copy of their rules.
It simulates their environment:
- disks that can lose their unsynced tail, or all files;
- a registry with sessions, ephemeral nodes and compare-and-set, whose responses can be
  lost;
- messages that are late, lost or duplicated, and links that are cut;
- pauses, kills, power cuts and reassignments;
- producers, a client that commits offsets, and a client that reads them.

Idempotent producers send batches with sequences, and send them again if the response is
lost. The brokers remember refused batches with netshim.refused_batches.

    run_schedule(seed)                 # raises InvariantBroken, with the seed and steps

All random numbers come from the seed, and time is simulated, so a schedule repeats
exactly.
The model uses these simplifications: a truncation is durable at once, as in
Log.truncate(), and so are leader epochs and checkpoints of the high watermark.

Invariants (the numbers are those of docs/replication.md):
    R01  a record acknowledged with acks=all is in the log of every later leader
    R02  an offset below a high watermark has one value, always and on every broker
    R03  the high watermark is at most the log end, and never falls while a broker runs
    R04  only one process of one broker appends in a leader epoch
    R05  logs that have the same epoch at an offset are equal up to it
    R07  no log is truncated below its high watermark, except after an unclean election
    R08  leader epochs of the state only rise
    R09  after the faults the partition gets a leader and accepts writes
    R10  after the faults all replicas join the ISR
    R11  a batch that an idempotent producer sends again is stored once, and no batch is
         refused as out of order if its producer sends all batches in order
    R13  a read of the committed offset returns at least every offset that was
         acknowledged or read before the read began
    R15  replicas that are in sync and idle have the same records, and followers have
         deleted the records that their leader has deleted
    R16  a partition has as many replicas as its latest reassignment requested, also if
         the reassignment was cancelled
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs

from logcore.errors import (
    BadVersionError,
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    NodeExistsError,
    OutOfOrderSequenceError,
    RegistryUnavailableError,
    SessionExpiredError,
)
from logcore.partition import epochs
from logcore.partition.producers import KNOWN_BATCHES, Producers, SequencedBatch
from logcore.replication import electing, following, leading, state
from logcore.replication.electing import PartitionSettings
from logcore.replication.following import FollowerState, LeaderResponse
from logcore.replication.leading import FollowerFetch, LeaderState
from logcore.replication.state import (
    NO_LEADER,
    LeaderAndIsr,
    LiveBroker,
    ReplicationError,
    Role,
)
from netshim.refused_batches import RefusedBatches
from netshim.wire import codes

SESSION_MS = 500
LAG_MS = 1_000
POLL_MS = 160
#: Faults happen until this time. Then heal() ends all of them.
FAULTS_END_MS = 2_600
#: R09 allows the session timeout and one second. R10 allows the lag and two seconds, and
#: a session timeout, because a restarted broker waits for the end of its old session.
LEADER_BY_MS = FAULTS_END_MS + SESSION_MS + 1_000
IN_SYNC_BY_MS = FAULTS_END_MS + LAG_MS + 2_000 + SESSION_MS
#: R15: idle replicas become equal in this time, which is enough for several fetches.
EQUAL_WITHIN_MS = 1_000
#: The address of the registry in the network.
REGISTRY = 0
PATH = "/brokers/topics/t/partitions/0/state"
KEY = ("t", 0)


@attrs.frozen
class Batch:
    """A batch of an idempotent producer. It has one record, so one sequence."""

    producer_id: int
    epoch: int
    sequence: int
    #: The name under which the producer repeats the batch.
    name: Hashable
    is_transactional: bool = False


@attrs.frozen
class Marker:
    """The end of a transaction of a producer."""

    producer_id: int
    epoch: int
    commit: bool
    coordinator_epoch: int


class Record(NamedTuple):
    leader_epoch: int
    #: No other record has this number.
    number: int
    #: The offset that the record commits, or -1.
    commit: int = -1
    content: object = None


class InvariantBroken(AssertionError):
    """An invariant does not hold. `rule` is its number."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def require(condition: bool, rule: str, text: str, *values: object) -> None:
    if not condition:
        raise InvariantBroken(rule, text.format(*values))


# -- disks -----------------------------------------------------------------------------


class Disk:
    """The log of the partition on one disk. Offsets below `start` contain filler."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records: list[Any] = []
        self.epochs: list[tuple[int, int]] = []
        self.start = 0
        self.durable_end = 0
        #: The last checkpoint of the high watermark.
        self.checkpoint = 0
        self.is_clean = False
        self._producers: Producers | None = None

    @property
    def producers(self) -> Producers:
        """The states of the producers at the log end."""
        if self._producers is None:
            self._producers = Producers()
            for offset, record in enumerate(self.records):
                self.add_producer(record, offset)
        return self._producers

    def add_producer(self, record: Record | None, offset: int) -> None:
        if self._producers is None or record is None:
            return
        match record.content:
            case Batch(producer_id, epoch, sequence, _, is_transactional):
                self._producers.add(
                    producer_id,
                    epoch,
                    SequencedBatch(sequence, sequence, offset, offset, 0),
                    is_transactional=is_transactional,
                )
            case Marker(producer_id, epoch, _, coordinator_epoch):
                self._producers.end_transaction(
                    producer_id, epoch, coordinator_epoch, 0
                )

    @property
    def end(self) -> int:
        return len(self.records)

    @property
    def last_epoch(self) -> int:
        return self.epochs[-1][0] if self.epochs else leading.NO_EPOCH

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        return epochs.end_of(self.epochs, epoch, len(self.records))

    def begin_epoch(self, epoch: int) -> None:
        self.epochs = epochs.assign(self.epochs, epoch, len(self.records))

    def append(self, record: Record) -> None:
        if not self.epochs or record.leader_epoch > self.epochs[-1][0]:
            self.begin_epoch(record.leader_epoch)
        self.records.append(record)
        self.add_producer(record, self.end - 1)

    def truncate(self, end: int) -> None:
        del self.records[end:]
        self._producers = None
        self.epochs = epochs.truncate_end(self.epochs, end)
        self.durable_end = min(self.durable_end, end)
        self.checkpoint = min(self.checkpoint, end)

    def truncate_to_epoch(self, epoch: int, end: int) -> None:
        own_epoch, own_end = self.end_of_epoch(epoch)
        if own_epoch >= 0:
            end = min(end, own_end)
        self.truncate(max(self.start, min(end, self.end)))

    def delete_below(self, offset: int) -> None:
        self.start = max(self.start, min(offset, self.end))
        self.epochs = epochs.truncate_start(self.epochs, self.start)

    def restart_at(self, offset: int) -> None:
        self.records = [None] * offset
        self._producers = None
        self.epochs = []
        self.start = self.durable_end = self.checkpoint = offset

    def lose_power(self, rng: random.Random) -> None:
        """Keep the durable records, and a random number of the later records."""
        self.truncate(rng.randint(self.durable_end, self.end))


# -- the registry ----------------------------------------------------------------------


class SimulatedRegistry:
    """The nodes of one partition and of its brokers."""

    def __init__(self) -> None:
        self.value = b""
        self.version = -1
        self.history: list[bytes] = []
        self.parsed: LeaderAndIsr | None = None
        self.brokers: dict[int, tuple[LiveBroker, int]] = {}
        self.counters: dict[int, int] = {}
        self.controller: tuple[int, int] | None = None
        self.controller_epoch = 0
        #: Session id and the time of its expiry.
        self.sessions: dict[int, int] = {}
        self.last_session = 0

    def open_session(self, now_ms: int) -> int:
        self.last_session += 1
        self.sessions[self.last_session] = now_ms + SESSION_MS
        return self.last_session

    def renew(self, session: int, now_ms: int) -> None:
        self.check_session(session)
        self.sessions[session] = now_ms + SESSION_MS

    def check_session(self, session: int | None) -> None:
        if session not in self.sessions:
            raise SessionExpiredError("this session was declared expired")

    def expire(self, now_ms: int) -> bool:
        """Remove the sessions that are overdue, and their ephemeral nodes."""
        overdue = {
            session for session, at_ms in self.sessions.items() if at_ms < now_ms
        }
        for session in overdue:
            del self.sessions[session]
        self.brokers = {
            broker: entry
            for broker, entry in self.brokers.items()
            if entry[1] not in overdue
        }
        if self.controller is not None and self.controller[1] in overdue:
            self.controller = None
        return bool(overdue)

    def next_epoch(self, session: int, broker: int) -> int:
        self.check_session(session)
        self.counters[broker] = self.counters.get(broker, 0) + 1
        return self.counters[broker]

    def create_broker(self, session: int, broker: int, value: LiveBroker) -> None:
        self.check_session(session)
        if broker in self.brokers:
            raise NodeExistsError("the broker is registered")
        self.brokers[broker] = (value, session)

    def set_leaving(self, session: int, broker: int) -> None:
        self.check_session(session)
        value, owner = self.brokers[broker]
        self.brokers[broker] = (attrs.evolve(value, is_leaving=True), owner)

    def become_controller(self, session: int, broker: int) -> bool:
        self.check_session(session)
        if self.controller is None:
            self.controller = (broker, session)
            self.controller_epoch += 1
        return self.controller == (broker, session)

    def set_state(
        self, session: int | None, new: LeaderAndIsr, version: int | None
    ) -> int:
        """Replace the state if it has this version; None means any version."""
        self.check_session(session)
        if version not in (None, self.version):
            raise BadVersionError("the state has another version")
        if self.parsed is not None:
            require(
                new.leader_epoch >= self.parsed.leader_epoch,
                "R08",
                "leader epoch {} after {}",
                new.leader_epoch,
                self.parsed.leader_epoch,
            )
        self.value = state.pack_state(new)
        self.parsed = state.unpack_state(self.value, PATH)
        self.history.append(self.value)
        self.version += 1
        return self.version

    def forget_writes(self, rng: random.Random) -> None:
        """Lose the last writes of the state, as an unsynced registry would."""
        if len(self.history) > 1:
            del self.history[max(1, len(self.history) - rng.randint(1, 3)) :]
            self.value = self.history[-1]
            self.parsed = state.unpack_state(self.value, PATH)
            self.version = len(self.history) - 1

    def live(self) -> dict[int, LiveBroker]:
        return {broker: value for broker, (value, _) in self.brokers.items()}


# -- brokers ---------------------------------------------------------------------------


class Waiter:
    """A request that gets its response when the high watermark reaches `end`."""

    def __init__(
        self, end: int, record: Record, done: Callable[[], None] | None = None
    ) -> None:
        self.end = end
        self.record = record
        self.done = done


class IdempotentProducer:
    """A client that repeats its batches until they are acknowledged."""

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.next_sequence = 0
        #: The batches in flight, in the order of their sequences.
        self.unacknowledged: list[Batch] = []
        #: Until this time, the producer waits for responses and sends no batch.
        self.waits_until_ms = 0
        #: The number of the connection that has batches in flight.
        self.connection = 0
        #: The latest leader epoch in which a batch was acknowledged. Clients ignore
        #: metadata with an earlier epoch.
        self.leader_epoch = -1

    def begin_batch(self) -> None:
        sequence = self.next_sequence
        self.next_sequence += 1
        name = self.producer_id, sequence
        self.unacknowledged.append(Batch(self.producer_id, 0, sequence, name))

    def acknowledge(self, batch: Batch, leader_epoch: int) -> None:
        """Remove the batch and the batches before it, whose responses were lost."""
        self.leader_epoch = max(self.leader_epoch, leader_epoch)
        if batch in self.unacknowledged:
            del self.unacknowledged[: self.unacknowledged.index(batch) + 1]


class Process:
    """The process of a broker. A restarted broker has a new incarnation."""

    def __init__(self, broker: int, incarnation: int, disk: Disk) -> None:
        self.broker = broker
        self.incarnation = incarnation
        self.disk = disk
        self.is_up = True
        self.paused_until_ms = 0
        self.was_clean = disk.is_clean
        disk.is_clean = False
        self.session: int | None = None
        self.epoch: int | None = None
        #: The end of the lease. After it, this process returns no committed offsets.
        self.lease_until_ms = 0
        self.live: dict[int, LiveBroker] = {}
        self.state: LeaderAndIsr | None = None
        self.version = -1
        self.leader: LeaderState | None = None
        #: The leader epoch and broker epoch of the leadership that begins after a sync.
        self.taking_over: tuple[int, int] | None = None
        self.follower: FollowerState | None = None
        self.high_watermark = min(max(disk.checkpoint, disk.start), disk.end)
        self.is_syncing = False
        #: The number of truncations. The result of a sync that began before the last
        #: truncation is ignored.
        self.truncations = 0
        self.waiters: list[Waiter] = []
        self.refused = RefusedBatches()
        #: The state of the coordinator: log end and offset of each commit in the log.
        self.commits: list[tuple[int, int]] | None = None
        self.is_proposing = False
        self.is_leaving = False
        #: For each follower whose last fetch got no records: all that determined the
        #: response. A fetch session does not handle the same fetch again.
        self.idle_fetches: dict[int, object] = {}


@attrs.frozen
class Options:
    """The parameters of a schedule, which random_options() chooses."""

    brokers: int = 3
    replicas: int = 3
    min_isr: int = 2
    is_durable_first: bool = True
    is_unclean_allowed: bool = False
    #: The names of the faults that may happen.
    faults: tuple[str, ...] = ()
    fault_count: int = 4
    #: The fractions of messages that are lost, duplicated and late; all three are equal.
    loss: float = 0.02
    #: The longest time of a sync.
    sync_ms: int = 12


FAULTS = (
    "kill", "kill", "kill@leader", "power", "power@leader", "power_all", "wipe", "pause",
    "pause", "pause@leader", "long_pause@leader", "cut", "cut_one_way",
    "cut_registry", "cut_registry@leader", "lose_responses@leader", "move_leader", "move_leader",
    "leave", "leave@leader", "lossy_network", "delete_records",
)  # fmt: skip
#: The faults of schedules without syncs, in which a power cut loses records by design.
WITHOUT_SYNCS = tuple(
    fault for fault in FAULTS if not fault.startswith("power") and fault != "wipe"
)


def random_options(rng: random.Random) -> Options:
    brokers, replicas, min_isr = rng.choice(
        [(3, 3, 2)] * 6
        + [(3, 3, 1), (3, 3, 3), (4, 3, 2), (4, 3, 2), (5, 5, 3), (3, 2, 1)]
    )
    is_durable_first = rng.random() < 0.85
    faults = FAULTS if is_durable_first else WITHOUT_SYNCS
    if brokers > replicas:
        faults += ("reassign",) * 4
    return Options(
        brokers=brokers,
        replicas=replicas,
        min_isr=min_isr,
        is_durable_first=is_durable_first,
        is_unclean_allowed=rng.random() < 0.05,
        faults=faults,
        fault_count=rng.randint(2, 9),
        loss=rng.choice([0.0, 0.02, 0.02, 0.1]),
        sync_ms=rng.choice([12, 12, 120]),
    )


#: The time in milliseconds, a number, the process of the call (None if it belongs to no
#: process), the call, and its arguments.
Event = tuple[int, int, Process | None, Callable[..., None], tuple[Any, ...]]


def pop_event(
    events: list[Event],
) -> tuple[int, Callable[..., None] | None, tuple[Any, ...]]:
    """Return the time, the call and the arguments of the next event.

    The call is None if its process is dead or paused. After a pause, a process gets its
    requests in the order in which they arrived, as from a TCP connection.
    """
    at_ms, number, process, call, args = heapq.heappop(events)
    if process is None:
        return at_ms, call, args
    if not process.is_up:
        return at_ms, None, ()
    if process.paused_until_ms > at_ms:
        heapq.heappush(events, (process.paused_until_ms, number, process, call, args))
        return at_ms, None, ()
    return at_ms, call, args


class World:
    """One schedule. `steps` receives a line for each step, if it is not None."""

    def __init__(
        self,
        seed: int,
        options: Options | None = None,
        steps: list[str] | None = None,
        beside: World | None = None,
    ) -> None:
        """Create a world. It shares the events, the random numbers and the network of
        the world `beside` it.
        """
        self.rng: random.Random = random.Random(seed) if beside is None else beside.rng
        #: True if leaders use fetch sessions: they skip a fetch that equals the last one.
        self.has_sessions = bool(seed % 2)
        self.options = options or random_options(self.rng)
        self.steps = steps
        self.now_ms = 0
        self.events: list[Event] = [] if beside is None else beside.events
        self.order: Iterator[int] = (
            itertools.count() if beside is None else beside.order
        )
        self.registry = SimulatedRegistry()
        self.settings = PartitionSettings(
            min_insync_replicas=self.options.min_isr,
            is_unclean_allowed=self.options.is_unclean_allowed,
            is_durable_first=self.options.is_durable_first,
        )
        self.broken_links: set[tuple[int, int]] = (
            set() if beside is None else beside.broken_links
        )
        self.loss = self.options.loss
        self.is_healed = False
        self.disks = 0
        self.processes: dict[int, Process] = {}
        # The state of the checks.
        #: The records below the highest high watermark of any broker so far.
        self.visible_records: list[Any] = []
        #: The latest leader epoch in which a broker had a high watermark.
        self.visible_epoch = -1
        #: The end of the records that were acknowledged with acks=all.
        self.acknowledged_end = 0
        self.acknowledged = 0
        self.offset_reads = 0
        self.is_acknowledged_since_heal = False
        #: For each leader epoch, the broker and incarnation that append in it.
        self.appenders: dict[int, tuple[int, int]] = {}
        #: The highest committed offset that a client has seen.
        self.committed_floor = -1
        self.last_number = 0
        self.last_commit = 0
        self.stopped_replicas = 0
        #: True after an unclean election, which may lose records.
        self.may_lose_records = False
        self.producers = [IdempotentProducer(1), IdempotentProducer(2)]
        #: The offset of each batch below a high watermark.
        self.visible_batches: dict[Hashable, int] = {}
        #: The highest log start. Brokers may have forgotten batches below it.
        self.deleted_below = 0
        #: R15: whether the clients are idle, and when the replicas must be equal.
        self.is_idle = False
        self.equal_by_ms: int | None = None
        for broker in range(1, self.options.brokers + 1):
            self.start(broker, self.new_disk(broker))

    # -- time and messages -------------------------------------------------------------

    def call_later(
        self,
        delay_ms: int,
        process: Process | None,
        call: Callable[..., None],
        *args: Any,
    ) -> None:
        """Call after a delay. The call is dropped if `process` is not alive then."""
        heapq.heappush(
            self.events, (self.now_ms + delay_ms, next(self.order), process, call, args)
        )

    def run(self) -> World:
        self.schedule_events()
        try:
            while not self.is_done():
                self.now_ms, call, args = pop_event(self.events)
                if call is not None:
                    call(*args)
        except InvariantBroken:
            raise
        except Exception as error:
            raise InvariantBroken("error", f"{error!r} at {self.now_ms} ms") from error
        self.check_logs()
        return self

    def trace(self, text: str, *values: object) -> None:
        if self.steps is not None:
            self.steps.append(f"{self.now_ms:5} ms  {text.format(*values)}")

    def send(
        self,
        source: int,
        target: int,
        call: Callable[..., None],
        *args: Any,
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        """Send a message to the process that runs on `target` when the message arrives.

        The message is dropped if `is_open` is false then: its connection was aborted.
        """
        if (source, target) in self.broken_links:
            return
        rng = self.rng
        copies = 1
        if self.loss:
            drawn = rng.random()
            if drawn < self.loss:
                return
            copies += drawn > 1 - self.loss
        for _ in range(copies):
            delay_ms = 1 + int(rng.random() * 8)
            if self.loss and rng.random() < self.loss:
                delay_ms += int(rng.random() * 1_200)
            self.call_later(delay_ms, None, self.deliver, target, call, args, is_open)

    def deliver(
        self,
        target: int,
        call: Callable[..., None],
        args: tuple[Any, ...],
        is_open: Callable[[], bool],
    ) -> None:
        if not is_open():
            return
        if target == REGISTRY:
            call(*args)
            return
        process = self.processes[target]
        if not process.is_up:
            return
        if process.paused_until_ms > self.now_ms:
            self.call_later(
                process.paused_until_ms - self.now_ms, process, call, process, *args
            )
        else:
            call(process, *args)

    @contextlib.contextmanager
    def call_registry(self, process: Process) -> Generator[None, None, None]:
        """Wrap a call whose request or response may be lost."""
        self.check_link(process.broker, REGISTRY)
        yield
        self.check_link(REGISTRY, process.broker)

    def check_link(self, source: int, target: int) -> None:
        if (source, target) in self.broken_links or (
            self.loss and self.rng.random() < self.loss
        ):
            raise RegistryUnavailableError("the registry does not answer")

    # -- starts and ends of brokers ----------------------------------------------------

    def new_disk(self, broker: int) -> Disk:
        self.disks += 1
        return Disk(f"disk-{broker}-{self.disks}")

    def start(self, broker: int, disk: Disk) -> None:
        before = self.processes.get(broker)
        process = Process(broker, before.incarnation + 1 if before else 1, disk)
        self.processes[broker] = process
        self.trace("broker {} starts, end {}", broker, disk.end)
        self.call_later(self.rng.randint(1, 60), process, self.poll, process)

    def kill(
        self, process: Process, *, power: bool = False, wipe: bool = False
    ) -> None:
        if not process.is_up:
            return
        process.is_up = False
        disk = process.disk
        if power:
            disk.lose_power(self.rng)
        self.trace(
            "broker {} dies, end {}, power cut {}, wiped {}",
            process.broker,
            disk.end,
            power,
            wipe,
        )
        if wipe:
            process.disk = self.new_disk(process.broker)
        delay_ms = 20 if self.is_healed else self.rng.choice([20, 300, 900])
        self.call_later(delay_ms, None, self.restart, process)

    def restart(self, process: Process) -> None:
        if self.processes[process.broker] is process:
            self.start(process.broker, process.disk)

    def poll(self, process: Process) -> None:
        """Do the periodic work of a broker."""
        self.call_later(
            POLL_MS // 2
            if self.is_healed
            else POLL_MS - 40 + int(self.rng.random() * 80),
            process,
            self.poll,
            process,
        )
        if self.rng.random() < 0.5:
            process.disk.checkpoint = process.high_watermark
        if not self.refresh_view(process, is_poll=True):
            return
        if process.leader is not None:
            self.set_leader_state(
                process, leading.review_isr(process.leader, process.live, self.now_ms)
            )
        self.run_controller(process)
        if process.follower is not None:
            self.follow(process)

    def register(self, process: Process) -> None:
        if process.session is None:
            with self.call_registry(process):
                process.session = self.registry.open_session(self.now_ms)
                process.epoch = None
        session = process.session
        with self.call_registry(process):
            epoch = self.registry.next_epoch(session, process.broker)
        value = LiveBroker(
            epoch,
            process.disk.name,
            was_clean=process.was_clean,
            is_leaving=process.is_leaving,
        )
        try:
            with self.call_registry(process):
                self.registry.create_broker(session, process.broker, value)
                self.notify_watches()
        except NodeExistsError:
            registered, owner = self.registry.brokers[process.broker]
            if owner != session:
                raise
            # The response to an earlier create was lost. The epoch in the node is valid.
            epoch = registered.epoch
        process.epoch = epoch
        self.trace("broker {} registered with epoch {}", process.broker, epoch)

    def expire_sessions(self, process: Process) -> None:
        """Expire overdue sessions. Every broker does this, also before it registers: its
        registration may wait for a session that no other broker expires.
        """
        with self.call_registry(process):
            if self.registry.expire(self.now_ms):
                self.notify_watches()

    def refresh_view(self, process: Process, *, is_poll: bool) -> bool:
        """Register if necessary, and read the registry. Return whether that succeeded."""
        try:
            if is_poll:
                self.expire_sessions(process)
                if process.session is None or process.epoch is None:
                    self.register(process)
            self.read_registry(process)
        except SessionExpiredError:
            self.trace("broker {} lost its session", process.broker)
            process.session = None
            return False
        except (RegistryUnavailableError, NodeExistsError):
            return False
        return True

    def read_registry(self, process: Process) -> None:
        """Renew the session, read the brokers and the state, and extend the lease."""
        # The call was sent some time before the registry handled it.
        sent_ms = self.now_ms - int(self.rng.random() * 60)
        with self.call_registry(process):
            if process.session is not None:
                self.registry.renew(process.session, self.now_ms)
            live, current_state = self.registry.live(), self.registry.parsed
            version = self.registry.version
        # A lost response does not change the view of the broker.
        process.live = live
        process.state, process.version = current_state, version
        if process.session is not None:
            process.lease_until_ms = sent_ms + SESSION_MS
        self.evaluate(process)

    def remove_replica(self, process: Process) -> None:
        """Delete the replica of a broker that is not assigned any more."""
        process.leader = process.follower = process.taking_over = None
        process.waiters = []
        process.commits = None
        if process.disk.end:
            self.trace("broker {} removes its replica", process.broker)
            process.truncations += 1
            process.disk.restart_at(0)
            process.high_watermark = 0

    def on_watch(self, process: Process) -> None:
        if self.refresh_view(process, is_poll=False):
            self.run_controller(process)

    def notify_watches(self) -> None:
        """Report a change to the watches. A report can be late or lost."""
        for process in self.processes.values():
            if not process.is_up or (process.broker, REGISTRY) in self.broken_links:
                continue
            if self.rng.random() >= 0.05 + self.loss:
                delay_ms = 1 + int(self.rng.random() * 30)
                self.call_later(delay_ms, process, self.on_watch, process)

    # -- the controller ----------------------------------------------------------------

    def run_controller(self, process: Process) -> None:
        if process.session is None or process.is_leaving:
            return
        try:
            with self.call_registry(process):
                if not self.registry.become_controller(process.session, process.broker):
                    return
        except (RegistryUnavailableError, SessionExpiredError):
            return
        current_state = process.state
        if current_state is None:
            new = electing.create_state(
                tuple(range(1, self.options.replicas + 1)),
                process.live,
                self.registry.controller_epoch,
            )
            if new is None or len(new.isr) < self.options.replicas:
                return
        else:
            new = electing.review(
                current_state,
                self.settings,
                process.live,
                self.registry.controller_epoch,
            )
        if new is not current_state:
            self.write_state(process, new, process.version)

    def write_state(
        self, process: Process, new: LeaderAndIsr, version: int | None
    ) -> None:
        self.send(
            process.broker,
            REGISTRY,
            self.set_state,
            process,
            process.session,
            new,
            version,
        )

    def set_state(
        self,
        process: Process,
        session: int | None,
        new: LeaderAndIsr,
        expected: int | None,
    ) -> None:
        """Handle a write in the registry, and send the response."""
        try:
            version = self.registry.set_state(session, new, expected)
        except (SessionExpiredError, BadVersionError) as error:
            self.trace(
                "the registry refuses a write of broker {}: {!r}", process.broker, error
            )
            self.send(
                REGISTRY, process.broker, self.on_written, process.incarnation, None, -1
            )
            return
        self.may_lose_records |= new.is_recovering
        self.trace(
            "broker {} wrote version {}: {}",
            process.broker,
            version,
            self.registry.value.decode(),
        )
        self.notify_watches()
        self.send(
            REGISTRY, process.broker, self.on_written, process.incarnation, new, version
        )

    def on_written(
        self, process: Process, incarnation: int, new: LeaderAndIsr | None, version: int
    ) -> None:
        if process.incarnation != incarnation:
            return
        if new is None:
            # An earlier attempt may have succeeded: read the node.
            self.on_watch(process)
        elif version > process.version:
            process.state, process.version = new, version
            self.evaluate(process)

    # -- roles -------------------------------------------------------------------------

    def evaluate(self, process: Process) -> None:
        """Change the role of a broker to its role in the state it has read."""
        current_state = process.state
        broker, epoch = process.broker, process.epoch
        if current_state is None:
            return
        if broker not in current_state.replicas:
            self.remove_replica(process)
            return
        role = state.role_of(current_state, broker, epoch)
        key = (current_state.leader_epoch, epoch)
        if process.leader is not None:
            if role is Role.LEADER and key == self.leader_key(process.leader):
                self.set_leader_state(
                    process,
                    leading.read_state(process.leader, current_state, process.version),
                )
                return
            self.trace("broker {} resigns", broker)
            process.leader = None
            process.waiters = []
            process.commits = None
        if role is not Role.LEADER:
            process.taking_over = None
        if process.follower is not None:
            if role is Role.FOLLOWER and key == self.follower_key(process.follower):
                if process.follower.state is not current_state:
                    process.follower = following.read_state(
                        process.follower, current_state
                    )
                return
            process.follower = None
        if role is Role.LEADER:
            if process.taking_over != key:
                assert epoch is not None
                process.taking_over = (current_state.leader_epoch, epoch)
                self.call_later(
                    1 + int(self.rng.random() * 15),
                    process,
                    self.take_over,
                    process,
                    key,
                )
        elif role is Role.FOLLOWER:
            assert epoch is not None
            disk = process.disk
            process.follower = following.follow(
                current_state,
                broker,
                epoch,
                is_durable_first=self.options.is_durable_first,
                log_start=disk.start,
                log_end=disk.end,
                last_epoch=disk.last_epoch,
                high_watermark=process.high_watermark,
            )
            self.follow(process)

    def leader_key(self, leader: LeaderState) -> tuple[int, int]:
        return leader.state.leader_epoch, leader.state.isr[leader.broker].broker_epoch

    def follower_key(self, follower: FollowerState) -> tuple[int, int]:
        return follower.state.leader_epoch, follower.broker_epoch

    def take_over(self, process: Process, key: tuple[int, int]) -> None:
        """Become the leader, after the sync of the log."""
        current_state = process.state
        if process.taking_over != key or current_state is None:
            return
        process.taking_over = None
        disk = process.disk
        disk.durable_end = disk.end
        disk.begin_epoch(current_state.leader_epoch)
        self.trace(
            "broker {} leads epoch {} from {}",
            process.broker,
            current_state.leader_epoch,
            disk.end,
        )
        self.check_leader(process, current_state.leader_epoch)
        process.idle_fetches = {}
        process.leader = leading.take_over(
            current_state,
            process.version,
            process.broker,
            min_insync_replicas=self.settings.min_insync_replicas,
            lag_ms=LAG_MS,
            log_start=disk.start,
            log_end=disk.end,
            high_watermark=process.high_watermark,
            now_ms=self.now_ms,
        )
        self.load_coordinator(process)
        self.set_high_watermark(process, process.leader.high_watermark)

    # -- the leader --------------------------------------------------------------------

    def set_leader_state(self, process: Process, leader: LeaderState) -> None:
        """Replace the leader state of a broker, and execute its effects."""
        process.leader = leader
        if leader.high_watermark != process.high_watermark:
            self.set_high_watermark(process, leader.high_watermark)
            self.complete_waiters(process)
        if leader.proposal is not None and not process.is_proposing:
            process.is_proposing = True
            self.propose(process)

    def propose(self, process: Process) -> None:
        """Write the proposal, again and again until its outcome is known."""
        leader = process.leader
        if leader is None or leader.proposal is None:
            process.is_proposing = False
            return
        if process.session is not None:
            self.write_state(process, leader.proposal.state, leader.proposal.version)
        self.call_later(150, process, self.propose, process)

    def complete_waiters(self, process: Process) -> None:
        end = process.high_watermark
        while process.waiters and process.waiters[0].end <= end:
            self.acknowledge(process.waiters.pop(0))

    def acknowledge(self, waiter: Waiter) -> None:
        record = waiter.record
        if waiter.done is not None:
            waiter.done()
        self.acknowledged += 1
        self.is_acknowledged_since_heal |= self.is_healed
        if self.may_lose_records:
            return
        require(
            waiter.end <= len(self.visible_records)
            and self.visible_records[waiter.end - 1] == record,
            "R01",
            "record {} was acknowledged at offset {} and is not committed",
            record,
            waiter.end - 1,
        )
        self.acknowledged_end = max(self.acknowledged_end, waiter.end)
        self.committed_floor = max(self.committed_floor, record.commit)

    def produce(
        self,
        process: Process,
        *,
        acks_all: bool,
        commit: int = -1,
        content: object = None,
        done: Callable[[], None] | None = None,
    ) -> bool:
        """Handle a produce request, or the commit of an offset.

        Return False if the request is refused. Call done() at the acknowledgement.
        """
        leader = process.leader
        if leader is None or (acks_all and not leader.has_min_isr):
            return False
        self.last_number += 1
        epoch = leader.state.leader_epoch
        record = Record(epoch, self.last_number, commit, content)
        owner = self.appenders.setdefault(epoch, (process.broker, process.incarnation))
        require(
            owner == (process.broker, process.incarnation),
            "R04",
            "broker {} appends in epoch {}, which is the epoch of {}",
            process.broker,
            epoch,
            owner,
        )
        disk = process.disk
        disk.append(record)
        self.trace("broker {} appends {} at {}", process.broker, record, disk.end - 1)
        if commit >= 0 and process.commits is not None:
            process.commits.append((disk.end, commit))
        if acks_all:
            process.waiters.append(Waiter(disk.end, record, done))
        self.set_leader_state(
            process,
            leading.appended(
                leader,
                disk.end,
                is_durable=not self.options.is_durable_first,
                now_ms=self.now_ms,
            ),
        )
        if self.options.is_durable_first:
            self.sync(process)
        return True

    def produce_batch(
        self, process: Process, batch: Batch, done: Callable[[], None]
    ) -> bool:
        """Handle a produce request of an idempotent producer, with acks=all.

        Return False if the request is refused. Call done() at the acknowledgement.
        """
        return self.code_of_batch(process, batch, done) == codes.NONE

    def code_of_batch(
        self, process: Process, batch: Batch, done: Callable[[], None]
    ) -> int:
        """Handle a produce request like produce_batch(), and return the error code."""
        sequence_key = KEY, batch.producer_id, batch.epoch, batch.sequence
        refused = process.refused
        if process.leader is None or not process.leader.has_min_isr:
            code = codes.NOT_LEADER_OR_FOLLOWER
            if process.leader is not None:
                code = codes.NOT_ENOUGH_REPLICAS
            refused.add(*sequence_key, code, self.now_ms)
            return code
        disk = process.disk
        refused_code = refused.code_for(*sequence_key, self.now_ms)
        if refused_code:
            refused.count_following(KEY, batch.producer_id)
        try:
            if refused_code and batch.producer_id not in disk.producers:
                raise OutOfOrderSequenceError("the first batch is missing")
            duplicate = disk.producers.duplicate_of(
                batch.producer_id,
                batch.epoch,
                batch.sequence,
                1,
                is_transactional=batch.is_transactional,
            )
        except OutOfOrderSequenceError:
            return refused_code or codes.OUT_OF_ORDER_SEQUENCE_NUMBER
        except (InvalidProducerEpochError, InvalidTransactionStateError):
            return codes.INVALID_PRODUCER_EPOCH
        if duplicate is None:
            self.produce(process, acks_all=True, content=batch, done=done)
            return codes.NONE
        # The log has the batch already. It is acknowledged when it is committed.
        end = duplicate.last_offset + 1
        waiter = Waiter(end, disk.records[end - 1], done)
        bisect.insort(process.waiters, waiter, key=lambda each: each.end)
        self.complete_waiters(process)
        return codes.NONE

    def sync(self, process: Process) -> None:
        if not process.is_syncing:
            process.is_syncing = True
            self.call_later(
                1 + int(self.rng.random() * self.options.sync_ms),
                process,
                self.on_synced,
                process,
                process.disk.end,
                process.truncations,
            )

    def on_synced(self, process: Process, end: int, truncations: int) -> None:
        process.is_syncing = False
        disk = process.disk
        if truncations == process.truncations:
            disk.durable_end = max(disk.durable_end, end)
        if process.leader is not None:
            self.set_leader_state(
                process, leading.synced(process.leader, disk.durable_end)
            )
            if disk.durable_end < disk.end and self.options.is_durable_first:
                self.sync(process)
        elif process.follower is not None:
            process.follower = following.synced(process.follower, disk.durable_end)
            self.set_high_watermark(process, process.follower.high_watermark)
            self.follow(process)

    def on_fetch(
        self, process: Process, fetch: FollowerFetch, incarnation: int
    ) -> None:
        """Handle a fetch request of a follower."""
        leader = process.leader
        disk = process.disk
        if leader is None:
            response = LeaderResponse(ReplicationError.NOT_LEADER_OR_FOLLOWER)
        else:
            refusal = None
            facts = fetch, leader.state, disk.end, process.high_watermark, process.live
            if (
                not self.has_sessions
                or process.idle_fetches.get(fetch.replica) != facts
            ):
                leader, refusal = leading.fetched(
                    leader,
                    fetch,
                    disk.end_of_epoch(fetch.last_epoch),
                    process.live,
                    self.now_ms,
                )
                if refusal is None and process.session is not None:
                    leader = leading.expand_isr(leader, fetch, process.live)
                self.set_leader_state(process, leader)
                is_idle_fetch = (
                    fetch.offset >= disk.end and fetch.replica in leader.state.isr
                )
                if refusal is None and is_idle_fetch:
                    process.idle_fetches[fetch.replica] = facts
            if refusal is not None:
                response = LeaderResponse(
                    refusal.error, refusal.diverging, log_start=disk.start
                )
            else:
                # With 6 records for each fetch, a new replica would miss the limit of
                # R10.
                size = 60 if self.is_healed else 6
                response = LeaderResponse(
                    records=disk.records[fetch.offset : fetch.offset + size],
                    high_watermark=process.high_watermark,
                    log_start=disk.start,
                )
        self.send(
            process.broker,
            fetch.replica,
            self.on_fetch_response,
            fetch,
            incarnation,
            response,
        )

    # -- the follower ------------------------------------------------------------------

    def follow(self, process: Process) -> None:
        follower = process.follower
        if follower is None:
            return
        step = following.next_step(follower)
        if isinstance(step, following.SyncLog):
            self.sync(process)
        elif isinstance(step, following.SendFetch):
            fetch = step.fetch
            process.follower = following.sent(follower, fetch)
            self.send(
                process.broker,
                follower.state.leader,
                self.on_fetch,
                fetch,
                process.incarnation,
            )
            self.call_later(250, process, self.give_up, process, fetch)

    def give_up(self, process: Process, fetch: FollowerFetch) -> None:
        follower = process.follower
        if follower is not None and follower.outstanding is fetch:
            process.follower = following.gave_up(follower)
            self.follow(process)

    def on_fetch_response(
        self,
        process: Process,
        fetch: FollowerFetch,
        incarnation: int,
        response: LeaderResponse,
    ) -> None:
        follower = process.follower
        if follower is None or process.incarnation != incarnation:
            return
        disk = process.disk
        own = (
            disk.end_of_epoch(response.diverging[0]) if response.diverging else (-1, -1)
        )
        before = follower
        follower, effects = following.answered(follower, fetch, response, own)
        if follower is before and not effects:
            return
        process.follower = follower
        delay_ms = 2 if response.records else 35
        for effect in effects:
            match effect:
                case following.AppendFetched(records):
                    self.append_records(process, records)
                case following.TruncateToEpoch(epoch, end):
                    process.truncations += 1
                    disk.truncate_to_epoch(epoch, end)
                    self.trace("broker {} truncates to {}", process.broker, disk.end)
                    self.check_truncation(process)
                case following.RestartLog(offset):
                    process.truncations += 1
                    disk.restart_at(offset)
                    self.trace(
                        "broker {} restarts its log at {}", process.broker, offset
                    )
                    self.check_truncation(process)
                case following.DeleteRecordsBelow(offset):
                    disk.delete_below(offset)
                case following.StopReplica(reason):
                    self.stopped_replicas += 1
                    require(
                        self.options.is_unclean_allowed,
                        "R07",
                        "broker {}: {}",
                        process.broker,
                        reason,
                    )
                case following.BackOff():
                    delay_ms = 60
        if effects:
            follower = following.changed_log(
                process.follower, disk.start, disk.end, disk.last_epoch
            )
            process.follower = follower
        self.set_high_watermark(process, follower.high_watermark)
        if follower.durable_end < follower.log_end:
            self.follow(process)
        else:
            self.call_later(delay_ms, process, self.follow, process)

    def append_records(self, process: Process, records: Any) -> None:
        disk = process.disk
        for record in records:
            disk.append(record)

    # -- the coordinator ---------------------------------------------------------------

    def load_coordinator(self, process: Process) -> None:
        """Read the commits up to the log end, as a new coordinator does."""
        end = process.disk.end
        process.commits = [
            (offset, record.commit)
            for offset, record in enumerate(process.disk.records[:end], 1)
            if record is not None and record.commit >= 0
        ]

    def fetch_offset(self, process: Process) -> int | None:
        """Return the committed offset, or None if the response is an error."""
        leader = process.leader
        if leader is None or process.commits is None:
            return None
        if self.now_ms >= process.lease_until_ms:
            return None
        if process.high_watermark < leader.epoch_start:
            return None
        for end, commit in reversed(process.commits):
            if end <= process.high_watermark:
                return commit
        return None if process.disk.start else -1

    # -- clients -----------------------------------------------------------------------

    def pick_process(self) -> Process | None:
        """Return a process that acts as the leader, if there is one."""
        leaders = [
            process
            for process in self.processes.values()
            if process.leader is not None
            and process.is_up
            and process.paused_until_ms <= self.now_ms
        ]
        return self.rng.choice(leaders) if leaders else None

    def client(self) -> None:
        drawn = self.rng.random()
        process = self.pick_process()
        self.call_later(4 + int(self.rng.random() * 30), None, self.client)
        if process is None or self.is_idle:
            return
        if drawn < 0.4:
            self.produce(process, acks_all=drawn < 0.34)
        elif drawn < 0.65:
            self.last_commit += 1
            self.produce(process, acks_all=True, commit=self.last_commit)
        else:
            offset = self.fetch_offset(process)
            if offset is not None:
                self.offset_reads += 1
                require(
                    offset >= self.committed_floor or self.may_lose_records,
                    "R13",
                    "broker {} returns {}, and a client has seen {}",
                    process.broker,
                    offset,
                    self.committed_floor,
                )
                self.committed_floor = offset

    def idempotent_client(self, producer: IdempotentProducer) -> None:
        """Send the batches in flight again, perhaps with a new batch."""
        rng = self.rng
        delay_ms = 20 + int(rng.random() * 80)
        self.call_later(delay_ms, None, self.idempotent_client, producer)
        if producer.waits_until_ms > self.now_ms:
            return
        if rng.random() < 0.3:
            self.send_in_flight(producer)
            return
        process = self.pick_process()
        if process is None or self.is_idle:
            return
        if rng.random() < 0.6 and len(producer.unacknowledged) < KNOWN_BATCHES:
            producer.begin_batch()
        batches = tuple(producer.unacknowledged)
        self.send_batches(process, producer, batches)
        if rng.random() < 0.1:
            # The same requests on another connection, on which they arrive late.
            self.call_later(
                int(rng.random() * 900),
                process,
                self.send_batches,
                process,
                producer,
                batches,
            )

    def send_batches(
        self, process: Process, producer: IdempotentProducer, batches: Sequence[Batch]
    ) -> None:
        """Send batches on one connection, which ends at the first refused batch."""
        if self.is_idle:
            return
        for batch in batches:
            # A third of the responses is lost.
            is_lost = self.rng.random() < 0.3

            def done(batch: Batch = batch, is_lost: bool = is_lost) -> None:
                if not is_lost:
                    self.acknowledge_batch(process, producer, batch)

            if not self.produce_batch(process, batch, done):
                return

    def acknowledge_batch(
        self, process: Process, producer: IdempotentProducer, batch: Batch
    ) -> None:
        assert process.leader is not None
        producer.acknowledge(batch, process.leader.state.leader_epoch)

    def send_in_flight(self, producer: IdempotentProducer) -> None:
        """Send all batches on one connection without waiting for responses.

        The broker may not be the leader yet, or not any more.
        """
        rng = self.rng
        process = rng.choice(list(self.processes.values()))
        if self.is_idle or not process.is_up or process.paused_until_ms > self.now_ms:
            return
        current_state = process.state
        if current_state is None or current_state.leader_epoch < producer.leader_epoch:
            return
        while len(producer.unacknowledged) < KNOWN_BATCHES:
            producer.begin_batch()
        producer.waits_until_ms = self.now_ms + 60
        producer.connection += 1
        number = producer.connection
        at_ms = 0
        for batch in producer.unacknowledged:
            at_ms += int(rng.random() * 12)
            self.call_later(
                at_ms, process, self.receive_in_flight, process, producer, number, batch
            )

    def receive_in_flight(
        self, process: Process, producer: IdempotentProducer, number: int, batch: Batch
    ) -> None:
        """Handle a batch, also if the batches before it were refused."""
        # Requests of a closed connection are dropped. After a pause, the broker may
        # already have later batches of the producer, and no client gets its responses.
        is_closed = (
            number != producer.connection or producer.waits_until_ms <= self.now_ms
        )
        if self.is_idle or is_closed:
            return
        is_lost = self.rng.random() < 0.3

        def done() -> None:
            if not is_lost:
                self.acknowledge_batch(process, producer, batch)

        code = self.code_of_batch(process, batch, done)
        require(
            code != codes.OUT_OF_ORDER_SEQUENCE_NUMBER or self.may_lose_records,
            "R11",
            "broker {} is missing a batch before {}, and the producer sent all",
            process.broker,
            batch,
        )

    # -- faults ------------------------------------------------------------------------

    def schedule_events(self) -> None:
        self.call_later(100, None, self.client)
        for producer in self.producers:
            self.call_later(100, None, self.idempotent_client, producer)
        at_ms = 0
        for _ in range(self.options.fault_count):
            # Many bugs need two faults at nearly the same time.
            if at_ms and self.rng.random() < 0.4:
                at_ms += self.rng.randint(1, 120)
            else:
                at_ms = self.rng.randint(250, FAULTS_END_MS - 200)
            name = self.rng.choice(self.options.faults)
            self.call_later(min(at_ms, FAULTS_END_MS - 1), None, self.fault, name)
        self.call_later(FAULTS_END_MS, None, self.heal)

    def fault(self, name: str) -> None:
        self.trace("fault {}", name)
        running = [process for process in self.processes.values() if process.is_up]
        if not running:
            return
        victim = self.rng.choice(running)
        name, _, of_leader = name.partition("@")
        if of_leader:
            victim = self.pick_process() or victim
        getattr(self, f"fault_{name}")(victim)

    def fault_kill(self, victim: Process) -> None:
        self.kill(victim)

    def fault_power(self, victim: Process) -> None:
        self.kill(victim, power=True)

    def fault_power_all(self, victim: Process) -> None:
        for process in self.processes.values():
            self.kill(process, power=True)
        self.registry_loses_power()

    def registry_loses_power(self) -> None:
        """Do nothing, because the registry has synced each write."""

    def fault_wipe(self, victim: Process) -> None:
        """Replace the disk, unless no other member of the ISR and ELR would remain."""
        current_state = self.registry.parsed
        if current_state is None:
            return
        disks = {process.disk.name for process in self.processes.values()}
        remaining = {
            broker: member.disk for broker, member in current_state.isr.items()
        }
        remaining.update(current_state.elr)
        remaining.pop(victim.broker, None)
        if current_state.removing:
            return
        if any(disk in disks for disk in remaining.values()):
            self.kill(victim, wipe=True)

    def fault_pause(self, victim: Process) -> None:
        self.pause(victim, self.rng.randint(50, SESSION_MS - 20))

    def fault_long_pause(self, victim: Process) -> None:
        self.pause(victim, self.rng.randint(SESSION_MS, 3 * SESSION_MS))

    def pause(self, victim: Process, time_ms: int) -> None:
        # The events of a paused broker wait, so a pause must end with the faults.
        victim.paused_until_ms = min(self.now_ms + time_ms, FAULTS_END_MS)

    def cut_links(self, links: set[tuple[int, int]]) -> None:
        self.broken_links |= links
        self.call_later(
            self.rng.choice([100, 600, 1_400]),
            None,
            self.broken_links.difference_update,
            links,
        )

    def fault_cut(self, victim: Process) -> None:
        other = self.rng.choice(
            [broker for broker in self.processes if broker != victim.broker]
        )
        self.cut_links({(victim.broker, other), (other, victim.broker)})

    def fault_cut_one_way(self, victim: Process) -> None:
        nodes = [
            REGISTRY,
            *(broker for broker in self.processes if broker != victim.broker),
        ]
        link = (victim.broker, self.rng.choice(nodes))
        self.cut_links({link if self.rng.random() < 0.5 else (link[1], link[0])})

    def fault_cut_registry(self, victim: Process) -> None:
        self.cut_links({(victim.broker, REGISTRY), (REGISTRY, victim.broker)})

    def fault_lose_responses(self, victim: Process) -> None:
        """Lose the registry's responses to a broker. The calls are executed."""
        self.cut_links({(REGISTRY, victim.broker)})

    def fault_lossy_network(self, victim: Process) -> None:
        """Lose, delay and duplicate a third of the messages for a while."""
        self.loss = 0.3
        self.call_later(400, None, self.end_loss)

    def end_loss(self) -> None:
        self.loss = 0.0 if self.is_healed else self.options.loss

    def fault_move_leader(self, victim: Process) -> None:
        """Elect another member of the ISR although the leader is alive."""
        current_state = self.registry.parsed
        if current_state is None or victim.session is None:
            return
        live = self.registry.live()
        others = [
            member
            for member in electing.eligible_members(current_state, live)
            if member != current_state.leader
        ]
        if others and current_state.leader != NO_LEADER:
            new = electing.move_leader(current_state, self.rng.choice(others))
            self.write_state(victim, new, self.registry.version)

    def fault_reassign(self, victim: Process) -> None:
        """Move replicas to other brokers, or cancel the reassignment."""
        current_state = victim.state
        if current_state is None or victim.session is None:
            return
        target: tuple[int, ...] | None = tuple(
            self.rng.sample(sorted(self.processes), self.options.replicas)
        )
        if current_state.removing and self.rng.random() < 0.3:
            target = None
        changed = electing.reassign(current_state, target, set(self.processes))
        assert isinstance(changed, LeaderAndIsr)
        self.trace("broker {} reassigns to {}", victim.broker, target)
        self.write_state(victim, changed, victim.version)

    def fault_leave(self, victim: Process) -> None:
        """Shut down a broker cleanly: another broker becomes the leader first."""
        with contextlib.suppress(RegistryUnavailableError, SessionExpiredError):
            if victim.session is None or victim.epoch is None:
                return
            with self.call_registry(victim):
                victim.is_leaving = True
                self.registry.set_leaving(victim.session, victim.broker)
            self.notify_watches()
        self.call_later(400, victim, self.leave, victim)

    def leave(self, process: Process) -> None:
        process.disk.durable_end = process.disk.end
        process.disk.is_clean = True
        if process.session is not None:
            self.registry.sessions[process.session] = -1
        self.kill(process)

    def fault_delete_records(self, victim: Process) -> None:
        process = self.pick_process()
        if process is not None and process.leader is not None:
            start = self.rng.randint(process.disk.start, process.high_watermark)
            process.disk.delete_below(start)
            process.leader = process.leader._replace(log_start=process.disk.start)

    def heal(self) -> None:
        self.trace("all faults end")
        self.is_healed = True
        self.broken_links.clear()
        self.loss = 0.0
        for process in self.processes.values():
            if process.is_leaving:
                self.leave(process)
            if not process.is_up:
                self.restart(process)

    # -- checks ------------------------------------------------------------------------

    def set_high_watermark(self, process: Process, high_watermark: int) -> None:
        """Set the high watermark of a broker, and check the records below it."""
        before = process.high_watermark
        if high_watermark == before:
            return
        disk = process.disk
        require(
            high_watermark <= disk.end,
            "R03",
            "high watermark {} of broker {} is above its end {}",
            high_watermark,
            process.broker,
            disk.end,
        )
        process.high_watermark = high_watermark
        if self.may_lose_records:
            return
        require(
            high_watermark > before,
            "R03",
            "the high watermark of broker {} falls from {} to {}",
            process.broker,
            before,
            high_watermark,
        )
        leader = process.leader or process.follower
        assert leader is not None
        self.visible_epoch = max(self.visible_epoch, leader.state.leader_epoch)
        visible_records = self.visible_records
        for offset in range(max(before, disk.start), high_watermark):
            record = disk.records[offset]
            if offset == len(visible_records):
                visible_records.append(record)
                self.check_batch(offset, record)
            require(
                record == visible_records[offset],
                "R02",
                "broker {} shows {} at offset {}, and {} was visible there",
                process.broker,
                record,
                offset,
                visible_records[offset],
            )

    def check_batch(self, offset: int, record: Record) -> None:
        """Check R11, except for batches that were deleted before they were sent again."""
        batch = record.content
        if not isinstance(batch, Batch):
            return
        for process in self.processes.values():
            self.deleted_below = max(self.deleted_below, process.disk.start)
        before = self.visible_batches.setdefault(batch.name, offset)
        require(
            before == offset or before < self.deleted_below,
            "R11",
            "{} is stored at offset {} and again at offset {}",
            batch,
            before,
            offset,
        )

    def check_leader(self, process: Process, epoch: int) -> None:
        """Check the log of a new leader."""
        disk = process.disk
        visible_records = self.visible_records
        self.check_logs()
        if self.may_lose_records or epoch < self.visible_epoch:
            # A broker that was paused may begin an epoch that is already over.
            return
        require(
            disk.end >= self.acknowledged_end,
            "R01",
            "broker {} leads with end {}, and {} was acknowledged",
            process.broker,
            disk.end,
            self.acknowledged_end,
        )
        require(
            disk.end >= len(visible_records),
            "R02",
            "broker {} leads with end {}, and {} was visible",
            process.broker,
            disk.end,
            len(visible_records),
        )
        start = disk.start
        require(
            disk.records[start : len(visible_records)] == visible_records[start:],
            "R02",
            "broker {} leads with other records",
            process.broker,
        )

    def check_truncation(self, process: Process) -> None:
        if process.follower is not None and process.follower.state.is_recovering:
            return
        require(
            process.disk.end >= process.high_watermark,
            "R07",
            "broker {} truncated to {} below its high watermark {}",
            process.broker,
            process.disk.end,
            process.high_watermark,
        )

    def check_logs(self) -> None:
        disks = [process.disk for process in self.processes.values()]
        for number, disk in enumerate(disks):
            for other in disks[:number]:
                check_pair(disk, other)

    def is_done(self) -> bool:
        """Return whether the schedule is over. Check R09, R10 and R16."""
        if not self.is_healed:
            return False
        current_state = self.registry.parsed
        if current_state is None:
            require(self.now_ms < LEADER_BY_MS, "R09", "the partition has no state")
            return False
        if not current_state.isr and not current_state.elr:
            return True
        if self.is_acknowledged_since_heal:
            is_complete = not current_state.adding and not current_state.removing
            require(
                not is_complete or len(current_state.replicas) == self.options.replicas,
                "R16",
                "{} has another number of replicas after its reassignments",
                current_state,
            )
            if is_complete and current_state.isr.keys() == set(current_state.replicas):
                return self.is_equal()
            self.equal_by_ms = None
            if self.stopped_replicas:
                return True
            require(self.now_ms < IN_SYNC_BY_MS, "R10", "the ISR is {}", current_state)
        else:
            require(
                self.now_ms < LEADER_BY_MS or self.stopped_replicas > 0,
                "R09",
                "no leader accepts writes: {}",
                current_state,
            )
        return self.now_ms >= IN_SYNC_BY_MS

    def is_equal(self) -> bool:
        """Return whether all replicas are equal. Make the clients idle, and check R15."""
        self.is_idle = True
        if self.equal_by_ms is None:
            self.equal_by_ms = self.now_ms + EQUAL_WITHIN_MS
        current_state = self.registry.parsed
        assert current_state is not None
        disks = [self.processes[broker].disk for broker in current_state.replicas]
        # A follower may have deleted more records than another follower, if the leader
        # was killed between their fetches.
        start = max(disk.start for disk in disks)
        leader_start = 0
        if current_state.leader != NO_LEADER:
            leader_start = self.processes[current_state.leader].disk.start
        first = disks[0].records[start:]
        if self.stopped_replicas or all(
            disk.start >= leader_start and disk.records[start:] == first
            for disk in disks
        ):
            return True
        require(
            self.now_ms < self.equal_by_ms,
            "R15",
            "the replicas are idle and have (start, end) {}",
            [(disk.start, disk.end) for disk in disks],
        )
        return False


def check_pair(disk: Disk, other: Disk) -> None:
    """Check R05: logs with the same epoch at an offset are equal up to it."""
    end = min(disk.end, other.end)
    start = max(disk.start, other.start)
    first, second = disk.records[start:end], other.records[start:end]
    if first == second:
        return
    for offset in range(len(first) - 1, -1, -1):
        if first[offset].leader_epoch == second[offset].leader_epoch:
            require(
                first[: offset + 1] == second[: offset + 1],
                "R05",
                "{} and {} have epoch {} at offset {} and differ below it",
                disk.name,
                other.name,
                first[offset].leader_epoch,
                start + offset,
            )
            return


def run_schedule(seed: int, options: Options | None = None) -> World:
    """Run one schedule. If it fails, run it again to report its steps."""
    try:
        return World(seed, options).run()
    except InvariantBroken as error:
        steps: list[str] = []
        with contextlib.suppress(InvariantBroken):
            World(seed, options, steps).run()
        error.add_note(f"repeat with run_schedule({seed}, {options})")
        error.add_note("\n".join(steps))
        raise
