"""Recipes of examples/delivery.py, killed at each change of a log file or of the
database.
"""

from __future__ import annotations

import os
import runpy
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from support.real_faults import FaultingFS, PlannedFault, fork

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "delivery.py"
RECIPES: dict[str, Any] = runpy.run_path(str(EXAMPLE))["RECIPES"]
TABLES: str = runpy.run_path(str(EXAMPLE))["TABLES"]
COUNT = 20
#: How often a row may exist after a kill and a second run.
ALLOWED_COUNTS = {
    "at_most_once": {0, 1},
    "at_least_once": {1, 2},
    "upserted": {1},
    "exactly_once": {1},
    "outbox": {1},
}


def prepare(path: Path) -> None:
    with logcore.open_dir(path / "data", create=True) as directory:
        directory.create_topic("orders", 2)
        directory.create_topic("sent", 2)
        for number in range(COUNT):
            directory.partition("orders", number % 2).append(b"%d" % number)
    database = sqlite3.connect(path / "out.sqlite")
    database.executescript(TABLES)
    with database:
        database.executemany(
            "INSERT INTO outbox (value) VALUES (?)",
            [(b"%d" % number,) for number in range(COUNT)],
        )
    database.close()


def run(path: Path, recipe: str, planned_fault: PlannedFault | None) -> int:
    """Run a recipe, and return the number of changes, or -1 if the process was killed."""

    def run_recipe(pipe: int) -> int:
        fs = FaultingFS(planned_fault)
        database = sqlite3.connect(path / "out.sqlite")

        def statement(text: str) -> None:
            if not text.startswith("SELECT"):
                with fs._step("sql", str(path)):
                    pass

        database.set_trace_callback(statement)
        with logcore.open_dir(path / "data", fs=fs) as directory:
            RECIPES[recipe](directory, database)
        database.close()
        os.write(pipe, b"%d" % len(fs.sites))
        return 0

    child, pipe = fork(run_recipe)
    with pipe:
        output = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGKILL:
        return -1
    assert code == 0, output
    return int(output)


def stored(path: Path, recipe: str) -> Counter[bytes]:
    if recipe == "outbox":
        with logcore.open_dir(path / "data") as directory:
            return Counter(record.value or b"" for record in directory.read("sent"))
    database = sqlite3.connect(path / "out.sqlite")
    table = "once" if recipe == "upserted" else "payments"
    counts_by_value = Counter(
        value for (value,) in database.execute(f"SELECT value FROM {table}")
    )
    database.close()
    return counts_by_value


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path = root / f"delivery-{os.getpid()}"
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ALLOWED_COUNTS)
@pytest.mark.parametrize("interval", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_at_each_change_keeps_the_delivery_guarantee(
    folder: Path, recipe: str, interval: int
) -> None:
    (folder / "calm").mkdir()
    prepare(folder / "calm")
    changes = run(folder / "calm", recipe, None)
    assert set(stored(folder / "calm", recipe).values()) == {1}
    all_observed: Counter[int] = Counter()
    for change in range(0, changes, interval):
        path = folder / str(change)
        path.mkdir()
        prepare(path)
        assert run(path, recipe, PlannedFault(change)) == -1
        run(path, recipe, None)
        counts_by_value = stored(path, recipe)
        observed = Counter(counts_by_value[b"%d" % number] for number in range(COUNT))
        assert set(observed) <= ALLOWED_COUNTS[recipe], (
            f"killed at change {change}: {counts_by_value}"
        )
        all_observed += observed
    if interval == 1:
        assert set(all_observed) == ALLOWED_COUNTS[recipe], (
            "each permitted count was observed"
        )


def test_change_of_owner_is_detected(folder: Path) -> None:
    """A consumer that lost its partition during its work does not store records that
    the next owner has already stored.
    """
    prepare(folder)
    listener = runpy.run_path(str(EXAMPLE))["StoredOffsets"]
    database = sqlite3.connect(folder / "out.sqlite")
    with logcore.open_dir(folder / "data") as directory:
        consumer = directory.consumer()
        consumer.assign([("orders", 0)])
        late_callback = listener(consumer, database)
        late_callback.on_partitions_assigned(consumer.assignment())
        RECIPES["exactly_once"](directory, database)
        with pytest.raises(RuntimeError, match="another owner"), database:
            late_callback.move(next(iter(consumer.assignment())), 7)
        consumer.close()
    assert set(stored(folder, "exactly_once").values()) == {1}
    database.close()


@pytest.mark.long
def test_example_runs_as_a_program(folder: Path) -> None:
    prepare(folder)
    command = [
        sys.executable,
        str(EXAMPLE),
        str(folder / "data"),
        str(folder / "out.sqlite"),
    ]
    subprocess.run([*command, "exactly_once"], check=True, timeout=60)
    assert set(stored(folder, "exactly_once").values()) == {1}
    assert (
        subprocess.run(
            [*command, "twice"], check=False, capture_output=True, timeout=60
        ).returncode
        == 2
    )
