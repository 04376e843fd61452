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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_in_strict_mode(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
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


def test_pages_from_elsewhere_replace_no_page_of_docs() -> None:
    """SECURITY.md once replaced docs/security.md, without a warning."""
    text = (ROOT / "tools" / "docs_site.py").read_text("utf-8")
    made = set(re.findall(r'": "([\w/-]+\.md)"', text))
    assert {"index.md", "reporting.md"} <= made
    assert not [name for name in made if (ROOT / "docs" / name).exists()]


def test_navigation_names_each_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    named = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(named) == sorted(set(named))
