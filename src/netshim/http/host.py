"""HTTP server of a broker: one thread with an event loop of its own.

Rules:
- Pages never occupy the broker's event loop. They call functions in it, each for a
  short time.
- A port is bound before the thread starts, so that its owner gets the error.
- The thread is a daemon, and ends with the interpreter.

This module has no pages; pages.py and control.py have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from logcore.errors import InvalidConfigError

if TYPE_CHECKING:
    from netshim.listeners import TlsSettings

_log = logging.getLogger("netshim")
_T = TypeVar("_T")
#: Hosts of this machine.
LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "::1"))
#: How long a page waits for the broker's loop.
_CALL_TIMEOUT_S: Final = 10.0
#: Maximum number of connections of one port. Further connections get status 503.
_MAX_CONNECTIONS: Final = 100
#: Iterations of the event loop until the remaining connections are closed.
_CLOSING_ITERATIONS: Final = 10
#: How long stop() waits for pages that are being answered.
_STOP_TIMEOUT_S: Final = 1


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Return the host and port of [HOST:]PORT; the host is loopback by default.

    Raises:
        InvalidConfigError: the text is not an address.
    """
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise InvalidConfigError(
            option, expected="[HOST:]PORT, a port from 0 to 65535", found=repr(text)
        )
    # IPv6 addresses are in brackets, as in URLs.
    return host.strip("[]") or "127.0.0.1", int(port)


@contextlib.contextmanager
def bind(option: str, text: str) -> Generator[tuple[str, int], None, None]:
    """Yield the address in the text of an option. Errors contain the option's name.

    Raises:
        InvalidConfigError: the text is not an address, or the address is not available.
    """
    address = parse_address(text, option)
    try:
        yield address
    except OSError as error:
        raise InvalidConfigError(
            f"{option} cannot listen on {address[0]}:{address[1]}",
            expected="a free address; port 0 selects a free port",
            found=error.strerror,
        ) from error


def names_this_host(request: Request) -> bool:
    """Return whether a request names the host at which it arrived.

    After DNS rebinding, a web page sends requests to this address under its own name.
    Over TLS, the certificate prevents that.
    """
    served = (request.scope.get("server") or ("",))[0]
    return request.url.scheme == "https" or request.url.hostname in (
        *LOOPBACK,
        served,
    )


def application(routes: list[Route]) -> Starlette:
    """Return an application with some routes, whose errors are JSON."""

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body: dict[str, object] = {"error": error.detail}
        if error.status_code == 404:
            body["known"] = sorted({route.path for route in routes})
        return JSONResponse(body, error.status_code)

    return Starlette(routes=routes, exception_handlers={HTTPException: refuse})


def refusal_reason(request: Request, *, checks_hosts: bool = True) -> str | None:
    """Return why a request may come from a web page, or None.

    With `checks_hosts`, other hosts than this machine are refused, because the name of a
    web page may be bound to its address.
    """
    if checks_hosts and not names_this_host(request):
        return f"unknown host {request.url.hostname!r}"
    if "origin" in request.headers:
        return "requests of web pages are refused"
    return None


class HttpHost:
    """The ports of one broker. start() serves all of them; stop() ends them."""

    def __init__(self) -> None:
        #: The server and the socket of each port.
        self._servers: list[tuple[uvicorn.Server, socket.socket]] = []
        #: Runs the event loop of all servers.
        #: None until start(), and if there are no ports.
        self._thread: threading.Thread | None = None
        #: The functions of repeat(), with their intervals.
        self._repeated: list[tuple[float, Callable[[], None]]] = []

    def repeat(self, interval_s: float, function: Callable[[], None]) -> None:
        """Call a function in a thread again and again while the ports are served.

        A call that takes long delays the next, so that the function occupies at most a
        tenth of the time.
        """
        self._repeated.append((interval_s, function))

    def add(
        self, address: tuple[str, int], app: Any, tls: TlsSettings | None = None
    ) -> str:
        """Bind an address for an ASGI application, and return its URL.

        Raises:
            OSError: the address is not available.
        """
        host, port = address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family)
        # Connections inherit TCP_NODELAY. Without it, the body of a page on a reused
        # connection waits up to 40 ms for the acknowledgment of its header. asyncio
        # sets it only for sockets whose protocol number is TCP.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="warning",
            server_header=False,
            # A web page whose name is bound to this address could set these headers,
            # and would pass the check of its host. A client could choose its address.
            proxy_headers=False,
            ws="none",
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
        )
        self._servers.append((uvicorn.Server(config), sock))
        url_host = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        return f"{scheme}://{url_host}:{sock.getsockname()[1]}"

    def start(self) -> None:
        """Serve the ports in a thread."""
        if self._servers:
            self._thread = threading.Thread(
                target=self._run, name="netshim-http", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(_repeat(*repeated)) for repeated in self._repeated]
        await asyncio.gather(
            *(server.serve(sockets=[sock]) for server, sock in self._servers)
        )
        for task in tasks:
            task.cancel()
        # uvicorn leaves connections that it has accepted while it stopped, and
        # responses that took longer than its timeout. Each iteration of the loop closes
        # them one step further.
        for _ in range(_CLOSING_ITERATIONS):
            await asyncio.sleep(0)
            for server, _ in self._servers:
                for connection in list(server.server_state.connections):
                    transport = connection.transport
                    if transport is not None:
                        transport.abort()

    def stop(self) -> None:
        """Close the ports, and end the thread. A second call has no effect."""
        for server, _ in self._servers:
            server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        # Without start(), no server has closed its socket.
        for _, sock in self._servers:
            sock.close()
        self._servers.clear()


async def _repeat(interval_s: float, function: Callable[[], None]) -> None:
    while True:
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(function)
        except Exception as error:  # the next call may succeed
            _log.error("%s failed", function, exc_info=error)
        # A slow function occupies a worker thread at most a tenth of the time.
        await asyncio.sleep(max(interval_s, 9 * (time.monotonic() - began_s)))


class BrokerCalls:
    """Runs functions in the event loop of a broker, for pages."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def call(self, function: Callable[[], _T]) -> _T:
        """Return the result of a function that runs in the broker's loop.

        Raises:
            TimeoutError: the loop is blocked.
            RuntimeError: the loop has ended.
        """
        return await self.receive(lambda callback: callback(function()))

    async def receive(self, function: Callable[[Callable[[_T], None]], object]) -> _T:
        """Return the value that a function in the broker's loop passes to its callback.

        Raises the errors of call().
        """
        # Set by the broker's thread, and awaited in the loop of the page.
        result: Future[_T] = Future()

        def finish(value: _T) -> None:
            # The page no longer waits after its timeout.
            with contextlib.suppress(InvalidStateError):
                result.set_result(value)

        def run() -> None:
            try:
                function(finish)
            except Exception as error:  # raised for the page
                with contextlib.suppress(InvalidStateError):
                    result.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            return await asyncio.wrap_future(result)
