"""Parses the field table of a message, and creates the classes of its values.

A table row is `name type [versions] [tag N] [= default]`; rows indented below a struct
are its fields.

    type       bool int8 int16 uint16 int32 uint32 int64 float64 uuid string bytes records, a struct's name,
               `[]` before the type for an array; `?` after it if it may be null, `?2-7` in these versions only
    versions   `3+`, `0-12` or `8`; by default the versions of the surrounding struct
    tag N      the field is in the tagged section, and only if it differs from its default
    = default  `null`, `true`, a number or a word; by default 0, false, "", no bytes, no elements, a default struct

The name of a struct without rows below it refers to the earlier struct of that name in
the same message.

Rules:
- A table is parsed at its first use.
- A value has the fields of all served versions. Values do not share arrays or structs.

wire/compiler.py generates the functions that encode and decode.
"""

from __future__ import annotations

import re
from typing import Any, Final

#: The largest version. Versions are int16.
LAST: Final = 32767
#: Kafka's ZERO_UUID, which means none.
NO_UUID: Final = bytes(16)


# --- the table, parsed ----------------------------------------------------------------


class Field:
    """One row: name, type and versions of a field."""

    __slots__ = (
        "default",
        "first",
        "is_array",
        "last",
        "name",
        "null_first",
        "null_last",
        "struct",
        "tag",
        "type",
    )

    def __init__(self, name: str, type_: str, spec: str, inner: Struct | None) -> None:
        base, nullable_mark, null_versions = type_.partition("?")
        self.name = name
        self.is_array = base.startswith("[]")
        self.type = base.removeprefix("[]")
        self.struct = inner
        match = re.fullmatch(
            r"(?:(\d+(?:\+|-\d+)?) ?)?(?:tag (\d+) ?)?(?:= (\S+))?", spec
        )
        assert match, (name, type_, spec)
        versions, tag, default = match.groups()
        # Without versions, the field is in all of them.
        self.first, self.last = _versions(versions or "0+")
        self.null_first, self.null_last = (
            # An empty range: the field is null in no version.
            _versions(null_versions or "0+") if nullable_mark else (LAST, -1)
        )
        if tag is None:
            self.tag = None
        else:
            self.tag = int(tag)
        self.default = self._default(default)

    def _default(self, text: str | None) -> Any:
        """Return None, an immutable value, or `...` for arrays and structs, which are
        created each time.
        """
        if text == "null":
            return None
        if self.is_array or self.struct:
            return ...
        if self.type == "string":
            return text or ""
        if self.type in ("bytes", "records"):
            return b""
        if self.type == "uuid":
            return NO_UUID
        if self.type == "bool":
            return text == "true"
        if self.type == "float64":
            return float(text or 0)
        return int(text or 0)

    def exists_in(self, version: int) -> bool:
        return self.first <= version <= self.last

    def is_nullable_in(self, version: int) -> bool:
        return self.null_first <= version <= self.null_last


class Struct:
    """The rows of one struct, in order, and the class of its values."""

    __slots__ = ("cls", "fields", "name", "shared_default")

    def __init__(self, name: str) -> None:
        self.name = name
        self.fields: list[Field] = []
        self.cls: type[Any] = object
        #: The default of a tagged field of this struct. All values share it.
        self.shared_default: Any = None

    def untagged(self, version: int) -> list[Field]:
        return [
            field
            for field in self.fields
            if field.exists_in(version) and field.tag is None
        ]

    def tagged(self, version: int) -> list[Field]:
        fields = [
            field
            for field in self.fields
            if field.exists_in(version) and field.tag is not None
        ]
        # Kafka writes the fields of a tagged section in the order of their tags.
        return sorted(fields, key=lambda field: field.tag or 0)


def _versions(text: str) -> tuple[int, int]:
    first, mark, last = text.partition("-")
    if text.endswith("+"):
        return int(text[:-1]), LAST
    return int(first), int(last) if mark else int(first)


def parse(text: str) -> Struct:
    """Return the struct of a message from its table."""
    root = Struct("")
    structs: dict[str, Struct] = {}
    parents: list[tuple[int, Struct]] = [(-1, root)]
    rows = [
        (len(line) - len(line.lstrip()), line.split())
        for line in text.splitlines()
        if line.strip()
    ]
    for (depth, (name, type_, *spec)), (next_depth, _) in zip(
        rows, [*rows[1:], (-1, [])]
    ):
        # A row belongs to the nearest row above with a smaller indentation.
        while depth <= parents[-1][0]:
            parents.pop()
        inner = None
        # Names of structs begin with a capital letter.
        if type_.lstrip("[]")[0].isupper():
            inner_name = type_.lstrip("[]").partition("?")[0]
            # A struct that is used again has no rows of its own.
            if next_depth > depth:
                structs[inner_name] = Struct(inner_name)
            inner = structs[inner_name]
        parents[-1][1].fields.append(Field(name, type_, " ".join(spec), inner))
        if inner:
            parents.append((depth, inner))
    return root


# --- classes of values ----------------------------------------------------------------


class _Fresh:
    """The default of arrays and structs in a constructor: each value gets a new one."""

    def __repr__(self) -> str:
        return "..."


_FRESH: Final = _Fresh()


def _refuse_change(self: object, name: str, _: object) -> None:
    raise AttributeError(
        f"{self!r} is the default that all messages share: assign a new one instead of changing its {name}"
    )


def make_class(schema: Struct, qualname: str) -> type[Any]:
    """Return the class of a struct's values. Its attributes are the classes of its
    inner structs.
    """
    parameters = []
    body = []
    namespace: dict[str, Any] = {"FRESH": _FRESH}
    inner: dict[str, type[Any]] = {}
    for slot, field in enumerate(schema.fields):
        if field.struct:
            # A struct that is used twice has one class.
            if field.struct.cls is object:
                make_class(field.struct, f"{qualname}.{field.struct.name}")
            inner[field.struct.name] = field.struct.cls
        fresh_code = None
        default = repr(field.default)
        if field.default is ...:
            if field.is_array:
                fresh_code = "[]"
            elif field.tag is None:
                fresh_code = f"C{slot}()"
            if fresh_code:
                default = "FRESH"
            else:
                default = f"D{slot}"
            if field.struct:
                namespace[f"C{slot}"] = field.struct.cls
                namespace[f"D{slot}"] = field.struct.shared_default
        parameters.append(f"{field.name}={default}")
        if fresh_code:
            value = f"{fresh_code} if {field.name} is FRESH else {field.name}"
        else:
            value = field.name
        body.append(f"    self.{field.name} = {value}\n")
    signature = "self"
    if parameters:
        signature = f"self, *, {', '.join(parameters)}"
    source = f"def __init__({signature}):\n{''.join(body) or '    pass'}\n"
    names = tuple(field.name for field in schema.fields)
    items = "".join(f"self.{name}, " for name in names)
    source += f"def values(self):\n    return ({items})\n"
    # The code is generated from the tables of this package and contains no foreign text.
    exec(compile(source, f"<netshim.wire {qualname}>", "exec"), namespace)
    values = namespace["values"]

    def __eq__(self: object, other: object) -> bool:
        if not isinstance(other, cls):
            return NotImplemented
        return bool(values(self) == values(other))

    def __repr__(self: object) -> str:
        # Fields with defaults are omitted, because most fields of a response have them.
        defaults = values(cls())
        changed = [
            f"{n}={v!r}"
            for n, v, default in zip(names, values(self), defaults)
            if v != default
        ]
        return f"{qualname}({', '.join(changed)})"

    members = {
        "__slots__": names,
        "__module__": "netshim.wire",
        "__qualname__": qualname,
        "__init__": namespace["__init__"],
        "__eq__": __eq__,
        # Values can be changed, so they have no hash.
        "__hash__": None,
        "__repr__": __repr__,
        **inner,
    }
    cls = schema.cls = type(qualname.rpartition(".")[2], (), members)
    # Only values without arrays and structs can be shared, because inner values could
    # be changed.
    if not inner and not any(field.is_array for field in schema.fields):
        schema.shared_default = cls()
        schema.shared_default.__class__ = type(
            cls.__name__, (cls,), {"__slots__": (), "__setattr__": _refuse_change}
        )
    return cls
