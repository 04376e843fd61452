"""Requests that are invalid, foreign or hostile, and the headers of responses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import logcore
from support.consoles import ConsoleClient, PageParser

HOSTILE = (
    b"<script>alert(1)</script>",
    b"</textarea><img src=x onerror=alert(1)>",
    b'"><svg onload=alert(1)>',
    b"' onmouseover='alert(1)",
    b"{{ 7 * 7 }}{% raw %}",
    b"javascript:alert(1)",
    "\u202egnp.exe \u2066 مرحبا".encode(),
    b"\x00\x01NUL",
    b"\xff\xfe\x80 not UTF-8 \xc3",
    b"\xed\xa0\x80",
    b"]]><!--",
    b"x" * (1 << 20),
    "𝕏 ￿ \ufffe".encode(),
)


@pytest.fixture
def hostile(logdir: logcore.LogDir) -> logcore.LogDir:
    """Create a topic with hostile keys, values and headers."""
    logdir.create_topic("orders", 1, {"max.message.bytes": 8 << 20})
    for data in HOSTILE:
        name = data[:100].decode("utf-8", "surrogateescape")
        logdir.append("orders", data, key=data[:1000], headers=[(name, data[:1000])])
    return logdir


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/topics/%00/messages", 400),
        ("/topics/%2e%2e/messages", 400),
        ("/topics/..%2f..%2fetc%2fpasswd/messages", 404),
        ("/topics/../../etc/passwd", 404),
        ("/static/../console.py", 404),
        ("/static/..%2f..%2fpages.py", 404),
        ("/topics/" + "x" * 5_000, 400),
        ("/topics/%E2%80%AE/messages", 400),
        ("/topics/missing/messages", 404),
        ("/topics/orders/messages?partition=7", 404),
        ("/topics/orders/messages?partition=-1", 400),
        ("/topics/orders/messages?partition=%D9%A3", 400),
        ("/topics/orders/messages?from=1" + "0" * 30, 400),
        ("/topics/orders/messages?from=-5", 400),
        ("/topics/orders/messages?from=1900-01-01", 400),
        ("/topics/orders/messages?from=-999999999999w", 400),
        ("/topics/orders/messages?from=%00", 400),
        ("/topics/orders/messages?q=%00", 400),
        ("/topics/orders/messages?q=%E2%80%AE", 400),
        ("/topics/orders/messages?count=-1", 400),
        ("/topics/orders/messages?count=1001", 400),
        ("/topics/orders/messages?until=0:", 400),
        ("/topics/orders/messages?until=0:-1", 400),
        ("/topics/orders/messages?since=" + "0:1," * 9 + "x", 400),
        ("/topics/orders/messages?q=" + "x" * 1_001, 400),
        ("/topics/orders/messages/0/1" + "0" * 30, 400),
        ("/topics/orders/messages/0/-1", 400),
        ("/topics/orders/messages/0/999999", 404),
        ("/topics/orders/messages/9/0", 404),
        ("/topics/orders/messages/0/0/other", 400),
        ("/topics/orders/messages.xml", 400),
        ("/topics/orders/segments/x", 400),
        ("/topics/orders/events?partition=x", 400),
        ("/segments?topic=../x", 404),
        ("/group?name=", 404),
        ("/group?name=%3Cscript%3E", 404),
        ("/?start=-1", 400),
        ("/nope", 404),
        ("/topics/orders/", 404),
    ],
)
def test_invalid_request_is_an_error_page(
    hostile: logcore.LogDir, console: ConsoleClient, path: str, status: int
) -> None:
    page = console.get(path)
    assert page.status == status, page.text
    assert "Traceback" not in page.source
    assert "<script>" not in page.source


@pytest.mark.parametrize(
    "path",
    [
        "/topics/orders/messages",
        "/topics/orders/messages?q=%3Cscript%3E",
        "/topics/orders/messages?q=%22%3E%3Csvg",
        "/topics/orders/messages?q=%FF",
        "/topics/orders/messages?q=%7B%7B+7+%2A+7",
        "/?filter=%22%3E%3Cscript%3E",
        "/groups?filter=%22%3E%3Cscript%3E",
        *(f"/topics/orders/messages/0/{offset}" for offset in range(len(HOSTILE))),
    ],
)
def test_hostile_values_are_text(
    hostile: logcore.LogDir, console: ConsoleClient, path: str
) -> None:
    page = console.page(path)
    elements = PageParser(page.source).elements
    tags = {tag for tag, _ in elements}
    assert not tags & {"img", "textarea", "iframe", "object", "style"} - {"img"}
    assert sum(tag == "script" for tag, _ in elements) == 1
    assert sum(tag == "img" for tag, _ in elements) == 1  # the logo
    for _, attributes in elements:
        assert not any(name.startswith("on") for name in attributes)
        assert "style" not in attributes
        for name in ("href", "src"):
            assert re.match(r"[/#]|$", attributes.get(name) or "")
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00]", page.source)
    assert len(page.body) < 2 << 20


def test_value_is_not_rendered_as_a_template(
    hostile: logcore.LogDir, console: ConsoleClient
) -> None:
    assert "{{ 7 * 7 }}{% raw %}" in console.page("/topics/orders/messages").text
    assert "{{ 7 * 7 }}{% raw %}" in console.page("/topics/orders/messages/0/4").text


def test_value_is_served_as_a_download(
    hostile: logcore.LogDir, console: ConsoleClient
) -> None:
    page = console.get("/topics/orders/messages/0/0/value")
    assert page.body == HOSTILE[0]
    assert page.headers["content-type"] == "application/octet-stream"
    assert page.headers["content-disposition"].startswith("attachment")
    assert page.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/nope", "/static/console.js"])
def test_responses_forbid_other_hosts_and_frames(
    logdir: logcore.LogDir, console: ConsoleClient, path: str
) -> None:
    headers = console.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80"])
def test_other_host_is_refused(
    logdir: logcore.LogDir, console: ConsoleClient, host: str
) -> None:
    """DNS rebinding: an attacker points the host name of a web page at this address.
    The page must not be able to read the directory.
    """
    assert console.get("/", Host=host).status == 403


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-Forwarded-Proto", "https"), ("X-Forwarded-For", "127.0.0.1")],
)
def test_headers_of_a_proxy_are_ignored(
    logdir: logcore.LogDir, console: ConsoleClient, name: str, value: str
) -> None:
    """After DNS rebinding, a foreign page can set these headers."""
    headers = {"Host": "evil.example", name: value}
    assert console.get("/", **headers).status == 403


@pytest.mark.long
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://localhost"]
)
def test_other_origin_is_refused(
    logdir: logcore.LogDir, console: ConsoleClient, origin: str
) -> None:
    assert console.get("/", Origin=origin).status == 403
    assert console.get("/topics/x/events", Origin=origin).status == 403


def test_own_origin_and_localhost_are_accepted(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    assert console.get("/", Origin=console.url).status == 200
    port = console.url.rpartition(":")[2]
    assert console.get("/", Host=f"localhost:{port}").status == 200


@pytest.mark.long
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_than_get_are_refused(
    logdir: logcore.LogDir, console: ConsoleClient, method: str
) -> None:
    assert console.get("/", method).status == 403


def test_pages_change_no_file(
    hostile: logcore.LogDir, console: ConsoleClient, data: Path
) -> None:
    hostile.close()

    def state() -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in data.rglob("*")
            if path.is_file()
        }

    before = state()
    for path in (
        "/",
        "/topics/orders/messages",
        "/segments",
        "/groups",
        "/transactions",
    ):
        console.page(path)
    assert state() == before


def test_all_links_of_all_pages_lead_to_pages(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    for data in HOSTILE[:3]:
        logdir.append("orders", data)
    logdir.alter_group_offsets("a/b?c", {("orders", 0): 1})
    visited: set[str] = set()
    unvisited = ["/"]
    while unvisited:
        path = unvisited.pop()
        page = console.get(path)
        assert page.status == 200, path
        if not page.headers["content-type"].startswith("text/html"):
            continue
        for link in page.links:
            link = link.partition("#")[0]
            if link and link not in visited:
                visited.add(link)
                unvisited.append(link)
        assert len(visited) < 300
    assert any(link.startswith("/group?") for link in visited)
