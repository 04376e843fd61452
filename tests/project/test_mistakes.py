"""Each mistake of tests/meant_mutants.py can still be made: its old text occurs once,
and the new one is Python.

Whether tests notice it takes longer to find out. Code that moved has left mistakes
behind that could not be made any more, and only a long run said so.
"""

from __future__ import annotations

from pathlib import Path

from meant_mutants import MISTAKES

SOURCES = Path(__file__).resolve().parents[2] / "src"


def test_each_old_text_occurs_once() -> None:
    counts = {
        mistake.name: (SOURCES / mistake.file).read_text("utf-8").count(mistake.old)
        for mistake in MISTAKES
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_with_each_of_them_the_file_compiles() -> None:
    """With one that does not, no test runs, and so none notices."""
    broken = []
    for mistake in MISTAKES:
        if not mistake.file.endswith(".py"):
            continue
        text = (SOURCES / mistake.file).read_text("utf-8")
        try:
            compile(text.replace(mistake.old, mistake.new), mistake.file, "exec")
        except SyntaxError as error:
            broken.append(f"{mistake.name}: {error}")
    assert not broken


def test_each_name_is_its_own() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(names) == len(set(names))
