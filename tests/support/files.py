"""A directory of topics as bytes by path, for tests that damage it."""

from __future__ import annotations

import logcore
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk

T0 = 1_700_000_000_000
FUTURE = 4_000_000_000_000  # no producer has expired then
CODECS = ["uncompressed", "gzip", "snappy", "lz4", "zstd"]
Files = dict[str, bytes]


def own() -> Files:
    """Return a directory of logcore that was closed cleanly: three segments, all
    codecs, a producer, settings, and an allocated producer id.
    """
    disk = SimulatedDisk(now_ms=T0)
    config = {
        "segment.bytes": 900,
        "index.interval.bytes": 150,
        "retention.ms": 1 << 40,
    }
    with logcore.open_dir("/data", create=True, fs=disk) as directory:
        directory.create_topic(
            "t", config={name: str(value) for name, value in config.items()}
        )
        log = directory.partition("t", 0)
        producer = directory.host.next_producer_id()
        for at, codec in enumerate(CODECS * 4):
            producer_fields = (
                {
                    "producer_id": producer,
                    "producer_epoch": 0,
                    "base_sequence": at // 4 * 2,
                }
                if at % 4 == 3
                else {}
            )
            rows = [
                (b"k%d" % at, b"value %d" % at * 3, (), FUTURE + at * 10 + row)
                for row in range(2)
            ]
            log.append_batch(encode(rows, codec=codec, **producer_fields))
        log.delete_records(3)
    return disk.files()
