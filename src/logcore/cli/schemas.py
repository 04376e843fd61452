"""Options that decode keys and values by the schemas of a registry."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import click

import logcore
from logcore.errors import InvalidConfigError, LogNotFoundError
from logcore.format.schema_records import SCHEMAS_TOPIC

if TYPE_CHECKING:  # imported only if an option asks for it
    from logcore.schemas import SchemaState, ValueDecoder


@attrs.frozen
class SchemaSource:
    """The schemas that the options of a command name."""

    #: Whether the schemas in the topic `_schemas` of the directory are used.
    is_local: bool
    #: Address of a registry.
    url: str | None

    @property
    def is_given(self) -> bool:
        return self.is_local or self.url is not None

    def open_decoder(
        self, directory: str, logdir: logcore.LogDir | None
    ) -> ValueDecoder | None:
        """Return the decoder of keys and values, or None without schemas.

        Raises:
            InvalidConfigError: both options were given.
            LogNotFoundError, RemoteUnavailableError: see open_schemas().
        """
        if self.is_local and self.url is not None:
            raise InvalidConfigError(
                "--schemas and --schema-registry", expected="one of them", found="both"
            )
        if not self.is_given:
            return None
        from logcore.schemas import ValueDecoder

        return ValueDecoder(open_schemas(directory, logdir, self.url))


def schema_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --schemas and --schema-registry to a command, which gets them as `schema_source`."""

    @functools.wraps(command)
    def run(
        *args: Any, uses_schemas: bool, registry_url: str | None, **options: Any
    ) -> None:
        command(
            *args, schema_source=SchemaSource(uses_schemas, registry_url), **options
        )

    run = click.option(
        "--schema-registry",
        "registry_url",
        metavar="URL",
        help="Decode keys and values by the schemas of this registry.",
    )(run)
    return click.option(
        "--schemas",
        "uses_schemas",
        is_flag=True,
        help="Decode keys and values by the schemas in the topic _schemas of the directory.",
    )(run)


def open_schemas(
    directory: str, logdir: logcore.LogDir | None, url: str | None
) -> SchemaState:
    """Return the schemas of a registry, or of the topic `_schemas` of a directory.

    `logdir` is None if `directory` is one partition.

    Raises:
        LogNotFoundError: the directory has no topic `_schemas`.
        RemoteUnavailableError: the registry does not answer.
    """
    if url is not None:
        from logcore.schemas import RemoteSchemas

        return RemoteSchemas(url)
    if logdir is not None:
        if SCHEMAS_TOPIC not in logdir:
            raise _no_schemas(logdir.path)
        return _loaded(logdir.partition(SCHEMAS_TOPIC, 0))
    parent = os.path.dirname(os.path.abspath(directory))
    path = os.path.join(parent, f"{SCHEMAS_TOPIC}-0")
    if not os.path.isdir(path):
        raise _no_schemas(parent)
    with logcore.open(path, read_only=True) as log:
        return _loaded(log)


def _no_schemas(path: str) -> LogNotFoundError:
    return LogNotFoundError(
        f"there is no topic {SCHEMAS_TOPIC}: name a registry with --schema-registry URL",
        path=path,
    )


def _loaded(log: logcore.Log) -> SchemaState:
    from logcore.schemas import load_schemas

    state = load_schemas(log.read(log.log_start_offset, log.high_watermark))
    if state.skipped:
        reasons = "; ".join(f"offset {at}: {why}" for at, why in state.reasons.items())
        click.echo(
            f"{state.skipped} records of {SCHEMAS_TOPIC} are skipped: {reasons}",
            err=True,
        )
    return state


def report_failures(decoder: ValueDecoder | None) -> None:
    """Print how many keys and values were not decoded, and why."""
    for reason, count in [] if decoder is None else decoder.failures.most_common(10):
        click.echo(f"{count:,} keys or values are not decoded: {reason}", err=True)


def avro_schemas(schemas: SchemaState, subject: str) -> dict[int | None, Any]:
    """Return the Avro schemas of a subject by id, with the types of their references.

    Raises:
        InvalidConfigError: the subject has no Avro schemas.
    """
    from logcore.schemas.parsing import inlined_avro

    found: dict[int | None, Any] = {
        version.id: inlined_avro(version.text, schemas.resolve(version.references))
        for version in schemas.all_versions(subject)
        if version.type == "AVRO"
    }
    if not found:
        raise InvalidConfigError(
            "--value avro with a registry",
            expected=f"Avro schemas of the subject {subject!r}; --value registry decodes others",
            found="none",
        )
    return found
