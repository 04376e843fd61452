"""The environment of a simulated disk: its clocks, its random numbers and its boot id.

Time passes only when a test or a waiting program advances it. This module handles no
files.
"""

from __future__ import annotations

import functools
import hashlib
import random
import time

from logcore.fs import Boot


class Environment:
    """A part of SimulatedDisk."""

    def __init__(self, seed: int, now_ms: int) -> None:
        self.seed = seed
        #: The crashes that led to this disk, as text.
        self.history = ""
        self.crashes = 0  # number of crashes that led to this disk
        self._now_ms = now_ms
        self._monotonic_ms = 0

    @functools.cached_property
    def _random(self) -> random.Random:
        return random.Random(self.seed)

    def advance(self, milliseconds: int) -> None:
        """Advance both clocks."""
        self._now_ms += milliseconds
        self._monotonic_ms += milliseconds

    def set_wall_clock(self, now_ms: int) -> None:
        """Set the wall clock. The monotonic clock does not change."""
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def boot(self) -> Boot:
        """Return the boot id, which changes with each crash.

        All disks that one crash may leave have the same id, so that equal files remain
        equal.
        """
        return Boot(hashlib.sha256(b"%d" % self.crashes).digest()[:16], 1)

    def host_name(self) -> str:
        return "simulated"

    def thread_us(self) -> int:
        return self._monotonic_ms * 1000

    def random_bytes(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def yield_thread(self) -> None:
        time.sleep(0)
