"""The estimate of a compaction, compared with the report of the compaction."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import logcore
from logcore.cleaner import clean
from logcore.compaction_estimate import estimate_compaction
from logcore.errors import InvalidConfigError
from logcore.log import Log

CONFIG = {"cleanup.policy": "compact", "segment.bytes": 4_000}


def fill(log: Log, count: int, seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(count // 20):
        log.append_many(
            [
                (b"k%d" % choice.randrange(50), b"v" * choice.randrange(90))
                for _ in range(20)
            ]
        )


@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
def test_estimate_equals_the_next_round(tmp_path: Path, codec: str) -> None:
    config = {**CONFIG, "compression.type": codec}
    cleaned_to = 0
    with logcore.open(tmp_path / "t-0", create=True, config=config) as log:
        for seed in range(3):
            fill(log, 1_000, seed)
            with logcore.open(
                tmp_path / "t-0", read_only=True, config=config
            ) as reader:
                found = estimate_compaction(
                    reader, config=log.config, cleaned_to=cleaned_to, pass_ms=60_000
                )
            report = clean(log, force=True)
            assert report is not None
            cleaned_to = report.end_offset
            assert found.is_complete
            assert found.end_offset == report.end_offset
            assert found.records == report.records_read
            assert found.records - found.removed_records == report.records_kept
            assert 0 < found.removed_share < 1
            again = estimate_compaction(
                log, config=log.config, cleaned_to=cleaned_to, pass_ms=60_000
            )
            assert again.removed_records == again.removed_bytes == 0


def test_limits_of_time_and_memory_end_the_estimate_early(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True, config=CONFIG) as log:
        fill(log, 1_000, 4)
        whole = estimate_compaction(
            log, config=log.config, cleaned_to=0, pass_ms=60_000
        )
        short = estimate_compaction(log, config=log.config, cleaned_to=0, pass_ms=0)
        small = estimate_compaction(
            log, config=log.config, cleaned_to=0, pass_ms=60_000, memory_bytes=24 * 40
        )
    for found in (short, small):
        assert not found.is_complete
        assert 0 < found.end_offset < whole.end_offset
        assert found.records == found.end_offset
    assert whole.is_complete


def test_empty_log_and_a_log_with_one_segment(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True, config=CONFIG) as log:
        for count in (0, 20):
            fill(log, count, 1)
            found = estimate_compaction(
                log, config=log.config, cleaned_to=0, pass_ms=1_000
            )
            assert (found.records, found.end_offset, found.is_complete) == (0, 0, True)
            assert found.removed_share == 0


def test_log_that_is_not_compacted_is_refused(tmp_path: Path) -> None:
    with (
        logcore.open(tmp_path / "t-0", create=True) as log,
        pytest.raises(InvalidConfigError),
    ):
        estimate_compaction(log, config=log.config, cleaned_to=0, pass_ms=1_000)
