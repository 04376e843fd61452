"""Staged writes for tests: the work that the tasks and the driver of a Spark job do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import logcore
from logcore.config import LogConfig
from logcore.fs import FS, OS
from logcore.kernels.layout import InputColumns
from logcore.log import open_log
from logcore.metadata.filenames import staging_path
from logcore.staging.manifest import Manifest, StagedFile
from logcore.staging.publishing import Staging
from logcore.staging.writing import StagedWriter

PARTITIONS = (0, 1)
SMALL = {"segment.bytes": "4000", "index.interval.bytes": "200"}


def column(values: list[bytes]) -> Any:
    edges = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(
        np.int64
    )
    return np.frombuffer(b"".join(values), np.uint8), edges, None


def rows(name: str, partition: int, count: int = 30) -> list[bytes]:
    return [b"%s-%d-%d" % (name.encode(), partition, number) for number in range(count)]


def stage(
    path: Path,
    txid: str,
    *,
    fs: FS = OS,
    count: int = 30,
    tasks: int = 2,
    topic: str = "t",
    name: str | None = None,
    config: dict[str, str] | None = None,
    carries: bool = False,
) -> list[StagedFile]:
    """Do the work of the tasks: each task writes its share of rows() to each partition.
    With `carries`, tasks send their rows in messages, and the driver stores the rows.
    """
    Staging(fs, str(path)).begin(txid)
    files = []
    pieces = []
    for partition in PARTITIONS:
        values = rows(name or txid, partition, count)
        share = -(-count // tasks)
        for task in range(tasks):
            attempt = f"{task}.{task + 7}"
            settings = LogConfig.parse(config)
            writer = StagedWriter(
                fs,
                str(path),
                txid,
                topic,
                partition,
                attempt,
                settings,
                batch_bytes=200,
                holds=carries,
            )
            part = values[task * share : (task + 1) * share]
            writer.append_columns(InputColumns(None, column(part), None, len(part)))
            if carries:
                pieces += [
                    carried for carried in [writer.carry()] if carried is not None
                ]
            else:
                files += writer.close()
    return [*files, *Staging(fs, str(path)).store(txid, pieces)]


def manifest(
    files: list[StagedFile], txid: str, app: str = "app", version: int = 0
) -> Manifest:
    return Manifest(
        app_id=app,
        version=version,
        txid=txid,
        files=files,
        topics={"t": len(PARTITIONS)},
    )


def publish(
    path: Path, txid: str, app: str = "app", version: int = 0, **how: Any
) -> Staging:
    fs = how.get("fs", OS)
    staging = Staging(fs, str(path))
    staging.publish(manifest(stage(path, txid, **how), txid, app, version))
    return staging


def values(path: Path, partition: int, *, fs: FS = OS) -> list[bytes | None]:
    """Return all values of a partition of topic t, whose offsets must have no gap."""
    with open_log(path / f"t-{partition}", read_only=True, fs=fs) as log:
        records = list(log.read(log.log_start_offset))
    assert [record.offset for record in records] == list(range(len(records)))
    return [record.value for record in records]


def staged(path: Path, *, fs: FS = OS) -> list[str]:
    return sorted(fs.listdir(staging_path(str(path))))


def create(path: Path, config: dict[str, str] | None = None, *, fs: FS = OS) -> Path:
    with logcore.open_dir(path, create=True, fs=fs) as directory:
        directory.create_topic("t", len(PARTITIONS), config=config)
        for partition in PARTITIONS:
            directory.partition("t", partition).append(b"before")
    return path
