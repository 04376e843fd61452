"""Batches of idempotent producers that this broker refused, and that will be sent again.

Rules:
- A client has up to five batches of a partition in flight. If one of them is refused,
  those that follow it are out of order, and are refused with the same code. The reason
  of the refusal may be over by then: this broker did not lead yet, or too few replicas
  were in sync.
- Without this rule, they get OUT_OF_ORDER_SEQUENCE_NUMBER. librdkafka then begins a new
  epoch, and sends all unanswered batches of all partitions in it. Those that were stored
  before a failover are then stored twice.
- If the log has no batch of the producer, it accepts any sequence. Even then, a batch
  that follows a refused one is not stored. Otherwise, the refused one would be out of
  order when it is sent again.
- A refused batch is remembered until as many batches as may be in flight have followed
  it, also after it was stored: a copy of it on an earlier connection may be stored
  between two batches that follow it.

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
#: The time for which a client may have batches in flight.
_REFUSED_MS: Final = 30_000
#: Maximum number of refused batches that are stored. Each occupies 200 bytes.
_MAX_REFUSED: Final = 1_000


@attrs.define
class _RefusedBatch:
    """The first batch in flight that was refused."""

    epoch: int
    sequence: int
    #: The error code of the refusal.
    code: int
    #: When this object is removed.
    until_ms: int
    #: Further batches that may be in flight and out of order.
    remaining_batches: int = KNOWN_BATCHES - 1

    def distance_to(self, sequence: int) -> int:
        """Return how many records after this batch another one of the epoch begins.

        After INT32_MAX, sequences continue at 0. The distance to a batch before this
        one is therefore more than half of INT32_MAX.
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
        """Store a batch that was refused with one of the codes in RETRIED."""
        source = key, producer_id
        if self.code_for(key, producer_id, epoch, sequence, now_ms):
            # Inserted again, so that the oldest remains the first.
            refused = self._refused[source] = self._refused.pop(source)
            refused.remaining_batches = KNOWN_BATCHES - 1
            refused.until_ms = now_ms + _REFUSED_MS
            return
        self._refused[source] = _RefusedBatch(
            epoch, sequence, code, now_ms + _REFUSED_MS
        )
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def code_for(
        self, key: Key, producer_id: int, epoch: int, sequence: int, now_ms: int
    ) -> int:
        """Return the code of the refused batch that a batch follows, else 0.

        The refused batch is forgotten at a new epoch, or when its time is over.
        """
        # A producer that sends nothing more must not keep all others from the fast path.
        while self._refused:
            oldest = next(iter(self._refused))
            if now_ms < self._refused[oldest].until_ms:
                break
            del self._refused[oldest]
        source = key, producer_id
        refused = self._refused.get(source)
        if refused is None or epoch < refused.epoch:
            return codes.NONE
        distance = refused.distance_to(sequence)
        if epoch > refused.epoch:
            del self._refused[source]
            return codes.NONE
        # The batch itself, or a late batch of an earlier connection.
        if not distance or distance > INT32_MAX // 2:
            return codes.NONE
        return refused.code

    def count_following(self, key: Key, producer_id: int) -> None:
        """Count a batch for which code_for() returned a code.

        The refused batch is forgotten after the last one that may be in flight.
        """
        source = key, producer_id
        refused = self._refused.get(source)
        if refused is not None:
            refused.remaining_batches -= 1
            if not refused.remaining_batches:
                del self._refused[source]
