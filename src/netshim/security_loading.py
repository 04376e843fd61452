"""Reads the stored users, rules and quotas of a broker, at its start and after changes.

Rules:
- They are read if the broker authenticates clients or enforces rules, or if there may be
  quotas: a broker without authentication may have them.
- A change is in effect one tick after the registry has reported it. Without a report, it
  is in effect after 5 s.
- If they cannot be read, the former ones remain in effect, and the error is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from netshim.listeners import Listener
from netshim.security.sasl import OAUTHBEARER
from netshim.security.service import Security
from netshim.security.stored import SecuritySnapshot
from netshim.state import SECURITY, BrokerState

_log = logging.getLogger("netshim")
#: Time between two checks whether a broker has its first user, rule or quota.
_FIRST_CHECK_MS: Final = 1_000


class LogLine(Protocol):
    """Logs a line that may be frequent."""

    def __call__(self, level: int, kind: str, text: str, *values: object) -> None: ...


class SecurityLoader:
    """Reads the stored users, rules and quotas into the Security of a broker."""

    def __init__(
        self,
        security: Security,
        listeners: Sequence[Listener],
        has_quotas: Callable[[], bool],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._security = security
        self._uses_sasl = any(listener.uses_sasl for listener in listeners)
        #: Returns whether quotas may be stored. May block.
        self._has_quotas = has_quotas
        #: Called before the first read. May block.
        self._prepare = prepare
        #: Time of the last check whether a first user, rule or quota is stored.
        self._checked_ms = 0

    def read(self, now_ms: int) -> SecuritySnapshot | None:
        """Return the stored security data, or None if the broker needs none. Blocks."""
        security = self._security
        self._checked_ms = now_ms
        is_needed = security.settings.enforces_acls or self._uses_sasl
        if not is_needed and not self._has_quotas():
            return None
        # Opened late, because most brokers have neither users nor quotas.
        if not security.has_store:
            self._prepare()
            security.store()
        return security.refresh(now_ms)

    def warn(self, user_command: str) -> None:
        """Log settings that are probably not meant. `user_command` creates a user."""
        security = self._security
        if not self._uses_sasl:
            return
        if not security.snapshot.users and any(
            # Bearer tokens need no stored users.
            mechanism != OAUTHBEARER
            for mechanism in security.mechanisms
        ):
            _log.warning(
                "no user exists, so no client can log in; create one: %s", user_command
            )
        if not security.settings.enforces_acls:
            _log.warning(
                "every user who logs in may do everything; --acls enforces access control lists"
            )

    def refresh(self, state: BrokerState, now_ms: int, log_line: LogLine) -> None:
        """Begin to read again after a change. For the broker's thread."""
        security = self._security

        def finish(snapshot: object) -> None:
            if isinstance(snapshot, SecuritySnapshot):
                security.publish(snapshot)
            elif isinstance(snapshot, BaseException):
                log_line(
                    logging.ERROR,
                    "security",
                    "users, rules and quotas are as before, because they cannot be read: %s",
                    snapshot,
                )

        # A read or a change is in progress, and publishes its result.
        if state.work.is_busy(SECURITY):
            return
        if security.has_store:
            state.work.submit(SECURITY, lambda: security.refresh(now_ms), finish)
        # Without an open store, there is no watch that would report the first entry.
        elif now_ms - self._checked_ms >= _FIRST_CHECK_MS:
            state.work.submit(SECURITY, lambda: self.read(now_ms), finish)
