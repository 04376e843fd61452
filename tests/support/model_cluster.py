"""A cluster without a network: topics, transactions and groups, and faults in each step
of a client that ships records to it.

ModelCluster.client() creates clients, and all of them use the same cluster. At random,
one of these faults occurs in a step of a sender:
    kill        the process ends (Killed) before, during or after the effect
    lose        the request or the response is lost (RemoteUnavailableError)
    wait        the step has not ended yet, and returns None

The cluster follows Kafka's rules. No reader sees records of an open transaction. The
next producer of a transactional id aborts the open transaction and fences the earlier
producer. Offsets in a transaction are committed together with its records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping

import attrs

from logcore.errors import ProducerFencedError, RemoteUnavailableError
from logcore.kernels import Record
from logcore.shipping.cluster import (
    FetchResult,
    Outcome,
    OutgoingBatch,
    Partition,
    RemoteRecord,
    RemoteSpan,
    RemoteTopic,
    ShippedProgress,
)
from logcore.testing import SimulatedDisk


class Killed(BaseException):
    """Ends the simulated process. It is a BaseException, so that code of the library does
    not catch it.
    """


@attrs.frozen
class Faults:
    """The probability of each fault in a step."""

    kill: float = 0.0
    lose: float = 0.0
    wait: float = 0.0


NO_FAULTS = Faults()


@attrs.define
class Transaction:
    records: list[tuple[Partition, Record]] = attrs.Factory(list)
    progress: dict[Partition, ShippedProgress] = attrs.Factory(dict)


@attrs.define(eq=False)
class ModelCluster:
    """The state of the cluster."""

    rng: random.Random
    disk: SimulatedDisk
    counts: dict[str, int] = attrs.Factory(dict)
    #: The records that read_committed readers see, by partition.
    visible: dict[Partition, list[Record]] = attrs.Factory(dict)
    progress: dict[tuple[str, Partition], ShippedProgress] = attrs.Factory(dict)
    name: str = "model"
    epochs: dict[str, int] = attrs.Factory(dict)
    open: dict[str, Transaction] = attrs.Factory(dict)
    refuses: Callable[[Record], bool] = lambda record: False
    faults: Faults = NO_FAULTS
    is_unavailable: bool = False
    #: Called after each response about progress, for actions of other clients before
    #: the next request.
    after_progress: Callable[[], None] = lambda: None

    def client(self) -> ModelClient:
        return ModelClient(self)

    def offsets(self) -> dict[tuple[str, Partition], int]:
        """Return the offsets that groups have committed."""
        return {key: progress.offset for key, progress in self.progress.items()}

    def values(self, partition: Partition) -> list[bytes | None]:
        return [record.value for record in self.visible.get(partition, [])]

    # -- faults ------------------------------------------------------------------------

    def maybe_fail(self) -> None:
        """Raise the error of a fault, at random."""
        drawn = self.rng.random()
        if drawn < self.faults.kill:
            raise Killed
        if self.is_unavailable or drawn < self.faults.kill + self.faults.lose:
            raise RemoteUnavailableError("the model is unavailable")

    def is_slow(self) -> bool:
        return self.rng.random() < self.faults.wait

    # -- transactions ------------------------------------------------------------------

    def begin(self, transactional_id: str) -> int:
        self.open.pop(transactional_id, None)
        self.epochs[transactional_id] = self.epochs.get(transactional_id, -1) + 1
        return self.epochs[transactional_id]

    def transaction_of(self, transactional_id: str, epoch: int) -> Transaction:
        if self.epochs[transactional_id] != epoch:
            raise ProducerFencedError("the model has a newer producer")
        return self.open.setdefault(transactional_id, Transaction())

    def commit(self, transactional_id: str, group_id: str) -> None:
        ended = self.open.pop(transactional_id)
        for partition, record in ended.records:
            self.visible.setdefault(partition, []).append(record)
        for partition, progress in ended.progress.items():
            self.progress[group_id, partition] = progress


@attrs.define(eq=False)
class ModelClient:
    """Implements TargetCluster."""

    cluster: ModelCluster

    def partition_counts(self, topics: Collection[str]) -> dict[str, int]:
        self.cluster.maybe_fail()
        return {
            name: count for name, count in self.cluster.counts.items() if name in topics
        }

    def create_topics(self, wanted: Mapping[str, int]) -> None:
        self.cluster.maybe_fail()
        self.cluster.counts.update(wanted)
        self.cluster.maybe_fail()

    def transactional_sender(
        self, transactional_id: str, group_id: str
    ) -> ModelTransactionalSender:
        self.cluster.maybe_fail()
        epoch = self.cluster.begin(transactional_id)
        self.cluster.maybe_fail()
        return ModelTransactionalSender(self.cluster, transactional_id, group_id, epoch)

    def plain_sender(self) -> ModelSender:
        return ModelSender(self.cluster)

    def cluster_id(self) -> str:
        self.cluster.maybe_fail()
        return self.cluster.name

    def committed(
        self, group_id: str, partitions: Collection[Partition]
    ) -> dict[Partition, ShippedProgress]:
        self.cluster.maybe_fail()
        progress = self.cluster.progress
        found = {
            partition: progress[group_id, partition]
            for partition in partitions
            if (group_id, partition) in progress
        }
        self.cluster.after_progress()
        return found

    def pause(self, seconds: float) -> None:
        self.cluster.disk.advance(max(1, round(seconds * 1000)))

    def close(self) -> None:
        pass


@attrs.define(eq=False)
class ModelSender:
    """A sender without transactions. If a record of a partition is refused, no later
    record of the partition is sent, and perhaps none of its batch.
    """

    cluster: ModelCluster
    batch: OutgoingBatch = attrs.Factory(lambda: OutgoingBatch({}, {}))
    left: list[tuple[Partition, Record]] = attrs.Factory(list)
    delivered: dict[Partition, int] = attrs.Factory(dict)
    refused: dict[Partition, str] = attrs.Factory(dict)

    def start(self, batch: OutgoingBatch) -> None:
        self.batch = batch
        self.left = [
            (partition, record)
            for partition, records in batch.records.items()
            for record in records
        ]
        self.delivered = {}
        self.refused = {}
        self.cluster.maybe_fail()

    def wait(self, timeout_s: float) -> Outcome | None:
        self.cluster.disk.advance(round(timeout_s * 1000))
        if self.cluster.is_slow():
            return None
        while self.left:
            partition, record = self.left.pop(0)
            self.cluster.maybe_fail()
            if partition in self.refused:
                continue
            if self.cluster.refuses(record):
                self.refused[partition] = "the model refuses it"
                continue
            self.store(partition, record)
            self.delivered[partition] = record.offset + 1
        return self.end()

    def store(self, partition: Partition, record: Record) -> None:
        self.cluster.visible.setdefault(partition, []).append(record)

    def end(self) -> Outcome:
        for partition, progress in self.batch.progress.items():
            if partition not in self.refused:
                self.delivered[partition] = progress.offset
        self.cluster.maybe_fail()
        return Outcome(self.delivered, self.refused)

    def close(self) -> None:
        pass


@attrs.define(eq=False)
class ModelTransactionalSender(ModelSender):
    transactional_id: str = ""
    group_id: str = ""
    epoch: int = 0

    def __init__(
        self, cluster: ModelCluster, transactional_id: str, group_id: str, epoch: int
    ) -> None:
        self.__attrs_init__(
            cluster, transactional_id=transactional_id, group_id=group_id, epoch=epoch
        )

    def store(self, partition: Partition, record: Record) -> None:
        self.cluster.transaction_of(self.transactional_id, self.epoch).records.append(
            (partition, record)
        )

    def end(self) -> Outcome:
        if self.refused:
            self.cluster.open.pop(self.transactional_id, None)
            return Outcome({}, self.refused)
        transaction = self.cluster.transaction_of(self.transactional_id, self.epoch)
        transaction.progress.update(self.batch.progress)
        self.cluster.maybe_fail()
        self.cluster.commit(self.transactional_id, self.group_id)
        self.cluster.maybe_fail()
        return Outcome(
            {
                partition: progress.offset
                for partition, progress in self.batch.progress.items()
            }
        )

    def close(self) -> None:
        if self.cluster.epochs[self.transactional_id] == self.epoch:
            self.cluster.open.pop(self.transactional_id, None)


@attrs.define(eq=False)
class ModelLog:
    """A partition that is mirrored."""

    start: int = 0
    end: int = 0
    epoch: int = 0
    #: Markers, aborted records and compacted records are missing, so offsets have gaps.
    records: list[RemoteRecord] = attrs.Factory(list)

    def append(self, value: bytes, *, gap: int = 0) -> None:
        """Append a record after this number of offsets without a record."""
        offset = self.end + gap
        self.records.append(
            RemoteRecord(
                Record(offset, 1_700_000_000_000 + offset, None, value), self.epoch
            )
        )
        self.end = offset + 1

    def append_marker(self) -> None:
        """Append a marker, which no consumer sees."""
        self.end += 1

    def delete_below(self, offset: int) -> None:
        self.start = offset
        self.records = [
            record for record in self.records if record.record.offset >= offset
        ]

    def lose_records_from(self, offset: int) -> None:
        """Elect a leader without the records from an offset on."""
        self.end = offset
        self.epoch += 1
        self.records = [
            record for record in self.records if record.record.offset < offset
        ]

    def compact(self, is_kept: Callable[[Record], bool]) -> None:
        """Remove the records that are not kept, but never the last record."""
        self.records = [
            record
            for record in self.records
            if is_kept(record.record) or record is self.records[-1]
        ]


@attrs.define(eq=False)
class ModelSource:
    """A cluster that is the source of a mirror. Implements SourceCluster for one client."""

    rng: random.Random
    disk: SimulatedDisk
    logs: dict[Partition, ModelLog] = attrs.Factory(dict)
    ids: dict[str, str] = attrs.Factory(dict)
    compacted: set[str] = attrs.Factory(set)
    groups: dict[str, dict[Partition, int]] = attrs.Factory(dict)
    faults: Faults = NO_FAULTS
    is_unavailable: bool = False

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        """Create a topic, or replace it by a new topic with the same name."""
        self.ids[topic] = f"{topic}-{self.rng.randrange(10**9)}"
        for number in range(partitions):
            self.logs[topic, number] = ModelLog()

    def maybe_fail(self) -> None:
        drawn = self.rng.random()
        if drawn < self.faults.kill:
            raise Killed
        if self.is_unavailable or drawn < self.faults.kill + self.faults.lose:
            raise RemoteUnavailableError("the model is unavailable")

    def topics(self, names: Collection[str]) -> dict[str, RemoteTopic]:
        self.maybe_fail()
        counts = {name: sum(topic == name for topic, _ in self.logs) for name in names}
        known = [name for name in names if name in self.ids]
        return {
            name: RemoteTopic(self.ids[name], counts[name], name in self.compacted)
            for name in known
        }

    def span(self, partition: Partition) -> RemoteSpan:
        self.maybe_fail()
        log = self.logs[partition]
        return RemoteSpan(log.start, log.end)

    def fetch(
        self, positions: Mapping[Partition, int], timeout_s: float
    ) -> FetchResult:
        self.disk.advance(round(timeout_s * 1000))
        self.maybe_fail()
        found: dict[Partition, list[RemoteRecord]] = {}
        reached: dict[Partition, int] = {}
        lost = []
        for partition, position in positions.items():
            log = self.logs[partition]
            if not log.start <= position <= log.end:
                lost.append(partition)
                continue
            left = [
                record for record in log.records if record.record.offset >= position
            ]
            fetched = left[: self.rng.randrange(1, 6)]
            if fetched:
                found[partition] = fetched
            if len(fetched) == len(left):
                reached[partition] = log.end
        return FetchResult(found, reached, lost)

    def committed(
        self, group_id: str, partitions: Collection[Partition]
    ) -> dict[Partition, ShippedProgress]:
        self.maybe_fail()
        return {
            partition: ShippedProgress(offset)
            for partition, offset in self.groups.get(group_id, {}).items()
            if partition in partitions
        }

    def cluster_id(self) -> str:
        self.maybe_fail()
        return "model"

    def pause(self, seconds: float) -> None:
        self.disk.advance(max(1, round(seconds * 1000)))

    def close(self) -> None:
        pass
