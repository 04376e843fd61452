"""Each mistake of tests/meant_mutants.py can still be made: its old text occurs once, and the new one is Python.

Whether tests notice it takes longer to find out. Code that moved has left mistakes behind that could not be made any
more, and only a long run said so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from meant_mutants import MISTAKES, Mistake

SOURCES = Path(__file__).resolve().parents[2] / "src"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_its_old_text_occurs_once(mistake: Mistake) -> None:
    assert (SOURCES / mistake.file).read_text("utf-8").count(mistake.old) == 1


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_with_it_the_file_compiles(mistake: Mistake) -> None:
    """With one that does not, no test runs, and so none notices."""
    if mistake.file.endswith(".py"):
        text = (SOURCES / mistake.file).read_text("utf-8")
        compile(text.replace(mistake.old, mistake.new), mistake.file, "exec")


def test_its_name_is_its_own() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(names) == len(set(names))
