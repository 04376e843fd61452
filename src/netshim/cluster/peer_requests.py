"""Requests to other brokers: a connection, and queues that send many entries at once.

Rules:
- A queue has one thread and one outstanding request. Entries that arrive while it runs
  are sent together in the next request.
- If a request fails, each of its entries gets the error. The broker may have executed the
  request, so callers only send entries that they can repeat.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from logcore import LogcoreError
from logcore.errors import RemoteUnavailableError
from netshim.cluster.broker_connections import Connect
from netshim.follow.connection import SourceConnection
from netshim.scheduling import guarded
from netshim.wire.codec import Api

_log = logging.getLogger("netshim")

_Entry = TypeVar("_Entry")
_Result = TypeVar("_Result")
#: Maximum number of entries of one request.
_MAX_ENTRIES: Final = 1_000


class PeerConnection:
    """A connection to another broker, which is opened when it is needed.

    One thread uses it. interrupt() is for other threads.
    """

    def __init__(self, broker: int, connect: Connect) -> None:
        self._broker = broker
        self._connect = connect
        self._mutex = threading.Lock()
        self._connection: SourceConnection | None = None

    def request(
        self, api: Api[Any, Any], request: Any, *, max_version: int = 99
    ) -> Any:
        """Send a request and return its response; see SourceConnection.request().

        Raises:
            RemoteUnavailableError: the broker is not registered or does not answer.
            ShippingError: the broker does not serve the API.
        """
        connection = self._connection
        if connection is None:
            connection = self._connect(self._broker)
            # interrupt() runs in another thread.
            with self._mutex:
                self._connection = connection
        return connection.request(api, request, max_version=max_version)

    def interrupt(self) -> None:
        """Make a request that waits in another thread fail."""
        with self._mutex:
            connection = self._connection
        if connection is not None:
            connection.interrupt()

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        with self._mutex:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class PeerQueue(Generic[_Entry, _Result]):
    """Entries of one kind for one broker.

    The broker's thread calls add().
    """

    def __init__(
        self,
        broker: int,
        api: Api[Any, Any],
        pack: Callable[[Sequence[_Entry]], Any],
        unpack: Callable[[Any], Sequence[_Result]],
        connect: Connect,
        call_in_loop: Callable[[Callable[[], None]], object],
    ) -> None:
        self._broker = broker
        self._api = api
        #: Returns a request with these entries.
        self._pack = pack
        #: Returns a result for each entry of a request.
        self._unpack = unpack
        #: Runs a function in the broker's thread.
        self._call_in_loop = call_in_loop
        self._connection = PeerConnection(broker, connect)
        self._changed = threading.Condition()
        #: Entries that are not sent yet, with their callbacks.
        self._waiting: list[
            tuple[_Entry, Callable[[_Result | LogcoreError], None]]
        ] = []
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, name=f"netshim-{api.name}-{broker}", daemon=True
        )
        self._thread.start()

    def add(
        self, entry: _Entry, callback: Callable[[_Result | LogcoreError], None]
    ) -> None:
        """Send an entry soon, and call callback() with its result or the error."""
        with self._changed:
            self._waiting.append((entry, callback))
            self._changed.notify()

    def interrupt(self) -> None:
        """Make the outstanding request fail, because the broker is not registered."""
        self._connection.interrupt()

    def close(self) -> None:
        """End the thread. Entries that wait get no result."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._connection.interrupt()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if self._is_closing:
                    break
                # Entries that were added during a request share the next one.
                entries = self._waiting[:_MAX_ENTRIES]
                del self._waiting[: len(entries)]
            self._send(entries)
        self._connection.close()

    def _send(
        self, entries: list[tuple[_Entry, Callable[[_Result | LogcoreError], None]]]
    ) -> None:
        results: Sequence[_Result | LogcoreError]
        try:
            request = self._pack([entry for entry, _ in entries])
            results = self._unpack(self._connection.request(self._api, request))
            # A result does not name its entry. The results have the order of the
            # entries.
            if len(results) != len(entries):
                raise RemoteUnavailableError(
                    f"broker {self._broker}: {self._api.name} has {len(results)} results",
                    expected=f"{len(entries)}, one for each entry",
                    found=len(results),
                )
        except Exception as error:
            # The response may arrive later, after the next request was sent.
            self._connection.close()
            if not isinstance(error, LogcoreError):
                _log.exception("an internal error in requests to %d", self._broker)
                error = RemoteUnavailableError(f"broker {self._broker}: {error!r}")
            results = [error] * len(entries)

        def deliver() -> None:
            for (_, callback), result in zip(entries, results, strict=True):
                guarded(callback, result)

        self._call_in_loop(deliver)
