"""Decides whether a gap in the offsets of a log is compaction or a loss.

Rules:
- Appends leave no gaps. Compaction does, but never in the active segment. A log that
  this library created therefore has no gap from dense_from on. The writer stores
  dense_from durably before a compaction replaces a segment.
- Below dense_from, a gap inside a segment is no evidence of a loss. A gap after a segment is
  checked with its seal, which contains the size of the file, the end of its offsets,
  and the base offset of the next segment.
- Another program may compact without updating dense_from. Seals are therefore used only
  while checkpoint.CHECKSUMS_VALID exists, which Kafka deletes when it loads the partition.
- A reader in another process reads dense_from again before it reports a gap as a loss,
  because a compaction may have begun.

This module reads batches only through Segment, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from logcore.config import INT64_MAX
from logcore.errors import CorruptBatchError, CorruptLogError, InvalidRecordError
from logcore.kernels import kernel, layout
from logcore.partition import checksum_file
from logcore.partition.order import (
    NEVER,
    OrderFault,
    end_of,
    first_fault,
    in_order,
    is_gap,
)
from logcore.segment import GrowingSegment, Segment

_Item = TypeVar("_Item")


class PersistedGaps(NamedTuple):
    """The stored metadata about the gaps of a log."""

    #: No offset at or above it is in a gap. NEVER if it is not stored.
    dense_from: int
    #: Whether the seals describe the present files.
    has_seals: bool

    @classmethod
    def of(cls, dense_from: int, cleaned_to: int, has_seals: bool) -> PersistedGaps:
        """Combine the stored dense_from with the compaction checkpoint.

        `cleaned_to` is the offset up to which any program has compacted the log.
        """
        if dense_from == NEVER:
            return cls(NEVER, False)
        # Our own compactions store a dense_from at or above the compacted offsets. A
        # higher checkpoint comes from another program, which may have replaced sealed
        # files.
        return cls(max(dense_from, cleaned_to), has_seals and cleaned_to <= dense_from)


class Gaps:
    """Decides which gaps of one log are losses."""

    def __init__(
        self,
        persisted: PersistedGaps | None,
        reload: Callable[[], PersistedGaps] | None = None,
    ) -> None:
        """Create the object without reading files.

        The metadata is given as `persisted`. With None, it is read at the first gap, which
        most reads never meet. `reload` reads the metadata of a log that another process
        may write.
        """
        self._persisted = persisted
        self._reload = reload

    @property
    def persisted(self) -> PersistedGaps:
        """The metadata; replaced by the writer under its lock, or by readers."""
        if self._persisted is None:
            assert self._reload is not None
            self._persisted = self._reload()
        return self._persisted

    @persisted.setter
    def persisted(self, persisted: PersistedGaps) -> None:
        self._persisted = persisted

    @property
    def dense_from(self) -> int:
        """The offset from which the log has no gaps."""
        return self.persisted.dense_from

    def is_loss(self, expected: int, base_offset: int) -> bool:
        """Return whether a gap before the batch at `base_offset` is a loss.

        `expected` is the offset at which the batch should begin.
        """
        if not is_gap(expected, base_offset, self.persisted.dense_from):
            return False
        if self._reload is None:
            return True
        # A compaction may have begun since it was last read.
        self.persisted = self._reload()
        return is_gap(expected, base_offset, self.persisted.dense_from)

    def loss_at_segment_end(
        self, segment: Segment, reached: int, next_base: int
    ) -> str:
        """Check the gap between the end of a segment and the next base offset.

        Returns a description of the loss, or an empty string.

        Raises:
            StorageReadError: the seal cannot be read.
        """
        if reached >= next_base:
            return ""
        return self._find_confirmed_loss(
            lambda persisted: _loss_at_segment_end(
                persisted, segment, reached, next_base
            )
        )

    def _find_confirmed_loss(self, find_loss: Callable[[PersistedGaps], str]) -> str:
        """Return the result of `find_loss`; an error is confirmed with current metadata."""
        reason = find_loss(self.persisted)
        if reason and self._reload is not None:
            self.persisted = self._reload()
            reason = find_loss(self.persisted)
        return reason

    def check_not_truncated(self, segment: Segment) -> None:
        """Raise CorruptLogError if a segment is shorter than when it was sealed.

        This applies to segments that may have gaps.
        """
        if segment.base_offset >= self.persisted.dense_from:
            return  # each batch reveals a missing predecessor
        reason = self._find_confirmed_loss(
            lambda persisted: _find_truncation(persisted, segment)
        )
        if reason:
            raise CorruptLogError(
                f"a part of a segment is missing: {reason}", path=segment.path
            )

    def check_segment_end(self, segment: Segment, reached: int, next_base: int) -> None:
        """Raise CorruptLogError if loss_at_segment_end() finds a loss."""
        reason = self.loss_at_segment_end(segment, reached, next_base)
        if reason:
            raise CorruptLogError(
                f"the end of a segment, or a whole one, is missing: {reason}",
                path=segment.path,
                offset=reached,
                expected=f"records up to offset {next_base}",
                found=f"an end at offset {reached}",
            )

    def check_start(self, segments: Sequence[Segment], start: int) -> None:
        """Raise CorruptLogError if the first segment begins above `start`.

        `start` is an offset that was not deleted.
        """
        if segments and segments[0].base_offset > start:
            raise missing_start_error(segments[0], start)

    def walk(
        self,
        segments: Sequence[Segment],
        start: int,
        end: int,
        *,
        crc: bool,
        passed: Callable[[Segment], int] = lambda segment: -1,
    ) -> Iterator[tuple[Segment, layout.Facts]]:
        """Yield the headers of all batches that contain offsets from `start` to `end`.

        Yields (segment, array of layout.BATCH_FACTS). `end` must be the end of a batch.
        No batch in between is missing, or an error is raised. `passed(segment)` returns
        the end offset of a segment whose batches need not be read, else -1.

        Raises:
            CorruptLogError, CorruptBatchError, StorageReadError.
        """
        return readable(segments, self._walk(segments, start, end, crc, passed))

    def _walk(
        self,
        segments: Sequence[Segment],
        start: int,
        end: int,
        crc: bool,
        passed: Callable[[Segment], int],
    ) -> Iterator[tuple[Segment, layout.Facts]]:
        self.check_start(segments, start)
        expected = start  # the offset at which the next batch must continue
        previous: Segment | None = None
        for number, segment in enumerate(segments, 1):
            if number < len(segments):
                next_base = segments[number].base_offset
            else:
                next_base = INT64_MAX
            if previous is not None:
                self.check_segment_end(previous, expected, segment.base_offset)
                expected = max(expected, segment.base_offset)
            if expected >= end:
                return
            if next_base <= expected and not segment.exists():
                # A compaction joined it to the previous one after they were listed.
                continue
            previous = segment
            following = None
            if number < len(segments):
                following = segments[number]
            self.check_not_truncated(segment)
            reached = passed(segment)
            if reached >= 0:
                if reached > next_base and following is not None and following.exists():
                    raise CorruptBatchError(
                        "a segment reaches into the next one",
                        path=segment.path,
                        expected=f"an end at offset {next_base} or before",
                        found=reached,
                    )
                expected = max(expected, reached)
                continue
            for facts in self._walk_segment(segment, following, expected, end, crc):
                expected = int(facts["last_offset"][-1]) + 1
                yield segment, facts
            # Every batch of the segment was read and its CRC checked, so its largest
            # timestamp is reliable.
            segment.is_max_timestamp_exact |= crc and start <= segment.base_offset
        if previous is not None and expected < end:
            raise CorruptLogError(
                "the end of the log is missing",
                path=previous.path,
                offset=expected,
                expected=f"records up to offset {end}",
                found=f"an end at offset {expected}",
            )

    def _walk_segment(
        self,
        segment: Segment,
        following: Segment | None,
        start: int,
        end: int,
        crc: bool,
    ) -> Iterator[layout.Facts]:
        """Yield the headers of one segment from the batch that contains `start`.

        Batches at or above `end` are not read.
        """
        expected = start
        begins_inside = segment.base_offset < start  # the batch may begin below start
        position = 0
        if begins_inside:
            position = segment.find(start)
        is_last = following is None or following.base_offset >= end
        for facts, stop_position, stop_reason in segment.walk(position, crc=crc):
            # Of the batches at or above `end`, only the first is checked: it must
            # continue the earlier ones.
            reaches_end = facts["last_offset"] >= end
            above = facts[:0]
            if is_last and reaches_end.any():
                count = int(reaches_end.argmax())
                above = facts[count:]
                facts = facts[:count]
            if len(facts):
                if begins_inside:
                    expected = min(start, int(facts["base_offset"][0]))
                begins_inside = False
                self.check_order(segment, following, facts, expected)
                expected = int(facts["last_offset"][-1]) + 1
                yield facts
            if expected >= end:
                return
            if len(above):
                self.check_order(segment, None, above[:1], expected)
                return
            if stop_reason not in (layout.WALK_END, layout.WALK_LIMIT):
                raise CorruptBatchError(
                    layout.WALK_REASONS[stop_reason],
                    path=segment.path,
                    position=stop_position,
                )

    def check_order(
        self,
        segment: Segment,
        following: Segment | None,
        facts: layout.Facts,
        expected: int,
    ) -> None:
        """Check that batches of a segment continue each other from `expected` on.

        A damaged offset, which no CRC covers, would hide the batches after it, and a
        missing batch would not be detected.

        Raises:
            CorruptBatchError: they do not.
        """
        lasts = facts["last_offset"]
        if following is None:
            next_base = INT64_MAX
        else:
            next_base = following.base_offset
        if kernel.are_consecutive(facts, expected) and int(lasts[-1]) < next_base:
            return  # the usual case, in a fraction of the time
        limit = next_base
        if following is not None and int(lasts[-1]) >= limit and not following.exists():
            limit = INT64_MAX  # a compaction joined the two after they were listed
        dense_from = self.dense_from
        count, fault = first_fault(facts, expected, limit, dense_from=dense_from)
        while fault is not None:
            before = end_of(facts[:count], expected)
            base_offset = int(facts["base_offset"][count])
            if fault is not OrderFault.GAP or self.is_loss(before, base_offset):
                raise CorruptBatchError(
                    "a batch does not continue the one before it",
                    path=segment.path,
                    position=int(facts["position"][count]),
                    offset=before,
                    expected=f"base offset {before}",
                    found=base_offset,
                )
            assert self.dense_from > dense_from, "the metadata now allows this gap"
            dense_from = self.dense_from
            count, fault = first_fault(facts, expected, limit, dense_from=dense_from)


def check_growing(
    segment: GrowingSegment, end: int, dense_from: int, *, is_end_persisted: bool
) -> int:
    """Check the batches of the last segment below `end` that were not checked before.

    Checks CRCs and offsets, and returns the offset after all checked batches. The time
    index of such a segment was built from headers alone, which may be damaged. Only
    after this check may a record that is missing in the index be considered missing.

    From `dense_from` on there are no gaps. `is_end_persisted`: the writer recorded `end`.
    Data after it may then be the remains of a crash. Otherwise, a damaged batch may
    hide valid ones, and is an error.

    Raises:
        CorruptBatchError: there is damage.
    """
    start, expected = segment.checked  # (position, offset) checked so far
    if start == segment.size_bytes and expected >= end:
        return expected
    for facts, position, stop_reason in segment.walk(start, crc=True):
        has_end = False
        if len(facts):
            reaches_end = facts["last_offset"] >= end
            has_end = is_end_persisted and bool(reaches_end.any())
            if has_end:
                row = int(reaches_end.argmax())
                position = int(facts["position"][row])
                facts = facts[:row]
        count = in_order(facts, expected, INT64_MAX, dense_from=dense_from)
        if count < len(facts):
            position = int(facts["position"][count])
        expected = end_of(facts, expected)
        if count < len(facts) or (has_end and expected < end):
            raise CorruptBatchError(
                "a batch does not continue the one before it",
                path=segment.path,
                position=position,
            )
        # After the end there may be a torn batch. Before it, a damaged length appears
        # as one.
        is_torn = expected >= end and (
            is_end_persisted or stop_reason == layout.WALK_SHORT
        )
        if stop_reason not in (layout.WALK_END, layout.WALK_LIMIT) and not is_torn:
            raise CorruptBatchError(
                layout.WALK_REASONS[stop_reason], path=segment.path, position=position
            )
        segment.checked = (position, expected)
        if is_end_persisted and expected >= end:
            break
    return expected


def missing_start_error(first: Segment, start: int) -> CorruptLogError:
    """Return the error for a log whose first segment begins above `start`.

    `start` is an offset that was not deleted.
    """
    return CorruptLogError(
        "the first segments of the log are missing",
        path=first.path,
        offset=start,
        expected=f"a segment that begins at offset {start} or before",
        found=f"{first.base_offset} as the first base offset",
    )


def readable(segments: Sequence[Segment], items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield the items, and convert damage caused by read errors to StorageReadError.

    If a mapped file could not be read, its content appears as damaged.
    """
    try:
        yield from items
    except (CorruptBatchError, CorruptLogError, InvalidRecordError) as error:
        for segment in segments:
            segment.check_readable(error)
        raise


def _loss_at_segment_end(
    persisted: PersistedGaps, segment: Segment, reached: int, next_base: int
) -> str:
    """Return a description of the loss, or ""; see Gaps.loss_at_segment_end()."""
    if is_gap(reached, next_base, persisted.dense_from):
        return "the log has no gaps there"
    if reason := _find_truncation(persisted, segment):
        return reason
    seal = None
    if persisted.has_seals:
        seal = _read_checksum_file(segment)
    if seal is None or segment.size_bytes != seal.size_bytes:
        return ""
    if reached < seal.end_offset:
        return f"it was sealed with an end at offset {seal.end_offset}"
    if next_base > seal.next_base_offset:
        return f"when it was sealed, the next segment began at offset {seal.next_base_offset}"
    return ""


def _find_truncation(persisted: PersistedGaps, segment: Segment) -> str:
    """Return a description if a segment is shorter than when it was sealed, else ""."""
    seal = None
    if persisted.has_seals:
        seal = _read_checksum_file(segment)
    if seal is None or segment.size_bytes >= seal.size_bytes:
        return ""
    return f"it was sealed with {seal.size_bytes} bytes and has {segment.size_bytes}"


def _read_checksum_file(segment: Segment) -> checksum_file.Seal | None:
    """Return the seal of the file that a segment has open, or None; it is read once."""
    if segment.state:
        return None  # a replacement, which is temporary
    if not segment.is_checksum_file_read:
        _ = segment.size_bytes  # opens the file
        seal = checksum_file.read(segment.fs, segment.directory, segment.base_offset)
        # Checked after the read: after a compaction or a truncation, the seal describes
        # the file that has the name now.
        if segment.is_current():
            segment.checksum_file = seal
        else:
            segment.checksum_file = None
        segment.is_checksum_file_read = True
    return segment.checksum_file  # type: ignore[no-any-return]
