"""Hypothesis strategies for what a log is made of, and for what happens to it.

    @given(strategies.lists(strategies.records()), ...)

Values are small, so that many fit into a test and examples shrink to something one can read. This module needs the
extra `testing`; it draws and builds, and checks nothing.
"""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

import attrs
from hypothesis import strategies as st

from logcore.kernels import Record
from logcore.log import open_log
from logcore.recordbatch import RecordBatch, encode
from logcore.testing.disk import SimulatedDisk
from logcore.testing.faults import Fault

__all__ = [
    "CrashPoint",
    "StoredLog",
    "Row",
    "batches",
    "configs",
    "crash_points",
    "durabilities",
    "faults",
    "headers",
    "logs",
    "records",
    "stored_batches",
    "stored_records",
]

#: Errors that the operating system may answer with.
ERRNOS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)
#: What a log asks of its disk and can be told no.
_FAILING = (
    "create",
    "open",
    "pread",
    "pwrite",
    "truncate",
    "fdatasync",
    "fsync",
    "sync_dir",
    "rename",
    "unlink",
    "listdir",
    "size",
    "map",
)


class Row(NamedTuple):
    """A record before it has an offset, as append_many takes it."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None

    def at(self, offset: int, now_ms: int = 0) -> Record:
        """The record that it becomes."""
        if self.timestamp_ms is None:
            timestamp_ms = now_ms
        else:
            timestamp_ms = self.timestamp_ms
        return Record(offset, timestamp_ms, self.key, self.value, self.headers)


@attrs.frozen
class CrashPoint:
    """A crash inside a call: in the `changes`-th change or sync of the disk from its beginning, and which of the disks
    is left, by number. again: where the recovery from it is crashed, too.
    """

    changes: int
    choice: int
    again: CrashPoint | None = None


@attrs.frozen
class StoredLog:
    """A log on a disk, closed well: its path and settings, and what is in it."""

    disk: SimulatedDisk
    path: str
    config: dict[str, Any]
    durability: str
    records: list[Record]


def headers() -> st.SearchStrategy[tuple[tuple[str, bytes | None], ...]]:
    """Headers of a record: names may repeat, values may be null."""
    pair = st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4))
    return st.lists(pair, max_size=2).map(tuple)


def records(*, max_size: int = 40, timestamps: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[Row]:
    """Records to append: key, value, headers, and a time that is given, so that they come back as they are."""
    content = st.none() | st.binary(max_size=max_size)
    if timestamps is None:
        times = st.integers(0, 1_000)
    else:
        times = timestamps
    return st.builds(Row, content, content, headers(), times)


def batches(*, max_records: int = 4) -> st.SearchStrategy[bytes]:
    """One encoded batch, as a client sends it and append_batch takes it."""
    return st.lists(records(), min_size=1, max_size=max_records).map(lambda rows: encode(rows, leader_epoch=0))


def stored_records() -> st.SearchStrategy[Record]:
    """Records as they are read: with an offset and a time. `st.from_type(logcore.Record)` draws from these."""
    return st.builds(lambda row, offset: row.at(offset), records(), st.integers(0, 1 << 40))


def stored_batches(*, max_records: int = 4) -> st.SearchStrategy[RecordBatch]:
    """Whole batches as they are read, with any base offset, leader epoch and codec. `st.from_type(logcore.RecordBatch)`
    draws from these.
    """

    def parse(rows: list[Row], base_offset: int, leader_epoch: int, codec: str) -> RecordBatch:
        data = encode(rows, base_offset=base_offset, leader_epoch=leader_epoch, codec=codec)
        batch = RecordBatch.parse(data)
        assert batch is not None, "it is whole"
        return batch

    return st.builds(
        parse,
        st.lists(records(), min_size=1, max_size=max_records),
        st.integers(0, 1 << 40),
        st.integers(0, 100),
        st.sampled_from(["none", "gzip", "snappy", "lz4", "zstd"]),
    )


def configs(*, compacted: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """Settings that make small segments with many index entries; compacted: of a topic that is compacted and deleted,
    whose records need keys.
    """
    settings: dict[str, st.SearchStrategy[Any]] = {
        "segment.bytes": st.sampled_from([300, 600, 2_000]),
        "index.interval.bytes": st.sampled_from([0, 100, 4096]),
        "batch.size": st.sampled_from([100, 16_384]),
    }
    if compacted:
        settings["cleanup.policy"] = st.just("compact,delete")
        settings["delete.retention.ms"] = st.sampled_from([0, 1_000])
        settings["file.delete.delay.ms"] = st.sampled_from([0, 60_000])
    return st.fixed_dictionaries(settings)


def durabilities() -> st.SearchStrategy[str]:
    """Each kind of policy."""
    return st.sampled_from(["group", "always", "os", "every(3)", "interval(5)"])


def crash_points(*, max_changes: int = 24) -> st.SearchStrategy[CrashPoint]:
    """When the power goes inside a call, and what is left; for one in a few, also inside the recovery."""
    numbers = {"changes": st.integers(0, max_changes), "choice": st.integers(0, 60)}
    point = st.builds(CrashPoint, **numbers)
    return st.builds(CrashPoint, **numbers, again=st.none() | point)


def faults(*, path: str = "*") -> st.SearchStrategy[Fault]:
    """One operation that fails, once or for ever."""
    return st.builds(
        Fault,
        operation=st.sampled_from(_FAILING),
        action=st.sampled_from(ERRNOS),
        path=st.just(path),
        at=st.integers(1, 6),
        times=st.sampled_from([1, 1, None]),
    )


@st.composite
def logs(draw: st.DrawFn, *, path: str = "t-0", max_records: int = 20) -> StoredLog:
    """A log of some segments, written and closed on a simulated disk."""
    config = draw(configs())
    durability = draw(durabilities())
    seed = draw(st.integers(0, 1 << 16))
    rows = draw(st.lists(records(), max_size=max_records))
    disk = SimulatedDisk(seed=seed)
    with open_log(path, create=True, config=config, durability=durability, fs=disk) as log:
        for row in rows:
            log.append_many([row])
    return StoredLog(disk, path, config, durability, [row.at(offset) for offset, row in enumerate(rows)])
