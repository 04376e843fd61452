"""Which calls of a simulated disk fail, and how: by operation, file and count.

This module fails nothing itself: disk.py asks a plan before each call.
"""

from __future__ import annotations

import errno
import fnmatch
from typing import Final, Literal, NamedTuple

import attrs

#: Operations that change what a crash may leave.
CHANGES: Final = frozenset({"create", "link", "pwrite", "truncate", "mkdir", "rename", "unlink", "rmdir"})
SYNCS: Final = frozenset({"fdatasync", "fsync", "sync_dir"})
READS: Final = frozenset({"open", "pread", "size", "map", "file_size", "identity", "listdir", "modified_ms"})
LOCKS: Final = frozenset({"lock_byte"})
OPERATIONS: Final = CHANGES | SYNCS | READS | LOCKS


class Operation(NamedTuple):
    """One call that reached the disk: a name of OPERATIONS and the path it was about."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


@attrs.frozen
class Fault:
    """A failure of chosen calls.

    operation: one of OPERATIONS, or "*". action: an errno, so that the call fails with it (a write after its first
    half, a sync after losing the data); or "lie", a sync that does nothing and succeeds; "rot", a write of which one
    bit is wrong; "misdirect", a write that lands a sector further; "crash", the power goes during the call. path: a
    glob over the whole path. at: which matching call is the first to fail, from 1. times: how many do, None for ever.
    """

    operation: str
    action: int | Literal["lie", "rot", "misdirect", "crash"] = errno.EIO
    path: str = "*"
    at: int = 1
    times: int | None = 1

    def __attrs_post_init__(self) -> None:
        if self.operation != "*" and self.operation not in OPERATIONS:
            raise ValueError(f"unknown operation {self.operation!r}; known are {', '.join(sorted(OPERATIONS))}")


class FaultPlan:
    """Which calls fail, and how: `FaultPlan(Fault("fdatasync", errno.EIO, path="*.log", at=3))`.

    It counts the calls it is asked about, so one plan serves one disk. hits: the faults that came to pass.
    """

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self.hits: list[tuple[Fault, Operation]] = []
        self._counts = [0] * len(faults)

    def __repr__(self) -> str:
        return f"FaultPlan({', '.join(map(repr, self.faults))})"

    def ask(self, operation: str, path: str) -> int | str | None:
        """The action for this call, None when it is to succeed."""
        action: int | str | None = None
        for at, fault in enumerate(self.faults):
            if fault.operation not in ("*", operation) or not fnmatch.fnmatchcase(path, fault.path):
                continue
            self._counts[at] += 1
            late = self._counts[at] - fault.at
            if action is None and late >= 0 and (fault.times is None or late < fault.times):
                self.hits.append((fault, Operation(operation, path)))
                action = fault.action
        return action
