"""Transactions over two replicated partitions on three simulated brokers.

The log of the coordinator and the two partitions with data are three Worlds of
replica_world, with one clock and one network. A broker fails in all three at once. The
worlds call the code of the brokers:
- logcore.coordination.transactions: the coordinator;
- netshim.cluster.transaction_shards: the distribution of markers to leaders, and the
  verification that a producer may write;
- logcore.partition.producers: sequences, epochs and markers of a partition.

The worlds simulate the environment of this code: records of the coordinator that are
stored once they are committed, messages, timers, and clients that send their requests
again.

    run_transactions(seed)             # raises InvariantBroken, with the seed and steps

In the model, a broker has one session for each partition; in a cluster, it has one for
all. So the model contains more schedules than a cluster.

Invariant, besides those of replica_world:
    R12  the batches of a transaction are committed in both partitions or in none, the
         response to its client agrees with that, and no transaction remains open
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs

from logcore.coordination.transaction_effects import (
    AddPartitions,
    AllocateProducerId,
    CancelTransactionTimer,
    Effect,
    End,
    Initialize,
    ProducerIdAndEpoch,
    SetTransactionTimer,
    StoreTransaction,
    TransactionError,
    TransactionReply,
    WriteMarkers,
)
from logcore.coordination.transactions import TransactionMachine
from logcore.errors import (
    CoordinatorFencedError,
    InvalidProducerEpochError,
    LogcoreError,
)
from logcore.format.transaction_records import (
    Partition,
    StoredTransaction,
    read_transaction,
    transaction_value,
)
from logcore.replication.leading import LeaderState
from netshim.cluster.transaction_shards import TransactionShard, TransactionShards
from netshim.topology import NO_NODE
from netshim.transactions import add_or_verify
from netshim.wire import codes
from support.replica_world import (
    FAULTS_END_MS,
    Batch,
    InvariantBroken,
    Marker,
    Options,
    Process,
    World,
    pop_event,
    require,
)

#: Short, so that the coordinator often aborts a transaction while its client writes.
TRANSACTION_TIMEOUT_MS = 900
ENDED_BY_MS = FAULTS_END_MS + 8_000
REQUEST_TIMEOUT_MS = 250
RELOAD_DELAY_MS = 100
FAULTS = (
    "kill", "kill@leader", "kill@leader", "power", "power@leader", "power_all", "pause",
    "pause@leader", "long_pause@leader", "cut", "cut_one_way", "cut_registry@leader",
    "lose_responses@leader", "move_leader", "move_leader", "move_leader", "leave@leader",
    "lossy_network",
)  # fmt: skip
#: Faults that affect a broker in one partition only.
_SINGLE_PARTITION_FAULTS = frozenset(
    ("move_leader", "cut", "cut_one_way", "cut_registry", "lose_responses")
)
_RETRIABLE = frozenset(
    (
        TransactionError.CONCURRENT_TRANSACTIONS,
        TransactionError.COORDINATOR_NOT_AVAILABLE,
        TransactionError.COORDINATOR_LOAD_IN_PROGRESS,
        TransactionError.NOT_COORDINATOR,
    )
)


@attrs.frozen
class StateRecord:
    """A record of `__transaction_state`."""

    transactional_id: str
    value: bytes | None


class PartitionWorld(World):
    """One of the three partitions. `name` is its topic and number."""

    def __init__(self, transaction_world: TransactionWorld, name: Partition) -> None:
        self.transaction_world = transaction_world
        self.name = name
        beside = next(iter(transaction_world.partition_worlds()), None)
        super().__init__(0, transaction_world.options, transaction_world.steps, beside)

    def trace(self, text: str, *values: object) -> None:
        if self.steps is not None:
            label = "{}-{}".format(*self.name)
            self.steps.append(f"{self.now_ms:5} ms  {label}: {text.format(*values)}")

    def evaluate(self, process: Process) -> None:
        before = process.leader
        super().evaluate(process)
        if before is not None and process.leader is None:
            self.resign(process)

    def resign(self, process: Process) -> None:
        raise NotImplementedError


# -- the coordinator -------------------------------------------------------------------


class CoordinatorMemory:
    """The state of the coordinator in a process that leads the state partition."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.machine: TransactionMachine | None = None
        self.effects: deque[Effect] = deque()
        self.is_executing = False
        #: The latest timer of each transactional id.
        self.timers: dict[str, object] = {}


class StatePartitionWorld(PartitionWorld):
    """The partition of `__transaction_state`, and its coordinators."""

    def memory_of(self, process: Process) -> CoordinatorMemory | None:
        found: CoordinatorMemory | None = vars(process).get("memory")
        return found

    def take_over(self, process: Process, key: tuple[int, int]) -> None:
        super().take_over(process, key)
        if process.leader is not None and self.memory_of(process) is None:
            memory = CoordinatorMemory(process.leader.state.leader_epoch)
            vars(process)["memory"] = memory
            self.load(process, memory)

    def set_leader_state(self, process: Process, leader: LeaderState) -> None:
        super().set_leader_state(process, leader)
        memory = self.memory_of(process)
        if memory is not None and memory.machine is None:
            self.load(process, memory)

    def resign(self, process: Process) -> None:
        memory = self.memory_of(process)
        vars(process)["memory"] = None
        if memory is not None and memory.machine is not None:
            memory.machine.end()

    def load(self, process: Process, memory: CoordinatorMemory) -> None:
        """Read the records once all of them are committed."""
        leader = process.leader
        if (
            leader is None
            or memory.machine is not None
            or self.memory_of(process) is not memory
            or process.high_watermark < leader.epoch_start
        ):
            return
        values: dict[str, bytes | None] = {}
        for record in process.disk.records:
            if record is not None and isinstance(record.content, StateRecord):
                values[record.content.transactional_id] = record.content.value
        found: dict[str, StoredTransaction] = {
            name: read_transaction(value)
            for name, value in values.items()
            if value is not None
        }
        self.trace("broker {} coordinates {}", process.broker, found)
        memory.machine = TransactionMachine()
        self.act(process, memory, memory.machine.load(found, self.now_ms))

    def handle_request(
        self, process: Process, request: Any, done: Callable[[Any], None]
    ) -> None:
        """Handle a request of a client or of a leader."""
        memory = self.memory_of(process)
        if memory is None or self.now_ms >= process.lease_until_ms:
            done(TransactionError.NOT_COORDINATOR)
        elif memory.machine is None:
            done(TransactionError.COORDINATOR_LOAD_IN_PROGRESS)
        else:
            self.act(process, memory, memory.machine.handle(request, done, self.now_ms))

    def act(
        self, process: Process, memory: CoordinatorMemory, effects: Iterable[Effect]
    ) -> None:
        """Execute effects in their order, also the effects of nested transitions."""
        memory.effects.extend(effects)
        if memory.is_executing:
            return
        memory.is_executing = True
        while memory.effects:
            self.execute(process, memory, memory.effects.popleft())
        memory.is_executing = False
        if memory.machine is not None and memory.machine.is_over:
            memory.machine = None
            self.call_later(RELOAD_DELAY_MS, process, self.load, process, memory)

    def execute(
        self, process: Process, memory: CoordinatorMemory, effect: Effect
    ) -> None:
        machine = memory.machine
        assert machine is not None
        match effect:
            case TransactionReply(waiter, result):
                assert callable(waiter)
                waiter(result)
            case StoreTransaction():
                self.store(process, memory, effect)
            case WriteMarkers():
                self.write_markers(process, memory, effect)
            case AllocateProducerId():
                self.transaction_world.last_producer_id += 1
                self.act(
                    process,
                    memory,
                    machine.producer_id_allocated(
                        effect, self.transaction_world.last_producer_id, self.now_ms
                    ),
                )
            case SetTransactionTimer(name, at_ms):
                token = memory.timers[name] = object()
                delay_ms = max(0, at_ms - self.now_ms)
                self.call_later(
                    delay_ms, process, self.time_out, process, memory, name, token
                )
            case CancelTransactionTimer(name):
                memory.timers.pop(name, None)
            case _:
                pass

    def time_out(
        self, process: Process, memory: CoordinatorMemory, name: str, token: object
    ) -> None:
        if memory.timers.get(name) is token and memory.machine is not None:
            self.act(process, memory, memory.machine.timed_out(name, self.now_ms))

    def store(
        self, process: Process, memory: CoordinatorMemory, effect: StoreTransaction
    ) -> None:
        machine = memory.machine
        assert machine is not None
        if machine.is_over:
            return
        value = None if effect.stored is None else transaction_value(effect.stored)

        def done(*, failed: bool = False) -> None:
            if self.memory_of(process) is memory:
                self.act(
                    process, memory, machine.stored(effect, self.now_ms, failed=failed)
                )

        content = StateRecord(effect.transactional_id, value)
        self.trace("broker {} stores {}", process.broker, effect.stored)
        if not self.produce(process, acks_all=True, content=content, done=done):
            done(failed=True)

    def write_markers(
        self, process: Process, memory: CoordinatorMemory, effect: WriteMarkers
    ) -> None:
        # A shard without a broker, of which only the distribution of markers is used.
        shard: Any = object.__new__(TransactionShard)
        shard._epoch = memory.epoch
        shard._peers = SimulatedPeers(self, process)

        def marked(machine: TransactionMachine, left: frozenset[Partition]) -> None:
            if self.memory_of(process) is memory and memory.machine is machine:
                self.act(
                    process, memory, machine.markers_written(effect, left, self.now_ms)
                )

        assert memory.machine is not None
        ordered = attrs.evolve(effect, partitions=SortedPartitions(effect.partitions))
        TransactionShard._write_markers(shard, memory.machine, ordered, marked)

    def on_verification(
        self, process: Process, question: Any, reply: Callable[[int, Any], None]
    ) -> None:
        """Handle the request of a leader to verify that a producer may write."""
        service: Any = SimpleNamespace(
            request=lambda request, _, done: self.handle_request(process, request, done)
        )
        add_or_verify(
            service,
            question.producer,
            question.partitions,
            self.now_ms,
            partial(reply, process.broker),
            adds=question.adds,
        )


class SortedPartitions(frozenset[Partition]):
    """A set that is iterated in sorted order. The order of a plain set differs between
    processes, so a schedule would not repeat exactly.
    """

    def __iter__(self) -> Iterator[Partition]:
        return iter(sorted(super().__iter__()))


class SimulatedPeers:
    """The part of TransactionPeers that sends requests of one process to brokers."""

    #: No broker has this id, so a broker sends messages also to itself.
    own_node_id = 0

    def __init__(self, world: PartitionWorld, process: Process) -> None:
        self.world = world
        self.process = process

    def leader_of(self, partition: Partition) -> int:
        """Return the leader in the view of this broker."""
        world = self.world.transaction_world.world_of(partition)
        found = world.processes[self.process.broker].state
        return NO_NODE if found is None else found.leader

    def call(
        self,
        target_world: PartitionWorld,
        target: int,
        handler: Callable[..., None],
        message: Any,
        done: Callable[[Any], None],
    ) -> None:
        """Send a request, and call done() with the response or with a LogcoreError.

        After a timeout, the request does not arrive any more, as after
        SourceConnection.close().
        """
        world, process = self.world, self.process
        is_answered = False

        def finish(found: Any) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                done(found)

        def arrived(receiver: Process, found: Any) -> None:
            if receiver is process:
                finish(found)

        def reply(source: int, found: Any) -> None:
            world.send(source, process.broker, arrived, found)

        target_world.send(
            process.broker,
            target,
            handler,
            message,
            reply,
            is_open=lambda: not is_answered,
        )
        world.call_later(
            REQUEST_TIMEOUT_MS, process, finish, LogcoreError("no response")
        )

    def request(self, broker: int, question: Any, done: Callable[[Any], None]) -> None:
        state_partition = self.world.transaction_world.state_partition
        self.call(
            state_partition, broker, state_partition.on_verification, question, done
        )

    def send_markers(
        self, broker: int, markers: Any, done: Callable[[Any], None]
    ) -> None:
        waits_for = set(markers.partitions)
        found_codes: dict[Partition, int] = {}

        def answered(partition: Partition, found: Any) -> None:
            waits_for.discard(partition)
            if not isinstance(found, LogcoreError):
                found_codes[partition] = found
            if not waits_for:
                done(found_codes)

        for partition in sorted(markers.partitions):
            world = self.world.transaction_world.world_of(partition)
            assert isinstance(world, DataWorld)
            self.call(
                world, broker, world.on_marker, markers, partial(answered, partition)
            )


# -- partitions with data --------------------------------------------------------------


class DataWorld(PartitionWorld):
    """A partition that transactions write to."""

    def verifier_of(self, process: Process) -> TransactionShards:
        """Return the TransactionShards with which this process verifies producers."""
        found: TransactionShards | None = vars(process).get("verifier")
        if found is None:
            state: Any = SimpleNamespace(
                leadership=SimpleNamespace(
                    is_leader=lambda key: process.leader is not None
                ),
                logs=SimpleNamespace(numbers_of=lambda topic: range(1)),
                now_ms=0,
            )
            unused: Any = None
            found = TransactionShards(state, unused, unused, unused)
            peers: Any = SimulatedPeers(self, process)
            found.peers = peers
            vars(process)["verifier"] = found
        return found

    def resign(self, process: Process) -> None:
        self.verifier_of(process).resign(self.name)

    def write(
        self,
        process: Process,
        transactional_id: str,
        batches: tuple[Batch, ...],
        adds: bool,
        acknowledge: Callable[[Batch], None],
    ) -> None:
        """Handle the Produce requests of one connection, in their order."""
        if not batches or process.leader is None:
            return
        batch = batches[0]
        producer = (transactional_id, batch.producer_id, batch.epoch)
        verifier = self.verifier_of(process)

        def prepared(errors: Mapping[Partition, TransactionError]) -> None:
            if errors:
                return
            accepted = verifier.verified(
                producer,
                self.name,
                lambda: self.produce_batch(process, batch, partial(acknowledge, batch)),
            )
            if accepted is True:
                self.write(process, transactional_id, batches[1:], adds, acknowledge)

        if verifier.is_prepared(producer, [self.name], adds=adds):
            prepared({})
        else:
            verifier.prepare(producer, [self.name], self.now_ms, prepared, adds=adds)

    def on_marker(
        self, process: Process, markers: Any, reply: Callable[[int, int], None]
    ) -> None:
        effect, coordinator_epoch = markers.effect, markers.coordinator_epoch
        answer = partial(reply, process.broker)
        if process.leader is None:
            answer(codes.NOT_LEADER_OR_FOLLOWER)
            return
        self.verifier_of(process).marker_follows(effect.producer_id, self.name)
        marker = Marker(
            effect.producer_id, effect.producer_epoch, effect.commit, coordinator_epoch
        )
        try:
            process.disk.producers.check_marker(
                marker.producer_id, marker.epoch, coordinator_epoch
            )
        except InvalidProducerEpochError:
            answer(codes.INVALID_PRODUCER_EPOCH)
            return
        except CoordinatorFencedError:
            answer(codes.TRANSACTION_COORDINATOR_FENCED)
            return
        done = partial(answer, codes.NONE)
        if not self.produce(process, acks_all=True, content=marker, done=done):
            answer(codes.NOT_ENOUGH_REPLICAS)


# -- clients ---------------------------------------------------------------------------


class TransactionalClient:
    """A producer with transactions. With version 2, the epoch rises with each end."""

    def __init__(self, world: TransactionWorld, name: str, version: int) -> None:
        self.world = world
        self.name = name
        self.version = version
        self.identity: ProducerIdAndEpoch | None = None
        self.sequences: dict[Partition, int] = {}
        #: The number of the current transaction.
        self.attempt: int | None = None
        #: True if the coordinator has added the partitions to the transaction.
        self.is_added = False
        self.unacknowledged: dict[Partition, list[Batch]] = {}
        #: The request that is sent again until it gets a response.
        self.request: Initialize | AddPartitions | End | None = None
        #: The number of requests sent so far. Responses to earlier requests are ignored.
        self.tries = 0
        self.is_waiting = False
        #: True if the client has given up batches, which may be stored or not.
        self.has_given_up = False
        self.resumes_ms = 0

    @property
    def is_idle(self) -> bool:
        return self.request is None and self.attempt is None

    def step(self) -> None:
        world = self.world
        world.call_later(5 + int(world.rng.random() * 25), self.step)
        if world.now_ms < self.resumes_ms:
            return
        if self.request is None:
            self.decide()
        if self.request is not None and not self.is_waiting:
            self.send()

    def decide(self) -> None:
        """Choose the next request to the coordinator, or send batches."""
        rng = self.world.rng
        if self.identity is None:
            if not self.world.is_healed or self.attempt is not None:
                self.request = Initialize(
                    transactional_id=self.name, timeout_ms=TRANSACTION_TIMEOUT_MS
                )
        elif self.attempt is None:
            if not self.world.is_healed:
                self.begin()
        elif self.version == 1 and not self.is_added:
            self.request = AddPartitions(
                partitions=frozenset(self.unacknowledged), **self.producer_fields()
            )
        elif any(self.unacknowledged.values()):
            if rng.random() < 0.04:
                # The delivery timeout of the batches is over.
                self.has_given_up = True
                self.request = End(commit=False, **self.producer_fields())
            else:
                self.write()
        else:
            self.request = End(commit=rng.random() < 0.8, **self.producer_fields())

    def producer_fields(self) -> dict[str, Any]:
        assert self.identity is not None
        return {
            "transactional_id": self.name,
            "producer_id": self.identity.producer_id,
            "producer_epoch": self.identity.producer_epoch,
            "client_version": self.version,
        }

    def begin(self) -> None:
        world = self.world
        assert self.identity is not None
        world.attempts += 1
        self.attempt = world.attempts
        self.is_added = False
        self.unacknowledged = {}
        chosen = world.data if world.rng.random() < 0.8 else [world.data[0]]
        for data in chosen:
            batches = []
            for index in range(world.rng.randint(1, 2)):
                sequence = self.sequences.get(data.name, 0)
                self.sequences[data.name] = sequence + 1
                batches.append(
                    Batch(
                        self.identity.producer_id,
                        self.identity.producer_epoch,
                        sequence,
                        (self.attempt, data.name, index),
                        is_transactional=True,
                    )
                )
            self.unacknowledged[data.name] = batches

    def write(self) -> None:
        """Send the unacknowledged batches to the leaders."""
        rng = self.world.rng
        for partition, batches in self.unacknowledged.items():
            data = self.world.world_of(partition)
            assert isinstance(data, DataWorld)
            process = data.pick_process()
            if process is None or not batches:
                continue
            call = partial(
                data.write,
                process,
                self.name,
                tuple(batches),
                self.version == 2,
                self.acknowledge,
            )
            if rng.random() < 0.85:
                call()
            if rng.random() < 0.25:
                # Another connection, on which the requests arrive late.
                data.call_later(int(rng.random() * 900), process, call)

    def acknowledge(self, batch: Batch) -> None:
        if self.world.rng.random() < 0.2:
            return  # the response is lost
        for batches in self.unacknowledged.values():
            if batch in batches:
                batches.remove(batch)

    def send(self) -> None:
        """Send the request to the coordinator, with a timeout."""
        world = self.world
        process = world.state_partition.pick_process()
        if process is None:
            return
        self.tries += 1
        self.is_waiting = True
        answered = partial(self.answered, self.tries)
        world.call_later(150, answered, TransactionError.COORDINATOR_NOT_AVAILABLE)

        def reply(result: Any) -> None:
            if world.rng.random() >= 0.1:  # else the response is lost
                world.call_later(1 + int(world.rng.random() * 10), answered, result)

        assert self.request is not None
        world.state_partition.handle_request(process, self.request, reply)

    def answered(self, tried: int, result: Any) -> None:
        if tried != self.tries or not self.is_waiting:
            return
        self.is_waiting = False
        if result in _RETRIABLE:
            return
        request, self.request = self.request, None
        self.world.state_partition.trace(
            "client {}: the response to {} is {}", self.name, request, result
        )
        if isinstance(result, TransactionError):
            # A fatal error of the client. Another client takes its place.
            self.identity = None
            self.attempt = None
            self.resumes_ms = self.world.now_ms + self.world.rng.randint(50, 600)
            return
        match request:
            case Initialize():
                self.begin_identity(result)
                self.attempt = None
            case AddPartitions():
                self.is_added = True
            case End(commit=commit):
                assert self.attempt is not None
                self.world.outcomes[self.attempt] = commit
                self.attempt = None
                if self.version == 2:
                    self.begin_identity(result)
                elif self.has_given_up:
                    assert self.identity is not None
                    self.request = Initialize(
                        transactional_id=self.name,
                        timeout_ms=TRANSACTION_TIMEOUT_MS,
                        producer_id=self.identity.producer_id,
                        producer_epoch=self.identity.producer_epoch,
                    )

    def begin_identity(self, identity: ProducerIdAndEpoch) -> None:
        self.identity = identity
        self.sequences = {}
        self.has_given_up = False


# -- the world -------------------------------------------------------------------------


class TransactionWorld:
    """The three partitions, their clients and the checks of R12."""

    def __init__(
        self,
        seed: int,
        options: Options | None = None,
        steps: list[str] | None = None,
    ) -> None:
        self.options = options or Options(faults=FAULTS, fault_count=2 + seed % 8)
        self.steps = steps
        self._worlds: list[PartitionWorld] = []
        self.state_partition = StatePartitionWorld(self, ("__transaction_state", 0))
        self.rng = self.state_partition.rng
        self.rng.seed(seed)
        self._worlds.append(self.state_partition)
        self.data: list[DataWorld] = []
        for number in range(2):
            self.data.append(DataWorld(self, ("t", number)))
            self._worlds.append(self.data[-1])
        for world in self._worlds:
            world.has_sessions = bool(seed % 2)
        self.now_ms = 0
        self.is_healed = False
        self.last_producer_id = 100
        self.attempts = 0
        #: For each ended transaction, whether the response was that it is committed.
        self.outcomes: dict[int, bool] = {}
        self.clients = [
            TransactionalClient(self, "a", 1),
            TransactionalClient(self, "a", 2),
            TransactionalClient(self, "b", 1 + seed % 2),
        ]
        # The second client with the id fences the first one.
        self.clients[1].resumes_ms = self.rng.randint(500, 3_500)

    def partition_worlds(self) -> Iterator[PartitionWorld]:
        return iter(self._worlds)

    def world_of(self, partition: Partition) -> PartitionWorld:
        return next(world for world in self._worlds if world.name == partition)

    def call_later(self, delay_ms: int, call: Callable[..., None], *args: Any) -> None:
        self.state_partition.call_later(delay_ms, None, call, *args)

    def run(self) -> TransactionWorld:
        self.schedule_events()
        events = self.state_partition.events
        try:
            while not self.is_done():
                self.now_ms, call, args = pop_event(events)
                for world in self._worlds:
                    world.now_ms = self.now_ms
                if call is not None:
                    call(*args)
        except InvariantBroken:
            raise
        except Exception as error:
            raise InvariantBroken("error", f"{error!r} at {self.now_ms} ms") from error
        self.check()
        return self

    def schedule_events(self) -> None:
        rng = self.rng
        for client in self.clients:
            self.call_later(150, client.step)
        at_ms = 0
        for _ in range(self.options.fault_count):
            if at_ms and rng.random() < 0.4:
                at_ms += rng.randint(1, 120)
            else:
                at_ms = rng.randint(250, FAULTS_END_MS - 200)
            name = rng.choice(self.options.faults)
            self.call_later(min(at_ms, FAULTS_END_MS - 1), self.fault, name)
        self.call_later(FAULTS_END_MS, self.heal)

    def fault(self, name: str) -> None:
        name, _, of_leader = name.partition("@")
        chosen = self.rng.choice(self._worlds)
        victim = self.rng.choice(list(chosen.processes.values()))
        if of_leader:
            victim = chosen.pick_process() or victim
        chosen.trace("fault {} of broker {}", name, victim.broker)
        for world in [chosen] if name in _SINGLE_PARTITION_FAULTS else self._worlds:
            process = world.processes[victim.broker]
            if process.is_up:
                getattr(world, f"fault_{name}")(process)

    def heal(self) -> None:
        self.is_healed = True
        for world in self._worlds:
            world.heal()

    def is_done(self) -> bool:
        if not self.is_healed or not all(client.is_idle for client in self.clients):
            require(
                self.now_ms < ENDED_BY_MS,
                "R12",
                "a client does not end its transaction",
            )
            return False
        if not any(open_in(data) for data in self.data):
            return True
        require(
            self.now_ms < ENDED_BY_MS,
            "R12",
            "transactions remain open: {}",
            [open_in(data) for data in self.data],
        )
        return False

    def check(self) -> None:
        """Check R12 with the records below the high watermarks."""
        found: dict[int, set[bool]] = {}
        for data in self.data:
            for batch, commit in ended_in(data):
                attempt, _, _ = batch.name
                found.setdefault(attempt, set()).add(commit)
        for attempt, outcomes in found.items():
            require(
                len(outcomes) == 1,
                "R12",
                "a part of transaction {} is committed",
                attempt,
            )
            answer = self.outcomes.get(attempt)
            require(
                answer is None or outcomes == {answer},
                "R12",
                "transaction {} was answered with commit={} and ended with {}",
                attempt,
                answer,
                outcomes,
            )
        committed = {attempt for attempt, answer in self.outcomes.items() if answer}
        require(
            committed <= found.keys(),
            "R12",
            "transactions {} were committed and have no records",
            committed - found.keys(),
        )


def open_in(data: DataWorld) -> set[int]:
    """Return the producers with an open transaction below the high watermark."""
    found: set[int] = set()
    for record in data.visible_records:
        match record.content:
            case Batch(producer_id=producer_id):
                found.add(producer_id)
            case Marker(producer_id=producer_id):
                found.discard(producer_id)
            case _:
                pass
    return found


def ended_in(data: DataWorld) -> Iterator[tuple[Any, bool]]:
    """Yield each batch of an ended transaction, and whether it was committed."""
    batches: dict[int, list[Batch]] = {}
    for record in data.visible_records:
        match record.content:
            case Batch() as batch:
                batches.setdefault(batch.producer_id, []).append(batch)
            case Marker(producer_id, _, commit, _):
                for batch in batches.pop(producer_id, []):
                    yield batch, commit
            case _:
                pass


def run_transactions(seed: int, options: Options | None = None) -> TransactionWorld:
    """Run one schedule. If it fails, run it again to report its steps."""
    try:
        return TransactionWorld(seed, options).run()
    except InvariantBroken as error:
        steps: list[str] = []
        with contextlib.suppress(InvariantBroken):
            TransactionWorld(seed, options, steps).run()
        error.add_note(f"repeat with run_transactions({seed}, {options})")
        error.add_note("\n".join(steps))
        raise
