"""The lists of topics, partitions, groups and transactions."""

from __future__ import annotations

import pytest

import logcore
from logcore.recordbatch import encode
from support.consoles import ConsoleClient


def test_empty_directory_explains_how_to_begin(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    page = console.page("/")
    assert "There are no topics here yet" in page.text
    assert "logcore topic create" in page.text


def test_topics_show_partitions_records_and_bytes(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 3, {"cleanup.policy": "compact"})
    logdir.create_topic("other", 1)
    logdir.partition("orders", 1).append_many([(b"k", b"v" * 100)] * 2_000)
    size = logdir.size_bytes("orders", 1)
    orders, other = console.page("/").rows()
    assert orders[:3] == ["orders", "3", "2,000"]
    assert orders[5] == "compact"
    assert f"{size:,} bytes" in console.page("/").source
    assert other[:4] == ["other", "1", "0", "0 bytes"]


def test_topics_show_appends_of_a_running_writer(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    for count in (1, 2, 3):
        logdir.append("orders", b"v")
        assert console.page("/").rows()[0][2] == str(count)


def test_filter_selects_topics_and_internal_topics_are_hidden(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    for name in ("orders", "Other", "payments"):
        logdir.create_topic(name, 1)
    logdir.create_topic("__consumer_offsets", 1)
    assert [row[0] for row in console.page("/?filter=O").rows()] == ["Other", "orders"]
    assert "__consumer_offsets" not in console.page("/").text
    assert "__consumer_offsets" in console.page("/?internal=1").text
    assert "No topic contains “<b>”" in console.page("/?filter=%3Cb%3E").text


@pytest.mark.long
def test_many_topics_are_divided_into_pages(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topics({f"t{number:03d}": (1, None) for number in range(510)})
    page = console.page("/")
    assert len(page.rows()) == 500
    next_page = console.page(page.link("next →"))
    assert next(row[0] for row in next_page.rows()) == "t500"
    assert len(next_page.rows()) == 10


def test_page_is_partial_at_the_time_limit(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 3)
    logdir.append("orders", b"v")
    console.view.page_s = 0.0
    assert "This page is partial" in console.page("/").text
    assert "This page is partial" in console.page("/topics/orders").text
    assert "This page is partial" in console.page("/segments").text
    assert "partitions were not read in time" in console.page("/transactions").text
    console.view.page_s = 60.0
    assert "This page is partial" not in console.page("/").text


def test_topic_shows_settings_and_groups_with_lag(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 2, {"retention.ms": 5_000})
    for number in range(2):
        logdir.partition("orders", number).append_many([(None, b"v")] * 10)
    with logdir.consumer(group_id="billing") as consumer:
        consumer.assign([("orders", 0)])
        consumer.seek(("orders", 0), 4)
        consumer.commit({("orders", 0): 4})
    page = console.page("/topics/orders")
    assert page.rows(0)[1][:4] == ["1", "0", "10", "10"]
    assert page.rows(1) == [["billing", "0", "1", "6"]]
    assert ["retention.ms", "5000", "the topic"] in page.rows(2)
    (row,) = console.page("/groups").rows()
    assert row[:6] == ["billing", "Empty", row[2], "0", "1", "6"]
    group = console.page("/group?name=billing")
    assert group.rows()[0][:5] == ["orders", "0", "4", "10", "6"]


def test_group_shows_its_members(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 2)
    with logdir.consumer(group_id="billing", client_id="<b>one</b>") as consumer:
        consumer.subscribe(["orders"])
        consumer.poll(0)
        page = console.page("/group?name=billing")
    assert "1 member" in page.text
    assert page.rows()[0][1] == "<b>one</b>"
    assert page.rows()[0][4] == "orders-0 orders-1"


def test_hostile_name_of_a_group_is_escaped(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    name = "a/../b?<script>\u202e&"
    logdir.create_topic("orders", 1)
    logdir.append("orders", b"v")
    logdir.alter_group_offsets(name, {("orders", 0): 1})
    page = console.page("/groups")
    assert "<script>\u202e" not in page.source
    assert "a/../b?<script>\\u202e&" in page.text
    (link,) = [link for link in page.links if link.startswith("/group?")]
    assert "a/../b?<script>\\u202e&" in console.page(link.replace("&amp;", "&")).text


def test_open_transaction_shows_the_blocked_records(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    logdir.partition("orders", 0).append_many([(None, b"before")] * 5)
    with logdir.producer(transactional_id="refunds") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        for _ in range(3):
            producer.send("orders", b"in")
        producer.flush()
        page = console.page("/transactions")
        assert page.rows(0)[0][0:2] == ["orders-0", "refunds"]
        assert page.rows(0)[0][3:] == ["5", "3"]
        assert page.rows(1)[0][:2] == ["refunds", "Ongoing"]
        message = console.page("/topics/orders/messages/0/6")
        assert "Transaction open" in message.text
        producer.commit_transaction()
    page = console.page("/transactions")
    assert "No partition has an open transaction" in page.text
    assert "Transaction committed" in console.page("/topics/orders/messages/0/6").text
    console.view.page_s = 1e-9
    assert "Transaction unknown" in console.page("/topics/orders/messages/0/6").text


def test_transaction_without_a_coordinator_is_marked(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    """No process can end a hanging transaction, so that readers wait forever."""
    logdir.create_topic("orders", 1)
    batch = encode(
        [(b"k", b"v", ())],
        base_offset=0,
        producer_id=77,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    logdir.partition("orders", 0).append_batch(batch)
    assert console.page("/transactions").rows(0)[0][:3] == [
        "orders-0",
        "no coordinator",
        "77",
    ]


@pytest.mark.long
@pytest.mark.parametrize("path", ["/groups", "/transactions", "/segments", "/"])
def test_each_page_of_an_empty_directory_is_shown(
    logdir: logcore.LogDir, console: ConsoleClient, path: str
) -> None:
    console.page(path)


def test_page_of_the_broker_exists_only_with_a_broker(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    assert "/broker" not in console.page("/").links
    assert console.get("/broker").status == 404
