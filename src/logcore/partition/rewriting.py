"""Replaces and adds segments of an open log: compaction, log copies, staged writes.

Rules:
- The log's lock is held while segments are swapped, but not while new ones are written.
  Appends and reads continue in the meantime.
- A truncation cancels a running rewrite.
- While staged segments are adopted, no other appends are possible. Once their files are
  in place, the state in memory must not lack them. After an error the log therefore
  refuses writes, and the next opening completes the adoption.

This module does not decide which records are kept (cleaner.py does) and opens no staged
files (staging does).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Sequence

from logcore.errors import (
    CompactionAbandonedError,
    DiskFullError,
    LogcoreError,
    LogLockedError,
    ResourceError,
    StorageWriteError,
)
from logcore.metadata import checkpoint
from logcore.metadata.filenames import CLEANED, SEAL
from logcore.partition import aborted_transactions, checksum_file, recovery
from logcore.partition.aborted_transactions import PartitionTransactions
from logcore.partition.segment_files import missing_segment_error
from logcore.partition.writer import Writer
from logcore.segment import ActiveSegment, Segment


class Adoption:
    """A log whose lock is held, fully synced, without a running sync.

    Implements staging.Target.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.path = writer.path
        self.end = writer.state.end
        self.leader_epoch = writer.leader_epoch
        self.segment = writer.active.base_offset
        self.size_bytes = writer.active.size_bytes
        self.segment_bytes = writer.state.config.segment_bytes

    def has_room(self, size: int, max_timestamp: int, last_offset: int) -> bool:
        """Return whether the active segment has room for a batch of this size."""
        return not self._writer.active.is_full(
            size, max_timestamp, last_offset, self._writer.fs.now_ms()
        )

    def seal(self) -> None:
        """Sync and index the active segment, so that another segment may follow it.

        Appends to it remain possible.
        """
        writer = self._writer
        try:
            writer.active.seal()
        except BaseException as error:
            if not isinstance(error, (DiskFullError, ResourceError)):
                writer.commit.poison(error)
            raise

    def add_durable(self, bases: Sequence[int], end: int, size_bytes: int) -> None:
        """Add durable records that were written after the end of the log.

        They are in new segments at `bases`, the last of which becomes the active
        segment. Without `bases`, they are in the active segment.
        """
        writer = self._writer
        state = writer.state
        active = writer.active
        assert end > state.end, (end, state.end)
        if bases:
            # If the previous active segment has batches, it becomes a sealed segment. If
            # it was empty, it had the base offset of the first new segment, whose file
            # has replaced it.
            sealed = list(bases[:-1])
            if active.size_bytes:
                sealed.insert(0, active.base_offset)
            active = ActiveSegment(
                writer.fs, writer.path, bases[-1], state.config, create=False
            )
            recovery.rebuild(active)  # staged writes contain no markers
            active.write_indexes(whole=True)
            added = [Segment(writer.fs, writer.path, base) for base in sealed]
            writer.set_active_locked(active, [*state.segments[:-1], *added, active])
        else:
            active.reload()
            recovery.rebuild(active)
            aborted_transactions.index_aborted(active, state.segments)
        assert active.last_offset + 1 == end, (active.last_offset, end)
        writer.count_adopted_locked(end, size_bytes, len(bases))

    def make_visible(self) -> None:
        """Make the added records visible to readers. They are durable."""
        writer = self._writer
        state = writer.state
        writer.commit.advance(state.end, writer.written_bytes)
        if state.visible < state.end and not writer.is_replicated:
            state.raise_visible_end(state.end)
        writer.start_recovery_point_locked(writer.fs.monotonic_ms())

    def fail(self, cause: BaseException) -> None:
        """Refuse writes, because the files contain more than the state in memory.

        The next process that opens the log completes the adoption.
        """
        self._writer.commit.poison(cause)
        self._writer.claim.expect_unfinished()


class Rewriting:
    """The segments of a log as the cleaner and log copies use them, with methods to
    replace them.

    Appends and reads of the log continue.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        last_stable_offset: Callable[[], int],
        transactions: Callable[[], PartitionTransactions],
    ) -> None:
        """Store the current state of the log. The caller holds the log's lock.

        `last_stable_offset` returns the current value of the log. `transactions` returns
        the transactions up to the high watermark, and possibly later ones.
        """
        self._writer = writer
        self._last_stable_offset = last_stable_offset
        self.transactions = transactions
        self.fs = writer.fs
        self.path = writer.path
        segments = writer.state.segments
        self._truncation_count = len(writer.state.truncations)
        #: The sealed segments when the view was created.
        self.sealed = tuple(segments[:-1])
        #: The active segment when the view was created.
        self.growing = segments[-1]
        self.active_base = segments[-1].base_offset
        self.high_watermark = writer.state.visible
        self.durability = writer.durability
        self.gaps = writer.state.gaps
        self.sidecar = writer.metadata.sidecar
        self.log_start = writer.state.log_start
        #: The end offset of the last compaction round, or None if there was none.
        self.cleaned_to = writer.claim.checkpoints.get(checkpoint.CLEANER, writer.key)
        self._created: ActiveSegment | None = None

    @property
    def last_stable_offset(self) -> int:
        """The last stable offset of the log now."""
        return self._last_stable_offset()

    def check_unchanged(self) -> None:
        """Check that the log was not truncated since the view was created.

        Raises:
            CompactionAbandonedError: it was.
        """
        if len(self._writer.state.truncations) != self._truncation_count:
            raise CompactionAbandonedError(
                "the log was truncated during the compaction; try again", path=self.path
            )

    def last_batches(self) -> dict[int, tuple[int, int]]:
        """Return the last batch of each producer that has not expired.

        The result maps a producer id to (producer epoch, last offset of its last data
        batch, or -1).
        """
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            return self._writer.producers.known().last_batches()

    def create(self, base_offset: int) -> ActiveSegment:
        """Create a new segment to write to, under names that readers ignore.

        Raises:
            LogLockedError: the log is being compacted already.
        """
        writer = self._writer
        with writer.state.lock:
            writer.check_writable_locked()
            if not writer.begin_rewrite_locked(self):
                raise LogLockedError(
                    "the log is being compacted already",
                    path=self.path,
                    pid=None,
                    host=None,
                )
        self._remove_cleaned()
        config = writer.state.config
        self._created = ActiveSegment(
            self.fs, self.path, base_offset, config, create=True, state=CLEANED
        )
        return self._created

    def index_aborted(self, marker_offset: int) -> None:
        """Add the aborted transaction with this marker to the new segment's index.

        Called if the transaction still has batches.
        """
        for entry in self.transactions().entries_between(
            marker_offset, marker_offset + 1
        ):
            assert self._created is not None
            self._created.add_aborted(entry)

    def write_checksum_file(
        self, old: Sequence[Segment], new: ActiveSegment, crc32c: int
    ) -> None:
        """Write the seal of a new segment that will replace old ones.

        `crc32c` is the checksum of the data that was written to it.
        """
        bases = [*(segment.base_offset for segment in self.sealed), self.active_base]
        try:
            modified_ms = self.fs.modified_ms(new.path)
        except FileNotFoundError:
            raise missing_segment_error(new) from None
        seal = checksum_file.Seal(
            size_bytes=new.size_bytes,
            modified_ms=modified_ms,
            crc32c=crc32c,
            end_offset=new.last_offset + 1,
            next_base_offset=bases[bases.index(old[-1].base_offset) + 1],
        )
        checksum_file.write(self.fs, new.file(SEAL), seal)

    def replace(self, old: Sequence[Segment], new: ActiveSegment) -> None:
        """Replace consecutive old segments by a complete new one.

        See section 9.7 of the storage format.

        Raises:
            CompactionAbandonedError: the log was truncated, or segments were deleted.
        """
        writer = self._writer
        # Sync the new files and their names first. This is the slow part, and appends
        # do not have to wait for it.
        new.seal()
        self.fs.sync_dir(self.path)
        with writer.state.lock:
            writer.check_writable_locked()
            segments = writer.state.segments
            self.check_unchanged()
            # Compare objects and order, because retention may have deleted some
            # segments while the new one was written.
            at = next(
                (slot for slot, segment in enumerate(segments) if segment is old[0]),
                None,
            )
            if at is None or [*segments[at : at + len(old)]] != [*old]:
                raise CompactionAbandonedError(
                    "segments were deleted during the compaction; compact again",
                    path=self.path,
                )
            # The offset must be durable before a gap exists. Only the first call in a
            # round writes it, because it covers all segments below the active one.
            writer.write_gaps_locked(self.active_base)
            writer.files.exchange(
                old, new, writer.state.config.file_delete_delay_ms, writer.commit.poison
            )
            sealed = Segment(self.fs, self.path, new.base_offset)
            writer.replace_segments_locked(
                [*segments[:at], sealed, *segments[at + len(old) :]]
            )
            self._created = None
            writer.wake_maintenance_locked()

    def record_cleaned(self, offset: int) -> None:
        """Record that all records below `offset` are compacted.

        The next round begins there.
        """
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            self._writer.set_checkpoint(checkpoint.CLEANER, offset)

    def discard(self) -> None:
        """Delete created files that were not put in place, and end the rewrite."""
        if not self._writer.end_rewrite(self):
            return
        # After the log was closed, another process may be compacting.
        if self._created is not None and not self._writer.state.is_closed:
            with contextlib.suppress(LogcoreError, OSError):
                self._remove_cleaned()
        if self._writer.sharing is not None and not self._writer.state.is_closed:
            self._writer.sharing.release_rewrite()

    def _remove_cleaned(self) -> None:
        self._created = None
        for name in self.fs.listdir(self.path):
            if name.endswith(CLEANED):
                self.fs.unlink(os.path.join(self.path, name))


def save_recovery_points(writers: Collection[Writer]) -> None:
    """Store the recovery points of several logs of a directory in one write.

    Called while staged writes are adopted into these logs.
    """
    points = {writer.key: writer.commit.durable_end for writer in writers}
    # A lagging recovery point only makes the next opening check more.
    with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
        # Each log has its own claim, and all claims of a directory share its
        # checkpoints. They are written once.
        for claim in {
            id(writer.claim.checkpoints): writer.claim for writer in writers
        }.values():
            claim.checkpoints.set(checkpoint.RECOVERY_POINT, points)
        for writer in writers:
            writer.progress.set_recovery_point(points[writer.key])


@contextlib.contextmanager
def adopting(writer: Writer) -> Generator[Adoption, None, None]:
    """Lock the log for staging.applying.

    In the `with` block, appends block, all records are durable, and files may be added
    after the end.
    """
    with writer.state.lock:
        writer.check_writable_locked()
        writer.sync_locked()
        with writer.commit.held():
            yield Adoption(writer)


@contextlib.contextmanager
def rewriting(
    writer: Writer,
    *,
    last_stable_offset: Callable[[], int],
    transactions: Callable[[], PartitionTransactions],
) -> Generator[Rewriting, None, None]:
    """Yield a Rewriting with the current segments, for the cleaner or a copy."""
    with writer.state.lock:
        writer.check_writable_locked()
        view = Rewriting(
            writer, last_stable_offset=last_stable_offset, transactions=transactions
        )
        # Another process may put other files under these names, so map them now.
        if writer.sharing is not None:
            for segment in view.sealed:
                segment.view()
    try:
        yield view
    finally:
        view.discard()
