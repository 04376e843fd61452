"""Functions for many records in one call: their sizes, the edges of their batches, and
one outcome for all of them.

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

_FIRST = operator.itemgetter(0)
_SECOND = operator.itemgetter(1)

Sizes = npt.NDArray[np.int64]


class BatchOutcomes:
    """The outcome of one send_many() or send_columns(): a receipt for each batch, or
    the first error.
    """

    def __init__(self) -> None:
        self.future: Future[list[Receipt]] = Future()
        self.future.set_running_or_notify_cancel()  # a record cannot be taken out of its batch
        self._lock = threading.Lock()
        self._receipts: list[Receipt] = []
        self._error: Exception | None = None
        self._open = 1  # batches without an outcome, and the call that sends them

    def expect(self) -> None:
        """Count one more batch."""
        with self._lock:
            self._open += 1

    def fail(self, error: Exception) -> None:
        """Handle a call that could not send all records. Raises the error if no record
        was sent. Otherwise, the future raises the error.
        """
        with self._lock:
            if self._open == 1 and not self._receipts and self._error is None:
                raise error
            self._error = self._error or error

    def add(self, receipt: Receipt | None, error: Exception | None) -> None:
        """Add the outcome of one batch. The call itself adds (None, None) after it has
        sent all.
        """
        with self._lock:
            self._open -= 1
            self._error = self._error or error
            if receipt is not None:
                self._receipts.append(receipt)
            if self._open:
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
        measured = kernel.plain_rows(rows)
        if measured is not None:
            return measured
    try:
        keys = list(map(_FIRST, rows))
        sizes = _lengths(list(map(_SECOND, rows)))
        has_keys = keys.count(None) < len(keys)
        if has_keys:
            sizes += _lengths(keys)
            if not {bytes, type(None)}.issuperset(map(type, keys)):
                keys = [None if key is None else bytes(memoryview(key)) for key in keys]
        if max(map(len, rows), default=2) > 2:
            for at, row in enumerate(rows):
                if len(row) > 2 and row[2]:
                    sizes[at] += sum(
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


def _lengths(pieces: list[Any]) -> Sizes:
    """Return the lengths of byte strings, 0 for None."""
    if None in pieces:
        pieces = [piece or b"" for piece in pieces]
    return np.fromiter(map(len, pieces), np.int64, len(pieces))


def sizes_of_columns(columns: UnsentColumns) -> Sizes:
    """Return the maximum size of each record in a batch, int64 of shape (n,)."""
    sizes = np.full(columns.count, RECORD_BYTES, np.int64)
    for column in (columns.keys, columns.values):
        if column is not None:
            sizes += np.diff(column[1])
    return sizes


def cuts(
    sizes: Sizes, limit_bytes: int, most_records: int
) -> Iterator[tuple[int, int, int]]:
    """Return the batches for records of these sizes: (start, stop, bytes).

    A batch has at most limit_bytes, but at least one record.
    """
    reached = sizes.cumsum()  # np.cumsum() takes 1 us more
    start = 0
    before = 0
    while start < len(sizes):
        stop = int(reached.searchsorted(before + limit_bytes - BATCH_BYTES, "right"))
        stop = min(max(stop, start + 1), start + most_records)
        behind = int(reached[stop - 1])
        yield start, stop, behind - before
        start = stop
        before = behind


def taken(columns: UnsentColumns, places: npt.NDArray[np.int64]) -> UnsentColumns:
    """Return a copy of the rows at some indexes. Raises InvalidRecordError if a column
    is too large to be copied.
    """
    times = None
    if columns.times is not None:
        times = columns.times[places]
    keys = None
    if columns.keys is not None:
        keys = _taken(columns.keys, places)
    values = None
    if columns.values is not None:
        values = _taken(columns.values, places)
    return UnsentColumns(keys, values, times, len(places))


def _taken(
    column: tuple[Any, Any, Any], places: npt.NDArray[np.int64]
) -> tuple[Any, Any, Any]:
    data, edges, nulls = column
    first = int(edges[0])
    if int(edges[-1]) - first > INT32_MAX:
        raise InvalidRecordError(
            "a column is too large to be divided by its keys",
            expected="at most 2^31-1 bytes",
        )
    positions = np.ascontiguousarray((edges[:-1] - first)[places], np.int32)
    sizes = np.ascontiguousarray(np.diff(edges)[places], np.int32)
    offsets, pieces = kernel.gather(data[first : int(edges[-1])], positions, sizes)
    return (
        pieces,
        offsets.astype(np.int64),
        None if nulls is None else np.ascontiguousarray(nulls[places]),
    )
