"""Removes and replaces the files of segments in a partition directory.

Rules:
- A crash at any moment leaves the old files or the new ones, with names that show which
  of them are valid. recovery.py reads these names, and docs/crashes.md describes each
  case.
- Files that are removed from the log get the suffix .deleted at once. They are deleted
  after readers in other processes had time to open them, and at the latest when the log
  is closed. Files that remain after a crash are deleted by the next opening. Until
  then, they may be needed to fill a gap (inspect/salvage.py).
- The .log file is renamed first, both out of the log and into it. Indexes without it
  have no meaning, and the next opening deletes them.

This module uses only the offsets in file names, and acquires no lock. Callers hold the
lock of their log.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from logcore.errors import (
    CompactionAbandonedError,
    CorruptLogError,
    LogcoreError,
    LogNotFoundError,
)
from logcore.fs import FS, opened
from logcore.metadata import checkpoint
from logcore.metadata.filenames import (
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

#: Maximum time of one unlink_retired(), because appends to the log block during the call.
#: The deletion of a file of 1 MiB took 1 to 1.5 ms on a busy disk.
UNLINK_MS: Final = 5
#: Chunk size for copying a part of a segment.
_COPY_BYTES: Final = 1 << 20


class SegmentFiles:
    """The files of one log's segments."""

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self._path = path
        #: (due time on the monotonic clock, path); changed under the log's lock.
        self._retired: list[tuple[int, str]] = []

    # -- removing ----------------------------------------------------------------------

    def retire(self, bases: Iterable[int], delay_ms: int) -> None:
        """Remove the files of segments from the log, and delete them after `delay_ms`.

        The renames are not durable yet.
        """
        base_list = list(bases)
        if not base_list:
            return
        listed = self._list_by_segment()
        for base in base_list:
            self._record_retired(self._rename_to_deleted(base, listed), delay_ms)

    def _list_by_segment(self) -> dict[str, list[str]]:
        """Return the names in the directory, grouped by their base offset.

        One listing serves many segments. A listing for each of them would take 0.3 s in
        a log of 300 segments.
        """
        names_by_stem: dict[str, list[str]] = {}
        for name in self._fs.listdir(self._path):
            names_by_stem.setdefault(name.partition(".")[0], []).append(name)
        return names_by_stem

    def _record_retired(self, paths: Sequence[str], delay_ms: int) -> None:
        due_ms = self._fs.monotonic_ms() + delay_ms
        self._retired += [(due_ms, path) for path in paths]

    def _rename_to_deleted(
        self,
        base_offset: int,
        listed: Mapping[str, Sequence[str]],
        suffixes: Sequence[str] | None = None,
    ) -> list[str]:
        """Rename the files of a segment to .deleted, and return their new paths.

        `listed` is the result of _list_by_segment(). With `suffixes`, only the files
        with these suffixes are renamed.
        """
        stem = file_name(base_offset, "")
        # Skip files that are renamed already, or belong to a compaction.
        names = [name for name in listed.get(stem, ()) if not name.endswith(STATES)]
        if suffixes is not None:
            names = [name for name in names if name[len(stem) :] in suffixes]
        paths = []
        for name in sorted(names, key=lambda name: not name.endswith(LOG)):
            paths.append(os.path.join(self._path, name + DELETED))
            self._fs.rename(os.path.join(self._path, name), paths[-1])
        return paths

    @property
    def next_ms(self) -> int:
        """The next due time of unlink_retired(); far in the future if no file waits."""
        return min((due_ms for due_ms, _ in self._retired), default=1 << 62)

    def unlink_retired(self, now_ms: int | None) -> bool:
        """Delete some of the files that are due, or all files with None.

        Returns whether there were any.
        """
        began_ms = self._fs.monotonic_ms()
        due: list[tuple[int, str]] = []
        not_due: list[tuple[int, str]] = []
        for entry in self._retired:
            if now_ms is None or entry[0] <= now_ms:
                due.append(entry)
            else:
                not_due.append(entry)
        count = 0
        for _, path in due:
            is_late = self._fs.monotonic_ms() - began_ms >= UNLINK_MS
            if now_ms is not None and is_late:
                break
            count += 1
            # A file that cannot be deleted only takes space until the next opening.
            with contextlib.suppress(FileNotFoundError, LogcoreError):
                self._fs.unlink(path)
        self._retired = due[count:] + not_due
        return bool(due)

    def remove(self, segment: Segment) -> None:
        """Remove a segment from the log and delete its files, durably.

        Readers that hold the segment can continue to read it.
        """
        segment.keep()
        away = self._rename_to_deleted(segment.base_offset, self._list_by_segment())
        self._fs.sync_dir(self._path)
        for path in away:
            self._fs.unlink(path)

    def remove_leftovers(self, names: Sequence[str]) -> bool:
        """Delete the files of interrupted work; return whether there were any.

        `names` are the names in the directory. The files must be deleted, because a new
        segment would use the indexes of a deleted segment with the same name.
        """
        has_deleted = False
        logs = {name.removesuffix(LOG) for name in names if name.endswith(LOG)}
        for name in names:
            stem, suffix = os.path.splitext(name)
            is_index = suffix in INDEXES and base_offset_of(name, suffix) is not None
            is_leftover = (
                suffix in (DELETED, CLEANED, ".tmp")
                and name != checkpoint.CHECKSUMS_VALID
            )
            if is_leftover or (is_index and stem not in logs):
                # Recovery may have used the same name in the meantime.
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(os.path.join(self._path, name))
                    has_deleted = True
        return has_deleted

    def unseal(self, segments: Sequence[Segment]) -> None:
        """Delete, durably, the seals of segments that are about to change.

        This includes segments that lose the segment after them. A seal that remained
        after a crash would report a loss.
        """
        paths = [
            path for segment in segments if self._fs.exists(path := segment.file(SEAL))
        ]
        for path in paths:
            self._fs.unlink(path)
        if paths:
            self._fs.sync_dir(self._path)

    # -- replacing ---------------------------------------------------------------------

    def replace_with_prefix(self, segment: Segment, position: int, tail: bytes) -> None:
        """Replace a segment by its bytes before `position`, followed by `tail`.

        Its indexes are deleted.
        """
        fs = self._fs
        temporary = segment.path + ".tmp"
        write_prefix(fs, temporary, segment, position, tail)
        segment.keep()
        # Delete the indexes first: those for the whole file would point after the new
        # end.
        for suffix in INDEXES:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(segment.file(suffix))
        fs.rename(temporary, segment.path)
        fs.sync_dir(self._path)

    def exchange(
        self,
        old: Sequence[Segment],
        new: ActiveSegment,
        delay_ms: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        """Replace consecutive old segments by a new one.

        The new one must be complete and durable under .cleaned names. See section 9.7
        of the storage format. `failed` is called with an error after which the new
        segment counts as part of the log, so that the next opening completes the swap.
        After any other error, nothing has changed.
        """
        fs = self._fs
        for segment in old:
            segment.keep()  # readers can continue to read it under any name
        present = set(fs.listdir(self._path))
        suffixes = [
            suffix
            for suffix in SEGMENT_FILES
            if os.path.basename(new.file(suffix)) in present
        ]
        if LOG not in suffixes:
            raise missing_segment_error(new)
        paths = [
            os.path.join(self._path, file_name(new.base_offset, suffix))
            for suffix in suffixes
        ]
        # 1. Rename the new files to .swap. A crash here leaves some of these names.
        # Opening discards them, unless all of them exist.
        try:
            for path in paths:
                fs.rename(path + CLEANED, path + SWAP)
        except BaseException:
            self._delete_markers(paths, failed)
            raise
        # 2. From now on, opening completes the swap after a crash. The renames of the
        # old segments are durable before the new one gets their name, so that no offset
        # is ever in two segments.
        try:
            fs.sync_dir(self._path)
            listed = self._list_by_segment()
            away = self._rename_to_deleted(old[0].base_offset, listed, SEGMENT_FILES)
            for segment in old[1:]:
                away += self._rename_to_deleted(segment.base_offset, listed)
            fs.sync_dir(self._path)
            for path in paths:
                fs.rename(path + SWAP, path)
            fs.sync_dir(self._path)
        except BaseException as error:
            failed(error)
            raise
        self._record_retired(away, delay_ms)

    def _delete_markers(
        self, paths: Sequence[str], failed: Callable[[BaseException], None]
    ) -> None:
        """Delete files that mark a new segment as complete.

        All must be deleted. After another compaction, opening would add a remaining one
        to the log, with records that the log already contains.
        """
        try:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(path + SWAP)
        except BaseException as error:
            failed(error)
            raise


def write_prefix(
    fs: FS, path: str, segment: Segment, position: int, tail: bytes
) -> None:
    """Write a segment's bytes before `position`, and `tail`, to a file, durably."""
    with opened(fs, path, write=True, create=True) as handle:
        fs.truncate(handle, 0)
        copied = 0
        while copied < position:
            chunk = segment.bytes_at(copied, min(_COPY_BYTES, position - copied))
            part = chunk.data[
                chunk.at : min(
                    chunk.limit, chunk.at + _COPY_BYTES, chunk.at + position - copied
                )
            ]
            fs.pwrite(handle, part, copied)
            copied += len(part)
        if tail:
            fs.pwrite(handle, tail, position)
        fs.fsync(handle)


def list_names(fs: FS, directory: str) -> list[str]:
    """Return the names in a partition directory, unordered."""
    try:
        return fs.listdir(directory)
    except FileNotFoundError:
        raise LogNotFoundError(
            "the partition directory was deleted", path=directory
        ) from None


def list_bases(fs: FS, directory: str) -> list[int]:
    """Return the base offsets of the segments in a directory, in rising order."""
    return bases_in(list_names(fs, directory))


def missing_segment_error(new: Segment) -> CompactionAbandonedError:
    """Return the error for a replacement segment whose .log file is missing."""
    return CompactionAbandonedError(
        "the new segment was removed by another program", path=new.path
    )


def missing_segments_error(path: str, known: int) -> CorruptLogError:
    """Return the error for a partition that had records and has no .log files."""
    return CorruptLogError(
        "the segments of this partition are missing",
        path=path,
        expected=f"records up to offset {known}",
        found="no .log file",
    )
