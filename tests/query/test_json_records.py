"""Scan.json(): each bad value has its own error, and headers may be a dict."""

from __future__ import annotations

from pathlib import Path

import pytest

import logcore


def test_bad_values_have_an_error_that_names_the_offset(tmp_path: Path) -> None:
    values = [b'{"a": 1}', b'{"a":', None, b"NaN", b"[" * 100_000, b"\xff", b" [2] "]
    with logcore.open(tmp_path / "t-0", create=True, durability="os") as log:
        log.append_many([(b"k", value) for value in values])
        found = list(log.scan().json())
    assert [row.value for row in found] == [{"a": 1}, None, None, None, None, None, [2]]
    bad = [row.offset for row in found if row.error is not None]
    assert bad == [1, 3, 4, 5]
    for row in found:
        assert (row.topic, row.partition, row.key) == ("t", 0, b"k")
        if row.error is not None:
            assert f"t-0, offset {row.offset}: the value is not JSON" in str(row.error)
            assert isinstance(row.error, logcore.InvalidRecordError)


def test_headers_may_be_a_dict(tmp_path: Path) -> None:
    headers = {"trace": b"1", "none": None}
    with logcore.open_dir(tmp_path, create=True, durability="os") as directory:
        directory.create_topic("t")
        directory.append("t", b"1", headers=headers)
        log = directory.partition("t", 0)
        log.append_many([(None, b"2", headers)])
        with directory.producer() as producer:
            producer.send("t", b"3", headers=headers).result(10)
        assert [dict(record.headers) for record in log] == [headers] * 3
        with pytest.raises(logcore.InvalidRecordError, match="a dict or"):
            log.append(b"4", headers=5)  # type: ignore[arg-type]
        with pytest.raises(logcore.InvalidRecordError, match="must be str"):
            log.append(b"4", headers={b"trace": b"1"})  # type: ignore[dict-item]
