"""`logcore snapshot`, `snapshots` and `restore`: backups of log directories.

Rules:
- snapshot reads the directory only, so any process may write it concurrently.
- restore writes to a path that does not exist yet.

backup/ does the work.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

import click

import logcore
from logcore.cli.arguments import timestamp_of
from logcore.cli.options import DAMAGED, directory_argument, json_option
from logcore.cli.terminal import (
    Lines,
    print_table,
    progress,
    size_text,
    time_text,
    to_json,
    wants_json,
)


@click.command()
@directory_argument
@click.argument("backup", metavar="BACKUP")
@click.option(
    "--keep",
    type=click.IntRange(1),
    metavar="N",
    help="Delete older snapshots, so that N remain.",
)
@json_option
def snapshot(directory: str, backup: str, keep: int | None, as_json: bool) -> None:
    """Store a snapshot of the log directory DIR in BACKUP, while any process writes DIR.

    BACKUP is a directory, or a URL such as s3://bucket/path?region=eu-west-1. It can
    contain many snapshots; each stores only bytes that are not stored yet. Credentials of
    an object store come from the environment.
    """
    with logcore.open_dir(directory, read_only=True) as logdir:
        total = sum(
            logdir.size_bytes(topic, number)
            for topic in logdir.topics()
            for number in logdir.partitions(topic)
        )
        with progress("reading", total) as tick:
            result = logdir.snapshot(backup, keep=keep, tick=tick)
    if wants_json(as_json):
        with Lines() as out:
            out.write(to_json(_row(result)))
        return
    click.echo(
        f"snapshot {result.id}: {result.partitions:,} partitions, "
        f"{size_text(result.size_bytes)}"
    )
    click.echo(
        f"stored {size_text(result.stored_bytes)}, "
        f"linked {size_text(result.linked_bytes)}; the rest was stored before"
    )
    click.echo(f"restore it with: logcore restore {backup} NEWDIR")


def _row(result: logcore.SnapshotResult) -> dict[str, object]:
    return {
        "id": result.id,
        "time": time_text(result.time_ms),
        "partitions": result.partitions,
        "size_bytes": result.size_bytes,
        "stored_bytes": result.stored_bytes,
        "linked_bytes": result.linked_bytes,
    }


@click.command()
@click.argument("backup", metavar="BACKUP")
@json_option
def snapshots(backup: str, as_json: bool) -> None:
    """List the snapshots in BACKUP, the oldest first. Exit code 1 if one is damaged."""
    found = logcore.snapshots(backup)
    if wants_json(as_json):
        with Lines() as out:
            for snapshot in found:
                out.write(to_json(_info_row(snapshot)))
    else:
        rows = [
            (
                snapshot.id,
                "damaged" if snapshot.time_ms is None else time_text(snapshot.time_ms),
                snapshot.topics,
                snapshot.partitions,
                size_text(snapshot.size_bytes),
            )
            for snapshot in found
        ]
        headers = ("snapshot", "time", "topics", "partitions", "size")
        print_table(headers, rows, right=(2, 3, 4))
    if any(snapshot.time_ms is None for snapshot in found):
        raise click.exceptions.Exit(DAMAGED)


def _info_row(info: logcore.SnapshotInfo) -> dict[str, object]:
    return {
        "id": info.id,
        "time": None if info.time_ms is None else time_text(info.time_ms),
        "is_damaged": info.time_ms is None,
        "topics": info.topics,
        "partitions": info.partitions,
        "size_bytes": info.size_bytes,
    }


@click.command()
@click.argument("backup", metavar="BACKUP")
@click.argument("target", metavar="NEWDIR", type=click.Path())
@click.option(
    "--at",
    metavar="SNAPSHOT",
    help="Id of a snapshot, or a time or age for the newest one up to then. "
    "By default the newest.",
)
@json_option
def restore(backup: str, target: str, at: str | None, as_json: bool) -> None:
    """Write a snapshot in BACKUP to the new log directory NEWDIR.

    Every byte is compared with its checksum. Exit code 2 if the snapshot is damaged;
    NEWDIR does not exist then.
    """
    chosen: str | datetime | None = at
    if at is not None:
        time_ms = timestamp_of(at, time.time_ns() // 1_000_000)
        if time_ms is not None:
            chosen = datetime.fromtimestamp(time_ms / 1000, UTC)
    with progress("restoring", None) as tick:
        info = logcore.restore(backup, target, at=chosen, tick=tick)
    if wants_json(as_json):
        with Lines() as out:
            out.write(to_json(_info_row(info)))
        return
    click.echo(
        f"restored snapshot {info.id} to {target}: {info.topics:,} topics, "
        f"{info.partitions:,} partitions, {size_text(info.size_bytes)}"
    )
