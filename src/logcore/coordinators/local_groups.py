"""Groups whose members are consumers of this process.

This module executes the effects of logcore.coordination for one log directory.

Rules:
- One lock guards the groups. It is held while records are appended, so that the log has
  the order of the decisions. It is released while a thread waits for the disk.
- A request returns once its records are durable. If several threads have requests, one
  thread executes all of them (coordinators/flat_combining.py). Their records share batches and one sync.
- The time is the monotonic clock plus the wall clock at the start. So a change of the
  wall clock ends no session.
- No thread runs in the background: the next request acts on deadlines that have passed.

This module does not implement the transitions of a group (logcore.coordination does),
and does not read the assigned partitions (consumer.py does).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final, Protocol

import attrs

from logcore.config import LogConfig
from logcore.coordination.classic_group import Group
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.deadlines import Timers
from logcore.coordination.effects import (
    AppendRecords,
    Beat,
    CancelTimer,
    Committer,
    Effect,
    GroupError,
    Join,
    OffsetKey,
    Reply,
    Rules,
    SetTimer,
    Sync,
    Timeout,
)
from logcore.coordination.offsets import forget_topics
from logcore.coordinators.durable_queue import Settling
from logcore.coordinators.flat_combining import Combined
from logcore.coordinators.stored_offsets import OFFSETS_CONFIG, stored_groups
from logcore.errors import ConsumerStateError, DurabilityUnknownError, LogcoreError
from logcore.format.group_records import RECORD_HEAD_BYTES, Committed, partition_of
from logcore.fs import FS
from logcore.kernels import Receipt
from logcore.kernels.layout import Level, RecordInput
from logcore.log import Log
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.partition.coordinator_append import append_to_transaction, append_whole
from logcore.reporting import ERROR, tell

_LONGEST_MS: Final = 2**31 - 1
#: Maximum size of a batch that several decisions share: the default batch size of a
#: producer.
_BATCH_BYTES: Final = 16_384


class GroupDirectory(Protocol):
    """The methods of LogDir that this module uses."""

    @property
    def path(self) -> str: ...
    def __contains__(self, topic: object) -> bool: ...
    def ensure_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None
    ) -> bool: ...
    def partitions(self, name: str) -> tuple[int, ...]: ...
    def topic_id(self, name: str) -> uuid.UUID: ...
    def partition(self, topic: str, number: int) -> Log: ...
    def open_again(self, topic: str, number: int) -> Log: ...
    def trusted_ms(self, wall_ms: int) -> int: ...


class PendingResult:
    """The future result of a request. It is set under the lock of the groups."""

    def __init__(self, *, is_awaited: bool = True) -> None:
        #: Whether other threads may sleep until the result is available.
        self.is_awaited = is_awaited
        #: The end of the member id that a request to join was given, in a group of this
        #: process.
        self.id_end = ""
        #: Whether `result` is set.
        self.is_there = False
        self.result: Any = None


@attrs.frozen(kw_only=True)
class KeptJoin(Join):
    """A request to join whose Answer the member holds before it sends the request.

    If an interrupt stops the member during the request, it can withdraw the request.
    """

    answer: PendingResult = attrs.field(eq=False)


def answer_of(request: Join) -> PendingResult:
    if isinstance(request, KeptJoin):
        return request.answer
    return PendingResult()


def home_of(directory: GroupDirectory, group_id: str) -> tuple[str, int]:
    """Return the partition of a group's offsets, and create the topic if necessary.

    Raises:
        LogcoreError: the topic could not be created.
    """
    directory.ensure_topic(OFFSETS_TOPIC, 1, OFFSETS_CONFIG)
    return OFFSETS_TOPIC, partition_of(
        group_id, directory.partitions(OFFSETS_TOPIC)[-1] + 1
    )


def append(
    log: Log, rows: list[RecordInput], producer: tuple[int, int] | None, level: Level
) -> Receipt:
    """Append the records of a Store.

    Raises:
        LogcoreError: Log.append() failed.
        InvalidProducerEpochError: the producer was fenced.
    """
    if producer is None:
        return append_whole(log.writer, rows, durability=level)
    return append_to_transaction(log.writer, rows, *producer, durability=level)


def check_forgotten(
    results: Iterable[GroupError | None], failure: Exception | None
) -> None:
    """Raise ConsumerStateError unless the offsets of deleted topics were deleted."""
    error = next((result for result in results if result is not None), None)
    if error is not None:
        raise ConsumerStateError(
            "offsets of a deleted topic were not deleted", found=error.name
        ) from failure


def forget_stored(directory: GroupDirectory, topics: set[str]) -> None:
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
        log.flush()


def _size_of(store: AppendRecords) -> int:
    return sum(
        RECORD_HEAD_BYTES + len(key) + len(value or b"") for key, value in store.records
    )


class LocalGroups:
    """All groups of one directory. The first consumer with a group creates this object.

    Any thread may call the methods. Requests whose records could not be stored get
    COORDINATOR_NOT_AVAILABLE. The constructor raises the errors of reading
    `__consumer_offsets`.
    """

    def __init__(self, fs: FS, directory: GroupDirectory) -> None:
        self._fs = fs
        self._directory = directory
        self._lock = threading.RLock()
        rules = Rules(min_session_timeout_ms=1, max_session_timeout_ms=_LONGEST_MS)
        self._coordinator = Coordinator(rules, self._new_id)
        # The answer to the request to join that is being executed.
        self._naming: PendingResult | None = None
        self._timers: Timers[tuple[Group, Timeout]] = Timers()
        self._effects: deque[Effect] = deque()
        self._unsynced = Settling(self._lock)
        self._steps = Combined(self._lock, self._flush, self._unsynced.settle)
        self._unwritten: deque[AppendRecords] = deque()  # in the order of the decisions
        self._listeners: tuple[Callable[[], None], ...] = ()
        #: The latest error of storing records. It is written under the lock.
        self.failure: Exception | None = None
        self._started_ms = fs.now_ms() - fs.monotonic_ms()
        self._load()

    def _load(self) -> None:
        numbers = (
            self._directory.partitions(OFFSETS_TOPIC)
            if OFFSETS_TOPIC in self._directory
            else ()
        )
        found = stored_groups(
            self._directory.partition(OFFSETS_TOPIC, number) for number in numbers
        )
        self._do(
            lambda now_ms: self._coordinator.load(
                found.groups, found.offsets, now_ms, found.unstable, found.consumers
            )
        )
        # This process has exclusive access, so the members of earlier processes are
        # dead and are removed. Static members may return.
        for group in self._coordinator.all():
            gone: list[tuple[str, str | None]] = [
                (one.member_id, None)
                for one in group.members.values()
                if one.instance_id is None
            ]
            if gone:
                self._do(functools.partial(self._without, group.group_id, gone))
            if group.consumers is not None:
                classic: list[tuple[str, str | None]] = []
                for member_id, one in [*group.consumers.members.items()]:
                    if one.instance_id is None and one.classic is not None:
                        classic.append((member_id, None))
                    elif one.instance_id is None:
                        leaves = Beat(
                            group_id=group.group_id,
                            member_id=member_id,
                            member_epoch=-1,
                        )
                        self._do(
                            functools.partial(
                                self._coordinator.beat, leaves, PendingResult()
                            )
                        )
                if classic:
                    self._do(functools.partial(self._without, group.group_id, classic))
        self._unsynced.settle()

    def _without(
        self, group_id: str, gone: list[tuple[str, str | None]], now_ms: int
    ) -> list[Effect]:
        return self._coordinator.leave(group_id, gone, now_ms)[1]

    def close(self) -> None:
        """Do nothing: the memory of this object is the only resource."""

    def now_ms(self) -> int:
        return self._started_ms + self._fs.monotonic_ms()

    # -- listeners

    def listen(self, listener: Callable[[], None]) -> None:
        """Call the listener, in any thread, whenever a group may have changed."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = tuple(
                one for one in self._listeners if one is not listener
            )

    # -- requests

    def join(self, request: Join) -> PendingResult:
        """Add a member to a group.

        The answer is available when all members have joined: Joined or JoinRefused.
        """
        answer = answer_of(request)

        def join(now_ms: int) -> list[Effect]:
            self._naming = answer
            try:
                return self._coordinator.join(request, answer, now_ms)
            finally:
                self._naming = None

        self._do(join)
        return answer

    def _new_id(self) -> str:
        made = self._fs.random_bytes(16).hex()
        if self._naming is not None:
            self._naming.id_end = made
        return made

    def sync(self, request: Sync) -> PendingResult:
        """Send an assignment, or wait for it.

        The answer is available when the leader has assigned: Synced or a GroupError.
        """
        answer = PendingResult()
        self._do(lambda now_ms: self._coordinator.sync(request, answer, now_ms))
        return answer

    def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        """Renew a session. Return None, or the error for the member."""
        found: list[GroupError | None] = []

        def beat(now_ms: int) -> list[Effect]:
            error, effects = self._coordinator.heartbeat(
                group_id, member_id, instance_id, generation, now_ms
            )
            found.append(error)
            return effects

        self._do(beat)
        return found[0]

    def leave(self, group_id: str, member_id: str, instance_id: str | None) -> None:
        self._do(
            lambda now_ms: self._coordinator.leave(
                group_id, [(member_id, instance_id)], now_ms
            )[1]
        )

    def absent(self, group_id: str, member_id: str) -> None:
        """Mark a static member as closed. It may return."""
        self._do(lambda now_ms: self._coordinator.absent(group_id, [member_id], now_ms))

    def withdraw(self, group_id: str, joining: PendingResult) -> None:
        """Remove the member whose request to join waits for this answer.

        This has no effect once the request is answered.
        """

        def withdraw(now_ms: int) -> list[Effect]:
            effects = self._coordinator.withdraw(group_id, joining, now_ms)
            group = self._coordinator.get(group_id)
            if group is not None and joining.id_end and not joining.is_there:
                # An interrupt discarded the answer of an operation that was executed.
                left = [
                    (name, None)
                    for name in group.members
                    if name.endswith(joining.id_end)
                ]
                effects += self._coordinator.leave(group_id, left, now_ms)[1]
            return effects

        self._do(withdraw)

    def commit(
        self,
        who: Committer,
        offsets: Mapping[OffsetKey, Committed],
        producer: tuple[int, int] | None = None,
    ) -> GroupError | None:
        """Commit offsets. Return None when they are durable, or the error.

        The check and the append are one operation, so that no rebalance happens between
        them. `producer` is the id and epoch of the producer whose open transaction the
        offsets belong to. Such offsets become valid when the transaction commits, and
        need not name a member.
        """
        # The committing thread waits for the disk and not for changes of the group.
        # When 64 consumers woke one another, a commit took 0.3 ms.
        answer = PendingResult(is_awaited=False)

        def commit(now_ms: int) -> list[Effect]:
            if producer is None:
                return self._coordinator.commit_as(who, offsets, answer, now_ms)
            return self._coordinator.commit_in_transaction_as(
                who, producer, offsets, answer
            )

        return self._answered(answer, commit)

    @contextlib.contextmanager
    def committing(self, who: Committer) -> Generator[GroupError | None]:
        """Check a commit of offsets that are stored elsewhere.

        Yield the reason why this member may not commit now, or None. The group does not
        change inside the `with` block.
        """
        with self._lock:
            error, effects = self._coordinator.check_commit(who, self.now_ms())
            self._act(effects)
            self._flush()
            yield error

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        """Apply the marker of a producer in `__consumer_offsets`."""
        with self._lock:
            self._coordinator.transaction_ended(producer_id, commit=commit)
            for listener in self._listeners:
                listener()

    def unstable(self, group_id: str) -> set[OffsetKey]:
        """Return the partitions with offsets in open transactions."""
        with self._lock:
            group = self._coordinator.get(group_id)
            return (
                set()
                if group is None
                else {key for keys in group.unstable.values() for key in keys}
            )

    def committed(self, group_id: str) -> dict[OffsetKey, Committed]:
        """Return all durable committed offsets of a group."""
        with self._lock:
            group = self._coordinator.get(group_id)
            if group is None:
                return {}
            return {
                (topic, partition): each
                for topic, partitions in group.offsets.items()
                for partition, each in partitions.items()
            }

    def common_protocols(self, group_id: str) -> set[str]:
        """Return the names of the assignors that all members of a group support."""
        with self._lock:
            group = self._coordinator.get(group_id)
            return (
                set()
                if group is None or not group.members
                else group.common_protocols()
            )

    def rewind(
        self, group_id: str, offsets: Mapping[OffsetKey, Committed]
    ) -> GroupError | None:
        """Commit offsets for a group that has members.

        The same operation removes the members, so that none of their commits can
        overwrite the offsets. The members join again and begin at these offsets.
        """
        answer = PendingResult()
        return self._answered(
            answer,
            lambda now_ms: self._coordinator.rewind(group_id, offsets, answer, now_ms),
        )

    def delete(self, group_id: str) -> GroupError | None:
        """Delete a group without members, with its offsets, or return the error."""
        answer = PendingResult()
        return self._answered(
            answer, lambda _: self._coordinator.delete(group_id, answer)
        )

    def forget_topics(self, names: set[str]) -> None:
        """Delete the committed offsets of deleted topics.

        A new topic of the same name begins without them.

        Raises:
            ConsumerStateError: the deletion could not be stored.
        """
        answers: list[PendingResult] = []

        def waiter() -> PendingResult:
            answers.append(PendingResult(is_awaited=False))
            return answers[-1]

        self._do(lambda _: self._coordinator.forget_topics(names, waiter))
        check_forgotten(map(self._result_of, answers), self.failure)

    def expire_offsets(self) -> None:
        """Delete committed offsets whose retention is over.

        The caller does this about every EXPIRY_CHECK_MS.
        """
        self._do(
            lambda now_ms: self._coordinator.expire_offsets(
                self._directory.trusted_ms(now_ms)
            )
        )

    def look(self) -> None:
        """Act on deadlines that have passed."""
        self._do(lambda _: ())

    def next_ms(self) -> int | None:
        """Return the time of the next deadline, in terms of now_ms(), or None."""
        with self._lock:
            return self._timers.next_ms

    # -- effects

    def _answered(
        self, answer: PendingResult, step: Callable[[int], Iterable[Effect]]
    ) -> GroupError | None:
        self._do(step)
        return self._result_of(answer)

    def _result_of(self, answer: PendingResult) -> GroupError | None:
        if not answer.is_there:
            raise DurabilityUnknownError(
                "a thread was interrupted that stored records for this one: whether they are stored is not known",
                path=self._directory.path,
            )
        result: GroupError | None = answer.result
        return result

    def _do(self, step: Callable[[int], Iterable[Effect]]) -> None:
        def take() -> None:
            now_ms = self.now_ms()
            for group, timeout in self._timers.due(now_ms):
                self._act(self._coordinator.timed_out(group, timeout, now_ms))
            self._act(step(now_ms))

        self._steps.take(take)

    def _act(self, effects: Iterable[Effect]) -> None:
        """Execute effects after the earlier ones. The lock is held."""
        self._effects.extend(effects)
        is_news = False
        while self._effects:
            # After an interrupt, the next operation executes it, possibly a second
            # time.
            effect = self._effects[0]
            match effect:
                case Reply(PendingResult() as answer, result):
                    answer.result = result
                    answer.is_there = True
                    is_news = is_news or answer.is_awaited
                case AppendRecords() as store:
                    self._unwritten.append(store)
                case SetTimer(group, timeout, at_ms):
                    self._timers.at(at_ms, (group, timeout))
                case CancelTimer(group, timeout):
                    self._timers.cancel((group, timeout))
                case _:
                    is_news = True
            # If the effect is different, a signal handler ran in between.
            if self._effects and self._effects[0] is effect:
                self._effects.popleft()
        # Without this condition, waiting members would wake one another endlessly.
        if is_news:
            for listener in self._listeners:
                listener()

    def _flush(self) -> None:
        """Append the records of the decisions; settle() syncs them. The lock is held."""
        while self._unwritten:
            stores = [self._unwritten.popleft()]
            try:
                self._write(stores)
            except BaseException:
                # After an interrupt, the next operation appends them, and a duplicate
                # is harmless.
                self._unwritten.extendleft(reversed(stores))
                raise

    def _write(self, stores: list[AppendRecords]) -> None:
        """Append a decision, with following ones that may share its batch."""
        try:
            place = self.home(stores[0].group.group_id)
            log = self._log(place)
            self._take_followers(stores, place, log.config)
            now_ms = self._fs.now_ms()
            rows: list[RecordInput] = [
                (key, value, (), now_ms)
                for store in stores
                for key, value in store.records
            ]
            receipt = append(log, rows, stores[0].producer, "os")
        except (LogcoreError, OSError) as error:
            self._have_stored(stores, error)
        else:
            self._unsynced.add(
                {log: receipt.last_offset + 1},
                functools.partial(self._settled, stores, log),
            )

    def _take_followers(
        self, stores: list[AppendRecords], place: tuple[str, int], config: LogConfig
    ) -> None:
        """Add the following decisions that may share the batch.

        They have the same partition and producer.
        """
        # If the partition accepts each decision alone, it must also accept several.
        # Half of its limits leaves room for the headers.
        most_bytes = min(
            _BATCH_BYTES, config.max_message_bytes // 2, config.segment_bytes // 2
        )
        left = most_bytes - _size_of(stores[0])
        while self._unwritten:
            following = self._unwritten[0]
            left -= _size_of(following)
            is_of_batch = (
                following.producer == stores[0].producer
                and self.home(following.group.group_id) == place
            )
            if left < 0 or not is_of_batch:
                return
            stores.append(self._unwritten.popleft())

    def _settled(
        self,
        stores: list[AppendRecords],
        log: Log,
        failures: Mapping[Log, LogcoreError],
    ) -> None:
        self._have_stored(stores, failures.get(log))
        self._flush()

    def _have_stored(
        self, stores: list[AppendRecords], failure: Exception | None
    ) -> None:
        """Pass the result of an append to the coordinator. The lock is held."""
        error = None
        if failure is not None:
            error = GroupError.COORDINATOR_NOT_AVAILABLE
            self.failure = failure
        for store in stores:
            if failure is not None:
                group_id = store.group.group_id
                tell(
                    "groups",
                    ERROR,
                    "%s: a record of group %r was not stored: %s",
                    OFFSETS_TOPIC,
                    group_id,
                    failure,
                )
            self._act(self._coordinator.stored(store, error, self.now_ms()))

    def home(self, group_id: str) -> tuple[str, int]:
        """Return the partition of a group's offsets, and create the topic if necessary.

        Raises:
            LogcoreError: the topic could not be created.
        """
        return home_of(self._directory, group_id)

    def _log(self, place: tuple[str, int]) -> Log:
        log = self._directory.partition(*place)
        return self._directory.open_again(*place) if log.has_failed else log
