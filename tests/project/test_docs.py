"""Tests that every example of the documentation runs, and every link leads to a file.

The blocks of a page run in order in a new directory. Python blocks share their names, as in
one session, and `sh` blocks run with `logcore` on the path. Blocks whose fence contains
`no-run` are left out. tests/spark/test_spark.py runs docs/spark.md, because it needs Spark.
"""

from __future__ import annotations

import ast
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
PAGES_WITH_LINKS = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
]
REQUIRED_PACKAGES = (
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
    for package in REQUIRED_PACKAGES:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")])),
    )
    run_blocks(page, tmp_path)


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: page.name)
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
        page_of_anchor = (page.parent / target).resolve() if target else page
        if not page_of_anchor.exists() or (
            anchor and anchor not in anchors(page_of_anchor)
        ):
            missing.append(link)
    assert not missing, f"{page.relative_to(ROOT)}: {missing}"


def test_docs_site_has_every_page() -> None:
    listed_pages = set(
        re.findall(
            r"[\w/-]+\.md",
            (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1],
        )
    )
    assert {
        page.relative_to(ROOT / "docs").as_posix()
        for page in (ROOT / "docs").rglob("*.md")
    } <= listed_pages


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a page."""
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


def test_layers_in_the_design_equal_the_contract() -> None:
    """Section 2 of docs/design.md draws the first contract of .importlinter, line by
    line.
    """
    [layers] = [
        contract["layers"]
        for contract in CONTRACTS
        if contract.get("containers", "").split() == ["logcore"]
    ]
    drawing = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("```")[1]
    drawn_layers = [
        set(re.findall(r"\w+", re.split(r" {2,}", line)[0]))
        for line in drawing.strip().splitlines()
    ]
    assert drawn_layers == [
        set(re.findall(r"\w+", line)) for line in layers.strip().splitlines()
    ]


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py"))
)
def test_each_folder_has_a_contract(folder: str) -> None:
    # `kernels` selects one of two modules, and `testing` is a tool for tests.
    if folder in (
        "kernels",
        "testing",
    ):
        return
    assert f"logcore.{folder}" in [
        contract.get("containers", "").strip() for contract in CONTRACTS
    ]


def test_map_refers_to_existing_tests() -> None:
    listed_tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", MAP)
    assert len(listed_tests) > 100
    for path, name in listed_tests:
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


#: Names in docs/map.md that look like attributes: files, topics, a message and a setting.
NOT_ATTRIBUTES = {
    ("logcore", "durable"),
    ("logcore", "groups"),
    ("logcore", "topics"),
    ("FETCH", "Request"),
    ("compression", "type"),
}
SUFFIXES = {"py", "pyi", "pyx", "pxi", "md", "toml", "yml", "ipynb"}


def defined_names(tree: ast.AST) -> set[str]:
    """Return the functions, classes, variables and attributes that a tree defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
            names |= {
                target.attr for target in targets if isinstance(target, ast.Attribute)
            }
    return names


def owners_in_source() -> dict[str, set[str]]:
    """Return the names that each module and each class defines or inherits."""
    names_by_owner: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / "src" / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            module = path.parent.name if path.stem == "__init__" else path.stem
            names_by_owner.setdefault(module, set()).update(defined_names(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    names_by_owner.setdefault(node.name, set()).update(
                        defined_names(node)
                    )
                    bases[node.name] = [
                        base.id for base in node.bases if isinstance(base, ast.Name)
                    ]
    for name, direct in bases.items():
        ancestors = list(direct)
        for base in ancestors:
            names_by_owner[name] |= names_by_owner.get(base, set())
            ancestors += [
                ancestor
                for ancestor in bases.get(base, [])
                if ancestor not in ancestors
            ]
    return names_by_owner


def test_names_in_the_map_exist_in_the_source() -> None:
    """Each `module.function` and `Class.method` of docs/map.md is defined in that
    module or class, and each `_name` is defined in the library.
    """
    owners = owners_in_source()
    pairs = set(re.findall(r"`(?:\w+\.)*(\w+)\.(\w+)(?:\(\))?`", MAP))
    unknown = {
        f"{owner}.{name}"
        for owner, name in pairs - NOT_ATTRIBUTES
        if name not in SUFFIXES and name not in owners.get(owner, ())
    }
    all_names = set().union(*owners.values())
    topics = {"__consumer_offsets", "__transaction_state", "__cluster_metadata"}
    private = set(re.findall(r"`(_\w+)(?:\(\))?`", MAP)) - topics - {"_schemas"}
    unknown |= private - all_names
    assert not unknown


def test_table_of_client_faults_has_a_line_for_each_fault() -> None:
    """`make interop` compares the lines of the table with the clients."""
    for package in ("aiokafka", "confluent_kafka", "kafka"):
        pytest.importorskip(package)
    from support.faulted_clients import ROWS, shown_lines

    assert list(shown_lines()) == [row.name for row in ROWS]
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    assert f"is a table of five clients and {len(ROWS)} faults." in page
