"""Control of a broker over HTTP: faults, waits, requests and records."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from netshim.faults.control import ActiveRule
from netshim.http.control import ROUTES, ControlApi
from netshim.http.host import HttpHost, application
from netshim.testing import Kafka
from support.client import DEADLINE_S

Ask = Callable[..., tuple[int, Any]]


def ask(
    url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    **headers: str,
) -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    request = urllib.request.Request(url + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture
def control(kafka: Kafka) -> Iterator[Ask]:
    with opened_control(kafka) as send:
        yield send


@contextmanager
def opened_control(kafka: Kafka) -> Iterator[Ask]:
    """Return a function that sends a request with the token."""
    opened = ControlApi(kafka.server)
    host = HttpHost()
    url = host.add(("127.0.0.1", 0), application(opened.routes()))
    host.start()

    def send(method: str, path: str, body: Any = None, **headers: str) -> Any:
        headers = {"Authorization": f"Bearer {opened.token}", **headers}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        return ask(url, method, path, body, **headers)

    yield send
    host.stop()


def test_client_retries_until_the_fault_is_removed(kafka: Kafka, control: Ask) -> None:
    rule = {"action": "answer", "api": "Produce", "error": "NOT_LEADER_OR_FOLLOWER"}
    status, added = control("POST", "/faults", {**rule, "topic": "orders", "times": 2})
    assert status == 200
    path = f"/faults/{added['fault']}"
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce("orders", b"4 apples")
    assert producer.flush(DEADLINE_S) == 0
    assert control("GET", f"{path}/wait?hits=2&timeout=30")[1]["hits"] == 2
    requests = control("GET", path)[1]["requests"]
    assert [entry["codes"] for entry in requests] == [["NOT_LEADER_OR_FOLLOWER"]] * 2
    assert len(control("GET", "/requests?api=produce")[1]) == 3
    assert control("DELETE", path)[0] == 200
    assert control("GET", path) == (404, {"error": "no fault 1", "known": []})


def test_list_of_rules_is_removed_together(kafka: Kafka, control: Ask) -> None:
    rules = [{"action": "observe", "api": name} for name in ("Produce", "Fetch")]
    number = control("POST", "/faults", rules)[1]["fault"]
    broker = kafka.server.server.broker
    assert broker.faults is not None
    assert len(broker.faults.rules) == 2
    control("DELETE", f"/faults/{number}")
    assert not broker.faults.rules


def test_invalid_rule_of_a_list_adds_none(kafka: Kafka, control: Ask) -> None:
    rules = [{"action": "observe", "api": name} for name in ("Produce", "Fetsh")]
    status, response = control("POST", "/faults", rules)
    assert status == 400
    assert "Fetch" in response["error"]
    broker = kafka.server.server.broker
    assert broker.faults is not None
    assert not broker.faults.rules


@pytest.mark.long
@pytest.mark.parametrize(
    "rule",
    [
        b"{",
        b"[1]",
        b"[" * 10_000,
        {"action": "explode", "api": "Produce"},
        {"action": "answer", "api": "Produce"},
        {"action": "delay", "api": "Produce", "delay_ms": "x"},
        {"action": "observe", "api": None},
        {"action": "observe", "api": "Produce", "probability": "x"},
        {"action": "observe", "api": "Produce", "after_bytes": 1},
    ],
)
def test_invalid_rule_is_refused(control: Ask, rule: Any) -> None:
    status, response = control("POST", "/faults", rule)
    assert status == 400
    assert response["error"]


def test_state_is_read_while_a_rule_is_added(
    control: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state was read in another thread than the one that adds rules, and failed with
    "dictionary changed size during iteration".
    """
    rule = {"action": "observe", "api": "Fetch"}
    for _ in range(2):
        control("POST", "/faults", rule)
    adding: list[Thread] = []

    def hits(_: ActiveRule) -> int:
        if not adding:
            adding.append(Thread(target=control, args=("POST", "/faults", rule)))
            adding[0].start()
            adding[0].join(0.5)
        return 7

    monkeypatch.setattr(ActiveRule, "hits", property(hits))
    status, state = control("GET", "/state")
    assert (status, state["faults"]) == (200, {"1": 7, "2": 7})
    adding[0].join(DEADLINE_S)
    assert control("GET", "/faults/3")[0] == 200


def test_state_omits_a_topic_that_is_deleted_while_it_is_read(
    kafka: Kafka, control: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka.create_topic("t")
    monkeypatch.setattr(kafka.server.logdir, "topics", lambda: ["deleted", "t"])
    status, state = control("GET", "/state")
    assert (status, state["topics"]) == (200, {"t": {"0": 0}})


def test_limits_of_bodies_and_rules(control: Ask) -> None:
    assert control("POST", "/faults", b" " * (2 << 20))[0] == 413
    status, response = control(
        "POST", "/faults", [{"action": "observe", "api": "*"}] * 1_001
    )
    assert status == 400
    assert "at most 1000" in response["error"]


def test_requests_without_token_or_of_web_pages_are_refused(control: Ask) -> None:
    assert control("GET", "/state", Authorization="Bearer x")[0] == 401
    assert control("GET", "/state", Authorization="")[0] == 401
    assert control("GET", "/state", Origin="http://127.0.0.1")[0] == 403
    assert control("GET", "/state", Host="rebound.example.com")[0] == 403


def test_records_are_appended_waited_for_and_read(kafka: Kafka, control: Ask) -> None:
    body = b'{"key": "anna", "value": "4 apples"}\n{"value": null}\n'
    status, receipts = control("POST", "/topics/orders/records", body)
    assert status == 200
    assert [receipt["offset"] for receipt in receipts] == [0, 1]
    assert control("GET", "/topics/orders/wait?count=2") == (
        200,
        {"topic": "orders", "count": 2},
    )
    kafka.append("orders", b"\xff")
    records = control("GET", "/topics/orders/records")[1]
    assert [entry.get("value") for entry in records] == ["4 apples", None, None]
    assert records[2]["value_base64"] == "/w=="
    assert control("GET", "/state")[1]["topics"]["orders"] == {"0": 3}


def test_waits_that_time_out_are_answered(control: Ask) -> None:
    assert control("GET", "/topics/orders/wait?count=1&timeout=0")[0] == 408
    assert control("GET", "/groups/billing/wait?timeout=0")[0] == 408
    assert control("GET", "/topics/orders/wait?timeout=-1")[0] == 400
    assert control("GET", "/topics/orders/wait?timeout=nan")[0] == 400


def test_wait_for_group_ends_when_it_is_stable(kafka: Kafka, control: Ask) -> None:
    kafka.create_topic("orders")
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "group.id": "billing"}
    )
    consumer.subscribe(["orders"])
    consumer.poll(0)
    status, _ = control("GET", "/groups/billing/wait?members=1&timeout=60")
    assert status == 200
    consumer.close()


@pytest.mark.long
@pytest.mark.parametrize("topic", ["..", "a%00b", "%2e%2e", "a" * 300])
def test_invalid_topic_creates_nothing(kafka: Kafka, control: Ask, topic: str) -> None:
    status, _ = control("POST", f"/topics/{topic}/records", b'{"value": "x"}')
    assert status in (400, 404)
    assert kafka.topics() == []


def test_index_lists_each_call_with_an_example(control: Ask) -> None:
    listed = control("GET", "/")[1]
    assert len(listed) == len(ROUTES)
    assert {"call": "GET /state", "example": "GET /state"} in listed


@pytest.mark.long
def test_command_prints_a_control_url_that_needs_the_token(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "netshim", "serve", str(tmp_path / "data")]
    process = subprocess.Popen(
        [*command, "--port", "0", "--control", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        name, url, _, token = process.stdout.readline().split()[1:]
        assert name == "control"
        assert ask(url, "GET", "/state")[0] == 401
        opened = ask(url, "GET", "/state", Authorization=f"Bearer {token}")
        assert opened[0] == 200
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [["--control", "0.0.0.0:0"], ["--control-token-file", "x"], ["--control", "x"]],
)
def test_command_refuses_an_open_control_api(
    tmp_path: Path, options: list[str]
) -> None:
    command = [sys.executable, "-m", "netshim", "serve", str(tmp_path / "data")]
    done = subprocess.run(
        [*command, "--port", "0", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "--control" in done.stderr


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Ask]]:
    """Return the address of `netshim serve --control`, and a function for its control API."""
    command = [sys.executable, "-m", "netshim", "serve", str(tmp_path / "data")]
    with subprocess.Popen(
        [*command, "--port", "0", "--control", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        *_, url, _, token = process.stdout.readline().split()

        def send(method: str, path: str, body: Any = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            return ask(url, method, path, data, Authorization=f"Bearer {token}")

        yield address, send
        process.terminate()
    assert process.returncode == 0


@pytest.mark.long
def test_time_nodes_and_disk_are_controlled(served: tuple[str, Ask]) -> None:
    address, send = served
    assert send("POST", "/topics/orders", {"partitions": 3})[0] == 200
    _, added = send(
        "POST",
        "/faults",
        {"action": "disk", "operation": "pwrite", "error": "ENOSPC", "times": 1},
    )
    producer = Producer({"bootstrap.servers": address})
    producer.produce("orders", b"4 apples", partition=0)
    path = f"/faults/{added['fault']}"
    assert send("GET", f"{path}/wait?timeout=30")[1]["hits"] == 1
    assert send("DELETE", path) == (200, {"fault": 1, "hits": 1})
    assert producer.flush(DEADLINE_S) == 0
    assert send("GET", "/topics/orders/wait?timeout=30")[1]["count"] == 1

    before = send("POST", "/clock/advance", {"milliseconds": 1})[1]["now_ms"]
    after = send("POST", "/clock/advance", {"days": 3})[1]["now_ms"]
    assert after - before >= 3 * 86_400_000

    nodes = send("POST", "/nodes", {"count": 3})[1]["bootstrap_servers"].split(",")
    assert len(nodes) == 3 and nodes[0] == address
    move = {"topic": "orders", "partition": 0, "node": 2}
    assert send("POST", "/leaders", move) == (200, move)
    producer.produce("orders", b"2 pears", partition=0)
    assert producer.flush(DEADLINE_S) == 0
    left = send("POST", "/nodes/2/stop")[1]["bootstrap_servers"].split(",")
    assert left == [nodes[0], nodes[2]]
    assert send("POST", "/nodes/2/start")[1]["bootstrap_servers"].split(",") == nodes
    assert send("POST", "/release", {"release": "2.8"}) == (200, {"release": "2.8"})
    assert send("POST", "/release", {"release": None}) == (200, {"release": None})


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/clock/advance", {"minutes": -1}),
        ("/clock/advance", {"minutes": "1"}),
        ("/clock/advance", {"hour": 1}),
        ("/clock/advance", {}),
        ("/clock/advance", []),
        ("/nodes", {"count": 0}),
        ("/nodes", {"count": "3"}),
        ("/nodes", {}),
        ("/nodes/7/stop", {}),
        ("/leaders", {"topic": "none", "partition": 0, "node": 1}),
        ("/leaders", {"topic": "none"}),
        ("/release", {"release": "5.0"}),
        ("/release", {"release": 5}),
        ("/topics/x", {"partitions": 0}),
        ("/topics/x", {"partitions": 1, "config": {"retention": 1}}),
        ("/topics/x", {"partitions": 1, "config": []}),
        ("/faults", {"action": "disk", "operation": "write", "error": "EIO"}),
        ("/faults", {"action": "disk", "operation": "pwrite", "error": "E"}),
        ("/faults", {"action": "disk", "operation": "pwrite"}),
        ("/faults", {"action": []}),
    ],
)
def test_invalid_calls_are_answered_with_400(
    virtual_control: Ask, path: str, body: Any
) -> None:
    status, response = virtual_control("POST", path, body)
    assert status == 400 and response["error"]


@pytest.fixture
def virtual_control(kafka_factory: Callable[..., Kafka]) -> Iterator[Ask]:
    with opened_control(kafka_factory(clock="virtual")) as send:
        yield send


def test_clock_of_the_system_cannot_advance(control: Ask) -> None:
    status, response = control("POST", "/clock/advance", {"minutes": 1})
    assert status == 503 and "virtual" in response["error"]


def test_openapi_describes_each_call(control: Ask) -> None:
    status, described = control("GET", "/openapi.json")
    assert status == 200 and described["openapi"] == "3.1.0"
    operations = [
        (method.upper(), path, entry)
        for path, methods in described["paths"].items()
        for method, entry in methods.items()
    ]
    assert len(operations) == len(ROUTES)
    for _, path, entry in operations:
        names = [parameter["name"] for parameter in entry["parameters"]]
        assert all(f"{{{name}}}" in path for name in names)
        assert path.count("{") == len(names)
        assert entry["summary"].endswith(".")
    assert len({entry["operationId"] for *_, entry in operations}) == len(ROUTES)


def test_snapshot_is_restored(kafka: Kafka, control: Ask) -> None:
    kafka.append("orders", b"1")
    number = control("POST", "/snapshots")[1]["snapshot"]
    kafka.append("orders", b"2")
    control("POST", "/faults", {"action": "observe", "api": "Fetch"})
    assert control("POST", f"/snapshots/{number}/rollback")[0] == 200
    state = control("GET", "/state")[1]
    assert state["topics"] == {"orders": {"0": 1}} and state["faults"] == {}
    assert control("POST", "/snapshots/99/rollback")[0] == 404
