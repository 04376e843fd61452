"""Every disk that a loss of power may leave of a stream that is written: each batch is
there whole or not at all.

The stream's writer itself runs on the simulated disk, called as Spark calls it. What
its tasks write comes home in messages (carried), in files that they staged, and in
both. A disk is opened as the restarted query would open it, and read; then all batches
are written again by another number of tasks, which adds what is missing and nothing
else.
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
from support.tasks import source


@attrs.frozen
class Found:
    """before: what each partition held when the directory was opened. after: when the
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

    def judge(found: Found, kind: Kind) -> None:
        assert found.before in WHOLE, (
            f"a part of a batch is there: {[len(one) for one in found.before]}"
        )
        assert WHOLE.index(found.before) >= done[0], (
            f"batch {done[0] - 1} was committed and is gone"
        )
        assert found.after == WHOLE[-1], (
            f"after the replay: {[len(one) for one in found.after]}"
        )

    live = SimulatedDisk(names=names)
    stream.create(live, CONFIGS[config])
    stream.use(live)
    explorer = Explorer(
        recover,
        judge,
        restart=lambda disk: stream.opening("/d", fs=disk).close(),
        again_every=again_every,
        limit=limit,
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


#: So many of the disks are judged that may be left at one moment; the power goes again
#: while one in so many is opened.
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
    """Its state is forgotten when it is done. A manifest that a power cut then brought
    back kept all logs closed.
    """
    done = [0]

    def recover(disk: SimulatedDisk) -> Content:
        before = stream.content(disk)
        with stream.opening("/d", fs=disk) as directory:
            for partition in range(PARTITIONS):
                directory.partition("t", partition).append(b"after")
        assert stream.content(disk) == tuple((*values, b"after") for values in before)
        return before

    def judge(found: Content, kind: Kind) -> None:
        assert found in WHOLE, (
            f"a part of a write is there: {[len(one) for one in found]}"
        )
        assert WHOLE.index(found) >= done[0], (
            f"write {done[0] - 1} was committed and is gone"
        )

    live = SimulatedDisk()
    stream.create(live, {})
    stream.use(live)
    explorer = Explorer(
        recover,
        judge,
        restart=lambda disk: stream.opening("/d", fs=disk).close(),
        limit=limit,
    )
    explorer.attach(live)
    try:
        for batch_id in range(2):
            one = source(Path("/d"), topic="t", carryBytes=CARRY_BYTES).writer(
                TYPES, False
            )
            one.commit(stream.stage(one.planned, batch_id, 2))
            done[0] = batch_id + 1
            explorer.promised()
        print(explorer.finish())
    except BaseException:
        live.crash()
        raise
