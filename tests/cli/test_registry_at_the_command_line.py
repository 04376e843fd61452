"""`logcore registry`: its output, and that it changes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from logcore.registry import open_registry

click_testing = pytest.importorskip("click.testing")
from logcore.cli.commands import main  # noqa: E402


def run(*arguments: object, code: int = 0) -> Any:
    found = click_testing.CliRunner().invoke(main, ["registry", *map(str, arguments)])
    assert found.exit_code == code, found.output
    return found


def rows(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*arguments).stdout.splitlines()]


def test_nodes_are_listed_and_shown(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with open_registry(data) as registry:
        registry.create("/brokers/ids/1", b'{"host":"h"}', ephemeral=True)
        registry.create("/text", b"plain")
        registry.create("/bytes", b"\xff\x00")
        session = registry.session.id
        before = sorted(path for path in (tmp_path / "data.registry").rglob("*"))
        assert rows("ls", data) == [
            {
                "path": "/brokers",
                "version": 0,
                "session": None,
                "size_bytes": 0,
                "children": 1,
            },
            {
                "path": "/bytes",
                "version": 0,
                "session": None,
                "size_bytes": 2,
                "children": 0,
            },
            {
                "path": "/text",
                "version": 0,
                "session": None,
                "size_bytes": 5,
                "children": 0,
            },
        ]
        assert rows("ls", data, "/brokers/ids") == [
            {
                "path": "/brokers/ids/1",
                "version": 0,
                "session": session,
                "size_bytes": 12,
                "children": 0,
            }
        ]
        assert rows("ls", data, "/missing") == []
        assert rows("get", data, "/brokers/ids/1") == [
            {
                "path": "/brokers/ids/1",
                "version": 0,
                "session": session,
                "pid": os.getpid(),
                "value": {"host": "h"},
            }
        ]
        assert rows("get", data, "/text") == [
            {"path": "/text", "version": 0, "session": None, "value": "plain"}
        ]
        assert rows("get", data, "/bytes") == [
            {"path": "/bytes", "version": 0, "session": None, "value": "ff00"}
        ]
        assert rows("tree", data, "/brokers") == [
            {"path": "/brokers/ids", "version": 0, "session": None, "value": ""},
            {
                "path": "/brokers/ids/1",
                "version": 0,
                "session": session,
                "value": {"host": "h"},
            },
        ]
        assert [row["path"] for row in rows("tree", data)] == [
            "/brokers", "/brokers/ids", "/brokers/ids/1", "/bytes", "/text",
        ]  # fmt: skip
        assert (
            sorted(path for path in (tmp_path / "data.registry").rglob("*")) == before
        )


def test_a_tree_is_drawn_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logcore.cli.registry.wants_json", lambda as_json: as_json)
    with open_registry(tmp_path / "data") as registry:
        registry.create("/brokers/ids/1", b'{"host":"h"}', ephemeral=True)
        registry.create("/text", b"x" * 300)
        assert run("tree", tmp_path / "data").stdout.splitlines() == [
            "brokers",
            "  ids",
            '    1 (ephemeral)  {"host": "h"}',
            f"text  {'x' * 120}...",
        ]


def test_missing_node_is_an_error_with_advice(tmp_path: Path) -> None:
    assert "no registry here" in run("ls", tmp_path / "data", code=2).stderr
    open_registry(tmp_path / "data").close()
    found = run("get", tmp_path / "data", "/missing", code=2)
    assert "no such node" in found.stderr
    assert "logcore registry ls" in found.stderr
    assert (
        "a path begins with" in run("get", tmp_path / "data", "missing", code=2).stderr
    )
