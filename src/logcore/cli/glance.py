"""A partition at a glance, for `logcore info`: how much it holds, from when to when, in which codecs.

The log is opened read-only: no lock is taken and nothing is written, also while a writer runs.
"""

from __future__ import annotations

import os
from typing import Any

import attrs
import numpy as np

from logcore.format.compression import Codec
from logcore.fs import FS, OS
from logcore.kernels import layout
from logcore.log import Log, open_log
from logcore.names import partition_of
from logcore.reader import segments_between
from logcore.segment import Segment


@attrs.frozen(kw_only=True)
class PartitionSummary:
    """A partition at a glance. Timestamps are -1 where there are none; codecs counts the active segment's batches."""

    path: str
    topic: str
    partition: int
    segments: int
    size_bytes: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    codecs: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


def describe(path: str | os.PathLike[str], *, fs: FS = OS) -> PartitionSummary:
    """One partition directory at a glance, read-only. Walks the heads of its last segment. Errors of open_log()."""
    with open_log(path, read_only=True, fs=fs) as log:
        statistics = log.statistics()
        topic, partition = partition_of(os.path.basename(fs.real_path(log.path))) or ("", -1)
        return PartitionSummary(
            path=log.path,
            topic=topic,
            partition=partition,
            segments=statistics.segments,
            size_bytes=statistics.size_bytes,
            log_start_offset=statistics.log_start_offset,
            high_watermark=statistics.high_watermark,
            log_end_offset=statistics.log_end_offset,
            first_timestamp_ms=next((batch.base_timestamp for batch in log.batches(log.log_start_offset)), -1),
            max_timestamp_ms=max((segment.max_timestamp() for segment in _segments(log)), default=-1),
            codecs=_codecs(log),
        )


def _segments(log: Log) -> list[Segment]:
    return segments_between(log, log.log_start_offset, log.log_end_offset)


def _codecs(log: Log) -> dict[str, int]:
    counts = np.zeros(8, np.int64)
    for segment in _segments(log)[-1:]:
        for facts, _, _ in segment.walk(0, crc=False):
            counts += np.bincount(facts["attributes"] & layout.CODEC_MASK, minlength=8)
    names = {code.value: code.name.lower() for code in Codec}
    return {names.get(code, f"unknown({code})"): int(count) for code, count in enumerate(counts) if count}
