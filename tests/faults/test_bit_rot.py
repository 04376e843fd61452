"""Tests of bit rot: flipped bits, zeroed or swapped blocks, and files that are truncated,
missing or duplicated (T11, promise 3).

A reader of a damaged log gets the written records, or a typed error. The reader never gets
other records, and never fewer records without an error. An opening for writing may
truncate records above the recovery point, and then reports that.

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
from support.files import CODECS, FUTURE, T0, Files, own
from support.vectors import VECTORS

FLIPS = int(os.environ.get("LOGCORE_FLIPS", "50000"))
MANY = int(os.environ.get("LOGCORE_FLIPS", "100000000"))
SEED = int(os.environ.get("LOGCORE_TEST_SEED", "7"))


# -- batches ---------------------------------------------------------------------------


def batches() -> dict[str, bytes]:
    """Return batches of every codec and format, and control batches. Kafka and its clients
    wrote the vectors, and logcore writes larger batches.
    """
    found = {
        path.name: path.read_bytes()
        for path in sorted((VECTORS / "records").glob("*.bin"))
    }
    rng = random.Random(SEED)
    for codec in CODECS:
        rows = [
            (b"%d" % number, rng.randbytes(20) * 3, [("h", b"x")], T0 + number)
            for number in range(12)
        ]
        found[codec] = encode(rows, codec=codec, base_offset=7, leader_epoch=3)
    return found


def contents(data: bytes) -> list[Any]:
    """Return the offsets, times, keys, values and headers of the complete batches, and the
    control types.
    """
    at = 0
    found = []
    while at < len(data):
        batch = RecordBatch.parse(data, at)
        if batch is None:
            raise logcore.CorruptBatchError("incomplete", position=at)
        found += [tuple(record) for record in batch.records()]
        if batch.is_control:
            found.append(batch.control_type())
        at += batch.size_bytes
    return found


def without_offsets(found: list[Any]) -> list[Any]:
    return [name if isinstance(name, str) else name[1:] for name in found]


def batch_positions(data: bytes) -> list[int]:
    """Return the start position of each batch."""
    found = []
    at = 0
    while (batch := RecordBatch.parse(data, at)) is not None:
        found.append(at)
        at += batch.size_bytes
    return found


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
    every = [
        (name, [bit]) for name, data in samples.items() for bit in range(len(data) * 8)
    ]
    rng = random.Random(SEED)
    single = rng.sample(every, min(len(every), count * 9 // 10))

    def several() -> Iterator[tuple[str, list[int]]]:
        while True:
            name = rng.choice(CODECS)
            yield (
                name,
                rng.sample(range(17 * 8, len(samples[name]) * 8), rng.randrange(2, 6)),
            )

    refused = outside = 0
    for name, bits in itertools.islice(itertools.chain(single, several()), count):
        bad = bytearray(samples[name])
        for bit in bits:
            bad[bit // 8] ^= 1 << bit % 8
        at = bits[0] // 8 - max(head for head in heads[name] if head <= bits[0] // 8)
        outside += at < 17
        try:
            found = contents(bytes(bad))
        except logcore.LogcoreError:
            refused += 1
            continue
        assert at < 8 or 12 <= at < 16, (
            f"LOGCORE_TEST_SEED={SEED}: bits {bits} of {name} changed nothing that is seen"
        )
        assert without_offsets(found) == without_offsets(sound[name])
        assert at < 8 or found == sound[name]
    assert refused > count // 2
    print(
        f"\n{count} flips of batches: {refused} refused; {outside} in bytes that no CRC covers, which change no value"
    )


@pytest.mark.parametrize("way", ["read", "scan", "scan_typed"])
def test_flipped_control_bit_hides_no_record(
    way: str,
) -> None:
    """Readers skip control batches, and a batch with that bit flipped would be one."""
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open("/data/t-0", create=True, durability="os", fs=disk) as log:
        log.append(b"first", timestamp_ms=T0)
        log.append(b"second", timestamp_ms=T0)
        handle = disk.open(f"/data/t-0/{0:020d}.log", write=True)
        (attributes,) = disk.pread(handle, 1, 22)
        disk.pwrite(handle, bytes([attributes | layout.CONTROL_BIT]), 22)
        disk.close(handle)
        ways: dict[str, Callable[[], Any]] = {
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
            ways[way]()


# -- logs ------------------------------------------------------------------------------


def kafkas(name: str) -> Files:
    """Return files of Kafka with transactions, markers, an index of aborted transactions,
    snapshots and compacted batches.
    """
    disk = SimulatedDisk.load(VECTORS / f"partition-{name}")
    return {
        path if path.startswith("/") else f"/{path}": data
        for path, data in disk.files().items()
    }


def partition_in(files: Files) -> str:
    return os.path.dirname(next(path for path in files if path.endswith(".log")))


Answers = dict[str, Any]


def read_through(log: logcore.Log) -> Answers:
    start = log.log_start_offset
    return {
        "read": lambda: list(log.read(start)),
        "columns": lambda: [
            record for columns in log.scan() for record in columns.records()
        ],
        "committed": lambda: list(log.read(start, isolation="read_committed")),
    }


def look_up(log: logcore.Log) -> Answers:
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


def answers(
    files: Files, questions: Callable[[logcore.Log], Answers], *, read_only: bool
) -> Answers:
    """Open a log, and return its answers by name, LogcoreError for a question that raises.

    "cut" is the number of bytes that the opening reports as truncated. Raises LogcoreError
    if the log cannot be opened.
    """
    disk = SimulatedDisk(files, now_ms=T0)
    found: Answers = {}
    with logcore.open(partition_in(files), read_only=read_only, fs=disk) as log:
        report = log.recovery_report
        found["cut"] = report.cut_bytes if report is not None else 0
        for name, ask in questions(log).items():
            try:
                found[name] = ask()
            except logcore.LogcoreError:
                found[name] = logcore.LogcoreError
    return found


def check(
    sound: Answers,
    files: Files,
    questions: Callable[[logcore.Log], Answers],
    *,
    read_only: bool,
) -> str:
    """Compare the answers of a damaged log with the answers of the complete log.

    Return "same", "cut" or "error". Any other result fails the test.
    """
    try:
        found = answers(files, questions, read_only=read_only)
    except logcore.LogcoreError:
        return "error"
    wrong = {
        name
        for name in sound
        if name != "cut" and found.get(name, logcore.LogcoreError) != sound[name]
    }
    refused = {
        name
        for name in wrong
        if found.get(name, logcore.LogcoreError) is logcore.LogcoreError
    }
    if found["cut"]:
        read = found.get("read", logcore.LogcoreError)
        assert read is logcore.LogcoreError or read == sound["read"][: len(read)]
        return "cut"
    assert wrong == refused, f"other answers and no error: {sorted(wrong - refused)}"
    return "error" if wrong else "same"


#: Kafka's checkpoint of the log start has no CRC, and records which offsets were
#: deleted: its rot may be visible.
EXEMPT = (checkpoint.LOG_START,)
#: One whole log is opened per this number of flips of single batches.
SHARE = 800


def flips(files: Files, count: int) -> Iterator[tuple[str, int]]:
    """Yield bits to flip, each once. Half of the bits are in heads of batches."""
    heads = []
    others = []
    for path, data in files.items():
        if os.path.basename(path) not in EXEMPT:
            inside = (
                {
                    bit
                    for at in batch_positions(data)
                    for bit in range(at * 8, at * 8 + 488)
                }
                if ".log" in path
                else set()
            )
            heads += [(path, bit) for bit in sorted(inside)]
            others += [(path, bit) for bit in range(len(data) * 8) if bit not in inside]
    rng = random.Random(SEED)
    for bits in (heads, others):
        yield from rng.sample(bits, min(len(bits), count // 2))


def large_damages(files: Files, count: int) -> Iterator[tuple[str, Files]]:
    """Yield files with larger damage: zeroed or swapped blocks, and files that are
    truncated, missing, or replaced by the content of another file.
    """
    rng = random.Random(SEED)
    paths = [path for path in files if os.path.basename(path) not in EXEMPT]
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
    cuts = [(path, size) for path in paths for size in range(len(files[path]))]
    for path, size in rng.sample(cuts, min(count, len(cuts))):
        yield f"{path} cut at {size}", {**files, path: files[path][:size]}
    for size, path, other in itertools.product((512, 4096), logs, logs):
        for at, to in itertools.product(
            range(0, len(files[path]), size), range(0, len(files[other]), size)
        ):
            bad = {name: bytearray(data) for name, data in files.items()}
            block = (
                bytes(size)
                if (path, at) == (other, to)
                else files[path][at : at + size]
            )
            bad[other][to : to + size] = block
            if (path, at) != (other, to):
                bad[path][at : at + size] = files[other][to : to + size]
            yield (
                f"{size} bytes at {at} of {path} and {to} of {other}",
                {n: bytes(data) for n, data in bad.items()},
            )


def turned(files: Files, count: int) -> Iterator[tuple[str, Files]]:
    for path, bit in flips(files, count):
        bad = bytearray(files[path])
        bad[bit // 8] ^= 1 << bit % 8
        yield f"byte {bit // 8}, bit {bit % 8} of {path}", {**files, path: bytes(bad)}


@pytest.mark.parametrize("read_only", [True, False], ids=["read", "written"])
@pytest.mark.parametrize(
    ("questions", "damages"),
    [
        pytest.param(read_through, turned, id="read-bits"),
        pytest.param(read_through, large_damages, id="read-large_damages"),
        pytest.param(look_up, turned, id="lookup-bits"),
    ],
)
@pytest.mark.parametrize(
    "count", [FLIPS // SHARE, pytest.param(MANY // SHARE, marks=pytest.mark.slow)]
)
def test_damage_of_a_log_of_logcore_is_detected(
    questions: Any, damages: Any, read_only: bool, count: int
) -> None:
    files = own()
    sound = answers(files, questions, read_only=read_only)
    met = {"same": 0, "error": 0, "cut": 0}
    silent = []
    for what, bad in damages(files, count):
        try:
            met[check(sound, bad, questions, read_only=read_only)] += 1
        except AssertionError as error:
            silent.append(f"{what}: {error}")
    print(f"\n{met}, {len(silent)} silent")
    assert not silent, "\n".join(silent)[:3000]


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
        for at, behind in itertools.pairwise(heads):
            yield f"{path} cut at {at}", {**files, path: raw[:at]}
            yield (
                f"{path} without its batch at {at}",
                {**files, path: raw[:at] + raw[behind:]},
            )


def everything(log: logcore.Log) -> Answers:
    """Return a function for each query of a reader."""
    start = log.log_start_offset
    end = log.high_watermark
    times = range(T0 - 5, T0 + 500, 35)
    return {
        **read_through(log),
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
    """Return stored batches as several requests of a client would."""
    found = b""
    while start < end:
        part = b"".join(log.stored(start, max_bytes=300))
        start = [batch.next_offset for batch in read_batches(part)][-1]
        found += part
    return found


def _sent(log: logcore.Log, offset: int) -> bytes:
    return b"".join(log.stored(offset, max_bytes=1))


@pytest.mark.long
@pytest.mark.parametrize("read_only", [True, False], ids=["read", "written"])
@pytest.mark.parametrize("made", [own, compacted, transactional])
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_missing_batch_or_segment_is_detected(
    made: Callable[[], Files], read_only: bool, step: int
) -> None:
    """Every question to a log with missing parts returns the answer of the complete log,
    or raises an error.
    """
    files = made()
    sound = answers(files, everything, read_only=read_only)
    assert logcore.LogcoreError not in [
        sound[name] for name in ("read", "columns", "stable", "stored")
    ]
    silent = []
    for what, bad in itertools.islice(losses(files), read_only % step, None, step):
        try:
            check(sound, bad, everything, read_only=read_only)
        except AssertionError as error:
            silent.append(f"{what}: {error}")
    assert not silent, "\n".join(silent)[:3000]


@pytest.mark.long
@pytest.mark.parametrize("read_only", [True, False], ids=["read", "written"])
@pytest.mark.parametrize("damages", [turned, large_damages])
@pytest.mark.parametrize("name", ["clean", "crash", "compact-after"])
def test_damage_of_a_log_of_kafka_changes_no_value(
    name: str, damages: Any, read_only: bool
) -> None:
    """Offsets of Kafka's logs may have gaps, so a larger offset at the end is
    indistinguishable from a valid offset. Wrong values are detectable.
    """
    files = kafkas(name)
    sound = answers(files, read_through, read_only=read_only)
    known = {entry[1:] for entry in sound["read"]}
    for what, bad in damages(files, FLIPS // SHARE // 2):
        try:
            found = answers(bad, read_through, read_only=read_only)
        except logcore.LogcoreError:
            continue
        for question in ("read", "columns"):
            if found[question] is not logcore.LogcoreError:
                assert {entry[1:] for entry in found[question]} <= known, what


# -- small files -----------------------------------------------------------------------


def of_topics(files: Files) -> Any:
    with logcore.open_dir("/data", fs=SimulatedDisk(files, now_ms=T0)) as directory:
        log = directory.partition("t", 0)
        return directory.topics(), log.config, directory.host.next_producer_id() >= 1000


def of_snapshot(files: Files) -> Any:
    """Append a batch that is stored already. The log detects the duplicate, with the state
    from a snapshot or from the batches.
    """
    last = encode(
        [(b"k", b"v", (), FUTURE)] * 2, producer_id=0, producer_epoch=0, base_sequence=8
    )
    with logcore.open("/data/t-0", fs=SimulatedDisk(files, now_ms=T0)) as log:
        return log.append_batch(last).offset


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ask"),
    [
        (checkpoint.TOPICS, of_topics),
        (checkpoint.PRODUCER_IDS, of_topics),
        ("meta.properties", of_topics),
        (checkpoint.RECOVERY_POINT, of_topics),
        (checkpoint.POLICY, of_topics),
        (checkpoint.LEADER_EPOCH, of_topics),
        (f"{40:020d}.snapshot", of_snapshot),
        (f"{32:020d}.snapshot", of_snapshot),
    ],
)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bit_in_a_small_file_is_refused_or_harmless(
    name: str, ask: Callable[[Files], Any], step: int
) -> None:
    files = own()
    sound = ask(files)
    (path,) = (path for path in files if os.path.basename(path) == name)
    for bit in range(0, len(files[path]) * 8, step):
        bad = bytearray(files[path])
        bad[bit // 8] ^= 1 << bit % 8
        try:
            found = ask({**files, path: bytes(bad)})
        except logcore.LogcoreError:
            continue
        assert found == sound, bit
