"""Tests of bit rot: flipped bits, zeroed or swapped blocks, and files that are truncated,
missing or duplicated (T11, promise 3).

A reader of a damaged log gets the written records, or a typed error. It never gets
other records, and never fewer records without an error. An opening for writing may
truncate records above the recovery point, and then reports the truncation.

A CRC covers a batch from its attributes on. It does not cover base offset, length, leader
epoch and magic, which are 17 of the 61 bytes of a head, and get less than 4 % of the flips
in the logs. A wrong length or magic is detected without the CRC, the epoch changes no
record, and offsets are compared with the offsets of neighbouring batches.

LOGCORE_FLIPS sets how many bits are flipped: 50,000 by default, 100,000,000 in `make
slow`.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import logcore
from logcore.kernels import layout
from logcore.metadata import checkpoint
from logcore.reader import aborted_transactions, typed_columns
from logcore.recordbatch import RecordBatch, encode, read_batches
from logcore.testing import SimulatedDisk
from support.files import CODECS, FUTURE, T0, Files, closed_directory
from support.vectors import VECTORS

FLIPS = int(os.environ.get("LOGCORE_FLIPS", "50000"))
MANY = int(os.environ.get("LOGCORE_FLIPS", "100000000"))
SEED = int(os.environ.get("LOGCORE_TEST_SEED", "7"))


# -- batches ---------------------------------------------------------------------------


def batches() -> dict[str, bytes]:
    """Return batches of every codec and format, and control batches. Kafka and its clients
    wrote the vectors, and logcore writes larger batches.
    """
    samples = {
        path.name: path.read_bytes()
        for path in sorted((VECTORS / "records").glob("*.bin"))
    }
    rng = random.Random(SEED)
    for codec in CODECS:
        rows = [
            (b"%d" % number, rng.randbytes(20) * 3, [("h", b"x")], T0 + number)
            for number in range(12)
        ]
        samples[codec] = encode(rows, codec=codec, base_offset=7, leader_epoch=3)
    return samples


def contents(data: bytes) -> list[Any]:
    """Return the offsets, times, keys, values and headers of the complete batches, and the
    control types.
    """
    position = 0
    items = []
    while position < len(data):
        batch = RecordBatch.parse(data, position)
        if batch is None:
            raise logcore.CorruptBatchError("incomplete", position=position)
        items += [tuple(record) for record in batch.records()]
        if batch.is_control:
            items.append(batch.control_type())
        position += batch.size_bytes
    return items


def without_offsets(items: list[Any]) -> list[Any]:
    return [name if isinstance(name, str) else name[1:] for name in items]


def batch_positions(data: bytes) -> list[int]:
    """Return the start position of each batch."""
    positions = []
    position = 0
    while (batch := RecordBatch.parse(data, position)) is not None:
        positions.append(position)
        position += batch.size_bytes
    return positions


@pytest.mark.long
@pytest.mark.parametrize(
    "count",
    [FLIPS, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(36000)])],
)
def test_flipped_bit_in_batch_is_detected(count: int) -> None:
    """Flip each bit, or a sample of `count` bits. Then flip several bits at once in the
    part that the CRC covers.
    """
    samples = batches()
    sound = {name: contents(data) for name, data in samples.items()}
    heads = {name: batch_positions(data) for name, data in samples.items()}
    flips = [
        (name, [bit]) for name, data in samples.items() for bit in range(len(data) * 8)
    ]
    rng = random.Random(SEED)
    single_bits = rng.sample(flips, min(len(flips), count * 9 // 10))

    def several_bits() -> Iterator[tuple[str, list[int]]]:
        while True:
            name = rng.choice(CODECS)
            yield (
                name,
                rng.sample(range(17 * 8, len(samples[name]) * 8), rng.randrange(2, 6)),
            )

    refused_count = outside_count = 0
    for name, bits in itertools.islice(
        itertools.chain(single_bits, several_bits()), count
    ):
        damaged_data = bytearray(samples[name])
        for bit in bits:
            damaged_data[bit // 8] ^= 1 << bit % 8
        position_in_batch = bits[0] // 8 - max(
            head for head in heads[name] if head <= bits[0] // 8
        )
        outside_count += position_in_batch < 17
        try:
            items = contents(bytes(damaged_data))
        except logcore.LogcoreError:
            refused_count += 1
            continue
        assert position_in_batch < 8 or 12 <= position_in_batch < 16, (
            f"LOGCORE_TEST_SEED={SEED}: bits {bits} of {name} had no visible effect"
        )
        assert without_offsets(items) == without_offsets(sound[name])
        assert position_in_batch < 8 or items == sound[name]
    assert refused_count > count // 2
    print(
        f"\n{count} flips of batches: {refused_count} refused; {outside_count} in bytes that no CRC covers"
    )


@pytest.mark.parametrize("method", ["read", "scan", "scan_typed"])
def test_flipped_control_bit_hides_no_record(
    method: str,
) -> None:
    """Readers skip control batches. A flipped bit makes a control batch of any
    batch.
    """
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open("/data/t-0", create=True, durability="os", fs=disk) as log:
        log.append(b"first", timestamp_ms=T0)
        log.append(b"second", timestamp_ms=T0)
        handle = disk.open(f"/data/t-0/{0:020d}.log", write=True)
        (attributes,) = disk.pread(handle, 1, 22)
        disk.pwrite(handle, bytes([attributes | layout.CONTROL_BIT]), 22)
        disk.close(handle)
        methods: dict[str, Callable[[], Any]] = {
            "read": lambda: list(log.read(0)),
            "scan": lambda: list(log.scan()),
            "scan_typed": lambda: list(
                typed_columns(
                    log,
                    0,
                    2,
                    isolation="read_uncommitted",
                    rows=100,
                    size_bytes=1 << 20,
                )
            ),
        }
        with pytest.raises(logcore.CorruptBatchError):
            methods[method]()


# -- logs ------------------------------------------------------------------------------


def kafka_files(name: str) -> Files:
    """Return files of Kafka with transactions, markers, an index of aborted transactions,
    snapshots and compacted batches.
    """
    disk = SimulatedDisk.load(VECTORS / f"partition-{name}")
    return {
        path if path.startswith("/") else f"/{path}": data
        for path, data in disk.files().items()
    }


def partition_path(files: Files) -> str:
    return os.path.dirname(next(path for path in files if path.endswith(".log")))


QueryResults = dict[str, Any]


def full_reads(log: logcore.Log) -> QueryResults:
    start = log.log_start_offset
    return {
        "read": lambda: list(log.read(start)),
        "columns": lambda: [
            record for columns in log.scan() for record in columns.records()
        ],
        "committed": lambda: list(log.read(start, isolation="read_committed")),
    }


def lookups(log: logcore.Log) -> QueryResults:
    times = [T0 + 13 * number for number in range(12)] + [
        FUTURE + 13 * number for number in range(12)
    ]
    return {
        **{
            f"get {offset}": lambda offset=offset: log.get(offset)
            for offset in range(log.log_start_offset, 32)
        },
        **{
            f"at {time}": lambda time=time: log.offset_for_timestamp(time)
            for time in times
        },
    }


def query_results(
    files: Files,
    make_queries: Callable[[logcore.Log], QueryResults],
    *,
    read_only: bool,
) -> QueryResults:
    """Open a log, and return the result of each query by its name.

    The result of a query that raises an error is LogcoreError. "cut" is the number of
    bytes that the opening truncated. Raises LogcoreError if the opening fails.
    """
    disk = SimulatedDisk(files, now_ms=T0)
    results: QueryResults = {}
    with logcore.open(partition_path(files), read_only=read_only, fs=disk) as log:
        report = log.recovery_report
        results["cut"] = report.cut_bytes if report is not None else 0
        for name, query in make_queries(log).items():
            try:
                results[name] = query()
            except logcore.LogcoreError:
                results[name] = logcore.LogcoreError
    return results


def compare(
    sound: QueryResults,
    files: Files,
    make_queries: Callable[[logcore.Log], QueryResults],
    *,
    read_only: bool,
) -> str:
    """Compare the query results of a damaged log with the results of the sound log.

    Return "same", "cut" or "error". Any other result fails the test.
    """
    try:
        results = query_results(files, make_queries, read_only=read_only)
    except logcore.LogcoreError:
        return "error"
    different = {
        name
        for name in sound
        if name != "cut" and results.get(name, logcore.LogcoreError) != sound[name]
    }
    failed = {
        name
        for name in different
        if results.get(name, logcore.LogcoreError) is logcore.LogcoreError
    }
    if results["cut"]:
        read = results.get("read", logcore.LogcoreError)
        assert read is logcore.LogcoreError or read == sound["read"][: len(read)]
        return "cut"
    assert different == failed, (
        f"other results without an error: {sorted(different - failed)}"
    )
    return "error" if different else "same"


#: Kafka's checkpoint of the log start has no CRC. Its rot may have a visible effect.
UNPROTECTED_FILES = (checkpoint.LOG_START,)
#: Number of flips in single batches for each opening of a log.
FLIPS_PER_OPENING = 800


def flips(files: Files, count: int) -> Iterator[tuple[str, int]]:
    """Yield bits to flip, each once. Half of the bits are in batch headers."""
    header_bits = []
    other_bits = []
    for path, data in files.items():
        if os.path.basename(path) not in UNPROTECTED_FILES:
            bits_of_headers = (
                {
                    bit
                    for position in batch_positions(data)
                    for bit in range(position * 8, position * 8 + 488)
                }
                if ".log" in path
                else set()
            )
            header_bits += [(path, bit) for bit in sorted(bits_of_headers)]
            other_bits += [
                (path, bit)
                for bit in range(len(data) * 8)
                if bit not in bits_of_headers
            ]
    rng = random.Random(SEED)
    for bits in (header_bits, other_bits):
        yield from rng.sample(bits, min(len(bits), count // 2))


def large_damages(files: Files, count: int) -> Iterator[tuple[str, Files]]:
    """Yield files with larger damage: zeroed or swapped blocks, and files that are
    truncated, missing, or replaced by the content of another file.
    """
    rng = random.Random(SEED)
    paths = [path for path in files if os.path.basename(path) not in UNPROTECTED_FILES]
    logs = [path for path in files if path.endswith(".log")]
    for path in paths:
        yield (
            f"without {path}",
            {other: data for other, data in files.items() if other != path},
        )
        for other in paths:
            if (
                path != other
                and os.path.splitext(path)[1] == os.path.splitext(other)[1] != ""
            ):
                yield f"{other} as {path}", {**files, path: files[other]}
    truncations = [(path, size) for path in paths for size in range(len(files[path]))]
    for path, size in rng.sample(truncations, min(count, len(truncations))):
        yield f"{path} cut at {size}", {**files, path: files[path][:size]}
    for size, path, other in itertools.product((512, 4096), logs, logs):
        for position, other_position in itertools.product(
            range(0, len(files[path]), size), range(0, len(files[other]), size)
        ):
            changed_files = {name: bytearray(data) for name, data in files.items()}
            block = (
                bytes(size)
                if (path, position) == (other, other_position)
                else files[path][position : position + size]
            )
            changed_files[other][other_position : other_position + size] = block
            if (path, position) != (other, other_position):
                changed_files[path][position : position + size] = files[other][
                    other_position : other_position + size
                ]
            yield (
                f"{size} bytes at {position} of {path} and {other_position} of {other}",
                {name: bytes(data) for name, data in changed_files.items()},
            )


def flipped_bits(files: Files, count: int) -> Iterator[tuple[str, Files]]:
    for path, bit in flips(files, count):
        damaged_data = bytearray(files[path])
        damaged_data[bit // 8] ^= 1 << bit % 8
        yield (
            f"byte {bit // 8}, bit {bit % 8} of {path}",
            {**files, path: bytes(damaged_data)},
        )


@pytest.mark.parametrize("read_only", [True, False], ids=["read", "written"])
@pytest.mark.parametrize(
    ("make_queries", "damages"),
    [
        pytest.param(full_reads, flipped_bits, id="read-bits"),
        pytest.param(full_reads, large_damages, id="read-large_damages"),
        pytest.param(lookups, flipped_bits, id="lookup-bits"),
    ],
)
@pytest.mark.parametrize(
    "count",
    [
        FLIPS // FLIPS_PER_OPENING,
        pytest.param(MANY // FLIPS_PER_OPENING, marks=pytest.mark.slow),
    ],
)
def test_damage_of_a_log_of_logcore_is_detected(
    make_queries: Any, damages: Any, read_only: bool, count: int
) -> None:
    files = closed_directory()
    sound = query_results(files, make_queries, read_only=read_only)
    counts = {"same": 0, "error": 0, "cut": 0}
    undetected = []
    for description, changed_files in damages(files, count):
        try:
            counts[
                compare(sound, changed_files, make_queries, read_only=read_only)
            ] += 1
        except AssertionError as error:
            undetected.append(f"{description}: {error}")
    print(f"\n{counts}, {len(undetected)} undetected")
    assert not undetected, "\n".join(undetected)[:3000]


def compacted() -> Files:
    """Return a log of logcore with several compacted segments, and newer segments that
    were not compacted.
    """
    disk = SimulatedDisk(now_ms=T0)
    config = {"cleanup.policy": "compact", "segment.bytes": 700}
    with logcore.open("/data/t-0", create=True, config=config, fs=disk) as log:
        for number in range(30):
            log.append(
                b"old %d" % number * 4,
                key=b"key %d" % (number % 11),
                timestamp_ms=T0 + number * 10,
            )
        log.roll()
        logcore.clean(log, force=True)
        for number in range(30, 50):
            log.append(
                b"new %d" % number * 4,
                key=b"key %d" % number,
                timestamp_ms=T0 + number * 10,
            )
    return disk.files()


def transactional() -> Files:
    """Return a log of logcore with committed, aborted and open transactions in several
    segments.
    """
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open("/data/t-0", create=True, fs=disk) as log:
        for number in range(9):
            rows = [(b"k", b"transaction %d" % number, (), T0 + number * 10)]
            log.append_batch(
                encode(
                    rows,
                    producer_id=1,
                    producer_epoch=0,
                    base_sequence=number,
                    transactional=True,
                )
            )
            if number % 3 == 2:
                log.roll()  # the marker comes in the next segment
            if number < 8:
                log.end_transaction(1, 0, commit=number % 2 == 0)
            if number % 3 == 0:
                log.roll()
    return disk.files()


def losses(files: Files) -> Iterator[tuple[str, Files]]:
    """Yield files in which a segment is missing, with or without its other files, is empty,
    lacks a batch, or ends before a batch.
    """
    for path in sorted(path for path in files if path.endswith(".log")):
        raw = files[path]
        stem = path.removesuffix(".log")
        yield (
            f"without {path}",
            {name: data for name, data in files.items() if name != path},
        )
        yield (
            f"without {stem}.*",
            {name: data for name, data in files.items() if not name.startswith(stem)},
        )
        yield f"{path} emptied", {**files, path: b""}
        heads = [*batch_positions(raw), len(raw)]
        for position, next_position in itertools.pairwise(heads):
            yield f"{path} cut at {position}", {**files, path: raw[:position]}
            yield (
                f"{path} without its batch at {position}",
                {**files, path: raw[:position] + raw[next_position:]},
            )


def all_queries(log: logcore.Log) -> QueryResults:
    """Return a function for each query of a reader."""
    start = log.log_start_offset
    end = log.high_watermark
    times = range(T0 - 5, T0 + 500, 35)
    return {
        **full_reads(log),
        "newest": log.newest,
        "stored": lambda: _fetched(log, start, end),
        "stable": lambda: log.last_stable_offset,
        "aborted": lambda: aborted_transactions(log, start, end),
        **{
            f"get {offset}": lambda offset=offset: log.get(offset)
            for offset in range(start, end)
        },
        **{
            f"from {offset}": lambda offset=offset: next(log.read(offset))
            for offset in range(start, end)
        },
        **{
            f"sent from {offset}": lambda offset=offset: _sent(log, offset)
            for offset in range(start, end)
        },
        **{
            f"at {time}": lambda time=time: log.offset_for_timestamp(time)
            for time in times
        },
    }


def _fetched(log: logcore.Log, start: int, end: int) -> bytes:
    """Return stored batches as several fetch requests do."""
    fetched = b""
    while start < end:
        chunk = b"".join(log.stored(start, max_bytes=300))
        start = [batch.next_offset for batch in read_batches(chunk)][-1]
        fetched += chunk
    return fetched


def _sent(log: logcore.Log, offset: int) -> bytes:
    return b"".join(log.stored(offset, max_bytes=1))


@pytest.mark.long
@pytest.mark.parametrize("read_only", [True, False], ids=["read", "written"])
@pytest.mark.parametrize("make_files", [closed_directory, compacted, transactional])
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_missing_batch_or_segment_is_detected(
    make_files: Callable[[], Files], read_only: bool, step: int
) -> None:
    """Every query of a log with missing parts returns the result of the complete log,
    or raises an error.
    """
    files = make_files()
    sound = query_results(files, all_queries, read_only=read_only)
    assert logcore.LogcoreError not in [
        sound[name] for name in ("read", "columns", "stable", "stored")
    ]
    undetected = []
    for description, changed_files in itertools.islice(
        losses(files), read_only % step, None, step
    ):
        try:
            compare(sound, changed_files, all_queries, read_only=read_only)
        except AssertionError as error:
            undetected.append(f"{description}: {error}")
    assert not undetected, "\n".join(undetected)[:3000]


@pytest.mark.long
@pytest.mark.parametrize("read_only", [True, False], ids=["read", "written"])
@pytest.mark.parametrize("damages", [flipped_bits, large_damages])
@pytest.mark.parametrize("name", ["clean", "crash", "compact-after"])
def test_damage_of_a_log_of_kafka_changes_no_value(
    name: str, damages: Any, read_only: bool
) -> None:
    """Offsets of Kafka's logs may have gaps, so that a larger offset at the end may be
    valid. Wrong values are detectable.
    """
    files = kafka_files(name)
    sound = query_results(files, full_reads, read_only=read_only)
    known_values = {record[1:] for record in sound["read"]}
    for description, changed_files in damages(files, FLIPS // FLIPS_PER_OPENING // 2):
        try:
            results = query_results(changed_files, full_reads, read_only=read_only)
        except logcore.LogcoreError:
            continue
        for query in ("read", "columns"):
            if results[query] is not logcore.LogcoreError:
                assert {record[1:] for record in results[query]} <= known_values, (
                    description
                )


# -- small files -----------------------------------------------------------------------


def read_topics(files: Files) -> Any:
    with logcore.open_dir("/data", fs=SimulatedDisk(files, now_ms=T0)) as directory:
        log = directory.partition("t", 0)
        return directory.topics(), log.config, directory.host.next_producer_id() >= 1000


def append_duplicate(files: Files) -> Any:
    """Append a stored batch again. The log detects the duplicate, with the producer
    state of a snapshot or of the batches.
    """
    last = encode(
        [(b"k", b"v", (), FUTURE)] * 2, producer_id=0, producer_epoch=0, base_sequence=8
    )
    with logcore.open("/data/t-0", fs=SimulatedDisk(files, now_ms=T0)) as log:
        return log.append_batch(last).offset


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "read"),
    [
        (checkpoint.TOPICS, read_topics),
        (checkpoint.PRODUCER_IDS, read_topics),
        ("meta.properties", read_topics),
        (checkpoint.RECOVERY_POINT, read_topics),
        (checkpoint.POLICY, read_topics),
        (checkpoint.LEADER_EPOCH, read_topics),
        (f"{40:020d}.snapshot", append_duplicate),
        (f"{32:020d}.snapshot", append_duplicate),
    ],
)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bit_in_a_small_file_is_refused_or_harmless(
    name: str, read: Callable[[Files], Any], step: int
) -> None:
    files = closed_directory()
    expected = read(files)
    (path,) = (path for path in files if os.path.basename(path) == name)
    for bit in range(0, len(files[path]) * 8, step):
        damaged_data = bytearray(files[path])
        damaged_data[bit // 8] ^= 1 << bit % 8
        try:
            result = read({**files, path: bytes(damaged_data)})
        except logcore.LogcoreError:
            continue
        assert result == expected, bit
