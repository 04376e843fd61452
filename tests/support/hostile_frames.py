"""Frames of requests that malicious clients may send: valid frames with changed bytes,
or with changed values of fields.

The decoder refuses most frames with changed bytes. A frame with changed values is a
request that no client would send: it is decoded, and its handler must refuse or handle it.
Most batches of records in such a frame have a valid CRC, so that the code after the CRC
check is reached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from logcore import recordbatch
from netshim import wire
from netshim.wire.fields import Field, Struct

_BITS = {"int8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64}
_FOUR_BYTES = (
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\x80\0\0\0",
    bytes(4),
    b"\0\0\0\1",
    b"\0\0\xff\xff",
)
_TWO_BYTES = (b"\x7f\xff", b"\xff\xff", b"\x80\0", b"\0\0", b"\0\1")
_VARINTS = (
    b"\xff\xff\xff\xff\x0f",
    b"\x80" * 9 + b"\x01",
    b"\xff" * 11,
    b"\x80\x80",
    b"\0",
    b"\1",
)
_TEXTS = ("", "x", "\0", "a b", "..", "\u00e9" * 20, "x" * 250, "x" * 2_000)
#: Internal topics, which no changed DeleteTopics request contains: a client that may
#: delete topics could delete them, and all groups with them.
_INTERNAL = ("__consumer_offsets", "__transaction_state")
#: The size of a batch without its records.
_BATCH_HEAD_BYTES = 61


def mutate(
    data: bytes, others: Sequence[bytes], rng: random.Random, kept_bytes: int = 0
) -> bytes:
    """Return the bytes with a few changes. The first `least` bytes are kept."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 5))):
        at = rng.randint(min(kept_bytes, len(changed)), len(changed))
        match rng.randrange(10):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = rng.randbytes(rng.randrange(9))
            case 5:
                changed[at : at + 4] = rng.choice(_FOUR_BYTES)
            case 6:
                changed[at : at + 2] = rng.choice(_TWO_BYTES)
            case 7:
                changed[at : at + rng.choice((1, 5))] = rng.choice(_VARINTS)
            case 8:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                changed[at : at + rng.choice((0, 30))] = other[
                    start : start + rng.randrange(60)
                ]
            case 9:
                del changed[at : at + rng.randrange(1, 20)]
    return bytes(changed)


class Variants:
    """Variants of one valid frame, without its size."""

    def __init__(
        self, frame: bytes, others: Sequence[bytes], rng: random.Random
    ) -> None:
        self._frame = frame
        self._others = others
        self._chance = rng
        header = wire.decode_header(memoryview(frame))
        self._api = wire.APIS[header.api_key]
        self._version = header.api_version
        self._request = wire.decode_request(header, memoryview(frame))
        self._fields: list[
            tuple[Any, Field]
        ] = []  # each field of each struct in the request
        self._collect(self._api.request.schema, self._request)

    def _collect(self, shape: Struct, value: Any) -> None:
        for field in shape.fields:
            if not field.exists_in(self._version):
                continue
            self._fields.append((value, field))
            inner = getattr(value, field.name)
            if field.struct is None or inner is None:
                continue
            for each in inner if field.is_array else [inner]:
                self._collect(field.struct, each)

    def draw(self) -> bytes:
        """Return a random variant."""
        rng = self._chance
        if self._fields and rng.random() < 0.6:
            changed = self._with_another_value()
            if changed is not None:
                return changed
        kept_bytes = 0 if rng.random() < 0.05 else 4  # the size of API key and version
        return mutate(self._frame, self._others, rng, kept_bytes) or b"\0"

    def _with_another_value(self) -> bytes | None:
        """Return a variant with another value of a field, or None if the value does not
        fit its type.
        """
        rng = self._chance
        replaced = []
        is_longer = False
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            value, field = rng.choice(self._fields)
            before = getattr(value, field.name)
            # Three nested arrays of 300 times their size would need gigabytes.
            if field.is_array and is_longer:
                continue
            is_longer |= field.is_array
            replaced.append((value, field.name, before))
            setattr(value, field.name, self._changed_value(field, before))
        correlation_id = rng.randrange(1 << 31)
        try:
            frame = wire.encode_request(
                self._api, self._version, correlation_id, "stranger", self._request
            )
        except ValueError:
            return None
        finally:
            for value, name, before in reversed(replaced):
                setattr(value, name, before)
        return frame[4:]

    def _changed_value(self, field: Field, before: Any) -> Any:
        rng = self._chance
        if field.is_array:
            elements = list(before or ())
            return rng.choice(
                (None, [], elements * rng.choice((2, 30, 300)), elements[:-1])
            )
        if isinstance(before, bool):
            return not before
        if isinstance(before, int):
            bits = _BITS.get(field.type, 32)
            maximum = (1 << (bits - 1)) - 1
            return rng.choice(
                (
                    0,
                    1,
                    -1,
                    -2,
                    2,
                    before + 1,
                    before - 1,
                    maximum,
                    -maximum - 1,
                    rng.randint(-maximum, maximum),
                )
            )
        if isinstance(before, str) or (before is None and "string" in field.type):
            internal = () if self._api is wire.DELETE_TOPICS else _INTERNAL
            return rng.choice((*_TEXTS, *internal, None, (before or "") + "x"))
        if isinstance(before, bytes | bytearray | memoryview):
            return self._other_bytes(bytes(before))
        return None

    def _other_bytes(self, before: bytes) -> bytes | None:
        rng = self._chance
        if rng.random() < 0.1:
            return rng.choice((None, b"", bytes(16), before * 2, rng.randbytes(16)))
        changed = mutate(before, self._others, rng)
        if (
            len(changed) > _BATCH_HEAD_BYTES
            and len(before) > _BATCH_HEAD_BYTES
            and rng.random() < 0.7
        ):
            sealed = bytearray(changed)
            recordbatch.stamp_crc(sealed)
            return bytes(sealed)
        return changed
