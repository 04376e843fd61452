"""Shared setup: hypothesis profiles, vectors of other encoders, partitions to read or
damage.

HYPOTHESIS_PROFILE=thorough searches for minutes instead of seconds; every run prints
how to repeat a failure. The profile "random" is for tests/project/test_random_seeds.py,
which gives it a seed and LOGCORE_RANDOM_EXAMPLES.

Syncs of real files return at once: without a power cut, waiting for the disk tests
nothing, and it took most of the time of some tests. SimulatedDisk simulates power cuts.
Syncs are real in tests/faults/test_power.py and in processes that tests start.
LOGCORE_REAL_SYNC=1 makes all of them real.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# For pytest-xdist's workers and the processes that tests start. The plugin of
# logcore.testing has imported logcore here already, so that a run in one process needs
# the variable from outside, as the Makefile gives it.
os.environ["LOGCORE_VERIFY"] = "1"

import logcore

pytest.register_assert_rewrite("support")

from support.kafka_python import name_sockets  # noqa: E402
from support.vectors import VECTORS  # noqa: E402

name_sockets()

#: No limit for the time of an example, which does not depend on the code alone.
TIMELESS = hypothesis.settings(
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
EXAMPLES = int(os.environ.get("LOGCORE_RANDOM_EXAMPLES", "60"))
hypothesis.settings.register_profile(
    "quick", TIMELESS, max_examples=25, derandomize=True
)
hypothesis.settings.register_profile(
    "random", TIMELESS, max_examples=EXAMPLES, database=None
)
hypothesis.settings.register_profile("thorough", TIMELESS, max_examples=5_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Exclude the objects of modules from garbage collection. A collection would spend
    most of its time on them, and many tests start one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


#: numpy starts a thread for each core, for algebra that no test does. That is a fifth
#: of the time of importing it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

#: Brokers in the process of the tests run on asyncio's own loop, and brokers in
#: processes of their own on uvloop's.
sys.modules.setdefault("uvloop", None)  # type: ignore[arg-type]

#: A Spark that runs for seconds spends most of them on compiling itself. The optimizing
#: compiler is not worth its time.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return three workers for two cores, because a tenth of the time is waiting. A
    process needs eight to twenty seconds to collect the tests.
    """
    return max(2, (os.cpu_count() or 1) * 3 // 2)


#: Maximum timeout in seconds of a test that is neither slow nor interop. A longer test
#: does not belong in `make check`.
LONGEST = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a Spark run first and in one worker: idle workers take over the
    tests at the end of a queue. The longest test is next, so that it does not run alone
    at the end.
    """
    for item in items:
        limit = item.get_closest_marker("timeout")
        is_fast = not any(item.get_closest_marker(name) for name in ("slow", "interop"))
        if is_fast and limit is not None and limit.args[0] > LONGEST:
            raise pytest.UsageError(
                f"{item.nodeid}: a time limit above {LONGEST} s is for tests that are marked slow"
            )
    first = {"spark": 0, "part": 1}
    items.sort(
        key=lambda item: min(
            (first.get(name, 2) for name in getattr(item, "fixturenames", ())),
            default=2,
        )
    )


#: Tests whose forked children are cut off from power, or are killed inside a sync.
REAL_SYNC = {"test_power", "test_kills"}


@pytest.fixture(scope="module", autouse=True)
def syncs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace a sync by a check of the handle."""

    def sync(handle: int) -> None:
        os.fstat(handle)  # which fails for a handle that is not open

    with pytest.MonkeyPatch.context() as patch:
        if (
            request.module.__name__ not in REAL_SYNC
            and "LOGCORE_REAL_SYNC" not in os.environ
        ):
            patch.setattr(os, "fsync", sync)
            patch.setattr(os, "fdatasync", sync, raising=False)
        yield


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """Return a path at which a partition directory may be created."""
    return tmp_path / "data" / "orders-0"


@pytest.fixture
def crash(tmp_path: Path) -> Path:
    """Return a copy of a partition that Kafka wrote, without the checkpoints."""
    return Path(
        shutil.copytree(VECTORS / "partition-crash" / "orders-0", tmp_path / "orders-0")
    )


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a log of three segments with two batches each, offsets 0..5, 6..11,
    12..17. The recovery point is 18.
    """
    path = tmp_path / "mine-0"
    with logcore.open(path, create=True) as log:
        for number in range(6):
            log.append_many(
                [(b"k", b"v%d" % number, (), 1_700_000_000_000 + number)] * 3
            )
            if number in (1, 3):
                log.roll()
    return path
