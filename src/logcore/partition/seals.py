"""Seals: what a segment was when it was sealed, and whether it still is.

A CRC covers each batch but for 17 bytes of its head (base offset, length, leader epoch and magic), and says nothing of
missing batches and segments. The seal beside a sealed segment covers all of the file and says where the next begins.

Rules:
- A seal is a cache. If it is missing or cannot be understood, the next scrub checks every batch instead. So it is not
  synced, and a failure to write it is no failure.
- It describes a file of its size and its time of change, and no other: a file that another program, or a restore, has
  put there since is checked batch by batch, and sealed again.
- It exists only while the file and the next segment exist: it is written when both are on disk, and removed, durably,
  before either is. So a seal that fits, and whose successor is missing, shows a loss.
- A scrub maps no file: if the disk cannot read a page of a mapping, the process dies.

This module repairs nothing, and knows no log: its callers say what else happens to the segments.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import attrs

from logcore import checkpoint
from logcore.errors import DiskFullError, LogcoreError, ResourceError, StorageReadError, StorageWriteError
from logcore.fs import FS, opened
from logcore.kernels import layout
from logcore.kernels.checksum import crc32c
from logcore.names import LOG, SEAL, SWAP, base_offset_of, file_name
from logcore.partition.order import in_order, reach
from logcore.segment import GrowingSegment, Segment

Report = TypeVar("Report")

#: A segment up to this size is sealed when the log rolls, and an append waits for it: 64 MiB, copied from memory a MiB
#: at a time, take 6 ms on an idle core and up to 25 ms on a busy one. Larger ones are left to the next scrub.
ROLL_BYTES: Final = 64 << 20
#: Read at once.
_SLICE_BYTES: Final = 1 << 20
#: Between two reports of how far a scrub is: some milliseconds.
_STEP_BYTES: Final = 4 << 20


@attrs.frozen(kw_only=True)
class Seal:
    """Content of a `.seal`: the .log file's size, when it was changed last (milliseconds of the wall clock) and its
    CRC-32C; the offset behind its last batch; the base offset of the segment that follows.
    """

    size_bytes: int
    modified_ms: int
    crc32c: int
    end_offset: int
    next_base_offset: int

    def is_of(self, size_bytes: int, modified_ms: int) -> bool:
        """Whether it speaks of a file that has this size and time of change now."""
        return (self.size_bytes, self.modified_ms) == (size_bytes, modified_ms)

    def pack(self) -> bytes:
        """A JSON object, a space, the CRC-32 of the object in hex, a line feed."""
        text = json.dumps(attrs.asdict(self), separators=(",", ":")).encode()
        return b"%s %08x\n" % (text, zlib.crc32(text))

    @classmethod
    def unpack(cls, content: bytes) -> Seal | None:
        """None for what is not wholly a seal."""
        found = re.fullmatch(rb"(\{[^{}\n]*\}) ([0-9a-f]{8})\n", content)
        if not found or int(found[2], 16) != zlib.crc32(found[1]):
            return None
        try:
            fields = json.loads(found[1])
        except ValueError:
            return None
        # Exactly these fields, and numbers: a seal of a later version may mean something else by them.
        is_known = fields.keys() == attrs.fields_dict(cls).keys() and all(type(one) is int for one in fields.values())
        if is_known:
            return cls(**fields)
        return None


def read(fs: FS, directory: str, base_offset: int) -> Seal | None:
    """The seal of a segment, None if there is none that can be understood."""
    content = checkpoint.read(fs, directory, file_name(base_offset, SEAL))
    if content is None:
        return None
    return Seal.unpack(content)


def write(fs: FS, path: str, seal: Seal) -> None:
    """Replaces the seal at a path, if there is one: by a new file, because forks share the old one."""
    with contextlib.suppress(DiskFullError, ResourceError, StorageWriteError):
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)
        with opened(fs, path, write=True, create=True) as handle:
            fs.pwrite(handle, seal.pack(), 0)


def seal(fs: FS, segment: GrowingSegment, end_offset: int, next_base_offset: int) -> None:
    """Seals a segment that is on disk, with the next one, and whose bytes are known to be sound."""
    with contextlib.suppress(StorageReadError):
        found = Seal(
            size_bytes=segment.size_bytes,
            modified_ms=fs.modified_ms(segment.path),
            crc32c=checksum(segment),
            end_offset=end_offset,
            next_base_offset=next_base_offset,
        )
        write(fs, segment.file(SEAL), found)


def checksum(segment: GrowingSegment) -> int:
    """CRC-32C of the .log file, as long as it was when it was opened."""
    crc = 0
    for data in _slices(segment, 0, segment.size_bytes):
        crc = crc32c(data, crc)
    return crc


def _slices(segment: GrowingSegment, start: int, stop: int) -> Iterator[bytes]:
    for at in range(start, stop, _SLICE_BYTES):
        yield segment.fs.pread(segment.handle, min(_SLICE_BYTES, stop - at), at)


def follows(fs: FS, directory: str, base_offset: int, seal: Seal, log_start: int) -> str:
    """Whether the segment behind a sealed one is where the seal says: what is wrong, empty for nothing.

    One that begins before that place, but behind the last sealed offset, may be left by an interrupted compaction: the
    end of the new segment does not tell how far those reached that it replaces, so the last of them may be kept.
    """
    bases = (base_offset_of(name) for name in fs.listdir(directory))
    following = min((base for base in bases if base is not None and base > base_offset), default=None)
    if following is not None and following <= seal.next_base_offset:
        if following >= seal.end_offset:
            return ""
        return f"segment {following} begins before this one ends"
    if following is not None and following <= log_start:
        return ""  # of the segments that were deleted, a crash may bring back any
    # Compaction may be giving a new segment the name of an old one. The .swap file exists from before the old one is
    # renamed until the new one has the name. So looking at the name, at .swap and at the name again misses neither.
    path = os.path.join(directory, file_name(seal.next_base_offset, LOG))
    if fs.exists(path) or fs.exists(path + SWAP) or fs.exists(path):
        return ""
    return f"the next segment, which begins at offset {seal.next_base_offset}, is gone"


# -- scrub -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Finding:
    """Something damaged: in the bytes of the file at path from position on, None where that is not known. The offsets
    from first_offset up to next_offset cannot be relied on; each is None where it is not known.
    """

    path: str
    position: int | None
    first_offset: int | None
    next_offset: int | None
    reason: str

    def __str__(self) -> str:
        where = ""
        if self.position is not None:
            where = f" at position {self.position}"
        return f"{self.path}: damaged{where}, offsets {self.first_offset} to {self.next_offset} ({self.reason})"


@attrs.frozen(kw_only=True)
class ScrubReport:
    """What a scrub of one partition found. segments: checked. sealed: of these, those that got a new seal. skipped:
    those that compaction, retention or a truncation replaced meanwhile. checked_bytes: of .log files.
    """

    path: str
    segments: int = 0
    sealed: int = 0
    skipped: int = 0
    checked_bytes: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        found = "; ".join(map(str, self.findings)) or "sound"
        return f"{self.path}: {self.segments} segments, {self.checked_bytes} bytes checked: {found}"


class Progress(NamedTuple):
    """Bytes that work has read so far, and those it will read in all, as far as that is known."""

    done_bytes: int
    total_bytes: int


@attrs.frozen
class SegmentContext:
    """What a log says of one of its segments: where the next one begins, None for the last; from which offset on a gap
    is a loss; how often the log was truncated; and where it ends, which appends move without changing the segment.
    """

    next_base: int | None
    dense_from: int
    cuts: int
    end: int = attrs.field(eq=False)


def finish(steps: Generator[object, None, Report]) -> Report:
    """Does work of many steps to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


#: Keeps a log from being changed by this process, and says what it says of the segment with a base offset; None when
#: there is none. Nothing but names and the seal is read inside.
Placing = Callable[[int], contextlib.AbstractContextManager[SegmentContext | None]]


def scrubbing(
    fs: FS, directory: str, bases: Sequence[int], placing: Placing, *, writes: bool
) -> Generator[Progress, None, ScrubReport]:
    """Looks at some segments of a log that may be changing, a few milliseconds at a time.

    writes: whether sound sealed segments get a seal where they have none. Raises StorageReadError, and what placing
    raises.
    """
    return _Scrub(fs, directory, bases, placing, writes).run()


class _Scrub:
    """One scrub of one log."""

    def __init__(self, fs: FS, directory: str, bases: Sequence[int], placing: Placing, writes: bool) -> None:
        self.fs = fs
        self.directory = directory
        self.bases = bases
        self.placing = placing
        self.writes = writes
        self.done = 0  # bytes read
        self.told = 0  # as of the last Progress
        self.total = 0  # bytes to read, by the sizes at the beginning
        self.segments = 0
        self.sealed = 0
        self.skipped = 0
        self.findings: list[Finding] = []

    def run(self) -> Generator[Progress, None, ScrubReport]:
        for base in self.bases:
            with contextlib.suppress(FileNotFoundError):
                self.total += self.fs.file_size(os.path.join(self.directory, file_name(base, LOG)))
        for base in self.bases:
            yield from self._look_at(base)
        return ScrubReport(
            path=self.directory,
            segments=self.segments,
            sealed=self.sealed,
            skipped=self.skipped,
            checked_bytes=self.done,
            findings=tuple(self.findings),
        )

    def _read(self, size: int) -> Iterator[Progress]:
        """Counts bytes, and says now and then how many there were."""
        self.done += size
        if self.done - self.told >= _STEP_BYTES:
            self.told = self.done
            yield Progress(self.done, max(self.done, self.total))

    def _look_at(self, base: int) -> Iterator[Progress]:
        """One segment: what the log says of it, then its bytes without any lock, then whether it is still the same."""
        fs = self.fs
        with self.placing(base) as place:
            if place is None:
                self.skipped += 1
                return
            path = os.path.join(self.directory, file_name(base, LOG))
            try:
                # With a handle of its own: what takes its place meanwhile is another file.
                segment = GrowingSegment(fs, self.directory, base)
                modified_ms = fs.modified_ms(path)
                known = read(fs, self.directory, base)
            except FileNotFoundError:
                if self.writes:  # only this process removes files of the log, and not while placing() holds it
                    self.findings.append(Finding(path, None, base, place.next_base, "the file is gone"))
                else:  # removed by its writer, since we looked
                    self.skipped += 1
                return
        self.segments += 1
        size = segment.size_bytes
        finding = None
        new = None
        is_sealed = known is not None and known.is_of(size, modified_ms)
        if place.next_base is not None or is_sealed:
            fs.drop_cache(segment.handle, 0)  # rot is on the disk, and memory may hold what was there before
        if is_sealed:
            assert known is not None
            finding = yield from self._compare(segment, known, place)
        else:
            finding, facts = yield from self._walk(segment, place.next_base, place)
            if finding is None and place.next_base is not None and self.writes:
                new = Seal(size_bytes=size, modified_ms=modified_ms, next_base_offset=place.next_base, **facts)
        # A segment that was replaced, cut or touched while it was read says nothing about the one in its place.
        with self.placing(base) as after:
            is_same = after == place and segment.is_current() and fs.size(segment.handle) >= size
            if is_same and (is_sealed or place.next_base is not None):  # the growing one changes with each append
                try:
                    is_same = fs.modified_ms(path) == modified_ms and read(fs, self.directory, base) == known
                except FileNotFoundError:  # its writer is another process, and has just taken it away
                    is_same = False
            if not is_same:
                self.skipped += 1
            elif finding:
                self.findings.append(finding)
            elif new:
                write(fs, segment.file(SEAL), new)
                self.sealed += 1

    def _compare(
        self, segment: GrowingSegment, known: Seal, place: SegmentContext
    ) -> Generator[Progress, None, Finding | None]:
        """Compares a segment with its seal."""
        crc = 0
        base = segment.base_offset
        next_base = known.next_base_offset
        for data in _slices(segment, 0, segment.size_bytes):
            crc = crc32c(data, crc)
            yield from self._read(len(data))
        if crc != known.crc32c:
            found, _ = yield from self._walk(segment, next_base, place)  # says where, if a batch shows it
            return found or Finding(segment.path, None, base, next_base, "bytes that no CRC of a batch covers changed")
        reason = follows(self.fs, self.directory, base, known, 0)  # what lies below the log start is not checked
        if reason:
            return Finding(segment.path, known.size_bytes, known.end_offset, place.next_base, reason)
        return None

    def _walk(
        self, segment: GrowingSegment, next_base: int | None, place: SegmentContext
    ) -> Generator[Progress, None, tuple[Finding | None, dict[str, int]]]:
        """Checks every batch: (the first damage, what a seal would say of the file)."""
        expected = segment.base_offset
        before = 0  # position up to which the CRC of the file was computed
        crc = 0
        if next_base is None:
            limit = reach(segment.base_offset)
        else:
            limit = next_base
        bad = segment.size_bytes
        reason = ""
        for facts, position, why in segment.walk(0, crc=True):
            count = in_order(facts, expected, limit, dense_from=place.dense_from)
            if count:
                expected = int(facts["last_offset"][count - 1]) + 1
            if count < len(facts):
                bad = int(facts["position"][count])
                reason = "the offset of a batch does not follow the one before it"
                break
            if why not in (layout.WALK_END, layout.WALK_LIMIT):
                bad = position
                reason = layout.WALK_REASONS[why]
                break
            for data in _slices(segment, before, position):
                crc = crc32c(data, crc)
            yield from self._read(position - before)
            before = position
        if next_base is None:
            is_sound = expected >= place.end  # anything behind it is being written, or was never shown to a reader
        else:
            # To the next segment without a gap, unless compaction may have left one.
            is_sound = not reason and (expected == next_base or next_base <= place.dense_from)
        if is_sound:
            return None, {"crc32c": crc, "end_offset": expected}
        found = Finding(
            segment.path, bad, expected, next_base or place.end, reason or "the offsets from here on lie in no segment"
        )
        return found, {}


def drop_stale(fs: FS, directory: str, segments: Iterable[Segment]) -> bool:
    """Removes the seals of segments that another program may have replaced. Notes on disk that the remaining ones fit
    their files; returns whether that could be noted.
    """
    for segment in segments:
        seal = read(fs, directory, segment.base_offset)
        if seal is not None and not seal.is_of(fs.file_size(segment.path), fs.modified_ms(segment.path)):
            fs.unlink(segment.file(SEAL))
    try:
        fs.sync_dir(directory)
        fs.close(fs.open(os.path.join(directory, checkpoint.SEALS_HOLD), write=True, create=True))
        fs.sync_dir(directory)
    except (DiskFullError, ResourceError):
        return False
    return True


def unopened(path: str, error: LogcoreError) -> ScrubReport:
    """The report on a partition that could not be opened, or not read to its end."""
    found = Finding(error.path or path, error.position, error.offset, None, error.reason)
    return ScrubReport(path=path, findings=(found,))
