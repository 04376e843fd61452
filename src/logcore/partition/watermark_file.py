"""Visible end file (`logcore.durable`): how far other processes may read.

Rules:
- A log has this file while its segments may contain records that readers must not see.
  That is the case under policies whose appends wait for an fsync, and in a replicated
  log. Without the file, readers may read everything in the segments.
- The file is complete and durable before it gets its name. It is created before the
  first write, because a log without the file hides no records.
- The offset in the file may lag. A reader then sees fewer records, never more.

This module does not decide the visible end; the writer does.
"""

from __future__ import annotations

import contextlib
import os

from logcore.errors import DiskFullError, StorageWriteError
from logcore.fs import FS
from logcore.metadata import checkpoint


class WatermarkFile:
    """The visible end file of one log that is open for writing."""

    def __init__(self, fs: FS, directory: str, *, is_replicated: bool) -> None:
        """Create the object without opening the file.

        `is_replicated` makes readers accept an end below the last segment too.
        """
        self._fs = fs
        self._directory = directory
        self._path = os.path.join(directory, checkpoint.DURABLE_END)
        self._is_replicated = is_replicated
        self._handle = -1

    @property
    def is_open(self) -> bool:
        return self._handle >= 0

    def open(self, end: int, *, keeps: bool) -> None:
        """Open the file, and store `end` in it durably.

        With keeps=True, an existing file is opened unchanged, because another process
        has written it and may be writing it now.
        """
        fs = self._fs
        content = self._packed(end)
        if keeps and fs.exists(self._path):
            self._handle = fs.open(self._path, write=True)
            return
        # Written under another name and then renamed, so that a crash leaves the old
        # file and no reader sees a partial one.
        checkpoint.write(
            fs,
            self._directory,
            checkpoint.DURABLE_END,
            content,
            reserve=os.path.dirname(self._directory),
        )
        self._handle = fs.open(self._path, write=True)

    def remove(self) -> None:
        """Delete the file: readers may read everything in the segments."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(self._path)

    def write(self, end: int, *, sync: bool = False) -> None:
        """Write `end` to the file if it is open, and sync the file with sync=True.

        Raises:
            DiskFullError, StorageWriteError: the write or the sync failed.
        """
        if self.is_open:
            self._fs.pwrite(self._handle, self._packed(end), 0)
            if sync:
                self._fs.fsync(self._handle)

    def write_if_possible(self, end: int) -> None:
        """Write an end that has increased, and ignore a failure.

        Readers then see the records when the end is next written.
        """
        with contextlib.suppress(DiskFullError, StorageWriteError):
            self.write(end)

    def close(self) -> None:
        """Close the file. It keeps its last content."""
        handle = self._handle
        self._handle = -1
        if handle >= 0:
            self._fs.close(handle)

    def _packed(self, end: int) -> bytes:
        return checkpoint.pack_visible_end(end, is_replicated=self._is_replicated)
