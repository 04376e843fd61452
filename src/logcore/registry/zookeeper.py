"""The registry on a ZooKeeper server, through kazoo (extra `zookeeper`), for processes
on several machines.

    with connect("zoo1:2181,zoo2:2181/logcore") as registry: ...

Rules:
- Names that ZooKeeper refuses are percent-encoded, and so is `%`. Kafka's own names are
  not changed.
- The session ends if the server receives nothing from this process during the session's
  timeout. While the connection is lost, the state is "suspended". When the server has
  ended the session, the state becomes "expired" permanently. The client is then stopped
  before it can write in a new session of kazoo.
- A call without a connection raises RegistryUnavailableError at once. So does a call
  that loses its connection, or gets no answer within the session timeout: its change
  may have been made. kazoo would keep such calls until it is connected again.
- The lease of a session is measured from before a call was sent that was answered. The
  server received that call later, so it ends the session later than the lease ends. A
  tenth of the timeout is subtracted, because clocks differ in speed, and because a
  server that fails may not have reported its sessions to the leading server.
- The clock of the lease also runs while the machine is suspended.
- A server may answer reads from an old state. Reads after sync() are not older than it.
- Watches of ZooKeeper report once. They are armed again before wait() returns.

kazoo runs its own threads, which keep the session alive. This module starts no threads
of its own, and retries only update().
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final
from urllib.parse import unquote

from logcore.closeable import Closeable
from logcore.distribution import install_command
from logcore.errors import (
    BadVersionError,
    CorruptRegistryError,
    InvalidNodeError,
    MissingDependencyError,
    NodeExistsError,
    NodeNotEmptyError,
    NodeNotFoundError,
    RegistryClosedError,
    RegistryError,
    RegistryUnavailableError,
    SessionExpiredError,
)
from logcore.fs import OS
from logcore.registry.protocol import (
    ANY,
    Node,
    NodeWrite,
    SessionState,
    WriteRefusal,
    check_deletable,
    check_value,
    node_names,
    split,
)

#: The server's own node at the root.
_SERVERS_NODE: Final = "zookeeper"
_RETRY_SECONDS: Final = 0.1
#: Longest pause between two attempts to connect again. kazoo's own is a minute.
_RECONNECT_SECONDS: Final = 1.0
#: kazoo reports each attempt to connect. The callers report an outage themselves.
_kazoo_log = logging.getLogger("logcore.registry.kazoo")
_kazoo_log.setLevel(logging.ERROR)


def connect(
    hosts: str, *, session_timeout_ms: int = 10_000, connect_timeout_ms: int = 10_000
) -> ZooKeeperRegistry:
    """Return a registry on ZooKeeper; `with` closes it.

    `hosts` is `host:port,...`. A `/path` after it restricts the registry to a node,
    which is created if it does not exist. The servers may change the session timeout:
    see ZooKeeperSession.timeout_ms.

    Raises:
        InvalidNodeError: the path is not one of a node.
        RegistryUnavailableError: no server answered within connect_timeout_ms.
        MissingDependencyError: kazoo is not installed.
    """
    try:
        from kazoo.client import KazooClient
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"a registry on ZooKeeper needs kazoo: {install_command('zookeeper')}"
        ) from error
    from kazoo.handlers.threading import KazooTimeoutError

    servers, _, below = hosts.partition("/")
    names = split(f"/{below}")
    client = KazooClient(
        hosts=servers,
        timeout=session_timeout_ms / 1000,
        connection_retry={"max_tries": -1, "max_delay": _RECONNECT_SECONDS},
        logger=_kazoo_log,
    )
    connection = _Connection(client, session_timeout_ms)
    try:
        client.start(timeout=connect_timeout_ms / 1000)  # pyright: ignore[reportArgumentType]  # any number of seconds
        if names:
            connection.call("/", lambda: client.ensure_path_async(_encoded(names)))
            client.chroot = _encoded(names)
        connection.begin()
    except KazooTimeoutError as error:
        client.close()
        raise RegistryUnavailableError(
            f"no ZooKeeper server answers at {servers}; check the address, and that the "
            "server runs"
        ) from error
    except BaseException:
        connection.close()
        raise
    return ZooKeeperRegistry(connection)


def _refused(sign: str) -> bool:
    """Return whether ZooKeeper refuses this character in names, or it is the escape
    `%`.
    """
    return (
        sign == "%"
        or sign < " "
        or "\x7f" <= sign <= "\x9f"
        or "\ud800" <= sign <= "\uf8ff"
        or sign >= "\ufff0"
    )


def _encoded(names: tuple[str, ...]) -> str:
    """Return the path of a node on the server."""
    parts = []
    for depth, name in enumerate(names):
        signs: list[str] = []
        for sign in name:
            if _refused(sign):
                signs += [f"%{byte:02X}" for byte in sign.encode()]
            else:
                signs.append(sign)
        part = "".join(signs)
        if part in (".", ".."):
            part = part.replace(".", "%2E")
        if depth == 0 and part == _SERVERS_NODE:
            part = f"%{ord(part[0]):02X}{part[1:]}"
        parts.append(part)
    return "/" + "/".join(parts)


class _Connection:
    """The client and its session.

    `session_id` is the server's, 16 hex digits; "" before begin(). kazoo's thread
    writes `state`, which never changes again after "expired", and `timeout_ms`, which is
    the session timeout of the servers.
    """

    def __init__(self, client: Any, timeout_ms: int) -> None:
        self.client = client
        self.state: SessionState = "alive"
        self.session_id = ""
        self.timeout_ms = timeout_ms
        self.is_closed = False
        # When the latest of the answered calls was sent.
        self._sent_ms = OS.boottime_ms() - timeout_ms
        self._answering = threading.Lock()
        # Held while the client is being stopped: it cannot be closed before.
        self._stopping = threading.Lock()
        client.add_listener(self._listen)
        self._observe_timeout()

    def _observe_timeout(self) -> None:
        """Note the session timeout of each connection. kazoo has no public name for it."""
        handler = getattr(self.client, "_connection")  # noqa: B009
        connect = getattr(handler, "_connect")  # noqa: B009

        def connect_and_record_timeout(*address: Any) -> Any:
            read_timeout_ms, connect_timeout_ms = connect(*address)
            # kazoo waits two thirds of the timeout for an answer.
            self.timeout_ms = round(read_timeout_ms * 1.5)
            return read_timeout_ms, connect_timeout_ms

        setattr(handler, "_connect", connect_and_record_timeout)  # noqa: B010

    @property
    def has_lease(self) -> bool:
        """Whether it is too early for the servers to have ended the session."""
        age_ms = OS.boottime_ms() - self._sent_ms
        return self.state != "expired" and age_ms < self.timeout_ms * 9 // 10

    def begin(self) -> None:
        self.session_id = _session_text(self.client.client_id[0])
        self.state = "alive"

    def _listen(self, state: str) -> None:
        if self.state == "expired" or self.is_closed:
            return
        if state == "SUSPENDED":
            self.state = "suspended"
        elif state == "LOST" and self.session_id:
            self.state = "expired"
            # kazoo would start another session and send pending requests in it.
            self.client.handler.spawn(self._stop)
        elif state == "CONNECTED":
            self.state = "alive"

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self.client.connected:
            self._end()
        else:
            # An attempt to connect would delay close() for up to the session timeout.
            self.client.handler.spawn(self._end)

    def _end(self) -> None:
        self._stop()
        # The client remains open if another thread is still writing.
        with contextlib.suppress(Exception):
            self.client.close()

    def _stop(self) -> None:
        with self._stopping:
            try:
                self.client.stop()
            except Exception as error:
                _kazoo_log.warning("the client of ZooKeeper did not stop: %r", error)

    def call(
        self, path: str, begin: Callable[[], Any], *, is_writing: bool = False
    ) -> Any:
        """Send a call and return its answer. `begin` returns an async result of kazoo."""
        with self.errors(path, is_writing=is_writing):
            sent_ms = OS.boottime_ms()
            if self.state == "expired" or not self.client.connected:
                raise self._unusable(path)
            is_answered = False
            try:
                value = begin().get(timeout=self.timeout_ms / 1_000)
                is_answered = True
                return value
            except _answers():
                is_answered = True
                raise
            finally:
                if is_answered:
                    with self._answering:
                        self._sent_ms = max(self._sent_ms, sent_ms)

    def _unusable(self, path: str) -> RegistryError:
        if self.state == "expired":
            return SessionExpiredError(
                "this session was declared over; connect again", path=path
            )
        return RegistryUnavailableError("no connection to ZooKeeper", path=path)

    def check_open(self) -> None:
        if self.is_closed:
            raise RegistryClosedError("the registry was closed")

    @contextlib.contextmanager
    def errors(self, path: str, *, is_writing: bool = False) -> Generator[None]:
        """Convert errors of kazoo to errors of the library."""
        from kazoo import exceptions
        from kazoo.handlers.threading import KazooTimeoutError

        self.check_open()
        if is_writing and self.state == "expired":
            raise self._unusable(path)
        try:
            yield
        except exceptions.NoNodeError as error:
            raise NodeNotFoundError("no such node", path=path) from error
        except exceptions.NodeExistsError as error:
            raise NodeExistsError("the node exists", path=path) from error
        except exceptions.NotEmptyError as error:
            raise NodeNotEmptyError("the node has children", path=path) from error
        except exceptions.BadVersionError as error:
            raise BadVersionError("the node was changed", path=path) from error
        except exceptions.NoChildrenForEphemeralsError as error:
            raise InvalidNodeError(
                "an ephemeral node has no children", path=path
            ) from error
        except exceptions.SessionExpiredError as error:
            raise self._unusable(path) from error
        except (exceptions.KazooException, KazooTimeoutError) as error:
            raise RegistryUnavailableError(
                f"ZooKeeper: {type(error).__name__}", path=path
            ) from error


def _answers() -> tuple[type[Exception], ...]:
    """Return the errors that are answers of a server."""
    from kazoo import exceptions

    return (
        exceptions.NoNodeError,
        exceptions.NodeExistsError,
        exceptions.NotEmptyError,
        exceptions.BadVersionError,
        exceptions.NoChildrenForEphemeralsError,
    )


class ZooKeeperSession:
    """The session of a ZooKeeperRegistry. `id` is the server's, 16 hex digits."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    @property
    def id(self) -> str:
        return self._connection.session_id

    @property
    def state(self) -> SessionState:
        return self._connection.state

    @property
    def timeout_ms(self) -> int:
        return self._connection.timeout_ms

    @property
    def has_lease(self) -> bool:
        return self._connection.has_lease


class ZooKeeperRegistry(Closeable):
    """A protocol.Registry on ZooKeeper, created by connect(). Any thread may use it."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def __repr__(self) -> str:
        connection = self._connection
        if connection.is_closed:
            state = "closed"
        else:
            state = connection.state
        return f"<ZooKeeperRegistry, session {connection.session_id}, {state}>"

    @property
    def session(self) -> ZooKeeperSession:
        self._connection.check_open()
        return ZooKeeperSession(self._connection)

    def _read(self, path: str, begin: Callable[[Any], Any]) -> Any:
        client = self._connection.client
        return self._connection.call(path, lambda: begin(client))

    def _change(self, path: str, begin: Callable[[Any], Any]) -> Any:
        client = self._connection.client
        return self._connection.call(path, lambda: begin(client), is_writing=True)

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> int:
        names = node_names(path)
        check_value(value, path)
        self._change(
            path,
            lambda client: client.create_async(
                _encoded(names), bytes(value), ephemeral=ephemeral, makepath=True
            ),
        )
        return 0

    def get(self, path: str) -> Node:
        names = node_names(path)
        return _node(self._read(path, lambda client: client.get_async(_encoded(names))))

    def get_many(self, paths: Iterable[str]) -> dict[str, Node | CorruptRegistryError]:
        encoded = {path: _encoded(node_names(path)) for path in paths}
        if not encoded:
            return {}
        answers = self._read(
            next(iter(encoded)),
            lambda client: _AllResults([*map(client.get_async, encoded.values())]),
        )
        return {
            path: _node(answer)
            for path, answer in zip(encoded, answers, strict=True)
            if not isinstance(answer, Exception)  # there is no such node
        }

    def write_many(self, writes: Sequence[NodeWrite]) -> list[int | WriteRefusal]:
        encoded = [_encoded(node_names(write.path)) for write in writes]
        for write in writes:
            check_value(write.value, write.path)
        if not encoded:
            return []

        def begin(client: Any) -> _AllResults:
            return _AllResults(
                [
                    client.create_async(path, bytes(write.value), makepath=True)
                    if write.version is None
                    else client.set_async(
                        path, bytes(write.value), version=write.version
                    )
                    for path, write in zip(encoded, writes, strict=True)
                ]
            )

        answers = self._change(writes[0].path, begin)
        return [
            self._outcome(write, answer)
            for write, answer in zip(writes, answers, strict=True)
        ]

    def _outcome(self, write: NodeWrite, answer: Any) -> int | WriteRefusal:
        """Return the version or the refusal of a write."""
        if not isinstance(answer, Exception):
            return 0 if write.version is None else int(answer.version)
        try:
            with self._connection.errors(write.path):
                raise answer
        except (NodeExistsError, NodeNotFoundError, BadVersionError) as error:
            return error

    def set(self, path: str, value: bytes, *, version: int = ANY) -> int:
        names = node_names(path)
        check_value(value, path)
        facts = self._change(
            path,
            lambda client: client.set_async(
                _encoded(names), bytes(value), version=version
            ),
        )
        return int(facts.version)

    def delete(self, path: str, *, version: int = ANY) -> None:
        names = node_names(path)
        check_deletable(names, path)
        self._change(
            path,
            lambda client: client.delete_async(_encoded(names), version=version),
        )

    def children(self, path: str) -> list[str]:
        names = split(path)
        try:
            found = self._read(
                path, lambda client: client.get_children_async(_encoded(names))
            )
        except NodeNotFoundError:
            return []
        return sorted(unquote(name) for name in found if names or name != _SERVERS_NODE)

    def update(
        self, path: str, change: Callable[[bytes | None], bytes | None]
    ) -> Node | None:
        while True:
            before: Node | None = None
            value_before: bytes | None = None
            with contextlib.suppress(NodeNotFoundError):
                before = self.get(path)
                value_before = before.value
            value = change(value_before)
            if value is None:
                return before
            try:
                if before is None:
                    return Node(bytes(value), self.create(path, value))
                return Node(
                    bytes(value),
                    self.set(path, value, version=before.version),
                    before.session,
                )
            except (NodeExistsError, NodeNotFoundError, BadVersionError):
                # Another process changed the node first.
                continue

    def poll(self) -> None:
        """Check that the session is not over. kazoo keeps it alive."""
        self._connection.check_open()
        with self._connection.errors("/", is_writing=True):
            pass

    def end_stuck_sessions(self) -> list[str]:
        """Return an empty list: the servers end sessions."""
        self._connection.check_open()
        return []

    def sync(self) -> None:
        """Wait until the server has all changes that were made before this call."""
        self._read("/", lambda client: client.sync_async("/"))

    def watch(
        self, paths: Iterable[str], *, children: Iterable[str] = ()
    ) -> ZooKeeperWatch:
        wanted = [(_encoded(node_names(path)), False) for path in paths]
        wanted += [(_encoded(split(path)), True) for path in children]
        self._connection.check_open()
        return ZooKeeperWatch(self._connection, wanted)

    def close(self) -> None:
        """End the session; the server deletes its nodes. A second call does nothing."""
        self._connection.close()


class _AllResults:
    """The results of calls that were sent together, used like one of kazoo."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def get(self, timeout: float) -> list[Any]:
        """Wait for all answers, and return each of them or its error."""
        deadline_ms = OS.monotonic_ms() + round(timeout * 1_000)
        found: list[Any] = []
        for result in self._results:
            try:
                left_ms = max(0, deadline_ms - OS.monotonic_ms())
                found.append(result.get(timeout=left_ms / 1_000))
            except _answers() as error:
                found.append(error)
        return found


def _node(answer: Any) -> Node:
    value, facts = answer
    session = None
    if facts.owner_session_id:
        session = _session_text(facts.owner_session_id)
    return Node(value, facts.version, session)


def _session_text(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"


class ZooKeeperWatch:
    """A protocol.Watch on ZooKeeper, used by one thread at a time.

    kazoo's threads set _happened and append to _fired.
    """

    def __init__(self, connection: _Connection, wanted: list[tuple[str, bool]]) -> None:
        self._connection = connection
        self._happened = threading.Event()
        self._mutex = threading.Lock()
        # To be armed again; under _mutex.
        self._fired = list(wanted)
        self._is_closed = False
        self._arm()

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._is_closed = True
        self._happened.set()

    def wait(self, timeout: float | None = None) -> bool:
        if self._is_closed:
            raise RegistryClosedError("the watch was closed")
        if not self._arm():
            # Without a connection the state is unknown: let the caller check, but not
            # too frequently.
            seconds = _RETRY_SECONDS
            if timeout is not None:
                seconds = min(timeout, _RETRY_SECONDS)
            self._happened.wait(seconds)
            return True
        if not self._happened.wait(timeout):
            return False
        self._happened.clear()
        self._arm()
        return True

    def _arm(self) -> bool:
        """Arm watches that have reported; return whether all are armed."""
        with self._mutex:
            fired = self._fired
            self._fired = []
        for at, notification in enumerate(fired):
            try:
                self._arm_one(*notification)
            except RegistryUnavailableError:
                with self._mutex:
                    self._fired += fired[at:]
                return False
        return True

    def _arm_one(self, path: str, of_children: bool) -> None:
        report = functools.partial(self._report, (path, of_children))
        client = self._connection.client
        if of_children:
            with contextlib.suppress(NodeNotFoundError):
                self._connection.call(
                    path, lambda: client.get_children_async(path, watch=report)
                )
                return
        self._connection.call(path, lambda: client.exists_async(path, watch=report))

    def _report(self, notification: tuple[str, bool], event: object) -> None:
        if not self._is_closed:
            with self._mutex:
                self._fired.append(notification)
            self._happened.set()
