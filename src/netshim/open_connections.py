"""The open connections of a server, and the limits of their number.

A connection and an open log need file descriptors. With too many connections, no log
could be opened. So the limit of the process is divided between them, and a connection
is refused if it would leave too few descriptors for logs.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Final

from netshim.client_sockets import ClientSocket
from netshim.settings import Settings

#: Minimum number of connections whose time limits are checked in one tick.
_CHECKED_AT_ONCE: Final = 100
#: With more connections, each is checked once in this number of ticks, about a second.
#: A check of 2,000 connections in each tick took 12 % of a core.
_CHECK_ALL_TICKS: Final = 20
#: Maximum number of connections that are not authenticated yet.
_MAX_UNAUTHENTICATED: Final = 256
#: Descriptors that are not available to logs and connections. They are needed for files
#: that are open briefly, sealed segments, the event loop, and connections that are
#: refused.
_RESERVED_FILES: Final = 64
#: Number of logs that may always be open, whatever the number of connections is.
_MIN_LOGS: Final = 8


def _file_limit() -> int:
    """Return the limit of file descriptors, or a large number if unknown."""
    try:
        import resource
    except ImportError:
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class OpenConnections:
    """The connections that a server has admitted. Only its event loop uses them."""

    def __init__(self, files_per_log: int, log: Callable[..., None]) -> None:
        self.clients: set[ClientSocket] = set()
        #: Number of file descriptors of an open log.
        self.files_per_log = files_per_log
        #: Number of connections of each client address.
        self._addresses: Counter[str] = Counter()
        #: Connections that are checked in the next ticks.
        self._to_check: list[ClientSocket] = []
        self._max_files = _file_limit()
        #: Server.log.
        self._log = log

    def add(self, client: ClientSocket) -> None:
        """Count a connection that is not refused."""
        self.clients.add(client)
        self._addresses[client.address] += 1

    def remove(self, client: ClientSocket) -> None:
        """Remove a connection; a repeated call has no effect."""
        if client not in self.clients:
            return
        self.clients.discard(client)
        self._addresses[client.address] -= 1
        if not self._addresses[client.address]:
            del self._addresses[client.address]

    def refusal(self, client: ClientSocket, settings: Settings) -> str | None:
        """Return why a new connection is refused, or None.

        If it is not refused, another connection may have been closed in its favor.
        """
        count = len(self.clients)
        max_clients = self._max_files - _RESERVED_FILES - _MIN_LOGS * self.files_per_log
        if count >= max_clients:
            return f"there are {count} connections, and the limit of open files is {self._max_files}"
        if count >= settings.max_connections:
            return f"there are {count} connections"
        if self._addresses[client.address] >= settings.max_connections_per_address:
            return f"there are {self._addresses[client.address]} connections from there"
        if client.is_unauthenticated and not self._may_begin_login(client.address):
            return f"{_MAX_UNAUTHENTICATED} connections are not authenticated yet"
        return None

    def _may_begin_login(self, address: str) -> bool:
        """Return whether a connection from an address may begin to authenticate.

        If all places are taken, an address that holds fewer than another one gets the
        oldest place of the address that holds the most. Otherwise, one address could
        keep all others from logging in.
        """
        waiting = [client for client in self.clients if client.is_unauthenticated]
        if len(waiting) < _MAX_UNAUTHENTICATED:
            return True
        connections_by_address = Counter(client.address for client in waiting)
        largest, count = connections_by_address.most_common(1)[0]
        if connections_by_address[address] + 1 >= count:
            return False
        oldest = min(
            (client for client in waiting if client.address == largest),
            key=lambda client: client.accepted_s,
        )
        self._log(
            logging.WARNING,
            "login place",
            "connection from %s ended: another address waits, and %d connections "
            "from there are not authenticated yet",
            largest,
            count,
        )
        oldest.abort()
        self.remove(oldest)
        return True

    def next_checked(self) -> list[ClientSocket]:
        """Return the connections whose time limits are checked in this tick."""
        if not self._to_check:
            self._to_check = list(self.clients)
        count = max(_CHECKED_AT_ONCE, len(self.clients) // _CHECK_ALL_TICKS)
        checked = self._to_check[-count:]
        del self._to_check[-count:]
        return checked

    def max_open_logs(self) -> int:
        """Return the number of logs that may be open.

        It depends on the number of connections and reserves descriptors for new
        clients.
        """
        free_files = self._max_files - _RESERVED_FILES - len(self.clients)
        return max(_MIN_LOGS, free_files // self.files_per_log)

    def by_listener(self) -> Counter[str]:
        """Return the number of connections by the name of their listener."""
        return Counter(client.listener.name for client in self.clients)

    def by_client(self) -> Counter[tuple[str, str, str]]:
        """Return the number of connections by client library, address and user."""
        return Counter(
            (session.client_software, session.client_address, session.principal)
            for client in self.clients
            if (session := client.session) is not None
        )
