"""Processes that die by SIGKILL at each change they make on disk, and system calls that
fail: on the real library.

`make check` strikes at a choice of places, every kind of place first; `make slow` at all
of them, under one seed after the other, until the count is reached. -s prints the
figures and the seed.

    LOGCORE_KILLS, LOGCORE_STRACES    how many
    LOGCORE_KILL_SECONDS              after which `make slow` is content with fewer
    LOGCORE_TEST_SEED                 to repeat
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from logcore.directory.topics import TopicRegistry
from logcore.partition import recovery
from logcore.partition.writer import Writer
from support import real_faults
from support.real_faults import (
    POLICIES,
    WORKLOADS,
    Outcome,
    Site,
    Strike,
    Workload,
    read_messages,
    run_forked,
)

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_121
SECONDS = float(os.environ.get("LOGCORE_KILL_SECONDS", "3000"))


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, if the system has one: a kill loses nothing of the page
    cache, so no disk is needed.
    """
    shared = "/dev/shm"
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as path:
        yield Path(path)


@attrs.define
class Campaign:
    """Scenarios that are killed at many places, each in a directory of its own that is
    checked and removed.

    A scenario is a workload, a policy and a seed, on an empty disk or on the files that
    a first kill left.
    """

    root: Path
    kills: int = 0
    again: int = 0  # of these in the recovery from another kill
    places: Counter[tuple[str, Site, bool]] = attrs.Factory(Counter)
    counts: Counter[str] = attrs.Factory(Counter)
    number: int = 0

    @contextlib.contextmanager
    def disk(self, before: Path | None = None) -> Iterator[Path]:
        self.number += 1
        path = self.root / str(self.number)
        if before is None:
            path.mkdir()
        else:
            shutil.copytree(before, path)
        with contextlib.chdir(path):
            yield path
        shutil.rmtree(path)

    def strikes(self, scenario: Scenario) -> list[tuple[Strike, Site]]:
        """Every place at which this scenario can be struck: before each change, and
        inside each write.
        """
        with self.disk(scenario.before):
            outcome = scenario.run(None)
            scenario.witness_after(outcome).check(thorough=True)
        found = []
        for index, site in enumerate(outcome.sites):
            found.append((Strike(index), site))
            if site.operation == "pwrite":
                found.append(
                    (
                        Strike(
                            index,
                            random.Random(f"{scenario.seed}.{index}").choice(
                                [0.01, 0.5, 0.99]
                            ),
                        ),
                        site,
                    )
                )
        return found

    def kill(self, scenario: Scenario, strike: Strike, site: Site) -> None:
        with self.disk(scenario.before), told(scenario, strike, site):
            outcome = scenario.run(strike)
            assert outcome.was_killed, "it came to its end"
            self.kills += 1
            self.again += scenario.before is not None
            self.counts[scenario.workload.name] += 1
            self.places[scenario.workload.name, site, strike.part > 0] += 1
            scenario.witness_after(outcome).check(thorough=self.kills % 10 == 0)

    def torn(self, scenario: Scenario, rng: random.Random) -> Scenario:
        """Return the scenario of the recovery from a first kill. The disk is not checked
        before that recovery.
        """
        strike, site = rng.choice(self.strikes(scenario))
        path = self.root / f"torn-{self.number}"
        path.mkdir()
        with contextlib.chdir(path), told(scenario, strike, site):
            witness = scenario.witness_after(scenario.run(strike))
        then = WORKLOADS[scenario.workload.then.__name__]
        return Scenario(then, scenario.durability, scenario.seed + 1, path, witness)

    def __str__(self) -> str:
        each = ", ".join(
            f"{name} {count}" for name, count in sorted(self.counts.items())
        )
        return (
            f"{self.kills} kills at {len(self.places)} places ({each}), {self.again} of them in the recovery from "
            f"another kill: 0 acknowledged records lost, 0 changed, 0 invented; LOGCORE_TEST_SEED={SEED}"
        )


@attrs.frozen
class Scenario:
    workload: Workload
    durability: str
    seed: int
    before: Path | None = None
    witness: Any = None

    def run(self, strike: Strike | None) -> Outcome:
        return run_forked(self.workload, self.durability, self.seed, strike)

    def witness_after(self, outcome: Outcome, kind: str = "kill") -> Any:
        witness = copy.deepcopy(self.witness) or self.workload.witness(
            self.durability, kind
        )
        for message in outcome.messages:
            witness.receive(*message)
        return witness


@contextlib.contextmanager
def told(scenario: Scenario, strike: Strike, site: Site) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"{scenario.workload.name} under {scenario.durability!r}, seed {scenario.seed}, "
            f"{'after a kill, ' if scenario.before else ''}struck at {strike.at} ({strike.part:.0%} done): {site}"
        )
        raise


def scenarios(campaign: Campaign, seed: int) -> Iterator[Scenario]:
    """Every workload, each under a policy, and for each workload the recovery from a
    kill of it.
    """
    rng = random.Random(seed)
    for slot, workload in enumerate(WORKLOADS.values()):
        scenario = Scenario(
            workload, POLICIES[(slot + seed) % len(POLICIES)], rng.randrange(1 << 30)
        )
        yield scenario
        yield campaign.torn(scenario, rng)


@pytest.mark.long
def test_kills_at_every_kind_of_place(ram: Path) -> None:
    """First a kill at each distinct kind of place, then at random places."""
    count = int(os.environ.get("LOGCORE_KILLS", "18"))
    campaign = Campaign(ram)
    rng = random.Random(SEED)
    first: list[tuple[Scenario, Strike, Site]] = []
    rest: list[tuple[Scenario, Strike, Site]] = []
    seen: set[tuple[Site, bool, bool]] = set()
    for scenario in scenarios(campaign, SEED):
        for strike, site in campaign.strikes(scenario):
            place = site, strike.part > 0, scenario.before is not None
            (rest if place in seen else first).append((scenario, strike, site))
            seen.add(place)
    rng.shuffle(first)
    rng.shuffle(rest)
    for scenario, strike, site in [*first, *rest][:count]:
        campaign.kill(scenario, strike, site)
    print(
        campaign, f"of {len(first) + len(rest)} places, {len(first)} unlike any other"
    )
    assert campaign.kills == min(count, len(first) + len(rest))


@pytest.mark.slow
def test_a_hundred_thousand_kills(ram: Path) -> None:
    count = int(os.environ.get("LOGCORE_KILLS", "100000"))
    campaign = Campaign(ram)
    began = time.monotonic()
    seed = SEED
    while campaign.kills < count and time.monotonic() - began < SECONDS:
        for scenario in scenarios(campaign, seed):
            for strike, site in campaign.strikes(scenario):
                campaign.kill(scenario, strike, site)
            if scenario.before is not None:
                shutil.rmtree(scenario.before)
        seed += 1
    print(campaign, f"{time.monotonic() - began:.0f} s")


def late_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each append writes the batch of the previous append."""
    write = Writer.write_locked
    held = []

    def write_locked(writer: Any, data: Any, last: int, *rest: Any) -> None:
        held.append((bytes(data), last, *rest))
        if len(held) > 1:
            write(writer, *held.pop(0))
        writer.state.end = last + 1

    monkeypatch.setattr(Writer, "write_locked", write_locked)


def no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "set_checkpoint", lambda *_: None)


def no_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_copy_tail", lambda *_: None)


def save_topics_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directories of a topic are created before the file that lists the topic."""
    save = TopicRegistry.save

    def late_save(
        registry: Any, *changed: Any, deleting: Any = (), **others: Any
    ) -> None:
        new = [
            entry
            for entry in deleting
            if not os.path.exists(os.path.join(registry.path, f"{entry.name}-0"))
        ]
        registry.make_partitions((topic, topic.numbers) for topic in new)
        save(registry, *changed, deleting=deleting, **others)

    monkeypatch.setattr(TopicRegistry, "save", late_save)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "lie"),
    [
        ("appends", late_write),
        ("deletes", no_checkpoint),
        pytest.param("rolls", no_quarantine, marks=pytest.mark.slow),
        ("topics", save_topics_last),
    ],
)
def test_kills_reveal_a_log_with_a_seeded_bug(
    ram: Path, workload: str, lie: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of the tests: each bug shows only after a crash, and some kill finds it."""
    lie(monkeypatch)
    campaign = Campaign(ram)
    scenario = Scenario(WORKLOADS[workload], "os", SEED)
    with pytest.raises((AssertionError, logcore.LogcoreError)) as met:
        # An order that soon reaches the middle.
        for at in sorted(range(200), key=lambda at: (at % 7, at)):
            with campaign.disk():
                outcome = scenario.run(Strike(at, 0.5))
                if not outcome.was_killed:
                    continue
                scenario.witness_after(outcome).check(thorough=False)
    print(f"{lie.__name__}: {met.value!r}"[:200])


# -- system calls of a spawned process that fail, or kill ------------------------------

CALLS = "openat,pwrite64,ftruncate,fdatasync,fsync,/^rename,/^unlink,/^mkdir,/^rmdir"
LINE = re.compile(r"(?:\d+ +)?(\w+)\((.*)")
FAULTS = ("signal=KILL", "error=EIO", "error=ENOSPC")


def spawn(workload: str, durability: str, seed: int, *options: str) -> Outcome:
    """Runs a workload as a program of its own under strace."""
    program = [sys.executable, real_faults.__file__, workload, durability, str(seed)]
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        ["strace", "-f", "-qq", *options, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        output, noise = process.communicate()
    try:
        return Outcome.of(read_messages(io.BytesIO(output)), process.returncode)
    except AssertionError as error:
        error.add_note(noise.decode(errors="replace")[-2000:])
        raise


@attrs.frozen
class Call:
    """The nth call of this name that a program makes; nth counts from 1, the start of
    Python included.
    """

    name: str
    nth: int
    file: str


def calls_of(workload: str, durability: str, seed: int) -> list[Call]:
    """The calls of an undisturbed run that change something on the disk."""
    spawn(workload, durability, seed, "-y", "-o", "trace", "-e", f"trace={CALLS}")
    found = []
    counts: Counter[str] = Counter()
    for line in Path("trace").read_text(errors="replace").splitlines():
        if (met := LINE.match(line)) is None:
            continue
        name, rest = met.groups()
        counts[name] += 1
        file = re.search(rf"(?:\./|{re.escape(os.getcwd())}/)([\w./-]+)", rest)
        if (
            file
            and (name != "openat" or "O_CREAT" in rest)
            and not file[1].endswith(("trace", ".lock"))
        ):
            found.append(
                Call(name, counts[name], re.sub(r"\d+", "N", os.path.basename(file[1])))
            )
    os.unlink("trace")
    return found


@pytest.fixture
def strace(ram: Path) -> Path:
    if shutil.which("strace") is None:
        pytest.skip("needs strace (Debian: apt install strace)")
    done = subprocess.run(
        ["strace", "-o", ram / "probe", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(
            f"strace may not trace here: {done.stderr.strip().splitlines()[:1]}"
        )
    return ram


def inject(
    campaign: Campaign,
    count: int,
    names: Iterator[str],
    rng: random.Random,
    until: float,
) -> Counter[str]:
    """Strikes at system calls, those of each kind first; returns how often with what."""
    met: Counter[str] = Counter()
    for name in names:
        policy = rng.choice(POLICIES)
        seed = rng.randrange(1 << 30)
        scenario = Scenario(WORKLOADS[name], policy, seed)
        with campaign.disk():
            calls = calls_of(name, policy, seed)
        rng.shuffle(calls)
        kinds = {(call.name, call.file): call for call in calls}
        for call, fault in zip([*kinds.values(), *calls], itertools.cycle(FAULTS)):
            if met.total() == count or time.monotonic() > until:
                return met
            when = (
                f"{call.nth}{'+' if fault != FAULTS[0] and rng.random() < 0.3 else ''}"
            )
            options = (
                "-o",
                "/dev/null",
                "-e",
                f"trace={call.name}",
                "-e",
                f"inject={call.name}:{fault}:when={when}",
            )
            with campaign.disk():
                try:
                    outcome = spawn(name, policy, seed, *options)
                    assert outcome.was_killed == (fault == FAULTS[0])
                    scenario.witness_after(outcome).check(thorough=True)
                except BaseException as error:
                    error.add_note(
                        f"{name} under {policy!r}, seed {seed}: {options[-1]} in {call}"
                    )
                    raise
            met[f"{call.name} {fault}"] += 1
    return met


def test_system_calls_that_fail_or_kill(strace: Path) -> None:
    rng = random.Random(SEED)
    met = inject(
        Campaign(strace),
        int(os.environ.get("LOGCORE_STRACES", "1")),
        iter(["deletes"]),
        rng,
        float("inf"),
    )
    print(f"{met.total()} injected: {dict(met)}; LOGCORE_TEST_SEED={SEED}")


@pytest.mark.slow
def test_many_system_calls_that_fail_or_kill(strace: Path) -> None:
    rng = random.Random(SEED)
    count = int(os.environ.get("LOGCORE_STRACES", "200"))
    each = [name for name in WORKLOADS if not name.startswith("continues")]
    until = time.monotonic() + SECONDS
    met: Counter[str] = Counter()
    for name in itertools.cycle(each):
        more = inject(
            Campaign(strace),
            min(count - met.total(), count // len(each) + 1),
            iter([name]),
            rng,
            until,
        )
        met += more
        if met.total() >= count or not more:
            break
    print(f"{met.total()} injected: {dict(met)}; LOGCORE_TEST_SEED={SEED}")
