"""Plans how a mirror continues: pure functions over offsets and records.

Our log is the local copy of a partition, and our end is its log end offset.

| the remote partition                       | then                                                            |
|--------------------------------------------|-----------------------------------------------------------------|
| holds our end, or begins or ends there     | continue at our end; a gap before the next record is legal      |
| begins above our end, because of retention | stop, or continue at its start (on_gap="skip")                  |
| ends below our end, or holds other records | diverged: stop, or truncate our log (on_divergence="truncate")  |
| belongs to another topic of that name      | stop                                                            |

Rules:
- When a partition is placed, the last records of our log are fetched once more and
  compared. This detects a remote log that lost its end and has grown again.
- A record of ours may be missing in the remote log only if that log is compacted. A
  remote record below our end that is missing here is a new record, which means that the
  logs diverged.
- A batch holds consecutive offsets of one leader epoch, so a gap or a new epoch begins
  a batch.

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
    """The logs have different records.

    `error` is raised unless truncation is allowed.
    """

    error: DivergedError


def judge(
    end: int | None, span: RemoteSpan, *, on_gap: OnGap
) -> Begin | Stop | Diverged:
    """Return the offset to continue at.

    `end` is the log end offset of our log, None if our log is empty.
    """
    if end is None:
        return Begin(span.log_start)
    if end > span.log_end:
        return Diverged(
            diverged(
                "the remote log ends before ours: it lost records, or was recreated",
                end,
                span.log_end,
            )
        )
    if end < span.log_start:
        if on_gap == "fail":
            return Stop(
                ShippingGapError(
                    f"offsets {end} to {span.log_start - 1} were deleted there before they were mirrored: continue at "
                    f"{span.log_start} with on_gap='skip' (--on-gap skip)",
                    offset=end,
                )
            )
        return Begin(span.log_start, span.log_start - end)
    return Begin(end)


def diverged(why: str, expected: object, found: object) -> DivergedError:
    return DivergedError(
        f"{why}. Cut the local log to what both hold with on_divergence='truncate' (--on-divergence truncate), or "
        "mirror to another directory",
        expected=expected,
        found=found,
    )


def check_same_topic(known: str, found: str, name: str) -> None:
    """Compare the topic id of the mirrored topic with the current one.

    Raises:
        DivergedError: The ids differ.
    """
    if known and found and known != found:
        raise DivergedError(
            f"topic {name!r} there is another one of that name, deleted and made again: mirror it to another directory",
            expected=known,
            found=found,
        )


def contradiction(
    own: Mapping[int, Record],
    end: int,
    found: Iterable[RemoteRecord],
    behind: int,
    *,
    is_compacted: bool,
) -> Record | None:
    """Return a record below our end that differs or that only one log holds, if any.

    `own` holds our last records by offset, except records below the fetched range.
    `found` holds all remote records of the fetched range. The fourth argument is the
    end offset of that range.
    """
    theirs = {record.offset: record for record, _ in found}
    for offset, record in theirs.items():
        if offset < end and own.get(offset) != record:
            return record
    if is_compacted:
        return None
    return next(
        (
            record
            for offset, record in own.items()
            if offset < behind and offset not in theirs
        ),
        None,
    )


def common_end(start: int, end: int, is_same_at: Callable[[int], bool]) -> int:
    """Return the offset between `start` and `end` up to which both logs are equal.

    `is_same_at` compares one offset. If it returns False for an offset, it returns
    False for all higher offsets.
    """
    while start < end:
        middle = (start + end) // 2
        if is_same_at(middle):
            start = middle + 1
        else:
            end = middle
    return start


def encoded(
    records: Iterable[RemoteRecord], least_epoch: int, codec: str
) -> Iterator[bytes]:
    """Yield batches with the offsets and leader epochs of the records.

    A record whose epoch is unknown gets `least_epoch`, or the highest epoch before it.
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
    for record, given in records:
        if given < 0:
            epoch = least_epoch
        else:
            epoch = given
        size = size_of(record)
        is_next = (
            bool(run) and record.offset == run[-1].offset + 1 and epoch == run_epoch
        )
        if run and not (is_next and run_bytes + size <= _BATCH_BYTES):
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
