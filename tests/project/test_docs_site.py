"""Tests that the docs site is built without a warning, as by `make docs`. No other test
checks the links that the site rewrites, the anchors of generated pages, the navigation,
the options of fences, and the docstrings that mkdocstrings reads.
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


@pytest.mark.slow  # a minute; `make docs` does the same
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
    result = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert (tmp_path / "index.html") in pages
    # An invalid fence is rendered as plain text, with its backticks.
    fence = re.compile(r"<p>[^<]*```|<code>\w+ no-run")
    assert not [page.name for page in pages if fence.search(page.read_text("utf-8"))]
    # mkdocstrings reads "word: text" with an indented line as a section of that name.
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
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.add(attributes["href"])
        elif tag == "link" and attributes.get("rel") != "canonical":
            self.loaded.add(attributes["href"])
        elif "src" in attributes:
            self.loaded.add(attributes["src"])


def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text("utf-8"))
    return links


def check_links(pages: dict[Path, Links], site: Path) -> None:
    """Check that local links have a target, and that no other host is needed."""
    broken_links = []
    for page, links in pages.items():
        for link in links.links | links.loaded:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                if link in links.loaded:
                    broken_links.append((page.relative_to(site).as_posix(), link))
                continue
            target = page
            if url.path:
                target = (page.parent / unquote(url.path)).resolve()
            anchor = unquote(url.fragment)
            exists = target.exists() and (
                not anchor or target not in pages or anchor in pages[target].ids
            )
            # 404.html is shown for any address, so its links are absolute.
            if not exists and page.name != "404.html":
                broken_links.append((page.relative_to(site).as_posix(), link))
    assert not broken_links


def test_copied_and_generated_pages_replace_no_page_of_docs() -> None:
    """SECURITY.md once replaced docs/security.md without a warning."""
    text = (ROOT / "tools" / "docs_site.py").read_text("utf-8")
    generated = set(re.findall(r'": "([\w/-]+\.md)"', text))
    assert {"index.md", "reporting.md"} <= generated
    assert not [name for name in generated if (ROOT / "docs" / name).exists()]


def test_navigation_names_each_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed_pages = re.findall(r"[\w/.-]+\.md", navigation)
    assert sorted(listed_pages) == sorted(set(listed_pages))
