"""Summaries of partitions, for `logcore info` and for notebooks: size, time range and
codecs.

The logs are opened read-only: no lock is acquired and no file is changed, also while a
writer runs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from logcore.errors import LogcoreError
from logcore.format import html
from logcore.format.compression import Codec
from logcore.fs import FS, OS
from logcore.kernels import layout
from logcore.log import Log, open_log
from logcore.metadata.filenames import partition_of
from logcore.reader import segments_between
from logcore.segment import Segment

#: Maximum number of rows of a table in a notebook.
_MAX_ROWS: Final = 50
#: Maximum number of partitions that a table of topics opens. Each takes some
#: milliseconds.
_MAX_OPENED: Final = 200


@attrs.frozen(kw_only=True)
class PartitionSummary:
    """A summary of a partition. Timestamps are -1 if there are none."""

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
    #: The number of batches of the active segment by codec.
    codecs: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


def describe(path: str | os.PathLike[str], *, fs: FS = OS) -> PartitionSummary:
    """Return the summary of one partition directory, read-only. It reads the batch
    headers of the last segment. Raises the errors of open_log().
    """
    with open_log(path, read_only=True, fs=fs) as log:
        statistics = log.statistics()
        topic, partition = partition_of(os.path.basename(fs.real_path(log.path))) or (
            "",
            -1,
        )
        return PartitionSummary(
            path=log.path,
            topic=topic,
            partition=partition,
            segments=statistics.segments,
            size_bytes=statistics.size_bytes,
            log_start_offset=statistics.log_start_offset,
            high_watermark=statistics.high_watermark,
            log_end_offset=statistics.log_end_offset,
            first_timestamp_ms=next(
                (batch.base_timestamp for batch in log.batches(log.log_start_offset)),
                -1,
            ),
            max_timestamp_ms=max(
                (segment.max_timestamp() for segment in _segments(log)), default=-1
            ),
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
    return {
        names.get(code, f"unknown({code})"): int(count)
        for code, count in enumerate(counts)
        if count
    }


def topic_html(fs: FS, name: str, paths: Mapping[int, str]) -> str:
    """Return a topic as a table with a row for each partition. `paths` maps numbers to
    directories.
    """
    rows: list[Sequence[object]] = []
    for number, path in itertools.islice(paths.items(), _MAX_ROWS):
        try:
            summary = describe(path, fs=fs)
        except LogcoreError as error:
            rows.append((number, html.shorten(error.reason)))
            continue
        times = (
            html.format_time(summary.first_timestamp_ms),
            html.format_time(summary.max_timestamp_ms),
        )
        size = html.format_size(summary.size_bytes)
        rows.append(
            (
                number,
                summary.log_start_offset,
                summary.high_watermark,
                *times,
                size,
                summary.segments,
            )
        )
    headings = (
        "partition",
        "log start offset",
        "high watermark",
        "first time (UTC)",
        "newest time (UTC)",
    )
    caption = f"topic {name}: {_counted(len(paths), 'partition')}"
    return html.table(
        caption,
        (*headings, "size", "segments"),
        rows,
        note=_note_of(len(paths), "partitions"),
    )


def directory_html(fs: FS, path: str, topics: Mapping[str, Mapping[int, str]]) -> str:
    """Return a directory as a table with a row for each topic. `topics` maps each name
    to the directories of its partitions, by number.
    """
    rows: list[Sequence[object]] = []
    left = _MAX_OPENED
    for name, paths in itertools.islice(topics.items(), _MAX_ROWS):
        left -= len(paths)
        rows.append(_topic_row(fs, name, paths) if left >= 0 else (name, len(paths)))
    headings = (
        "topic",
        "partitions",
        "offsets",
        "first time (UTC)",
        "newest time (UTC)",
        "size",
    )
    caption = f"{path}: {_counted(len(topics), 'topic')}"
    return html.table(caption, headings, rows, note=_note_of(len(topics), "topics"))


def _topic_row(fs: FS, name: str, paths: Mapping[int, str]) -> Sequence[object]:
    try:
        found = [describe(path, fs=fs) for path in paths.values()]
    except LogcoreError as error:
        return (name, len(paths), html.shorten(error.reason))
    offsets = sum(
        summary.high_watermark - summary.log_start_offset for summary in found
    )
    first = min(
        (
            summary.first_timestamp_ms
            for summary in found
            if summary.first_timestamp_ms >= 0
        ),
        default=-1,
    )
    newest = max((summary.max_timestamp_ms for summary in found), default=-1)
    times = html.format_time(first), html.format_time(newest)
    return (
        name,
        len(paths),
        offsets,
        *times,
        html.format_size(sum(summary.size_bytes for summary in found)),
    )


def _counted(count: int, what: str) -> str:
    if count == 1:
        return f"{count:,} {what}"
    return f"{count:,} {what}s"


def _note_of(count: int, what: str) -> str:
    if count > _MAX_ROWS:
        return f"the first {_MAX_ROWS} of {count:,} {what}"
    return ""
