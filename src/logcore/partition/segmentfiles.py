"""Takes the files of segments out of a partition directory, and puts others in their place.

Rules:
- A crash at any moment leaves the old files or the new ones, and names that tell which of them count (recovery.py reads
  them, docs/crashes.md goes through them one by one).
- Files that leave the log get the suffix .deleted at once. They are removed when readers in other processes have had
  the time to open them, at the latest when the log is closed. Those that a crash leaves are removed by the next
  opening: until then they may be what fills a gap (inspect/salvage.py).
- The .log file is renamed first, out of the log and into it: indexes alone mean nothing, and the next opening removes
  them.

This module knows no offsets but those in names, and takes no lock: a log calls it under its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from logcore import checkpoint
from logcore.errors import CompactionAbandonedError, CorruptLogError, LogcoreError, LogNotFoundError
from logcore.fs import FS, opened
from logcore.names import (
    CLEANED,
    DELETED,
    INDEXES,
    LOG,
    SEAL,
    SEGMENT_FILES,
    STATES,
    SWAP,
    base_offset_of,
    bases_in,
    file_name,
)
from logcore.segment import ActiveSegment, Segment

#: A copy of part of a segment goes in pieces of this.
_COPY_BYTES: Final = 1 << 20


class SegmentFiles:
    """The files of one log's segments."""

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self._path = path
        #: (when to remove it by the monotonic clock, path), written under the log's lock.
        self._retired: list[tuple[int, str]] = []

    # -- out of the log ------------------------------------------------------------------------------------------

    def retire(self, bases: Iterable[int], delay_ms: int) -> None:
        """Takes the files of segments out of the log, to be removed delay_ms later. Not durable yet."""
        for base in bases:
            self._note_retired(self._put_away(base), delay_ms)

    def _note_retired(self, paths: Sequence[str], delay_ms: int) -> None:
        due_ms = self._fs.monotonic_ms() + delay_ms
        self._retired += [(due_ms, path) for path in paths]

    def _put_away(self, base_offset: int, suffixes: Sequence[str] | None = None) -> list[str]:
        """Renames the files of a segment, or those of them with a suffix, to .deleted; returns their new paths."""
        prefix = file_name(base_offset, ".")
        names = [name for name in self._fs.listdir(self._path) if name.startswith(prefix)]
        names = [name for name in names if not name.endswith(STATES)]  # already renamed, or of a compaction
        if suffixes is not None:
            names = [name for name in names if name[len(prefix) - 1 :] in suffixes]
        paths = []
        for name in sorted(names, key=lambda name: not name.endswith(LOG)):
            paths.append(os.path.join(self._path, name + DELETED))
            self._fs.rename(os.path.join(self._path, name), paths[-1])
        return paths

    @property
    def next_ms(self) -> int:
        """When unlink_retired() next has something to do; far away when nothing waits."""
        return min((due_ms for due_ms, _ in self._retired), default=1 << 62)

    def unlink_retired(self, now_ms: int | None) -> bool:
        """Removes the files whose time has come, or all with None; returns whether there were any."""
        due = [path for due_ms, path in self._retired if now_ms is None or due_ms <= now_ms]
        if due:
            self._retired = [(due_ms, path) for due_ms, path in self._retired if path not in due]
            for path in due:
                # One that cannot be removed now only takes space, until the next opening removes it.
                with contextlib.suppress(FileNotFoundError, LogcoreError):
                    self._fs.unlink(path)
        return bool(due)

    def remove(self, segment: Segment) -> None:
        """Takes a segment out of the log, durably, and its files with it. Who holds it goes on reading it."""
        segment.keep()
        away = self._put_away(segment.base_offset)
        self._fs.sync_dir(self._path)
        for path in away:
            self._fs.unlink(path)

    def remove_leftovers(self, names: Sequence[str]) -> bool:
        """Removes files of work that a crash cut off, of the names in the directory; returns whether there were any.

        Nothing refers to them. But a new segment would mistake the indexes of a deleted one for its own, and Kafka
        would believe them.
        """
        found = False
        logs = {name.removesuffix(LOG) for name in names if name.endswith(LOG)}
        for name in names:
            stem, suffix = os.path.splitext(name)
            is_index = suffix in INDEXES and base_offset_of(name, suffix) is not None
            is_left = suffix in (DELETED, CLEANED, ".tmp") and name != checkpoint.SEALS_HOLD
            if is_left or (is_index and stem not in logs):
                with contextlib.suppress(FileNotFoundError):  # recovery may have made the same name again
                    self._fs.unlink(os.path.join(self._path, name))
                    found = True
        return found

    def unseal(self, segments: Sequence[Segment]) -> None:
        """Removes the seals of segments that are about to be other files, or to lose the segment after them. Durably:
        a seal that a crash left would say that something was lost.
        """
        paths = [path for segment in segments if self._fs.exists(path := segment.file(SEAL))]
        for path in paths:
            self._fs.unlink(path)
        if paths:
            self._fs.sync_dir(self._path)

    # -- in the place of others ----------------------------------------------------------------------------------

    def replace_front(self, cut: Segment, position: int, tail: bytes) -> None:
        """Puts a file with the bytes before position and tail behind them in the place of a segment; its indexes go."""
        fs = self._fs
        temporary = cut.path + ".tmp"
        write_front(fs, temporary, cut, position, tail)
        cut.keep()
        # The indexes go first: those of the whole file would point behind the end of its front.
        for suffix in INDEXES:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(cut.file(suffix))
        fs.rename(temporary, cut.path)
        fs.sync_dir(self._path)

    def exchange(
        self, old: Sequence[Segment], new: ActiveSegment, delay_ms: int, failed: Callable[[BaseException], None]
    ) -> None:
        """Puts a new segment, whole and on disk under .cleaned names, in the place of old ones that follow each other
        (storage format section 9.7).

        failed: called with an error after which the directory says that the new segment counts, so that the next
        opening ends the work. After any other error all is as before.
        """
        fs = self._fs
        for segment in old:
            segment.keep()  # readers that hold one read on under whatever name it gets
        present = set(fs.listdir(self._path))
        suffixes = [suffix for suffix in SEGMENT_FILES if os.path.basename(new.file(suffix)) in present]
        if LOG not in suffixes:
            raise new_segment_gone(new)
        paths = [os.path.join(self._path, file_name(new.base_offset, suffix)) for suffix in suffixes]
        # A crash in here leaves some of these names. Opening discards them, unless all of them exist.
        try:
            for path in paths:
                fs.rename(path + CLEANED, path + SWAP)
        except BaseException:
            self._take_back(paths, failed)
            raise
        # From here on the new segment counts: opening finishes what a crash leaves. Old segments are out of
        # the way, durably, before the new one takes a name: no offset is ever in two segments.
        try:
            fs.sync_dir(self._path)
            away = self._put_away(old[0].base_offset, SEGMENT_FILES)
            for segment in old[1:]:
                away += self._put_away(segment.base_offset)
            fs.sync_dir(self._path)
            for path in paths:
                fs.rename(path + SWAP, path)
            fs.sync_dir(self._path)
        except BaseException as error:
            failed(error)
            raise
        self._note_retired(away, delay_ms)

    def _take_back(self, paths: Sequence[str], failed: Callable[[BaseException], None]) -> None:
        """Removes files that say that a new segment is complete. None may stay: after another round it would come back
        into the log, with records that are in it already.
        """
        try:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(path + SWAP)
        except BaseException as error:
            failed(error)
            raise


def write_front(fs: FS, path: str, segment: Segment, position: int, tail: bytes) -> None:
    """Writes the bytes of a segment before position, and tail behind them, to a file, which is on disk then."""
    with opened(fs, path, write=True, create=True) as handle:
        fs.truncate(handle, 0)
        at = 0
        while at < position:
            piece = segment.piece(at, min(_COPY_BYTES, position - at))
            part = piece.data[piece.at : min(piece.limit, piece.at + _COPY_BYTES, piece.at + position - at)]
            fs.pwrite(handle, part, at)
            at += len(part)
        if tail:
            fs.pwrite(handle, tail, position)
        fs.fsync(handle)


def list_names(fs: FS, directory: str) -> list[str]:
    """Names in a partition directory, in no order."""
    try:
        return fs.listdir(directory)
    except FileNotFoundError:
        raise LogNotFoundError("the partition directory is gone", path=directory) from None


def list_bases(fs: FS, directory: str) -> list[int]:
    """Base offsets of the segments in a partition directory, rising."""
    return bases_in(list_names(fs, directory))


def new_segment_gone(new: Segment) -> CompactionAbandonedError:
    """The error for a segment that was to replace others, and whose .log file is not there."""
    return CompactionAbandonedError("the new segment was removed by another program", path=new.path)


def segments_gone(path: str, known: int) -> CorruptLogError:
    """The error for a partition that has no .log file, and is known to have reached an offset."""
    return CorruptLogError(
        "the segments of this partition are gone",
        path=path,
        expected=f"records up to offset {known}",
        found="no .log file",
    )
