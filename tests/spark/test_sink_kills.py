"""Tests in which the driver of a stream is killed or stopped, or the disk becomes full, at
each change of the disk. The files are on a real disk, and the kills are SIGKILL.

Each driver is another process, which plans, stages and commits three batches like
Spark. The driver reports committed batches through a pipe. The test checks the
remaining files. Then another driver replays the batches that were not committed, with
other tasks. At the end, every row is stored once, and in order.

`make check` tests some changes of the disk. `make slow` tests all of them, and random
changes during several drivers in succession. LOGCORE_TEST_SEED repeats a run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import logcore
from logcore.errors import DiskFullError, LogcoreError
from logcore.fs import OS, Data
from logcore.inspect.verify import verify
from support.real_faults import FaultingFS, PlannedFault
from support.sinks import BATCHES, CONFIGS, CONTENTS, QUERY, Stream, expected

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_123
#: Exit code of a driver whose batch failed. Spark would have ended the query.
FAILED = 3


@pytest.fixture
def ram_directory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory, if the system has one. A kill loses no page of the
    page cache, so no disk is needed.
    """
    shared = "/dev/shm"
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def imported_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import all modules of a batch before the forks. Otherwise, each fork would import
    them for seconds.
    """
    stream = Stream(tmp_path / "warm", monkeypatch)
    stream.create(OS, {})
    stream.use(OS)
    stream.write(0, 1)
    monkeypatch.undo()


class Driver:
    """One run of the query from a given batch on, in a child process."""

    def __init__(
        self,
        path: Path,
        first: int,
        planned_fault: PlannedFault | None = None,
        *,
        tasks: int = 2,
        query: str = QUERY,
        publish_timeout: float = 60,
    ) -> None:
        """Start the driver. `planned_fault` occurs at one change of the disk, each
        batch has `tasks` tasks, and `publish_timeout` is publishTimeout.
        """
        self.done = first
        read_handle, write_handle = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write_handle)
            self._pipe = os.fdopen(read_handle, "rb")
            return
        status = 1
        try:
            os.close(read_handle)
            os.chdir(path.parent)  # FaultingFS counts changes below this directory
            fs = FaultingFS(planned_fault)
            stream = Stream(path, query=query, publishTimeout=publish_timeout)
            stream.use(fs)
            for batch_id in range(first, len(BATCHES)):
                stream.write(batch_id, tasks)
                os.write(write_handle, b"+")
            os.write(write_handle, b"%d." % len(fs.sites))
            status = 0
        except LogcoreError:
            status = FAILED
        finally:
            os._exit(status)

    def wait(self) -> int:
        """Wait for the end, and return the exit code, which is negative for a signal.
        `done` is the number of committed batches.
        """
        with self._pipe:
            output = self._pipe.read()
        self.done += output.count(b"+")
        self.changes = int(output.rpartition(b"+")[2].rstrip(b".") or 0)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def is_alive(self) -> bool:
        return (
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        )

    def wait_until_stopped(self) -> bool:
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        return os.WIFSTOPPED(status)


def create_directory(path: Path, config: str) -> Path:
    path.parent.mkdir()
    Stream(path).create(OS, CONFIGS[config])
    return path


def check_partitions(path: Path, committed: int) -> None:
    """Check the partitions after a crash, before and after the directory is opened for
    writing.

    The partitions become visible one after the other, when all files are in place. A crash
    between two partitions leaves complete batches in each partition, but not the same
    number, until the directory is opened.
    """
    stream = Stream(path)
    visible = []
    for partition, values in enumerate(stream.content(OS, read_only=True)):
        states = [state[partition] for state in CONTENTS]
        assert values in states, (
            f"a part of a batch is in partition {partition}: {len(values)} records"
        )
        visible.append(states.index(values))
    assert max(visible) - min(visible) <= 1, visible
    partitions = stream.content(OS)
    assert partitions in CONTENTS, (
        f"a partial batch is visible: {[len(row) for row in partitions]}"
    )
    assert CONTENTS.index(partitions) >= max(committed, *visible), (
        f"batch {max(committed, *visible) - 1} was committed or visible, and is missing"
    )


def finish(path: Path, committed: int, tasks: int = 3) -> None:
    """Run the query again without a fault, and check that every row is stored once."""
    last = Driver(path, committed, tasks=tasks)
    assert last.wait() == 0
    assert Stream(path).content(OS) == CONTENTS[-1]
    assert not [verdict for verdict in verify(str(path)) if verdict.status == "damaged"]


def count_changes(ram_directory: Path, config: str) -> int:
    path = create_directory(ram_directory / "whole" / "data", config)
    driver = Driver(path, 0)
    assert driver.wait() == 0
    return driver.changes


ALL = pytest.param(1, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


@pytest.mark.long
@pytest.mark.parametrize("step", [pytest.param(71, id="some"), ALL])
@pytest.mark.parametrize("config", CONFIGS)
def test_driver_killed_at_any_change_stores_complete_batches(
    ram_directory: Path, config: str, step: int
) -> None:
    count = count_changes(ram_directory, config)
    assert count > 200
    rng = random.Random(SEED)
    for number in range(rng.randrange(step), count, step):
        path = create_directory(ram_directory / f"at{number}" / "data", config)
        driver = Driver(path, 0, PlannedFault(number, part=rng.choice([0.0, 0.5])))
        assert driver.wait() == -signal.SIGKILL, number
        check_partitions(path, driver.done)
        finish(path, driver.done)


@pytest.mark.long
@pytest.mark.parametrize(
    "rounds",
    [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_drivers_killed_in_succession_store_complete_batches(
    ram_directory: Path, rounds: int
) -> None:
    rng = random.Random(SEED)
    kills = 0
    for number in range(rounds):
        path = create_directory(
            ram_directory / f"round{number}" / "data", rng.choice(list(CONFIGS))
        )
        committed = 0
        for _ in range(rng.randrange(2, 8)):
            driver = Driver(
                path,
                committed,
                PlannedFault(rng.randrange(150)),
                tasks=rng.randrange(1, 4),
            )
            kills += driver.wait() == -signal.SIGKILL
            committed = driver.done
            check_partitions(path, committed)
        finish(path, committed)
    print(f"{kills} kills, seed {SEED}")
    assert kills


@contextlib.contextmanager
def stop(operation: str, file: int | str) -> Iterator[None]:
    os.kill(os.getpid(), signal.SIGSTOP)
    yield


@pytest.mark.long
@pytest.mark.parametrize("step", [pytest.param(83, id="some"), ALL])
def test_replaced_driver_that_continues_late_stores_no_row_twice(
    ram_directory: Path, step: int
) -> None:
    """A stopped driver releases no lock, so that its successor succeeds or fails. Then
    the stopped driver continues.
    """
    count = count_changes(ram_directory, "moved")
    outcomes = set()
    for number in range(5 % step, count, step):
        path = create_directory(ram_directory / f"at{number}" / "data", "moved")
        replaced = Driver(path, 0, PlannedFault(number, action=stop))
        assert replaced.wait_until_stopped(), number
        successor = Driver(path, 0, tasks=1, publish_timeout=0.1)
        status = successor.wait()
        assert status in (0, FAILED), number
        outcomes.add(status)
        os.kill(replaced.pid, signal.SIGCONT)
        assert replaced.wait() in (0, FAILED), number
        check_partitions(path, max(replaced.done, successor.done))
        finish(path, min(replaced.done, successor.done))
    assert outcomes == {0, FAILED}, (
        "the successor must succeed in some runs and fail in others"
    )


class FullFS(FaultingFS):
    """Simulates a full disk: from one change on, no file can grow. Existing bytes can be
    overwritten.
    """

    full_from = 0
    _grows = False

    def pwrite(self, handle: int, data: Data, position: int) -> None:
        self._grows = position + len(data) > self.size(handle)
        super().pwrite(handle, data, position)

    def _step(self, operation: str, file: int | str) -> AbstractContextManager[object]:
        step = super()._step(operation, file)
        needs_space = operation in ("create", "mkdir") or (
            operation == "pwrite" and self._grows
        )
        if needs_space and len(self.sites) > self.full_from:
            raise DiskFullError("no space left on the disk", path=str(file))
        return step


@pytest.mark.long
@pytest.mark.parametrize(
    "step",
    [pytest.param(59, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("config", CONFIGS)
def test_full_disk_fails_the_batch_and_a_later_driver_writes_it(
    ram_directory: Path, monkeypatch: pytest.MonkeyPatch, config: str, step: int
) -> None:
    """The batch fails and is aborted. The next driver has enough space and writes it."""
    count = count_changes(ram_directory, config)
    failed = 0
    for number in range(0, count, step):
        path = create_directory(ram_directory / f"at{number}" / "data", config)
        with monkeypatch.context() as patch:
            patch.chdir(path.parent)
            fs = FullFS()
            fs.full_from = number
            stream = Stream(path, patch)
            stream.use(fs)
            committed = 0
            with contextlib.suppress(LogcoreError):
                for batch_id in range(len(BATCHES)):
                    stream.write(batch_id, 2)
                    committed += 1
            failed += committed < len(BATCHES)
        check_partitions(path, committed)
        finish(path, committed)
    assert failed


def test_two_queries_write_one_topic_batch_by_batch(ram_directory: Path) -> None:
    path = create_directory(ram_directory / "disk" / "data", "moved")
    names = ("one", "two")
    drivers = [Driver(path, 0, query=name) for name in names]
    assert [driver.wait() for driver in drivers] == [0, 0]
    partitions = Stream(path).content(OS)
    for partition, values in enumerate(partitions):
        for name in names:
            own_values = [value for value in values if value.startswith(name.encode())]
            assert own_values == [
                value
                for batch in range(len(BATCHES))
                for value in expected(batch, partition, name)
            ]
        batch_keys = [value.split(b"-")[:2] for value in values]
        run_count = 1 + sum(
            before != after for before, after in itertools.pairwise(batch_keys)
        )
        assert run_count == len(names) * len(BATCHES), (
            "the rows of a batch are adjacent"
        )


def test_writer_that_has_the_directory_open_applies_the_batches(
    ram_directory: Path,
) -> None:
    """The writer that has the directory open applies the batches in its tick(). Until
    then, the query fails and leaves no files.
    """
    path = create_directory(ram_directory / "disk" / "data", "appended")
    with logcore.open_dir(path) as holder:
        driver = Driver(path, 0, publish_timeout=0.1)
        assert (driver.wait(), driver.done) == (FAILED, 0)
        holder.tick()
        assert holder.partition("t", 0).log_end_offset == 0
        driver = Driver(path, 0)
        while driver.is_alive():
            holder.tick()
        assert (driver.wait(), driver.done) == (0, len(BATCHES))
    assert Stream(path).content(OS) == CONTENTS[-1]
