"""Hypothesis strategies for the content of logs and for the faults that affect them.

    @given(strategies.lists(strategies.records()), ...)

Values are small, so that a test can use many of them and examples shrink to a readable
size. This module needs the extra `testing`.
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

#: Errors that the operating system may return.
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
#: Calls of a log on its disk that can fail.
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
    """A record without an offset, in the form that append_many accepts."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None

    def at(self, offset: int, now_ms: int = 0) -> Record:
        """Return the record that is stored for this row at `offset`."""
        if self.timestamp_ms is None:
            timestamp_ms = now_ms
        else:
            timestamp_ms = self.timestamp_ms
        return Record(offset, timestamp_ms, self.key, self.value, self.headers)


@attrs.frozen
class CrashPoint:
    """A crash inside a call."""

    #: Number of changes and syncs of the disk before the crash, from the start of the
    #: call on.
    changes: int
    #: Index of the crash state on which the test continues.
    choice: int
    #: A crash during the following recovery, or None.
    again: CrashPoint | None = None


@attrs.frozen
class StoredLog:
    """A cleanly closed log on a disk: its path, its settings and its content."""

    disk: SimulatedDisk
    path: str
    config: dict[str, Any]
    durability: str
    records: list[Record]


def headers() -> st.SearchStrategy[tuple[tuple[str, bytes | None], ...]]:
    """Draw the headers of a record. Names may repeat, values may be null."""
    pair = st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4))
    return st.lists(pair, max_size=2).map(tuple)


def records(
    *, max_size: int = 40, timestamps: st.SearchStrategy[int] | None = None
) -> st.SearchStrategy[Row]:
    """Draw records to append: key, value, headers and an explicit timestamp.

    With an explicit timestamp the stored record equals the drawn one.
    """
    content = st.none() | st.binary(max_size=max_size)
    if timestamps is None:
        times = st.integers(0, 1_000)
    else:
        times = timestamps
    return st.builds(Row, content, content, headers(), times)


def batches(*, max_records: int = 4) -> st.SearchStrategy[bytes]:
    """Draw one encoded batch, as a client sends it and append_batch accepts it."""
    return st.lists(records(), min_size=1, max_size=max_records).map(
        lambda rows: encode(rows, leader_epoch=0)
    )


def stored_records() -> st.SearchStrategy[Record]:
    """Draw records as they are read, with an offset and a timestamp.

    `st.from_type(logcore.Record)` draws from these.
    """
    return st.builds(
        lambda row, offset: row.at(offset), records(), st.integers(0, 1 << 40)
    )


def stored_batches(*, max_records: int = 4) -> st.SearchStrategy[RecordBatch]:
    """Draw batches as they are read, with any base offset, leader epoch and codec.

    `st.from_type(logcore.RecordBatch)` draws from these.
    """

    def parse(
        rows: list[Row], base_offset: int, leader_epoch: int, codec: str
    ) -> RecordBatch:
        data = encode(
            rows, base_offset=base_offset, leader_epoch=leader_epoch, codec=codec
        )
        batch = RecordBatch.parse(data)
        assert batch is not None, "the batch is complete"
        return batch

    return st.builds(
        parse,
        st.lists(records(), min_size=1, max_size=max_records),
        st.integers(0, 1 << 40),
        st.integers(0, 100),
        st.sampled_from(["none", "gzip", "snappy", "lz4", "zstd"]),
    )


def configs(*, compacted: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """Draw settings that make small segments with many index entries.

    With `compacted` they are settings of a topic that is compacted and deleted. Its
    records need keys.
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
    """Draw a durability policy of each kind."""
    return st.sampled_from(["group", "always", "os", "every(3)", "interval(5)"])


def crash_points(*, max_changes: int = 24) -> st.SearchStrategy[CrashPoint]:
    """Draw a crash inside a call and the disk that it leaves.

    Some of the crashes are followed by another one inside the recovery.
    """
    numbers = {"changes": st.integers(0, max_changes), "choice": st.integers(0, 60)}
    point = st.builds(CrashPoint, **numbers)
    return st.builds(CrashPoint, **numbers, again=st.none() | point)


def faults(*, path: str = "*") -> st.SearchStrategy[Fault]:
    """Draw a fault: one operation fails, once or permanently."""
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
    """Draw a log of several segments, written and closed on a simulated disk."""
    config = draw(configs())
    durability = draw(durabilities())
    seed = draw(st.integers(0, 1 << 16))
    rows = draw(st.lists(records(), max_size=max_records))
    disk = SimulatedDisk(seed=seed)
    with open_log(
        path, create=True, config=config, durability=durability, fs=disk
    ) as log:
        for row in rows:
            log.append_many([row])
    return StoredLog(
        disk,
        path,
        config,
        durability,
        [row.at(offset) for offset, row in enumerate(rows)],
    )
