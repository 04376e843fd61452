"""The leader of one partition in one epoch: ends of the replicas, high watermark, ISR.

    leader = take_over(state, version, broker, ..., now_ms)
    leader = appended(leader, log_end)          # then answer acks=all at leader.high_watermark
    leader, refusal = fetched(leader, fetch, end_of_epoch, live, now_ms)
    leader = expand_isr(leader, fetch, live)    # after a fetch that was not refused
    leader = review_isr(leader, live, now_ms)   # every lag_ms / 2

Each function takes a leader and returns the next one. The caller carries out the rest:
- It calls expand_isr() and review_isr() only while its session is alive.
- If `proposal` is not None, it sets the state node to `proposal.state`, expecting
  `proposal.version`. It repeats that until the write succeeds or a newer version of the
  node is read, and passes the outcome to read_state(). A write without an answer may
  have happened.
- If role_of() is no longer LEADER, it drops the leader.

Rules:
- The high watermark is the lowest end in the maximal ISR: the members of the ISR and of
  the proposal. It never falls. It does not move while the ISR is smaller than
  `min.insync.replicas`, because the ELR relies on that (KAFKA-15583).
- There is at most one proposal. Until its outcome is known, both ISRs count.
- A follower joins the ISR with all records below the high watermark and below the start
  of this epoch (KAFKA-7128), in its present registration (KAFKA-13916).
- A live member leaves the ISR by a decision of the leader only, and after it fetched in
  this epoch or was silent for `lag_ms`. It may be the previous leader, and it answers
  reads of committed offsets until it knows that it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import attrs

from logcore.replication.state import (
    InSyncReplica,
    LeaderAndIsr,
    LiveBroker,
    ReplicationError,
    replace_isr,
)

#: The end of a replica that has not fetched in this epoch.
UNKNOWN_END: Final = -1
#: The last epoch in a fetch of an empty log.
NO_EPOCH: Final = -1


# Named tuples, because each fetch of a follower makes one of each, and a frozen class of
# attrs takes twice the time.


class FollowerFetch(NamedTuple):
    """A fetch request of a follower, for one partition."""

    replica: int
    #: The registration of the follower.
    broker_epoch: int
    #: The leader epoch in which the follower follows.
    leader_epoch: int
    #: The log end of the follower, which is also its durable end if the policy waits.
    offset: int
    #: The epoch of its last record; NO_EPOCH for an empty log.
    last_epoch: int


@attrs.frozen
class FetchRefusal:
    """The answer to a fetch whose position is not in the leader's log."""

    error: ReplicationError | None = None
    #: The last common epoch candidate and its end in the leader (KIP-595).
    diverging: tuple[int, int] | None = None


class FollowerProgress(NamedTuple):
    """The fetches of one follower."""

    #: The offset of its last fetch; UNKNOWN_END before its first one in this epoch.
    end: int
    #: The last time when it had every record of the log.
    caught_up_ms: int
    #: Its latest fetch, and the end of the leader's log at that time.
    fetch_ms: int = 0
    fetch_log_end: int = UNKNOWN_END


@attrs.frozen
class Proposal:
    """A change of the state that the leader requests and whose outcome is unknown."""

    state: LeaderAndIsr
    #: The version of the node that it replaces.
    version: int


class LeaderState(NamedTuple):
    """The leader's record of its partition.

    A named tuple: each fetch replaces the leader, and _replace() takes a third of the
    time of attrs.evolve().
    """

    broker: int
    #: The state node as last read, and its version.
    state: LeaderAndIsr
    version: int
    #: `min.insync.replicas` of the topic.
    min_insync_replicas: int
    #: `replica.lag.time.max.ms`.
    lag_ms: int
    #: The log end at take-over. Followers join the ISR at or above it.
    epoch_start: int
    log_start: int
    log_end: int
    #: The end of this broker's replica: the durable end if the policy waits for the
    #: disk, else the log end.
    own_end: int
    high_watermark: int
    followers: Mapping[int, FollowerProgress]
    proposal: Proposal | None = None

    @property
    def min_isr(self) -> int:
        """`min.insync.replicas`, at most the number of replicas."""
        return min(self.min_insync_replicas, len(self.state.replicas))

    @property
    def has_min_isr(self) -> bool:
        """Whether acks=all is accepted: else the answer is NOT_ENOUGH_REPLICAS."""
        return len(self.state.isr) >= self.min_isr


def take_over(
    state: LeaderAndIsr,
    version: int,
    broker: int,
    *,
    min_insync_replicas: int,
    lag_ms: int,
    log_start: int,
    log_end: int,
    high_watermark: int,
    now_ms: int,
) -> LeaderState:
    """Return the state of a new leader, whose log is synced and has begun the epoch.

    Members of the ISR count as caught up now: they get `lag_ms` for their first fetch.
    """
    followers = {
        replica: FollowerProgress(UNKNOWN_END, now_ms if replica in state.isr else 0)
        for replica in state.replicas
        if replica != broker
    }
    leader = LeaderState(
        broker=broker,
        state=state,
        version=version,
        min_insync_replicas=min_insync_replicas,
        lag_ms=lag_ms,
        epoch_start=log_end,
        log_start=log_start,
        log_end=log_end,
        own_end=log_end,
        high_watermark=high_watermark,
        followers=followers,
    )
    return advance_high_watermark(leader)


def appended(
    leader: LeaderState, log_end: int, *, is_durable: bool, now_ms: int
) -> LeaderState:
    """Record a new log end. `is_durable` is set if the policy does not wait for the disk.

    A follower at the previous log end was caught up until now. It may not have sent a
    fetch recently, because a fetch session repeats no unchanged position.
    """
    own_end = log_end if is_durable else leader.own_end
    followers = {
        replica: follower._replace(caught_up_ms=max(follower.caught_up_ms, now_ms))
        if follower.end == leader.log_end
        else follower
        for replica, follower in leader.followers.items()
    }
    return advance_high_watermark(
        leader._replace(log_end=log_end, own_end=own_end, followers=followers)
    )


def synced(leader: LeaderState, durable_end: int) -> LeaderState:
    if durable_end <= leader.own_end:
        return leader
    return advance_high_watermark(leader._replace(own_end=durable_end))


def advance_high_watermark(leader: LeaderState) -> LeaderState:
    """Move the high watermark to the lowest end in the maximal ISR."""
    if not leader.has_min_isr:
        return leader
    end = leader.own_end
    for replica in maximal_isr(leader):
        if replica != leader.broker:
            follower = leader.followers.get(replica)
            end = min(end, follower.end if follower else UNKNOWN_END)
    if end <= leader.high_watermark:
        return leader
    return leader._replace(high_watermark=end)


def maximal_isr(leader: LeaderState) -> set[int]:
    """Return the members of the ISR and of the proposal."""
    members = set(leader.state.isr)
    if leader.proposal is not None:
        members.update(leader.proposal.state.isr)
    return members


def check_epoch(leader: LeaderState, leader_epoch: int) -> ReplicationError | None:
    """Compare the epoch in a request with the leader's."""
    if leader_epoch < leader.state.leader_epoch:
        return ReplicationError.FENCED_LEADER_EPOCH
    if leader_epoch > leader.state.leader_epoch:
        return ReplicationError.UNKNOWN_LEADER_EPOCH
    return None


def fetched(
    leader: LeaderState,
    fetch: FollowerFetch,
    end_of_epoch: tuple[int, int],
    live: Mapping[int, LiveBroker],
    now_ms: int,
) -> tuple[LeaderState, FetchRefusal | None]:
    """Handle a follower's fetch; without a refusal, serve it from `fetch.offset`.

    `end_of_epoch` is Log.end_of_epoch(fetch.last_epoch). The high watermark in the
    answer is the one of the returned leader.
    """
    refusal = refuse_fetch(leader, fetch, end_of_epoch, live)
    if refusal is not None:
        # A position that is not in this log does not show progress (KAFKA-13141).
        return leader, refusal
    member = leader.state.isr.get(fetch.replica)
    if member is None or member.broker_epoch == fetch.broker_epoch:
        before = leader.followers[fetch.replica]
        caught_up_ms = before.caught_up_ms
        if fetch.offset >= leader.log_end:
            caught_up_ms = now_ms
        elif fetch.offset >= before.fetch_log_end > UNKNOWN_END:
            caught_up_ms = max(caught_up_ms, before.fetch_ms)
        progress = FollowerProgress(fetch.offset, caught_up_ms, now_ms, leader.log_end)
        leader = advance_high_watermark(
            leader._replace(followers={**leader.followers, fetch.replica: progress})
        )
    return leader, None


def refuse_fetch(
    leader: LeaderState,
    fetch: FollowerFetch,
    end_of_epoch: tuple[int, int],
    live: Mapping[int, LiveBroker],
) -> FetchRefusal | None:
    if fetch.replica not in leader.followers:
        return FetchRefusal(ReplicationError.UNKNOWN_LEADER_EPOCH)
    error = check_epoch(leader, fetch.leader_epoch)
    if error is not None:
        return FetchRefusal(error)
    registered = live.get(fetch.replica)
    if registered is None or registered.epoch != fetch.broker_epoch:
        return FetchRefusal(ReplicationError.NOT_LEADER_OR_FOLLOWER)
    if fetch.offset < leader.log_start:
        return FetchRefusal(ReplicationError.OFFSET_OUT_OF_RANGE)
    if fetch.last_epoch != NO_EPOCH:
        epoch, end = end_of_epoch
        if epoch < 0:
            return FetchRefusal(ReplicationError.OFFSET_OUT_OF_RANGE)
        if epoch != fetch.last_epoch or end < fetch.offset:
            return FetchRefusal(diverging=(epoch, end))
    if fetch.offset > leader.log_end:
        return FetchRefusal(ReplicationError.OFFSET_OUT_OF_RANGE)
    return None


def change_min_insync_replicas(
    leader: LeaderState, min_insync_replicas: int
) -> LeaderState:
    """Apply a new value of min.insync.replicas while leading."""
    if min_insync_replicas == leader.min_insync_replicas:
        return leader
    return advance_high_watermark(
        leader._replace(min_insync_replicas=min_insync_replicas)
    )


# -- the ISR ---------------------------------------------------------------------------


def expand_isr(
    leader: LeaderState, fetch: FollowerFetch, live: Mapping[int, LiveBroker]
) -> LeaderState:
    """Propose to add a follower that has just fetched, if it may join."""
    replica = fetch.replica
    registered = live[replica]
    if (
        leader.proposal is not None
        or replica in leader.state.isr
        or replica in leader.state.removing
        or registered.is_leaving
        or fetch.offset < max(leader.high_watermark, leader.epoch_start)
    ):
        return leader
    member = InSyncReplica(fetch.broker_epoch, registered.disk)
    return _propose(leader, {**leader.state.isr, replica: member})


def review_isr(
    leader: LeaderState, live: Mapping[int, LiveBroker], now_ms: int
) -> LeaderState:
    """Propose to remove members that are too slow, or that leave the partition.

    A member is slow if it was not caught up for `lag_ms`.
    """
    if leader.proposal is not None:
        return leader
    isr = {
        replica: member
        for replica, member in leader.state.isr.items()
        if replica == leader.broker or _remains(leader, live, replica, now_ms)
    }
    return leader if len(isr) == len(leader.state.isr) else _propose(leader, isr)


def _remains(
    leader: LeaderState, live: Mapping[int, LiveBroker], replica: int, now_ms: int
) -> bool:
    follower = leader.followers.get(replica)
    if follower is None:
        return False
    is_known = follower.end != UNKNOWN_END
    registered = live.get(replica)
    is_leaving = registered is not None and registered.is_leaving
    if replica in leader.state.removing:
        is_leaving = all(each in leader.state.isr for each in leader.state.target)
    if is_leaving and is_known:
        return False
    return (
        follower.end == leader.log_end
        or now_ms - follower.caught_up_ms <= leader.lag_ms
    )


def _propose(leader: LeaderState, isr: Mapping[int, InSyncReplica]) -> LeaderState:
    state = replace_isr(leader.state, isr, leader.min_isr)
    proposal = Proposal(attrs.evolve(state, is_recovering=False), leader.version)
    return leader._replace(proposal=proposal)


def read_state(leader: LeaderState, state: LeaderAndIsr, version: int) -> LeaderState:
    """Take a state in which this broker still leads the epoch, and its version.

    A newer version ends the proposal: it was written, or it never will be.
    """
    if version <= leader.version:
        return leader
    followers = leader.followers
    if state.replicas != leader.state.replicas:
        unknown = FollowerProgress(UNKNOWN_END, 0)
        followers = {
            replica: followers.get(replica, unknown)
            for replica in state.replicas
            if replica != leader.broker
        }
    return advance_high_watermark(
        leader._replace(
            state=state, version=version, followers=followers, proposal=None
        )
    )
