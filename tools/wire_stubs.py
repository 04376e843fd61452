"""Writes the types of the wire messages from their table, for type checkers.

    python tools/wire_stubs.py            # writes the stubs
    python tools/wire_stubs.py --check    # fails if a stub is out of date, and prints its name

The classes of messages are created at run time from src/netshim/wire/table/, so type
checkers cannot read them. They read two stubs instead: wire/messages.pyi contains a
class for each request, response and record, and wire/table/__init__.pyi lists the
classes by API.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from netshim.wire import table
from netshim.wire.codec import Api, Message
from netshim.wire.fields import Field, Struct

WIRE: Final = Path(__file__).resolve().parents[1] / "src" / "netshim" / "wire"
#: Maximum length of a line, the limit of ruff.
_MAX_CHARACTERS: Final = 120
_TYPES: Final = {
    "bool": "bool",
    "int8": "int",
    "int16": "int",
    "uint16": "int",
    "int32": "int",
    "uint32": "int",
    "int64": "int",
    "float64": "float",
    "uuid": "bytes",
    "string": "str",
    "bytes": "bytes",
}
_MESSAGES_HEAD: Final = '''"""The types of all messages. tools/wire_stubs.py generates this file from wire/table/.

The type of a field covers all served versions. A field that a version lacks has its
default.
"""

from collections.abc import Sequence
from typing import dataclass_transform

from netshim.wire.compiler import Buffer

@dataclass_transform(kw_only_default=True, eq_default=False)
class _Fields:
    """Gives the classes below a constructor, with their fields as keyword arguments."""

'''
_TABLE_HEAD: Final = '''"""The types of requests and responses by API. tools/wire_stubs.py generates this file."""

from collections.abc import Mapping
from typing import Any, Final

from netshim.wire import messages
from netshim.wire.codec import Api, Message
'''


def messages() -> Iterator[tuple[str, Message]]:
    """Yield each message, with its name in the table or the name of its API."""
    for name in table.__all__:
        entry = getattr(table, name)
        if isinstance(entry, Api):
            yield name, entry.request
            yield name, entry.response
        elif isinstance(entry, Message):
            yield name, entry


def field_type(field: Field, root: str, is_request: bool) -> str:
    if field.struct is not None:
        # The class was named when the table was read: "Fetch.Response.Topic" is nested
        # in FetchResponse.
        text = ".".join([root, *field.struct.cls.__qualname__.split(".")[2:]])
    elif field.type == "records":
        text = "Buffer" if is_request else "Buffer | Sequence[Buffer]"
    else:
        text = _TYPES[field.type]
    if field.is_array:
        text = f"list[{text}]"
    is_nullable = field.null_first <= field.null_last or field.default is None
    return f"{text} | None" if is_nullable else text


def class_lines(
    shape: Struct, name: str, root: str, is_request: bool, depth: int
) -> Iterator[str]:
    indent = "    " * depth
    inside = indent + "    "
    yield f"{indent}class {name}(_Fields):"
    types = {field.name: field_type(field, root, is_request) for field in shape.fields}
    own = [field.struct for field in shape.fields if field.struct is not None]
    path = shape.cls.__qualname__
    for struct in dict.fromkeys(own):
        if struct.cls.__qualname__ == f"{path}.{struct.name}":
            yield from class_lines(struct, struct.name, root, is_request, depth + 1)
            yield ""
    for field, text in types.items():
        yield f"{inside}{field}: {text} = ..."
    if not types:
        yield f"{inside}..."


def messages_stub() -> str:
    lines = [_MESSAGES_HEAD]
    for _, message in messages():
        name = message.type_name
        lines += class_lines(message.schema, name, name, message.kind == "request", 0)
        lines.append("")
    return "\n".join(lines)


def table_stub() -> str:
    lines = [_TABLE_HEAD]
    for name in table.__all__:
        entry = getattr(table, name)
        if isinstance(entry, Api):
            types = f"messages.{entry.request.type_name}, messages.{entry.response.type_name}"
            line = f"{name}: Final[Api[{types}]]"
            if len(line) > _MAX_CHARACTERS:
                line = f"{name}: Final[\n    Api[{types}]\n]"
            lines.append(line)
        elif isinstance(entry, Message):
            lines.append(f"{name}: Final[Message[messages.{entry.type_name}]]")
        else:
            lines.append(f"{name}: Final[Mapping[int, Api[Any, Any]]]")
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in table.__all__), "]", ""]
    return "\n".join(lines)


def stubs() -> dict[Path, str]:
    return {
        WIRE / "messages.pyi": messages_stub(),
        WIRE / "table" / "__init__.pyi": table_stub(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Writes the types of the wire messages from their table."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if a stub is out of date",
    )
    is_check = parser.parse_args().check
    stale = [
        path
        for path, text in stubs().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        print(f"{path.name} is out of date" if is_check else f"writing {path}")
        if not is_check:
            path.write_text(stubs()[path], encoding="utf-8")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
