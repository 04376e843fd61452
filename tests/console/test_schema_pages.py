"""The pages of the schemas of a directory."""

from __future__ import annotations

import json

import logcore
from support.consoles import ConsoleClient


def store(
    logdir: logcore.LogDir, subject: str, version: int, number: int, text: str,
    kind: str = "AVRO",
) -> None:  # fmt: skip
    """Store a version as Confluent's registry does."""
    key = {
        "keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1,
    }  # fmt: skip
    value = {
        "subject": subject, "version": version, "id": number, "schema": text,
        "schemaType": kind, "deleted": False,
    }  # fmt: skip
    logdir.append("_schemas", json.dumps(value).encode(), key=json.dumps(key).encode())


def order(*fields: str) -> str:
    return json.dumps(
        {
            "type": "record",
            "name": "Order",
            "fields": [{"name": field, "type": "string"} for field in fields],
        }
    )


def test_subjects_and_versions_are_shown(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    assert "No schema is registered here" in console.page("/schemas").text
    logdir.create_topic("orders", 1)
    logdir.create_topic("_schemas", 1, {"cleanup.policy": "compact"})
    store(logdir, "orders-value", 1, 1, order("item"))
    store(logdir, "orders-value", 2, 2, order("item", "store"))
    store(logdir, "<b>x</b>\u202e-key", 1, 3, '"string"')
    logdir.append("_schemas", b"no JSON", key=b"neither")
    page = console.page("/schemas")
    assert page.rows() == [
        ["<b>x</b>\\u202e-key", "Avro", "1", "1", "3", "BACKWARD", "–"],
        ["orders-value", "Avro", "2", "2", "2", "BACKWARD", "orders"],
    ]
    assert "1 record was skipped" in page.text
    assert console.page("/schemas?filter=orders").text.count("orders-value") == 1
    page = console.page("/schema?subject=orders-value")
    assert "Changes since version 1" in page.text
    assert '+ "name": "store"' in page.text
    assert "used by the topic orders" in page.text
    page = console.page("/schema?subject=orders-value&version=1&against=2")
    assert '- "name": "store"' in page.text
    page = console.page("/schema?subject=orders-value&version=1")
    assert "Changes since" not in page.text
    page = console.page("/schema?subject=%3Cb%3Ex%3C%2Fb%3E%E2%80%AE-key")
    assert "<b>x" not in page.source


def test_unknown_subject_or_version_is_not_found(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("_schemas", 1)
    store(logdir, "orders-value", 1, 1, order("item"))
    assert console.get("/schema?subject=missing").status == 404
    assert console.get("/schema").status == 404
    assert console.get("/schema?subject=orders-value&version=9").status == 404
    assert console.get("/schema?subject=orders-value&against=9").status == 404
    assert console.get("/schema?subject=orders-value&version=x").status == 400
