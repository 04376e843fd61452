"""The live tail: new records arrive as events."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Generator, Iterator
from typing import Any

import pytest

import logcore
from netshim.console.access import ConsoleViewer
from netshim.console.live import MAX_ROWS, LiveTail
from support.consoles import DEADLINE_S, ConsoleClient, PageParser


@contextlib.contextmanager
def follow_events(
    client: ConsoleClient, path: str
) -> Generator[Iterator[tuple[str, Any]], None, None]:
    """Open a stream of events, and return them as names and values."""
    address = client.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        assert response.readline() == b": connected\n"
        yield events(response)
        response.close()


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    while line := response.readline().decode():
        if line.startswith("event: "):
            name = line.removeprefix("event: ").strip()
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@pytest.mark.long
def test_new_records_arrive_as_escaped_rows(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 2)
    logdir.append("orders", b"old", partition=0)
    with follow_events(console, "/topics/orders/events") as stream:
        for number in range(3):
            logdir.append("orders", b"<b>%d</b>" % number, partition=1)
            name, value = next(stream)
            assert name == "rows"
            assert value["skipped"] == 0
            assert f"&lt;b&gt;{number}&lt;/b&gt;" in value["html"]
            tags = [tag for tag, _ in PageParser(value["html"]).elements]
            assert tags.count("tr") == 1
            assert "b" not in tags
            assert "old" not in value["html"]


@pytest.mark.long
def test_events_of_one_partition_can_be_selected(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 2)
    with follow_events(console, "/topics/orders/events?partition=1") as stream:
        logdir.append("orders", b"other", partition=0)
        logdir.append("orders", b"selected", partition=1)
        html = next(stream)[1]["html"]
        assert "selected" in html
        assert "other" not in html


def test_records_above_the_limit_are_counted_and_omitted(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    with console.view.open_directory(ConsoleViewer()) as directory:
        tail = LiveTail.open(directory, "orders", (0,))
    logdir.partition("orders", 0).append_many([(None, b"v")] * (MAX_ROWS + 7))
    messages, skipped = tail.poll()
    assert len(messages) == MAX_ROWS
    assert skipped == 7
    assert messages[-1].record.offset == MAX_ROWS + 6
    assert tail.poll() == ([], 0)
    tail.close()


def test_events_continue_at_the_end_of_a_truncated_partition(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    log = logdir.partition("orders", 0)
    log.append_many([(None, b"v")] * 10)
    with console.view.open_directory(ConsoleViewer()) as directory:
        tail = LiveTail.open(directory, "orders", (0,))
    log.truncate(3)
    assert tail.poll() == ([], 0)
    log.append(b"new")
    assert [message.record.value for message in tail.poll()[0]] == [b"new"]
    tail.close()


def test_deleted_topic_ends_the_events_with_the_reason(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    with follow_events(console, "/topics/orders/events") as stream:
        logdir.delete_topic("orders")
        name, value = next(stream)
        assert name == "problem"
        assert value["text"]
        assert list(stream) == []


def test_number_of_followers_is_limited(
    logdir: logcore.LogDir, console: ConsoleClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netshim.console.pages.MAX_TAILS", 1)
    logdir.create_topic("orders", 1)
    with follow_events(console, "/topics/orders/events"):
        page = console.get("/topics/orders/events")
        assert page.status == 503
        assert "are open already" in page.text
