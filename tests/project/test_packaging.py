"""The content of a release: an sdist that contains the tests, and a wheel for machines
without a compiler. Both are built from a copy of the source, without isolation and
without network.
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
from email.message import Message
from email.parser import Parser
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
UNSHIPPED = ("__pycache__", ".hypothesis", "*.pyc", "*.so", "*.pyd", "*.egg-info")

if not (ROOT / "setup.py").exists():
    pytest.skip("needs the source", allow_module_level=True)
pytest.importorskip("setuptools", minversion="77")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a copy of the source, as in a fresh clone."""
    copy = tmp_path / "source"
    for name in SHIPPED:
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns(*UNSHIPPED)
        )
    for path in (*ROOT.glob("*.md"), *(ROOT / name for name in SHIPPED_FILES)):
        shutil.copy(path, copy)
    return copy


def build(source: Path, call: str, repository: str = "") -> Path:
    """Run a hook of the build backend of setuptools, and return the file that it
    creates.
    """
    code = f"from setuptools import build_meta; build_meta.{call}('../dist')"
    (source.parent / "dist").mkdir()
    environment = {"LOGCORE_PLAIN": "1", "LOGCORE_REPOSITORY": repository}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    warnings = re.findall(r"warning: .*", result.stdout + result.stderr)
    # setuptools warns if PYTHONDONTWRITEBYTECODE is set.
    assert not [warning for warning in warnings if "byte-compiling" not in warning]
    files = (source.parent / "dist").iterdir()
    (built,) = (path for path in files if path.suffix != ".egg-info")
    return built


def metadata_of(source: Path, repository: str = "") -> Message:
    wheel_info = build(source, "prepare_metadata_for_build_wheel", repository)
    text = (wheel_info / "METADATA").read_text(encoding="utf-8")
    return Parser().parsestr(text)


def links_of(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.long
def test_sdist_contains_exactly_the_files_for_tests_and_tasks(source: Path) -> None:
    expected = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file()
    }
    leftover = {  # files that a run of the tests leaves
        "tests/.hypothesis/constants/0031e7332b4af429",
        "tests/log/__pycache__/test_log.cpython-311.pyc",
        "src/logcore/kernels/_compiled.cpython-311-x86_64-linux-gnu.so",
        "build/cython/_compiled.c",
        ".venv/bin/python",
    }
    for name in leftover:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("")
    with tarfile.open(build(source, "build_sdist")) as archive:
        files = {
            member.name.partition("/")[2]
            for member in archive.getmembers()
            if member.isfile()
        }
    assert expected <= files, sorted(expected - files)
    assert not files & leftover


@pytest.mark.long
def test_page_of_the_package_has_absolute_links(source: Path) -> None:
    repository = "https://github.com/OWNER/NAME"
    metadata = metadata_of(source, repository + "/")
    page = metadata.get_payload()
    assert isinstance(page, str)
    links = links_of(page)
    assert len(links) > 20
    link_pattern = re.compile(re.escape(repository) + r"/(blob|raw)/v[\d.]+/([^#]+)")
    for link in links:
        match = link_pattern.match(link)
        assert match is not None, link
        assert (ROOT / match[2]).exists()
        assert (match[1] == "raw") == match[2].endswith((".svg", ".png"))
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    assert {"Documentation", "Repository", "Issues", "Changelog"} <= urls.keys()
    assert urls["Repository"] == repository
    for url in urls.values():
        assert url.startswith(repository)
        match = link_pattern.match(url)
        assert match is None or (ROOT / match[2]).exists()


@pytest.mark.long
def test_page_without_a_repository_has_no_links(source: Path) -> None:
    metadata = metadata_of(source)
    page = metadata.get_payload()
    assert isinstance(page, str)
    assert not links_of(page)
    assert "log.append_many([(b" in page  # code is unchanged
    assert "the words of these pages; limits in numbers" in page
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not metadata.get_all("Project-URL")


@pytest.mark.long
def test_container_copies_the_inputs_of_the_build(tmp_path: Path) -> None:
    lines = (ROOT / "examples" / "Containerfile").read_text("utf-8").splitlines()
    copied = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    assert copied
    root = tmp_path / "source"
    for *names, target in copied:
        path = tmp_path / target.strip("/")
        for name in names:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns(*UNSHIPPED)
                shutil.copytree(ROOT / name, path, ignore=ignored)
            else:
                path.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, path)
    metadata = metadata_of(root)
    assert metadata["Name"] == distribution.NAME
    text = "\n".join(lines)
    (required,) = set(re.findall(r"\[([\w,]+)\]'", text))
    assert set(required.split(",")) <= set(metadata.get_all("Provides-Extra", []))


def test_wheels_are_built_for_each_supported_python() -> None:
    yaml = pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    supported = {
        f"cp{versions[1]}{versions[2]}-*"
        for line in project["project"]["classifiers"]
        if (versions := re.search(r":: (3)\.(\d+)$", line))
    }
    settings = project["tool"]["cibuildwheel"]
    assert set(settings["build"]) == supported
    # cibuildwheel builds for manylinux and musllinux if no platform is skipped.
    assert "skip" not in settings
    workflow = yaml.safe_load(
        (ROOT / ".github" / "workflows" / "wheels.yml").read_text("utf-8")
    )
    machines = workflow["jobs"]["compiled"]["strategy"]["matrix"]["os"]
    assert {name.split("-")[0] for name in machines} == {"ubuntu", "macos"}
    assert set(workflow["env"]) == set(settings["environment-pass"])


@pytest.mark.slow  # it builds a wheel
def test_wheel_of_the_plain_kernels_supports_every_platform(source: Path) -> None:
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


def test_error_texts_name_the_right_distribution() -> None:
    """`logcore` on PyPI is an unrelated logging library. Error texts must not recommend
    to install it.
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


def test_install_command_contains_the_clone_or_the_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert distribution.install_command("arrow") == f"pip install -e '{ROOT}[arrow]'"
    monkeypatch.setattr(distribution, "NAME", "not-installed-anywhere")
    assert (
        distribution.install_command("arrow")
        == "pip install 'not-installed-anywhere[arrow]'"
    )


def test_import_warns_if_the_unrelated_logcore_is_installed(tmp_path: Path) -> None:
    package = tmp_path / "logcore"
    package.mkdir()
    for path in (ROOT / "src" / "logcore").iterdir():
        (package / path.name).symlink_to(path)
    (package / "logger.py").write_text("")
    result = subprocess.run(
        [sys.executable, "-c", "import logcore; print(logcore.open_dir)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "unrelated logging library" in result.stderr
    assert "pip uninstall" in result.stderr
