"""What does an append cost, in bulk, one by one, and down to the disk?

Method: records of 16-byte keys and 100-byte values to a new log with default settings,
beside the embedded stores of peers.py and beside the bare system calls. Level "os" is
compared with level "os" and "disk" with "disk":
- os: all sides return when the bytes are in the page cache.
- disk: both sides return after an fdatasync. The bare side writes as many bytes as one
  of logcore's batches of one record has, at the end of a growing file of its own, with
  os.pwrite and os.fdatasync. Here the median counts.
- 64 threads each append record by record under durability="group";
  log.statistics().syncs counts the fdatasyncs.

Not shown: latency of one append (its tail is the disk's), several processes, and what
compaction or checkpoints cost the peers later: sqlite3 leaves its WAL to be copied,
rocksdict its levels to be merged, and neither is in the figures.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import common
import peers
from common import Result, Settings

import logcore
from logcore.kernels import kernel
from logcore.kernels.layout import BatchEncoding

CALL_ROWS: Final = 1_000
THREADS: Final = 64
APPENDERS: Final = 8


def run(settings: Settings) -> Iterator[Result]:
    yield from in_bulk(settings)
    yield columns_beside_rows(settings)
    yield from one_by_one(settings)
    for policy in ("group", "always"):
        yield to_disk(settings, policy)
    yield many_threads(settings)


def in_bulk(settings: Settings) -> Iterator[Result]:
    rows = common.make_rows(CALL_ROWS)
    keys, values = common.columns_of(rows)
    cases: tuple[tuple[str, tuple[str, ...], float | None, str], ...] = (
        (
            "append_many, 1,000 a call, level os",
            peers.TARGET_STORES,
            5.8,
            "One call and, for the peers, one transaction or write batch for each 1,000 records.",
        ),
        (
            "append_many, beside lmdb with writemap",
            ("lmdb (writemap)",),
            None,
            "As before.",
        ),
        (
            "append_columns, 1,000 a call, level os",
            peers.TARGET_STORES,
            None,
            "As before, logcore's records given as joined bytes and offsets.",
        ),
    )
    for question, names, target, method in cases:
        # A new log for each, and nothing left to write back: gigabytes are written
        # here.
        with common.scratch(settings, "append") as path, open_log(path, "bulk") as log:
            stores = dict(peers.stores(path, question, names))
            sides = {name: _many(store, rows) for name, store in stores.items()}
            if sides:
                common.settle()
                ours = (
                    _columns(log, keys, values)
                    if "columns" in question
                    else _rows(log, rows)
                )
                yield common.speed(
                    question,
                    CALL_ROWS,
                    ours,
                    sides,
                    settings,
                    target=target,
                    method=method,
                )
            for store in stores.values():
                store.close()


def columns_beside_rows(settings: Settings) -> Result:
    rows = common.make_rows(CALL_ROWS)
    keys, values = common.columns_of(rows)
    with (
        common.scratch(settings, "append") as path,
        open_log(path, "columns") as by_columns,
        open_log(path, "rows") as by_rows,
    ):
        common.settle()
        return common.speed(
            "append_columns, beside append_many", CALL_ROWS, _columns(by_columns, keys, values),
            {"append_many": _rows(by_rows, rows)}, settings, target=1.1, method="The same records, 1,000 a call.",
        )  # fmt: skip


def open_log(path: Path, name: str, durability: str = "os") -> logcore.Log:
    return logcore.open(path / f"{name}-0", create=True, durability=durability)


def one_by_one(settings: Settings) -> Iterator[Result]:
    key, value = row = common.make_rows(1)[0]
    with common.scratch(settings, "append") as path, open_log(path, "single") as log:
        stores = dict(
            peers.stores(
                path,
                "append, 1 a call",
                ("lmdb", "lmdb (writemap)", "sqlite3", "rocksdict"),
            )
        )
        sides = {name: _one(store, row) for name, store in stores.items()}
        common.settle()
        if "lmdb" in sides:
            yield common.speed(
                "append, 1 a call, level os", 1, lambda: log.append(value, key=key), {"lmdb": sides.pop("lmdb")},
                settings, target=3, method="One transaction a record in lmdb, sync=False.",
            )  # fmt: skip
        if "lmdb (writemap)" in sides:
            yield common.speed(
                "append, 1 a call, beside lmdb with writemap", 1, lambda: log.append(value, key=key),
                {"lmdb (writemap)": sides.pop("lmdb (writemap)")}, settings, target=1.2,
                method="As before; lmdb makes no system call for a record.",
            )  # fmt: skip
        yield common.speed(
            "append, 1 a call, beside other stores", 1, lambda: log.append(value, key=key), sides, settings,
            method="One auto-committed insert (sqlite3) or put (rocksdict) a record.",
        )  # fmt: skip
        for store in stores.values():
            store.close()
        yield by_threads(settings, log)


def by_threads(settings: Settings, log: logcore.Log) -> Result:
    """Measure the cost of switching between threads that append to one log."""
    key, value = common.make_rows(1)[0]
    appends = 10_000

    def work() -> None:
        for _ in range(appends):
            log.append(value, key=key)

    def together() -> None:
        threads = [threading.Thread(target=work) for _ in range(APPENDERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def alone() -> None:
        for _ in range(APPENDERS):
            work()

    seconds = common.measure({"together": together, "alone": alone}, settings.repeats)
    records = APPENDERS * appends
    return Result(
        question=f"append, 1 a call, level os, {APPENDERS} threads on one log",
        unit="records/s",
        ours=records / seconds["together"],
        peer_name="one thread",
        peer=records / seconds["alone"],
        ratio=seconds["alone"] / seconds["together"],
        turns=seconds.ratios("alone", "together"),
        target=0.8,
        method=f"{APPENDERS} threads with {appends} appends each, beside one thread with all of them.",
    )


def to_disk(settings: Settings, policy: str) -> Result:
    key, value = row = common.make_rows(1)[0]
    encoding = BatchEncoding(16_384, 1_048_588)
    size, _ = kernel.encode_records(
        out := bytearray(), [row], 0, 0, common.NOW_MS, encoding
    )
    data = bytes(out[:size])
    with (
        common.scratch(settings, "append") as path,
        open_log(path, "disk", policy) as log,
        open(path / "bare", "wb", buffering=0) as file,
    ):
        handle, position = file.fileno(), 0
        fdatasync = getattr(os, "fdatasync", os.fsync)

        def bare() -> None:
            nonlocal position
            os.pwrite(handle, data, position)
            fdatasync(handle)
            position += size

        common.settle()
        repeats = 2 * settings.repeats  # a disk is noisier than a processor
        seconds = common.measure(
            {"logcore": lambda: log.append(value, key=key), "bare": bare},
            repeats,
            median=True,
        )
    return Result(
        question=f"append, 1 a call, level disk ({policy})",
        unit="us",
        ours=seconds["logcore"] * 1e6,
        peer_name="us for pwrite + fdatasync",
        peer=seconds["bare"] * 1e6,
        ratio=seconds["logcore"] / seconds["bare"],
        turns=seconds.ratios("logcore", "bare"),
        target=1.08,
        bound="at most",
        method=f"Time of log.append beside os.pwrite of the same {size} bytes and os.fdatasync; medians.",
    )


def many_threads(settings: Settings) -> Result:
    key, value = common.make_rows(1)[0]
    appends = 50 if settings.quick else 200
    with (
        common.scratch(settings, "append") as path,
        open_log(path, "threads", "group") as log,
    ):
        ready = threading.Barrier(THREADS + 1)

        def work() -> None:
            ready.wait()
            for _ in range(appends):
                log.append(value, key=key)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        with common.collector_off():
            ready.wait()
            started = time.perf_counter()
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - started
        found = log.statistics()
    return Result(
        question="64 threads appending, level disk",
        unit="appends/s",
        ours=found.appends / seconds,
        peer_name=f"{found.syncs} fdatasyncs for {found.appends} appends",
        peer=0,
        ratio=found.appends / found.syncs,
        target=50,
        ratio_unit=" a sync",
        method='durability="group"; appends divided by log.statistics().syncs.',
    )


def _rows(log: logcore.Log, rows: list[peers.Row]) -> Callable[[], object]:
    return lambda: log.append_many(rows)


def _columns(log: logcore.Log, keys: object, values: object) -> Callable[[], object]:
    return lambda: log.append_columns(keys=keys, values=values)


def _many(store: peers.Store, rows: list[peers.Row]) -> Callable[[], None]:
    return lambda: store.append_many(rows)


def _one(store: peers.Store, row: peers.Row) -> Callable[[], None]:
    return lambda: store.append(row)
