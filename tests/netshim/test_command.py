"""The `netshim` command: help, versions and wrong usage. tests/netshim/test_shim.py
runs it as a server.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from netshim.server import Server
from netshim.settings import Settings

click = pytest.importorskip("click")
click_testing = pytest.importorskip("click.testing")
from netshim import cluster_command, command  # noqa: E402
from netshim.command import main  # noqa: E402
from netshim.config_file import FileSettings  # noqa: E402

SOURCE = str(Path(logcore.__file__).resolve().parents[1])


def run(*arguments: str) -> tuple[int, str]:
    done = click_testing.CliRunner().invoke(main, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), (
        done.exception
    )
    return done.exit_code, done.output


def test_help_explains_each_setting() -> None:
    code, text = run("serve", "--help")
    words = " ".join(text.split())
    assert code == 0
    for field in attrs.fields(Settings):
        assert f"--{field.name.replace('_', '-')} " in words
        assert field.metadata["doc"].endswith(".") and field.metadata["doc"] in words


class OptionsRead(Mapping[str, Any]):
    """The options of a command. It records which of them are read."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self._options[name]
        self.read.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)


def ignored_options(params: list[Any]) -> set[str]:
    """Return the options of `serve` that change neither a server nor its pages."""
    texts = ["data", "--listener", "OWN://127.0.0.1:0", "--node-id", "1"]
    texts += ["--listener-protocol", "OWN=PLAINTEXT", "--registry", "r"]
    parser = click.Command("serve", params=params)
    ignored = {param.name for param in params if param.expose_value}
    # The options of listeners replace --host and --port.
    for arguments in (texts, ["data"]):
        options = OptionsRead(parser.make_context("serve", list(arguments)).params)
        file = FileSettings("")
        server = command._new_server(file, options)
        command._new_pages(server, file, options)
        ignored -= options.read
    return ignored - set(inspect.signature(main.commands["serve"].callback).parameters)


def test_every_option_of_serve_is_used() -> None:
    """Options are passed by the names of the fields of settings, so an option with a
    misspelled name would be ignored.
    """
    params = main.commands["serve"].params
    assert ignored_options(params) == set()
    misspelled = click.Option(["--oauth-audiance"])
    assert ignored_options([*params, misspelled]) == {"oauth_audiance"}


def test_options_that_cluster_passes_are_options_of_serve() -> None:
    passed = set(re.findall(r'"(--[a-z-]+)"', inspect.getsource(cluster_command)))
    own = {name for param in main.commands["cluster"].params for name in param.opts}
    served = {name for param in main.commands["serve"].params for name in param.opts}
    assert {"--node-id", "--broker-session-timeout-ms"} <= passed
    assert passed - served <= own


def test_range_of_an_option_is_the_range_of_the_setting() -> None:
    for field in attrs.fields(Settings):
        if isinstance(field.default, bool | str):
            continue
        low, high = field.metadata["range"]
        for number in (low, high):
            assert getattr(Settings(**{field.name: number}), field.name) == number
        for number in (low - 1, high + 1):
            with pytest.raises(ValueError, match=field.name):
                Settings(**{field.name: number})


def test_other_threads_let_the_event_loop_run(tmp_path: Path) -> None:
    """The loop waited up to 5 ms for the thread of the maintenance after each system
    call.
    """
    program = """
import sys
from netshim import command
async def serve(*_):
    print(sys.getswitchinterval())
command._serve = serve
command.main(["serve", sys.argv[1], "--port", "0"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "d")],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < float(done.stdout) < 0.001


def test_version_is_printed() -> None:
    assert run("--version") == (0, f"netshim, version {logcore.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sreve",), "No such command"),
        (("serve",), "Missing argument"),
        (("serve", "data", "--num-partitions", "0"), "--num-partitions"),
        (("serve", "data", "--num-partition", "3"), "--num-partitions"),
        (
            ("serve", "data", "--advertise", "nowhere"),
            "expected HOST:PORT, found 'nowhere'",
        ),
        (("serve", "data", "--host", ""), "0.0.0.0 for all"),
        (("serve", "data", "--config", "x"), "NAME=VALUE"),
        (
            ("serve", "data", "--config", "retention.mss=1"),
            "did you mean 'retention.ms'",
        ),
        (("serve", "data", "--durability", "maybe"), "unknown durability"),
    ],
)
def test_wrong_usage_exits_2_and_creates_no_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run(*arguments)
    assert code == 2 and words in text and "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


def test_server_with_an_empty_host_raises() -> None:
    """The server listened on all addresses, so that an empty variable of a script
    opened the broker to the network.
    """
    with pytest.raises(
        logcore.InvalidConfigError, match=r"host \(expected an address; 0.0.0.0 for all"
    ):
        Server("data", host="")


def test_missing_click_error_names_the_extra_to_install() -> None:
    hide = "import sys, importlib.util as u; real = u.find_spec\n"
    hide += "u.find_spec = lambda name, *rest: None if name == 'click' else real(name, *rest)\n"
    hide += "from netshim.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hide],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode,
        re.search(r"pip install .*\[cli\]", done.stderr) is not None,
    ) == (2, True)
