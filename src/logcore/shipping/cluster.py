"""The interface between shipping and a remote cluster: calls and their values.

Rules:
- One call is one step, which a crash or a lost reply may interrupt. The caller never
  depends on how much of the step was done.
- A call that waits takes a timeout, and returns when it expires. `None` from wait()
  means that the batch is in progress.
- A cluster that does not respond raises RemoteUnavailableError. The same call, or a new
  connection, may work later.

kafka.py implements the interface with confluent-kafka. The tests implement it with a
model that has faults. This module makes no decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import attrs

from logcore.kernels import Record

#: Topic and number of a partition.
Partition = tuple[str, int]


class ShippedProgress(NamedTuple):
    """The progress of a shipped partition.

    `offset` is the next local offset to ship. `witness` identifies the last record
    below that offset; see forward_rules.witness_of(). The witness is empty if there is
    no such record.
    """

    offset: int
    witness: str = ""


@attrs.frozen
class OutgoingBatch:
    """The shipment of one step, by remote partition: records, and progress after them."""

    records: Mapping[Partition, Sequence[Record]]
    progress: Mapping[Partition, ShippedProgress]


@attrs.frozen
class Outcome:
    """The result of shipping a batch.

    With a refused or failed partition, a transaction has delivered nothing, and a new
    sender is needed.
    """

    #: The next local offset, for each partition with delivered records.
    delivered: Mapping[Partition, int]
    #: Partitions with a record that the cluster rejects, with the reason.
    refused: Mapping[Partition, str] = attrs.field(factory=dict)
    #: Partitions that the cluster rejects entirely, with the reason.
    failed: Mapping[Partition, str] = attrs.field(factory=dict)


class ClusterSender(Protocol):
    """Ships one batch after another."""

    def start(self, batch: OutgoingBatch) -> None:
        """Start to ship a batch.

        Raises:
            RemoteUnavailableError: The cluster does not respond.
            ProducerFencedError: Another sender has the transactional id.
        """
        ...

    def wait(self, timeout_s: float) -> Outcome | None:
        """Return the result of the batch, None if it is not known after `timeout_s`.

        Raises:
            RemoteUnavailableError: The result is unknown, and this sender cannot be
                used any more.
            ProducerFencedError: Another sender has the transactional id.
        """
        ...

    def close(self) -> None:
        """Abandon the batch in progress and close. Never raises."""
        ...


class TargetCluster(Protocol):
    """A cluster to which records are shipped.

    Its calls may raise RemoteUnavailableError.
    """

    def partition_counts(self, topics: Collection[str]) -> dict[str, int]:
        """Return the number of partitions of each topic that exists."""
        ...

    def create_topics(self, wanted: Mapping[str, int]) -> None:
        """Create topics with these partition counts, or add partitions.

        Raises:
            RemoteTopicError: The cluster rejects this.
        """
        ...

    def transactional_sender(
        self, transactional_id: str, group_id: str
    ) -> ClusterSender:
        """Return a sender of transactions that include the progress of `group_id`.

        This ends the open transaction of an earlier sender of that id, and fences that
        sender.

        Raises:
            RemoteTopicError: The cluster rejects this.
        """
        ...

    def plain_sender(self) -> ClusterSender:
        """Return a sender that keeps the order of each partition.

        It may repeat records that were in flight when it was cut off.
        """
        ...

    def committed(
        self, group_id: str, partitions: Collection[Partition]
    ) -> dict[Partition, ShippedProgress]:
        """Return the shipped progress of transactions that have ended."""
        ...

    def cluster_id(self) -> str: ...

    def pause(self, seconds: float) -> None:
        """Wait, for at most this time."""
        ...

    def close(self) -> None: ...


class RemoteRecord(NamedTuple):
    """A record of a remote partition with its leader epoch (-1: unknown)."""

    record: Record
    leader_epoch: int


@attrs.frozen
class FetchResult:
    """The result of one fetch()."""

    records: Mapping[Partition, Sequence[RemoteRecord]]
    #: Partitions that were read to their end, with that end. The end is also above
    #: markers and aborted records, which are not in `records`.
    reached: Mapping[Partition, int]
    #: Partitions that do not exist or do not contain the position; see span() and
    #: topics().
    lost: Collection[Partition] = ()


@attrs.frozen
class RemoteTopic:
    """A topic of a remote cluster.

    `topic_id` is Kafka's id as text, empty if the cluster returns none. `is_compacted`
    is also true if it is unknown.
    """

    topic_id: str
    partitions: int
    is_compacted: bool


@attrs.frozen
class RemoteSpan:
    """The bounds of a remote partition: its first offset, and the end offset."""

    log_start: int
    log_end: int


class SourceCluster(Protocol):
    """A cluster from which records are mirrored. Errors are those of TargetCluster."""

    def topics(self, names: Collection[str]) -> dict[str, RemoteTopic]:
        """Return the topics among these that exist."""
        ...

    def span(self, partition: Partition) -> RemoteSpan:
        """Return the bounds of a partition now. `log_end` is the end for fetch()."""
        ...

    def fetch(
        self, positions: Mapping[Partition, int], timeout_s: float
    ) -> FetchResult:
        """Return some records from each position on, in order.

        Partitions without records within `timeout_s` are left out.
        """
        ...

    def committed(
        self, group_id: str, partitions: Collection[Partition]
    ) -> dict[Partition, ShippedProgress]:
        """Return the offsets that a group has committed in the cluster."""
        ...

    def cluster_id(self) -> str: ...

    def pause(self, seconds: float) -> None:
        """Wait, for at most this time."""
        ...

    def close(self) -> None: ...
