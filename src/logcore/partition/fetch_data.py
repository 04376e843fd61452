"""Decodes the records in a Fetch response, as a consumer reads them.

Rules:
- The first batch may begin before the requested offset, and the last one may be
  truncated. Neither is an error.
- Control batches are left out. Batches of aborted transactions are left out if the
  response lists those transactions.
- Every CRC is checked.

This module sends no requests. Callers pass it the fetched bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from logcore.format.columns import RecordColumns
from logcore.kernels import kernel, layout
from logcore.partition.scan import Run
from logcore.recordbatch import SLICE_ROWS, RecordBatch

#: Maximum rows and bytes of plain batches that are decoded at once.
_RUN_ROWS = 32_768
_RUN_BYTES = 4 << 20


def next_offset(data: memoryview, start: int) -> int:
    """Return the offset to fetch next: the end of the complete batches, or `start`."""
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
) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
    """Yield the records with start <= offset < end, as columns with timestamp types.

    A timestamp type is 0 for CreateTime, 1 for LogAppendTime and -1 for none. `data` is
    the content of one partition; the columns borrow it. `aborted` lists (producer id,
    first offset) of the aborted transactions in it, from a response under
    read_committed. `source` describes the origin of the data in errors.

    Raises:
        CorruptBatchError, InvalidRecordError, RecordTooLargeError,
        UnsupportedCodecError.
    """
    # Aborted transactions whose first offset was not reached yet, the next one last.
    waiting = sorted(
        ((first, producer_id) for producer_id, first in aborted), reverse=True
    )
    # Producers inside an aborted transaction, until its ABORT marker.
    discarded: set[int] = set()
    at = 0
    limit = len(data)
    while at < limit:
        # Decode many batches at once if none of them must be left out.
        if not aborted:
            stop, rows, _ = kernel.plan_run(
                data, at, limit, _RUN_ROWS, _RUN_BYTES, end, -1, False
            )
            if stop > at and rows <= _RUN_ROWS:
                run = Run(data, at, stop, rows, 0, source)
                at = stop
                yield from _between(run.columns(), run.timestamp_types(), start, end)
                continue
        batch = RecordBatch.parse(data, at, limit, path=source)
        if batch is None:  # the last one, truncated by the size limit of the response
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
        for part in batch.column_slices(SLICE_ROWS):
            types = np.full(len(part), batch.timestamp_type, np.int32)
            yield from _between(part, types, start, end)


def _between(
    columns: RecordColumns, types: npt.NDArray[np.int32], start: int, end: int
) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
    """Yield the part of the columns in a range, if it is not empty."""
    inside = columns.between(start, end)
    if len(inside) == len(columns):
        if len(columns):
            yield columns, types
    elif len(inside):
        keep = (columns.offsets >= start) & (columns.offsets < end)
        yield inside, types[keep]
