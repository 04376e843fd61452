"""The task's part: stages records as segments whose offsets begin at 0, under names
unique to the attempt.

Rules:
- A writer with holds=True keeps its records in memory until spill(). If they are few,
  the task sends them to the driver in a message. It then syncs nothing and creates no
  file.

This module does not publish; the driver does, with the reports of all tasks
(publishing.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from logcore.config import LogConfig
from logcore.errors import (
    LogNotFoundError,
)
from logcore.format.compression import Codec
from logcore.fs import FS
from logcore.kernels import kernel, layout
from logcore.kernels.checksum import crc32c
from logcore.metadata.filenames import LOG, staging_path
from logcore.recordbatch import check_timestamps, compressor, target_codec
from logcore.segment import ActiveSegment
from logcore.staging.manifest import Carried, StagedFile, check_txid


class _StagedSegment(ActiveSegment):
    """An active segment with base offset 0 and its own name."""

    def __init__(self, fs: FS, directory: str, stem: str, config: LogConfig) -> None:
        self._stem = stem
        super().__init__(fs, directory, 0, config, create=True)

    def file(self, suffix: str) -> str:
        return os.path.join(self.directory, self._stem + suffix)


class StagedWriter:
    """The records that one attempt of a task writes to one partition, as staged
    segments.

    Segments are rolled like those of a log. `attempt` is <task>.<attempt> and unique.
    `codec` is used if the topic's compression.type is "producer". A batch is closed at
    `batch_bytes`. With `holds`, records are kept in memory until spill(), which the
    caller must call in time.
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
        self._directory = os.path.join(
            staging_path(fs.real_path(directory)), check_txid(txid)
        )
        self._topic = topic
        self._partition = partition
        self._attempt = attempt
        self._config = config
        codec = target_codec(config, codec)
        most = min(config.max_message_bytes, config.segment_bytes)
        attributes = int(codec) | layout.APPEND_TIME_BIT * config.is_append_time
        self._encoding = layout.BatchEncoding(
            min(batch_bytes, most),
            most,
            attributes,
            compressor(codec, config),
            config.is_compacted,
        )
        self._scratch = bytearray(1 << 16)
        self._held: bytearray | None = None
        if holds:
            self._held = bytearray()
        self._held_batches: list[layout.EncodedBatch] = []
        self._segment: _StagedSegment | None = None
        self._done: list[StagedFile] = []
        self._crc = self._batches = 0

    def append_columns(self, columns: layout.InputColumns) -> None:
        """Stage rows given as columns.

        Raises:
            InvalidRecordError, InvalidTimestampError, RecordTooLargeError: a row is
                invalid.
            DiskFullError, StorageWriteError: writing failed.
        """
        now_ms = self._fs.now_ms()
        times = columns.timestamps_ms
        if times is not None and not self._config.is_append_time:
            check_timestamps(times, now_ms, self._config)
        size, batches = kernel.encode_columns(
            self._scratch, columns, self._end, 0, now_ms, self._encoding
        )
        self._store(size, batches, now_ms)

    def append_records(self, records: Sequence[Any]) -> None:
        """Stage (key, value, headers, timestamp_ms) tuples.

        Raises the same errors as append_columns().
        """
        now_ms = self._fs.now_ms()
        given = [layout.milliseconds(row[3]) for row in records if row[3] is not None]
        if given and not self._config.is_append_time:
            check_timestamps(np.array(given, np.int64), now_ms, self._config)
        size, batches = kernel.encode_records(
            self._scratch, records, self._end, 0, now_ms, self._encoding
        )
        self._store(size, batches, now_ms)

    @property
    def held_bytes(self) -> int:
        """Bytes that are in memory and not in a file."""
        if self._held is None:
            return 0
        return len(self._held)

    def spill(self) -> None:
        """Write all records to files, now and from now on.

        Raises the same errors as append_columns().
        """
        held = self._held
        self._held = None
        if held:
            self._write_batches(memoryview(held), self._held_batches, 0)
            self._held_batches = []

    def carry(self) -> Carried | None:
        """Return the records in memory for the driver; None if there are none.

        No records may be appended afterwards.
        """
        if not self._held:
            return None
        data = bytes(self._held)
        newest = max(batch[3] for batch in self._held_batches)
        count = self._end
        return Carried(
            self._topic,
            self._partition,
            data,
            count,
            len(self._held_batches),
            newest,
            crc32c(data),
        )

    @property
    def _end(self) -> int:
        if self._held is not None:
            if self._held_batches:
                return self._held_batches[-1][2] + 1
            return 0
        if self._segment is None:
            return 0
        return self._segment.last_offset + 1

    def _store(
        self, size: int, batches: Sequence[layout.EncodedBatch], now_ms: int
    ) -> None:
        """Store the encoded batches from the scratch buffer."""
        if not batches:
            return
        held = self._held
        if held is None:
            self._write_batches(memoryview(self._scratch)[:size], batches, now_ms)
            return
        start = len(held)
        held += memoryview(self._scratch)[:size]
        self._held_batches += [
            (start + at, length, last, time) for at, length, last, time in batches
        ]

    def _write_batches(
        self, data: memoryview, batches: Sequence[layout.EncodedBatch], now_ms: int
    ) -> None:
        """Write batches to files, in as few writes as the segment limits allow."""
        newest = max(batch[3] for batch in batches)
        end = self._end
        segment = self._segment
        if segment is None:
            segment = self._begin()
        if (
            not segment.is_full(len(data), newest, batches[-1][2], now_ms)
            and len(data) <= self._config.segment_bytes
        ):
            self._write(segment, data, batches)
            return
        # The batches were encoded with consecutive offsets. In each new segment offsets
        # begin at 0 again, so base offsets are lowered by the records in earlier
        # segments. Base offsets are outside the CRC, so no batch is encoded again.
        # The amount to subtract.
        moved = 0
        # Encoded base offset of the next batch.
        start = end
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
            self._segment = _StagedSegment(
                self._fs, self._directory, stem, self._config
            )
        except FileNotFoundError as error:
            raise LogNotFoundError(
                "this write was aborted: its staging directory was deleted",
                path=self._directory,
            ) from error
        self._crc = self._batches = 0
        return self._segment

    def _write(
        self,
        segment: _StagedSegment,
        data: memoryview,
        batches: Sequence[layout.EncodedBatch],
    ) -> None:
        segment.append(
            data, batches[-1][2], max(batch[3] for batch in batches), batches
        )
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
        self._done.append(
            StagedFile(
                self._topic,
                self._partition,
                name,
                count,
                size,
                self._batches,
                newest,
                self._crc,
            )
        )

    def close(self) -> list[StagedFile]:
        """Make all records durable, and return the staged files in order.

        The list is empty if the writer got no rows.
        """
        self.spill()
        if self._segment is not None:
            self._seal()
        if self._done:
            self._fs.sync_dir(self._directory)
        return self._done
