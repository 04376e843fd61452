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
- A call that loses its connection raises RegistryUnavailableError; its change may have
  been made.
- Watches of ZooKeeper report once. They are armed again before wait() returns.

kazoo runs its own threads, which keep the session alive. This module starts no threads
and retries only update().
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final
from urllib.parse import unquote

from logcore.distribution import install_command
from logcore.errors import (
    BadVersionError,
    InvalidNodeError,
    MissingDependencyError,
    NodeExistsError,
    NodeNotEmptyError,
    NodeNotFoundError,
    RegistryClosedError,
    RegistryUnavailableError,
    SessionExpiredError,
)
from logcore.registry.protocol import (
    ANY,
    Node,
    SessionState,
    check_deletable,
    check_value,
    node_names,
    split,
)

#: The server's own node at the root.
_SERVERS_NODE: Final = "zookeeper"
_RETRY_SECONDS: Final = 0.1


def connect(
    hosts: str, *, session_timeout_ms: int = 10_000, connect_timeout_ms: int = 10_000
) -> ZooKeeperRegistry:
    """Return a registry on ZooKeeper; `with` closes it.

    `hosts` is `host:port,...`. A `/path` after it restricts the registry to a node.

    Raises:
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
    client = KazooClient(hosts=servers, timeout=session_timeout_ms / 1000)
    connection = _Connection(client)
    try:
        client.start(timeout=connect_timeout_ms / 1000)  # pyright: ignore[reportArgumentType]  # any number of seconds
        with connection.errors("/"):
            if below:
                client.ensure_path(f"/{below}")
                client.chroot = f"/{below}"
        connection.begin()
    except KazooTimeoutError as error:
        client.close()
        raise RegistryUnavailableError(f"no ZooKeeper server at {hosts}") from error
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
    writes `state`, which never changes again after "expired".
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.state: SessionState = "alive"
        self.session_id = ""
        self.is_closed = False
        # Held while the client is being stopped: it cannot be closed before.
        self._stopping = threading.Lock()
        client.add_listener(self._listen)

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
        if not self.is_closed:
            self.is_closed = True
            self._stop()
            self.client.close()

    def _stop(self) -> None:
        with self._stopping:
            self.client.stop()

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
            raise SessionExpiredError(
                "this session was declared over; connect again", path=path
            )
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
            if self.state == "expired":
                raise SessionExpiredError(
                    "this session was declared over; connect again", path=path
                ) from error
            raise RegistryUnavailableError(
                "the connection to ZooKeeper is lost", path=path
            ) from error
        except (exceptions.KazooException, KazooTimeoutError) as error:
            raise RegistryUnavailableError(
                f"ZooKeeper: {type(error).__name__}", path=path
            ) from error


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


class ZooKeeperRegistry:
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

    def __enter__(self) -> ZooKeeperRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def session(self) -> ZooKeeperSession:
        self._connection.check_open()
        return ZooKeeperSession(self._connection)

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> int:
        names = node_names(path)
        check_value(value, path)
        with self._connection.errors(path, is_writing=True):
            self._connection.client.create(
                _encoded(names), bytes(value), ephemeral=ephemeral, makepath=True
            )
        return 0

    def get(self, path: str) -> Node:
        names = node_names(path)
        with self._connection.errors(path):
            value, facts = self._connection.client.get(_encoded(names))
        session = None
        if facts.owner_session_id:
            session = _session_text(facts.owner_session_id)
        return Node(value, facts.version, session)

    def set(self, path: str, value: bytes, *, version: int = ANY) -> int:
        names = node_names(path)
        check_value(value, path)
        with self._connection.errors(path, is_writing=True):
            return int(
                self._connection.client.set(
                    _encoded(names), bytes(value), version=version
                ).version
            )

    def delete(self, path: str, *, version: int = ANY) -> None:
        names = node_names(path)
        check_deletable(names, path)
        with self._connection.errors(path, is_writing=True):
            self._connection.client.delete(_encoded(names), version=version)

    def children(self, path: str) -> list[str]:
        names = split(path)
        try:
            with self._connection.errors(path):
                found = self._connection.client.get_children(_encoded(names))
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
        for at, one in enumerate(fired):
            try:
                self._arm_one(*one)
            except RegistryUnavailableError:
                with self._mutex:
                    self._fired += fired[at:]
                return False
        return True

    def _arm_one(self, path: str, of_children: bool) -> None:
        report = functools.partial(self._report, (path, of_children))
        client = self._connection.client
        if of_children:
            with contextlib.suppress(NodeNotFoundError), self._connection.errors(path):
                client.get_children(path, watch=report)
                return
        with self._connection.errors(path):
            client.exists(path, watch=report)

    def _report(self, one: tuple[str, bool], event: object) -> None:
        if not self._is_closed:
            with self._mutex:
                self._fired.append(one)
            self._happened.set()
