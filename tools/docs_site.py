"""The pages of the docs site that are not files of docs/: a hook of mkdocs, named in
mkdocs.yml.

Rules:
- Every text exists once. The README, the changelog and similar files remain at their usual
  places.
- The API pages list the public names as the packages themselves do, so a new name
  cannot be missing.
- A link to a file outside docs/ is rewritten to the page that contains the file. Strict
  mode reports links without such a page.

Writes no file.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: Files outside docs/ and the pages that stand for them.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/MISSES.md": "misses.md",
    "examples/Containerfile": "examples/Containerfile.md",
    "examples/netshim.service": "examples/netshim.service.md",
    **{
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT)
        .with_suffix(".md")
        .as_posix()
        for path in sorted((ROOT / "examples").rglob("*.py"))
    },
}
#: Names of the languages of the files that are shown as code.
LANGUAGES = {".py": "python", ".service": "ini", "": "dockerfile"}

#: Pages for people who work on logcore. They come last in a search.
LATER = ("changelog.md", "map.md", "misses.md", "results.md", "examples/", "kafka/")
#: Pages with tables that need the whole width.
WIDE = ("coming-from.md",)

#: Public names of the packages that import them on first use, with the modules that
#: define them.
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
#: Names of the package logcore for directories. The other names are for one log.
DIRECTORY = (
    "open_dir",
    "LogDir",
    "Topic",
    "TopicRecord",
    "TopicDescription",
    "TopicTable",
    "MaintenanceConfig",
    "Incident",
)
#: The names that come first on their page.
FIRST = ("open", "Log", "Record", "Receipt", "Producer", "Consumer", "LogcoreError")

#: The methods that most programs need. They come first in their class.
NEEDED = {
    "logcore.Log": (
        "append",
        "append_many",
        "append_columns",
        "read",
        "scan",
        "get",
        "tail",
        "close",
    ),
    "logcore.LogDir": (
        "create_topic",
        "append",
        "read",
        "scan",
        "tail",
        "producer",
        "consumer",
        "partition",
        "topic",
        "topics",
        "tick",
        "close",
    ),
    "logcore.producer.Producer": (
        "send",
        "send_many",
        "send_columns",
        "flush",
        "close",
    ),
    "logcore.consumer.Consumer": (
        "subscribe",
        "poll",
        "commit",
        "commit_async",
        "seek",
        "position",
        "poll_columns",
        "poll_arrow",
        "close",
    ),
}
#: Public methods that only netshim and other packages of this repository call.
FOR_HOSTS = (
    "host",
    "prepare_to_read",
    "has_moved",
    "has_records",
    "watched_paths",
    "max_wait_seconds",
    "register_with",
    "commit_elsewhere",
    "leave_unfinished",
    "close_at_exit",
)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    texts = {page: text_of(name) for name, page in PAGES.items()}
    texts["index.md"] = f"---\nhide: [navigation]\n---\n{texts['index.md']}"
    texts |= api()
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to files outside docs/ into links to their pages, and remove the words
    after the language of a code fence.

    The words are options for the tests. pymdownx.superfences does not recognize a fence
    with such words, and would show all text up to the next fence as code.
    """
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri.startswith(LATER):
        page.meta["search"] = {"boost": 0.2}
    markdown = re.sub(r"^(```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = markdown.replace(f"](../{up}{name}", f"]({up}{target}")
    return markdown


def text_of(name: str) -> str:
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return f"# {name}\n\n```{LANGUAGES[path.suffix]}\n{text}```\n"
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    text = text.replace("](RESULTS.md", "](results.md")
    outside = "|".join(map(re.escape, PAGES))
    return re.sub(
        rf"\]\((?:\.\./)?({outside})", lambda link: f"]({PAGES[link[1]]}", text
    )


def api() -> dict[str, str]:
    """Return the pages of the API by their names."""
    import logcore.aio
    import logcore.backup
    import logcore.consumer
    import logcore.producer
    import logcore.registry
    import logcore.shipping

    public = set(logcore.__all__)
    errors = public & vars(logcore.errors).keys()
    clients = [
        *(f"logcore.producer.{name}" for name in ordered(logcore.producer.__all__)),
        "logcore.producer.transactional_producer.TransactionalProducer",
        "logcore.producer.settings.ProducerOptions",
        "logcore.producer.settings.TransactionOptions",
        *(f"logcore.consumer.{name}" for name in ordered(logcore.consumer.__all__)),
        "logcore.consumer.settings.ConsumerOptions",
    ]
    log = public - errors - set(DIRECTORY)
    pages = {
        "log": ("Logs", (f"logcore.{name}" for name in ordered(log))),
        "directory": ("Directories and topics", (f"logcore.{x}" for x in DIRECTORY)),
        "clients": ("Producers and consumers", clients),
        "aio": (
            "asyncio",
            (f"logcore.aio.{name}" for name in ordered(logcore.aio.__all__)),
        ),
        "errors": ("Errors", (f"logcore.{name}" for name in ordered(errors))),
        "shipping": (
            "Shipping",
            (f"logcore.shipping.{name}" for name in logcore.shipping.__all__),
        ),
        "backup": (
            "Backup",
            (f"logcore.backup.{name}" for name in ordered(logcore.backup.__all__)),
        ),
        "registry": (
            "Registry",
            (f"logcore.registry.{name}" for name in ordered(logcore.registry.__all__)),
        ),
        "netshim": ("Broker", BROKER),
        "spark": ("Spark", SPARK),
        "testing": ("Testing", TESTING),
    }
    found = {}
    overview = ["# API\n\nThe public names. All other names may change.\n"]
    overview += ["| page | names |", "|---|---|"]
    for page, (title, names) in pages.items():
        names = list(names)
        found[f"api/{page}.md"] = "\n".join([f"# {title}\n", *map(entry, names)])
        links = ", ".join(f"[{short(name)}][{name}]" for name in names)
        overview.append(f"| [{title}]({page}.md) | {links} |")
    found["api/index.md"] = "\n".join([*overview, ""])
    return found


def short(name: str) -> str:
    """Return the name as a program writes it, without its module."""
    return f"`{name.rpartition('.')[2]}`"


def ordered(names: Iterable[str]) -> list[str]:
    """Return the names that most programs need, and then the other names in
    alphabetical order.
    """

    def rank(name: str) -> tuple[int, str]:
        return FIRST.index(name) if name in FIRST else len(FIRST), name.lower()

    return sorted(names, key=rank)


def entry(name: str) -> str:
    options: dict[str, object] = {"heading_level": 2}
    if name in NEEDED:
        options |= {"members": members_of(name), "group_by_category": False}
    return f"::: {name}\n    options: {json.dumps(options)}\n"


def members_of(name: str) -> list[str]:
    """Return the public names of a class, first the names that most programs need."""
    module, _, last = name.rpartition(".")
    kind = getattr(importlib.import_module(module), last)
    names = [
        each
        for base in (kind, *kind.__mro__[1:-1])
        for each in vars(base)
        if not each.startswith("_") and each not in FOR_HOSTS
    ]
    first = NEEDED[name]
    return [*first, *(each for each in dict.fromkeys(names) if each not in first)]
