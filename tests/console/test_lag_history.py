"""Groups: their state, and their lag over time."""

from __future__ import annotations

import re
from pathlib import Path

import logcore
import netshim
from netshim.console.broker import broker_data_reader, groups_reader
from netshim.console.drawing import lag_picture
from netshim.console.groups import sample_lags
from netshim.console.lags import MAX_SAMPLES, MAX_SERIES, LagHistory
from support.consoles import DEADLINE_S, ConsoleClient, opened_console


def test_lag_over_time_is_drawn_for_each_partition(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 2)
    logdir.alter_group_offsets("billing", {("orders", 0): 0, ("orders", 1): 0})
    assert "<polyline" not in console.page("/groups").source
    for _ in range(3):
        sample_lags(console.view)
        logdir.append("orders", b"v", partition=0)
    sample_lags(console.view)
    page = console.page("/group?name=billing")
    assert page.source.count("<polyline") == 2
    assert "Lag over 10 minutes, from 0 to 3, at most 3" in page.source
    assert "Lag over 10 minutes, from 0 to 0, at most 0" in page.source
    page = console.page("/groups")
    assert "from 0 to 3, at most 3" in page.source
    for polyline in re.findall(r'points="([^"]*)"', page.source):
        for x_and_y in polyline.split():
            x, y = map(float, x_and_y.split(","))
            assert 0 <= x <= 120
            assert 0 <= y <= 24


def test_number_of_samples_is_limited_and_ends_with_the_group() -> None:
    history = LagHistory()
    for number in range(3 * MAX_SAMPLES):
        history.add(number, {("g", "t", 0): number, ("h", "t", 0): 1})
    assert len(history.of_partition(("g", "t", 0))) == MAX_SAMPLES
    history.add(
        10_000, {("g", "t", partition): 1 for partition in range(MAX_SERIES + 50)}
    )
    assert history.of_partition(("h", "t", 0)) == []
    assert history.of_group("g", ["t"])[-1] == (10_000, MAX_SERIES)
    assert history.of_group("g", ["other"]) == []


def test_lag_picture_shows_the_last_ten_minutes() -> None:
    picture = lag_picture([(0, 9), (500_000, 4), (1_000_000, 0)], 1_000_000)
    assert (picture.first, picture.last, picture.most) == (4, 0, 4)
    assert picture.line == "20.0,2.0 120.0,22.0"
    assert lag_picture([], 0).line == ""
    assert lag_picture([(0, 1)], 0).line == ""


def test_missing_directory_or_one_without_groups_has_no_samples(
    data: Path, console: ConsoleClient
) -> None:
    sample_lags(console.view)
    with logcore.open_dir(data, create=True):
        sample_lags(console.view)


def test_members_of_a_shared_directory_are_counted(data: Path) -> None:
    with logcore.open_dir(data, create=True, shared=True) as logdir:
        logdir.create_topic("orders", 1)
        logdir.append("orders", b"v")
        consumer = logdir.consumer(group_id="billing", auto_offset_reset="earliest")
        consumer.subscribe(["orders"])
        while not consumer.poll(1_000):
            pass
        with opened_console(data) as client:
            row = client.page("/groups").rows()[0]
            assert row[:4] == ["billing", "Stable", "classic", "1"]
            assert client.page("/group?name=billing").rows()[0][0]
        consumer.close()


def test_groups_of_a_broker_show_their_current_state(tmp_path: Path) -> None:
    from confluent_kafka import Consumer, Producer

    with netshim.serve(tmp_path / "data", rebalance_delay_ms=0) as server:
        producer = Producer({"bootstrap.servers": server.bootstrap_servers})
        producer.produce("orders", b"v")
        assert producer.flush(DEADLINE_S) == 0
        consumer = Consumer(
            {
                "bootstrap.servers": server.bootstrap_servers,
                "group.id": "billing",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe(["orders"])
        message = consumer.poll(DEADLINE_S)
        consumer.commit(asynchronous=False)
        assert message is not None
        with opened_console(
            tmp_path / "data",
            broker=broker_data_reader(server),
            live_groups=groups_reader(server),
        ) as client:
            assert client.page("/groups").rows()[0][:4] == [
                "billing", "Stable", "classic", "1",
            ]  # fmt: skip
            sample_lags(client.view)
            key = ("billing", "orders", message.partition())
            assert [lag for _, lag in client.view.lags.of_partition(key)] == [0]
            consumer.close()
            assert client.page("/groups").rows()[0][1] == "Empty"
            page = client.page("/broker")
            assert "No user is stored." in page.text
