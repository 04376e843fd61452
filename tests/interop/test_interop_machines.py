"""A cluster on several machines: brokers in network namespaces, with a real ZooKeeper.

Each broker and the ZooKeeper server has a network of its own. Clients of confluent-kafka
run in the network of the tests. After each failure, every acknowledged record is at its
place, no record is stored twice, committed offsets never decrease, and the replicas have
the same bytes.

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
from support.cluster_load import Load, Offsets, check_load, check_replica_files
from support.clusters import FAST, Cluster, until
from support.machines import TESTS, Network
from support.zookeepers import ZooKeeper

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("LOGCORE_CLUSTER_SECONDS", "60"))
SEED = int(os.environ.get("LOGCORE_CLUSTER_SEED", "1"))
SESSION_S = FAST["broker_session_timeout_ms"] / 1_000
ZOO = "zoo"
NUMBERS = (1, 2, 3)
#: A leader without a registry keeps its clients until a request times out.
PATIENT = {"request.timeout.ms": 3_000}

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
    offsets: Offsets
    #: The path of the registry, for connect().
    below: str

    @property
    def network(self) -> Network:
        return self.site.network

    def leader(self, asked: int | None = None) -> int:
        return int(self.cluster.partition("t", number=asked).leader_id)

    def until_led_by_another(self, number: int) -> int:
        """Wait until another broker leads, as brokers report that are not cut off."""
        asked = next(index for index in NUMBERS if index != number)

        def found() -> int:
            leader = self.leader(asked)
            return leader if leader not in (-1, number) else 0

        return int(until(found, f"another leader than {number}"))

    def until_whole(self) -> None:
        """Wait until all replicas are in sync, and all brokers report that."""
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
        """Check the history, once all failures are over."""
        self.until_whole()
        self.load.until_more()
        self.offsets.end()
        check_load(self.cluster, "t", self.load)
        check_replica_files(self.cluster, "t")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        network = stack.enter_context(Network(ZOO, *map(name, NUMBERS)))
        machine = network.machines[ZOO]
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
            offsets = Offsets(cluster)
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
    with loaded_cluster_on(site, tmp_path, **PATIENT) as made:
        yield made


# -- brokers ---------------------------------------------------------------------------


def test_killed_leader_is_replaced(loaded: LoadedCluster) -> None:
    leader = loaded.leader()
    began_s = time.monotonic()
    loaded.cluster.kill(leader)
    count = len(loaded.load.acknowledged)
    until(lambda: len(loaded.load.acknowledged) > count + 5, "acknowledgements")
    print(f"acknowledged {time.monotonic() - began_s:.2f} s after the kill")
    assert loaded.until_led_by_another(leader) != leader
    loaded.cluster.start(leader)
    loaded.check()


def test_stopped_leader_is_replaced_and_joins_again(loaded: LoadedCluster) -> None:
    leader = loaded.leader()
    loaded.cluster.send(leader, signal.SIGSTOP)
    began_s = time.monotonic()
    loaded.until_led_by_another(leader)
    loaded.load.until_more()
    time.sleep(max(0, 3 * SESSION_S - (time.monotonic() - began_s)))
    loaded.cluster.send(leader, signal.SIGCONT)
    loaded.check()


# -- links -----------------------------------------------------------------------------


def test_leader_that_is_cut_off_is_replaced(loaded: LoadedCluster) -> None:
    leader = loaded.leader()
    began_s = time.monotonic()
    loaded.network.isolate(name(leader))
    loaded.until_led_by_another(leader)
    loaded.load.until_more()
    print(f"acknowledged {time.monotonic() - began_s:.2f} s after the cut")
    time.sleep(SESSION_S)
    loaded.network.heal()
    loaded.check()


@pytest.mark.parametrize("direction", ["both", "to ZooKeeper", "from ZooKeeper"])
def test_leader_without_zookeeper_is_replaced(
    loaded: LoadedCluster, direction: str
) -> None:
    """Clients and the other brokers still reach it."""
    leader = loaded.leader()
    if direction != "from ZooKeeper":
        loaded.network.cut(name(leader), ZOO)
    if direction != "to ZooKeeper":
        loaded.network.cut(ZOO, name(leader))
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
    left = loaded.cluster.until_in_sync("t", 2)
    assert left.leader_id == leader and follower not in left.isr_nodes
    loaded.load.until_more()
    loaded.network.heal()
    loaded.check()


def test_leader_without_responses_to_clients_remains_leader(
    loaded: LoadedCluster,
) -> None:
    """Only its responses to clients are lost, so no other broker notices."""
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
    """Coordinators stop to answer when their lease is over, and start again."""
    loaded.until_whole()
    loaded.site.zookeeper.kill()
    time.sleep(SESSION_S)
    until(lambda: not loaded.offsets.is_moving(), "no more commits")
    loaded.load.until_more()
    time.sleep(SESSION_S)
    loaded.load.until_more()
    loaded.site.zookeeper.start()
    until(loaded.offsets.is_moving, "commits")
    loaded.check()


def test_leader_that_dies_while_zookeeper_is_down_is_replaced_afterwards(
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
    """Brokers that register again refuse the empty path."""
    below = f"/test-{next(_paths)}"
    with cluster_on(site, tmp_path, below) as cluster:
        cluster.create("t")
        cluster.until_in_sync("t", 3)
        with connect(site.zookeeper.server + below) as registry:
            registry.delete(paths.CLUSTER_ID)

            def is_refused() -> bool:
                _delete_all(registry)
                return all("was emptied" in cluster.log(n) for n in NUMBERS)

            until(is_refused, "the reports of all brokers")
        for number in NUMBERS:
            assert (cluster.path / str(number) / "t-0").is_dir(), cluster.log(number)


def _delete_all(registry: Registry, path: str = "") -> None:
    """Delete all nodes, the deepest first. Brokers may create nodes while it runs."""
    for child in registry.children(path or "/"):
        below = f"{path}/{child}"
        _delete_all(registry, below)
        with contextlib.suppress(NodeNotFoundError, NodeNotEmptyError):
            registry.delete(below)


# -- an ensemble -----------------------------------------------------------------------


@attrs.define
class Ensemble:
    """Three ZooKeeper servers, each on a machine of its own."""

    servers: list[ZooKeeper]

    @property
    def server(self) -> str:
        return ",".join(server.server for server in self.servers)

    def leader(self) -> ZooKeeper | None:
        return next(
            (server for server in self.servers if server.mode() == "leader"), None
        )


def test_ensemble_that_loses_its_leader_changes_no_leader(tmp_path: Path) -> None:
    """One server is lost. Later, the machines of a server and of a broker are."""
    zoos = ["z1", "z2", "z3"]
    with ExitStack() as stack:
        network = stack.enter_context(Network(*zoos, *map(name, NUMBERS)))
        machines = [network.machines[each] for each in zoos]
        ensemble = Ensemble(
            [
                stack.enter_context(
                    ZooKeeper(
                        tmp_path / f"zookeeper-{number}",
                        address=machine.address,
                        port=2181,
                        prefix=machine.command(),
                        members=[each.address for each in machines],
                        number=number,
                    )
                )
                for number, machine in enumerate(machines, 1)
            ]
        )
        until(ensemble.leader, "a leader of the ensemble")
        site = Site(network, ensemble)
        loaded = stack.enter_context(loaded_cluster_on(site, tmp_path, **PATIENT))
        loaded.until_whole()
        before = loaded.cluster.partition("t")
        lost = ensemble.leader()
        assert lost is not None
        lost.kill()
        loaded.load.until_more()
        until(ensemble.leader, "another leader of the ensemble")
        loaded.load.until_more(200)
        assert loaded.leader() == before.leader_id
        lost.begin()
        until(lambda: lost.mode() == "follower", "the server is back")

        leader = loaded.leader()
        network.isolate(name(leader))
        server = zoos[ensemble.servers.index(lost)]
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
    done = subprocess.run(
        machine.command(*command),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr[-2_000:]
    return done.stderr


@pytest.fixture(scope="module")
def calm(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose brokers are not stopped, beside those of single tests."""
    with cluster_on(site, tmp_path_factory.mktemp("calm"), "/calm", 9093) as made:
        yield made


def test_number_in_use_is_refused_with_its_address(
    site: Site, calm: Cluster, tmp_path: Path
) -> None:
    registry = f"zk://{site.zookeeper.server}/calm"
    more = ("--broker-session-timeout-ms", "1000")
    output = serve(site, tmp_path / "1", 1, registry, *more)
    assert "another broker has the number 1" in output
    assert f"{calm.host(1)}:{calm.ports[1]}" in output


def test_directory_of_another_cluster_is_refused(
    site: Site, calm: Cluster, tmp_path: Path
) -> None:
    other = tmp_path / "cluster"
    other.mkdir()
    properties = calm.path / "1" / "meta.properties"
    (other / "meta.properties").write_text(properties.read_text())
    registry = f"zk://{site.zookeeper.server}/other"
    assert "another cluster.id" in serve(site, other, 1, registry)


def test_path_of_another_program_is_refused(site: Site, tmp_path: Path) -> None:
    """Apache Kafka has nodes of the same names."""
    below = f"/test-{next(_paths)}"
    with connect(f"{site.zookeeper.server}{below}") as registry:
        registry.create(paths.CLUSTER_ID, paths.pack_cluster_id("kafka"))
        registry.create(paths.broker(1), b"{}")
    for path in (below, f"{below}/brokers"):
        output = serve(site, tmp_path / "1", 1, f"zk://{site.zookeeper.server}{path}")
        assert "belongs to another program" in output
    with connect(f"{site.zookeeper.server}{below}") as registry:
        assert registry.children("/") == ["brokers", "cluster"]


def test_server_that_does_not_answer_is_named(site: Site, tmp_path: Path) -> None:
    """The broker tries for 30 s."""
    registry = f"zk://{site.network.machines[name(3)].address}:2181/logcore"
    began_s = time.monotonic()
    assert registry in serve(site, tmp_path / "1", 1, registry)
    assert time.monotonic() - began_s >= 30


def test_address_of_all_networks_needs_an_advertised_one(
    site: Site, tmp_path: Path
) -> None:
    registry = f"zk://{site.zookeeper.server}/test-{next(_paths)}"
    output = serve(site, tmp_path / "1", 1, registry, "--host", "0.0.0.0")
    assert "--advertise" in output


def test_damaged_state_is_offline_and_others_continue(
    site: Site, calm: Cluster
) -> None:
    calm.create("good")
    calm.create("bad")
    partition = f"{registry_nodes.partitions_path('bad')}/0"

    def write(registry: Registry, path: str, state: bytes) -> None:
        """Write the state and report it. Unreported changes are read after 5 minutes."""
        registry.set(path, state)
        note = registry_nodes.changes_of(NUMBERS[0])

        def add(data: bytes | None) -> bytes:
            assert data is not None
            published = registry_nodes.unpack_changes(data, note)
            return registry_nodes.pack_changes(published.with_changes([("bad", 0)]))

        registry.update(note, add)

    with connect(f"{site.zookeeper.server}/calm") as registry:
        (topic_id,) = registry.children(partition)
        path = f"{partition}/{topic_id}"
        before = registry.get(path).value
        write(registry, path, before[:20])
        leader = calm.partition("good").leader_id
        load = Load(calm, "good")
        until(lambda: "bad-0 is offline" in calm.log(leader), "the report")
        assert path in calm.log(leader)
        load.until_more()
        load.end()
        write(registry, path, before)
    calm.until_in_sync("bad", 3)


def test_topics_are_created_by_any_broker_and_deleted(
    site: Site, calm: Cluster
) -> None:
    calm.create("short", 4)
    for index in range(4):
        calm.until_in_sync("short", 3, index)
    request = wire.DELETE_TOPICS.Request(topic_names=["short"], timeout_ms=30_000)
    api = wire.DELETE_TOPICS
    (deleted,) = calm.ask(2, api, request, max_version=5).responses
    assert deleted.error_code == codes.NONE
    for number in NUMBERS:
        folder = calm.path / str(number) / "short-0"
        until(lambda folder=folder: not folder.exists(), f"{folder} is deleted")


# -- random failures -------------------------------------------------------------------


def fail(loaded: LoadedCluster, chance: random.Random) -> str:
    """Let one machine, link or server fail and come back; return a description."""
    number = chance.choice(NUMBERS)
    if chance.random() < 0.5:
        leader = loaded.leader(None)
        number = leader if leader > 0 else number
    kind = chance.choice(
        ["kill", "pause", "isolate", "no ZooKeeper", "one way", "restart", "outage"]
    )
    seconds = SESSION_S * chance.uniform(0.2, 2.5)
    network, cluster = loaded.network, loaded.cluster
    if kind == "kill":
        cluster.kill(number)
        time.sleep(chance.choice([0.0, 0.5, 2.0]))
        cluster.start(number)
    elif kind == "pause":
        cluster.send(number, signal.SIGSTOP)
        time.sleep(seconds)
        cluster.send(number, signal.SIGCONT)
    elif kind in ("restart", "outage"):
        loaded.site.zookeeper.kill()
        time.sleep(seconds if kind == "outage" else 0)
        loaded.site.zookeeper.start()
    else:
        if kind == "isolate":
            network.isolate(name(number))
        elif kind == "no ZooKeeper":
            network.cut_both(name(number), ZOO)
        else:
            ends = [ZOO, *map(name, NUMBERS), TESTS]
            source, target = chance.sample(ends, 2)
            network.cut(source, target)
            kind = f"one way {source} to {target}"
        time.sleep(seconds)
        network.heal()
    return f"{kind} {number} {seconds:.1f} s"


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_random_failures_of_machines_lose_nothing(loaded: LoadedCluster) -> None:
    chance = random.Random(SEED)
    steps = []
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        steps.append(fail(loaded, chance))
        print(steps[-1], flush=True)
        if chance.random() < 0.7:
            loaded.until_whole()
    print(
        f"{len(steps)} failures, {len(loaded.load.acknowledged)} records, "
        f"{loaded.offsets.commits} commits, {loaded.offsets.reads} reads"
    )
    loaded.check()
