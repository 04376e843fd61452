"""The topic `__consumer_offsets`: what groups have committed and how they stand, as a broker writes and reads it.

Rules:
- A caller that appends is told once the records are on disk, in the order of the log, so that memory never tells of
  what a crash could take back, and an earlier value never covers a later one.
- Of what is read, the last value of a key counts (logcore.groupoffsets). What is not understood stays as it is.

Not here: the bytes of the records (logcore.format.grouprecords), what they mean for a group (groups.py). Transactional
commits of other writers are read, none is made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from logcore import Log, LogcoreError, Receipt, RecordTooLargeError, TopicExistsError
from logcore.coordination.effects import GroupError
from logcore.format.grouprecords import OFFSETS_TOPIC, GroupRecord, partition_of
from logcore.groupoffsets import OFFSETS_CONFIG, StoredGroups, stored_groups
from netshim.state import State

_log = logging.getLogger("netshim")


class OffsetsTopic:
    """The topic as a place to write to and to read from. It is made when something is first to be written."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._unsynced: dict[Log, deque[tuple[int, Callable[[GroupError | None], None]]]] = {}

    @property
    def exists(self) -> bool:
        return OFFSETS_TOPIC in self._state.logdir

    def read(self) -> StoredGroups:
        """All that the topic says now. May take long; may be called in any thread. Raises LogcoreError."""
        numbers = self._state.logdir.partitions(OFFSETS_TOPIC) if self.exists else ()
        found = stored_groups(self._state.open(OFFSETS_TOPIC, number) for number in numbers)
        if found.not_understood:
            _log.warning("%s: %d records are not understood and left as they are", OFFSETS_TOPIC, found.not_understood)
        return found

    def append(
        self, group_id: str, records: list[GroupRecord], now_ms: int, done: Callable[[GroupError | None], None]
    ) -> None:
        """Calls done(None) once the records are on disk, or done(error) when they are not; for one log in its order."""
        state = self._state
        rows = [(key, value, (), now_ms) for key, value in records]

        def write() -> tuple[Log, int, Receipt]:
            if not self.exists:
                self._create()
            number = self._partition_of(group_id)
            log = state.open(OFFSETS_TOPIC, number)
            return log, number, log.append_many(rows, durability="os")

        def may_wait() -> bool:
            log = state.logdir.opened(OFFSETS_TOPIC, self._partition_of(group_id)) if self.exists else None
            size_bytes = sum(len(key) + len(value or b"") + 32 for key, value in records)
            return log is None or log.has_failed or log.writer.may_wait(size_bytes, now_ms, has_producer=False)

        def written(result: Any) -> None:
            if isinstance(result, Exception):
                done(_error_of(group_id, result))
                return
            log, number, receipt = result
            end = receipt.last_offset + 1
            self._unsynced.setdefault(log, deque()).append((end, done))
            state.appended(OFFSETS_TOPIC, number, log, end, now_ms)
            state.syncs.when_durable(log, end, lambda error: self._settle(group_id, log, end, error))

        if state.has_turns(OFFSETS_TOPIC) or may_wait():
            state.in_turn(OFFSETS_TOPIC, write, written)
            return
        try:
            result: Any = write()
        except (LogcoreError, OSError) as error:
            result = error
        written(result)

    def _partition_of(self, group_id: str) -> int:
        return partition_of(group_id, self._state.logdir.partitions(OFFSETS_TOPIC)[-1] + 1)

    def _create(self) -> None:
        try:
            self._state.logdir.create_topic(OFFSETS_TOPIC, self._state.settings.offsets_partitions, OFFSETS_CONFIG)
        except TopicExistsError:  # a client made it meanwhile
            pass

    def _settle(self, group_id: str, log: Log, end: int, error: LogcoreError | None) -> None:
        """Tells all who wrote below end: a sync may be noticed by a later writer first."""
        result = None if error is None else _error_of(group_id, error)
        waiting = self._unsynced.get(log)
        while waiting and waiting[0][0] <= end:
            waiting.popleft()[1](result)
        if not waiting:
            self._unsynced.pop(log, None)


def _error_of(group_id: str, error: Exception) -> GroupError:
    """What clients take for a reason to try again, except for records that will never fit."""
    _log.error("%s: a record of group %r was not stored: %s", OFFSETS_TOPIC, group_id, error)
    if isinstance(error, RecordTooLargeError):
        return GroupError.RECORD_TOO_LARGE
    return GroupError.COORDINATOR_NOT_AVAILABLE
