"""Users, access control lists and quotas as nodes of the registry of a log directory.

| path | value |
|---|---|
| `/config/users/<u>` | settings: a credential for each mechanism, and quotas |
| `/config/users/<u>/clients/<c>` | settings: quotas |
| `/config/clients/<c>`, `/config/ips/<ip>` | settings: quotas |
| `/kafka-acl/<Type>/<name>` | rules with a literal pattern |
| `/kafka-acl-extended/prefixed/<Type>/<name>` | rules for names that begin so |
| `/security/salt_secret` | 32 random bytes |

Settings are `{"version":1,"config":{"SCRAM-SHA-256":"salt=..,stored_key=..,...}}`.
Rules are `{"version":1,"acls":[{"principal":..,"permissionType":"Allow",...}]}`. The
name `<default>` means all entities without quotas of their own.

Rules:
- The paths and values are those of Kafka with ZooKeeper.
- Every change is synced before the function returns. A running broker reads the nodes
  again after a change of any process.
- A damaged node of a user or a quota is reported and skipped: that user cannot log in.
  A damaged node of an access control list is an error, because skipping a DENY rule
  would grant access.

All functions block on the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, cast

import attrs

from logcore.errors import (
    CorruptRegistryError,
    NodeExistsError,
    NodeNotFoundError,
    RegistryError,
)
from logcore.fs import FS, OS, SharedFS
from logcore.registry import Registry, open_registry
from logcore.registry.paths import (
    element,
    element_name,
    pack_config,
    pack_json,
    unpack_config,
    unpack_json,
)
from netshim.security import scram
from netshim.security.acls import Acl, AclOperation, Pattern, Permission, ResourceType
from netshim.security.scram import Credential, CredentialForm

if TYPE_CHECKING:
    from logcore.registry.watching import FileWatch

_log = logging.getLogger("netshim")

USERS: Final = "/config/users"
CLIENTS: Final = "/config/clients"
IPS: Final = "/config/ips"
ACLS: Final = "/kafka-acl"
PREFIXED_ACLS: Final = "/kafka-acl-extended/prefixed"
SALT_SECRET: Final = "/security/salt_secret"
#: Name that means all entities without quotas of their own.
DEFAULT: Final = "<default>"

_TYPE_NAMES: Final = {
    ResourceType.TOPIC: "Topic",
    ResourceType.GROUP: "Group",
    ResourceType.CLUSTER: "Cluster",
    ResourceType.TRANSACTIONAL_ID: "TransactionalId",
    ResourceType.DELEGATION_TOKEN: "DelegationToken",
    ResourceType.USER: "User",
}
_TYPES: Final = {name: kind for kind, name in _TYPE_NAMES.items()}
#: Kafka's names of operations, such as "DescribeConfigs".
OPERATION_NAMES: Final = {
    one: "".join(word.capitalize() for word in one.name.split("_"))
    for one in AclOperation
}
_OPERATIONS: Final = {name: one for one, name in OPERATION_NAMES.items()}
_PERMISSION_NAMES: Final = {Permission.ALLOW: "Allow", Permission.DENY: "Deny"}
_PERMISSIONS: Final = {name: one for one, name in _PERMISSION_NAMES.items()}

#: The user, client id and IP address of a quota. None: the quota does not depend on it.
#: DEFAULT: all that have no quota of their own.
Entity = tuple[str | None, str | None, str | None]


@attrs.frozen
class SecurityFacts:
    """Everything that is stored, at one moment."""

    #: User name -> mechanism -> credential.
    users: Mapping[str, Mapping[str, Credential]] = attrs.Factory(dict)
    acls: tuple[Acl, ...] = ()
    #: Entity -> key -> bound.
    quotas: Mapping[Entity, Mapping[str, float]] = attrs.Factory(dict)
    #: The secret of made-up salts. Empty if none was made.
    salt_secret: bytes = b""
    #: The forms of the credential that each user has for a mechanism. Key "": the
    #: credential that verifies a password of PLAIN.
    forms: Mapping[str, frozenset[CredentialForm]] = attrs.field(init=False, eq=False)

    @forms.default  # pyright: ignore
    def _forms(self) -> Mapping[str, frozenset[CredentialForm]]:
        found: dict[str, set[CredentialForm]] = {}
        for credentials in self.users.values():
            forms = [
                CredentialForm.of(name, credentials[name])
                for name in scram.HASHES
                if name in credentials
            ]
            for form in forms:
                found.setdefault(form.mechanism, set()).add(form)
            for form in forms[:1]:
                found.setdefault("", set()).add(form)
        return {key: frozenset(forms) for key, forms in found.items()}


class SecurityStore:
    """The stored users, rules and quotas of one log directory. Used by one thread."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        fs: FS = OS,
        *,
        read_only: bool = False,
    ) -> None:
        """Open the registry of a log directory.

        It is created if it does not exist, unless `read_only` is true.

        Raises:
            CorruptRegistryError, UnsupportedRegistryError, InvalidConfigError,
                LogNotFoundError: see open_registry().
        """
        self._registry = open_registry(
            directory, read_only=read_only, fs=cast("SharedFS", fs)
        )
        self._watch: FileWatch | None = None
        #: The parents of the watched nodes.
        self._watched: list[str] = []
        self._is_new_watch = False

    # -- reading -----------------------------------------------------------------------

    def load(self) -> SecurityFacts:
        """Read everything.

        Raises:
            CorruptRegistryError: the node of an access control list is damaged, or a
                newer version wrote it.
        """
        registry = self._registry
        users: dict[str, Mapping[str, Credential]] = {}
        quotas: dict[Entity, Mapping[str, float]] = {}
        parents = [USERS, CLIENTS, IPS, ACLS, PREFIXED_ACLS]
        for name, path in _nodes(registry, USERS):
            config = self._config(path)
            credentials = self._credentials(config, path)
            if credentials:
                users[name] = credentials
            self._add_quotas(quotas, (name, None, None), config, path)
            below = f"{path}/clients"
            parents.append(below)
            for client, inner in _nodes(registry, below):
                entity = (name, client, None)
                self._add_quotas(quotas, entity, self._config(inner), inner)
        for name, path in _nodes(registry, CLIENTS):
            self._add_quotas(quotas, (None, name, None), self._config(path), path)
        for name, path in _nodes(registry, IPS):
            self._add_quotas(quotas, (None, None, name), self._config(path), path)
        acls: list[Acl] = []
        for root, pattern in (
            (ACLS, Pattern.LITERAL),
            (PREFIXED_ACLS, Pattern.PREFIXED),
        ):
            for kind_name in registry.children(root):
                kind = _TYPES.get(kind_name)
                if kind is None:
                    raise CorruptRegistryError(
                        "unknown kind of resource", path=f"{root}/{kind_name}"
                    )
                parents.append(f"{root}/{kind_name}")
                for name, path in _nodes(registry, f"{root}/{kind_name}"):
                    acls += _unpack_acls(
                        _value(registry, path), path, kind, pattern, name
                    )
        self._watch_again(parents)
        return SecurityFacts(
            users=users,
            acls=tuple(sorted(acls)),
            quotas=quotas,
            salt_secret=_value(registry, SALT_SECRET),
        )

    def has_changed(self) -> bool:
        """Return whether something may have changed since load(). Does not block."""
        return self._watch is None or self._is_new_watch or self._watch.wait(0)

    def close(self) -> None:
        """Close the registry."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._registry.close()

    def _watch_again(self, parents: list[str]) -> None:
        """Watch the nodes that load() has read.

        An unchanged watch reports changes since the load began. After a new watch, a
        change between the load and the watch would be missed, so has_changed() is True
        once more.
        """
        if parents == self._watched and self._watch is not None:
            self._is_new_watch = False
            return
        if self._watch is not None:
            self._watch.close()
        self._watch = self._registry.watch((), children=parents)
        self._watched = parents
        self._is_new_watch = True

    def _config(self, path: str) -> Mapping[str, str]:
        try:
            data = _value(self._registry, path)
            if not data:
                return {}
            return unpack_config(data, path)
        except RegistryError as error:
            _log.error("%s cannot be read, and has no effect: %s", path, error)
            return {}

    def _credentials(
        self, config: Mapping[str, str], path: str
    ) -> Mapping[str, Credential]:
        found = {}
        for mechanism in scram.HASHES:
            text = config.get(mechanism)
            if text is None:
                continue
            try:
                found[mechanism] = scram.parse_credential(text)
            except (KeyError, ValueError):
                _log.error(
                    "%s: the credential for %s is damaged, so the user cannot log in "
                    "with it",
                    path,
                    mechanism,
                )
        return found

    def _add_quotas(
        self,
        quotas: dict[Entity, Mapping[str, float]],
        entity: Entity,
        config: Mapping[str, str],
        path: str,
    ) -> None:
        values = {}
        for key, text in config.items():
            if key in scram.HASHES:
                continue
            try:
                values[key] = float(text)
            except ValueError:
                _log.error("%s: the quota %s is no number: %r", path, key, text)
        if values:
            quotas[entity] = values

    # -- users -------------------------------------------------------------------------

    def set_credentials(
        self, user: str, changes: Mapping[str, Credential | None]
    ) -> bool:
        """Set the credentials of a user for some mechanisms; None removes one.

        Returns False, and changes nothing, if a credential to remove does not exist.
        """
        self._ensure_salt_secret()
        is_complete = True

        def change(config: dict[str, str]) -> None:
            nonlocal is_complete
            is_complete = all(
                one is not None or mechanism in config
                for mechanism, one in changes.items()
            )
            if not is_complete:
                return
            for mechanism, one in changes.items():
                if one is None:
                    del config[mechanism]
                else:
                    config[mechanism] = scram.format_credential(one)

        self._change_config(f"{USERS}/{element(user)}", change)
        return is_complete

    def _ensure_salt_secret(self) -> None:
        try:
            self._registry.get(SALT_SECRET)
        except NodeNotFoundError:
            secret = os.urandom(32)
            # Another process may create the secret at the same time. The first wins.
            with contextlib.suppress(NodeExistsError):
                self._registry.create(SALT_SECRET, secret)

    # -- quotas ------------------------------------------------------------------------

    def set_quotas(self, entity: Entity, changes: Mapping[str, float | None]) -> None:
        """Set quotas of an entity; None removes one."""

        def change(config: dict[str, str]) -> None:
            for key, value in changes.items():
                if value is None:
                    config.pop(key, None)
                else:
                    config[key] = repr(value)

        self._change_config(_quota_path(entity), change)

    def _change_config(
        self, path: str, change: Callable[[dict[str, str]], None]
    ) -> None:
        def replace(data: bytes | None) -> bytes | None:
            config: dict[str, str] = {}
            if data:
                config = dict(unpack_config(data, path))
            before = dict(config)
            change(config)
            if config == before:
                return None
            return pack_config(config)

        node = self._registry.update(path, replace)
        if node is not None and not (node.value and unpack_config(node.value, path)):
            # A user with quotas for client ids has children, and remains. So does a
            # node that another process has changed since.
            with contextlib.suppress(RegistryError):
                self._registry.delete(path, version=node.version)

    # -- access control lists ----------------------------------------------------------

    def add_acls(self, acls: Iterable[Acl]) -> None:
        """Store rules. A rule that exists is stored once."""
        for path, added in _by_path(acls).items():
            self._change_acls(path, added=added)

    def remove_acls(self, acls: Iterable[Acl]) -> None:
        """Remove rules. A rule that does not exist is ignored."""
        for path, removed in _by_path(acls).items():
            self._change_acls(path, removed=removed)

    def _change_acls(
        self,
        path: str,
        *,
        added: frozenset[Acl] = frozenset(),
        removed: frozenset[Acl] = frozenset(),
    ) -> None:
        kind, pattern, name = _resource_of(path)

        def replace(data: bytes | None) -> bytes | None:
            present = frozenset(_unpack_acls(data or b"", path, kind, pattern, name))
            wanted = (present | added) - removed
            if wanted == present:
                return None
            return _pack_acls(wanted)

        node = self._registry.update(path, replace)
        if node is not None and not _unpack_acls(node.value, path, kind, pattern, name):
            # Another process may have added a rule since.
            with contextlib.suppress(RegistryError):
                self._registry.delete(path, version=node.version)


def _nodes(registry: Registry, parent: str) -> list[tuple[str, str]]:
    """Return (name, path) of the children of a node."""
    return [
        (element_name(child), f"{parent}/{child}")
        for child in registry.children(parent)
    ]


def _value(registry: Registry, path: str) -> bytes:
    try:
        return registry.get(path).value
    except NodeNotFoundError:
        return b""


def _quota_path(entity: Entity) -> str:
    user, client, address = entity
    if address is not None:
        return f"{IPS}/{element(address)}"
    if user is None:
        assert client is not None, entity
        return f"{CLIENTS}/{element(client)}"
    path = f"{USERS}/{element(user)}"
    if client is not None:
        path += f"/clients/{element(client)}"
    return path


def _acl_path(acl: Acl) -> str:
    root = PREFIXED_ACLS if acl.pattern == Pattern.PREFIXED else ACLS
    return f"{root}/{_TYPE_NAMES[ResourceType(acl.resource_type)]}/{element(acl.name)}"


def _resource_of(path: str) -> tuple[ResourceType, Pattern, str]:
    parent, _, name = path.rpartition("/")
    root, _, kind = parent.rpartition("/")
    pattern = Pattern.PREFIXED if root == PREFIXED_ACLS else Pattern.LITERAL
    return _TYPES[kind], pattern, element_name(name)


def _by_path(acls: Iterable[Acl]) -> dict[str, frozenset[Acl]]:
    found: dict[str, set[Acl]] = {}
    for acl in acls:
        found.setdefault(_acl_path(acl), set()).add(acl)
    return {path: frozenset(group) for path, group in found.items()}


def _pack_acls(acls: Iterable[Acl]) -> bytes:
    return pack_json(
        {
            "version": 1,
            "acls": [
                {
                    "principal": acl.principal,
                    "permissionType": _PERMISSION_NAMES[Permission(acl.permission)],
                    "operation": OPERATION_NAMES[AclOperation(acl.operation)],
                    "host": acl.host,
                }
                for acl in sorted(acls)
            ],
        }
    )


def _unpack_acls(
    data: bytes, path: str, kind: ResourceType, pattern: Pattern, name: str
) -> list[Acl]:
    if not data:
        return []
    found = unpack_json(data, path)
    if found.get("version") != 1:
        raise CorruptRegistryError(
            "access control lists of another version",
            path=path,
            expected="version 1",
            found=found.get("version"),
        )
    try:
        return [
            Acl(
                kind,
                pattern,
                name,
                str(one["principal"]),
                str(one["host"]),
                _OPERATIONS[one["operation"]],
                _PERMISSIONS[one["permissionType"]],
            )
            for one in found["acls"]
        ]
    except (KeyError, TypeError) as error:
        raise CorruptRegistryError(
            "a damaged access control list", path=path, found=repr(error)
        ) from error
