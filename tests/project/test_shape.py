"""The shape of the source: the length of files is limited, and only a class uses its
private names. A file above the limit contains a second mechanism. Move that mechanism
to a new file, so that the first sentence of each file describes one subject.
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
#: Files without a limit: loops over bytes that the compiled kernels repeat line by
#: line, and tables.
LONG_FILES = ("logcore/kernels/", "netshim/wire/table/")

#: Private names that other classes may use: they are documented, or have no public
#: name.
PUBLIC = {"_asdict", "_fields", "_make", "_replace"} | {
    "_get_running_loop",
    "_is_owned",  # of RLock; threading.Condition also uses it
    "_jsparkSession",
}


def code_lines(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node):
            docstring = node.body[0]
            docstring_lines.update(
                range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
            )
    lines = enumerate(text.splitlines(), 1)
    return sum(
        number not in docstring_lines and bool(line.partition("#")[0].strip())
        for number, line in lines
    )


def test_no_file_is_longer_than_the_limit() -> None:
    lines = {name: code_lines(path) for name, path in FILES.items()}
    long = {
        name: count
        for name, count in lines.items()
        if count > MAX_CODE_LINES and not name.startswith(LONG_FILES)
    }
    assert not long


def test_no_benchmark_has_the_name_of_a_package() -> None:
    """A script imports modules of its directory first. If benchmarks/kafka.py existed,
    benchmarks could not import kafka-python.
    """
    names = {path.stem for path in (SOURCES.parent / "benchmarks").glob("*.py")}
    assert "codec" in names
    assert not names & set(importlib.metadata.packages_distributions())


def names_of(owner: ast.ClassDef) -> set[str]:
    """Return the names that a class defines, assigns, or uses on self, cls or super()."""
    names = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def uses_outside_class(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each use of a private attribute outside of its class.

    A class may use private attributes of its other instances. A function may use private
    attributes of the classes in its module.
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
        enclosing_class = [
            class_
            for class_ in classes
            if class_.lineno <= node.lineno <= (class_.end_lineno or 0)
        ]
        allowed = in_module
        if enclosing_class:
            # The last class is the innermost one, because ast.walk() visits outer nodes
            # first.
            allowed = names[enclosing_class[-1]]
        if node.attr not in allowed:
            yield node.lineno, ast.unparse(node)


def test_no_class_uses_private_names_of_another_class() -> None:
    lines = ""
    for name, path in FILES.items():
        for line, text in uses_outside_class(
            ast.parse(path.read_text(encoding="utf-8"))
        ):
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
    assert len(list(uses_outside_class(ast.parse(text)))) == count


def writer_assignments(text: str) -> Iterator[str]:
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


def test_only_the_writer_assigns_its_attributes() -> None:
    """If only one class assigns a field, a reader finds the lock under which it
    changes.
    """
    assignments = {
        name: sorted(set(writer_assignments(path.read_text("utf-8"))))
        for name, path in FILES.items()
        if name != "logcore/partition/writer.py"
    }
    assert {name: lines for name, lines in assignments.items() if lines} == {}


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
def test_check_of_writer_assignments_detects_assignments(text: str, count: int) -> None:
    assert len(set(writer_assignments(text))) == count


def test_class_names_are_unique() -> None:
    """The exceptions are aio, which repeats the names of the synchronous classes, and
    Producer of Kafka 0.7.
    """
    files_by_class: dict[str, list[str]] = {}
    for name, path in FILES.items():
        if name.startswith("logcore/aio/") or name == "logcore/legacy/producer.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files_by_class.setdefault(node.name, []).append(name)
    assert {
        name: files for name, files in files_by_class.items() if len(files) > 1
    } == {}


def test_no_large_file_and_no_log_directory_is_committed() -> None:
    """The directory of a benchmark with a log of 126 MB was once committed."""
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
