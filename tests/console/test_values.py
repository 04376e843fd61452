"""Bytes of records as text: no character is hidden, reordered or lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netshim.console.values import (
    MAX_TEXT_BYTES,
    JsonNode,
    full_value,
    hex_lines,
    show,
    visible,
)


@pytest.mark.parametrize(
    ("data", "form", "text"),
    [
        (None, "null", "null"),
        (b"", "text", ""),
        (b"plain", "text", "plain"),
        (b"null", "text", "null"),
        ("ключ 東京".encode(), "text", "ключ 東京"),
        (b"line\nnext\ttab", "text", "line\nnext\ttab"),
        (b"a\x00bcdefghijk", "text", "a\\x00bcdefghijk"),
        ("abc\u202egnp.exe".encode(), "text", "abc\\u202egnp.exe"),
        (b"\xff\xfe", "hex", "ff fe"),
        (b"\x00\x01\x02\x03", "hex", "00 01 02 03"),
        (b'{"a": 1}', "json", '{"a": 1}'),
    ],
)
def test_form_of_bytes_is_detected(data: bytes | None, form: str, text: str) -> None:
    text_of_bytes = show(data)
    assert (text_of_bytes.form, text_of_bytes.text) == (form, text)


def test_long_text_is_truncated_between_characters() -> None:
    text_of_bytes = show("€".encode() * 1_000, max_characters=10)
    assert text_of_bytes.text == "€" * 10
    assert text_of_bytes.is_truncated
    assert text_of_bytes.size_bytes == 3_000


@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_are_shown_without_invisible_characters(
    data: bytes, max_characters: int
) -> None:
    text_of_bytes = show(data, max_characters=max_characters)
    assert visible(text_of_bytes.text) == text_of_bytes.text
    assert text_of_bytes.size_bytes == len(data)
    full_value(data)
    assert (
        b"".join(
            bytes.fromhex(line[10:57].replace(" ", "")) for line in hex_lines(data)
        )
        == data
    )


def plain(node: JsonNode) -> Any:
    if node.kind == "object":
        return {name: plain(child) for name, child in node.items}
    if node.kind == "array":
        return [plain(child) for _, child in node.items]
    return node.text if node.kind == "string" else json.loads(node.text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
    | st.text("abc é東", max_size=5),
    lambda search_strategy: st.lists(search_strategy, max_size=4)
    | st.dictionaries(st.text("abc é", max_size=3), search_strategy, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(VALUES.filter(lambda entry: isinstance(entry, dict | list)))
def test_json_tree_contains_the_complete_value(value: Any) -> None:
    if "Infinity" in json.dumps(value):
        return
    tree = full_value(json.dumps(value).encode()).tree
    assert tree is not None
    assert plain(tree) == value


def test_json_tree_keeps_duplicate_keys_and_exact_numbers() -> None:
    tree = full_value(b'{"a": 1.50, "a": 123456789012345678901234567890}').tree
    assert tree is not None
    assert [(name, node.text) for name, node in tree.items] == [
        ("a", "1.50"),
        ("a", "123456789012345678901234567890"),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[" * 100_000,
        b'{"a":' * 50 + b"1" + b"}" * 50,
        b"[" + b"1," * 10_000 + b"1]",
        b"[NaN]",
        b"[" + b"9" * 10_000 + b"x",
        b'["' + b"x" * MAX_TEXT_BYTES + b'"]',
    ],
)
def test_invalid_or_large_json_has_no_tree(data: bytes) -> None:
    assert full_value(data).tree is None


def test_string_in_json_cannot_reorder_the_page() -> None:
    tree = full_value('{"\u202ea": "\u2066b"}'.encode()).tree
    assert tree is not None
    assert [(name, node.text) for name, node in tree.items] == [
        ("\\u202ea", "\\u2066b")
    ]
