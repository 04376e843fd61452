"""Go programs of tests/data, built by go."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from support.environments import ROOT
from support.vectors import DATA


@functools.cache
def program(name: str) -> Path:
    """Build tests/data/NAME, and return the executable.

    The test is skipped if go is missing, is too old or cannot download a module. go
    builds a program again only if a source has changed.
    """
    if shutil.which("go") is None:
        pytest.skip("needs go: apt-get install golang-go")
    source = DATA / name
    fetch = subprocess.run(
        ["go", "mod", "download"],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if fetch.returncode:
        pytest.skip(f"go could not fetch the modules of {name}: {fetch.stderr[-300:]}")
    target = ROOT / "build" / name / "client"
    done = subprocess.run(
        ["go", "build", "-o", str(target), "."],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return target
