"""Check the content of one log after a crash against the calls that were made on it.

`LogHistory` records the calls on a log and their acknowledgments. LogHistory.check()
checks the content after a crash against the reliability promises 1 to 4:
- The content is a prefix of the appended records: no gap, no other order, no changed
  byte.
- The content includes all records acknowledged at the level that survives this kind of
  crash.
- Truncated or deleted records do not reappear after the truncation or deletion has
  returned.
- In a compacted log, a record may be missing if a later record of its key exists.
- The same transactions are open, committed and aborted as the markers record.

`recover_log` opens a log as its owner would, and checks everything that needs no
history:
- The log opens, accepts an append, and is unchanged when it is opened again.
- Bytes that recovery truncated are in a quarantine file.
- No temporary file remains.
- The state of producers, transactions and leader epochs agrees with the batches.
"""

from __future__ import annotations

import gc
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from logcore.config import Durability, LogConfig
from logcore.errors import CorruptBatchError, CorruptLogError, LogNotFoundError
from logcore.index import TransactionIndex, load
from logcore.inspect.verify import Verdict, verify
from logcore.kernels import Record
from logcore.log import Log, open_log
from logcore.metadata.checkpoint import CHECKSUMS_VALID, CLEAN_SHUTDOWN
from logcore.metadata.filenames import STATES, TXN_INDEX
from logcore.partition.aborted_transactions import PartitionTransactions, control_types
from logcore.partition.producer_state import coordinator_epochs
from logcore.partition.producers import Producers
from logcore.partition.recovery import rebuild
from logcore.partition.segment_files import list_bases
from logcore.segment import ActiveSegment
from logcore.testing.crash_states import Kind
from logcore.testing.disk import SimulatedDisk
from logcore.testing.result_cache import ResultCache

#: pytest hides the frames of this module in the traceback of a failure.
__tracebackhide__ = True

Found = TypeVar("Found")

_TEMPORARY = (".tmp", *STATES)


@attrs.frozen
class FoundLog:
    """The start, the end and the records of a log, as found by opening it."""

    #: The log start offset.
    start: int
    #: All records of the log.
    records: list[Record]
    #: Number of records that a reader returned before recovery, or None without a
    #: reader.
    shown_count: int | None = None
    #: The end offset. The default is correct only for records without gaps.
    end: int = attrs.field(
        default=attrs.Factory(
            lambda self: self.start + len(self.records), takes_self=True
        )
    )
    #: Offsets of the records returned by read_committed, None if that was not read.
    committed: list[int] | None = None

    @classmethod
    def of(cls, log: Log, shown: int | None = None) -> FoundLog:
        """Return the current content of a log."""
        start = log.log_start_offset
        committed = [
            record.offset for record in log.read(start, isolation="read_committed")
        ]
        return cls(start, list(log.read(start)), shown, log.high_watermark, committed)

    def __str__(self) -> str:
        return f"offsets {self.start}..{self.end}"


@attrs.frozen
class ExpectedMarker:
    """The marker that ends a transaction. A marker has an offset but is not a record."""

    producer_id: int
    commit: bool


class LogHistory:
    """The calls made on one log, and the acknowledgments they returned."""

    def __init__(self, durability: str | Durability = "group") -> None:
        self.durability = Durability.parse(durability)
        #: Every record that the log may contain, by offset, including the records of a
        #: call in progress. A marker is None.
        self.records: list[Record | None] = []
        #: Bounds of the log start offset.
        self.start_low = self.start_high = 0
        #: All records below durable_end survive a power cut. All records below
        #: written_end survive a kill.
        self.durable_end = self.written_end = 0
        #: Offset to producer id, for records in transactions.
        self.transactional: dict[int, int] = {}
        self.markers: dict[int, ExpectedMarker] = {}
        #: Offset of a record that compaction removed, to the offset of the later record
        #: of its key. The value is None for an aborted record and an expired tombstone.
        self.removed_offsets: dict[int, int | None] = {}
        #: The same mapping for a compaction in progress.
        self.may_be_removed: dict[int, int | None] = {}
        #: Tombstone offset to the time at which compaction first read it.
        self._tombstone_read_ms: dict[int, int] = {}
        self._truncating: int | None = None

    def issue(
        self, records: Iterable[Record], *, transaction_of: int | None = None
    ) -> None:
        """Record an append before it is called.

        `transaction_of` is the producer id if the append is part of a transaction.
        """
        first = len(self.records)
        self.records += records
        if transaction_of is not None:
            self.transactional.update(
                dict.fromkeys(range(first, len(self.records)), transaction_of)
            )

    def issue_marker(self, producer_id: int, *, commit: bool) -> None:
        """Record an end_transaction() before it is called."""
        self.markers[len(self.records)] = ExpectedMarker(producer_id, commit)
        self.records.append(None)

    def acknowledge(self, end: int, level: str | None = None) -> None:
        """Record that an append or a sync returned.

        All records below `end` are then safe at `level`: "os", "disk", or by default
        the level of the durability policy.
        """
        assert end <= len(self.records), (end, len(self.records))
        self.written_end = max(self.written_end, end)
        if level == "disk" or (level is None and self.durability.waits):
            self.durable_end = max(self.durable_end, end)
        if self.durability.kind == "every":
            self.durable_end = max(
                self.durable_end, self.written_end - self.durability.amount + 1
            )

    def delete(self, before: int) -> None:
        """Record a deletion of the records below `before` before it is called.

        The caller is delete_records(), or retention that may delete up to `before`.
        """
        self.start_high = max(self.start_high, before)

    def deleted(self, start: int | None = None) -> None:
        """Record that the deletion returned and that the log starts at `start`.

        The default of `start` is the offset that was requested.
        """
        if start is not None:
            assert self.start_low <= start <= self.start_high, (
                self.start_low,
                start,
                self.start_high,
            )
            self.start_high = start
        self.start_low = self.start_high

    def truncate(self, offset: int) -> None:
        """Record a truncation before it is called.

        From now on, records at and above `offset` may be lost.
        """
        self._truncating = offset
        self.durable_end = min(self.durable_end, offset)
        self.written_end = min(self.written_end, offset)
        # The truncation may remove the records that superseded removed records.
        for removed_offset, superseding in self.removed_offsets.items():
            if superseding is not None and superseding >= offset:
                self.removed_offsets[removed_offset] = None

    def truncated(self) -> None:
        """Record that the truncation returned."""
        assert self._truncating is not None
        if self._truncating < len(self.records):
            # A truncation that removes records syncs the remaining ones.
            self._truncate_expected(self._truncating)
            self.written_end = self.durable_end = len(self.records)
        self._truncating = None

    def compact(self, end: int, now_ms: int, delete_retention_ms: int) -> None:
        """Record a compaction of the records below `end` before it is called."""
        newest: dict[bytes | None, int] = {}
        aborted = self.aborted(len(self.records))
        for offset in range(end - 1, self.start_low - 1, -1):
            record = self.records[offset]
            if record is None or offset in self.removed_offsets:
                continue
            superseding = newest.get(record.key)
            if offset in aborted:
                self.may_be_removed[offset] = None
            elif superseding is not None:
                self.may_be_removed[offset] = superseding
            elif (
                record.value is None
                and now_ms - self._tombstone_read_ms.setdefault(offset, now_ms)
                >= delete_retention_ms
            ):
                self.may_be_removed[offset] = None
            if offset not in aborted:
                newest.setdefault(record.key, offset)

    def compacted(self, found: FoundLog, first_dirty: int, end: int) -> None:
        """Check the log after a compaction that read offsets `first_dirty` to `end`.

        The compaction must have removed all superseded and aborted records, and no
        others.
        """
        self.check(found, "kill")
        aborted = self.aborted(len(self.records))
        for record in found.records:
            superseding = self.may_be_removed.get(record.offset)
            is_superseded = superseding is not None and first_dirty <= superseding < end
            assert record.offset >= end or not (
                is_superseded or record.offset in aborted
            ), f"{record.offset} is left"
        self._record_deletion(found)

    def check_failed_call(self, found: FoundLog) -> None:
        """Check the log after a failed call, which may have been executed in part, and
        continue from the current state.
        """
        self.check(found, "kill")
        self._record_deletion(found)
        self.start_low = self.start_high = found.start

    def continue_at_end(self, end: int) -> None:
        """Continue after a failed call with a log that ends at `end`.

        Records at and above `end` were not stored and must not appear later.
        """
        assert self.written_end <= end <= len(self.records), (
            f"acknowledged to {self.written_end}, the log ends at {end}"
        )
        self._truncate_expected(end)

    def continue_from(self, found: FoundLog) -> None:
        """Continue after a crash from the recovered state, which is durable."""
        self._truncate_expected(found.end)
        self._record_deletion(found)
        self.start_low = self.start_high = found.start
        self.durable_end = self.written_end = found.end
        self._truncating = None

    def _truncate_expected(self, end: int) -> None:
        del self.records[end:]
        by_offset: Sequence[dict[int, object]] = (
            self.transactional,
            self.markers,
            self.removed_offsets,
            self.may_be_removed,
            self._tombstone_read_ms,
        )  # type: ignore[assignment]
        for table in by_offset:
            for offset in [offset for offset in table if offset >= end]:
                del table[offset]

    def _record_deletion(self, found: FoundLog) -> None:
        found_offsets = {record.offset for record in found.records}
        self.removed_offsets.update(
            {
                offset: superseding
                for offset, superseding in self.may_be_removed.items()
                if offset not in found_offsets
            }
        )
        self.may_be_removed = {}

    # -- expected content --------------------------------------------------------------

    def between(self, start: int, end: int) -> list[Record]:
        """Return the records that a reader of these offsets gets."""
        return [
            record
            for offset, record in enumerate(self.records[start:end], start)
            if record is not None and offset not in self.removed_offsets
        ]

    def _transactions(
        self, end: int
    ) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        """Return the open and the aborted transactions of a log that ends at `end`.

        Open transactions map the producer id to the first offset. Aborted transactions
        are (producer id, first offset, offset of the marker).
        """
        open_transactions: dict[int, int] = {}
        aborted: list[tuple[int, int, int]] = []
        for offset in sorted({*self.transactional, *self.markers}):
            if offset >= end:
                break
            marker = self.markers.get(offset)
            if marker is None:
                open_transactions.setdefault(self.transactional[offset], offset)
            else:
                first = open_transactions.pop(marker.producer_id, None)
                if first is not None and not marker.commit:
                    aborted.append((marker.producer_id, first, offset))
        return open_transactions, aborted

    def aborted(self, end: int) -> set[int]:
        """Return the offsets of records that belong to an aborted transaction."""
        return {
            offset
            for producer_id, first, marker in self._transactions(end)[1]
            for offset in range(first, marker)
            if self.transactional.get(offset) == producer_id
        }

    def open_transactions(self, end: int) -> dict[int, int]:
        """Return the open transactions as producer id to first offset."""
        return self._transactions(end)[0]

    def check_committed(self, offsets: Sequence[int], start: int, end: int) -> None:
        """Check that read_committed may return exactly these offsets.

        `start` and `end` are the bounds of the log that was read.

        Raises:
            AssertionError: A committed record is missing, or a record is returned that is
                aborted or belongs to an open transaction.
        """
        stable = min([end, *self.open_transactions(end).values()])
        aborted = self.aborted(end)
        expected = [
            record.offset
            for record in self.between(start, stable)
            if record.offset not in aborted
        ]
        if stable >= start:
            must_be_returned = [
                offset for offset in expected if offset not in self.may_be_removed
            ]
            extra = sorted({*offsets} - {*expected})
            missing = sorted({*must_be_returned} - {*offsets})
            assert not extra, f"read_committed shows {extra}, which are aborted or open"
            assert not missing, f"read_committed hides {missing}, which are committed"
        else:
            # The first records of an open transaction were deleted. The log cannot
            # attribute its other records to a transaction.
            assert not aborted & {*offsets}, "read_committed shows aborted records"

    def check(self, found: FoundLog, kind: Kind) -> None:
        """Check that a crash of this kind may leave the log as found.

        Raises:
            AssertionError: The content breaks a promise.
        """
        if kind == "power":
            lowest_end = self.durable_end
        else:
            lowest_end = max(self.durable_end, self.written_end)
        assert found.end >= lowest_end, (
            f"acknowledged records are lost: {lowest_end - found.end} records below {lowest_end}; found {found}"
        )
        assert found.end <= len(self.records), (
            f"records were invented: {len(self.records)} were appended, found {found}"
        )
        assert self.start_low <= found.start, (
            f"deleted records are back: {found}, start was {self.start_low}"
        )
        assert found.start <= self.start_high, (
            f"records are missing at the front: {found}, start was {self.start_high}"
        )
        expected = self.between(found.start, found.end)
        if found.records != expected:
            self._check_each(found, expected)
        for offset, superseding in self.removed_offsets.items():
            assert (
                superseding is None or superseding < found.end or offset < found.start
            ), f"{offset} is missing, and so is {superseding} after it"
        if found.committed is not None:
            self.check_committed(found.committed, found.start, found.end)

    def _check_each(self, found: FoundLog, expected: list[Record]) -> None:
        """Compare record by record.

        This slower comparison allows that compaction has removed records, and its error
        contains the wrong record.
        """
        found_records = {record.offset: record for record in found.records}
        assert [record.offset for record in found.records] == sorted(found_records), (
            f"records twice, or out of order in {found}"
        )
        expected_records = {record.offset: record for record in expected}
        for offset, record in found_records.items():
            assert offset not in self.removed_offsets, (
                f"the record at {offset} is back, which compaction removed"
            )
            assert offset in expected_records, (
                f"there is a record at {offset}, but none was appended there"
            )
            assert record == expected_records[offset], (
                f"records were changed: {record} was appended as {expected_records[offset]}"
            )
        for offset in expected_records.keys() - found_records.keys():
            assert offset in self.may_be_removed, (
                f"the record at {offset} of {found} is missing"
            )
            superseding = self.may_be_removed[offset]
            assert superseding is None or superseding < found.end, (
                f"{offset} is missing, and so is {superseding} after it"
            )


@attrs.define
class RecoveredLogCache:
    """Cached results of checks, shared by explorations with the same settings.

    After recovery there are few distinct disks, so most results are cached.
    """

    #: The start and the records that a second opening finds.
    opened: ResultCache[tuple[int, list[Record]]] = attrs.field(factory=ResultCache)
    #: The verdicts of verify().
    verified: ResultCache[list[Verdict]] = attrs.field(factory=ResultCache)


def recover_log(
    disk: SimulatedDisk,
    path: str = "t-0",
    *,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
    thorough: bool = False,
    cache: RecoveredLogCache | None = None,
) -> FoundLog:
    """Open a log after a crash, and check everything that needs no history.

    `thorough` adds checks of reads before recovery, lookups, the state of producers,
    transactions and epochs, and the verdicts of verify(). `cache` contains the
    results that were found on other disks.

    Raises:
        AssertionError: A check fails.
        LogcoreError: The log cannot be opened.
    """
    files_before = disk.view()
    shown = None
    if thorough:
        shown = _records_before_recovery(disk, path)
    is_compacted = LogConfig.parse(config).is_compacted
    with open_log(
        path, create=True, config=config, durability=durability, fs=disk
    ) as log:
        start = log.log_start_offset
        end = log.log_end_offset
        found = FoundLog.of(log, None if shown is None else len(shown))
        records = found.records
        assert found.end == end, "records that exist after opening are not visible"
        report = log.recovery_report
        assert report is not None
        if report.cut_position is not None:
            disk.record_read(report.path)
            tail = (files_before[report.path] or b"")[report.cut_position :]
            assert len(tail) == report.cut_bytes, (
                "the report has the wrong number of truncated bytes"
            )
            if any(tail):
                assert report.quarantine_path is not None, (
                    "the truncated bytes were not kept"
                )
                assert disk.content(report.quarantine_path) == tail, (
                    "the kept bytes differ from the truncated bytes"
                )
        if not is_compacted:
            _check_dense(log, records)
        if shown and not is_compacted:
            seen = [record for record in shown if record.offset >= start]
            assert records[: len(seen)] == seen, (
                "records that a reader saw were removed"
            )
        if posixpath.join(posixpath.dirname(log.path), CLEAN_SHUTDOWN) in files_before:
            assert report.cut_position is None, (
                "the directory was marked as cleanly closed, but recovery truncated bytes"
            )
        if thorough:
            for record in records:
                assert log.get(record.offset) == record, (
                    "get() returns another record than read()"
                )
                first = next(
                    other
                    for other in records
                    if other.timestamp_ms >= record.timestamp_ms
                )
                assert log.offset_for_timestamp(record.timestamp_ms) == first.offset
            check_memory(log)
        receipt = log.append(
            b"probe", key=b"probe" if is_compacted else None, timestamp_ms=0
        )
        assert receipt.offset == end, "the next offset is not the end"
        if thorough:
            check_epochs(log)
    files_after = disk.view()
    # A temporary file of a checkpoint in the parent directory is allowed: the next
    # write of that checkpoint replaces it.
    temporary = [
        name
        for name in files_after
        if name.endswith(_TEMPORARY) and name.count("/") > 1
    ]
    temporary = [
        name for name in temporary if posixpath.basename(name) != CHECKSUMS_VALID
    ]
    assert not temporary, f"temporary files remain: {temporary}"
    if disk.open_handles:
        gc.collect()  # the traceback of an error may reference a segment
    assert not disk.open_handles, f"still open: {disk.open_handles}"
    probe = Record(end, 0, b"probe" if is_compacted else None, b"probe")
    opened, verified = (None, None) if cache is None else (cache.opened, cache.verified)
    reopened = _run_cached(
        opened, disk, lambda disk: _reopen(disk, path, config, durability)
    )
    assert reopened == (start, [*records, probe]), "opening again finds other records"
    if thorough:
        verdicts = _run_cached(
            verified, disk, lambda disk: _check_files(disk, log.path, config)
        )
        damaged = [verdict for verdict in verdicts if verdict.status == "damaged"]
        assert not damaged, damaged
    return found


def _check_files(
    disk: SimulatedDisk, path: str, config: Mapping[str, object] | None
) -> list[Verdict]:
    """Return the verdicts of verify() on a closed log, after checking its indexes.

    Each index must equal, entry by entry, the index rebuilt from the batches. An index
    of a sealed segment may be missing if its directory entry was lost; Kafka rebuilds
    it.
    """
    bases = list_bases(disk, path)
    for base in bases:
        segment = ActiveSegment(disk, path, base, LogConfig.parse(config), create=False)
        rebuild(segment)
        segment.time_index.add(
            segment.largest_timestamp, segment.largest_timestamp_offset - base
        )
        for index in (segment.offset_index, segment.time_index):
            if base == bases[-1] or disk.exists(index.path):
                assert disk.content(index.path) == bytes(index.data), (
                    f"{index.path} does not match the batches"
                )
    return list(verify(path, fs=disk))


def _run_cached(
    result_cache: ResultCache[Found] | None,
    disk: SimulatedDisk,
    function: Callable[[SimulatedDisk], Found],
) -> Found:
    if result_cache is None:
        return function(disk)
    return result_cache.run(disk, function)


def _reopen(
    disk: SimulatedDisk,
    path: str,
    config: Mapping[str, object] | None,
    durability: str | Durability,
) -> tuple[int, list[Record]]:
    """Return the start and the records of a closed log. Check that opening the log
    changes no file.
    """
    files_before = disk.view()
    with open_log(path, config=config, durability=durability, fs=disk) as log:
        start = log.log_start_offset
        records = list(log.read(start))
        assert log.recovery_report is not None
        assert log.recovery_report.cut_position is None, "opening again truncates again"
    assert disk.is_unchanged_since(files_before), "opening again changes the files"
    return start, records


def _check_dense(log: Log, records: Sequence[Record]) -> None:
    """Check that no offset is missing, except those of markers."""
    offsets = [record.offset for record in records]
    if len(offsets) == log.log_end_offset - log.log_start_offset:
        assert offsets == list(range(log.log_start_offset, log.log_end_offset)), (
            "offsets are not dense"
        )
        return
    markers = {
        batch.base_offset
        for batch in log.batches(log.log_start_offset)
        if batch.is_control
    }
    expected = [
        offset
        for offset in range(log.log_start_offset, log.log_end_offset)
        if offset not in markers
    ]
    assert offsets == expected, "offsets are not dense"


def check_epochs(log: Log) -> None:
    """Check that the leader epochs of a log agree with the epochs in its batches.

    Raises:
        AssertionError: An epoch begins or ends at another offset.
    """
    for batch in log.batches(log.log_start_offset):
        epoch = batch.partition_leader_epoch
        if not batch.record_count:
            continue  # an empty batch of compaction may represent several batches
        found_epoch, end = log.end_of_epoch(epoch)
        assert found_epoch == epoch and end > batch.last_offset, (
            f"epoch {epoch} of offset {batch.last_offset} ends at {end}"
        )
        previous_epoch, previous_end = (
            log.end_of_epoch(epoch - 1) if epoch else (-1, -1)
        )
        assert previous_epoch < epoch and previous_end <= max(
            batch.base_offset, log.log_start_offset
        ), (
            f"epoch {previous_epoch} ends at {previous_end}, and a batch of {epoch} begins at {batch.base_offset}"
        )


def check_memory(log: Log) -> None:
    """Check that the producer and transaction state of a log agrees with its batches.

    The state must equal the one rebuilt without snapshots and transaction indexes. The
    check is skipped if retention or compaction removed the start of the log, because
    the remaining batches do not determine the state.

    Raises:
        AssertionError: The states differ.
    """
    state = log.host.writer.state
    segments = state.segments
    if log.log_start_offset or state.gaps.dense_from:
        return
    replayed = PartitionTransactions()
    replayed_producers = Producers()
    for segment in segments:
        for facts, _, _ in segment.walk(0, crc=False):
            replayed.add(facts, control_types(segment))
            replayed_producers.add_facts(facts, coordinator_epochs(segment))
    for segment, end in zip(
        segments,
        [*(segment.base_offset for segment in segments[1:]), log.log_end_offset],
        strict=True,
    ):
        index = TransactionIndex("", bytearray())
        for entry in replayed.entries_between(segment.base_offset, end):
            index.add(*entry)
        stored = bytes(
            load(log.host.writer.fs, segment.file(TXN_INDEX), TransactionIndex)
        )
        assert stored == bytes(index.data), (
            f"the transaction index of {segment} does not match its batches"
        )
    with state.lock:
        current_state = log.host.writer.producers.known()
        replayed_producers.expire(
            log.host.writer.claim.clock.now_ms(log.host.writer.fs.now_ms())
        )
    assert (
        current_state.open_transactions() == replayed_producers.open_transactions()
    ), "open transactions"
    assert current_state.last_batches() == replayed_producers.last_batches(), (
        "last batches of producers"
    )


def _records_before_recovery(disk: SimulatedDisk, path: str) -> list[Record]:
    """Return the records that a reader gets before the writer recovers the log.

    The reader stops at damage, which it reports as an error.
    """
    shown: list[Record] = []
    try:
        with open_log(path, read_only=True, fs=disk) as log:
            shown.extend(log.read(log.log_start_offset))
    except (CorruptBatchError, CorruptLogError, LogNotFoundError):
        pass
    return shown
