"""Snapshots of a closed log directory, and rollbacks to them.

Rules:
- A snapshot is a copy of all files of the directory and of its registry. It is stored
  beside the directory. Segments that are not the last of their log are hard links,
  because the log never changes them in place.
- restore() replaces the files that differ from the copy, creates those that are missing,
  and removes all others.
- The allocated producer ids and the trusted clock are not restored. If an id was
  allocated twice, new batches would be treated as duplicates.

The caller closes the directory before, and opens it afterwards. The code that opens a
directory then restores logs, topics, groups, transactions and users.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping

import attrs

from logcore.coordination.transaction_effects import Initialize
from logcore.errors import LogNotFoundError
from logcore.format.transaction_records import Status, StoredTransaction
from logcore.metadata.checkpoint import CLOCK, PRODUCER_IDS, Key
from logcore.metadata.filenames import (
    TRANSACTIONS_TOPIC,
    base_offset_of,
    partition_of,
)
from logcore.partition.coordinator_append import forget_idle_producers
from netshim.broker import Broker

#: Files that a rollback does not change. The lock belongs to the process.
_NEVER_RESTORED = frozenset((CLOCK, PRODUCER_IDS, ".lock"))
#: Files of a snapshot get a time this far in the past. Times have a resolution of some
#: ms, so a change soon after the snapshot could otherwise have the same time.
_SNAPSHOT_AGE_NS = 1_000_000_000
#: Bytes that are copied at once.
_COPY_BYTES = 1 << 20


#: States of a transaction whose producer must be fenced.
_OPEN = frozenset((Status.ONGOING, Status.PREPARE_COMMIT, Status.PREPARE_ABORT))


@attrs.frozen
class _FileState:
    """Properties of a file that show whether it has changed."""

    size_bytes: int
    mtime_ns: int
    inode: int


@attrs.frozen
class ReplacedBroker:
    """The state of a broker whose directory is rolled back."""

    #: The leader epochs of partitions.
    epochs: Mapping[Key, int]
    #: The open transactions by transactional id.
    open_transactions: Mapping[str, StoredTransaction]

    @classmethod
    def of(cls, broker: Broker) -> ReplacedBroker:
        """Read the state of a broker that is being replaced, in the broker's thread."""
        state = broker.state
        stored: dict[str, StoredTransaction] = {}

        def finish(transactions: dict[str, StoredTransaction] | Exception) -> None:
            if not isinstance(transactions, Exception):
                stored.update(transactions)

        state.transactions.find_stored(None, finish)
        return cls(
            {
                key: log.leader_epoch
                for key, log in state.logdir.host.known_logs().items()
            },
            {
                name: transaction
                for name, transaction in stored.items()
                if transaction.status in _OPEN
            },
        )

    def continue_with(self, broker: Broker, changed: set[Key], now_ms: int) -> None:
        """Let clients notice missing records. For the thread of the new broker.

        - The leader epochs of changed partitions rise.
        - Idempotent producers continue with any sequence.
        - Producers with an open transaction are fenced, because its records are missing.
        """
        state = broker.state
        for topic, number in changed:
            if topic not in state.logdir or number not in state.logs.numbers_of(topic):
                continue
            log = state.logdir.partition(topic, number)
            log.begin_epoch(
                max(log.leader_epoch, self.epochs.get((topic, number), 0)) + 1
            )
            forget_idle_producers(log.host.writer)

        def fence(current: dict[str, StoredTransaction] | Exception) -> None:
            if isinstance(current, Exception):
                return  # the log has the reason, and requests are refused
            # An id that is unknown now needs no fence, and must not be created.
            for name, stored in current.items():
                request = Initialize(
                    transactional_id=name, timeout_ms=stored.timeout_ms
                )
                state.transactions.request(request, now_ms, lambda _: None)

        if self.open_transactions and TRANSACTIONS_TOPIC in state.logdir:
            names = self.open_transactions.keys()
            state.transactions.load(
                now_ms, lambda _: state.transactions.find_stored(names, fence)
            )


class DirectorySnapshot:
    """The files of directories at one moment. delete() removes the copy."""

    def __init__(self, roots: list[str]) -> None:
        """Copy directories without a writer. Roots may be missing.

        Raises:
            OSError: a file cannot be read or copied.
        """
        self.roots = roots
        parent, name = os.path.split(os.path.abspath(roots[0]))
        self._copy: str | None = tempfile.mkdtemp(
            prefix=f".{name}.snapshot-", dir=parent
        )
        #: Folders of each root, with the states of their files.
        self._folders: list[dict[str, dict[str, _FileState]]] = []
        try:
            self._copy_roots()
        except BaseException:
            self.delete()
            raise

    def _copy_roots(self) -> None:
        for index, root in enumerate(self.roots):
            folders = _read_folders(root)
            for folder, files in folders.items():
                os.makedirs(self._path(index, folder))
                linked = _complete_segments(files)
                for name, state in files.items():
                    source = os.path.join(root, folder, name)
                    earlier_ns = state.mtime_ns - _SNAPSHOT_AGE_NS
                    # Both files get the earlier time, so that an unchanged file is
                    # recognized.
                    os.utime(source, ns=(earlier_ns, earlier_ns))
                    files[name] = attrs.evolve(state, mtime_ns=earlier_ns)
                    target = self._path(index, folder, name)
                    _copy(source, target, may_link=name in linked)
            self._folders.append(folders)

    def _path(self, index: int, *parts: str) -> str:
        """Return a path in the copy."""
        assert self._copy is not None
        return os.path.join(self._copy, str(index), *parts)

    def restore(self) -> set[Key]:
        """Restore the directories, and return the partitions that had changed.

        Raises:
            LogNotFoundError: the snapshot was deleted.
            OSError: a file cannot be written or removed. A second call completes it.
        """
        if self._copy is None:
            raise LogNotFoundError(
                "the snapshot was deleted", expected="a snapshot of a running broker"
            )
        changed: set[Key] = set()
        for index, root in enumerate(self.roots):
            current = _read_folders(root)
            # Folders that were created after the snapshot, such as those of new topics.
            for folder in current.keys() - self._folders[index].keys():
                shutil.rmtree(os.path.join(root, folder), ignore_errors=True)
            for folder, target in self._folders[index].items():
                current_files = current.get(folder)
                if current_files is None:
                    os.makedirs(os.path.join(root, folder), exist_ok=True)
                    current_files = {}
                if current_files == target:
                    continue
                names = self._restore_folder(index, folder, current_files)
                key = partition_of(folder)
                if key is not None and any(name.endswith(".log") for name in names):
                    changed.add(key)
        return changed

    def _restore_folder(
        self, index: int, folder: str, current_files: Mapping[str, _FileState]
    ) -> list[str]:
        """Restore the files of a folder, and return the names of those that differed."""
        root, saved = self.roots[index], self._folders[index][folder]
        names = [
            name
            for name in {**current_files, **saved}
            if name not in _NEVER_RESTORED
            and current_files.get(name) != saved.get(name)
        ]
        for name in names:
            target = os.path.join(root, folder, name)
            if name in current_files:
                # Never changed in place, because a hard link may be a part of the
                # snapshot.
                os.unlink(target)
            if name in saved:
                copy = self._path(index, folder, name)
                _copy(copy, target, may_link=os.stat(copy).st_nlink > 1)
                # The restored file is a new one. The next restore() compares it with
                # this inode.
                saved[name] = attrs.evolve(saved[name], inode=os.stat(target).st_ino)
        return names

    def delete(self) -> None:
        """Remove the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            shutil.rmtree(copy, ignore_errors=True)


def _read_folders(root: str) -> dict[str, dict[str, _FileState]]:
    """Return the folders below a root, relative to it, with the states of their files."""
    folders: dict[str, dict[str, _FileState]] = {}
    # Relative paths of folders to read. The first is the root itself.
    waiting = [""]
    if not os.path.isdir(root):
        waiting = []
    while waiting:
        folder = waiting.pop()
        files = folders[folder] = {}
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(os.path.join(folder, entry.name))
                else:
                    stat = entry.stat()
                    files[entry.name] = _FileState(
                        stat.st_size, stat.st_mtime_ns, entry.inode()
                    )
    return folders


def _complete_segments(names: Iterable[str]) -> set[str]:
    """Return the files of segments in a folder, except for the last one."""
    segments = [
        name
        for name in names
        if name.endswith(".log") and base_offset_of(name) is not None
    ]
    # Names of segments have 20 digits, so sorted names are sorted offsets.
    return set(sorted(segments)[:-1])


def _copy(source: str, target: str, *, may_link: bool) -> None:
    if may_link:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            pass
        else:
            return
    # shutil.copy2() takes twice as long, because it copies extended attributes too.
    with open(source, "rb") as read, open(target, "wb") as write:
        stat = os.fstat(read.fileno())
        shutil.copyfileobj(read, write, _COPY_BYTES)
        os.fchmod(write.fileno(), stat.st_mode)
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
