"""The latest value of each key, as a mapping that follows a log.

Rules:
- A record sets its key, a tombstone removes it, a record without a key says nothing.
- Each look at the table first takes in what the log has got since; a log that is only read looks at its files for that.
- A truncation, or records that were deleted before they were taken in, make it start over. So does nothing else:
  compaction leaves the last record of each key.

All keys and values are in memory. The table writes nothing, and starts no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from logcore.errors import OffsetOutOfRangeError
from logcore.reader import Isolation, LogReader, fs_of

#: How often a table starts over when the log is cut under it time and again.
_ATTEMPTS: Final = 10


class Table(Mapping[bytes, bytes]):
    """Made by Log.table(). May be used from several threads. Each look is at the log as it is then, so a key met while
    iterating may be gone when it is looked up; snapshot() is one moment. Raises what reading the log raises.
    """

    def __init__(self, log: LogReader, *, isolation: Isolation = "read_uncommitted") -> None:
        """Not for users."""
        self._log = log
        self._isolation: Isolation = isolation
        self._values: dict[bytes, bytes | None] = {}
        self._offset = log.log_start_offset
        self._cuts = log.times_truncated
        self._make_lock()
        fs_of(log).after_fork(self._make_lock)  # a thread of the parent may hold it, and is not there in the child

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Table of {self._log.path}, {len(self._values)} keys, offset {self._offset}>"

    @property
    def offset(self) -> int:
        """All records below it were taken in."""
        return self._offset

    def snapshot(self) -> dict[bytes, bytes]:
        """A copy of the whole table as it is now."""
        self.refresh()
        with self._lock:
            return self._values.copy()  # type: ignore[return-value]

    def refresh(self) -> int:
        """Takes in what there is now; returns how far."""
        self._log.refresh()
        with self._lock:
            for _ in range(_ATTEMPTS):
                try:
                    return self._catch_up()
                except OffsetOutOfRangeError:
                    self._restart()
            return self._catch_up()

    def _restart(self) -> None:
        self._cuts = self._log.times_truncated
        self._values = {}
        self._offset = self._log.log_start_offset

    def _catch_up(self) -> int:
        log = self._log
        if self._cuts != log.times_truncated or not log.log_start_offset <= self._offset <= log.log_end_offset:
            self._restart()
        if self._isolation == "read_uncommitted":
            end = log.high_watermark
        else:
            end = log.last_stable_offset
        if end <= self._offset:
            return self._offset
        values = self._values
        for columns in log.scan(self._offset, end, isolation=self._isolation):
            keys = columns.keys()
            values.update(zip(keys, columns.values(), strict=True))  # type: ignore[arg-type]
            for row in np.flatnonzero((columns.value_sizes < 0) | (columns.key_sizes < 0)).tolist():
                key = keys[row]
                if key is None or values.get(key, b"") is None:
                    values.pop(key, None)  # type: ignore[arg-type]
            self._offset = int(columns.offsets[-1]) + 1
        self._offset = end
        return end

    def __getitem__(self, key: bytes) -> bytes:
        self.refresh()
        with self._lock:  # within a chunk, tombstones are in it until all of it was taken in
            value = self._values[key]
        assert value is not None, "tombstones are not kept"
        return value

    def __len__(self) -> int:
        self.refresh()
        with self._lock:
            return len(self._values)

    def __contains__(self, key: object) -> bool:
        self.refresh()
        with self._lock:
            return key in self._values

    def __iter__(self) -> Iterator[bytes]:
        self.refresh()
        with self._lock:
            return iter(list(self._values))


class TopicTable(Mapping[bytes, bytes]):
    """The tables of all partitions of a topic as one; made by LogDir.table().

    A key is looked for in one partition after the other: a producer always chooses the same one for it.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        """Not for users."""
        self.partitions = tuple(tables)

    def __repr__(self) -> str:
        return f"<TopicTable {list(self.partitions)}>"

    def refresh(self) -> list[int]:
        """Takes in what there is now; returns how far, for each partition."""
        return [table.refresh() for table in self.partitions]

    def __getitem__(self, key: bytes) -> bytes:
        for table in self.partitions:
            value = table.get(key)
            if value is not None:
                return value
        raise KeyError(key)

    def __len__(self) -> int:
        return len(set(self))

    def __iter__(self) -> Iterator[bytes]:
        return iter(dict.fromkeys(key for table in self.partitions for key in table))
