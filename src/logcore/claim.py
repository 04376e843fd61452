"""Who writes to a log directory: its lock, and the marker that says that the last writer left in good order.

Rules:
- One process at a time writes to a directory; it holds Kafka's lock. Members (logs by the names of their directories,
  a LogDir) of one process share it, and what they have to tell each other: lock.shared.
- The marker of a clean shutdown (.kafka_cleanshutdown) goes, durably, before the first write, so that Kafka checks what
  a crash of ours would leave. It comes back when the last member leaves and all of them closed well.
- Staged writes that were on their way when the last writer ended are rolled forward first.

lock.shared: "was_clean", whether all that was there when the lock was taken needs no check; "failed", a member did not
close well; "unfinished", there may be staged writes to roll forward, and "blocked", the error of each member in which
that was not possible; "closing", where members that close leave their recovery points for a LogDir that writes them.
This module opens no log.
"""

from __future__ import annotations

import contextlib
import os

from logcore import checkpoint, staging
from logcore.errors import DiskFullError, LogcoreError, ResourceError, StorageWriteError
from logcore.fs import FS, Lock


def claim_directory(fs: FS, parent: str, member: str) -> Lock:
    """The lock on a log directory, or a share of it when this process holds it already.

    Whoever takes it first looks at the marker of a clean shutdown and removes it, so that Kafka checks what a crash of
    ours would leave.
    """
    lock = fs.lock(parent, member)
    try:
        with lock.mutex:
            if "was_clean" not in lock.shared:
                marker = os.path.join(parent, checkpoint.CLEAN_SHUTDOWN)
                if fs.exists(marker):
                    fs.unlink(marker)
                    fs.sync_dir(parent)
                    lock.shared["was_clean"] = True
                else:  # a new directory has nothing to check
                    names = fs.listdir(parent)
                    lock.shared["was_clean"] = not any(fs.is_directory(os.path.join(parent, name)) for name in names)
                lock.shared["unfinished"] = True
                checkpoint.keep_reserve(fs, parent)
            if lock.shared.get("unfinished"):  # also of this process, when it failed in the middle
                lock.shared["blocked"] = staging.roll_forward(fs, parent)
                lock.shared["unfinished"] = bool(lock.shared["blocked"])
            blocked: LogcoreError | None = lock.shared["blocked"].get(member)
            if blocked is not None:  # offsets are given out in it for records that cannot be put in place
                raise blocked
    except BaseException:
        lock.release()
        raise
    return lock


def leave_directory(fs: FS, parent: str, lock: Lock) -> None:
    """Puts the marker of a clean shutdown back, when this is the last to leave and all that was opened closed well."""
    with lock.mutex:
        if lock.is_last and lock.shared.get("was_clean") and not lock.shared.get("failed"):
            # Without room for it the next opening checks more; all records are on disk all the same.
            with contextlib.suppress(DiskFullError, ResourceError):
                checkpoint.write(fs, parent, checkpoint.CLEAN_SHUTDOWN, b'{"version":0,"brokerEpoch":-1}')


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
