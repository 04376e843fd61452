"""Partitions, compared with the choices of Kafka's own classes and of librdkafka."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logcore.errors import InvalidConfigError
from logcore.producer.partitioners import PARTITIONERS, TopicPartitioner

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "partitioners.json"


def partitioner(
    name: Any, count: int = 7, *, ignores_keys: bool = False, seed: int = 1
) -> TopicPartitioner:
    return TopicPartitioner(
        name, ignores_keys, range(count), random.Random(seed).randrange
    )


def test_keys_choose_the_same_partitions_as_in_other_clients() -> None:
    for row in json.loads(VECTORS.read_text())["keys"]:
        key = bytes.fromhex(row["key_hex"])
        for count, partition in row["murmur2_partition"].items():
            assert partitioner("default", int(count)).choose(key) == partition
            assert partitioner("murmur2", int(count)).choose(key) == partition
        for count, partition in row["crc32_partition"].items():
            assert partitioner("consistent", int(count)).choose(key) == partition
            assert partitioner("consistent_random", int(count)).choose(key) == (
                partition if key else -1
            )


def test_partitions_of_records_without_a_key() -> None:
    assert [
        partitioner(name).choose(None) for name in ("default", "consistent_random")
    ] == [-1, -1]
    assert partitioner("murmur2").choose(None) == 275_646_681 % 7
    assert partitioner("consistent").choose(None) == 0
    assert partitioner("default").choose(b"") == 275_646_681 % 7
    turns = partitioner("round_robin", 3)
    assert [turns.choose(b"k") for _ in range(5)] == [0, 1, 2, 0, 1]
    assert {partitioner("random", 3, seed=seed).choose(b"k") for seed in range(40)} == {
        0,
        1,
        2,
    }
    assert partitioner("default", ignores_keys=True).choose(b"k") == -1


@pytest.mark.parametrize("name", PARTITIONERS)
@pytest.mark.parametrize("count", [1, 7])
def test_choose_all_equals_choose_for_each_key(name: str, count: int) -> None:
    keys = [None, b"", b"a", b"abc", None, b"a" * 100] * 5
    choose = partitioner(name, count)
    many = partitioner(name, count)
    found = many.choose_all(keys, len(keys))
    each = [choose.choose(key) for key in keys]
    if isinstance(found, int):
        found = np.full(len(keys), found)
    if count == 1:
        each = [max(number, 0) for number in each]
        found = np.maximum(found, 0)
    assert found.tolist() == each
    alone = partitioner(name, count).choose_all(None, 5)
    if isinstance(alone, int):
        assert alone in (-1, 0)


def test_partitioner_function_of_the_caller() -> None:
    own = partitioner(lambda key, partitions: partitions[-1])
    assert own.choose(b"k") == 6
    assert own.choose_all([b"a", None], 2).tolist() == [6, 6]  # type: ignore[union-attr]
    with pytest.raises(InvalidConfigError, match="no partition of the topic"):
        partitioner(lambda key, partitions: 7).choose(b"k")
    with pytest.raises(InvalidConfigError, match="missing"):
        TopicPartitioner("default", False, (0, 2), random.Random(1).randrange)
