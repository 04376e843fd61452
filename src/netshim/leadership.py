"""What handlers need to know about the replicas of a partition.

SoleLeadership is for a broker without a cluster: it leads every partition, and a record
is committed once it is as durable as the policy promises. The brokers of a cluster use
cluster/replicas.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from logcore import Log, LogcoreError, NotLeaderError
from logcore.metadata.checkpoint import Key
from logcore.replication.leading import FetchRefusal, FollowerFetch
from netshim.fetch_wakeups import WaitingFetches
from netshim.scheduling import Syncs

#: Called with None, or with the error.
WhenCommitted = Callable[[LogcoreError | None], None]


class Leadership(ABC):
    """The partitions that a broker leads, and the records in them that are committed."""

    #: Whether there may be other brokers.
    is_clustered = True

    #: Number of appends since the start.
    appends = 0
    #: Number of changes of in-sync replicas.
    isr_changes = 0
    #: Number of times that this broker began to lead a partition.
    elections = 0

    #: A number that changes with the role or the state of any partition.
    version = 0

    @abstractmethod
    def is_leader(self, key: Key) -> bool:
        """Return whether this broker leads the partition."""

    def check_leader(self, key: Key) -> None:
        """Raise NotLeaderError unless this broker leads the partition."""
        if not self.is_leader(key):
            raise NotLeaderError("another broker leads this partition, or none")

    @abstractmethod
    def check_serves(self, key: Key, leader_epoch: int) -> None:
        """Raise NotLeaderError unless a consumer may fetch the partition here.

        A follower serves requests with a leader epoch, which shows that the client
        expects a replica. `leader_epoch` is -1 in other requests.
        """

    @abstractmethod
    def check_in_sync(self, key: Key) -> None:
        """Raise NotEnoughReplicasError if no append with acks=all is accepted."""

    @abstractmethod
    def leader_epoch(self, key: Key, log: Log) -> int:
        """Return the leader epoch of a partition with a replica here."""

    @abstractmethod
    def is_high_watermark_current(self, key: Key) -> bool:
        """Return whether the high watermark includes all committed records.

        A new leader knows that once the records of earlier epochs are committed again.
        """

    @abstractmethod
    def appended(self, key: Key, log: Log, end: int, now_ms: int) -> None:
        """Handle an append of this broker: wake fetches when records are visible."""

    @abstractmethod
    def is_committed(self, log: Log, end: int) -> bool:
        """Return whether an append up to `end` may be acknowledged with acks=all."""

    @abstractmethod
    def when_committed(
        self,
        key: Key,
        log: Log,
        end: int,
        callback: WhenCommitted,
        deadline_ms: int | None = None,
    ) -> None:
        """Call callback(None) when an append up to `end` may be acknowledged with acks=all.

        Call callback(error) if this broker no longer leads, if a sync fails, or at the
        deadline. The records may be committed nevertheless.
        """

    @abstractmethod
    def when_safe(self, key: Key, log: Log, end: int, callback: WhenCommitted) -> None:
        """Call callback(None) when an append of the broker itself is safe.

        In a cluster, it is then committed. Otherwise, it is durable if the durability
        policy makes an append wait for the disk.
        """

    @abstractmethod
    def follower_fetched(
        self, key: Key, log: Log, fetch: FollowerFetch
    ) -> FetchRefusal | None:
        """Record the position of a follower. Return why it gets no records, or None."""

    @abstractmethod
    def is_in_sync(self, key: Key, replica: int) -> bool:
        """Return whether a follower belongs to the in-sync replicas."""

    @abstractmethod
    def must_send_high_watermark(
        self, key: Key, replica: int, high_watermark: int, *, has_records: bool
    ) -> bool:
        """Return whether a follower gets this high watermark now.

        It always does in a response with records.
        """


class SoleLeadership(Leadership):
    """A broker that has no other replicas."""

    is_clustered = False

    def __init__(self, fetches: WaitingFetches, syncs: Syncs) -> None:
        self._fetches = fetches
        self._syncs = syncs

    def is_leader(self, key: Key) -> bool:
        return True

    def check_serves(self, key: Key, leader_epoch: int) -> None:
        pass

    def check_in_sync(self, key: Key) -> None:
        pass

    def leader_epoch(self, key: Key, log: Log) -> int:
        return log.leader_epoch

    def is_high_watermark_current(self, key: Key) -> bool:
        return True

    def appended(self, key: Key, log: Log, end: int, now_ms: int) -> None:
        self.appends += 1
        self._fetches.appended(*key, log, end, now_ms)

    def is_committed(self, log: Log, end: int) -> bool:
        # Without replicas, only the durability policy decides.
        return not log.durability.waits or log.durable_end_offset >= end

    def when_committed(
        self,
        key: Key,
        log: Log,
        end: int,
        callback: WhenCommitted,
        deadline_ms: int | None = None,
    ) -> None:
        self._syncs.when_durable(log, end, callback)

    def when_safe(self, key: Key, log: Log, end: int, callback: WhenCommitted) -> None:
        self._syncs.when_safe(log, end, callback)

    def follower_fetched(
        self, key: Key, log: Log, fetch: FollowerFetch
    ) -> FetchRefusal | None:
        raise AssertionError("a broker without a cluster has no followers")

    def is_in_sync(self, key: Key, replica: int) -> bool:
        return False

    def must_send_high_watermark(
        self, key: Key, replica: int, high_watermark: int, *, has_records: bool
    ) -> bool:
        return has_records
