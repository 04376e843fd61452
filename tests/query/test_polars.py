"""Scan.to_lazyframe(): a filter returns the same rows as on the whole frame, and reads
few records.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore.partition.polars_source import bounds_of

pl: Any = pytest.importorskip("polars")
pytest.importorskip("pyarrow")


T0 = 1_700_000_000_000
RECORDS = 300


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[logcore.LogDir]:
    """Create two partitions in several segments. Timestamps rise, except at every tenth
    record.
    """
    path = tmp_path_factory.mktemp("data")
    with logcore.open_dir(path, create=True, durability="os") as directory:
        directory.create_topic("t", 2, {"segment.bytes": 2_000})
        for number in range(2):
            log = directory.partition("t", number)
            for first in range(0, RECORDS, 20):
                log.append_many(
                    [
                        (
                            b"k%d" % (at % 7),
                            b"%d" % at,
                            (),
                            T0 + at - 50 * (at % 10 == 0),
                        )
                        for at in range(first, first + 20)
                    ]
                )
        yield directory


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


NUMBERS = st.integers(-2, RECORDS + 2)
TERMS = st.one_of(
    st.builds(
        lambda sign, value: ("offset", sign, value), st.sampled_from("><=lg"), NUMBERS
    ),
    st.builds(
        lambda sign, value: ("partition", sign, value),
        st.sampled_from("><=lg"),
        st.integers(-1, 2),
    ),
    st.builds(
        lambda sign, value: ("timestamp", sign, at(T0 + value)),
        st.sampled_from("><=lg"),
        NUMBERS,
    ),
    st.builds(lambda value: ("key", "=", b"k%d" % value), st.integers(0, 8)),
)


def expression(term: tuple[str, str, Any], turned: bool) -> Any:
    name, sign, value = term
    sides = (pl.col(name), pl.lit(value))
    if turned:
        sides = sides[::-1]
    left, right = sides
    return {
        ">": left > right,
        "<": left < right,
        "=": left == right,
        "l": left <= right,
        "g": left >= right,
    }[sign]


@given(
    terms=st.lists(st.tuples(TERMS, st.booleans()), min_size=1, max_size=3),
    joins=st.lists(st.sampled_from("&|"), min_size=2, max_size=2),
    inverts=st.booleans(),
)
def test_filtered_scan_equals_the_filtered_whole_frame(
    directory: logcore.LogDir, terms: Any, joins: list[str], inverts: bool
) -> None:
    parts = [expression(*term) for term in terms]
    predicate = parts[0]
    for join, part in zip(joins, parts[1:], strict=False):
        predicate = predicate & part if join == "&" else predicate | part
    if inverts:
        predicate = ~predicate
    scan = directory.scan("t", columns=["partition", "offset", "timestamp", "key"])
    expected = scan.to_polars().filter(predicate)
    found = scan.to_lazyframe().filter(predicate).collect()
    assert found.equals(expected)


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        (lambda: pl.col("offset") >= 290, 20),
        (lambda: pl.col("offset").is_between(10, 19), 20),
        (lambda: (pl.col("partition") == 1) & (pl.col("offset") < 20), 20),
        (lambda: (pl.col("offset") < 20) & (pl.col("key") == b"k1"), 40),
        (lambda: pl.col("timestamp") >= at(T0 + 299), 2),
        (lambda: pl.col("timestamp") > at(T0 + 1_000), 0),
        (lambda: pl.col("partition") == 7, 0),
    ],
)
def test_bounds_limit_the_records_that_are_read(
    directory: logcore.LogDir,
    monkeypatch: pytest.MonkeyPatch,
    predicate: Any,
    expected: int,
) -> None:
    read = 0
    real = logcore.RecordColumns.to_arrow

    def counting(self: logcore.RecordColumns, *args: Any) -> Any:
        nonlocal read
        read += len(self)
        return real(self, *args)

    scan = directory.scan("t")
    rows = scan.to_polars().filter(predicate()).height
    monkeypatch.setattr(logcore.RecordColumns, "to_arrow", counting)
    assert scan.to_lazyframe().filter(predicate()).collect().height == rows
    assert read == expected


def test_only_needed_columns_are_built_and_head_stops_the_scan(
    directory: logcore.LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[str, ...]] = []
    real = logcore.RecordColumns.to_arrow

    def noting(self: logcore.RecordColumns, columns: Any) -> Any:
        built.append(tuple(columns))
        return real(self, columns)

    monkeypatch.setattr(logcore.RecordColumns, "to_arrow", noting)
    frame = directory.scan("t").to_lazyframe()
    query = frame.filter(pl.col("key") == b"k1").select("value")
    assert query.collect().height == 2 * 43
    assert set(built) == {("key", "value")}
    built.clear()
    assert frame.head(3).collect()["offset"].to_list() == [0, 1, 2]
    assert len(built) == 1
    with pytest.raises(pl.exceptions.ColumnNotFoundError, match="price"):
        frame.select("price").collect()


def test_other_terms_give_no_bound() -> None:
    assert bounds_of((pl.col("offset") > 5) | (pl.col("offset") < 2)).offset[0] == 0
    assert bounds_of(pl.col("offset") * 2 > 10).offset[0] == 0
    assert bounds_of(pl.col("offset") > pl.col("partition")).offset[0] == 0
    assert bounds_of((pl.col("key") == b"x") & (pl.col("offset") > 5)).offset[0] == 6
