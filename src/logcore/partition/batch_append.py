"""Appends encoded batches, such as the batches of a client or of another log.

Log.append_batch() documents the rules.
"""

from __future__ import annotations

from typing import Final

from logcore.errors import InvalidRecordError, SegmentTooSmallError
from logcore.kernels import Receipt
from logcore.kernels.layout import Buffer, Level
from logcore.partition.producers import SequencedBatch
from logcore.partition.writer import Writer
from logcore.recordbatch import prepare_append

#: Position of the producer id in a batch. A set sign bit means that the batch has no
#: producer id.
_PRODUCER_SIGN: Final = 43


def append_batches(
    writer: Writer,
    data: Buffer,
    *,
    durability: Level | None = None,
    check_sequence: bool = True,
) -> Receipt:
    """Append whole batches; see Log.append_batch()."""
    state = writer.state
    with state.lock:
        writer.check_appendable_locked()
        now_ms = writer.fs.now_ms()
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidRecordError(
                "append_batch takes the bytes of batches", found=type(data).__name__
            )
        config = state.config
        first = state.end
        # Under the lock, because it stamps the offsets: without the lock, another
        # append could take them.
        raw, batches = prepare_append(
            data,
            base_offset=first,
            leader_epoch=writer.leader_epoch,
            now_ms=now_ms,
            config=config,
        )
        # One batch is the usual case: its size and its producer id are read without a
        # loop.
        largest = len(raw)
        has_producers = raw[_PRODUCER_SIGN] < 0x80
        if len(batches) > 1:
            largest = max(size for _, size, _, _ in batches)
            has_producers = any(
                raw[position + _PRODUCER_SIGN] < 0x80 for position, _, _, _ in batches
            )
        if largest > config.segment_bytes:
            raise SegmentTooSmallError(
                "batch is larger than segment.bytes",
                expected=f"at most {config.segment_bytes} bytes",
                found=f"{largest} bytes",
            )
        # Note this on disk before the first such batch, so that the next opening
        # restores the state of producers.
        if has_producers and not writer.metadata.sidecar.producers:
            writer.expect_producers_locked()
        sequenced = None
        if check_sequence:
            sequenced = writer.producers.judge(raw, batches)
        # A client that missed the answer sent a stored batch again. It gets the first
        # receipt; no byte is written.
        if isinstance(sequenced, SequencedBatch):
            first = sequenced.first_offset
            last = sequenced.last_offset
            now_ms = sequenced.timestamp_ms
            # An interrupt came between the write and the subsequent work of the policy.
            if last >= state.visible:
                writer.settle_locked(durability)
        elif has_producers:
            with writer.producers.storing(sequenced, is_judged=check_sequence):
                writer.store_locked(memoryview(raw), batches, now_ms, durability)
            last = state.end - 1
        else:
            writer.store_locked(memoryview(raw), batches, now_ms, durability)
            last = state.end - 1
    return writer.acknowledge(first, last, now_ms, durability)
