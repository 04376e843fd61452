"""A follower of one leader in one epoch: the next fetch, and the handling of its answer.

    book = follow(state, ..., log_end=log.log_end_offset, ...)
    step = next_step(book)                  # SendFetch, SyncLog or None
    book, effects = answered(book, fetch, answer, own_end_of_epoch)

The caller carries out the effects in their order and passes the new ends of its log to
changed_log(), and after a sync to synced().

Rules:
- If the policy waits for the disk, the offset of a fetch is the durable end. The leader
  may then count a fetched offset as durable. A log end above it is synced first, also
  before the first fetch of a role: the page cache may hold records of a killed process.
- One fetch is outstanding. An answer counts only for that fetch (KAFKA-7786), and only
  if the log still ends at its offset (KAFKA-8012).
- A diverging log is truncated, and only a later fetch changes the high watermark
  (KAFKA-14704). A truncation below the own high watermark stops the replica, unless the
  partition recovers from an unclean election.
- The high watermark is never a reason to truncate (KIP-101). It is at most the durable
  end, and never falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import attrs

from logcore.replication.leading import FollowerFetch
from logcore.replication.state import LeaderAndIsr, ReplicationError

#: The durable end of a log that was not synced in this role.
UNSYNCED: Final = -1


class FollowerState(NamedTuple):
    """The follower's record of its partition; see leading.LeaderState."""

    broker: int
    broker_epoch: int
    state: LeaderAndIsr
    #: Whether the policy waits for the disk.
    is_durable_first: bool
    log_start: int
    log_end: int
    #: The epoch of the last record, leading.NO_EPOCH for an empty log.
    last_epoch: int
    durable_end: int
    high_watermark: int
    #: The last high watermark of the leader, from a fetch that did not diverge.
    leader_high_watermark: int = 0
    outstanding: FollowerFetch | None = None
    #: The reason why this replica no longer fetches.
    stopped: str | None = None


@attrs.frozen
class LeaderResponse:
    """The leader's answer to a fetch, for one partition."""

    error: ReplicationError | None = None
    #: The leader's end_of_epoch() for the last epoch of the follower.
    diverging: tuple[int, int] | None = None
    #: Batches for Log.append_as_follower(), or whatever the caller uses.
    records: Sequence[object] = ()
    high_watermark: int = 0
    log_start: int = 0


# -- steps and effects -----------------------------------------------------------------


@attrs.frozen
class SyncLog:
    """Sync the log, then call synced()."""


@attrs.frozen
class SendFetch:
    """Send this fetch to the leader, then call answered() or gave_up()."""

    fetch: FollowerFetch


@attrs.frozen
class AppendFetched:
    """Append the records, then call changed_log()."""

    records: Sequence[object]


@attrs.frozen
class TruncateToEpoch:
    """Call Log.truncate_to_epoch() with these arguments, then changed_log()."""

    epoch: int
    end: int


@attrs.frozen
class RestartLog:
    """Delete all records and continue at this offset, then call changed_log()."""

    offset: int


@attrs.frozen
class DeleteRecordsBelow:
    """Advance the log start, as the leader did."""

    offset: int


@attrs.frozen
class StopReplica:
    """Report an error. The replica does not join the ISR until an operator decides."""

    reason: str


@attrs.frozen
class BackOff:
    """Read the state of the partition before the next fetch, or wait a second."""


Step = SyncLog | SendFetch
FollowerEffect = (
    AppendFetched
    | TruncateToEpoch
    | RestartLog
    | DeleteRecordsBelow
    | StopReplica
    | BackOff
)


def follow(
    state: LeaderAndIsr,
    broker: int,
    broker_epoch: int,
    *,
    is_durable_first: bool,
    log_start: int,
    log_end: int,
    last_epoch: int,
    high_watermark: int,
) -> FollowerState:
    """Return the book of a broker that begins to follow the leader of `state`."""
    return FollowerState(
        broker=broker,
        broker_epoch=broker_epoch,
        state=state,
        is_durable_first=is_durable_first,
        log_start=log_start,
        log_end=log_end,
        last_epoch=last_epoch,
        durable_end=UNSYNCED if is_durable_first else log_end,
        high_watermark=high_watermark,
    )


def next_step(book: FollowerState) -> Step | None:
    """Return the next step; None while a fetch is outstanding, or after a stop."""
    if book.stopped is not None or book.outstanding is not None:
        return None
    if book.durable_end < book.log_end:
        return SyncLog()
    return SendFetch(
        FollowerFetch(
            book.broker,
            book.broker_epoch,
            book.state.leader_epoch,
            fetch_offset(book),
            book.last_epoch,
        )
    )


def fetch_offset(book: FollowerState) -> int:
    return min(book.durable_end, book.log_end)


def sent(book: FollowerState, fetch: FollowerFetch) -> FollowerState:
    return book._replace(outstanding=fetch)


def gave_up(book: FollowerState) -> FollowerState:
    """Forget the outstanding fetch, whose connection the caller has closed."""
    return book._replace(outstanding=None)


def synced(book: FollowerState, durable_end: int) -> FollowerState:
    """Take the durable end after a sync."""
    durable_end = min(durable_end, book.log_end)
    if durable_end <= book.durable_end:
        return book
    return _follow_high_watermark(book._replace(durable_end=durable_end))


def changed_log(
    book: FollowerState, log_start: int, log_end: int, last_epoch: int
) -> FollowerState:
    """Take the ends of the log after an append, a truncation or a restart."""
    if book.is_durable_first:
        durable_end = min(book.durable_end, log_end)
    else:
        durable_end = log_end
    return _follow_high_watermark(
        book._replace(
            log_start=log_start,
            log_end=log_end,
            last_epoch=last_epoch,
            durable_end=durable_end,
        )
    )


def _follow_high_watermark(book: FollowerState) -> FollowerState:
    high_watermark = min(book.leader_high_watermark, fetch_offset(book))
    if high_watermark <= book.high_watermark:
        return book
    return book._replace(high_watermark=high_watermark)


def is_expected(book: FollowerState, fetch: FollowerFetch) -> bool:
    """Return whether the answer to `fetch` may be used."""
    return fetch is book.outstanding and fetch.offset == book.log_end


def answered(
    book: FollowerState,
    fetch: FollowerFetch,
    answer: LeaderResponse,
    own_end_of_epoch: tuple[int, int],
) -> tuple[FollowerState, list[FollowerEffect]]:
    """Handle an answer. A late or repeated answer changes nothing.

    `own_end_of_epoch` is Log.end_of_epoch(answer.diverging[0]). It is not used if the
    answer has no diverging epoch.
    """
    if not is_expected(book, fetch):
        return book, []
    book = book._replace(outstanding=None)
    if answer.error is ReplicationError.OFFSET_OUT_OF_RANGE:
        return _restart(book, answer.log_start)
    if answer.error is not None:
        return book, [BackOff()]
    if answer.diverging is not None:
        return _truncate(book, answer.diverging, own_end_of_epoch)
    effects: list[FollowerEffect] = []
    if answer.records:
        effects.append(AppendFetched(answer.records))
    if answer.log_start > book.log_start:
        effects.append(DeleteRecordsBelow(answer.log_start))
    book = book._replace(leader_high_watermark=answer.high_watermark)
    return _follow_high_watermark(book), effects


def _truncate(
    book: FollowerState, diverging: tuple[int, int], own: tuple[int, int]
) -> tuple[FollowerState, list[FollowerEffect]]:
    epoch, end = diverging
    own_epoch, own_end = own
    offset = min(end, own_end) if own_epoch >= 0 else end
    if offset < book.high_watermark:
        if not book.state.is_recovering:
            return _stop(
                book,
                f"the leader's log differs from this log at offset {offset}, which is"
                f" below the high watermark {book.high_watermark}",
            )
        book = book._replace(high_watermark=offset)
    book = book._replace(leader_high_watermark=0)
    return book, [TruncateToEpoch(epoch, end)]


def _restart(
    book: FollowerState, log_start: int
) -> tuple[FollowerState, list[FollowerEffect]]:
    """Begin at the leader's log start, if it is above the log end (KAFKA-9491)."""
    if log_start < book.high_watermark and not book.state.is_recovering:
        return _stop(
            book,
            f"the leader's log begins at offset {log_start} in a later epoch, and the"
            f" high watermark of this log is {book.high_watermark}",
        )
    book = book._replace(high_watermark=log_start, leader_high_watermark=log_start)
    return book, [RestartLog(log_start)]


def _stop(
    book: FollowerState, reason: str
) -> tuple[FollowerState, list[FollowerEffect]]:
    return book._replace(stopped=reason), [StopReplica(reason)]


def read_state(book: FollowerState, state: LeaderAndIsr) -> FollowerState:
    """Take a newer state with the same leader and epoch."""
    return book._replace(state=state)
