"""How fast is a topic exported to an Iceberg or Delta table, and how much memory does it
take?

Method: records of 16-byte keys and random 100-byte values, or of JSON objects with six
fields, uncompressed in the log, in the page cache. Files are compressed with zstd.
- Export: lake.export() of the topic to a new table, in one commit. It is compared with
  the limit of the same work: pyarrow writes the same columns, which are in memory, to one
  Parquet file.
- Values as columns: the same with JSON. The peer is pyarrow.json.read_json() of the same
  values as lines of a file in memory, and one Parquet file of its result.
- New records: export of 1,000 new records to a table that exists, from load to commit.
- Memory: the growth of the anonymous memory of a process during the export of a topic,
  at its peak, beside the size of the topic. The mapped pages of the log are not counted.
  A commit has 128 MiB of rows in Arrow's format.

Not shown: object stores, other catalogs than SQLite, partitioned tables.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import common
from common import Result, Settings

import logcore
from logcore import lake

TOPIC: Final = "orders"
NEW_RECORDS: Final = 1_000
KINDS: Final = ("delta", "iceberg")

#: Prints the growth of the memory of a process in bytes, at its peak. Pages of the mapped
#: log are not counted: the system may drop them at any time.
MEMORY_PROGRAM: Final = r"""
import re, sys, threading
import pyarrow.parquet, deltalake, pyiceberg.io.pyarrow
import logcore
from logcore import lake

def used():
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\s+(\d+) kB", file.read())[1]) * 1024

def watch():
    global most
    while not done.wait(0.005):
        most = max(most, used())

kind, data, place = sys.argv[1:]
if kind == "delta":
    target = lake.DeltaTarget(place + "/orders")
else:
    target = lake.IcebergTarget("shop.orders", catalog=lake.local_catalog(place))
with logcore.open_dir(data, read_only=True) as logdir:
    before = most = used()
    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    lake.export(logdir, "orders", target)
    done.set()
    watcher.join()
print(most - before)
"""


def run(settings: Settings) -> Iterator[Result]:
    for module in ("pyarrow.parquet", "pyarrow.json", "deltalake", "pyiceberg"):
        if common.peer(module, "exports to tables") is None:
            return
    yield from beside_parquet(settings)
    yield from values_as_columns(settings)
    yield from memory(settings)


def target(kind: str, place: Path, name: str) -> Any:
    if kind == "delta":
        return lake.DeltaTarget(place / name)
    return lake.IcebergTarget(
        f"shop.{name}", catalog=lake.local_catalog(place / "warehouse")
    )


def exporting(
    logdir: logcore.LogDir, place: Path, kind: str, options: lake.ExportOptions
) -> Callable[[], object]:
    """Return a function that exports the topic to a new table at each call."""
    calls = iter(range(1 << 30))

    def export() -> None:
        shutil.rmtree(place / "tables", ignore_errors=True)
        table = target(kind, place / "tables", f"orders_{next(calls)}")
        lake.export(logdir, TOPIC, table, options)

    return export


def beside_parquet(settings: Settings) -> Iterator[Result]:
    import pyarrow.parquet

    count = 100_000 if settings.quick else 1_000_000
    keys, values = common.columns_of(common.make_rows(count))
    with (
        common.scratch(settings, "lake") as path,
        logcore.open_dir(path / "data", create=True, durability="os") as logdir,
    ):
        logdir.create_topic(TOPIC)
        logdir.partition(TOPIC, 0).append_columns(keys=keys, values=values)
        names = ["partition", "offset", "timestamp", "key", "value", "headers"]
        table = logdir.scan(TOPIC, columns=names).to_table()

        def write_parquet() -> None:
            pyarrow.parquet.write_table(
                table, path / "orders.parquet", compression="zstd"
            )

        for kind in KINDS:
            yield common.speed(
                f"export to a new {kind} table",
                count,
                exporting(logdir, path, kind, lake.ExportOptions()),
                {"pyarrow, one Parquet file": write_parquet},
                settings,
                target=0.5,
                method="The peer has the columns in memory, and writes no metadata of a table.",
            )
        for kind in KINDS:
            yield new_records(settings, logdir, path, kind)


def new_records(
    settings: Settings, logdir: logcore.LogDir, path: Path, kind: str
) -> Result:
    """Measure the time for adding a few records to a table."""
    table = target(kind, path / "tables", "added")
    lake.export(logdir, TOPIC, table)
    rows = common.make_rows(NEW_RECORDS)

    def export() -> None:
        logdir.partition(TOPIC, 0).append_many(rows)
        lake.export(logdir, TOPIC, target(kind, path / "tables", "added"))

    seconds = common.measure({"logcore": export}, settings.repeats, median=True)
    return common.in_time(
        f"export {NEW_RECORDS:,} new records to a {kind} table",
        "ms",
        seconds["logcore"] * 1000,
        1000,
        "append_many of the records, load of the table, and one commit.",
    )


def values_as_columns(settings: Settings) -> Iterator[Result]:
    import pyarrow.json
    import pyarrow.parquet

    count = 50_000 if settings.quick else 500_000
    source = random.Random(5)
    objects = [
        {
            "id": n,
            "item": f"item {source.randrange(1000)}",
            "price": source.random(),
            "paid": n % 2 == 0,
            "tags": ["a", "b"],
            "to": {"city": "Ulm", "zip": n % 100_000},
        }
        for n in range(count)
    ]
    values = [json.dumps(entry).encode() for entry in objects]
    with (
        common.scratch(settings, "lake") as path,
        logcore.open_dir(path / "data", create=True, durability="os") as logdir,
    ):
        logdir.create_topic(TOPIC)
        log = logdir.partition(TOPIC, 0)
        for at in range(0, count, 10_000):
            log.append_many([(None, value) for value in values[at : at + 10_000]])
        lines = b"\n".join(values)

        def read_json() -> None:
            table = pyarrow.json.read_json(io.BytesIO(lines))
            pyarrow.parquet.write_table(
                table, path / "orders.parquet", compression="zstd"
            )

        options = lake.ExportOptions(layout=lake.TableLayout(value="json"))
        for kind in KINDS:
            yield common.speed(
                f"export JSON as columns of a {kind} table",
                count,
                exporting(logdir, path, kind, options),
                {"pyarrow.json, one Parquet file": read_json},
                settings,
                target=0.1,
                method="The peer parses in C++ on all cores, and reports no offset of a value that does not fit.",
            )


def memory(settings: Settings) -> Iterator[Result]:
    size_bytes = (256 << 20) if settings.quick else (2 << 30)
    with common.scratch(settings, "lake") as path:
        with logcore.open_dir(path / "data", create=True, durability="os") as logdir:
            logdir.create_topic(TOPIC)
            rows = common.make_rows(100_000)
            common.fill(logdir.partition(TOPIC, 0), rows, size_bytes)
        for kind in KINDS:
            command = [sys.executable, "-c", MEMORY_PROGRAM, kind]
            done = subprocess.run(
                [*command, str(path / "data"), str(path / "tables")],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            grown = int(done.stdout)
            yield Result(
                question=f"export to a {kind} table: growth of memory",
                unit="MiB",
                ours=grown / (1 << 20),
                peer_name="MiB in the topic",
                peer=size_bytes / (1 << 20),
                ratio=grown / (1 << 20),
                ratio_unit=" MiB",
                target=1_024,
                bound="at most",
                method="Anonymous memory at its peak, less that after the imports; sampled every 5 ms.",
            )
