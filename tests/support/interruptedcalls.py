"""Calls of the public API that are interrupted at any line, and what must hold afterwards. No tests.

A Case is made afresh for each line. act() is the call, or a few, in which the interrupt comes. judge() is the program
that caught it: it closes what it has open, goes on, and compares.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, ClassVar

import logcore
from logcore.consumer import Consumer
from logcore.logdir import LogDir
from logcore.testing import SimulatedDisk
from support.interrupting import interrupted

_ALL: int = 1 << 60


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

    def judge(self) -> None:
        """Closes the directory, and sees that no claim of it is left."""
        self.data.close()
        self.open().close()


class Reading(Case):
    """Eight records are read by a member of a group. Each is returned before the interrupt, or not committed."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            self.data.append("t", b"%d" % number, partition=number % 2)
        self.seen: list[bytes] = []
        self.consumer = self.make()
        self.consumer.subscribe(["t"])

    def make(self) -> Consumer:
        return self.data.consumer(group_id="g", auto_offset_reset="earliest", **self.options)

    def read(self, consumer: Consumer) -> None:
        """Adds records to `seen`, in lines that are not interrupted."""
        for records in consumer.poll(max_records=3)._found.values():  # not records(), a call of the library
            self.seen += [record.value for record in records]

    def act(self) -> None:
        while len(self.seen) < 8:
            self.read(self.consumer)

    def judge(self) -> None:
        self.consumer.close()
        with self.make() as consumer:
            consumer.subscribe(["t"])
            for _ in range(8):
                self.read(consumer)
            assert len(consumer.assignment()) == 2, "a member is left in the group"
        assert sorted(set(self.seen)) == [b"%d" % number for number in range(8)], "a record was passed over"
        super().judge()


class ReadingOn(Reading):
    """The same consumer goes on after the interrupt."""

    def judge(self) -> None:
        for _ in range(10):
            self.read(self.consumer)
        assert sorted(set(self.seen)) == [b"%d" % number for number in range(8)], "a record was passed over"
        super().judge()


class ReadingColumns(Reading):
    def read(self, consumer: Consumer) -> None:
        for one, pieces in consumer.poll_columns(max_bytes=2).items():
            # By the offsets: columns.records() is a call of the library, and the program has the columns already.
            self.seen += [b"%d" % (2 * offset + one.partition) for columns in pieces for offset in columns.offsets]


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
    options: ClassVar[dict[str, Any]] = {"consumer_timeout_ms": 0, "interceptors": (_Passing(),)}


class Streaming(Reading):
    options: ClassVar[dict[str, Any]] = {"assignors": ["range"]}

    def __init__(self) -> None:
        super().__init__()
        self.consumer.close()
        self.connector = self.data.connector("g", auto_offset_reset="earliest", consumer_timeout_ms=0)
        [self.stream] = self.connector.create_message_streams({"t": 1})["t"]

    def act(self) -> None:
        for record in self.stream:
            self.seen.append(record.value)

    def judge(self) -> None:
        self.connector.shutdown()
        super().judge()


def count_lines(case: Callable[[], Case]) -> int:
    """How many lines of a call can be interrupted."""
    made = case()
    left = interrupted(made.act, _ALL).left
    made.judge()
    return _ALL - left


def interrupt_at(case: Callable[[], Case], nth: int) -> bool:
    """Whether the call had an nth line. Raises what a broken promise raises, with the line."""
    made = case()
    trace = interrupted(made.act, nth)
    try:
        gc.collect(0)
        made.judge()
    except BaseException as error:
        error.add_note(f"interrupted at line {nth} of {case.__name__}: {trace.place}")
        raise
    finally:
        with contextlib.suppress(Exception):
            made.data.close()
    return trace.left == 0
