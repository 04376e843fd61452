"""The broker's log lines about its clients: changes they made, and refused requests.

Rules:
- A limited number of lines of one kind is written per minute, then one line with the
  number of suppressed lines. Otherwise, a client that is refused in a loop could fill
  the disk.
- Text from a client is written as repr() and truncated, so that it cannot forge a line.

This module reads no clock: the time is an argument of each call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, Protocol

from netshim.session import ClientSession
from netshim.wire import codes

_log = logging.getLogger("netshim")

#: Maximum number of log lines of one kind per period.
LINES: Final = 10
#: The period of these limits.
_PERIOD_MS: Final = 60_000
#: The same limit for lines about topics that are created, changed or deleted. A program
#: may create many topics at once.
_CHANGES: Final = 200
#: Maximum number of kinds with a counter of their own. Further kinds share one.
_KINDS: Final = 1_000
#: Text of a client is truncated to this length.
_TEXT_CHARACTERS: Final = 200

#: Attribute of a logging.LogRecord with the fields of a line in JSON.
LOG_FIELDS: Final = "netshim_facts"

#: Error codes of normal operation: the client retries, or contacts another broker.
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


def quoted(value: object) -> str:
    """Return a value from a client in a form that is safe in a log line."""
    text = repr(value)
    if len(text) <= _TEXT_CHARACTERS:
        return text
    return text[:_TEXT_CHARACTERS] + "..."


class LoggedRequest(Protocol):
    """The fields of a request that the journal writes.

    state.Call is an implementation.
    """

    @property
    def session(self) -> ClientSession: ...
    @property
    def version(self) -> int: ...
    @property
    def client_id(self) -> str: ...
    @property
    def now_ms(self) -> int: ...


def _log_fields(call: LoggedRequest) -> dict[str, object]:
    session = call.session
    return {
        "client_id": call.client_id[:_TEXT_CHARACTERS],
        "principal": session.principal,
        "peer": session.client_address,
    }


class Journal:
    """Writes lines to the logger `netshim`, with a limit per kind."""

    def __init__(self) -> None:
        #: kind -> (end of the period, number of lines, limit, level)
        self._periods: dict[str, tuple[int, int, int, int]] = {}

    def log(
        self,
        level: int,
        kind: str,
        now_ms: int,
        text: str,
        *values: object,
        max_lines: int = LINES,
        error: bool | BaseException | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        """Write a line, unless the limit of its kind is reached.

        Lines of one `kind` are counted together. Kinds must be few, and not derived
        from text of clients. `max_lines` is the limit per period. `error` is an exception to
        log with its traceback. `fields` are fields of the line in JSON. Any thread may
        call this; lines of two threads at the same moment may be miscounted.
        """
        if not _log.isEnabledFor(level):
            return
        # Kinds contain addresses of clients, so their number has a limit.
        if kind not in self._periods and len(self._periods) >= _KINDS:
            kind = "others"
        until_ms, count, _, _ = self._periods.get(
            kind, (now_ms + _PERIOD_MS, 0, max_lines, level)
        )
        if now_ms >= until_ms:
            self._log_summary(kind)
            until_ms = now_ms + _PERIOD_MS
            count = 0
        self._periods[kind] = until_ms, count + 1, max_lines, level
        if count < max_lines:
            _log.log(level, text, *values, exc_info=error, extra={LOG_FIELDS: fields})

    def log_refusal(
        self, call: LoggedRequest, api: str, code: int, message: str | None
    ) -> None:
        """Log that a request, or a part of one, was answered with an error."""
        if code in _ORDINARY:
            return
        error = codes.name(code)
        if message:
            error = f"{error}, {message}"
        self.log(
            logging.WARNING,
            f"refused {api} {code}",
            call.now_ms,
            "%s v%d of client %s at %s refused: %s",
            api,
            call.version,
            quoted(call.client_id),
            call.session.client_address,
            error,
            fields={**_log_fields(call), "api": api, "code": codes.name(code)},
        )

    def log_change(
        self, call: LoggedRequest, name: str | None, change: str, *, kind: str = "topic"
    ) -> None:
        """Log that a client changed a topic or the settings of a group."""
        self.log(
            logging.INFO,
            "topic",
            call.now_ms,
            "%s %s %s, by client %s at %s",
            kind,
            name,
            change,
            quoted(call.client_id),
            call.session.client_address,
            max_lines=_CHANGES,
            fields=_log_fields(call),
        )

    def tick(self, now_ms: int) -> None:
        """Write the number of suppressed lines of each kind whose period is over."""
        for kind in [
            kind
            # A copy, because other threads log at the same time.
            for kind, (until_ms, *_) in [*self._periods.items()]
            if now_ms >= until_ms
        ]:
            self._log_summary(kind)

    def _log_summary(self, kind: str) -> None:
        # A thread may have removed the kind since it was listed.
        _, count, max_lines, level = self._periods.pop(kind, (0, 0, 0, 0))
        if count > max_lines:
            _log.log(
                level,
                "%s: %d more lines like these within a minute",
                kind,
                count - max_lines,
            )


class RepeatedLineFilter(logging.Filter):
    """A filter for a logging handler that limits identical lines.

    Lines with the same message format count as identical, whatever their arguments are.
    At most `max_lines` of them pass per period. The next line that passes contains the
    number of suppressed lines.
    """

    def __init__(self, max_lines: int = 100) -> None:
        super().__init__()
        self._max_lines = max_lines
        #: (logger, message format) -> (start of the period, number of lines)
        self._periods: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.name, str(record.msg)
        since, count = self._periods.get(key, (record.created, 0))
        if record.created - since >= _PERIOD_MS / 1000:
            if count > self._max_lines:
                record.msg = f"{record.msg} ({count - self._max_lines} lines like this were omitted)"
            since = record.created
            count = 0
        if len(self._periods) >= _KINDS:
            self._periods.clear()
        self._periods[key] = since, count + 1
        return count < self._max_lines
