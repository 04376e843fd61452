"""The log lines of a broker about its clients: changes they made, and requests it refused.

Rules:
- Lines of one kind are written a few times a minute, then a line with the number of the others. A client that is
  refused in a loop does not fill the disk.
- Text from a client is shown as repr() and cut, so that it cannot forge a line.

This module reads no clock: the time comes with each call.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Protocol

from netshim.session import Session
from netshim.wire import codes

_log = logging.getLogger("netshim")

#: So many lines of a kind are said in a period.
_LINES: Final = 10
_PERIOD_MS: Final = 60_000
#: Lines about topics that are made, changed or deleted: a program may make many at once.
_CHANGES: Final = 200
#: So many kinds are told apart; others share one.
_KINDS: Final = 1_000
_TEXT_CHARACTERS: Final = 200

#: Codes of normal operation: the client asks again, or elsewhere.
_ORDINARY: Final = frozenset(
    {
        codes.NONE,
        codes.MEMBER_ID_REQUIRED,
        codes.REBALANCE_IN_PROGRESS,
        codes.UNKNOWN_TOPIC_ID,
        codes.FETCH_SESSION_ID_NOT_FOUND,
        codes.STALE_MEMBER_EPOCH,
        codes.FENCED_LEADER_EPOCH,
        codes.UNKNOWN_LEADER_EPOCH,
    }
)


def shown(text: object) -> str:
    """Text from a client, for a line of the log."""
    whole = repr(text)
    if len(whole) <= _TEXT_CHARACTERS:
        return whole
    return whole[:_TEXT_CHARACTERS] + "..."


class Asked(Protocol):
    """The facts of a request that the journal writes; state.Call is one."""

    @property
    def session(self) -> Session: ...
    @property
    def version(self) -> int: ...
    @property
    def client_id(self) -> str: ...
    @property
    def now_ms(self) -> int: ...


class Journal:
    """Says lines to the logger `netshim`."""

    def __init__(self) -> None:
        # kind -> (until when, lines that came, lines that may be said, level)
        self._periods: dict[str, tuple[int, int, int, int]] = {}

    def say(
        self,
        level: int,
        kind: str,
        now_ms: int,
        text: str,
        *values: object,
        most: int = _LINES,
        error: bool | BaseException | None = None,
    ) -> None:
        """kind: of the lines that are counted together; one of few, not made of what clients send. most: lines of it
        in a period. error: an exception to be shown with its traceback. May be called in any thread; lines that come at
        the same moment from two may be miscounted.
        """
        if not _log.isEnabledFor(level):
            return
        if kind not in self._periods and len(self._periods) >= _KINDS:
            kind = "others"
        until_ms, count, _, _ = self._periods.get(kind, (now_ms + _PERIOD_MS, 0, most, level))
        if now_ms >= until_ms:
            self._sum_up(kind)
            until_ms = now_ms + _PERIOD_MS
            count = 0
        self._periods[kind] = until_ms, count + 1, most, level
        if count < most:
            _log.log(level, text, *values, exc_info=error)

    def refused(self, call: Asked, api: str, code: int, message: str | None) -> None:
        """A request, or a part of one, was answered with an error."""
        if code in _ORDINARY:
            return
        why = codes.name(code)
        if message:
            why = f"{why}, {message}"
        self.say(
            logging.WARNING,
            f"refused {api} {code}",
            call.now_ms,
            "%s v%d of client %s at %s refused: %s",
            api,
            call.version,
            shown(call.client_id),
            call.session.peer,
            why,
        )

    def changed(self, call: Asked, name: str | None, what: str, *, kind: str = "topic") -> None:
        """A client changed a topic, or the settings of a group."""
        self.say(
            logging.INFO,
            "topic",
            call.now_ms,
            "%s %s %s, by client %s at %s",
            kind,
            name,
            what,
            shown(call.client_id),
            call.session.peer,
            most=_CHANGES,
        )

    def tick(self, now_ms: int) -> None:
        """Says how many lines were left out, of the kinds whose time is over."""
        for kind in [kind for kind, (until_ms, *_) in [*self._periods.items()] if now_ms >= until_ms]:
            self._sum_up(kind)

    def _sum_up(self, kind: str) -> None:
        _, count, most, level = self._periods.pop(kind, (0, 0, 0, 0))
        if count > most:
            _log.log(level, "%s: %d more lines like these within a minute", kind, count - most)


class Repeated(logging.Filter):
    """For a handler: lets through so many lines of one text, whatever they speak of, in a period, and says in the next
    one how many there were.
    """

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self._most = most
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.name, str(record.msg)
        since, count = self._seen.get(key, (record.created, 0))
        if record.created - since >= _PERIOD_MS / 1000:
            if count > self._most:
                record.msg = f"{record.msg} ({count - self._most} lines like this were left out)"
            since = record.created
            count = 0
        if len(self._seen) >= _KINDS:
            self._seen.clear()
        self._seen[key] = since, count + 1
        return count < self._most


def errors_in(value: Any) -> list[tuple[int, str | None]]:
    """The codes, other than 0, and messages in a response or a part of it."""
    found = []
    if isinstance(value, list):
        for each in value:
            found += errors_in(each)
    elif hasattr(value, "__slots__"):
        if getattr(value, "error_code", 0):
            found.append((value.error_code, getattr(value, "error_message", None)))
        for name in value.__slots__:
            inner = getattr(value, name)
            if isinstance(inner, list) and inner and not isinstance(inner[0], (int, str, bytes)):
                found += errors_in(inner)
    return found
