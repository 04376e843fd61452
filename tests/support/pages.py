"""Runs the examples of a page of the documentation.

If a line of a shell block is one plain `logcore` command, it runs in this process: a
page has dozens of them, and a new process needs a third of a second for its imports.
All other lines are passed to `sh`, with `logcore` on the path.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

#: Characters with a meaning for sh, except quotes and comments, which shlex handles.
_MEANT_FOR_SH: Final = re.compile(r"[|&;<>$`*?~\\]")


class Block(NamedTuple):
    language: str
    words: list[str]
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    opened: tuple[int, list[str]] | None = None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number, line[3:].split()
            continue
        start, words = opened
        # Preceded by one empty line for each line above it, so that line numbers in a
        # traceback match the page.
        text = "\n" * start + "\n".join(lines[start : number - 1]) + "\n"
        found.append(Block(words[0] if words else "", words[1:], text, start))
        opened = None
    assert opened is None, (
        f"{page}: the fence in line {opened[0] if opened else 0} is not closed"
    )
    return found


def run_shell_block(text: str, directory: Path) -> None:
    """Run the lines of a block in order. If a command has several lines, or a line sets
    a variable, the whole block is passed to sh.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if re.search(r"\\\n|<<|\bdo\b|\bthen\b|^\w+=", text, flags=re.MULTILINE):
        _run_in_sh(text, directory)
        return
    for is_plain, run in itertools.groupby(lines, _is_plain):
        if not is_plain:
            _run_in_sh("\n".join(run), directory)
            continue
        for line in run:
            _run_in_process(shlex.split(line, comments=True)[1:], directory)


def _is_plain(line: str) -> bool:
    command = line.split(" #", maxsplit=1)[0]
    return command.startswith("logcore ") and not _MEANT_FOR_SH.search(command)


def _run_in_process(arguments: list[str], directory: Path) -> None:
    """Run one command of logcore in this process."""
    from click.testing import CliRunner

    from logcore.cli.commands import main

    with contextlib.chdir(directory):
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, (
        f"logcore {shlex.join(arguments)}: {done.output}{done.exception}"
    )


def _run_in_sh(text: str, directory: Path) -> None:
    commands = directory / ".bin"
    commands.mkdir(exist_ok=True)
    (commands / "logcore").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m logcore "$@"\n'
    )
    (commands / "logcore").chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    # A page starts logcore dozens of times; compiling it and its imports each time takes
    # a second or two.
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        environment["PYTHONPYCACHEPREFIX"] = str(commands / "compiled")
    done = subprocess.run(
        ["sh", "-e", "-c", text],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_blocks(page: Path, directory: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if "no-run" in block.words:
            continue
        if block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
        elif block.language == "sh":
            run_shell_block(block.text, directory)
