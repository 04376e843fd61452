"""Whole brokers in a simulation: random faults break no promise, and seeded bugs are found.

`make slow` runs 400 schedules; LOGCORE_CLUSTER_SCHEDULES chooses another number. A
failure prints its seed and its steps; run_schedule() with that seed repeats it.
"""

from __future__ import annotations

import os

import pytest

from logcore.directory.open_logs import OpenLogs
from logcore.directory_host import DirectoryHost
from netshim.cluster.fetcher import LeaderFetcher
from netshim.cluster.node import ClusterNode
from netshim.cluster.replicas import ClusterReplicas
from netshim.loop_host import LoopHost
from support.replica_bugs import Bug, find, seeded
from support.simulated_cluster import run_schedule

#: Number of schedules in the fast tests. Each takes one to two seconds.
FAST = 8
SLOW = int(os.environ.get("LOGCORE_CLUSTER_SCHEDULES", "400"))
#: Number of tests that the slow schedules are divided into, so that pytest-xdist can
#: run them in parallel.
PARTS = 8

#: Bugs in modules that support.replica_world, the model of one partition, does not
#: run.
BUGS = [
    Bug(
        "follower reports records that are not synced",
        "R01 R02 R11 R15",
        20,
        (
            (
                LeaderFetcher._next_fetch,
                "followed_partition.log.flush()\n"
                "            followed_partition.follower_state = following.synced(\n"
                "                followed_partition.follower_state,\n"
                "                followed_partition.log.durable_end_offset,\n",
                "followed_partition.follower_state = following.synced(\n"
                "                followed_partition.follower_state,\n"
                "                followed_partition.log.log_end_offset,\n",
            ),
        ),
        options=("cut_all_power", "kill"),
        run=run_schedule,
    ),
    Bug(
        "leader counts records that are not synced",
        "R01 R02 R11 R15",
        20,
        (
            (
                ClusterReplicas._read_end,
                "is_durable=not self._waits_for_disk",
                "is_durable=True",
            ),
        ),
        options=("cut_all_power", "kill"),
        run=run_schedule,
    ),
    Bug(
        "acknowledged at the append",
        "R01 R02 R11 R13",
        20,
        (
            (
                ClusterReplicas.when_committed,
                "if log.high_watermark >= end:",
                "if log.log_end_offset >= end:",
            ),
        ),
        run=run_schedule,
    ),
    Bug(
        "role without a placed replica",
        "R00 R01 R02 R09 R10 R15",
        20,
        (
            (
                ClusterReplicas._role_in_view,
                "if local_topic is None or key[1] not in local_topic.numbers:",
                "if local_topic is None:",
            ),
        ),
        options=("move_back",),
        run=run_schedule,
    ),
    Bug(
        "maintenance ends the transactions of replicas",
        "R00 R12 R15",
        20,
        (
            (
                DirectoryHost.__init__,
                "self.has_coordinator = is_replicated",
                "self.has_coordinator = False",
            ),
            (OpenLogs.open, "if self._is_replicated:", "if False:"),
        ),
        run=run_schedule,
    ),
    Bug(
        "group is loaded before its records are committed",
        "R13",
        20,
        (
            (
                LoopHost.load,
                "self._topic.when_committed(self._read_committed)",
                "self._read_committed(None)",
            ),
        ),
        run=run_schedule,
    ),
    Bug(
        "empty disk has the id of the former disk",
        "R01 R02 R11",
        20,
        (
            (
                ClusterNode.open,
                "self._fs, real, cluster_id, self.member.settings.node_id\n    )",
                "self._fs, real, cluster_id, self.member.settings.node_id\n    )\n"
                "    self._disk = f'disk of {self.member.settings.node_id}'",
            ),
        ),
        options=("wipe", "kill", "cut_all_power"),
        run=run_schedule,
    ),
    Bug(
        "log is changed after its role has ended",
        "R00 R01 R02 R10 R15",
        20,
        (
            (
                LeaderFetcher.drop,
                "with partition.mutex:\n"
                "            # The thread holds the mutex while it uses the log.\n"
                "            partition.is_dropped = True",
                "pass",
            ),
        ),
        run=run_schedule,
    ),
]


@pytest.mark.parametrize("seed", range(FAST))
def test_random_faults_break_no_promise(seed: int) -> None:
    world = run_schedule(seed)
    assert world.acknowledged > 100
    assert world.reads > 100
    assert world.offset_reads > 10


@pytest.mark.slow
@pytest.mark.timeout(86_400)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_faults_break_no_promise(part: int) -> None:
    for seed in range(FAST + part, FAST + SLOW, PARTS):
        run_schedule(seed)


def test_schedule_repeats_exactly() -> None:
    first, second = (run_schedule(5) for _ in range(2))
    assert first.steps == second.steps
    assert first.threads.steps == second.threads.steps


def test_each_bug_can_be_seeded() -> None:
    """`make slow` seeds them; a text that has changed fails here."""
    for bug in BUGS:
        with seeded(*bug.changes):
            pass


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.name.replace(" ", "-")) for bug in BUGS]
)
def test_seeded_bug_is_found(bug: Bug) -> None:
    seed_and_rule = find(bug)
    assert seed_and_rule is not None, f"not found in {bug.within} schedules"
    _, rule = seed_and_rule
    assert rule in bug.rules.split()
