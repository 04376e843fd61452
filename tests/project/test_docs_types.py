"""The examples of the pages pass mypy --strict and pyright. The blocks of a page share
their names, so that a page is checked as one module. Line numbers in the module equal
those in the page.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import blocks

pytestmark = pytest.mark.static

ROOT = Path(__file__).resolve().parents[2]
#: An error that pyright finds in another package, whose class has a decorator that hides
#: the parameters.
FOREIGN_ERROR = "schemas_page.py:33: Expected 0 positional arguments"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory with a module for each page."""
    directory = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        code: list[str] = []
        for block in blocks(page):
            if block.language == "python" and "no-run" not in block.words:
                # The text of a block begins with one empty line for each line before
                # it.
                code += block.text.splitlines()[len(code) :]
        if code:
            name = page.stem.replace("-", "_")
            (directory / f"{name}_page.py").write_text("\n".join([*code, ""]), "utf-8")
    assert len(list(directory.iterdir())) > 20
    yield directory
    shutil.rmtree(directory)


def skip_without(checker: str) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"needs {checker}: make lint installs it")


def test_mypy_accepts_each_example(modules: Path) -> None:
    skip_without("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    result = subprocess.run(
        [*command, *map(str, sorted(modules.iterdir()))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_pyright_accepts_each_example(modules: Path) -> None:
    skip_without("pyright")
    settings = {
        "typeCheckingMode": "standard",
        "extraPaths": [str(ROOT / "src")],
        "reportMissingImports": False,
        "reportMissingModuleSource": False,
    }
    (modules / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson"]
    result = subprocess.run(
        [*command, "--pythonpath", sys.executable, "--project", str(modules)],
        capture_output=True,
        text=True,
        check=False,
    )
    reported = json.loads(result.stdout)
    assert reported["summary"]["filesAnalyzed"] > 20
    errors = [
        f"{Path(row['file']).name}:{row['range']['start']['line'] + 1}: {row['message']}"
        for row in reported["generalDiagnostics"]
        if row["severity"] == "error"
    ]
    assert not set(errors) - {FOREIGN_ERROR}, "\n".join(errors)
