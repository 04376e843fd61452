"""Users, access control lists and quotas as nodes of a registry.

A broker alone has the registry beside its log directory, and the brokers of a cluster
share theirs.

| path | value |
|---|---|
| `/config/users/<u>` | settings: a credential for each mechanism, and quotas |
| `/config/users/<u>/clients/<c>` | settings: quotas |
| `/config/clients/<c>`, `/config/ips/<ip>` | settings: quotas |
| `/kafka-acl/<Type>/<name>` | rules with a literal pattern |
| `/kafka-acl-extended/prefixed/<Type>/<name>` | rules for names with this prefix |
| `/security/salt_secret` | 32 random bytes |
| `/security/brokers` | the login of the brokers of a cluster to each other |

Settings are `{"version":1,"config":{"SCRAM-SHA-256":"salt=..,stored_key=..,...}}`.
Rules are `{"version":1,"acls":[{"principal":..,"permissionType":"Allow",...}]}`. The
name `<default>` means all entities without quotas of their own.

Rules:
- The paths and values are those of Kafka with ZooKeeper.
- Every change is synced before the function returns. A running broker reads the nodes
  again after a change of any process.
- A damaged node of a user or a quota is reported and skipped: that user cannot log in.
  A damaged node of an access control list counts as a rule that denies everything to
  all users of the resource, because skipping a DENY rule would grant access.
- If the registry does not answer, load() fails, and its caller keeps the former snapshot.

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
    InvalidConfigError,
    NodeExistsError,
    NodeNotFoundError,
    RegistryError,
    UnsupportedRegistryError,
)
from logcore.fs import FS, OS, SharedFS
from logcore.registry import Node, Registry, open_registry
from logcore.registry.files import read_layout
from logcore.registry.paths import (
    element,
    element_name,
    pack_config,
    pack_json,
    unpack_config,
    unpack_json,
)
from netshim.security import scram
from netshim.security.acls import (
    ANY_USER,
    WILDCARD,
    Acl,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.scram import BROKER_MECHANISM, Credential, CredentialForm

if TYPE_CHECKING:
    from logcore.registry.protocol import Watch

_log = logging.getLogger("netshim")

#: Paths of the nodes, see the table above.
USERS: Final = "/config/users"
CLIENTS: Final = "/config/clients"
IPS: Final = "/config/ips"
ACLS: Final = "/kafka-acl"
PREFIXED_ACLS: Final = "/kafka-acl-extended/prefixed"
SALT_SECRET: Final = "/security/salt_secret"
BROKERS: Final = "/security/brokers"
#: Name that means all entities without quotas of their own.
DEFAULT: Final = "<default>"

#: Kafka's names of resource types in the registry.
_TYPE_NAMES: Final = {
    ResourceType.TOPIC: "Topic",
    ResourceType.GROUP: "Group",
    ResourceType.CLUSTER: "Cluster",
    ResourceType.TRANSACTIONAL_ID: "TransactionalId",
    ResourceType.DELEGATION_TOKEN: "DelegationToken",
    ResourceType.USER: "User",
}
#: The resource types by these names.
_TYPES: Final = {name: kind for kind, name in _TYPE_NAMES.items()}
#: Kafka's names of operations, such as "DescribeConfigs".
OPERATION_NAMES: Final = {
    operation: "".join(word.capitalize() for word in operation.name.split("_"))
    for operation in AclOperation
}
#: The operations by these names.
_OPERATIONS: Final = {name: operation for operation, name in OPERATION_NAMES.items()}
_PERMISSION_NAMES: Final = {Permission.ALLOW: "Allow", Permission.DENY: "Deny"}
#: The permissions by these names.
_PERMISSIONS: Final = {
    name: permission for permission, name in _PERMISSION_NAMES.items()
}

#: These errors concern one damaged node. All others concern the whole registry.
_DAMAGE: Final = (CorruptRegistryError, UnsupportedRegistryError)
#: Number of random bytes in the password of the brokers.
_PASSWORD_BYTES: Final = 32
#: Name of the registry below the directory of `netshim cluster`.
_CLUSTER: Final = "cluster"
#: Session timeout of a command that changes the registry of a cluster.
_SESSION_TIMEOUT_MS: Final = 10_000

#: The user, client id and IP address of a quota. None means that the quota does not
#: depend on this part. DEFAULT means all users, clients or addresses without a quota of
#: their own.
Entity = tuple[str | None, str | None, str | None]


@attrs.frozen
class BrokerLogin:
    """The password with which the brokers of a cluster log in to each other."""

    password: str = attrs.field(repr=False)
    #: The credential of BROKER_MECHANISM for it.
    credential: Credential


@attrs.frozen
class SecuritySnapshot:
    """The stored credentials, rules and quotas at one moment."""

    #: User name -> mechanism -> credential.
    users: Mapping[str, Mapping[str, Credential]] = attrs.Factory(dict)
    #: The access control lists.
    acls: tuple[Acl, ...] = ()
    #: Entity -> key -> bound.
    quotas: Mapping[Entity, Mapping[str, float]] = attrs.Factory(dict)
    #: The secret of the salts of mock credentials. Empty if none was created.
    salt_secret: bytes = b""
    #: None if no broker logs in to another one.
    brokers: BrokerLogin | None = None
    #: The forms of the credential that each user has for a mechanism. Key "": the
    #: credential that verifies a password of PLAIN.
    forms: Mapping[str, frozenset[CredentialForm]] = attrs.field(init=False, eq=False)

    @forms.default  # pyright: ignore
    def _forms(self) -> Mapping[str, frozenset[CredentialForm]]:
        by_mechanism: dict[str, set[CredentialForm]] = {}
        for credentials in self.users.values():
            forms = [
                CredentialForm.of(name, credentials[name])
                for name in scram.HASHES
                if name in credentials
            ]
            for form in forms:
                by_mechanism.setdefault(form.mechanism, set()).add(form)
            for form in forms[:1]:
                # PLAIN uses the first mechanism of the user, see
                # Authenticator.credential().
                by_mechanism.setdefault("", set()).add(form)
        return {key: frozenset(forms) for key, forms in by_mechanism.items()}


class SecurityStore:
    """The stored users, rules and quotas of a broker or a cluster. Used by one thread."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        fs: FS = OS,
        *,
        read_only: bool = False,
    ) -> None:
        """Open the registry of a log directory, or of an existing cluster.

        A cluster is identified by the directory of `netshim cluster`, or by the path or
        the zk:// address that its brokers have as `--registry`. The registry of a log
        directory is created if it does not exist, unless `read_only` is true.

        Raises:
            CorruptRegistryError, UnsupportedRegistryError, LogNotFoundError: see
                open_registry().
            InvalidConfigError: see open_registry(), the directory belongs to one broker
                of a cluster, or there is no cluster at the address.
            RegistryUnavailableError: no ZooKeeper server answers.
        """
        opened = _open(os.fspath(directory), cast("SharedFS", fs), read_only=read_only)
        self._use(lambda: opened, opened.close)

    @classmethod
    def of_cluster(cls, registry: Callable[[], Registry]) -> SecurityStore:
        """Return the store of a broker in a cluster.

        `registry` returns the registry of the broker's current session. close() leaves
        it open.
        """
        store = cls.__new__(cls)
        store._use(registry, lambda: None)
        return store

    def _use(
        self, registry: Callable[[], Registry], close_registry: Callable[[], None]
    ) -> None:
        #: Returns the registry. A broker of a cluster opens another one for each
        #: session.
        self._current_registry = registry
        self._close_registry = close_registry
        #: Reports changes of the nodes that load() has read. None before the first
        #: load.
        self._watch: Watch | None = None
        #: The registry of the watch, and the watched nodes and parents.
        self._watched: tuple[Registry, list[str], list[str]] | None = None
        #: Whether a change may have occurred between the load and the watch.
        self._is_new_watch = False
        #: The damaged nodes with the text that was logged.
        self._reported: frozenset[tuple[str, str]] = frozenset()

    @property
    def _registry(self) -> Registry:
        return self._current_registry()

    # -- reading -----------------------------------------------------------------------

    def load(self) -> SecuritySnapshot:
        """Read everything.

        Raises:
            CorruptRegistryError: a newer version has stored rules of another kind.
            RegistryError: the registry does not answer.
        """
        registry = self._registry
        reader = _SnapshotReader(registry, self._reported)
        snapshot = reader.read_all()
        # A node that was repaired is logged again if it is damaged once more.
        self._reported = frozenset(reader.reported)
        self._renew_watches(registry, reader.paths, reader.parents)
        return snapshot

    def has_changed(self) -> bool:
        """Return whether something may have changed since load(). Does not block."""
        if self._watch is None or self._watched is None or self._is_new_watch:
            return True
        return self._watched[0] is not self._registry or self._watch.wait(0)

    @property
    def has_quotas(self) -> bool:
        """Whether a user, a client id or an address may have a quota.

        This reads only three lists of names.
        """
        return any(self._registry.children(path) for path in (USERS, CLIENTS, IPS))

    def close(self) -> None:
        """End the watch, and close the registry unless it belongs to a cluster's session."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._close_registry()

    def _renew_watches(
        self, registry: Registry, paths: list[str], parents: list[str]
    ) -> None:
        """Watch the nodes that load() has read.

        An unchanged watch reports changes since the load began. After a new watch, a
        change between the load and the watch would be missed, so has_changed() is True
        once more.
        """
        watched = registry, paths, parents
        if watched == self._watched and self._watch is not None:
            self._is_new_watch = False
            return
        if self._watch is not None:
            self._watch.close()
        self._watch = registry.watch(paths, children=parents)
        self._watched = watched
        self._is_new_watch = True

    # -- the login of brokers ----------------------------------------------------------

    def ensure_broker_login(self) -> None:
        """Create the password of the brokers, unless it exists."""
        try:
            self._registry.get(BROKERS)
            return
        except NodeNotFoundError:
            pass
        except _DAMAGE:  # load() reports it, and no broker can log in
            return
        password = os.urandom(_PASSWORD_BYTES).hex()
        salt = os.urandom(scram.SALT_BYTES)
        salted = scram.salted_password(
            BROKER_MECHANISM, password, salt, scram.MIN_ITERATIONS
        )
        credential = scram.credential_of(
            BROKER_MECHANISM, salted, salt, scram.MIN_ITERATIONS
        )
        value = pack_json(
            {
                "version": 1,
                "password": password,
                BROKER_MECHANISM: scram.format_credential(credential),
            }
        )
        # Another broker may create it at the same time. The first wins.
        with contextlib.suppress(NodeExistsError):
            self._registry.create(BROKERS, value)

    # -- users -------------------------------------------------------------------------

    def set_credentials(
        self, user: str, changes: Mapping[str, Credential | None]
    ) -> bool:
        """Set the credentials of a user for some mechanisms; None removes a credential.

        Returns False, and changes nothing, if a credential to remove does not exist.
        """
        # Mock credentials depend on this secret. Without users, they need none.
        self._ensure_salt_secret()
        is_complete = True

        def change(config: dict[str, str]) -> None:
            nonlocal is_complete
            is_complete = all(
                change is not None or mechanism in config
                for mechanism, change in changes.items()
            )
            if not is_complete:
                return
            for mechanism, credential in changes.items():
                if credential is None:
                    del config[mechanism]
                else:
                    config[mechanism] = scram.format_credential(credential)

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
            # None writes nothing. The update would otherwise wake all brokers.
            if config == before:
                return None
            return pack_config(config)

        node = self._update(path, replace)
        if node is not None and not (node.value and unpack_config(node.value, path)):
            # The node of a user with quotas for client ids has children, so it cannot be
            # deleted. A node that another process has changed since must not be.
            with contextlib.suppress(RegistryError):
                self._registry.delete(path, version=node.version)

    def _update(
        self, path: str, change: Callable[[bytes | None], bytes | None]
    ) -> Node | None:
        try:
            return self._registry.update(path, change)
        except _DAMAGE as error:
            raise CorruptRegistryError(
                f"the node {path.removeprefix('/')} of the registry is damaged, so it "
                "cannot be changed; restore it, or delete it to begin without it",
                found=str(error),
            ) from error

    # -- access control lists ----------------------------------------------------------

    def add_acls(self, acls: Iterable[Acl]) -> None:
        """Store rules. A rule that exists already is not stored again."""
        # One node holds all rules of a resource.
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
        resource_type, pattern, name = _resource_of(path)

        def replace(data: bytes | None) -> bytes | None:
            current = frozenset(
                _unpack_acls(data or b"", path, resource_type, pattern, name)
            )
            target = (current | added) - removed
            if target == current:
                return None
            return _pack_acls(target)

        node = self._update(path, replace)
        if node is not None and not _unpack_acls(
            node.value, path, resource_type, pattern, name
        ):
            # Another process may have added a rule in this time.
            with contextlib.suppress(RegistryError):
                self._registry.delete(path, version=node.version)


class _SnapshotReader:
    """Reads all credentials, rules and quotas once."""

    def __init__(
        self, registry: Registry, reported: frozenset[tuple[str, str]]
    ) -> None:
        self._registry = registry
        self._reported_before = reported
        #: The damaged nodes, and the text of each.
        self.reported: set[tuple[str, str]] = set()
        #: The nodes that were read, and the nodes whose children were listed.
        self.paths: list[str] = [SALT_SECRET, BROKERS]
        self.parents: list[str] = []
        self._quotas: dict[Entity, Mapping[str, float]] = {}

    def read_all(self) -> SecuritySnapshot:
        users: dict[str, Mapping[str, Credential]] = {}
        for name, path in self._nodes(USERS):
            config = self._config(path)
            credentials = self._credentials(config, path)
            if credentials:
                users[name] = credentials
            self._add_quotas((name, None, None), config, path)
            for client, inner in self._nodes(f"{path}/clients"):
                self._add_quotas((name, client, None), self._config(inner), inner)
        for name, path in self._nodes(CLIENTS):
            self._add_quotas((None, name, None), self._config(path), path)
        for name, path in self._nodes(IPS):
            self._add_quotas((None, None, name), self._config(path), path)
        acls: list[Acl] = []
        for root, pattern in (
            (ACLS, Pattern.LITERAL),
            (PREFIXED_ACLS, Pattern.PREFIXED),
        ):
            # A new type of resource is reported by the watch of its parent.
            self.parents.append(root)
            for type_name in self._registry.children(root):
                resource_type = _TYPES.get(type_name)
                if resource_type is None:
                    raise CorruptRegistryError(
                        "unknown kind of resource", path=f"{root}/{type_name}"
                    )
                for name, path in self._nodes(f"{root}/{type_name}"):
                    acls += self._acls(path, resource_type, pattern, name)
        return SecuritySnapshot(
            users=users,
            acls=tuple(sorted(acls)),
            quotas=self._quotas,
            salt_secret=_value(self._registry, SALT_SECRET),
            brokers=self._brokers(),
        )

    def _nodes(self, parent: str) -> list[tuple[str, str]]:
        """Return (name, path) of the children of a node."""
        self.parents.append(parent)
        nodes = [
            (element_name(child), f"{parent}/{child}")
            for child in self._registry.children(parent)
        ]
        self.paths += [path for _, path in nodes]
        return nodes

    def _report(self, path: str, text: str, *values: object) -> None:
        """Log a damaged node, unless the previous load() logged the same."""
        line = path, text % values
        if line not in self._reported_before:
            _log.error("%s: %s", *line)
        self.reported.add(line)

    def _config(self, path: str) -> Mapping[str, str]:
        try:
            data = _value(self._registry, path)
            return unpack_config(data, path) if data else {}
        except _DAMAGE as error:
            self._report(path, "the node cannot be read, and has no effect: %s", error)
            return {}

    def _credentials(
        self, config: Mapping[str, str], path: str
    ) -> Mapping[str, Credential]:
        credentials = {}
        for mechanism in scram.HASHES:
            text = config.get(mechanism)
            if text is None:
                continue
            try:
                credentials[mechanism] = scram.parse_credential(text)
            except (KeyError, ValueError):
                self._report(
                    path,
                    "the credential for %s is damaged, so the user cannot log in with it",
                    mechanism,
                )
        return credentials

    def _add_quotas(self, entity: Entity, config: Mapping[str, str], path: str) -> None:
        values = {}
        for key, text in config.items():
            # The node of a user holds its credentials, too.
            if key in scram.HASHES:
                continue
            try:
                values[key] = float(text)
            except ValueError:
                self._report(path, "the quota %s is not a number: %r", key, text)
        if values:
            self._quotas[entity] = values

    def _acls(
        self, path: str, resource_type: ResourceType, pattern: Pattern, name: str
    ) -> list[Acl]:
        try:
            return _unpack_acls(
                _value(self._registry, path), path, resource_type, pattern, name
            )
        except _DAMAGE as error:
            self._report(
                path,
                "the rules cannot be read, so everything is denied there: %s",
                error,
            )
        return [
            Acl(
                resource_type,
                pattern,
                name,
                ANY_USER,
                WILDCARD,
                AclOperation.ALL,
                Permission.DENY,
            )
        ]

    def _brokers(self) -> BrokerLogin | None:
        try:
            data = _value(self._registry, BROKERS)
            return _unpack_brokers(data) if data else None
        except _DAMAGE as error:
            self._report(BROKERS, "no broker can log in to another one: %s", error)
            return None


def _open(directory: str, fs: SharedFS, *, read_only: bool) -> Registry:
    """Open the registry of a log directory, or of an existing cluster."""
    # An address such as zk://host:2181/path.
    if "://" in directory:
        # Imported only on use, because every broker imports this module.
        from logcore.registry.cluster_address import open_cluster_registry

        return open_cluster_registry(
            directory,
            session_timeout_ms=_SESSION_TIMEOUT_MS,
            lock_timeout_ms=_SESSION_TIMEOUT_MS,
            fs=fs,
            create=False,
        )
    directory = fs.real_path(directory)
    parent, name = os.path.split(directory)
    # The registry of a cluster itself, and then the directory of `netshim cluster`.
    for path in (directory, os.path.join(directory, _CLUSTER)):
        if read_layout(path, fs) == "truth":
            return open_registry(path, topics="truth", read_only=read_only, fs=fs)
    # `netshim cluster` gives the directories of its brokers such names.
    is_of_broker = name.isdecimal() and read_layout(directory, fs) is None
    if is_of_broker and read_layout(os.path.join(parent, _CLUSTER), fs) == "truth":
        raise InvalidConfigError(
            "this is the directory of one broker, whose cluster has the users, rules "
            "and quotas",
            expected=parent,
            found=directory,
        )
    return open_registry(directory, read_only=read_only, fs=fs)


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
    root, _, type_name = parent.rpartition("/")
    pattern = Pattern.PREFIXED if root == PREFIXED_ACLS else Pattern.LITERAL
    return _TYPES[type_name], pattern, element_name(name)


def _by_path(acls: Iterable[Acl]) -> dict[str, frozenset[Acl]]:
    by_path: dict[str, set[Acl]] = {}
    for acl in acls:
        by_path.setdefault(_acl_path(acl), set()).add(acl)
    return {path: frozenset(group) for path, group in by_path.items()}


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
                # Sorted, so that equal rules are equal bytes.
                for acl in sorted(acls)
            ],
        }
    )


def _unpack_acls(
    data: bytes, path: str, resource_type: ResourceType, pattern: Pattern, name: str
) -> list[Acl]:
    if not data:
        return []
    value = unpack_json(data, path)
    if value.get("version") != 1:
        raise CorruptRegistryError(
            "access control lists of another version",
            path=path,
            expected="version 1",
            found=value.get("version"),
        )
    try:
        return [
            Acl(
                resource_type,
                pattern,
                name,
                str(acl["principal"]),
                str(acl["host"]),
                _OPERATIONS[acl["operation"]],
                _PERMISSIONS[acl["permissionType"]],
            )
            for acl in value["acls"]
        ]
    except (KeyError, TypeError) as error:
        raise CorruptRegistryError(
            "a damaged access control list", path=path, found=repr(error)
        ) from error


def _unpack_brokers(data: bytes) -> BrokerLogin:
    value = unpack_json(data, BROKERS)
    try:
        if value["version"] != 1:
            raise ValueError
        return BrokerLogin(
            str(value["password"]), scram.parse_credential(value[BROKER_MECHANISM])
        )
    except (AttributeError, KeyError, ValueError) as error:
        raise CorruptRegistryError(
            "no login of brokers; delete the node, and restart all brokers",
            path=BROKERS,
        ) from error
