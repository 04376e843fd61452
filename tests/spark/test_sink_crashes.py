"""Tests of power cuts during the writes of a stream, with every possible state of the
disk. Each batch must be stored completely or not at all. The stream writer runs on the
simulated disk, and the test calls it like Spark. The rows of its tasks are sent in
messages (carried), in staged files, or in both. After a power cut, the restarted query
opens and reads the log. Then the test writes all batches again, with another number of
tasks. Only the missing batches are added.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from logcore.inspect.verify import verify
from logcore.testing import Explorer, Report, SimulatedDisk
from logcore.testing.crash_states import Kind, Names
from support.simulated_spark import source
from support.sinks import (
    BATCHES,
    CARRY_BYTES,
    CONFIGS,
    CONTENTS,
    PARTITIONS,
    TYPES,
    Content,
    Stream,
)


@attrs.frozen
class RecoveredPartitions:
    """The content of the partitions after the directory was opened, and after the
    stream was written again.
    """

    before: Content
    after: Content


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    simulated_stream = Stream("/d", monkeypatch)
    simulated_stream.count_names()
    return simulated_stream


def explore_power_cuts(
    stream: Stream, config: str, *, names: Names, limit: int, again_every: int
) -> Report:
    committed = [0]

    def recover(disk: SimulatedDisk) -> RecoveredPartitions:
        before = stream.content(disk)
        stream.use(disk)
        try:
            for batch_id in range(len(BATCHES)):
                stream.write(batch_id, 1 + (batch_id + 2) % 3)
        finally:
            stream.use(run)
        after = stream.content(disk)
        assert not disk.open_handles, f"still open: {disk.open_handles}"
        damaged_files = [
            verdict for verdict in verify("/d", fs=disk) if verdict.status == "damaged"
        ]
        assert not damaged_files, damaged_files
        return RecoveredPartitions(before, after)

    def check(recovered: RecoveredPartitions, kind: Kind) -> None:
        assert recovered.before in CONTENTS, (
            f"a part of a batch is stored: {[len(row) for row in recovered.before]}"
        )
        assert CONTENTS.index(recovered.before) >= committed[0], (
            f"batch {committed[0] - 1} was committed and is lost"
        )
        assert recovered.after == CONTENTS[-1], (
            f"after the replay: {[len(row) for row in recovered.after]}"
        )

    run = SimulatedDisk(names=names)
    stream.create(run, CONFIGS[config])
    stream.use(run)
    explorer = Explorer(
        recover,
        check,
        restart=lambda disk: stream.opening("/d", fs=disk).close(),
        again_every=again_every,
        limit=limit,
    )
    explorer.attach(run)
    try:
        for batch_id in range(len(BATCHES)):
            stream.write(batch_id, 2)
            committed[0] = batch_id + 1
            explorer.check_promises()
        return explorer.finish()
    except BaseException:
        run.crash()
        raise


#: The durability of file names, the number of checked states of the disk at each moment,
#: and n. In one of n openings, the power is cut again.
FAST_OPTIONS = ("posix", 1, 60)
LONG_OPTIONS = [("posix", 200, 5), ("journal", 200, 5)]
LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "names", "limit", "again_every"),
    [
        ("moved", *FAST_OPTIONS),
        pytest.param("appended", *FAST_OPTIONS, marks=LONG),
        *(
            pytest.param(config, *disks, marks=LONG)
            for config in CONFIGS
            for disks in LONG_OPTIONS
        ),
    ],
)
def test_power_cut_during_a_stream_leaves_complete_batches(
    stream: Stream, config: str, names: Names, limit: int, again_every: int
) -> None:
    report = explore_power_cuts(
        stream, config, names=names, limit=limit, again_every=again_every
    )
    print(report)
    assert report.states > 150


@pytest.mark.long
@pytest.mark.parametrize("limit", [1, pytest.param(2000, marks=pytest.mark.slow)])
def test_power_cut_during_an_unnamed_write_leaves_all_rows_or_none(
    stream: Stream, limit: int
) -> None:
    """The state of a completed write is deleted. If a power cut then restored the manifest
    of the write, no log could be opened.
    """
    committed = [0]

    def recover(disk: SimulatedDisk) -> Content:
        before = stream.content(disk)
        with stream.opening("/d", fs=disk) as directory:
            for partition in range(PARTITIONS):
                directory.partition("t", partition).append(b"after")
        assert stream.content(disk) == tuple((*values, b"after") for values in before)
        return before

    def check(found: Content, kind: Kind) -> None:
        assert found in CONTENTS, (
            f"a part of a write is stored: {[len(row) for row in found]}"
        )
        assert CONTENTS.index(found) >= committed[0], (
            f"write {committed[0] - 1} was committed and is lost"
        )

    run = SimulatedDisk()
    stream.create(run, {})
    stream.use(run)
    explorer = Explorer(
        recover,
        check,
        restart=lambda disk: stream.opening("/d", fs=disk).close(),
        limit=limit,
    )
    explorer.attach(run)
    try:
        for batch_id in range(2):
            logcore_writer = source(
                Path("/d"), topic="t", carryBytes=CARRY_BYTES
            ).writer(TYPES, False)
            logcore_writer.commit(stream.stage(logcore_writer.planned, batch_id, 2))
            committed[0] = batch_id + 1
            explorer.check_promises()
        print(explorer.finish())
    except BaseException:
        run.crash()
        raise
