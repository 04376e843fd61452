"""The property tests with a new seed in each run. By default, a property test checks
the same examples in every run. `make check` runs some property tests with a new seed,
and `make slow` runs all of them. A failure prints the command that repeats it.
LOGCORE_TEST_SEED=n sets the seed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SOME_PATHS = ("log/test_properties.py", "coordination")
PROPERTY_TESTS = "hypothesis and not slow and not interop"


def run(seed: int, examples: int, paths: tuple[str, ...], basetemp: Path) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={basetemp}",
        "-m", PROPERTY_TESTS, f"--hypothesis-seed={seed}", *paths,
    ]  # fmt: skip
    settings = {
        "HYPOTHESIS_PROFILE": "random",
        "LOGCORE_RANDOM_EXAMPLES": str(examples),
    }
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_")
    }
    result = subprocess.run(
        command,
        cwd=TESTS,
        env={**environment, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=7000,
    )
    repeat = " ".join(f"{name}={value}" for name, value in settings.items())
    assert result.returncode == 0, (
        f"{result.stdout[-6000:]}{result.stderr[-2000:]}\nto repeat it: cd tests && {repeat} "
        f"python -m pytest -m '{PROPERTY_TESTS}' --hypothesis-seed={seed} {' '.join(paths)}"
    )


def seed_of_this_run() -> int:
    seed = os.environ.get("LOGCORE_TEST_SEED")
    return int(seed) if seed else random.SystemRandom().randrange(1 << 32)


@pytest.mark.long
def test_some_properties_hold_with_a_random_seed(tmp_path: Path) -> None:
    run(seed_of_this_run(), 3, SOME_PATHS, tmp_path / "inner")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_properties_hold_with_a_random_seed(tmp_path: Path) -> None:
    run(seed_of_this_run(), 1_000, (".",), tmp_path / "inner")
