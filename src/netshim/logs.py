"""Logs of a broker: opens them for requests, and closes them if too many are open.

Rules:
- A request gets its logs before its handler runs. Logs are opened in another thread, one
  at a time, because the directory has one lock.
- A log that could not be opened fails only for the request that needed it, see log().
- Requests that must not overtake each other use in_order().

This module does not read or write records (the handlers do).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from logcore import (
    Log,
    LogcoreError,
    LogFailedError,
    NotLeaderError,
    ResourceError,
    TopicNotFoundError,
)
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import INTERNAL_TOPICS
from netshim import scheduling
from netshim.fetch_wakeups import WaitingFetches
from netshim.request_log import Journal
from netshim.request_order import QueuedRequest, RequestQueues, WorkQueues
from netshim.scheduling import (
    ChunkCounter,
    Lifecycle,
    PendingResponse,
    StepRunner,
    Steps,
    Syncs,
    chain_response,
    resolve_with,
)
from netshim.served_directory import ServedDirectory

_log = logging.getLogger("netshim")

_T = TypeVar("_T")
#: Key of the work that opens and closes logs.
_OPENING: Final = "opening"
#: Number of additional logs to close when the limit of open logs is reached. The next
#: opening waits for them, 2 ms for each log that must be synced.
_EXTRA_CLOSED: Final = 8


def _no_limit() -> int:
    return sys.maxsize


def _close(logs: list[Log]) -> None:
    for log in logs:
        # The next open of the log reports the damage.
        with contextlib.suppress(LogcoreError, OSError):
            log.close()


class BrokerLogs:
    """The logs of one broker. All methods except open() are for the broker's thread."""

    def __init__(
        self,
        logdir: ServedDirectory,
        lifecycle: Lifecycle,
        journal: Journal,
        *,
        work: WorkQueues,
        fetches: WaitingFetches,
        syncs: Syncs,
        step_runner: StepRunner,
    ) -> None:
        self._logdir = logdir
        self._lifecycle = lifecycle
        self._journal = journal
        #: Work on the logs that may block on the disk.
        self._work = work
        #: Requests that wait for records. Their logs are not closed.
        self._fetches = fetches
        #: Requests that wait for a sync. Their logs are not closed either.
        self._syncs = syncs
        #: Runs requests in steps.
        self._step_runner = step_runner
        #: Requests that run in order, by their logs.
        self._requests = RequestQueues()
        # Keys of logs whose requests or work are not done; they change with the queues.
        self._queued_keys = self._requests.keys()
        self._keys_at_work = work.keys()
        #: Raises NotLeaderError for partitions that another broker leads. Set in a
        #: cluster.
        self.check_leader: Callable[[Key], None] | None = None
        #: Return how many logs may be open now. Set by the host.
        self.max_open_logs: Callable[[], int] = _no_limit
        #: When a request last used each log.
        self._used_ms: dict[Key, int] = {}
        #: Logs that could not be opened for the current call, with the errors.
        self._failures: Mapping[Key, LogcoreError] = {}
        #: Logs that are being closed to make room for others.
        self._closing: set[Key] = set()
        #: Number of calls of close_unused_logs() that need not count the open logs.
        self._openings_before_count = 0
        #: Position of the first log that the next request for too many logs opens.
        self._next_to_open = 0

    @property
    def queued(self) -> Iterable[Key]:
        """The logs of requests of in_order() that have not ended."""
        return self._requests.keys()

    def log(self, topic: str, partition: int) -> Log:
        """Return the log of a partition that was passed to when_open().

        Raises:
            TopicNotFoundError: the topic or the partition does not exist.
            NotLeaderError: another broker leads the partition.
            LogcoreError: the log could not be opened.
        """
        log = self.replica(topic, partition)
        if self.check_leader is not None:
            self.check_leader((topic, partition))
        return log

    def replica(self, topic: str, partition: int) -> Log:
        """Return a log like log(), also if another broker leads the partition."""
        key = topic, partition
        log = self._logdir.host.opened(topic, partition)
        if log is not None and not log.has_failed:
            self._used_ms[key] = self._lifecycle.now_ms
            return log
        if key in self._failures:
            raise self._failures[key]
        if partition not in self._logdir.partitions(topic):
            raise TopicNotFoundError(
                f"topic {topic!r} has no such partition", found=partition
            )
        # The log failed after when_open() checked it, or was closed to make room.
        raise LogFailedError("the log is not open and will be opened; try again")

    def free_log(self, topic: str, partition: int) -> Log | None:
        """Return the log of a partition if it is usable without waiting.

        The log is open and has not failed, and no request and no work waits for it.
        Otherwise, return None.
        """
        key = topic, partition
        is_busy = key in self._queued_keys or key in self._keys_at_work
        # The request must not overtake earlier ones for the log.
        if is_busy or key in self._closing:
            return None
        log = self._logdir.host.opened(topic, partition)
        if log is None or log.has_failed:
            return None
        if self.check_leader is not None:
            try:
                self.check_leader(key)
            except NotLeaderError:
                return None
        self._used_ms[key] = self._lifecycle.now_ms
        return log

    def _must_open(self, key: Key) -> bool:
        """Return whether the log must be opened, or refreshed.

        A refresh is necessary after appends of another process. This raises no error,
        because a topic may be deleted at any time. A log that cannot be checked counts
        as one to open, and opening it reports the error.
        """
        topic, partition = key
        if key in self._closing:
            return True  # it is opened after it was closed
        try:
            log = self._logdir.host.opened(topic, partition)
            if log is not None:
                # A failed log is recovered when it is opened again.
                return log.has_failed or (
                    self._logdir.is_shared and log.host.writer.state.is_behind()
                )
            return partition in self.numbers_of(topic)
        except (LogcoreError, OSError):
            return True

    def when_open(
        self,
        keys: Iterable[Key],
        handle: Callable[[], _T],
        *,
        needs_all: bool = False,
    ) -> _T | PendingResponse:
        """Open the logs of these partitions if necessary, then call handle().

        Return its result, or a PendingResponse if opening takes time. Logs are opened
        one at a time, and several requests alternate, so that a request for many logs
        does not delay the others.

        If these are more partitions than logs may be open, some of them get a retriable
        error, unless the request `needs_all`.
        """
        unique = list(dict.fromkeys(keys))
        if len(unique) > scheduling.CHUNK_ENTRIES:
            return self.run_in_steps(
                self._open_in_steps(unique, handle, needs_all=needs_all)
            )
        to_open = [key for key in unique if self._must_open(key)]
        return self._open_first(unique, to_open, handle, needs_all=needs_all)

    def _open_in_steps(
        self, keys: list[Key], handle: Callable[[], _T], *, needs_all: bool
    ) -> Steps[_T | PendingResponse]:
        """Run when_open() for many keys: check in chunks which logs are not open."""
        to_open = []
        chunk_counter = ChunkCounter()
        for key in keys:
            if chunk_counter.is_over():
                yield
            if self._must_open(key):
                to_open.append(key)
        return self._open_first(keys, to_open, handle, needs_all=needs_all)

    def _open_first(
        self,
        keys: list[Key],
        to_open: list[Key],
        handle: Callable[[], _T],
        *,
        needs_all: bool,
    ) -> _T | PendingResponse:
        """Call handle() once the missing logs were opened.

        If the keys are more than the logs that may be open, half as many are opened, and
        the other missing ones get a retriable error. Each request opens the next ones, so
        a client that repeats a request gets an answer for each partition.
        """
        if not to_open:
            return handle()
        failures: dict[Key, LogcoreError] = {}
        # close_unused_logs() closes some logs more than necessary, so that it runs rarely.
        max_logs = max(1, self.max_open_logs() - _EXTRA_CLOSED)
        if len(keys) > max_logs and not needs_all:
            batch_size = max(1, max_logs // 2)
            first = self._next_to_open % len(to_open)
            self._next_to_open = first + batch_size
            rotated = to_open[first:] + to_open[:first]
            to_open = rotated[:batch_size]
            error = ResourceError(
                "a request for more partitions than logs that may be open",
                expected=f"at most {max_logs}",
                found=len(keys),
            )
            failures = dict.fromkeys(rotated[batch_size:], error)
        elif not needs_all:
            # The logs of the request that are open must not be closed for the others.
            for key in keys:
                if self._logdir.host.opened(*key) is not None:
                    self._used_ms[key] = self._lifecycle.now_ms
        pending = PendingResponse()
        self._open_next(to_open, failures, handle, pending)
        return pending

    def _open_next(
        self,
        to_open: list[Key],
        failures: dict[Key, LogcoreError],
        handle: Callable[[], object],
        pending: PendingResponse,
    ) -> None:
        """Open the last of the missing logs, then the others.

        Then set the response to the result of handle().
        """
        # Another request may have opened the log in the meantime.
        while to_open and (
            self._lifecycle.is_stopping or not self._must_open(to_open[-1])
        ):
            to_open.pop()
        if to_open:
            key = to_open.pop()
            self.close_unused_logs()
            when_opened = partial(
                self._on_opened, key, to_open, failures, handle, pending
            )
            self._work.submit(_OPENING, lambda: self.open(*key), when_opened)
            return
        # log() raises these errors, while handle() runs.
        self._failures = failures
        response: object
        try:
            response = handle()
        except Exception as error:
            # This runs as a callback of submitted work, so no caller would pass it on.
            response = error
        finally:
            self._failures = {}
        chain_response(response, pending)

    def _on_opened(
        self,
        key: Key,
        to_open: list[Key],
        failures: dict[Key, LogcoreError],
        handle: Callable[[], object],
        pending: PendingResponse,
        result: Any,
    ) -> None:
        if isinstance(result, LogcoreError):
            failures[key] = result
            if isinstance(result, ResourceError):
                # Other code has opened logs, so the next opening counts them.
                self._openings_before_count = 0
                text = "%s-%d cannot be opened: %s; raise the limit, or serve fewer partitions"
                self._journal.log(
                    logging.ERROR,
                    "out of files",
                    self._lifecycle.now_ms,
                    text,
                    *key,
                    result,
                )
        elif isinstance(result, Exception):
            # An internal error must not leave the client without a response.
            failures[key] = LogFailedError(f"the log cannot be opened: {result!r}")
        else:
            # Otherwise, it could be closed for the next log of the same request.
            self._used_ms[key] = self._lifecycle.now_ms
        self._open_next(to_open, failures, handle, pending)

    def close_unused_logs(self) -> None:
        """Close the least recently used logs if the limit of open logs is reached.

        Call it before each log is opened, and after each new connection, which lowers
        the limit by at most one.
        """
        max_logs = self.max_open_logs()
        # This count includes closed logs, but is cheap.
        if len(self._logdir.host.known_logs()) < max_logs:
            self._openings_before_count = 0
            return
        # Counting 10,000 open logs takes 20 ms, so it is not done for each opening.
        if self._openings_before_count > 0:
            self._openings_before_count -= 1
            return
        open_logs = self._logdir.host.open_logs()
        open_count = len(open_logs)
        if open_count < max_logs:
            self._openings_before_count = max_logs - open_count - 1
            return
        busy = {
            *self._work.keys(),
            *self._requests.keys(),
            *self._fetches.awaited_keys(),
        }
        idle = [
            (key, log)
            for key, log in open_logs.items()
            if key not in busy
            and key not in self._closing
            # The coordinators append to these at any time.
            and key[0] not in INTERNAL_TOPICS
            and not self._syncs.is_waiting_for(log)
        ]
        # A log without a time was not used since it was opened.
        idle.sort(key=lambda entry: self._used_ms.get(entry[0], 0))
        closing = idle[: open_count - max_logs + _EXTRA_CLOSED]
        self._openings_before_count = max(0, max_logs - open_count + len(closing) - 1)
        # Entries of logs that were closed or deleted would otherwise remain.
        self._used_ms = {
            key: self._used_ms.get(key, 0) for key, _ in idle[len(closing) :]
        }
        if closing:
            text = (
                "%d partitions are open, and the limit of open files allows %d: "
                "%d that were not used lately are closed"
            )
            self._journal.log(
                logging.WARNING,
                "closed for room",
                self._lifecycle.now_ms,
                text,
                open_count,
                max_logs,
                len(closing),
            )
            keys = {key for key, _ in closing}
            # free_log() must not return a log that is being closed.
            self._closing |= keys
            self._work.submit(
                _OPENING,
                partial(_close, [log for _, log in closing]),
                lambda _: self._closing.difference_update(keys),
            )

    def run_in_steps(self, steps: Steps[_T]) -> _T | PendingResponse:
        """Return the response of a request that runs in steps, or a PendingResponse."""
        # Requests in steps run after handle() has returned.
        if self._failures:
            steps = self._with_failures(steps, self._failures)
        return self._step_runner.run(steps)

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

        See RequestQueues.
        """
        unique = list(dict.fromkeys(keys))
        if not any(
            self._requests.is_busy(key) or self._must_open(key) for key in unique
        ):
            return self.run_in_steps(begin())
        pending = PendingResponse()

        def start(queued: QueuedRequest) -> None:
            def run_and_leave() -> Steps[_T]:
                try:
                    return (yield from begin())
                finally:
                    self._requests.leave(queued)

            def begin_when_open() -> _T | PendingResponse:
                try:
                    return self.when_open(
                        unique,
                        lambda: self.run_in_steps(run_and_leave()),
                        needs_all=True,
                    )
                except BaseException:
                    # Otherwise, later requests in the queues would never start.
                    self._requests.leave(queued)
                    raise

            resolve_with(begin_when_open, pending)

        self._requests.enter(QueuedRequest(unique, start))
        return pending

    def open(self, topic: str, partition: int) -> Log:
        """Open a log and return it. This blocks on the disk.

        A log with a failed write or sync is opened again, which checks the data on
        disk. Records that were not acknowledged may be missing afterwards.

        Raises:
            TopicNotFoundError: the topic or the partition does not exist.
            LogcoreError: the log could not be opened.
        """
        log = self._logdir.partition(topic, partition)
        if self._logdir.is_shared:
            log.refresh()
        if log.has_failed:
            _log.error("%s: a write or sync failed; the log is opened again", log.path)
            log = self._logdir.host.open_again(topic, partition)
            _log.error("%s: opened again, %s", log.path, log.recovery_report)
        return log

    def numbers_of(self, topic: str) -> tuple[int, ...]:
        """Return the partitions of a topic, or an empty tuple if it does not exist.

        Another thread may delete the topic between two calls, so this raises no
        TopicNotFoundError.
        """
        if topic not in self._logdir:
            return ()
        try:
            return self._logdir.partitions(topic)
        except TopicNotFoundError:
            return ()
