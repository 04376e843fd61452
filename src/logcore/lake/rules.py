"""Rules that decide where the export of a partition begins: pure functions over offsets
and records.

Rules:
- The progress of a partition is the next offset, and the witness of the last exported
  record. Both are stored in the commit that stores the rows.
- Nothing is skipped silently. If the log begins above the progress or ends below it,
  the export fails.
- A log that was truncated and has grown again is detected by the witness.

This module uses no log and no table.
"""

from __future__ import annotations

from typing import Final, Literal

import attrs

from logcore.errors import DivergedError, OffsetOutOfRangeError, ShippingGapError
from logcore.kernels import Record
from logcore.shipping.forward_rules import record_fingerprint

OnGap = Literal["fail", "skip"]
#: Advice for a table whose topic is not the exported one any more.
NEW_TABLE: Final = "Export the topic to a new table"


@attrs.frozen
class ExportProgress:
    """The exported part of one partition."""

    #: The offset after the last exported one.
    next_offset: int
    #: A text that identifies the last exported record, or "" if there is none.
    fingerprint: str = ""


@attrs.frozen(kw_only=True)
class LogBounds:
    """The offsets that a log holds now: from `start` to before `end`."""

    path: str
    start: int
    end: int


def first_offset(bounds: LogBounds, requested: int | None) -> int:
    """Return the offset at which the first export of a partition begins.

    Raises:
        OffsetOutOfRangeError: the requested offset is outside the log.
    """
    if requested is None:
        return bounds.start
    if not bounds.start <= requested <= bounds.end:
        raise OffsetOutOfRangeError(
            "the export cannot begin at an offset outside the log",
            path=bounds.path,
            offset=requested,
            expected=f"{bounds.start} to {bounds.end}",
        )
    return requested


def next_offset(bounds: LogBounds, progress: ExportProgress, on_gap: OnGap) -> int:
    """Return the offset at which a later export of a partition begins.

    Raises:
        DivergedError: the log ends below the progress.
        ShippingGapError: the log begins above the progress, and `on_gap` is "fail".
    """
    at = progress.next_offset
    if at > bounds.end:
        raise DivergedError(
            "the log ends before its exported records: it was truncated or has lost its end. "
            f"{NEW_TABLE}",
            path=bounds.path,
            expected=f"an end at offset {at} or above",
            found=bounds.end,
        )
    if at >= bounds.start:
        return at
    if on_gap == "skip":
        return bounds.start
    raise ShippingGapError(
        f"offsets {at} to {bounds.start - 1} were deleted before they were exported: continue at {bounds.start} "
        "with on_gap='skip' (--on-gap skip)",
        path=bounds.path,
        offset=at,
    )


def check_last_record(
    bounds: LogBounds, fingerprint: str, own: Record | None, *, is_compacted: bool
) -> None:
    """Check that the log still holds the record that was exported last.

    `own` is the record at the offset of the witness, None if there is none.

    Raises:
        DivergedError: the log holds another record there.
    """
    if own is None and is_compacted:
        return
    found = "no record"
    if own is not None:
        found = record_fingerprint(own)
    if found != fingerprint:
        raise DivergedError(
            "the log holds another record than the one that was exported: it was truncated and has grown again. "
            f"{NEW_TABLE}",
            path=bounds.path,
            expected=fingerprint,
            found=found,
        )


def check_topic_id(topic: str, stored: str, found: str) -> None:
    """Compare the topic id in the table with the id of the topic; "" is unknown.

    Raises:
        DivergedError: they differ.
    """
    if stored and found and stored != found:
        raise DivergedError(
            f"topic {topic!r} was deleted and created again since it was exported. {NEW_TABLE}",
            expected=f"topic id {stored}",
            found=found,
        )
