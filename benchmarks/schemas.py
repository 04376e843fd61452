"""How fast are the schema registry and the decoding of values by schema?

Method:
- register: a new Avro schema of 20 fields under a new subject, over one connection, until
  the answer. The policy of the topic is os.
- get by id: the same connection. `server alone` is an application of uvicorn that answers
  two bytes: the difference is the work of the registry. `client alone` is the same
  request against a socket that answers a prepared response, so it is the part of Python's
  http.client and of two switches between threads.
- decode: 2,000 Avro values of six fields, by ValueDecoder from the stored bytes to JSON
  objects, beside fastavro.schemaless_reader() of the same payloads.

Not shown: the time of a client's cache, which most clients use; JSON Schema and Protobuf.
"""

from __future__ import annotations

import http.client
import io
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import common
from common import Result, Settings

import netshim
from logcore.format.schema_records import SchemaVersion, guid_of, version_record
from logcore.kernels import Record
from logcore.schemas import ValueDecoder, load_schemas

_VALUES: Final = 2_000
_ORDER: Final = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "item", "type": "string"},
        {"name": "amount", "type": "int"},
        {"name": "price", "type": "double"},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
)


def run(settings: Settings) -> Iterator[Result]:
    for module in ("fastavro", "avro", "uvicorn"):
        if common.peer(module, "the schema registry") is None:
            return
    with common.scratch(settings, "schemas") as path:
        yield from calls(settings, path)
    yield decoding(settings)


def _caller(address: str) -> Callable[..., bytes]:
    connection = http.client.HTTPConnection(address)

    def call(method: str, path: str, body: str | None = None) -> bytes:
        connection.request(method, path, body)
        return connection.getresponse().read()

    return call


def calls(settings: Settings, path: Path) -> Iterator[Result]:
    from netshim.http.host import HttpHost

    async def empty(scope: Any, receive: Any, send: Any) -> None:
        head = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"{}"})

    host = HttpHost()
    bare = _caller(host.add(("127.0.0.1", 0), empty).removeprefix("http://"))
    host.start()
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_answer, args=(listening,), daemon=True).start()
    prepared = _caller("{}:{}".format(*listening.getsockname()))
    numbers = itertools.count()
    with netshim.serve(path / "data", durability="os") as server:
        call = _caller(server.schema_registry_url.removeprefix("http://"))

        def register() -> None:
            number = next(numbers)
            fields = [{"name": f"f{at}", "type": "int"} for at in range(20)]
            schema = {"type": "record", "name": f"R{number}", "fields": fields}
            body = json.dumps({"schema": json.dumps(schema)})
            answer = call("POST", f"/subjects/s{number}/versions", body)
            assert b'"id"' in answer, answer

        register()
        sides = {
            "register": register,
            "get": lambda: call("GET", "/schemas/ids/1"),
            "server": lambda: bare("GET", "/schemas/ids/1"),
            "client": lambda: prepared("GET", "/schemas/ids/1"),
        }
        took = common.measure(sides, settings.repeats, median=True)
    host.stop()
    listening.close()
    yield common.in_time(
        "register an Avro schema",
        "ms",
        took["register"] * 1e3,
        3,
        "20 fields, policy os, one connection. Median.",
    )
    yield common.in_time(
        "get a schema by id",
        "ms",
        took["get"] * 1e3,
        0.5,
        f"one connection. Median. Server alone {took['server'] * 1e3:.2f} ms, "
        f"client alone {took['client'] * 1e3:.2f} ms.",
    )
    for name, text in (("server", "server alone"), ("client", "client alone")):
        yield Result(
            question=f"get a schema by id beside: {text}",
            unit="ms",
            ours=took["get"] * 1e3,
            peer_name=text,
            peer=took[name] * 1e3,
            ratio=took["get"] / took[name],
            turns=took.ratios("get", name),
            method="see the method of the file. Median.",
        )


def _answer(listening: socket.socket) -> None:
    """Answer each request of one connection with a prepared response."""
    client, _ = listening.accept()
    with client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while client.recv(65_536):
            client.sendall(_ANSWER)


def decoding(settings: Settings) -> Result:
    import fastavro

    text = json.dumps(_ORDER)
    key, row = version_record(
        SchemaVersion(
            subject="orders-value",
            version=1,
            id=1,
            guid=guid_of("AVRO", text, ()),
            text=text,
        )
    )
    decoder = ValueDecoder(load_schemas([Record(0, 0, key, row)]))
    schema = fastavro.parse_schema(_ORDER)
    payloads = []
    for number in range(_VALUES):
        stream = io.BytesIO()
        order = {
            "id": number,
            "customer": f"customer-{number % 100}",
            "item": "apples",
            "amount": number % 7,
            "price": number / 8,
            "note": "none" if number % 2 else None,
        }
        fastavro.schemaless_writer(stream, schema, order)
        payloads.append(stream.getvalue())
    values = [b"\0\0\0\0\1" + payload for payload in payloads]

    def ours() -> None:
        for value in values:
            assert decoder.decode(value).error is None

    def alone() -> None:
        for payload in payloads:
            fastavro.schemaless_reader(io.BytesIO(payload), schema, None)

    return common.speed(
        "decode Avro values of six fields",
        _VALUES,
        ours,
        {"fastavro alone": alone},
        settings,
        unit="values/s",
        method="one thread; see the method of the file.",
    )
