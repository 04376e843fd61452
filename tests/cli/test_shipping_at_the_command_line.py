"""`logcore forward` and `logcore mirror` with a netshim broker: records and output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import logcore
from netshim.testing import Kafka

click_testing = pytest.importorskip("click.testing")
pytest.importorskip("confluent_kafka")
from logcore.cli.commands import main  # noqa: E402
from logcore.cli.shipping import renaming  # noqa: E402


def run(*arguments: object, code: int = 0) -> Any:
    found = click_testing.CliRunner().invoke(main, list(map(str, arguments)))
    assert found.exception is None or isinstance(found.exception, SystemExit), (
        found.exception
    )
    assert found.exit_code == code, found.output
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True, durability="os") as directory:
        directory.create_topic("orders", 2)
        for number in range(10):
            directory.append("orders", b"%d" % number, partition=number % 2)
    return path


@pytest.mark.long
def test_topics_are_shipped_under_other_names(data: Path, kafka: Kafka) -> None:
    options = [
        "--bootstrap",
        kafka.bootstrap_servers,
        "--rename",
        "s/^/edge./",
        "--until-end",
    ]
    missing = run("forward", data, *options, code=2)
    assert "kafka-topics --create --topic edge.orders --partitions 2" in missing.output
    done = run("forward", data, *options, "--create-topics")
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["record_count"], last["lag_records"], last["failures"]) == (10, 0, {})
    found = [int(record.value or b"") for record in kafka.records("edge.orders")]
    assert found == [*range(0, 10, 2), *range(1, 10, 2)]
    again = run("forward", data, *options)
    assert json.loads(again.stdout.splitlines()[-1])["record_count"] == 0


@pytest.mark.long
def test_refused_record_is_reported_and_kept(data: Path, kafka: Kafka) -> None:
    kafka.create_topic("orders", 2, {"max.message.bytes": 1_000})
    with logcore.open_dir(data, durability="os") as directory:
        directory.append("orders", b"x" * 2_000, partition=0)
        directory.append("orders", b"behind it", partition=0)
    options = ["--bootstrap", kafka.bootstrap_servers, "--until-end"]
    failed = run("forward", data, *options, code=2)
    assert (
        "stopped: orders-0: offset 5: the cluster refuses a record of orders-0"
        in failed.output
    )
    assert "MSG_SIZE_TOO_LARGE" in failed.output
    assert [
        record.value for record in kafka.records("orders") if record.partition == 1
    ][-1] == b"9"
    run("forward", data, *options, "--on-error", "quarantine", "--hold")
    assert [
        record.value for record in kafka.records("orders") if record.partition == 0
    ][-1] == b"behind it"
    with logcore.open_dir(data, read_only=True) as directory:
        (kept,) = directory.read("orders.dlq")
        assert dict(kept.headers)["logcore.offset"] == b"5"
        assert directory.committed_offsets("orders", 0) == {"forward-default": 7}


@pytest.mark.parametrize(
    "text", ["x/a/b/", "s/a/b", "s/a/b/g", "s", "s/(/b/", r"s/a/\1/", r"s/a/\g<x>/"]
)
def test_invalid_renaming_is_refused(text: str, data: Path) -> None:
    found = run("forward", data, "--bootstrap", "localhost:1", "--rename", text, code=2)
    assert "--rename" in found.output


def test_renaming_is_that_of_sed() -> None:
    rename = renaming(r"s|^(\w+)-old$|new.\1|")
    assert rename is not None
    assert rename("orders-old") == "new.orders"
    assert rename("others") == "others"


def test_a_mirror_has_the_same_offsets_and_groups(tmp_path: Path, kafka: Kafka) -> None:
    kafka.create_topic("orders", 2)
    log = kafka.logdir.partition("orders", 1)
    log.append_many([(None, b"%d" % number) for number in range(10)])
    log.delete_records(4)
    options = [
        "--bootstrap",
        kafka.bootstrap_servers,
        "--topics",
        "orders",
        "--until-end",
    ]
    done = run("mirror", tmp_path / "copy", *options)
    assert json.loads(done.stdout.splitlines()[-1])["record_count"] == 6
    with logcore.open_dir(tmp_path / "copy", read_only=True) as copy:
        assert list(copy.read("orders")) == list(kafka.logdir.read("orders"))
    log.append(b"more")
    assert (
        json.loads(run("mirror", tmp_path / "copy", *options).stdout.splitlines()[-1])[
            "record_count"
        ]
        == 1
    )
    with logcore.open_dir(tmp_path / "copy", durability="os") as copy:
        for _ in range(2):  # the second append uses the fast path
            with pytest.raises(logcore.ReadOnlyLogError, match="the topic is a mirror"):
                copy.append("orders", b"ours", partition=1)
    run("mirror", tmp_path / "new", *options, "--offsets", "new", "--rename", "s/^/c./")
    with logcore.open_dir(tmp_path / "new", read_only=True) as copy:
        found = copy.partition("c.orders", 1).read(0, isolation="read_committed")
        assert [record.value for record in found] == [
            record.value for record in log.read(4)
        ]


@pytest.mark.long
def test_mirror_asks_before_it_truncates(tmp_path: Path, kafka: Kafka) -> None:
    kafka.create_topic("orders")
    log = kafka.logdir.partition("orders", 0)
    log.append_many([(None, b"%d" % number) for number in range(10)])
    options = [
        tmp_path / "copy",
        "--bootstrap",
        kafka.bootstrap_servers,
        "--topics",
        "orders",
        "--until-end",
    ]
    run("mirror", *options)
    log.truncate(6)
    log.append(b"another")
    assert "--on-divergence truncate" in run("mirror", *options, code=2).output
    assert (
        "truncate orders-0 from offset 10 to 6?"
        in run("mirror", *options, "--on-divergence", "truncate", code=1).output
    )
    run("mirror", *options, "--on-divergence", "truncate", "--yes")
    with logcore.open_dir(tmp_path / "copy", read_only=True) as copy:
        assert list(copy.read("orders")) == list(kafka.logdir.read("orders"))
