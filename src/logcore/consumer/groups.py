"""The groups of a log directory whose members are consumers of this process: carries out what logcore.coordination
decides.

Rules:
- One lock guards the groups. It is held while records are appended, so that they stand in the order of the decisions,
  and not while the disk is waited for.
- Who asked is told once what it caused is on disk. Of several threads that ask, one takes the steps of all
  (combining.py). Their records share batches, and one sync.
- Time is the steady clock's, counted from the wall clock at the beginning, so that no jump of that ends a session.
- Nothing runs by itself: deadlines that have passed are noticed by whoever asks next.

Not here: what happens in a group (logcore.coordination), what a consumer does with its share (consumer.py).
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

from logcore.combining import Combined
from logcore.config import LogConfig
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.effects import (
    At,
    Beat,
    Cancel,
    Committer,
    Effect,
    GroupError,
    Join,
    OffsetKey,
    Reply,
    Rules,
    Store,
    Sync,
    Timeout,
)
from logcore.coordination.group import Group
from logcore.coordination.offsets import forget_topics
from logcore.coordination.timers import Timers
from logcore.errors import ConsumerStateError, DurabilityUnknownError, LogcoreError
from logcore.format.grouprecords import RECORD_HEAD_BYTES, Committed, partition_of
from logcore.fs import FS
from logcore.groupoffsets import OFFSETS_CONFIG, stored_groups
from logcore.kernels import Receipt
from logcore.kernels.layout import Level, RecordInput
from logcore.log import Log
from logcore.names import OFFSETS_TOPIC
from logcore.notices import ERROR, tell
from logcore.partition.coordinated import append_to_transaction, append_whole
from logcore.settling import Settling

_LONGEST_MS: Final = 2**31 - 1
#: The largest batch that several decisions share: as large as the default batch of a producer.
_BATCH_BYTES: Final = 16_384


class Directory(Protocol):
    """What is asked of the LogDir."""

    @property
    def path(self) -> str: ...
    def __contains__(self, topic: object) -> bool: ...
    def ensure_topic(self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None) -> bool: ...
    def partitions(self, name: str) -> tuple[int, ...]: ...
    def topic_id(self, name: str) -> uuid.UUID: ...
    def partition(self, topic: str, number: int) -> Log: ...
    def open_again(self, topic: str, number: int) -> Log: ...
    def trusted_ms(self, wall_ms: int) -> int: ...


class Answer:
    """How a request ends. result: once is_there; set under the lock of the groups. is_awaited: others than who asks may
    sleep until it is there. id_end: how the id ends that a request to join was given, in a group of this process.
    """

    def __init__(self, *, is_awaited: bool = True) -> None:
        self.is_awaited = is_awaited
        self.id_end = ""
        self.is_there = False
        self.result: Any = None


@attrs.frozen(kw_only=True)
class KeptJoin(Join):
    """A request to join whose answer the member has from before it asks. If an interrupt comes while it asks, it can
    withdraw the request.
    """

    answer: Answer = attrs.field(eq=False)


def answer_of(request: Join) -> Answer:
    if isinstance(request, KeptJoin):
        return request.answer
    return Answer()


def home_of(directory: Directory, group_id: str) -> tuple[str, int]:
    """The partition that a group's offsets are in, made if there is none. Raises what making it raises."""
    directory.ensure_topic(OFFSETS_TOPIC, 1, OFFSETS_CONFIG)
    return OFFSETS_TOPIC, partition_of(group_id, directory.partitions(OFFSETS_TOPIC)[-1] + 1)


def append(log: Log, rows: list[RecordInput], producer: tuple[int, int] | None, level: Level) -> Receipt:
    """Appends the records of a Store. Raises what Log.append() raises, and InvalidProducerEpochError."""
    if producer is None:
        return append_whole(log.writer, rows, durability=level)
    return append_to_transaction(log.writer, rows, *producer, durability=level)


def check_forgotten(results: Iterable[GroupError | None], failure: Exception | None) -> None:
    """Raises ConsumerStateError unless offsets of deleted topics could be deleted."""
    error = next((result for result in results if result is not None), None)
    if error is not None:
        raise ConsumerStateError("offsets of a deleted topic were not deleted", found=error.name) from failure


def forget_stored(directory: Directory, topics: set[str]) -> None:
    """Deletes what was committed for topics, in the log alone: on disk when it returns. Raises what reading the log and
    appending to it raises.
    """
    if OFFSETS_TOPIC not in directory:
        return
    for number in directory.partitions(OFFSETS_TOPIC):
        log = directory.partition(OFFSETS_TOPIC, number)
        found = stored_groups([log])
        for group_id in {**found.offsets, **found.unstable}:
            group = Group(group_id, offsets=found.offsets.get(group_id, {}), unstable=found.unstable.get(group_id, {}))
            for effect in forget_topics(group, topics):
                assert isinstance(effect, Store), "no request waits"
                append(log, [(key, value, (), None) for key, value in effect.records], None, "os")
        log.flush()


def _size_of(store: Store) -> int:
    return sum(RECORD_HEAD_BYTES + len(key) + len(value or b"") for key, value in store.records)


class Groups:
    """All groups of one directory. Made by the first consumer that has a group.

    All methods may be called from several threads. failure: why records could not be stored the last time; written
    under the lock. Requests whose records could not be stored get COORDINATOR_NOT_AVAILABLE.
    The constructor raises what reading `__consumer_offsets` raises.
    """

    def __init__(self, fs: FS, directory: Directory) -> None:
        self._fs = fs
        self._directory = directory
        self._lock = threading.RLock()
        rules = Rules(min_session_timeout_ms=1, max_session_timeout_ms=_LONGEST_MS)
        self._coordinator = Coordinator(rules, self._new_id)
        self._naming: Answer | None = None  # of the request to join that is carried out
        self._timers: Timers[tuple[Group, Timeout]] = Timers()
        self._effects: deque[Effect] = deque()
        self._unsynced = Settling(self._lock)
        self._steps = Combined(self._lock, self._flush, self._unsynced.settle)
        self._unwritten: deque[Store] = deque()  # in the order of the decisions
        self._listeners: tuple[Callable[[], None], ...] = ()
        self.failure: Exception | None = None
        self._started_ms = fs.now_ms() - fs.monotonic_ms()
        self._load()

    def _load(self) -> None:
        numbers = self._directory.partitions(OFFSETS_TOPIC) if OFFSETS_TOPIC in self._directory else ()
        found = stored_groups(self._directory.partition(OFFSETS_TOPIC, number) for number in numbers)
        self._do(
            lambda now_ms: self._coordinator.load(found.groups, found.offsets, now_ms, found.unstable, found.consumers)
        )
        # This process has the directory to itself, so those of before are gone. Static members may come back.
        for group in self._coordinator.all():
            gone: list[tuple[str, str | None]] = [
                (one.member_id, None) for one in group.members.values() if one.instance_id is None
            ]
            if gone:
                self._do(functools.partial(self._without, group.group_id, gone))
            if group.consumers is not None:
                classic: list[tuple[str, str | None]] = []
                for member_id, one in [*group.consumers.members.items()]:
                    if one.instance_id is None and one.classic is not None:
                        classic.append((member_id, None))
                    elif one.instance_id is None:
                        leaves = Beat(group_id=group.group_id, member_id=member_id, member_epoch=-1)
                        self._do(functools.partial(self._coordinator.beat, leaves, Answer()))
                if classic:
                    self._do(functools.partial(self._without, group.group_id, classic))
        self._unsynced.settle()

    def _without(self, group_id: str, gone: list[tuple[str, str | None]], now_ms: int) -> list[Effect]:
        return self._coordinator.leave(group_id, gone, now_ms)[1]

    def close(self) -> None:
        """Nothing: what they know ends with this object."""

    def now_ms(self) -> int:
        return self._started_ms + self._fs.monotonic_ms()

    # -- listeners

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls it, in any thread, whenever a group may have changed."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

    # -- requests

    def join(self, request: Join) -> Answer:
        """The answer comes when all members have joined: Joined or JoinRefused."""
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

    def sync(self, request: Sync) -> Answer:
        """The answer comes when the leader has assigned: Synced or a GroupError."""
        answer = Answer()
        self._do(lambda now_ms: self._coordinator.sync(request, answer, now_ms))
        return answer

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> GroupError | None:
        """Renews a session. None: all is as it was; else what the member has to hear."""
        found: list[GroupError | None] = []

        def beat(now_ms: int) -> list[Effect]:
            error, effects = self._coordinator.heartbeat(group_id, member_id, instance_id, generation, now_ms)
            found.append(error)
            return effects

        self._do(beat)
        return found[0]

    def leave(self, group_id: str, member_id: str, instance_id: str | None) -> None:
        self._do(lambda now_ms: self._coordinator.leave(group_id, [(member_id, instance_id)], now_ms)[1])

    def absent(self, group_id: str, member_id: str) -> None:
        """A static member is closed, and may come back."""
        self._do(lambda now_ms: self._coordinator.absent(group_id, [member_id], now_ms))

    def withdraw(self, group_id: str, joining: Answer) -> None:
        """Removes the member whose request to join waits for this answer. Does nothing once it is answered."""

        def withdraw(now_ms: int) -> list[Effect]:
            effects = self._coordinator.withdraw(group_id, joining, now_ms)
            group = self._coordinator.get(group_id)
            if group is not None and joining.id_end and not joining.is_there:
                # An interrupt took the answer of a step that was carried out.
                left = [(name, None) for name in group.members if name.endswith(joining.id_end)]
                effects += self._coordinator.leave(group_id, left, now_ms)[1]
            return effects

        self._do(withdraw)

    def commit(
        self, who: Committer, offsets: Mapping[OffsetKey, Committed], producer: tuple[int, int] | None = None
    ) -> GroupError | None:
        """Returns when the offsets are on disk, or why they are not. The check and the append are one step: no
        rebalance comes between them.

        producer: id and epoch of the producer whose open transaction the offsets belong to. They count once that is
        committed. Such a commit need not name a member.
        """
        # Who commits waits for the disk and not for news: 64 consumers that woke each other took 0.3 ms a commit.
        answer = Answer(is_awaited=False)

        def commit(now_ms: int) -> list[Effect]:
            if producer is None:
                return self._coordinator.commit_as(who, offsets, answer, now_ms)
            return self._coordinator.commit_in_transaction_as(who, producer, offsets, answer)

        return self._answered(answer, commit)

    @contextlib.contextmanager
    def committing(self, who: Committer) -> Generator[GroupError | None]:
        """For offsets that are stored elsewhere: inside the `with` the group does not change. Why this member may not
        commit now, or None.
        """
        with self._lock:
            error, effects = self._coordinator.check_commit(who, self.now_ms())
            self._act(effects)
            self._flush()
            yield error

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        """The marker of this producer is in `__consumer_offsets`."""
        with self._lock:
            self._coordinator.transaction_ended(producer_id, commit=commit)
            for listener in self._listeners:
                listener()

    def unstable(self, group_id: str) -> set[OffsetKey]:
        """The partitions for which an open transaction would commit something."""
        with self._lock:
            group = self._coordinator.get(group_id)
            return set() if group is None else {key for keys in group.unstable.values() for key in keys}

    def committed(self, group_id: str) -> dict[OffsetKey, Committed]:
        """All that a group has committed, on disk."""
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
        """The assignors that all members of a group know."""
        with self._lock:
            group = self._coordinator.get(group_id)
            return set() if group is None or not group.members else group.common_protocols()

    def rewind(self, group_id: str, offsets: Mapping[OffsetKey, Committed]) -> GroupError | None:
        """Commits offsets for a group that has members: they are removed in the same step, join again and begin there.
        So none of their commits can undo it.
        """
        answer = Answer()
        return self._answered(answer, lambda now_ms: self._coordinator.rewind(group_id, offsets, answer, now_ms))

    def delete(self, group_id: str) -> GroupError | None:
        """Deletes a group without members, with all that it has committed; or says why not."""
        answer = Answer()
        return self._answered(answer, lambda _: self._coordinator.delete(group_id, answer))

    def forget_topics(self, names: set[str]) -> None:
        """Deletes what was committed for topics that are deleted: a new one of that name begins without it.

        Raises ConsumerStateError when that could not be stored.
        """
        answers: list[Answer] = []

        def waiter() -> Answer:
            answers.append(Answer(is_awaited=False))
            return answers[-1]

        self._do(lambda _: self._coordinator.forget_topics(names, waiter))
        check_forgotten(map(self._result_of, answers), self.failure)

    def expire_offsets(self) -> None:
        """Deletes what was committed and kept long enough; to be called every EXPIRY_CHECK_MS or so."""
        self._do(lambda now_ms: self._coordinator.expire_offsets(self._directory.trusted_ms(now_ms)))

    def look(self) -> None:
        """Notices deadlines that have passed."""
        self._do(lambda _: ())

    def next_ms(self) -> int | None:
        """When a deadline passes, by now_ms()."""
        with self._lock:
            return self._timers.next_ms

    # -- effects

    def _answered(self, answer: Answer, step: Callable[[int], Iterable[Effect]]) -> GroupError | None:
        self._do(step)
        return self._result_of(answer)

    def _result_of(self, answer: Answer) -> GroupError | None:
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
        """Under the lock. Carries out effects, behind those that came before them."""
        self._effects.extend(effects)
        is_news = False
        while self._effects:
            effect = self._effects[0]  # an interrupt leaves it: the next step carries it out, which may be twice
            match effect:
                case Reply(Answer() as answer, result):
                    answer.result = result
                    answer.is_there = True
                    is_news = is_news or answer.is_awaited
                case Store() as store:
                    self._unwritten.append(store)
                case At(group, timeout, at_ms):
                    self._timers.at(at_ms, (group, timeout))
                case Cancel(group, timeout):
                    self._timers.cancel((group, timeout))
                case _:
                    is_news = True
            if self._effects and self._effects[0] is effect:  # else a signal handler was in here
                self._effects.popleft()
        if is_news:  # else members that wait would wake one another for ever, by looking
            for listener in self._listeners:
                listener()

    def _flush(self) -> None:
        """Under the lock: appends the records that decisions have led to; settle() syncs them."""
        while self._unwritten:
            stores = [self._unwritten.popleft()]
            try:
                self._write(stores)
            except BaseException:  # interrupted: the next step writes them, perhaps once more, which changes nothing
                self._unwritten.extendleft(reversed(stores))
                raise

    def _write(self, stores: list[Store]) -> None:
        """Appends the records of a decision, and adds to it those that may share its batch."""
        try:
            place = self.home(stores[0].group.group_id)
            log = self._log(place)
            self._take_followers(stores, place, log.config)
            now_ms = self._fs.now_ms()
            rows: list[RecordInput] = [(key, value, (), now_ms) for store in stores for key, value in store.records]
            receipt = append(log, rows, stores[0].producer, "os")
        except (LogcoreError, OSError) as error:
            self._have_stored(stores, error)
        else:
            self._unsynced.add({log: receipt.last_offset + 1}, functools.partial(self._settled, stores, log))

    def _take_followers(self, stores: list[Store], place: tuple[str, int], config: LogConfig) -> None:
        """Adds the decisions behind the first whose records go to the same partition, in the name of one producer."""
        # What the partition takes from one decision alone it must also take from several: with half of its limits there
        # is room for the heads.
        most_bytes = min(_BATCH_BYTES, config.max_message_bytes // 2, config.segment_bytes // 2)
        left = most_bytes - _size_of(stores[0])
        while self._unwritten:
            following = self._unwritten[0]
            left -= _size_of(following)
            is_of_batch = following.producer == stores[0].producer and self.home(following.group.group_id) == place
            if left < 0 or not is_of_batch:
                return
            stores.append(self._unwritten.popleft())

    def _settled(self, stores: list[Store], log: Log, failures: Mapping[Log, LogcoreError]) -> None:
        self._have_stored(stores, failures.get(log))
        self._flush()

    def _have_stored(self, stores: list[Store], failure: Exception | None) -> None:
        """Under the lock: the records are on disk, or could not be stored."""
        error = None
        if failure is not None:
            error = GroupError.COORDINATOR_NOT_AVAILABLE
            self.failure = failure
        for store in stores:
            if failure is not None:
                group_id = store.group.group_id
                tell("groups", ERROR, "%s: a record of group %r was not stored: %s", OFFSETS_TOPIC, group_id, failure)
            self._act(self._coordinator.stored(store, error, self.now_ms()))

    def home(self, group_id: str) -> tuple[str, int]:
        """The partition that a group's offsets are in, made if there is none. Raises what making it raises."""
        return home_of(self._directory, group_id)

    def _log(self, place: tuple[str, int]) -> Log:
        log = self._directory.partition(*place)
        return self._directory.open_again(*place) if log.has_failed else log
