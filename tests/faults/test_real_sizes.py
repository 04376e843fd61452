"""Tests that take minutes: real sizes, and many crashes. `make slow` runs them. A
failure prints its seed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import logcore
from logcore.log import Log

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or random.SystemRandom().randrange(
    1 << 32
)


@pytest.fixture(autouse=True)
def print_the_seed() -> None:
    print(f"repeat with LOGCORE_TEST_SEED={SEED}")


WRITER = """
import random, sys, logcore
rng = random.Random(int(sys.argv[3]))
config = {"segment.bytes": 8_000, "index.interval.bytes": 200, "batch.size": 600}
with logcore.open(sys.argv[1], create=True, durability=sys.argv[2], config=config) as log:
    end = log.log_end_offset
    while True:
        choice = rng.random()
        if choice < 0.7:
            rows = [(None, b"value %d" % (end + step)) for step in range(rng.randrange(1, 90))]
            end = log.append_many(rows).last_offset + 1
        elif choice < 0.95:
            end = log.append(b"value %d" % end).offset + 1
        elif choice < 0.97:
            log.roll()
        else:
            log.close()
            log = logcore.open(sys.argv[1], durability=sys.argv[2], config=config)
        print(end, flush=True)
"""


@pytest.mark.parametrize("policy", ["always", "group", "every(5)", "interval(3)", "os"])
def test_hundreds_of_kills_lose_no_acknowledged_record(
    partition: Path, policy: str
) -> None:
    rng = random.Random(SEED)
    for round_ in range(120):
        command = [
            sys.executable,
            "-c",
            WRITER,
            str(partition),
            policy,
            str(rng.randrange(1 << 32)),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            acknowledged = 0
            for _ in range(rng.randrange(1, 60)):
                acknowledged = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout.read().split("\n")[:-1]:
                acknowledged = int(line)
        with logcore.open(partition, config={"segment.bytes": 8_000}) as log:
            assert log.log_end_offset >= acknowledged, f"round {round_}"
            start = max(0, acknowledged - 2_000)
            values = [record.value for record in log.read(start)]
            assert values == [
                b"value %d" % number for number in range(start, log.log_end_offset)
            ], f"round {round_}"


def test_gigabytes_are_read_back_unchanged(partition: Path) -> None:
    """Append 25 million records (3 GB) in segments of 512 MiB, and read them as
    columns, by offset and by time, also after reopening.
    """
    rows = 100_000
    data = np.random.default_rng(SEED).integers(0, 256, rows * 100, np.uint8)
    offsets = np.arange(rows + 1, dtype=np.int64) * 100
    with logcore.open(
        partition, create=True, config={"segment.bytes": 1 << 29}, durability="os"
    ) as log:
        for chunk in range(250):
            log.append_columns(
                values=(data, offsets), timestamps_ms=np.arange(rows) + chunk * rows
            )
        check_gigabytes(log, rows, data)
    with logcore.open(partition) as log:
        check_gigabytes(log, rows, data)


def check_gigabytes(log: Log, rows: int, data: np.ndarray) -> None:
    end = log.log_end_offset
    assert end == 250 * rows
    record_count = 0
    for columns in log.scan():
        assert columns.offsets[0] == record_count
        assert np.array_equal(columns.timestamps_ms, columns.offsets)
        assert (columns.value_sizes == 100).all()
        record_count += len(columns)
    assert record_count == end
    rng = random.Random(SEED)
    for _ in range(2_000):
        offset = rng.randrange(end)
        row = offset % rows
        assert log.get(offset).value == data[row * 100 : row * 100 + 100].tobytes()
    for _ in range(20):
        time = rng.randrange(end)
        assert log.offset_for_timestamp(time) == time
