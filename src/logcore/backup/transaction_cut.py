"""Chooses the point between transactions at which the copies of all partitions end.

Rules:
- A coordinator stores a decision first, and then a marker in each partition. Both have
  the time of the coordinator, so a marker is never earlier than its decision.
- The snapshot contains the decisions up to its time, and no later marker. A decided
  transaction whose marker is missing is completed when the directory is opened.
- The snapshot contains no record of a transaction that began later. The coordinator of
  the copy would otherwise complete it with the decision of the previous transaction.

Without these rules, the copy of a transaction could be committed in one partition and
aborted in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from logcore.errors import CompactionAbandonedError
from logcore.format.transaction_records import (
    Partition,
    Status,
    StoredTransaction,
    read_transaction,
    read_transaction_key,
)
from logcore.kernels import Record, layout
from logcore.log import Log
from logcore.reader import acknowledged_end, is_written_here, stored_batches
from logcore.segment import Segment

#: Modification times of files may be earlier than the clock by this much.
_TIMES_LAG_MS: Final = 2000
_PREPARED: Final = (Status.PREPARE_COMMIT, Status.PREPARE_ABORT)


def first_after(segments: Sequence[Segment], end: int, time_ms: int) -> int:
    """Return the offset of the first batch below `end` with a later time, or `end`."""
    for segment in _changed_since(segments, time_ms):
        for facts, _, _ in segment.walk(0, crc=False):
            rows = np.flatnonzero(facts["max_timestamp"] > time_ms)
            if len(rows):
                return min(end, int(facts["base_offset"][rows[0]]))
    return end


def _changed_since(segments: Sequence[Segment], time_ms: int) -> list[Segment]:
    """Return the segments that may contain batches stored after a time, in order."""
    first = len(segments)
    while first:
        segment = segments[first - 1]
        if segment.fs.modified_ms(segment.path) < time_ms - _TIMES_LAG_MS:
            break
        first -= 1
    return list(segments[first:])


def _is_over(
    state: StoredTransaction | None, partition: Partition, has_marker: bool
) -> bool:
    """Return whether the transaction of a state has ended, so that open records of its
    producer belong to a later transaction.
    """
    if state is None:
        return True
    if state.status in _PREPARED:
        return has_marker or partition not in state.partitions
    return state.status is not Status.ONGOING


class TransactionCut:
    """Chooses the ends of partitions, with the states of all transactions.

    The logs of `__transaction_state` are read up to their present ends several times,
    because a transaction may begin while the snapshot is taken.
    """

    def __init__(self, logs: Sequence[Log], time_ms: int) -> None:
        """Read the states up to a time.

        Raises:
            CompactionAbandonedError: see refresh().
            StorageReadError, CorruptLogError, CorruptBatchError: a log cannot be read.
        """
        self._time_ms = time_ms
        self._logs = logs
        self._next_offsets = [log.log_start_offset for log in logs]
        #: The offset of the first state after the time, in each log; None if there is none.
        self._cuts: list[int | None] = [None] * len(logs)
        self._states: dict[str, StoredTransaction] = {}
        #: Ids of producers that have a state after the time.
        self._producers_with_later_states: set[int] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read the states that were stored since the last call.

        Raises:
            CompactionAbandonedError: a coordinator was interrupted, and stored a state up to
                the time after a later state. The snapshot must be taken again.
        """
        for number, log in enumerate(self._logs):
            for record in self._new_records(number, log):
                name = None
                if record.key is not None:
                    name = read_transaction_key(record.key)
                if name is None:
                    continue
                if record.timestamp_ms > self._time_ms:
                    if self._cuts[number] is None:
                        self._cuts[number] = record.offset
                    if record.value is not None:
                        self._producers_with_later_states.add(
                            read_transaction(record.value).producer_id
                        )
                elif self._cuts[number] is not None:
                    raise CompactionAbandonedError(
                        "a transaction was decided while the snapshot began; "
                        "take the snapshot again",
                        path=log.path,
                        offset=record.offset,
                    )
                elif record.value is None:
                    self._states.pop(name, None)
                else:
                    self._states[name] = read_transaction(record.value)

    def _new_records(self, number: int, log: Log) -> Iterator[Record]:
        end = log.log_end_offset
        if not is_written_here(log):
            log.refresh()
            end = acknowledged_end(log)
        for batch in stored_batches(log, self._next_offsets[number], end):
            yield from batch.records()
        self._next_offsets[number] = end

    def end_of_states(self, log: Log, end: int) -> int:
        """Return the offset of the first state after the time, or `end`."""
        self.refresh()  # the caller has read `end` after the last refresh
        cut = self._cuts[self._logs.index(log)]
        if cut is None:
            return end
        return min(end, cut)

    def choose(
        self, partition: Partition, segments: Sequence[Segment], end: int
    ) -> int:
        """Return the end of a partition's copy.

        Raises:
            CompactionAbandonedError: see refresh(); or a transaction began and was
                decided within the millisecond at which the snapshot began.
        """
        # The caller has read `end` already. So this refresh includes the state of each
        # transaction that has records below `end`: a state is stored before the records.
        self.refresh()
        open_offsets: dict[int, int] = {}
        finished: set[int] = set()
        states = {state.producer_id: state for state in self._states.values()}
        for offset, producer_id, is_marker, time_ms in self._transactional(segments):
            if offset >= end:
                break
            if not is_marker:
                open_offsets.setdefault(producer_id, offset)
                continue
            if time_ms > self._time_ms:
                end = offset
                break
            open_offsets.pop(producer_id, None)
            state = states.get(producer_id)
            if state is not None and time_ms >= state.update_ms:
                if time_ms == state.start_ms and state.status in _PREPARED:
                    raise CompactionAbandonedError(
                        "a transaction began and ended while the snapshot began; "
                        "take the snapshot again",
                        path=segments[0].directory,
                        offset=offset,
                    )
                finished.add(producer_id)
        for producer_id, offset in open_offsets.items():
            if producer_id in self._producers_with_later_states and _is_over(
                states.get(producer_id), partition, producer_id in finished
            ):
                end = min(end, offset)
        return end

    def _transactional(
        self, segments: Sequence[Segment]
    ) -> Iterator[tuple[int, int, bool, int]]:
        """Yield (base offset, producer id, is a marker, time) of transactional batches.

        Segments that have not changed since the time are left out.
        """
        for segment in _changed_since(segments, self._time_ms):
            for facts, _, _ in segment.walk(0, crc=False):
                chosen = facts[facts["attributes"] & layout.TRANSACTIONAL_BIT != 0]
                yield from zip(
                    chosen["base_offset"].tolist(),
                    chosen["producer_id"].tolist(),
                    (chosen["attributes"] & layout.CONTROL_BIT != 0).tolist(),
                    chosen["max_timestamp"].tolist(),
                    strict=True,
                )
