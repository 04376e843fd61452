"""`--where`: which records match a filter, in columns and in record objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logcore

click = pytest.importorskip("click")
from logcore.cli.filters import Condition, Where  # noqa: E402

RECORDS: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
    (b"anna", b"4 apples", [("trace", b"1")]),
    (b"ben", b"", [("trace", b"2"), ("trace", b"1"), ("n", None)]),
    (None, None, []),
    (b"", b"\xff\x00\xfe", [("n", b"x")]),
    ("zoë".encode(), b"line one\nline two", []),
    (b"annaben", b"4 apples and 2 pears", [("a.b", b"")]),
]

CASES = [
    ("key=anna", [0]),
    ("key!=anna", [1, 2, 3, 4, 5]),
    ("key=", [3]),
    ("key=zoë", [4]),
    ("key", [0, 1, 3, 4, 5]),
    ("!key", [2]),
    ("key~^an", [0, 5]),
    ("key!~^an", [1, 2, 3, 4]),
    ("key~", [0, 1, 3, 4, 5]),
    ("value", [0, 1, 3, 4, 5]),
    ("!value", [2]),
    (r"value~^\xff\x00", [3]),
    ("value~one.line", [4]),
    ("value=4 apples", [0]),
    ("value~a=b|pears$", [5]),
    ("header.trace", [0, 1]),
    ("!header.trace", [2, 3, 4, 5]),
    ("header.trace=1", [0, 1]),
    ("header.trace=2", [1]),
    ("header.trace!=1", [2, 3, 4, 5]),
    ("header.trace~[2-9]", [1]),
    ("header.n", [1, 3]),
    ("header.n=x", [3]),
    ("header.a.b=", [5]),
    ("header.none", []),
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("where") / "t-0"
    with logcore.open(path, create=True, durability="os") as log:
        log.append_many([(key, value, headers) for key, value, headers in RECORDS])
    with logcore.open(path, read_only=True) as log:
        yield log


@pytest.mark.parametrize(("text", "offsets"), CASES)
def test_condition_selects_records(
    log: logcore.Log, text: str, offsets: list[int]
) -> None:
    condition = Condition.parse(text)
    assert [
        record.offset for record in log.read(0) if condition.passes(record)
    ] == offsets
    where = Where.parse([text])
    assert where is not None
    passing = [record for part in log.scan() for record in where.select(part).records()]
    assert [record.offset for record in passing] == offsets
    assert passing == [log.get(offset) for offset in offsets], (
        "the other fields of a record are unchanged"
    )


@pytest.mark.parametrize(("text", "offsets"), CASES)
def test_all_conditions_have_to_hold(
    log: logcore.Log, text: str, offsets: list[int]
) -> None:
    where = Where.parse(["key~a", text])
    assert where is not None
    passing = [
        record.offset for part in log.scan() for record in where.select(part).records()
    ]
    assert passing == [offset for offset in offsets if offset in (0, 5)]


def test_without_options_there_is_no_condition() -> None:
    assert Where.parse([]) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected key, value or header.NAME"),
        ("keys=anna", "expected key, value or header.NAME"),
        ("offset=3", "expected key, value or header.NAME"),
        ("key anna", "expected key, value or header.NAME"),
        ("key==", None),
        ("header=1", "a header has a name"),
        ("key.x=1", "a header has a name"),
        ("!key=1", "write !="),
        ("value~(", "not a regular expression"),
    ],
)
def test_invalid_condition_is_an_error(text: str, words: str | None) -> None:
    if words is None:
        assert Condition.parse(text).expected_content == b"="
        return
    with pytest.raises(click.BadParameter, match=words):
        Condition.parse(text)
