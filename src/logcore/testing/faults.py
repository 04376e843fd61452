"""Plans for injected faults: which calls on a disk fail, and how.

A plan selects calls by operation, path and count. SimulatedDisk calls action_for()
before each call, and raises the planned error. FaultFS does this for real files.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
import time
from typing import Final, Literal, NamedTuple

import attrs

from logcore.errors import InvalidConfigError, StorageWriteError
from logcore.fs import Data, OsFS, _raise, _raise_sync

#: Operations that change the set of states a crash may leave.
CHANGES: Final = frozenset(
    {"create", "link", "pwrite", "truncate", "mkdir", "rename", "unlink", "rmdir"}
)
SYNCS: Final = frozenset({"fdatasync", "fsync", "sync_dir"})
READS: Final = frozenset(
    {"open", "pread", "size", "map", "file_size", "identity", "listdir", "modified_ms"}
)
#: Operations for which FaultFS supports faults.
REAL_OPERATIONS: Final = frozenset({"pwrite", "truncate"}) | SYNCS
LOCKS: Final = frozenset({"lock_byte"})
OPERATIONS: Final = CHANGES | SYNCS | READS | LOCKS


class Operation(NamedTuple):
    """One call on the disk: a name of OPERATIONS and the path."""

    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


@attrs.frozen
class Slow:
    """An action for real files: the call succeeds after a delay."""

    delay_ms: int


@attrs.frozen
class Fault:
    """A failure of selected calls."""

    #: One of OPERATIONS, or "*".
    operation: str
    #: An errno with which the call fails. A write then fails after its first half, and
    #: a sync fails after losing the data. The other actions are "lie" (a sync succeeds
    #: without effect), "rot" (one bit of a write is wrong), "misdirect" (a write hits
    #: the following sector) and "crash" (the power fails during the call). FaultFS
    #: supports only an errno and Slow.
    action: int | Slow | Literal["lie", "rot", "misdirect", "crash"] = errno.EIO
    #: A glob pattern for the whole path.
    path: str = "*"
    #: Number of the first matching call that fails, counted from 1.
    at: int = 1
    #: Number of calls that fail, None for no limit.
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

    def action_for(self, operation: str, path: str) -> int | str | Slow | None:
        """Return the action for this call, None if it should succeed."""
        action: int | str | Slow | None = None
        for index, fault in enumerate(self.faults):
            if fault.operation not in ("*", operation) or not fnmatch.fnmatchcase(
                path, fault.path
            ):
                continue
            self._counts[index] += 1
            failure_number = self._counts[index] - fault.at
            if (
                action is None
                and failure_number >= 0
                and (fault.times is None or failure_number < fault.times)
            ):
                self.hits.append((fault, Operation(operation, path)))
                action = fault.action
        return action


class FaultFS(OsFS):
    """The operating system's files, with planned failures of writes and syncs.

    A failing write stores its first half. A failing sync loses no data, unlike one of
    SimulatedDisk.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Plan -> directory of the files to which it applies.
        self._plans: dict[FaultPlan, str] = {}
        self._plans_lock = threading.Lock()
        self.after_fork(self._renew_lock)

    def _renew_lock(self) -> None:
        self._plans_lock = threading.Lock()

    def add_faults(self, plan: FaultPlan, directory: str) -> None:
        """Make calls on the files of a directory fail according to a plan.

        Raises:
            InvalidConfigError: an operation is not one of REAL_OPERATIONS, or an action
                is neither an errno nor Slow.
        """
        for fault in plan.faults:
            if fault.operation not in REAL_OPERATIONS:
                raise InvalidConfigError(
                    "the operation of a disk fault",
                    expected=", ".join(sorted(REAL_OPERATIONS)),
                    found=fault.operation,
                )
            if not isinstance(fault.action, int | Slow):
                raise InvalidConfigError(
                    "the action of a disk fault",
                    expected="an errno, or Slow",
                    found=fault.action,
                )
        with self._plans_lock:
            self._plans[plan] = os.path.join(directory, "")

    def remove_faults(self, plan: FaultPlan) -> None:
        """Remove a plan. A second call has no effect."""
        with self._plans_lock:
            self._plans.pop(plan, None)

    def planned_error(self, operation: str, path: str) -> OSError | None:
        """Return the planned error of a call, None if it should succeed.

        If the call is planned to be slow, this method blocks for the delay.
        """
        if not self._plans:
            return None
        delay_ms = 0
        with self._plans_lock:
            for plan, directory in self._plans.items():
                if os.path.join(path, "").startswith(directory):
                    action = plan.action_for(operation, path)
                    if isinstance(action, int):
                        return OSError(action, os.strerror(action))
                    if isinstance(action, Slow):
                        delay_ms += action.delay_ms
        if delay_ms:
            time.sleep(delay_ms / 1_000)
        return None

    def pwrite(self, handle: int, data: Data, position: int) -> None:
        error = self.planned_error("pwrite", self.path_of(handle))
        if error is not None:
            half = memoryview(data)[: len(data) // 2]
            super().pwrite(handle, half, position)
            _raise(error, self.path_of(handle), StorageWriteError, "write")
        super().pwrite(handle, data, position)

    def truncate(self, handle: int, size: int) -> None:
        error = self.planned_error("truncate", self.path_of(handle))
        if error is not None:
            _raise(error, self.path_of(handle), StorageWriteError, "write")
        super().truncate(handle, size)

    def fdatasync(self, handle: int) -> None:
        self.check_sync("fdatasync", self.path_of(handle))
        super().fdatasync(handle)

    def fsync(self, handle: int) -> None:
        self.check_sync("fsync", self.path_of(handle))
        super().fsync(handle)

    def sync_dir(self, path: str) -> None:
        self.check_sync("sync_dir", path)
        super().sync_dir(path)

    def check_sync(self, operation: str, path: str) -> None:
        """Raise StorageWriteError if a sync is planned to fail."""
        error = self.planned_error(operation, path)
        if error is not None:
            _raise_sync(error, path)
