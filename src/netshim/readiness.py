"""Reports that a broker is ready or stops, to its parent process and to systemd.

| receiver | given by | ready | stops |
|---|---|---|---|
| a parent process | `--ready-fd N` | the line `ready`, then the end of the file | |
| systemd | `NOTIFY_SOCKET` | `READY=1` | `STOPPING=1` |

With `WATCHDOG_USEC`, systemd also gets `WATCHDOG=1` from the event loop, twice in that
time. An event loop that hangs sends none, and systemd restarts the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping

from logcore.errors import InvalidConfigError


class Readiness:
    """Receivers of reports about the broker. Used by the event loop's thread."""

    def __init__(
        self, ready_fd: int | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Read the receivers from an option and the environment.

        Raises:
            InvalidConfigError: the descriptor cannot be written, or WATCHDOG_USEC is no
                number.
        """
        self._fd = ready_fd
        if ready_fd is not None:
            try:
                # An empty write checks the descriptor, and sends nothing to the parent.
                os.write(ready_fd, b"")
            except OSError as error:
                raise InvalidConfigError(
                    "--ready-fd",
                    expected="a descriptor that is open for writing",
                    found=f"{ready_fd}: {error.strerror}",
                ) from error
        address = environment.get("NOTIFY_SOCKET", "")
        # An address that starts with @ is in Linux's abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        text = environment.get("WATCHDOG_USEC", "0")
        if not text.isdecimal():
            raise InvalidConfigError(
                "WATCHDOG_USEC", expected="a number", found=repr(text)
            )
        # systemd may watch the process that started this one.
        is_watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(
            os.getpid()
        )
        #: Interval of the messages to the watchdog, 0 without one.
        self._ping_s = int(text) / 2e6 if is_watched else 0.0
        #: The next message to the watchdog. None before ready() and after stopping().
        self._pinging: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """Report that all listeners accept connections."""
        if self._fd is not None:
            # The parent may have ended, or may have closed its end.
            with contextlib.suppress(OSError):
                os.write(self._fd, b"ready\n")
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None
        self._notify("READY=1")
        if self._address and self._ping_s:
            self._ping()

    def stopping(self) -> None:
        """Report that the broker accepts no more requests."""
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None
        self._notify("STOPPING=1")

    def _ping(self) -> None:
        self._notify("WATCHDOG=1")
        loop = asyncio.get_running_loop()
        self._pinging = loop.call_later(self._ping_s, self._ping)

    def _notify(self, text: str) -> None:
        if not self._address:
            return
        # If systemd's socket is missing, the broker continues to work.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
        ):
            # A full socket of systemd must not hold the event loop.
            sock.setblocking(False)
            sock.sendto(text.encode(), self._address)
