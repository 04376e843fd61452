"""Frames of requests that malicious clients may send: valid frames with changed bytes,
or with changed values of fields.

The decoder refuses most frames with changed bytes. A frame with changed values is a
request that no client would send: it is decoded, and its handler must cope. A batch of
records inside mostly gets the CRC that matches its bytes, so that the code after the
CRC check is reached.
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
#: A client that may delete topics may delete these, and all groups with them. So
#: DeleteTopics is not tried on them.
_INTERNAL = ("__consumer_offsets", "__transaction_state")
#: Size of a batch without its records.
_BATCH_HEAD_BYTES = 61


def changed(
    data: bytes, others: Sequence[bytes], chance: random.Random, least: int = 0
) -> bytes:
    """Return bytes with a few changes, all of them after the first `least` bytes."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 2, 5))):
        at = chance.randint(min(least, len(made)), len(made))
        match chance.randrange(10):
            case 0 | 1 if at < len(made):
                made[at] ^= 1 << chance.randrange(8)
            case 2 if at < len(made):
                made[at] = chance.randrange(256)
            case 3:
                del made[at:]
            case 4:
                made[at:at] = chance.randbytes(chance.randrange(9))
            case 5:
                made[at : at + 4] = chance.choice(_FOUR_BYTES)
            case 6:
                made[at : at + 2] = chance.choice(_TWO_BYTES)
            case 7:
                made[at : at + chance.choice((1, 5))] = chance.choice(_VARINTS)
            case 8:
                other = chance.choice(others)
                start = chance.randrange(len(other) + 1)
                made[at : at + chance.choice((0, 30))] = other[
                    start : start + chance.randrange(60)
                ]
            case 9:
                del made[at : at + chance.randrange(1, 20)]
    return bytes(made)


class Variants:
    """Variants of one valid frame, without its size."""

    def __init__(
        self, frame: bytes, others: Sequence[bytes], chance: random.Random
    ) -> None:
        self._frame = frame
        self._others = others
        self._chance = chance
        header = wire.decode_header(memoryview(frame))
        self._api = wire.APIS[header.api_key]
        self._version = header.api_version
        self._request = wire.decode_request(header, memoryview(frame))
        self._places: list[
            tuple[Any, Field]
        ] = []  # each field of each struct in the request
        self._collect(self._api.request.schema, self._request)

    def _collect(self, shape: Struct, value: Any) -> None:
        for field in shape.fields:
            if not field.exists_in(self._version):
                continue
            self._places.append((value, field))
            inner = getattr(value, field.name)
            if field.struct is None or inner is None:
                continue
            for each in inner if field.is_array else [inner]:
                self._collect(field.struct, each)

    def draw(self) -> bytes:
        """Return a random variant."""
        chance = self._chance
        if self._places and chance.random() < 0.6:
            made = self._with_another_value()
            if made is not None:
                return made
        least = 0 if chance.random() < 0.05 else 4  # the key of its API and its version
        return changed(self._frame, self._others, chance, least) or b"\0"

    def _with_another_value(self) -> bytes | None:
        """Return a variant with another value of a field, or None if the value does not
        fit its type.
        """
        chance = self._chance
        kept = []
        is_longer = False
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            value, field = chance.choice(self._places)
            before = getattr(value, field.name)
            # 300 times 300 times 300 would be a frame of gigabytes.
            if field.is_array and is_longer:
                continue
            is_longer |= field.is_array
            kept.append((value, field.name, before))
            setattr(value, field.name, self._another(field, before))
        correlation_id = chance.randrange(1 << 31)
        try:
            frame = wire.encode_request(
                self._api, self._version, correlation_id, "stranger", self._request
            )
        except ValueError:
            return None
        finally:
            for value, name, before in reversed(kept):
                setattr(value, name, before)
        return frame[4:]

    def _another(self, field: Field, before: Any) -> Any:
        chance = self._chance
        if field.is_array:
            there = list(before or ())
            return chance.choice(
                (None, [], there * chance.choice((2, 30, 300)), there[:-1])
            )
        if isinstance(before, bool):
            return not before
        if isinstance(before, int):
            bits = _BITS.get(field.type, 32)
            most = (1 << (bits - 1)) - 1
            return chance.choice(
                (
                    0,
                    1,
                    -1,
                    -2,
                    2,
                    before + 1,
                    before - 1,
                    most,
                    -most - 1,
                    chance.randint(-most, most),
                )
            )
        if isinstance(before, str) or (before is None and "string" in field.type):
            internal = () if self._api is wire.DELETE_TOPICS else _INTERNAL
            return chance.choice((*_TEXTS, *internal, None, (before or "") + "x"))
        if isinstance(before, bytes | bytearray | memoryview):
            return self._other_bytes(bytes(before))
        return None

    def _other_bytes(self, before: bytes) -> bytes | None:
        chance = self._chance
        if chance.random() < 0.1:
            return chance.choice(
                (None, b"", bytes(16), before * 2, chance.randbytes(16))
            )
        made = changed(before, self._others, chance)
        if (
            len(made) > _BATCH_HEAD_BYTES
            and len(before) > _BATCH_HEAD_BYTES
            and chance.random() < 0.7
        ):
            sealed = bytearray(made)
            recordbatch.stamp_crc(sealed)
            return bytes(sealed)
        return made
