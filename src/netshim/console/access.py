"""The user of a page, and the topics, groups and transactions that the user may see.

Rules:
- Without access control lists, every user who may open the console sees everything.
- With them, the console enforces the lists of the broker. DESCRIBE of a topic, a group
  or a transactional id shows it, and READ of a topic shows its messages. A topic that a
  user may not describe gets the same error as a topic that does not exist.
- If the users or the rules cannot be read, no page is shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import attrs

from logcore.errors import LogNotFoundError
from logcore.fs import FS, OS
from netshim.security.acls import (
    CLUSTER_NAME,
    AclIndex,
    AclOperation,
    ResourceType,
)
from netshim.security.stored import SecuritySnapshot, SecurityStore
from netshim.session import ANONYMOUS

#: How long the cached users and rules are used before the files are checked again.
_FRESH_MS: Final = 1_000


@attrs.frozen
class ConsoleViewer:
    """The user of one request."""

    #: Such as "User:alice".
    principal: str = ANONYMOUS
    #: The address of the browser.
    host: str = ""
    #: None if every user may do everything.
    rules: AclIndex | None = None

    def may(
        self, operation: AclOperation, resource_type: ResourceType, name: str
    ) -> bool:
        """Return whether the user may perform an operation on a resource."""
        if self.rules is None:
            return True
        return self.rules.allows(
            self.principal, self.host, operation, resource_type, name
        )

    def may_topic(self, operation: AclOperation, name: str) -> bool:
        """Return whether the user may perform an operation on a topic."""
        return self.may(operation, ResourceType.TOPIC, name)

    def may_see_topic(self, name: str) -> bool:
        """Return whether the user may see that a topic exists."""
        return self.may_topic(AclOperation.DESCRIBE, name)

    def may_see_group(self, name: str) -> bool:
        """Return whether the user may see that a group exists."""
        return self.may(AclOperation.DESCRIBE, ResourceType.GROUP, name)

    def may_see_transactional_id(self, name: str) -> bool:
        """Return whether the user may see that a transactional id exists."""
        return self.may(AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, name)

    def may_see_cluster(self) -> bool:
        """Return whether the user may see the clients, users and errors of a broker."""
        return self.may(AclOperation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME)


@attrs.define
class ConsoleAccess:
    """The users and rules of a console."""

    #: Returns the stored users and rules. It may block, and raises LogcoreError if they
    #: cannot be read.
    read_snapshot: Callable[[], SecuritySnapshot] = SecuritySnapshot
    #: Whether a page needs a login.
    needs_login: bool = False
    #: Whether pages enforce the rules.
    enforces_acls: bool = False
    #: Principals that may do everything.
    super_users: tuple[str, ...] = ()
    #: The index of the latest rules, so that it is built only when the rules change.
    _index: AclIndex | None = None

    @property
    def is_open(self) -> bool:
        """Whether every request sees everything."""
        return not (self.needs_login or self.enforces_acls)

    def viewer(self, principal: str, host: str) -> ConsoleViewer:
        """Return a user with the current rules. May block."""
        if not self.enforces_acls:
            return ConsoleViewer(principal, host)
        rules = tuple(sorted(set(self.read_snapshot().acls)))
        # Threads of pages may build it at the same time. Each uses an index of the
        # current rules.
        index = self._index
        if index is None or index.acls != rules:
            index = self._index = AclIndex(rules, self.super_users)
        return ConsoleViewer(principal, host, index)


class StoredSecurity:
    """Reads the users and rules of a directory, at most once a second.

    The threads of several pages may call one instance at the same time.
    """

    def __init__(self, path: str, fs: FS = OS) -> None:
        self._path = path
        self._fs = fs
        self._lock = threading.Lock()
        self._snapshot = SecuritySnapshot()
        self._read_ms: int | None = None

    def __call__(self) -> SecuritySnapshot:
        """Return the users and rules; none if the directory has no registry.

        Raises:
            LogcoreError: they cannot be read.
        """
        with self._lock:
            now_ms = self._fs.monotonic_ms()
            is_old = self._read_ms is None or now_ms - self._read_ms >= _FRESH_MS
            # While there are no users, the files are read at each call, so that the first
            # user can log in as soon as it has been added.
            if is_old or not self._snapshot.users:
                self._snapshot = self._read()
                self._read_ms = now_ms
            return self._snapshot

    def _read(self) -> SecuritySnapshot:
        try:
            store = SecurityStore(self._path, self._fs, read_only=True)
        except LogNotFoundError:
            return SecuritySnapshot()
        try:
            return store.load()
        finally:
            store.close()
