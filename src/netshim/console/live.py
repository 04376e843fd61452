"""The live tail: new records of a topic as server-sent events.

Rules:
- A page follows at most MAX_PARTITIONS partitions, and a console at most MAX_TAILS
  pages at once.
- If more records arrive than a page shows, the oldest are left out, and the event contains
  their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Final

import attrs
from starlette.concurrency import run_in_threadpool

import logcore
from logcore.errors import LogcoreError
from logcore.kernels import Record
from netshim.console.directory import OpenDirectory
from netshim.console.messages import MessageRow

#: Each partition has open files while a page follows it.
MAX_PARTITIONS: Final = 100
#: Each page occupies a thread during its checks.
MAX_TAILS: Final = 16
#: Maximum number of records in one event, and of rows in a page.
MAX_ROWS: Final = 500
#: Interval at which the files are checked for new records.
_INTERVAL_S: Final = 0.5
#: Interval of comments that keep the connection open.
_KEEPALIVE_S: Final = 15.0


@attrs.define
class LiveTail:
    """The partitions that one page follows."""

    #: The partitions by number.
    logs: dict[int, logcore.Log] = attrs.Factory(dict)
    #: By partition, the offset of the next record to show.
    offsets: dict[int, int] = attrs.Factory(dict)

    @classmethod
    def open(
        cls, directory: OpenDirectory, topic: str, numbers: tuple[int, ...]
    ) -> LiveTail:
        """Open partitions at their ends. Raises LogcoreError."""
        tail = cls()
        try:
            for number in numbers[:MAX_PARTITIONS]:
                log = directory.open_log(topic, number)
                tail.logs[number] = log
                tail.offsets[number] = log.high_watermark
        except BaseException:
            tail.close()
            raise
        return tail

    def poll(self) -> tuple[list[MessageRow], int]:
        """Return the newest of the new records, and how many new records are left out.

        Raises:
            LogcoreError: a partition cannot be read any more.
        """
        messages: list[MessageRow] = []
        skipped = 0
        for number, log in self.logs.items():
            # Another process may have appended records, or begun a segment.
            log.refresh()
            end = log.high_watermark
            # The end moves back if an unclean election truncated the log.
            start = min(self.offsets[number], end)
            # Records before `first` would not fit on the page, so they are not read.
            first = max(start, end - MAX_ROWS, log.log_start_offset)
            skipped += first - start
            records: list[Record] = list(log.read(first, end)) if first < end else []
            messages += [MessageRow(number, record) for record in records]
            self.offsets[number] = end
        messages.sort(key=lambda message: message.timestamp_ms)
        return messages[-MAX_ROWS:], skipped + max(0, len(messages) - MAX_ROWS)

    def close(self) -> None:
        """Close the partitions."""
        for log in self.logs.values():
            log.close()
        self.logs.clear()


async def events(
    tail: LiveTail,
    render: Callable[[list[MessageRow]], str],
    may_continue: Callable[[], bool],
) -> AsyncIterator[str]:
    """Yield server-sent events with rows of HTML, until the client closes.

    `may_continue` returns whether the user may still read the records.
    """

    def poll() -> tuple[list[MessageRow], int] | None:
        return tail.poll() if may_continue() else None

    idle_s = 0.0
    try:
        # A comment, so that the browser gets the header of the response at once.
        yield ": connected\n\n"
        while True:
            try:
                # In a thread, because the files are read.
                polled = await run_in_threadpool(poll)
            except LogcoreError as error:
                yield _event("problem", {"text": str(error)})
                return
            if polled is None:
                yield _event("problem", {"text": "Log in again to continue."})
                return
            messages, skipped = polled
            if messages:
                idle_s = 0.0
                yield _event("rows", {"html": render(messages), "skipped": skipped})
            elif idle_s >= _KEEPALIVE_S:
                idle_s = 0.0
                yield ": alive\n\n"
            await asyncio.sleep(_INTERVAL_S)
            idle_s += _INTERVAL_S
    finally:
        with contextlib.suppress(LogcoreError):
            tail.close()


def _event(name: str, value: dict[str, object]) -> str:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n"
