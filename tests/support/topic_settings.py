"""Valid and invalid values of topic settings, and whether Kafka accepts each value."""

from __future__ import annotations

import json
from pathlib import Path

from logcore.config import CONFIGS
from netshim import wire
from support.client import Client

VERDICTS = (
    Path(__file__).resolve().parents[1] / "data" / "kafka" / "topic_settings.json"
)
#: The number of topics in a request.
_TOPICS_PER_REQUEST = 100
#: Settings that Kafka 4 does not have any more.
REMOVED = ("message.downconversion.enable", "message.format.version")
_EDGES = (0, 1, 4, 9, 12, 14, 17, 22, -1, -2, -131_072, 1 << 20, 2**31 - 1, 2**63 - 1)
_NUMBERS = sorted({str(edge + step) for edge in _EDGES for step in (-1, 0, 1)}, key=int)
_NUMBERS += [
    "",
    " ",
    " 9 ",
    "+9",
    "9.0",
    "1e6",
    "0x10",
    "1_000",
    "\u0669",
    "true",
    "9L",
    "--9",
    "- 9",
    "*",
    "9\n",
]
_DOUBLES = [
    "0",
    "1",
    "0.5",
    " 0.5 ",
    "0.5f",
    "0.5d",
    ".5",
    "5e-1",
    "+.5",
    "1.1",
    "-0.1",
    "NaN",
    "Infinity",
    "",
    "a",
]
_DOUBLES += ["1_0.0", "0_0.5", "0x1p-1", "1,0", "-0", "0.5L", "nan", "inf"]
_BOOLEANS = [
    "true",
    "false",
    "TRUE",
    " True ",
    "yes",
    "1",
    "0",
    "",
    "on",
    "tru e",
    "null",
]
_STRINGS = [
    "",
    " ",
    "none",
    "producer",
    "uncompressed",
    "gzip",
    "snappy",
    "lz4",
    "zstd",
    "GZIP",
    " gzip ",
    "gzip,lz4",
]
_STRINGS += ["CreateTime", "LogAppendTime", "createtime", "x"]
_LISTS = [
    "",
    " ",
    ",",
    "delete",
    "compact",
    "compact,delete",
    "delete,compact",
    "compact,compact",
    "delete,",
    ",delete",
]
_LISTS += [
    "delete, compact",
    " delete ,compact ",
    "Delete",
    "none",
    "delete,none",
    "delete;compact",
    "[delete]",
]
_LISTS += [
    "*",
    "0:1",
    "0:1,1:2",
    "0:1, 1:2",
    "*,0:1",
    "0",
    "a:b",
    "0:1:2",
    ":",
    "0:",
    ":1",
    "-1:1",
    " 0:1 ",
    "0:1,",
    "**",
]
_VALUES_BY_TYPE = {
    "int": _NUMBERS,
    "long": _NUMBERS,
    "double": _DOUBLES,
    "boolean": _BOOLEANS,
    "string": _STRINGS,
    "list": _LISTS,
}


def values_by_setting() -> dict[str, list[str]]:
    """Return the values to try for each setting, including settings of earlier versions of
    Kafka.
    """
    found = {
        name: _VALUES_BY_TYPE[field.metadata["type"]]
        for name, field in CONFIGS.items()
        if not field.metadata.get("is_extension")
    }
    return found | {name: ["true", "false", "3.0"] for name in REMOVED}


def query_broker(port: int) -> dict[str, dict[str, bool]]:
    """Return whether a broker accepts each value of each setting, in CreateTopics
    requests that only validate.
    """
    requested = [
        (name, value)
        for name, values in values_by_setting().items()
        for value in values
    ]
    request = wire.CREATE_TOPICS.Request
    client = Client(port)
    verdicts: dict[str, dict[str, bool]] = {}
    for first in range(0, len(requested), _TOPICS_PER_REQUEST):
        chunk = requested[first : first + _TOPICS_PER_REQUEST]
        topics = [
            request.Topic(
                name=f"t{number}",
                num_partitions=1,
                replication_factor=1,
                configs=[request.Topic.Config(name=name, value=value)],
            )
            for number, (name, value) in enumerate(chunk)
        ]
        response = client.ask(
            wire.CREATE_TOPICS,
            7,
            request(topics=topics, timeout_ms=60_000, validate_only=True),
        )
        codes = {topic.name: topic.error_code for topic in response.topics}
        for number, (name, value) in enumerate(chunk):
            verdicts.setdefault(name, {})[value] = not codes[f"t{number}"]
    client.sock.close()
    return verdicts


def load_verdicts() -> dict[str, dict[str, bool]]:
    """Return the stored verdicts of Kafka."""
    verdicts: dict[str, dict[str, bool]] = json.loads(VERDICTS.read_text("utf-8"))
    return verdicts


def save_verdicts(verdicts: dict[str, dict[str, bool]]) -> None:
    lines = [
        f"{json.dumps(name)}: {json.dumps(values)}"
        for name, values in sorted(verdicts.items())
    ]
    VERDICTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
