"""What do the tools of a test broker cost?

Method:
- rollback: a broker with 100 topics of 10 records each. A test appends to five topics.
  `rollback` restores the snapshot of the broker, `new` deletes the five topics and
  creates them with their records, and `broker` stops the broker, and starts one over a
  new directory with the 100 topics and their records. Syncs return at once, as in the
  fixtures.
- fault rules: a client sends the same Produce request with one record, acks=1, and reads
  the response, over a connection. The plan has 100 rules for other topics.
- metrics: a page with 1,000 group partitions, requested over HTTP.

Not shown: suites whose tests use few topics. A broker starts in 3 ms, so such tests need
no rollback.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import common
import confluent_kafka
from common import Result, Settings

from logcore import recordbatch
from netshim import wire
from netshim.faults.plan import RequestFaultPlan
from netshim.faults.rules import Answer, FaultRule
from netshim.testing import Kafka, start

_TOPICS: Final = 100
_CHANGED: Final = 5
_RECORDS: Final = 10
_REQUESTS: Final = 200


def run(settings: Settings) -> Iterator[Result]:
    with common.scratch(settings, "fixtures") as path:
        yield from rollback(settings, path)
    with common.scratch(settings, "fixtures") as path:
        yield rules(settings, path)
    with common.scratch(settings, "fixtures") as path:
        yield scrape(settings, path)


def fill(kafka: Kafka, numbers: range) -> None:
    for number in numbers:
        kafka.create_topic(f"t{number}")
        for _ in range(_RECORDS):
            kafka.append(f"t{number}", b"x" * 100)


def rollback(settings: Settings, path: Path) -> Iterator[Result]:
    kafka = start(path / "kept")
    fill(kafka, range(_TOPICS))
    before = kafka.snapshot()
    numbers = iter(range(10**9))

    def test(broker: Kafka) -> None:
        for number in range(_CHANGED):
            broker.append(f"t{number}", b"y" * 100)

    def restore() -> None:
        test(kafka)
        kafka.rollback(before)

    def create_again() -> None:
        test(kafka)
        for number in range(_CHANGED):
            kafka.logdir.delete_topic(f"t{number}")
        fill(kafka, range(_CHANGED))

    def start_again() -> None:
        broker = start(path / str(next(numbers)))
        fill(broker, range(_TOPICS))
        test(broker)
        broker.stop()

    sides = {"rollback": restore, "new": create_again, "broker": start_again}
    took = common.measure(sides, settings.repeats, median=True)
    kafka.stop()
    yield common.in_time(
        f"a test that appends to {_CHANGED} of {_TOPICS} topics, with its rollback",
        "ms",
        took["rollback"] * 1e3,
        15,
        "the appends and Kafka.rollback(). Median.",
    )
    peers = {"new": "delete and create again", "broker": "a broker for each test"}
    for name, text in peers.items():
        yield Result(
            question=f"the same beside: {text}",
            unit="ms",
            ours=took["rollback"] * 1e3,
            peer_name=text,
            peer=took[name] * 1e3,
            ratio=took[name] / took["rollback"],
            turns=took.ratios(name, "rollback"),
            target=5,
            method="the same appends. Median.",
        )


def rules(settings: Settings, path: Path) -> Result:
    kafka = start(path / "data")
    kafka.create_topic("t")
    broker = kafka.server.server.broker
    plan = RequestFaultPlan()
    for number in range(100):
        answer = Answer(wire.codes.NOT_LEADER_OR_FOLLOWER)
        plan.add(FaultRule("Produce", answer, topic=f"other-{number}"))
    frame = _produce_frame()
    with socket.create_connection(("127.0.0.1", kafka.port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def produce(faults: RequestFaultPlan | None) -> None:
            broker.faults = faults
            for _ in range(_REQUESTS):
                client.sendall(frame)
                client.recv(4_096)

        sides = {"off": lambda: produce(None), "plan": lambda: produce(plan)}
        took = common.measure(sides, settings.repeats)
    broker.faults = None
    kafka.stop()
    return Result(
        question="Produce with a fault plan of 100 rules that do not match",
        unit="us",
        ours=took["plan"] / _REQUESTS * 1e6,
        peer_name="without a plan",
        peer=took["off"] / _REQUESTS * 1e6,
        ratio=took["plan"] / took["off"],
        turns=took.ratios("plan", "off"),
        target=1.03,
        bound="at most",
        method="one record of 100 bytes, acks=1, policy os, one connection.",
    )


def _produce_frame() -> bytes:
    batch = recordbatch.encode([(None, b"x" * 100)], now_ms=1)
    request = wire.PRODUCE.Request
    partition = request.Topic.Partition(index=0, records=batch)
    body = request(
        acks=1,
        timeout_ms=1_000,
        topic_data=[request.Topic(name="t", partition_data=[partition])],
    )
    return wire.encode_request(wire.PRODUCE, 9, 1, "bench", body)


def scrape(settings: Settings, path: Path) -> Result:
    from netshim.http.host import HttpHost, application
    from netshim.http.pages import operation_routes
    from netshim.request_counts import RequestCounts

    kafka = start(path / "data")
    server = kafka.server.server
    server.counts = RequestCounts()
    for number in range(10):
        kafka.create_topic(f"t{number}", 10)
    _commit(kafka.port)
    pages = HttpHost()
    url = pages.add(("127.0.0.1", 0), application(operation_routes(server)))
    pages.start()
    connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def get() -> bytes:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()

    assert get().count(b"netshim_group_lag{") == 1_000
    took = common.measure({"scrape": get}, settings.repeats, median=True)
    connection.close()
    kafka.stop()
    pages.stop()
    return common.in_time(
        "a page of metrics with 1,000 group partitions",
        "ms",
        took["scrape"] * 1e3,
        10,
        "GET /metrics on an open connection. Median.",
    )


def _commit(port: int) -> None:
    """Commit offsets of 100 partitions in each of ten groups."""
    for number in range(10):
        group = confluent_kafka.Consumer(
            {"bootstrap.servers": f"127.0.0.1:{port}", "group.id": f"g{number}"}
        )
        places = [
            confluent_kafka.TopicPartition(f"t{topic}", index, 0)
            for topic in range(10)
            for index in range(10)
        ]
        group.commit(offsets=places, asynchronous=False)
        group.close()
