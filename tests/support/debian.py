"""Programs of Debian packages, unpacked below build/ and not installed."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.environments import ROOT


@functools.cache
def program(name: str, *packages: str) -> tuple[str, ...]:
    """Return the command of an installed program, or of a program in Debian packages.

    `packages` are the package of the program and the packages of its libraries. The
    test is skipped if a package cannot be downloaded.
    """
    installed = shutil.which(name)
    if installed is not None:
        return (installed,)
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {name}, or {tool} to download it")
    folder = ROOT / "build" / name
    if not folder.is_dir():
        _unpack(folder, packages)
    libraries = ":".join(
        sorted({str(path.parent) for path in folder.rglob("lib*.so.*")})
    )
    return ("env", f"LD_LIBRARY_PATH={libraries}", str(folder / "usr" / "bin" / name))


def _unpack(folder: Path, packages: Sequence[str]) -> None:
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        done = subprocess.run(
            ["apt-get", "download", *packages],
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode:
            pytest.skip(f"apt-get could not download {packages}: {done.stderr[-300:]}")
        tree = Path(scratch) / "tree"
        for file in sorted(Path(scratch).glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(file), str(tree)], check=True)
        try:
            tree.rename(folder)
        except OSError:  # another process of this run has unpacked the packages too
            if not folder.is_dir():
                raise
