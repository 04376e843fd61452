"""Errors in work that no caller waits for: kept by kind, reported to loggers and to the callback.

Rules:
- An incident is reported when it is met the first time, the tenth, the hundredth and so on, and always kept.
- Of more than a hundred kinds the one that was met longest ago is forgotten.

This module decides nothing about what goes on after an error; its caller does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Final

from logcore.errors import LogClosedError, LogcoreError
from logcore.fs import FS
from logcore.notices import WARNING, Incident, tell

_MOST_KINDS: Final = 100


class Incidents:
    """Those of one directory. All methods may be called from several threads."""

    def __init__(self, fs: FS, on_incident: Callable[[Incident], None] | None) -> None:
        """on_incident: called in the thread at work, each time an incident is reported."""
        self._fs = fs
        self._on_incident = on_incident
        self._known: dict[tuple[str, str, str], Incident] = {}  # the one met last is last; written under _lock
        self._make_lock()
        fs.after_fork(self._make_lock)

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def all(self) -> tuple[Incident, ...]:
        """The one met last is last."""
        with self._lock:
            return tuple(self._known.values())

    def met(self, work: str, where: str, error: LogcoreError | OSError) -> None:
        """Keeps an error. where: the partition's or topic's name, or a path.

        A log that was closed is no error: its topic was deleted, or its user closed it, while work waited for it.
        """
        if isinstance(error, LogClosedError):
            return
        now_ms = self._fs.now_ms()
        kind = type(error).__name__
        with self._lock:
            known = self._known.pop((work, where, kind), None)  # put back below, as the last one
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
            if len(self._known) > _MOST_KINDS:
                del self._known[next(iter(self._known))]
        # 1, 10, 100 and so on: an error that every tick meets is not reported by each. Without the lock, because the
        # callback may ask for the incidents.
        if str(incident.count).strip("0") == "1":
            tell(work, WARNING, "%s: %s: %s (%d times)", where, kind, incident.reason, incident.count)
            if self._on_incident is not None:
                self._on_incident(incident)

    @contextlib.contextmanager
    def going_on(self, work: str, where: str) -> Generator[None, None, None]:
        """An error inside is an incident, and does not end what follows."""
        try:
            yield
        except (LogcoreError, OSError) as error:
            self.met(work, where, error)
