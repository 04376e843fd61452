"""Pages for operators: metrics, health and readiness of a broker."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")


from logcore import InvalidConfigError
from netshim import scheduling, wire
from netshim.http import metrics
from netshim.http.host import parse_address
from netshim.request_counts import Histogram, RequestCounts
from netshim.response_errors import first_error
from netshim.server import Server
from netshim.server_thread import ServerThread
from netshim.wire import codes
from support.client import Client
from support.metrics_broker import CountedBroker, Samples

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[CountedBroker]:
    with CountedBroker(tmp_path / "data") as counted:
        yield counted


def test_metrics_count_requests_bytes_and_lag(broker: CountedBroker) -> None:
    broker.logdir.create_topic("t", 2)
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap_servers})
    for _ in range(7):
        producer.produce("t", b"x" * 100, partition=1)
    assert producer.flush(60) == 0
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "billing"}
    )
    partition = confluent_kafka.TopicPartition("t", 1, 3)
    consumer.commit(offsets=[partition], asynchronous=False)
    samples = broker.samples()
    assert samples["netshim_group_lag"] == {("billing", "1", "t"): 4}
    assert samples["netshim_group_members"] == {("billing", "Empty"): 0}
    assert samples["netshim_groups"] == {("Empty",): 1}
    assert samples["netshim_partitions"][()] == 3  # with __consumer_offsets
    assert samples["netshim_requests_total"]["Produce", "NONE"] >= 1
    assert samples["netshim_requests_total"]["OffsetCommit", "NONE"] == 1
    assert samples["netshim_bytes_total"]["received",] > 700
    assert samples["netshim_bytes_total"]["sent",] > 0
    assert samples["netshim_connections"]["PLAINTEXT",] >= 2
    assert samples["netshim_request_seconds_count"]["Produce",] >= 1
    assert samples["netshim_sync_seconds_count"][()] >= 1
    assert samples["netshim_disk_free_bytes"][()] > 0
    consumer.close()


def test_groups_may_commit_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrape failed: the dictionary had changed its size."""
    monkeypatch.setattr(scheduling, "CHUNK_ENTRIES", 1)
    committed = SimpleNamespace(offset=3)
    group = SimpleNamespace(offsets={"t": {0: committed, 1: committed}})
    groups = SimpleNamespace(is_loaded=True, all=lambda: [group])
    state: Any = SimpleNamespace(is_shared=False, groups=groups)
    steps = metrics.group_keys(state)
    chunks = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            assert end.value == [("t", 0), ("t", 1)]
            break
        chunks += 1
        group.offsets[f"new{chunks}"] = {0: committed}
        group.offsets["t"][chunks + 10] = committed
    assert chunks == 2


def test_names_of_groups_are_escaped(broker: CountedBroker) -> None:
    names = ['a"b', "c\\d", "e\nf", "\\n", 'x"} 1\n#', "\u202e\U0001f40d"]
    broker.logdir.create_topic("t", 1)
    broker.logdir.partition("t", 0).append(b"x")
    with contextlib.closing(Client(broker.port)) as client:
        for name in names:
            kind = wire.OFFSET_COMMIT.Request.Topic
            partition = kind.Partition(partition_index=0, committed_offset=0)
            request = wire.OFFSET_COMMIT.Request(
                group_id=name, topics=[kind(name="t", partitions=[partition])]
            )
            client.ask(wire.OFFSET_COMMIT, 8, request)
    lags = broker.samples()["netshim_group_lag"]
    assert lags == {(name, "0", "t"): 1 for name in names}


def test_appends_are_counted(broker: CountedBroker) -> None:
    broker.logdir.create_topic("t", 1)
    with contextlib.closing(Client(broker.port)) as client:
        for acks in (1, -1, -1):
            client.produce([b"x"], acks=acks)
    assert broker.samples()["netshim_appends_total"][()] == 3


def test_failed_logins_are_counted(tmp_path: Path) -> None:
    options: Any = {"listeners": ["SASL_PLAINTEXT://127.0.0.1:0"]}
    with CountedBroker(tmp_path / "data", **options) as broker:
        for mechanism in ("SCRAM-SHA-256", "NONE", "NO\nNE"):
            with contextlib.closing(Client(broker.port)) as client:
                handshake = wire.SASL_HANDSHAKE.Request(mechanism=mechanism)
                client.ask(wire.SASL_HANDSHAKE, 1, handshake)
                if mechanism != "NONE":
                    token = wire.SASL_AUTHENTICATE.Request(auth_bytes=b"n,,n=eve,r=x")
                    client.send(wire.SASL_AUTHENTICATE, 1, token)
        failures = broker.samples()["netshim_authentication_failures_total"]
    assert failures == {("other",): 2}


def test_errors_are_counted_by_their_names(broker: CountedBroker) -> None:
    with contextlib.closing(Client(broker.port)) as client:
        kind = wire.LIST_OFFSETS.Request.Topic
        partition = kind.Partition(partition_index=0, timestamp=-1)
        request = wire.LIST_OFFSETS.Request(
            topics=[kind(name="none", partitions=[partition])]
        )
        client.ask(wire.LIST_OFFSETS, 7, request)
    counted = broker.samples()["netshim_requests_total"]
    assert counted["ListOffsets", "UNKNOWN_TOPIC_OR_PARTITION"] == 1


def test_waiting_fetch_counts_as_parked(broker: CountedBroker) -> None:
    broker.logdir.create_topic("t", 1)
    with contextlib.closing(Client(broker.port)) as client:
        kind = wire.FETCH.Request.Topic
        partition = kind.Partition(partition=0, partition_max_bytes=1_000)
        request = wire.FETCH.Request(
            max_wait_ms=1, min_bytes=1, topics=[kind(topic="t", partitions=[partition])]
        )
        client.ask(wire.FETCH, 11, request)
    samples = broker.samples()
    assert samples["netshim_request_parked_seconds_count"] == {("Fetch",): 1}
    assert ("Fetch",) not in samples.get("netshim_request_seconds_count", {})


def test_broker_is_healthy_and_ready_until_it_stops(tmp_path: Path) -> None:
    broker = CountedBroker(tmp_path / "data")
    assert broker.get("/health") == (200, '{"ok":true}')
    assert broker.get("/ready") == (200, '{"ok":true}')
    ServerThread.stop(broker)
    assert broker.get("/health")[0] == 200
    for path in ("/ready", "/metrics"):
        status, text = broker.get(path)
        assert status == 503 and "is starting or stopping" in text
    broker.pages.stop()


def test_failed_log_and_full_disk_are_reasons(
    broker: CountedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.logdir.create_topic("t", 1)
    log = broker.logdir.partition("t", 0)
    log.host.writer.commit.poison(OSError("broken"))
    monkeypatch.setattr(type(broker.logdir), "space", lambda _: (1 << 30, 5 << 20))
    status, text = broker.get("/ready")
    assert status == 503
    assert json.loads(text)["reasons"] == [
        "t-0: an earlier write or sync failed",
        "5 MiB of the disk are free; expected 64",
    ]
    assert broker.samples()["netshim_failed_logs"][()] == 1


def test_held_loop_is_not_healthy(
    broker: CountedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "stalled_s", property(lambda _: 7.4))
    for path in ("/health", "/ready"):
        status, text = broker.get(path)
        assert status == 503 and "has not run for 7 s" in text


def test_scrape_does_not_wait_for_a_held_loop(broker: CountedBroker) -> None:
    """Other pages are served while a page waits for the broker's thread."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(60)

    threading.Thread(target=broker.call, args=(hold,)).start()
    held.wait(60)
    scrape = threading.Thread(target=broker.samples)
    scrape.start()
    assert broker.get("/health")[0] in (200, 503)
    release.set()
    scrape.join(60)
    assert not scrape.is_alive()


def test_series_with_names_of_clients_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "MAX_SERIES", 2)
    series: Samples = {}
    for name in ("a", "b", "a", "c", "d"):
        labels = metrics.bounded((name, "t"), series)  # type: ignore[arg-type]
        series[labels] = series.get(labels, 0) + 1
    assert series == {("a", "t"): 2, ("b", "t"): 1, ("other", "other"): 2}


def test_first_error_is_found_in_nested_parts() -> None:
    kind = wire.PRODUCE.Response.Topic
    good = kind.Partition(index=0)
    bad = kind.Partition(index=1, error_code=codes.NOT_LEADER_OR_FOLLOWER)
    response = wire.PRODUCE.Response(
        responses=[kind(partition_responses=[good]), kind(partition_responses=[bad])]
    )
    assert first_error(wire.PRODUCE, response) == codes.NOT_LEADER_OR_FOLLOWER
    assert first_error(wire.PRODUCE, None) == codes.NONE
    top = wire.FETCH.Response(error_code=codes.FETCH_SESSION_ID_NOT_FOUND)
    assert first_error(wire.FETCH, top) == codes.FETCH_SESSION_ID_NOT_FOUND


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram()
    for value_s in (0.0001, 0.00011, 0.2, 99.0):
        histogram.add(value_s)
    counts = RequestCounts()
    counts.seconds["Fetch"] = histogram
    buckets, sum_s = metrics._buckets(histogram)
    assert [count for _, count in buckets][:2] == [1, 2]
    assert buckets[-1] == ("+Inf", 4) and sum_s == pytest.approx(99.20021)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9644", ("127.0.0.1", 9644)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_address_of_the_pages_is_parsed(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text, "--metrics") == expected


@pytest.mark.parametrize("text", ["", "host:", "host:x", "70000", "-1"])
def test_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"--metrics.*\[HOST:\]PORT"):
        parse_address(text, "--metrics")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "netshim", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long
def test_command_serves_metrics_and_reports_health(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "netshim", "serve", str(tmp_path / "data")]
    process = subprocess.Popen(
        [*command, "--port", "0", "--metrics", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        assert "serving" in process.stdout.readline()
        name, address = process.stdout.readline().split()[1:]
        assert name == "metrics" and address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as page:
            assert "text/plain" in page.headers["Content-Type"]
            assert "netshim_partitions 0.0" in page.read().decode()
        port = address.rpartition(":")[2]
        ready = run("health", port)
        assert (ready.returncode, ready.stdout) == (0, "ready\n")
        taken = run("serve", str(tmp_path / "other"), "--port", "0", "--metrics", port)
        assert taken.returncode == 2
        assert f"--metrics cannot listen on 127.0.0.1:{port}" in taken.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()
        process.stderr.close()
    gone = run("health", port)
    assert gone.returncode == 1 and "does not answer" in gone.stderr


def test_pages_are_sent_without_the_delay_of_nagle(broker: CountedBroker) -> None:
    """With Nagle's algorithm, a second request of a connection takes 40 ms."""
    (_, sock), *_ = broker.pages._servers
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_unknown_page_is_not_found(broker: CountedBroker) -> None:
    assert broker.get("/no-such-page")[0] == 404


@pytest.mark.long
def test_broker_without_metrics_counts_nothing(tmp_path: Path) -> None:
    """The packages for metrics are not imported, and no thread serves pages."""
    program = (
        "import sys, threading, netshim\n"
        f"with netshim.serve({str(tmp_path)!r}) as server:\n"
        "    assert server.server.broker.counts is None\n"
        "    names = {thread.name for thread in threading.enumerate()}\n"
        "assert not any('http' in name for name in names), names\n"
        "for name in ('uvicorn', 'starlette', 'prometheus_client', 'netshim.http'):\n"
        "    assert name not in sys.modules, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()


def test_lines_in_json_have_the_facts_of_a_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from netshim.command import _JsonLines
    from netshim.request_log import Journal

    session: Any = SimpleNamespace(client_address="10.0.0.7", principal="User:carol")
    call: Any = SimpleNamespace(
        session=session, version=7, client_id="app", now_ms=0, api_key=2
    )
    Journal().log_refusal(call, "ListOffsets", codes.UNKNOWN_TOPIC_OR_PARTITION, None)
    facts = json.loads(_JsonLines().format(caplog.records[-1]))
    assert facts["client_id"] == "app" and facts["principal"] == "User:carol"
    assert facts["peer"] == "10.0.0.7" and facts["api"] == "ListOffsets"
    assert facts["code"] == "UNKNOWN_TOPIC_OR_PARTITION"
