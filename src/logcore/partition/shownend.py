"""The file that tells readers in other processes up to where they may read: `logcore.durable`.

Rules:
- A log has one while what is in its files may be less than readers may see: under policies whose appends wait for the
  disk, and in a replicated log. Otherwise there is none, and readers go by the files.
- It gets its name when it is whole and on disk. A log without it hides nothing, so it comes before the first write.
- It may lag. A reader then sees less, never more.

This module decides no end: the writer does.
"""

from __future__ import annotations

import contextlib
import os

from logcore import checkpoint
from logcore.errors import DiskFullError, StorageWriteError
from logcore.fs import FS


class ShownEnd:
    """That file of one log that is open for writing."""

    def __init__(self, fs: FS, directory: str, *, is_replicated: bool) -> None:
        """Opens nothing yet. is_replicated: readers then believe the end below the last segment too."""
        self._fs = fs
        self._directory = directory
        self._path = os.path.join(directory, checkpoint.DURABLE_END)
        self._is_replicated = is_replicated
        self._handle = -1

    @property
    def is_open(self) -> bool:
        return self._handle >= 0

    def open(self, end: int, *, keeps: bool) -> None:
        """Makes the file say `end`, durably. keeps: another process has written it, and may do so now."""
        fs = self._fs
        content = self._packed(end)
        if keeps and fs.exists(self._path):
            self._handle = fs.open(self._path, write=True)
            return
        # Written under another name and renamed: a crash in the middle leaves the old file, and no reader sees half of
        # the new one.
        checkpoint.write(fs, self._directory, checkpoint.DURABLE_END, content, reserve=os.path.dirname(self._directory))
        self._handle = fs.open(self._path, write=True)

    def remove(self) -> None:
        """Readers need no limit."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(self._path)

    def show(self, end: int, *, sync: bool = False) -> None:
        """Raises what a write raises."""
        if self.is_open:
            self._fs.pwrite(self._handle, self._packed(end), 0)
            if sync:
                self._fs.fsync(self._handle)

    def show_if_possible(self, end: int) -> None:
        """After an end that moved up: where there is no room to say so, readers see it when it moves next."""
        with contextlib.suppress(DiskFullError, StorageWriteError):
            self.show(end)

    def close(self) -> None:
        handle = self._handle
        self._handle = -1
        if handle >= 0:
            self._fs.close(handle)

    def _packed(self, end: int) -> bytes:
        return checkpoint.pack_shown_end(end, is_replicated=self._is_replicated)
