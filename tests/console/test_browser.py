"""The console in headless Chromium: every page, keyboard, light and dark, axe-core.

Skipped without the Python package playwright, without a Chromium that it has installed or
that the system has, or without npm, from which axe-core comes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import logcore
from support.consoles import ConsoleClient, opened_console

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

PAGES = (
    "/",
    "/?filter=nothing",
    "/topics/orders",
    "/topics/orders/messages",
    "/topics/orders/messages?q=value",
    "/topics/orders/messages?from=0",
    "/topics/orders/messages?from=-5",
    "/topics/orders/messages/0/3",
    "/topics/hostile/messages",
    "/topics/hostile/messages/0/0",
    "/topics/orders/live",
    "/segments",
    "/segments?scale=own&topic=orders",
    "/topics/orders/segments/0",
    "/topics/damaged/segments/0?check=1",
    "/groups",
    "/group?name=billing",
    "/transactions",
    "/missing",
)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from npm."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm: apt-get install npm")
    place = tmp_path_factory.mktemp("axe")
    command = ["npm", "pack", "--silent", "axe-core@4"]
    found = subprocess.run(
        command, check=False, cwd=place, capture_output=True, text=True
    )
    if found.returncode:
        pytest.skip(f"npm cannot fetch axe-core: {found.stderr[-200:]}")
    archive = place / found.stdout.split()[-1]
    shutil.unpack_archive(archive, place)
    return (place / "package" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Generator[Any, None, None]:
    with playwright.sync_playwright() as running:
        options: dict[str, Any] = {"args": ["--no-sandbox"]}
        if not Path(running.chromium.executable_path).exists():
            found = shutil.which("chromium") or shutil.which("google-chrome")
            if found is None:
                pytest.skip("needs Chromium: apt-get install chromium")
            options["executable_path"] = found
        opened = running.chromium.launch(**options)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Generator[Any, None, None]:
    """A directory with something on every page, and its console."""
    data = tmp_path_factory.mktemp("shop") / "data"
    with logcore.open_dir(data, create=True, durability="os") as logdir:
        logdir.create_topic("damaged", 1, {"segment.bytes": 10_000})
        logdir.partition("damaged", 0).append_many([(b"k", b"v" * 90)] * 500)
    path = min((data / "damaged-0").glob("*.log"))
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"????")
    with logcore.open_dir(data, durability="os") as logdir:
        config = {"segment.bytes": 20_000, "retention.bytes": 30_000}
        logdir.create_topic("orders", 2, config)
        logdir.create_topic("compacted", 1, {"cleanup.policy": "compact"})
        logdir.create_topic("hostile", 1)
        for number in range(2):
            rows = [
                (b"k%d" % at, b'{"value": [%d, {"a": null}]}' % at, [("h", b"1")])
                for at in range(1_000)
            ]
            logdir.partition("orders", number).append_many(rows)
        for one in (
            b"<script>document.title='x'</script>",
            b"\x00\xff",
            b"</textarea>",
        ):
            logdir.append("hostile", one, key=one, headers=[("<b>", one)])
        logdir.alter_group_offsets("billing", {("orders", 0): 10, ("orders", 1): 20})
        with logdir.producer(transactional_id="refunds") as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send("orders", b"refund")
            producer.flush()
            with opened_console(data) as client:
                yield client, logdir
            producer.abort_transaction()


@pytest.fixture(params=["light", "dark"])
def tab(
    browser: Any, shop: tuple[ConsoleClient, Any], request: pytest.FixtureRequest
) -> Generator[Any, None, None]:
    """A tab whose scripts, requests and messages are checked."""
    context = browser.new_context(
        color_scheme=request.param,
        base_url=shop[0].url,
        viewport={"width": 1280, "height": 800},
        timezone_id="Asia/Kolkata",
    )
    opened = context.new_page()
    troubles: list[str] = []
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on(
        "console",
        lambda message: (
            troubles.append(message.text)
            if message.type == "error" and "status of 4" not in message.text
            else None
        ),
    )
    opened.on(
        "request",
        lambda sent: (
            troubles.append(sent.url) if not sent.url.startswith(shop[0].url) else None
        ),
    )
    yield opened
    context.close()
    assert troubles == []


@pytest.mark.parametrize("path", PAGES)
def test_page_has_no_violations(tab: Any, axe: str, path: str) -> None:
    tab.goto(path)
    # The policy of the page forbids inline scripts. This one runs outside of it.
    tab.evaluate(f"() => {{ {axe} }}" if "module" not in axe[:50] else axe)
    found = tab.evaluate(
        "() => axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa',"
        " 'wcag22aa', 'best-practice']})"
    )
    violations = [
        (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
        for one in found["violations"]
    ]
    assert violations == [], json.dumps(violations, indent=1)


@pytest.mark.parametrize("path", PAGES)
def test_narrow_window_scrolls_tables_only(tab: Any, path: str) -> None:
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.goto(path)
    wide = tab.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 400


def test_keyboard_reaches_the_content_and_submits_a_search(tab: Any) -> None:
    tab.goto("/topics/orders/messages")
    tab.keyboard.press("Tab")
    assert tab.evaluate("() => document.activeElement.textContent") == (
        "Skip to the content"
    )
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#main")
    tab.get_by_label("Contains").focus()
    tab.keyboard.type('"value": [7,')
    tab.keyboard.press("Enter")
    tab.wait_for_url("**q=**")
    assert tab.locator("tbody tr").count() == 2
    tab.locator("tbody a").first.focus()
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/messages/*/7")
    assert tab.locator("h1").inner_text().startswith("orders")
    tab.go_back()
    assert tab.get_by_label("Contains").input_value() == '"value": [7,'


def test_segments_are_reached_by_keyboard_and_name_their_facts(tab: Any) -> None:
    tab.goto("/topics/orders/segments/0")
    segment = tab.locator("svg.map a").first
    segment.focus()
    tab.keyboard.press("Enter")
    assert "#s" in tab.url
    title = tab.locator("svg.map title").first.text_content()
    assert "offsets 0 to" in title
    assert "batches" in title


def test_times_are_in_the_zone_of_the_viewer_with_utc_on_hover(tab: Any) -> None:
    tab.goto("/topics/orders/messages/0/3")
    time = tab.locator("aside time").first
    shown, utc = time.inner_text(), time.get_attribute("title")
    assert utc.endswith(" UTC")
    minutes = [int(one[11:13]) * 60 + int(one[14:16]) for one in (shown, utc)]
    assert (minutes[0] - minutes[1]) % (24 * 60) == 330  # Kolkata


def test_live_tail_shows_new_records_and_pauses(
    tab: Any, shop: tuple[ConsoleClient, logcore.LogDir]
) -> None:
    logdir = shop[1]
    tab.goto("/topics/hostile/live")
    playwright.expect(tab.locator("#live-state")).to_contain_text("Following")
    logdir.append("hostile", b"<i>first</i>")
    rows = tab.locator("#live tbody tr")
    playwright.expect(rows).to_have_count(1, timeout=20_000)
    assert rows.first.locator("td.value").inner_text() == "<i>first</i>"
    tab.get_by_role("button", name="Pause").click()
    logdir.append("hostile", b"second")
    playwright.expect(tab.locator("#live-state")).to_contain_text("2 arrived")
    assert rows.count() == 1
    tab.get_by_role("button", name="Pause").click()
    playwright.expect(rows).to_have_count(2)
    assert rows.first.locator("td.value").inner_text() == "second"


def test_pages_work_without_scripts(
    browser: Any, shop: tuple[ConsoleClient, Any]
) -> None:
    context = browser.new_context(java_script_enabled=False, base_url=shop[0].url)
    opened = context.new_page()
    opened.goto("/topics/orders/messages")
    assert opened.locator("tbody tr").count() == 50
    opened.get_by_role("link", name="older →").click()
    assert opened.locator("tbody tr").count() == 50
    opened.goto("/topics/orders/live")
    assert "the newest messages" in opened.locator("noscript").inner_text()
    context.close()
