"""Memory for encoded batches, which is reused after a batch has its outcome.

Rules:
- A batch is the only user of its buffer from the encoding until the batch is stored as
  acks requires. Until then, a retry writes the same bytes again.
- A buffer is reused only if no view of it exists: no write is in progress, and no
  traceback of a failed attempt refers to a part of it.
- A batch that fails keeps its buffer, which is freed with it.

A new buffer costs more time than the encoding: 28 us for a batch of 60 KB, because the
system maps and clears each page. Only the thread of the current round uses the pool.
"""

from __future__ import annotations

from typing import Final

#: Maximum total size of the unused buffers of a producer.
MAX_POOLED_BYTES: Final = 1 << 20


class BufferPool:
    """The buffers of one producer that no batch uses."""

    def __init__(self) -> None:
        self._free_buffers: list[bytearray] = []

    def acquire(self, size_bytes: int) -> bytearray:
        """Return a buffer of about this size. Encoders enlarge it if necessary."""
        if self._free_buffers:
            return self._free_buffers.pop()
        return bytearray(size_bytes)

    def release(self, data: memoryview) -> None:
        """Release the view of a batch that is stored, and keep its buffer if no other
        view exists.
        """
        buffer = data.obj
        assert isinstance(buffer, bytearray)
        try:
            data.release()
            # A bytearray with a view cannot be resized. The first resize may move the
            # buffer, and later ones find its capacity large enough.
            buffer.append(0)
            buffer.pop()
        except BufferError:
            return
        if sum(map(len, self._free_buffers)) + len(buffer) <= MAX_POOLED_BYTES:
            self._free_buffers.append(buffer)
