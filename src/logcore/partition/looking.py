"""The files of a log that is only read: its segments, where it begins, how far it reaches.

Rules:
- A look writes nothing and locks no file. A writer may append, roll, delete, compact and truncate meanwhile.
- A Segment, with all that was read of it, is kept as long as the file of its name is the same.
- The size of the last segment is read before the end that the writer has shown: unsynced bytes are never shown.
- A log whose files end below its recovery point keeps that end, so that reading meets an error there and not an end.

Called under the locks that state.py names. A log that is open for writing has a look, and never uses it.
"""

from __future__ import annotations

import itertools
from typing import Final

from logcore import checkpoint
from logcore.errors import LogNotFoundError
from logcore.fs import FS
from logcore.names import LOG, SWAP, base_offset_of, bases_in
from logcore.partition.noted import SETTLING_MS, NotedOffsets, begin
from logcore.partition.scan import slot_of
from logcore.partition.segmentfiles import list_bases, list_names, segments_gone
from logcore.partition.stagedlimit import StagedLimit
from logcore.partition.state import PartitionState
from logcore.segment import GrowingSegment, PiecedSegment, Segment

#: How often a reader looks again when files vanish between listing and opening them.
_LOOKS: Final = 100


class FileLook:
    """Fills the fields of a log with what its files say.

    is_end_noted: whether a writer says up to where it was on disk. replacements: how often the last segment was found
    to be another file.
    """

    def __init__(self, fs: FS, path: str, state: PartitionState) -> None:
        self._fs = fs
        self._path = path
        self._state = state
        self._noted = NotedOffsets(fs, path)
        self._staged = StagedLimit(fs, path)
        self._listed_ms = -1  # when names in the directory had last changed, as the segments were listed
        self._has_shown_end = True  # whether a writer says up to where readers may read, at the last look
        self.is_end_noted = False
        self.replacements = 0

    def again(self) -> None:
        """Takes in what has changed. Raises LogNotFoundError when the directory is gone."""
        try:
            is_same = self._fs.modified_ms(self._path) == self._listed_ms
        except FileNotFoundError:
            raise LogNotFoundError("the partition directory is gone", path=self._path) from None
        # No name in the directory has changed, and the last file is the same: only its end may have moved. Listing
        # thousands of segments for each look would cost too much.
        if is_same and all(segment.is_current() for segment in self._state.segments[-1:]):
            self._refresh_end(has_same_names=True)
            self._miss_end()
        else:
            self.list_segments()

    def list_segments(self) -> None:
        """Takes the present files as the log, keeping what is known of segments that are still there."""
        for attempt in itertools.count(1):
            try:
                changed_ms = self._fs.modified_ms(self._path)
                self._state.segments = self._look_for_segments()
                # A compaction may put other files under the same names. What changes twice in so short a time may
                # have the same time, so a look that soon after is not relied on.
                is_settled = changed_ms < self._fs.now_ms() - SETTLING_MS
                if is_settled:
                    self._listed_ms = changed_ms
                else:
                    self._listed_ms = -1
                break
            except FileNotFoundError:
                # A writer rolls and deletes while we look, so a file may be gone when it is opened: look again.
                if attempt == _LOOKS:
                    raise LogNotFoundError("the files of the partition keep vanishing", path=self._path) from None
        self._refresh_end()
        self._miss_end()

    def _miss_end(self) -> None:
        """If the files end below the recovery point, moves the end up to it, so that reading there meets an error and
        not the end of the log. Looks twice, because the writer may have appended, rolled or truncated since. Raises
        CorruptLogError when there are no segments at all.
        """
        known = 0
        for _ in range(2):
            known = self.noted(checkpoint.RECOVERY_POINT)
            if known <= self._state.end:
                return
            if list_bases(self._fs, self._path)[-1:] != [one.base_offset for one in self._state.segments[-1:]]:
                return
            if not all(one.is_current() for one in self._state.segments[-1:]):  # a truncation has put another one there
                return
            self._refresh_end()
        if not self._state.segments:
            raise segments_gone(self._path, known)
        self._state.end = max(self._state.end, known)
        self._state.visible = max(self._state.visible, known)

    def _look_for_segments(self) -> list[Segment]:
        names = list_names(self._fs, self._path)
        bases = bases_in(names)
        swapped = self._look_for_swaps(bases, names)
        again = list_names(self._fs, self._path)
        if {name for name in again if LOG in name} != {name for name in names if LOG in name}:
            raise FileNotFoundError(self._path)  # a listing in the middle of renaming may lack a segment: look again
        if swapped:
            bases = [base for base in bases if not any(one.base_offset <= base < end for one, end in swapped)]
        # A truncation puts another file under an old name; what is known of the old one does not hold for it.
        known = {segment.base_offset: segment for segment in self._state.segments if segment.is_current()}
        segments: list[Segment] = []
        for base in bases[:-1]:
            kept = known.get(base)
            if kept is None or isinstance(kept, GrowingSegment):
                kept = Segment(self._fs, self._path, base)
            segments.append(kept)
        if bases:
            last = known.get(bases[-1])
            if not isinstance(last, GrowingSegment) or isinstance(last, PiecedSegment):
                last = GrowingSegment(self._fs, self._path, bases[-1])
            segments.append(last)
        for one, _ in swapped:
            segments.insert(slot_of(segments, one.base_offset) + 1, one)
        if len(known) < len(self._state.segments):
            self._state.transactions = None
        # Another file under the last name, or no such name any more: a truncation, or the writer has recovered.
        if self._state.segments and self._state.segments[-1].base_offset not in known:
            self.replacements += 1
        return segments

    def _look_for_swaps(self, bases: list[int], names: list[str]) -> list[tuple[Segment, int]]:
        """New segments that a compaction is about to give their names, and the offset each reaches.

        From the moment when the first of the old segments is out of the way, the new one is the log: for the
        milliseconds that it takes, or until the log is opened for writing after a crash.
        """
        swaps = (base_offset_of(name, LOG + SWAP) for name in names if name.endswith(SWAP))
        found = sorted(base for base in swaps if base is not None and base not in bases)
        segments = [Segment(self._fs, self._path, base, SWAP) for base in found]
        return [(one, max(one.next_offset(), one.base_offset + 1)) for one in segments]

    def _noted_start(self) -> int:
        """Where the log begins by what is noted: below the first segment where segments are missing."""
        start = self.noted(checkpoint.LOG_START)
        if not self._state.segments or self._state.segments[0].base_offset <= start:
            return start
        return begin(self._fs, self._path, self._state.segments[0].base_offset)

    def noted(self, name: str) -> int:
        """What an offset checkpoint of the log directory says of this partition; 0 when nothing."""
        return self._noted.get(name)

    def _refresh_end(self, *, has_same_names: bool = False) -> None:
        """Looks where the log begins and how far the files reach now. has_same_names: as at the last look."""
        self._state.log_start = self._noted_start()
        # Of what is being deleted there may be any part, with gaps in between.
        self._state.segments = self._state.segments[max(0, slot_of(self._state.segments, self._state.log_start)) :]
        if not self._state.segments:
            self._state.end = self._state.log_start
            self._state.visible = self._state.log_start
            return
        last = self._state.segments[-1]
        assert isinstance(last, GrowingSegment)
        last.refresh()
        self._state.end = max(self._state.log_start, last.next_offset())
        # Read after the size: a writer makes this file before its first write, so if there were unsynced bytes, the
        # file exists.
        shown = None
        if self._has_shown_end or not has_same_names:
            shown = checkpoint.read_shown_end(self._fs, self._path)
        self._has_shown_end = shown is not None
        if shown is None:
            self.is_end_noted = False
            self._show(self._state.end)
            return
        limit = shown.offset
        is_replicated = shown.is_replicated
        # Damaged: show only what was on disk, or in all copies, for sure; and what was shown before.
        if limit == -1:
            is_replicated = checkpoint.read_notes(self._fs, self._path).replicated
            limit = self._state.visible
            if is_replicated:
                limit = max(limit, self.noted(checkpoint.HIGH_WATERMARK))
        low = self._state.log_start
        if not is_replicated:
            # What lies before the last segment was on disk before that was made.
            low = max(low, last.base_offset)
            if limit < self._state.end:
                # Records below the recovery point are durable. The file may say less: closing a log removes the file
                # without a sync, so a power cut may bring it back as it was last synced.
                limit = max(limit, self.noted(checkpoint.RECOVERY_POINT))
        self.is_end_noted = limit >= low
        self._show(max(low, min(self._state.end, limit)))

    def _show(self, end: int) -> None:
        """Sets the visible end. Called after the size of the last segment was read; see stagedlimit.py for why."""
        staged = self._staged.get()
        if staged is not None:
            end = max(self._state.log_start, min(end, staged))
        self._state.visible = end
