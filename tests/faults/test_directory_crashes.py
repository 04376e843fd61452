"""Tests of crashes of a directory of topics, with every possible state of the disk.
After a crash, exactly the acknowledged topics exist.

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
#: Settings of topics: keep all records, delete records above a size, and compact at
#: each tick.
KEPT: dict[str, Any] = {}
DELETED: dict[str, Any] = {"retention.bytes": 400}
COMPACTED: dict[str, Any] = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": 0,
    "delete.retention.ms": 0,
}


@attrs.define
class Topic:
    """A topic that the program expects."""

    config: dict[str, Any]
    logs: dict[int, LogHistory]
    #: The possible numbers of partitions. There are two while partitions are added.
    counts: set[int]
    #: None while the topic is created.
    topic_id: uuid.UUID | None = None
    #: The possible values of retention.ms.
    retentions: set[str | None] = attrs.field(factory=lambda: {None})
    #: True while the topic is created or deleted.
    may_be_missing: bool = True


@attrs.frozen
class FoundTopic:
    topic_id: uuid.UUID
    retention: str | None
    logs: list[FoundLog]


@attrs.frozen
class FoundDirectory:
    """The topics of an opened directory, and the next producer id that it allocates."""

    topics: dict[str, FoundTopic]
    producer_id: int


def open_directory(disk: SimulatedDisk, durability: str) -> LogDir:
    return logcore.open_dir(
        "d", create=True, fs=disk, durability=durability, config=DEFAULTS
    )


def read_topics(logdir: LogDir) -> dict[str, FoundTopic]:
    topics = {}
    for name in logdir.topics():
        numbers = logdir.partitions(name)
        assert numbers == tuple(range(len(numbers))), (
            f"{name} has the partitions {numbers}"
        )
        retention = logdir.describe_topic(name).overrides.get("retention.ms")
        logs = [FoundLog.of(logdir.partition(name, number)) for number in numbers]
        topics[name] = FoundTopic(logdir.topic_id(name), retention, logs)
    return topics


def comparable(
    topics: dict[str, FoundTopic], *, probed: bool = False
) -> dict[str, Any]:
    """Return the id, retention.ms, log starts and records of each topic, to compare
    two openings. If `probed` is set, the record that recover() appends to each log
    is added.
    """
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
    """Open the directory, append to each log, and open the directory again."""
    with open_directory(disk, durability) as logdir:
        topics = read_topics(logdir)
        for name, topic in topics.items():
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
        for name, topic in topics.items()
        for number in range(len(topic.logs))
    }
    directories = {
        path
        for path, content in disk.view().items()
        if content is None and posixpath.dirname(path) == "/d"
    }
    assert directories == partitions, "partition directories of a missing topic"
    assert not disk.open_handles, f"still open: {disk.open_handles}"
    with open_directory(disk, durability) as logdir:
        reopened = comparable(read_topics(logdir))
        assert logdir.host.next_producer_id() > producer_id
    assert reopened == comparable(topics, probed=True), (
        "the second opening returns other content"
    )
    if thorough:
        damaged_files = [
            verdict for verdict in verify("d", fs=disk) if verdict.status == "damaged"
        ]
        assert not damaged_files, damaged_files
    return FoundDirectory(topics, producer_id)


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
        #: The topic of a staged write that is not finished, and the log end offset of
        #: each partition before the write.
        self.staged: tuple[str, list[int]] | None = None
        self.explorer = Explorer(
            functools.partial(recover, durability=durability),
            self.check,
            thorough=functools.partial(recover, durability=durability, thorough=True),
            same=lambda found_directory, other: (
                comparable(found_directory.topics) == comparable(other.topics)
            ),
            restart=lambda disk: open_directory(disk, durability).close(),
            seed=seed,
            limit=limit,
            again_every=20,
        )
        self.explorer.attach(self.disk)

    def check(self, found: FoundDirectory, kind: Kind) -> None:
        deleted_topics = found.topics.keys() - self.topics.keys()
        assert not deleted_topics, f"{deleted_topics} are deleted, or were not created"
        for name, topic in self.topics.items():
            found_topic = found.topics.get(name)
            if found_topic is None:
                assert topic.may_be_missing, f"{name} is gone"
                continue
            assert topic.topic_id in (None, found_topic.topic_id), (
                f"{name} has another id"
            )
            assert len(found_topic.logs) in topic.counts, (
                f"{name} has {len(found_topic.logs)} partitions of {topic.counts}"
            )
            assert found_topic.retention in topic.retentions, (
                f"{name} has the retention {found_topic.retention}"
            )
            for number, log in enumerate(found_topic.logs):
                try:
                    topic.logs[number].check(log, kind)
                except AssertionError as error:
                    raise AssertionError(f"{name}-{number}: {error}") from error
        if self.staged is not None:
            name, ends = self.staged
            has_grown = [
                log.end > end
                for log, end in zip(found.topics[name].logs, ends, strict=True)
            ]
            assert len(set(has_grown)) == 1, (
                f"a part of a staged write is in {name}: {has_grown}"
            )
        assert found.producer_id > self.producer_id, "a producer id is allocated twice"

    def run(self, actions: list[str]) -> Report:
        for action in ["open", *actions, "close"]:
            getattr(self, action)()
            self.explorer.check_promises()
        return self.explorer.finish()

    def open_logdir(self) -> LogDir:
        self.open()
        assert self.logdir is not None
        return self.logdir

    def random_topic(self) -> str | None:
        """Return the name of a random topic, or None."""
        return self.rng.choice(sorted(self.topics)) if self.topics else None

    # Each action declares the possible outcomes of a call, makes the call, and records
    # the outcome. An action without a suitable topic does nothing.

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
        logdir = self.open_logdir()
        directory = FoundDirectory(read_topics(logdir), logdir.host.next_producer_id())
        self.check(directory, "kill")
        self.producer_id = directory.producer_id
        for name, topic in directory.topics.items():
            for number, log in enumerate(topic.logs):
                self.topics[name].logs[number].continue_from(log)

    def write_back(self) -> None:
        self.disk.write_back()

    def create(self) -> None:
        unused_names = sorted({"a", "b", "c"} - self.topics.keys())
        if not unused_names:
            return
        name = self.rng.choice(unused_names)
        count = self.rng.randint(1, 2)
        logdir = self.open_logdir()
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
        topic.may_be_missing = False

    def drop(self) -> None:
        name = self.random_topic()
        if name is not None:
            self.open_logdir()
            self.topics[name].may_be_missing = True
            self.explorer.check_promises()
            self.open_logdir().delete_topic(name)
            del self.topics[name]

    def add_partition(self) -> None:
        name = self.random_topic()
        if name is not None and max(self.topics[name].counts) < 3:
            logdir = self.open_logdir()
            topic = self.topics[name]
            count = max(topic.counts) + 1
            topic.logs[count - 1] = LogHistory(self.durability)
            topic.counts.add(count)
            self.explorer.check_promises()
            logdir.add_partitions(name, count)
            topic.counts = {count}

    def alter(self) -> None:
        name = self.random_topic()
        if name is not None:
            logdir = self.open_logdir()
            topic = self.topics[name]
            retention = str(self.rng.randrange(1 << 40, 1 << 41))
            topic.retentions.add(retention)
            self.explorer.check_promises()
            logdir.alter_topic(name, {"retention.ms": retention})
            topic.retentions = {retention}

    def fork(self) -> None:
        name = self.random_topic()
        unused_names = sorted({"a", "b", "c"} - self.topics.keys())
        if name is None or not unused_names:
            return
        logdir = self.open_logdir()
        source = self.topics[name]
        new_name = self.rng.choice(unused_names)
        offsets = {}
        logs = {}
        for number, history in source.logs.items():
            log = logdir.partition(name, number)
            offsets[number] = self.rng.randint(log.log_start_offset, log.high_watermark)
            logs[number] = copy.deepcopy(history)
            logs[number].truncate(offsets[number])
            logs[number].truncated()
        topic = Topic(
            source.config, logs, set(source.counts), retentions=set(source.retentions)
        )
        self.topics[new_name] = topic
        self.explorer.check_promises()
        logdir.fork(name, offsets, new_name)
        topic.topic_id = logdir.topic_id(new_name)
        topic.may_be_missing = False

    def producer(self) -> None:
        self.producer_id = self.open_logdir().host.next_producer_id()

    def append(self) -> None:
        name = self.random_topic()
        if name is None:
            return
        number = self.rng.choice(sorted(self.topics[name].logs))
        log = self.open_logdir().partition(name, number)
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
        name = self.random_topic()
        if name is None or self.topics[name].config is not KEPT:
            return
        logdir = self.open_logdir()
        topic = self.topics[name]
        files = []
        self.count += 1
        staging = Staging(self.disk, "d")
        job = f"job{self.count}"
        staging.begin(job)
        ends = [
            logdir.partition(name, number).log_end_offset
            for number in sorted(topic.logs)
        ]
        for number, history in topic.logs.items():
            # Without a flush, the partition may end lower after a crash.
            logdir.partition(name, number).flush()
            history.acknowledge(ends[number], "disk")
            values = [
                b"%d-%d;" % (self.count, index) * 5
                for index in range(self.rng.randint(1, 12))
            ]
            times = np.full(len(values), self.disk.now_ms(), np.int64)
            bounds = np.concatenate(
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
            column = np.frombuffer(b"".join(values), np.uint8), bounds, None
            task.append_columns(InputColumns(None, column, times, len(values)))
            files += task.close()
            history.issue(
                Record(ends[number] + index, self.disk.now_ms(), None, value)
                for index, value in enumerate(values)
            )
        self.staged = name, ends
        self.explorer.check_promises()
        staging.publish(
            Manifest(
                app_id=job, version=0, txid=job, files=files, topics={name: len(ends)}
            )
        )
        for history in topic.logs.values():
            history.acknowledge(len(history.records), "disk")
        self.explorer.check_promises()
        while staging.outcome(job, 0) == "pending":
            self._tick()
        self.staged = None

    def delete_records(self) -> None:
        name = self.random_topic()
        if name is not None:
            number = self.rng.choice(sorted(self.topics[name].logs))
            log = self.open_logdir().partition(name, number)
            history = self.topics[name].logs[number]
            before = self.rng.randint(log.log_start_offset, log.high_watermark)
            history.delete(before)
            log.delete_records(before)
            history.deleted()

    def tick(self) -> None:
        """Run the maintenance of 30 seconds: syncs, checkpoints, retention and
        compaction.
        """
        for _ in range(3):
            self.disk.advance(10_000)
            self._tick()

    def _tick(self) -> None:
        logdir = self.open_logdir()
        for name, topic in self.topics.items():
            for number, history in topic.logs.items():
                if topic.config is DELETED:
                    history.delete(len(history.records))
                elif topic.config is COMPACTED:
                    # The active segment is not compacted.
                    active = logdir.partition(name, number).host.writer.active
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
    *("create",) * 3, *("append",) * 9, *("tick",) * 3, "drop", "add_partition", "alter", "fork", "producer",
    "delete_records", "stage", "reopen", "kill", "write_back",
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
def test_crash_after_random_calls_keeps_acknowledged_topics(count: int) -> None:
    total = Report()
    for seed in itertools.count():
        total += explored(seed)
        if total.states >= count:
            break
    print(total)
