"""Logs of processes that were killed."""

from __future__ import annotations

from typing import Any

import logcore
from logcore.recordbatch import read_batches
from logcore.testing import SimulatedDisk

LOG = f"{0:020d}.log"


def values_in(data: bytes) -> list[bytes | None]:
    return [record.value for batch in read_batches(data) for record in batch.records()]


def disk_of_killed_log(times: list[int], **config: Any) -> SimulatedDisk:
    """Return the disk of a killed process with a log of records with these timestamps.
    All records are durable.
    """
    disk = SimulatedDisk()
    log = logcore.open(
        "t-0", create=True, fs=disk, config={"index.interval.bytes": 100, **config}
    )
    for at in times:
        log.append(b"x" * 50, timestamp_ms=at)
    log.flush()
    disk.advance(10_000)
    log.tick()
    disk.kill()
    return disk
