"""Creates the group and transaction coordinators of a directory that no broker of this
process serves.

Rules:
- Each coordinator is created by the first caller that needs it, reads its stored state,
  and exists until the directory is closed.
- If a broker of this process serves the directory, the broker runs both coordinators.

logcore.coordination makes the decisions; local_groups.py, shared_groups.py and
transactions.py execute them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Final, cast

from logcore.claim import Claim
from logcore.errors import ConsumerStateError
from logcore.fs import FS, SharedFS
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC

if TYPE_CHECKING:
    from logcore.coordinators.process_groups import ProcessGroups
    from logcore.coordinators.transactions import TransactionCoordinator
    from logcore.directory.controller import Controller
    from logcore.directory.group_settings import GroupSettings
    from logcore.directory.interface import HostDirectory
    from logcore.registry import FileRegistry


#: Interval of the work in run_due_work().
_CHECK_MS: Final = 1_000
#: Interval of the deletion of expired offsets, like Kafka's
#: offsets.retention.check.interval.ms.
_EXPIRY_CHECK_MS: Final = 600_000


class Coordinators:
    """The coordinators of one directory. Any thread may call its methods."""

    def __init__(self, fs: FS, claim: Claim | None) -> None:
        self._fs = fs
        self._claim = claim
        self._lock = threading.RLock()
        # Written under the lock.
        self._groups: ProcessGroups | None = None
        self._transactions: TransactionCoordinator | None = None
        self._registry: FileRegistry | None = None
        self._controller: Controller | None = None
        self._group_settings: GroupSettings | None = None
        #: Monotonic time of the last check of transactions. The first check is due at
        #: once.
        self._checked_ms = fs.monotonic_ms() - _CHECK_MS
        #: Monotonic time of the last deletion of expired offsets.
        self._expired_ms = fs.monotonic_ms()

    @property
    def has_groups(self) -> bool:
        """Whether groups() was called since the directory was opened."""
        return self._groups is not None

    def groups(self, directory: HostDirectory) -> ProcessGroups:
        """Return the groups whose members are consumers of this process, or of all
        processes that share the directory.

        Raises:
            ConsumerStateError: a broker of this process serves the directory.
            LogcoreError: `__consumer_offsets` cannot be read.
        """
        from logcore.coordinators.local_groups import LocalGroups
        from logcore.coordinators.shared_groups import SharedGroups

        with self._lock:
            if directory.host.has_coordinator:
                raise ConsumerStateError(
                    "a broker of this process serves the directory, and coordinates its groups: use a Kafka client",
                    path=directory.path,
                )
            if self._groups is None:
                if directory.is_shared:
                    self._groups = SharedGroups(
                        self._fs, directory, self.registry(directory)
                    )
                else:
                    self._groups = LocalGroups(self._fs, directory)
            return self._groups

    def group_settings(self, directory: HostDirectory) -> GroupSettings:
        """Return the settings of single groups of the consumer protocol.

        Raises:
            CorruptLogError, StorageReadError: the file is damaged or cannot be read.
        """
        from logcore.directory.group_settings import GroupSettings

        with self._lock:
            if self._group_settings is None:
                self._group_settings = GroupSettings(self._fs, directory.path)
            return self._group_settings

    def registry(self, directory: HostDirectory) -> FileRegistry:
        """Return the registry of the directory. The first call opens it.

        Raises:
            LogcoreError: the registry could not be opened.
        """
        from logcore.registry import open_registry

        with self._lock:
            if self._registry is None:
                self._registry = open_registry(
                    directory.path, fs=cast(SharedFS, self._fs)
                )
            return self._registry

    def present_registry(self, directory: HostDirectory) -> FileRegistry | None:
        """Return the registry like registry(), or None if it does not exist."""
        from logcore.registry import registry_path

        # open_registry() would create the registry.
        has_registry = self._registry is not None or self._fs.exists(
            registry_path(directory.path)
        )
        if has_registry:
            return self.registry(directory)
        return None

    def forget_registered(
        self, directory: HostDirectory, topics: Collection[str]
    ) -> None:
        """Delete the offsets of topics in the registry, if it exists.

        Raises:
            RegistryError: the registry cannot be read or changed.
        """
        from logcore.registry import offsets

        registry = self.present_registry(directory)
        if registry is not None:
            offsets.forget_topics(registry, topics)

    def forget_stored(self, directory: HostDirectory, topics: set[str]) -> None:
        """Delete the offsets of topics in the log and the registry.

        This is for deletions that a crash interrupted. It needs no coordinator and
        creates none.

        Raises:
            LogcoreError: the offsets cannot be read or deleted.
        """
        from logcore.coordinators.process_groups import forget_stored

        forget_stored(directory, topics)
        self.forget_registered(directory, topics)

    def control(self, directory: HostDirectory) -> None:
        """Update the registry, in the one process that does the maintenance.

        Raises:
            LogcoreError: the registry could not be read or changed.
        """
        from logcore.directory.controller import Controller

        with self._lock:
            registry = self.registry(directory)
            controller = self._controller
            if controller is None:
                controller = Controller(self._fs, directory)
                self._controller = controller
        # Without the lock, because the work reads and writes the disk.
        controller.run_due_work(registry)

    def transactions(self, directory: HostDirectory) -> TransactionCoordinator:
        """Return the coordinator of the transactions of this process, or of all processes
        that share the directory.
        """
        from logcore.coordinators.transactions import TransactionCoordinator

        with self._lock:
            if self._transactions is None:
                # Only a read-only directory has no claim.
                assert self._claim is not None
                self._transactions = TransactionCoordinator(
                    self._fs,
                    directory,
                    self._claim.deciding,
                    self._transaction_ended,
                    self._clock_of(directory),
                )
            return self._transactions

    def _clock_of(self, directory: HostDirectory) -> int:
        """Return the difference of wall clock and monotonic clock for transactions.

        Raises:
            LogcoreError: the registry could not be read or changed.
        """
        from logcore.registry.views import agree_on_clock

        clock_ms = self._fs.now_ms() - self._fs.monotonic_ms()
        if not directory.is_shared:
            return clock_ms
        registry = self.registry(directory)
        return agree_on_clock(registry, registry.boot_id, clock_ms)

    def _transaction_ended(self, producer_id: int, commit: bool) -> None:
        """Notify the groups of a producer's marker in `__consumer_offsets`.

        Groups created later read the marker themselves.
        """
        with self._lock:
            if self._groups is not None:
                self._groups.transaction_ended(producer_id, commit=commit)

    def run_due_work(self, directory: HostDirectory) -> None:
        """End transactions past their timeout, and delete expired offsets.

        Transactions are checked at most once a second, offsets every ten minutes.
        Raises the errors of the coordinators.
        """
        now_ms = self._fs.monotonic_ms()
        if directory.host.has_coordinator or now_ms - self._checked_ms < _CHECK_MS:
            return
        self._checked_ms = now_ms
        if TRANSACTIONS_TOPIC in directory:
            self.transactions(directory).end_overdue()
        if now_ms - self._expired_ms >= _EXPIRY_CHECK_MS:
            self._expired_ms = now_ms
            if OFFSETS_TOPIC in directory:
                self.groups(directory).expire_offsets()

    def close(self) -> None:
        """Close the groups and the registry.

        This does not take the lock: its holder may be opening logs, which needs the
        lock of the directory.
        """
        try:
            if self._groups is not None:
                self._groups.close()
        finally:
            if self._registry is not None:
                self._registry.close()
