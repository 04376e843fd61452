"""A scan as a lazy query of polars, which reads only the part that the query needs.

polars passes down:
- the columns of the query: others are not built;
- bounds of `partition` and `offset`, and lower bounds of `timestamp`: other partitions,
  and records before and after the bounds, are not read;
- the number of rows of head(): the reading ends.

The complete filter is applied to each chunk as well, so that a bound which is not
recognized costs time and nothing else.

polars is imported in the functions that use it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import attrs

from logcore.config import INT64_MAX
from logcore.errors import MissingDependencyError
from logcore.format.columns import RecordColumns, arrow_schema

if TYPE_CHECKING:
    import polars

#: Comparison -> the same with its sides exchanged.
_COMPARISONS: Final[dict[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    operator.ge: operator.le,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.lt: operator.gt,
    operator.eq: operator.eq,
}


@attrs.define
class FilterBounds:
    """Ranges [first, end) of integers outside of which no row passes a filter."""

    partition: tuple[int, int] = (0, INT64_MAX)
    offset: tuple[int, int] = (0, INT64_MAX)
    #: Milliseconds. The end is not used: the timestamps of a log may be in any order.
    timestamp: tuple[int, int] = (0, INT64_MAX)

    def limit(self, column: str, first: int, end: int) -> None:
        known = getattr(self, column)
        setattr(self, column, (max(known[0], first), min(known[1], end)))


def lazy_frame(
    columns: tuple[str, ...],
    read: Callable[[list[str], FilterBounds], Iterable[RecordColumns]],
) -> polars.LazyFrame:
    """Return a polars.LazyFrame of these columns.

    `read` returns the records within bounds, for the columns that are built.
    """
    try:
        import polars as pl
        from polars.io.plugins import register_io_source
    except ImportError as error:
        raise MissingDependencyError(
            "to_lazyframe needs polars: pip install polars"
        ) from error

    def frames(
        wanted: list[str] | None,
        predicate: polars.Expr | None,
        row_count: int | None,
        batch_rows: int | None,
    ) -> Iterator[polars.DataFrame]:
        if wanted is None:
            wanted = list(columns)
        needed = set(wanted)
        bounds = FilterBounds()
        if predicate is not None:
            needed.update(predicate.meta.root_names())
            bounds = bounds_of(predicate)
        built = [name for name in columns if name in needed]
        left = row_count
        for chunk in read(built, bounds):
            frame = pl.DataFrame(chunk.to_arrow(built))
            if predicate is not None:
                frame = frame.filter(predicate)
            if left is not None:
                frame = frame.head(left)
                left -= len(frame)
            if len(frame):
                yield frame.select(wanted)
            if left == 0:
                return

    empty = pl.DataFrame(arrow_schema(columns).empty_table())
    return register_io_source(frames, schema=empty.schema, validate_schema=True)


def bounds_of(predicate: polars.Expr) -> FilterBounds:
    """Return the bounds that a filter implies: its terms that compare one of the columns
    with a constant, and are joined by `and`.

    polars has no public form of an expression to read. Its parts are public, and so is
    the comparison of two expressions. An operator is therefore found by building each
    candidate from the parts.
    """
    bounds = FilterBounds()
    waiting = [predicate]
    while waiting:
        term = waiting.pop()
        parts = term.meta.pop()
        if len(parts) == 3:
            _apply_between(bounds, term, parts)
        if len(parts) != 2:
            continue
        for left, right in itertools.permutations(parts):
            if (left & right).meta.eq(term):
                waiting += parts
                break
            if _apply(bounds, term, left, right):
                break
    return bounds


def _apply(
    bounds: FilterBounds, term: polars.Expr, left: polars.Expr, right: polars.Expr
) -> bool:
    """Apply a term that compares its two parts in this order; return whether it does."""
    for compares, exchanged in _COMPARISONS.items():
        if not compares(left, right).meta.eq(term):
            continue
        if (column := _column(left)) is not None:
            _limit(bounds, column, compares, _constant(right))
        elif (column := _column(right)) is not None:
            _limit(bounds, column, exchanged, _constant(left))
        return True
    return False


def _apply_between(
    bounds: FilterBounds, term: polars.Expr, parts: list[polars.Expr]
) -> None:
    for item, low, high in itertools.permutations(parts):
        column = _column(item)
        if column is not None and item.is_between(low, high).meta.eq(term):
            _limit(bounds, column, operator.ge, _constant(low))
            _limit(bounds, column, operator.le, _constant(high))
            return


def _column(part: polars.Expr) -> str | None:
    """Return the name of the column that a part is, if it has bounds."""
    if part.meta.is_column():
        name = part.meta.output_name()
        if name in ("partition", "offset", "timestamp"):
            return name
    return None


def _constant(part: polars.Expr) -> int | None:
    """Return the integer or the time in milliseconds that a part is, or None."""
    import polars as pl

    if part.meta.root_names() or part.meta.has_multiple_outputs():
        return None
    value = pl.select(part).to_series()
    if len(value) != 1:
        return None
    found = value[0]
    if isinstance(found, datetime) and found.tzinfo is not None:
        return int(found.timestamp() * 1000)
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    return None


def _limit(
    bounds: FilterBounds,
    column: str,
    compares: Callable[[Any, Any], Any],
    value: int | None,
) -> None:
    if value is None:
        return
    first = 0
    end = INT64_MAX
    if compares in (operator.ge, operator.eq):
        first = value
    if compares is operator.gt:
        # _constant() has rounded a time down to milliseconds, so records of the same
        # millisecond may be later.
        first = value + (column != "timestamp")
    if compares in (operator.le, operator.eq):
        end = value + 1
    if compares is operator.lt:
        end = value
    bounds.limit(column, first, end)
