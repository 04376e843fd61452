"""Tests of the architecture: imports between modules, and effects that only one module
may have.

import-linter reads the layers from .importlinter. The tests check the other rules with
syntax trees: only `fs` accesses the disk, time and random numbers are arguments, no module
starts threads, and heavy optional packages are imported inside functions.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"

#: Parts of logcore that may use the disk, the clock or random numbers themselves, with
#: the reason. A package includes its modules.
EXEMPT = {
    "logcore.fs": "accesses the disk, and the clock for its timeouts",
    "logcore.fs.watch": "a part of fs: it waits for changes of files",
    "logcore.fs.lock_holders": "a part of fs: it reads /proc for messages",
    "logcore.schemas.protoc": "runs a compiler on the text of a schema",
    "logcore.testing": "builds disks, clocks and crashes",
    "logcore.aio": "runs blocking calls in threads, so that the loop continues",
    "logcore.query.topic_dataset": "imported by the one function that needs pyarrow",
    "logcore.cli.commands": "a program: it reads files, clocks and terminals",
    "logcore.cli.command_list": "a program, as above",
    "logcore.cli.info": "a program, as above",
    "logcore.cli.maintenance": "a program, as above",
    "logcore.cli.options": "a program, as above",
    "logcore.cli.export": "a program, as above",
    "logcore.cli.consume": "a program, as above",
    "logcore.cli.groups": "a program, as above",
    "logcore.cli.read": "a program, as above",
    "logcore.cli.lake": "a program's part: options of a command, and its result",
    "logcore.cli.schemas": "a program's part: options of commands",
    "logcore.cli.shipping": "a program, as above",
    "logcore.cli.sql": "a program, as above",
    "logcore.cli.arguments": "a program, as above",
    "logcore.cli.filters": "a program's part: its errors are those of the command line",
    "logcore.cli.registry": "a program, as above",
    "logcore.cli.topics": "a program, as above",
    "logcore.cli.transactions": "a program, as above",
    "logcore.cli.opening": "a program's part: an option of commands",
    "logcore.cli.append": "a program, as above",
    "logcore.cli.backup": "a program, as above",
    "logcore.cli.demo": "a program, as above",
    "logcore.cli.terminal": "a program's part: it prints",
    "logcore.cli.bench": "a program's part: it times bare system calls",
    "logcore.__main__": "a program, as above",
    "netshim.command": "a program, as above",
    "netshim.access_command": "a program, as above",
    "netshim.follow_command": "a program, as above",
    "netshim.cluster_command": "a program, as above",
    "netshim.http_command": "a program, as above",
    "netshim.console_command": "a program, as above",
    "netshim.replay_command": "a program, as above",
}

#: Modules that read the disk, the clock or random numbers, or start threads and
#: processes. `threading` is checked below, because locks are allowed.
MODULES_WITH_EFFECTS = {
    "fcntl", "glob", "mmap", "multiprocessing", "random", "secrets", "shutil", "signal", "subprocess", "tempfile",
    "time",
}  # fmt: skip

#: Names in `os` that do not access the disk: conversions, constants and facts about
#: this process.
PURE_OS = {
    "PathLike",
    "environ",
    "fsdecode",
    "fsencode",
    "fspath",
    "getenv",
    "getpid",
    "name",
    "sep",
    "strerror",
}
PURE_OS_PATH = {
    "basename",
    "commonpath",
    "dirname",
    "isabs",
    "join",
    "normpath",
    "split",
    "splitext",
}

#: Names with effects in modules that are allowed otherwise.
NAMES_WITH_EFFECTS = {
    "concurrent.futures": {"ProcessPoolExecutor", "ThreadPoolExecutor"},
    "datetime.date": {"today"},
    "datetime.datetime": {"now", "today", "utcnow"},
    "io": {"FileIO", "open", "open_code"},  # BytesIO uses no file
    "numpy": {
        "fromfile",
        "genfromtxt",
        "load",
        "loadtxt",
        "memmap",
        "random",
        "save",
        "savetxt",
        "savez",
    },
    "pathlib": {"Path", "PosixPath", "WindowsPath"},  # PurePath uses no file
    "threading": {"Thread", "Timer"},
    "uuid": {"uuid1", "uuid4"},
}

#: Exceptions of one module: the thread of a producer.
ALLOWED = {"logcore.producer.producer": {"threading.Thread"}}

#: Packages that only functions may import.
INSIDE_FUNCTIONS_ONLY = {
    "click",
    "confluent_kafka",
    "cramjam",
    "kazoo",
    "pandas",
    "polars",
    "pyarrow",
    "rich",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_exempt(module: str) -> bool:
    return any(module == exempt or module.startswith(f"{exempt}.") for exempt in EXEMPT)


MODULES = {module_name(path): path for path in sorted(SOURCES.rglob("*.py"))}
PURE_MODULES = [
    module
    for module in MODULES
    if module.split(".")[0] == "logcore" and not is_exempt(module)
]


def parse(module: str) -> ast.Module:
    return ast.parse(
        MODULES[module].read_text(encoding="utf-8"), filename=str(MODULES[module])
    )


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted name of each import and of each use of an imported
    name.
    """
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                imported[alias.asname or top] = alias.name if alias.asname else top
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    own = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    builtins = {"input", "open", "print"} - own - set(imported)
    for node in ast.walk(tree):
        names: list[str] = []
        base: ast.expr | None = node if isinstance(node, ast.Attribute) else None
        while isinstance(base, ast.Attribute):
            names.insert(0, base.attr)
            base = base.value
        if isinstance(base, ast.Name) and base.id in imported:
            yield base.lineno, ".".join([imported[base.id], *names])
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in builtins
        ):
            yield node.lineno, f"builtins.{node.func.id}"


def has_effect(name: str) -> bool:
    head, _, rest = name.partition(".")
    if head == "os":
        first, _, second = rest.partition(".")
        if first == "path":
            return second.split(".")[0] not in PURE_OS_PATH | {""}
        return first not in PURE_OS | {""}
    if head in MODULES_WITH_EFFECTS or head == "builtins":
        return True
    return any(
        name == f"{module}.{module_with_effects}"
        or name.startswith(f"{module}.{module_with_effects}.")
        for module, modules in NAMES_WITH_EFFECTS.items()
        for module_with_effects in modules
    )


def places_as_text(places: Iterable[tuple[str, int, str]]) -> str:
    """Return a line for each place: module, line number and text."""
    return "".join(
        f"\n  {MODULES[module].relative_to(ROOT)}:{line}: {text}"
        for module, line, text in places
    )


@pytest.mark.long
def test_only_fs_accesses_disk_clock_and_random_numbers():
    places = set()
    for module in PURE_MODULES:
        allowed = ALLOWED.get(module, set())
        for line, name in uses(parse(module)):
            if has_effect(name) and name not in allowed:
                places.add((module, line, name))
    assert not places, (
        f"the disk, the clock and random numbers must be accessed through logcore.fs:{places_as_text(sorted(places))}"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("open('x')", "builtins.open"),
        ("import os\nos.unlink('x')", "os.unlink"),
        ("import os as o\no.path.exists('x')", "os.path.exists"),
        ("from os import path\npath.getsize('x')", "os.path.getsize"),
        ("from os.path import exists", "os.path.exists"),
        ("def f():\n    from time import time", "time.time"),
        ("import datetime as dt\ndt.datetime.now()", "datetime.datetime.now"),
        ("from datetime import datetime\ndatetime.now()", "datetime.datetime.now"),
        ("import numpy as np\nnp.random.default_rng()", "numpy.random.default_rng"),
        ("import threading\nthreading.Thread(target=f)", "threading.Thread"),
        ("from pathlib import Path", "pathlib.Path"),
        ("import io\nio.open('x')", "io.open"),
    ],
)
def test_check_detects_effects(text, name):
    assert name in {name for _, name in uses(ast.parse(text)) if has_effect(name)}


def test_check_accepts_code_without_effects():
    text = """
import io, os, threading, numpy as np
from os import PathLike, fspath

def open(path: PathLike) -> np.ndarray: return os.path.join(fspath(path), "x")

open(1); io.BytesIO(); threading.Lock(); fs.open(2); clock.time()
"""
    assert not [name for _, name in uses(ast.parse(text)) if has_effect(name)]


def imported_at_import_time(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the top package of each import that runs when the module is
    imported. Imports for type checkers do not run.
    """
    unvisited: list[ast.AST] = [tree]
    while unvisited:
        node = unvisited.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith(
            "TYPE_CHECKING"
        ):
            unvisited.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]
        unvisited.extend(ast.iter_child_nodes(node))


def imports_anywhere(tree: ast.Module) -> Iterator[tuple[int, str]]:
    return ((line, name.split(".")[0]) for line, name in uses(tree))


@pytest.mark.long
def test_optional_packages_are_imported_inside_functions():
    places = []
    for module in MODULES:
        if is_exempt(module):
            continue
        for line, name in imported_at_import_time(parse(module)):
            if name in INSIDE_FUNCTIONS_ONLY:
                places.append((module, line, name))
    assert not places, (
        f"import it inside the function that needs it:{places_as_text(places)}"
    )


def test_pyspark_is_imported_only_in_its_adapter():
    places = []
    for module in MODULES:
        if module.split(".")[0] == "pyspark_logcore":
            continue
        for line, name in imports_anywhere(parse(module)):
            if name == "pyspark":
                places.append((module, line, name))
    assert not places, f"only pyspark_logcore imports pyspark:{places_as_text(places)}"


def test_imports_follow_the_layers():
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    result = subprocess.run(
        [sys.executable, "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_loads_no_optional_package():
    """Spark executors and command lines wait for `import logcore`. It imports numpy and
    crc32c, but no codec, event loop or table library.
    """
    heavy = [
        "asyncio",
        "click",
        "cramjam",
        "lz4",
        "multiprocessing",
        "pandas",
        "pyarrow",
        "rich",
        "zstandard",
    ]
    heavy += [
        "difflib",
        "hashlib",
        "urllib.parse",
        "logcore.cleaner",
        "logcore.format.group_records",
        "logcore.registry",
    ]
    command = (
        f"import sys, logcore; print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_names_of_test_modules_are_unique():
    """pytest imports test modules by their file names, so that two equal names end the
    run.
    """
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
