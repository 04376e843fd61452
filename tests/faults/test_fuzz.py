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
from support.files import own
from support.messages import MESSAGES, draw, encode
from support.vectors import DATA

EXECUTIONS = int(os.environ.get("LOGCORE_FUZZ", "15000"))
MANY = int(os.environ.get("LOGCORE_FUZZ", "50000000"))
SEED = int(os.environ.get("LOGCORE_TEST_SEED", "0")) or None
#: On top of the address space at the start: twice the cap on inflated bytes, and as
#: much again for their records.
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


def changed(rng: random.Random, samples: list[bytes]) -> bytes:
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(9):
            case 0 | 1 if data:
                data[at - 1] ^= 1 << rng.randrange(8)
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case 3:
                del data[at:]
            case 4:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
                data[at : at + size] = number.to_bytes(
                    size, rng.choice(("big", "big", "little"))
                )
            case 5:
                new = rng.choice(VARINTS)
                data[at : at + rng.choice((1, len(new)))] = new
            case 6:
                other = rng.choice(samples)
                start = rng.randrange(len(other) + 1)
                data[at : at + rng.choice((0, 40))] = other[
                    start : start + rng.randrange(80)
                ]
            case 7:
                data[at:at] = data[at : at + rng.randrange(40)] * rng.choice((1, 2, 50))
            case 8:
                del data[at : at + rng.randrange(1, 20)]
    return bytes(data[: 1 << 16])


def sealed(data: bytes) -> bytes:
    """Return the data with a correct length and CRC in its first batch."""
    raw = bytearray(data)
    if len(raw) > 26:
        raw[8:12] = (len(raw) - 12).to_bytes(4, "big")
        if raw[16] == 2:
            raw[17:21] = crc32c(raw[21:]).to_bytes(4, "big")
        else:
            raw[12:16] = zlib.crc32(raw[16:]).to_bytes(4, "big")
    return bytes(raw)


def checked(data: bytes) -> bytes:
    """Return the first line of the data with a correct CRC, as in a manifest."""
    text = data.partition(b"\n")[0].partition(b" ")[2]
    return b"%08x %s\n" % (zlib.crc32(text), text)


def resnapped(data: bytes) -> bytes:
    return data[:2] + crc32c(data[6:]).to_bytes(4, "big") + data[6:]


def resealed(data: bytes) -> bytes:
    text = data.rpartition(b" ")[0]
    return b"%s %08x\n" % (text, zlib.crc32(text))


# -- decoders --------------------------------------------------------------------------


def read_all(data: bytes) -> None:
    for batch in read_batches(data):
        for ask in (
            batch.records,
            batch.control_type,
            lambda batch=batch: batch.columns().keys(),
        ):
            try:
                ask()
            except logcore.LogcoreError:
                pass
        repr(batch), batch.last_sequence, batch.delete_horizon_ms, batch.is_append_time


def append(data: bytes) -> None:
    recordbatch.prepare_append(
        data, base_offset=5, leader_epoch=1, now_ms=7, config=LogConfig()
    )


def walk(data: bytes) -> None:
    at = min(len(data), data[0] if data else 0)
    kernel.walk(data, at, len(data), 100, True)
    kernel.walk(data, at, len(data), 100, False)
    kernel.find_batch(data, at, len(data), 3)
    kernel.plan_run(data, at, len(data), 1000, 10000, 1 << 40)
    kernel.start_position(data, len(data) // 8, data, len(data), 0, 1 << 20)
    kernel.read_one(data, at, len(data), 2)


def body(data: bytes) -> None:
    kernel.decode_body_objects(data[1:], data[0] if data else 0, 5, 7, None, None, 0)


def inflate(codec: Codec, data: bytes) -> None:
    decompress(codec, data)


def file(path: str, data: bytes) -> None:
    disk = SimulatedDisk({path: data})
    for _ in dump(path, records=True, fs=disk):
        pass


def partition(name: str, data: bytes) -> None:
    """Open and read a log of one valid segment, with this small file in its directory."""
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
        ) as found:
            for ask in (
                lambda found=found: list(found.read(found.log_start_offset)),
                lambda found=found: list(
                    found.read(found.log_start_offset, isolation="read_committed")
                ),
                lambda found=found: found.get(1),
                lambda found=found: found.offset_for_timestamp(5),
            ):
                with contextlib.suppress(logcore.LogcoreError):
                    ask()


def small(data: bytes) -> None:
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


def rowed(data: bytes) -> bytes:
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


def committed(data: bytes) -> None:
    cut = data[0] if data else 0
    found = stored_offsets.StoredGroups()
    found.add_records({data[1 : 1 + cut]: data[1 + cut :] if cut % 5 else None})


def blob(message: Any, data: bytes) -> None:
    wire.decode_versioned(message, data)


SEGMENT = b"".join(
    recordbatch.encode([(b"k", b"v%d" % at, (), at)], base_offset=at) for at in range(3)
)


@cache
def decoders() -> dict[
    str, tuple[Decoder, list[bytes], Callable[[bytes], bytes] | None]
]:
    """Return for each name a decoder, its samples, and a function that corrects the CRC of
    a changed sample.
    """
    vectors = [
        path.read_bytes()
        for path in sorted((DATA / "vectors" / "records").glob("*.bin"))
    ]
    kafkas = [
        path.read_bytes()[:4096]
        for path in sorted((DATA / "vectors").glob("*/*/*"))
        if path.suffix
    ]
    ours = own()
    text = [
        data
        for path, data in ours.items()
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
    found: dict[str, Any] = {
        "batch": (read_all, vectors, sealed),
        "append": (append, vectors, sealed),
        "walk": (walk, [*vectors, SEGMENT], None),
        "body": (body, bodies, None),
        "small": (small, text, None),
        "producers": (
            partial(Producers.unpack, offset=9),
            [data for data in kafkas if data[:2] == b"\0\1"],
            resnapped,
        ),
        "manifest": (partial(Manifest.unpack, path="m"), [manifest], checked),
        "state": (
            state,
            [
                checkpoint.pack_checked(
                    {"app_id": "app", "version": 3, "txid": "x", "ranges": {}}
                )
            ],
            checked,
        ),
        "request": (request, [], None),
        "response": (response, [], None),
        "committed": (committed, [], None),
        "subscription": (partial(blob, wire.CONSUMER_PROTOCOL_SUBSCRIPTION), [], None),
        "assignment": (partial(blob, wire.CONSUMER_PROTOCOL_ASSIGNMENT), [], None),
    }
    for codec in list(Codec)[1:]:
        found[codec.name.lower()] = (
            partial(inflate, codec),
            [compress(codec, data) for data in plain],
            None,
        )
    for kind in DUMPERS:
        is_suffix = kind in ("index", "timeindex", "txnindex", "snapshot", "seal")
        path = "/d/t-0/" + (file_name(0, f".{kind}") if is_suffix else kind)
        samples = [data for name, data in ours.items() if name.endswith(kind)]
        samples += [
            each.read_bytes()[:400] for each in (DATA / "vectors").glob(f"*/**/*{kind}")
        ]
        found[kind] = (
            partial(file, path),
            samples or text,
            {"snapshot": resnapped, "seal": resealed}.get(kind),
        )
    for name in (
        file_name(0, ".index"),
        file_name(0, ".timeindex"),
        file_name(3, ".snapshot"),
        checkpoint.LEADER_EPOCH,
    ):
        found[f"beside {name.rpartition('.')[2]}"] = (
            partial(partition, name),
            found[name.rpartition(".")[2]][1],
            None,
        )
    groups = checkpoint.pack_groups(
        [{"group": name, "config": {SESSION_TIMEOUT: 50_000}} for name in "gh"]
    )
    found["group settings"] = (group_settings, [groups], rowed)
    found[checkpoint.GROUPS] = (*found[checkpoint.GROUPS][:1], [groups], rowed)
    found[checkpoint.DURABLE_END] = (
        *found[checkpoint.DURABLE_END][:1],
        [checkpoint.pack_visible_end(5)],
        None,
    )
    found["log"] = (log, [SEGMENT, *vectors], None)
    for number, api in enumerate(wire.APIS.values()):
        for version in range(api.min_version, api.max_version + 1):
            value = draw(api.request.schema, version, api.is_flexible(version), rng)
            found["request"][1].append(
                wire.encode_request(api, version, 7, "me", value)[4:][:2000]
            )
            value = draw(api.response.schema, version, api.is_flexible(version), rng)
            frame = b"".join(map(bytes, wire.encode_response(api, version, 7, value)))[
                4:
            ]
            found["response"][1].append(
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
            found[name][1].append(
                bytes([len(key)]) + key + data if name == "committed" else data
            )
    assert all(samples for _, samples, _ in found.values())
    return found


def _manifest() -> dict[str, Any]:
    staged_file = StagedFile(
        topic="t", partition=0, name="x/b", count=3, **_rest(StagedFile)
    )
    return {"files": (staged_file,), "txid": "x", **_rest(Manifest), "topics": {"t": 1}}


def _rest(kind: Any) -> dict[str, Any]:
    given = {"topic", "partition", "name", "count", "files", "txid", "places"}
    return {
        each.name: "a" if "str" in str(each.type) else 1
        for each in kind.__attrs_attrs__
        if each.name not in given
    }


# -- running ---------------------------------------------------------------------------


def run(name: str, data: bytes) -> bool:
    """Return whether the decoder accepted the data.

    Errors that are not LogcoreErrors are raised, and so is ResourceError for lack of memory.
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
    every = decoders()
    resource.setrlimit(resource.RLIMIT_AS, (_size_bytes() + MEMORY_BYTES,) * 2)
    # Opening a log takes milliseconds, most others take ten microseconds.
    weights = {
        name: 0.1 if name == "log" or name.startswith("beside") else 1 for name in every
    }
    for name, (_, samples, seal) in every.items():
        rng = random.Random(f"{seed} {name}")
        share = math.ceil(count * weights[name] / sum(weights.values()))
        taken = 0
        for _ in range(share):
            data = changed(rng, samples)
            if seal is not None and rng.random() < 0.7:
                data = seal(data)
            try:
                taken += run(name, data)
            except BaseException:
                where = Path(f"fuzz-{name}.bin")
                where.write_bytes(data)
                print(
                    f"decoder {name}, LOGCORE_TEST_SEED={seed}, input kept in {where.resolve()}: {data[:200]!r}"
                )
                raise
        yield name, share, taken


def _size_bytes() -> int:
    return (
        int(re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
        << 10
    )


def main(count: int, seed: int) -> None:
    logging.disable()  # each unreadable input would be logged, a million times in all
    done = list(explore(count, seed))
    for name, share, taken in done:
        print(f"{name:40} {share:8} executions, {taken:8} taken")
    print(f"{sum(share for _, share, _ in done)} executions of {len(done)} decoders")


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
def test_any_bytes_raise_only_errors_of_the_library(tmp_path: Path, count: int) -> None:
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
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    taken = [
        int(line.split()[-2])
        for line in done.stdout.splitlines()
        if line.endswith("taken")
    ]
    assert all(taken), "changes that no decoder survives reach nothing"


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
    RecordBatch.parse(test_fuzz.bomb(codec, body)).records()
except logcore.RecordTooLargeError:
    pass
for name, (codec, body) in BOMBS.items():
    whole = test_fuzz.bomb(codec, body)
    for ask in ("records", "columns"):
        Path("/proc/self/clear_refs").write_text("5")
        before = kibibytes("VmRSS")
        try:
            getattr(RecordBatch.parse(whole), ask)()
            raise SystemExit(f"{name} was taken")
        except logcore.RecordTooLargeError:
            print(kibibytes("VmHWM") - before, name, ask)
"""


def bomb(codec: Codec, data: bytes) -> bytes:
    """A sound batch around a body of this codec."""
    head = bytearray(recordbatch.encode([(b"k", b"v")], now_ms=1))[:61]
    head[22] = codec
    return sealed(bytes(head) + data)


@pytest.mark.slow  # three seconds; smaller bombs are in test_compression.py
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc"
)
def test_gibibyte_of_zeros_in_a_batch_uses_memory_up_to_the_limit() -> None:
    """With the cap that users get, through a batch; tests/format/test_compression.py
    tests the codecs alone.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", BOMBS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    extra = [int(line.split()[0]) for line in done.stdout.splitlines()]
    assert len(extra) >= 2 * 11 and 0 < max(extra) <= (64 + 8) << 10, done.stdout
