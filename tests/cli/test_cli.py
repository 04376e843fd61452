"""The command line: its output, the stream of each line, and its exit status."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import logcore
from support.vectors import VECTORS

click_testing = pytest.importorskip("click.testing")
from logcore.cli.arguments import parse_offset  # noqa: E402
from logcore.cli.commands import main  # noqa: E402
from logcore.cli.read import last_records  # noqa: E402
from logcore.cli.terminal import print_table  # noqa: E402

SOURCE = str(Path(logcore.__file__).resolve().parents[1])
T0 = 1700000000000


class Result:
    def __init__(self, found):
        self.code = found.exit_code
        self.out = found.stdout
        self.err = found.stderr
        assert found.exception is None or isinstance(found.exception, SystemExit), (
            found.exception
        )

    @property
    def rows(self):
        return [json.loads(line) for line in self.out.splitlines()]


def run(*arguments, stdin=None):
    return Result(
        click_testing.CliRunner().invoke(main, list(map(str, arguments)), input=stdin)
    )


def process(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.Popen(
        [sys.executable, "-m", "logcore", *map(str, arguments)],
        env=environment,
        **options,
    )


@pytest.fixture
def path(tmp_path):
    """Return a log with the records v0 to v9, one per second from T0."""
    with logcore.open(tmp_path / "t-0", create=True, durability="os") as log:
        log.append_many(
            [(b"k%d" % n, b"v%d" % n, [("h", b"x")], T0 + 1000 * n) for n in range(10)]
        )
    return tmp_path / "t-0"


def values(path):
    with logcore.open(path, read_only=True) as log:
        return [record.value for record in log.read(log.log_start_offset)]


# -- append --------------------------------------------------------------------------


def test_append_stores_each_line_as_a_value(tmp_path):
    done = run("append", tmp_path / "t-0", "--create", stdin="a\n\nb\r\nlast")
    assert (done.code, done.rows[0]["records"], done.rows[0]["last_offset"]) == (
        0,
        4,
        3,
    )
    assert values(tmp_path / "t-0") == [b"a", b"", b"b\r", b"last"]


def test_append_reads_a_file_in_groups_of_lines(tmp_path):
    (tmp_path / "lines").write_text("".join(f"{n}\n" for n in range(25)))
    done = run(
        "append",
        tmp_path / "t-0",
        tmp_path / "lines",
        "--create",
        "--batch",
        10,
        "--durability",
        "os",
    )
    assert done.rows[0] | {"seconds": 0} == {
        "path": str(tmp_path / "t-0"),
        "records": 25,
        "first_offset": 0,
        "last_offset": 24,
        "durability": "os",
        "seconds": 0,
    }
    with logcore.open(tmp_path / "t-0", read_only=True) as log:
        assert [batch.record_count for batch in log.batches(0)] == [10, 10, 5]


def test_append_of_no_lines_succeeds(tmp_path):
    done = run("append", tmp_path / "t-0", "--create", stdin="")
    assert (done.code, done.rows[0]["records"], done.rows[0]["first_offset"]) == (
        0,
        0,
        None,
    )


def test_append_parses_ndjson(tmp_path):
    lines = [
        {
            "key": "k",
            "value": "text",
            "timestamp_ms": T0,
            "headers": [{"key": "a", "value": "b"}, {"key": "n", "value": None}],
        },
        {"value": {"hex": "00ff"}, "key": {"base64": "AQI="}},
        {"value": {"any": [1, "ü"]}, "headers": {"x": "y"}},
        {"value": None, "headers": [["p", "q"]]},
        {"value": 5, "offset": 99},
    ]
    done = run(
        "append",
        tmp_path / "t-0",
        "--create",
        "--format",
        "ndjson",
        stdin="\n".join(map(json.dumps, lines)) + "\n\n",
    )
    assert done.code == 0, done.err
    with logcore.open(tmp_path / "t-0", read_only=True) as log:
        found = list(log.read(0))
    assert found[0][1:] == (T0, b"k", b"text", (("a", b"b"), ("n", None)))
    assert found[1][2:4] == (b"\1\2", b"\0\xff")
    assert found[2][3:] == ('{"any":[1,"ü"]}'.encode(), (("x", b"y"),))
    assert found[3][3:] == (None, (("p", b"q"),))
    assert found[4].value == b"5"


def test_key_field_is_the_key_of_a_whole_object(tmp_path):
    line = '{"id": 7, "name": "x"}'
    run(
        "append",
        tmp_path / "t-0",
        "--create",
        "--format",
        "ndjson",
        "--key-field",
        "id",
        stdin=line + "\n",
    )
    with logcore.open(tmp_path / "t-0", read_only=True) as log:
        assert log.get(0)[2:4] == (b"7", line.encode())


def test_append_parses_csv(tmp_path):
    text = '\ufeffa,b,c\n1,2,3\n"x\ny",5,"6,7"\n'
    done = run(
        "append",
        tmp_path / "t-0",
        "--create",
        "--format",
        "csv",
        "--key",
        "a,c",
        stdin=text,
    )
    assert done.code == 0, done.err
    with logcore.open(tmp_path / "t-0", read_only=True) as log:
        found = [(record.key, json.loads(record.value)) for record in log.read(0)]
    assert found == [
        (b"1-3", {"a": "1", "b": "2", "c": "3"}),
        (b"x\ny-6,7", {"a": "x\ny", "b": "5", "c": "6,7"}),
    ]


@pytest.mark.parametrize(
    ("form", "text", "line", "kept", "words"),
    [
        ("ndjson", '{"value":"a"}\nnope\n{"value":"b"}', 2, 1, "not JSON"),
        ("ndjson", '{"value":"a"}\n[1]', 2, 1, "must be a JSON object"),
        ("ndjson", '{"value":"a"}\n{"k":1}', 2, 1, "--key-field"),
        ("ndjson", '{"value":"a","timestamp_ms":"x"}', 1, 0, "timestamp_ms"),
        ("ndjson", '{"value":"a","timestamp_ms":-5}', 1, 0, "timestamp"),
        ("ndjson", '{"value":{"base64":"!"}}', 1, 0, ""),
        ("ndjson", "[" * 100_000, 1, 0, ""),
        ("csv", "a,b\n1,2\n3\n", 3, 1, "1 fields"),
        ("csv", 'a,b\n1,2\n"3', 3, 1, ""),
        ("csv", "a,b,a\n1,2,3\n", 1, 0, "two columns 'a'"),
    ],
)
def test_invalid_line_is_reported_and_earlier_lines_are_stored(
    tmp_path, form, text, line, kept, words
):
    done = run("append", tmp_path / "t-0", "--create", "--format", form, stdin=text)
    assert done.code == 2
    assert done.err.startswith(f"error: line {line}: ")
    assert words in done.err
    assert f"{kept} records" in done.err
    assert len(values(tmp_path / "t-0")) == kept


def test_refused_record_is_reported_by_its_line(tmp_path):
    """append_many stores all records or none, so the command must store the other
    records of the group without the refused one.
    """
    text = "a\nb\n" + "x" * 500 + "\nc\n"
    done = run(
        "append",
        tmp_path / "t-0",
        "--create",
        "--config",
        "max.message.bytes=300",
        stdin=text,
    )
    assert (done.code, done.err.split(":")[1]) == (2, " line 3")
    assert values(tmp_path / "t-0") == [b"a", b"b"]


def test_append_stores_lines_while_the_input_is_open(tmp_path):
    writer = process(
        "append",
        tmp_path / "t-0",
        "--create",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with writer:
        writer.stdin.write(b"first\n")
        writer.stdin.flush()
        while not (tmp_path / "t-0" / f"{0:020d}.log").exists():
            assert writer.poll() is None
        with logcore.open(tmp_path / "t-0", read_only=True) as log:
            assert next(log.tail(0, timeout=20)).value == b"first"
        writer.stdin.close()
        assert json.loads(writer.stdout.read())["records"] == 1


# -- read and tail ---------------------------------------------------------------------


def test_read_prints_ndjson_in_a_pipe(path):
    done = run("read", path)
    assert done.code == 0
    assert done.rows[3] == {
        "offset": 3,
        "timestamp_ms": T0 + 3000,
        "key": "k3",
        "value": "v3",
        "headers": [{"key": "h", "value": "x"}],
    }


def test_read_of_one_log_can_be_appended_to_another(path, tmp_path):
    with logcore.open(path) as log:
        log.append(
            b"\0\xff", key=None, headers=[("b", b"\xff"), ("n", None)], timestamp_ms=T0
        )
        log.append(None, key=b"", timestamp_ms=T0)
    run(
        "append",
        tmp_path / "copy-0",
        "--create",
        "--format",
        "ndjson",
        stdin=run("read", path).out,
    )
    with (
        logcore.open(path, read_only=True) as source,
        logcore.open(tmp_path / "copy-0", read_only=True) as copy,
    ):
        assert list(copy.read(0)) == list(source.read(0))


@pytest.mark.parametrize(
    ("arguments", "offsets"),
    [
        (["--from", 7], [7, 8, 9]),
        (["--from", "earliest", "--to", 2], [0, 1]),
        (["--from", "latest"], []),
        (["--from", 2, "-n", 2], [2, 3]),
        (["-n", 0], []),
        (["--from", "2023-11-14T22:13:27Z"], [7, 8, 9]),
        (["--from", "2023-11-14T22:13:27", "--to", "2023-11-14T22:13:28+00:00"], [7]),
        (["--from", "-1h"], []),
        (["--from", "now"], []),
        (["--to", "-1d", "-n", 1], [0]),
    ],
)
def test_read_accepts_places_of_every_kind(path, arguments, offsets):
    done = run("read", path, *arguments)
    assert [row["offset"] for row in done.rows] == offsets


@pytest.mark.parametrize(
    ("age", "offset"),
    [("-1s", 9), ("-2500ms", 8), ("-1m", 0), ("-3d", 0), ("-2w", 0), ("now", 10)],
)
def test_ages_count_back_from_now(path, age, offset):
    with logcore.open(path, read_only=True) as log:
        assert parse_offset(log, age, T0 + 10_000) == offset


def test_read_isolation(tmp_path):
    clean = VECTORS / "partition-clean" / "orders-0"
    everything = [row["offset"] for row in run("read", clean).rows]
    committed = [
        row["offset"]
        for row in run("read", clean, "--isolation", "read_committed").rows
    ]
    assert 8 in everything and 28 in everything
    assert [offset for offset in everything if offset not in (8, 28)] == committed


def test_read_prints_in_a_given_format(path):
    assert (
        run(
            "read", path, "-n", 2, "--format", r"%o %T %k=%s %h %K %S%%\n"
        ).out.splitlines()[0]
        == f"0 {T0} k0=v0 h=x 2 2%"
    )
    assert run("read", path, "--format", "%z").code == 2


def test_tail_prints_the_last_records(path):
    assert [row["offset"] for row in run("tail", path, "-n", 3).rows] == [7, 8, 9]
    assert len(run("tail", path, "-n", 100).rows) == 10
    assert run("tail", path, "-n", 0).out == ""
    assert len(run("tail", path, "-n", 1, "-f", "--timeout", 0).rows) == 1


def test_last_records_are_found_after_gaps():
    with logcore.open(
        VECTORS / "partition-compact-after" / "compacted-0", read_only=True
    ) as log:
        everything = list(log.read(0))
        for count in range(len(everything) + 2):
            assert (
                last_records(log, count)
                == everything[len(everything) - min(count, len(everything)) :]
            )


def test_tail_prints_new_records(path):
    with process(
        "tail", path, "-n", 1, "-f", "--timeout", 20, stdout=subprocess.PIPE
    ) as reader:
        assert json.loads(reader.stdout.readline())["offset"] == 9
        with logcore.open(path) as log:
            log.append(b"new")
        assert json.loads(reader.stdout.readline())["value"] == "new"
        reader.kill()


# -- topics and their maintenance ---------------------------------------------------------


def test_topic_is_created_changed_and_deleted(tmp_path):
    data = tmp_path / "data"
    assert (
        run(
            "topic",
            "create",
            data,
            "orders",
            "--partitions",
            2,
            "--config",
            "segment.bytes=2000",
        ).code
        == 0
    )
    assert run("topic", "list", data).rows == [
        {"topic": "orders", "partitions": 2, "size_bytes": 0}
    ]
    assert (
        run(
            "topic",
            "alter",
            data,
            "orders",
            "--config",
            "retention.ms=5",
            "--partitions",
            3,
        ).code
        == 0
    )
    assert run("topic", "alter", data, "orders", "--unset", "segment.bytes").code == 0
    (facts,) = run("topic", "describe", data, "orders").rows
    assert (
        facts["config"] == {"retention.ms": "5"}
        and len(facts["partitions"]) == 3
        and len(facts["topic_id"]) == 22
    )
    assert run("topic", "fork", data, "orders", "copy").code == 0
    refused = run("topic", "delete", data, "orders", stdin="y\n")
    assert (refused.code, "--yes" in refused.err) == (2, True), (
        "it cannot ask without a terminal"
    )
    assert run("topic", "delete", data, "orders", "--yes").code == 0
    assert [row["topic"] for row in run("topic", "list", data).rows] == ["copy"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "{}", "no/name"), "not a topic name"),
        (("create", "{}", "t", "--config", "retention.ms=x"), "retention.ms"),
        (("alter", "{}", "there"), "nothing to change"),
        (("alter", "{}", "there", "--config", "nothing=1"), "unknown config"),
        (("alter", "{}", "there", "--partitions", "1"), "partitions"),
        (("describe", "{}", "nothing"), "no such topic"),
        (("describe", "{}", "theer"), "did you mean 'there'"),
        (("delete", "{}", "theer", "--yes"), "did you mean 'there'"),
        (
            ("fork", "{}", "there", "new", "--at", "9"),
            "a copy cannot end at that offset",
        ),
    ],
)
def test_invalid_topic_commands_change_nothing(tmp_path, arguments, words):
    data = tmp_path / "data"
    run("topic", "create", data, "there")
    done = run("topic", *(argument.format(data) for argument in arguments))
    assert done.code == 2 and words in done.err
    assert [row["topic"] for row in run("topic", "list", data).rows] == ["there"]


@pytest.fixture
def updates(tmp_path):
    """Return a compacted topic with sixty updates of three keys, in small segments."""
    config = {"cleanup.policy": "compact,delete", "segment.bytes": 400}
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic("u", config=config)
        for n in range(60):
            logdir.partition("u", 0).append(b"v%d" % n, key=b"k%d" % (n % 3))
    return tmp_path / "data"


def test_compact(updates):
    (report,) = run("compact", updates, "--force").rows
    assert (report["records_read"], report["records_kept"], report["end_offset"]) == (
        60,
        3,
        60,
    )
    assert values(updates / "u-0") == [b"v57", b"v58", b"v59"]
    assert run("compact", updates / "u-0").rows == [], "nothing to do"
    assert run("compact", updates / "nothing-0").code == 2


def test_retention_can_list_segments_before_deleting_them(updates):
    (before,) = run("retention", updates).rows
    assert before["would_delete"] == 0
    ask = (
        "retention",
        updates / "u-0",
        "--config",
        "retention.bytes=900",
        "--config",
        "retention.ms=-1",
    )
    (would,) = run(*ask).rows
    assert would["would_delete"] > 2 and len(values(updates / "u-0")) == 60
    (held,) = run(*ask, "--hold", "billing").rows
    assert held["would_delete"] == 0, (
        "all records are kept for a group without committed offsets"
    )
    (done,) = run(*ask, "--delete").rows
    assert done["deleted"] == would["would_delete"]
    assert values(updates / "u-0")[0] == b"v%d" % would["log_start_offset"]


def test_dump_shows_committed_offsets(tmp_path):
    from logcore.format.group_records import (
        Committed,
        commit_key,
        commit_value,
        group_key,
    )

    path = tmp_path / "__consumer_offsets-7"
    with logcore.open(path, create=True, config={"cleanup.policy": "compact"}) as log:
        log.append(
            commit_value(Committed(29, 4, "m", T0)), key=commit_key("grp", "orders", 0)
        )
        log.append(
            commit_value(Committed(30, 4, "", T0, T0 + 9)),
            key=commit_key("grp", "orders", 1),
        )
        log.append(
            bytes.fromhex("0004000000000000001d00000004026d0000018bcfe5680000"),
            key=commit_key("v4", "t", 0),
        )
        log.append(None, key=commit_key("grp", "orders", 1))
        log.append(
            bytes.fromhex(
                "00030008636f6e73756d657200000001000572616e676500026d310000018bcfe568000000000100026d31ffff000163000a"
                "2f3132372e302e302e310000ea600000afc80000000200010000000102"
            ),
            key=group_key("grp"),
        )
        log.append(b"\0\x63", key=b"\0\x63odd")
        log.append(b"\0\3\0", key=commit_key("cut", "t", 0))
    rows = run("dump", path / f"{0:020d}.log", "--records").rows
    output = [row.get("says") for row in rows if row["type"] == "record"]
    commit = {
        "offset": 29,
        "leader_epoch": 4,
        "metadata": "m",
        "commit_timestamp_ms": T0,
        "expire_timestamp_ms": -1,
    }
    assert output[0] == {
        "group": "grp",
        "topic": "orders",
        "partition": 0,
        "committed": commit,
    }
    assert output[1]["committed"]["expire_timestamp_ms"] == T0 + 9
    assert output[2]["committed"] == commit
    assert output[3]["committed"] is None
    assert output[4]["metadata"]["members"][0]["client_host"] == "/127.0.0.1"
    assert output[5:] == [None, None]


def test_retention_keeps_records_that_a_group_has_not_read(updates):
    from logcore.coordinators.stored_offsets import committed_in
    from logcore.format.group_records import Committed, commit_key, commit_value

    with logcore.open_dir(updates) as logdir:
        logdir.create_topic("__consumer_offsets", config={"cleanup.policy": "compact"})
        log = logdir.partition("__consumer_offsets", 0)
        log.append(
            commit_value(Committed(7, -1, "", T0)), key=commit_key("billing", "u", 0)
        )
        log.append(
            commit_value(Committed(33, -1, "", T0)), key=commit_key("billing", "u", 0)
        )
        log.append(
            commit_value(Committed(50, -1, "", T0)), key=commit_key("audit", "u", 0)
        )
        assert committed_in([log]) == {("u", 0): {"billing": 33, "audit": 50}}
        assert logdir.committed_offsets("u", 0) == {"billing": 33, "audit": 50}
    ask = (
        "retention",
        updates,
        "--config",
        "retention.bytes=0",
        "--hold",
        "billing",
        "--hold",
        "audit",
    )
    rows = {row["partition"]: row for row in run(*ask).rows}
    assert 20 < rows["u-0"]["log_start_offset"] <= 33


# -- dump, verify, info ----------------------------------------------------------------


def test_dump_names_the_file_of_each_row():
    clean = VECTORS / "partition-clean" / "orders-0"
    files = [clean / f"{0:020d}.log", clean / f"{0:020d}.txnindex"]
    done = run("dump", *files, "--records")
    assert {row["file"] for row in done.rows} == set(map(str, files))
    assert done.rows[-1]["last_stable_offset"] == 9
    assert sum(row["type"] == "record" for row in done.rows) == 16


def test_verify_exits_with_1_for_damage_only(path):
    done = run("verify", path)
    assert (done.code, {row["status"] for row in done.rows}) == (0, {"ok"})
    log = path / f"{0:020d}.log"
    log.write_bytes(log.read_bytes() + b"torn")
    done = run("verify", path)
    assert (done.code, done.rows[0]["status"]) == (0, "warning")
    log.write_bytes(log.read_bytes()[:100])
    done = run("verify", path)
    assert (done.code, done.rows[0]["status"]) == (1, "damaged")


def test_verify_and_info_accept_a_topic_and_a_partition():
    clean = VECTORS / "partition-clean"
    all_rows = run("verify", clean).rows
    for name in ("orders", "orders:0"):
        done = run("verify", clean, name)
        assert done.code == 0
        assert {Path(row["path"]).parent.name for row in done.rows} == {"orders-0"}
        assert len(done.rows) < len(all_rows)
        assert [row["topic"] for row in run("info", clean, name).rows] == ["orders"]
    for command in ("verify", "info"):
        refused = run(command, clean, "order")
        assert (refused.code, "orders" in refused.err) == (2, True)
        refused = run(command, clean, "orders:7")
        assert (refused.code, "no partition 7" in refused.err) == (2, True)


def test_scrub_finds_damage_that_no_crc_covers(path):
    with logcore.open(path) as log:
        log.roll()
    (row,) = run("scrub", path).rows
    assert (row["segments"], row["sealed"], row["is_sound"], row["findings"]) == (
        2,
        1,
        True,
        [],
    )
    (seal,) = run("dump", path / f"{0:020d}.seal").rows
    assert (seal["type"], seal["end_offset"], seal["next_base_offset"]) == (
        "seal",
        10,
        10,
    )
    log = path / f"{0:020d}.log"
    times = (path / f"{0:020d}.log").stat()
    # Change the leader epoch.
    log.write_bytes(log.read_bytes()[:15] + b"\1" + log.read_bytes()[16:])
    os.utime(log, ns=(times.st_atime_ns, times.st_mtime_ns))
    done = run("scrub", path.parent)
    assert (done.code, done.rows[0]["is_sound"]) == (1, False)
    assert done.rows[0]["findings"][0]["path"] == str(log)
    assert run("verify", path).code == 1


def test_scrub_continues_after_a_partition_that_cannot_be_opened(path):
    """scrub stopped at such a partition, and did not report its earlier findings."""
    with logcore.open_dir(path.parent) as logdir:
        for topic in ("a", "z"):
            logdir.create_topic(topic)
            logdir.partition(topic, 0).append(b"sound")
            logdir.partition(topic, 0).append(b"damaged later")
            logdir.partition(topic, 0).roll()
    log = path.parent / "a-0" / f"{0:020d}.log"
    log.write_bytes(log.read_bytes()[:-3] + b"abc")
    for file in path.glob("*.log"):
        file.unlink()  # of t-0, which had records
    done = run("scrub", path.parent)
    assert done.code == 1
    assert [(os.path.basename(row["path"]), row["is_sound"]) for row in done.rows] == [
        ("a-0", False), ("t-0", False), ("z-0", True)
    ]  # fmt: skip


def test_info_describes_partitions(path):
    (row,) = run("info", path).rows
    assert (row["topic"], row["partition"], row["high_watermark"], row["codecs"]) == (
        "t",
        0,
        10,
        {"none": 1},
    )
    assert row["first_timestamp_ms"] == T0 and row["max_timestamp_ms"] == T0 + 9000
    assert run("info", path.parent).rows == [row]


def test_info_shows_the_active_kernels_and_codecs():
    text = run("info").out
    assert logcore.__version__ in text
    assert "kernels: " in text
    facts = json.loads(run("info", "--json").out)
    assert facts["codecs"]["gzip"] is True


def test_info_names_the_plain_kernels():
    environment = {**os.environ, "PYTHONPATH": SOURCE, "LOGCORE_KERNELS": "plain"}
    done = subprocess.run(
        [sys.executable, "-m", "logcore", "info"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "kernels: plain" in done.stdout


def test_bench_leaves_no_files(tmp_path):
    done = run("bench", tmp_path, "--seconds", 0.01, "--records", 5)
    assert done.code == 0
    assert len(done.rows) == 5
    assert all(row["records_per_second"] > 0 for row in done.rows)
    assert list(tmp_path.iterdir()) == []


# -- errors and exits ------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["read", "nowhere-0"],
        ["tail", "nowhere-0"],
        ["info", "nowhere"],
        ["verify", "nowhere"],
        ["dump", "nowhere.log"],
        ["append", "nowhere-0"],
        ["append", "badname", "--create"],
        ["append", "t-0", "--create", "--durability", "hope"],
        ["append", "t-0", "--create", "--config", "segment.byte=5"],
        ["append", "t-0", "missing-file", "--create"],
        ["read", "t-0", "--from", "99999"],
    ],
)
def test_errors_are_a_line_and_exit_2(tmp_path, path, arguments):
    arguments = [
        str(tmp_path / argument)
        if "-0" in argument or argument.startswith(("nowhere", "bad"))
        else argument
        for argument in arguments
    ]
    done = run(*arguments, stdin="x\n")
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) <= 2
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["read", "{}/no", "t"],
        ["topic", "list", "{}/t-0"],
        ["info", "{}/no"],
        ["scrub", "{}/other"],
    ],
)
def test_errors_do_not_mention_python(path, arguments):
    (path.parent / "other").mkdir()
    (path.parent / "other" / "file").touch()
    done = run(*(argument.format(path.parent) for argument in arguments))
    assert done.code == 2 and done.err.startswith("error: ")
    assert "True" not in done.err and "()" not in done.err


def test_wrong_usage_exits_2(path):
    for arguments in (
        ["read", path, "--from", "soon"],
        ["append", path, "--config", "x"],
        ["nonsense"],
        ["read"],
    ):
        done = run(*arguments)
        assert done.code == 2
        assert "Traceback" not in done.err
    assert "Did you mean 'read'?" in run("red").err
    assert run("append", path, "--key", "a").code == 2
    assert run("append", path, "--key-field", "a").code == 2


def test_locked_log_is_reported(path):
    with logcore.open(path):
        done = run("append", path, stdin="x\n")
    assert done.code == 2
    assert str(os.getpid()) in done.err or "already" in done.err


def test_closed_output_pipe_is_not_an_error(tmp_path):
    with logcore.open(tmp_path / "t-0", create=True, durability="os") as log:
        log.append_many([(None, b"x" * 100)] * 20_000)
    with process(
        "read", tmp_path / "t-0", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as reader:
        reader.stdout.readline()
        reader.stdout.close()
        assert reader.stderr.read() == b""
        assert reader.wait() == 141


def test_without_click_only_info_works_and_others_name_the_extra(tmp_path):
    (tmp_path / "click.py").write_text("raise ImportError")
    hide = "import sys, importlib.util as u; real = u.find_spec\n"
    hide += "u.find_spec = lambda name, *rest: None if name == 'click' else real(name, *rest)\n"
    hide += "from logcore.__main__ import main; sys.argv = ['logcore', *sys.argv[1:]]; main()"
    environment = {**os.environ, "PYTHONPATH": SOURCE}

    def without_click(*arguments):
        command = [sys.executable, "-c", hide, *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )

    assert without_click("info").returncode == 0
    done = without_click("read", "x-0")
    assert (
        done.returncode,
        re.search(r"pip install .*\[cli\]", done.stderr) is not None,
    ) == (2, True)


def test_a_command_imports_no_other(path):
    needed = modules_after("verify", str(path), "--help")
    assert {name for name in needed if name.startswith("logcore.cli.")} == {
        "logcore.cli.maintenance",
        "logcore.cli.arguments",
        "logcore.cli.command_list",
        "logcore.cli.commands",
        "logcore.cli.options",
        "logcore.cli.terminal",
    }


def modules_after(*arguments):
    """Return the modules that a process has imported at the end of a command."""
    command = "import sys; from logcore.cli.commands import main; main(standalone_mode=False); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_tables_are_aligned_in_a_pipe(capsys):
    print_table(("name", "n"), [("a", 5), ("long", 12345), ("none", None)], right=(1,))
    assert capsys.readouterr().out.splitlines() == [
        "name       n",
        "a          5",
        "long  12,345",
        "none",
    ]
