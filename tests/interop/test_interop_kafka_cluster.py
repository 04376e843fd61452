"""The same script of failures for three brokers of netshim, and of Apache Kafka. The
test prints the times of both clusters, and docs/cluster.md lists the differences. Needs
Java 17 and Maven. Run by `make interop`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster_load import Load, OffsetLoad, check_load
from support.clusters import FAST, Cluster
from support.kafka_clusters import KafkaCluster

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

SESSION_S = FAST["broker_session_timeout_ms"] / 1_000


def pause_of(load: Load, failure: Callable[[], None]) -> float:
    """Return the seconds from a failure to the next acknowledgement after it."""
    start_s = time.monotonic()
    failure()
    load.until_more(1)
    return time.monotonic() - start_s


@pytest.mark.parametrize("cluster_type", [Cluster, KafkaCluster])
def test_failures_of_a_cluster_lose_no_acknowledged_record(
    tmp_path: Path, cluster_type: type[Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    times: dict[str, list[float]] = {}
    with cluster_type(tmp_path / "cluster") as cluster:
        cluster.create("t")
        cluster.until_in_sync("t", 3)
        load = Load(cluster, "t")
        offsets = OffsetLoad(cluster)
        for _ in range(3):
            load.until_more()
            leader = cluster.until_in_sync("t", 3).leader_id

            # Step 1: kill the leader, and start it again.
            def kill(number: int = leader) -> None:
                cluster.kill(number)

            times.setdefault("kill -9", []).append(pause_of(load, kill))
            cluster.start(leader)
            start_s = time.monotonic()
            leader = cluster.until_in_sync("t", 3).leader_id
            times.setdefault("in sync again", []).append(time.monotonic() - start_s)

            # Step 2: stop the leader for three sessions. Then it continues.
            def stop(number: int = leader) -> None:
                cluster.send(number, signal.SIGSTOP)

            start_s = time.monotonic()
            times.setdefault("SIGSTOP", []).append(pause_of(load, stop))
            time.sleep(max(0.0, start_s + 3 * SESSION_S - time.monotonic()))
            cluster.send(leader, signal.SIGCONT)
            leader = cluster.until_in_sync("t", 3).leader_id

            # Step 3: shut the leader down, and start it again.
            def shut_down(number: int = leader) -> None:
                cluster.processes[number].terminate()

            times.setdefault("shutdown", []).append(pause_of(load, shut_down))
            cluster.processes[leader].wait(120)
            cluster.start(leader)
            cluster.until_in_sync("t", 3)
        offsets.end()
        count = len(load.acknowledged)
        check_load(cluster, "t", load)
    with capsys.disabled():
        times_text = "; ".join(
            f"{name} " + ", ".join(f"{seconds:.2f}" for seconds in durations)
            for name, durations in times.items()
        )
        print(
            f"\n{cluster_type.__name__}: {count} records, {offsets.commits} commits, "
            f"{offsets.reads} reads; seconds: {times_text}"
        )
