"""Locks on bytes of the lock file of a log directory that several processes write.

    byte 0       each process that has the directory open, for reading (fs.PRESENCE_BYTE)
    byte 1       who changes what belongs to no single partition: topics, checkpoints, producer ids
    byte 2       who decides about transactions
    byte 3       who does what is due by time, for as long as it lives
    from 16 on   four for each partition, by its name: its turn, who notes what is on disk, who compacts it, and a spare

Rules:
- The lock file is Kafka's, which Kafka and a process that is alone lock as a whole.
- Locks belong to an opening of the file, of which a process has one. The kernel frees
  them when the process dies.
- Who holds the turn of a partition may take that of the directory, and not the other
  way round. Who decides about transactions may take both.

This module decides nothing.
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
UPKEEP_BYTE: Final = 3
PARTITIONS_FROM: Final = 16
#: A turn takes microseconds, or a sync; longer where its holder was stopped.
TURN_SECONDS: Final = 30


class ByteLock:
    """A lock between processes and threads: a byte of a file that this process has open
    once. Reentrant.
    """

    def __init__(self, fs: SharedFS, handle: int, byte: int, path: str) -> None:
        """path: what is locked, for messages."""
        self._fs = fs
        self._handle = handle
        self._byte = byte
        self._path = path
        self._mutex = threading.RLock()
        self._depth = 0  # under the mutex

    @contextlib.contextmanager
    def held(self) -> Generator[None, None, None]:
        """Raises LogLockedError when another process keeps it too long."""
        with self._mutex:
            if not self._depth and not self._fs.lock_byte(
                self._handle, self._byte, timeout_ms=1000 * TURN_SECONDS
            ):
                raise LogLockedError(
                    "another process keeps this locked", path=self._path
                )
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._fs.unlock_byte(self._handle, self._byte)


class Presence:
    """The byte by which each process shows that it has the directory open, and whether
    no other does.
    """

    def __init__(self, fs: SharedFS, handle: int) -> None:
        """handle: of the lock file, of which this process has locked the byte for
        reading.
        """
        self._fs = fs
        self._handle = handle
        self._mutex = threading.RLock()
        self._depth = 0  # of blocks in which this process is alone; under the mutex

    @contextlib.contextmanager
    def alone(self) -> Generator[bool, None, None]:
        """Whether no other process has the directory open; then none can open it before
        the end of the block.
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
