"""One partition: a log with appends at its end and reads from any offset.

Write path: append encodes a batch with its final offset, the active segment writes it
with one system call, and the visible end increases. Read path: find the segment by base
offset, search its index, walk the batch heads, and decode the bytes into records,
columns or Arrow.

Rules (docs/design.md states these promises for users):
- There is one writer. An append is stored completely or not at all. After an error the
  log is as before, or refuses writes.
- The durability policy determines when an append is acknowledged. A failed sync is
  never repeated: it poisons the log, which then refuses writes until it is opened
  again. Opening checks the content of the disk.
- Readers see records below the visible end. If appends wait for a sync, these are the
  durable records; otherwise all written records. Only truncate() removes records that
  readers have seen.
- Offsets increase and are never reused, except above the offset of a truncate().

This module does not know other partitions. It starts no threads: tick() does the work
that is due.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, Literal, NoReturn

import attrs
import numpy as np

from logcore import retention
from logcore.acquire import claim_directory
from logcore.claim import Claim
from logcore.closeable import Closeable
from logcore.config import INT32_MAX, INT64_MAX, KEEPS_ALL, Durability, LogConfig
from logcore.errors import (
    InvalidConfigError,
    InvalidNameError,
    InvalidRecordError,
    LogNotFoundError,
    OffsetOutOfRangeError,
    ReadOnlyLogError,
    SegmentTooSmallError,
)
from logcore.format.columns import (
    ColumnInput,
    TimesInput,
    input_columns,
)
from logcore.fs import FS, OS
from logcore.index import AbortedTransaction
from logcore.kernels import Receipt, Record, kernel, layout
from logcore.kernels.layout import (
    Buffer,
    HeadersInput,
    Level,
    RecordInput,
    Time,
    header_pairs,
)
from logcore.key_index import KeyIndex, read_one
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import ensure_directory
from logcore.metadata.filenames import parse_partition_name
from logcore.partition import checksum_file, epochs, recovery
from logcore.partition.opening import Opened, OpenRequest, open_partition
from logcore.partition.persisted import read_persisted_gaps
from logcore.partition.producers import SequencedBatch
from logcore.partition.rewriting import Rewriting, rewriting
from logcore.partition.scan import slot_of
from logcore.partition.schedule import LogMaintenance
from logcore.partition.state import PartitionState
from logcore.partition.truncation import delete_below_locked, truncate_locked
from logcore.partition.writer import Writer, check_level
from logcore.reader import Isolation, LogReader, open_reader, transactions_of
from logcore.recordbatch import (
    Marker,
    check_timestamps,
    prepare_append,
    time_ms,
    transaction_marker,
)
from logcore.segment import GrowingSegment
from logcore.table import Table

OnCorruption = Literal["fail", "quarantine"]

_INT16_MAX: Final = 2**15 - 1
#: Position of the producer id in a batch. A set sign bit means that the batch has no
#: producer id.
_PRODUCER_SIGN: Final = 43
#: Characters that no file system can store: surrogates, except those that represent
#: undecodable bytes.
_SURROGATE: Final = re.compile("[\ud800-\udc7f\udd00-\udfff]")


@attrs.frozen(kw_only=True)
class LogStatistics:
    """Counters since the log was opened, and its present size.

    All counters are 0 for a log opened read-only. The offsets equal the log's
    properties.
    """

    #: Number of .log files, and their total size.
    segments: int
    size_bytes: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    durable_end_offset: int
    #: Number of calls that stored something.
    appends: int
    #: Records and bytes of the written batches.
    records_appended: int
    bytes_appended: int
    #: Number of successful syncs.
    syncs: int
    #: Number of new segments.
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
    shared: bool = False,
    fs: FS = OS,
) -> Log:
    """Open one partition directory, such as data/orders-0.

    Opening for writing acquires Kafka's lock on the parent directory, checks the active
    segment, truncates a torn tail and reports it in log.recovery_report.

    Args:
        path: The directory of the partition.
        create: Create the directory if it does not exist.
        read_only: Acquire no lock and write nothing. This works on any partition
            directory that Kafka or logcore wrote, even while its writer runs.
        config: Settings by Kafka's names. Unless retention.ms or retention.bytes is
            given, no record is deleted by time or size.
        durability: When an append returns; see Durability.
        on_corruption: The reaction to damage that no crash explains. "fail" raises
            CorruptLogError and changes nothing. "quarantine" opens the log anyway:
            log.recovery_report.damage lists the offsets whose reads raise errors,
            appends continue in a new segment, and the damaged file is not changed. If
            no whole batch follows the damage, the offsets already given out cannot be
            determined, and appends raise LogFailedError; `logcore recover` makes a copy
            that accepts appends.
        replicated: The log has copies, so advance_high_watermark() moves the high
            watermark, not the durability. It begins where the last writer left it: at
            the end in `logcore.durable` and `replication-offset-checkpoint`, or at the
            log end offset if this library wrote the log without copies.
        shared: Other processes on this machine may open the log for writing too, if
            they also pass shared=True. All of them must use the same durability. If a
            stopped process keeps the write lock for 30 seconds, the others get
            LogLockedError. See docs/sharing.md.
        fs: The files, the clock and the locks: the operating system's, or a
            logcore.testing.SimulatedDisk.

    Raises:
        LogNotFoundError: the directory does not exist, and `create` is false.
        LogLockedError: another writer has it open.
        CorruptLogError: the log is damaged.
        InvalidNameError: the name is not one of a partition.
        InvalidConfigError: a setting is invalid, or `replicated` is used with
            `read_only`.
        StorageReadError, StorageWriteError, DiskFullError, ResourceError: the system
            failed.
    """
    directory = check_path(path)
    settings = LogConfig.parse({**KEEPS_ALL, **(config or {})})
    policy = Durability.parse(durability)
    if read_only:
        if create:
            raise InvalidConfigError("a log cannot be created read-only")
        if replicated:
            raise InvalidConfigError(
                "replicated=True is for a writer; a reader finds the high watermark in the files"
            )
        return open_reader(Log, fs, directory, settings)
    keeps_damage = check_on_corruption(on_corruption)
    # The lock and the checkpoints use resolved names, so two links to one partition are
    # one log.
    real = fs.real_path(directory)
    parent, name = os.path.split(real)
    key = parse_partition_name(name)
    exists = fs.is_directory(real)
    if not exists and not create:
        raise LogNotFoundError(
            "there is no partition directory here; create=True makes one",
            path=directory,
        )
    if shared and replicated:
        raise InvalidConfigError("a replicated log has one writer; it cannot be shared")
    if not exists:
        ensure_directory(fs, parent)
    writer: Writer | None = None
    claim = claim_directory(fs, parent, name, shared=shared)
    try:
        # Check again under the directory's write lock, because another process may have
        # created it concurrently.
        with claim.changing():
            if not exists and not fs.is_directory(real):
                fs.mkdir(real)
                fs.sync_dir(parent)
        request = OpenRequest(
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
            is_shared=shared,
        )
        if shared:
            writer, opened = _join(request, claim)
        else:
            opened = open_partition(request)
            writer = Writer(request, claim=claim, opened=opened)
            with writer.state.lock:
                writer.start_locked(opened)
        return Log(
            fs,
            real,
            writer.state,
            policy,
            writer=writer,
            leftover_bases=opened.leftover_bases,
        )
    except BaseException:
        try:
            if writer is not None:
                writer.abandon()
            # Leaves no marker of a clean shutdown, so the next opening checks the
            # files.
            claim.fail()
        # Even if the lines above fail, for example because memory is short.
        finally:
            claim.release()
        raise


def _join(request: OpenRequest, claim: Claim) -> tuple[Writer, Opened]:
    """Open a partition that other processes may have open. Raises the errors of
    open_log().
    """
    # Imported here because few directories are shared.
    from logcore.partition.shared_writer import SharedLock

    fs = request.fs
    with claim.alone() as found_alone:
        is_alone = found_alone
    sharing = SharedLock(fs, claim.lock_handle, request.key, request.path)

    def check() -> None:
        """Check that the policy on disk is the requested one. It decides how recovery
        treats a damaged tail, so a log has one policy.
        """
        stored = checkpoint.read_partition_metadata(fs, request.path).policy
        # None: the process died before it stored the policy.
        if stored is not None and stored != request.durability:
            raise InvalidConfigError(
                "another process has the log open with another durability; give the same",
                path=request.path,
                expected=str(stored),
                found=str(request.durability),
            )

    with sharing.opening(is_alone=is_alone, check=check) as trusted_end:
        opened = open_partition(attrs.evolve(request, trusted_end=trusted_end))
        writer = Writer(request, claim=claim, opened=opened, sharing=sharing)

        def open_again(trusted_end: int | None) -> Opened:
            return open_partition(
                attrs.evolve(
                    request, trusted_end=trusted_end, config=writer.state.config
                )
            )

        sharing.attach(writer, opened, open_again, trusted_end=trusted_end)
        writer.start_locked(opened)
    return writer, opened


def check_on_corruption(choice: object) -> bool:
    """Return whether to open a log despite damage. Raises InvalidConfigError."""
    if choice not in ("fail", "quarantine"):
        raise InvalidConfigError(
            "on_corruption", expected="'fail' or 'quarantine'", found=repr(choice)
        )
    return choice == "quarantine"


def check_path(path: str | os.PathLike[str]) -> str:
    """Return the path as text, or raise InvalidNameError if no file system can store
    it.
    """
    directory = os.fspath(path)
    if (
        not isinstance(directory, str)
        or "\0" in directory
        or _SURROGATE.search(directory)
    ):
        raise InvalidNameError(
            "not a path that a file system can hold", found=repr(directory)
        )
    return directory


def rewriting_of(log: Log) -> AbstractContextManager[Rewriting]:
    """Return the sealed segments for the cleaner and for copies, which can replace
    them.

    See Rewriting.
    """
    return rewriting(
        log.host.writer,
        last_stable_offset=lambda: log.last_stable_offset,
        transactions=lambda: transactions_of(log),
    )


@attrs.frozen
class LogHost:
    """The parts of a log that is open for writing, for hosts; users need none of them."""

    #: Appends, syncs, rolls and truncates.
    writer: Writer
    #: The steps of Log.tick() and Log.retain().
    maintenance: LogMaintenance


class Log(LogReader, Closeable):
    """One partition directory, open for appending and reading, or for reading only.

    Created by logcore.open(). Most programs need eight methods: append, append_many,
    append_columns, read, scan, get, tail and close. Any thread may call all methods. A
    with block closes the log. Reading is documented in LogReader.
    """

    def __init__(
        self,
        fs: FS,
        path: str,
        state: PartitionState,
        policy: Durability,
        *,
        writer: Writer | None = None,
        leftover_bases: Sequence[int] = (),
    ) -> None:
        """Create a log. Users call logcore.open() or LogDir.partition().

        `writer` is None if the log is open read-only. For `leftover_bases` see MaintenanceConfig.
        """
        super().__init__(fs, path, state, policy, is_writing=writer is not None)
        self._host: LogHost | None = None
        if writer is not None:
            self._host = LogHost(writer, LogMaintenance(writer, leftover_bases))
        # Set last: if an interrupt stops __init__, __del__ must not warn.
        self._writer = writer
        #: Created at the first use.
        self._keys: KeyIndex | None = None

    @property
    def host(self) -> LogHost:
        """What directories, brokers and copies call on the log.

        Raises:
            ReadOnlyLogError: the log was opened with read_only=True.
            LogClosedError: the log is closed.
        """
        if self._host is None:
            self._refuse_reader()
        return self._host

    def _refuse_reader(self) -> NoReturn:
        self._check_open()
        raise ReadOnlyLogError("the log was opened with read_only=True", path=self.path)

    # -- opening and closing -----------------------------------------------------------

    def __del__(self) -> None:
        is_open = (
            getattr(self, "_writer", None) is not None and not self._state.is_closed
        )
        # In a forked child this is a copy; the parent closes the log.
        if is_open and self._fs.forks == self._forks:
            warnings.warn(
                f"log {self.path} was not closed",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        state = "read-only"
        if self.is_closed:
            state = "closed"
        elif self._writer is not None:
            state = "writing"
        return f"<Log {self.path} offsets {self.log_start_offset}..{self.high_watermark} {state}>"

    def close(self) -> None:
        """Flush, mark the log as cleanly closed, and release the lock. A second call
        does nothing, unless an interrupt cut the first one short.

        Raises:
            DurabilityUnknownError: the last sync failed. The log is closed anyway.
        """
        if self._writer is not None:
            self._writer.close()
        else:
            with self._state.lock:
                self._state.close()
        self._state.wake()

    def reconfigure(self, config: Mapping[str, object] | LogConfig) -> None:
        """Replace all settings from the next append on; missing settings get their
        defaults.

        Raises:
            InvalidConfigError: a setting is invalid. In that case no setting changes.
        """
        if isinstance(config, LogConfig):
            settings = config
        else:
            settings = LogConfig.parse(config)
        self.host.writer.reconfigure(settings)

    @property
    def recovery_report(self) -> recovery.RecoveryReport | None:
        """The findings and repairs of the opening; None for a log opened read-only."""
        if self._writer is None:
            return None
        return self._writer.report

    @property
    def is_replicated(self) -> bool:
        """Whether only advance_high_watermark() moves the high watermark.

        False for a log opened read-only.
        """
        return self._writer is not None and self._writer.is_replicated

    # -- offsets -----------------------------------------------------------------------

    @property
    def durable_end_offset(self) -> int:
        """The offset below which all records are durable.

        For a log opened read-only it is the high watermark. Under `os`, `every` and
        `interval` the records below that may not be durable yet.
        """
        if self._writer is None:
            return self._state.visible
        return self._writer.commit.durable_end

    @property
    def recovery_point(self) -> int:
        """The offset below which opening the log does not check the content of the
        disk.
        """
        if self._writer is None:
            return self._view.persisted_offset(checkpoint.RECOVERY_POINT)
        return self._writer.progress.recovery_point

    @property
    def has_failed(self) -> bool:
        """Whether a write or sync has failed. If so, the log refuses writes until it is
        opened again.
        """
        return self._writer is not None and self._writer.commit.failure is not None

    @property
    def leader_epoch(self) -> int:
        """The leader epoch of appended batches."""
        return self._known_epochs()[-1][0]

    def _known_epochs(self) -> list[epochs.Entry]:
        if self._writer is not None:
            return self._writer.metadata.epochs
        stored = checkpoint.read_epochs(self._fs, self.path)
        return stored or epochs.walked(self._state.segments, self._state.log_start)

    def end_of_epoch(self, leader_epoch: int) -> tuple[int, int]:
        """Return the largest epoch at or below leader_epoch, and its end offset.

        The result is (-1, -1) if it is unknown. Storage format section 11.4, Kafka's
        OffsetForLeaderEpoch.
        """
        return epochs.end_of(self._known_epochs(), leader_epoch, self._state.end)

    def begin_epoch(self, leader_epoch: int) -> None:
        """Use leader_epoch for later appends, because a new leader took over.

        A call of partition.replication.begin_to_follow() ends here: the log accepts
        appends again.

        Raises:
            OffsetOutOfRangeError: the epoch is below the present one.
        """
        writer = self.host.writer
        with self._state.lock:
            writer.check_writable_locked()
            leader_epoch = operator.index(leader_epoch)
            if not writer.leader_epoch <= leader_epoch <= INT32_MAX:
                raise OffsetOutOfRangeError(
                    "not a new leader epoch",
                    path=self.path,
                    expected=f"{writer.leader_epoch} to {INT32_MAX}",
                    found=leader_epoch,
                )
            if leader_epoch > writer.leader_epoch:
                writer.set_epochs_locked(
                    epochs.assign(writer.metadata.epochs, leader_epoch, self._state.end)
                )
            if writer.is_following:
                writer.set_following_locked(False)

    def truncate_to_epoch(self, leader_epoch: int, end_offset: int) -> int:
        """Remove records that the leader does not have, by its end_of_epoch(); return
        the new end.

        `leader_epoch` is the last epoch that both logs have, and `end_offset` its end
        in the leader. Epochs that began above that offset are dropped: the next records
        carry the leader's epochs. Raises the same errors as truncate().
        """
        writer = self.host.writer
        with self._state.lock:
            writer.check_writable_locked()
            own_epoch, own_end = self.end_of_epoch(leader_epoch)
            if own_epoch >= 0:
                offset = min(end_offset, own_end)
            else:
                offset = end_offset
            offset = max(self._state.log_start, min(offset, self._state.end))
            truncate_locked(writer, offset, epochs.truncate_end)
        return offset

    # -- appending ---------------------------------------------------------------------

    def append(
        self,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        durability: Level | None = None,
        expected_offset: int | None = None,
        expected: Mapping[Buffer, int] | None = None,
    ) -> Receipt:
        """Append one record, and return when it is as durable as the policy requires.

        Args:
            value: The value, as bytes or another buffer; None for null.
            key: The key, likewise.
            headers: A dict, or pairs of a name and a value.
            timestamp_ms: Milliseconds since the epoch, or a datetime with a time zone.
                Default: now.
            durability: "disk" or "os", for this append instead of the policy.
            expected_offset: The offset that the record must get. Use it if the record
                depends on all records before it.
            expected: The offset of the last record of each of these keys, -1 for a key
                without records. Use it if the record depends on the history of its key;
                see history(). The first use reads the log once, and keeps all keys in
                memory.

        Raises:
            InvalidRecordError, InvalidTimestampError, RecordTooLargeError: the record
                is invalid; nothing was written.
            OffsetConflictError: the log does not end at `expected_offset`, or a key of
                `expected` has another last record.
            DiskFullError: the write was undone, so the caller may repeat it.
            DurabilityUnknownError: the sync failed.
            LogFailedError: an earlier write or sync failed.
            ReadOnlyLogError: the log is a mirror, or was opened with read_only=True.
        """
        writer = self._writer
        if writer is not None and expected is None:
            receipt = writer.append_fast(
                value, key, headers, timestamp_ms, durability, expected_offset
            )
            if receipt is not None:
                return receipt
        if durability is not None:
            check_level(durability)
        if headers.__class__ is not tuple and isinstance(headers, Iterable):
            # Consumed before the lock is acquired: a generator may be slow, or append
            # to this log.
            headers = tuple(header_pairs(headers))
        state = self._state
        if writer is None:
            self._refuse_reader()
        with state.lock:
            # check_appendable_locked(), inlined; write_locked() checks has_unfinished_write.
            if (
                state.is_closed
                or writer.commit.failure
                or self._fs.forks != self._forks
                or writer.encoding.is_copy
            ):
                writer.refuse_locked()
            now_ms = self._fs.now_ms()
            offset = state.end
            if expected_offset is not None or expected is not None:
                self._expect_locked(expected_offset, expected)
            data, max_timestamp = kernel.encode_one(
                (key, value, headers, timestamp_ms),
                offset,
                writer.leader_epoch,
                now_ms,
                writer.encoding.batch,
            )
            if writer.encoding.checks_times:
                check_timestamps(np.array([max_timestamp]), now_ms, state.config)
            writer.write_locked(data, offset, max_timestamp, now_ms)
            if expected is not None and key is not None:
                self._key_index().add(bytes(key), offset)
            # No sync and no wait: this shortcut saves 0.2 of 2 us.
            if writer.encoding.is_os and durability is None:
                writer.publish_append_locked(offset + 1)
                return Receipt(offset, offset, now_ms, "os", *writer.key)
            writer.settle_locked(durability)
        return writer.acknowledge(offset, offset, now_ms, durability)

    def _expect_locked(
        self, expected_offset: int | None, expected: Mapping[Buffer, int] | None
    ) -> None:
        self.host.writer.expect_end_locked(expected_offset)
        if expected is not None:
            self._key_index().check(expected, self._state.end)

    def _key_index(self) -> KeyIndex:
        # Two threads may create one each, which costs time only.
        if self._keys is None:
            self._keys = KeyIndex(self)
        return self._keys

    def history(
        self, key: Buffer, start: int | None = None, end: int | None = None
    ) -> Iterator[Record]:
        """Return an iterator over the records of a key, in order.

        `start` and `end` limit the offsets; by default they are the start of the log
        and the high watermark. The offset of the last record is the one that append()
        expects in `expected`. The first call reads the log once, and keeps all keys in
        memory: about 200 bytes a key and 8 a record. Later calls read only the records
        of the key. Records of open and aborted transactions are returned too.

        Raises the same errors as read().
        """
        self.refresh()
        wanted = bytes(key)
        if start is None:
            start = self.log_start_offset
        if end is None:
            end = self.high_watermark
        for offset in self._key_index().history(wanted, start, end):
            record = read_one(self, wanted, offset)
            if record is not None:
                yield record

    def append_many(
        self,
        records: Iterable[RecordInput],
        *,
        durability: Level | None = None,
        expected_offset: int | None = None,
        expected: Mapping[Buffer, int] | None = None,
    ) -> Receipt:
        """Append (key, value[, headers[, timestamp_ms]]) tuples in order, as one or more
        batches.

        A batch ends at batch.size bytes. All records are stored or none, if they fit
        into segment.bytes and into the policy's limit of unsynced bytes (1 MiB under
        group, one batch under always). Otherwise they are written in parts, and an
        interrupt or a full disk may leave the first parts; DiskFullError reports how
        many records. An empty iterable stores nothing and returns offsets end and end - 1.
        For expected_offset, expected and errors see append().
        """
        if not isinstance(records, (list, tuple)):
            if not isinstance(records, Iterable):
                raise InvalidRecordError(
                    "append_many takes records", found=type(records).__name__
                )
            # Consumed before the lock is acquired: a generator may be slow, or append
            # to this log.
            records = list(records)
        writer = self.host.writer
        with self._state.lock:
            writer.check_appendable_locked()
            self._expect_locked(expected_offset, expected)
            now_ms = self._fs.now_ms()
            size, batches = kernel.encode_records(
                writer.scratch,
                records,
                self._state.end,
                writer.leader_epoch,
                now_ms,
                writer.encoding.batch,
            )
            if writer.encoding.checks_times:
                given = [
                    layout.milliseconds(row[3])
                    for row in map(tuple, records)
                    if len(row) > 3 and row[3] is not None
                ]
                check_timestamps(np.array(given, np.int64), now_ms, self.config)
            first = self._state.end
            writer.store_scratch_locked(size, batches, now_ms, durability)
            last = self._state.end - 1
        return writer.acknowledge(first, last, now_ms, durability)

    def append_columns(
        self,
        *,
        keys: ColumnInput | None = None,
        values: ColumnInput | None = None,
        timestamps_ms: TimesInput | None = None,
        durability: Level | None = None,
        expected_offset: int | None = None,
        expected: Mapping[Buffer, int] | None = None,
    ) -> Receipt:
        """Append records given as columns, without an object for each record.

        `keys` and `values` are Arrow arrays of binary or string type, or pairs of data
        (bytes or a uint8 array) and n + 1 integer positions in it. A missing column
        means nulls. `timestamps_ms` are integers of shape (n,), datetime64, or an Arrow
        array of timestamps; now by default. The log keeps no reference to the arrays.
        For expected_offset, expected and errors see append().
        """
        columns = input_columns("append_columns", keys, values, timestamps_ms)
        writer = self.host.writer
        with self._state.lock:
            writer.check_appendable_locked()
            self._expect_locked(expected_offset, expected)
            now_ms = self._fs.now_ms()
            if writer.encoding.checks_times and columns.timestamps_ms is not None:
                check_timestamps(columns.timestamps_ms, now_ms, self.config)
            size, batches = kernel.encode_columns(
                writer.scratch,
                columns,
                self._state.end,
                writer.leader_epoch,
                now_ms,
                writer.encoding.batch,
            )
            first = self._state.end
            writer.store_scratch_locked(size, batches, now_ms, durability)
            last = self._state.end - 1
        return writer.acknowledge(first, last, now_ms, durability)

    def append_batch(
        self,
        data: Buffer,
        *,
        durability: Level | None = None,
        check_sequence: bool = True,
    ) -> Receipt:
        """Append encoded batches, such as the batches of a client or of another log.

        Whole record batches are accepted: v2, or v0 and v1, which are converted to v2.
        They are checked as a Kafka leader checks a produce request, and stored
        unchanged, except for this log's offsets and leader epoch.

        If a batch of an idempotent producer was stored before, it is not stored again,
        and the receipt is the first one. A batch that skips sequence numbers of its
        producer raises OutOfOrderSequenceError. A batch of a replaced producer raises
        InvalidProducerEpochError (storage format section 5.2). check_sequence=False
        accepts all these batches, for copies of other logs.

        Raises:
            CorruptBatchError, InvalidRecordError, InvalidTimestampError: a batch is
                invalid; nothing was written.
            RecordTooLargeError, UnsupportedCodecError: the same.
            OutOfOrderSequenceError, InvalidProducerEpochError: see above.
            DiskFullError, DurabilityUnknownError, LogFailedError, ReadOnlyLogError:
                as for append().
        """
        writer = self.host.writer
        if durability == "os" and check_sequence:
            receipt = writer.append_encoded(data)
            if receipt is not None:
                return receipt
        state = self._state
        with state.lock:
            writer.check_appendable_locked()
            now_ms = self._fs.now_ms()
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise InvalidRecordError(
                    "append_batch takes the bytes of batches", found=type(data).__name__
                )
            config = state.config
            first = state.end
            # Under the lock, because it stamps the offsets: without the lock, another
            # append could take them.
            raw, batches = prepare_append(
                data,
                base_offset=first,
                leader_epoch=writer.leader_epoch,
                now_ms=now_ms,
                config=config,
            )
            # One batch is the usual case: its size and its producer id are read without
            # a loop.
            largest = len(raw)
            has_producers = raw[_PRODUCER_SIGN] < 0x80
            if len(batches) > 1:
                largest = max(size for _, size, _, _ in batches)
                has_producers = any(
                    raw[position + _PRODUCER_SIGN] < 0x80
                    for position, _, _, _ in batches
                )
            if largest > config.segment_bytes:
                raise SegmentTooSmallError(
                    "batch is larger than segment.bytes",
                    expected=f"at most {config.segment_bytes} bytes",
                    found=f"{largest} bytes",
                )
            # Note this on disk before the first such batch, so that the next opening
            # restores the state of producers.
            if has_producers and not writer.metadata.sidecar.producers:
                writer.expect_producers_locked()
            sequenced = None
            if check_sequence:
                sequenced = writer.producers.check_sequences(raw, batches)
            # A client that missed the answer sent a stored batch again. It gets the
            # first receipt; no byte is written.
            if isinstance(sequenced, SequencedBatch):
                first = sequenced.first_offset
                last = sequenced.last_offset
                now_ms = sequenced.timestamp_ms
                # An interrupt came between the write and the subsequent work of the
                # policy.
                if last >= state.visible:
                    writer.settle_locked(durability)
            elif has_producers:
                with writer.producers.storing(sequenced, is_checked=check_sequence):
                    writer.store_locked(memoryview(raw), batches, now_ms, durability)
                last = state.end - 1
            else:
                writer.store_locked(memoryview(raw), batches, now_ms, durability)
                last = state.end - 1
        return writer.acknowledge(first, last, now_ms, durability)

    def append_as_follower(
        self,
        data: Buffer,
        *,
        begins_segment: bool = False,
        durability: Level | None = None,
    ) -> Receipt:
        """Append batches of this log's leader exactly as the leader stored them, with
        its offsets and leader epochs.

        `data` contains whole batches, for example a chunk of stored(up_to="log_end").
        In an empty log they may begin at any offset; otherwise at the log end offset,
        or above it if the leader has compacted. With `begins_segment`, the first batch
        begins a segment of the leader, so it begins a segment here too. Only offsets,
        epochs and CRCs are checked; see partition.following. A full disk may leave the
        first batches.

        Raises:
            CorruptBatchError: a batch is damaged. No batch was written.
            OffsetOutOfRangeError: the batches do not continue the log. No batch was
                written. Otherwise the errors of append().
        """
        if durability is not None:
            check_level(durability)
        if (
            not isinstance(data, (bytes, bytearray, memoryview))
            or not memoryview(data).c_contiguous
        ):
            raise InvalidRecordError(
                "append_as_follower takes the bytes of batches",
                found=type(data).__name__,
            )
        writer = self.host.writer
        if durability == "os" and not begins_segment:
            receipt = writer.append_stored(data)
            if receipt is not None:
                return receipt
        from logcore.partition import replication

        with self._state.lock:
            writer.check_writable_locked()
            now_ms = self._fs.now_ms()
            first = replication.store_locked(
                writer,
                data,
                begins_segment=begins_segment,
                durability=durability,
                now_ms=now_ms,
            )
            last = self._state.end - 1
        return writer.acknowledge(first, last, now_ms, durability)

    def end_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        *,
        commit: bool,
        coordinator_epoch: int = 0,
        durability: Level | None = None,
    ) -> Receipt:
        """Append the marker that commits or aborts the records that a producer wrote
        since its last marker.

        Readers with isolation="read_committed" see committed records from then on, and
        aborted ones never. As in Kafka, the marker is stored even if no transaction is
        open (storage format section 5.3), because it fences older epochs.

        Raises:
            InvalidProducerEpochError: the producer has a newer epoch.
            CoordinatorFencedError: a newer coordinator has written a marker. Otherwise
                the errors of append().
        """
        limits = (INT64_MAX, _INT16_MAX, INT32_MAX)
        given = (producer_id, producer_epoch, coordinator_epoch)
        if not all(
            0 <= number <= max_segments
            for number, max_segments in zip(given, limits, strict=True)
        ):
            raise InvalidRecordError(
                "a marker needs a producer id, a producer epoch and a coordinator epoch",
                expected=f"numbers from 0 to 2^63-1, {_INT16_MAX} and 2^31-1",
                found=given,
            )
        writer = self.host.writer
        with self._state.lock:
            writer.check_appendable_locked()
            writer.expect_producers_locked()
            producers = writer.producers.known()
            first = producers.check_marker(
                producer_id, producer_epoch, coordinator_epoch
            )
            now_ms = self._fs.now_ms()
            offset = self._state.end
            kind = "ABORT"
            if commit:
                kind = "COMMIT"
            batch = transaction_marker(
                offset,
                writer.leader_epoch,
                now_ms,
                producer=(producer_id, producer_epoch),
                marker=Marker(kind, coordinator_epoch),
                append_time=self.config.is_append_time,
            )
            try:
                writer.write_locked(batch, offset, now_ms, now_ms)
                producers.end_transaction(
                    producer_id, producer_epoch, coordinator_epoch, now_ms
                )
                producers.next_offset = self._state.end
            except BaseException:
                writer.producers.forget()
                raise
            # An open transaction was aborted: readers skip its records.
            if first >= 0 and not commit:
                stable = min(producers.open_transactions().values(), default=offset + 1)
                try:
                    if writer.sharing is None:
                        writer.active.add_aborted(
                            AbortedTransaction(producer_id, first, offset, stable)
                        )
                    else:
                        writer.index_aborted_locked()
                except BaseException as error:
                    # Kafka trusts the index file, so no entry may be missing. Opening
                    # the log again rebuilds the file.
                    writer.commit.poison(error)
                    raise
            writer.settle_locked(durability)
        return writer.acknowledge(offset, offset, now_ms, durability)

    # -- the disk and the high watermark -----------------------------------------------

    def flush(self) -> None:
        """Return when all records appended before the call are durable.

        Raises:
            DurabilityUnknownError: the sync failed, or another process that shares the
                log truncated or recovered it concurrently.
        """
        self.host.writer.flush()

    def advance_high_watermark(self, offset: int) -> int:
        """Increase the high watermark of a replicated log to `offset`; return the high
        watermark.

        All in-sync copies must have the records below it. The high watermark is always
        at the end of a batch, and only truncate() lowers it.

        Raises:
            InvalidConfigError: the log was not opened with replicated=True.
            OffsetOutOfRangeError: the offset is outside [0, log end].
        """
        return self.host.writer.advance_high_watermark(operator.index(offset))

    def tick(self, now_ms: Time | None = None) -> bool:
        """Do the due work: the sync of an interval policy or of flush.ms, the roll of
        segment.ms, the recovery point.

        `now_ms` is the wall clock, for the age of records, in milliseconds or as a
        datetime with a time zone; the system's clock by default. Call this from a
        timer; one call does a limited amount of work. Returns whether any work was due.
        """
        return self.host.maintenance.tick(time_ms(now_ms))

    # -- segments ----------------------------------------------------------------------

    def roll(self) -> None:
        """Seal the active segment and start a new one, unless the active segment is
        empty.
        """
        writer = self.host.writer
        with self._state.lock:
            writer.check_writable_locked()
            if writer.active.size_bytes:
                writer.roll_locked()

    def delete_records(self, before_offset: int) -> int:
        """Move the log start to before_offset and delete segments below it; return the
        new start.

        The new start is durable before a file is deleted. Readers that map a deleted
        file can still read it. An offset below the log start changes nothing.

        Raises:
            OffsetOutOfRangeError: the offset is above the high watermark or below 0.
        """
        writer = self.host.writer
        with self._state.lock:
            writer.check_writable_locked()
            before_offset = operator.index(before_offset)
            if not 0 <= before_offset <= self._state.visible:
                raise OffsetOutOfRangeError(
                    "cannot delete up to there",
                    path=self.path,
                    offset=before_offset,
                    expected=f"0 to {self._state.visible}",
                    found=before_offset,
                )
            if before_offset <= self._state.log_start:
                return self._state.log_start
            delete_below_locked(writer, before_offset)
            return self._state.log_start

    def retain(
        self,
        now_ms: Time | None = None,
        *,
        policy: retention.Policy = retention.kafka_rules,
        committed: Mapping[str, int] | None = None,
        segments: int | None = None,
    ) -> int:
        """Delete the oldest segments by the log's settings, or by another policy (see
        retention); return how many.

        `segments` deletes this many instead. The log start is durably increased first.
        Readers that hold a deleted segment can still read it. tick() does this every
        five minutes.

        Raises:
            StorageReadError, StorageWriteError, DiskFullError: the system failed.
        """
        return self.host.maintenance.retain(
            time_ms(now_ms), policy=policy, committed=committed, segments=segments
        )

    def truncate(self, offset: int) -> None:
        """Delete all records at and above `offset`; the next append gets that offset.

        The offset may be inside a batch. Later segments are deleted, the last one
        first. Then a copy of the front of the segment with the offset replaces that
        segment. A crash therefore leaves a longer log or the requested one. Iterators
        that were created before keep their records. The leader epoch does not change.

        Raises:
            OffsetOutOfRangeError: the offset is outside [log start, log end].
        """
        writer = self.host.writer
        with self._state.lock:
            writer.check_writable_locked()
            with checkpoint.expecting_directory(writer.fs, writer.path):
                truncate_locked(
                    writer, operator.index(offset), epochs.truncate_end_keeping_epoch
                )

    def scrub(self) -> checksum_file.ScrubReport:
        """Read every byte from the disk, and report damage.

        A segment with a checksum file must have the bytes that the file describes, and
        the next segment must exist. In a segment without one, each batch must be whole
        and in its place. A sealed segment then gets a checksum file, unless the log is
        open read-only. Appends, reads and compaction continue during a scrub. Raises
        StorageReadError, LogClosedError, and for a log that is open for writing
        LogFailedError and ForkedWriterError.
        """
        return checksum_file.finish(self.scrubbing())

    def scrubbing(
        self,
    ) -> Generator[checksum_file.ScrubProgress, None, checksum_file.ScrubReport]:
        """Check like scrub(), in steps of some milliseconds.

        This is a generator that yields Progress and returns the report.
        """
        self.refresh()
        with self._state.lock:
            # Segments that are entirely below the log start are skipped: after a crash,
            # only some of them may exist.
            kept = self._state.segments[
                max(0, slot_of(self._state.segments, self._state.log_start)) :
            ]
            bases = [segment.base_offset for segment in kept]
        steps = checksum_file.scrubbing(
            self._fs, self.path, bases, self._placing, writes=self._writer is not None
        )
        return (yield from steps)

    @contextlib.contextmanager
    def _placing(
        self, base_offset: int
    ) -> Generator[checksum_file.SegmentContext | None, None, None]:
        """Hold the lock, and yield the context of one segment; None if it does not
        exist.
        """
        self.refresh()
        with self._state.lock:
            if self._writer is not None:
                self._writer.check_writable_locked()
            slot = slot_of(self._state.segments, base_offset)
            found = self._state.segments[max(0, slot) : slot + 2]
            if not found or found[0].base_offset != base_offset or found[0].state:
                yield None
                return
            next_base = None
            if len(found) > 1:
                next_base = found[1].base_offset
            end = self._state.end
            if self._writer is None:
                end = self._state.visible
                # A compaction may have begun since.
                self._state.gaps.persisted = read_persisted_gaps(self._fs, self.path)
            yield checksum_file.SegmentContext(
                next_base, self._state.gaps.dense_from, self.times_truncated, end
            )

    def table(self, *, isolation: Isolation = "read_uncommitted") -> Table:
        """Return the latest value of each key, a read-only mapping that follows the
        log.

        See Table.
        """
        return Table(self, isolation=isolation)

    def statistics(self) -> LogStatistics:
        """Return counters and sizes, a frozen value."""
        sizes = 0
        for segment in self._state.segments:
            # Its writer deleted it concurrently.
            with contextlib.suppress(FileNotFoundError):
                if isinstance(segment, GrowingSegment):
                    sizes += segment.size_bytes
                else:
                    # A sealed segment may not be mapped yet.
                    sizes += self._fs.file_size(segment.path)
        writer = self._writer
        if writer is None:
            counters = (0, 0, 0, 0, 0)
        else:
            counters = writer.counters()
        return LogStatistics(
            segments=len(self._state.segments),
            size_bytes=sizes,
            log_start_offset=self._state.log_start,
            high_watermark=self._state.visible,
            log_end_offset=self._state.end,
            durable_end_offset=self.durable_end_offset,
            appends=counters[0],
            records_appended=counters[1],
            bytes_appended=counters[2],
            syncs=counters[3],
            rolls=counters[4],
        )
