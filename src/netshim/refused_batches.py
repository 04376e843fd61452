"""Batches of idempotent producers that this broker refused, and that will come again.

Rules:
- A client has up to five batches of a partition in flight. If one of them is refused,
  and those that follow it are out of order for that reason, they get the same code. The
  reason may have passed by then: this broker did not lead yet, or too few replicas were
  in sync.
- Without this rule, they get OUT_OF_ORDER_SEQUENCE_NUMBER. librdkafka then begins a new
  epoch, and sends all unanswered batches of all partitions in it. Those that were stored
  before a failover are then stored twice.
- If the log has no batch of the producer, it accepts any sequence. So a batch that
  follows a refused one is not stored in such a log. Otherwise, the refused one would be
  out of order when it comes again.

Kafka does not have this rule.
"""

from __future__ import annotations

from typing import Final

import attrs

from logcore.config import INT32_MAX
from logcore.metadata.checkpoint import Key
from logcore.partition.producers import KNOWN_BATCHES
from netshim.wire import codes

#: Codes of batches that were not stored, and that clients send again.
RETRIED: Final = frozenset(
    (
        codes.UNKNOWN_TOPIC_OR_PARTITION,
        codes.NOT_LEADER_OR_FOLLOWER,
        codes.NOT_ENOUGH_REPLICAS,
        codes.KAFKA_STORAGE_ERROR,
    )
)
#: The time for which a client may have batches in flight, and the number of refused
#: batches that are remembered: 200 bytes each.
_REMEMBERED_MS: Final = 30_000
_MOST_REMEMBERED: Final = 1_000


@attrs.define
class _RefusedBatch:
    """The first batch in flight that was refused."""

    epoch: int
    sequence: int
    code: int
    until_ms: int
    #: Further batches that may be in flight and out of order.
    left: int = KNOWN_BATCHES - 1

    def distance_to(self, sequence: int) -> int:
        """Return how many records after this batch another one of the epoch begins.

        Sequences continue at 0 after INT32_MAX, so a batch before this one has a
        distance above the half of that.
        """
        return (sequence - self.sequence) & INT32_MAX


class RefusedBatches:
    """The refused batches of all partitions of a broker."""

    def __init__(self) -> None:
        #: By partition and producer id, the oldest first.
        self._refused: dict[tuple[Key, int], _RefusedBatch] = {}

    def __len__(self) -> int:
        return len(self._refused)

    def add(
        self,
        key: Key,
        producer_id: int,
        epoch: int,
        sequence: int,
        code: int,
        now_ms: int,
    ) -> None:
        """Remember a batch that was refused with one of the codes in RETRIED."""
        one = key, producer_id
        if self.code_for(key, producer_id, epoch, sequence, now_ms):
            refused = self._refused[one]
            refused.left = KNOWN_BATCHES - 1
            refused.until_ms = now_ms + _REMEMBERED_MS
            return
        self._refused[one] = _RefusedBatch(
            epoch, sequence, code, now_ms + _REMEMBERED_MS
        )
        if len(self._refused) > _MOST_REMEMBERED:
            del self._refused[next(iter(self._refused))]

    def code_for(
        self, key: Key, producer_id: int, epoch: int, sequence: int, now_ms: int
    ) -> int:
        """Return the code of the refused batch that a batch follows, else 0.

        The rule ends if the refused batch comes again, or with a new epoch.
        """
        one = key, producer_id
        refused = self._refused.get(one)
        if refused is None or epoch < refused.epoch:
            return codes.NONE
        distance = refused.distance_to(sequence)
        if now_ms >= refused.until_ms or epoch > refused.epoch or not distance:
            del self._refused[one]
            return codes.NONE
        if distance > INT32_MAX // 2:
            return codes.NONE  # such as a late batch of an earlier connection
        return refused.code

    def judge(self, key: Key, producer_id: int, *, is_stored: bool) -> None:
        """Take the result of a batch for which code_for() returned a code.

        A stored batch ends the rule, and so does the last one that may be in flight.
        """
        one = key, producer_id
        refused = self._refused.get(one)
        if refused is not None:
            refused.left -= 1
            if is_stored or not refused.left:
                del self._refused[one]
