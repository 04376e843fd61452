"""Shapes of a segment map, and of a lag over time.

A row of the map is WIDTH units wide. Either all rows have one scale in bytes, or each row
fills the width. The template draws the shapes as SVG, so that this module contains no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from logcore.inspect.segmentmap import PartitionMap, SegmentSummary

WIDTH: Final = 1000.0
#: Space between two segments, and the least width of a bar.
_GAP: Final = 1.5
_MIN_WIDTH: Final = 2.0
#: Maximum number of segments of a row. Older ones are left out, and the page shows
#: their number.
MAX_SEGMENTS: Final = 400


@attrs.frozen
class Bar:
    """A rectangle with the full height of its row."""

    x: float
    width: float
    #: Its class in the style sheet.
    kind: str


@attrs.frozen(kw_only=True)
class SegmentPicture:
    """A segment with its shapes."""

    segment: SegmentSummary
    #: The whole segment.
    x: float
    width: float
    #: One bar for each codec, in proportion to its bytes.
    codecs: tuple[Bar, ...]
    #: Bytes that cannot be read.
    damage: Bar | None
    #: The part with records of open transactions.
    open_part: Bar | None


@attrs.frozen
class PartitionPicture:
    """A row of the map."""

    partition: PartitionMap
    segments: tuple[SegmentPicture, ...]
    #: Number of older segments that are not drawn.
    hidden: int


def partition_pictures(
    maps: Sequence[PartitionMap], *, own_scale: bool
) -> list[PartitionPicture]:
    """Return a row for each partition. With `own_scale`, each row fills the width."""
    largest_bytes = max(
        (_visible_bytes(partition_map) for partition_map in maps), default=0
    )
    return [
        _row(
            partition_map, _visible_bytes(partition_map) if own_scale else largest_bytes
        )
        for partition_map in maps
    ]


def _visible_segments(partition_map: PartitionMap) -> tuple[SegmentSummary, ...]:
    return partition_map.segments[-MAX_SEGMENTS:]


def _visible_bytes(partition_map: PartitionMap) -> int:
    return sum(segment.size_bytes for segment in _visible_segments(partition_map))


def _row(partition_map: PartitionMap, full_width_bytes: int) -> PartitionPicture:
    visible_segments = _visible_segments(partition_map)
    # Each segment has a gap and at least _MIN_WIDTH units. The bytes share the rest.
    free_width = WIDTH - len(visible_segments) * (_GAP + _MIN_WIDTH)
    unit = max(0.0, free_width) / max(1, full_width_bytes)
    stable = min(
        partition_map.open_transactions.values(), default=partition_map.end_offset
    )
    x = 0.0
    segments = []
    for segment in visible_segments:
        width = _MIN_WIDTH + segment.size_bytes * unit
        segments.append(_segment(segment, x, width, stable))
        x += width + _GAP
    return PartitionPicture(
        partition_map,
        tuple(segments),
        len(partition_map.segments) - len(visible_segments),
    )


def _segment(
    segment: SegmentSummary, x: float, width: float, stable: int
) -> SegmentPicture:
    codecs = []
    total = sum(segment.codec_bytes.values())
    at = x
    for codec, size_bytes in segment.codec_bytes.items():
        part = width * size_bytes / total
        codecs.append(Bar(_rounded(at), _rounded(part), _codec_class(codec)))
        at += part
    if not codecs:
        codecs.append(Bar(_rounded(x), _rounded(width), "codec-empty"))
    damage = None
    if segment.loss:
        # The loss is between this segment and the next one, so the bar covers the gap.
        damage = Bar(_rounded(x + width - _MIN_WIDTH), _MIN_WIDTH + _GAP, "damage")
    if segment.damage is not None:
        share = segment.damage.size_bytes / max(1, segment.size_bytes)
        part = max(2 * _MIN_WIDTH, width * share)
        css_class = "unfinished" if segment.damage.is_unfinished else "damage"
        damage = Bar(_rounded(x + width - part), _rounded(part), css_class)
    open_part = None
    if stable < segment.end_offset:
        offsets = segment.end_offset - segment.base_offset
        # Measured in offsets, because the bytes of these records are unknown.
        share = min(1.0, (segment.end_offset - stable) / max(1, offsets))
        part = max(_MIN_WIDTH, width * share)
        open_part = Bar(_rounded(x + width - part), _rounded(part), "open")
    return SegmentPicture(
        segment=segment,
        x=_rounded(x),
        width=_rounded(width),
        codecs=tuple(codecs),
        damage=damage,
        open_part=open_part,
    )


#: Width and height of a drawn lag.
LAG_WIDTH: Final = 120
LAG_HEIGHT: Final = 24
#: Time that the width of a drawn lag covers: ten minutes.
_LAG_MS: Final = 600_000


@attrs.frozen
class LagPicture:
    """A lag over the last ten minutes."""

    #: The points of a polyline; "" for fewer than two samples.
    line: str
    first: int
    last: int
    most: int


def lag_picture(samples: Sequence[tuple[int, int]], now_ms: int) -> LagPicture:
    """Return the line of samples of (time in ms, lag). The largest lag has full height."""
    recent = [sample for sample in samples if now_ms - sample[0] <= _LAG_MS]
    lags = [lag for _, lag in recent] or [0]
    max_lag = max(lags)
    # Two units above and below the line, because the stroke has a width.
    height = LAG_HEIGHT - 4
    line = " ".join(
        f"{_rounded(LAG_WIDTH * (1 - (now_ms - time_ms) / _LAG_MS))},"
        f"{_rounded(LAG_HEIGHT - 2 - height * lag / max(1, max_lag))}"
        for time_ms, lag in recent
    )
    return LagPicture(line if len(recent) > 1 else "", lags[0], lags[-1], max_lag)


def _codec_class(codec: str) -> str:
    """Return the class of a codec; unknown codecs have one class."""
    known_codecs = ("none", "gzip", "snappy", "lz4", "zstd")
    return f"codec-{codec if codec in known_codecs else 'unknown'}"


def _rounded(value: float) -> float:
    return round(value, 2)
