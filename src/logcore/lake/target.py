"""The interface between an export and the table that it writes: calls and their values.

Rules:
- commit() stores rows and progress in one commit of the table, or raises.
- commit() refuses to store rows if the progress of the table has changed since load().

The tables are in delta.py and iceberg.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import attrs

from logcore.errors import InvalidConfigError, LakeTableError
from logcore.lake.rules import ExportProgress

if TYPE_CHECKING:
    import pyarrow

#: Properties of a table that an export has created.
_TOPIC: Final = "logcore.topic"
_TOPIC_ID: Final = "logcore.topic.id"
_LAYOUT: Final = "logcore.layout"
_HEADER: Final = "header."
#: Formats of values whose fields are columns.
VALUES_AS_COLUMNS: Final = ("json", "avro", "registry")


@attrs.frozen
class TableLayout:
    """The options that decide the columns of a table."""

    #: "bytes", "text", "json", "avro" or "registry".
    value: str = "bytes"
    #: "bytes" or "text".
    key: str = "bytes"
    #: "day", "header.NAME" or "".
    partition_by: str = ""
    #: The treatment of values that do not fit the columns: "fail" or "text".
    on_error: str = "fail"

    def check(self) -> None:
        """Raise InvalidConfigError if a field has an unknown value."""
        for name, found, known in (
            ("value", self.value, ("bytes", "text", *VALUES_AS_COLUMNS)),
            ("key", self.key, ("bytes", "text")),
            ("on_error", self.on_error, ("fail", "text")),
        ):
            if found not in known:
                raise InvalidConfigError(
                    name, expected=f"one of {', '.join(known)}", found=repr(found)
                )
        if self.on_error == "text" and self.value not in VALUES_AS_COLUMNS:
            raise InvalidConfigError(
                "on_error='text' (--on-error text) is for values as columns: value='json' or 'avro' (--value)"
            )
        if self.partition_by not in ("", "day") and not self.header_name:
            raise InvalidConfigError(
                "partition_by",
                expected="day or header.NAME",
                found=repr(self.partition_by),
            )

    @property
    def header_name(self) -> str | None:
        """The name of the header that partitions the table, if there is one."""
        if self.partition_by.startswith(_HEADER):
            return self.partition_by.removeprefix(_HEADER)
        return None

    @property
    def partition_column(self) -> str:
        """The column of the rows that partitions the table, "" if there is none."""
        name = self.header_name
        if name is not None:
            return "header_" + re.sub(r"\W", "_", name)
        return self.partition_by


@attrs.frozen
class TableOwner:
    """The topic and the layout of a table, stored in its properties when it is created."""

    topic: str
    #: Kafka's id as text, "" if it is unknown.
    topic_id: str
    layout: TableLayout

    def as_properties(self) -> dict[str, str]:
        """Return the properties of the table."""
        return {
            _TOPIC: self.topic,
            _TOPIC_ID: self.topic_id,
            _LAYOUT: json.dumps(attrs.asdict(self.layout), sort_keys=True),
        }


def owner_of(properties: Mapping[str, str], table: str) -> TableOwner:
    """Return the owner of a table.

    Raises:
        LakeTableError: the table was not created by an export.
    """
    try:
        layout = TableLayout(**json.loads(properties[_LAYOUT]))
        return TableOwner(properties[_TOPIC], properties[_TOPIC_ID], layout)
    except (KeyError, TypeError, ValueError) as error:
        raise LakeTableError(
            "the table exists and is not the export of a topic: choose another name, the export creates the table",
            path=table,
            expected=f"the properties {_TOPIC}, {_TOPIC_ID} and {_LAYOUT}",
            found=", ".join(sorted(properties)) or "no properties",
        ) from error


def progress_is_lost(table: str) -> LakeTableError:
    """Return the error for a table with rows and without progress.

    An export from the beginning would store the rows a second time.
    """
    return LakeTableError(
        "the table has rows, but the progress of the export is lost: export the topic to a new table",
        path=table,
    )


@attrs.frozen
class TableState:
    """A table as load() has read it."""

    owner: TableOwner
    #: The columns, without partition columns that the table derives itself.
    schema: pyarrow.Schema
    #: By partition. It has no entry for a partition that was never exported.
    progress: Mapping[int, ExportProgress]


class LakeTarget(Protocol):
    """One table, which need not exist yet."""

    #: Name of the table, for people.
    name: str
    #: Whether a partition by day needs a column of its own.
    needs_day_column: bool

    def load(self, partitions: Sequence[int]) -> TableState | None:
        """Return the newest state of the table, None if there is no table.

        Raises:
            LakeTableError: the table cannot be read, or is not the export of a topic.
        """
        ...

    def create(self, schema: pyarrow.Schema, owner: TableOwner) -> None:
        """Create the table. Does nothing if another process has created it.

        Raises:
            LakeTableError: the table cannot be created.
        """
        ...

    def commit(
        self, rows: pyarrow.Table, progress: Mapping[int, ExportProgress]
    ) -> None:
        """Store rows and progress in one commit.

        New columns of `rows` are added to the table in the same commit.

        Raises:
            CommitConflictError: another writer has committed since load(). The rows
                are not stored.
            LakeTableError: the table cannot be written.
        """
        ...


def conformed(rows: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    """Return rows with the columns of the table first, in its order, then new ones.

    Columns that the rows do not have are null.
    """
    import pyarrow as pa

    names = [
        *schema.names,
        *(name for name in rows.column_names if name not in schema.names),
    ]
    fields = []
    arrays = []
    for name in names:
        if name in rows.column_names:
            fields.append(rows.schema.field(name))
            arrays.append(rows.column(name))
        else:
            fields.append(schema.field(name))
            arrays.append(pa.nulls(rows.num_rows, schema.field(name).type))
    return pa.table(arrays, schema=pa.schema(fields))
