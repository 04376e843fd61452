"""Reuse of the memory of encoded batches."""

from __future__ import annotations

import ctypes

import pytest

from logcore.producer.buffer_pool import SPARE_BYTES, BufferPool


def test_buffer_is_reused_after_it_was_given_back() -> None:
    pool = BufferPool()
    first = pool.take(1_000)
    second = pool.take(1_000)
    assert first is not second
    assert len(first) == 1_000
    pool.give_back(memoryview(first)[:900])
    assert pool.take(2_000) is first
    assert pool.take(1_000) is not first


def test_released_data_cannot_be_read() -> None:
    pool = BufferPool()
    data = memoryview(pool.take(1_000))[:900]
    pool.give_back(data)
    with pytest.raises(ValueError, match="released"):
        bytes(data)


def test_buffer_with_another_view_is_not_reused() -> None:
    """A traceback may refer to a part of a batch."""
    pool = BufferPool()
    buffer = pool.take(1_000)
    data = memoryview(buffer)[:900]
    part = data[10:20]
    pool.give_back(data)
    assert pool.take(1_000) is not buffer
    assert bytes(part) == bytes(10)


def test_buffer_is_not_reused_during_a_write() -> None:
    pool = BufferPool()
    data = memoryview(pool.take(1_000))[:900]
    buffer = data.obj
    written = ctypes.c_char.from_buffer(data)  # holds it like a system call
    pool.give_back(data)
    assert pool.take(1_000) is not buffer
    del written


def test_spare_memory_is_limited() -> None:
    pool = BufferPool()
    buffers = [pool.take(SPARE_BYTES // 4) for _ in range(6)]
    for buffer in buffers:
        pool.give_back(memoryview(buffer))
    reused = [pool.take(SPARE_BYTES // 4) for _ in range(6)]
    assert sum(any(entry is other for other in buffers) for entry in reused) == 4
