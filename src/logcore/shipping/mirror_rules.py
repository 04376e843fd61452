"""Decides how a mirror continues: pure functions over offsets and records.

The local log is the copy of a remote partition. Its end is its log end offset.

| the remote partition                                   | decision                                              |
|--------------------------------------------------------|-------------------------------------------------------|
| contains the local end, or begins or ends there        | continue at the local end, even after a gap           |
| begins above the local end, because of retention       | stop, or continue at its start (on_gap="skip")        |
| ends below the local end, or contains other records    | diverged: stop, or truncate the local log             |
|                                                        | (on_divergence="truncate")                            |
| belongs to another topic with the same name            | stop                                                  |

Rules:
- Before a partition continues, the last records of the local log are fetched again and
  compared. This detects that the remote log lost its end and got other records since.
- A local record may be missing in the remote log only if that log is compacted. If a
  remote record below the local end is missing in the local log, the logs have diverged.
- A batch contains consecutive offsets of one leader epoch. A gap or a new epoch begins
  another batch.

This module uses no log, no client and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

import attrs

from logcore.errors import DivergedError, ShippingGapError
from logcore.kernels import Record
from logcore.recordbatch import encode
from logcore.shipping.cluster import RemoteRecord, RemoteSpan
from logcore.shipping.forward_rules import Begin, OnGap, Stop

OnDivergence = Literal["fail", "truncate"]
#: Maximum size of a batch. It is below the default size of a segment and of a fetch,
#: and large enough for full speed.
_BATCH_BYTES: Final = 256 << 10
#: Overhead of a record in addition to key, value and headers, and of a header in
#: addition to name and value (see the format, section 1.5).
_RECORD_BYTES: Final = 32
_HEADER_BYTES: Final = 10


@attrs.frozen
class Diverged:
    """The decision that the logs contain different records."""

    #: The error to raise if truncation is not allowed.
    error: DivergedError


def decide_start(
    end: int | None, span: RemoteSpan, *, on_gap: OnGap
) -> Begin | Stop | Diverged:
    """Decide at which offset a mirror continues.

    `end` is the log end offset of the local log, or None if the log is empty.
    """
    if end is None:
        return Begin(span.log_start)
    if end > span.log_end:
        return Diverged(
            divergence_error(
                "the remote log ends below the local log: it lost records, or was recreated",
                end,
                span.log_end,
            )
        )
    if end < span.log_start:
        if on_gap == "fail":
            return Stop(
                ShippingGapError(
                    f"the cluster deleted offsets {end} to {span.log_start - 1} before they were mirrored: continue at "
                    f"{span.log_start} with on_gap='skip' (--on-gap skip)",
                    offset=end,
                )
            )
        return Begin(span.log_start, span.log_start - end)
    return Begin(end)


def divergence_error(reason: str, expected: object, found: object) -> DivergedError:
    return DivergedError(
        f"{reason}. Truncate the local log to the common records with on_divergence='truncate' (--on-divergence "
        "truncate), or mirror to another directory",
        expected=expected,
        found=found,
    )


def check_same_topic(expected_id: str, found_id: str, name: str) -> None:
    """Compare the topic id of the mirrored topic with the current one.

    Raises:
        DivergedError: The ids differ.
    """
    if expected_id and found_id and expected_id != found_id:
        raise DivergedError(
            f"topic {name!r} of the cluster was deleted and created again: mirror it to another directory",
            expected=expected_id,
            found=found_id,
        )


def find_difference(
    local_records: Mapping[int, Record],
    end: int,
    fetched: Iterable[RemoteRecord],
    range_end: int,
    *,
    is_compacted: bool,
) -> Record | None:
    """Return a record below the local end that differs, or that only one log contains.
    Return None if there is none.

    `local_records` contains the last local records by offset, from the start of the
    fetched range on. `end` is the local end. `fetched` contains all remote records of
    the fetched range, which ends at `range_end`.
    """
    remote_records = {record.offset: record for record, _ in fetched}
    for offset, record in remote_records.items():
        if offset < end and local_records.get(offset) != record:
            return record
    if is_compacted:
        return None
    return next(
        (
            record
            for offset, record in local_records.items()
            if offset < range_end and offset not in remote_records
        ),
        None,
    )


def common_end(start: int, end: int, is_same_at: Callable[[int], bool]) -> int:
    """Return the end offset of the common records, between `start` and `end`.

    `is_same_at` compares the records at one offset. If it returns False, it must return
    False for all higher offsets too, because this is a binary search.
    """
    while start < end:
        middle = (start + end) // 2
        if is_same_at(middle):
            start = middle + 1
        else:
            end = middle
    return start


def encode_batches(
    records: Iterable[RemoteRecord], least_epoch: int, codec: str
) -> Iterator[bytes]:
    """Yield batches with the offsets and leader epochs of the records.

    If the epoch of a record is unknown, it gets the highest epoch of the earlier
    records, and at least `least_epoch`.
    """
    for epoch, run in _runs(records, least_epoch):
        rows = [
            (record.key, record.value, record.headers, record.timestamp_ms)
            for record in run
        ]
        yield encode(rows, base_offset=run[0].offset, leader_epoch=epoch, codec=codec)


def _runs(
    records: Iterable[RemoteRecord], least_epoch: int
) -> Iterator[tuple[int, Sequence[Record]]]:
    run: list[Record] = []
    run_epoch = -1
    run_bytes = 0
    for record, stored_epoch in records:
        if stored_epoch < 0:
            epoch = least_epoch
        else:
            epoch = stored_epoch
        size = size_of(record)
        continues_run = (
            bool(run) and record.offset == run[-1].offset + 1 and epoch == run_epoch
        )
        if run and not (continues_run and run_bytes + size <= _BATCH_BYTES):
            yield run_epoch, run
            run = []
            run_bytes = 0
        run.append(record)
        run_epoch = epoch
        least_epoch = max(least_epoch, epoch)
        run_bytes += size
    if run:
        yield run_epoch, run


def size_of(record: Record) -> int:
    """Return the approximate size of a record."""
    size = _RECORD_BYTES + len(record.key or b"") + len(record.value or b"")
    return size + sum(
        _HEADER_BYTES + len(name) + len(value or b"") for name, value in record.headers
    )
