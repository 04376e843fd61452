"""Metadata stored for a partition outside its segments.

It is in the checkpoint files of the log directory, and in small files of the partition.

Rules:
- An entry that is missing or invalid counts as absent, as in checkpoint.py.
- The metadata shows that records exist up to an offset. It never describes their
  content.

This module reads no batches. verify.py and salvage.py in inspect/ compare the metadata
with the segments.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from logcore.config import INT64_MAX
from logcore.errors import InvalidNameError, LogcoreError
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import parse_partition_name
from logcore.partition import gaps

#: File systems report modification times with a resolution of 10 ms or better.
SETTLING_MS: Final = 50

_T = TypeVar("_T")
_U = TypeVar("_U")


class PersistedState(NamedTuple):
    """The metadata of one partition. An offset is 0 if it is not stored."""

    #: The log directory whose checkpoints contain the next four offsets.
    directory: str
    #: The first offset of the log.
    log_start: int
    #: Records below this offset were synced.
    recovery_point: int
    #: The offset up to which consumers could read.
    high_watermark: int
    #: The offset up to which the log was compacted.
    cleaned_to: int
    #: Whether the checkpoints cover the partition, so that a missing entry means 0.
    is_listed: bool
    #: The durable end in the partition's own file.
    durable_end: int
    #: The first offset of the first leader epoch, from the partition's own file; None
    #: if there are no epochs.
    epoch_start: int | None
    #: The content of the partition's own `logcore.policy` file.
    sidecar: checkpoint.PartitionMetadata
    #: Whether no other program has loaded the partition since its seals were checked.
    has_seals: bool

    @classmethod
    def read(cls, fs: FS, path: str, directory: str, key: Key | None) -> PersistedState:
        """Read the metadata of the partition at `path`.

        `key` is its name in the checkpoints of the log directory, or None if the
        directory's name cannot be a partition's.
        """

        def lines(name: str) -> dict[Key, int]:
            offsets = value_or({}, checkpoint.read_offsets, fs, directory, name)
            return {
                partition: offset
                for partition, offset in offsets.items()
                if partition == key and 0 <= offset <= INT64_MAX
            }

        points = lines(checkpoint.RECOVERY_POINT)
        starts = lines(checkpoint.LOG_START)
        epochs = value_or([], checkpoint.read_epochs, fs, path)
        epoch_start = None
        if epochs:
            epoch_start = epochs[0][1]
        watermark: checkpoint.StoredWatermark | None = value_or(
            None, checkpoint.read_visible_end, fs, path
        )
        durable_end = 0
        if watermark is not None:
            durable_end = max(0, watermark.offset)  # -1 means that the file is damaged
        return cls(
            directory=directory,
            log_start=max(starts.values(), default=0),
            recovery_point=max(points.values(), default=0),
            high_watermark=max(lines(checkpoint.HIGH_WATERMARK).values(), default=0),
            cleaned_to=max(lines(checkpoint.CLEANER).values(), default=0),
            is_listed=bool(points)
            and (
                bool(starts) or is_valid_checkpoint(fs, directory, checkpoint.LOG_START)
            ),
            durable_end=durable_end,
            epoch_start=epoch_start,
            sidecar=value_or(
                checkpoint.PartitionMetadata(),
                checkpoint.read_partition_metadata,
                fs,
                path,
            ),
            has_seals=value_or(
                False, fs.exists, os.path.join(path, checkpoint.CHECKSUMS_VALID)
            ),
        )

    @property
    def gaps(self) -> gaps.PersistedGaps:
        """The metadata that decides which gaps in the offsets are losses."""
        return gaps.PersistedGaps.of(
            self.sidecar.dense_from, self.cleaned_to, self.has_seals
        )

    @property
    def end(self) -> int:
        """The offset below which records were assigned and visible, or were durable."""
        return max(self.recovery_point, self.high_watermark, self.durable_end)

    def begin(self, first_base: int) -> int:
        """Return the start of a log whose first segment begins at `first_base`.

        The result is below `first_base` if segments are missing that were not deleted.
        A deletion at the front stores the new start before it deletes. This library
        stores it in the checkpoint. Kafka stores it in the leader epochs, because Kafka
        drops the checkpoint line when a segment begins at the start.
        """
        is_written_by_logcore = (
            self.sidecar.dense_from < INT64_MAX
        )  # this library wrote the log
        if is_written_by_logcore and self.is_listed and self.epoch_start is not None:
            first_base = min(first_base, self.epoch_start)
        return max(self.log_start, first_base)


def is_valid_checkpoint(fs: FS, directory: str, name: str) -> bool:
    """Return whether an offset checkpoint is missing, empty or valid."""
    content = value_or(b"?", checkpoint.read, fs, directory, name)
    lines = (content or b"").split()
    # The file does not exist, is empty, or has version 0 with 0 entries.
    if lines in (
        [],
        [b"0", b"0"],
    ):
        return True
    return bool(value_or({}, checkpoint.read_offsets, fs, directory, name))


def value_or(otherwise: _U, call: Callable[..., _T], *arguments: Any) -> _T | _U:
    """Return the result of `call`, or `otherwise` if it raises a LogcoreError.

    That is the case if a file is unreadable or invalid.
    """
    try:
        return call(*arguments)
    except LogcoreError:
        return otherwise


def read_persisted_offset(fs: FS, path: str, name: str) -> int:
    """Return the partition's offset in a checkpoint of the log directory, or 0."""
    with contextlib.suppress(InvalidNameError):
        parent, partition = os.path.split(fs.real_path(path))
        return checkpoint.read_offsets(fs, parent, name).get(
            parse_partition_name(partition), 0
        )
    return 0


class PersistedOffsets:
    """The offsets of one partition in the checkpoints, cached for repeated reads.

    A file is read again only after it was replaced. Replacing a file changes the
    modification time of the log directory, which is checked first.
    """

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self._path = path
        self._parent = ""
        # By checkpoint name: the file's identity and time, and the offset in it.
        self._known: dict[str, tuple[tuple[object, ...], int]] = {}
        # By checkpoint name: the directory's time, and the offset at that time.
        self._fresh: dict[str, tuple[int, int]] = {}

    def get(self, name: str) -> int:
        """Return the offset in the checkpoint `name`, or 0 if there is none.

        Raises:
            StorageReadError: the checkpoint cannot be read.
        """
        if not self._parent:
            self._parent = os.path.dirname(self._fs.real_path(self._path))
        try:
            changed_ms = self._fs.modified_ms(self._parent)
        except FileNotFoundError:
            return 0
        fresh = self._fresh.get(name)
        if fresh is not None and fresh[0] == changed_ms:
            return fresh[1]
        offset = self._read(name)
        # Two changes within SETTLING_MS may leave the same time.
        if changed_ms < self._fs.now_ms() - SETTLING_MS:
            self._fresh[name] = changed_ms, offset
        return offset

    def _read(self, name: str) -> int:
        file = os.path.join(self._parent, name)
        try:
            changed_ms = self._fs.modified_ms(file)
            stamp = self._fs.identity(file), changed_ms
        except FileNotFoundError:
            return 0
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        offset = read_persisted_offset(self._fs, self._path, name)
        # A file replaced twice within SETTLING_MS may have the same number and time.
        if changed_ms < self._fs.now_ms() - SETTLING_MS:
            self._known[name] = stamp, offset
        return offset


def read_persisted_gaps(fs: FS, path: str) -> gaps.PersistedGaps:
    """Read the metadata that decides which gaps of a partition are losses."""
    sidecar = checkpoint.read_partition_metadata(fs, path)
    has_seals = fs.exists(os.path.join(path, checkpoint.CHECKSUMS_VALID))
    return gaps.PersistedGaps.of(
        sidecar.dense_from,
        read_persisted_offset(fs, path, checkpoint.CLEANER),
        has_seals,
    )


def begin(fs: FS, path: str, first_base: int) -> int:
    """Return the start of a log, by its metadata; see PersistedState.begin()."""
    parent, name = os.path.split(fs.real_path(path))
    key = None
    with contextlib.suppress(InvalidNameError):
        key = parse_partition_name(name)
    return PersistedState.read(fs, path, parent, key).begin(first_base)
