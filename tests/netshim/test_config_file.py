"""The configuration file of `netshim serve`, environment variables, and `check`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import InvalidConfigError
from netshim.config_file import ConfiguredTopic, OptionSpec, read_config_file

click_testing = pytest.importorskip("click.testing")
from netshim.command import _file_options, _option_spec, main  # noqa: E402

SHAPES = {
    "port": OptionSpec(int, low=0, high=65_535),
    "acls": OptionSpec(bool),
    "listener": OptionSpec(str, is_list=True),
    "tls_client": OptionSpec(str, choices=("none", "required")),
}


def read(folder: Path, text: str) -> Any:
    path = folder / "netshim.toml"
    path.write_text(text)
    return read_config_file(str(path), SHAPES)


def test_file_has_options_settings_and_topics(tmp_path: Path) -> None:
    config_file = read(
        tmp_path,
        """
        directory = "data"
        port = 9092
        listener = ["PLAINTEXT://127.0.0.1:0"]
        [config]
        retention.ms = 5000
        "compression.type" = "zstd"
        [topics.orders]
        partitions = 4
        "cleanup.policy" = "compact"
        unclean.leader.election.enable = true
        [topics."a.b"]
        """,
    )
    assert config_file.directory == "data"
    assert config_file.options == {
        "port": 9092,
        "listener": ["PLAINTEXT://127.0.0.1:0"],
    }
    assert config_file.config == {"retention.ms": "5000", "compression.type": "zstd"}
    settings = {"cleanup.policy": "compact", "unclean.leader.election.enable": "true"}
    assert config_file.topics == [
        ConfiguredTopic("orders", 4, settings),
        ConfiguredTopic("a.b", 1, {}),
    ]
    assert config_file.lines["port"] == 3


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("\nprot = 1", 2, "expected port"),
        ("acls = true\nlisteners = []", 2, "expected listener"),
        ("port = '1'", 1, "a number from 0 to 65535"),
        ("port = true", 1, "a number from 0 to 65535"),
        ("port = 70000", 1, "a number from 0 to 65535"),
        ("acls = 1", 1, "true or false"),
        ("listener = 'PLAINTEXT://h:1'", 1, "a list"),
        ("listener = [1]", 1, "a list"),
        ("tls_client = 'maybe'", 1, "one of none, required"),
        ("directory = 7", 1, "a text"),
        ("config = 1", 1, "a table"),
        ("[config]\nretention.mss = 1", 2, "retention.ms"),
        ("[config]\n\n'retention.ms' = []", 3, "a text, a number"),
        ("[config]\n'retention.ms' = 'soon'", 2, "retention.ms"),
        ("topics = 1", 1, "a table"),
        ("[topics]\norders = 4", 2, "a table"),
        ("[topics.orders]\npartitions = 0", 2, "a number from 1"),
        ("[topics.a]\n[topics.b]\npartitions = 'x'", 3, "a number from 1"),
        ("[topics.a]\nretention.ms = -2", 2, "retention.ms"),
        ("[topics.a]\npartitions = 1000000", 2, "a number from 1 to 100000"),
        ("\n[topics.'a b']\n", 2, "not a topic name"),
    ],
)
def test_error_names_the_line_and_the_nearest_name(
    tmp_path: Path, text: str, line: int, words: str
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        read(tmp_path, text)
    assert f"netshim.toml, line {line}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["port", "a = 1\na = 2", "x = \x01"])
def test_file_that_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidConfigError, match="is not TOML"):
        read(tmp_path, text)


def test_file_that_is_not_text_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "netshim.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidConfigError, match="is not TOML"):
        read_config_file(str(path), SHAPES)
    path.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(InvalidConfigError, match="at most"):
        read_config_file(str(path), SHAPES)


# -- the command -----------------------------------------------------------------------


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    done = click_testing.CliRunner().invoke(main, list(arguments), env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), (
        done.exception
    )
    return done.exit_code, done.output


def test_command_line_wins_over_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "n.toml"
    file.write_text(
        f"directory = {json.dumps(str(tmp_path / 'data'))}\n"
        "port = 1\nnum_partitions = 2\ngroup_max_size = 3\nauto_create_topics = false\n"
    )
    code, text = run(
        *("check", "--config-file", str(file), "--port", "0"),
        NETSHIM_PORT="2",
        NETSHIM_NUM_PARTITIONS="5",
    )
    assert code == 0, text
    assert text.splitlines() == [
        f'directory = "{tmp_path / "data"}"  # {file}, line 1',
        "port = 0  # command line",
        f"auto_create_topics = false  # {file}, line 5",
        "num_partitions = 5  # NETSHIM_NUM_PARTITIONS",
        f"group_max_size = 3  # {file}, line 4",
        f"# {tmp_path / 'data'} does not exist, and is created by serve",
    ]


def test_output_of_check_is_a_configuration_file(tmp_path: Path) -> None:
    directory = str(tmp_path / "d\U0001f600ta")
    file = tmp_path / "n.toml"
    file.write_text(
        "[config]\nretention.ms = 5000\n[topics.'a.b']\npartitions = 2\n"
        "cleanup.policy = 'compact'\n"
    )
    code, text = run(
        *("check", directory, "--all", "--port", "0", "--config-file", str(file)),
        *("--config", "segment.ms=7000"),
    )
    assert code == 0, text
    file.write_text(text)
    again = run("check", "--config-file", str(file), "--all")
    assert again[0] == 0
    values = [line.partition("  #")[0] for line in text.splitlines()]
    assert [line.partition("  #")[0] for line in again[1].splitlines()] == values
    config_file = read_config_file(str(file), _shapes())
    assert config_file.directory == directory
    assert config_file.config == {"retention.ms": "5000", "segment.ms": "7000"}
    assert config_file.topics == [
        ConfiguredTopic("a.b", 2, {"cleanup.policy": "compact"})
    ]


def _shapes() -> dict[str, OptionSpec]:
    return {key: _option_spec(option) for key, option in _file_options().items()}


def test_check_finds_the_errors_of_serve(tmp_path: Path) -> None:
    directory = str(tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, text = run("check", directory, "--port", port)
    assert code == 2 and "cannot listen on" in text
    code, text = run("check", directory, "--tls-cert", "missing.pem", "--port", "0")
    assert code == 2 and "missing.pem" in text
    (tmp_path / "data").write_text("a file")
    assert run("check", directory, "--port", "0")[0] == 2
    assert run("check", directory, "--config-file", str(tmp_path / "none"))[0] == 2


def test_every_option_of_serve_has_a_key_and_a_variable() -> None:
    serve = main.commands["serve"]
    names = [param.envvar for param in serve.params]
    assert len(set(names)) == len(names)
    assert all(str(name).startswith("NETSHIM_") for name in names)


@pytest.mark.long
def test_served_directory_has_the_topics_of_the_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("old", 3)
    file = tmp_path / "n.toml"
    file.write_text(
        "[config]\nretention.ms = 5000\n[topics.old]\npartitions = 9\n"
        "[topics.new]\npartitions = 2\ncleanup.policy = 'compact'\n"
    )
    command = [sys.executable, "-m", "netshim", "serve", str(data), "--port", "0"]
    with subprocess.Popen(
        [*command, "--config-file", str(file)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert b"serving" in process.stdout.readline()
        process.terminate()
    assert process.returncode == 0
    with logcore.open_dir(data, read_only=True) as logdir:
        assert len(logdir.partitions("old")) == 3
        assert len(logdir.partitions("new")) == 2
        assert logdir.partition("new", 0).config.cleanup_policy == "compact"
