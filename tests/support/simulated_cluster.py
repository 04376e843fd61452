"""A whole cluster in a simulation: three brokers, their clients, and faults.

    run_schedule(seed)             # raises InvariantBroken, with the seed

Clients produce with acks=all, with and without transactions, read, commit offsets and
read them. While the clients run, brokers are killed, paused and stopped, lose their
power alone or together with the registry, and get empty disks. Links are cut, leaders
elected, replicas moved, and topics deleted and created again. Then all faults end, and
the cluster must recover. The brokers are in simulated_brokers.py.

The seed determines the whole schedule, so it repeats exactly.

Invariants (the numbers are those of docs/replication.md):
    R00  brokers do not end without a fault, and log no internal error
    R01  a record that was acknowledged with acks=all remains at its offset
    R02  an offset that a consumer has read has one value
    R09  after the faults each partition has a leader and accepts writes
    R10  after the faults all replicas are in the ISR
    R11  a batch that an idempotent producer sends again is stored once
    R12  the records of a transaction are visible in all of its partitions or in none, the
         response to its client agrees with that, and no transaction remains open
    R13  a read of the committed offset returns at least every offset that was
         acknowledged or read before the read began
    R14  a topic that was created again has no record of the former one
    R15  the logs of all replicas are equal
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import random
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final
from unittest import mock

from logcore import recordbatch
from logcore.errors import RemoteUnavailableError
from logcore.testing import SimulatedDisk
from logcore.testing.faults import Fault, FaultPlan
from netshim import wire
from netshim.cluster import broker_connections, node, replicas
from netshim.cluster.fetcher import FollowedPartition
from netshim.wire import codes
from support.replica_world import InvariantBroken, require
from support.simulated_brokers import (
    BROKERS,
    BrokerInstance,
    SimulatedBroker,
    SimulatedConnection,
    SimulatedNetwork,
)
from support.simulated_threads import SimulatedThreads, SimulationStuck

#: The topic of producers and consumers. It may be deleted and created again.
TOPIC: Final = "t"
#: The topic of transactions and of committed offsets, which are deleted with it.
PERMANENT_TOPIC: Final = "kept"
GROUP: Final = "g"
#: The number of partitions with which each topic is created.
PARTITIONS: Final = 2
MAX_PARTITIONS: Final = 4
ALL_PARTITIONS: Final = tuple(
    itertools.product((TOPIC, PERMANENT_TOPIC), range(PARTITIONS))
)
#: All clients have this number in the network. Brokers have numbers from 1 on.
CLIENTS: Final = 0
#: Time of the faults, and the limit for the recovery afterwards.
FAULTS_MS: Final = 12_000
RECOVERY_MS: Final = 20_000
_REQUEST_MS: Final = 2_000
#: Codes after which the end of a transaction is requested again.
_RETRIED_BY_TRANSACTIONS: Final = (
    codes.COORDINATOR_LOAD_IN_PROGRESS,
    codes.COORDINATOR_NOT_AVAILABLE,
    codes.NOT_COORDINATOR,
    codes.CONCURRENT_TRANSACTIONS,
)


class World:
    """A cluster, and the values that its clients have stored or read. See the top of this module."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self.threads = threads
        self.rng: random.Random = threads.rng
        #: The probability that a report of a watch is lost.
        self.report_loss = 0.02
        self.registry_disk = SimulatedDisk({"/registry": None})
        self.network = SimulatedNetwork(self)
        self.brokers = {number: SimulatedBroker(self, number) for number in BROKERS}
        self.violations: list[str] = []
        threads.on_time = self._advance
        #: Values by topic id and partition, and by offset: acknowledged or read.
        self.stored_values: dict[tuple[bytes, int], dict[int, bytes]] = {}
        #: The greatest committed offset that a client has seen.
        self.committed = -1
        self.is_over = False
        self.acknowledged = 0
        self.reads = 0
        self.offset_reads = 0
        #: Values of transactions: True if committed, False if aborted, None if unknown.
        self.transactions: dict[bytes, bool | None] = {}
        #: The partitions of transactions whose commit was requested.
        self.transaction_partitions: dict[bytes, frozenset[int]] = {}
        self.ended_transactions = 0
        #: Values that idempotent producers have sent, which may be stored once only.
        self.idempotent_values: set[bytes] = set()
        self.steps: list[str] = []

    def _advance(self, passed_ms: int) -> None:
        for disk in (
            self.registry_disk,
            *(broker.disk for broker in self.brokers.values()),
        ):
            disk.advance(passed_ms)

    def report_violation(self, text: str) -> None:
        """Report an event that no broker may cause; it ends the schedule."""
        self.violations.append(text)

    def trace(self, text: str) -> None:
        """Add a line to the steps of this schedule."""
        self.steps.append(f"{self.threads.now_ms:6} ms  {text}")

    def explain(
        self, error: InvariantBroken, seed: int, faults: Sequence[str] | None
    ) -> None:
        """Add the seed and the steps to an error."""
        error.add_note(f"repeat with run_schedule({seed}, {faults})")
        error.add_note("\n".join(self.steps))

    def report(self, operation: str, path: str) -> None:
        """Let all watches of the registry report an operation."""
        for instance in self.running_brokers():
            for watch in instance.files.watches:
                watch.report(operation, path)

    def check(self) -> None:
        """Raise the first error of a client or a broker."""
        for name, error in self.threads.errors:
            if isinstance(error, InvariantBroken):
                raise error
            raise InvariantBroken("R00", f"{name}: {error!r}") from error
        for violation in self.violations:
            raise InvariantBroken("R00", violation)

    def wait_until(
        self, condition: Callable[[], bool], rule: str, failure: str
    ) -> None:
        """Wait until a condition holds."""
        limit_ms = self.threads.now_ms + RECOVERY_MS
        while not condition():
            self.check()
            require(self.threads.now_ms < limit_ms, rule, failure)
            self.threads.sleep_ms(50)
        self.check()

    def is_recovered(self) -> bool:
        """Return whether all brokers see all replicas in sync."""
        for instance in self.running_brokers():
            states = [state.state for state in instance.view.states.values()]
            if len(states) < 2 * PARTITIONS or not all(
                state.leader in BROKERS
                and {*state.replicas} == {*BROKERS} == {*state.isr}
                for state in states
            ):
                return False
        return True

    def log_ends(self) -> list[list[int]]:
        """Return the log ends of each broker."""
        return [
            [instance.logdir.partition(*key).log_end_offset for key in ALL_PARTITIONS]
            for instance in self.running_brokers()
        ]

    def running_brokers(self) -> list[BrokerInstance]:
        return [
            broker.instance
            for broker in self.brokers.values()
            if broker.instance is not None
        ]

    # -- stored values -------------------------------------------------------------------------

    def record_value(
        self, topic_id: bytes, partition: int, offset: int, value: bytes
    ) -> None:
        """Record that an offset has a value. It must never have another one."""
        values = self.stored_values.setdefault((topic_id, partition), {})
        known = values.setdefault(offset, value)
        require(
            known == value,
            "R02",
            "offset {} of partition {} is {} and {}",
            offset,
            partition,
            known,
            value,
        )


class Client:
    """A client of the cluster, with a connection to each broker."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.threads = world.threads
        self.rng = world.rng
        self._connections: dict[int, SimulatedConnection] = {}
        #: For each topic name, the ids that it has had, oldest first.
        self._topic_ids: dict[str, list[bytes]] = {}

    def ask(self, broker: int, api: Any, request: Any, max_version: int = 99) -> Any:
        """Send a request. Raises RemoteUnavailableError."""
        connection = self._connections.get(broker)
        if connection is None or connection.is_closed:
            connection = SimulatedConnection(self.world, CLIENTS, broker)
            self._connections[broker] = connection
        return connection.request(
            api, request, max_version=max_version, limit_ms=_REQUEST_MS
        )

    def ask_any(self, api: Any, request: Any) -> Any:
        return self.ask(self.rng.choice(BROKERS), api, request)

    def find_leader(self, partition: int, name: str = TOPIC) -> tuple[int, bytes]:
        """Return the leader of a partition and the id of the topic."""
        request_type = wire.METADATA.Request
        found = self.ask_any(
            wire.METADATA,
            request_type(
                topics=[request_type.Topic(name=name)], allow_auto_topic_creation=False
            ),
        )
        (topic,) = found.topics
        topic_id = bytes(topic.topic_id)
        # A broker that returns an id before the last one has stale metadata.
        ids = self._topic_ids.setdefault(name, [])
        if not any(topic_id) or topic_id in ids[:-1]:
            raise RemoteUnavailableError(f"the broker has no current topic {name}")
        if topic_id not in ids:
            ids.append(topic_id)
        for part in topic.partitions:
            if part.partition_index == partition and part.leader_id in BROKERS:
                return part.leader_id, topic_id
        raise RemoteUnavailableError(f"{name}-{partition} has no leader")

    def coordinator(self, key_type: int = 0, key: str = GROUP) -> int:
        """Return the coordinator of a group, or of a transactional id with type 1."""
        found = self.ask_any(
            wire.FIND_COORDINATOR,
            wire.FIND_COORDINATOR.Request(key_type=key_type, coordinator_keys=[key]),
        )
        (entry,) = found.coordinators
        if entry.error_code or entry.node_id not in BROKERS:
            raise RemoteUnavailableError(f"{key} has no coordinator")
        node: int = entry.node_id
        return node

    def create_topic(self, name: str, partitions: int) -> bool:
        """Create a topic, and return whether it was created."""
        request_type = wire.CREATE_TOPICS.Request
        topic = request_type.Topic(
            name=name, num_partitions=partitions, replication_factor=len(BROKERS)
        )
        found = self.ask_any(
            wire.CREATE_TOPICS, request_type(topics=[topic], timeout_ms=1_000)
        )
        return not found.topics[0].error_code


class RepeatingClient(Client, ABC):
    """A client that repeats a step."""

    @abstractmethod
    def step(self) -> None:
        """Do one step. Raises RemoteUnavailableError."""

    def run(self, pause_ms: int) -> None:
        """Repeat steps until the end of the simulation, with pauses."""
        while not self.world.is_over:
            with contextlib.suppress(RemoteUnavailableError):
                self.step()
            self.threads.sleep_ms(self.rng.randint(1, pause_ms))


class SimulatedProducer(RepeatingClient):
    """Sends records with acks=all, one batch at a time."""

    def __init__(self, world: World, partition: int, *, is_idempotent: bool) -> None:
        prefix = "idempotent" if is_idempotent else "plain"
        super().__init__(world, f"{prefix}-{partition}")
        self._partition = partition
        self._is_idempotent = is_idempotent
        self._topic_id = b""
        self._producer: tuple[int, int] | None = None
        self._sequence = 0
        self._sent = 0
        #: The values of the batch that is not acknowledged, and may be sent again.
        self._batch: list[bytes] = []
        self.acknowledged = 0

    def step(self) -> None:
        world = self.world
        if self._is_idempotent and self._producer is None:
            found = self.ask_any(
                wire.INIT_PRODUCER_ID,
                wire.INIT_PRODUCER_ID.Request(
                    transactional_id=None, transaction_timeout_ms=60_000
                ),
            )
            if found.error_code:
                return
            self._producer = found.producer_id, found.producer_epoch
        leader, topic_id = self.find_leader(self._partition)
        if topic_id != self._topic_id:
            # The state of producers is deleted with a topic.
            self._topic_id, self._sequence, self._batch = topic_id, 0, []
        if not self._batch or not self._is_idempotent:
            count = self.rng.randint(1, 3)
            self._batch = [
                b"%s-%d" % (self.name.encode(), self._sent + at) for at in range(count)
            ]
            self._sent += count
            if self._is_idempotent:
                world.idempotent_values |= {*self._batch}
        producer_id, epoch = self._producer or (-1, -1)
        records = recordbatch.encode(
            [(None, value) for value in self._batch],
            # The state of producers expires by the timestamps of their batches.
            now_ms=world.registry_disk.now_ms(),
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=self._sequence if self._is_idempotent else -1,
        )
        request_type = wire.PRODUCE.Request
        part = request_type.Topic.Partition(index=self._partition, records=records)
        response = self.ask(
            leader,
            wire.PRODUCE,
            request_type(
                acks=-1,
                timeout_ms=1_500,
                topic_data=[
                    request_type.Topic(topic_id=topic_id, partition_data=[part])
                ],
            ),
            max_version=13,
        )
        (partition_response,) = response.responses[0].partition_responses
        if partition_response.error_code in (0, codes.DUPLICATE_SEQUENCE_NUMBER):
            if partition_response.base_offset >= 0:
                for at, value in enumerate(self._batch):
                    world.record_value(
                        topic_id,
                        self._partition,
                        partition_response.base_offset + at,
                        value,
                    )
            world.acknowledged += len(self._batch)
            self.acknowledged += 1
            self._sequence += len(self._batch)
            self._batch = []
        elif partition_response.error_code in (
            codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
            codes.UNKNOWN_PRODUCER_ID,
        ):
            raise InvariantBroken(
                "R11",
                f"{self.name} is refused with code {partition_response.error_code} at sequence "
                f"{self._sequence}",
            )


class SimulatedConsumer(RepeatingClient):
    """Reads a partition again and again, from its leader."""

    def __init__(self, world: World, partition: int) -> None:
        super().__init__(world, f"consumer-{partition}")
        self._partition = partition
        self._topic_id = b""
        self._offset = 0

    def step(self) -> None:
        leader, topic_id = self.find_leader(self._partition)
        if topic_id != self._topic_id:
            self._topic_id, self._offset = topic_id, 0
        request_type = wire.FETCH.Request
        part = request_type.Topic.Partition(
            partition=self._partition,
            fetch_offset=self._offset,
            partition_max_bytes=1 << 20,
        )
        response = self.ask(
            leader,
            wire.FETCH,
            request_type(
                max_wait_ms=200,
                min_bytes=1,
                max_bytes=1 << 20,
                # From version 13 on, a request has the id of the topic, so a broker does
                # not read another topic of the same name.
                topics=[request_type.Topic(topic_id=topic_id, partitions=[part])],
            ),
            max_version=16,
        )
        if response.error_code:
            return
        (partition_response,) = response.responses[0].partitions
        require(
            partition_response.error_code != codes.OFFSET_OUT_OF_RANGE,
            "R02",
            "broker {} refuses offset {}, although a consumer has read up to it",
            leader,
            self._offset,
        )
        if partition_response.error_code:
            return
        for batch in recordbatch.read_batches(partition_response.records or b""):
            for record in batch.records():
                if record.offset >= self._offset:
                    value = bytes(record.value or b"")
                    self.world.record_value(
                        topic_id, self._partition, record.offset, value
                    )
                    self.world.reads += 1
                    self._offset = record.offset + 1
        if self.rng.random() < 0.1:
            self._offset = 0


class SimulatedCommitter(RepeatingClient):
    """Commits increasing offsets of a group."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "committer")
        self._offset = 0

    def step(self) -> None:
        broker = self.coordinator()
        self._offset += 1
        offset = self._offset
        request_type = wire.OFFSET_COMMIT.Request
        part = request_type.Topic.Partition(
            partition_index=0, committed_offset=offset, committed_metadata=""
        )
        response = self.ask(
            broker,
            wire.OFFSET_COMMIT,
            request_type(
                group_id=GROUP,
                generation_id_or_member_epoch=-1,
                member_id="",
                topics=[request_type.Topic(name=PERMANENT_TOPIC, partitions=[part])],
            ),
            max_version=8,
        )
        if not response.topics[0].partitions[0].error_code:
            self.world.committed = max(self.world.committed, offset)


class SimulatedOffsetReader(RepeatingClient):
    """Reads the committed offset of the group."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "offset reader")

    def step(self) -> None:
        broker = self.coordinator()
        floor = self.world.committed
        request_type = wire.OFFSET_FETCH.Request
        response = self.ask(
            broker,
            wire.OFFSET_FETCH,
            request_type(
                group_id=GROUP,
                topics=[
                    request_type.Topic(name=PERMANENT_TOPIC, partition_indexes=[0])
                ],
            ),
            max_version=7,
        )
        if response.error_code:
            return
        (part,) = response.topics[0].partitions
        if part.error_code:
            return
        require(
            part.committed_offset >= floor,
            "R13",
            "broker {} returns the committed offset {} after {}",
            broker,
            part.committed_offset,
            floor,
        )
        self.world.committed = max(self.world.committed, part.committed_offset)
        self.world.offset_reads += 1


class TransactionalProducer(RepeatingClient):
    """Commits and aborts transactions in both partitions of PERMANENT_TOPIC."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._producer: tuple[int, int] | None = None
        self._sequences = [0] * PARTITIONS
        self._count = 0
        #: The transaction whose end is not acknowledged, and whether it is a commit.
        self._ending: tuple[bytes, bool] | None = None
        #: From transaction version 2 on, the client adds no partitions, and the epoch
        #: changes with each end.
        self._version = self.rng.choice([1, 2])

    def step(self) -> None:
        try:
            if self._producer is None:
                self._begin()
            elif self._ending is None:
                self._write()
            else:
                self._end()
        except RemoteUnavailableError:
            # The next producer of the id ends the transaction.
            self._producer = self._ending = None
            raise

    def _begin(self) -> None:
        broker = self.coordinator(1, self.name)
        found = self.ask(
            broker,
            wire.INIT_PRODUCER_ID,
            wire.INIT_PRODUCER_ID.Request(
                transactional_id=self.name, transaction_timeout_ms=3_000
            ),
        )
        if not found.error_code:
            self._producer = found.producer_id, found.producer_epoch
            self._sequences = [0] * PARTITIONS

    def _write(self) -> None:
        value = b"%s-%d" % (self.name.encode(), self._count)
        self._count += 1
        self.world.transactions[value] = False  # until it is committed
        partitions = self.rng.choice([[0], [1], [0, 1], [0, 1]])
        is_written = self._version == 2 or self._add_partitions(partitions)
        for partition in partitions:
            is_written = is_written and self._produce(partition, value)
        commits = is_written and self.rng.random() < 0.7
        self._ending = value, commits
        if commits:
            # Unknown until the commit is acknowledged.
            self.world.transactions[value] = None
            self.world.transaction_partitions[value] = frozenset(partitions)

    def _add_partitions(self, partitions: list[int]) -> bool:
        assert self._producer is not None
        request_type = wire.ADD_PARTITIONS_TO_TXN.Request
        topic = request_type.Topic(name=PERMANENT_TOPIC, partitions=partitions)
        found = self.ask(
            self.coordinator(1, self.name),
            wire.ADD_PARTITIONS_TO_TXN,
            request_type(
                v3_and_below_transactional_id=self.name,
                v3_and_below_producer_id=self._producer[0],
                v3_and_below_producer_epoch=self._producer[1],
                v3_and_below_topics=[topic],
            ),
            max_version=3,
        )
        return not any(
            part.partition_error_code
            for topic in found.results_by_topic_v3_and_below
            for part in topic.results_by_partition
        )

    def _produce(self, partition: int, value: bytes) -> bool:
        assert self._producer is not None
        records = recordbatch.encode(
            [(None, value)],
            now_ms=self.world.registry_disk.now_ms(),
            transactional=True,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            base_sequence=self._sequences[partition],
        )
        leader, _ = self.find_leader(partition, PERMANENT_TOPIC)
        request_type = wire.PRODUCE.Request
        part = request_type.Topic.Partition(index=partition, records=records)
        response = self.ask(
            leader,
            wire.PRODUCE,
            request_type(
                transactional_id=self.name,
                acks=-1,
                timeout_ms=1_500,
                topic_data=[
                    request_type.Topic(name=PERMANENT_TOPIC, partition_data=[part])
                ],
            ),
            max_version=11 if self._version == 1 else 12,
        )
        (partition_response,) = response.responses[0].partition_responses
        if partition_response.error_code:
            return False
        self._sequences[partition] += 1
        return True

    def _end(self) -> None:
        assert self._producer is not None
        assert self._ending is not None
        value, commits = self._ending
        found = self.ask(
            self.coordinator(1, self.name),
            wire.END_TXN,
            wire.END_TXN.Request(
                transactional_id=self.name,
                producer_id=self._producer[0],
                producer_epoch=self._producer[1],
                committed=commits,
            ),
            max_version=4 if self._version == 1 else 5,
        )
        if found.error_code in _RETRIED_BY_TRANSACTIONS:
            return
        if found.error_code:
            self._producer = self._ending = None
            return
        self.world.transactions[value] = commits
        self.world.ended_transactions += 1
        self._ending = None
        if not commits:
            self._producer = None  # a batch without a response may be stored late
        elif self._version == 2:
            if found.producer_epoch != self._producer[1]:
                self._sequences = [0] * PARTITIONS
            self._producer = found.producer_id, found.producer_epoch


def run_schedule(seed: int, faults: Sequence[str] | None = None) -> World:
    """Run one schedule, and return its world.

    `faults` are names of methods of Faults. Without them, the seed chooses.

    Raises:
        InvariantBroken: with the seed and the steps of the schedule.
    """
    with SimulatedThreads(seed) as threads:
        world = World(threads)
        try:
            with _simulated_parts(world), _LoggedErrors(world):
                try:
                    _run(world, faults)
                finally:
                    for broker in world.brokers.values():
                        broker.kill()
        except SimulationStuck as error:
            broken = InvariantBroken("R00", str(error))
            world.explain(broken, seed, faults)
            raise broken from error
        except InvariantBroken as error:
            world.explain(error, seed, faults)
            raise
    return world


@contextlib.contextmanager
def _simulated_parts(world: World) -> Generator[None, None, None]:
    """Replace the connections, clocks and locks of brokers by simulated ones."""
    threads = world.threads

    def connect(host: str, port: int, settings: object) -> SimulatedConnection:
        assert threads.process is not None
        source, target = (
            int(name.removeprefix("broker-")) for name in (threads.process.name, host)
        )
        return SimulatedConnection(world, source, target)

    def followed(*arguments: Any) -> Any:
        # The default of the field is a lock of the operating system, which the
        # simulation does not control.
        return FollowedPartition(*arguments, mutex=threading.Lock())  # type: ignore[arg-type]

    class Clock:
        """Replaces the module `time`."""

        @staticmethod
        def monotonic() -> float:
            return threads.now_ms / 1_000

        @staticmethod
        def sleep(seconds: float) -> None:
            threads.sleep_ms(round(seconds * 1_000))

    with (
        mock.patch.object(broker_connections, "SourceConnection", connect),
        mock.patch.object(node, "time", Clock),
        mock.patch.object(replicas, "FollowedPartition", followed),
    ):
        yield


class _LoggedErrors(logging.Handler):
    """Reports a violation for each exception that a broker logs."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def __enter__(self) -> None:
        for name in ("netshim", "logcore"):
            logging.getLogger(name).addHandler(self)

    def __exit__(self, *_: object) -> None:
        for name in ("netshim", "logcore"):
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        process = self._world.threads.process
        if process is not None and process.is_killed:
            return  # its threads may find locks that other killed threads hold
        if record.exc_info is not None:
            text = "".join(traceback.format_exception(*record.exc_info))
            self._world.report_violation(f"{record.getMessage()}: {text}")
        else:
            self._world.trace(f"logged: {record.getMessage()}")


def _run(world: World, faults: Sequence[str] | None) -> None:
    threads = world.threads
    for broker in world.brokers.values():
        broker.start()
    admin = Client(world, "admin")
    world.wait_until(
        lambda: (
            len(world.running_brokers()) == len(BROKERS)
            and all(instance.is_listening for instance in world.running_brokers())
        ),
        "R09",
        "the brokers do not start",
    )
    assert admin.create_topic(TOPIC, PARTITIONS)
    assert admin.create_topic(PERMANENT_TOPIC, PARTITIONS)
    producers = [
        SimulatedProducer(world, partition, is_idempotent=is_idempotent)
        for partition in range(PARTITIONS)
        for is_idempotent in (False, True)
    ]
    clients = [
        *producers,
        *(SimulatedConsumer(world, partition) for partition in range(PARTITIONS)),
        *(TransactionalProducer(world, name) for name in ("tx1", "tx2")),
        SimulatedCommitter(world),
        SimulatedOffsetReader(world),
    ]
    running = [
        threads.spawn(lambda client=client: client.run(100), client.name, None)  # type: ignore[misc]
        for client in clients
    ]
    Faults(world, admin).run(faults)
    world.trace("the faults are over")
    world.wait_until(world.is_recovered, "R10", "not all replicas are in sync")
    before = [producer.acknowledged for producer in producers]
    world.wait_until(
        lambda: all(
            producer.acknowledged > count
            for producer, count in zip(producers, before, strict=True)
        ),
        "R09",
        "a partition accepts no writes",
    )
    world.is_over = True
    world.wait_until(
        lambda: all(thread.has_ended for thread in running),
        "R09",
        "a client gets no response",
    )
    _check_transactions(world)
    world.wait_until(
        lambda: len({*map(str, world.log_ends())}) == 1,
        "R15",
        "the ends of logs differ",
    )
    _compare_logs(world)
    world.check()


#: The methods of Faults. Those that occur twice are more frequent.
FAULTS: Final = (
    "kill",
    "kill",
    "cut_power",
    "cut_all_power",
    "pause",
    "pause",
    "cut_link",
    "cut_link",
    "elect_leaders",
    "move",
    "move_back",
    "pause_before_change",
    "wipe",
    "fail_disk",
    "add_partitions",
    "stop",
    "delete_topic",
)


class Faults:
    """Chooses faults, and ends them."""

    def __init__(self, world: World, admin: Client) -> None:
        self._world = world
        self._admin = admin
        self._can_wipe = True

    def run(self, names: Sequence[str] | None) -> None:
        """Cause faults with these names, or with names that the seed chooses."""
        world, threads, rng = self._world, self._world.threads, self._world.rng
        if names is None:
            names = rng.sample(FAULTS, rng.randint(3, len(FAULTS) - 2))
        end_ms = threads.now_ms + FAULTS_MS
        while threads.now_ms < end_ms:
            threads.sleep_ms(rng.choice([20, 200, 1_000, 2_000]))
            getattr(self, rng.choice(names))()
            self._restart_failed()
            world.check()
        self._heal()

    def _heal(self) -> None:
        world = self._world
        world.report_loss = 0
        world.network.heal()
        for broker in world.brokers.values():
            if broker.has_bad_disk:
                broker.kill()
            if broker.instance is not None:
                broker.instance.process.paused_until_ms = 0
            broker.start()
        # An earlier deletion of the topic may not have ended yet.
        world.wait_until(
            lambda: self._has_topic() and self._reassign(list(BROKERS)),
            "R09",
            "the topic cannot be created and moved to all brokers",
        )

    def _restart_failed(self) -> None:
        """Restart the brokers that have ended because a log failed."""
        for broker in self._world.brokers.values():
            if broker.instance is not None and broker.instance.has_failed:
                self._world.trace(f"broker {broker.number} has ended")
                broker.kill()
                self._restart_later(broker)

    def _restart_later(self, broker: SimulatedBroker) -> None:
        threads = self._world.threads
        delay_ms = self._world.rng.choice([10, 300, 1_200, 3_000])
        threads.at(threads.now_ms + delay_ms, broker.start)

    def _any_broker(self) -> SimulatedBroker:
        return self._world.brokers[self._world.rng.choice(BROKERS)]

    def kill(self) -> None:
        broker = self._any_broker()
        self._world.trace(f"broker {broker.number} is killed")
        broker.kill()
        self._restart_later(broker)

    def cut_power(self) -> None:
        broker = self._any_broker()
        broker.cut_power()
        self._world.trace(f"broker {broker.number} has no power: {broker.disk.history}")
        self._restart_later(broker)

    def cut_all_power(self) -> None:
        world = self._world
        world.trace("all brokers have no power")
        for broker in world.brokers.values():
            broker.cut_power()
            self._restart_later(broker)
        world.registry_disk = world.registry_disk.after_power_cut(world.rng)

    def wipe(self) -> None:
        if self._can_wipe:
            self._can_wipe = False
            broker = self._any_broker()
            self._world.trace(f"broker {broker.number} gets an empty disk")
            broker.wipe()
            self._restart_later(broker)

    def pause(self) -> None:
        broker = self._any_broker()
        duration_ms = self._world.rng.choice([200, 800, 1_500, 4_000])
        if broker.instance is not None:
            self._world.trace(f"broker {broker.number} is paused for {duration_ms} ms")
            broker.instance.process.paused_until_ms = (
                self._world.threads.now_ms + duration_ms
            )

    def pause_before_change(self) -> None:
        """Pause a broker between a proposal and the change of the registry."""
        instance = self._any_broker().instance
        if instance is not None:
            self._world.trace(
                f"broker {instance.number} is paused before its next proposal"
            )
            instance.files.pause_before_change_ms = self._world.rng.choice(
                [800, 1_500, 4_000]
            )

    def move_back(self) -> None:
        """Remove a replica from a partition, and assign it again at once."""
        world, partition = self._world, self._world.rng.randrange(PARTITIONS)
        self._world.trace(f"partition {partition} is moved and moved back")
        if not self._reassign(world.rng.sample(BROKERS, 2), partition):
            return
        limit_ms = world.threads.now_ms + 1_000

        def is_moved() -> bool:
            return any(
                len(stored.state.replicas) == 2
                for instance in world.running_brokers()
                if (stored := instance.view.states.get((TOPIC, partition)))
            )

        world.threads.wait(is_moved, limit_ms)
        self._reassign(list(BROKERS), partition)

    def cut_link(self) -> None:
        world = self._world
        first, second = world.rng.sample([*BROKERS, CLIENTS], 2)
        links = {(first, second)}
        if world.rng.random() < 0.5:
            links.add((second, first))
        world.trace(f"cut links: {sorted(links)}")
        world.network.cut_links |= links
        threads = world.threads
        threads.at(
            threads.now_ms + world.rng.choice([300, 1_500, 4_000]), world.network.heal
        )

    def stop(self) -> None:
        """Stop a broker as `netshim serve` does, and start it again."""
        broker = self._any_broker()
        instance = broker.instance
        if instance is not None and instance.is_listening:
            self._world.trace(f"broker {broker.number} stops")
            instance.stop()
            self._world.wait_until(
                lambda: instance.has_stopped, "R00", "a broker does not stop"
            )
            broker.kill()
            self._restart_later(broker)

    def delete_topic(self) -> None:
        request_type = wire.DELETE_TOPICS.Request
        self._world.trace("the topic is deleted")
        with contextlib.suppress(RemoteUnavailableError):
            self._admin.ask_any(
                wire.DELETE_TOPICS,
                request_type(topics=[request_type.Topic(name=TOPIC)], timeout_ms=1_000),
            )
            self._admin.create_topic(TOPIC, PARTITIONS)

    def _has_topic(self) -> bool:
        """Return whether the topic exists, and create it otherwise."""
        with contextlib.suppress(RemoteUnavailableError):
            self._admin.create_topic(TOPIC, PARTITIONS)
            self._admin.find_leader(0)
            return True
        return False

    def add_partitions(self) -> None:
        """Add partitions, which no client uses, to the topic."""
        count = self._world.rng.randint(PARTITIONS + 1, MAX_PARTITIONS)
        self._world.trace(f"the topic gets {count} partitions")
        request_type = wire.CREATE_PARTITIONS.Request
        topic = request_type.Topic(name=TOPIC, count=count, assignments=None)
        with contextlib.suppress(RemoteUnavailableError):
            self._admin.ask_any(
                wire.CREATE_PARTITIONS,
                request_type(topics=[topic], timeout_ms=1_000),
            )

    def fail_disk(self) -> None:
        """Let some writes or syncs of logs fail. The broker ends and is restarted."""
        broker, rng = self._any_broker(), self._world.rng
        fault = Fault(
            rng.choice(["pwrite", "fdatasync"]),
            rng.choice([errno.EIO, errno.ENOSPC]),
            path="*.log",
            at=rng.randint(1, 5),
            times=rng.choice([1, 3]),
        )
        self._world.trace(f"the disk of broker {broker.number} fails: {fault}")
        broker.fail_disk(FaultPlan(fault))

    def elect_leaders(self) -> None:
        request_type = wire.ELECT_LEADERS.Request
        with contextlib.suppress(RemoteUnavailableError):
            self._admin.ask_any(
                wire.ELECT_LEADERS,
                request_type(election_type=0, topic_partitions=None, timeout_ms=1_000),
            )

    def move(self) -> None:
        rng = self._world.rng
        replicas: list[int] | None = rng.sample(BROKERS, rng.choice([2, 3, 3]))
        if rng.random() < 0.3:
            replicas = None
        self._world.trace(f"reassignment: {replicas}")
        self._reassign(replicas, rng.randrange(PARTITIONS))

    def _reassign(
        self, replicas: list[int] | None, partition: int | None = None
    ) -> bool:
        """Assign replicas, or cancel a reassignment if `replicas` is None. Return whether
        the request was accepted.
        """
        request_type = wire.ALTER_PARTITION_REASSIGNMENTS.Request
        parts = [
            request_type.Topic.Partition(partition_index=number, replicas=replicas)
            for number in range(MAX_PARTITIONS)
            if partition in (None, number)
        ]
        try:
            found = self._admin.ask_any(
                wire.ALTER_PARTITION_REASSIGNMENTS,
                request_type(
                    topics=[request_type.Topic(name=TOPIC, partitions=parts)],
                    timeout_ms=1_000,
                ),
            )
        except RemoteUnavailableError:
            return False
        return not found.error_code and not any(
            part.error_code
            for topic in found.responses
            for part in topic.partitions
            if part.partition_index < PARTITIONS or not _is_missing(part)
        )


def _is_missing(part: Any) -> bool:
    """Return whether a partition was refused because it does not exist."""
    code: int = part.error_code
    return code == codes.UNKNOWN_TOPIC_OR_PARTITION


def _compare_logs(world: World) -> None:
    """Check R01, R11, R14 and R15 with the files of all brokers."""
    for key in ALL_PARTITIONS:
        contents = {
            instance.number: _content(
                world.brokers[instance.number].disk, instance.number, key
            )
            for instance in world.running_brokers()
        }
        require(len({*contents.values()}) == 1, "R15", "the logs of {} differ", key)
        (content,) = {*contents.values()}
        found = {
            record.offset: bytes(record.value or b"")
            for batch in recordbatch.read_batches(content)
            if not batch.is_control
            for record in batch.records()
        }
        topic_id = world.running_brokers()[0].logdir.topic_id(key[0]).bytes
        expected_values = world.stored_values.get((topic_id, key[1]), {})
        wrong = {
            offset: (value, found.get(offset))
            for offset, value in expected_values.items()
            if found.get(offset) != value
        }
        require(not wrong, "R01", "{} has other values: {}", key, wrong)
        former = {
            value
            for (other_id, number), values in world.stored_values.items()
            if other_id != topic_id and number == key[1]
            for value in values.values()
        }
        left = former.intersection(found.values())
        require(not left, "R14", "{} has records of a former topic: {}", key, left)
        duplicates = [
            value
            for value, count in Counter(found.values()).items()
            if count > 1 and value in world.idempotent_values
        ]
        require(
            not duplicates, "R11", "{} has values more than once: {}", key, duplicates
        )


def _check_transactions(world: World) -> None:
    """Check R12 with the committed records of the leaders."""
    visible: Counter[tuple[bytes, int]] = Counter()
    for number in range(PARTITIONS):
        key = PERMANENT_TOPIC, number
        leader = world.running_brokers()[0].view.states[key].state.leader
        instance = world.brokers[leader].instance
        assert instance is not None
        log = instance.logdir.partition(*key)
        world.wait_until(
            lambda log=log: log.last_stable_offset == log.log_end_offset,  # type: ignore[misc]
            "R12",
            "a transaction remains open",
        )
        for record in log.read(0, isolation="read_committed"):
            visible[bytes(record.value or b""), number] += 1
    for value, outcome in world.transactions.items():
        parts = {number for number in range(PARTITIONS) if visible[value, number]}
        expected_parts = [set(world.transaction_partitions.get(value, ()))]
        if outcome is False:
            expected_parts = [set()]
        elif outcome is None:
            expected_parts.append(set())
        require(
            parts in expected_parts,
            "R12",
            "{} is visible in {} and should be in {}",
            value,
            parts,
            expected_parts,
        )
        duplicates = [number for number in parts if visible[value, number] > 1]
        require(
            not duplicates,
            "R12",
            "{} is stored more than once in {}",
            value,
            duplicates,
        )


def _content(disk: SimulatedDisk, broker: int, key: tuple[str, int]) -> bytes:
    """Return the bytes of all segments of a partition."""
    directory = f"/broker-{broker}/{key[0]}-{key[1]}"
    return b"".join(
        disk.content(f"{directory}/{name}")
        for name in sorted(disk.listdir(directory))
        if name.endswith(".log")
    )
