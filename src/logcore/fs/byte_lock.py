"""Locks on bytes of the lock file of a log directory that several processes write.

    byte 0       a shared lock of each process that shares the directory (fs.PRESENCE_BYTE)
    byte 1       changes of topics, checkpoints and producer ids, which belong to no partition
    byte 2       the coordinator of transactions
    byte 3       the process that runs maintenance, until it ends
    byte 4       locked only by a process that uses the directory alone (fs.PRIVATE_BYTE)
    from 16 on   four bytes for each partition, at a hash of its name: write lock, durable end, compaction, unused

Rules:
- Kafka uses the same lock file, and locks all of its bytes. A process that uses the
  directory alone locks all bytes too.
- A lock belongs to an open file description, and each process opens the file once. The
  kernel releases the locks when the process dies.
- The holder of the write lock of a partition may acquire the lock of the directory, but
  not the reverse. The coordinator of transactions may acquire both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Final

from logcore.errors import LogLockedError
from logcore.fs import PRESENCE_BYTE, SharedFS

DIRECTORY_BYTE: Final = 1
TRANSACTIONS_BYTE: Final = 2
MAINTENANCE_BYTE: Final = 3
FIRST_PARTITION_BYTE: Final = 16
#: A write lock is held for microseconds or for a sync, and longer if its holder was
#: stopped.
LOCK_WAIT_SECONDS: Final = 30


class ByteLock:
    """A reentrant lock between processes and threads, on a byte of an open file."""

    def __init__(self, fs: SharedFS, handle: int, byte: int, path: str) -> None:
        """Create a lock. `path` names the locked object in messages."""
        self._fs = fs
        self._handle = handle
        self._byte = byte
        self._path = path
        self._mutex = threading.RLock()
        self._depth = 0  # under the mutex

    @contextlib.contextmanager
    def held(self) -> Generator[None, None, None]:
        """Hold the lock in a `with` block.

        Raises:
            LogLockedError: another process holds the lock for LOCK_WAIT_SECONDS.
        """
        with self._mutex:
            if not self._depth and not self._fs.lock_byte(
                self._handle, self._byte, timeout_ms=1000 * LOCK_WAIT_SECONDS
            ):
                raise LogLockedError(
                    f"another process has held this lock for {LOCK_WAIT_SECONDS} seconds; "
                    "if it is stopped, resume it or end it",
                    path=self._path,
                )
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._fs.unlock_byte(self._handle, self._byte)


class Presence:
    """The lock by which other processes detect that this process has the directory open."""

    def __init__(self, fs: SharedFS, handle: int) -> None:
        """Create the presence of this process.

        The process already holds a shared lock on PRESENCE_BYTE of the lock file `handle`.
        """
        self._fs = fs
        self._handle = handle
        self._mutex = threading.RLock()
        self._depth = 0  # of blocks in which this process is alone; under the mutex

    @contextlib.contextmanager
    def alone(self) -> Generator[bool, None, None]:
        """Yield whether no other process has the directory open.

        If so, no other process can open the directory before the end of the block.
        """
        with self._mutex:
            is_alone = self._depth > 0 or self._fs.lock_byte(
                self._handle, PRESENCE_BYTE
            )
            self._depth += is_alone
            try:
                yield is_alone
            finally:
                self._depth -= is_alone
                if is_alone and not self._depth:
                    self._fs.lock_byte(self._handle, PRESENCE_BYTE, shared=True)
