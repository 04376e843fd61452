"""How long this process has watched members of groups do nothing.

A deadline in the node of a group says when a member should have been heard. It does not say whether that member could
speak: when a machine or a container is paused, all deadlines pass at once, and whoever goes on first would remove all
others. So a member that lives is removed by a process that has watched it all that time.

Rules (clients reference 6.4):
- Time is counted from one look of this process to the next, by its own steady clock.
- A look after a long pause counts as a third of the session: this process may have been stopped itself. A member that
  goes on with it has two thirds of its session left.
- A member that was heard starts again from zero. A process that has just joined has seen nothing.

Pure. Not here: whether the process of a member has died, which needs no time (sharedgroups.py).
"""

from __future__ import annotations

from typing import Final

import attrs

from logcore.coordination.group import Group, Member

#: The part of a session that a pause between two looks counts as, at most.
_PAUSE_PART: Final = 3


@attrs.define
class _Watched:
    deadline_ms: int  # another one shows that the member was heard
    looked_ms: int
    counted_ms: int = 0


class Observations:
    """See the top of this module. Used under the lock of the groups."""

    def __init__(self) -> None:
        self._watched: dict[str, dict[str, _Watched]] = {}  # group -> member -> what was seen of it

    def look(self, group: Group, now_ms: int) -> None:
        """Takes note of a group as it stands. now_ms: of this process's steady clock."""
        before = self._watched.get(group.group_id, {})
        after = {}
        for member_id, member in group.members.items():
            watched = before.get(member_id)
            if watched is None or watched.deadline_ms != member.deadline_ms:
                watched = _Watched(member.deadline_ms, now_ms)
            watched.counted_ms += min(now_ms - watched.looked_ms, member.session_timeout_ms // _PAUSE_PART)
            watched.looked_ms = now_ms
            after[member_id] = watched
        self._watched[group.group_id] = after

    def forget(self, group_id: str) -> None:
        self._watched.pop(group_id, None)

    def is_stuck(self, group_id: str, member: Member) -> bool:
        """Whether a member was not heard for its session while this process watched."""
        watched = self._watched.get(group_id, {}).get(member.member_id)
        if watched is None or watched.deadline_ms != member.deadline_ms:
            return False
        return watched.counted_ms >= member.session_timeout_ms
