"""What a release holds: an sdist from which the tests can run, and a wheel for machines without a compiler.

Both are built from a copy of the source, without isolation and without network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import logcore

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (".ci", "benchmarks", "docs", "examples", "src", "tests", "tools")
SHIPPED_FILES = ("LICENSE", "MANIFEST.in", "Makefile", "mkdocs.yml", "pyproject.toml", "setup.py")
UNSHIPPED = ("__pycache__", "*.pyc", "*.so", "*.pyd", "*.egg-info")

if not (ROOT / "setup.py").exists():
    pytest.skip("needs the source", allow_module_level=True)
pytest.importorskip("setuptools", minversion="77")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the source, as a fresh clone has it."""
    copy = tmp_path / "source"
    for name in SHIPPED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(*UNSHIPPED))
    for path in (*ROOT.glob("*.md"), *(ROOT / name for name in SHIPPED_FILES)):
        shutil.copy(path, copy)
    return copy


def build(source: Path, call: str) -> Path:
    """Runs a hook of setuptools' build backend; returns the file that it made."""
    code = f"from setuptools import build_meta; build_meta.{call}('../dist')"
    (source.parent / "dist").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, "LOGCORE_PLAIN": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (source.parent / "dist").iterdir()
    return made


def test_the_sdist_holds_every_file_that_tests_and_tasks_need(source: Path) -> None:
    expected = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    with tarfile.open(build(source, "build_sdist")) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert expected <= files, sorted(expected - files)


@pytest.mark.slow  # it builds a wheel
def test_a_wheel_of_the_plain_kernels_fits_every_platform(source: Path) -> None:
    wheel = build(source, "build_wheel")
    assert wheel.name == f"logcore-{logcore.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"logcore", "netshim", "pyspark_logcore"}
    assert not [name for name in names if name.endswith((".so", ".pyd"))]
    assert {"logcore/py.typed", "netshim/wire/messages.pyi", "logcore/kernels/_compiled.pyx"} <= set(names)
