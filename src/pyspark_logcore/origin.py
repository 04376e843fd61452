"""The source of a query: the interface for planning, and for tasks that read a range.

| origin | given as | |
|---|---|---|
| `directory.DirectoryOrigin` | a path | a log directory of this machine |
| `stores.StoreOrigin` | a URI such as s3://bucket/logs | a copy of a log directory in an object store |
| `brokers.BrokerOrigin` | `kafka.bootstrap.servers=host:port`, and no path | a cluster of brokers |

Each process creates an origin from the options. An origin opens files and connections
on first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from logcore.format.columns import RecordColumns
from pyspark_logcore.options import ReadOptions
from pyspark_logcore.ranges import Bounds, OffsetRange, TopicPartition
from pyspark_logcore.tasks import SizeIndex

if TYPE_CHECKING:
    from typing import Self


class Origin(Protocol):
    """Source of the records of a query.

    All methods raise LogcoreError. `location` is the name of the source in messages.
    """

    @property
    def location(self) -> str: ...

    def refresh(self) -> bool:
        """Refresh topics() and partitions(); return False if nothing can have changed."""
        ...

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        ...

    def partitions(self, topic: str) -> tuple[int, ...]:
        """Return the numbers of the partitions, sorted.

        Raises:
            TopicNotFoundError: the topic does not exist.
        """
        ...

    def bounds(
        self, requested: Sequence[TopicPartition]
    ) -> dict[TopicPartition, Bounds]:
        """Return the current bounds, under the isolation of the options.

        A deleted partition is missing in the result. The call is cheap to repeat.
        """
        ...

    def offsets_at(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        """Return for each partition the first offset with this or a later timestamp, or
        None.
        """
        ...

    def size_index(self, offset_range: OffsetRange) -> SizeIndex:
        """Return the offsets at which the range may be divided."""
        ...

    def identity(self, topic: str, partition: int) -> Any:
        """Return the identity of a log, which can be pickled.

        read() compares it, so that no task reads another log.
        """
        ...

    def read(
        self, offset_range: OffsetRange, identity: Any
    ) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        """Yield the records of a range in order, as columns and the types of their
        timestamps. Runs in a task.

        Deleted records are reported by report_loss(). An error contains the offset that
        was reached.
        """
        ...

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Store the next offsets of a consumer group, like a consumer's commit."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def origin_of(options: ReadOptions) -> Origin:
    """Return the origin that the options name, without opening files or connections."""
    if options.brokers is not None:
        from pyspark_logcore.brokers import BrokerOrigin

        return BrokerOrigin(options)
    if options.store is not None:
        from pyspark_logcore.stores import StoreOrigin

        return StoreOrigin(options)
    from pyspark_logcore.directory import DirectoryOrigin

    return DirectoryOrigin(options)
