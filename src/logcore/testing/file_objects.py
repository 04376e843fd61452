"""File objects on a simulated disk, for programs that also use files without logcore.

`disk.open("state.json", "w")` returns a file object like that of `open()`, with the
same modes, buffers and text layers. The differences are:
- There is no descriptor. `disk.fsync(file)` or `file.sync()` replaces `os.fsync(file)`.
  It syncs flushed data, but not the data that is still in the file's buffer.
- The default encoding is UTF-8 on every machine.
- Errors are OSError, like those of real files.
- An unclosed file is flushed when it is garbage collected, as usual, unless its process
  was killed or the disk has crashed.

The content of files is in disk.py.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, NoReturn

from logcore.errors import LogcoreError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from logcore.testing.disk import SimulatedDisk

#: pytest hides the frames of this module in the traceback of a failure.
__tracebackhide__ = True

_KINDS: Final = frozenset("rwax")


class Handle(int):
    """A handle of an open file, used by logcore.

    If a program uses a handle as a file object, the error explains how to open a file
    object.
    """

    def __enter__(self) -> NoReturn:
        raise TypeError(
            'this is a handle for logcore; for a file object, pass a mode: disk.open(path, "r")'
        )

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f'a handle has no {name!r}; for a file object, pass a mode: disk.open(path, "r")'
        )


@contextlib.contextmanager
def _unwrap_os_errors() -> Generator[None, None, None]:
    """Raise the original OSError instead of the error into which the disk wraps it."""
    try:
        yield
    except LogcoreError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


class RawFile(io.RawIOBase):
    """A file without a buffer: each write reaches the disk at once. open_file() creates
    it.
    """

    def __init__(self, disk: SimulatedDisk, path: str, mode: str) -> None:
        self.name = path
        self.mode = mode
        self._disk = disk
        self._reads = "r" in mode or "+" in mode
        self._writes = "r" not in mode or "+" in mode
        self._appends = "a" in mode
        self._position = 0
        self._handle = -1  # not open yet
        with _unwrap_os_errors():
            self._handle = disk.open(
                path, write=self._writes, create="r" not in mode, exclusive="x" in mode
            )
            if "w" in mode:
                disk.truncate(self._handle, 0)
            if self._appends:
                self._position = disk.size(self._handle)

    def __repr__(self) -> str:
        return f"<RawFile {self.name!r} mode={self.mode!r}{' closed' if self.closed else ''}>"

    @property
    def is_lost(self) -> bool:
        """Return whether the process that opened the file, or its machine, was killed."""
        return self._disk.is_dead or not self._disk.is_open(self._handle)

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def fileno(self) -> NoReturn:
        raise io.UnsupportedOperation(
            "a file on a simulated disk has no descriptor; for os.fsync(file) call disk.fsync(file) or file.sync()"
        )

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._check(self._reads, "not readable")
        view = memoryview(buffer).cast("B")
        with _unwrap_os_errors():
            data = self._disk.pread(self._handle, len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: ReadableBuffer) -> int:
        self._check(self._writes, "not writable")
        view = memoryview(data).cast("B")
        with _unwrap_os_errors():
            if self._appends:
                self._position = self._disk.size(self._handle)
            self._disk.pwrite(self._handle, view, self._position)
        self._position += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check(True, "")
        if whence not in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
            raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
        base = 0
        if whence == os.SEEK_CUR:
            base = self._position
        elif whence == os.SEEK_END:
            with _unwrap_os_errors():
                base = self._disk.size(self._handle)
        if base + offset < 0:
            raise OSError(22, os.strerror(22))
        self._position = base + offset
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self._check(self._writes, "truncate")
        if size is None:
            new_size = self._position
        else:
            new_size = size
        if new_size < 0:
            raise OSError(22, os.strerror(22))
        with _unwrap_os_errors():
            self._disk.truncate(self._handle, new_size)
        return new_size

    def sync(self) -> None:
        """Make the content durable, like os.fsync() on a real file."""
        self._check(True, "")
        with _unwrap_os_errors():
            self._disk.fsync(self._handle)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._disk.close(self._handle)

    def _check(self, is_allowed: bool, reason: str) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if not is_allowed:
            raise io.UnsupportedOperation(reason)


def _sync(file: Any) -> None:
    if file.closed:
        raise ValueError("I/O operation on closed file")
    file.raw.sync()


class Reader(io.BufferedReader):
    """A binary file opened for reading."""

    def sync(self) -> None:
        """Make the content durable, like os.fsync() on a real file."""
        _sync(self)


class SimulatedWriter(io.BufferedWriter):
    """A binary file opened for writing."""

    def sync(self) -> None:
        """Make the flushed content durable. Data in the buffer is not included."""
        _sync(self)

    def __del__(self) -> None:
        _flush_unclosed(self, super())


class Random(io.BufferedRandom):
    """A binary file opened for reading and writing."""

    def sync(self) -> None:
        """Make the flushed content durable. Data in the buffer is not included."""
        _sync(self)

    def __del__(self) -> None:
        _flush_unclosed(self, super())


class TextFile(io.TextIOWrapper):
    """A text file."""

    def sync(self) -> None:
        """Make the flushed content durable. Data in the buffer is not included."""
        _sync(self.buffer)

    def __del__(self) -> None:
        _flush_unclosed(self, super())


def _flush_unclosed(file: Any, base: Any) -> None:
    """Flush a file that was not closed, if its disk still exists."""
    raw = getattr(getattr(file, "buffer", file), "raw", None)
    if raw is not None and not raw.closed and not raw.is_lost:
        base.__del__()


BinaryFile = Reader | SimulatedWriter | Random
AnyFile = RawFile | BinaryFile | TextFile


def open_file(
    disk: SimulatedDisk,
    path: str | os.PathLike[str],
    mode: str,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
) -> AnyFile:
    """Open a file on a simulated disk, with the arguments of the built-in open()."""
    letters = set(mode)
    kinds = letters & _KINDS
    if (
        len(letters) != len(mode)
        or letters - _KINDS - set("bt+")
        or len(kinds) != 1
        or {"b", "t"} <= letters
    ):
        raise ValueError(
            f'invalid mode: {mode!r}; expected one of "r", "w", "a", "x", with "b" for bytes and "+" for both'
        )
    is_binary = "b" in letters
    if is_binary and (
        encoding is not None or errors is not None or newline is not None
    ):
        raise ValueError(
            "binary mode doesn't take an encoding, errors or newline argument"
        )
    if buffering == 0 and not is_binary:
        raise ValueError("can't have unbuffered text I/O")
    raw = RawFile(
        disk,
        os.fspath(path),
        "".join(sorted(kinds)) + "b" + ("+" if "+" in letters else ""),
    )
    if buffering == 0:
        return raw
    if buffering > 1:
        size = buffering
    else:
        size = io.DEFAULT_BUFFER_SIZE
    buffered: BinaryFile
    if "+" in letters:
        buffered = Random(raw, size)
    elif "r" in letters:
        buffered = Reader(raw, size)
    else:
        buffered = SimulatedWriter(raw, size)
    if is_binary:
        return buffered
    return TextFile(
        buffered,
        "utf-8" if encoding is None else encoding,
        errors,
        newline,
        line_buffering=buffering == 1,
    )
