"""Facts about segments, compared with the facts of the open log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import logcore
from logcore.cli.commands import main
from logcore.config import LogConfig
from logcore.fs import OS
from logcore.inspect.segmentmap import PartitionSizes, segment_map
from logcore.partition.aborted_transactions import walked
from logcore.reader import segments_between

NOW_MS = 1_700_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a partition with several segments, and one record per second."""
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", 1, {"segment.bytes": 20_000})
        log = logdir.partition("t", 0)
        for batch in range(60):
            time_ms = NOW_MS + batch * 10_000
            log.append_many(
                [(b"k%d" % at, b"v" * 90, (), time_ms + at * 1_000) for at in range(10)]
            )
    return tmp_path / "data" / "t-0"


def test_segments_have_the_offsets_times_and_bytes_of_the_log(path: Path) -> None:
    found = segment_map(path)
    with logcore.open(path, read_only=True) as log:
        batches = list(log.batches(0))
        segments = segments_between(log, 0, log.log_end_offset)
        assert [segment.base_offset for segment in found.segments] == [
            segment.base_offset for segment in segments
        ]
        assert [segment.size_bytes for segment in found.segments] == [
            segment.size_bytes for segment in segments
        ]
    assert found.is_complete
    assert not found.is_damaged
    assert (found.topic, found.partition) == ("t", 0)
    assert (found.log_start_offset, found.end_offset) == (0, 600)
    assert sum(segment.records for segment in found.segments) == 600
    assert sum(segment.batches for segment in found.segments) == len(batches)
    assert found.segments[0].first_timestamp_ms == NOW_MS
    assert found.segments[-1].max_timestamp_ms == batches[-1].max_timestamp
    ends = [segment.end_offset for segment in found.segments]
    assert ends == [segment.base_offset for segment in found.segments[1:]] + [600]
    assert [segment.is_active for segment in found.segments[-2:]] == [False, True]


def test_outline_without_time_has_the_same_ends(path: Path) -> None:
    whole = segment_map(path)
    outline = segment_map(path, is_over=lambda: True)
    assert not outline.is_complete
    for segment, other in zip(whole.segments, outline.segments, strict=True):
        assert segment.end_offset == other.end_offset
        assert segment.codec_bytes == other.codec_bytes
        assert segment.first_timestamp_ms == other.first_timestamp_ms
        if not segment.is_active:  # its time index is not written yet
            assert segment.max_timestamp_ms == other.max_timestamp_ms
        assert other.batches == 0


@pytest.mark.parametrize("seconds", [0, 250, 300, 599, 1_000])
def test_retention_deletes_the_forecast_segments(path: Path, seconds: int) -> None:
    settings = {"retention.ms": 300_000, "segment.bytes": 20_000}
    now_ms = NOW_MS + seconds * 1_000
    found = segment_map(path, config=LogConfig.parse(settings), now_ms=now_ms)
    with logcore.open(path, config=settings) as log:
        log.retain(now_ms)
        start = log.log_start_offset
    due = [segment for segment in found.segments if segment.is_expired]
    assert (due[-1].end_offset if due else 0) == start
    assert found.retention.due_segments == len(due)
    assert found.retention.due_bytes == sum(segment.size_bytes for segment in due)
    remaining = [segment for segment in found.segments if not segment.is_expired]
    if remaining:
        assert found.retention.next_ms == remaining[0].max_timestamp_ms + 300_000


def test_compacted_partition_shows_its_dirty_part(tmp_path: Path) -> None:
    from logcore.cleaner import clean

    config = {"cleanup.policy": "compact", "segment.bytes": 5_000}
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", 1, config)
        log = logdir.partition("t", 0)
        log.append_many([(b"k%d" % (at % 7), b"v" * 100) for at in range(500)])
        clean(log, force=True)
        log.append_many([(b"k%d" % (at % 7), b"v" * 100) for at in range(500)])
        found = segment_map(log.path, config=log.config)
    assert 0 < found.cleaned_to < 1_000
    dirty = [segment.base_offset for segment in found.segments if segment.is_dirty]
    assert dirty[0] == found.cleaned_to
    assert found.segments[-1].base_offset not in dirty
    assert found.dirty_bytes > 0
    assert not found.is_damaged  # the gaps of a compaction are not losses


def test_open_transactions_are_those_of_all_batches(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", 1, {"segment.bytes": 3_000})
        log = logdir.partition("t", 0)
        producers = [logdir.producer(transactional_id=f"p{n}") for n in range(3)]
        for number, producer in enumerate(producers):
            producer.init_transactions()
            for end in range(6):
                producer.begin_transaction()
                for _ in range(9):
                    producer.send("t", b"v" * 100)
                producer.flush()
                if end < 5 or number == 2:
                    (producer.abort_transaction, producer.commit_transaction)[end % 2]()
        found = segment_map(log.path)
        expected = walked(segments_between(log, 0, log.log_end_offset)).open
        assert found.open_transactions == expected
        assert len(expected) == 2
        assert min(expected.values()) == log.last_stable_offset
        snapshots = list(Path(log.path).glob("*.snapshot"))
        assert snapshots
        for snapshot in snapshots:  # a damaged snapshot is ignored
            snapshot.write_bytes(b"?")
        assert segment_map(log.path).open_transactions == expected
        for producer in producers:
            producer.close()


def test_codecs_are_counted_by_bytes(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append_many([(None, b"v" * 1_000)] * 10)
        for codec in ("gzip", "zstd"):
            log.reconfigure({"compression.type": codec})
            log.append_many([(None, b"v" * 1_000)] * 10)
        sizes: dict[str, int] = {}
        for batch in log.batches(0):
            sizes[batch.codec_name] = sizes.get(batch.codec_name, 0) + batch.size_bytes
        assert segment_map(log.path).segments[0].codec_bytes == sizes


def test_sizes_follow_appends_rolls_and_deletions(path: Path) -> None:
    sizes = PartitionSizes()
    with logcore.open(path, config={"segment.bytes": 20_000}) as log:
        for _ in range(3):
            found = sizes.read(str(path), 0)
            assert found.end_offset == log.log_end_offset
            assert found.size_bytes == log.statistics().size_bytes
            assert found.segments == log.statistics().segments
            log.append_many([(b"k", b"v" * 100)] * 300)
        log.delete_records(400)
        found = sizes.read(str(path), 400)
        assert found.log_start_offset == 400
    assert sizes.read(str(path), 400) == found


def test_directory_without_files_has_no_segments(tmp_path: Path) -> None:
    (tmp_path / "t-0").mkdir()
    found = segment_map(tmp_path / "t-0")
    assert found.segments == ()
    assert not found.is_damaged
    assert PartitionSizes(OS).read(str(tmp_path / "t-0"), 5).end_offset == 5
    with pytest.raises(logcore.LogNotFoundError):
        segment_map(tmp_path / "missing-0")


def test_info_prints_segments(path: Path) -> None:
    result = CliRunner().invoke(main, ["info", "--segments", str(path.parent)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["base_offset"] for row in rows] == [
        segment.base_offset for segment in segment_map(path).segments
    ]
    assert rows[0]["partition"] == "t-0"
    assert CliRunner().invoke(main, ["info", "--segments"]).exit_code == 2
    shown = CliRunner().invoke(main, ["info", "--segments", "--json", str(path)])
    assert shown.output == result.output
