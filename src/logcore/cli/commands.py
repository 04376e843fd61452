"""The command line: the program `logcore`, with all of its commands in the order of
`logcore --help`.

Rules:
- On a terminal, commands print lines and tables for people. In a pipe or with --json,
  they print one JSON object per line (NDJSON) on stdout. `info` without a directory and
  `demo` print text for people everywhere, unless --json is given.
- Progress is written to stderr, and only to a terminal. NO_COLOR is respected.
- The module of a command is imported when the command runs, because importing all other
  commands took a quarter of the time of a short command.

This module needs click, and rich on a terminal (the extra `cli`). Without them,
__main__.py prints which extra to install. Most commands are in append.py, read.py,
consume.py, shipping.py, topics.py, groups.py, transactions.py, backup.py and
maintenance.py. No command parses a file format: inspect/ and log.py do that.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from typing import cast

import click
import click.shell_completion

import logcore
from logcore.cli.command_list import INTRODUCTION, MODULES
from logcore.cli.options import DAMAGED, CommandGroup, json_option
from logcore.cli.terminal import Lines, print_table, to_json, wants_json


class Commands(Mapping[str, click.Command]):
    """All commands; a command is imported on its first lookup."""

    def __getitem__(self, name: str) -> click.Command:
        module = importlib.import_module(f"logcore.cli.{MODULES[name][0]}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class MainGroup(CommandGroup):
    """The program: lists its commands without an import of their modules."""

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in MODULES.items()])

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            click.shell_completion.CompletionItem(name, help=text)
            for name, (_, text) in MODULES.items()
            if name.startswith(incomplete)
        ]


@click.group(
    cls=MainGroup,
    commands=cast(MutableMapping[str, click.Command], Commands()),
    context_settings={"help_option_names": ["-h", "--help"]},
    help=INTRODUCTION,
)
@click.version_option(logcore.__version__, prog_name="logcore")
@click.pass_context
def main(ctx: click.Context) -> None:
    """The program; see INTRODUCTION."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False


@click.command()
@click.argument(
    "directory",
    metavar="[DIR]",
    default=".",
    type=click.Path(exists=True, file_okay=False),
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01),
    default=1.0,
    show_default=True,
    help="For each measurement.",
)
@click.option(
    "--records",
    type=click.IntRange(1),
    help="At most this many records for each measurement.",
)
@json_option
def bench(directory: str, seconds: float, records: int | None, as_json: bool) -> None:
    """Measure logcore on the disk that holds DIR, each figure compared with the bare
    work in the same run.

    Records have 16 + 200 bytes and are written to a directory that is removed
    afterwards. A ratio of 1.00 would be as fast as the bare work: the system calls
    alone (appending), or one copy of the bytes and their CRC-32C (the rest).
    """
    from logcore.cli.bench import measure

    place = tempfile.mkdtemp(prefix=".logcore-bench-", dir=directory)
    rows = []
    try:
        for row in measure(place, seconds, records or 1 << 62):
            rows.append(row)
            if wants_json(as_json):
                with Lines() as out:
                    out.write(to_json(row))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if not wants_json(as_json):
        headers = ("what", "records/s", "MB/s", "against", "records/s", "ratio")
        cells = [
            (
                row["what"],
                row["records_per_second"],
                f"{row['megabytes_per_second']:.1f}",
                row["against"],
                row["floor_records_per_second"],
                f"{row['ratio']:.2f}",
            )
            for row in rows
        ]
        print_table(headers, cells, right=(1, 2, 4, 5))


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False),
    help="Directory of the log; a temporary directory by default.",
)
@click.option("--keep", is_flag=True, help="Leave the temporary directory when done.")
@click.option("--rows", type=click.IntRange(10), help="Use only this many flights.")
@click.option("--worker-internal", "worker", hidden=True, type=click.Path())
def demo(
    directory: str | None, keep: bool, rows: int | None, worker: str | None
) -> None:
    """Run the main job on real data: append 336,776 flights, kill the writer half way,
    recover, and read the flights back in three shapes.
    """
    from logcore.cli.demo import run, work

    if worker is not None:
        work(worker, rows)
    elif not run(directory, keep=keep, rows=rows):
        raise click.exceptions.Exit(DAMAGED)
