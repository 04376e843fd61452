"""A bug that several tests seed: recovery believes memory."""

from __future__ import annotations

from typing import Any


def believe_memory(fs: Any, segment: Any, position: int) -> bool:
    """A replacement of recovery._sync_and_reread: syncs a segment, and assumes that the disk has
    the content that memory shows.
    """
    handle = fs.open(segment.path)
    fs.fsync(handle)
    fs.close(handle)
    return True
