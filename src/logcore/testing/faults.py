"""Plans for injected faults: which calls on a simulated disk fail, and how.

A plan selects calls by operation, path and count. disk.py asks a plan before each call
and raises the error; this module raises none of them.
"""

from __future__ import annotations

import errno
import fnmatch
from typing import Final, Literal, NamedTuple

import attrs

#: Operations that change the set of states a crash may leave.
CHANGES: Final = frozenset(
    {"create", "link", "pwrite", "truncate", "mkdir", "rename", "unlink", "rmdir"}
)
SYNCS: Final = frozenset({"fdatasync", "fsync", "sync_dir"})
READS: Final = frozenset(
    {"open", "pread", "size", "map", "file_size", "identity", "listdir", "modified_ms"}
)
LOCKS: Final = frozenset({"lock_byte"})
OPERATIONS: Final = CHANGES | SYNCS | READS | LOCKS


class Operation(NamedTuple):
    """One call on the disk: a name of OPERATIONS and the path it was made for."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


@attrs.frozen
class Fault:
    """A failure of selected calls.

    Attributes:
        operation: One of OPERATIONS, or "*".
        action: An errno with which the call fails. A write then fails after its first
            half, and a sync fails after losing the data. The other actions are "lie" (a
            sync succeeds without effect), "rot" (one bit of a write is wrong),
            "misdirect" (a write hits the following sector) and "crash" (the power fails
            during the call).
        path: A glob pattern for the whole path.
        at: Number of the first matching call that fails, counted from 1.
        times: Number of calls that fail, None for no limit.
    """

    operation: str
    action: int | Literal["lie", "rot", "misdirect", "crash"] = errno.EIO
    path: str = "*"
    at: int = 1
    times: int | None = 1

    def __attrs_post_init__(self) -> None:
        if self.operation != "*" and self.operation not in OPERATIONS:
            raise ValueError(
                f"unknown operation {self.operation!r}; known are {', '.join(sorted(OPERATIONS))}"
            )


class FaultPlan:
    """A set of faults: `FaultPlan(Fault("fdatasync", errno.EIO, path="*.log", at=3))`.

    The plan counts the calls made on the disk, so one plan serves one disk. `hits`
    lists the faults that occurred.
    """

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self.hits: list[tuple[Fault, Operation]] = []
        self._counts = [0] * len(faults)

    def __repr__(self) -> str:
        return f"FaultPlan({', '.join(map(repr, self.faults))})"

    def ask(self, operation: str, path: str) -> int | str | None:
        """Return the action for this call, None if it should succeed."""
        action: int | str | None = None
        for at, fault in enumerate(self.faults):
            if fault.operation not in ("*", operation) or not fnmatch.fnmatchcase(
                path, fault.path
            ):
                continue
            self._counts[at] += 1
            late = self._counts[at] - fault.at
            if (
                action is None
                and late >= 0
                and (fault.times is None or late < fault.times)
            ):
                self.hits.append((fault, Operation(operation, path)))
                action = fault.action
        return action
