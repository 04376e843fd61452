"""Tables of both formats for the tests of logcore.lake, and exports in processes that
are killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import logcore
from logcore import lake
from logcore.errors import CommitConflictError

TOPIC = "orders"
PARTITIONS = 3
#: Small, so that an export of a few hundred records has a dozen commits.
COMMIT_BYTES = 2_000
KINDS = ("delta", "iceberg")


def target(kind: str, directory: Path, name: str = "orders") -> Any:
    """Return a table below a directory."""
    if kind == "delta":
        return lake.DeltaTarget(directory / name)
    return lake.IcebergTarget(f"shop.{name}", catalog=lake.local_catalog(directory))


def rows_of(kind: str, directory: Path, name: str = "orders") -> Any:
    """Return all rows of a table as an Arrow table, in the order of partition and
    offset. The rows are read by the library of the format.
    """
    if kind == "delta":
        import deltalake

        found = deltalake.DeltaTable(directory / name).to_pyarrow_table()
    else:
        found = (
            lake.local_catalog(directory).load_table(f"shop.{name}").scan().to_arrow()
        )
    return found.sort_by([("partition", "ascending"), ("offset", "ascending")])


def offsets_of(
    kind: str, directory: Path, name: str = "orders"
) -> list[tuple[int, int]]:
    """Return partition and offset of each row of a table."""
    found = rows_of(kind, directory, name)
    columns = (found.column("partition"), found.column("offset"))
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def committed_offsets(logdir: logcore.LogDir) -> list[tuple[int, int]]:
    """Return partition and offset of each committed record of the topic."""
    return [
        (record.partition, record.offset)
        for record in logdir.topic(TOPIC).read(isolation="read_committed")
    ]


def fill(logdir: logcore.LogDir, count: int, first: int = 0) -> None:
    """Append records to all partitions. Each dozen is a transaction. Every fourth
    transaction is aborted.
    """
    producer = logdir.producer(transactional_id="writer", threaded=False)
    producer.init_transactions()
    for at in range(first, first + count, 12):
        producer.begin_transaction()
        for n in range(at, at + 12):
            producer.send(
                TOPIC,
                b"value %d" % n,
                key=b"key %d" % n,
                partition=n % PARTITIONS,
                headers=[("source", b"web")] if n % 2 else [],
                timestamp_ms=1_700_000_000_000 + n * 3_600_000,
            )
        producer.flush()
        if at // 12 % 4 == 3:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()


def export(kind: str, data: Path, directory: Path, die_at: int = 0) -> None:
    """Run an export in this process, and kill the process at a call of a function.

    `die_at` is the number of that call, or 0 if the process is not killed. A conflict
    with another export ends the process with status 3.
    """
    if die_at:
        left = die_at

        def count(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(count)
        sys.setprofile(count)
    options = lake.ExportOptions(commit_bytes=COMMIT_BYTES)
    with (
        logcore.open_dir(data, read_only=True) as logdir,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(sys.setprofile, None)
        stack.callback(threading.setprofile, None)
        try:
            lake.export(logdir, TOPIC, target(kind, directory), options)
        except CommitConflictError:
            sys.exit(3)


def processes() -> Any:
    """Return a multiprocessing context whose processes start after all imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["support.lakes", "deltalake", "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow"]
    )
    return context
