"""Each mistake of tests/meant_mutants.py can still be made: its old text occurs once, the
new one is Python, and its tests exist.

tests/meant_mutants.py finds out whether the tests notice the mistakes, which takes
longer. After code or tests were renamed, mistakes could not be made any more, and only
that long run reported it.
"""

from __future__ import annotations

import re
from pathlib import Path

from meant_mutants import MISTAKES

TESTS = Path(__file__).resolve().parents[1]
SOURCES = TESTS.parent / "src"


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


def test_tests_of_each_of_them_exist() -> None:
    """An unknown name after -k selects no test, and so none notices."""
    support = "".join(
        path.read_text("utf-8") for path in (TESTS / "support").glob("*.py")
    )
    missing = []
    for mistake in MISTAKES:
        # A value of -k with spaces has quotes.
        modules, _, expression = mistake.tests.partition(" -k ")
        text = support
        for module in modules.partition(" --")[0].split():
            path, _, name = module.partition("::")
            if not (TESTS / path).exists():
                missing.append(f"{mistake.name}: {path}")
                continue
            if (TESTS / path).is_file():
                text += (TESTS / path).read_text("utf-8")
            if name and f"def {name.partition('[')[0]}(" not in text:
                missing.append(f"{mistake.name}: {name}")
        for word in re.findall(r"\w+", expression):
            if word not in ("and", "or", "not") and word not in text:
                missing.append(f"{mistake.name}: -k {word}")
    assert not missing
