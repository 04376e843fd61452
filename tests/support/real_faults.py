"""Crashes and errors of a real operating system: the workloads, the places of the
faults, and the checks of the result.

A workload runs in a process of its own on a `FaultingFS`, the operating system's files
with a count of their changes. At the chosen change a fault occurs: the process kills
itself, the power is cut, or the disk fails. The process reports each request and each
result to its parent over a pipe. The parent checks the remaining files with the oracle
of logcore.testing.

Rules:
- A message is sent before a call and after it. The fault occurs in the process itself,
  between two of its messages, so every message that arrived is true.
- A run depends only on the name of the workload, a policy, a seed and the place of the
  fault. A failure reports all four.
- Paths are relative to the working directory, which is the disk: "./t-0/..." for a log,
  "./d/..." for topics.

To add a workload: write a function with a worker as its argument, and add a line to
WORKLOADS. LogWorker reports the required content of a log, and LogChecker checks it. This
module starts no threads, and does not cut the power itself (see test_power.py).

As a program, it runs one workload and sends the messages to its standard output;
test_kills.py runs it under strace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

import attrs

from logcore import recordbatch
from logcore.errors import DiskFullError, LogcoreError, LogFailedError, ResourceError
from logcore.fs import Data, OsFS
from logcore.kernels import Record
from logcore.log import Log, open_log
from logcore.logdir import LogDir, open_dir
from logcore.testing.oracle import FoundLog, LogHistory, recover_log

POLICIES = ("always", "group", "every(3)", "interval(20)", "os")
CONFIG: dict[str, Any] = {
    "segment.bytes": 600,
    "index.interval.bytes": 100,
    "batch.size": 200,
}
#: The time of records. It is in the future, so that no producer expires.
NOW_MS = 10**13
Report = Callable[..., None]
FaultAction = Callable[[str, int | str], AbstractContextManager[object]]


# -- files -----------------------------------------------------------------------------


class RealDisk(OsFS):
    """The files below the working directory, with the methods of a simulated disk that
    the oracle calls.
    """

    skipped_ms = 0

    def real_path(self, path: str) -> str:
        return os.path.join(".", os.path.relpath(path))

    def files(self) -> dict[str, bytes]:
        found = {}
        for directory, _, names in os.walk("."):
            for name in names:
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    found[path] = file.read()
        return found

    view = files

    def content(self, path: str) -> bytes:
        return self.files()[path]

    def record_read(self, path: str) -> None: ...

    def is_unchanged_since(self, before: dict[str, bytes]) -> bool:
        return self.files() == before

    @property
    def open_handles(self) -> list[str]:
        return list(self._paths.values())

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.skipped_ms


#: One object for the whole process, because each object registers a fork handler, which is
#: never removed.
DISK = RealDisk()


@attrs.frozen
class Site:
    """A change that the library makes on disk: operation, kind of file, and the line of
    code that makes it.
    """

    operation: str
    file: str
    caller: str


def _file_kind(operation: str, path: str) -> str:
    if operation in ("mkdir", "rmdir", "sync_dir"):
        return "log directory" if path in (".", "./d") else "partition directory"
    return re.sub(r"\d{2,}|(?<=-)\d", "N", os.path.basename(path))


@attrs.frozen
class PlannedFault:
    """A fault in the operation with the number `at`: before the operation, or when this
    part of its write is done.
    """

    at: int
    part: float = 0.0
    #: If None, the process is killed with SIGKILL.
    action: FaultAction | None = None


@contextlib.contextmanager
def kill(operation: str, file: int | str) -> Iterator[None]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield


class FaultingFS(RealDisk):
    """Counts the changes of the disk, and causes the planned fault."""

    def __init__(self, planned_fault: PlannedFault | None = None) -> None:
        super().__init__()
        self.planned_fault = planned_fault
        self.sites: list[Site] = []

    def _step(self, operation: str, file: int | str) -> AbstractContextManager[object]:
        caller = sys._getframe(2)
        path = self.path_of(file) if isinstance(file, int) else file
        where = f"{caller.f_globals['__name__'].rpartition('.')[2]}.{caller.f_code.co_name}:{caller.f_lineno}"
        self.sites.append(Site(operation, _file_kind(operation, path), where))
        if self.planned_fault is None or len(self.sites) - 1 != self.planned_fault.at:
            return contextlib.nullcontext()
        return (self.planned_fault.action or kill)(operation, file)

    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
    ) -> int:
        with (
            self._step("create", path)
            if create and not self.exists(path)
            else contextlib.nullcontext()
        ):
            return super().open(path, write=write, create=create, exclusive=exclusive)

    def pwrite(self, handle: int, data: Data, position: int) -> None:
        planned_fault = self.planned_fault
        number = len(self.sites)
        # A signal interrupts a write only between two pages, so the bytes in one existing
        # page are replaced together.
        is_growing = position + len(data) > self.size(handle)
        if (
            planned_fault is not None
            and planned_fault.at == number
            and planned_fault.part
            and is_growing
        ):
            os.pwrite(
                handle,
                memoryview(data)[: int(len(data) * planned_fault.part)],
                position,
            )
        with self._step("pwrite", handle):
            super().pwrite(handle, data, position)

    def truncate(self, handle: int, size: int) -> None:
        with self._step("truncate", handle):
            super().truncate(handle, size)

    def fdatasync(self, handle: int) -> None:
        with self._step("fdatasync", handle):
            super().fdatasync(handle)

    def fsync(self, handle: int) -> None:
        with self._step("fsync", handle):
            super().fsync(handle)

    def mkdir(self, path: str) -> None:
        with self._step("mkdir", path):
            super().mkdir(path)

    def rename(self, source: str, target: str) -> None:
        with self._step("rename", target):
            super().rename(source, target)

    def unlink(self, path: str) -> None:
        with self._step("unlink", path):
            super().unlink(path)

    def rmdir(self, path: str) -> None:
        with self._step("rmdir", path):
            super().rmdir(path)

    def sync_dir(self, path: str) -> None:
        with self._step("sync_dir", path):
            super().sync_dir(path)


# -- one log: the workload and its checks


class LogWorker:
    """Calls on one log, each reported before and after it. Values contain the seed, so
    that no two stages write the same values.
    """

    def __init__(
        self, fs: RealDisk, durability: str, seed: int, report: Report
    ) -> None:
        self.fs = fs
        self.durability = durability
        self.seed = seed
        self.report = report
        self.rng = random.Random(seed)
        self.count = self.sequence = 0
        self.log: Log | None = None

    def open(self) -> Log:
        self.log = open_log(
            "t-0", create=True, config=CONFIG, durability=self.durability, fs=self.fs
        )
        start = self.log.log_start_offset
        self.report("found", start, list(self.log.read(start)))
        return self.log

    @property
    def opened(self) -> Log:
        return self.log or self.open()

    def close(self) -> None:
        log = self.opened
        self.log = None
        try:
            log.close()
        except LogcoreError:
            self.log = log
            raise
        self.report("acknowledge", log.log_end_offset, "disk")

    def _rows(
        self, count: int
    ) -> list[tuple[bytes | None, bytes, tuple[tuple[str, bytes | None], ...], int]]:
        rows: list[Any] = []
        for _ in range(count):
            self.count += 1
            value = b"%d.%d." % (self.seed, self.count)
            headers = (("h", None),) if self.count % 5 == 0 else ()
            key = b"k" if self.count % 2 else None
            rows.append(
                (key, value * self.rng.randrange(1, 12), headers, NOW_MS + self.count)
            )
        return rows

    def _store(self, rows: list[Any], call: Callable[[Log], Any]) -> None:
        log = self.opened
        end = log.log_end_offset
        records = [
            Record(end + at, row[3], row[0], row[1], row[2])
            for at, row in enumerate(rows)
        ]
        self.report("issue", records)
        try:
            receipt = call(log)
        except LogcoreError:
            if not log.has_failed:
                self.report("continue_at_end", log.log_end_offset)
            raise
        assert (receipt.offset, receipt.last_offset) == (end, end + len(rows) - 1), (
            receipt
        )
        self.report("acknowledge", receipt.last_offset + 1, receipt.durability)

    def append(self, count: int = 0, level: Any = None) -> None:
        """Append one record with append(), or several with append_many()."""
        rows = self._rows(count or self.rng.randrange(1, 4))
        if len(rows) == 1:
            key, value, headers, time = rows[0]
            self._store(
                rows,
                lambda log: log.append(
                    value, key=key, headers=headers, timestamp_ms=time, durability=level
                ),
            )
        else:
            self._store(rows, lambda log: log.append_many(rows, durability=level))

    def append_sequenced(self) -> None:
        """Append a batch of an idempotent producer."""
        rows = self._rows(2)
        data = recordbatch.encode(
            rows, producer_id=7, producer_epoch=0, base_sequence=self.sequence
        )
        self._store(rows, lambda log: log.append_batch(data))
        self.sequence += len(rows)

    def flush(self) -> None:
        log = self.opened
        end = log.log_end_offset
        log.flush()
        self.report("acknowledge", end, "disk")

    def tick(self) -> None:
        """Run the maintenance when all tasks are due: a sync, a recovery point, the removal
        of deleted files.
        """
        self.fs.skipped_ms += 100_000
        self.opened.tick()

    def roll(self) -> None:
        self.opened.roll()

    def delete(self, part: float) -> None:
        log = self.opened
        before = log.log_start_offset + int(
            (log.high_watermark - log.log_start_offset) * part
        )
        self.report("delete", before)
        log.delete_records(before)
        self.report("deleted")

    def truncate(self, part: float) -> None:
        log = self.opened
        offset = log.log_start_offset + int(
            (log.log_end_offset - log.log_start_offset) * part
        )
        self.report("truncate", offset)
        log.truncate(offset)
        self.report("truncated")

    def handle_error(self, error: LogcoreError) -> None:
        """Handle a failed call, and close the log. A log that has failed must refuse
        appends. Any other log must accept them.
        """
        log = self.log
        self.log = None
        self.report("failed", type(error).__name__, log is not None and log.has_failed)
        if log is None or log._state.is_closed:
            return
        if log.has_failed:
            try:
                log.append(b"refused")
            except LogFailedError:
                pass
            else:
                raise AssertionError("a failed log has accepted an append") from error
        elif isinstance(error, (DiskFullError, ResourceError)):
            self.log = log
            with contextlib.suppress(LogcoreError):
                self.append(1)
        with contextlib.suppress(LogcoreError):
            log.close()


class LogChecker:
    """The required content of one log, in the parent process. `kind` is the kind of the
    crash: "kill" or "power".
    """

    def __init__(self, durability: str, kind: Any) -> None:
        self.durability = durability
        self.kind = kind
        self.history = LogHistory(durability)
        #: The error of the last stage, and whether the log had failed.
        self.failed: tuple[str, bool] | None = None

    def receive(self, name: str, *args: Any) -> None:
        if name == "found":
            found = FoundLog(*args)
            self.history.check(found, self.kind)
            self.history.continue_from(found)
        elif name == "failed":
            self.failed = args[0], args[1]
        else:
            getattr(self.history, name)(*args)

    def receive_late(self, name: str, *args: Any) -> None:
        """Record a message of a process that another process is killing. The records of a
        request may be on disk. Results are ignored.
        """
        if name in ("issue", "delete"):
            self.receive(name, *args)

    def check(self, *, thorough: bool) -> None:
        """Recover the log, and check its records."""
        found = recover_log(
            DISK, "t-0", config=CONFIG, durability=self.durability, thorough=thorough
        )  # type: ignore[arg-type]
        self.history.check(found, self.kind)
        self.history.continue_from(found)
        self.record_probe()

    def record_probe(self) -> None:
        """Record that a check has appended a record, which is durable."""
        end = len(self.history.records)
        self.history.issue([Record(end, 0, None, b"probe")])
        self.history.acknowledge(end + 1, "disk")


# -- a directory of topics -------------------------------------------------------------


class TopicsWorker:
    """Topics that are created and deleted, with records in them. Messages about the log
    of a partition contain the name of the partition.
    """

    def __init__(
        self, fs: RealDisk, durability: str, seed: int, report: Report
    ) -> None:
        self.fs = fs
        self.durability = durability
        self.seed = seed
        self.report = report
        self.directory: LogDir | None = None
        self.logs: dict[str, LogWorker] = {}

    def open(self) -> None:
        self.directory = open_dir(
            "d", create=True, config=CONFIG, durability=self.durability, fs=self.fs
        )
        self.logs = {}
        self.report(
            "topics",
            {name: self.directory.partitions(name) for name in self.directory.topics()},
        )

    def close(self) -> None:
        assert self.directory is not None
        self.directory.close()
        for worker in self.logs.values():
            assert worker.log is not None
            worker.report("acknowledge", worker.log.log_end_offset, "disk")
        self.logs = {}

    def create(self, name: str, partitions: int) -> None:
        assert self.directory is not None
        self.report("creating", name, tuple(range(partitions)))
        self.directory.create_topic(name, partitions)
        self.report("created", name)

    def delete(self, name: str) -> None:
        assert self.directory is not None
        self.report("deleting", name)
        self.directory.delete_topic(name)
        self.report("deleted", name)
        self.logs = {
            key: worker
            for key, worker in self.logs.items()
            if not key.startswith(f"{name}-")
        }

    def append(self, name: str, partition: int) -> None:
        assert self.directory is not None
        key = f"{name}-{partition}"
        if key not in self.logs:
            worker = LogWorker(
                self.fs,
                self.durability,
                self.seed,
                lambda *message: self.report("log", key, *message),
            )
            worker.log = self.directory.partition(name, partition)
            self.logs[key] = worker
        self.logs[key].append()

    def handle_error(self, error: LogcoreError) -> None:
        self.report(
            "failed",
            type(error).__name__,
            any(worker.opened.has_failed for worker in self.logs.values()),
        )
        if self.directory is not None:
            with contextlib.suppress(LogcoreError):
                self.directory.close()


class TopicsChecker:
    """The required content of the directory, in the parent process: the topics that must
    exist, the topics that may exist, and the content of their logs.
    """

    def __init__(self, durability: str, kind: Any) -> None:
        self.durability = durability
        self.kind = kind
        self.required: set[str] = set()
        self.possible: set[str] = set()
        self.partitions: dict[str, tuple[int, ...]] = {}
        self.logs: dict[str, LogChecker] = {}
        self.failed: tuple[str, bool] | None = None

    def receive(self, name: str, *args: Any) -> None:
        if name == "failed":
            self.failed = args[0], args[1]
        elif name == "log":
            self.logs[args[0]].receive(*args[1:])
        elif name == "topics":
            found = args[0]
            assert self.required <= set(found) <= self.possible, (
                f"topics {sorted(found)}, not {self.required} to {self.possible}"
            )
            for topic, partitions in found.items():
                assert partitions == self.partitions[topic], (
                    f"partitions {partitions} of {topic}"
                )
            self.required = self.possible = set(found)
        elif name == "creating":
            self.possible = self.possible | {args[0]}
            self.partitions[args[0]] = args[1]
            self.logs |= {
                f"{args[0]}-{number}": LogChecker(self.durability, self.kind)
                for number in args[1]
            }
        elif name == "created":
            self.required = self.required | {args[0]}
        elif name == "deleting":
            self.required = self.required - {args[0]}
        elif name == "deleted":
            self.possible = self.possible - {args[0]}

    def check(self, *, thorough: bool) -> None:
        """Open the directory, check its content, and open it a second time."""
        for is_again in (False, True):
            before = DISK.files()
            with open_dir(
                "d", create=True, config=CONFIG, durability=self.durability, fs=DISK
            ) as directory:
                self.receive(
                    "topics",
                    {name: directory.partitions(name) for name in directory.topics()},
                )
                if not is_again:
                    name = f"probe{len(self.partitions)}"
                    self.receive("creating", name, (0,))
                    directory.create_topic(name)
                    self.receive("created", name)
                keys = {
                    f"{name}-{number}": (name, number)
                    for name in self.required
                    for number in self.partitions[name]
                }
                assert {
                    entry.name for entry in os.scandir("d") if entry.is_dir()
                } == set(keys), "the directories differ from the topics"
                for key, topic_partition in keys.items():
                    log = directory.partition(*topic_partition)
                    start = log.log_start_offset
                    self.logs[key].receive("found", start, list(log.read(start)))
                    if not is_again:
                        log.append(b"probe", timestamp_ms=0)
                        self.logs[key].record_probe()
        assert DISK.files() == before, "opening again changes the files"
        assert not DISK.open_handles, f"still open: {DISK.open_handles}"


# -- workloads -------------------------------------------------------------------------


def appends(w: LogWorker) -> None:
    for level in (None, "os", None, "disk", None):
        w.append(level=level)
    w.close()


def rolls(w: LogWorker) -> None:
    for _ in range(2):
        w.append()
        w.roll()
    w.append(12)  # in several segments
    w.append()


def flushes(w: LogWorker) -> None:
    for _ in range(2):
        w.append(level="os")
        w.flush()
        w.append()
        w.tick()


def truncates(w: LogWorker) -> None:
    w.append(12)
    w.truncate(0.8)
    w.append()
    w.truncate(w.rng.random())
    w.append()
    w.truncate(0)
    w.append()


def deletes(w: LogWorker) -> None:
    w.append(16)
    w.delete(0.4)
    w.append()
    w.delete(w.rng.random())
    w.append(level="os")
    w.delete(1)
    w.tick()
    w.append()


def reopens(w: LogWorker) -> None:
    for _ in range(3):
        w.append()
        w.close()
    w.append()


def sequences(w: LogWorker) -> None:
    for _ in range(3):
        w.append_sequenced()
        w.append()
        w.roll()
    w.close()


def continues(w: LogWorker) -> None:
    """Append one record. Most changes are made by the recovery at the opening."""
    w.append()
    w.close()


def topics(w: TopicsWorker) -> None:
    w.open()
    w.create("a", 2)
    w.append("a", 0)
    w.append("a", 1)
    w.create("b", 1)
    w.append("b", 0)
    w.delete("a")
    w.create("a", 1)
    w.append("a", 0)
    w.close()
    w.open()
    w.append("b", 0)
    w.delete("b")
    w.close()


def continues_with_topics(w: TopicsWorker) -> None:
    w.open()
    w.create(f"c{w.seed}", 1)
    w.close()


@attrs.frozen
class Workload:
    """A function `run`, the class of its argument, and the class that checks the result.
    After a crash of `run`, the function `next_run` runs, and crashes too.
    """

    run: Callable[[Any], None]
    worker: type[Any] = LogWorker
    checker: type[Any] = LogChecker
    next_run: Callable[[Any], None] = continues

    @property
    def name(self) -> str:
        return self.run.__name__


WORKLOADS = {
    workload.name: workload
    for workload in (
        *(
            Workload(run)
            for run in (
                appends,
                rolls,
                flushes,
                truncates,
                deletes,
                reopens,
                sequences,
                continues,
            )
        ),
        *(
            Workload(run, TopicsWorker, TopicsChecker, continues_with_topics)
            for run in (topics, continues_with_topics)
        ),
    )
}


# -- running workloads -----------------------------------------------------------------


@attrs.frozen
class Outcome:
    """The messages of a process, its changes on disk if it completed, and the way it
    ended.
    """

    messages: list[tuple[Any, ...]]
    sites: list[Site]
    was_killed: bool

    @classmethod
    def of(cls, messages: Iterable[tuple[Any, ...]], exit_code: int) -> Outcome:
        received = list(messages)
        if exit_code not in (0, -signal.SIGKILL):
            raise AssertionError(
                f"the process failed:\n{received[-1][-1] if received else exit_code}"
            )
        sites = received.pop()[1] if exit_code == 0 else []
        return cls(received, sites, exit_code != 0)


def read_messages(pipe: BinaryIO) -> Iterator[tuple[Any, ...]]:
    """Yield the messages that arrived completely."""
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(pipe)


def run_workload(
    workload: Workload,
    durability: str,
    seed: int,
    fs: RealDisk,
    pipe: int,
    *,
    may_fail: bool,
) -> int:
    """Run a workload in this process, and return the exit code. With `may_fail`, errors of
    the library are expected.
    """

    def report(*message: Any) -> None:
        rest = memoryview(pickle.dumps(message))
        while rest:
            rest = rest[os.write(pipe, rest) :]

    worker = workload.worker(fs, durability, seed, report)
    try:
        try:
            workload.run(worker)
        except LogcoreError as error:
            if not may_fail:
                raise
            worker.handle_error(error)
        report("sites", fs.sites if isinstance(fs, FaultingFS) else [])
        return 0
    except BaseException:
        report("error", traceback.format_exc())
        return 1


def fork(run: Callable[[int], int]) -> tuple[int, BinaryIO]:
    """Run run(pipe) in a child process, which ends with the returned exit code. Return
    its process id, and the pipe to read.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            code = run(writer)
        except BaseException:
            os.write(writer, pickle.dumps(("error", traceback.format_exc())))
        finally:
            os._exit(code)
    os.close(writer)
    return child, os.fdopen(reader, "rb")


def run_forked(
    workload: Workload,
    durability: str,
    seed: int,
    planned_fault: PlannedFault | None = None,
) -> Outcome:
    may_fail = planned_fault is not None and planned_fault.action is not None

    def run(pipe: int) -> int:
        return run_workload(
            workload,
            durability,
            seed,
            FaultingFS(planned_fault),
            pipe,
            may_fail=may_fail,
        )

    child, pipe = fork(run)
    with pipe:
        messages = list(read_messages(pipe))
    return Outcome.of(messages, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


# -- command line ----------------------------------------------------------------------


def fill_file_system(durability: str, seed: int) -> int:
    """Fill the file system of the working directory completely, several times. Print
    the errors that occurred.
    """
    rng = random.Random(seed)
    config = {
        "segment.bytes": 60_000,
        "index.interval.bytes": 500,
        "file.delete.delay.ms": 0,
    }
    expected: list[bytes | None] = []
    start = refused_count = stored = 0

    def bytes_of_logs() -> int:
        return sum(
            entry.stat().st_size
            for entry in os.scandir("t-0")
            if entry.name.endswith(".log")
        )

    def try_append(log: Log, size: int) -> bool:
        nonlocal refused_count, stored
        rows = [
            (None, b"%d." % (stored + at) * size) for at in range(rng.randrange(1, 4))
        ]
        before = bytes_of_logs()
        end = log.log_end_offset
        try:
            receipt = log.append_many(rows)
        except DiskFullError as error:
            refused_count += 1
            assert error.retriable
            assert not log.has_failed, "a full disk must not prevent later appends"
            # With "always", the first batches may remain, and the error has the offset
            # after them.
            stored_count = log.log_end_offset - end
            assert not stored_count or (
                durability == "always" and error.offset == log.log_end_offset
            )
            expected.extend(value for _, value in rows[:stored_count])
            stored += stored_count
            assert stored_count or bytes_of_logs() == before, (
                "bytes of a failed append remain"
            )
            return False
        assert receipt.offset == end
        expected.extend(value for _, value in rows)
        stored += len(rows)
        return True

    def opened() -> Log:
        """Open the log again. An opening writes files, which also need space."""
        try:
            return open_log("t-0", create=True, config=config, durability=durability)
        except DiskFullError:
            with open_log("t-0", read_only=True) as reader:
                check(reader)
            release("opening")
            return open_log("t-0", create=True, config=config, durability=durability)

    def close(log: Log) -> None:
        """Close the log. If there is no space for the marker of a clean shutdown, only
        the marker is missing.
        """
        with contextlib.suppress(DiskFullError):
            log.close()

    def reserve() -> None:
        """Reserve space that an operator may release, once for opening and once for
        deleting.
        """
        for purpose, number in itertools.product(("opening", "deleting"), range(4)):
            with open(f"reserve-{purpose}-{number}", "wb") as file:
                file.write(bytes(8_192))

    def release(purpose: str) -> None:
        for number in range(4):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"reserve-{purpose}-{number}")

    def check(log: Log) -> None:
        assert log.log_start_offset == start
        found = [record.value for record in log.read(start)]
        assert found == expected[start:], (
            f"{len(found)} of {len(expected) - start} records"
        )

    reserve()
    ballast = os.open("ballast", os.O_RDWR | os.O_CREAT)
    for round_ in range(4):
        with contextlib.ExitStack() as closing:
            log = opened()
            closing.callback(close, log)
            check(log)
            for size in (4_000, 500, 60, 1):
                while try_append(log, size):
                    pass
            for _ in range(20):
                try_append(log, 1)
            check(log)
            with contextlib.suppress(DiskFullError):
                log.flush()
                log.tick()
            with open_log("t-0", read_only=True) as reader:
                check(reader)
            # Fill the remaining space, up to the last page.
            with contextlib.suppress(OSError):
                for page in itertools.count():
                    os.pwrite(ballast, bytes(4096), page * 4096)
            try_append(log, 1)
            check(log)
            if round_ == 1:
                close(log)
                with (
                    contextlib.suppress(DiskFullError),
                    open_log("t-0", config=config, durability=durability) as log,
                ):
                    check(log)
                with open_log("t-0", read_only=True) as reader:
                    check(reader)
                os.ftruncate(ballast, 0)
                continue
            os.ftruncate(ballast, 0)
            middle = start + (stored - start) // 2
            try:
                start = log.delete_records(middle)
            # Storing the new start offset needs space too.
            except DiskFullError as error:
                assert not log.has_failed, error
                check(log)
                release("deleting")
                start = log.delete_records(middle)
            log.tick()  # removes the files that the delay has kept
            reserve()
            check(log)
            assert try_append(log, 1), "an append succeeds because space is free again"
    release("opening")
    release("deleting")
    with open_log("t-0", config=config, durability=durability) as log:
        check(log)
    print(
        f"{stored} records stored, {refused_count} appends refused on a full disk, none lost"
    )
    return 0


def main(task: str, durability: str, seed: str) -> int:
    if task == "fill":
        return fill_file_system(durability, int(seed))
    return run_workload(
        WORKLOADS[task], durability, int(seed), RealDisk(), 1, may_fail=True
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
