"""What is known of a partition: the fields that those who read it share with the one who writes it.

Rules:
- A writer changes them under `lock`; a log that is only read changes them in its refresh, under `lock` and `scanning`.
- Readers take no lock. `segments` is replaced whole. Who needs segments that reach a bound reads them, then the bound,
  then asks whether the segments are still the same list (LogReader._bounded).
- `visible` never falls but by a truncation, which is added to `cuts`.

This module decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from logcore.config import INT64_MAX, LogConfig
from logcore.kernels import PartitionFields
from logcore.partition.gaps import Gaps
from logcore.partition.transactions import Transactions
from logcore.segment import Segment


class Turns(Protocol):
    """A lock: of the threads of this process, or of all processes that write the log (sharing.py)."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def acquire(self, blocking: bool = True) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...


def _stays() -> bool:
    return False


class PartitionState(PartitionFields):
    """The shared fields of one open log. Those that each append changes are where the kernels reach them."""

    lock: Turns
    segments: list[Segment]
    gaps: Gaps

    def __init__(self, config: LogConfig, gaps: Gaps) -> None:
        # All are written under lock, as the opening says; comments name what else a field needs.
        self.config = config  # replaced whole by Log.reconfigure()
        self.gaps = gaps
        self.segments = []  # in order; the last one is growing
        self.log_start = 0
        self.end = 0  # the log end offset: the next append gets it
        self.visible = 0  # the high watermark; group commit moves it without lock, as the one thread that leads a sync
        self.is_closed = False
        self.cuts: list[int] = []  # where the log was truncated since it was opened; only ever appended to
        #: From here on no batch belongs to a transaction, and none is a control batch. Written by the writer, under its
        #: lock, before such a batch is visible.
        self.plain_from = INT64_MAX
        #: As far as they were walked, by the first reader that asks; changed under scanning.
        self.transactions: Transactions | None = None
        #: Takes in what other processes did that write the log too; True when the visible end moved.
        self.follow: Callable[[], bool] = _stays
        #: Whether others did something that follow() would take in. Does not block.
        self.is_behind: Callable[[], bool] = _stays
        self.is_shared = False
        self.make_locks()

    def make_locks(self) -> None:
        """Also for a forked child, where the thread that held a lock does not exist, and would never release it."""
        self.lock = threading.Lock()
        # Reentrant: the collector may end an abandoned tail() while this thread holds it.
        self.listening = threading.RLock()
        #: Called when the visible end moves, or the log is closed; they may not wait. Replaced whole under listening.
        self.listeners = ()
        self.scanning = threading.RLock()

    def check(self, active: Segment) -> None:
        """Asserts what holds between the fields whenever the lock is free. active: the segment that is written."""
        bases = [segment.base_offset for segment in self.segments]
        assert bases == sorted(set(bases)), f"segments out of order: {bases}"
        assert self.segments[-1] is active, "another segment is written than the last"
        assert bases[-1] <= self.end, f"the log ends at {self.end}, before its last segment: {bases}"
        assert self.log_start <= self.visible <= self.end, (self.log_start, self.visible, self.end)

    def show(self, end: int) -> None:
        """Moves the visible end up, and wakes those who wait for it."""
        assert end >= self.visible, "what readers have seen is not taken back"
        self.visible = end
        if self.listeners:
            self.wake()

    def wake(self) -> None:
        for listener in self.listeners:  # one tuple: a thread that listens or forgets meanwhile replaces it
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls listener from now on, until forget()."""
        with self.listening:
            self.listeners = (*self.listeners, listener)

    def forget(self, listener: Callable[[], None]) -> None:
        with self.listening:
            self.listeners = tuple(one for one in self.listeners if one is not listener)
