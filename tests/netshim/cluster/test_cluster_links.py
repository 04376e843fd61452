"""Links between real brokers that lose one or both directions, under load."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.cluster_load import Load, check_load, check_replica_files
from support.clusters import FAST, Cluster, until
from support.links import Cut, LinkProxy, low_port

confluent_kafka = pytest.importorskip("confluent_kafka")

SEED = int(os.environ.get("LOGCORE_CLUSTER_SEED", "1"))
LAG_S = FAST["replica_lag_time_max_ms"] / 1_000
ROUNDS = 6


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[tuple[Cluster, dict[int, LinkProxy]]]:
    """A cluster, and the proxy of each broker."""
    with ExitStack() as stack:
        ports = {number: low_port() for number in (1, 2, 3)}
        proxies = {
            number: stack.enter_context(LinkProxy(port))
            for number, port in ports.items()
        }
        advertised = {number: proxy.port for number, proxy in proxies.items()}
        cluster = stack.enter_context(
            Cluster(tmp_path / "cluster", ports=ports, advertised=advertised)
        )
        yield cluster, proxies


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cut", Cut)
def test_follower_with_a_cut_link_leaves_and_rejoins_the_isr(
    linked: tuple[Cluster, dict[int, LinkProxy]], cut: Cut
) -> None:
    cluster, proxies = linked
    cluster.create("t")
    load = Load(cluster, "t")
    load.until_more()
    entry = cluster.until_in_sync("t", 3)
    follower = next(n for n in (1, 2, 3) if n != entry.leader_id)
    proxies[entry.leader_id].cut(follower, cut)
    left = cluster.until_in_sync("t", 2)
    assert left.leader_id == entry.leader_id and follower not in left.isr_nodes
    load.until_more()
    proxies[entry.leader_id].heal()
    cluster.until_in_sync("t", 3)
    load.until_more()
    check_load(cluster, "t", load)
    check_replica_files(cluster, "t")


def error_of_send(cluster: Cluster, topic: str) -> str | None:
    """Send a record with acks=all, without retries, and return its error."""
    errors: list[Any] = []
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "acks": "all",
            "retries": 0,
            **cluster.client_config,
        }
    )
    producer.produce(topic, b"0", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(120) == 0
    (error,) = errors
    return None if error is None else error.name()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_leader_without_followers_acknowledges_nothing(
    linked: tuple[Cluster, dict[int, LinkProxy]],
) -> None:
    cluster, proxies = linked
    cluster.create("t")
    load = Load(cluster, "t")
    load.until_more()
    entry = cluster.until_in_sync("t", 3)
    leader = proxies[entry.leader_id]
    for follower in {1, 2, 3} - {entry.leader_id}:
        leader.cut(follower, Cut.REQUESTS)
    # A record that one follower has fetched may still be acknowledged: the other follower
    # leaves the ISR first.
    until(
        lambda: len(cluster.partition("t").isr_nodes) == 1,
        "the leader is alone in sync",
    )
    assert error_of_send(cluster, "t") == "NOT_ENOUGH_REPLICAS"
    until(lambda: not load.makes_progress(), "the load gets no more responses")
    leader.heal()
    cluster.until_in_sync("t", 3)
    load.until_more()
    check_load(cluster, "t", load)
    check_replica_files(cluster, "t")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_cuts_and_kills_lose_nothing(
    linked: tuple[Cluster, dict[int, LinkProxy]],
) -> None:
    """Links are cut for shorter and longer than the lag, while leaders are killed."""
    chance = random.Random(SEED)
    cluster, proxies = linked
    cluster.create("t")
    load = Load(cluster, "t")
    load.until_more()
    steps = []
    links = list(itertools.permutations((1, 2, 3), 2))
    for _ in range(ROUNDS):
        cuts = [
            (leader, follower, chance.choice(list(Cut)))
            for leader, follower in chance.sample(links, chance.choice([1, 2, 3]))
        ]
        for leader, follower, cut in cuts:
            proxies[leader].cut(follower, cut)
        time.sleep(LAG_S * chance.uniform(0.1, 1.5))
        killed = None
        if chance.random() < 0.5:
            killed = cluster.partition("t").leader_id
        if killed is not None and killed > 0:
            cluster.kill(killed)
            time.sleep(chance.uniform(0, 2))
            cluster.start(killed)
        for proxy in proxies.values():
            proxy.heal()
        cluster.until_in_sync("t", 3)
        load.until_more()
        steps.append(f"{[(a, b, c.name) for a, b, c in cuts]} killed {killed}")
    print("\n".join(steps))
    check_load(cluster, "t", load)
    check_replica_files(cluster, "t")
