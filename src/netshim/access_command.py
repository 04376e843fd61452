"""The commands `netshim user`, `netshim acl` and `netshim quota`.

They change nodes in the registry beside the log directory, with or without a running
broker. A running broker uses a change within 50 ms.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import attrs
import click

from logcore import InvalidConfigError, LogNotFoundError
from logcore.cli.options import CommandGroup
from netshim.security import quotas, scram
from netshim.security.acls import (
    CLUSTER_NAME,
    Acl,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.sasl import MAX_PASSWORD_BYTES
from netshim.security.stored import (
    DEFAULT,
    OPERATION_NAMES,
    Entity,
    SecurityStore,
)
from netshim.session import BROKER_USER

#: A log directory, the directory of a cluster, or the address of its registry.
_DIRECTORY: Final = click.argument(
    "directory", metavar="DIR", type=click.Path(file_okay=False)
)


def _print(*cells: str) -> None:
    """Print the cells of a line, with their control characters escaped.

    Otherwise, a name with control characters could forge a cell or a line, or change the
    terminal.
    """
    click.echo(
        "\t".join(
            "".join(
                character if character.isprintable() else ascii(character)[1:-1]
                for character in cell
            )
            for cell in cells
        )
    )


#: The operations by the values of --operation.
_OPERATIONS: Final = {
    name.lower(): operation for operation, name in OPERATION_NAMES.items()
}


@contextlib.contextmanager
def _open_store(
    directory: str, *, creates: bool = False
) -> Generator[SecurityStore, None, None]:
    """Open the store of a log directory or a cluster.

    With `creates`, a missing directory is created.

    Raises:
        LogNotFoundError: the directory does not exist.
        LogcoreError: see SecurityStore.
    """
    # The address of a ZooKeeper cluster.
    if "://" in directory:
        pass
    elif creates:
        Path(directory).mkdir(parents=True, exist_ok=True)
    elif not Path(directory).is_dir():
        raise LogNotFoundError("there is no log directory here", path=directory)
    store = SecurityStore(directory)
    try:
        yield store
    finally:
        store.close()


# -- users -----------------------------------------------------------------------------


@click.group(cls=CommandGroup)
def user() -> None:
    """Users that log in with a password."""


@user.command("add")
@_DIRECTORY
@click.argument("name")
@click.option(
    "--password-file",
    type=click.Path(exists=True, dir_okay=False),
    help="File whose first line is the password. Without it, the terminal asks.",
)
@click.option(
    "--iterations",
    type=click.IntRange(scram.MIN_ITERATIONS, scram.MAX_ITERATIONS),
    default=scram.MIN_ITERATIONS,
    show_default=True,
    help="Cost of guessing a stolen credential. Anyone who can connect can see the number.",
)
def add_user(
    directory: str, name: str, password_file: str | None, iterations: int
) -> None:
    """Create user NAME of the broker over DIR, or change the password.

    The user can log in with PLAIN, SCRAM-SHA-256 and SCRAM-SHA-512. The password itself
    is not stored.
    """
    # NUL separates the fields of a PLAIN login, and brokers log in as BROKER_USER.
    if not name or "\0" in name or name == BROKER_USER:
        raise InvalidConfigError("user name", expected="a name", found=repr(name))
    if password_file is not None:
        # An editor adds a newline at the end of the file.
        data = Path(password_file).read_bytes()
        password = data.partition(b"\n")[0].rstrip(b"\r").decode(errors="replace")
    else:
        password = click.prompt(
            f"Password of {name}", hide_input=True, confirmation_prompt=True
        )
    is_text = "\0" not in password and "\ufffd" not in password
    if not is_text or not 0 < len(password.encode()) <= MAX_PASSWORD_BYTES:
        raise InvalidConfigError(
            "password",
            expected=f"UTF-8 without NUL, 1 to {MAX_PASSWORD_BYTES} bytes",
            # The password itself must not appear in a terminal or a log.
            found="another",
        )
    credentials = scram.credentials_of(password, iterations, os.urandom)
    with _open_store(directory, creates=True) as store:
        store.set_credentials(name, credentials)
    _print(f"user {name}: {', '.join(scram.HASHES)}")


@user.command("remove")
@_DIRECTORY
@click.argument("name")
def remove_user(directory: str, name: str) -> None:
    """Delete the credentials of user NAME. Open connections remain authenticated."""
    with _open_store(directory) as store:
        credentials = store.load().users.get(name)
        if not credentials:
            raise InvalidConfigError(
                "user", expected="an existing user", found=repr(name)
            )
        # None deletes a credential.
        store.set_credentials(name, dict.fromkeys(credentials))
    _print(f"user {name} removed")


@user.command("list")
@_DIRECTORY
def list_users(directory: str) -> None:
    """Print the users and their mechanisms."""
    with _open_store(directory) as store:
        users = store.load().users
    for name, credentials in sorted(users.items()):
        mechanisms = ", ".join(
            f"{mechanism} with {credential.iterations} iterations"
            for mechanism, credential in sorted(credentials.items())
        )
        _print(name, mechanisms)


# -- access control lists --------------------------------------------------------------


@click.group(cls=CommandGroup)
def acl() -> None:
    """Rules that allow or deny operations; `netshim serve --acls` enforces them."""


def _resource_options(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--deny", is_flag=True, help="Deny instead of allow."),
        click.option(
            "--host",
            default="*",
            show_default=True,
            help="Address of the clients; * for all.",
        ),
        click.option(
            "--operation",
            "operations",
            multiple=True,
            type=click.Choice(sorted(_OPERATIONS), case_sensitive=False),
            help="Operation. May be repeated.",
        ),
        click.option(
            "--consumer",
            is_flag=True,
            help="Everything a consumer needs: read and describe --topic, read --group.",
        ),
        click.option(
            "--producer",
            is_flag=True,
            help="Everything a producer needs: write, create and describe --topic.",
        ),
        click.option(
            "--prefixed",
            is_flag=True,
            help="Names are prefixes of topics, groups and transactional ids.",
        ),
        click.option("--cluster", is_flag=True, help="The cluster itself."),
        click.option("--transactional-id", help="Transactional id; * for all."),
        click.option("--group", help="Consumer group; * for all."),
        click.option("--topic", help="Topic; * for all."),
    ):
        command = option(command)
    return command


@attrs.frozen
class _AclOptions:
    """The options that describe rules."""

    principal: str
    topic: str | None
    group: str | None
    transactional_id: str | None
    cluster: bool
    prefixed: bool
    producer: bool
    consumer: bool
    operations: tuple[str, ...]
    host: str
    deny: bool

    def rules(self) -> list[Acl]:
        """Return the rules.

        Raises:
            InvalidConfigError: the options describe none.
        """
        if ":" not in self.principal:
            raise InvalidConfigError(
                "principal", expected="User:NAME", found=repr(self.principal)
            )
        pattern = Pattern.PREFIXED if self.prefixed else Pattern.LITERAL
        resources = [
            (resource_type, name)
            for resource_type, name in (
                (ResourceType.TOPIC, self.topic),
                (ResourceType.GROUP, self.group),
                (ResourceType.TRANSACTIONAL_ID, self.transactional_id),
            )
            if name is not None
        ]
        targets: list[tuple[ResourceType, str, Pattern, AclOperation]] = []
        for resource_type, name in resources:
            # Kafka's kafka-acls.sh has the same shorthands --producer and --consumer.
            operations = {_OPERATIONS[name.lower()] for name in self.operations}
            if self.producer and resource_type == ResourceType.TOPIC:
                operations |= {
                    AclOperation.WRITE,
                    AclOperation.CREATE,
                    AclOperation.DESCRIBE,
                }
            if self.producer and resource_type == ResourceType.TRANSACTIONAL_ID:
                operations |= {AclOperation.WRITE, AclOperation.DESCRIBE}
            if self.consumer and resource_type == ResourceType.TOPIC:
                operations |= {AclOperation.READ, AclOperation.DESCRIBE}
            if self.consumer and resource_type == ResourceType.GROUP:
                operations |= {AclOperation.READ}
            targets += [
                (resource_type, name, pattern, operation)
                for operation in sorted(operations)
            ]
        # The cluster has no name and no prefixes, and --producer and --consumer do not
        # concern it.
        if self.cluster:
            targets += [
                (
                    ResourceType.CLUSTER,
                    CLUSTER_NAME,
                    Pattern.LITERAL,
                    _OPERATIONS[name.lower()],
                )
                for name in self.operations
            ]
        # An option without a resource would otherwise be ignored.
        if not targets:
            raise InvalidConfigError(
                "rule",
                expected="a resource such as --topic NAME, and --producer, --consumer or "
                "--operation",
                found="neither or one of them",
            )
        permission = Permission.DENY if self.deny else Permission.ALLOW
        return [
            Acl(
                resource_type,
                resource_pattern,
                name,
                self.principal,
                self.host,
                operation,
                permission,
            )
            for resource_type, name, resource_pattern, operation in targets
        ]


def _cells(rule: Acl) -> tuple[str, ...]:
    """Return a rule as the cells of one line."""
    permission = "allow" if rule.permission == Permission.ALLOW else "deny"
    resource_type = ResourceType(rule.resource_type).name.lower().replace("_", "-")
    suffix = "*" if rule.pattern == Pattern.PREFIXED else ""
    operation = OPERATION_NAMES[AclOperation(rule.operation)]
    return (
        permission,
        rule.principal,
        operation,
        f"{resource_type} {rule.name}{suffix}",
        f"from {rule.host}",
    )


@acl.command("add")
@_DIRECTORY
@click.argument("principal", metavar="User:NAME")
@_resource_options
def add_acl(directory: str, principal: str, **options: Any) -> None:
    """Allow or deny operations of a user.

    For example: netshim acl add data User:alice --producer --topic orders
    """
    rules = _AclOptions(principal, **options).rules()
    with _open_store(directory, creates=True) as store:
        store.add_acls(rules)
    for rule in rules:
        _print(*_cells(rule))


@acl.command("remove")
@_DIRECTORY
@click.argument("principal", metavar="User:NAME")
@_resource_options
def remove_acl(directory: str, principal: str, **options: Any) -> None:
    """Remove the rules that `acl add` with the same options stores."""
    rules = _AclOptions(principal, **options).rules()
    with _open_store(directory) as store:
        # Only rules that existed are printed as removed.
        current = set(store.load().acls)
        store.remove_acls(rules)
    for rule in rules:
        if rule in current:
            _print("removed", *_cells(rule))


@acl.command("list")
@_DIRECTORY
def list_acls(directory: str) -> None:
    """Print all rules."""
    with _open_store(directory) as store:
        for rule in store.load().acls:
            _print(*_cells(rule))


# -- quotas ----------------------------------------------------------------------------


@click.group(cls=CommandGroup)
def quota() -> None:
    """Limits for the rates of users, client ids and IP addresses."""


def _entity_options(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--ip", help="IP address; --ip-default for all."),
        click.option("--ip-default", is_flag=True, help="All IP addresses."),
        click.option("--client-id", help="Client id."),
        click.option("--client-id-default", is_flag=True, help="All client ids."),
        click.option("--user", help="User name."),
        click.option("--user-default", is_flag=True, help="All users."),
    ):
        command = option(command)
    return command


def _entity(options: dict[str, object]) -> Entity:
    names: list[str | None] = []
    for entity_type in ("user", "client_id", "ip"):
        name = options[entity_type]
        if options[f"{entity_type}_default"]:
            name = DEFAULT
        names.append(None if name is None else str(name))
    user_name, client_id, address = names
    # Quotas of addresses limit connections, and those of users and clients limit
    # requests.
    if not any(names) or (address is not None and (user_name or client_id)):
        raise InvalidConfigError(
            "entity",
            expected="--user, --client-id or both; or --ip",
            found="another combination",
        )
    return user_name, client_id, address


@quota.command("set")
@_DIRECTORY
@_entity_options
@click.argument("bounds", metavar="KEY=VALUE...", nargs=-1, required=True)
def set_quota(directory: str, bounds: tuple[str, ...], **options: object) -> None:
    """Limit a rate.

    For example: netshim quota set data --user alice producer_byte_rate=1e6
    """
    entity = _entity(options)
    address = entity[2]
    if address not in (None, DEFAULT):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise InvalidConfigError(
                "--ip", expected="an IP address", found=repr(address)
            ) from None
    # An address has a quota for new connections only (KIP-612).
    valid_keys = quotas.CLIENT_KEYS if entity[2] is None else (quotas.CONNECTION,)
    values: dict[str, float | None] = {}
    for text in bounds:
        key, _, value = text.partition("=")
        if key not in valid_keys:
            raise InvalidConfigError(
                "quota", expected=" or ".join(valid_keys), found=repr(key)
            )
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        # This is false for NaN, too.
        if not 0 < number < 2**63:
            raise InvalidConfigError(
                f"quota {key}", expected="a number above 0", found=repr(value)
            )
        values[key] = number
    with _open_store(directory, creates=True) as store:
        store.set_quotas(entity, values)


@quota.command("remove")
@_DIRECTORY
@_entity_options
@click.argument("keys", metavar="KEY...", nargs=-1)
def remove_quota(directory: str, keys: tuple[str, ...], **options: object) -> None:
    """Remove limits. Without KEY, remove all limits of the entity."""
    entity = _entity(options)
    with _open_store(directory) as store:
        current = store.load().quotas.get(entity, {})
        store.set_quotas(entity, dict.fromkeys(keys or current))


@quota.command("list")
@_DIRECTORY
def list_quotas(directory: str) -> None:
    """Print all limits."""
    with _open_store(directory) as store:
        stored = store.load().quotas
    # An entity contains None, which cannot be compared with a text.
    for entity, values in sorted(stored.items(), key=repr):
        entity_text = ", ".join(
            f"{entity_type} {name}"
            for entity_type, name in zip(
                ("user", "client-id", "ip"), entity, strict=True
            )
            if name is not None
        )
        for key, value in sorted(values.items()):
            _print(entity_text, f"{key}={value:g}")
