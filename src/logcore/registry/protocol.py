"""The registry: a small tree of named values that several processes share, with
sessions and watches.

    /brokers/ids/1        {"version":5,"host":...}     ephemeral: deleted with its
    process
    /consumers/g/group    ...                          changed by compare-and-set

Members of a group, brokers and a controller find each other in it. There are two
implementations of the rules below, files.py and zookeeper.py. One test suite
(tests/registry/test_registry_conformance.py) runs against both.

Rules:
- A path is `/` and names. A name is text without `/` and NUL, at most 32,000 bytes in
  UTF-8. A value is bytes, at most 1 MiB less 1 KiB: ZooKeeper's limits.
- Missing parents are created with the node. They are persistent and empty.
- An ephemeral node belongs to the session that created it, has no children, and exists
  as long as the session lives.
- Versions count from 0 in each life of a node. Each change adds one.
- The writer of a change sees it at once. Other processes never see part of a change.
- After a session was declared expired, it writes nothing: each attempt raises
  SessionExpiredError.
- A watch reports at least once that something may have changed since its creation or
  its last report. It does not report the change itself.

This module uses no disk and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, Protocol

import attrs

from logcore.errors import (
    BadVersionError,
    CorruptRegistryError,
    InvalidNodeError,
    NodeExistsError,
    NodeNotFoundError,
    NodeTooLargeError,
)

#: As an expected version: any version matches.
ANY: Final = -1
VALUE_LIMIT_BYTES: Final = (1 << 20) - 1024
NAME_LIMIT_BYTES: Final = 32_000
#: The parent of the groups, each of which has its own domain. It is kept even when it
#: is empty.
CONSUMERS: Final = "consumers"

SessionState = Literal["alive", "suspended", "expired"]


@attrs.frozen
class Node:
    """A node at one moment. `session` is the id of its owner, None for a persistent
    node.
    """

    value: bytes
    version: int
    session: str | None = None


#: Why a write of write_many() was not made.
WriteRefusal = NodeExistsError | NodeNotFoundError | BadVersionError


@attrs.frozen
class NodeWrite:
    """A write for Registry.write_many()."""

    path: str
    value: bytes
    #: The version that is replaced. None creates the node.
    version: int | None


class Session(Protocol):
    """One session in the registry.

    "suspended" means that it is unknown whether the session is alive. Its process must
    stop acting as an owner, and wait.
    """

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> SessionState: ...

    @property
    def timeout_ms(self) -> int:
        """Time after which the session of a stopped process ends; 0 means never."""
        ...

    @property
    def has_lease(self) -> bool:
        """Whether no other process can have ended the session yet.

        It is checked before each action as an owner, because "alive" may be outdated.
        """
        ...


class Watch(Protocol):
    """A watch, armed on creation. Read the nodes after creating it and after each
    report.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Block until something may have changed; return False after `timeout` seconds.

        None means no limit.
        """
        ...

    def fileno(self) -> int:
        """Return a descriptor for event loops, or -1 if there is none.

        When it is readable, call wait(0). It may change after each wait().
        """
        ...

    def close(self) -> None: ...


class Registry(Protocol):
    """The operations of a registry, see the rules at the top of this module.

    Each method's docstring names its errors. Every method can also raise
    InvalidNodeError, RegistryClosedError, RegistryLockedError, RegistryUnavailableError
    and StorageReadError. Changes can also raise SessionExpiredError, StorageWriteError
    and DiskFullError.
    """

    @property
    def session(self) -> Session: ...

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> int:
        """Create a node and return its version, 0. Raises NodeExistsError."""
        ...

    def get(self, path: str) -> Node:
        """Return a node. Raises NodeNotFoundError."""
        ...

    def get_many(self, paths: Iterable[str]) -> dict[str, Node | CorruptRegistryError]:
        """Return the nodes that exist, by their paths.

        A damaged node has its error as its value. ZooKeeper gets all requests before it
        has answered the first one, so the time of one answer is waited for once.
        """
        ...

    def set(self, path: str, value: bytes, *, version: int = ANY) -> int:
        """Replace the value and return the new version.

        Raises NodeNotFoundError and BadVersionError.
        """
        ...

    def write_many(self, writes: Sequence[NodeWrite]) -> list[int | WriteRefusal]:
        """Create or replace nodes; return the new version or the refusal of each.

        The writes are separate changes, so other processes may see only some of them.
        After an error such as RegistryUnavailableError, any of the writes may be stored.
        As in get_many(), ZooKeeper gets all requests at once.
        """
        ...

    def delete(self, path: str, *, version: int = ANY) -> None:
        """Delete a node.

        Raises NodeNotFoundError, BadVersionError and NodeNotEmptyError.
        """
        ...

    def children(self, path: str) -> list[str]:
        """Return the sorted names of the children; an empty list for a missing node."""
        ...

    def update(
        self, path: str, change: Callable[[bytes | None], bytes | None]
    ) -> Node | None:
        """Replace the value by the result of change(value), atomically; return the
        node.

        If there is no node, `change` gets None. If `change` returns None, nothing is
        changed. It must not use the registry. It may run several times, so its side
        effects must be repeatable.
        """
        ...

    def watch(self, paths: Iterable[str], *, children: Iterable[str] = ()) -> Watch:
        """Watch the value, creation and deletion of `paths`, and the names of
        `children`.
        """
        ...

    def poll(self) -> None:
        """Record that this session's process is not stuck.

        Raises SessionExpiredError if the session is over.
        """
        ...

    def end_stuck_sessions(self) -> list[str]:
        """End the sessions whose timeout is over, and return their ids.

        Call it more often than every third of the timeout.
        """
        ...

    def sync(self) -> None:
        """Let later reads show every change that was made before this call."""
        ...

    def close(self) -> None:
        """End the session and delete its ephemeral nodes."""
        ...


def split(path: str) -> tuple[str, ...]:
    """Return the names of a path, () for the root, or raise InvalidNodeError."""
    if not isinstance(path, str) or not path.startswith("/"):
        raise InvalidNodeError("a path begins with '/'", found=repr(path)[:200])
    if path == "/":
        return ()
    names = tuple(path[1:].split("/"))
    for name in names:
        try:
            size = len(name.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidNodeError(
                "a name is text that UTF-8 can hold", found=repr(path)[:200]
            ) from None
        if not size or "\0" in name:
            raise InvalidNodeError(
                "a name is not empty and has no NUL", found=repr(path)[:200]
            )
        if size > NAME_LIMIT_BYTES:
            raise InvalidNodeError(
                "a name is too long",
                expected=f"at most {NAME_LIMIT_BYTES} bytes",
                found=size,
            )
    return names


def node_names(path: str) -> tuple[str, ...]:
    """Return the names of a node's path like split(); the root is not a node."""
    names = split(path)
    if not names:
        raise InvalidNodeError("the root has children and no value", path=path)
    return names


def check_value(value: bytes, path: str) -> None:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidNodeError(
            "a value is bytes", path=path, found=type(value).__name__
        )
    if len(value) > VALUE_LIMIT_BYTES:
        raise NodeTooLargeError(
            "a value is too large",
            path=path,
            expected=f"at most {VALUE_LIMIT_BYTES} bytes",
            found=len(value),
        )


def check_deletable(names: tuple[str, ...], path: str) -> None:
    if names == (CONSUMERS,):
        raise InvalidNodeError(
            "this node is never deleted: groups come and go below it", path=path
        )
