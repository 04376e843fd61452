"""`logcore consume` and `logcore group`: output, commits, changes and refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.consumer import Consumer
from logcore.errors import ConsumerStateError, RebalanceInProgressError
from logcore.format.consumer_group_records import (
    ConsumerKey,
    ConsumerMember,
    ConsumerValue,
    Current,
    RecordKind,
    consumer_key,
    consumer_value,
)
from logcore.format.group_records import (
    StoredGroup,
    StoredMember,
    assignment_value,
    group_key,
    group_value,
)
from logcore.registry import open_registry

click_testing = pytest.importorskip("click.testing")
from logcore.cli.commands import main  # noqa: E402
from logcore.cli.consume import Printed  # noqa: E402

T0 = 1_700_000_000_000


def run(*arguments: object, code: int = 0) -> Any:
    found = click_testing.CliRunner().invoke(main, list(map(str, arguments)))
    assert found.exception is None or isinstance(found.exception, SystemExit), (
        found.exception
    )
    assert found.exit_code == code, found.output
    return found


def rows(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two partitions of ten records each, a second apart."""
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t", 2)
        for number in range(2):
            records = [
                (None, b"%d-%d" % (number, n), (), T0 + 1_000 * n) for n in range(10)
            ]
            directory.partition("t", number).append_many(records)
    return path


def committed(data: Path) -> int:
    """Return the sum of the committed offsets of group g."""
    with logcore.open_dir(data, read_only=True) as directory:
        return sum(
            directory.committed_offsets("t", number).get("g", 0) for number in range(2)
        )


def test_consume_begins_at_an_offset_or_a_time(data: Path) -> None:
    """If one of several partitions does not contain the offset, it begins at its end."""
    with logcore.open_dir(data) as directory:
        directory.create_topic("u")
        directory.partition("u", 0).append_many([(None, b"0"), (None, b"1")])
        moment = datetime.fromtimestamp(
            directory.partition("t", 0).get(7).timestamp_ms / 1000, UTC
        ).isoformat()

    def values(*more: object) -> list[str]:
        return sorted(
            row["value"] for row in rows("consume", data, "t", "--until-end", *more)
        )

    later = ["0-8", "0-9", "1-8", "1-9"]
    assert values("--from", 8) == later
    assert values("--from", moment) == ["0-7", *later[:2], "1-7", *later[2:]]
    assert len(rows("consume", data, "t", "u", "--until-end", "--from", 8)) == 4
    assert values("--from", "now", "--group", "young") == []
    assert values("--from", 8, "--group", "g") == later
    assert values("--from", 3, "--group", "g") == [], "the committed offset is used"
    assert (
        "expected an offset"
        in run("consume", data, "t", "--from", "soon", code=2).output
    )
    assert "outside the log" in run("consume", data, "u", "--from", 3, code=2).stderr


def test_consume_prints_in_a_format(data: Path) -> None:
    found = run(
        "consume", data, "t", "--until-end", "--from", 9, "--format", r"%t:%p:%o %s\n"
    ).stdout
    assert sorted(found.splitlines()) == ["t:0:9 0-9", "t:1:9 1-9"]
    refused = run("consume", data, "t", "--group", "new", "--format", "%x", code=2)
    assert "unknown '%x'" in refused.output
    assert "new" not in run("group", "list", data).stdout, "the group was not joined"


def test_group_continues_at_its_committed_offsets(data: Path) -> None:
    first = rows("consume", data, "t", "--group", "g", "-n", 7)
    second = rows("consume", data, "t", "--group", "g", "--until-end")
    assert len(first) == 7
    assert sorted(row["value"] for row in first + second) == sorted(
        f"{p}-{n}" for p in range(2) for n in range(10)
    )
    assert not rows("consume", data, "t", "--group", "g", "--until-end")
    assert len(rows("consume", data, "t", "--until-end")) == 20, (
        "without a group, all records are printed again"
    )
    assert rows("consume", data, "t", "--until-end", "--from", "latest") == []
    assert "no such topic" in run("consume", data, "none", code=2).stderr


@pytest.mark.parametrize("refusals", [1, 2, 3])
def test_commit_refused_during_a_rebalance_is_retried(
    data: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """This includes the last commit before the command ends."""
    commit = Consumer.commit
    left = refusals

    def refuse(self: Consumer) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise RebalanceInProgressError("the partitions are being divided")
        commit(self)

    monkeypatch.setattr(Consumer, "commit", refuse)
    first = rows("consume", data, "t", "--group", "g", "-n", 15)
    assert left < 0
    assert len(first) == 15
    assert committed(data) == 15
    second = rows("consume", data, "t", "--group", "g", "--until-end")
    assert len(second) == 5


def test_processed_records_are_committed_before_a_partition_is_revoked(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Consumer) -> None:
        raise RebalanceInProgressError("the partitions are being divided")

    with logcore.open_dir(data) as directory:
        settings: dict[str, Any] = {
            "group_id": "g", "auto_offset_reset": "earliest", "enable_auto_commit": False,
        }  # fmt: skip
        with (
            directory.consumer(**settings) as first,
            directory.consumer(**settings) as second,
        ):
            printed = Printed(first, None)
            first.subscribe(["t"], listener=printed)
            assert first.poll().count == 20
            with monkeypatch.context() as patch:
                patch.setattr(Consumer, "commit", refuse)
                printed.commit()
            second.subscribe(["t"])
            for _ in range(4):
                assert second.poll().count == first.poll().count == 0, (
                    "nothing is printed again"
                )
            assert len(second.assignment()) == len(first.assignment()) == 1
            assert not printed.needs_retry


@pytest.mark.long
def test_until_end_waits_for_all_members_of_the_group(data: Path) -> None:
    """Another member owns all partitions, then one of them, and then leaves the group.
    It commits no offsets.
    """
    with logcore.open_dir(data, shared=True) as directory:
        other = directory.consumer(group_id="g", enable_auto_commit=False)
        other.subscribe(["t"])
        other.poll()
        assert len(other.assignment()) == 2
        command = [
            sys.executable,
            "-m",
            "logcore",
            "consume",
            data,
            "t",
            "--group",
            "g",
            "--shared",
            "--until-end",
            "--json",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while len(other.assignment()) == 2 or not committed(data):
                other.poll(0.02)
                assert process.poll() is None, "one partition is not read yet"
            other.close()
            found = [json.loads(line)["value"] for line in process.stdout]
    assert process.returncode == 0
    assert sorted(found) == sorted(
        f"{number}-{n}" for number in range(2) for n in range(10)
    )


def test_groups_are_listed_and_described(data: Path) -> None:
    run("consume", data, "t", "--group", "g", "-n", 7)
    (listed,) = rows("group", "list", data)
    assert (listed["group"], listed["topics"], listed["lag"]) == ("g", 1, 13)
    described = rows("group", "describe", data, "g")
    assert sum(row["lag"] for row in described) == 13
    assert {row["end"] for row in described} == {10}
    assert (
        "there is no group other"
        in run("group", "describe", data, "other", code=2).stderr
    )
    assert rows("group", "list", data) == [listed]


def test_a_group_is_reset(data: Path) -> None:
    run("consume", data, "t", "--group", "g", "--until-end")
    shown = rows(
        "group", "reset", data, "g", "--to", "2023-11-14T22:13:24Z", "--dry-run"
    )
    assert [(row["before"], row["after"], row["done"]) for row in shown] == [
        (10, 4, False)
    ] * 2
    assert {row["committed"] for row in rows("group", "describe", data, "g")} == {10}
    rows("group", "reset", data, "g", "--to", 8, "--topic", "t:1")
    assert [
        row["value"]
        for row in rows("consume", data, "t", "--group", "g", "--until-end")
    ] == ["1-8", "1-9"]
    rows("group", "reset", data, "g", "--shift-by", -3)
    assert len(rows("consume", data, "t", "--group", "g", "--until-end")) == 6
    rows("group", "reset", data, "g", "--shift-by", -1_000)
    assert len(rows("consume", data, "t", "--group", "g", "--until-end")) == 20
    rows("group", "reset", data, "new", "--to", "latest", "--topic", "t")
    assert rows("consume", data, "t", "--group", "new", "--until-end") == []
    assert (
        "name topics with --topic"
        in run("group", "reset", data, "unknown", "--to", "latest", code=2).stderr
    )
    run("group", "reset", data, "g", code=2)
    run("group", "reset", data, "g", "--to", 1, "--shift-by", 1, code=2)


def test_a_group_is_deleted(data: Path) -> None:
    run("consume", data, "t", "--group", "g", "--until-end")
    assert "--yes" in run("group", "delete", data, "g", code=2).stderr
    run("group", "delete", data, "g", "--yes")
    assert rows("group", "list", data) == []
    assert len(rows("consume", data, "t", "--group", "g", "--until-end")) == 20
    with logcore.open_dir(data) as directory:
        with pytest.raises(ConsumerStateError, match="GROUP_ID_NOT_FOUND"):
            directory.delete_group("unknown")
        with directory.consumer(group_id="alive") as consumer:
            consumer.subscribe(["t"])
            consumer.poll()
            with pytest.raises(ConsumerStateError, match="NON_EMPTY_GROUP"):
                directory.delete_group("alive")


def test_offsets_are_exported_and_imported(data: Path) -> None:
    run("consume", data, "t", "--group", "g", "--until-end")
    shown = rows("group", "export", data, "g", "--dry-run")
    assert [
        (row["partition"], row["before"], row["after"], row["done"]) for row in shown
    ] == [
        (0, None, 10, False),
        (1, None, 10, False),
    ]
    assert not data.with_name("data.registry").exists()
    assert [row["done"] for row in rows("group", "export", data, "g")] == [True] * 2
    nodes = {
        row["path"]: row["value"]
        for row in rows("registry", "tree", data, "/consumers/g/offsets")
    }
    assert nodes["/consumers/g/offsets/t/1"] == "10"
    assert (
        rows("group", "export", data, "g") == rows("group", "import", data, "g") == []
    )
    with open_registry(data) as registry:
        registry.set("/consumers/g/offsets/t/0", b"3")
        registry.delete("/consumers/g/offsets/t/1")
        registry.create("/consumers/g/offsets/t/0-1", b"8")
    assert [
        (row["before"], row["after"])
        for row in rows("group", "import", data, "g", "--dry-run")
    ] == [
        (10, 3),
        (10, 8),
    ]
    assert committed(data) == 20
    rows("group", "import", data, "g")
    assert committed(data) == 11
    run("group", "reset", data, "g", "--to", 5)
    assert rows("group", "export", data, "g") == [], "the registry has it already"
    run("group", "delete", data, "g", "--yes")
    assert "no offsets to copy" in run("group", "import", data, "g", code=2).stderr
    assert (
        "no offsets to copy" in run("group", "export", data, "unknown", code=2).stderr
    )


@pytest.mark.long
def test_offsets_of_a_group_with_members_are_moved_by_force_alone(data: Path) -> None:
    with (
        logcore.open_dir(data, shared=True) as directory,
        directory.consumer(
            group_id="g", auto_offset_reset="earliest", enable_auto_commit=False
        ) as consumer,
    ):
        consumer.subscribe(["t"])
        consumer.poll(0)
        consumer.commit()
        (owner,) = {row["owner"] for row in rows("group", "describe", data, "g")}
        registration = consumer._assignment._registration
        assert registration is not None
        assert owner == f"{registration.consumer_id}-0"
        for command in ("export", "import"):
            refused = elsewhere("group", command, data, "g", code=2)
            assert "has 1 members" in refused
            assert "--force" in refused
        assert "warning" in elsewhere("group", "export", data, "g", "--force")
        with open_registry(data) as registry:
            registry.set("/consumers/g/offsets/t/0", b"2")
        assert "warning" in elsewhere("group", "import", data, "g", "--force")
        assert sorted(
            row["committed"] for row in rows("group", "describe", data, "g")
        ) == [2, 10]
        consumer.poll(0)
        assert consumer.position(("t", 0)) == 10
        with pytest.raises(ConsumerStateError):
            directory.alter_group_offsets("g", {("t", 0): 0})
        elsewhere("group", "reset", data, "g", "--to", 7, "--live")
        assert sorted(record.offset for record in consumer.poll(0).records()) == [
            7,
            7,
            8,
            8,
            9,
            9,
        ]


def test_members_of_processes_that_share_the_directory(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        logcore.open_dir(data, shared=True) as directory,
        directory.consumer(group_id="g", client_id="one") as consumer,
    ):
        consumer.subscribe(["t"])
        consumer.poll(0)
        assert consumer._membership.member is not None
        (row,) = rows("group", "members", data, "g")
        assert row == {
            "group": "g",
            "member": consumer._membership.member.member_id,
            "instance": None,
            "client": "one",
            "host": row["host"],
            "pid": os.getpid(),
            "alive": True,
            "partitions": [
                {"topic": "t", "partition": 0},
                {"topic": "t", "partition": 1},
            ],
        }
        monkeypatch.setattr("logcore.cli.groups.wants_json", lambda as_json: as_json)
        head, shown = run("group", "members", data, "g").stdout.splitlines()
        assert head.split() == [
            "member",
            "instance",
            "client",
            "host",
            "pid",
            "alive",
            "partitions",
        ]
        assert shown.split()[-2:] == ["yes", "t:0,1"]


def test_members_of_a_broker_are_those_that_it_stored(data: Path) -> None:
    """The records of Kafka's coordinator, of the classic and the consumer protocol."""
    member = StoredMember(
        member_id="m",
        instance_id="i",
        client_id="c",
        client_host="/h",
        assignment=assignment_value([("t", 1)]),
    )
    with logcore.open_dir(data) as directory:
        directory.create_topic("__consumer_offsets")
        topic_id = directory.topic_id("t").bytes
        group = StoredGroup(
            protocol_type="consumer",
            generation=1,
            protocol="range",
            leader="m",
            members=(member,),
        )
        values: dict[ConsumerKey, ConsumerValue] = {
            ConsumerKey(RecordKind.MEMBER, "new", "n"): ConsumerMember(
                client_id="d", client_host="/h", topic_names=("t",)
            ),
            ConsumerKey(RecordKind.CURRENT, "new", "n"): Current(
                member_epoch=1, assigned=frozenset({(topic_id, 0)})
            ),
        }
        log = directory.partition("__consumer_offsets", 0)
        log.append_many([(group_key("old"), group_value(group))])
        log.append_many(
            [
                (consumer_key(key), consumer_value(value))
                for key, value in values.items()
            ]
        )
    (old,) = rows("group", "members", data, "old")
    assert (
        old["member"],
        old["instance"],
        old["client"],
        old["pid"],
        old["alive"],
    ) == ("m", "i", "c", None, None)
    assert old["partitions"] == [{"topic": "t", "partition": 1}]
    (new,) = rows("group", "members", data, "new")
    assert (new["member"], new["client"], new["partitions"]) == (
        "n",
        "d",
        [{"topic": "t", "partition": 0}],
    )
    assert (
        "there is no group none" in run("group", "members", data, "none", code=2).stderr
    )


def elsewhere(*arguments: object, code: int = 0) -> str:
    """Return the stderr of a command in another process, while this one has the
    directory open.
    """
    command = [sys.executable, "-m", "logcore", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def test_interrupt_ends_consume_cleanly(data: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "logcore",
        "consume",
        str(data),
        "t",
        "--group",
        "g",
        "--json",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for _ in range(20):
            assert json.loads(process.stdout.readline())["topic"] == "t"
        while committed(data) < 20:
            time.sleep(0.05)  # a record is committed after it was printed
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == ""
    assert rows("consume", data, "t", "--group", "g", "--until-end") == []
