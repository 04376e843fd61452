"""`logcore export`: each format contains the records, and no partial file is visible."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import logcore

click_testing = pytest.importorskip("click.testing")
pa = pytest.importorskip("pyarrow")
import pyarrow.feather  # noqa: E402
import pyarrow.parquet  # noqa: E402

from logcore.cli import export as module  # noqa: E402
from logcore.cli.commands import main  # noqa: E402
from logcore.query.arrow_batches import grouped  # noqa: E402

T0 = 1700000000000


def run(*arguments: object, stdin: str | None = None) -> Any:
    done = click_testing.CliRunner().invoke(
        main, list(map(str, arguments)), input=stdin
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), (
        done.exception
    )
    return done


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic("t", 3)
        for n in range(40):
            logdir.append(
                "t",
                b"v%d" % n,
                key=b"k%d" % n,
                partition=n % 2,
                timestamp_ms=T0 + 1000 * n,
            )
        logdir.append(
            "t",
            b"\xff",
            key=None,
            partition=0,
            headers=[("a", b"\xfe"), ("b", None)],
            timestamp_ms=T0,
        )
        logdir.append("t", None, key=b"", partition=1, timestamp_ms=T0)
    return tmp_path / "data"


def table(data: Path) -> Any:
    with logcore.open_dir(data, read_only=True) as logdir:
        return logdir.scan("t").to_table()


@pytest.mark.parametrize(
    ("suffix", "reader"),
    [("parquet", pyarrow.parquet.read_table), ("arrow", pyarrow.feather.read_table)],
)
def test_columns_are_those_of_a_scan(
    data: Path, tmp_path: Path, suffix: str, reader: Any
) -> None:
    target = tmp_path / f"t.{suffix}"
    done = run("export", data, "t", "--to", target)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {
        "path": str(target),
        "records": 42,
        "size_bytes": target.stat().st_size,
    }
    found = reader(target)
    assert found.combine_chunks() == table(data).combine_chunks()
    assert found.schema == table(data).schema


def test_append_accepts_exported_ndjson(data: Path, tmp_path: Path) -> None:
    run("export", data, "t", "--to", tmp_path / "t.ndjson")
    text = (tmp_path / "t.ndjson").read_text()
    assert text == run("read", data, "t", "--order", "partition").stdout
    run("append", tmp_path / "copy-0", "--create", "--format", "ndjson", stdin=text)
    with logcore.open(tmp_path / "copy-0", read_only=True) as copy:
        assert [record.value for record in copy.read(0)] == table(data)[
            "value"
        ].to_pylist()


def test_csv_is_text(data: Path, tmp_path: Path) -> None:
    run("export", data, "t", "--to", tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert rows[1] == {
        "topic": "t",
        "partition": "0",
        "offset": "1",
        "timestamp": "2023-11-14T22:13:22.000Z",
        "key": "k2",
        "value": "v2",
        "headers": "",
    }
    odd = rows[20]
    assert (odd["value"], json.loads(odd["headers"])) == (
        "\\xFF",
        [{"key": "a", "value": "\\xFE"}, {"key": "b", "value": None}],
    )
    assert text.splitlines()[-1].endswith('"",,'), (
        "an empty key is quoted, a null value is an empty field"
    )


def test_text_columns(data: Path, tmp_path: Path) -> None:
    run("export", data, "t:1", "--to", tmp_path / "t.parquet", "--text")
    found = pyarrow.parquet.read_table(tmp_path / "t.parquet")
    assert found.schema.field("value").type == pa.string()
    assert found["key"].to_pylist()[:2] == ["k1", "k3"] and len(found) == 21


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--where", "key~^k1"], 11),
        (["--from", 10], 22),
        (["--until", 10], 20),
        (["--from", "2023-11-14T22:13:50Z"], 12),
        (["--where", "key=none"], 0),
    ],
)
@pytest.mark.parametrize("suffix", ["parquet", "csv", "ndjson", "arrow", "jsonl"])
def test_options_select_the_exported_records(
    data: Path, tmp_path: Path, suffix: str, arguments: list[object], count: int
) -> None:
    done = run("export", data, "t", "--to", tmp_path / f"t.{suffix}", *arguments)
    assert json.loads(done.stdout)["records"] == count


def test_directory_of_a_partition_is_exported(data: Path, tmp_path: Path) -> None:
    run("export", data / "t-1", "--to", tmp_path / "t.parquet")
    assert set(
        pyarrow.parquet.read_table(tmp_path / "t.parquet")["partition"].to_pylist()
    ) == {1}


def test_memory_holds_one_group(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GROUP_ROWS", 1)
    run("export", data, "t", "--to", tmp_path / "t.parquet")
    assert pyarrow.parquet.ParquetFile(tmp_path / "t.parquet").num_row_groups > 1
    assert pyarrow.parquet.read_table(tmp_path / "t.parquet").num_rows == 42


def test_groups_end_at_either_limit() -> None:
    batches = [
        pa.record_batch({"a": pa.array([1] * rows, pa.int64())})
        for rows in (3, 1, 4, 1)
    ]
    by_rows = [
        [batch.num_rows for batch in group]
        for group in grouped(batches, most_rows=4, most_bytes=1 << 30)
    ]
    assert by_rows == [[3, 1], [4], [1]]
    by_bytes = [
        [batch.num_rows for batch in group]
        for group in grouped(batches, most_rows=99, most_bytes=40)
    ]
    assert by_bytes == [[3, 1, 4], [1]]


def test_existing_file_is_not_replaced(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "t.csv"
    target.write_text("mine")
    done = run("export", data, "t", "--to", target)
    assert (done.exit_code, target.read_text(), "--force" in done.stderr) == (
        2,
        "mine",
        True,
    )
    assert run("export", data, "t", "--to", target, "--force").exit_code == 0
    assert target.read_text() != "mine"


def test_interrupted_export_leaves_no_file(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())

    def stop(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_sync", stop)
    assert run("export", data, "t", "--to", tmp_path / "t.csv").exit_code == 130
    assert sorted(tmp_path.iterdir()) == before


def test_the_file_and_then_its_name_are_synced(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "t.csv"
    synced: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        module,
        "_sync",
        lambda path: synced.append((Path(path) == tmp_path, target.exists())),
    )
    assert run("export", data, "t", "--to", target).exit_code == 0
    assert synced == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["{}", "t", "--to", "x.xlsx"], "expected a suffix of .parquet, .arrow, .csv"),
        (["{}", "t", "--to", "x"], "expected a suffix"),
        (["{}", "u", "--to", "x.csv"], "no such topic"),
        (["{}", "--to", "x.csv"], "name one of them"),
        (["{}", "t", "--to", "nowhere/x.csv"], "nowhere"),
        (["{}", "t"], "--to"),
    ],
)
def test_invalid_exports_write_nothing(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("export", *(word.format(data) for word in words))
    assert done.exit_code == 2 and error in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_export_syncs_the_file_and_then_its_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sync of the directory, a power cut could remove the name of a file that
    export has reported.
    """
    steps: list[str] = []
    sync, replace = module._sync, module.os.replace
    monkeypatch.setattr(
        module,
        "_sync",
        lambda path: (steps.append(f"sync {Path(path).is_dir()}"), sync(path)),
    )
    monkeypatch.setattr(
        module.os, "replace", lambda *given: (steps.append("replace"), replace(*given))
    )
    assert run("export", data, "t", "--to", tmp_path / "t.csv").exit_code == 0
    assert steps == ["sync False", "replace", "sync True"]
