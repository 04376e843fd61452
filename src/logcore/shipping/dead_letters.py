"""Dead letter topics: writes refused records to the local topic `<topic>.dlq`.

Rules:
- A refused record is written to this topic before the progress moves past the record.
  After a crash between these steps, the record is read again. append_once() then finds
  the copy and does not append another one.
- The topic has as many partitions as its source, and accepts larger records, because
  headers with the origin of the record are added.
- A record of `orders-3` is written to `orders.dlq-3`, so the order is preserved.

The names of the headers are ORIGIN_HEADERS. This module does not decide which record is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from logcore.errors import InvalidConfigError, ReadOnlyLogError
from logcore.kernels import Record
from logcore.log import Log
from logcore.logdir import LogDir
from logcore.shipping.cluster import Partition
from logcore.shipping.settings import QUARANTINE_SUFFIX

ORIGIN_HEADERS: Final = (
    "logcore.shipper",
    "logcore.topic",
    "logcore.partition",
    "logcore.offset",
    "logcore.error",
)
#: Number of last records that are searched for an earlier copy of a record. It is above
#: 1, because other shippers may have appended since the crash.
_SEARCHED_RECORDS: Final = 1_000
_HEADERS_BYTES: Final = 64 << 10


class Quarantine:
    """The quarantine topics of one forwarder or mirror.

    Each record contains the name of the forwarder or mirror, because several of them
    may share a topic.
    """

    def __init__(self, logdir: LogDir, shipper: str) -> None:
        self._logdir = logdir
        self._shipper = shipper

    def append_once(
        self, origin: Partition, partition_count: int, record: Record, reason: str
    ) -> bool:
        """Append the record unless the topic contains it already.

        Returns whether it was appended.
        """
        log = self._log(origin, partition_count)
        origin_headers = self._origin_headers(origin, record)
        for copy in log.read(
            max(log.log_start_offset, log.high_watermark - _SEARCHED_RECORDS)
        ):
            copy_headers = dict(copy.headers)
            if all(
                copy_headers.get(name) == value
                for name, value in origin_headers.items()
            ):
                return False
        headers = [
            *record.headers,
            *origin_headers.items(),
            (ORIGIN_HEADERS[-1], reason.encode()),
        ]
        timestamp_ms = None
        if record.timestamp_ms >= 0:
            timestamp_ms = record.timestamp_ms
        log.append(
            record.value,
            key=record.key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            durability="disk",
        )
        return True

    def _origin_headers(self, origin: Partition, record: Record) -> Mapping[str, bytes]:
        topic, number = origin
        values = (self._shipper, topic, str(number), str(record.offset))
        return {name: value.encode() for name, value in zip(ORIGIN_HEADERS, values)}

    def _log(self, origin: Partition, partition_count: int) -> Log:
        topic = origin[0] + QUARANTINE_SUFFIX
        if topic not in self._logdir:
            max_message_bytes = 1 << 20
            if origin[0] in self._logdir:
                max_message_bytes = self._logdir.settings(origin[0]).max_message_bytes
            max_message_bytes = min(max_message_bytes * 2 + _HEADERS_BYTES, 2**31 - 1)
            segment_bytes = max(max_message_bytes, self._logdir.config.segment_bytes)
            config = {
                "max.message.bytes": max_message_bytes,
                "segment.bytes": segment_bytes,
            }
            try:
                self._logdir.create_topic(topic, partition_count, config)
            except ReadOnlyLogError:
                raise InvalidConfigError(
                    "on_error='quarantine' writes to the directory, which was opened with read_only=True"
                ) from None
        return self._logdir.partition(topic, origin[1])
