"""A console in this process, and a client that reads its pages."""

from __future__ import annotations

import contextlib
import html
import http.client
import re
import ssl
from collections.abc import Generator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import attrs

DEADLINE_S = 60


class PageParser(HTMLParser):
    """Parses a page into its elements and its words."""

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
    """One response of the console."""

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
        return [entry["href"] or "" for tag, entry in elements if tag == "a"]

    def link(self, words: str) -> str:
        """Return the address of the link with this text."""
        found = re.search(rf'href="([^"]*)"[^>]*>{re.escape(words)}</a>', self.source)
        assert found is not None, (words, self.text)
        return html.unescape(found[1])

    def rows(self, table: int = 0) -> list[list[str]]:
        """Return the cells of each row in the body of a table. A page without a table
        has no rows.
        """
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


@attrs.define
class ConsoleClient:
    """Requests to one console. Cookies are kept as in a browser."""

    url: str
    view: Any
    #: PEM file of the authority of the certificate, for https.
    ca_file: Path | None = None
    cookies: dict[str, str] = attrs.Factory(dict)

    def get(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> ConsolePage:
        address = urlsplit(self.url).netloc
        if self.ca_file is None:
            connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
        else:
            context = ssl.create_default_context(cafile=str(self.ca_file))
            connection = http.client.HTTPSConnection(
                address, timeout=DEADLINE_S, context=context
            )
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{k}={v}" for k, v in self.cookies.items())
        with contextlib.closing(connection):
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            self._keep_cookie(found.get("set-cookie", ""))
            return ConsolePage(response.status, found, response.read())

    def _keep_cookie(self, text: str) -> None:
        if text:
            name, _, value = text.partition(";")[0].partition("=")
            self.cookies.pop(name, None)
            if value.strip('"'):
                self.cookies[name] = value

    def post(self, path: str, fields: dict[str, str], **headers: str) -> ConsolePage:
        """Send a form."""
        headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
        return self.get(path, "POST", urlencode(fields), **headers)

    def submit(self, page: ConsolePage, path: str, **typed: str) -> ConsolePage:
        """Send the form of a page to a path: its hidden fields, and the typed fields."""
        fields = {
            str(entry["name"]): entry.get("value") or ""
            for tag, entry in PageParser(page.source.partition("<main")[2]).elements
            if tag == "input" and entry.get("type") == "hidden"
        }
        return self.post(path, {**fields, **typed})

    def log_in(self, user: str, password: str, place: str = "/") -> ConsolePage:
        """Send the form of the login."""
        fields = {"user": user, "password": password, "next": place}
        return self.post("/login", fields)

    def page(self, path: str) -> ConsolePage:
        """Return a page that must be found."""
        found = self.get(path)
        assert found.status == 200, (path, found.text)
        assert "has a bug" not in found.text
        return found


@contextlib.contextmanager
def opened_console(
    path: Path, tls: Any = None, ca_file: Path | None = None, **options: Any
) -> Generator[ConsoleClient, None, None]:
    """Serve a console of a directory, with a time limit of a minute for each page.

    `options` are passed to DirectoryView.
    """
    from netshim.console.directory import DirectoryView
    from netshim.console.pages import console_app
    from netshim.http.host import HttpHost

    options = {"page_s": DEADLINE_S, "search_s": DEADLINE_S, **options}
    view = DirectoryView(str(path), **options)
    host = HttpHost()
    url = host.add(("127.0.0.1", 0), console_app(view), tls)
    host.start()
    try:
        yield ConsoleClient(url, view, ca_file)
    finally:
        host.stop()
