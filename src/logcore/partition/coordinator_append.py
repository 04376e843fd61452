"""Operations of a transaction coordinator on a log: appends, and producer facts.

Rules:
- A coordinator's batch has no sequence. The coordinator itself ensures that the batch
  is stored once.
- The batch is refused if its producer was replaced, like a client's batch.
- Markers of this directory's own coordinator are never refused as coming from a
  replaced coordinator. Their epoch is the leader epoch of the log that stores the
  coordinator's records. If the producer's last marker in the partition has a higher
  epoch, that one is used: Kafka may have written it when the records were stored
  elsewhere.
- All records of one append are in one batch, so that a crash leaves all of them or
  none.

Log.end_transaction() writes the markers. This module does not decide which producer may
write which records.
"""

from __future__ import annotations

from collections.abc import Sequence

from logcore.kernels import Receipt
from logcore.kernels.layout import Level, RecordInput
from logcore.partition.producers import ProducerFacts, SequencedBatch
from logcore.partition.writer import Writer
from logcore.recordbatch import RecordBatch, encode


def append_atomically(
    writer: Writer, records: Sequence[RecordInput], *, durability: Level | None = None
) -> Receipt:
    """Append records as one batch of at most max.message.bytes.

    Raises the same errors as Log.append().
    """
    with writer.state.lock:
        writer.check_appendable_locked()
        now_ms = writer.fs.now_ms()
        first = writer.state.end
        data = encode(
            records,
            base_offset=first,
            leader_epoch=writer.leader_epoch,
            now_ms=now_ms,
            max_bytes=min(
                writer.state.config.max_message_bytes, writer.state.config.segment_bytes
            ),
        )
        batch = RecordBatch.parse(data)
        assert batch is not None
        last = batch.last_offset
        writer.store_locked(
            memoryview(data),
            [(0, len(data), last, batch.max_timestamp)],
            now_ms,
            durability,
        )
    return writer.acknowledge(first, last, now_ms, durability)


def append_to_transaction(
    writer: Writer,
    records: Sequence[RecordInput],
    producer_id: int,
    producer_epoch: int,
    *,
    durability: Level | None = None,
) -> Receipt:
    """Append records to the open transaction of a producer, as one batch.

    Opens a transaction if none is open.

    Raises:
        InvalidProducerEpochError: the epoch was replaced. Other errors are those of
            Log.append().
    """
    with writer.state.lock:
        writer.check_appendable_locked()
        writer.expect_producers_locked()
        writer.producers.known().check_epoch(producer_id, producer_epoch)
        now_ms = writer.fs.now_ms()
        first = writer.state.end
        data = encode(
            records,
            base_offset=first,
            leader_epoch=writer.leader_epoch,
            now_ms=now_ms,
            transactional=True,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            max_bytes=writer.state.config.segment_bytes,
        )
        batch = RecordBatch.parse(data)
        assert batch is not None
        last = batch.last_offset
        # No sequence: a coordinator's batches are fenced by the epoch alone.
        sequenced = SequencedBatch(-1, -1, first, last, batch.max_timestamp)
        with writer.producers.storing(
            [(producer_id, producer_epoch, True, sequenced)], is_checked=True
        ):
            placed = [(0, len(data), last, batch.max_timestamp)]
            writer.store_locked(memoryview(data), placed, now_ms, durability)
    return writer.acknowledge(first, last, now_ms, durability)


def marker_epoch(writer: Writer, producer_id: int, home_epoch: int) -> int:
    """Return the coordinator epoch for a marker of the directory's own coordinator.

    `home_epoch` is the leader epoch of the log that stores the records of the
    transaction; 0 if there are none. May read files.

    Raises:
        CorruptBatchError, StorageReadError: the producers could not be loaded.
    """
    with writer.state.lock:
        return max(
            0, home_epoch, writer.producers.known().coordinator_epoch_of(producer_id)
        )


def knows_producer(writer: Writer, producer_id: int) -> bool:
    """Return whether the log has the state of a producer. May read files.

    Raises:
        CorruptBatchError, StorageReadError: the producers could not be loaded.
    """
    with writer.state.lock:
        return producer_id in writer.producers.known()


def forget_idle_producers(writer: Writer) -> None:
    """Accept any next sequence of producers without an open transaction.

    For a log that was replaced by an older copy while its producers continue. Valid
    until the log is closed. Raises the errors of knows_producer().
    """
    with writer.state.lock:
        writer.producers.known().forget_idle()


def producers_of(writer: Writer) -> list[ProducerFacts]:
    """Return the state of each producer of the last day. May read files.

    Raises:
        CorruptBatchError, StorageReadError: the producers could not be loaded.
    """
    with writer.state.lock:
        return writer.producers.known().facts()
