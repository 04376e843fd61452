"""Fixtures: a directory, and a console that shows it on a separate port."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

import logcore

pytest.importorskip("jinja2")
pytest.importorskip("uvicorn")

from support.consoles import ConsoleClient, opened_console


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return the path of a directory for logs."""
    return tmp_path / "data"


@pytest.fixture
def console(data: Path) -> Generator[ConsoleClient, None, None]:
    """Open a console of the directory. Its time limit is so long that no page is
    partial.
    """
    with opened_console(data) as client:
        yield client


@pytest.fixture
def logdir(data: Path) -> Generator[logcore.LogDir, None, None]:
    """Open the directory for writing."""
    with logcore.open_dir(data, create=True, durability="os") as logdir:
        yield logdir


@pytest.fixture
def consoles(tmp_path: Path) -> Generator[Callable[[Path], ConsoleClient], None, None]:
    """Return a function that opens a console of any directory."""
    with contextlib.ExitStack() as stack:
        yield lambda path: stack.enter_context(opened_console(path))
