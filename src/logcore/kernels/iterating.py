"""Base class for the position of a consumer in a partition, with plain attributes.

The compiled kernels have the same class with these attributes as C fields, so that an
iteration moves the position without a Python frame for each record.
"""

from __future__ import annotations

from typing import Any


class PositionFields:
    """The base of consumer.positions.PartitionPosition."""

    #: The offset of the next record. It is None until the first poll.
    position: int | None
    #: The offset up to which records are processed. It is None until the first poll.
    finished: int | None
    #: The records that were read ahead. Replaced if the position is moved by others.
    records: Any
