"""The log that Python has been missing: partitions in Apache Kafka's own files, as a
Python object.

    import logcore

    with logcore.open("data/orders-0", create=True) as log:
        receipt = log.append(b"4 apples", key=b"anna")
        for record in log.read(receipt.offset):
            print(record.offset, record.key, record.value)

The public names are those in __all__. See docs/map.md for where things are.
"""

from logcore.distribution import check_package as _check_package

TYPE_CHECKING = False  # the name that type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from logcore.backup import SnapshotInfo, SnapshotResult, restore, snapshots
    from logcore.cleaner import CleaningReport, clean
    from logcore.config import Durability, LogConfig, every, interval
    from logcore.consumer.topic_partition import TopicPartition
    from logcore.coordinators.group_descriptions import (
        GroupDescription,
        GroupMemberDescription,
        GroupOffset,
    )
    from logcore.directory.maintenance import MaintenanceConfig
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
        QueryError,
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

#: The public names by module. A module is imported at the first use of one of its names,
#: because `logcore --version` and the completion of a shell need none of them.
_NAMES = {
    "backup": "SnapshotInfo SnapshotResult restore snapshots",
    "cleaner": "CleaningReport clean",
    "config": "Durability LogConfig every interval",
    "consumer.topic_partition": "TopicPartition",
    "coordinators.group_descriptions": (
        "GroupDescription GroupMemberDescription GroupOffset"
    ),
    "directory.maintenance": "MaintenanceConfig",
    "format.columns": "RecordColumns",
    "kernels": "Receipt Record TopicRecord",
    "log": "Log LogStatistics open",
    "logdir": "LogDir TopicDescription open_dir",
    "partition.checksum_file": "ScrubReport",
    "partition.recovery": "RecoveryReport",
    "partition.scan": "Scan",
    "recordbatch": "RecordBatch",
    "reporting": "Incident",
    "table": "Table TopicTable",
    "topic": "Topic",
    "errors": (
        "CompactionAbandonedError CoordinatorFencedError CorruptBatchError "
        "CorruptLogError DiskFullError DurabilityUnknownError "
        "ForkedWriterError InvalidConfigError InvalidNameError "
        "InvalidProducerEpochError InvalidRecordError InvalidTimestampError "
        "InvalidTransactionStateError LogClosedError LogFailedError "
        "LogLockedError LogNotFoundError LogcoreError "
        "MissingDependencyError NotLeaderError OffsetConflictError "
        "OffsetOutOfRangeError OutOfOrderSequenceError QueryError ReadOnlyLogError "
        "RecordTooLargeError ResourceError SegmentTooSmallError "
        "StorageReadError StorageWriteError TopicExistsError "
        "TopicNotFoundError UnsupportedCodecError "
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
#: Public names that differ from those in the module.
_OTHER_NAMES = {"open": "open_log"}


if not TYPE_CHECKING:
    import importlib

    def _is_module(name):
        # Imported late: `logcore --version` would wait for it.
        from importlib.util import find_spec

        return find_spec(f"logcore.{name}") is not None

    # To a type checker, a module with __getattr__() has every name.
    def __getattr__(name):
        if name in _MODULES:
            module = importlib.import_module(f"logcore.{_MODULES[name]}")
            value = getattr(module, _OTHER_NAMES.get(name, name))
        elif not name.startswith("_") and _is_module(name):
            value = importlib.import_module(f"logcore.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    "GroupDescription",
    "GroupMemberDescription",
    "GroupOffset",
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
    "MaintenanceConfig",
    "MissingDependencyError",
    "NotLeaderError",
    "OffsetConflictError",
    "OffsetOutOfRangeError",
    "OutOfOrderSequenceError",
    "QueryError",
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
    "TopicPartition",
    "TopicRecord",
    "TopicTable",
    "UnsupportedCodecError",
    "clean",
    "every",
    "interval",
    "open",
    "open_dir",
    "restore",
    "snapshots",
]
