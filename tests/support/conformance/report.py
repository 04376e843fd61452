"""Compares our responses with the responses of a Kafka broker, and writes the page of the
differences with their reasons.

Kafka's responses are stored in tests/data/kafka/answers.json.gz, so that each run of
the tests compares with them. On a machine with Java, `make interop` queries Kafka
again, and writes that file and docs/conformance.md.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from netshim import wire
from netshim.handlers import HANDLERS
from netshim.wire.codec import Api
from support.client import Client
from support.conformance import (
    RecordingClient,
    Script,
    admin,
    data,
    groups,
    transactions,
)
from support.vectors import DATA

PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"
ANSWERS = DATA / "kafka" / "answers.json.gz"
SCRIPTS: Mapping[Api[Any, Any], list[Script]] = {
    **data.SCRIPTS,
    **groups.SCRIPTS,
    **admin.SCRIPTS,
    **transactions.SCRIPTS,
}
#: Settings of our broker for the comparison: the defaults of Kafka's broker.
SETTINGS: dict[str, Any] = {
    "group_consumer_heartbeat_interval_ms": 5_000,
    "group_consumer_session_timeout_ms": 45_000,
}

#: For each API and version, such as "Fetch-4", the steps and their responses in order.
Answers = dict[str, list[tuple[str, Any]]]

#: (API, step) -> the reason why our response differs. A step that ends in * covers
#: every step with that prefix.
REASONS: Mapping[tuple[str, str], str] = {
    (
        "Produce",
        "no records",
    ): "Kafka does not answer, and its client waits until it times out",
    (
        "Produce",
        "magic 3",
    ): "Kafka answers CORRUPT_MESSAGE, which clients retry, although a retry cannot succeed",
    (
        "Produce",
        "the same again",
    ): "Kafka reports the time of the first batch as the time of the append",
    (
        "Produce",
        "a base offset that is not 0",
    ): "we refuse the batch before a log is read, so the answer contains no log start",
    (
        "Fetch",
        "two batches by their size",
    ): "Kafka sends a part of the batch that does not fit; we send whole batches",
    (
        "CreateTopics",
        "only validated",
    ): "Kafka returns an id for a topic that it does not create",
    (
        "DescribeConfigs",
        "with synonyms",
    ): "Kafka's default of retention.ms is a setting in hours, which it leaves out",
    ("AlterConfigs", "a topic twice"): "Kafka fails and does not answer",
    (
        "IncrementalAlterConfigs",
        "an unknown operation",
    ): "Kafka fails with UNKNOWN_SERVER_ERROR",
    (
        "AddOffsetsToTxn",
        "an empty group id",
    ): "Kafka accepts the group id, and refuses each commit of that group",
}
#: APIs of Kafka 4.1 that we do not serve: for each API key, the name or the purpose.
NOT_SERVED: Mapping[str, str] = {
    "34": "AlterReplicaLogDirs: a broker has one directory",
    "38-41": "delegation tokens",
    "55, 57, 64": "quorum, features, brokers of a cluster: there is one broker, and no quorum",
    "71, 72": "telemetry of clients",
    "76-79, 83-87, 90-92": "share groups",
    "88, 89": "streams groups",
    "52-54, 56, 58, 59, 62, 63, 67, 70, 73, 80-82": "used only between Kafka's own nodes",
}
_PAGE_TOP = """# Comparison with Apache Kafka, request by request

The same {count:,} raw requests were sent to netshim and to a broker of Apache Kafka 4.1.1, in each version that
netshim serves. The answers were compared field by field, except random values (ids, ports, times) and error texts.
`make interop` sends the requests to both brokers and writes this page. `make test` sends them to netshim, and compares
the answers with the stored answers of Kafka.

## Requests

| API | versions | requests | different answers |
|---|---|---|---|
"""
_PAGE_END = """
These are not advertised. A request for one ends its connection, as in Kafka, and a log line names the API.
"""


def served() -> list[Api[Any, Any]]:
    return [wire.APIS[key] for key in sorted(HANDLERS)]


def ask_all(
    port: int,
    apis: Iterable[Api[Any, Any]],
    admin: Callable[[], Client] | None = None,
) -> Answers:
    """Send all requests of some APIs to a broker.

    The responses do not depend on the other APIs that were queried before. With
    `admin`, the user of `port` has no permissions, and `admin` connects as another user
    for the preparations. A script then ends if it needs a response that was refused.
    """
    found: Answers = {}
    if admin is None:
        _allocate_producer_id(port)
    for api in apis:
        for version in range(api.min_version, api.max_version + 1):
            client = RecordingClient(port, api, version, admin)
            try:
                for script in SCRIPTS[api]:
                    try:
                        script(client)
                    except (AssertionError, AttributeError, IndexError):
                        if admin is None:
                            raise
            finally:
                client.close()
            found[client.name] = client.recorded
    return found


def _allocate_producer_id(port: int) -> None:
    """Allocate a producer id. The first id of a broker is 0, which is indistinguishable
    from no id.
    """
    client = RecordingClient(
        port, wire.INIT_PRODUCER_ID, wire.INIT_PRODUCER_ID.max_version
    )
    try:
        client.ask_unrecorded(
            wire.INIT_PRODUCER_ID, 2, transactional_id=None, transaction_timeout_ms=0
        )
    finally:
        client.close()


def save(theirs: Answers) -> None:
    """Write Kafka's responses. The same responses give the same bytes."""
    text = json.dumps(theirs, sort_keys=True, separators=(",", ":"))
    ANSWERS.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def load() -> Answers:
    found: Answers = json.loads(gzip.decompress(ANSWERS.read_bytes()))
    return found


def differences(ours: Answers, theirs: Answers) -> list[tuple[str, int, str, str]]:
    """Return API, version, step and description of each difference."""
    found = []
    for name, recorded in ours.items():
        api, _, version = name.rpartition("-")
        mine = dict(recorded)
        other = dict(theirs[name])
        for step in {**mine, **other}:
            first = mine.get(step, "not asked")
            another = other.get(step, "not asked")
            if first != another:
                found.append(
                    (
                        api,
                        int(version),
                        step,
                        "; ".join(_differing_values("", first, another)[:4]),
                    )
                )
    return found


def _differing_values(path: str, entry: Any, another: Any) -> list[str]:
    """Return each path at which two responses differ: the path, our value, Kafka's
    value.
    """
    if entry == another:
        return []
    if (
        isinstance(entry, dict)
        and isinstance(another, dict)
        and entry.keys() == another.keys()
    ):
        return [
            text
            for key in entry
            for text in _differing_values(f"{path}.{key}", entry[key], another[key])
        ]
    if (
        isinstance(entry, list)
        and isinstance(another, list)
        and len(entry) == len(another)
    ):
        return [
            text
            for at, each in enumerate(entry)
            for text in _differing_values(f"{path}[{at}]", each, another[at])
        ]
    return [f"{path}: {str(entry)[:120]}, Kafka {str(another)[:120]}"]


def reason_of(api: str, step: str) -> tuple[str, str] | None:
    """Return the key in REASONS for a step of an API, or None."""
    for key in REASONS:
        name, pattern = key
        is_named = step == pattern or (
            pattern.endswith("*") and step.startswith(pattern[:-1])
        )
        if name == api and is_named:
            return key
    return None


def page(ours: Answers, theirs: Answers) -> str:
    """Return the text of docs/conformance.md."""
    request_counts: Counter[str] = Counter()
    for name, recorded in theirs.items():
        request_counts[name.rpartition("-")[0]] += len(recorded)
    differing = Counter(api for api, _, _, _ in differences(ours, theirs))
    rows = []
    for api in served():
        versions = f"{api.min_version}-{api.max_version}"
        rows.append(
            f"| {api.key} {api.name} | {versions} | {request_counts[api.name]} | {differing[api.name] or ''} |\n"
        )
    rows.append(
        "\n## Different answers, and the reasons\n\n| API | request | reason |\n|---|---|---|\n"
    )
    for (api_name, step), reason in REASONS.items():
        rows.append(f"| {api_name} | {step.replace(': *', '')} | {reason} |\n")
    rows.append("\n## APIs that are not served\n\n| keys | |\n|---|---|\n")
    rows += [f"| {keys} | {reason} |\n" for keys, reason in NOT_SERVED.items()]
    return _PAGE_TOP.format(count=request_counts.total()) + "".join(rows) + _PAGE_END
