"""The last batches of each idempotent producer: detects duplicates and lost batches.

Rules (storage format sections 5.1 to 5.5, as in a Kafka leader):
- For each producer id, its epoch and its last five batches are kept. A batch that is
  equal to one of them is a duplicate.
- The next batch begins at the next sequence, or at 0 if the epoch is new. From an
  unknown producer, any sequence is accepted, because its state may have expired.
- A batch of an older epoch comes from a producer that was replaced by another one.
- A snapshot is a cache of this state, taken at an offset. With a snapshot, only the
  batches after it must be read.

This module reads no log and writes no file. It is given batch headers, and snapshots as
bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from logcore.errors import (
    CoordinatorFencedError,
    CorruptLogError,
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    OutOfOrderSequenceError,
)
from logcore.kernels.checksum import crc32c
from logcore.kernels.layout import CONTROL_BIT, INT32_MAX, TRANSACTIONAL_BIT, Facts

#: Number of batches kept for each producer. Its client has at most that many in flight.
KNOWN_BATCHES: Final = 5
#: Kafka: producer.id.expiration.ms.
EXPIRATION_MS: Final = 86_400_000
#: Head and entries of a .snapshot file, storage format section 5.5.
SNAPSHOT_HEAD: Final = np.dtype([("version", ">i2"), ("crc", ">u4"), ("count", ">i4")])
SNAPSHOT_ENTRY: Final = np.dtype(
    [
        ("producer_id", ">i8"),
        ("producer_epoch", ">i2"),
        ("last_sequence", ">i4"),
        ("last_offset", ">i8"),
        ("offset_delta", ">i4"),
        ("timestamp", ">i8"),
        ("coordinator_epoch", ">i4"),
        ("current_txn_first_offset", ">i8"),
    ]
)
#: Position in a snapshot at which the bytes begin that its CRC covers.
SNAPSHOT_CRC_START: Final = 6
assert SNAPSHOT_HEAD.itemsize == 10 and SNAPSHOT_ENTRY.itemsize == 46


class SequencedBatch(NamedTuple):
    """One batch of a producer. The sequence wraps from 2147483647 to 0, within a batch
    too.
    """

    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    timestamp_ms: int


class ProducerFacts(NamedTuple):
    """A producer of a partition."""

    producer_id: int
    epoch: int
    #: -1 after a marker with a new epoch.
    last_sequence: int
    timestamp_ms: int
    #: The coordinator epoch of its last marker; -1 before the first.
    coordinator_epoch: int
    #: The first offset of its open transaction; -1 if none is open.
    open_offset: int


@attrs.define
class _Producer:
    epoch: int
    batches: deque[SequencedBatch] = attrs.Factory(lambda: deque(maxlen=KNOWN_BATCHES))
    timestamp_ms: int = -1
    coordinator_epoch: int = -1
    open_offset: int = -1  # first offset of its open transaction

    def enter_epoch(self, epoch: int) -> None:
        """Switch to another epoch, and drop the batches: its sequences begin again."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches.clear()


def last_sequence(first_sequence: int, record_count: int) -> int:
    """Return the sequence of the last record of a batch."""
    return (first_sequence + record_count - 1) & INT32_MAX


@attrs.define
class Producers:
    """The producers of a partition, as of next_offset: all batches below it were read."""

    next_offset: int = 0
    _known: dict[int, _Producer] = attrs.Factory(dict)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, producer_id: object) -> bool:
        return producer_id in self._known

    def duplicate_of(
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        record_count: int,
        *,
        is_transactional: bool = False,
    ) -> SequencedBatch | None:
        """Return the stored batch that this one repeats, or None for a new valid one.

        Raises:
            InvalidProducerEpochError: the producer was replaced.
            OutOfOrderSequenceError: a batch is missing or repeated.
            InvalidTransactionStateError: the batch is outside the transaction that its
                producer has open.
        """
        known = self._known.get(producer_id)
        if known is None:
            return None
        last = last_sequence(first_sequence, record_count)
        # As many batches are kept as a client may have in flight, so this includes
        # every batch that the client may resend.
        if epoch == known.epoch:
            for batch in known.batches:
                if (
                    batch.first_sequence == first_sequence
                    and batch.last_sequence == last
                ):
                    return batch
        self.check_epoch(producer_id, epoch)
        # A new epoch begins at 0.
        expected = 0
        if epoch == known.epoch and known.batches:
            expected = (known.batches[-1].last_sequence + 1) & INT32_MAX
        if first_sequence != expected:
            raise OutOfOrderSequenceError(
                f"a batch of producer {producer_id}, epoch {epoch}, is missing or came twice",
                expected=f"sequence {expected}",
                found=first_sequence,
            )
        if known.open_offset >= 0 and not is_transactional:
            raise InvalidTransactionStateError(
                f"producer {producer_id} has a transaction open",
                expected="a transactional batch",
                found="one that is not",
            )
        return None

    def is_next(self, producer_id: int, epoch: int, first_sequence: int) -> bool:
        """Return whether a batch is the next one of a producer without a transaction.

        If so, duplicate_of() returns None.
        """
        known = self._known.get(producer_id)
        if known is None or known.epoch != epoch or known.open_offset >= 0:
            return False
        if not known.batches:
            return False
        expected = (known.batches[-1].last_sequence + 1) & INT32_MAX
        return first_sequence == expected

    def check_epoch(self, producer_id: int, epoch: int) -> None:
        """Raise InvalidProducerEpochError if the producer was replaced."""
        known = self._known.get(producer_id)
        if known is not None and epoch < known.epoch:
            raise InvalidProducerEpochError(
                f"producer {producer_id} was replaced by one with a newer epoch",
                expected=f"epoch {known.epoch} or newer",
                found=epoch,
            )

    def facts(self) -> list[ProducerFacts]:
        """Return one row for each producer."""
        found: list[ProducerFacts] = []
        for producer_id, known in self._known.items():
            last = -1
            if known.batches:
                last = known.batches[-1].last_sequence
            found.append(
                ProducerFacts(
                    producer_id,
                    known.epoch,
                    last,
                    known.timestamp_ms,
                    known.coordinator_epoch,
                    known.open_offset,
                )
            )
        return found

    def forget_idle(self) -> None:
        """Forget the producers without an open transaction. Any sequence may follow."""
        self._known = {
            producer_id: known
            for producer_id, known in self._known.items()
            if known.open_offset >= 0
        }

    def coordinator_epoch_of(self, producer_id: int) -> int:
        """Return the coordinator epoch of a producer's last marker, or -1."""
        known = self._known.get(producer_id)
        if known is None:
            return -1
        return known.coordinator_epoch

    def check_marker(self, producer_id: int, epoch: int, coordinator_epoch: int) -> int:
        """Return the first offset of the transaction that a marker would end.

        Returns -1 if none is open. See section 5.3 of the storage format.

        Raises:
            InvalidProducerEpochError: the producer was replaced.
            CoordinatorFencedError: the coordinator was replaced.
        """
        known = self._known.get(producer_id)
        if known is None:
            return -1
        if epoch < known.epoch:
            raise InvalidProducerEpochError(
                f"the marker of producer {producer_id} has an old epoch",
                expected=f"epoch {known.epoch} or newer",
                found=epoch,
            )
        if coordinator_epoch < known.coordinator_epoch:
            raise CoordinatorFencedError(
                f"the marker of producer {producer_id} comes from a coordinator that was replaced",
                expected=f"coordinator epoch {known.coordinator_epoch} or newer",
                found=coordinator_epoch,
            )
        return known.open_offset

    def end_transaction(
        self, producer_id: int, epoch: int, coordinator_epoch: int, timestamp_ms: int
    ) -> None:
        """Add a marker that was stored."""
        known = self._known.setdefault(producer_id, _Producer(epoch))
        known.enter_epoch(epoch)
        known.timestamp_ms = timestamp_ms
        known.coordinator_epoch = coordinator_epoch
        known.open_offset = -1

    def open_transactions(self) -> dict[int, int]:
        """Return the first offset of each open transaction, by producer id."""
        return {
            producer_id: known.open_offset
            for producer_id, known in self._known.items()
            if known.open_offset >= 0
        }

    def add(
        self,
        producer_id: int,
        epoch: int,
        batch: SequencedBatch,
        *,
        is_transactional: bool,
    ) -> None:
        """Add a data batch that was stored."""
        known = self._known.get(producer_id)
        if known is None:
            known = self._known[producer_id] = _Producer(epoch)
        known.enter_epoch(epoch)
        known.batches.append(batch)
        known.timestamp_ms = batch.timestamp_ms
        if is_transactional and known.open_offset < 0:
            known.open_offset = batch.first_offset

    def add_facts(self, facts: Facts, coordinator_epoch: Callable[[int], int]) -> None:
        """Add the headers of stored batches, in order.

        `coordinator_epoch(position)` returns the coordinator epoch of the marker there.
        """
        if not len(facts):
            return
        for row in facts[(facts["magic"] == 2) & (facts["producer_id"] >= 0)].tolist():
            fact = dict(zip(facts.dtype.names or (), row, strict=True))
            producer_id = fact["producer_id"]
            epoch = fact["producer_epoch"]
            count = fact["record_count"]
            if fact["attributes"] & CONTROL_BIT:
                if count:  # compaction leaves empty control batches, without a marker
                    self.end_transaction(
                        producer_id,
                        epoch,
                        coordinator_epoch(fact["position"]),
                        fact["max_timestamp"],
                    )
                continue
            # Compaction may have removed records, but it keeps both offsets of a batch.
            # They give the number of records that were sent.
            sent = fact["last_offset"] - fact["base_offset"] + 1
            first = fact["base_sequence"]
            batch = SequencedBatch(
                first,
                last_sequence(first, sent),
                fact["base_offset"],
                fact["last_offset"],
                fact["max_timestamp"],
            )
            self.add(
                producer_id,
                epoch,
                batch,
                is_transactional=bool(fact["attributes"] & TRANSACTIONAL_BIT),
            )
        self.next_offset = int(facts["last_offset"][-1]) + 1

    def fill(self, others: Producers) -> None:
        """Add earlier batches from `others`, which were read from the log.

        They replace the batches of a producer if the newest batch is the same.
        """
        for producer_id, known in self._known.items():
            other = others._known.get(producer_id)
            if (
                other is None
                or other.epoch != known.epoch
                or not (known.batches and other.batches)
            ):
                continue
            # The time is not compared: a snapshot has one time for each producer, which
            # may be the time of a marker after the batch.
            if other.batches[-1][:4] == known.batches[-1][:4]:
                known.batches = other.batches

    def expire(self, now_ms: int) -> None:
        """Remove producers that have written no batch for a day.

        Like Kafka, this uses the timestamps of their records. If batches have no
        timestamp, the day of their producer begins now. If the producer were removed at
        once, its next retry would be stored a second time.
        """
        for known in self._known.values():
            if known.timestamp_ms < 0:
                known.timestamp_ms = now_ms
        self._known = {
            producer_id: known
            for producer_id, known in self._known.items()
            if known.open_offset >= 0 or now_ms - known.timestamp_ms < EXPIRATION_MS
        }

    def last_batches(self) -> dict[int, tuple[int, int]]:
        """Return (epoch, last offset of the newest data batch or -1) by producer id."""
        found: dict[int, tuple[int, int]] = {}
        for producer_id, known in self._known.items():
            last = -1
            if known.batches:
                last = known.batches[-1].last_offset
            found[producer_id] = (known.epoch, last)
        return found

    def pack(self) -> bytes:
        """Return the content of a .snapshot file: the newest batch of each producer."""
        entries = np.zeros(len(self._known), SNAPSHOT_ENTRY)
        for row, (producer_id, known) in zip(entries, self._known.items(), strict=True):
            if known.batches:
                batch = known.batches[-1]
            else:
                batch = SequencedBatch(-1, -1, -1, -1, -1)
            row["producer_id"] = producer_id
            row["producer_epoch"] = known.epoch
            row["last_sequence"] = batch.last_sequence
            row["last_offset"] = batch.last_offset
            row["offset_delta"] = batch.last_offset - batch.first_offset
            row["timestamp"] = known.timestamp_ms
            row["coordinator_epoch"] = known.coordinator_epoch
            row["current_txn_first_offset"] = known.open_offset
        body = np.array(len(entries), ">i4").tobytes() + entries.tobytes()
        head = np.zeros(1, SNAPSHOT_HEAD)
        head["version"] = 1
        head["crc"] = crc32c(body)
        return head.tobytes()[:SNAPSHOT_CRC_START] + body

    @classmethod
    def unpack(cls, content: bytes, offset: int) -> Producers | None:
        """Decode a .snapshot file; `offset` is in its name. None if it is damaged."""
        try:
            entries = snapshot_entries(content)
        except CorruptLogError:
            return None
        producers = cls(next_offset=offset)
        for row in entries.tolist():
            (
                producer_id,
                epoch,
                sequence,
                last_offset,
                delta,
                timestamp_ms,
                coordinator_epoch,
                open_offset,
            ) = row
            known = _Producer(
                epoch,
                timestamp_ms=timestamp_ms,
                coordinator_epoch=coordinator_epoch,
                open_offset=open_offset,
            )
            if last_offset >= 0:
                first = (sequence - delta) & INT32_MAX
                known.batches.append(
                    SequencedBatch(
                        first, sequence, last_offset - delta, last_offset, timestamp_ms
                    )
                )
            producers._known[producer_id] = known
        return producers


def snapshot_entries(content: bytes, path: str | None = None) -> npt.NDArray[np.void]:
    """Return the entries of a .snapshot file, an array of SNAPSHOT_ENTRY.

    Raises:
        CorruptLogError: Kafka would reject the file.
    """
    if len(content) < SNAPSHOT_HEAD.itemsize:
        raise CorruptLogError(
            "a snapshot cut short",
            path=path,
            expected="at least 10 bytes",
            found=f"{len(content)} bytes",
        )
    version, crc, count = np.frombuffer(content, SNAPSHOT_HEAD, 1)[0].tolist()
    if version != 1:
        raise CorruptLogError(
            "unknown version of a snapshot",
            path=path,
            position=0,
            expected=1,
            found=version,
        )
    found = crc32c(memoryview(content)[SNAPSHOT_CRC_START:])
    if found != crc:
        raise CorruptLogError(
            "CRC-32C of the snapshot does not match",
            path=path,
            position=2,
            expected=f"{crc:#010x}",
            found=f"{found:#010x}",
        )
    if count * SNAPSHOT_ENTRY.itemsize != len(content) - SNAPSHOT_HEAD.itemsize:
        raise CorruptLogError(
            "entry count of the snapshot does not fit its size",
            path=path,
            position=6,
            expected=count,
            found=len(content),
        )
    return np.frombuffer(content, SNAPSHOT_ENTRY, count, SNAPSHOT_HEAD.itemsize)
