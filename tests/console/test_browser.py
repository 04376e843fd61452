"""The console in headless Chromium: every page, the keyboard, light and dark colors,
and axe-core. The tests are skipped without the Python package playwright, which `make
interop` installs, without Chromium, or without npm, which fetches axe-core.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import logcore
from netshim.console.access import ConsoleAccess, StoredSecurity
from netshim.console.changes import DirectoryChanges
from netshim.console.groups import sample_lags
from netshim.security import scram
from netshim.security.stored import SecurityStore
from support.consoles import DEADLINE_S, ConsoleClient, opened_console

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.interop

#: Pages of a topic with any number of records.
TOPIC_PAGES = (
    "/",
    "/topics/orders",
    "/topics/orders/messages",
    "/topics/orders/messages?q=value",
    "/topics/orders/messages?where=key%3Dk1",
    "/topics/orders/messages?from=0",
    "/topics/orders/live",
    "/topics/orders/segments/0",
    "/topics/orders/segments/0?check=1",
    "/segments",
    "/groups",
    "/transactions",
    "/schemas",
)
PAGES = (
    *TOPIC_PAGES,
    "/?filter=nothing",
    "/topics/orders/messages?from=-5",
    "/topics/orders/messages/0/3",
    "/topics/hostile",
    "/topics/hostile/messages",
    *(f"/topics/hostile/messages/0/{offset}" for offset in range(6)),
    "/segments?scale=own&topic=orders",
    "/topics/damaged/segments/0?check=1",
    "/topics/compacted/segments/0?estimate=1",
    "/group?name=billing",
    "/group/reset?name=billing&to=earliest",
    "/transactions/abort?id=refunds",
    "/topics/orders/delete",
    "/topics/orders/delete-records?before=latest",
    "/schema?subject=orders-value",
    "/missing",
)
HOSTILE = (
    b"<script>document.title='x'</script>",
    b"\x00\xff",
    b"</textarea>",
    "\u202egnp.exe \u2066 \u0645\u0631\u062d\u0628\u0627".encode(),
    b"x" * (1 << 20),
    b"\"onmouseover='alert(1)",
)
NAME = "<img src=x onerror=alert(1)>\u202e" + 60 * "long-"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the script of axe-core, which npm fetches."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm: apt-get install npm")
    directory = tmp_path_factory.mktemp("axe")
    command = ["npm", "pack", "--silent", "axe-core@4"]
    result = subprocess.run(
        command, check=False, cwd=directory, capture_output=True, text=True
    )
    if result.returncode:
        pytest.skip(f"npm cannot fetch axe-core: {result.stderr[-200:]}")
    archive = directory / result.stdout.split()[-1]
    shutil.unpack_archive(archive, directory)
    return (directory / "package" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser() -> Generator[Any, None, None]:
    with playwright.sync_playwright() as session:
        options: dict[str, Any] = {"args": ["--no-sandbox"]}
        if not Path(session.chromium.executable_path).exists():
            executable = shutil.which("chromium") or shutil.which("google-chrome")
            if executable is None:
                pytest.skip("needs Chromium: apt-get install chromium")
            options["executable_path"] = executable
        browser = session.chromium.launch(**options)
        yield browser
        browser.close()


def store_schemas(logdir: logcore.LogDir) -> None:
    """Store two versions of a subject, as a schema registry does."""
    logdir.create_topic("_schemas", 1, {"cleanup.policy": "compact"})
    for version in (1, 2):
        fields = [{"name": f"f{number}", "type": "string"} for number in range(version)]
        schema = json.dumps({"type": "record", "name": "Order", "fields": fields})
        subject_version = {"subject": "orders-value", "version": version}
        key = json.dumps({"keytype": "SCHEMA", **subject_version, "magic": 1})
        value = json.dumps(
            {**subject_version, "id": version, "schema": schema, "deleted": False}
        )
        logdir.append("_schemas", value.encode(), key=key.encode())


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Generator[Any, None, None]:
    """Create a directory with content for every page, and open its console."""
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
        config = {"segment.bytes": 5_000, "cleanup.policy": "compact"}
        logdir.create_topic("compacted", 1, config)
        logdir.partition("compacted", 0).append_many([(b"k", b"v" * 90)] * 500)
        logdir.create_topic("hostile", 1, {"max.message.bytes": 4 << 20})
        logdir.create_topic("n" * 249, 1)
        store_schemas(logdir)
        for number in range(2):
            rows = [
                (b"k%d" % index, b'{"value": [%d, {"a": null}]}' % index, [("h", b"1")])
                for index in range(1_000)
            ]
            logdir.partition("orders", number).append_many(rows)
        for value in HOSTILE:
            logdir.append(
                "hostile", value, key=value[:500], headers=[("<b>", value[:500])]
            )
        for name in ("billing", NAME):
            logdir.alter_group_offsets(name, {("orders", 0): 10, ("orders", 1): 20})
        with logdir.producer(transactional_id="refunds") as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send("orders", b"refund")
            producer.flush()
            changes = DirectoryChanges(str(data))
            with opened_console(data, changes=changes) as client:
                for _ in range(3):
                    sample_lags(client.view)
                yield client, logdir
            producer.abort_transaction()


@pytest.fixture(params=["light", "dark"])
def tab(
    browser: Any, shop: tuple[ConsoleClient, Any], request: pytest.FixtureRequest
) -> Generator[Any, None, None]:
    """Open a tab, and check its scripts, requests and messages at the end."""
    context = browser.new_context(
        color_scheme=request.param,
        base_url=shop[0].url,
        viewport={"width": 1280, "height": 800},
        timezone_id="Asia/Kolkata",
    )
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on(
        "console",
        lambda message: (
            troubles.append(message.text)
            if message.type == "error" and "status of 4" not in message.text
            else None
        ),
    )
    page.on(
        "request",
        lambda sent: (
            troubles.append(sent.url) if not sent.url.startswith(shop[0].url) else None
        ),
    )
    yield page
    context.close()
    assert troubles == []


@pytest.mark.parametrize("path", PAGES)
def test_page_has_no_violations(tab: Any, axe: str, path: str) -> None:
    tab.goto(path)
    violations = check(tab, axe)
    assert violations == [], json.dumps(violations, indent=1)


def check(tab: Any, axe: str) -> list[Any]:
    """Return the violations that axe-core finds in a page."""
    # The policy of the page forbids inline scripts. evaluate() runs outside of the
    # policy.
    tab.evaluate(f"() => {{ {axe} }}" if "module" not in axe[:50] else axe)
    violations = tab.evaluate(
        "() => axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa',"
        " 'wcag22aa', 'best-practice']})"
    )
    return [
        (violation["id"], [node["html"][:200] for node in violation["nodes"][:3]])
        for violation in violations["violations"]
    ]


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


def test_segments_have_titles_and_are_reached_by_keyboard(tab: Any) -> None:
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
    local_time, utc = time.inner_text(), time.get_attribute("title")
    assert utc.endswith(" UTC")
    minutes = [int(text[11:13]) * 60 + int(text[14:16]) for text in (local_time, utc)]
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
    page = context.new_page()
    page.goto("/topics/orders/messages")
    assert page.locator("tbody tr").count() == 50
    page.get_by_role("link", name="older →").click()
    assert page.locator("tbody tr").count() == 50
    page.goto("/topics/orders/live")
    assert "the newest messages" in page.locator("noscript").inner_text()
    context.close()


@pytest.fixture(scope="module", params=[0, 1, 100_000])
def sized_console(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Generator[tuple[int, ConsoleClient], None, None]:
    """Open a console of a topic that contains `request.param` records."""
    data = tmp_path_factory.mktemp("filled") / "data"
    with logcore.open_dir(data, create=True, durability="os") as logdir:
        logdir.create_topic("orders", 1, {"segment.bytes": 1 << 20})
        rows = [(b"k", b'{"value": %d}' % number) for number in range(request.param)]
        if rows:
            logdir.partition("orders", 0).append_many(rows)
            logdir.alter_group_offsets("billing", {("orders", 0): 0})
    with opened_console(data, changes=DirectoryChanges(str(data))) as client:
        yield request.param, client


@pytest.mark.parametrize("path", TOPIC_PAGES)
def test_page_with_any_number_of_records_has_no_violations(
    browser: Any, axe: str, sized_console: tuple[int, ConsoleClient], path: str
) -> None:
    count, client = sized_console
    context = browser.new_context(base_url=client.url)
    page = context.new_page()
    page.goto(path)
    violations = check(page, axe)
    if path == "/topics/orders/messages":
        assert page.locator("tbody tr").count() == min(count, 50)
    context.close()
    assert violations == [], json.dumps(violations, indent=1)


def test_back_and_forward_show_the_pages_again(tab: Any) -> None:
    tab.goto("/topics/orders/messages?from=0")
    tab.get_by_role("link", name="later →").click()
    tab.wait_for_url("**since=**")
    first = tab.locator("tbody tr").first.inner_text()
    tab.locator("tbody a").first.click()
    tab.wait_for_url("**/messages/*/*")
    tab.go_back()
    assert tab.locator("tbody tr").first.inner_text() == first
    tab.go_forward()
    assert "offset" in tab.locator("h1").inner_text()


def test_two_tabs_follow_the_same_topic(
    browser: Any, shop: tuple[ConsoleClient, logcore.LogDir]
) -> None:
    client, logdir = shop
    context = browser.new_context(base_url=client.url)
    tabs = [context.new_page() for _ in range(2)]
    for tab in tabs:
        tab.goto("/topics/compacted/live")
        playwright.expect(tab.locator("#live-state")).to_contain_text("Following")
    logdir.append("compacted", b"to both", key=b"k")
    for tab in tabs:
        rows = tab.locator("#live tbody tr")
        playwright.expect(rows).to_have_count(1, timeout=20_000)
    tabs[0].close()
    logdir.append("compacted", b"to one", key=b"k")
    rows = tabs[1].locator("#live tbody tr")
    playwright.expect(rows).to_have_count(2, timeout=20_000)
    context.close()


def test_offsets_are_reset_by_keyboard(browser: Any, tmp_path: Path, axe: str) -> None:
    data = tmp_path / "data"
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1)
        logdir.append("orders", b"v")
        logdir.alter_group_offsets("billing", {("orders", 0): 1})
    with opened_console(data, changes=DirectoryChanges(str(data))) as client:
        context = browser.new_context(base_url=client.url)
        tab = context.new_page()
        tab.goto("/group?name=billing")
        tab.get_by_label("To", exact=True).focus()
        tab.keyboard.press("Control+A")
        tab.keyboard.type("earliest")
        tab.keyboard.press("Enter")
        tab.wait_for_url("**/group/reset?**")
        cells = tab.locator("tbody tr").first.inner_text().split()
        assert cells == ["orders-0", "1", "0", "-1", "1"]
        tab.get_by_role("button", name="Set the offsets").focus()
        tab.keyboard.press("Enter")
        tab.wait_for_url("**/group?**done=reset")
        assert "The offsets were set." in tab.locator("main").inner_text()
        assert check(tab, axe) == []
        tab.reload()  # a reload does not repeat the change
        tab.go_back()
        assert "orders-0" in tab.locator("main").inner_text()
        context.close()


def test_login_by_keyboard_and_logout_in_another_tab(
    browser: Any, tmp_path: Path, axe: str
) -> None:
    data = tmp_path / "data"
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1)
    store = SecurityStore(data)
    credentials = scram.credentials_of("secret", scram.MIN_ITERATIONS, os.urandom)
    store.set_credentials("alice", credentials)
    store.close()
    access = ConsoleAccess(read_snapshot=StoredSecurity(str(data)), needs_login=True)
    with opened_console(data, access=access) as client:
        context = browser.new_context(base_url=client.url)
        tab = context.new_page()
        tab.goto("/topics/orders")
        tab.wait_for_url("**/login?**")
        assert check(tab, axe) == []
        tab.keyboard.type("alice")  # the field has the focus
        tab.keyboard.press("Tab")
        tab.keyboard.type("wrong")
        tab.keyboard.press("Enter")
        alert = tab.get_by_role("alert")
        assert "wrong" in alert.inner_text()
        assert check(tab, axe) == []
        tab.get_by_label("User").fill("alice")
        tab.get_by_label("Password").fill("secret")
        tab.keyboard.press("Enter")
        tab.wait_for_url("**/topics/orders")
        other = context.new_page()
        other.goto("/groups")
        assert check(other, axe) == []
        other.get_by_role("button", name="Log out").click()
        other.wait_for_url("**/login")
        tab.reload()
        tab.wait_for_url("**/login?**")
        assert "orders" not in tab.locator("body").inner_text()
        context.close()


def serve(data: Path, port: int) -> tuple[subprocess.Popen[str], str]:
    """Start a broker with a console on a port, and return the address of its pages."""
    command = [sys.executable, "-m", "netshim", "serve", str(data), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--console", str(port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process, process.stdout.readline().split()[-1]


def test_live_tail_continues_after_a_broker_was_killed(
    browser: Any, tmp_path: Path, axe: str
) -> None:
    data = tmp_path / "data"
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1)
    process, url = serve(data, 0)
    try:
        context = browser.new_context(base_url=url)
        tab = context.new_page()
        tab.goto("/topics/orders/live")
        state = tab.locator("#live-state")
        playwright.expect(state).to_contain_text("Following")
        other = context.new_page()
        other.goto("/broker")
        assert check(other, axe) == []
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)
        playwright.expect(state).to_contain_text("The connection is lost")
        process, _ = serve(data, int(url.rpartition(":")[2]))
        playwright.expect(state).to_contain_text("Following", timeout=60_000)
        context.close()
    finally:
        process.kill()
        process.communicate()
