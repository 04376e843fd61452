"""Partitioners: choose the partition of a record. Names as in Kafka and librdkafka.

| name | rule | from |
|---|---|---|
| `default` | murmur2 of the key; the sticky partition for a null key | Kafka's Java client |
| `consistent_random` | CRC-32 of the key; the sticky partition for a null or empty key | librdkafka's default |
| `consistent` | CRC-32 of the key; a null key is treated as empty | librdkafka |
| `murmur2` | murmur2 of the key; a null key is treated as empty | librdkafka |
| `round_robin` | in turn, without regard to the key | Java's RoundRobinPartitioner |
| `random` | at random, without regard to the key | librdkafka |

Rules (clients reference 2.6):
- The sticky partition is used until it has received batch_size bytes and its batch is
  full. Then another partition is chosen at random.
- A user's partitioner receives the key and the numbers of the partitions, and returns
  one of these numbers.

This module uses no queues and no directory.
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

PartitionFunction = Callable[[bytes | None, tuple[int, ...]], int]
_Hash = Callable[[bytes], int]
#: Returns a random number from 0 to its argument - 1.
RandomBelow = Callable[[int], int]

#: Name -> the hash function, and the key that replaces a null key. If it is None, a
#: record with a null key is sent to the sticky partition.
_HASHES: Final[dict[str, tuple[_Hash, bytes | None]]] = {
    "default": (kernel.murmur2, None),
    "murmur2": (kernel.murmur2, b""),
    "consistent": (zlib.crc32, b""),
    "consistent_random": (zlib.crc32, None),
}
PARTITIONERS: Final = (*_HASHES, "round_robin", "random")


class TopicPartitioner:
    """Chooses partitions of one topic, under the lock of its producer.

    The producer calls choose_sticky() after the sticky partition has received
    batch_size bytes.
    """

    def __init__(
        self,
        partitioner: str | PartitionFunction,
        ignores_keys: bool,
        numbers: Sequence[int],
        random_below: RandomBelow,
    ) -> None:
        """Raises InvalidConfigError if a number is missing, because some keys would
        have no partition.
        """
        #: The partitions, from 0 without gaps.
        self.numbers = PartitionNumbers(numbers)
        if self.numbers != tuple(range(len(numbers))):
            raise InvalidConfigError(
                "some partitions of the topic are missing, so none can be chosen for a record; pass partition=",
                expected="consecutive partitions from 0",
                found=str(self.numbers)[:80],
            )
        self._count = len(self.numbers)
        self._random_below = random_below
        if isinstance(partitioner, str):
            self._name = partitioner
        else:
            self._name = ""
        self._user_function: Callable[[bytes | None, tuple[int, ...]], int] | None = (
            None
        )
        if not isinstance(partitioner, str):
            self._user_function = partitioner
        self._round_robin_count = 0
        self._ignores_keys = ignores_keys
        hash_entry = _HASHES.get(self._name)
        self._hash: _Hash | None = None if hash_entry is None else hash_entry[0]
        if hash_entry is not None:
            self._null_replacement = hash_entry[1]
        else:
            self._null_replacement = None
        #: The partition of records without a key, if choose() returns -1 for them.
        self.sticky = 0
        self.choose_sticky()

    def choose_sticky(self) -> None:
        """Choose a sticky partition at random. It may be the same as before."""
        self.sticky = self._random_below(self._count)

    def choose(self, key: bytes | None) -> int:
        """Return the partition of one record, or -1 for the sticky partition. Raises
        InvalidConfigError if the user's partitioner returns an invalid number.
        """
        user_function = self._user_function
        if user_function is not None:
            number = user_function(key, self.numbers)
            if number not in self.numbers:
                raise InvalidConfigError(
                    "the partitioner returned a number that is no partition of the topic",
                    expected=f"0 to {self._count - 1}",
                    found=repr(number),
                )
            return number
        hash_key = self._hash
        if hash_key is not None:
            if key is None or (not key and self._name == "consistent_random"):
                key = self._null_replacement
            if key is None or self._ignores_keys:
                return -1
            return hash_key(key) % self._count
        if self._name == "random":
            return self._random_below(self._count)
        number = self._round_robin_count % self._count
        self._round_robin_count = (self._round_robin_count + 1) & 0x7FFFFFFF
        return number

    def choose_all(
        self, keys: Sequence[bytes | None] | None, count: int
    ) -> npt.NDArray[np.int64] | int:
        """Return the partitions of `count` records, int64 of shape (count,), or one
        number if all records have the same partition. -1 is the sticky partition.

        `keys` is None if no record has a key. The result is the same as that of calling
        choose() for each record.
        """
        if self._count == 1 and self._user_function is None:
            return 0
        if (
            self._hash is not None
            and self._null_replacement is None
            and (keys is None or self._ignores_keys)
        ):
            return -1
        all_keys: Sequence[bytes | None] = [None] * count
        if keys is not None:
            all_keys = keys
        if self._hash is None or self._ignores_keys:
            return np.fromiter(map(self.choose, all_keys), np.int64, count)
        numbers = (
            np.fromiter(
                map(self._hash, [key or b"" for key in all_keys]), np.int64, count
            )
            % self._count
        )
        if self._name == "consistent_random":
            numbers[[not key for key in all_keys]] = -1
        elif self._null_replacement is None:
            numbers[[key is None for key in all_keys]] = -1
        return numbers

    def choose_columns(
        self, data: npt.NDArray[np.uint8], edges: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Choose partitions by murmur2. Key i is data[edges[i]:edges[i + 1]]."""
        return (murmur2(data, edges).astype(np.int64) & 0x7FFFFFFF) % self._count

    @property
    def uses_murmur2(self) -> bool:
        """Return whether choose_columns() chooses the same partitions as choose()."""
        return self._hash is kernel.murmur2 and not self._ignores_keys
