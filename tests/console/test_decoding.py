"""The console shows values by the schemas of the directory."""

from __future__ import annotations

import json

import pytest

import logcore
from support.avro_schemas import APPLES, SHOWN, add_schema
from support.consoles import ConsoleClient

pytest.importorskip("fastavro")


def test_values_are_shown_by_their_schemas(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders")
    framed = b"\0" + (1).to_bytes(4, "big") + APPLES
    logdir.append("orders", framed)
    logdir.append("orders", b"\0" + (7).to_bytes(4, "big") + APPLES)
    logdir.append("orders", b"\0" + (1).to_bytes(4, "big") + b"\xff")
    page = console.get("/topics/orders/messages")
    assert SHOWN not in page.text
    logdir.create_topic("_schemas")
    add_schema(logdir, 1, 1)
    page = console.get("/topics/orders/messages")
    assert SHOWN in page.text
    page = console.get("/topics/orders/messages/0/0")
    assert "Avro schema 1" in page.text
    assert "apples" in page.text and f"{len(framed)} bytes" in page.text
    page = console.get("/topics/orders/messages/0/1")
    assert "not decoded: unknown schema id 7" in page.text
    page = console.get("/topics/orders/messages/0/2")
    assert "not decoded: the value does not have its schema" in page.text
    # The console reads new schemas.
    add_schema(logdir, 7, 2)
    page = console.get("/topics/orders/messages/0/1")
    assert "Avro schema 7" in page.text


def test_half_of_a_surrogate_pair_is_shown_as_an_escape(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    """UTF-8 cannot encode half of a surrogate pair, so that the page of the message
    failed.
    """
    logdir.create_topic("orders")
    logdir.create_topic("_schemas")
    key = {"keytype": "SCHEMA", "subject": "orders-value", "version": 1, "magic": 1}
    value = {
        "subject": "orders-value",
        "version": 1,
        "id": 1,
        "schemaType": "JSON",
        "schema": '{"type": "object"}',
        "deleted": False,
    }
    text = json.dumps(value).encode()
    logdir.append("_schemas", text, key=json.dumps(key).encode())
    logdir.append("orders", b"\0\0\0\0\1" + rb'{"item": "\ud800"}')
    page = console.page("/topics/orders/messages/0/0")
    assert "JSON schema 1" in page.text
    assert "ud800" in page.text
    assert "ud800" in console.page("/topics/orders/messages").text
