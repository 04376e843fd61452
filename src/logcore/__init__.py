"""The log that Python has been missing: partitions in Apache Kafka's own files, as a
Python object.

    import logcore

    with logcore.open("data/orders-0", create=True) as log:
        receipt = log.append(b"4 apples", key=b"anna")
        for record in log.read(receipt.offset):
            print(record.offset, record.key, record.value)

The public names are those in __all__. See docs/map.md for where things are.
"""

from typing import TYPE_CHECKING, Any

from logcore.config import Durability, LogConfig, every, interval
from logcore.directory.maintenance import Upkeep
from logcore.distribution import check_package as _check_package
from logcore.errors import (
    CompactionAbandonedError,
    CoordinatorFencedError,
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    DurabilityUnknownError,
    ForkedWriterError,
    InvalidConfigError,
    InvalidNameError,
    InvalidProducerEpochError,
    InvalidRecordError,
    InvalidTimestampError,
    InvalidTransactionStateError,
    LogClosedError,
    LogcoreError,
    LogFailedError,
    LogLockedError,
    LogNotFoundError,
    MissingDependencyError,
    NotLeaderError,
    OffsetConflictError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ReadOnlyLogError,
    RecordTooLargeError,
    ResourceError,
    SegmentTooSmallError,
    StorageReadError,
    StorageWriteError,
    TopicExistsError,
    TopicNotFoundError,
    UnsupportedCodecError,
)
from logcore.format.columns import RecordColumns
from logcore.kernels import Receipt, Record, TopicRecord
from logcore.log import Log, LogStatistics
from logcore.log import open_log as open
from logcore.logdir import LogDir, TopicDescription, open_dir
from logcore.partition.checksum_file import ScrubReport
from logcore.partition.recovery import RecoveryReport
from logcore.partition.scan import Scan
from logcore.recordbatch import RecordBatch
from logcore.reporting import Incident
from logcore.table import Table, TopicTable
from logcore.topic import Topic

if TYPE_CHECKING:
    from logcore.backup import SnapshotInfo, SnapshotResult, restore, snapshots
    from logcore.cleaner import CleaningReport, clean
else:
    #: Names that few programs use, by module. They are imported when asked for: every
    #: program waits for `import logcore`.
    _LATE = {
        "CleaningReport": "cleaner",
        "SnapshotInfo": "backup",
        "SnapshotResult": "backup",
        "clean": "cleaner",
        "restore": "backup",
        "snapshots": "backup",
    }

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"logcore.{_LATE[name]}"), name)


__version__ = "0.1.0"

_check_package()

__all__ = [
    "CleaningReport",
    "CompactionAbandonedError",
    "CoordinatorFencedError",
    "CorruptBatchError",
    "CorruptLogError",
    "DiskFullError",
    "Durability",
    "DurabilityUnknownError",
    "ForkedWriterError",
    "Incident",
    "InvalidConfigError",
    "InvalidNameError",
    "InvalidProducerEpochError",
    "InvalidRecordError",
    "InvalidTimestampError",
    "InvalidTransactionStateError",
    "Log",
    "LogClosedError",
    "LogConfig",
    "LogDir",
    "LogFailedError",
    "LogLockedError",
    "LogNotFoundError",
    "LogStatistics",
    "LogcoreError",
    "MissingDependencyError",
    "NotLeaderError",
    "OffsetConflictError",
    "OffsetOutOfRangeError",
    "OutOfOrderSequenceError",
    "ReadOnlyLogError",
    "Receipt",
    "Record",
    "RecordBatch",
    "RecordColumns",
    "RecordTooLargeError",
    "RecoveryReport",
    "ResourceError",
    "Scan",
    "ScrubReport",
    "SegmentTooSmallError",
    "SnapshotInfo",
    "SnapshotResult",
    "StorageReadError",
    "StorageWriteError",
    "Table",
    "Topic",
    "TopicDescription",
    "TopicExistsError",
    "TopicNotFoundError",
    "TopicRecord",
    "TopicTable",
    "UnsupportedCodecError",
    "Upkeep",
    "clean",
    "every",
    "interval",
    "open",
    "open_dir",
    "restore",
    "snapshots",
]
