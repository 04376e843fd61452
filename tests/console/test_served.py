"""The commands `netshim console` and `netshim serve --console`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner

import logcore
from netshim.command import main
from support.consoles import DEADLINE_S, ConsoleClient

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Generator[Start, None, None]:
    """Return a function that starts `netshim` with arguments."""
    processes = []

    def started(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "netshim", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def address(process: subprocess.Popen[str], lines: int) -> str:
    """Return the last word of a line that a process prints."""
    assert process.stdout is not None
    for _ in range(lines):
        line = process.stdout.readline()
    return line.split()[-1]


@pytest.mark.long
def test_console_runs_until_it_is_terminated(data: Path, start: Start) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1)
        process = start("console", data, "--port", 0)
        client = ConsoleClient(address(process, 1), None)
        assert client.page("/").rows()[0][0] == "orders"
        logdir.append("orders", b"v")  # the console acquires no lock
        assert client.page("/").rows()[0][2] == "1"
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["missing"], "there is no such directory"),
        ([".", "--host", "0.0.0.0"], "the console needs TLS and a login"),
        ([".", "--host", "example.com"], "an SSH tunnel"),
        ([".", "--host", "0.0.0.0", "--login"], "the console needs TLS and a login"),
        ([".", "--tls-cert", "missing.pem"], "PEM files that belong together"),
        ([".", "--tls-key", "missing.pem"], "--tls-key needs --tls-cert"),
        ([".", "--acls", "--super-user", "alice"], "User:name"),
        ([".", "--port", "70000"], "0<=x<=65535"),
        ([".", "--config", "retention"], "NAME=VALUE"),
    ],
)
def test_console_refuses_to_start(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(main, ["console", *arguments])
    assert result.exit_code == 2
    assert reason in " ".join(result.output.split())


@pytest.mark.long
def test_broker_shows_its_clients_and_requests(data: Path, start: Start) -> None:
    from confluent_kafka import Producer

    process = start("serve", data, "--port", 0, "--console", 0)
    bootstrap = address(process, 1)
    client = ConsoleClient(address(process, 1), None)
    assert "No client is connected" in client.page("/broker").text
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce("orders", b"hello")
    assert producer.flush(DEADLINE_S) == 0
    page = client.page("/broker")
    assert page.rows(0)[0][0].startswith("confluent-kafka-python")
    assert page.rows(0)[0][1:3] == ["127.0.0.1", "User:ANONYMOUS"]
    assert "Produce" in [row[0] for row in page.rows(1)]
    assert client.page("/topics/orders/messages").rows()[0][4] == "hello"
    message = client.page("/topics/orders/messages/0/0")
    assert f"kcat -C -b {bootstrap} -t orders -p 0 -o 0 -c 1" in message.text
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(client.url)


@pytest.mark.long
def test_broker_refuses_a_console_for_other_machines(data: Path, start: Start) -> None:
    process = start("serve", data, "--port", 0, "--console", "0.0.0.0:0")
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "the console needs TLS and a login" in errors


@pytest.mark.long
def test_console_requires_a_login_and_explains_how_to_create_a_user(
    data: Path, start: Start, tmp_path: Path
) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1)
    process = start("console", data, "--port", 0, "--login")
    client = ConsoleClient(address(process, 1), None)
    assert process.stderr is not None
    assert "netshim user add" in process.stderr.readline()
    assert client.get("/").status == 401
    add_user(data, tmp_path)
    assert client.log_in("alice", "secret").status == 303
    assert client.page("/").rows()[0][0] == "orders"


def add_user(data: Path, tmp_path: Path) -> None:
    """Create the user alice with the password `secret`."""
    password = tmp_path / "password"
    password.write_text("secret\n")
    arguments = ["user", "add", str(data), "alice", "--password-file", str(password)]
    assert CliRunner().invoke(main, arguments).exit_code == 0


@pytest.mark.long
def test_broker_with_rules_shows_allowed_resources(
    data: Path, start: Start, tmp_path: Path
) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1)
        logdir.create_topic("salaries", 1)
    add_user(data, tmp_path)
    rule = ["acl", "add", str(data), "User:alice", "--consumer", "--topic", "orders"]
    assert CliRunner().invoke(main, rule).exit_code == 0
    process = start("serve", data, "--port", 0, "--acls", "--console", 0)
    client = ConsoleClient(address(process, 2), None)
    assert client.get("/").status == 401
    assert client.log_in("alice", "wrong").status == 403
    assert client.log_in("alice", "secret").status == 303
    page = client.page("/")
    assert [row[0] for row in page.rows()] == ["orders"]
    assert "Broker" not in page.text
    assert client.get("/broker").status == 403


@pytest.mark.long
def test_console_with_a_certificate_serves_https(
    data: Path, start: Start, tmp_path: Path
) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1)
    add_user(data, tmp_path)
    authority = trustme.CA()
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    certificate = tmp_path / "console.pem"
    certificate.touch(mode=0o600)
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(certificate)
    process = start(
        *("console", data, "--port", 0, "--login"), *("--tls-cert", certificate)
    )
    client = ConsoleClient(address(process, 1), None, ca_file)
    assert client.url.startswith("https://127.0.0.1:")
    assert client.get("/").status == 401
    assert client.log_in("alice", "secret").status == 303
    assert client.page("/").rows()[0][0] == "orders"


@pytest.mark.long
def test_change_through_a_broker_needs_the_permission_of_its_user(
    data: Path, start: Start, tmp_path: Path
) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1)
        logdir.append("orders", b"v")
        logdir.alter_group_offsets("billing", {("orders", 0): 1})
    add_user(data, tmp_path)

    def allow(*options: str) -> None:
        rule = ["acl", "add", str(data), "User:alice", *options]
        assert CliRunner().invoke(main, rule).exit_code == 0

    allow("--topic", "orders", "--operation", "describe")
    allow("--group", "billing", "--operation", "describe")
    process = start(
        *("serve", data, "--port", 0, "--acls", "--console", 0, "--console-write")
    )
    client = ConsoleClient(address(process, 2), None)
    assert client.log_in("alice", "secret").status == 303
    reset = "/group/reset?name=billing&to=earliest"
    page = client.page(reset)
    refused = client.submit(page, "/group/reset")
    assert refused.status == 403
    assert "GROUP_AUTHORIZATION_FAILED" in refused.text
    page = client.page("/topics/orders/delete")
    refused = client.submit(page, "/topics/orders/delete", confirm="orders")
    assert refused.status == 403
    allow("--topic", "orders", "--operation", "read")
    allow("--group", "billing", "--operation", "read")
    until = time.monotonic() + DEADLINE_S
    result = client.submit(client.page(reset), "/group/reset")
    while result.status == 403 and time.monotonic() < until:
        result = client.submit(client.page(reset), "/group/reset")
    assert result.status == 303
    assert client.page("/group?name=billing").rows()[0][2] == "0"
