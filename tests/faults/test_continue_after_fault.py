"""Programs continue after one failing call of the disk: no acknowledged record is lost,
and no record is stored twice. `make check` tests a sample of the calls. `make slow`
tests every call, and checks more disks after a power cut for each call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

import logcore
from logcore.fs import FS
from logcore.staging.publishing import Staging
from support.fault_exploration import (
    Ledger,
    Scenario,
    explore,
    explore_two_processes,
    persist,
)
from support.fault_scenarios import (
    AppendScenario,
    CommitScenario,
    DirectoryScenario,
    LogScenario,
    MirrorScenario,
    ProducerScenario,
    RegistryScenario,
    TransactionScenario,
)
from support.staged import PARTITIONS, SMALL, create, publish, rows, values

PATH = Path("/srv/data")
SLOW_MARKS = [pytest.mark.slow, pytest.mark.timeout(3600)]


class StagedWrite:
    """A service has the directory open, and a driver publishes one version until the
    service has appended it.
    """

    def __init__(self, config: dict[str, str] | None) -> None:
        self.config = config
        self.ledger = Ledger()
        self.attempts = 0
        self.is_done = False

    @property
    def acknowledged_count(self) -> int:
        return self.ledger.count + self.is_done

    def prepare(self, fs: FS) -> None:
        create(PATH, self.config, fs=fs)

    def run(self, fs: FS) -> None:
        directories: list[logcore.LogDir] = []

        def open_again() -> None:
            while directories:
                directories.pop().close()
            directories.append(logcore.open_dir(PATH, fs=fs))

        def close_logs() -> None:
            for log in list(directories[0].host.open_logs().values()):
                if log.has_failed:
                    log.close()

        def attempt() -> None:
            if not directories:
                open_again()
            self.attempts += 1
            if not Staging(fs, str(PATH)).is_done("app", 0):
                publish(
                    PATH,
                    f"try{self.attempts}",
                    fs=fs,
                    name="first",
                    config=self.config,
                    count=20,
                )
            directories[0].tick()
            close_logs()
            directories[0].tick()
            if Staging(fs, str(PATH)).outcome("app", 0) != "done":
                open_again()
            self.is_done = Staging(fs, str(PATH)).is_done("app", 0)

        persist(attempt)
        persist(attempt)
        persist(
            lambda: self.ledger.append("t-0", [b"after"], self._append(directories[0])),
            open_again,
        )
        while directories:
            persist(directories.pop().close)

    @staticmethod
    def _append(directory: logcore.LogDir) -> Callable[[], object]:
        return lambda: directory.host.open_again("t", 0).append(
            b"after", durability="disk"
        )

    def check_disk(self, fs: FS, *, is_crash: bool) -> None:
        assert self.is_done
        with logcore.open_dir(PATH, fs=fs) as directory:
            for partition in PARTITIONS:
                directory.partition("t", partition)
        for partition in PARTITIONS:
            stored = values(PATH, partition, fs=fs)
            staged = [value for value in stored if value not in (b"before", b"after")]
            assert stored[0] == b"before"
            assert staged == rows("first", partition, 20)
            self.ledger.attempted.setdefault(f"t-{partition}", [])
        self.ledger.check(
            "t-0", [value for value in values(PATH, 0, fs=fs) if value == b"after"]
        )


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "log, group": LogScenario,
    "log, always": lambda: LogScenario("always"),
    "directory": DirectoryScenario,
    "directory, shared": lambda: DirectoryScenario(shared=True),
    "producer": ProducerScenario,
    "commit": CommitScenario,
    "commit, shared": lambda: CommitScenario(shared=True),
    "transactions": TransactionScenario,
    "transactions, shared": lambda: TransactionScenario(shared=True),
    "registry": RegistryScenario,
    "mirror": MirrorScenario,
    "staged, appended": lambda: StagedWrite(None),
    "staged, moved": lambda: StagedWrite(SMALL),
}


@attrs.define
class Names:
    """Generator of unique names, one for each process."""

    count: int = 0

    def next(self) -> str:
        self.count += 1
        return f"p{self.count}"


TWO_PROCESSES: dict[str, Callable[[Names], Scenario]] = {
    "append": lambda names: AppendScenario(names.next()),
    "commit": lambda names: CommitScenario(shared=True, group=names.next()),
    "transactions": lambda names: TransactionScenario(shared=True, name=names.next()),
    "registry": lambda names: RegistryScenario(names.next()),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "crashes"), [(43, 3), pytest.param(1, 30, marks=SLOW_MARKS)]
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_program_continues_after_a_failing_call_and_keeps_its_records(
    name: str, step: int, crashes: int
) -> None:
    assert explore(SCENARIOS[name], step=step, crashes=crashes) > 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "crashes"), [(307, 2), pytest.param(1, 10, marks=SLOW_MARKS)]
)
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes_continue_after_a_failing_call_of_one(
    name: str, step: int, crashes: int
) -> None:
    names = Names()
    assert (
        explore_two_processes(
            lambda: TWO_PROCESSES[name](names), step=step, crashes=crashes
        )
        > 2
    )
