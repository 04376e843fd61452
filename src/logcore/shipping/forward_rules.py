"""Decides which offsets a forwarder ships: pure functions, and one partition's state.

Rules:
- resume() decides the first offset, from the offset that the remote group has committed
  and from the progress recorded in the directory.
- Nothing is skipped silently. If a log begins above the progress or ends below it, the
  partition stops.
- After a refused batch, the next batches are half as large, until a batch with a single
  record is refused.
- The progress contains a fingerprint of the last shipped record. This detects that the
  local log was truncated and got other records since.
- Records that were read and not delivered are read again: the position returns to the
  delivered offset.

This module uses no log, no client and no clock.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Final, Literal

import attrs

from logcore.errors import DivergedError, LogcoreError, ShippingError, ShippingGapError
from logcore.kernels import Record
from logcore.shipping.cluster import Partition

OnGap = Literal["fail", "skip"]
OnLost = Literal["fail", "noted", "start"]
_FINGERPRINT: Final = re.compile(r"(\d+):[0-9a-f]{8}")


@attrs.frozen
class Stop:
    """The reason why a partition cannot be shipped or mirrored, with a remedy."""

    error: ShippingError


@attrs.frozen
class Begin:
    """The decision to ship or mirror from `offset` on."""

    offset: int
    #: Number of offsets below `offset` that were deleted and not shipped.
    skipped: int = 0


@attrs.frozen(kw_only=True)
class KnownOffsets:
    """The offsets of a partition from which resume() decides."""

    #: The offset that the remote group has committed, or None.
    committed: int | None
    #: The progress that an earlier forwarder with the same name recorded in the
    #: directory, or None.
    recorded: int | None
    #: Bounds of the local log.
    log_start: int
    log_end: int


def resume(known: KnownOffsets, *, on_gap: OnGap, on_lost: OnLost) -> Begin | Stop:
    """Return the offset to begin at, or the reason to stop.

    The columns are fields of KnownOffsets, c is the committed and n the recorded offset.

    | committed | recorded        | result                                                                 |
    |-----------|-----------------|------------------------------------------------------------------------|
    | none      | none            | from the log start                                                     |
    | c         | none, or n <= c | from c                                                                 |
    | none      | n               | the remote cluster has lost the progress: stop, or follow on_lost      |
    | c         | n > c           | same as above; the remote cluster may have lost records too            |
    """
    committed = known.committed
    if known.recorded is not None and (committed is None or committed < known.recorded):
        if on_lost == "fail":
            committed_text = "none"
            if committed is not None:
                committed_text = str(committed)
            return Stop(
                DivergedError(
                    "the remote cluster has lost progress, and perhaps records: continue at the progress recorded here "
                    "with on_lost='noted' (--on-lost noted), or ship records after the remote progress again with "
                    "on_lost='start' (--on-lost start)",
                    expected=f"offset {known.recorded} or above",
                    found=committed_text,
                )
            )
        if on_lost == "noted":
            committed = known.recorded
    if committed is None:
        return Begin(known.log_start)
    if committed > known.log_end:
        return Stop(
            DivergedError(
                "the local log ends before its shipped records: it was truncated or recreated. Use another topic",
                expected=f"offset {committed} or above",
                found=known.log_end,
            )
        )
    if committed < known.log_start:
        if on_gap == "fail":
            return Stop(
                ShippingGapError(
                    f"offsets {committed} to {known.log_start - 1} were deleted before they were shipped: continue at "
                    f"{known.log_start} with on_gap='skip' (--on-gap skip)",
                    offset=committed,
                )
            )
        return Begin(known.log_start, known.log_start - committed)
    return Begin(committed)


def record_fingerprint(record: Record) -> str:
    """Return a text that identifies a record among all records at the same offset."""
    body = b"%d|%b|%b" % (record.timestamp_ms, record.key or b"", record.value or b"")
    return f"{record.offset}:{zlib.crc32(body):08x}"


def fingerprint_offset(fingerprint: str) -> int | None:
    """Return the offset of the record that a witness identifies.

    Returns None if the text is not a witness.
    """
    match = _FINGERPRINT.fullmatch(fingerprint)
    if match is None:
        return None
    return int(match[1])


def check_fingerprint(
    fingerprint: str, local_record: Record | None, *, is_compacted: bool
) -> None:
    """Check that the local log still contains the last shipped record.

    `local_record` is the record at the offset of the fingerprint, or None.

    Raises:
        DivergedError: The local log has another record at that offset.
    """
    if local_record is None and is_compacted:
        return
    local_fingerprint = "none"
    if local_record is not None:
        local_fingerprint = record_fingerprint(local_record)
    if local_fingerprint != fingerprint:
        raise DivergedError(
            "the last shipped record is not in the local log: the log was recreated, or lost its end, for example in a "
            "power cut, and got other records since. Ship it to another topic",
            offset=fingerprint_offset(fingerprint),
            expected=fingerprint,
            found=local_fingerprint,
        )


@attrs.define(kw_only=True)
class ShippedPartition:
    """The shipping state of one partition."""

    #: The local partition.
    source: Partition
    #: The partition in the remote cluster.
    target: Partition
    #: Maximum of `limit`.
    max_limit: int
    #: Maximum number of the partition's records in one batch. It is reduced while a
    #: refused record is searched.
    limit: int
    #: Progress in the remote cluster, or None.
    committed: int | None = None
    #: Whether the first offset has been determined.
    has_position: bool = False
    #: The next offset to ship. It is above `committed` if the offsets between need no
    #: shipping.
    delivered: int = 0
    #: The next offset to read.
    position: int = 0
    #: Whether `delivered` must be committed even if there are no records to ship.
    needs_commit: bool = False
    #: Fingerprint of the last shipped record.
    fingerprint: str = ""
    #: Topic id of the source at the last check.
    topic_id: str = ""
    #: The reason why the partition is not shipped any more.
    failure: LogcoreError | None = None

    def set_position(self, committed: int | None, begin: Begin) -> None:
        """Set the first offset.

        If the committed progress is unchanged, `delivered` does not decrease.
        """
        if (
            not self.has_position
            or committed != self.committed
            or begin.offset > self.delivered
        ):
            self.delivered = begin.offset
            self.needs_commit = committed is not None and committed != begin.offset
        self.committed = committed
        self.has_position = True
        self.rewind()

    def set_position_after_read(self, position: int) -> None:
        """Record that the next batch contains the records below `position`."""
        self.position = position

    def rewind(self) -> None:
        """Return to the delivered offset, to read undelivered records again."""
        self.position = self.delivered

    def record_delivered(self, next_offset: int) -> None:
        """Record that the records below `next_offset` are delivered.

        The limit, which was reduced to find a refused record, is doubled.
        """
        assert next_offset >= self.delivered, "progress never decreases"
        self.committed = next_offset
        self.delivered = next_offset
        self.position = max(self.position, next_offset)
        self.limit = min(self.max_limit, self.limit * 2)
        self.needs_commit = False

    def reduce_limit(self, record_count: int) -> bool:
        """Reduce the limit after a batch with `record_count` records of this partition
        was refused.

        Return whether the batch contained only one record, so that this record is the
        refused one.
        """
        self.rewind()
        if record_count <= 1:
            return True
        self.limit = max(1, record_count // 2)
        return False

    def skip_to(self, next_offset: int) -> None:
        """Skip the offsets below `next_offset`, which need no shipping, for example
        because their transaction was aborted or their record was quarantined.
        """
        self.delivered = next_offset
        self.position = next_offset


def missing_topics(
    requested: Mapping[str, int], existing: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Return topics that are missing in the remote cluster or have too few partitions.

    The result maps the name to the requested and the existing partition count.
    """
    return {
        name: (count, existing.get(name, 0))
        for name, count in requested.items()
        if existing.get(name, 0) < count
    }


def advice_to_create(missing: Mapping[str, tuple[int, int]]) -> str:
    """Return commands that create missing topics and add missing partitions."""
    commands = []
    for name, (requested, existing) in sorted(missing.items()):
        verb = "--create"
        if existing:
            verb = "--alter"
        commands.append(f"kafka-topics {verb} --topic {name} --partitions {requested}")
    return "; ".join(commands)
