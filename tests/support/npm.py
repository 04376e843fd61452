"""Packages of npm for the programs of tests/data."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from support.environments import ROOT


@functools.cache
def modules(name: str, package: str) -> Path:
    """Install a package into build/NAME, and return the folder of modules.

    The test is skipped if node or npm is missing, or the package cannot be downloaded.
    """
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: apt-get install nodejs npm")
    folder = ROOT / "build" / name
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--silent", package],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode:
            pytest.skip(f"npm could not install {package}: {done.stderr[-300:]}")
        (folder / "done").touch()
    return folder / "node_modules"
