"""The pages of the docs site that are not files of docs/: a hook of mkdocs, named in
mkdocs.yml.

Rules:
- Every text has one home. The README, the changelog and their like stay where
  repositories have them.
- The API page lists the public names as the packages themselves do, so a new name
  cannot be missing.
- A link that leaves docs/ is rewritten to the page that stands for the file. Strict
  mode reports those without one.

Writes no file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import logcore

ROOT = Path(__file__).resolve().parents[1]

#: Files outside docs/ and the pages that stand for them.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/MISSES.md": "misses.md",
    **{
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT)
        .with_suffix(".md")
        .as_posix()
        for path in sorted((ROOT / "examples").rglob("*.py"))
    },
}

#: Public names of the packages that import theirs late, where they are defined.
BROKER = (
    "netshim.server_thread.serve",
    "netshim.server.Server",
    "netshim.server_thread.ServerThread",
    "netshim.listeners.Listener",
    "netshim.listeners.TlsSettings",
    "netshim.security.service.SecuritySettings",
    "netshim.settings.Settings",
    "netshim.testing.Kafka",
)
TESTING = (
    "logcore.testing.disk.SimulatedDisk",
    "logcore.testing.faults.Fault",
    "logcore.testing.faults.FaultPlan",
    "logcore.testing.explore.explore",
    "logcore.testing.explore.Explorer",
)
SPARK = (
    "pyspark_logcore.register",
    "pyspark_logcore.activate",
    "pyspark_logcore.ensure_java",
    "pyspark_logcore.tune",
)

#: What most programs need of a log: they come first.
NEEDED = (
    "append",
    "append_many",
    "append_columns",
    "read",
    "scan",
    "get",
    "tail",
    "close",
)
FOR_HOSTS = ("writer", "upkeep")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    texts = {page: text_of(name) for name, page in PAGES.items()}
    texts["api.md"] = api()
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turns links to files outside docs/ into links to their pages; drops the words
    behind a fence's language.

    They are for the tests. To pymdownx.superfences a fence with them is none, and
    headings up to the next one are code.
    """
    markdown = re.sub(r"^(```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = markdown.replace(f"](../{up}{name}", f"]({up}{target}")
    return markdown


def text_of(name: str) -> str:
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"# {name}\n\n```python\n{text}```\n"
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    outside = "|".join(map(re.escape, PAGES))
    return re.sub(
        rf"\]\((?:\.\./)?({outside})", lambda link: f"]({PAGES[link[1]]}", text
    )


def api() -> str:
    names = [name for name in logcore.__all__ if name not in vars(logcore.errors)]
    return "\n".join(
        [
            "# API\n\nThe public names. Everything else may change without notice.\n",
            "## logcore\n",
            *map(entry, (f"logcore.{name}" for name in sorted(names, key=rank))),
            "## Errors\n",
            *map(
                entry,
                (f"logcore.{name}" for name in logcore.__all__ if name not in names),
            ),
            "## netshim\n",
            *map(entry, BROKER),
            "## pyspark_logcore\n",
            *map(entry, SPARK),
            "## logcore.testing\n",
            *map(entry, TESTING),
        ]
    )


def entry(name: str) -> str:
    if name == "logcore.Log":
        options = {"members": members_of_log(), "group_by_category": False}
        return f"::: {name}\n    options: {json.dumps(options)}\n"
    return f"::: {name}\n"


def members_of_log() -> list[str]:
    """What is public in Log: first what most programs need, then the rest; not the
    doors for hosts.
    """
    names = [
        name
        for kind in (logcore.Log, *logcore.Log.__mro__[1:-1])
        for name in vars(kind)
        if not name.startswith("_") and name not in FOR_HOSTS
    ]
    return [*NEEDED, *(name for name in dict.fromkeys(names) if name not in NEEDED)]


def rank(name: str) -> tuple[int, str]:
    """The doors first, then what they open, then the rest."""
    first = ("open", "open_dir", "Log", "LogDir", "Record", "Receipt", "LogConfig")
    return first.index(name) if name in first else len(first), name
