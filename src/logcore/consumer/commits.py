"""Commits of a consumer, and the errors when its group refuses them.

Rules:
- A commit is durable when it returns. A commit of a consumer that lost its partitions
  is refused and changes no offset.
- Commits are applied in the order of the calls. Commits of commit_async() are queued,
  and the next operation stores them together: another commit, a check of the group, or
  the end. Only these operations change the membership, so the commits are stored with
  the generation in which they were queued. Of several commits for a partition, only the
  last one is written.
- Auto-commit stores finished offsets, and skips partitions without new ones.
- Callbacks run inside calls of the consumer, in the order of the commits.
- No offset is committed for a topic that was deleted since it was read. A new topic of
  the same name begins without offsets.
- Offsets that could not be committed before partitions were given up are reported to
  the logger. The next owner processes those records again.

This module does not define the finished offsets (fetcher.py), does not give up
partitions (assignment.py), and does not choose the storage of offsets
(offset_stores.py).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import attrs

from logcore.callbacks import call
from logcore.consumer.group_member import GroupMember
from logcore.consumer.offset_stores import OffsetStores
from logcore.consumer.positions import ReadPositions
from logcore.consumer.settings import ConsumerSettings, GroupMetadata, OffsetAndMetadata
from logcore.consumer.topic_partition import TopicPartition
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    OffsetKey,
)
from logcore.deadlines import milliseconds
from logcore.errors import (
    CommitFailedError,
    ConsumerStateError,
    FencedInstanceError,
    InvalidConfigError,
    LogcoreError,
    RebalanceInProgressError,
    RegistryLockedError,
)
from logcore.format.group_records import Committed
from logcore.fs import FS
from logcore.reporting import WARNING, log_line

#: Called with None or the error of a commit_async(), and with its offsets.
OnCommit = Callable[
    [Exception | None, Mapping[TopicPartition, OffsetAndMetadata]], object
]
#: Maximum number of queued commits of commit_async(). With 1,000, a sync of 1 ms adds
#: 1 us to the 10 us of each commit.
_MAX_QUEUED: Final = 1_000
#: 68 years. A larger timeout is refused, because a lock cannot wait longer.
_MAX_TIMEOUT_SECONDS: Final = 2**31 - 1


@attrs.frozen
class _QueuedCommit:
    """A queued commit of commit_async()."""

    offsets: Mapping[TopicPartition, OffsetAndMetadata]
    callback: OnCommit | None


@attrs.define
class GroupMembership:
    """The membership of a consumer in its group."""

    group_id: str
    instance_id: str | None
    #: None while the consumer has no subscription.
    member: GroupMember | None = None
    #: Whether the current commits are the last ones of the consumer.
    is_leaving: bool = False

    def group_metadata(self) -> GroupMetadata:
        if self.member is None:
            return GroupMetadata(self.group_id, -1, "", None)
        return GroupMetadata(
            self.group_id,
            self.member.generation,
            self.member.member_id,
            self.instance_id,
        )

    def committer(self) -> Committer:
        """Return the group, generation and member id to send with a commit."""
        return Committer(*self.group_metadata(), is_leaving=self.is_leaving)

    def enter_generation(self) -> bool:
        """Call GroupMember.enter_generation(), or return False without a member."""
        return self.member is not None and self.member.enter_generation()


class Commits:
    """The commits of one consumer. `stores` is None without a group."""

    def __init__(
        self,
        fs: FS,
        settings: ConsumerSettings,
        read_positions: ReadPositions,
        membership: GroupMembership,
        stores: OffsetStores | None,
    ) -> None:
        self._fs = fs
        self._settings = settings
        self.is_of_deleted_topic = read_positions.is_of_another_topic
        self._read_positions = read_positions.by_partition
        self.membership = membership
        self._stores = stores
        self._next_auto_commit_ms = 0  # time of the next auto-commit
        self.stored = 0  # number of commits, for the metrics
        self.refused = 0
        # In FIFO order. With logcore.aio, the event loop appends while another thread
        # removes.
        self._queued: deque[_QueuedCommit] = deque()

    def _offsets(self) -> OffsetStores:
        if self._stores is None:
            raise ConsumerStateError(
                "this consumer has no group",
                expected="group_id in LogDir.consumer()",
                found=None,
            )
        return self._stores

    def committed(self) -> dict[OffsetKey, Committed]:
        """Return all committed offsets of the group, from all members."""
        return self._offsets().committed(str(self._settings.group_id))

    def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        timeout: float | None = None,
    ) -> None:
        """Commit offsets after the queued commits.

        While another process has locked the group, retry for `timeout` seconds.
        """
        self.store_queued()
        self._commit(offsets, timeout)

    def _commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        timeout: float | None = None,
    ) -> None:
        """Commit offsets, in the next generation if necessary.

        A member that keeps its partitions during a rebalance may commit in the
        generation that began after it joined. It enters that generation first.
        """
        error = self._store_in_time(offsets, timeout)
        is_outdated = error is GroupError.ILLEGAL_GENERATION
        if is_outdated and self.membership.enter_generation():
            error = self._store_in_time(offsets, timeout)
        if error is not None:
            raise self._commit_error(error)

    def _store_in_time(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout: float | None
    ) -> GroupError | None:
        """Commit offsets, and retry while the registry is locked, until the timeout.

        Each attempt waits for the lock of the group for the timeout of the registry.
        """
        until_ms = self._fs.monotonic_ms()
        if timeout is not None:
            if not 0 <= timeout <= _MAX_TIMEOUT_SECONDS:
                raise InvalidConfigError(
                    "timeout",
                    expected=f"seconds, 0 to {_MAX_TIMEOUT_SECONDS}",
                    found=repr(timeout),
                )
            until_ms += milliseconds(timeout)
        while True:
            try:
                return self._store(offsets)
            except RegistryLockedError:
                if self._fs.monotonic_ms() >= until_ms:
                    raise

    def add(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        callback: OnCommit | None,
    ) -> bool:
        """Queue a commit. Return whether the queue is full, so that the caller must call
        store_queued().

        Raises:
            ConsumerStateError: the consumer has no group.
        """
        self._offsets()
        self._queued.append(_QueuedCommit(dict(offsets), callback))
        return len(self._queued) >= _MAX_QUEUED

    @property
    def waiting(self) -> int:
        return len(self._queued)

    def store_queued(self) -> None:
        """Store the queued commits with one sync, and call their callbacks."""
        if not self._queued:
            return
        queued_commits: list[_QueuedCommit] = []
        chosen: dict[TopicPartition, OffsetAndMetadata] = {}
        while self._queued:
            queued_commit = self._queued.popleft()
            queued_commits.append(queued_commit)
            chosen.update(queued_commit.offsets)
        failure: Exception | None = None
        try:
            self._commit(chosen)
        except (LogcoreError, OSError) as error:
            failure = error
            if any(queued_commit.callback is None for queued_commit in queued_commits):
                self.log_uncommitted(chosen, error)
        for queued_commit in queued_commits:
            if queued_commit.callback is not None:
                call(queued_commit.callback, failure, queued_commit.offsets)

    def commit_from_other_thread(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> bool:
        """Commit in another thread than the thread that reads.

        The membership does not change. Return False while a new generation begins that
        the reading thread has not entered yet.
        """
        error = self._store(offsets)
        if error in (GroupError.REBALANCE_IN_PROGRESS, GroupError.ILLEGAL_GENERATION):
            return False
        if error is not None:
            raise self._commit_error(error)
        return True

    def _store(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> GroupError | None:
        stores = self._offsets()
        if not offsets:
            return None
        member = self.membership.member
        if member is not None and member.is_removed:
            # The member has no id, and a group without members would accept its commit.
            return GroupError.UNKNOWN_MEMBER_ID
        void = [
            partition for partition in offsets if self.is_of_deleted_topic(partition)
        ]
        if void:
            raise CommitFailedError(
                "the topic was deleted since its records were read; with this offset, the group would skip records of "
                "a new topic with the same name",
                found=", ".join(str(partition) for partition in void),
            )
        now_ms = self._fs.now_ms()
        rows: dict[OffsetKey, Committed] = {
            partition: Committed(
                offset.offset, offset.leader_epoch, offset.metadata, now_ms
            )
            for partition, offset in offsets.items()
        }
        error = stores.commit(self.membership.committer(), rows)
        if error is not None:
            self.refused += 1
            return error
        self.stored += 1
        for partition, offset in offsets.items():
            read_position = self._read_positions.get(partition)
            if read_position is not None:
                read_position.stored = offset.offset
        for interceptor in self._settings.interceptors:
            call(interceptor.on_commit, offsets)
        return None

    def _commit_error(self, error: GroupError) -> Exception:
        group = f"of group {self._settings.group_id!r}"
        match error:
            case GroupError.REBALANCE_IN_PROGRESS:
                return RebalanceInProgressError(
                    f"the partitions {group} are being reassigned: poll, then commit again"
                )
            case GroupError.FENCED_INSTANCE_ID:
                return FencedInstanceError(
                    f"another consumer {group} uses the same group_instance_id"
                )
            case GroupError.UNKNOWN_MEMBER_ID | GroupError.ILLEGAL_GENERATION:
                return CommitFailedError(
                    f"this consumer is not a member {group} any more, or is of an older generation; it did not poll "
                    f"within max_poll_interval_ms={self._settings.max_poll_interval_ms}, or the group has members and "
                    "this consumer is not one of them"
                )
            case _:
                failed = CommitFailedError(
                    f"offsets {group} were not stored: {error.name}"
                )
                failed.__cause__ = self._offsets().groups.failure
                return failed

    def finished_offsets(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets that auto-commit must store."""
        return {
            partition: OffsetAndMetadata(read_position.finished)
            for partition, read_position in self._read_positions.items()
            if read_position.finished is not None
            and read_position.finished != read_position.stored
            and not self.is_of_deleted_topic(partition)
        }

    def commit_finished(self, timeout: float | None = None) -> None:
        """Commit finished offsets before partitions are revoked.

        If the group refuses the commit, the next owner processes the records again.
        """
        if self._stores is None:
            return
        self.store_queued()
        if not self._settings.enable_auto_commit:
            return
        offsets = self.finished_offsets()
        try:
            self._commit(offsets, timeout)
        except (
            CommitFailedError,
            RebalanceInProgressError,
            FencedInstanceError,
        ) as error:
            self.log_uncommitted(offsets, error)

    def log_uncommitted(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], reason: object
    ) -> None:
        """Log offsets that were processed but not committed.

        Their records are processed again.
        """
        group_id = self._settings.group_id
        for partition, offset in offsets.items():
            text = (
                "group %s: %s was processed up to offset %d, which is not committed: %s"
            )
            log_line(
                "consumer", WARNING, text, group_id, partition, offset.offset, reason
            )

    def commit_when_due(self) -> None:
        """Run auto-commit every auto_commit_interval_ms."""
        settings = self._settings
        if self._stores is None or not settings.enable_auto_commit:
            return
        now_ms = self._fs.monotonic_ms()
        if not self._next_auto_commit_ms:
            self._next_auto_commit_ms = now_ms + settings.auto_commit_interval_ms
        if now_ms >= self._next_auto_commit_ms:
            self._next_auto_commit_ms = now_ms + settings.auto_commit_interval_ms
            # After a refusal, the offsets are committed again before the revocation.
            with contextlib.suppress(
                CommitFailedError, RebalanceInProgressError, FencedInstanceError
            ):
                self.commit(self.finished_offsets())
