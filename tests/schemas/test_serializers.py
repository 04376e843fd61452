"""The serializers of confluent-kafka use the registry, and `logcore` decodes their
topics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("avro")
pytest.importorskip("fastavro")
pytest.importorskip("jsonschema")
pytest.importorskip("uvicorn")

import logcore
from logcore.schemas import RemoteSchemas, ValueDecoder, load_schemas
from netshim.testing import Kafka
from support.serialized import (
    VALUES,
    MessageField,
    SerializationContext,
    SerializedTopics,
    confluent_kafka,
    json_format,
)

click_testing = pytest.importorskip("click.testing")
from logcore.cli.commands import main  # noqa: E402

TOPICS = list(VALUES)


def run(*arguments: object) -> Any:
    done = click_testing.CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), (
        done.exception
    )
    return done


def lines(*arguments: object) -> list[dict[str, Any]]:
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(params=[False, True], ids=["in values", "in headers"])
def topics(kafka: Kafka, request: pytest.FixtureRequest) -> Iterator[SerializedTopics]:
    """Write topics whose records name their schemas in values or in headers."""
    with SerializedTopics(kafka, in_headers=request.param) as made:
        for topic in TOPICS:
            made.produce(topic)
        yield made


@pytest.fixture(scope="module")
def data(kafka_module: Kafka) -> Iterator[Path]:
    """A directory with the three topics, and a record whose schema is unknown."""
    with SerializedTopics(kafka_module) as made:
        for topic in TOPICS:
            made.produce(topic)
    kafka_module.create_topic("mixed")
    for value in (b"\0\0\0\0\x63bytes", b"\0\0\0\0\2\xff", b"plain", b"\0"):
        kafka_module.logdir.append("mixed", value)
    yield Path(kafka_module.logdir.path)


@pytest.mark.long
@pytest.mark.parametrize("topic", TOPICS)
def test_deserializers_return_the_serialized_values(
    topics: SerializedTopics, topic: str
) -> None:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": topics.kafka.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    deserialize = topics.deserializer(topic)
    found = []
    while len(found) < len(VALUES[topic]):
        message = consumer.poll(60)
        assert message is not None and message.error() is None
        context = SerializationContext(topic, MessageField.VALUE, message.headers())
        value = deserialize(message.value(), context)
        if topic == "shipments":
            value = json_format.MessageToDict(value)
        elif topic == "orders":
            at = value["at"].isoformat(timespec="milliseconds")
            value = {**value, "at": at.replace("+00:00", "Z")}
        found.append(value)
    consumer.close()
    assert found == VALUES[topic]


@pytest.mark.long
def test_decoder_finds_schemas_in_the_directory_and_at_a_registry(
    topics: SerializedTopics,
) -> None:
    kafka = topics.kafka
    local = ValueDecoder(load_schemas(kafka.logdir.partition("_schemas", 0).read(0)))
    remote = ValueDecoder(RemoteSchemas(kafka.schema_registry_url))
    for topic in TOPICS:
        for record, value in zip(kafka.records(topic), VALUES[topic], strict=True):
            for decoder in (local, remote):
                piece = decoder.decode(record.value, record.headers)
                assert piece.error is None
                assert piece.value == value
                assert json.loads(piece.text) == value
                assert piece.schema is not None
                assert piece.schema.keys() == {"id", "guid", "type"}


def test_read_decodes_values(data: Path) -> None:
    for topic in TOPICS:
        found = lines("read", data, topic, "--schemas", "--json")
        assert [row["value"] for row in found] == VALUES[topic]
        assert "value_schema" in found[0] and "key_schema" not in found[0]
    text = run("read", data, "customers", "--schemas", "--format", "%k %s\\n").stdout
    assert text.splitlines()[1] == '1 {"id":1,"name":"c1"}'
    tail = lines("tail", data, "customers", "--schemas", "--json", "-n", 1)
    assert tail[0]["value"] in VALUES["customers"]


def test_read_of_unknown_schemas_shows_bytes_and_reasons(data: Path) -> None:
    unknown, damaged, plain, short = lines("read", data, "mixed", "--schemas", "--json")
    assert unknown["value"] == "\0\0\0\0cbytes" or unknown["value"] == {
        "hex": "0000000063" + b"bytes".hex()
    }
    assert unknown["value_schema"] == {"id": 99}
    assert unknown["value_error"] == "unknown schema id 99"
    assert damaged["value"] == {"hex": "0000000002ff"}
    assert "does not have its schema" in damaged["value_error"]
    assert (plain["value"], plain.keys() & {"value_schema", "value_error"}) == (
        "plain",
        set(),
    )
    assert short["value"] == {"hex": "00"}


def test_read_of_one_partition_finds_the_schemas_of_its_directory(data: Path) -> None:
    found = lines("read", data / "customers-0", "--schemas", "--json")
    assert [row["value"] for row in found] == VALUES["customers"]


def test_sql_joins_two_decoded_topics(data: Path) -> None:
    pytest.importorskip("duckdb")
    query = """
        select o.value->>'$.id' as id, c.value->>'$.name' as name,
               cast(o.value->>'$.price.cents' as int) as cents,
               s.value->>'$.weight.grams' as grams
        from orders o
        join customers c on o.value->>'$.id' = c.value->>'$.id'
        left join shipments s on s.value->>'$.order' = o.value->>'$.id'
        order by 1
    """
    assert lines("sql", data, query, "--schemas", "--json") == [
        {
            "id": str(number),
            "name": f"c{number}",
            "cents": 100 * number,
            "grams": str(number) if number else None,
        }
        for number in range(5)
    ]
    done = run("sql", data, "select value from mixed", "--schemas", "--json")
    assert "1 keys or values are not decoded: unknown schema id 99" in done.stderr


def test_export_to_files_decodes_values(data: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    for topic in TOPICS:
        target = tmp_path / f"{topic}.parquet"
        assert run("export", data, topic, "--to", target, "--schemas").exit_code == 0
        texts = pq.read_table(target)["value"].to_pylist()
        assert list(map(json.loads, texts)) == VALUES[topic]
    target = tmp_path / "orders.ndjson"
    assert run("export", data, "orders", "--to", target, "--schemas").exit_code == 0
    rows = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    assert [row["value"] for row in rows] == VALUES["orders"]


@pytest.mark.parametrize("topic", TOPICS)
def test_export_to_tables_decodes_values(
    data: Path, tmp_path: Path, topic: str
) -> None:
    deltalake = pytest.importorskip("deltalake")
    table = tmp_path / topic
    kind = "avro" if topic == "orders" else "registry"
    done = run(
        "export", data, topic, "--to", "delta", "--table", table,
        "--value", kind, "--schemas",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    # A table does not keep the order of its files.
    found = deltalake.DeltaTable(str(table)).to_pyarrow_table()
    rows = found.sort_by("offset").to_pylist()
    for row, value in zip(rows, VALUES[topic], strict=True):
        for name, expected in value.items():
            if name == "at":
                found = row[name].isoformat(timespec="milliseconds")
                assert found.replace("+00:00", "Z") == expected
            else:
                assert row[name] == expected


def test_directory_without_schemas_names_the_option(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("orders")
    done = run("read", tmp_path / "data", "orders", "--schemas")
    assert done.exit_code == 2
    assert "--schema-registry URL" in done.stderr
    done = run("read", tmp_path / "data", "orders", "--schema-registry", "nowhere")
    assert done.exit_code == 2 and "http://HOST:PORT" in done.stderr
    url = "http://127.0.0.1:1"
    done = run("read", tmp_path / "data", "orders", "--schema-registry", url)
    assert done.exit_code == 2 and "does not answer" in done.stderr


def test_half_of_a_surrogate_pair_does_not_fail_a_query(tmp_path: Path) -> None:
    """UTF-8 cannot encode half of a surrogate pair. One such value failed the whole
    query.
    """
    key = {"keytype": "SCHEMA", "subject": "t-value", "version": 1, "magic": 1}
    schema = {
        "subject": "t-value",
        "version": 1,
        "id": 1,
        "schemaType": "JSON",
        "schema": '{"type": "object"}',
        "deleted": False,
    }
    with logcore.open_dir(tmp_path, create=True, durability="os") as directory:
        directory.create_topic("_schemas")
        text = json.dumps(schema).encode()
        directory.append("_schemas", text, key=json.dumps(key).encode())
        directory.create_topic("t")
        for item in (rb'"\ud800"', b'"plain"'):
            directory.append("t", b"\0\0\0\0\1" + b'{"item":' + item + b"}")
    query = "select value->>'$.item' as item from t where \"offset\" = 1"
    assert lines("sql", tmp_path, query, "--schemas", "--json") == [{"item": "plain"}]
    found = lines("sql", tmp_path, "select value from t", "--schemas", "--json")
    assert found[0] == {"value": '{"item":"\\ud800"}'}
    assert len(lines("read", tmp_path, "t", "--schemas", "--json")) == 2
