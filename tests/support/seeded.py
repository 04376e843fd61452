"""A bug that several tests seed: recovery believes memory."""

from __future__ import annotations

from typing import Any


def believe_memory(fs: Any, segment: Any, position: int) -> bool:
    """In the place of recovery._settle: syncs a segment, and takes what memory shows of
    it for what the disk has.
    """
    handle = fs.open(segment.path)
    fs.fsync(handle)
    fs.close(handle)
    return True
