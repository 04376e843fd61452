"""The latest value of each key, as a mapping that follows a log.

Rules:
- A record sets its key, a tombstone removes it, a record without a key is ignored.
- Each use of the table first reads the new records of the log; a read-only log checks
  its files for that.
- The table starts over after a truncation, and after a deletion of records that it had
  not read. Compaction does not make it start over, because it keeps the last record of
  each key.

All keys and values are in memory. The table writes nothing and starts no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from logcore.errors import OffsetOutOfRangeError
from logcore.reader import Isolation, LogReader, fs_of

#: How often a table starts over if the log is truncated repeatedly during a read.
_ATTEMPTS: Final = 10


class Table(Mapping[bytes, bytes]):
    """The latest value of each key of a log, created by Log.table().

    Any thread may use it. Each use sees the log at that moment, so a key found while
    iterating may be missing later; snapshot() returns one moment. Raises the errors of
    reading the log.
    """

    def __init__(
        self, log: LogReader, *, isolation: Isolation = "read_uncommitted"
    ) -> None:
        """Create a table. Users call Log.table()."""
        self._log = log
        self._isolation: Isolation = isolation
        self._values: dict[bytes, bytes | None] = {}
        self._offset = log.log_start_offset
        self._times_truncated = log.times_truncated
        self._make_lock()
        # A thread of the parent may hold it, and does not run in the child.
        fs_of(log).after_fork(self._make_lock)

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Table of {self._log.path}, {len(self._values)} keys, offset {self._offset}>"

    @property
    def offset(self) -> int:
        """The table includes all records below this offset."""
        return self._offset

    def snapshot(self) -> dict[bytes, bytes]:
        """Return a copy of the whole table as it is now."""
        self.refresh()
        with self._lock:
            return self._values.copy()  # type: ignore[return-value]

    def refresh(self) -> int:
        """Read the new records of the log; return the offset after them."""
        self._log.refresh()
        with self._lock:
            for _ in range(_ATTEMPTS):
                try:
                    return self._catch_up()
                except OffsetOutOfRangeError:
                    self._restart()
            return self._catch_up()

    def _restart(self) -> None:
        self._times_truncated = self._log.times_truncated
        self._values = {}
        self._offset = self._log.log_start_offset

    def _catch_up(self) -> int:
        log = self._log
        if (
            self._times_truncated != log.times_truncated
            or not log.log_start_offset <= self._offset <= log.log_end_offset
        ):
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
            # The update has also stored tombstones and records without a key. Remove
            # them, unless a later record of this chunk has set the key again.
            for row in np.flatnonzero(
                (columns.value_sizes < 0) | (columns.key_sizes < 0)
            ).tolist():
                key = keys[row]
                if key is None or values.get(key, b"") is None:
                    values.pop(key, None)  # type: ignore[arg-type]
            self._offset = int(columns.offsets[-1]) + 1
        self._offset = end
        return end

    def __getitem__(self, key: bytes) -> bytes:
        self.refresh()
        # _catch_up() holds the lock while the table contains tombstones of a chunk.
        with self._lock:
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
    """The tables of all partitions of a topic as one mapping, created by
    LogDir.table().

    A key is searched in one partition after the other: a producer always chooses the
    same one for it.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        """Create a table. Users call LogDir.table()."""
        self.partitions = tuple(tables)

    def __repr__(self) -> str:
        return f"<TopicTable {list(self.partitions)}>"

    def refresh(self) -> list[int]:
        """Read the new records of each partition; return the offsets after them."""
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
