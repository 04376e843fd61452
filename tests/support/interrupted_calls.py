"""Calls of the public API that are interrupted at any line, and the invariants that
must hold afterwards.

A new Case is created for each line. act() makes the calls that are interrupted. check()
closes the objects and continues, like a program after an interrupt. Then it compares the
results.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Callable
from typing import Any, ClassVar

import logcore
from logcore.consumer import Consumer
from logcore.logdir import LogDir
from logcore.registry import open_registry
from logcore.testing import SimulatedDisk
from support.interrupting import interrupted

#: The number of a line that no call reaches.
_NEVER: int = 1 << 60


class Case:
    """A directory with one topic of two partitions, on a simulated disk."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.data = self.open()
        self.data.create_topic("t", 2)

    def open(self) -> LogDir:
        return logcore.open_dir("d", create=True, durability="os", fs=self.disk)

    def act(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Close the directory, and check that no lock of it remains."""
        self.data.close()
        self.open().close()


class Reading(Case):
    """A member of a group reads eight records. A record that was not returned before the
    interrupt is not committed.
    """

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._fill()

    def _fill(self) -> None:
        for number in range(8):
            self.data.append("t", b"%d" % number, partition=number % 2)
        self.seen: list[bytes] = []
        self.consumer = self.make()
        self.consumer.subscribe(["t"])

    def make(self) -> Consumer:
        return self.data.consumer(
            group_id="g", auto_offset_reset="earliest", **self.options
        )

    def read(self, consumer: Consumer) -> None:
        """Add records to `seen`, in lines that are not interrupted."""
        for records in consumer.poll(
            max_records=3
        )._records.values():  # not records(), a call of the library
            self.seen += [record.value for record in records]

    def act(self) -> None:
        while len(self.seen) < 8:
            self.read(self.consumer)

    def check(self) -> None:
        self.consumer.close()
        with self.make() as consumer:
            consumer.subscribe(["t"])
            for _ in range(8):
                self.read(consumer)
            assert len(consumer.assignment()) == 2, "a member is left in the group"
        assert sorted(set(self.seen)) == [b"%d" % number for number in range(8)], (
            "a record was skipped"
        )
        super().check()


class ReadingAfterInterrupt(Reading):
    """The same consumer continues after the interrupt."""

    def check(self) -> None:
        for _ in range(10):
            self.read(self.consumer)
        assert sorted(set(self.seen)) == [b"%d" % number for number in range(8)], (
            "a record was skipped"
        )
        super().check()


class ReadingColumns(Reading):
    def read(self, consumer: Consumer) -> None:
        for partition, pieces in consumer.poll_columns(max_bytes=2).items():
            # The values follow from the offsets. columns.records() is a call of the
            # library, in which the interrupt could lose columns that were returned.
            self.seen += [
                b"%d" % (2 * offset + partition.partition)
                for columns in pieces
                for offset in columns.offsets
            ]


class ReadingArrow(Reading):
    def read(self, consumer: Consumer) -> None:
        self.seen += consumer.poll_arrow(max_bytes=2)["value"].to_pylist()


class Iterating(Reading):
    options: ClassVar[dict[str, Any]] = {"consumer_timeout_ms": 0}

    def read(self, consumer: Consumer) -> None:
        for record in consumer:
            self.seen.append(record.value)


class Deserializing(Reading):
    options: ClassVar[dict[str, Any]] = {"value_deserializer": bytes}


class _Passing:
    def on_consume(self, records: Any) -> Any:
        return records

    def on_commit(self, offsets: Any) -> None:
        pass


class Intercepting(Iterating):
    options: ClassVar[dict[str, Any]] = {
        "consumer_timeout_ms": 0,
        "interceptors": (_Passing(),),
    }


class Streaming(Reading):
    options: ClassVar[dict[str, Any]] = {"assignors": ["range"]}

    def __init__(self) -> None:
        super().__init__()
        self.consumer.close()
        self.connector = self.data.connector(
            "g", auto_offset_reset="earliest", consumer_timeout_ms=0
        )
        [self.stream] = self.connector.create_message_streams({"t": 1})["t"]

    def act(self) -> None:
        for record in self.stream:
            self.seen.append(record.value)

    def check(self) -> None:
        self.connector.shutdown()
        super().check()


class Committing(Reading):
    """Each method that commits, and the methods that change which partitions are read."""

    options: ClassVar[dict[str, Any]] = {"enable_auto_commit": False}

    def __init__(self) -> None:
        super().__init__()
        self.commit_results: list[Any] = []
        while len(self.seen) < 8:
            self.read(self.consumer)

    def act(self) -> None:
        partition = ("t", 0)
        self.consumer.commit({partition: 1})
        self.consumer.commit_async(
            {partition: 2}, lambda error, _: self.commit_results.append(error)
        )
        self.consumer.commit()
        self.consumer.pause(partition)
        self.consumer.resume(partition)
        self.consumer.position(partition)
        self.consumer.lag()
        self.consumer.committed([partition])
        self.consumer.seek(partition, 2)
        self.consumer.seek_to_beginning(partition)
        self.consumer.seek_to_end(partition)
        self.consumer.end_offsets([partition])
        self.consumer.offsets_for_times({partition: 0})
        self.consumer.unsubscribe()
        self.consumer.assign([partition])
        self.consumer.poll()

    def check(self) -> None:
        waited = self.consumer.metrics().waiting_commits
        self.consumer.close()
        assert len(self.commit_results) >= waited, "a commit was forgotten"
        with self.make() as consumer:
            found = consumer.committed([("t", 0), ("t", 1)])
            assert {
                None if each is None else each.offset for each in found.values()
            } <= {None, 1, 2, 4}
            consumer.subscribe(["t"])
            for _ in range(4):
                consumer.poll()
            assert len(consumer.assignment()) == 2, "a member is left in the group"
        Case.check(self)


class Leaving(Reading):
    """A close() that was interrupted leaves the group, at the latest when it is called
    again. Records without a commit are read again.
    """

    def __init__(self) -> None:
        super().__init__()
        while len(self.seen) < 8:
            self.read(self.consumer)

    def act(self) -> None:
        self.consumer.close()

    def check(self) -> None:
        self.consumer.close()
        with self.make() as consumer:
            consumer.subscribe(["t"])
            again = sum(consumer.poll().count for _ in range(4))
            assert len(consumer.assignment()) == 2, "a member is left in the group"
            assert again in (0, 4, 8)
        Case.check(self)


class Rebalancing(Reading):
    """A second member joins and leaves while the first one reads."""

    def act(self) -> None:
        self.second = self.make()
        self.second.subscribe(["t"])
        for _ in range(6):
            self.read(self.consumer)
            self.read(self.second)
        self.second.close()

    def check(self) -> None:
        second = getattr(self, "second", None)
        if second is not None:
            second.close()
        super().check()


class Sharing(Reading):
    """Reads in a directory that several processes may share."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.data = self.open()
        self.data.create_topic("t", 2)
        self._fill()

    def open(self) -> LogDir:
        return logcore.open_dir(
            "d", create=True, durability="os", shared=True, fs=self.disk
        )


class SharingAfterInterrupt(Sharing, ReadingAfterInterrupt):
    pass


class Producing(Case):
    """Each record whose future has a result is stored once, at the offset of that
    result.
    """

    kind: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.producer = self.data.producer(threaded=False, linger_ms=0, **self.kind)
        self.futures: list[Any] = []

    def act(self) -> None:
        for number in range(4):
            self.futures.append(
                self.producer.send("t", b"%d" % number, partition=number % 2)
            )
        self.producer.poll()
        self.futures.append(
            self.producer.send_many("t", [(None, b"4"), (None, b"5")], partition=0)
        )
        self.producer.flush()
        self.producer.close()

    def check(self) -> None:
        self.producer.close()
        logs = [self.data.partition("t", number) for number in (0, 1)]
        stored = {
            (number, record.offset): record.value
            for number, log in enumerate(logs)
            for record in log.read(0)
        }
        values = sorted(stored.values())
        assert len(set(values)) == len(values), "a record is stored twice"
        for future in self.futures:
            assert future.done(), "a record has no outcome"
            if future.exception() is None and hasattr(future.result(), "offset"):
                assert (future.result().partition, future.result().offset) in stored
        super().check()


class Transacting(Case):
    """The records of a transaction are visible together or not at all, and no
    transaction remains open.
    """

    def __init__(self) -> None:
        super().__init__()
        for _ in range(4):
            self.data.append("t", b"in", partition=0)
        self.data.create_topic("out", 2)
        self.producer = self.make()

    def make(self) -> Any:
        return self.data.producer(transactional_id="id", threaded=False, linger_ms=0)

    def act(self) -> None:
        self.producer.init_transactions()
        for number in range(2):
            self.producer.begin_transaction()
            for partition in (0, 1):
                self.producer.send("out", b"%d" % number, partition=partition)
            with self.data.consumer(group_id="g") as consumer:
                self.producer.send_offsets_to_transaction(
                    {("t", 0): number + 1}, consumer.group_metadata()
                )
            self.producer.commit_transaction()
        self.producer.begin_transaction()
        self.producer.send("out", b"aborted", partition=0)
        self.producer.abort_transaction()
        self.producer.close()

    def check(self) -> None:
        self.producer.close()
        with self.make() as next_producer:
            next_producer.init_transactions()
        found = []
        for number in (0, 1):
            log = self.data.partition("out", number)
            assert log.last_stable_offset == log.high_watermark, (
                "a transaction stays open"
            )
            found.append(
                [record.value for record in log.read(0, isolation="read_committed")]
            )
        assert found[0] == found[1] and found[0] in ([], [b"0"], [b"0", b"1"])
        with self.data.consumer(group_id="g") as consumer:
            [committed] = consumer.committed([("t", 0)]).values()
        assert (0 if committed is None else committed.offset) == len(found[0])
        super().check()


class ManagingTopics(Case):
    """Each topic is in the state before or after a call. Every append that returned is
    stored, and all topics are usable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[bytes] = []

    def act(self) -> None:
        data = self.data
        data.create_topic("u", 1, {"retention.ms": "1000"})
        data.add_partitions("u", 2)
        data.alter_topic("u", {"retention.ms": None})
        for number in range(3):
            data.append("t", b"%d" % number, partition=0)
            self.stored.append(b"%d" % number)
        log = data.partition("t", 0)
        log.roll()
        log.flush()
        data.tick()
        data.fork("t", None, "v")
        data.snapshot("backup", keep=1)
        data.describe_topic("t")
        data.host.next_producer_id()
        data.host.open_again("t", 0)
        data.delete_topic("u")
        data.close()

    def check(self) -> None:
        self.data.close()
        with self.open() as data:
            found = [record.value for record in data.partition("t", 0).read(0)]
            assert found[: len(self.stored)] == self.stored
            for topic in data.topics():
                for number in data.partitions(topic):
                    data.append(topic, b"x", partition=number)
            if "u" not in data:
                data.create_topic("u")
            data.delete_topic("u")
        super().check()


class Opening(Case):
    """An open_dir() that was interrupted holds no lock. A close() that is called again
    releases all locks.
    """

    shared = False

    def act(self) -> None:
        self.data.close()
        self.data = self.open()
        self.data.partition("t", 0)
        self.data.partition("t", 1)


class OpeningFiles(Opening):
    """Opens real files, whose locks are released by other code than simulated locks."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        super().__init__()

    def open(self) -> LogDir:
        path = os.path.join(self.directory.name, "d")
        return logcore.open_dir(path, create=True, durability="os", shared=self.shared)

    def check(self) -> None:
        super().check()
        self.directory.cleanup()


class SharingFiles(OpeningFiles):
    shared = True


class Registering(Case):
    """Another process changes the same nodes afterwards, so no lock may remain."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = open_registry("r", fs=self.disk)

    def act(self) -> None:
        registry = self.registry
        registry.create("/a/b", b"1")
        registry.create("/a/e", b"1", ephemeral=True)
        registry.set("/a/b", b"2")
        registry.update("/a/b", lambda value: (value or b"") + b"3")
        with registry.holding("/a/b"):
            registry.set("/a/b", b"4")
        registry.poll()
        registry.get("/a/b")
        registry.children("/a")
        registry.sessions()
        registry.clean()
        registry.delete("/a/b")
        registry.close()

    def check(self) -> None:
        with open_registry("r", fs=self.disk, lock_timeout_ms=0) as other:
            other.update("/a/b", lambda value: b"5")
            other.create("/a/f", ephemeral=True)
        self.registry.close()
        with open_registry("r", fs=self.disk, lock_timeout_ms=0) as other:
            assert other.children("/a") == ["b"], (
                "a node of a session that ended is left"
            )
            other.clean()
            assert [session.id for session in other.sessions()] == [other.session.id]
        super().check()


def count_lines(case: Callable[[], Case]) -> int:
    """Return the number of lines of act() that can be interrupted."""
    made = case()
    left = interrupted(made.act, _NEVER).left
    made.check()
    return _NEVER - left


def interrupt_at(case: Callable[[], Case], nth: int) -> bool:
    """Interrupt act() at a line, and run check(). Return whether the line exists. An error
    of check() contains the line.
    """
    made = case()
    trace = interrupted(made.act, nth)
    try:
        gc.collect(0)
        made.check()
    except BaseException as error:
        error.add_note(f"interrupted at line {nth} of {case.__name__}: {trace.place}")
        raise
    finally:
        with contextlib.suppress(Exception):
            made.data.close()
    return trace.left == 0
