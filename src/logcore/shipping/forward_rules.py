"""Plans which offsets a forwarder ships: pure functions, and one partition's state.

Rules:
- One table, resume(), decides the first offset, from the offset committed by the remote
  group and the recorded progress.
- Nothing is skipped silently. If a log begins above the progress or ends below it, the
  partition stops.
- A refused batch is halved until it holds one record, which is then the refused one.
- The progress identifies the last shipped record, so a local log that was truncated and
  has grown again is detected.
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
_WITNESS: Final = re.compile(r"(\d+):[0-9a-f]{8}")


@attrs.frozen
class Stop:
    """The reason why a partition cannot be shipped or mirrored, with a remedy."""

    error: ShippingError


@attrs.frozen
class Begin:
    """Ship or mirror from `offset` on.

    `skipped` offsets are left out, because they were deleted.
    """

    offset: int
    skipped: int = 0


@attrs.frozen(kw_only=True)
class KnownOffsets:
    """The offsets of a partition that are known when shipping begins."""

    #: Offset committed by the remote group, None if there is none.
    committed: int | None
    #: Offset that an earlier forwarder of this name recorded in the directory as
    #: shipped, None if there is none.
    recorded: int | None
    #: Bounds of the local log.
    log_start: int
    log_end: int


def resume(known: KnownOffsets, *, on_gap: OnGap, on_lost: OnLost) -> Begin | Stop:
    """Return the offset to begin at, or the reason to stop.

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
            found = "none"
            if committed is not None:
                found = str(committed)
            return Stop(
                DivergedError(
                    "the remote cluster has lost progress, and perhaps records: continue at the progress recorded here "
                    "with on_lost='noted' (--on-lost noted), or ship records after the remote progress again with "
                    "on_lost='start' (--on-lost start)",
                    expected=f"offset {known.recorded} or above",
                    found=found,
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


def witness_of(record: Record) -> str:
    """Return a text that identifies a record among all records at the same offset."""
    body = b"%d|%b|%b" % (record.timestamp_ms, record.key or b"", record.value or b"")
    return f"{record.offset}:{zlib.crc32(body):08x}"


def witnessed_offset(witness: str) -> int | None:
    """Return the offset of the record that a witness identifies.

    Returns None if the text is not a witness.
    """
    found = _WITNESS.fullmatch(witness)
    if found is None:
        return None
    return int(found[1])


def check_witness(witness: str, own: Record | None, *, is_compacted: bool) -> None:
    """Check that a record of the local log is the one that was shipped.

    `own` is the local record at the offset of the witness, None if there is none.

    Raises:
        DivergedError: The local log has another record at that offset.
    """
    if own is None and is_compacted:
        return
    found = "none"
    if own is not None:
        found = witness_of(own)
    if found != witness:
        raise DivergedError(
            "the local log holds another record than the one that was shipped: it lost its end, as in a power cut, and "
            "grew again, or was recreated. Ship it to another topic",
            offset=witnessed_offset(witness),
            expected=witness,
            found=found,
        )


@attrs.define(kw_only=True)
class ShippedPartition:
    """The shipping state of one partition."""

    #: The local partition.
    source: Partition
    #: The partition in the remote cluster.
    target: Partition
    #: Upper bound of `limit`.
    most: int
    #: Maximum number of its records in one batch. It is lower during the search for a
    #: refused record.
    limit: int
    #: Progress in the remote cluster, None if there is none.
    confirmed: int | None = None
    #: Whether the first offset has been determined.
    is_placed: bool = False
    #: The confirmed progress. It is higher if the following offsets are left out.
    delivered: int = 0
    #: The next offset to read.
    position: int = 0
    #: Whether the progress must be committed although there is nothing to ship.
    owes: bool = False
    #: Witness of the last shipped record.
    witness: str = ""
    #: Topic id of the source at the last check.
    topic_id: str = ""
    #: The reason why the partition is not shipped any more.
    failure: LogcoreError | None = None

    def place(self, confirmed: int | None, begin: Begin) -> None:
        """Set the first offset.

        If the progress is unchanged, offsets that were left out since remain left out.
        """
        if (
            not self.is_placed
            or confirmed != self.confirmed
            or begin.offset > self.delivered
        ):
            self.delivered = begin.offset
            self.owes = confirmed is not None and confirmed != begin.offset
        self.confirmed = confirmed
        self.is_placed = True
        self.rewind()

    def read_to(self, position: int) -> None:
        """Record that the next batch contains the records below `position`."""
        self.position = position

    def rewind(self) -> None:
        """Return to the delivered offset, to read undelivered records again."""
        self.position = self.delivered

    def deliver(self, next_offset: int) -> None:
        """Record that the records below `next_offset` are delivered.

        The limit, which was reduced to find a refused record, is doubled.
        """
        assert next_offset >= self.delivered, "progress never decreases"
        self.confirmed = next_offset
        self.delivered = next_offset
        self.position = max(self.position, next_offset)
        self.limit = min(self.most, self.limit * 2)
        self.owes = False

    def refuse(self, record_count: int) -> bool:
        """Reduce the limit after a batch with this many of its records was refused.

        Returns whether the batch held only one record, which is then the refused one.
        """
        self.rewind()
        if record_count <= 1:
            return True
        self.limit = max(1, record_count // 2)
        return False

    def leave_out(self, next_offset: int) -> None:
        """Leave out the offsets below `next_offset`.

        They are markers, aborted records, or a record that is kept elsewhere.
        """
        self.delivered = next_offset
        self.position = next_offset


def missing_topics(
    wanted: Mapping[str, int], found: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Return topics that are missing in the remote cluster or have too few partitions.

    The result maps the name to (wanted, found).
    """
    return {
        name: (count, found.get(name, 0))
        for name, count in wanted.items()
        if found.get(name, 0) < count
    }


def advice_to_create(missing: Mapping[str, tuple[int, int]]) -> str:
    """Return commands that create missing topics and add missing partitions."""
    told = []
    for name, (wanted, found) in sorted(missing.items()):
        verb = "--create"
        if found:
            verb = "--alter"
        told.append(f"kafka-topics {verb} --topic {name} --partitions {wanted}")
    return "; ".join(told)
