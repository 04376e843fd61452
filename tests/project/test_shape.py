"""The shape of the source: files of limited length, and classes whose private names
only they use.

A file above the limit has a second mechanism, which belongs in a file of its own. Split
it by subject, so that the first sentence of each file describes one subject.
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.static

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
FILES = {str(path.relative_to(SOURCES)): path for path in sorted(SOURCES.rglob("*.py"))}

#: Without comments, docstrings and blank lines, so that the limit shortens no
#: explanation.
MAX_CODE_LINES = 930
#: Loops over bytes that the compiled kernels repeat line by line; and tables.
LONG_FILES = ("logcore/kernels/", "netshim/wire/table/")

#: Public despite their names, or without another name in their packages.
PUBLIC = {"_asdict", "_fields", "_make", "_replace"} | {
    "_get_running_loop",
    "_is_owned",  # of RLock; threading.Condition relies on it too
    "_jsparkSession",
}


def code_lines(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    explained: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node):
            first = node.body[0]
            explained.update(
                range(first.lineno, (first.end_lineno or first.lineno) + 1)
            )
    lines = enumerate(text.splitlines(), 1)
    return sum(
        number not in explained and bool(line.partition("#")[0].strip())
        for number, line in lines
    )


def test_no_file_is_long() -> None:
    lines = {name: code_lines(path) for name, path in FILES.items()}
    long = {
        name: count
        for name, count in lines.items()
        if count > MAX_CODE_LINES and not name.startswith(LONG_FILES)
    }
    assert not long


def test_no_benchmark_hides_a_package() -> None:
    """A script imports its neighbors first: beside benchmarks/kafka.py, kafka-python
    could not be imported.
    """
    names = {path.stem for path in (SOURCES.parent / "benchmarks").glob("*.py")}
    assert "codec" in names
    assert not names & set(importlib.metadata.packages_distributions())


def names_of(owner: ast.ClassDef) -> set[str]:
    """Return the attributes and methods of a class, as far as its text contains them."""
    found = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def foreign_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return line and text of each use of a private attribute outside of its class.

    A class may use private attributes of its other instances. A function of a module
    may use private attributes of its classes, because it is a method that users do not
    see.
    """
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {node: names_of(node) for node in classes}
    in_module = set().union(*names.values())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or is_self(node.value):
            continue
        if (
            not node.attr.startswith("_")
            or node.attr.startswith("__")
            or node.attr in PUBLIC
        ):
            continue
        around = [
            class_
            for class_ in classes
            if class_.lineno <= node.lineno <= (class_.end_lineno or 0)
        ]
        known = in_module
        if around:
            # Keep the innermost: ast.walk() goes from the outside in.
            known = names[around[-1]]
        if node.attr not in known:
            yield node.lineno, ast.unparse(node)


def test_no_class_reads_the_private_names_of_another() -> None:
    lines = ""
    for name, path in FILES.items():
        for line, text in foreign_reads(ast.parse(path.read_text(encoding="utf-8"))):
            lines += f"\n  {name}:{line}: {text}"
    assert not lines, f"give it a public name, or a function beside its class:{lines}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("class A:\n def f(self, other): return other._x", 1),
        ("class A:\n def f(self): return self.other._x", 1),
        (
            "class A:\n def __init__(self): self._x = 1\nclass B:\n def f(self, a): return a._x",
            1,
        ),
        ("def f(other): return other._x", 1),
        ("import module\nmodule._f()", 1),
        ("class A:\n def f(self, other): other._x = 1; self._x = 2", 0),
        ("class A:\n def f(self): return self._x\ndef g(a): return a._x", 0),
        (
            "class A:\n def f(self, row): return super()._f(row._replace(x=1), row.__class__)",
            0,
        ),
    ],
)
def test_check_of_private_names_detects_uses(text: str, count: int) -> None:
    assert len(list(foreign_reads(ast.parse(text)))) == count


def assigned(text: str) -> Iterator[str]:
    """Yield the assignments to an attribute of a writer, or of an object that it has."""
    for node in ast.walk(ast.parse(text)):
        for target in ast.walk(node):
            if not isinstance(target, ast.Attribute) or isinstance(
                target.ctx, ast.Load
            ):
                continue
            owner = ast.unparse(target.value).split(".")
            if {"writer", "_writer"} & set(owner):
                yield f"{target.lineno}: {ast.unparse(target)}"


def test_only_writer_assigns_attributes_of_writer() -> None:
    """With one owner, a reader finds the lock under which a field changes."""
    found = {
        name: sorted(set(assigned(path.read_text("utf-8"))))
        for name, path in FILES.items()
        if name != "logcore/partition/writer.py"
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("writer.active = one", 1),
        ("self._writer.state.end += 1", 1),
        ("del log.host.writer.active", 1),
        ("a, writer.b = c", 1),
        ("self.writer = writer", 0),
        ("writer.publish(end=1)", 0),
    ],
)
def test_check_of_writer_assignments_finds_them(text: str, count: int) -> None:
    assert len(set(assigned(text))) == count


def test_each_class_name_exists_once() -> None:
    """Except for aio, which repeats the names of the synchronous classes, and for
    Producer, which has its name from Kafka 0.7.
    """
    places: dict[str, list[str]] = {}
    for name, path in FILES.items():
        if name.startswith("logcore/aio/") or name == "logcore/legacy/producer.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_large_file_and_no_log_directory_is_committed() -> None:
    """A benchmark's directory with a log of 126 MB was committed by accident."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a clone")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = {path: path.stat().st_size for path in paths if path.is_file()}
    assert {path: size for path, size in sizes.items() if size > 1 << 20} == {}
    directories = [path for path in sizes if path.name == "meta.properties"]
    assert all(
        path.relative_to(ROOT).parts[:2] in (("tests", "data"), ("examples", "data"))
        for path in directories
    ), directories
