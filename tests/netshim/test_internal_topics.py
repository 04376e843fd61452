"""Kafka's own topics: which clients may list them, write to them, extend them or delete
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import InvalidNameError, TopicNotFoundError
from logcore.directory.topic_file import TopicEntry, write_topics
from logcore.fs import OS
from logcore.metadata.filenames import INTERNAL_TOPICS, METADATA_LOG
from logcore.recordbatch import encode
from netshim import wire
from netshim.wire import codes
from support.broker_harness import BrokerHarness
from support.conformance import build


def quorum(path: Path) -> dict[str, bytes]:
    """Create a log directory in the state that Kafka in KRaft mode leaves. Return the
    files of the quorum's log.
    """
    with logcore.open_dir(path, create=True) as logdir:
        logdir.create_topic("orders")
    with logcore.open(path / f"{METADATA_LOG}-0", create=True) as log:
        log.append(b"a record of the quorum")
    (path / f"{METADATA_LOG}-0" / "quorum-state").write_text('{"leaderId":1}')
    return files(path)


def files(path: Path) -> dict[str, bytes]:
    return {
        each.name: each.read_bytes() for each in (path / f"{METADATA_LOG}-0").iterdir()
    }


def requests() -> list[tuple[Any, Any]]:
    """Return each API that names a topic, with a request that names the log of the
    quorum in each place for a topic.
    """
    name, batch = METADATA_LOG, encode([(None, b"v")], now_ms=1)
    parts: dict[Any, dict[str, Any]] = {
        wire.METADATA: {"topics": [{"name": name}], "allow_auto_topic_creation": True},
        wire.PRODUCE: {
            "acks": -1,
            "topic_data": [
                {"name": name, "partition_data": [{"index": 0, "records": batch}]}
            ],
        },
        wire.FETCH: {
            "topics": [
                {
                    "topic": name,
                    "partitions": [{"partition": 0, "partition_max_bytes": 1_000}],
                }
            ]
        },
        wire.LIST_OFFSETS: {
            "topics": [
                {"name": name, "partitions": [{"partition_index": 0, "timestamp": -1}]}
            ]
        },
        wire.OFFSET_FOR_LEADER_EPOCH: {
            "topics": [{"topic": name, "partitions": [{"partition": 0}]}]
        },
        wire.OFFSET_COMMIT: {
            "group_id": "g",
            "generation_id_or_member_epoch": -1,
            "topics": [
                {
                    "name": name,
                    "partitions": [{"partition_index": 0, "committed_offset": 1}],
                }
            ],
        },
        wire.OFFSET_DELETE: {
            "group_id": "g",
            "topics": [{"name": name, "partitions": [{"partition_index": 0}]}],
        },
        wire.CREATE_PARTITIONS: {"topics": [{"name": name, "count": 5}]},
        wire.DELETE_RECORDS: {
            "topics": [
                {"name": name, "partitions": [{"partition_index": 0, "offset": 1}]}
            ]
        },
        wire.DESCRIBE_CONFIGS: {
            "resources": [{"resource_type": 2, "resource_name": name}]
        },
        wire.ALTER_CONFIGS: {
            "resources": [{"resource_type": 2, "resource_name": name, "configs": []}]
        },
        wire.INCREMENTAL_ALTER_CONFIGS: {
            "resources": [{"resource_type": 2, "resource_name": name, "configs": []}]
        },
        wire.DESCRIBE_PRODUCERS: {"topics": [{"name": name, "partition_indexes": [0]}]},
        wire.DESCRIBE_TOPIC_PARTITIONS: {
            "topics": [{"name": name}],
            "response_partition_limit": 10,
        },
        wire.ELECT_LEADERS: {"topic_partitions": [{"topic": name, "partitions": [0]}]},
        wire.WRITE_TXN_MARKERS: {
            "markers": [
                {"producer_id": 1, "topics": [{"name": name, "partition_indexes": [0]}]}
            ],
        },
        wire.ADD_PARTITIONS_TO_TXN: {
            "transactions": [
                {
                    "transactional_id": "id",
                    "topics": [{"name": name, "partitions": [0]}],
                }
            ],
        },
        wire.ALTER_PARTITION_REASSIGNMENTS: {
            "topics": [
                {"name": name, "partitions": [{"partition_index": 0, "replicas": [0]}]}
            ],
        },
        wire.DELETE_TOPICS: {"topic_names": [name]},
    }
    return [(api, build(api.request.schema, fields)) for api, fields in parts.items()]


def found_codes(value: Any) -> set[int]:
    """Return all error codes in a response."""
    error_codes = set()
    if isinstance(value, list):
        return set().union(*map(found_codes, value))
    for field in getattr(type(value), "__slots__", ()):
        inner = getattr(value, field)
        if field.endswith("error_code") and inner:
            error_codes.add(inner)
        elif isinstance(inner, list) or hasattr(type(inner), "__slots__"):
            error_codes |= found_codes(inner)
    return error_codes


@pytest.mark.parametrize(
    ("api", "request_"), requests(), ids=lambda each: getattr(each, "name", "")
)
def test_quorum_log_is_unknown_to_all_apis(
    tmp_path: Path, api: Any, request_: Any
) -> None:
    """The log was served like any topic, and a client that deleted all topics prevented
    Kafka from starting again.
    """
    before = quorum(tmp_path)
    broker_harness = BrokerHarness(tmp_path)
    if api is wire.OFFSET_DELETE:
        commit = wire.OFFSET_COMMIT.Request
        part = commit.Topic.Partition(partition_index=0, committed_offset=1)
        topics = [commit.Topic(name="orders", partitions=[part])]
        broker_harness.ask(
            wire.OFFSET_COMMIT,
            7,
            commit(group_id="g", generation_id_or_member_epoch=-1, topics=topics),
        )
    version = min(
        api.max_version,
        {wire.PRODUCE.key: 12, wire.FETCH.key: 12, wire.DELETE_TOPICS.key: 5}.get(
            api.key, 9
        ),
    )
    error_codes = found_codes(broker_harness.ask(api, version, request_))
    if api is wire.ADD_PARTITIONS_TO_TXN:
        assert error_codes and error_codes <= {
            codes.UNKNOWN_TOPIC_OR_PARTITION,
            codes.INVALID_PRODUCER_ID_MAPPING,
        }
    else:
        assert error_codes == {codes.UNKNOWN_TOPIC_OR_PARTITION}
    broker_harness.close()
    assert files(tmp_path) == before


def test_quorum_log_is_neither_listed_nor_created(tmp_path: Path) -> None:
    before = quorum(tmp_path)
    broker_harness = BrokerHarness(tmp_path)
    listed = broker_harness.ask(wire.METADATA, 9, wire.METADATA.Request(topics=None))
    assert [topic.name for topic in listed.topics] == ["orders"]
    create = wire.CREATE_TOPICS.Request
    asked = create(
        topics=[create.Topic(name=METADATA_LOG, num_partitions=1, replication_factor=1)]
    )
    assert (
        broker_harness.ask(wire.CREATE_TOPICS, 7, asked).topics[0].error_code
        == codes.INVALID_REQUEST
    )
    broker_harness.close()
    assert files(tmp_path) == before


def test_directory_omits_the_quorum_log(tmp_path: Path) -> None:
    """The log is omitted even if the topic file has a row for it, written by an earlier
    version.
    """
    before = quorum(tmp_path)
    write_topics(
        OS,
        str(tmp_path),
        [TopicEntry("orders", count=1), TopicEntry(METADATA_LOG, count=1)],
    )
    for mode in ({}, {"shared": True}, {"read_only": True}):
        with logcore.open_dir(tmp_path, **mode) as logdir:
            assert logdir.topics() == ["orders"]
            assert METADATA_LOG not in logdir
            with pytest.raises(TopicNotFoundError):
                logdir.partition(METADATA_LOG, 0)
            if not mode:
                with pytest.raises(InvalidNameError):
                    logdir.create_topic(METADATA_LOG)
                logdir.create_topic("more")
                logdir.delete_topic("more")
    assert files(tmp_path) == before


@pytest.mark.parametrize("topic", sorted(INTERNAL_TOPICS))
def test_internal_topics_refuse_writes_and_new_partitions(
    broker_harness: BrokerHarness, topic: str
) -> None:
    """`__share_group_state` could be written like any topic."""
    broker_harness.logdir.create_topic(topic)
    assert (
        broker_harness.produce(encode([(b"k", b"v")], now_ms=1), topic=topic).error_code
        == codes.INVALID_TOPIC_EXCEPTION
    )
    grow = wire.CREATE_PARTITIONS.Request
    asked = grow(topics=[grow.Topic(name=topic, count=5)])
    assert (
        broker_harness.ask(wire.CREATE_PARTITIONS, 3, asked).results[0].error_code
        == codes.INVALID_REQUEST
    )
    asked = wire.METADATA.Request(topics=[wire.METADATA.Request.Topic(name=topic)])
    assert broker_harness.ask(wire.METADATA, 9, asked).topics[0].is_internal
