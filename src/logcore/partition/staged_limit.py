"""Read limit for other processes while a staged write is placed.

Rules:
- A staged write becomes visible in all of its partitions in one step: when the state
  file of its application contains its version. Until then, readers stop at the offset
  at which its records begin in each partition.
- The manifest with these offsets is durable before the first record is placed. A reader
  that reads the limit after the size of a segment therefore never shows a record too
  early.
- A crash does not change this. The limit holds until the next writer has completed the
  staged write.
- A damaged manifest or state file sets no limit. The next writer sets such a manifest
  aside.

logcore.staging writes these files. This module only reads them.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from logcore.errors import InvalidNameError
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.filenames import (
    ASSIGNED,
    STATE,
    parse_partition_name,
    staging_path,
)
from logcore.partition.persisted import SETTLING_MS


class StagedLimit:
    """The limit of one partition, read again when the staging directory changes."""

    def __init__(self, fs: FS, path: str) -> None:
        """Create the object; `path` is the partition's directory."""
        self._fs = fs
        self._path = path
        self._staging = ""
        # The modification time of the staging directory, and the limit at that time.
        self._known: tuple[int, int | None] = -1, None

    def get(self) -> int | None:
        """Return the first offset that may not be visible yet, or None.

        Raises:
            StorageReadError: the staging directory or a file in it cannot be read.
        """
        if not self._staging:
            self._staging = staging_path(
                os.path.dirname(self._fs.real_path(self._path))
            )
        try:
            changed_ms = self._fs.modified_ms(self._staging)
        except FileNotFoundError:
            return None
        if changed_ms == self._known[0]:
            return self._known[1]
        limit = self._read()
        # Two changes within SETTLING_MS may leave the same time.
        if changed_ms < self._fs.now_ms() - SETTLING_MS:
            self._known = changed_ms, limit
        return limit

    def _read(self) -> int | None:
        limits = []
        with contextlib.suppress(FileNotFoundError, InvalidNameError):
            key = parse_partition_name(os.path.basename(self._fs.real_path(self._path)))
            for name in self._fs.listdir(self._staging):
                if name.endswith(ASSIGNED):
                    # Read the manifest first: it is deleted only after the state file
                    # contains its version.
                    manifest = self._facts(name)
                    application, _, version = name.removesuffix(ASSIGNED).rpartition(
                        "@"
                    )
                    done = self._facts(application + STATE).get("version")
                    if (
                        type(done) is int
                        and version.isdecimal()
                        and int(version) <= done
                    ):
                        continue
                    limits += [
                        place["base"]
                        for place in manifest.get("places") or ()
                        if (place["topic"], place["partition"]) == key
                    ]
        return min(limits, default=None)

    def _facts(self, name: str) -> dict[str, Any]:
        return (
            checkpoint.unpack_checked(
                checkpoint.read(self._fs, self._staging, name) or b""
            )
            or {}
        )
