"""Pages of messages: the newest, those from an offset or a time, and those that a search
finds.

Rules:
- A page reads only the batches that it shows. A search ends after SEARCH_BYTES, or when
  its time is over. The page has a link that continues the search where it ended.
- A damaged batch is left out, and the page names it. Batches after it are still read.
- Records of several partitions are merged by timestamp. The records of one partition
  keep their order.

values.py turns the records into text.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Final

import attrs
import numpy as np

import logcore
from logcore.cli.filters import Where
from logcore.config import INT64_MAX
from logcore.errors import LogcoreError
from logcore.kernels import Record
from logcore.kernels.layout import HEADER_NAME_ERRORS
from logcore.reader import segment_times, segments_between
from logcore.recordbatch import RecordBatch
from logcore.segment import GrowingSegment
from netshim.console.directory import OpenDirectory, TimeBudget

#: Default and maximum number of records of a page.
DEFAULT_COUNT: Final = 50
MAX_COUNT: Final = 1_000
#: Maximum size in bytes of batches that one step of a search reads.
SEARCH_BYTES: Final = 1 << 30
#: Bytes that a search reads between two checks of its limits.
_BLOCK_BYTES: Final = 8 << 20
#: Maximum number of problems that one page lists.
_MAX_PROBLEMS: Final = 20


@attrs.frozen
class MessageRow:
    """A record with its partition."""

    partition: int
    record: Record

    @property
    def timestamp_ms(self) -> int:
        return self.record.timestamp_ms


@attrs.define
class MessagePage:
    """The records of a page, and how to continue."""

    messages: list[MessageRow] = attrs.Factory(list)
    #: By partition, the offset at which the next page begins, in reading direction.
    #: Empty if the partitions that were read have no further records.
    following: dict[int, int] = attrs.Factory(dict)
    #: Number of partitions for which no time was left.
    unread: int = 0
    #: Bytes of batches that a search has read.
    searched_bytes: int = 0
    #: Texts about damage and other errors, for the page.
    problems: list[str] = attrs.Factory(list)
    #: Whether the limits ended the page before it was full.
    is_partial: bool = False

    @property
    def has_more(self) -> bool:
        """Whether there is a next page."""
        return bool(self.following) or self.unread > 0

    def add_problem(self, text: str) -> None:
        if text not in self.problems and len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(text)


@attrs.frozen(kw_only=True)
class MessageQuery:
    """The records that a page shows."""

    partitions: tuple[int, ...]
    #: Whether the page begins with the newest record and continues with older ones.
    is_backward: bool = True
    #: Partition -> offset at which the page begins: exclusive if it is read backward. A
    #: partition without an entry begins at its end or, read forward, at its start.
    start_offsets: Mapping[int, int] = attrs.Factory(dict)
    #: The page begins at the first record with this or a later timestamp.
    time_ms: int | None = None
    #: The key, the value or a header contains this text.
    text: str = ""
    #: Further conditions. They contain no regular expressions, which could take
    #: minutes.
    where: Where | None = None
    count: int = DEFAULT_COUNT

    @property
    def is_search(self) -> bool:
        return bool(self.text) or self.where is not None

    @property
    def search_bytes(self) -> bytes:
        """The text as it is stored."""
        return self.text.encode("utf-8", "surrogateescape")

    def records(self, batch: RecordBatch) -> Iterable[Record]:
        """Return the records of a batch that the search finds, or all without one.

        Raises:
            LogcoreError: the batch is damaged.
        """
        if not self.is_search:
            return batch.records()
        # Without a match, the batch is not decoded.
        if not self._may_be_in(batch):
            return ()
        records: Iterable[Record]
        if self.where is None:
            records = batch.records()
        else:
            records = self.where.select(batch.columns()).records()
        search_bytes = self.search_bytes
        return (
            record
            for record in records
            if not search_bytes or _contains(record, search_bytes)
        )

    def _may_be_in(self, batch: RecordBatch) -> bool:
        """Return whether the decompressed batch contains all bytes that are searched.

        Keys, values and headers are stored as they are, so most batches need no decoding.
        """
        if batch.magic < 2:
            return True
        searched = [self.search_bytes]
        if self.where is not None:
            searched += [
                condition.expected_content
                for condition in self.where.conditions
                if condition.expected_content is not None and not condition.is_negated
            ]
        # A damaged batch must be reported, not skipped.
        batch.verify()
        if not any(searched):
            return True
        body = bytes(batch.body())
        return all(search_bytes in body for search_bytes in searched)


@attrs.define
class _QueriedPartition:
    """One partition of a query, and how far it was read."""

    number: int
    log: logcore.Log
    #: The next block begins here, or ends here if the page is read backward.
    next_offset: int
    #: Offsets of the next block, if the query is not a search.
    block_offsets: int
    #: Records in the order of the page.
    found: list[MessageRow] = attrs.Factory(list)

    def is_at_end(self, query: MessageQuery) -> bool:
        if query.is_backward:
            return self.next_offset <= self.log.log_start_offset
        return self.next_offset >= self.log.high_watermark


def read_page(
    directory: OpenDirectory, topic: str, query: MessageQuery, budget: TimeBudget
) -> MessagePage:
    """Read the records of a query.

    An error of a single partition becomes a problem of the page.
    """
    page = MessagePage()
    sources: list[_QueriedPartition] = []
    try:
        for number in query.partitions:
            has_work = any(not source.is_at_end(query) for source in sources)
            if budget.is_over() and has_work:
                # The link to the next page does not name this partition. The next page
                # therefore reads it from the beginning.
                page.is_partial = True
                page.unread += 1
                continue
            try:
                log = directory.open_log(topic, number)
            except LogcoreError as error:
                page.add_problem(f"partition {number}: {error}")
                continue
            # Added before a further error, so that the log is closed.
            source = _QueriedPartition(number, log, 0, query.count)
            sources.append(source)
            try:
                source.next_offset = _first_offset(log, number, query)
            except LogcoreError as error:
                page.add_problem(f"partition {number}: {error}")
                # A partition whose first offset is unknown is not read.
                source.next_offset = log.high_watermark
        _read_until_full(sources, query, budget, page)
        _merge(sources, query, page)
    finally:
        for source in sources:
            source.log.close()
    return page


def _first_offset(log: logcore.Log, number: int, query: MessageQuery) -> int:
    """Return the offset at which a page begins in a partition."""
    start, end = log.log_start_offset, log.high_watermark
    offset = query.start_offsets.get(number)
    if offset is None and query.time_ms is not None:
        offset = _offset_of_time(log, query.time_ms)
    if offset is None:
        offset = end if query.is_backward else start
    # A link may contain offsets that were deleted since.
    return min(max(offset, start), end)


def _offset_of_time(log: logcore.Log, time_ms: int) -> int:
    """Return the offset of the first record with this or a later timestamp, or the end.

    Log.offset_for_timestamp() also checks the CRC of all earlier batches of the segment,
    which takes a second for a large one. This search trusts the time index: a damaged
    index can only make a page begin at another offset.
    """
    end = log.high_watermark
    for segment in segments_between(log, log.log_start_offset, end):
        is_rolled = not isinstance(segment, GrowingSegment)
        # The largest timestamp of the active segment still changes.
        if is_rolled and segment.max_timestamp() < time_ms:
            continue
        # All records up to the offset of an entry have at most its timestamp.
        entries = segment.time_index.array()
        earlier_entries = int(entries["timestamp"].searchsorted(time_ms))
        position = 0
        if earlier_entries:
            earlier_offset = int(entries["relative_offset"][earlier_entries - 1])
            position = segment.find(segment.base_offset + earlier_offset)
        for batch_rows, _, _ in segment.walk(position, crc=False):
            for row in np.flatnonzero(batch_rows["max_timestamp"] >= time_ms).tolist():
                batch = segment.batch(int(batch_rows["position"][row]))
                if batch is None or batch.is_control:
                    continue
                for record in batch.records():
                    if record.timestamp_ms >= time_ms:
                        return record.offset
    return end


def _read_until_full(
    sources: list[_QueriedPartition],
    query: MessageQuery,
    budget: TimeBudget,
    page: MessagePage,
) -> None:
    """Read blocks of all partitions in turn, until the page is full or a limit is met."""
    unfinished = [source for source in sources if not source.is_at_end(query)]
    while unfinished:
        for source in unfinished:
            _read_block(source, query, page)
            if page.searched_bytes >= SEARCH_BYTES or budget.is_over():
                if any(
                    not queried_partition.is_at_end(query)
                    for queried_partition in unfinished
                ):
                    page.is_partial = True
                return
        # A partition without enough records may have the next one of the page.
        unfinished = [
            source
            for source in unfinished
            if len(source.found) < query.count and not source.is_at_end(query)
        ]
        # A search ends when it has found enough records, even if records that were
        # not read yet would come before them.
        if (
            query.is_search
            and sum(len(source.found) for source in sources) >= query.count
        ):
            return


def _read_block(
    source: _QueriedPartition, query: MessageQuery, page: MessagePage
) -> None:
    """Read one block of a partition, and continue after it in the next call."""
    start, end = _block(source, query)
    found_before = len(source.found)
    matches: list[MessageRow] = []
    for batch in batches_between(source.log, start, end, page):
        page.searched_bytes += batch.size_bytes
        try:
            matches += [
                MessageRow(source.number, record)
                for record in query.records(batch)
                if start <= record.offset < end
            ]
        except LogcoreError as error:
            page.add_problem(
                f"partition {source.number}, offsets {batch.base_offset} to "
                f"{batch.last_offset} cannot be read: {error}"
            )
            continue
        if not query.is_backward and found_before + len(matches) >= query.count:
            break
    if query.is_backward:
        # A batch is always decoded forward.
        matches.reverse()
    selected = matches[: query.count - found_before]
    source.found += selected
    if len(selected) < len(matches) or (
        not query.is_backward and len(source.found) >= query.count
    ):
        # The block has more records than the page, so the next page begins inside of
        # the block.
        last = selected[-1].record.offset
        source.next_offset = last if query.is_backward else last + 1
    else:
        source.next_offset = start if query.is_backward else end
    # Compaction may have left few records in many offsets.
    source.block_offsets *= 4


def _block(source: _QueriedPartition, query: MessageQuery) -> tuple[int, int]:
    """Return the offsets of the next block."""
    log, offset_count = source.log, source.block_offsets
    if query.is_search:
        offset_count = _offsets_of_bytes(log, source.next_offset, query.is_backward)
    if query.is_backward:
        return max(
            log.log_start_offset, source.next_offset - offset_count
        ), source.next_offset
    return source.next_offset, min(
        log.high_watermark, source.next_offset + offset_count
    )


def _offsets_of_bytes(log: logcore.Log, offset: int, is_backward: bool) -> int:
    """Estimate how many offsets next to `offset` fill _BLOCK_BYTES."""
    times = segment_times(log)
    ends = [base for base, _, _ in times[1:]] + [log.log_end_offset]
    # Without segments, `ends` is longer than `times`: the lengths may differ.
    for (base, _, size_bytes), end in zip(times, ends):
        # Read backward, the offset itself is not part of the block.
        if base <= offset - is_backward < end:
            return max(1, _BLOCK_BYTES * (end - base) // max(1, size_bytes))
    return DEFAULT_COUNT


def batches_between(
    log: logcore.Log, start: int, end: int, page: MessagePage
) -> Iterator[RecordBatch]:
    """Yield the batches that overlap [start, end), without markers of transactions.

    Damage ends the segment: it becomes a problem of the page, and the next segment is
    read. The CRC of a batch is checked when its records are requested.
    """
    if start >= end:
        return
    for segment in segments_between(log, start, end):
        position = 0
        try:
            if segment.base_offset < start:
                position = segment.find(start)
            while position < segment.size_bytes:
                batch = segment.batch(position)
                if batch is None or batch.base_offset >= end:
                    break
                if not batch.is_control:
                    yield batch
                position += batch.size_bytes
        except LogcoreError as error:
            page.add_problem(str(error))


def _contains(record: Record, search_bytes: bytes) -> bool:
    """Return whether the key, the value or a header contains the bytes."""
    if search_bytes in (record.key or b"") or search_bytes in (record.value or b""):
        return True
    return any(
        search_bytes in name.encode("utf-8", HEADER_NAME_ERRORS)
        or search_bytes in (value or b"")
        for name, value in record.headers
    )


def _merge(
    sources: list[_QueriedPartition], query: MessageQuery, page: MessagePage
) -> None:
    """Put the first records of all partitions on the page.

    Also store the offsets at which the next page begins.
    """
    merged = heapq.merge(
        *(source.found for source in sources),
        key=attrgetter("timestamp_ms"),
        reverse=query.is_backward,
    )
    page.messages = list(itertools.islice(merged, query.count))
    # Records that were read, and did not fit on the page, are the first of the next
    # page.
    used_counts = dict.fromkeys((source.number for source in sources), 0)
    for message in page.messages:
        used_counts[message.partition] += 1
    for source in sources:
        count = used_counts[source.number]
        if count < len(source.found):
            offset = source.found[count].record.offset
            page.following[source.number] = offset + 1 if query.is_backward else offset
        elif not source.is_at_end(query):
            page.following[source.number] = source.next_offset
    if page.has_more:
        # The link to the next page names each partition, even one without further
        # records: a partition that it does not name would begin again.
        for source in sources:
            page.following.setdefault(source.number, source.next_offset)


# -- one message -----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class MessageDetail:
    """One record, and the batch that contains it."""

    record: Record
    batch: RecordBatch
    #: committed, aborted, open, or unknown if its end was not found in time; "" for a
    #: record outside of a transaction.
    transaction: str = ""
    #: Offsets of the records before and after it, None if there are none.
    previous: int | None = None
    following: int | None = None


def read_message(
    log: logcore.Log, offset: int, budget: TimeBudget
) -> MessageDetail | int | None:
    """Return the record at an offset.

    If compaction, deletion or a marker left no record there, the offset of the next one
    is returned; None if there is none.

    Raises:
        LogcoreError: the batch is damaged.
    """
    end = log.high_watermark
    page = MessagePage()
    start = max(offset, log.log_start_offset)
    record_at_offset: Record | None = None
    containing_batch: RecordBatch | None = None
    following: int | None = None
    for batch in batches_between(log, start, end, page):
        for record in batch.records():
            if record.offset == offset >= start:
                record_at_offset, containing_batch = record, batch
            elif record.offset >= start and record.offset < end:
                following = record.offset
                break
        if following is not None:
            break
    if record_at_offset is None or containing_batch is None:
        if page.problems:
            raise logcore.CorruptBatchError(page.problems[0])
        return following
    transaction = ""
    if containing_batch.is_transactional:
        transaction = _transaction_end(log, containing_batch, budget)
    return MessageDetail(
        record=record_at_offset,
        batch=containing_batch,
        transaction=transaction,
        previous=_previous(log, offset),
        following=following,
    )


def _previous(log: logcore.Log, offset: int) -> int | None:
    """Return the offset of the record before an offset, if it is found quickly."""
    offset_count = DEFAULT_COUNT
    end = offset
    # At most 21 times the usual number of offsets, because compaction may leave large
    # gaps.
    for _ in range(3):
        start = max(log.log_start_offset, end - offset_count)
        for batch in reversed(list(batches_between(log, start, end, MessagePage()))):
            below = [
                record.offset for record in batch.records() if record.offset < offset
            ]
            if below:
                return below[-1]
        end = start
        offset_count *= 4
    return None


def _transaction_end(log: logcore.Log, batch: RecordBatch, budget: TimeBudget) -> str:
    """Return how the transaction of a batch ended: its marker is the next one of its
    producer.
    """
    for segment in segments_between(log, batch.base_offset, log.high_watermark):
        position = 0
        if segment.base_offset < batch.next_offset:
            position = segment.find(batch.next_offset)
        while position < segment.size_bytes:
            if budget.is_over():
                return "unknown"
            other = segment.batch(position)
            if other is None or other.base_offset >= min(log.high_watermark, INT64_MAX):
                break
            # A producer has one transaction at a time in a partition.
            if other.is_control and other.producer_id == batch.producer_id:
                return "committed" if other.control_type() == "COMMIT" else "aborted"
            position += other.size_bytes
    return "open"
