"""A consumer reads partitions, alone or in a group, and keeps its positions.

Rules (clients reference 5):
- Each partition has two offsets: `position` follows the last record that was returned,
  and `finished` follows the last record that was processed. The records of one poll()
  are finished at the next poll(). A record of the iteration is finished when the loop
  requests the next one. A `with` block that ends without an exception finishes all
  records.
- commit() stores positions, because its caller confirms that all records are processed.
  Auto-commit stores finished offsets only.
- A commit is durable when commit() returns. If the consumer lost its partitions, the
  commit is refused and has no effect.
- A consumer starts no thread. To keep it in its group, the user calls poll() at least
  every max_poll_interval_ms.

This module does not choose the partitions (assignment.py) or the next records
(fetcher.py). It does not divide partitions in a group (group_member.py, assignors.py) or
store offsets (local_groups.py).
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, Self, TypeVar

from logcore.consumer.assignment import Assignment
from logcore.consumer.change_watch import ChangeWatch
from logcore.consumer.commits import Commits, GroupMembership, OnCommit
from logcore.consumer.fetcher import (
    MAX_COLUMN_BYTES,
    Fetcher,
    check_at_least_1,
    columns_of,
    position_error,
)
from logcore.consumer.offset_stores import OffsetStores
from logcore.consumer.positions import Move, PartitionPosition, ReadPositions
from logcore.consumer.registry_identity import Registration
from logcore.consumer.settings import (
    ConsumerMetrics,
    ConsumerRecords,
    ConsumerSettings,
    GroupMetadata,
    OffsetAndMetadata,
    RebalanceListener,
    checked_offset,
    intercepted,
    topic_pattern,
)
from logcore.consumer.topic_partition import TopicPartition
from logcore.coordinators.process_groups import ProcessGroups
from logcore.coordinators.shared_groups import SharedGroups
from logcore.deadlines import milliseconds
from logcore.directory.interface import ClientDirectory
from logcore.errors import (
    CommitFailedError,
    ConsumerBusyError,
    ConsumerStateError,
    ForkedWriterError,
    InvalidConfigError,
    NoOffsetError,
    RebalanceInProgressError,
    WakeupError,
)
from logcore.format.columns import RecordColumns
from logcore.format.group_records import Committed
from logcore.fs import FS
from logcore.kernels import TopicRecord
from logcore.log import Log
from logcore.metadata.checkpoint import PartitionKey
from logcore.registry import Registry
from logcore.registry.paths import Pattern

if TYPE_CHECKING:
    import pyarrow

_T = TypeVar("_T")
#: Partition -> the next offset to process.
Offsets = Mapping[PartitionKey, int | OffsetAndMetadata]
#: Maximum time between two checks for changes, in case no event wakes the consumer.
_CHECK_SECONDS: Final = 1.0
#: The same interval in a shared directory, if no event reports the death of another
#: process.
_CHECK_SHARED_SECONDS: Final = 0.05
#: Number and interval of the attempts of commit_from_other_thread() during a rebalance.
_OTHER_THREAD_ATTEMPTS: Final = 100
_OTHER_THREAD_SECONDS: Final = 0.1


class Consumer:
    """A consumer of one or more partitions. LogDir.consumer() creates it.

    A `with` block closes it. Only one thread at a time may use it; any thread may call
    wakeup().
    """

    def __init__(
        self,
        fs: FS,
        directory: ClientDirectory,
        groups: ProcessGroups | None,
        settings: ConsumerSettings,
        registry: Registry | None = None,
    ) -> None:
        """Initialize a consumer. Users call LogDir.consumer() instead.

        `registry` stores committed offsets in addition to the log, or instead of it.
        """
        self._fs = fs
        self._directory = directory
        self._is_read_only = directory.is_read_only
        self._is_shared = directory.is_shared
        self._groups = groups
        self._settings = settings
        self._membership = GroupMembership(
            str(settings.group_id), settings.group_instance_id
        )
        # Weak, because logs and groups hold this callback longer than the user holds
        # the consumer.
        weak_wake = weakref.WeakMethod(self._wake)
        self._wake_callback = functools.partial(_call_if_alive, weak_wake)
        read_positions = ReadPositions(
            directory, self._wake_callback, is_read_only=self._is_read_only
        )
        self._read_positions: Mapping[TopicPartition, PartitionPosition] = (
            read_positions.by_partition
        )
        self._is_closed = False
        self._checks = 0
        # Reentrant, because a listener may seek and commit during poll().
        self._use_lock = threading.RLock()
        self._change_condition = threading.Condition()
        self._has_changed = False
        self._is_woken = False
        self._changes = ChangeWatch(fs)
        self._forks = fs.forks
        if groups is not None:
            groups.listen(self._wake_callback)
        self._fetcher = Fetcher(
            fs,
            self._read_positions,
            settings,
            is_read_only=self._is_read_only,
            is_shared=self._is_shared,
        )
        stores: OffsetStores | None = None
        if groups is not None:
            stores = OffsetStores(
                groups, registry, settings.offsets_storage, settings.dual_commit
            )
        self._commits = Commits(fs, settings, read_positions, self._membership, stores)
        self._assignment = Assignment(
            fs, directory, settings, groups, read_positions, self._commits
        )

    # -- opening and closing -----------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(is_done=kind is None)

    def __del__(self) -> None:
        is_open = not getattr(self, "_is_closed", True)
        if (
            is_open
            and self._groups is not None
            and self._read_positions
            and self._fs.forks == self._forks
        ):
            # No lock is acquired here: the garbage collector runs in any thread, at any
            # point.
            message = f"a consumer of group {self._settings.group_id!r} was not closed"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = (
            "closed" if self._is_closed else f"{len(self._read_positions)} partitions"
        )
        return f"<Consumer of group {self._settings.group_id}, {state}>"

    def close(self, timeout: float | None = None) -> None:
        """Finish all returned records and leave the group.

        If auto-commit is on, the records are committed. `timeout` has the meaning of
        commit().
        """
        self._close(is_done=True, timeout=timeout)

    def leave_unfinished(self) -> None:
        """Close the consumer without finishing the records returned last.

        The caller may still be processing them. In all other respects, this is close().
        """
        self._close(is_done=False)

    def _close(self, *, is_done: bool, timeout: float | None = None) -> None:
        with self._exclusively(refuse_in_listener=True):
            if self._is_closed:
                return
            # In a forked child: the parent is the member and commits.
            if self._fs.forks != self._forks:
                self._is_closed = True
                return
            if is_done:
                self._fetcher.finish()
            try:
                self._assignment.leave(timeout)
            except Exception:
                self._end()
                raise
            self._end()  # not after an interrupt, so that another close() continues

    def _end(self) -> None:
        self._changes.close()
        self._assignment.end()
        if self._groups is not None:
            self._groups.forget(self._wake_callback)
        self._is_closed = True

    @contextlib.contextmanager
    def _exclusively(
        self, *, refuse_in_listener: bool = False
    ) -> Generator[None, None, None]:
        """Exclude other threads while a method runs.

        With `refuse_in_listener`, a call by a listener is refused.
        """
        if not self._use_lock.acquire(blocking=False):
            raise ConsumerBusyError(
                "a consumer is used by one thread at a time, and another uses this one"
            )
        try:
            if refuse_in_listener and self._assignment.is_calling_listener:
                raise ConsumerStateError(
                    "a listener may seek and commit, and not poll, subscribe, assign or close"
                )
            yield
        finally:
            self._use_lock.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConsumerStateError("the consumer is closed")
        # Threads of the parent may hold locks of the groups forever.
        if self._fs.forks != self._forks:
            raise ForkedWriterError(
                "the consumer was opened by a parent process; make another in the child"
            )

    # -- subscription ------------------------------------------------------------------

    def subscribe(
        self,
        topics: Iterable[str] = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """Subscribe to topics.

        Their partitions are divided among the members of the group. Without a group,
        the consumer reads all partitions. With `pattern`, it subscribes to all topics
        whose whole name matches, as in Kafka's Java client. Kafka's internal topics are
        excluded, unless exclude_internal_topics=False. The call replaces the previous
        subscription. Topics that do not exist yet are read once they are created.
        """
        if isinstance(topics, str):
            raise InvalidConfigError(
                "topics is a list of names",
                expected=f"[{topics!r}]",
                found=repr(topics),
            )
        wanted = frozenset(topics)
        if bool(wanted) == (pattern is not None):
            raise InvalidConfigError("either topics or a pattern is subscribed to")
        compiled = (
            None
            if pattern is None
            else topic_pattern("the pattern of subscribe()", pattern)
        )
        with self._exclusively(refuse_in_listener=True):
            self._check_open()
            self._assignment.subscribe(wanted, compiled, listener)

    def register_with(
        self,
        of: Registration | None,
        number: int,
        subscription: Mapping[str, int],
        pattern: Pattern,
    ) -> Registration | None:
        """Register a stream of a connector before it subscribes.

        All streams of a connector are one consumer in the registry. The caller passes
        the first stream's registration to the others. Return the registration, or None
        without a registry.
        """
        return self._assignment.register_with(of, number, subscription, pattern)

    def unsubscribe(self) -> None:
        """Give up all partitions and leave the group."""
        with self._exclusively(refuse_in_listener=True):
            self._check_open()
            self._assignment.unsubscribe()

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read these partitions, independently of any group.

        Raises:
            TopicNotFoundError: a partition does not exist.
            ConsumerStateError: the consumer has subscribed to topics.
        """
        wanted = frozenset(TopicPartition(*partition) for partition in partitions)
        with self._exclusively(refuse_in_listener=True):
            self._check_open()
            self._assignment.assign(wanted)

    def subscription(self) -> frozenset[str]:
        """Return the subscribed topics, or the topics that match the pattern now."""
        return self._assignment.subscription()

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions that this consumer reads now."""
        return frozenset(self._read_positions)

    def pause(self, *partitions: tuple[str, int]) -> None:
        """Make poll() skip these partitions until resume()."""
        for partition in partitions:
            read_position = self._read_position(partition)
            read_position.is_paused = True
            read_position.drop()  # ends an iteration

    def resume(self, *partitions: tuple[str, int]) -> None:
        for partition in partitions:
            self._read_position(partition).is_paused = False

    def paused(self) -> frozenset[TopicPartition]:
        # A copy, because another thread may remove some; see logcore.aio.
        read_positions = list(self._read_positions.items())
        return frozenset(
            partition
            for partition, read_position in read_positions
            if read_position.is_paused
        )

    def _read_position(self, partition: tuple[str, int]) -> PartitionPosition:
        self._check_open()
        found = self._read_positions.get(TopicPartition(*partition))
        if found is None:
            raise ConsumerStateError(
                "this consumer does not read that partition",
                expected=f"one of {sorted(self._read_positions)}",
                found=tuple(partition),
            )
        return found

    # -- positions ---------------------------------------------------------------------

    def position(self, partition: tuple[str, int]) -> int:
        """Return the offset of the next record that poll() returns.

        Raises:
            NoOffsetError: an open transaction may still commit an offset.
        """
        with self._exclusively():
            self._set_missing_positions([TopicPartition(*partition)])
            return self._known_position(self._read_position(partition))

    def _known_position(self, read_position: PartitionPosition) -> int:
        if read_position.position is None:
            raise NoOffsetError(
                "an open transaction may commit an offset of this partition: poll until it has ended",
                path=read_position.log.path,
            )
        return read_position.position

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Continue from an offset. The next poll() checks whether the log contains it."""
        with self._exclusively():
            self._position_to_seek(partition, offset).seek_to(offset)

    def _position_to_seek(
        self, partition: tuple[str, int], offset: int
    ) -> PartitionPosition:
        if offset < 0:
            raise InvalidConfigError("an offset is not negative", found=offset)
        return self._read_position(partition)

    def seek_to_beginning(self, *partitions: tuple[str, int]) -> None:
        """Move to the start of these partitions, or of all partitions without arguments."""
        with self._exclusively():
            for partition in partitions or tuple(self._read_positions):
                read_position = self._read_position(partition)
                read_position.seek_to(self._fetcher.start(read_position.log))

    def seek_to_end(self, *partitions: tuple[str, int]) -> None:
        with self._exclusively():
            for partition in partitions or tuple(self._read_positions):
                read_position = self._read_position(partition)
                read_position.seek_to(self._fetcher.end(read_position.log))

    def lag(self, partition: tuple[str, int] | None = None) -> int:
        """Return the number of offsets from the position to the end.

        Without a partition, return the sum of all partitions.

        Raises:
            NoOffsetError: an open transaction may still commit an offset.
        """
        with self._exclusively():
            wanted = (
                list(self._read_positions)
                if partition is None
                else [TopicPartition(*partition)]
            )
            self._set_missing_positions(wanted)
            found = 0
            for topic_partition in wanted:
                read_position = self._read_position(topic_partition)
                found += max(
                    0,
                    self._fetcher.end(read_position.log)
                    - self._known_position(read_position),
                )
            return found

    def beginning_offsets(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, int]:
        return {
            TopicPartition(*partition): self._fetcher.start(
                self._log(TopicPartition(*partition))
            )
            for partition in partitions
        }

    def end_offsets(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, int]:
        """Return the offsets up to which this consumer may read at its isolation level."""
        return {
            TopicPartition(*partition): self._fetcher.end(
                self._log(TopicPartition(*partition))
            )
            for partition in partitions
        }

    def offsets_for_times(
        self, times_ms: Mapping[PartitionKey, int]
    ) -> dict[TopicPartition, int | None]:
        """Return the offset of the first record at or after each time.

        The value is None if all records of the partition are older.
        """
        return {
            TopicPartition(*partition): self._log(
                TopicPartition(*partition)
            ).offset_for_timestamp(time_ms)
            for partition, time_ms in times_ms.items()
        }

    def topics(self) -> list[str]:
        """Return the topics of the directory."""
        self._check_open()
        return self._directory.topics()

    def partitions_for(self, topic: str) -> tuple[int, ...]:
        """Return the numbers of a topic's partitions.

        Raises:
            TopicNotFoundError: the topic does not exist.
        """
        self._check_open()
        return self._directory.partitions(topic)

    def metrics(self) -> ConsumerMetrics:
        """Return the counters since the consumer was created."""
        return ConsumerMetrics(
            checks=self._checks,
            records=self._fetcher.records,
            commits=self._commits.stored,
            refused_commits=self._commits.refused,
            waiting_commits=self._commits.waiting,
            rebalances=self._assignment.rebalances,
            partitions=len(self._read_positions),
            paused_partitions=len(self.paused()),
        )

    def _log(self, partition: TopicPartition) -> Log:
        self._check_open()
        return self._directory.partition(*partition)

    # -- commits -----------------------------------------------------------------------

    def commit(
        self, offsets: Offsets[PartitionKey] | None = None, timeout: float | None = None
    ) -> None:
        """Commit the positions of all partitions, or the given offsets.

        When this method returns, the offsets are durable, including the offsets of
        earlier commit_async() calls. While another process has locked the group, this
        method retries for `timeout` seconds. The wait for the disk has no limit.

        Raises:
            CommitFailedError: the partitions were lost, or their topics are not
                subscribed.
            RebalanceInProgressError: the group is dividing its partitions.
            ConsumerStateError: the consumer has no group.
            FencedInstanceError: another consumer has the same group_instance_id.
            RegistryLockedError: another process locked the group until the timeout.
        """
        with self._exclusively():
            self._check_open()
            self._commits.commit(self._checked_offsets(offsets), timeout)

    def commit_async(
        self,
        offsets: Offsets[PartitionKey] | None = None,
        callback: OnCommit | None = None,
    ) -> None:
        """Commit the current positions, or the given offsets, without waiting.

        The commits are queued, and the next poll(), commit() or close() stores them with
        one sync. The thousandth queued commit stores them too. callback(error, offsets)
        is called by the method that stores the commit. The error is None, or an error
        of commit(). Without a callback, a failure is logged.

        Raises:
            ConsumerStateError: the consumer has no group.
            InvalidConfigError: an offset is invalid.
        """
        with self._exclusively():
            self._check_open()
            if self._commits.add(self._checked_offsets(offsets), callback):
                self._commits.store_queued()

    def _checked_offsets(
        self, offsets: Offsets[PartitionKey] | None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets to commit.

        Raises:
            CommitFailedError: this consumer does not subscribe to a topic.
        """
        if offsets is None:
            return self._offsets_to_commit()
        chosen = {
            TopicPartition(*partition): checked_offset(given)
            for partition, given in offsets.items()
        }
        if self._assignment.is_subscribed:
            foreign = sorted(
                {partition.topic for partition in chosen} - self.subscription()
            )
            if foreign:
                raise CommitFailedError(
                    "a member commits for topics that it subscribes to",
                    expected=f"some of {', '.join(sorted(self.subscription()))}",
                    found=", ".join(foreign),
                )
        return chosen

    def commit_from_other_thread(self) -> None:
        """Commit the positions from another thread than the thread that reads."""
        self._check_open()
        chosen = self._offsets_to_commit()
        before = {
            partition: (read_position, read_position.stored)
            for partition, read_position in list(self._read_positions.items())
        }
        for _ in range(_OTHER_THREAD_ATTEMPTS):
            # Skip partitions that were given up or committed since then. A commit must
            # not overwrite a later one of any member.
            now = {
                partition: (read_position, read_position.stored)
                for partition, read_position in list(self._read_positions.items())
            }
            kept = {
                partition: each
                for partition, each in chosen.items()
                if partition in before and now.get(partition) == before[partition]
            }
            if self._commits.commit_from_other_thread(kept):
                return
            with self._change_condition:
                self._change_condition.wait(_OTHER_THREAD_SECONDS)
        raise RebalanceInProgressError(
            "the group is rebalancing, and the thread of the stream requests no record"
        )

    def _offsets_to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets that commit() stores by default."""
        # Without this, auto-commit would later commit a smaller offset.
        self._fetcher.finish()
        positions = {
            partition: read_position.position
            for partition, read_position in list(self._read_positions.items())
        }
        return {
            partition: OffsetAndMetadata(offset)
            for partition, offset in positions.items()
            if offset is not None and not self._commits.is_of_deleted_topic(partition)
        }

    def committed(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offsets of the group, from all members.

        The value is None for a partition without a committed offset.
        """
        stored = self._commits.committed()
        found: dict[TopicPartition, OffsetAndMetadata | None] = {}
        for partition in partitions:
            each = stored.get(TopicPartition(*partition))
            found[TopicPartition(*partition)] = (
                None
                if each is None
                else OffsetAndMetadata(each.offset, each.metadata, each.leader_epoch)
            )
        return found

    def group_metadata(self) -> GroupMetadata:
        """Return the identity of this consumer in its group.

        Pass it to TransactionalProducer.send_offsets_to_transaction(). A consumer
        without a subscription is not a member.

        Raises:
            ConsumerStateError: the consumer has no group.
        """
        with self._exclusively():
            self._check_open()
            if self._groups is None:
                raise ConsumerStateError(
                    "this consumer has no group",
                    expected="group_id in LogDir.consumer()",
                    found=None,
                )
            return self._membership.group_metadata()

    # -- reading -----------------------------------------------------------------------

    def poll(
        self, timeout: float = 0, max_records: int | None = None
    ) -> ConsumerRecords:
        """Return the next records of the assigned partitions, at most max_records.

        The default is max_poll_records. If there are no records, wait up to `timeout`
        seconds for the first record. The call finishes the records of the previous
        poll(), keeps the consumer in its group, and calls the listener. Exceptions of
        the listener are raised here.

        Raises:
            NoOffsetError: auto_offset_reset="none", and no offset was committed.
            OffsetOutOfRangeError: auto_offset_reset="none", and the log lacks the
                position.
            LogTruncatedError: auto_offset_reset="none", and the log was truncated.
            FencedInstanceError: another consumer has the same group_instance_id.
            WakeupError: wakeup() was called.
            LogcoreError: a log could not be read.
        """
        most = self._checked_max_records(max_records)
        timeout_ms = milliseconds(timeout)
        with self._exclusively(refuse_in_listener=True):
            self._fetcher.finish()
            found: dict[TopicPartition, list[TopicRecord]] = {}
            moves: list[Move] = []
            deadline_ms = self._fs.monotonic_ms() + timeout_ms
            while not found and self._prepare(deadline_ms):
                found, moves = self._fetcher.fetch(most)
            given = intercepted(self._settings.interceptors, ConsumerRecords(found))
        return self._fetcher.deliver(moves, given)

    def _checked_max_records(self, max_records: int | None) -> int:
        if max_records is None:
            return self._settings.max_poll_records
        check_at_least_1("max_records", max_records)
        return max_records

    def poll_columns(
        self, timeout: float = 0, max_bytes: int = MAX_COLUMN_BYTES
    ) -> dict[TopicPartition, list[RecordColumns]]:
        """Return columns instead of records, to process many records at once.

        The partitions are read one after the other, until max_bytes of keys and values
        are found. If there are records, the result has at least one chunk of a scan.
        Deserializers and interceptors are not called. The other behavior and the errors
        are those of poll().
        """
        return self._poll_columns(timeout, max_bytes, dict)

    def _poll_columns(
        self,
        timeout: float,
        max_bytes: int,
        make: Callable[[dict[TopicPartition, list[RecordColumns]]], _T],
    ) -> _T:
        """Return make(columns).

        `make` is also called without columns before any record is read, so that a
        missing package is reported before positions move.
        """
        check_at_least_1("max_bytes", max_bytes)
        timeout_ms = milliseconds(timeout)
        given = make({})
        with self._exclusively(refuse_in_listener=True):
            self._fetcher.finish()
            moves: list[Move] = []
            deadline_ms = self._fs.monotonic_ms() + timeout_ms
            while not moves and self._prepare(deadline_ms):
                found = self._fetcher.find_columns(max_bytes)
                moves = self._fetcher.moves_for(found)
                if moves:
                    given = make(columns_of(found))
        return self._fetcher.deliver(moves, given)

    def poll_arrow(
        self, timeout: float = 0, max_bytes: int = MAX_COLUMN_BYTES
    ) -> pyarrow.Table:
        """Return one Arrow table instead of records.

        Its columns are topic and partition, which are dictionary-encoded, offset,
        timestamp, key, value and headers. The other behavior is that of
        poll_columns(), and the errors are those of poll().

        Raises:
            MissingDependencyError: pyarrow is not installed. This is checked before any
                record is read.
        """
        from logcore.consumer.arrow import table_of

        return self._poll_columns(timeout, max_bytes, table_of)

    def __iter__(self) -> Iterator[TopicRecord]:
        """Yield records as they arrive.

        The iteration ends when another thread calls wakeup(), or when no record arrives
        for consumer_timeout_ms. A record is finished when the loop requests the next
        one.
        """
        # If the kernels are compiled, C code alone passes on each record.
        return chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[Iterator[TopicRecord]]:
        while True:
            with self._exclusively(refuse_in_listener=True):
                self._fetcher.finish()
                try:
                    is_more = self._prepare(self._iteration_ends_ms())
                except WakeupError:
                    return
                if not is_more:
                    return
                chosen = self._fetcher.open_next_partition()
            if chosen is not None:
                yield from self._fetcher.runs(chosen)

    def _iteration_ends_ms(self) -> int | None:
        """Return when an iteration without a record ends, or None for never."""
        timeout_ms = self._settings.consumer_timeout_ms
        if timeout_ms is None:
            return None
        return self._fs.monotonic_ms() + timeout_ms

    def wakeup(self) -> None:
        """Make the current poll(), or the next one, raise WakeupError once.

        An iteration ends instead. Any thread may call this.
        """
        with self._change_condition:
            self._is_woken = True
            self._change_condition.notify_all()
        self._changes.wake()

    def _wake(self) -> None:
        with self._change_condition:
            self._has_changed = True
            self._change_condition.notify_all()
        self._changes.wake()

    def _prepare(self, deadline_ms: int | None) -> bool:
        """Do the work before a read, and wait until there are records.

        Return False once the deadline has passed.

        Raises:
            WakeupError: wakeup() was called.
        """
        while True:
            self.prepare_to_read()
            if self._consume_wakeup():
                raise WakeupError("wakeup() was called")
            if self.has_records():
                return True
            now_ms = self._fs.monotonic_ms()
            if deadline_ms is not None and now_ms >= deadline_ms:
                return False
            remaining = (
                _CHECK_SECONDS if deadline_ms is None else (deadline_ms - now_ms) / 1000
            )
            self._wait(min(remaining, _CHECK_SECONDS))

    def prepare_to_read(self) -> None:
        """Do the work before a read that may block on the disk.

        This checks the group, runs due commits, and sets positions of partitions that
        have none.
        """
        self._check_open()
        if not self._assignment.is_subscribed and not self._read_positions:
            raise ConsumerStateError(
                "nothing to read", expected="subscribe() or assign() first"
            )
        with self._change_condition:
            self._has_changed = False
        self._checks += 1
        self._commits.store_queued()
        self._assignment.check_for_changes()
        self._commits.commit_when_due()
        self._set_missing_positions(list(self._read_positions))

    @property
    def has_changed(self) -> bool:
        """Whether any change was reported since the latest prepare_to_read() began."""
        with self._change_condition:
            return self._has_changed

    def has_records(self) -> bool:
        """Return whether there are records at the positions."""
        return self._fetcher.has_records()

    def _consume_wakeup(self) -> bool:
        with self._change_condition:
            is_woken = self._is_woken
            self._is_woken = False
            return is_woken

    def _wait(self, seconds: float) -> None:
        paths = self.watched_paths()
        if not paths:
            seconds = self.max_wait_seconds(seconds)
            with self._change_condition:
                self._change_condition.wait_for(
                    lambda: self._has_changed or self._is_woken, seconds
                )
            return
        is_new = self._changes.watch(paths, self._assignment.watched_sessions())
        with self._changes.waiting():
            with self._change_condition:
                is_over = self._has_changed or self._is_woken
            if is_over or (is_new and self.has_records()):
                return
            self._changes.wait(
                self.max_wait_seconds(
                    seconds, reports_deaths=self._changes.reports_deaths
                )
            )

    def watched_paths(self) -> list[str]:
        """Return the directories to watch for changes by other processes.

        The list is empty if only this process makes changes.
        """
        if not self._is_read_only and not self._is_shared:
            return []
        paths = [
            read_position.log.path for read_position in self._read_positions.values()
        ] or [self._directory.path]
        return paths + self._assignment.watched_paths()

    def max_wait_seconds(
        self, seconds: float = _CHECK_SECONDS, *, reports_deaths: bool = False
    ) -> float:
        """Return how long to wait for changes until prepare_to_read() must run anyway.

        `reports_deaths` is whether the death of another process ends the wait.
        """
        if self._is_shared:
            return min(seconds, self._max_shared_wait_seconds(reports_deaths))
        if self._groups is not None and not self._is_read_only:
            next_ms = self._groups.next_ms()
            if next_ms is not None:
                return min(
                    seconds, max(0.001, (next_ms - self._groups.now_ms()) / 1000)
                )
        return seconds

    def _max_shared_wait_seconds(self, reports_deaths: bool) -> float:
        # No event reports the end of a transaction that decides about a position.
        has_all_positions = all(
            read_position.position is not None
            for read_position in self._read_positions.values()
        )
        if has_all_positions and self._groups is None:
            return _CHECK_SECONDS
        if (
            has_all_positions
            and reports_deaths
            and isinstance(self._groups, SharedGroups)
        ):
            return self._groups.time_until_check_ms() / 1000
        return _CHECK_SHARED_SECONDS

    # -- initial positions -------------------------------------------------------------

    def _set_missing_positions(self, wanted: Sequence[TopicPartition]) -> None:
        """Set the positions of partitions without one.

        The position is the committed offset, or depends on auto_offset_reset.
        """
        missing = [
            partition
            for partition in wanted
            if partition in self._read_positions
            and self._read_positions[partition].position is None
        ]
        if not missing:
            return
        stored: Mapping[tuple[str, int], Committed] = {}
        unstable: set[tuple[str, int]] = set()
        if self._groups is not None:
            group_id = str(self._settings.group_id)
            # The order matters: a transaction that ends between the two calls is open
            # in the first call or valid in the second.
            if self._settings.isolation_level == "read_committed":
                unstable = self._groups.unstable(group_id)
            stored = self._commits.committed()
        for partition in missing:
            # An open transaction may commit an offset of this partition.
            if partition in unstable:
                continue
            read_position = self._read_positions[partition]
            committed = stored.get(partition)
            if committed is None:
                self._fetcher.set_initial_position(
                    partition,
                    read_position,
                    is_added=read_position.is_new
                    or self._assignment.is_added(partition),
                )
                continue
            read_position.seek_to(committed.offset)
            read_position.stored = committed.offset
            # Other processes may have appended and committed records that this process
            # has not read yet.
            start = self._fetcher.start(read_position.log)
            error = position_error(read_position.log, start, committed)
            if error is not None:
                self._fetcher.reset(partition, read_position, error)


def _call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()
