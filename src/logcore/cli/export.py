"""`logcore export`: write the records of a partition or topic to one Parquet, Arrow, CSV
or NDJSON file, or the new records of a topic to an Iceberg or Delta table.

Rules:
- The file is renamed to its final name when it is complete and durable. An interrupted
  run leaves no partial file under that name.
- An existing file is not replaced without --force.
- Memory is bounded, however large the log is.
- NDJSON has the format of the output of `read` and the input of `append --format ndjson`.

The columns are topic, partition, offset, timestamp, key, value and headers, as in a scan
of a topic. Tables are written by logcore.lake, through cli/lake.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from logcore.cli.arguments import (
    NamedLogs,
    from_option,
    isolation_option,
    open_source,
    topic_argument,
)
from logcore.cli.filters import Where, where_option
from logcore.cli.lake import KINDS, TableArguments, export_to_table, table_options
from logcore.cli.options import directory_argument, fail, json_option
from logcore.cli.read import record_to_dict_with
from logcore.cli.schemas import SchemaSource, report_failures, schema_options
from logcore.cli.terminal import Lines, progress, size_text, to_json, wants_json
from logcore.format.columns import TOPIC_COLUMNS
from logcore.query.arrow_batches import batches_of, grouped, schema_of

if TYPE_CHECKING:
    import pyarrow

    from logcore.schemas import ValueDecoder

#: Limits of one row group of a Parquet file, and therefore of the memory that is used.
_GROUP_ROWS: Final = 1 << 20
_GROUP_BYTES: Final = 64 << 20


@click.command()
@directory_argument
@topic_argument
@click.option(
    "--to",
    "target",
    metavar="FILE|iceberg|delta",
    required=True,
    type=click.Path(),
    help="File to write: .parquet, .arrow, .csv or .ndjson. Or the format of a table, with --table.",
)
@from_option
@click.option(
    "--until",
    "end",
    default="latest",
    show_default=True,
    help="Same notation as --from; the record at this place is excluded.",
)
@where_option
@isolation_option
@click.option(
    "--text",
    "is_text",
    is_flag=True,
    help="Keys and values as text in .parquet and .arrow, as in .csv.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@schema_options
@table_options
@json_option
def export(
    directory: str,
    topic: str | None,
    target: str,
    start: str,
    end: str,
    conditions: tuple[str, ...],
    isolation: Any,
    is_text: bool,
    force: bool,
    schema_source: SchemaSource,
    as_json: bool,
    **table: Any,
) -> None:
    """Write the records of a partition or topic to a file, or the new records of a topic
    to a table. The suffix of the file selects the format.

    \b
    .parquet         columns topic, partition, offset, timestamp, key, value, headers; .arrow has the same
    .csv             these columns as text; bytes that are not UTF-8 as \\xFF, headers as JSON, null as an empty field
    .ndjson, .jsonl  one record per line, as `logcore read` prints it and `append --format ndjson` reads it

    DIR, TOPIC, --from and --where work as in `logcore read`, and --until works as --to.
    With --schemas or --schema-registry, keys and values with a schema are JSON in files.
    In tables, use --value avro for Avro values, and --value registry for others.

    \b
    --to delta --table PATH|URL                           a Delta table; --option NAME=VALUE is for its storage
    --to iceberg --table NAMESPACE.NAME --warehouse DIR   an Iceberg table in a catalog in DIR
    --to iceberg --table NAMESPACE.NAME --catalog NAME    ... in a catalog of pyiceberg's configuration

    A table is created if it is missing. Each run continues where the previous one ended,
    and exports committed records only. The commands need the extra lake.
    """
    context = click.get_current_context()
    if target in KINDS:
        if force:
            raise click.BadParameter("is for files", param_hint="'--force'")
        if _is_given(context, "isolation") and isolation != "read_committed":
            raise click.BadParameter(
                "only committed records are exported to a table",
                param_hint="'--isolation'",
            )
        arguments = TableArguments(kind=target, **table)
        span = [
            place if _is_given(context, name) else None
            for name, place in (("start", start), ("end", end))
        ]
        export_to_table(
            directory,
            topic,
            arguments,
            schema_source=schema_source,
            start=span[0],
            end=span[1],
            where=Where.parse(conditions),
            is_text=is_text,
            as_json=as_json,
        )
        return
    given = [name for name in table if _is_given(context, name)]
    if given:
        raise click.BadParameter(
            f"is for tables: {', '.join(KINDS)}",
            param_hint=f"'--{given[0].replace('_', '-')}'",
        )
    write = _WRITERS.get(os.path.splitext(target)[1].lower())
    if write is None:
        raise click.BadParameter(
            f"expected a suffix of {', '.join(_WRITERS)}, or {' or '.join(KINDS)}, found {target!r}",
            param_hint="'--to'",
        )
    if os.path.exists(target) and not force:
        fail(
            f"{target} is there already",
            "choose another name, or replace the file with --force",
        )
    if not os.path.isdir(os.path.dirname(target) or "."):
        fail(
            f"{target}: there is no directory {os.path.dirname(target)}",
            "make it first",
        )
    where = Where.parse(conditions)
    with contextlib.ExitStack() as stack:
        source = open_source(stack, directory, topic)
        decoder = schema_source.open_decoder(directory, source.logdir)
        stack.callback(report_failures, decoder)
        now_ms = time.time_ns() // 1_000_000
        starts = source.places(start, now_ms)
        ends = source.places(end, now_ms)
        total = sum(max(0, ends[number] - starts[number]) for number in ends)
        tick = stack.enter_context(progress("exporting", total))
        # In the directory of the target, because a rename cannot cross file systems.
        temporary_path = os.path.join(
            os.path.dirname(target), f".{os.path.basename(target)}.{os.getpid()}.part"
        )
        try:
            count = write(
                _ExportJob(
                    source,
                    starts,
                    ends,
                    where,
                    isolation,
                    is_text or decoder is not None,
                    tick,
                    decoder,
                ),
                temporary_path,
            )
            _sync(temporary_path)
            os.replace(temporary_path, target)
            # Without this sync, a power cut may undo the rename.
            _sync(os.path.dirname(target) or ".")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary_path)
    size_bytes = os.path.getsize(target)
    if wants_json(as_json):
        with Lines() as out:
            out.write(
                to_json({"path": target, "records": count, "size_bytes": size_bytes})
            )
    else:
        click.echo(f"{count:,} records written to {target} ({size_text(size_bytes)})")


def _is_given(context: click.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@attrs.frozen
class _ExportJob:
    """Records to export. `tick` is called with each number of exported records."""

    source: NamedLogs
    starts: Mapping[int, int]
    ends: Mapping[int, int]
    where: Where | None
    isolation: Any
    is_text: bool
    tick: Callable[[int], None]
    decoder: ValueDecoder | None

    def batches(self, *, is_text: bool) -> Iterator[pyarrow.RecordBatch]:
        return batches_of(
            self.source.logs,
            self.starts,
            self.ends,
            TOPIC_COLUMNS,
            is_text=is_text,
            select=None if self.where is None else self.where.select,
            isolation=self.isolation,
            tick=self.tick,
            decoder=self.decoder,
        )


def _write_parquet(job: _ExportJob, path: str) -> int:
    schema = schema_of(TOPIC_COLUMNS, is_text=job.is_text)
    import pyarrow as pa
    import pyarrow.parquet

    count = 0
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in grouped(
            job.batches(is_text=job.is_text),
            most_rows=_GROUP_ROWS,
            most_bytes=_GROUP_BYTES,
        ):
            table = pa.Table.from_batches(group)
            writer.write_table(table, row_group_size=table.num_rows)
            count += table.num_rows
    return count


def _write_arrow(job: _ExportJob, path: str) -> int:
    schema = schema_of(TOPIC_COLUMNS, is_text=job.is_text)
    import pyarrow as pa

    count = 0
    with pa.ipc.new_file(path, schema) as writer:
        for batch in job.batches(is_text=job.is_text):
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _write_csv(job: _ExportJob, path: str) -> int:
    """Write CSV.

    Texts are quoted and null is an empty field, so that null differs from empty text.
    """
    schema = schema_of(TOPIC_COLUMNS, is_text=True)
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.csv

    # pyarrow.compute creates its functions at import, so type checkers do not see them.
    compute: Any = pyarrow.compute

    headers = schema.get_field_index("headers")
    timestamp = schema.get_field_index("timestamp")
    flat = schema.set(headers, pa.field("headers", pa.string())).set(
        timestamp, pa.field("timestamp", pa.string())
    )
    options = pyarrow.csv.WriteOptions(quoting_style="needed")
    count = 0
    with pyarrow.csv.CSVWriter(path, flat, write_options=options) as writer:
        for batch in job.batches(is_text=True):
            arrays = list(batch.columns)
            texts: list[str | None] = [None] * batch.num_rows
            if len(arrays[headers].values):
                texts = [
                    to_json(pairs) if pairs else None
                    for pairs in arrays[headers].to_pylist()
                ]
            arrays[headers] = pa.array(texts, pa.string())
            times = arrays[timestamp]
            is_none = compute.less(times.cast(pa.int64()), 0)
            # strftime would take ten times as long.
            timestamps = compute.replace_substring(times.cast(pa.string()), " ", "T")
            arrays[timestamp] = compute.if_else(
                is_none, pa.scalar(None, pa.string()), timestamps
            )
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=flat))
            count += batch.num_rows
    return count


def _write_ndjson(job: _ExportJob, path: str) -> int:
    count = 0
    show = record_to_dict_with(job.decoder)
    with open(path, "wb") as file:
        for number, log in job.source.logs.items():
            for part in log.scan(
                job.starts[number], job.ends[number], isolation=job.isolation
            ):
                if job.where is None:
                    passing = part
                else:
                    passing = job.where.select(part)
                lines = [
                    to_json(
                        {
                            "topic": job.source.topic,
                            "partition": number,
                            **show(record),
                        }
                    )
                    for record in passing.records()
                ]
                file.write(
                    "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
                )
                count += len(lines)
                job.tick(len(part))
    return count


_WRITERS: Final[dict[str, Callable[[_ExportJob, str], int]]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
    ".csv": _write_csv,
    ".ndjson": _write_ndjson,
    ".jsonl": _write_ndjson,
}
