"""Filter `--where`: conditions on key, value and headers of records.

A condition is FIELD, OPERATOR and TEXT without blanks between them; FIELD is key, value
or header.NAME:

    key=anna    equal          key!=anna   not equal
    key~^an     has a match    key!~^an    has no match
    key         is not null    !key        is null

Rules:
- TEXT is UTF-8. ~ matches a regular expression of Python's re against the bytes; an
  escape such as \\x00 matches any byte.
- A condition with ! is the negation of the condition without it: null keys pass
  key!=anna.
- If several headers have the name, one matching header is enough. header.NAME alone
  requires that such a header exists.
- Conditions are evaluated on columns. A record becomes an object only after it passed.

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
    help="Only records with key=TEXT, value~REGEX, header.NAME!=TEXT, ... Repeatable: all must hold.",
)


@attrs.frozen
class Condition:
    """One condition.

    `header` is the name of the header, or None for key and value. A record passes if its
    field equals `expected_content` or matches `pattern`. If both are None, a record passes if it
    has the field. `is_negated` negates the condition.
    """

    field: str
    header: str | None = None
    expected_content: bytes | None = None
    pattern: re.Pattern[bytes] | None = None
    is_negated: bool = False

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition of --where. Raises click.BadParameter."""
        parsed = _CONDITION.fullmatch(text)
        if parsed is None or parsed["field"] not in ("key", "value", "header"):
            raise click.BadParameter(f"{_HELP}; found {text!r}", param_hint="'--where'")
        if (parsed["field"] == "header") != (parsed["name"] is not None):
            raise click.BadParameter(
                f"a header has a name, as in header.trace; found {text!r}",
                param_hint="'--where'",
            )
        sign = parsed["sign"] or ""
        if parsed["no"] and sign:
            raise click.BadParameter(
                f"write !{sign[-1]} for the opposite; found {text!r}",
                param_hint="'--where'",
            )
        expected_content = pattern = None
        if sign.endswith("="):
            expected_content = parsed["text"].encode("utf-8", "surrogateescape")
        elif sign:
            try:
                pattern = re.compile(
                    parsed["text"].encode("utf-8", "surrogateescape"), re.DOTALL
                )
            except re.error as error:
                raise click.BadParameter(
                    f"not a regular expression: {error}: {text!r}",
                    param_hint="'--where'",
                ) from error
        return cls(
            parsed["field"],
            parsed["name"],
            expected_content,
            pattern,
            bool(parsed["no"]) or sign.startswith("!"),
        )

    def rows(self, columns: RecordColumns) -> _Rows:
        """Return a mask of the rows that pass."""
        if self.header is not None:
            matching = self._header_rows(columns)
        elif self.field == "key":
            matching = self._matching_rows(
                columns.data, columns.key_positions, columns.key_sizes
            )
        else:
            matching = self._matching_rows(
                columns.data, columns.value_positions, columns.value_sizes
            )
        if self.is_negated:
            return ~matching
        return matching

    def passes(self, record: Record | Any) -> bool:
        """Return whether one record passes; the rules are the same as in rows()."""
        if self.header is not None:
            is_match = any(
                name == self.header and self._matches_header(value)
                for name, value in record.headers
            )
        else:
            is_match = self._matches(
                record.key if self.field == "key" else record.value
            )
        return is_match != self.is_negated

    def _matches(self, content: Any) -> bool:
        if content is None:
            return False
        if self.pattern is not None:
            return self.pattern.search(content) is not None
        return self.expected_content is None or content == self.expected_content

    def _matches_header(self, value: bytes | None) -> bool:
        return self._matches(value) or (
            self.expected_content is None and self.pattern is None
        )

    def _header_rows(self, columns: RecordColumns) -> _Rows:
        matching = np.zeros(len(columns), np.bool_)
        for row in np.flatnonzero(columns.header_counts):
            matching[row] = any(
                name == self.header and self._matches_header(value)
                for name, value in columns.headers(int(row))
            )
        return matching

    def _matching_rows(
        self,
        data: memoryview,
        positions: npt.NDArray[np.int32],
        sizes: npt.NDArray[np.int32],
    ) -> _Rows:
        if self.expected_content is not None:
            return _equal_rows(data, positions, sizes, self.expected_content)
        matching: _Rows = sizes >= 0
        if self.pattern is not None:
            search: Callable[[memoryview], Any] = self.pattern.search
            for row in np.flatnonzero(matching).tolist():
                at = int(positions[row])
                matching[row] = search(data[at : at + int(sizes[row])]) is not None
        return matching


def _equal_rows(
    data: memoryview,
    positions: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int32],
    expected_content: bytes,
) -> _Rows:
    """Return a mask of the rows that equal `expected_content`.

    Rows of the same size are compared byte by byte; each byte removes rows.
    """
    matching: _Rows = sizes == len(expected_content)
    rows = np.flatnonzero(matching)
    if len(rows) and expected_content:
        every_byte = np.frombuffer(data, np.uint8)
        for slot, byte in enumerate(expected_content):
            rows = rows[every_byte[positions[rows] + slot] == byte]
            if not len(rows):
                break
    matching[:] = False
    matching[rows] = True
    return matching


@attrs.frozen
class Where:
    """Several conditions; all must hold."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Where | None:
        """Parse conditions; return None if there are none.

        Raises:
            click.BadParameter: a condition is invalid.
        """
        if texts:
            return cls(tuple(map(Condition.parse, texts)))
        return None

    def rows(self, columns: RecordColumns) -> _Rows:
        """Return a mask of the rows that pass."""
        matching = self.conditions[0].rows(columns)
        for condition in self.conditions[1:]:
            if not matching.any():
                break
            matching &= condition.rows(columns)
        return matching

    def select(self, columns: RecordColumns) -> RecordColumns:
        """Return the rows that pass; the bytes are not copied."""
        matching = self.rows(columns)
        if matching.all():
            return columns
        return columns[matching]

    def passes(self, record: Record | Any) -> bool:
        return all(condition.passes(record) for condition in self.conditions)
