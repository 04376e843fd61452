"""Stores the batches of a leader in a copy of its log.

Rules:
- leader_transactions.py checks the batches before anything is written.
- Leader epochs are durable before their batches. An epoch without records is
  consistent; records without their epoch are not.
- In each segment, the index of aborted transactions lists the transactions that the
  markers in that segment aborted, as in the leader's log.

Callers hold the log's lock.
"""

from __future__ import annotations

from logcore.debug_checks import locked
from logcore.errors import InvalidConfigError, OffsetOutOfRangeError
from logcore.kernels import layout
from logcore.kernels.layout import Buffer, Level
from logcore.partition import epochs
from logcore.partition.leader_transactions import (
    control_types_in,
    follow,
    is_marker,
)
from logcore.partition.truncation import truncate_locked
from logcore.partition.writer import Writer


def begin_to_follow(writer: Writer) -> None:
    """Accept only append_as_follower() from now on, because another broker leads.

    Appends raise NotLeaderError until Log.begin_epoch(). An append that began under an
    earlier leadership can therefore not be stored after the batches of the next leader.

    Raises:
        InvalidConfigError: the log was not opened with replicated=True.
    """
    with writer.state.lock:
        writer.check_writable_locked()
        if not writer.is_replicated:
            raise InvalidConfigError(
                "only a replica can follow a leader",
                path=writer.path,
                expected="replicated=True",
            )
        writer.set_following_locked(True)


def restart_at(writer: Writer, offset: int) -> None:
    """Delete all records, and begin the empty log at `offset`, durably.

    A follower does so if the log of its leader begins above its own end (KAFKA-9491). A
    crash leaves the log as it was, empty, or empty at `offset`.

    Raises:
        OffsetOutOfRangeError: the log ends above `offset`.
    """
    with writer.state.lock:
        writer.check_writable_locked()
        if offset < writer.state.end:
            raise OffsetOutOfRangeError(
                "the log cannot restart there",
                path=writer.path,
                offset=offset,
                expected=f"{writer.state.end} or more",
                found=offset,
            )
        truncate_locked(writer, writer.state.log_start, epochs.truncate_end)
        if offset > writer.state.end:
            writer.begin_at_locked(offset)
        # The batches between the two ends are unknown, and so are their producers.
        writer.producers.forget()


@locked
def store_locked(
    writer: Writer,
    data: Buffer,
    *,
    begins_segment: bool,
    durability: Level | None,
    now_ms: int,
) -> int:
    """Store batches of the leader, and return the first offset.

    With begins_segment=True, the first batch begins a new segment.

    Raises:
        CorruptBatchError, OffsetOutOfRangeError: raised before anything is written.
    """
    # Drop an epoch without records: this log was the leader in it, or an append failed.
    entries = epochs.truncate_end(writer.metadata.epochs, writer.state.end)
    latest_epoch = -1
    if entries:
        latest_epoch = entries[-1][0]
    found = follow(data, log_end=writer.state.end, leader_epoch=latest_epoch)
    first = found.first_offset
    if found.has_producers:
        writer.expect_producers_locked()
    is_empty = len(writer.state.segments) == 1 and not writer.active.size_bytes
    if is_empty and first > writer.state.end:
        writer.begin_at_locked(first)
    elif begins_segment and writer.active.size_bytes:
        writer.roll_locked()
    # Store the metadata before the batches: first the gaps, because readers would
    # report them as losses; then the leader epochs.
    if found.gap_end:
        writer.write_gaps_locked(found.gap_end)
    entries = epochs.truncate_end(writer.metadata.epochs, writer.state.end)
    for epoch, start in found.epochs:
        entries = epochs.assign(entries, epoch, start)
    writer.set_epochs_locked(entries or writer.metadata.epochs[:1])
    view = memoryview(data).cast("B")
    with writer.producers.storing(None, is_checked=not found.has_producers):
        for run in found.runs():
            _store_run_locked(writer, view, run, now_ms, durability)
    return first


@locked
def _store_run_locked(
    writer: Writer,
    view: memoryview,
    run: layout.Facts,
    now_ms: int,
    durability: Level | None,
) -> None:
    """Store a run of batches, and update the index of aborted transactions.

    The last batch of the run may be a transaction marker.
    """
    start = int(run["position"][0])
    stop = int(run["position"][-1] + run["size_bytes"][-1])
    if int(run["last_offset"][-1]) > writer.active.limit_offset:
        # The next segment begins after the gap, because offsets are stored relative to
        # the segment's base, in 32 bits.
        writer.roll_locked(int(run["base_offset"][0]))
    before = writer.state.end
    writer.store_locked(
        view[start:stop], layout.encoded_batches(run, start), now_ms, durability
    )
    stored = writer.transactions
    if stored.known is not None and stored.known.next_offset != before:
        # This log was the leader in between. The known transactions lack the batches
        # that it appended.
        stored.forget()
    # A log without markers avoids this cost. The first marker causes one pass over the
    # whole log, and later batches are added one by one.
    if stored.known is None and not is_marker(run):
        return
    try:
        if stored.known is None:
            known = stored.load(writer.state.segments)
        else:
            known = stored.known
            known.add(run, control_types_in(view))
        for entry in known.entries_between(before, writer.state.end):
            writer.active.add_aborted(entry)
        writer.active.record_markers(is_marker(run))
    except BaseException as error:
        # Kafka trusts the index file, so it must not lack an entry. Opening the log
        # again writes the entry.
        writer.commit.poison(error)
        raise
