"""Facts about each segment of a partition: bytes, offsets, times, codecs, damage, and
how compaction and retention treat it.

Rules:
- The files are read without opening the log, so that a damaged or incomplete partition
  is described too. They are neither written nor locked.
- Batch heads are read within a time limit. After it, a segment is described by its name,
  its size and its first batch.
- Damage is part of the result, and is never raised.

This module checks only the .log files. verify.py checks every file of a partition.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import attrs

from logcore.config import LogConfig
from logcore.errors import LogcoreError, LogNotFoundError
from logcore.format.compression import Codec
from logcore.fs import FS, OS
from logcore.kernels import layout
from logcore.metadata import checkpoint
from logcore.metadata.filenames import (
    LOG,
    SEAL,
    SNAPSHOT,
    base_offset_of,
    bases_in,
    file_name,
    partition_of,
)
from logcore.partition.aborted_transactions import PartitionTransactions, add_batches
from logcore.partition.gaps import Gaps
from logcore.partition.persisted import (
    begin,
    read_persisted_gaps,
    read_persisted_offset,
    value_or,
)
from logcore.partition.producers import snapshot_entries
from logcore.retention import PartitionFacts, SegmentFacts, kafka_rules
from logcore.segment import GrowingSegment, Segment

_CODECS: Final = {codec.value: codec.name.lower() for codec in Codec}
#: Ends of a walk that are not damage.
_WHOLE: Final = (layout.WALK_END, layout.WALK_LIMIT)


@attrs.frozen(kw_only=True)
class SegmentDamage:
    """Bytes of a .log file that are not valid batches."""

    #: Position of the first such byte in the file.
    position: int
    #: Bytes from there to the end of the file; the batches among them are unknown.
    size_bytes: int
    reason: str
    #: Whether it may be an append that is in progress, or one that a crash cut off.
    is_unfinished: bool = False


@attrs.frozen(kw_only=True)
class SegmentSummary:
    """One segment. Times are in milliseconds, -1 for none."""

    base_offset: int
    #: The offset after the last batch; the next base offset if heads were not read.
    end_offset: int
    size_bytes: int
    is_active: bool = False
    #: Whether a checksum file covers the segment.
    has_checksum: bool = False
    #: Whether the heads of all batches were read.
    is_read: bool = False
    #: Whether the CRC of all batches was computed.
    is_checked: bool = False
    #: Number of batches and records; 0 if heads were not read.
    batches: int = 0
    records: int = 0
    first_timestamp_ms: int = -1
    max_timestamp_ms: int = -1
    #: Bytes of the batches by codec; all bytes count for the codec of the first batch if
    #: heads were not read.
    codec_bytes: dict[str, int] = attrs.Factory(dict)
    damage: SegmentDamage | None = None
    #: Description of records that are missing after this segment, or "".
    loss: str = ""
    #: Whether compaction has not cleaned the segment yet. Only for compacted topics.
    is_dirty: bool = False
    #: Whether retention deletes the segment when it runs next.
    is_expired: bool = False

    @property
    def is_damaged(self) -> bool:
        """Whether bytes or records of the segment are lost."""
        is_lost = self.damage is not None and not self.damage.is_unfinished
        return is_lost or bool(self.loss)

    def as_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class RetentionForecast:
    """The segments that retention deletes next. The settings decide, without the rules
    of an application.
    """

    #: Number and bytes of segments that are due now.
    due_segments: int = 0
    due_bytes: int = 0
    #: When the first segment that is not due becomes too old, in ms; -1 if never.
    next_ms: int = -1


@attrs.frozen(kw_only=True)
class PartitionMap:
    """The segments of one partition."""

    path: str
    topic: str
    partition: int
    log_start_offset: int = 0
    end_offset: int = 0
    segments: tuple[SegmentSummary, ...] = ()
    #: Producer id -> first offset of its open transaction.
    open_transactions: dict[int, int] = attrs.Factory(dict)
    #: Offset up to which the log was compacted; -1 for a topic that is not compacted.
    cleaned_to: int = -1
    retention: RetentionForecast = RetentionForecast()
    #: Problems of the partition as a whole.
    problems: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    @property
    def is_complete(self) -> bool:
        """Whether the heads of all segments were read."""
        return all(segment.is_read for segment in self.segments)

    @property
    def is_damaged(self) -> bool:
        return bool(self.problems) or any(
            segment.is_damaged for segment in self.segments
        )

    @property
    def dirty_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments if segment.is_dirty)


def segment_map(
    path: str | os.PathLike[str],
    *,
    config: LogConfig | None = None,
    now_ms: int = 0,
    checks_crc: bool = False,
    is_over: Callable[[], bool] = lambda: False,
    fs: FS = OS,
) -> PartitionMap:
    """Describe the segments of a partition directory.

    `config` contains the settings of the topic, for compaction and retention at the time
    `now_ms`. With `checks_crc`, all bytes are read. `is_over` is called after some
    thousand batches; when it returns true, no further heads are read.

    Raises:
        LogNotFoundError: the directory does not exist.
    """
    directory = os.fspath(path)
    topic, partition = partition_of(os.path.basename(fs.real_path(directory))) or (
        "",
        -1,
    )
    settings = config or LogConfig.parse(None)
    try:
        names = set(fs.listdir(directory))
    except FileNotFoundError:
        raise LogNotFoundError("there is no such directory", path=directory) from None
    problems: list[str] = []
    found: list[tuple[Segment, SegmentSummary]] = []
    bases = bases_in(names)
    for base, following in itertools.zip_longest(bases, bases[1:]):
        try:
            segment = _open_segment(fs, directory, base, is_active=following is None)
            summary = _summary(segment, following, checks_crc, is_over)
        except FileNotFoundError:
            continue  # deleted by its writer
        except (LogcoreError, OSError) as error:
            problems.append(f"{file_name(base, LOG)}: {_reason(error)}")
            continue
        has_checksum = file_name(base, SEAL) in names
        found.append((segment, attrs.evolve(summary, has_checksum=has_checksum)))
    try:
        found = _with_losses(fs, directory, found)
        problems += _missing(fs, directory, found)
        transactions = _open_transactions(fs, directory, names, found)
    except (LogcoreError, OSError) as error:
        problems.append(_reason(error))
        transactions = {}
    summaries = [summary for _, summary in found]
    log_start = value_or(0, read_persisted_offset, fs, directory, checkpoint.LOG_START)
    log_start = max([log_start, *bases[:1]])
    cleaned_to = -1
    if settings.is_compacted:
        cleaned_to = value_or(
            0, read_persisted_offset, fs, directory, checkpoint.CLEANER
        )
        summaries = [
            attrs.evolve(
                summary,
                is_dirty=not summary.is_active and summary.base_offset >= cleaned_to,
            )
            for summary in summaries
        ]
    summaries, retention = _forecast(
        fs, directory, summaries, log_start, settings, now_ms
    )
    return PartitionMap(
        path=directory,
        topic=topic,
        partition=partition,
        log_start_offset=log_start,
        end_offset=max([log_start, *(summary.end_offset for summary in summaries)]),
        segments=tuple(summaries),
        open_transactions=transactions,
        cleaned_to=cleaned_to,
        retention=retention,
        problems=tuple(problems),
    )


def _reason(error: LogcoreError | OSError) -> str:
    if isinstance(error, LogcoreError):
        return error.reason
    return error.strerror or str(error)


def _open_segment(fs: FS, directory: str, base: int, *, is_active: bool) -> Segment:
    """Return a segment for reading; the last one may still grow."""
    if is_active:
        return GrowingSegment(fs, directory, base)
    return Segment(fs, directory, base)


def _summary(
    segment: Segment,
    next_base: int | None,
    checks_crc: bool,
    is_over: Callable[[], bool],
) -> SegmentSummary:
    """Return the facts that one .log file gives."""
    size_bytes = segment.size_bytes
    is_active = next_base is None
    if is_over():
        return _outline(segment, next_base)
    end_offset = segment.base_offset
    batches = records = position = 0
    first_ms = max_ms = -1
    codecs: Counter[int] = Counter()
    stop_reason = layout.WALK_LIMIT
    for facts, reached, stop_reason in segment.walk(0, crc=checks_crc):
        position = reached
        if not len(facts):
            continue
        if not batches:
            first_ms = int(facts["base_timestamp"][0])
        batches += len(facts)
        records += int(facts["record_count"].clip(0).sum())
        max_ms = max(max_ms, int(facts["max_timestamp"].max()))
        end_offset = int(facts["last_offset"][-1]) + 1
        codes = facts["attributes"] & layout.CODEC_MASK
        for codec in set(codes.tolist()):
            rows = codes == codec
            codecs[codec] += int(facts["size_bytes"][rows].sum())
        if stop_reason == layout.WALK_LIMIT and is_over():
            return attrs.evolve(
                _outline(segment, next_base), first_timestamp_ms=first_ms
            )
    segment.check_readable()
    damage = None
    if stop_reason not in _WHOLE:
        damage = SegmentDamage(
            position=position,
            size_bytes=size_bytes - position,
            reason=layout.WALK_REASONS[stop_reason],
            is_unfinished=is_active and stop_reason == layout.WALK_SHORT,
        )
    return SegmentSummary(
        base_offset=segment.base_offset,
        end_offset=end_offset,
        size_bytes=size_bytes,
        is_active=is_active,
        is_read=True,
        is_checked=checks_crc,
        batches=batches,
        records=records,
        first_timestamp_ms=first_ms,
        max_timestamp_ms=max_ms,
        codec_bytes={
            _CODECS.get(code, f"unknown({code})"): size
            for code, size in sorted(codecs.items())
        },
        damage=damage,
    )


def _outline(segment: Segment, next_base: int | None) -> SegmentSummary:
    """Return the summary of a segment whose batches are not read."""
    end_offset = next_base
    if end_offset is None:
        end_offset = segment.next_offset()
    first = None
    if segment.size_bytes:
        first = segment.batch(0)
    codecs: dict[str, int] = {}
    first_ms = max_ms = -1
    if first is not None:
        codecs = {first.codec_name: segment.size_bytes}
        first_ms = first.base_timestamp
    if len(segment.time_index):
        max_ms = segment.time_index.entry(len(segment.time_index) - 1)[0]
    return SegmentSummary(
        base_offset=segment.base_offset,
        end_offset=end_offset,
        size_bytes=segment.size_bytes,
        is_active=next_base is None,
        first_timestamp_ms=first_ms,
        max_timestamp_ms=max(first_ms, max_ms),
        codec_bytes=codecs,
    )


def _with_losses(
    fs: FS, directory: str, found: list[tuple[Segment, SegmentSummary]]
) -> list[tuple[Segment, SegmentSummary]]:
    """Add the records that are missing between two segments."""
    gaps = Gaps(None, reload=functools.partial(read_persisted_gaps, fs, directory))
    checked = []
    for number, (segment, summary) in enumerate(found):
        loss = ""
        if number + 1 < len(found) and summary.is_read:
            next_base = found[number + 1][1].base_offset
            reason = gaps.loss_at_segment_end(segment, summary.end_offset, next_base)
            if reason:
                loss = (
                    f"offsets {summary.end_offset} to {next_base - 1} are missing: "
                    f"{reason}"
                )
        checked.append((segment, attrs.evolve(summary, loss=loss)))
    return checked


def _missing(
    fs: FS, directory: str, found: list[tuple[Segment, SegmentSummary]]
) -> list[str]:
    """Return descriptions of losses at the start and at the end of the log."""
    reached = read_persisted_offset(fs, directory, checkpoint.RECOVERY_POINT)
    if not found:
        if reached:
            return [f"no segment is left; the log had reached offset {reached}"]
        return []
    problems = []
    first = found[0][1].base_offset
    start = begin(fs, directory, first)
    if start < first:
        problems.append(
            f"the first segments are missing: the log begins at offset {start}, "
            f"and the first segment at {first}"
        )
    end = found[-1][1].end_offset
    if end < reached:
        problems.append(
            f"the files end at offset {end}; the log had reached offset {reached}"
        )
    return problems


def _open_transactions(
    fs: FS,
    directory: str,
    names: set[str],
    found: list[tuple[Segment, SegmentSummary]],
) -> dict[int, int]:
    """Return the open transactions, from the newest valid snapshot of producers and the
    batches after it.
    """
    if not found:
        return {}
    segments = [segment for segment, _ in found]
    state = PartitionTransactions(next_offset=segments[0].base_offset)
    end = found[-1][1].end_offset
    offsets = (base_offset_of(name, SNAPSHOT) for name in names)
    known = sorted(offset for offset in offsets if offset is not None and offset <= end)
    for offset in reversed(known):
        snapshot = checkpoint.read(fs, directory, file_name(offset, SNAPSHOT))
        entries = value_or(None, snapshot_entries, snapshot or b"")
        if entries is not None:
            rows = entries[["producer_id", "current_txn_first_offset"]].tolist()
            state.open = {producer: first for producer, first in rows if first >= 0}
            state.next_offset = offset
            break
    add_batches(state, segments)
    return state.open


def _forecast(
    fs: FS,
    directory: str,
    summaries: list[SegmentSummary],
    log_start: int,
    config: LogConfig,
    now_ms: int,
) -> tuple[list[SegmentSummary], RetentionForecast]:
    """Mark the segments that retention deletes next."""
    facts = [
        SegmentFacts(
            summary.base_offset,
            summary.end_offset,
            summary.size_bytes,
            summary.max_timestamp_ms
            if summary.max_timestamp_ms >= 0
            else _modified_ms(
                fs, os.path.join(directory, file_name(summary.base_offset, LOG))
            ),
        )
        for summary in summaries
    ]
    count = 0
    if facts:
        count = kafka_rules(
            PartitionFacts(
                segments=facts,
                log_start=log_start,
                high_watermark=facts[-1].end_offset,
                now_ms=now_ms,
                config=config,
            )
        )
    next_ms = -1
    if (
        count < len(facts)
        and "delete" in config.cleanup_policy
        and config.retention_ms >= 0
        and facts[count].size_bytes
    ):
        next_ms = facts[count].largest_timestamp + config.retention_ms
    marked = [
        attrs.evolve(summary, is_expired=number < count)
        for number, summary in enumerate(summaries)
    ]
    due_bytes = sum(summary.size_bytes for summary in summaries[:count])
    return marked, RetentionForecast(
        due_segments=count, due_bytes=due_bytes, next_ms=next_ms
    )


def _modified_ms(fs: FS, path: str) -> int:
    try:
        return fs.modified_ms(path)
    except FileNotFoundError:  # deleted by its writer
        return -1


@attrs.frozen
class PartitionSize:
    """The size of a partition and its offsets, for lists of thousands of partitions."""

    segments: int
    size_bytes: int
    log_start_offset: int
    end_offset: int
    #: When its last file was written, in ms.
    modified_ms: int


class PartitionSizes:
    """Reads sizes of partitions, and caches their ends while the files are unchanged.

    Several threads may use it.
    """

    def __init__(self, fs: FS = OS) -> None:
        self._fs = fs
        self._ends: dict[str, tuple[tuple[int, int, int], int]] = {}

    def read(self, path: str, log_start: int) -> PartitionSize:
        """Read the size of a partition. `log_start` is its entry in the checkpoint.

        Raises:
            LogcoreError: the files cannot be read.
            OSError: the directory cannot be read.
        """
        size_bytes = last_size = 0
        bases = bases_in(self._fs.listdir(path))
        if not bases:
            return PartitionSize(0, 0, log_start, log_start, -1)
        last = os.path.join(path, file_name(bases[-1], LOG))
        for base in bases:
            try:
                last_size = self._fs.file_size(os.path.join(path, file_name(base, LOG)))
            except FileNotFoundError:  # deleted by its writer
                continue
            size_bytes += last_size
        modified_ms = _modified_ms(self._fs, last)
        stamp = (bases[-1], last_size, modified_ms)
        known = self._ends.get(path)
        if known is not None and known[0] == stamp:
            end = known[1]
        else:
            end = bases[-1]
            if last_size:
                end = GrowingSegment(self._fs, path, bases[-1]).next_offset()
            self._ends[path] = stamp, end
        start = max(log_start, bases[0])
        return PartitionSize(
            len(bases), size_bytes, start, max(start, end), modified_ms
        )
