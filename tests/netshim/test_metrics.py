"""Pages for operators: metrics, health and readiness of a broker."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
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

from prometheus_client.parser import text_string_to_metric_families

from logcore import InvalidConfigError
from netshim import wire
from netshim.http import metrics
from netshim.http.host import HttpHost, application, parse_address
from netshim.http.pages import operation_routes
from netshim.request_counts import Histogram, RequestCounts, first_error
from netshim.server import Server
from netshim.server_thread import ServerThread
from netshim.testing import unsynced_files
from netshim.wire import codes
from support.client import Client

confluent_kafka = pytest.importorskip("confluent_kafka")

Samples = dict[tuple[str, ...], float]


class Counted(ServerThread):
    """A broker with pages for operators."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, fs=unsynced_files(), **options)

    def _run(self) -> None:
        self.server.counts = RequestCounts()
        self.pages = HttpHost()
        app = application(operation_routes(self.server))
        self._url = self.pages.add(("127.0.0.1", 0), app)
        self.pages.start()
        super()._run()

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._url.removeprefix("http://"))
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def samples(self) -> dict[str, Samples]:
        """Return all samples by name and by their values of labels, in label order."""
        status, text = self.get("/metrics")
        assert status == 200, text
        found: dict[str, Samples] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
        return found

    def stop(self) -> None:
        super().stop()
        self.pages.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Counted]:
    with Counted(tmp_path / "data") as made:
        yield made


def test_metrics_count_requests_bytes_and_lag(broker: Counted) -> None:
    broker.logdir.create_topic("t", 2)
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap_servers})
    for _ in range(7):
        producer.produce("t", b"x" * 100, partition=1)
    assert producer.flush(60) == 0
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "billing"}
    )
    place = confluent_kafka.TopicPartition("t", 1, 3)
    consumer.commit(offsets=[place], asynchronous=False)
    found = broker.samples()
    assert found["netshim_group_lag"] == {("billing", "1", "t"): 4}
    assert found["netshim_group_members"] == {("billing", "Empty"): 0}
    assert found["netshim_groups"] == {("Empty",): 1}
    assert found["netshim_partitions"][()] == 3  # with __consumer_offsets
    assert found["netshim_requests_total"]["Produce", "NONE"] >= 1
    assert found["netshim_requests_total"]["OffsetCommit", "NONE"] == 1
    assert found["netshim_bytes_total"]["received",] > 700
    assert found["netshim_bytes_total"]["sent",] > 0
    assert found["netshim_connections"]["PLAINTEXT",] >= 2
    assert found["netshim_request_seconds_count"]["Produce",] >= 1
    assert found["netshim_sync_seconds_count"][()] >= 1
    assert found["netshim_disk_free_bytes"][()] > 0
    consumer.close()


def test_errors_are_counted_by_their_names(broker: Counted) -> None:
    with contextlib.closing(Client(broker.port)) as client:
        kind = wire.LIST_OFFSETS.Request.Topic
        partition = kind.Partition(partition_index=0, timestamp=-1)
        request = wire.LIST_OFFSETS.Request(
            topics=[kind(name="none", partitions=[partition])]
        )
        client.ask(wire.LIST_OFFSETS, 7, request)
    counted = broker.samples()["netshim_requests_total"]
    assert counted["ListOffsets", "UNKNOWN_TOPIC_OR_PARTITION"] == 1


def test_waiting_fetch_counts_as_parked(broker: Counted) -> None:
    broker.logdir.create_topic("t", 1)
    with contextlib.closing(Client(broker.port)) as client:
        kind = wire.FETCH.Request.Topic
        partition = kind.Partition(partition=0, partition_max_bytes=1_000)
        request = wire.FETCH.Request(
            max_wait_ms=1, min_bytes=1, topics=[kind(topic="t", partitions=[partition])]
        )
        client.ask(wire.FETCH, 11, request)
    found = broker.samples()
    assert found["netshim_request_parked_seconds_count"] == {("Fetch",): 1}
    assert ("Fetch",) not in found.get("netshim_request_seconds_count", {})


def test_broker_is_healthy_and_ready_until_it_stops(tmp_path: Path) -> None:
    broker = Counted(tmp_path / "data")
    assert broker.get("/health") == (200, '{"ok":true}')
    assert broker.get("/ready") == (200, '{"ok":true}')
    ServerThread.stop(broker)
    assert broker.get("/health")[0] == 200
    for path in ("/ready", "/metrics"):
        status, text = broker.get(path)
        assert status == 503 and "starts or stops" in text
    broker.pages.stop()


def test_failed_log_and_full_disk_are_reasons(
    broker: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.logdir.create_topic("t", 1)
    log = broker.logdir.partition("t", 0)
    log.writer.commit.poison(OSError("broken"))
    monkeypatch.setattr(type(broker.logdir), "space", lambda _: (1 << 30, 5 << 20))
    status, text = broker.get("/ready")
    assert status == 503
    assert json.loads(text)["reasons"] == [
        "t-0: an earlier write or sync failed",
        "5 MiB of the disk are free; expected 64",
    ]
    assert broker.samples()["netshim_failed_logs"][()] == 1


def test_held_loop_is_not_healthy(
    broker: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "silent_s", property(lambda _: 7.4))
    for path in ("/health", "/ready"):
        status, text = broker.get(path)
        assert status == 503 and "has not turned for 7 s" in text


def test_scrape_does_not_wait_for_a_held_loop(broker: Counted) -> None:
    """The page waits for the broker's thread in the HTTP thread, so others are served."""
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
    monkeypatch.setattr(metrics, "MOST_SERIES", 2)
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


def test_unknown_page_is_not_found(broker: Counted) -> None:
    assert broker.get("/no-such-page")[0] == 404


def test_broker_without_metrics_counts_nothing(tmp_path: Path) -> None:
    """Its packages are not imported, and it has no thread for pages."""
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

    session: Any = SimpleNamespace(peer="10.0.0.7", principal="User:carol")
    call: Any = SimpleNamespace(
        session=session, version=7, client_id="app", now_ms=0, api_key=2
    )
    Journal().refused(call, "ListOffsets", codes.UNKNOWN_TOPIC_OR_PARTITION, None)
    facts = json.loads(_JsonLines().format(caplog.records[-1]))
    assert facts["client_id"] == "app" and facts["principal"] == "User:carol"
    assert facts["peer"] == "10.0.0.7" and facts["api"] == "ListOffsets"
    assert facts["code"] == "UNKNOWN_TOPIC_OR_PARTITION"
