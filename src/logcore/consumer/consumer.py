"""A consumer: reads the partitions of topics, alone or as a member of a group, and keeps how far it came.

Rules (clients reference 5):
- Two numbers for each partition: position, behind the last record handed out, and finished, behind the last record
  whose processing is over. A list of poll() is finished when poll() is called again; a record of the iteration, when
  the loop asks for the next. A with block that ends without an exception finishes all.
- commit() stores positions, because the caller says so. Auto-commit stores only what is finished.
- A commit is on disk when it returns. One of a consumer that lost its partitions is refused and changes nothing.
- A consumer starts no thread. It keeps its place in the group by calling poll(), at least every max_poll_interval_ms.

Not here: which partitions are read (assignment.py), which records come next (fetcher.py), how a group divides
partitions (member.py, assignors.py), and where offsets are stored (groups.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from logcore.consumer.assignment import Assignment, Directory
from logcore.consumer.commits import Commits, OnCommit, Place
from logcore.consumer.fetcher import MAX_COLUMN_BYTES, Fetcher, check_columns, misplaced
from logcore.consumer.groups import Groups
from logcore.consumer.membership import TopicPartition
from logcore.consumer.offsetstores import OffsetStores
from logcore.consumer.ownership import Registration
from logcore.consumer.readings import Reading, Readings
from logcore.consumer.sharedgroups import SharedGroups
from logcore.consumer.values import (
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
from logcore.format.grouprecords import Committed
from logcore.fs import FS
from logcore.kernels import TopicRecord
from logcore.log import Log
from logcore.registry import Registry
from logcore.registry.paths import Pattern

if TYPE_CHECKING:
    import pyarrow

#: By partition, the next offset to process.
Offsets = Mapping[tuple[str, int], int | OffsetAndMetadata]
#: How long a consumer waits without looking, in case no event wakes it.
_LOOK_SECONDS: Final = 1.0
#: The same where other processes write too, whose deaths nothing tells of.
_LOOK_SHARED_SECONDS: Final = 0.05
_ELSEWHERE_LOOKS: Final = 100  # of a commit elsewhere, for a generation that begins
_ELSEWHERE_SECONDS: Final = 0.1


class Consumer:
    """Made by LogDir.consumer(). A with block closes it; used by one thread at a time, but for wakeup()."""

    def __init__(
        self,
        fs: FS,
        directory: Directory,
        groups: Groups | SharedGroups | None,
        settings: ConsumerSettings,
        registry: Registry | None = None,
    ) -> None:
        """Not for users. registry: where offsets are committed too, or in place of the log."""
        self._fs = fs
        self._directory = directory
        self._is_read_only = directory.is_read_only
        self._is_shared = directory.is_shared
        self._groups = groups
        self._settings = settings
        self._place = Place(str(settings.group_id), settings.group_instance_id)
        # Those who call it live longer than a consumer that was forgotten.
        myself = weakref.WeakMethod(self._wake)
        self._listening = functools.partial(_call, myself)
        readings = Readings(directory, self._listening, is_read_only=self._is_read_only)
        self._readings: Mapping[TopicPartition, Reading] = readings.by_partition
        self._is_closed = False
        self._looks = 0
        self._using = threading.RLock()  # a listener seeks and commits in the middle of poll()
        self._depth = 0  # of methods that run; changed under the lock
        self._moved = threading.Condition()
        self._has_moved = False
        self._is_woken = False
        self._forks = fs.forks
        if groups is not None:
            groups.listen(self._listening)
        self._fetcher = Fetcher(
            fs, self._readings, settings, is_read_only=self._is_read_only, is_shared=self._is_shared
        )
        stores: OffsetStores | None = None
        if groups is not None:
            stores = OffsetStores(groups, registry, settings.offsets_storage, settings.dual_commit)
        self._commits = Commits(fs, settings, self._readings, self._place, stores)
        self._assignment = Assignment(fs, directory, settings, groups, readings, self._commits)

    # -- opening and closing -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(is_done=kind is None)

    def __del__(self) -> None:
        is_open = not getattr(self, "_is_closed", True)
        if is_open and self._groups is not None and self._readings and self._fs.forks == self._forks:
            # No lock is taken here: the garbage collector runs in any thread, in the middle of anything.
            what = f"a consumer of group {self._settings.group_id!r} was not closed"
            warnings.warn(what, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._readings)} partitions"
        return f"<Consumer of group {self._settings.group_id}, {state}>"

    def close(self, timeout: float | None = None) -> None:
        """Says that all that was handed out is finished, commits it if auto-commit is on, and leaves the group.

        timeout: as for commit().
        """
        self._close(is_done=True, timeout=timeout)

    def leave_unfinished(self) -> None:
        """As close(), but what was handed out last is not finished: whoever has it may still be at work."""
        self._close(is_done=False)

    def _close(self, *, is_done: bool, timeout: float | None = None) -> None:
        with self._alone(is_whole=True):
            if self._is_closed:
                return
            if self._fs.forks != self._forks:  # the parent is the member, and commits
                self._is_closed = True
                return
            if is_done:
                self._fetcher.finish()
            try:
                self._assignment.leave(timeout)
            finally:
                self._is_closed = True
                self._assignment.end()
                if self._groups is not None:
                    self._groups.forget(self._listening)

    @contextlib.contextmanager
    def _alone(self, *, is_whole: bool = False) -> Generator[None, None, None]:
        """While one method runs. is_whole: it may not be called by a listener, in the middle of another."""
        if not self._using.acquire(blocking=False):
            raise ConsumerBusyError("a consumer is used by one thread at a time, and another uses this one")
        try:
            if is_whole and self._depth:
                raise ConsumerStateError("a listener may seek and commit, and not poll, subscribe, assign or close")
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
        finally:
            self._using.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConsumerStateError("the consumer is closed")
        if self._fs.forks != self._forks:  # locks of the groups may be held by threads that this process does not have
            raise ForkedWriterError("the consumer was opened by a parent process; make another in the child")

    # -- what is read --------------------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Iterable[str] = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """Reads these topics, divided among the members of the group; without a group, all their partitions.

        pattern: instead, all topics whose whole name matches, as Kafka's Java client has it; those of Kafka's own are
        left out unless exclude_internal_topics=False. Replaces what was subscribed before. Topics that do not exist yet
        are read once they are created.
        """
        if isinstance(topics, str):
            raise InvalidConfigError("topics is a list of names", expected=f"[{topics!r}]", found=repr(topics))
        wanted = frozenset(topics)
        if bool(wanted) == (pattern is not None):
            raise InvalidConfigError("either topics or a pattern is subscribed to")
        compiled = None if pattern is None else topic_pattern("the pattern of subscribe()", pattern)
        with self._alone(is_whole=True):
            self._check_open()
            self._assignment.subscribe(wanted, compiled, listener)

    def register_with(
        self, of: Registration | None, number: int, subscription: Mapping[str, int], pattern: Pattern
    ) -> Registration | None:
        """For the streams of a connector, before they subscribe: they are one consumer in the registry. Takes the
        registration of the first, and returns it; None where there is no registry.
        """
        return self._assignment.register_with(of, number, subscription, pattern)

    def unsubscribe(self) -> None:
        """Gives up all partitions and leaves the group."""
        with self._alone(is_whole=True):
            self._check_open()
            self._assignment.unsubscribe()

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Reads these partitions, whatever a group does. Raises TopicNotFoundError."""
        wanted = frozenset(TopicPartition(*one) for one in partitions)
        with self._alone(is_whole=True):
            self._check_open()
            self._assignment.assign(wanted)

    def subscription(self) -> frozenset[str]:
        """The topics that are subscribed to; with a pattern, those that match now."""
        return self._assignment.subscription()

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that this consumer reads now."""
        return frozenset(self._readings)

    def pause(self, *partitions: tuple[str, int]) -> None:
        """poll() passes them over until resume()."""
        for one in partitions:
            reading = self._reading(one)
            reading.is_paused = True
            reading.drop()  # ends an iteration

    def resume(self, *partitions: tuple[str, int]) -> None:
        for one in partitions:
            self._reading(one).is_paused = False

    def paused(self) -> frozenset[TopicPartition]:
        readings = list(self._readings.items())  # a step in another thread may give some up; see logcore.aio
        return frozenset(one for one, reading in readings if reading.is_paused)

    def _reading(self, partition: tuple[str, int]) -> Reading:
        self._check_open()
        found = self._readings.get(TopicPartition(*partition))
        if found is None:
            raise ConsumerStateError(
                "this consumer does not read that partition",
                expected=f"one of {sorted(self._readings)}",
                found=tuple(partition),
            )
        return found

    # -- positions -----------------------------------------------------------------------------------------------

    def position(self, partition: tuple[str, int]) -> int:
        """The next offset that poll() hands out. Raises NoOffsetError."""
        with self._alone():
            self._settle([TopicPartition(*partition)])
            found = self._reading(partition).position
            if found is None:
                raise NoOffsetError(
                    "an open transaction may commit an offset of this partition: poll until it has ended",
                    path=self._reading(partition).log.path,
                )
            return found

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Goes on from an offset. It is looked for when poll() comes to it."""
        with self._alone():
            self._sought(partition, offset).place(offset)

    def _sought(self, partition: tuple[str, int], offset: int) -> Reading:
        if offset < 0:
            raise InvalidConfigError("an offset is not negative", found=offset)
        return self._reading(partition)

    def seek_to_beginning(self, *partitions: tuple[str, int]) -> None:
        """Of all partitions that are read, when none is named."""
        with self._alone():
            for one in partitions or tuple(self._readings):
                reading = self._reading(one)
                reading.place(self._fetcher.start(reading.log))

    def seek_to_end(self, *partitions: tuple[str, int]) -> None:
        with self._alone():
            for one in partitions or tuple(self._readings):
                reading = self._reading(one)
                reading.place(self._fetcher.end(reading.log))

    def lag(self, partition: tuple[str, int] | None = None) -> int:
        """How many offsets lie between the position and the end, of one partition or of all."""
        with self._alone():
            wanted = list(self._readings) if partition is None else [TopicPartition(*partition)]
            self._settle(wanted)
            found = 0
            for one in wanted:
                reading = self._reading(one)
                found += max(0, self._fetcher.end(reading.log) - (reading.position or 0))
            return found

    def beginning_offsets(self, partitions: Iterable[tuple[str, int]]) -> dict[TopicPartition, int]:
        return {TopicPartition(*one): self._fetcher.start(self._log(TopicPartition(*one))) for one in partitions}

    def end_offsets(self, partitions: Iterable[tuple[str, int]]) -> dict[TopicPartition, int]:
        """Up to where this consumer may read, by its isolation level."""
        return {TopicPartition(*one): self._fetcher.end(self._log(TopicPartition(*one))) for one in partitions}

    def offsets_for_times(self, times_ms: Mapping[tuple[str, int], int]) -> dict[TopicPartition, int | None]:
        """The first offset of a record that is not older; None where all are older."""
        return {
            TopicPartition(*one): self._log(TopicPartition(*one)).offset_for_timestamp(time_ms)
            for one, time_ms in times_ms.items()
        }

    def topics(self) -> list[str]:
        """The topics of the directory."""
        self._check_open()
        return self._directory.topics()

    def partitions_for(self, topic: str) -> tuple[int, ...]:
        """Numbers of a topic's partitions. Raises TopicNotFoundError."""
        self._check_open()
        return self._directory.partitions(topic)

    def metrics(self) -> ConsumerMetrics:
        """Counters since it was made."""
        return ConsumerMetrics(
            looks=self._looks,
            records=self._fetcher.records,
            commits=self._commits.stored,
            refused_commits=self._commits.refused,
            waiting_commits=self._commits.waiting,
            rebalances=self._assignment.rebalances,
            partitions=len(self._readings),
            paused_partitions=len(self.paused()),
        )

    def _log(self, partition: TopicPartition) -> Log:
        self._check_open()
        return self._directory.partition(*partition)

    # -- commits -------------------------------------------------------------------------------------------------

    def commit(self, offsets: Offsets | None = None, timeout: float | None = None) -> None:
        """Stores how far the group came: the positions of all partitions, or these offsets. On disk when it returns,
        with those of commit_async() before it.

        timeout: seconds for which it is tried again while another process holds the group; the disk is waited for as
        long as it takes. Raises CommitFailedError when the partitions were lost meanwhile, or are none of the
        subscription; RebalanceInProgressError while the group divides them, ConsumerStateError without a group,
        FencedInstanceError, RegistryLockedError.
        """
        with self._alone():
            self._check_open()
            self._commits.commit(self._chosen(offsets), timeout)

    def commit_async(self, offsets: Offsets | None = None, callback: OnCommit | None = None) -> None:
        """As commit(), without waiting: the positions of this moment, or these offsets, are stored by the next poll(),
        commit() or close(), all that wait with one sync, or when a thousand wait.

        callback(error, offsets): called then, inside that call, with None or with what commit() would have raised.
        Without one a failure is said to the logger. Raises ConsumerStateError and InvalidConfigError.
        """
        with self._alone():
            self._check_open()
            if self._commits.add(self._chosen(offsets), callback):
                self._commits.settle()

    def _chosen(self, offsets: Offsets | None) -> dict[TopicPartition, OffsetAndMetadata]:
        """What is to be committed. Raises CommitFailedError for topics that this consumer does not subscribe to."""
        if offsets is None:
            return self._take_positions()
        chosen = {TopicPartition(*one): checked_offset(given) for one, given in offsets.items()}
        if self._assignment.is_subscribed:
            foreign = sorted({one.topic for one in chosen} - self.subscription())
            if foreign:
                raise CommitFailedError(
                    "a member commits for topics that it subscribes to",
                    expected=f"some of {', '.join(sorted(self.subscription()))}",
                    found=", ".join(foreign),
                )
        return chosen

    def commit_elsewhere(self) -> None:
        """As commit(), in another thread than the one that reads: what that was handed out until now."""
        self._check_open()
        chosen = self._take_positions()
        before = {one: (reading, reading.stored) for one, reading in list(self._readings.items())}
        for _ in range(_ELSEWHERE_LOOKS):
            # Not what was given up or committed since: a later commit, also of another member, must not move back.
            now = {one: (reading, reading.stored) for one, reading in list(self._readings.items())}
            kept = {one: each for one, each in chosen.items() if one in before and now.get(one) == before[one]}
            if self._commits.commit_elsewhere(kept):
                return
            with self._moved:
                self._moved.wait(_ELSEWHERE_SECONDS)
        raise RebalanceInProgressError("the group divides its partitions, and the stream's thread asks for no record")

    def _take_positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """What commit() stores by default."""
        self._fetcher.finish()  # the caller says so; or auto-commit would take it back
        positions = {one: reading.position for one, reading in list(self._readings.items())}
        return {one: OffsetAndMetadata(offset) for one, offset in positions.items() if offset is not None}

    def committed(self, partitions: Iterable[tuple[str, int]]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed, by whomever; None where nothing was."""
        stored = self._commits.committed()
        found: dict[TopicPartition, OffsetAndMetadata | None] = {}
        for one in partitions:
            each = stored.get(TopicPartition(*one))
            found[TopicPartition(*one)] = (
                None if each is None else OffsetAndMetadata(each.offset, each.metadata, each.leader_epoch)
            )
        return found

    def group_metadata(self) -> GroupMetadata:
        """Which member of its group this consumer is now, for TransactionalProducer.send_offsets_to_transaction().

        Of a consumer that does not subscribe: no member. Raises ConsumerStateError without a group.
        """
        with self._alone():
            self._check_open()
            if self._groups is None:
                raise ConsumerStateError(
                    "this consumer has no group", expected="group_id in LogDir.consumer()", found=None
                )
            return self._place.group_metadata()

    # -- reading -------------------------------------------------------------------------------------------------

    def poll(self, timeout_ms: int = 0, max_records: int | None = None) -> ConsumerRecords:
        """The next records of the share, at most max_records (max_poll_records); waits for the first of them.

        The list of the call before is finished with this call. Also keeps the place in the group, and calls the
        listener. Raises NoOffsetError, OffsetOutOfRangeError and LogTruncatedError under auto_offset_reset="none",
        FencedInstanceError, WakeupError after wakeup(), and what reading and the listener raise.
        """
        most = self._checked_most(timeout_ms, max_records)
        with self._alone(is_whole=True):
            self._fetcher.finish()
            found: dict[TopicPartition, list[TopicRecord]] = {}
            deadline_ms = self._fs.monotonic_ms() + timeout_ms
            while self._prepare(deadline_ms):
                found = self._fetcher.fetch(most)
                if found:
                    break
            return intercepted(self._settings.interceptors, ConsumerRecords(found))

    def _checked_most(self, timeout_ms: int, max_records: int | None) -> int:
        most = self._settings.max_poll_records if max_records is None else max_records
        if timeout_ms < 0 or most < 1:
            raise InvalidConfigError(
                "poll", expected="timeout_ms from 0, max_records from 1", found=f"{timeout_ms}, {most}"
            )
        return most

    def poll_columns(
        self, timeout_ms: int = 0, max_bytes: int = MAX_COLUMN_BYTES
    ) -> dict[TopicPartition, list[RecordColumns]]:
        """The same as columns, for work on many records at once: the records of one partition after the other, until
        max_bytes of keys and values were found, and at least one piece of a scan.

        Deserializers and interceptors are not called. Raises what poll() raises.
        """
        check_columns(timeout_ms, max_bytes)
        with self._alone(is_whole=True):
            self._fetcher.finish()
            found: dict[TopicPartition, list[RecordColumns]] = {}
            deadline_ms = self._fs.monotonic_ms() + timeout_ms
            while not found and self._prepare(deadline_ms):
                found = self._fetcher.take_columns(self._fetcher.find_columns(max_bytes))
            return found

    def poll_arrow(self, timeout_ms: int = 0, max_bytes: int = MAX_COLUMN_BYTES) -> pyarrow.Table:
        """The same as one Arrow table: topic and partition as dictionaries, offset, timestamp, key, value, headers.

        Raises what poll() raises, and MissingDependencyError without pyarrow, before anything is read.
        """
        from logcore.consumer.tables import table_of

        table_of({})
        return table_of(self.poll_columns(timeout_ms, max_bytes))

    def __iter__(self) -> Iterator[TopicRecord]:
        """Records as they come. wakeup() from another thread ends it, and consumer_timeout_ms without a record. A
        record is finished when the loop asks for the next.
        """
        while True:
            with self._alone(is_whole=True):
                self._fetcher.finish()
                try:
                    is_more = self._prepare(self._iteration_ends_ms())
                except WakeupError:
                    return
                if not is_more:
                    return
                chosen = self._fetcher.opened()
            if chosen is not None:
                yield from self._one_by_one(chosen)

    def _one_by_one(self, reading: Reading) -> Iterator[TopicRecord]:
        """The records of one partition, as interceptors leave them."""
        records = self._fetcher.one_by_one(reading)
        interceptors = self._settings.interceptors
        if not interceptors:
            return records
        alone = ({TopicPartition(record.topic, record.partition): [record]} for record in records)
        return itertools.chain.from_iterable(
            intercepted(interceptors, ConsumerRecords(found)).records() for found in alone
        )

    def _iteration_ends_ms(self) -> int | None:
        """When an iteration that finds no record is over."""
        waits_ms = self._settings.consumer_timeout_ms
        if waits_ms is None:
            return None
        return self._fs.monotonic_ms() + waits_ms

    def wakeup(self) -> None:
        """May be called in any thread: the poll() that waits, or the next one, raises WakeupError, once. An iteration
        ends instead.
        """
        with self._moved:
            self._is_woken = True
            self._moved.notify_all()

    def _wake(self) -> None:
        with self._moved:
            self._has_moved = True
            self._moved.notify_all()

    def _prepare(self, deadline_ms: int | None) -> bool:
        """Everything that comes before a reading; waits for news where there is nothing to read. False when the time
        is over. Raises WakeupError.
        """
        while True:
            self.look_after()
            if self._take_wakeup():
                raise WakeupError("wakeup() was called")
            if self.has_records():
                return True
            now_ms = self._fs.monotonic_ms()
            if deadline_ms is not None and now_ms >= deadline_ms:
                return False
            left = _LOOK_SECONDS if deadline_ms is None else (deadline_ms - now_ms) / 1000
            self._wait(min(left, _LOOK_SECONDS))

    def look_after(self) -> None:
        """Everything that comes before a reading, and may wait for the disk: the group, commits that are due, where
        reading begins.
        """
        self._check_open()
        if not self._assignment.is_subscribed and not self._readings:
            raise ConsumerStateError("nothing to read", expected="subscribe() or assign() first")
        with self._moved:
            self._has_moved = False
        self._looks += 1
        self._commits.settle()
        self._assignment.look()
        self._commits.commit_when_due()
        self._settle(list(self._readings))

    @property
    def has_moved(self) -> bool:
        """Whether anything was heard since the last look_after() began."""
        with self._moved:
            return self._has_moved

    def has_records(self) -> bool:
        """Whether there is anything to read behind the positions."""
        return self._fetcher.has_records()

    def _take_wakeup(self) -> bool:
        with self._moved:
            is_woken = self._is_woken
            self._is_woken = False
            return is_woken

    def _wait(self, seconds: float) -> None:
        seconds = self.look_again_seconds(seconds)
        paths = self.watched_paths()
        if paths:
            with contextlib.closing(self._fs.watch(*paths)) as watch:
                if not self.has_records():
                    watch.wait(seconds)
            return
        with self._moved:
            self._moved.wait_for(lambda: self._has_moved or self._is_woken, seconds)

    def watched_paths(self) -> list[str]:
        """Directories in which other processes may bring news; none where all news come from this process."""
        if not self._is_read_only and not self._is_shared:
            return []
        paths = [reading.log.path for reading in self._readings.values()] or [self._directory.path]
        return paths + self._assignment.watched_paths()

    def look_again_seconds(self, seconds: float = _LOOK_SECONDS) -> float:
        """How long to wait for news before look_after() has something to do without."""
        if self._is_shared:
            return min(seconds, _LOOK_SHARED_SECONDS)
        if self._groups is not None and not self._is_read_only:
            next_ms = self._groups.next_ms()
            if next_ms is not None:
                return min(seconds, max(0.001, (next_ms - self._groups.now_ms()) / 1000))
        return seconds

    # -- where reading begins ------------------------------------------------------------------------------------

    def _settle(self, wanted: Sequence[TopicPartition]) -> None:
        """Gives a position to those that have none: what the group committed, or what auto_offset_reset says."""
        unsettled = [one for one in wanted if one in self._readings and self._readings[one].position is None]
        if not unsettled:
            return
        stored: Mapping[tuple[str, int], Committed] = {}
        undecided: set[tuple[str, int]] = set()
        if self._groups is not None:
            group_id = str(self._settings.group_id)
            # Asked first: a transaction that ends between the two is then either open here, or counts there.
            if self._settings.isolation_level == "read_committed":
                undecided = self._groups.unstable(group_id)
            stored = self._commits.committed()
        for one in unsettled:
            if one in undecided:  # what it would commit is processed already, if it commits
                continue
            reading = self._readings[one]
            committed = stored.get(one)
            if committed is None:
                self._fetcher.begin(one, reading, is_added=self._assignment.is_added(one))
                continue
            reading.place(committed.offset)
            reading.stored = committed.offset
            # What another process has appended, and committed, may not be known here yet.
            start = self._fetcher.start(reading.log)
            error = misplaced(reading.log, start, committed)
            if error is not None:
                self._fetcher.reset(one, reading, error)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()
