"""Appends that expect the last offset of a key, and the history of a key."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import aio
from logcore.cleaner import clean
from logcore.errors import InvalidConfigError, OffsetConflictError

CONFIG: dict[str, Any] = {"segment.bytes": 2000, "retention.ms": -1}


def values(records: Any) -> list[bytes | None]:
    return [record.value for record in records]


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with logcore.open(tmp_path / "t-0", create=True, config=CONFIG) as log:
        yield log


def test_append_expects_the_last_offset_of_its_key(log: logcore.Log) -> None:
    first = log.append(b"1", key=b"a", expected={b"a": -1}).offset
    log.append(b"x", key=b"b")
    second = log.append(b"2", key=b"a", expected={b"a": first}).offset
    for stale in (-1, first, second + 1):
        with pytest.raises(OffsetConflictError) as caught:
            log.append(b"3", key=b"a", expected={b"a": stale})
        assert (caught.value.expected, caught.value.found) == (stale, second)
    assert log.log_end_offset == 3
    assert values(log.history(b"a")) == [b"1", b"2"]
    assert values(log.history(bytearray(b"a"), start=1)) == [b"2"]
    assert values(log.history(b"a", end=second)) == [b"1"]
    assert values(log.history(b"missing")) == []


def test_append_many_and_columns_expect_several_keys(log: logcore.Log) -> None:
    log.append_many([(b"a", b"1"), (b"b", b"2")], expected={b"a": -1, b"b": -1})
    with pytest.raises(OffsetConflictError, match="key b'b'"):
        log.append_many([(b"a", b"3")], expected={b"a": 0, b"b": 0})
    keys = (b"ab", [0, 1, 2])
    log.append_columns(keys=keys, values=keys, expected={b"a": 0, b"b": 1})
    with pytest.raises(OffsetConflictError):
        log.append_columns(keys=keys, values=keys, expected={b"a": 0})
    assert [record.offset for record in log.history(b"b")] == [1, 3]


@pytest.mark.parametrize(
    "expected", [{"a": 1}, b"a", {b"a": "1"}, {b"a": -2}, {b"a": True}, {5: 1}, 7]
)
def test_invalid_expectation_is_refused(log: logcore.Log, expected: Any) -> None:
    with pytest.raises(InvalidConfigError, match="mapping of keys"):
        log.append(b"1", key=b"a", expected=expected)
    assert log.log_end_offset == 0


def test_unrelated_keys_never_conflict(log: logcore.Log) -> None:
    """With `expected_offset`, 79 of these 320 appends conflicted."""
    failures: list[BaseException] = []

    def work(key: bytes) -> None:
        last = -1
        try:
            for number in range(80):
                last = log.append(b"%d" % number, key=key, expected={key: last}).offset
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(b"k%d" % key_number,))
        for key_number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for key_number in range(4):
        assert values(log.history(b"k%d" % key_number)) == [
            b"%d" % number for number in range(80)
        ]


def test_index_agrees_with_a_scan_after_any_change(tmp_path: Path) -> None:
    rng = random.Random(5)
    config = {**CONFIG, "cleanup.policy": "compact", "delete.retention.ms": 0}
    path = tmp_path / "t-0"
    log = logcore.open(path, create=True, config=config, durability="os")
    keys = [b"k%d" % number for number in range(5)]
    for step in range(500):
        fraction = rng.random()
        if fraction < 0.85:
            value = b"%d" % step * 20
            log.append(rng.choice((value, value, None)), key=rng.choice(keys))
        elif fraction < 0.9:
            log.truncate(rng.randint(log.log_start_offset, log.log_end_offset))
        elif fraction < 0.93:
            log.delete_records(
                rng.randint(log.log_start_offset, log.log_end_offset) // 2
                + log.log_start_offset // 2
            )
        elif fraction < 0.97:
            # The second round removes tombstones.
            for _ in range(2):
                log.roll()
                clean(log, force=True)
        else:
            log.close()
            log = logcore.open(path, config=config, durability="os")
        # The index is used after several changes.
        if rng.random() < 0.5:
            continue
        key = rng.choice(keys)
        history = [
            record for record in log.read(log.log_start_offset) if record.key == key
        ]
        assert list(log.history(key)) == history, step
        last = history[-1].offset if history else -1
        with pytest.raises(OffsetConflictError) as caught:
            log.append(b"x", key=key, expected={key: last + 1})
        assert caught.value.found == last
        log.append(b"y" * 20, key=key, expected={key: last})
    log.close()


def test_tombstone_that_compaction_removed_counts_as_no_record(tmp_path: Path) -> None:
    """The history of the key is empty, so that the next append expects no record."""
    config = {"cleanup.policy": "compact", "delete.retention.ms": 0}
    with logcore.open(tmp_path / "t-0", create=True, config=config) as log:
        log.append(b"1", key=b"a")
        log.append(None, key=b"a", expected={b"a": 0})
        while any(record.key == b"a" for record in log.read(log.log_start_offset)):
            log.append(b"1", key=b"b")
            log.roll()
            clean(log, force=True)
        assert list(log.history(b"a")) == []
        log.append(b"2", key=b"a", expected={b"a": -1})


def test_expected_offset_may_be_of_an_unsynced_record(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append(b"1", key=b"a", durability="os")
        assert log.high_watermark == 0
        with pytest.raises(OffsetConflictError):
            log.append(b"2", key=b"a", expected={b"a": -1})
        log.append(b"2", key=b"a", expected={b"a": 0})
        assert values(log.history(b"a")) == [b"1", b"2"]


def _append_after_each_conflict(path: Path, barrier: Any) -> None:
    with logcore.open(path, shared=True) as log:
        barrier.wait()
        appended = 0
        while appended < 30:
            events = list(log.history(b"a"))
            last = events[-1].offset if events else -1
            try:
                log.append(b"%d" % len(events), key=b"a", expected={b"a": last})
            except OffsetConflictError:
                continue
            appended += 1


@pytest.mark.long
def test_appends_of_processes_that_share_a_log_conflict(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    context = multiprocessing.get_context("spawn")
    with logcore.open(path, create=True, shared=True):
        barrier = context.Barrier(2)
        workers = [
            context.Process(target=_append_after_each_conflict, args=(path, barrier))
            for _ in range(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    with logcore.open(path, read_only=True) as log:
        assert values(log.history(b"a")) == [b"%d" % number for number in range(60)]


def test_topics_expect_keys_of_one_partition(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as data:
        data.create_topic("t", partitions=4)
        keys = [b"k%d" % number for number in range(20)]
        for key in keys:
            data.append("t", b"1", key=key, expected={key: -1})
            with pytest.raises(OffsetConflictError):
                data.append("t", b"1", key=key, expected={key: -1})
        other = next(
            key
            for key in keys
            if data.choose_partition("t", key, None)
            != data.choose_partition("t", keys[0], None)
        )
        with pytest.raises(InvalidConfigError, match="another partition"):
            data.append("t", b"2", key=keys[0], expected={other: -1})
        assert values(data.history("t", keys[3])) == [b"1"]


def test_asyncio_logs_expect_keys(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_dir(tmp_path / "data", create=True) as data:
            await data.create_topic("t", 2)
            results = await asyncio.gather(
                *(
                    data.append("t", b"%d" % number, key=b"a", expected={b"a": -1})
                    for number in range(5)
                ),
                return_exceptions=True,
            )
            stored = [
                result for result in results if isinstance(result, logcore.Receipt)
            ]
            assert len(stored) == 1
            assert len(await data.history("t", b"a")) == 1
            log = await data.partition("t", data.sync.choose_partition("t", b"a", None))
            await log.append_many([(b"a", b"x")], expected={b"a": stored[0].offset})
            assert len(await log.history(b"a")) == 2

    asyncio.run(main())
