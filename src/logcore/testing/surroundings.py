"""The machine around a simulated disk: its clocks, its chance, which boot it is.

Time passes when a test or a waiting program says so. This module knows no file.
"""

from __future__ import annotations

import functools
import hashlib
import random
import time

from logcore.fs import Boot


class Surroundings:
    """A part of SimulatedDisk."""

    def __init__(self, seed: int, now_ms: int) -> None:
        self.seed = seed
        #: How this disk came to be: the crashes that it went through.
        self.history = ""
        self.crashes = 0  # how many
        self._now_ms = now_ms
        self._monotonic_ms = 0

    @functools.cached_property
    def _random(self) -> random.Random:
        return random.Random(self.seed)

    def advance(self, milliseconds: int) -> None:
        """Lets time pass, on both clocks."""
        self._now_ms += milliseconds
        self._monotonic_ms += milliseconds

    def set_wall_clock(self, now_ms: int) -> None:
        """A jump of the wall clock, which the monotonic one does not see."""
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def boot(self) -> Boot:
        """Another one after each crash. Disks that one crash may leave have the same, so that their files are alike."""
        return Boot(hashlib.sha256(b"%d" % self.crashes).digest()[:16], 1)

    def host_name(self) -> str:
        return "simulated"

    def thread_us(self) -> int:
        return self._monotonic_ms * 1000

    def random_bytes(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def yield_thread(self) -> None:
        time.sleep(0)
