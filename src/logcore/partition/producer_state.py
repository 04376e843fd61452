"""The state of a log's producers: in memory, in snapshots and in later batches.

Rules (storage format sections 5.1 to 5.5):
- The state is loaded when the first idempotent producer appends. A log without such
  producers never pays for it.
- The state is loaded from the newest valid snapshot at or below the log end, and from
  the batches after it. After an append that may have stored a part of its batches, the
  state is dropped and loaded again.
- Each roll saves the state below the new segment. During an append, this state is read
  from the log, because batches are added to the state in memory only after the whole
  append is stored.
- A snapshot contains the newest batch of each producer. A client may resend its last
  five batches, so earlier ones are read from the log if they are near its end.
- A snapshot is a cache. If it cannot be written, the next opening reads headers
  instead. A snapshot above the log end describes removed records, and must be deleted
  before other records get their offsets.

All functions are called with the log's lock held. This module checks no sequence
numbers (producers.py does) and writes no segments (writer.py does).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Final

import numpy as np

from logcore.errors import (
    CorruptBatchError,
    DiskFullError,
    OutOfOrderSequenceError,
    ResourceError,
    StorageReadError,
    StorageWriteError,
)
from logcore.fs import FS
from logcore.kernels import layout
from logcore.kernels.layout import EncodedBatch
from logcore.metadata import checkpoint
from logcore.metadata.filenames import SNAPSHOT, base_offset_of, file_name
from logcore.partition.order import end_of, in_order
from logcore.partition.producers import Producers, SequencedBatch, last_sequence
from logcore.partition.scan import slot_of
from logcore.segment import Segment

#: Producer id, producer epoch, base sequence and record count, from byte 43 of a v2
#: batch on.
_PRODUCER: Final = struct.Struct(">qhii")

#: How far before a snapshot to search for batches that a client may still resend: five
#: requests of 1 MiB, from several clients. Reading a header takes 3 us, and a batch has
#: at least 100 bytes.
_READ_BACK_BYTES: Final = 8 << 20

#: The batches to add to the state once they are stored: (producer id, epoch, whether
#: the batch is transactional, batch).
Sequenced = list[tuple[int, int, bool, SequencedBatch]]


class ProducerState:
    """The producers of the log in a directory."""

    def __init__(
        self,
        fs: FS,
        path: str,
        extent: Callable[[], tuple[Sequence[Segment], int]],
        now_ms: Callable[[], int],
    ) -> None:
        """Create an empty state; the producers are loaded later.

        `extent` returns the segments of the log and its end offset. `now_ms` returns
        the trusted time.
        """
        self._fs = fs
        self._now_ms = now_ms
        self._path = path
        self._extent = extent
        self._known: Producers | None = (
            None  # None until the first known(), and after forget()
        )
        self._storing_from: int | None = None  # the log end before a running append

    def forget(self) -> None:
        """Drop the state. It is loaded again when it is next needed."""
        self._known = None

    @property
    def is_known(self) -> bool:
        """Whether known() can return without reading."""
        return self._known is not None

    def known(self) -> Producers:
        """Return the producers as of the log end.

        Raises:
            CorruptBatchError, StorageReadError: they could not be loaded.
        """
        if self._known is None:
            self._known = self._looked_up()
        _, end = self._extent()
        if self._known.next_offset < end:
            # Batches that were appended without add() have no producer id.
            self._known.next_offset = end
        return self._known

    def _looked_up(self) -> Producers:
        segments, end = self._extent()
        # 1. Load the newest snapshot. One below the first segment would lack the
        # deleted batches in between. One below the log start is valid, because the
        # segment that contains the log start still has the batches after it.
        producers = self._loaded(segments[0].base_offset, end)
        # An empty snapshot differs from None: it shows that there are no producers
        # below.
        if producers is None:
            producers = Producers(next_offset=segments[0].base_offset)
        else:
            # 2. Add earlier batches. Without them, a batch that is resent may be
            # refused as out of order, but it is never stored twice.
            with contextlib.suppress(CorruptBatchError, StorageReadError):
                producers.fill(_last_below(segments, producers.next_offset))
        # 3. Read the batches after the snapshot.
        for segment in segments[max(0, slot_of(segments, producers.next_offset)) :]:
            start = max(producers.next_offset, segment.base_offset)
            for facts, position, why in segment.walk(segment.find(start), crc=False):
                producers.add_facts(
                    facts[facts["last_offset"] < end], coordinator_epochs(segment)
                )
                if why not in (layout.WALK_END, layout.WALK_LIMIT):
                    raise CorruptBatchError(
                        layout.WALK_REASONS[why], path=segment.path, position=position
                    )
        producers.expire(self._now_ms())
        return producers

    def adopt(self, facts: layout.Facts, segment: Segment) -> None:
        """Add batches that another process has appended to a segment, in order."""
        if self._known is None:
            return
        try:
            self._known.add_facts(facts, coordinator_epochs(segment))
        except BaseException:
            self.forget()
            raise

    def expire(self, now_ms: int) -> None:
        """Remove producers that have written no batch for a day."""
        if self._known is not None:
            self._known.expire(now_ms)

    # -- appending ---------------------------------------------------------------------

    def check_sequences(
        self, raw: bytearray, batches: Sequence[EncodedBatch]
    ) -> Sequenced | SequencedBatch | None:
        """Check the sequence numbers of batches before they are appended.

        Returns the facts that storing() needs, or None if no batch has a producer. If a
        single batch repeats a stored one, returns the stored batch.

        Raises:
            InvalidProducerEpochError, OutOfOrderSequenceError,
            InvalidTransactionStateError: a batch is not valid after the stored ones.
        """
        if len(batches) == 1 and raw[43] & 0x80:  # producer id -1
            return None
        found: Sequenced = []
        # The state after the batches of this call that were checked but not stored yet.
        ahead = Producers()
        for position, _, last_offset, max_timestamp in batches:
            producer_id, epoch, first_sequence, count = _PRODUCER.unpack_from(
                raw, position + 43
            )
            if producer_id < 0:
                continue
            if producer_id in ahead:
                state = ahead
            else:
                state = self.known()
            is_transactional = bool(
                raw[position + layout.CRC_START + 1] & layout.TRANSACTIONAL_BIT
            )
            duplicate = state.duplicate_of(
                producer_id,
                epoch,
                first_sequence,
                count,
                is_transactional=is_transactional,
            )
            if duplicate is not None:
                if len(batches) == 1:
                    return duplicate
                # One receipt cannot describe both old and new batches.
                raise OutOfOrderSequenceError(
                    "a batch among several was stored before", found=first_sequence
                )
            last = last_sequence(first_sequence, count)
            batch = SequencedBatch(
                first_sequence,
                last,
                last_offset - count + 1,
                last_offset,
                max_timestamp,
            )
            found.append((producer_id, epoch, is_transactional, batch))
            ahead.add(producer_id, epoch, batch, is_transactional=is_transactional)
        return found or None

    def is_next(self, producer_id: int, epoch: int, first_sequence: int) -> bool:
        """Return whether the next batch of a loaded producer has this sequence.

        False if the state is not loaded, and for a batch of a transaction.
        """
        return self._known is not None and self._known.is_next(
            producer_id, epoch, first_sequence
        )

    def add_last(
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        record_count: int,
        max_timestamp: int,
    ) -> None:
        """Add the last batch of the log, which belongs to no transaction.

        After an error, the caller calls forget().
        """
        _, end = self._extent()
        batch = SequencedBatch(
            first_sequence,
            last_sequence(first_sequence, record_count),
            end - record_count,
            end - 1,
            max_timestamp,
        )
        self.known().add(producer_id, epoch, batch, is_transactional=False)

    @contextlib.contextmanager
    def storing(
        self, sequenced: Sequenced | None, *, is_checked: bool
    ) -> Generator[None, None, None]:
        """Wrap the writing of batches, and add them to the state once all are stored.

        `sequenced` is the result of check_sequences(). With is_checked=False the batches were not
        checked, and only their headers contain producers.
        """
        # Unchecked batches may name any producer, so the state is loaded again later.
        if not is_checked:
            self.forget()
        _, self._storing_from = self._extent()
        try:
            yield
            if not is_checked:
                # A roll within the append may have loaded it before the rest was
                # stored.
                self.forget()
            for producer_id, epoch, is_transactional, batch in sequenced or ():
                self.known().add(
                    producer_id, epoch, batch, is_transactional=is_transactional
                )
        except BaseException:
            self.forget()  # a part of the append may remain
            raise
        finally:
            self._storing_from = None

    # -- snapshots ---------------------------------------------------------------------

    def _offsets(self) -> list[int]:
        return _snapshot_offsets(self._fs, self._path)

    def _loaded(self, low: int, high: int) -> Producers | None:
        """Return the producers in the newest valid snapshot from `low` to `high`."""
        for offset in reversed(self._offsets()):
            if not low <= offset <= high:
                continue
            content = checkpoint.read(self._fs, self._path, file_name(offset, SNAPSHOT))
            if content is None:
                continue
            producers = Producers.unpack(content, offset)
            if producers is not None:
                return producers
        return None

    def to_save(self, *, has_producers: bool) -> Producers | None:
        """Return the producers to save at a roll, or None.

        Once retention has deleted the batches, only a snapshot describes them. The
        result is None if there is no state to save, or if the batches cannot be read.
        `has_producers`: whether the log may contain producers. A state that had to be
        read is saved even if it is empty. Otherwise a copy of old records would read
        all of them again at its next roll.
        """
        # During an append, some of its batches are stored but not in the state yet.
        _, end = self._extent()
        has_unfinished_write = (
            self._storing_from is not None and end > self._storing_from
        )
        if self._known is not None and not has_unfinished_write:
            return self.if_any()
        if not has_producers:
            return None
        with contextlib.suppress(CorruptBatchError, StorageReadError):
            if has_unfinished_write:
                return self._looked_up()
            return self.known()
        return None

    def if_any(self) -> Producers | None:
        """Return the producers if some are loaded, else None. Reads no files."""
        if self._known is None or not len(self._known):
            return None
        return self.known()

    def save(self, producers: Producers | None) -> None:
        """Save producers in a snapshot at the log end.

        Deletes snapshots that are not at the start of a segment.
        """
        if producers is None:
            return
        producers.expire(self._now_ms())
        segments, end = self._extent()
        with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
            checkpoint.write(
                self._fs, self._path, file_name(end, SNAPSHOT), producers.pack()
            )
            self._remove_all_but({end, *(segment.base_offset for segment in segments)})

    def _remove_all_but(self, kept: Collection[int]) -> None:
        for offset in self._offsets():
            if offset not in kept:
                self._fs.unlink(os.path.join(self._path, file_name(offset, SNAPSHOT)))

    def remove_above(self, offset: int) -> None:
        """Delete the snapshots of records at and above `offset`, which were removed."""
        remove_snapshots_above(self._fs, self._path, offset)


def _last_below(segments: Sequence[Segment], end: int) -> Producers:
    """Return the last batches of producers below `end`.

    The result is empty if these batches are not all valid and without gaps: they extend
    a snapshot that has a CRC, so unchecked data must not be added to it. Records of
    markers are not decoded, because the snapshot contains their coordinator epochs.
    """
    # Go back through the segments until enough bytes are found. Then read forwards,
    # because batches must be added in order.
    spans: list[tuple[Segment, int, int]] = []  # (segment, start, stop)
    left = _READ_BACK_BYTES
    for segment in reversed(segments[: slot_of(segments, end - 1) + 1]):
        stop = segment.find(end)
        start = min(stop, _find_start(segment, stop - left))
        spans.append((segment, start, stop))
        left -= stop - start
        if left <= 0:
            break
    found = Producers()
    expected = -1
    for segment, start, stop in reversed(spans):
        for facts, _, why in segment.walk(start, crc=True, stop=stop):
            if len(facts) and expected < 0:
                expected = int(facts["base_offset"][0])
            is_sound = why in (layout.WALK_END, layout.WALK_LIMIT)
            if not is_sound or in_order(facts, expected, end, dense_from=0) < len(
                facts
            ):
                return Producers()
            expected = end_of(facts, expected)
            found.add_facts(facts, lambda position: -1)
    return found


def _find_start(segment: Segment, position: int) -> int:
    """Return the position of a batch at or before `position`, by the index; or 0."""
    entries = segment.offset_index.array()
    slot = int(np.searchsorted(entries["position"], position, side="right")) - 1
    if slot < 0:
        return 0
    return segment.start_position(
        segment.base_offset + int(entries["relative_offset"][slot])
    )


def coordinator_epochs(segment: Segment) -> Callable[[int], int]:
    """Return a function for Producers.add_facts() that reads markers of a segment.

    It returns the coordinator epoch of the marker at a position (storage format section
    1.10), or -1 for another control batch.
    """

    def coordinator_epoch(position: int) -> int:
        batch = segment.batch(position)
        if batch is None:
            return -1
        return batch.marker().coordinator_epoch

    return coordinator_epoch


def remove_snapshots_above(fs: FS, path: str, offset: int) -> None:
    """Delete snapshots of records at and above `offset`, which were removed."""
    for snapshot_offset in _snapshot_offsets(fs, path):
        if snapshot_offset > offset:
            fs.unlink(os.path.join(path, file_name(snapshot_offset, SNAPSHOT)))


def _snapshot_offsets(fs: FS, path: str) -> list[int]:
    """Return the offsets in the names of a directory's snapshots, in rising order."""
    return sorted(
        offset
        for name in fs.listdir(path)
        if (offset := base_offset_of(name, SNAPSHOT)) is not None
    )
