"""Trusted time: the wall clock, as long as it agrees with the time that has passed.

All deletions by age use this time instead of the wall clock: retention, compaction,
committed offsets, producer ids. Otherwise, a wall clock that is set ahead by mistake
would delete records that are minutes old.

    the wall clock                                            trusted time
    agrees with the last trusted reading and the time since   the wall clock
    is more than an hour early or late                        continues from the last trusted reading, never above
                                                              the wall clock
    has been so for 24 hours, without moving back             the wall clock again

Rules:
- Within one boot, the monotonic clock measures the time since a reading. Across a
  reboot the time is unknown, and the monotonic clock stops while a machine is
  suspended. So a machine that was off or suspended for more than an hour is treated
  like a clock that was set ahead: deletion is late by a day.
- The last trusted reading is stored in `logcore.clock`, so a restart with a wrong clock
  is detected too. Without the file, the time at which the recovery points were last
  written replaces it.
- If the clock file cannot be read or written, no error is raised. The worst result is a
  later deletion.

This module deletes nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final, NamedTuple, cast

from logcore.errors import LogcoreError
from logcore.fs import FS, SharedFS
from logcore.metadata import checkpoint
from logcore.reporting import WARNING, log_line

#: A wall clock that differs by more than this from the time that has passed was set.
JUMP_MS: Final = 3_600_000
#: A wall clock that was set is trusted again after this time.
DISTRUST_MS: Final = 24 * 3_600_000
#: Interval at which the reading on disk is replaced, if a deletion requests it.
_SAVE_MS: Final = 300_000
#: The same interval when a directory is closed. A reading within JUMP_MS is as good as
#: the last one.
SAVE_AT_CLOSE_MS: Final = 1_800_000


class ClockReading(NamedTuple):
    """Both clocks at one moment, in milliseconds."""

    wall_ms: int
    monotonic_ms: int
    #: The boot of the machine to which the monotonic clock belongs.
    boot: str

    def passed_ms(self, later: ClockReading) -> int | None:
        """Return the time from this reading to a later one, or None across a reboot."""
        if self.boot == later.boot:
            return later.monotonic_ms - self.monotonic_ms
        return None


class Trust(NamedTuple):
    """The readings with which the wall clock is compared."""

    #: The last reading that agreed with the passed time.
    trusted: ClockReading
    #: The first reading that did not agree, if any.
    suspect: ClockReading | None = None


def update_trust(trust: Trust, now: ClockReading) -> tuple[Trust, int]:
    """Return the next state and the trusted time in milliseconds, by the table at the
    top of this module.
    """
    expected_ms = trust.trusted.wall_ms + (trust.trusted.passed_ms(now) or 0)
    if abs(now.wall_ms - expected_ms) <= JUMP_MS:
        return Trust(now), now.wall_ms
    suspect = trust.suspect
    if (
        suspect is None
        or now.wall_ms < suspect.wall_ms + (suspect.passed_ms(now) or 0) - JUMP_MS
    ):
        suspect = now
    held_ms = suspect.passed_ms(now)
    if held_ms is None:
        held_ms = now.wall_ms - suspect.wall_ms
    if held_ms >= DISTRUST_MS:
        return Trust(now), now.wall_ms
    return Trust(trust.trusted, suspect), min(now.wall_ms, expected_ms)


class TrustedClock:
    """The trusted time of one log directory, for all threads of the process that has it
    open for writing.
    """

    def __init__(self, fs: FS, directory: str) -> None:
        """Load the last trusted reading, before anything in the directory is written."""
        self._fs = fs
        self._directory = directory
        self._lock = threading.Lock()
        boot = cast(SharedFS, fs).boot().boot_id
        # On a system without a boot id, the boot of readings by other processes is
        # unknown.
        if not any(boot):
            boot = fs.random_bytes(16)
        self._boot = boot.hex()
        self._saved = self._loaded()
        self._trust = self._saved or self._first()

    def now_ms(self, wall_ms: int) -> int:
        """Return the trusted time while the wall clock shows `wall_ms`.

        It is at most `wall_ms`.
        """
        with self._lock:
            before = self._trust
            self._trust, trusted_ms = update_trust(before, self._read_clocks(wall_ms))
            is_new = (
                self._trust.suspect is not None
                and self._trust.suspect is not before.suspect
            )
        if is_new:
            log_line(
                "retention",
                WARNING,
                "%s: the wall clock is off by %.1f hours from the time that has passed; it is not used for deletion by "
                "age until it has been steady for 24 hours",
                self._directory,
                (wall_ms - trusted_ms) / 3_600_000,
            )
        return trusted_ms

    def save(self, *, max_age_ms: int = _SAVE_MS) -> None:
        """Store the last trusted reading, unless the stored one is younger than max_age_ms.

        Deletion by age calls this before it deletes anything, and so does the closing of
        the directory.
        """
        with self._lock:
            trust = self._trust
            saved = self._saved
            if saved is not None and saved.suspect == trust.suspect:
                passed_ms = saved.trusted.passed_ms(trust.trusted)
                if passed_ms is None:  # a reading of an earlier boot
                    passed_ms = trust.trusted.wall_ms - saved.trusted.wall_ms
                if passed_ms < max_age_ms:
                    return
            self._saved = trust
        with contextlib.suppress(LogcoreError):
            checkpoint.write(
                self._fs,
                self._directory,
                checkpoint.CLOCK,
                checkpoint.pack_checked(trust._asdict()),
            )

    def _read_clocks(self, wall_ms: int) -> ClockReading:
        return ClockReading(wall_ms, self._fs.monotonic_ms(), self._boot)

    def _loaded(self) -> Trust | None:
        """Return the state on disk, or None if the file does not exist, is damaged or
        cannot be read.
        """
        with contextlib.suppress(LogcoreError, TypeError, KeyError, ValueError):
            content = checkpoint.read(self._fs, self._directory, checkpoint.CLOCK)
            facts = checkpoint.unpack_checked(content or b"") or {}
            suspect = None
            if facts["suspect"] is not None:
                suspect = _reading(facts["suspect"])
            return Trust(_reading(facts["trusted"]), suspect)
        return None

    def _first(self) -> Trust:
        """Return the state without a clock file: the wall clock of the last write is
        trusted, in an unknown boot.
        """
        with contextlib.suppress(LogcoreError, FileNotFoundError):
            return Trust(
                ClockReading(
                    self._fs.modified_ms(
                        os.path.join(self._directory, checkpoint.RECOVERY_POINT)
                    ),
                    0,
                    "",
                )
            )
        return Trust(self._read_clocks(self._fs.now_ms()))


def _reading(values: list[object]) -> ClockReading:
    wall_ms, monotonic_ms, boot = values
    if (
        type(wall_ms) is not int
        or type(monotonic_ms) is not int
        or type(boot) is not str
    ):
        raise ValueError(values)
    return ClockReading(wall_ms, monotonic_ms, boot)
