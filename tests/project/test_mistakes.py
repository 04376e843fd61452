"""Each mistake of tests/meant_mutants.py is applicable: its old text occurs once, its
new text is Python, and its tests exist. Whether the tests detect the mistakes is
checked by tests/meant_mutants.py, which takes longer. Without this test, only that long
run reported mistakes that became stale after a rename.

The modules and tests that tests/mutants.py names must exist too, and so must the tests
that the pages and the Makefile select with -k.
"""

from __future__ import annotations

import re
from pathlib import Path

import mutants
from meant_mutants import MISTAKES

TESTS = Path(__file__).resolve().parents[1]
SOURCES = TESTS.parent / "src"


def test_old_text_of_each_mistake_occurs_once() -> None:
    counts = {
        mistake.name: (SOURCES / mistake.file).read_text("utf-8").count(mistake.old)
        for mistake in MISTAKES
    }
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_file_compiles_with_each_mistake() -> None:
    """If a mistake is a syntax error, no test runs, so that no test detects it."""
    errors = []
    for mistake in MISTAKES:
        if not mistake.file.endswith(".py"):
            continue
        text = (SOURCES / mistake.file).read_text("utf-8")
        try:
            compile(text.replace(mistake.old, mistake.new), mistake.file, "exec")
        except SyntaxError as error:
            errors.append(f"{mistake.name}: {error}")
    assert not errors


def test_names_of_mistakes_are_unique() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(names) == len(set(names))


def test_tests_of_each_mistake_exist() -> None:
    """An unknown name after -k selects no test, so that no test detects the mistake."""
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


def test_modules_and_tests_of_random_mutants_exist() -> None:
    modules = {SOURCES / "logcore" / f"{name}.py" for name in mutants.CORE}
    missing = sorted(str(path) for path in modules if not path.is_file())
    text = ""
    for selection in mutants.CHAIN:
        name, _, function = selection.partition("::")
        path = TESTS / name
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            missing.append(name)
            continue
        content = "".join(file.read_text("utf-8") for file in files)
        if f"def {function}(" not in content and function:
            missing.append(selection)
        text += content
    names = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    for word in mutants.LEFT_OUT.split(" or "):
        if not any(word in name for name in names):
            missing.append(f"-k {word}")
    assert not missing


def test_tests_that_pages_and_makefile_select_exist() -> None:
    """An unknown name after -k selects no test, or leaves out none."""
    root = TESTS.parent
    names = [
        name
        for path in TESTS.rglob("*.py")
        for name in re.findall(
            r"^ *(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE
        )
    ]
    missing = []
    for page in [*root.glob("*.md"), *root.rglob("docs/*.md"), root / "Makefile"]:
        text = page.read_text("utf-8").replace("\\\n", "")
        if page.suffix == ".md":
            text = "\n".join(re.findall(r"pytest [^`\n]+", text))
        for expression in re.findall(r" -k ('[^']+'|\"[^\"]+\"|\w+)", text):
            missing += [
                f"{page.name}: {word}"
                for word in re.findall(r"\w+", expression)
                if word not in ("and", "or", "not")
                and not any(word in name for name in names)
            ]
    assert not missing
