"""Measurements of `logcore bench`: appends, scans and reads, each compared with the bare
work in the same run.

For appends to a file, the bare work is the system calls alone. For scans and reads, it
is one copy of the bytes and their CRC-32C. Comparisons with other stores are in
benchmarks/; this module measures the present disk and machine.
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


def measure(place: str, seconds: float, max_records: int) -> Iterator[dict[str, Any]]:
    """Yield one row of figures per measurement, as soon as the measurement ends.

    Files are created in the directory `place` and left there. A row has "what",
    "records_per_second", "megabytes_per_second" (keys and values, 10^6 bytes),
    "against" (the bare work), its "floor_records_per_second", and the "ratio" of both.

    Args:
        place: an existing directory.
        seconds: maximum duration of each measurement.
        most: maximum number of records of each measurement.
    """
    crc32c(b"")  # imports the module before a measurement begins
    key = b"k" * _KEY_BYTES
    value = b"v" * _VALUE_BYTES
    record_bytes = _KEY_BYTES + _VALUE_BYTES
    payload = bytes(record_bytes + 70)  # about the size of a batch of one record

    def timed(step: Callable[[], int]) -> float:
        """Return the records per second of a step that returns its record count."""
        done = 0
        started = time.perf_counter()
        while True:
            done += step()
            spent = time.perf_counter() - started
            if spent >= seconds or done >= max_records:
                return done / spent

    def row(what: str, rate: float, against: str, floor: float) -> dict[str, Any]:
        return {
            "what": what,
            "records_per_second": round(rate),
            "megabytes_per_second": round(rate * record_bytes / 1e6, 3),
            "against": against,
            "floor_records_per_second": round(floor),
            "ratio": round(rate / floor, 3),
        }

    handle = os.open(os.path.join(place, "bare"), os.O_RDWR | os.O_CREAT)
    end = 0
    sync = getattr(os, "fdatasync", os.fsync)

    def bare(and_sync: bool) -> int:
        nonlocal end
        os.pwrite(handle, payload, end)
        end += len(payload)
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

    data = bytearray(1000 * record_bytes)
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
        end_offset = min(log.high_watermark, max_records)

        def columns() -> int:
            return sum(len(part) for part in log.scan(0, end_offset))

        def objects() -> int:
            return sum(1 for _ in log.read(0, end_offset))

        yield row("scan, to columns", timed(columns), against, timed(floor))
        yield row("read, to records", timed(objects), against, timed(floor))


def _one(log: logcore.Log, key: bytes, value: bytes) -> int:
    log.append(value, key=key)
    return 1
