"""The files of a log that is open for reading only: its segments, start and end.

Rules:
- This module writes nothing and locks no file. A writer may append, roll, delete,
  compact and truncate concurrently.
- A Segment object, with all data cached in it, is kept while its file is the same.
- The size of the last segment is read before the end that the writer published, so
  that unsynced bytes are never visible.
- A log whose files end below its recovery point keeps the recovery point as its end.
  Reading there then raises an error, instead of reaching the end of the log.

Callers hold the locks that state.py names. A writable log also creates a FileView, but
never refreshes it.
"""

from __future__ import annotations

import itertools
from typing import Final

from logcore.errors import LogNotFoundError
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.filenames import LOG, SWAP, base_offset_of, bases_in
from logcore.partition.persisted import SETTLING_MS, PersistedOffsets, begin
from logcore.partition.scan import slot_of
from logcore.partition.segment_files import (
    list_bases,
    list_names,
    missing_segments_error,
)
from logcore.partition.staged_limit import StagedLimit
from logcore.partition.state import PartitionState
from logcore.segment import GrowingSegment, PreadSegment, Segment

#: Maximum number of attempts when files vanish between listing and opening them.
_MAX_ATTEMPTS: Final = 100


class FileView:
    """Refreshes the state of a log from its files."""

    def __init__(self, fs: FS, path: str, state: PartitionState) -> None:
        self._fs = fs
        self._path = path
        self._state = state
        self._persisted = PersistedOffsets(fs, path)
        self._staged = StagedLimit(fs, path)
        # The directory's modification time when the segments were listed; -1 if
        # unknown.
        self._listed_ms = -1
        # Whether a visible end file existed at the last refresh.
        self._has_visible_end = True
        #: Whether a writer recorded the durable end of this log.
        self.is_end_persisted = False
        #: How often the last segment was found to be another file.
        self.replacements = 0
        #: The end of the records that a writer may have acknowledged. Above the visible
        #: end, they are not synced.
        self.acknowledged_end = 0

    def refresh(self) -> None:
        """Refresh the segments and the end from the files.

        Raises:
            LogNotFoundError: the directory was deleted.
        """
        try:
            is_same = self._fs.modified_ms(self._path) == self._listed_ms
        except FileNotFoundError:
            raise LogNotFoundError(
                "the partition directory was deleted", path=self._path
            ) from None
        # If no name in the directory has changed and the last file is the same, only
        # the end may have moved. Listing thousands of segments each time would cost too
        # much.
        if is_same and all(
            segment.is_current() for segment in self._state.segments[-1:]
        ):
            self._refresh_end(has_same_names=True)
            self._extend_to_recovery_point()
        else:
            self.list_segments()

    def list_segments(self) -> None:
        """Read the list of segments, and keep the objects of unchanged files."""
        for attempt in itertools.count(1):
            try:
                changed_ms = self._fs.modified_ms(self._path)
                self._state.publish(segments=self._find_segments())
                # A compaction may put other files under the same names. Two changes
                # within SETTLING_MS may have the same time, so a listing so soon after
                # a change is not reused.
                is_reusable = changed_ms < self._fs.now_ms() - SETTLING_MS
                if is_reusable:
                    self._listed_ms = changed_ms
                else:
                    self._listed_ms = -1
                break
            except FileNotFoundError:
                # A writer rolls and deletes concurrently, so a file may be missing when
                # it is opened. Try again.
                if attempt == _MAX_ATTEMPTS:
                    raise LogNotFoundError(
                        "the files of the partition keep vanishing", path=self._path
                    ) from None
        self._refresh_end()
        self._extend_to_recovery_point()

    def _extend_to_recovery_point(self) -> None:
        """Raise the end to the recovery point if the files end below it.

        Reading there then raises an error, instead of reaching the end of the log. The
        check runs twice, because the writer may have appended, rolled or truncated
        since the files were listed.

        Raises:
            CorruptLogError: the log has no segments at all.
        """
        known = 0
        for _ in range(2):
            known = self.persisted_offset(checkpoint.RECOVERY_POINT)
            if known <= self._state.end:
                return
            if list_bases(self._fs, self._path)[-1:] != [
                segment.base_offset for segment in self._state.segments[-1:]
            ]:
                return
            # A truncation may have put another file there.
            if not all(segment.is_current() for segment in self._state.segments[-1:]):
                return
            self._refresh_end()
        if not self._state.segments:
            raise missing_segments_error(self._path, known)
        self.acknowledged_end = max(self.acknowledged_end, known)
        self._state.publish(
            end=max(self._state.end, known), visible=max(self._state.visible, known)
        )

    def _find_segments(self) -> list[Segment]:
        names = list_names(self._fs, self._path)
        bases = bases_in(names)
        swapped = self._find_swaps(bases, names)
        again = list_names(self._fs, self._path)
        if {name for name in again if LOG in name} != {
            name for name in names if LOG in name
        }:
            # A listing during a rename may lack a segment. Try again.
            raise FileNotFoundError(self._path)
        if swapped:
            bases = [
                base
                for base in bases
                if not any(
                    segment.base_offset <= base < end for segment, end in swapped
                )
            ]
        # A truncation puts another file under an old name; cached data of the old file
        # is then invalid.
        known = {
            segment.base_offset: segment
            for segment in self._state.segments
            if segment.is_current()
        }
        segments: list[Segment] = []
        for base in bases[:-1]:
            kept = known.get(base)
            if kept is None or isinstance(kept, GrowingSegment):
                kept = Segment(self._fs, self._path, base)
            segments.append(kept)
        if bases:
            last = known.get(bases[-1])
            if not isinstance(last, GrowingSegment) or isinstance(last, PreadSegment):
                last = GrowingSegment(self._fs, self._path, bases[-1])
            segments.append(last)
        for segment, _ in swapped:
            segments.insert(slot_of(segments, segment.base_offset) + 1, segment)
        if len(known) < len(self._state.segments):
            self._state.transactions = None
        # A truncation or a recovery has replaced or removed the last file.
        if self._state.segments and self._state.segments[-1].base_offset not in known:
            self.replacements += 1
        return segments

    def _find_swaps(
        self, bases: list[int], names: list[str]
    ) -> list[tuple[Segment, int]]:
        """Return the segments that a compaction is about to rename, with their ends.

        The new segment is part of the log once the first of the old segments has been
        moved away. That state lasts for the milliseconds of the renames or, after a
        crash, until the log is opened for writing.
        """
        swaps = (
            base_offset_of(name, LOG + SWAP) for name in names if name.endswith(SWAP)
        )
        found = sorted(base for base in swaps if base is not None and base not in bases)
        segments = [Segment(self._fs, self._path, base, SWAP) for base in found]
        return [
            (segment, max(segment.next_offset(), segment.base_offset + 1))
            for segment in segments
        ]

    def _persisted_start(self) -> int:
        """Return the log start according to the metadata.

        It is below the first segment if segments were lost.
        """
        start = self.persisted_offset(checkpoint.LOG_START)
        if not self._state.segments or self._state.segments[0].base_offset <= start:
            return start
        return begin(self._fs, self._path, self._state.segments[0].base_offset)

    def persisted_offset(self, name: str) -> int:
        """Return this partition's offset in a checkpoint of the log directory, or 0."""
        return self._persisted.get(name)

    def _refresh_end(self, *, has_same_names: bool = False) -> None:
        """Refresh the start and the end of the log from the files.

        `has_same_names`: no name in the directory has changed since the last refresh.
        """
        log_start = self._persisted_start()
        # Segments below the start are being deleted. Some may already be deleted, which
        # leaves gaps between the remaining ones.
        segments = self._state.segments
        segments = segments[max(0, slot_of(segments, log_start)) :]
        self._state.publish(segments=segments, log_start=log_start)
        if not segments:
            self._state.publish(end=log_start, visible=log_start)
            self.acknowledged_end = log_start
            return
        last = segments[-1]
        assert isinstance(last, GrowingSegment)
        last.refresh()
        self._state.publish(end=max(log_start, last.next_offset()))
        # Read after the size. A writer creates this file before its first write, so if
        # there were unsynced bytes, the file exists.
        shown = None
        if self._has_visible_end or not has_same_names:
            shown = checkpoint.read_visible_end(self._fs, self._path)
        self._has_visible_end = shown is not None
        if shown is None:
            self.is_end_persisted = False
            self._set_ends(self._state.end, self._state.end)
            return
        limit = shown.offset
        is_replicated = shown.is_replicated
        # The file is damaged. Show only records that were certainly durable (or in all
        # copies), and the records that were visible before.
        if limit == -1:
            is_replicated = checkpoint.read_partition_metadata(
                self._fs, self._path
            ).replicated
            limit = self._state.visible
            if is_replicated:
                limit = max(limit, self.persisted_offset(checkpoint.HIGH_WATERMARK))
        low = self._state.log_start
        if not is_replicated:
            # All records below the last segment were synced before it was created.
            low = max(low, last.base_offset)
            if limit < self._state.end:
                # Records below the recovery point are durable. The file may contain a
                # lower offset: closing a log deletes the file without a sync, so a
                # power cut may restore the last synced version.
                limit = max(limit, self.persisted_offset(checkpoint.RECOVERY_POINT))
        self.is_end_persisted = limit >= low
        visible = max(low, min(self._state.end, limit))
        if is_replicated:
            self._set_ends(visible, visible)
        else:
            self._set_ends(visible, self._state.end)

    def _set_ends(self, visible: int, acknowledged: int) -> None:
        """Set the visible and the acknowledged end, limited by a staged write.

        Called after the size of the last segment was read; staged_limit.py explains why.
        """
        staged = self._staged.get()
        if staged is not None:
            visible = max(self._state.log_start, min(visible, staged))
            acknowledged = max(self._state.log_start, min(acknowledged, staged))
        self.acknowledged_end = acknowledged
        self._state.publish(visible=visible)
