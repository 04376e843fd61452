"""What does a topic cost beside its partitions?

Method: a topic of three partitions with 16-byte keys and 100-byte values, plain and
with zstd, in the page cache.
- Scans of the topic beside scans of each of its partitions, one after the other: once
  to columns, and once to Arrow.
- LogDir.append() with a key beside Log.append() to the same partition, level os. The
  row is the difference in microseconds for one record: finding the topic, hashing the
  key, finding the log.

Not shown: reading a topic in the order of time, which merges one record at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import common
from common import Result, Settings

import logcore

CALLS = 1_000


def run(settings: Settings) -> Iterator[Result]:
    for codec in ("uncompressed", "zstd"):
        with common.scratch(settings, "topic") as path:
            yield from scans(settings, path, codec)
    with common.scratch(settings, "topic") as path:
        yield appends(settings, path)


def scans(settings: Settings, path: Path, codec: str) -> Iterator[Result]:
    count = 30_000 if settings.quick else 300_000
    rows = common.make_rows(count)
    config = {"compression.type": codec}
    with logcore.open_dir(path, create=True, durability="os") as logdir:
        logdir.create_topic("orders", partitions=3, config=config)
        for number in range(3):
            log = logdir.partition("orders", number)
            log.append_many(rows[number::3])
            log.roll()
        logs = [logdir.partition("orders", number) for number in range(3)]

        def of_topic() -> None:
            for _ in logdir.scan("orders"):
                pass

        def of_partitions() -> None:
            for log in logs:
                for _ in log.scan():
                    pass

        def topic_to_arrow() -> None:
            for _ in logdir.scan("orders").to_reader():
                pass

        def partitions_to_arrow() -> None:
            for log in logs:
                for _ in log.scan().to_reader():
                    pass

        sides = {
            "columns": (of_topic, of_partitions),
            "Arrow": (topic_to_arrow, partitions_to_arrow),
        }
        for form, (ours, theirs) in sides.items():
            yield common.speed(
                f"scan of a topic to {form}, {codec}",
                count,
                ours,
                {"its partitions": theirs},
                settings,
                target=0.95,
                method="The topic has two columns more: topic and partition."
                if form == "Arrow"
                else "",
            )


def appends(settings: Settings, path: Path) -> Result:
    key, value = common.make_rows(1)[0]
    with logcore.open_dir(path, create=True, durability="os") as logdir:
        logdir.create_topic("orders", partitions=3)
        log = logdir.partition(
            "orders", logdir.append("orders", value, key=key).partition
        )

        def repeated(append: functools.partial[logcore.Receipt]) -> None:
            for _ in range(CALLS):
                append()

        sides = {
            "logdir": functools.partial(
                repeated, functools.partial(logdir.append, "orders", value, key=key)
            ),
            "log": functools.partial(
                repeated, functools.partial(log.append, value, key=key)
            ),
        }
        seconds = common.measure(sides, settings.repeats)
    ours_us = seconds["logdir"] / CALLS * 1e6
    log_us = seconds["log"] / CALLS * 1e6
    return Result(
        question="logdir.append by key, more than log.append",
        unit="us",
        ours=ours_us,
        peer_name="us log.append",
        peer=log_us,
        ratio=ours_us - log_us,
        target=1.0,
        bound="at most",
        ratio_unit=" us",
        method="Level os, one record a call.",
    )
