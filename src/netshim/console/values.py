"""Turns keys, values and headers into text for people.

Rules:
- show() is the only function that turns the bytes of a record into text.
- Characters that are invisible, or that change the direction of text, are shown as
  escapes: a value cannot hide or reorder other text of a page.
- JSON keeps its numbers as they are written, and keys that occur twice.

The templates escape the result for HTML.
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

import attrs

#: Characters of a value in a table.
PREVIEW_CHARACTERS: Final = 240
#: Bytes of a value that the page of one message shows as text or as a tree.
MAX_TEXT_BYTES: Final = 256 << 10
#: Bytes of a value that are shown as a hex dump.
MAX_HEX_BYTES: Final = 4 << 10
#: Maximum number of nodes and levels of a JSON tree.
_MAX_NODES: Final = 5_000
_MAX_LEVELS: Final = 40
#: Bytes that a preview shows before the text of a search.
_BEFORE: Final = 20
#: Bytes in a row of a hex dump.
_ROW_BYTES: Final = 16

_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)

#: How bytes are shown.
Form = Literal["null", "json", "text", "hex"]


@attrs.frozen
class JsonNode:
    """A value of JSON: a scalar with its text, or a container with its items."""

    #: object, array, string, number or word (true, false, null).
    kind: str
    text: str = ""
    #: Key or index of each item, and the item.
    items: tuple[tuple[str, JsonNode], ...] = ()


@attrs.frozen
class TextValue:
    """Bytes of a record as text."""

    form: Form
    text: str
    size_bytes: int
    #: Whether the end of the value is missing.
    is_truncated: bool = False
    #: Whether the start of the value is missing.
    starts_later: bool = False
    #: The tree of a value that is an object or an array in JSON.
    tree: JsonNode | None = None


def show(
    data: bytes | None,
    *,
    max_characters: int = PREVIEW_CHARACTERS,
    search_text: str = "",
) -> TextValue:
    """Return bytes as text: JSON, other text, or hex digits if they are not text.

    If `search_text` occurs in the bytes, the preview starts shortly before it.
    """
    if data is None:
        return TextValue("null", "null", 0)
    begin = _begin(data, search_text)
    # A character has at most 4 bytes, and the last one may be incomplete.
    start = data[begin : begin + 4 * max_characters + 4]
    is_complete = begin + len(start) == len(data)
    text = _decoded(start, is_complete=is_complete)
    if text is None:
        # A byte has two digits.
        digits = data[: max_characters // 2].hex(" ")
        is_truncated = 2 * len(data) > max_characters
        return TextValue("hex", digits, len(data), is_truncated)
    preview = visible(text[:max_characters])
    is_truncated = not is_complete or len(text) > max_characters
    is_json = not begin and text.lstrip()[:1] in ("{", "[")
    form: Form = "json" if is_json else "text"
    return TextValue(form, preview, len(data), is_truncated, starts_later=begin > 0)


def _begin(data: bytes, search_text: str) -> int:
    """Return the position at which a preview begins that shows `search_text`."""
    position = data.find(search_text.encode("utf-8", "surrogateescape"))
    if not search_text or position < 2 * _BEFORE:
        return 0
    begin = position - _BEFORE
    # Do not begin inside a character, whose further bytes are 0x80 to 0xBF.
    while begin < len(data) and data[begin] & 0xC0 == 0x80:
        begin += 1
    return begin


def full_value(data: bytes | None) -> TextValue:
    """Return bytes as text for the page of one message, with a tree if they are JSON."""
    preview = show(data, max_characters=MAX_TEXT_BYTES)
    if data is None or preview.form != "json":
        return preview
    tree = None
    if len(data) <= MAX_TEXT_BYTES:
        tree = _tree(data.decode())
    form: Form = "text" if tree is None else "json"
    return attrs.evolve(preview, form=form, tree=tree)


def visible(text: str) -> str:
    """Return a text in which invisible characters are escapes such as \\u202e."""
    return _INVISIBLE.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _decoded(start: bytes, *, is_complete: bool) -> str | None:
    """Return UTF-8 text, or None for other bytes."""
    # The last character may be cut after 1 to 3 bytes.
    truncations = (0,) if is_complete else (0, 1, 2, 3)
    for size in truncations:
        try:
            text = start[: len(start) - size].decode()
        except UnicodeDecodeError:
            continue
        # Text may contain a few control characters; binary data has many.
        if 4 * len(_INVISIBLE.findall(text[:1_000])) > min(len(text), 1_000):
            return None
        return text
    return None


def hex_lines(data: bytes) -> list[str]:
    """Return the start of the bytes as lines of position, hex digits and characters."""
    lines = []
    for position in range(0, min(len(data), MAX_HEX_BYTES), _ROW_BYTES):
        row = data[position : position + _ROW_BYTES]
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{position:08x}  {row.hex(' '):<47}  {characters}")
    return lines


def _tree(text: str) -> JsonNode | None:
    """Return the tree of JSON, or None if the text is not JSON or too large for a page."""
    try:
        parsed = json.loads(
            text,
            # The digits as written, because a float would change large numbers.
            parse_int=lambda digits: JsonNode("number", digits),
            parse_float=lambda digits: JsonNode("number", digits),
            parse_constant=_refuse_constant,
            # A dict would drop keys that occur twice.
            object_pairs_hook=_Pairs,
        )
        # A list, because the recursion shares the number.
        budget = [_MAX_NODES]
        return _node(parsed, _MAX_LEVELS, budget)
    except (ValueError, RecursionError):
        return None


class _Pairs(list[tuple[str, object]]):
    """Keys and values of an object, in order."""


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _node(value: object, levels: int, budget: list[int]) -> JsonNode:
    """Convert a parsed value. Raises ValueError if there are too many nodes or levels."""
    budget[0] -= 1
    if not levels or budget[0] < 0:
        raise ValueError("too large")
    if isinstance(value, JsonNode):
        return value
    if isinstance(value, _Pairs):
        items = tuple(
            (visible(key), _node(item, levels - 1, budget)) for key, item in value
        )
        return JsonNode("object", items=items)
    if isinstance(value, list):
        numbered = enumerate(value)
        items = tuple(
            (str(index), _node(item, levels - 1, budget)) for index, item in numbered
        )
        return JsonNode("array", items=items)
    if isinstance(value, str):
        return JsonNode("string", visible(value))
    return JsonNode("word", json.dumps(value))
