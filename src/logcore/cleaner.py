"""Compaction: keeps the last record of each key, and removes tombstones after every
reader had time to see them.

A round reads the records written since the last round, and stores the newest offset of
each of their keys in a table of limited size. It then rewrites the segments up to there
without superseded records. Small segments are joined.

Rules (storage format section 9, Kafka's Cleaner):
- Offsets never change, the order is kept, and a batch keeps its head: sequence, epochs,
  producer.
- The active segment, records newer than min.compaction.lag.ms and everything from the
  last stable offset on are kept.
- A tombstone is kept for delete.retention.ms after the first round that read it. A
  transaction marker is kept while one of its batches exists, and then as long as a
  tombstone. The last batch of each live producer is kept, without records if necessary.
- New files are complete and durable before they replace the old ones. After a crash one
  complete generation exists.
- Damage ends the round with an error; the remaining segments are not changed.

This module decides and writes the new files; rewriting_of() puts them in place. It
starts no thread: a round is an iterator, and its caller controls the speed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from logcore.config import DEDUPE_BYTES, INT32_MAX, LogConfig
from logcore.errors import CorruptBatchError, InvalidConfigError, SegmentTooSmallError
from logcore.format.columns import RecordColumns
from logcore.index import OFFSET_ENTRY, TIME_ENTRY
from logcore.kernels import kernel, layout
from logcore.kernels.checksum import crc32c
from logcore.kernels.layout import (
    CODEC_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_OVERHEAD,
    TRANSACTIONAL_BIT,
    Time,
)
from logcore.log import Log, rewriting_of
from logcore.partition.aborted_transactions import PartitionTransactions
from logcore.partition.checksum_file import ScrubProgress
from logcore.partition.order import in_order
from logcore.partition.rewriting import Rewriting
from logcore.partition.scan import Run
from logcore.recordbatch import (
    TRANSACTION_ENDS,
    RecordBatch,
    compressor,
    empty_batch,
    encode,
    stamp_crc,
    time_ms,
)
from logcore.reporting import INFO, log_line
from logcore.segment import Segment

_SLOT_BYTES: Final = 24
#: Maximum load of the table. At three quarters, linear probing visits 2.5 slots for a
#: key in the table.
_LOAD: Final = 0.75
_FIRST_SLOTS: Final = 1 << 16
#: Longer keys are hashed one at a time; 64 words are 2 KiB of coefficients.
_KEY_WORDS: Final = 64
#: Amount that is decoded, decided and written at once.
_CHUNK_BYTES: Final = 1 << 21
_CHUNK_ROWS: Final = 32_768
#: Bytes written before a sync, so that the last sync is short.
_SYNC_BYTES: Final = 32 << 20
#: Maximum growth of a record's varints when its timestamp delta changes.
_GROWTH: Final = 14
#: Fraction of the memory for keys that the bits of their offsets may use.
_BITS_SHARE: Final = 8
_NO_BITS: Final = np.zeros(0, np.uint8)


# -- choice of segments --------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SealedFacts:
    """The facts of a segment for plan(). Times are in ms, -1 for none."""

    base_offset: int
    size_bytes: int
    #: The largest timestamp of the first batch.
    first_timestamp: int
    largest_timestamp: int


@attrs.frozen(kw_only=True)
class LogFacts:
    """The offsets of a log for plan()."""

    #: Base offset of the active segment.
    active_base: int
    log_start: int
    last_stable_offset: int
    #: The end of the last round; None if there was none.
    cleaned_to: int | None


@attrs.frozen(kw_only=True)
class Plan:
    """The offsets that a round would clean, and whether it is due.

    The offsets are [first_dirty, first_uncleanable). `ratio` is the fraction of bytes
    to clean among all bytes that the round would read. `is_due` follows from
    min.cleanable.dirty.ratio, or from records that have waited longer than
    max.compaction.lag.ms.
    """

    first_dirty: int
    first_uncleanable: int
    clean_bytes: int
    cleanable_bytes: int
    is_due: bool

    @property
    def ratio(self) -> float:
        return self.cleanable_bytes / max(1, self.clean_bytes + self.cleanable_bytes)


def plan(
    sealed: Sequence[SealedFacts], log: LogFacts, *, config: LogConfig, now_ms: int
) -> Plan:
    """Plan a round by storage format sections 9.1 and 9.2.

    `sealed` contains the facts of all segments except the active one.
    """
    end = log.last_stable_offset
    # A checkpoint outside the log belongs to deleted or truncated records: start again.
    if log.cleaned_to is None or not log.log_start <= log.cleaned_to <= log.active_base:
        first_dirty = log.log_start
    else:
        first_dirty = log.cleaned_to
    bases = [facts.base_offset for facts in sealed] + [log.active_base]
    lag_ms = config.min_compaction_lag_ms
    for facts, next_base in zip(sealed, bases[1:], strict=True):
        if (
            lag_ms
            and next_base > first_dirty
            and facts.largest_timestamp > now_ms - lag_ms
        ):
            end = min(end, facts.base_offset)
            break
    # Only whole segments: the segment that contains the end is excluded.
    last = next((base for base in reversed(bases) if base <= end), first_dirty)
    first_uncleanable = max(first_dirty, min(log.active_base, last))
    ends = bases[1:]
    spans = list(zip(sealed, ends, strict=True))
    clean = sum(facts.size_bytes for facts, end in spans if end <= first_dirty)
    dirty = [
        facts for facts, end in spans if end > first_dirty and end <= first_uncleanable
    ]
    cleanable = sum(facts.size_bytes for facts in dirty)
    waits = any(
        0 <= facts.first_timestamp < now_ms - config.max_compaction_lag_ms
        for facts in dirty
    )
    ratio = cleanable / max(1, clean + cleanable)
    return Plan(
        first_dirty=first_dirty,
        first_uncleanable=first_uncleanable,
        clean_bytes=clean,
        cleanable_bytes=cleanable,
        is_due=cleanable > 0 and (ratio > config.min_cleanable_dirty_ratio or waits),
    )


def facts_of(segment: Segment) -> SealedFacts:
    """Return the facts of a segment. Raises StorageReadError and CorruptBatchError."""
    first = None
    if segment.size_bytes:
        first = segment.batch(0)
    first_timestamp = -1
    if first is not None:
        first_timestamp = first.max_timestamp
    return SealedFacts(
        base_offset=segment.base_offset,
        size_bytes=segment.size_bytes,
        first_timestamp=first_timestamp,
        largest_timestamp=segment.max_timestamp(),
    )


def group(
    segments: Sequence[Segment], ends: Sequence[int], config: LogConfig
) -> list[list[Segment]]:
    """Group adjacent segments that fit into one new segment (storage format section
    9.4).

    `ends` contains the offset after each segment, which is the base offset of the next.
    """
    groups: list[list[Segment]] = []
    # Of the last group: its .log files, offset indexes and time indexes.
    sizes = [0, 0, 0]
    limits = (
        config.segment_bytes,
        config.segment_index_bytes,
        config.segment_index_bytes,
    )
    for segment, end in zip(segments, ends, strict=True):
        more = (
            segment.size_bytes,
            len(segment.offset_index) * OFFSET_ENTRY.itemsize,
            len(segment.time_index) * TIME_ENTRY.itemsize,
        )
        fits = all(
            size + added <= limit
            for size, added, limit in zip(sizes, more, limits, strict=True)
        )
        # The indexes store offsets relative to the base of the group in 32 bits.
        if groups and fits and end - 1 - groups[-1][0].base_offset <= INT32_MAX:
            groups[-1].append(segment)
            sizes = [size + added for size, added in zip(sizes, more, strict=True)]
        else:
            groups.append([segment])
            sizes = list(more)
    return groups


# -- the newest offset of each key -------------------------------------------------


@attrs.frozen
class _KeptRecords:
    """The kept records of some batches."""

    #: For each record, whether it is kept.
    keep: npt.NDArray[np.bool_]
    #: For each batch: the number of kept records, whether one of them is a tombstone,
    #: and the timestamp of the first.
    kept: npt.NDArray[np.int64]
    has_tombstone: npt.NDArray[np.bool_]
    first_timestamps_ms: npt.NDArray[np.int64]


class OffsetMap:
    """The largest offset of each key. A key is identified by a 128-bit hash, see
    kernels.hash_keys.

    The table grows with the keys, because lookups take a third of the time in a table
    that fits the caches. In addition there is a bit for each offset of the dirty part,
    set if a later record has the same key or if the record has no key. With these bits
    the second pass decides about plain records without reading their keys.

    `memory_bytes` is the present size of both. All keys up to `latest_offset` are
    stored. `has_bits` is False if the offsets are too sparse for a bit each.
    """

    def __init__(
        self,
        memory_bytes: int,
        keys: int,
        random_bytes: Callable[[int], bytes],
        offsets: range = range(0),
    ) -> None:
        """Create an empty table.

        `memory_bytes` is the maximum size, including the smaller table during growth.
        `keys` is the maximum number of keys. `offsets` are the offsets of the dirty
        part.
        """
        bits_bytes = -(-len(offsets) // 8)
        self.has_bits = 0 < bits_bytes <= memory_bytes // _BITS_SHARE
        self._first = offsets.start
        self._superseded = _NO_BITS
        if self.has_bits:
            self._superseded = np.zeros(bits_bytes, np.uint8)
        self._max_slots = max(
            2, (memory_bytes - self._superseded.nbytes) // _SLOT_BYTES
        )
        # Scratch space of put_run().
        self._run_hashes = np.empty((0, 2), np.uint64)
        self._run_offsets = np.empty(0, np.int64)
        self._expected_slots = min(max(2, int(keys / _LOAD) + 2), (1 << 32) - 1)
        self._used = 0
        self._make(min(self._expected_slots, self._max_slots, _FIRST_SLOTS))
        # Random, so that a client cannot choose two keys with the same hash: one would
        # supersede the other.
        self._secret = random_bytes(16)
        self._coefficients = np.frombuffer(
            random_bytes(32 * (_KEY_WORDS + 2)), np.uint64
        ).reshape(-1, 4)
        self.latest_offset = -1

    def __len__(self) -> int:
        return self._used

    @property
    def memory_bytes(self) -> int:
        return int(self._slots.nbytes + self._superseded.nbytes)

    def hashes(self, columns: RecordColumns) -> npt.NDArray[np.uint64]:
        """Return 128 bits for each key, shape (rows, 2); undefined for null keys."""
        found = kernel.hash_keys(
            columns.data, columns.key_positions, columns.key_sizes, self._coefficients
        )
        long = np.flatnonzero(columns.key_sizes > 4 * _KEY_WORDS).tolist()
        if not long:
            return found
        # Imported only on use, because it loads OpenSSL.
        import hashlib

        for row in long:
            at = int(columns.key_positions[row])
            key = columns.data[at : at + int(columns.key_sizes[row])]
            found[row] = np.frombuffer(
                hashlib.blake2b(key, digest_size=16, key=self._secret).digest(),
                np.uint64,
            )
        return found

    def _make(self, slots: int) -> None:
        self._slots = np.zeros((slots, 3), np.uint64)
        self._most = max(1, int(slots * _LOAD))

    def _grow(self) -> bool:
        """Make the table four times as large, keeping its entries; False if memory is
        short.
        """
        # Needs memory in addition to the new slots until it was copied.
        old = self._slots
        most = min(self._expected_slots, self._max_slots - len(old))
        slots = min(4 * len(old), most)
        # It cannot grow another time, so use all the memory now.
        if self._max_slots - slots <= slots:
            slots = most
        if slots <= len(old):
            return False
        self._make(slots)
        self._used = kernel.map_move(old, self._slots)
        return True

    def put(
        self, hashes: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64]
    ) -> bool:
        """Store keys in the order of their offsets; return False if the table became
        full.
        """
        at = 0
        while at < len(offsets):
            taken, self._used = kernel.map_put(
                self._slots,
                hashes[at:],
                offsets[at:],
                self._used,
                self._most,
                self._superseded,
                self._first,
            )
            at += taken
            if at < len(offsets) and not self._grow():
                break
        if at:
            self.latest_offset = int(offsets[at - 1])
        return at == len(offsets)

    def put_run(self, run: Run) -> bool | None:
        """Store the keys of a run of plain batches without decoding it, checking each
        CRC.

        Returns None if a key is too long for this. In that case no keys are stored, and
        only the bits of records without a key are set. Raises CorruptBatchError.
        """
        if len(self._run_offsets) < run.rows:
            self._run_hashes = np.empty((run.rows, 2), np.uint64)
            self._run_offsets = np.empty(run.rows, np.int64)
        hashes = self._run_hashes
        offsets = self._run_offsets
        rows = kernel.hash_run(
            run.data,
            run.at,
            run.stop,
            self._coefficients,
            hashes,
            offsets,
            self._superseded,
            self._first,
            run.path,
        )
        if rows < 0:
            return None
        return self.put(hashes[:rows], offsets[:rows])

    def survey(self, run: Run, batches: int) -> _KeptRecords:
        """Return the kept records of batches in the dirty part, checking each CRC.

        Raises CorruptBatchError.
        """
        keep = np.empty(run.rows, np.uint8)
        found = kernel.survey_run(
            run.data,
            run.at,
            run.stop,
            self._superseded,
            self._first,
            keep,
            batches,
            run.path,
        )
        return _KeptRecords(
            keep.view(np.bool_), found[:, 0], found[:, 1] > 0, found[:, 2]
        )

    def newest(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the largest stored offset of each key, -1 for none."""
        return kernel.map_get(self._slots, hashes)


# -- transactions during a pass ----------------------------------------------------


@attrs.define
class _SeenTransactions:
    """The transactions with batches up to the present position of a pass (section 9.5)."""

    transactions: PartitionTransactions
    _seen_aborted: set[int] = attrs.Factory(set)
    _seen_committed: set[int] = attrs.Factory(set)

    def is_aborted(self, producer_id: int, base_offset: int) -> bool:
        """Record a transactional data batch; return whether its transaction was
        aborted.
        """
        found = self.transactions.is_aborted(producer_id, base_offset)
        if found:
            self._seen_aborted.add(producer_id)
        else:
            self._seen_committed.add(producer_id)
        return found

    def had_batches(self, producer_id: int, kind: str) -> bool:
        """Record a marker; return whether the pass read a batch of its transaction."""
        if kind == "ABORT":
            seen = self._seen_aborted
        else:
            seen = self._seen_committed
        found = producer_id in seen
        seen.discard(producer_id)
        return found


# -- a round -----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class CleaningReport:
    """The report of a round.

    The next round begins at `end_offset`. `bytes_before` and `bytes_after` are the
    sizes of the .log files of the rewritten segments. `map_bytes` is the size of the
    table of keys.
    """

    path: str
    first_dirty: int
    end_offset: int
    records_read: int
    records_kept: int
    bytes_before: int
    bytes_after: int
    segments_before: int
    segments_after: int
    map_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.path}: offsets {self.first_dirty}..{self.end_offset} compacted, {self.records_read} records to "
            f"{self.records_kept}, {self.bytes_before} bytes to {self.bytes_after}, "
            f"{self.segments_before} segments to {self.segments_after}"
        )


@attrs.define
class _Part:
    """Some consecutive batches: a run of plain ones, or one of another kind."""

    facts: layout.Facts
    data: memoryview
    run: Run | None
    # The batch of another kind.
    batch: RecordBatch | None
    #: None for a control batch, and for a run until decoded() was called.
    columns: RecordColumns | None

    def decoded(self) -> RecordColumns | None:
        """Return the records after checking each CRC; None for a control batch.

        Raises CorruptBatchError.
        """
        if self.columns is None and self.run is not None:
            self.columns = self.run.columns()
        return self.columns


@attrs.define
class _CleanCounts:
    records_read: int = 0
    records_kept: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    segments_before: int = 0
    segments_after: int = 0


def plan_of(log: Log, now_ms: int | None = None) -> Plan:
    """Return the plan of a round over a log now. Raises the same errors as clean()."""
    with rewriting_of(log) as view:
        if now_ms is None:
            now_ms = view.fs.now_ms()
        return _plan_of(view, log.config, now_ms)


def _plan_of(view: Rewriting, config: LogConfig, now_ms: int) -> Plan:
    log = LogFacts(
        active_base=view.active_base,
        log_start=view.log_start,
        last_stable_offset=view.last_stable_offset,
        cleaned_to=view.cleaned_to,
    )
    return plan(
        [facts_of(segment) for segment in view.sealed],
        log,
        config=config,
        now_ms=now_ms,
    )


def clean(
    log: Log,
    *,
    now_ms: Time | None = None,
    memory_bytes: int = DEDUPE_BYTES,
    force: bool = False,
) -> CleaningReport | None:
    """Compact a log in one call; return None if its settings require no compaction yet.

    `now_ms` is the wall clock, for lags and horizons. `memory_bytes` limits the table
    of keys, with 24 bytes a key and a third more, and a bit for each offset. If it is
    too small for all keys, the round ends earlier. `force` ignores the dirty ratio. The
    log can be read and written during a round.

    Raises:
        InvalidConfigError: the topic is not compacted.
        CorruptBatchError: a segment is damaged.
        LogFailedError: an earlier write or sync failed.
        StorageReadError, StorageWriteError, DiskFullError: the system failed.

    Segments replaced before an error remain replaced.
    """
    steps = cleaning(log, now_ms=now_ms, memory_bytes=memory_bytes, force=force)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def cleaning(
    log: Log,
    *,
    now_ms: Time | None = None,
    memory_bytes: int = DEDUPE_BYTES,
    force: bool = False,
) -> Generator[ScrubProgress, None, CleaningReport | None]:
    """Compact like clean(), in steps of some milliseconds.

    This is a generator of Progress that returns the report.
    """
    if not log.config.is_compacted:
        raise InvalidConfigError(
            "the topic is not to be compacted",
            expected="cleanup.policy with 'compact'",
            found=log.config.cleanup_policy,
        )
    with rewriting_of(log) as view:
        clock_ms = time_ms(now_ms)
        if clock_ms is None:
            clock_ms = view.fs.now_ms()
        plan = _plan_of(view, log.config, clock_ms)
        if not (plan.is_due or (force and plan.cleanable_bytes)):
            return None
        return (yield from _Round(view, log.config, plan, clock_ms, memory_bytes).run())


class _Round:
    """One round over one log."""

    def __init__(
        self,
        view: Rewriting,
        config: LogConfig,
        plan: Plan,
        now_ms: int,
        memory_bytes: int,
    ) -> None:
        self.view = view
        self.config = config
        self.plan = plan
        self.now_ms = now_ms
        segments = [*view.sealed]
        #: Base offset of a segment -> base offset of the next one.
        self.ends = {
            segment.base_offset: after
            for segment, after in zip(
                segments,
                [*(s.base_offset for s in segments[1:]), view.active_base],
                strict=True,
            )
        }
        self.dirty = [
            segment
            for segment in segments
            if self.ends[segment.base_offset] > plan.first_dirty
            and segment.base_offset < plan.first_uncleanable
        ]
        self.memory_bytes = memory_bytes
        self.done = 0
        self.counts = _CleanCounts()

    def run(self) -> Generator[ScrubProgress, None, CleaningReport]:
        plan = self.plan
        view = self.view
        # Both passes read the dirty part.
        self.total = plan.clean_bytes + 2 * plan.cleanable_bytes
        # First pass: find the newest offset of each key of the dirty part.
        offsets = range(plan.first_dirty, plan.first_uncleanable)
        newest = OffsetMap(
            self.memory_bytes, self._count_records(), view.fs.random_bytes, offsets
        )
        yield from self._record_keys(newest)
        # Second pass: rewrite the clean part too, because it may contain older records
        # of those keys. It ends at the end of the first pass, which lack of memory may
        # have shortened.
        end = newest.latest_offset + 1
        segments = [segment for segment in view.sealed if segment.base_offset < end]
        self.producers = view.last_batches()
        transactions = _SeenTransactions(view.transactions())
        for old in group(
            segments,
            [self.ends[segment.base_offset] for segment in segments],
            self.config,
        ):
            yield from self._rewrite(old, newest, transactions, end)
        # Last: a crash before it only repeats the round.
        view.record_cleaned(end)
        report = CleaningReport(
            path=view.path,
            first_dirty=plan.first_dirty,
            end_offset=end,
            map_bytes=newest.memory_bytes,
            **attrs.asdict(self.counts),
        )
        log_line("compaction", INFO, "%s", report)
        return report

    def _count_records(self) -> int:
        """Return an upper bound for the number of keys in the dirty part.

        Heads of the old formats contain no record count, so their size in bytes is
        used.
        """
        count = 0
        for segment in self.dirty:
            for facts, _, _ in segment.walk(0, crc=False):
                counts = facts["record_count"].astype(np.int64)
                count += int(np.where(counts < 0, facts["size_bytes"], counts).sum())
        return count

    # -- reading

    def _parts(self, segment: Segment) -> Iterator[_Part]:
        """Yield the whole segment, checking CRCs and offsets.

        CRCs do not cover offsets. If damage increased an offset, its record would
        supersede newer records. Raises CorruptBatchError.
        """
        self.view.gaps.check_not_truncated(segment)
        expected = segment.base_offset
        limit = self.ends[segment.base_offset]
        for part in self._unordered_parts(segment):
            count = in_order(
                part.facts, expected, limit, dense_from=self.view.gaps.dense_from
            )
            if count < len(part.facts):
                raise CorruptBatchError(
                    "the offset of a batch does not continue the one before it",
                    path=segment.path,
                    position=int(part.facts["position"][count]),
                    found=int(part.facts["base_offset"][count]),
                )
            expected = int(part.facts["last_offset"][-1]) + 1
            yield part
        # A loss must be detected now: the checksum file of the new segment would
        # certify that it is complete.
        self.view.gaps.check_segment_end(segment, expected, limit)

    def _unordered_parts(self, segment: Segment) -> Iterator[_Part]:
        """Yield runs of plain batches, and other batches one at a time, without
        checking offsets.
        """
        view = segment.view()
        size = segment.size_bytes
        at = 0
        while at < size:
            stop, rows, _ = kernel.plan_run(
                view, at, size, _CHUNK_ROWS, _CHUNK_BYTES, 1 << 62
            )
            if stop > at:
                facts, _, _ = kernel.walk(
                    view, at, stop, (stop - at) // HEADER_SIZE + 1, False
                )
                yield _Part(
                    facts, view, Run(view, at, stop, rows, 0, segment.path), None, None
                )
                at = stop
                continue
            batch = RecordBatch.parse(view, at, size, path=segment.path)
            if batch is None:
                raise CorruptBatchError(
                    layout.WALK_REASONS[layout.WALK_SHORT],
                    path=segment.path,
                    position=at,
                )
            columns: RecordColumns | None = None
            if batch.is_control:
                batch.verify()
            else:
                columns = batch.columns(max_size=self.config.max_decompressed_bytes)
            facts, _, _ = kernel.walk(view, at, at + batch.size_bytes, 1, False)
            yield _Part(facts, view, None, batch, columns)
            at += batch.size_bytes

    def _record_keys(self, newest: OffsetMap) -> Generator[ScrubProgress, None, None]:
        """Read the dirty part once (section 9.3)."""
        newest.latest_offset = self.plan.first_dirty - 1
        transactions = _SeenTransactions(self.view.transactions())
        for segment in self.dirty:
            for part in self._parts(segment):
                if not self._store_keys(part, newest, transactions):
                    return
                newest.latest_offset = max(
                    newest.latest_offset, int(part.facts["last_offset"][-1])
                )
                yield self._progress(int(part.facts["size_bytes"].sum()))
            # Skip a gap that an earlier round left at the end of the segment.
            newest.latest_offset = max(
                newest.latest_offset, self.ends[segment.base_offset] - 1
            )

    def _store_keys(
        self, part: _Part, newest: OffsetMap, transactions: _SeenTransactions
    ) -> bool:
        """Store the keys of a part; return False if there was no memory for all of
        them.
        """
        if part.run is not None and self._has_bits(part, newest):
            put = newest.put_run(part.run)
            if put is not None:
                return put
        columns = part.decoded()
        if columns is None:
            return True
        rows = (columns.key_sizes >= 0) & (columns.offsets >= self.plan.first_dirty)
        rows &= ~np.repeat(_aborted(part, transactions), _row_counts(part))
        if rows.all():
            return newest.put(newest.hashes(columns), columns.offsets)
        return newest.put(newest.hashes(columns)[rows], columns.offsets[rows])

    def _has_bits(self, part: _Part, newest: OffsetMap) -> bool:
        """Return whether the bits of its offsets alone decide which records of a run
        are kept.

        They do not if transactions or horizons matter too, or before the dirty part.
        """
        facts = part.facts
        is_plain = not (
            facts["attributes"] & (TRANSACTIONAL_BIT | DELETE_HORIZON_BIT)
        ).any()
        return (
            newest.has_bits
            and is_plain
            and int(facts["base_offset"][0]) >= self.plan.first_dirty
        )

    def _progress(self, size_bytes: int) -> ScrubProgress:
        self.done += size_bytes
        return ScrubProgress(min(self.done, self.total), self.total)

    # -- writing

    def _rewrite(
        self,
        old: list[Segment],
        newest: OffsetMap,
        transactions: _SeenTransactions,
        end: int,
    ) -> Generator[ScrubProgress, None, None]:
        """Replace some old segments by one new segment."""
        view = self.view
        new = view.create(old[0].base_offset)
        # Bytes written since the last sync.
        unsynced = 0
        # Of all written bytes, for the checksum file.
        crc = 0
        for segment in old:
            for part in self._parts(segment):
                data = self._rewritten(part, newest, transactions, end)
                # Deltas may take more space than before.
                if len(data) > INT32_MAX - new.size_bytes:
                    raise SegmentTooSmallError(
                        "compaction would make a segment above 2^31-1 bytes",
                        path=new.path,
                    )
                if data:
                    facts, _, _ = kernel.walk(
                        data, 0, len(data), len(data) // HEADER_SIZE + 1, False
                    )
                    names = ("position", "size_bytes", "last_offset", "max_timestamp")
                    batches = list(
                        zip(*(facts[name].tolist() for name in names), strict=True)
                    )
                    new.append(
                        data,
                        batches[-1][2],
                        max(batch[3] for batch in batches),
                        batches,
                    )
                    crc = crc32c(data, crc)
                    unsynced += len(data)
                if unsynced >= _SYNC_BYTES:
                    view.fs.fdatasync(new.handle)
                    unsynced = 0
                yield self._progress(int(part.facts["size_bytes"].sum()))
        counts = self.counts
        counts.segments_before += len(old)
        counts.segments_after += 1
        counts.bytes_before += sum(segment.size_bytes for segment in old)
        counts.bytes_after += new.size_bytes
        view.write_checksum_file(old, new, crc)
        view.replace(old, new)

    def _rewritten(
        self, part: _Part, newest: OffsetMap, transactions: _SeenTransactions, end: int
    ) -> bytes | memoryview:
        """Return the kept records of some batches as bytes to store."""
        facts = part.facts
        if part.run is not None and self._has_bits(part, newest):
            kept_records = newest.survey(part.run, len(facts))
        else:
            columns = part.decoded()
            if columns is None:
                assert part.batch is not None
                return self._marker(part, part.batch, transactions, end)
            kept_records = self._kept_records(part, columns, newest, transactions)
        keep = kept_records.keep
        kept = kept_records.kept
        counts = _row_counts(part)
        self.counts.records_read += len(keep)
        self.counts.records_kept += int(kept.sum())
        has_horizon = (facts["attributes"] & DELETE_HORIZON_BIT) != 0
        sets_horizon = kept_records.has_tombstone & ~has_horizon
        # Choose an action for each batch. Without kept records, it is dropped or kept
        # empty. If all records are kept and its head does not change, its bytes are
        # copied.
        without_records = np.where(
            self._kept_empty(facts, end), kernel.EMPTY, kernel.DROP
        )
        actions = np.where(kept == 0, without_records, kernel.FILTER).astype(np.uint8)
        actions[(kept == counts) & (kept > 0) & ~sets_horizon] = kernel.COPY
        if (actions == kernel.COPY).all():
            positions = facts["position"]
            sizes = facts["size_bytes"]
            return part.data[int(positions[0]) : int(positions[-1]) + int(sizes[-1])]
        if part.batch is not None and part.batch.magic < 2:
            assert part.columns is not None
            return self._from_legacy(part.batch, part.columns, keep, end)
        # Like Kafka's builder: relative to the horizon if there is one, else to the
        # first kept record.
        bases = np.where(
            has_horizon, facts["base_timestamp"], kept_records.first_timestamps_ms
        )
        bases = np.where(
            sets_horizon, self.now_ms + self.config.delete_retention_ms, bases
        )
        return _rewrite_run(part, actions, sets_horizon, bases, keep, self.config)

    def _kept_records(
        self,
        part: _Part,
        columns: RecordColumns,
        newest: OffsetMap,
        transactions: _SeenTransactions,
    ) -> _KeptRecords:
        """Return the kept records of batches, decided by their keys."""
        counts = _row_counts(part)
        keep = self._kept_rows(
            part, columns, newest, np.repeat(_aborted(part, transactions), counts)
        )
        # Prefix sums: the value of a batch is the difference between its two edges.
        # The first row of each batch, and the number of rows.
        edges = np.concatenate([[0], np.cumsum(counts)])
        # Number of kept rows before each row.
        before = np.concatenate([[0], np.cumsum(keep)])
        tombstones = np.concatenate([[0], np.cumsum(keep & (columns.value_sizes < 0))])
        # The first row whose sum is above the sum at the edge. Undefined for a batch
        # without kept rows.
        first_kept = np.searchsorted(before, before[edges[:-1]], side="right") - 1
        timestamps_ms = np.zeros(len(counts), np.int64)
        if len(keep):
            timestamps_ms = columns.timestamps_ms[np.minimum(first_kept, len(keep) - 1)]
        return _KeptRecords(
            keep,
            before[edges[1:]] - before[edges[:-1]],
            tombstones[edges[1:]] > tombstones[edges[:-1]],
            timestamps_ms,
        )

    def _kept_rows(
        self,
        part: _Part,
        columns: RecordColumns,
        newest: OffsetMap,
        is_aborted: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Return which records are kept (section 9.5)."""
        # Records without a key are removed, as in Kafka: a compacted topic does not
        # accept any.
        hashes = newest.hashes(columns)
        keep = (columns.key_sizes >= 0) & (columns.offsets >= newest.newest(hashes))
        facts = part.facts
        counts = _row_counts(part)
        is_over = (facts["attributes"] & DELETE_HORIZON_BIT != 0) & (
            facts["base_timestamp"] <= self.now_ms
        )
        if part.batch is None or part.batch.magic == 2:
            keep &= ~(np.repeat(is_over, counts) & (columns.value_sizes < 0))
        # The first pass has not read these.
        keep |= columns.offsets > newest.latest_offset
        return keep & ~is_aborted

    def _kept_empty(self, facts: layout.Facts, end: int) -> npt.NDArray[np.bool_]:
        """Return which batches are kept without records.

        These are the last batch of a live producer, for its sequence, and the last
        batch of the round, for the next offset of the log.
        """
        kept: npt.NDArray[np.bool_] = facts["last_offset"] + 1 == end
        for row in np.flatnonzero(
            (facts["producer_id"] >= 0) & (facts["magic"] == 2)
        ).tolist():
            epoch, last_offset = self.producers.get(
                int(facts["producer_id"][row]), (-1, -2)
            )
            is_control = bool(facts["attributes"][row] & CONTROL_BIT)
            if last_offset >= 0:
                kept[row] |= last_offset == facts["last_offset"][row]
            # The producer wrote only markers, which keep its epoch.
            elif last_offset == -1:
                kept[row] |= is_control and epoch == facts["producer_epoch"][row]
        return kept

    def _marker(
        self, part: _Part, batch: RecordBatch, transactions: _SeenTransactions, end: int
    ) -> bytes | memoryview:
        """Return a control batch to store.

        It is removed if no batch of its transaction is left, and the horizon that was
        set then has passed.
        """
        kind = ""
        if batch.record_count:
            kind = batch.control_type()
        ends_transaction = kind in TRANSACTION_ENDS
        had_batches = ends_transaction and transactions.had_batches(
            batch.producer_id, kind
        )
        # Batches of the transaction are left, so readers need its entry in the new
        # .txnindex.
        if had_batches and kind == "ABORT":
            self.view.index_aborted(batch.base_offset)
        is_removable = not batch.record_count or (ends_transaction and not had_batches)
        horizon_ms = batch.delete_horizon_ms
        # Two rounds, as in Kafka: the first that finds no batch left sets a horizon.
        # The first after the horizon removes the marker. In between, readers can still
        # learn how the transaction ended.
        is_removed = not batch.record_count or (
            is_removable and horizon_ms is not None and horizon_ms <= self.now_ms
        )
        if not is_removed:
            if is_removable and horizon_ms is None:
                return _with_horizon(
                    bytes(batch.data), self.now_ms + self.config.delete_retention_ms
                )
            return batch.data
        action = kernel.DROP
        if self._kept_empty(part.facts, end)[0]:
            action = kernel.EMPTY
        keep = np.ones(max(0, batch.record_count), np.bool_)
        return _rewrite_run(
            part,
            np.array([action], np.uint8),
            np.zeros(1, np.bool_),
            np.zeros(1, np.int64),
            keep,
            self.config,
        )

    def _from_legacy(
        self,
        batch: RecordBatch,
        columns: RecordColumns,
        keep: npt.NDArray[np.bool_],
        end: int,
    ) -> bytes:
        """Return the kept records of an old-format entry, as one v2 batch each.

        The old formats have no field for a horizon.
        """
        out = []
        horizon_ms = self.now_ms + self.config.delete_retention_ms
        for row, record in enumerate(columns.records()):
            if keep[row]:
                fields = [(record.key, record.value, (), record.timestamp_ms)]
                data = encode(fields, base_offset=record.offset, leader_epoch=0)
                if record.value is None:
                    data = _with_horizon(data, horizon_ms)
                out.append(data)
        if batch.last_offset + 1 == end and not (len(keep) and keep[-1]):
            out.append(empty_batch(batch.last_offset, batch.last_offset, 0))
        return b"".join(out)


def _with_horizon(batch: bytes, horizon_ms: int) -> bytes:
    """Return a plain v2 batch with the time from which its tombstones or marker may be
    removed.
    """
    facts, _, _ = kernel.walk(batch, 0, len(batch), 1, False)
    part = _Part(facts, memoryview(batch), None, None, None)
    keep = np.ones(int(facts["record_count"][0]), np.bool_)
    action = np.array([kernel.FILTER], np.uint8)
    horizon = np.array([horizon_ms])
    return bytes(
        _rewrite_run(part, action, np.ones(1, np.bool_), horizon, keep, LogConfig())
    )


def _row_counts(part: _Part) -> npt.NDArray[np.int64]:
    """Return the number of records of each batch; heads of the old formats do not
    contain it.
    """
    if part.columns is not None and part.batch is not None:
        return np.array([len(part.columns)])
    if part.batch is not None:
        return np.zeros(1, np.int64)
    counts: npt.NDArray[np.int64] = part.facts["record_count"].astype(np.int64)
    return counts


def _aborted(part: _Part, transactions: _SeenTransactions) -> npt.NDArray[np.bool_]:
    """Return which data batches belong to an aborted transaction."""
    facts = part.facts
    found = np.zeros(len(facts), np.bool_)
    for row in np.flatnonzero(
        (facts["attributes"] & TRANSACTIONAL_BIT != 0) & (facts["magic"] == 2)
    ).tolist():
        found[row] = transactions.is_aborted(
            int(facts["producer_id"][row]), int(facts["base_offset"][row])
        )
    return found


def _rewrite_run(
    part: _Part,
    actions: npt.NDArray[np.uint8],
    sets_horizon: npt.NDArray[np.bool_],
    base_timestamps: npt.NDArray[np.int64],
    keep: npt.NDArray[np.bool_],
    config: LogConfig,
) -> memoryview:
    """Rewrite v2 batches as decided; a compressed batch is inflated and compressed
    again.
    """
    facts = part.facts
    data = part.data
    is_empty = actions == kernel.EMPTY
    attributes = facts["attributes"].astype(
        np.int16
    ) | DELETE_HORIZON_BIT * sets_horizon.astype(np.int16)
    attributes = np.where(
        is_empty, attributes & ~(CODEC_MASK | DELETE_HORIZON_BIT), attributes
    ).astype(np.int16)
    bases = np.where(is_empty, -1, base_timestamps).astype(np.int64)
    positions = np.ascontiguousarray(facts["position"], np.int64)
    room = int(facts["size_bytes"].sum()) + _GROWTH * len(keep)
    is_compressed = (
        part.batch is not None and part.batch.codec != 0 and actions[0] == kernel.FILTER
    )
    if is_compressed:
        # The kernel gets the batch as a plain one, with the length of its inflated
        # body.
        assert part.batch is not None
        head = bytearray(part.batch.data[:HEADER_SIZE])
        body = part.batch.body(config.max_decompressed_bytes)
        struct.pack_into(">i", head, 8, HEADER_SIZE + len(body) - LOG_OVERHEAD)
        data = memoryview(b"".join((head, body)))
        positions = np.zeros(1, np.int64)
        room = len(data) + _GROWTH * len(keep)
    out = np.empty(room, np.uint8)
    sizes = kernel.rewrite_batches(
        data, positions, actions, attributes, bases, keep.view(np.uint8), out
    )
    raw = out.data[: int(sizes.sum())]
    if not is_compressed:
        return raw
    assert part.batch is not None
    pack = compressor(part.batch.codec, LogConfig())
    assert pack is not None
    packed = bytearray(raw[:HEADER_SIZE]) + pack(raw[HEADER_SIZE:])
    struct.pack_into(">i", packed, 8, len(packed) - LOG_OVERHEAD)
    stamp_crc(packed)
    return memoryview(packed)
