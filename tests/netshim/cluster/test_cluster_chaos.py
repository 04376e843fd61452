"""Random failures of real brokers under load, with checks of the records afterwards.

Producers write with acks=all, one client commits offsets, and one client reads them.
Brokers are killed, stopped for shorter and longer than their session, shut down cleanly,
and given an empty disk. LOGCORE_CLUSTER_SECONDS is the time of the failures, and
LOGCORE_CLUSTER_SEED chooses them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support.cluster_load import Load, judge, judge_files
from support.clusters import FAST, Cluster, until

confluent_kafka = pytest.importorskip("confluent_kafka")

SECONDS = float(os.environ.get("LOGCORE_CLUSTER_SECONDS", "60"))
SEED = int(os.environ.get("LOGCORE_CLUSTER_SEED", "1"))
PARTITIONS = 3
SESSION_S = FAST["broker_session_timeout_ms"] / 1_000


class Offsets:
    """A client that commits ever larger offsets, and one that reads them.

    A read never returns less than a commit that was acknowledged before it began, or
    than another read that ended before it began (R13 of docs/replication.md).
    """

    def __init__(self, cluster: Cluster) -> None:
        self._servers = cluster.bootstrap_servers
        self._is_over = threading.Event()
        #: The largest offset that is known to be committed.
        self._floor = -1
        self.commits = 0
        self.reads = 0
        self.broken: list[str] = []
        self._threads = [
            threading.Thread(target=one) for one in (self._commit, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def _client(self) -> Any:
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "offsets",
                "enable.auto.commit": False,
                "reconnect.backoff.max.ms": 100,
                "log_level": 0,
            }
        )

    def _commit(self) -> None:
        client = self._client()
        place = confluent_kafka.TopicPartition("t", 0, 0)
        while not self._is_over.is_set():
            place.offset += 1
            try:
                client.commit(offsets=[place], asynchronous=False)
            except confluent_kafka.KafkaException:
                time.sleep(0.05)
            else:
                self._floor = max(self._floor, place.offset)
                self.commits += 1
        client.close()

    def _read(self) -> None:
        client = self._client()
        place = confluent_kafka.TopicPartition("t", 0)
        while not self._is_over.is_set():
            floor = self._floor
            try:
                (found,) = client.committed([place], timeout=10)
            except confluent_kafka.KafkaException:
                time.sleep(0.05)
                continue
            offset = max(-1, found.offset)  # -1001 if there is none
            if offset < floor:
                self.broken.append(f"read {offset} after {floor}")
            self._floor = max(self._floor, offset)
            self.reads += 1
        client.close()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert not self.broken, self.broken[:5]


def fail(cluster: Cluster, chance: random.Random) -> str:
    """Let one broker fail and come back; return a description."""
    number = chance.choice([1, 2, 3])
    if chance.random() < 0.5:  # rather the leader of a partition
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
        offsets = Offsets(cluster)
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
        judge(cluster, "t", load)
        judge_files(cluster, "t")
