"""A broker whose directory is also written by other processes: its clients and the
consumers of those processes share groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import LogDir
from logcore.format.group_records import (
    Subscription,
    assignment_value,
    subscription_value,
)
from logcore.registry import open_registry
from netshim import wire
from netshim.wire import codes
from support.client import Client
from support.group_harness import GroupHarness
from support.pages import blocks

DEADLINE_S = 60
PAGE = Path(__file__).parents[2] / "docs" / "sharing.md"
SOURCE = str(Path(logcore.__file__).resolve().parents[1])


class Program:
    """A program in a process of its own, and the lines that it has printed."""

    def __init__(self, directory: Path, *command: str) -> None:
        environment = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def kill(self) -> None:
        """Kill the process, which may have ended already, and close its output."""
        self.process.send_signal(signal.SIGKILL)
        self._reader.join()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    running: list[Program] = []

    def start(*command: str) -> Program:
        running.append(Program(tmp_path, *command))
        return running[-1]

    yield start
    for program in running:
        program.kill()


def until(condition: Callable[[], bool], condition_text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, condition_text
        time.sleep(0.01)


# -- four terminals --------------------------------------------------------------------


def _snippets() -> dict[str, str]:
    """Return the three programs of the page: producer, member, client."""
    text = PAGE.read_text(encoding="utf-8").splitlines()
    first = text.index("## Four terminals") + 1
    last = text.index("## Groups")
    chosen = [
        block
        for block in blocks(PAGE)
        if block.language == "python" and first < block.line < last
    ]
    return dict(
        zip(
            ("producer", "member", "client"),
            (block.text for block in chosen),
            strict=True,
        )
    )


def _values(directory: Path) -> set[str]:
    """Return all values in the log. The flush makes unsynced records readable for every
    process.
    """
    with logcore.open_dir(directory / "data", shared=True) as data:
        for number in data.partitions("visits"):
            data.partition("visits", number).flush()
        return {record.value.decode() for record in data.topic("visits").read()}


@pytest.mark.long
def test_four_terminals_lose_no_record_when_members_are_killed(
    run: Callable[..., Program], tmp_path: Path
) -> None:
    """The test kills members one after the other, including a Kafka client and its
    broker.
    """
    pytest.importorskip("confluent_kafka")
    programs = _snippets()
    producer = run("-c", programs["producer"])
    until((tmp_path / "data" / "visits-3").is_dir, "the topic")
    members = [run("-c", programs["member"]) for _ in range(2)]
    broker = run("-m", "netshim", "serve", "data", "--shared", "--port", "0")
    until(lambda: bool(broker.lines), "the broker")
    address = broker.lines[0].rpartition(" ")[2]
    client = run("-c", programs["client"].replace("127.0.0.1:9092", address))
    everybody = [*members, client]
    until(
        lambda: all(program.lines for program in everybody),
        "each of the three receives records",
    )

    members[0].kill()
    left = [members[1], client]
    so_far = [len(program.lines) for program in left]
    until(
        lambda: all(
            len(program.lines) > count
            for program, count in zip(left, so_far, strict=True)
        ),
        "the other two continue",
    )
    broker.kill()  # the places of the client are free at once
    client.kill()
    producer.kill()
    written = _values(tmp_path)
    assert len(written) > 100

    def printed() -> set[str]:
        return {line for program in everybody for line in program.lines}

    until(lambda: printed() >= written, "every written value is printed")
    assert printed() == written


# -- requests --------------------------------------------------------------------------


@pytest.fixture
def group_harness(tmp_path: Path) -> Iterator[GroupHarness]:
    with GroupHarness(tmp_path / "data", is_shared=True) as harness:
        harness.logdir.create_topic("orders", 2)
        yield harness


WANTED = subscription_value(Subscription(("orders",), None, (), -1))


def assigned(data: LogDir, consumer: Any) -> list[int]:
    consumer.poll(0)
    return sorted(partition.partition for partition in consumer.assignment())


def test_process_and_wire_consumers_divide_the_partitions(
    group_harness: GroupHarness,
) -> None:
    with group_harness.logdir.consumer(group_id="g", assignors=("range",)) as consumer:
        consumer.subscribe(["orders"])
        group_harness.sleep(100)
        assert assigned(group_harness.logdir, consumer) == [0, 1]
        newcomer = group_harness.join(protocols={"range": WANTED})
        assert not newcomer.is_set
        consumer.poll(0)
        group_harness.sleep(100)
        joined = newcomer.value
        assert joined.error_code == 0 and joined.leader != joined.member_id
        shares = group_harness.sync(joined.member_id, joined.generation_id)
        consumer.poll(0)
        group_harness.sleep(100)
        assert len(assigned(group_harness.logdir, consumer)) == 1
        assert shares.value.assignment in (
            assignment_value([("orders", 0)]),
            assignment_value([("orders", 1)]),
        )
        assert {member.client_host for member in group_harness.describe().members} == {
            "/10.0.0.1",
            f"/pid-{os.getpid()}",
        }

        group_harness.leave((joined.member_id, None))
        group_harness.sleep(100)
        assert assigned(group_harness.logdir, consumer) == [0, 1]


def test_wire_leader_assigns_to_a_process_consumer(group_harness: GroupHarness) -> None:
    first = group_harness.join(protocols={"range": WANTED}).value
    group_harness.sync(
        first.member_id,
        1,
        {first.member_id: assignment_value([("orders", 0), ("orders", 1)])},
    )
    with group_harness.logdir.consumer(group_id="g", assignors=("range",)) as consumer:
        consumer.subscribe(["orders"])
        consumer.poll(0)
        assert (
            group_harness.heartbeat(first.member_id, 1) == codes.REBALANCE_IN_PROGRESS
        )
        again = group_harness.join(first.member_id, protocols={"range": WANTED}).value
        (other,) = {member.member_id for member in again.members} - {first.member_id}
        shares = {first.member_id: [("orders", 0)], other: [("orders", 1)]}
        group_harness.sync(
            first.member_id,
            again.generation_id,
            {name: assignment_value(each) for name, each in shares.items()},
        )
        group_harness.sleep(100)
        assert assigned(group_harness.logdir, consumer) == [1]


def test_commit_of_an_earlier_generation_is_refused(
    group_harness: GroupHarness,
) -> None:
    first = group_harness.join(protocols={"range": WANTED}).value
    group_harness.sync(first.member_id, 1, {first.member_id: b"1"})
    assert (
        group_harness.commit(
            {("orders", 0): 3}, member_id=first.member_id, generation=1
        )
        .value.topics[0]
        .partitions
    )
    with group_harness.logdir.consumer(
        group_id="g", assignors=("range",), enable_auto_commit=False
    ) as consumer:
        consumer.subscribe(["orders"])
        consumer.poll(0)
        for _ in range(12):  # the client does not join again
            group_harness.sleep(5_000)
            consumer.poll(0)
        late = group_harness.commit(
            {("orders", 0): 9}, member_id=first.member_id, generation=1
        ).value
        assert late.topics[0].partitions[0].error_code == codes.UNKNOWN_MEMBER_ID
        assert consumer.committed([("orders", 0)])["orders", 0].offset == 3
    assert group_harness.committed() == {("orders", 0): 3}


def test_new_member_without_a_common_assignor_is_refused(
    group_harness: GroupHarness,
) -> None:
    with group_harness.logdir.consumer(group_id="g", assignors=("range",)) as consumer:
        consumer.subscribe(["orders"])
        group_harness.sleep(100)
        consumer.poll(0)
        refused = group_harness.join(protocols={"roundrobin": WANTED}).value
        assert refused.error_code == codes.INCONSISTENT_GROUP_PROTOCOL


def test_group_too_large_for_a_node_is_refused(group_harness: GroupHarness) -> None:
    assert (
        group_harness.join(protocols={"range": b"x" * 1_048_000}).value.error_code
        == codes.UNKNOWN_SERVER_ERROR
    )
    assert (
        group_harness.join(group="", version=3).value.error_code
        == codes.INVALID_GROUP_ID
    )
    assert group_harness.heartbeat("m", 1, group="") == codes.INVALID_GROUP_ID
    assert (
        group_harness.sync("m", 1, group="").value.error_code == codes.INVALID_GROUP_ID
    )


def test_members_of_an_ended_broker_are_removed(group_harness: GroupHarness) -> None:
    group_harness.form(2)
    group_harness.commit({("orders", 0): 1}, group="other")
    group_harness.restart()
    assert group_harness.describe().group_state == "Empty"
    assert [
        each.group_id for each in group_harness.ask(wire.LIST_GROUPS, 0).groups
    ] == [
        "g",
        "other",
    ]
    assert group_harness.join().value.generation_id > 2


def test_waiting_join_is_answered_when_the_broker_ends(
    group_harness: GroupHarness,
) -> None:
    ids, _ = group_harness.form(1)
    waiting = group_harness.join()
    group_harness.groups.stop(group_harness.now_ms)
    assert waiting.value.error_code == codes.NOT_COORDINATOR
    assert ids


def test_offsets_past_their_retention_are_deleted(group_harness: GroupHarness) -> None:
    group_harness.commit({("orders", 0): 1})
    group_harness.sleep(6 * 86_400_000)
    group_harness.commit({("orders", 1): 1})
    group_harness.logdir.tick(group_harness.now_ms)
    assert group_harness.committed() == {("orders", 0): 1, ("orders", 1): 1}
    group_harness.sleep(2 * 86_400_000)
    group_harness.logdir.tick(group_harness.now_ms)
    assert group_harness.committed() == {("orders", 1): 1}


def test_groups_and_their_offsets_are_deleted(group_harness: GroupHarness) -> None:
    group_harness.commit({("orders", 0): 1, ("orders", 1): 2})
    request = wire.OFFSET_DELETE.Request
    topic = request.Topic(
        name="orders", partitions=[request.Topic.Partition(partition_index=1)]
    )
    assert (
        group_harness.ask(wire.OFFSET_DELETE, 0, group_id="g", topics=[topic])
        .topics[0]
        .partitions[0]
        .error_code
        == 0
    )
    assert group_harness.committed() == {("orders", 0): 1}
    assert (
        group_harness.ask(wire.DELETE_GROUPS, 2, groups_names=["g", "none"])
        .results[0]
        .error_code
        == 0
    )
    assert group_harness.committed() == {}
    assert group_harness.ask(wire.LIST_GROUPS, 0).groups == []


# -- real brokers ----------------------------------------------------------------------


@pytest.fixture
def kafka(kafka_factory: Callable[..., Any]) -> Any:
    return kafka_factory(shared=True)


def test_consumer_protocol_is_not_advertised(kafka: Any) -> None:
    with contextlib.closing(Client(kafka.server.port)) as client:
        reported = client.ask(wire.API_VERSIONS, 3, wire.API_VERSIONS.Request(
            client_software_name="t", client_software_version="1"
        ))  # fmt: skip
        keys = {each.api_key for each in reported.api_keys}
        assert (
            wire.CONSUMER_GROUP_HEARTBEAT.key not in keys
            and wire.JOIN_GROUP.key in keys
        )
        assert {each.name for each in reported.finalized_features} == {
            "transaction.version"
        }
    with (
        contextlib.closing(Client(kafka.server.port)) as client,
        pytest.raises(EOFError),
    ):
        client.ask(
            wire.CONSUMER_GROUP_HEARTBEAT,
            0,
            wire.CONSUMER_GROUP_HEARTBEAT.Request(group_id="g"),
        )


def test_waiting_fetch_gets_records_of_another_process(
    run: Callable[..., Program], kafka: Any
) -> None:
    kafka.create_topic("t", 1)
    path = kafka.server.logdir.path
    fetch = wire.FETCH.Request
    asked = fetch(
        max_wait_ms=DEADLINE_S * 500,
        min_bytes=1,
        max_bytes=1 << 20,
        topics=[
            fetch.Topic(
                topic="t",
                partitions=[fetch.Topic.Partition(partition_max_bytes=1 << 20)],
            )
        ],
    )
    with contextlib.closing(Client(kafka.server.port)) as client:
        client.send(wire.FETCH, 4, asked)
        program = (
            f"import logcore\nwith logcore.open_dir({path!r}, shared=True) as data: "
            "data.append('t', b'from here')"
        )
        first = run("-c", program)
        (batch,) = [client.receive(wire.FETCH, 4).responses[0].partitions[0].records]
        assert b"from here" in bytes(batch)
        listed = wire.LIST_OFFSETS.Request
        latest = listed(
            topics=[
                listed.Topic(
                    name="t",
                    partitions=[
                        listed.Topic.Partition(partition_index=0, timestamp=-1)
                    ],
                )
            ]
        )
        assert (
            client.ask(wire.LIST_OFFSETS, 1, latest).topics[0].partitions[0].offset == 1
        )
        # A request at once sees the record that another process acknowledged.
        for number in (
            2,
            3,
        ):
            assert run("-c", program).process.wait(DEADLINE_S) == 0
            assert (
                client.ask(wire.LIST_OFFSETS, 1, latest).topics[0].partitions[0].offset
                == number
            )
        assert first.process.wait(DEADLINE_S) == 0


@pytest.mark.long
def test_directory_has_one_broker(run: Callable[..., Program], kafka: Any) -> None:
    path = kafka.server.logdir.path
    with open_registry(path) as registry:
        (number,) = registry.children("/brokers/ids")
        assert (
            json.loads(registry.get(f"/brokers/ids/{number}").value)["port"]
            == kafka.server.port
        )
        second = run("-m", "netshim", "serve", path, "--shared", "--port", "0")
        assert second.process.wait(DEADLINE_S) != 0 and second.lines == []
        kafka.stop()
        assert registry.children("/brokers/ids") == []
    third = run("-m", "netshim", "serve", path, "--shared", "--port", "0")
    until(lambda: bool(third.lines), "a broker of its own")


def test_topic_created_by_another_process_is_served(
    run: Callable[..., Program], kafka: Any
) -> None:
    path = kafka.server.logdir.path
    program = run(
        "-c",
        f"import logcore\nwith logcore.open_dir({path!r}, shared=True) as d: d.create_topic('made')\nprint(1)",
    )
    until(lambda: program.lines == ["1"], "the topic")
    with contextlib.closing(Client(kafka.server.port)) as client:
        assert client.produce([b"v"], topic="made").error_code == 0
        assert client.fetch(topic="made").error_code == 0


def test_transaction_queries_that_wait_for_the_lock_block_no_client(
    kafka: Any,
) -> None:
    """The broker waits for the lock of all processes outside its event loop."""
    data: LogDir = kafka.server.logdir
    with data.producer(transactional_id="x") as producer:
        producer.init_transactions()
    lists = wire.LIST_TRANSACTIONS
    describes = wire.DESCRIBE_TRANSACTIONS
    with (
        contextlib.closing(Client(kafka.server.port)) as first,
        contextlib.closing(Client(kafka.server.port)) as second,
        contextlib.closing(Client(kafka.server.port)) as other,
    ):
        assert len(first.ask(lists, 0, lists.Request()).transaction_states) == 1
        claim = data.host.coordinators._claim
        assert claim is not None
        with claim.deciding():
            first.send(lists, 0, lists.Request())
            second.send(describes, 0, describes.Request(transactional_ids=["x", "y"]))
            for _ in range(3):  # the loop is not blocked by the earlier requests
                assert other.ask(wire.METADATA, 1, wire.METADATA.Request()).brokers
        assert len(first.receive(lists, 0).transaction_states) == 1
        reported = second.receive(describes, 0).transaction_states
        assert [each.error_code for each in reported] == [
            0,
            codes.TRANSACTIONAL_ID_NOT_FOUND,
        ]


@pytest.mark.long
def test_clients_and_processes_share_transactions(kafka: Any) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    kafka.create_topic("in", 1)
    kafka.create_topic("out", 1)
    data: LogDir = kafka.server.logdir
    data.append("in", b"1")
    producer = confluent.Producer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "transactional.id": "of a client",
        }
    )
    producer.init_transactions(DEADLINE_S)
    for number, ends in enumerate(
        (producer.commit_transaction, producer.abort_transaction)
    ):
        producer.begin_transaction()
        producer.produce("out", b"%d" % number)
        ends(DEADLINE_S)
    with (
        data.producer(transactional_id="of a process") as own_producer,
        own_producer.transaction(),
    ):
        own_producer.send("out", b"2")
    log = data.partition("out", 0)
    assert [record.value for record in log.read(0, isolation="read_committed")] == [
        b"0",
        b"2",
    ]

    consumer = confluent.Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe(["in"])
    deadline = time.monotonic() + DEADLINE_S
    while consumer.poll(0.1) is None:
        assert time.monotonic() < deadline
    producer.begin_transaction()
    positions = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(
        positions, consumer.consumer_group_metadata(), DEADLINE_S
    )
    with data.consumer(group_id="h") as other:
        assert other.group_metadata().group_id == "h"
    producer.commit_transaction(DEADLINE_S)
    consumer.close()
    with data.consumer(group_id="g") as mine_too:
        committed = mine_too.committed([("in", 0)])["in", 0]
    assert committed is not None and committed.offset == 1
    # The same id in a process fences the client.
    with (
        data.producer(transactional_id="of a client") as successor,
        successor.transaction(),
    ):
        successor.send("out", b"3")
    producer.begin_transaction()
    producer.produce("out", b"late")
    with pytest.raises(confluent.KafkaException):
        producer.commit_transaction(DEADLINE_S)
    assert [record.value for record in log.read(0, isolation="read_committed")] == [
        b"0",
        b"2",
        b"3",
    ]
