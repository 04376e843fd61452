"""Mutated frames of every served API and version, sent to a complete broker that also
serves an honest client.

Goal: no crash, no hang, no unbounded memory, and no harm to another client. Method:
support/hostile_clients.py runs a broker, and support/hostile_frames.py creates the frames.

`make check` sends some 70,000 frames, of which one core processes 5,000 a second. `make
slow` continues where it ended, up to 100,000,000. LOGCORE_FRAMES sets another goal, and
LOGCORE_FRAMES_SECONDS limits the time. A failure prints the seed of the run and the
frame.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from netshim import scheduling, wire
from support.hostile_clients import HostileSimulation, LoggedErrors, resident_bytes
from support.hostile_frames import Variants

GOAL = int(os.environ.get("LOGCORE_FRAMES", "100000000"))
SECONDS = float(os.environ.get("LOGCORE_FRAMES_SECONDS", "1800"))
FILE = Path(os.environ.get("LOGCORE_FRAMES_FILE", "build/frames.json"))
#: Limit of the memory that a run may add to the process, including stored records.
LIFE_BYTES = 256 << 20
#: Limit of the memory that remains after all runs. The simulated disk, which stores the
#: parts of 65,536 paths, uses half of it.
LEFT_BYTES = 250 << 20


@pytest.fixture
def errors() -> Iterator[LoggedErrors]:
    """Collect the errors that the broker and the library log. Other messages are
    disabled, because pytest would store a line for each frame.
    """
    handler = LoggedErrors()
    loggers = [logging.getLogger(name) for name in ("netshim", "logcore")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
    yield handler
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def run_simulation(
    seed: int, changes_per_frame: int, errors: LoggedErrors, *, is_secured: bool = False
) -> HostileSimulation:
    """Run a simulation. With an odd seed, requests of more than three partitions are
    processed in chunks.
    """
    before = resident_bytes()
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            patch.setattr(scheduling, "CHUNK_ENTRIES", 3)
        simulation = HostileSimulation(
            seed, changes_per_frame, errors, is_secured=is_secured
        )
        try:
            simulation.run_scripts()
        except Exception as error:
            error.add_note(f"seed {seed}, {changes_per_frame} changed copies per frame")
            raise
    assert simulation.most_bytes - before < LIFE_BYTES, (
        f"seed {seed}: {simulation.most_bytes - before} bytes"
    )
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12])
def test_mutated_frames_harm_neither_the_broker_nor_other_clients(
    seed: int, errors: LoggedErrors
) -> None:
    simulation = run_simulation(seed, 10, errors)
    assert simulation.outcomes["answered"] > 10_000, simulation.outcomes
    assert simulation.outcomes["closed"] > 5_000, simulation.outcomes
    assert simulation.honest.rounds > 50


@pytest.mark.long
@pytest.mark.parametrize(
    "changes_per_frame", [4, pytest.param(10, marks=pytest.mark.slow)]
)
def test_mutated_frames_do_not_pass_access_control(
    errors: LoggedErrors, changes_per_frame: int
) -> None:
    """Some malicious clients have not logged in, and some copy requests of the honest
    client.
    """
    simulation = run_simulation(15, changes_per_frame, errors, is_secured=True)
    assert simulation.outcomes["answered"] > 1_000 * changes_per_frame, (
        simulation.outcomes
    )
    assert simulation.outcomes["unknown, closed"] > 100 * changes_per_frame, (
        simulation.outcomes
    )
    assert simulation.honest.rounds > 5 * changes_per_frame


def test_variants_change_bytes_and_values_of_frames() -> None:
    request = wire.METADATA.Request(topics=[wire.METADATA.Request.Topic(name="t")])
    frame = wire.encode_request(wire.METADATA, 9, 1, "c", request)[4:]
    variants = Variants(frame, [frame], random.Random(3))
    drawn = {variants.draw() for _ in range(200)}
    decoded = []
    for variant in drawn:
        try:
            decoded.append(
                wire.decode_request(
                    wire.decode_header(memoryview(variant)), memoryview(variant)
                )
            )
        except wire.ProtocolError:
            continue
    assert 50 < len(decoded) < len(drawn)
    assert {
        len(request.topics or ())
        for request in decoded
        if isinstance(request, wire.METADATA.Request)
    } > {0, 1, 30}
    assert variants.draw() != frame


@pytest.mark.slow
@pytest.mark.timeout(4 * 3_600)
def test_hundred_million_mutated_frames(errors: LoggedErrors) -> None:
    """The counts are stored in a file."""
    kept = {"seed": 1_000_000, "frames": 0, "rounds": 0, "met": {}}
    if FILE.exists():
        kept = json.loads(FILE.read_text())
    outcomes = Counter(kept["met"])
    began = time.perf_counter()
    before = kept["frames"]
    first_bytes = 0
    while kept["frames"] < GOAL and time.perf_counter() - began < SECONDS:
        seed = kept["seed"]
        simulation = run_simulation(seed, 100, errors, is_secured=seed % 4 < 2)
        kept["seed"] += 1
        kept["frames"] += simulation.frames
        kept["rounds"] += simulation.honest.rounds
        outcomes += simulation.outcomes
        kept["met"] = dict(outcomes)
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(json.dumps(kept))
        del simulation
        first_bytes = first_bytes or resident_bytes()
        assert resident_bytes() - first_bytes < LEFT_BYTES, (
            f"{first_bytes} bytes after a life, now {resident_bytes()}"
        )
    rate = (kept["frames"] - before) / (time.perf_counter() - began)
    print(f"{kept['frames']} of {GOAL} frames, {rate:.0f} a second: {kept}")
