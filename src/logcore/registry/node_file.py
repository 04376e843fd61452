"""Format of a node's file: a head and two slots. Each change overwrites the older slot.

    0                head: magic `LCNODE1\\n`, head size u32, capacity u32, creation id 16 bytes, kind u8, 3 zeros,
                     length of the name u32, the name if the file's is a hash of it, CRC-32C u32; all big-endian
    head size        slot 0: version u64, length u32, session 16 bytes (zeros: none), flags u16, 2 zeros, CRC-32C u32,
                     value
    + capacity       slot 1: the same

Rules:
- Version v is stored in slot v & 1. An interrupted write damages one slot only, and the
  other slot holds the previous version.
- The CRC of a slot covers its fields, its value and the creation id. A slot of an
  earlier node of the same name is therefore invalid.
- A file is torn if its writer died before the head was complete. A torn file is not a node.
  Only ephemeral and unsynced nodes are written in place. A persistent node gets its name
  after it is durable, so a persistent node without a valid slot is damaged.

This module does not use the disk: it decodes and encodes the bytes of a file.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import struct
from typing import Final
from urllib.parse import quote, unquote

import attrs

from logcore.errors import CorruptRegistryError, UnsupportedRegistryError
from logcore.kernels.checksum import crc32c

SUFFIX: Final = ".node"
#: Suffix of a file that will be renamed. To the holder of its domain's lock, the file is
#: garbage.
UNFINISHED: Final = ".tmp"
PAGE_BYTES: Final = 4096

_MAGIC: Final = b"LCNODE1\n"
#: Magic bytes without the version. A write that a power cut damaged may begin with a
#: part of them.
_ANY_MAGIC: Final = re.compile(rb"LCNODE[0-9]+\n?")
_HEADER: Final = struct.Struct(">8sII16sB3xI")
_SLOT: Final = struct.Struct(">QI16sH2x")
_VERSION: Final = struct.Struct(">Q")
_CRC: Final = struct.Struct(">I")
_SLOT_BYTES: Final = _SLOT.size + _CRC.size
_NO_SESSION: Final = bytes(16)
#: Longer file names are replaced by a hash, because file systems limit names to 255
#: bytes, including suffixes.
_LONGEST_FILE_NAME: Final = 180
_HASH: Final = "%hash-"
_MAX_HEADER_BYTES: Final = 16 * PAGE_BYTES
_MAX_CAPACITY: Final = 1 << 21


class NodeKind(enum.IntEnum):
    """Lifetime of a node.

    PERSISTENT nodes survive any crash, EPHEMERAL nodes end with their session, and
    UNSYNCED nodes survive a kill but not a power cut.
    """

    PERSISTENT = 0
    EPHEMERAL = 1
    UNSYNCED = 2


@attrs.frozen
class NodeHeader:
    """Head of a node's file.

    `creation` is a random id of 16 bytes, which is unique to this creation of the node.
    `name` is the name of the node, if the file's name is a hash.
    """

    creation: bytes
    kind: NodeKind
    capacity: int = PAGE_BYTES
    name: str | None = None

    @property
    def size(self) -> int:
        if self.name is None:  # most nodes; it is called seven times for each change
            return PAGE_BYTES
        used = _HEADER.size + len(self.name.encode()) + _CRC.size
        return -(-used // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_size(self) -> int:
        return self.size + 2 * self.capacity

    def place(self, version: int) -> int:
        """Return the position of the slot of a version in the file."""
        return self.size + (version & 1) * self.capacity

    def holds(self, value: bytes) -> bool:
        return _SLOT_BYTES + len(value) <= self.capacity

    def with_capacity_for(self, value: bytes) -> NodeHeader:
        """Return a head of the same node with capacity for a value."""
        capacity = self.capacity
        while capacity < _SLOT_BYTES + len(value):
            capacity *= 2
        return attrs.evolve(self, capacity=capacity)

    def pack(self) -> bytes:
        name = (self.name or "").encode()
        fields = (
            _HEADER.pack(
                _MAGIC, self.size, self.capacity, self.creation, self.kind, len(name)
            )
            + name
        )
        return (fields + _CRC.pack(crc32c(fields))).ljust(self.size, b"\0")


@attrs.frozen
class Slot:
    """One version of a node.

    `session` has 32 hex digits, or is None for a node without an owner.
    """

    version: int
    value: bytes
    session: str | None = None

    def pack(self, head: NodeHeader) -> bytes:
        session = _NO_SESSION
        if self.session is not None:
            session = bytes.fromhex(self.session)
        fields = _SLOT.pack(self.version, len(self.value), session, 0)
        return (
            fields + _CRC.pack(crc32c(head.creation + fields + self.value)) + self.value
        )


def new_file(head: NodeHeader, slot: Slot) -> bytes:
    """Return the bytes of a file with one version, for one write."""
    return head.pack().ljust(head.place(slot.version), b"\0") + slot.pack(head)


def read_header(data: bytes, path: str) -> NodeHeader | None:
    """Decode the head of a file; return None for a torn file.

    Raises:
        CorruptRegistryError: no crash of this library leaves such a file.
        UnsupportedRegistryError: a newer version wrote the file.
    """
    written = len(data.rstrip(b"\0"))
    start = data[: len(_MAGIC)]
    if start != _MAGIC and _ANY_MAGIC.fullmatch(start) and written >= _HEADER.size:
        raise UnsupportedRegistryError(
            "a node of another version", path=path, expected=_MAGIC, found=start
        )
    if not _MAGIC.startswith(start.rstrip(b"\0")):
        raise CorruptRegistryError(
            "the file is not a node",
            path=path,
            position=0,
            expected=_MAGIC,
            found=start,
        )
    if written < _HEADER.size:
        return None
    _, size, capacity, creation, kind, length = _HEADER.unpack_from(data)
    stop = _HEADER.size + length
    if len(data) < stop + _CRC.size or _CRC.unpack_from(data, stop)[0] != crc32c(
        data[:stop]
    ):
        if written < stop + _CRC.size <= _MAX_HEADER_BYTES:
            return None
        raise CorruptRegistryError(
            "the head of a node is damaged", path=path, position=0
        )
    try:
        head = NodeHeader(
            creation,
            NodeKind(kind),
            capacity,
            data[_HEADER.size : stop].decode() or None,
        )
    except ValueError as error:
        raise UnsupportedRegistryError(
            "a node of a kind that this version does not support", path=path
        ) from error
    if head.size != size or not PAGE_BYTES <= capacity <= _MAX_CAPACITY:
        raise CorruptRegistryError(
            "the head of a node contradicts itself", path=path, position=0
        )
    return head


def read_slot(head: NodeHeader, data: bytes) -> Slot | None:
    """Return the newest version in a file, or None if neither slot is valid."""
    # The newer slot first: if it is valid, the CRC of the other one is not computed.
    newer = 0
    if _version(head, data, 1) > _version(head, data, 0):
        newer = 1
    return _slot(head, data, newer) or _slot(head, data, 1 - newer)


def _version(head: NodeHeader, data: bytes, number: int) -> int:
    """Return the version in a slot, whose CRC is not checked; -1 in a short file."""
    start = head.place(number)
    if len(data) < start + _SLOT_BYTES:
        return -1
    return int(_VERSION.unpack_from(data, start)[0])


def _slot(head: NodeHeader, data: bytes, number: int) -> Slot | None:
    start = head.place(number)
    if len(data) < start + _SLOT_BYTES:
        return None
    version, length, session, _ = _SLOT.unpack_from(data, start)
    at = start + _SLOT_BYTES
    if (
        length > head.capacity - _SLOT_BYTES
        or len(data) < at + length
        or version & 1 != number
    ):
        return None
    fields = data[start : start + _SLOT.size]
    value = data[at : at + length]
    if _CRC.unpack_from(data, start + _SLOT.size)[0] != crc32c(
        head.creation + fields + value
    ):
        return None
    if session == _NO_SESSION:
        return Slot(version, value)
    return Slot(version, value, session.hex())


# It is called five times for each change of a node: 25 us of 135.
@functools.lru_cache(maxsize=1_024)
def file_name(name: str) -> str:
    """Return the name of a node's directory, which is also its file's name without SUFFIX.

    The name is unique. Dots are encoded if they would hide the file or turn it into
    another kind of file.
    """
    encoded = quote(name, safe="")
    if name.startswith(".") or name.endswith((SUFFIX, UNFINISHED)):
        encoded = encoded.replace(".", "%2E")
    if len(encoded) > _LONGEST_FILE_NAME:
        return _HASH + hashlib.sha256(name.encode()).hexdigest()
    return encoded


def name_in_header(name: str) -> str | None:
    """Return the name to store in the head, or None if the file's name contains it."""
    if file_name(name).startswith(_HASH):
        return name
    return None


def is_hashed(file: str) -> bool:
    return file.startswith(_HASH)


def node_name(file: str) -> str | None:
    """Reverse file_name() for names that are not hashed.

    Return None for a name that file_name() does not return.
    """
    name = unquote(file, errors="surrogateescape")
    try:
        is_made_of_it = bool(name) and file_name(name) == file
    except UnicodeEncodeError:
        return None
    if is_made_of_it:
        return name
    return None
