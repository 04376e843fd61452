"""Simulates write_local() without a JVM: its tasks, and the receipts that its driver
returns.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import logcore
from logcore.fs import FS, OS
from pyspark_logcore.local import LocalWriter, WriteReceipt
from support.simulated_spark import frame, spark_types


def rows(batch: int, task: int, count: int = 20, size: int = 10) -> list[bytes]:
    return [
        (b"%d-%d-%d." % (batch, task, number)).ljust(size, b"x")
        for number in range(count)
    ]


def writer(
    path: str | Path, batch: int = 0, *, sample: Any = None, **given: Any
) -> LocalWriter:
    settings = {"partitions": 1, "job": "job", "topic": "t", **given}
    schema = spark_types(frame(value=[]) if sample is None else sample)
    return pickle.loads(
        pickle.dumps(LocalWriter.of(str(path), schema=schema, batch=batch, **settings))
    )


def write(
    path: str | Path,
    batch: int = 0,
    tasks: Sequence[Any] | None = None,
    *,
    fs: FS = OS,
    **given: Any,
) -> list[WriteReceipt]:
    """Run a write with all of its tasks. `tasks` are the rows of each task. By default,
    two tasks write rows().
    """
    shares = (
        tasks
        if tasks is not None
        else [frame(value=rows(batch, task)) for task in range(2)]
    )
    planned = writer(path, batch, sample=shares[0], **given)
    found = [
        receipt
        for task, share in enumerate(shares)
        for receipt in planned.write(iter([share]), task, task + 100, fs)
    ]
    return [attrs.evolve(receipt, tasks=len(shares)) for receipt in found]


def values(
    path: str | Path, topic: str = "t", *, fs: FS = OS, **options: Any
) -> dict[int, list[bytes | None]]:
    """Return all values by partition, or {} if the topic does not exist. The offsets must
    have no gap.
    """
    found: dict[int, list[bytes | None]] = {}
    if not fs.is_directory(os.fspath(path)):
        return found
    with logcore.open_dir(path, fs=fs, read_only=True, **options) as directory:
        if topic not in directory:
            return found
        for number in directory.partitions(topic):
            records = list(directory.partition(topic, number).read(0))
            assert [record.offset for record in records] == list(range(len(records)))
            found[number] = [record.value for record in records]
    return found


def as_dicts(receipts: Sequence[WriteReceipt]) -> list[Mapping[str, Any]]:
    return [attrs.asdict(receipt) for receipt in receipts]
