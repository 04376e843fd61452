"""The partition that a key chooses is the one that Kafka's Java client chooses."""

from __future__ import annotations

import numpy as np

from logcore.partitioner import murmur2
from support.partitions import reference_murmur2


def test_murmur2_is_kafkas() -> None:
    """The values are those of Kafka's UtilsTest.testMurmur2."""
    known = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    pieces = [*known, b"", *(bytes(range(size)) for size in range(40))]
    edges = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    found = murmur2(np.frombuffer(b"".join(pieces), np.uint8), edges)
    assert [int(one) for one in found[: len(known)].astype(np.int32)] == list(known.values())
    assert [int(one) & 0x7FFFFFFF for one in found] == [reference_murmur2(piece) for piece in pieces]
