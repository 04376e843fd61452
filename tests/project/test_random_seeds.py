"""The property tests with a seed that no run before had: by default each looks at the
same examples in every run.

A small part of them in each run, all of them in `make slow`. A failure prints the
command that repeats it; LOGCORE_TEST_SEED=n takes n instead of a new seed. That the
tests pass with the seed of every day is not shown here.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FEW = ("log/test_properties.py", "coordination")
MARKED = "hypothesis and not slow and not interop"


def run(seed: int, examples: int, paths: tuple[str, ...], basetemp: Path) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={basetemp}",
        "-m", MARKED, f"--hypothesis-seed={seed}", *paths,
    ]  # fmt: skip
    settings = {
        "HYPOTHESIS_PROFILE": "random",
        "LOGCORE_RANDOM_EXAMPLES": str(examples),
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        command,
        cwd=TESTS,
        env={**kept, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=7000,
    )
    repeat = " ".join(f"{name}={value}" for name, value in settings.items())
    assert done.returncode == 0, (
        f"{done.stdout[-6000:]}{done.stderr[-2000:]}\nto repeat it: cd tests && {repeat} "
        f"python -m pytest -m '{MARKED}' --hypothesis-seed={seed} {' '.join(paths)}"
    )


def seed_of_this_run() -> int:
    given = os.environ.get("LOGCORE_TEST_SEED")
    return int(given) if given else random.SystemRandom().randrange(1 << 32)


@pytest.mark.long
def test_some_properties_with_a_random_seed(tmp_path: Path) -> None:
    run(seed_of_this_run(), 3, FEW, tmp_path / "inner")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_properties_with_a_random_seed(tmp_path: Path) -> None:
    run(seed_of_this_run(), 1_000, (".",), tmp_path / "inner")
