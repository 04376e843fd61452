"""Ships whole segments of another log as staged segments, without decoding records.

Rules:
- Only a closed, dense log is shipped: its offsets have no gap, and its records belong
  to no transaction and no idempotent producer. Its batches can then get any consecutive
  offsets.
- The bytes are compared with the size and checksum from survey() before any of them is
  published.
- The source log is not changed.

This module does not publish (publishing.py) and does not record which segments were
shipped: the state of an application does.
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
from logcore.metadata.filenames import INDEX, LOG, TIME_INDEX, file_name, staging_path
from logcore.partition.segment_files import list_bases
from logcore.staging.manifest import Carried, StagedFile, check_txid

_PIECE_BYTES: Final = 1 << 20
#: Maximum memory for the small segments of one shipment; further segments get a file
#: each.
_HELD_BYTES: Final = 64 << 20
#: Attribute bits of batches whose offsets cannot be changed.
_FIXED_OFFSET_BITS: Final = layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT


@attrs.frozen
class SealedSegment:
    """A segment that will not change. Other fields are like those of a StagedFile."""

    #: Offset of its first record in the source log.
    base_offset: int
    count: int
    size_bytes: int
    batches: int
    max_timestamp: int
    crc: int


def survey(fs: FS, path: str) -> list[SealedSegment]:
    """Return the nonempty segments of a closed log in order, after checking every
    batch.

    Raises:
        CorruptBatchError, CorruptLogError: the log is damaged.
        InvalidRecordError: the log cannot be shipped.
    """
    found = []
    end = None
    for base in list_bases(fs, path):
        name = os.path.join(path, file_name(base, LOG))
        with opened(fs, name) as handle:
            size = fs.size(handle)
            if size:
                view = fs.map(handle, size)
                sealed = _surveyed(view, base, name)
                if end not in (None, base):
                    raise InvalidRecordError(
                        "a log with gaps cannot be shipped",
                        path=name,
                        expected=end,
                        found=base,
                    )
                end = base + sealed.count
                found.append(sealed)
    return found


def _surveyed(view: memoryview, base: int, name: str) -> SealedSegment:
    facts, stop, why = kernel.walk(view, 0, len(view), layout.INT32_MAX, True)
    if stop != len(view) or not len(facts):
        raise CorruptLogError(
            f"a segment cannot be shipped: {layout.WALK_REASONS[why]}",
            path=name,
            position=stop,
            found=len(view),
        )
    spans = facts["last_offset"] - facts["base_offset"] + 1
    dense = np.array_equal(facts["base_offset"], base + np.cumsum(spans) - spans)
    tied = (
        (facts["attributes"] & _FIXED_OFFSET_BITS != 0)
        | (facts["producer_id"] >= 0)
        | (facts["magic"] != 2)
    )
    if not dense or (facts["record_count"] != spans).any() or tied.any():
        raise InvalidRecordError(
            "a segment with gaps, or with records of transactions or idempotent producers, cannot be shipped",
            path=name,
        )
    newest = int(facts["max_timestamp"].max())
    return SealedSegment(
        base, int(spans.sum()), len(view), len(facts), newest, crc32c(view)
    )


class Shipment:
    """The parts of one write, in the staging directory that Staging.begin() created."""

    def __init__(
        self, fs: FS, directory: str, txid: str, carry_bytes: int = 1 << 20
    ) -> None:
        """Start a shipment to the log directory `directory`.

        Segments of at most `carry_bytes` are kept in memory, and stored in one file at
        the end. Larger segments get a file each.
        """
        self._fs = fs
        self._txid = txid
        self._directory = os.path.join(
            staging_path(fs.real_path(directory)), check_txid(txid)
        )
        self._carry_bytes = carry_bytes
        self._held_bytes = 0
        self._is_changed = False

    def add(
        self,
        path: str,
        sealed: Sequence[SealedSegment],
        topic: str,
        partition: int,
        stem: str,
    ) -> list[StagedFile | Carried]:
        """Add segments of the partition directory `path` as records of a partition.

        `stem` must be unique within the write. Pass the Carried pieces of the result to
        Staging.store().

        Raises:
            CorruptLogError: a segment differs from its survey.
            LogNotFoundError: a segment does not exist.
        """
        found: list[StagedFile | Carried] = []
        for number, segment in enumerate(sealed):
            source = os.path.join(path, file_name(segment.base_offset, LOG))
            if (
                segment.size_bytes <= self._carry_bytes
                and self._held_bytes + segment.size_bytes <= _HELD_BYTES
            ):
                data = self._read(source, segment)
                self._held_bytes += len(data)
                facts = (
                    segment.count,
                    segment.batches,
                    segment.max_timestamp,
                    segment.crc,
                )
                found.append(Carried(topic, partition, data, *facts))
                continue
            name = f"{topic}-{partition}.{stem}.{number}"
            self._copy(source, os.path.join(self._directory, name + LOG), segment)
            # Index entries are relative to the base offset.
            for suffix in (INDEX, TIME_INDEX):
                self._copy_index(
                    os.path.join(path, file_name(segment.base_offset, suffix)),
                    os.path.join(self._directory, name + suffix),
                )
            read_batch_facts = (
                segment.count,
                segment.size_bytes,
                segment.batches,
                segment.max_timestamp,
                segment.crc,
            )
            found.append(
                StagedFile(topic, partition, f"{self._txid}/{name}", *read_batch_facts)
            )
        return found

    def close(self) -> None:
        """Make the names of the added files durable."""
        if self._is_changed:
            self._fs.sync_dir(self._directory)

    def _read(self, source: str, sealed: SealedSegment) -> bytes:
        try:
            with opened(self._fs, source) as handle:
                data = self._fs.pread(handle, sealed.size_bytes + 1, 0)
        except FileNotFoundError as error:
            raise LogNotFoundError(
                "a segment that must be shipped is missing", path=source
            ) from error
        _compare(source, sealed, len(data), crc32c(data))
        return data

    def _copy(self, source: str, target: str, sealed: SealedSegment) -> None:
        fs = self._fs
        self._is_changed = True
        at = 0
        crc = 0
        try:
            with (
                opened(fs, source) as reading,
                opened(fs, target, write=True, create=True) as writing,
            ):
                while at <= sealed.size_bytes:
                    piece = fs.pread(reading, _PIECE_BYTES, at)
                    if not piece:
                        break
                    fs.pwrite(writing, piece, at)
                    crc = crc32c(piece, crc)
                    at += len(piece)
                fs.fsync(writing)
        except FileNotFoundError as error:
            raise LogNotFoundError(
                "a segment that must be shipped is missing", path=source
            ) from error
        _compare(source, sealed, at, crc)

    def _copy_index(self, source: str, target: str) -> None:
        fs = self._fs
        if not fs.exists(source):
            return
        with (
            opened(fs, source) as reading,
            opened(fs, target, write=True, create=True) as writing,
        ):
            size = fs.size(reading)
            if size:
                fs.pwrite(writing, fs.pread(reading, size, 0), 0)
            fs.fsync(writing)


def _compare(path: str, sealed: SealedSegment, size: int, crc: int) -> None:
    if (size, crc) != (sealed.size_bytes, sealed.crc):
        raise CorruptLogError(
            "a segment differs from the one that its task wrote",
            path=path,
            expected=f"{sealed.size_bytes} bytes, CRC-32C {sealed.crc:#010x}",
            found=f"{size} bytes, {crc:#010x}",
        )
