"""Ranges of offsets, and the error for ranges with deleted records.

This module reads no log and imports no pyspark: planning.py creates ranges, and an
origin reads them.
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
    """Readable range of a partition: from its log start offset to the offset after the
    last visible record.

    `incarnation` changes if the topic is deleted and created again.
    """

    start: int
    end: int
    incarnation: str = ""


class DataLossError(LogcoreError):
    """Requested records were deleted. failOnDataLoss=false turns it into a warning."""


def report_loss(fail: bool, path: str, topic: str, partition: int, reason: str) -> None:
    """Raise DataLossError, or warn if the user set failOnDataLoss=false."""
    text = f"topic {topic} partition {partition}: {reason}"
    if fail:
        raise DataLossError(
            f"{text}. The option failOnDataLoss=false reads the remaining records",
            path=path,
        )
    warnings.warn(f"{path}: {text}; reading the remaining records", stacklevel=2)
