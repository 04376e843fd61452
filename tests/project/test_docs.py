"""The documents are true: every example in them runs, every link in them leads to a
file.

The blocks of one page run in order in one directory of their own. Python blocks share
their names, as in one session; `sh` blocks run with `logcore` on the path. A block is
left out when its fence says `no-run`. docs/spark.md runs in tests/spark/test_spark.py,
where there is a Spark.
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import logcore
from support.pages import run_blocks

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(logcore.__file__).resolve().parents[1]
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.exists()
]
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
]
NEEDED = (
    "aiokafka",
    "click",
    "confluent_kafka",
    "deltalake",
    "duckdb",
    "fastavro",
    "kafka",
    "polars",
    "pyarrow",
    "pyiceberg",
)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "spark.md"],
    ids=lambda page: page.name,
)
def test_every_example_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDED:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")])),
    )
    run_blocks(page, tmp_path)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    missing = []
    for link in links:
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        where = (page.parent / target).resolve() if target else page
        if not where.exists() or (anchor and anchor not in anchors(where)):
            missing.append(link)
    assert not missing, f"{page.relative_to(ROOT)}: {missing}"


def test_the_docs_site_has_every_page() -> None:
    named = set(
        re.findall(
            r"[\w/-]+\.md",
            (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1],
        )
    )
    assert {
        page.relative_to(ROOT / "docs").as_posix()
        for page in (ROOT / "docs").rglob("*.md")
    } <= named


def anchors(page: Path) -> set[str]:
    """Names that GitHub gives to the headings of a page."""
    headings = re.findall(
        r"^#+ +(.+?)\s*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


PACKAGES = ("logcore", "netshim", "pyspark_logcore")
LIBRARY = ROOT / "src" / "logcore"
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
LINTER = configparser.ConfigParser()
LINTER.read(ROOT / ".importlinter", encoding="utf-8")
CONTRACTS = [
    LINTER[name]
    for name in LINTER.sections()
    if name.startswith("importlinter:contract:")
]


@pytest.mark.long
def test_map_tables_are_current() -> None:
    """If this fails, run `python tools/module_map.py --update`."""
    assert (
        subprocess.run(
            [sys.executable, ROOT / "tools" / "module_map.py"], check=False
        ).returncode
        == 0
    )


def test_design_draws_the_layers() -> None:
    """Section 2 of docs/design.md draws the first contract of .importlinter, line by
    line.
    """
    [layers] = [
        contract["layers"]
        for contract in CONTRACTS
        if contract.get("containers", "").split() == ["logcore"]
    ]
    drawing = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("```")[1]
    drawn = [
        set(re.findall(r"\w+", re.split(r" {2,}", line)[0]))
        for line in drawing.strip().splitlines()
    ]
    assert drawn == [
        set(re.findall(r"\w+", line)) for line in layers.strip().splitlines()
    ]


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py"))
)
def test_each_folder_has_a_contract(folder: str) -> None:
    # `kernels` chooses between two forms, and `testing` is a tool for tests.
    if folder in (
        "kernels",
        "testing",
    ):
        return
    assert f"logcore.{folder}" in [
        contract.get("containers", "").strip() for contract in CONTRACTS
    ]


def test_the_map_names_existing_tests() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", MAP)
    assert len(named) > 100
    for path, name in named:
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


def test_map_lists_all_files() -> None:
    """Each `Class.method` and `module.function` that docs/map.md names is defined
    somewhere in the library.
    """
    files = [
        path for package in PACKAGES for path in (ROOT / "src" / package).rglob("*.py")
    ]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = set(re.findall(r"`(?:\w+\.)?(\w+\.\w+|_\w+)(?:\(\))?`", MAP)) - {
        "logcore.durable",
        "__consumer_offsets",
        "__transaction_state",
        "__cluster_metadata",
        "_schemas",
    }
    parts = {
        name.split(".")[-1]
        for name in named
        if not name.endswith((".py", ".pyx", ".md", ".toml", ".yml"))
    }
    gone = [
        part
        for part in sorted(parts)
        if not re.search(rf"\b(def|class) {part}\b|^ *{part} *[:=]", sources, re.M)
    ]
    assert not gone, gone


def test_table_of_client_faults_has_a_line_for_each_fault() -> None:
    """make interop compares the lines with clients."""
    for package in ("aiokafka", "confluent_kafka", "kafka"):
        pytest.importorskip(package)
    from support.faulted_clients import ROWS, shown_lines

    assert list(shown_lines()) == [row.name for row in ROWS]
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    assert f"is a table of five clients and {len(ROWS)} faults." in page
