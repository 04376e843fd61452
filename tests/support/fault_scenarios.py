"""Scenarios for fault_exploration.py. Each scenario uses one part of the library, and
continues after a failed call.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import logcore
from logcore.errors import LogcoreError
from logcore.fs import FS
from logcore.log import Log
from logcore.logdir import LogDir
from logcore.registry import open_registry
from logcore.shipping import Mirror
from logcore.testing import SimulatedDisk
from support.fault_exploration import Ledger, persist
from support.model_cluster import ModelSource

DIRECTORY: Final = "/srv/data"
CONFIG: Final = {"segment.bytes": 400, "index.interval.bytes": 100}


class LogScenario:
    """Appends to one log, rolls the log, deletes its first records, runs its maintenance
    and opens it again.
    """

    def __init__(self, durability: str = "group") -> None:
        self.durability = durability
        self.ledger = Ledger()

    def open(self, fs: FS) -> Log:
        return logcore.open(
            f"{DIRECTORY}/t-0",
            create=True,
            config=CONFIG,
            durability=self.durability,
            fs=fs,
        )

    @property
    def acknowledged_count(self) -> int:
        return self.ledger.count

    def prepare(self, fs: FS) -> None:
        with self.open(fs) as log:
            self.ledger.append(
                "t-0", [b"0"], lambda: log.append(b"0", durability="disk")
            )

    def run(self, fs: FS) -> None:
        logs: list[Log] = []

        def reopen() -> None:
            while logs:
                logs.pop().close()
            logs.append(self.open(fs))

        def append(values: list[bytes]) -> None:
            if not logs or logs[0].has_failed:
                reopen()
            self.ledger.append(
                "t-0",
                values,
                lambda: logs[0].append_many([(b"k", value) for value in values]),
            )

        for number in range(8):
            persist(lambda number=number: append([b"a%d" % number, b"b%d" % number]))  # type: ignore[misc]
            if number == 3:
                persist(lambda: logs[0].roll(), reopen)  # noqa: PLW0108 -- reopen() replaces logs[0]
            if number == 5:
                persist(lambda: logs[0].tick(), reopen)  # noqa: PLW0108
        persist(lambda: append([b"last"]), reopen)
        persist(lambda: logs[0].flush(), reopen)  # noqa: PLW0108
        while logs:
            persist(logs.pop().close)

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        with self.open(fs) as log:
            self.ledger.check("t-0", [record.value for record in log.read(0)])


class DirectoryScenario:
    """Creates, grows, changes, deletes and recreates topics while records are appended."""

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.ledger = Ledger()
        self.done: set[str] = set()

    def open(self, fs: FS) -> LogDir:
        return logcore.open_dir(
            DIRECTORY, create=True, config=CONFIG, shared=self.shared, fs=fs
        )

    @property
    def acknowledged_count(self) -> int:
        return self.ledger.count

    def prepare(self, fs: FS) -> None:
        with self.open(fs) as directory:
            directory.create_topic("again")
            directory.append("again", b"old", partition=0)

    def run(self, fs: FS) -> None:
        with reopenable_directory(lambda: self.open(fs)) as (open_directories, reopen):

            def step(name: str, work: Callable[[LogDir], object]) -> None:
                def attempt() -> None:
                    if not open_directories:
                        reopen()
                    work(open_directories[0])

                if persist(attempt, lambda: close_failed_logs(open_directories)):
                    self.done.add(name)

            def append(topic: str, value: bytes) -> None:
                step(
                    f"append {value!r}",
                    lambda data: self.ledger.append(
                        topic, [value], lambda: data.append(topic, value, partition=0)
                    ),
                )

            step("made", lambda data: data.create_topic("made", exist_ok=True))
            append("made", b"one")
            step(
                "grown",
                lambda data: (
                    len(data.partitions("made")) > 1 or data.add_partitions("made", 2)
                ),
            )
            append("made", b"two")
            step(
                "altered",
                lambda data: data.alter_topic("made", {"retention.ms": "123456789"}),
            )
            step(
                "deleted",
                lambda data: "again" not in data or data.delete_topic("again"),
            )
            step("again", lambda data: data.create_topic("again", exist_ok=True))
            append("again", b"new")
            step("tick", lambda data: data.tick())

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        with self.open(fs) as directory:
            if "made" in self.done:
                self.check(directory, "made")
            if "grown" in self.done:
                assert directory.partitions("made") == (0, 1)
            if "altered" in self.done:
                assert (
                    directory.describe_topic("made").overrides["retention.ms"]
                    == "123456789"
                )
            if "again" in self.done:
                self.check(directory, "again")

    def check(self, directory: LogDir, topic: str) -> None:
        self.ledger.check(
            topic, [record.value for record in directory.partition(topic, 0).read(0)]
        )


class AppendScenario:
    """Appends records to one partition of a shared directory. The values contain the
    name of the process.
    """

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.ledger = Ledger()

    @property
    def acknowledged_count(self) -> int:
        return self.ledger.count

    def open(self, fs: FS) -> LogDir:
        return logcore.open_dir(
            DIRECTORY, create=True, config=CONFIG, shared=True, fs=fs
        )

    def prepare(self, fs: FS) -> None:
        with self.open(fs) as directory:
            directory.create_topic("t", exist_ok=True)

    def run(self, fs: FS) -> None:
        with reopenable_directory(lambda: self.open(fs)) as (open_directories, reopen):

            def append(number: int) -> None:
                if not open_directories:
                    reopen()
                value = b"%s:%d" % (self.name, number)
                self.ledger.append(
                    "t",
                    [value],
                    lambda: open_directories[0].append("t", value, partition=0),
                )

            for number in range(5):
                persist(
                    functools.partial(append, number),
                    lambda: close_failed_logs(open_directories),
                )
                persist(lambda: open_directories[0].tick(), reopen)  # noqa: PLW0108 -- reopen() replaces held[0]

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        with self.open(fs) as directory:
            found = [
                record.value or b"" for record in directory.partition("t", 0).read(0)
            ]
        self.ledger.check(
            "t", [value for value in found if value.startswith(self.name + b":")]
        )


class ProducerScenario:
    """Sends with an idempotent producer. A record whose future failed is sent again as
    another record.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()

    @property
    def acknowledged_count(self) -> int:
        return self.ledger.count

    def prepare(self, fs: FS) -> None:
        with logcore.open_dir(
            DIRECTORY, create=True, config=CONFIG, fs=fs
        ) as directory:
            directory.create_topic("t")

    def run(self, fs: FS) -> None:
        with reopenable_directory(
            lambda: logcore.open_dir(DIRECTORY, config=CONFIG, fs=fs)
        ) as (
            open_directories,
            reopen,
        ):
            numbers = iter(range(1_000))
            producers: list[Any] = []

            def send() -> None:
                if not open_directories:
                    reopen()
                if not producers:
                    producers.append(
                        open_directories[0].producer(
                            threaded=False, linger_ms=0, delivery_timeout_ms=1_000
                        )
                    )
                values = [b"%d" % next(numbers) for _ in range(2)]
                self.ledger.attempted.setdefault("t", []).extend(values)
                futures = [
                    producers[0].send("t", value, partition=0) for value in values
                ]
                producers[0].flush()
                self.ledger.acked.setdefault("t", []).extend(
                    value
                    for value, future in zip(values, futures, strict=True)
                    if future.exception() is None
                )

            def repair() -> None:
                while producers:
                    with contextlib.suppress(LogcoreError):
                        producers.pop().close()
                close_failed_logs(open_directories)

            for _ in range(5):
                persist(send, repair)
            repair()

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        with logcore.open_dir(DIRECTORY, fs=fs) as directory:
            found = [record.value for record in directory.partition("t", 0).read(0)]
        self.ledger.check("t", found)
        assert len(set(found)) == len(found), (
            f"an idempotent producer stored a record twice: {found}"
        )


class CommitScenario:
    """A member of a group reads and commits. The committed position belongs to an
    attempted commit, and is never lower than the last acknowledged position.
    """

    def __init__(self, shared: bool = False, group: str = "g") -> None:
        self.shared = shared
        self.group = group
        self.acked = 0
        self.attempted = {0}

    def open(self, fs: FS) -> LogDir:
        return logcore.open_dir(DIRECTORY, create=True, shared=self.shared, fs=fs)

    @property
    def acknowledged_count(self) -> int:
        return self.acked

    def prepare(self, fs: FS) -> None:
        with self.open(fs) as directory:
            if directory.create_topic("t", exist_ok=True):
                for number in range(12):
                    directory.append("t", b"%d" % number, partition=0)

    def run(self, fs: FS) -> None:
        with reopenable_directory(lambda: self.open(fs)) as (open_directories, reopen):
            consumers: list[Any] = []

            def commit() -> None:
                if not open_directories:
                    reopen()
                if not consumers:
                    consumers.append(
                        open_directories[0].consumer(
                            group_id=self.group,
                            auto_offset_reset="earliest",
                            enable_auto_commit=False,
                            max_poll_records=3,
                        )
                    )
                    consumers[0].assign([("t", 0)])
                records = list(consumers[0].poll(0).records())
                if records:
                    position = records[-1].offset + 1
                    self.attempted.add(position)
                    consumers[0].commit()
                    self.acked = max(self.acked, position)

            def repair() -> None:
                while consumers:
                    with contextlib.suppress(LogcoreError):
                        consumers.pop().close()
                close_failed_logs(open_directories)

            for _ in range(4):
                persist(commit, repair)
            repair()

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        with self.open(fs) as directory:
            committed = directory.committed_offsets("t", 0).get(self.group, 0)
        assert committed in self.attempted and committed >= self.acked, (
            committed,
            self.acked,
            self.attempted,
        )


class TransactionScenario:
    """A transactional producer commits pairs of records in two partitions. Readers of
    committed records see both records of a pair, or neither.

    `name` is the name of the process, in its transactional id and its values.
    """

    def __init__(self, shared: bool = False, name: str = "x") -> None:
        self.shared = shared
        self.name = name
        self.ledgers = {number: Ledger() for number in (0, 1)}

    def open(self, fs: FS) -> LogDir:
        return logcore.open_dir(DIRECTORY, create=True, shared=self.shared, fs=fs)

    @property
    def acknowledged_count(self) -> int:
        return sum(ledger.count for ledger in self.ledgers.values())

    def prepare(self, fs: FS) -> None:
        with self.open(fs) as directory:
            directory.create_topic("t", 2, exist_ok=True)

    def run(self, fs: FS) -> None:
        with reopenable_directory(lambda: self.open(fs)) as (open_directories, reopen):
            numbers = iter(range(1_000))
            producers: list[Any] = []

            def commit() -> None:
                if not open_directories:
                    reopen()
                if not producers:
                    producer = open_directories[0].producer(
                        transactional_id=self.name,
                        threaded=False,
                        max_block_ms=60_000,
                        delivery_timeout_ms=60_000,
                    )
                    producers.append(producer)
                    producer.init_transactions(0)
                value = b"%s:%d" % (self.name.encode(), next(numbers))
                for ledger in self.ledgers.values():
                    ledger.attempted.setdefault("t", []).append(value)
                with producers[0].transaction():
                    for number in self.ledgers:
                        producers[0].send("t", value, partition=number)
                for ledger in self.ledgers.values():
                    ledger.acked.setdefault("t", []).append(value)

            def repair() -> None:
                while producers:
                    with contextlib.suppress(LogcoreError):
                        producers.pop().close()
                close_failed_logs(open_directories)

            for _ in range(3):
                persist(commit, repair)
            repair()

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        with self.open(fs) as directory:
            for transactional_id in directory.transactions():
                with directory.producer(
                    transactional_id=transactional_id, threaded=False
                ) as producer:
                    # Ends a transaction that remained open.
                    producer.init_transactions(0)
            found = [
                [
                    record.value
                    for record in directory.partition("t", number).read(
                        0, isolation="read_committed"
                    )
                    if (record.value or b"").startswith(self.name.encode() + b":")
                ]
                for number in self.ledgers
            ]
        assert found[0] == found[1], f"a transaction is split: {found}"
        for number, ledger in self.ledgers.items():
            ledger.check("t", found[number])


class RegistryScenario:
    """Creates and replaces nodes of a registry. The value of a node is the last
    acknowledged value, or the value of a later attempt.
    """

    def __init__(self, name: str = "a") -> None:
        self.paths = (
            f"/config/clients/{name}",
            f"/config/clients/{name}b",
            f"/consumers/{name}/offsets/t/0",
        )
        self.acked: dict[str, int] = {}
        self.attempted: dict[str, int] = {}

    @property
    def acknowledged_count(self) -> int:
        return sum(self.acked.values())

    def prepare(self, fs: FS) -> None:
        with (
            logcore.open_dir(DIRECTORY, create=True, fs=fs),
            open_registry(DIRECTORY, fs=fs) as registry,
        ):
            registry.create(self.paths[0], b"0")

    def run(self, fs: FS) -> None:
        registries: list[Any] = []

        def set_value(path: str, number: int) -> None:
            if not registries:
                registries.append(open_registry(DIRECTORY, fs=fs))
            self.attempted[path] = number
            registries[0].update(path, lambda _: b"%d" % number)
            self.acked[path] = number

        def repair() -> None:
            while registries:
                with contextlib.suppress(LogcoreError):
                    registries.pop().close()

        for number in range(1, 6):
            for path in self.paths:
                persist(
                    lambda path=path, number=number: set_value(path, number), repair
                )  # type: ignore[misc]
        repair()

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        with open_registry(DIRECTORY, fs=fs) as registry:
            for path, acked in self.acked.items():
                found = int(registry.get(path).value)
                assert acked <= found <= self.attempted[path], (path, found, acked)


class MirrorScenario:
    """A mirror copies a topic, and is started again until all records are copied. The
    copy has each record once, at its offset.
    """

    def __init__(self) -> None:
        self.source = ModelSource(random.Random(1), SimulatedDisk())
        self.source.create_topic("orders")
        for number in range(20):
            self.source.logs["orders", 0].append(b"%d" % number)
        self.runs = 0

    @property
    def acknowledged_count(self) -> int:
        return self.runs

    def prepare(self, fs: FS) -> None:
        logcore.open_dir(DIRECTORY, create=True, fs=fs).close()

    def run(self, fs: FS) -> None:
        def attempt() -> None:
            with (
                logcore.open_dir(DIRECTORY, fs=fs) as data,
                Mirror(data, self.source, topics=["orders"], fs=fs) as mirror,
            ):
                mirror.run(until_end=True)
                self.runs += 2

        persist(attempt)

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        with logcore.open_dir(DIRECTORY, fs=fs) as data:
            with Mirror(data, self.source, topics=["orders"], fs=fs) as mirror:
                mirror.run(until_end=True)
            found = [
                (record.offset, record.value)
                for record in data.partition("orders", 0).read(0)
            ]
        assert found == [(number, b"%d" % number) for number in range(20)]


def close_failed_logs(open_directories: list[LogDir]) -> None:
    """Close the logs that refuse writes, as their error advises. The directory opens
    them again when they are used.
    """
    for directory in open_directories:
        for log in list(directory.host.open_logs().values()):
            if log.has_failed:
                with contextlib.suppress(LogcoreError):
                    log.close()


@contextlib.contextmanager
def reopenable_directory(
    open_one: Callable[[], LogDir],
) -> Iterator[tuple[list[LogDir], Callable[[], None]]]:
    """Yield a list that contains the directory while it is open, and a function that
    opens it again. The list is empty at first.
    """
    open_directories: list[LogDir] = []

    def reopen() -> None:
        while open_directories:
            open_directories.pop().close()
        open_directories.append(open_one())

    yield open_directories, reopen
    while open_directories:
        persist(open_directories.pop().close)
