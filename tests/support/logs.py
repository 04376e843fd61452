"""Logs for tests: their settings, their rows and functions that read them back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import logcore
from logcore.testing import Operation

T0 = 1_700_000_000_000
SMALL = {"segment.bytes": 600, "index.interval.bytes": 60, "batch.size": 200}
POLICIES = ["always", "group", "every(3)", "interval(1)", "os"]


def values(
    log: logcore.Log, start: int | None = None, end: int | None = None
) -> list[bytes | None]:
    return [
        record.value
        for record in log.read(log.log_start_offset if start is None else start, end)
    ]


def segments(partition: Path) -> list[int]:
    return sorted(int(path.name[:20]) for path in partition.glob("*.log"))


def describe_operations(operations: Sequence[Operation]) -> str:
    """Return operations as text, without the directory and most zeros of names. The
    steps of an atomic replacement are shown as one `replace`.
    """
    text = "; ".join(map(str, operations)).replace("/t-0/", "").replace("0" * 17, "")
    return re.sub(
        r"create (\S+)\.tmp; pwrite \S+; fsync \S+; rename \1; sync_dir [^;]+",
        r"replace \1",
        text,
    )
