"""What a gap in the offsets of a log means: compaction left it, or batches are missing.

Rules:
- Appends leave no gaps. Compaction does, and never in the active segment. So a log that this library made has no gap
  from dense_from on. The writer notes dense_from, on disk, before a compaction replaces a segment.
- Below dense_from a gap inside a segment proves nothing. A gap behind a segment is judged by its seal, which says how
  long the file was, where its offsets ended, and where the next segment begins.
- Another program may compact without a note of ours. So seals count only while checkpoint.SEALS_HOLD exists, which
  Kafka removes when it loads the partition.
- A reader in another process reads the notes again before it calls a gap a loss, because a compaction may have begun.

This module reads no batch but through its segment, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from logcore.config import INT64_MAX
from logcore.errors import CorruptBatchError, CorruptLogError, InvalidRecordError
from logcore.kernels import kernel, layout
from logcore.partition import seals
from logcore.partition.order import NEVER, Fault, end_of, first_fault, in_order, is_gap
from logcore.segment import GrowingSegment, Segment

_Item = TypeVar("_Item")


class Noted(NamedTuple):
    """What is noted of the gaps of a log.

    dense_from: no offset at or above it is in a gap; NEVER where no note says so. has_seals: whether the seals describe
    the present files.
    """

    dense_from: int
    has_seals: bool

    @classmethod
    def of(cls, dense_from: int, cleaned_to: int, has_seals: bool) -> Noted:
        """dense_from: as this library's writer noted it. cleaned_to: how far the log was compacted, by any program."""
        if dense_from == NEVER:
            return cls(NEVER, False)
        # Our own compactions note dense_from at or above what they clean. A checkpoint beyond it is another program's,
        # which may have replaced files that seals describe.
        return cls(max(dense_from, cleaned_to), has_seals and cleaned_to <= dense_from)


class Gaps:
    """Which gaps of one log are losses."""

    def __init__(self, noted: Noted | None, ask: Callable[[], Noted] | None = None) -> None:
        """noted: what the notes say; None to read them at the first gap, which most readings never meet. ask: reads the
        notes of a log that another process may be writing.
        """
        self._noted = noted
        self._ask = ask

    @property
    def noted(self) -> Noted:
        """Replaced whole: by the writer under its lock, by readers with what they have just read."""
        if self._noted is None:
            assert self._ask is not None
            self._noted = self._ask()
        return self._noted

    @noted.setter
    def noted(self, noted: Noted) -> None:
        self._noted = noted

    @property
    def dense_from(self) -> int:
        return self.noted.dense_from

    def is_loss(self, expected: int, base_offset: int) -> bool:
        """Whether offsets are lost where a batch begins at base_offset and one at expected should."""
        if not is_gap(expected, base_offset, self.noted.dense_from):
            return False
        if self._ask is None:
            return True
        self.noted = self._ask()  # a compaction may have begun since the notes were read
        return is_gap(expected, base_offset, self.noted.dense_from)

    def loss_behind(self, segment: Segment, reached: int, next_base: int) -> str:
        """What is wrong where a segment whose batches end before offset reached is followed by one that begins at
        next_base; empty for nothing. Raises StorageReadError.
        """
        if reached >= next_base:
            return ""
        return self._confirmed(lambda noted: _loss_behind(noted, segment, reached, next_base))

    def _confirmed(self, judge: Callable[[Noted], str]) -> str:
        """What judge says is wrong, by what is noted now."""
        reason = judge(self.noted)
        if reason and self._ask is not None:
            self.noted = self._ask()
            reason = judge(self.noted)
        return reason

    def check_whole(self, segment: Segment) -> None:
        """Raises CorruptLogError when a segment that may have gaps is shorter than it was when it was sealed."""
        if segment.base_offset >= self.noted.dense_from:
            return  # each batch shows whether the one before it is missing
        reason = self._confirmed(lambda noted: _cut_short(noted, segment))
        if reason:
            raise CorruptLogError(f"a part of a segment is missing: {reason}", path=segment.path)

    def check_behind(self, segment: Segment, reached: int, next_base: int) -> None:
        """Raises CorruptLogError when loss_behind() finds something."""
        reason = self.loss_behind(segment, reached, next_base)
        if reason:
            raise CorruptLogError(
                f"the end of a segment, or a whole one, is missing: {reason}",
                path=segment.path,
                offset=reached,
                expected=f"records up to offset {next_base}",
                found=f"an end at offset {reached}",
            )

    def check_front(self, segments: Sequence[Segment], start: int) -> None:
        """Raises CorruptLogError when the first segment begins above start, an offset that was not deleted."""
        if segments and segments[0].base_offset > start:
            raise front_missing(segments[0], start)

    def walk(
        self,
        segments: Sequence[Segment],
        start: int,
        end: int,
        *,
        crc: bool,
        passed: Callable[[Segment], int] = lambda segment: -1,
    ) -> Iterator[tuple[Segment, layout.Facts]]:
        """The heads of all batches from the one that holds start on up to end, which is where a batch ends: (segment,
        array of layout.BATCH_FACTS). None is missing between them, or an error is raised.

        passed(segment): the offset that a segment ends at whose batches need not be read, else -1. Raises
        CorruptLogError, CorruptBatchError, StorageReadError.
        """
        return readable(segments, self._walk(segments, start, end, crc, passed))

    def _walk(
        self, segments: Sequence[Segment], start: int, end: int, crc: bool, passed: Callable[[Segment], int]
    ) -> Iterator[tuple[Segment, layout.Facts]]:
        self.check_front(segments, start)
        expected = start  # the offset that the next batch has to continue with
        before: Segment | None = None
        for number, segment in enumerate(segments, 1):
            if number < len(segments):
                next_base = segments[number].base_offset
            else:
                next_base = INT64_MAX
            if before is not None:
                self.check_behind(before, expected, segment.base_offset)
                expected = max(expected, segment.base_offset)
            if expected >= end:
                return
            if next_base <= expected and not segment.is_there():
                continue  # a compaction has joined it to the one before since they were listed
            before = segment
            following = None
            if number < len(segments):
                following = segments[number]
            self.check_whole(segment)
            reached = passed(segment)
            if reached >= 0:
                if reached > next_base and following is not None and following.is_there():
                    raise CorruptBatchError(
                        "a segment reaches into the next one",
                        path=segment.path,
                        expected=f"an end at offset {next_base} or before",
                        found=reached,
                    )
                expected = max(expected, reached)
                continue
            for facts in self._walk_one(segment, following, expected, end, crc):
                expected = int(facts["last_offset"][-1]) + 1
                yield segment, facts
            # Every batch of it was read and its CRC checked, so its largest timestamp is what was written.
            segment.is_newest_sure |= crc and start <= segment.base_offset
        if before is not None and expected < end:
            raise CorruptLogError(
                "the end of the log is missing",
                path=before.path,
                offset=expected,
                expected=f"records up to offset {end}",
                found=f"an end at offset {expected}",
            )

    def _walk_one(
        self, segment: Segment, following: Segment | None, start: int, end: int, crc: bool
    ) -> Iterator[layout.Facts]:
        """The heads of one segment from the batch that holds start on; what lies at end or above is not read."""
        expected = start
        begins_inside = segment.base_offset < start  # the batch that holds start may begin below it
        position = 0
        if begins_inside:
            position = segment.find(start)
        is_last = following is None or following.base_offset >= end
        for facts, behind, why in segment.walk(position, crc=crc):
            # Of batches at or above end only the order of the first is checked: it has to continue the others.
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
            if why not in (layout.WALK_END, layout.WALK_LIMIT):
                raise CorruptBatchError(layout.WALK_REASONS[why], path=segment.path, position=behind)

    def check_order(self, segment: Segment, following: Segment | None, facts: layout.Facts, expected: int) -> None:
        """Raises CorruptBatchError where batches of a segment do not continue each other from expected on. A damaged
        offset, which no CRC covers, would hide the batches that follow, and a missing batch would go unnoticed.
        """
        lasts = facts["last_offset"]
        if following is None:
            next_base = INT64_MAX
        else:
            next_base = following.base_offset
        if kernel.follow_on(facts, expected) and int(lasts[-1]) < next_base:
            return  # the usual case, in a small part of the time
        limit = next_base
        if following is not None and int(lasts[-1]) >= limit and not following.is_there():
            limit = INT64_MAX  # a compaction has joined the two since they were listed
        dense_from = self.dense_from
        count, fault = first_fault(facts, expected, limit, dense_from=dense_from)
        while fault is not None:
            before = end_of(facts[:count], expected)
            base_offset = int(facts["base_offset"][count])
            if fault is not Fault.GAP or self.is_loss(before, base_offset):
                raise CorruptBatchError(
                    "a batch does not continue the one before it",
                    path=segment.path,
                    position=int(facts["position"][count]),
                    offset=before,
                    expected=f"base offset {before}",
                    found=base_offset,
                )
            assert self.dense_from > dense_from, "the notes say now that this gap is none"
            dense_from = self.dense_from
            count, fault = first_fault(facts, expected, limit, dense_from=dense_from)


def check_growing(segment: GrowingSegment, end: int, dense_from: int, *, is_end_noted: bool) -> int:
    """Checks CRCs and offsets of the batches of the last segment below end that were not checked before; returns the
    offset behind all that were checked. Raises CorruptBatchError.

    The time index of such a segment was made from heads alone, which may be damaged: that a record is not in it may be
    said only after this check. dense_from: from this offset on there are no gaps. is_end_noted: whether end is where
    its writer says; then anything that a crash left may lie behind it. Else a damaged batch may hide sound ones, and is
    an error.
    """
    start, expected = segment.checked  # (position, offset) up to which an earlier call has checked
    if start == segment.size_bytes and expected >= end:
        return expected
    for facts, position, why in segment.walk(start, crc=True):
        is_behind = False
        if len(facts):
            reaches_end = facts["last_offset"] >= end
            is_behind = is_end_noted and bool(reaches_end.any())
            if is_behind:
                row = int(reaches_end.argmax())
                position = int(facts["position"][row])
                facts = facts[:row]
        count = in_order(facts, expected, INT64_MAX, dense_from=dense_from)
        if count < len(facts):
            position = int(facts["position"][count])
        expected = end_of(facts, expected)
        if count < len(facts) or (is_behind and expected < end):
            raise CorruptBatchError("a batch does not continue the one before it", path=segment.path, position=position)
        # Behind the end there may be a torn batch; before it a damaged length looks like one.
        is_torn = expected >= end and (is_end_noted or why == layout.WALK_SHORT)
        if why not in (layout.WALK_END, layout.WALK_LIMIT) and not is_torn:
            raise CorruptBatchError(layout.WALK_REASONS[why], path=segment.path, position=position)
        segment.checked = (position, expected)
        if is_end_noted and expected >= end:
            break
    return expected


def front_missing(first: Segment, start: int) -> CorruptLogError:
    """The error for a log whose first segment begins above start, an offset that was not deleted."""
    return CorruptLogError(
        "the first segments of the log are missing",
        path=first.path,
        offset=start,
        expected=f"a segment that begins at offset {start} or before",
        found=f"{first.base_offset} as the first base offset",
    )


def readable(segments: Sequence[Segment], items: Iterator[_Item]) -> Iterator[_Item]:
    """The items. Damage that only appears because a mapped file could not be read becomes StorageReadError."""
    try:
        yield from items
    except (CorruptBatchError, CorruptLogError, InvalidRecordError) as error:
        for segment in segments:
            segment.check_readable(error)
        raise


def _loss_behind(noted: Noted, segment: Segment, reached: int, next_base: int) -> str:
    """See Gaps.loss_behind()."""
    if is_gap(reached, next_base, noted.dense_from):
        return "the log has no gaps there"
    if reason := _cut_short(noted, segment):
        return reason
    seal = None
    if noted.has_seals:
        seal = _seal_of(segment)
    if seal is None or segment.size_bytes != seal.size_bytes:
        return ""
    if reached < seal.end_offset:
        return f"it was sealed with an end at offset {seal.end_offset}"
    if next_base > seal.next_base_offset:
        return f"when it was sealed, the next segment began at offset {seal.next_base_offset}"
    return ""


def _cut_short(noted: Noted, segment: Segment) -> str:
    """Whether a segment is shorter than when it was sealed: what is wrong, empty for nothing."""
    seal = None
    if noted.has_seals:
        seal = _seal_of(segment)
    if seal is None or segment.size_bytes >= seal.size_bytes:
        return ""
    return f"it was sealed with {seal.size_bytes} bytes and has {segment.size_bytes}"


def _seal_of(segment: Segment) -> seals.Seal | None:
    """The seal of the file that a segment has open, read once; None if there is none that can be understood."""
    if segment.state:
        return None  # it is about to replace others, and is the log for milliseconds only
    if not segment.is_seal_known:
        _ = segment.size_bytes  # opens the file
        seal = seals.read(segment.fs, segment.directory, segment.base_offset)
        # Asked after reading: after a compaction or a truncation the seal is of the file that has the name now.
        if segment.is_current():
            segment.known_seal = seal
        else:
            segment.known_seal = None
        segment.is_seal_known = True
    return segment.known_seal  # type: ignore[no-any-return]
