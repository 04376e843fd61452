"""Tests that kill a Spark job: its JVM, all of its processes, one of its Python processes,
or the broker that has the directory open.

The job (tests/support/killed_job.py) copies a topic twice, by a stream and by named
batch writes. The job is killed at a chosen step of one copy, or at any moment, and
started again. After a kill of the JVM alone, a Python process continues its commit
while the next JVM runs. At the end, both copies have each row once, in the order of its
partition.

LOGCORE_TEST_SEED repeats the random choices, but not the moments of the kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pytest.importorskip("pyspark.sql.streaming.datasource")  # AvailableNow needs 4.2

import logcore
import pyspark_logcore
from logcore.errors import LogLockedError
from logcore.inspect.verify import verify
from support.slow_source import STEPS

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_124
TESTS = Path(__file__).resolve().parents[1]
PARTITIONS = 2
ROWS = 300
TOPICS = ("copy", "kept")
KILLED_PROCESSES = ("jvm", "all", "worker", "broker")
KILL_MOMENTS = (*STEPS, "offsets", "any")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Job:
    """One run of the job, with all its processes."""

    def __init__(self, path: Path, work: Path) -> None:
        self.steps = work / "steps"
        self.steps.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "LOGCORE_TEST_STEPS": str(self.steps),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(TESTS), environment.get("PYTHONPATH", "")]
        )
        command = [sys.executable, "-m", "support.killed_job", str(path), str(work)]
        with (work / "said.txt").open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=work,
                start_new_session=True,
                stdout=output,
                stderr=output,
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill_all(self) -> None:
        for pid, _ in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def kill_jvm(self) -> None:
        """Kill the JVM. Its Python processes continue."""
        for pid, name in self._processes():
            if name == "java":
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def kill_worker(self, rng: random.Random) -> None:
        workers = [
            pid
            for pid, name in self._processes()
            if name != "java" and pid != self.process.pid
        ]
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)

    def _processes(self) -> list[tuple[int, str]]:
        """Return the id and name of each process in the session of the job."""
        processes = []
        for process_path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if (
                    process_path.name.isdigit()
                    and os.getsid(int(process_path.name)) == self.process.pid
                ):
                    processes.append(
                        (
                            int(process_path.name),
                            (process_path / "comm").read_text().strip(),
                        )
                    )
        return processes


class Broker:
    """A netshim broker that has the directory open."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "netshim", "serve", str(path), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class KillRound:
    """The state of the test: the directory, its records, and the running processes."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "data"
        self.work = tmp_path / "work"
        self.work.mkdir()
        self.expected: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        with logcore.open_dir(self.path, create=True) as directory:
            for topic in ("orders", *TOPICS):
                directory.create_topic(topic, PARTITIONS)

    def append(self) -> None:
        """Append rows to copy. Retry while a process that survived a kill has the
        directory open.
        """
        deadline = time.monotonic() + 120
        while True:
            try:
                with logcore.open_dir(self.path) as directory:
                    for partition, values in enumerate(self.expected):
                        new_values = [
                            b"%d-%d" % (partition, len(values) + number)
                            for number in range(ROWS)
                        ]
                        directory.partition("orders", partition).append_many(
                            [(None, value) for value in new_values]
                        )
                        values += new_values
                    return
            except LogLockedError:
                assert time.monotonic() < deadline, (
                    "a process does not close the directory"
                )
                time.sleep(0.05)

    def wait_for(self, moment: str, job: Job, rng: random.Random) -> None:
        """Wait until a randomly chosen copy has reached `moment`, or the job has ended."""
        topic = rng.choice(TOPICS)
        before = self._unfinished(topic)
        until = time.monotonic() + rng.uniform(0, 30)
        requested_step = job.steps / f"wanted.{topic}.{moment}"
        if moment in STEPS:
            requested_step.touch()
        while not job.has_ended():
            if moment in STEPS and list(job.steps.glob(f"{topic}.{moment}.*")):
                break
            if moment == "offsets" and self._unfinished(topic) - before:
                break
            if moment == "any" and time.monotonic() > until:
                break
            time.sleep(0.002)
        requested_step.unlink(missing_ok=True)

    def _unfinished(self, topic: str) -> set[str]:
        """Return the batches that are planned and not committed."""
        planned = {path.name for path in (self.work / topic / "offsets").glob("[0-9]*")}
        committed = {
            path.name for path in (self.work / topic / "commits").glob("[0-9]*")
        }
        return planned - committed

    def check(self) -> None:
        with logcore.open_dir(self.path) as directory:
            for topic in TOPICS:
                for partition, expected in enumerate(self.expected):
                    values = [
                        record.value
                        for record in directory.partition(topic, partition).read(0)
                    ]
                    repeated = [
                        value for value, count in Counter(values).items() if count > 1
                    ]
                    assert not repeated, (
                        f"{topic}-{partition}: {len(repeated)} rows occur more than once, such as {repeated[:3]}"
                    )
                    assert values == expected, (
                        f"{topic}-{partition}: {len(values)} rows of {len(expected)}"
                    )
        assert not [
            verdict for verdict in verify(str(self.path)) if verdict.status == "damaged"
        ]


@pytest.fixture
def kill_round(tmp_path: Path) -> Iterator[KillRound]:
    try:
        pyspark_logcore.ensure_java()
    except pyspark_logcore.JavaNotFoundError as error:
        pytest.skip(str(error))
    yield KillRound(tmp_path)


def test_killed_jobs_copy_each_row_once(kill_round: KillRound) -> None:
    rng = random.Random(SEED)
    kills: Counter[tuple[str, str]] = Counter()
    kill_target = int(os.environ.get("LOGCORE_TEST_KILLS", "50"))
    job: Job | None = None
    broker: Broker | None = None
    try:
        while kills.total() < kill_target:
            killed_process = rng.choice(KILLED_PROCESSES)
            moment = rng.choice(KILL_MOMENTS)
            if job is None or job.has_ended():
                if broker is not None:
                    broker.kill()
                    broker = None
                kill_round.append()
                job = Job(kill_round.path, kill_round.work)
            if killed_process == "broker" and broker is None:
                broker = Broker(kill_round.path)
            kill_round.wait_for(moment, job, rng)
            if job.has_ended():
                continue
            if killed_process == "jvm":
                job.kill_jvm()
            elif killed_process == "all":
                job.kill_all()
            elif killed_process == "worker":
                job.kill_worker(rng)
            elif broker is not None:
                broker.kill()
                broker = None
            kills[killed_process, moment] += 1
            for reported in job.steps.glob("*.*.[0-9]*"):
                reported.unlink(missing_ok=True)
    finally:
        if broker is not None:
            broker.kill()
        if job is not None and not job.has_ended():
            job.kill_all()
    kill_round.append()
    # Spark occasionally ends a query if two queries of one session send tasks at the same
    # moment.
    ended = (
        Job(kill_round.path, kill_round.work).process.wait() == 0 for _ in range(5)
    )
    assert any(ended), (kill_round.work / "said.txt").read_text()[-4000:]
    kill_round.check()
    print(
        f"seed {SEED}:",
        *(
            f"{killed_process} at {moment}: {count}"
            for (killed_process, moment), count in sorted(kills.items())
        ),
    )
