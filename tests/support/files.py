"""The files of a directory of topics, for tests that damage them."""

from __future__ import annotations

import logcore
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk

T0 = 1_700_000_000_000
FUTURE = 4_000_000_000_000  # the time of records, so that no producer expires
CODECS = ["uncompressed", "gzip", "snappy", "lz4", "zstd"]
Files = dict[str, bytes]


def closed_directory() -> Files:
    """Return the files of a directory that logcore has closed cleanly. It has a log with
    three segments, all codecs and an idempotent producer, and settings of the topic.
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
