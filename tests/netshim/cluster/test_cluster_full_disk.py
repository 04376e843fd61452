"""A cluster in which the disk of one broker is full for a while."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logcore.recordbatch import encode
from netshim import wire
from netshim.wire import codes
from support.cluster_load import Load, check_load, check_replica_files, read_all
from support.clusters import Cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_DISK_BYTES = 24 << 20
_LEFT_BYTES = 4 << 20
#: Each record of the load has a header of this size, so that disks fill soon.
_PADDING_BYTES = 20_000
#: refusal() sends records with the values -1, -2, ... to test whether the leader
#: refuses records.
_probes = itertools.count(1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The directory of broker 3, on a file system of its own."""
    path = tmp_path / "cluster" / "3"
    path.mkdir(parents=True)
    size = f"size={_DISK_BYTES}"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs the program mount")
    if done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def assign(cluster: Cluster, topic: str, brokers: list[int]) -> None:
    """Create a topic with one partition, which the first of `brokers` leads."""
    kind = wire.CREATE_TOPICS.Request.Topic
    request = wire.CREATE_TOPICS.Request(
        topics=[
            kind(
                name=topic,
                num_partitions=-1,
                replication_factor=-1,
                assignments=[kind.Assignment(partition_index=0, broker_ids=brokers)],
            )
        ],
        timeout_ms=30_000,
    )
    created = cluster.ask(1, wire.CREATE_TOPICS, request).topics[0]
    assert not created.error_code, created


def test_follower_with_a_full_disk_leaves_and_returns(
    small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    with Cluster(tmp_path / "cluster", durability="os") as cluster:
        assign(cluster, "t", [1, 2, 3])
        cluster.until_in_sync("t", 3)
        filler.write_bytes(bytes(_DISK_BYTES - _LEFT_BYTES))
        load = Load(cluster, "t", padding=bytes(_PADDING_BYTES))
        until(lambda: "No space left" in cluster.log(3), "broker 3 logs the reason")
        # Without the pause, a fast machine could write more records than fit on the
        # disk of broker 3 after space is freed.
        load.pause()
        entry = cluster.until_in_sync("t", 2)
        assert (entry.leader_id, sorted(entry.isr_nodes)) == (1, [1, 2])
        assert cluster.processes[3].poll() is None, cluster.log(3)
        # An operator frees space.
        with contextlib.suppress(FileNotFoundError):
            filler.unlink()
        cluster.until_in_sync("t", 3)
        check_load(cluster, "t", load)
        check_replica_files(cluster, "t")


def test_leader_with_a_full_disk_refuses_records_and_continues(
    small_disk: Path, tmp_path: Path
) -> None:
    """The broker remains the leader. Acknowledged records can be read, and appends
    succeed once space is free.
    """
    filler = small_disk / "filler"
    with Cluster(tmp_path / "cluster", durability="os") as cluster:
        assign(cluster, "t", [3, 1, 2])
        cluster.until_in_sync("t", 3)
        filler.write_bytes(bytes(_DISK_BYTES - _LEFT_BYTES))
        load = Load(cluster, "t", padding=bytes(_PADDING_BYTES))
        refused = until(lambda: refusal(cluster), "the leader refuses records")
        assert refused.error_code == codes.KAFKA_STORAGE_ERROR, refused
        until(
            lambda: "KAFKA_STORAGE_ERROR" in cluster.log(3), "broker 3 logs the error"
        )
        acknowledged = dict(load.acknowledged)
        assert acknowledged
        stored = read_all(cluster, "t")
        assert {key: value for value, key in acknowledged.items()} == {
            key: stored[key] for key in acknowledged.values()
        }
        entry = cluster.until_in_sync("t", 3)
        assert (entry.leader_id, entry.leader_epoch) == (3, 0)
        # An operator frees space; the records of the load still fit.
        load.pause()
        filler.unlink()
        until(lambda: refusal(cluster) is None, "the leader accepts records again")
        check_load(cluster, "t", load)
        check_replica_files(cluster, "t")


def refusal(cluster: Cluster) -> Any:
    """Send a large batch to the leader; return the result if it is an error."""
    value = str(-next(_probes)).encode()
    padding = [("padding", bytes(_PADDING_BYTES))]
    topic = wire.PRODUCE.Request.Topic
    request = wire.PRODUCE.Request(
        acks=-1,
        timeout_ms=10_000,
        topic_data=[
            topic(
                name="t",
                partition_data=[
                    topic.Partition(
                        index=0,
                        records=encode([(None, value, padding)], now_ms=1),
                    )
                ],
            )
        ],
    )
    response = cluster.ask(3, wire.PRODUCE, request, max_version=9)
    result = response.responses[0].partition_responses[0]
    return result if result.error_code else None
