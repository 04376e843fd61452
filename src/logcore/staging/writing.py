"""The part of a task: stages records as segments whose offsets begin at 0, under names that no other attempt has.

Rules:
- A writer with holds=True keeps its records in memory until spill(). If they are few, they are sent to the driver in a
  message: then the task syncs nothing and leaves no file.

This module publishes nothing; a driver does, with the reports of all tasks (publishing.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from logcore.config import LogConfig
from logcore.errors import (
    LogNotFoundError,
)
from logcore.format.columns import InputColumn
from logcore.format.compression import Codec
from logcore.fs import FS
from logcore.kernels import kernel, layout
from logcore.kernels.checksum import crc32c
from logcore.names import LOG, staging_path
from logcore.recordbatch import check_timestamps, compressor, target_codec
from logcore.segment import ActiveSegment
from logcore.staging.manifest import Carried, StagedFile, check_txid


class _StagedSegment(ActiveSegment):
    """An active segment of base offset 0 under a name of its own."""

    def __init__(self, fs: FS, directory: str, stem: str, config: LogConfig) -> None:
        self._stem = stem
        super().__init__(fs, directory, 0, config, create=True)

    def file(self, suffix: str) -> str:
        return os.path.join(self.directory, self._stem + suffix)


class StagedWriter:
    """The records that one attempt of a task writes to one partition: a chain of staged segments, rolled as a log is.

    stem: <topic>-<partition>.<task>.<attempt>, which no other attempt has. codec: what records are compressed with
    where the topic says "producer". batch_bytes: size at which a batch is closed. holds: in memory until spill(), which
    the caller has to call before it is too much.
    """

    def __init__(
        self,
        fs: FS,
        directory: str,
        txid: str,
        topic: str,
        partition: int,
        attempt: str,
        config: LogConfig,
        *,
        codec: Codec = Codec.NONE,
        batch_bytes: int = 64 << 10,
        holds: bool = False,
    ) -> None:
        self._fs = fs
        self._txid = txid
        self._directory = os.path.join(staging_path(fs.real_path(directory)), check_txid(txid))
        self._topic = topic
        self._partition = partition
        self._attempt = attempt
        self._config = config
        codec = target_codec(config, codec)
        most = min(config.max_message_bytes, config.segment_bytes)
        attributes = int(codec) | layout.APPEND_TIME_BIT * config.is_append_time
        no_producer = (-1, -1, -1)
        self._encoding = (min(batch_bytes, most), most, attributes, *no_producer, compressor(codec, config))
        self._scratch = bytearray(1 << 16)
        self._held: bytearray | None = None
        if holds:
            self._held = bytearray()
        self._held_batches: list[layout.EncodedBatch] = []
        self._segment: _StagedSegment | None = None
        self._done: list[StagedFile] = []
        self._crc = self._batches = 0

    def append_columns(
        self,
        keys: InputColumn | None,
        values: InputColumn | None,
        timestamps_ms: npt.NDArray[np.int64] | None,
        count: int,
    ) -> None:
        """Stages rows given as columns, see columns.input_column(); timestamps_ms: now for all when None.

        Raises InvalidRecordError, InvalidTimestampError, RecordTooLargeError, DiskFullError, StorageWriteError.
        """
        now_ms = self._fs.now_ms()
        if timestamps_ms is not None and not self._config.is_append_time:
            check_timestamps(timestamps_ms, now_ms, self._config)
        end = self._end
        require_key = self._config.is_compacted
        size, batches = kernel.encode_columns(
            self._scratch, keys, values, timestamps_ms, count, end, 0, now_ms, *self._encoding, require_key
        )
        self._store(size, batches, now_ms)

    def append_records(self, records: Sequence[Any]) -> None:
        """Stages (key, value, headers, timestamp_ms) tuples. Errors as append_columns()."""
        now_ms = self._fs.now_ms()
        given = [layout.milliseconds(row[3]) for row in records if row[3] is not None]
        if given and not self._config.is_append_time:
            check_timestamps(np.array(given, np.int64), now_ms, self._config)
        end = self._end
        require_key = self._config.is_compacted
        size, batches = kernel.encode_records(self._scratch, records, end, 0, now_ms, *self._encoding, require_key)
        self._store(size, batches, now_ms)

    @property
    def held_bytes(self) -> int:
        """How much is in memory and in no file."""
        if self._held is None:
            return 0
        return len(self._held)

    def spill(self) -> None:
        """Keeps all in files, from now on. Errors as append_columns()."""
        held = self._held
        self._held = None
        if held:
            self._keep(memoryview(held), self._held_batches, 0)
            self._held_batches = []

    def carry(self) -> Carried | None:
        """The held records, to be sent to the driver; None when there are none. Nothing may be appended afterwards."""
        if not self._held:
            return None
        data = bytes(self._held)
        newest = max(batch[3] for batch in self._held_batches)
        count = self._end
        return Carried(self._topic, self._partition, data, count, len(self._held_batches), newest, crc32c(data))

    @property
    def _end(self) -> int:
        if self._held is not None:
            if self._held_batches:
                return self._held_batches[-1][2] + 1
            return 0
        if self._segment is None:
            return 0
        return self._segment.last_offset + 1

    def _store(self, size: int, batches: Sequence[layout.EncodedBatch], now_ms: int) -> None:
        """Takes what was encoded into the scratch buffer."""
        if not batches:
            return
        held = self._held
        if held is None:
            self._keep(memoryview(self._scratch)[:size], batches, now_ms)
            return
        start = len(held)
        held += memoryview(self._scratch)[:size]
        self._held_batches += [(start + at, length, last, time) for at, length, last, time in batches]

    def _keep(self, data: memoryview, batches: Sequence[layout.EncodedBatch], now_ms: int) -> None:
        """Writes batches to files, in as few pieces as segments allow."""
        newest = max(batch[3] for batch in batches)
        end = self._end
        segment = self._segment
        if segment is None:
            segment = self._begin()
        if not segment.is_full(len(data), newest, batches[-1][2], now_ms) and len(data) <= self._config.segment_bytes:
            self._write(segment, data, batches)
            return
        # The batches were encoded with offsets behind each other. In each new segment they begin at 0 again, so that
        # base offsets are lowered by those of the segments before. Outside the CRC, so nothing is encoded again.
        moved = 0  # by how much
        start = end  # where the next batch begins, as it was encoded
        for at, length, last, time in batches:
            if segment.is_full(length, time, last - moved, now_ms):
                self._seal()
                segment = self._begin()
                moved = start
            struct.pack_into(">q", data, at, start - moved)
            part = data[at : at + length]
            self._write(segment, part, [(0, length, last - moved, time)])
            start = last + 1

    def _begin(self) -> _StagedSegment:
        stem = f"{self._topic}-{self._partition}.{self._attempt}.{len(self._done)}"
        try:
            self._segment = _StagedSegment(self._fs, self._directory, stem, self._config)
        except FileNotFoundError as error:
            raise LogNotFoundError(
                "this write was aborted: its staging directory is gone", path=self._directory
            ) from error
        self._crc = self._batches = 0
        return self._segment

    def _write(self, segment: _StagedSegment, data: memoryview, batches: Sequence[layout.EncodedBatch]) -> None:
        segment.append(data, batches[-1][2], max(batch[3] for batch in batches), batches)
        self._crc = crc32c(data, self._crc)
        self._batches += len(batches)

    def _seal(self) -> None:
        segment = self._segment
        self._segment = None
        assert segment is not None
        segment.seal()
        name = f"{self._txid}/{os.path.basename(segment.path)[: -len(LOG)]}"
        count = segment.last_offset + 1
        size = segment.size_bytes
        newest = segment.largest_timestamp
        self._done.append(StagedFile(self._topic, self._partition, name, count, size, self._batches, newest, self._crc))

    def close(self) -> list[StagedFile]:
        """Brings all of it to the disk, and returns the staged files in order; none for a writer without rows."""
        self.spill()
        if self._segment is not None:
            self._seal()
        if self._done:
            self._fs.sync_dir(self._directory)
        return self._done
