"""Transactions without a broker: a coordinator, its disk, partitions and producers, in
random order.

A record of `__transaction_state` waits until it is synced. A crash keeps a prefix of
the waiting records. Each marker of a transaction is written, refused, or lost in a crash,
independently of the other markers. Producers lose requests and responses, retry, and
stop for a long time, after which they are zombies. Time is simulated.

Invariants at any time:
    known       the coordinator's state of a transactional id equals its durable record
    alike       a request that ends a transaction gets the same result each time it is sent, or an error
and after all transactions had time to end:
    whole       the records of a transaction are all committed, or none is
    answered    the outcome of a transaction equals the outcome in the response to its client
    none hangs  no partition has an open transaction
"""

from __future__ import annotations

import inspect
import random
import sys
import types
from typing import Any

import attrs

from logcore.coordination import transactions
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
    TimedOut,
    TransactionError,
    TransactionReply,
    WriteMarkers,
)
from logcore.deadlines import Deadlines
from logcore.format.transaction_records import (
    Partition,
    read_transaction,
    read_transaction_key,
    transaction_key,
    transaction_value,
)

T0 = 1_700_000_000_000
TIMEOUT_MS = 60_000
PARTITIONS = [("t", 0), ("t", 1), ("u", 0)]


class InvariantViolated(AssertionError):
    """An invariant is violated."""


@attrs.define
class PartitionLog:
    """The rules of a log for data and markers (storage format sections 5.2 and 5.3)."""

    epochs: dict[int, int] = attrs.Factory(dict[int, int])
    open: dict[int, list[int]] = attrs.Factory(dict[int, list[int]])
    committed: set[int] = attrs.Factory(set[int])

    def write(self, producer_id: int, epoch: int, attempt: int) -> bool:
        if epoch < self.epochs.get(producer_id, -1):
            return False
        self.epochs[producer_id] = epoch
        self.open.setdefault(producer_id, []).append(attempt)
        return True

    def write_marker(self, producer_id: int, epoch: int, commit: bool) -> None:
        if epoch < self.epochs.get(producer_id, -1):
            return
        self.epochs[producer_id] = epoch
        ended = self.open.pop(producer_id, [])
        if commit:
            self.committed.update(ended)


@attrs.define(eq=False)
class Producer:
    """A client. `name` is its transactional id."""

    name: str
    version: int
    identity: ProducerIdAndEpoch | None = None
    #: The request that is sent again until it gets a response.
    request: Any = None
    #: The waiter of the last request that was sent, or -1 if no response is awaited.
    waiter: int = -1
    #: The number of the current transaction, or -1.
    attempt: int = -1
    added: frozenset[Partition] = frozenset()
    #: Copies of Produce requests that the network has delayed.
    late: list[tuple[ProducerIdAndEpoch, Partition, int]] = attrs.Factory(list)


def with_mistakes(*mistakes: tuple[str, str]) -> Any:
    """Return a copy of the coordinator's module in which some lines are replaced."""
    source = inspect.getsource(transactions)
    for old, new in mistakes:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    module = types.ModuleType("transactions_with_a_mistake")
    sys.modules[module.__name__] = module
    exec(compile(source, "<mistake>", "exec"), module.__dict__)
    return module


class TransactionSimulation:
    """The coordinator, its disk, its partitions and its producers.

    `module` contains the coordinator. With `marks_early`, markers are written before
    the prepare record is on disk.
    """

    def __init__(
        self, seed: int, module: Any = transactions, *, marks_early: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.module = module
        self.marks_early = marks_early
        self.now_ms = T0
        self.logs = {partition: PartitionLog() for partition in PARTITIONS}
        self.durable: dict[bytes, bytes | None] = {}
        self.next_id = 1_000
        self.attempts = 0
        #: For each transaction, the partitions in which its records were acknowledged.
        self.written: dict[int, set[Partition]] = {}
        #: The result of each request that ends a transaction.
        self.ends: dict[tuple[str, int, int, bool], ProducerIdAndEpoch] = {}
        #: For each transaction with a response to its end, whether it was a commit.
        self.outcomes: dict[int, bool] = {}
        self.producers = [
            Producer("ab"[n % 2], 2 if n % 3 == 0 else 1) for n in range(4)
        ]
        self.waiters = 0
        self.events = 0
        self.start()

    def start(self) -> None:
        self.coordinator = self.module.TransactionMachine()
        self.timers: Deadlines[str] = Deadlines()
        self.stores: list[StoreTransaction] = []
        self.markers: list[tuple[WriteMarkers, set[Partition]]] = []
        found = {}
        for key, value in self.durable.items():
            name = read_transaction_key(key)
            assert name is not None
            if value is not None:
                found[name] = read_transaction(value)
        self.act(self.coordinator.load(found, self.now_ms))

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case TransactionReply(waiter, result):
                    self.reply(waiter, result)
                case StoreTransaction():
                    self.stores.append(effect)
                    if (
                        self.marks_early
                        and effect.stored is not None
                        and effect.stored.status in (2, 3)
                    ):
                        for partition in effect.stored.partitions:
                            self.logs[partition].write_marker(
                                effect.stored.producer_id,
                                effect.stored.producer_epoch,
                                effect.stored.status == 2,
                            )
                case WriteMarkers():
                    self.markers.append((effect, set(effect.partitions)))
                case AllocateProducerId():
                    self.next_id += 1
                    self.act(
                        self.coordinator.producer_id_allocated(
                            effect, self.next_id, self.now_ms
                        )
                    )
                case SetTransactionTimer(name, at_ms):
                    self.timers.at(at_ms, name)
                case CancelTransactionTimer(name):
                    self.timers.cancel(name)
                case TimedOut():
                    pass

    # -- the disk

    def store(self, effect: StoreTransaction) -> None:
        key = transaction_key(effect.transactional_id)
        self.durable[key] = (
            None if effect.stored is None else transaction_value(effect.stored)
        )

    def sync(self) -> None:
        if self.stores:
            effect = self.stores.pop(0)
            self.store(effect)
            self.act(self.coordinator.stored(effect, self.now_ms))

    def write_marker(self) -> None:
        if not self.markers:
            return
        effect, left = self.rng.choice(self.markers)
        partition = self.rng.choice(sorted(left))
        left.discard(partition)
        self.logs[partition].write_marker(
            effect.producer_id, effect.producer_epoch, effect.commit
        )
        if not left:
            self.markers = [entry for entry in self.markers if entry[0] is not effect]
            self.act(self.coordinator.markers_written(effect, frozenset(), self.now_ms))

    def refuse_markers(self) -> None:
        if self.markers:
            effect, left = self.markers.pop(self.rng.randrange(len(self.markers)))
            self.act(
                self.coordinator.markers_written(effect, frozenset(left), self.now_ms)
            )

    def crash(self) -> None:
        for effect in self.stores[: self.rng.randint(0, len(self.stores))]:
            self.store(effect)
        for effect, left in self.markers:
            for partition in sorted(left):
                if self.rng.random() < 0.3:
                    self.logs[partition].write_marker(
                        effect.producer_id, effect.producer_epoch, effect.commit
                    )
        for producer in self.producers:
            producer.waiter = -1
        self.start()

    def fail_sync(self) -> None:
        """Let a sync fail. The records that it covers may be stored or not."""
        if not self.stores:
            return
        effect = self.stores[0]
        if self.rng.random() < 0.5:
            self.store(effect)
        self.act(self.coordinator.stored(effect, self.now_ms, failed=True))
        if not self.coordinator.is_over:
            # The coordinator continues with the record, which a crash may lose.
            self.stores.remove(effect)
            self.check_state()
            for _ in range(12):
                self.step(self.rng.choice(self.producers))
            self.crash()
            return
        self.markers = []  # they belong to the earlier run of the coordinator
        for producer in self.producers:
            producer.waiter = -1
        self.start()

    # -- producers

    def reply(self, waiter: Any, result: Any) -> None:
        for producer in self.producers:
            if producer.waiter == waiter:
                producer.waiter = -1
                self.check_result(producer.request, result)
                # Otherwise the response is lost, and the client repeats the request.
                if self.rng.random() < 0.9:
                    self.handle_response(producer, result)

    def check_result(self, request: Any, result: Any) -> None:
        if isinstance(request, End) and isinstance(result, ProducerIdAndEpoch):
            end = (
                request.transactional_id,
                request.producer_id,
                request.producer_epoch,
                request.commit,
            )
            earlier = self.ends.setdefault(end, result)
            if earlier != result:
                raise InvariantViolated(
                    f"the response to {end} is {result}, and was {earlier}"
                )

    def handle_response(self, producer: Producer, result: Any) -> None:
        request = producer.request
        if result in (
            TransactionError.CONCURRENT_TRANSACTIONS,
            TransactionError.COORDINATOR_NOT_AVAILABLE,
        ):
            return
        producer.request = None
        if isinstance(result, TransactionError):
            # A fatal error ends a client. Another client with the same id begins.
            producer.identity = None
            producer.attempt = -1
            return
        match request:
            case Initialize():
                producer.identity = result
                producer.attempt = -1
            case AddPartitions():
                producer.added |= request.partitions
            case End():
                self.outcomes[producer.attempt] = request.commit
                producer.attempt = -1
                if producer.version == 2:
                    producer.identity = result

    def send(self, producer: Producer, request: Any) -> None:
        producer.request = request
        if self.rng.random() < 0.05:
            return  # the network loses the request
        self.waiters += 1
        producer.waiter = self.waiters
        self.act(self.coordinator.handle(request, self.waiters, self.now_ms))

    def step(self, producer: Producer, *, may_begin: bool = True) -> None:
        if producer.waiter != -1:
            if self.rng.random() < 0.05:
                producer.waiter = -1  # the request timeout is over
            return
        if producer.request is not None:
            if isinstance(producer.request, End) and self.rng.random() < 0.2:
                producer.request = attrs.evolve(
                    producer.request, commit=not producer.request.commit
                )
            self.send(producer, producer.request)
            return
        name = producer.name
        if producer.identity is None:
            if may_begin:
                self.send(
                    producer, Initialize(transactional_id=name, timeout_ms=TIMEOUT_MS)
                )
            return
        producer_fields: dict[str, Any] = {
            "transactional_id": name,
            "producer_id": producer.identity.producer_id,
            "producer_epoch": producer.identity.producer_epoch,
            "client_version": 2 if producer.version == 2 else 0,
        }
        if producer.attempt < 0:
            if may_begin:
                self.attempts += 1
                producer.attempt = self.attempts
                producer.added = frozenset()
                self.written[producer.attempt] = set()
            return
        kind = self.rng.random()
        if kind < 0.3 or not producer.added:
            chosen = frozenset(self.rng.sample(PARTITIONS, self.rng.randint(1, 2)))
            self.send(producer, AddPartitions(partitions=chosen, **producer_fields))
        elif kind < 0.7:
            partition = self.rng.choice(sorted(producer.added))
            self.write(producer, producer.identity, partition, producer.attempt)
            if producer.version == 2 and self.rng.random() < 0.5:
                producer.late.append((producer.identity, partition, producer.attempt))
        elif kind < 0.95:
            self.send(producer, End(commit=self.rng.random() < 0.7, **producer_fields))

    def write(
        self,
        producer: Producer,
        identity: ProducerIdAndEpoch,
        partition: Partition,
        attempt: int,
    ) -> None:
        """Check and store a Produce request in one step."""
        error = self.coordinator.verify(
            producer.name, identity.producer_id, identity.producer_epoch, partition
        )
        if error is None and self.logs[partition].write(
            identity.producer_id, identity.producer_epoch, attempt
        ):
            self.written[attempt].add(partition)

    def deliver_late(self) -> None:
        """Deliver a copy of a Produce request of an earlier transaction that the
        network has delayed.
        """
        for producer in self.producers:
            if producer.late:
                identity, partition, attempt = producer.late.pop(0)
                if attempt != producer.attempt:
                    self.write(producer, identity, partition, attempt)

    # -- a run

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        for name in self.timers.due(self.now_ms):
            self.act(self.coordinator.timed_out(name, self.now_ms))

    def run(self, events: int) -> None:
        rare = [self.crash, self.fail_sync, self.refuse_markers]
        for _ in range(events):
            self.events += 1
            kind = self.rng.random()
            if kind < 0.5:
                self.step(self.rng.choice(self.producers))
            elif kind < 0.7:
                self.sync()
            elif kind < 0.9:
                self.write_marker()
            elif kind < 0.94:
                self.deliver_late()
            elif kind < 0.97:
                self.pass_time(self.rng.choice([10, 500, 5_000, 30_000, 60_000]))
            else:
                self.rng.choice(rare)()
            self.check_state()
        self.finish()

    def check_state(self) -> None:
        for key, value in self.durable.items():
            name = read_transaction_key(key)
            assert name is not None
            stored = None
            if value is not None:
                stored = read_transaction(value)
            if self.coordinator.get(name) != stored:
                raise InvariantViolated(
                    f"the state of {name} is {self.coordinator.get(name)}, and stored is {stored}"
                )

    def finish(self) -> None:
        """Finish the open requests, let all transactions time out, and check the
        invariants.
        """
        for _ in range(400):
            for producer in self.producers:
                self.step(
                    producer, may_begin=False
                ) if producer.request is not None else None
            for _ in range(4):
                self.sync()
                self.write_marker()
            self.pass_time(1_000)
        for partition, log in self.logs.items():
            if any(log.open.values()):
                raise InvariantViolated(
                    f"an open transaction in {partition}: {log.open}"
                )
        for attempt, partitions in self.written.items():
            committed = {
                partition
                for partition in partitions
                if attempt in self.logs[partition].committed
            }
            if committed and committed != partitions:
                raise InvariantViolated(
                    f"attempt {attempt} is committed in {committed} of {partitions}"
                )
            outcome = self.outcomes.get(attempt)
            if partitions and outcome is not None and bool(committed) != outcome:
                raise InvariantViolated(
                    f"attempt {attempt} got the response {outcome}, and is committed in {committed}"
                )
