"""How long do snapshots and restores take, beside copies of the files?

Method: a topic with four partitions of 64 MiB, in segments of 16 MiB, in the page cache.
- Elsewhere: the first snapshot in another place that cannot be linked, beside `cp -r` and
  a sync of the copied files. The snapshot also computes checksums.
- Linked: the first snapshot on the same file system, beside the same `cp -r`.
- Again: a snapshot after 1,000 new records, beside SQLite's online backup of a database
  of the same records in rows, after 1,000 new rows. SQLite copies the whole database.
- Restore: from the place that cannot be linked, beside the same `cp -r`.

Not shown: object stores, directories with thousands of partitions.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import common
from common import Result, Settings

import logcore
from logcore.fs import OsFS

_PARTITIONS: Final = 4
_VALUE: Final = b"x" * 1000


class WithoutLinks(OsFS):
    """The file system of another disk: segments cannot be linked."""

    def link(self, source: str, target: str) -> bool:
        return False


def run(settings: Settings) -> Iterator[Result]:
    records = 4_000 if settings.quick else 64_000
    with common.scratch(settings, "backup") as path:
        data = path / "data"
        with logcore.open_dir(data, create=True, durability="os") as logdir:
            logdir.create_topic("t", _PARTITIONS, {"segment.bytes": 16 << 20})
            rows = [(None, _VALUE)] * records
            for number in range(_PARTITIONS):
                logdir.partition("t", number).append_many(rows)
        megabytes = _PARTITIONS * records * len(_VALUE) // 1_000_000
        unlinked = logcore.open_dir(data, read_only=True, fs=WithoutLinks())
        linked = logcore.open_dir(data, read_only=True)
        copy = copying(data, path / "copy")
        with unlinked, linked:
            for question, source in (
                ("first snapshot, elsewhere", unlinked),
                ("first snapshot, linked", linked),
            ):
                yield common.speed(
                    question,
                    megabytes,
                    first_snapshot(source, path / "backup"),
                    {"cp -r, sync": copy},
                    settings,
                    unit="MB/s",
                    target=0.7,
                )
            unlinked.snapshot(path / "kept")
        yield common.speed(
            "restore, from elsewhere",
            megabytes,
            restoring(path / "kept", path / "restored"),
            {"cp -r, sync": copy},
            settings,
            unit="MB/s",
            target=0.7,
        )
        yield again(settings, path, data, records)


def copying(source: Path, target: Path) -> Callable[[], object]:
    def copy() -> None:
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-r", source, target], check=True)
        subprocess.run(["sync", *target.rglob("*.log")], check=True)

    return copy


def first_snapshot(source: logcore.LogDir, target: Path) -> Callable[[], object]:
    def take() -> None:
        shutil.rmtree(target, ignore_errors=True)
        source.snapshot(target)

    return take


def restoring(backup: Path, target: Path) -> Callable[[], object]:
    def restore() -> None:
        shutil.rmtree(target, ignore_errors=True)
        logcore.restore(backup, target, fs=WithoutLinks())

    return restore


def again(settings: Settings, path: Path, data: Path, records: int) -> Result:
    database = sqlite3.connect(path / "data.sqlite", isolation_level=None)
    database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, value BLOB)")
    add_rows(database, _PARTITIONS * records)
    with logcore.open_dir(data, durability="os") as logdir:
        logdir.snapshot(path / "again")

        def snapshot() -> None:
            logdir.partition("t", 0).append_many([(None, _VALUE)] * 1000)
            logdir.snapshot(path / "again", keep=1)

        def backup() -> None:
            add_rows(database, 1000)
            with sqlite3.connect(path / "copy.sqlite") as target:
                database.backup(target)
            target.close()
            with open(path / "copy.sqlite", "rb") as file:
                os.fsync(file.fileno())

        result = common.speed(
            "another snapshot after 1,000 records",
            1,
            snapshot,
            {"SQLite's online backup": backup},
            settings,
            unit="snapshots/s",
            target=5.0,
        )
    database.close()
    return result


def add_rows(database: sqlite3.Connection, count: int) -> None:
    database.execute("BEGIN")
    database.executemany("INSERT INTO t (value) VALUES (?)", [(_VALUE,)] * count)
    database.execute("COMMIT")
