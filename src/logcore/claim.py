"""Who writes to a log directory: its lock, and the marker that says that the last writer closed it cleanly.

Rules:
- One process at a time writes to a directory; it holds Kafka's lock. Members (logs by the names of their directories,
  a LogDir) of one process share it, and what is known of the directory.
- The marker of a clean shutdown (.kafka_cleanshutdown) is removed, durably, before the first write, so that Kafka
  checks what a crash of ours would leave. The last member that leaves puts it back, if all of them closed well.
- Staged writes that were under way when the last writer ended are rolled forward first.

This module opens no log.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping

import attrs

from logcore import checkpoint
from logcore.checkpoint import Key, OffsetCheckpoints
from logcore.errors import DiskFullError, LogcoreError, ResourceError, StorageWriteError
from logcore.fs import FS, Lock
from logcore.staging import applying


@attrs.define(eq=False)
class _Common:
    """What all members know of their directory. Lives as long as this process holds its lock.

    Written under the mutex of the lock; has_failed and is_unfinished also without, but then only ever set to True.
    """

    was_clean: bool  # nothing that was in it when the lock was taken needs checking
    checkpoints: OffsetCheckpoints
    has_failed: bool = False  # a member did not close well
    is_unfinished: bool = True  # there may be staged writes to roll forward
    blocked: Mapping[str, LogcoreError] = attrs.Factory(dict)  # by member: why that was not possible
    closing: dict[Key, int | None] | None = None  # recovery points of members that close, while a LogDir gathers them


class Claim:
    """The right of one member to write to its directory, from claim_directory() until release()."""

    def __init__(self, fs: FS, directory: str, lock: Lock, common: _Common) -> None:
        self.directory = directory
        self.checkpoints = common.checkpoints
        self._mutex = lock.shared.mutex
        self._fs = fs
        self._lock = lock
        self._common = common

    @property
    def is_clean(self) -> bool:
        """Whether nothing in the directory needs checking, and no member has failed since."""
        return self._common.was_clean and not self._common.has_failed

    def call_clean(self) -> None:
        """Every log in the directory was checked."""
        with self._mutex:
            self._common.was_clean = True

    def fail(self) -> None:
        """A member may not be left as clean: no marker is written when the last one leaves."""
        self._common.has_failed = True

    def expect_unfinished(self) -> None:
        """Staged writes failed half way: whoever claims the directory next rolls them forward."""
        self._common.is_unfinished = True

    @contextlib.contextmanager
    def gathering(self) -> Generator[dict[Key, int | None], None, None]:
        """Members that close meanwhile leave their recovery points in the mapping, to be written once for all."""
        gathered: dict[Key, int | None] = {}
        with self._mutex:
            self._common.closing = gathered
        try:
            yield gathered
        finally:
            with self._mutex:
                self._common.closing = None

    def hand_over(self, key: Key, recovery_point: int) -> bool:
        """Leaves a recovery point to the member that gathers them; False when none does."""
        with self._mutex:
            closing = self._common.closing
            if closing is None:
                return False
            closing[key] = recovery_point
            return True

    def leave(self) -> None:
        """Puts the marker of a clean shutdown back, if this is the last member and all of them closed well."""
        with self._mutex:
            if self._lock.is_last and self.is_clean:
                # Without room for it the next opening checks more; all records are on disk all the same.
                with contextlib.suppress(DiskFullError, ResourceError):
                    content = b'{"version":0,"brokerEpoch":-1}'
                    checkpoint.write(self._fs, self.directory, checkpoint.CLEAN_SHUTDOWN, content)

    def release(self) -> None:
        """Gives the member up; the last one gives up the lock. Needs no memory."""
        self._lock.release()


def claim_directory(fs: FS, directory: str, member: str) -> Claim:
    """Takes the lock on a log directory, or a share of it when this process holds it already.

    The first member removes the marker of a clean shutdown, so that Kafka checks what a crash of ours would leave.
    Raises LogLockedError, and what keeps staged writes from being rolled forward into the member.
    """
    lock = fs.lock(directory, member)
    try:
        with lock.shared.mutex:
            common: _Common | None = lock.shared.state
            if common is None:
                common = _Common(_take_marker(fs, directory), OffsetCheckpoints(fs, directory))
                lock.shared.state = common
                checkpoint.keep_reserve(fs, directory)
            if common.is_unfinished:  # also of this process, when it failed in the middle
                common.blocked = applying.roll_forward(fs, directory)
                common.is_unfinished = bool(common.blocked)
            blocked = common.blocked.get(member)
            if blocked is not None:  # offsets are given out in it for records that cannot be put in place
                raise blocked
    except BaseException:
        lock.release()
        raise
    return Claim(fs, directory, lock, common)


def _take_marker(fs: FS, directory: str) -> bool:
    """Removes the marker of a clean shutdown; returns whether nothing in the directory needs checking."""
    marker = os.path.join(directory, checkpoint.CLEAN_SHUTDOWN)
    if fs.exists(marker):
        fs.unlink(marker)
        fs.sync_dir(directory)
        return True
    return not any(fs.is_directory(os.path.join(directory, name)) for name in fs.listdir(directory))


def make_directories(fs: FS, path: str) -> None:
    """mkdir -p, each new name made durable in its parent."""
    parent = os.path.dirname(path)
    if parent not in ("", path) and not fs.is_directory(parent):
        make_directories(fs, parent)
    try:
        fs.mkdir(path)
    except FileExistsError:
        if not fs.is_directory(path):
            raise StorageWriteError("the directory cannot be made: there is a file of that name", path=path) from None
    except FileNotFoundError as error:
        raise StorageWriteError("the directory cannot be made: not here", path=path) from error
    except StorageWriteError as error:
        error.reason = f"the directory cannot be made: {error.reason}"
        raise
    fs.sync_dir(parent)
