"""Ranges of offsets, and what to do where a part of one is gone.

This module reads nothing and imports no pyspark: an origin reads ranges, planning.py
makes them.
"""

from __future__ import annotations

import warnings

import attrs

from logcore.errors import LogcoreError

#: A topic and the number of one of its partitions.
TopicPartition = tuple[str, int]


@attrs.frozen
class OffsetRange:
    """The records of one partition with start <= offset < end."""

    topic: str
    partition: int
    start: int
    end: int


@attrs.frozen
class Bounds:
    """Where a partition can be read: its log start offset, and the offset behind the
    last record that may be seen.

    incarnation: differs when the topic was deleted and made again.
    """

    start: int
    end: int
    incarnation: str = ""


class DataLossError(LogcoreError):
    """Records that a query asked for are gone. failOnDataLoss=false makes it a warning."""


def report_loss(fail: bool, path: str, topic: str, partition: int, reason: str) -> None:
    """Raises DataLossError, or warns when the user said failOnDataLoss=false."""
    text = f"topic {topic} partition {partition}: {reason}"
    if fail:
        raise DataLossError(
            f"{text}. The option failOnDataLoss=false reads the remaining records",
            path=path,
        )
    warnings.warn(f"{path}: {text}; reading the remaining records", stacklevel=2)
