"""The answer to each request of transactions, by its version, from a broker without
sockets.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

import logcore
from logcore.coordination.transactions import RETRY_MS
from logcore.coordinators.stored_transactions import TRANSACTIONS_CONFIG
from logcore.errors import TopicNotFoundError
from logcore.format.group_records import partition_of
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from logcore.partition.coordinator_append import producers_of
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk
from netshim import wire
from netshim.wire import codes
from support.simulated_disk_broker import SimulatedDiskBroker


@pytest.fixture
def broker() -> Any:
    disk = SimulatedDisk()
    harness = SimulatedDiskBroker(disk, disk.now_ms())
    harness.logdir.create_topic("t", 2)
    yield harness
    harness.stop()


def begin(broker: SimulatedDiskBroker, name: str = "x", **more: Any) -> tuple[int, int]:
    initialized = broker.ask(
        wire.INIT_PRODUCER_ID,
        4,
        transactional_id=name,
        transaction_timeout_ms=60_000,
        **more,
    )
    assert initialized.error_code == 0
    return initialized.producer_id, initialized.producer_epoch


def add(
    broker: SimulatedDiskBroker,
    id_and_epoch: tuple[int, int],
    partitions: list[int],
    *,
    version: int = 3,
    topic: str = "t",
) -> Any:
    topic_type = wire.ADD_PARTITIONS_TO_TXN.Request.Topic
    topics = [topic_type(name="t", partitions=partitions)]
    if topic != "t":
        topics.append(topic_type(name=topic, partitions=[0]))
    response = broker.ask(
        wire.ADD_PARTITIONS_TO_TXN,
        version,
        v3_and_below_transactional_id="x",
        v3_and_below_producer_id=id_and_epoch[0],
        v3_and_below_producer_epoch=id_and_epoch[1],
        v3_and_below_topics=topics,
    )
    return [
        part.partition_error_code
        for each in response.results_by_topic_v3_and_below
        for part in each.results_by_partition
    ]


def produce(
    broker: SimulatedDiskBroker,
    id_and_epoch: tuple[int, int],
    *,
    version: int = 9,
    sequence: int = 0,
    partition: int = 0,
) -> int:
    batch = encode(
        [(None, b"v", (), broker.now_ms)],
        transactional=True,
        producer_id=id_and_epoch[0],
        producer_epoch=id_and_epoch[1],
        base_sequence=sequence,
    )
    topic_type = wire.PRODUCE.Request.Topic
    part = topic_type.Partition(index=partition, records=batch)
    response = broker.ask(
        wire.PRODUCE,
        version,
        transactional_id="x",
        acks=-1,
        timeout_ms=1_000,
        topic_data=[topic_type(name="t", partition_data=[part])],
    )
    return int(response.responses[0].partition_responses[0].error_code)


def end(
    broker: SimulatedDiskBroker,
    id_and_epoch: tuple[int, int],
    *,
    commit: bool = True,
    version: int = 3,
) -> Any:
    return broker.ask(
        wire.END_TXN,
        version,
        transactional_id="x",
        producer_id=id_and_epoch[0],
        producer_epoch=id_and_epoch[1],
        committed=commit,
    )


def commit_offset(
    broker: SimulatedDiskBroker,
    id_and_epoch: tuple[int, int],
    offset: int,
    *,
    version: int = 3,
    group: str = "g",
    **more: Any,
) -> int:
    topic_type = wire.TXN_OFFSET_COMMIT.Request.Topic
    part = topic_type.Partition(
        partition_index=0, committed_offset=offset, committed_metadata=""
    )
    response = broker.ask(
        wire.TXN_OFFSET_COMMIT,
        version,
        transactional_id="x",
        group_id=group,
        producer_id=id_and_epoch[0],
        producer_epoch=id_and_epoch[1],
        topics=[topic_type(name="t", partitions=[part])],
        **{"generation_id": -1, **more},
    )
    return int(response.topics[0].partitions[0].error_code)


def fetch_offset(
    broker: SimulatedDiskBroker, *, is_strict: bool = False, group: str = "g"
) -> tuple[int, int]:
    topic = wire.OFFSET_FETCH.Request.Topic(name="t", partition_indexes=[0])
    response = broker.ask(
        wire.OFFSET_FETCH, 7, group_id=group, topics=[topic], require_stable=is_strict
    )
    part = response.topics[0].partitions[0]
    return part.error_code, part.committed_offset


def add_group(
    broker: SimulatedDiskBroker, id_and_epoch: tuple[int, int], group: str = "g"
) -> int:
    fields = {
        "transactional_id": "x",
        "producer_id": id_and_epoch[0],
        "producer_epoch": id_and_epoch[1],
        "group_id": group,
    }
    return int(broker.ask(wire.ADD_OFFSETS_TO_TXN, 3, **fields).error_code)


def test_feature_is_reported_in_the_form_of_each_version(
    broker: SimulatedDiskBroker,
) -> None:
    for version, supported in (
        (3, []),
        (4, [("group.version", 0, 1), ("transaction.version", 0, 2)]),
    ):
        response = broker.ask(
            wire.API_VERSIONS,
            version,
            client_software_name="a",
            client_software_version="1",
        )
        finalized = [
            (each.name, each.max_version_level) for each in response.finalized_features
        ]
        assert finalized == [("group.version", 1), ("transaction.version", 2)]
        assert response.finalized_features_epoch == 0
        assert [
            (each.name, each.min_version, each.max_version)
            for each in response.supported_features
        ] == supported


@pytest.mark.parametrize(
    ("version", "code"), [(11, 0), (12, codes.OUT_OF_ORDER_SEQUENCE_NUMBER)]
)
def test_from_version_12_on_a_transaction_begins_at_sequence_0(
    broker: SimulatedDiskBroker, version: int, code: int
) -> None:
    """An earlier batch may have been refused while its partition was being added, and
    is then sent again.
    """
    id_and_epoch = begin(broker)
    add(broker, id_and_epoch, [0])
    assert produce(broker, id_and_epoch, version=version, sequence=1) == code
    if code:
        assert produce(broker, id_and_epoch, version=version, sequence=0) == 0
        assert produce(broker, id_and_epoch, version=version, sequence=1) == 0
        assert produce(broker, id_and_epoch, version=version, sequence=3) == code


@pytest.mark.parametrize(
    ("version", "code"), [(3, codes.INVALID_PRODUCER_EPOCH), (4, codes.PRODUCER_FENCED)]
)
def test_fenced_producer_gets_the_error_of_its_version(
    broker: SimulatedDiskBroker, version: int, code: int
) -> None:
    id_and_epoch = begin(broker)
    fields = {
        "transactional_id": "x",
        "transaction_timeout_ms": 60_000,
        "producer_id": id_and_epoch[0] + 1,
        "producer_epoch": 0,
    }
    assert broker.ask(wire.INIT_PRODUCER_ID, version, **fields).error_code == code
    assert add(broker, (id_and_epoch[0], 5), [0], version=1) == [
        codes.INVALID_PRODUCER_EPOCH
    ]
    assert add(broker, (id_and_epoch[0], 5), [0], version=2) == [codes.PRODUCER_FENCED]
    assert (
        end(broker, (id_and_epoch[0], 5), version=1).error_code
        == codes.INVALID_PRODUCER_EPOCH
    )
    assert (
        end(broker, (id_and_epoch[0], 5), version=2).error_code == codes.PRODUCER_FENCED
    )


def test_unknown_partition_prevents_adding_the_others(
    broker: SimulatedDiskBroker,
) -> None:
    id_and_epoch = begin(broker)
    assert add(broker, id_and_epoch, [0, 1], topic="none") == [
        codes.OPERATION_NOT_ATTEMPTED,
        codes.OPERATION_NOT_ATTEMPTED,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert end(broker, id_and_epoch).error_code == codes.INVALID_TXN_STATE


@pytest.mark.parametrize(
    ("version", "code"),
    [(9, codes.INVALID_TXN_STATE), (11, codes.TRANSACTION_ABORTABLE)],
)
def test_a_batch_for_a_partition_outside_the_transaction_is_refused(
    broker: SimulatedDiskBroker, version: int, code: int
) -> None:
    id_and_epoch = begin(broker)
    assert produce(broker, id_and_epoch, version=version) == code
    assert add(broker, id_and_epoch, [0]) == [0]
    assert produce(broker, id_and_epoch, version=version) == 0
    assert produce(broker, id_and_epoch, version=version, partition=1) == code
    assert end(broker, id_and_epoch).error_code == 0
    assert produce(broker, id_and_epoch, version=version, sequence=1) == code, (
        "after its end"
    )
    assert broker.logdir.partition("t", 0).last_stable_offset == 2


def test_from_version_12_on_a_batch_adds_its_partition(
    broker: SimulatedDiskBroker,
) -> None:
    id_and_epoch = begin(broker)
    assert produce(broker, id_and_epoch, version=12) == 0
    ended = end(broker, id_and_epoch, version=5)
    assert (ended.producer_id, ended.producer_epoch) == (
        id_and_epoch[0],
        id_and_epoch[1] + 1,
    )
    assert (
        produce(broker, id_and_epoch, version=12, sequence=1)
        == codes.INVALID_PRODUCER_EPOCH
    ), "a late batch"
    assert produce(broker, (id_and_epoch[0], id_and_epoch[1] + 1), version=12) == 0
    refused = end(broker, id_and_epoch, version=5)
    assert (refused.error_code, refused.producer_id) == (codes.PRODUCER_FENCED, -1)


@pytest.mark.parametrize(
    ("version", "code"),
    [(3, codes.INVALID_TXN_STATE), (4, codes.TRANSACTION_ABORTABLE), (5, 0)],
)
def test_offset_commit_adds_its_group_from_version_5(
    broker: SimulatedDiskBroker, version: int, code: int
) -> None:
    broker.ask(
        wire.METADATA,
        9,
        topics=[wire.METADATA.Request.Topic(name="__consumer_offsets")],
    )
    id_and_epoch = begin(broker)
    assert commit_offset(broker, id_and_epoch, 5, version=version) == code
    assert (
        commit_offset(broker, (id_and_epoch[0], 9), 5, version=version)
        == codes.INVALID_PRODUCER_EPOCH
    )


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("commit", [True, False])
def test_offsets_are_unstable_until_the_transaction_ends(
    broker: SimulatedDiskBroker, commit: bool, restarts: bool
) -> None:
    id_and_epoch = begin(broker)
    assert add_group(broker, id_and_epoch) == 0
    assert commit_offset(broker, id_and_epoch, 5) == 0
    if restarts:
        broker.restart()
    assert fetch_offset(broker) == (0, -1)
    assert fetch_offset(broker, is_strict=True) == (codes.UNSTABLE_OFFSET_COMMIT, -1)
    assert end(broker, id_and_epoch, commit=commit).error_code == 0
    assert fetch_offset(broker, is_strict=True) == (0, 5 if commit else -1)
    broker.restart()
    assert fetch_offset(broker, is_strict=True) == (0, 5 if commit else -1)


@pytest.mark.parametrize("restarts", [False, True])
def test_plain_commit_after_a_transactional_commit_takes_precedence(
    broker: SimulatedDiskBroker, restarts: bool
) -> None:
    id_and_epoch = begin(broker)
    add_group(broker, id_and_epoch)
    assert commit_offset(broker, id_and_epoch, 5) == 0
    topic_type = wire.OFFSET_COMMIT.Request.Topic
    part = topic_type.Partition(
        partition_index=0, committed_offset=9, committed_metadata=""
    )
    plain = broker.ask(
        wire.OFFSET_COMMIT,
        7,
        group_id="g",
        generation_id_or_member_epoch=-1,
        topics=[topic_type(name="t", partitions=[part])],
    )
    assert plain.topics[0].partitions[0].error_code == 0
    if restarts:
        broker.restart()
    end(broker, id_and_epoch)
    assert fetch_offset(broker, is_strict=True) == (0, 9)


def test_texts_that_are_too_long_for_a_record_are_refused(
    broker: SimulatedDiskBroker,
) -> None:
    """A request can contain such a text, because its length is a varint. In a record
    the length is an int16. The broker must refuse the text before it changes anything.
    """
    longest = begin(broker, "x" * 32_767)
    assert longest[1] == 0
    for name in ("x" * 32_768, "é" * 16_384):
        for _ in range(2):
            refused = broker.ask(
                wire.INIT_PRODUCER_ID,
                4,
                transactional_id=name,
                transaction_timeout_ms=60_000,
            )
            assert refused.error_code == codes.INVALID_REQUEST
    id_and_epoch = begin(broker)
    assert add_group(broker, id_and_epoch, "g" * 40_000) == codes.INVALID_GROUP_ID
    assert add_group(broker, id_and_epoch) == 0
    for version in (3, 5):
        assert (
            commit_offset(broker, id_and_epoch, 5, version=version, group="g" * 40_000)
            == codes.INVALID_GROUP_ID
        )
        assert commit_offset(broker, id_and_epoch, 5, version=version) == 0
    part = wire.OFFSET_COMMIT.Request.Topic.Partition(
        partition_index=0, committed_offset=3
    )
    topics = [wire.OFFSET_COMMIT.Request.Topic(name="t", partitions=[part])]
    reported = broker.ask(wire.OFFSET_COMMIT, 8, group_id="g" * 40_000, topics=topics)
    assert reported.topics[0].partitions[0].error_code == codes.INVALID_GROUP_ID


def test_marker_ends_only_the_offsets_in_its_partition(
    broker: SimulatedDiskBroker,
) -> None:
    broker.logdir.create_topic(OFFSETS_TOPIC, 2)
    groups = [
        next(name for name in "abcdefgh" if partition_of(name, 2) == number)
        for number in (0, 1)
    ]
    id_and_epoch = begin(broker)
    for group in groups:
        assert add_group(broker, id_and_epoch, group) == 0
        assert commit_offset(broker, id_and_epoch, 5, group=group) == 0
    marker_type = wire.WRITE_TXN_MARKERS.Request.Marker
    marker = marker_type(
        producer_id=id_and_epoch[0],
        producer_epoch=id_and_epoch[1],
        transaction_result=False,
        topics=[marker_type.Topic(name=OFFSETS_TOPIC, partition_indexes=[0])],
    )
    (reported,) = (
        broker.ask(wire.WRITE_TXN_MARKERS, 1, markers=[marker])
        .markers[0]
        .topics[0]
        .partitions
    )
    assert reported.error_code == 0
    assert fetch_offset(broker, is_strict=True, group=groups[0]) == (0, -1)
    assert (
        fetch_offset(broker, is_strict=True, group=groups[1])[0]
        == codes.UNSTABLE_OFFSET_COMMIT
    )
    assert end(broker, id_and_epoch).error_code == 0
    assert [fetch_offset(broker, group=group)[1] for group in groups] == [-1, 5]
    broker.restart()
    assert [fetch_offset(broker, group=group)[1] for group in groups] == [-1, 5]


def test_a_named_member_is_checked(broker: SimulatedDiskBroker) -> None:
    id_and_epoch = begin(broker)
    add_group(broker, id_and_epoch)
    assert (
        commit_offset(broker, id_and_epoch, 5, generation_id=3, member_id="m")
        == codes.ILLEGAL_GENERATION
    )


@pytest.mark.parametrize("named", [{"member_id": "m"}, {"group_instance_id": "i"}])
@pytest.mark.parametrize("is_new", [True, False], ids=["unknown group", "empty group"])
def test_commit_without_a_generation_is_accepted_without_members(
    broker: SimulatedDiskBroker, is_new: bool, named: dict[str, str]
) -> None:
    id_and_epoch = begin(broker)
    add_group(broker, id_and_epoch)
    if not is_new:
        assert commit_offset(broker, id_and_epoch, 4) == 0
    assert commit_offset(broker, id_and_epoch, 5, **named) == 0
    end(broker, id_and_epoch)
    assert fetch_offset(broker) == (0, 5)


def join_as_consumer(broker: SimulatedDiskBroker) -> Any:
    """The member m of the group g joins by the consumer protocol."""
    return broker.ask(
        wire.CONSUMER_GROUP_HEARTBEAT,
        1,
        group_id="g",
        member_id="m",
        rebalance_timeout_ms=1_000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )


@pytest.mark.parametrize("named", [{"member_id": "n"}, {"group_instance_id": "i"}])
def test_commit_without_a_generation_is_checked_with_members(
    broker: SimulatedDiskBroker, named: dict[str, str]
) -> None:
    joined = join_as_consumer(broker)
    assert joined.error_code == 0
    id_and_epoch = begin(broker)
    add_group(broker, id_and_epoch)
    assert commit_offset(broker, id_and_epoch, 5, **named) == codes.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize(
    ("member_id", "epoch", "code"),
    [
        ("m", 1, codes.NONE),
        ("m", 2, codes.ILLEGAL_GENERATION),
        ("n", 1, codes.UNKNOWN_MEMBER_ID),
    ],
)
def test_a_member_of_the_consumer_protocol_is_checked_by_its_epoch(
    broker: SimulatedDiskBroker, member_id: str, epoch: int, code: int
) -> None:
    joined = join_as_consumer(broker)
    assert (joined.error_code, joined.member_epoch) == (0, 1)
    id_and_epoch = begin(broker)
    add_group(broker, id_and_epoch)
    assert (
        commit_offset(broker, id_and_epoch, 5, generation_id=epoch, member_id=member_id)
        == code
    )


def test_overdue_transaction_is_aborted_even_after_a_restart(
    broker: SimulatedDiskBroker,
) -> None:
    id_and_epoch = begin(broker)
    add(broker, id_and_epoch, [0])
    assert produce(broker, id_and_epoch) == 0
    broker.restart()
    broker.tick(59_000)
    assert broker.logdir.partition("t", 0).last_stable_offset == 0
    broker.tick(1_000)
    assert broker.logdir.partition("t", 0).last_stable_offset == 2
    assert end(broker, id_and_epoch).error_code == codes.PRODUCER_FENCED
    assert produce(broker, id_and_epoch, sequence=1) == codes.INVALID_PRODUCER_EPOCH


def test_deleted_topic_does_not_prevent_the_end_of_a_transaction(
    broker: SimulatedDiskBroker,
) -> None:
    id_and_epoch = begin(broker)
    add(broker, id_and_epoch, [0, 1])
    assert produce(broker, id_and_epoch) == 0
    broker.logdir.delete_topic("t")
    assert end(broker, id_and_epoch).error_code == 0
    broker.logdir.create_topic("t", 2)
    assert add(broker, id_and_epoch, [0]) == [0]


@pytest.mark.parametrize(("home", "last", "written"), [(7, 7, 7), (9, 7, 9), (2, 7, 7)])
def test_markers_have_the_epoch_of_the_partition_that_keeps_their_id(
    broker: SimulatedDiskBroker, home: int, last: int, written: int
) -> None:
    """In a directory that Kafka wrote, the partitions of `__transaction_state` have
    leader epochs of their own.
    """
    broker.logdir.create_topic(TRANSACTIONS_TOPIC, 2, TRANSACTIONS_CONFIG)
    number = partition_of("x", 2)
    broker.logdir.partition(TRANSACTIONS_TOPIC, number).begin_epoch(home)
    broker.logdir.partition(TRANSACTIONS_TOPIC, 1 - number).begin_epoch(3)
    id_and_epoch = begin(broker)
    log = broker.logdir.partition("t", 0)
    # Write the marker that Kafka's coordinator would have written.
    log.end_transaction(*id_and_epoch, commit=True, coordinator_epoch=last)
    add(broker, id_and_epoch, [0])
    assert produce(broker, id_and_epoch) == 0
    assert end(broker, id_and_epoch).error_code == 0
    assert log.last_stable_offset == log.log_end_offset == 3
    (known,) = producers_of(log.host.writer)
    assert known.coordinator_epoch == written


def test_fenced_marker_is_written_again(
    broker: SimulatedDiskBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the coordinator counted the marker as written, the transaction would remain
    open forever.
    """
    id_and_epoch = begin(broker)
    log = broker.logdir.partition("t", 0)
    log.end_transaction(*id_and_epoch, commit=True, coordinator_epoch=7)
    add(broker, id_and_epoch, [0])
    assert produce(broker, id_and_epoch) == 0
    with monkeypatch.context() as patch:
        # As if another coordinator wrote a marker between the check and the write.
        patch.setattr("netshim.transactions.marker_epoch", lambda *_: 0)
        assert end(broker, id_and_epoch).error_code == 0
        assert log.last_stable_offset == 1
    broker.tick(RETRY_MS)
    assert log.last_stable_offset == log.log_end_offset == 3


def test_orphans_of_a_power_cut_are_aborted_after_markers_of_kafka() -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("/data", create=True, fs=disk) as data:
        data.create_topic("t")
        data.create_topic(TRANSACTIONS_TOPIC, 1, TRANSACTIONS_CONFIG)
        log = data.partition("t", 0)
        log.end_transaction(77, 3, commit=True, coordinator_epoch=7)
        records = encode(
            [(None, b"v")],
            transactional=True,
            producer_id=77,
            producer_epoch=3,
            base_sequence=0,
        )
        log.append_batch(records, durability="disk")
        crashed = next(iter(disk.crash_states(limit=1))).disk()
    broker = SimulatedDiskBroker(crashed, crashed.now_ms())
    broker.tick()
    log = broker.logdir.partition("t", 0)
    assert log.last_stable_offset == log.log_end_offset == 3
    broker.stop()


def test_topic_deleted_during_a_request_is_unknown(
    broker: SimulatedDiskBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread deletes the topic after the request has found the topic, and
    before it reads the partitions.
    """
    id_and_epoch = begin(broker)
    assert add_group(broker, id_and_epoch) == 0
    real = broker.logdir.partitions

    def partitions(name: str) -> tuple[int, ...]:
        if name == "t":
            raise TopicNotFoundError("in this moment")
        return real(name)

    monkeypatch.setattr(broker.logdir, "partitions", partitions)
    gone = codes.UNKNOWN_TOPIC_OR_PARTITION
    assert add(broker, id_and_epoch, [0]) == [gone]
    assert produce(broker, id_and_epoch, version=12) == codes.TRANSACTION_ABORTABLE, (
        "its log is still open"
    )
    assert commit_offset(broker, id_and_epoch, 5) == gone
    part = wire.OFFSET_COMMIT.Request.Topic.Partition(
        partition_index=0, committed_offset=3
    )
    topics = [wire.OFFSET_COMMIT.Request.Topic(name="t", partitions=[part])]
    reported = broker.ask(wire.OFFSET_COMMIT, 7, group_id="g", topics=topics)
    assert reported.topics[0].partitions[0].error_code == gone
    chosen = wire.ELECT_LEADERS.Request.Topic(topic="t", partitions=[0])
    reported = broker.ask(
        wire.ELECT_LEADERS, 2, topic_partitions=[chosen], timeout_ms=1
    )
    assert reported.replica_election_results[0].partition_result[0].error_code == gone
    reported = broker.ask(
        wire.METADATA, 9, topics=[wire.METADATA.Request.Topic(name="t")]
    )
    assert reported.topics[0].error_code == gone


def test_transaction_state_topic_cannot_be_deleted(
    broker: SimulatedDiskBroker,
) -> None:
    begin(broker)
    response = broker.ask(
        wire.DELETE_TOPICS, 4, topic_names=["__transaction_state"], timeout_ms=1
    )
    assert response.responses[0].error_code == codes.POLICY_VIOLATION


def test_responses_to_admin_tools(broker: SimulatedDiskBroker) -> None:
    id_and_epoch = begin(broker)
    add(broker, id_and_epoch, [0])
    assert produce(broker, id_and_epoch) == 0
    entry, none = broker.ask(
        wire.DESCRIBE_TRANSACTIONS, 0, transactional_ids=["x", "y"]
    ).transaction_states
    assert (entry.transaction_state, entry.producer_id, entry.producer_epoch) == (
        "Ongoing",
        *id_and_epoch,
    )
    assert [(each.topic, each.partitions) for each in entry.topics] == [("t", [0])]
    assert none.error_code == codes.TRANSACTIONAL_ID_NOT_FOUND

    def listed(**filters: Any) -> list[str]:
        response = broker.ask(
            wire.LIST_TRANSACTIONS, 2, **{"duration_filter": -1, **filters}
        )
        return [each.transactional_id for each in response.transaction_states]

    assert (
        listed()
        == listed(state_filters=["Ongoing"])
        == listed(transactional_id_pattern=".")
        == ["x"]
    )
    assert (
        listed(state_filters=["Empty"])
        == listed(producer_id_filters=[id_and_epoch[0] + 1])
        == listed(duration_filter=5)
        == []
    )
    wrong = broker.ask(
        wire.LIST_TRANSACTIONS, 2, transactional_id_pattern="(", state_filters=["No"]
    )
    assert wrong.error_code == codes.INVALID_REGULAR_EXPRESSION
    assert broker.ask(
        wire.LIST_TRANSACTIONS, 0, state_filters=["No"]
    ).unknown_state_filters == ["No"]

    asked = wire.DESCRIBE_PRODUCERS.Request.Topic(name="t", partition_indexes=[0, 7])
    known, unknown = (
        broker.ask(wire.DESCRIBE_PRODUCERS, 0, topics=[asked]).topics[0].partitions
    )
    (producer,) = known.active_producers
    assert (producer.producer_id, producer.producer_epoch, producer.last_sequence) == (
        *id_and_epoch,
        0,
    )
    assert (producer.current_txn_start_offset, producer.coordinator_epoch) == (0, -1)
    assert unknown.error_code == codes.UNKNOWN_TOPIC_OR_PARTITION

    marker_type = wire.WRITE_TXN_MARKERS.Request.Marker
    marker = marker_type(
        producer_id=id_and_epoch[0],
        producer_epoch=id_and_epoch[1],
        topics=[marker_type.Topic(name="t", partition_indexes=[0, 7])],
    )
    reported = (
        broker.ask(wire.WRITE_TXN_MARKERS, 1, markers=[marker])
        .markers[0]
        .topics[0]
        .partitions
    )
    assert [each.error_code for each in reported] == [
        0,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert broker.logdir.partition("t", 0).last_stable_offset == 2


def test_patterns_of_ids_use_the_engine_re2(
    broker: SimulatedDiskBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Python's engine, a pattern of a few bytes could block the broker for any
    time.
    """
    begin(broker, "xx")

    def listed(pattern: str) -> Any:
        response = broker.ask(
            wire.LIST_TRANSACTIONS,
            2,
            duration_filter=-1,
            transactional_id_pattern=pattern,
        )
        return response.error_code or [
            each.transactional_id for each in response.transaction_states
        ]

    assert (listed("x+"), listed("x")) == (["xx"], []), "a whole id"
    assert listed(r"(x)\1") == codes.INVALID_REGULAR_EXPRESSION, (
        "which only an engine that tries all ways can know"
    )
    monkeypatch.setitem(sys.modules, "re2", None)
    assert listed("x+") == codes.INVALID_REGULAR_EXPRESSION


def test_marker_of_an_impossible_producer_is_not_a_disk_failure(
    broker: SimulatedDiskBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The tests with mutated frames found that a client could cause any number of log
    lines about failures.
    """
    marker_type = wire.WRITE_TXN_MARKERS.Request.Marker
    marker = marker_type(
        producer_id=-5, topics=[marker_type.Topic(name="t", partition_indexes=[0])]
    )
    (reported,) = (
        broker.ask(wire.WRITE_TXN_MARKERS, 1, markers=[marker])
        .markers[0]
        .topics[0]
        .partitions
    )
    assert reported.error_code == codes.INVALID_RECORD
    assert [
        record.message for record in caplog.records if record.levelname == "ERROR"
    ] == []
