"""Takes the lock of a log directory, and shares it among the members of this process.

Rules:
- The marker of a clean shutdown (.kafka_cleanshutdown) is removed, durably, before the first write, so that Kafka
  checks what a crash of ours would leave.
- Staged writes that were under way when the last writer ended are rolled forward first.

claim.py says what a member may do then. This module opens no log.
"""

from __future__ import annotations

import os
from typing import cast

from logcore import checkpoint
from logcore.bytelocks import DIRECTORY_BYTE, TRANSACTIONS_BYTE, ByteLock, Presence
from logcore.checkpoint import OffsetCheckpoints
from logcore.claim import Claim, Common
from logcore.fs import FS, SharedFS
from logcore.trustedclock import TrustedClock


def claim_directory(fs: FS, directory: str, member: str, *, shared: bool = False) -> Claim:
    """Takes the lock on a log directory, or a share of it when this process holds it already.

    The first member removes the marker of a clean shutdown, so that Kafka checks what a crash of ours would leave.
    shared: with other processes that say the same; staged writes are rolled forward by one that is alone. Raises
    LogLockedError, and what keeps staged writes from being rolled forward into the member.
    """
    from logcore.staging import applying  # late: who only reads does not need it

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
                checkpoint.keep_reserve(fs, directory)
            if common.is_unfinished and common.presence is not None:
                with common.presence.alone() as is_alone:
                    if is_alone:
                        common.blocked = applying.roll_forward(fs, directory)
                common.is_unfinished = False
            elif common.is_unfinished:  # also of this process, when it failed in the middle
                common.blocked = applying.roll_forward(fs, directory)
                common.is_unfinished = bool(common.blocked)
            blocked = common.blocked.get(member)
            if blocked is not None:  # offsets are given out in it for records that cannot be put in place
                raise blocked
        return Claim(fs, directory, lock, common)
    except BaseException:
        lock.release()
        raise


def _common(fs: FS, directory: str) -> Common:
    clock = TrustedClock(fs, directory)
    return Common(_take_marker(fs, directory), OffsetCheckpoints(fs, directory), clock)


def _common_of_many(fs: FS, directory: str, handle: int) -> Common:
    """What the members of one process know of a directory that others write to: nothing but what they read each
    time.
    """
    turn = ByteLock(cast(SharedFS, fs), handle, DIRECTORY_BYTE, directory)
    with turn.held():
        _take_marker(fs, directory)
    return Common(
        was_clean=False,
        checkpoints=OffsetCheckpoints(fs, directory, changing=turn.held),
        clock=TrustedClock(fs, directory),
        turn=turn,
        transactions=ByteLock(cast(SharedFS, fs), handle, TRANSACTIONS_BYTE, directory),
        presence=Presence(cast(SharedFS, fs), handle),
    )


def _take_marker(fs: FS, directory: str) -> bool:
    """Removes the marker of a clean shutdown; returns whether nothing in the directory needs checking."""
    marker = os.path.join(directory, checkpoint.CLEAN_SHUTDOWN)
    if fs.exists(marker):
        fs.unlink(marker)
        fs.sync_dir(directory)
        return True
    return not any(fs.is_directory(os.path.join(directory, name)) for name in fs.listdir(directory))
