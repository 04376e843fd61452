"""The locks of a simulated disk, and the watch of those who wait for changes on it.

This module makes no change of a disk; disk.py hands these out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs

from logcore.fs import Shared
from logcore.testing.nodes import Directory

if TYPE_CHECKING:
    from logcore.testing.disk import SimulatedDisk


@attrs.define(eq=False)
class LockMembers:
    members: set[str] = attrs.field(factory=set)
    shared: Shared = attrs.field(factory=Shared)


class MemberLock:
    def __init__(self, disk: SimulatedDisk, node: Directory, held: LockMembers, member: str) -> None:
        self._disk = disk
        self._node = node
        self._held = held
        self._member = member
        self.shared = held.shared

    @property
    def is_last(self) -> bool:
        return self._held.members <= {self._member}

    def release(self) -> None:
        with self._disk._mutex:
            self._held.members.discard(self._member)
            if not self._held.members and self._disk._locks.get(self._node) is self._held:
                del self._disk._locks[self._node]


class DiskWatch:
    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self._seen = len(disk.operations)

    def wait(self, timeout: float | None) -> bool:
        time.sleep(0)  # for a writer in another thread
        before = self._seen
        self._seen = len(self._disk.operations)
        if self._seen != before:
            return True
        if timeout is not None:
            self._disk.advance(max(1, int(timeout * 1000)))
        return False

    def close(self) -> None:
        pass
