"""One partition: a log that is appended to at its end and read from any offset.

The road of a record: append encodes a batch with the offset it will have, the active segment writes it with one system
call, and the visible end moves on. Back: the segment by base offset, its index, a walk over batch heads, and from the
bytes records, columns or Arrow.

Rules (the promises; docs/design.md states them for users):
- One writer. Every append is whole or leaves no byte; after an error the log is as before, or refuses writes for good.
- Acknowledged means what the durability policy says. A sync that fails is never tried again: the log is poisoned, and
  reopening it, which checks what is on disk, is the only way back.
- Readers see what lies below the visible end: what is on disk where appends wait for it, else all that was written.
  What they have seen is never taken back, except by truncate().
- Offsets rise and are never reused.

This module does not know other partitions. It starts no threads: tick() does what is due.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import attrs

from logcore import checkpoint, recovery
from logcore.columns import input_column, input_timestamps
from logcore.commit import GroupCommit
from logcore.compression import Codec
from logcore.config import Durability, LogConfig
from logcore.errors import (
    CorruptLogError,
    DiskFullError,
    ForkedWriterError,
    InvalidConfigError,
    InvalidNameError,
    InvalidRecordError,
    LogClosedError,
    LogcoreError,
    LogFailedError,
    LogNotFoundError,
    OffsetOutOfRangeError,
    ReadOnlyLogError,
    ResourceError,
    StorageWriteError,
)
from logcore.fs import FS, OS, Lock
from logcore.kernels import Record, active, layout
from logcore.kernels.layout import APPEND_TIME_BIT, Buffer, EncodedBatch
from logcore.producers import Transactions
from logcore.reading import Scan, Stretch
from logcore.recordbatch import RecordBatch, compressor, front_of, prepare_append, target_codec
from logcore.segment import LOG, ActiveSegment, GrowingSegment, Segment, base_offset_of, file_name

Isolation = Literal["read_uncommitted", "read_committed"]
Level = Literal["os", "disk"]

#: The recovery point lags the durable end by at most this, which bounds what opening must check after a crash.
_RECOVERY_LAG_BYTES: Final = 64 << 20
_RECOVERY_LAG_MS: Final = 5_000
#: A copy of part of a segment goes in pieces of this.
_COPY_BYTES: Final = 1 << 20

_PARTITION_NAME: Final = re.compile(r"([A-Za-z0-9._-]{1,249})-(\d{1,10})")


class Receipt(NamedTuple):
    """What an append did: offsets of its first and last record, its time, and how safe it is.

    durability: "disk" when an fdatasync that began after the write has returned, else "os": a killed process keeps it,
    a power cut may not. timestamp_ms: the clock when it was appended.
    """

    offset: int
    last_offset: int
    timestamp_ms: int
    durability: Level


@attrs.frozen(kw_only=True)
class LogStatistics:
    """Counters since the log was opened, and its present shape."""

    segments: int
    size_bytes: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    durable_end_offset: int
    appends: int
    records_appended: int
    bytes_appended: int
    syncs: int
    rolls: int


def parse_partition_name(name: str) -> tuple[str, int]:
    """(topic, partition) of a partition directory's name. Raises InvalidNameError for what Kafka would refuse."""
    found = _PARTITION_NAME.fullmatch(name)
    if found is None or found[1] in (".", "..") or len(name) > 255 or int(found[2]) > layout.INT32_MAX:
        raise InvalidNameError(
            "a partition directory is named <topic>-<number>, the topic of letters, digits, '.', '_' and '-'",
            expected="a name like 'orders-0'",
            found=repr(name),
        )
    return found[1], int(found[2])


def open_log(
    path: str | os.PathLike[str],
    *,
    create: bool = False,
    read_only: bool = False,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
    fs: FS = OS,
) -> Log:
    """Opens one partition directory, such as data/orders-0.

    create: make it if it is not there. read_only: take no lock and write nothing; works on any partition directory that
    Kafka or logcore wrote, also while its writer runs. config: settings by Kafka's names. durability: see Durability.

    Opening for writing takes Kafka's lock on the parent directory, checks the active segment, cuts a torn tail and
    reports it in log.recovery_report. Raises LogNotFoundError, LogLockedError, CorruptLogError, InvalidNameError,
    InvalidConfigError, StorageReadError.
    """
    directory = os.fspath(path)
    settings = LogConfig.parse(config)
    policy = Durability.parse(durability)
    if read_only:
        if create:
            raise InvalidConfigError("a log cannot be created read-only")
        return Log._open_reader(fs, directory, settings)
    return Log._open_writer(fs, directory, settings, policy, create)


class Log:
    """One partition directory, open for appending and reading, or for reading only. Made by logcore.open().

    All methods may be called from several threads. A with block closes it.
    """

    #: What opening found and mended; None for a log opened read-only.
    recovery_report: recovery.RecoveryReport | None = None

    # What only a writer has; set by _open_writer.
    _lock_held: Lock
    _parent: str
    _topic: str
    _partition: int
    _active: ActiveSegment
    _commit: GroupCommit
    _durable_handle: int
    _recovery_point: int
    _leader_epoch: int
    _epochs: list[tuple[int, int]]

    def __init__(self, fs: FS, directory: str, config: LogConfig, policy: Durability) -> None:
        """Not for users: the state that reader and writer share, before anything was opened."""
        self.path = directory
        self.config = config
        self.durability = policy
        self._fs = fs
        self._segments: list[Segment] = []  # in order; the last one is growing
        self._bases: list[int] = []
        self._log_start = 0
        self._end = 0
        self._visible = 0
        self._closed = False
        self._writable = False
        self._transactions: Transactions | None = None
        self._lock = threading.Lock()
        self._moved = threading.Condition(threading.Lock())
        self._tailing = 0
        self._pid = fs.process_id()

    # -- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def _open_reader(cls, fs: FS, directory: str, config: LogConfig) -> Self:
        if not fs.is_directory(directory):
            raise LogNotFoundError("there is no partition directory here", path=directory)
        log = cls(fs, directory, config, Durability("os"))
        try:
            log._list_segments()
        except BaseException:
            log.close()
            raise
        return log

    def _list_segments(self) -> None:
        """Reader: takes the present files as the log, keeping what is known of segments that are still there."""
        # A writer rolls and retains while we list, so a file may be gone when it is opened: list again.
        for attempt in range(10):
            names = self._fs.listdir(self.path)
            bases = sorted(base for name in names if (base := base_offset_of(name)) is not None)
            known = {segment.base_offset: segment for segment in self._segments}
            segments: list[Segment] = []
            try:
                for base in bases[:-1]:
                    kept = known.get(base)
                    if kept is None or isinstance(kept, GrowingSegment):
                        kept = Segment(self._fs, self.path, base)
                    segments.append(kept)
                if bases:
                    last = known.get(bases[-1])
                    if not isinstance(last, GrowingSegment):
                        last = GrowingSegment(self._fs, self.path, bases[-1])
                    segments.append(last)
                break
            except FileNotFoundError:
                if attempt == 9:
                    raise
        self._segments, self._bases = segments, bases
        starts = self._start_checkpoint()
        self._log_start = max(starts, bases[0]) if bases else starts
        self._refresh_end()

    def _start_checkpoint(self) -> int:
        with contextlib.suppress(InvalidNameError):
            topic, partition = parse_partition_name(os.path.basename(self._fs.real_path(self.path)))
            parent = os.path.dirname(self._fs.real_path(self.path))
            return checkpoint.read_offsets(self._fs, parent, checkpoint.LOG_START).get((topic, partition), 0)
        return 0

    def _refresh_end(self) -> bool:
        """Reader: looks how far the files reach now; True when the visible end moved."""
        before = self._visible
        if not self._segments:
            self._end = self._visible = self._log_start
            return False
        last = self._segments[-1]
        assert isinstance(last, GrowingSegment)
        last.refresh()
        self._end = max(self._end, self._log_start, last.next_offset())
        # Read after the size: a writer makes this file before its first write, so unsynced bytes imply the file.
        durable = checkpoint.read(self._fs, self.path, checkpoint.DURABLE_END)
        end = checkpoint.unpack_durable_end(durable) if durable is not None else None
        self._visible = max(self._visible, min(self._end, end) if end is not None else self._end)
        return self._visible != before

    @classmethod
    def _open_writer(cls, fs: FS, directory: str, config: LogConfig, policy: Durability, create: bool) -> Self:
        real = fs.real_path(directory)
        parent, name = os.path.split(real)
        topic, partition = parse_partition_name(name)
        exists = fs.is_directory(real)
        if not exists and not create:
            raise LogNotFoundError("there is no partition directory here; create=True makes one", path=directory)
        if not fs.is_directory(parent):
            if not create:
                raise LogNotFoundError("there is no log directory here", path=parent)
            _make_directories(fs, parent)
        lock = fs.lock(parent, name)
        log = cls(fs, directory, config, policy)
        log.path = real
        log._lock_held, log._parent, log._topic, log._partition = lock, parent, topic, partition
        try:
            if "was_clean" not in lock.shared:
                lock.shared["was_clean"] = fs.exists(os.path.join(parent, checkpoint.CLEAN_SHUTDOWN))
                if lock.shared["was_clean"]:  # gone before the first write, or Kafka would not check what we leave
                    fs.unlink(os.path.join(parent, checkpoint.CLEAN_SHUTDOWN))
                    fs.sync_dir(parent)
            if not exists:
                fs.mkdir(real)
                fs.sync_dir(parent)
            log._start_writing()
        except BaseException:
            log._closed = True
            lock.shared["was_clean"] = False
            lock.release()
            raise
        return log

    def _start_writing(self) -> None:
        fs, key = self._fs, (self._topic, self._partition)
        names = fs.listdir(self.path)
        bases = sorted(base for name in names if (base := base_offset_of(name)) is not None)
        swaps = [name for name in names if name.endswith(".swap")]
        if swaps:
            raise CorruptLogError(
                "a compaction was interrupted here; let Kafka open the directory once", path=self.path, found=swaps[0]
            )
        self._log_start = checkpoint.read_offsets(fs, self._parent, checkpoint.LOG_START).get(key, 0)
        recovery_point = checkpoint.read_offsets(fs, self._parent, checkpoint.RECOVERY_POINT).get(key, 0)
        while len(bases) > 1 and self._is_left_over(bases[-2], bases[-1]):
            self._remove_files(bases.pop())
            fs.sync_dir(self.path)
        created = not bases
        if created:
            if recovery_point > self._log_start:
                raise CorruptLogError(
                    "the segments of this partition are gone",
                    path=self.path,
                    expected=f"records up to offset {recovery_point}",
                    found="no .log file",
                )
            bases = [self._log_start]
        self._active = ActiveSegment(fs, self.path, bases[-1], self.config, create=created)
        self._segments = [*(Segment(fs, self.path, base) for base in bases[:-1]), self._active]
        self._bases = bases
        if created:
            fs.sync_dir(self.path)
        previous = checkpoint.read_policy(fs, self.path)
        recovery.check_sealed(fs, self._segments, recovery_point=recovery_point)
        self.recovery_report = recovery.recover(fs, self._active, recovery_point=recovery_point, policy=previous)
        self._end = max(self._active.last_offset + 1, bases[-1])
        self._log_start = max(self._log_start, bases[0])
        if self._log_start > self._end:
            raise CorruptLogError(
                "the log ends below its start offset",
                path=self.path,
                expected=f"at least {self._log_start}",
                found=self._end,
            )
        self._visible = self._end
        self._recovery_point = min(recovery_point, self._end)
        self._active.write_indexes(whole=True)
        checkpoint.write_policy(fs, self.path, self.durability)
        self._epochs = checkpoint.read_epochs(fs, self.path)
        self._leader_epoch = self._epochs[-1][0] if self._epochs else 0
        if not self._epochs:
            self._epochs = [(0, self._log_start)]
            checkpoint.write_epochs(fs, self.path, self._epochs)
        self._durable_handle = -1
        if self.durability.waits:
            path = os.path.join(self.path, checkpoint.DURABLE_END)
            self._durable_handle = fs.open(path, write=True, create=True)
            fs.pwrite(self._durable_handle, checkpoint.pack_durable_end(self._end), 0)
        else:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(self.path, checkpoint.DURABLE_END))
        self._scratch = bytearray(1 << 16)
        codec = target_codec(self.config, Codec.NONE)
        self._attributes = int(codec) | APPEND_TIME_BIT * self.config.is_append_time
        self._compress = compressor(codec, self.config)
        self._written_bytes = self._recovery_bytes = 0
        self._last_recovery_ms = fs.monotonic_ms()
        self._appends = self._rolls = 0
        self._opened_end = self._end
        self._batch_size = min(self.config.batch_size, self.config.segment_bytes)
        self._max_batch_bytes = min(self.config.max_message_bytes, self.config.segment_bytes)
        self._commit = GroupCommit(
            fs,
            self.path,
            durable_end=self._end,
            written=lambda: (self._written_bytes, self._end),
            sync=lambda: self._active.sync(),  # noqa: PLW0108  the active segment changes
            moved=self._moved_durable_end,
        )
        if previous is None and self._end > self._recovery_point:
            self._save_recovery_point_locked()  # what Kafka wrote was checked by Kafka's rules; from here on ours hold
        self._writable = True

    def _is_left_over(self, before: int, last: int) -> bool:
        """Whether the last segment is empty and what belongs into it stands in the one before: a roll came half way."""
        if self._fs.file_size(os.path.join(self.path, file_name(last, LOG))):
            return False
        return Segment(self._fs, self.path, before).next_offset() > last

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._writable and self._pid == self._fs.process_id():
            warnings.warn(f"log {self.path} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "writing" if self._writable else "read-only"
        return f"<Log {self.path} offsets {self.log_start_offset}..{self.high_watermark} {state}>"

    def close(self) -> None:
        """Flushes, writes what lets the next opening skip its check, and releases the lock. Closing twice is fine.

        Raises DurabilityUnknownError when the last sync fails; the log is closed all the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._writable or self._pid != self._fs.process_id():
                self._segments = []
                return
            try:
                if self._commit.failure is None:
                    self._finish_locked()
            finally:
                if self._commit.failure is not None:
                    self._lock_held.shared["was_clean"] = False
                # Files are closed when the last reader lets go of their segments, not under it.
                self._segments = []
                del self._active
                if self._durable_handle >= 0:
                    self._fs.close(self._durable_handle)
                self._lock_held.release()
        self._wake()

    def _finish_locked(self) -> None:
        fs, active_ = self._fs, self._active
        try:
            self._sync_locked()
            time_index = active_.time_index
            if active_.largest_timestamp_offset >= active_.base_offset:
                time_index.add(active_.largest_timestamp, active_.largest_timestamp_offset - active_.base_offset)
            active_.write_indexes(whole=True)
            self._save_recovery_point_locked()
            if self._durable_handle >= 0:  # all is on disk now: readers need no limit, and Kafka may append next
                fs.unlink(os.path.join(self.path, checkpoint.DURABLE_END))
            if self._lock_held.is_last and self._lock_held.shared.get("was_clean"):
                marker = b'{"version":0,"brokerEpoch":-1}'
                checkpoint.write(fs, self._parent, checkpoint.CLEAN_SHUTDOWN, marker)
        except BaseException:
            self._lock_held.shared["was_clean"] = False
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosedError("the log is closed", path=self.path)

    def _check_writable_locked(self) -> None:
        if self._closed:
            raise LogClosedError("the log is closed", path=self.path)
        if not self._writable:
            raise ReadOnlyLogError("the log was opened with read_only=True", path=self.path)
        if self._commit.failure is not None:
            raise LogFailedError(
                "an earlier write or sync failed; close the log and open it again", path=self.path
            ) from self._commit.failure
        if self._fs.process_id() != self._pid:
            raise ForkedWriterError(
                "the log was opened by a parent process; open it again in the child", path=self.path
            )

    # -- offsets -------------------------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read."""
        return self._log_start

    @property
    def log_end_offset(self) -> int:
        """The offset the next record will get."""
        return self._end

    @property
    def high_watermark(self) -> int:
        """The end of what readers see: what is on disk where appends wait for it, else the log end."""
        return self._visible

    @property
    def durable_end_offset(self) -> int:
        """All below it is on disk."""
        return self._commit.durable_end if self._writable else self._visible

    @property
    def last_stable_offset(self) -> int:
        """The end of what read_committed sees: the first offset of the oldest open transaction, or the high
        watermark.
        """
        return self._scan_transactions().last_stable_offset(self._visible)

    def _scan_transactions(self) -> Transactions:
        """Walks heads that were not walked before; the first call walks the whole log."""
        with self._moved:
            state = self._transactions
            if state is None:
                state = self._transactions = Transactions(next_offset=self._bases[0] if self._bases else 0)
            while state.next_offset < self._visible:
                at = max(0, bisect_right(self._bases, state.next_offset) - 1)
                before = state.next_offset
                for segment in self._segments[at:]:
                    position = segment.find(state.next_offset)
                    for facts, _, _ in segment.walk(position, crc=False):
                        state.add(facts[facts["last_offset"] < self._visible], _control_types(segment))
                if state.next_offset == before:
                    break
            return state

    # -- appending -----------------------------------------------------------------------------------------------

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
        durability: Level | None = None,
    ) -> Receipt:
        """Appends one record and returns when it is as safe as the log's policy, or durability, says.

        timestamp_ms: milliseconds since the epoch, now by default. durability: "disk" or "os" for this append alone.
        Raises InvalidRecordError, InvalidTimestampError and RecordTooLargeError before anything is written;
        DiskFullError after the write was cut back, so that it may be repeated; LogFailedError once the log is poisoned;
        DurabilityUnknownError when its sync failed.
        """
        return self._append_rows(((key, value, headers, timestamp_ms),), durability)

    def append_many(self, records: Iterable[Any], *, durability: Level | None = None) -> Receipt:
        """Appends (key, value[, headers[, timestamp_ms]]) tuples in order, as one or more batches.

        Batches are closed at batch.size bytes. All records are stored or none, unless together they exceed
        segment.bytes: then each segment's share is. An empty iterable stores nothing and returns offsets end and end
        - 1. Errors as append().
        """
        return self._append_rows(records if isinstance(records, (list, tuple)) else list(records), durability)

    def _append_rows(self, rows: Any, durability: Level | None) -> Receipt:
        config = self.config
        with self._lock:
            self._check_writable_locked()
            now_ms = self._fs.now_ms()
            size, batches = active.encode_records(
                self._scratch,
                rows,
                self._end,
                self._leader_epoch,
                now_ms,
                self._batch_size,
                self._max_batch_bytes,
                self._attributes,
                -1,
                -1,
                -1,
                self._compress,
                config.is_compacted,
            )
            first = self._end
            self._store_locked(memoryview(self._scratch)[:size], batches, now_ms, durability)
            last = self._end - 1
        return self._acknowledge(first, last, now_ms, durability)

    def append_columns(
        self, *, keys: Any = None, values: Any = None, timestamps_ms: Any = None, durability: Level | None = None
    ) -> Receipt:
        """Appends records given as columns, without making an object of each.

        keys, values: Arrow arrays of binary or string type, or (data, offsets) pairs: bytes or a uint8 array, and n + 1
        integer offsets into it. A missing column is null throughout. timestamps_ms: integers of shape (n,),
        datetime64, or an Arrow array of timestamps; now by default. Errors as append(); nothing is kept of the arrays.
        """
        if keys is None and values is None:
            raise InvalidRecordError("append_columns needs keys or values")
        key_column = None if keys is None else input_column(keys, "keys")
        value_column = None if values is None else input_column(values, "values")
        counts = {len(column[1]) - 1 for column in (key_column, value_column) if column is not None}
        if len(counts) != 1:
            raise InvalidRecordError("keys and values must have as many rows as each other", found=sorted(counts))
        count = counts.pop()
        times = None if timestamps_ms is None else input_timestamps(timestamps_ms, count)
        config = self.config
        with self._lock:
            self._check_writable_locked()
            now_ms = self._fs.now_ms()
            size, batches = active.encode_columns(
                self._scratch,
                key_column,
                value_column,
                times,
                count,
                self._end,
                self._leader_epoch,
                now_ms,
                self._batch_size,
                self._max_batch_bytes,
                self._attributes,
                -1,
                -1,
                -1,
                self._compress,
                config.is_compacted,
            )
            first = self._end
            self._store_locked(memoryview(self._scratch)[:size], batches, now_ms, durability)
            last = self._end - 1
        return self._acknowledge(first, last, now_ms, durability)

    def append_batch(self, data: Buffer, *, durability: Level | None = None) -> Receipt:
        """Appends batches that are encoded already, such as a client's or another log's, without decoding them for
        good.

        data: whole record batches, v2, or v0/v1 which become v2. They are checked as a Kafka leader checks a produce
        request and stored as they are, with this log's offsets and leader epoch; see recordbatch.prepare_append for
        what is refused. Errors as there and as append().
        """
        with self._lock:
            self._check_writable_locked()
            now_ms = self._fs.now_ms()
            raw, batches = prepare_append(
                data, base_offset=self._end, leader_epoch=self._leader_epoch, now_ms=now_ms, config=self.config
            )
            first = self._end
            self._store_locked(memoryview(raw), batches, now_ms, durability)
            last = self._end - 1
        return self._acknowledge(first, last, now_ms, durability)

    def _store_locked(
        self, data: memoryview, batches: list[EncodedBatch], now_ms: int, durability: Level | None
    ) -> None:
        """Writes whole batches in as few calls as the segments and the policy allow."""
        if not batches:
            return
        policy = self.durability
        if len(batches) == 1:
            self._write_locked(data, batches, now_ms)
        else:
            most = self.config.segment_bytes
            if policy.kind == "group":
                most = min(most, policy.max_bytes)
            elif policy.kind == "always":
                most = 1
            if len(data) <= most:
                self._write_locked(data, batches, now_ms)
            else:
                self._write_parts_locked(data, batches, now_ms, most)
        self._appends += 1
        if policy.kind == "os":
            self._show(self._end)
        elif policy.kind == "always":
            if durability != "os":
                self._sync_locked()
        elif policy.kind != "group":
            self._show(self._end)
            if policy.kind == "every":
                due = self._end - self._commit.durable_end >= policy.amount
            else:
                due = self._fs.monotonic_ms() - self._commit.last_sync_ms >= policy.amount
            if due:
                self._sync_locked()

    def _write_locked(self, data: memoryview, batches: list[EncodedBatch], now_ms: int) -> None:
        """Writes batches that go into one segment together, after rolling to a new one if they need it.

        On return the log ends behind them. On an error it is as before, or poisoned.
        """
        last_offset = batches[-1][2]
        max_timestamp = batches[0][3] if len(batches) == 1 else max(batch[3] for batch in batches)
        if self._active.is_full(len(data), max_timestamp, last_offset, self.config, now_ms):
            self._roll_locked()
        elif self.durability.kind == "group":
            unsynced = self._written_bytes - self._commit.synced_bytes
            if unsynced and unsynced + len(data) > self.durability.max_bytes:
                self._sync_locked()  # recovery relies on how much may be unsynced at once
        segment, start, end = self._active, self._active.size_bytes, self._end
        try:
            segment.append(data, batches)
            self._written_bytes += len(data)
            self._end = last_offset + 1
        except DiskFullError:
            raise
        except StorageWriteError as error:
            self._commit.poison(error)
            raise
        except BaseException:  # an interrupt between the write and here: nobody was told of these records
            self._take_back_locked(start, end)
            raise

    def _write_parts_locked(self, data: memoryview, batches: list[EncodedBatch], now_ms: int, most: int) -> None:
        """Writes more than a segment, or than the policy lets be unsynced, in parts of at most that."""
        if self._active.is_full(
            min(len(data), self.config.segment_bytes), batches[-1][3], batches[-1][2], self.config, now_ms
        ):
            self._roll_locked()
        segment, start, end = self._active, self._active.size_bytes, self._end
        stored = 0
        try:
            while stored < len(batches):
                first = batches[stored][0]
                stop = stored + 1
                while stop < len(batches) and batches[stop][0] + batches[stop][1] - first <= most:
                    stop += 1
                part = [(at - first, size, last, newest) for at, size, last, newest in batches[stored:stop]]
                self._write_locked(data[first : first + part[-1][0] + part[-1][1]], part, now_ms)
                stored = stop
                if self.durability.kind == "always" and stored < len(batches):
                    self._sync_locked()
        except DiskFullError as error:
            if self._active is segment and self._visible <= end:
                self._take_back_locked(start, end)
                raise
            # Parts are in segments that are sealed, or were seen, so they stay; say so, or a retry would repeat them.
            raise DiskFullError(
                f"no space left after the first {self._end - end} records were stored; append the rest again",
                path=error.path,
                offset=self._end,
            ) from error

    def _take_back_locked(self, size: int, end: int) -> None:
        """Removes what this call wrote to the active segment; nobody has seen it and no offset was given out."""
        try:
            self._active.cut(size)
            recovery.rebuild(self._active)
        except LogcoreError as error:
            self._commit.poison(error)
            raise
        self._end = end
        self._commit.set_back(min(end, self._commit.durable_end))

    def _acknowledge(self, first: int, last: int, now_ms: int, durability: Level | None) -> Receipt:
        """Waits for what was promised. Outside the append lock, so that others append meanwhile."""
        policy = self.durability
        if durability is None:
            reached: Level = "disk" if policy.waits else "os"
        elif durability in ("os", "disk"):
            reached = durability
        else:
            raise InvalidConfigError("durability of an append", expected="'os', 'disk' or None", found=repr(durability))
        commit = self._commit
        if reached == "disk" and commit.durable_end <= last:
            commit.wait(last + 1)
        return tuple.__new__(Receipt, (first, last, now_ms, reached))

    # -- syncing -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Returns when all that was appended before the call is on disk. Raises DurabilityUnknownError if the sync
        fails.
        """
        with self._lock:
            self._check_writable_locked()
            target = self._end
        if self._commit.durable_end < target:
            self._commit.wait(target)

    def _moved_durable_end(self, end: int) -> None:
        """What a sync brings: readers may see more, here and in other processes."""
        if self._durable_handle >= 0:
            self._fs.pwrite(self._durable_handle, checkpoint.pack_durable_end(end), 0)
            self._show(end)

    def _sync_locked(self) -> None:
        if self._commit.durable_end < self._end:
            self._commit.sync_now()
        if self._commit.synced_bytes - self._recovery_bytes > _RECOVERY_LAG_BYTES:
            self._save_recovery_point_locked()

    def _save_recovery_point_locked(self) -> None:
        point, synced_bytes = self._commit.durable_end, self._commit.synced_bytes
        checkpoint.write_offset(self._fs, self._parent, checkpoint.RECOVERY_POINT, self._topic, self._partition, point)
        self._recovery_point, self._recovery_bytes = point, synced_bytes
        self._last_recovery_ms = self._fs.monotonic_ms()

    def tick(self) -> None:
        """Does what is due: the sync of an interval policy, and the recovery point. Bounded work; call it from a
        timer.
        """
        with self._lock:
            self._check_writable_locked()
            now_ms = self._fs.monotonic_ms()
            if self.durability.kind == "interval" and now_ms - self._commit.last_sync_ms >= self.durability.amount:
                self._sync_locked()
            if self._commit.durable_end > self._recovery_point and now_ms - self._last_recovery_ms >= _RECOVERY_LAG_MS:
                self._save_recovery_point_locked()

    def _show(self, end: int) -> None:
        """Moves the visible end and wakes those who wait for it."""
        assert end >= self._visible, "what readers have seen is not taken back"
        self._visible = end
        if self._tailing:
            self._wake()

    def _wake(self) -> None:
        with self._moved:
            self._moved.notify_all()

    # -- segments ------------------------------------------------------------------------------------------------

    def roll(self) -> None:
        """Seals the active segment and starts a new one, if there is anything in it."""
        with self._lock:
            self._check_writable_locked()
            if self._active.size_bytes:
                self._roll_locked()

    def _roll_locked(self) -> None:
        """Old segment and its indexes on disk, then the new file and its name, then the first write: in this order."""
        old, path = self._active, os.path.join(self.path, file_name(self._end, LOG))
        with self._commit.held():
            try:
                sealed = old.seal()
                new = ActiveSegment(self._fs, self.path, self._end, self.config, create=True)
                self._fs.sync_dir(self.path)
                self._segments, self._bases = [*self._segments[:-1], sealed, new], [*self._bases, new.base_offset]
                self._active = new
                self._commit.advance(self._end, self._written_bytes)
            except BaseException as error:
                # Once the new file is there it says where it begins, and an append to the old segment would give
                # offsets out twice. Before that, lack of room or descriptors passes and the append may be repeated.
                if not isinstance(error, (DiskFullError, ResourceError)) or self._fs.exists(path):
                    self._commit.poison(error)
                raise
        self._rolls += 1
        self._save_recovery_point_locked()

    def delete_records(self, before_offset: int) -> int:
        """Moves the log start to before_offset and removes segments that lie wholly below it; returns the new start.

        The new start is on disk before the first file goes. Readers that map a removed file keep reading it. Raises
        OffsetOutOfRangeError for an offset above the high watermark or below 0; one below the log start changes
        nothing.
        """
        with self._lock:
            self._check_writable_locked()
            if not 0 <= before_offset <= self._visible:
                raise OffsetOutOfRangeError(
                    "cannot delete up to there",
                    path=self.path,
                    offset=before_offset,
                    expected=f"0 to {self._visible}",
                    found=before_offset,
                )
            if before_offset <= self._log_start:
                return self._log_start
            checkpoint.write_offset(
                self._fs, self._parent, checkpoint.LOG_START, self._topic, self._partition, before_offset
            )
            self._log_start = before_offset
            gone = max(0, bisect_right(self._bases, before_offset) - 1)
            removed = self._segments[:gone]
            self._segments, self._bases = self._segments[gone:], self._bases[gone:]
            for segment in removed:
                segment.keep()
                self._remove_files(segment.base_offset)
            if removed:
                self._fs.sync_dir(self.path)
            return self._log_start

    def _remove_files(self, base_offset: int) -> None:
        prefix = file_name(base_offset, ".")
        names = [name for name in self._fs.listdir(self.path) if name.startswith(prefix)]
        for name in sorted(
            names, key=lambda name: not name.endswith(LOG)
        ):  # the .log first: indexes alone mean nothing
            self._fs.rename(os.path.join(self.path, name), os.path.join(self.path, name + ".deleted"))
        for name in names:
            self._fs.unlink(os.path.join(self.path, name + ".deleted"))

    def truncate(self, offset: int) -> None:
        """Removes all records at and above offset; the next append gets it. A batch that offset lies in is cut, not
        lost.

        The rest of the log is untouched: later segments are removed from the last on, then the one with the cut is
        replaced by a copy of its front, so that a crash leaves a longer log or the one asked for. Iterators that were
        made before keep what they hold. Raises OffsetOutOfRangeError outside [log start, log end].
        """
        with self._lock:
            self._check_writable_locked()
            if not self._log_start <= offset <= self._end:
                raise OffsetOutOfRangeError(
                    "cannot truncate there",
                    path=self.path,
                    offset=offset,
                    expected=f"{self._log_start} to {self._end}",
                    found=offset,
                )
            if offset == self._end:
                return
            self._sync_locked()
            with self._commit.held():
                try:
                    self._truncate_locked(offset)
                except BaseException as error:  # half done: the files are sound, but memory does not mirror them
                    self._commit.poison(error)
                    raise

    def _truncate_locked(self, offset: int) -> None:
        fs = self._fs
        keep = max(0, bisect_right(self._bases, offset) - 1)
        # Below the cut everything is on disk, above it nothing is promised any more.
        if self._recovery_point > offset:
            checkpoint.write_offset(fs, self._parent, checkpoint.RECOVERY_POINT, self._topic, self._partition, offset)
            self._recovery_point = offset
        self._visible = min(self._visible, offset)
        if self._durable_handle >= 0:
            fs.pwrite(self._durable_handle, checkpoint.pack_durable_end(min(self._visible, offset)), 0)
        while len(self._segments) > keep + 1:
            last = self._segments[-1]
            self._segments, self._bases = self._segments[:-1], self._bases[:-1]
            last.keep()
            self._remove_files(last.base_offset)
            fs.sync_dir(self.path)
        cut = self._segments[-1]
        position = cut.find(offset)
        tail = b""
        batch = cut.batch(position)
        if batch is not None:
            tail = front_of(batch, offset, self.config)

        path = cut.path
        temporary = path + ".tmp"
        handle = fs.open(temporary, write=True, create=True)
        try:
            fs.truncate(handle, 0)
            at = 0
            while at < position:
                piece = cut.piece(at, min(_COPY_BYTES, position - at))
                part = piece.data[piece.at : min(piece.limit, piece.at + _COPY_BYTES, piece.at + position - at)]
                fs.pwrite(handle, part, at)
                at += len(part)
            if tail:
                fs.pwrite(handle, tail, position)
            fs.fsync(handle)
        finally:
            fs.close(handle)
        cut.keep()
        for suffix in (".index", ".timeindex", ".txnindex", ".snapshot"):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(cut.file(suffix))
        fs.rename(temporary, path)
        fs.sync_dir(self.path)
        self._active = ActiveSegment(fs, self.path, cut.base_offset, self.config, create=False)
        recovery.rebuild(self._active)
        self._active.write_indexes(whole=True)
        self._segments = [*self._segments[:-1], self._active]
        self._end = self._visible = offset
        self._commit.set_back(offset)
        self._transactions = None
        kept = [(epoch, start) for epoch, start in self._epochs if start < offset] or self._epochs[:1]
        if kept != self._epochs:
            self._epochs = kept
            self._leader_epoch = kept[-1][0]
            checkpoint.write_epochs(fs, self.path, kept)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(
        self,
        start: int,
        end: int | None = None,
        *,
        isolation: Isolation = "read_uncommitted",
        max_bytes: int | None = None,
    ) -> Iterator[Record]:
        """Records with start <= offset < end, in order; end is fixed by this call and by default the high watermark.

        isolation: "read_committed" stops at the last stable offset and leaves out aborted transactions. max_bytes: stop
        after about this many bytes of batches, but not before one batch. Control batches are never delivered. Every
        batch's CRC is checked. Raises OffsetOutOfRangeError at once; CorruptBatchError, InvalidRecordError,
        StorageReadError when the iteration gets there.
        """
        return itertools.chain.from_iterable(self._stretch(start, end, isolation).record_lists(max_bytes))

    def get(self, offset: int) -> Record:
        """The record at offset, or the next one where compaction or a marker left a gap.

        Raises OffsetOutOfRangeError when there is none before the high watermark.
        """
        if self._log_start <= offset < self._visible and not self._closed:
            slot = bisect_right(self._bases, offset) - 1
            if 0 <= slot < len(self._segments) - 1:  # sealed, so mapped: one call decodes the one record
                segment = self._segments[slot]
                found = active.read_one(
                    segment.view(), segment.start_position(offset), segment.size_bytes, offset, segment.path
                )
                if not isinstance(found, int) and found.offset < self._visible:
                    return found
        for record in self.read(offset):
            return record
        raise OffsetOutOfRangeError(
            "there is no record at or after this offset",
            path=self.path,
            offset=offset,
            expected=f"below {self._visible}",
        )

    def batches(self, start: int, end: int | None = None, *, max_bytes: int | None = None) -> Iterator[RecordBatch]:
        """Whole batches, control batches too, from the one that holds start to the one that holds end - 1.

        The bytes are borrowed from a mapped or just read part of a segment and stay valid as long as the batch is kept.
        max_bytes: stop before the batch that would exceed it, but not before the first. Errors as read(); CRCs are
        checked when a batch's records or columns are asked for.
        """
        return self._stretch(start, end).batches(max_bytes)

    def scan(
        self, start: int | None = None, end: int | None = None, *, isolation: Isolation = "read_uncommitted"
    ) -> Scan:
        """The records in [start, end) as columns: iterate for RecordColumns, or hand it to Arrow, polars, duckdb,
        pandas.

        start is by default the log start, end the high watermark; both are fixed by this call. See Scan. Errors as
        read().
        """
        first = self._log_start if start is None else start
        stretch = self._stretch(first, end, isolation)
        # Asked again for each reading, so that a scan that is kept does not read segments that are gone.
        return Scan(lambda: self._stretch(stretch.start, stretch.end, isolation))

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[Record]:
        """Records from start on, by default the present end, and then new ones as they come, each once and in order.

        Wakes on appends, also of another process. timeout: seconds without a new record after which the iteration ends;
        None waits for ever. Ends when the log is closed. Errors as read().
        """
        offset = self._visible if start is None else start
        self._stretch(offset, None)
        return self._tail(offset, timeout)

    def _tail(self, offset: int, timeout: float | None) -> Iterator[Record]:
        watch = None if self._writable else self._fs.watch(self.path)
        with self._moved:
            self._tailing += 1
        try:
            while True:
                bound = self._visible
                if offset < bound:
                    for records in self._stretch(offset, bound).record_lists():
                        yield from records
                    offset = bound
                if not self._await_visible(offset, timeout, watch):
                    return
        finally:
            with self._moved:
                self._tailing -= 1
            if watch is not None:
                watch.close()

    def _await_visible(self, offset: int, timeout: float | None, watch: Any) -> bool:
        if watch is None:
            with self._moved:
                return (
                    self._moved.wait_for(lambda: self._visible > offset or self._closed, timeout)
                    and self._visible > offset
                )
        deadline = None if timeout is None else self._fs.monotonic_ms() + int(timeout * 1000)
        while not self._closed:
            self.refresh()
            if self._visible > offset:
                return True
            left = None if deadline is None else (deadline - self._fs.monotonic_ms()) / 1000
            if left is not None and left <= 0:
                return False
            # Wakes at least each second, in case a file system tells nothing of another machine's writes.
            watch.wait(1.0 if left is None else min(1.0, left))
        return False

    def refresh(self) -> bool:
        """Of a log opened read-only: looks at what its writer has added since; True when the high watermark moved.

        Does nothing for a log open for writing, which knows.
        """
        self._check_open()
        if self._writable:
            return False
        with self._lock:
            before = self._visible
            names = self._fs.listdir(self.path)
            bases = sorted(base for name in names if (base := base_offset_of(name)) is not None)
            if bases != self._bases:
                self._list_segments()
            else:
                self._refresh_end()
            return self._visible != before

    def offset_for_timestamp(self, timestamp_ms: int) -> int | None:
        """Offset of the first record, in log order, that is as young as timestamp_ms; None when there is none.

        The rule is Kafka's (ListOffsets, storage format section 11.3): the first segment whose largest timestamp
        reaches it, and in it the first record that does.
        """
        self._check_open()
        for slot, segment in enumerate(self._segments):
            largest = segment.largest_timestamp if isinstance(segment, ActiveSegment) else segment.max_timestamp()
            if largest < timestamp_ms:
                continue
            start = segment.base_offset
            if isinstance(segment, ActiveSegment) or not isinstance(segment, GrowingSegment):
                slot = segment.time_index.find(timestamp_ms)
                if slot >= 0:
                    start += segment.time_index.entry(slot)[1]
            for batch in self._stretch(max(start, self._log_start), None).batches():
                if batch.max_timestamp >= timestamp_ms and not batch.is_control:
                    columns = batch.columns(max_size=self.config.max_decompressed_bytes)
                    late = columns.timestamps_ms >= timestamp_ms
                    late &= (columns.offsets >= self._log_start) & (columns.offsets < self._visible)
                    if late.any():
                        return int(columns.offsets[int(late.argmax())])
            return None
        return None

    def statistics(self) -> LogStatistics:
        """Counters and sizes; a frozen value."""
        sizes = 0
        for segment in self._segments:
            sizes += segment.size_bytes if isinstance(segment, GrowingSegment) else self._fs.file_size(segment.path)
        counters = (0,) * 5
        if self._writable:
            records = self._end - self._opened_end
            counters = (self._appends, records, self._written_bytes, self._commit.syncs, self._rolls)
        return LogStatistics(
            segments=len(self._segments),
            size_bytes=sizes,
            log_start_offset=self._log_start,
            high_watermark=self._visible,
            log_end_offset=self._end,
            durable_end_offset=self.durable_end_offset,
            appends=counters[0],
            records_appended=counters[1],
            bytes_appended=counters[2],
            syncs=counters[3],
            rolls=counters[4],
        )

    def _stretch(self, start: int, end: int | None, isolation: Isolation = "read_uncommitted") -> Stretch:
        """What lies between two offsets, as the log is now. Raises OffsetOutOfRangeError, LogClosedError."""
        self._check_open()
        if isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidConfigError(
                "isolation", expected="'read_uncommitted' or 'read_committed'", found=repr(isolation)
            )
        if not self._log_start <= start <= self._end:
            raise OffsetOutOfRangeError(
                "start lies outside the log",
                path=self.path,
                offset=start,
                expected=f"{self._log_start} to {self._end}",
                found=start,
            )
        committed = self._scan_transactions() if isolation == "read_committed" else None
        bound = self._visible if committed is None else committed.last_stable_offset(self._visible)
        bound = bound if end is None else min(end, bound)
        return Stretch.of(self._segments, self._bases, start, bound, committed, self.config.max_decompressed_bytes)


def _control_types(segment: Segment) -> Callable[[int], str]:
    def control_type(position: int) -> str:
        batch = segment.batch(position)
        return batch.control_type() if batch is not None else "UNKNOWN"

    return control_type


def _make_directories(fs: FS, path: str) -> None:
    """mkdir -p, each new name made durable in its parent."""
    parent = os.path.dirname(path)
    if not fs.is_directory(parent):
        _make_directories(fs, parent)
    with contextlib.suppress(FileExistsError):
        fs.mkdir(path)
    fs.sync_dir(parent)
