"""What a coordinator of transactions does with a log: writes in a producer's name, and asks what producers did.

Rules:
- A batch of a coordinator has no sequence: the coordinator itself makes sure that it is stored once.
- It is refused if the producer was replaced, as a client's batch is.
- The markers of this directory's own coordinator are never refused as those of a replaced one: its epoch is that of the
  log that keeps its records, or that of the producer's last marker in the partition where that is higher: Kafka may
  have written it when the records were elsewhere.
- What a coordinator appends at once is one batch, so that a crash leaves all of it or nothing.

Markers are written by Log.end_transaction(). Which producer may write what is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence

from logcore.kernels import Receipt
from logcore.kernels.layout import Level, RecordInput
from logcore.partition.producers import ProducerFacts, SequencedBatch
from logcore.partition.writer import Writer
from logcore.recordbatch import RecordBatch, encode


def append_whole(writer: Writer, records: Sequence[RecordInput], *, durability: Level | None = None) -> Receipt:
    """Appends records as one batch, of max.message.bytes at most. Errors as Log.append()."""
    with writer.state.lock:
        writer.check_writable_locked()
        now_ms = writer.fs.now_ms()
        first = writer.state.end
        data = encode(
            records,
            base_offset=first,
            leader_epoch=writer.leader_epoch,
            now_ms=now_ms,
            max_bytes=min(writer.state.config.max_message_bytes, writer.state.config.segment_bytes),
        )
        batch = RecordBatch.parse(data)
        assert batch is not None
        last = batch.last_offset
        writer.store_locked(memoryview(data), [(0, len(data), last, batch.max_timestamp)], now_ms, durability)
    return writer.acknowledge(first, last, now_ms, durability)


def append_to_transaction(
    writer: Writer,
    records: Sequence[RecordInput],
    producer_id: int,
    producer_epoch: int,
    *,
    durability: Level | None = None,
) -> Receipt:
    """Appends records to the open transaction of a producer, as one batch. Opens a transaction where none is open.

    Raises InvalidProducerEpochError for an epoch that was replaced; errors else as Log.append().
    """
    with writer.state.lock:
        writer.check_writable_locked()
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
        # No sequence: what a coordinator writes is fenced by the epoch alone.
        sequenced = SequencedBatch(-1, -1, first, last, batch.max_timestamp)
        with writer.producers.storing([(producer_id, producer_epoch, True, sequenced)], is_judged=True):
            placed = [(0, len(data), last, batch.max_timestamp)]
            writer.store_locked(memoryview(data), placed, now_ms, durability)
    return writer.acknowledge(first, last, now_ms, durability)


def marker_epoch(writer: Writer, producer_id: int, home_epoch: int) -> int:
    """The coordinator epoch for a marker of the directory's own coordinator. home_epoch: the leader epoch of the log
    that keeps the records of the transaction, 0 where there are none. May read files. Raises CorruptBatchError and
    StorageReadError.
    """
    with writer.state.lock:
        return max(0, home_epoch, writer.producers.known().coordinator_epoch_of(producer_id))


def knows_producer(writer: Writer, producer_id: int) -> bool:
    """Whether the log knows a producer. May read files. Raises CorruptBatchError and StorageReadError."""
    with writer.state.lock:
        return producer_id in writer.producers.known()


def producers_of(writer: Writer) -> list[ProducerFacts]:
    """What is known of each producer of the last day. May read files. Raises CorruptBatchError, StorageReadError."""
    with writer.state.lock:
        return writer.producers.known().facts()
