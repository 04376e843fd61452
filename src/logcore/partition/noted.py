"""What is noted of a partition outside its segments: by checkpoints of a log directory, and by its own small files.

Rules:
- A note that is missing, or cannot be understood, counts as absent, as in checkpoint.py.
- Notes tell that records exist up to an offset, never what is in them.

This module sees no batch. verify.py and salvage.py in inspect/ compare what they find in segments with it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from logcore import checkpoint
from logcore.checkpoint import Key
from logcore.config import INT64_MAX
from logcore.errors import InvalidNameError, LogcoreError
from logcore.fs import FS
from logcore.names import parse_partition_name
from logcore.partition import gaps

#: File systems tell the time of a change to 10 ms or better.
SETTLING_MS: Final = 50

_T = TypeVar("_T")
_U = TypeVar("_U")


class Noted(NamedTuple):
    """Offsets are 0 where nothing is noted.

    directory: the log directory whose checkpoints say log_start, recovery_point, high_watermark and cleaned_to.
    is_listed: whether they know the partition, so that what they do not say was not so. durable_end, epoch_start (where
    the first leader epoch begins, None if there are none) and notes: of the partition's own files. has_seals:
    whether no other program has loaded the partition since its seals were checked.
    """

    directory: str
    log_start: int
    recovery_point: int
    high_watermark: int
    cleaned_to: int
    is_listed: bool
    durable_end: int
    epoch_start: int | None
    notes: checkpoint.Notes
    has_seals: bool

    @classmethod
    def read(cls, fs: FS, path: str, directory: str, key: Key | None) -> Noted:
        """Of the partition at path, which the log directory knows as key; None where it can have no such name."""

        def lines(name: str) -> dict[Key, int]:
            found = or_else({}, checkpoint.read_offsets, fs, directory, name)
            return {one: offset for one, offset in found.items() if one == key and 0 <= offset <= INT64_MAX}

        points = lines(checkpoint.RECOVERY_POINT)
        starts = lines(checkpoint.LOG_START)
        epochs = or_else([], checkpoint.read_epochs, fs, path)
        epoch_start = None
        if epochs:
            epoch_start = epochs[0][1]
        shown: checkpoint.ShownEnd | None = or_else(None, checkpoint.read_shown_end, fs, path)
        durable_end = 0
        if shown is not None:
            durable_end = max(0, shown.offset)  # -1 stands for a file that is damaged
        return cls(
            directory=directory,
            log_start=max(starts.values(), default=0),
            recovery_point=max(points.values(), default=0),
            high_watermark=max(lines(checkpoint.HIGH_WATERMARK).values(), default=0),
            cleaned_to=max(lines(checkpoint.CLEANER).values(), default=0),
            is_listed=bool(points) and (bool(starts) or is_understood(fs, directory, checkpoint.LOG_START)),
            durable_end=durable_end,
            epoch_start=epoch_start,
            notes=or_else(checkpoint.Notes(), checkpoint.read_notes, fs, path),
            has_seals=or_else(False, fs.exists, os.path.join(path, checkpoint.SEALS_HOLD)),
        )

    @property
    def gaps(self) -> gaps.Noted:
        """Which gaps in the offsets are losses."""
        return gaps.Noted.of(self.notes.dense_from, self.cleaned_to, self.has_seals)

    @property
    def end(self) -> int:
        """Up to here offsets were given out and shown, or were on disk."""
        return max(self.recovery_point, self.high_watermark, self.durable_end)

    def begin(self, first_base: int) -> int:
        """Where a log begins whose first segment begins at first_base: below that if segments are missing that were
        not deleted.

        What deletes from the front notes the new start first: this library in the checkpoint; Kafka, which drops that
        line when a segment begins there, in the epochs.
        """
        is_own = self.notes.dense_from < INT64_MAX  # this library wrote the log
        if is_own and self.is_listed and self.epoch_start is not None:
            first_base = min(first_base, self.epoch_start)
        return max(self.log_start, first_base)


def is_understood(fs: FS, directory: str, name: str) -> bool:
    """Whether an offset checkpoint does not exist, is empty, or can be understood."""
    content = or_else(b"?", checkpoint.read, fs, directory, name)
    lines = (content or b"").split()
    if lines in ([], [b"0", b"0"]):  # no file, an empty one, or version 0 with 0 entries
        return True
    return bool(or_else({}, checkpoint.read_offsets, fs, directory, name))


def or_else(otherwise: _U, call: Callable[..., _T], *arguments: Any) -> _T | _U:
    """What a call returns, or something else where a file cannot be read or understood."""
    try:
        return call(*arguments)
    except LogcoreError:
        return otherwise


def noted_offset(fs: FS, path: str, name: str) -> int:
    """What an offset checkpoint of the log directory says of the partition at path; 0 when nothing."""
    with contextlib.suppress(InvalidNameError):
        parent, partition = os.path.split(fs.real_path(path))
        return checkpoint.read_offsets(fs, parent, name).get(parse_partition_name(partition), 0)
    return 0


class NotedOffsets:
    """What offset checkpoints of the log directory say of one partition, for a reader that asks again and again: a file
    is read when it was replaced since. Replacing one changes the time of the directory, which is checked first.
    """

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self._path = path
        self._parent = ""
        self._known: dict[str, tuple[tuple[object, ...], int]] = {}  # by name: the file as it was, and what it says
        self._fresh: dict[str, tuple[int, int]] = {}  # by name: the directory's time, and what the file said then

    def get(self, name: str) -> int:
        """0 when nothing is noted. Raises StorageReadError."""
        if not self._parent:
            self._parent = os.path.dirname(self._fs.real_path(self._path))
        try:
            changed_ms = self._fs.modified_ms(self._parent)
        except FileNotFoundError:
            return 0
        fresh = self._fresh.get(name)
        if fresh is not None and fresh[0] == changed_ms:
            return fresh[1]
        offset = self._look(name)
        # Names that change twice in so short a time may leave the same time.
        if changed_ms < self._fs.now_ms() - SETTLING_MS:
            self._fresh[name] = changed_ms, offset
        return offset

    def _look(self, name: str) -> int:
        file = os.path.join(self._parent, name)
        try:
            changed_ms = self._fs.modified_ms(file)
            stamp = self._fs.identity(file), changed_ms
        except FileNotFoundError:
            return 0
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        offset = noted_offset(self._fs, self._path, name)
        # A file that is replaced twice in so short a time may have the same number and the same time.
        if changed_ms < self._fs.now_ms() - SETTLING_MS:
            self._known[name] = stamp, offset
        return offset


def noted_gaps(fs: FS, path: str) -> gaps.Noted:
    """What is noted now of the gaps of the partition at path."""
    notes = checkpoint.read_notes(fs, path)
    has_seals = fs.exists(os.path.join(path, checkpoint.SEALS_HOLD))
    return gaps.Noted.of(notes.dense_from, noted_offset(fs, path, checkpoint.CLEANER), has_seals)


def begin(fs: FS, path: str, first_base: int) -> int:
    """Where the log of a partition begins whose first segment begins at first_base, by what is noted of it."""
    parent, name = os.path.split(fs.real_path(path))
    key = None
    with contextlib.suppress(InvalidNameError):
        key = parse_partition_name(name)
    return Noted.read(fs, path, parent, key).begin(first_base)
