"""Live tables: always equal to a dict that has processed every record."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.cleaner import clean
from logcore.recordbatch import encode

COMPACT: dict[str, Any] = {"cleanup.policy": "compact", "segment.bytes": 400}


@pytest.mark.parametrize("seed", range(20))
def test_table_equals_a_dict_of_the_log(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with logcore.open(
        tmp_path / "t-0", create=True, config=COMPACT, durability="os"
    ) as log:
        table = log.table()
        second_table = log.table()
        rows: list[tuple[bytes, bytes | None]] = []
        for _ in range(60):
            action = rng.choice(["append"] * 6 + ["compact", "truncate", "late"])
            if action == "append":
                appended = [
                    (
                        b"k%d" % rng.randrange(9),
                        rng.choice([None, b"%d" % rng.randrange(99)]),
                    )
                    for _ in range(5)
                ]
                log.append_many(appended)
                rows += appended
            elif action == "compact":
                log.roll()
                clean(log, force=True)
            elif action == "truncate":
                end = rng.randrange(max(0, len(rows) - 6), len(rows) + 1)
                # Below the active segment, compaction may have removed records of
                # `rows`.
                if end > log._state.segments[-1].base_offset:
                    log.truncate(end)
                    del rows[end:]
            else:
                second_table = log.table()
            expected = {
                key: value for key, value in dict(rows).items() if value is not None
            }
            assert table.snapshot() == expected == dict(second_table)
            assert len(table) == len(expected) and set(table) == set(expected)
            assert table.offset == len(rows)
            with pytest.raises(KeyError):
                table[b"none"]


def test_table_of_a_log_that_another_process_writes(tmp_path: Path) -> None:
    with (
        logcore.open(tmp_path / "t-0", create=True) as log,
        logcore.open(tmp_path / "t-0", read_only=True) as reader,
    ):
        table = reader.table()
        assert dict(table) == {}
        log.append(b"1", key=b"a")
        assert table[b"a"] == b"1" and b"b" not in table
        log.append(None, key=b"a")
        log.append(b"no key")
        assert len(table) == 0


def test_table_is_rebuilt_after_unread_records_were_deleted(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append(b"1", key=b"a")
        table = log.table()
        assert table[b"a"] == b"1"
        log.append(b"2", key=b"b")
        log.append(b"3", key=b"c")
        log.delete_records(2)
        assert dict(table) == {b"c": b"3"}, (
            "the table is rebuilt, because unread records were deleted"
        )


def test_read_committed_table_contains_only_committed_records(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        table = log.table(isolation="read_committed")
        producer: dict[str, Any] = {
            "producer_id": 5,
            "producer_epoch": 0,
            "transactional": True,
        }
        log.append_batch(encode([(b"a", b"1")], base_sequence=0, **producer))
        assert dict(table) == {}
        log.end_transaction(5, 0, commit=True)
        assert dict(table) == {b"a": b"1"}
        log.append_batch(encode([(b"a", b"2")], base_sequence=1, **producer))
        log.end_transaction(5, 0, commit=False)
        log.append(b"3", key=b"b")
        assert dict(table) == {b"a": b"1", b"b": b"3"}


def test_partitions_of_a_topic_form_one_table(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", partitions=3)
        table = logdir.table("t")
        for number in range(30):
            logdir.partition("t", number % 3).append(
                b"%d" % number, key=b"k%d" % number
            )
        assert table[b"k17"] == b"17" and len(table) == 30
        assert sorted(table.items()) == sorted(
            (b"k%d" % number, b"%d" % number) for number in range(30)
        )
        assert table.refresh() == [10, 10, 10]
        with pytest.raises(logcore.TopicNotFoundError):
            logdir.table("other")
