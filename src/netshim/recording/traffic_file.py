"""The file of a recording: frames of clients and of the broker, in their order.

Format, version 1; all numbers are big-endian:

    file      magic "nshtraff" (8 bytes), version (uint32), wall clock at the start in
              milliseconds since 1970 (int64), then blocks
    block     size of its content in the file, size of its decompressed content, CRC-32C
              of its content in the file (uint32 each), then the content: one zstd frame
    content   whole records
    record    size of its payload (uint32), kind (uint8), flags (uint8), number of its
              connection (uint32), time since the start in nanoseconds (int64), payload

    kind          payload
    1 OPEN        JSON object: peer, listener
    2 REQUEST     a frame of the client with its size in front, as it was received
    3 RESPONSE    a frame of the broker with its size in front, as it was sent
    4 CLOSE       none: the connection has ended
    5 END         none: the recording was closed; it is the last record

Flag 1 of a REQUEST or RESPONSE marks a frame that contained secrets. Zeros replace
these bytes, see secrets.py.

Rules:
- Connections are numbered from 1. Times never decrease.
- A file whose last block is incomplete is valid up to the previous block, because the
  process may have been killed. Any other damage is an error.
- VERSION is raised by each change of the format that older readers would misread.
"""

from __future__ import annotations

import enum
import json
import os
import struct
from collections.abc import Iterator
from typing import Final, Self

import attrs

from logcore.errors import LogcoreError
from logcore.format.compression import Codec, compress, decompress
from logcore.fs import FS, OS
from logcore.kernels.checksum import crc32c

MAGIC: Final = b"nshtraff"
VERSION: Final = 1
#: Flag of a frame without its secrets.
REDACTED: Final = 1

#: The three headers of the format above. `>` adds no padding.
_FILE_HEADER: Final = struct.Struct(">8sIq")
_BLOCK_HEADER: Final = struct.Struct(">III")
RECORD_HEADER: Final = struct.Struct(">IBBIq")
#: Largest content of a block: one record of the largest frame, and others before it.
_MAX_BLOCK_BYTES: Final = (1 << 31) + (1 << 22)
#: Compression level. It is fast, because a recording may use only a small part of the
#: broker's processor time.
_LEVEL: Final = -50


class TrafficKind(enum.IntEnum):
    """The kinds of records."""

    OPEN = 1
    REQUEST = 2
    RESPONSE = 3
    CLOSE = 4
    END = 5


class RecordingError(LogcoreError):
    """A file is not a recording, or is damaged. `position` counts from its start."""


@attrs.frozen
class TrafficRecord:
    """One record of a recording."""

    kind: TrafficKind
    #: Whether zeros replace secrets.
    is_redacted: bool
    #: Number of the connection.
    connection: int
    #: Time since the start of the recording, in nanoseconds.
    time_ns: int
    payload: bytes

    @property
    def frame(self) -> memoryview:
        """The frame of a REQUEST or RESPONSE without its size."""
        return memoryview(self.payload)[4:]

    def fields(self) -> dict[str, str]:
        """Return the fields of an OPEN record: peer and listener."""
        return {str(key): str(value) for key, value in json.loads(self.payload).items()}


def file_header(start_ms: int) -> bytes:
    """Return the first bytes of a file."""
    return _FILE_HEADER.pack(MAGIC, VERSION, start_ms)


def encode_block(content: bytes | bytearray) -> bytes:
    """Return a block of whole records."""
    body = compress(Codec.ZSTD, content, level=_LEVEL)
    return _BLOCK_HEADER.pack(len(body), len(content), crc32c(body)) + body


def encode_open(peer: str, listener: str) -> bytes:
    """Return the payload of an OPEN record."""
    return json.dumps({"peer": peer, "listener": listener}).encode()


class TrafficFile:
    """A recording that is open for reading. It holds one block at a time in memory.

    It can be iterated once. Use it in a `with` block.
    """

    def __init__(self, path: str | os.PathLike[str], fs: FS = OS) -> None:
        """Open a recording.

        Raises:
            RecordingError: the file is not a recording, or has another version.
            FileNotFoundError: there is no such file.
            StorageReadError: the file cannot be read.
        """
        self.path = os.fspath(path)
        self._fs = fs
        #: Number of bytes after the last complete block, once all records were read.
        self.incomplete_bytes = 0
        #: Whether the recording was closed, once all records were read.
        self.is_complete = False
        self._handle = fs.open(self.path)
        try:
            #: Wall clock at the start of the recording, in milliseconds since 1970.
            self.start_ms = self._read_header()
        except BaseException:
            fs.close(self._handle)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._fs.close(self._handle)

    def _read_header(self) -> int:
        header = self._fs.pread(self._handle, _FILE_HEADER.size, 0)
        if header[: len(MAGIC)] != MAGIC or len(header) < _FILE_HEADER.size:
            raise RecordingError(
                "not a recording",
                path=self.path,
                position=0,
                expected=f"{_FILE_HEADER.size} bytes that begin with {MAGIC!r}",
                found=repr(header[: len(MAGIC)]),
            )
        _, version, start_ms = _FILE_HEADER.unpack(header)
        if version != VERSION:
            raise RecordingError(
                "a recording of another version",
                path=self.path,
                position=len(MAGIC),
                expected=VERSION,
                found=version,
            )
        return int(start_ms)

    def __iter__(self) -> Iterator[TrafficRecord]:
        """Yield the records.

        Raises:
            RecordingError: a block is damaged.
            StorageReadError: the file cannot be read.
        """
        position = _FILE_HEADER.size
        size = self._fs.size(self._handle)
        while position < size:
            header = self._fs.pread(self._handle, _BLOCK_HEADER.size, position)
            if len(header) < _BLOCK_HEADER.size:
                # The recorder was killed while it wrote this block, or is still writing
                # it.
                break
            body_bytes, content_bytes, crc = _BLOCK_HEADER.unpack(header)
            start = position + _BLOCK_HEADER.size
            # The checksum does not cover the block's header, so a damaged size could
            # cause a large allocation.
            if not body_bytes or not 0 < content_bytes <= _MAX_BLOCK_BYTES:
                raise RecordingError(
                    "a block of an impossible size",
                    path=self.path,
                    position=position,
                    expected=f"1 to {_MAX_BLOCK_BYTES} bytes",
                    found=f"{body_bytes} bytes with a content of {content_bytes}",
                )
            # Only a part of the content was written.
            if start + body_bytes > size:
                break
            body = self._fs.pread(self._handle, body_bytes, start)
            yield from self._records(
                self._content(body, content_bytes, crc, position), position
            )
            position = start + body_bytes
        self.incomplete_bytes = size - position

    def _content(self, body: bytes, size: int, crc: int, position: int) -> bytes:
        """Return the decompressed content of the block at a position."""
        actual_crc = crc32c(body)
        if actual_crc != crc:
            raise RecordingError(
                "a damaged block: its CRC-32C differs",
                path=self.path,
                position=position,
                expected=crc,
                found=actual_crc,
            )
        try:
            content = bytes(decompress(Codec.ZSTD, body, max_size=size))
        except LogcoreError as error:
            raise RecordingError(
                f"a damaged block: {error.reason}", path=self.path, position=position
            ) from error
        if len(content) != size:
            raise RecordingError(
                "a damaged block: its content has another size",
                path=self.path,
                position=position,
                expected=size,
                found=len(content),
            )
        return content

    def _records(self, content: bytes, position: int) -> Iterator[TrafficRecord]:
        """Yield the records of the block at a position."""
        at = 0
        while at < len(content):
            start = at + RECORD_HEADER.size
            if start > len(content):
                raise self._malformed("its header is incomplete", position, at)
            size, kind, flags, connection, time_ns = RECORD_HEADER.unpack_from(
                content, at
            )
            stop = start + size
            if stop > len(content):
                raise self._malformed("it is longer than its block", position, at)
            try:
                kind = TrafficKind(kind)
            except ValueError:
                raise self._malformed(f"unknown kind {kind}", position, at) from None
            record = TrafficRecord(
                kind, bool(flags & REDACTED), connection, time_ns, content[start:stop]
            )
            if kind is TrafficKind.OPEN:
                try:
                    # Decoded here, so that fields() never fails for a record that a
                    # caller receives.
                    record.fields()
                except (ValueError, AttributeError):
                    raise self._malformed("malformed JSON", position, at) from None
            yield record
            # False again if a record follows END.
            self.is_complete = kind is TrafficKind.END
            at = stop

    def _malformed(self, reason: str, position: int, at: int) -> RecordingError:
        return RecordingError(
            f"a malformed record {at} bytes into the content of a block: {reason}",
            path=self.path,
            position=position,
        )
