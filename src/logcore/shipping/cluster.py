"""The interface between shipping and a remote cluster: protocols and their values.

Rules:
- A crash or a lost reply may interrupt every call. The caller must not depend on how
  much of the call was executed.
- A call that waits has a timeout, and returns when it expires. If wait() returns None,
  the batch is still in progress.
- If the cluster does not respond, a call raises RemoteUnavailableError. The same call,
  or a new connection, may succeed later.

kafka.py implements the interface with confluent-kafka. The tests implement it with a
simulated cluster that has faults. This module makes no decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import attrs

from logcore.kernels import Record

#: Topic and number of a partition.
Partition = tuple[str, int]


class ShippedProgress(NamedTuple):
    """The progress of a shipped partition."""

    #: The next local offset to ship.
    offset: int
    #: Identifies the last record below `offset`; see forward_rules.record_fingerprint().
    #: It is empty if there is no such record.
    fingerprint: str = ""


@attrs.frozen
class OutgoingBatch:
    """Records to ship in one step, by remote partition."""

    records: Mapping[Partition, Sequence[Record]]
    #: The progress to commit with the records.
    progress: Mapping[Partition, ShippedProgress]


@attrs.frozen
class Outcome:
    """The result of shipping a batch.

    If a partition was refused or failed, a transaction has delivered nothing, and the
    caller must create a new sender.
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
        """Return the result of the batch, or None if there is none after `timeout_s`.

        Raises:
            RemoteUnavailableError: The result is unknown, and the caller must create a
                new sender.
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

    def create_topics(self, counts: Mapping[str, int]) -> None:
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
        """Return a sender without transactions. It keeps the order of each partition.

        After a lost connection, it may send some records twice.
        """
        ...

    def committed(
        self, group_id: str, partitions: Collection[Partition]
    ) -> dict[Partition, ShippedProgress]:
        """Return the progress that a group has committed in transactions that have
        ended.
        """
        ...

    def cluster_id(self) -> str: ...

    def pause(self, seconds: float) -> None:
        """Wait for up to `seconds`."""
        ...

    def close(self) -> None: ...


class RemoteRecord(NamedTuple):
    """A record of a remote partition."""

    record: Record
    #: -1 if it is unknown.
    leader_epoch: int


@attrs.frozen
class FetchResult:
    """The result of one fetch()."""

    records: Mapping[Partition, Sequence[RemoteRecord]]
    #: Partitions that were read to their end, with the end offset. Below it, there may
    #: be control batches and aborted records, which are not in `records`.
    reached: Mapping[Partition, int]
    #: Partitions that do not exist or do not contain the position. The caller must call
    #: span() and topics() again.
    lost: Collection[Partition] = ()


@attrs.frozen
class RemoteTopic:
    """A topic of a remote cluster."""

    #: Kafka's topic id as text, empty if the cluster returns none.
    topic_id: str
    #: Number of partitions.
    partitions: int
    #: Whether the topic is compacted. It is True if this is unknown.
    is_compacted: bool


@attrs.frozen
class RemoteSpan:
    """The bounds of a remote partition."""

    #: The first offset.
    log_start: int
    #: The offset after the last record.
    log_end: int


class SourceCluster(Protocol):
    """A cluster from which records are mirrored.

    Its calls may raise RemoteUnavailableError.
    """

    def topics(self, names: Collection[str]) -> dict[str, RemoteTopic]:
        """Return the existing topics."""
        ...

    def span(self, partition: Partition) -> RemoteSpan:
        """Return the current bounds of a partition. fetch() reads up to `log_end`."""
        ...

    def fetch(
        self, positions: Mapping[Partition, int], timeout_s: float
    ) -> FetchResult:
        """Return some records from each position on, in order of offsets.

        The result omits partitions that return no record within `timeout_s`.
        """
        ...

    def committed(
        self, group_id: str, partitions: Collection[Partition]
    ) -> dict[Partition, ShippedProgress]:
        """Return the offsets that a group has committed in the cluster."""
        ...

    def cluster_id(self) -> str: ...

    def pause(self, seconds: float) -> None:
        """Wait for up to `seconds`."""
        ...

    def close(self) -> None: ...
