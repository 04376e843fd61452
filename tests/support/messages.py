"""Every message of the wire codec, with random values."""

from __future__ import annotations

import random
from typing import Any

from netshim import wire
from netshim.wire.codec import Message
from netshim.wire.fields import Field, Struct
from support import group_messages

DATA = [value for value in vars(wire).values() if isinstance(value, Message)] + [
    *group_messages.MESSAGES
]
MESSAGES = [
    message for api in wire.APIS.values() for message in (api.request, api.response)
] + DATA
_INTEGERS = {
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint16": 16,
    "uint32": 32,
}


def draw(
    shape: Struct, version: int, flexible: bool, rng: random.Random, tame: bool = False
) -> Any:
    """Return a random value. Fields that this version does not have keep their
    defaults. With `tame`, the value can be expressed with kio's types.
    """
    value = shape.cls()
    for field in shape.untagged(version) + (shape.tagged(version) if flexible else []):
        if rng.random() < 0.15:
            continue  # keeps the default, so that tagged fields are sometimes left out
        drawn: Any
        if field.is_nullable_in(version) and rng.random() < 0.3:
            drawn = None
        elif field.is_array:
            count = rng.choice((0, 1, 1, 1, 2, 3))
            if rng.random() < 0.003:
                count = 130
            drawn = [
                draw_one(field, version, flexible, rng, tame) for _ in range(count)
            ]
        else:
            drawn = draw_one(field, version, flexible, rng, tame)
        setattr(value, field.name, drawn)
    # A field may have the default null, which not every version allows.
    for field in shape.untagged(version):
        if getattr(value, field.name) is None and not field.is_nullable_in(version):
            setattr(value, field.name, draw_one(field, version, flexible, rng, tame))
    return value


def draw_one(
    field: Field, version: int, flexible: bool, rng: random.Random, tame: bool
) -> Any:
    if field.struct:
        return draw(field.struct, version, flexible, rng, tame)
    if field.type == "bool":
        return rng.random() < 0.5
    if field.type == "float64":
        return rng.choice((0.0, -1.5, 1e300))
    if field.type == "uuid":
        return rng.choice((bytes(16), rng.randbytes(16)))
    if field.type == "string":
        return "".join(rng.choices("aZ.-é漢🙂", k=rng.choice((0, 1, 5, 40, 200))))
    if field.type in ("bytes", "records"):
        return rng.randbytes(rng.choice((0, 1, 100, 300)))
    bits = _INTEGERS[field.type]
    if tame and field.name.endswith("error_code"):
        return rng.randint(-1, 133)
    if (
        tame
        and field.type == "int64"
        and ("time" in field.name or field.name.endswith("_ms"))
    ):
        # kio converts these to datetimes and drops the milliseconds.
        return rng.choice((0, 1_000, 1_700_000_000_000))
    low = -(2 ** (bits - 1))
    high = 2 ** (bits - 1) - 1
    if field.type.startswith("u"):
        low = 0
        high = 2**bits - 1
    return rng.choice((0, 1, low, high, rng.randint(low, high)))


def encode(message: Message, version: int, value: Any) -> bytes:
    return b"".join(message.encode(version, value))
