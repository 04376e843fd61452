"""Trusted time: a wall clock that was set ahead deletes no records, neither immediately
nor after a restart.
"""

from __future__ import annotations

import pytest

import logcore
from logcore.metadata import checkpoint
from logcore.metadata.trusted_clock import (
    DISTRUST_MS,
    JUMP_MS,
    ClockReading,
    Trust,
    update_trust,
)
from logcore.testing import SimulatedDisk

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MINUTE_MS = 60_000
START = ClockReading(1_700_000_000_000, 50_000, "a")


def later(
    reading: ClockReading,
    passed_ms: int,
    *,
    wall_ms: int | None = None,
    boot: str = "a",
) -> ClockReading:
    """Return a reading after `passed_ms`. `wall_ms` is the change of the wall clock, if
    it differs.
    """
    wall_ms = passed_ms if wall_ms is None else wall_ms
    return ClockReading(
        reading.wall_ms + wall_ms, reading.monotonic_ms + passed_ms, boot
    )


@pytest.mark.parametrize("passed_ms", [0, 1, MINUTE_MS, 400 * DAY_MS])
@pytest.mark.parametrize("gap_ms", [0, JUMP_MS, -JUMP_MS])
def test_clock_that_agrees_with_the_monotonic_clock_is_trusted(
    passed_ms: int, gap_ms: int
) -> None:
    now = later(START, passed_ms, wall_ms=passed_ms + gap_ms)
    assert update_trust(Trust(START), now) == (Trust(now), now.wall_ms)


@pytest.mark.parametrize(
    "jump_ms", [JUMP_MS + 1, 30 * DAY_MS, -JUMP_MS - 1, -30 * DAY_MS]
)
def test_clock_that_was_set_is_not_trusted_for_a_day(jump_ms: int) -> None:
    trust = Trust(START)
    for passed_ms in range(MINUTE_MS, DISTRUST_MS + MINUTE_MS, 5 * MINUTE_MS):
        now = later(START, passed_ms, wall_ms=passed_ms + jump_ms)
        trust, trusted_ms = update_trust(trust, now)
        assert trusted_ms == min(now.wall_ms, START.wall_ms + passed_ms)
        assert trust.trusted == START and trust.suspect is not None
    now = later(
        START, DISTRUST_MS + MINUTE_MS, wall_ms=DISTRUST_MS + MINUTE_MS + jump_ms
    )
    assert update_trust(trust, now) == (Trust(now), now.wall_ms)


def test_clock_that_is_corrected_is_trusted_at_once() -> None:
    trust, _ = update_trust(Trust(START), later(START, MINUTE_MS, wall_ms=30 * DAY_MS))
    now = later(START, 2 * MINUTE_MS)
    assert update_trust(trust, now) == (Trust(now), now.wall_ms)


def test_suspect_clock_that_moves_back_restarts_the_day_of_distrust() -> None:
    trust, _ = update_trust(Trust(START), later(START, MINUTE_MS, wall_ms=30 * DAY_MS))
    first = later(START, DAY_MS, wall_ms=3 * DAY_MS)
    trust, _ = update_trust(trust, first)
    assert trust.suspect == first


def test_after_reboot_a_long_gap_is_trusted_after_a_day_of_wall_clock() -> None:
    """If a machine is started once a day to run a job, retention deletes records with a
    delay of a day.
    """
    boots = [
        ClockReading(START.wall_ms + day * DAY_MS, 5_000, f"boot {day}")
        for day in range(4)
    ]
    trust = Trust(START)
    was_trusted = []
    for boot in boots[1:]:
        trust, trusted_ms = update_trust(trust, boot)
        was_trusted.append(trusted_ms == boot.wall_ms)
    assert was_trusted == [False, True, False]


def open_aged(disk: SimulatedDisk) -> logcore.Log:
    return logcore.open(
        "/data/t-0",
        create=True,
        config={"retention.ms": 7 * DAY_MS, "segment.bytes": 300},
        fs=disk,
    )


def tick_each_minute(disk: SimulatedDisk, log: logcore.Log, minutes: int) -> None:
    for _ in range(minutes):
        disk.advance(MINUTE_MS)
        log.tick()


@pytest.mark.parametrize("restart", ["none", "process", "reboot"])
def test_clock_set_ahead_deletes_no_young_records(restart: str) -> None:
    """The second retention round trusted the new time, so that it deleted records of
    the last 5 minutes. After a restart with the wrong clock, the first round deleted
    them.
    """
    disk = SimulatedDisk()
    log = open_aged(disk)
    for _ in range(20):
        log.append(b"x" * 50)
    tick_each_minute(disk, log, 6)
    if restart != "none":
        log.close()
    if restart == "reboot":
        disk = next(disk.after_crash(limit=1))
    disk.set_wall_clock(disk.now_ms() + 30 * DAY_MS)
    if restart != "none":
        log = open_aged(disk)
    tick_each_minute(disk, log, 12 * 60)
    assert log.log_start_offset == 0
    tick_each_minute(disk, log, 13 * 60)
    assert log.log_start_offset == 20, "a clock that is steady for a day is trusted"
    log.close()


@pytest.mark.parametrize("content", [b"", b"00000000 {}\n", b"garbage", None])
def test_damaged_clock_file_is_ignored(content: bytes | None) -> None:
    disk = SimulatedDisk()
    with open_aged(disk) as log:
        log.append(b"x")
        tick_each_minute(disk, log, 6)
    disk.put(f"/data/{checkpoint.CLOCK}", content)
    with open_aged(disk) as log:
        assert [record.value for record in log.read(0)] == [b"x"]
