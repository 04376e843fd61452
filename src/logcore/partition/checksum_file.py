"""Segment checksum files ("seals"): detect bit rot and losses in sealed segments.

The CRC of a batch does not cover 17 bytes of its header (base offset, length, leader
epoch and magic), and does not reveal missing batches and segments. The seal beside a
sealed segment covers the whole file, and contains the base offset of the next segment.

Rules:
- A seal is a cache. If it is missing or invalid, the next scrub checks every batch
  instead. A seal is therefore not synced, and a failed write of a seal is ignored.
- A seal is valid only for a file of its size and modification time. A file that another
  program or a restore has put there since is checked batch by batch, and sealed again.
- A seal exists only while the file and the next segment exist. It is written when both
  are durable, and deleted, durably, before either is. A valid seal without the next
  segment therefore proves a loss.
- A scrub maps no files: if the disk cannot read a page of a mapping, the process dies.

This module repairs nothing, and does not use a Log. Its callers synchronize it with
other changes to the segments.
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

from logcore.errors import (
    DiskFullError,
    LogcoreError,
    ResourceError,
    StorageReadError,
    StorageWriteError,
)
from logcore.fs import FS, opened
from logcore.kernels import layout
from logcore.kernels.checksum import crc32c
from logcore.metadata import checkpoint
from logcore.metadata.filenames import LOG, SEAL, SWAP, base_offset_of, file_name
from logcore.partition.order import in_order, reach
from logcore.segment import GrowingSegment, Segment

Report = TypeVar("Report")

#: Segments up to this size are sealed when the log rolls, while an append waits. 64
#: MiB, copied from memory 1 MiB at a time, take 6 ms on an idle core and up to 25 ms on
#: a busy one. Larger segments are left to the next scrub.
ROLL_BYTES: Final = 64 << 20
#: Size of one read.
_SLICE_BYTES: Final = 1 << 20
#: Bytes between two progress reports of a scrub: some milliseconds of work.
_STEP_BYTES: Final = 4 << 20


@attrs.frozen(kw_only=True)
class Seal:
    """Content of a `.seal` file."""

    #: Size of the .log file.
    size_bytes: int
    #: Modification time of the .log file, in milliseconds of the wall clock.
    modified_ms: int
    #: CRC-32C of the .log file.
    crc32c: int
    #: The offset after the last batch.
    end_offset: int
    #: The base offset of the next segment.
    next_base_offset: int

    def is_of(self, size_bytes: int, modified_ms: int) -> bool:
        """Return whether the seal is for a file of this size and modification time."""
        return (self.size_bytes, self.modified_ms) == (size_bytes, modified_ms)

    def pack(self) -> bytes:
        """Return a JSON object, a space, the object's CRC-32 in hex, and a newline."""
        text = json.dumps(attrs.asdict(self), separators=(",", ":")).encode()
        return b"%s %08x\n" % (text, zlib.crc32(text))

    @classmethod
    def unpack(cls, content: bytes) -> Seal | None:
        """Decode a seal; None if the content is not exactly a seal."""
        found = re.fullmatch(rb"(\{[^{}\n]*\}) ([0-9a-f]{8})\n", content)
        if not found or int(found[2], 16) != zlib.crc32(found[1]):
            return None
        try:
            fields = json.loads(found[1])
        except ValueError:
            return None
        # Exactly these fields, and all numbers: a later version may give them another
        # meaning.
        is_known = fields.keys() == attrs.fields_dict(cls).keys() and all(
            type(field) is int for field in fields.values()
        )
        if is_known:
            return cls(**fields)
        return None


def read(fs: FS, directory: str, base_offset: int) -> Seal | None:
    """Return the seal of a segment, or None if there is no valid one."""
    content = checkpoint.read(fs, directory, file_name(base_offset, SEAL))
    if content is None:
        return None
    return Seal.unpack(content)


def write(fs: FS, path: str, seal: Seal) -> None:
    """Replace the seal at a path by a new file, because forks share the old one."""
    with contextlib.suppress(DiskFullError, ResourceError, StorageWriteError):
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)
        with opened(fs, path, write=True, create=True) as handle:
            fs.pwrite(handle, seal.pack(), 0)


def seal(
    fs: FS, segment: GrowingSegment, end_offset: int, next_base_offset: int
) -> None:
    """Write the seal of a segment.

    The segment and the next one must be durable, and its bytes known to be valid.
    """
    # Another program may have deleted the file. An append that rolls does not fail
    # because of that: readers of the segment report it.
    with contextlib.suppress(StorageReadError, FileNotFoundError):
        found = Seal(
            size_bytes=segment.size_bytes,
            modified_ms=fs.modified_ms(segment.path),
            crc32c=checksum(segment),
            end_offset=end_offset,
            next_base_offset=next_base_offset,
        )
        write(fs, segment.file(SEAL), found)


def checksum(segment: GrowingSegment) -> int:
    """Return the CRC-32C of the .log file, up to its size when it was opened."""
    crc = 0
    for data in _slices(segment, 0, segment.size_bytes):
        crc = crc32c(data, crc)
    return crc


def _slices(segment: GrowingSegment, start: int, stop: int) -> Iterator[bytes]:
    for at in range(start, stop, _SLICE_BYTES):
        yield segment.fs.pread(segment.handle, min(_SLICE_BYTES, stop - at), at)


def follows(
    fs: FS, directory: str, base_offset: int, seal: Seal, log_start: int
) -> str:
    """Check that the segment after a sealed one is the one that the seal names.

    Returns a description of the error, or an empty string. A segment that begins
    earlier, but at or after the last sealed offset, may be left by an interrupted
    compaction. The end of a compacted segment does not show how far the replaced
    segments reached, so the last of them may still exist.
    """
    bases = (base_offset_of(name) for name in fs.listdir(directory))
    following = min(
        (base for base in bases if base is not None and base > base_offset),
        default=None,
    )
    if following is not None and following <= seal.next_base_offset:
        if following >= seal.end_offset:
            return ""
        return f"segment {following} begins before this one ends"
    if following is not None and following <= log_start:
        return ""  # after a crash, any of the deleted segments may reappear
    # Compaction may be renaming a new segment to the name of an old one. The .swap file
    # exists from before the old one is renamed until the new one has the name. Checking
    # the name, .swap and the name again therefore misses neither.
    path = os.path.join(directory, file_name(seal.next_base_offset, LOG))
    if fs.exists(path) or fs.exists(path + SWAP) or fs.exists(path):
        return ""
    return f"the next segment, which begins at offset {seal.next_base_offset}, is gone"


# -- scrub -----------------------------------------------------------------------------


@attrs.frozen
class Finding:
    """Damage in a partition. Fields are None if they are unknown."""

    #: The damaged file.
    path: str
    #: The position in the file from which its bytes are damaged.
    position: int | None
    #: The offsets from this one up to next_offset are unreliable.
    first_offset: int | None
    next_offset: int | None
    reason: str

    def __str__(self) -> str:
        location = ""
        if self.position is not None:
            location = f" at position {self.position}"
        if self.first_offset is not None:
            location += f", offsets {self.first_offset} to "
            location += (
                "the end" if self.next_offset is None else f"{self.next_offset - 1}"
            )
        return f"{self.path}: damaged{location} ({self.reason})"


@attrs.frozen(kw_only=True)
class ScrubReport:
    """The result of a scrub of one partition."""

    path: str
    #: Number of checked segments.
    segments: int = 0
    #: Number of those that got a new seal.
    sealed: int = 0
    #: Number of segments that compaction, retention or a truncation replaced
    #: concurrently.
    skipped: int = 0
    #: Checked bytes of .log files.
    checked_bytes: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether no damage was found."""
        return not self.findings

    def __str__(self) -> str:
        found = "; ".join(map(str, self.findings)) or "sound"
        return f"{self.path}: {self.segments} segments, {self.checked_bytes} bytes checked: {found}"


class ScrubProgress(NamedTuple):
    """Bytes that a task has read so far, and the expected total."""

    done_bytes: int
    total_bytes: int


@attrs.frozen
class SegmentContext:
    """The facts about a segment that its log provides."""

    #: The base offset of the next segment; None for the last segment.
    next_base: int | None
    #: The offset from which a gap is a loss.
    dense_from: int
    #: How often the log was truncated.
    truncations: int
    #: The log end offset, which appends raise without changing the segment.
    end: int = attrs.field(eq=False)


def finish(steps: Generator[object, None, Report]) -> Report:
    """Run a task of many steps to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


#: Prevents this process from changing the log, and yields the facts about the segment
#: with a base offset, or None if there is none. Only names and the seal are read
#: inside.
Placing = Callable[[int], contextlib.AbstractContextManager[SegmentContext | None]]


def scrubbing(
    fs: FS, directory: str, bases: Sequence[int], placing: Placing, *, writes: bool
) -> Generator[ScrubProgress, None, ScrubReport]:
    """Check segments of a log that may be changing, a few milliseconds at a time.

    With writes=True, valid sealed segments without a seal get one.

    Raises:
        StorageReadError: a segment cannot be read. `placing` may raise others.
    """
    return _Scrub(fs, directory, bases, placing, writes).run()


class _Scrub:
    """One scrub of one log."""

    def __init__(
        self,
        fs: FS,
        directory: str,
        bases: Sequence[int],
        placing: Placing,
        writes: bool,
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.bases = bases
        self.placing = placing
        self.writes = writes
        self.read_bytes = 0  # number of bytes read
        self.reported_bytes = 0  # the same at the last Progress
        self.total = 0  # number of bytes to read, by the sizes at the beginning
        self.segments = 0
        self.sealed = 0
        self.skipped = 0
        self.findings: list[Finding] = []

    def run(self) -> Generator[ScrubProgress, None, ScrubReport]:
        for base in self.bases:
            with contextlib.suppress(FileNotFoundError):
                self.total += self.fs.file_size(
                    os.path.join(self.directory, file_name(base, LOG))
                )
        for base in self.bases:
            yield from self._check_segment(base)
        return ScrubReport(
            path=self.directory,
            segments=self.segments,
            sealed=self.sealed,
            skipped=self.skipped,
            checked_bytes=self.read_bytes,
            findings=tuple(self.findings),
        )

    def _read(self, size: int) -> Iterator[ScrubProgress]:
        """Count bytes that were read, and yield a Progress every _STEP_BYTES."""
        self.read_bytes += size
        if self.read_bytes - self.reported_bytes >= _STEP_BYTES:
            self.reported_bytes = self.read_bytes
            yield ScrubProgress(self.read_bytes, max(self.read_bytes, self.total))

    def _check_segment(self, base: int) -> Iterator[ScrubProgress]:
        """Check one segment.

        The facts are read under the lock of `placing`, and the bytes without any lock.
        Then the segment is compared with the facts again.
        """
        fs = self.fs
        with self.placing(base) as place:
            if place is None:
                self.skipped += 1
                return
            path = os.path.join(self.directory, file_name(base, LOG))
            try:
                # Opens its own handle: a replacement will be another file.
                segment = GrowingSegment(fs, self.directory, base)
                modified_ms = fs.modified_ms(path)
                known = read(fs, self.directory, base)
            except FileNotFoundError:
                # Only this process deletes files of the log, and never inside
                # placing().
                if self.writes:
                    self.findings.append(
                        Finding(
                            path, None, base, place.next_base, "the file is missing"
                        )
                    )
                else:  # the writer has deleted it since the log was listed
                    self.skipped += 1
                return
        self.segments += 1
        size = segment.size_bytes
        finding = None
        new = None
        is_sealed = known is not None and known.is_of(size, modified_ms)
        if place.next_base is not None or is_sealed:
            # Bit rot is on the disk. The cache may contain the data from before.
            fs.drop_cache(segment.handle, 0)
        if is_sealed:
            assert known is not None
            finding = yield from self._compare(segment, known, place)
        else:
            finding, facts = yield from self._walk(segment, place.next_base, place)
            if finding is None and place.next_base is not None and self.writes:
                new = Seal(
                    size_bytes=size,
                    modified_ms=modified_ms,
                    next_base_offset=place.next_base,
                    **facts,
                )
        # If the segment was replaced, truncated or touched during the read, the result
        # does not apply to the present file.
        with self.placing(base) as after:
            is_same = (
                after == place
                and segment.is_current()
                and fs.size(segment.handle) >= size
            )
            # The modification time of the growing segment changes with each append.
            if is_same and (is_sealed or place.next_base is not None):
                try:
                    is_same = (
                        fs.modified_ms(path) == modified_ms
                        and read(fs, self.directory, base) == known
                    )
                except FileNotFoundError:  # another process has just removed it
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
    ) -> Generator[ScrubProgress, None, Finding | None]:
        """Compare a segment with its seal."""
        crc = 0
        base = segment.base_offset
        next_base = known.next_base_offset
        for data in _slices(segment, 0, segment.size_bytes):
            crc = crc32c(data, crc)
            yield from self._read(len(data))
        if crc != known.crc32c:
            # Finds the position, if a batch reveals it.
            found, _ = yield from self._walk(segment, next_base, place)
            return found or Finding(
                segment.path,
                None,
                base,
                next_base,
                "bytes that no CRC of a batch covers changed",
            )
        # Damage below the log start is not checked.
        reason = follows(self.fs, self.directory, base, known, 0)
        if reason:
            return Finding(
                segment.path,
                known.size_bytes,
                known.end_offset,
                place.next_base,
                reason,
            )
        return None

    def _walk(
        self, segment: GrowingSegment, next_base: int | None, place: SegmentContext
    ) -> Generator[ScrubProgress, None, tuple[Finding | None, dict[str, int]]]:
        """Check every batch. Returns the first damage, and the facts for a seal."""
        expected = segment.base_offset
        before = 0  # position up to which the file's CRC was computed
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
            # Later data is still being written, or was never visible to a reader.
            is_sound = expected >= place.end
        else:
            # The batches must reach the next segment, unless compaction may have left a
            # gap.
            is_sound = not reason and (
                expected == next_base or next_base <= place.dense_from
            )
        if is_sound:
            return None, {"crc32c": crc, "end_offset": expected}
        found = Finding(
            segment.path,
            bad,
            expected,
            next_base or place.end,
            reason or "the offsets from here on are in no segment",
        )
        return found, {}


def drop_stale_checksums(fs: FS, directory: str, segments: Iterable[Segment]) -> bool:
    """Delete the seals of segments that another program may have replaced.

    Then records on disk that the remaining seals match their files. Returns False if
    there was no space or descriptor for that.
    """
    for segment in segments:
        seal = read(fs, directory, segment.base_offset)
        if seal is not None and not seal.is_of(
            fs.file_size(segment.path), fs.modified_ms(segment.path)
        ):
            fs.unlink(segment.file(SEAL))
    try:
        fs.sync_dir(directory)
        fs.close(
            fs.open(
                os.path.join(directory, checkpoint.CHECKSUMS_VALID),
                write=True,
                create=True,
            )
        )
        fs.sync_dir(directory)
    except (DiskFullError, ResourceError):
        return False
    return True


def unopened(path: str, error: LogcoreError) -> ScrubReport:
    """Return the report on a partition that could not be opened or read completely."""
    found = Finding(
        error.path or path, error.position, error.offset, None, error.reason
    )
    return ScrubReport(path=path, findings=(found,))
