"""`logcore info`: the installation, or a summary of the partitions of a directory.

Logs are opened read-only, and no lock is acquired.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Final

import click

import logcore
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
from logcore.config import LogConfig
from logcore.fs.lock_holders import lock_holders
from logcore.inspect.segmentmap import segment_map
from logcore.metadata.filenames import partition_of
from logcore.summary import PartitionSummary, describe

#: Order of the rows of `info` -> its sort key. Names rise, other values fall.
_ORDERS: Final[dict[str, Callable[[PartitionSummary], Any]]] = {
    "name": lambda summary: (summary.topic, summary.partition),
    "size": lambda summary: -summary.size_bytes,
    "segments": lambda summary: -summary.segments,
    "offsets": lambda summary: summary.log_start_offset - summary.high_watermark,
    "newest": lambda summary: -summary.max_timestamp_ms,
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
@click.option(
    "--segments",
    "shows_segments",
    is_flag=True,
    help="Show each segment: offsets, times, codecs, damage, and what retention deletes next.",
)
@json_option
def info(
    directory: str | None,
    topic: str | None,
    sort: str,
    shows_segments: bool,
    as_json: bool,
) -> None:
    """Show versions and installed parts; with DIR, show partitions with their sizes and
    the processes that write them.
    """
    if directory is None:
        if shows_segments:
            raise click.UsageError("--segments needs DIR")
        from logcore.cli.packages import installation, installation_text

        click.echo(to_json(installation()) if as_json else installation_text())
        return
    if shows_segments:
        _print_segments(directory, topic, as_json)
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
            for summary in found:
                out.write(to_json({**summary.as_dict(), "writers": pids}))
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
            os.path.basename(os.path.realpath(summary.path)),
            summary.segments,
            size_text(summary.size_bytes),
            summary.log_start_offset,
            summary.high_watermark,
            time_text(summary.first_timestamp_ms, "seconds"),
            time_text(summary.max_timestamp_ms, "seconds"),
            ", ".join(f"{count:,} {codec}" for codec, count in summary.codecs.items()),
        )
        for summary in found
    ]
    if len(found) > 1:
        size = size_text(sum(summary.size_bytes for summary in found))
        segments = sum(summary.segments for summary in found)
        newest = max(summary.max_timestamp_ms for summary in found)
        shown = time_text(newest, "seconds")
        rows.append(("total", segments, size, None, None, None, shown, None))
    print_table(headers, rows, right=(1, 2, 3, 4))
    for writer in writers:
        sharing = ", which shares the directory" if writer.is_shared else ""
        click.echo(f"written by {writer}{sharing}")


def _print_segments(directory: str, topic: str | None, as_json: bool) -> None:
    """Print a row for each segment of a partition or of all partitions."""
    now_ms = time.time_ns() // 1_000_000
    paths = named_directories(directory, topic)
    settings = _settings(directory, paths)
    rows = []
    with Lines() as out:
        for path in paths:
            name = os.path.basename(os.path.realpath(path))
            found = segment_map(path, config=settings.get(name), now_ms=now_ms)
            for segment in found.segments:
                if wants_json(as_json):
                    out.write(to_json({"partition": name, **segment.as_dict()}))
                    continue
                marks = {
                    "active": segment.is_active,
                    "dirty": segment.is_dirty,
                    "expired": segment.is_expired,
                    "damaged": segment.is_damaged,
                }
                rows.append(
                    (
                        name,
                        segment.base_offset,
                        segment.end_offset,
                        size_text(segment.size_bytes),
                        segment.batches,
                        segment.records,
                        time_text(segment.first_timestamp_ms, "seconds"),
                        time_text(segment.max_timestamp_ms, "seconds"),
                        ", ".join(segment.codec_bytes),
                        " ".join(mark for mark, is_set in marks.items() if is_set),
                    )
                )
            for problem in found.problems:
                click.echo(f"{name}: {problem}", err=True)
    if not wants_json(as_json):
        headers = ("partition", "start", "end", "size", "batches", "records")
        more = ("first time", "newest", "codecs", "marks")
        print_table((*headers, *more), rows, right=range(1, 6))


def _settings(directory: str, paths: list[str]) -> dict[str, LogConfig]:
    """Return the settings of partitions by the names of their directories.

    The result does not contain partitions whose log directory cannot be opened.
    """
    parent = os.path.realpath(directory)
    if paths == [directory]:
        parent = os.path.dirname(parent)
    found = {}
    with (
        contextlib.suppress(logcore.LogcoreError),
        logcore.open_dir(parent, read_only=True) as logdir,
    ):
        for path in paths:
            name = os.path.basename(os.path.realpath(path))
            key = partition_of(name)
            if key is not None and key[0] in logdir:
                found[name] = logdir.settings(key[0])
    return found
