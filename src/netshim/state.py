"""State of a running broker: opens the logs of requests and orders the work.

Rules:
- The broker has one thread. Every function here is called from it, except for the work
  that is given to `submit`.
- This module reads no clock and never blocks. The time is an argument of each call, and
  delayed actions use a timer or an Answer (scheduling.py).
- The host passes the current time to hear() before it delivers the result of submitted
  work. The disk may have stalled for longer than a session timeout.
- Work that requires a sync is passed to `submit`. The host may run it in another
  thread, and calls back in the broker's thread.

This module does not implement the protocol (handlers do) and opens no socket (server.py
does).
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

from logcore import (
    Log,
    LogcoreError,
    LogDir,
    LogFailedError,
    ResourceError,
    TopicNotFoundError,
)
from logcore.coordination.memory_budget import Remembered
from logcore.directory.group_settings import GroupSettings
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import INTERNAL_TOPICS
from netshim import scheduling
from netshim.request_log import Journal
from netshim.scheduling import (
    Later,
    LoopTimers,
    Pace,
    PendingResponse,
    Pieces,
    Steps,
    Submit,
    Syncs,
    Waiting,
    answer_with,
    as_value,
    pass_on,
)
from netshim.security.service import Security, SecuritySettings
from netshim.security.stored import SecurityFacts, SecurityStore
from netshim.session import ClientSession
from netshim.settings import Settings

_log = logging.getLogger("netshim")

_T = TypeVar("_T")


@attrs.frozen
class Call:
    """The facts about a request that a handler may use in addition to its body."""

    session: ClientSession
    api_key: int
    version: int
    client_id: str
    now_ms: int


class _InLine:
    """A request that later requests for the same logs must not overtake."""

    def __init__(self, keys: list[Key], start: Callable[[_InLine], None]) -> None:
        self.keys = keys
        self.start = start
        self.has_left = False


#: Work that may block on the disk, and the function to call with its result or
#: exception.
_Turn = tuple[Callable[[], Any], Callable[[Any], None]]
#: Maximum number of work items of one key that one thread runs before other keys get a
#: thread.
_TURNS_AT_ONCE: Final = 64
#: Checks for appends of other processes: their minimum interval, the cost for one
#: partition, and the share of one processor that all checks may use.
_FOLLOW_MS: Final = 5
_LOOK_MS: Final = 0.01
_LOOK_PART: Final = 0.02
#: The topic id that means "none".
NO_ID: Final = bytes(16)
#: Key of in_turn() for opening logs. They are opened one at a time, because the
#: directory has one lock.
_OPENING: Final = "opening"
#: Number of additional logs to close when the limit of open logs is reached.
_CLOSED_AT_ONCE: Final = 8
#: Key of in_turn() for stored users, rules and quotas.
SECURITY: Final = "security"
#: Key of in_turn() for allocating producer ids.
_PRODUCER_IDS: Final = "producer ids"


def _outcome(work: Callable[[], Any]) -> Any:
    """Return the result of work(), or its exception."""
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
        # The next open of the log reports the damage.
        with contextlib.suppress(LogcoreError, OSError):
            log.close()


def _ignore(_: object) -> None:
    """Ignore a result that no request waits for."""


def _behind_work(submit: Submit, action: Callable[[], None]) -> None:
    """Call an action after the work that was submitted earlier.

    It runs in another iteration of the event loop.
    """
    submit(lambda: None, lambda _: action())


class BrokerState:
    """State of one broker.

    `logdir` is open for writing. `submit` runs work that may block on the disk. `later`
    calls a function in another iteration of the event loop; the default uses `submit`.
    """

    def __init__(
        self,
        logdir: LogDir,
        settings: Settings,
        submit: Submit,
        later: Later | None = None,
        security: Security | None = None,
    ) -> None:
        self.security = security or Security(
            SecuritySettings(),
            open_store=partial(SecurityStore, logdir.path, logdir.fs),
            random=logdir.fs.random_bytes,
            wall_ms=logdir.fs.now_ms,
        )
        # Runs work of authentication. The host sets it, so that guessed passwords do
        # not delay the threads that sync.
        self.submit_login = submit
        self.is_shared = logdir.is_shared
        logdir.has_coordinator = not self.is_shared
        self.logdir = logdir
        self.settings = settings
        self.submit = submit
        # Set if groups of the consumer protocol are served.
        self.group_settings: GroupSettings | None = None
        if not self.is_shared:
            self.group_settings = logdir.coordinators.group_settings(logdir)
        self.remembered = Remembered(settings.max_remembered_bytes)
        self.timers = LoopTimers()
        self.journal = Journal()
        self.fetches = Waiting()
        self.syncs = Syncs(submit, policy_waits=logdir.durability.waits)
        self.pieces = Pieces(later or partial(_behind_work, submit))
        self.is_stopping = False
        # How many logs may be open now; set by the host.
        self.most_logs: Callable[[], int] = _no_limit
        self._used_ms: dict[Key, int] = {}  # when a request last used each log
        self.now_ms = 0  # the latest time that the host reported
        # Set by the broker, because groups depend on the state and not vice versa.
        self.groups: Any = None
        self.transactions: Any = None  # set by the broker too
        self._follows = False  # whether a timer for the next follow() is set
        self._names: dict[bytes, str] = {}  # topic id -> name, as of _names_version
        self._names_version = -1
        # High watermarks at the last wake_readers().
        self._visible: dict[tuple[str, int], int] = {}
        # Waiting work; a key is present while its work runs.
        self._turns: dict[Hashable, deque[_Turn]] = {}
        # Requests that have not started, see in_order().
        self._lines: dict[Key, deque[_InLine]] = {}
        # Requests that are first in all their queues.
        self._next_in_line: deque[_InLine] = deque()
        self._is_starting = False
        # Logs that could not be opened for the current call, with the errors.
        self._failures: Mapping[Key, LogcoreError] = {}

    def hear(self, now_ms: int) -> None:
        # Called by the host before it delivers a result.
        self.now_ms = max(self.now_ms, now_ms)

    @property
    def node_id(self) -> int:
        return self.logdir.node_id

    def log(self, topic: str, partition: int) -> Log:
        """Return the log of a partition that was passed to when_open().

        Raises:
            TopicNotFoundError: the topic or the partition does not exist.
            LogcoreError: the log could not be opened.
        """
        key = topic, partition
        log = self.logdir.opened(topic, partition)
        if log is not None and not log.has_failed:
            self._used_ms[key] = self.now_ms
            return log
        if key in self._failures:
            raise self._failures[key]
        if partition not in self.logdir.partitions(topic):
            raise TopicNotFoundError(
                f"topic {topic!r} has no such partition", found=partition
            )
        # The log failed after when_open() checked it.
        raise LogFailedError("the log has failed and will be opened again; try again")

    def free_log(self, topic: str, partition: int) -> Log | None:
        """Return the log of a partition if it is usable without waiting.

        The log is open and has not failed, and no request and no work waits for it.
        Otherwise, return None.
        """
        key = topic, partition
        if key in self._lines or key in self._turns:
            return None
        log = self.logdir.opened(topic, partition)
        if log is None or log.has_failed:
            return None
        self._used_ms[key] = self.now_ms
        return log

    def _is_to_open(self, key: Key) -> bool:
        """Return whether the log must be opened, or refreshed.

        A refresh is necessary after appends of another process. This raises no error,
        because a topic may be deleted at any time. A log that cannot be checked counts
        as one to open, and opening it reports the error.
        """
        topic, partition = key
        try:
            log = self.logdir.opened(topic, partition)
            if log is not None:
                return log.has_failed or (
                    self.is_shared and log.writer.state.is_behind()
                )
            return partition in self.numbers_of(topic)
        except (LogcoreError, OSError):
            return True

    def when_open(
        self, keys: Iterable[Key], handle: Callable[[], _T]
    ) -> _T | PendingResponse:
        """Open the logs of these partitions if necessary, then call handle().

        Return its result, or an Answer if opening takes time. Logs are opened one at a
        time, and several requests alternate. So one request for many logs does not
        delay the other requests.
        """
        those = list(dict.fromkeys(keys))
        if len(those) > scheduling.PIECE:
            return self.in_pieces(self._look_and_open(those, handle))
        return self._open_first([key for key in those if self._is_to_open(key)], handle)

    def _look_and_open(
        self, keys: list[Key], handle: Callable[[], _T]
    ) -> Steps[_T | PendingResponse]:
        """Run when_open() for many keys: check in chunks which logs are not open."""
        missing = []
        pace = Pace()
        for key in keys:
            if pace.is_over():
                yield
            if self._is_to_open(key):
                missing.append(key)
        return self._open_first(missing, handle)

    def _open_first(
        self, missing: list[Key], handle: Callable[[], _T]
    ) -> _T | PendingResponse:
        """Call handle() once the missing logs were opened."""
        if not missing:
            return handle()
        answer = PendingResponse()
        self._open_next(missing, {}, handle, answer)
        return answer

    def _open_next(
        self,
        missing: list[Key],
        failures: dict[Key, LogcoreError],
        handle: Callable[[], object],
        answer: PendingResponse,
    ) -> None:
        """Open the last of the missing logs, then the others.

        Then set the answer to the result of handle().
        """
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
        except Exception as error:
            # This runs as a callback of submitted work, so no caller would pass it on.
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
        answer: PendingResponse,
        result: Any,
    ) -> None:
        if isinstance(result, LogcoreError):
            failures[key] = result
            if isinstance(result, ResourceError):
                text = "%s-%d cannot be opened: %s; raise the limit, or serve fewer partitions"
                self.journal.say(
                    logging.ERROR, "out of files", self.now_ms, text, *key, result
                )
        elif isinstance(result, Exception):
            failures[key] = LogFailedError(f"the log cannot be opened: {result!r}")
        self._open_next(missing, failures, handle, answer)

    def make_room(self) -> None:
        """Close the least recently used logs if the limit of open logs is reached."""
        most = self.most_logs()
        # This count includes closed logs, but is cheap.
        if len(self.logdir.known_logs()) < most:
            return
        open_logs = self.logdir.open_logs()
        open_count = len(open_logs)
        if open_count < most:
            return
        busy = {*self._turns, *self._lines, *self.fetches.waited_for()}
        idle = [
            (key, log)
            for key, log in open_logs.items()
            if key not in busy
            and key[0] not in INTERNAL_TOPICS
            and not self.syncs.is_waiting_for(log)
        ]
        idle.sort(key=lambda each: self._used_ms.get(each[0], 0))
        closing = idle[: open_count - most + _CLOSED_AT_ONCE]
        self._used_ms = {
            key: self._used_ms.get(key, 0) for key, _ in idle[len(closing) :]
        }
        if closing:
            text = (
                "%d partitions are open, and the limit of open files allows %d: "
                "%d that were not used lately are closed"
            )
            self.journal.say(
                logging.WARNING,
                "closed for room",
                self.now_ms,
                text,
                open_count,
                most,
                len(closing),
            )
            self.in_turn(
                _OPENING, partial(_close, [log for _, log in closing]), _ignore
            )

    def in_pieces(self, steps: Steps[_T]) -> _T | PendingResponse:
        """Return the response of a request that runs in steps, or its Answer."""
        if self._failures:
            steps = self._with_failures(steps, self._failures)
        return self.pieces.run(steps)

    def _with_failures(
        self, steps: Steps[_T], failures: Mapping[Key, LogcoreError]
    ) -> Steps[_T]:
        """Run the steps of a request, with the errors of its logs set during each step."""
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

    def in_order(
        self, keys: Iterable[Key], begin: Callable[[], Steps[_T]]
    ) -> _T | PendingResponse:
        """Open the logs and run the steps, after all earlier calls that share a key.

        Without this order, a call that waits for many logs would be overtaken by a
        later one that waits for fewer.
        """
        those = list(dict.fromkeys(keys))
        if not any(key in self._lines or self._is_to_open(key) for key in those):
            return self.in_pieces(begin())
        answer = PendingResponse()

        def start(own: _InLine) -> None:
            def until_over() -> Steps[_T]:
                try:
                    return (yield from begin())
                finally:
                    self._leave(own)

            def begin_when_open() -> _T | PendingResponse:
                try:
                    return self.when_open(those, lambda: self.in_pieces(until_over()))
                except BaseException:
                    # Otherwise, later requests in the queues would never start.
                    self._leave(own)
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
        """Start the candidates that are first in all their queues.

        A loop starts them one after the other instead of recursively: there may be
        hundreds, and each may start the next.
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

    def in_background(self, work: Callable[[], Any]) -> PendingResponse:
        """Return the answer that will hold the result of work(), or its exception."""
        answer = PendingResponse()
        self.submit(work, answer.set)
        return answer

    def take_producer_id(self, done: Callable[[Any], None]) -> None:
        """Call done() with a new producer id, or with the error.

        Allocations run one at a time, because the first one may read all logs.
        """
        self.in_turn(_PRODUCER_IDS, self.logdir.next_producer_id, done)

    def in_turn(
        self, key: Hashable, work: Callable[[], Any], done: Callable[[Any], None]
    ) -> None:
        """Submit work that must run after the earlier work of the same key.

        The work of one key runs one item at a time. Work that arrives while other work
        of the key runs is executed as one batch. A thread for each append of a client
        that pipelines appends would cost more than the appends.
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
        self.submit(
            lambda: [_outcome(work) for work, _ in taken],
            partial(self._end_turns, key, taken),
        )

    def _end_turns(self, key: Hashable, taken: list[_Turn], outcomes: Any) -> None:
        # When the host is stopping, no work was done.
        if isinstance(outcomes, BaseException):
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

    def change_security(
        self, change: Callable[[], Any], respond: Callable[[Any], Any]
    ) -> PendingResponse:
        """Change stored users, rules or quotas, and answer once they are in effect.

        `change` runs in a thread, and `respond` turns its result into the response.
        """
        answer = PendingResponse()

        def work() -> tuple[Any, SecurityFacts]:
            result = change()
            return result, self.security.store().load()

        def done(outcome: Any) -> None:
            if isinstance(outcome, BaseException):
                answer.set(outcome)
                return
            result, facts = outcome
            self.security.publish(facts)
            answer.set(respond(result))

        self.in_turn(SECURITY, work, done)
        return answer

    def wall_ms(self) -> int:
        """Return the wall clock, which is compared with the times in tokens."""
        return self.security.wall_ms()

    def has_turns(self, key: Hashable) -> bool:
        """Return whether earlier work of that key is not done."""
        return key in self._turns

    def open(self, topic: str, partition: int) -> Log:
        """Open a log and return it. This blocks on the disk.

        A log with a failed write or sync is opened again, which checks the data on
        disk. Records that were not acknowledged may be missing afterwards.

        Raises:
            TopicNotFoundError: the topic or the partition does not exist.
            LogcoreError: the log could not be opened.
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
        """Return the partitions of a topic, or an empty tuple if it does not exist.

        Another thread may delete the topic between two calls, so this raises no
        TopicNotFoundError.
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
        """Return the name of a topic by its id, or None if there is no such topic."""
        if self.is_shared and topic_id not in self._names:
            self.logdir.refresh()  # another process may have created it
        version = self.logdir.topics_version
        if version != self._names_version:
            names: dict[bytes, str] = {}
            for name in self.logdir.topics():
                # If the topic is deleted concurrently, topics_version changes too.
                with contextlib.suppress(TopicNotFoundError):
                    names[self.topic_id(name)] = name
            names.pop(NO_ID, None)
            self._names = names
            self._names_version = version
        return self._names.get(topic_id)

    def appended(
        self, topic: str, partition: int, log: Log, end: int, now_ms: int
    ) -> None:
        """Wake the fetches of a partition once appended records are visible to readers.

        Call this after each append.
        """
        key = topic, partition
        if log.high_watermark >= end:
            self.fetches.wake([key], now_ms)
        else:
            self.syncs.when_durable(
                log, end, lambda _: self.fetches.wake([key], now_ms)
            )

    def follow(self, now_ms: int) -> None:
        """Refresh the partitions that fetches wait for.

        This makes appends of other processes visible. A timer repeats this while any
        fetch waits.
        """
        if not self.is_shared or self._follows:
            return
        keys = self.fetches.waited_for()
        for key in keys:
            log = self.logdir.opened(*key)
            if (
                log is None
                or log.has_failed
                or self.has_turns(key)
                or not log.writer.state.is_behind()
            ):
                continue
            self.in_turn(key, log.refresh, partial(self._followed, key, now_ms))
        if keys:
            self._follows = True
            self.timers.at(
                now_ms + max(_FOLLOW_MS, int(len(keys) * _LOOK_MS / _LOOK_PART)),
                self._follow_again,
            )

    def _follow_again(self, now_ms: int) -> None:
        self._follows = False
        self.follow(now_ms)

    def _followed(self, key: Key, now_ms: int, result: Any) -> None:
        if isinstance(result, LogcoreError | OSError):
            _log.error(
                "%s-%d: the changes of other processes cannot be read: %s", *key, result
            )
        self.fetches.wake([key], now_ms)

    def wake_readers(self, now_ms: int) -> None:
        """Wake the fetches of partitions with a changed high watermark.

        These are appends that did not come from clients of this broker.
        """
        before = self._visible
        now = {}
        for key in self.fetches.waited_for():
            now[key] = -1
            log = self.logdir.opened(*key)
            if log is not None:
                now[key] = log.high_watermark
        self._visible = now
        self.fetches.wake(
            [key for key, end in now.items() if before.get(key) != end], now_ms
        )
