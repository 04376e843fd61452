"""`logcore info`: the installation, or the partitions of a directory at a glance.

Logs are opened read-only, and no lock is acquired.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import click

from logcore.cli.arguments import named_directories, topic_argument
from logcore.cli.options import json_option
from logcore.cli.terminal import (
    Lines,
    print_table,
    size_text,
    time_text,
    to_json,
    wants_json,
)
from logcore.fs.lock_holders import lock_holders
from logcore.metadata.filenames import partition_of
from logcore.summary import PartitionSummary, describe

#: Order of the rows of `info` -> its sort key. Names rise, other values fall.
_ORDERS: Final[dict[str, Callable[[PartitionSummary], Any]]] = {
    "name": lambda one: (one.topic, one.partition),
    "size": lambda one: -one.size_bytes,
    "segments": lambda one: -one.segments,
    "offsets": lambda one: one.log_start_offset - one.high_watermark,
    "newest": lambda one: -one.max_timestamp_ms,
}


@click.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path())
@topic_argument
@click.option(
    "--sort",
    type=click.Choice(list(_ORDERS)),
    default="name",
    show_default=True,
    help="Order of the partitions; the largest or newest first.",
)
@json_option
def info(directory: str | None, topic: str | None, sort: str, as_json: bool) -> None:
    """Show versions and installed parts; with DIR, show partitions with their sizes and
    the processes that write them.
    """
    if directory is None:
        from logcore.cli.packages import installation, installation_text

        click.echo(to_json(installation()) if as_json else installation_text())
        return
    found = sorted(
        map(describe, named_directories(directory, topic)), key=_ORDERS[sort]
    )
    locked = os.path.realpath(directory)
    if partition_of(os.path.basename(locked)) is not None:
        locked = os.path.dirname(locked)
    writers = lock_holders(locked)
    if wants_json(as_json):
        pids = [writer.pid for writer in writers]
        with Lines() as out:
            for one in found:
                out.write(to_json({**one.as_dict(), "writers": pids}))
        return
    headers = (
        "partition",
        "segments",
        "size",
        "start",
        "end",
        "first time",
        "newest",
        "codecs",
    )
    rows: list[tuple[object, ...]] = [
        (
            os.path.basename(os.path.realpath(one.path)),
            one.segments,
            size_text(one.size_bytes),
            one.log_start_offset,
            one.high_watermark,
            time_text(one.first_timestamp_ms, "seconds"),
            time_text(one.max_timestamp_ms, "seconds"),
            ", ".join(f"{count:,} {codec}" for codec, count in one.codecs.items()),
        )
        for one in found
    ]
    if len(found) > 1:
        size = size_text(sum(one.size_bytes for one in found))
        segments = sum(one.segments for one in found)
        newest = max(one.max_timestamp_ms for one in found)
        shown = time_text(newest, "seconds")
        rows.append(("total", segments, size, None, None, None, shown, None))
    print_table(headers, rows, right=(1, 2, 3, 4))
    for writer in writers:
        sharing = ", which shares the directory" if writer.is_shared else ""
        click.echo(f"written by {writer}{sharing}")
