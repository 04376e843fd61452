"""The records in an answer to Fetch, as a consumer reads them.

Rules:
- The first batch may begin before the offset that was asked for, and the last may be cut off; neither is an error.
- Control batches are left out. Batches of aborted transactions are left out when the answer names those.
- Every CRC is checked.

This module sends no request: what was fetched is handed to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from logcore.config import MAX_DECOMPRESSED_BYTES
from logcore.format.columns import RecordColumns
from logcore.kernels import kernel, layout
from logcore.partition.scan import Run
from logcore.recordbatch import SLICE_ROWS, RecordBatch

#: A run is decoded at once: so many records and bytes of plain batches at most.
_RUN_ROWS = 32_768
_RUN_BYTES = 4 << 20


def next_offset(data: memoryview, start: int) -> int:
    """The offset to fetch next, by the heads of the whole batches in an answer; start when there is none."""
    facts, _, _ = kernel.walk(data, 0, len(data), layout.INT32_MAX, False)
    if len(facts):
        return max(start, int(facts["last_offset"][-1]) + 1)
    return start


def fetched_columns(
    data: memoryview,
    start: int,
    end: int,
    *,
    aborted: Sequence[tuple[int, int]] = (),
    source: str,
    max_size: int = MAX_DECOMPRESSED_BYTES,
) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
    """The records with start <= offset < end, as columns with the types of their timestamps: 0 CreateTime,
    1 LogAppendTime, -1 none.

    data: the bytes of one partition, borrowed by the columns. aborted: (producer id, first offset) of the aborted
    transactions in it, as the answer names them under read_committed. source: how errors name where data came from.
    max_size: most bytes that a batch may inflate to. Raises CorruptBatchError, InvalidRecordError, RecordTooLargeError,
    UnsupportedCodecError.
    """
    # Aborted transactions whose first offset is still to come, the next one last.
    waiting = sorted(((first, producer_id) for producer_id, first in aborted), reverse=True)
    discarded: set[int] = set()  # producers inside an aborted transaction, until its ABORT marker
    at = 0
    limit = len(data)
    while at < limit:
        # Many batches at once, as long as none of them has to be left out.
        if not aborted:
            stop, rows, _ = kernel.plan_run(data, at, limit, _RUN_ROWS, _RUN_BYTES, end, -1, False)
            if stop > at and rows <= _RUN_ROWS:
                run = Run(data, at, stop, rows, 0, source)
                at = stop
                yield from _between(run.columns(), run.timestamp_types(), start, end)
                continue
        batch = RecordBatch.parse(data, at, limit, path=source)
        if batch is None:  # the last one, cut off by the size of the answer
            return
        at += batch.size_bytes
        if batch.magic == 2 and batch.base_offset >= end:
            return
        while waiting and waiting[-1][0] <= batch.base_offset:
            discarded.add(waiting.pop()[1])
        if batch.is_control:
            if batch.control_type() == "ABORT":
                discarded.discard(batch.producer_id)
            continue
        if batch.is_transactional and batch.producer_id in discarded:
            batch.verify()  # a damaged producer id would leave out committed records
            continue
        for part in batch.column_slices(SLICE_ROWS, max_size=max_size):
            types = np.full(len(part), batch.timestamp_type, np.int32)
            yield from _between(part, types, start, end)


def _between(
    columns: RecordColumns, types: npt.NDArray[np.int32], start: int, end: int
) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
    """Those of a range, if there are any."""
    inside = columns.between(start, end)
    if len(inside) == len(columns):
        if len(columns):
            yield columns, types
    elif len(inside):
        keep = (columns.offsets >= start) & (columns.offsets < end)
        yield inside, types[keep]
