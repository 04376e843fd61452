"""Chooses the partition of a record like Kafka's Java client: by its key, or in turn.

Rules:
- A key is hashed with murmur2. The same key always chooses the same partition, as long
  as the number of partitions does not change.
- Records without a key use one partition for 16 KiB, the size of a producer's batch,
  and then the next one.

This module depends on no topic and no directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from logcore.errors import InvalidConfigError, InvalidRecordError
from logcore.kernels import kernel
from logcore.kernels.layout import Buffer

#: Kafka: batch.size of a producer.
STICKY_BYTES: Final = 16_384


class Partitioner:
    """Chooses partitions of one topic, whose numbers are `numbers`.

    If threads choose at the same time, records without a key may use one partition a
    little longer.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        """Raises InvalidConfigError if a number is missing, because some keys would
        have no partition.
        """
        if tuple(numbers) != tuple(range(len(numbers))):
            raise InvalidConfigError(
                "some partitions of the topic are missing, so a record cannot choose one; name it with partition=",
                expected="consecutive partitions from 0",
                found=str(tuple(numbers))[:80],
            )
        self.numbers = numbers
        self._number = 0
        self._bytes = 0

    def choose(self, key: Buffer | None, value: Buffer | None) -> int:
        """Return the partition of one record. Raises InvalidRecordError for a key that
        is not bytes.
        """
        if key is not None:
            return kernel.murmur2(key if type(key) is bytes else _as_bytes(key)) % len(
                self.numbers
            )
        size = 0
        # The append refuses other types.
        if isinstance(value, (bytes, bytearray, memoryview)):
            size = len(value)
        self._bytes += size
        if self._bytes > STICKY_BYTES:
            self._bytes = size
            self._number = (self._number + 1) % len(self.numbers)
        return self._number


def _as_bytes(key: object) -> bytes:
    if not isinstance(key, (bytearray, memoryview)):
        raise InvalidRecordError(
            "a key must be bytes or None", expected="bytes", found=type(key).__name__
        )
    return bytes(key)


def murmur2(
    data: npt.NDArray[np.uint8], edges: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Return Kafka's murmur2 of each piece data[edges[i]:edges[i + 1]], shape (n,).
    Pieces of one length are hashed together.
    """
    sizes = np.diff(edges)
    hashes = np.zeros(len(sizes), np.uint32)
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        pieces = data[edges[rows][:, None] + np.arange(size)]
        hashes[rows] = _murmur2_of(pieces)
    return hashes


def _murmur2_of(pieces: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Hash pieces of one length: uint8, shape (rows, size). The constants and their
    order are from Kafka's Utils.murmur2.
    """
    rows, size = pieces.shape
    m = np.uint32(0x5BD1E995)
    whole = size // 4
    h = np.full(rows, np.uint32(0x9747B28C) ^ np.uint32(size), np.uint32)
    words = (
        np.ascontiguousarray(pieces[:, : whole * 4]).view("<u4").reshape(rows, whole)
    )
    for at in range(whole):
        k = words[:, at].astype(np.uint32) * m
        k ^= k >> np.uint32(24)
        h *= m
        h ^= k * m
    rest = pieces[:, whole * 4 :]
    for at in range(rest.shape[1] - 1, -1, -1):
        h ^= rest[:, at].astype(np.uint32) << np.uint32(8 * at)
    if rest.shape[1]:
        h *= m
    h ^= h >> np.uint32(13)
    h *= m
    h ^= h >> np.uint32(15)
    return h
