"""Partitioner: a key gets the same partition as in Kafka's Java client."""

from __future__ import annotations

import json

import numpy as np

from logcore.partitioner import Partitioner, murmur2
from support.kernels import KERNELS
from support.partitions import reference_murmur2
from support.vectors import VECTORS


def test_murmur2_equals_kafka() -> None:
    """The values are those of Kafka's UtilsTest.testMurmur2."""
    kafka_hashes = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    keys = [*kafka_hashes, b"", *(bytes(range(size)) for size in range(40))]
    bounds = np.concatenate([[0], np.cumsum([len(key) for key in keys])])
    hashes = murmur2(np.frombuffer(b"".join(keys), np.uint8), bounds)
    assert [
        int(hash_value) for hash_value in hashes[: len(kafka_hashes)].astype(np.int32)
    ] == list(kafka_hashes.values())
    assert [int(hash_value) & 0x7FFFFFFF for hash_value in hashes] == [
        reference_murmur2(key) for key in keys
    ]


def test_partitions_equal_those_of_kafka_clients() -> None:
    """The vectors contain hashes and partitions computed by Kafka's classes, and
    partitions of records sent by librdkafka and aiokafka.
    """
    for row in json.loads((VECTORS / "partitioners.json").read_text())["keys"]:
        key = bytes.fromhex(row["key_hex"])
        assert [kernel.murmur2(key) for kernel in KERNELS] == [row["positive"]] * len(
            KERNELS
        )
        assert (
            int(
                murmur2(np.frombuffer(key, np.uint8), np.array([0, len(key)])).astype(
                    np.int32
                )[0]
            )
            == row["murmur2"]
        )
        for count, partition in row["murmur2_partition"].items():
            assert Partitioner(range(int(count))).choose(key, b"") == partition
