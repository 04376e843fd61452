"""`netshim cluster` and processes that are stopped during a change of the registry."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from logcore.registry import registry_path
from netshim.cluster_command import LockHolders, _session_timeout_s, _watch
from support.clusters import until

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc"
)

#: A process that stops itself, during a change of the registry or outside of one.
_PROGRAM = """
import os, signal, sys
from contextlib import nullcontext
from logcore.registry import open_registry
with open_registry(sys.argv[1], topics="truth") as registry:
    holds = sys.argv[2] == "inside"
    with registry.holding("/brokers/topics/t") if holds else nullcontext():
        os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture(params=["inside", "outside"])
def stopped(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "cluster"), request.param],
        text=True,
    )
    stat = Path(f"/proc/{process.pid}/stat")
    until(lambda: ") T " in stat.read_text(), "the process has stopped")
    yield request.param, process
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
    process.wait()


def lock_of(tmp_path: Path) -> str:
    return f"{registry_path(str(tmp_path / 'cluster'))}/.lock"


@pytest.mark.long
def test_only_a_process_that_holds_a_lock_is_overdue(
    stopped: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    place, process = stopped
    holders = LockHolders(lock_of(tmp_path), 6.0)
    overdue = [holders.overdue(process.pid, now_s) for now_s in (0.0, 5.9, 6.0)]
    assert overdue == [False, False, place == "inside"]
    process.send_signal(signal.SIGCONT)
    process.wait()
    assert not holders.overdue(process.pid, 7.0)


@pytest.mark.long
def test_command_kills_a_broker_that_was_stopped_during_a_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "cluster"), "inside"], text=True
    )
    holders = LockHolders(lock_of(tmp_path), 0.5)
    began_s = time.monotonic()
    _watch({2: process}, {2: ["netshim", "serve"]}, holders)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - began_s >= 0.5
    printed = capsys.readouterr().err
    assert "broker 2 was stopped while it changed the registry" in printed
    assert "broker 2 ended with -9; to start it again: netshim serve" in printed


@pytest.mark.parametrize(
    ("options", "expected_s"),
    [
        ([], 6.0),
        (["--broker-session-timeout-ms", "500"], 0.5),
        (["--broker-session-timeout-ms=700", "--rack", "a"], 0.7),
    ],
)
def test_lock_limit_is_the_session_timeout(
    options: list[str], expected_s: float
) -> None:
    assert _session_timeout_s(options) == expected_s
