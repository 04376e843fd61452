"""Stores of backups: a directory, or a path in an object store.

Rules:
- An object is complete and durable when put() returns. A failed put() leaves no object,
  unless an object store does not answer.
- An object that a manifest refers to is never replaced.
- Errors of the store become StorageReadError and StorageWriteError.

This module stores named objects. manifest.py defines their names and contents.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from logcore.distribution import install_command
from logcore.errors import (
    InvalidConfigError,
    LogNotFoundError,
    MissingDependencyError,
    StorageReadError,
    StorageWriteError,
)
from logcore.fs import FS, opened
from logcore.kernels.layout import Buffer
from logcore.metadata.checkpoint import make_directories

if TYPE_CHECKING:
    import pyarrow.fs

#: Bytes per read and write.
CHUNK_BYTES: Final = 4 << 20
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+://.+", re.IGNORECASE)
_PARTIAL: Final = ".partial"


class Store(Protocol):
    """Stores objects by name. A name is a relative path with `/`."""

    @property
    def location(self) -> str: ...
    def put(self, name: str, chunks: Iterable[Buffer]) -> None: ...
    def link(self, path: str, name: str) -> bool: ...
    def link_to(self, name: str, path: str) -> bool: ...
    def read(self, name: str) -> Iterator[bytes]: ...
    def names(self, prefix: str) -> list[str]: ...
    def delete(self, name: str) -> None: ...


def open_store(target: str | os.PathLike[str], fs: FS, *, create: bool) -> Store:
    """Return the store at a path or a URL such as s3://bucket/backups.

    Raises:
        LogNotFoundError: the path is not a directory, and `create` is False.
        InvalidConfigError: the object store is not supported.
        MissingDependencyError: a URL needs pyarrow, which is not installed.
    """
    text = os.fspath(target)
    if _URL.fullmatch(text):
        return BucketStore(text)
    path = fs.real_path(text)
    if not fs.is_directory(path):
        if not create:
            raise LogNotFoundError("there is no backup here", path=text)
        make_directories(fs, path)
    return DirectoryStore(fs, path)


class DirectoryStore:
    """A directory of this machine."""

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self.location = path
        self._existing_directories: set[str] = {path}

    def _path(self, name: str) -> str:
        return os.path.join(self.location, *name.split("/"))

    def _new_path(self, name: str) -> str:
        """Return the path of a new object, and create its directory."""
        path = self._path(name)
        parent = os.path.dirname(path)
        if parent not in self._existing_directories:
            make_directories(self._fs, parent)
            self._existing_directories.add(parent)
        return path

    def put(self, name: str, chunks: Iterable[Buffer]) -> None:
        path = self._new_path(name)
        try:
            with opened(self._fs, path + _PARTIAL, write=True, create=True) as handle:
                self._fs.truncate(handle, 0)
                position = 0
                for chunk in chunks:
                    self._fs.pwrite(handle, chunk, position)
                    position += len(chunk)
                self._fs.fsync(handle)
            self._fs.rename(path + _PARTIAL, path)
        except BaseException:
            # If the disk is full, the incomplete part uses space that the writer of the
            # log needs.
            with contextlib.suppress(FileNotFoundError, StorageWriteError):
                self._fs.unlink(path + _PARTIAL)
            raise
        self._fs.sync_dir(os.path.dirname(path))

    def link(self, path: str, name: str) -> bool:
        """Create an object as a hard link to a file that never changes.

        Return False if the file system does not support that.
        """
        target = self._new_path(name)
        # An abandoned attempt may have left a part with this name.
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(target)
        if not self._fs.link(path, target):
            return False
        self._fs.sync_dir(os.path.dirname(target))
        return True

    def link_to(self, name: str, path: str) -> bool:
        """Create a file as a hard link to an object. Return False if that fails."""
        with contextlib.suppress(FileNotFoundError):
            return self._fs.link(self._path(name), path)
        return False

    def read(self, name: str) -> Iterator[bytes]:
        path = self._path(name)
        try:
            with opened(self._fs, path) as handle:
                position = 0
                while chunk := self._fs.pread(handle, CHUNK_BYTES, position):
                    yield chunk
                    position += len(chunk)
        except FileNotFoundError:
            raise StorageReadError(
                "a part of the backup is missing", path=path
            ) from None

    def names(self, prefix: str) -> list[str]:
        """Return the names of all objects below a prefix, sorted."""
        found: list[str] = []
        pending = [prefix]
        while pending:
            parent = pending.pop()
            with contextlib.suppress(FileNotFoundError):
                for child in self._fs.listdir(self._path(parent)):
                    name = f"{parent}/{child}"
                    if self._fs.is_directory(self._path(name)):
                        pending.append(name)
                    else:
                        found.append(name)
        return sorted(found)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(self._path(name))


class BucketStore:
    """A path in an object store, through pyarrow.

    The URL is an argument of pyarrow.fs.FileSystem.from_uri(), such as
    `s3://bucket/path?region=eu-west-1`. pyarrow reads credentials from the environment.
    """

    def __init__(self, url: str) -> None:
        # Parts of a URL that may be credentials are removed.
        self.location = re.sub(r"//[^/]*@", "//", url.split("?", 1)[0])
        try:
            from pyarrow import fs
        except ImportError as error:
            raise MissingDependencyError(
                f"object stores need pyarrow: {install_command('arrow')}"
            ) from error
        found: tuple[pyarrow.fs.FileSystem, str]
        try:
            found = fs.FileSystem.from_uri(url)
        except (ValueError, NotImplementedError, OSError) as error:
            # The text of pyarrow's error may contain the credentials. So neither the text
            # nor the error itself, as the cause, is part of this error.
            raise InvalidConfigError(
                "the object store cannot be opened",
                expected="a URL that pyarrow supports, such as s3://bucket/path?region=REGION",
                found=type(error).__name__,
                path=self.location,
            ) from None
        self._system, self._root = found

    def _key(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def put(self, name: str, chunks: Iterable[Buffer]) -> None:
        with _store_errors(StorageWriteError, f"{self.location}/{name}"):
            # Local and network file systems have directories; S3 does not need them.
            if self._system.type_name != "s3":
                self._system.create_dir(os.path.dirname(self._key(name)))
            try:
                with self._system.open_output_stream(self._key(name)) as out:
                    for chunk in chunks:
                        out.write(memoryview(chunk))
            except BaseException:
                # The end of the with statement has completed the object.
                with contextlib.suppress(OSError):
                    self._system.delete_file(self._key(name))
                raise

    def link(self, path: str, name: str) -> bool:
        return False

    def link_to(self, name: str, path: str) -> bool:
        return False

    def read(self, name: str) -> Iterator[bytes]:
        with (
            _store_errors(StorageReadError, f"{self.location}/{name}"),
            self._system.open_input_stream(self._key(name)) as source,
        ):
            while chunk := source.read(CHUNK_BYTES):
                yield chunk

    def names(self, prefix: str) -> list[str]:
        from pyarrow import fs

        with _store_errors(StorageReadError, f"{self.location}/{prefix}"):
            found: list[Any] = self._system.get_file_info(
                fs.FileSelector(self._key(prefix), allow_not_found=True, recursive=True)
            )
        root_length = len(self._key(""))
        return sorted(
            entry.path[root_length:]
            for entry in found
            if entry.type == fs.FileType.File
        )

    def delete(self, name: str) -> None:
        with (
            _store_errors(StorageWriteError, f"{self.location}/{name}"),
            contextlib.suppress(FileNotFoundError),
        ):
            self._system.delete_file(self._key(name))


@contextlib.contextmanager
def _store_errors(
    kind: type[StorageReadError | StorageWriteError], path: str
) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise kind(f"the object store failed: {error}", path=path) from error
