"""An estimate of the records and bytes that the next compaction of a log removes.

The log is only read, so the estimate also works beside its writer. Like a round of
cleaner.py, it reads the uncleaned part for the newest offset of each key, and then all
sealed segments.

Rules:
- Records of aborted transactions and expired tombstones count as kept, so a round may
  remove more.
- A pass that reaches its time limit ends the estimate at the offset it has reached, and
  the estimate names that offset.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from logcore.cleaner import LogFacts, OffsetMap, facts_of, plan
from logcore.config import LogConfig
from logcore.errors import InvalidConfigError
from logcore.format.columns import RecordColumns
from logcore.fs import FS, OS
from logcore.reader import LogReader, segments_between

#: Memory for keys. A round has 128 MiB, see DEDUPE_BYTES.
_KEY_BYTES: Final = 32 << 20


@attrs.frozen(kw_only=True)
class CompactionEstimate:
    """What compaction would remove from the offsets [log start, end_offset).

    `record_bytes` and `removed_bytes` are the sizes of keys and values before
    compression. `is_complete` is False if time or memory ended the estimate early.
    """

    end_offset: int
    records: int
    removed_records: int
    record_bytes: int
    removed_bytes: int
    is_complete: bool

    @property
    def removed_share(self) -> float:
        """The part of the bytes that is removed, from 0 to 1."""
        return self.removed_bytes / max(1, self.record_bytes)


def estimate_compaction(
    log: LogReader,
    *,
    config: LogConfig,
    cleaned_to: int,
    pass_ms: int,
    memory_bytes: int = _KEY_BYTES,
    fs: FS = OS,
) -> CompactionEstimate:
    """Estimate the next round over a log, which may be read-only.

    `config` contains the settings of the topic. `cleaned_to` is the end of the last
    round, 0 if there was none. Each of the two passes takes about `pass_ms` at most; the
    dirty ratio is ignored. `memory_bytes` limits the table of keys.

    Raises:
        InvalidConfigError: the topic is not compacted.
        CorruptBatchError: a segment is damaged.
        StorageReadError: the system failed.
    """
    if not config.is_compacted:
        raise InvalidConfigError(
            "the topic is not compacted",
            expected="cleanup.policy with 'compact'",
            found=config.cleanup_policy,
        )
    *sealed, active = segments_between(log, log.log_start_offset, log.log_end_offset)
    planned = plan(
        [facts_of(segment) for segment in sealed],
        LogFacts(
            active_base=active.base_offset,
            log_start=log.log_start_offset,
            last_stable_offset=log.last_stable_offset,
            cleaned_to=cleaned_to,
        ),
        config=config,
        now_ms=fs.now_ms(),
    )
    first_dirty = planned.first_dirty
    end = planned.first_uncleanable
    newest = OffsetMap(memory_bytes, end - first_dirty, fs.random_bytes)
    deadline_ms = fs.monotonic_ms() + pass_ms
    reached = first_dirty
    for columns in log.scan(first_dirty, end):
        has_key = columns.key_sizes >= 0
        hashes = newest.hashes(columns)[has_key]
        if not newest.put(hashes, columns.offsets[has_key]):
            reached = newest.latest_offset + 1
            break
        reached = int(columns.offsets[-1]) + 1
        if fs.monotonic_ms() >= deadline_ms:
            break
    else:
        reached = end
    return _counted(log, newest, reached, end, fs.monotonic_ms() + pass_ms, fs)


def _counted(
    log: LogReader,
    newest: OffsetMap,
    end: int,
    wanted_end: int,
    deadline_ms: int,
    fs: FS,
) -> CompactionEstimate:
    """Count the records before an offset, and those that a later record supersedes."""
    records = removed_records = record_bytes = removed_bytes = 0
    reached = end
    for columns in log.scan(log.log_start_offset, end):
        keys = np.maximum(columns.key_sizes, 0)
        sizes = keys.astype(np.int64) + np.maximum(columns.value_sizes, 0)
        is_removed = ~_is_newest(columns, newest)
        records += len(columns)
        removed_records += int(is_removed.sum())
        record_bytes += int(sizes.sum())
        removed_bytes += int(sizes[is_removed].sum())
        if fs.monotonic_ms() >= deadline_ms:
            reached = int(columns.offsets[-1]) + 1
            break
    return CompactionEstimate(
        end_offset=reached,
        records=records,
        removed_records=removed_records,
        record_bytes=record_bytes,
        removed_bytes=removed_bytes,
        is_complete=reached == wanted_end,
    )


def _is_newest(columns: RecordColumns, newest: OffsetMap) -> npt.NDArray[np.bool_]:
    """Return which records have a key that no later record has."""
    later = newest.newest(newest.hashes(columns))
    return (columns.key_sizes >= 0) & (columns.offsets >= later)
