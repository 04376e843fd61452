"""Turns: the right to change a partition that several processes write, and the note that they leave each other of it.

    logcore.turn, in the partition's directory

    position 0    what was changed last: written by who has the turn, when it begins and when it ends
    position 512  what is on disk, twice: written by who has synced, under a lock of its own

Rules:
- A turn is a record lock on a byte of the log directory's lock file. The kernel gives it back when its holder dies.
- The note says "busy" while a turn lasts. Who finds it so knows that its writer died in the middle, and recovers the
  partition before anything else.
- A note of another boot, or one that is damaged, says nothing. Nothing in it outlives a power cut.
- Of what is on disk, the older of the two is overwritten, and the newer one counts that is whole: a process that dies
  in the middle leaves the one before.
- The end that is on disk falls only when the log is cut, and cuts are counted: who synced before a cut notes nothing
  after it.

This module does not know what is in a partition; sharing.py does.
"""

from __future__ import annotations

import itertools
import os
import struct
import weakref
import zlib
from typing import Final, NamedTuple, cast

import attrs

from logcore.bytelocks import PARTITIONS_FROM, TURN_SECONDS, ByteLock
from logcore.checkpoint import TURN, Key
from logcore.errors import LogLockedError
from logcore.fs import FS, SharedFS

#: How many cuts are remembered. The oldest stands for all before it, at the lowest of their offsets.
_CUTS: Final = 8
#: A process that seems to have missed more has counted from another beginning.
_MOST_MISSED: Final = 1 << 32

_NOTE: Final = struct.Struct(">16sQqqI")  # boot, structure, end, size, flags; then their crc, and who has left it
_HOLDER: Final = struct.Struct(">I8s")  # pid, mark: last, so that a write that ends half way leaves the mark of before
_HOLDER_AT: Final = _NOTE.size + 4
_NOTE_BYTES: Final = _HOLDER_AT + _HOLDER.size
_SYNCED: Final = struct.Struct(f">8s16sQqQ{_CUTS}qII")  # mark, boot, number, durable end, cuts, the latest, flags, crc
_NOTE_MARK: Final = b"LCTURN1\n"
#: In its place while a turn lasts.
_BUSY_MARK: Final = b"LCBUSY1\n"
_SYNCED_MARK: Final = b"LCSYNC2\n"
_SYNCED_AT: Final = 512
_SYNCED_BYTES: Final = 2 * _SYNCED.size
_DELETED: Final = 1
_FAILED: Final = 1
#: A record is written in one piece, and read in one, but nothing promises that a reader does not meet half of it.
_LOOKS: Final = 100


class Note(NamedTuple):
    """What a turn left. structure: another number when files were replaced, so that what is known of them is old.

    end: the log end offset. size_bytes: of the active segment. pid: of the last holder, for messages.
    """

    structure: int
    end: int
    size_bytes: int
    is_busy: bool = False
    is_deleted: bool = False
    pid: int = 0


@attrs.frozen
class Synced:
    """What is on disk. cuts: how often the log was truncated, or recovered. latest: where, the last times, in order.
    has_failed: a sync has.
    """

    durable_end: int
    cuts: int
    latest: tuple[int, ...] = ()
    has_failed: bool = False

    def cut(self, offset: int) -> Synced:
        """Nothing at and above an offset is on disk any more, whatever a sync that began before says."""
        latest = (*self.latest, offset)
        if len(latest) > _CUTS:
            latest = (min(latest[:2]), *latest[2:])
        return Synced(min(self.durable_end, offset), self.cuts + 1, latest, self.has_failed)

    def lowest_cut_since(self, cuts: int, log_start: int) -> int | None:
        """The lowest offset at which the log was truncated after that many truncations; None if it was not."""
        missed = self.cuts - cuts
        if missed == 0:
            return None
        is_counted = missed <= len(self.latest) or (len(self.latest) == _CUTS and missed < _MOST_MISSED)
        if missed < 0 or not is_counted:
            return log_start
        return min(self.latest[-missed:])


class _Written(NamedTuple):
    """What is on disk, as written: with the number of the write, and its place behind _SYNCED_AT."""

    number: int
    at: int
    synced: Synced


class Turn:
    """The turns of one process in one partition. publishing: the lock under which what is on disk is noted."""

    def __init__(self, fs: FS, handle: int, key: Key, path: str) -> None:
        """handle: of the lock file of the log directory. path: of the partition's directory, which exists."""
        import hashlib  # late: few directories are shared

        self._fs = cast(SharedFS, fs)
        self._lock_handle = handle
        # Each partition has four bytes of the lock file by a hash of its name: the turn, publishing, rewriting, and one
        # spare. Two partitions must not share a byte: in one process, whoever gives it back would end the other's turn.
        # With 56 bits that happens in one of a billion directories of 10,000 partitions.
        number = int.from_bytes(hashlib.sha256("{}-{}".format(*key).encode()).digest()[:7], "big")
        self._byte = PARTITIONS_FROM + 4 * number
        self._path = path
        self._boot = self._fs.boot().boot_id
        self._pid = os.getpid()
        self._busy = _HOLDER.pack(self._pid, _BUSY_MARK)
        self._idle = _HOLDER.pack(self._pid, _NOTE_MARK)
        # (bytes, what they say) as read or left last; a turn of this process that follows another one of it finds them
        # unchanged, and decodes nothing.
        self._known_note: tuple[bytes, Note] = b"", Note(0, 0, 0)
        self._known_synced: tuple[bytes, Synced] = b"", Synced(0, 0)
        self._note_handle = self._fs.open(os.path.join(path, TURN), write=True, create=True)
        # Closed when no thread refers to this object any more: a reader may be about to look at the note.
        weakref.finalize(self, self._fs.close, self._note_handle).atexit = False
        self.publishing = ByteLock(self._fs, handle, self._byte + 1, path)

    def take(self, *, waits: bool = True) -> bool:
        """Raises LogLockedError when another process keeps the turn too long; False when it is not to be waited for."""
        if self._fs.lock_byte(self._lock_handle, self._byte):
            return True
        if not waits:
            return False
        note = self.note()
        while not self._fs.lock_byte(self._lock_handle, self._byte, timeout_ms=1000 * TURN_SECONDS):
            before = note
            note = self.note()
            if note == before:  # else others have had it in turns, and this one waits on
                raise self._kept(note)
        return True

    def _kept(self, note: Note | None) -> LogLockedError:
        pid = None
        if note is not None:
            pid = note.pid
        return LogLockedError(
            f"process {pid or '?'} has kept its turn for {TURN_SECONDS} seconds; if it is stopped, let it go on or "
            "end it",
            path=self._path,
            pid=pid,
        )

    def give(self) -> None:
        self._fs.unlock_byte(self._lock_handle, self._byte)

    def take_rewriting(self) -> bool:
        """The right to make segments that are to replace others; False where another process has it."""
        return self._fs.lock_byte(self._lock_handle, self._byte + 2)

    def give_rewriting(self) -> None:
        self._fs.unlock_byte(self._lock_handle, self._byte + 2)

    # -- the note ----------------------------------------------------------------------------------------------------

    def look(self) -> tuple[Note | None, Synced | None]:
        """What the last turn left, and what is on disk; for who has the turn. The objects of the last call, or of
        leave(), where they are the same.
        """
        content = self._fs.pread(self._note_handle, _SYNCED_AT + _SYNCED_BYTES, 0)
        note: Note | None = self._known_note[1]
        if content[:_NOTE_BYTES] != self._known_note[0]:
            note = self._unpacked(content)
            if note is not None:
                self._known_note = content[:_NOTE_BYTES], note
        synced: Synced | None = self._known_synced[1]
        if content[_SYNCED_AT:] != self._known_synced[0]:
            found = self._newest(content[_SYNCED_AT:])
            synced = None
            if found is not None:
                synced = found.synced
                self._known_synced = content[_SYNCED_AT:], synced
        return note, synced

    def note(self) -> Note | None:
        """What the last turn left; None where nothing is known, as after a power cut. Needs no turn."""
        return self._unpacked(self._fs.pread(self._note_handle, _NOTE_BYTES, 0))

    def _unpacked(self, content: bytes) -> Note | None:
        if len(content) < _NOTE_BYTES:
            return None
        boot, structure, end, size_bytes, flags = _NOTE.unpack_from(content)
        pid, mark = _HOLDER.unpack_from(content, _HOLDER_AT)
        is_sound = zlib.crc32(content[: _NOTE.size]) == int.from_bytes(content[_NOTE.size : _HOLDER_AT], "big")
        if not is_sound or boot != self._boot or mark not in (_NOTE_MARK, _BUSY_MARK):
            return None
        return Note(structure, end, size_bytes, mark == _BUSY_MARK, bool(flags & _DELETED), pid)

    def begin(self) -> None:
        """Marks the note "busy"; for the holder of the turn, once there is a note."""
        # 12 bytes instead of the whole note: the rest stays what the turn before has left.
        self._fs.pwrite(self._note_handle, self._busy, _HOLDER_AT)

    def leave(self, note: Note) -> None:
        """Replaces the note; for the holder of the turn."""
        packed = _NOTE.pack(self._boot, note.structure, note.end, note.size_bytes, _DELETED * note.is_deleted)
        if note.is_busy:
            holder = self._busy
        else:
            holder = self._idle
        content = packed + zlib.crc32(packed).to_bytes(4, "big") + holder
        self._fs.pwrite(self._note_handle, content, 0)
        self._known_note = content, note

    def new_number(self) -> int:
        """A structure number that no living process knows."""
        return int.from_bytes(self._fs.random_bytes(8), "big") >> 2  # leaves room to count up within 64 bits

    # -- what is on disk ---------------------------------------------------------------------------------------------

    def synced(self) -> Synced | None:
        """What is on disk; None where nothing is known. May be called without any lock."""
        for _ in range(_LOOKS):  # both may be in the middle of being written, one after the other
            content = self._fs.pread(self._note_handle, _SYNCED_BYTES, _SYNCED_AT)
            found = self._newest(content)
            if found is not None:
                return found.synced
            if len(content) < _SYNCED.size:
                return None
        return None

    def note_synced(self, synced: Synced) -> None:
        """Replaces what is said of the disk; under publishing."""
        content = self._fs.pread(self._note_handle, _SYNCED_BYTES, _SYNCED_AT).ljust(_SYNCED_BYTES, b"\0")
        before = self._newest(content)
        number = 1
        at = 0
        if before is not None:
            number = before.number + 1
            at = _SYNCED.size - before.at
        packed = self._packed_synced(number, synced)
        self._fs.pwrite(self._note_handle, packed, _SYNCED_AT + at)
        self._known_synced = content[:at] + packed + content[at + _SYNCED.size :], synced

    def _newest(self, content: bytes) -> _Written | None:
        """The newer of what is whole in the two places; None where neither is."""
        newest: _Written | None = None
        for at in (0, _SYNCED.size):
            piece = content[at : at + _SYNCED.size]
            if len(piece) < _SYNCED.size:
                continue
            mark, boot, number, durable_end, cuts, *latest, flags, crc = _SYNCED.unpack(piece)
            if mark != _SYNCED_MARK or boot != self._boot or crc != zlib.crc32(piece[:-4]):
                continue
            if newest is None or number > newest.number:
                known = tuple(offset for offset in latest if offset >= 0)
                newest = _Written(number, at, Synced(durable_end, cuts, known, bool(flags & _FAILED)))
        return newest

    def _packed_synced(self, number: int, synced: Synced) -> bytes:
        flags = _FAILED * synced.has_failed
        latest = (*synced.latest, *itertools.repeat(-1, _CUTS - len(synced.latest)))
        packed = _SYNCED.pack(_SYNCED_MARK, self._boot, number, synced.durable_end, synced.cuts, *latest, flags, 0)
        return packed[:-4] + zlib.crc32(packed[:-4]).to_bytes(4, "big")
