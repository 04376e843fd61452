"""Commits of a consumer, and the errors when its group refuses them.

Rules:
- A commit is durable when it returns. A commit of a consumer that lost its partitions
  is refused and changes no offset.
- Commits are applied in the order of the calls. Those of commit_async() are queued and
  stored together by the next operation: another commit, a check of the group, or the
  end. No other operation changes the place in the group, so they are commits of the
  member that made them. Of several for one partition only the last is written, because
  no reader could have seen the others.
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
from logcore.consumer.positions import Readings
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
#: Maximum number of queued commits of commit_async(). With a thousand, a sync of 1 ms
#: costs each commit 1 us. The rest of a commit costs 10 us.
_MAX_WAITING: Final = 1_000
#: 68 years. A caller that passes more probably means no timeout.
_LONGEST_SECONDS: Final = 2**31 - 1


@attrs.frozen
class _Waiting:
    """A queued commit of commit_async()."""

    offsets: Mapping[TopicPartition, OffsetAndMetadata]
    callback: OnCommit | None


@attrs.define
class GroupPlace:
    """A consumer's place in its group."""

    group_id: str
    instance_id: str | None
    #: None while the consumer has no subscription.
    member: GroupMember | None = None
    #: The commits that the consumer makes now are its last ones.
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
        """Return the identity for a commit: group, generation and member."""
        return Committer(*self.group_metadata(), is_leaving=self.is_leaving)

    def enter_generation(self) -> bool:
        """Call GroupMember.enter_generation() of the member, if there is one."""
        return self.member is not None and self.member.enter_generation()


class Commits:
    """The commits of one consumer.

    `readings` are its read positions, `place` is its identity, and `stores` is None
    without a group.
    """

    def __init__(
        self,
        fs: FS,
        settings: ConsumerSettings,
        readings: Readings,
        place: GroupPlace,
        stores: OffsetStores | None,
    ) -> None:
        self._fs = fs
        self._settings = settings
        self.is_void = readings.is_of_another_topic
        self._readings = readings.by_partition
        self.place = place
        self._stores = stores
        self._due_ms = 0  # time of the next auto-commit
        self.stored = 0  # number of commits, for the metrics
        self.refused = 0
        # The oldest first; an event loop may append while its thread removes.
        self._waiting: deque[_Waiting] = deque()

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
        chosen: Mapping[TopicPartition, OffsetAndMetadata],
        timeout: float | None = None,
    ) -> None:
        """Commit offsets after the queued commits.

        While another process holds the group, retry for `timeout` seconds.
        """
        self.store_queued()
        self._commit(chosen, timeout)

    def _commit(
        self,
        chosen: Mapping[TopicPartition, OffsetAndMetadata],
        timeout: float | None = None,
    ) -> None:
        """Commit offsets, in the next generation if necessary.

        A member that keeps its partitions during a rebalance may commit for the
        generation that began since it joined. It enters that generation first.
        """
        error = self._store_in_time(chosen, timeout)
        is_outdated = error is GroupError.ILLEGAL_GENERATION
        if is_outdated and self.place.enter_generation():
            error = self._store_in_time(chosen, timeout)
        if error is not None:
            raise self._refusal(error)

    def _store_in_time(
        self, chosen: Mapping[TopicPartition, OffsetAndMetadata], timeout: float | None
    ) -> GroupError | None:
        """Commit offsets, and retry while the registry is locked, until the timeout.

        Each attempt waits for the lock of the group as long as the registry does.
        """
        until_ms = self._fs.monotonic_ms()
        if timeout is not None:
            if not 0 <= timeout <= _LONGEST_SECONDS:
                raise InvalidConfigError(
                    "timeout",
                    expected=f"seconds, 0 to {_LONGEST_SECONDS}",
                    found=repr(timeout),
                )
            until_ms += milliseconds(timeout)
        while True:
            try:
                return self._store(chosen)
            except RegistryLockedError:
                if self._fs.monotonic_ms() >= until_ms:
                    raise

    def add(
        self,
        chosen: Mapping[TopicPartition, OffsetAndMetadata],
        callback: OnCommit | None,
    ) -> bool:
        """Queue a commit, and return whether store_queued() is due because the queue is long.

        Raises:
            ConsumerStateError: the consumer has no group.
        """
        self._offsets()
        self._waiting.append(_Waiting(dict(chosen), callback))
        return len(self._waiting) >= _MAX_WAITING

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def store_queued(self) -> None:
        """Store the queued commits with one sync, and call their callbacks."""
        if not self._waiting:
            return
        taken: list[_Waiting] = []
        chosen: dict[TopicPartition, OffsetAndMetadata] = {}
        while self._waiting:
            waiting = self._waiting.popleft()
            taken.append(waiting)
            chosen.update(waiting.offsets)
        failure: Exception | None = None
        try:
            self._commit(chosen)
        except (LogcoreError, OSError) as error:
            failure = error
            if any(waiting.callback is None for waiting in taken):
                self.log_uncommitted(chosen, error)
        for waiting in taken:
            if waiting.callback is not None:
                call(waiting.callback, failure, waiting.offsets)

    def commit_elsewhere(
        self, chosen: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> bool:
        """Commit from another thread than the reading one.

        The place in the group does not change. Return False while a new generation
        begins that the reading thread has not entered yet. Otherwise, this is commit().
        """
        error = self._store(chosen)
        if error in (GroupError.REBALANCE_IN_PROGRESS, GroupError.ILLEGAL_GENERATION):
            return False
        if error is not None:
            raise self._refusal(error)
        return True

    def _store(
        self, chosen: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> GroupError | None:
        stores = self._offsets()
        if not chosen:
            return None
        member = self.place.member
        if member is not None and member.is_removed:
            # The member has no id now. A group without members would accept the commit.
            return GroupError.UNKNOWN_MEMBER_ID
        void = [partition for partition in chosen if self.is_void(partition)]
        if void:
            raise CommitFailedError(
                "the topic was deleted since its records were read; an offset of it would make the group pass over "
                "records of a new topic of that name",
                found=", ".join(str(partition) for partition in void),
            )
        now_ms = self._fs.now_ms()
        rows: dict[OffsetKey, Committed] = {
            partition: Committed(each.offset, each.leader_epoch, each.metadata, now_ms)
            for partition, each in chosen.items()
        }
        error = stores.commit(self.place.committer(), rows)
        if error is not None:
            self.refused += 1
            return error
        self.stored += 1
        for partition, each in chosen.items():
            reading = self._readings.get(partition)
            if reading is not None:
                reading.stored = each.offset
        for interceptor in self._settings.interceptors:
            call(interceptor.on_commit, chosen)
        return None

    def _refusal(self, error: GroupError) -> Exception:
        group = f"of group {self._settings.group_id!r}"
        match error:
            case GroupError.REBALANCE_IN_PROGRESS:
                return RebalanceInProgressError(
                    f"the partitions {group} are being divided: poll, then commit again"
                )
            case GroupError.FENCED_INSTANCE_ID:
                return FencedInstanceError(
                    f"another consumer took the place of this one {group}"
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

    def finished(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets that auto-commit must store."""
        return {
            partition: OffsetAndMetadata(reading.finished)
            for partition, reading in self._readings.items()
            if reading.finished is not None
            and reading.finished != reading.stored
            and not self.is_void(partition)
        }

    def commit_finished(self, timeout: float | None = None) -> None:
        """Commit finished offsets before partitions are given up.

        If the group refuses the commit, the next owner processes the records again. A
        failing disk is reported by local_groups.py.
        """
        if self._stores is None:
            return
        self.store_queued()
        if not self._settings.enable_auto_commit:
            return
        chosen = self.finished()
        try:
            self._commit(chosen, timeout)
        except (
            CommitFailedError,
            RebalanceInProgressError,
            FencedInstanceError,
        ) as error:
            self.log_uncommitted(chosen, error)

    def log_uncommitted(
        self, chosen: Mapping[TopicPartition, OffsetAndMetadata], reason: object
    ) -> None:
        """Log offsets that were processed but not committed.

        Their records are processed again.
        """
        group_id = self._settings.group_id
        for partition, each in chosen.items():
            text = (
                "group %s: %s was processed up to offset %d, which is not committed: %s"
            )
            log_line(
                "consumer", WARNING, text, group_id, partition, each.offset, reason
            )

    def commit_when_due(self) -> None:
        """Run auto-commit every auto_commit_interval_ms."""
        settings = self._settings
        if self._stores is None or not settings.enable_auto_commit:
            return
        now_ms = self._fs.monotonic_ms()
        if not self._due_ms:
            self._due_ms = now_ms + settings.auto_commit_interval_ms
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + settings.auto_commit_interval_ms
            # Refused offsets are stored before the partitions are given up.
            with contextlib.suppress(
                CommitFailedError, RebalanceInProgressError, FencedInstanceError
            ):
                self.commit(self.finished())
