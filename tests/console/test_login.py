"""Users of a console: TLS, logins, sessions, and what access control lists hide."""

from __future__ import annotations

import contextlib
import http.client
import os
import urllib.parse
from collections.abc import Generator
from pathlib import Path

import attrs
import pytest
import trustme

import logcore
from logcore.fs import OsFS
from netshim.console.access import ConsoleAccess, StoredSecurity
from netshim.console.logins import SESSION_MS
from netshim.listeners import TlsSettings
from netshim.security import scram
from netshim.security.acls import Acl, AclOperation, Pattern, Permission, ResourceType
from netshim.security.stored import SecurityStore
from support.consoles import DEADLINE_S, ConsoleClient, opened_console

PASSWORD = "correct horse"


class MovedClock(OsFS):
    """A file system whose clock the test moves."""

    moved_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.moved_ms


@attrs.define
class LoginSetup:
    """A directory with the users alice and bob."""

    data: Path
    clock: MovedClock = attrs.Factory(MovedClock)

    def store(self) -> contextlib.closing[SecurityStore]:
        return contextlib.closing(SecurityStore(self.data))

    def set_password(self, user: str, password: str) -> None:
        credentials = scram.credentials_of(password, scram.MIN_ITERATIONS, os.urandom)
        with self.store() as store:
            store.set_credentials(user, credentials)

    def allow(self, user: str, operation: AclOperation, topic: str) -> None:
        rule = Acl(
            ResourceType.TOPIC, Pattern.LITERAL, topic, f"User:{user}", "*", operation,
            Permission.ALLOW,
        )  # fmt: skip
        with self.store() as store:
            store.add_acls([rule])

    def access(self, **options: object) -> ConsoleAccess:
        security = StoredSecurity(str(self.data), self.clock)
        return ConsoleAccess(read_snapshot=security, needs_login=True, **options)  # type: ignore[arg-type]


@pytest.fixture
def users(data: Path, logdir: logcore.LogDir) -> LoginSetup:
    setup = LoginSetup(data)
    for name in ("alice", "bob"):
        setup.set_password(name, PASSWORD)
    logdir.create_topic("orders", 1)
    logdir.create_topic("salaries", 1)
    logdir.append("orders", b"apples", key=b"k")
    logdir.append("salaries", b"secret")
    logdir.alter_group_offsets("billing", {("orders", 0): 0, ("salaries", 0): 0})
    return setup


@pytest.fixture
def client(users: LoginSetup) -> Generator[ConsoleClient, None, None]:
    """Open a console that needs a login, without a session."""
    with opened_console(users.data, access=users.access(), fs=users.clock) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/topics/orders",
        "/topics/orders/messages",
        "/topics/orders/messages.ndjson",
        "/topics/orders/messages/0/0",
        "/topics/orders/messages/0/0/value",
        "/topics/orders/events",
        "/segments",
        "/groups",
        "/group?name=billing",
        "/transactions",
        "/missing",
        "/loginx",
    ],
)
def test_no_page_is_shown_without_a_login(client: ConsoleClient, path: str) -> None:
    page = client.get(path)
    assert page.status == 401
    assert page.body == b"log in first\n"
    page = client.get(path, Accept="text/html")
    assert page.status == 303
    quoted_path = urllib.parse.quote(path, safe="")
    assert page.headers["location"] == f"/login?next={quoted_path}"


def test_public_login_page_does_not_show_the_directory(
    client: ConsoleClient, users: LoginSetup
) -> None:
    page = client.page("/login?next=/groups")
    assert str(users.data) not in page.source
    assert "orders" not in page.text
    assert client.get("/static/console.css").status == 200


def test_login_leads_to_the_requested_page_until_logout(
    client: ConsoleClient,
) -> None:
    page = client.log_in("alice", PASSWORD, "/topics/orders/messages?from=0")
    assert (page.status, page.headers["location"]) == (
        303,
        "/topics/orders/messages?from=0",
    )
    cookie = page.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "max-age" not in cookie
    page = client.page("/topics/orders/messages")
    assert "apples" in page.text
    assert "alice" in page.text
    cookies_before = dict(client.cookies)
    token = page.source.partition('name="token" value="')[2].partition('"')[0]
    assert client.post("/logout", {"token": "0" * 64}).status == 403
    assert client.post("/logout", {"token": token}).status == 303
    assert client.get("/").status == 401
    client.cookies = cookies_before
    assert client.get("/").status == 401


@pytest.mark.long
@pytest.mark.parametrize(
    ("user", "password"),
    [
        ("alice", "wrong"),
        ("alice", ""),
        ("", PASSWORD),
        ("carol", PASSWORD),
        ("alice\0bob", PASSWORD),
        ("alice", PASSWORD + "\0"),
        ("User:alice", PASSWORD),
        ("\ufffd", PASSWORD),
        ("x" * 10_000, "y" * 10_000),
        ("<script>", PASSWORD),
    ],
)
def test_wrong_login_is_refused_with_one_text(
    client: ConsoleClient, user: str, password: str
) -> None:
    page = client.log_in(user, password)
    assert page.status == 403
    assert "The user or the password is wrong." in page.text
    assert "set-cookie" not in page.headers
    assert "<script>" not in page.source


def test_failed_logins_are_limited_by_user_and_address(client: ConsoleClient) -> None:
    statuses = [client.log_in("alice", "wrong").status for _ in range(7)]
    assert statuses == [403] * 5 + [429] * 2
    assert client.log_in("alice", PASSWORD).status == 429
    assert client.log_in("bob", PASSWORD).status == 303  # another user may log in
    statuses = [client.log_in(f"user{number}", "wrong").status for number in range(20)]
    assert statuses[-1] == 429


def test_login_is_allowed_again_after_a_minute(
    client: ConsoleClient, users: LoginSetup
) -> None:
    for _ in range(6):
        client.log_in("alice", "wrong")
    users.clock.moved_ms += 61_000
    assert client.log_in("alice", PASSWORD).status == 303


def test_session_ends_after_hours(client: ConsoleClient, users: LoginSetup) -> None:
    client.log_in("alice", PASSWORD)
    users.clock.moved_ms += SESSION_MS - 60_000
    assert client.get("/").status == 200
    users.clock.moved_ms += 120_000
    assert client.get("/").status == 401


def test_session_ends_when_the_password_is_changed_or_the_user_removed(
    client: ConsoleClient, users: LoginSetup
) -> None:
    client.log_in("alice", PASSWORD)
    assert client.get("/").status == 200
    users.set_password("alice", "another")
    users.clock.moved_ms += 2_000
    assert client.get("/").status == 401
    assert client.log_in("alice", PASSWORD).status == 403
    assert client.log_in("alice", "another").status == 303
    with users.store() as store:
        store.set_credentials("alice", dict.fromkeys(scram.HASHES))
    users.clock.moved_ms += 2_000
    assert client.get("/").status == 401


@pytest.mark.long
@pytest.mark.parametrize(
    "target",
    [
        "https://evil.example/",
        "//evil.example/",
        "/\\evil.example/",
        "javascript:alert(1)",
        "/a\r\nSet-Cookie: x=1",
        "/login?next=/login",
        "",
    ],
)
def test_login_never_redirects_to_another_site(
    client: ConsoleClient, target: str
) -> None:
    page = client.log_in("alice", PASSWORD, target)
    assert page.headers["location"] == "/"


def test_login_from_another_origin_is_refused(client: ConsoleClient) -> None:
    fields = {"user": "alice", "password": PASSWORD}
    page = client.post("/login", fields, Origin="http://evil.example")
    assert page.status == 403
    assert "set-cookie" not in page.headers


def test_form_of_a_wrong_type_or_above_the_limits_is_refused(
    client: ConsoleClient,
) -> None:
    plain = {"Content-Type": "text/plain"}
    assert client.post("/login", {"user": "alice"}, **plain).status == 415
    assert client.post("/login", {"user": "x" * (2 << 20)}).status == 413
    assert (
        client.post("/login", {f"f{number}": "" for number in range(200)}).status == 400
    )


def test_console_with_a_damaged_registry_returns_an_error(
    client: ConsoleClient, users: LoginSetup
) -> None:
    client.log_in("alice", PASSWORD)
    registry = users.data.with_name(users.data.name + ".registry")
    (registry / ".format").write_bytes(b"damaged")
    users.clock.moved_ms += 2_000
    assert client.get("/").status == 503


# -- access control lists --------------------------------------------------------------


@pytest.fixture
def limited_client(users: LoginSetup) -> Generator[ConsoleClient, None, None]:
    """Open a console with access control lists: alice may read orders, and admin may do
    everything.
    """
    users.allow("alice", AclOperation.READ, "orders")
    users.allow("bob", AclOperation.DESCRIBE, "orders")
    users.set_password("admin", PASSWORD)
    access = users.access(enforces_acls=True, super_users=("User:admin",))
    with opened_console(users.data, access=access, fs=users.clock) as limited_client:
        yield limited_client


def test_user_sees_only_allowed_resources(limited_client: ConsoleClient) -> None:
    limited_client.log_in("alice", PASSWORD)
    for path in ("/", "/?internal=1", "/segments", "/groups", "/transactions"):
        page = limited_client.page(path)
        assert "salaries" not in page.text
        assert "billing" not in page.text
    assert "apples" in limited_client.page("/topics/orders/messages").text
    for path in (
        "/topics/salaries",
        "/topics/salaries/messages",
        "/topics/salaries/messages/0/0",
        "/topics/salaries/messages/0/0/value",
        "/topics/salaries/messages.csv",
        "/topics/salaries/live",
        "/topics/salaries/events",
        "/topics/salaries/segments/0",
        "/segments?topic=salaries",
        "/group?name=billing",
    ):
        page = limited_client.get(path)
        assert page.status == 404, path
        assert "secret" not in page.source
    texts = [
        limited_client.get(f"/topics/{name}").text.partition("All topics")[0]
        for name in ("missing", "salaries")
    ]
    assert texts[0].replace("missing", "salaries") == texts[1]


def test_damaged_rules_of_a_topic_hide_it(
    limited_client: ConsoleClient, users: LoginSetup
) -> None:
    limited_client.log_in("alice", PASSWORD)
    assert limited_client.get("/topics/orders").status == 200
    registry = users.data.with_name(users.data.name + ".registry")
    (file,) = registry.rglob("Topic/orders.node")
    undamaged = file.read_bytes()
    file.write_bytes(undamaged.replace(b"User:alice", b"User:a\xff\xffce"))
    users.clock.moved_ms += 2_000
    assert limited_client.get("/topics/orders").status == 404
    assert limited_client.get("/").status == 200


def test_user_with_describe_only_reads_no_message(
    limited_client: ConsoleClient,
) -> None:
    limited_client.log_in("bob", PASSWORD)
    assert limited_client.page("/topics/orders").status == 200
    for path in ("messages", "messages.ndjson", "messages/0/0", "live", "events"):
        page = limited_client.get(f"/topics/orders/{path}")
        assert page.status == 403, path
        assert "apples" not in page.source


def test_super_user_sees_everything_and_a_new_rule_takes_effect_at_once(
    limited_client: ConsoleClient, users: LoginSetup
) -> None:
    limited_client.log_in("admin", PASSWORD)
    assert "secret" in limited_client.page("/topics/salaries/messages").text
    assert "salaries" in limited_client.page("/group?name=billing").text
    limited_client.cookies.clear()
    limited_client.log_in("bob", PASSWORD)
    assert limited_client.get("/topics/orders/messages").status == 403
    users.allow("bob", AclOperation.READ, "orders")
    users.clock.moved_ms += 2_000
    assert limited_client.get("/topics/orders/messages").status == 200


@pytest.mark.long
def test_live_tail_ends_with_the_session(
    limited_client: ConsoleClient, users: LoginSetup
) -> None:
    limited_client.log_in("alice", PASSWORD)
    connection = http.client.HTTPConnection(
        limited_client.url.removeprefix("http://"), timeout=DEADLINE_S
    )
    name, value = next(iter(limited_client.cookies.items()))
    with contextlib.closing(connection):
        connection.request(
            "GET", "/topics/orders/events", headers={"Cookie": f"{name}={value}"}
        )
        response = connection.getresponse()
        assert response.readline() == b": connected\n"
        users.clock.moved_ms += SESSION_MS
        assert b"Log in again" in response.read()


# -- TLS -------------------------------------------------------------------------------


def test_console_with_tls_has_a_secure_cookie(
    users: LoginSetup, tmp_path: Path
) -> None:
    authority = trustme.CA()
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    cert_file = tmp_path / "console.pem"
    cert_file.touch(mode=0o600)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        cert_file
    )
    tls = TlsSettings(cert=str(cert_file))
    with opened_console(
        users.data, tls, ca_file, access=users.access(), fs=users.clock
    ) as client:
        assert client.url.startswith("https://")
        page = client.log_in("alice", PASSWORD)
        cookie = page.headers["set-cookie"]
        assert cookie.startswith("__Host-netshim=")
        assert "; Secure" in cookie
        assert "Path=/" in cookie
        assert "Domain" not in cookie
        assert client.page("/").rows()[0][0] == "orders"
        page = client.get("/", Origin=client.url.replace("https", "http"))
        assert page.status == 403
        # A console with TLS does not accept the cookie of a console without TLS.
        client.cookies = {"netshim": client.cookies["__Host-netshim"]}
        assert client.get("/").status == 401
