"""A log as a sequence: iteration, an offset or a range in brackets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.cleaner import clean
from logcore.errors import InvalidConfigError, OffsetOutOfRangeError


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        for number in range(10):
            log.append(b"%d" % number)
        yield log


def numbers(records: Any) -> list[int]:
    return [int(record.value) for record in records]


def test_log_is_iterated_and_indexed_by_offset(log: logcore.Log) -> None:
    assert numbers(log) == list(range(10))
    assert log[5].value == b"5" and log[-1].value == b"9"
    log.delete_records(3)
    assert numbers(log) == list(range(3, 10))
    for offset in (2, 10, -8, 10**30):
        with pytest.raises(OffsetOutOfRangeError):
            _ = log[offset]


@pytest.mark.parametrize(
    "bounds",
    [
        slice(None),
        slice(2, 5),
        slice(-3, None),
        slice(None, -8),
        slice(8, 99),
        slice(5, 5),
    ],
)
def test_slice_has_the_records_that_a_list_would_have(
    log: logcore.Log, bounds: slice
) -> None:
    assert numbers(log[bounds]) == list(range(10))[bounds]
    log.delete_records(3)
    assert numbers(log[bounds]) == [
        number for number in list(range(10))[bounds] if number >= 3
    ]


def test_slice_with_a_step_is_refused(log: logcore.Log) -> None:
    with pytest.raises(InvalidConfigError, match="no step"):
        _ = log[::2]


def test_index_in_a_compacted_gap_raises_an_error_with_its_offset(
    tmp_path: Path,
) -> None:
    config = {"cleanup.policy": "compact"}
    with logcore.open(tmp_path / "t-0", create=True, config=config) as log:
        for value in (b"1", b"2", b"3"):
            log.append(value, key=b"a")
        log.roll()
        clean(log, force=True)
        with pytest.raises(OffsetOutOfRangeError, match="get\\(\\) returns the next"):
            _ = log[0]
        assert numbers(log[0:3]) == [3]
