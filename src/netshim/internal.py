"""A topic that the broker itself writes and reads: appends in order, each told once it is on disk.

Rules:
- The topic is made when something is first to be written. An id belongs to one partition of it, by its hash.
- A caller that appends is told once the records are on disk, or as safe as it asks, in the order of the log: so memory
  never tells of what a crash could take back, and an earlier value never covers a later one.
- All work on the topic that may wait takes its turn under the topic's name.

Not here: what the records say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from logcore import Log, LogcoreError, Receipt
from logcore.format.grouprecords import partition_of
from netshim.state import State
from netshim.waiting import as_value

Told = Callable[[Exception | None], None]
WhenStored = Callable[[Log, int, Callable[[LogcoreError | None], None]], None]


class InternalTopic:
    """name, partitions, config: of the topic, when it is made. when_stored: waits until an append is safe; for the disk
    by default.
    """

    def __init__(
        self,
        state: State,
        name: str,
        partitions: int,
        config: Mapping[str, object],
        *,
        when_stored: WhenStored | None = None,
    ) -> None:
        self.name = name
        self._state = state
        self._partitions = partitions
        self._config = config
        self._when_stored = when_stored or state.syncs.when_durable
        self._unsynced: dict[Log, deque[tuple[int, Told]]] = {}

    @property
    def exists(self) -> bool:
        return self.name in self._state.logdir

    def create(self) -> None:
        """Waits for the disk. Raises LogcoreError."""
        self._state.logdir.ensure_topic(self.name, self._partitions, self._config)

    def partition_of(self, name: str) -> int:
        """The partition of an id, once the topic exists."""
        return partition_of(name, self._state.logdir.partitions(self.name)[-1] + 1)

    def logs(self) -> list[Log]:
        """All partitions, opened. Waits for the disk. Raises LogcoreError."""
        numbers = self._state.logdir.partitions(self.name) if self.exists else ()
        return [self._state.open(self.name, number) for number in numbers]

    def append(
        self,
        name: str,
        size_bytes: int,
        write: Callable[[Log], Receipt],
        now_ms: int,
        done: Told,
        *,
        has_producer: bool = False,
    ) -> None:
        """Calls done(None) once what write() appends to the partition of an id is on disk, or done(error)."""
        state = self._state

        def work() -> tuple[Log, int, Receipt]:
            self.create()
            number = self.partition_of(name)
            log = state.open(self.name, number)
            return log, number, write(log)

        def may_wait() -> bool:
            log = state.logdir.opened(self.name, self.partition_of(name)) if self.exists else None
            return log is None or log.has_failed or log.writer.may_wait(size_bytes, now_ms, has_producer=has_producer)

        def written(result: Any) -> None:
            if isinstance(result, Exception):
                done(result)
                return
            log, number, receipt = result
            end = receipt.last_offset + 1
            self._unsynced.setdefault(log, deque()).append((end, done))
            state.appended(self.name, number, log, end, now_ms)
            self._when_stored(log, end, lambda error: self._settle(log, end, error))

        if state.has_turns(self.name) or may_wait():
            state.in_turn(self.name, work, written)
            return
        try:
            result: Any = work()
        except (LogcoreError, OSError) as error:
            result = as_value(error)
        written(result)

    def _settle(self, log: Log, end: int, error: LogcoreError | None) -> None:
        """Tells all who wrote below end: a sync may be noticed by a later writer first."""
        waiting = self._unsynced.get(log)
        while waiting and waiting[0][0] <= end:
            waiting.popleft()[1](error)
        if not waiting:
            self._unsynced.pop(log, None)
