"""A broker in a thread of its own, for programs without an event loop.

serve() starts it. Any thread may use the methods of ServerThread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from logcore import LogDir
from logcore.distribution import install_command
from logcore.errors import InvalidConfigError
from logcore.fs import OS
from netshim.server import Server, loop_factory

if TYPE_CHECKING:  # imported only if it is used
    from netshim.http.host import HttpHost

_T = TypeVar("_T")

#: Interval at which a caller that waits for the broker's thread checks that the thread
#: is alive.
_ALIVE_S: Final = 1.0
#: Interval of checks whether a broker has stopped.
_POLL_S: Final = 0.05


class ServerHandle:
    """A running Server, for threads other than the thread of its event loop."""

    def __init__(
        self, server: Server, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.server = server
        #: None until the loop runs. In a ServerThread, the new thread sets it.
        self._loop = loop

    def post(self, function: Callable[[], None]) -> None:
        """Call function() in the broker's thread later.

        Raises:
            RuntimeError: the broker has stopped.
        """
        if self._loop is None or not self._is_alive():
            raise RuntimeError("the broker has stopped")
        self._loop.call_soon_threadsafe(function)

    def _is_alive(self) -> bool:
        """Return whether the event loop may still run functions."""
        return self._loop is not None and not self._loop.is_closed()

    def call(self, function: Callable[[], _T]) -> _T:
        """Call function() in the broker's thread and return its result.

        The broker does no other work while the function runs. This is the way to use
        `server.broker`, which no other thread may use. Exceptions of the function are
        raised here.

        Raises:
            RuntimeError: the broker has stopped.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # raised in the calling thread
                future.set_exception(error)

        self.post(run)
        while True:
            try:
                # Checked periodically, because a loop that has ended never runs the
                # function.
                return future.result(_ALIVE_S)
            except TimeoutError:
                if future.done():
                    raise  # raised by the function
                if not self._is_alive():
                    raise RuntimeError("the broker has stopped") from None

    def run(self, task: Callable[[Server], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine with the server in the broker's loop, and return its result.

        Raises:
            RuntimeError: the broker has stopped.
        """
        if self._loop is None or not self._is_alive():
            raise RuntimeError("the broker has stopped")
        return asyncio.run_coroutine_threadsafe(task(self.server), self._loop).result()

    @property
    def is_running(self) -> bool:
        """Whether clients are served."""
        return self._is_alive() and self.server.is_serving

    def has_ended(self, timeout_s: float) -> bool:
        """Return whether the broker has stopped, or stops within timeout_s."""
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.is_running

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients."""
        return self.server.bootstrap_servers

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def logdir(self) -> LogDir:
        """The served directory. Any thread may use it while clients are served."""
        return self.server.logdir

    @property
    def schema_registry_url(self) -> str:
        """Raise RuntimeError, because only the owner of the broker starts a registry."""
        raise RuntimeError("start the broker with --schema-registry PORT")

    def stop(self) -> None:
        """Raise RuntimeError, because only the owner of the event loop stops it."""
        raise RuntimeError("this broker is stopped by the owner of its event loop")


class ServerThread(ServerHandle):
    """A Server with an event loop in a thread of its own.

    serve() creates it; a `with` block stops it.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        # The clock of a simulated disk begins in 2023. The records of real clients have
        # the current time, and would be refused as records from the future.
        set_clock = getattr(options.get("fs"), "set_wall_clock", None)
        if set_clock is not None:
            set_clock(max(options["fs"].now_ms(), OS.now_ms()))
        super().__init__(Server(path, **options))
        #: The server of the schema registry, and its URL.
        self._registry: tuple[HttpHost, str] | None = None
        #: Held during the start of the registry, so that two threads do not start two.
        self._registry_lock = threading.Lock()
        #: Set when the broker listens, or when it could not start.
        self._started = threading.Event()
        #: Whether the broker has listened. stop() raises the failure otherwise.
        self._is_serving = False
        #: Why the broker has ended. stop() raises it.
        self._failure: BaseException | None = None
        #: Ends _serve().
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="netshim", daemon=True)
        self._thread.start()
        self._started.wait()
        if not self._is_serving:
            self.stop()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:  # raised by stop()
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with self.server:
            self._is_serving = True
            self._started.set()
            await self._stop.wait()

    def __repr__(self) -> str:
        return f"<ServerThread {self.server!r}>"

    def _is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        """Whether clients are served."""
        return self._is_serving and self._thread.is_alive()

    @property
    def schema_registry_url(self) -> str:
        """URL of a schema registry over the topic `_schemas`. The first use starts it.

        Raises:
            InvalidConfigError: the extras `http` and `schemas` are not installed, or the
                broker is in a cluster.
            RuntimeError: the broker has stopped.
        """
        with self._registry_lock:
            if self._registry is None:
                if not self.is_running:
                    raise RuntimeError("the broker has stopped")
                try:
                    from netshim.http.host import HttpHost
                    from netshim.schemas.hosting import add_registry
                except ImportError as error:
                    raise InvalidConfigError(
                        "a schema registry needs packages that are not installed",
                        expected=install_command("http,schemas"),
                        found=str(error),
                    ) from error
                host = HttpHost()
                url = add_registry(
                    host, self.server, "schema registry", "127.0.0.1:0", is_open=False
                )
                host.start()
                self._registry = host, url
            return self._registry[1]

    def has_ended(self, timeout_s: float) -> bool:
        """Return whether the broker has stopped, or stops within timeout_s."""
        self._thread.join(timeout_s)
        return not self.is_running

    def stop(self) -> None:
        """Answer pending requests, close the directory and end the thread.

        A second call has no effect.
        """
        with self._registry_lock:
            if self._registry is not None:
                self._registry[0].stop()
                self._registry = None
        if (
            self._loop is not None
            and self._stop is not None
            and self._thread.is_alive()
        ):
            with contextlib.suppress(RuntimeError):  # the event loop ended concurrently
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def serve(
    path: str | os.PathLike[str], *, port: int = 0, **options: Any
) -> ServerThread:
    """Start a broker over a log directory in a thread, and return when it listens.

    Use it as `with netshim.serve("data") as server: ... server.bootstrap_servers`.
    `options` are the keyword arguments of Server.
    """
    return ServerThread(path, port=port, **options)
