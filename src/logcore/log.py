"""One partition: a log that is appended to at its end and read from any offset.

The road of a record: append encodes a batch with the offset it will have, the active segment writes it with one system
call, and the visible end moves on. Back: the segment by base offset, its index, a walk over batch heads, and from the bytes
records, columns or Arrow.

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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

import attrs
import numpy as np

from logcore import checkpoint, recovery
from logcore.columns import ARROW_COLUMNS, RecordColumns, arrow_schema, input_column, input_timestamps
from logcore.compression import Codec
from logcore.config import Durability, LogConfig
from logcore.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    DurabilityUnknownError,
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
    StorageWriteError,
)
from logcore.fs import FS, OS, Lock
from logcore.kernels import Record, active, layout
from logcore.kernels.layout import APPEND_TIME_BIT, ROW_SIZE, Buffer, EncodedBatch
from logcore.producers import Transactions
from logcore.recordbatch import RecordBatch, compressor, front_of, prepare_append, target_codec
from logcore.segment import LOG, ActiveSegment, GrowingSegment, Segment, base_offset_of, file_name

if TYPE_CHECKING:
    import pyarrow

Isolation = Literal["read_uncommitted", "read_committed"]
Level = Literal["os", "disk"]

#: Records decoded at once for read(): few enough that they are still in the cache when they are used.
_OBJECT_BYTES: Final = 64 << 10
_OBJECT_ROWS: Final = 1024
#: Rows and bytes of one chunk of columns.
_COLUMN_ROWS: Final = 32_768
_COLUMN_BYTES: Final = 4 << 20
_PIECE_BYTES: Final = 1 << 20
#: The recovery point lags the durable end by at most this, which bounds what opening must check after a crash.
_RECOVERY_LAG_BYTES: Final = 64 << 20
_RECOVERY_LAG_MS: Final = 5_000
#: How often a thread about to sync lets others append first, while they do: 64 threads then share a sync instead of 2.
_GATHER_YIELDS: Final = 64

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

    Opening for writing takes Kafka's lock on the parent directory, checks the active segment, cuts a torn tail and reports
    it in log.recovery_report. Raises LogNotFoundError, LogLockedError, CorruptLogError, InvalidNameError,
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
                    if isinstance(kept, GrowingSegment):
                        kept.close()
                        kept = None
                    segments.append(kept or Segment(self._fs, self.path, base))
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
            for segment in log._segments:
                if isinstance(segment, GrowingSegment):
                    segment.close()
            lock.release()
            raise
        return log

    def _start_writing(self) -> None:
        fs, key = self._fs, (self._topic, self._partition)
        names = fs.listdir(self.path)
        bases = sorted(base for name in names if (base := base_offset_of(name)) is not None)
        swaps = [name for name in names if name.endswith(".swap")]
        if swaps:
            raise CorruptLogError("a compaction was interrupted here; let Kafka open the directory once", path=self.path, found=swaps[0])
        self._log_start = checkpoint.read_offsets(fs, self._parent, checkpoint.LOG_START).get(key, 0)
        recovery_point = checkpoint.read_offsets(fs, self._parent, checkpoint.RECOVERY_POINT).get(key, 0)
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
        previous = checkpoint.read_policy(fs, self.path) or Durability("os")
        self.recovery_report = recovery.recover(fs, self._active, recovery_point=recovery_point, policy=previous)
        self._end = max(self._active.last_offset + 1, bases[-1])
        self._log_start = max(self._log_start, bases[0])
        if self._log_start > self._end:
            raise CorruptLogError(
                "the log ends below its start offset", path=self.path, expected=f"at least {self._log_start}", found=self._end
            )
        self._durable = self._visible = self._end
        self._recovery_point = min(recovery_point, self._end)
        self._recovery_lag_bytes = 0
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
            fs.pwrite(self._durable_handle, checkpoint.pack_durable_end(self._durable), 0)
        else:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(self.path, checkpoint.DURABLE_END))
        self._failure: LogFailedError | None = None
        self._scratch = bytearray(1 << 16)
        codec = target_codec(self.config, Codec.NONE)
        self._attributes = int(codec) | APPEND_TIME_BIT * self.config.is_append_time
        self._compress = compressor(codec, self.config)
        self._commit = threading.Condition(threading.Lock())
        self._syncing = False
        self._group = 1
        self._waiting = 0
        self._unsynced_records = 0
        self._unsynced_bytes = 0
        self._last_sync_ms = self._last_recovery_ms = fs.monotonic_ms()
        self._appends = self._records = self._bytes = self._syncs = self._rolls = 0
        self._writable = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._writable and self._pid == self._fs.process_id():
            import warnings

            warnings.warn(f"log {self.path} was not closed", ResourceWarning, source=self)

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
                for segment in self._segments:
                    if isinstance(segment, GrowingSegment):
                        segment.close()
                return
            try:
                if self._failure is None:
                    self._finish_locked()
            finally:
                if self._failure is not None:
                    self._lock_held.shared["was_clean"] = False
                self._active.close()
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
        if self._failure is not None:
            raise LogFailedError(
                "an earlier write or sync failed; close the log and open it again", path=self.path
            ) from self._failure
        if self._fs.process_id() != self._pid:
            raise ForkedWriterError("the log was opened by a parent process; open it again in the child", path=self.path)

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
        return self._durable if self._writable else self._visible

    @property
    def last_stable_offset(self) -> int:
        """The end of what read_committed sees: the first offset of the oldest open transaction, or the high watermark."""
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

        Batches are closed at batch.size bytes. All records are stored or none, unless together they exceed segment.bytes:
        then each segment's share is. An empty iterable stores nothing and returns offsets end and end - 1. Errors as append().
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
                config.batch_size,
                config.max_message_bytes,
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
        integer offsets into it. A missing column is null throughout. timestamps_ms: integers of shape (n,), datetime64, or
        an Arrow array of timestamps; now by default. Errors as append(); nothing is kept of the arrays.
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
                config.batch_size,
                config.max_message_bytes,
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
        """Appends batches that are encoded already, such as a client's or another log's, without decoding them for good.

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
        size = len(data)
        if not batches:
            return
        policy = self.durability
        most = min(self.config.segment_bytes, policy.max_bytes if policy.kind == "group" else size)
        if policy.kind == "always" and len(batches) > 1:
            most = 1
        if size <= most or len(batches) == 1:
            self._store_part_locked(data, batches, now_ms)
        else:
            self._store_parts_locked(data, batches, now_ms, most)
        self._appends += 1
        if policy.kind == "always":
            if durability != "os":
                self._sync_locked()
        elif policy.kind == "every":
            if self._unsynced_records >= policy.amount:
                self._sync_locked()
        elif policy.kind == "interval" and self._fs.monotonic_ms() - self._last_sync_ms >= policy.amount:
            self._sync_locked()

    def _store_part_locked(self, data: memoryview, batches: list[EncodedBatch], now_ms: int) -> None:
        """Writes batches that go into one segment together, after rolling to a new one if they need it."""
        last_offset = batches[-1][2]
        size = len(data)
        policy, segment = self.durability, self._active
        if len(batches) == 1:
            max_timestamp = batches[0][3]
        else:
            max_timestamp = max(batch[3] for batch in batches)
        if segment.is_full(size, max_timestamp, last_offset, self.config, now_ms):
            self._roll_locked()
            segment = self._active
        elif policy.kind == "group" and self._unsynced_bytes and self._unsynced_bytes + size > policy.max_bytes:
            self._sync_locked()  # recovery relies on how much may be unsynced at once
        try:
            segment.append(data, batches)
        except DiskFullError:
            raise
        except (StorageWriteError, LogcoreError) as error:
            self._poison_locked(error)
            raise
        records = last_offset + 1 - self._end
        self._end = last_offset + 1
        self._unsynced_records += records
        self._unsynced_bytes += size
        self._recovery_lag_bytes += size
        self._records += records
        self._bytes += size
        if not policy.waits:
            self._show(self._end)

    def _store_parts_locked(self, data: memoryview, batches: list[EncodedBatch], now_ms: int, most: int) -> None:
        """Writes more than a segment, or than the policy lets be unsynced, in parts of at most that."""
        stored = 0
        start_offset = self._end
        start_size, start_segment = self._active.size_bytes, self._active
        if start_segment.is_full(min(len(data), self.config.segment_bytes), batches[-1][3], batches[-1][2], self.config, now_ms):
            self._roll_locked()
            start_size, start_segment = 0, self._active
        try:
            while stored < len(batches):
                first = batches[stored][0]
                stop = stored + 1
                while stop < len(batches) and batches[stop][0] + batches[stop][1] - first <= most:
                    stop += 1
                end = batches[stop - 1][0] + batches[stop - 1][1]
                part = [(at - first, size, last, newest) for at, size, last, newest in batches[stored:stop]]
                self._store_part_locked(data[first:end], part, now_ms)
                if self.durability.waits:
                    self._sync_locked()
                stored = stop
        except DiskFullError as error:
            if self._active is start_segment and self._visible <= start_offset:
                self._take_back_locked(start_offset, start_size)
                raise
            # Earlier parts are in segments that are sealed or seen, so they stay; say so, or a retry would repeat them.
            raise DiskFullError(
                f"no space left after the first {self._end - start_offset} records were stored; append the rest again",
                path=error.path,
                offset=self._end,
            ) from error

    def _take_back_locked(self, end: int, size: int) -> None:
        """Removes what this call wrote to the active segment; nobody has seen it and no offset was given out."""
        try:
            self._active.cut(size)
            recovery.rebuild(self._active)
        except LogcoreError as error:
            self._poison_locked(error)
            raise
        self._end = self._durable = end

    def _acknowledge(self, first: int, last: int, now_ms: int, durability: Level | None) -> Receipt:
        """Waits for what was promised. Outside the append lock, so that others append meanwhile."""
        policy = self.durability
        if durability is None:
            reached: Level = "disk" if policy.waits else "os"
        elif durability in ("os", "disk"):
            reached = durability
        else:
            raise InvalidConfigError("durability of an append", expected="'os', 'disk' or None", found=repr(durability))
        if reached == "disk" and self._durable <= last:
            self._wait_durable(last + 1)
        return tuple.__new__(Receipt, (first, last, now_ms, reached))

    # -- syncing -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Returns when all that was appended before the call is on disk. Raises DurabilityUnknownError if the sync fails."""
        with self._lock:
            self._check_writable_locked()
            target = self._end
        if self._durable < target:
            self._wait_durable(target)

    def _wait_durable(self, target: int) -> None:
        """Group commit: the first to come syncs at once, those who come meanwhile share the next sync."""
        commit = self._commit
        with commit:
            self._waiting += 1
            try:
                while self._durable < target:
                    if self._failure is not None:
                        raise DurabilityUnknownError("the sync failed that this append waited for", path=self.path) from self._failure
                    if not self._syncing:
                        self._syncing = True
                        break
                    commit.wait()
                else:
                    return
            finally:
                self._waiting -= 1
        self._lead(gather=True)
        if self._durable < target:
            self._wait_durable(target)

    def _lead(self, *, gather: bool) -> None:
        """Syncs the active segment as the one leader; called with _syncing claimed, without the append lock needed."""
        if gather and self._group > 1:
            # Threads that the last sync released are about to append again. Let them, as long as each look finds more.
            seen = -1
            for _ in range(_GATHER_YIELDS):
                waiting = self._waiting
                if waiting <= seen or waiting + 1 >= self._group:
                    break
                seen = waiting
                self._fs.yield_thread()
        error: LogcoreError | None = None
        segment, target, unsynced = self._active, self._end, self._unsynced_bytes
        records = self._unsynced_records
        try:
            segment.sync()
        except StorageWriteError as caught:
            error = caught
        finally:
            with self._commit:
                self._syncing = False
                self._group = self._waiting + 1
                if error is None:
                    self._synced(target, unsynced, records)
                else:
                    self._poison_locked(error)
                self._commit.notify_all()
        if error is not None:
            raise DurabilityUnknownError("a sync failed: what was written may or may not be on disk", path=self.path) from error
        if self._recovery_lag_bytes > _RECOVERY_LAG_BYTES:
            with self._lock:
                if not self._closed and self._recovery_lag_bytes > _RECOVERY_LAG_BYTES:
                    self._save_recovery_point_locked()

    def _synced(self, target: int, unsynced_bytes: int, records: int) -> None:
        """Notes a sync that has returned and began when the log ended at target."""
        self._syncs += 1
        if target > self._durable:
            self._durable = target
            self._unsynced_bytes = max(0, self._unsynced_bytes - unsynced_bytes)
            self._unsynced_records = max(0, self._unsynced_records - records)
            self._last_sync_ms = self._fs.monotonic_ms()
            if self._durable_handle >= 0:
                self._fs.pwrite(self._durable_handle, checkpoint.pack_durable_end(target), 0)
            if self.durability.waits:
                self._show(target)

    def _claim_sync(self) -> None:
        """Becomes the leader, waiting for the present one."""
        with self._commit:
            while self._syncing:
                self._commit.wait()
            self._syncing = True

    def _sync_locked(self) -> None:
        """Syncs all that was written, holding the append lock."""
        if self._durable < self._end:
            self._claim_sync()
            self._lead_locked()

    def _lead_locked(self) -> None:
        lag, self._recovery_lag_bytes = self._recovery_lag_bytes, 0  # _lead must not take the append lock again
        try:
            self._lead(gather=False)
        finally:
            self._recovery_lag_bytes = lag
        if lag > _RECOVERY_LAG_BYTES:
            self._save_recovery_point_locked()

    def _poison_locked(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = LogFailedError("a write or sync failed", path=self.path)
            self._failure.__cause__ = error

    def _save_recovery_point_locked(self) -> None:
        point = self._durable
        checkpoint.write_offset(self._fs, self._parent, checkpoint.RECOVERY_POINT, self._topic, self._partition, point)
        self._recovery_point = point
        self._recovery_lag_bytes = 0
        self._last_recovery_ms = self._fs.monotonic_ms()

    def tick(self, now_ms: int | None = None) -> None:
        """Does what is due: the sync of an interval policy, the recovery point, a roll by age. Bounded work.

        now_ms: wall clock for the roll, by default the real one. Call it from your own loop or timer.
        """
        with self._lock:
            self._check_writable_locked()
            elapsed = self._fs.monotonic_ms()
            if self.durability.kind == "interval" and elapsed - self._last_sync_ms >= self.durability.amount:
                self._sync_locked()
            if self._recovery_lag_bytes and self._durable > self._recovery_point and elapsed - self._last_recovery_ms >= _RECOVERY_LAG_MS:
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
        """Old segment and its indexes on disk, then the new file and its name, then the first write (the order matters)."""
        self._claim_sync()
        old = self._active
        unsynced, records = self._unsynced_bytes, self._unsynced_records
        try:
            sealed = old.seal()
            with contextlib.suppress(FileNotFoundError):  # left by a crash between creating it and its first write
                if not self._fs.file_size(os.path.join(self.path, file_name(self._end, LOG))):
                    self._fs.unlink(os.path.join(self.path, file_name(self._end, LOG)))
            new = ActiveSegment(self._fs, self.path, self._end, self.config, create=True)
            self._fs.sync_dir(self.path)
        except BaseException as error:
            with self._commit:
                self._syncing = False
                self._poison_locked(error)
                self._commit.notify_all()
            raise
        self._segments = [*self._segments[:-1], sealed, new]
        self._bases = [*self._bases, new.base_offset]
        self._active = new
        with self._commit:
            self._syncing = False
            self._synced(self._end, unsynced, records)
            self._commit.notify_all()
        self._rolls += 1
        old.close()
        self._save_recovery_point_locked()

    def delete_records(self, before_offset: int) -> int:
        """Moves the log start to before_offset and removes segments that lie wholly below it; returns the new start.

        The new start is on disk before the first file goes. Readers that map a removed file keep reading it. Raises
        OffsetOutOfRangeError for an offset above the high watermark or below 0; one below the log start changes nothing.
        """
        with self._lock:
            self._check_writable_locked()
            if not 0 <= before_offset <= self._visible:
                raise OffsetOutOfRangeError(
                    "cannot delete up to there", path=self.path, offset=before_offset, expected=f"0 to {self._visible}", found=before_offset
                )
            if before_offset <= self._log_start:
                return self._log_start
            checkpoint.write_offset(self._fs, self._parent, checkpoint.LOG_START, self._topic, self._partition, before_offset)
            self._log_start = before_offset
            gone = max(0, bisect_right(self._bases, before_offset) - 1)
            removed = self._segments[:gone]
            self._segments, self._bases = self._segments[gone:], self._bases[gone:]
            for segment in removed:
                self._remove_files(segment.base_offset)
            if removed:
                self._fs.sync_dir(self.path)
            return self._log_start

    def _remove_files(self, base_offset: int) -> None:
        prefix = file_name(base_offset, ".")
        names = [name for name in self._fs.listdir(self.path) if name.startswith(prefix)]
        for name in sorted(names, key=lambda name: not name.endswith(LOG)):  # the .log first: indexes alone mean nothing
            self._fs.rename(os.path.join(self.path, name), os.path.join(self.path, name + ".deleted"))
        for name in names:
            self._fs.unlink(os.path.join(self.path, name + ".deleted"))

    def truncate(self, offset: int) -> None:
        """Removes all records at and above offset; the next append gets it. A batch that offset lies in is cut, not lost.

        The rest of the log is untouched: later segments are removed from the last on, then the one with the cut is
        replaced by a copy of its front, so that a crash leaves a longer log or the one asked for. Iterators that were
        made before keep what they hold. Raises OffsetOutOfRangeError outside [log start, log end].
        """
        with self._lock:
            self._check_writable_locked()
            if not self._log_start <= offset <= self._end:
                raise OffsetOutOfRangeError(
                    "cannot truncate there", path=self.path, offset=offset, expected=f"{self._log_start} to {self._end}", found=offset
                )
            if offset == self._end:
                return
            self._sync_locked()
            self._claim_sync()
            try:
                self._truncate_locked(offset)
            except BaseException as error:
                self._poison_locked(error)
                raise
            finally:
                with self._commit:
                    self._syncing = False
                    self._commit.notify_all()

    def _truncate_locked(self, offset: int) -> None:
        fs = self._fs
        keep = max(0, bisect_right(self._bases, offset) - 1)
        # Below the cut everything is on disk, above it nothing is promised any more.
        if self._recovery_point > offset:
            checkpoint.write_offset(fs, self._parent, checkpoint.RECOVERY_POINT, self._topic, self._partition, offset)
            self._recovery_point = offset
        self._visible = min(self._visible, offset)
        if self._durable_handle >= 0:
            fs.pwrite(self._durable_handle, checkpoint.pack_durable_end(min(self._durable, offset)), 0)
        while len(self._segments) > keep + 1:
            last = self._segments[-1]
            self._segments, self._bases = self._segments[:-1], self._bases[:-1]
            if isinstance(last, GrowingSegment):
                last.close()
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
                piece = cut.piece(at, min(_PIECE_BYTES, position - at))
                part = piece.data[piece.at : min(piece.limit, piece.at + _PIECE_BYTES, piece.at + position - at)]
                fs.pwrite(handle, part, at)
                at += len(part)
            fs.pwrite(handle, tail, position) if tail else None
            fs.fsync(handle)
        finally:
            fs.close(handle)
        if isinstance(cut, GrowingSegment):
            cut.close()
        for suffix in (".index", ".timeindex", ".txnindex", ".snapshot"):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(cut.file(suffix))
        fs.rename(temporary, path)
        fs.sync_dir(self.path)
        self._active = ActiveSegment(fs, self.path, cut.base_offset, self.config, create=False)
        recovery.rebuild(self._active)
        self._active.write_indexes(whole=True)
        self._segments = [*self._segments[:-1], self._active]
        self._end = self._durable = self._visible = offset
        self._unsynced_bytes = self._unsynced_records = 0
        self._transactions = None
        kept = [(epoch, start) for epoch, start in self._epochs if start < offset] or self._epochs[:1]
        if kept != self._epochs:
            self._epochs = kept
            self._leader_epoch = kept[-1][0]
            checkpoint.write_epochs(fs, self.path, kept)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(
        self, start: int, end: int | None = None, *, isolation: Isolation = "read_uncommitted", max_bytes: int | None = None
    ) -> Iterator[Record]:
        """Records with start <= offset < end, in order; end is fixed by this call and by default the high watermark.

        isolation: "read_committed" stops at the last stable offset and leaves out aborted transactions. max_bytes: stop
        after about this many bytes of batches, but not before one batch. Control batches are never delivered. Every
        batch's CRC is checked. Raises OffsetOutOfRangeError at once; CorruptBatchError, InvalidRecordError,
        StorageReadError when the iteration gets there.
        """
        bound, committed = self._bounds(start, end, isolation)
        return itertools.chain.from_iterable(self._record_lists(start, bound, committed, max_bytes))

    def get(self, offset: int) -> Record:
        """The record at offset, or the next one where compaction or a marker left a gap.

        Raises OffsetOutOfRangeError when there is none before the high watermark.
        """
        if self._log_start <= offset < self._visible and not self._closed:
            slot = bisect_right(self._bases, offset) - 1
            if 0 <= slot < len(self._segments) - 1:  # sealed, so mapped: one call decodes the one record
                segment = self._segments[slot]
                found = active.read_one(segment.view(), segment.start_position(offset), segment.size_bytes, offset, segment.path)
                if type(found) is not int:
                    if found.offset < self._visible:
                        return found
        for record in self.read(offset):
            return record
        raise OffsetOutOfRangeError(
            "there is no record at or after this offset", path=self.path, offset=offset, expected=f"below {self._visible}"
        )

    def batches(self, start: int, end: int | None = None, *, max_bytes: int | None = None) -> Iterator[RecordBatch]:
        """Whole batches, control batches too, from the one that holds start to the one that holds end - 1.

        The bytes are borrowed from a mapped or just read part of a segment and stay valid as long as the batch is kept.
        max_bytes: stop before the batch that would exceed it, but not before the first. Errors as read(); CRCs are
        checked when a batch's records or columns are asked for.
        """
        bound, _ = self._bounds(start, end, "read_uncommitted")
        return self._batches(start, bound, max_bytes)

    def scan(self, start: int | None = None, end: int | None = None, *, isolation: Isolation = "read_uncommitted") -> Scan:
        """The records in [start, end) as columns: iterate for RecordColumns, or hand it to Arrow, polars, duckdb, pandas.

        start is by default the log start, end the high watermark; both are fixed by this call. See Scan. Errors as read().
        """
        first = self._log_start if start is None else start
        bound, committed = self._bounds(first, end, isolation)
        return Scan(self, first, bound, committed)

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[Record]:
        """Records from start on, by default the present end, and then new ones as they come, each once and in order.

        Wakes on appends, also of another process. timeout: seconds without a new record after which the iteration ends;
        None waits for ever. Ends when the log is closed. Errors as read().
        """
        offset = self._visible if start is None else start
        self._bounds(offset, None, "read_uncommitted")
        return self._tail(offset, timeout)

    def _tail(self, offset: int, timeout: float | None) -> Iterator[Record]:
        watch = None if self._writable else self._fs.watch(self.path)
        with self._moved:
            self._tailing += 1
        try:
            while True:
                bound = self._visible
                for records in self._record_lists(offset, bound, None, None):
                    yield from records
                offset = max(offset, bound)
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
                return self._moved.wait_for(lambda: self._visible > offset or self._closed, timeout) and self._visible > offset
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

        The rule is Kafka's (ListOffsets, storage format section 11.3): the first segment whose largest timestamp reaches
        it, and in it the first record that does.
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
            for batch in self._batches(max(start, self._log_start), self._visible, None):
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
        counters = (self._appends, self._records, self._bytes, self._syncs, self._rolls) if self._writable else (0,) * 5
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

    def _bounds(self, start: int, end: int | None, isolation: Isolation) -> tuple[int, Transactions | None]:
        self._check_open()
        if isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidConfigError("isolation", expected="'read_uncommitted' or 'read_committed'", found=repr(isolation))
        if not self._log_start <= start <= self._end:
            raise OffsetOutOfRangeError(
                "start lies outside the log", path=self.path, offset=start, expected=f"{self._log_start} to {self._end}", found=start
            )
        committed = self._scan_transactions() if isolation == "read_committed" else None
        bound = self._visible if committed is None else committed.last_stable_offset(self._visible)
        return (bound if end is None else min(end, bound)), committed

    def _runs(
        self, start: int, end: int, *, run_bytes: int, run_rows: int, committed: Transactions | None = None
    ) -> Iterator[Run | RecordBatch]:
        """All that lies between two offsets, in order: runs of plain batches, and each other batch by itself.

        A run ends before the batch that reaches end, so only lone batches hold records to leave out there; the first item
        may begin before start. The first run is one batch, because many reads want one record. With committed, aborted
        data is left out and there are no runs.
        """
        segments = self._segments
        first_bytes = 1
        for slot in range(max(0, bisect_right(self._bases, start) - 1), len(segments)):
            segment = segments[slot]
            if segment.base_offset >= end:
                return
            position = segment.find(start) if segment.base_offset < start else 0
            size = segment.size_bytes
            while position < size:
                piece = segment.piece(position, _PIECE_BYTES)
                data, at, limit, origin = piece.data, piece.at, piece.limit, piece.origin
                begin = at
                while at < limit:
                    stop, rows = at, 0
                    if committed is None:
                        stop, rows = active.plan_run(data, at, limit, run_rows, min(run_bytes, first_bytes), end)
                    if stop > at:
                        first_bytes = run_bytes
                        yield Run(data, at, stop, rows, origin, segment.path)
                        at = stop
                        continue
                    batch = RecordBatch.parse(data, at, limit, path=segment.path, origin=origin)
                    if batch is None and at == begin:  # larger than the piece, or not whole at all
                        batch = segment.batch(position)
                    if batch is None:
                        break
                    if batch.magic == 2 and batch.base_offset >= end:
                        return
                    if committed is None or not (
                        batch.is_transactional and committed.is_aborted(batch.producer_id, batch.base_offset)
                    ):
                        yield batch
                    if batch.next_offset >= end:
                        return
                    at += batch.size_bytes
                if at == begin:
                    raise CorruptBatchError(layout.WALK_REASONS[layout.WALK_SHORT], path=segment.path, position=position)
                position = origin + at

    def _record_lists(
        self, start: int, end: int, committed: Transactions | None, max_bytes: int | None
    ) -> Iterator[list[Record]]:
        if start >= end:
            return
        used = 0
        run_bytes = _OBJECT_BYTES if max_bytes is None else max(1, min(_OBJECT_BYTES, max_bytes))
        for item in self._runs(start, end, run_bytes=run_bytes, run_rows=_OBJECT_ROWS, committed=committed):
            if max_bytes is not None and used and used + item.size_bytes > max_bytes:
                return
            used += item.size_bytes
            if isinstance(item, Run):
                records = item.records()
                if records and records[0].offset < start:
                    records = [record for record in records if record.offset >= start]
            elif item.is_control:
                continue
            else:
                records = item.records(max_size=self.config.max_decompressed_bytes)
                if records and not (start <= records[0].offset and records[-1].offset < end):
                    records = [record for record in records if start <= record.offset < end]
            yield records

    def _column_runs(self, start: int, end: int, committed: Transactions | None) -> Iterator[RecordColumns]:
        if start >= end:
            return
        for item in self._runs(start, end, run_bytes=_COLUMN_BYTES, run_rows=_COLUMN_ROWS, committed=committed):
            if isinstance(item, Run):
                columns = item.columns()
            elif item.is_control:
                continue
            else:
                columns = item.columns(max_size=self.config.max_decompressed_bytes)
            columns = columns.between(start, end)
            if len(columns):
                yield columns

    def _batches(self, start: int, end: int, max_bytes: int | None) -> Iterator[RecordBatch]:
        if start >= end:
            return
        used = 0
        for item in self._runs(start, end, run_bytes=_COLUMN_BYTES, run_rows=_COLUMN_ROWS):
            for batch in item.batches() if isinstance(item, Run) else (item,):
                if max_bytes is not None and used and used + batch.size_bytes > max_bytes:
                    return
                used += batch.size_bytes
                yield batch


@attrs.frozen
class Run:
    """Consecutive plain batches in borrowed bytes: data[at:stop], which is byte origin + at of the file at path."""

    data: memoryview
    at: int
    stop: int
    rows: int
    origin: int
    path: str

    @property
    def size_bytes(self) -> int:
        return self.stop - self.at

    def records(self) -> list[Record]:
        with self._placed():
            return active.decode_objects(self.data, self.at, self.stop, self.path)

    def columns(self) -> RecordColumns:
        block = np.empty(self.rows * ROW_SIZE, np.uint8)
        with self._placed():
            rows = active.decode_columns(self.data, self.at, self.stop, block, self.rows, self.path)
        assert rows == self.rows, (rows, self.rows)
        return RecordColumns.from_block(self.data, block, rows)

    def batches(self) -> Iterator[RecordBatch]:
        at = self.at
        while at < self.stop:
            batch = RecordBatch.parse(self.data, at, self.stop, path=self.path, origin=self.origin)
            assert batch is not None, "a run holds whole batches"
            yield batch
            at += batch.size_bytes

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """Turns positions in the bytes read into positions in the file."""
        try:
            yield
        except LogcoreError as error:
            if error.position is not None:
                error.position += self.origin
            raise


class Scan:
    """The records between two offsets as columns, decoded as they are asked for; may be read several times.

    Iterating gives RecordColumns, some thousand rows each, over borrowed memory that stays valid as long as they are kept.
    polars.from_arrow, duckdb, pandas and pyarrow.table take the object itself: it has __arrow_c_stream__ (needs pyarrow).
    """

    def __init__(
        self, log: Log, start: int, end: int, committed: Transactions | None, columns: tuple[str, ...] = ARROW_COLUMNS
    ) -> None:
        self._log, self._start, self._end, self._committed = log, start, end, committed
        self._columns = columns

    def __repr__(self) -> str:
        return f"<Scan {self._log.path} offsets {self._start}..{self._end} columns={list(self._columns)}>"

    def select(self, *columns: str) -> Scan:
        """The same scan giving only these Arrow columns: offset, timestamp, key, value, headers."""
        arrow_schema(columns)
        return Scan(self._log, self._start, self._end, self._committed, columns)

    def __iter__(self) -> Iterator[RecordColumns]:
        self._log._check_open()
        return self._log._column_runs(self._start, self._end, self._committed)

    def to_reader(self) -> pyarrow.RecordBatchReader:
        """A pyarrow.RecordBatchReader that decodes as it is read."""
        import pyarrow as pa

        batches = (columns.to_arrow(self._columns) for columns in self)
        return pa.RecordBatchReader.from_batches(arrow_schema(self._columns), batches)

    def to_table(self) -> pyarrow.Table:
        """All of it as one pyarrow.Table."""
        return self.to_reader().read_all()

    def __arrow_c_schema__(self) -> object:
        return arrow_schema(self._columns).__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)


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
