"""Exports in processes that are killed at many points, and several exports at once: each
committed record is in the table once, and the progress fits the rows.

LOGCORE_LAKE_KILLS=n kills n times instead of 4; `make slow` does it 80 times.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

import logcore

pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

from support.lakes import (
    KINDS,
    PARTITIONS,
    TOPIC,
    committed_offsets,
    export,
    fill,
    offsets_of,
    processes,
    target,
)

KILLS = int(os.environ.get("LOGCORE_LAKE_KILLS", "4"))
LONG = pytest.param(80, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="many")
#: Approximate number of function calls in an export of the test's records. The last
#: calls are after the last commit.
CALLS = {"delta": 12_000, "iceberg": 400_000}


def check(kind: str, data: logcore.LogDir, place: Path) -> int:
    """Check that the rows are the records below the progress, and return their count."""
    state = target(kind, place).load(range(PARTITIONS))
    if state is None:
        return 0
    ends = {number: entry.next_offset for number, entry in state.progress.items()}
    found = offsets_of(kind, place)
    assert found == [
        (number, offset)
        for number, offset in committed_offsets(data)
        if offset < ends.get(number, 0)
    ]
    return len(found)


@pytest.mark.long
@pytest.mark.parametrize("kills", [KILLS, LONG])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_export_neither_loses_nor_repeats_a_row(
    tmp_path: Path, kind: str, kills: int
) -> None:
    """Half of the processes die at the n-th call of a function, which also falls between
    two steps of a commit. The others are killed at any time, also in compiled code.
    """
    chance = random.Random(kills)
    context = processes()
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic(TOPIC, PARTITIONS)
        fill(data, 480)
        killed = 0
        for turn in range(kills):
            die_at = 0
            if turn % 2:
                die_at = chance.randrange(1, CALLS[kind] // 2)
            process = context.Process(
                target=export, args=(kind, tmp_path / "data", tmp_path, die_at)
            )
            process.start()
            if not die_at:
                process.join(chance.uniform(0.05, 1.0))
                process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            assert process.exitcode in (0, -signal.SIGKILL)
            process.close()
            check(kind, data, tmp_path)
            fill(data, 48, 480 + 48 * turn)
        assert killed
        export(kind, tmp_path / "data", tmp_path)
        assert check(kind, data, tmp_path) == len(committed_offsets(data))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_exports_at_the_same_time_store_each_row_once(
    tmp_path: Path, kind: str
) -> None:
    context = processes()
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic(TOPIC, PARTITIONS)
        fill(data, 480)
        running = [
            context.Process(target=export, args=(kind, tmp_path / "data", tmp_path))
            for _ in range(3)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join()
            assert process.exitcode in (0, 3)
            process.close()
        check(kind, data, tmp_path)
        export(kind, tmp_path / "data", tmp_path)
        assert check(kind, data, tmp_path) == len(committed_offsets(data))
