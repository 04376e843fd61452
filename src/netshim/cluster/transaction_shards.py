"""Transactions in a cluster: coordinators, markers for other brokers, verification.

Rules:
- The coordinator of a transactional id is the leader of its partition of
  `__transaction_state`. It sends markers to the leaders of the partitions of a
  transaction, with the leader epoch of its own partition as the coordinator epoch. So a
  late marker of a former coordinator is refused.
- Before the first batch of a transaction in a partition, the leader of the partition asks
  the coordinator, which verifies or adds the partition (KIP-890). The result is valid
  until a marker of the producer follows in the partition, or the leader resigns.
- The requests of one producer are prepared one after another, so that its batches are
  appended in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, TypeVar

import attrs

from logcore import Log, LogcoreError, NotLeaderError
from logcore.coordination.transaction_effects import (
    Request,
    TransactionError,
    WriteMarkers,
)
from logcore.coordination.transaction_effects import Result as TransactionResult
from logcore.coordination.transactions import TransactionMachine
from logcore.coordinators.stored_transactions import TRANSACTIONS_CONFIG
from logcore.format.transaction_records import Partition, StoredTransaction
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import TRANSACTIONS_TOPIC
from netshim import wire
from netshim.cluster.broker_connections import Connect
from netshim.cluster.member import ClusterMember
from netshim.cluster.peer_requests import PeerQueue
from netshim.cluster.shards import NoShard, Shards
from netshim.cluster.view import ClusterView
from netshim.coordinators import (
    TransactionalProducer,
    TransactionErrors,
    TransactionsCallback,
    TransactionService,
)
from netshim.scheduling import guarded
from netshim.state import BrokerState
from netshim.topology import NO_NODE
from netshim.transactions import Marked, Markers, TransactionHost, add_or_verify
from netshim.wire import codes

_T = TypeVar("_T")
#: Codes after which a marker is not sent again: the transaction is over, or the
#: partition can have no marker.
_FINAL: Final = frozenset(
    (
        codes.NONE,
        codes.INVALID_PRODUCER_EPOCH,
        codes.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        codes.UNSUPPORTED_VERSION,
    )
)
#: The errors of a coordinator by code. Other codes become COORDINATOR_NOT_AVAILABLE.
_ERRORS: Final = {
    getattr(codes, error.name): error
    for error in TransactionError
    if error is not TransactionError.COORDINATOR_NOT_AVAILABLE
} | {codes.INVALID_PRODUCER_EPOCH: TransactionError.PRODUCER_FENCED}


@attrs.frozen
class _MarkersOf:
    """The markers of one transaction for one broker."""

    #: The transaction, with its producer and its outcome.
    effect: WriteMarkers
    #: The leader epoch of the coordinator's partition.
    coordinator_epoch: int
    partitions: frozenset[Partition]


@attrs.frozen
class _VerificationRequest:
    """Whether a producer may write to partitions."""

    producer: TransactionalProducer
    partitions: frozenset[Partition]
    adds: bool


def _by_topic(partitions: Iterable[Partition]) -> dict[str, list[int]]:
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        by_topic.setdefault(topic, []).append(number)
    return by_topic


def _pack_markers(entries: Sequence[_MarkersOf]) -> Any:
    marker_type = wire.WRITE_TXN_MARKERS.Request.Marker
    return wire.WRITE_TXN_MARKERS.Request(
        markers=[
            marker_type(
                producer_id=entry.effect.producer_id,
                producer_epoch=entry.effect.producer_epoch,
                transaction_result=entry.effect.commit,
                topics=[
                    marker_type.Topic(name=topic, partition_indexes=numbers)
                    for topic, numbers in _by_topic(entry.partitions).items()
                ],
                coordinator_epoch=entry.coordinator_epoch,
            )
            for entry in entries
        ]
    )


def _unpack_markers(response: Any) -> list[dict[Partition, int]]:
    return [
        {
            (topic.name, partition.partition_index): partition.error_code
            for topic in marker.topics
            for partition in topic.partitions
        }
        for marker in response.markers
    ]


def _pack_verifications(entries: Sequence[_VerificationRequest]) -> Any:
    transaction_type = wire.ADD_PARTITIONS_TO_TXN.Request.Transaction
    return wire.ADD_PARTITIONS_TO_TXN.Request(
        transactions=[
            transaction_type(
                transactional_id=entry.producer[0],
                producer_id=entry.producer[1],
                producer_epoch=entry.producer[2],
                verify_only=not entry.adds,
                topics=[
                    transaction_type.Topic(name=topic, partitions=numbers)
                    for topic, numbers in _by_topic(entry.partitions).items()
                ],
            )
            for entry in entries
        ]
    )


def _unpack_verifications(response: Any) -> list[TransactionErrors]:
    default_error = TransactionError.COORDINATOR_NOT_AVAILABLE
    return [
        {
            (topic.name, partition.partition_index): _ERRORS.get(
                partition.partition_error_code, default_error
            )
            for topic in transaction.topic_results
            for partition in topic.results_by_partition
            if partition.partition_error_code
        }
        for transaction in response.results_by_transaction
    ]


class TransactionPeers:
    """The other brokers, as far as transactions need them."""

    def __init__(
        self,
        member: ClusterMember,
        connect: Connect,
        call_in_loop: Callable[[Callable[[], None]], object],
    ) -> None:
        self._member = member
        self._connect = connect
        self._call_in_loop = call_in_loop
        self._markers: dict[int, PeerQueue[_MarkersOf, dict[Partition, int]]] = {}
        self._verifications: dict[
            int, PeerQueue[_VerificationRequest, TransactionErrors]
        ] = {}

    @property
    def own_node_id(self) -> int:
        return self._member.settings.node_id

    def leader_of(self, partition: Partition) -> int | None:
        """Return the leader of a partition, NO_NODE if it has none now.

        None means that the partition was deleted.
        """
        view = self._member.view
        topic = view.topics.get(partition[0])
        if topic is None:
            # A damaged topic exists, and may be repaired.
            return NO_NODE if partition[0] in view.damaged_topics else None
        if partition[1] not in topic.node.replicas:
            return None
        return view.leader_of(partition)

    def send_markers(
        self,
        broker: int,
        markers: _MarkersOf,
        callback: Callable[[dict[Partition, int] | LogcoreError], None],
    ) -> None:
        """Send the markers of a transaction, and call callback() with codes by partition."""
        # One queue and one thread for each broker, so that a slow broker delays only
        # its own markers.
        queue = self._markers.get(broker)
        if queue is None:
            queue = self._markers[broker] = PeerQueue(
                broker,
                wire.WRITE_TXN_MARKERS,
                _pack_markers,
                _unpack_markers,
                self._connect,
                self._call_in_loop,
            )
        queue.add(markers, callback)

    def request(
        self,
        broker: int,
        question: _VerificationRequest,
        callback: Callable[[TransactionErrors | LogcoreError], None],
    ) -> None:
        """Ask a coordinator, and call callback() with errors by partition."""
        queue = self._verifications.get(broker)
        if queue is None:
            queue = self._verifications[broker] = PeerQueue(
                broker,
                wire.ADD_PARTITIONS_TO_TXN,
                _pack_verifications,
                _unpack_verifications,
                self._connect,
                self._call_in_loop,
            )
        queue.add(question, callback)

    def apply_view(self, view: ClusterView) -> None:
        """Give up the requests to brokers that are not registered any more."""
        for queues in (self._markers, self._verifications):
            for broker, queue in queues.items():
                if broker not in view.brokers:
                    # The partitions have another leader now, and its answer is faster
                    # than a timeout.
                    queue.interrupt()

    def close(self) -> None:
        """End the threads. Blocks."""
        for queues in (self._markers, self._verifications):
            for queue in queues.values():
                queue.close()


class TransactionShard(TransactionHost):
    """The transactions of one partition."""

    def __init__(
        self, state: BrokerState, number: int, epoch: int, peers: TransactionPeers
    ) -> None:
        super().__init__(state, number)
        #: The leader epoch of the partition. Markers contain it, so that a former
        #: coordinator is fenced.
        self._epoch = epoch
        self._peers = peers

    def _write_markers(
        self, coordinator: TransactionMachine, effect: WriteMarkers, callback: Marked
    ) -> None:
        """Append the markers of own partitions, and send the others to their leaders."""
        by_leader: dict[int, set[Partition]] = {}
        for partition in effect.partitions:
            leader = self._peers.leader_of(partition)
            # The markers of a deleted partition are not needed.
            if leader is not None:
                by_leader.setdefault(leader, set()).add(partition)
        # Partitions without a leader are tried again later.
        failed_partitions = set(by_leader.pop(NO_NODE, ()))
        # One more, so that callback() is not called before all leaders are started.
        remaining = len(by_leader) + 1

        def finish(failed: Collection[Partition] = ()) -> None:
            nonlocal remaining
            failed_partitions.update(failed)
            remaining -= 1
            if not remaining:
                callback(coordinator, frozenset(failed_partitions))

        for leader, partitions in by_leader.items():
            if leader == self._peers.own_node_id:
                Markers(
                    self._state,
                    coordinator,
                    attrs.evolve(effect, partitions=frozenset(partitions)),
                    self._state.now_ms,
                    lambda _, failed: finish(failed),
                    coordinator_epoch=self._epoch,
                ).write()
            else:
                self._send_markers(leader, effect, frozenset(partitions), finish)
        finish()

    def _send_markers(
        self,
        leader: int,
        effect: WriteMarkers,
        partitions: frozenset[Partition],
        finish: Callable[[Collection[Partition]], None],
    ) -> None:
        def sent(code_by_partition: dict[Partition, int] | LogcoreError) -> None:
            if isinstance(code_by_partition, LogcoreError):
                # The broker may have written them nevertheless. A second marker is
                # harmless if the broker gets both requests before it answers the second
                # one. A later one would end the next transaction, if the client keeps
                # its epoch (before KIP-890): SourceConnection.close() prevents that.
                finish(partitions)
                return
            # A partition that the leader does not know may be new to it. If it was
            # deleted, the next attempt finds that in the view.
            finish(
                [
                    partition
                    for partition in partitions
                    if code_by_partition.get(partition, -1) not in _FINAL
                ]
            )

        markers = _MarkersOf(effect, self._epoch, partitions)
        self._peers.send_markers(leader, markers, sent)


@attrs.define(eq=False)
class _Preparation:
    """A request of a producer that waits for the coordinator's answer."""

    producer: TransactionalProducer
    partitions: frozenset[Partition]
    adds: bool
    callback: Callable[[TransactionErrors], None]
    #: The coordinator was asked, and has not answered yet.
    is_requesting: bool = False
    #: The coordinator's answer. Partitions without an error are verified.
    errors: TransactionErrors = attrs.field(factory=dict)
    #: Partitions with a marker after the request, whose response may be older.
    changed: set[Partition] = attrs.field(factory=set)


class TransactionShards(TransactionService):
    """The transactions of a cluster, as this broker serves them."""

    def __init__(
        self,
        state: BrokerState,
        member: ClusterMember,
        connect: Connect,
        call_in_loop: Callable[[Callable[[], None]], object],
    ) -> None:
        self._state = state
        self.peers = TransactionPeers(member, connect, call_in_loop)
        #: Leader epochs of the partitions of `__transaction_state` that are led here.
        self._epochs: dict[int, int] = {}
        self.shards = Shards(
            TRANSACTIONS_TOPIC,
            state,
            member,
            lambda number: TransactionShard(
                state, number, self._epochs[number], self.peers
            ),
        )
        #: The requests of each producer; the first one waits for its coordinator.
        self._preparations: dict[int, deque[_Preparation]] = {}
        #: Epochs of the producers that may write, by partition.
        self._verified: dict[Partition, dict[int, int]] = {}

    # -- partitions --------------------------------------------------------------------

    def lead(self, key: Key, log: Log) -> None:
        if key[0] == TRANSACTIONS_TOPIC:
            # lead() below creates the coordinator, which reads this epoch.
            self._epochs[key[1]] = log.leader_epoch
        self.shards.lead(key)

    def resign(self, key: Key) -> None:
        # A later leader may end transactions that this broker does not see.
        self._verified.pop(key, None)
        for waiting in self._preparations.values():
            # The answer that the first request waits for is older than this change.
            waiting[0].changed.add(key)
        self.shards.resign(key)

    # -- the coordinator ---------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        return True

    def begin(self, now_ms: int) -> None:
        """Do nothing: each coordinator begins when its partition is led here."""

    def load(self, now_ms: int, callback: Callable[[bool], None]) -> None:
        """Call callback(True) immediately: partitions are loaded one by one."""
        callback(True)

    def create_topic(self) -> None:
        self._state.logdir.create_topic(
            TRANSACTIONS_TOPIC,
            self._state.settings.transactions_partitions,
            TRANSACTIONS_CONFIG,
            exist_ok=True,
        )

    def request(
        self,
        request: Request,
        now_ms: int,
        callback: Callable[[TransactionResult], None],
    ) -> None:
        shard = self.shards.find(request.transactional_id)
        if isinstance(shard, NoShard):
            callback(TransactionError[shard.name])
        else:
            shard.request(request, now_ms, callback)

    def find_stored(
        self, names: Collection[str] | None, callback: TransactionsCallback
    ) -> None:
        shards = self.shards.loaded()
        if names is not None:
            each = {self.shards.find(name) for name in names}
            # The list would be incomplete without these ids.
            if any(isinstance(shard, NoShard) for shard in each):
                callback(
                    NotLeaderError("another broker coordinates a transactional id")
                )
                return
            shards = [shard for shard in each if isinstance(shard, TransactionShard)]
        transactions: dict[str, StoredTransaction] = {}
        for shard in shards:
            transactions |= shard.stored(names)
        callback(transactions)

    def stop(self, now_ms: int) -> None:
        for shard in self.shards.loaded():
            shard.stop(now_ms)

    # -- the leader of a partition -----------------------------------------------------

    def is_prepared(
        self,
        producer: TransactionalProducer,
        partitions: Collection[Partition],
        *,
        adds: bool,
    ) -> bool:
        if producer[1] in self._preparations:
            return False  # earlier requests of the producer come first
        return not self._unverified(producer, partitions)

    def _unverified(
        self, producer: TransactionalProducer, partitions: Iterable[Partition]
    ) -> frozenset[Partition]:
        """Return the partitions led here for which the coordinator must be asked."""
        _, producer_id, epoch = producer
        return frozenset(
            partition
            for partition in partitions
            if self._verified.get(partition, {}).get(producer_id) != epoch
            and self._state.leadership.is_leader(partition)
        )

    def prepare(
        self,
        producer: TransactionalProducer,
        partitions: Collection[Partition],
        now_ms: int,
        callback: Callable[[TransactionErrors], None],
        *,
        adds: bool,
    ) -> None:
        preparation = _Preparation(producer, frozenset(partitions), adds, callback)
        self._preparations.setdefault(producer[1], deque()).append(preparation)
        self._prepare_next(producer[1])

    def _prepare_next(self, producer_id: int) -> None:
        """Complete the requests of a producer, up to one that needs the coordinator's
        answer.
        """
        waiting = self._preparations.get(producer_id, deque())
        while waiting and not waiting[0].is_requesting:
            preparation = waiting[0]
            unknown = self._unverified(preparation.producer, preparation.partitions)
            # A partition whose marker came in between is requested again. Errors end
            # the attempt.
            if unknown and not preparation.errors:
                self._request_errors(preparation, unknown)
                continue
            # Removed before the callback, which may prepare the next request.
            waiting.popleft()
            guarded(preparation.callback, preparation.errors)
        if not waiting:
            self._preparations.pop(producer_id, None)

    def _request_errors(
        self, preparation: _Preparation, unknown: frozenset[Partition]
    ) -> None:
        producer = preparation.producer
        preparation.is_requesting = True
        preparation.changed.clear()
        # finish() may be called before this function returns. The loop of
        # _prepare_next() then continues.
        has_returned = False

        def finish(errors: TransactionErrors | LogcoreError) -> None:
            preparation.is_requesting = False
            if isinstance(errors, LogcoreError):
                error = TransactionError.COORDINATOR_NOT_AVAILABLE
                errors = dict.fromkeys(unknown, error)
            preparation.errors = errors
            for partition in unknown - errors.keys() - preparation.changed:
                self._verified.setdefault(partition, {})[producer[1]] = producer[2]
            if has_returned:
                self._prepare_next(producer[1])

        # The partition that stores the transaction. Its leader is the coordinator.
        home = TRANSACTIONS_TOPIC, self.shards.partition_of(producer[0])
        coordinator = self.peers.leader_of(home)
        if coordinator == self.peers.own_node_id:
            now_ms = self._state.now_ms
            add_or_verify(
                self, producer, unknown, now_ms, finish, adds=preparation.adds
            )
        elif coordinator is None or coordinator == NO_NODE:
            finish(LogcoreError("the transaction has no coordinator now"))
        else:
            self.peers.request(
                coordinator,
                _VerificationRequest(producer, unknown, preparation.adds),
                finish,
            )
        has_returned = True

    def verified(
        self,
        producer: TransactionalProducer,
        partition: Partition,
        write: Callable[[], _T],
    ) -> _T | TransactionError:
        if self._verified.get(partition, {}).get(producer[1]) == producer[2]:
            return write()
        # A marker was appended after the answer of the coordinator. The client repeats
        # the request, and the coordinator is asked again.
        return TransactionError.CONCURRENT_TRANSACTIONS

    def marker_follows(self, producer_id: int, partition: Partition) -> None:
        producers = self._verified.get(partition)
        if producers is not None:
            # The next batch of the producer belongs to another transaction, and is
            # verified again.
            producers.pop(producer_id, None)
            if not producers:
                del self._verified[partition]
        for preparation in self._preparations.get(producer_id, ()):
            preparation.changed.add(partition)
