"""Compaction, compared with a model and with Kafka's own output: which records are
kept, which are removed, and when.

The properties have the names of the reliability reference (P36 to P46). The model is a
list of all records ever appended. After each round the log must be the subsequence of
it that section 9 of the storage format describes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.legacy_records import LegacyRecordBatchBuilder

import logcore
from logcore import cleaner
from logcore.cleaner import LogFacts, OffsetMap, SealedFacts, clean, group, plan
from logcore.config import LogConfig
from logcore.fs import OS
from logcore.inspect.verify import verify
from logcore.kernels import Record, layout, plain
from logcore.metadata import checkpoint
from logcore.reader import avoid_mapping
from logcore.recordbatch import RecordBatch, encode, read_batches
from logcore.testing import SimulatedDisk
from support.compacting import COMPACT, T0, compact, open_log, pairs
from support.kernels import KERNELS, needs_compiler
from support.vectors import VECTORS

DAY_MS = 86_400_000
SWAPPED = f"t-0/{0:020d}.log.swap"


def test_compaction_writes_the_same_bytes_as_kafka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition of section 9.6 has producers, transactions and tombstones. Some of
    its batches become empty or are rebuilt.
    """
    monkeypatch.setattr(OS, "now_ms", lambda: T0 + 1000)
    shutil.copytree(
        VECTORS / "partition-compact-before" / "compacted-0", tmp_path / "compacted-0"
    )
    with logcore.open(
        tmp_path / "compacted-0", config={"cleanup.policy": "compact"}
    ) as log:
        report = clean(log, now_ms=T0 + 1000)
    assert report is not None and report.end_offset == 14
    compacted_path = VECTORS / "partition-compact-after" / "compacted-0"
    for name in (
        f"{0:020d}.log",
        f"{0:020d}.txnindex",
        f"{14:020d}.log",
        f"{14:020d}.snapshot",
    ):
        assert (tmp_path / "compacted-0" / name).read_bytes() == (
            compacted_path / name
        ).read_bytes(), name
    assert not (tmp_path / "compacted-0" / f"{12:020d}.log").exists()
    offsets = checkpoint.read_offsets(OS, str(tmp_path), checkpoint.CLEANER)
    assert offsets == {("compacted", 0): 14}


# -- compared with a model -------------------------------------------------------------


@attrs.define
class Written:
    offset: int
    key: bytes
    value: bytes | None
    is_aborted: bool = False


class Model:
    """A log, and every record that was ever appended to it."""

    def __init__(self, seed: int, **config: Any) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk(seed=seed, now_ms=T0)
        self.config = config
        self.log = open_log(self.disk, **config)
        self.written: list[Written] = []
        self.sequences: dict[int, int] = {}
        self.open: dict[int, list[Written]] = {}
        self.cleaned_end = 0

    def rows(self) -> list[tuple[bytes, bytes | None, tuple[()], int]]:
        rng = self.rng
        now_ms = self.disk.now_ms()

        def value() -> bytes | None:
            return rng.choice([None, b"v%d" % rng.randrange(1000), b"x" * 60])

        return [
            (b"k%d" % rng.randrange(6), value(), (), now_ms + number)
            for number in range(rng.randrange(1, 6))
        ]

    def append(
        self, producer_id: int | None = None, transactional: bool = False
    ) -> None:
        if producer_id is None and self.rng.random() < 0.4:
            rows = self.rows()
            first = self.log.append_many(rows).offset
        else:
            rows = self.rows()
            producer_fields = {}
            if producer_id is not None:
                producer_fields = {
                    "producer_id": producer_id,
                    "producer_epoch": 0,
                    "base_sequence": self.sequences.get(producer_id, 0),
                    "transactional": transactional,
                }
                self.sequences[producer_id] = producer_fields["base_sequence"] + len(
                    rows
                )
            codec = self.rng.choice(
                ["uncompressed", "uncompressed", "lz4", "zstd", "gzip"]
            )
            first = self.log.append_batch(
                encode(rows, codec=codec, now_ms=self.disk.now_ms(), **producer_fields)
            ).offset
        written = [
            Written(first + index, row[0], row[1]) for index, row in enumerate(rows)
        ]
        self.written += written
        if transactional:
            assert producer_id is not None
            self.open.setdefault(producer_id, []).extend(written)

    def end(self, producer_id: int, *, commit: bool) -> None:
        self.log.end_transaction(producer_id, 0, commit=commit)
        for written in self.open.pop(producer_id, []):
            written.is_aborted = not commit

    def reopen(self) -> None:
        self.log.close()
        self.log = open_log(self.disk, **self.config)

    def step(self) -> None:
        rng = self.rng
        kind = rng.choices(
            ["append", "idempotent", "transactional", "end", "roll", "wait", "reopen"],
            [6, 3, 4, 4, 2, 1, 1],
        )[0]
        if kind == "append":
            self.append()
        elif kind == "idempotent":
            self.append(rng.randrange(100, 103))
        elif kind == "transactional":
            self.append(rng.randrange(200, 203), transactional=True)
        elif kind == "end":
            self.end(rng.randrange(200, 203), commit=rng.random() < 0.5)
        elif kind == "roll":
            self.log.roll()
        elif kind == "wait":
            self.disk.advance(rng.choice([10, 600, 2000]))
        else:
            self.reopen()

    def visible_records(self, isolation: Any = "read_uncommitted") -> dict[int, Record]:
        records = list(self.log.read(self.log.log_start_offset, isolation=isolation))
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets))
        return {record.offset: record for record in records}

    def final_state(self) -> dict[bytes, bytes | None]:
        """Return the final state that a read_committed consumer sees, without
        tombstones.
        """
        stable = self.log.last_stable_offset
        state = {
            written.key: written.value
            for written in self.written
            if not written.is_aborted and written.offset < stable
        }
        return {key: value for key, value in state.items() if value is not None}

    def check(self) -> None:
        visible_records = self.visible_records()
        by_offset = {written.offset: written for written in self.written}
        # P38: a subsequence with unchanged records
        for offset, record in visible_records.items():
            assert (record.key, record.value) == (
                by_offset[offset].key,
                by_offset[offset].value,
            )
        for written in self.written:  # P37: the head is unchanged
            assert (
                written.offset < self.cleaned_end or written.offset in visible_records
            ), written
        newest: dict[bytes, Written] = {}
        for written in self.written:
            if not written.is_aborted and written.offset < self.cleaned_end:
                newest[written.key] = written
        for written in newest.values():  # P36: the last value of each key survives
            assert written.offset in visible_records or written.value is None, written
        # No superseded record and no aborted record (P42).
        for offset in visible_records:
            written = by_offset[offset]
            assert offset >= self.cleaned_end or (
                newest.get(written.key) is written and not written.is_aborted
            ), written
        committed = {}
        for record in self.visible_records("read_committed").values():
            assert not by_offset[record.offset].is_aborted
            committed[record.key] = record.value
        # P40: the final state of a consumer that reads committed records
        final = {key: value for key, value in committed.items() if value is not None}
        assert final == self.final_state()

    def clean(self) -> None:
        before = (
            self.log.last_stable_offset,
            self.log.log_end_offset,
            self.log.high_watermark,
        )
        report = compact(self.log)
        assert (
            self.log.last_stable_offset,
            self.log.log_end_offset,
            self.log.high_watermark,
        ) == before
        if report is not None:
            assert report.end_offset <= before[0]
            self.cleaned_end = report.end_offset
        self.check()


@pytest.mark.parametrize(
    "seed",
    [
        *range(25),
        *(pytest.param(number, marks=pytest.mark.slow) for number in range(25, 300)),
    ],
)
def test_P36_P37_P38_P40_P42_P43_random_histories_match_the_model(seed: int) -> None:
    model = Model(seed, **({"min.compaction.lag.ms": 500} if seed % 5 == 0 else {}))
    for _ in range(8):
        for _ in range(model.rng.randrange(1, 12)):
            model.step()
        model.clean()
    sequences = dict(model.sequences)
    model.reopen()
    model.check()
    # P43: the last sequence of a producer is known after any number of rounds.
    for producer_id, sequence in sequences.items():
        if producer_id in model.open:
            continue
        batch = {
            "producer_id": producer_id,
            "producer_epoch": 0,
            "transactional": producer_id >= 200,
        }
        with pytest.raises(logcore.OutOfOrderSequenceError):
            model.log.append_batch(
                encode([(b"k", b"v")], base_sequence=sequence + 1, **batch)
            )
        model.log.append_batch(encode([(b"k", b"v")], base_sequence=sequence, **batch))
    model.log.close()
    damaged_files = [
        verdict
        for verdict in verify("t-0", fs=model.disk)
        if verdict.status == "damaged"
    ]
    assert not damaged_files


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_bitmap_and_offset_map_compact_to_the_same_bytes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some records have no key, because they were appended before the topic was
    compacted. Some keys are too long for hashing in a run.
    """

    def rounds() -> list[dict[str, bytes]]:
        rng = random.Random(seed)
        disk = SimulatedDisk(seed=seed, now_ms=T0)
        keys = [None, b"a", b"b", b"c", b"long" * 100]
        files_after_rounds = []
        for _ in range(3):
            with open_log(disk, **{"cleanup.policy": "delete"}) as log:
                for _ in range(rng.randrange(3, 12)):
                    count = rng.randrange(1, 9)
                    chosen = rng.choices(keys[: rng.choice([2, 4, 4, 4, 5])], k=count)
                    log.append_many(
                        [
                            (
                                key,
                                rng.choice([None, b"v%d" % rng.randrange(99)]),
                                (),
                                T0,
                            )
                            for key in chosen
                        ]
                    )
                    if rng.random() < 0.4:
                        log.roll()
            with open_log(disk) as log:
                log.roll()
                clean(log, now_ms=disk.now_ms(), force=True)
            files_after_rounds.append(
                {
                    path: data
                    for path, data in disk.files().items()
                    if path.endswith(".log")
                }
            )
            disk.advance(rng.choice([10, 5000]))
        return files_after_rounds

    with_bits = rounds()
    monkeypatch.setattr(OffsetMap, "put_run", None)
    monkeypatch.setattr(cleaner, "_BITS_SHARE", 1 << 60)
    assert rounds() == with_bits


def test_P44_second_round_changes_nothing() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(50):
            log.append(b"%d" % number, key=b"k%d" % (number % 7))
        assert compact(log) is not None
        before = pairs(log)
        assert compact(log) is None, "there is no new record"
        log.append(b"x", key=b"other")
        compact(log)
        assert pairs(log) == [*before, (50, b"other", b"x")]


def test_P39_tombstone_is_kept_for_its_retention_time() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with open_log(disk) as log:
        log.append(b"v", key=b"a")
        log.append(None, key=b"a")
        log.append(b"w", key=b"b")
        compact(log)
        assert pairs(log) == [(1, b"a", None), (2, b"b", b"w")]
        assert [batch.delete_horizon_ms for batch in log.batches(0)] == [
            T0 + 1000,
            None,
        ]
        disk.advance(999)
        log.append(b"x", key=b"c")
        compact(log)
        assert (1, b"a", None) in pairs(log), (
            "a reader that keeps up may not have read it yet"
        )
        disk.advance(1)
        log.append(b"y", key=b"d")
        compact(log)
        assert [key for _, key, _ in pairs(log)] == [b"b", b"c", b"d"]


def test_P39_tombstone_of_an_old_record_is_kept_for_its_full_time() -> None:
    """The time counts from the first round that processes the tombstone, because a
    reader may be reading the records that it deletes.
    """
    disk = SimulatedDisk(now_ms=T0)
    with open_log(disk) as log:
        log.append(b"v", key=b"a", timestamp_ms=T0 - DAY_MS)
        log.append(None, key=b"a", timestamp_ms=T0 - DAY_MS)
        for number in range(2):
            log.append(b"w", key=b"b%d" % number)
            compact(log)
            assert (1, b"a", None) in pairs(log)
            disk.advance(999)


def test_P39_tombstone_is_removed_in_a_round_over_the_whole_log() -> None:
    """A round over the whole log follows the loss of the cleaner checkpoint."""
    disk = SimulatedDisk(now_ms=T0)
    with open_log(disk) as log:
        log.append_many([(b"a", None, (), T0), (b"b", b"1", (), T0)])
        compact(log)
        assert pairs(log) == [(0, b"a", None), (1, b"b", b"1")]
    disk.unlink(checkpoint.CLEANER)
    disk.advance(1001)
    with open_log(disk) as log:
        report = compact(log)
        assert report is not None and report.first_dirty == 0
        assert pairs(log) == [(1, b"b", b"1")]


def test_P41_marker_outlives_the_data_of_its_transaction() -> None:
    disk = SimulatedDisk(now_ms=T0)
    with open_log(disk) as log:
        log.append_batch(
            encode(
                [(b"a", b"1")],
                producer_id=9,
                producer_epoch=0,
                base_sequence=0,
                transactional=True,
            )
        )
        log.end_transaction(9, 0, commit=False)
        log.append(b"2", key=b"a")

        def kinds() -> list[str]:
            return [
                batch.control_type() if batch.is_control else str(batch.record_count)
                for batch in log.batches(0)
            ]

        compact(log)
        assert kinds()[:2] == ["0", "ABORT"], "the emptied batch is its producer's last"
        disk.advance(DAY_MS)  # the producer expires
        rounds = []
        for number in range(4):
            log.host.writer.producers.forget()
            log.append(b"%d" % number, key=b"n")
            compact(log)
            disk.advance(1000)
            rounds.append("ABORT" in kinds())
        # The first round removes the records of the transaction, the second sets the
        # delete horizon of the marker, and a later round removes the marker.
        assert rounds == [True, True, False, False]


def test_P46_keys_that_resemble_markers_are_ordinary_keys() -> None:
    """A user's key may have the form of a control record's key."""
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(5):
            for key in (b"\0\0\0\0", b"\0\0\0\1", b""):
                log.append(b"%d" % number, key=key)
        compact(log)
        assert pairs(log) == [
            (12, b"\0\0\0\0", b"4"),
            (13, b"\0\0\0\1", b"4"),
            (14, b"", b"4"),
        ]


def test_reader_from_the_start_ends_with_the_final_state() -> None:
    """A round runs while readers have stopped between any two records."""
    disk = SimulatedDisk()
    with open_log(disk, **{"file.delete.delay.ms": 0}) as log:
        for number in range(300):
            log.append(b"%d" % number, key=b"k%d" % (number % 11))
        readers = [log.read(0) for _ in range(12)]
        states: list[dict[Any, Any]] = [{} for _ in readers]
        for turn, (reader, state) in enumerate(zip(readers, states, strict=True)):
            for _ in range(turn * 20):
                record = next(reader)
                state[record.key] = record.value
        compact(log)
        log.tick()
        for reader, state in zip(readers, states, strict=True):
            for record in reader:
                state[record.key] = record.value
            assert state == {
                b"k%d" % (number % 11): b"%d" % number for number in range(300)
            }


def test_reader_of_another_log_object_continues_across_a_compaction(
    tmp_path: Path,
) -> None:
    with logcore.open(
        tmp_path / "t-0", create=True, config=COMPACT, durability="os"
    ) as log:
        for number in range(200):
            log.append(b"%d" % number, key=b"k%d" % (number % 5))
        log.roll()
        with logcore.open(tmp_path / "t-0", read_only=True) as reader:
            stream = reader.read(0)
            read_offsets = [next(stream).offset for _ in range(3)]
            clean(log, force=True)
            # The stream may read old files, new files, and files that will be deleted
            # soon.
            later_records = list(stream)
            read_offsets += [record.offset for record in later_records]
            assert read_offsets == sorted(set(read_offsets))
            assert {record.key: record.value for record in later_records} == {
                b"k%d" % number: b"%d" % (195 + number) for number in range(5)
            }
            reader.refresh()
            assert [record.offset for record in reader.read(0)] == [
                195,
                196,
                197,
                198,
                199,
            ]
        assert [record.offset for record in log.read(0)] == [195, 196, 197, 198, 199]


@pytest.mark.parametrize(
    "access", ["read", "committed", "scan", "batches", "stored", "time", "get", "pread"]
)
def test_reader_without_open_files_reads_merged_segments(
    tmp_path: Path, access: str
) -> None:
    """The reader has listed two segments. When it opens the first segment, the file
    contains the records of both segments.
    """
    config = {**COMPACT, "segment.bytes": 8000}
    with logcore.open(
        tmp_path / "t-0", create=True, config=config, durability="os"
    ) as log:
        for number in range(40):
            log.append(
                b"%d" % number * 20,
                key=b"k%d" % (number % 30),
                timestamp_ms=T0 + number,
            )
            if number % 10 == 9:
                log.roll()
        with logcore.open(tmp_path / "t-0", read_only=True) as reader:
            assert len(reader._state.segments) == 5
            clean(log, force=True)
            assert len(log._state.segments) == 2
            if access in ("read", "committed"):
                isolation: Any = (
                    "read_committed" if access == "committed" else "read_uncommitted"
                )
                offsets = [
                    record.offset for record in reader.read(0, isolation=isolation)
                ]
            elif access == "scan":
                offsets = [
                    offset
                    for columns in reader.scan()
                    for offset in columns.offsets.tolist()
                ]
            elif access == "batches":
                offsets = [batch.base_offset for batch in reader.batches(0)]
            elif access == "stored":
                raw = b"".join(reader.stored(0, max_bytes=1 << 20))
                offsets = [batch.base_offset for batch in read_batches(raw)]
            elif access == "time":
                offsets = [
                    reader.offset_for_timestamp(T0 + number) or 0
                    for number in range(10, 40)
                ]
            elif access == "get":
                offsets = [reader.get(offset).offset for offset in range(10, 40)]
            else:
                avoid_mapping(reader)
                offsets = [record.offset for record in reader.read(0)]
            assert offsets == list(range(10, 40))


def test_open_during_a_segment_swap_lists_names_again() -> None:
    """A reader lists the names twice. A rename between the two listings must not hide a
    segment.
    """
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(60):
            log.append(b"%d" % number * 10, key=b"k%d" % (number % 40))
        log.roll()
        read_offsets: list[list[int]] = []

        def observe(operation: str, is_done: bool) -> None:
            if operation == "rename" and is_done and len(read_offsets) < 40:
                disk.observer = None
                with logcore.open("t-0", read_only=True, fs=disk) as reader:
                    read_offsets.append(
                        [
                            record.offset
                            for record in reader.read(reader.log_start_offset)
                        ]
                    )
                disk.observer = observe

        disk.observer = observe
        clean(log, force=True)
        disk.observer = None
        final_state = [record.offset for record in log.read(0)]
    assert len(read_offsets) > 5
    assert all(
        offsets in (list(range(60)), final_state) or set(final_state) <= set(offsets)
        for offsets in read_offsets
    )


def test_offset_map_too_small_for_all_keys_needs_more_rounds() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        for number in range(400):
            log.append(b"%d" % number, key=b"k%d" % (number % 100))
        log.roll()
        ends = []
        while (report := clean(log, force=True, memory_bytes=24 * 54)) is not None:
            ends.append(report.end_offset)
            assert report.map_bytes <= 24 * 54
        assert ends == sorted(ends) and len(ends) > 3
        # Each round covers about 40 keys, so that a record that it keeps may be
        # superseded by a record that it has not read. The last value of each key is
        # present.
        assert [value for _, _, value in pairs(log)][-100:] == [
            b"%d" % number for number in range(300, 400)
        ]


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [0, 1])
def test_old_formats_are_compacted(magic: int, codec: int) -> None:
    """Entries of v0 and v1 keep their format, unless a tombstone needs the field of v2
    for its delete horizon.
    """
    rows = [
        (b"a", b"1"),
        (b"b", b"2"),
        (b"c", b"3"),
        (b"a", None),
        (b"b", b"5"),
        (b"d", b"6"),
    ]
    raw = b""
    for first in (0, 3):
        builder = LegacyRecordBatchBuilder(
            magic=magic, compression_type=codec, batch_size=1 << 20
        )
        for offset in range(first, first + 3):
            key, value = rows[offset]
            builder.append(
                offset if not codec else offset - first, T0 + offset, key, value
            )
        encoded = bytearray(builder.build())
        # A compressed wrapper has the offset of its last record. The records in it have
        # offsets of the log in v0, and offsets that begin at 0 in v1.
        if codec:
            encoded[:8] = (first + 2).to_bytes(8, "big")
        raw += encoded
    if codec and magic == 0:
        pytest.skip(
            "kafka-python does not write the offsets inside a v0 wrapper that a broker assigns"
        )
    disk = SimulatedDisk(
        {f"t-0/{0:020d}.log": raw, f"t-0/{6:020d}.log": b""}, now_ms=T0
    )
    with open_log(disk) as log:
        before = pairs(log)
        assert before == [(offset, *row) for offset, row in enumerate(rows)]
        assert clean(log, force=True) is not None
        assert pairs(log) == [
            (2, b"c", b"3"),
            (3, b"a", None),
            (4, b"b", b"5"),
            (5, b"d", b"6"),
        ]
        disk.advance(1000)
        log.append(b"7", key=b"e")
        compact(log)
        assert [offset for offset, _, _ in pairs(log)] == [2, 4, 5, 6]
        assert log.log_end_offset == 7


# -- plans of rounds -------------------------------------------------------------------


def facts_of_segment(
    base: int, size: int = 100, first: int = 0, largest: int = 0
) -> SealedFacts:
    return SealedFacts(
        base_offset=base,
        size_bytes=size,
        first_timestamp=first,
        largest_timestamp=largest,
    )


def plan_of(
    sealed: Sequence[SealedFacts], active_base: int, **options: Any
) -> cleaner.Plan:
    config = LogConfig.parse(options.pop("config", {}))
    now_ms = options.pop("now_ms", 10_000)
    offsets: dict[str, Any] = {
        "log_start": 0,
        "last_stable_offset": active_base,
        "cleaned_to": None,
        **options,
    }
    return plan(
        sealed,
        LogFacts(active_base=active_base, **offsets),
        config=config,
        now_ms=now_ms,
    )


def test_plan_of_a_round_follows_lag_ratio_and_checkpoint() -> None:
    segments = [facts_of_segment(0), facts_of_segment(10), facts_of_segment(20)]
    full = plan_of(segments, 30)
    assert (full.first_dirty, full.first_uncleanable, full.ratio) == (
        0,
        30,
        1.0,
    )
    assert full.is_due
    partial = plan_of(segments, 30, cleaned_to=20)
    assert (
        partial.first_dirty,
        partial.clean_bytes,
        partial.cleanable_bytes,
        partial.is_due,
    ) == (
        20,
        200,
        100,
        False,
    )
    assert plan_of(
        segments, 30, cleaned_to=20, config={"min.cleanable.dirty.ratio": 0.3}
    ).is_due
    assert plan_of(
        segments, 30, cleaned_to=20, config={"max.compaction.lag.ms": 9_999}
    ).is_due, "the maximum lag has passed"
    assert not plan_of(segments, 30, cleaned_to=30).cleanable_bytes
    assert plan_of(segments, 30, cleaned_to=99).first_dirty == 0, (
        "a checkpoint above the log end is ignored"
    )
    assert plan_of(segments, 30, log_start=5, cleaned_to=3).first_dirty == 5
    assert plan_of(segments, 30, last_stable_offset=25).first_uncleanable == 20
    segments_with_young_record = [
        facts_of_segment(0),
        facts_of_segment(10, largest=9_500),
        facts_of_segment(20),
    ]
    assert (
        plan_of(
            segments_with_young_record, 30, config={"min.compaction.lag.ms": 1_000}
        ).first_uncleanable
        == 10
    )
    assert (
        plan_of(
            segments_with_young_record, 30, config={"min.compaction.lag.ms": 400}
        ).first_uncleanable
        == 30
    )
    assert plan_of([], 0).cleanable_bytes == 0


def test_segments_are_grouped_for_merging(tmp_path: Path) -> None:
    with logcore.open(
        tmp_path / "t-0",
        create=True,
        config={**COMPACT, "segment.bytes": 200},
        durability="os",
    ) as log:
        for number in range(40):
            log.append(b"v" * 20, key=b"%d" % number)
        segments = log._state.segments[:-1]
        ends = [segment.base_offset for segment in log._state.segments[1:]]
        sizes = [segment.size_bytes for segment in segments]

        def joined(segment_bytes: int, index_bytes: int = 1 << 20) -> list[int]:
            config = LogConfig.parse(
                {"segment.bytes": segment_bytes, "segment.index.bytes": index_bytes}
            )
            return [len(merged) for merged in group(segments, ends, config)]

        assert joined(1 << 20) == [len(segments)]
        assert joined(14) == [1] * len(segments)
        assert joined(sizes[0] * 2)[:2] == [2, 2]
        distant_ends = [*ends[:-1], 2**31 + 5]
        assert [
            len(merged) for merged in group(segments, distant_ends, LogConfig())
        ] == [
            len(segments) - 1,
            1,
        ]


def test_compaction_of_a_topic_without_compact_policy_is_refused() -> None:
    with (
        open_log(SimulatedDisk(), **{"cleanup.policy": "delete"}) as log,
        pytest.raises(logcore.InvalidConfigError, match="compact"),
    ):
        clean(log)


# -- the offset map and the kernels ----------------------------------------------------


row = st.tuples(
    st.none() | st.binary(max_size=9),
    st.none() | st.binary(max_size=90),
    st.just(()),
    st.integers(-1, T0),
)


@given(
    st.lists(
        st.tuples(st.binary(max_size=600), st.integers(0, 1 << 40)),
        min_size=1,
        max_size=80,
    )
)
def test_offset_map_equals_a_dictionary(rows: list[tuple[bytes, int]]) -> None:
    rows = [(key, offset) for offset, (key, _) in enumerate(rows)]
    table = OffsetMap(1 << 16, len(rows), OS.random_bytes)
    columns = next(read_batches(encode([(key, b"") for key, _ in rows]))).columns()
    hashes = table.hashes(columns)
    assert table.put(hashes, columns.offsets)
    assert table.newest(hashes).tolist() == [dict(rows)[key] for key, _ in rows]
    assert len(table) == len(dict(rows))
    assert table.latest_offset == len(rows) - 1


def test_offset_map_grows_up_to_its_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cleaner, "_FIRST_SLOTS", 4)
    table = OffsetMap(24 * 1000, 5000, OS.random_bytes)
    table_sizes = [4]
    make_table = OffsetMap._make
    monkeypatch.setattr(
        OffsetMap,
        "_make",
        lambda self, slots: (table_sizes.append(slots), make_table(self, slots)),
    )
    hashes = np.random.default_rng(1).integers(0, 1 << 64, (5000, 2), np.uint64)
    stored = 0
    while table.put(hashes[stored : stored + 70], np.arange(stored, stored + 70)):
        stored += 70
        assert table.newest(hashes[:stored]).tolist() == list(range(stored))
    assert len(table) == 558 == table.latest_offset + 1
    assert table.newest(hashes[:559]).tolist() == [*range(558), -1]
    assert table_sizes == [4, 16, 64, 256, 744] and table.memory_bytes == 24 * 744, (
        "together with the previous table, this is the limit"
    )


@needs_compiler
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 50))
def test_both_kernels_store_the_same_offset_map(
    seed: int, rows: int, max_entries: int
) -> None:
    rng = np.random.default_rng(seed)
    keys = [rng.bytes(int(size)) for size in rng.integers(0, 30, rows)]
    sizes = np.array([len(key) for key in keys], np.int32)
    positions = (np.cumsum(sizes) - sizes).astype(np.int32)
    factors = rng.integers(0, 1 << 64, (10, 4), np.uint64)
    hashed = [
        kernel.hash_keys(b"".join(keys), positions, sizes, factors)
        for kernel in KERNELS
    ]
    assert (hashed[0] == hashed[1]).all()
    sampled = hashed[0][rng.integers(0, rows, 3 * rows)] if rows else hashed[0]
    # Offsets rise, as in a log, except for some that repeat. Only a larger offset
    # supersedes a smaller one.
    offsets = np.arange(len(sampled)) - rng.integers(0, 2, len(sampled)) * rng.integers(
        0, 9
    )
    results = []
    for kernel in KERNELS:
        table = np.zeros((max_entries + 3, 3), np.uint64)
        bits = np.zeros(len(sampled) // 16, np.uint8)
        stored_count = 0
        used_slots = 0
        for start in range(0, len(sampled), 7):
            chunk = sampled[start : start + 7]
            chunk_offsets = np.maximum(0, offsets[start : start + 7])
            stored_now, used_slots = kernel.map_put(
                table, chunk, chunk_offsets, used_slots, max_entries, bits, 3
            )
            stored_count += stored_now
            if stored_now < len(chunk):
                break
        larger = np.zeros((2 * max_entries + 3, 3), np.uint64)
        assert kernel.map_move(table, larger) == used_slots
        newest_offsets = kernel.map_get(table, hashed[0]).tolist()
        assert kernel.map_get(larger, hashed[0]).tolist() == newest_offsets
        results.append((stored_count, used_slots, newest_offsets, bits.tolist()))
    assert results[0] == results[1]


@needs_compiler
@given(
    st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=5), st.data()
)
def test_both_kernels_hash_and_survey_a_run_identically(
    batches: list[list[Any]], data: st.DataObject
) -> None:
    raw = b"".join(
        encode(rows, base_offset=100 * index, append_time=index % 3 == 2)
        for index, rows in enumerate(batches)
    )
    total = sum(map(len, batches))
    factors = np.random.default_rng(1).integers(
        0, 1 << 64, (data.draw(st.sampled_from([4, 10])), 4), np.uint64
    )
    first = data.draw(st.integers(0, 150))
    marked = np.frombuffer(data.draw(st.binary(min_size=40, max_size=40)), np.uint8)
    results = []
    for kernel in KERNELS:
        bits = marked.copy()
        hashes = np.zeros((total, 2), np.uint64)
        offsets = np.zeros(total, np.int64)
        rows = kernel.hash_run(raw, 0, len(raw), factors, hashes, offsets, bits, first)
        keep = np.full(total, 7, np.uint8)
        survey = kernel.survey_run(raw, 0, len(raw), marked, first, keep, len(batches))
        if rows < 0:
            results.append((rows, survey.tolist(), keep.tolist()))
        else:
            results.append(
                (
                    rows,
                    survey.tolist(),
                    keep.tolist(),
                    hashes.tolist(),
                    offsets.tolist(),
                    bits.tolist(),
                )
            )
    assert results[0] == results[1]
    damaged_bytes = bytearray(raw)
    damaged_bytes[
        data.draw(st.integers(layout.CRC_START, len(encode(batches[0])) - 1))
    ] ^= 1
    for kernel in KERNELS:
        with pytest.raises(logcore.CorruptBatchError, match="CRC"):
            kernel.hash_run(
                damaged_bytes, 0, len(raw), factors, hashes, offsets, bits, first
            )
        with pytest.raises(logcore.CorruptBatchError, match="CRC"):
            kernel.survey_run(
                damaged_bytes, 0, len(raw), marked, first, keep, len(batches)
            )


@needs_compiler
@given(
    st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=5), st.data()
)
def test_both_kernels_rewrite_batches_identically(
    batches: list[list[Any]], data: st.DataObject
) -> None:
    raw = b"".join(
        encode(rows, base_offset=100 * index, append_time=index % 3 == 2)
        for index, rows in enumerate(batches)
    )
    headers, _, _ = plain.walk(raw, 0, len(raw), 99, False)
    count = len(headers)
    positions = np.ascontiguousarray(headers["position"])
    actions = np.array(
        data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), np.uint8
    )
    times = np.array(
        data.draw(st.lists(st.integers(-1, T0), min_size=count, max_size=count)),
        np.int64,
    )
    total = sum(map(len, batches))
    keep = np.array(
        data.draw(st.lists(st.integers(0, 1), min_size=total, max_size=total)), np.uint8
    )
    results = []
    for kernel in KERNELS:
        out = np.empty(len(raw) + 14 * total, np.uint8)
        attributes = headers["attributes"].astype(np.int16) | layout.DELETE_HORIZON_BIT
        sizes = kernel.rewrite_batches(
            raw, positions, actions, attributes, times, keep, out
        )
        results.append((sizes.tolist(), out[: sizes.sum()].tobytes()))
    assert results[0] == results[1]
    position = 0
    first_row = 0
    for batch, rows in enumerate(batches):
        size = results[0][0][batch]
        if size:
            written = RecordBatch.parse(results[0][1], position, position + size)
            assert written is not None
            records = written.records()
            kept_records = [
                record
                for record, keep_flag in zip(
                    rows, keep[first_row : first_row + len(rows)], strict=True
                )
                if keep_flag
            ]
            expected = {1: rows, 2: kept_records, 3: []}[int(actions[batch])]
            assert [(record.key, record.value) for record in records] == [
                (entry[0], entry[1]) for entry in expected
            ]
            assert written.last_offset == 100 * batch + len(rows) - 1
        position = position + size
        first_row = first_row + len(rows)
