"""The writer of a log: its state, and each step that changes it.

Rules:
- Fields change under the log's lock, in methods whose names end in _locked. Their
  callers hold the lock.
- An append is complete or leaves no byte. After an error the log is unchanged, or
  `commit` is poisoned and refuses writes.
- A failed sync is never repeated.
- `has_unfinished_write` is True while the files may contain more than the writer's fields
  describe. If it is still set at the next append, there was no memory to undo the
  write, and the log refuses writes.
- A roll syncs the old segment, then creates the new file and syncs its name. The first
  write follows after that.

Other files contain more steps of the same writer: schedule.py (work that becomes due),
truncation.py (deletion and truncation), replication.py (batches of a leader) and rewriting.py
(compaction, and staged segments). log.py encodes the records of users, and documents
the methods.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

import attrs
import numpy as np

from logcore.claim import Claim
from logcore.config import INT64_MAX, LogConfig
from logcore.debug_checks import keeps_order, locked
from logcore.errors import (
    CorruptLogError,
    DiskFullError,
    DurabilityUnknownError,
    ForkedWriterError,
    InvalidConfigError,
    LogClosedError,
    LogcoreError,
    LogFailedError,
    LogNotFoundError,
    OffsetConflictError,
    OffsetOutOfRangeError,
    ResourceError,
    StorageReadError,
    StorageWriteError,
)
from logcore.fs import FS, offers_descriptors
from logcore.kernels import Appender, Receipt
from logcore.kernels.layout import (
    EncodedBatch,
    Level,
)
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import PartitionMetadata
from logcore.metadata.filenames import LOG, file_name
from logcore.partition import (
    aborted_transactions,
    checksum_file,
    epochs,
    gaps,
    recovery,
)
from logcore.partition.gaps import Gaps
from logcore.partition.group_commit import GroupCommit, Hooks
from logcore.partition.opening import Opened, OpenRequest
from logcore.partition.persisted import read_persisted_gaps
from logcore.partition.producer_state import ProducerState
from logcore.partition.scan import batch_end_at_or_below
from logcore.partition.state import PartitionState
from logcore.partition.watermark_file import WatermarkFile
from logcore.partition.writer_fields import (
    Metadata,
    Progress,
    TransactionView,
    encoding_of,
    refusal_of_copy,
)
from logcore.reporting import ERROR, log_line
from logcore.segment import ActiveSegment, Segment

if TYPE_CHECKING:
    from logcore.partition.shared_writer import SharedLock

#: Maximum lag of the recovery point after the durable end. It bounds the data that the
#: next opening must check after a crash.
_RECOVERY_LAG_BYTES: Final = 64 << 20
RECOVERY_LAG_MS: Final = 5_000


def check_level(durability: object) -> None:
    """Raise InvalidConfigError unless `durability` is a level for appends."""
    if durability not in ("os", "disk"):
        raise InvalidConfigError(
            "durability of an append",
            expected="'os', 'disk' or None",
            found=repr(durability),
        )


class Writer(Appender):
    """One partition, open for writing. Users work with it through Log.

    Fields that each append changes, such as the state and the active segment, belong to
    Appender, because compiled kernels access them. Appender.append_fast() is the
    fast path of Log.append().
    """

    fs: FS
    state: PartitionState
    active: ActiveSegment
    #: Runs the syncs; has the durable end and the reason why writes are refused, if
    #: any.
    commit: GroupCommit

    def __init__(
        self,
        place: OpenRequest,
        *,
        claim: Claim,
        opened: Opened,
        sharing: SharedLock | None = None,
    ) -> None:
        """Set the fields only; start_locked() begins to write.

        `opened` is the partition as opening left it.
        """
        fs = place.fs
        path = place.path
        policy = place.durability
        self.fs = fs
        self.path = path
        self.parent = place.parent
        self.key = place.key
        self.claim = claim
        self.durability = policy
        self.is_replicated = place.is_replicated
        #: Whether this replica follows a leader, and takes no other appends.
        self.is_following = False
        #: The lock of a log that several processes write; None if this process is
        #: alone.
        self.sharing = sharing
        #: Called when tick() may have work again after rest(). See attach().
        self._on_due: Callable[[], None] | None = None
        #: Whether appends are refused with DiskFullError because the disk is nearly
        #: full. See hold_appends().
        self.is_held = False
        self.state = PartitionState(place.config, self._gaps(opened))
        if sharing is not None:
            self.state.lock = sharing
            self.state.follow = sharing.follow
            self.state.is_behind = sharing.is_behind
            self.state.is_shared = True
        self.state.publish(visible=opened.visible)
        clock_ms = fs.monotonic_ms()
        #: The recovery point, and the state of the latest maintenance.
        self.progress = Progress(opened.recovery_point, clock_ms, clock_ms)
        self._adopt(opened)
        # The owner of the .cleaned files in the directory. See begin_rewrite_locked().
        self._rewriter: object | None = None
        # Encoding an append makes it as large as needed. A broker stores the batches of
        # its clients without it, and may have 10,000 partitions.
        self.scratch = bytearray()
        #: Bytes written since the log was opened.
        self.written_bytes = 0
        self.appends = 0
        self.is_maintenance_idle = False
        self.has_unfinished_write = False
        self.watermark_file = WatermarkFile(fs, path, is_replicated=place.is_replicated)
        self._is_released = False  # whether close() released the claim; under the lock
        self.forks = fs.forks
        self._opened_end = opened.end
        self._level: Level = "disk" if policy.waits else "os"
        # Maximum number of unsynced bytes besides the next write. recovery.decide()
        # relies on it under `group` and `always`. A valid batch that is further above
        # the damage was synced after it, so the damage is not a torn write.
        self.unsynced_limit = {"group": policy.max_bytes, "always": 0}.get(
            policy.kind, INT64_MAX
        )
        self._apply_config()
        publish = None if sharing is None else sharing.publish
        hooks = Hooks(
            written=lambda: (self.written_bytes, self.state.end),
            sync=lambda: fs.fdatasync(self.active.handle),
            moved=self._moved_durable_end,
            failed=self._record_failure,
            publish=publish,
        )
        self.commit = GroupCommit(fs, path, hooks, durable_end=opened.end)

    def _adopt(self, opened: Opened) -> None:
        """Take the state of the opened partition over, except for the visible end."""
        self.state.publish(
            segments=opened.segments, log_start=opened.log_start, end=opened.end
        )
        # Records below the end were not searched for transactions yet.
        self.state.no_transactions_from = opened.end
        self.report = opened.report
        self.active = opened.active
        self.files = opened.files
        self.progress.set_recovery_point(opened.recovery_point)
        #: The partition metadata as it is on disk.
        self.metadata = Metadata(opened.stored_metadata, opened.epochs)
        self.leader_epoch = opened.epochs[-1][0]
        self.producers = ProducerState(
            self.fs,
            self.path,
            lambda: (self.state.segments, self.state.end),
            lambda: self.claim.clock.now_ms(self.fs.now_ms()),
        )
        self.transactions = TransactionView()

    def _gaps(self, opened: Opened) -> Gaps:
        """Return the known gaps.

        In a shared log another process may compact, so they are read again when needed.
        """
        ask = None
        if self.sharing is not None:
            ask = functools.partial(read_persisted_gaps, self.fs, self.path)
        return Gaps(opened.gaps, ask)

    def _apply_config(self) -> None:
        """Derive the fields that appends use from the settings."""
        self.has_descriptors = self.sharing is None and offers_descriptors(self.fs)
        self.encoding = encoding_of(
            self.state.config,
            self.durability,
            is_replicated=self.is_replicated,
            is_following=self.is_following,
            allows_fast_path=self.has_descriptors,
        )
        self.requires_key = self.encoding.requires_key
        self.fast_path_bytes = self.encoding.fast_path_bytes
        self.client_batch_bytes = self.encoding.client_batch_bytes
        self.stored_batch_bytes = self.encoding.stored_batch_bytes
        self.shows_appends = self.encoding.shows_appends
        self.max_ahead_ms = self.state.config.message_timestamp_after_max_ms
        self.max_behind_ms = self.state.config.message_timestamp_before_max_ms

    @locked
    def set_following_locked(self, is_following: bool) -> None:
        """Refuse appends other than a leader's from now on, or accept them."""
        self.is_following = is_following
        self._apply_config()

    @locked
    def start_locked(self, opened: Opened) -> None:
        """Begin to write. Only open_log() calls this."""
        # The visible end is stored before the metadata. In the other order, a crash
        # between the two would make the next opening use a high watermark that is not
        # on disk.
        self._open_watermark_file()
        self._save_locked(opened.initial_metadata)
        self.finish_opening_locked(opened)

    @locked
    def finish_opening_locked(self, opened: Opened) -> None:
        """Finish opening before the first write: handle damage or save the recovery."""
        lost = opened.lost
        if lost is not None:
            self.commit.poison(
                CorruptLogError(lost.reason, path=lost.path, position=lost.position)
            )
        elif opened.is_damaged_at_its_end:
            self.roll_locked()
        elif self.progress.recovery_point < self.state.end == self.commit.durable_end:
            # The records that recovery kept are durable now. Save the recovery point.
            # Otherwise later damage to them could be mistaken for a torn tail, by the
            # rules of Kafka or of a looser policy of this opening.
            self.save_recovery_point_locked()

    @locked
    def reload_locked(
        self, opened: Opened, durable_end: int, cut_offset: int | None
    ) -> None:
        """Continue with a reopened partition after another process changed it or died.

        `cut_offset` is the offset at which the log was truncated since this process
        last checked; None if it was not truncated.
        """
        state = self.state
        with state.scanning:  # a search for transactions runs before or after this
            state.transactions = None
            state.gaps = self._gaps(opened)
            if cut_offset is not None:
                state.truncations.append(cut_offset)
                state.publish(visible=min(state.visible, cut_offset))
            state.publish(visible=min(state.visible, opened.end))
            # counters() derives the number of own appends from the log end. Exclude the
            # records of other processes.
            self._opened_end += opened.end - state.end
            known = {
                segment.base_offset: segment
                for segment in state.segments[:-1]
                if segment.is_current()
            }
            self._adopt(opened)
            # Keep known segments: they remain mapped, and a running compaction still
            # finds the segments that it read.
            state.publish(
                segments=[
                    *(
                        known.get(segment.base_offset, segment)
                        for segment in state.segments[:-1]
                    ),
                    self.active,
                ]
            )
        # The durable part of the active segment is unknown. Counting all of it as
        # unsynced makes the next sync earlier.
        self.written_bytes += opened.active.size_bytes
        self.commit.renew(durable_end)
        if self.durability.waits:
            visible = durable_end
        else:
            visible = opened.end
        if visible > state.visible:
            state.raise_visible_end(visible)
        elif cut_offset is not None:
            state.wake()

    @locked
    def sync_from_peer_locked(self, end: int, size_bytes: int) -> None:
        """Add batches that another process appended to the active segment.

        `size_bytes` and `end` are the size and the log end offset after them.

        Raises:
            CorruptLogError: the segment does not end at `end`.
        """
        active = self.active
        before = active.size_bytes
        # adopt() only ever sets has_markers. The flag is cleared first, so that it
        # shows whether these batches contain markers, which the index of aborted
        # transactions lacks.
        had_markers = active.has_markers
        active.has_markers = False
        for facts in active.adopt(size_bytes):
            self.producers.adopt(facts, active)
        self.transactions.lacks_entries |= active.has_markers
        active.has_markers |= had_markers
        if active.last_offset + 1 != end:
            raise CorruptLogError(
                "the active segment does not end at the offset that another process recorded",
                path=active.path,
                expected=f"the log end offset {end}",
                found=active.last_offset + 1,
            )
        self.written_bytes += size_bytes - before
        self._opened_end += end - self.state.end
        # Batches of other processes may belong to transactions.
        self.state.no_transactions_from = end
        self.state.publish(end=end)
        if self.is_maintenance_idle:
            self.wake_maintenance_locked()

    @locked
    def index_aborted_locked(self) -> None:
        """Update the active segment's index of aborted transactions.

        Updates both memory and disk. Needed if several processes append markers.
        """
        known = self.transactions.load(self.state.segments)
        self.active.set_aborted(
            known.entries_between(self.active.base_offset, INT64_MAX), writes=True
        )
        self.transactions.lacks_entries = False

    def _open_watermark_file(self) -> None:
        if self.durability.waits or self.is_replicated:
            self.watermark_file.open(
                self.state.visible,
                keeps=self.sharing is not None and self.sharing.is_end_trusted,
            )
        else:
            self.watermark_file.remove()

    def write_visible_end(self, end: int) -> None:
        """Publish the visible end to readers in other processes.

        Raises:
            DiskFullError, StorageWriteError: the write failed.
        """
        self.watermark_file.write(end)

    def abandon(self) -> None:
        """Close a log that could not be opened. Only open_log() calls this."""
        self.state.is_closed = True
        self.watermark_file.close()

    def close(self) -> None:
        """Sync the log, mark it as cleanly closed, and release the claim.

        Called by Log.close(). The log is closed even if an error is raised.

        Raises:
            DurabilityUnknownError: the sync failed.
            StorageReadError, StorageWriteError, DiskFullError, LogLockedError: the lock
                record of a shared log could not be read or written.
        """
        try:
            with self.state.lock:
                self._close_locked()
            return
        except LogcoreError as error:
            if self.state.is_closed:  # the lock was acquired
                raise
            failure = error
        # This happens only in a shared log: its lock record cannot be read or written,
        # and without it the log may not be changed. The next process that acquires the
        # lock recovers the log. From here on, the lock excludes threads of this process
        # only.
        self.state.is_closed = True
        self.claim.fail()
        with self.state.lock:
            self._close_locked()
        raise failure

    @locked
    def _close_locked(self) -> None:
        """Finish the log if this process may still change it, and release the rest."""
        state = self.state
        if self._is_released:
            # An interrupt may have cut the release of an earlier call short.
            self.claim.release()
            return
        # In a forked child, the files and the lock belong to the parent.
        if self.fs.forks != self.forks:
            self._is_released = True
            state.close()
            return
        try:
            # Inside: an interrupt after these lines still releases the claim.
            self._is_released = True
            state.is_closed = True
            if self.commit.failure is None and (
                self.sharing is None or self.sharing.has_write_lock
            ):
                with checkpoint.expecting_directory(self.fs, self.path):
                    self._finish_locked()
        finally:
            try:
                if self.commit.failure is not None:
                    self.claim.fail()
                self.commit.poison(
                    LogClosedError("the log was closed before the sync", path=self.path)
                )
                # A sync that another thread is running still uses the files.
                with self.commit.held(failed=True):
                    self.watermark_file.close()
                    if self.sharing is not None:
                        self.sharing.release_write_lock()
                    state.close()
                    del self.active
            finally:  # even if the lines above fail, for example for lack of memory
                self.claim.release()

    @locked
    def _finish_locked(self) -> None:
        """Write all files that a clean opening trusts. The clean mark comes last."""
        fs = self.fs
        active = self.active
        try:
            self.sync_locked()
            if self.transactions.lacks_entries:
                self.index_aborted_locked()
            # The closing time entry, which Kafka reads as the largest timestamp of the
            # segment.
            time_index = active.time_index
            time_index.add(
                active.largest_timestamp,
                active.largest_timestamp_offset - active.base_offset,
            )
            try:
                # A failed append was truncated from the file. fdatasync need not sync a
                # smaller size. Until it is synced, a power cut may restore the bytes.
                if active.had_failed_write:
                    fs.fsync(active.handle)
                # Kafka and this library trust the indexes of a clean directory.
                is_clean = self.claim.is_clean
                active.write_indexes(whole=True, sync=is_clean)
                if is_clean and self.metadata.sidecar.producers:
                    # Makes the name of an index of aborted transactions durable.
                    fs.sync_dir(self.path)
                self.producers.save(self.producers.if_any())
            except (DiskFullError, StorageReadError, StorageWriteError, ResourceError):
                # All records are durable. The next opening only has more to check.
                self.claim.fail()
            # A LogDir that closes all its logs collects their recovery points and
            # writes them together. In a shared log, the point is written while the
            # write lock is held: later, another process may have truncated the log
            # below it.
            if self.sharing is not None or not self.claim.defer_recovery_point(
                self.key, self.commit.durable_end
            ):
                self.save_recovery_point_locked()
            if self.is_replicated:
                # On failure, the leader raises the old value again.
                with contextlib.suppress(DiskFullError, ResourceError):
                    self.set_checkpoint(
                        checkpoint.HIGH_WATERMARK,
                        self.state.visible,
                        may_use_reserve=True,
                    )
            elif self.watermark_file.is_open:
                # All records are durable. Readers need no limit, and Kafka may append
                # next.
                with self.claim.alone() as is_alone:
                    if is_alone:
                        self.watermark_file.remove()
            self.files.unlink_retired(None)
            self.claim.leave()
        except BaseException:
            self.claim.fail()
            raise

    def counters(self) -> tuple[int, int, int, int, int]:
        """Return (appends, records, bytes, syncs, rolls) since the log was opened."""
        records = self.state.end - self._opened_end
        return (
            self.appends,
            records,
            self.written_bytes,
            self.commit.syncs,
            self.progress.rolls,
        )

    def reconfigure(self, config: LogConfig) -> None:
        """Replace the settings for all later appends."""
        with self.state.lock:
            self.check_writable_locked()
            self.state.config = config
            self.active.reconfigure(config)
            self._apply_config()
            self.wake_maintenance_locked()

    @locked
    def check_writable_locked(self) -> None:
        """Raise an error if writes are not allowed.

        Raises:
            LogClosedError, LogFailedError, ForkedWriterError.
        """
        if self.state.is_closed or self.commit.failure or self.fs.forks != self.forks:
            self.refuse_locked()
        if self.has_unfinished_write:
            self._refuse_unfinished_locked()

    @locked
    def check_appendable_locked(self) -> None:
        """Check that records may be appended that get their offsets here.

        Raises:
            LogClosedError, LogFailedError, ForkedWriterError: writes are not allowed.
            ReadOnlyLogError: the log is a mirror, whose offsets come from another log.
            NotLeaderError: this replica follows a leader.
        """
        self.check_writable_locked()
        if self.encoding.is_copy:
            self.refuse_locked()

    @locked
    def _refuse_unfinished_locked(self) -> NoReturn:
        """Refuse writes: a write or roll ended half way, without memory to undo it."""
        self.commit.poison(MemoryError("in the middle of a write"))
        self.refuse_locked()

    @locked
    def refuse_locked(self) -> NoReturn:
        """Raise the reason why writes are refused. Callers know that there is one."""
        if self.state.is_closed:
            raise LogClosedError("the log is closed", path=self.path)
        if self.commit.failure is not None:
            cause = self.commit.failure.__cause__
            advice = "an earlier write or sync failed; close the log and open it again"
            if isinstance(cause, CorruptLogError):
                advice = "the end of the log is damaged; `logcore recover` copies the undamaged part"
            elif isinstance(cause, LogNotFoundError):
                advice = f"{cause.reason}; refresh the directory, and open the partition again if it exists"
            raise LogFailedError(advice, path=self.path) from self.commit.failure
        if self.fs.forks == self.forks:  # so it is a copy
            raise refusal_of_copy(self.path, self.state.config)
        raise ForkedWriterError(
            "the log was opened by a parent process; open it again in the child",
            path=self.path,
        )

    # -- partition metadata ------------------------------------------------------------

    @locked
    def _save_locked(self, metadata: PartitionMetadata) -> None:
        """Write partition metadata durably, if it changed, before it becomes valid."""
        if metadata != self.metadata.sidecar:
            checkpoint.write_metadata(self.fs, self.path, metadata, reserve=self.parent)
            self.metadata = attrs.evolve(self.metadata, sidecar=metadata)

    @locked
    def expect_producers_locked(self) -> None:
        """Record durably that the log may contain batches of idempotent producers."""
        self._save_locked(attrs.evolve(self.metadata.sidecar, producers=True))

    @locked
    def write_gaps_locked(self, dense_from: int) -> None:
        """Record durably that gaps below `dense_from` are not losses.

        Called before the first such gap exists, because readers would report it.
        """
        if self.metadata.sidecar.dense_from >= dense_from:
            return
        # Below dense_from only seals reveal a loss, so stale seals are removed before
        # the new value is on disk.
        has_seals = (
            self.state.gaps.persisted.has_seals
            or checksum_file.drop_stale_checksums(
                self.fs, self.path, self.state.segments[:-1]
            )
        )
        self._save_locked(attrs.evolve(self.metadata.sidecar, dense_from=dense_from))
        self.state.gaps.persisted = gaps.PersistedGaps(
            max(self.state.gaps.dense_from, dense_from), has_seals
        )

    @locked
    def set_epochs_locked(
        self, entries: list[epochs.Entry], *, write: bool = True
    ) -> None:
        """Replace the leader epochs, on disk first unless write=False."""
        if entries != self.metadata.epochs:
            if write:
                checkpoint.write_epochs(
                    self.fs, self.path, entries, reserve=self.parent
                )
            self.metadata = attrs.evolve(self.metadata, epochs=entries)
            self.leader_epoch = entries[-1][0]

    def set_checkpoint(
        self, name: str, offset: int, *, may_use_reserve: bool = False
    ) -> None:
        """Set this partition's entry in a checkpoint of the log directory."""
        changes = {self.key: offset}
        self.claim.checkpoints.set(name, changes, may_use_reserve=may_use_reserve)

    def own_checkpoint(self, name: str) -> int:
        """Return this partition's entry in a checkpoint of the log directory, or 0."""
        return self.claim.checkpoints.get(name, self.key) or 0

    @locked
    def save_recovery_point_locked(self) -> None:
        """Store the durable end as the recovery point.

        The next opening then checks only records above it.
        """
        point = self.commit.durable_end
        self.start_recovery_point_locked(self.fs.monotonic_ms())
        # If the recovery point lags, the next opening only checks more. An append must
        # not fail because of it.
        with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
            self.set_checkpoint(checkpoint.RECOVERY_POINT, point)
            self.progress.set_recovery_point(point)

    @locked
    def start_recovery_point_locked(self, clock_ms: int) -> None:
        """Prepare for a new recovery point, which the caller stores.

        `clock_ms` is the monotonic time. The indexes are handed to the system, so that
        the next opening finds them up to the recovery point.
        """
        self.progress.record_recovery(self.commit.synced_bytes, clock_ms)
        self.active.try_write_indexes()

    # -- appending ---------------------------------------------------------------------

    def may_wait(
        self, size_bytes: int, max_timestamp: int, *, has_producer: bool
    ) -> bool:
        """Return whether appending such a batch without durability may block now.

        It may wait for another thread, a roll or a sync, or read the state of
        producers. A host then appends in another thread.
        """
        if self.sharing is not None or not self.state.lock.acquire(blocking=False):
            return True
        try:
            if self.state.is_closed or self.commit.failure is not None:
                return False
            if (
                self.durability.kind in ("every", "interval")
                or self.state.config.flush_messages < INT64_MAX
            ):
                return True  # an append may be the one that syncs
            has_state = self.metadata.sidecar.producers and self.producers.is_known
            if has_producer and not has_state:
                return True
            unsynced_bytes = self.written_bytes + size_bytes - self.commit.synced_bytes
            return unsynced_bytes > self.unsynced_limit or self.active.is_full(
                size_bytes, max_timestamp, self.state.end, self.fs.now_ms()
            )
        finally:
            self.state.lock.release()

    @locked
    def store_scratch_locked(
        self,
        size: int,
        batches: list[EncodedBatch],
        now_ms: int,
        durability: Level | None,
    ) -> None:
        """Write the batches in the scratch buffer."""
        try:
            self.store_locked(
                memoryview(self.scratch)[:size], batches, now_ms, durability
            )
        except BaseException:
            # The traceback of the error may keep views of the buffer, and a buffer with
            # views cannot grow.
            self.scratch = bytearray()
            raise

    @locked
    def store_locked(
        self,
        data: bytes | memoryview,
        batches: Sequence[EncodedBatch],
        now_ms: int,
        durability: Level | None,
    ) -> None:
        """Write batches in as few calls as the segments and the policy allow."""
        if not batches:
            return
        if durability is not None:
            check_level(durability)
        # Maximum size of one write: a segment, or the policy's limit of unsynced bytes.
        # Under `always`, the limit of 1 byte gives each batch its own write and sync.
        most = self.state.config.segment_bytes
        if self.durability.kind == "group":
            most = min(most, self.durability.max_bytes)
        elif self.durability.kind == "always":
            most = 1
        if len(batches) == 1:
            ((_, _, last_offset, max_timestamp),) = batches
            self.write_locked(data, last_offset, max_timestamp, now_ms, batches)
        elif len(data) <= most:
            self.write_locked(
                data,
                batches[-1][2],
                max(batch[3] for batch in batches),
                now_ms,
                batches,
            )
        else:
            before = self.state.end
            try:
                self._write_parts_locked(data, batches, now_ms, most)
            except DiskFullError:
                if self.state.end > before:  # stored parts are an append too
                    self.settle_locked(durability)
                raise
        self.settle_locked(durability)

    @locked
    def settle_locked(self, durability: Level | None) -> None:
        """Perform the steps that the policy requires after an append was written."""
        self.appends += 1
        state = self.state
        if self.encoding.is_os and durability is None:
            state.raise_visible_end(state.end)
            return
        kind = self.durability.kind
        # The caller waits for its own or a shared sync. Readers see the records after
        # that.
        if kind == "group":
            return
        # An append that requested "os" leaves the sync to the next one.
        if kind == "always":
            if durability != "os":
                self._sync_written_locked()
            return
        # The policies `every` and `interval` let readers see records that a power cut
        # may lose.
        if not self.is_replicated:
            state.raise_visible_end(state.end)
        unsynced = state.end - self.commit.durable_end
        if kind == "every":
            due = unsynced >= self.durability.amount
        else:
            due = (
                kind == "interval"
                and self.fs.monotonic_ms() - self.progress.synced_ms
                >= self.durability.amount
            )
        if due or unsynced >= state.config.flush_messages:
            self._sync_written_locked()

    @locked
    def publish_append_locked(self, end: int) -> None:
        """Show an append to readers at once. A short form of settle_locked()."""
        self.appends += 1
        self.state.visible = end
        if self.state.listeners:
            self.state.wake()

    @locked
    def _sync_written_locked(self) -> None:
        try:
            self.sync_locked()
        except LogFailedError:
            raise
        except LogcoreError as error:
            raise self._unknown(error) from error

    @locked
    def write_locked(
        self,
        data: bytes | memoryview,
        last_offset: int,
        max_timestamp: int,
        now_ms: int,
        batches: Sequence[EncodedBatch] | None = None,
    ) -> None:
        """Write batches into one segment with one call, after a roll if necessary.

        `batches` contains the position of each batch in `data`; None for a single
        batch. On return the log end offset is last_offset + 1. After an error the log
        is unchanged, or poisoned.
        """
        size = len(data)
        if self.has_unfinished_write:
            self._refuse_unfinished_locked()
        if self.is_held:
            raise DiskFullError(
                "the disk is nearly full, below the directory's min_free_bytes",
                path=self.path,
            )
        segment = self.active
        if segment.is_full(size, max_timestamp, last_offset, now_ms):
            self.roll_locked()  # which syncs all written data
            segment = self.active
        elif self.written_bytes + size - self.commit.synced_bytes > self.unsynced_limit:
            self.sync_locked()
        state = self.state
        # Set before readers see the batches.
        if aborted_transactions.may_change(data, batches):
            state.no_transactions_from = last_offset + 1
        start = segment.size_bytes
        end = state.end
        written_bytes = self.written_bytes
        # If there is no memory even to run the handlers below, this remains set, and
        # the next append poisons the log.
        self.has_unfinished_write = True
        try:
            segment.append(data, last_offset, max_timestamp, batches)
            self.written_bytes = written_bytes + size
            state.end = last_offset + 1
            self.has_unfinished_write = False
            if self.is_maintenance_idle:
                self.wake_maintenance_locked()
        except DiskFullError:  # the segment has undone its write: the log is unchanged
            self.has_unfinished_write = False
            raise
        except (
            StorageWriteError
        ) as error:  # the file may contain unknown bytes above its end
            self.commit.poison(error)
            raise
        except BaseException:
            # An interrupt after the write: no receipt names these records.
            self.roll_back_append_locked(start, end, written_bytes)
            self.has_unfinished_write = False
            raise

    @locked
    def undo_failed_write_locked(self) -> None:
        """Undo a failed or short write of a kernel, which has set has_unfinished_write.

        On return the log is as before the append.

        Raises:
            StorageWriteError: the write could not be undone. The log refuses writes.
        """
        try:
            self.active.undo_write()
        except StorageWriteError as error:
            self.commit.poison(error)
            raise
        self.has_unfinished_write = False

    @locked
    def _write_parts_locked(
        self,
        data: bytes | memoryview,
        batches: Sequence[EncodedBatch],
        now_ms: int,
        most: int,
    ) -> None:
        """Write batches in parts of at most `most` bytes.

        Together they exceed a segment, or the limit of the policy.
        """
        newest = max(batch[3] for batch in batches)
        # Roll first if a roll is needed: parts in the active segment can be undone, but
        # parts in a sealed one cannot.
        if self.active.is_full(
            min(len(data), self.state.config.segment_bytes),
            newest,
            batches[-1][2],
            now_ms,
        ):
            self.roll_locked()
        segment = self.active
        start = self.active.size_bytes
        end = self.state.end
        written = self.written_bytes
        stored = 0
        try:
            while stored < len(batches):
                # Take as many batches as fit into the limit, at least one. Their
                # positions are relative to the first of them.
                first = batches[stored][0]
                stop = stored + 1
                while (
                    stop < len(batches)
                    and batches[stop][0] + batches[stop][1] - first <= most
                ):
                    stop += 1
                part = [
                    (at - first, size, last, newest)
                    for at, size, last, newest in batches[stored:stop]
                ]
                at, size, last_offset, _ = part[-1]
                newest = max(batch[3] for batch in part)
                self.write_locked(
                    data[first : first + at + size], last_offset, newest, now_ms, part
                )
                stored = stop
                if self.durability.kind == "always" and stored < len(batches):
                    self.sync_locked()
        except DiskFullError as error:
            if self.active is segment and self.roll_back_append_locked(
                start, end, written
            ):
                raise
            # Some parts are in sealed segments or visible, so they remain. The error
            # reports this to the caller, because a retry would repeat them.
            raise DiskFullError(
                f"no space left after the first {self.state.end - end} records were stored; append the rest again",
                path=error.path,
                offset=self.state.end,
            ) from error

    @locked
    def roll_back_append_locked(self, size: int, end: int, written_bytes: int) -> bool:
        """Remove the bytes that this call wrote to the active segment.

        No receipt names their records. Returns False if a sync of another thread has
        made some batches visible in the meantime; all batches then remain.
        """
        # Without the hold, a running sync would count the removed bytes.
        with self.commit.held():
            is_seen = self.state.visible > end
            # Followers read up to the log end.
            may_be_copied = self.is_replicated and self.state.end > end
            if is_seen or may_be_copied:
                return False
            try:
                self.active.cut(size)
                recovery.rebuild(self.active)
                aborted_transactions.index_aborted(self.active, self.state.segments)
            except BaseException as error:
                # A lack of memory counts too: a partial index must not overwrite a
                # complete one.
                self.commit.poison(error)
                raise
            self.state.publish(end=end)
            self.written_bytes = written_bytes
            self.commit.set_back(min(end, self.commit.durable_end))
            return True

    def expect_end_locked(self, expected_offset: int | None) -> None:
        """Check that the log ends at `expected_offset`; None accepts any end.

        Raises:
            OffsetConflictError: the log ends at another offset.
            InvalidConfigError: `expected_offset` is not an int.
        """
        if expected_offset is None:
            return
        if not isinstance(expected_offset, (int, np.integer)):
            raise InvalidConfigError(
                "expected_offset is not an offset",
                expected="an int",
                found=repr(expected_offset),
            )
        if expected_offset != self.state.end:
            raise OffsetConflictError(
                "the log does not end where this append expects its end",
                path=self.path,
                expected=expected_offset,
                found=self.state.end,
            )

    def acknowledge(
        self, first: int, last: int, now_ms: int, durability: Level | None
    ) -> Receipt:
        """Wait for the promised durability, and return the receipt.

        The append lock is not held, so other threads can append concurrently.
        """
        reached = durability or self._level
        if reached == "disk":
            commit = self.commit
            if commit.durable_end <= last:
                try:
                    commit.wait(last + 1)
                    if self.sharing is not None:
                        self.sharing.wait(last)
                except LogFailedError:
                    raise
                except LogcoreError as error:
                    raise self._unknown(error) from error
            if self._recovery_point_lags():
                with self.state.lock:
                    # Check again: if several threads find it due, only the first saves
                    # it.
                    if not self.state.is_closed and self._recovery_point_lags():
                        self.save_recovery_point_locked()
        return Receipt(first, last, now_ms, reached, *self.key)

    def _recovery_point_lags(self) -> bool:
        """Return whether opening after a crash would check too many bytes."""
        lag_bytes = self.commit.synced_bytes - self.progress.recovery_bytes
        return lag_bytes > _RECOVERY_LAG_BYTES

    def _unknown(self, error: LogcoreError) -> DurabilityUnknownError:
        """Return the error to raise if a step fails after a write.

        An error that invites the caller to append again would store the record twice.
        """
        return DurabilityUnknownError(
            f"it is not known whether the record is on disk: {error}", path=self.path
        )

    # -- the durable end and the visible end -------------------------------------------

    @locked
    def sync_locked(self) -> None:
        """Sync all records, or raise DurabilityUnknownError."""
        if self.commit.durable_end < self.state.end:
            self.commit.wait(self.state.end)
        self.progress.record_sync(self.fs.monotonic_ms())

    def flush(self) -> None:
        """Sync the log; see Log.flush()."""
        with self.state.lock:
            self.check_writable_locked()
            target = self.state.end
        if self.commit.durable_end < target:
            self.commit.wait(target)
            if self.sharing is not None:
                self.sharing.wait(target - 1)

    def _moved_durable_end(self, end: int) -> None:
        """Show more records to readers, here and in other processes, after a sync."""
        if self.sharing is not None:
            if self.durability.waits:
                self.sharing.raise_visible_end(end)
        elif self.watermark_file.is_open and not self.is_replicated:
            self.state.raise_visible_end(end)
            self.watermark_file.write_if_possible(self.state.visible)

    def advance_high_watermark(self, offset: int) -> int:
        """Raise the high watermark; see Log.advance_high_watermark()."""
        with self.state.lock:
            self.check_writable_locked()
            if not self.is_replicated:
                raise InvalidConfigError(
                    "the high watermark of this log is moved by its durability",
                    path=self.path,
                    expected="replicated=True",
                )
            if not 0 <= offset <= self.state.end:
                raise OffsetOutOfRangeError(
                    "not a high watermark of this log",
                    path=self.path,
                    offset=offset,
                    expected=f"0 to {self.state.end}",
                    found=offset,
                )
            if self.state.visible < offset < self.state.end:
                offset = batch_end_at_or_below(self.state.segments, offset)
            if offset > self.state.visible:
                self.state.raise_visible_end(offset)
                self.watermark_file.write_if_possible(offset)
            return self.state.visible

    def _record_failure(self, cause: BaseException) -> None:
        """Record a failed write or sync for the next opening and for other processes.

        Called when the log was poisoned.
        """
        if not isinstance(cause, (LogClosedError, CorruptLogError, LogNotFoundError)):
            recovery.record_failed_sync(self.fs, self.path)
            if self.sharing is not None:
                self.sharing.record_failure()
        if not isinstance(cause, LogClosedError):
            log_line(
                "log",
                ERROR,
                "%s refuses writes until it is opened again: %r",
                self.path,
                cause,
            )

    @locked
    def wake_maintenance_locked(self) -> None:
        """Report to the LogDir that tick() may have work again."""
        self.is_maintenance_idle = False
        if self._on_due is not None:
            self._on_due()

    @locked
    def set_maintenance_idle_locked(self) -> None:
        """Report later work through wake_maintenance_locked(): tick() has no task that is due."""
        self.is_maintenance_idle = True

    def attach(self, on_due: Callable[[], None]) -> None:
        """Set the function that is called when tick() may have work again after rest().

        Called before other threads can use the log. `on_due` is called under the log's
        lock, and must not block.
        """
        self._on_due = on_due

    def hold_appends(self, is_held: bool) -> None:
        """Refuse appends with DiskFullError from now on, or accept them again."""
        self.is_held = is_held

    # -- segments ----------------------------------------------------------------------

    @keeps_order
    def roll_locked(self, base_offset: int | None = None) -> None:
        """Seal the active segment and create the next one.

        Syncs the old segment and its indexes, then creates the new file and syncs its
        name, before the first write. `base_offset` is the base of the new segment if it
        is above the log end offset; a gap then precedes it.
        """
        if base_offset is None:
            base = self.state.end
        else:
            base = base_offset
        old = self.active
        # Take the snapshot before the new segment exists: it covers the records below
        # the new base offset.
        producers = self.producers.to_save(
            has_producers=self.metadata.sidecar.producers
        )
        if self.transactions.lacks_entries:
            self.index_aborted_locked()
        with self.commit.held(), self._creating_locked(base):
            sealed = old.seal()
            new = self._create_segment_locked(base)
            self.state.publish(
                segments=[*self.state.segments[:-1], sealed, new], end=base
            )
            self.active = new
            # seal() has synced all written data.
            self.commit.advance(base, self.written_bytes)
        self.progress.add_rolls(1)
        self.producers.save(producers)
        if self._on_due is None or self._recovery_point_lags():
            self.save_recovery_point_locked()
        else:
            # The LogDir saves the recovery point at its next tick(), together with
            # the points of its other logs, because one file contains all of them. If a crash
            # comes first, the next opening checks this segment too, and reports damage
            # as an error.
            self.active.try_write_indexes()
            self.progress.recovered_ms = self.fs.monotonic_ms() - RECOVERY_LAG_MS
            self.wake_maintenance_locked()
        # A file that existed at opening was not checked completely, so a seal could
        # certify damaged data as valid.
        if old.is_own and old.size_bytes <= checksum_file.ROLL_BYTES:
            checksum_file.seal(self.fs, old, old.last_offset + 1, new.base_offset)

    @keeps_order
    def begin_at_locked(self, offset: int) -> None:
        """Make an empty log begin at `offset`, like the log of its leader."""
        old = self.active
        # A crash may leave both segments and the old start. The offsets in between must
        # then not be reported as lost.
        self.write_gaps_locked(offset)
        with self.commit.held(), self._creating_locked(offset):
            new = self._create_segment_locked(offset)
            self.set_checkpoint(checkpoint.LOG_START, offset)
            self.state.publish(segments=[new], log_start=offset, end=offset)
            self.active = new
            self.commit.advance(offset, self.written_bytes)
            self.state.raise_visible_end(offset)
        self.files.remove(old)
        self.set_epochs_locked(epochs.truncate_start(self.metadata.epochs, offset))

    @locked
    def _create_segment_locked(self, base: int) -> ActiveSegment:
        """Create the file of the next segment, and sync its name."""
        self.has_unfinished_write = True
        new = ActiveSegment(self.fs, self.path, base, self.state.config, create=True)
        self.fs.sync_dir(self.path)
        return new

    @contextlib.contextmanager
    def _creating_locked(self, base: int) -> Generator[None, None, None]:
        """Refuse writes from now on if the block fails after the segment was created.

        Once the file exists, its name claims the next offsets, and an append to the old
        segment would assign them twice. Before that, a lack of space or of descriptors
        is temporary, and the append may be repeated.
        """
        path = os.path.join(self.path, file_name(base, LOG))
        try:
            yield
            self.has_unfinished_write = False
        except BaseException as error:
            is_temporary = False  # even if there is no memory for the check
            try:
                is_temporary = isinstance(
                    error, (DiskFullError, ResourceError)
                ) and not self.fs.exists(path)
            finally:
                if is_temporary:
                    self.has_unfinished_write = False
                else:
                    self.commit.poison(error)
            if isinstance(error, (FileExistsError, FileNotFoundError)):
                raise CorruptLogError(
                    "another program changed the directory", path=path
                ) from error
            raise

    # -- steps of truncation.py, replication.py and rewriting.py -----------------------

    @locked
    def replace_segments_locked(
        self, segments: list[Segment], *, log_start: int | None = None
    ) -> None:
        """Publish another list of segments with the same active segment."""
        self.state.publish(segments=segments, log_start=log_start)

    @locked
    def lower_visible_locked(self, offset: int) -> None:
        """Lower the visible end to `offset`, in this process."""
        self.state.publish(visible=min(self.state.visible, offset))
        self.state.wake()

    @locked
    def set_active_locked(self, active: ActiveSegment, segments: list[Segment]) -> None:
        """Publish a list of segments with another active segment, its last one."""
        self.active = active
        self.state.publish(segments=segments)

    @locked
    def end_at_locked(self, offset: int) -> None:
        """Finish a truncation: the log ends at `offset`, and all of it is durable."""
        visible = None
        if not self.is_replicated:
            visible = offset
        self.state.publish(end=offset, visible=visible)
        self.transactions.forget()
        self.state.truncations.append(offset)
        self.commit.set_back(offset)
        self.state.transactions = None
        self.producers.forget()

    @locked
    def count_adopted_locked(self, end: int, size_bytes: int, rolls: int) -> None:
        """End the log at `end`, after durable records were added to its segments.

        They are not visible yet.
        """
        self.state.publish(end=end)
        self.written_bytes += size_bytes
        self.appends += 1
        self.progress.add_rolls(rolls)
        self.wake_maintenance_locked()

    @locked
    def begin_rewrite_locked(self, owner: object) -> bool:
        """Reserve the .cleaned files for `owner`; False if another rewrite has them.

        Two rewrites of one log would delete each other's files. The field excludes them
        within the process, and a byte lock among processes.
        """
        if self._rewriter not in (None, owner):
            return False
        if self.sharing is not None and not self.sharing.acquire_rewrite():
            return False
        self._rewriter = owner
        return True

    def end_rewrite(self, owner: object) -> bool:
        """Release the .cleaned files; False if `owner` did not have them."""
        if self._rewriter is not owner:
            return False
        self._rewriter = None
        return True
