"""Forwarders and mirrors in processes that are killed at random times, with any cluster
as the other side.

    python -m support.shippers KIND DATA BOOTSTRAP [end]

A shipper prints `ready` when it has begun to ship. It continues until it is killed, or
with `end` until all records are shipped. Batches are small, so that kills hit their
middle and the time between them.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import logcore
from logcore.kernels import Record
from logcore.shipping import Forwarder, KafkaCluster, Mirror

TESTS = Path(__file__).resolve().parents[1]
SOURCES = Path(logcore.__file__).resolve().parents[1]
TOPIC = "orders"
PARTITIONS = 2


def main(kind: str, data: str, bootstrap: str, end: str = "") -> None:
    until_end = bool(end)
    is_reported = False

    def report_ready() -> None:
        nonlocal is_reported
        if not is_reported and shipper.metrics().record_count:
            is_reported = True
            print("ready", flush=True)

    with contextlib.ExitStack() as stack:
        is_forwarder = kind in ("exactly-once", "at-least-once")
        logdir = stack.enter_context(
            logcore.open_dir(data, read_only=is_forwarder, durability="os")
        )
        cluster = stack.enter_context(KafkaCluster(bootstrap))
        shipper: Forwarder | Mirror
        if is_forwarder:
            shipper = Forwarder(
                logdir,
                cluster,
                topics=[TOPIC],
                at_least_once=kind == "at-least-once",
                max_records=40,
            )
        else:
            shipper = Mirror(logdir, cluster, topics=[TOPIC], offsets=kind)  # type: ignore[arg-type]
        stack.enter_context(shipper)
        shipper.run(until_end=until_end, after_step=report_ready)


def start(kind: str, data: Path, bootstrap: str, *more: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), str(TESTS)]),
    }
    command = [
        sys.executable,
        "-m",
        "support.shippers",
        kind,
        str(data),
        bootstrap,
        *more,
    ]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_often(
    kind: str,
    data: Path,
    bootstrap: str,
    kills: int,
    seed: int,
    before_each: Callable[[int], None],
) -> list[int]:
    """Start and kill a shipper `kills` times, then run a shipper until its end. Return
    the exit codes of the killed processes.

    Before a process starts, before_each() is called with the number of the round. It may
    add records.
    """
    rng = random.Random(seed)
    codes = []
    for round_number in range(kills):
        before_each(round_number)
        process = start(kind, data, bootstrap)
        assert process.stdout is not None
        if rng.random() < 0.7:  # otherwise the kill hits the start of the process
            process.stdout.readline()
        time.sleep(rng.random() * 0.3)
        process.kill()
        _, errors = process.communicate()
        codes.append(process.returncode)
        assert process.returncode == -9, errors
    before_each(kills)
    process = start(kind, data, bootstrap, "end")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return codes


def fill(log: logcore.Log, count: int) -> None:
    """Append records in batches of 7, with a key, a header and a time."""
    first = log.log_end_offset
    rows = [
        (b"k%d" % at, b"%d" % at, [("h", b"v")], 1_700_000_000_000 + at)
        for at in range(first, first + count)
    ]
    for at in range(0, count, 7):
        log.append_many(rows[at : at + 7])


def check_repeats(found: list[Record], expected: list[Record]) -> int:
    """Check the output of an at-least-once forwarder: no record is missing, and the first
    copies are in order. Return the number of repeated records.
    """
    values = [record.value for record in expected]
    position_of = {value: at for at, value in enumerate(values)}
    before = -1
    for record in found:
        at = position_of[record.value]
        assert at <= before + 1, f"{record} comes before its predecessor"
        before = at
    assert set(position_of) == {record.value for record in found}, "records are missing"
    return len(found) - len(expected)


def contents(records: list[Record]) -> list[tuple[object, ...]]:
    """Return all fields of records except the offsets."""
    return [tuple(record)[1:] for record in records]


if __name__ == "__main__":
    main(*sys.argv[1:])
