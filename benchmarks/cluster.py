"""How do three brokers of netshim and three of Apache Kafka compare, for the same client?

Method: both clusters run on this machine, three replicas, min.insync.replicas of 2,
confluent-kafka with acks=all, in turns. Kafka needs Java and Maven. Kafka has served
thousands of records before the first turn, because the JVM compiles its paths late.
- One record of 100 bytes at a time, from produce() to the delivery report.
- Records of 1,000 and of 100 bytes as fast as the client sends them.
- One record at a time with "group", beside two bare fdatasync calls and a round trip.
- kill -9 of the leader under load, until the next acknowledgement.
- Processor time of three idle brokers with 1,000 partitions of three replicas, beside
  three brokers outside a cluster with as many partitions.
- Processor time of an idle fetch of 1,000 partitions in a session, beside a full one.
- kill -9 of the leader of 1,000 partitions until all have another leader, beside one
  partition.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import common
from brokers import Served, cpu_seconds_of, netshim, produce
from common import Result, Settings

from logcore.errors import RemoteUnavailableError
from netshim import wire

sys.path.insert(0, str(common.ROOT / "tests"))

_TURNS: Final = 3
_JVM: Final = ("-Xmx1g", "-XX:+UseG1GC")
_PARTITIONS: Final = 1_000
#: Settings of a user who has changed none.
_DEFAULTS: Final[dict[str, Any]] = {
    "broker_session_timeout_ms": 6_000,
    "replica_lag_time_max_ms": 30_000,
    "replica_fetch_wait_max_ms": 500,
}


@attrs.frozen(kw_only=True)
class ServedCluster(Served):
    """Three brokers; `pids` are their processes."""

    cluster: Any
    pids: tuple[int, ...]

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds_of, self.pids))


def run(settings: Settings) -> Iterator[Result]:
    if common.peer("confluent_kafka", "confluent-kafka") is None:
        return
    count = 1_000 if settings.quick else 3_000
    size = (16 if settings.quick else 128) << 20
    with common.scratch(settings, "cluster") as path:
        if shutil.which("java") is not None:
            with (
                _ours(path / "ours", "os") as ours,
                _theirs(path / "theirs") as theirs,
            ):
                yield from _one_at_a_time(ours, theirs, count)
                for value_bytes in (1_000, 100):
                    part = size if value_bytes == 1_000 else size // 8
                    yield _throughput(ours, theirs, value_bytes, part)
                yield _failover(ours, theirs)
        with _ours(path / "group", "group") as grouped:
            yield _synced(grouped, path, count)
        yield _idle(path, 10 if settings.quick else 60)
        with _ours(path / "many", "os") as many:
            yield from _idle_fetches(many, 50 if settings.quick else 300)
            yield _failover_of_many(many)


@contextlib.contextmanager
def _ours(path: Path, durability: str, **options: Any) -> Iterator[ServedCluster]:
    from support.clusters import Cluster

    with Cluster(path, durability=durability, **options) as cluster:
        yield _served("netshim", cluster)


@contextlib.contextmanager
def _theirs(path: Path) -> Iterator[ServedCluster]:
    from support.kafka_clusters import KafkaCluster

    with KafkaCluster(path, java_options=_JVM) as cluster:
        served = _served("Apache Kafka", cluster)
        _latencies(served, "warm", 10_000)
        yield served


def _served(name: str, cluster: Any) -> ServedCluster:
    pids = tuple(process.pid for process in cluster.processes.values())
    return ServedCluster(
        name=name,
        address=cluster.bootstrap_servers,
        pid=pids[0],
        cluster=cluster,
        pids=pids,
    )


def _row(
    question: str,
    unit: str,
    scale: float,
    figures: dict[str, list[float]],
    target: float,
    method: str = "",
) -> Result:
    """Compare the medians of the turns of two sides; less is better."""
    (_, ours), (peer_name, peer) = figures.items()
    mine, other = statistics.median(ours), statistics.median(peer)
    return Result(
        question=question,
        unit=unit,
        ours=mine * scale,
        peer_name=peer_name,
        peer=other * scale,
        ratio=mine / other,
        turns=common.ratios(ours, peer),
        target=target,
        bound="at most",
        method=f"{method}The median of {len(ours)} turns; less is better.",
    )


# -- beside Apache Kafka ---------------------------------------------------------------


def _latencies(served: ServedCluster, topic: str, count: int) -> list[float]:
    """Send one record at a time, and return the seconds to each delivery report."""
    import confluent_kafka

    served.cluster.create(topic)
    served.cluster.until_in_sync(topic, 3)
    producer = confluent_kafka.Producer(
        {**served.client_config, "acks": "all", "linger.ms": 0}
    )
    errors: list[Any] = []
    seconds: list[float] = []
    value = b"x" * common.VALUE_SIZE
    for number in range(count + 200):
        began = time.perf_counter()
        producer.produce(
            topic, value, on_delivery=lambda error, _: errors.append(error)
        )
        while len(errors) <= number:
            producer.poll(1)
        seconds.append(time.perf_counter() - began)
    assert not any(errors), errors[:3]
    return seconds[200:]  # the first ones wait for the connection


def _one_at_a_time(
    ours: ServedCluster, theirs: ServedCluster, count: int
) -> Iterator[Result]:
    p50: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    p99: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    cpu: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    for turn in range(_TURNS):
        for cluster in (ours, theirs):
            before = cluster.cpu_seconds()
            cuts = statistics.quantiles(
                _latencies(cluster, f"one-{turn}", count), n=100
            )
            cpu[cluster.name].append((cluster.cpu_seconds() - before) / count)
            p50[cluster.name].append(cuts[49])
            p99[cluster.name].append(cuts[98])
    yield _row("three replicas, one record at a time, os, p50", "us", 1e6, p50, 1.0)
    yield _row("three replicas, one record at a time, os, p99", "us", 1e6, p99, 1.0)
    yield _row("the same, CPU of the three brokers for each", "us", 1e6, cpu, 1.0)


def _throughput(
    ours: ServedCluster, theirs: ServedCluster, value_bytes: int, size_bytes: int
) -> Result:
    count = size_bytes // value_bytes
    seconds: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    for turn in range(_TURNS):
        for cluster in (ours, theirs):
            topic = f"fast-{value_bytes}-{turn}"
            cluster.cluster.create(topic)
            cluster.cluster.until_in_sync(topic, 3)
            seconds[cluster.name].append(
                produce(cluster, topic, b"x" * value_bytes, count)[0]
            )
    mine, other = min(seconds[ours.name]), min(seconds[theirs.name])
    return Result(
        question=f"three replicas, produce, {value_bytes:,} bytes a record",
        unit="records/s",
        ours=count / mine,
        peer_name=theirs.name,
        peer=count / other,
        ratio=other / mine,
        turns=common.ratios(seconds[theirs.name], seconds[ours.name]),
        target=0.7,
        method="acks=all, policy os; the best of turns.",
    )


def _failover(ours: ServedCluster, theirs: ServedCluster) -> Result:
    """Kill the leader under load, and measure the time to the next acknowledgement."""
    from support.cluster_load import Load
    from support.clusters import until

    seconds: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    for entry in (ours, theirs):
        cluster = entry.cluster
        cluster.create("killed")
        for _ in range(_TURNS):
            leader = cluster.until_in_sync("killed", 3).leader_id
            load = Load(cluster, "killed")
            load.until_more()
            cluster.kill(leader)
            began = time.perf_counter()
            time.sleep(
                0.02
            )  # the client handles reports of the killed leader that have arrived
            before = len(load.acknowledged)
            until(
                lambda load=load, before=before: len(load.acknowledged) > before,
                "an acknowledgement of the next leader",
            )
            seconds[entry.name].append(time.perf_counter() - began)
            load.end()
            cluster.start(leader)
    median_s = {name: statistics.median(each) for name, each in seconds.items()}
    return Result(
        question="kill -9 of the leader, time to the next acknowledgement",
        unit="s",
        ours=median_s[ours.name],
        peer_name=f"s limit; Apache Kafka {median_s[theirs.name]:.1f} s",
        peer=1.5,
        ratio=median_s[ours.name] / 1.5,
        target=1.0,
        bound="at most",
        method=f"The median of {_TURNS} kills. Session timeout of 3 s on both sides.",
    )


# -- compared with a limit -------------------------------------------------------------


def _median(action: Callable[[], object], count: int) -> float:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _synced(grouped: ServedCluster, path: Path, count: int) -> Result:
    from netshim.follow.connection import SourceConnection

    cluster = grouped.cluster
    figures: dict[str, list[float]] = {
        "netshim": [],
        "2 fdatasync and a round trip": [],
    }
    bare, limit = figures.values()
    with (path / "bare").open("wb", buffering=0) as file:

        def sync() -> None:
            file.write(b"x" * 200)
            os.fdatasync(file.fileno())

        connection = SourceConnection("127.0.0.1", cluster.ports[1], cluster.client)
        request = wire.API_VERSIONS.Request()
        for turn in range(_TURNS):
            seconds = _latencies(grouped, f"synced-{turn}", count // 3)
            bare.append(statistics.median(seconds))
            trip = _median(lambda: connection.request(wire.API_VERSIONS, request), 200)
            limit.append(2 * _median(sync, 200) + trip)
        connection.close()
    return _row(
        "three replicas, one record at a time, group, p50", "us", 1e6, figures, 1
    )


def _idle(path: Path, seconds: float) -> Result:
    """Compare idle brokers in a cluster with brokers outside one."""
    from confluent_kafka.admin import AdminClient, NewTopic

    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(_ours(path / "idle", "os", **_DEFAULTS))
        _create_many(ours.cluster)
        singles = [
            stack.enter_context(netshim(path / f"single-{number}", "os"))
            for number in range(3)
        ]
        for server in singles:
            client = AdminClient(server.client_config)
            topic = NewTopic("many", _PARTITIONS, 1)
            client.create_topics([topic], operation_timeout=60)["many"].result(60)
            del client
        pids = tuple(single.pid for single in singles)
        alone = attrs.evolve(ours, name="three brokers outside a cluster", pids=pids)
        time.sleep(10)  # until followers and checkpoints are idle
        figures: dict[str, list[float]] = {}
        for _ in range(_TURNS):
            before = {cluster.name: cluster.cpu_seconds() for cluster in (ours, alone)}
            time.sleep(seconds / _TURNS)
            for cluster in (ours, alone):
                spent = cluster.cpu_seconds() - before[cluster.name]
                figures.setdefault(cluster.name, []).append(spent / seconds * _TURNS)
    mine, other = (statistics.median(each) * 100 for each in figures.values())
    return Result(
        question="three idle brokers with 1,000 partitions, CPU above the peer's",
        unit="% of a core",
        ours=mine,
        peer_name=alone.name,
        peer=other,
        ratio=mine - other,
        ratio_unit=" %",
        target=1.0,
        bound="at most",
        method=f"Processor time in {seconds:.0f} s.",
    )


def _create_many(cluster: Any) -> None:
    """Create the topic of 1,000 partitions, and wait until each has a leader."""
    # The request may time out on a busy machine, and the creation continues.
    with contextlib.suppress(AssertionError, RemoteUnavailableError):
        cluster.create("many", partitions=_PARTITIONS)
    _until_led(cluster, "many")


def _until_led(cluster: Any, topic: str, but: int = -1, partitions: int = 0) -> None:
    """Wait until another broker than `but` leads each partition."""
    from support.clusters import until

    def is_led() -> bool:
        try:
            found = cluster.metadata(topic).partitions
        except RemoteUnavailableError:  # a busy broker
            return False
        return len(found) == (partitions or _PARTITIONS) and all(
            entry.leader_id not in (-1, but) for entry in found
        )

    until(is_led, f"all partitions of {topic} have a leader")


def _idle_fetches(many: ServedCluster, count: int) -> Iterator[Result]:
    """Compare an idle fetch in a session with a fetch that lists all partitions."""
    from netshim.follow.connection import SourceConnection

    cluster = many.cluster
    _create_many(cluster)
    topic = cluster.metadata("many")
    leader = topic.partitions[0].leader_id
    led = [
        partition.partition_index
        for partition in topic.partitions
        if partition.leader_id == leader
    ]
    kind = wire.FETCH.Request.Topic
    listed = [
        kind(
            topic_id=topic.topic_id,
            partitions=[
                kind.Partition(
                    partition=number, fetch_offset=0, partition_max_bytes=1 << 20
                )
                for number in led
            ],
        )
    ]
    connection = SourceConnection("127.0.0.1", cluster.ports[leader], cluster.client)
    served = attrs.evolve(many, pids=(cluster.processes[leader].pid,))
    fields: dict[str, Any] = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 10 << 20}
    request = wire.FETCH.Request(**fields, session_epoch=0, topics=listed)
    session = connection.request(wire.FETCH, request).session_id
    epoch = 0
    figures: dict[str, list[float]] = {"session": [], "full": []}
    for _ in range(_TURNS):
        before = served.cpu_seconds()
        for _ in range(count * 20):
            epoch += 1
            request = wire.FETCH.Request(
                **fields, session_id=session, session_epoch=epoch
            )
            response = connection.request(wire.FETCH, request)
            assert not response.responses and not response.error_code, response
        figures["session"].append((served.cpu_seconds() - before) / count / 20)
        before = served.cpu_seconds()
        for _ in range(count // 5):
            request = wire.FETCH.Request(**fields, session_epoch=-1, topics=listed)
            connection.request(wire.FETCH, request)
        figures["full"].append((served.cpu_seconds() - before) / (count // 5))
    connection.close()
    mine, other = (statistics.median(each) for each in figures.values())
    yield Result(
        question=f"idle fetch of {len(led)} partitions in a session, CPU",
        unit="us",
        ours=mine * 1e6,
        peer_name="a full fetch",
        peer=other * 1e6,
        ratio=other / mine,
        turns=common.ratios(figures["full"], figures["session"]),
        target=20,
        method="The rest of the 1,000 partitions has other leaders.",
    )


def _failover_of_many(many: ServedCluster) -> Result:
    """Kill the leader of one partition, and then a leader of a third of 1,000."""
    cluster = many.cluster
    cluster.create("single")
    seconds: dict[str, float] = {}
    for topic, partitions in (("single", 1), ("many", _PARTITIONS)):
        leader = cluster.partition(topic).leader_id
        if topic == "single":
            # Only this topic is watched; the other one moves too.
            cluster.until_in_sync(topic, 3)
        cluster.kill(leader)
        began = time.perf_counter()
        _until_led(cluster, topic, leader, partitions)
        seconds[topic] = time.perf_counter() - began
        cluster.start(leader)
        _until_led(cluster, "many")
        for index in range(0, _PARTITIONS, 50):
            cluster.until_in_sync("many", 3, index)
    return Result(
        question="kill -9 of a leader of 1,000 partitions, until all have another one",
        unit="s",
        ours=seconds["many"],
        peer_name="a single partition in the same cluster",
        peer=seconds["single"],
        ratio=seconds["many"] - seconds["single"],
        ratio_unit=" s",
        target=1.0,
        bound="at most",
        method="The broker led a third of them. One kill each.",
    )
