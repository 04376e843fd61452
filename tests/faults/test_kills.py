"""Processes that are killed by SIGKILL at each change that they make on disk, and
system calls that fail. `make check` kills at some of the places, and first at each kind
of place. `make slow` kills at all places, with one seed after the other, until the
count is reached. -s prints the figures and the seed.

    LOGCORE_KILLS, LOGCORE_STRACES    number of kills, and of faults in system calls
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
    PlannedFault,
    Site,
    Workload,
    read_messages,
    run_forked,
)

SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or 20_261_121
SECONDS = float(os.environ.get("LOGCORE_KILL_SECONDS", "3000"))


@pytest.fixture
def ram_directory(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory in memory, if the system has one. A kill loses nothing of the
    page cache, so that the tests need no disk.
    """
    shared = "/dev/shm"
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as path:
        yield Path(path)


@attrs.define
class Campaign:
    """Scenarios that are killed at many places, each in another directory that is
    checked and removed.

    A scenario is a workload, a policy and a seed, on an empty disk or on the files that
    a first kill left.
    """

    root: Path
    kills: int = 0
    #: The number of kills in the recovery from another kill.
    kills_in_recovery: int = 0
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

    def planned_faults(self, scenario: Scenario) -> list[tuple[PlannedFault, Site]]:
        """Return each place at which this scenario can be killed: before each change,
        and inside each write.
        """
        with self.disk(scenario.before):
            outcome = scenario.run(None)
            scenario.checker_after(outcome).check(thorough=True)
        faults_and_sites = []
        for index, site in enumerate(outcome.sites):
            faults_and_sites.append((PlannedFault(index), site))
            if site.operation == "pwrite":
                faults_and_sites.append(
                    (
                        PlannedFault(
                            index,
                            random.Random(f"{scenario.seed}.{index}").choice(
                                [0.01, 0.5, 0.99]
                            ),
                        ),
                        site,
                    )
                )
        return faults_and_sites

    def kill(self, scenario: Scenario, planned_fault: PlannedFault, site: Site) -> None:
        with self.disk(scenario.before), note_on_error(scenario, planned_fault, site):
            outcome = scenario.run(planned_fault)
            assert outcome.was_killed, "the scenario ended before the kill"
            self.kills += 1
            self.kills_in_recovery += scenario.before is not None
            self.counts[scenario.workload.name] += 1
            self.places[scenario.workload.name, site, planned_fault.part > 0] += 1
            scenario.checker_after(outcome).check(thorough=self.kills % 10 == 0)

    def recovery_scenario(self, scenario: Scenario, rng: random.Random) -> Scenario:
        """Return the scenario of the recovery from a first kill. The disk is not checked
        before that recovery.
        """
        planned_fault, site = rng.choice(self.planned_faults(scenario))
        path = self.root / f"torn-{self.number}"
        path.mkdir()
        with contextlib.chdir(path), note_on_error(scenario, planned_fault, site):
            checker = scenario.checker_after(scenario.run(planned_fault))
        workload_of_recovery = WORKLOADS[scenario.workload.next_run.__name__]
        return Scenario(
            workload_of_recovery, scenario.durability, scenario.seed + 1, path, checker
        )

    def __str__(self) -> str:
        counts = ", ".join(
            f"{name} {count}" for name, count in sorted(self.counts.items())
        )
        return (
            f"{self.kills} kills at {len(self.places)} places ({counts}), {self.kills_in_recovery} of them in the "
            f"recovery from another kill: 0 acknowledged records lost, 0 changed, 0 invented; LOGCORE_TEST_SEED={SEED}"
        )


@attrs.frozen
class Scenario:
    workload: Workload
    durability: str
    seed: int
    before: Path | None = None
    checker: Any = None

    def run(self, planned_fault: PlannedFault | None) -> Outcome:
        return run_forked(self.workload, self.durability, self.seed, planned_fault)

    def checker_after(self, outcome: Outcome, kind: str = "kill") -> Any:
        checker = copy.deepcopy(self.checker) or self.workload.checker(
            self.durability, kind
        )
        for message in outcome.messages:
            checker.receive(*message)
        return checker


@contextlib.contextmanager
def note_on_error(
    scenario: Scenario, planned_fault: PlannedFault, site: Site
) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"{scenario.workload.name} under {scenario.durability!r}, seed {scenario.seed}, "
            f"{'after a kill, ' if scenario.before else ''}killed at {planned_fault.at}"
            f" ({planned_fault.part:.0%} done): {site}"
        )
        raise


def scenarios(campaign: Campaign, seed: int) -> Iterator[Scenario]:
    """Yield each workload under a policy, and for each workload its recovery from a
    kill.
    """
    rng = random.Random(seed)
    for slot, workload in enumerate(WORKLOADS.values()):
        scenario = Scenario(
            workload, POLICIES[(slot + seed) % len(POLICIES)], rng.randrange(1 << 30)
        )
        yield scenario
        yield campaign.recovery_scenario(scenario, rng)


@pytest.mark.long
def test_kills_at_each_kind_of_place_lose_no_acknowledged_record(
    ram_directory: Path,
) -> None:
    """Kill at each distinct kind of place first, and then at random places."""
    count = int(os.environ.get("LOGCORE_KILLS", "18"))
    campaign = Campaign(ram_directory)
    rng = random.Random(SEED)
    of_new_kinds: list[tuple[Scenario, PlannedFault, Site]] = []
    of_known_kinds: list[tuple[Scenario, PlannedFault, Site]] = []
    seen: set[tuple[Site, bool, bool]] = set()
    for scenario in scenarios(campaign, SEED):
        for planned_fault, site in campaign.planned_faults(scenario):
            kind_of_place = site, planned_fault.part > 0, scenario.before is not None
            (of_known_kinds if kind_of_place in seen else of_new_kinds).append(
                (scenario, planned_fault, site)
            )
            seen.add(kind_of_place)
    rng.shuffle(of_new_kinds)
    rng.shuffle(of_known_kinds)
    for scenario, planned_fault, site in [*of_new_kinds, *of_known_kinds][:count]:
        campaign.kill(scenario, planned_fault, site)
    print(
        campaign,
        f"of {len(of_new_kinds) + len(of_known_kinds)} places of {len(of_new_kinds)} kinds",
    )
    assert campaign.kills == min(count, len(of_new_kinds) + len(of_known_kinds))


@pytest.mark.slow
def test_hundred_thousand_kills_lose_no_acknowledged_record(
    ram_directory: Path,
) -> None:
    count = int(os.environ.get("LOGCORE_KILLS", "100000"))
    campaign = Campaign(ram_directory)
    start_s = time.monotonic()
    seed = SEED
    while campaign.kills < count and time.monotonic() - start_s < SECONDS:
        for scenario in scenarios(campaign, seed):
            for planned_fault, site in campaign.planned_faults(scenario):
                campaign.kill(scenario, planned_fault, site)
            if scenario.before is not None:
                shutil.rmtree(scenario.before)
        seed += 1
    print(campaign, f"{time.monotonic() - start_s:.0f} s")


def late_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each append writes the batch of the previous append."""
    write = Writer.write_locked
    delayed = []

    def write_locked(writer: Any, data: Any, last: int, *arguments: Any) -> None:
        delayed.append((bytes(data), last, *arguments))
        if len(delayed) > 1:
            write(writer, *delayed.pop(0))
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
        created = [
            entry
            for entry in deleting
            if not os.path.exists(os.path.join(registry.path, f"{entry.name}-0"))
        ]
        registry.make_partitions((topic, topic.numbers) for topic in created)
        save(registry, *changed, deleting=deleting, **others)

    monkeypatch.setattr(TopicRegistry, "save", late_save)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "seed_bug"),
    [
        ("appends", late_write),
        ("deletes", no_checkpoint),
        pytest.param("rolls", no_quarantine, marks=pytest.mark.slow),
        ("topics", save_topics_last),
    ],
)
def test_kills_reveal_a_seeded_bug(
    ram_directory: Path, workload: str, seed_bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of the tests: each bug has an effect only after a crash, and a kill must
    reveal it.
    """
    seed_bug(monkeypatch)
    campaign = Campaign(ram_directory)
    scenario = Scenario(WORKLOADS[workload], "os", SEED)
    with pytest.raises((AssertionError, logcore.LogcoreError)) as caught:
        # The middle of the run comes early in this order.
        for index in sorted(range(200), key=lambda index: (index % 7, index)):
            with campaign.disk():
                outcome = scenario.run(PlannedFault(index, 0.5))
                if not outcome.was_killed:
                    continue
                scenario.checker_after(outcome).check(thorough=False)
    print(f"{seed_bug.__name__}: {caught.value!r}"[:200])


# -- system calls of a spawned process that fail, or kill ------------------------------

CALLS = "openat,pwrite64,ftruncate,fdatasync,fsync,/^rename,/^unlink,/^mkdir,/^rmdir"
LINE = re.compile(r"(?:\d+ +)?(\w+)\((.*)")
FAULTS = ("signal=KILL", "error=EIO", "error=ENOSPC")


def spawn(workload: str, durability: str, seed: int, *options: str) -> Outcome:
    """Run a workload as a separate program under strace."""
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
    """The nth call of a system call in a program. `nth` is counted from 1 and includes
    the start of Python.
    """

    name: str
    nth: int
    file: str


def calls_of(workload: str, durability: str, seed: int) -> list[Call]:
    """Return the calls of a run without faults that change the disk."""
    spawn(workload, durability, seed, "-y", "-o", "trace", "-e", f"trace={CALLS}")
    calls = []
    counts: Counter[str] = Counter()
    for line in Path("trace").read_text(errors="replace").splitlines():
        if (match := LINE.match(line)) is None:
            continue
        name, arguments = match.groups()
        counts[name] += 1
        file = re.search(rf"(?:\./|{re.escape(os.getcwd())}/)([\w./-]+)", arguments)
        if (
            file
            and (name != "openat" or "O_CREAT" in arguments)
            and not file[1].endswith(("trace", ".lock"))
        ):
            calls.append(
                Call(name, counts[name], re.sub(r"\d+", "N", os.path.basename(file[1])))
            )
    os.unlink("trace")
    return calls


@pytest.fixture
def strace(ram_directory: Path) -> Path:
    if shutil.which("strace") is None:
        pytest.skip("needs strace (Debian: apt install strace)")
    result = subprocess.run(
        ["strace", "-o", ram_directory / "probe", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.skip(
            f"strace may not trace here: {result.stderr.strip().splitlines()[:1]}"
        )
    return ram_directory


def inject(
    campaign: Campaign,
    count: int,
    names: Iterator[str],
    rng: random.Random,
    until: float,
) -> Counter[str]:
    """Inject faults into system calls, first into each kind of call. Return the count
    of each call and fault.
    """
    counts: Counter[str] = Counter()
    for name in names:
        policy = rng.choice(POLICIES)
        seed = rng.randrange(1 << 30)
        scenario = Scenario(WORKLOADS[name], policy, seed)
        with campaign.disk():
            calls = calls_of(name, policy, seed)
        rng.shuffle(calls)
        kinds = {(call.name, call.file): call for call in calls}
        for call, fault in zip([*kinds.values(), *calls], itertools.cycle(FAULTS)):
            if counts.total() == count or time.monotonic() > until:
                return counts
            nth_call = (
                f"{call.nth}{'+' if fault != FAULTS[0] and rng.random() < 0.3 else ''}"
            )
            options = (
                "-o",
                "/dev/null",
                "-e",
                f"trace={call.name}",
                "-e",
                f"inject={call.name}:{fault}:when={nth_call}",
            )
            with campaign.disk():
                try:
                    outcome = spawn(name, policy, seed, *options)
                    assert outcome.was_killed == (fault == FAULTS[0])
                    scenario.checker_after(outcome).check(thorough=True)
                except BaseException as error:
                    error.add_note(
                        f"{name} under {policy!r}, seed {seed}: {options[-1]} in {call}"
                    )
                    raise
            counts[f"{call.name} {fault}"] += 1
    return counts


def test_failing_or_killing_system_call_loses_no_acknowledged_record(
    strace: Path,
) -> None:
    rng = random.Random(SEED)
    counts = inject(
        Campaign(strace),
        int(os.environ.get("LOGCORE_STRACES", "1")),
        iter(["deletes"]),
        rng,
        float("inf"),
    )
    print(f"{counts.total()} injected: {dict(counts)}; LOGCORE_TEST_SEED={SEED}")


@pytest.mark.slow
def test_failing_or_killing_system_calls_lose_no_acknowledged_record(
    strace: Path,
) -> None:
    rng = random.Random(SEED)
    count = int(os.environ.get("LOGCORE_STRACES", "200"))
    workloads = [name for name in WORKLOADS if not name.startswith("continues")]
    until = time.monotonic() + SECONDS
    counts: Counter[str] = Counter()
    for name in itertools.cycle(workloads):
        new_counts = inject(
            Campaign(strace),
            min(count - counts.total(), count // len(workloads) + 1),
            iter([name]),
            rng,
            until,
        )
        counts += new_counts
        if counts.total() >= count or not new_counts:
            break
    print(f"{counts.total()} injected: {dict(counts)}; LOGCORE_TEST_SEED={SEED}")
