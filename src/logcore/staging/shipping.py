"""Whole segments of another log as staged ones: logs move from directory to directory and no record is decoded.

Rules:
- Only a log that is closed and dense is shipped: its offsets have no gap, its records belong to no transaction and to
  no idempotent producer. Then its batches may get any offsets that follow each other.
- Bytes are compared with what was noted of them when they were written, before anything of them is published.
- The log that is shipped stays as it is.

This module publishes nothing (publishing.py), and keeps no note of what was shipped: the state of an application does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from logcore.errors import CorruptLogError, InvalidRecordError, LogNotFoundError
from logcore.fs import FS, opened
from logcore.kernels import kernel, layout
from logcore.kernels.checksum import crc32c
from logcore.names import INDEX, LOG, TIME_INDEX, file_name, staging_path
from logcore.partition.segmentfiles import list_bases
from logcore.staging.manifest import Carried, StagedFile, check_txid

_PIECE_BYTES: Final = 1 << 20
#: What is held of all small segments of a shipment; those behind it get a file each.
_HELD_BYTES: Final = 64 << 20
#: Why the batches of a log cannot get other offsets.
_TIED: Final = layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT


@attrs.frozen
class Sealed:
    """A segment that will not change. base_offset: of its first record, in the log it lies in. The others: as of a
    StagedFile.
    """

    base_offset: int
    count: int
    size_bytes: int
    batches: int
    max_timestamp: int
    crc: int


def survey(fs: FS, path: str) -> list[Sealed]:
    """The segments of a closed log that hold records, in order, every batch of them checked.

    Raises CorruptBatchError, CorruptLogError, and InvalidRecordError for a log that cannot be shipped.
    """
    found = []
    end = None
    for base in list_bases(fs, path):
        name = os.path.join(path, file_name(base, LOG))
        with opened(fs, name) as handle:
            size = fs.size(handle)
            if size:
                view = fs.map(handle, size)
                one = _surveyed(view, base, name)
                if end not in (None, base):
                    raise InvalidRecordError("a log with gaps cannot be shipped", path=name, expected=end, found=base)
                end = base + one.count
                found.append(one)
    return found


def _surveyed(view: memoryview, base: int, name: str) -> Sealed:
    facts, stop, why = kernel.walk(view, 0, len(view), layout.INT32_MAX, True)
    if stop != len(view) or not len(facts):
        raise CorruptLogError(
            f"a segment cannot be shipped: {layout.WALK_REASONS[why]}", path=name, position=stop, found=len(view)
        )
    spans = facts["last_offset"] - facts["base_offset"] + 1
    dense = np.array_equal(facts["base_offset"], base + np.cumsum(spans) - spans)
    tied = (facts["attributes"] & _TIED != 0) | (facts["producer_id"] >= 0) | (facts["magic"] != 2)
    if not dense or (facts["record_count"] != spans).any() or tied.any():
        raise InvalidRecordError(
            "a segment with gaps, or with records of transactions or idempotent producers, cannot be shipped", path=name
        )
    newest = int(facts["max_timestamp"].max())
    return Sealed(base, int(spans.sum()), len(view), len(facts), newest, crc32c(view))


class Shipment:
    """The parts of one write in its staging directory, which Staging.begin() made."""

    def __init__(self, fs: FS, directory: str, txid: str, carry_bytes: int = 1 << 20) -> None:
        """directory: the log directory that is to have the records. carry_bytes: segments up to this size are held, all
        of them in one file at the end; larger ones get a file each.
        """
        self._fs = fs
        self._txid = txid
        self._directory = os.path.join(staging_path(fs.real_path(directory)), check_txid(txid))
        self._carry_bytes = carry_bytes
        self._held_bytes = 0
        self._is_changed = False

    def add(
        self, path: str, sealed: Sequence[Sealed], topic: str, partition: int, stem: str
    ) -> list[StagedFile | Carried]:
        """Takes the segments of the partition directory `path` as records of a partition. stem: as none other's.

        Carried pieces are for Staging.store(). Raises CorruptLogError when a segment is not as it was noted, and
        LogNotFoundError when it is gone.
        """
        found: list[StagedFile | Carried] = []
        for number, one in enumerate(sealed):
            source = os.path.join(path, file_name(one.base_offset, LOG))
            if one.size_bytes <= self._carry_bytes and self._held_bytes + one.size_bytes <= _HELD_BYTES:
                data = self._read(source, one)
                self._held_bytes += len(data)
                facts = (one.count, one.batches, one.max_timestamp, one.crc)
                found.append(Carried(topic, partition, data, *facts))
                continue
            name = f"{topic}-{partition}.{stem}.{number}"
            self._copy(source, os.path.join(self._directory, name + LOG), one)
            for suffix in (INDEX, TIME_INDEX):  # their entries are relative to the base offset
                self._copy_index(
                    os.path.join(path, file_name(one.base_offset, suffix)), os.path.join(self._directory, name + suffix)
                )
            facts_of_file = (one.count, one.size_bytes, one.batches, one.max_timestamp, one.crc)
            found.append(StagedFile(topic, partition, f"{self._txid}/{name}", *facts_of_file))
        return found

    def close(self) -> None:
        """Brings the names of what was added to the disk."""
        if self._is_changed:
            self._fs.sync_dir(self._directory)

    def _read(self, source: str, one: Sealed) -> bytes:
        try:
            with opened(self._fs, source) as handle:
                data = self._fs.pread(handle, one.size_bytes + 1, 0)
        except FileNotFoundError as error:
            raise LogNotFoundError("a segment that was to be shipped is gone", path=source) from error
        _compare(source, one, len(data), crc32c(data))
        return data

    def _copy(self, source: str, target: str, one: Sealed) -> None:
        fs = self._fs
        self._is_changed = True
        at = 0
        crc = 0
        try:
            with opened(fs, source) as reading, opened(fs, target, write=True, create=True) as writing:
                while at <= one.size_bytes:
                    piece = fs.pread(reading, _PIECE_BYTES, at)
                    if not piece:
                        break
                    fs.pwrite(writing, piece, at)
                    crc = crc32c(piece, crc)
                    at += len(piece)
                fs.fsync(writing)
        except FileNotFoundError as error:
            raise LogNotFoundError("a segment that was to be shipped is gone", path=source) from error
        _compare(source, one, at, crc)

    def _copy_index(self, source: str, target: str) -> None:
        fs = self._fs
        if not fs.exists(source):
            return
        with opened(fs, source) as reading, opened(fs, target, write=True, create=True) as writing:
            size = fs.size(reading)
            if size:
                fs.pwrite(writing, fs.pread(reading, size, 0), 0)
            fs.fsync(writing)


def _compare(path: str, one: Sealed, size: int, crc: int) -> None:
    if (size, crc) != (one.size_bytes, one.crc):
        raise CorruptLogError(
            "a segment is not what its task wrote",
            path=path,
            expected=f"{one.size_bytes} bytes, CRC-32C {one.crc:#010x}",
            found=f"{size} bytes, {crc:#010x}",
        )
