"""What a release holds: an sdist from which the tests can run, and a wheel for machines
without a compiler.

Both are built from a copy of the source, without isolation and without network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import logcore
from logcore import distribution

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (".ci", "benchmarks", "docs", "examples", "src", "tests", "tools")
SHIPPED_FILES = (
    ".importlinter",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "mkdocs.yml",
    "pyproject.toml",
    "setup.py",
)
UNSHIPPED = ("__pycache__", "*.pyc", "*.so", "*.pyd", "*.egg-info")

if not (ROOT / "setup.py").exists():
    pytest.skip("needs the source", allow_module_level=True)
pytest.importorskip("setuptools", minversion="77")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the source, as a fresh clone has it."""
    copy = tmp_path / "source"
    for name in SHIPPED:
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns(*UNSHIPPED)
        )
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
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file()
    }
    with tarfile.open(build(source, "build_sdist")) as archive:
        files = {
            member.name.partition("/")[2]
            for member in archive.getmembers()
            if member.isfile()
        }
    assert expected <= files, sorted(expected - files)


@pytest.mark.slow  # it builds a wheel
def test_a_wheel_of_the_plain_kernels_fits_every_platform(source: Path) -> None:
    wheel = build(source, "build_wheel")
    assert wheel.name == f"logcore_db-{logcore.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "logcore",
        "logcore_db",
        "netshim",
        "pyspark_logcore",
    }
    assert not [name for name in names if name.endswith((".so", ".pyd"))]
    assert {
        "logcore/py.typed",
        "netshim/wire/messages.pyi",
        "logcore/kernels/_compiled.pyx",
    } <= set(names)


def test_error_texts_name_our_distribution_and_not_a_strangers() -> None:
    """`logcore` on PyPI is an unrelated logging library; error texts told users to
    install it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert project["name"] == distribution.NAME
    texts = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
    ]
    for path in texts:
        assert not re.search(r"\blogcore\[", path.read_text(encoding="utf-8")), path


def test_install_command_names_clone_or_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert distribution.install_command("arrow") == f"pip install -e '{ROOT}[arrow]'"
    monkeypatch.setattr(distribution, "NAME", "not-installed-anywhere")
    assert (
        distribution.install_command("arrow")
        == "pip install 'not-installed-anywhere[arrow]'"
    )


def test_import_beside_the_unrelated_logcore_warns(tmp_path: Path) -> None:
    package = tmp_path / "logcore"
    package.mkdir()
    for path in (ROOT / "src" / "logcore").iterdir():
        (package / path.name).symlink_to(path)
    (package / "logger.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import logcore; print(logcore.open_dir)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "unrelated logging library" in done.stderr
    assert "pip uninstall" in done.stderr
