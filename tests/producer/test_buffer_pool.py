"""Reuse of the memory of encoded batches."""

from __future__ import annotations

import ctypes

import pytest

from logcore.producer.buffer_pool import MAX_POOLED_BYTES, BufferPool


def test_buffer_is_reused_after_it_was_given_back() -> None:
    pool = BufferPool()
    first = pool.acquire(1_000)
    second = pool.acquire(1_000)
    assert first is not second
    assert len(first) == 1_000
    pool.release(memoryview(first)[:900])
    assert pool.acquire(2_000) is first
    assert pool.acquire(1_000) is not first


def test_released_data_cannot_be_read() -> None:
    pool = BufferPool()
    data = memoryview(pool.acquire(1_000))[:900]
    pool.release(data)
    with pytest.raises(ValueError, match="released"):
        bytes(data)


def test_buffer_with_another_view_is_not_reused() -> None:
    """A traceback may refer to a part of a batch."""
    pool = BufferPool()
    buffer = pool.acquire(1_000)
    data = memoryview(buffer)[:900]
    part = data[10:20]
    pool.release(data)
    assert pool.acquire(1_000) is not buffer
    assert bytes(part) == bytes(10)


def test_buffer_is_not_reused_during_a_write() -> None:
    pool = BufferPool()
    data = memoryview(pool.acquire(1_000))[:900]
    buffer = data.obj
    written = ctypes.c_char.from_buffer(data)  # holds it like a system call
    pool.release(data)
    assert pool.acquire(1_000) is not buffer
    del written


def test_spare_memory_is_limited() -> None:
    pool = BufferPool()
    buffers = [pool.acquire(MAX_POOLED_BYTES // 4) for _ in range(6)]
    for buffer in buffers:
        pool.release(memoryview(buffer))
    reused = [pool.acquire(MAX_POOLED_BYTES // 4) for _ in range(6)]
    assert sum(any(entry is other for other in buffers) for entry in reused) == 4
