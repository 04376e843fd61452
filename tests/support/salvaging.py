"""Damaged logs for `logcore recover`, and checks of the saved records."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import logcore
from logcore.inspect.salvage import Part, PartitionReport, salvage
from logcore.inspect.verify import verify
from logcore.metadata.filenames import file_name
from logcore.recordbatch import encode, read_batches
from logcore.testing import FaultPlan, SimulatedDisk

SOURCE = "/data/t-0"
TARGET = "/out/t-0"
T0 = 1_700_000_000_000


def batches_of(files: dict[str, bytes], directory: str = SOURCE) -> dict[int, bytes]:
    """Return the bytes of every batch in the .log files of a directory, by base offset."""
    names = sorted(
        name
        for name in files
        if os.path.dirname(name) == directory and name.endswith(".log")
    )
    return {
        batch.base_offset: files[name][
            batch.position : batch.position + batch.size_bytes
        ]
        for name in names
        for batch in read_batches(files[name])
    }


def recover(
    files: dict[str, Any], faults: FaultPlan | None = None, *, quick: bool = False
) -> tuple[PartitionReport, dict[int, bytes]]:
    """Salvage SOURCE, and return the report and the saved batches. Check that the source
    is unchanged and, unless `quick`, that the saved log is valid.
    """
    disk = SimulatedDisk({"/data": None, SOURCE: None, **files}, faults=faults)
    before = disk.files()
    report = salvage(SOURCE, TARGET, fs=disk)
    disk.faults = None
    after = disk.files()
    assert {path: after[path] for path in before} == before, "the source was changed"
    assert not disk.open_handles
    assert not [path for path in after if path.endswith(".tmp")]
    (partition,) = report.partitions
    saved = batches_of(after, TARGET)
    if quick:
        return partition, saved
    verdicts = [
        verdict for verdict in verify(TARGET, fs=disk) if verdict.status == "damaged"
    ]
    assert not verdicts, verdicts
    assert partition.batches == len(saved) and partition.size_bytes == sum(
        map(len, saved.values())
    )
    assert partition.records == sum(
        len(b.records()) for raw in saved.values() for b in read_batches(raw)
    )
    with logcore.open(TARGET, fs=disk) as log:
        assert (log.log_start_offset, log.log_end_offset) == (
            partition.log_start_offset,
            partition.log_end_offset,
        )
        assert log.append(b"next").offset == partition.log_end_offset
    return partition, saved


def lost_offsets(parts: Iterable[Part]) -> set[int]:
    found: set[int] = set()
    for part in parts:
        if part.first_offset is not None and part.last_offset is not None:
            found |= set(range(part.first_offset, part.last_offset + 1))
    return found


def log_of(
    *batches: tuple[int, bytes], codec: str = "uncompressed", size: int = 1
) -> bytes:
    """Return the bytes of a log of batches with `size` records each, at these offsets."""
    return b"".join(
        encode(
            [(b"k", value, (), T0)] * size,
            codec=codec,
            base_offset=offset,
            leader_epoch=0,
        )
        for offset, value in batches
    )


def path_of(base: int, suffix: str = ".log") -> str:
    return f"{SOURCE}/{file_name(base, suffix)}"


#: The metadata of a log that logcore has written, in which offsets have no gap.
DENSE = {
    f"{SOURCE}/logcore.policy": b'{"durability": "group", "max_bytes": 1048576, "dense_from": 0}\n'
}


def tree(path: Path) -> dict[str, tuple[str, int]]:
    """Return the checksum and the modification time of every file."""
    return {
        str(file.relative_to(path)): (
            hashlib.sha256(file.read_bytes()).hexdigest(),
            file.stat().st_mtime_ns,
        )
        for file in path.rglob("*")
        if file.is_file()
    }
