"""Choosers of partitions for a producer, with the names of Kafka and librdkafka.

| name | rule | from |
|---|---|---|
| `default` | murmur2 of the key; without a key the sticky partition | Kafka's Java client |
| `consistent_random` | CRC-32 of the key; without one, or an empty one, the sticky partition | librdkafka's default |
| `consistent` | CRC-32 of the key; null counts as empty | librdkafka |
| `murmur2` | murmur2 of the key; null counts as empty | librdkafka |
| `round_robin` | in turn, without regard to the key | Java's RoundRobinPartitioner |
| `random` | at random, without regard to the key | librdkafka |

Rules (clients reference 2.6):
- The sticky partition is used until it has received batch_size bytes and its batch is
  full. Then another partition is chosen at random.
- A chooser of the user receives the key and the numbers of the partitions, and returns
  one of these numbers.

This module depends on no queue and no directory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from logcore.directory.topic_file import PartitionNumbers
from logcore.errors import InvalidConfigError
from logcore.kernels import kernel
from logcore.partitioner import murmur2

Choose = Callable[[bytes | None, tuple[int, ...]], int]
_Hash = Callable[[bytes], int]
#: Returns a random number below its argument.
Draw = Callable[[int], int]

#: Name -> the hash of a key, and the replacement of a null key: None for the sticky
#: partition.
_HASHES: Final[dict[str, tuple[_Hash, bytes | None]]] = {
    "default": (kernel.murmur2, None),
    "murmur2": (kernel.murmur2, b""),
    "consistent": (zlib.crc32, b""),
    "consistent_random": (zlib.crc32, None),
}
PARTITIONERS: Final = (*_HASHES, "round_robin", "random")


class Chooser:
    """Chooses partitions of one topic, under the lock of its producer. `numbers`
    contains the partitions, from 0 without gaps.

    `is_sticky` is whether records without a key share a partition, which `sticky`
    contains. The producer calls move() once that partition has received its bytes.
    """

    def __init__(
        self,
        partitioner: str | Choose,
        ignores_keys: bool,
        numbers: Sequence[int],
        draw: Draw,
    ) -> None:
        """Raises InvalidConfigError if a number is missing, because some keys would
        have no partition.
        """
        self.numbers = PartitionNumbers(numbers)
        if self.numbers != tuple(range(len(numbers))):
            raise InvalidConfigError(
                "some partitions of the topic are missing, so a record cannot choose one; name it with partition=",
                expected="consecutive partitions from 0",
                found=str(self.numbers)[:80],
            )
        self._count = len(self.numbers)
        self._draw = draw
        if isinstance(partitioner, str):
            self._name = partitioner
        else:
            self._name = ""
        self._own: Callable[[bytes | None, tuple[int, ...]], int] | None = None
        if not isinstance(partitioner, str):
            self._own = partitioner
        self._turn = 0
        self._ignores_keys = ignores_keys
        known = _HASHES.get(self._name)
        self._hash: _Hash | None = None if known is None else known[0]
        if known is not None:
            self._null = known[1]
        else:
            self._null = None
        self.sticky = 0
        self.move()

    def move(self) -> None:
        """Choose a sticky partition at random. It may be the present partition."""
        self.sticky = self._draw(self._count)

    def choose(self, key: bytes | None) -> int:
        """Return the partition of one record, or -1 for the sticky partition. Raises
        InvalidConfigError if the user's chooser returns an invalid number.
        """
        own = self._own
        if own is not None:
            number = own(key, self.numbers)
            if number not in self.numbers:
                raise InvalidConfigError(
                    "the partitioner gave no partition of the topic",
                    expected=f"0 to {self._count - 1}",
                    found=repr(number),
                )
            return number
        hashed = self._hash
        if hashed is not None:
            if key is None or (not key and self._name == "consistent_random"):
                key = self._null
            if key is None or self._ignores_keys:
                return -1
            return hashed(key) % self._count
        if self._name == "random":
            return self._draw(self._count)
        number = self._turn % self._count
        self._turn = (self._turn + 1) & 0x7FFFFFFF
        return number

    def choose_all(
        self, keys: Sequence[bytes | None] | None, count: int
    ) -> npt.NDArray[np.int64] | int:
        """Return the partitions of `count` records, int64 of shape (count,), with -1
        for the sticky partition; or one partition for all.

        `keys` is None if no record has a key. The choices are the same as those of
        choose() for each record in turn.
        """
        if self._count == 1 and self._own is None:
            return 0
        if (
            self._hash is not None
            and self._null is None
            and (keys is None or self._ignores_keys)
        ):
            return -1
        every: Sequence[bytes | None] = [None] * count
        if keys is not None:
            every = keys
        if self._hash is None or self._ignores_keys:
            return np.fromiter(map(self.choose, every), np.int64, count)
        numbers = (
            np.fromiter(map(self._hash, [key or b"" for key in every]), np.int64, count)
            % self._count
        )
        if self._name == "consistent_random":
            numbers[[not key for key in every]] = -1
        elif self._null is None:
            numbers[[key is None for key in every]] = -1
        return numbers

    def choose_packed(
        self, data: npt.NDArray[np.uint8], edges: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Choose by murmur2, for keys data[edges[i]:edges[i + 1]]."""
        return (murmur2(data, edges).astype(np.int64) & 0x7FFFFFFF) % self._count

    @property
    def hashes_columns(self) -> bool:
        """Return whether choose_packed() makes the same choices as choose()."""
        return self._hash is kernel.murmur2 and not self._ignores_keys
