"""Functions for calls that send many records: sizes of records, limits of batches, and
one outcome for all batches of a call.

Partitions are chosen in routing.py.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from logcore.errors import InvalidRecordError
from logcore.kernels import Receipt, kernel
from logcore.kernels.layout import INT32_MAX
from logcore.kernels.sending import RECORD_BYTES
from logcore.producer.accumulator import BATCH_BYTES, HEADER_BYTES, UnsentColumns

_GET_KEY = operator.itemgetter(0)
_GET_VALUE = operator.itemgetter(1)

Sizes = npt.NDArray[np.int64]


class BatchOutcomes:
    """The outcome of one send_many() or send_columns(): a receipt for each batch, or
    the first error.
    """

    def __init__(self) -> None:
        self.future: Future[list[Receipt]] = Future()
        # The future cannot be cancelled, because records cannot be removed from a batch.
        self.future.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._receipts: list[Receipt] = []
        self._error: Exception | None = None
        # Number of batches without an outcome. The call that sends them counts as one
        # more until it has queued all records.
        self._pending_count = 1

    def add_pending(self) -> None:
        """Count one more batch."""
        with self._lock:
            self._pending_count += 1

    def fail(self, error: Exception) -> None:
        """Handle a call that could not queue all records. Raises the error if no record
        was queued. Otherwise, the future raises the error.
        """
        with self._lock:
            if self._pending_count == 1 and not self._receipts and self._error is None:
                raise error
            self._error = self._error or error

    def add(self, receipt: Receipt | None, error: Exception | None) -> None:
        """Add the outcome of one batch. The call that sends the records adds
        (None, None) after it has queued all of them.
        """
        with self._lock:
            self._pending_count -= 1
            self._error = self._error or error
            if receipt is not None:
                self._receipts.append(receipt)
            if self._pending_count:
                return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(
                sorted(
                    self._receipts,
                    key=lambda receipt: (receipt.partition, receipt.offset),
                )
            )


def keys_and_sizes(rows: Sequence[Any]) -> tuple[list[bytes | None] | None, Sizes]:
    """Return the keys of records, or None if no record has a key, and the maximum size
    of each record in a batch, int64 of shape (n,).

    Raises InvalidRecordError for an object that is not a record.
    """
    if type(rows) is list:
        keys_and_plain_sizes = kernel.plain_rows(rows)
        if keys_and_plain_sizes is not None:
            return keys_and_plain_sizes
    try:
        keys = list(map(_GET_KEY, rows))
        sizes = _lengths(list(map(_GET_VALUE, rows)))
        has_keys = keys.count(None) < len(keys)
        if has_keys:
            sizes += _lengths(keys)
            if not {bytes, type(None)}.issuperset(map(type, keys)):
                keys = [None if key is None else bytes(memoryview(key)) for key in keys]
        if max(map(len, rows), default=2) > 2:
            for index, row in enumerate(rows):
                if len(row) > 2 and row[2]:
                    sizes[index] += sum(
                        len(name) * 4 + len(content or b"") + HEADER_BYTES
                        for name, content in row[2]
                    )
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise InvalidRecordError(
            "a record is a tuple",
            expected="(key, value[, headers[, timestamp_ms]])",
            found=repr(error),
        ) from error
    return keys if has_keys else None, sizes + RECORD_BYTES


def _lengths(parts: list[Any]) -> Sizes:
    """Return the lengths of byte strings. The length of None is 0."""
    if None in parts:
        parts = [part or b"" for part in parts]
    return np.fromiter(map(len, parts), np.int64, len(parts))


def sizes_of_columns(columns: UnsentColumns) -> Sizes:
    """Return the maximum size of each record in a batch, int64 of shape (n,)."""
    sizes = np.full(columns.count, RECORD_BYTES, np.int64)
    for column in (columns.keys, columns.values):
        if column is not None:
            sizes += np.diff(column[1])
    return sizes


def batch_ranges(
    sizes: Sizes, limit_bytes: int, max_records: int
) -> Iterator[tuple[int, int, int]]:
    """Divide records of these sizes into batches. Return (start, stop, bytes) for each
    batch.

    A batch has at most `limit_bytes` and at most `max_records`, but at least one record.
    """
    cumulative_bytes = sizes.cumsum()  # np.cumsum() takes 1 us more
    start = 0
    previous_bytes = 0
    while start < len(sizes):
        stop = int(
            cumulative_bytes.searchsorted(
                previous_bytes + limit_bytes - BATCH_BYTES, "right"
            )
        )
        stop = min(max(stop, start + 1), start + max_records)
        stop_bytes = int(cumulative_bytes[stop - 1])
        yield start, stop, stop_bytes - previous_bytes
        start = stop
        previous_bytes = stop_bytes


def select_rows(
    columns: UnsentColumns, indexes: npt.NDArray[np.int64]
) -> UnsentColumns:
    """Return a copy of the rows at `indexes`.

    Raises InvalidRecordError for a column of more than 2^31-1 bytes.
    """
    times = None
    if columns.times is not None:
        times = columns.times[indexes]
    keys = None
    if columns.keys is not None:
        keys = _select_column_rows(columns.keys, indexes)
    values = None
    if columns.values is not None:
        values = _select_column_rows(columns.values, indexes)
    return UnsentColumns(keys, values, times, len(indexes))


def _select_column_rows(
    column: tuple[Any, Any, Any], indexes: npt.NDArray[np.int64]
) -> tuple[Any, Any, Any]:
    data, edges, nulls = column
    first = int(edges[0])
    if int(edges[-1]) - first > INT32_MAX:
        raise InvalidRecordError(
            "a column is too large to be divided by its keys",
            expected="at most 2^31-1 bytes",
        )
    positions = np.ascontiguousarray((edges[:-1] - first)[indexes], np.int32)
    sizes = np.ascontiguousarray(np.diff(edges)[indexes], np.int32)
    offsets, parts = kernel.gather(data[first : int(edges[-1])], positions, sizes)
    return (
        parts,
        offsets.astype(np.int64),
        None if nulls is None else np.ascontiguousarray(nulls[indexes]),
    )
