"""A client of a schema registry that sends single requests."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

#: An Avro record with one field.
RECORD = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "amount", "type": "int"}],
}


def record(*fields: Mapping[str, Any], name: str = "Order") -> str:
    """Return the text of an Avro record with these fields."""
    return json.dumps({"type": "record", "name": name, "fields": list(fields)})


class RegistryClient:
    """Sends one request for each call."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.address = url.removeprefix("http://")

    def raw(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return the status and the JSON of a response."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def call(self, method: str, path: str, content: Any = None) -> Any:
        """Return the JSON of a response, or the error code of a refused request."""
        body = None if content is None else json.dumps(content).encode()
        status, response = self.raw(method, path, body)
        if status == 200:
            return response
        assert isinstance(response["message"], str), response
        assert response["error_code"] // 10 ** (
            len(str(response["error_code"])) - 3
        ) == (status)
        return response["error_code"]

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def delete(self, path: str) -> Any:
        return self.call("DELETE", path)

    def register(self, subject: str, schema: Any, **fields: Any) -> Any:
        """Register a schema. Return its id, or the error code of a refused request."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        path = f"/subjects/{quote(subject, safe='')}/versions"
        response = self.call("POST", path, {"schema": text, **fields})
        return response if isinstance(response, int) else response["id"]
