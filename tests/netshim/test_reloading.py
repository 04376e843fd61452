"""Changes of the configuration file of a running broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from netshim import wire
from netshim.config_file import ConfiguredTopic, FileSettings
from netshim.reloading import LIVE, changes_of
from netshim.settings import Settings
from support.client import Client
from support.environments import ROOT


def file(*topics: ConfiguredTopic, **options: Any) -> FileSettings:
    return FileSettings("n.toml", options=options, topics=topics)


def test_live_settings_exist() -> None:
    assert {field.name for field in attrs.fields(Settings)} >= LIVE


def test_page_names_each_live_setting() -> None:
    page = (ROOT / "docs" / "netshim.md").read_text("utf-8")
    section = page.split("### Reload", 1)[1].split("\n## ", 1)[0]
    assert {name for name in LIVE if f"`{name}`" not in section} == set()


def test_changes_are_divided_by_the_need_of_a_restart() -> None:
    before = file(max_connections=5, port=1, idle_timeout_ms=100)
    after = file(max_connections=6, port=2, num_partitions=3, log_level="debug")
    changes = changes_of(before, after, {"num_partitions"})
    default_ms = attrs.fields(Settings).idle_timeout_ms.default
    assert changes.settings == {"max_connections": 6, "idle_timeout_ms": default_ms}
    assert changes.log_level == "debug"
    assert changes.need_restart == ["port"]
    again = changes_of(changes.applied, after, {"num_partitions"})
    assert (again.settings, again.log_level) == ({}, None)
    assert again.need_restart == ["port"]
    assert changes_of(changes.applied, before, ()).need_restart == []


def test_new_topics_are_created_and_others_remain() -> None:
    orders, more = ConfiguredTopic("orders", 2, {}), ConfiguredTopic("more", 1, {})
    changed = attrs.evolve(orders, partitions=3)
    changes = changes_of(file(orders), file(changed, more), ())
    assert list(changes.topics) == [more]
    assert changes.need_restart == ["topics.orders"]
    assert list(changes_of(file(orders), file(), ()).topics) == []


def test_another_directory_and_other_defaults_need_a_restart() -> None:
    after = FileSettings("n.toml", directory="other", config={"retention.ms": "5"})
    assert changes_of(file(), after, ()).need_restart == ["directory", "config"]
    assert changes_of(file(), after, {"directory"}).need_restart == ["config"]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "netshim", "serve", str(folder / "data")]
    files = ["--config-file", str(folder / "n.toml"), "--port", "0"]
    with subprocess.Popen(
        [*command, *files, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield process, int(line.rpartition(":")[2])
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


def reload(process: subprocess.Popen[str], *expected: str) -> None:
    """Reload the file, and read the log until it has the expected lines in order."""
    process.send_signal(signal.SIGHUP)
    assert process.stderr is not None
    for text in expected:
        while text not in (line := process.stderr.readline()):
            assert line, f"expected {text!r} in the log"


def partitions_of_new_topic(port: int, name: str) -> int:
    """Let the broker create a topic with its default number of partitions."""
    with closing(Client(port)) as client:
        topics = [wire.METADATA.Request.Topic(name=name)]
        request = wire.METADATA.Request(topics=topics, allow_auto_topic_creation=True)
        return len(client.ask(wire.METADATA, 9, request).topics[0].partitions)


@pytest.mark.long
def test_broker_takes_over_its_file_on_sighup(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text("num_partitions = 2\n")
    with serving(tmp_path) as (process, port):
        assert partitions_of_new_topic(port, "a") == 2
        path.write_text("num_partitions = 3\ngroup_max_size = 7\n[topics.more]\n")
        reload(
            process,
            "was read again: num_partitions = 3, topics.more = created",
            "group_max_size takes effect at the next start",
        )
        assert partitions_of_new_topic(port, "b") == 3
        path.write_text("num_partitions = 0\n")
        reload(process, "n.toml, line 1: num_partitions")
        path.unlink()
        reload(process, "the former settings remain: ")
        assert partitions_of_new_topic(port, "c") == 3
    with logcore.open_dir(tmp_path / "data", read_only=True) as logdir:
        assert logdir.topics() == ["a", "b", "c", "more"]


@pytest.mark.long
def test_options_on_the_command_line_remain(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text("log_level = 'info'\n")
    with serving(tmp_path, "--num-partitions", "4") as (process, port):
        path.write_text("num_partitions = 3\nlog_level = 'debug'\n")
        reload(process, "was read again: log_level = debug")
        assert partitions_of_new_topic(port, "a") == 4


@pytest.mark.long
def test_lines_of_a_reload_are_json_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text("")
    with serving(tmp_path) as (process, _):
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        lines = []
        while not lines or "read again" not in lines[-1]["message"]:
            lines.append(json.loads(process.stderr.readline()))
        assert lines[-1]["level"] == "info"


@pytest.mark.long
def test_damaged_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "n.toml").write_text("")
    with serving(tmp_path) as (process, port):
        for data in ("x", "port = [\n", "\0"):
            (tmp_path / "n.toml").write_text(data)
            reload(process, "is not TOML")
        assert partitions_of_new_topic(port, "a") == 1


@pytest.mark.long
def test_broker_without_files_stops_when_its_terminal_is_closed(
    tmp_path: Path,
) -> None:
    # A test run under nohup ignores SIGHUP, and its children inherit that.
    program = (
        "import runpy, signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "runpy.run_module('netshim', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            process.send_signal(signal.SIGHUP)
            assert process.wait(60) == 0
        finally:
            process.kill()
    with logcore.open_dir(tmp_path) as directory:
        assert directory.host.was_clean
