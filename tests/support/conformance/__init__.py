"""Raw requests of every API and version to two brokers, and their responses in a form
that can be compared.

A script sends requests of one API in one version. Its argument is a RecordingClient, and
its steps have names. A difference is reported by API, version and step. Each script uses
its own names for topics, groups and transactions, so no script sees the objects of
another script.

comparable() masks values that differ between any two brokers: random ids, ports, times,
error texts. Lists of structs are compared without their order, because the order in Kafka
depends on hash tables.

This module sends requests and masks responses. The scripts are in data.py, groups.py,
admin.py and transactions.py, and report.py compares the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from netshim import wire
from netshim.wire import codes
from netshim.wire.codec import Api
from netshim.wire.fields import Struct
from support.client import Client

Script = Callable[["RecordingClient"], None]

#: Fields with random values, counts, or values of a clock. The comparison only checks
#: whether they have a value.
_RANDOM_FIELDS = {
    "topic_id", "cluster_id", "producer_id", "log_append_time_ms", "last_timestamp", "start_timestamp",
    "transaction_start_time_ms", "log_dir", "session_id", "port", "current_txn_start_offset",
}  # fmt: skip
#: Fields that are not compared: texts for people, sizes of disks, and throttle times.
_OMITTED_FIELDS = {
    "error_message",
    "batch_index_error_message",
    "message",
    "documentation",
    "total_bytes",
    "usable_bytes",
    "throttle_time_ms",
}
_UNREADY = {
    codes.COORDINATOR_LOAD_IN_PROGRESS,
    codes.NOT_COORDINATOR,
    codes.COORDINATOR_NOT_AVAILABLE,
}
_LIMIT_S = 60
#: The time after which no response is expected any more.
_RESPONSE_LIMIT_S = 6


def build(shape: Struct, given: Any) -> Any:
    """Convert dicts and lists to a value of the wire codec."""
    values = {}
    for field in shape.fields:
        if field.name not in given:
            continue
        value = given[field.name]
        if field.struct and value is not None:
            inner = field.struct
            value = (
                [build(inner, each) for each in value]
                if field.is_array
                else build(inner, value)
            )
        values[field.name] = value
    unknown = given.keys() - values.keys()
    assert not unknown, (shape.name, unknown)
    return shape.cls(**values)


def comparable(shape: Struct, value: Any, version: int, names: dict[str, str]) -> Any:
    """Convert a value of the wire codec to dicts and lists, with the fields of a version.
    Random values are masked.

    `names` contains a name for each random member id. New ids are added.
    """
    found = {}
    for field in shape.fields:
        if not field.exists_in(version) or field.name in _OMITTED_FIELDS:
            continue
        each = getattr(value, field.name)
        if field.struct and each is not None:
            inner = field.struct
            if field.is_array:
                each = sorted(
                    (comparable(inner, entry, version, names) for entry in each),
                    key=repr,
                )
            else:
                each = comparable(inner, each, version, names)
        elif field.name in ("member_id", "leader") and each:
            each = names.setdefault(each, f"member {len(names) + 1}")
        elif field.name in _RANDOM_FIELDS:
            each = _masked(each)
        elif isinstance(each, bytes | memoryview):
            each = bytes(each).hex()
        elif field.is_array and each is not None:
            each = sorted(each)
        found[field.name] = each
    return found


def _masked(value: Any) -> Any:
    if value == bytes(16):
        return "none"
    if value is None or (isinstance(value, int) and value <= 0):
        return value
    return "..."


class RecordingClient:
    """Sends requests of one API in one version to one broker.

    The responses are recorded as a list of (step, response), in the order of the
    requests.
    """

    def __init__(
        self,
        port: int,
        api: Api[Any, Any],
        version: int,
        admin: Callable[[], Client] | None = None,
        connect: Callable[[], Client] | None = None,
    ) -> None:
        """Prepare requests to the broker at `port`.

        `admin` opens the connection for ask_unrecorded(), as a user without restrictions.
        `connect` opens the connection for ask(), by default a plain one to `port`.
        """
        self._connect = connect or (lambda: Client(port))
        self.port = port
        self.api = api
        self.version = version
        self.recorded: list[tuple[str, Any]] = []
        self.name = f"{api.name}-{version}"
        self._names: dict[str, str] = {}
        self._client = self._open_connection()
        self._admin = admin() if admin is not None else None

    def close(self) -> None:
        self._client.close()
        if self._admin is not None:
            self._admin.close()

    def ask(self, step: str, **fields: Any) -> Any:
        """Send a request, record the response under the name of the step, and return
        it. Return None if the broker has closed the connection.
        """
        try:
            response = self._client.ask(
                self.api, self.version, build(self.api.request.schema, fields)
            )
        except (EOFError, ConnectionError):
            return self._record_failure(step, "hung up")
        except TimeoutError:
            return self._record_failure(step, "no answer")
        self.recorded.append(
            (
                step,
                comparable(
                    self.api.response.schema, response, self.version, self._names
                ),
            )
        )
        return response

    def _record_failure(self, step: str, failure: str) -> None:
        self._client.close()
        self._client = self._open_connection()
        self.recorded.append((step, failure))

    def _open_connection(self) -> Client:
        client = self._connect()
        client.sock.settimeout(_RESPONSE_LIMIT_S)
        return client

    def ask_unrecorded(self, api: Api[Any, Any], version: int, **fields: Any) -> Any:
        """Send a request of another API as a preparation. Its response is not compared."""
        client = self._admin or self._client
        return client.ask(api, version, build(api.request.schema, fields))

    def until_ready(self, ask: Callable[[], tuple[int, Any]]) -> Any:
        """Repeat a request while its error code reports that the coordinator is not
        ready.
        """
        end_s = time.monotonic() + _LIMIT_S
        while True:
            code, response = ask()
            if code not in _UNREADY:
                return response
            assert time.monotonic() < end_s, code
            time.sleep(0.02)

    # -- helpers for scripts

    def create_topic(self, suffix: str = "", partitions: int = 2, **config: str) -> str:
        """Create a topic, and return its name once it accepts records. The topic keeps
        its records, however old they are.
        """
        name = f"{self.name}{suffix}"
        config = {"retention_ms": "-1", **config}
        configs = [
            {"name": key.replace("_", "."), "value": value}
            for key, value in config.items()
        ]
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": 1,
            "configs": configs,
        }
        made = self.ask_unrecorded(
            wire.CREATE_TOPICS, 7, topics=[topic], timeout_ms=30_000
        )
        assert made.topics[0].error_code == 0, made
        self.wait_for_topic(name, partitions)
        return name

    def wait_for_topic(self, name: str, partitions: int) -> bytes:
        """Wait until the broker leads all partitions of a topic, and return the topic id.
        The broker may describe the topic before.
        """
        end_s = time.monotonic() + _LIMIT_S
        listed = [
            {"partition_index": number, "timestamp": -1} for number in range(partitions)
        ]
        while True:
            response = self.ask_unrecorded(
                wire.LIST_OFFSETS, 5, topics=[{"name": name, "partitions": listed}]
            )
            if not any(each.error_code for each in response.topics[0].partitions):
                known = self.ask_unrecorded(
                    wire.METADATA,
                    12,
                    topics=[{"name": name}],
                    allow_auto_topic_creation=False,
                )
                found: bytes = known.topics[0].topic_id
                return found
            assert time.monotonic() < end_s, response
            time.sleep(0.02)

    def produce(self, name: str, records: bytes, partition: int = 0) -> Any:
        """Append records. An error is raised if the append is refused."""
        part = {"index": partition, "records": records}
        topic = {"name": name, "partition_data": [part]}
        response = self.ask_unrecorded(
            wire.PRODUCE, 9, acks=-1, timeout_ms=30_000, topic_data=[topic]
        )
        done = response.responses[0].partition_responses[0]
        assert done.error_code == 0, done
        return done
