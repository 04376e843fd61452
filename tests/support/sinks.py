"""Simulates a query of Spark that writes three batches to a topic, without a JVM: its
planner, tasks and commits.
"""

from __future__ import annotations

import functools
import itertools
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyspark.sql.types as sql
import pytest

import logcore
from logcore.fs import FS
from pyspark_logcore import rows, staged, stream_writer, writer
from pyspark_logcore.stream_writer import LogcoreStreamWriter
from support.simulated_spark import frame, source

QUERY = "5a0c3a4e-query"
PARTITIONS = 2
#: For each batch: rows per partition, bytes of each row in the first half, and bytes of
#: each row in the second half. The sizes are below the limit of a task, above it, and both.
BATCHES = ((5, 10, 10), (12, 90, 90), (12, 10, 90))
CARRY_BYTES = 400
TYPES = sql.StructType(
    [
        sql.StructField("value", sql.BinaryType()),
        sql.StructField("partition", sql.IntegerType()),
    ]
)
#: Settings with which staged files are appended to the active segment, and with which
#: they become segments of their own.
CONFIGS: dict[str, dict[str, Any]] = {
    "appended": {},
    "moved": {"segment.bytes": 2000, "index.interval.bytes": 200},
}
Content = tuple[tuple[bytes, ...], ...]


def expected(batch_id: int, partition: int, query: str = QUERY) -> list[bytes]:
    count, first, others = BATCHES[batch_id]
    sizes = [first if number < count // 2 else others for number in range(count)]
    name = b"" if query == QUERY else query.encode() + b"-"
    return [
        (b"%s%d-%d-%d." % (name, batch_id, partition, number)).ljust(size, b"x")
        for number, size in enumerate(sizes)
    ]


#: The content of the topic after each number of written batches.
CONTENTS: Sequence[Content] = [
    tuple(
        tuple(itertools.chain(*(expected(batch, number) for batch in range(end))))
        for number in range(PARTITIONS)
    )
    for end in range(len(BATCHES) + 1)
]


class Stream:
    """A query that writes the batches repeatedly, on the file system that use() has set
    last.
    """

    def __init__(
        self,
        path: str | Path,
        patch: pytest.MonkeyPatch | None = None,
        query: str = QUERY,
        **given: Any,
    ) -> None:
        """Create a query. `patch` changes attributes of the modules of the writer, by
        default permanently.
        """
        self.path = str(path)
        self.query = query
        self.given = {"topic": "t", "carryBytes": CARRY_BYTES, **given}
        self.opening = logcore.open_dir
        self._patch = patch or pytest.MonkeyPatch()
        self._names = itertools.count()

    def count_names(self) -> None:
        """Replace random names by numbers, so that equal programs create equal names."""
        self._patch.setattr(
            staged.uuid, "uuid4", lambda: uuid.UUID(int=next(self._names))
        )

    def use(self, fs: FS) -> None:
        for module in (rows, staged, stream_writer, writer):
            self._patch.setattr(module, "OS", fs)
        self._patch.setattr(logcore, "open_dir", functools.partial(self.opening, fs=fs))
        # StagedWrite checks with it that the directory exists.
        self._patch.setattr(os.path, "isdir", lambda _: True)

    def create(self, fs: FS, config: dict[str, Any]) -> None:
        with self.opening(self.path, create=True, fs=fs) as directory:
            directory.create_topic("t", PARTITIONS, config)

    def writer(self) -> LogcoreStreamWriter:
        # Spark calls streamWriter() for the tasks and again for the commit.
        return source(Path(self.path), **self.given).streamWriter(TYPES, False)

    def write(self, batch_id: int, tasks: int) -> None:
        planned = stream_writer._numbered(self.writer().planned, batch_id)
        messages = self.stage(planned, batch_id, tasks, self.query)
        try:
            self.writer().commit(messages, batch_id)
        except Exception:
            self.writer().abort(messages, batch_id)
            raise

    def stage(
        self,
        planned: staged.StagedWrite,
        batch_id: int,
        tasks: int,
        query: str | None = None,
    ) -> list[Any]:
        """Run the tasks of a batch. Each task writes a share of the rows of each
        partition.
        """
        messages = []
        for task in range(tasks):
            values = []
            numbers = []
            for partition in range(PARTITIONS):
                all_values = expected(batch_id, partition, self.query)
                share = -(-len(all_values) // tasks)
                mine = all_values[task * share : (task + 1) * share]
                values += mine
                numbers += [partition] * len(mine)
            batch = frame(value=values, partition=numbers)
            number = None if query is None else batch_id
            messages.append(
                planned.stage(iter([batch]), task, next(self._names), query, number)
            )
        return messages

    def content(
        self, fs: FS, opening: Callable[..., Any] | None = None, **how: Any
    ) -> Content:
        """Return the content of each partition. The offsets must have no gap."""
        found = []
        with (opening or self.opening)(self.path, fs=fs, **how) as directory:
            for partition in range(PARTITIONS):
                records = list(directory.partition("t", partition).read(0))
                assert [record.offset for record in records] == list(
                    range(len(records))
                )
                found.append(tuple(record.value for record in records))
        return tuple(found)
