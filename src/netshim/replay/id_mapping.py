"""Maps ids that the recorded broker has issued to ids of the broker of a replay.

A broker issues member ids, topic ids, producer ids with epochs, generations of groups
and fetch session ids. Later requests repeat them, so a replay must send the ids of its
own broker.

Rules:
- An id and its replacement are at the same position in two responses to one request.
- A generation or member epoch belongs to a member, and a producer epoch to a producer.
- Leader epochs in requests are removed, because they belong to the recorded broker.
- An id without a replacement is sent unchanged: the client may have chosen it.

This module needs no connection and compares nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from logcore.errors import LogcoreError
from logcore.recordbatch import read_batches, stamp_crc
from netshim import wire
from netshim.wire.fields import NO_UUID, Struct

#: Kinds of ids by the names of their fields.
_KINDS: Final[Mapping[str, str]] = {
    "member_id": "member",
    "leader": "member",
    "topic_id": "topic",
    "producer_id": "producer",
    "v3_and_below_producer_id": "producer",
    "session_id": "session",
}
#: Fields whose values belong to an id of the same struct: the kind of the id, the
#: possible names of its field, and the kind of the value.
_OWNED: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "generation_id": (("member_id",), "generation"),
    "generation_id_or_member_epoch": (("member_id",), "generation"),
    "member_epoch": (("member_id",), "generation"),
    "producer_epoch": (("producer_id",), "epoch"),
    "v3_and_below_producer_epoch": (("v3_and_below_producer_id",), "epoch"),
}
#: Leader epochs in requests; -1 means an unknown epoch.
_LEADER_EPOCHS: Final = frozenset(("current_leader_epoch", "last_fetched_epoch"))
#: Fields that identify an element of a list.
IDENTITY: Final = frozenset(
    (
        "name", "topic", "topic_name", "partition_index", "partition", "index", "key",
        "group_id", "transactional_id", "resource_type", "resource_name", "user",
        "api_key", "config_name", "group_instance_id", "entity_type", "entity_name",
        "principal", "operation",
    )
)  # fmt: skip
#: Values of each kind that mean no id.
_NO_ID: Final[Mapping[str, tuple[Any, ...]]] = {
    "member": (None, ""),
    "topic": (None, NO_UUID),
    "producer": (-1,),
    "session": (0, -1),
    "generation": (-1,),
    "epoch": (-1,),
}
#: Maximum number of recorded ids. Beyond it, the oldest are dropped.
_MAX_IDS: Final = 1_000_000
#: Producer id and epoch of a batch.
_PRODUCER: Final = struct.Struct(">qh")
#: Position of the producer id in a batch.
_PRODUCER_POSITION: Final = 43
#: The format of batches with producer ids (KIP-98).
_LATEST_MAGIC: Final = 2

#: Kind, owner or None, and recorded value.
_Key = tuple[str, Any, Any]


class IdMapping:
    """Ids of the recorded broker with the ids that replace them."""

    def __init__(self) -> None:
        #: Oldest first. No key is None; replacement() searches for None if a field
        #: holds no id.
        self._new_ids: dict[_Key | None, Any] = {}

    # -- responses ---------------------------------------------------------------------

    def record_ids(self, schema: Struct, recorded: Any, replayed: Any) -> None:
        """Record the ids in two responses to the same request."""
        for field in schema.fields:
            recorded_value, replayed_value = (
                getattr(recorded, field.name),
                getattr(replayed, field.name),
            )
            if recorded_value is None or replayed_value is None:
                continue
            if field.struct is None:
                key = self._key(field.name, recorded)
                if key is not None and replayed_value not in _NO_ID[key[0]]:
                    self._new_ids[key] = replayed_value
                    if len(self._new_ids) > _MAX_IDS:
                        del self._new_ids[next(iter(self._new_ids))]
            elif field.is_array:
                for pair in self.pairs(field.struct, recorded_value, replayed_value):
                    # An element that only one broker returned has no counterpart.
                    if None not in pair:
                        self.record_ids(field.struct, *pair)
            else:
                self.record_ids(field.struct, recorded_value, replayed_value)

    def _key(self, name: str, value: Any) -> _Key | None:
        """Return the key of a field of `value`, None if it holds no id."""
        field_value = getattr(value, name)
        kind = _KINDS.get(name)
        if kind is not None:
            return None if field_value in _NO_ID[kind] else (kind, None, field_value)
        if name not in _OWNED:
            return None
        owners, kind = _OWNED[name]
        for owner in owners:
            owned_by = getattr(value, owner, None)
            # A negative epoch or generation means none, or that the member leaves
            # (KIP-848).
            if owned_by not in (None, "", -1) and field_value >= 0:
                return kind, owned_by, field_value
        return None

    def mapped(self, name: str, value: Any) -> Any:
        """Return the value that replaces the field `name` of a recorded struct."""
        field_value = getattr(value, name)
        key = self._key(name, value)
        return field_value if key is None else self._new_ids.get(key, field_value)

    def replacement(self, name: str, value: Any) -> Any:
        """Return the replacement like mapped(), or None if there is none yet."""
        return self._new_ids.get(self._key(name, value))

    def holds_id(self, name: str, value: Any) -> bool:
        """Return whether the field `name` of a struct holds an id."""
        return self._key(name, value) is not None

    def pairs(
        self, schema: Struct, recorded: list[Any], replayed: list[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the elements of two lists that describe the same object.

        An element without a counterpart is paired with None. Elements whose ids are not
        known yet are paired in their order.
        """
        names = [
            field.name
            for field in schema.fields
            if field.name in IDENTITY or field.name in ("topic_id", "member_id")
        ]
        unmatched: dict[tuple[Any, ...], list[Any]] = {}
        for entry in replayed:
            identity = tuple(getattr(entry, name) for name in names)
            unmatched.setdefault(identity, []).append(entry)
        # Step 1: pair elements whose identity is equal after the mapping of ids.
        recorded_alone = []
        for entry in recorded:
            identity = tuple(self.mapped(name, entry) for name in names)
            candidates = unmatched.get(identity)
            if candidates:
                yield entry, candidates.pop(0)
            else:
                recorded_alone.append(entry)
        # Step 2: pair the others without regard to ids that this response has
        # introduced.
        remaining = [entry for candidates in unmatched.values() for entry in candidates]
        for entry in recorded_alone:
            plain_identity = self._plain_identity(names, entry)
            partner = next(
                (
                    candidate
                    for candidate in remaining
                    if self._plain_identity(names, candidate) == plain_identity
                ),
                None,
            )
            if partner is not None:
                remaining = [
                    candidate for candidate in remaining if candidate is not partner
                ]
            yield entry, partner
        for candidate in remaining:
            yield None, candidate

    @staticmethod
    def _plain_identity(names: list[str], value: Any) -> list[Any]:
        """Return the identity of an element without ids that a broker has issued."""
        return [getattr(value, name) for name in names if name not in _KINDS]

    # -- requests ----------------------------------------------------------------------

    def rewrite(self, header: wire.Header, frame: memoryview) -> bytes:
        """Return a recorded request with the ids of the replay's broker.

        A malformed request, or one without known ids, is returned unchanged.
        """
        api = wire.APIS[header.api_key]
        try:
            request = wire.decode_request(header, frame)
        except wire.ProtocolError:
            return bytes(frame)
        if not self._rewrite(api.request.schema, request):
            return bytes(frame)
        buffers = api.request.encode(header.api_version, request)
        return b"".join((frame[: header.body_start], *buffers))

    def _rewrite(self, schema: Struct, value: Any) -> bool:
        """Replace the ids in a request, and return whether there were any."""
        # Assigned after the loop, because the recorded id of a member or producer
        # selects its generation or epoch.
        changes: dict[str, Any] = {}
        is_changed = False
        for field in schema.fields:
            field_value = getattr(value, field.name)
            if field.struct is not None:
                for struct in (field_value or ()) if field.is_array else (field_value,):
                    is_changed |= struct is not None and self._rewrite(
                        field.struct, struct
                    )
            elif field.type == "records":
                # Batches contain the id and the epoch of their producer.
                changes[field.name] = self._records(field_value)
            elif field.name in _LEADER_EPOCHS:
                changes[field.name] = -1
            elif field.name in _KINDS or field.name in _OWNED:
                changes[field.name] = self.mapped(field.name, value)
        for name, new in changes.items():
            if getattr(value, name) is not new and getattr(value, name) != new:
                setattr(value, name, new)
                is_changed = True
        return is_changed

    def _records(self, records: Any) -> Any:
        """Return records with the ids of their producers replaced."""
        if records is None:
            return None
        changed = None
        try:
            for batch in read_batches(records):
                if batch.magic < _LATEST_MAGIC or batch.producer_id < 0:
                    continue
                batch.verify()  # the checksum of a damaged batch remains wrong
                if changed is None:
                    changed = bytearray(records)
                start = batch.position
                raw = changed[start : start + batch.size_bytes]
                producer = self._new_ids.get(
                    ("producer", None, batch.producer_id), batch.producer_id
                )
                epoch = self._new_ids.get(
                    ("epoch", batch.producer_id, batch.producer_epoch),
                    batch.producer_epoch,
                )
                _PRODUCER.pack_into(raw, _PRODUCER_POSITION, producer, epoch)
                # The checksum covers the id of the producer.
                stamp_crc(raw)
                changed[start : start + batch.size_bytes] = raw
        except LogcoreError:
            return records
        return records if changed is None else bytes(changed)
