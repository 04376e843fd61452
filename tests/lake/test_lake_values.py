"""Values as columns: JSON objects and Avro records, new fields, and values that do not
fit.
"""

from __future__ import annotations

import datetime
import decimal
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore import lake
from logcore.errors import InvalidConfigError, LakeTableError, RecordRefusedError
from logcore.lake.types import TypeMismatch
from logcore.lake.values import JSON, ValueColumns, column_of, fields_of

pa = pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")
fastavro = pytest.importorskip("fastavro")

from support.lakes import KINDS, rows_of, target  # noqa: E402

TOPIC = "orders"
BASE = {"partition", "offset", "timestamp", "timestamp_type", "key", "headers"}


@pytest.fixture
def data(tmp_path: Path) -> Iterator[logcore.LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic(TOPIC)
        yield logdir


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def options(
    value: str = "json", on_error: str = "fail", **given: Any
) -> lake.ExportOptions:
    layout = lake.TableLayout(value=value, on_error=on_error)
    return lake.ExportOptions(layout=layout, **given)


def append(data: logcore.LogDir, *values: Any) -> None:
    for value in values:
        if value is not None and not isinstance(value, bytes):
            value = json.dumps(value).encode()
        data.append(TOPIC, value)


def fields(kind: str, place: Path) -> list[dict[str, Any]]:
    """The columns of the values, row by row, without nulls."""
    return [
        {n: v for n, v in row.items() if n not in BASE and v is not None}
        for row in rows_of(kind, place).to_pylist()
    ]


def types(kind: str, place: Path) -> dict[str, str]:
    schema = rows_of(kind, place).schema
    return {
        field.name: str(field.type).replace("large_", "").replace("element", "item")
        for field in schema
        if field.name not in BASE
    }


def test_json_fields_are_columns(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    values = [
        {"id": 1, "price": 2, "paid": True, "tags": ["a", "b"], "to": {"zip": 1}},
        {"id": 2, "price": 2.5, "note": None, "tags": [], "none": {}, "empty": []},
    ]
    append(data, *values, None)
    lake.export(data, TOPIC, target(kind, tmp_path), options())
    assert types(kind, tmp_path) == {
        "id": "int64",
        "price": "double",
        "paid": "bool",
        "tags": "list<item: string>",
        "to": "struct<zip: int64>",
    }
    assert fields(kind, tmp_path) == [
        values[0],
        {"id": 2, "price": 2.5, "tags": []},
        {},
    ]


def test_new_field_adds_a_column_in_the_same_commit(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    first = {"id": 1, "to": {"zip": 1}}
    append(data, first)
    lake.export(data, TOPIC, target(kind, tmp_path), options())
    second = {"id": 2, "to": {"city": "x"}, "lines": [{"n": 1}, {"item": "pear"}]}
    append(data, second)
    report = lake.export(data, TOPIC, target(kind, tmp_path), options())
    assert report.commit_count == 1
    found = fields(kind, tmp_path)
    assert found[0]["to"] == {"zip": 1, "city": None}
    assert found[1] == {
        "id": 2,
        "to": {"zip": None, "city": "x"},
        "lines": [{"n": 1, "item": None}, {"n": None, "item": "pear"}],
    }


def test_absent_list_of_objects(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    """pyiceberg writes an empty list (apache/iceberg-python issue 3833), and
    docs/lake.md lists this.
    """
    append(data, {"lines": [{"n": 1}]}, {"id": 1})
    lake.export(data, TOPIC, target(kind, tmp_path), options())
    expected: dict[str, Any] = {"id": 1}
    if kind == "iceberg":
        expected["lines"] = []
    assert fields(kind, tmp_path)[1] == expected


def test_field_with_the_name_of_a_record_column_gets_a_prefix(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    append(
        data, {"offset": 7, "Key": "k", "value_key": 1, "value_text": "t", "value_x": 2}
    )
    lake.export(data, TOPIC, target(kind, tmp_path), options())
    append(data, {"offset": 8})
    lake.export(data, TOPIC, target(kind, tmp_path), options())
    assert fields(kind, tmp_path) == [
        {
            "value_offset": 7,
            "value_Key": "k",
            "value_value_key": 1,
            "value_value_text": "t",
            "value_x": 2,
        },
        {"value_offset": 8},
    ]


UNFIT = [
    (b"{", "the value is not JSON"),
    (b"", "the value is not JSON"),
    (b"\xff", "the value is not JSON"),
    (b'{"id": 1} {}', "the value is not JSON"),
    (b'{"id": NaN}', "the value is not JSON"),
    (b"[" * 100_000, "the value is not JSON"),
    (b"[1]", "not a JSON object"),
    (b'{"id": "x"}', "field 'id': the value does not fit the column.*expected int64, found string"),
    (b'{"id": true}', "field 'id'"),
    (b'{"id": 1.5}', "field 'id': the number would change"),
    (b'{"id": 9223372036854775808}', "field 'id'"),
    (b'{"price": 9007199254740993}', "field 'price': the number would change"),
    (b'{"price": 1e999}', "field 'price': the number is too large"),
    (b'{"to": {"zip": "x"}}', r"field 'to\.zip'"),
    (b'{"to": [1]}', "field 'to'"),
    (b'{"mixed": [1, "x"]}', "field 'mixed': the value has no single type"),
    (b'{"name": "\\ud800"}', "field 'name'"),
    (b'{"ID": 1}', "differs from another one only in case"),
    (b'{"a b": 1}', "cannot be the name of a column"),
    (b'{"": 1}', "cannot be the name of a column"),
]  # fmt: skip
FITTING = {"id": 1, "price": 1.5, "to": {"zip": 1}}


@pytest.mark.parametrize(
    ("value", "reason"), UNFIT, ids=[str(data[:20]) for data, _ in UNFIT]
)
def test_json_that_does_not_fit_is_an_error_with_its_offset(
    value: bytes, reason: str
) -> None:
    columns = ValueColumns(JSON, frozenset(), pa.struct([]), "fail")
    columns.add([json.dumps(FITTING).encode()], [0], "orders-0")
    columns.finish_columns()
    with pytest.raises(RecordRefusedError, match=rf"orders-0, offset 2: .*{reason}"):
        columns.add([b'{"id": 2}', value, b'{"id": 3}'], [1, 2, 3], "orders-0")


def test_refused_value_ends_the_export(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    append(data, FITTING)
    lake.export(data, TOPIC, target(kind, tmp_path), options())
    append(data, {"id": 2}, {"id": "x"}, {"id": 3})
    with pytest.raises(RecordRefusedError, match=r"orders-0, offset 2: field 'id'"):
        lake.export(data, TOPIC, target(kind, tmp_path), options())
    assert fields(kind, tmp_path) == [FITTING]


def test_json_that_does_not_fit_is_kept_as_text(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    append(data, FITTING)
    as_text = options(on_error="text")
    lake.export(data, TOPIC, target(kind, tmp_path), as_text)
    for value, _ in UNFIT:
        append(data, {"id": 2}, value)
    lake.export(data, TOPIC, target(kind, tmp_path), as_text)
    found = fields(kind, tmp_path)
    assert found[0] == FITTING
    assert found[1::2] == [{"id": 2}] * len(UNFIT)
    assert found[2::2] == [
        {"value_text": value.decode("utf-8", "backslashreplace")} for value, _ in UNFIT
    ]


def test_given_schema_decides_the_types_of_json(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    schema = {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "price", "type": "double"},
            {"name": "quantity", "type": ["null", "int"]},
        ],
    }
    given = options(schemas={None: schema})
    append(data, {"price": 1, "quantity": 2})
    lake.export(data, TOPIC, target(kind, tmp_path), given)
    append(data, {"price": 1.5, "new": "x"})
    lake.export(data, TOPIC, target(kind, tmp_path), given)
    assert types(kind, tmp_path) == {
        "price": "double",
        "quantity": "int32",
        "new": "string",
    }
    append(data, {"quantity": 1 << 31})
    with pytest.raises(RecordRefusedError, match="field 'quantity'"):
        lake.export(data, TOPIC, target(kind, tmp_path), given)
    other = {**schema, "fields": [{"name": "price", "type": "string"}]}
    with pytest.raises(InvalidConfigError, match=r"does not fit the table.*'price'"):
        lake.export(data, TOPIC, target(kind, tmp_path), options(schemas={None: other}))


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
)
OBJECTS = st.recursive(
    st.none() | SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abAB"), inner, max_size=3)
    ),
    max_leaves=6,
)
VALUES = st.lists(
    st.dictionaries(st.sampled_from(["a", "b", "c", "A", "key"]), OBJECTS, max_size=3),
    max_size=12,
)


def without_unknown(value: Any) -> Any:
    """The value without the parts that have no column: nulls, empty objects and empty lists."""
    if isinstance(value, dict):
        kept = {name: without_unknown(entry) for name, entry in value.items()}
        return {
            name: entry for name, entry in kept.items() if entry is not None
        } or None
    if isinstance(value, list):
        return (
            [without_unknown(entry) for entry in value]
            if any(map(is_known, value))
            else None
        )
    return value


def is_known(value: Any) -> bool:
    return without_unknown(value) is not None


@given(st.lists(VALUES, max_size=4))
def test_each_json_value_is_stored_exactly_or_as_text(commits: list[Any]) -> None:
    """Whatever the values are, and wherever a commit ends: no row is lost, and a row has
    either all of its fields with equal values, or its text.
    """
    reserved = frozenset({"key", "value_text"})
    columns = ValueColumns(JSON, reserved, pa.struct([]), "text")
    for values in commits:
        texts = [json.dumps(value).encode() for value in values]
        half = len(texts) // 2
        columns.add(texts[:half], range(half), "orders-0")
        columns.add(texts[half:], range(half, len(texts)), "orders-0")
        found = pa.table(columns.finish_columns()).to_pylist()
        assert len(found) == len(values)
        for text, value, row in zip(texts, values, found, strict=True):
            kept = row.pop("value_text")
            if kept is not None:
                assert kept == text.decode()
                assert without_unknown(row) is None
                continue
            wanted = {column_of(name, reserved): entry for name, entry in value.items()}
            assert without_unknown(row) == without_unknown(wanted)


@given(
    st.lists(
        st.sampled_from(["a", "key", "value_key", "value_value_key", "value_a", "day"]),
        unique=True,
    )
)
def test_columns_name_their_fields(names: list[str]) -> None:
    reserved = frozenset({"key", "day"})
    columns = [column_of(name, reserved) for name in names]
    assert len(set(columns)) == len(columns)
    schema = pa.schema(
        [("key", pa.binary()), *((column, pa.int64()) for column in columns)]
    )
    assert [field.name for field in fields_of(schema, reserved).fields] == names


ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "quantity", "type": "int"},
        {"name": "weight", "type": "float"},
        {"name": "photo", "type": ["null", "bytes"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "due", "type": {"type": "int", "logicalType": "date"}},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "uuid", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "size", "type": {"type": "enum", "name": "Size", "symbols": ["S", "L"]}},
        {"name": "counts", "type": {"type": "map", "values": "double"}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "to", "type": {"type": "record", "name": "To", "fields": [{"name": "city", "type": "string"}]}},
        {"name": "second", "type": "To"},
        {"name": "offset", "type": "int"},
    ],
}  # fmt: skip
WIDER = {
    **ORDER,
    "fields": [*ORDER["fields"], {"name": "note", "type": ["null", "string"]}],
}
ROW: dict[str, Any] = {
    "id": 1,
    "quantity": 2,
    "weight": 1.5,
    "photo": b"\xff",
    "at": datetime.datetime(2026, 1, 2, 3, 4, 5, 6000, tzinfo=datetime.UTC),
    "due": datetime.date(2026, 1, 2),
    "clock": 7,
    "price": decimal.Decimal("12.34"),
    "uuid": "8a1d3f6e-7c1f-4f43-9d1c-1f4d1b1e2a3b",
    "size": "L",
    "counts": {"a": 1.5},
    "tags": ["x"],
    "to": {"city": "Ulm"},
    "second": {"city": "Aue"},
    "offset": 9,
}
STORED = {
    **{name: value for name, value in ROW.items() if name != "offset"},
    "counts": [("a", 1.5)],
    "value_offset": 9,
}


def avro(schema: Any, row: Any, number: int | None = None) -> bytes:
    stream = io.BytesIO()
    if number is not None:
        stream.write(b"\0" + number.to_bytes(4, "big"))
    plain = json.loads(
        json.dumps(schema).replace('"logicalType": "time-millis"', '"x": 0')
    )
    fastavro.schemaless_writer(stream, fastavro.parse_schema(plain), row)
    return stream.getvalue()


def test_avro_fields_are_columns(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    append(data, avro(ORDER, ROW), None)
    given = options("avro", schemas={None: ORDER})
    lake.export(data, TOPIC, target(kind, tmp_path), given)
    assert fields(kind, tmp_path) == [STORED, {}]
    append(data, avro(WIDER, {**ROW, "note": "n"}))
    with pytest.raises(RecordRefusedError, match=r"offset 2: .* bytes are left"):
        lake.export(data, TOPIC, target(kind, tmp_path), given)
    wider = options("avro", schemas={None: WIDER})
    lake.export(data, TOPIC, target(kind, tmp_path), wider)
    assert fields(kind, tmp_path) == [STORED, {}, {**STORED, "note": "n"}]


def test_avro_with_ids_of_a_registry(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    append(data, avro(ORDER, ROW, 7), avro(WIDER, {**ROW, "note": "n"}, 9))
    given = options("avro", schemas={7: ORDER, 9: WIDER})
    lake.export(data, TOPIC, target(kind, tmp_path), given)
    assert fields(kind, tmp_path) == [STORED, {**STORED, "note": "n"}]
    append(data, avro(ORDER, ROW, 8))
    with pytest.raises(RecordRefusedError, match=r"offset 2: .*--schema 8=FILE"):
        lake.export(data, TOPIC, target(kind, tmp_path), given)


@pytest.mark.parametrize(
    "value", [b"", b"\0\0\0\0", b"\1\0\0\0\7x", b"\0\0\0\0\7", b"\xff" * 40]
)
def test_damaged_avro_is_kept_as_text(
    data: logcore.LogDir, tmp_path: Path, value: bytes
) -> None:
    append(data, avro(ORDER, ROW, 7), value)
    given = options("avro", "text", schemas={7: ORDER})
    lake.export(data, TOPIC, target("delta", tmp_path), given)
    text = value.decode("utf-8", "backslashreplace")
    assert fields("delta", tmp_path) == [STORED, {"value_text": text}]


RECURSIVE = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "next", "type": ["null", "R"]}],
}


@pytest.mark.parametrize(
    ("schemas", "reason"),
    [
        ({}, "one schema"),
        ({None: ORDER, 1: ORDER}, "one schema"),
        ({None: "string"}, "not a record"),
        ({None: {"type": "record"}}, "invalid"),
        ({None: RECURSIVE}, "contains itself"),
        ({None: {"type": "record", "name": "R", "fields": [{"name": "u", "type": ["int", "string"]}]}}, "the union"),
        ({None: {"type": "record", "name": "R", "fields": [{"name": "n", "type": "null"}]}}, "is null"),
    ],
)  # fmt: skip
def test_avro_schema_without_columns_is_refused(
    data: logcore.LogDir, tmp_path: Path, schemas: Any, reason: str
) -> None:
    with pytest.raises(InvalidConfigError, match=reason):
        lake.export(
            data, TOPIC, target("delta", tmp_path), options("avro", schemas=schemas)
        )
    assert not (tmp_path / "orders").exists()


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"value": "xml"}, "value"),
        ({"key": "json"}, "key"),
        ({"on_error": "skip"}, "on_error"),
        ({"on_error": "text"}, "values as columns"),
        ({"partition_by": "month"}, "partition_by"),
        ({"partition_by": "header."}, "partition_by"),
    ],
)
def test_unknown_layout_is_refused(
    data: logcore.LogDir, tmp_path: Path, layout: Any, reason: str
) -> None:
    given = lake.ExportOptions(layout=lake.TableLayout(**layout))
    with pytest.raises(InvalidConfigError, match=reason):
        lake.export(data, TOPIC, target("delta", tmp_path), given)


def test_schema_without_columns_of_values_is_refused(
    data: logcore.LogDir, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfigError, match="values as columns"):
        lake.export(
            data,
            TOPIC,
            target("delta", tmp_path),
            lake.ExportOptions(schemas={None: ORDER}),
        )


def test_table_of_another_value_format_is_refused(
    data: logcore.LogDir, tmp_path: Path, kind: str
) -> None:
    append(data, {"id": 1})
    lake.export(data, TOPIC, target(kind, tmp_path), options())
    with pytest.raises(
        LakeTableError, match="expected value 'bytes', found value 'json'"
    ):
        lake.export(data, TOPIC, target(kind, tmp_path))


def test_misfit_names_the_types() -> None:
    error = TypeMismatch("no", "a.b", "int64", "string")
    assert (error.path, error.expected, error.found) == ("a.b", "int64", "string")
