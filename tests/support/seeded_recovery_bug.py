"""A bug that several tests seed: recovery reads memory instead of the disk."""

from __future__ import annotations

from typing import Any


def recover_from_memory(fs: Any, segment: Any, position: int) -> bool:
    """Replace recovery._sync_and_reread: sync a segment, and assume that the disk has
    the content of the memory.
    """
    handle = fs.open(segment.path)
    fs.fsync(handle)
    fs.close(handle)
    return True
