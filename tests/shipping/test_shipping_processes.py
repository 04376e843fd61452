"""Tests that kill processes of forwarders and mirrors at random. They use a netshim broker,
and each record must arrive once, in order.

LOGCORE_SHIPPING_KILLS=n sets the number of kills, 2 by default; `make slow` uses 25.
The same test with Apache Kafka is tests/interop/test_interop_shipping.py.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

import logcore
import netshim
from logcore.shipping import Forwarder, KafkaCluster, Mirror
from netshim.testing import Kafka
from support.shippers import (
    PARTITIONS,
    TOPIC,
    check_repeats,
    contents,
    fill,
    kill_often,
)

pytest.importorskip("confluent_kafka")

#: The records have old timestamps, and retention would delete them.
KEEPS_ALL = {"retention.ms": -1}
KILLS = int(os.environ.get("LOGCORE_SHIPPING_KILLS", "1"))
MANY = int(os.environ.get("LOGCORE_SHIPPING_KILLS", "25"))
LONG = pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(600)], id="many")


@pytest.mark.parametrize("kills", [KILLS, LONG])
@pytest.mark.parametrize(
    "kind", ["exactly-once", pytest.param("at-least-once", marks=pytest.mark.slow)]
)
def test_killed_forwarder_loses_no_record(
    tmp_path: Path, kafka: Kafka, kind: str, kills: int
) -> None:
    kafka.create_topic(TOPIC, PARTITIONS, KEEPS_ALL)
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic(TOPIC, PARTITIONS)
        logs = [data.partition(TOPIC, number) for number in range(PARTITIONS)]

        def add(turn: int) -> None:
            for log in logs:
                fill(log, 700)

        kill_often(
            kind,
            tmp_path / "data",
            kafka.bootstrap_servers,
            kills,
            seed=kills,
            before_each=add,
        )
        for number, log in enumerate(logs):
            wanted = list(log.read(0))
            found = list(
                kafka.logdir.partition(TOPIC, number).read(
                    0, isolation="read_committed"
                )
            )
            if kind == "exactly-once":
                assert contents(found) == contents(wanted)
            else:
                assert check_repeats(found, wanted) <= 40 * kills, (
                    "more than the unfinished batch was repeated"
                )


@pytest.mark.long
@pytest.mark.parametrize("kills", [KILLS, LONG])
@pytest.mark.parametrize("kind", [pytest.param("keep", marks=pytest.mark.slow), "new"])
def test_killed_mirror_copies_each_record_to_its_offset(
    tmp_path: Path, kafka: Kafka, kind: str, kills: int
) -> None:
    kafka.create_topic(TOPIC, PARTITIONS, KEEPS_ALL)
    logs = [kafka.logdir.partition(TOPIC, number) for number in range(PARTITIONS)]

    def add(turn: int) -> None:
        for log in logs:
            log.begin_epoch(turn)
            fill(log, 20_000)

    with logcore.open_dir(tmp_path / "copy", create=True):
        pass
    kill_often(
        kind,
        tmp_path / "copy",
        kafka.bootstrap_servers,
        kills,
        seed=kills,
        before_each=add,
    )
    with logcore.open_dir(tmp_path / "copy", read_only=True) as copy:
        for number, log in enumerate(logs):
            wanted = list(log.read(0))
            kept = copy.partition(TOPIC, number)
            found = list(kept.read(0, isolation="read_committed"))
            if kind == "keep":
                assert found == wanted
                assert kept.end_of_epoch(0) == log.end_of_epoch(0)
            else:
                assert contents(found) == contents(wanted)


@pytest.mark.slow  # librdkafka waits several seconds before it reconnects
@pytest.mark.parametrize("at_least_once", [False, True])
def test_shipper_waits_for_a_restarted_broker(
    tmp_path: Path, at_least_once: bool
) -> None:
    """A forwarder ships the records, and a mirror copies them back."""
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(
            logcore.open_dir(tmp_path / "data", create=True, durability="os")
        )
        copy = stack.enter_context(
            logcore.open_dir(tmp_path / "copy", create=True, durability="os")
        )
        data.create_topic(TOPIC)
        log = data.partition(TOPIC, 0)
        fill(log, 100)
        with netshim.serve(tmp_path / "cluster") as broker:
            broker.logdir.create_topic(TOPIC, 1, KEEPS_ALL)
            address = broker.bootstrap_servers
            port = broker.port
            there = stack.enter_context(KafkaCluster(address))
            from_there = stack.enter_context(KafkaCluster(address))
            forwarder = stack.enter_context(
                Forwarder(data, there, topics=[TOPIC], at_least_once=at_least_once)
            )
            forwarder.run(until_end=True)
            mirror = stack.enter_context(Mirror(copy, from_there, topics=[TOPIC]))
            mirror.run(until_end=True)
        fill(log, 100)
        while (
            forwarder.metrics().state != "waiting"
            or mirror.metrics().state != "waiting"
        ):
            forwarder.step()
            mirror.step()
        assert forwarder.metrics().lag_records == 100
        with netshim.serve(tmp_path / "cluster", port=port) as broker:
            forwarder.run(until_end=True)
            while len(list(copy.read(TOPIC))) < 200:
                mirror.step()
            found = list(copy.read(TOPIC))
            assert found == list(broker.logdir.read(TOPIC, isolation="read_committed"))
            assert contents(list(copy.partition(TOPIC, 0).read(0))) == contents(
                list(log.read(0))
            )
