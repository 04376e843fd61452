"""Tests of crashes of a directory of topics, with every possible state of the disk. Every
acknowledged topic exists afterwards, and no other topic.

tests/faults/test_crash_explorer.py has the same tests for one log. Random programs run on a
LogDir on a simulated disk: topics are created, extended, changed, forked and deleted,
writes are staged, and ticks run retention and compaction. Each possible disk after a crash
is opened and checked. A topic exists completely or not at all, and so does a staged write.
LogHistory describes the content of logs.

LOGCORE_DIRECTORY_STATES=n explores n disks; `make slow` explores 500,000. A failure
prints how to repeat it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import posixpath
import random
import uuid
from typing import Any

import attrs
import numpy as np
import pytest

import logcore
from logcore.config import LogConfig
from logcore.inspect.verify import verify
from logcore.kernels import Record
from logcore.kernels.layout import InputColumns
from logcore.logdir import LogDir
from logcore.staging.manifest import Manifest
from logcore.staging.publishing import Staging
from logcore.staging.writing import StagedWriter
from logcore.testing import Explorer, FoundLog, LogHistory, Report, SimulatedDisk
from logcore.testing.crash_states import Kind
from support.programs import POLICIES

STATES = int(os.environ.get("LOGCORE_DIRECTORY_STATES", "300"))
MANY = int(os.environ.get("LOGCORE_DIRECTORY_STATES", "500000"))
DEFAULTS = {"segment.bytes": 300, "index.interval.bytes": 100, "batch.size": 200}
#: Settings of topics: one keeps all records, one deletes records above a size, one
#: compacts at each chance.
KEPT: dict[str, Any] = {}
DELETED: dict[str, Any] = {"retention.bytes": 400}
COMPACTED: dict[str, Any] = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": 0,
    "delete.retention.ms": 0,
}


@attrs.define
class Topic:
    """A topic that the program expects.

    `topic_id` is None while the topic is being created. `counts` are the possible numbers
    of partitions: two while partitions are added. `retentions` are possible values of
    retention.ms. `may_lack` means that the topic may be missing, because it is being
    created or deleted.
    """

    config: dict[str, Any]
    logs: dict[int, LogHistory]
    counts: set[int]
    topic_id: uuid.UUID | None = None
    retentions: set[str | None] = attrs.field(factory=lambda: {None})
    may_lack: bool = True


@attrs.frozen
class FoundTopic:
    topic_id: uuid.UUID
    retention: str | None
    logs: list[FoundLog]


@attrs.frozen
class FoundDirectory:
    """The expected directory. `producer_id` is the next id to be allocated."""

    topics: dict[str, FoundTopic]
    producer_id: int


def open_directory(disk: SimulatedDisk, durability: str) -> LogDir:
    return logcore.open_dir(
        "d", create=True, fs=disk, durability=durability, config=DEFAULTS
    )


def look(logdir: LogDir) -> dict[str, FoundTopic]:
    found = {}
    for name in logdir.topics():
        numbers = logdir.partitions(name)
        assert numbers == tuple(range(len(numbers))), (
            f"{name} has the partitions {numbers}"
        )
        retention = logdir.describe_topic(name).overrides.get("retention.ms")
        logs = [FoundLog.of(logdir.partition(name, number)) for number in numbers]
        found[name] = FoundTopic(logdir.topic_id(name), retention, logs)
    return found


def outline(topics: dict[str, FoundTopic], *, probed: bool = False) -> dict[str, Any]:
    """To be compared. probed: with the record that recover() appends to each log."""
    return {
        name: (
            topic.topic_id,
            topic.retention,
            [
                (
                    log.start,
                    [
                        *log.records,
                        *([Record(log.end, 0, b"probe", b"probe")] if probed else []),
                    ],
                )
                for log in topic.logs
            ],
        )
        for name, topic in topics.items()
    }


def recover(
    disk: SimulatedDisk, durability: str, thorough: bool = False
) -> FoundDirectory:
    """Opens the directory, appends to each log, and opens it again."""
    with open_directory(disk, durability) as logdir:
        found = look(logdir)
        for name, topic in found.items():
            for number, log in enumerate(topic.logs):
                receipt = logdir.partition(name, number).append(
                    b"probe", key=b"probe", timestamp_ms=0
                )
                assert receipt.offset == log.end, (
                    f"{name}-{number} ends at {log.end}, and continues at {receipt.offset}"
                )
        producer_id = logdir.host.next_producer_id()
    partitions = {
        f"/d/{name}-{number}"
        for name, topic in found.items()
        for number in range(len(topic.logs))
    }
    there = {
        path
        for path, content in disk.view().items()
        if content is None and posixpath.dirname(path) == "/d"
    }
    assert there == partitions, "directories that belong to no topic"
    assert not disk.open_handles, f"still open: {disk.open_handles}"
    with open_directory(disk, durability) as logdir:
        again = outline(look(logdir))
        assert logdir.host.next_producer_id() > producer_id
    assert again == outline(found, probed=True), "opening again finds something else"
    if thorough:
        damaged = [
            verdict for verdict in verify("d", fs=disk) if verdict.status == "damaged"
        ]
        assert not damaged, damaged
    return FoundDirectory(found, producer_id)


class Program:
    """Calls on a directory, with random arguments."""

    def __init__(self, seed: int, durability: str, *, limit: int) -> None:
        self.rng = random.Random(seed)
        self.durability = durability
        self.disk = SimulatedDisk(
            seed=seed, names=self.rng.choice(("posix", "posix", "journal"))
        )
        self.topics: dict[str, Topic] = {}
        self.producer_id = -1
        self.count = seed * 1000
        self.logdir: LogDir | None = None
        self.staged: tuple[str, list[int]] | None = (
            None  # a write under way: its topic, where its partitions ended
        )
        self.explorer = Explorer(
            functools.partial(recover, durability=durability),
            self.check,
            thorough=functools.partial(recover, durability=durability, thorough=True),
            same=lambda found_directory, other: (
                outline(found_directory.topics) == outline(other.topics)
            ),
            restart=lambda disk: open_directory(disk, durability).close(),
            seed=seed,
            limit=limit,
            again_every=20,
        )
        self.explorer.attach(self.disk)

    def check(self, found: FoundDirectory, kind: Kind) -> None:
        others = found.topics.keys() - self.topics.keys()
        assert not others, f"{others} were deleted, or never made"
        for name, topic in self.topics.items():
            theirs = found.topics.get(name)
            if theirs is None:
                assert topic.may_lack, f"{name} is gone"
                continue
            assert topic.topic_id in (None, theirs.topic_id), f"{name} has another id"
            assert len(theirs.logs) in topic.counts, (
                f"{name} has {len(theirs.logs)} partitions of {topic.counts}"
            )
            assert theirs.retention in topic.retentions, (
                f"{name} has the retention {theirs.retention}"
            )
            for number, log in enumerate(theirs.logs):
                try:
                    topic.logs[number].check(log, kind)
                except AssertionError as error:
                    raise AssertionError(f"{name}-{number}: {error}") from error
        if self.staged is not None:
            name, ends = self.staged
            grew = [
                log.end > end
                for log, end in zip(found.topics[name].logs, ends, strict=True)
            ]
            assert len(set(grew)) == 1, f"a part of a staged write is in {name}: {grew}"
        assert found.producer_id > self.producer_id, "a producer id is given out twice"

    def run(self, actions: list[str]) -> Report:
        for action in ["open", *actions, "close"]:
            getattr(self, action)()
            self.explorer.check_promises()
        return self.explorer.finish()

    def opened(self) -> LogDir:
        self.open()
        assert self.logdir is not None
        return self.logdir

    def some(self) -> str | None:
        """Return the name of a random topic, or None."""
        return self.rng.choice(sorted(self.topics)) if self.topics else None

    # Each action does one thing, if there is an object to do it with: it declares the
    # possible outcomes, makes the call, and records the outcome.

    def open(self) -> None:
        if self.logdir is None:
            self.logdir = open_directory(self.disk, self.durability)

    def close(self) -> None:
        if self.logdir is not None:
            logdir = self.logdir
            self.logdir = None
            logdir.close()
            for topic in self.topics.values():
                for history in topic.logs.values():
                    history.acknowledge(len(history.records), "disk")

    def reopen(self) -> None:
        self.close()
        self.explorer.check_promises()
        self.open()

    def kill(self) -> None:
        """Kill the process and start it again, while the machine keeps running."""
        self.disk.kill()
        self.logdir = None
        logdir = self.opened()
        found = FoundDirectory(look(logdir), logdir.host.next_producer_id())
        self.check(found, "kill")
        self.producer_id = found.producer_id
        for name, topic in found.topics.items():
            for number, log in enumerate(topic.logs):
                self.topics[name].logs[number].continue_from(log)

    def write_back(self) -> None:
        self.disk.write_back()

    def create(self) -> None:
        free = sorted({"a", "b", "c"} - self.topics.keys())
        if not free:
            return
        name = self.rng.choice(free)
        count = self.rng.randint(1, 2)
        logdir = self.opened()
        config = self.rng.choice((KEPT, DELETED, COMPACTED))
        topic = Topic(
            config,
            {number: LogHistory(self.durability) for number in range(count)},
            {count},
        )
        self.topics[name] = topic
        self.explorer.check_promises()
        logdir.create_topic(name, count, config)
        topic.topic_id = logdir.topic_id(name)
        topic.may_lack = False

    def drop(self) -> None:
        name = self.some()
        if name is not None:
            self.opened()
            self.topics[name].may_lack = True
            self.explorer.check_promises()
            self.opened().delete_topic(name)
            del self.topics[name]

    def grow(self) -> None:
        name = self.some()
        if name is not None and max(self.topics[name].counts) < 3:
            logdir = self.opened()
            topic = self.topics[name]
            count = max(topic.counts) + 1
            topic.logs[count - 1] = LogHistory(self.durability)
            topic.counts.add(count)
            self.explorer.check_promises()
            logdir.add_partitions(name, count)
            topic.counts = {count}

    def alter(self) -> None:
        name = self.some()
        if name is not None:
            logdir = self.opened()
            topic = self.topics[name]
            retention = str(self.rng.randrange(1 << 40, 1 << 41))
            topic.retentions.add(retention)
            self.explorer.check_promises()
            logdir.alter_topic(name, {"retention.ms": retention})
            topic.retentions = {retention}

    def fork(self) -> None:
        name = self.some()
        free = sorted({"a", "b", "c"} - self.topics.keys())
        if name is None or not free:
            return
        logdir = self.opened()
        source = self.topics[name]
        new = self.rng.choice(free)
        at = {}
        logs = {}
        for number, history in source.logs.items():
            log = logdir.partition(name, number)
            at[number] = self.rng.randint(log.log_start_offset, log.high_watermark)
            logs[number] = copy.deepcopy(history)
            logs[number].truncate(at[number])
            logs[number].truncated()
        topic = Topic(
            source.config, logs, set(source.counts), retentions=set(source.retentions)
        )
        self.topics[new] = topic
        self.explorer.check_promises()
        logdir.fork(name, at, new)
        topic.topic_id = logdir.topic_id(new)
        topic.may_lack = False

    def producer(self) -> None:
        self.producer_id = self.opened().host.next_producer_id()

    def append(self) -> None:
        name = self.some()
        if name is None:
            return
        number = self.rng.choice(sorted(self.topics[name].logs))
        log = self.opened().partition(name, number)
        history = self.topics[name].logs[number]
        rows: list[tuple[bytes, bytes, tuple[()], int]] = []
        for _ in range(self.rng.choice([1, 1, 2, 5])):
            self.count += 1
            size = self.rng.choice([3, 40, 150])
            rows.append(
                (
                    b"k%d" % (size % 3),
                    (b"%d." % self.count * size)[:size],
                    (),
                    self.disk.now_ms(),
                )
            )
        end = log.log_end_offset
        history.issue(
            Record(end + index, row[3], row[0], row[1])
            for index, row in enumerate(rows)
        )
        receipt = log.append_many(rows)
        history.acknowledge(receipt.last_offset + 1, receipt.durability)

    def stage(self) -> None:
        """Stage a write like a Spark job. Tasks write staged files, the driver publishes
        them, and the next tick or opening appends them.
        """
        name = self.some()
        if name is None or self.topics[name].config is not KEPT:
            return
        logdir = self.opened()
        topic = self.topics[name]
        files = []
        self.count += 1
        writing = Staging(self.disk, "d")
        job = f"job{self.count}"
        writing.begin(job)
        ends = [
            logdir.partition(name, number).log_end_offset
            for number in sorted(topic.logs)
        ]
        for number, history in topic.logs.items():
            logdir.partition(
                name, number
            ).flush()  # or it may end lower, after records that are then not lost
            history.acknowledge(ends[number], "disk")
            values = [
                b"%d-%d;" % (self.count, index) * 5
                for index in range(self.rng.randint(1, 12))
            ]
            times = np.full(len(values), self.disk.now_ms(), np.int64)
            edges = np.concatenate(
                [[0], np.cumsum([len(value) for value in values])]
            ).astype(np.int64)
            task = StagedWriter(
                self.disk,
                "d",
                job,
                name,
                number,
                "0.1",
                LogConfig.parse(DEFAULTS),
                batch_bytes=200,
            )
            column = np.frombuffer(b"".join(values), np.uint8), edges, None
            task.append_columns(InputColumns(None, column, times, len(values)))
            files += task.close()
            history.issue(
                Record(ends[number] + index, self.disk.now_ms(), None, value)
                for index, value in enumerate(values)
            )
        self.staged = name, ends
        self.explorer.check_promises()
        writing.publish(
            Manifest(
                app_id=job, version=0, txid=job, files=files, topics={name: len(ends)}
            )
        )
        for history in topic.logs.values():
            history.acknowledge(len(history.records), "disk")
        self.explorer.check_promises()
        while writing.outcome(job, 0) == "pending":
            self._tick()
        self.staged = None

    def delete_records(self) -> None:
        name = self.some()
        if name is not None:
            number = self.rng.choice(sorted(self.topics[name].logs))
            log = self.opened().partition(name, number)
            history = self.topics[name].logs[number]
            before = self.rng.randint(log.log_start_offset, log.high_watermark)
            history.delete(before)
            log.delete_records(before)
            history.deleted()

    def tick(self) -> None:
        """Run the maintenance of half a minute: syncs, checkpoints, retention, compaction."""
        for _ in range(3):
            self.disk.advance(10_000)
            self._tick()

    def _tick(self) -> None:
        logdir = self.opened()
        for name, topic in self.topics.items():
            for number, history in topic.logs.items():
                if topic.config is DELETED:
                    history.delete(len(history.records))
                elif topic.config is COMPACTED:
                    active = logdir.partition(
                        name, number
                    ).host.writer.active  # which is not compacted, and may not last
                    history.compact(active.base_offset, self.disk.now_ms(), 0)
        self.explorer.check_promises()
        logdir.tick()
        for name, topic in self.topics.items():
            if topic.config is not KEPT:
                for number, history in topic.logs.items():
                    history.check_failed_call(
                        FoundLog.of(logdir.partition(name, number))
                    )


ACTIONS = (
    *("create",) * 3, *("append",) * 9, *("tick",) * 3, "drop", "grow", "alter", "fork", "producer", "delete_records",
    "stage", "reopen", "kill", "write_back",
)  # fmt: skip


def explored(seed: int) -> Report:
    rng = random.Random(seed)
    program = Program(seed, rng.choice(POLICIES), limit=rng.choice([6, 10]))
    actions = ["create", *rng.choices(ACTIONS, k=rng.randrange(5, 25))]
    try:
        return program.run(actions)
    except BaseException as error:
        program.disk.crash()
        error.add_note(f"explored({seed}): {program.durability}, {actions}")
        raise


@pytest.mark.parametrize(
    "count",
    [STATES, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(36000)])],
)
def test_random_histories_of_a_directory(count: int) -> None:
    total = Report()
    for seed in itertools.count():
        total += explored(seed)
        if total.states >= count:
            break
    print(total)
