"""How fast is a log read: completely, one record at a time, and only to check it?

Method: records of 16-byte keys and 100-byte values, uncompressed, in the page cache
(everything is read once before).
- Scans, compared with the stores of peers.py, which hold the same records: each record's
  key and value become bytes objects. Peers that store key and value as one value split
  it. For lmdb, a row without the split shows its maximum. Scan to columns returns
  RecordColumns (CRC checked). The peers have no columns, so the same scan is used.
- Scan to columns, compared with the minimum of its work: one copy of the bytes (memcpy,
  1 MiB at a time into one buffer, which remains in the cache) and their CRC-32C by the
  crc32c package, from the same mapped files.
- Random reads: log.get of a record in a sealed segment (the CRC of its batch is checked
  once), beside lmdb's get, once in one long-lived transaction and once with a
  transaction for each get. lmdb stores no checksum. The target applies to the
  long-lived transaction. The active segment is read with pread and has its own row.
- Check: Segment.walk with CRCs over one sealed segment, beside crc32c of the same
  mapped bytes as one run.

Not shown: reads that come from the disk, compressed logs, and Arrow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import common
import crc32c
import numpy as np
import peers
from common import Result, Settings

import logcore

PIECE_BYTES: Final = 1 << 20
CALL_ROWS: Final = 1_000
READS: Final = 1_000


def run(settings: Settings) -> Iterator[Result]:
    yield from beside_stores(settings)
    yield from beside_memory(settings)


def beside_stores(settings: Settings) -> Iterator[Result]:
    count = 50_000 if settings.quick else 500_000
    rows = common.make_rows(count)
    with common.scratch(settings, "scan") as path:
        with logcore.open(
            path / "log-0",
            create=True,
            durability="os",
            config={"segment.bytes": 16 << 20},
        ) as log:
            for at in range(0, count, CALL_ROWS):
                log.append_many(rows[at : at + CALL_ROWS])
            log.roll()  # all segments are sealed
        stores = dict(peers.stores(path, "scans"))
        for store in stores.values():
            for at in range(0, count, CALL_ROWS):
                store.append_many(rows[at : at + CALL_ROWS])
            if isinstance(store, peers.Sqlite):
                store.checkpoint()
        common.settle()
        with logcore.open(path / "log-0", read_only=True) as log:

            def to_records() -> None:
                for record in log.read(0):
                    _key = record.key
                    _value = record.value

            def to_columns() -> None:
                for _columns in log.scan():
                    pass

            assert [(record.key, record.value) for record in log.read(0)] == rows, (
                "the read records equal the stored records"
            )
            for name, store in stores.items():
                assert store.scan() == count, f"{name} has all records"
            sides: dict[str, Callable[[], object]] = {
                name: store.scan for name, store in stores.items()
            }
            lmdb = stores.get("lmdb")
            yield common.speed(
                "scan to records", count, to_records, sides, settings, target=1.5,
                method="log.read, touching key and value; the peers' cursors, likewise.",
            )  # fmt: skip
            yield common.speed(
                "scan to columns", count, to_columns, sides, settings, target=10,
                method="log.scan, iterated; the peers as in the row before, they have no columns.",
            )  # fmt: skip
            if isinstance(lmdb, peers.Lmdb):
                yield common.speed(
                    "scan to records, beside lmdb not splitting", count, to_records, {"lmdb": lmdb.scan_joined},
                    settings, method="The peer does not split its value into key and value.",
                )  # fmt: skip
                yield from random_reads(settings, log, lmdb, count)
            yield common.speed(
                "columns of batch after batch", count, lambda: [len(batch.columns()) for batch in log.batches(0)],
                {"log.scan": to_columns}, settings, target=0.5, method="RecordBatch.columns of batches of 16 KiB.",
            )  # fmt: skip
        for store in stores.values():
            store.close()
        yield from active_reads(settings, path, rows)


def random_reads(
    settings: Settings, log: logcore.Log, lmdb: peers.Lmdb, count: int
) -> Iterator[Result]:
    offsets = random.Random(3).sample(range(count), READS)

    def ours() -> None:
        get = log.get
        for offset in offsets:
            get(offset)

    def in_one() -> None:
        lmdb.get_all(offsets)

    def one_by_one() -> None:
        lmdb.get_each(offsets)

    yield common.speed(
        "read at a random offset", READS, ours, {"lmdb": in_one}, settings, unit="reads/s", target=0.9,
        method="log.get in sealed segments; lmdb get in one long-lived read transaction, key and value split.",
    )  # fmt: skip
    yield common.speed(
        "read at a random offset, a transaction each", READS, ours, {"lmdb": one_by_one}, settings, unit="reads/s",
        method="As before, but lmdb begins a read transaction for each get, so that it sees later writes.",
    )  # fmt: skip


def active_reads(
    settings: Settings, path: Path, rows: list[peers.Row]
) -> Iterator[Result]:
    if common.peer("lmdb", "reads of the active segment") is None:
        return
    rows = rows[:50_000]
    store = peers.Lmdb(path / "lmdb-active")
    with logcore.open(path / "active-0", create=True, durability="os") as log:
        for at in range(0, len(rows), CALL_ROWS):
            log.append_many(rows[at : at + CALL_ROWS])
            store.append_many(rows[at : at + CALL_ROWS])
        yield growing_scan(settings, path, log, rows)
        offsets = random.Random(4).sample(range(len(rows)), READS)

        def ours() -> None:
            get = log.get
            for offset in offsets:
                get(offset)

        yield common.speed(
            "read at a random offset, active segment", READS, ours, {"lmdb": lambda: store.get_all(offsets)}, settings,
            unit="reads/s", target=0.9,
            method="log.get while the log is open for writing; lmdb in one long-lived transaction.",
        )  # fmt: skip
    store.close()


def growing_scan(
    settings: Settings, path: Path, growing: logcore.Log, rows: list[peers.Row]
) -> Result:
    """Compare reads of the active segment with reads of a sealed segment."""
    with logcore.open(path / "sealed-0", create=True, durability="os") as sealed:
        for at in range(0, len(rows), CALL_ROWS):
            sealed.append_many(rows[at : at + CALL_ROWS])
        sealed.roll()

        def scan(log: logcore.Log) -> None:
            for _columns in log.scan():
                pass

        return common.speed(
            "scan to columns, active segment", len(rows), lambda: scan(growing),
            {"sealed segment": lambda: scan(sealed)}, settings, target=0.95,
            method="log.scan in the process that writes, beside the same records in a sealed segment.",
        )  # fmt: skip


def beside_memory(settings: Settings) -> Iterator[Result]:
    size = (128 if settings.quick else 1024) << 20
    rows = common.make_rows(20_000)
    with common.scratch(settings, "scan") as path:
        with logcore.open(path / "large-0", create=True, durability="os") as log:
            common.fill(log, rows, size - (8 << 20))
            log.roll()
        with logcore.open(path / "large-0", read_only=True) as log:
            segment = log._state.segments[
                0
            ]  # the public API has no scan that keeps no records
            view = segment.view()
            total = len(view)
            copy = np.empty(PIECE_BYTES, np.uint8)
            source = np.frombuffer(view, np.uint8)

            def copy_and_crc() -> None:
                for at in range(0, total, PIECE_BYTES):
                    piece = source[at : at + PIECE_BYTES]
                    np.copyto(copy[: len(piece)], piece)
                    crc32c.crc32c(view[at : at + PIECE_BYTES])

            def to_columns() -> None:
                for _columns in log.scan():
                    pass

            def check() -> None:
                assert sum(len(facts) for facts, _, _ in segment.walk(0, crc=True)) > 0

            yield common.speed(
                "scan to columns, uncompressed", total, to_columns, {"memcpy + crc32c": copy_and_crc}, settings,
                unit="B/s", target=0.5, method=f"log.scan over {total >> 20} MiB, iterated.",
            )  # fmt: skip
            yield common.speed(
                f"check of {total / (1 << 30):.2g} GiB", total, check, {"crc32c": lambda: crc32c.crc32c(view)},
                settings, unit="B/s", target=0.6, method="Segment.walk(0, crc=True) beside crc32c of the same mapping.",
            )  # fmt: skip
