"""pytest's report of a failure that logcore.testing found: the report contains the test,
the program and the finding, but no frames of logcore.
"""

from __future__ import annotations

import logging

import pytest

from logcore.testing import CrashTestError, SimulatedDisk, explore
from support.pytesters import ALONE

pytest_plugins = ["pytester"]

PROGRAM = """
import pytest
import logcore
from logcore.testing import explore, LogStateMachine
from hypothesis import Phase, settings
from hypothesis.stateful import invariant

def run(disk, promise):
    with logcore.open("orders-0", create=True, durability="os", fs=disk) as log:
        log.append(b"4 apples")
        promise(b"4 apples")  # too early

def recover(disk):
    with logcore.open("orders-0", create=True, fs=disk) as log:
        return [record.value for record in log.read(0)]

def check(promised, found):
    assert found[: len(promised)] == promised, "an accepted order is lost"
"""
OURS = ("logcore/testing/", "logcore/partition/", "logcore/log.py", "contextlib.py")


def report_of(pytester: pytest.Pytester, test: str) -> str:
    pytester.makepyfile(PROGRAM + test)
    result = pytester.runpytest(*ALONE, "-p", "no:randomly")
    result.assert_outcomes(failed=1)
    return result.stdout.str()


def test_report_shows_the_program_and_how_to_replay(
    pytester: pytest.Pytester,
) -> None:
    text = report_of(
        pytester, "def test_it():\n    explore(run, recover, check, seed=3)\n"
    )
    assert ">       explore(run, recover, check, seed=3)" in text
    assert ">       assert found[: len(promised)] == promised" in text
    assert (
        '>       with logcore.open("orders-0", create=True, durability="os", fs=disk) as log:'
        in text
    )
    assert (
        "to replay: the same program with seed=3 reaches this disk again, at moment "
        in text
    )
    assert "recover(error.state.disk())" in text
    assert not [name for name in OURS if name in text], text
    assert "logcore.recovery" not in text, "the report contains log lines of recoveries"


def test_report_shows_the_failing_line_of_a_recovery(pytester: pytest.Pytester) -> None:
    text = report_of(
        pytester,
        "def hasty(disk):\n    return disk.content('orders-0/log')\ndef test_it():\n    explore(run, hasty, check)\n",
    )
    assert "return disk.content('orders-0/log')" in text
    assert "recovery fails: FileNotFoundError" in text
    assert not [name for name in OURS if name in text], text


def test_report_shows_the_failing_invariant_of_a_machine(
    pytester: pytest.Pytester,
) -> None:
    text = report_of(
        pytester,
        "class Shop(LogStateMachine):\n"
        "    @invariant()\n"
        "    def is_small(self):\n"
        "        assert self.log.log_end_offset < 0\n"
        "Shop.TestCase.settings = settings(max_examples=5, deadline=None, database=None, phases=[Phase.generate])\n"
        "TestShop = Shop.TestCase\n",
    )
    assert ">       assert self.log.log_end_offset < 0" in text
    assert "state.is_small()" in text
    assert not [name for name in OURS if name in text], text


def test_report_shows_the_error_of_a_failing_program(pytester: pytest.Pytester) -> None:
    text = report_of(
        pytester,
        "def broken(disk, promise):\n    raise KeyError('its own')\n"
        "def test_it():\n    explore(broken, recover, check)\n",
    )
    assert (
        ">   raise KeyError('its own')" in text
        or ">       raise KeyError('its own')" in text
    )
    assert not [name for name in OURS if name in text], text


def test_same_program_and_seed_reach_the_same_state() -> None:
    def run(disk: SimulatedDisk, promise: object) -> None:
        for number in range(5):
            with disk.open("a", "ab") as file:
                file.write(b"%d" % number * 700)

    def check(promised: object, found: bytes) -> None:
        assert b"\0" not in found

    def recover(disk: SimulatedDisk) -> bytes:
        return disk.content("a") if disk.exists("a") else b""

    found = []
    for _ in range(2):
        with pytest.raises(CrashTestError) as met:
            explore(run, recover, check, seed=7)
        found.append(
            (
                met.value.seed,
                met.value.moment,
                met.value.state.what,
                met.value.state.files,
            )
        )
    assert found[0] == found[1]
    assert b"\0" in recover(met.value.state.disk())


def test_log_lines_are_suppressed_only_during_explore(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(disk: SimulatedDisk, promise: object) -> None:
        logging.getLogger("logcore.recovery").error("one of thousands")
        logging.getLogger("shop").error("of the program")

    explore(run, lambda disk: None, lambda promised, found: None)
    logging.getLogger("logcore.recovery").error("afterwards")
    assert [record.message for record in caplog.records] == [
        "of the program",
        "afterwards",
    ]
