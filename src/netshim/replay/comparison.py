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
_PRESENCE_ONLY: Final = frozenset(
    (
        "cluster_id", "log_append_time_ms", "last_timestamp", "start_timestamp",
        "transaction_start_time_ms", "log_dir", "node_id", "leader_id", "controller_id",
    )
)  # fmt: skip
#: Fields of which only the number of elements is compared.
_LENGTH_ONLY: Final = frozenset(("replica_nodes", "isr_nodes", "offline_replicas"))
#: Fields that are not compared.
_IGNORED: Final = frozenset(
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
_END_OFFSETS: Final = ("high_watermark", "last_stable_offset")
#: Error codes of a coordinator or leader that is not ready yet.
_NOT_READY: Final = frozenset(
    (
        codes.COORDINATOR_LOAD_IN_PROGRESS,
        codes.COORDINATOR_NOT_AVAILABLE,
        codes.NOT_COORDINATOR,
        codes.CONCURRENT_TRANSACTIONS,
        codes.LEADER_NOT_AVAILABLE,
    )
)
#: Attribute of a batch whose timestamps are times of the append (LogAppendTime).
_APPEND_TIME: Final = 0x08
#: Format version of batches in which a broker changes fields, see _comparable_bytes().
_LATEST_MAGIC: Final = 2


@attrs.frozen
class FieldDifference:
    """A field in which two responses differ."""

    #: Names of the fields that lead to it, such as "topics[orders].error_code".
    path: str
    recorded: str
    replayed: str


def is_not_ready(api: Api[Any, Any], response: Any) -> bool:
    """Return whether a response reports a broker that is not ready for the request."""
    return first_error(api, response) in _NOT_READY


def should_retry(api: Api[Any, Any], recorded: Any, replayed: Any) -> bool:
    """Return whether the replay should send the request again later.

    This is the case if the broker is not ready, or if the replayed response contains
    fewer records than the recorded one.
    """
    if is_not_ready(api, replayed) and not is_not_ready(api, recorded):
        return True
    if api is not wire.FETCH:
        return False
    # Partitions are paired by their order, which is the order of the request.
    for recorded_partition, replayed_partition in zip(
        _partitions(recorded), _partitions(replayed), strict=False
    ):
        if recorded_partition.error_code or replayed_partition.error_code:
            continue
        # Requests of other connections may still have to append records.
        if any(
            getattr(replayed_partition, name) < getattr(recorded_partition, name)
            for name in _END_OFFSETS
        ):
            return True
        if len(recorded_partition.records or b"") > len(
            replayed_partition.records or b""
        ):
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
    """Return the differences of two responses. Call it before ids.record_ids().

    `is_concurrent` is whether requests of other connections were in progress at the same
    time. Then a rebalance may begin before or after the request.
    """
    errors = {first_error(api, recorded), first_error(api, replayed)}
    if is_not_ready(api, recorded) and codes.NONE in errors:
        return []  # the broker of the replay was ready earlier
    if is_concurrent and errors == {codes.NONE, codes.REBALANCE_IN_PROGRESS}:
        return []
    comparison = _Comparison(api, version, ids)
    comparison.compare(api.response.schema, recorded, replayed, "")
    return comparison.differences


class _Comparison:
    """The comparison of two responses."""

    def __init__(self, api: Api[Any, Any], version: int, ids: IdMapping) -> None:
        self.differences: list[FieldDifference] = []
        self._is_fetch = api is wire.FETCH
        self._version = version
        self._ids = ids

    def _add_difference(self, path: str, recorded: object, replayed: object) -> None:
        self.differences.append(
            FieldDifference(path, _as_text(recorded), _as_text(replayed))
        )

    def compare(self, schema: Struct, recorded: Any, replayed: Any, path: str) -> None:
        """Compare two structs."""
        for field in schema.fields:
            if not field.exists_in(self._version) or field.name in _IGNORED:
                continue
            field_path = f"{path}.{field.name}" if path else field.name
            recorded_value, replayed_value = (
                getattr(recorded, field.name),
                getattr(replayed, field.name),
            )
            if field.type == "records":
                self._compare_records(
                    recorded_value or b"", replayed_value or b"", field_path
                )
            elif field.name == "aborted_transactions":
                self._compare_aborted(
                    field, recorded_value or [], replayed_value or [], field_path
                )
            elif (
                field.struct is not None
                and recorded_value is not None
                and replayed_value is not None
            ):
                if field.is_array:
                    self._compare_lists(
                        field.struct, recorded_value, replayed_value, field_path
                    )
                else:
                    self.compare(
                        field.struct, recorded_value, replayed_value, field_path
                    )
            elif not self._is_same(field, recorded, recorded_value, replayed_value):
                self._add_difference(field_path, recorded_value, replayed_value)

    def _is_same(
        self, field: Field, recorded: Any, recorded_value: Any, replayed_value: Any
    ) -> bool:
        """Compare two values that are not structs."""
        name = field.name
        if self._ids.holds_id(name, recorded):
            expected_id = self._ids.replacement(name, recorded)
            return (
                _is_present(replayed_value)
                if expected_id is None
                else bool(expected_id == replayed_value)
            )
        if name in _PRESENCE_ONLY:
            return _is_present(recorded_value) == _is_present(replayed_value)
        if name in _LENGTH_ONLY:
            return len(recorded_value or ()) == len(replayed_value or ())
        if self._is_fetch and name in _END_OFFSETS:
            return bool(recorded_value <= replayed_value)
        if field.is_array and recorded_value is not None and replayed_value is not None:
            return bool(sorted(recorded_value) == sorted(replayed_value))
        return bool(recorded_value == replayed_value)

    def _compare_lists(
        self, schema: Struct, recorded: list[Any], replayed: list[Any], path: str
    ) -> None:
        for recorded_entry, replayed_entry in self._ids.pairs(
            schema, recorded, replayed
        ):
            # The replayed entry supplies the label if the recorded broker returned
            # none.
            entry_path = f"{path}[{_label(schema, replayed_entry if recorded_entry is None else recorded_entry)}]"
            if recorded_entry is None:
                self._add_difference(entry_path, "absent", "present")
            elif replayed_entry is None:
                self._add_difference(entry_path, "present", "absent")
            else:
                self.compare(schema, recorded_entry, replayed_entry, entry_path)

    def _compare_aborted(
        self, field: Field, recorded: list[Any], replayed: list[Any], path: str
    ) -> None:
        """Compare aborted transactions. There may be more than in the recording."""
        # Offsets are equal in both logs; producer ids are not.
        expected = {
            (self._ids.mapped("producer_id", entry), entry.first_offset)
            for entry in recorded
        }
        missing = expected - {
            (entry.producer_id, entry.first_offset) for entry in replayed
        }
        for producer_id, offset in sorted(missing):
            self._add_difference(
                f"{path}[{producer_id}, {offset}]", "present", "absent"
            )

    def _compare_records(self, recorded: Any, replayed: Any, path: str) -> None:
        """Compare the batches of a partition, up to the end of the shorter side."""
        try:
            recorded_batches, replayed_batches = (
                list(read_batches(recorded)),
                list(read_batches(replayed)),
            )
        # Damaged records have no fields that could be compared.
        except LogcoreError:
            if bytes(recorded) != bytes(replayed):
                self._add_difference(
                    path, f"{len(recorded)} bytes", f"{len(replayed)} other bytes"
                )
            return
        if len(replayed_batches) < len(recorded_batches):
            self._add_difference(
                path,
                f"{len(recorded_batches)} batches",
                f"{len(replayed_batches)} batches",
            )
        # A fetch may end earlier in the recording. Further replayed batches are
        # ignored.
        for recorded_batch, replayed_batch in zip(
            recorded_batches, replayed_batches, strict=False
        ):
            if recorded_batch.base_offset != replayed_batch.base_offset:
                self._add_difference(
                    path,
                    f"a batch at offset {recorded_batch.base_offset}",
                    f"a batch at offset {replayed_batch.base_offset}",
                )
                return
            if _comparable_bytes(recorded_batch) != _comparable_bytes(replayed_batch):
                self._add_difference(
                    f"{path}[{recorded_batch.base_offset}]",
                    recorded_batch,
                    replayed_batch,
                )


def _comparable_bytes(batch: RecordBatch) -> bytes:
    """Return the bytes of a batch without the fields that a broker writes."""
    raw = bytearray(batch.data)
    # Older formats have neither an epoch of the leader nor a producer id.
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
    # An id of zeros is no id.
    if isinstance(value, bytes):
        return any(value)
    return value >= 0 if isinstance(value, int) else bool(value)


def _label(schema: Struct, value: Any) -> str:
    """Return a name for an element of a list: its name, its number or its first id."""
    names = [field.name for field in schema.fields]
    identity_names = [name for name in names if name in IDENTITY]
    for name in (*identity_names, *names):
        label = getattr(value, name)
        if label not in ("", None):
            return _as_text(label)
    return ""


def _as_text(value: object) -> str:
    if isinstance(value, bytes | memoryview):
        return bytes(value[:40]).hex()
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
