"""Values that the writer of a partition owns: encoding, progress, metadata, transactions.

Rules:
- Only the writer (writer.py) holds these values. Other files call their methods, with
  the log's lock held, and assign no field.
- Encoding and Metadata are immutable, and are replaced whole.

This module writes no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from logcore.config import INT64_MAX, Durability, LogConfig
from logcore.errors import LogcoreError, NotLeaderError, ReadOnlyLogError
from logcore.format.compression import Codec
from logcore.kernels.appending import FAST_PATH_MAX_BYTES
from logcore.kernels.layout import APPEND_TIME_BIT, BatchEncoding
from logcore.metadata.checkpoint import PartitionMetadata
from logcore.partition import aborted_transactions, epochs
from logcore.partition.aborted_transactions import PartitionTransactions
from logcore.recordbatch import compressor, target_codec
from logcore.segment import Segment

#: Values of compression.type with which a batch without compression remains as it is.
_KEEPS_PLAIN: Final = ("producer", "uncompressed")


@attrs.frozen
class Encoding:
    """How appends are encoded and checked, derived from the settings of the log."""

    #: Passed to the kernels that encode records.
    batch: BatchEncoding
    #: Whether an append neither syncs nor waits, unless it requests durability.
    is_os: bool
    #: Whether the timestamps of appended records have limits.
    checks_times: bool
    requires_key: bool
    #: Whether the log takes only batches of another log, with their offsets: it is a
    #: mirror, or a replica that follows a leader.
    is_copy: bool
    #: Maximum size of a batch for the compiled fast path; 0 if the settings prevent it.
    fast_path_bytes: int
    #: Maximum size of a batch for append_request(); 0 if the settings prevent it.
    client_batch_bytes: int
    #: Maximum size of a batch for append_stored(), 0 if that path is not possible.
    stored_batch_bytes: int
    #: Whether readers see an append before a sync, if it requests no durability.
    shows_appends: bool


def refusal_of_copy(path: str, config: LogConfig) -> LogcoreError:
    """Return why a log with `Encoding.is_copy` takes no records."""
    if config.mirror_source:
        return ReadOnlyLogError(
            "the topic is a mirror, which `logcore mirror` alone writes; a topic without the setting mirror.source "
            "takes records",
            path=path,
            found=f"mirror.source={config.mirror_source}",
        )
    return NotLeaderError("another broker leads this partition, or none", path=path)


def encoding_of(
    config: LogConfig,
    durability: Durability,
    *,
    is_replicated: bool,
    is_following: bool,
    allows_fast_path: bool,
) -> Encoding:
    """Return the encoding for these settings.

    `allows_fast_path`: no other process writes the log, and its files have descriptors.
    """
    codec = target_codec(config, Codec.NONE)
    attributes = int(codec) | APPEND_TIME_BIT * config.is_append_time
    # A batch must fit into one segment.
    max_bytes = min(config.max_message_bytes, config.segment_bytes)
    batch_bytes = min(config.batch_size, config.segment_bytes)
    compress = compressor(codec, config)
    requires_key = config.is_compacted
    is_os = (
        durability.kind == "os"
        and config.flush_messages == INT64_MAX
        and not is_replicated
    )
    limits_ms = (
        config.message_timestamp_before_max_ms,
        config.message_timestamp_after_max_ms,
    )
    checks_times = min(limits_ms) < INT64_MAX and not config.is_append_time
    is_copy = bool(config.mirror_source) or is_following
    # The conditions of kernels/_appending.pxi for the fast path of appends.
    fast_path_bytes = 0
    is_plain = is_os and attributes == 0 and not checks_times and not is_copy
    if is_plain and allows_fast_path:
        fast_path_bytes = min(max_bytes, FAST_PATH_MAX_BYTES)
    # The conditions for append_request(): an append never syncs, and batches without
    # compression are stored as clients encoded them.
    client_batch_bytes = 0
    never_syncs = (
        durability.kind in ("os", "group") and config.flush_messages == INT64_MAX
    )
    keeps_batches = attributes == 0 and config.compression_type in _KEEPS_PLAIN
    if never_syncs and keeps_batches and not is_copy and allows_fast_path:
        client_batch_bytes = max_bytes
    stored_batch_bytes = 0
    if never_syncs and allows_fast_path:
        stored_batch_bytes = config.segment_bytes
    return Encoding(
        batch=BatchEncoding(batch_bytes, max_bytes, attributes, compress, requires_key),
        is_os=is_os,
        checks_times=checks_times,
        requires_key=requires_key,
        is_copy=is_copy,
        fast_path_bytes=fast_path_bytes,
        client_batch_bytes=client_batch_bytes,
        stored_batch_bytes=stored_batch_bytes,
        shows_appends=durability.kind == "os" and not is_replicated,
    )


@attrs.define(eq=False)
class Progress:
    """How far the files of the log are stored, and when that was last done."""

    #: Offset up to which the next opening trusts the log without checking it.
    recovery_point: int
    #: Monotonic time at which the recovery point was last stored.
    recovered_ms: int
    #: Monotonic time of the last sync that maintenance or an append made.
    synced_ms: int
    #: The written bytes that are below the recovery point.
    recovery_bytes: int = 0
    #: Segments created since the log was opened.
    rolls: int = 0

    def record_recovery(self, synced_bytes: int, clock_ms: int) -> None:
        """Restart the lag of the recovery point, which is about to be stored."""
        self.recovery_bytes = synced_bytes
        self.recovered_ms = clock_ms

    def set_recovery_point(self, offset: int) -> None:
        """Set the recovery point: it is stored, or is collected to be stored."""
        self.recovery_point = offset

    def record_sync(self, clock_ms: int) -> None:
        """Record when the log was synced."""
        self.synced_ms = clock_ms

    def add_rolls(self, count: int) -> None:
        """Count segments that were created."""
        self.rolls += count


@attrs.frozen(eq=False)
class Metadata:
    """The metadata of the partition as it is on disk. Replaced whole when it changes."""

    #: The sidecar file.
    sidecar: PartitionMetadata
    #: The leader epochs, at least one.
    epochs: list[epochs.Entry]


@attrs.define(eq=False)
class TransactionView:
    """The transactions of the log, as far as its index of aborted ones needs them."""

    #: The transactions of the whole log, once a marker of its leader, or of another
    #: process, was stored. None before that.
    known: PartitionTransactions | None = None
    #: Whether other processes appended markers that are missing in the index.
    lacks_entries: bool = False

    def forget(self) -> None:
        """Discard the transactions. The next load() reads the whole log."""
        self.known = None

    def load(self, segments: Sequence[Segment]) -> PartitionTransactions:
        """Return the transactions up to the end of `segments`.

        Reads only batches that were not read before.
        """
        if self.known is None:
            self.known = aborted_transactions.walked(segments)
        else:
            aborted_transactions.add_batches(self.known, segments)
        return self.known
