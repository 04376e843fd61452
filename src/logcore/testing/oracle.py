"""What one log must hold after a crash, and how to find out what it does hold.

`LogHistory` follows what is asked of a log and what it acknowledges; its judge() says whether what was found after a
crash is among what the promises allow (reliability promises 1 to 4):
- a prefix of what was appended: no hole, no other order, no changed byte;
- with all that was acknowledged at the level that the crash spares;
- not above what was asked for: nothing truncated or deleted comes back once that call has returned.

`recover_log` opens a log as its owner would, and checks what needs no history: it opens, can be appended to, opening
again changes nothing, what was cut is kept beside, and nothing temporary stays behind.
"""

from __future__ import annotations

import gc
import posixpath
from collections.abc import Iterable, Mapping

import attrs

from logcore.checkpoint import CLEAN_SHUTDOWN
from logcore.config import Durability
from logcore.errors import CorruptBatchError, CorruptLogError, LogNotFoundError
from logcore.kernels import Record
from logcore.log import open_log
from logcore.testing.disk import Kind, SimulatedDisk
from logcore.verify import verify

_TEMPORARY = (".tmp", ".cleaned", ".swap", ".deleted")


@attrs.frozen
class FoundLog:
    """What opening a log found: its start and its records. shown: how many of them a reader was shown before."""

    start: int
    records: list[Record]
    shown: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    def __str__(self) -> str:
        return f"offsets {self.start}..{self.end}"


class LogHistory:
    """What was asked of one log and what it acknowledged.

    records: all that may be in it, by offset; a call that is under way has its records here. start_low, start_high:
    between which its start may be. durable_end: up to which a power cut may take nothing, written_end: up to which a
    kill may not.
    """

    def __init__(self, durability: str | Durability = "group") -> None:
        self.durability = Durability.parse(durability)
        self.records: list[Record] = []
        self.start_low = self.start_high = 0
        self.durable_end = self.written_end = 0
        self._truncating: int | None = None

    def issue(self, records: Iterable[Record]) -> None:
        """An append is about to be called."""
        self.records += records

    def acknowledge(self, end: int, level: str | None = None) -> None:
        """It returned: all below end is as safe as level, "os" or "disk", by default what the policy says."""
        assert end <= len(self.records), (end, len(self.records))
        self.written_end = max(self.written_end, end)
        if level == "disk" or (level is None and self.durability.waits):
            self.durable_end = max(self.durable_end, end)
        if self.durability.kind == "every":
            self.durable_end = max(self.durable_end, self.written_end - self.durability.amount + 1)

    def delete(self, before: int) -> None:
        """delete_records is about to be called."""
        self.start_high = max(self.start_high, before)

    def deleted(self) -> None:
        self.start_low = self.start_high

    def truncate(self, offset: int) -> None:
        """truncate is about to be called: from now on nothing above offset is promised."""
        self._truncating = offset
        self.durable_end = min(self.durable_end, offset)
        self.written_end = min(self.written_end, offset)

    def truncated(self) -> None:
        assert self._truncating is not None
        if self._truncating < len(self.records):  # then it has synced what it keeps
            del self.records[self._truncating :]
            self.written_end = self.durable_end = len(self.records)
        self._truncating = None

    def take_end(self, end: int) -> None:
        """A call failed, and the log says that it ends here: what was not stored will not come."""
        assert self.written_end <= end <= len(self.records), (
            f"acknowledged to {self.written_end}, the log ends at {end}"
        )
        del self.records[end:]

    def take(self, found: FoundLog) -> None:
        """A crash happened, and this is what is there now, on disk."""
        del self.records[found.end :]
        self.start_low = self.start_high = found.start
        self.durable_end = self.written_end = found.end
        self._truncating = None

    def judge(self, found: FoundLog, kind: Kind) -> None:
        """Raises AssertionError when a crash of this kind must not leave that."""
        low = self.durable_end if kind == "power" else max(self.durable_end, self.written_end)
        assert found.end >= low, f"acknowledged records are lost: {low - found.end} of those below {low}; found {found}"
        assert found.end <= len(self.records), (
            f"records were invented: {len(self.records)} were appended, found {found}"
        )
        assert self.start_low <= found.start, f"deleted records are back: {found}, start was {self.start_low}"
        assert found.start <= self.start_high, f"records are gone from the front: {found}, start was {self.start_high}"
        if found.records != self.records[found.start : found.end]:
            for mine, theirs in zip(self.records[found.start :], found.records, strict=False):
                assert mine == theirs, f"records were changed: {theirs} was appended as {mine}"
            raise AssertionError(f"{len(found.records)} records in {found}")


def recover_log(
    disk: SimulatedDisk,
    path: str = "t-0",
    *,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
    thorough: bool = False,
) -> FoundLog:
    """Opens a log after a crash, and checks all that can be checked without knowing what was in it.

    thorough: also what a reader sees before recovery, lookups, and the verdicts of logcore.verify. Raises
    AssertionError, and what opening raises.
    """
    before = disk.files()
    shown = _look_before(disk, path) if thorough else None
    with open_log(path, create=True, config=config, durability=durability, fs=disk) as log:
        start, end = log.log_start_offset, log.log_end_offset
        records = list(log.read(start))
        report = log.recovery_report
        assert report is not None
        if report.cut_position is not None:
            tail = before[report.path][report.cut_position :]
            assert len(tail) == report.cut_bytes, "the report does not say what was cut"
            if any(tail):
                assert report.quarantine_path is not None, "what was cut is nowhere"
                assert disk.files()[report.quarantine_path] == tail, "what was put aside is not what was cut"
        assert [record.offset for record in records] == list(range(start, end)), "offsets are not dense"
        if shown:
            assert records[: len(shown)] == shown[max(0, start - shown[0].offset) :], "what a reader saw was taken back"
        if posixpath.join(posixpath.dirname(log.path), CLEAN_SHUTDOWN) in before:
            assert report.cut_position is None, "marked as cleanly shut down, and there was something to mend"
        if thorough:
            for record in records:
                assert log.get(record.offset) == record, "a lookup finds something else than reading through"
                first = next(other for other in records if other.timestamp_ms >= record.timestamp_ms)
                assert log.offset_for_timestamp(record.timestamp_ms) == first.offset
        receipt = log.append(b"probe", timestamp_ms=0)
        assert receipt.offset == end, "the next offset is not the end"
    after = disk.files()
    # In the directory above, a checkpoint's temporary file waits for the next writing of that checkpoint.
    left = [name for name in after if name.endswith(_TEMPORARY) and name.count("/") > 1]
    assert not left, f"left behind: {left}"
    if disk.open_handles:
        gc.collect()  # the traceback of an error may hold a segment
    assert not disk.open_handles, f"still open: {disk.open_handles}"
    with open_log(path, config=config, durability=durability, fs=disk) as log:
        assert list(log.read(start)) == [*records, Record(end, 0, None, b"probe")], "opening again finds other records"
        assert log.recovery_report is not None
        assert log.recovery_report.cut_position is None, "opening again cuts again"
    assert disk.files() == after, "opening again changes the files"
    if thorough:
        damaged = [verdict for verdict in verify(path, fs=disk) if verdict.status == "damaged"]
        assert not damaged, damaged
    return FoundLog(start, records, None if shown is None else len(shown))


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
