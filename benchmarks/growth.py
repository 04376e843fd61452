"""Does the cost of an append, or of a random read, grow with the log?

Method: three logs of 10 MB, 1 GB and 8 GB with default settings exist at the same time,
so that the measurements at the three sizes take turns. The work is appends of one
record, append_many of 1,000 records, both at level os, and log.get of random offsets in
sealed segments. Costs are in ns per record, and relative to the 10 MB log.

The 8 GB log is omitted with --quick, and if less than 20 GB are free. Random reads of a
large log miss the processor's caches and its TLB more often, as reads of any large
memory do. A ratio near 2 is therefore due to the memory and not to the log.

Not shown: logs larger than the page cache.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from typing import Final

import common
from common import Result, Settings

import logcore

SIZES: Final = {"10 MB": 10_000_000, "1 GB": 1_000_000_000, "8 GB": 8_000_000_000}
FREE_BYTES: Final = 20_000_000_000
CALL_ROWS: Final = 1_000
READS: Final = 1_000


def run(settings: Settings) -> Iterator[Result]:
    sizes = dict(SIZES)
    settings.directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(settings.directory).free
    if settings.quick or free < FREE_BYTES:
        print(
            f"skipping the 8 GB log: {'--quick' if settings.quick else f'only {free / 1e9:.0f} GB are free'}"
        )
        del sizes["8 GB"]
    rows = common.make_rows(20_000)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(common.scratch(settings, "growth"))
        logs = {}
        for number, (name, size) in enumerate(sizes.items()):
            log = stack.enter_context(
                logcore.open(path / f"log-{number}", create=True, durability="os")
            )
            common.fill(log, rows, size)
            log.roll()
            logs[name] = log
        common.settle()
        ends = {name: log.log_end_offset for name, log in logs.items()}
        jobs: dict[str, tuple[int, dict[str, Callable[[], object]]]] = {
            "random read (log.get)": (
                READS,
                {name: _reads(log, ends[name]) for name, log in logs.items()},
            ),
            "append, 1 a call": (
                1,
                {name: _appends(log, rows[0]) for name, log in logs.items()},
            ),
            "append_many, 1,000 a call": (
                CALL_ROWS,
                {
                    name: _many_appends(log, rows[:CALL_ROWS])
                    for name, log in logs.items()
                },
            ),
        }
        for job, (units, sides) in jobs.items():
            seconds = common.measure(sides, settings.repeats)
            first, *others = sides
            for name in others:
                yield Result(
                    question=f"{job}, log of {name}",
                    unit="ns",
                    ours=seconds[name] / units * 1e9,
                    peer_name=f"ns at {first}",
                    peer=seconds[first] / units * 1e9,
                    ratio=seconds[name] / seconds[first],
                    turns=seconds.ratios(name, first),
                    method=f"Time for each record, beside the same log at {first}.",
                )


def _reads(log: logcore.Log, end: int) -> Callable[[], None]:
    """Return a function that reads at new random places on each call."""
    source = random.Random(5)
    places = [[source.randrange(end) for _ in range(READS)] for _ in range(64)]
    turns = itertools.cycle(places)

    def read() -> None:
        get = log.get
        for offset in next(turns):
            get(offset)

    return read


def _appends(log: logcore.Log, row: tuple[bytes, bytes]) -> Callable[[], object]:
    key, value = row
    return lambda: log.append(value, key=key)


def _many_appends(
    log: logcore.Log, rows: list[tuple[bytes, bytes]]
) -> Callable[[], object]:
    return lambda: log.append_many(rows)
