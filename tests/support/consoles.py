"""A console in this process, and a client that reads its pages."""

from __future__ import annotations

import contextlib
import html
import http.client
import re
from collections.abc import Generator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs

DEADLINE_S = 60


class PageParser(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@attrs.frozen
class ConsolePage:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def source(self) -> str:
        return self.body.decode()

    @property
    def text(self) -> str:
        """The words of the page, separated by blanks."""
        return " ".join(" ".join(PageParser(self.source).words).split())

    @property
    def links(self) -> list[str]:
        elements = PageParser(self.source).elements
        return [one["href"] or "" for tag, one in elements if tag == "a"]

    def link(self, words: str) -> str:
        """Return the address of the link with this text."""
        found = re.search(rf'href="([^"]*)"[^>]*>{re.escape(words)}</a>', self.source)
        assert found is not None, (words, self.text)
        return html.unescape(found[1])

    def rows(self, table: int = 0) -> list[list[str]]:
        """Return the cells of the body of a table; none if there is no table."""
        found = re.findall(r"<tbody>(.*?)</tbody>", self.source, re.DOTALL)
        if not found:
            return []
        return [
            [" ".join(" ".join(PageParser(cell).words).split()) for cell in cells]
            for cells in (
                re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
                for row in re.findall(r"<tr[^>]*>(.*?)</tr>", found[table], re.DOTALL)
            )
        ]


@attrs.frozen
class ConsoleClient:
    """Requests to one console."""

    url: str
    view: Any

    def get(self, path: str, method: str = "GET", **headers: str) -> ConsolePage:
        address = self.url.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return ConsolePage(response.status, found, response.read())

    def page(self, path: str) -> ConsolePage:
        """Return a page that must be found."""
        found = self.get(path)
        assert found.status == 200, (path, found.text)
        assert "has a bug" not in found.text
        return found


@contextlib.contextmanager
def opened_console(path: Path, **options: Any) -> Generator[ConsoleClient, None, None]:
    """Serve a console of a directory, with a minute for each page."""
    from netshim.console.directory import DirectoryView
    from netshim.console.pages import console_app
    from netshim.http.host import HttpHost

    options = {"page_s": DEADLINE_S, "search_s": DEADLINE_S, **options}
    view = DirectoryView(str(path), **options)
    host = HttpHost()
    url = host.add(("127.0.0.1", 0), console_app(view))
    host.start()
    try:
        yield ConsoleClient(url, view)
    finally:
        host.stop()
