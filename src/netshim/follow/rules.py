"""Decisions about the source's responses to fetches.

|| response | decision | |
|---|---|
| records | append all complete batches |
| the logs diverge (unclean election in the source) | truncate, or stop |
| the source has deleted records that the copy lacks | stop, or continue after the gap |
| the copy ends after the source | stop: the source was restored from an older state |
| the leader has moved, or is being elected | wait for new metadata |
| another error | stop |

Rules:
- The copy ends at or below the source's high watermark, because consumers get no
  record above it.
- The other fields of a response that reports a divergence are ignored (KAFKA-13141).

Pure functions. follower.py carries the decisions out.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import attrs

from logcore.errors import (
    DivergedError,
    LogcoreError,
    RemoteTopicError,
    ShippingGapError,
)
from logcore.kernels import kernel
from logcore.kernels.layout import Buffer
from netshim.wire import codes

#: Errors that end when the metadata is read again. They occur during an election, after
#: a move of the leader, and while a broker starts. Stopping a partition for one of them
#: would need an operator after each restart of the source.
_RETRIED_CODES: Final = frozenset(
    {
        codes.UNKNOWN_TOPIC_OR_PARTITION,
        codes.LEADER_NOT_AVAILABLE,
        codes.NOT_LEADER_OR_FOLLOWER,
        codes.REPLICA_NOT_AVAILABLE,
        codes.KAFKA_STORAGE_ERROR,
        codes.FENCED_LEADER_EPOCH,
        codes.UNKNOWN_LEADER_EPOCH,
        codes.OFFSET_NOT_AVAILABLE,
        codes.UNKNOWN_TOPIC_ID,
        codes.INCONSISTENT_TOPIC_ID,
        codes.REQUEST_TIMED_OUT,
        codes.UNKNOWN_SERVER_ERROR,
    }
)
#: More batches than a response can have: walk() stops at the end of the bytes.
_MAX_BATCHES: Final = 1 << 30


@attrs.frozen
class Append:
    """Append complete batches."""

    data: memoryview


@attrs.frozen
class Truncate:
    """Remove the records that the source does not have."""

    epoch: int
    end_offset: int


@attrs.frozen
class SkipGap:
    """Continue at a later offset."""

    offset: int


@attrs.frozen
class AwaitMetadata:
    """Read the metadata of the source again."""

    reason: str


@attrs.frozen
class StopCopy:
    """Stop copying this partition."""

    error: LogcoreError


Decision = Append | Truncate | SkipGap | AwaitMetadata | StopCopy | None


@attrs.frozen
class Policies:
    """The choices of the operator."""

    on_divergence: Literal["truncate", "stop"] = "truncate"
    on_gap: Literal["stop", "skip"] = "stop"


@attrs.frozen
class CopyPosition:
    """The copy of a partition, and the source's offsets as last listed."""

    name: str
    end: int
    source_start: int
    source_end: int


def decide(response: Any, copy: CopyPosition, policies: Policies) -> Decision:
    """Return the decision about a partition of a Fetch response. None: do nothing."""
    # 1. The divergence comes before the error code and the records. The high watermark
    # in such a response belongs to a log that the copy does not follow (KAFKA-13141).
    diverging = response.diverging_epoch
    if diverging.end_offset >= 0:
        if policies.on_divergence == "stop":
            return StopCopy(
                DivergedError(
                    f"{copy.name}: the source has other records from offset {diverging.end_offset} on",
                    expected=f"epoch {diverging.epoch} ends at {diverging.end_offset}",
                    found=f"the copy ends at {copy.end}",
                )
            )
        return Truncate(diverging.epoch, diverging.end_offset)
    # 2. Records.
    code = response.error_code
    if code == codes.NONE:
        return _append(response.records, copy)
    # 3. Errors that depend on the position of the copy.
    if code == codes.OFFSET_OUT_OF_RANGE:
        return _decide_out_of_range(copy, policies)
    # 4. Errors that end without an operator, and then all others.
    if code in _RETRIED_CODES:
        return AwaitMetadata(codes.name(code))
    return StopCopy(RemoteTopicError(f"{copy.name}: {codes.name(code)}"))


def _append(records: Buffer | None, copy: CopyPosition) -> Decision:
    # The copy is at the high watermark, or other partitions have filled the response.
    if not records:
        return None
    data = memoryview(records)
    # A broker truncates a response at its size limit, so the last batch may be incomplete.
    batches, position, _ = kernel.walk(data, 0, len(data), _MAX_BATCHES, False)
    # Since Fetch version 3, a broker sends at least one complete batch, however large
    # it is. Another fetch would get the same bytes, forever.
    if not len(batches):
        return StopCopy(
            RemoteTopicError(
                f"{copy.name}: no complete batch at offset {copy.end}",
                expected="batches of format 2",
                found=f"{len(data)} bytes",
            )
        )
    return Append(data[:position])


def _decide_out_of_range(copy: CopyPosition, policies: Policies) -> Decision:
    """Decide about a copy whose end is not an offset of the source."""
    # Retention of the source was faster than the copy.
    if copy.end < copy.source_start:
        if policies.on_gap == "skip":
            return SkipGap(copy.source_start)
        return StopCopy(
            ShippingGapError(
                f"{copy.name}: the source has deleted offsets {copy.end} to {copy.source_start - 1}",
                expected="--on-gap skip to continue without them",
            )
        )
    # Truncating here would remove the only remaining copy of records that the source
    # has lost, such as after a restore from a backup.
    if copy.end > copy.source_end:
        return StopCopy(
            DivergedError(
                f"{copy.name}: the source ends before the copy",
                expected=f"an end at or after {copy.end}",
                found=copy.source_end,
            )
        )
    # The offset is in the listed range. The listed offsets are older than the response.
    return AwaitMetadata("the offset was out of range for a moment")
