"""Three brokers as real processes, with real clients: topics, groups, failures."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import recordbatch
from logcore.registry import open_registry, paths
from netshim import wire
from netshim.cluster import registry_nodes
from netshim.wire import codes
from support.cluster_load import Load, check_load, check_replica_files
from support.clusters import Cluster, until

confluent_kafka = pytest.importorskip("confluent_kafka")
admin_client = pytest.importorskip("confluent_kafka.admin")


@pytest.mark.long
def test_a_topic_is_created_used_changed_and_deleted(calm: Cluster) -> None:
    created = calm.create("orders", 3, retention_ms="86400000")
    assert created.replication_factor == 3
    partitions = calm.metadata("orders").partitions
    assert {partition.leader_id for partition in partitions} == {1, 2, 3}
    assert all(len(partition.isr_nodes) == 3 for partition in partitions)
    load = Load(calm, "orders")
    load.until_more()
    check_load(calm, "orders", load)

    admin = admin_client.AdminClient({"bootstrap.servers": calm.bootstrap_servers})
    resource = admin_client.ConfigResource("TOPIC", "orders")
    described = admin.describe_configs([resource])[resource].result()
    assert described["retention.ms"].value == "86400000"
    new = admin_client.NewPartitions("orders", 5)
    admin.create_partitions([new])["orders"].result()
    assert len(calm.metadata("orders").partitions) == 5
    entry = admin_client.ConfigEntry
    resource.add_incremental_config(
        entry(
            "retention.ms",
            "5000",
            incremental_operation=admin_client.AlterConfigOpType.SET,
        )
    )
    admin.incremental_alter_configs([resource])[resource].result()
    for number in (1, 2, 3):
        until(
            lambda number=number: (
                '"retention.ms":"5000"'
                in (calm.path / str(number) / "logcore.topics").read_text()
            ),
            "the setting reaches each broker",
        )
    admin.delete_topics(["orders"])["orders"].result()
    # The broker of the next request may not have read the change yet.
    until(
        lambda: calm.metadata("orders").error_code == codes.UNKNOWN_TOPIC_OR_PARTITION,
        "the broker that is asked has removed the topic",
    )
    until(
        lambda: not list(calm.path.glob("*/orders-*")),
        "the replicas are removed everywhere",
    )
    calm.create("orders", 1)


def test_a_topic_that_the_registry_lost_keeps_its_replicas(calm: Cluster) -> None:
    """Brokers treated the missing nodes of the topic as a deletion."""
    calm.create("lost")
    calm.until_in_sync("lost", 3)
    with open_registry(calm.path / "cluster", topics="truth") as registry:
        parent = registry_nodes.partitions_path("lost")
        partition = f"{parent}/0"
        (topic_id,) = registry.children(partition)
        state = f"{partition}/{topic_id}"
        for path in (state, partition, parent, paths.topic("lost")):
            registry.delete(path)

        def add(value: bytes | None) -> bytes:
            assert value is not None
            note = registry_nodes.unpack_changes(value, registry_nodes.changes_of(1))
            return registry_nodes.pack_changes(
                note.with_changes([("lost", registry_nodes.WHOLE_TOPIC)])
            )

        registry.update(registry_nodes.changes_of(1), add)
    for number in (1, 2, 3):
        until(
            lambda number=number: (
                "topic lost is not in the registry" in calm.log(number)
            ),
            f"the report of broker {number}",
        )
    calm.create("next")  # replicas are placed and removed again
    calm.until_in_sync("next", 3)
    for number in (1, 2, 3):
        assert (calm.path / str(number) / "lost-0").is_dir()


@pytest.mark.long
def test_added_partitions_have_leaders_and_as_many_replicas(calm: Cluster) -> None:
    calm.create("grown")
    request_type = wire.CREATE_PARTITIONS.Request
    request = request_type(
        topics=[request_type.Topic(name="grown", count=3, assignments=None)],
        timeout_ms=30_000,
    )
    result = calm.ask(2, wire.CREATE_PARTITIONS, request).results[0]
    assert result.error_code == codes.NONE, result
    for index in range(3):
        calm.until_in_sync("grown", 3, index)


@pytest.mark.long
def test_requests_that_a_cluster_refuses(calm: Cluster) -> None:
    calm.create("t", factor=4, expected=codes.INVALID_REPLICATION_FACTOR)
    calm.create("t")
    calm.create("t", expected=codes.TOPIC_ALREADY_EXISTS)


def test_settings_of_brokers_are_those_of_the_cluster(calm: Cluster) -> None:
    """The default replication factor was reported as 1, and only one broker was listed."""
    request = wire.DESCRIBE_CONFIGS.Request
    resources = [
        request.Resource(
            resource_type=4,
            resource_name=name,
            configuration_keys=["default.replication.factor"],
        )
        for name in ("2", "1")
    ]
    own, other = calm.ask(
        2, wire.DESCRIBE_CONFIGS, request(resources=resources)
    ).results
    assert [config.value for config in own.configs] == ["3"]
    assert other.error_code == codes.INVALID_REQUEST
    assert other.error_message == "expected 2, the id of this broker, or an empty name"
    listed = calm.ask(
        2,
        wire.LIST_CONFIG_RESOURCES,
        wire.LIST_CONFIG_RESOURCES.Request(resource_types=[4]),
    )
    names = [resource.resource_name for resource in listed.config_resources]
    assert names == ["1", "2", "3"]


@pytest.mark.long
def test_only_the_leader_accepts_records(calm: Cluster) -> None:
    calm.create("led")
    first = calm.partition("led")
    other = next(n for n in (1, 2, 3) if n != first.leader_id)
    topic_id = calm.metadata("led").topic_id
    kind = wire.FETCH.Request.Topic
    for leader_epoch, expected in ((-1, codes.NOT_LEADER_OR_FOLLOWER), (0, codes.NONE)):
        request = wire.FETCH.Request(
            max_wait_ms=0,
            min_bytes=0,
            topics=[
                kind(
                    topic_id=topic_id,
                    partitions=[
                        kind.Partition(
                            partition=0,
                            current_leader_epoch=leader_epoch,
                            fetch_offset=0,
                            partition_max_bytes=1_000,
                        )
                    ],
                )
            ],
        )
        part = calm.ask(other, wire.FETCH, request).responses[0].partitions[0]
        assert part.error_code == expected
    offsets = wire.LIST_OFFSETS.Request.Topic
    asked = wire.LIST_OFFSETS.Request(
        topics=[
            offsets(
                name="led",
                partitions=[offsets.Partition(partition_index=0, timestamp=-1)],
            )
        ]
    )
    result = calm.ask(other, wire.LIST_OFFSETS, asked).topics[0].partitions[0]
    assert result.error_code == codes.NOT_LEADER_OR_FOLLOWER
    result = calm.ask(first.leader_id, wire.LIST_OFFSETS, asked).topics[0].partitions[0]
    assert (result.error_code, result.offset) == (codes.NONE, 0)


def test_followers_get_the_high_watermark_without_more_records(calm: Cluster) -> None:
    """The leader delays the high watermark for some milliseconds, to send it together
    with new records.
    """
    calm.create("single")
    entry = calm.until_in_sync("single", 3)
    topic_id = calm.metadata("single").topic_id
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": calm.bootstrap_servers, "acks": "all"}
    )
    producer.produce("single", b"v")
    assert producer.flush(60) == 0
    topic_type = wire.FETCH.Request.Topic
    part = topic_type.Partition(
        partition=0, current_leader_epoch=entry.leader_epoch, partition_max_bytes=1_000
    )
    request = wire.FETCH.Request(
        max_wait_ms=0, topics=[topic_type(topic_id=topic_id, partitions=[part])]
    )
    for number in {1, 2, 3} - {entry.leader_id}:

        def is_shown(number: int = number) -> bool:
            partition = calm.ask(number, wire.FETCH, request).responses[0].partitions[0]
            return bool(partition.high_watermark == 1 and partition.records)

        until(is_shown, f"broker {number} shows the record")


def test_refusals_of_other_brokers_name_the_leader(calm: Cluster) -> None:
    """Clients then continue with the leader, without a request for metadata."""
    calm.create("elsewhere")
    first = calm.until_in_sync("elsewhere", 3)
    other = next(n for n in (1, 2, 3) if n != first.leader_id)
    topic_id = calm.metadata("elsewhere").topic_id
    records = recordbatch.encode([(None, b"v")], now_ms=1)
    kind = wire.PRODUCE.Request.Topic
    produce = wire.PRODUCE.Request(
        acks=-1,
        timeout_ms=1_000,
        topic_data=[
            kind(
                name="elsewhere",
                topic_id=topic_id,
                partition_data=[kind.Partition(index=0, records=records)],
            )
        ],
    )
    topic_type = wire.FETCH.Request.Topic
    asked = topic_type(
        topic="elsewhere",
        topic_id=topic_id,
        partitions=[topic_type.Partition(partition=0)],
    )
    fetch = wire.FETCH.Request(max_wait_ms=0, topics=[asked])

    def leader(response: Any, part: Any) -> tuple[int, int, list[tuple[int, int]]]:
        named = part.current_leader
        ports = [(each.node_id, each.port) for each in response.node_endpoints]
        return named.leader_id, named.leader_epoch, ports

    named = (
        first.leader_id,
        first.leader_epoch,
        [(first.leader_id, calm.ports[first.leader_id])],
    )
    for version in (9, 10, 13):
        response = calm.ask(other, wire.PRODUCE, produce, max_version=version)
        part = response.responses[0].partition_responses[0]
        assert part.error_code == codes.NOT_LEADER_OR_FOLLOWER
        assert leader(response, part) == (named if version >= 10 else (-1, -1, []))
    for version in (15, 16, 18):
        response = calm.ask(other, wire.FETCH, fetch, max_version=version)
        part = response.responses[0].partitions[0]
        assert part.error_code == codes.NOT_LEADER_OR_FOLLOWER
        assert leader(response, part) == (named if version >= 16 else (-1, -1, []))


def test_a_killed_leader_loses_nothing(cluster: Cluster) -> None:
    cluster.create("t")
    load = Load(cluster, "t")
    load.until_more()
    cluster.kill(cluster.until_in_sync("t", 3).leader_id)
    load.until_more()
    check_load(cluster, "t", load)


@pytest.mark.slow
def test_killed_leaders_lose_nothing(cluster: Cluster) -> None:
    cluster.create("t")
    load = Load(cluster, "t")
    for _ in range(3):
        load.until_more()
        leader = cluster.until_in_sync("t", 3).leader_id
        cluster.kill(leader)
        load.until_more()
        cluster.start(leader)
    cluster.until_in_sync("t", 3)
    check_load(cluster, "t", load)
    check_replica_files(cluster, "t")


@pytest.mark.slow
def test_a_stopped_leader_is_replaced_and_loses_nothing(cluster: Cluster) -> None:
    """SIGSTOP for longer than the session; then the former leader resumes."""
    cluster.create("t")
    load = Load(cluster, "t", **{"request.timeout.ms": 2_000})
    load.until_more()
    before = cluster.until_in_sync("t", 3)
    cluster.send(before.leader_id, signal.SIGSTOP)
    other = next(n for n in (1, 2, 3) if n != before.leader_id)
    until(
        lambda: (
            cluster.partition("t", 0, other).leader_id not in (-1, before.leader_id)
        ),
        "another leader",
    )
    load.until_more()
    cluster.send(before.leader_id, signal.SIGCONT)
    cluster.until_in_sync("t", 3)
    load.until_more()
    check_load(cluster, "t", load)
    assert "session of this broker is over" in cluster.log(before.leader_id)
    check_replica_files(cluster, "t")


@pytest.mark.slow
def test_all_brokers_are_killed_at_once(cluster: Cluster) -> None:
    cluster.create("t")
    load = Load(cluster, "t")
    load.until_more(200)
    for number in (1, 2, 3):
        cluster.processes[number].kill()
    for number in (1, 2, 3):
        cluster.processes[number].wait()
    for number in (1, 2, 3):
        cluster.begin(number)
    for number in (1, 2, 3):
        cluster.await_start(number)
    load.until_more()
    cluster.until_in_sync("t", 3)
    check_load(cluster, "t", load)


@pytest.mark.slow
def test_a_wiped_broker_joins_as_a_follower(cluster: Cluster) -> None:
    cluster.create("t")
    load = Load(cluster, "t")
    load.until_more()
    leader = cluster.until_in_sync("t", 3).leader_id
    cluster.kill(leader)
    shutil.rmtree(cluster.path / str(leader))
    load.until_more()
    cluster.start(leader)
    cluster.until_in_sync("t", 3)
    load.until_more()
    check_load(cluster, "t", load)
    check_replica_files(cluster, "t")


@pytest.mark.slow
def test_a_clean_shutdown_moves_the_leaders_first(cluster: Cluster) -> None:
    cluster.create("t", 3)
    for index in range(3):
        cluster.until_in_sync("t", 3, index)
    load = Load(cluster, "t")
    load.until_more()
    assert cluster.stop(2) == 0
    for index in range(3):
        assert cluster.partition("t", index, 1).leader_id in (1, 3)
    load.until_more()
    cluster.start(2)
    for index in range(3):
        cluster.until_in_sync("t", 3, index)
    check_load(cluster, "t", load)


@pytest.mark.slow
def test_too_few_replicas_refuse_acks_all(cluster: Cluster) -> None:
    cluster.create("t")
    leader = cluster.until_in_sync("t", 3).leader_id
    for number in {1, 2, 3} - {leader}:
        cluster.kill(number)
    until(
        lambda: len(cluster.partition("t", 0, leader).isr_nodes) == 1,
        "the others leave the ISR",
    )
    outcomes: dict[str, list[Any]] = {"all": [], "1": []}
    for acks, errors in outcomes.items():
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": f"127.0.0.1:{cluster.ports[leader]}",
                "acks": acks,
                "retries": 0,
                "message.timeout.ms": 30_000,
            }
        )
        producer.produce(
            "t", b"1", on_delivery=lambda error, _, errors=errors: errors.append(error)
        )
        producer.flush(60)
    refused = outcomes["all"][0]
    assert refused.code() == confluent_kafka.KafkaError.NOT_ENOUGH_REPLICAS
    assert outcomes["1"] == [None]


def offset_of(client: Any, partition: Any) -> int | None:
    """Return the committed offset; None if the coordinator has moved."""
    try:
        (committed,) = client.committed([partition], timeout=90)
    except confluent_kafka.KafkaException as error:
        # librdkafka does not repeat a request with this answer.
        assert error.args[0].code() == confluent_kafka.KafkaError.NOT_COORDINATOR
        return None
    offset: int = committed.offset
    return offset


@pytest.mark.slow
def test_committed_offsets_survive_their_coordinator(cluster: Cluster) -> None:
    cluster.create("t")
    load = Load(cluster, "t")
    load.until_more()
    load.end()

    def consumer() -> Any:
        opened = confluent_kafka.Consumer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "group.id": "g",
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
            }
        )
        return opened

    partition = confluent_kafka.TopicPartition("t", 0)
    committed = 0
    for _ in range(3):
        client = consumer()
        committed += 7
        partition.offset = committed
        client.commit(offsets=[partition], asynchronous=False)
        client.close()
        coordinator = cluster.until_in_sync("__consumer_offsets", 3).leader_id
        cluster.kill(coordinator)
        client = consumer()
        offset = until(lambda client=client: offset_of(client, partition), "an answer")
        assert offset == committed
        client.close()
        cluster.start(coordinator)


@pytest.mark.slow
def test_a_group_continues_after_a_failover(cluster: Cluster) -> None:
    cluster.create("t", 3)
    load = Load(cluster, "t")
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6_000,
        }
    )
    consumer.subscribe(["t"])
    consumed: set[int] = set()

    def read(count: int) -> None:
        before = len(consumed)
        end_s = time.monotonic() + 90
        while len(consumed) < before + count:
            assert time.monotonic() < end_s
            message = consumer.poll(1)
            if message is not None and message.error() is None:
                consumed.add(int(message.value()))

    read(50)
    cluster.kill(cluster.until_in_sync("__consumer_offsets", 3).leader_id)
    read(200)
    acknowledged = load.end()
    end_s = time.monotonic() + 90
    while not acknowledged.keys() <= consumed:
        assert time.monotonic() < end_s, "records are missing"
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            consumed.add(int(message.value()))
    consumer.close()


@pytest.mark.slow
def test_leaders_are_elected_on_request(cluster: Cluster) -> None:
    cluster.create("t")
    preferred = cluster.until_in_sync("t", 3).leader_id
    cluster.kill(preferred)
    other = next(n for n in (1, 2, 3) if n != preferred)
    until(
        lambda: cluster.partition("t", 0, other).leader_id not in (-1, preferred),
        "another leader",
    )
    kind = wire.ELECT_LEADERS.Request.Topic

    def elect(election_type: int = 0) -> Any:
        request = wire.ELECT_LEADERS.Request(
            election_type=election_type,
            topic_partitions=[kind(topic="t", partitions=[0])],
            timeout_ms=10_000,
        )
        response = cluster.ask(other, wire.ELECT_LEADERS, request)
        return response.replica_election_results[0].partition_result[0].error_code

    assert elect() == codes.PREFERRED_LEADER_NOT_AVAILABLE
    assert elect(1) == codes.ELECTION_NOT_NEEDED
    cluster.start(preferred)
    cluster.until_in_sync("t", 3)
    assert elect() == codes.NONE
    assert cluster.partition("t").leader_id == preferred
    assert elect() == codes.ELECTION_NOT_NEEDED


@pytest.mark.slow
def test_a_directory_belongs_to_one_broker_of_one_cluster(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.create("t")
    cluster.stop(1)
    with pytest.raises(logcore.InvalidConfigError, match="broker in a cluster"):
        logcore.open_dir(cluster.path / "1")
    # A copied directory under another number.
    shutil.copytree(cluster.path / "2", cluster.path / "4")
    meta = cluster.path / "4/meta.properties"
    meta.write_text(meta.read_text().replace("node.id=2", "node.id=4"))
    cluster.begin(4)
    assert cluster.processes[4].wait(60) == 2
    assert "same directory.id" in cluster.log(4)
    # A directory of another cluster.
    with Cluster(tmp_path / "other", 1, config=()) as other:
        other.stop(1)
        shutil.copytree(tmp_path / "other/1", cluster.path / "5")
    cluster.begin(5)
    assert cluster.processes[5].wait(60) == 2
    assert "another cluster.id" in cluster.log(5)


@pytest.mark.slow
def test_a_number_in_use_is_refused(cluster: Cluster) -> None:
    first = cluster.processes[2]
    cluster.ports[2] = 0
    (cluster.path / "2").rename(cluster.path / "moved")
    cluster.begin(2)
    assert cluster.processes[2].wait(60) == 2
    assert "another broker has the number 2" in cluster.log(2)
    first.kill()
    first.wait()
    if first.stdout is not None:
        first.stdout.close()


@pytest.mark.slow
def test_replicas_of_a_topic_that_the_registry_lost_are_kept(cluster: Cluster) -> None:
    """A registry from an old backup must not delete data."""
    cluster.create("t")
    load = Load(cluster, "t")
    load.until_more()
    load.end()
    for number in (1, 2, 3):
        cluster.stop(number)
    topics = cluster.path / "cluster.registry/brokers/topics"
    shutil.rmtree(topics / "t")
    (topics / "t.node").unlink()
    for number in (1, 2, 3):
        cluster.start(number)
    assert cluster.metadata("t").error_code == codes.UNKNOWN_TOPIC_OR_PARTITION
    assert all((cluster.path / f"{number}/t-0").exists() for number in (1, 2, 3))
    until(lambda: "topic t is not in the registry" in cluster.log(1), "the warning")


@pytest.mark.long
def test_the_command_starts_and_stops_a_cluster(tmp_path: Path) -> None:
    import subprocess
    import sys

    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "netshim",
            "cluster",
            str(tmp_path / "c"),
            "--port",
            "0",
            "--durability",
            "os",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert "serving" in line, process.stderr.read()
    servers = line.rsplit(" ", 1)[1].strip()
    assert servers.count(",") == 2
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "acks": "all"})
    failures: list[Any] = []
    producer.produce("t", b"1", on_delivery=lambda error, _: failures.append(error))
    assert producer.flush(60) == 0
    assert failures == [None]
    process.terminate()
    assert process.wait(90) == 0
    process.stdout.close()
    process.stderr.close()
    rows = json.loads(
        "["
        + (tmp_path / "c/1/logcore.topics")
        .read_text()
        .split("\n", 1)[1]
        .strip()
        .replace("\n", ",")
        + "]"
    )
    assert rows


@pytest.mark.long
def test_broker_without_a_cluster_does_not_import_netshim_cluster() -> None:
    import subprocess
    import sys

    code = (
        "import sys, netshim.command, netshim.server;"
        "print([m for m in sys.modules if m.startswith('netshim.cluster.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_partition_moves_to_other_brokers_under_load(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", 4) as cluster:
        cluster.create("t")
        before = cluster.until_in_sync("t", 3)
        spare = ({1, 2, 3, 4} - {*before.replica_nodes}).pop()
        kind = wire.ALTER_PARTITION_REASSIGNMENTS.Request.Topic

        def move(target: list[int] | None) -> int:
            request = wire.ALTER_PARTITION_REASSIGNMENTS.Request(
                timeout_ms=30_000,
                topics=[
                    kind(
                        name="t",
                        partitions=[kind.Partition(partition_index=0, replicas=target)],
                    )
                ],
            )
            response = cluster.ask(spare, wire.ALTER_PARTITION_REASSIGNMENTS, request)
            code: int = response.responses[0].partitions[0].error_code
            return code

        def moves() -> list[Any]:
            request = wire.LIST_PARTITION_REASSIGNMENTS.Request(
                timeout_ms=30_000, topics=None
            )
            response = cluster.ask(spare, wire.LIST_PARTITION_REASSIGNMENTS, request)
            return list(response.topics)

        assert move([1, 9]) == codes.INVALID_REPLICA_ASSIGNMENT
        assert move(None) == codes.NO_REASSIGNMENT_IN_PROGRESS
        load = Load(cluster, "t")
        load.until_more()
        # The leader is among the brokers that the partition leaves.
        target = [spare, *[n for n in before.replica_nodes if n != before.leader_id]]
        assert move(target) == codes.NONE
        until(lambda: not moves(), "the move ends")
        load.until_more()
        # The brokers read the end of the move one after another.
        until(
            lambda: sorted(cluster.partition("t").replica_nodes) == sorted(target),
            "each broker reads the assignment",
        )
        assert cluster.until_in_sync("t", 3).leader_id in target
        former = cluster.path / str(before.leader_id) / "t-0"
        until(lambda: not former.exists(), "the former replica is removed")
        # A move to a broker that is down waits, and can be cancelled.
        cluster.kill(before.leader_id)
        assert move([before.leader_id, *target[:2]]) == codes.NONE
        until(lambda: len(moves()) == 1, "each broker reads the move")
        load.until_more()
        assert move(None) == codes.NONE
        until(lambda: not moves(), "the cancelled move ends")
        assert sorted(cluster.partition("t", 0, spare).replica_nodes) == sorted(target)
        check_load(cluster, "t", load)


@pytest.mark.slow
def test_follower_below_the_log_start_leads_at_the_right_offset(
    cluster: Cluster,
) -> None:
    """The follower restarts its log at the start of the leader, before it has copied a
    batch.
    """
    cluster.create("t")
    preferred = cluster.until_in_sync("t", 3).leader_id
    cluster.kill(preferred)
    load = Load(cluster, "t")
    load.until_more()
    end = len(load.end())
    admin = admin_client.AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    everything = confluent_kafka.TopicPartition("t", 0, -1)
    deleted = admin.delete_records([everything])[everything].result()
    assert deleted.low_watermark == end
    cluster.start(preferred)
    cluster.until_in_sync("t", 3)
    assert "continues at" in cluster.log(preferred)
    partitions = [confluent_kafka.TopicPartition("t", 0)]
    elected = admin.elect_leaders(
        confluent_kafka.ElectionType.PREFERRED, partitions
    ).result()
    assert all(error is None for error in elected.values()), elected
    until(lambda: cluster.partition("t").leader_id == preferred, "the election")
    load = Load(cluster, "t")
    load.until_more()
    offsets = [offset for _, offset in load.end().values()]
    assert min(offsets) == end


@pytest.mark.long
def test_topics_whose_leaders_are_late_are_created_with_error_7(
    cluster: Cluster,
) -> None:
    """The only broker of these topics is stopped. The topics exist, and the broker
    leads them after its restart.
    """
    cluster.kill(2)
    until(lambda: len(brokers_of(cluster)) == 2, "broker 1 reads that broker 2 is dead")
    kind = wire.CREATE_TOPICS.Request.Topic
    request = wire.CREATE_TOPICS.Request(
        topics=[
            kind(
                name=name,
                num_partitions=-1,
                replication_factor=-1,
                assignments=[kind.Assignment(partition_index=0, broker_ids=[2])],
            )
            for name in ("a", "b")
        ],
        timeout_ms=300,
    )
    late = cluster.ask(1, wire.CREATE_TOPICS, request).topics
    assert [entry.error_code for entry in late] == [codes.REQUEST_TIMED_OUT] * 2
    again = cluster.ask(1, wire.CREATE_TOPICS, request).topics
    assert [entry.error_code for entry in again] == [codes.TOPIC_ALREADY_EXISTS] * 2
    assert [cluster.partition(name).leader_id for name in ("a", "b")] == [-1, -1]
    cluster.start(2)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.bootstrap_servers, "message.timeout.ms": 60_000}
    )
    errors: list[Any] = []
    for name in ("a", "b"):
        producer.produce(name, b"1", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    assert errors == [None, None]


def brokers_of(cluster: Cluster) -> list[int]:
    """Return the brokers that broker 1 reports as registered."""
    metadata = cluster.ask(1, wire.METADATA, wire.METADATA.Request(topics=[]))
    return [broker.node_id for broker in metadata.brokers]
