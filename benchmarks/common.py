"""Common parts of all benchmarks: measurement, rows of the table, a directory for files,
and facts about the machine.

Method of all benchmarks:
- A figure is a ratio of two sides measured in the same run. The sides take turns, A B A
  B, so that a noisy neighbour or a changing clock affects both.
- A sample is at least 50 ms of work, with the garbage collector off. For computations,
  the best sample counts, because disturbances only add time. For work that waits for a
  disk, the median counts.
- The spread of a ratio is the range of the ratios of its turns, without the lowest and
  the highest quarter.
- Files are on a real file system, under build/ or in the directory of --dir. A tmpfs has
  no fdatasync to wait for, so it is refused.

Seconds depend on the machine: compare ratios, not seconds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import attrs

import logcore
from logcore.kernels import kernel

ROOT: Final = Path(__file__).resolve().parent.parent
KEY_SIZE: Final = 16
VALUE_SIZE: Final = 100
#: A fixed time, so that equal records have equal bytes in each run.
NOW_MS: Final = 1_700_000_000_000
_SAMPLE_SECONDS: Final = 0.05

#: Brokers and bare loops run on asyncio's own loop, as they do where uvloop is not
#: installed.
sys.modules["uvloop"] = None  # type: ignore[assignment]

Side = Callable[[], object]


@attrs.frozen
class Settings:
    """Settings of a run."""

    #: The directory for files.
    directory: Path
    #: Whether to measure less work, if its size does not change the result.
    quick: bool = False

    @property
    def repeats(self) -> int:
        return 5 if self.quick else 15


@attrs.frozen(kw_only=True)
class Result:
    """One row: our figure and the peer's figure, and the comparison of their ratio with
    the target.
    """

    question: str
    unit: str
    ours: float
    peer_name: str
    peer: float
    ratio: float
    #: The wanted ratio, or None for a row that is shown for context.
    target: float | None = None
    #: "at least" for speeds as a multiple of the peer's speed, "at most" for costs.
    bound: Literal["at least", "at most"] = "at least"
    ratio_unit: str = "x"
    #: Description of the work of each side.
    method: str = ""
    #: The ratio of each turn, if there were several.
    turns: Sequence[float] = ()

    @property
    def is_reached(self) -> bool | None:
        if self.target is None:
            return None
        return (
            self.ratio >= self.target
            if self.bound == "at least"
            else self.ratio <= self.target
        )

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table: question, ours, peer, ratio, target, reached."""
        target = "-"
        if self.target is not None:
            sign = {"at least": ">=", "at most": "<="}[self.bound]
            target = f"{sign} {self.target:g}{self.ratio_unit}"
        reached = {True: "yes", False: "NO", None: ""}[self.is_reached]
        peer = f"{figure(self.peer)} {self.peer_name}" if self.peer else self.peer_name
        ours = f"{figure(self.ours)} {self.unit}"
        ratio = f"{self.ratio:.2f}{self.ratio_unit}"
        if len(self.turns) > 1:
            low, _, high = statistics.quantiles(self.turns, n=4, method="inclusive")
            ratio += f" ({low:.2f} to {high:.2f})"
        return self.question, ours, peer, ratio, target, reached


def in_time(
    question: str,
    unit: str,
    ours: float,
    limit: float,
    method: str,
    *,
    limit_name: str = "target",
) -> Result:
    """Return a row that compares a time with a limit.

    Half of the limit is a ratio of 2.
    """
    return Result(
        question=question,
        unit=unit,
        ours=ours,
        peer_name=limit_name,
        peer=limit,
        ratio=limit / ours,
        target=1.0,
        method=method,
    )


def speed(
    question: str,
    units: int,
    ours: Side,
    peers: Mapping[str, Side],
    settings: Settings,
    *,
    unit: str = "records/s",
    scale: float = 1.0,
    target: float | None = None,
    median: bool = False,
    method: str = "",
) -> Result:
    """Measure our side and the fastest of the peers.

    Args:
        units: number of units of work in one call of any side.
        scale: divisor of the figures that are shown.
        target: minimum multiple of the best peer's speed.
    """
    seconds = measure({"logcore": ours, **peers}, settings.repeats, median=median)
    best = min(peers, key=lambda name: seconds[name])
    others = ", ".join(
        f"{name} {figure(units / seconds[name] / scale)}"
        for name in peers
        if name != best
    )
    return Result(
        question=question,
        unit=unit,
        ours=units / seconds["logcore"] / scale,
        peer_name=best,
        peer=units / seconds[best] / scale,
        ratio=seconds[best] / seconds["logcore"],
        turns=seconds.ratios(best, "logcore"),
        target=target,
        method=method + (f" Others: {others}." if others else ""),
    )


@attrs.frozen
class Measured:
    """Seconds per call of each side, with one figure per turn.

    `pick` selects or computes the figure that counts.
    """

    samples: Mapping[str, Sequence[float]]
    pick: Callable[[Sequence[float]], float]

    def __getitem__(self, name: str) -> float:
        return self.pick(self.samples[name])

    def ratios(self, first: str, other: str) -> list[float]:
        """Return the ratios of two sides, one per turn."""
        return ratios(self.samples[first], self.samples[other])


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of the figures of two sides, one per turn."""
    return [first / other for first, other in zip(ones, others, strict=True)]


def measure(
    sides: Mapping[str, Side], repeats: int, *, median: bool = False
) -> Measured:
    """Measure the sides in turns; the best of the repeats counts, or their median."""
    calls = {name: _calls_per_sample(side) for name, side in sides.items()}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(repeats):
        for name in order:
            samples[name].append(_sample(sides[name], calls[name]) / calls[name])
        # Alternate the order, because the second side inherits the first side's dirty
        # cache.
        order.reverse()
    return Measured(samples, statistics.median if median else min)


def _calls_per_sample(side: Side) -> int:
    side()
    calls = 1
    while (spent := _sample(side, calls)) < _SAMPLE_SECONDS:
        calls = max(
            calls + 1,
            min(calls * 10, int(calls * 1.2 * _SAMPLE_SECONDS / max(spent, 1e-9))),
        )
    return calls


def _sample(side: Side, calls: int) -> float:
    with collector_off():
        started = time.perf_counter()
        for _ in range(calls):
            side()
        return time.perf_counter() - started


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection; collect earlier garbage before."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def settle() -> None:
    """Write dirty pages of earlier work to the disk, so that a measurement does not
    include it.
    """
    if hasattr(os, "sync"):
        os.sync()


def make_rows(count: int, seed: int = 7) -> list[tuple[bytes, bytes]]:
    """Return (key, value) pairs of random bytes, determined by the seed."""
    source = random.Random(seed)
    return [
        (source.randbytes(KEY_SIZE), source.randbytes(VALUE_SIZE)) for _ in range(count)
    ]


def fill(log: logcore.Log, rows: list[tuple[bytes, bytes]], size_bytes: int) -> None:
    """Append the rows repeatedly, as columns, until the log holds about size_bytes."""
    keys, values = columns_of(rows)
    while log.statistics().size_bytes < size_bytes:
        log.append_columns(keys=keys, values=values)


def columns_of(
    rows: list[tuple[bytes, bytes]],
) -> tuple[tuple[bytes, Any], tuple[bytes, Any]]:
    """Return the rows as the two (data, offsets) columns of append_columns()."""
    import numpy as np

    count = np.arange(len(rows) + 1, dtype=np.int64)
    keys = b"".join(key for key, _ in rows), count * KEY_SIZE
    values = b"".join(value for _, value in rows), count * VALUE_SIZE
    return keys, values


@contextlib.contextmanager
def scratch(settings: Settings, name: str) -> Iterator[Path]:
    """Create a new directory on a real file system, and remove it afterwards."""
    settings.directory.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=settings.directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def file_system_of(path: Path) -> str:
    """Return the type of the file system that holds path, as in /proc/mounts, or
    "unknown".
    """
    path = path.resolve()
    found = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, where, kind = line.split()[:3]
            if path.is_relative_to(where) and len(where) >= len(found[0]):
                found = (where, kind)
    return found[1]


def peer(module: str, rows: str) -> ModuleType | None:
    """Return a peer's module, or print the missing rows and return None."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        print(f"skipping {rows}: {error}; `make bench` installs it", file=sys.stderr)
        return None


def environment() -> dict[str, str]:
    """Return the environment of a process that uses cached byte code, as an installed
    package does. Some machines disable the cache by an environment variable.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONDONTWRITEBYTECODE"
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def figure(value: float) -> str:
    """Format a number with three digits."""
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{sign}"
    return f"{value:.3g}"


def machine(directory: Path) -> dict[str, str]:
    """Return facts about the machine on which the figures depend."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text()
        cpu = next(
            line.split(":", 1)[1].strip()
            for line in text.splitlines()
            if line.startswith("model name")
        )
    compiled = kernel.__name__.rpartition(".")[2] != "plain"
    packages = ("numpy", "crc32c", "aiokafka", "kafka-python", "lmdb", "rocksdict")
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}, files on {file_system_of(directory)}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "commit": _commit(),
        "kernels": "compiled" if compiled else "plain",
        "packages": ", ".join(
            f"{name} {version}" for name in packages if (version := _version(name))
        ),
    }


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "src")
        return git("rev-parse", "--short=12", "HEAD") + (
            " with changes in src" if changed else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
