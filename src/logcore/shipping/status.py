"""The state of a forwarder or a mirror, and the time of its next attempt."""

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

    The delay doubles with each consecutive failure. It varies by up to 20 %, so that
    many processes do not connect to a restarted cluster at the same time.
    """

    def __init__(self, fs: FS, worker: str) -> None:
        self._fs = fs
        self._worker = worker
        self.state: State = "connecting"
        #: The last error, if the state is "waiting".
        self.reason = ""
        #: Failed attempts since the last success.
        self.attempts = 0
        #: Failed attempts since the object was created.
        self.retry_count = 0
        self._retry_ms = 0

    def remaining_s(self) -> float:
        """Return the time until the next attempt, 0 or less if it is due."""
        return (self._retry_ms - self._fs.monotonic_ms()) / 1000

    def fail(self, error: LogcoreError) -> None:
        """Schedule the next attempt. Only the first of consecutive errors is logged."""
        self.attempts += 1
        self.retry_count += 1
        if self.state != "waiting":
            log_line("shipping", WARNING, "%s waits: %s", self._worker, error)
        self.state = "waiting"
        self.reason = str(error)
        # After 7 doublings, the delay is at its maximum.
        delay_ms = min(
            _MAX_BACKOFF_MS, _FIRST_BACKOFF_MS * 2 ** min(self.attempts - 1, 7)
        )
        random_fraction = self._fs.random_bytes(1)[0] / 255
        self._retry_ms = self._fs.monotonic_ms() + int(
            delay_ms * (0.8 + 0.4 * random_fraction)
        )

    def succeed(self, state: State) -> None:
        """Record a step without an error."""
        self.state = state
        self.reason = ""
        self.attempts = 0
