"""Tests that every decoder raises only errors of the library for damaged bytes, and uses
limited memory.

The tests change valid samples: bits, bytes, truncations, splices, repeats, and wrong
lengths. A decoder that checks a CRC would refuse nearly all of these, so seven in ten get
a correct CRC afterwards. A child process with a limited address space runs the decoders. A
decoder that exceeds the limit, or hangs, fails the test. Inputs that failed earlier are in
tests/data/fuzz, named `<decoder>-<what>.bin`, and run each time.

LOGCORE_FUZZ is the number of inputs: 15,000 by default, 50,000,000 in `make slow`. A
failure prints the decoder, the seed and the input, and writes the input to a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import re
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

import logcore
from logcore import recordbatch
from logcore.config import LogConfig
from logcore.coordinators import stored_offsets
from logcore.directory.group_settings import GroupSettings
from logcore.format import group_records
from logcore.format.compression import Codec, compress, decompress
from logcore.format.group_settings import SESSION_TIMEOUT
from logcore.inspect.dump import DUMPERS, dump
from logcore.kernels import kernel
from logcore.metadata import checkpoint
from logcore.metadata.filenames import file_name
from logcore.partition.producers import Producers
from logcore.recordbatch import read_batches
from logcore.staging.manifest import Manifest, StagedFile, read_state
from logcore.testing import SimulatedDisk
from netshim import wire
from support import group_messages
from support.files import closed_directory
from support.messages import MESSAGES, draw, encode
from support.vectors import DATA

EXECUTIONS = int(os.environ.get("LOGCORE_FUZZ", "15000"))
MANY = int(os.environ.get("LOGCORE_FUZZ", "50000000"))
SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or None
#: Address space in addition to the size at the start: twice the limit of decompressed
#: bytes, and the same size for their records.
MEMORY_BYTES = 256 << 20

Decoder = Callable[[bytes], object]


# -- changes ---------------------------------------------------------------------------

NUMBERS = [
    0,
    1,
    -1,
    2,
    127,
    128,
    255,
    256,
    32767,
    -32768,
    65535,
    1 << 20,
    (1 << 31) - 1,
    -1 << 31,
    (1 << 63) - 1,
    -1 << 63,
]
VARINTS = [
    b"\xff\xff\xff\xff\x0f",
    b"\xfe\xff\xff\xff\x0f",
    b"\x80" * 9 + b"\x01",
    b"\x80\x80\x80",
    b"\x01",
    b"\xff" * 11,
]


def mutate(rng: random.Random, samples: list[bytes]) -> bytes:
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8))):
        position = rng.randrange(len(data) + 1)
        match rng.randrange(9):
            case 0 | 1 if data:
                data[position - 1] ^= 1 << rng.randrange(8)
            case 2:
                data[position : position + 1] = rng.randbytes(1)
            case 3:
                del data[position:]
            case 4:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
                data[position : position + size] = number.to_bytes(
                    size, rng.choice(("big", "big", "little"))
                )
            case 5:
                varint = rng.choice(VARINTS)
                data[position : position + rng.choice((1, len(varint)))] = varint
            case 6:
                other = rng.choice(samples)
                start = rng.randrange(len(other) + 1)
                data[position : position + rng.choice((0, 40))] = other[
                    start : start + rng.randrange(80)
                ]
            case 7:
                data[position:position] = data[
                    position : position + rng.randrange(40)
                ] * rng.choice((1, 2, 50))
            case 8:
                del data[position : position + rng.randrange(1, 20)]
    return bytes(data[: 1 << 16])


def with_batch_crc(data: bytes) -> bytes:
    """Return the data with a correct length and CRC in its first batch."""
    raw = bytearray(data)
    if len(raw) > 26:
        raw[8:12] = (len(raw) - 12).to_bytes(4, "big")
        if raw[16] == 2:
            raw[17:21] = crc32c(raw[21:]).to_bytes(4, "big")
        else:
            raw[12:16] = zlib.crc32(raw[16:]).to_bytes(4, "big")
    return bytes(raw)


def with_line_crc(data: bytes) -> bytes:
    """Return the first line of the data with a correct CRC, as in a manifest."""
    text = data.partition(b"\n")[0].partition(b" ")[2]
    return b"%08x %s\n" % (zlib.crc32(text), text)


def with_snapshot_crc(data: bytes) -> bytes:
    return data[:2] + crc32c(data[6:]).to_bytes(4, "big") + data[6:]


def with_seal_crc(data: bytes) -> bytes:
    text = data.rpartition(b" ")[0]
    return b"%s %08x\n" % (text, zlib.crc32(text))


# -- decoders --------------------------------------------------------------------------


def read_all(data: bytes) -> None:
    for batch in read_batches(data):
        for decode in (
            batch.records,
            batch.control_type,
            lambda batch=batch: batch.columns().keys(),
        ):
            try:
                decode()
            except logcore.LogcoreError:
                pass
        repr(batch), batch.last_sequence, batch.delete_horizon_ms, batch.is_append_time


def append(data: bytes) -> None:
    recordbatch.prepare_append(
        data, base_offset=5, leader_epoch=1, now_ms=7, config=LogConfig()
    )


def walk(data: bytes) -> None:
    position = min(len(data), data[0] if data else 0)
    kernel.walk(data, position, len(data), 100, True)
    kernel.walk(data, position, len(data), 100, False)
    kernel.find_batch(data, position, len(data), 3)
    kernel.plan_run(data, position, len(data), 1000, 10000, 1 << 40)
    kernel.start_position(data, len(data) // 8, data, len(data), 0, 1 << 20)
    kernel.read_one(data, position, len(data), 2)


def body(data: bytes) -> None:
    kernel.decode_body_objects(data[1:], data[0] if data else 0, 5, 7, None, None, 0)


def inflate(codec: Codec, data: bytes) -> None:
    decompress(codec, data)


def file(path: str, data: bytes) -> None:
    disk = SimulatedDisk({path: data})
    for _ in dump(path, records=True, fs=disk):
        pass


def partition(name: str, data: bytes) -> None:
    """Open and read a log of one valid segment, with a small file in its directory."""
    files = {f"/d/t-0/{file_name(0, '.log')}": SEGMENT, "/d/t-0/" + name: data}
    disk = SimulatedDisk(files)
    with logcore.open("/d/t-0", fs=disk) as log:
        assert [record.value for record in log.read(0)] == [b"v0", b"v1", b"v2"]
        log.offset_for_timestamp(5)
        log.append_batch(
            recordbatch.encode(
                [(b"k", b"v")],
                producer_id=1,
                producer_epoch=0,
                base_sequence=0,
                now_ms=1,
            )
        )


def log(data: bytes) -> None:
    """Open, recover and read a log whose only segment is the data."""
    path = f"/d/t-0/{file_name(0, '.log')}"
    for read_only in (True, False):
        with logcore.open(
            "/d/t-0", read_only=read_only, fs=SimulatedDisk({path: data})
        ) as opened_log:
            for read in (
                lambda opened_log=opened_log: list(
                    opened_log.read(opened_log.log_start_offset)
                ),
                lambda opened_log=opened_log: list(
                    opened_log.read(
                        opened_log.log_start_offset, isolation="read_committed"
                    )
                ),
                lambda opened_log=opened_log: opened_log.get(1),
                lambda opened_log=opened_log: opened_log.offset_for_timestamp(5),
            ):
                with contextlib.suppress(logcore.LogcoreError):
                    read()


def small_files(data: bytes) -> None:
    checkpoint.unpack_topics(data)
    checkpoint.unpack_producer_ids(data)
    checkpoint.unpack_visible_end(data)
    disk = SimulatedDisk(
        {
            f"/d/{name}": data
            for name in ("c", checkpoint.LEADER_EPOCH, checkpoint.POLICY)
        }
    )
    checkpoint.read_offsets(disk, "/d", "c")
    checkpoint.read_epochs(disk, "/d")
    checkpoint.read_partition_metadata(disk, "/d")


def group_settings(data: bytes) -> None:
    GroupSettings(SimulatedDisk({f"/d/{checkpoint.GROUPS}": data}), "/d")


def with_row_count(data: bytes) -> bytes:
    """Return the data with a first line that contains the number of rows."""
    _, _, body = data.partition(b"\n")
    head = {"version": 1, "crc32": zlib.crc32(body), "groups": len(body.splitlines())}
    return json.dumps(head).encode() + b"\n" + body


def state(data: bytes) -> None:
    read_state(SimulatedDisk({"/d/app.state": data}), "/d", "app")


def request(data: bytes) -> None:
    frame = memoryview(data)
    wire.decode_request(wire.decode_header(frame), frame)


def response(data: bytes) -> None:
    if len(data) > 2:
        api = list(wire.APIS.values())[data[0] % len(wire.APIS)]
        wire.decode_response(
            api,
            api.min_version + data[1] % (api.max_version - api.min_version + 1),
            data[2:],
        )


def committed_offsets(data: bytes) -> None:
    key_size = data[0] if data else 0
    groups = stored_offsets.StoredGroups()
    groups.add_records(
        {data[1 : 1 + key_size]: data[1 + key_size :] if key_size % 5 else None}
    )


def versioned_message(message: Any, data: bytes) -> None:
    wire.decode_versioned(message, data)


SEGMENT = b"".join(
    recordbatch.encode([(b"k", b"v%d" % offset, (), offset)], base_offset=offset)
    for offset in range(3)
)


@cache
def decoders() -> dict[
    str, tuple[Decoder, list[bytes], Callable[[bytes], bytes] | None]
]:
    """Return for each name a decoder, its samples, and a function that corrects the CRC
    of a mutated sample.
    """
    vectors = [
        path.read_bytes()
        for path in sorted((DATA / "vectors" / "records").glob("*.bin"))
    ]
    files_of_kafka = [
        path.read_bytes()[:4096]
        for path in sorted((DATA / "vectors").glob("*/*/*"))
        if path.suffix
    ]
    files_of_logcore = closed_directory()
    text = [
        data
        for path, data in files_of_logcore.items()
        if os.path.splitext(path)[1] not in (".log", ".index", ".timeindex")
    ]
    text += [
        path.read_bytes()
        for path in sorted((DATA / "vectors").glob("partition-*/**/*point*"))
        if path.is_file()
    ]
    plain = [b"abc" * 50, bytes(3000), random.Random(1).randbytes(200)]
    bodies = [
        b"\x02" + data[61:] for data in vectors if data[16] == 2 and not data[22] & 7
    ]
    manifest = Manifest(**_manifest()).pack()
    rng = random.Random(5)
    by_name: dict[str, Any] = {
        "batch": (read_all, vectors, with_batch_crc),
        "append": (append, vectors, with_batch_crc),
        "walk": (walk, [*vectors, SEGMENT], None),
        "body": (body, bodies, None),
        "small": (small_files, text, None),
        "producers": (
            partial(Producers.unpack, offset=9),
            [data for data in files_of_kafka if data[:2] == b"\0\1"],
            with_snapshot_crc,
        ),
        "manifest": (partial(Manifest.unpack, path="m"), [manifest], with_line_crc),
        "state": (
            state,
            [
                checkpoint.pack_checked(
                    {"app_id": "app", "version": 3, "txid": "x", "ranges": {}}
                )
            ],
            with_line_crc,
        ),
        "request": (request, [], None),
        "response": (response, [], None),
        "committed": (committed_offsets, [], None),
        "subscription": (
            partial(versioned_message, wire.CONSUMER_PROTOCOL_SUBSCRIPTION),
            [],
            None,
        ),
        "assignment": (
            partial(versioned_message, wire.CONSUMER_PROTOCOL_ASSIGNMENT),
            [],
            None,
        ),
    }
    for codec in list(Codec)[1:]:
        by_name[codec.name.lower()] = (
            partial(inflate, codec),
            [compress(codec, data) for data in plain],
            None,
        )
    for suffix in DUMPERS:
        is_suffix = suffix in ("index", "timeindex", "txnindex", "snapshot", "seal")
        path = "/d/t-0/" + (file_name(0, f".{suffix}") if is_suffix else suffix)
        samples = [
            data for name, data in files_of_logcore.items() if name.endswith(suffix)
        ]
        samples += [
            path.read_bytes()[:400]
            for path in (DATA / "vectors").glob(f"*/**/*{suffix}")
        ]
        by_name[suffix] = (
            partial(file, path),
            samples or text,
            {"snapshot": with_snapshot_crc, "seal": with_seal_crc}.get(suffix),
        )
    for name in (
        file_name(0, ".index"),
        file_name(0, ".timeindex"),
        file_name(3, ".snapshot"),
        checkpoint.LEADER_EPOCH,
    ):
        by_name[f"beside {name.rpartition('.')[2]}"] = (
            partial(partition, name),
            by_name[name.rpartition(".")[2]][1],
            None,
        )
    groups = checkpoint.pack_groups(
        [{"group": name, "config": {SESSION_TIMEOUT: 50_000}} for name in "gh"]
    )
    by_name["group settings"] = (group_settings, [groups], with_row_count)
    by_name[checkpoint.GROUPS] = (
        *by_name[checkpoint.GROUPS][:1],
        [groups],
        with_row_count,
    )
    by_name[checkpoint.DURABLE_END] = (
        *by_name[checkpoint.DURABLE_END][:1],
        [checkpoint.pack_visible_end(5)],
        None,
    )
    by_name["log"] = (log, [SEGMENT, *vectors], None)
    for number, api in enumerate(wire.APIS.values()):
        for version in range(api.min_version, api.max_version + 1):
            value = draw(api.request.schema, version, api.is_flexible(version), rng)
            by_name["request"][1].append(
                wire.encode_request(api, version, 7, "me", value)[4:][:2000]
            )
            value = draw(api.response.schema, version, api.is_flexible(version), rng)
            frame = b"".join(map(bytes, wire.encode_response(api, version, 7, value)))[
                4:
            ]
            by_name["response"][1].append(
                bytes([number, version - api.min_version]) + frame[:2000]
            )
    for name, message in (
        ("subscription", wire.CONSUMER_PROTOCOL_SUBSCRIPTION),
        ("assignment", wire.CONSUMER_PROTOCOL_ASSIGNMENT),
        ("committed", group_messages.OFFSET_COMMIT_VALUE),
        ("committed", group_messages.GROUP_METADATA_VALUE),
    ):
        assert message in MESSAGES
        is_commit = message is group_messages.OFFSET_COMMIT_VALUE
        key = (
            group_records.commit_key("g", "t", 1)
            if is_commit
            else group_records.group_key("g")
        )
        for version in range(message.min_version, message.max_version + 1):
            data = encode(
                message,
                version,
                draw(message.schema, version, message.is_flexible(version), rng),
            )
            data = struct.pack(">h", version) + data
            by_name[name][1].append(
                bytes([len(key)]) + key + data if name == "committed" else data
            )
    assert all(samples for _, samples, _ in by_name.values())
    return by_name


def _manifest() -> dict[str, Any]:
    staged_file = StagedFile(
        topic="t", partition=0, name="x/b", count=3, **_other_fields(StagedFile)
    )
    return {
        "files": (staged_file,),
        "txid": "x",
        **_other_fields(Manifest),
        "topics": {"t": 1},
    }


def _other_fields(type_: Any) -> dict[str, Any]:
    given_names = {"topic", "partition", "name", "count", "files", "txid", "places"}
    return {
        attribute.name: "a" if "str" in str(attribute.type) else 1
        for attribute in type_.__attrs_attrs__
        if attribute.name not in given_names
    }


# -- running ---------------------------------------------------------------------------


def run(name: str, data: bytes) -> bool:
    """Return whether the decoder accepted the data.

    Other errors than LogcoreError are raised, and also ResourceError, which reports a
    lack of memory.
    """
    try:
        decoders()[name][0](data)
    except logcore.ResourceError:
        raise
    except logcore.LogcoreError:
        return False
    return True


def explore(count: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield for each decoder its name, the number of inputs, and how many it accepted."""
    decoders_by_name = decoders()
    resource.setrlimit(resource.RLIMIT_AS, (_size_bytes() + MEMORY_BYTES,) * 2)
    # Opening a log takes milliseconds. Most decoders take 10 microseconds.
    weights = {
        name: 0.1 if name == "log" or name.startswith("beside") else 1
        for name in decoders_by_name
    }
    for name, (_, samples, correct_crc) in decoders_by_name.items():
        rng = random.Random(f"{seed} {name}")
        input_count = math.ceil(count * weights[name] / sum(weights.values()))
        accepted = 0
        for _ in range(input_count):
            data = mutate(rng, samples)
            if correct_crc is not None and rng.random() < 0.7:
                data = correct_crc(data)
            try:
                accepted += run(name, data)
            except BaseException:
                failed_input = Path(f"fuzz-{name}.bin")
                failed_input.write_bytes(data)
                print(
                    f"decoder {name}, LOGCORE_TEST_SEED={seed}, input kept in {failed_input.resolve()}: {data[:200]!r}"
                )
                raise
        yield name, input_count, accepted


def _size_bytes() -> int:
    return (
        int(re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
        << 10
    )


def main(count: int, seed: int) -> None:
    logging.disable()  # otherwise each unreadable input would be logged
    results = list(explore(count, seed))
    for name, input_count, accepted in results:
        print(f"{name:40} {input_count:8} executions, {accepted:8} accepted")
    print(
        f"{sum(input_count for _, input_count, _ in results)} executions of {len(results)} decoders"
    )


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc and RLIMIT_AS"
)
@pytest.mark.parametrize(
    "count",
    [
        EXECUTIONS,
        pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(36000)]),
    ],
)
def test_decoders_raise_only_errors_of_the_library(tmp_path: Path, count: int) -> None:
    seed = SEED or (
        7 if count == EXECUTIONS else random.SystemRandom().randrange(1 << 32)
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [
        sys.executable,
        "-c",
        f"import test_fuzz; test_fuzz.main({count}, {seed})",
    ]
    result = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    accepted = [
        int(line.split()[-2])
        for line in result.stdout.splitlines()
        if line.endswith("accepted")
    ]
    assert all(accepted), "each decoder must accept some inputs"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name)
        for path in sorted((DATA / "fuzz").glob("*.bin"))
    ],
)
def test_inputs_that_failed_earlier_are_decoded_or_refused(path: Path) -> None:
    run(path.name.rpartition("-")[0], path.read_bytes())


BOMBS = """
import re, sys
from pathlib import Path
import test_fuzz
from support.compression_bombs import BOMBS
from logcore.recordbatch import RecordBatch

def kibibytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

import logcore
# The first use loads and allocates more, so it is not measured.
codec, body = BOMBS["gzip"]
try:
    RecordBatch.parse(test_fuzz.compression_bomb(codec, body)).records()
except logcore.RecordTooLargeError:
    pass
for name, (codec, body) in BOMBS.items():
    batch = test_fuzz.compression_bomb(codec, body)
    for method in ("records", "columns"):
        Path("/proc/self/clear_refs").write_text("5")
        before = kibibytes("VmRSS")
        try:
            getattr(RecordBatch.parse(batch), method)()
            raise SystemExit(f"{name} was accepted")
        except logcore.RecordTooLargeError:
            print(kibibytes("VmHWM") - before, name, method)
"""


def compression_bomb(codec: Codec, data: bytes) -> bytes:
    """Return a sound batch with a compressed body."""
    head = bytearray(recordbatch.encode([(b"k", b"v")], now_ms=1))[:61]
    head[22] = codec
    return with_batch_crc(bytes(head) + data)


@pytest.mark.slow  # 3 s; smaller bombs are in test_compression.py
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc"
)
def test_gibibyte_of_zeros_in_a_batch_uses_memory_up_to_the_limit() -> None:
    """Decompression of a batch with the default limit. tests/format/test_compression.py
    tests the codecs alone.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    result = subprocess.run(
        [sys.executable, "-c", BOMBS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    print(result.stdout)
    extra_kib = [int(line.split()[0]) for line in result.stdout.splitlines()]
    assert len(extra_kib) >= 2 * 11 and 0 < max(extra_kib) <= (64 + 8) << 10, (
        result.stdout
    )
