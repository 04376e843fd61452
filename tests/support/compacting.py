"""Logs for compaction, and functions that read their content."""

from __future__ import annotations

from typing import Any

import logcore
from logcore import cleaner
from logcore.cleaner import clean
from logcore.log import Log
from logcore.testing import SimulatedDisk

T0 = 1_700_000_000_000

COMPACT: dict[str, Any] = {
    "cleanup.policy": "compact",
    "segment.bytes": 600,
    "index.interval.bytes": 100,
    "delete.retention.ms": 1000,
}


def open_log(disk: SimulatedDisk, **config: Any) -> Log:
    return logcore.open(
        "t-0", create=True, config={**COMPACT, **config}, fs=disk, durability="os"
    )


def compact(log: Log, **options: Any) -> cleaner.CleaningReport | None:
    log.roll()
    return clean(log, force=True, **options)


def pairs(
    log: Log, isolation: Any = "read_uncommitted"
) -> list[tuple[int, bytes | None, bytes | None]]:
    return [
        (r.offset, r.key, r.value)
        for r in log.read(log.log_start_offset, isolation=isolation)
    ]
