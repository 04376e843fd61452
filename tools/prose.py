"""Check docstrings, comments, error texts and pages for habits that make text hard to
read.

    python tools/prose.py             compare each file with its limit in tools/prose_limits.txt
    python tools/prose.py --update    lower the limits to the present counts, and drop deleted files
    python tools/prose.py --show FILE...   print each hit with its line

More hits than the limit of a file are an error, and so are fewer, until --update lowers
the limit. The limit of a file that is not listed is 0. CONTRIBUTING.md describes the
style. A hit is a candidate, and a file without hits can still be hard to read.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LIMITS: Final = ROOT / "tools" / "prose_limits.txt"
CHECKED: Final = (
    "src",
    "tests",
    "docs",
    "benchmarks",
    "examples",
    "tools",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "Makefile",
    "MANIFEST.in",
    "mkdocs.yml",
    "pyproject.toml",
    "setup.py",
)
#: A string constant with as many words counts as an error text, a log line or help.
TEXT_WORDS: Final = 4

#: Name of a habit with its replacement, and the pattern that finds it.
HABITS: Final = {
    "what-clause: name the noun": r"\b[Ww]hat (?:is|was|are|were|has|have|had|it|they|no|not|to|may|must|can|came|"
    r"comes|stands?|lies|others?|another|each|its|this|that|opening|reading|users?|readers?|writers?|Kafka|somebody|"
    r"one|a|an|the)\b(?![^.]*\?)",
    "who: name the caller, thread or process": r"(?<!one )(?<!those )(?<!people )(?<!anyone )(?<!user )"
    r"\b(?:[Ww]hoever|[Ww]hom|[Ww]ho)\b(?! (?:is|are) (?:the|a)\b)",
    "for: because": r", for (?:it|that|this|they|there|no|nothing|each|one|who|a \w+|the \w+) (?:is|are|has|have|"
    r"had|may|would|will|takes?|can|could|was|were|must|does|do|names)\b",
    "where: if, when": r"(?:^|[.;:] )Where\b|\bwhere (?:there|it|no|none|nothing|another|one|they) "
    r"(?:is|are|has|have|may|was|were|cannot|does|do)\b",
    "behind: after, above": r"\bbehind\b",
    "stand, lie: be": r"\b(?:stands?|stood|lies|lie)\b",
    "noted: stored": r"\b(?:noted|note of|takes? note)\b",
    "look: the exact verb": r"\b(?:looks?|looked|looking)\b(?! (?:up|like))",
    "tell, hear, say: report, contain": r"\b(?:told|tells?|heard|hears|hear|says|said)\b",
    "go, stay: continue, remain": r"\b(?:goes on|go on|goes|gone|stays?)\b",
    "is to: must": r"\b(?:is|are) to (?:be|follow|come|happen|do|hear|end|go|have|give|take|store|know|open|see|"
    r"begin|find)\b|\b[Tt]o be (?:called|asked|used)\b|\bhas to be\b",
    "so many: that many": r"\b[Ss]o (?:many|much|long|few|late) (?!as\b|that\b)|\bafter so long\b",
    "for ever: forever": r"\bfor ever\b",
    "verbless: a sentence": r"(?:^|\. )As [`\w.]+\(\)|\b[Rr]aises as\b|(?:^|\. )Errors (?:as|of)\b|(?:^|\. )The same "
    r"(?:for|of|as)\b|(?:^|\. )As far as\b",
    "meanwhile: while X": r"\bmeanwhile\b",
    "those of: repeat the noun": r"\b(?:those|that) of (?:a|an|the|all|other|others|this|one|its)\b|\bof before\b",
    "is there: exists": r"\b(?:is|are|was|were) (?:not )?there\b(?= *[.,;:)]|$| yet)",
    "nothing as subject": r"(?:^|[.;:] )(?:Nothing|None of)\b",
    "old words": r"\banew\b|\bnobody\b|\bas young as\b|\btaken for\b|\bsomebody\b|\banybody\b|\bby itself\b",
}
PATTERNS: Final = {name: re.compile(pattern) for name, pattern in HABITS.items()}
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings, of long string constants, and of blocks of
    comments.
    """
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
            yield node.body[0].lineno, text
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and len(re.findall(r"[A-Za-z]{2,}", node.value)) >= TEXT_WORDS
        ):
            yield node.lineno, node.value
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if block and line != first + len(block):
                yield first, " ".join(block)
                block = []
            if not block:
                first = line
            block.append(token.string.lstrip("#: ").rstrip())
    if block:
        yield first, " ".join(block)


def texts_of_cython(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of long strings, docstrings among them, and of blocks of
    comments. Cython has another grammar than Python, but the same tokens.
    """
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if (
            token.type == tokenize.STRING
            and len(re.findall(r"[A-Za-z]{2,}", token.string)) >= TEXT_WORDS
        ):
            yield token.start[0], token.string.strip('"')
    yield from _comments(source)


def texts_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) outside code."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and line.strip() and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "X", line.strip())


def texts_of_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of all lines: settings, templates and scripts are short."""
    yield from enumerate(source.splitlines(), 1)


#: The function that finds the texts of a file, by the suffix of its name.
READERS: Final = {
    "": texts_of_lines,
    ".css": texts_of_lines,
    ".html": texts_of_lines,
    ".in": texts_of_lines,
    ".js": texts_of_lines,
    ".py": texts_of_python,
    ".pyx": texts_of_cython,
    ".pxi": texts_of_cython,
    ".md": texts_of_markdown,
    ".service": texts_of_lines,
    ".toml": texts_of_lines,
    ".yml": texts_of_lines,
}


def hits_of(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, habit, surrounding text) of each hit in a file."""
    source = path.read_text(encoding="utf-8")
    found = []
    for line, text in READERS[path.suffix](source):
        joined = " ".join(text.split())
        for name, pattern in PATTERNS.items():
            for match in pattern.finditer(joined):
                found.append(
                    (line, name, joined[max(0, match.start() - 40) : match.end() + 40])
                )
    return found


def checked_files() -> Iterator[Path]:
    for name in CHECKED:
        root = ROOT / name
        found = [root] if root.is_file() else sorted(root.rglob("*"))
        for path in found:
            is_hidden = any(
                part.startswith(".") or part in ("data", "__pycache__")
                for part in path.relative_to(ROOT).parts
            )
            if (
                path.is_file()
                and path.suffix in READERS
                and path != Path(__file__).resolve()
                and not is_hidden
            ):
                yield path


def limits() -> dict[str, int]:
    if not LIMITS.exists():
        return {}
    rows = (line.split() for line in LIMITS.read_text(encoding="utf-8").splitlines())
    return {name: int(count) for count, name in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--update", action="store_true", help="lower the limits to the present counts"
    )
    parser.add_argument(
        "--show",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="print each hit of these files",
    )
    arguments = parser.parse_args()
    if arguments.show:
        for path in arguments.show:
            for line, habit, text in hits_of(path):
                print(f"{path}:{line}: {habit}: ...{text}...")
        return 0
    counts = {
        str(path.relative_to(ROOT)): len(hits_of(path)) for path in checked_files()
    }
    known = limits()
    worse = {
        name: count for name, count in counts.items() if count > known.get(name, 0)
    }
    better = [name for name, limit in known.items() if counts.get(name, 0) < limit]
    if arguments.update or not known:
        kept = {
            name: min(count, known.get(name, count if not known else 0))
            for name, count in counts.items()
        }
        LIMITS.write_text(
            "".join(
                f"{count} {name}\n" for name, count in sorted(kept.items()) if count
            ),
            encoding="utf-8",
        )
        better = []
    for name, count in worse.items():
        if known:
            print(
                f"{name}: {count} hits, but the limit is {known.get(name, 0)}; see tools/prose.py --show {name}"
            )
    for name in better:
        print(
            f"{name}: fewer hits than its limit; record that with tools/prose.py --update"
        )
    return int(bool(known and worse) or bool(better))


if __name__ == "__main__":
    sys.exit(main())
