"""Random failures of real brokers under load, with checks of the records afterwards.

Producers write with acks=all, one client commits offsets, and one client reads them.
Brokers are killed, stopped for shorter and longer than their session, shut down cleanly,
and given an empty disk. In another test, replicas move between brokers that are killed
and stopped. LOGCORE_CLUSTER_SECONDS is the time of the failures, and
LOGCORE_CLUSTER_SEED chooses them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from netshim import wire
from netshim.wire import codes
from support.cluster_load import Load, OffsetLoad, check_load, check_replica_files
from support.clusters import FAST, Cluster, until

SECONDS = float(os.environ.get("LOGCORE_CLUSTER_SECONDS", "60"))
SEED = int(os.environ.get("LOGCORE_CLUSTER_SEED", "1"))
PARTITIONS = 3
SESSION_S = FAST["broker_session_timeout_ms"] / 1_000


def fail(cluster: Cluster, chance: random.Random) -> str:
    """Let one broker fail and recover. Return a description of the failure."""
    number = chance.choice([1, 2, 3])
    if chance.random() < 0.5:  # prefer the leader of a partition
        leader = cluster.partition("t", chance.randrange(PARTITIONS)).leader_id
        number = leader if leader > 0 else number
    kind = chance.choice(["kill", "kill", "kill", "pause", "pause", "stop", "wipe"])
    if kind == "pause":
        seconds = SESSION_S * chance.uniform(0.2, 3)
        cluster.send(number, signal.SIGSTOP)
        time.sleep(seconds)
        cluster.send(number, signal.SIGCONT)
        return f"paused {number} for {seconds:.1f} s"
    if kind == "stop":
        cluster.stop(number)
    else:
        cluster.kill(number)
    if kind == "wipe":
        shutil.rmtree(cluster.path / str(number))
    time.sleep(chance.choice([0.0, 0.5, 2.0]))
    cluster.start(number)
    return f"{kind} {number}"


@pytest.mark.slow
def test_random_failures_lose_nothing(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with Cluster(tmp_path / "cluster", offsets_partitions=2) as cluster:
        cluster.create("t", PARTITIONS)
        load = Load(cluster, "t")
        load.until_more()
        offsets = OffsetLoad(cluster)
        until(lambda: offsets.commits and offsets.reads, "the first commits")
        steps = []
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            steps.append(fail(cluster, chance))
            # A disk is wiped only while the other replicas are complete.
            for index in range(PARTITIONS):
                cluster.until_in_sync("t", 3, index)
            for index in range(2):
                cluster.until_in_sync("__consumer_offsets", 3, index)
        print(f"{len(steps)} failures: {', '.join(steps)}")
        load.until_more()
        offsets.end()
        print(
            f"{len(load.acknowledged)} records, {offsets.commits} commits, "
            f"{offsets.reads} reads"
        )
        check_load(cluster, "t", load)
        check_replica_files(cluster, "t")


def move(cluster: Cluster, index: int, replicas: list[int] | None) -> int:
    """Reassign a partition, or cancel its reassignment with None; return the error
    code.
    """
    kind = wire.ALTER_PARTITION_REASSIGNMENTS.Request
    part = kind.Topic.Partition(partition_index=index, replicas=replicas)
    request = kind(topics=[kind.Topic(name="t", partitions=[part])])
    number = next(
        number
        for number, process in cluster.processes.items()
        if process.poll() is None
    )
    response = cluster.ask(number, wire.ALTER_PARTITION_REASSIGNMENTS, request)
    code: int = response.responses[0].partitions[0].error_code
    return code


def until_moved(cluster: Cluster) -> None:
    """Wait until no partition is being reassigned and all replicas are in sync."""
    replicas_and_isrs: list[tuple[list[int], list[int]]] = []

    def is_moved() -> bool:
        parts = [cluster.partition("t", index) for index in range(PARTITIONS)]
        replicas_and_isrs[:] = [(part.replica_nodes, part.isr_nodes) for part in parts]
        return all(
            len(all_) == 3 and {*all_} == {*isr} for all_, isr in replicas_and_isrs
        )

    try:
        until(is_moved, "the replicas are moved and in sync")
    except AssertionError as error:
        error.add_note(f"the last replicas and ISRs: {replicas_and_isrs}")
        raise


@pytest.mark.slow
def test_random_moves_of_replicas_lose_nothing(tmp_path: Path) -> None:
    """Brokers are assigned, unassigned and assigned again while others fail."""
    chance = random.Random(SEED)
    with Cluster(tmp_path / "cluster", 4) as cluster:
        cluster.create("t", PARTITIONS)
        load = Load(cluster, "t")
        load.until_more()
        begun = cancelled = 0
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            stopped = None
            if chance.random() < 0.3:
                leader = cluster.partition("t", chance.randrange(PARTITIONS)).leader_id
                # Broker 1 answers the requests of this test.
                stopped = leader if leader > 1 else None
            if stopped is not None:
                cluster.send(stopped, signal.SIGSTOP)
            for _ in range(chance.randint(1, 6)):
                index = chance.randrange(PARTITIONS)
                if chance.random() < 0.4:
                    cancelled += move(cluster, index, None) == codes.NONE
                else:
                    target = chance.sample([1, 2, 3, 4], 3)
                    begun += move(cluster, index, target) == codes.NONE
                time.sleep(chance.choice([0.0, 0.05, 0.3]))
            if stopped is not None:
                cluster.send(stopped, signal.SIGCONT)
                if chance.random() < 0.5:
                    cluster.kill(stopped)
                    cluster.start(stopped)
            if chance.random() < 0.3:
                until_moved(cluster)
        until_moved(cluster)
        load.until_more()
        print(f"{begun} reassignments, {cancelled} cancelled")
        print(f"{len(load.acknowledged)} records")
        assert begun > 0
        assert cancelled > 0
        check_load(cluster, "t", load)
        check_replica_files(cluster, "t")
