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
import operator
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn, Self

import attrs
import numpy as np

from logcore import checkpoint, retention
from logcore.checkpoint import Notes
from logcore.claim import Claim, claim_directory, make_directories
from logcore.config import INT32_MAX, INT64_MAX, KEEPS_ALL, Durability, LogConfig
from logcore.errors import (
    CompactionAbandonedError,
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    ForkedWriterError,
    InvalidConfigError,
    InvalidNameError,
    InvalidRecordError,
    LogClosedError,
    LogcoreError,
    LogFailedError,
    LogLockedError,
    LogNotFoundError,
    OffsetOutOfRangeError,
    ReadOnlyLogError,
    ResourceError,
    SegmentTooSmallError,
    StorageReadError,
    StorageWriteError,
)
from logcore.format.columns import input_column, input_timestamps
from logcore.format.compression import Codec
from logcore.fs import FS, OS
from logcore.index import AbortedTransaction
from logcore.kernels import kernel, layout
from logcore.kernels.layout import APPEND_TIME_BIT, Buffer, EncodedBatch
from logcore.names import (
    CLEANED,
    LOG,
    SEAL,
    file_name,
    parse_partition_name,
)
from logcore.notices import ERROR, INFO, tell
from logcore.partition import epochs, gaps, recovery, seals, transactions
from logcore.partition.following import control_types_in, encoded, follow, is_marker
from logcore.partition.gaps import Gaps
from logcore.partition.groupcommit import GroupCommit
from logcore.partition.noted import noted_gaps
from logcore.partition.opening import Opened, Place, open_partition
from logcore.partition.producers import SequencedBatch
from logcore.partition.producerstate import ProducerState
from logcore.partition.scan import slot_of
from logcore.partition.transactions import Transactions
from logcore.reader import Isolation, LogReader
from logcore.recordbatch import (
    check_timestamps,
    compressor,
    empty_batch,
    front_of,
    prepare_append,
    target_codec,
    transaction_marker,
)
from logcore.segment import ActiveSegment, GrowingSegment, Segment
from logcore.table import Table

if TYPE_CHECKING:
    from datetime import datetime

Level = Literal["os", "disk"]
OnCorruption = Literal["fail", "quarantine"]

#: The recovery point lags the durable end by at most this, which bounds what opening must check after a crash.
_RECOVERY_LAG_BYTES: Final = 64 << 20
_RECOVERY_LAG_MS: Final = 5_000
#: Under policies whose appends wait, tick() syncs what is unsynced for longer than this.
_LEFT_BEHIND_MS: Final = 100
_NO_LIMIT: Final = 1 << 63
_INT16_MAX: Final = 2**15 - 1
#: What Python may hold in a path and no file system can: surrogates other than those that stand for undecodable bytes.
_SURROGATE: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")


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
    """Counters since the log was opened, and its present shape.

    segments: .log files. size_bytes: of all of them. The offsets are those of the log's properties. appends: calls
    that stored something. syncs: those that succeeded. rolls: segments begun. records_appended, bytes_appended: of the
    batches written. All counters are 0 for a log opened read-only.
    """

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


def open_log(
    path: str | os.PathLike[str],
    *,
    create: bool = False,
    read_only: bool = False,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
    on_corruption: OnCorruption = "fail",
    replicated: bool = False,
    fs: FS = OS,
) -> Log:
    """Opens one partition directory, such as data/orders-0.

    create: make it if it is not there. read_only: take no lock and write nothing; works on any partition directory that
    Kafka or logcore wrote, also while its writer runs. config: settings by Kafka's names; unless retention.ms or
    retention.bytes are given, nothing is deleted by time or size. durability: see Durability.

    on_corruption: what to do about damage that no crash explains. "fail" raises CorruptLogError and changes nothing.
    "quarantine" opens all the same: log.recovery_report.damage says which offsets raise errors when they are read,
    appends go on in a new segment, and the damaged file stays as it is. Where nothing whole follows the damage, it
    cannot be known which offsets were given out; appends then raise LogFailedError (and `logcore recover` makes a copy
    that takes them).

    replicated: the log has copies, so the high watermark is moved by advance_high_watermark() and not by durability. It
    begins where the last writer left it: at what `logcore.durable` and `replication-offset-checkpoint` say, or at the
    log end when this library wrote the log without copies. A reader needs no such word, and gets InvalidConfigError.

    Opening for writing takes Kafka's lock on the parent directory, checks the active segment, cuts a torn tail and
    reports it in log.recovery_report. Raises LogNotFoundError, LogLockedError, CorruptLogError, InvalidNameError,
    InvalidConfigError; StorageReadError, StorageWriteError, DiskFullError and ResourceError when the system fails.
    """
    directory = check_path(path)
    settings = LogConfig.parse({**KEEPS_ALL, **(config or {})})
    policy = Durability.parse(durability)
    if read_only:
        if create:
            raise InvalidConfigError("a log cannot be created read-only")
        if replicated:
            raise InvalidConfigError("replicated=True is for a writer; a reader finds the high watermark by itself")
        return Log._open_reader(fs, directory, settings)
    keeps_damage = check_on_corruption(on_corruption)
    real = fs.real_path(directory)
    parent, name = os.path.split(real)
    key = parse_partition_name(name)
    exists = fs.is_directory(real)
    if not exists and not create:
        raise LogNotFoundError("there is no partition directory here; create=True makes one", path=directory)
    if not fs.is_directory(parent):
        make_directories(fs, parent)
    claim = claim_directory(fs, parent, name)
    log: Log | None = None
    try:
        if not exists:
            fs.mkdir(real)
            fs.sync_dir(parent)
        place = Place(
            fs=fs,
            parent=parent,
            path=real,
            key=key,
            checkpoints=claim.checkpoints,
            config=settings,
            durability=policy,
            is_clean=claim.is_clean,
            keeps_damage=keeps_damage,
            is_replicated=replicated,
        )
        opened = open_partition(place)
        log = Log(fs, real, settings, policy, claim=claim, opened=opened, is_replicated=replicated)
        log.start(opened)
    except BaseException:
        try:
            if log is not None:
                log.abandon()
            claim.fail()
        finally:  # whatever else fails, such as for lack of memory
            claim.release()
        raise
    return log


def check_on_corruption(choice: object) -> bool:
    """Whether damage is to be kept. Raises InvalidConfigError."""
    if choice not in ("fail", "quarantine"):
        raise InvalidConfigError("on_corruption", expected="'fail' or 'quarantine'", found=repr(choice))
    return choice == "quarantine"


def check_path(path: str | os.PathLike[str]) -> str:
    """The path as text. Raises InvalidNameError for what no file system can hold."""
    directory = os.fspath(path)
    if not isinstance(directory, str) or "\0" in directory or _SURROGATE.search(directory):
        raise InvalidNameError("not a path that a file system can hold", found=repr(directory))
    return directory


class Log(LogReader):
    """One partition directory, open for appending and reading, or for reading only. Made by logcore.open().

    All methods may be called from several threads. A with block closes it. Reading is documented in LogReader.
    """

    def __init__(
        self,
        fs: FS,
        path: str,
        config: LogConfig,
        policy: Durability,
        *,
        claim: Claim | None = None,
        opened: Opened | None = None,
        is_replicated: bool = False,
    ) -> None:
        """Not for users. claim, opened: of a log that is to be written; start() then begins."""
        super().__init__(fs, path, config, policy)
        #: What opening found and mended; None for a log opened read-only.
        self.recovery_report: recovery.RecoveryReport | None = None
        #: Who moves the high watermark: advance_high_watermark() alone, or durability.
        self.is_replicated = is_replicated
        #: What to call when, after rest(), there may be something for tick() to do. Set by the LogDir before others
        #: know the log; called under the log's lock, so it may not wait.
        self.on_stir: Callable[[], None] | None = None
        #: Whether appends are refused, with DiskFullError, because the disk is nearly full. Set by the LogDir.
        self.is_held = False
        self._epochs: list[epochs.Entry] = []  # replaced whole, under the lock; empty for a reader, who asks the file
        if claim is not None and opened is not None:
            self._take_opened(claim, opened)

    def _take_opened(self, claim: Claim, opened: Opened) -> None:
        """The state of a writer that has done nothing yet. What is set here changes under the log's lock."""
        fs = self._fs
        self.recovery_report = opened.report
        self._claim = claim
        self._parent, name = os.path.split(self.path)
        self._key = parse_partition_name(name)
        self._segments = opened.segments
        self._active = opened.active
        self._files = opened.files
        self._log_start = opened.log_start
        self._end = opened.end
        self._visible = opened.end
        if self.is_replicated:
            self._visible = self._noted_high_watermark(opened)
        self._recovery_point = opened.recovery_point
        self._epochs = opened.epochs
        self._leader_epoch = opened.epochs[-1][0]
        self._producers = ProducerState(fs, self.path, lambda: (self._segments, self._end))
        self._followed: Transactions | None = None  # those of the whole log, once a leader's marker was stored
        self._notes = opened.notes  # as they are on disk
        self._gaps = Gaps(opened.gaps)
        self._left_below = opened.left_below
        self._rewriter: Rewriting | None = None  # who has .cleaned files in the directory
        self._durable_handle = -1
        self._scratch = bytearray(1 << 16)
        self._retention: retention.Policy = retention.kafka_rules
        self._committed: Callable[[], Mapping[str, int]] = dict
        self._level: Level = "disk" if self.durability.waits else "os"
        # What may be unsynced beside the next write; recovery tells damage from a torn flush by it.
        self._unsynced_limit = {"group": self.durability.max_bytes, "always": 0}.get(self.durability.kind, _NO_LIMIT)
        self._written_bytes = 0
        self._recovery_bytes = 0  # of these, below the recovery point
        self._last_recovery_ms = fs.monotonic_ms()
        self._last_sync_ms = self._last_recovery_ms
        self._clocks = retention.Clocks(fs.now_ms(), self._last_sync_ms)
        self._next_retention_ms = self._last_sync_ms + retention.FIRST_CHECK_MS
        self._is_resting = False
        self._appends = 0
        self._rolls = 0
        self._is_midway = False  # the files may have more than is known here: set and looked at where memory may lack
        self._opened_end = opened.end
        self._apply_config()
        self._commit = GroupCommit(
            fs,
            self.path,
            durable_end=opened.end,
            written=lambda: (self._written_bytes, self._end),
            sync=lambda: fs.fdatasync(self._active.handle),
            moved=self._moved_durable_end,
            failed=self._note_failure,
        )

    def _noted_high_watermark(self, opened: Opened) -> int:
        """Where the high watermark of a replicated log begins: where it was, as far as is known, for what a killed
        writer has shown stays shown. Without copies all was shown.
        """
        if opened.notes.policy is not None and not opened.notes.replicated:
            return opened.end
        noted = self._own_checkpoint(checkpoint.HIGH_WATERMARK)
        shown = checkpoint.read_shown_end(self._fs, self.path)
        if shown is not None and shown.is_replicated:
            noted = max(noted, shown.offset)
        if noted <= opened.log_start:
            # What was deleted lay below it, and it is where a batch ends.
            _, noted = self._batch_around(opened.log_start)
        return min(opened.end, noted)

    def _batch_around(self, offset: int) -> tuple[int, int]:
        """(base, end) of the batch that an offset lies inside of; the offset twice where one batch ends there."""
        segment = self._segments[max(0, slot_of(self._segments, offset))]
        batch = segment.batch(segment.find(offset))
        if batch is None or not batch.base_offset < offset <= batch.last_offset:
            return offset, offset
        return batch.base_offset, batch.last_offset + 1

    # -- opening and closing -------------------------------------------------------------------------------------

    def start(self, opened: Opened) -> None:
        """Begins to write; for open_log() alone."""
        # The visible end is on disk before the notes: after a crash between the two, these would tell the next opening
        # of a high watermark that is nowhere.
        self._durable_handle = self._open_durable_end()
        self._note(opened.own_notes)
        lost = opened.lost
        if lost is not None:
            self._commit.poison(CorruptLogError(lost.reason, path=lost.path, position=lost.position))
        elif opened.is_damaged_at_its_end:
            self._writable = True
            self._roll_locked()
        elif self._end > self._recovery_point:
            # What recovery kept is on disk now, so damage to it later is damage: not to be judged once more as a torn
            # tail, by the rules of Kafka or of a looser policy that this opening may have brought.
            self._save_recovery_point_locked()
        self._writable = True

    def abandon(self) -> None:
        """Lets go of a log that could not be opened; for open_log() alone."""
        self._closed = True
        if self._durable_handle >= 0:
            self._fs.close(self._durable_handle)

    def _open_durable_end(self) -> int:
        """The handle of the file that tells readers how far they may look; -1 under a policy that needs none."""
        fs, path = self._fs, os.path.join(self.path, checkpoint.DURABLE_END)
        if not self.durability.waits and not self.is_replicated:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(path)
            return -1
        content = self._packed_end()
        if not fs.exists(path):
            # It gets its name when it is whole: readers look meanwhile, and to them an empty one is damaged. It is on
            # disk, too: after a crash a log without it is one that hides nothing.
            checkpoint.write(fs, self.path, checkpoint.DURABLE_END, content, reserve=self._parent)
            return fs.open(path, write=True)
        handle = fs.open(path, write=True)
        try:
            fs.pwrite(handle, content, 0)
            fs.fsync(handle)
        except BaseException:
            fs.close(handle)
            raise
        return handle

    def _packed_end(self) -> bytes:
        return checkpoint.pack_shown_end(self._visible, is_replicated=self.is_replicated)

    def _note(self, notes: Notes) -> None:
        """What the next opening is to know, on disk before it is true."""
        if notes != self._notes:
            checkpoint.write_notes(self._fs, self.path, notes, reserve=self._parent)
            self._notes = notes

    def _expect_producers_locked(self) -> None:
        self._note(attrs.evolve(self._notes, producers=True))

    def reconfigure(self, config: Mapping[str, object] | LogConfig) -> None:
        """Sets all settings anew, those not given to their defaults; the next append follows them.

        Raises InvalidConfigError before any effect.
        """
        settings = config if isinstance(config, LogConfig) else LogConfig.parse(config)
        with self._lock:
            self._check_writable_locked()
            self.config = settings
            self._active.reconfigure(settings)
            self._apply_config()
            self._stir_locked()

    def _apply_config(self) -> None:
        """What appending takes from the settings, worked out once."""
        config = self.config
        codec = target_codec(config, Codec.NONE)
        attributes = int(codec) | APPEND_TIME_BIT * config.is_append_time
        max_bytes = min(config.max_message_bytes, config.segment_bytes)
        compress, require_key = compressor(codec, config), config.is_compacted
        no_producer = (-1, -1, -1)
        # What the encoders take behind the offset, epoch and time of an append: for one record, and for many.
        self._encoding_one = (max_bytes, attributes, compress, require_key)
        batch_bytes = min(config.batch_size, config.segment_bytes)
        self._encoding = (batch_bytes, max_bytes, attributes, *no_producer, compress, require_key)
        self._is_os = self.durability.kind == "os" and config.flush_messages == INT64_MAX and not self.is_replicated
        limits = (config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms)
        self._checks_times = min(limits) < INT64_MAX and not config.is_append_time

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._writable and self._fs.forks == self._forks:
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
            if not self._writable or self._fs.forks != self._forks:
                self._segments = []
                return
            try:
                if self._commit.failure is None:
                    self._finish_locked()
            finally:
                try:
                    if self._commit.failure is not None:
                        self._claim.fail()
                    self._commit.poison(LogClosedError("the log was closed meanwhile", path=self.path))
                    with self._commit.held(failed=True):  # a sync under way in another thread still uses the files
                        handle, self._durable_handle = self._durable_handle, -1
                        if handle >= 0:
                            self._fs.close(handle)
                        # Segments are closed when the last reader lets go of them, not under it.
                        self._segments = []
                        del self._active
                finally:  # whatever else fails, such as for lack of memory
                    self._claim.release()
        self._wake()

    def _finish_locked(self) -> None:
        fs, active_ = self._fs, self._active
        try:
            self._sync_locked()
            time_index = active_.time_index
            time_index.add(active_.largest_timestamp, active_.largest_timestamp_offset - active_.base_offset)
            try:
                if active_.was_cut_back:
                    fs.fsync(active_.handle)
                # Kafka believes the indexes of a clean directory, and so do we.
                is_clean = self._claim.is_clean
                active_.write_indexes(whole=True, sync=is_clean)
                if is_clean and self._notes.producers:
                    fs.sync_dir(self.path)  # the name of an index of aborted transactions
                if self._producers.is_known:
                    self._producers.save(self._producers.known())
            except (DiskFullError, StorageReadError, StorageWriteError, ResourceError):
                self._claim.fail()
            if not self._claim.hand_over(self._key, self._commit.durable_end):
                self._save_recovery_point_locked()
            if self.is_replicated:
                with contextlib.suppress(DiskFullError, ResourceError):  # a late one is moved up by the leader again
                    self._set_checkpoint(checkpoint.HIGH_WATERMARK, self._visible, may_use_reserve=True)
            elif self._durable_handle >= 0:  # all is on disk now: readers need no limit, and Kafka may append next
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(os.path.join(self.path, checkpoint.DURABLE_END))
            self._files.unlink_retired(None)
            self._claim.leave()
        except BaseException:
            self._claim.fail()
            raise

    def _check_writable_locked(self) -> None:
        if self._closed or not self._writable or self._commit.failure or self._fs.forks != self._forks:
            self._refuse_locked()
        if self._is_midway:
            self._refuse_midway_locked()

    def _refuse_midway_locked(self) -> NoReturn:
        """A write or a roll ended half way, and there was not even the memory to call for taking it back."""
        self._commit.poison(MemoryError("in the middle of a write"))
        self._refuse_locked()

    def _refuse_locked(self) -> NoReturn:
        if self._closed:
            raise LogClosedError("the log is closed", path=self.path)
        if not self._writable:
            raise ReadOnlyLogError("the log was opened with read_only=True", path=self.path)
        if self._commit.failure is not None:
            is_damaged = isinstance(self._commit.failure.__cause__, CorruptLogError)
            advice = (
                "the end of the log is damaged; `logcore recover` copies what is whole"
                if is_damaged
                else "an earlier write or sync failed; close the log and open it again"
            )
            raise LogFailedError(advice, path=self.path) from self._commit.failure
        raise ForkedWriterError("the log was opened by a parent process; open it again in the child", path=self.path)

    # -- offsets -------------------------------------------------------------------------------------------------

    @property
    def durable_end_offset(self) -> int:
        """All below it is on disk. Of a log opened read-only: its high watermark, which under `os`, `every` and
        `interval` may not be on disk yet.
        """
        return self._commit.durable_end if self._writable else self._visible

    @property
    def recovery_point(self) -> int:
        """Below it, opening the log believes what is on disk without looking at it."""
        return self._recovery_point if self._epochs else self._checkpoint(checkpoint.RECOVERY_POINT)

    @property
    def written_bytes(self) -> int:
        """Bytes of the batches appended since the log was opened."""
        return self._written_bytes

    @property
    def has_failed(self) -> bool:
        """Whether a write or sync has failed, so that only opening the log anew, which checks it, lets it go on."""
        return self._writable and self._commit.failure is not None

    @property
    def leader_epoch(self) -> int:
        """The epoch that appended batches are stamped with."""
        return self._known_epochs()[-1][0]

    def _known_epochs(self) -> list[epochs.Entry]:
        return (
            self._epochs
            or checkpoint.read_epochs(self._fs, self.path)
            or epochs.walked(self._segments, self._log_start)
        )

    def end_of_epoch(self, leader_epoch: int) -> tuple[int, int]:
        """(epoch, end offset): the largest epoch at or below leader_epoch, and where it ends; (-1, -1) when unknown.

        Storage format section 11.4, Kafka's OffsetForLeaderEpoch.
        """
        return epochs.end_of(self._known_epochs(), leader_epoch, self._end)

    def begin_epoch(self, leader_epoch: int) -> None:
        """What is appended from now on is stamped with leader_epoch: a new leader took over.

        Raises OffsetOutOfRangeError for an epoch below the present one.
        """
        with self._lock:
            self._check_writable_locked()
            leader_epoch = operator.index(leader_epoch)
            if not self._leader_epoch <= leader_epoch <= INT32_MAX:
                raise OffsetOutOfRangeError(
                    "not a new leader epoch",
                    path=self.path,
                    expected=f"{self._leader_epoch} to {INT32_MAX}",
                    found=leader_epoch,
                )
            if leader_epoch > self._leader_epoch:
                self._set_epochs(epochs.assign(self._epochs, leader_epoch, self._end))

    def truncate_to_epoch(self, leader_epoch: int, end_offset: int) -> int:
        """Cuts what this log has and a leader has not, by the leader's answer to end_of_epoch(); returns the new end.

        leader_epoch, end_offset: where the leader says that the last epoch known to both has ended. Epochs that began
        above it are forgotten: what comes in their place is stamped with the leader's. Errors as truncate().
        """
        with self._lock:
            self._check_writable_locked()
        own_epoch, own_end = self.end_of_epoch(leader_epoch)
        offset = min(end_offset, own_end) if own_epoch >= 0 else end_offset
        offset = max(self._log_start, min(offset, self._end))
        self._truncate(offset, epochs.truncate_end)
        return offset

    def _set_epochs(self, entries: list[epochs.Entry], *, write: bool = True) -> None:
        if entries != self._epochs:
            if write:
                checkpoint.write_epochs(self._fs, self.path, entries, reserve=self._parent)
            self._epochs, self._leader_epoch = entries, entries[-1][0]

    # -- appending -----------------------------------------------------------------------------------------------

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp_ms: int | datetime | None = None,
        durability: Level | None = None,
    ) -> Receipt:
        """Appends one record and returns when it is as safe as the log's policy, or durability, says.

        timestamp_ms: milliseconds since the epoch, or a datetime with a time zone; now by default. durability: "disk"
        or "os" for this append alone.
        Raises InvalidRecordError, InvalidTimestampError and RecordTooLargeError before anything is written;
        DiskFullError after the write was cut back, so that it may be repeated; LogFailedError once the log is poisoned;
        DurabilityUnknownError when its sync failed.
        """
        if durability is not None:
            _check_level(durability)
        if headers.__class__ is not tuple and isinstance(headers, Iterable):
            headers = tuple(headers)  # before the lock: what makes them may be slow, or append itself
        with self._lock:
            if self._closed or not self._writable or self._commit.failure or self._fs.forks != self._forks:
                self._refuse_locked()
            now_ms = self._fs.now_ms()
            offset = self._end
            data, max_timestamp = kernel.encode_one(
                key,
                value,
                headers,
                timestamp_ms,
                offset,
                self._leader_epoch,
                now_ms,
                *self._encoding_one,
            )
            if self._checks_times:
                check_timestamps(np.array([max_timestamp]), now_ms, self.config)
            self._write_locked(data, offset, max_timestamp, now_ms)
            if self._is_os and durability is None:  # nothing to settle or to wait for: 0.2 of 2 us saved
                self._appends += 1
                self._visible = offset + 1
                if self._tailing:
                    self._wake()
                return tuple.__new__(Receipt, (offset, offset, now_ms, "os"))
            self._settle_locked(durability)
        return self._acknowledge(offset, offset, now_ms, durability)

    def append_many(self, records: Iterable[Any], *, durability: Level | None = None) -> Receipt:
        """Appends (key, value[, headers[, timestamp_ms]]) tuples in order, as one or more batches.

        Batches are closed at batch.size bytes. All records are stored or none, as long as they fit into segment.bytes
        and into what the policy lets be unsynced (1 MiB under group, one batch under always): beyond that they go in
        parts, and an interrupt or a full disk may leave the first of them, which DiskFullError then says. An empty
        iterable stores nothing and returns offsets end and end - 1. Errors as append().
        """
        if not isinstance(records, (list, tuple)):
            if not isinstance(records, Iterable):
                raise InvalidRecordError("append_many takes records", found=type(records).__name__)
            records = list(records)  # before the lock: what makes the records may be slow, or append itself
        with self._lock:
            self._check_writable_locked()
            now_ms = self._fs.now_ms()
            size, batches = kernel.encode_records(
                self._scratch, records, self._end, self._leader_epoch, now_ms, *self._encoding
            )
            if self._checks_times:
                given = [
                    layout.milliseconds(row[3]) for row in map(tuple, records) if len(row) > 3 and row[3] is not None
                ]
                check_timestamps(np.array(given, np.int64), now_ms, self.config)
            first = self._end
            self._store_scratch_locked(size, batches, now_ms, durability)
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
        with self._lock:
            self._check_writable_locked()
            now_ms = self._fs.now_ms()
            if self._checks_times and times is not None:
                check_timestamps(times, now_ms, self.config)
            size, batches = kernel.encode_columns(
                self._scratch,
                key_column,
                value_column,
                times,
                count,
                self._end,
                self._leader_epoch,
                now_ms,
                *self._encoding,
            )
            first = self._end
            self._store_scratch_locked(size, batches, now_ms, durability)
            last = self._end - 1
        return self._acknowledge(first, last, now_ms, durability)

    def append_batch(self, data: Buffer, *, durability: Level | None = None, check_sequence: bool = True) -> Receipt:
        """Appends batches that are encoded already, such as a client's or another log's, without decoding them for
        good.

        data: whole record batches, v2, or v0/v1 which become v2. They are checked as a Kafka leader checks a produce
        request and stored as they are, with this log's offsets and leader epoch; see recordbatch.prepare_append for
        what is refused. Errors as there and as append().

        A batch of an idempotent producer that was stored before is not stored again: the receipt is that of the first
        time. One that does not follow on its producer's last raises OutOfOrderSequenceError, one of a producer that
        was replaced InvalidProducerEpochError (storage format section 5.2). check_sequence=False takes them as they
        come, for copies of other logs.
        """
        with self._lock:
            self._check_writable_locked()
            now_ms = self._fs.now_ms()
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise InvalidRecordError("append_batch takes the bytes of batches", found=type(data).__name__)
            raw, batches = prepare_append(
                data, base_offset=self._end, leader_epoch=self._leader_epoch, now_ms=now_ms, config=self.config
            )
            largest = max(size for _, size, _, _ in batches)
            if largest > self.config.segment_bytes:
                raise SegmentTooSmallError(
                    "batch is larger than segment.bytes",
                    expected=f"at most {self.config.segment_bytes} bytes",
                    found=f"{largest} bytes",
                )
            if not self._notes.producers and any(raw[position + 43] < 0x80 for position, _, _, _ in batches):
                self._expect_producers_locked()
            sequenced = self._producers.judge(raw, batches) if check_sequence else None
            if isinstance(sequenced, SequencedBatch):
                first, last, now_ms = sequenced.first_offset, sequenced.last_offset, sequenced.timestamp_ms
            else:
                first = self._end
                with self._producers.storing(sequenced, is_judged=check_sequence):
                    self._store_locked(memoryview(raw), batches, now_ms, durability)
                last = self._end - 1
        return self._acknowledge(first, last, now_ms, durability)

    def append_as_follower(
        self, data: Buffer, *, begins_segment: bool = False, durability: Level | None = None
    ) -> Receipt:
        """Appends batches of this log's leader as the leader has stored them: offsets, leader epochs, every byte.

        data: whole batches, such as a piece of stored(up_to="log_end"). They may begin at any offset in an empty log,
        else at the log end or, where the leader has compacted, above. begins_segment: the first begins a segment of the
        leader, so it begins one here. Only offsets, epochs and CRCs are judged; see partition.following. Raises
        CorruptBatchError and OffsetOutOfRangeError before anything is written; errors else as append(). A full disk
        may leave the first of the batches.
        """
        if durability is not None:
            _check_level(durability)
        if not isinstance(data, (bytes, bytearray, memoryview)) or not memoryview(data).c_contiguous:
            raise InvalidRecordError("append_as_follower takes the bytes of batches", found=type(data).__name__)
        with self._lock:
            self._check_writable_locked()
            # An epoch in which nothing was stored says nothing: this log led in it, or an append failed.
            entries = epochs.truncate_end(self._epochs, self._end)
            found = follow(data, log_end=self._end, leader_epoch=entries[-1][0] if entries else -1)
            first = found.first_offset
            if found.has_producers and not self._notes.producers:
                self._expect_producers_locked()
            is_empty = len(self._segments) == 1 and not self._active.size_bytes
            if is_empty and first > self._end:
                self._begin_at_locked(first)
            elif begins_segment and self._active.size_bytes:
                self._roll_locked()
            if found.gap_end:
                self._note_gaps_locked(found.gap_end)
            # On disk before the batches: an epoch without records contradicts nothing, records without theirs do.
            entries = epochs.truncate_end(self._epochs, self._end)
            for epoch, start in found.epochs:
                entries = epochs.assign(entries, epoch, start)
            self._set_epochs(entries or self._epochs[:1])
            view = memoryview(data).cast("B")
            now_ms = self._fs.now_ms()
            with self._producers.storing(None, is_judged=not found.has_producers):
                for run in found.runs():
                    self._store_run_locked(view, run, now_ms, durability)
            last = self._end - 1
        return self._acknowledge(first, last, now_ms, durability)

    def _store_run_locked(self, view: memoryview, run: layout.Facts, now_ms: int, durability: Level | None) -> None:
        """Stores batches of a leader, the last of which may be a marker: then the index of its segment names what it
        aborted.
        """
        start = int(run["position"][0])
        stop = int(run["position"][-1] + run["size_bytes"][-1])
        if int(run["last_offset"][-1]) > self._active.limit_offset:
            # The next segment begins behind the gap, for its offsets are relative to its base, and 32 bits wide.
            self._roll_locked(int(run["base_offset"][0]))
        before = self._end
        self._store_locked(view[start:stop], encoded(run, start), now_ms, durability)
        if self._followed is not None and self._followed.next_offset != before:
            self._followed = None  # this log has led meanwhile, and its own appends are not in it
        if self._followed is None and not is_marker(run):
            return
        try:
            if self._followed is None:
                self._followed = transactions.walked(self._segments)
            else:
                self._followed.add(run, control_types_in(view))
            for entry in self._followed.entries_between(before, self._end):
                self._active.add_aborted(entry)
            self._active.has_markers |= is_marker(run)
        except BaseException as error:
            # Kafka believes the file, so it must not lack an entry; opening the log again writes it.
            self._commit.poison(error)
            raise

    def _begin_at_locked(self, offset: int) -> None:
        """Makes an empty log one that begins at offset, as its leader's does."""
        old = self._active
        path = os.path.join(self.path, file_name(offset, LOG))
        # A crash may leave both segments and the old start: then the offsets between them must not look lost.
        self._note_gaps_locked(offset)
        with self._commit.held():
            try:
                self._is_midway = True
                new = ActiveSegment(self._fs, self.path, offset, self.config, create=True)
                self._fs.sync_dir(self.path)
                self._set_checkpoint(checkpoint.LOG_START, offset)
                self._log_start = offset
                self._end = offset
                self._segments = [new]
                self._active = new
                self._commit.advance(offset, self._written_bytes)
                self._show(offset)
                self._is_midway = False
            except BaseException as error:
                # Lack of room or descriptors passes, as long as no file says that the log begins there.
                if isinstance(error, (DiskFullError, ResourceError)) and not self._fs.exists(path):
                    self._is_midway = False
                else:
                    self._commit.poison(error)
                raise
        self._files.remove(old)
        self._set_epochs(epochs.truncate_start(self._epochs, offset))

    def _note_gaps_locked(self, dense_from: int) -> None:
        """Gaps below dense_from are no losses. On disk before there is one, for readers would call it a loss."""
        if self._notes.dense_from >= dense_from:
            return
        has_seals = self._gaps.noted.has_seals or seals.drop_stale(self._fs, self.path, self._segments[:-1])
        self._note(attrs.evolve(self._notes, dense_from=dense_from))
        self._gaps.noted = gaps.Noted(max(self._gaps.dense_from, dense_from), has_seals)

    def may_wait(self, size_bytes: int, max_timestamp: int, *, has_producer: bool) -> bool:
        """Whether appending such a batch without durability may have to wait now: for another thread, a roll, a sync,
        or for what is to be read of producers first. For a host that then appends in another thread.
        """
        if not self._lock.acquire(blocking=False):
            return True
        try:
            if self._closed or not self._writable or self._commit.failure is not None:
                return False
            if self.durability.kind in ("every", "interval") or self.config.flush_messages < INT64_MAX:
                return True  # an append may be the one that syncs
            if has_producer and not (self._notes.producers and self._producers.is_known):
                return True
            unsynced_bytes = self._written_bytes + size_bytes - self._commit.synced_bytes
            return unsynced_bytes > self._unsynced_limit or self._active.is_full(
                size_bytes, max_timestamp, self._end, self._fs.now_ms()
            )
        finally:
            self._lock.release()

    def end_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
        coordinator_epoch: int = 0,
        durability: Level | None = None,
    ) -> Receipt:
        """Appends the marker that commits or aborts what a producer has written since its last one.

        Readers with isolation="read_committed" see its records from then on, or never. Without an open transaction the
        marker is stored all the same, as Kafka does (storage format section 5.3): it fences older epochs. Raises
        InvalidProducerEpochError and CoordinatorFencedError; errors else as append().
        """
        limits = (INT64_MAX, _INT16_MAX, INT32_MAX)
        given = (producer_id, producer_epoch, coordinator_epoch)
        if not all(0 <= number <= most for number, most in zip(given, limits, strict=True)):
            raise InvalidRecordError(
                "a marker needs a producer id, a producer epoch and a coordinator epoch",
                expected=f"numbers from 0 to 2^63-1, {_INT16_MAX} and 2^31-1",
                found=given,
            )
        with self._lock:
            self._check_writable_locked()
            self._expect_producers_locked()
            producers = self._producers.known()
            first = producers.check_marker(producer_id, producer_epoch, coordinator_epoch)
            now_ms, offset = self._fs.now_ms(), self._end
            marker = transaction_marker(
                offset,
                self._leader_epoch,
                now_ms,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                coordinator_epoch=coordinator_epoch,
                commit=commit,
                append_time=self.config.is_append_time,
            )
            try:
                self._write_locked(marker, offset, now_ms, now_ms)
                producers.end_transaction(producer_id, producer_epoch, coordinator_epoch, now_ms)
                producers.next_offset = self._end
            except BaseException:
                self._producers.forget()
                raise
            if first >= 0 and not commit:
                stable = min(producers.open_transactions().values(), default=offset + 1)
                try:
                    self._active.add_aborted(AbortedTransaction(producer_id, first, offset, stable))
                except BaseException as error:
                    # Kafka believes the file, so it must not lack an entry; opening the log again writes it anew.
                    self._commit.poison(error)
                    raise
            self._settle_locked(durability)
        return self._acknowledge(offset, offset, now_ms, durability)

    def _store_scratch_locked(
        self, size: int, batches: list[EncodedBatch], now_ms: int, durability: Level | None
    ) -> None:
        """Writes what was encoded into the scratch buffer."""
        try:
            self._store_locked(memoryview(self._scratch)[:size], batches, now_ms, durability)
        except BaseException:
            # The traceback of the error may keep views of the buffer, which then could never grow again.
            self._scratch = bytearray()
            raise

    def _store_locked(
        self, data: bytes | memoryview, batches: Sequence[EncodedBatch], now_ms: int, durability: Level | None
    ) -> None:
        """Writes whole batches in as few calls as the segments and the policy allow."""
        if not batches:
            return
        if durability is not None:
            _check_level(durability)
        most = self.config.segment_bytes
        if self.durability.kind == "group":
            most = min(most, self.durability.max_bytes)
        elif self.durability.kind == "always":
            most = 1
        if len(data) <= most or len(batches) == 1:
            self._write_locked(data, batches[-1][2], max(batch[3] for batch in batches), now_ms, batches)
        else:
            before = self._end
            try:
                self._write_parts_locked(data, batches, now_ms, most)
            except DiskFullError:
                if self._end > before:  # the parts that were stored are no worse than another append's
                    self._settle_locked(durability)
                raise
        self._settle_locked(durability)

    def _settle_locked(self, durability: Level | None) -> None:
        """What the policy asks for once an append is written."""
        self._appends += 1
        kind = self.durability.kind
        if kind == "group":
            return
        if kind == "always":
            if durability != "os":
                self._sync_locked()
            return
        if not self.is_replicated:
            self._show(self._end)
        unsynced = self._end - self._commit.durable_end
        if kind == "every":
            due = unsynced >= self.durability.amount
        else:
            due = kind == "interval" and self._fs.monotonic_ms() - self._last_sync_ms >= self.durability.amount
        if due or unsynced >= self.config.flush_messages:
            self._sync_locked()

    def _write_locked(
        self,
        data: bytes | memoryview,
        last_offset: int,
        max_timestamp: int,
        now_ms: int,
        batches: Sequence[EncodedBatch] | None = None,
    ) -> None:
        """Writes what goes into one segment together, after rolling to a new one if it needs that.

        batches: where each batch lies in data; None for a single one. On return the log ends behind last_offset. On an
        error it is as before, or poisoned.
        """
        size = len(data)
        if self._is_midway:
            self._refuse_midway_locked()
        if self.is_held:
            raise DiskFullError("the disk is nearly full, below the directory's min_free_bytes", path=self.path)
        segment = self._active
        if segment.is_full(size, max_timestamp, last_offset, now_ms):
            self._roll_locked()
            segment = self._active
        elif self._written_bytes + size - self._commit.synced_bytes > self._unsynced_limit:
            self._sync_locked()
        start, end, written_bytes = segment.size_bytes, self._end, self._written_bytes
        self._is_midway = True
        try:
            segment.append(data, last_offset, max_timestamp, batches)
            self._written_bytes = written_bytes + size
            self._end = last_offset + 1
            self._is_midway = False
            if self._is_resting:
                self._stir_locked()
        except DiskFullError:
            self._is_midway = False
            raise
        except StorageWriteError as error:
            self._commit.poison(error)
            raise
        except BaseException:  # an interrupt between the write and here: nobody was told of these records
            self._take_back_locked(start, end, written_bytes)
            self._is_midway = False
            raise

    def _write_parts_locked(
        self, data: bytes | memoryview, batches: Sequence[EncodedBatch], now_ms: int, most: int
    ) -> None:
        """Writes more than a segment, or than the policy lets be unsynced, in parts of at most that."""
        newest = max(batch[3] for batch in batches)
        if self._active.is_full(min(len(data), self.config.segment_bytes), newest, batches[-1][2], now_ms):
            self._roll_locked()
        segment, start, end, written = self._active, self._active.size_bytes, self._end, self._written_bytes
        stored = 0
        try:
            while stored < len(batches):
                first = batches[stored][0]
                stop = stored + 1
                while stop < len(batches) and batches[stop][0] + batches[stop][1] - first <= most:
                    stop += 1
                part = [(at - first, size, last, newest) for at, size, last, newest in batches[stored:stop]]
                at, size, last_offset, _ = part[-1]
                newest = max(batch[3] for batch in part)
                self._write_locked(data[first : first + at + size], last_offset, newest, now_ms, part)
                stored = stop
                if self.durability.kind == "always" and stored < len(batches):
                    self._sync_locked()
        except DiskFullError as error:
            if self._active is segment and self._take_back_locked(start, end, written):
                raise
            # Parts are in segments that are sealed, or were seen, so they stay; say so, or a retry would repeat them.
            raise DiskFullError(
                f"no space left after the first {self._end - end} records were stored; append the rest again",
                path=error.path,
                offset=self._end,
            ) from error

    def _take_back_locked(self, size: int, end: int, written_bytes: int) -> bool:
        """Removes what this call wrote to the active segment, to which no receipt was given out.

        False when another thread's sync has shown whole batches of it meanwhile; then they stay.
        """
        with self._commit.held():  # a sync under way would count what is taken back
            if self._visible > end or (self.is_replicated and self._end > end):  # a follower may have it
                return False
            try:
                self._active.cut(size)
                recovery.rebuild(self._active)
                transactions.index_aborted(self._active, self._segments)
            except BaseException as error:  # also when memory lacks: half an index would be written over a whole one
                self._commit.poison(error)
                raise
            self._end, self._written_bytes = end, written_bytes
            self._commit.set_back(min(end, self._commit.durable_end))
            return True

    def _acknowledge(self, first: int, last: int, now_ms: int, durability: Level | None) -> Receipt:
        """Waits for what was promised. Outside the append lock, so that others append meanwhile."""
        reached = durability or self._level
        if reached == "disk":
            commit = self._commit
            if commit.durable_end <= last:
                commit.wait(last + 1)
            if commit.synced_bytes - self._recovery_bytes > _RECOVERY_LAG_BYTES:
                with self._lock:
                    if not self._closed and commit.synced_bytes - self._recovery_bytes > _RECOVERY_LAG_BYTES:
                        self._save_recovery_point_locked()
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
        if self._durable_handle >= 0 and not self.is_replicated:
            self._show(end)
            self._show_elsewhere()

    def _show_elsewhere(self) -> None:
        """Tells readers in other processes of the visible end."""
        with contextlib.suppress(DiskFullError, StorageWriteError):  # they see it when it moves next
            self._fs.pwrite(self._durable_handle, self._packed_end(), 0)

    def advance_high_watermark(self, offset: int) -> int:
        """Moves the high watermark of a replicated log up to offset: all in-sync copies have what lies below.

        Returns the high watermark, which never falls but by truncate(), and is always where a batch ends. Raises
        InvalidConfigError for a log that was not opened with replicated=True, and OffsetOutOfRangeError for an offset
        outside [0, log end].
        """
        offset = operator.index(offset)
        with self._lock:
            self._check_writable_locked()
            if not self.is_replicated:
                raise InvalidConfigError(
                    "the high watermark of this log is moved by its durability",
                    path=self.path,
                    expected="replicated=True",
                )
            if not 0 <= offset <= self._end:
                raise OffsetOutOfRangeError(
                    "not a high watermark of this log",
                    path=self.path,
                    offset=offset,
                    expected=f"0 to {self._end}",
                    found=offset,
                )
            if self._visible < offset < self._end:
                offset, _ = self._batch_around(offset)
            if offset > self._visible:
                self._show(offset)
                self._show_elsewhere()
            return self._visible

    def _note_failure(self, cause: BaseException) -> None:
        if not isinstance(cause, (LogClosedError, CorruptLogError)):
            recovery.note_failed_sync(self._fs, self.path)
        if not isinstance(cause, LogClosedError):
            tell("log", ERROR, "%s refuses writes until it is opened again: %r", self.path, cause)

    def _sync_locked(self) -> None:
        if self._commit.durable_end < self._end:
            self._commit.wait(self._end)
        self._last_sync_ms = self._fs.monotonic_ms()

    def _save_recovery_point_locked(self) -> None:
        point, synced_bytes = self._commit.durable_end, self._commit.synced_bytes
        self._recovery_bytes, self._last_recovery_ms = synced_bytes, self._fs.monotonic_ms()
        self._active.offer_indexes()
        # One that lags costs the next opening some checking and nothing else; no append is to fail for it.
        with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
            self._set_checkpoint(checkpoint.RECOVERY_POINT, point)
            self._recovery_point = point

    def _set_checkpoint(self, name: str, offset: int, *, may_use_reserve: bool = False) -> None:
        """Sets this partition's entry in a file that all partitions of the directory share."""
        changes = {self._key: offset}
        self._claim.checkpoints.set(name, changes, may_use_reserve=may_use_reserve)

    def _own_checkpoint(self, name: str) -> int:
        """This partition's entry in a file that all partitions of the directory share; 0 when there is none."""
        return self._claim.checkpoints.get(name, self._key) or 0

    def tick(self, now_ms: int | None = None) -> bool:
        """Does what is due: the sync of an interval policy or of flush.ms, the roll of segment.ms, the recovery point.

        now_ms: the wall clock, for the age of records; taken from the system when None. Bounded work; call it from a
        timer. Returns whether there was anything to do.
        """
        acted, recovery_point = self.tick_gathered(now_ms)
        if recovery_point is not None:
            with self._lock:
                self._check_writable_locked()
                self._save_recovery_point_locked()
        return acted or recovery_point is not None

    def tick_gathered(self, now_ms: int | None = None) -> tuple[bool, int | None]:
        """As tick(), but for the recovery point, which is returned when it is due: for a LogDir, which writes those of
        all its logs at once.
        """
        with self._lock:
            self._check_writable_locked()
            clock_ms, target = self._fs.monotonic_ms(), self._end
            acted = self._commit.durable_end < target and clock_ms - self._last_sync_ms >= self._sync_wait_ms
        if self._retain_when_due(clock_ms, now_ms):
            return True, None
        if acted:  # outside the lock, so that others append meanwhile
            self._commit.wait(target)
        with self._lock:
            self._check_writable_locked()
            config, active_ = self.config, self._active
            if acted:
                self._last_sync_ms = clock_ms
            acted |= self._files.unlink_retired(clock_ms)
            if active_.size_bytes:
                wall_ms = self._fs.now_ms() if now_ms is None else now_ms
                if wall_ms - active_.begun_ms > config.max_segment_ms:
                    self._roll_locked()
                    acted = True
            point = self._commit.durable_end
            if point <= self._recovery_point or clock_ms - self._last_recovery_ms < _RECOVERY_LAG_MS:
                return acted, None
            self._recovery_bytes, self._last_recovery_ms = self._commit.synced_bytes, clock_ms
            active_.offer_indexes()
            self._recovery_point = point
            return acted, point

    def rest(self) -> int:
        """The monotonic time at which tick() next has something to do, unless on_stir() is called before."""
        with self._lock:
            self._check_writable_locked()
            self._is_resting = True
            due_ms = min(self._next_retention_ms, self._files.next_ms)
            if self._commit.durable_end < self._end:
                due_ms = min(due_ms, self._last_sync_ms + self._sync_wait_ms)
            if self._recovery_point < self._commit.durable_end:
                due_ms = min(due_ms, self._last_recovery_ms + _RECOVERY_LAG_MS)
            if self._active.size_bytes:
                age_ms = self._fs.now_ms() - self._active.begun_ms
                due_ms = min(due_ms, self._fs.monotonic_ms() + max(0, self.config.max_segment_ms - age_ms + 1))
            return due_ms

    def _stir_locked(self) -> None:
        self._is_resting = False
        if self.on_stir is not None:
            self.on_stir()

    @property
    def _sync_wait_ms(self) -> int:
        """How long something may be unsynced before tick() syncs it."""
        wait_ms = self.config.flush_ms
        if self.durability.kind == "interval":
            return min(wait_ms, self.durability.amount)
        if self.durability.waits:  # what one append left to "os" is not to stay invisible until the next
            return min(wait_ms, _LEFT_BEHIND_MS)
        return wait_ms

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

    def _roll_locked(self, base_offset: int | None = None) -> None:
        """Old segment and its indexes on disk, then the new file and its name, then the first write: in this order.

        base_offset: of the new segment, where it is not the log end but above it: a gap lies before it then.
        """
        base = self._end if base_offset is None else base_offset
        old = self._active
        path = os.path.join(self.path, file_name(base, LOG))
        producers = self._producers.to_save(has_producers=self._notes.producers)
        with self._commit.held():
            try:
                sealed = old.seal()
                self._is_midway = True
                new = ActiveSegment(self._fs, self.path, base, self.config, create=True)
                self._fs.sync_dir(self.path)
                self._segments = [*self._segments[:-1], sealed, new]
                self._active = new
                self._end = base
                self._commit.advance(base, self._written_bytes)
                self._is_midway = False
            except BaseException as error:
                # Once the new file is there it says where it begins, and an append to the old segment would give
                # offsets out twice. Before that, lack of room or descriptors passes and the append may be repeated.
                goes_on = False  # also where there is no memory to look
                try:
                    goes_on = isinstance(error, (DiskFullError, ResourceError)) and not self._fs.exists(path)
                finally:
                    if goes_on:
                        self._is_midway = False
                    else:
                        self._commit.poison(error)
                if isinstance(error, (FileExistsError, FileNotFoundError)):
                    raise CorruptLogError("another program changed the directory", path=path) from error
                raise
        self._rolls += 1
        self._producers.save(producers)
        if self.on_stir is None or self._commit.synced_bytes - self._recovery_bytes > _RECOVERY_LAG_BYTES:
            self._save_recovery_point_locked()
        else:
            # The LogDir notes it at its next tick(), with those of its other logs: the file grows with their number.
            # After a crash before that the next opening checks this segment too, and calls damage in it an error.
            self._active.offer_indexes()
            self._last_recovery_ms = self._fs.monotonic_ms() - _RECOVERY_LAG_MS
            self._stir_locked()
        # What stood there when the log was opened was not looked at, and a seal would pass its rot for sound.
        if old.is_own and old.size_bytes <= seals.ROLL_BYTES:
            seals.seal(self._fs, old, old.last_offset + 1, new.base_offset)

    @contextlib.contextmanager
    def adopting(self) -> Generator[_Adoption, None, None]:
        """For staging.apply_ready(): inside, appends wait, all is on disk, and files may be put behind the end."""
        with self._lock:
            self._check_writable_locked()
            self._sync_locked()
            with self._commit.held():
                yield _Adoption(self)

    @contextlib.contextmanager
    def rewriting(self) -> Generator[Rewriting, None, None]:
        """For the cleaner: the sealed segments as they are now, and the way to replace them."""
        with self._lock:
            self._check_writable_locked()
        view = Rewriting(self)
        try:
            yield view
        finally:
            view.discard()

    def _seal_locked(self) -> None:
        """Makes the active segment one that others may follow; appending to it goes on being possible."""
        try:
            self._active.seal()
        except BaseException as error:
            if not isinstance(error, (DiskFullError, ResourceError)):
                self._commit.poison(error)
            raise

    def _take_locked(self, bases: Sequence[int], end: int, size_bytes: int) -> None:
        """Takes note of records that were put behind the log's end, durably: in segments at bases, the last of which
        becomes the active one, or in the active segment.
        """
        assert end > self._end, (end, self._end)
        if bases:
            before = self._segments if self._active.size_bytes else self._segments[:-1]
            sealed = [*(segment.base_offset for segment in before[-1:]), *bases[:-1]]
            new = ActiveSegment(self._fs, self.path, bases[-1], self.config, create=False)
            recovery.rebuild(new)  # it has no markers, because staged writes have none
            new.write_indexes(whole=True)
            self._segments = [*before[:-1], *(Segment(self._fs, self.path, base) for base in sealed), new]
            self._active = new
        else:
            self._active.refresh()
            self._active.is_own = False
            recovery.rebuild(self._active)
            transactions.index_aborted(self._active, self._segments)
        assert self._active.last_offset + 1 == end, (self._active.last_offset, end)
        self._end = end
        self._written_bytes += size_bytes
        self._appends += 1
        self._rolls += len(bases)
        self._stir_locked()

    def _show_taken_locked(self) -> None:
        self._commit.advance(self._end, self._written_bytes)
        if self._visible < self._end and not self.is_replicated:
            self._show(self._end)
        self._save_recovery_point_locked()

    def delete_records(self, before_offset: int) -> int:
        """Moves the log start to before_offset and removes segments that lie wholly below it; returns the new start.

        The new start is on disk before the first file goes. Readers that map a removed file keep reading it. Raises
        OffsetOutOfRangeError for an offset above the high watermark or below 0; one below the log start changes
        nothing.
        """
        with self._lock:
            self._check_writable_locked()
            before_offset = operator.index(before_offset)
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
            self._set_start_locked(before_offset)
            return self._log_start

    def _set_start_locked(self, offset: int) -> None:
        """Moves the log start up, on disk first, and takes out the segments wholly below it."""
        if offset > self._commit.durable_end:  # else a power cut leaves a start above the end
            self._sync_locked()
        self._set_checkpoint(checkpoint.LOG_START, offset, may_use_reserve=True)
        self._log_start = offset
        gone = max(0, slot_of(self._segments, offset))
        if gone:
            self._retire_locked(self._segments[:gone], self._segments[gone:])
            tell("deletion", INFO, "%s: %d segments deleted, the log begins at offset %d", self.path, gone, offset)
        kept = epochs.truncate_start(self._epochs, offset)
        # Where the first epoch begins tells from now on that the segments before it are not lost, should the checkpoint
        # be. While no segment goes, that is not worth two syncs. On a full disk it waits for the next opening: deleting
        # is what makes room.
        try:
            self._set_epochs(kept, write=bool(gone) or len(kept) < len(self._epochs))
        except (DiskFullError, ResourceError):
            self._set_epochs(kept, write=False)

    def retention_facts(
        self, now_ms: int | None = None, committed: Mapping[str, int] | None = None
    ) -> retention.PartitionFacts:
        """What a retention policy is told of this log. committed: see there. Raises what reading raises."""
        with self._lock:
            self._check_writable_locked()
            return self._retention_facts(now_ms, committed)

    def _retention_facts(self, now_ms: int | None, committed: Mapping[str, int] | None) -> retention.PartitionFacts:
        segments = self._segments
        ends = [*(segment.base_offset for segment in segments[1:]), self._end]
        return retention.PartitionFacts(
            segments=[self._age_of(segment, end) for segment, end in zip(segments, ends, strict=True)],
            log_start=self._log_start,
            high_watermark=self._visible,
            now_ms=self._fs.now_ms() if now_ms is None else now_ms,
            config=self.config,
            committed=committed or {},
        )

    def _age_of(self, segment: Segment, end_offset: int) -> retention.SegmentFacts:
        largest = segment.max_timestamp()
        return retention.SegmentFacts(
            base_offset=segment.base_offset,
            end_offset=end_offset,
            size_bytes=segment.size_bytes,
            largest_timestamp=largest if largest >= 0 else self._fs.modified_ms(segment.path),
        )

    def retain(
        self,
        now_ms: int | None = None,
        *,
        policy: retention.Policy = retention.kafka_rules,
        committed: Mapping[str, int] | None = None,
        segments: int | None = None,
    ) -> int:
        """Deletes the segments that are to go, and returns how many.

        By the log's settings unless another policy is given (see retention); segments says how many itself. The log
        start is moved up on disk first; readers that hold a deleted segment go on. tick() does this every five minutes.
        Raises what reading and writing raise.
        """
        with self._lock:
            self._check_writable_locked()
            left, self._left_below = self._left_below, []
            self._files.retire(left, self.config.file_delete_delay_ms)
            facts = self._retention_facts(now_ms, committed)
            wanted = policy(facts) if segments is None else segments
            count = max(retention.below_start(facts), min(wanted, facts.deletable))
            if count <= 0:
                return 0
            if count == len(self._segments):  # all that there is: what comes next begins a new one
                self._roll_locked()
            self._set_start_locked(max(self._log_start, self._segments[count].base_offset))
            return count

    def retain_by(self, policy: retention.Policy, committed: Callable[[], Mapping[str, int]]) -> None:
        """What tick() deletes by from now on. committed(): the offsets of consumer groups, for policies that hold."""
        self._retention, self._committed = policy, committed

    def _retain_when_due(self, clock_ms: int, now_ms: int | None) -> bool:
        """Retention every five minutes, but not by a wall clock that was set meanwhile."""
        if clock_ms < self._next_retention_ms:
            return False
        wall_ms = self._fs.now_ms() if now_ms is None else now_ms
        self._next_retention_ms = clock_ms + retention.CHECK_MS
        if not self._clocks.agree(wall_ms, clock_ms):
            return False
        with self._lock:
            self._producers.expire(wall_ms)
        # Kafka's own rules ask no group, and what groups have committed takes reading a whole topic.
        committed = {} if self._retention is retention.kafka_rules else self._committed()
        return self.retain(now_ms, policy=self._retention, committed=committed) > 0

    def _retire_locked(self, old: Sequence[Segment], remaining: Sequence[Segment]) -> None:
        """Takes segments out of the log. Who reads them goes on: their files get another name at once, and go when
        readers in other processes have had file.delete.delay.ms to open them.
        """
        for segment in old:
            segment.keep()
        self._segments = list(remaining)
        self._files.retire([segment.base_offset for segment in old], self.config.file_delete_delay_ms)
        self._stir_locked()
        self._fs.sync_dir(self.path)

    def truncate(self, offset: int) -> None:
        """Removes all records at and above offset; the next append gets it. A batch that offset lies in is cut, not
        lost.

        The rest of the log is untouched: later segments are removed from the last on, then the one with the cut is
        replaced by a copy of its front, so that a crash leaves a longer log or the one asked for. Iterators that were
        made before keep what they hold. The leader epoch stays in force. Raises OffsetOutOfRangeError outside
        [log start, log end].
        """
        self._truncate(offset, epochs.cut_end)

    def _truncate(self, offset: int, cut_epochs: Callable[[list[epochs.Entry], int], list[epochs.Entry]]) -> None:
        offset = operator.index(offset)
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
                if cut_epochs is epochs.truncate_end:  # a follower forgets epochs in which it led and stored nothing
                    self._set_epochs(cut_epochs(self._epochs, offset) or self._epochs[:1])
                return
            self._sync_locked()
            with self._commit.held():
                slot = max(0, slot_of(self._segments, offset))
                position, tail = self._plan_cut(self._segments[slot], offset)
                try:
                    with self._scanning:  # a look at transactions sees the log before the cut or after it
                        self._truncate_locked(offset, slot, position, tail)
                    self._set_epochs(cut_epochs(self._epochs, offset) or self._epochs[:1])
                except BaseException as error:  # half done: the files are sound, but memory does not mirror them
                    self._commit.poison(error)
                    raise

    def _plan_cut(self, segment: Segment, offset: int) -> tuple[int, bytes]:
        """(position, tail): the segment is to keep its bytes before position, and tail behind them.

        Raises CorruptBatchError when damage stands in the way; what lies behind it is not given up for a truncation.
        """
        position = segment.find(offset)
        batch = segment.batch(position)
        if batch is None and position < segment.size_bytes:
            raise CorruptBatchError("damaged batch before the offset to cut at", path=segment.path, position=position)
        tail = b"" if batch is None else front_of(batch, offset, self.config)
        end = segment.base_offset
        for facts, _, _ in segment.walk(0, stop=position, crc=False):
            if len(facts):
                end = int(facts["last_offset"][-1]) + 1
        if not tail and end < offset:  # compaction left a gap here; the offsets in it stay given out
            tail = empty_batch(end, offset - 1, self._leader_epoch)
        return position, tail

    def _truncate_locked(self, offset: int, slot: int, position: int, tail: bytes) -> None:
        fs = self._fs
        # Below the cut everything is on disk, above it nothing is promised any more.
        if self._recovery_point > offset:
            self._recovery_point = offset  # first: a LogDir that has gathered the old one looks here before it writes
            self._set_checkpoint(checkpoint.RECOVERY_POINT, offset)
        if self._own_checkpoint(checkpoint.CLEANER) > offset:  # the records that follow were never compacted
            self._set_checkpoint(checkpoint.CLEANER, offset)
        self._visible = min(self._visible, offset)
        if self._durable_handle >= 0:
            fs.pwrite(self._durable_handle, self._packed_end(), 0)
            if self.is_replicated:
                fs.fsync(self._durable_handle)  # the next opening begins with it
        if self.is_replicated and self._own_checkpoint(checkpoint.HIGH_WATERMARK) > offset:
            # What the leader puts here next is another log, and the next opening begins with what is noted.
            self._set_checkpoint(checkpoint.HIGH_WATERMARK, offset)
        self._files.unseal(self._segments[slot:])
        cut = self._segments[slot]
        fills_gap = bool(tail) and position == cut.size_bytes
        if fills_gap:  # first: without what follows the log would end below offset, and below the recovery point
            self._files.replace_front(cut, position, tail)
        while len(self._segments) > slot + 1:
            last = self._segments[-1]
            self._segments = self._segments[:-1]
            self._files.remove(last)
        self._producers.remove_above(offset)
        if not fills_gap:
            self._files.replace_front(cut, position, tail)
        self._active = ActiveSegment(fs, self.path, cut.base_offset, self.config, create=False)
        recovery.rebuild(self._active)
        self._segments = [*self._segments[:-1], self._active]
        transactions.index_aborted(self._active, self._segments)
        self._active.write_indexes(whole=True)
        self._end = offset
        if not self.is_replicated:
            self._visible = offset
        self._followed = None
        self._cuts.append(offset)
        self._commit.set_back(offset)
        self._transactions = None
        self._producers.forget()

    def scrub(self) -> seals.ScrubReport:
        """Looks at every byte on the disk, and says what is damaged.

        A segment with a seal has to be what was sealed, and the next one has to be there; else every batch has to be
        whole and in its place, and a sealed segment of which that holds gets a seal. A log that is open read-only gets
        none. Appends, reads and compaction go on meanwhile. Raises StorageReadError, LogClosedError, and for a log that
        is open for writing LogFailedError and ForkedWriterError.
        """
        return seals.finish(self.scrubbing())

    def scrubbing(self) -> Generator[seals.Progress, None, seals.ScrubReport]:
        """As scrub(), in steps of some milliseconds: a generator of Progress that returns the report."""
        self.refresh()
        with self._lock:
            # Whole segments below the log start are read by nobody, and a crash may bring back some of them.
            kept = self._segments[max(0, slot_of(self._segments, self._log_start)) :]
            bases = [segment.base_offset for segment in kept]
        steps = seals.scrubbing(self._fs, self.path, bases, self._placing, writes=self._writable)
        return (yield from steps)

    @contextlib.contextmanager
    def _placing(self, base_offset: int) -> Generator[seals.SegmentContext | None, None, None]:
        """Keeps the segments as they are, and says what is known of one; None when it is none of the log's."""
        self.refresh()
        with self._lock:
            if self._writable:
                self._check_writable_locked()
            slot = slot_of(self._segments, base_offset)
            found = self._segments[max(0, slot) : slot + 2]
            if not found or found[0].base_offset != base_offset or found[0].state:
                yield None
                return
            next_base = found[1].base_offset if len(found) > 1 else None
            end = self._end if self._writable else self._visible
            if not self._writable:
                self._gaps.noted = noted_gaps(self._fs, self.path)  # a compaction may have begun since
            yield seals.SegmentContext(next_base, self._gaps.dense_from, self.times_truncated, end)

    def table(self, *, isolation: Isolation = "read_uncommitted") -> Table:
        """The latest value of each key, a read-only mapping that follows the log. See Table."""
        return Table(self, isolation=isolation)

    def statistics(self) -> LogStatistics:
        """Counters and sizes; a frozen value."""
        sizes = 0
        for segment in self._segments:
            with contextlib.suppress(FileNotFoundError):  # deleted by its writer since we looked
                growing = isinstance(segment, GrowingSegment)
                sizes += segment.size_bytes if growing else self._fs.file_size(segment.path)
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


class _Adoption:
    """A log inside Log.adopting(): what staging.Target describes."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.path, self.end, self.leader_epoch = log.path, log.log_end_offset, log._leader_epoch
        self.segment, self.size_bytes = log._active.base_offset, log._active.size_bytes
        self.segment_bytes = log.config.segment_bytes

    def has_room(self, size: int, max_timestamp: int, last_offset: int) -> bool:
        return not self._log._active.is_full(size, max_timestamp, last_offset, self._log._fs.now_ms())

    def seal(self) -> None:
        self._log._seal_locked()

    def take(self, bases: Sequence[int], end: int, size_bytes: int) -> None:
        self._log._take_locked(bases, end, size_bytes)

    def show(self) -> None:
        self._log._show_taken_locked()

    def fail(self, cause: BaseException) -> None:
        """The files say more than memory does: no more appends, and whoever opens the log next ends the work."""
        self._log._commit.poison(cause)
        self._log._claim.expect_unfinished()


class Rewriting:
    """A log inside Log.rewriting(): what the cleaner and copies see of it, and may do to it.

    sealed, growing: its segments and the active one, as they were at the beginning. cleaned_to: where the last round
    ended, None if there was none. Appends and reads go on meanwhile; a truncation ends the rewriting.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.fs, self.path = log._fs, log.path
        segments, self._cuts = log._segments, len(log._cuts)
        self.sealed, self.growing, self.active_base = tuple(segments[:-1]), segments[-1], segments[-1].base_offset
        self.high_watermark = log.high_watermark
        self.durability = log.durability
        self.gaps = log._gaps
        self.notes = log._notes
        self.log_start = log.log_start_offset
        self.cleaned_to = log._claim.checkpoints.get(checkpoint.CLEANER, log._key)
        self._created: ActiveSegment | None = None

    @property
    def last_stable_offset(self) -> int:
        return self._log.last_stable_offset

    def epochs(self) -> list[epochs.Entry]:
        return self._log._epochs

    def plan_cut(self, segment: Segment, offset: int) -> tuple[int, bytes]:
        """(position, tail): up to offset a segment has its bytes before position, and tail behind them."""
        return self._log._plan_cut(segment, offset)

    def check_unchanged(self) -> None:
        """Raises CompactionAbandonedError when the log was truncated since the rewriting began."""
        if len(self._log._cuts) != self._cuts:
            raise CompactionAbandonedError("the log was truncated meanwhile; try again", path=self.path)

    def transactions(self) -> Transactions:
        """Those up to the high watermark, and perhaps beyond."""
        return self._log._scan_transactions().state

    def last_batches(self) -> dict[int, tuple[int, int]]:
        """Producer id -> (producer epoch, last offset of its last data batch or -1), of producers that are alive."""
        with self._log._lock:
            self._log._check_writable_locked()
            return self._log._producers.known().last_batches()

    def create(self, base_offset: int) -> ActiveSegment:
        """A new segment to write to, under names that nobody reads."""
        log = self._log
        with log._lock:
            log._check_writable_locked()
            if log._rewriter not in (None, self):
                raise LogLockedError("the log is being compacted already", path=self.path, pid=None, host=None)
            log._rewriter = self
        self._remove_cleaned()
        self._created = ActiveSegment(self.fs, self.path, base_offset, log.config, create=True, state=CLEANED)
        return self._created

    def keep_aborted(self, marker_offset: int) -> None:
        """The aborted transaction that ends there still has batches: the new segment's index is to name it."""
        for entry in self.transactions().entries_between(marker_offset, marker_offset + 1):
            assert self._created is not None
            self._created.add_aborted(entry)

    def add_seal(self, old: Sequence[Segment], new: ActiveSegment, crc32c: int) -> None:
        """The seal of a new segment that is to replace old ones. crc32c: of what was written to it."""
        bases = [*(segment.base_offset for segment in self.sealed), self.active_base]
        seal = seals.Seal(
            size_bytes=new.size_bytes,
            modified_ms=self.fs.modified_ms(new.path),
            crc32c=crc32c,
            end_offset=new.last_offset + 1,
            next_base_offset=bases[bases.index(old[-1].base_offset) + 1],
        )
        seals.write(self.fs, new.file(SEAL), seal)

    def replace(self, old: Sequence[Segment], new: ActiveSegment) -> None:
        """Puts a new segment, whole, in the place of old ones that follow each other (storage format section 9.7)."""
        fs, log = self.fs, self._log
        new.seal()
        fs.sync_dir(self.path)
        with log._lock:
            log._check_writable_locked()
            segments = log._segments
            self.check_unchanged()
            at = next((slot for slot, one in enumerate(segments) if one is old[0]), None)
            if at is None or [*segments[at : at + len(old)]] != [*old]:
                raise CompactionAbandonedError("segments were deleted meanwhile; compact again", path=self.path)
            # Once a round: up to the active segment, which no compaction of this round reaches.
            log._note_gaps_locked(self.active_base)
            log._files.exchange(old, new, log.config.file_delete_delay_ms, log._commit.poison)
            sealed = Segment(fs, self.path, new.base_offset)
            log._segments = [*segments[:at], sealed, *segments[at + len(old) :]]
            self._created = None
            log._stir_locked()

    def note_cleaned(self, offset: int) -> None:
        """Below offset all is compacted; the next round begins there."""
        with self._log._lock:
            self._log._check_writable_locked()
            self._log._set_checkpoint(checkpoint.CLEANER, offset)

    def discard(self) -> None:
        """Removes what was created and not put in place."""
        if self._log._rewriter is self:
            self._log._rewriter = None
            # After the log was closed, another process may be compacting.
            if self._created is not None and not self._log.is_closed:
                with contextlib.suppress(LogcoreError, OSError):
                    self._remove_cleaned()

    def _remove_cleaned(self) -> None:
        self._created = None
        for name in self.fs.listdir(self.path):
            if name.endswith(CLEANED):
                self.fs.unlink(os.path.join(self.path, name))


def _check_level(durability: object) -> None:
    if durability not in ("os", "disk"):
        raise InvalidConfigError("durability of an append", expected="'os', 'disk' or None", found=repr(durability))
