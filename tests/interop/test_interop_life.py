"""The same operations on a partition in logcore and in Kafka's storage classes must
create the same files. A script of appends, transactions, rolls, deletions, compactions
and restarts runs on both. After each chapter, the offsets, epochs, producers and
segments are equal. At the end all files are equal, and each implementation opens the
files of the other. Needs Java 17 and Maven. Run by `make interop`.
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
    for segment in log.host.maintenance.facts().segments:
        segments.append(
            [segment.base_offset, segment.size_bytes, segment.largest_timestamp]
        )
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
    """Return the fields of a batch of logcore in the form of Storage.java."""
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
                [[name, text(value)] for name, value in record.headers],
            ]
            for record in batch.records()
        ],
    }


def text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


class PartitionPair:
    """A partition of logcore and a partition of Kafka with the same calls at the same
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
        self.own_path, self.kafka_path = (
            folder / "logcore" / "t-0",
            folder / "kafka" / "t-0",
        )
        self.kafka_path.parent.mkdir(parents=True)
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

    # -- operations on both

    def open(self) -> None:
        self.story.append("open")
        self.log = logcore.open(
            self.own_path, create=True, config=self.config, durability=self.durability
        )
        self.kafka.ask("open", path=self.kafka_path, config=self.config)
        self.opened_end = self.log.log_end_offset

    def close(self) -> None:
        self.log.close()
        self.kafka.ask("close", path=self.kafka_path)

    def clock(self, ms: int) -> None:
        self.now_ms += ms
        self.kafka.ask("now", now=self.now_ms)

    def run_on_both(self, run_own: Any, operation: str, **more: Any) -> Any:
        """Run an operation on both, and check that both accept or refuse it."""
        arguments = more
        if "data" in more:
            batch = RecordBatch.parse(base64.b64decode(more["data"]))
            assert batch is not None
            arguments = {
                key: value
                for key, value in row_of(batch).items()
                if key in ("producer", "transactional", "codec")
            }
        self.story.append(
            " ".join(
                [operation, *(f"{key}={value}" for key, value in arguments.items())]
            )
        )
        try:
            kafka_result: Any = self.kafka.ask(operation, path=self.kafka_path, **more)
        except KafkaError as error:
            kafka_result = error.name
        end = self.log.log_end_offset
        try:
            own_result = run_own()
        except logcore.LogcoreError as error:
            own_result = type(error).__name__
            assert ERRORS.get(own_result, own_result) == kafka_result, (
                own_result,
                error,
                kafka_result,
            )
            self.story[-1] += f" -> {own_result}"
            self.roll_after_refusal(operation)
            return None
        if kafka_result == "OutOfOrderSequenceException" and self.is_reopened:
            # Kafka does not remember the repeated batch, see check(). Neither
            # implementation stores it.
            assert own_result.last_offset < end == self.log.log_end_offset, (
                own_result,
                self.print_story(),
            )
            self.story[-1] += f" -> {kafka_result}, known here"
            self.roll_after_refusal(operation)
            return None
        assert not isinstance(kafka_result, str), (
            kafka_result,
            own_result,
            self.print_story(),
        )
        self.story[-1] += (
            f" -> {own_result[:2] if isinstance(own_result, logcore.Receipt) else own_result}"
        )
        if isinstance(own_result, logcore.Receipt):
            assert (own_result.offset, own_result.last_offset) == (
                kafka_result["offset"],
                kafka_result["last_offset"],
            ), self.print_story()
            if self.log.log_end_offset > end:
                self.ends.append(self.log.log_end_offset)
            else:
                self.roll_after_refusal(operation)
        return kafka_result

    def roll_after_refusal(self, operation: str) -> None:
        """Roll the log of logcore if Kafka rolled for a refused batch. Kafka rolls
        before it checks sequences (storage format section 14, 17), and logcore does not
        change the log.
        """
        if operation in ("append", "marker") and self.log.host.writer.active.size_bytes:
            base_offset, size, _ = self.kafka.ask("state", path=self.kafka_path)[
                "segments"
            ][-1]
            if (base_offset, size) == (self.log.log_end_offset, 0):
                self.log.roll()

    # -- steps

    def append(self, data: bytes) -> None:
        self.run_on_both(
            lambda: self.log.append_batch(data),
            "append",
            data=base64.b64encode(data).decode(),
        )

    def rows(
        self,
    ) -> list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]]:
        rng = self.rng

        def row(
            index: int,
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

        return [row(index) for index in range(rng.randrange(1, 7))]

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

    def resend(self) -> None:
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
        self.run_on_both(
            lambda: self.log.end_transaction(producer_id, epoch, commit=commit, coordinator_epoch=coordinator),
            "marker", producer=producer_id, epoch=epoch, commit=commit, coordinator=coordinator,
        )  # fmt: skip

    def roll(self) -> None:
        if self.log.statistics().size_bytes and self.log.host.writer.active.size_bytes:
            self.run_on_both(self.log.roll, "roll")

    def epoch(self) -> None:
        epoch = self.log.leader_epoch + self.rng.randrange(1, 3)
        self.run_on_both(lambda: self.log.begin_epoch(epoch), "epoch", epoch=epoch)

    def wait(self) -> None:
        self.clock(self.rng.choice([10, 600, 2000, 2000, 30_000]))

    def reopen(self) -> None:
        self.close()
        self.start()

    def swap_files(self) -> None:
        """Continue in each implementation with the files of the other."""
        self.close()
        self.exchange_files()
        self.start()

    def crash(self) -> None:
        """Kill both, remove the same number of bytes at the end of both, and continue
        in each implementation with the files of the other.
        """
        self.is_crashed = True
        # A roll or a close syncs, so that earlier records are not lost.
        unsynced = [
            end
            for end in self.ends
            if end > max(self.opened_end, self.log.host.writer.active.base_offset)
        ]
        lost_bytes = (
            self.rng.choice([0, 1, 30, 100])
            if len(unsynced) > 3 and self.durability == "os"
            else 0
        )
        copies = []
        for path in (self.own_path, self.kafka_path):
            copies.append(path.parent.with_suffix(".copy"))
            # Kafka writes its checkpoints in another thread.
            shutil.copytree(
                path.parent, copies[-1], ignore=shutil.ignore_patterns(".lock", "*.tmp")
            )
        self.close()
        for copy, path in zip(copies, (self.own_path, self.kafka_path), strict=True):
            shutil.rmtree(path.parent)
            copy.rename(path.parent)
            active = max(path.glob("*.log"))
            os.truncate(active, max(0, active.stat().st_size - lost_bytes))
            (path.parent / ".kafka_cleanshutdown").unlink(missing_ok=True)
        self.story.append(f"crash, {lost_bytes} bytes lost")
        self.exchange_files()
        self.start()
        self.ends = [end for end in self.ends if end <= self.log.log_end_offset]
        self.renew()

    def exchange_files(self) -> None:
        own_directory = self.own_path.parent
        kafka_directory = self.kafka_path.parent
        temporary = self.own_path.parent.with_suffix(".between")
        own_directory.rename(temporary)
        kafka_directory.rename(own_directory)
        temporary.rename(kafka_directory)
        self.story.append("exchange")

    def start(self) -> None:
        self.open()
        # Like a returning leader: Kafka forgets an epoch without records, and logcore
        # does not.
        self.epoch()
        self.is_reopened = True
        if self.is_deleted:
            self.renew()

    def delete(self) -> None:
        start = self.log.log_start_offset
        end = self.log.log_end_offset
        self.is_deleted = True
        offset = min(start + self.rng.randrange(30), end + self.rng.randrange(2))
        self.run_on_both(
            lambda: self.log.delete_records(offset), "delete", offset=offset
        )
        self.retain()

    def truncate(self) -> None:
        candidates = [
            end
            for end in self.ends[-6:]
            if self.log.log_start_offset <= end <= self.log.log_end_offset
        ]
        if candidates:
            offset = self.rng.choice(candidates)
            self.run_on_both(
                lambda: self.log.truncate(offset), "truncate", offset=offset
            )
            self.ends = [end for end in self.ends if end <= offset]
            self.is_truncated = True
            # After a truncation by a follower, Kafka forgets an epoch without records.
            self.epoch()
            self.renew()

    def renew(self) -> None:
        """Continue with other producers. The remembered state of earlier producers
        depends on the existing snapshots.
        """
        self.sent.clear()
        for producer_id in [
            *self.log.host.writer.producers.known().open_transactions()
        ]:
            self.end(producer_id, self.epochs[producer_id], False, 4)
        self.first_producer += 8

    def retain(self) -> None:
        self.is_deleted = True
        result = self.run_on_both(lambda: self.log.retain(self.now_ms), "retain")
        assert result is not None

    def clean(self) -> None:
        result = self.run_on_both(lambda: None, "clean", memory=1 << 20)
        report = clean(self.log, now_ms=self.now_ms, force=True)
        assert (-1 if report is None else report.end_offset) == result["end"], (
            report,
            result,
        )

    # -- comparing

    def print_story(self) -> str:
        print("\n".join(self.story))
        return self.story[-1]

    def check(self) -> None:
        kafka_state = self.kafka.ask("state", path=self.kafka_path)
        del kafka_state["aborted"]
        own_state = state_of(self.log)
        for state in (own_state, kafka_state):
            if self.codecs != ["uncompressed"] and self.log.config.is_compacted:
                # Other libraries compress the same records to other sizes.
                del state["segments"]
            else:
                state["segments"] = [
                    # Kafka does not store which transactions below the log start were
                    # aborted, and no reader needs that. An empty segment has the time
                    # of its file.
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
        kafka_state["last_stable"] = max(
            kafka_state["last_stable"], kafka_state["log_start"]
        )
        self.is_unsure = False
        begun = [
            entry["open"]
            for state in (own_state, kafka_state)
            for entry in state["producers"].values()
            if entry["open"] >= 0
        ]
        if min(begun, default=own_state["log_start"]) < own_state["log_start"]:
            # If the first batches of a transaction are deleted, Kafka uses the state of
            # a snapshot, and logcore the remaining batches. After a restart, these
            # differ.
            self.is_unsure = True
            del own_state["last_stable"], kafka_state["last_stable"]
        if self.is_reopened:
            # Kafka's snapshot contains the last batch of a producer. logcore reads up
            # to five earlier batches from the log.
            for name, expected_producer in kafka_state["producers"].items():
                own = own_state["producers"].get(name, expected_producer)
                own["batches"] = own["batches"][
                    max(0, len(own["batches"]) - len(expected_producer["batches"])) :
                ]
        if (
            self.is_truncated
            or self.is_crashed
            or (self.is_deleted and self.is_reopened)
        ):
            # The remembered state of other producers then depends on the snapshots that
            # exist.
            own_state["producers"], kafka_state["producers"] = (
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
                for state in (own_state, kafka_state)
            )
        if own_state != kafka_state:
            pytest.fail(f"{diff(own_state, kafka_state)} {self.print_story()}")

    def is_below_start(self, base_offset: int) -> bool:
        return self.log.config.is_compacted and base_offset < self.log.log_start_offset

    def check_batches(self) -> None:
        kafka_values = self.kafka.ask("batches", path=self.kafka_path)["batches"]
        rows = [row_of(batch) for batch in self.log.batches(self.log.log_start_offset)]
        for row, other in zip(rows, kafka_values, strict=False):
            if row != other:
                pytest.fail(f"{row['base']} {diff(row, other)} {self.print_story()}")
        assert len(rows) == len(kafka_values)
        committed = [
            record.offset
            for record in self.log.read(
                self.log.log_start_offset, isolation="read_committed"
            )
        ]
        kafka_values = self.kafka.ask("committed", path=self.kafka_path)["offsets"]
        if not self.is_unsure:
            assert committed == kafka_values, self.print_story()
        times = [
            T0 + 500 * index
            for index in range(
                -5, (self.now_ms - T0) // 500 + 2, max(1, (self.now_ms - T0) // 10_000)
            )
        ]
        epochs = [*range(-1, self.log.leader_epoch + 2)]
        kafka_values = self.kafka.ask(
            "offsets", path=self.kafka_path, times=times, epochs=epochs
        )
        own_values: dict[str, Any] = {
            "times": [self.log.offset_for_timestamp(time) for time in times]
        }
        # Kafka may return the position of a marker, and logcore only of records.
        markers = {
            batch.base_offset
            for batch in self.log.batches(self.log.log_start_offset)
            if batch.is_control
        }
        for index, offset in enumerate(kafka_values["times"]):
            if offset in markers and (
                own_values["times"][index] is None
                or own_values["times"][index] > offset
            ):
                kafka_values["times"][index] = own_values["times"][index]
            # Kafka searches no further than a segment whose youngest record is deleted.
            if offset is None and (self.is_deleted or self.log.config.is_compacted):
                kafka_values["times"][index] = own_values["times"][index]
        own_values["ends"] = [[*self.log.end_of_epoch(epoch)] for epoch in epochs]
        if own_values != kafka_values:
            pytest.fail(
                f"{times} {epochs} {diff(own_values, kafka_values)} {self.print_story()}"
            )

    def check_files(self) -> None:
        """Compare the files when both are closed."""
        for path in (self.own_path, self.kafka_path):
            damaged_files = [
                verdict for verdict in verify(path) if verdict.status == "damaged"
            ]
            assert not damaged_files, (damaged_files, self.print_story())
        suffixes = (
            [".log", ".txnindex", ".index", ".timeindex"]
            if self.codecs == ["uncompressed"]
            else [".txnindex"]
        )
        # Kafka counts the bytes to the next index entry from this batch.
        if self.is_reopened or self.is_truncated:
            suffixes = suffixes[:2]
        for suffix in suffixes:
            own_content, kafka_content = (
                {path.name: path.read_bytes() for path in folder.glob("*" + suffix)}
                for folder in (self.own_path, self.kafka_path)
            )
            # The two partitions may differ in their empty files.
            own_content, kafka_content = (
                {
                    name: content
                    for name, content in entry.items()
                    if content and not self.is_below_start(int(name[:20]))
                }
                for entry in (own_content, kafka_content)
            )
            if suffix == ".txnindex":
                entries = [
                    {name: aborted_in(content) for name, content in entry.items()}
                    for entry in (own_content, kafka_content)
                ]
                own_content, kafka_content = entries
                if self.is_deleted or self.log.config.is_compacted:
                    # Kafka remembers transactions whose first batches, or all batches,
                    # are deleted. logcore returns the start of the remaining batches,
                    # and readers need no earlier start.
                    with logcore.open(self.own_path, read_only=True) as log:
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
                    own_content, kafka_content = ({"needed": rows} for rows in rows_of)
            if own_content != kafka_content:
                pytest.fail(
                    f"{suffix} {diff(own_content, kafka_content)} {self.print_story()}"
                )
        for path in sorted(self.own_path.iterdir()):
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
                    pytest.fail(f"{path.name} {options} {dumped} {self.print_story()}")


def aborted_in(content: bytes) -> list[tuple[int, ...]]:
    """Return the entries of a .txnindex file: (producer id, first offset, last offset,
    last stable offset).
    """
    return [fields[1:] for fields in struct.iter_unpack(">hqqqq", content)]


def diff(own: dict[str, Any], kafka: dict[str, Any]) -> dict[str, Any]:
    keys = [*own, *(key for key in kafka if key not in own)]
    differing: dict[str, Any] = {
        key: (own.get(key), kafka.get(key))
        for key in keys
        if own.get(key) != kafka.get(key)
    }
    for key, (first, other) in differing.items():
        if isinstance(first, dict) and isinstance(other, dict):
            differing[key] = diff(first, other)
    return differing


WEIGHTS = {
    "batch": 5, "sequenced": 10, "resend": 1, "marker": 5, "roll": 1, "epoch": 0.4, "wait": 1, "reopen": 0.5,
}  # fmt: skip


def run_chapters(pairs: PartitionPair, chapters: int, **weights: float) -> None:
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
    pairs: list[PartitionPair] = []

    def make(seed: int, **config: Any) -> PartitionPair:
        pairs.append(PartitionPair(kafka, tmp_path, monkeypatch, seed, **config))
        return pairs[-1]

    yield make
    for partition_pair in pairs:
        try:
            kafka.ask("close", path=partition_pair.kafka_path)
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
    "turns": (
        {"cleanup.policy": "compact"},
        {"clean": 1, "wait": 3, "swap_files": 0.7},
    ),
    "crashes": ({}, {"swap_files": 0.3, "crash": 0.7}),
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
    run_chapters(partition_pair, 6, **steps)
    partition_pair.close()
    partition_pair.check_files()


def test_producer_state_remains_after_its_batches_are_deleted(pairs: Any) -> None:
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
    partition_pair.run_on_both(
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
    run_chapters(partition_pair, 4, clean=0.5)
    partition_pair.close()
    at_offset = partition_pair.rng.randrange(partition_pair.ends[-1])
    with logcore.open_dir(partition_pair.own_path.parent, durability="os") as directory:
        directory.fork("t", at_offset, "forked")
        directory.snapshot(tmp_path / "backup")
    logcore.restore(tmp_path / "backup", tmp_path / "copy")
    for path in (tmp_path / "logcore" / "forked-0", tmp_path / "copy" / "t-0"):
        with logcore.open(path, config=partition_pair.config, durability="os") as log:
            own_state = state_of(log)
            rows = [row_of(batch) for batch in log.batches(0)]
        kafka.ask("open", path=path, config=partition_pair.config)
        kafka_state = kafka.ask("state", path=path)
        kafka_batches = kafka.ask("batches", path=path)["batches"]
        kafka.ask("close", path=path)
        assert rows == kafka_batches
        assert own_state["log_end"] == (
            at_offset if path.name == "forked-0" else partition_pair.log.log_end_offset
        )
        for name in ("log_start", "log_end", "last_stable", "epochs"):
            assert own_state[name] == kafka_state[name], name
        own_state, kafka_state = (
            {
                name: (producer["epoch"], producer["open"], producer["batches"][-1:])
                for name, producer in state["producers"].items()
            }
            for state in (own_state, kafka_state)
        )
        assert own_state == kafka_state


@pytest.mark.parametrize(("magic", "codec"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 3)])
def test_old_formats_are_read(
    kafka: Storage, tmp_path: Path, magic: int, codec: int
) -> None:
    """Kafka keeps the format, and logcore writes v2. The records are the same."""
    config = {**SMALL, "cleanup.policy": "compact"}
    for writer_name in ("logcore", "kafka"):
        folder = tmp_path / writer_name / "t-0"
        folder.mkdir(parents=True)
        (folder / f"{0:020d}.log").write_bytes(legacy(magic, codec))
        with logcore.open(folder, config=config, durability="os") as log:
            log.append(b"x", key=b"z", timestamp_ms=T0)
            log.roll()
    with logcore.open(tmp_path / "logcore" / "t-0", config=config) as log:
        report = clean(log, force=True)
    assert report is not None
    path = tmp_path / "kafka" / "t-0"
    kafka.ask("open", path=path, config=config)
    assert kafka.ask("clean", path=path, memory=1 << 20)["end"] == report.end_offset
    kafka.ask("close", path=path)
    rows = []
    for writer_name in ("logcore", "kafka"):
        path = tmp_path / writer_name / "t-0"
        kafka.ask("open", path=path, config=config)
        batch_rows = [
            record
            for batch in kafka.ask("batches", path=path)["batches"]
            for record in batch["records"]
        ]
        kafka.ask("close", path=path)
        with logcore.open(path, read_only=True) as log:
            assert [
                entry for batch in log.batches(0) for entry in row_of(batch)["records"]
            ] == batch_rows
        rows.append(batch_rows)
    assert rows[0] == rows[1] and 0 < len(rows[0]) < 41


def legacy(magic: int, codec: int) -> bytes:
    """Return 40 records of 10 keys as an old broker stored them: 4 records in each
    compressed wrapper, or no wrapper.
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
        encoded = bytearray(builder.build())
        # A wrapper has the offset of its last record. Its records have log offsets in v0,
        # and offsets from 0 in v1.
        if codec:
            encoded[:8] = (first + 3).to_bytes(8, "big")
        raw += encoded
    return raw


def test_compaction_creates_the_files_of_kafka_and_prints_the_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compact values of 100 bytes with keys of 16 bytes, of which one record in 10
    remains. The files must be equal. The test prints the times.
    """
    size = int(os.environ.get("LOGCORE_INTEROP_BYTES", str(256 << 20)))
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": 128 << 20,
        "file.delete.delay.ms": 0,
    }
    with logcore.open(
        tmp_path / "written" / "t-0", create=True, config=config, durability="os"
    ) as log:
        fill(log, size)
    maps: list[int] = []
    with Storage("-Xmx1g", "-XX:+UseParallelGC") as kafka:

        def clean_with_kafka(path: Path) -> float:
            kafka.ask("open", path=path, config=config)
            result = kafka.ask("clean", path=path)
            kafka.ask("close", path=path)
            return float(result["seconds"])

        def clean_with_logcore(path: Path) -> float:
            with logcore.open(path, config=config, durability="os") as log:
                start_s = time.perf_counter()
                report = clean(log, force=True)
                end_s = time.perf_counter()
            assert report is not None
            maps.append(report.map_bytes)
            return end_s - start_s

        def clean_copy(clean_directory: Callable[[Path], float], name: str) -> float:
            shutil.copytree(
                tmp_path / "written",
                tmp_path / name,
                ignore=shutil.ignore_patterns(".lock"),
            )
            return clean_directory(tmp_path / name / "t-0")

        times: dict[str, list[float]] = {
            "kafka": [clean_copy(clean_with_kafka, "warm-up")],
            "logcore": [],
        }
        for run in range(2):
            for name, clean_directory in (
                ("logcore", clean_with_logcore),
                ("kafka", clean_with_kafka),
            ):
                times[name].append(clean_copy(clean_directory, f"{name}{run}"))
    own_files, kafka_files = (
        {
            path.name: path.read_bytes()
            for path in (tmp_path / name / "t-0").glob("*.log")
        }
        for name in ("logcore1", "kafka1")
    )
    assert own_files == kafka_files
    tracemalloc.start()
    try:
        clean_copy(clean_with_logcore, "measured")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(maps) <= DEDUPE_BYTES and peak - maps[-1] < 32 << 20
    with capsys.disabled():
        own_s = min(times["logcore"])
        kafka_s = min(times["kafka"])
        print(
            f"\ncompaction of {size >> 20} MiB, 10 % live: Kafka {kafka_s:.2f} s, logcore {own_s:.2f} s, ",
            end="",
        )
        print(
            f"ratio {kafka_s / own_s:.2f}; offset map {maps[-1] >> 20} of {DEDUPE_BYTES >> 20} MiB, ",
            end="",
        )
        print(f"peak beyond it {(peak - maps[-1]) >> 20} MiB")


def fill(log: Log, size: int) -> None:
    """Append 10 records of each key, in random order."""
    keys = size // 1300
    keys_in_order = np.random.default_rng(1).permuted(np.repeat(np.arange(keys), 10))
    position = 0
    while position < len(keys_in_order):
        chunk = keys_in_order[position : position + 50_000]
        key_bytes = b"".join(b"%016d" % key for key in chunk)
        values = b"".join(b"%0100d" % (position + row) for row in range(len(chunk)))
        key_ends, value_ends = (
            np.arange(len(chunk) + 1, dtype=np.int64) * width for width in (16, 100)
        )
        log.append_columns(
            keys=(key_bytes, key_ends),
            values=(values, value_ends),
            timestamps_ms=np.full(len(chunk), T0),
        )
        position += len(chunk)
    log.roll()
