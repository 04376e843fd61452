"""The state that a forwarder or a mirror reports, and the time of its next attempt."""

from __future__ import annotations

from typing import Final

from logcore.errors import LogcoreError
from logcore.fs import FS
from logcore.reporting import WARNING, log_line
from logcore.shipping.settings import State

_FIRST_BACKOFF_MS: Final = 100
_MAX_BACKOFF_MS: Final = 10_000


class ShippingStatus:
    """Counts failed attempts, and delays the next attempt.

    The delay doubles with each attempt in succession. It varies by up to a fifth, so
    that many processes do not return to a restarted cluster at the same moment.
    """

    def __init__(self, fs: FS, worker: str) -> None:
        self._fs = fs
        self._worker = worker
        self.state: State = "connecting"
        #: Why the work waits.
        self.reason = ""
        #: Failed attempts since the last success.
        self.attempts = 0
        #: Failed attempts in all.
        self.retry_count = 0
        self._retry_ms = 0

    def remaining_s(self) -> float:
        """Return the time until the next attempt, 0 or less if it is due."""
        return (self._retry_ms - self._fs.monotonic_ms()) / 1000

    def fail(self, error: LogcoreError) -> None:
        """Schedule the next attempt. Only the first error in succession is logged."""
        self.attempts += 1
        self.retry_count += 1
        if self.state != "waiting":
            log_line("shipping", WARNING, "%s waits: %s", self._worker, error)
        self.state = "waiting"
        self.reason = str(error)
        # From 7 doublings on, the delay is the maximum.
        delay_ms = min(
            _MAX_BACKOFF_MS, _FIRST_BACKOFF_MS * 2 ** min(self.attempts - 1, 7)
        )
        chance = self._fs.random_bytes(1)[0] / 255
        self._retry_ms = self._fs.monotonic_ms() + int(delay_ms * (0.8 + 0.4 * chance))

    def succeed(self, state: State) -> None:
        """Record a step without an error."""
        self.state = state
        self.reason = ""
        self.attempts = 0
