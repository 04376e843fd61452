"""Segments of a log that others put in place: the cleaner, copies of a log, and writes that were staged in files.

Rules:
- The log's lock is held while segments are exchanged, and not while new ones are written: appends and reads go on.
- A truncation ends a rewriting.
- While staged segments are adopted, nothing else is appended. Once their files are in place, an error may not leave
  memory that says less than the files: the log refuses writes, and the next opening ends the work.

This module decides nothing about what is kept (cleaner.py does) and opens no staged file (staging does).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Sequence

from logcore import checkpoint
from logcore.errors import (
    CompactionAbandonedError,
    DiskFullError,
    LogcoreError,
    LogLockedError,
    ResourceError,
    StorageWriteError,
)
from logcore.names import CLEANED, SEAL
from logcore.partition import epochs, recovery, seals, transactions
from logcore.partition.cutting import plan_cut
from logcore.partition.segmentfiles import new_segment_gone
from logcore.partition.transactions import Transactions
from logcore.partition.writer import Writer
from logcore.segment import ActiveSegment, Segment


class Adoption:
    """A log whose lock is held, with nothing unsynced and no sync under way: what staging.Target describes."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.path = writer.path
        self.end = writer.state.end
        self.leader_epoch = writer.leader_epoch
        self.segment = writer.active.base_offset
        self.size_bytes = writer.active.size_bytes
        self.segment_bytes = writer.state.config.segment_bytes

    def has_room(self, size: int, max_timestamp: int, last_offset: int) -> bool:
        """Whether the active segment takes as much more."""
        return not self._writer.active.is_full(size, max_timestamp, last_offset, self._writer.fs.now_ms())

    def seal(self) -> None:
        """Makes the active segment one that others may follow; appending to it goes on being possible."""
        writer = self._writer
        try:
            writer.active.seal()
        except BaseException as error:
            if not isinstance(error, (DiskFullError, ResourceError)):
                writer.commit.poison(error)
            raise

    def take(self, bases: Sequence[int], end: int, size_bytes: int) -> None:
        """Takes note of records that were put behind the log's end, durably: in segments at bases, the last of which
        becomes the active one, or in the active segment.
        """
        writer = self._writer
        state = writer.state
        assert end > state.end, (end, state.end)
        if bases:
            # An empty active segment had the base offset of the first new one, whose file has taken its place.
            if writer.active.size_bytes:
                before = state.segments
            else:
                before = state.segments[:-1]
            # The segment that was active until now, if it has batches, is read as a sealed one from here on.
            sealed = [*(segment.base_offset for segment in before[-1:]), *bases[:-1]]
            new = ActiveSegment(writer.fs, writer.path, bases[-1], state.config, create=False)
            recovery.rebuild(new)  # it has no markers, because staged writes have none
            new.write_indexes(whole=True)
            state.segments = [*before[:-1], *(Segment(writer.fs, writer.path, base) for base in sealed), new]
            writer.active = new
        else:
            # Written by another hand: its bytes were not seen by this writer, so a roll must not seal them unchecked.
            writer.active.refresh()
            writer.active.is_own = False
            recovery.rebuild(writer.active)
            transactions.index_aborted(writer.active, state.segments)
        assert writer.active.last_offset + 1 == end, (writer.active.last_offset, end)
        state.end = end
        writer.written_bytes += size_bytes
        writer.appends += 1
        writer.rolls += len(bases)
        writer.stir_locked()

    def show(self) -> None:
        """All that was taken is on disk; readers see it."""
        writer = self._writer
        state = writer.state
        writer.commit.advance(state.end, writer.written_bytes)
        if state.visible < state.end and not writer.is_replicated:
            state.show(state.end)
        writer.recovery_bytes = writer.commit.synced_bytes
        writer.last_recovery_ms = writer.fs.monotonic_ms()
        writer.active.offer_indexes()

    def fail(self, cause: BaseException) -> None:
        """The files say more than memory does: no more appends, and the next to open the log ends the work."""
        self._writer.commit.poison(cause)
        self._writer.claim.expect_unfinished()


class Rewriting:
    """What the cleaner and copies see of a log, and may do to it.

    sealed, growing: its segments and the active one, as they were at the beginning. cleaned_to: where the last round
    ended, None if there was none. Appends and reads go on meanwhile.
    """

    def __init__(
        self, writer: Writer, *, last_stable_offset: Callable[[], int], transactions: Callable[[], Transactions]
    ) -> None:
        """last_stable_offset(): of the log now. transactions(): those up to the high watermark, and perhaps beyond."""
        self._writer = writer
        self._last_stable_offset = last_stable_offset
        self.transactions = transactions
        self.fs = writer.fs
        self.path = writer.path
        segments = writer.state.segments
        self._cuts = len(writer.state.cuts)
        self.sealed = tuple(segments[:-1])
        self.growing = segments[-1]
        self.active_base = segments[-1].base_offset
        self.high_watermark = writer.state.visible
        self.durability = writer.durability
        self.gaps = writer.state.gaps
        self.notes = writer.notes
        self.log_start = writer.state.log_start
        self.cleaned_to = writer.claim.checkpoints.get(checkpoint.CLEANER, writer.key)
        self._created: ActiveSegment | None = None

    @property
    def last_stable_offset(self) -> int:
        return self._last_stable_offset()

    def epochs(self) -> list[epochs.Entry]:
        return self._writer.epochs

    def plan_cut(self, segment: Segment, offset: int) -> tuple[int, bytes]:
        """(position, tail): up to offset a segment has its bytes before position, and tail behind them."""
        return plan_cut(segment, offset, self._writer.state.config, self._writer.epochs)

    def check_unchanged(self) -> None:
        """Raises CompactionAbandonedError when the log was truncated since the rewriting began."""
        if len(self._writer.state.cuts) != self._cuts:
            raise CompactionAbandonedError("the log was truncated meanwhile; try again", path=self.path)

    def last_batches(self) -> dict[int, tuple[int, int]]:
        """Producer id -> (producer epoch, last offset of its last data batch or -1), of producers that are alive."""
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            return self._writer.producers.known().last_batches()

    def create(self, base_offset: int) -> ActiveSegment:
        """A new segment to write to, under names that no reader looks for."""
        writer = self._writer
        # Two rewritings of one log would remove each other's .cleaned files. This says no within the process, the turn
        # for rewriting says no among processes.
        with writer.state.lock:
            writer.check_writable_locked()
            is_free = writer.rewriter in (None, self)
            if is_free and writer.sharing is not None:
                is_free = writer.sharing.take_rewriting()
            if not is_free:
                raise LogLockedError("the log is being compacted already", path=self.path, pid=None, host=None)
            writer.rewriter = self
        self._remove_cleaned()
        config = writer.state.config
        self._created = ActiveSegment(self.fs, self.path, base_offset, config, create=True, state=CLEANED)
        return self._created

    def keep_aborted(self, marker_offset: int) -> None:
        """The aborted transaction that ends there still has batches: the new segment's index is to name it."""
        for entry in self.transactions().entries_between(marker_offset, marker_offset + 1):
            assert self._created is not None
            self._created.add_aborted(entry)

    def add_seal(self, old: Sequence[Segment], new: ActiveSegment, crc32c: int) -> None:
        """The seal of a new segment that is to replace old ones. crc32c: of what was written to it."""
        bases = [*(segment.base_offset for segment in self.sealed), self.active_base]
        try:
            modified_ms = self.fs.modified_ms(new.path)
        except FileNotFoundError:
            raise new_segment_gone(new) from None
        seal = seals.Seal(
            size_bytes=new.size_bytes,
            modified_ms=modified_ms,
            crc32c=crc32c,
            end_offset=new.last_offset + 1,
            next_base_offset=bases[bases.index(old[-1].base_offset) + 1],
        )
        seals.write(self.fs, new.file(SEAL), seal)

    def replace(self, old: Sequence[Segment], new: ActiveSegment) -> None:
        """Puts a new segment, whole, in the place of old ones that follow each other (storage format section 9.7)."""
        writer = self._writer
        # The slow part, syncing the new files and their names, is done before appends have to wait.
        new.seal()
        self.fs.sync_dir(self.path)
        with writer.state.lock:
            writer.check_writable_locked()
            segments = writer.state.segments
            self.check_unchanged()
            # The same objects in the same order: retention may have deleted some while the new one was written.
            at = next((slot for slot, one in enumerate(segments) if one is old[0]), None)
            if at is None or [*segments[at : at + len(old)]] != [*old]:
                raise CompactionAbandonedError("segments were deleted meanwhile; compact again", path=self.path)
            # On disk before a gap exists. Changes something only the first time in a round: it covers all up to the
            # active segment, which no compaction of this round reaches.
            writer.note_gaps_locked(self.active_base)
            writer.files.exchange(old, new, writer.state.config.file_delete_delay_ms, writer.commit.poison)
            sealed = Segment(self.fs, self.path, new.base_offset)
            writer.state.segments = [*segments[:at], sealed, *segments[at + len(old) :]]
            self._created = None
            writer.stir_locked()

    def note_cleaned(self, offset: int) -> None:
        """Below offset all is compacted; the next round begins there."""
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            self._writer.set_checkpoint(checkpoint.CLEANER, offset)

    def discard(self) -> None:
        """Removes what was created and not put in place."""
        if self._writer.rewriter is not self:
            return
        self._writer.rewriter = None
        # After the log was closed, another process may be compacting.
        if self._created is not None and not self._writer.state.is_closed:
            with contextlib.suppress(LogcoreError, OSError):
                self._remove_cleaned()
        if self._writer.sharing is not None and not self._writer.state.is_closed:
            self._writer.sharing.give_rewriting()

    def _remove_cleaned(self) -> None:
        self._created = None
        for name in self.fs.listdir(self.path):
            if name.endswith(CLEANED):
                self.fs.unlink(os.path.join(self.path, name))


def save_recovery_points(writers: Collection[Writer]) -> None:
    """Of logs of one directory that are being adopted into, in one write of the file that they share."""
    points = {writer.key: writer.commit.durable_end for writer in writers}
    # One that lags costs the next opening some checking and nothing else.
    with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
        # Each log has a claim of its own, and all claims of a directory share its checkpoints: written once.
        for claim in {id(writer.claim.checkpoints): writer.claim for writer in writers}.values():
            claim.checkpoints.set(checkpoint.RECOVERY_POINT, points)
        for writer in writers:
            writer.recovery_point = points[writer.key]


@contextlib.contextmanager
def adopting(writer: Writer) -> Generator[Adoption, None, None]:
    """For staging.applying: inside, appends wait, all is on disk, and files may be put behind the end."""
    with writer.state.lock:
        writer.check_writable_locked()
        writer.sync_locked()
        with writer.commit.held():
            yield Adoption(writer)


@contextlib.contextmanager
def rewriting(
    writer: Writer, *, last_stable_offset: Callable[[], int], transactions: Callable[[], Transactions]
) -> Generator[Rewriting, None, None]:
    """For the cleaner and copies: the sealed segments as they are now, and the way to replace them. See Rewriting."""
    with writer.state.lock:
        writer.check_writable_locked()
        view = Rewriting(writer, last_stable_offset=last_stable_offset, transactions=transactions)
        if writer.sharing is not None:  # another process may put other files under these names
            for segment in view.sealed:
                segment.view()
    try:
        yield view
    finally:
        view.discard()
