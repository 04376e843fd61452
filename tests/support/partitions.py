"""Reference implementation of Kafka's choice of a partition, for comparisons."""

from __future__ import annotations


def reference_murmur2(data: bytes) -> int:
    """Return the result of Kafka's Utils.murmur2 and toPositive, translated statement
    by statement.
    """
    m = 0x5BD1E995
    mask = 0xFFFFFFFF
    h = (0x9747B28C ^ len(data)) & mask
    for at in range(0, len(data) // 4 * 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k ^= k >> 24
        h = (h * m & mask) ^ (k * m & mask)
    rest = data[len(data) // 4 * 4 :]
    if rest:
        h ^= int.from_bytes(rest, "little")
        h = h * m & mask
    h ^= h >> 13
    h = h * m & mask
    return (h ^ (h >> 15)) & 0x7FFFFFFF
