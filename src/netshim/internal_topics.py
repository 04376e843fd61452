"""A topic that the broker itself writes and reads, with a callback for each append.

Rules:
- The topic is created before the first append. The hash of an id selects its partition.
- The callback of an append runs once the records are durable, or as safe as the caller
  requires. In a cluster, they are committed then. Therefore, the caller's state never
  reflects records that a crash could remove.
- Callbacks run in the order of the log, so that an earlier value never overwrites a
  later one.
- All work on the topic that may block runs through WorkQueues.submit() with the name of
  the topic as its key.

This module does not interpret the records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from logcore import Log, LogcoreError, Receipt
from logcore.format.group_records import partition_of
from netshim.scheduling import without_tracebacks
from netshim.state import BrokerState

#: Called with None, or with the error.
Outcome = Callable[[Exception | None], None]


class InternalTopic:
    """One internal topic."""

    def __init__(
        self,
        state: BrokerState,
        name: str,
        partitions: int,
        config: Mapping[str, object],
        *,
        always_syncs: bool = True,
        only: int | None = None,
    ) -> None:
        self.name = name
        #: The only partition of the coordinator, in a cluster.
        self._only = only
        self._state = state
        #: Number of partitions when the topic is created.
        self._partitions = partitions
        #: Settings of the topic when it is created.
        self._config = config
        #: An append of a single broker waits for the disk under each durability policy.
        self._always_syncs = always_syncs
        #: For each log, the ends of appends and their callbacks that were not called.
        self._unsynced: dict[Log, deque[tuple[int, Outcome]]] = {}

    @property
    def exists(self) -> bool:
        return self.name in self._state.logdir

    def create(self) -> None:
        """Create the topic if it does not exist. This blocks on the disk.

        Raises:
            LogcoreError: the topic could not be created.
        """
        self._state.logdir.create_topic(
            self.name, self._partitions, self._config, exist_ok=True
        )

    def partition_of(self, name: str) -> int:
        """Return the partition of an id. The topic must exist."""
        return partition_of(name, self._state.logdir.partitions(self.name)[-1] + 1)

    def logs(self) -> list[Log]:
        """Open and return the logs of all partitions. This blocks on the disk.

        Raises:
            LogcoreError: a log could not be opened.
        """
        numbers = self._state.logdir.partitions(self.name) if self.exists else ()
        # The other partitions have coordinators of their own, possibly in other
        # brokers.
        if self._only is not None:
            numbers = (self._only,)
        return [self._state.logs.open(self.name, number) for number in numbers]

    def when_committed(self, callback: Outcome) -> None:
        """Call callback(None) once all records of the only partition are committed.

        Without a cluster, that is immediately. Call callback(error) if another broker leads
        the partition.
        """
        number = self._only
        # Without a cluster, records are committed once they are on disk, and only those
        # on disk were read.
        if number is None:
            callback(None)
            return
        state = self._state

        def opened(result: Any) -> None:
            if isinstance(result, Exception):
                callback(result)
                return
            # The end includes records of the previous leader that may not be committed
            # yet.
            key, end = (self.name, number), result.log_end_offset
            state.leadership.when_committed(key, result, end, callback)

        state.work.submit(self.name, lambda: state.logs.open(self.name, number), opened)

    def append(
        self,
        name: str,
        size_bytes: int,
        write: Callable[[Log], Receipt],
        now_ms: int,
        callback: Outcome,
        *,
        has_producer: bool = False,
    ) -> None:
        """Append with write() to the partition of an id.

        Call callback(None) once the records are stored safely, or callback(error).
        """
        state = self._state

        def work() -> tuple[Log, int, Receipt]:
            # The first record creates the topic.
            self.create()
            number = self.partition_of(name)
            log = state.logs.open(self.name, number)
            # Before the write, so that nothing is stored when too few replicas are in
            # sync.
            state.leadership.check_in_sync((self.name, number))
            return log, number, write(log)

        def may_wait() -> bool:
            log = (
                state.logdir.host.opened(self.name, self.partition_of(name))
                if self.exists
                else None
            )
            return (
                log is None
                or log.has_failed
                or log.host.writer.may_wait(
                    size_bytes, now_ms, has_producer=has_producer
                )
            )

        def written(result: Any) -> None:
            if isinstance(result, Exception):
                callback(result)
                return
            log, number, receipt = result
            end = receipt.last_offset + 1
            # Queued before the sync is requested: the callback of a sync may run
            # immediately.
            self._unsynced.setdefault(log, deque()).append((end, callback))
            key = self.name, number
            leadership = state.leadership
            leadership.appended(key, log, end, now_ms)
            # With when_safe(), the policy of the log decides whether an append waits for
            # the disk.
            when_stored = leadership.when_safe
            if self._always_syncs:
                when_stored = leadership.when_committed
            when_stored(
                key, log, end, lambda error: self._run_callbacks(log, end, error)
            )

        # An append must not overtake queued ones: the newest value of a key must be the
        # last one in the log.
        if state.work.is_busy(self.name) or may_wait():
            state.work.submit(self.name, work, written)
            return
        try:
            result: Any = work()
        except (LogcoreError, OSError) as error:
            result = without_tracebacks(error)
        written(result)

    def _run_callbacks(self, log: Log, end: int, error: LogcoreError | None) -> None:
        """Call the callbacks of all appends up to `end`.

        A sync may be reported to a later append before an earlier one.
        """
        waiting = self._unsynced.get(log)
        while waiting and waiting[0][0] <= end:
            waiting.popleft()[1](error)
        if not waiting:
            self._unsynced.pop(log, None)
