"""The docs site is built without a warning: `make docs` does the same.

Only this test sees a link that the site rewrites, an anchor of a page that the site
makes, a page missing in the navigation, a fence whose words pymdownx does not know, and
a docstring that mkdocstrings cannot read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # `make docs` is the same, and a minute is long for `make test`
def test_docs_site_is_built_in_strict_mode(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",  # with --quiet, mkdocs would count no warnings
        "--site-dir",
        str(tmp_path),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert (tmp_path / "index.html") in pages
    # A fence that is none shows its marks in the text.
    torn = re.compile(r"<p>[^<]*```|<code>\w+ no-run")
    assert not [page.name for page in pages if torn.search(page.read_text("utf-8"))]
    # The API reader takes "word: text" with an indented line for a section of that name.
    api = [page for page in pages if page.parent.name == "api"]
    assert not [page for page in api if "<details class=" in page.read_text("utf-8")]
    check_links({page: read(page) for page in pages}, tmp_path)


class Links(HTMLParser):
    """The ids of a page, its links, and the files that a browser loads for it."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag == "link" and found.get("rel") != "canonical":
            self.loaded.add(found["href"])
        elif "src" in found:
            self.loaded.add(found["src"])


def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text("utf-8"))
    return links


def check_links(pages: dict[Path, Links], site: Path) -> None:
    """Check that local links have a target, and that no other host is needed."""
    wrong = []
    for page, found in pages.items():
        for link in found.links | found.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in found.loaded:
                    wrong.append((page.relative_to(site).as_posix(), link))
                continue
            target = page
            if parts.path:
                target = (page.parent / unquote(parts.path)).resolve()
            anchor = unquote(parts.fragment)
            is_there = target.exists() and (
                not anchor or target not in pages or anchor in pages[target].ids
            )
            # 404.html is shown for any address, so its links are absolute.
            if not is_there and page.name != "404.html":
                wrong.append((page.relative_to(site).as_posix(), link))
    assert not wrong


def test_pages_from_elsewhere_replace_no_page_of_docs() -> None:
    """SECURITY.md once replaced docs/security.md, without a warning."""
    text = (ROOT / "tools" / "docs_site.py").read_text("utf-8")
    made = set(re.findall(r'": "([\w/-]+\.md)"', text))
    assert {"index.md", "reporting.md"} <= made
    assert not [name for name in made if (ROOT / "docs" / name).exists()]


def test_navigation_names_each_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    named = re.findall(r"[\w/.-]+\.md", navigation)
    assert sorted(named) == sorted(set(named))
