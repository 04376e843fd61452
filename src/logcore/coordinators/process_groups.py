"""The base of LocalGroups and SharedGroups, the groups of a directory without a broker.

It contains the calls that wait for a result, the listeners, and the choice of the
partition of `__consumer_offsets` for a group.

The two subclasses execute the effects (local_groups.py, shared_groups.py).
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Final

from logcore.coordination.classic_group import Group
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.effects import (
    AppendRecords,
    Effect,
)
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    OffsetKey,
    Rules,
    Waiter,
)
from logcore.coordination.offsets import forget_topics
from logcore.coordinators.durable_queue import DurableQueue
from logcore.coordinators.group_host import GroupHost
from logcore.coordinators.pending_result import PendingResult
from logcore.coordinators.stored_offsets import OFFSETS_CONFIG, stored_groups
from logcore.directory.interface import ClientDirectory
from logcore.errors import ConsumerStateError, DurabilityUnknownError
from logcore.format.group_records import Committed, partition_of
from logcore.fs import FS
from logcore.kernels import Receipt
from logcore.kernels.layout import Level, RecordInput
from logcore.log import Log
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.partition.coordinator_append import (
    append_atomically,
    append_to_transaction,
)
from logcore.reporting import ERROR, log_line

#: The protocol stores timeouts in 32 bits.
_LONGEST_MS: Final = 2**31 - 1


class ProcessGroups(GroupHost[PendingResult]):
    """All groups of one directory. The first consumer with a group creates this object.

    Any thread may call the methods. Requests whose records could not be stored get
    COORDINATOR_NOT_AVAILABLE.
    """

    def __init__(self, fs: FS, directory: ClientDirectory) -> None:
        self._fs = fs
        self._directory = directory
        self._lock = threading.RLock()
        self._unsynced = DurableQueue(self._lock)
        self._listeners: tuple[Callable[[], None], ...] = ()
        #: Limits for the requests of this process. A session may be shorter and longer
        #: than in Kafka, whose limits are 6 s and 30 minutes.
        self.rules = Rules(min_session_timeout_ms=1, max_session_timeout_ms=_LONGEST_MS)
        #: The latest error of storing records. It is written under the lock.
        self.failure: Exception | None = None

    def offsets_partition(self, group_id: str) -> tuple[str, int]:
        """Return the partition of a group's offsets, and create the topic if necessary.

        Raises:
            LogcoreError: the topic could not be created.
        """
        return offsets_partition_of(self._directory, group_id)

    # -- listeners

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a group may have changed.

        It runs in the thread that detects the change.
        """
        with self._lock:
            # A new tuple, because _notify_listeners() may iterate in another thread.
            self._listeners = (*self._listeners, listener)

    def forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = tuple(
                known for known in self._listeners if known is not listener
            )

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    # -- time

    @abstractmethod
    def now_ms(self) -> int:
        """Return the time of the groups."""

    @abstractmethod
    def poll(self) -> None:
        """Act on deadlines that have passed."""

    @abstractmethod
    def next_ms(self) -> int | None:
        """Return the time of the next deadline, in terms of now_ms(), or None."""

    # -- requests

    def absent(self, group_id: str, member_id: str) -> None:
        """Mark a static member as closed. It may return."""
        self.step(
            group_id,
            lambda coordinator, now_ms: coordinator.absent(
                group_id, [member_id], now_ms
            ),
        )

    @abstractmethod
    def withdraw(self, group_id: str, joining: PendingResult) -> None:
        """Remove the member whose request to join waits for this result.

        This has no effect once the request is answered.
        """

    @abstractmethod
    def commit(
        self,
        committer: Committer,
        offsets: Mapping[OffsetKey, Committed],
        producer: tuple[int, int] | None = None,
    ) -> GroupError | None:
        """Commit offsets as request_commit() does, and return the result."""

    @abstractmethod
    def committing(
        self, committer: Committer
    ) -> AbstractContextManager[GroupError | None]:
        """Check a commit of offsets that are stored elsewhere.

        Yield the reason why this member may not commit now, or None. The group does not
        change inside the `with` block.
        """

    @abstractmethod
    def committed(self, group_id: str) -> dict[OffsetKey, Committed]:
        """Return all durable committed offsets of a group, from all processes."""

    @abstractmethod
    def unstable(self, group_id: str) -> set[OffsetKey]:
        """Return the partitions with offsets in open transactions."""

    def common_protocols(self, group_id: str) -> set[str]:
        """Return the names of the assignors that all members of a group support."""
        with self._lock:
            group = self._present(group_id)
            if group is None or not group.members:
                return set()
            return group.common_protocols()

    @abstractmethod
    def _present(self, group_id: str) -> Group | None:
        """Return a group, possibly without its offsets. The lock is held."""

    def rewind(
        self, group_id: str, offsets: Mapping[OffsetKey, Committed]
    ) -> GroupError | None:
        """Commit offsets for a group that has members.

        The same transition removes the members, so that none of their commits can
        overwrite the offsets. The members join again and begin at these offsets.
        """
        pending = PendingResult()

        def rewind(
            coordinator: Coordinator, waiter: Waiter, now_ms: int
        ) -> list[Effect]:
            return coordinator.rewind(group_id, offsets, waiter, now_ms)

        self.request(group_id, rewind, pending)
        return self._result_of(pending)

    def delete(self, group_id: str) -> GroupError | None:
        """Delete a group without members, with its offsets, or return the error."""
        pending = PendingResult()
        # The answer follows the sync of the tombstones.
        self.request_delete(group_id, pending)
        return self._result_of(pending)

    def _result_of(self, pending: PendingResult) -> GroupError | None:
        # One thread stores the records of several threads. If it is interrupted, it is
        # unknown whether the records of the other threads were written.
        if not pending.is_done:
            raise DurabilityUnknownError(
                "the thread that stored the records of this request was interrupted: they may be stored or not",
                path=self._directory.path,
            )
        result: GroupError | None = pending.result
        return result

    @abstractmethod
    def forget_topics(self, names: set[str]) -> None:
        """Delete the committed offsets of deleted topics.

        A new topic of the same name begins without them.

        Raises:
            ConsumerStateError: the deletion could not be stored.
        """

    @abstractmethod
    def expire_offsets(self) -> None:
        """Delete committed offsets whose retention is over. Call this about every ten
        minutes.
        """

    @abstractmethod
    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        """Handle the marker of a producer in `__consumer_offsets`."""

    @abstractmethod
    def close(self) -> None:
        """Release the members of this process."""

    def _not_stored(self, group_id: str, error: Exception) -> GroupError:
        """Record and log that a record was not stored. The lock is held."""
        self.failure = error
        log_line(
            "groups",
            ERROR,
            "%s: a record of group %r was not stored: %s",
            OFFSETS_TOPIC,
            group_id,
            error,
        )
        return GroupError.COORDINATOR_NOT_AVAILABLE


def offsets_partition_of(directory: ClientDirectory, group_id: str) -> tuple[str, int]:
    """Return the partition of a group's offsets, and create the topic if necessary.

    Raises:
        LogcoreError: the topic could not be created.
    """
    # One partition is enough for one directory. The partition count of an existing
    # topic does not change, because Kafka's clients use it to find a group's partition.
    directory.create_topic(OFFSETS_TOPIC, 1, OFFSETS_CONFIG, exist_ok=True)
    return present_offsets_partition_of(directory, group_id)


def present_offsets_partition_of(
    directory: ClientDirectory, group_id: str
) -> tuple[str, int]:
    """Return the partition of a group's offsets in the present topic.

    Raises:
        TopicNotFoundError: the topic does not exist.
    """
    return OFFSETS_TOPIC, partition_of(
        group_id, directory.partitions(OFFSETS_TOPIC)[-1] + 1
    )


def append(
    log: Log, rows: list[RecordInput], producer: tuple[int, int] | None, level: Level
) -> Receipt:
    """Append the records of an AppendRecords effect.

    Raises:
        LogcoreError: Log.append() failed.
        InvalidProducerEpochError: the producer was fenced.
    """
    if producer is None:
        return append_atomically(log.host.writer, rows, durability=level)
    return append_to_transaction(log.host.writer, rows, *producer, durability=level)


def check_offsets_deleted(
    results: Iterable[GroupError | None], failure: Exception | None
) -> None:
    """Raise ConsumerStateError unless the offsets of deleted topics were deleted."""
    error = next((result for result in results if result is not None), None)
    if error is not None:
        raise ConsumerStateError(
            "offsets of a deleted topic were not deleted", found=error.name
        ) from failure


def forget_stored(directory: ClientDirectory, topics: set[str]) -> None:
    """Delete the committed offsets of topics from the log only.

    The deletion is durable when this function returns.

    Raises:
        LogcoreError: the log could not be read or appended to.
    """
    if OFFSETS_TOPIC not in directory:
        return
    for number in directory.partitions(OFFSETS_TOPIC):
        log = directory.partition(OFFSETS_TOPIC, number)
        found = stored_groups([log])
        # Offsets in open transactions count, because their commit would restore them.
        for group_id in {**found.offsets, **found.unstable}:
            group = Group(
                group_id,
                offsets=found.offsets.get(group_id, {}),
                unstable=found.unstable.get(group_id, {}),
            )
            for effect in forget_topics(group, topics):
                assert isinstance(effect, AppendRecords), "no request waits"
                append(
                    log,
                    [(key, value, (), None) for key, value in effect.records],
                    None,
                    "os",
                )
        # One sync for the tombstones of all groups.
        log.flush()
