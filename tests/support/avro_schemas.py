"""An Avro schema and an encoded value of the schema, as a schema registry stores them."""

from __future__ import annotations

import json

import logcore

SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "item", "type": "string"}, {"name": "amount", "type": "int"}],
}
#: An Order as JSON.
SHOWN = '{"item":"apples","amount":4}'
#: The same Order in Avro. The size of the text and the amount are zig-zag varints.
APPLES = b"\x0capples\x08"


def add_schema(directory: logcore.LogDir, number: int, version: int) -> None:
    key = {
        "keytype": "SCHEMA",
        "subject": "orders-value",
        "version": version,
        "magic": 1,
    }
    value = {
        "subject": "orders-value",
        "version": version,
        "id": number,
        "schema": json.dumps(SCHEMA),
        "deleted": False,
    }
    directory.append(
        "_schemas", json.dumps(value).encode(), key=json.dumps(key).encode()
    )
