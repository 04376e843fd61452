"""The lock of a log that several processes write: for the threads of this one, and a turn among the processes.

The thread that enters it has the turn, and what this process knows of the partition is up to date then:

    the note says             this process
    the same                  goes on
    a larger end              walks the heads of what others appended, and takes them in
    another structure         opens the partition again, believing it up to the end that the note names
    busy, or nothing          recovers the partition as after a crash: a writer died in the middle of its turn
    deleted, or a failed sync refuses writes

Rules:
- Nothing is changed outside a turn, and every turn ends with the note that the next holder needs. One that does not
  end, because its process died or because of an error half way, leaves "busy".
- The note names another structure whenever anything but the end has changed: segments, the log start, leader epochs,
  notes. That is found by comparing, so that no step can forget to say so.
- What is on disk is noted by who synced it, outside the turn; see turns.py.

writer.py changes the log, and knows this module as its lock and as who tells others what is on disk.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Final, Protocol

import attrs

from logcore.checkpoint import Key, Notes
from logcore.config import Durability
from logcore.errors import (
    DiskFullError,
    DurabilityUnknownError,
    LogClosedError,
    LogNotFoundError,
    StorageWriteError,
)
from logcore.fs import FS
from logcore.partition.epochs import Entry
from logcore.partition.groupcommit import GroupCommit
from logcore.partition.opening import Opened
from logcore.partition.state import PartitionState
from logcore.partition.turns import Note, Synced, Turn
from logcore.segment import ActiveSegment

#: Its structure is that of no note, so that the next turn opens the partition again.
_UNKNOWN: Final = Note(-1, 0, 0)

#: Opens the partition again. The argument: up to where it is believed; None to recover it as after a crash.
Open = Callable[[int | None], Opened]


class Writer(Protocol):
    """What is asked of the writer (writer.py), which is also brought up to date. The methods are called under its lock,
    but for show_elsewhere().
    """

    state: PartitionState
    active: ActiveSegment
    commit: GroupCommit
    notes: Notes
    epochs: list[Entry]
    durability: Durability
    is_midway: bool

    def adopt_locked(self, end: int, size_bytes: int) -> None: ...
    def renew_locked(self, opened: Opened, durable_end: int, cut_offset: int | None) -> None: ...
    def begin_after_locked(self, opened: Opened) -> None: ...
    def show_elsewhere(self, end: int) -> None: ...


class SharedLock:
    """See the top of this module. Entered like a threading.Lock; made by open_log(), which enters it by opening().

    is_believed: whether the log was in order when it was opened, because other processes have it open.
    """

    def __init__(self, fs: FS, handle: int, key: Key, path: str) -> None:
        """handle: of the lock file of the log directory. path: of the partition's directory, which exists."""
        self._fs = fs
        self._forks = fs.forks
        self._path = path
        self._mutex = threading.Lock()
        self._turn = Turn(fs, handle, key, path)
        self._has_turn = False  # under the mutex
        self.is_believed = False
        self._note = Note(0, 0, 0)  # what this process knows, or is about to leave; under the mutex
        self._synced: Synced | None = None  # as of the last look; under the mutex
        self._shape: tuple[Any, ...] = ()  # what the note's structure stands for; under the mutex
        self._cuts = 0  # as of the last look; under publishing and the mutex
        self._showing = threading.Lock()
        self._writer: Writer | None = None
        self._open: Open | None = None

    # -- as a lock ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self, blocking: bool = True) -> bool:
        """Raises LogLockedError, and what reading and recovering the partition raise."""
        # First the threads of this process, then the processes: record locks do not exclude threads.
        if not self._mutex.acquire(blocking):
            return False
        try:
            if self._is_over():
                return True
            if not self._turn.take(waits=blocking):
                self._mutex.release()
                return False
            self._has_turn = True
            # look() gives the very objects of the last turn while nothing has changed: the usual case costs one read.
            note, synced = self._turn.look()
            if note is not self._note or synced is not self._synced:
                self._catch_up(note, synced)
            # From here on a death leaves "busy". Not for a log that refuses writes: nothing will be changed.
            if not self._is_over():
                self._turn.begin()
        except BaseException:
            self._give()
            raise
        return True

    def release(self) -> None:
        try:
            if self._has_turn:
                self.settle()
        finally:
            self._give()

    def locked(self) -> bool:
        return self._mutex.locked()

    @property
    def has_turn(self) -> bool:
        """Whether this process may change the partition; for the thread that holds the lock."""
        return self._has_turn

    def _give(self) -> None:
        try:
            if self._has_turn:
                self._has_turn = False
                self._turn.give()
        finally:
            self._mutex.release()

    def _is_over(self) -> bool:
        """Whether the log is closed, refuses writes or is the parent's: then nothing will be changed."""
        writer = self._writer
        assert writer is not None, "entered before the log was opened"
        is_ours = self._fs.forks == self._forks
        return writer.state.is_closed or writer.commit.failure is not None or not is_ours

    # -- opening and closing -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opening(self, *, is_alone: bool, check: Callable[[], object]) -> Generator[int | None]:
        """The first turn, in which attach() is to be called: gives the end up to which the partition is believed; None
        to recover it. is_alone: no other process has the directory open, so that the note is an old one. check: called
        where others have the partition open, before anything is changed; what it raises ends the turn.
        """
        with self._mutex:
            self._turn.take()
            try:
                note = self._turn.note()
                synced = self._turn.synced()
                if note is not None and note.is_deleted and not is_alone:
                    raise LogNotFoundError("another process is deleting the partition", path=self._path)
                if note is not None and not is_alone:
                    check()
                # Recover unless other processes have the log in order: not after a power cut, a death in a turn or a
                # failed sync, nor with a note that processes left which have all ended.
                if note is None or synced is None or is_alone or note.is_busy or synced.has_failed:
                    self._note = Note(self._turn.new_number(), 0, 0, is_busy=True)
                    believed_end = None
                else:
                    self._note = note._replace(is_busy=True)
                    believed_end = note.end
                self._turn.leave(self._note)
                yield believed_end
                self.settle()
            finally:
                self._turn.give()

    def attach(self, writer: Writer, opened: Opened, open_again: Open, *, believed_end: int | None) -> None:
        """writer: of the log that was opened, which has done nothing yet. believed_end: what opening() gave."""
        self._writer = writer
        self._open = open_again
        with self._turn.publishing.held():
            synced = self._settle_synced(opened, believed_end)
            self._cuts = synced.cuts
        writer.commit.renew(synced.durable_end)
        if writer.durability.waits:
            writer.state.visible = synced.durable_end
        self.is_believed = believed_end is not None
        self._shape = self._present_shape()

    def _settle_synced(self, opened: Opened, believed_end: int | None) -> Synced:
        """What is on disk once a log was opened; under publishing. After a recovery all of it is. A sync that began
        before a recovery does not count: the file may have been replaced, or what was not on disk cut off.
        """
        synced = self._turn.synced()
        if believed_end is not None and synced is not None:
            return synced
        if synced is None:
            durable_end = opened.end
            if believed_end is not None:  # nothing was synced for it
                durable_end = opened.log_start
            synced = Synced(durable_end, self._turn.new_number())
        else:
            synced = attrs.evolve(synced.cut(opened.end), durable_end=opened.end, has_failed=False)
        self._turn.note_synced(synced)
        return synced

    def settle(self) -> None:
        """Ends the turn for the other processes: leaves the note of the present state. Under the lock."""
        writer = self._writer
        assert writer is not None, "attach() was not called"
        # An error half way: the note stays "busy", and the next holder recovers.
        failure = writer.commit.failure
        has_failed = failure is not None and not isinstance(failure.__cause__, LogClosedError)
        if writer.is_midway or has_failed:
            return
        # Each part is replaced when it changes, so the same objects mean the same structure.
        shape = self._present_shape()
        structure = self._note.structure
        if not all(map(operator.is_, shape, self._shape)):
            structure += 1
        self._shape = shape
        self._note = Note(structure, writer.state.end, writer.active.size_bytes)
        # Where it cannot be written, the next holder recovers, and finds all of it.
        with contextlib.suppress(DiskFullError, StorageWriteError):
            self._turn.leave(self._note)

    def leave(self) -> None:
        """The last turn ends before the lock is given up, for the lock file may be closed next."""
        try:
            if self._has_turn:
                self.settle()
        finally:
            self._turn.give_rewriting()
            if self._has_turn:
                self._has_turn = False
                self._turn.give()

    def take_rewriting(self) -> bool:
        """The right to compact the partition, beside the turns; False where another process does."""
        return self._turn.take_rewriting()

    def give_rewriting(self) -> None:
        self._turn.give_rewriting()

    def _present_shape(self) -> tuple[Any, ...]:
        """The parts that others learn only by opening the partition again. Each is replaced whole, never changed."""
        writer = self._writer
        assert writer is not None, "the log is open"
        state = writer.state
        return state.segments, writer.active, writer.notes, writer.epochs, state.gaps.noted, state.log_start

    # -- what others did ---------------------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Takes in what others did, for who reads; True when the high watermark moved. Takes a turn only if there is
        anything. Errors as acquire().
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        before = writer.state.visible
        if self.is_behind():
            with self:
                pass
        return writer.state.visible != before

    def is_behind(self) -> bool:
        """Whether others did something that this process has not taken in: two small reads, without a lock."""
        writer = self._writer
        assert writer is not None, "the log is open"
        if self._is_over():
            return False
        note = self._turn.note()
        synced = self._turn.synced()
        known = self._note
        # A turn that lasts has not brought anything yet.
        if note is None or note.is_deleted or (note.structure, note.end) != (known.structure, known.end):
            return True
        return synced is None or synced.durable_end > writer.commit.durable_end or synced.cuts != self._cuts

    def _catch_up(self, note: Note | None, synced: Synced | None) -> None:
        """Under the turn. Raises what reading and recovering the partition raise."""
        writer = self._writer
        assert writer is not None, "the log is open"
        if note is not None and note.is_deleted:
            writer.commit.poison(LogNotFoundError("another process has deleted the partition", path=self._path))
        elif synced is not None and synced.has_failed:
            writer.commit.poison(StorageWriteError("a sync failed in another process", path=self._path))
        elif note is None or synced is None or note.is_busy:
            self._note = _UNKNOWN
            self._renew(None)
            self._note = Note(self._turn.new_number(), 0, 0)
        elif note.structure != self._note.structure or synced.cuts != self._cuts:
            self._note = _UNKNOWN
            self._renew(note.end)
            self._note = note
        else:
            if note.end != writer.state.end:
                self._note = _UNKNOWN  # should this fail half way, the partition is opened again
                writer.adopt_locked(note.end, note.size_bytes)
            self._note = note
            if synced.durable_end > writer.commit.durable_end:
                writer.commit.learn(synced.durable_end)
            self._synced = synced
            visible = writer.state.end
            if writer.durability.waits:
                visible = writer.commit.durable_end
            self.show(visible)

    def _renew(self, believed_end: int | None) -> None:
        """Opens the partition again: what this process knows of it is old, or it has to be recovered."""
        writer = self._writer
        assert writer is not None and self._open is not None, "the log is open"
        # No sync of this process meanwhile: it would be of a file that may be replaced.
        with writer.commit.held():
            opened = self._open(believed_end)
            with self._turn.publishing.held():
                synced = self._settle_synced(opened, believed_end)
                cut_offset = synced.lowest_cut_since(self._cuts, opened.log_start)
                self._cuts = synced.cuts
                writer.renew_locked(opened, synced.durable_end, cut_offset)
        self._shape = self._present_shape()
        writer.begin_after_locked(opened)

    # -- what is on disk -----------------------------------------------------------------------------------------------

    def show(self, end: int) -> None:
        """Moves the visible end up to where it may be: two threads may come with two ends."""
        writer = self._writer
        assert writer is not None, "the log is open"
        with self._showing:
            if end > writer.state.visible:
                writer.state.show(end)

    def publish(self, end: int) -> bool:
        """Notes for the other processes that all below end is on disk; False when one of them has cut the log since
        this process looked, or a sync of one failed.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        with self._turn.publishing.held():
            synced = self._turn.synced()
            if synced is None or synced.cuts != self._cuts:
                return False
            if synced.has_failed:
                writer.commit.poison(StorageWriteError("a sync failed in another process", path=self._path))
                return False
            if end > synced.durable_end:
                with contextlib.suppress(DiskFullError, StorageWriteError):  # they see it when it moves next
                    self._turn.note_synced(attrs.evolve(synced, durable_end=end))
                    writer.show_elsewhere(end)
        return True

    def cut(self, offset: int) -> None:
        """Before the log is cut there: nothing above is on disk any more, and no sync that began before may say so.
        Under the lock.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        with self._turn.publishing.held():
            synced = self._turn.synced() or Synced(offset, self._cuts)
            self._cuts = synced.cuts + 1
            self._turn.note_synced(synced.cut(offset))
            writer.show_elsewhere(min(writer.state.visible, offset))

    def fail(self) -> None:
        """Tells the other processes that a write or a sync failed: none of them may call anything safe any more."""
        with self._turn.publishing.held():
            synced = self._turn.synced()
            if synced is not None:
                with contextlib.suppress(DiskFullError, StorageWriteError):
                    self._turn.note_synced(attrs.evolve(synced, has_failed=True))

    def wait(self, last: int) -> None:
        """Returns when the record at an offset, which this process has appended, is on disk.

        Raises DurabilityUnknownError where another process has cut the log or a sync failed meanwhile.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        cuts = writer.state.cuts
        known = len(cuts)
        while writer.commit.durable_end <= last:
            with self:  # a turn takes in what others cut, and what they brought to the disk
                has_failed = writer.commit.failure is not None
                # Also by a cut that another thread took in before this one began to wait.
                is_cut = writer.state.end <= last or any(offset <= last for offset in cuts[known:])
            if has_failed or is_cut:
                raise DurabilityUnknownError(
                    "the log was cut or has failed while a record waited for the disk", path=self._path
                )
            if writer.commit.durable_end <= last:
                writer.commit.wait(last + 1)


def say_deleted(fs: FS, handle: int, key: Key, path: str) -> None:
    """Tells processes that have a partition open that it is about to be deleted: each finds it in its next turn.

    handle: of the lock file of the log directory. Raises LogLockedError.
    """
    turn = Turn(fs, handle, key, path)
    turn.take()
    try:
        note = turn.note() or Note(turn.new_number(), 0, 0)
        turn.leave(note._replace(is_busy=False, is_deleted=True))
    finally:
        turn.give()
