"""The state of a partition: the fields that readers share with the writer.

Rules:
- A writer changes the fields under `lock`. A read-only log changes them in its refresh,
  under `lock` and `scanning`.
- Readers acquire no lock. snapshot() returns fields that belong together. The list
  `segments` is never changed, only replaced.
- Only publish() and show() assign the fields that readers use, except in an append: the
  compiled kernels, and Writer, raise `end` and `visible` for each one.
- `visible` decreases only in a truncation. If this process writes the log, every
  truncation is added to `truncations`.

This module decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Protocol

from logcore.config import INT64_MAX, LogConfig
from logcore.kernels import PartitionFields
from logcore.partition.aborted_transactions import PartitionTransactions
from logcore.partition.gaps import Gaps
from logcore.segment import Segment


class LogLock(Protocol):
    """A lock for the threads of this process, or for all writers (shared_writer.py)."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
    def acquire(self, blocking: bool = True) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...


def _never_changes() -> bool:
    """Replace follow() and is_behind() of a log that no other process changes."""
    return False


class Snapshot(NamedTuple):
    """The part of a partition's state that readers use, at one moment."""

    #: In offset order. Readers must not change the list.
    segments: list[Segment]
    #: Offset of the first readable record.
    log_start: int
    #: Readers see records below this offset. The segments reach it.
    high_watermark: int


class PartitionState(PartitionFields):
    """The shared fields of one open log.

    Fields that each append changes are in the base class, where the kernels access
    them.
    """

    lock: LogLock
    segments: list[Segment]
    gaps: Gaps

    def __init__(self, config: LogConfig, gaps: Gaps) -> None:
        # All fields are written under lock; comments name the exceptions.
        self.config = config  # replaced whole by Log.reconfigure()
        self.gaps = gaps
        self.segments = []  # in order; the last one grows
        self.log_start = 0
        self.end = 0  # the log end offset: the offset of the next append
        # The high watermark. Group commit moves it without the lock, in the one thread
        # that leads a sync.
        self.visible = 0
        self.is_closed = False
        # The offsets of truncations since the log was opened; only appended to.
        self.truncations: list[int] = []
        #: From here on, no batch belongs to a transaction or is a control batch. Set by
        #: the writer, under its lock, before such a batch is visible.
        self.no_transactions_from = INT64_MAX
        #: The transactions, as far as the log was searched; changed under `scanning`.
        self.transactions: PartitionTransactions | None = None
        #: Catches up with other writing processes; True if the visible end moved.
        self.follow: Callable[[], bool] = _never_changes
        #: Whether other processes made changes that follow() would load. Does not
        #: block.
        self.is_behind: Callable[[], bool] = _never_changes
        self.is_shared = False
        self.make_locks()

    def make_locks(self) -> None:
        """Create the locks.

        A forked child creates new ones: the threads that held the old ones do not exist
        in it, and would never release them.
        """
        self.lock = threading.Lock()
        # Reentrant: the garbage collector may end an abandoned tail() in this thread.
        self.listening = threading.RLock()
        #: Called when the visible end moves or the log is closed. They must not block.
        #: The tuple is replaced as a whole, under `listening`.
        self.listeners = ()
        self.scanning = threading.RLock()

    def check(self, active: Segment) -> None:
        """Assert the invariants of the fields while the lock is free.

        `active` is the segment that is being written.
        """
        bases = [segment.base_offset for segment in self.segments]
        assert bases == sorted(set(bases)), f"segments out of order: {bases}"
        assert self.segments[-1] is active, "another segment is written than the last"
        assert bases[-1] <= self.end, (
            f"the log ends at {self.end}, before its last segment: {bases}"
        )
        assert self.log_start <= self.visible <= self.end, (
            self.log_start,
            self.visible,
            self.end,
        )

    def snapshot(self) -> Snapshot:
        """Return segments, a high watermark that they reach, and the log start.

        Reads the fields again if a roll, a deletion or a truncation comes in between.
        """
        while True:
            segments = self.segments
            taken = Snapshot(segments, self.log_start, self.visible)
            if segments is self.segments:
                return taken

    def publish(
        self,
        *,
        segments: list[Segment] | None = None,
        log_start: int | None = None,
        end: int | None = None,
        visible: int | None = None,
    ) -> None:
        """Assign fields that readers use. Fields without a value remain unchanged.

        A lower visible end is assigned before the segments, and a higher one after
        them. So the segments of a snapshot always reach its high watermark.
        """
        if visible is not None and visible < self.visible:
            self.visible = visible
        if log_start is not None:
            self.log_start = log_start
        if segments is not None:
            self.segments = segments
        if end is not None:
            self.end = end
        if visible is not None:
            self.visible = visible

    def close(self) -> None:
        """Mark the log as closed, and drop the segments.

        A segment is unmapped when its last reader drops it.
        """
        self.is_closed = True
        self.segments = []

    def raise_visible_end(self, end: int) -> None:
        """Raise the visible end, and call the listeners."""
        assert end >= self.visible, "records that readers have seen remain"
        self.visible = end
        if self.listeners:
            self.wake()

    def wake(self) -> None:
        """Call the listeners."""
        for listener in self.listeners:  # a concurrent change replaces the whole tuple
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` on each change from now on, until forget()."""
        with self.listening:
            self.listeners = (*self.listeners, listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Stop calling `listener`."""
        with self.listening:
            self.listeners = tuple(
                known for known in self.listeners if known is not listener
            )
