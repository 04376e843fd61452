"""Python environments below build/ with packages that the checkout itself does not
need. uv creates each of them once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def environment(name: str, *requirements: str) -> Path:
    """Return the Python of an environment with these packages, as pip names them. The
    test is skipped if the environment cannot be created.
    """
    uv = Path(sys.executable).with_name("uv")
    folder = ROOT / "build" / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        if not uv.exists():
            pytest.skip("needs uv: pip install uv")
        shutil.rmtree(folder, ignore_errors=True)
        for command in (
            ["venv", "--python", sys.executable, str(folder)],
            ["pip", "install", "--python", str(python), *requirements],
        ):
            done = subprocess.run(
                [uv, "--quiet", *command],
                capture_output=True,
                text=True,
                check=False,
                timeout=900,
            )
            if done.returncode:
                pytest.skip(f"{name} could not be installed: {done.stderr[-300:]}")
        (folder / "complete").touch()
    return python
