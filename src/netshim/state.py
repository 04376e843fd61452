"""The state of a running broker: finds and opens the logs of requests, and orders the work on them.

Rules:
- One thread. Everything here is called from the broker's thread, except the work given to `submit`.
- Nothing here reads a clock or waits: the time comes with each call, what must happen later is a timer or an Answer
  (waiting.py). Before the host calls back with the result of submitted work it tells the time with hear(): a disk may
  have stalled for longer than a session lasts.
- Work that asks the disk to sync goes through `submit`, which may run it in another thread and calls back in this one.

This module speaks no protocol (handlers do) and opens no socket (server.py does).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import attrs

from logcore import Log, LogcoreError, LogDir, LogFailedError, ResourceError, TopicNotFoundError
from logcore.checkpoint import Key
from logcore.coordination.remembered import Remembered
from logcore.directory.groupsettings import GroupSettings
from logcore.names import INTERNAL_TOPICS
from netshim import waiting
from netshim.journal import Journal
from netshim.session import Session
from netshim.settings import Settings
from netshim.waiting import (
    Answer,
    Later,
    Pace,
    Pieces,
    Steps,
    Submit,
    Syncs,
    Timers,
    Waiting,
    answer_with,
    as_value,
    pass_on,
)

_log = logging.getLogger("netshim")

_T = TypeVar("_T")


@attrs.frozen
class Call:
    """The facts of a request that a handler may use beside its body."""

    session: Session
    api_key: int
    version: int
    client_id: str
    now_ms: int


class _InLine:
    """A request that other requests for the same logs may not overtake."""

    def __init__(self, keys: list[Key], start: Callable[[_InLine], None]) -> None:
        self.keys = keys
        self.start = start
        self.has_left = False


#: Work that may wait for the disk, and the function to call with its result or exception.
_Turn = tuple[Callable[[], Any], Callable[[Any], None]]
#: Most turns of one key that one thread takes before others have theirs.
_TURNS_AT_ONCE: Final = 64
#: How often to look whether other processes have appended, at most; the cost of looking at one partition; and the part
#: of a processor that all looks may take.
_FOLLOW_MS: Final = 5
_LOOK_MS: Final = 0.01
_LOOK_PART: Final = 0.02
#: The topic id that stands for none.
NO_ID: Final = bytes(16)
#: The turn for opening logs: one at a time, for the directory has one lock.
_OPENING: Final = "opening"
#: When there is no room for more open logs, so many are closed together.
_CLOSED_AT_ONCE: Final = 8
#: The turn for producer ids.
_PRODUCER_IDS: Final = "producer ids"


def _outcome(work: Callable[[], Any]) -> Any:
    """The result of work(), or its error."""
    try:
        return work()
    except (LogcoreError, OSError) as error:
        return as_value(error)
    except Exception as error:
        return error


def _no_limit() -> int:
    return sys.maxsize


def _close(logs: list[Log]) -> None:
    for log in logs:
        with contextlib.suppress(LogcoreError, OSError):  # the next opening finds what is wrong
            log.close()


def _ignore(_: object) -> None:
    """No request waits."""


def _behind_work(submit: Submit, action: Callable[[], None]) -> None:
    """Calls an action behind work that was submitted, and so in another turn of the loop."""
    submit(lambda: None, lambda _: action())


class State:
    """One broker's state. logdir: opened for writing; submit: how to run work that may wait for the disk; later: how to
    call a function in another turn of the loop, by default through submit.
    """

    def __init__(self, logdir: LogDir, settings: Settings, submit: Submit, later: Later | None = None) -> None:
        self.is_shared = logdir.is_shared
        logdir.has_coordinator = not self.is_shared
        self.logdir = logdir
        self.settings = settings
        self.submit = submit
        self.group_settings: GroupSettings | None = None  # where groups of the consumer protocol are served
        if not self.is_shared:
            self.group_settings = logdir.coordinators.group_settings(logdir)
        self.remembered = Remembered(settings.max_remembered_bytes)
        self.timers = Timers()
        self.journal = Journal()
        self.fetches = Waiting()
        self.syncs = Syncs(submit, policy_waits=logdir.durability.waits)
        self.pieces = Pieces(later or partial(_behind_work, submit))
        self.is_stopping = False
        self.most_logs: Callable[[], int] = _no_limit  # how many logs may be open now; the host knows
        self._used_ms: dict[Key, int] = {}  # when a request last used a log
        self.now_ms = 0  # the latest time heard of
        self.groups: Any = None  # set by the broker; groups know the state, not the other way round
        self.transactions: Any = None  # the same
        self._follows = False  # whether a timer will look at partitions that others append to
        self._names: dict[bytes, str] = {}  # topic id -> name, as of a version of the topics
        self._names_version = -1
        self._visible: dict[tuple[str, int], int] = {}  # high watermarks as of the last wake_readers()
        self._turns: dict[Hashable, deque[_Turn]] = {}  # that wait; a key exists while one of its turns is under way
        self._lines: dict[Key, deque[_InLine]] = {}  # requests that have not begun, see in_order()
        self._next_in_line: deque[_InLine] = deque()  # those that are first in all their lines
        self._is_starting = False
        self._failures: Mapping[Key, LogcoreError] = {}  # of the logs that were opened for the call under way

    def hear(self, now_ms: int) -> None:
        self.now_ms = max(self.now_ms, now_ms)

    @property
    def node_id(self) -> int:
        return self.logdir.node_id

    def log(self, topic: str, partition: int) -> Log:
        """The log of a partition that when_open() was asked for. Raises TopicNotFoundError and what opening raised."""
        key = topic, partition
        log = self.logdir.opened(topic, partition)
        if log is not None and not log.has_failed:
            self._used_ms[key] = self.now_ms
            return log
        if key in self._failures:
            raise self._failures[key]
        if partition not in self.logdir.partitions(topic):
            raise TopicNotFoundError(f"topic {topic!r} has no such partition", found=partition)
        raise LogFailedError("the log has failed and will be opened again; try again")  # since when_open() has looked

    def free_log(self, topic: str, partition: int) -> Log | None:
        """The log of a partition if it is open and sound, and no request and no work for it waits."""
        key = topic, partition
        if key in self._lines or key in self._turns:
            return None
        log = self.logdir.opened(topic, partition)
        if log is None or log.has_failed:
            return None
        self._used_ms[key] = self.now_ms
        return log

    def _is_to_open(self, key: Key) -> bool:
        """Whether its log is to be opened, or has not taken in what another process did. Raises nothing: a topic may be
        deleted in any moment, and what cannot be looked at is opened, which says why.
        """
        topic, partition = key
        try:
            log = self.logdir.opened(topic, partition)
            if log is not None:
                return log.has_failed or (self.is_shared and log.writer.state.is_behind())
            return partition in self.numbers_of(topic)
        except (LogcoreError, OSError):
            return True

    def when_open(self, keys: Iterable[Key], handle: Callable[[], _T]) -> _T | Answer:
        """handle(), once the logs of these partitions are open, or known not to open; an Answer when that takes time.

        Logs are opened one after the other, those of several requests by turns, so that one request for many does not
        keep the others waiting.
        """
        those = list(dict.fromkeys(keys))
        if len(those) > waiting.PIECE:
            return self.in_pieces(self._look_and_open(those, handle))
        return self._open_first([key for key in those if self._is_to_open(key)], handle)

    def _look_and_open(self, keys: list[Key], handle: Callable[[], _T]) -> Steps[_T | Answer]:
        """As when_open(), which looks for each key whether it is open."""
        missing = []
        pace = Pace()
        for key in keys:
            if pace.is_over():
                yield
            if self._is_to_open(key):
                missing.append(key)
        return self._open_first(missing, handle)

    def _open_first(self, missing: list[Key], handle: Callable[[], _T]) -> _T | Answer:
        """handle(), once these were opened."""
        if not missing:
            return handle()
        answer = Answer()
        self._open_next(missing, {}, handle, answer)
        return answer

    def _open_next(
        self, missing: list[Key], failures: dict[Key, LogcoreError], handle: Callable[[], object], answer: Answer
    ) -> None:
        """Opens the last of the missing logs, then the others; after that sets the answer to what handle() gives."""
        while missing and (self.is_stopping or not self._is_to_open(missing[-1])):
            missing.pop()
        if missing:
            key = missing.pop()
            self.make_room()
            opened = partial(self._opened, key, missing, failures, handle, answer)
            self.in_turn(_OPENING, lambda: self.open(*key), opened)
            return
        self._failures = failures
        response: object
        try:
            response = handle()
        except Exception as error:  # called by a submitted job: no caller would pass it to the client
            response = error
        finally:
            self._failures = {}
        pass_on(response, answer)

    def _opened(
        self,
        key: Key,
        missing: list[Key],
        failures: dict[Key, LogcoreError],
        handle: Callable[[], object],
        answer: Answer,
        result: Any,
    ) -> None:
        if isinstance(result, LogcoreError):
            failures[key] = result
            if isinstance(result, ResourceError):
                text = "%s-%d cannot be opened: %s; raise the limit, or serve fewer partitions"
                self.journal.say(logging.ERROR, "out of files", self.now_ms, text, *key, result)
        elif isinstance(result, Exception):
            failures[key] = LogFailedError(f"the log cannot be opened: {result!r}")
        self._open_next(missing, failures, handle, answer)

    def make_room(self) -> None:
        """Closes logs that were not used lately, so that another one may be opened."""
        most = self.most_logs()
        if len(self.logdir.known_logs()) < most:  # which counts closed ones too, and takes no time
            return
        open_logs = self.logdir.open_logs()
        open_count = len(open_logs)
        if open_count < most:
            return
        busy = {*self._turns, *self._lines, *self.fetches.waited_for()}
        idle = [
            (key, log)
            for key, log in open_logs.items()
            if key not in busy and key[0] not in INTERNAL_TOPICS and not self.syncs.is_waiting_for(log)
        ]
        idle.sort(key=lambda each: self._used_ms.get(each[0], 0))
        closing = idle[: open_count - most + _CLOSED_AT_ONCE]
        self._used_ms = {key: self._used_ms.get(key, 0) for key, _ in idle[len(closing) :]}
        if closing:
            text = (
                "%d partitions are open, and the limit of open files allows %d: %d that were not used lately are closed"
            )
            self.journal.say(logging.WARNING, "closed for room", self.now_ms, text, open_count, most, len(closing))
            self.in_turn(_OPENING, partial(_close, [log for _, log in closing]), _ignore)

    def in_pieces(self, steps: Steps[_T]) -> _T | Answer:
        """The response of a request that is done in steps, or the Answer that will hold it."""
        if self._failures:
            steps = self._with_failures(steps, self._failures)
        return self.pieces.run(steps)

    def _with_failures(self, steps: Steps[_T], failures: Mapping[Key, LogcoreError]) -> Steps[_T]:
        """Steps of a request for which logs could not be opened: each of them has to see which."""
        while True:
            self._failures = failures
            try:
                next(steps)
            except StopIteration as end:
                response: _T = end.value
                return response
            finally:
                self._failures = {}
            yield

    def in_order(self, keys: Iterable[Key], begin: Callable[[], Steps[_T]]) -> _T | Answer:
        """As when_open(), in steps, and behind all earlier calls for one of the keys. Otherwise a call that waits for
        many logs would be overtaken by a later one that waits for fewer.
        """
        those = list(dict.fromkeys(keys))
        if not any(key in self._lines or self._is_to_open(key) for key in those):
            return self.in_pieces(begin())
        answer = Answer()

        def start(own: _InLine) -> None:
            def until_over() -> Steps[_T]:
                try:
                    return (yield from begin())
                finally:
                    self._leave(own)

            def begin_when_open() -> _T | Answer:
                try:
                    return self.when_open(those, lambda: self.in_pieces(until_over()))
                except BaseException:
                    self._leave(own)  # or those behind it would wait for ever
                    raise

            answer_with(begin_when_open, answer)

        own = _InLine(those, start)
        for key in those:
            self._lines.setdefault(key, deque()).append(own)
        self._start_first([own])
        return answer

    def _leave(self, done: _InLine) -> None:
        if done.has_left:
            return
        done.has_left = True
        behind = []
        for key in done.keys:
            line = self._lines[key]
            line.popleft()
            if line:
                behind.append(line[0])
            else:
                del self._lines[key]
        self._start_first(behind)

    def _start_first(self, candidates: Iterable[_InLine]) -> None:
        """Starts those of them that are first in all their lines. One after the other in the loop below, and not one
        inside the other: there may be hundreds, and each may start the next.
        """
        for one in dict.fromkeys(candidates):
            if all(self._lines[key][0] is one for key in one.keys):
                self._next_in_line.append(one)
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._next_in_line:
                one = self._next_in_line.popleft()
                one.start(one)
        finally:
            self._is_starting = False

    def in_background(self, work: Callable[[], Any]) -> Answer:
        """The answer that will hold the result of work(), or its error."""
        answer = Answer()
        self.submit(work, answer.set)
        return answer

    def take_producer_id(self, done: Callable[[Any], None]) -> None:
        """done(a producer id that was never given out, or the error). By turns: the first one may read all logs."""
        self.in_turn(_PRODUCER_IDS, self.logdir.next_producer_id, done)

    def in_turn(self, key: Hashable, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """As submit, but one after the other for each key, in the order of the calls.

        Work that has gathered meanwhile is done together: a thread for each append of a client that pipelines them
        would cost more than the appends.
        """
        turns = self._turns.get(key)
        if turns is not None:
            turns.append((work, done))
            return
        self._turns[key] = deque([(work, done)])
        self._start_turns(key)

    def _start_turns(self, key: Hashable) -> None:
        turns = self._turns[key]
        taken = [turns.popleft() for _ in range(min(len(turns), _TURNS_AT_ONCE))]
        self.submit(lambda: [_outcome(work) for work, _ in taken], partial(self._end_turns, key, taken))

    def _end_turns(self, key: Hashable, taken: list[_Turn], outcomes: Any) -> None:
        if isinstance(outcomes, BaseException):  # nothing was done: the host is stopping
            outcomes = [outcomes] * len(taken)
        for (_, then), outcome in zip(taken, outcomes, strict=True):
            try:
                then(outcome)
            except Exception:
                _log.exception("an answer that came later")
        if self._turns[key]:
            self._start_turns(key)
        else:
            del self._turns[key]

    def has_turns(self, key: Hashable) -> bool:
        """Whether earlier work of that key is not done."""
        return key in self._turns

    def open(self, topic: str, partition: int) -> Log:
        """Opens a log, which waits for the disk. Raises TopicNotFoundError and what opening raises.

        A log that a failed write or sync has poisoned is opened again, which checks what is on disk; records that were
        not acknowledged may be missing then.
        """
        log = self.logdir.partition(topic, partition)
        if self.is_shared:
            log.refresh()
        if log.has_failed:
            _log.error("%s: a write or sync failed; the log is opened again", log.path)
            log = self.logdir.open_again(topic, partition)
            _log.error("%s: opened again, %s", log.path, log.recovery_report)
        return log

    def numbers_of(self, topic: str) -> tuple[int, ...]:
        """The partitions of a topic, none if it does not exist. Another thread may delete it between two calls, so this
        raises no TopicNotFoundError.
        """
        if topic not in self.logdir:
            return ()
        try:
            return self.logdir.partitions(topic)
        except TopicNotFoundError:
            return ()

    def topic_id(self, topic: str) -> bytes:
        return self.logdir.topic_id(topic).bytes

    def topic_of(self, topic_id: bytes) -> str | None:
        """The name of a topic by its id, None when there is none."""
        if self.is_shared and topic_id not in self._names:
            self.logdir.refresh()  # another process may have made it
        version = self.logdir.topics_version
        if version != self._names_version:
            names: dict[bytes, str] = {}
            for name in self.logdir.topics():
                with contextlib.suppress(TopicNotFoundError):  # deleted in this moment, so that the version is another
                    names[self.topic_id(name)] = name
            names.pop(NO_ID, None)
            self._names = names
            self._names_version = version
        return self._names.get(topic_id)

    def appended(self, topic: str, partition: int, log: Log, end: int, now_ms: int) -> None:
        """To be called after an append: wakes fetches that wait for it, once it may be read."""
        key = topic, partition
        if log.high_watermark >= end:
            self.fetches.wake([key], now_ms)
        else:
            self.syncs.when_durable(log, end, lambda _: self.fetches.wake([key], now_ms))

    def follow(self, now_ms: int) -> None:
        """Takes in what other processes have appended to the partitions that fetches wait for, and goes on doing so
        while any fetch waits.
        """
        if not self.is_shared or self._follows:
            return
        keys = self.fetches.waited_for()
        for key in keys:
            log = self.logdir.opened(*key)
            if log is None or log.has_failed or self.has_turns(key) or not log.writer.state.is_behind():
                continue
            self.in_turn(key, log.refresh, partial(self._followed, key, now_ms))
        if keys:
            self._follows = True
            self.timers.at(now_ms + max(_FOLLOW_MS, int(len(keys) * _LOOK_MS / _LOOK_PART)), self._follow_again)

    def _follow_again(self, now_ms: int) -> None:
        self._follows = False
        self.follow(now_ms)

    def _followed(self, key: Key, now_ms: int, result: Any) -> None:
        if isinstance(result, LogcoreError | OSError):
            _log.error("%s-%d: what other processes did cannot be read: %s", *key, result)
        self.fetches.wake([key], now_ms)

    def wake_readers(self, now_ms: int) -> None:
        """Wakes fetches of partitions that were appended to by others than the broker's clients."""
        before = self._visible
        now = {}
        for key in self.fetches.waited_for():
            now[key] = -1
            log = self.logdir.opened(*key)
            if log is not None:
                now[key] = log.high_watermark
        self._visible = now
        self.fetches.wake([key for key, end in now.items() if before.get(key) != end], now_ms)
