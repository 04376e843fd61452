"""What `logcore bench` measures: appends, scans and reads, each against the bare work
in the same run.

The bare work is the system calls alone where an append goes to the file, and one copy
of the bytes with their CRC-32C elsewhere. The benchmarks proper, beside other stores,
are in benchmarks/; this is for the disk and the machine at hand.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import logcore
from logcore.kernels.checksum import crc32c

_KEY_BYTES = 16
_VALUE_BYTES = 200


def measure(place: str, seconds: float, most: int) -> Iterator[dict[str, Any]]:
    """Rows of figures, each as soon as it is there; files are made in the directory
    place and left there.

    seconds, most: each measurement ends after that time or that many records. A row has
    "what", "records_per_second", "megabytes_per_second" (of keys and values, 10^6
    bytes), "against" (the bare work), "floor_records_per_second" of it, and "ratio" of
    the two.
    """
    crc32c(b"")  # imports it
    key = b"k" * _KEY_BYTES
    value = b"v" * _VALUE_BYTES
    one = _KEY_BYTES + _VALUE_BYTES
    piece = bytes(
        one + 70
    )  # about what one record of this size is as a batch of its own

    def timed(step: Callable[[], int]) -> float:
        """Records a second of a step that returns how many it did."""
        done = 0
        started = time.perf_counter()
        while True:
            done += step()
            spent = time.perf_counter() - started
            if spent >= seconds or done >= most:
                return done / spent

    def row(what: str, rate: float, against: str, floor: float) -> dict[str, Any]:
        return {
            "what": what,
            "records_per_second": round(rate),
            "megabytes_per_second": round(rate * one / 1e6, 3),
            "against": against,
            "floor_records_per_second": round(floor),
            "ratio": round(rate / floor, 3),
        }

    handle = os.open(os.path.join(place, "bare"), os.O_RDWR | os.O_CREAT)
    end = 0
    sync = getattr(os, "fdatasync", os.fsync)

    def bare(and_sync: bool) -> int:
        nonlocal end
        os.pwrite(handle, piece, end)
        end += len(piece)
        if and_sync:
            sync(handle)
        return 1

    try:
        for name, policy, against in (
            ("append, one a call, os", "os", "pwrite"),
            ("append, one a call, disk", "group", "pwrite + fdatasync"),
        ):
            with logcore.open(
                os.path.join(place, f"{policy}-0"), create=True, durability=policy
            ) as log:
                rate = timed(lambda log=log: _one(log, key, value))  # type: ignore[misc]
            bare_rate = timed(functools.partial(bare, policy == "group"))
            yield row(name, rate, against, bare_rate)
    finally:
        os.close(handle)

    data = bytearray(1000 * one)
    copy = bytearray(len(data))

    def floor() -> int:
        copy[:] = data
        crc32c(copy)
        return 1000

    against = "copy + CRC-32C"
    group = [(key, value)] * 1000
    many = os.path.join(place, "many-0")
    with logcore.open(many, create=True, durability="os") as log:

        def append_group() -> int:
            log.append_many(group)
            return 1000

        yield row(
            "append_many, 1000 a call, os", timed(append_group), against, timed(floor)
        )
    with logcore.open(many, read_only=True) as log:
        end_offset = min(log.high_watermark, most)

        def columns() -> int:
            return sum(len(part) for part in log.scan(0, end_offset))

        def objects() -> int:
            return sum(1 for _ in log.read(0, end_offset))

        yield row("scan, to columns", timed(columns), against, timed(floor))
        yield row("read, to records", timed(objects), against, timed(floor))


def _one(log: logcore.Log, key: bytes, value: bytes) -> int:
    log.append(value, key=key)
    return 1
