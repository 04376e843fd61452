"""A cluster on several machines: brokers in network namespaces, with a real ZooKeeper.
Each broker and the ZooKeeper server has a separate network. Clients of confluent-kafka
run in the network of the tests. After each failure, every acknowledged record has its
offset, no record is stored twice, committed offsets never decrease, and the replicas
have the same bytes.

Needs root and the program `ip`, Java 17 and Maven. Run by `make interop`. The test with
random failures is run by `make slow`, see test_cluster_chaos.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("kazoo")

from logcore.errors import NodeNotEmptyError, NodeNotFoundError
from logcore.registry import Registry, paths
from logcore.registry.zookeeper import connect
from netshim import wire
from netshim.cluster import registry_nodes
from netshim.wire import codes
from support.cluster_load import Load, OffsetLoad, check_load, check_replica_files
from support.clusters import FAST, Cluster, until
from support.machines import TESTS, Network
from support.zookeepers import ZooKeeper

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("LOGCORE_CLUSTER_SECONDS", "60"))
SEED = int(os.environ.get("LOGCORE_CLUSTER_SEED", "1"))
SESSION_S = FAST["broker_session_timeout_ms"] / 1_000
ZOOKEEPER_MACHINE = "zoo"
NUMBERS = (1, 2, 3)
#: A leader without a registry keeps its clients until a request times out.
PATIENT_SETTINGS = {"request.timeout.ms": 3_000}

_paths = itertools.count()


def name(number: int) -> str:
    """Return the name of a broker's machine."""
    return f"b{number}"


@attrs.define
class Site:
    """The machines, and the ZooKeeper server on one of them, or an ensemble."""

    network: Network
    zookeeper: Any


@attrs.define
class LoadedCluster:
    """A cluster under load on the machines of a site."""

    site: Site
    cluster: Cluster
    load: Load
    offsets: OffsetLoad
    #: The path of the registry, for connect().
    below: str

    @property
    def network(self) -> Network:
        return self.site.network

    def leader(self, reporting_broker: int | None = None) -> int:
        return int(self.cluster.partition("t", number=reporting_broker).leader_id)

    def until_led_by_another(self, number: int) -> int:
        """Wait until brokers that are not cut off report another leader."""
        reporting_broker = next(index for index in NUMBERS if index != number)

        def other_leader() -> int:
            leader = self.leader(reporting_broker)
            return leader if leader not in (-1, number) else 0

        return int(until(other_leader, f"another leader than {number}"))

    def until_whole(self) -> None:
        """Wait until all replicas are in sync, and all brokers report it."""
        for topic in ("t", "__consumer_offsets"):
            self.cluster.until_in_sync(topic, 3)
            until(lambda topic=topic: self._agree(topic), f"one view of {topic}")

    def _agree(self, topic: str) -> bool:
        partitions = [
            self.cluster.partition(topic, number=number) for number in NUMBERS
        ]
        leaders = {(entry.leader_id, entry.leader_epoch) for entry in partitions}
        return len(leaders) == 1 and all(
            len(entry.isr_nodes) == 3 for entry in partitions
        )

    def check(self) -> None:
        """Check the history after all failures have ended."""
        self.until_whole()
        self.load.until_more()
        self.offsets.end()
        check_load(self.cluster, "t", self.load)
        check_replica_files(self.cluster, "t")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        network = stack.enter_context(Network(ZOOKEEPER_MACHINE, *map(name, NUMBERS)))
        machine = network.machines[ZOOKEEPER_MACHINE]
        zookeeper = stack.enter_context(
            ZooKeeper(
                tmp_path_factory.mktemp("zookeeper") / "1",
                address=machine.address,
                port=2181,
                prefix=machine.command(),
            )
        )
        zookeeper.await_start()
        yield Site(network, zookeeper)


def cluster_on(
    site: Site, path: Path, below: str, port: int = 9092, **settings: object
) -> Cluster:
    return Cluster(
        path / "cluster",
        registry=f"zk://{site.zookeeper.server}{below}",
        machines={number: site.network.machines[name(number)] for number in NUMBERS},
        ports=dict.fromkeys(NUMBERS, port),
        **settings,
    )


@contextmanager
def loaded_cluster_on(
    site: Site, path: Path, **client: object
) -> Iterator[LoadedCluster]:
    below = f"/test-{next(_paths)}"
    with cluster_on(site, path, below) as cluster:
        load = offsets = None
        try:
            cluster.create("t")
            load = Load(cluster, "t", **client)
            load.until_more()
            offsets = OffsetLoad(cluster)
            until(lambda: offsets.commits and offsets.reads, "the first commits")
            yield LoadedCluster(site, cluster, load, offsets, below)
        finally:
            site.network.heal()
            if load is not None:
                load.pause()
            if offsets is not None:
                offsets.stop()


@pytest.fixture
def loaded(site: Site, tmp_path: Path) -> Iterator[LoadedCluster]:
    with loaded_cluster_on(site, tmp_path, **PATIENT_SETTINGS) as cluster:
        yield cluster


# -- brokers ---------------------------------------------------------------------------


def test_killed_leader_is_replaced(loaded: LoadedCluster) -> None:
    leader = loaded.leader()
    start_s = time.monotonic()
    loaded.cluster.kill(leader)
    count = len(loaded.load.acknowledged)
    until(lambda: len(loaded.load.acknowledged) > count + 5, "acknowledgements")
    print(f"acknowledged {time.monotonic() - start_s:.2f} s after the kill")
    assert loaded.until_led_by_another(leader) != leader
    loaded.cluster.start(leader)
    loaded.check()


def test_stopped_leader_is_replaced_and_joins_again(loaded: LoadedCluster) -> None:
    leader = loaded.leader()
    loaded.cluster.send(leader, signal.SIGSTOP)
    start_s = time.monotonic()
    loaded.until_led_by_another(leader)
    loaded.load.until_more()
    time.sleep(max(0, 3 * SESSION_S - (time.monotonic() - start_s)))
    loaded.cluster.send(leader, signal.SIGCONT)
    loaded.check()


# -- links -----------------------------------------------------------------------------


def test_isolated_leader_is_replaced(loaded: LoadedCluster) -> None:
    leader = loaded.leader()
    start_s = time.monotonic()
    loaded.network.isolate(name(leader))
    loaded.until_led_by_another(leader)
    loaded.load.until_more()
    print(f"acknowledged {time.monotonic() - start_s:.2f} s after the cut")
    time.sleep(SESSION_S)
    loaded.network.heal()
    loaded.check()


@pytest.mark.parametrize("direction", ["both", "to ZooKeeper", "from ZooKeeper"])
def test_leader_without_zookeeper_is_replaced(
    loaded: LoadedCluster, direction: str
) -> None:
    """Clients and the other brokers still reach the leader."""
    leader = loaded.leader()
    if direction != "from ZooKeeper":
        loaded.network.cut(name(leader), ZOOKEEPER_MACHINE)
    if direction != "to ZooKeeper":
        loaded.network.cut(ZOOKEEPER_MACHINE, name(leader))
    loaded.until_led_by_another(leader)
    loaded.load.until_more()
    loaded.network.heal()
    loaded.check()


@pytest.mark.parametrize("direction", ["requests", "responses"])
def test_follower_with_a_one_way_link_leaves_and_rejoins_the_isr(
    loaded: LoadedCluster, direction: str
) -> None:
    loaded.until_whole()
    leader = loaded.leader()
    follower = next(number for number in NUMBERS if number != leader)
    if direction == "requests":
        loaded.network.cut(name(follower), name(leader))
    else:
        loaded.network.cut(name(leader), name(follower))
    isr = loaded.cluster.until_in_sync("t", 2)
    assert isr.leader_id == leader and follower not in isr.isr_nodes
    loaded.load.until_more()
    loaded.network.heal()
    loaded.check()


def test_leader_without_responses_to_clients_remains_leader(
    loaded: LoadedCluster,
) -> None:
    """Only the responses of the leader to clients are lost, so that no other broker
    detects the fault.
    """
    leader = loaded.leader()
    loaded.network.cut(name(leader), TESTS)
    time.sleep(2 * SESSION_S)
    loaded.network.heal()
    assert loaded.leader() == leader
    loaded.check()


# -- ZooKeeper -------------------------------------------------------------------------


def test_restarted_zookeeper_changes_no_leader(loaded: LoadedCluster) -> None:
    loaded.until_whole()
    before = loaded.cluster.partition("t")
    loaded.site.zookeeper.kill()
    loaded.load.until_more()
    loaded.site.zookeeper.start()
    loaded.load.until_more()
    after = loaded.cluster.until_in_sync("t", 3)
    assert after.leader_id == before.leader_id
    loaded.check()


def test_records_are_acknowledged_while_zookeeper_is_down(
    loaded: LoadedCluster,
) -> None:
    """Coordinators stop responding when their lease expires, and respond again after
    ZooKeeper has restarted.
    """
    loaded.until_whole()
    loaded.site.zookeeper.kill()
    time.sleep(SESSION_S)
    until(lambda: not loaded.offsets.makes_progress(), "no more commits")
    loaded.load.until_more()
    time.sleep(SESSION_S)
    loaded.load.until_more()
    loaded.site.zookeeper.start()
    until(loaded.offsets.makes_progress, "commits")
    loaded.check()


def test_leader_killed_while_zookeeper_is_down_is_replaced_later(
    loaded: LoadedCluster,
) -> None:
    loaded.until_whole()
    leader = loaded.leader()
    loaded.site.zookeeper.kill()
    loaded.cluster.kill(leader)
    time.sleep(2 * SESSION_S)
    loaded.site.zookeeper.start()
    loaded.until_led_by_another(leader)
    loaded.load.until_more()
    loaded.cluster.start(leader)
    loaded.check()


def test_emptied_zookeeper_deletes_no_replica(site: Site, tmp_path: Path) -> None:
    """Brokers that register again refuse a ZooKeeper path without nodes."""
    below = f"/test-{next(_paths)}"
    with cluster_on(site, tmp_path, below) as cluster:
        cluster.create("t")
        cluster.until_in_sync("t", 3)
        with connect(site.zookeeper.server + below) as registry:
            registry.delete(paths.CLUSTER_ID)

            def is_refused() -> bool:
                _delete_all(registry)
                return all("was emptied" in cluster.log(number) for number in NUMBERS)

            until(is_refused, "the reports of all brokers")
        for number in NUMBERS:
            assert (cluster.path / str(number) / "t-0").is_dir(), cluster.log(number)


def _delete_all(registry: Registry, path: str = "") -> None:
    """Delete all nodes, the deepest first. Brokers may create nodes during the
    deletion.
    """
    for child in registry.children(path or "/"):
        below = f"{path}/{child}"
        _delete_all(registry, below)
        with contextlib.suppress(NodeNotFoundError, NodeNotEmptyError):
            registry.delete(below)


# -- an ensemble -----------------------------------------------------------------------


@attrs.define
class Ensemble:
    """Three ZooKeeper servers, each on another machine."""

    servers: list[ZooKeeper]

    @property
    def server(self) -> str:
        return ",".join(server.server for server in self.servers)

    def leader(self) -> ZooKeeper | None:
        return next(
            (server for server in self.servers if server.mode() == "leader"), None
        )


def test_ensemble_that_loses_its_leader_changes_no_leader(tmp_path: Path) -> None:
    """One server is lost. Later, the machines of a server and of a broker are lost."""
    server_names = ["z1", "z2", "z3"]
    with ExitStack() as stack:
        network = stack.enter_context(Network(*server_names, *map(name, NUMBERS)))
        machines = [network.machines[name_] for name_ in server_names]
        ensemble = Ensemble(
            [
                stack.enter_context(
                    ZooKeeper(
                        tmp_path / f"zookeeper-{number}",
                        address=machine.address,
                        port=2181,
                        prefix=machine.command(),
                        members=[name_.address for name_ in machines],
                        number=number,
                    )
                )
                for number, machine in enumerate(machines, 1)
            ]
        )
        until(ensemble.leader, "a leader of the ensemble")
        site = Site(network, ensemble)
        loaded = stack.enter_context(
            loaded_cluster_on(site, tmp_path, **PATIENT_SETTINGS)
        )
        loaded.until_whole()
        before = loaded.cluster.partition("t")
        lost_server = ensemble.leader()
        assert lost_server is not None
        lost_server.kill()
        loaded.load.until_more()
        until(ensemble.leader, "another leader of the ensemble")
        loaded.load.until_more(200)
        assert loaded.leader() == before.leader_id
        lost_server.begin()
        until(lambda: lost_server.mode() == "follower", "the server has rejoined")

        leader = loaded.leader()
        network.isolate(name(leader))
        server = server_names[ensemble.servers.index(lost_server)]
        network.isolate(server)
        loaded.until_led_by_another(leader)
        loaded.load.until_more()
        network.heal()
        loaded.check()


# -- bad input -------------------------------------------------------------------------


def serve(site: Site, path: Path, number: int, registry: str, *more: str) -> str:
    """Start a broker that must refuse to start, and return its error."""
    machine = site.network.machines[name(number)]
    command = [sys.executable, "-m", "netshim", "serve", str(path)]
    command += ["--registry", registry, "--node-id", str(number), "--insecure"]
    command += ["--host", machine.address, "--port", "0", *more]
    result = subprocess.run(
        machine.command(*command),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 2, result.stderr[-2_000:]
    return result.stderr


@pytest.fixture(scope="module")
def idle_cluster(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Start a cluster whose brokers no test stops."""
    with cluster_on(site, tmp_path_factory.mktemp("calm"), "/calm", 9093) as cluster:
        yield cluster


def test_used_broker_number_is_refused_with_its_address(
    site: Site, idle_cluster: Cluster, tmp_path: Path
) -> None:
    registry = f"zk://{site.zookeeper.server}/calm"
    options = ("--broker-session-timeout-ms", "1000")
    output = serve(site, tmp_path / "1", 1, registry, *options)
    assert "another broker has the number 1" in output
    assert f"{idle_cluster.host(1)}:{idle_cluster.ports[1]}" in output


def test_directory_of_another_cluster_is_refused(
    site: Site, idle_cluster: Cluster, tmp_path: Path
) -> None:
    other = tmp_path / "cluster"
    other.mkdir()
    properties = idle_cluster.path / "1" / "meta.properties"
    (other / "meta.properties").write_text(properties.read_text())
    registry = f"zk://{site.zookeeper.server}/other"
    assert "another cluster.id" in serve(site, other, 1, registry)


def test_path_of_another_program_is_refused(site: Site, tmp_path: Path) -> None:
    """Apache Kafka uses nodes with the same names."""
    below = f"/test-{next(_paths)}"
    with connect(f"{site.zookeeper.server}{below}") as registry:
        registry.create(paths.CLUSTER_ID, paths.pack_cluster_id("kafka"))
        registry.create(paths.broker(1), b"{}")
    for path in (below, f"{below}/brokers"):
        output = serve(site, tmp_path / "1", 1, f"zk://{site.zookeeper.server}{path}")
        assert "belongs to another program" in output
    with connect(f"{site.zookeeper.server}{below}") as registry:
        assert registry.children("/") == ["brokers", "cluster"]


def test_error_contains_the_zookeeper_that_does_not_respond(
    site: Site, tmp_path: Path
) -> None:
    """The broker tries for 30 s."""
    registry = f"zk://{site.network.machines[name(3)].address}:2181/logcore"
    start_s = time.monotonic()
    assert registry in serve(site, tmp_path / "1", 1, registry)
    assert time.monotonic() - start_s >= 30


def test_listener_on_all_networks_needs_an_advertised_address(
    site: Site, tmp_path: Path
) -> None:
    registry = f"zk://{site.zookeeper.server}/test-{next(_paths)}"
    output = serve(site, tmp_path / "1", 1, registry, "--host", "0.0.0.0")
    assert "--advertise" in output


def test_partition_with_damaged_state_is_offline_and_others_continue(
    site: Site, idle_cluster: Cluster
) -> None:
    idle_cluster.create("good")
    idle_cluster.create("bad")
    partition = f"{registry_nodes.partitions_path('bad')}/0"

    def write(registry: Registry, path: str, state: bytes) -> None:
        """Write the state and publish the change. Brokers would read an unpublished
        change only after 5 minutes.
        """
        registry.set(path, state)
        changes = registry_nodes.changes_of(NUMBERS[0])

        def count_published(data: bytes | None) -> bytes:
            assert data is not None
            published = registry_nodes.unpack_changes(data, changes)
            return registry_nodes.pack_changes(published.with_changes([("bad", 0)]))

        registry.update(changes, count_published)

    with connect(f"{site.zookeeper.server}/calm") as registry:
        (topic_id,) = registry.children(partition)
        path = f"{partition}/{topic_id}"
        before = registry.get(path).value
        write(registry, path, before[:20])
        leader = idle_cluster.partition("good").leader_id
        load = Load(idle_cluster, "good")
        until(
            lambda: "bad-0 is offline" in idle_cluster.log(leader), "bad-0 is reported"
        )
        assert path in idle_cluster.log(leader)
        load.until_more()
        load.end()
        write(registry, path, before)
    idle_cluster.until_in_sync("bad", 3)


def test_topics_are_created_by_any_broker_and_deleted(
    site: Site, idle_cluster: Cluster
) -> None:
    idle_cluster.create("short", 4)
    for index in range(4):
        idle_cluster.until_in_sync("short", 3, index)
    request = wire.DELETE_TOPICS.Request(topic_names=["short"], timeout_ms=30_000)
    api = wire.DELETE_TOPICS
    (deleted,) = idle_cluster.ask(2, api, request, max_version=5).responses
    assert deleted.error_code == codes.NONE
    for number in NUMBERS:
        folder = idle_cluster.path / str(number) / "short-0"
        until(lambda folder=folder: not folder.exists(), f"{folder} is deleted")


# -- random failures -------------------------------------------------------------------


def fail(loaded: LoadedCluster, rng: random.Random) -> str:
    """Let one machine, link or server fail and recover. Return a description of the
    failure.
    """
    number = rng.choice(NUMBERS)
    if rng.random() < 0.5:
        leader = loaded.leader(None)
        number = leader if leader > 0 else number
    failure = rng.choice(
        ["kill", "pause", "isolate", "no ZooKeeper", "one way", "restart", "outage"]
    )
    seconds = SESSION_S * rng.uniform(0.2, 2.5)
    network, cluster = loaded.network, loaded.cluster
    if failure == "kill":
        cluster.kill(number)
        time.sleep(rng.choice([0.0, 0.5, 2.0]))
        cluster.start(number)
    elif failure == "pause":
        cluster.send(number, signal.SIGSTOP)
        time.sleep(seconds)
        cluster.send(number, signal.SIGCONT)
    elif failure in ("restart", "outage"):
        loaded.site.zookeeper.kill()
        time.sleep(seconds if failure == "outage" else 0)
        loaded.site.zookeeper.start()
    else:
        if failure == "isolate":
            network.isolate(name(number))
        elif failure == "no ZooKeeper":
            network.cut_both(name(number), ZOOKEEPER_MACHINE)
        else:
            ends = [ZOOKEEPER_MACHINE, *map(name, NUMBERS), TESTS]
            source, target = rng.sample(ends, 2)
            network.cut(source, target)
            failure = f"one way {source} to {target}"
        time.sleep(seconds)
        network.heal()
    return f"{failure} {number} {seconds:.1f} s"


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_random_failures_of_machines_lose_no_acknowledged_record(
    loaded: LoadedCluster,
) -> None:
    rng = random.Random(SEED)
    steps = []
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        steps.append(fail(loaded, rng))
        print(steps[-1], flush=True)
        if rng.random() < 0.7:
            loaded.until_whole()
    print(
        f"{len(steps)} failures, {len(loaded.load.acknowledged)} records, "
        f"{loaded.offsets.commits} commits, {loaded.offsets.reads} reads"
    )
    loaded.check()
