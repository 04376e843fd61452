"""`logcore export --to delta` and `--to iceberg`: options, output and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import logcore

click_testing = pytest.importorskip("click.testing")
pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

from logcore.cli import terminal  # noqa: E402
from logcore.cli.commands import main  # noqa: E402
from support.lakes import KINDS, offsets_of, rows_of  # noqa: E402


def run(*arguments: object) -> Any:
    done = click_testing.CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exception is None or isinstance(done.exception, SystemExit), (
        done.exception
    )
    return done


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic("orders", 2)
        for n in range(10):
            logdir.append(
                "orders",
                b'{"id": %d}' % n,
                key=b"k%d" % n,
                partition=n % 2,
                timestamp_ms=1_700_000_000_000 + 1000 * n,
            )
    return tmp_path / "data"


def to(kind: str, place: Path) -> list[object]:
    """Return the options for the table of support.lakes.target()."""
    if kind == "delta":
        return ["--to", "delta", "--table", place / "orders"]
    return ["--to", "iceberg", "--table", "shop.orders", "--warehouse", place]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_export_prints_its_report_and_continues(
    data: Path, tmp_path: Path, kind: str
) -> None:
    done = run("export", data, "orders", *to(kind, tmp_path), "--until", "3")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("table").endswith("orders")
    assert report == {
        "record_count": 6,
        "commit_count": 1,
        "next_offsets": {"0": 3, "1": 3},
    }
    done = run("export", data, "orders", *to(kind, tmp_path), "--from", "0")
    assert json.loads(done.stdout)["record_count"] == 4
    assert offsets_of(kind, tmp_path) == [(p, n) for p in range(2) for n in range(5)]


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_the_table(data: Path, tmp_path: Path, kind: str) -> None:
    schema = tmp_path / "order.avsc"
    fields = [{"name": "id", "type": "int"}]
    schema.write_text(json.dumps({"type": "record", "name": "O", "fields": fields}))
    arguments = ["--value", "json", "--schema", schema, "--text", "--on-error", "text"]
    arguments += ["--partition-by", "day", "--where", "key!=k3", "--from", "1"]
    done = run("export", data, "orders", *to(kind, tmp_path), *arguments)
    assert done.exit_code == 0, done.stderr
    found = rows_of(kind, tmp_path)
    assert found.column("id").to_pylist() == [2, 4, 6, 8, 5, 7, 9]
    assert found.column("key").to_pylist()[0] == "k2"
    assert str(found.schema.field("id").type) == "int32"
    assert "value_text" in found.column_names


def test_terminal_gets_a_sentence(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logcore.cli.lake.wants_json", lambda as_json: as_json)
    assert terminal.wants_json(True)
    done = run("export", data, "orders", *to("delta", tmp_path))
    assert "10 records exported to delta table" in done.stdout
    assert done.stdout.endswith("in 1 commit\n")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["orders", "--to", "delta"], "needs the name of a table"),
        (["--to", "delta", "--table", "t"], "write DIR TOPIC"),
        (["orders:0", "--to", "delta", "--table", "t"], "write DIR TOPIC"),
        (["orders", "--to", "iceberg", "--table", "shop.t"], "--warehouse lake"),
        (["orders", "--to", "iceberg", "--table", "t", "--warehouse", "w"], "shop.orders"),
        (["orders", "--to", "iceberg", "--table", "s.t", "--warehouse", "w", "--catalog", "c"], "needs a catalog"),
        (["orders", "--to", "iceberg", "--table", "s.t", "--catalog", "nowhere"], "cannot open the catalog 'nowhere'"),
        (["orders", "--to", "iceberg", "--table", "s.t", "--warehouse", "w", "--option", "a=b"], "is for --catalog"),
        (["orders", "--to", "delta", "--table", "t", "--warehouse", "w"], "is for --to iceberg"),
        (["orders", "--to", "delta", "--table", "t", "--force"], "is for files"),
        (["orders", "--to", "delta", "--table", "t", "--isolation", "read_uncommitted"], "only committed records"),
        (["orders", "--to", "delta", "--table", "t", "--schema", "data/meta.properties"], "not an Avro schema"),
        (["orders", "--to", "delta", "--table", "t", "--partition-by", "hour"], "day or header.NAME"),
        (["orders", "--to", "orders.csv", "--table", "t"], "is for tables"),
        (["orders", "--to", "parquet"], "iceberg or delta"),
        (["other", "--to", "delta", "--table", "t"], "other"),
    ],
)  # fmt: skip
def test_mistake_gets_advice_and_makes_no_table(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Any,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("export", data, *arguments)
    assert done.exit_code == 2
    assert reason in " ".join(done.stderr.split())
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("package", ["deltalake", "pyiceberg", "fastavro"])
def test_missing_package_gets_an_install_command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    schema = tmp_path / "order.avsc"
    schema.write_text('{"type": "record", "name": "O", "fields": []}')
    kind = "iceberg" if package == "pyiceberg" else "delta"
    arguments: list[object] = []
    if package == "fastavro":
        arguments = ["--value", "avro", "--schema", schema]
    done = run("export", data, "orders", *to(kind, tmp_path), *arguments)
    assert done.exit_code == 2
    assert "[lake]" in done.stderr
