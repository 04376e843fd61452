"""The calls of the schema registry: answers and codes."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("avro")
pytest.importorskip("fastavro")
pytest.importorskip("jsonschema")
pytest.importorskip("uvicorn")

import logcore
from logcore.cleaner import clean
from netshim.testing import Kafka
from support.registry_calls import RECORD, RegistryClient, record

NUMBER = {"name": "amount", "type": "int"}
NOTE = {"name": "note", "type": "string"}
NOTE_DEFAULT = {**NOTE, "default": ""}


def test_same_schema_has_one_id(registry: RegistryClient) -> None:
    assert registry.register("a", RECORD) == 1
    assert registry.register("a", json.dumps(RECORD, indent=8)) == 1
    assert registry.register("b", {**RECORD, "type": "record"}) == 1
    assert registry.register("b", record(NUMBER, NOTE_DEFAULT)) == 2
    assert registry.get("/subjects") == ["a", "b"]
    assert registry.get("/subjects/b/versions") == [1, 2]
    assert registry.get("/schemas/ids/1/subjects") == ["a", "b"]
    assert registry.get("/schemas/ids/1/versions") == [
        {"subject": "a", "version": 1},
        {"subject": "b", "version": 1},
    ]
    assert registry.get("/schemas/types") == ["JSON", "PROTOBUF", "AVRO"]
    assert registry.get("/contexts") == ["."]


def test_schema_is_found_by_id_guid_and_text(registry: RegistryClient) -> None:
    registry.register("a", RECORD)
    found = registry.get("/schemas/ids/1")
    assert json.loads(found["schema"]) == RECORD
    assert "schemaType" not in found
    guid = found["guid"]
    assert str(uuid.UUID(guid)) == guid
    assert registry.get(f"/schemas/guids/{guid.upper()}")["id"] == 1
    assert registry.get("/schemas/ids/1/schema") == RECORD
    assert registry.get("/subjects/a/versions/latest/schema") == RECORD
    version = registry.get("/subjects/a/versions/latest")
    assert version == {"subject": "a", "version": 1, **found}
    found_by_text = registry.call("POST", "/subjects/a", {"schema": json.dumps(RECORD)})
    assert found_by_text == version
    assert registry.get("/subjects/a/metadata") == version
    assert registry.get("/schemas?subjectPrefix=a") == [version]


def test_cached_answer_is_dropped_by_a_change(registry: RegistryClient) -> None:
    registry.register("a", RECORD)
    for path in ("/schemas/ids/1", "/subjects", "/config"):
        assert registry.get(path) == registry.get(path)
    registry.call("PUT", "/config", {"compatibility": "FULL"})
    assert registry.get("/config")["compatibilityLevel"] == "FULL"
    registry.register("b", RECORD)
    assert registry.get("/subjects") == ["a", "b"]
    for subject in ("a", "b"):
        registry.delete(f"/subjects/{subject}")
        registry.delete(f"/subjects/{subject}?permanent=true")
    assert registry.get("/schemas/ids/1") == 40403
    assert registry.get("/subjects") == []


def test_cached_answer_is_dropped_by_a_rollback(
    kafka: Kafka, registry: RegistryClient
) -> None:
    before = kafka.snapshot()
    registry.register("a", RECORD)
    first = registry.get("/schemas/ids/1")
    kafka.rollback(before)
    assert registry.get("/schemas/ids/1") == 40403
    registry.register("a", record(NUMBER, name="Other"))
    assert registry.get("/schemas/ids/1") != first


def test_missing_names_get_the_error_codes_of_the_registry(
    registry: RegistryClient,
) -> None:
    wanted = {"schema": record(NUMBER, name="Other")}
    assert registry.get("/subjects/a/versions") == 40401
    assert registry.get("/subjects/a/versions/1") == 40401
    assert registry.call("POST", "/subjects/a", wanted) == 40401
    assert registry.delete("/subjects/a") == 40401
    assert registry.get("/schemas/ids/1") == 40403
    assert registry.get("/schemas/ids/x") == 40403
    assert registry.get(f"/schemas/guids/{uuid.UUID(int=1)}") == 40403
    assert registry.get("/config/a") == 40408
    assert registry.get("/mode/a") == 40409
    registry.register("a", RECORD)
    assert registry.get("/subjects/a/versions/2") == 40402
    assert registry.call("POST", "/subjects/a", wanted) == 40403
    for version in ("0", "-2", "x", "1.0", str(1 << 31)):
        assert registry.get(f"/subjects/a/versions/{version}") == 42202
    for path in ("/associations/resources/a/b", "/exporters", "/nothing", "/subjects/"):
        assert registry.get(path) in (404, ["a"])
    assert registry.call("POST", "/subjects") == 405


def test_deletion_is_soft_before_it_is_permanent(registry: RegistryClient) -> None:
    registry.register("a", RECORD)
    registry.register("a", record(NUMBER, NOTE_DEFAULT))
    assert registry.delete("/subjects/a/versions/1?permanent=true") == 40407
    assert registry.delete("/subjects/a/versions/1") == 1
    assert registry.delete("/subjects/a/versions/1") == 40406
    assert registry.get("/subjects/a/versions") == [2]
    assert registry.get("/subjects/a/versions?deleted=true") == [1, 2]
    assert registry.get("/subjects/a/versions/1") == 40402
    assert registry.get("/subjects/a/versions/1?deleted=true")["id"] == 1
    assert registry.get("/schemas/ids/1")["id"] == 1
    assert registry.delete("/subjects/a/versions/1?permanent=true") == 1
    assert registry.get("/schemas/ids/1") == 40403
    assert registry.delete("/subjects/a?permanent=true") == 40405
    assert registry.delete("/subjects/a") == [2]
    assert registry.delete("/subjects/a") == 40404
    assert registry.get("/subjects") == []
    assert registry.get("/subjects?deleted=true") == ["a"]
    # Ids are not used again, and versions continue.
    assert registry.register("a", record(NOTE)) == 3
    assert registry.get("/subjects/a/versions") == [3]
    registry.delete("/subjects/a")
    assert registry.delete("/subjects/a?permanent=true") == [2, 3]
    assert registry.get("/subjects?deleted=true") == []
    registry.register("a", record(NOTE))
    assert registry.get("/subjects/a/versions") == [1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("level", "adds_default", "adds", "removes"),
    [
        ("NONE", True, True, True),
        ("BACKWARD", True, False, True),
        ("BACKWARD_TRANSITIVE", True, False, True),
        ("FORWARD", True, True, False),
        ("FORWARD_TRANSITIVE", True, True, False),
        ("FULL", True, False, False),
        ("FULL_TRANSITIVE", True, False, False),
    ],
)
def test_avro_compatibility_levels(
    registry: RegistryClient,
    level: str,
    adds_default: bool,
    adds: bool,
    removes: bool,
) -> None:
    registry.register("a", record(NUMBER, {"name": "old", "type": "int"}))
    put = registry.call("PUT", "/config/a", {"compatibility": level.lower()})
    assert put == {"compatibility": level}
    assert registry.get("/config/a")["compatibilityLevel"] == level
    old = {"name": "old", "type": "int"}
    cases = [
        (record(NUMBER, old, NOTE_DEFAULT), adds_default),
        (record(NUMBER, old, NOTE), adds),
        (record(NUMBER), removes),
    ]
    for text, is_fine in cases:
        for path in ("versions", "versions/latest", "versions/1"):
            answer = registry.call(
                "POST",
                f"/compatibility/subjects/a/{path}?verbose=true",
                {"schema": text},
            )
            assert answer["is_compatible"] is is_fine
            assert bool(answer["messages"]) is not is_fine
    for text, is_fine in cases:
        if not is_fine:
            assert registry.register("a", text) == 409


def test_transitive_compatibility_compares_all_versions(
    registry: RegistryClient,
) -> None:
    """Version 3 can read values of version 2, but not values of version 1."""
    first = record({"name": "x", "type": "int"})
    second = record()
    third = record({"name": "x", "type": "string", "default": ""})
    registry.register("a", first)
    registry.register("a", second)
    path = "/compatibility/subjects/a/versions"
    assert registry.call("POST", path, {"schema": third}) == {"is_compatible": True}
    registry.call("PUT", "/config", {"compatibility": "BACKWARD_TRANSITIVE"})
    assert registry.call("POST", path, {"schema": third}) == {"is_compatible": False}
    assert registry.register("a", third) == 409
    assert registry.delete("/config") == {"compatibilityLevel": "BACKWARD_TRANSITIVE"}
    assert registry.register("a", third) == 3


def test_subject_settings_override_global_settings(registry: RegistryClient) -> None:
    assert registry.get("/config")["compatibilityLevel"] == "BACKWARD"
    assert "not compared" in registry.get("/config")["docs"]
    assert registry.call("PUT", "/config", {"compatibility": "sideways"}) == 42203
    assert registry.call("PUT", "/config/a", {"compatibility": 3}) == 42203
    registry.call("PUT", "/config", {"compatibility": "FULL"})
    assert registry.get("/config/a") == 40408
    found = registry.get("/config/a?defaultToGlobal=true")
    assert found["compatibilityLevel"] == "FULL"
    registry.call("PUT", "/config/a", {"compatibility": "NONE"})
    assert registry.delete("/config/a") == {"compatibilityLevel": "NONE"}
    assert registry.delete("/config/a") == 40408


def test_modes(registry: RegistryClient) -> None:
    assert registry.get("/mode") == {"mode": "READWRITE"}
    assert registry.call("PUT", "/mode", {"mode": "WRITEONLY"}) == 42204
    registry.register("a", RECORD)
    registry.call("PUT", "/mode/a", {"mode": "READONLY"})
    assert registry.register("a", record(NOTE)) == 42205
    assert registry.delete("/subjects/a") == 42205
    assert registry.register("a", RECORD) == 1  # it is registered
    assert registry.register("b", RECORD) == 1
    assert registry.delete("/mode/a") == {"mode": "READONLY"}
    registry.call("PUT", "/mode", {"mode": "READONLY_OVERRIDE"})
    assert registry.register("b", record(NOTE)) == 42205
    registry.delete("/mode")
    assert registry.call("PUT", "/mode/a", {"mode": "IMPORT"}) == 42205
    assert registry.call("PUT", "/mode/c", {"mode": "IMPORT"}) == {"mode": "IMPORT"}
    assert registry.register("c", record(NOTE)) == 42205
    assert registry.register("c", record(NOTE), id=77, version=5) == 77
    assert registry.get("/subjects/c/versions") == [5]
    assert registry.register("c", RECORD, id=77) == 42205
    assert registry.register("a", record(NUMBER, NOTE_DEFAULT)) == 78


def test_references_are_resolved_and_protected(registry: RegistryClient) -> None:
    money = record({"name": "cents", "type": "long"}, name="Money")
    order = record({"name": "price", "type": "Money"})
    references = [{"name": "Money", "subject": "money", "version": 1}]
    assert registry.register("order", order, references=references) == 42201
    assert registry.register("money", money) == 1
    assert registry.register("order", order) == 42201
    assert registry.register("order", order, references=references) == 2
    found = registry.get("/subjects/order/versions/1")
    assert found["references"] == references
    assert registry.get("/subjects/money/versions/1/referencedby") == [2]
    assert registry.delete("/subjects/money") == 42206
    assert registry.delete("/subjects/money/versions/1") == 42206
    wider = record(
        {"name": "price", "type": "Money"}, {"name": "n", "type": "int", "default": 0}
    )
    assert registry.register("order", wider, references=references) == 3
    registry.delete("/subjects/order")
    assert registry.delete("/subjects/money") == [1]


def test_json_and_protobuf_are_parsed_but_not_compared(
    registry: RegistryClient,
) -> None:
    pytest.importorskip("grpc_tools")
    for kind, old, new, bad in (
        ("JSON", '{"type":"object"}', '{"type":"string"}', '{"type":"thing"}'),
        (
            "PROTOBUF",
            'syntax = "proto3"; message A { int32 x = 1; }',
            'syntax = "proto3"; message A { string x = 1; }',
            'syntax = "proto3"; message A { integer x = 1; }',
        ),
    ):
        registry.register(kind, old, schemaType=kind)
        wanted = {"schema": new, "schemaType": kind}
        for path in ("versions", "versions/latest"):
            path = f"/compatibility/subjects/{kind}/{path}"
            answer = registry.call("POST", path, wanted)
            assert answer["is_compatible"] is True
            assert "not checked" in answer["messages"][0]
        answer = registry.call("POST", f"/subjects/{kind}/versions", wanted)
        assert "not checked" in answer["messages"][0]
        assert registry.get(f"/schemas/ids/{answer['id']}")["schemaType"] == kind
        assert registry.register(kind, bad, schemaType=kind) == 42201
        assert registry.register(kind, RECORD) == 409  # of another type


def test_metadata_makes_another_schema(registry: RegistryClient) -> None:
    owners = [{"properties": {"owner": name}} for name in ("anna", "ben")]
    for number, metadata in enumerate(owners, 1):
        assert registry.register("a", RECORD, metadata=metadata) == number
        assert registry.register("a", RECORD, metadata=metadata) == number
    guids = {registry.get(f"/schemas/ids/{number}")["guid"] for number in (1, 2)}
    assert len(guids) == 2
    for number, metadata in enumerate(owners, 1):
        name = metadata["properties"]["owner"]
        found = registry.get(f"/subjects/a/metadata?key=owner&value={name}")
        assert (found["id"], found["metadata"]) == (number, metadata)
    assert registry.get("/subjects/a/metadata?key=owner&value=eve") == 40403


def test_normalized_text_is_stored(registry: RegistryClient) -> None:
    text = json.dumps(dict(reversed(RECORD.items())), indent=4)
    path = "/subjects/a/versions?normalize=true"
    assert registry.call("POST", path, {"schema": text})["schema"] == (
        '{"type":"record","name":"Order","fields":[{"type":"int","name":"amount"}]}'
    )


def test_concurrent_registrations_are_serialized(
    kafka: Kafka, registry: RegistryClient
) -> None:
    """Two threads register each schema. Ids have no gaps, and no two rows conflict."""
    count = 20

    def register(number: int) -> Any:
        fields = [
            {"name": f"f{at}", "type": "int", "default": 0}
            for at in range(number % count + 1)
        ]
        return registry.register(f"s{number % 3}", record(*fields))

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(register, range(2 * count)))
    assert set(ids) == set(range(1, count + 1))
    assert ids[:count] == [ids[at] for at in range(count)]
    stored = [json.loads(record.value or b"") for record in kafka.records("_schemas")]
    assert len({(entry["subject"], entry["version"]) for entry in stored}) == len(
        stored
    )
    assert {entry["id"] for entry in stored} == set(ids)


def test_rollback_restores_schemas(kafka: Kafka, registry: RegistryClient) -> None:
    registry.register("a", RECORD)
    before = kafka.snapshot()
    registry.register("b", record(NOTE))
    registry.call("PUT", "/config", {"compatibility": "NONE"})
    kafka.rollback(before)
    assert registry.get("/subjects") == ["a"]
    assert registry.get("/config")["compatibilityLevel"] == "BACKWARD"
    assert registry.register("c", record(NUMBER, NOTE)) == 2


def test_restart_keeps_schemas(kafka_factory: Any) -> None:
    kafka = kafka_factory()
    registry = RegistryClient(kafka.schema_registry_url)
    registry.register("a", RECORD)
    registry.register("b", record(NOTE))
    registry.delete("/subjects/b")
    registry.call("PUT", "/config/a", {"compatibility": "FULL"})
    before = [
        registry.get(path)
        for path in ("/subjects?deleted=true", "/schemas?deleted=true", "/config/a")
    ]
    path = kafka.logdir.path
    kafka.stop()
    again = kafka_factory(path)
    registry = RegistryClient(again.schema_registry_url)
    assert before == [
        registry.get(path)
        for path in ("/subjects?deleted=true", "/schemas?deleted=true", "/config/a")
    ]
    assert registry.register("c", record(NOTE)) == 2


def test_compaction_keeps_schemas(kafka_factory: Any) -> None:
    kafka = kafka_factory()
    registry = RegistryClient(kafka.schema_registry_url)
    for number in range(5):
        registry.register(
            "a", record({"name": f"x{number}", "type": "int"}, NOTE_DEFAULT)
        )
        registry.call("PUT", "/config", {"compatibility": "NONE"})
    registry.delete("/subjects/a/versions/2")
    registry.delete("/subjects/a/versions/2?permanent=true")
    registry.delete("/subjects/a/versions/3")
    before = [registry.get("/schemas?deleted=true"), registry.get("/config")]
    path = kafka.logdir.path
    kafka.stop()
    with logcore.open_dir(path) as logdir:
        log = logdir.partition("_schemas", 0)
        log.roll()
        end = log.log_end_offset
        clean(log, force=True)
        assert len(list(log.read(0))) < end
    again = RegistryClient(kafka_factory(path).schema_registry_url)
    assert [again.get("/schemas?deleted=true"), again.get("/config")] == before
    assert again.register("a", record(NOTE)) == 6


def test_records_of_another_process_are_applied(kafka_factory: Any) -> None:
    kafka = kafka_factory(shared=True)
    registry = RegistryClient(kafka.schema_registry_url)
    registry.register("a", RECORD)
    code = """
import sys, logcore
from logcore.format.schema_records import level_record
key, value = level_record("a", "FULL")
with logcore.open_dir(sys.argv[1], shared=True) as logdir:
    logdir.partition("_schemas", 0).append(value, key=key)
"""
    command = [sys.executable, "-c", code, kafka.logdir.path]
    subprocess.run(command, check=True, timeout=60)
    assert registry.get("/config/a")["compatibilityLevel"] == "FULL"
    assert registry.register("b", record(NOTE)) == 2


def test_topic_is_compacted_with_one_partition(
    kafka: Kafka, registry: RegistryClient
) -> None:
    assert registry.get("/subjects") == []
    assert "_schemas" not in kafka.logdir
    registry.register("a", RECORD)
    topic = kafka.logdir.describe_topic("_schemas")
    assert topic.overrides == {"cleanup.policy": "compact"}
    assert len(topic.partitions) == 1


def test_schemas_topic_with_two_partitions_is_refused(
    kafka: Kafka, registry: RegistryClient
) -> None:
    kafka.create_topic("_schemas", 2)
    assert registry.register("a", RECORD) == 50001
    assert kafka.records("_schemas") == []
