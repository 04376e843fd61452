"""A group whose members are processes that are killed and stopped at any time.

Each process writes the records that it processes and the offsets that it commits as
lines into a pipe, which can be read to its end after a SIGKILL. The test collects the
lines in a ledger, and checks these rules, which have the names of group_sharers.py:

- all (C11): every acknowledged record is processed at least once.
- kept (C04, C05): a committed offset never falls below an offset that was acknowledged
  to a member, whichever member commits later, and never exceeds the processed records.
- in order (C14): from the offset where a member begins with a partition, each record is
  processed once, in the order of offsets.
- heirs (C07, C08): after members are killed or stopped, the remaining members own all
  partitions.

LOGCORE_PROCESS_ROUNDS sets the number of rounds, in each of which members are killed or
stopped. The default is 10, in `make slow` 1,000.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import LogDir
from logcore.consumer import RebalanceListener, TopicPartition
from logcore.errors import CommitFailedError, RebalanceInProgressError

ROUNDS = int(os.environ.get("LOGCORE_PROCESS_ROUNDS", "10"))
SLOW_ROUNDS = int(os.environ.get("LOGCORE_PROCESS_ROUNDS", "1000"))
SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or random.SystemRandom().randrange(
    1 << 32
)
PARTITIONS = 4
INTERVAL_MS = 1_000
SETTINGS: dict[str, Any] = {
    "group_id": "g",
    "auto_offset_reset": "earliest",
    "enable_auto_commit": False,
    "max_poll_interval_ms": INTERVAL_MS,
}
#: The remaining members must own all partitions within this time. The machine may be
#: busy.
LIMIT_S = 300

Report = Callable[..., None]


class ReportingListener(RebalanceListener):
    """Reports the partitions that a member starts to read."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self.report("assigned", [partition.partition for partition in partitions])


def consume_until_killed(path: Path, report: Report) -> None:
    """Process records, then commit, until the process is killed."""
    with (
        logcore.open_dir(path, shared=True) as data,
        data.consumer(**SETTINGS) as consumer,
    ):
        consumer.subscribe(["t"], listener=ReportingListener(report))
        while True:
            polled = consumer.poll(0.05, 5)
            report(
                "has",
                sorted(partition.partition for partition in consumer.assignment()),
            )
            for record in polled.records():
                report(
                    "processed",
                    [record.partition, record.offset, record.value.decode()],
                )
            if not polled:
                continue
            offsets = {
                partition.partition: consumer.position(partition)
                for partition in consumer.assignment()
            }
            try:
                consumer.commit()
            # Another member owns the partitions now, or this member can commit after
            # its next poll.
            except (CommitFailedError, RebalanceInProgressError):
                continue
            report("committed", sorted(offsets.items()))


class Worker:
    """A forked member and the lines that it has written so far."""

    def __init__(self, path: Path) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                consume_until_killed(
                    path,
                    lambda *line: (
                        os.write(write, json.dumps(line).encode() + b"\n") and None
                    ),
                )
            finally:
                os._exit(1)
        os.close(write)
        os.set_blocking(read, False)
        self._pipe = read
        self._rest = b""
        self.has: list[int] = []
        self.next_offsets: dict[int, int] = {}  # by partition, since its assignment

    def read_lines(self) -> list[tuple[str, Any]]:
        """Return the complete lines that have arrived."""
        while True:
            try:
                data = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [tuple(json.loads(line)) for line in lines]

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> list[tuple[str, Any]]:
        """Kill the process, and return its last lines."""
        self.send(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        last = self.read_lines()
        os.close(self._pipe)
        return last


class Ledger:
    """The processed records and committed offsets of all members, and the checks of the
    rules above.
    """

    def __init__(self, data: LogDir) -> None:
        self.data = data
        self.sent: set[str] = set()
        self.processed: dict[int, dict[int, str]] = {
            number: {} for number in range(PARTITIONS)
        }
        self.committed = dict.fromkeys(range(PARTITIONS), 0)  # acknowledged to a member
        self._observer = data.consumer(group_id="g", enable_auto_commit=False)

    def append(self, count: int) -> None:
        for _ in range(count):
            value = str(len(self.sent))
            self.data.append("t", value.encode(), partition=len(self.sent) % PARTITIONS)
            self.sent.add(value)

    def add_lines(self, worker: Worker, lines: list[tuple[str, Any]]) -> None:
        for line_type, text in lines:
            if line_type == "has":
                worker.has = text
            elif line_type == "assigned":
                for partition in text:
                    worker.next_offsets.pop(partition, None)
            elif line_type == "processed":
                self._add_processed(worker, *text)
            else:
                for partition, offset in text:
                    self.committed[partition] = max(offset, self.committed[partition])

    def _add_processed(
        self, worker: Worker, partition: int, offset: int, value: str
    ) -> None:
        expected = worker.next_offsets.get(partition, offset)
        assert offset == expected, (
            f"in order: t-{partition} {offset} instead of {expected}"
        )
        worker.next_offsets[partition] = offset + 1
        before = self.processed[partition].setdefault(offset, value)
        assert before == value, f"t-{partition} {offset} was {before} and is {value}"

    def check_committed(self) -> None:
        """Check that no committed offset is below an acknowledged one."""
        acknowledged = dict(self.committed)
        observed = self._observer.committed(
            [TopicPartition("t", number) for number in range(PARTITIONS)]
        )
        for partition, committed in observed.items():
            offset = 0 if committed is None else committed.offset
            assert offset >= acknowledged[partition.partition], (
                f"kept: {partition} {offset} below {acknowledged[partition.partition]}"
            )

    def is_complete(self) -> bool:
        return self.sent == {
            value for values in self.processed.values() for value in values.values()
        }

    def close(self) -> None:
        self._observer.close()


def run_with_disturbances(path: Path, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    with logcore.open_dir(path, create=True, shared=True) as data:
        data.create_topic("t", partitions=PARTITIONS)
        ledger = Ledger(data)
        workers = [Worker(path) for _ in range(3)]
        try:
            for _ in range(rounds):
                ledger.append(rng.randrange(6))
                time.sleep(rng.uniform(0, 0.05))
                index = rng.randrange(len(workers))
                if rng.random() < 0.4:
                    workers[index].send(signal.SIGSTOP)
                    # Some members are stopped so long that the group removes them.
                    time.sleep(
                        INTERVAL_MS * 1.5 / 1000
                        if rng.random() < 0.1
                        else rng.uniform(0, 0.02)
                    )
                    workers[index].send(signal.SIGCONT)
                else:
                    ledger.add_lines(workers[index], workers[index].end())
                    workers[index] = Worker(path)
                for worker in workers:
                    ledger.add_lines(worker, worker.read_lines())
                ledger.check_committed()
            wait_until_stable(ledger, workers)
        finally:
            for worker in workers:
                ledger.add_lines(worker, worker.end())
        ledger.check_committed()
        for partition, offset in ledger.committed.items():
            processed_end = max(ledger.processed[partition], default=-1) + 1
            assert offset <= processed_end, (
                f"kept: t-{partition} {offset}, but {processed_end} were processed"
            )
        ledger.close()


def wait_until_stable(ledger: Ledger, workers: list[Worker]) -> None:
    """Wait until all records are processed and all partitions are divided among the
    remaining members.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        for worker in workers:
            ledger.add_lines(worker, worker.read_lines())
        divided = sorted(partition for worker in workers for partition in worker.has)
        if ledger.is_complete() and divided == list(range(PARTITIONS)):
            return
        assert time.monotonic() < deadline, (
            f"all: {len(ledger.sent)} sent, {ledger.processed}, {divided}"
        )
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    "rounds",
    [
        ROUNDS,
        pytest.param(
            SLOW_ROUNDS, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
        ),
    ],
)
def test_group_with_killed_and_stopped_processes_loses_no_record(
    tmp_path: Path, rounds: int
) -> None:
    print(f"seed {SEED}")
    run_with_disturbances(tmp_path / "data", SEED, rounds)
