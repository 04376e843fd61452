"""A cluster in which the disk of one broker is full for a while."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from netshim import wire
from support.cluster_load import Load, judge, judge_files
from support.clusters import Cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_DISK_BYTES = 24 << 20
_LEFT_BYTES = 4 << 20
#: Each record of the load has a header of this size, so that disks fill soon.
_PADDING_BYTES = 20_000


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
        pytest.skip(f"may not mount a file system: {done.stderr}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def assign(cluster: Cluster, topic: str, brokers: list[int]) -> None:
    """Create a topic whose first broker leads."""
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
        one = cluster.until_in_sync("t", 2)
        assert (one.leader_id, sorted(one.isr_nodes)) == (1, [1, 2])
        assert cluster.processes[3].poll() is None, cluster.log(3)
        until(lambda: "No space left" in cluster.log(3), "the log names the reason")
        load.until_more()
        # An operator frees space; the records of the load still fit.
        load.pause()
        with contextlib.suppress(FileNotFoundError):
            filler.unlink()
        cluster.until_in_sync("t", 3)
        judge(cluster, "t", load)
        judge_files(cluster, "t")
