"""Does the time for opening a log depend on its size or on the number of other
partitions, and what does importing logcore cost?

Method:
- A log of 1,000 segments is made twice, with small and with large segments, closed
  cleanly, and opened repeatedly: for writing (lock, check of the active segment,
  index files) and read-only. Opening alone is timed, not closing. The two sizes take
  turns; the figure is the median. The row "not growing" divides the time at the large
  size by that at the small one.
- Two directories have few and many partitions of one record each. In each, partitions
  are opened one after another and rolled, in turns; the figure is the median. The rows
  "not growing" divide the time among many by that among few.
- import logcore and import numpy run in fresh interpreters, in turns, and the best of n
  counts: byte code is cached, files are in the page cache.

Not shown: opening after a crash, which checks all bytes after the recovery point (64 MiB
at most), and a cold cache.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import common
from common import Result, Settings

import logcore

SIZES: Final = {"small": 1, "large": 1_000}  # records in a segment
FEW: Final = 30  # partitions


def run(settings: Settings) -> Iterator[Result]:
    segments = 100 if settings.quick else 1_000
    rows = common.make_rows(max(SIZES.values()))
    with common.scratch(settings, "open") as path:
        bytes_of = {
            name: make_log(path, name, segments, rows[:count])
            for name, count in SIZES.items()
        }
        for mode in ("writing", "read-only"):
            yield from opening(settings, path, segments, bytes_of, mode)
    many = 300 if settings.quick else 3_000
    with common.scratch(settings, "open") as path:
        yield from among(settings, path, many)
    yield from importing(settings)


def among(settings: Settings, path: Path, many: int) -> Iterator[Result]:
    """Open and roll partitions in a directory with few and in one with many partitions."""
    counts = {"few": FEW, "many": many}
    for name, count in counts.items():
        with logcore.open_dir(path / name, create=True, durability="os") as logdir:
            logdir.create_topic("t", count)
            for number in range(count):
                logdir.partition("t", number).append(b"x")
    samples: dict[tuple[str, str], list[float]] = {
        (what, name): [] for what in ("open", "roll") for name in counts
    }
    for _ in range(settings.repeats):
        for name in counts:
            with (
                logcore.open_dir(path / name, durability="os") as logdir,
                common.collector_off(),
            ):
                for number in range(FEW):
                    started = time.perf_counter()
                    log = logdir.partition("t", number)
                    opened = time.perf_counter()
                    log.append(b"x")
                    begun = time.perf_counter()
                    log.roll()
                    samples["roll", name].append(time.perf_counter() - begun)
                    samples["open", name].append(opened - started)
    for what in ("open", "roll"):
        few_s, many_s = (statistics.median(samples[what, name]) for name in counts)
        yield Result(
            question=f"{what} one of {many:,} partitions, not growing with their number",
            unit="ms",
            ours=many_s * 1e3,
            peer_name=f"ms among {FEW}",
            peer=few_s * 1e3,
            ratio=many_s / few_s,
            turns=common.ratios(samples[what, "many"], samples[what, "few"]),
            target=1.5,
            bound="at most",
            method="A LogDir that was closed cleanly, policy os; one record a partition; median.",
        )


def make_log(
    path: Path, name: str, segments: int, rows: list[tuple[bytes, bytes]]
) -> int:
    """Create a log in a separate log directory, which holds its checkpoint files.

    Return the size of the log in bytes.
    """
    (path / name).mkdir()
    with logcore.open(path / name / "log-0", create=True, durability="os") as log:
        for at in range(segments):
            if at:
                log.roll()
            log.append_many(rows)
        found = log.statistics()
        assert found.segments == segments, found
        return found.size_bytes


def opening(
    settings: Settings, path: Path, segments: int, bytes_of: dict[str, int], mode: str
) -> Iterator[Result]:
    samples: dict[str, list[float]] = {name: [] for name in SIZES}
    for _ in range(settings.repeats):
        for name, times in samples.items():
            with common.collector_off():
                started = time.perf_counter()
                log = logcore.open(
                    path / name / "log-0",
                    read_only=mode == "read-only",
                    durability="os",
                )
                times.append(time.perf_counter() - started)
            log.close()
    small, large = (statistics.median(times) for times in samples.values())
    sizes = [f"{size / (1 << 20):.3g} MiB" for size in bytes_of.values()]
    yield Result(
        question=f"open a log of {segments:,} segments, {mode}",
        unit="ms",
        ours=large * 1e3,
        peer_name="the limit",
        peer=0,
        ratio=large * 1e3,
        target=50,
        bound="at most",
        ratio_unit=" ms",
        method=f"logcore.open of a cleanly closed log of {sizes[1]}; median.",
    )
    yield Result(
        question=f"open, {mode}, not growing with bytes",
        unit="ms",
        ours=large * 1e3,
        peer_name="ms with small segments",
        peer=small * 1e3,
        ratio=large / small,
        method=f"The same number of segments with {sizes[1]} beside {sizes[0]} in all.",
    )


def importing(settings: Settings) -> Iterator[Result]:
    environment = common.environment()
    code = {"nothing": "pass", "numpy": "import numpy", "logcore": "import logcore"}
    best = dict.fromkeys(code, float("inf"))
    for _ in range(2 * settings.repeats):
        for name in best:
            started = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", code[name]], check=True, env=environment
            )
            best[name] = min(best[name], time.perf_counter() - started)
    above = best["logcore"] - best["numpy"]
    yield Result(
        question="import logcore, above numpy",
        unit="ms",
        ours=above * 1e3,
        peer_name="import numpy",
        peer=(best["numpy"] - best["nothing"]) * 1e3,
        ratio=above / (best["numpy"] - best["nothing"]),
        target=0.5,
        bound="at most",
        method="As above, minus the time of an interpreter that imports no module.",
    )
    yield Result(
        question="import logcore",
        unit="ms",
        ours=best["logcore"] * 1e3,
        peer_name="ms import numpy",
        peer=best["numpy"] * 1e3,
        ratio=(best["logcore"] - best["numpy"]) * 1e3,
        target=60,
        bound="at most",
        ratio_unit=" ms more",
        method="Whole runs of fresh interpreters that import the one or the other.",
    )
