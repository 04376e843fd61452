"""Which partition a record goes to: by its key, as Kafka's Java client chooses.

This module knows no topic and no directory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def murmur2(data: npt.NDArray[np.uint8], edges: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Kafka's murmur2 of each piece data[edges[i]:edges[i + 1]], all pieces of one length at once; shape (n,)."""
    sizes = np.diff(edges)
    hashes = np.zeros(len(sizes), np.uint32)
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        pieces = data[edges[rows][:, None] + np.arange(size)]
        hashes[rows] = _murmur2_of(pieces)
    return hashes


def _murmur2_of(pieces: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """pieces: uint8, shape (rows, size). The constants and the order are those of Kafka's Utils.murmur2."""
    rows, size = pieces.shape
    m, whole = np.uint32(0x5BD1E995), size // 4
    h = np.full(rows, np.uint32(0x9747B28C) ^ np.uint32(size), np.uint32)
    words = np.ascontiguousarray(pieces[:, : whole * 4]).view("<u4").reshape(rows, whole)
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
