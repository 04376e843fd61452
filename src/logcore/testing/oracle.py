"""What one log must hold after a crash, and how to find out what it does hold.

`LogHistory` follows what is asked of a log and what it acknowledges; its judge() says whether what was found after a
crash is among what the promises allow (reliability promises 1 to 4):
- a prefix of what was appended: no hole, no other order, no changed byte;
- with all that was acknowledged at the level that the crash spares;
- not above what was asked for: nothing truncated or deleted comes back once that call has returned;
- where the log is compacted, without records that a later one of their key supersedes, while that later one exists;
- the same transactions open, committed and aborted as their markers say.

`recover_log` opens a log as its owner would, and checks what needs no history: it opens, can be appended to, opening
again changes nothing, what was cut is kept beside, nothing temporary stays behind, and what it remembers of producers,
transactions and leader epochs is what its batches say.
"""

from __future__ import annotations

import gc
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from logcore.checkpoint import CLEAN_SHUTDOWN, SEALS_HOLD
from logcore.config import Durability, LogConfig
from logcore.errors import CorruptBatchError, CorruptLogError, LogNotFoundError
from logcore.index import TransactionIndex, load
from logcore.inspect.verify import Verdict, verify
from logcore.kernels import Record
from logcore.log import Log, open_log
from logcore.names import STATES, TXN_INDEX
from logcore.partition.producers import Producers
from logcore.partition.producerstate import coordinator_epochs
from logcore.partition.recovery import rebuild
from logcore.partition.segmentfiles import list_bases
from logcore.partition.transactions import Transactions, control_types
from logcore.segment import ActiveSegment
from logcore.testing.crashstates import Kind
from logcore.testing.disk import SimulatedDisk
from logcore.testing.known import Known

#: pytest leaves frames of this module out of what it shows of a failure.
__tracebackhide__ = True

Found = TypeVar("Found")

_TEMPORARY = (".tmp", *STATES)


@attrs.frozen
class FoundLog:
    """What opening a log found: its start and its records. shown: how many of them a reader was shown before. end:
    where it ends, by default behind records that have no gaps. committed: offsets of what read_committed shows, None
    when that was not asked.
    """

    start: int
    records: list[Record]
    shown: int | None = None
    end: int = attrs.field(default=attrs.Factory(lambda self: self.start + len(self.records), takes_self=True))
    committed: list[int] | None = None

    @classmethod
    def of(cls, log: Log, shown: int | None = None) -> FoundLog:
        """What a log shows now."""
        start = log.log_start_offset
        committed = [record.offset for record in log.read(start, isolation="read_committed")]
        return cls(start, list(log.read(start)), shown, log.high_watermark, committed)

    def __str__(self) -> str:
        return f"offsets {self.start}..{self.end}"


@attrs.frozen
class Marker:
    """The end of a transaction, which takes an offset and is no record."""

    producer_id: int
    commit: bool


class LogHistory:
    """What was asked of one log and what it acknowledged.

    records: all that may be in it, by offset, None where a marker stands; a call that is under way has its records
    here. start_low, start_high: between which its start may be. durable_end: up to which a power cut may take nothing,
    written_end: up to which a kill may not. transactional: offset -> producer id, of records in transactions. markers:
    by offset. gone: offsets that compaction took -> the offset of what superseded it, None when it was aborted or a
    tombstone whose time was over. may_go: the same, of a compaction that is under way.
    """

    def __init__(self, durability: str | Durability = "group") -> None:
        self.durability = Durability.parse(durability)
        self.records: list[Record | None] = []
        self.start_low = self.start_high = 0
        self.durable_end = self.written_end = 0
        self.transactional: dict[int, int] = {}
        self.markers: dict[int, Marker] = {}
        self.gone: dict[int, int | None] = {}
        self.may_go: dict[int, int | None] = {}
        self._met_ms: dict[int, int] = {}  # tombstone -> when compaction first met it
        self._truncating: int | None = None

    def issue(self, records: Iterable[Record], *, transaction_of: int | None = None) -> None:
        """An append is about to be called. transaction_of: the producer id, when it is part of a transaction."""
        first = len(self.records)
        self.records += records
        if transaction_of is not None:
            self.transactional.update(dict.fromkeys(range(first, len(self.records)), transaction_of))

    def issue_marker(self, producer_id: int, *, commit: bool) -> None:
        """end_transaction is about to be called."""
        self.markers[len(self.records)] = Marker(producer_id, commit)
        self.records.append(None)

    def acknowledge(self, end: int, level: str | None = None) -> None:
        """It returned: all below end is as safe as level, "os" or "disk", by default what the policy says."""
        assert end <= len(self.records), (end, len(self.records))
        self.written_end = max(self.written_end, end)
        if level == "disk" or (level is None and self.durability.waits):
            self.durable_end = max(self.durable_end, end)
        if self.durability.kind == "every":
            self.durable_end = max(self.durable_end, self.written_end - self.durability.amount + 1)

    def delete(self, before: int) -> None:
        """delete_records, or retention that may go up to there, is about to be called."""
        self.start_high = max(self.start_high, before)

    def deleted(self, start: int | None = None) -> None:
        """It returned, and the log starts at start, by default where it was asked to."""
        if start is not None:
            assert self.start_low <= start <= self.start_high, (self.start_low, start, self.start_high)
            self.start_high = start
        self.start_low = self.start_high

    def truncate(self, offset: int) -> None:
        """truncate is about to be called: from now on nothing above offset is promised."""
        self._truncating = offset
        self.durable_end = min(self.durable_end, offset)
        self.written_end = min(self.written_end, offset)
        for at, by in self.gone.items():  # what superseded it goes; that is what was asked for
            if by is not None and by >= offset:
                self.gone[at] = None

    def truncated(self) -> None:
        assert self._truncating is not None
        if self._truncating < len(self.records):  # then it has synced what it keeps
            self._cut(self._truncating)
            self.written_end = self.durable_end = len(self.records)
        self._truncating = None

    def compact(self, end: int, now_ms: int, delete_retention_ms: int) -> None:
        """A round of compaction is about to be called, that does not look at or above end."""
        newest: dict[bytes | None, int] = {}
        aborted = self.aborted(len(self.records))
        for offset in range(end - 1, self.start_low - 1, -1):
            record = self.records[offset]
            if record is None or offset in self.gone:
                continue
            by = newest.get(record.key)
            if offset in aborted:
                self.may_go[offset] = None
            elif by is not None:
                self.may_go[offset] = by
            elif record.value is None and now_ms - self._met_ms.setdefault(offset, now_ms) >= delete_retention_ms:
                self.may_go[offset] = None
            if offset not in aborted:
                newest.setdefault(record.key, offset)

    def compacted(self, found: FoundLog, first_dirty: int, end: int) -> None:
        """It returned, having read first_dirty up to end: what it had to take is gone, and nothing else."""
        self.judge(found, "kill")
        aborted = self.aborted(len(self.records))
        for record in found.records:
            by = self.may_go.get(record.offset)
            is_superseded = by is not None and first_dirty <= by < end
            assert record.offset >= end or not (is_superseded or record.offset in aborted), f"{record.offset} is left"
        self._note_gone(found)

    def settle(self, found: FoundLog) -> None:
        """A call failed, and may have been half done: judges the present state, and goes on from it."""
        self.judge(found, "kill")
        self._note_gone(found)
        self.start_low = self.start_high = found.start

    def take_end(self, end: int) -> None:
        """A call failed, and the log says that it ends here: what was not stored will not come."""
        assert self.written_end <= end <= len(self.records), (
            f"acknowledged to {self.written_end}, the log ends at {end}"
        )
        self._cut(end)

    def take(self, found: FoundLog) -> None:
        """A crash happened, and this is the present state, on disk."""
        self._cut(found.end)
        self._note_gone(found)
        self.start_low = self.start_high = found.start
        self.durable_end = self.written_end = found.end
        self._truncating = None

    def _cut(self, end: int) -> None:
        del self.records[end:]
        by_offset: Sequence[dict[int, object]] = (
            self.transactional,
            self.markers,
            self.gone,
            self.may_go,
            self._met_ms,
        )  # type: ignore[assignment]
        for table in by_offset:
            for offset in [offset for offset in table if offset >= end]:
                del table[offset]

    def _note_gone(self, found: FoundLog) -> None:
        there = {record.offset for record in found.records}
        self.gone.update({offset: by for offset, by in self.may_go.items() if offset not in there})
        self.may_go = {}

    # -- what is to be found -------------------------------------------------------------------------------------

    def between(self, start: int, end: int) -> list[Record]:
        """The records that a reader of these offsets gets."""
        return [
            record
            for offset, record in enumerate(self.records[start:end], start)
            if record is not None and offset not in self.gone
        ]

    def _spans(self, end: int) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        """Of a log that ends at end: open transactions as producer id -> first offset, and aborted ones as (producer
        id, first offset, offset of the marker).
        """
        is_open: dict[int, int] = {}
        aborted: list[tuple[int, int, int]] = []
        for offset in sorted({*self.transactional, *self.markers}):
            if offset >= end:
                break
            marker = self.markers.get(offset)
            if marker is None:
                is_open.setdefault(self.transactional[offset], offset)
            else:
                first = is_open.pop(marker.producer_id, None)
                if first is not None and not marker.commit:
                    aborted.append((marker.producer_id, first, offset))
        return is_open, aborted

    def aborted(self, end: int) -> set[int]:
        """Offsets of records that belong to an aborted transaction."""
        return {
            offset
            for producer_id, first, marker in self._spans(end)[1]
            for offset in range(first, marker)
            if self.transactional.get(offset) == producer_id
        }

    def open_transactions(self, end: int) -> dict[int, int]:
        """Producer id -> first offset."""
        return self._spans(end)[0]

    def check_committed(self, offsets: Sequence[int], start: int, end: int) -> None:
        """Whether read_committed may show these, in a log of that start and end."""
        stable = min([end, *self.open_transactions(end).values()])
        aborted = self.aborted(end)
        expected = [record.offset for record in self.between(start, stable) if record.offset not in aborted]
        if stable >= start:
            left_out = [offset for offset in expected if offset not in self.may_go]
            extra = sorted({*offsets} - {*expected})
            missing = sorted({*left_out} - {*offsets})
            assert not extra, f"read_committed shows {extra}, which are aborted or open"
            assert not missing, f"read_committed hides {missing}, which are committed"
        else:  # the beginning of an open transaction was deleted: what is left of it may be open or unknown
            assert not aborted & {*offsets}, "read_committed shows what was aborted"

    def judge(self, found: FoundLog, kind: Kind) -> None:
        """Raises AssertionError when a crash of this kind must not leave that."""
        if kind == "power":
            low = self.durable_end
        else:
            low = max(self.durable_end, self.written_end)
        assert found.end >= low, f"acknowledged records are lost: {low - found.end} of those below {low}; found {found}"
        assert found.end <= len(self.records), (
            f"records were invented: {len(self.records)} were appended, found {found}"
        )
        assert self.start_low <= found.start, f"deleted records are back: {found}, start was {self.start_low}"
        assert found.start <= self.start_high, f"records are gone from the front: {found}, start was {self.start_high}"
        expected = self.between(found.start, found.end)
        if found.records != expected:
            self._judge_each(found, expected)
        for offset, by in self.gone.items():
            assert by is None or by < found.end or offset < found.start, f"{offset} is gone, and so is {by} after it"
        if found.committed is not None:
            self.check_committed(found.committed, found.start, found.end)

    def _judge_each(self, found: FoundLog, expected: list[Record]) -> None:
        """The slow way, for what compaction may have taken, and to say what is wrong."""
        theirs = {record.offset: record for record in found.records}
        assert [record.offset for record in found.records] == sorted(theirs), (
            f"records twice, or out of order in {found}"
        )
        mine = {record.offset: record for record in expected}
        for offset, record in theirs.items():
            assert offset not in self.gone, f"{offset} is back, which compaction took"
            assert offset in mine, f"there is a record at {offset}, where none was appended"
            assert record == mine[offset], f"records were changed: {record} was appended as {mine[offset]}"
        for offset in mine.keys() - theirs.keys():
            assert offset in self.may_go, f"the record at {offset} of {found} is gone"
            by = self.may_go[offset]
            assert by is None or by < found.end, f"{offset} is gone, and so is {by} after it"


@attrs.define
class Afterwards:
    """What is known of the disks that recovery leaves, to be shared where settings are the same: there are few of them.

    opened: what opening again finds, a start and records. verified: what verify() says.
    """

    opened: Known[tuple[int, list[Record]]] = attrs.field(factory=Known)
    verified: Known[list[Verdict]] = attrs.field(factory=Known)


def recover_log(
    disk: SimulatedDisk,
    path: str = "t-0",
    *,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
    thorough: bool = False,
    afterwards: Afterwards | None = None,
) -> FoundLog:
    """Opens a log after a crash, and checks all that can be checked without knowing what was in it.

    thorough: also what a reader sees before recovery, lookups, what is remembered of producers, transactions and
    epochs, and the verdicts of verify(). afterwards: of other disks. Raises AssertionError, and what opening
    raises.
    """
    before = disk.view()
    shown = None
    if thorough:
        shown = _look_before(disk, path)
    is_compacted = LogConfig.parse(config).is_compacted
    with open_log(path, create=True, config=config, durability=durability, fs=disk) as log:
        start = log.log_start_offset
        end = log.log_end_offset
        found = FoundLog.of(log, None if shown is None else len(shown))
        records = found.records
        assert found.end == end, "records that exist after opening are not shown"
        report = log.recovery_report
        assert report is not None
        if report.cut_position is not None:
            disk.note_read(report.path)
            tail = (before[report.path] or b"")[report.cut_position :]
            assert len(tail) == report.cut_bytes, "the report does not say what was cut"
            if any(tail):
                assert report.quarantine_path is not None, "what was cut is nowhere"
                assert disk.content(report.quarantine_path) == tail, "what was put aside is not what was cut"
        if not is_compacted:
            _check_dense(log, records)
        if shown and not is_compacted:
            seen = [record for record in shown if record.offset >= start]
            assert records[: len(seen)] == seen, "what a reader saw was taken back"
        if posixpath.join(posixpath.dirname(log.path), CLEAN_SHUTDOWN) in before:
            assert report.cut_position is None, "marked as cleanly shut down, and there was something to mend"
        if thorough:
            for record in records:
                assert log.get(record.offset) == record, "a lookup finds something else than reading through"
                first = next(other for other in records if other.timestamp_ms >= record.timestamp_ms)
                assert log.offset_for_timestamp(record.timestamp_ms) == first.offset
            check_memory(log)
        receipt = log.append(b"probe", key=b"probe" if is_compacted else None, timestamp_ms=0)
        assert receipt.offset == end, "the next offset is not the end"
        if thorough:
            check_epochs(log)
    after = disk.view()
    # In the directory above, a checkpoint's temporary file waits for the next writing of that checkpoint.
    left = [name for name in after if name.endswith(_TEMPORARY) and name.count("/") > 1]
    left = [name for name in left if posixpath.basename(name) != SEALS_HOLD]
    assert not left, f"left behind: {left}"
    if disk.open_handles:
        gc.collect()  # the traceback of an error may hold a segment
    assert not disk.open_handles, f"still open: {disk.open_handles}"
    probe = Record(end, 0, b"probe" if is_compacted else None, b"probe")
    opened, verified = (None, None) if afterwards is None else (afterwards.opened, afterwards.verified)
    again = _once(opened, disk, lambda disk: _reopen(disk, path, config, durability))
    assert again == (start, [*records, probe]), "opening again finds other records"
    if thorough:
        verdicts = _once(verified, disk, lambda disk: _judge_files(disk, log.path, config))
        damaged = [verdict for verdict in verdicts if verdict.status == "damaged"]
        assert not damaged, damaged
    return found


def _judge_files(disk: SimulatedDisk, path: str, config: Mapping[str, object] | None) -> list[Verdict]:
    """What verify() says of a log that was closed. Its indexes are what its batches say, entry by entry; of a
    sealed segment they may be gone, as their names were, and Kafka rebuilds them then.
    """
    bases = list_bases(disk, path)
    for base in bases:
        segment = ActiveSegment(disk, path, base, LogConfig.parse(config), create=False)
        rebuild(segment)
        segment.time_index.add(segment.largest_timestamp, segment.largest_timestamp_offset - base)
        for index in (segment.offset_index, segment.time_index):
            if base == bases[-1] or disk.exists(index.path):
                assert disk.content(index.path) == bytes(index.data), f"{index.path} is not what the batches say"
    return list(verify(path, fs=disk))


def _once(known: Known[Found] | None, disk: SimulatedDisk, function: Callable[[SimulatedDisk], Found]) -> Found:
    if known is None:
        return function(disk)
    return known.run(disk, function)


def _reopen(
    disk: SimulatedDisk, path: str, config: Mapping[str, object] | None, durability: str | Durability
) -> tuple[int, list[Record]]:
    """Opens a log that was closed, which changes nothing. Returns its start and its records."""
    before = disk.view()
    with open_log(path, config=config, durability=durability, fs=disk) as log:
        start = log.log_start_offset
        records = list(log.read(start))
        assert log.recovery_report is not None
        assert log.recovery_report.cut_position is None, "opening again cuts again"
    assert disk.is_as(before), "opening again changes the files"
    return start, records


def _check_dense(log: Log, records: Sequence[Record]) -> None:
    """No offset is missing but those of markers."""
    offsets = [record.offset for record in records]
    if len(offsets) == log.log_end_offset - log.log_start_offset:
        assert offsets == list(range(log.log_start_offset, log.log_end_offset)), "offsets are not dense"
        return
    markers = {batch.base_offset for batch in log.batches(log.log_start_offset) if batch.is_control}
    expected = [offset for offset in range(log.log_start_offset, log.log_end_offset) if offset not in markers]
    assert offsets == expected, "offsets are not dense"


def check_epochs(log: Log) -> None:
    """What a log says of its leader epochs is what its batches are stamped with. Raises AssertionError."""
    for batch in log.batches(log.log_start_offset):
        epoch = batch.partition_leader_epoch
        if not batch.record_count:
            continue  # compaction's, which may stand for records of several
        own, end = log.end_of_epoch(epoch)
        assert own == epoch and end > batch.last_offset, f"epoch {epoch} of offset {batch.last_offset} ends at {end}"
        before, begin = log.end_of_epoch(epoch - 1) if epoch else (-1, -1)
        assert before < epoch and begin <= max(batch.base_offset, log.log_start_offset), (
            f"epoch {before} ends at {begin}, and a batch of {epoch} begins at {batch.base_offset}"
        )


def check_memory(log: Log) -> None:
    """What a log remembers of producers and aborted transactions is what its batches say: the same as if its snapshots
    and transaction indexes had been lost. Raises AssertionError.

    Of a log whose front is gone, by retention or compaction, the batches do not tell all: nothing to compare.
    """
    state = log.writer.state
    segments = state.segments
    if log.log_start_offset or state.gaps.dense_from:
        return
    replayed = Transactions()
    replayed_producers = Producers()
    for segment in segments:
        for facts, _, _ in segment.walk(0, crc=False):
            replayed.add(facts, control_types(segment))
            replayed_producers.add_facts(facts, coordinator_epochs(segment))
    for segment, end in zip(segments, [*(one.base_offset for one in segments[1:]), log.log_end_offset], strict=True):
        index = TransactionIndex("", bytearray())
        for entry in replayed.entries_between(segment.base_offset, end):
            index.add(*entry)
        stored = bytes(load(log.writer.fs, segment.file(TXN_INDEX), TransactionIndex))
        assert stored == bytes(index.data), f"the transaction index of {segment} is not what its batches say"
    with state.lock:
        remembered = log.writer.producers.known()
        replayed_producers.expire(log.writer.claim.clock.now_ms(log.writer.fs.now_ms()))
    assert remembered.open_transactions() == replayed_producers.open_transactions(), "open transactions"
    assert remembered.last_batches() == replayed_producers.last_batches(), "what producers wrote last"


def _look_before(disk: SimulatedDisk, path: str) -> list[Record]:
    """What a reader is shown that comes before the writer: up to damage, which it is told."""
    shown: list[Record] = []
    try:
        with open_log(path, read_only=True, fs=disk) as log:
            shown.extend(log.read(log.log_start_offset))
    except (CorruptBatchError, CorruptLogError, LogNotFoundError):
        pass
    return shown


def restart_log(
    disk: SimulatedDisk,
    path: str = "t-0",
    *,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
) -> None:
    """Opens a log and closes it: the recovery that may be interrupted."""
    with open_log(path, create=True, config=config, durability=durability, fs=disk):
        pass
