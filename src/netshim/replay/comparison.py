"""Compares the response of a recording with the response of a replay, field by field.

Rules:
- Ids that a broker issues are compared by their mapping: one recorded id must always
  become the same new id.
- Values that depend on the machine or its clock are not compared: addresses, numbers of
  nodes, times of the broker, sizes of directories, texts of errors.
- Lists of structs are compared without their order, because some brokers take them from
  hash tables.
- Batches are compared without the fields that a broker writes: offsets of leaders,
  checksums, producer ids, and times of markers. A batch is equal only if its records
  are equal byte for byte.
- A fetch may return more than in the recording, because it depends on the speed of both
  sides. Then the common part is compared.
- A request that was in progress together with requests of other connections may succeed
  or be refused because of a rebalance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs

from logcore.errors import LogcoreError
from logcore.recordbatch import RecordBatch, read_batches
from netshim import wire
from netshim.replay.id_mapping import IDENTITY, IdMapping
from netshim.response_errors import first_error
from netshim.wire import codes
from netshim.wire.codec import Api
from netshim.wire.fields import Field, Struct

#: Fields of which only the presence is compared: a value above 0, or not.
_PRESENT: Final = frozenset(
    (
        "cluster_id", "log_append_time_ms", "last_timestamp", "start_timestamp",
        "transaction_start_time_ms", "log_dir", "node_id", "leader_id", "controller_id",
    )
)  # fmt: skip
#: Fields of which only the number of elements is compared.
_COUNTED: Final = frozenset(("replica_nodes", "isr_nodes", "offline_replicas"))
_LEFT_OUT: Final = frozenset(
    (
        "host", "port", "rack", "client_host", "error_message", "message",
        "batch_index_error_message", "documentation", "throttle_time_ms",
        "total_bytes", "usable_bytes", "partition_size", "session_lifetime_ms",
        "leader_epoch", "committed_leader_epoch", "node_endpoints", "current_leader",
        "finalized_features_epoch", "session_id",
    )
)  # fmt: skip
#: Ends of a partition in responses of Fetch, which grow while a recording or a replay
#: runs.
_ENDS: Final = ("high_watermark", "last_stable_offset")
#: Error codes of a coordinator or leader that is not ready yet.
_UNREADY: Final = frozenset(
    (
        codes.COORDINATOR_LOAD_IN_PROGRESS,
        codes.COORDINATOR_NOT_AVAILABLE,
        codes.NOT_COORDINATOR,
        codes.CONCURRENT_TRANSACTIONS,
        codes.LEADER_NOT_AVAILABLE,
    )
)
_APPEND_TIME: Final = 0x08
_LATEST_MAGIC: Final = 2


@attrs.frozen
class FieldDifference:
    """A field in which two responses differ."""

    #: Names of the fields that lead to it, such as "topics[orders].error_code".
    path: str
    recorded: str
    replayed: str


def is_unready(api: Api[Any, Any], response: Any) -> bool:
    """Return whether a response reports a broker that is not ready for the request."""
    return first_error(api, response) in _UNREADY


def is_early(api: Api[Any, Any], recorded: Any, replayed: Any) -> bool:
    """Return whether the replay should send the request again later.

    The response contains less than the recorded one, or its broker is not ready.
    """
    if is_unready(api, replayed) and not is_unready(api, recorded):
        return True
    if api is not wire.FETCH:
        return False
    # Partitions are paired by their order, which is the order of the request.
    for mine, other in zip(_partitions(recorded), _partitions(replayed), strict=False):
        if mine.error_code or other.error_code:
            continue
        if any(getattr(other, name) < getattr(mine, name) for name in _ENDS):
            return True
        if len(mine.records or b"") > len(other.records or b""):
            return True
    return False


def _partitions(response: Any) -> Iterator[Any]:
    for topic in response.responses:
        yield from topic.partitions


def differences(
    api: Api[Any, Any],
    version: int,
    recorded: Any,
    replayed: Any,
    ids: IdMapping,
    *,
    is_concurrent: bool = False,
) -> list[FieldDifference]:
    """Return the differences of two responses. Call it before ids.learn().

    `is_concurrent` is whether requests of other connections were in progress at the same
    time. Then a rebalance may begin before or after the request.
    """
    errors = {first_error(api, recorded), first_error(api, replayed)}
    if is_unready(api, recorded) and codes.NONE in errors:
        return []  # the other broker was ready earlier
    if is_concurrent and errors == {codes.NONE, codes.REBALANCE_IN_PROGRESS}:
        return []
    comparison = _Comparison(api, version, ids)
    comparison.compare(api.response.shape, recorded, replayed, "")
    return comparison.found


class _Comparison:
    """The comparison of two responses."""

    def __init__(self, api: Api[Any, Any], version: int, ids: IdMapping) -> None:
        self.found: list[FieldDifference] = []
        self._is_fetch = api is wire.FETCH
        self._version = version
        self._ids = ids

    def _differ(self, path: str, recorded: object, replayed: object) -> None:
        self.found.append(FieldDifference(path, _shown(recorded), _shown(replayed)))

    def compare(self, shape: Struct, mine: Any, other: Any, path: str) -> None:
        """Compare two structs."""
        for field in shape.fields:
            if not field.exists_in(self._version) or field.name in _LEFT_OUT:
                continue
            place = f"{path}.{field.name}" if path else field.name
            first, two = getattr(mine, field.name), getattr(other, field.name)
            if field.type == "records":
                self._compare_records(first or b"", two or b"", place)
            elif field.name == "aborted_transactions":
                self._compare_aborted(field, first or [], two or [], place)
            elif field.struct is not None and first is not None and two is not None:
                if field.is_array:
                    self._compare_lists(field.struct, first, two, place)
                else:
                    self.compare(field.struct, first, two, place)
            elif not self._is_same(field, mine, first, two):
                self._differ(place, first, two)

    def _is_same(self, field: Field, mine: Any, first: Any, two: Any) -> bool:
        """Compare two values that are not structs."""
        name = field.name
        if self._ids.holds_id(name, mine):
            new = self._ids.learned(name, mine)
            return _is_present(two) if new is None else bool(new == two)
        if name in _PRESENT:
            return _is_present(first) == _is_present(two)
        if name in _COUNTED:
            return len(first or ()) == len(two or ())
        if self._is_fetch and name in _ENDS:
            return bool(first <= two)
        if field.is_array and first is not None and two is not None:
            return bool(sorted(first) == sorted(two))
        return bool(first == two)

    def _compare_lists(
        self, shape: Struct, mine: list[Any], other: list[Any], path: str
    ) -> None:
        for recorded, two in self._ids.pairs(shape, mine, other):
            place = f"{path}[{_label(shape, two if recorded is None else recorded)}]"
            if recorded is None:
                self._differ(place, "absent", "present")
            elif two is None:
                self._differ(place, "present", "absent")
            else:
                self.compare(shape, recorded, two, place)

    def _compare_aborted(
        self, field: Field, mine: list[Any], other: list[Any], path: str
    ) -> None:
        """Compare aborted transactions. There may be more than in the recording."""
        expected = {
            (self._ids.mapped("producer_id", entry), entry.first_offset)
            for entry in mine
        }
        missing = expected - {(two.producer_id, two.first_offset) for two in other}
        for producer_id, offset in sorted(missing):
            self._differ(f"{path}[{producer_id}, {offset}]", "present", "absent")

    def _compare_records(self, mine: Any, other: Any, path: str) -> None:
        """Compare the batches of a partition, up to the end of the shorter side."""
        try:
            ours, theirs = list(read_batches(mine)), list(read_batches(other))
        except LogcoreError:
            if bytes(mine) != bytes(other):
                self._differ(path, f"{len(mine)} bytes", f"{len(other)} other bytes")
            return
        if len(theirs) < len(ours):
            self._differ(path, f"{len(ours)} batches", f"{len(theirs)} batches")
        for batch, two in zip(ours, theirs, strict=False):
            if batch.base_offset != two.base_offset:
                self._differ(
                    path,
                    f"a batch at offset {batch.base_offset}",
                    f"a batch at offset {two.base_offset}",
                )
                return
            if _comparable(batch) != _comparable(two):
                self._differ(f"{path}[{batch.base_offset}]", batch, two)


def _comparable(batch: RecordBatch) -> bytes:
    """Return the bytes of a batch without the fields that a broker writes."""
    raw = bytearray(batch.data)
    if batch.magic < _LATEST_MAGIC:
        return bytes(raw)
    raw[12:16] = bytes(4)  # the epoch of the leader
    raw[17:21] = bytes(4)  # the checksum
    raw[43:53] = bytes(10)  # id and epoch of the producer
    if batch.attributes & _APPEND_TIME or batch.is_control:
        raw[27:43] = bytes(16)  # times
    if batch.is_control:
        # The value of a marker ends with the epoch of its coordinator.
        return bytes(raw[:61]) + batch.control_type().encode()
    return bytes(raw)


def _is_present(value: Any) -> bool:
    if isinstance(value, bytes):
        return any(value)
    return value >= 0 if isinstance(value, int) else bool(value)


def _label(shape: Struct, value: Any) -> str:
    """Return a name for an element of a list: its name, its number or its first id."""
    names = [field.name for field in shape.fields]
    known = [name for name in names if name in IDENTITY]
    for name in (*known, *names):
        found = getattr(value, name)
        if found not in ("", None):
            return _shown(found)
    return ""


def _shown(value: object) -> str:
    if isinstance(value, bytes | memoryview):
        return bytes(value[:40]).hex()
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
