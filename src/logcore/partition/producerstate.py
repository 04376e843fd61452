"""The producers of a log: in memory, in the snapshots beside its segments, and in the batches behind them.

Rules (storage format sections 5.1 to 5.5):
- Nothing is looked up before the first idempotent producer comes: a log without such producers never pays for them.
- What is known is that of the newest sound snapshot at or below the end, and of the batches behind it. After an append
  that may have stored a part, it is forgotten and looked up again.
- Each roll saves what the batches below it say. In the middle of an append that is read from them, because they are
  noted once all of the append is stored.
- A snapshot has room for the newest batch of a producer. A client may send the five last ones again, so those before it
  are read from the log, as far as they are near its end.
- A snapshot is a cache. If it cannot be written, the next opening walks over heads instead. A snapshot above the end
  tells of removed records, and must be deleted before others get their offsets.

All is called under the log's lock. This module judges no sequence (producers.py) and writes no segment (log.py).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Final

import numpy as np

from logcore import checkpoint
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
from logcore.names import SNAPSHOT, base_offset_of, file_name
from logcore.partition.order import end_of, in_order
from logcore.partition.producers import Producers, SequencedBatch, last_sequence
from logcore.partition.scan import slot_of
from logcore.segment import Segment

#: Producer id, producer epoch, base sequence and record count, from byte 43 of a v2 batch on.
_PRODUCER: Final = struct.Struct(">qhii")

#: How far before a snapshot to look for batches that a client may still send again: five requests of 1 MiB, some of
#: several clients. A head takes 3 us, and a batch has 100 bytes at least.
_LOOK_BACK_BYTES: Final = 8 << 20

#: What is to be noted of batches once they are stored: (producer id, epoch, whether it is transactional, batch).
Sequenced = list[tuple[int, int, bool, SequencedBatch]]


class ProducerState:
    """The producers of the log in a directory. extent(): its segments and its end offset now. now_ms(): the trusted
    time.
    """

    def __init__(
        self, fs: FS, path: str, extent: Callable[[], tuple[Sequence[Segment], int]], now_ms: Callable[[], int]
    ) -> None:
        self._fs = fs
        self._now_ms = now_ms
        self._path = path
        self._extent = extent
        self._known: Producers | None = None  # None until the first known(), and after forget()
        self._storing_from: int | None = None  # the log end where an append under way began

    def forget(self) -> None:
        """Looked up again when it is needed."""
        self._known = None

    @property
    def is_known(self) -> bool:
        """Whether known() has nothing to read."""
        return self._known is not None

    def known(self) -> Producers:
        """The producers, as of the log's end. Raises CorruptBatchError and StorageReadError."""
        if self._known is None:
            self._known = self._looked_up()
        _, end = self._extent()
        if self._known.next_offset < end:
            self._known.next_offset = end  # what others appended meanwhile has no producer id
        return self._known

    def _looked_up(self) -> Producers:
        segments, end = self._extent()
        # One below the first segment would lack the batches between it and there, which were deleted. One below the
        # log start is good: the segment that holds the log start still has the batches behind it.
        producers = self._loaded(segments[0].base_offset, end)
        if producers is None:  # and not an empty one, which says that no producer is known up to there
            producers = Producers(next_offset=segments[0].base_offset)
        else:
            # Without them a batch that is sent again may be refused as out of order, but never be stored twice.
            with contextlib.suppress(CorruptBatchError, StorageReadError):
                producers.fill(_last_below(segments, producers.next_offset))
        for segment in segments[max(0, slot_of(segments, producers.next_offset)) :]:
            start = max(producers.next_offset, segment.base_offset)
            for facts, position, why in segment.walk(segment.find(start), crc=False):
                producers.add_facts(facts[facts["last_offset"] < end], coordinator_epochs(segment))
                if why not in (layout.WALK_END, layout.WALK_LIMIT):
                    raise CorruptBatchError(layout.WALK_REASONS[why], path=segment.path, position=position)
        producers.expire(self._now_ms())
        return producers

    def adopt(self, facts: layout.Facts, segment: Segment) -> None:
        """Takes in batches that another process has appended to a segment, in order."""
        if self._known is None:
            return
        try:
            self._known.add_facts(facts, coordinator_epochs(segment))
        except BaseException:
            self.forget()
            raise

    def expire(self, now_ms: int) -> None:
        """Forgets producers that have written nothing for a day."""
        if self._known is not None:
            self._known.expire(now_ms)

    # -- batches to append ---------------------------------------------------------------------------------------

    def judge(self, raw: bytearray, batches: Sequence[EncodedBatch]) -> Sequenced | SequencedBatch | None:
        """The facts of batches that storing() takes, None when they name no producer; or the batch that they repeat.

        Raises InvalidProducerEpochError, OutOfOrderSequenceError and InvalidTransactionStateError.
        """
        if len(batches) == 1 and raw[43] & 0x80:  # producer id -1
            return None
        found: Sequenced = []
        ahead = Producers()  # as they will be after the batches of this call that were judged, which are not stored yet
        for position, _, last_offset, max_timestamp in batches:
            producer_id, epoch, first_sequence, count = _PRODUCER.unpack_from(raw, position + 43)
            if producer_id < 0:
                continue
            if producer_id in ahead:
                judge = ahead
            else:
                judge = self.known()
            is_transactional = bool(raw[position + layout.CRC_START + 1] & layout.TRANSACTIONAL_BIT)
            duplicate = judge.duplicate_of(producer_id, epoch, first_sequence, count, is_transactional=is_transactional)
            if duplicate is not None:
                if len(batches) == 1:
                    return duplicate
                # One receipt cannot say of some that they are old and of others that they are new.
                raise OutOfOrderSequenceError("a batch among several was stored before", found=first_sequence)
            last = last_sequence(first_sequence, count)
            batch = SequencedBatch(first_sequence, last, last_offset - count + 1, last_offset, max_timestamp)
            found.append((producer_id, epoch, is_transactional, batch))
            ahead.add(producer_id, epoch, batch, is_transactional=is_transactional)
        return found or None

    @contextlib.contextmanager
    def storing(self, sequenced: Sequenced | None, *, is_judged: bool) -> Generator[None, None, None]:
        """Around the writing of batches; notes those of judge() once all are stored. is_judged: False for batches that
        came as they are, of which only their heads tell.
        """
        # Batches that were not judged may name any producer: what is known is looked up again when it is next needed.
        if not is_judged:
            self.forget()
        _, self._storing_from = self._extent()
        try:
            yield
            if not is_judged:
                self.forget()  # a roll within the append may have looked them up, before the rest was stored
            for producer_id, epoch, is_transactional, batch in sequenced or ():
                self.known().add(producer_id, epoch, batch, is_transactional=is_transactional)
        except BaseException:
            self.forget()  # some of it may have stayed
            raise
        finally:
            self._storing_from = None

    # -- snapshots -----------------------------------------------------------------------------------------------

    def _offsets(self) -> list[int]:
        return _snapshot_offsets(self._fs, self._path)

    def _loaded(self, low: int, high: int) -> Producers | None:
        """The producers in the newest sound snapshot at an offset from low to high."""
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
        """The producers for save() at a roll: once retention has deleted the batches, only a snapshot tells
        of them. None when there is nothing to save, or the batches cannot be read.

        has_producers: whether the log may name any. What had to be read is saved also when no producer is known any
        more: a copy of old records would read all of them again at its next roll.
        """
        # In the middle of an append some of its batches are stored, and storing() has noted none of them yet.
        _, end = self._extent()
        is_midway = self._storing_from is not None and end > self._storing_from
        if self._known is not None and not is_midway:
            return self.if_any()
        if not has_producers:
            return None
        with contextlib.suppress(CorruptBatchError, StorageReadError):
            if is_midway:
                return self._looked_up()
            return self.known()
        return None

    def if_any(self) -> Producers | None:
        """The producers, where some are known without looking."""
        if self._known is None or not len(self._known):
            return None
        return self.known()

    def save(self, producers: Producers | None) -> None:
        """Saves producers in a snapshot at the log end, and removes those that are not at the start of a segment."""
        if producers is None:
            return
        producers.expire(self._now_ms())
        segments, end = self._extent()
        with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
            checkpoint.write(self._fs, self._path, file_name(end, SNAPSHOT), producers.pack())
            self._remove_all_but({end, *(segment.base_offset for segment in segments)})

    def _remove_all_but(self, kept: Collection[int]) -> None:
        for offset in self._offsets():
            if offset not in kept:
                self._fs.unlink(os.path.join(self._path, file_name(offset, SNAPSHOT)))

    def remove_above(self, offset: int) -> None:
        """Those that tell of records at and above an offset, which are gone."""
        remove_snapshots_above(self._fs, self._path, offset)


def _last_below(segments: Sequence[Segment], end: int) -> Producers:
    """The last batches of producers below an offset; none where these are not all sound and without gaps.

    The snapshot at that offset has a CRC, so nothing unchecked may stand in its place. Of markers no record is decoded:
    the snapshot names their coordinator epochs.
    """
    # Backwards through the segments until enough bytes are found; then read forwards, for batches come in order.
    spans: list[tuple[Segment, int, int]] = []  # (segment, start, stop)
    left = _LOOK_BACK_BYTES
    for segment in reversed(segments[: slot_of(segments, end - 1) + 1]):
        stop = segment.find(end)
        start = min(stop, _start_near(segment, stop - left))
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
            if not is_sound or in_order(facts, expected, end, dense_from=0) < len(facts):
                return Producers()
            expected = end_of(facts, expected)
            found.add_facts(facts, lambda position: -1)
    return found


def _start_near(segment: Segment, position: int) -> int:
    """The position of a batch at or before another position, by the index; 0 when there is none."""
    entries = segment.offset_index.array()
    slot = int(np.searchsorted(entries["position"], position, side="right")) - 1
    if slot < 0:
        return 0
    return segment.start_position(segment.base_offset + int(entries["relative_offset"][slot]))


def coordinator_epochs(segment: Segment) -> Callable[[int], int]:
    """A function for Producers.add_facts(): the coordinator epoch in the marker at a position (storage format section
    1.10); -1 for another control batch.
    """

    def coordinator_epoch(position: int) -> int:
        batch = segment.batch(position)
        if batch is None:
            return -1
        return batch.marker().coordinator_epoch

    return coordinator_epoch


def remove_snapshots_above(fs: FS, path: str, offset: int) -> None:
    """Removes the snapshots in a partition directory that tell of records at and above an offset, which are gone."""
    for snapshot_offset in _snapshot_offsets(fs, path):
        if snapshot_offset > offset:
            fs.unlink(os.path.join(path, file_name(snapshot_offset, SNAPSHOT)))


def _snapshot_offsets(fs: FS, path: str) -> list[int]:
    """Offsets in the names of the snapshots in a directory, rising."""
    return sorted(offset for name in fs.listdir(path) if (offset := base_offset_of(name, SNAPSHOT)) is not None)
