"""The stores a Python program can embed today, each set up at its best for the work of
a log.

All stores do the same job: store (key, value) records in order, under consecutive
offsets, and return them by offset or in order. Level "os": records survive the process
once the call has returned, but not a power cut. All stores write to the page cache
before they return, and sync nothing.

- sqlite3: a rowid table, so that an offset is the place in the B-tree; WAL,
  synchronous=OFF, one executemany in a transaction; no check of the journal's size, so
  that no checkpoint falls into a measurement.
- lmdb: offset as 8 big-endian bytes, key and value joined; sync=False, and append=True,
  which fills pages from left to right without searching. writemap is measured beside
  it: it needs no system calls, and any stray write into the mapping, by any code of the
  process, damages the file; the targets are held against lmdb without it.
- rocksdict: raw bytes, one WriteBatch per call, WAL written and not synced; no
  compression, because the other stores do not compress.

The stores keep no timestamps and no checksums like logcore's, which is to their
advantage.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import common

_OFFSET: Final = struct.Struct(">Q")
_MAP_BYTES: Final = 16 << 30
_PRAGMAS: Final = (
    "journal_mode=wal",
    "synchronous=off",
    "wal_autocheckpoint=0",
    "cache_size=-262144",  # KiB
    "mmap_size=1073741824",
)
Row = tuple[bytes, bytes]


class Store(Protocol):
    """A peer as a log."""

    def append(self, row: Row) -> None: ...

    def append_many(self, rows: list[Row]) -> None: ...

    def scan(self) -> int:
        """Read key and value of each record, in order; return the number of records."""

    def close(self) -> None: ...


class Sqlite:
    """sqlite3 of the standard library."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.db = sqlite3.connect(path / "log.db", isolation_level=None)
        for pragma in _PRAGMAS:
            self.db.execute(f"pragma {pragma}")
        self.db.execute(
            "create table log(offset integer primary key, key blob, value blob)"
        )

    def append(self, row: Row) -> None:
        self.db.execute("insert into log(key, value) values(?, ?)", row)

    def append_many(self, rows: list[Row]) -> None:
        self.db.execute("begin")
        self.db.executemany("insert into log(key, value) values(?, ?)", rows)
        self.db.execute("commit")

    def checkpoint(self) -> None:
        """Move the WAL into the table, before reads are measured."""
        self.db.execute("pragma wal_checkpoint(truncate)")

    def scan(self) -> int:
        count = 0
        for _, _key, _value in self.db.execute(
            "select offset, key, value from log order by offset"
        ):
            count += 1
        return count

    def close(self) -> None:
        self.db.close()


class Lmdb:
    """lmdb; writemap writes through the mapping instead of with system calls."""

    def __init__(self, path: Path, *, writemap: bool = False) -> None:
        import lmdb

        path.mkdir()
        self.env = lmdb.open(
            str(path),
            map_size=_MAP_BYTES,
            sync=False,
            metasync=False,
            writemap=writemap,
            max_dbs=0,
        )
        self.end = 0

    def append(self, row: Row) -> None:
        with self.env.begin(write=True) as txn:
            txn.put(_OFFSET.pack(self.end), row[0] + row[1], append=True)
        self.end += 1

    def append_many(self, rows: list[Row]) -> None:
        pack = _OFFSET.pack
        end = self.end
        with self.env.begin(write=True) as txn, txn.cursor() as cursor:
            items = [
                (pack(offset), key + value)
                for offset, (key, value) in enumerate(rows, end)
            ]
            cursor.putmulti(items, append=True)
        self.end = end + len(rows)

    def scan(self) -> int:
        count = 0
        size = common.KEY_SIZE
        with self.env.begin() as txn, txn.cursor() as cursor:
            for _, both in cursor:
                _key = both[:size]
                _value = both[size:]
                count += 1
        return count

    def scan_joined(self) -> int:
        """Scan without splitting key and value: the maximum speed of a cursor."""
        count = 0
        with self.env.begin() as txn, txn.cursor() as cursor:
            for _offset, _both in cursor:
                count += 1
        return count

    def get_all(self, offsets: list[int]) -> None:
        """Get key and value at each offset, in one read transaction."""
        pack = _OFFSET.pack
        size = common.KEY_SIZE
        with self.env.begin() as txn:
            get = txn.get
            for offset in offsets:
                both = get(pack(offset))
                _key = both[:size]
                _value = both[size:]

    def get_each(self, offsets: list[int]) -> None:
        """Get key and value at each offset, in one read transaction per offset."""
        pack = _OFFSET.pack
        size = common.KEY_SIZE
        begin = self.env.begin
        for offset in offsets:
            with begin() as txn:
                both = txn.get(pack(offset))
                _key = both[:size]
                _value = both[size:]

    def close(self) -> None:
        self.env.close()


class Rocks:
    """RocksDB through rocksdict."""

    def __init__(self, path: Path) -> None:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(256 << 20)
        self.rocksdict: Any = rocksdict
        self.db = rocksdict.Rdict(str(path), options)
        self.end = 0

    def append(self, row: Row) -> None:
        self.db.put(_OFFSET.pack(self.end), row[0] + row[1])
        self.end += 1

    def append_many(self, rows: list[Row]) -> None:
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        pack = _OFFSET.pack
        put = batch.put
        for offset, (key, value) in enumerate(rows, self.end):
            put(pack(offset), key + value)
        self.db.write(batch)
        self.end += len(rows)

    def scan(self) -> int:
        count = 0
        size = common.KEY_SIZE
        for _, both in self.db.items():
            _key = both[:size]
            _value = both[size:]
            count += 1
        return count

    def close(self) -> None:
        self.db.close()


#: Constructor of each store, and the package that it needs.
STORES: Final[dict[str, tuple[str, Callable[[Path], Store]]]] = {
    "sqlite3": ("sqlite3", Sqlite),
    "lmdb": ("lmdb", Lmdb),
    "lmdb (writemap)": ("lmdb", lambda path: Lmdb(path, writemap=True)),
    "rocksdict": ("rocksdict", Rocks),
}


#: Stores with which targets are compared.
TARGET_STORES: Final = ("sqlite3", "lmdb", "rocksdict")


def stores(
    directory: Path, rows: str, names: Iterable[str] = TARGET_STORES
) -> Iterator[tuple[str, Store]]:
    """Create the named stores whose packages are installed, in a directory."""
    for name in names:
        module, make = STORES[name]
        if common.peer(module, f"{name} in {rows}") is not None:
            yield name, make(directory / name)
