"""What do compaction, many partitions and the work of tick() cost?

Method:
- Compaction: a log of 1 GB (128 MiB with --quick), 16-byte keys of which a tenth are
  live, 100-byte values, not compressed, is compacted from the first record on. Each run
  uses hard links to the same sealed segments, which compaction replaces and does not
  change. The peer reads and writes the same files once, a megabyte at a time, and syncs
  them. For context, a row also reads all bytes and writes only the bytes that
  compaction leaves. Files are in the page cache.
- 1,000 partitions: one record each in turn, beside as many records appended to one
  partition of the same directory; policy os, because with a sync for each record only
  the disk would be measured.
- 10,000 partitions: a directory closed cleanly is opened in a fresh interpreter; the
  time is that of open_dir alone, the memory the peak of that process (Linux).
- tick(): the longest of all calls while partitions roll and lose segments, all due at
  the same time.

Not shown: compaction beside Kafka's own Cleaner, which needs Java: `make interop` has
it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import common
import numpy as np
from common import Result, Settings

import logcore
from logcore.cleaner import clean
from logcore.fs import OsFS

CONFIG: Final[dict[str, Any]] = {"cleanup.policy": "compact", "segment.bytes": 64 << 20}
_PIECE: Final = 1 << 20


def run(settings: Settings) -> Iterator[Result]:
    with common.scratch(settings, "life") as path:
        yield from compaction(settings, path)
    with common.scratch(settings, "life") as path:
        yield round_robin(settings, path)
    with common.scratch(settings, "life") as path:
        yield from opening(settings, path)
    with common.scratch(settings, "life") as path:
        yield ticking(settings, path)


def make_dirty(path: Path, size_bytes: int, live: float = 0.1) -> int:
    """Write a log of random updates, with ten times as many records as keys.

    Return the number of records.
    """
    rng = np.random.default_rng(7)
    records = size_bytes // 124
    keys = rng.bytes(common.KEY_SIZE * int(records * live))
    pool = np.frombuffer(keys, f"V{common.KEY_SIZE}")
    values = rng.bytes(common.VALUE_SIZE * 100_000)
    with logcore.open(path, create=True, config=CONFIG, durability="os") as log:
        for start in range(0, records, 100_000):
            count = min(100_000, records - start)
            edges = np.arange(count + 1)
            drawn = pool[rng.integers(0, len(pool), count)].tobytes()
            log.append_columns(
                keys=(drawn, edges * common.KEY_SIZE),
                values=(values, edges * common.VALUE_SIZE),
            )
        log.roll()
    return records


def compaction(settings: Settings, path: Path) -> Iterator[Result]:
    source = path / "source" / "log-0"
    source.parent.mkdir()
    records = make_dirty(source, (128 << 20) if settings.quick else 1_000_000_000)
    files = sorted(source.glob("*.log"))
    size_bytes = sum(file.stat().st_size for file in files)
    seconds: dict[str, list[float]] = {"compact": [], "copy": [], "read": []}
    cpu: dict[str, list[float]] = {"compact": [], "scan": []}
    left = kept = memory = 0
    for _ in range(3 if settings.quick else 5):
        target = path / "target" / "log-0"
        target.mkdir(parents=True)
        for file in source.iterdir():
            if file.name != "logcore.durable":
                os.link(file, target / file.name)
        with logcore.open(target, config=CONFIG, durability="os") as log:
            common.settle()
            with common.collector_off():
                spent = time.process_time()
                for columns in log.scan(0):
                    assert columns
                cpu["scan"].append(time.process_time() - spent)
                spent = time.process_time()
                started = time.perf_counter()
                report = clean(log)
                seconds["compact"].append(time.perf_counter() - started)
                cpu["compact"].append(time.process_time() - spent)
            assert report is not None
            left = report.bytes_after
            kept = report.records_kept
            memory = report.map_bytes
        shutil.rmtree(target.parent)
        for name, part in (("copy", 1.0), ("read", left / size_bytes)):
            common.settle()
            started = time.perf_counter()
            copy(files, path / "copy", part)
            seconds[name].append(time.perf_counter() - started)
            (path / "copy").unlink()
    best = {name: min(times) for name, times in seconds.items()}
    mib = size_bytes / (1 << 20)
    method = (
        f"{records:,} records, {kept:,} left, in {len(files)} segments; {best['compact'] / records * 1e9:.0f} ns a "
        f"record, {memory >> 20} MiB for the table of keys."
    )
    for name, what, target_ratio in (
        ("copy", "read + write", 0.5),
        ("read", "read all, write the live part", None),
    ):
        yield Result(
            question="compact a log with 10 % live keys"
            + ("" if target_ratio else ", for context"),
            unit="MiB/s",
            ours=mib / best["compact"],
            peer_name=what,
            peer=mib / best[name],
            ratio=best[name] / best["compact"],
            turns=common.ratios(seconds[name], seconds["compact"]),
            target=target_ratio,
            method=method,
        )
    least = {name: min(times) for name, times in cpu.items()}
    yield Result(
        question="compact a log with 10 % live keys, CPU",
        unit="ns/record",
        ours=least["compact"] / records * 1e9,
        peer_name="log.scan",
        peer=least["scan"] / records * 1e9,
        ratio=least["compact"] / least["scan"],
        turns=common.ratios(cpu["compact"], cpu["scan"]),
        target=3.0,
        bound="at most",
        method="CPU time of the process, the least of turns; the scan reads the same log before it.",
    )


def copy(files: list[Path], target: Path, part: float) -> None:
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for file in files:
            with file.open("rb", buffering=0) as source:
                while data := source.read(_PIECE):
                    os.write(
                        out, data if part == 1.0 else data[: int(len(data) * part)]
                    )
        os.fsync(out)
    finally:
        os.close(out)


def round_robin(settings: Settings, path: Path) -> Result:
    count = 100 if settings.quick else 1_000
    lift_file_limit()
    with logcore.open_dir(path / "data", create=True, durability="os") as logdir:
        logdir.create_topic("many", partitions=count)
        logdir.create_topic("one")
        value = b"v" * 100
        names = [("many", number) for number in range(count)]

        def append_to_many() -> None:
            for topic, number in names:
                logdir.partition(topic, number).append(value)

        def append_to_one() -> None:
            for _ in names:
                logdir.partition("one", 0).append(value)

        append_to_many()
        seconds = common.measure(
            {"many": append_to_many, "one": append_to_one}, settings.repeats
        )
    return Result(
        question=f"append to {count:,} partitions in turn",
        unit="us/record",
        ours=seconds["many"] / count * 1e6,
        peer_name="us to one partition",
        peer=seconds["one"] / count * 1e6,
        ratio=seconds["many"] / seconds["one"],
        turns=seconds.ratios("many", "one"),
        target=2,
        bound="at most",
        method="LogDir.partition(...).append(100 bytes), policy os.",
    )


def lift_file_limit() -> None:
    """Raise the limit of open files, because each log open for writing needs one or two."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4_096:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (hard if hard < 1 << 20 else 1 << 16, hard)
        )


def opening(settings: Settings, path: Path) -> Iterator[Result]:
    count = 1_000 if settings.quick else 10_000
    with logcore.open_dir(path / "data", create=True, durability="os") as logdir:
        for start in range(0, count, 1_000):
            logdir.create_topic(f"t{start}", partitions=min(1_000, count - start))
    program = (
        "import json, sys, time, logcore\n"
        "started = time.perf_counter()\n"
        "logdir = logcore.open_dir(sys.argv[1])\n"
        "seconds = time.perf_counter() - started\n"
        "logdir.partition('t0', 7).append(b'x')\n"
        "logdir.close()\n"
        "facts = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(json.dumps([seconds, int(facts['VmHWM'].split()[0]) / 1024]))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
    }
    found = []
    for _ in range(3):
        command = [sys.executable, "-c", program, str(path / "data")]
        found.append(
            json.loads(
                subprocess.run(
                    command, check=True, capture_output=True, env=environment
                ).stdout
            )
        )
    seconds, megabytes = (
        statistics.median(column) for column in zip(*found, strict=True)
    )
    for what, value, limit, unit in (
        ("time", seconds, 2, "s"),
        ("memory", megabytes, 200, "MB"),
    ):
        yield Result(
            question=f"open a directory of {count:,} partitions, {what}",
            unit=unit,
            ours=value,
            peer_name="the limit",
            peer=0,
            ratio=value,
            target=limit,
            bound="at most",
            ratio_unit=f" {unit}",
            method="open_dir in a fresh interpreter, after a clean close; peak of the process with one partition open.",
        )


class Hurried(OsFS):
    """The real files, and clocks that can be set forward."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms


def ticking(settings: Settings, path: Path) -> Result:
    fs = Hurried()
    longest = 0.0
    calls = 0
    config = {
        "segment.bytes": 1 << 20,
        "segment.ms": 600_000,
        "retention.ms": 3_600_000,
    }
    acted = 0
    with logcore.open_dir(
        path / "data", create=True, config=config, durability="group", fs=fs
    ) as logdir:
        logdir.create_topic("t", partitions=20)
        logs = [logdir.partition("t", number) for number in range(20)]
        rows = [(None, b"v" * 1000)] * 500
        for _ in range(10 if settings.quick else 30):
            for log in logs:
                log.append_many(rows)
            fs.ahead_ms += 601_000
            for _ in range(40):
                started = time.perf_counter()
                logdir.tick()
                longest = max(longest, time.perf_counter() - started)
                calls += 1
        acted = sum(log.statistics().rolls for log in logs)
        assert acted and all(log.log_start_offset for log in logs), (
            "segments were rolled and deleted"
        )
    return Result(
        question="the longest tick() with rolls and retention",
        unit="ms",
        ours=longest * 1e3,
        peer_name="the limit",
        peer=0,
        ratio=longest * 1e3,
        target=5,
        bound="at most",
        ratio_unit=" ms",
        method=f"{calls:,} calls over 20 partitions, {acted} segments rolled, policy group.",
    )
