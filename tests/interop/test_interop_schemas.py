"""Clients of other languages with the schema registry."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from typing import Any

import pytest

from logcore.schemas import ValueDecoder, load_schemas
from netshim.testing import Kafka
from support import golang, npm
from support.serialized import VALUES, SerializedTopics
from support.vectors import DATA

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]
KAFKAJS = "@kafkajs/confluent-schema-registry@4.1.0"


def printed_json(command: list[str], **variables: str) -> Any:
    """Return the JSON that a program prints."""
    result = subprocess.run(
        command,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3_000:]
    return json.loads(result.stdout)


def decoder(kafka: Kafka) -> ValueDecoder:
    return ValueDecoder(load_schemas(kafka.logdir.partition("_schemas", 0).read(0)))


def test_franz_go_uses_the_schema_registry(kafka: Kafka) -> None:
    results = printed_json([str(golang.program("franz_sr")), kafka.schema_registry_url])
    assert json.loads(results.pop("text"))["name"] == "Order"
    encoded = base64.b64decode(results.pop("encoded"))
    assert results == {
        "types": results["types"],
        "ids": [1, 2],
        "version": 1,
        "same": 2,
        "users": 1,
        "compatible": False,
        "refused": 409,
        "level": "FORWARD",
        "stored level": "FORWARD",
        "second": 2,
        "subjects": ["franz-value", "franz/money"],
        "unknown": 40403,
        "json": "JSON",
        "deleted": [1, 2],
        "deleted for good": [1, 2],
    }
    assert encoded == b"\0\0\0\0\2\x2a"


def test_kafkajs_uses_the_schema_registry(kafka: Kafka) -> None:
    """kafkajs reads values that confluent-kafka serialized, and logcore decodes the
    Avro and JSON values that kafkajs serialized.
    """
    modules = npm.modules("kafkajs-registry", KAFKAJS)
    with SerializedTopics(kafka) as topics:
        topics.produce("orders")
        topics.produce("customers")
    values = [
        base64.b64encode(kafka.records(topic)[1].value or b"").decode()
        for topic in ("orders", "customers")
    ]
    program = str(DATA / "kafkajs_registry" / "client.js")
    url = kafka.schema_registry_url
    results = printed_json(["node", program, url, *values], NODE_PATH=str(modules))
    expected = {
        "avro": {"amount": 7},
        "json": {"name": "anna"},
        "protobuf": {"order": 7, "box": {"label": "x"}},
    }
    assert results["decoded"] == expected
    order, customer = results["others"]
    assert order["price"] == VALUES["orders"][1]["price"]
    assert customer == VALUES["customers"][1]
    assert "9999 not found" in results["unknown"]
    decode = decoder(kafka).decode
    for name in ("avro", "json"):
        decoded = decode(base64.b64decode(results["encoded"][name]))
        assert (decoded.value, decoded.error) == (expected[name], None)
    # This client writes no message indexes, which the format of Confluent requires.
    data = base64.b64decode(results["encoded"]["protobuf"])
    assert data[5:] == b"\x08\x07\x12\x03\x0a\x01x"
    decoded = decode(data)
    assert decoded.error is not None and "message" in decoded.error
