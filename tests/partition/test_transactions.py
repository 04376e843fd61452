"""Transactions: open and aborted records, and reads of markers that fail."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

import logcore
from logcore.log import open_log
from logcore.recordbatch import encode, stamp_crc
from logcore.testing import Fault, FaultPlan, SimulatedDisk

LOG = f"{0:020d}.log"


def data_batch(offset: int, value: bytes, producer_id: int) -> bytes:
    options = {
        "transactional": True,
        "producer_id": producer_id,
        "producer_epoch": 0,
        "base_sequence": 0,
    }
    return encode([(None, value)], base_offset=offset, leader_epoch=0, **options)


def marker(offset: int, producer_id: int, *, commit: bool) -> bytes:
    key = struct.pack(">hh", 0, int(commit))
    value = struct.pack(">hi", 0, 1)
    options = {"transactional": True, "producer_id": producer_id, "producer_epoch": 0}
    raw = bytearray(
        encode([(key, value)], base_offset=offset, leader_epoch=0, **options)
    )
    struct.pack_into(">h", raw, 21, 0x30)
    stamp_crc(raw)
    return bytes(raw)


MIXED_BATCHES = [
    data_batch(0, b"committed", 1),
    data_batch(1, b"aborted", 2),
    marker(2, 1, commit=True),
    marker(3, 2, commit=False),
    data_batch(4, b"committed too", 2),
    marker(5, 2, commit=True),
    encode([(None, b"plain")], base_offset=6, leader_epoch=0),
    data_batch(7, b"open", 3),
]


def partition_of(path: Path, batches: list[bytes]) -> Path:
    path.mkdir(parents=True)
    (path / LOG).write_bytes(b"".join(batches))
    return path


def committed(log: logcore.Log) -> list[bytes | None]:
    return [record.value for record in log.read(0, isolation="read_committed")]


def test_P52_read_committed_skips_aborted_and_open_transactions(
    partition: Path,
) -> None:
    with logcore.open(partition_of(partition, MIXED_BATCHES), read_only=True) as log:
        assert log.last_stable_offset == 7
        assert committed(log) == [b"committed", b"committed too", b"plain"]
        assert [record.offset for record in log.read(0)] == [0, 1, 4, 6, 7]


@pytest.mark.parametrize("nth", range(1, 12))
def test_failed_read_of_a_marker_does_not_turn_aborted_into_committed(
    partition: Path, nth: int
) -> None:
    partition_of(partition, MIXED_BATCHES)
    disk = SimulatedDisk(
        {f"/t-0/{file.name}": file.read_bytes() for file in partition.iterdir()}
    )
    with open_log("/t-0", read_only=True, fs=disk) as log:
        disk.faults = FaultPlan(Fault("pread", errno.EIO, at=nth))
        try:
            committed(log)
        except logcore.StorageReadError:
            pass
        disk.faults = None
        assert committed(log) == [b"committed", b"committed too", b"plain"]


def test_damaged_marker_is_an_error(partition: Path) -> None:
    batches = [*MIXED_BATCHES]
    batches[3] = batches[3][:8] + b"\xff\xff\xff\xff" + batches[3][12:]
    partition_of(partition, batches)
    with (
        logcore.open(partition, read_only=True) as log,
        pytest.raises(logcore.CorruptBatchError),
    ):
        committed(log)


def test_read_committed_with_many_aborted_transactions_of_one_producer(
    partition: Path,
) -> None:
    batches = []
    for number in range(0, 3000, 2):
        batches += [
            data_batch(number, b"%d" % number, 5),
            marker(number + 1, 5, commit=number % 3 == 0),
        ]
    with logcore.open(partition_of(partition, batches), read_only=True) as log:
        assert committed(log) == [
            b"%d" % number for number in range(0, 3000, 2) if number % 3 == 0
        ]


def test_zeros_after_the_end_do_not_hide_committed_records() -> None:
    """A crash left zeros after the high watermark, and no writer has truncated them
    yet. They do not affect readers.
    """
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk)
    log.append(b"one")
    disk.kill()
    path = f"/t-0/{0:020d}.log"
    disk_with_zeros = SimulatedDisk(
        {**disk.files(), path: (disk.files()[path] or b"") + bytes(4096)}
    )
    with logcore.open("t-0", read_only=True, fs=disk_with_zeros) as reader:
        assert [
            record.value for record in reader.read(0, isolation="read_committed")
        ] == [b"one"]
