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
    rng = random.Random(seed)
    for _ in range(count // 20):
        log.append_many(
            [(b"k%d" % rng.randrange(50), b"v" * rng.randrange(90)) for _ in range(20)]
        )


@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
def test_estimate_equals_the_next_compaction(tmp_path: Path, codec: str) -> None:
    config = {**CONFIG, "compression.type": codec}
    cleaned_to = 0
    with logcore.open(tmp_path / "t-0", create=True, config=config) as log:
        for seed in range(3):
            fill(log, 1_000, seed)
            with logcore.open(
                tmp_path / "t-0", read_only=True, config=config
            ) as reader:
                estimate = estimate_compaction(
                    reader, config=log.config, cleaned_to=cleaned_to, pass_ms=60_000
                )
            report = clean(log, force=True)
            assert report is not None
            cleaned_to = report.end_offset
            assert estimate.is_complete
            assert estimate.end_offset == report.end_offset
            assert estimate.records == report.records_read
            assert estimate.records - estimate.removed_records == report.records_kept
            assert 0 < estimate.removed_share < 1
            next_estimate = estimate_compaction(
                log, config=log.config, cleaned_to=cleaned_to, pass_ms=60_000
            )
            assert next_estimate.removed_records == next_estimate.removed_bytes == 0


def test_limits_of_time_and_memory_end_the_estimate_early(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True, config=CONFIG) as log:
        fill(log, 1_000, 4)
        unlimited = estimate_compaction(
            log, config=log.config, cleaned_to=0, pass_ms=60_000
        )
        time_limited = estimate_compaction(
            log, config=log.config, cleaned_to=0, pass_ms=0
        )
        memory_limited = estimate_compaction(
            log, config=log.config, cleaned_to=0, pass_ms=60_000, memory_bytes=24 * 40
        )
    for limited in (time_limited, memory_limited):
        assert not limited.is_complete
        assert 0 < limited.end_offset < unlimited.end_offset
        assert limited.records == limited.end_offset
    assert unlimited.is_complete


def test_estimate_of_a_log_without_sealed_records_is_empty(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True, config=CONFIG) as log:
        for count in (0, 20):
            fill(log, count, 1)
            estimate = estimate_compaction(
                log, config=log.config, cleaned_to=0, pass_ms=1_000
            )
            assert (estimate.records, estimate.end_offset, estimate.is_complete) == (
                0,
                0,
                True,
            )
            assert estimate.removed_share == 0


def test_estimate_of_a_log_without_compaction_is_refused(tmp_path: Path) -> None:
    with (
        logcore.open(tmp_path / "t-0", create=True) as log,
        pytest.raises(InvalidConfigError),
    ):
        estimate_compaction(log, config=log.config, cleaned_to=0, pass_ms=1_000)
