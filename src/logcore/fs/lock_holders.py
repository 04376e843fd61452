"""Finds the processes that hold the lock of a log directory, for messages and
`logcore info`.

The kernel reports no process for an open-file-description lock. On Linux,
/proc/PID/fdinfo lists the locks of each open file. Only root can read the files of other
users' processes. On other systems no holder is found.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import attrs

#: The lock of a writer that does not share the directory; see _lock_file() of fs.
_ALL_BYTES: Final = ("WRITE", "0", "EOF")
#: Maximum number of characters of a command line in a message.
_MAX_COMMAND_LENGTH: Final = 60


@attrs.frozen
class LockHolder:
    """A process that holds the lock of a log directory."""

    pid: int
    #: The command line of the process, or "" if it is unknown.
    command: str
    #: Whether the process shares the directory with other writers.
    is_shared: bool

    def __str__(self) -> str:
        if not self.command:
            return f"process {self.pid}"
        command = self.command
        if len(command) > _MAX_COMMAND_LENGTH:
            command = f"{command[:_MAX_COMMAND_LENGTH]}..."
        return f"process {self.pid} ({command})"


def lock_holders(directory: str) -> tuple[LockHolder, ...]:
    """Return the processes that hold the lock of a directory, by process id.

    A forked child that inherited the open lock file is a holder too. Returns an empty
    tuple if there is no holder, no lock file, or no /proc.
    """
    try:
        lock = os.stat(os.path.join(directory, ".lock"))
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return ()
    found = []
    for pid in pids:
        kinds = list(_locks(pid, lock))
        if kinds:
            found.append(LockHolder(pid, _command(pid), _ALL_BYTES not in kinds))
    return tuple(found)


def _locks(pid: int, lock: os.stat_result) -> Iterator[tuple[str, str, str]]:
    """Yield the kind and the range of each lock that a process holds on a file.

    Files that were closed during the call, and processes of other users, are left out.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                file = os.stat(f"/proc/{pid}/fd/{name}")
                if (file.st_dev, file.st_ino) != (lock.st_dev, lock.st_ino):
                    continue
                with open(f"/proc/{pid}/fdinfo/{name}", encoding="ascii") as facts:
                    for line in facts:
                        # lock: 1: OFDLCK ADVISORY READ -1 fe:00:12345 0 0
                        words = line.split()
                        if words[0] == "lock:":
                            yield words[4], words[-2], words[-1]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).decode(errors="replace").split("\0")
        return " ".join(words).strip()
    return ""
