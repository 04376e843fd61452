"""The public API: its size, its order in the docs, and the detection of wrong calls.
The type checkers detect each mistake below, or an error of the library contains the
reason. If mypy and pyright are installed, they check a file with all mistakes. Each
mistake is also executed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import logcore

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
from datetime import datetime, timezone
import numpy as np
import logcore
log = logcore.open("orders-0", create=True, durability="os")
logdir = logcore.open_dir("shop", create=True, durability="os")
if "orders" not in logdir:
    logdir.create_topic("orders", partitions=2)
"""

#: A mistake, its first detection ("types" or "run"), and the text of the error when it
#: is run.
MISTAKES = [
    # append
    ('log.append("text")', "types", "value must be bytes"),
    ("log.append(5)", "types", "value must be bytes"),
    ('log.append(b"v", key="text")', "types", "key must be bytes"),
    ('log.append(b"v", b"key")', "types", "positional argument"),
    ('log.append(value=b"v", kye=b"k")', "types", "unexpected keyword argument 'kye'"),
    (
        'log.append(b"v", headers={"name": "value"})',
        "types",
        "must be bytes",
    ),
    (
        'log.append(b"v", headers=[("name",)])',
        "types",
        "header is a .name, value. pair",
    ),
    (
        'log.append(b"v", headers=[(b"name", b"value")])',
        "types",
        "header name must be str",
    ),
    (
        'log.append(b"v", headers=[("name", "value")])',
        "types",
        "header value must be bytes",
    ),
    ('log.append(b"v", timestamp_ms=1.5)', "types", "not a timestamp"),
    ('log.append(b"v", timestamp_ms="2026-01-01")', "types", "not a timestamp"),
    (
        'log.append(b"v", timestamp_ms=datetime(2026, 1, 1))',
        "run",
        "datetime with a time zone",
    ),
    ('log.append(b"v", timestamp_ms=2**70)', "run", "not a timestamp"),
    ('log.append(b"v", durability="group")', "types", "'os', 'disk' or None"),
    ('log.append(b"v", expected_offset="0")', "types", "expected_offset"),
    (
        'log.append(b"v", expected_offset=10**6)',
        "run",
        "does not end where this append expects",
    ),
    # append_many
    ('log.append_many([b"v"])', "types", "2 to 4 fields|give .key, value"),
    ('log.append_many([(b"v",)])', "types", "2 to 4 fields"),
    ('log.append_many([("k", b"v")])', "types", "key must be bytes"),
    ('log.append_many([(b"k", "v")])', "types", "value must be bytes"),
    (
        'log.append_many([(b"k", b"v", {"h": 1})])',
        "types",
        "must be bytes",
    ),
    ('log.append_many([(b"k", b"v", 1_700_000_000_000)])', "types", "headers must be"),
    ('log.append_many([(b"k", b"v", None, "now")])', "types", "not a timestamp"),
    ('log.append_many([(b"k", b"v", None, None, 0)])', "types", "2 to 4 fields"),
    ('log.append_many([logcore.Record(0, 0, b"k", b"v")])', "types", "2 to 4 fields"),
    ('log.append_many({"key": b"value"})', "types", "must be bytes|2 to 4 fields"),
    ("log.append_many(None)", "types", "append_many takes records"),
    # append_columns
    ("log.append_columns()", "run", "keys or values"),
    ('log.append_columns(b"ab")', "types", "positional argument"),
    ('log.append_columns(values=b"ab")', "types", "Arrow array or .data, offsets."),
    ('log.append_columns(values=("ab", [0, 1, 2]))', "types", "bytes or a uint8 array"),
    (
        'log.append_columns(values=(b"ab", [0.0, 1.0, 2.0]))',
        "types",
        "list of integers",
    ),
    ('log.append_columns(values=(b"ab", [0, 3]))', "run", "inside the data"),
    (
        'log.append_columns(values=(b"ab", [0, 1, 2]), keys=(b"a", [0, 1]))',
        "run",
        "same number of rows",
    ),
    (
        'log.append_columns(values=(b"ab", [0, 1, 2]), timestamps_ms=[1.5, 2.5])',
        "types",
        "must be integers",
    ),
    (
        'log.append_columns(values=(b"ab", [0, 1, 2]), timestamps_ms=[1])',
        "run",
        "one for each record",
    ),
    (
        'log.append_columns(values=(b"ab", [0, 1, 2]), timestamps=[1, 2])',
        "types",
        "unexpected keyword argument",
    ),
    # scan, read, topics
    ('log.scan(columns="offset")', "run", "list of names"),
    ('log.scan(columns=["ofset"])', "run", "did you mean 'offset'"),
    (
        'log.scan(isolation="committed")',
        "types",
        "'read_uncommitted' or 'read_committed'",
    ),
    ('log.scan("earliest")', "types", "start is not an offset"),
    (
        "log.read(datetime(2026, 1, 1, tzinfo=timezone.utc))",
        "types",
        r"offset_for_timestamp\(\)",
    ),
    ("log.read()", "types", "missing 1 required positional argument"),
    ("log.read(-1)", "run", "outside the log"),
    ('logdir.append("orders", "text")', "types", "value must be bytes"),
    ('logdir.append("orders", b"v", key="anna")', "types", "key must be bytes"),
    ('logdir.append("ordres", b"v")', "run", "did you mean 'orders'"),
    ('logdir.append(b"v")', "types", "missing 1 required positional argument"),
    ('logdir.scan("orders", 5)', "types", "offsets by partition"),
    ('logdir.read("orders", order="offset")', "types", "'partition' or 'time'"),
    ('logdir.read("orders", partitions=0)', "types", "partitions"),
]


def test_list_of_mistakes_is_not_shortened() -> None:
    assert len(MISTAKES) >= 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("mistake", "finder", "message"), MISTAKES, ids=[row[0] for row in MISTAKES]
)
def test_each_mistake_is_an_error_with_its_reason(
    mistake: str,
    finder: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(PRELUDE, names)
    log = names["log"]
    logdir = names["logdir"]
    assert isinstance(log, logcore.Log)
    assert isinstance(logdir, logcore.LogDir)
    # Python itself raises TypeError for unknown or missing arguments. The library
    # raises the other errors.
    kinds = (logcore.LogcoreError, TypeError)
    with pytest.raises(kinds, match=message):
        exec(mistake, names)
    assert log.log_end_offset == 0, "no part of the wrong call is stored"
    log.close()
    logdir.close()


def _found_by_mypy(path: Path) -> set[int]:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-incremental",
            "--no-error-summary",
            str(path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        int(line) for line in re.findall(rf"{path.name}:(\d+): error", result.stdout)
    }


def _found_by_pyright(path: Path) -> set[int]:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "--outputjson",
            "--pythonpath",
            sys.executable,
            str(path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = json.loads(result.stdout)["generalDiagnostics"]
    return {
        row["range"]["start"]["line"] + 1 for row in rows if row["severity"] == "error"
    }


@pytest.mark.static
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_find_wrong_types(checker: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"needs {checker}: make lint installs it")
    path = tmp_path / "mistakes.py"
    head = PRELUDE.strip().splitlines()
    path.write_text("\n".join([*head, *(mistake for mistake, _, _ in MISTAKES), ""]))
    found_lines = {"mypy": _found_by_mypy, "pyright": _found_by_pyright}[checker](path)
    expected = {
        len(head) + index
        for index, (_, finder, _) in enumerate(MISTAKES, 1)
        if finder == "types"
    }
    lines = path.read_text().splitlines()
    assert not [lines[line - 1] for line in sorted(expected - found_lines)], "not seen"
    unexpected = [
        lines[line - 1] for line in sorted(found_lines - expected) if line > len(head)
    ]
    assert not unexpected, 'a type checker found a mistake that is marked "run"'


def test_log_has_few_public_names_and_docs_begin_with_common_ones() -> None:
    names = [name for name in dir(logcore.Log) if not name.startswith("_")]
    assert len(names) <= 47, names
    spec = importlib.util.spec_from_file_location(
        "docs_site", ROOT / "tools" / "docs_site.py"
    )
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    documented = site.members_of("logcore.Log")
    assert documented[:8] == [
        "append",
        "append_many",
        "append_columns",
        "read",
        "scan",
        "get",
        "tail",
        "close",
    ]
    assert sorted(documented) == sorted(set(names) - set(site.FOR_HOSTS)), (
        "the docs must list each public name once"
    )
    for name, first_names in site.NEEDED.items():
        documented = site.members_of(name)
        assert tuple(documented[: len(first_names)]) == first_names
        assert len(documented) == len(set(documented))
        module, _, class_name = name.rpartition(".")
        class_ = getattr(importlib.import_module(module), class_name)
        assert all(hasattr(class_, first_name) for first_name in first_names), name
