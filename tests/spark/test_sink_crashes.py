"""Every disk that a loss of power may leave of a stream that is written: each batch is there whole or not at all.

The stream's writer itself runs on the simulated disk, called as Spark calls it. What its tasks write comes home in
messages (carried), in files that they staged, and in both. A disk is opened as the restarted query would open it, and
read; then all batches are written again by another number of tasks, which adds what is missing and nothing else.
"""

from __future__ import annotations

import functools
import itertools
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyspark.sql.types as sql

import logcore
from logcore.inspect.verify import verify
from logcore.testing import Explorer, Report, SimulatedDisk
from logcore.testing.crashstates import Kind, Names
from pyspark_logcore import rows, staged, streamwriter, writer
from pyspark_logcore.streamwriter import LogcoreStreamWriter
from support.tasks import frame, source

QUERY = "5a0c3a4e-query"
PARTITIONS = 2
#: Of each batch, how many rows a partition gets, and how many bytes the first and the other rows have: below what a
#: task may carry, above it, and both.
BATCHES = ((5, 10, 10), (12, 90, 90), (12, 10, 90))
CARRY_BYTES = 400
TYPES = sql.StructType([sql.StructField("value", sql.BinaryType()), sql.StructField("partition", sql.IntegerType())])
#: Where pieces become segments of their own, and where they are appended to the active one.
CONFIGS: dict[str, dict[str, Any]] = {"appended": {}, "moved": {"segment.bytes": 2000, "index.interval.bytes": 200}}


def expected(batch_id: int, partition: int) -> list[bytes]:
    count, first, others = BATCHES[batch_id]
    sizes = [first if number < count // 2 else others for number in range(count)]
    return [(b"%d-%d-%d." % (batch_id, partition, number)).ljust(size, b"x") for number, size in enumerate(sizes)]


Content = tuple[tuple[bytes, ...], ...]
WHOLE: Sequence[Content] = [
    tuple(tuple(itertools.chain(*(expected(batch, one) for batch in range(end)))) for one in range(PARTITIONS))
    for end in range(len(BATCHES) + 1)
]


@attrs.frozen
class Found:
    """before: what each partition held when the directory was opened. after: when the stream was written again."""

    before: Content
    after: Content


class Stream:
    """A query that writes the batches to a topic on a disk, as often as it is asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._open_dir = logcore.open_dir
        self._names = itertools.count()
        monkeypatch.setattr(staged.uuid, "uuid4", lambda: uuid.UUID(int=next(self._names)))

    def use(self, disk: SimulatedDisk) -> None:
        for module in (rows, staged, streamwriter, writer):
            self._patch.setattr(module, "OS", disk)
        self._patch.setattr(logcore, "open_dir", functools.partial(self._open_dir, fs=disk))
        self._patch.setattr(os.path, "isdir", lambda _: True)  # which StagedWrite.plan() asks of the directory

    def writer(self) -> LogcoreStreamWriter:
        # Spark calls streamWriter() for the tasks and again for the commit.
        return source("/d", topic="t", carryBytes=CARRY_BYTES).streamWriter(TYPES, False)

    def write(self, batch_id: int, tasks: int) -> None:
        planned = streamwriter._numbered(self.writer().planned, batch_id)
        self.writer().commit(self.stage(planned, batch_id, tasks, QUERY), batch_id)

    def stage(self, planned: staged.StagedWrite, batch_id: int, tasks: int, query: str | None = None) -> list[Any]:
        """What the tasks do with a batch; each has a share of the rows of each partition."""
        messages = []
        for task in range(tasks):
            values = []
            numbers = []
            for partition in range(PARTITIONS):
                all_values = expected(batch_id, partition)
                share = -(-len(all_values) // tasks)
                mine = all_values[task * share : (task + 1) * share]
                values += mine
                numbers += [partition] * len(mine)
            batch = frame(value=values, partition=numbers)
            number = None if query is None else batch_id
            messages.append(planned.stage(iter([batch]), task, next(self._names), query, number))
        return messages


def content(disk: SimulatedDisk, open_dir: Callable[..., Any]) -> Content:
    found = []
    with open_dir("/d", fs=disk) as directory:
        for partition in range(PARTITIONS):
            records = list(directory.partition("t", partition).read(0))
            assert [record.offset for record in records] == list(range(len(records))), "offsets have a gap"
            found.append(tuple(record.value for record in records))
    return tuple(found)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    yield Stream(monkeypatch)


def explored(stream: Stream, config: dict[str, Any], *, names: Names, limit: int, again_every: int) -> Report:
    done = [0]
    opening = stream._open_dir

    def recover(disk: SimulatedDisk) -> Found:
        before = content(disk, opening)
        stream.use(disk)
        try:
            for batch_id in range(len(BATCHES)):
                stream.write(batch_id, 1 + (batch_id + 2) % 3)
        finally:
            stream.use(live)
        after = content(disk, opening)
        assert not disk.open_handles, f"still open: {disk.open_handles}"
        damaged = [verdict for verdict in verify("/d", fs=disk) if verdict.status == "damaged"]
        assert not damaged, damaged
        return Found(before, after)

    def judge(found: Found, kind: Kind) -> None:
        assert found.before in WHOLE, f"a part of a batch is there: {[len(one) for one in found.before]}"
        assert WHOLE.index(found.before) >= done[0], f"batch {done[0] - 1} was committed and is gone"
        assert found.after == WHOLE[-1], f"after the replay: {[len(one) for one in found.after]}"

    live = SimulatedDisk(names=names)
    with opening("/d", create=True, fs=live) as directory:
        directory.create_topic("t", PARTITIONS, config)
    stream.use(live)
    explorer = Explorer(
        recover, judge, restart=lambda disk: opening("/d", fs=disk).close(), again_every=again_every, limit=limit
    )
    explorer.attach(live)
    try:
        for batch_id in range(len(BATCHES)):
            stream.write(batch_id, 2)
            done[0] = batch_id + 1
            explorer.promised()
        return explorer.finish()
    except BaseException:
        live.crash()
        raise


#: So many of the disks are judged that may be left at one moment; the power goes again while one in so many is opened.
SLICE = ("posix", 1, 20)
ALL = [
    pytest.param(names, 200, 5, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]) for names in ("posix", "journal")
]


@pytest.mark.parametrize(("names", "limit", "again_every"), [SLICE, *ALL])
@pytest.mark.parametrize("config", CONFIGS)
def test_each_disk_a_power_cut_may_leave_of_a_stream(
    stream: Stream, config: str, names: Names, limit: int, again_every: int
) -> None:
    report = explored(stream, CONFIGS[config], names=names, limit=limit, again_every=again_every)
    print(report)
    assert report.states > 150


def test_each_disk_a_power_cut_may_leave_of_a_write_without_a_name(stream: Stream) -> None:
    """Its state is forgotten when it is done. A manifest that a power cut then brought back kept all logs closed."""
    opening = stream._open_dir
    done = [0]

    def recover(disk: SimulatedDisk) -> Content:
        before = content(disk, opening)
        with opening("/d", fs=disk) as directory:
            for partition in range(PARTITIONS):
                directory.partition("t", partition).append(b"after")
        after = content(disk, opening)
        assert after == tuple((*values, b"after") for values in before)
        return before

    def judge(found: Content, kind: Kind) -> None:
        assert found in WHOLE, f"a part of a write is there: {[len(one) for one in found]}"
        assert WHOLE.index(found) >= done[0], f"write {done[0] - 1} was committed and is gone"

    live = SimulatedDisk()
    with opening("/d", create=True, fs=live) as directory:
        directory.create_topic("t", PARTITIONS)
    stream.use(live)
    explorer = Explorer(recover, judge, restart=lambda disk: opening("/d", fs=disk).close(), limit=30)
    explorer.attach(live)
    try:
        for batch_id in range(2):
            planned = source("/d", topic="t", carryBytes=CARRY_BYTES).writer(TYPES, False)
            messages = stream.stage(planned.planned, batch_id, 2)
            planned.commit(messages)
            done[0] = batch_id + 1
            explorer.promised()
        print(explorer.finish())
    except BaseException:
        live.crash()
        raise
