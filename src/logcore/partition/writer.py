"""The writing half of a log: the state of its one writer, and each step that changes it.

Rules:
- Fields change under the log's lock, in methods whose names end in _locked; their callers hold the lock.
- An append is whole or leaves no byte. After an error the log is as before, or `commit` is poisoned and refuses writes.
- A failed sync is never repeated.
- `is_midway` is set while the files may contain more than the writer's fields say. If it is still set at the next
  append, there was no memory to undo the write, and the log refuses writes.
- A roll syncs the old segment, then creates the new file and syncs its name, and only then comes the first write.

Other files hold more steps of the same writer: upkeep.py (work that time makes due), cutting.py (deletion and
truncation), follower.py (batches of a leader), rewriting.py (compaction, and staged segments). log.py encodes the
records of users, and documents the methods.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

import attrs
import numpy as np

from logcore import checkpoint
from logcore.checkpoint import Notes
from logcore.claim import Claim
from logcore.config import INT64_MAX, LogConfig
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
    ReadOnlyLogError,
    ResourceError,
    StorageReadError,
    StorageWriteError,
)
from logcore.format.compression import Codec
from logcore.fs import FS, offers_descriptors
from logcore.invariants import keeps_order, locked
from logcore.kernels import Appender, Receipt
from logcore.kernels.appending import QUICK_BYTES
from logcore.kernels.layout import APPEND_TIME_BIT, CONTROL_BIT, CRC_START, TRANSACTIONAL_BIT, EncodedBatch, Level
from logcore.names import LOG, file_name
from logcore.notices import ERROR, tell
from logcore.partition import epochs, gaps, recovery, seals, transactions
from logcore.partition.gaps import Gaps
from logcore.partition.groupcommit import GroupCommit, Hooks
from logcore.partition.noted import noted_gaps
from logcore.partition.opening import Opened, Place
from logcore.partition.producerstate import ProducerState
from logcore.partition.scan import batch_around
from logcore.partition.shownend import ShownEnd
from logcore.partition.state import PartitionState
from logcore.partition.transactions import Transactions
from logcore.recordbatch import compressor, target_codec
from logcore.segment import ActiveSegment

if TYPE_CHECKING:
    from logcore.partition.sharing import SharedLock

#: The recovery point lags the durable end by at most this, which bounds what opening must check after a crash.
_RECOVERY_LAG_BYTES: Final = 64 << 20
RECOVERY_LAG_MS: Final = 5_000
_NO_LIMIT: Final = 1 << 63
#: Position of the low byte of a batch's attributes, and its bits for transactions.
_ATTRIBUTES_POSITION: Final = CRC_START + 1
_TRANSACTIONS_MASK: Final = TRANSACTIONAL_BIT | CONTROL_BIT


def check_level(durability: object) -> None:
    """Raises InvalidConfigError unless durability is one that an append may ask for."""
    if durability not in ("os", "disk"):
        raise InvalidConfigError("durability of an append", expected="'os', 'disk' or None", found=repr(durability))


class Writer(Appender):
    """One partition, open for writing. Users work with it through Log.

    commit: syncs, the durable end, and why the log refuses writes, if it does. notes: their content on disk. epochs:
    the leader epochs; the list is replaced, never changed. written_bytes, appends, rolls: counts since the log was
    opened. recovery_bytes: the part of written_bytes below the recovery point. followed: the transactions of the whole
    log, once a marker of its leader, or of another process, was stored. lacks_aborted: whether other processes appended
    markers that the index of aborted transactions here lacks. rewriter: the owner of .cleaned files in the directory.
    sharing: the lock of a log that several processes write; None if this process is alone.

    Fields that each append changes, such as the state and the active segment, belong to Appender, because compiled
    kernels access them. Appender.append_quickly() is the fast path of Log.append().
    """

    fs: FS
    state: PartitionState
    active: ActiveSegment
    commit: GroupCommit

    def __init__(self, place: Place, *, claim: Claim, opened: Opened, sharing: SharedLock | None = None) -> None:
        """Only sets fields; start_locked() begins to write. opened: the partition as opening left it."""
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
        self.sharing = sharing
        #: Called when, after rest(), tick() may have work again. The LogDir sets it before others know the log. It is
        #: called under the log's lock, so it must not wait.
        self.on_stir: Callable[[], None] | None = None
        #: Whether appends are refused, with DiskFullError, because the disk is nearly full. Set by the LogDir.
        self.is_held = False
        self.state = PartitionState(place.config, self._gaps(opened))
        if sharing is not None:
            self.state.lock = sharing
            self.state.follow = sharing.follow
            self.state.is_behind = sharing.is_behind
            self.state.is_shared = True
        self.state.visible = opened.visible
        self._hold(opened)
        self.rewriter: object | None = None
        self.scratch = bytearray(1 << 16)
        self.written_bytes = 0
        self.recovery_bytes = 0
        self.appends = 0
        self.rolls = 0
        self.last_recovery_ms = fs.monotonic_ms()
        self.last_sync_ms = self.last_recovery_ms
        self.is_resting = False
        self.is_midway = False
        self.shown = ShownEnd(fs, path, is_replicated=place.is_replicated)
        self._is_released = False  # whether close() has given up the claim; under the lock
        self.forks = fs.forks
        self._opened_end = opened.end
        self._level: Level = "disk" if policy.waits else "os"
        # The most bytes that may be unsynced beside the next write. recovery.decide() relies on it under `group` and
        # `always`: a whole batch further above the damage was synced after it, so the damage is no torn write.
        self._unsynced_limit = {"group": policy.max_bytes, "always": 0}.get(policy.kind, _NO_LIMIT)
        self._apply_config()
        publish = None
        if sharing is not None:
            publish = sharing.publish
        hooks = Hooks(
            written=lambda: (self.written_bytes, self.state.end),
            sync=lambda: fs.fdatasync(self.active.handle),
            moved=self._moved_durable_end,
            failed=self._note_failure,
            publish=publish,
        )
        self.commit = GroupCommit(fs, path, hooks, durable_end=opened.end)

    def _hold(self, opened: Opened) -> None:
        """Takes over the partition as opening left it, except the visible end."""
        state = self.state
        state.segments = opened.segments
        state.log_start = opened.log_start
        state.end = opened.end
        state.plain_from = opened.end  # records below were not searched for transactions yet
        self.report = opened.report
        self.active = opened.active
        self.files = opened.files
        self.recovery_point = opened.recovery_point
        self.epochs = opened.epochs
        self.leader_epoch = opened.epochs[-1][0]
        self.notes = opened.notes
        self.producers = ProducerState(
            self.fs,
            self.path,
            lambda: (self.state.segments, self.state.end),
            lambda: self.claim.clock.now_ms(self.fs.now_ms()),
        )
        self.followed: Transactions | None = None
        self.lacks_aborted = False

    def _gaps(self, opened: Opened) -> Gaps:
        """The known gaps. In a shared log another process may compact, so they are read from disk when needed."""
        ask = None
        if self.sharing is not None:
            ask = functools.partial(noted_gaps, self.fs, self.path)
        return Gaps(opened.gaps, ask)

    def _apply_config(self) -> None:
        """Derives the fields that appends use from the settings."""
        config = self.state.config
        codec = target_codec(config, Codec.NONE)
        attributes = int(codec) | APPEND_TIME_BIT * config.is_append_time
        max_bytes = min(config.max_message_bytes, config.segment_bytes)  # a batch lies in one segment
        compress = compressor(codec, config)
        require_key = config.is_compacted
        no_producer = (-1, -1, -1)
        # The encoders' arguments after the offset, epoch and time of an append: for one record, and for many.
        self.encoding_one = (max_bytes, attributes, compress, require_key)
        batch_bytes = min(config.batch_size, config.segment_bytes)
        self.encoding = (batch_bytes, max_bytes, attributes, *no_producer, compress, require_key)
        self.is_os = self.durability.kind == "os" and config.flush_messages == INT64_MAX and not self.is_replicated
        limits = (config.message_timestamp_before_max_ms, config.message_timestamp_after_max_ms)
        self.checks_times = min(limits) < INT64_MAX and not config.is_append_time
        self.requires_key = require_key
        self.is_mirror = bool(config.mirror_source)
        # The conditions of kernels/_appending.pxi for the fast path of appends.
        is_plain = self.is_os and self.sharing is None and attributes == 0 and not self.checks_times
        is_plain = is_plain and not self.is_mirror
        self.quick_bytes = 0
        if is_plain and offers_descriptors(self.fs):
            self.quick_bytes = min(max_bytes, QUICK_BYTES)

    @locked
    def start_locked(self, opened: Opened) -> None:
        """Begins to write; for open_log() alone."""
        # The visible end is on disk before the notes. In the other order, after a crash between the two, the notes
        # would point the next opening to a high watermark that is not on disk.
        self._open_shown_end()
        self._note_locked(opened.own_notes)
        self.begin_after_locked(opened)

    @locked
    def begin_after_locked(self, opened: Opened) -> None:
        """Finishes opening before the first write: acts on damage, or saves the result of a recovery."""
        lost = opened.lost
        if lost is not None:
            self.commit.poison(CorruptLogError(lost.reason, path=lost.path, position=lost.position))
        elif opened.is_damaged_at_its_end:
            self.roll_locked()
        elif self.recovery_point < self.state.end == self.commit.durable_end:
            # The records that recovery kept are on disk now. Save the recovery point, so that later damage to them is
            # not mistaken for a torn tail, by the rules of Kafka or of a looser policy of this opening.
            self.save_recovery_point_locked()

    @locked
    def renew_locked(self, opened: Opened, durable_end: int, cut_offset: int | None) -> None:
        """Continues with the partition opened again, because another process has changed its files or has died.

        cut_offset: the offset at which the log was truncated since this process looked; None if it was not.
        """
        state = self.state
        with state.scanning:  # so that a search for transactions runs before this or after it
            state.transactions = None
            state.gaps = self._gaps(opened)
            if cut_offset is not None:
                state.cuts.append(cut_offset)
                state.visible = min(state.visible, cut_offset)
            state.visible = min(state.visible, opened.end)
            # counters() derives the appends of this process from the log end, so leave out those of others.
            self._opened_end += opened.end - state.end
            known = {one.base_offset: one for one in state.segments[:-1] if one.is_current()}
            self._hold(opened)
            # Keep known segments: they stay mapped, and a running compaction still finds the segments that it read.
            state.segments = [*(known.get(one.base_offset, one) for one in state.segments[:-1]), self.active]
        # It is unknown how much of the active segment is on disk. Counting all as unsynced makes the next sync earlier.
        self.written_bytes += opened.active.size_bytes
        self.commit.renew(durable_end)
        if self.durability.waits:
            visible = durable_end
        else:
            visible = opened.end
        if visible > state.visible:
            state.show(visible)
        elif cut_offset is not None:
            state.wake()

    @locked
    def adopt_locked(self, end: int, size_bytes: int) -> None:
        """Takes over whole batches that another process appended to the active segment, up to a size and an end."""
        active = self.active
        before = active.size_bytes
        # adopt() only ever sets has_markers. Cleared for this stretch, it tells whether the stretch has markers, which
        # the index of aborted transactions here lacks.
        had_markers = active.has_markers
        active.has_markers = False
        for facts in active.adopt(size_bytes):
            self.producers.adopt(facts, active)
        self.lacks_aborted |= active.has_markers
        active.has_markers |= had_markers
        if active.last_offset + 1 != end:
            raise CorruptLogError(
                "the active segment does not end as the process says that appended to it",
                path=active.path,
                expected=f"the log end offset {end}",
                found=active.last_offset + 1,
            )
        self.written_bytes += size_bytes - before
        self._opened_end += end - self.state.end
        # Batches of other processes may belong to transactions.
        self.state.plain_from = end
        self.state.end = end
        if self.is_resting:
            self.stir_locked()

    @locked
    def index_aborted_locked(self) -> None:
        """If several processes append markers: updates the active segment's index of aborted transactions up to the log
        end, in memory and on disk.
        """
        if self.followed is None:
            self.followed = transactions.walked(self.state.segments)
        else:
            transactions.walk_on(self.followed, self.state.segments)
        self.active.set_aborted(self.followed.entries_between(self.active.base_offset, INT64_MAX), writes=True)
        self.lacks_aborted = False

    def _open_shown_end(self) -> None:
        if self.durability.waits or self.is_replicated:
            self.shown.open(self.state.visible, keeps=self.sharing is not None and self.sharing.is_believed)
        else:
            self.shown.remove()

    def show_elsewhere(self, end: int) -> None:
        """Shows readers in other processes the end up to which they may read. Raises what a write raises."""
        self.shown.show(end)

    def abandon(self) -> None:
        """Lets go of a log that could not be opened; for open_log() alone."""
        self.state.is_closed = True
        self.shown.close()

    def close(self) -> None:
        """Syncs, marks the log as cleanly closed, and releases the claim. For Log.close().

        Raises DurabilityUnknownError if the sync fails, and StorageReadError, StorageWriteError, DiskFullError or
        LogLockedError if the lock record of a shared log cannot be used; the log is closed anyway.
        """
        try:
            with self.state.lock:
                self._close_locked()
            return
        except LogcoreError as error:
            if self.state.is_closed:  # the lock was acquired
                raise
            failure = error
        # Only a shared log: its lock record cannot be read or written, and without it nothing may be changed. The next
        # process that acquires the lock recovers the log. From here on the lock excludes threads of this process only.
        self.state.is_closed = True
        self.claim.fail()
        with self.state.lock:
            self._close_locked()
        raise failure

    @locked
    def _close_locked(self) -> None:
        """Finishes the log if this process may still change it, and releases everything else in any case."""
        state = self.state
        if self._is_released:
            return
        self._is_released = True
        state.is_closed = True
        if self.fs.forks != self.forks:  # a forked child: the files and the lock are its parent's
            state.segments = []
            return
        try:
            if self.commit.failure is None and (self.sharing is None or self.sharing.has_turn):
                with checkpoint.expecting_directory(self.fs, self.path):
                    self._finish_locked()
        finally:
            try:
                if self.commit.failure is not None:
                    self.claim.fail()
                self.commit.poison(LogClosedError("the log was closed meanwhile", path=self.path))
                with self.commit.held(failed=True):  # a sync under way in another thread still uses the files
                    self.shown.close()
                    if self.sharing is not None:
                        self.sharing.leave()
                    # A segment is closed when its last reader drops it.
                    state.segments = []
                    del self.active
            finally:  # even if the lines above fail, for example for lack of memory
                self.claim.release()

    @locked
    def _finish_locked(self) -> None:
        """Brings the files into a state that the next opening need not check; the marker of that comes last."""
        fs = self.fs
        active = self.active
        try:
            self.sync_locked()
            if self.lacks_aborted:
                self.index_aborted_locked()
            # The closing time entry, which Kafka reads as the largest timestamp of the segment.
            time_index = active.time_index
            time_index.add(active.largest_timestamp, active.largest_timestamp_offset - active.base_offset)
            try:
                # A failed append was cut off the file. fdatasync need not sync a smaller size; until it is synced, a
                # power cut may bring the bytes back.
                if active.was_cut_back:
                    fs.fsync(active.handle)
                # Kafka and this library trust the indexes of a clean directory.
                is_clean = self.claim.is_clean
                active.write_indexes(whole=True, sync=is_clean)
                if is_clean and self.notes.producers:
                    fs.sync_dir(self.path)  # the name of an index of aborted transactions
                self.producers.save(self.producers.if_any())
            except (DiskFullError, StorageReadError, StorageWriteError, ResourceError):
                self.claim.fail()  # all records are on disk; only the next opening has more to check
            # A LogDir that closes all its logs gathers their recovery points and writes them at once. For a shared log,
            # write it within the turn: later, another process may have truncated the log below that point.
            if self.sharing is not None or not self.claim.hand_over(self.key, self.commit.durable_end):
                self.save_recovery_point_locked()
            if self.is_replicated:
                with contextlib.suppress(DiskFullError, ResourceError):  # the leader moves up an old value again
                    self.set_checkpoint(checkpoint.HIGH_WATERMARK, self.state.visible, may_use_reserve=True)
            elif self.shown.is_open:  # all is on disk now: readers need no limit, and Kafka may append next
                with self.claim.alone() as is_alone:
                    if is_alone:
                        self.shown.remove()
            self.files.unlink_retired(None)
            self.claim.leave()
        except BaseException:
            self.claim.fail()
            raise

    def counters(self) -> tuple[int, int, int, int, int]:
        """(appends, records, bytes, syncs, rolls) since the log was opened."""
        records = self.state.end - self._opened_end
        return self.appends, records, self.written_bytes, self.commit.syncs, self.rolls

    def reconfigure(self, config: LogConfig) -> None:
        """Replaces the settings from the next append on."""
        with self.state.lock:
            self.check_writable_locked()
            self.state.config = config
            self.active.reconfigure(config)
            self._apply_config()
            self.stir_locked()

    @locked
    def check_writable_locked(self) -> None:
        """Raises LogClosedError, LogFailedError or ForkedWriterError if nothing may be written."""
        if self.state.is_closed or self.commit.failure or self.fs.forks != self.forks:
            self.refuse_locked()
        if self.is_midway:
            self._refuse_midway_locked()

    @locked
    def check_appendable_locked(self) -> None:
        """Like check_writable_locked(), for records that get new offsets here. Raises ReadOnlyLogError too, for a
        mirror, whose offsets come from another log.
        """
        self.check_writable_locked()
        if self.is_mirror:
            self.refuse_locked()

    @locked
    def _refuse_midway_locked(self) -> NoReturn:
        """Refuses writes after a write or roll that ended half way, when there was no memory even to undo it."""
        self.commit.poison(MemoryError("in the middle of a write"))
        self.refuse_locked()

    @locked
    def refuse_locked(self) -> NoReturn:
        """Raises the reason why nothing may be written; callers only checked that there is one."""
        if self.state.is_closed:
            raise LogClosedError("the log is closed", path=self.path)
        if self.commit.failure is not None:
            cause = self.commit.failure.__cause__
            advice = "an earlier write or sync failed; close the log and open it again"
            if isinstance(cause, CorruptLogError):
                advice = "the end of the log is damaged; `logcore recover` copies what is whole"
            elif isinstance(cause, LogNotFoundError):
                advice = f"{cause.reason}; refresh the directory, and open the partition again if it exists"
            raise LogFailedError(advice, path=self.path) from self.commit.failure
        if self.fs.forks == self.forks:  # neither closed, failed nor forked: the reason left is that it is a mirror
            raise ReadOnlyLogError(
                "the topic is a mirror, which `logcore mirror` alone writes; a topic without the setting mirror.source "
                "takes records",
                path=self.path,
                found=f"mirror.source={self.state.config.mirror_source}",
            )
        raise ForkedWriterError("the log was opened by a parent process; open it again in the child", path=self.path)

    # -- notes beside the records ---------------------------------------------------------------------------------

    @locked
    def _note_locked(self, notes: Notes) -> None:
        """Writes notes for the next opening; they are on disk before they become true."""
        if notes != self.notes:
            checkpoint.write_notes(self.fs, self.path, notes, reserve=self.parent)
            self.notes = notes

    @locked
    def expect_producers_locked(self) -> None:
        self._note_locked(attrs.evolve(self.notes, producers=True))

    @locked
    def note_gaps_locked(self, dense_from: int) -> None:
        """Notes on disk that gaps below dense_from are no losses; before the first such gap, or readers report it."""
        if self.notes.dense_from >= dense_from:
            return
        # Below dense_from only seals show a loss, so stale seals are removed before the note is on disk.
        has_seals = self.state.gaps.noted.has_seals or seals.drop_stale(self.fs, self.path, self.state.segments[:-1])
        self._note_locked(attrs.evolve(self.notes, dense_from=dense_from))
        self.state.gaps.noted = gaps.Noted(max(self.state.gaps.dense_from, dense_from), has_seals)

    @locked
    def set_epochs_locked(self, entries: list[epochs.Entry], *, write: bool = True) -> None:
        if entries != self.epochs:
            if write:
                checkpoint.write_epochs(self.fs, self.path, entries, reserve=self.parent)
            self.epochs = entries
            self.leader_epoch = entries[-1][0]

    def set_checkpoint(self, name: str, offset: int, *, may_use_reserve: bool = False) -> None:
        """Sets this partition's entry in a file that all partitions of the directory share."""
        changes = {self.key: offset}
        self.claim.checkpoints.set(name, changes, may_use_reserve=may_use_reserve)

    def own_checkpoint(self, name: str) -> int:
        """This partition's entry in a file that all partitions of the directory share; 0 when there is none."""
        return self.claim.checkpoints.get(name, self.key) or 0

    @locked
    def save_recovery_point_locked(self) -> None:
        """Writes the durable end to disk as the recovery point: the next opening checks only records above it."""
        point = self.commit.durable_end
        synced_bytes = self.commit.synced_bytes
        self.recovery_bytes = synced_bytes
        self.last_recovery_ms = self.fs.monotonic_ms()
        self.active.offer_indexes()
        # A lagging recovery point only makes the next opening check more, so an append must not fail because of it.
        with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
            self.set_checkpoint(checkpoint.RECOVERY_POINT, point)
            self.recovery_point = point

    # -- appending ------------------------------------------------------------------------------------------------

    def may_wait(self, size_bytes: int, max_timestamp: int, *, has_producer: bool) -> bool:
        """Whether appending such a batch without durability may have to wait now: for another thread, a roll, a sync,
        or for reading the state of producers. If so, a host appends in another thread.
        """
        if self.sharing is not None or not self.state.lock.acquire(blocking=False):
            return True
        try:
            if self.state.is_closed or self.commit.failure is not None:
                return False
            if self.durability.kind in ("every", "interval") or self.state.config.flush_messages < INT64_MAX:
                return True  # an append may be the one that syncs
            if has_producer and not (self.notes.producers and self.producers.is_known):
                return True
            unsynced_bytes = self.written_bytes + size_bytes - self.commit.synced_bytes
            return unsynced_bytes > self._unsynced_limit or self.active.is_full(
                size_bytes, max_timestamp, self.state.end, self.fs.now_ms()
            )
        finally:
            self.state.lock.release()

    @locked
    def store_scratch_locked(
        self, size: int, batches: list[EncodedBatch], now_ms: int, durability: Level | None
    ) -> None:
        """Writes the batches in the scratch buffer."""
        try:
            self.store_locked(memoryview(self.scratch)[:size], batches, now_ms, durability)
        except BaseException:
            # The traceback of the error may keep views of the buffer, and a buffer with views cannot grow.
            self.scratch = bytearray()
            raise

    @locked
    def store_locked(
        self, data: bytes | memoryview, batches: Sequence[EncodedBatch], now_ms: int, durability: Level | None
    ) -> None:
        """Writes whole batches in as few calls as the segments and the policy allow."""
        if not batches:
            return
        if durability is not None:
            check_level(durability)
        # The largest write: a segment, or the policy's limit of unsynced bytes. Under `always`, the limit of 1 byte
        # makes each batch a write and a sync of its own.
        most = self.state.config.segment_bytes
        if self.durability.kind == "group":
            most = min(most, self.durability.max_bytes)
        elif self.durability.kind == "always":
            most = 1
        if len(batches) == 1:
            ((_, _, last_offset, max_timestamp),) = batches
            self.write_locked(data, last_offset, max_timestamp, now_ms, batches)
        elif len(data) <= most:
            self.write_locked(data, batches[-1][2], max(batch[3] for batch in batches), now_ms, batches)
        else:
            before = self.state.end
            try:
                self._write_parts_locked(data, batches, now_ms, most)
            except DiskFullError:
                if self.state.end > before:  # treat the stored parts like those of any other append
                    self.settle_locked(durability)
                raise
        self.settle_locked(durability)

    @locked
    def settle_locked(self, durability: Level | None) -> None:
        """Does what the policy requires after an append was written."""
        self.appends += 1
        state = self.state
        if self.is_os and durability is None:
            state.show(state.end)
            return
        kind = self.durability.kind
        # The caller waits for a sync, its own or a shared one; readers do not see the records before that.
        if kind == "group":
            return
        # An append that asked for "os" leaves the sync to the next one.
        if kind == "always":
            if durability != "os":
                self._sync_written_locked()
            return
        # The policies `every` and `interval` let readers see records that a power cut may lose.
        if not self.is_replicated:
            state.show(state.end)
        unsynced = state.end - self.commit.durable_end
        if kind == "every":
            due = unsynced >= self.durability.amount
        else:
            due = kind == "interval" and self.fs.monotonic_ms() - self.last_sync_ms >= self.durability.amount
        if due or unsynced >= state.config.flush_messages:
            self._sync_written_locked()

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
        """Writes batches into one segment with one call, after a roll if the active segment is full.

        batches: where each batch lies in data; None for a single batch. On return the log end offset is
        last_offset + 1. After an error the log is as before, or poisoned.
        """
        size = len(data)
        if self.is_midway:
            self._refuse_midway_locked()
        if self.is_held:
            raise DiskFullError("the disk is nearly full, below the directory's min_free_bytes", path=self.path)
        segment = self.active
        if segment.is_full(size, max_timestamp, last_offset, now_ms):
            self.roll_locked()  # which syncs all that was written
            segment = self.active
        elif self.written_bytes + size - self.commit.synced_bytes > self._unsynced_limit:
            self.sync_locked()
        state = self.state
        if may_change_transactions(data, batches):  # set before a reader can see the batches
            state.plain_from = last_offset + 1
        start = segment.size_bytes
        end = state.end
        written_bytes = self.written_bytes
        # If there is no memory even to run the branches below, this stays set, and the next append poisons the log.
        self.is_midway = True
        try:
            segment.append(data, last_offset, max_timestamp, batches)
            self.written_bytes = written_bytes + size
            state.end = last_offset + 1
            self.is_midway = False
            if self.is_resting:
                self.stir_locked()
        except DiskFullError:  # the segment has undone its write: all is as before
            self.is_midway = False
            raise
        except StorageWriteError as error:  # the file may contain unknown bytes above its end
            self.commit.poison(error)
            raise
        except BaseException:  # an interrupt after the write: no receipt names these records
            self._take_back_locked(start, end, written_bytes)
            self.is_midway = False
            raise

    @locked
    def mend_locked(self) -> None:
        """Undoes a failed or short write of append_quickly(), which has set is_midway. On return the log is as before
        the append.
        """
        try:
            self.active.cut_back()
        except StorageWriteError as error:
            self.commit.poison(error)
            raise
        self.is_midway = False

    @locked
    def _write_parts_locked(
        self, data: bytes | memoryview, batches: Sequence[EncodedBatch], now_ms: int, most: int
    ) -> None:
        """Writes batches in parts of at most `most` bytes, because together they exceed a segment or the policy."""
        newest = max(batch[3] for batch in batches)
        # Roll first, if a roll is needed: parts in the active segment can be undone, parts in a sealed one cannot.
        if self.active.is_full(min(len(data), self.state.config.segment_bytes), newest, batches[-1][2], now_ms):
            self.roll_locked()
        segment = self.active
        start = self.active.size_bytes
        end = self.state.end
        written = self.written_bytes
        stored = 0
        try:
            while stored < len(batches):
                # Take as many batches as fit into the limit, at least one. Their positions count from the first of
                # them.
                first = batches[stored][0]
                stop = stored + 1
                while stop < len(batches) and batches[stop][0] + batches[stop][1] - first <= most:
                    stop += 1
                part = [(at - first, size, last, newest) for at, size, last, newest in batches[stored:stop]]
                at, size, last_offset, _ = part[-1]
                newest = max(batch[3] for batch in part)
                self.write_locked(data[first : first + at + size], last_offset, newest, now_ms, part)
                stored = stop
                if self.durability.kind == "always" and stored < len(batches):
                    self.sync_locked()
        except DiskFullError as error:
            if self.active is segment and self._take_back_locked(start, end, written):
                raise
            # Some parts are in sealed segments or were seen, so they stay. Tell the caller, or a retry repeats them.
            raise DiskFullError(
                f"no space left after the first {self.state.end - end} records were stored; append the rest again",
                path=error.path,
                offset=self.state.end,
            ) from error

    @locked
    def _take_back_locked(self, size: int, end: int, written_bytes: int) -> bool:
        """Removes the bytes that this call wrote to the active segment; no receipt names them.

        Returns False if another thread's sync has made some of the batches visible meanwhile; then all stay.
        """
        with self.commit.held():  # otherwise a running sync would count the removed bytes
            is_seen = self.state.visible > end
            may_be_copied = self.is_replicated and self.state.end > end  # followers read up to the log end
            if is_seen or may_be_copied:
                return False
            try:
                self.active.cut(size)
                recovery.rebuild(self.active)
                transactions.index_aborted(self.active, self.state.segments)
            except BaseException as error:  # even without memory: half an index must not overwrite a whole one
                self.commit.poison(error)
                raise
            self.state.end = end
            self.written_bytes = written_bytes
            self.commit.set_back(min(end, self.commit.durable_end))
            return True

    def expect_end_locked(self, expected_offset: int | None) -> None:
        """Raises OffsetConflictError unless the log ends at expected_offset; None accepts any end."""
        if expected_offset is None:
            return
        if not isinstance(expected_offset, (int, np.integer)):
            raise InvalidConfigError("expected_offset is no offset", expected="an int", found=repr(expected_offset))
        if expected_offset != self.state.end:
            raise OffsetConflictError(
                "the log does not end where this append expects its end",
                path=self.path,
                expected=expected_offset,
                found=self.state.end,
            )

    def acknowledge(self, first: int, last: int, now_ms: int, durability: Level | None) -> Receipt:
        """Waits for the promised durability, without the append lock, so that others append meanwhile."""
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
            if commit.synced_bytes - self.recovery_bytes > _RECOVERY_LAG_BYTES:
                with self.state.lock:
                    # Check again: of several threads that find it due, only the first saves it.
                    if not self.state.is_closed and commit.synced_bytes - self.recovery_bytes > _RECOVERY_LAG_BYTES:
                        self.save_recovery_point_locked()
        return Receipt(first, last, now_ms, reached, *self.key)

    def _unknown(self, error: LogcoreError) -> DurabilityUnknownError:
        """For an error behind a write: one that invites to append again would store the record twice."""
        return DurabilityUnknownError(f"it is not known whether the record is on disk: {error}", path=self.path)

    # -- the durable end, and the visible one ---------------------------------------------------------------------

    @locked
    def sync_locked(self) -> None:
        if self.commit.durable_end < self.state.end:
            self.commit.wait(self.state.end)
        self.last_sync_ms = self.fs.monotonic_ms()

    def flush(self) -> None:
        """See Log.flush()."""
        with self.state.lock:
            self.check_writable_locked()
            target = self.state.end
        if self.commit.durable_end < target:
            self.commit.wait(target)
            if self.sharing is not None:
                self.sharing.wait(target - 1)

    def _moved_durable_end(self, end: int) -> None:
        """Called after a sync: shows readers more records, here and in other processes."""
        if self.sharing is not None:
            if self.durability.waits:
                self.sharing.show(end)
        elif self.shown.is_open and not self.is_replicated:
            self.state.show(end)
            self.shown.show_if_possible(self.state.visible)

    def advance_high_watermark(self, offset: int) -> int:
        """See Log.advance_high_watermark()."""
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
                offset, _ = batch_around(self.state.segments, offset)  # down to where a batch ends
            if offset > self.state.visible:
                self.state.show(offset)
                self.shown.show_if_possible(offset)
            return self.state.visible

    def _note_failure(self, cause: BaseException) -> None:
        """Called when the log was poisoned. Notes a failed write or sync for the next opening and other processes."""
        if not isinstance(cause, (LogClosedError, CorruptLogError, LogNotFoundError)):
            recovery.note_failed_sync(self.fs, self.path)
            if self.sharing is not None:
                self.sharing.fail()
        if not isinstance(cause, LogClosedError):
            tell("log", ERROR, "%s refuses writes until it is opened again: %r", self.path, cause)

    @locked
    def stir_locked(self) -> None:
        self.is_resting = False
        if self.on_stir is not None:
            self.on_stir()

    # -- segments -------------------------------------------------------------------------------------------------

    @keeps_order
    def roll_locked(self, base_offset: int | None = None) -> None:
        """Syncs the old segment and its indexes, then creates the new file and syncs its name, before the first write.

        base_offset: of the new segment, if it lies above the log end offset; a gap is left before it.
        """
        if base_offset is None:
            base = self.state.end
        else:
            base = base_offset
        old = self.active
        path = os.path.join(self.path, file_name(base, LOG))
        # Take the snapshot before the new segment exists: it covers the records below the new base offset.
        producers = self.producers.to_save(has_producers=self.notes.producers)
        if self.lacks_aborted:
            self.index_aborted_locked()
        with self.commit.held():
            try:
                sealed = old.seal()
                self.is_midway = True
                new = ActiveSegment(self.fs, self.path, base, self.state.config, create=True)
                self.fs.sync_dir(self.path)
                self.state.segments = [*self.state.segments[:-1], sealed, new]
                self.active = new
                self.state.end = base
                self.commit.advance(base, self.written_bytes)  # seal() has synced all that was written
                self.is_midway = False
            except BaseException as error:
                # Once the new file exists, its name claims the next offsets, and an append to the old segment would
                # give them out twice. Before that, lack of space or descriptors passes, and the append may be repeated.
                goes_on = False  # even if there is no memory for the check
                try:
                    goes_on = isinstance(error, (DiskFullError, ResourceError)) and not self.fs.exists(path)
                finally:
                    if goes_on:
                        self.is_midway = False
                    else:
                        self.commit.poison(error)
                if isinstance(error, (FileExistsError, FileNotFoundError)):
                    raise CorruptLogError("another program changed the directory", path=path) from error
                raise
        self.rolls += 1
        self.producers.save(producers)
        if self.on_stir is None or self.commit.synced_bytes - self.recovery_bytes > _RECOVERY_LAG_BYTES:
            self.save_recovery_point_locked()
        else:
            # The LogDir saves it at its next tick(), together with its other logs, because one file holds all of them.
            # If a crash comes first, the next opening checks this segment too, and reports damage in it as an error.
            self.active.offer_indexes()
            self.last_recovery_ms = self.fs.monotonic_ms() - RECOVERY_LAG_MS
            self.stir_locked()
        # A file that existed at opening was not checked in full, so a seal could certify damage as sound.
        if old.is_own and old.size_bytes <= seals.ROLL_BYTES:
            seals.seal(self.fs, old, old.last_offset + 1, new.base_offset)


def may_change_transactions(data: bytes | memoryview, batches: Sequence[EncodedBatch] | None) -> bool:
    """Whether one of some batches belongs to a transaction, or is a control batch. batches: as for write_locked()."""
    if batches is None:
        return bool(data[_ATTRIBUTES_POSITION] & _TRANSACTIONS_MASK)
    return any(data[position + _ATTRIBUTES_POSITION] & _TRANSACTIONS_MASK for position, _, _, _ in batches)
