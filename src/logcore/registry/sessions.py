"""Sessions of a registry of files: one file with a locked byte per live session.

    .sessions/<id>            byte 0 is locked by the session's process for life, byte 1 (the gate) during each change
    .sessions/<id>.expired    the same file, renamed by the process that declared the session over

Rules:
- A session lives as long as its file has its name and byte 0 is locked. The kernel
  releases the lock when the process ends in any way, so that no timeout is needed.
- A session's file gets its name after the lock is held and the record is written. Other
  processes therefore never see a session without its lock or its record.
- To declare a session over, a process renames its file, then acquires and releases its
  gate. A running change of the session ends before the gate is acquired. A later change
  finds the file renamed.
- A session is stuck if its count of polls does not increase for its interval, on the
  clock of the observer.

The record of a session is a node's file (node_file.py) with JSON as its value.
This module does not change nodes.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from collections.abc import Iterable
from typing import Any, Final, Literal

import attrs

from logcore.errors import CorruptRegistryError, RegistryLockedError
from logcore.fs import Boot, SharedFS
from logcore.registry import node_file
from logcore.registry.node_file import NodeHeader, NodeKind, Slot

DIRECTORY: Final = ".sessions"
EXPIRED: Final = ".expired"
LIVENESS_BYTE: Final = 0
GATE: Final = 1

_ID_BYTES: Final = 16
_ID: Final = re.compile(r"[0-9a-f]{32}")
#: Capacity for the record, whose size depends on the number of domains. Unwritten
#: capacity uses no disk blocks.
_CAPACITY: Final = 1 << 16
#: Bytes reserved for the counter of polls.
_COUNTER_BYTES: Final = 64


@attrs.frozen
class SessionRecord:
    """The content of the record of a session."""

    boot: Boot
    #: For messages.
    pid: int
    #: 0 for a session that never counts as stuck.
    max_poll_interval_ms: int = 0
    #: Number of calls of poll() by the owner.
    polls: int = 0
    #: The domains in which the session may have ephemeral nodes. None if the list is too
    #: long for the record: any domain may have some.
    domains: tuple[str, ...] | None = ()

    def pack(self) -> bytes:
        values: dict[str, Any] = {
            "boot_id": self.boot.boot_id.hex(),
            "time_namespace": self.boot.time_namespace,
            "pid": self.pid,
            "max_poll_interval_ms": self.max_poll_interval_ms,
            "polls": self.polls,
            "domains": self.domains,
        }
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes, path: str) -> SessionRecord:
        try:
            values = json.loads(data)
            boot = Boot(bytes.fromhex(values["boot_id"]), int(values["time_namespace"]))
            domains = values["domains"]
            if domains is not None:
                domains = tuple(str(domain) for domain in domains)
            return cls(
                boot,
                int(values["pid"]),
                int(values["max_poll_interval_ms"]),
                int(values["polls"]),
                domains,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptRegistryError(
                "the record of a session cannot be read", path=path
            ) from error


@attrs.frozen
class SessionInfo:
    """A session as other processes see it.

    `facts` is None if the session is over and a crash damaged its record.
    """

    id: str
    state: Literal["alive", "dead", "expired"]
    record: SessionRecord | None


def read_file(fs: SharedFS, handle: int, path: str) -> tuple[NodeHeader, Slot] | None:
    """Return the newest version in an open file, without a lock.

    Return None if the file is not a node: its write was torn, or was lost in a power cut.
    A writer changes one slot at a time, so two reads without a valid slot prove that
    there is none.

    Raises:
        CorruptRegistryError: the file is damaged.
        UnsupportedRegistryError: a newer version wrote the file.
    """
    before: bytes | None = None
    while True:
        data = fs.pread(handle, fs.size(handle), 0)
        head = node_file.read_header(data, path)
        if head is not None:
            slot = node_file.read_slot(head, data)
            if slot is not None:
                return head, slot
        if data == before:
            break
        before = data
    if head is not None and head.kind is NodeKind.PERSISTENT:
        raise CorruptRegistryError(
            "neither version of a node is whole", path=path, position=head.place(0)
        )
    return None


class Lease:
    """Session of this process. Methods are called under the registry's mutex."""

    def __init__(
        self, fs: SharedFS, path: str, handle: int, facts: SessionRecord
    ) -> None:
        self._fs = fs
        self._path = path
        self._handle = handle
        self._head = NodeHeader(
            fs.random_bytes(_ID_BYTES), NodeKind.EPHEMERAL, _CAPACITY
        )
        self._version = 0
        self.record = facts
        self.id = posixpath.basename(path).removesuffix(node_file.UNFINISHED)

    @classmethod
    def create(
        cls, fs: SharedFS, directory: str, facts: SessionRecord, permissions: int
    ) -> Lease:
        """Create a new session in a directory of sessions."""
        name = posixpath.join(directory, fs.random_bytes(_ID_BYTES).hex())
        unfinished = name + node_file.UNFINISHED
        handle = fs.open(
            unfinished, write=True, create=True, exclusive=True, permissions=permissions
        )
        try:
            if not fs.lock_byte(handle, LIVENESS_BYTE):
                raise RegistryLockedError(
                    "another process holds a session that was just made",
                    path=unfinished,
                )
            lease = cls(fs, unfinished, handle, facts)
            fs.pwrite(handle, node_file.new_file(lease._head, Slot(0, facts.pack())), 0)
            fs.rename(unfinished, name)
        except BaseException:
            fs.close(handle)
            raise
        lease._path = name
        return lease

    @property
    def is_expired(self) -> bool:
        return not self._fs.exists(self._path)

    def holds(self, facts: SessionRecord, part: int = 1) -> bool:
        """Return whether facts fit into 1/part of the record."""
        return part * (len(facts.pack()) + _COUNTER_BYTES) <= _CAPACITY

    def rewrite(self, facts: SessionRecord) -> None:
        version = self._version + 1
        value = facts.pack()
        assert self._head.holds(value)
        self._fs.pwrite(
            self._handle,
            Slot(version, value).pack(self._head),
            self._head.place(version),
        )
        self._version = version
        self.record = facts

    def enter(self, timeout_ms: int) -> bool:
        """Acquire the gate.

        Return False if a process that declares this session over held the gate until the
        timeout.
        """
        return self._fs.lock_byte(self._handle, GATE, timeout_ms=timeout_ms)

    def leave(self) -> None:
        self._fs.unlock_byte(self._handle, GATE)

    def close(self) -> None:
        """Release the lock, as the end of the process would."""
        self._fs.close(self._handle)


class Sessions:
    """Directory of all sessions of a registry."""

    def __init__(self, fs: SharedFS, directory: str) -> None:
        self._fs = fs
        self.directory = directory

    def is_alive(self, session: str) -> bool:
        try:
            handle = self._fs.open(posixpath.join(self.directory, session))
        except FileNotFoundError:
            return False
        try:
            return self._fs.is_byte_locked(handle, LIVENESS_BYTE)
        finally:
            self._fs.close(handle)

    def find(self, session: str) -> SessionInfo | None:
        """Return the session with this id, or None if it has no file."""
        for suffix in ("", EXPIRED):
            path = posixpath.join(self.directory, session + suffix)
            try:
                handle = self._fs.open(path)
            except FileNotFoundError:
                continue
            try:
                lives = self._fs.is_byte_locked(handle, LIVENESS_BYTE)
                facts = self._read_record(handle, path)
            finally:
                self._fs.close(handle)
            if facts is None and lives:
                raise CorruptRegistryError(
                    "the record of a live session cannot be read", path=path
                )
            if suffix:
                return SessionInfo(session, "expired", facts)
            if lives:
                return SessionInfo(session, "alive", facts)
            return SessionInfo(session, "dead", facts)
        return None

    def all(self) -> list[SessionInfo]:
        """Return all sessions that have a file, sorted by id."""
        names = self._fs.listdir(self.directory)
        ids = {
            session_id
            for name in names
            if _ID.fullmatch(session_id := name.removesuffix(EXPIRED))
        }
        return [
            info
            for session_id in sorted(ids)
            if (info := self.find(session_id)) is not None
        ]

    def _read_record(self, handle: int, path: str) -> SessionRecord | None:
        """Return the record of a session, or None if it is damaged, as after a power cut."""
        try:
            found = read_file(self._fs, handle, path)
            if found is None:
                return None
            return SessionRecord.unpack(found[1].value, path)
        except CorruptRegistryError:
            return None

    def changing(self) -> tuple[int, ...]:
        """Return the pids of the processes that are making a change."""
        pids = []
        for info in self.all():
            path = posixpath.join(self.directory, info.id)
            with contextlib.suppress(FileNotFoundError):
                handle = self._fs.open(path)
                try:
                    if info.record is not None and self._fs.is_byte_locked(
                        handle, GATE
                    ):
                        pids.append(info.record.pid)
                finally:
                    self._fs.close(handle)
        return tuple(pids)

    def declare_over(self, session: str, timeout_ms: int) -> tuple[str, ...] | None:
        """Rename the file of a session and wait until its running change has ended.

        Return the domains in which the session may have nodes, or None for any domain.

        Raises:
            RegistryLockedError: the process was stopped during a change. The session is
                over nevertheless.
        """
        path = posixpath.join(self.directory, session)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rename(path, path + EXPIRED)
        try:
            handle = self._fs.open(path + EXPIRED, write=True)
        except FileNotFoundError:  # another process has already removed the session
            return ()
        try:
            if not self._fs.lock_byte(handle, GATE, timeout_ms=timeout_ms):
                facts = self._read_record(handle, path)
                pids: tuple[int, ...] = ()
                if facts is not None:
                    pids = (facts.pid,)
                raise RegistryLockedError(
                    "the session's process was stopped during a change",
                    path=path,
                    pids=pids,
                )
            # The record is read after the gate was acquired: until then, the session may
            # have created a node in another domain.
            facts = self._read_record(handle, path)
        finally:
            self._fs.close(handle)
        if facts is None:
            return None
        return facts.domains

    def forget(self, session: str) -> None:
        """Remove the file of a session that is over and whose nodes are removed."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(posixpath.join(self.directory, session + EXPIRED))


@attrs.define
class _Observation:
    polls: int
    since_ms: int
    last_ms: int


class Observer:
    """Finds stuck sessions, on the monotonic clock of this process alone."""

    def __init__(self) -> None:
        self._seen: dict[str, _Observation] = {}

    def find_stuck(self, now_ms: int, sessions: Iterable[SessionInfo]) -> list[str]:
        """Return the ids of live sessions whose count of polls did not increase for
        their interval, across repeated calls.

        If more than a third of the interval has passed since the previous call, the
        measurement restarts: this process may have been stopped, together with the
        session.
        """
        stuck = []
        seen: dict[str, _Observation] = {}
        for info in sessions:
            facts = info.record
            if info.state != "alive" or facts is None or not facts.max_poll_interval_ms:
                continue
            before = self._seen.get(info.id)
            if (
                before is None
                or before.polls != facts.polls
                or (now_ms - before.last_ms) * 3 > facts.max_poll_interval_ms
            ):
                before = _Observation(facts.polls, now_ms, now_ms)
            before.last_ms = now_ms
            seen[info.id] = before
            if now_ms - before.since_ms >= facts.max_poll_interval_ms:
                stuck.append(info.id)
        self._seen = seen
        return stuck
