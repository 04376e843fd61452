"""Which records `--where` lets pass: conditions on key, value and headers.

A condition is FIELD, OPERATOR and TEXT without blanks between them; FIELD is key, value
or header.NAME:

    key=anna    equal          key!=anna   not equal
    key~^an     has a match    key!~^an    has none
    key         is not null    !key        is null

Rules:
- TEXT is UTF-8. ~ is a regular expression of Python's re over the bytes, in which \\x00
  writes any byte.
- A condition with ! is the opposite of the one without: key!=anna lets null keys pass.
- Of several headers with one name, one that fits is enough. header.NAME asks whether
  there is one at all.
- Columns are judged where they are; no record becomes an object before it passed.

This module reads no log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import click
import numpy as np
import numpy.typing as npt

from logcore.format.columns import RecordColumns
from logcore.kernels import Record

_Rows = npt.NDArray[np.bool_]

_CONDITION: Final = re.compile(
    r"(?P<no>!?)(?P<field>[a-z]+)(\.(?P<name>[^=~!]+))?((?P<sign>!?[=~])(?P<text>.*))?",
    re.DOTALL,
)
_HELP: Final = "expected key, value or header.NAME with =TEXT, !=TEXT, ~REGEX or !~REGEX; alone, or with ! before it"

where_option = click.option(
    "--where",
    "conditions",
    metavar="CONDITION",
    multiple=True,
    help="Only records with key=TEXT, value~REGEX, header.NAME!=TEXT, ... Repeatable: all have to hold.",
)


@attrs.frozen
class Condition:
    """One condition. header: the name where the field is a header. wanted: equal to it;
    pattern: has a match of it; neither: is there. is_opposite: lets pass what else
    would not.
    """

    field: str
    header: str | None = None
    wanted: bytes | None = None
    pattern: re.Pattern[bytes] | None = None
    is_opposite: bool = False

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises click.BadParameter."""
        found = _CONDITION.fullmatch(text)
        if found is None or found["field"] not in ("key", "value", "header"):
            raise click.BadParameter(f"{_HELP}; found {text!r}", param_hint="'--where'")
        if (found["field"] == "header") != (found["name"] is not None):
            raise click.BadParameter(
                f"a header has a name, as in header.trace; found {text!r}",
                param_hint="'--where'",
            )
        sign = found["sign"] or ""
        if found["no"] and sign:
            raise click.BadParameter(
                f"write !{sign[-1]} for the opposite; found {text!r}",
                param_hint="'--where'",
            )
        wanted = pattern = None
        if sign.endswith("="):
            wanted = found["text"].encode("utf-8", "surrogateescape")
        elif sign:
            try:
                pattern = re.compile(
                    found["text"].encode("utf-8", "surrogateescape"), re.DOTALL
                )
            except re.error as error:
                raise click.BadParameter(
                    f"no regular expression: {error}: {text!r}", param_hint="'--where'"
                ) from error
        return cls(
            found["field"],
            found["name"],
            wanted,
            pattern,
            bool(found["no"]) or sign.startswith("!"),
        )

    def rows(self, columns: RecordColumns) -> _Rows:
        """Which rows pass."""
        if self.header is not None:
            passing = self._header_rows(columns)
        elif self.field == "key":
            passing = self._piece_rows(
                columns.data, columns.key_positions, columns.key_sizes
            )
        else:
            passing = self._piece_rows(
                columns.data, columns.value_positions, columns.value_sizes
            )
        if self.is_opposite:
            return ~passing
        return passing

    def passes(self, record: Record | Any) -> bool:
        """Whether one record passes, as rows() says."""
        if self.header is not None:
            fits = any(
                name == self.header and self._fits_header(value)
                for name, value in record.headers
            )
        else:
            fits = self._fits(record.key if self.field == "key" else record.value)
        return fits != self.is_opposite

    def _fits(self, piece: Any) -> bool:
        if piece is None:
            return False
        if self.pattern is not None:
            return self.pattern.search(piece) is not None
        return self.wanted is None or piece == self.wanted

    def _fits_header(self, value: bytes | None) -> bool:
        return self._fits(value) or (self.wanted is None and self.pattern is None)

    def _header_rows(self, columns: RecordColumns) -> _Rows:
        passing = np.zeros(len(columns), np.bool_)
        for row in np.flatnonzero(columns.header_counts):
            passing[row] = any(
                name == self.header and self._fits_header(value)
                for name, value in columns.headers(int(row))
            )
        return passing

    def _piece_rows(
        self,
        data: memoryview,
        positions: npt.NDArray[np.int32],
        sizes: npt.NDArray[np.int32],
    ) -> _Rows:
        if self.wanted is not None:
            return _equal_rows(data, positions, sizes, self.wanted)
        passing: _Rows = sizes >= 0
        if self.pattern is not None:
            search: Callable[[memoryview], Any] = self.pattern.search
            for row in np.flatnonzero(passing).tolist():
                at = int(positions[row])
                passing[row] = search(data[at : at + int(sizes[row])]) is not None
        return passing


def _equal_rows(
    data: memoryview,
    positions: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int32],
    wanted: bytes,
) -> _Rows:
    """Rows whose piece is equal: those of the size, fewer with each byte that is
    compared.
    """
    passing: _Rows = sizes == len(wanted)
    rows = np.flatnonzero(passing)
    if len(rows) and wanted:
        every_byte = np.frombuffer(data, np.uint8)
        for slot, byte in enumerate(wanted):
            rows = rows[every_byte[positions[rows] + slot] == byte]
            if not len(rows):
                break
    passing[:] = False
    passing[rows] = True
    return passing


@attrs.frozen
class Where:
    """Several conditions, all of which have to hold."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Where | None:
        """None where nothing is asked. Raises click.BadParameter."""
        if texts:
            return cls(tuple(map(Condition.parse, texts)))
        return None

    def select(self, columns: RecordColumns) -> RecordColumns:
        """The rows that pass, over the same bytes."""
        passing = self.conditions[0].rows(columns)
        for condition in self.conditions[1:]:
            if not passing.any():
                break
            passing &= condition.rows(columns)
        if passing.all():
            return columns
        return columns[passing]

    def passes(self, record: Record | Any) -> bool:
        return all(condition.passes(record) for condition in self.conditions)
