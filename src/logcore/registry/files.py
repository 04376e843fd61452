"""The registry as plain files in `<dir>.registry/`, shared by processes of one machine;
no server, no thread.

    .format                    `logcore registry 1`
    .lock                      one byte for each domain, locked during a change
    .sessions/                 see sessions.py
    consumers.node             the node /consumers, see node_file.py; a name is percent-encoded
    consumers/g/ids/c1.node    /consumers/g/ids/c1

A change locks one domain. The domain is the first name of a path, the first two names
for groups, and the first three names for the topics of a cluster.

| operation | steps under the lock of the domain and the gate of the session | killed in between |
|---|---|---|
| create, persistent | parents, `.tmp`, sync, rename, sync the directories | no node, or the node |
| create, ephemeral | the domain into the session's record, O_EXCL, one write | an empty or torn file is not a node |
| set, update | one write over the older slot, sync | the newer valid slot counts |
| set that grows | `.tmp`, sync, rename, sync the directory | the old node; the `.tmp` is garbage |
| delete | rmdir of the children's directory, unlink, sync the directory | the node, or no node |
| end of a session | rename its file, pass its gate, delete its nodes, unlink its file | another process continues |

Rules:
- Reads acquire no lock. A node with a session exists only while the session lives.
- A persistent version is durable before the call returns, and before the slot of the
  previous version is overwritten. Otherwise a writer that was killed before its sync
  could destroy both versions.
- Ephemeral nodes are never synced, because a power cut ends all sessions. The state of a
  group and the view of topics are not synced either, because both can be rebuilt.
- In a cluster, the nodes of topics are the truth. They are synced, and each topic is a
  domain, so that a process that is stopped during a change blocks one topic.
- A process never locks two domains at once. It locks the gate of its session after the
  domain.
- A power cut may lose a value that was read, if its writer was killed between its write
  and its sync.
- A damaged, foreign or newer file raises an error and is kept.

The only Kafka name in this module is CONSUMERS; paths.py defines the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final, Literal, TypeVar

import attrs

from logcore.closeable import Closeable
from logcore.errors import (
    BadVersionError,
    CorruptRegistryError,
    ForkedWriterError,
    InvalidConfigError,
    InvalidNodeError,
    LogNotFoundError,
    NodeExistsError,
    NodeNotEmptyError,
    NodeNotFoundError,
    ReadOnlyLogError,
    RegistryClosedError,
    RegistryError,
    RegistryLockedError,
    SessionExpiredError,
    StorageWriteError,
    UnsupportedRegistryError,
)
from logcore.fs import OS, SharedFS
from logcore.registry import node_file
from logcore.registry.node_file import (
    SUFFIX,
    UNFINISHED,
    NodeHeader,
    NodeKind,
    Slot,
    file_name,
)
from logcore.registry.protocol import (
    ANY,
    CONSUMERS,
    Node,
    NodeWrite,
    SessionState,
    WriteRefusal,
    check_deletable,
    check_value,
    node_names,
    split,
)
from logcore.registry.sessions import (
    DIRECTORY,
    Lease,
    Observer,
    SessionInfo,
    SessionRecord,
    Sessions,
    read_file,
)
from logcore.registry.watching import FileWatch
from logcore.reporting import WARNING, log_line

#: Whether the nodes of topics can be rebuilt; see open_registry().
TopicNodes = Literal["view", "truth"]
_ENDING: Final = ".registry"
_FORMAT: Final = ".format"
_FORMAT_TEXTS: Final[dict[TopicNodes, bytes]] = {
    "view": b"logcore registry 1\n",
    "truth": b"logcore registry 1 of a cluster\n",
}
_FORMAT_WORDS: Final = b"logcore registry "
_LOCK: Final = ".lock"
#: Writes of a group's state need no sync, because the state is restored from
#: __consumer_offsets after a power cut.
_UNSYNCED_NAME: Final = "group"
#: Nodes below these paths describe topics. Unless the registry belongs to a cluster,
#: they are a view of the log directory's topics and can be rebuilt from the directory.
_TOPICS: Final = ("brokers", "topics")
_VIEWS: Final = (_TOPICS, ("config", "topics"))
#: In a cluster, nodes that announce changes. If one is lost, a change is detected later.
_CHANGES: Final = ("brokers", "changes")
#: Nodes that live as long as a session: members of groups and the partitions that they
#: own, brokers, the controller.
_OF_MEMBERS: Final = ("ids", "owners")
_BROKERS: Final = ("brokers", "ids")
_CONTROLLER: Final = ("controller",)
_OWNER_ONLY: Final = (0o700, 0o600)
_GROUP_TOO: Final = (0o770, 0o660)
_GROUP_WRITES: Final = 0o020
_GARBAGE_MS: Final = 60_000
_LOCK_TIMEOUT_MS: Final = 10_000
#: Maximum number of nodes whose durable version is remembered.
_MAX_CACHED_NODES: Final = 10_000
_BYTE_BITS: Final = 62

Names = tuple[str, ...]
Result = TypeVar("Result")


@attrs.frozen
class Layout:
    """How the nodes of a registry are locked and synced."""

    #: See open_registry().
    topics: TopicNodes = "view"

    def domain_of(self, names: Names) -> str:
        """Return the domain that a change of a node locks.

        A domain is the path of a directory below the registry's directory: the first
        name, or the group for a group and all nodes below it, or the topic of a cluster.
        """
        depth = 1
        for parent in self.parents_of_domains:
            if len(names) > len(parent) and names[: len(parent)] == parent:
                depth = len(parent) + 1
        return "/".join(map(file_name, names[:depth]))

    @property
    def parents_of_domains(self) -> tuple[Names, ...]:
        """The nodes whose children are domains. They are never deleted."""
        if self.topics == "truth":
            return (CONSUMERS,), _TOPICS
        return ((CONSUMERS,),)

    def kind_of(self, names: Names) -> NodeKind:
        """Return whether a node without a session is PERSISTENT or UNSYNCED."""
        if len(names) == 3 and names[0] == CONSUMERS and names[2] == _UNSYNCED_NAME:
            return NodeKind.UNSYNCED
        is_view = names[:2] in _VIEWS
        if self.topics == "truth":
            is_view = names[:2] == _CHANGES
        if len(names) > 2 and is_view:
            return NodeKind.UNSYNCED
        return NodeKind.PERSISTENT

    def is_never_synced(self, names: Names) -> bool:
        """Return whether the node with these names is never synced.

        After a power cut, a damaged file of such a node counts as missing.
        """
        of_member = len(names) > 3 and names[0] == CONSUMERS and names[2] in _OF_MEMBERS
        return (
            of_member
            or names[:2] == _BROKERS
            or names == _CONTROLLER
            or self.kind_of(names) is NodeKind.UNSYNCED
        )


def registry_path(directory: str) -> str:
    """Return the path of the registry of a log directory."""
    return directory + _ENDING


def domain_byte(domain: str) -> int:
    """Return the byte of `.lock` that locks a domain.

    If two domains have the same byte, their changes wait for each other.
    """
    digest = hashlib.sha256(domain.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _BYTE_BITS)


def open_registry(
    directory: str | os.PathLike[str],
    *,
    read_only: bool = False,
    topics: TopicNodes = "view",
    max_poll_interval_ms: int = 0,
    lock_timeout_ms: int = _LOCK_TIMEOUT_MS,
    fs: SharedFS = OS,
) -> FileRegistry:
    """Open the registry of files beside a log directory, and create it if it is missing.

    A `with` block closes the registry.

    Args:
        directory: the directory of the logs; the registry is `<directory>.registry`.
        read_only: open no session and change nothing.
        topics: "view" if the topics can be rebuilt from the log directory, so that their
            nodes are not synced; "truth" for a cluster, whose brokers have no other
            record of them.
        max_poll_interval_ms: maximum time between two calls of poll(). After it, other
            processes declare this session stuck. 0 means never.
        lock_timeout_ms: maximum time that a change waits for another process's change.

    Raises:
        CorruptRegistryError: the directory holds other files.
        InvalidConfigError: live sessions belong to another machine or another time
            namespace.
        LogNotFoundError: `read_only` is true, and the registry does not exist.
        UnsupportedRegistryError: a newer version created the registry, or with another
            value of `topics`.
    """
    if max_poll_interval_ms < 0 or lock_timeout_ms < 0:
        raise InvalidConfigError(
            "a time must not be negative",
            found=min(max_poll_interval_ms, lock_timeout_ms),
        )
    logs = fs.real_path(os.fspath(directory))
    root = registry_path(logs)
    permissions = _permissions(fs, logs, root)
    if not read_only:
        _make(fs, root, permissions, _FORMAT_TEXTS[topics])
    _check_format(fs, root, _FORMAT_TEXTS[topics])
    boot = fs.boot()
    for info in Sessions(fs, posixpath.join(root, DIRECTORY)).all():
        if (
            info.state == "alive"
            and info.record is not None
            and info.record.boot != boot
        ):
            raise InvalidConfigError(
                "a live session belongs to another machine or another time namespace: all processes that share a "
                "registry of files run on one machine with one clock",
                path=root,
                expected=boot,
                found=info.record.boot,
            )
    facts = None
    if not read_only:
        facts = SessionRecord(boot, os.getpid(), max_poll_interval_ms)
    return FileRegistry(fs, root, facts, permissions, lock_timeout_ms, Layout(topics))


def _permissions(fs: SharedFS, logs: str, root: str) -> tuple[int, int]:
    """Return the permissions of directories and files.

    The group may write to the registry if it may write to the logs.
    """
    for place in (root, logs):
        if not fs.exists(place):
            continue
        if fs.permissions(place) & _GROUP_WRITES:
            return _GROUP_TOO
        return _OWNER_ONLY
    return _OWNER_ONLY


def _make(
    fs: SharedFS, root: str, permissions: tuple[int, int], format_text: bytes
) -> None:
    """Create the directory of a registry, or complete the work of a killed process."""
    for_directories, for_files = permissions
    with contextlib.suppress(FileExistsError):
        fs.mkdir(root, permissions=for_directories)
    place = posixpath.join(root, _FORMAT)
    if not fs.exists(place):
        foreign = [name for name in fs.listdir(root) if not name.startswith(_FORMAT)]
        # Checked again, because another process may have created the registry since.
        if foreign and not fs.exists(place):
            raise CorruptRegistryError(
                "the directory is not a registry, and not empty",
                path=root,
                found=sorted(foreign),
            )
        unfinished = f"{place}-{fs.random_bytes(8).hex()}{UNFINISHED}"
        handle = fs.open(
            unfinished, write=True, create=True, exclusive=True, permissions=for_files
        )
        try:
            fs.pwrite(handle, format_text, 0)
            fs.fdatasync(handle)
        finally:
            fs.close(handle)
        fs.rename(unfinished, place)
    # Always sync: the process that created the file may have been killed before its
    # syncs.
    fs.sync_dir(root)
    fs.sync_dir(posixpath.dirname(root))
    with contextlib.suppress(FileExistsError):
        fs.mkdir(posixpath.join(root, DIRECTORY), permissions=for_directories)
    with contextlib.suppress(FileExistsError):
        fs.close(
            fs.open(
                posixpath.join(root, _LOCK),
                write=True,
                create=True,
                exclusive=True,
                permissions=for_files,
            )
        )


def _check_format(fs: SharedFS, root: str, expected: bytes) -> None:
    place = posixpath.join(root, _FORMAT)
    try:
        handle = fs.open(place)
    except FileNotFoundError:
        raise LogNotFoundError("no registry here", path=root) from None
    try:
        found = fs.pread(handle, 64, 0)
    finally:
        fs.close(handle)
    if found == expected:
        return
    kind: type[RegistryError] = CorruptRegistryError
    if found.startswith(_FORMAT_WORDS):
        kind = UnsupportedRegistryError
    raise kind(
        "not the format of a registry", path=place, expected=expected, found=found
    )


def read_layout(
    directory: str | os.PathLike[str], fs: SharedFS = OS
) -> TopicNodes | None:
    """Return the `topics` of an existing registry; None if there is none or another one."""
    place = posixpath.join(registry_path(os.fspath(directory)), _FORMAT)
    try:
        handle = fs.open(place)
    except OSError:
        return None
    try:
        found = fs.pread(handle, 64, 0)
    finally:
        fs.close(handle)
    return next((kind for kind, text in _FORMAT_TEXTS.items() if text == found), None)


class FileSession:
    """Session of a FileRegistry."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def id(self) -> str:
        return self._lease.id

    @property
    def state(self) -> SessionState:
        if self._lease.is_expired:
            return "expired"
        return "alive"

    @property
    def timeout_ms(self) -> int:
        return self._lease.record.max_poll_interval_ms

    @property
    def has_lease(self) -> bool:
        # A process that ends a session renames its file first.
        return not self._lease.is_expired


class _OuterMissingError(Exception):
    """A parent in another domain must be created first. `names` are its names."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names = names


class FileRegistry(Closeable):
    """Registry of files; see protocol.Registry.

    open_registry() creates it. Several threads may use it. These fields change, under
    `_mutex`: `_lease` and `_lock` (None when closed or forked), `_is_busy` (inside a
    change), `_held` (the domain that holding() has locked), and `_known` (maps the file
    of a node to the creation id and the version that are durable).
    """

    def __init__(
        self,
        fs: SharedFS,
        root: str,
        facts: SessionRecord | None,
        permissions: tuple[int, int],
        lock_timeout_ms: int,
        layout: Layout,
    ) -> None:
        self.path = root
        self._layout = layout
        self._fs = fs
        self._forks = fs.forks
        self._for_directories, self._for_files = permissions
        self._lock_timeout_ms = lock_timeout_ms
        self._mutex = threading.RLock()
        self._sessions = Sessions(fs, posixpath.join(root, DIRECTORY))
        self._observer = Observer()
        self._known: dict[str, tuple[bytes, int]] = {}
        self._is_busy = False
        self._held: str | None = None
        self._is_closed = False
        self._lock: int | None = None
        self._lease: Lease | None = None
        if facts is not None:
            self._lock = fs.open(posixpath.join(root, _LOCK), write=True)
            try:
                self._lease = Lease.create(
                    fs, self._sessions.directory, facts, self._for_files
                )
            except BaseException:
                fs.close(self._lock)
                raise
        fs.after_fork(self._forget)

    def __repr__(self) -> str:
        if self._is_closed:
            state = "closed"
        elif self._lease is None:
            state = "read-only"
        else:
            state = f"session {self._lease.id}"
        return f"<FileRegistry {self.path}, {state}>"

    def __del__(self) -> None:
        if getattr(self, "_lease", None) is not None and self._fs.forks == self._forks:
            warnings.warn(
                f"registry {self.path} was not closed",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            self._release()

    # -- reading -----------------------------------------------------------------------

    def get(self, path: str) -> Node:
        names = node_names(path)
        self._check_open()
        found = self._read_node(names)
        if found is None:
            raise NodeNotFoundError("no such node", path=path)
        slot = found[1]
        return Node(slot.value, slot.version, slot.session)

    def get_many(self, paths: Iterable[str]) -> dict[str, Node | CorruptRegistryError]:
        found: dict[str, Node | CorruptRegistryError] = {}
        for path in paths:
            try:
                found[path] = self.get(path)
            except NodeNotFoundError:
                continue
            except CorruptRegistryError as error:
                found[path] = error
        return found

    def children(self, path: str) -> list[str]:
        names = split(path)
        self._check_open()
        return sorted(self._children(names))

    def watch(self, paths: Iterable[str], *, children: Iterable[str] = ()) -> FileWatch:
        self._check_open()
        values = [node_names(path) for path in paths]
        parents = [split(path) for path in children]
        directories = {self._directory(names[:-1]) for names in values} | {
            self._directory(each) for each in parents
        }
        return FileWatch(
            self._fs,
            self.path,
            directories,
            self._sessions.directory,
            lambda: self._state(values, parents),
        )

    def _state(self, values: list[Names], parents: list[Names]) -> object:
        """Return a value that differs after each change of these nodes."""
        versions: list[tuple[bytes, int] | str | None] = []
        for names in values:
            try:
                found = self._read_node(names)
            except (CorruptRegistryError, UnsupportedRegistryError) as error:
                versions.append(str(error))  # get() raises it
                continue
            if found is None:
                versions.append(None)
            else:
                head, slot = found
                # A node that was deleted and created again has another id.
                versions.append((head.creation, slot.version))
        return versions, [sorted(self._children(names)) for names in parents]

    @property
    def session(self) -> FileSession:
        return FileSession(self._writing())

    @property
    def boot_id(self) -> str:
        """Id of the machine's boot. Processes that wrote under another id have ended."""
        return self._fs.boot().boot_id.hex()

    def is_alive(self, session: str) -> bool:
        """Return whether the process of a session lives."""
        return self._sessions.is_alive(session)

    @property
    def sessions_directory(self) -> str:
        """The directory with an open file of each live session."""
        return self._sessions.directory

    def directory_of(self, path: str) -> str:
        """Return the directory of a node's file, for watching it."""
        return posixpath.dirname(self._file(node_names(path)))

    def sessions(self) -> list[SessionInfo]:
        """Return all sessions that have a file."""
        self._check_open()
        return self._sessions.all()

    def stuck(self) -> list[str]:
        """Return the ids of sessions whose owner has not called poll() for its
        max_poll_interval_ms.

        Call this method repeatedly, more often than every third of the shortest
        interval, because it compares the counts of its own calls.
        """
        self._check_open()
        with self._mutex:
            return self._observer.find_stuck(
                self._fs.monotonic_ms(), self._sessions.all()
            )

    def end_stuck_sessions(self) -> list[str]:
        """End the sessions that stuck() returns, and return their ids."""
        stuck = self.stuck()
        for session in stuck:
            self.expire(session)
        return stuck

    def sync(self) -> None:
        """Do nothing: a change is visible to all processes when it is made."""
        self._check_open()

    def _directory(self, names: Names) -> str:
        """Return the directory of the children of a node."""
        # No name begins with a slash, so this is posixpath.join(), which takes 2 us.
        return "/".join((self.path, *map(file_name, names)))

    def _file(self, names: Names) -> str:
        return self._directory(names) + SUFFIX

    def _read_node(self, names: Names) -> tuple[NodeHeader, Slot] | None:
        """Read a node; return None if it does not exist."""
        return self._read_valid(self._file(names))

    def _read_valid(
        self, file: str, living: str | None = None, handle: int | None = None
    ) -> tuple[NodeHeader, Slot] | None:
        """Read the node in a file, and return None if the node is not valid.

        A node is not valid if its session is over. A file that is never synced may be
        damaged, because a power cut leaves such files; its node is not valid either.
        `living` is a session that is not checked, and `handle` is the file if it is
        open.
        """
        try:
            if handle is None:
                found = self._read(file)
            else:
                found = read_file(self._fs, handle, file)
        except CorruptRegistryError as error:
            # Names of the layout are stored as files of the same names.
            names = tuple(
                posixpath.relpath(file, self.path).removesuffix(SUFFIX).split("/")
            )
            if not self._layout.is_never_synced(names):
                raise
            log_line(
                "registry",
                WARNING,
                "a node that is not synced is damaged, and counts as none: %s",
                error,
            )
            return None
        if found is None:
            return None
        session = found[1].session
        if session is not None and session == living:
            return found
        if session is None or self._sessions.is_alive(session):
            return found
        return None

    def _read(self, file: str) -> tuple[NodeHeader, Slot] | None:
        try:
            handle = self._fs.open(file)
        except FileNotFoundError:
            return None
        try:
            return read_file(self._fs, handle, file)
        finally:
            self._fs.close(handle)

    def _children(self, names: Names) -> Generator[str]:
        directory = self._directory(names)
        try:
            files = self._fs.listdir(directory)
        except FileNotFoundError:
            return
        for file in files:
            if not file.endswith(SUFFIX):
                continue
            path = posixpath.join(directory, file)
            try:
                found = self._read_valid(path)
            except (CorruptRegistryError, UnsupportedRegistryError):
                name = node_file.node_name(file.removesuffix(SUFFIX))
                if name is None:  # only the head has the name
                    raise
                # The caller gets the error of this node from get(). It must not hide
                # the other nodes.
                yield name
                continue
            if found is not None:
                yield self._name(path, found[0])

    def _name(self, path: str, head: NodeHeader) -> str:
        """Return the name of a node from the name of its file, or from its head if the
        name is too long for a file.
        """
        file = posixpath.basename(path).removesuffix(SUFFIX)
        if node_file.is_hashed(file):
            name = head.name
        else:
            name = node_file.node_name(file)
        if name is None or file_name(name) != file:
            raise CorruptRegistryError(
                "the name of the file is not one of a node", path=path, found=head.name
            )
        return name

    # -- changing ----------------------------------------------------------------------

    def create(self, path: str, value: bytes = b"", *, ephemeral: bool = False) -> int:
        names = node_names(path)
        check_value(value, path)
        kind = self._layout.kind_of(names)
        if ephemeral:
            kind = NodeKind.EPHEMERAL

        def make() -> int:
            if self._read_node(names) is not None:
                raise NodeExistsError("the node exists", path=path)
            self._make_node(names, bytes(value), kind)
            return 0

        return self._change(names, make)

    def set(self, path: str, value: bytes, *, version: int = ANY) -> int:
        names = node_names(path)
        check_value(value, path)

        def replace() -> int:
            # One handle to read and to write: opening takes an eighth of a set().
            try:
                handle = self._fs.open(self._file(names), write=True)
            except FileNotFoundError:
                raise NodeNotFoundError("no such node", path=path) from None
            try:
                found = self._expected(names, path, version, handle)
                return self._write_to(handle, names, *found, bytes(value))
            finally:
                self._fs.close(handle)

        return self._change(names, replace)

    def write_many(self, writes: Sequence[NodeWrite]) -> list[int | WriteRefusal]:
        results: list[int | WriteRefusal] = []
        for write in writes:
            try:
                if write.version is None:
                    results.append(self.create(write.path, write.value))
                else:
                    results.append(
                        self.set(write.path, write.value, version=write.version)
                    )
            except (NodeExistsError, NodeNotFoundError, BadVersionError) as error:
                results.append(error)
        return results

    def delete(self, path: str, *, version: int = ANY) -> None:
        names = node_names(path)
        check_deletable(names, path)

        def remove() -> None:
            head, _ = self._expected(names, path, version)
            if next(self._children(names), None) is not None:
                raise NodeNotEmptyError("the node has children", path=path)
            self._remove(names, head.kind)

        self._change(names, remove)

    def update(
        self, path: str, change: Callable[[bytes | None], bytes | None]
    ) -> Node | None:
        names = node_names(path)

        def replace() -> Node | None:
            found = self._read_node(names)
            if found is None:
                value = change(None)
                if value is None:
                    return None
                check_value(value, path)
                self._make_node(names, bytes(value), self._layout.kind_of(names))
                return Node(bytes(value), 0)
            slot = found[1]
            value = change(slot.value)
            if value is None:  # keep the present value
                return Node(slot.value, slot.version, slot.session)
            check_value(value, path)
            return Node(
                bytes(value), self._write(names, *found, bytes(value)), slot.session
            )

        return self._change(names, replace)

    @contextlib.contextmanager
    def holding(self, path: str) -> Generator[None]:
        """Lock the domain of a path for the duration of the `with` block.

        Inside the block, no other session changes the domain, and this session is not
        expired. Use it for several changes that other processes must see as one, or for
        another operation that depends on the registry, such as a commit of a group's
        offsets. Inside the block, only nodes of this domain may be changed. Keep the
        block short, because other processes wait.
        """
        domain = self._layout.domain_of(node_names(path))
        with self._changing(domain):
            # Changes inside the block may call _changing() again, which finds the
            # domain locked.
            before = self._held
            self._held = domain
            self._is_busy = False
            try:
                yield
            finally:
                self._held = before
                self._is_busy = True

    def poll(self) -> None:
        """Record that this session's owner is not stuck; see max_poll_interval_ms.

        The cost is one small write.
        """
        with self._mutex:
            lease = self._writing()
            if lease.is_expired:
                raise self._expired(lease)
            facts = lease.record
            lease.rewrite(attrs.evolve(facts, polls=facts.polls + 1))

    def _change(self, names: Names, act: Callable[[], Result]) -> Result:
        """Make a change under the lock of its domain."""
        domain = self._layout.domain_of(names)
        while True:
            try:
                with self._changing(domain):
                    return act()
            except _OuterMissingError as missing:
                # The parent, such as /consumers, is in a separate domain. Two domains
                # are never locked at once, so the parent is created first and the
                # change is retried.
                outer = missing.names
                with self._changing(self._layout.domain_of(outer)):
                    if self._read_node(outer) is None:
                        self._make_node(outer, b"", NodeKind.PERSISTENT)

    @contextlib.contextmanager
    def _changing(self, domain: str) -> Generator[None]:
        """Hold the lock of a domain and the gate of this session, which is not expired."""
        with self._mutex:
            lease = self._writing()
            if self._is_busy or self._held not in (None, domain):
                raise RegistryError(
                    "the registry was used during a change by the same thread",
                    path=self.path,
                )
            self._is_busy = True
            try:
                # The lock of the domain and the gate are already held.
                if self._held is not None:
                    yield
                    return
                with self._locked(domain):
                    if not lease.enter(self._lock_timeout_ms):
                        raise RegistryLockedError(
                            "this session is being declared over", path=self.path
                        )
                    try:
                        if lease.is_expired:
                            raise self._expired(lease)
                        yield
                    finally:
                        lease.leave()
            finally:
                self._is_busy = False

    @contextlib.contextmanager
    def _locked(self, domain: str) -> Generator[None]:
        assert self._lock is not None
        byte = domain_byte(domain)
        if not self._fs.lock_byte(self._lock, byte, timeout_ms=self._lock_timeout_ms):
            pids = self._sessions.changing()
            who = "another process"
            if pids:
                who = f"process {', '.join(map(str, pids))}"
            raise RegistryLockedError(
                f"{who} has been changing this domain for more than {self._lock_timeout_ms} ms; it may be stopped",
                path=posixpath.join(self.path, domain),
                pids=pids,
            )
        try:
            yield
        finally:
            self._fs.unlock_byte(self._lock, byte)

    def _expired(self, lease: Lease) -> SessionExpiredError:
        return SessionExpiredError(
            "this session was declared over; open the registry again", path=lease.id
        )

    def _expected(
        self, names: Names, path: str, version: int, handle: int | None = None
    ) -> tuple[NodeHeader, Slot]:
        """Return the node that a change replaces or deletes, under the lock.

        `handle` is the node's file if it is open.

        Raises:
            NodeNotFoundError: the node does not exist.
            BadVersionError: the node has another version.
        """
        # _changing() has just checked this session, and holds its gate. In a block of
        # holding(), the last check may be old.
        living = None
        if self._held is None:
            living = self._writing().id
        found = self._read_valid(self._file(names), living, handle)
        if found is None:
            raise NodeNotFoundError("no such node", path=path)
        if version not in (ANY, found[1].version):
            raise BadVersionError(
                "the node was changed",
                path=path,
                expected=version,
                found=found[1].version,
            )
        return found

    def _make_node(self, names: Names, value: bytes, kind: NodeKind) -> None:
        """Create a node, under the lock.

        An existing file is replaced: it is torn, or its session is over.
        """
        self._make_parents(names)
        file = self._file(names)
        creation = self._fs.random_bytes(16)
        head = NodeHeader(
            creation, kind, name=node_file.name_in_header(names[-1])
        ).with_capacity_for(value)
        if kind is NodeKind.PERSISTENT:
            self._put(file, head, Slot(0, value))
            self._sync_names(names)
            self._remember(file, head, 0)
            return
        session = None
        if kind is NodeKind.EPHEMERAL:
            lease = self._writing()
            session = lease.id
            domain = self._layout.domain_of(names)
            domains = lease.record.domains
            if domains is not None and domain not in domains:
                # The record is written first, so that the process that ends this
                # session finds the node.
                lease.rewrite(self._facts_with(lease, (*domains, domain)))
        # The file is torn, or its session is over.
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(file)
        # No temporary name is needed: a process that is killed before or during this
        # one write leaves a file that is not a node.
        handle = self._fs.open(
            file, write=True, create=True, exclusive=True, permissions=self._for_files
        )
        try:
            self._fs.pwrite(
                handle, node_file.new_file(head, Slot(0, value, session)), 0
            )
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.unlink(file)
            raise
        finally:
            self._fs.close(handle)

    def _facts_with(self, lease: Lease, domains: tuple[str, ...]) -> SessionRecord:
        """Return the facts of this session with these domains, of which the last is new.

        If the facts do not fit, domains in which the session no longer has nodes are
        omitted. If the remaining domains take more than half of the record, the facts
        have no list of domains.
        """
        facts = attrs.evolve(lease.record, domains=domains)
        if lease.holds(facts):
            return facts
        # Only this session creates its nodes, and only under the mutex, so none can
        # appear during this check.
        *others, last = domains
        kept = [
            name
            for name in others
            if any(self._session_of(file) == lease.id for file in self._files_of(name))
        ]
        facts = attrs.evolve(facts, domains=(*kept, last))
        if lease.holds(facts, 2):
            return facts
        return attrs.evolve(facts, domains=None)

    def _make_parents(self, names: Names) -> None:
        """Create the missing parents of a node, under the lock.

        Raises:
            InvalidNodeError: a parent is an ephemeral node.
        """
        for depth in range(len(names) - 1, 0, -1):
            found = self._read_node(names[:depth])
            if found is not None:
                if found[1].session is not None:
                    raise InvalidNodeError(
                        "an ephemeral node has no children",
                        path="/" + "/".join(names[:depth]),
                    )
                break
        else:
            depth = 0
        # Parents below this depth are missing.
        for size in range(depth + 1, len(names)):
            parent = names[:size]
            if self._layout.domain_of(parent) != self._layout.domain_of(names):
                raise _OuterMissingError(parent)
            self._make_node(parent, b"", self._layout.kind_of(parent))
        if len(names) > 1:
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(
                    self._directory(names[:-1]), permissions=self._for_directories
                )

    def _put(self, file: str, head: NodeHeader, slot: Slot) -> None:
        """Replace the file of a node.

        The file of a persistent node is synced before it gets its name.
        """
        unfinished = file + UNFINISHED
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(unfinished)
        handle = self._fs.open(
            unfinished,
            write=True,
            create=True,
            exclusive=True,
            permissions=self._for_files,
        )
        try:
            self._fs.pwrite(handle, node_file.new_file(head, slot), 0)
            if head.kind is NodeKind.PERSISTENT:
                self._fs.fdatasync(handle)
            self._fs.rename(unfinished, file)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.unlink(unfinished)
            raise
        finally:
            self._fs.close(handle)

    def _write(self, names: Names, head: NodeHeader, slot: Slot, value: bytes) -> int:
        """Write the next version of an existing node, under the lock; return its number."""
        handle = self._fs.open(self._file(names), write=True)
        try:
            return self._write_to(handle, names, head, slot, value)
        finally:
            self._fs.close(handle)

    def _write_to(
        self, handle: int, names: Names, head: NodeHeader, slot: Slot, value: bytes
    ) -> int:
        """Do the work of _write() with the open file of the node."""
        file = self._file(names)
        new = Slot(slot.version + 1, value, slot.session)
        is_synced = head.kind is NodeKind.PERSISTENT
        if not head.holds(value):
            self._put(file, head.with_capacity_for(value), new)
            if is_synced:
                self._sync_names(names)
                self._remember(file, head, new.version)
            return new.version
        if is_synced and self._known.get(file) != (head.creation, slot.version):
            # The process that wrote this version may have been killed before its
            # sync. A power cut could then leave only the older slot, which is
            # overwritten next. Therefore sync the newer slot first.
            self._fs.fdatasync(handle)
            self._sync_names(names)
        self._fs.pwrite(handle, new.pack(head), head.place(new.version))
        if is_synced:
            self._known.pop(file, None)
            self._sync(handle, head, new)
            self._remember(file, head, new.version)
        return new.version

    def _sync(self, handle: int, head: NodeHeader, new: Slot) -> None:
        """Sync a version that was just written; invalidate it if the sync fails.

        Otherwise the version would later appear to be durable, and the next writer would
        overwrite the previous version.
        """
        try:
            self._fs.fdatasync(handle)
        except StorageWriteError:
            with contextlib.suppress(Exception):
                self._fs.pwrite(
                    handle, bytes(len(new.pack(head))), head.place(new.version)
                )
            raise

    def _sync_names(self, names: Names) -> None:
        """Make the names of a node and of its parents durable."""
        for depth in range(len(names) - 1, -1, -1):
            self._fs.sync_dir(self._directory(names[:depth]))

    def _remember(self, file: str, head: NodeHeader, version: int) -> None:
        if len(self._known) >= _MAX_CACHED_NODES:
            self._known.clear()
        self._known[file] = (head.creation, version)

    def _remove(self, names: Names, kind: NodeKind) -> None:
        """Remove a node without children, under the lock."""
        # Children whose sessions are over may still have files.
        self._purge(self._directory(names))
        self._fs.unlink(self._file(names))
        self._known.pop(self._file(names), None)
        if kind is NodeKind.PERSISTENT:
            self._fs.sync_dir(self._directory(names[:-1]))

    def _purge(self, directory: str) -> None:
        """Remove a directory without nodes of live sessions."""
        try:
            names = self._fs.listdir(directory)
        except FileNotFoundError:
            return
        for name in sorted(names):
            path = posixpath.join(directory, name)
            if self._fs.is_directory(path):
                self._purge(path)
            elif name.endswith(SUFFIX + UNFINISHED) or (
                name.endswith(SUFFIX) and self._read_valid(path) is None
            ):
                self._fs.unlink(path)
            else:
                raise CorruptRegistryError(
                    "a file that belongs to no node of its directory", path=path
                )
        self._fs.rmdir(directory)

    # -- the end of sessions -----------------------------------------------------------

    def expire(self, session: str) -> None:
        """Declare a session over, whether its process lives or not.

        When this method returns, the session makes no more changes, and its nodes are
        removed.

        Raises:
            RegistryLockedError: the process of the session was stopped during a change.
                The session is over nevertheless, and its nodes no longer exist; clean()
                removes their files later.
        """
        with self._mutex:
            self._writing()
            self._end(session)

    def _end(self, session: str) -> None:
        domains = self._sessions.declare_over(session, self._lock_timeout_ms)
        self._remove_nodes(session, domains)
        self._sessions.forget(session)

    def _remove_nodes(self, session: str, domains: Iterable[str] | None) -> None:
        """Remove the nodes of a session.

        `domains` holds the domains in its record, or is None if the record cannot be
        read.
        """
        if domains is None:
            domains = self._all_domains()
        for domain in domains:
            with self._locked(domain):
                self._sweep(domain, lambda file: self._session_of(file) == session)

    def _session_of(self, file: str) -> str | None:
        """Return the session of the node in a file.

        Return None also for a damaged file, which must not prevent the end of another
        session.
        """
        try:
            found = self._read(file)
        except (CorruptRegistryError, UnsupportedRegistryError):
            return None
        if found is None:
            return None
        return found[1].session

    def _all_domains(self) -> list[str]:
        names = [
            name for name in self._fs.listdir(self.path) if not name.startswith(".")
        ]
        for parent in self._layout.parents_of_domains:
            with contextlib.suppress(FileNotFoundError):
                names += [
                    posixpath.join(*parent, name)
                    for name in self._fs.listdir(self._directory(parent))
                ]
        return sorted(
            {name.removesuffix(UNFINISHED).removesuffix(SUFFIX) for name in names}
        )

    def _sweep(self, domain: str, is_garbage: Callable[[str], bool]) -> None:
        """Unlink garbage and unfinished files of a domain, under its lock."""
        for file in self._files_of(domain):
            if file.endswith(UNFINISHED) or is_garbage(file):
                self._fs.unlink(file)

    def _files_of(self, domain: str) -> list[str]:
        """Return the files of the nodes of a domain, including unfinished files."""
        place = posixpath.join(self.path, domain)
        files = [
            file
            for file in (place + SUFFIX, place + SUFFIX + UNFINISHED)
            if self._fs.exists(file)
        ]
        # The directories below these belong to groups or topics, which are domains of
        # their own.
        others = {self._directory(domain) for domain in self._layout.parents_of_domains}
        waiting = [place]
        while waiting:
            directory = waiting.pop()
            if directory in others:
                continue
            with contextlib.suppress(FileNotFoundError):
                for name in self._fs.listdir(directory):
                    path = posixpath.join(directory, name)
                    if name.endswith((SUFFIX, SUFFIX + UNFINISHED)):
                        files.append(path)
                    elif self._fs.is_directory(path):
                        waiting.append(path)
        return files

    def clean(self) -> list[str]:
        """Remove the files of sessions that are over, and unfinished files.

        Return the ids of the sessions. These files only use space. Call this method from
        time to time in one process, such as the process that holds /controller.
        """
        with self._mutex:
            self._writing()
            over = [info.id for info in self._sessions.all() if info.state != "alive"]
            for session in over:
                self._end(session)
            for domain in self._all_domains():
                with self._locked(domain):
                    self._sweep(domain, lambda file: self._read_valid(file) is None)
            for directory in (self.path, self._sessions.directory):
                self._remove_unfinished(directory)
            return over

    def _remove_unfinished(self, directory: str) -> None:
        """Remove files of processes that were killed while they opened the registry."""
        for name in self._fs.listdir(directory):
            path = posixpath.join(directory, name)
            if name.endswith(UNFINISHED) and not name.endswith(SUFFIX + UNFINISHED):
                with contextlib.suppress(FileNotFoundError):
                    is_old = (
                        self._fs.now_ms() - self._fs.modified_ms(path) > _GARBAGE_MS
                    )
                    if is_old and not self._sessions.is_alive(name):
                        self._fs.unlink(path)

    def close(self) -> None:
        """Delete this session's ephemeral nodes and end the session.

        A second call does nothing.
        """
        with self._mutex:
            lease = self._lease
            if lease is None or self._fs.forks != self._forks:
                self._is_closed = True
                return
            try:
                self._is_closed = (
                    True  # inside: an interrupt after it still releases the lease
                )
                if not lease.is_expired:
                    self._end(lease.id)
            except RegistryLockedError:
                pass  # the session is over, so its nodes no longer exist; clean() removes their files
            finally:
                self._release()

    def _release(self) -> None:
        lock = self._lock
        lease = self._lease
        self._lock = None
        self._lease = None
        if lease is not None:
            lease.close()
        if lock is not None:
            self._fs.close(lock)

    def _forget(self) -> None:
        """Drop the session and the locks in a forked child.

        They belong to the parent, and the child must not keep them after its end.
        """
        self._mutex = threading.RLock()
        self._release()

    def _check_open(self) -> None:
        if self._fs.forks != self._forks:
            raise ForkedWriterError(
                "a registry cannot be used after a fork; open it again in the child",
                path=self.path,
            )
        if self._is_closed:
            raise RegistryClosedError("the registry was closed", path=self.path)

    def _writing(self) -> Lease:
        self._check_open()
        if self._lease is None:
            raise ReadOnlyLogError("the registry was opened read-only", path=self.path)
        return self._lease
