"""How long this process has watched members of groups do nothing.

A deadline in the node of a group says when a member should have been heard. It does not say whether that member could
speak: when a machine or a container is paused, all deadlines pass at once, and whoever goes on first would remove all
others. So a member that lives is removed by a process that has watched the deadline all that time, be it the end of the
member's session or that of a rebalance which waits for it.

Rules (clients reference 6.4):
- Time is counted from one look of this process to the next, by its own steady clock.
- A look after a long pause counts as a third of the time that is waited: this process may have been stopped itself. A
  member that goes on with it has two thirds left.
- A deadline that was moved starts again from zero: its member was heard, or another rebalance began. A process that has
  just joined has seen nothing.

Pure. Not here: whether the process of a member has died, which needs no time (sharedgroups.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from logcore.coordination.effects import JoinEnds, SessionEnds, SyncEnds, Timeout
from logcore.coordination.group import Group

#: The part of the time that is waited which a pause between two looks counts as, at most.
_PAUSE_PART: Final = 3


@attrs.define
class _Watched:
    deadline_ms: int  # another one shows that the member was heard
    looked_ms: int
    counted_ms: int = 0


class Observations:
    """See the top of this module. Used under the lock of the groups."""

    def __init__(self) -> None:
        self._watched: dict[str, dict[Timeout, _Watched]] = {}  # group -> deadline -> what was seen of it

    def look(self, group: Group, timers: Mapping[Timeout, int], now_ms: int) -> None:
        """Takes note of a group as it stands, and of its timers. now_ms: of this process's steady clock."""
        before = self._watched.get(group.group_id, {})
        after = {}
        for timeout, deadline_ms, waited_ms in _deadlines(group, timers):
            watched = before.get(timeout)
            if watched is None or watched.deadline_ms != deadline_ms:
                watched = _Watched(deadline_ms, now_ms)
            watched.counted_ms += min(now_ms - watched.looked_ms, waited_ms // _PAUSE_PART)
            watched.looked_ms = now_ms
            after[timeout] = watched
        self._watched[group.group_id] = after

    def forget(self, group_id: str) -> None:
        self._watched.pop(group_id, None)

    def is_over(self, group: Group, timers: Mapping[Timeout, int], timeout: Timeout) -> bool:
        """Whether this process has watched one of these deadlines for as long as is waited for it. True for those that
        remove no living member.
        """
        for each, deadline_ms, waited_ms in _deadlines(group, timers):
            if each == timeout:
                watched = self._watched.get(group.group_id, {}).get(timeout)
                if watched is None or watched.deadline_ms != deadline_ms:
                    return False
                return watched.counted_ms >= waited_ms
        return True


def _deadlines(group: Group, timers: Mapping[Timeout, int]) -> Iterable[tuple[Timeout, int, int]]:
    """What is watched of a group: the deadline, when it is, how long is waited for it."""
    for member in group.members.values():
        # Not the timer: that may be of an earlier deadline (membership.renew).
        yield SessionEnds(member.member_id), member.deadline_ms, member.kept_ms
    for timeout, at_ms in timers.items():
        if isinstance(timeout, JoinEnds | SyncEnds):
            yield timeout, at_ms, group.rebalance_timeout_ms
