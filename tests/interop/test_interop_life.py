"""One history of a partition in logcore and in Kafka's own storage classes, which must
end with the same files.

A script of appends, transactions, rolls, deletions, compactions and restarts runs on
both. After each chapter, the offsets, epochs, producers and segments are the same. At
the end every file is the same, and each side opens the files of the other. Needs Java
17 and Maven. Run by `make interop`.
"""

from __future__ import annotations

import base64
import os
import random
import re
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kafka.record.legacy_records import LegacyRecordBatchBuilder

import logcore
from logcore.cleaner import clean
from logcore.config import DEDUPE_BYTES
from logcore.fs import OS
from logcore.inspect.verify import verify
from logcore.log import Log
from logcore.recordbatch import RecordBatch, encode
from support.kafka_jvm import KafkaError, Storage

pytestmark = pytest.mark.interop

T0 = 1_700_000_000_000
DAY_MS = 86_400_000
CODECS = ["uncompressed", "gzip", "snappy", "lz4", "zstd"]
SMALL = {
    "segment.bytes": 2000,
    "index.interval.bytes": 200,
    "segment.index.bytes": 10_000,
    "delete.retention.ms": 1000,
    "segment.ms": 50_000,
    "file.delete.delay.ms": 0,
}
SEEDS = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 10
#: Options of kafka-dump-log for each kind of file.
DUMPS = {
    ".log": [["--deep-iteration", "--skip-record-metadata"]],
    ".index": [["--index-sanity-check"], ["--verify-index-only"]],
    ".timeindex": [["--index-sanity-check"], ["--verify-index-only"]],
    ".txnindex": [[]],
    ".snapshot": [[]],
}
#: The errors of logcore for each exception of Kafka.
ERRORS = {
    "OutOfOrderSequenceError": "OutOfOrderSequenceException",
    "InvalidProducerEpochError": "InvalidProducerEpochException",
    "InvalidTransactionStateError": "InvalidTxnStateException",
    "CoordinatorFencedError": "TransactionCoordinatorFencedException",
    "OffsetOutOfRangeError": "OffsetOutOfRangeException",
}


@pytest.fixture(scope="module")
def kafka() -> Iterator[Storage]:
    with Storage() as storage:
        yield storage


def state_of(log: Log) -> dict[str, Any]:
    """Return the state of a log of logcore in the form of Storage.java."""
    with log._state.lock:
        producers = log.host.writer.producers.known()._known
    segments = []
    for facts in log.host.maintenance.facts().segments:
        segments.append([facts.base_offset, facts.size_bytes, facts.largest_timestamp])
    return {
        "log_start": log.log_start_offset,
        "log_end": log.log_end_offset,
        "high_watermark": log.high_watermark,
        "last_stable": log.last_stable_offset,
        "epochs": [list(entry) for entry in log.host.writer.metadata.epochs],
        "producers": {
            str(producer_id): {
                "epoch": producer.epoch,
                "batches": [list(batch[:4]) for batch in producer.batches],
                "coordinator": producer.coordinator_epoch,
                "open": producer.open_offset,
                "timestamp": producer.timestamp_ms,
            }
            for producer_id, producer in producers.items()
        },
        "segments": segments,
    }


def row_of(batch: RecordBatch) -> dict[str, Any]:
    """Return the facts about a batch of logcore in the form of Storage.java."""
    codec = batch.codec_name if batch.codec else "none"
    return {
        "base": batch.base_offset,
        "last": batch.last_offset,
        "magic": batch.magic,
        "epoch": batch.partition_leader_epoch,
        "codec": codec,
        "append_time": batch.is_append_time,
        "transactional": batch.is_transactional,
        "control": batch.is_control,
        "horizon": batch.delete_horizon_ms,
        "producer": [
            batch.producer_id,
            batch.producer_epoch,
            batch.base_sequence,
            batch.last_sequence,
        ],
        "max_timestamp": batch.max_timestamp,
        "records": [
            [
                record.offset,
                record.timestamp_ms,
                text(record.key),
                text(record.value),
                [[name, text(v)] for name, v in record.headers],
            ]
            for record in batch.records()
        ],
    }


def text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


class PartitionPair:
    """A partition of logcore and one of Kafka that get the same calls at the same
    times.
    """

    def __init__(
        self,
        kafka: Storage,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        seed: int,
        **config: Any,
    ) -> None:
        self.kafka, self.rng = kafka, random.Random(seed)
        self.config = {**SMALL, **config}
        self.ours, self.theirs = folder / "ours" / "t-0", folder / "theirs" / "t-0"
        self.theirs.parent.mkdir(parents=True)
        self.now_ms = T0
        monkeypatch.setattr(OS, "now_ms", lambda: self.now_ms)
        self.sequences: dict[int, int] = {}
        self.epochs: dict[int, int] = {}
        self.sent: list[bytes] = []
        self.ends = [0]
        self.story: list[str] = []
        self.keys = self.rng.choice([8, 60])
        self.clock(0)
        self.open()

    # -- both

    def open(self) -> None:
        self.story.append("open")
        self.log = logcore.open(
            self.ours, create=True, config=self.config, durability=self.durability
        )
        self.kafka.ask("open", path=self.theirs, config=self.config)
        self.opened_end = self.log.log_end_offset

    def close(self) -> None:
        self.log.close()
        self.kafka.ask("close", path=self.theirs)

    def clock(self, ms: int) -> None:
        self.now_ms += ms
        self.kafka.ask("now", now=self.now_ms)

    def both(self, ours: Any, what: str, **more: Any) -> Any:
        """Make a call on both, and check that both return or refuse it."""
        told = more
        if "data" in more:
            batch = RecordBatch.parse(base64.b64decode(more["data"]))
            assert batch is not None
            told = {
                key: value
                for key, value in row_of(batch).items()
                if key in ("producer", "transactional", "codec")
            }
        self.story.append(
            " ".join([what, *(f"{key}={value}" for key, value in told.items())])
        )
        try:
            theirs: Any = self.kafka.ask(what, path=self.theirs, **more)
        except KafkaError as error:
            theirs = error.name
        end = self.log.log_end_offset
        try:
            mine = ours()
        except logcore.LogcoreError as error:
            mine = type(error).__name__
            assert ERRORS.get(mine, mine) == theirs, (mine, error, theirs)
            self.story[-1] += f" -> {mine}"
            self.roll_after_refusal(what)
            return None
        if theirs == "OutOfOrderSequenceException" and self.is_reopened:
            # A repeated batch that Kafka does not remember any more: see check().
            # Neither side stores it.
            assert mine.last_offset < end == self.log.log_end_offset, (
                mine,
                self.told(),
            )
            self.story[-1] += f" -> {theirs}, known here"
            self.roll_after_refusal(what)
            return None
        assert not isinstance(theirs, str), (theirs, mine, self.told())
        self.story[-1] += (
            f" -> {mine[:2] if isinstance(mine, logcore.Receipt) else mine}"
        )
        if isinstance(mine, logcore.Receipt):
            assert (mine.offset, mine.last_offset) == (
                theirs["offset"],
                theirs["last_offset"],
            ), self.told()
            if self.log.log_end_offset > end:
                self.ends.append(self.log.log_end_offset)
            else:
                self.roll_after_refusal(what)
        return theirs

    def roll_after_refusal(self, what: str) -> None:
        """Check that both refuse a batch with a wrong sequence. Kafka rolls before it
        checks sequences (storage format section 14, 17), and logcore does not change
        the log.
        """
        if what in ("append", "marker") and self.log.host.writer.active.size_bytes:
            base_offset, size, _ = self.kafka.ask("state", path=self.theirs)[
                "segments"
            ][-1]
            if (base_offset, size) == (self.log.log_end_offset, 0):
                self.log.roll()

    # -- steps

    def append(self, data: bytes) -> None:
        self.both(
            lambda: self.log.append_batch(data),
            "append",
            data=base64.b64encode(data).decode(),
        )

    def rows(
        self,
    ) -> list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]]:
        rng = self.rng

        def row(
            at: int,
        ) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]:
            value = rng.choice(
                [None, b"v%d" % rng.randrange(1000), b"", b"x" * rng.randrange(200)]
            )
            headers = [("h", rng.choice([None, b"", b"1"]))] * rng.choice([0, 0, 1, 2])
            return (
                b"k%d" % rng.randrange(self.keys),
                value,
                headers,
                self.now_ms + rng.randrange(-3000, 50),
            )

        return [row(at) for at in range(rng.randrange(1, 7))]

    def batch(self) -> None:
        self.append(encode(self.rows(), codec=self.codec()))

    def codec(self) -> str:
        return self.rng.choice(self.codecs)

    codecs = CODECS
    durability = "os"
    first_producer = 100
    is_unsure = is_truncated = is_deleted = is_crashed = is_reopened = False

    def sequenced(self) -> None:
        rng = self.rng
        producer_id = self.first_producer + rng.randrange(8)
        transactional = producer_id >= self.first_producer + 4
        rows = self.rows()
        epoch = self.epochs.get(producer_id, 0)
        if rng.random() < 0.08:
            epoch = max(0, epoch + rng.choice([-1, 1]))
        sequence = (
            self.sequences.get(producer_id, 0)
            if epoch == self.epochs.get(producer_id, 0)
            else 0
        )
        if rng.random() < 0.05:
            sequence += rng.choice([1, 2, -1]) if sequence else 3
        data = encode(
            rows,
            codec=self.codec(),
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=transactional and rng.random() < 0.97,
        )
        end = self.log.log_end_offset
        self.append(data)
        if self.log.log_end_offset > end:
            self.sent = [*self.sent[-30:], data]
            self.epochs[producer_id], self.sequences[producer_id] = (
                epoch,
                sequence + len(rows),
            )

    def again(self) -> None:
        if self.sent:
            self.append(self.rng.choice(self.sent[-8:]))

    def marker(self) -> None:
        rng = self.rng
        producer_id = self.first_producer + rng.randrange(4, 8)
        commit = rng.random() < 0.5
        epoch = self.epochs.get(producer_id, 0) + rng.choice([0] * 12 + [1, -1])
        coordinator = rng.choice([3] * 20 + [2, 4])
        if epoch < 0:
            return
        end = self.log.log_end_offset
        self.end(producer_id, epoch, commit, coordinator)
        if self.log.log_end_offset > end and epoch != self.epochs.get(producer_id, 0):
            self.epochs[producer_id], self.sequences[producer_id] = epoch, 0

    def end(self, producer_id: int, epoch: int, commit: bool, coordinator: int) -> None:
        self.both(
            lambda: self.log.end_transaction(producer_id, epoch, commit=commit, coordinator_epoch=coordinator),
            "marker", producer=producer_id, epoch=epoch, commit=commit, coordinator=coordinator,
        )  # fmt: skip

    def roll(self) -> None:
        if self.log.statistics().size_bytes and self.log.host.writer.active.size_bytes:
            self.both(self.log.roll, "roll")

    def epoch(self) -> None:
        epoch = self.log.leader_epoch + self.rng.randrange(1, 3)
        self.both(lambda: self.log.begin_epoch(epoch), "epoch", epoch=epoch)

    def wait(self) -> None:
        self.clock(self.rng.choice([10, 600, 2000, 2000, 30_000]))

    def reopen(self) -> None:
        self.close()
        self.start()

    def swap(self) -> None:
        """Let each side continue with the files of the other."""
        self.close()
        self.exchange()
        self.start()

    def crash(self) -> None:
        """Kill both, lose the same last bytes of both, and let each continue with the
        files of the other.
        """
        self.is_crashed = True
        # A roll or a close syncs, so records before it are not lost.
        unsynced = [
            end
            for end in self.ends
            if end > max(self.opened_end, self.log.host.writer.active.base_offset)
        ]
        lost = (
            self.rng.choice([0, 1, 30, 100])
            if len(unsynced) > 3 and self.durability == "os"
            else 0
        )
        copies = []
        for path in (self.ours, self.theirs):
            copies.append(path.parent.with_suffix(".copy"))
            # Kafka writes its checkpoints in a thread of its own.
            shutil.copytree(
                path.parent, copies[-1], ignore=shutil.ignore_patterns(".lock", "*.tmp")
            )
        self.close()
        for copy, path in zip(copies, (self.ours, self.theirs), strict=True):
            shutil.rmtree(path.parent)
            copy.rename(path.parent)
            active = max(path.glob("*.log"))
            os.truncate(active, max(0, active.stat().st_size - lost))
            (path.parent / ".kafka_cleanshutdown").unlink(missing_ok=True)
        self.story.append(f"crash, {lost} bytes lost")
        self.exchange()
        self.start()
        self.ends = [end for end in self.ends if end <= self.log.log_end_offset]
        self.renew()

    def exchange(self) -> None:
        ours = self.ours.parent
        theirs = self.theirs.parent
        between = self.ours.parent.with_suffix(".between")
        ours.rename(between)
        theirs.rename(ours)
        between.rename(theirs)
        self.story.append("exchange")

    def start(self) -> None:
        self.open()
        self.epoch()  # as a leader that comes back; Kafka's log forgets an epoch without records, ours does not
        self.is_reopened = True
        if self.is_deleted:
            self.renew()

    def delete(self) -> None:
        start = self.log.log_start_offset
        end = self.log.log_end_offset
        self.is_deleted = True
        offset = min(start + self.rng.randrange(30), end + self.rng.randrange(2))
        self.both(lambda: self.log.delete_records(offset), "delete", offset=offset)
        self.retain()

    def truncate(self) -> None:
        candidates = [
            end
            for end in self.ends[-6:]
            if self.log.log_start_offset <= end <= self.log.log_end_offset
        ]
        if candidates:
            offset = self.rng.choice(candidates)
            self.both(lambda: self.log.truncate(offset), "truncate", offset=offset)
            self.ends = [end for end in self.ends if end <= offset]
            self.is_truncated = True
            self.epoch()  # who truncates was a follower; Kafka forgets an epoch without records
            self.renew()

    def renew(self) -> None:
        """Let other producers continue. The remembered state of the earlier ones
        depends on the snapshots that exist.
        """
        self.sent.clear()
        for producer_id in [
            *self.log.host.writer.producers.known().open_transactions()
        ]:
            self.end(producer_id, self.epochs[producer_id], False, 4)
        self.first_producer += 8

    def retain(self) -> None:
        self.is_deleted = True
        found = self.both(lambda: self.log.retain(self.now_ms), "retain")
        assert found is not None

    def clean(self) -> None:
        found = self.both(lambda: None, "clean", memory=1 << 20)
        report = clean(self.log, now_ms=self.now_ms, force=True)
        assert (-1 if report is None else report.end_offset) == found["end"], (
            report,
            found,
        )

    # -- comparing

    def told(self) -> str:
        print("\n".join(self.story))
        return self.story[-1]

    def check(self) -> None:
        theirs = self.kafka.ask("state", path=self.theirs)
        del theirs["aborted"]
        mine = state_of(self.log)
        for state in (mine, theirs):
            if self.codecs != ["uncompressed"] and self.log.config.is_compacted:
                # Other libraries compress the same records to other sizes.
                del state["segments"]
            else:
                state["segments"] = [
                    # Kafka does not know which transactions below the log start were
                    # aborted, and no reader needs it. An empty segment has the time of
                    # its file.
                    [
                        base,
                        *(
                            [0, 0]
                            if self.is_below_start(base)
                            else [size, time]
                            if size
                            else [0, -1]
                        ),
                    ]
                    for base, size, time in state["segments"]
                ]
        # Kafka's log may begin below the log start, at the head of the batch that
        # contains it.
        theirs["last_stable"] = max(theirs["last_stable"], theirs["log_start"])
        self.is_unsure = False
        begun = [
            entry["open"]
            for state in (mine, theirs)
            for entry in state["producers"].values()
            if entry["open"] >= 0
        ]
        if min(begun, default=mine["log_start"]) < mine["log_start"]:
            # If the first batches of a transaction are deleted, Kafka knows the facts
            # of a snapshot, and logcore the remaining batches. After a restart, these
            # differ.
            self.is_unsure = True
            del mine["last_stable"], theirs["last_stable"]
        if self.is_reopened:
            # Kafka's snapshot contains the last batch of a producer. logcore reads up
            # to five earlier batches from the log.
            for name, known in theirs["producers"].items():
                own = mine["producers"].get(name, known)
                own["batches"] = own["batches"][
                    max(0, len(own["batches"]) - len(known["batches"])) :
                ]
        if (
            self.is_truncated
            or self.is_crashed
            or (self.is_deleted and self.is_reopened)
        ):
            # The remembered state of other producers then depends on the snapshots that
            # exist.
            mine["producers"], theirs["producers"] = (
                {
                    name: {
                        "epoch": entry["epoch"],
                        "open": entry["open"],
                        "last": entry["batches"][-1],
                    }
                    for name, entry in state["producers"].items()
                    if entry["batches"]
                    and entry["batches"][-1][3] >= state["log_start"]
                }
                for state in (mine, theirs)
            )
        if mine != theirs:
            pytest.fail(f"{diff(mine, theirs)} {self.told()}")

    def is_below_start(self, base_offset: int) -> bool:
        return self.log.config.is_compacted and base_offset < self.log.log_start_offset

    def check_batches(self) -> None:
        theirs = self.kafka.ask("batches", path=self.theirs)["batches"]
        rows = [row_of(batch) for batch in self.log.batches(self.log.log_start_offset)]
        for row, other in zip(rows, theirs, strict=False):
            if row != other:
                pytest.fail(f"{row['base']} {diff(row, other)} {self.told()}")
        assert len(rows) == len(theirs)
        committed = [
            record.offset
            for record in self.log.read(
                self.log.log_start_offset, isolation="read_committed"
            )
        ]
        theirs = self.kafka.ask("committed", path=self.theirs)["offsets"]
        if not self.is_unsure:
            assert committed == theirs, self.told()
        times = [
            T0 + 500 * at
            for at in range(
                -5, (self.now_ms - T0) // 500 + 2, max(1, (self.now_ms - T0) // 10_000)
            )
        ]
        epochs = [*range(-1, self.log.leader_epoch + 2)]
        theirs = self.kafka.ask("offsets", path=self.theirs, times=times, epochs=epochs)
        mine: dict[str, Any] = {
            "times": [self.log.offset_for_timestamp(time) for time in times]
        }
        # Kafka may return the position of a marker, and logcore only of records.
        markers = {
            batch.base_offset
            for batch in self.log.batches(self.log.log_start_offset)
            if batch.is_control
        }
        for at, offset in enumerate(theirs["times"]):
            if offset in markers and (
                mine["times"][at] is None or mine["times"][at] > offset
            ):
                theirs["times"][at] = mine["times"][at]
            # Kafka searches no further than a segment whose youngest record is deleted.
            if offset is None and (self.is_deleted or self.log.config.is_compacted):
                theirs["times"][at] = mine["times"][at]
        mine["ends"] = [[*self.log.end_of_epoch(epoch)] for epoch in epochs]
        if mine != theirs:
            pytest.fail(f"{times} {epochs} {diff(mine, theirs)} {self.told()}")

    def check_files(self) -> None:
        """Compare the files when both are closed."""
        for path in (self.ours, self.theirs):
            damaged = [
                verdict for verdict in verify(path) if verdict.status == "damaged"
            ]
            assert not damaged, (damaged, self.told())
        suffixes = (
            [".log", ".txnindex", ".index", ".timeindex"]
            if self.codecs == ["uncompressed"]
            else [".txnindex"]
        )
        # Kafka counts the bytes to the next index entry from this batch.
        if self.is_reopened or self.is_truncated:
            suffixes = suffixes[:2]
        for suffix in suffixes:
            mine, theirs = (
                {path.name: path.read_bytes() for path in folder.glob("*" + suffix)}
                for folder in (self.ours, self.theirs)
            )
            # The two may differ in their empty files.
            mine, theirs = (
                {
                    name: content
                    for name, content in entry.items()
                    if content and not self.is_below_start(int(name[:20]))
                }
                for entry in (mine, theirs)
            )
            if suffix == ".txnindex":
                entries = [
                    {name: aborted_in(content) for name, content in entry.items()}
                    for entry in (mine, theirs)
                ]
                mine, theirs = entries
                if self.is_deleted or self.log.config.is_compacted:
                    # Kafka remembers transactions whose first batches, or all, are
                    # deleted. logcore returns the start of the remaining batches, and
                    # readers need no earlier one.
                    with logcore.open(self.ours, read_only=True) as log:
                        needed = [
                            [entry.producer_id, entry.last_offset]
                            for entry in log._scan_transactions().state.entries
                        ]
                    rows_of = (
                        [
                            row
                            for rows in entry.values()
                            for row in rows
                            if row in needed
                        ]
                        for entry in (
                            {
                                name: [[*row[::2]] for row in rows]
                                for name, rows in entry.items()
                            }
                            for entry in entries
                        )
                    )
                    mine, theirs = ({"needed": rows} for rows in rows_of)
            if mine != theirs:
                pytest.fail(f"{suffix} {diff(mine, theirs)} {self.told()}")
        for path in sorted(self.ours.iterdir()):
            for options in DUMPS.get(path.suffix, ()):
                dumped = self.kafka.dump(path, *options)
                # The tool reads -1 as the time of an emptied batch, also in files of
                # Kafka's own cleaner.
                dumped = re.sub(
                    r"Found timestamp mismatch in .*\n(  Index timestamp: \d+, log timestamp: -1\n)+",
                    "",
                    dumped,
                )
                if re.search(
                    "isvalid: false|mismatch|exception|error|found", dumped, re.I
                ):
                    pytest.fail(f"{path.name} {options} {dumped} {self.told()}")


def aborted_in(content: bytes) -> list[tuple[int, ...]]:
    """Return the entries of a .txnindex file: (producer id, first offset, last offset,
    last stable offset).
    """
    return [fields[1:] for fields in struct.iter_unpack(">hqqqq", content)]


def diff(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    keys = [*mine, *(key for key in theirs if key not in mine)]
    found: dict[str, Any] = {
        key: (mine.get(key), theirs.get(key))
        for key in keys
        if mine.get(key) != theirs.get(key)
    }
    for key, (first, other) in found.items():
        if isinstance(first, dict) and isinstance(other, dict):
            found[key] = diff(first, other)
    return found


WEIGHTS = {
    "batch": 5, "sequenced": 10, "again": 1, "marker": 5, "roll": 1, "epoch": 0.4, "wait": 1, "reopen": 0.5,
}  # fmt: skip


def live(pairs: PartitionPair, chapters: int, **weights: float) -> None:
    weights = {**WEIGHTS, **weights}
    for _ in range(chapters):
        for _ in range(pairs.rng.randrange(5, 25)):
            getattr(pairs, pairs.rng.choices([*weights], [*weights.values()])[0])()
            pairs.check()
        pairs.check_batches()


@pytest.fixture
def pairs(
    request: pytest.FixtureRequest,
    kafka: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    made: list[PartitionPair] = []

    def make(seed: int, **config: Any) -> PartitionPair:
        made.append(PartitionPair(kafka, tmp_path, monkeypatch, seed, **config))
        return made[-1]

    yield make
    for partition_pair in made:
        try:
            kafka.ask("close", path=partition_pair.theirs)
        except KafkaError:
            pass
        partition_pair.log.close()


HISTORIES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "appends": ({}, {}),
    "retention": (
        {"retention.ms": 60_000, "retention.bytes": 6000},
        {"delete": 1, "retain": 1},
    ),
    "truncation": ({}, {"truncate": 1}),
    "compaction": ({"cleanup.policy": "compact"}, {"clean": 1, "wait": 3}),
    "compaction-and-retention": (
        {
            "cleanup.policy": "compact,delete",
            "min.compaction.lag.ms": 500,
            "retention.ms": 60_000,
        },
        {"clean": 1, "wait": 3, "delete": 0.5, "retain": 1},
    ),
    "append-time": (
        {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"},
        {"clean": 1},
    ),
    "unpacked": ({"compression.type": "uncompressed"}, {}),
    "turns": ({"cleanup.policy": "compact"}, {"clean": 1, "wait": 3, "swap": 0.7}),
    "crashes": ({}, {"swap": 0.3, "crash": 0.7}),
    "crashes-compacted": (
        {"cleanup.policy": "compact"},
        {"clean": 1, "wait": 3, "crash": 0.7},
    ),
}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", HISTORIES)
def test_two_histories_end_with_equal_logs(pairs: Any, kind: str, seed: int) -> None:
    config, steps = HISTORIES[kind]
    partition_pair: PartitionPair = pairs(seed, **config)
    partition_pair.codecs = CODECS if seed % 2 else ["uncompressed"]
    partition_pair.durability = "group" if seed % 3 == 2 else "os"
    live(partition_pair, 6, **steps)
    partition_pair.close()
    partition_pair.check_files()


def test_a_producer_is_known_after_its_batches_are_deleted(pairs: Any) -> None:
    partition_pair: PartitionPair = pairs(0)
    data = encode(
        [(b"k", b"v")], producer_id=9, producer_epoch=0, base_sequence=0, now_ms=T0
    )
    partition_pair.append(data)
    partition_pair.close()
    partition_pair.open()
    partition_pair.batch()
    partition_pair.roll()
    end = partition_pair.log.log_end_offset
    partition_pair.batch()
    partition_pair.both(
        lambda: partition_pair.log.delete_records(end), "delete", offset=end
    )
    partition_pair.check()
    partition_pair.close()
    partition_pair.open()
    partition_pair.check()
    partition_pair.append(data)
    partition_pair.append(
        encode(
            [(b"k", b"v")], producer_id=9, producer_epoch=0, base_sequence=7, now_ms=T0
        )
    )


@pytest.mark.parametrize("seed", range(4))
def test_kafka_opens_forks_and_snapshots(
    pairs: Any, kafka: Storage, tmp_path: Path, seed: int
) -> None:
    partition_pair: PartitionPair = pairs(seed, **{"cleanup.policy": "compact"})
    live(partition_pair, 4, clean=0.5)
    partition_pair.close()
    at_offset = partition_pair.rng.randrange(partition_pair.ends[-1])
    with logcore.open_dir(partition_pair.ours.parent, durability="os") as directory:
        directory.fork("t", at_offset, "forked")
        directory.snapshot(tmp_path / "backup")
    logcore.restore(tmp_path / "backup", tmp_path / "copy")
    for path in (tmp_path / "ours" / "forked-0", tmp_path / "copy" / "t-0"):
        with logcore.open(path, config=partition_pair.config, durability="os") as log:
            mine = state_of(log)
            rows = [row_of(batch) for batch in log.batches(0)]
        kafka.ask("open", path=path, config=partition_pair.config)
        theirs = kafka.ask("state", path=path)
        found = kafka.ask("batches", path=path)["batches"]
        kafka.ask("close", path=path)
        assert rows == found
        assert mine["log_end"] == (
            at_offset if path.name == "forked-0" else partition_pair.log.log_end_offset
        )
        for name in ("log_start", "log_end", "last_stable", "epochs"):
            assert mine[name] == theirs[name], name
        mine, theirs = (
            {
                name: (known["epoch"], known["open"], known["batches"][-1:])
                for name, known in state["producers"].items()
            }
            for state in (mine, theirs)
        )
        assert mine == theirs


@pytest.mark.parametrize(("magic", "codec"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 3)])
def test_old_formats_are_read(
    kafka: Storage, tmp_path: Path, magic: int, codec: int
) -> None:
    """Kafka keeps the format, and logcore writes v2. The records are the same."""
    config = {**SMALL, "cleanup.policy": "compact"}
    for side in ("ours", "theirs"):
        folder = tmp_path / side / "t-0"
        folder.mkdir(parents=True)
        (folder / f"{0:020d}.log").write_bytes(legacy(magic, codec))
        with logcore.open(folder, config=config, durability="os") as log:
            log.append(b"x", key=b"z", timestamp_ms=T0)
            log.roll()
    with logcore.open(tmp_path / "ours" / "t-0", config=config) as log:
        report = clean(log, force=True)
    assert report is not None
    path = tmp_path / "theirs" / "t-0"
    kafka.ask("open", path=path, config=config)
    assert kafka.ask("clean", path=path, memory=1 << 20)["end"] == report.end_offset
    kafka.ask("close", path=path)
    rows = []
    for side in ("ours", "theirs"):
        path = tmp_path / side / "t-0"
        kafka.ask("open", path=path, config=config)
        found = [
            record
            for batch in kafka.ask("batches", path=path)["batches"]
            for record in batch["records"]
        ]
        kafka.ask("close", path=path)
        with logcore.open(path, read_only=True) as log:
            assert [
                entry for batch in log.batches(0) for entry in row_of(batch)["records"]
            ] == found
        rows.append(found)
    assert rows[0] == rows[1] and 0 < len(rows[0]) < 41


def legacy(magic: int, codec: int) -> bytes:
    """Return forty records of ten keys, four in a wrapper or none, as a broker of that
    time stored them.
    """
    raw = b""
    for first in range(0, 40, 4):
        builder = LegacyRecordBatchBuilder(
            magic=magic, compression_type=codec, batch_size=1 << 20
        )
        for row in range(4):
            offset = first + row
            value = None if offset % 9 == 0 else b"value %d" % offset
            builder.append(
                row if codec and magic else offset,
                T0 + offset,
                b"k%d" % (offset * 7 % 10),
                value,
            )
        entry = bytearray(builder.build())
        if codec:  # its offset is that of the last record; v0 counts inside as in the log, v1 from 0
            entry[:8] = (first + 3).to_bytes(8, "big")
        raw += entry
    return raw


def test_compaction_takes_as_long_as_kafka_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compact values of 100 bytes with keys of 16 bytes, of which one record in ten
    remains. The files must be the same. The times are printed.
    """
    size = int(os.environ.get("LOGCORE_INTEROP_BYTES", str(256 << 20)))
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": 128 << 20,
        "file.delete.delay.ms": 0,
    }
    with logcore.open(
        tmp_path / "made" / "t-0", create=True, config=config, durability="os"
    ) as log:
        fill(log, size)
    maps: list[int] = []
    with Storage("-Xmx1g", "-XX:+UseParallelGC") as kafka:

        def theirs(path: Path) -> float:
            kafka.ask("open", path=path, config=config)
            found = kafka.ask("clean", path=path)
            kafka.ask("close", path=path)
            return float(found["seconds"])

        def ours(path: Path) -> float:
            with logcore.open(path, config=config, durability="os") as log:
                began = time.perf_counter()
                report = clean(log, force=True)
                ended = time.perf_counter()
            assert report is not None
            maps.append(report.map_bytes)
            return ended - began

        def timed(work: Callable[[Path], float], name: str) -> float:
            shutil.copytree(
                tmp_path / "made",
                tmp_path / name,
                ignore=shutil.ignore_patterns(".lock"),
            )
            return work(tmp_path / name / "t-0")

        times: dict[str, list[float]] = {
            "theirs": [timed(theirs, "warm-up")],
            "ours": [],
        }
        for turn in range(2):
            for name, work in (("ours", ours), ("theirs", theirs)):
                times[name].append(timed(work, f"{name}{turn}"))
    mine, other = (
        {
            path.name: path.read_bytes()
            for path in (tmp_path / name / "t-0").glob("*.log")
        }
        for name in ("ours1", "theirs1")
    )
    assert mine == other
    tracemalloc.start()
    try:
        timed(ours, "measured")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(maps) <= DEDUPE_BYTES and peak - maps[-1] < 32 << 20
    with capsys.disabled():
        mine_s = min(times["ours"])
        theirs_s = min(times["theirs"])
        print(
            f"\ncompaction of {size >> 20} MiB, 10 % live: Kafka {theirs_s:.2f} s, logcore {mine_s:.2f} s, ",
            end="",
        )
        print(
            f"ratio {theirs_s / mine_s:.2f}; offset map {maps[-1] >> 20} of {DEDUPE_BYTES >> 20} MiB, ",
            end="",
        )
        print(f"peak beyond it {(peak - maps[-1]) >> 20} MiB")


def fill(log: Log, size: int) -> None:
    """Return ten records of each key, in random order."""
    keys = size // 1300
    chosen = np.random.default_rng(1).permuted(np.repeat(np.arange(keys), 10))
    at = 0
    while at < len(chosen):
        part = chosen[at : at + 50_000]
        text = b"".join(b"%016d" % key for key in part)
        values = b"".join(b"%0100d" % (at + row) for row in range(len(part)))
        key_ends, value_ends = (
            np.arange(len(part) + 1, dtype=np.int64) * width for width in (16, 100)
        )
        log.append_columns(
            keys=(text, key_ends),
            values=(values, value_ends),
            timestamps_ms=np.full(len(part), T0),
        )
        at += len(part)
    log.roll()
