"""The registry: a small tree of named values that several processes share, with sessions and watches.

    /brokers/ids/1        {"version":5,"host":...}     ephemeral: gone when the process that made it is gone
    /consumers/g/group    ...                          changed by compare-and-set

It is where members of a group, brokers and a controller find each other. Two implementations keep the rules below, and
one suite of tests (tests/registry/test_registry_conformance.py) runs against both: files.py and zookeeper.py.

Rules:
- A path is `/` and names. A name is text without `/` and NUL, at most 32,000 bytes in UTF-8. A value is bytes, at most
  1 MiB less 1 KiB: ZooKeeper's limits.
- Missing parents are made with the node. They are persistent and empty.
- An ephemeral node belongs to the session that created it, has no children, and exists as long as the session lives.
- Versions count from 0 in each life of a node. Each change adds one.
- The writer of a change sees it at once. Others never see a part of it.
- A session that was declared over (expired) writes nothing more: each attempt raises SessionExpiredError.
- A watch reports at least once that something may have changed since it was made or last reported, never what.

This module touches no disk and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal, Protocol

import attrs

from logcore.errors import InvalidNodeError, NodeTooLargeError

#: In the place of an expected version: whatever the version is.
ANY: Final = -1
VALUE_LIMIT_BYTES: Final = (1 << 20) - 1024
NAME_LIMIT_BYTES: Final = 32_000
#: Groups lie below it, each in a domain of its own, so it is kept even when it is empty.
CONSUMERS: Final = "consumers"

SessionState = Literal["alive", "suspended", "expired"]


@attrs.frozen
class Node:
    """A node at one moment. session: the id of its owner, None for a persistent node."""

    value: bytes
    version: int
    session: str | None = None


class Session(Protocol):
    """One life in the registry. suspended: it is not known whether it lives; stop acting as an owner, and wait."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> SessionState: ...


class Watch(Protocol):
    """Armed when it is made, so look at the nodes behind that, and again behind each report."""

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until something may have changed, at most timeout seconds (None: no limit); whether it may have."""
        ...

    def fileno(self) -> int:
        """A descriptor for event loops, readable when something happened: then call wait(0). -1 if there is none.

        It may be another one behind each wait().
        """
        ...

    def close(self) -> None: ...


class Registry(Protocol):
    """See the rules at the top of this module. Every call may raise the errors named at its end, and besides:
    InvalidNodeError, RegistryClosedError, RegistryLockedError or RegistryUnavailableError, StorageReadError; those that
    write also SessionExpiredError, StorageWriteError, DiskFullError.
    """

    @property
    def session(self) -> Session: ...

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> int:
        """Makes a node and returns its version, 0. NodeExistsError."""
        ...

    def get(self, path: str) -> Node:
        """NodeNotFoundError."""
        ...

    def set(self, path: str, value: bytes, *, version: int = ANY) -> int:
        """Replaces the value and returns the new version. NodeNotFoundError, BadVersionError."""
        ...

    def delete(self, path: str, *, version: int = ANY) -> None:
        """NodeNotFoundError, BadVersionError, NodeNotEmptyError."""
        ...

    def children(self, path: str) -> list[str]:
        """Names, sorted; none for a missing node."""
        ...

    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> Node | None:
        """Replaces the value by what change(value) returns, with no other change in between; returns the node then.

        change gets None where there is no node, and returns None to leave things alone. It must not use the registry.
        It may run several times, so what else it does must do no harm when it is repeated.
        """
        ...

    def watch(self, paths: Iterable[str], *, children: Iterable[str] = ()) -> Watch:
        """paths: nodes whose value, creation or end counts; children: nodes whose children's names count."""
        ...

    def close(self) -> None:
        """Ends the session; its ephemeral nodes go."""
        ...


def split(path: str) -> tuple[str, ...]:
    """The names of a path; () for the root. InvalidNodeError for what is no path."""
    if not isinstance(path, str) or not path.startswith("/"):
        raise InvalidNodeError("a path begins with '/'", found=repr(path)[:200])
    if path == "/":
        return ()
    names = tuple(path[1:].split("/"))
    for name in names:
        try:
            size = len(name.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidNodeError("a name is text that UTF-8 can hold", found=repr(path)[:200]) from None
        if not size or "\0" in name:
            raise InvalidNodeError("a name is not empty and has no NUL", found=repr(path)[:200])
        if size > NAME_LIMIT_BYTES:
            raise InvalidNodeError("a name is too long", expected=f"at most {NAME_LIMIT_BYTES} bytes", found=size)
    return names


def node_names(path: str) -> tuple[str, ...]:
    """As split(), for what is about to be read or changed: the root is no node."""
    names = split(path)
    if not names:
        raise InvalidNodeError("the root has children and no value", path=path)
    return names


def check_value(value: bytes, path: str) -> None:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidNodeError("a value is bytes", path=path, found=type(value).__name__)
    if len(value) > VALUE_LIMIT_BYTES:
        raise NodeTooLargeError(
            "a value is too large", path=path, expected=f"at most {VALUE_LIMIT_BYTES} bytes", found=len(value)
        )


def check_deletable(names: tuple[str, ...], path: str) -> None:
    if names == (CONSUMERS,):
        raise InvalidNodeError("this node is never deleted: groups come and go below it", path=path)
