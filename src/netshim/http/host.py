"""An HTTP server in a thread of its own, beside the event loop of a broker.

The thread has a loop of its own, so that no page holds the broker's loop. Pages get facts
about the broker with BrokerCalls.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

import uvicorn
from starlette.types import ASGIApp

_T = TypeVar("_T")

#: How long a page waits for the broker's loop.
_ANSWER_S: Final = 10.0
#: How long open responses may take at the end.
_END_S: Final = 2


class BrokerCalls:
    """Runs functions in the event loop of a broker, for pages."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def call(self, function: Callable[[], _T]) -> _T:
        """Return the result of a function that runs in the broker's loop.

        Raises:
            TimeoutError: the loop does not turn.
            RuntimeError: the loop has ended.
        """
        return await self.receive(lambda done: done(function()))

    async def receive(self, function: Callable[[Callable[[_T], None]], object]) -> _T:
        """Return the value that a function in the broker's loop passes to its callback.

        Raises what call() raises.
        """
        result: Future[_T] = Future()

        def run() -> None:
            try:
                function(result.set_result)
            except BaseException as error:  # raised in the page
                result.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.wrap_future(result)


class HttpHost:
    """Serves an ASGI application until close()."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Listen on an address; port 0 is a free port.

        Raises:
            OSError: the address is not available.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_END_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._run, name="netshim-http", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        # A client that disconnects in the last moment must not print a traceback.
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._server.serve(sockets=[self._socket]))

    @property
    def address(self) -> str:
        """The base of all addresses: "http://127.0.0.1:9644"."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return (
            f"http://[{host}]:{self.port}"
            if ":" in host
            else f"http://{host}:{self.port}"
        )

    def close(self) -> None:
        """End the thread. Blocks for at most some seconds."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of "PORT" or "HOST:PORT".

    Raises:
        ValueError: the text is no address.
    """
    host, separator, port = text.rpartition(":")
    if not separator:
        host = "127.0.0.1"
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"expected PORT or HOST:PORT, found {text!r}")
    return host.strip("[]"), int(port)
