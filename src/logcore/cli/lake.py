"""Tables as targets of `logcore export`: --to iceberg and --to delta.

This module parses arguments and prints; logcore.lake exports.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs
import click

from logcore.cli.arguments import open_source
from logcore.cli.filters import Where
from logcore.cli.options import fail, setting
from logcore.cli.schemas import SchemaSource, avro_schemas
from logcore.cli.terminal import Lines, progress, to_json, wants_json

#: The table formats of --to.
KINDS: Final = ("iceberg", "delta")
_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS: Final = (
    click.option(
        "--table",
        metavar="NAME",
        help="Table to write: NAMESPACE.NAME for Iceberg, a path or URL for Delta.",
    ),
    click.option(
        "--warehouse",
        metavar="PATH",
        type=click.Path(file_okay=False),
        help="Iceberg: directory with the table and a catalog in SQLite; it is created.",
    ),
    click.option(
        "--catalog",
        metavar="NAME",
        help="Iceberg: catalog in the settings of pyiceberg.",
    ),
    click.option(
        "--option",
        metavar="NAME=VALUE",
        multiple=True,
        help="Setting of the catalog (Iceberg) or of the storage (Delta). Repeatable.",
    ),
    click.option(
        "--partition-by",
        metavar="day|header.NAME",
        default="",
        help="Partition the table by the day of the timestamp, or by a header.",
    ),
    click.option(
        "--value",
        type=click.Choice(["json", "avro", "registry"]),
        help="The fields of values as columns: values are JSON objects, Avro records, or have a schema of a registry.",
    ),
    click.option(
        "--schema",
        "schemas",
        metavar="[ID=]FILE",
        multiple=True,
        help="Avro schema of the values. With ID: of the values with this id of a schema registry; repeatable.",
    ),
    click.option(
        "--on-error",
        type=click.Choice(["fail", "text"]),
        default="fail",
        help="A value that does not fit the columns ends the export, or is stored in the column value_text.",
    ),
    click.option(
        "--on-gap",
        type=click.Choice(["fail", "skip"]),
        default="fail",
        help="Policy if records were deleted before they were exported; fail by default.",
    ),
)


def table_options(command: _Command) -> _Command:
    """Add the options of tables to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@attrs.frozen(kw_only=True)
class TableArguments:
    """The options of table_options(), and the format of the table."""

    kind: str
    table: str | None
    warehouse: str | None
    catalog: str | None
    option: tuple[str, ...]
    partition_by: str
    value: str | None
    schemas: tuple[str, ...]
    on_error: str
    on_gap: Any


def export_to_table(
    directory: str,
    topic: str | None,
    arguments: TableArguments,
    *,
    start: str | None,
    end: str | None,
    where: Where | None,
    is_text: bool,
    as_json: bool,
    schema_source: SchemaSource,
) -> None:
    """Export a topic and print the result.

    `start` and `end` are places in the log, None for the defaults of lake.export().
    """
    from logcore import lake

    if topic is None or ":" in topic:
        raise click.BadParameter(
            "a table holds all partitions of a topic: write DIR TOPIC",
            param_hint="'TOPIC'",
        )
    plain = "text" if is_text else "bytes"
    layout = lake.TableLayout(
        value=arguments.value or plain,
        key=plain,
        partition_by=arguments.partition_by,
        on_error=arguments.on_error,
    )
    target = _target(arguments)
    with contextlib.ExitStack() as stack:
        source = open_source(stack, directory, topic)
        assert source.logdir is not None, "a topic was named"
        schemas = dict(map(_schema, arguments.schemas))
        decoder = schema_source.open_decoder(directory, source.logdir)
        if decoder is not None and arguments.value == "avro":
            schemas |= avro_schemas(decoder.schemas, f"{topic}-value")
            decoder = None
        now_ms = time.time_ns() // 1_000_000
        options = lake.ExportOptions(
            layout=layout,
            start={} if start is None else source.places(start, now_ms),
            end={} if end is None else source.places(end, now_ms),
            on_gap=arguments.on_gap,
            schemas=schemas,
            decode=None if decoder is None else decoder.decode,
            select=None if where is None else where.rows,
            on_progress=_Bar(stack).show,
        )
        report = lake.export(source.logdir, topic, target, options)
    if wants_json(as_json):
        with Lines() as out:
            out.write(to_json(attrs.asdict(report)))
        return
    click.echo(
        f"{report.record_count:,} records exported to {arguments.kind} table {report.table} "
        f"in {report.commit_count:,} commit{'' if report.commit_count == 1 else 's'}"
    )


def _schema(text: str) -> tuple[int | None, Any]:
    """Parse [ID=]FILE, and the JSON in the file."""
    number, sign, path = text.partition("=")
    if not (sign and number.isascii() and number.isdigit()):
        number, path = "", text
    with open(path, encoding="utf-8") as file:
        try:
            schema = json.load(file)
        except ValueError as error:
            raise click.BadParameter(
                f"{path} is not an Avro schema in JSON: {error}",
                param_hint="'--schema'",
            ) from error
    return (int(number) if number else None), schema


class _Bar:
    """Progress bar that begins when the total is known."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._advance: Callable[[int], None] | None = None
        self._done = 0

    def show(self, done: int, total: int) -> None:
        if self._advance is None:
            self._advance = self._stack.enter_context(progress("exporting", total))
        self._advance(done - self._done)
        self._done = done


def _target(arguments: TableArguments) -> Any:
    from logcore import lake

    if arguments.table is None:
        raise click.BadParameter(
            f"--to {arguments.kind} needs the name of a table", param_hint="'--table'"
        )
    settings = dict(map(setting, arguments.option))
    if arguments.kind == "delta":
        for name in ("warehouse", "catalog"):
            if getattr(arguments, name) is not None:
                raise click.BadParameter(
                    "is for --to iceberg", param_hint=f"'--{name}'"
                )
        return lake.DeltaTarget(arguments.table, storage=settings)
    if (arguments.warehouse is None) == (arguments.catalog is None):
        fail(
            "--to iceberg needs a catalog",
            "name a directory with --warehouse lake, or a catalog of pyiceberg with --catalog NAME",
        )
    if arguments.warehouse is not None:
        if settings:
            raise click.BadParameter("is for --catalog", param_hint="'--option'")
        catalog = lake.local_catalog(arguments.warehouse)
    else:
        catalog = lake.named_catalog(str(arguments.catalog), settings)
    return lake.IcebergTarget(arguments.table, catalog=catalog)
