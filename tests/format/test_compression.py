"""Tests that other clients read logcore's compressed bodies, that logcore reads theirs,
and that hostile bodies use no more memory than the limit.

Kafka's own classes and three clients wrote the vectors in data/vectors. kafka-python and
aiokafka also run here, in both directions. The tests build hostile bodies byte by byte,
because no compressor produces them.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import struct
import subprocess
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logcore.errors import (
    CorruptBatchError,
    InvalidConfigError,
    LogcoreError,
    RecordTooLargeError,
    UnsupportedCodecError,
)
from logcore.format import varint
from logcore.format.compression import (
    Codec,
    codec_named,
    codec_of,
    compress,
    decompress,
)
from support.compression_bombs import (
    BOMBS,
    MIB,
    bombs,
    lz4_frame,
    xxh32,
    zstd_frame,
    zstd_rle,
)
from support.varints import decode_int64
from support.vectors import EXPECTED, VECTORS

CODECS = list(Codec)
PACKED = CODECS[1:]

# Repetitive and random bytes, so that all kinds of blocks occur. The sample is longer
# than one block of any framing that logcore writes.
SAMPLE = b"".join(
    b'{"id": %d, "name": "order-%d"}\n' % (n, n * 7919) for n in range(4000)
) + random.Random(1).randbytes(70_000)
SMALL = b'{"id": 1, "name": "order-1"}' * 4 + bytes(range(40))


def lz4_stored(data: bytes, checksum: bool = False) -> bytes:
    block = struct.pack("<I", len(data) | 0x80000000) + data
    return block + struct.pack("<I", xxh32(data)) if checksum else block


# --- names and numbers ---


def test_codec_of_reads_the_low_three_bits():
    assert [codec_of(attributes) for attributes in range(5)] == CODECS
    assert codec_of(0x7FF8 | 4) is Codec.ZSTD
    assert codec_of(-8 | 1) is Codec.GZIP


@pytest.mark.parametrize("attributes", [5, 6, 7, 0x0F])
def test_codec_of_refuses_unknown_types(attributes):
    with pytest.raises(
        UnsupportedCodecError, match="unknown compression type"
    ) as caught:
        codec_of(attributes, path="00.log", position=12)
    assert (caught.value.path, caught.value.position, caught.value.found) == (
        "00.log",
        12,
        attributes & 7,
    )


def test_codec_named_accepts_the_names_of_kafka():
    names = ("none", "uncompressed", "gzip", "snappy", "lz4", "zstd")
    assert [codec_named(name) for name in names] == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["producer", "GZIP", "", "brotli"])
def test_codec_named_refuses_other_names(name):
    with pytest.raises(InvalidConfigError):
        codec_named(name)


@pytest.mark.parametrize(
    ("codec", "level"),
    [(1, 0), (1, 10), (1, -2), (3, 0), (3, 18), (4, 23), (4, -131073), (0, 1), (2, 1)],
)
def test_levels_outside_kafkas_ranges_are_refused(codec, level):
    with pytest.raises(InvalidConfigError):
        compress(Codec(codec), b"", level=level)


# --- round trips ---


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "data",
    [b"", b"x", SMALL, SAMPLE, bytes(200_000)],
    ids=["empty", "1", "small", "long", "zeros"],
)
def test_compressed_bytes_decompress_to_the_original(codec, data):
    packed = compress(codec, data)
    for form in (packed, bytearray(packed), memoryview(b"#" + packed)[1:]):
        plain = decompress(codec, form)
        assert type(plain) is bytes
        assert plain == data


@pytest.mark.parametrize("codec", CODECS)
def test_plain_int_selects_the_same_codec(codec):
    assert decompress(int(codec), compress(int(codec), SMALL)) == SMALL


@pytest.mark.parametrize(
    ("codec", "level"),
    [(1, level) for level in (-1, *range(1, 10))]
    + [(3, level) for level in range(1, 18)]
    + [(4, level) for level in (-131072, -5, 0, *range(1, 20))],
)
def test_every_level_round_trips(codec, level):
    data = SAMPLE[:9_000]
    assert decompress(Codec(codec), compress(Codec(codec), data, level=level)) == data


@settings(deadline=None)
@given(st.sampled_from(CODECS), st.binary(max_size=300), st.integers(1, 400))
def test_any_bytes_round_trip(codec, piece, count):
    data = piece * count
    assert decompress(codec, compress(codec, data)) == data


@pytest.mark.parametrize("codec", CODECS)
def test_max_size_is_inclusive(codec):
    packed = compress(codec, SAMPLE)
    assert decompress(codec, packed, max_size=len(SAMPLE)) == SAMPLE
    with pytest.raises(RecordTooLargeError):
        decompress(codec, packed, max_size=len(SAMPLE) - 1)


@pytest.mark.parametrize("codec", CODECS)
def test_empty_content_fits_a_limit_of_0(codec):
    assert decompress(codec, compress(codec, b""), max_size=0) == b""
    with pytest.raises(RecordTooLargeError):
        decompress(codec, compress(codec, b"x"), max_size=0)


# --- against others ---


def other_codecs(module: str):
    codecs = pytest.importorskip(module)
    for name in ("gzip", "snappy", "lz4", "zstd"):
        if getattr(codecs, f"has_{name}")():
            yield (
                Codec[name.upper()],
                getattr(codecs, f"{name}_encode"),
                getattr(codecs, f"{name}_decode"),
            )


@pytest.mark.parametrize("module", ["kafka.codec", "aiokafka.codec"])
@pytest.mark.parametrize("data", [b"x", SMALL, SAMPLE], ids=["1", "small", "long"])
def test_python_clients_and_logcore_read_each_other(module, data):
    checked = []
    for codec, encode, decode in other_codecs(module):
        assert decompress(codec, encode(data)) == data
        assert bytes(decode(compress(codec, data))) == data
        checked.append(codec)
    assert {Codec.GZIP, Codec.LZ4, Codec.ZSTD} <= set(checked)


def v2_lines(batch: bytes) -> list[str]:
    """Records of one plain data batch of format v2 in the notation of expected.json."""
    base_offset = struct.unpack_from(">q", batch)[0]
    base_timestamp = struct.unpack_from(">q", batch, 27)[0]
    attributes = struct.unpack_from(">h", batch, 21)[0]
    count = struct.unpack_from(">i", batch, 57)[0]
    body = decompress(
        codec_of(attributes), memoryview(batch)[61:], path="vector", position=61
    )

    def sized(position):
        size, position = varint.decode_int32(body, position)
        return (
            (None, position)
            if size < 0
            else (body[position : position + size], position + size)
        )

    def text(data):
        return "-" if data is None else data.hex()

    lines = []
    position = 0
    for _ in range(count):
        _, position = varint.decode_int32(body, position)
        timestamp_delta, position = decode_int64(body, position + 1)
        offset_delta, position = varint.decode_int32(body, position)
        key, position = sized(position)
        value, position = sized(position)
        header_count, position = varint.decode_int32(body, position)
        headers = []
        for _ in range(header_count):
            name, position = sized(position)
            header, position = sized(position)
            headers.append(f"{name.hex()}={text(header)}")
        offset = base_offset + offset_delta
        timestamp = base_timestamp + timestamp_delta
        lines.append(
            f"{offset}|{timestamp}|{text(key)}|{text(value)}|{','.join(headers)}"
        )
    assert position == len(body)
    return lines


@pytest.mark.parametrize(
    "name",
    sorted(
        n
        for n in EXPECTED
        if n.startswith("v2-") and "-records" in n and "none" not in n
    ),
)
def test_compressed_v2_vectors_of_every_writer_inflate_to_their_records(name):
    lines = v2_lines((VECTORS / "records" / name).read_bytes())
    assert len(lines) == EXPECTED[name]["record_count"]
    assert (
        hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
        == EXPECTED[name]["records_sha256"]
    )


# --- framings, one by one ---


def test_gzip_is_written_without_a_modification_time():
    packed = compress(Codec.GZIP, SAMPLE)
    assert packed[4:8] == bytes(4)
    assert gzip.decompress(packed) == SAMPLE


def test_gzip_members_are_read_as_one_stream():
    packed = b"".join(
        gzip.compress(SAMPLE[n : n + 50_000]) for n in range(0, len(SAMPLE), 50_000)
    )
    assert decompress(Codec.GZIP, packed) == SAMPLE
    assert decompress(Codec.GZIP, gzip.compress(b"") * 3) == b""


def test_gzip_header_fields_are_skipped():
    body = zlib.compress(SMALL, wbits=-15)
    head = (
        b"\x1f\x8b\x08\x1c" + bytes(6) + b"\x03\x00xyz" + b"name\x00" + b"comment\x00"
    )
    packed = head + body + struct.pack("<II", zlib.crc32(SMALL), len(SMALL))
    assert decompress(Codec.GZIP, packed) == SMALL


def test_gzip_bytes_after_the_last_member_are_ignored_as_in_java():
    assert decompress(Codec.GZIP, gzip.compress(SMALL) + b"\x00padding") == SMALL


def test_truncated_second_gzip_member_is_an_error():
    with pytest.raises(CorruptBatchError):
        decompress(Codec.GZIP, gzip.compress(SMALL) * 2 + b"\x1f\x8b\x08")


@pytest.mark.parametrize("position", [-1, -5])
def test_gzip_trailer_is_verified(position):
    packed = bytearray(gzip.compress(SMALL))
    packed[position] ^= 1
    with pytest.raises(CorruptBatchError, match="gzip"):
        decompress(Codec.GZIP, packed)


def test_gzip_larger_than_one_chunk_is_read():
    data = random.Random(2).randbytes(700_000) + bytes(5 * MIB)
    assert decompress(Codec.GZIP, gzip.compress(data, 1)) == data


def test_snappy_is_written_in_xerial_blocks_of_32_kib():
    packed = compress(Codec.SNAPPY, bytes(70_000))
    assert packed[:16].hex() == "82534e415050590000000001" + "00000001"
    sizes = []
    position = 16
    while position < len(packed):
        (length,) = struct.unpack_from(">i", packed, position)
        block = packed[position + 4 : position + 4 + length]
        sizes.append(cramjam.snappy.decompress_raw_len(block))
        position += 4 + length
    assert sizes == [32768, 32768, 4464]


def test_snappy_raw_block_without_header_is_read():
    assert (
        decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(SAMPLE))) == SAMPLE
    )


def test_snappy_header_versions_are_not_compared():
    packed = compress(Codec.SNAPPY, SMALL)
    assert (
        decompress(Codec.SNAPPY, packed[:8] + struct.pack("<ii", 1, 1) + packed[16:])
        == SMALL
    )


def test_snappy_repeated_headers_are_skipped():
    first = compress(Codec.SNAPPY, SMALL)
    second = compress(Codec.SNAPPY, SAMPLE)
    assert decompress(Codec.SNAPPY, first + second[:16] + second) == SMALL + SAMPLE


@pytest.mark.parametrize("count", [1, 2, 3])
def test_snappy_bytes_after_the_last_block_are_refused(count):
    with pytest.raises(CorruptBatchError, match="block length"):
        decompress(Codec.SNAPPY, compress(Codec.SNAPPY, SMALL) + bytes(count))


@pytest.mark.parametrize("length", [-1, 0, -(2**31), 2**31 - 1, 0x534E4150])
def test_snappy_block_lengths_beyond_the_body_are_refused(length):
    packed = compress(Codec.SNAPPY, SMALL)
    with pytest.raises(CorruptBatchError) as caught:
        decompress(
            Codec.SNAPPY,
            packed[:16] + struct.pack(">i", length) + packed[20:],
            path="00.log",
            position=1000,
        )
    assert (caught.value.path, caught.value.position, caught.value.found) == (
        "00.log",
        1016,
        length,
    )


def test_impossible_snappy_length_is_refused_before_memory_is_allocated():
    # The frame declares 60 MiB, below the limit.
    block = b"\x80\x80\x80\x1e" + b"\xfe\x01\x00" * 100
    with (
        traced_peak() as peak,
        pytest.raises(CorruptBatchError, match="cannot inflate"),
    ):
        decompress(Codec.SNAPPY, block)
    assert peak() < MIB


def test_lz4_is_written_as_kafka_writes_it():
    packed = compress(Codec.LZ4, SMALL)
    assert packed[:7].hex() == "04224d18604082"
    assert packed[-4:] == bytes(4)
    assert (
        lz4.frame.get_frame_info(compress(Codec.LZ4, SAMPLE))["block_linked"] is False
    )
    assert lz4.frame.decompress(compress(Codec.LZ4, SAMPLE)) == SAMPLE


def test_lz4_level_9_is_the_fast_compressor_and_default():
    fast = compress(Codec.LZ4, SAMPLE)
    assert compress(Codec.LZ4, SAMPLE, level=9) == fast
    assert all(
        len(compress(Codec.LZ4, SAMPLE, level=level)) < len(fast)
        for level in (1, 8, 10, 17)
    )


def test_lz4_legacy_checksum_is_written_and_read_if_requested():
    packed = compress(Codec.LZ4, SAMPLE, legacy_lz4_checksum=True)
    assert packed[:7].hex() == "04224d1860401a"
    assert decompress(Codec.LZ4, packed, legacy_lz4=True) == SAMPLE
    assert decompress(Codec.LZ4, compress(Codec.LZ4, SAMPLE), legacy_lz4=True) == SAMPLE
    with pytest.raises(CorruptBatchError, match="header checksum") as caught:
        decompress(Codec.LZ4, packed)
    assert (caught.value.position, caught.value.expected, caught.value.found) == (
        6,
        "0x82",
        "0x1a",
    )


@pytest.mark.parametrize("block_size", [4, 5, 6, 7])
@pytest.mark.parametrize("block_checksum", [False, True])
@pytest.mark.parametrize("content_checksum", [False, True])
@pytest.mark.parametrize("store_size", [False, True])
def test_lz4_frames_with_independent_blocks_are_read(
    block_size, block_checksum, content_checksum, store_size
):
    packed = lz4.frame.compress(
        SAMPLE,
        block_linked=False,
        block_size=block_size,
        block_checksum=block_checksum,
        content_checksum=content_checksum,
        store_size=store_size,
    )
    assert decompress(Codec.LZ4, packed) == SAMPLE


def test_lz4_linked_blocks_are_refused():
    with pytest.raises(CorruptBatchError, match="flags"):
        decompress(Codec.LZ4, lz4.frame.compress(SAMPLE, block_linked=True))


@pytest.mark.parametrize("flags", [0x20, 0xA0, 0xE0, 0x61, 0x62, 0x40])
def test_lz4_other_versions_reserved_bits_and_dictionaries_are_refused(flags):
    with pytest.raises(CorruptBatchError, match="flags"):
        decompress(Codec.LZ4, lz4_frame(lz4_stored(b"x"), flags=flags))


@pytest.mark.parametrize("descriptor", [0x00, 0x30, 0x41, 0x48, 0xC0, 0xF0])
def test_lz4_bad_block_descriptors_are_refused(descriptor):
    with pytest.raises(CorruptBatchError, match="block size"):
        decompress(Codec.LZ4, lz4_frame(lz4_stored(b"x"), descriptor=descriptor))


def test_lz4_declared_content_size_is_not_compared():
    assert (
        decompress(
            Codec.LZ4,
            lz4_frame(lz4_stored(b"xyz"), flags=0x68, extra=struct.pack("<Q", 2**63)),
        )
        == b"xyz"
    )


def test_lz4_block_checksums_are_verified():
    good = lz4_frame(lz4_stored(b"xyz", checksum=True), flags=0x70)
    assert decompress(Codec.LZ4, good) == b"xyz"
    for position in range(11, 18):
        bad = bytearray(good)
        bad[position] ^= 1
        with pytest.raises(CorruptBatchError):
            decompress(Codec.LZ4, bad)


def test_lz4_content_checksum_is_required_but_not_verified():
    frame = lz4_frame(lz4_stored(b"xyz"), flags=0x64)
    assert decompress(Codec.LZ4, frame + b"junk") == b"xyz"
    with pytest.raises(CorruptBatchError):
        decompress(Codec.LZ4, frame + b"jun")


def test_lz4_reading_stops_at_the_first_end_mark():
    frame = lz4_frame(lz4_stored(b"xyz"))
    assert decompress(Codec.LZ4, frame + frame + b"junk") == b"xyz"
    assert decompress(Codec.LZ4, frame[:-4] + b"\x00\x00\x00\x80" + b"junk") == b"xyz"


def test_lz4_without_end_mark_is_an_error():
    frame = lz4_frame(lz4_stored(b"xyz"))
    for cut in range(1, 5):
        with pytest.raises(CorruptBatchError):
            decompress(Codec.LZ4, frame[:-cut])


def test_lz4_block_above_the_frames_block_size_is_refused():
    data = bytes(65536)
    assert decompress(Codec.LZ4, lz4_frame(lz4_stored(data))) == data
    with pytest.raises(CorruptBatchError, match="block length"):
        decompress(Codec.LZ4, lz4_frame(lz4_stored(data + b"x")))
    with pytest.raises(CorruptBatchError):  # small when packed, too large when inflated
        inner = lz4.frame.compress(
            bytes(65537), block_size=5, block_linked=False, store_size=False
        )
        decompress(Codec.LZ4, lz4_frame(inner[7:-4]))


@pytest.mark.long
@pytest.mark.parametrize("write_content_size", [False, True])
@pytest.mark.parametrize("write_checksum", [False, True])
@pytest.mark.parametrize("level", [-5, 1, 3, 19])
def test_zstd_frames_are_read_with_and_without_content_size(
    write_content_size, write_checksum, level
):
    compressor = zstandard.ZstdCompressor(
        level=level,
        write_content_size=write_content_size,
        write_checksum=write_checksum,
    )
    for data in (b"", b"x", SMALL, SAMPLE):
        assert decompress(Codec.ZSTD, compressor.compress(data)) == data


def test_zstd_frames_from_a_streaming_writer_are_read():
    compressor = zstandard.ZstdCompressor().compressobj()
    pieces = []
    for n in range(0, len(SAMPLE), 1000):
        pieces += (
            compressor.compress(SAMPLE[n : n + 1000]),
            compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK),
        )
    packed = b"".join((*pieces, compressor.flush()))
    assert decompress(Codec.ZSTD, packed) == SAMPLE
    assert decompress(Codec.ZSTD, packed, max_size=len(SAMPLE)) == SAMPLE
    with pytest.raises(RecordTooLargeError):
        decompress(Codec.ZSTD, packed, max_size=len(SAMPLE) - 1)


@pytest.mark.long
def test_zstd_window_of_the_highest_levels_is_accepted():
    compressor = zstandard.ZstdCompressor(level=22).compressobj()
    assert (
        decompress(Codec.ZSTD, compressor.compress(SMALL) + compressor.flush()) == SMALL
    )


@pytest.mark.parametrize("write_checksum", [False, True])
def test_zstd_long_frame_with_a_large_window_is_read(write_checksum):
    parameters = zstandard.ZstdCompressionParameters(
        window_log=27, write_checksum=write_checksum, write_content_size=False
    )
    data = SAMPLE + bytes(10 * MIB) + SAMPLE
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = packed.compress(data) + packed.flush()
    assert zstandard.get_frame_parameters(body).window_size == 128 * MIB
    assert decompress(Codec.ZSTD, body) == data
    assert decompress(Codec.ZSTD, body, max_size=len(data)) == data
    with pytest.raises(RecordTooLargeError):
        decompress(Codec.ZSTD, body, max_size=len(data) - 1)
    with pytest.raises(CorruptBatchError):
        decompress(Codec.ZSTD, body[:-20])


def test_zstd_frames_are_read_as_one_stream_without_skippable_frames():
    sized = zstandard.ZstdCompressor()
    unsized = zstandard.ZstdCompressor(write_content_size=False)
    skippable = struct.pack("<II", 0x184D2A5F, 5) + b"hello"
    packed = (
        skippable
        + sized.compress(SMALL)
        + skippable
        + unsized.compress(SAMPLE)
        + sized.compress(b"")
        + skippable
    )
    assert decompress(Codec.ZSTD, packed) == SMALL + SAMPLE
    assert (
        decompress(Codec.ZSTD, packed, max_size=len(SMALL + SAMPLE)) == SMALL + SAMPLE
    )
    with pytest.raises(RecordTooLargeError):
        decompress(Codec.ZSTD, packed, max_size=len(SMALL + SAMPLE) - 1)


def test_zstd_content_checksum_is_verified():
    packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(SMALL))
    packed[-1] ^= 1
    with pytest.raises(CorruptBatchError):
        decompress(Codec.ZSTD, packed)


@pytest.mark.parametrize("content_size", [0, 1, 131071, 131073, 2**40, 2**64 - 2])
def test_wrong_zstd_content_size_is_an_error(content_size):
    with traced_peak() as peak, pytest.raises((CorruptBatchError, RecordTooLargeError)):
        decompress(Codec.ZSTD, zstd_frame(zstd_rle(1), content_size=content_size))
    assert peak() < MIB
    assert decompress(
        Codec.ZSTD, zstd_frame(zstd_rle(1), content_size=131072)
    ) == bytes(131072)


def test_zstd_frame_that_needs_a_dictionary_is_an_error():
    dictionary = zstandard.train_dictionary(
        1024, [b"%d order %d" % (n, n * n) for n in range(500)]
    )
    packed = zstandard.ZstdCompressor(dict_data=dictionary).compress(b"77 order 5929")
    with pytest.raises(CorruptBatchError):
        decompress(Codec.ZSTD, packed)


# --- hostile bodies ---


class traced_peak:
    """Measures the peak of the Python memory that a `with` block allocates, in bytes."""

    def __enter__(self):
        tracemalloc.start()
        return self._read

    def __exit__(self, *_):
        self._peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    def _read(self):
        return self._peak


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_gibibyte_of_zeros_is_refused_within_the_memory_limit(name):
    codec, body = BOMBS[name]
    with traced_peak() as peak, pytest.raises(RecordTooLargeError) as caught:
        decompress(codec, body, max_size=MIB, path="00.log", position=61)
    assert peak() < MIB + 8 * MIB
    assert (caught.value.path, caught.value.position) == ("00.log", 61)


@pytest.mark.parametrize("name", BOMBS)
def test_small_body_of_the_same_form_is_valid(name):
    """Otherwise the previous test could pass because the body is damaged."""
    codec, body = bombs(4 * MIB)[name]
    assert decompress(codec, body) == bytes(4 * MIB)


@pytest.mark.parametrize("codec", PACKED)
def test_large_body_is_decompressed_without_a_second_copy(codec):
    data = bytes(24 * MIB)
    packed = compress(codec, data)
    with traced_peak() as peak:
        plain = decompress(codec, packed)
    assert plain == data
    assert peak() < 24 * MIB + 8 * MIB


RESIDENT_MEMORY = """
import re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_compression as t

def mebibytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

for codec in t.Codec:
    t.decompress(codec, t.compress(codec, t.SMALL))
valid = {"valid": (t.Codec.ZSTD, t.zstd_frame(t.zstd_rle(128), window=0x88))}
for name, (codec, body) in (t.BOMBS | valid).items():
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before = mebibytes("VmRSS")
    try:
        t.decompress(codec, body, max_size=16 * t.MIB)
        is_refused = False
    except t.RecordTooLargeError:
        is_refused = True
    assert is_refused == (name != "valid"), name
    print(round(mebibytes("VmHWM") - before), name)
"""


@pytest.mark.long
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc"
)
def test_memory_outside_python_remains_within_the_limit():
    """tracemalloc does not count the memory of C libraries, but the kernel does."""
    lines = run_python(RESIDENT_MEMORY, str(Path(__file__).parent)).splitlines()
    peaks = {line.split(maxsplit=1)[1]: int(line.split()[0]) for line in lines}
    assert peaks.keys() == {*BOMBS, "valid"}
    assert max(peaks.values()) <= 16 + 8, peaks
    assert peaks["gzip"] > 8, "the measurement does not contain the inflated bytes"


def run_python(code: str, *arguments: str) -> str:
    paths = [path for path in sys.path if path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def outcome(codec: Codec, body: bytes, **options) -> bytes | None:
    """Return the content of `body`, or None if the body is refused.

    Any other exception than a LogcoreError fails the test.
    """
    try:
        return decompress(
            codec, body, max_size=MIB, path="00.log", position=61, **options
        )
    except LogcoreError as error:
        assert isinstance(error, CorruptBatchError | RecordTooLargeError)
        assert error.path == "00.log"
        assert error.position is not None and 61 <= error.position <= 61 + len(body)
        return None


def small_bodies() -> dict[str, tuple[Codec, bytes]]:
    checksums = {"block_checksum": True, "content_checksum": True, "store_size": True}
    return {codec.name.lower(): (codec, compress(codec, SMALL)) for codec in PACKED} | {
        "gzip members": (
            Codec.GZIP,
            gzip.compress(SMALL, mtime=0) + gzip.compress(SMALL, mtime=0),
        ),
        "snappy raw": (Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(SMALL))),
        "lz4 checksums": (
            Codec.LZ4,
            lz4.frame.compress(SMALL, block_linked=False, **checksums),
        ),
        "zstd unsized": (
            Codec.ZSTD,
            zstandard.ZstdCompressor(write_content_size=False).compress(SMALL),
        ),
        "zstd checksum": (
            Codec.ZSTD,
            zstandard.ZstdCompressor(write_checksum=True).compress(SMALL),
        ),
    }


SMALL_BODIES = small_bodies()


@pytest.mark.parametrize("name", SMALL_BODIES)
def test_every_truncation_is_refused(name):
    codec, body = SMALL_BODIES[name]
    # A body that ends after the first member, or after the xerial header, is valid. The
    # first bytes of the second member's magic count as padding.
    whole = {
        "snappy": {16: b""},
        "gzip members": {len(body) // 2 + n: SMALL for n in range(3)},
    }.get(name, {})
    for cut in range(len(body)):
        assert outcome(codec, body[:cut]) == whole.get(cut), cut


@pytest.mark.parametrize("name", SMALL_BODIES)
def test_every_bit_flip_returns_bytes_or_a_logcore_error(name):
    codec, body = SMALL_BODIES[name]
    for position in range(len(body)):
        for bit in range(8):
            flipped = bytearray(body)
            flipped[position] ^= 1 << bit
            outcome(codec, bytes(flipped))


HEADS = {
    Codec.GZIP: [b"", b"\x1f\x8b\x08", b"\x1f\x8b\x08" + bytes(7)],
    Codec.SNAPPY: [b"", b"\x82SNAPPY\x00" + bytes(8), b"\x82SNAPPY\x00" + bytes(11)],
    Codec.LZ4: [
        b"",
        bytes.fromhex("04224d18"),
        bytes.fromhex("04224d18604082"),
        bytes.fromhex("04224d18704071"),
    ],
    Codec.ZSTD: [
        b"",
        bytes.fromhex("28b52ffd"),
        bytes.fromhex("28b52ffd0058"),
        struct.pack("<I", 0x184D2A50),
    ],
}


@settings(deadline=None)
@given(st.sampled_from(PACKED), st.data(), st.binary(max_size=200), st.booleans())
@example(Codec.ZSTD, None, bytes.fromhex("28b52ffd20"), False)
def test_any_bytes_return_bytes_or_a_logcore_error(codec, draw, body, legacy_lz4):
    head = draw.draw(st.sampled_from(HEADS[codec])) if draw else b""
    outcome(codec, head + body, legacy_lz4=legacy_lz4)


@settings(deadline=None)
@given(st.sampled_from(sorted(SMALL_BODIES)), st.data())
def test_any_splice_returns_bytes_or_a_logcore_error(name, draw):
    codec, body = SMALL_BODIES[name]
    start = draw.draw(st.integers(0, len(body)))
    end = draw.draw(st.integers(0, len(body)))
    outcome(codec, body[:start] + draw.draw(st.binary(max_size=12)) + body[end:])


def test_thousands_of_tiny_frames_take_linear_time():
    assert decompress(Codec.GZIP, gzip.compress(b"", mtime=0) * 10_000) == b""
    assert (
        decompress(Codec.ZSTD, zstandard.ZstdCompressor().compress(b"") * 10_000) == b""
    )
    assert decompress(Codec.SNAPPY, compress(Codec.SNAPPY, b"") * 10_000) == b""
    assert decompress(Codec.LZ4, lz4_frame(b"\x01\x00\x00\x00\x00" * 10_000)) == b""


# --- where it runs ---


def test_threads_compress_and_decompress_concurrently():
    failures = []

    def work(seed):
        data = random.Random(seed).randbytes(3000) * 20
        for _ in range(20):
            for codec in CODECS:
                if decompress(codec, compress(codec, data)) != data:
                    failures.append((seed, codec))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_more_levels_than_cached_contexts_are_compressed():
    for level in list(range(1, 19)) * 2:
        assert decompress(Codec.ZSTD, compress(Codec.ZSTD, SMALL, level=level)) == SMALL


FORK = """
import os
from logcore.format.compression import Codec, compress, decompress
data = b"before and after" * 1000
packed = {codec: compress(codec, data) for codec in Codec}
assert all(decompress(codec, body) == data for codec, body in packed.items())
child = os.fork()
works = all(decompress(codec, body) == data and compress(codec, data) == body for codec, body in packed.items())
if child == 0:
    os._exit(0 if works else 1)
print(works, os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_parent_and_child_decompress_after_a_fork():
    assert run_python(FORK).split() == ["True", "0"]


def test_codec_packages_are_imported_at_first_use():
    code = "import sys, logcore.format.compression; print({'lz4', 'zstandard', 'cramjam'} & set(sys.modules))"
    assert run_python(code).strip() == "set()"


@pytest.mark.parametrize(
    ("codec", "modules", "command"),
    [
        (Codec.SNAPPY, ["cramjam"], "pip install cramjam"),
        (Codec.LZ4, ["lz4.frame", "lz4.block"], "pip install lz4"),
        (Codec.ZSTD, ["zstandard"], "pip install zstandard"),
    ],
)
def test_error_names_the_install_command_of_a_missing_package(
    monkeypatch, codec, modules, command
):
    packed = compress(codec, SMALL)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedCodecError, match=command):
        decompress(codec, packed)
    with pytest.raises(UnsupportedCodecError, match=command):
        compress(codec, SMALL, level=5 if codec is Codec.ZSTD else None)
