"""The registry on a ZooKeeper server, through kazoo (extra `zookeeper`): for processes on several machines.

    with connect("zoo1:2181,zoo2:2181/logcore") as registry: ...

Rules:
- Names that ZooKeeper refuses are percent-encoded, and so is `%`; Kafka's own names stay as they are.
- The session ends when the server has not heard of this process for the session's timeout. While the connection is
  lost, the state is "suspended". When the server declared the session over, it stays "expired", and the client is
  stopped before it can write in a session that kazoo would begin.
- A call that loses its connection raises RegistryUnavailableError; what it asked for may have happened.
- Watches of ZooKeeper report once. They are armed again before wait() returns.

kazoo runs threads of its own, which keep the session alive. This module starts none and retries nothing but update().
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final
from urllib.parse import unquote

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
from logcore.registry.protocol import ANY, Node, SessionState, check_deletable, check_value, node_names, split

#: The server's own node below the root.
_SERVERS_NODE: Final = "zookeeper"
_RETRY_SECONDS: Final = 0.1


def connect(hosts: str, *, session_timeout_ms: int = 10_000, connect_timeout_ms: int = 10_000) -> ZooKeeperRegistry:
    """A registry on ZooKeeper; `with` closes it. hosts: `host:port,...`, with `/path` behind it to stay below a node.

    RegistryUnavailableError if no server answers within connect_timeout_ms. MissingDependencyError without kazoo.
    """
    try:
        from kazoo.client import KazooClient
    except ModuleNotFoundError as error:
        raise MissingDependencyError("a registry on ZooKeeper needs kazoo; install logcore[zookeeper]") from error
    from kazoo.handlers.threading import KazooTimeoutError

    servers, _, below = hosts.partition("/")
    client = KazooClient(hosts=servers, timeout=session_timeout_ms / 1000)
    registry = ZooKeeperRegistry(client)
    try:
        client.start(timeout=connect_timeout_ms / 1000)  # pyright: ignore[reportArgumentType]  # any number of seconds
        with registry._errors("/"):
            if below:
                client.ensure_path(f"/{below}")
                client.chroot = f"/{below}"
        registry._begin()
    except KazooTimeoutError as error:
        client.close()
        raise RegistryUnavailableError(f"no ZooKeeper server at {hosts}") from error
    except BaseException:
        registry.close()
        raise
    return registry


def _refused(sign: str) -> bool:
    """Whether ZooKeeper refuses names with a sign, or it stands for one that it does."""
    return sign == "%" or sign < " " or "\x7f" <= sign <= "\x9f" or "\ud800" <= sign <= "\uf8ff" or sign >= "\ufff0"


def _encoded(names: tuple[str, ...]) -> str:
    """The path of a node on the server."""
    parts = []
    for depth, name in enumerate(names):
        part = "".join("".join(f"%{byte:02X}" for byte in sign.encode()) if _refused(sign) else sign for sign in name)
        if part in (".", ".."):
            part = part.replace(".", "%2E")
        if depth == 0 and part == _SERVERS_NODE:
            part = f"%{ord(part[0]):02X}{part[1:]}"
        parts.append(part)
    return "/" + "/".join(parts)


class ZooKeeperSession:
    """The session of a ZooKeeperRegistry. id: the server's, 16 hex digits."""

    def __init__(self, registry: ZooKeeperRegistry) -> None:
        self._registry = registry

    @property
    def id(self) -> str:
        return self._registry._session_id

    @property
    def state(self) -> SessionState:
        return self._registry._state


class ZooKeeperRegistry:
    """See protocol.Registry. Made by connect(); may be used by several threads.

    _state is written by kazoo's thread, and never leaves "expired".
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._state: SessionState = "alive"
        self._session_id = ""
        self._is_closed = False
        self._stopping = threading.Lock()  # held while the client is stopped: it cannot be closed before
        client.add_listener(self._listen)

    def _begin(self) -> None:
        self._session_id = _session_text(self._client.client_id[0])
        self._state = "alive"

    def __repr__(self) -> str:
        return f"<ZooKeeperRegistry, session {self._session_id}, {'closed' if self._is_closed else self._state}>"

    def __enter__(self) -> ZooKeeperRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, state: str) -> None:
        if self._state == "expired" or self._is_closed:
            return
        if state == "SUSPENDED":
            self._state = "suspended"
        elif state == "LOST" and self._session_id:
            self._state = "expired"
            # kazoo would begin another session and send what is waiting in it.
            self._client.handler.spawn(self._stop)
        elif state == "CONNECTED":
            self._state = "alive"

    @property
    def session(self) -> ZooKeeperSession:
        self._check_open()
        return ZooKeeperSession(self)

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> int:
        names = node_names(path)
        check_value(value, path)
        with self._errors(path, is_writing=True):
            self._client.create(_encoded(names), bytes(value), ephemeral=ephemeral, makepath=True)
        return 0

    def get(self, path: str) -> Node:
        names = node_names(path)
        with self._errors(path):
            value, facts = self._client.get(_encoded(names))
        return Node(value, facts.version, _session_text(facts.owner_session_id) if facts.owner_session_id else None)

    def set(self, path: str, value: bytes, *, version: int = ANY) -> int:
        names = node_names(path)
        check_value(value, path)
        with self._errors(path, is_writing=True):
            return int(self._client.set(_encoded(names), bytes(value), version=version).version)

    def delete(self, path: str, *, version: int = ANY) -> None:
        names = node_names(path)
        check_deletable(names, path)
        with self._errors(path, is_writing=True):
            self._client.delete(_encoded(names), version=version)

    def children(self, path: str) -> list[str]:
        names = split(path)
        try:
            with self._errors(path):
                found = self._client.get_children(_encoded(names))
        except NodeNotFoundError:
            return []
        return sorted(unquote(name) for name in found if names or name != _SERVERS_NODE)

    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> Node | None:
        while True:
            try:
                before: Node | None = self.get(path)
            except NodeNotFoundError:
                before = None
            value = change(None if before is None else before.value)
            if value is None:
                return before
            try:
                if before is None:
                    return Node(bytes(value), self.create(path, value))
                return Node(bytes(value), self.set(path, value, version=before.version), before.session)
            except (NodeExistsError, NodeNotFoundError, BadVersionError):
                continue  # another process came first

    def watch(self, paths: Iterable[str], *, children: Iterable[str] = ()) -> ZooKeeperWatch:
        wanted = [(_encoded(node_names(path)), False) for path in paths]
        wanted += [(_encoded(split(path)), True) for path in children]
        self._check_open()
        return ZooKeeperWatch(self, wanted)

    def close(self) -> None:
        """Ends the session; the server deletes its nodes. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._stop()
            self._client.close()

    def _stop(self) -> None:
        with self._stopping:
            self._client.stop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RegistryClosedError("the registry was closed")

    @contextlib.contextmanager
    def _errors(self, path: str, *, is_writing: bool = False) -> Generator[None]:
        """Errors of kazoo become those of the library."""
        from kazoo import exceptions
        from kazoo.handlers.threading import KazooTimeoutError

        self._check_open()
        if is_writing and self._state == "expired":
            raise SessionExpiredError("this session was declared over; connect again", path=path)
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
            raise InvalidNodeError("an ephemeral node has no children", path=path) from error
        except exceptions.SessionExpiredError as error:
            if self._state == "expired":
                raise SessionExpiredError("this session was declared over; connect again", path=path) from error
            raise RegistryUnavailableError("the connection to ZooKeeper is lost", path=path) from error
        except (exceptions.KazooException, KazooTimeoutError) as error:
            raise RegistryUnavailableError(f"ZooKeeper: {type(error).__name__}", path=path) from error


def _session_text(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"


class ZooKeeperWatch:
    """See protocol.Watch. Used by one thread at a time; kazoo's threads set _happened and put into _fired."""

    def __init__(self, registry: ZooKeeperRegistry, wanted: list[tuple[str, bool]]) -> None:
        self._registry = registry
        self._happened = threading.Event()
        self._mutex = threading.Lock()
        self._fired = list(wanted)  # to be armed again; under _mutex
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
            # Without a connection nothing is known: let the caller look, not too often.
            self._happened.wait(_RETRY_SECONDS if timeout is None else min(timeout, _RETRY_SECONDS))
            return True
        if not self._happened.wait(timeout):
            return False
        self._happened.clear()
        self._arm()
        return True

    def _arm(self) -> bool:
        """Arms what has reported; whether all is armed."""
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
        client = self._registry._client
        if of_children:
            with contextlib.suppress(NodeNotFoundError), self._registry._errors(path):
                client.get_children(path, watch=report)
                return
        with self._registry._errors(path):
            client.exists(path, watch=report)

    def _report(self, one: tuple[str, bool], event: object) -> None:
        if not self._is_closed:
            with self._mutex:
                self._fired.append(one)
            self._happened.set()
