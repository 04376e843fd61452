"""Decides what a forwarder ships, and from where: pure functions and one small state for each partition.

Rules:
- Where to begin is decided by one table, resume(), from what the remote group has committed and from what was noted.
- Nothing is skipped in silence: a log that begins behind the progress, or ends before it, stops the partition.
- A batch that was refused is halved until the refused record stands alone. Then it is known which one it is.
- The progress names the last record that was shipped, so a local log that was cut and grew again is noticed.
- What was read and not delivered is read again: the position goes back to what was delivered.

This module knows no log, no client and no clock.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Final, Literal

import attrs

from logcore.errors import DivergedError, LogcoreError, ShippingError, ShippingGapError
from logcore.kernels import Record
from logcore.shipping.remote import Partition

OnGap = Literal["fail", "skip"]
OnLost = Literal["fail", "noted", "start"]
_WITNESS: Final = re.compile(r"(\d+):[0-9a-f]{8}")


@attrs.frozen
class Stop:
    """A partition cannot be shipped: why, and what to do about it."""

    error: ShippingError


@attrs.frozen
class Begin:
    """Ship from this offset on. skipped: how many offsets were left out because they are gone."""

    offset: int
    skipped: int = 0


@attrs.frozen(kw_only=True)
class Known:
    """The known offsets of a partition when shipping begins.

    committed: by the remote group, None for nothing. noted: what an earlier forwarder of this name has noted in the
    directory as shipped, None for nothing. log_start, log_end: of the local log.
    """

    committed: int | None
    noted: int | None
    log_start: int
    log_end: int


def resume(known: Known, *, on_gap: OnGap, on_lost: OnLost) -> Begin | Stop:
    """The place to begin at.

    | committed | noted           | then                                                                   |
    |-----------|-----------------|------------------------------------------------------------------------|
    | none      | none            | from the log start                                                     |
    | c         | none, or n <= c | from c                                                                 |
    | none      | n               | the remote cluster has lost the progress: stop, or as on_lost says     |
    | c         | n > c           | the same; the remote cluster may have lost records too                 |
    """
    committed = known.committed
    if known.noted is not None and (committed is None or committed < known.noted):
        if on_lost == "fail":
            found = "none"
            if committed is not None:
                found = str(committed)
            return Stop(
                DivergedError(
                    "the remote cluster has lost progress, and perhaps records: go on at what was noted here with "
                    "on_lost='noted' (--on-lost noted), or ship again what is behind the progress there with "
                    "on_lost='start' (--on-lost start)",
                    expected=f"offset {known.noted} or above",
                    found=found,
                )
            )
        if on_lost == "noted":
            committed = known.noted
    if committed is None:
        return Begin(known.log_start)
    if committed > known.log_end:
        return Stop(
            DivergedError(
                "the local log ends before what was shipped of it: it was cut or recreated. Ship it to another topic",
                expected=f"offset {committed} or above",
                found=known.log_end,
            )
        )
    if committed < known.log_start:
        if on_gap == "fail":
            return Stop(
                ShippingGapError(
                    f"offsets {committed} to {known.log_start - 1} were deleted before they were shipped: go on at "
                    f"{known.log_start} with on_gap='skip' (--on-gap skip)",
                    offset=committed,
                )
            )
        return Begin(known.log_start, known.log_start - committed)
    return Begin(committed)


def witness_of(record: Record) -> str:
    """A text that another record at the same offset does not have."""
    body = b"%d|%b|%b" % (record.timestamp_ms, record.key or b"", record.value or b"")
    return f"{record.offset}:{zlib.crc32(body):08x}"


def witnessed_offset(witness: str) -> int | None:
    """The offset of the record that a witness is of; None for text that is none."""
    found = _WITNESS.fullmatch(witness)
    if found is None:
        return None
    return int(found[1])


def check_witness(witness: str, own: Record | None, *, is_compacted: bool) -> None:
    """own: what the local log holds at that offset, None for nothing. Raises DivergedError for another record."""
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
class Lane:
    """One partition on its way.

    source, target: here and in the remote cluster. confirmed: the progress there, None for none. is_placed: whether it
    is known where to begin. delivered: as confirmed, or more where what follows is left out. position: behind what was
    read. limit: the most records of it in one batch, fewer while a refused one is looked for. owes: whether the
    progress is to be committed though nothing is to be shipped. witness: of the last record that was shipped. topic_id:
    of the source, at the last look. failure: why it is not shipped any more.
    """

    source: Partition
    target: Partition
    most: int
    limit: int
    confirmed: int | None = None
    is_placed: bool = False
    delivered: int = 0
    position: int = 0
    owes: bool = False
    witness: str = ""
    topic_id: str = ""
    failure: LogcoreError | None = None

    def place(self, confirmed: int | None, begin: Begin) -> None:
        """Begins there. Where the progress is what it was, what was left out since stays left out."""
        if not self.is_placed or confirmed != self.confirmed or begin.offset > self.delivered:
            self.delivered = begin.offset
            self.owes = confirmed is not None and confirmed != begin.offset
        self.confirmed = confirmed
        self.is_placed = True
        self.rewind()

    def read_to(self, position: int) -> None:
        """Records up to position are in the next batch."""
        self.position = position

    def rewind(self) -> None:
        """The records that were read were not delivered, and are read again."""
        self.position = self.delivered

    def deliver(self, next_offset: int) -> None:
        """Records below next_offset are delivered. A refused one is searched in fewer records; behind it the step
        grows.
        """
        assert next_offset >= self.delivered, "progress never goes back"
        self.confirmed = next_offset
        self.delivered = next_offset
        self.position = max(self.position, next_offset)
        self.limit = min(self.most, self.limit * 2)
        self.owes = False

    def refuse(self, record_count: int) -> bool:
        """A batch with so many records of this partition was refused. Returns whether it was the one record alone."""
        self.rewind()
        if record_count <= 1:
            return True
        self.limit = max(1, record_count // 2)
        return False

    def leave_out(self, next_offset: int) -> None:
        """Offsets below next_offset need no shipping: markers, aborted records, a record that is kept elsewhere."""
        self.delivered = next_offset
        self.position = next_offset


def missing_topics(wanted: Mapping[str, int], found: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Topics that are missing in the remote cluster or have too few partitions: name -> (wanted, found)."""
    return {name: (count, found.get(name, 0)) for name, count in wanted.items() if found.get(name, 0) < count}


def advice_to_create(missing: Mapping[str, tuple[int, int]]) -> str:
    """How to make topics that are missing, or add partitions to those that have too few."""
    told = []
    for name, (wanted, found) in sorted(missing.items()):
        verb = "--create"
        if found:
            verb = "--alter"
        told.append(f"kafka-topics {verb} --topic {name} --partitions {wanted}")
    return "; ".join(told)


def backoff_ms(attempts: int, *, first_ms: int, most_ms: int, chance: float) -> int:
    """How long to wait after so many attempts that failed: doubling, and up to a fifth more or less. chance: 0 to 1."""
    plain = min(most_ms, first_ms * 2 ** min(attempts - 1, 30))
    return int(plain * (0.8 + 0.4 * chance))
