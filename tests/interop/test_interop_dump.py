"""`logcore dump` and kafka-dump-log show the same content of Kafka's own topics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logcore.inspect.dump import dump
from support import confluent, kafka_jvm
from support.confluent import until
from support.kafka_jvm import Storage

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]
admin = pytest.importorskip("confluent_kafka.admin")

FIRST_SEGMENT = f"{0:020}.log"
#: Settings with which the quorum writes snapshots, and stores access control lists.
BROKER_SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "metadata.log.max.record.bytes.between.snapshots": 2_000,
    "group.coordinator.rebalance.protocols": "classic,consumer",
}
#: A record in the output of Kafka's tool, and the JSON in it.
RECORD = re.compile(r"^\| offset: (\d+) .*? headerKeys: \[.*?\] (.*)$", re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files of a stopped broker with topics, users, rules, groups and
    transactions.
    """
    path = tmp_path_factory.mktemp("kafka")
    with kafka_jvm.Broker(path, more=BROKER_SETTINGS) as broker:
        change_settings(broker.address)
        produce_and_consume(SimpleNamespace(bootstrap_servers=broker.address))
        until(lambda: snapshots(path), "the quorum writes a snapshot")
        broker.stop()
    return path


def change_settings(address: str) -> None:
    client = admin.AdminClient({"bootstrap.servers": address})
    topic = admin.ConfigResource(
        admin.ConfigResource.Type.TOPIC,
        "orders",
        incremental_configs=[
            admin.ConfigEntry(
                "retention.ms",
                "5000",
                incremental_operation=admin.AlterConfigOpType.SET,
            )
        ],
    )
    user = admin.UserScramCredentialUpsertion(
        "anna",
        admin.ScramCredentialInfo(admin.ScramMechanism.SCRAM_SHA_256, 4_096),
        b"secret",
    )
    rule = admin.AclBinding(
        admin.ResourceType.TOPIC,
        "orders",
        admin.ResourcePatternType.LITERAL,
        "User:anna",
        "*",
        admin.AclOperation.READ,
        admin.AclPermissionType.ALLOW,
    )
    for futures in (
        client.create_topics(
            [
                admin.NewTopic("orders", 2, 1, config={"cleanup.policy": "compact"}),
                admin.NewTopic("gone", 1, 1),
            ]
        ),
    ):
        for future in futures.values():
            future.result()
    for futures in (
        client.delete_topics(["gone"]),
        client.incremental_alter_configs([topic]),
        client.alter_user_scram_credentials([user]),
        client.create_acls([rule]),
    ):
        for future in futures.values():
            future.result()


def produce_and_consume(broker: Any) -> None:
    producer = confluent.producer(broker, **{"transactional.id": "tx"})
    producer.init_transactions()
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        producer.produce("orders", b"v", b"k")
        assert producer.flush(60) == 0  # otherwise, no transaction is left to abort
        end()
    for protocol in ("classic", "consumer"):
        consumer = confluent.consumer(
            broker, f"of-{protocol}", **{"group.protocol": protocol}
        )
        consumer.subscribe(["orders"])
        message = until(lambda: consumer.poll(1), "a record arrives")  # noqa: B023
        consumer.commit(message, asynchronous=False)
        consumer.close()


def snapshots(path: Path) -> list[Path]:
    return sorted((path / "meta" / "__cluster_metadata-0").glob("*.checkpoint"))


@pytest.fixture(scope="module")
def kafka() -> Iterator[Storage]:
    with Storage() as storage:
        yield storage


def decoded_by_kafka(
    kafka: Storage, path: Path, option: str
) -> dict[int, dict[str, Any]]:
    """Return the JSON texts of each record that Kafka's tool prints, by their names."""
    decoder = json.JSONDecoder()
    contents: dict[int, dict[str, Any]] = {}
    for offset, fields in RECORD.findall(kafka.dump(path, option)):
        content: dict[str, Any] = {}
        while fields.strip():
            name, _, fields = fields.strip().partition(" ")
            try:
                content[name.rstrip(":")], end = decoder.raw_decode(fields)
            except ValueError:
                end = len(fields)
            fields = fields[end:]
        contents[int(offset)] = content
    assert contents
    return contents


def decoded_by_logcore(path: Path) -> dict[int, Any]:
    """Return the content of each record in the rows of dump()."""
    return {
        row["offset"]: row.get("says")
        for row in dump(path, records=True)
        if row["type"] == "record"
    }


def test_dump_of_cluster_metadata_equals_the_output_of_kafka(
    folder: Path, kafka: Storage
) -> None:
    log = folder / "meta" / "__cluster_metadata-0" / FIRST_SEGMENT
    record_names = set()
    for path in (log, *snapshots(folder)):
        expected = decoded_by_kafka(kafka, path, "--cluster-metadata-decoder")
        decoded = decoded_by_logcore(path)
        assert decoded.keys() == expected.keys()
        for offset, content in expected.items():
            decoded_record = decoded[offset]
            record_names.add(decoded_record["type"])
            if "payload" in content:
                assert decoded_record == content["payload"]
            else:
                assert {decoded_record["type"]: decoded_record["data"]} == content
    assert record_names >= {
        "LeaderChange",
        "SnapshotHeader",
        "SnapshotFooter",
        "REGISTER_BROKER_RECORD",
        "TOPIC_RECORD",
        "PARTITION_RECORD",
        "PARTITION_CHANGE_RECORD",
        "REMOVE_TOPIC_RECORD",
        "CONFIG_RECORD",
        "USER_SCRAM_CREDENTIAL_RECORD",
        "ACCESS_CONTROL_ENTRY_RECORD",
        "PRODUCER_IDS_RECORD",
    }


def test_first_records_of_a_quorum_are_dumped(folder: Path) -> None:
    """Kafka's tool refuses the name of this file."""
    decoded = decoded_by_logcore(folder / "meta" / "bootstrap.checkpoint")
    assert "FEATURE_LEVEL_RECORD" in {
        decoded_record["type"] for decoded_record in decoded.values()
    }


def test_dump_of_transactions_equals_the_output_of_kafka(
    folder: Path, kafka: Storage
) -> None:
    path = folder / "data" / "__transaction_state-0" / FIRST_SEGMENT
    expected = decoded_by_kafka(kafka, path, "--transaction-log-decoder")
    decoded = decoded_by_logcore(path)
    assert decoded.keys() == expected.keys()
    for offset, content in expected.items():
        assert content["key"]["data"] == {
            "transactionalId": decoded[offset]["transactional_id"]
        }
        data = content["payload"]["data"]
        decoded_record = decoded[offset]["transaction"]
        assert decoded_record["producer_id"] == data["producerId"]
        assert decoded_record["producer_epoch"] == data["producerEpoch"]
        assert decoded_record["timeout_ms"] == data["transactionTimeoutMs"]
        assert (
            decoded_record["update_timestamp_ms"]
            == data["transactionLastUpdateTimestampMs"]
        )
        assert (
            decoded_record["start_timestamp_ms"] == data["transactionStartTimestampMs"]
        )
        partitions = [
            [entry["topic"], number]
            for entry in data["transactionPartitions"] or []
            for number in entry["partitionIds"]
        ]
        assert decoded_record["partitions"] == sorted(partitions)
    states = [decoded[offset]["transaction"]["state"] for offset in sorted(decoded)]
    assert {"Empty", "Ongoing", "CompleteCommit", "CompleteAbort"} <= {*states}


def test_dump_of_groups_equals_the_output_of_kafka(
    folder: Path, kafka: Storage
) -> None:
    path = folder / "data" / "__consumer_offsets-0" / FIRST_SEGMENT
    expected = decoded_by_kafka(kafka, path, "--offsets-decoder")
    decoded = decoded_by_logcore(path)
    assert decoded.keys() == expected.keys()
    record_names = set()
    for offset, content in expected.items():
        decoded_record = decoded[offset]
        key = content["key"]
        record_names.add(int(key["type"]))
        name = key["data"].get("group", key["data"].get("groupId"))
        assert decoded_record["group"] == name
        payload = content.get("payload")
        if key["type"] in ("0", "1"):
            assert decoded_record["partition"] == key["data"]["partition"]
            assert decoded_record["committed"]["offset"] == payload["data"]["offset"]
            assert (
                decoded_record["committed"]["commit_timestamp_ms"]
                == payload["data"]["commitTimestamp"]
            )
        elif key["type"] == "2" and payload is not None:
            assert (
                decoded_record["metadata"]["generation"]
                == payload["data"]["generation"]
            )
            assert [
                member["member_id"] for member in decoded_record["metadata"]["members"]
            ] == [entry["memberId"] for entry in payload["data"]["members"]]
        elif "kind" in decoded_record:
            assert (decoded_record["value"] is None) == (payload is None)
    assert record_names >= {1, 2, 3, 5}
