"""Errors in background work: stored by kind, and reported to loggers and a callback.

Rules:
- An incident is reported on its 1st, 10th, 100th occurrence and so on, and always
  stored.
- Of more than 100 kinds, the kind that occurred longest ago is dropped.

The caller decides how work continues after an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Final

from logcore.errors import LogClosedError, LogcoreError
from logcore.fs import FS
from logcore.reporting import WARNING, Incident, log_line

_MAX_KINDS: Final = 100


class Incidents:
    """The incidents of one directory. Any thread may call its methods."""

    def __init__(self, fs: FS, on_incident: Callable[[Incident], None] | None) -> None:
        """Create an empty collection.

        `on_incident` is called in the working thread each time an incident is reported.
        """
        self._fs = fs
        self._on_incident = on_incident
        # The latest is last; written under _lock.
        self._known: dict[tuple[str, str, str], Incident] = {}
        self._make_lock()
        fs.after_fork(self._make_lock)

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def all(self) -> tuple[Incident, ...]:
        """Return all incidents, the latest last."""
        with self._lock:
            return tuple(self._known.values())

    def record(self, work: str, where: str, error: LogcoreError | OSError) -> None:
        """Store an error. `where` is the name of a partition or topic, or a path.

        A closed log is not an error: its topic was deleted, or its user closed it,
        before the work ran.
        """
        if isinstance(error, LogClosedError):
            return
        now_ms = self._fs.now_ms()
        kind = type(error).__name__
        with self._lock:
            # Removed here, and inserted as the last entry below.
            known = self._known.pop((work, where, kind), None)
            count = 1
            first_ms = now_ms
            if known is not None:
                count = known.count + 1
                first_ms = known.first_ms
            incident = Incident(
                work=work,
                where=where,
                kind=kind,
                reason=str(error),
                count=count,
                first_ms=first_ms,
                last_ms=now_ms,
            )
            self._known[work, where, kind] = incident
            if len(self._known) > _MAX_KINDS:
                del self._known[next(iter(self._known))]
        # 1, 10, 100 and so on, so that an error in every tick is not reported each
        # time. This runs without the lock, because the callback may read the incidents.
        if str(incident.count).strip("0") == "1":
            log_line(
                work,
                WARNING,
                "%s: %s: %s (%d times)",
                where,
                kind,
                incident.reason,
                incident.count,
            )
            if self._on_incident is not None:
                self._on_incident(incident)

    @contextlib.contextmanager
    def reporting_errors(self, work: str, where: str) -> Generator[None, None, None]:
        """Record an error inside the block as an incident, and continue after the
        block.
        """
        try:
            yield
        except (LogcoreError, OSError) as error:
            self.record(work, where, error)
