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

# For the workers of pytest-xdist and the processes that tests start. If pytest runs in
# one process, the plugin of logcore.testing has imported logcore already, so that the
# variable must be set outside, as the Makefile does.
os.environ["LOGCORE_VERIFY"] = "1"

import logcore

pytest.register_assert_rewrite("support")

from support.kafka_python import name_sockets  # noqa: E402
from support.vectors import VECTORS  # noqa: E402

name_sockets()

#: The time of an example has no limit, because it does not depend on the code alone.
WITHOUT_TIME_LIMIT = hypothesis.settings(
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
EXAMPLES = int(os.environ.get("LOGCORE_RANDOM_EXAMPLES", "60"))
hypothesis.settings.register_profile(
    "quick", WITHOUT_TIME_LIMIT, max_examples=25, derandomize=True
)
hypothesis.settings.register_profile(
    "random", WITHOUT_TIME_LIMIT, max_examples=EXAMPLES, database=None
)
hypothesis.settings.register_profile("thorough", WITHOUT_TIME_LIMIT, max_examples=5_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Exclude the objects of modules from garbage collection. A collection would spend
    most of its time on them, and many tests start one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


#: numpy starts a thread for each core, for algebra that no test does. Starting them takes
#: a fifth of the time of its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

#: A broker in the process of the tests uses the event loop of asyncio, and a broker in
#: another process uses the event loop of uvloop.
sys.modules.setdefault("uvloop", None)  # type: ignore[arg-type]

#: Spark runs for a few seconds and spends most of them on compiling its classes. The
#: optimizing compiler would take more time than it saves.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return three workers for two cores, because tests wait for a part of their time.
    More workers would cost more time than they save: each needs eight to twenty seconds
    to collect the tests.
    """
    return max(2, (os.cpu_count() or 1) * 3 // 2)


#: Maximum timeout in seconds of a test that is neither slow nor interop. A longer test
#: does not belong in `make check`.
MAX_TIMEOUT_SECONDS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a long timeout of a fast test, and sort the tests. Tests that share a Spark
    session run first and in one worker: idle workers take over the tests at the end of
    a queue. The longest test is next, so that it does not run alone at the end.
    """
    for item in items:
        timeout = item.get_closest_marker("timeout")
        is_fast = not any(item.get_closest_marker(name) for name in ("slow", "interop"))
        if is_fast and timeout is not None and timeout.args[0] > MAX_TIMEOUT_SECONDS:
            raise pytest.UsageError(
                f"{item.nodeid}: only a slow test may have a timeout above {MAX_TIMEOUT_SECONDS} s"
            )
    order = {"spark": 0, "part": 1}
    items.sort(
        key=lambda item: min(
            (order.get(name, 2) for name in getattr(item, "fixturenames", ())),
            default=2,
        )
    )


#: Modules with forked processes that lose power or are killed during a sync.
MODULES_WITH_REAL_SYNCS = {"test_power", "test_kills"}


@pytest.fixture(scope="module", autouse=True)
def fake_syncs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace each sync by a check that its file descriptor is open."""

    def check_descriptor(descriptor: int) -> None:
        os.fstat(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        if (
            request.module.__name__ not in MODULES_WITH_REAL_SYNCS
            and "LOGCORE_REAL_SYNC" not in os.environ
        ):
            patch.setattr(os, "fsync", check_descriptor)
            patch.setattr(os, "fdatasync", check_descriptor, raising=False)
        yield


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """Return a path at which a partition directory may be created."""
    return tmp_path / "data" / "orders-0"


@pytest.fixture
def kafka_partition(tmp_path: Path) -> Path:
    """Return a copy of a partition that Kafka had not closed, without checkpoints."""
    return Path(
        shutil.copytree(VECTORS / "partition-crash" / "orders-0", tmp_path / "orders-0")
    )


@pytest.fixture
def logcore_partition(tmp_path: Path) -> Path:
    """Return a closed partition with three segments of two batches each: offsets 0..5,
    6..11, 12..17. The recovery point is 18.
    """
    path = tmp_path / "payments-0"
    with logcore.open(path, create=True) as log:
        for number in range(6):
            log.append_many(
                [(b"k", b"v%d" % number, (), 1_700_000_000_000 + number)] * 3
            )
            if number in (1, 3):
                log.roll()
    return path
