"""The start of the program: its imports, and the list of its commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import logcore
from logcore.cli.command_list import MODULES, completion, help_text
from logcore.cli.commands import main


def modules_of(*arguments: str, **environment: str) -> set[str]:
    """Run the program, and return the modules that it imported."""
    program = (
        "import sys\n"
        f"sys.argv = {['logcore', *arguments]!r}\n"
        "import logcore.__main__\n"
        "try:\n"
        "    logcore.__main__.main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split())


def test_version_needs_neither_click_nor_numpy() -> None:
    """They took 0.4 s, twenty times an empty Python process."""
    imported = modules_of("--version")
    assert not imported & {"numpy", "click", "attrs", "logcore.log"}


@pytest.mark.parametrize("way", ["help", "completion"])
def test_list_of_commands_needs_no_command(way: str) -> None:
    if way == "help":
        imported = modules_of("--help")
    else:
        imported = modules_of(
            _LOGCORE_COMPLETE="bash_complete", COMP_WORDS="logcore s", COMP_CWORD="1"
        )
    heavy = {"rich", "numpy", "attrs", "asyncio", "logcore.log", "logcore.cli.read"}
    assert not imported & heavy


def test_help_has_one_line_for_each_command() -> None:
    lines = CliRunner().invoke(main, ["--help"], terminal_width=80).output.splitlines()
    for name, (_, text) in MODULES.items():
        assert text.endswith(".")
        assert any(line.split() == [name, *text.split()] for line in lines), name


def test_each_public_name_is_found() -> None:
    for name in logcore.__all__:
        assert getattr(logcore, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        _ = logcore.opne  # type: ignore[attr-defined]
    assert set(logcore.__all__) <= set(dir(logcore))


def test_help_and_completion_are_those_of_click(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(main, ["--help"], prog_name="logcore", terminal_width=78)
    assert done.output == f"{help_text()}\n"
    monkeypatch.setenv("COLUMNS", "60")
    assert help_text() is None
    for shell in ("bash", "zsh"):
        for words in ("logcore re", "logcore ", "logcore nothing"):
            asked = {
                "_LOGCORE_COMPLETE": f"{shell}_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": "1",
            }
            done = CliRunner().invoke(main, [], prog_name="logcore", env=asked)
            assert done.output == f"{completion(asked)}\n"
    asked["COMP_CWORD"] = "2"
    assert completion(asked) is None
    assert completion({**asked, "COMP_WORDS": "logcore --v"}) is None


def test_help_and_completion_need_no_click() -> None:
    asked = {"_LOGCORE_COMPLETE": "bash_complete", "COMP_WORDS": "logcore r"}
    imported = modules_of(COMP_CWORD="1", **asked)
    assert not imported & {"click", "numpy", "typing"}
    imported = modules_of("--help", COLUMNS="80")
    assert not imported & {"click", "numpy", "typing"}
