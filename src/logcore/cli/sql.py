"""`logcore sql`: query the topics of a directory as tables of DuckDB, and print the
result.

Logs are opened read-only. query/sql.py makes the tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

import logcore
from logcore.cli.options import full_option, json_option
from logcore.cli.schemas import SchemaSource, report_failures, schema_options
from logcore.cli.terminal import Lines, print_table, to_json, wants_json
from logcore.query.sql import connect, query_error

if TYPE_CHECKING:
    import pyarrow

#: Maximum number of rows shown on a terminal, because a longer table is slow to draw.
_MAX_SHOWN: Final = 1_000


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.argument("query")
@click.option(
    "--bytes", "is_bytes", is_flag=True, help="Keys and values as BLOB, not as text."
)
@click.option(
    "--csv",
    "as_csv",
    is_flag=True,
    help="Print CSV with a row of names, also at a terminal.",
)
@schema_options
@full_option
@json_option
def sql(
    directory: str,
    query: str,
    is_bytes: bool,
    as_csv: bool,
    schema_source: SchemaSource,
    full: bool,
    as_json: bool,
) -> None:
    """Run SQL over the topics of a directory, each a table: logcore sql data 'select
    count(*) from orders'.

    Columns: partition, offset, timestamp, key, value, headers. Keys and values are
    text; bytes that are not UTF-8 are shown as \\xFF. header(headers, 'trace') is a
    header, value->>'$.price' is a field of JSON. With --schemas or --schema-registry, keys
    and values with a schema are JSON. Write a name such as "my-topic" in
    double quotes. The command needs the extra sql; the language is DuckDB's.
    """
    if is_bytes and schema_source.is_given:
        raise click.BadParameter(
            "is not for values with a schema", param_hint="'--bytes'"
        )
    with contextlib.ExitStack() as stack:
        logdir = stack.enter_context(logcore.open_dir(directory, read_only=True))
        decoder = schema_source.open_decoder(directory, logdir)
        stack.callback(report_failures, decoder)
        connection = stack.enter_context(
            contextlib.closing(
                connect(logdir, query, is_text=not is_bytes, decoder=decoder)
            )
        )
        import duckdb

        try:
            for statement in connection.extract_statements(query):
                result = connection.sql(statement.query)
                if result is not None:
                    _print(_reader(result), as_csv, full, as_json)
                    del result
        except duckdb.InterruptException:
            raise KeyboardInterrupt from None
        except duckdb.Error as error:
            raise query_error(error, logdir) from error
        except (
            OSError,
            ValueError,
        ) as error:  # a query that fails at a later row raises through Arrow
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise query_error(error, logdir) from error


def _reader(result: Any) -> pyarrow.RecordBatchReader:
    import pyarrow as pa

    return pa.RecordBatchReader.from_stream(result)


def _print(
    reader: pyarrow.RecordBatchReader, as_csv: bool, full: bool, as_json: bool
) -> None:
    names = reader.schema.names
    if as_csv:
        import csv
        import io

        with Lines() as out:
            for row in _with_first(names, _rows(reader)):
                line = io.StringIO()
                csv.writer(line, lineterminator="\n").writerow(map(_cell, row))
                out.write_bytes(line.getvalue().encode("utf-8", "replace"))
    elif wants_json(as_json):
        fields = _distinct(names)
        with Lines() as out:
            for row in _rows(reader):
                out.write(to_json(dict(zip(fields, row, strict=True))))
    else:
        shown: list[list[Any]] = []
        for row in _rows(reader):
            if len(shown) == _MAX_SHOWN:
                click.echo(
                    f"the first {_MAX_SHOWN:,} rows; add a LIMIT, or write all to a file with --csv",
                    err=True,
                )
                break
            shown.append(list(map(_cell, row)))
        numbers = [
            slot for slot, field in enumerate(reader.schema) if _is_number(field.type)
        ]
        print_table(names, shown, right=numbers, full=full)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return unique names for columns.

    The second column of the same name gets the suffix _2, so that no column is lost.
    """
    taken: dict[str, int] = {}
    fields: list[str] = []
    for name in names:
        field = name
        while field in taken:
            taken[name] += 1
            field = f"{name}_{taken[name]}"
        taken[field] = 1
        fields.append(field)
    return fields


def _with_first(first: Any, rows: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rows


def _rows(reader: pyarrow.RecordBatchReader) -> Iterator[tuple[Any, ...]]:
    """Yield rows of values that JSON supports."""
    from logcore.inspect.dump import shown_value

    for batch in reader:
        columns = [
            [shown_value(value) for value in column.to_pylist()]
            for column in batch.columns
        ]
        yield from zip(*columns, strict=True)


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return to_json(value)
    return value


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
    )
