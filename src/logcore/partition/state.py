"""The state of a partition: the fields that readers share with the writer.

Rules:
- A writer changes the fields under `lock`. A read-only log changes them in its refresh,
  under `lock` and `scanning`.
- Readers acquire no lock. `segments` is replaced as a whole. A reader that needs
  segments up to a bound reads `segments`, then the bound, and then checks that
  `segments` is still the same list (LogReader._bounded).
- `visible` decreases only in a truncation. If this process writes the log, every
  truncation is added to `cuts`.

This module decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from logcore.config import INT64_MAX, LogConfig
from logcore.kernels import PartitionFields
from logcore.partition.aborted_transactions import PartitionTransactions
from logcore.partition.gaps import Gaps
from logcore.segment import Segment


class Turns(Protocol):
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


def _stays() -> bool:
    """Return False: no other process changes the log."""
    return False


class PartitionState(PartitionFields):
    """The shared fields of one open log.

    Fields that each append changes are in the base class, where the kernels access
    them.
    """

    lock: Turns
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
        self.cuts: list[int] = []
        #: From here on, no batch belongs to a transaction or is a control batch. Set by
        #: the writer, under its lock, before such a batch is visible.
        self.plain_from = INT64_MAX
        #: The transactions, as far as the log was searched; changed under `scanning`.
        self.transactions: PartitionTransactions | None = None
        #: Catches up with other writing processes; True if the visible end moved.
        self.follow: Callable[[], bool] = _stays
        #: Whether other processes made changes that follow() would load. Does not
        #: block.
        self.is_behind: Callable[[], bool] = _stays
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

    def show(self, end: int) -> None:
        """Raise the visible end, and call the listeners."""
        assert end >= self.visible, "what readers have seen is not taken back"
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
            self.listeners = tuple(one for one in self.listeners if one is not listener)
