"""Runs a program at a terminal: stdin, stdout and stderr are a pseudo-terminal with a
given width.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import logcore

SOURCE = str(Path(logcore.__file__).resolve().parents[1])


def at_terminal(
    *arguments: object, columns: int = 80, typed: str = "", module: str = "logcore"
) -> tuple[int, str]:
    """Run `python -m module`, and return the exit code and the output on the terminal. The
    text `typed` is sent before the program reads.
    """
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, "PYTHONPATH": SOURCE, "TERM": "xterm"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        command = [sys.executable, "-m", module, *map(str, arguments)]
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
    finally:
        os.close(theirs)
    output = b""
    try:
        os.write(ours, typed.encode())
        while piece := _read(ours):
            output += piece
    finally:
        os.close(ours)
    return process.wait(60), output.decode().replace("\r\n", "\n")


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # EIO: no process holds the other end any more
        return b""
