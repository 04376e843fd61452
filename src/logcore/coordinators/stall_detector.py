"""Failure detector: measures how long each group member has been inactive.

Each process measures this by its own observations. The node of a group contains the
deadline of each member's next heartbeat. The deadline does not show whether the member
could send one. If a machine or container is paused, every deadline passes at the same
time, and the first process to resume would evict all other members. Therefore, only a
process that has observed the deadline for its whole duration removes a live member. This
applies to the end of the member's session, and to a rebalance that waits for it.

Rules (clients reference 6.4):
- Time is counted from one observation of this process to the next, with its own
  monotonic clock.
- An interval between two observations counts as at most a third of the duration,
  because this process may have been paused itself. A member that was paused at the same
  time then has two thirds of the duration left.
- If a deadline has moved, counting restarts at zero: the member was active, or another
  rebalance began. A process that has just joined starts at zero too.

This module is pure: it reads no clock and no file. shared_groups.py checks whether the
process of a member has died.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from logcore.coordination.classic_group import Group
from logcore.coordination.group_requests import (
    JoinEnds,
    SessionEnds,
    SyncEnds,
    Timeout,
)

#: A pause between two observations counts as at most 1/_PAUSE_PART of the duration.
_PAUSE_PART: Final = 3


@attrs.define
class _ObservedDeadline:
    """A deadline, and the part of its duration that this process has observed."""

    #: A different value in the node shows that the member was active.
    deadline_ms: int
    duration_ms: int
    #: Monotonic time of the last observation.
    observed_ms: int
    #: The part of the duration that counts as observed.
    counted_ms: int = 0


class StallDetector:
    """The observed deadlines. Used under the lock of the groups."""

    def __init__(self) -> None:
        #: Group -> timeout -> its observed deadline.
        self._observed: dict[str, dict[Timeout, _ObservedDeadline]] = {}

    def observe(self, group: Group, timers: Mapping[Timeout, int], now_ms: int) -> None:
        """Observe the current state of a group and its timers.

        `now_ms` is the time of this process's monotonic clock.
        """
        previous = self._observed.get(group.group_id, {})
        current = {}
        for timeout, deadline_ms, duration_ms in _deadlines(group, timers):
            observed = previous.get(timeout)
            if observed is None or observed.deadline_ms != deadline_ms:
                observed = _ObservedDeadline(deadline_ms, duration_ms, now_ms)
            observed.counted_ms += min(
                now_ms - observed.observed_ms, duration_ms // _PAUSE_PART
            )
            observed.observed_ms = now_ms
            current[timeout] = observed
        self._observed[group.group_id] = current

    def shortest_ms(self) -> int | None:
        """Return the shortest duration of the observed deadlines, or None."""
        return min(
            (
                deadline.duration_ms
                for observed in self._observed.values()
                for deadline in observed.values()
            ),
            default=None,
        )

    def forget(self, group_id: str) -> None:
        self._observed.pop(group_id, None)

    def is_over(
        self, group: Group, timers: Mapping[Timeout, int], timeout: Timeout
    ) -> bool:
        """Return whether this process has observed a deadline for its whole duration.

        The result is True for timeouts that remove no live member.
        """
        for each, deadline_ms, duration_ms in _deadlines(group, timers):
            if each == timeout:
                observed = self._observed.get(group.group_id, {}).get(timeout)
                if observed is None or observed.deadline_ms != deadline_ms:
                    return False
                return observed.counted_ms >= duration_ms
        return True


def _deadlines(
    group: Group, timers: Mapping[Timeout, int]
) -> Iterable[tuple[Timeout, int, int]]:
    """Yield the observed deadlines of a group as (timeout, time, duration)."""
    for member in group.members.values():
        # The timer is not used, because it may have an earlier deadline than the member:
        # most heartbeats change only the deadline.
        yield (
            SessionEnds(member.member_id),
            member.deadline_ms,
            member.active_session_ms,
        )
    for timeout, at_ms in timers.items():
        if isinstance(timeout, JoinEnds | SyncEnds):
            yield timeout, at_ms, group.rebalance_timeout_ms
