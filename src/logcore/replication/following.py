"""A follower of one leader in one epoch: the next fetch, and the handling of its answer.

    follower = follow(state, ..., log_end=log.log_end_offset, ...)
    step = next_step(follower)                  # SendFetch, SyncLog or None
    follower, effects = answered(follower, fetch, answer, own_end_of_epoch)

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
    """Return the state of a broker that begins to follow the leader of `state`."""
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


def next_step(follower: FollowerState) -> Step | None:
    """Return the next step; None while a fetch is outstanding, or after a stop."""
    if follower.stopped is not None or follower.outstanding is not None:
        return None
    if follower.durable_end < follower.log_end:
        return SyncLog()
    return SendFetch(
        FollowerFetch(
            follower.broker,
            follower.broker_epoch,
            follower.state.leader_epoch,
            fetch_offset(follower),
            follower.last_epoch,
        )
    )


def fetch_offset(follower: FollowerState) -> int:
    return min(follower.durable_end, follower.log_end)


def sent(follower: FollowerState, fetch: FollowerFetch) -> FollowerState:
    return follower._replace(outstanding=fetch)


def gave_up(follower: FollowerState) -> FollowerState:
    """Forget the outstanding fetch, whose connection the caller has closed."""
    return follower._replace(outstanding=None)


def synced(follower: FollowerState, durable_end: int) -> FollowerState:
    """Take the durable end after a sync."""
    durable_end = min(durable_end, follower.log_end)
    if durable_end <= follower.durable_end:
        return follower
    return _follow_high_watermark(follower._replace(durable_end=durable_end))


def changed_log(
    follower: FollowerState, log_start: int, log_end: int, last_epoch: int
) -> FollowerState:
    """Take the ends of the log after an append, a truncation or a restart."""
    if follower.is_durable_first:
        durable_end = min(follower.durable_end, log_end)
    else:
        durable_end = log_end
    return _follow_high_watermark(
        follower._replace(
            log_start=log_start,
            log_end=log_end,
            last_epoch=last_epoch,
            durable_end=durable_end,
        )
    )


def _follow_high_watermark(follower: FollowerState) -> FollowerState:
    high_watermark = min(follower.leader_high_watermark, fetch_offset(follower))
    if high_watermark <= follower.high_watermark:
        return follower
    return follower._replace(high_watermark=high_watermark)


def is_expected(follower: FollowerState, fetch: FollowerFetch) -> bool:
    """Return whether the answer to `fetch` may be used."""
    return fetch is follower.outstanding and fetch.offset == follower.log_end


def answered(
    follower: FollowerState,
    fetch: FollowerFetch,
    answer: LeaderResponse,
    own_end_of_epoch: tuple[int, int],
) -> tuple[FollowerState, list[FollowerEffect]]:
    """Handle an answer. A late or repeated answer changes nothing.

    `own_end_of_epoch` is Log.end_of_epoch(answer.diverging[0]). It is not used if the
    answer has no diverging epoch.
    """
    if not is_expected(follower, fetch):
        return follower, []
    follower = follower._replace(outstanding=None)
    if answer.error is ReplicationError.OFFSET_OUT_OF_RANGE:
        return _restart(follower, answer.log_start)
    if answer.error is not None:
        return follower, [BackOff()]
    if answer.diverging is not None:
        return _truncate(follower, answer.diverging, own_end_of_epoch)
    effects: list[FollowerEffect] = []
    if answer.records:
        effects.append(AppendFetched(answer.records))
    if answer.log_start > follower.log_start:
        effects.append(DeleteRecordsBelow(answer.log_start))
    follower = follower._replace(leader_high_watermark=answer.high_watermark)
    return _follow_high_watermark(follower), effects


def _truncate(
    follower: FollowerState, diverging: tuple[int, int], own: tuple[int, int]
) -> tuple[FollowerState, list[FollowerEffect]]:
    epoch, end = diverging
    own_epoch, own_end = own
    offset = min(end, own_end) if own_epoch >= 0 else end
    if offset < follower.high_watermark:
        if not follower.state.is_recovering:
            return _stop(
                follower,
                f"the leader's log differs from this log at offset {offset}, which is"
                f" below the high watermark {follower.high_watermark}",
            )
        follower = follower._replace(high_watermark=offset)
    follower = follower._replace(leader_high_watermark=0)
    return follower, [TruncateToEpoch(epoch, end)]


def _restart(
    follower: FollowerState, log_start: int
) -> tuple[FollowerState, list[FollowerEffect]]:
    """Begin at the leader's log start, if it is above the log end (KAFKA-9491)."""
    if log_start < follower.high_watermark and not follower.state.is_recovering:
        return _stop(
            follower,
            f"the leader's log begins at offset {log_start} in a later epoch, and the"
            f" high watermark of this log is {follower.high_watermark}",
        )
    follower = follower._replace(
        high_watermark=log_start, leader_high_watermark=log_start
    )
    return follower, [RestartLog(log_start)]


def _stop(
    follower: FollowerState, reason: str
) -> tuple[FollowerState, list[FollowerEffect]]:
    return follower._replace(stopped=reason), [StopReplica(reason)]


def read_state(follower: FollowerState, state: LeaderAndIsr) -> FollowerState:
    """Take a newer state with the same leader and epoch."""
    return follower._replace(state=state)
