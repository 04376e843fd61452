"""Programs of Kafka use a cluster of three brokers: Streams and the tools.

LOGCORE_FAILOVERS is the number of brokers that are killed under Kafka Streams. Needs Java
17 and Maven. Run by `make interop`.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import kafka_jvm
from support.cluster_load import FAST_RETRIES, Load, confluent_kafka
from support.clusters import Cluster, until
from support.streams_counts import Counts

pytestmark = [pytest.mark.interop, pytest.mark.timeout(3_600)]

FAILOVERS = int(os.environ.get("LOGCORE_FAILOVERS", "20"))
LIMIT_S = 300.0


def test_streams_counts_exactly_once_through_failovers(tmp_path: Path) -> None:
    """Brokers are killed one at a time. Other brokers take over their partitions and
    coordinators.
    """
    rng = random.Random(5)
    words = ["apple", "pear", "plum", "fig"]
    sent_words: Counter[str] = Counter()
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.create("text", 2)
        cluster.create("counts", 2)
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "enable.idempotence": True,
                **FAST_RETRIES,
            }
        )

        def feed(count: int) -> None:
            for _ in range(count):
                line = rng.choices(words, k=3)
                sent_words.update(line)
                producer.produce(
                    "text", " ".join(line).encode(), partition=rng.randrange(2)
                )
            assert producer.flush(120) == 0

        state = tmp_path / "state"
        with kafka_jvm.run_streams(cluster.bootstrap_servers, state, "application"):
            counts = Counts(cluster.bootstrap_servers, 2)
            feed(50)
            until(lambda: counts.latest() == sent_words, "the first counts", LIMIT_S)
            for _ in range(FAILOVERS):
                number = rng.choice([1, 2, 3])
                feed(20)
                cluster.send(number, signal.SIGKILL)
                cluster.processes[number].wait()
                feed(20)
                until(
                    lambda: (
                        sum(counts.latest().values()) > sum(sent_words.values()) - 30
                    ),
                    f"counts without broker {number}",
                    LIMIT_S,
                )
                cluster.start(number)
                for topic in ("text", "__transaction_state", "__consumer_offsets"):
                    cluster.until_in_sync(topic, 3)
            until(lambda: counts.latest() == sent_words, "the last counts", LIMIT_S)
        # Each update increases the count of its word. An equal or lower count would
        # mean that an update was written twice.
        for word, counts_of_word in counts.seen.items():
            assert counts_of_word == sorted(set(counts_of_word)), (word, counts_of_word)
        counts.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("tools") / "cluster") as cluster:
        yield cluster


def tool(cluster: Cluster, program: str, *arguments: str) -> str:
    return kafka_jvm.run_tool(
        f"org.apache.kafka.tools.{program}",
        "--bootstrap-server",
        cluster.bootstrap_servers,
        *arguments,
    )


def test_kafka_topics_shows_partitions_that_lack_replicas(cluster: Cluster) -> None:
    options = ("--partitions", "3", "--replication-factor", "3")
    tool(cluster, "TopicCommand", "--create", "--topic", "shown", *options)
    output = tool(cluster, "TopicCommand", "--describe", "--topic", "shown")
    assert "PartitionCount: 3" in output and "ReplicationFactor: 3" in output
    describe = ("TopicCommand", "--describe", "--under-replicated-partitions")
    for index in range(3):
        cluster.until_in_sync("shown", 3, index)
    assert "shown" not in tool(cluster, *describe)
    cluster.kill(3)
    until(
        lambda: len(cluster.partition("shown", 0, 1).isr_nodes) == 2,
        "the ISR is smaller",
    )
    assert tool(cluster, *describe).count("Topic: shown") == 3
    cluster.start(3)
    for index in range(3):
        cluster.until_in_sync("shown", 3, index)


def test_kafka_leader_election_elects_the_preferred_leader(cluster: Cluster) -> None:
    cluster.create("elected")
    preferred = cluster.until_in_sync("elected", 3).leader_id
    assert cluster.stop(preferred) == 0
    cluster.start(preferred)
    cluster.until_in_sync("elected", 3)
    assert cluster.partition("elected").leader_id != preferred
    output = tool(
        cluster,
        "LeaderElectionCommand",
        "--election-type", "preferred", "--topic", "elected", "--partition", "0",
    )  # fmt: skip
    assert "Successfully completed" in output
    assert cluster.partition("elected").leader_id == preferred


def test_kafka_reassign_partitions_moves_replicas(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.create("moved", 1, 2)
    load = Load(cluster, "moved")
    load.until_more()
    before = cluster.until_in_sync("moved", 2)
    new_replica = ({1, 2, 3} - {*before.replica_nodes}).pop()
    target = [new_replica, before.replica_nodes[0]]
    plan = tmp_path / "plan.json"
    plan.write_text(
        '{"version":1,"partitions":[{"topic":"moved","partition":0,"replicas":'
        f"{target}}}]}}"
    )
    program = "reassign.ReassignPartitionsCommand"
    options = ("--reassignment-json-file", str(plan))
    output = tool(cluster, program, *options, "--execute")
    assert "Successfully started partition reassignment" in output
    until(
        lambda: "is completed" in tool(cluster, program, *options, "--verify"),
        "the move is complete",
    )
    assert sorted(cluster.partition("moved").replica_nodes) == sorted(target)
    load.until_more()
    load.end()


def test_kafka_log_dirs_shows_the_replicas_of_each_broker(cluster: Cluster) -> None:
    cluster.create("sized")
    cluster.until_in_sync("sized", 3)
    output = tool(cluster, "LogDirsCommand", "--describe", "--topic-list", "sized")
    assert output.count('"partition":"sized-0"') == 3


def test_kafka_transactions_shows_an_open_transaction(cluster: Cluster) -> None:
    cluster.create("open")
    producer: Any = confluent_kafka.Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "transactional.id": "tool",
            "transaction.timeout.ms": 600_000,
        }
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("open", b"x", partition=0)
    producer.flush(60)
    program = "TransactionsCommand"
    assert "tool" in tool(cluster, program, "list")
    output = tool(cluster, program, "describe", "--transactional-id", "tool")
    assert "Ongoing" in output and "open-0" in output
    partition_options = ("--topic", "open", "--partition", "0")
    producers = tool(
        cluster, program, "describe-producers", *partition_options
    ).splitlines()
    start = producers[1].split()[-1]
    tool(cluster, program, "abort", *partition_options, "--start-offset", start)
    after = tool(
        cluster, program, "describe-producers", *partition_options
    ).splitlines()
    assert after[1].split()[-1] == "None"
