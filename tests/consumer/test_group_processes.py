"""A group whose members are real processes, which are killed and stopped at any time;
judged from the outside.

Each process tells what it hands on and what it has committed, in lines of a pipe: what
it had told before a SIGKILL is read to its end. The ledger of these lines outlives the
processes. What has to hold, by the names of groupsharers.py:

- all (C11): every record that was acknowledged is processed, at least once.
- kept (C04, C05): what is committed is never below what a member heard to be, whoever
  commits behind it; nor above what was processed.
- in order (C14): from where a member begins with a partition, each record comes once,
  in the order of offsets.
- heirs (C07, C08): with the disturbance over, the members that are left divide all
  partitions.

LOGCORE_PROCESS_ROUNDS=n disturbs n times instead of 10; `make slow` does it 1,000
times.
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
MANY = int(os.environ.get("LOGCORE_PROCESS_ROUNDS", "1000"))
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
#: How long whoever is left may need, on a machine with other work.
SECONDS = 300

Tell = Callable[..., None]


class Telling(RebalanceListener):
    """Prints the offset at which a member starts again."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self.tell("assigned", [one.partition for one in partitions])


def consume(path: Path, tell: Tell) -> None:
    """Hands records on, then commits, until it is killed."""
    with (
        logcore.open_dir(path, shared=True) as data,
        data.consumer(**SETTINGS) as consumer,
    ):
        consumer.subscribe(["t"], listener=Telling(tell))
        while True:
            found = consumer.poll(50, 5)
            tell("has", sorted(one.partition for one in consumer.assignment()))
            for record in found.records():
                tell(
                    "processed",
                    [record.partition, record.offset, record.value.decode()],
                )
            if not found:
                continue
            offsets = {
                one.partition: consumer.position(one) for one in consumer.assignment()
            }
            try:
                consumer.commit()
            except (CommitFailedError, RebalanceInProgressError):
                continue  # another member has them now, or this one commits behind its next poll
            tell("committed", sorted(offsets.items()))


class Worker:
    """A forked member and what it told so far."""

    def __init__(self, path: Path) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                consume(
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
        self.next_offsets: dict[int, int] = {}  # by partition, since it was assigned

    def heard(self) -> list[tuple[str, Any]]:
        """Whole lines that have come."""
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
        """Kills it; the last lines."""
        self.send(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        last = self.heard()
        os.close(self._pipe)
        return last


class Ledger:
    """See the top of this module."""

    def __init__(self, data: LogDir) -> None:
        self.data = data
        self.sent: set[str] = set()
        self.processed: dict[int, dict[int, str]] = {
            number: {} for number in range(PARTITIONS)
        }
        self.committed = dict.fromkeys(range(PARTITIONS), 0)  # acknowledged to a member
        self._looking = data.consumer(group_id="g", enable_auto_commit=False)

    def append(self, count: int) -> None:
        for _ in range(count):
            value = str(len(self.sent))
            self.data.append("t", value.encode(), partition=len(self.sent) % PARTITIONS)
            self.sent.add(value)

    def note(self, worker: Worker, lines: list[tuple[str, Any]]) -> None:
        for kind, what in lines:
            if kind == "has":
                worker.has = what
            elif kind == "assigned":
                for partition in what:
                    worker.next_offsets.pop(partition, None)
            elif kind == "processed":
                self._note_processed(worker, *what)
            else:
                for partition, offset in what:
                    self.committed[partition] = max(offset, self.committed[partition])

    def _note_processed(
        self, worker: Worker, partition: int, offset: int, value: str
    ) -> None:
        expected = worker.next_offsets.get(partition, offset)
        assert offset == expected, (
            f"in order: t-{partition} {offset} where {expected} was to come"
        )
        worker.next_offsets[partition] = offset + 1
        before = self.processed[partition].setdefault(offset, value)
        assert before == value, f"t-{partition} {offset} was {before} and is {value}"

    def check_committed(self) -> None:
        """What was told before this look began is not undone."""
        told = dict(self.committed)
        found = self._looking.committed(
            [TopicPartition("t", number) for number in range(PARTITIONS)]
        )
        for one, committed in found.items():
            offset = 0 if committed is None else committed.offset
            assert offset >= told[one.partition], (
                f"kept: {one} {offset} behind {told[one.partition]}"
            )

    def is_complete(self) -> bool:
        return self.sent == {
            value for values in self.processed.values() for value in values.values()
        }

    def close(self) -> None:
        self._looking.close()


def disturb(path: Path, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    with logcore.open_dir(path, create=True, shared=True) as data:
        data.create_topic("t", partitions=PARTITIONS)
        ledger = Ledger(data)
        workers = [Worker(path) for _ in range(3)]
        try:
            for _ in range(rounds):
                ledger.append(rng.randrange(6))
                time.sleep(rng.uniform(0, 0.05))
                place = rng.randrange(len(workers))
                if rng.random() < 0.4:
                    workers[place].send(signal.SIGSTOP)
                    # Now and then for longer than the others wait.
                    time.sleep(
                        INTERVAL_MS * 1.5 / 1000
                        if rng.random() < 0.1
                        else rng.uniform(0, 0.02)
                    )
                    workers[place].send(signal.SIGCONT)
                else:
                    ledger.note(workers[place], workers[place].end())
                    workers[place] = Worker(path)
                for worker in workers:
                    ledger.note(worker, worker.heard())
                ledger.check_committed()
            settle(ledger, workers)
        finally:
            for worker in workers:
                ledger.note(worker, worker.end())
        ledger.check_committed()
        for partition, offset in ledger.committed.items():
            most = max(ledger.processed[partition], default=-1) + 1
            assert offset <= most, (
                f"kept: t-{partition} {offset}, but {most} were processed"
            )
        ledger.close()


def settle(ledger: Ledger, workers: list[Worker]) -> None:
    """Waits until all is processed and divided among those that are left."""
    deadline = time.monotonic() + SECONDS
    while True:
        for worker in workers:
            ledger.note(worker, worker.heard())
        divided = sorted(partition for worker in workers for partition in worker.has)
        if ledger.is_complete() and divided == list(range(PARTITIONS)):
            return
        assert time.monotonic() < deadline, (
            f"all: {len(ledger.sent)} sent, {ledger.processed}, {divided}"
        )
        time.sleep(0.01)


@pytest.mark.parametrize(
    "rounds",
    [
        ROUNDS,
        pytest.param(
            MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
        ),
    ],
)
def test_a_group_of_processes_that_are_killed_and_stopped_loses_nothing(
    tmp_path: Path, rounds: int
) -> None:
    print(f"seed {SEED}")
    disturb(tmp_path / "data", SEED, rounds)
