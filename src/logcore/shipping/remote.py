"""A remote cluster as shipping sees it: what is asked of a client of Kafka, and the values that pass between them.

Rules:
- One call is one step that a crash or a lost answer may cut off. The caller never needs to know how far it came.
- A call that waits takes how long, and returns when the time is up. `None` from wait() means: not over yet.
- A cluster that does not answer raises RemoteUnavailableError. The same call, or a new connection, may work later.

kafka.py implements it over confluent-kafka; the tests implement it over a model with faults. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import attrs

from logcore.kernels import Record

#: Topic and number of a partition.
Partition = tuple[str, int]


class Progress(NamedTuple):
    """How far a partition was shipped. offset: the local offset behind that. witness: of the last record below it, see
    planning.witness_of(); empty if there is none.
    """

    offset: int
    witness: str = ""


@attrs.frozen
class Batch:
    """The shipment of one step: records of some partitions, each in order, and the progress behind them.

    records, progress: by partition of the remote cluster.
    """

    records: Mapping[Partition, Sequence[Record]]
    progress: Mapping[Partition, Progress]


@attrs.frozen
class Outcome:
    """How the shipping of a batch ended.

    delivered: for each partition of which something counts now, the local offset behind it. refused: partitions of
    which the cluster does not take some record, and why. failed: partitions that it does not take at all, and why. With
    either of them a transaction has delivered nothing, and a new sender is needed.
    """

    delivered: Mapping[Partition, int]
    refused: Mapping[Partition, str] = attrs.field(factory=dict)
    failed: Mapping[Partition, str] = attrs.field(factory=dict)


class Sender(Protocol):
    """Ships one batch after the other."""

    def start(self, batch: Batch) -> None:
        """Begins to ship. RemoteUnavailableError, ProducerFencedError."""
        ...

    def wait(self, timeout_s: float) -> Outcome | None:
        """How the batch ended; None when that is not known after timeout_s.

        RemoteUnavailableError: the outcome is not known, and this sender is of no use any more. ProducerFencedError:
        another sender has its transactional id.
        """
        ...

    def close(self) -> None:
        """Gives up what is under way, and ends. Raises nothing."""
        ...


class TargetCluster(Protocol):
    """A cluster that records are shipped to."""

    def partition_counts(self, topics: Collection[str]) -> dict[str, int]:
        """How many partitions each of the topics has; those that do not exist are left out. RemoteUnavailableError."""
        ...

    def create_topics(self, wanted: Mapping[str, int]) -> None:
        """Makes topics with so many partitions, or adds partitions. RemoteUnavailableError, RemoteTopicError."""
        ...

    def transactional_sender(self, transactional_id: str, group_id: str) -> Sender:
        """A sender whose batches count wholly or not at all, with the progress of group_id in them; ends what another
        sender of that id left open, and fences it. RemoteUnavailableError, RemoteTopicError.
        """
        ...

    def plain_sender(self) -> Sender:
        """A sender that keeps the order of each partition, and may repeat what was under way when it was cut off."""
        ...

    def committed(self, group_id: str, partitions: Collection[Partition]) -> dict[Partition, Progress]:
        """The progress that was shipped, as far as its transactions have ended. RemoteUnavailableError."""
        ...

    def cluster_id(self) -> str: ...

    def pause(self, seconds: float) -> None:
        """Waits, at most so long."""
        ...

    def close(self) -> None: ...


class RemoteRecord(NamedTuple):
    """A record of a remote partition, with its place and the leader epoch it was written in (-1: not known)."""

    record: Record
    leader_epoch: int


@attrs.frozen
class Fetched:
    """The result of one fetch(). reached: partitions that were read to their end, and where that is: behind markers and
    aborted records too, of which there are no records to tell. lost: partitions whose position is not in what they
    hold, or that are gone; span() and topics() tell more.
    """

    records: Mapping[Partition, Sequence[RemoteRecord]]
    reached: Mapping[Partition, int]
    lost: Collection[Partition] = ()


@attrs.frozen
class RemoteTopic:
    """A topic of a remote cluster. topic_id: Kafka's id as text; empty where the cluster tells none. is_compacted: also
    where it is not known.
    """

    topic_id: str
    partitions: int
    is_compacted: bool


@attrs.frozen
class RemoteSpan:
    """The offsets in a remote partition: from log_start on, below log_end."""

    log_start: int
    log_end: int


class SourceCluster(Protocol):
    """A cluster that records are mirrored from. Errors as those of TargetCluster."""

    def topics(self, names: Collection[str]) -> dict[str, RemoteTopic]:
        """Those of the topics that exist."""
        ...

    def span(self, partition: Partition) -> RemoteSpan:
        """The offsets in a partition now. log_end: as far as fetch() reads it."""
        ...

    def fetch(self, positions: Mapping[Partition, int], timeout_s: float) -> Fetched:
        """Some records at and behind each position, in order; nothing of partitions that have none within timeout_s."""
        ...

    def committed(self, group_id: str, partitions: Collection[Partition]) -> dict[Partition, Progress]:
        """The offsets that a group has committed there."""
        ...

    def cluster_id(self) -> str: ...

    def pause(self, seconds: float) -> None:
        """Waits, at most so long."""
        ...

    def close(self) -> None: ...
