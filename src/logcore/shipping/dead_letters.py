"""Keeps refused records in the local topic `<topic>.dlq`, with their origin in headers.

Rules:
- A record is kept before the progress moves past it. After a crash between these steps
  the record is read again, and its copy in this topic is found.
- The topic has as many partitions as its source, and accepts larger records, because
  headers are added.
- A record of `orders-3` is kept in `orders.dlq-3`, so the order is kept too.

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
from logcore.shipping.settings import QUARANTINE

ORIGIN_HEADERS: Final = (
    "logcore.shipper",
    "logcore.topic",
    "logcore.partition",
    "logcore.offset",
    "logcore.error",
)
#: Number of last records in which an earlier copy of the record is searched. A crash
#: may have left the copy, and other shippers may have appended since.
_READ_BACK_RECORDS: Final = 1_000
_ROOM_BYTES: Final = 64 << 10


class Quarantine:
    """The quarantine topics of one shipper.

    Each record contains the name of the shipper, because several shippers may share a
    topic.
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
        place = self._place(origin, record)
        for kept in log.read(
            max(log.log_start_offset, log.high_watermark - _READ_BACK_RECORDS)
        ):
            found = dict(kept.headers)
            if all(found.get(name) == value for name, value in place.items()):
                return False
        headers = [
            *record.headers,
            *place.items(),
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

    def _place(self, origin: Partition, record: Record) -> Mapping[str, bytes]:
        topic, number = origin
        values = (self._shipper, topic, str(number), str(record.offset))
        return {name: value.encode() for name, value in zip(ORIGIN_HEADERS, values)}

    def _log(self, origin: Partition, partition_count: int) -> Log:
        topic = origin[0] + QUARANTINE
        if topic not in self._logdir:
            largest = 1 << 20
            if origin[0] in self._logdir:
                largest = self._logdir.settings(origin[0]).max_message_bytes
            largest = min(largest * 2 + _ROOM_BYTES, 2**31 - 1)
            segment_bytes = max(largest, self._logdir.config.segment_bytes)
            config = {"max.message.bytes": largest, "segment.bytes": segment_bytes}
            try:
                self._logdir.create_topic(topic, partition_count, config)
            except ReadOnlyLogError:
                raise InvalidConfigError(
                    "on_error='quarantine' keeps records in the directory, which was opened with read_only=True"
                ) from None
        return self._logdir.partition(topic, origin[1])
