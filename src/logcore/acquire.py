"""Acquires the lock of a log directory, and shares it among members of this process.

Rules:
- The marker of a clean shutdown (.kafka_cleanshutdown) is deleted, durably, before the
  first write. Kafka then checks the directory if this process crashes.
- Staged writes that the last writer did not complete are rolled forward first.

claim.py defines the operations of a member. This module opens no log.
"""

from __future__ import annotations

import os
from typing import cast

from logcore.claim import Claim, Common
from logcore.fs import FS, SharedFS
from logcore.fs.byte_lock import DIRECTORY_BYTE, TRANSACTIONS_BYTE, ByteLock, Presence
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import OffsetCheckpoints
from logcore.metadata.trusted_clock import TrustedClock


def claim_directory(
    fs: FS, directory: str, member: str, *, shared: bool = False
) -> Claim:
    """Acquire the lock of a log directory, or a share of it if this process holds it.

    The first member deletes the marker of a clean shutdown, so that Kafka checks the
    directory after a crash. With shared=True, other processes may hold the directory
    too, if they also use shared=True. Staged writes are then rolled forward by a
    process that is alone.

    Raises:
        LogLockedError: another process holds the directory.
        LogcoreError: a staged write cannot be rolled forward into the member.
    """
    # Imported late, because readers do not need it.
    from logcore.staging import applying

    lock = fs.lock(directory, member, shared=shared)
    try:
        with lock.shared.mutex:
            common: Common | None = lock.shared.state
            if common is None:
                if shared:
                    common = _common_of_many(fs, directory, lock.handle)
                else:
                    common = _common(fs, directory)
                lock.shared.state = common
                checkpoint.create_reserve(fs, directory)
            if common.is_unfinished and common.presence is not None:
                with common.presence.alone() as is_alone:
                    if is_alone:
                        common.blocked = applying.roll_forward(fs, directory)
                common.is_unfinished = False
            elif common.is_unfinished:  # or this process failed half way
                common.blocked = applying.roll_forward(fs, directory)
                common.is_unfinished = bool(common.blocked)
            blocked = common.blocked.get(member)
            # Offsets are assigned in it for records that cannot be put in place.
            if blocked is not None:
                raise blocked
        return Claim(fs, directory, lock, common)
    except BaseException:
        lock.release()
        raise


def _common(fs: FS, directory: str) -> Common:
    clock = TrustedClock(fs, directory)
    return Common(
        _delete_marker(fs, directory), OffsetCheckpoints(fs, directory), clock
    )


def _common_of_many(fs: FS, directory: str, handle: int) -> Common:
    """Return the state of a directory that several processes write to.

    No facts about the directory are cached; they are read each time.
    """
    directory_lock = ByteLock(cast(SharedFS, fs), handle, DIRECTORY_BYTE, directory)
    with directory_lock.held():
        _delete_marker(fs, directory)
    return Common(
        was_clean=False,
        checkpoints=OffsetCheckpoints(fs, directory, changing=directory_lock.held),
        clock=TrustedClock(fs, directory),
        directory_lock=directory_lock,
        transactions=ByteLock(cast(SharedFS, fs), handle, TRANSACTIONS_BYTE, directory),
        presence=Presence(cast(SharedFS, fs), handle),
    )


def _delete_marker(fs: FS, directory: str) -> bool:
    """Delete the marker of a clean shutdown.

    Returns whether no file in the directory needs a check.
    """
    marker = os.path.join(directory, checkpoint.CLEAN_SHUTDOWN)
    if fs.exists(marker):
        fs.unlink(marker)
        fs.sync_dir(directory)
        return True
    return not any(
        fs.is_directory(os.path.join(directory, name)) for name in fs.listdir(directory)
    )
