"""Rust programs of tests/data, each built once per version of its client by cargo."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.vectors import DATA


@functools.cache
def program(name: str, version: str) -> Path:
    """Build tests/data/NAME with one version of its client, and return the executable.

    `version` replaces VERSION in Cargo.toml. The package is built in build/NAME-VERSION,
    where cargo rebuilds it only if a source has changed. The test is skipped if cargo is
    missing or a crate cannot be fetched.
    """
    if shutil.which("cargo") is None:
        pytest.skip("needs cargo: apt-get install cargo")
    folder = Path(__file__).parents[2] / "build" / f"{name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    for source in (DATA / name).iterdir():
        text = source.read_text("utf-8").replace("VERSION", version)
        copy = folder / source.name
        if not copy.exists() or copy.read_text("utf-8") != text:
            # Another process may read or build the same folder.
            scratch = folder / f"{source.name}.{os.getpid()}"
            scratch.write_text(text, "utf-8")
            scratch.replace(copy)
    if not (folder / "Cargo.lock").exists():
        fetch = subprocess.run(
            ["cargo", "fetch"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        if fetch.returncode:
            pytest.skip(
                f"cargo could not fetch the crates of {name}: {fetch.stderr[-300:]}"
            )
    command = ["cargo", "build", "--quiet", "--target-dir", str(folder / "target")]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=1_500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "target" / "debug" / f"{name}_client"
