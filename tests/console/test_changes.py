"""Changes by forms, on a directory and through a broker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

import logcore
import netshim
from logcore.coordinators.group_descriptions import GroupOffset
from netshim.console.broker import broker_data_reader
from netshim.console.broker_changes import BrokerChanges
from netshim.console.changes import DirectoryChanges
from netshim.server_thread import ServerThread
from support.consoles import DEADLINE_S, ConsoleClient, ConsolePage, opened_console

FORMS = (
    "/group/reset",
    "/transactions/abort",
    "/topics/orders/delete",
    "/topics/orders/delete-records",
)
RESET = "/group/reset?name=billing&to=earliest"


def fill(logdir: logcore.LogDir) -> None:
    """Write two partitions of 10 records, and offsets of a group."""
    logdir.create_topic("orders", 2, {"retention.ms": -1})
    for number in range(2):
        log = logdir.partition("orders", number)
        log.append_many([(b"k", b"v", (), 1_000 * index) for index in range(1, 11)])
    logdir.alter_group_offsets("billing", {("orders", 0): 4, ("orders", 1): 10})


@pytest.fixture
def client(data: Path) -> Generator[ConsoleClient, None, None]:
    """Open a console with changes of a directory that no process has open."""
    with logcore.open_dir(data, create=True) as logdir:
        fill(logdir)
    with opened_console(data, changes=DirectoryChanges(str(data))) as client:
        yield client


def offsets(data: Path) -> dict[int, GroupOffset]:
    with logcore.open_dir(data, read_only=True) as logdir:
        return {
            offset.partition: offset for offset in logdir.groups()["billing"].offsets
        }


def committed(data: Path) -> list[int]:
    return [offset.committed for _, offset in sorted(offsets(data).items())]


@pytest.mark.long
@pytest.mark.parametrize("path", FORMS)
def test_console_without_changes_has_no_pages_of_changes(
    data: Path, client: ConsoleClient, path: str
) -> None:
    with opened_console(data) as reader:
        assert reader.get(f"{path}?name=billing&to=earliest").status == 404
        assert reader.post(path, {"name": "billing"}).status == 403
        assert "Reset" not in reader.page("/group?name=billing").text
        assert "Delete" not in reader.page("/topics/orders").text


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "expected_offsets"),
    [
        ("earliest", [0, 0]),
        ("latest", [10, 10]),
        ("7", [7, 7]),
        ("999", [10, 10]),
        ("1970-01-01T00:00:03Z", [2, 2]),
    ],
)
def test_reset_of_offsets_is_previewed_first(
    data: Path, client: ConsoleClient, target: str, expected_offsets: list[int]
) -> None:
    page = client.page(f"/group/reset?name=billing&to={target}")
    rows = [
        [
            f"orders-{partition}",
            str(current_offset),
            str(new_offset),
            str(new_offset - current_offset),
            str(10 - new_offset),
        ]
        for partition, (current_offset, new_offset) in enumerate(
            zip([4, 10], expected_offsets)
        )
    ]
    assert page.rows() == rows
    assert committed(data) == [4, 10]
    result = client.submit(page, "/group/reset")
    assert result.status == 303
    assert committed(data) == expected_offsets
    page_after_change = client.page(result.headers["location"])
    assert "The offsets were set." in page_after_change.text


def test_reset_that_changes_nothing_has_no_form(client: ConsoleClient) -> None:
    page = client.page(RESET)
    client.submit(page, "/group/reset")
    page = client.page(RESET)
    assert "at this offset already" in page.text
    assert "Set the offsets" not in page.text


def test_reset_makes_the_change_that_was_shown(
    data: Path, client: ConsoleClient
) -> None:
    page = client.page("/group/reset?name=billing&to=latest")
    with logcore.open_dir(data) as logdir:
        logdir.append("orders", b"later", partition=0)
    client.submit(page, "/group/reset")
    assert committed(data) == [10, 10]


def test_deletion_of_records_needs_the_name_of_the_topic(
    data: Path, client: ConsoleClient
) -> None:
    path = "/topics/orders/delete-records"
    page = client.page(f"{path}?before=6&partition=1")
    assert page.rows() == [["orders-1", "0", "6", "6", "4"]]
    assert client.submit(page, path).status == 409
    assert client.submit(page, path, confirm="order").status == 409
    result = client.submit(page, path, confirm="orders")
    assert result.headers["location"] == "/topics/orders?done=records"
    with logcore.open_dir(data, read_only=True) as logdir:
        starts = [
            logdir.partition("orders", partition).log_start_offset
            for partition in range(2)
        ]
    assert starts == [0, 6]


def test_deletion_of_a_topic_needs_its_name(data: Path, client: ConsoleClient) -> None:
    path = "/topics/orders/delete"
    page = client.page(path)
    assert [row[:2] for row in page.rows()] == [["orders-0", "10"], ["orders-1", "10"]]
    assert client.submit(page, path, confirm="").status == 409
    result = client.submit(page, path, confirm="orders")
    assert client.get(result.headers["location"]).status == 200
    with logcore.open_dir(data, read_only=True) as logdir:
        assert "orders" not in logdir
        assert not logdir.groups()


#: A program that ends in the middle of a transaction.
ABANDON = """
import os, sys, logcore
logdir = logcore.open_dir(sys.argv[1])
producer = logdir.producer(transactional_id="refunds")
producer.init_transactions()
producer.begin_transaction()
producer.send("orders", b"refund", partition=0)
producer.flush()
os._exit(0)
"""


@pytest.mark.long
def test_abort_of_a_transaction_whose_process_has_ended(
    data: Path, client: ConsoleClient
) -> None:
    subprocess.run([sys.executable, "-c", ABANDON, str(data)], check=True)
    path = "/transactions/abort?id=refunds"
    assert client.page("/transactions").link("abort") == path
    page = client.page(path)
    assert page.rows() == [["orders-0", "10", "1"]]
    result = client.submit(page, "/transactions/abort")
    assert result.headers["location"] == "/transactions?done=abort"
    with logcore.open_dir(data, read_only=True) as logdir:
        log = logdir.partition("orders", 0)
        assert log.last_stable_offset == log.log_end_offset == 12
        records = list(log.read(10, isolation="read_committed"))
    assert records == []
    assert client.get(path).status == 404
    assert client.get("/transactions/abort?id=%3Cscript%3E").status == 404


#: A program that has a directory open for writing until its input ends.
WRITER = """
import sys, logcore
with logcore.open_dir(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_error_of_a_change_contains_the_writer_of_the_directory(
    data: Path, client: ConsoleClient
) -> None:
    page = client.page(RESET)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        refused = client.submit(page, "/group/reset")
        assert refused.status == 409
        assert "Nothing was changed" in refused.text
        assert str(writer.pid) in refused.text
        writer.stdin.close()
    assert committed(data) == [4, 10]
    assert client.submit(page, "/group/reset").status == 303


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        lambda fields: {**fields, "token": ""},
        lambda fields: {**fields, "token": "0" * 64},
        lambda fields: {**fields, "token": fields["token"].upper()},
        lambda fields: {
            name: value for name, value in fields.items() if name != "token"
        },
    ],
)
def test_form_without_its_token_changes_nothing(
    data: Path,
    client: ConsoleClient,
    change: Callable[[dict[str, str]], dict[str, str]],
) -> None:
    page = client.page(RESET)
    token = page.source.partition('name="token" value="')[2].partition('"')[0]
    fields = {"token": token, "name": "billing", "plan": "orders-0:0"}
    assert client.post("/group/reset", change(fields)).status == 403
    assert committed(data) == [4, 10]
    other = {"Origin": "http://evil.example"}
    assert client.post("/group/reset", fields, **other).status == 403
    assert committed(data) == [4, 10]


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/group/reset", {"name": "billing", "plan": ""}),
        ("/group/reset", {"name": "billing", "plan": "orders-0:-1"}),
        ("/group/reset", {"name": "billing", "plan": "../x-0:1"}),
        ("/group/reset", {"name": "billing", "plan": "orders-0:1" + "0" * 30}),
        ("/group/reset", {"name": "billing", "plan": "orders-0"}),
        ("/transactions/abort", {"id": "x", "timeout": "soon"}),
        ("/topics/orders/delete-records", {"confirm": "orders", "plan": "x"}),
        (
            "/topics/orders/delete-records",
            {"confirm": "orders", "plan": "others-0:1"},
        ),
        ("/topics/%00/delete", {"confirm": "\0"}),
    ],
)
def test_malformed_form_changes_nothing(
    data: Path, client: ConsoleClient, path: str, fields: dict[str, str]
) -> None:
    source = client.page(RESET).source
    token = source.partition('name="token" value="')[2].partition('"')[0]
    page = client.post(path, {**fields, "token": token})
    assert page.status == 400
    assert "Traceback" not in page.source
    assert committed(data) == [4, 10]


@pytest.mark.long
@pytest.mark.parametrize(
    "path",
    [
        "/group/reset?name=billing",
        "/group/reset?name=billing&to=-5",
        "/group/reset?name=billing&to=%00",
        "/group/reset?name=billing&to=soon",
        "/topics/orders/delete-records?before=",
        "/topics/orders/delete-records?before=x&partition=0",
    ],
)
def test_preview_of_an_invalid_position_is_refused(
    client: ConsoleClient, path: str
) -> None:
    assert client.get(path).status == 400


# -- through a broker ------------------------------------------------------------------


@pytest.fixture
def broker_and_console(
    tmp_path: Path,
) -> Generator[tuple[ServerThread, ConsoleClient], None, None]:
    """Start a broker, and open a console with changes that the broker makes."""
    data = tmp_path / "served"
    with logcore.open_dir(data, create=True) as logdir:
        fill(logdir)
    with netshim.serve(data, rebalance_delay_ms=0) as server:
        changes = BrokerChanges(server)
        with opened_console(
            data, changes=changes, broker=broker_data_reader(server)
        ) as client:
            yield server, client


def submit(client: ConsoleClient, path: str, query: str, **typed: str) -> ConsolePage:
    return client.submit(client.page(path + query), path, **typed)


def test_broker_resets_offsets_of_a_group_without_members(
    broker_and_console: tuple[ServerThread, ConsoleClient],
) -> None:
    from confluent_kafka import Consumer

    server, client = broker_and_console
    config = {
        "bootstrap.servers": server.bootstrap_servers,
        "group.id": "billing",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = Consumer(config)
    consumer.subscribe(["orders"])
    message = consumer.poll(DEADLINE_S)
    assert message is not None
    refused = submit(client, "/group/reset", "?name=billing&to=earliest")
    assert refused.status == 409
    assert "The group has members" in refused.text
    consumer.close()
    result = submit(client, "/group/reset", "?name=billing&to=earliest")
    assert result.status == 303
    groups = server.logdir.groups()
    assert [offset.committed for offset in groups["billing"].offsets] == [0, 0]
    consumer = Consumer(config)
    consumer.subscribe(["orders"])
    message = consumer.poll(DEADLINE_S)
    assert message is not None
    assert message.offset() == 0
    consumer.close()


def test_broker_deletes_records_and_a_topic(
    broker_and_console: tuple[ServerThread, ConsoleClient],
) -> None:
    server, client = broker_and_console
    path = "/topics/orders/delete-records"
    assert submit(client, path, "?before=3", confirm="orders").status == 303
    assert server.logdir.partition("orders", 0).log_start_offset == 3
    path = "/topics/orders/delete"
    assert submit(client, path, "", confirm="orders").status == 303
    assert "orders" not in server.logdir
    page = client.get(path)
    assert page.status == 404


def test_broker_aborts_a_transaction_and_fences_its_producer(
    broker_and_console: tuple[ServerThread, ConsoleClient],
) -> None:
    from confluent_kafka import KafkaException, Producer

    server, client = broker_and_console
    producer = Producer(
        {
            "bootstrap.servers": server.bootstrap_servers,
            "transactional.id": "refunds",
        }
    )
    producer.init_transactions(DEADLINE_S)
    producer.begin_transaction()
    producer.produce("orders", b"refund", partition=0)
    assert producer.flush(DEADLINE_S) == 0
    assert server.logdir.partition("orders", 0).last_stable_offset == 10
    page = client.page("/transactions")
    assert page.link("abort") == "/transactions/abort?id=refunds"
    assert submit(client, "/transactions/abort", "?id=refunds").status == 303
    with pytest.raises(KafkaException):
        producer.commit_transaction(DEADLINE_S)
    log = server.logdir.partition("orders", 0)
    assert log.last_stable_offset == log.log_end_offset


def test_change_through_a_stopped_broker_is_an_error(
    broker_and_console: tuple[ServerThread, ConsoleClient],
) -> None:
    server, client = broker_and_console
    page = client.page(RESET)
    server.stop()
    response = client.submit(page, "/group/reset")
    assert response.status == 503
    assert "The broker does not answer" in response.text
