"""`logcore transactions`: the list of open transactions, and ending one by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import logcore

click_testing = pytest.importorskip("click.testing")
from logcore.cli.commands import main  # noqa: E402


def run(*arguments: object, code: int = 0) -> Any:
    found = click_testing.CliRunner().invoke(main, list(map(str, arguments)))
    assert found.exception is None or isinstance(found.exception, SystemExit), (
        found.exception
    )
    assert found.exit_code == code, found.output
    return found


def rows(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


def values(data: Path) -> list[bytes | None]:
    with logcore.open_dir(data, read_only=True) as directory:
        return [
            record.value
            for record in directory.partition("t", 0).read(
                0, isolation="read_committed"
            )
        ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A transaction that was prepared when its producer was closed, and an id without
    one.
    """
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t")
        with directory.producer(
            transactional_id="prepared", two_phase=True, threaded=False
        ) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send("t", b"v")
            producer.prepare_transaction()
        with directory.producer(transactional_id="idle", threaded=False) as producer:
            producer.init_transactions()
    return path


def test_open_transactions_are_listed(data: Path) -> None:
    (row,) = rows("transactions", "list", data)
    assert (row["id"], row["state"], row["partitions"]) == ("prepared", "Ongoing", 1)
    assert [row["id"] for row in rows("transactions", "list", data, "--all")] == [
        "idle",
        "prepared",
    ]
    assert "prepared" in run("transactions", "list", data).output


@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_open_transaction_is_ended_by_hand(data: Path, decision: str) -> None:
    assert values(data) == []
    run("transactions", decision, data, "prepared")
    assert values(data) == [b"v"] * (decision == "commit")
    assert rows("transactions", "list", data) == []
    found = run("transactions", decision, data, "prepared", code=2)
    assert "no transaction of 'prepared' is open" in found.output


def test_unknown_id_is_an_error(data: Path) -> None:
    assert (
        "no transaction of 'other' is open"
        in run("transactions", "abort", data, "other", code=2).output
    )


def test_a_directory_without_transactions_lists_none(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True):
        pass
    assert rows("transactions", "list", tmp_path / "data") == []
