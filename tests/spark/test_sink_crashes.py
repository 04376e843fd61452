"""Every disk that a power cut may leave during the writes of a stream. Each batch must
be stored completely or not at all.

The stream's writer itself runs on the simulated disk, called as by Spark. The rows of
its tasks arrive in messages (carried), in files that they staged, and in both. Each
remaining disk is opened as by the restarted query, and read. Then all batches are
written again with another number of tasks. Only the missing batches are added.
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
    PARTITIONS,
    TYPES,
    WHOLE,
    Content,
    Stream,
)


@attrs.frozen
class Found:
    """The content of the partitions after the directory was opened, and after the
    stream was written again.
    """

    before: Content
    after: Content


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream("/d", monkeypatch)
    made.count_names()
    return made


def explored(
    stream: Stream, config: str, *, names: Names, limit: int, again_every: int
) -> Report:
    done = [0]

    def recover(disk: SimulatedDisk) -> Found:
        before = stream.content(disk)
        stream.use(disk)
        try:
            for batch_id in range(len(BATCHES)):
                stream.write(batch_id, 1 + (batch_id + 2) % 3)
        finally:
            stream.use(live)
        after = stream.content(disk)
        assert not disk.open_handles, f"still open: {disk.open_handles}"
        damaged = [
            verdict for verdict in verify("/d", fs=disk) if verdict.status == "damaged"
        ]
        assert not damaged, damaged
        return Found(before, after)

    def check(found: Found, kind: Kind) -> None:
        assert found.before in WHOLE, (
            f"a part of a batch is there: {[len(row) for row in found.before]}"
        )
        assert WHOLE.index(found.before) >= done[0], (
            f"batch {done[0] - 1} was committed and is gone"
        )
        assert found.after == WHOLE[-1], (
            f"after the replay: {[len(row) for row in found.after]}"
        )

    live = SimulatedDisk(names=names)
    stream.create(live, CONFIGS[config])
    stream.use(live)
    explorer = Explorer(
        recover,
        check,
        restart=lambda disk: stream.opening("/d", fs=disk).close(),
        again_every=again_every,
        limit=limit,
    )
    explorer.attach(live)
    try:
        for batch_id in range(len(BATCHES)):
            stream.write(batch_id, 2)
            done[0] = batch_id + 1
            explorer.check_promises()
        return explorer.finish()
    except BaseException:
        live.crash()
        raise


#: Number of checked disks for each moment, and the fraction of openings during which the
#: power is cut again.
SLICE = ("posix", 1, 60)
ALL = [("posix", 200, 5), ("journal", 200, 5)]
LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "names", "limit", "again_every"),
    [
        ("moved", *SLICE),
        pytest.param("appended", *SLICE, marks=LONG),
        *(
            pytest.param(config, *disks, marks=LONG)
            for config in CONFIGS
            for disks in ALL
        ),
    ],
)
def test_each_disk_a_power_cut_may_leave_of_a_stream(
    stream: Stream, config: str, names: Names, limit: int, again_every: int
) -> None:
    report = explored(stream, config, names=names, limit=limit, again_every=again_every)
    print(report)
    assert report.states > 150


@pytest.mark.long
@pytest.mark.parametrize("limit", [1, pytest.param(2000, marks=pytest.mark.slow)])
def test_each_disk_a_power_cut_may_leave_of_a_write_without_a_name(
    stream: Stream, limit: int
) -> None:
    """The state of a write is deleted when it is done. Otherwise, a manifest that a
    power cut restored kept all logs closed.
    """
    done = [0]

    def recover(disk: SimulatedDisk) -> Content:
        before = stream.content(disk)
        with stream.opening("/d", fs=disk) as directory:
            for partition in range(PARTITIONS):
                directory.partition("t", partition).append(b"after")
        assert stream.content(disk) == tuple((*values, b"after") for values in before)
        return before

    def check(found: Content, kind: Kind) -> None:
        assert found in WHOLE, (
            f"a part of a write is there: {[len(row) for row in found]}"
        )
        assert WHOLE.index(found) >= done[0], (
            f"write {done[0] - 1} was committed and is gone"
        )

    live = SimulatedDisk()
    stream.create(live, {})
    stream.use(live)
    explorer = Explorer(
        recover,
        check,
        restart=lambda disk: stream.opening("/d", fs=disk).close(),
        limit=limit,
    )
    explorer.attach(live)
    try:
        for batch_id in range(2):
            logcore_writer = source(
                Path("/d"), topic="t", carryBytes=CARRY_BYTES
            ).writer(TYPES, False)
            logcore_writer.commit(stream.stage(logcore_writer.planned, batch_id, 2))
            done[0] = batch_id + 1
            explorer.check_promises()
        print(explorer.finish())
    except BaseException:
        live.crash()
        raise
