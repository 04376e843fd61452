"""Invalid requests, and records of `_schemas` that no registry wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("avro")
pytest.importorskip("fastavro")
pytest.importorskip("jsonschema")
pytest.importorskip("uvicorn")

from logcore import InvalidConfigError
from logcore.format.schema_records import (
    SchemaReference,
    SchemaVersion,
    guid_of,
    version_record,
)
from logcore.schemas import ValueDecoder, load_schemas
from logcore.schemas.parsing import canonical_text
from netshim.testing import Kafka
from support.registry_calls import RECORD, RegistryClient, record


def rows(kafka: Kafka) -> int:
    """Return the number of records of `_schemas`."""
    return len(kafka.records("_schemas"))


def test_large_schemas_are_refused(kafka: Kafka, registry: RegistryClient) -> None:
    field = {"name": "x", "type": "int", "doc": "d" * (2 << 20)}
    assert registry.register("a", record(field)) == 413
    # Two bytes in JSON become three in UTF-8, but this is still one record.
    field["doc"] = "€" * (300 << 10)
    assert registry.register("a", record(field)) in (1, 413)
    field["doc"] = "d" * (900 << 10)
    assert registry.register("b", record(field)) in (1, 2)
    assert registry.register("a", record({"name": "x", "type": "long"})) != 500


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "nothing",
        "null",
        "[" * 500_000,
        '{"type":"array","items":' * 20_000,
        '{"type":"record","name":"a"}',
        '{"type":"record","name":"a b","fields":[]}',
        '{"type":"record","name":"a","fields":[{"name":"x","type":"y"}]}',
        '{"type":"record","name":"a","fields":[{"name":"x","type":"int","default":"s"}]}',
        '{"type":"enum","name":"a","symbols":["x","x"]}',
        '{"type":"fixed","name":"a","size":-1}',
        "9" * 5_000,
        json.dumps("\ud800"),
    ],
    ids=lambda text: text[:20],
)
def test_invalid_avro_is_refused(
    kafka: Kafka, registry: RegistryClient, text: str
) -> None:
    assert registry.register("a", text) == 42201
    assert registry.get("/subjects?deleted=true") == []
    assert rows(kafka) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"schemaType": "XML"}, 42201),
        ({"schema": 3}, 42201),
        ({"schema": "\ud800"}, 42201),
        ({"references": {}}, 42201),
        ({"references": [{"name": "x"}]}, 42201),
        ({"references": [{"name": "x", "subject": "x", "version": 0}]}, 42201),
        ({"references": [{"name": "x", "subject": "x", "version": 1}]}, 42201),
        ({"metadata": []}, 1),
        ({"metadata": 3}, 42201),
        ({"ruleSet": {"domainRules": [{}]}}, 42210),
        ({"id": "7"}, 42201),
        ({"id": 1 << 40}, 42201),
        ({"id": 7}, 42205),
        ({"schemaType": "JSON", "schema": '{"type":"thing"}'}, 42201),
        ({"schemaType": "JSON", "schema": '{"$ref":"other.json"}'}, 42201),
        ({"schemaType": "JSON", "schema": "[" * 100_000}, 42201),
        ({"schemaType": "JSON", "schema": '{"pattern":"("}'}, 42201),
    ],
    ids=str,
)
def test_bodies_with_wrong_fields_are_refused(
    registry: RegistryClient, fields: dict[str, Any], code: int
) -> None:
    body = {"schema": json.dumps(RECORD), **fields}
    answer = registry.call("POST", "/subjects/a/versions", body)
    assert (answer if isinstance(answer, int) else answer["id"]) == code


@pytest.mark.long
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_bodies_that_are_not_objects_are_refused(
    registry: RegistryClient, body: bytes
) -> None:
    status, answer = registry.raw("POST", "/subjects/a/versions", body)
    assert status in (400, 422), answer


def test_unusual_subject_names_are_accepted_or_refused(
    registry: RegistryClient,
) -> None:
    for name in ("a/b", "ä b", "%2F", "a?b#c", "..", "x" * 1_000):
        assert registry.register(name, RECORD) == 1
    assert registry.get("/subjects/a%2Fb/versions/1")["subject"] == "a/b"
    assert registry.get("/subjects/a/b/versions") == 404
    for name in (" ", "a\0b", "a\nb", "__GLOBAL", ":.ctx:a", "x" * 1_001):
        assert registry.register(name, RECORD) == 42208


def test_chains_of_references_have_a_limit(
    kafka: Kafka, registry: RegistryClient
) -> None:
    found = 0
    for number in range(100):
        name = f"N{number}"
        fields = [{"name": "x", "type": f"N{number - 1}"}] if number else []
        references = [
            {"name": f"N{number - 1}", "subject": f"N{number - 1}", "version": 1}
        ] * bool(number)
        found = registry.register(
            name, record(*fields, name=name), references=references
        )
        if found == 42201:
            break
    assert found == 42201
    assert rows(kafka) == number == 33


def test_foreign_records_are_skipped_and_counted(
    kafka: Kafka, registry: RegistryClient
) -> None:
    registry.register("a", RECORD)
    log = kafka.logdir.partition("_schemas", 0)

    def key(**fields: Any) -> bytes:
        return json.dumps({"keytype": "SCHEMA", "magic": 1, **fields}).encode()

    good = {"subject": "b", "version": 1, "id": 9, "schema": '"int"'}
    wrong = [
        (b"no JSON", b"{}"),
        (b"[" * 100_000, b"{}"),
        (b"[]", b"{}"),
        (b'{"keytype":"SURPRISE"}', b"{}"),
        (key(subject="b"), b"{}"),
        (key(subject="b", version=1), b"no JSON"),
        (key(subject="b", version=1), json.dumps({**good, "id": 0}).encode()),
        (key(subject="b", version=1), json.dumps({**good, "schema": 3}).encode()),
        (key(subject="b", version=1), json.dumps({**good, "schema": "["}).encode()),
        (key(subject="b", version=1), json.dumps({**good, "guid": "x"}).encode()),
        (key(subject="b", version=1), json.dumps({**good, "id": 1}).encode()),
        (key(subject=":.c:b", version=1), json.dumps(good).encode()),
        (b'{"keytype":"CONFIG","subject":null}', b'{"compatibilityLevel":"UP"}'),
        (b'{"keytype":"MODE","subject":3}', b'{"mode":"READONLY"}'),
        (b'{"keytype":"DELETE_SUBJECT","subject":"a"}', b"{}"),
    ]
    for data, value in wrong:
        log.append(value, key=data)
    for data, value in (
        (key(subject="b", version=3), json.dumps({**good, "version": 3}).encode()),
        (b'{"keytype":"NOOP","magic":0}', None),
        (b'{"keytype":"DELETE_SUBJECT","subject":"c"}', None),
    ):
        log.append(value, key=data)
    about = registry.get("/")
    assert about["skipped_records"] == len(wrong)
    assert len(about["skipped"]) == 10
    assert registry.get("/subjects") == ["a", "b"]
    assert registry.get("/schemas/ids/9/versions") == [{"subject": "b", "version": 3}]
    assert registry.register("c", record({"name": "n", "type": "long"})) == 10
    state = load_schemas(log.read(0))
    assert state.skipped == len(wrong)
    state.apply(99, None, b"{}")  # a compacted topic refuses records without a key
    assert state.skipped == len(wrong) + 1


def test_cycles_of_references_are_refused(
    kafka: Kafka, registry: RegistryClient
) -> None:
    registry.register("z", RECORD)
    log = kafka.logdir.partition("_schemas", 0)
    for number, subject, other in ((7, "a", "b"), (8, "b", "a")):
        text = record({"name": "x", "type": other.upper()}, name=subject.upper())
        references = (SchemaReference(other.upper(), other, 1),)
        key, value = version_record(
            SchemaVersion(
                subject=subject,
                version=1,
                id=number,
                guid=guid_of("AVRO", text, references),
                text=text,
                references=references,
            )
        )
        log.append(value, key=key)
    fields = {"name": "x", "type": "A"}
    references = [{"name": "A", "subject": "a", "version": 1}]
    assert registry.register("c", record(fields), references=references) == 42201
    assert registry.get("/subjects/a/versions/1")["id"] == 7
    piece = ValueDecoder(load_schemas(log.read(0))).decode(b"\0\0\0\0\x07\0")
    assert piece.error is not None and "part of a cycle" in piece.error


def test_deletions_during_registrations_leave_no_partial_state(
    kafka: Kafka, registry: RegistryClient
) -> None:
    """The answers equal those of some serial order of the calls. A restart finds the
    same state.
    """
    found: list[Any] = []
    done = threading.Event()

    def delete() -> None:
        while not done.is_set():
            for path in ("/subjects/a", "/subjects/a?permanent=true"):
                answer = registry.delete(path)
                assert isinstance(answer, list) or answer in (40401, 40404, 40405)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for number in range(60):
            schema = record({"name": f"x{number}", "type": "int", "default": 0})
            found.append(registry.register("a", schema))
    finally:
        done.set()
        thread.join()
    assert all(entry < 100 for entry in found), found
    state = load_schemas(kafka.logdir.partition("_schemas", 0).read(0))
    assert state.skipped == 0
    assert [version.version for version in state.active("a")] == (
        [] if (versions := registry.get("/subjects/a/versions")) == 40401 else versions
    )


def test_web_pages_are_refused(registry: RegistryClient) -> None:
    for headers in (
        {"Host": "evil.example"},
        {"Host": "evil.example", "X-Forwarded-Proto": "https"},
        {"Origin": registry.url},
    ):
        status, answer = registry.raw("GET", "/subjects", headers=headers)
        assert (status, answer["error_code"]) == (403, 403)


def test_unclosed_comments_are_parsed_in_linear_time() -> None:
    for text in ("/*" * 300_000, '"\\' * 300_000, '\\"' * 300_000, "'" * 300_001):
        started_s = time.process_time()
        canonical_text("PROTOBUF", text)
        assert time.process_time() - started_s < 20


@pytest.mark.long
def test_deep_or_foreign_protobuf_is_refused(registry: RegistryClient) -> None:
    pytest.importorskip("grpc_tools")
    for text in (
        "message",
        'syntax = "proto3"; import "/etc/passwd";',
        'syntax = "proto3"; import "../../x.proto";',
        'syntax = "proto3";' + "message A {" * 200,
        "aGVsbG8=",
    ):
        assert registry.register("a", text, schemaType="PROTOBUF") == 42201


def test_registry_outside_of_this_machine_needs_an_option(tmp_path: Path) -> None:
    click_testing = pytest.importorskip("click.testing")
    from netshim.command import main

    command = ["serve", str(tmp_path / "data"), "--port", "0", "--schema-registry"]
    for options, words in (
        (["0.0.0.0:0"], "--insecure"),
        (["nowhere"], "expected [HOST:]PORT"),
        (["0", "--registry", str(tmp_path / "r"), "--node-id", "1"], "in a cluster"),
    ):
        done = click_testing.CliRunner().invoke(main, [*command, *options])
        assert done.exit_code == 2, done.output
        assert words in done.output


@pytest.mark.long
def test_command_serves_a_registry(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "netshim", "serve", str(tmp_path / "data")]
    command += ["--port", "0", "--schema-registry", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        broker.stdout.readline()
        line = broker.stdout.readline()
        assert line.startswith("netshim: schema registry http://127.0.0.1:")
        registry = RegistryClient(line.split()[-1])
        assert registry.register("a", RECORD) == 1
        broker.terminate()
    assert broker.returncode == 0


def test_stopped_broker_has_no_registry(kafka: Kafka) -> None:
    kafka.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        kafka.schema_registry_url


def test_missing_packages_are_named(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    from netshim.schemas import hosting

    monkeypatch.setattr(hosting, "missing_packages", lambda: ["avro"])
    with pytest.raises(InvalidConfigError, match=r"http,schemas.*no avro"):
        kafka.schema_registry_url


@pytest.mark.long
def test_nothing_is_imported_while_console_and_registry_are_off(
    tmp_path: Path,
) -> None:
    code = """
import sys, threading
import netshim.command, netshim.pytest_plugin, logcore.cli.commands
import netshim.testing
with netshim.serve(sys.argv[1]):
    threads = [one.name for one in threading.enumerate()]
print([one for one in threads if one.startswith("netshim-http")] +
    sorted(one for one in sys.modules if one.split(".")[0] in
    ("starlette", "uvicorn", "fastavro", "avro", "jsonschema", "google", "jinja2")
    or one.startswith(("netshim.schemas", "netshim.console.", "netshim.http.", "logcore.schemas"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"
