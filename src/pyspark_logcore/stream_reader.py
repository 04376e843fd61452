"""Stream reader: the offsets and the tasks of each micro-batch.

Rules:
- Spark stores the offsets. This module does not depend on stop(), which Spark does not
  call when the process is killed.
- partitions() depends only on its arguments and the log: a replayed batch reads the
  same records, also in a new process.
- A replayed batch 0 begins at its first offsets, or the query ends with an error; see
  start_offsets.py.
- Deleted records raise DataLossError, or cause a warning with failOnDataLoss=false. A
  missing directory, or another directory at the same path, is always an error.

admission.py limits the size of a batch. Tasks read as in a batch query; see reader.py.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from logcore.config import INT64_MAX
from logcore.errors import InvalidConfigError, LogcoreError, LogLockedError
from pyspark_logcore import admission
from pyspark_logcore.admission import Offsets
from pyspark_logcore.options import LATEST, StreamOptions
from pyspark_logcore.origin import Origin, origin_of
from pyspark_logcore.planning import (
    check_names,
    present_partitions,
    requested_partitions,
    starting_offsets,
)
from pyspark_logcore.ranges import Bounds, TopicPartition, report_loss
from pyspark_logcore.reader import read_share, shares
from pyspark_logcore.start_offsets import FirstOffsets
from pyspark_logcore.tasks import into_tasks

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxRows,
        SupportsTriggerAvailableNow,  # pyright: ignore[reportAssignmentType]
    )

    HAS_LIMITS: Final = True
except ImportError:  # pyspark before 4.2
    HAS_LIMITS: Final = False  # type: ignore[misc]
    ReadAllAvailable: Any = None  # type: ignore[no-redef]
    ReadMaxRows: Any = None  # type: ignore[no-redef]

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Stand-in for older versions of Spark, in which each trigger reads everything."""


if TYPE_CHECKING:
    import pyarrow


class FirstBatchError(LogcoreError):
    """Batch 0 did not finish, and its start offsets are unknown."""


class LogcoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one stream.

    Spark keeps one object in a separate process while the query runs. Other objects are
    pickled right after their creation and sent to the tasks.
    """

    def __init__(self, options: StreamOptions, names: tuple[str, ...]) -> None:
        if options.max_offsets is not None and not HAS_LIMITS:
            raise InvalidConfigError(
                "maxOffsetsPerTrigger needs pyspark 4.2 or newer: older versions support no limit"
            )
        self.options = options
        self.names = names
        self.clock: Callable[[], float] = time.monotonic
        self._opened: Origin | None = None
        self._seen: dict[TopicPartition, Bounds] = {}  # at the last refresh
        self._target: dict[TopicPartition, int] | None = None  # of AvailableNow
        self._batched_at: float | None = (
            None  # time at which offsets were returned last
        )
        # Partitions of topics that were created again, until the next batch reports
        # them.
        self._recreated: set[TopicPartition] = set()
        self._present: list[TopicPartition] | None = None
        self._answer: dict[str, dict[str, int]] = {}
        self._is_idle = (
            False  # the last batch was empty, and no minimum delays the next one
        )
        self._initial: dict[TopicPartition, int] | None = None
        self._initial_is_kept = False
        self._has_returned_initial = False
        self._has_returned_latest = False
        self._commits = options.group_id is not None
        # Whether the user was warned that the directory is locked, so nothing is committed.
        self._was_locked = False

    # -- called by Spark on the driver -------------------------------------------------

    def initialOffset(self) -> dict[str, dict[str, int]]:
        """Return the start offsets of a new query, the same for each call.

        Raises:
            LogcoreError: the offsets cannot be read.
        """
        self._has_returned_initial = True
        if self._initial is None:
            store = self._store()
            kept = None
            if store is not None:
                kept = store.read()
            self._initial_is_kept = kept is not None
            if kept is None:
                self._initial = self._starts()
            else:
                self._initial = kept
        return admission.to_json(self._initial)

    def _keep_initial(self) -> None:
        """Store the first offsets, before Spark records the end of batch 0.

        They are not stored earlier: a replayed batch 0 without stored offsets must not
        begin at the present latest offsets.
        """
        store = self._store()
        if (
            store is not None
            and self._initial is not None
            and not self._initial_is_kept
        ):
            self._initial = store.store_once(self._initial)
            self._initial_is_kept = True

    def getDefaultReadLimit(self) -> Any:
        most = self.options.max_offsets
        if most is None and self.options.min_offsets is not None:
            most = INT64_MAX  # no limit, but different from the limit of Trigger.Once
        if most is None:
            return ReadAllAvailable()
        return ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Store the present end offsets, at which the query must end.

        Raises:
            LogcoreError: the end offsets cannot be read.
        """
        self._read_bounds()
        self._target = {key: bound.end for key, bound in self._seen.items()}

    # Spark 4.2 detects support of limits by the presence of parameters. Older versions
    # call this method without arguments.
    def latestOffset(
        self, start: Any = None, limit: Any = None
    ) -> dict[str, dict[str, int]]:
        """Return the end offsets of the next batch.

        Raises:
            LogcoreError: the end offsets cannot be read.
        """
        if not self._has_returned_latest:
            self._has_returned_latest = True
            self._keep_initial()
        is_same = not self._read_bounds()
        if is_same and self._is_idle and start == self._answer:
            return self._answer
        self._is_idle = False
        ends = {key: bound.end for key, bound in self._seen.items()}
        if start is None:
            return admission.to_json(ends)
        before = admission.from_json(start)
        if self._target is not None:
            ends = {
                key: min(end, self._target[key])
                for key, end in ends.items()
                if key in self._target
            }
        ends = self._checked(before, ends)
        now = self.clock()
        if (
            self._target is None
            and not self._recreated & before.keys()
            and not self._reads_all(limit)
        ):
            since = None
            if self._batched_at is not None:
                since = now - self._batched_at
            if admission.is_waiting(
                before,
                ends,
                self.options.min_offsets,
                since,
                self.options.max_delay_seconds,
            ):
                return admission.to_json(before)
        if HAS_LIMITS and isinstance(limit, ReadMaxRows):
            ends = admission.at_most(before, ends, limit.max_rows)
        self._is_idle = ends == before
        if not self._is_idle:
            self._batched_at = now
            self._recreated -= before.keys()
        self._answer = admission.to_json(ends)
        return self._answer

    def _reads_all(self, limit: Any) -> bool:
        """Return whether the trigger requests all records regardless of options, as
        Trigger.Once does.
        """
        has_options = (
            self.options.max_offsets is not None or self.options.min_offsets is not None
        )
        return HAS_LIMITS and has_options and isinstance(limit, ReadAllAvailable)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """Return the end of the log at the last refresh, from which Spark computes the lag
        in the query's progress.
        """
        return admission.to_json({key: bound.end for key, bound in self._seen.items()})

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        """Return one entry for each task of a batch.

        Raises:
            LogcoreError: records of the batch are missing or cannot be read.
        """
        before = admission.from_json(start)
        ends = admission.from_json(end)
        if self._has_returned_initial and not self._has_returned_latest:
            before = self._first_of_replay(before, ends)
        self._has_returned_initial = False
        options = self.options.read
        origin = self._origin
        origin.refresh()
        present = set(present_partitions(options, origin))
        ranges = []
        for offset_range in admission.ranges(before, ends):
            if (offset_range.topic, offset_range.partition) in present:
                ranges.append(offset_range)
            else:
                self._report(
                    (offset_range.topic, offset_range.partition),
                    f"offsets {offset_range.start} to {offset_range.end} were deleted with the partition",
                )
        return shares(into_tasks(ranges, origin.size_index, options), origin)

    def commit(self, end: Any) -> None:
        """Commit the offsets of a batch that Spark has finished.

        Spark calls this method with the next batch, so never for the last batch.
        """
        group = self.options.group_id
        if group is None or not self._commits:
            return
        try:
            self._origin.commit_offsets(group, admission.from_json(end))
        except LogLockedError as error:  # possibly temporary: the next commit retries
            if not self._was_locked:
                self._was_locked = True
                warnings.warn(
                    f"offsets are not committed to group {group!r} while {error}",
                    stacklevel=2,
                )
        except LogcoreError as error:
            self._commits = False
            warnings.warn(
                f"offsets are not committed to group {group!r}: {error}", stacklevel=2
            )

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # -- in a task ---------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read the ranges of one task; runs in a worker of Spark."""
        return read_share(self.options.read, self.names, partition)

    # -- helpers -----------------------------------------------------------------------

    @property
    def _origin(self) -> Origin:
        if self._opened is None:
            self._opened = origin_of(self.options.read)
        return self._opened

    def _store(self) -> FirstOffsets | None:
        location = self.options.checkpoint_location
        if location is None:
            return None
        read = self.options.read
        identity = {
            "origin": self._origin.location,
            "subscribe": read.subscribe,
            "pattern": read.pattern,
            "assign": read.assign,
            "start": repr(read.start),
        }
        return FirstOffsets(location, identity)

    def _starts(self) -> dict[TopicPartition, int]:
        options = self.options.read
        origin = self._origin
        origin.refresh()
        requested = requested_partitions(options, origin)
        check_names(options.start, requested, "startingOffsets")
        return starting_offsets(options, origin, origin.bounds(requested))

    def _read_bounds(self) -> bool:
        """Read the start and end of each partition of this stream; return whether any of
        them changed.
        """
        origin = self._origin
        if origin.refresh() or self._present is None:
            self._present = present_partitions(self.options.read, origin)
        seen = origin.bounds(self._present)
        if seen == self._seen:
            return False
        self._recreated |= {
            key for key, bound in seen.items() if _is_other(self._seen.get(key), bound)
        }
        self._seen = seen
        return True

    def _checked(
        self, before: Offsets, ends: dict[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Return the ends after checking that no records were lost since the start of the
        batch.

        Lost records are only reported if the user set failOnDataLoss=false.
        """
        recreated = self._recreated & before.keys()
        for key, reached in before.items():
            if key not in ends:
                self._report(
                    key, f"the partition was deleted; offset {reached} was reached"
                )
            elif key in recreated:
                self._report(
                    key,
                    f"the topic was deleted and made again; offset {reached} was reached",
                )
            elif ends[key] < reached:
                self._report(
                    key,
                    f"the log ends at {ends[key]}, and offset {reached} was reached: it was made again",
                )
            elif self._seen[key].start > reached:
                self._report(
                    key,
                    f"the log begins at {self._seen[key].start}, and offset {reached} is the next",
                )
        for key in ends.keys() - before.keys():
            if self._seen[key].start > 0:
                self._report(
                    key,
                    f"the partition was added, and its log begins at {self._seen[key].start}, not at 0",
                )
        return admission.made_again(before, ends, recreated)

    def _first_of_replay(
        self, before: dict[TopicPartition, int], ends: Offsets
    ) -> dict[TopicPartition, int]:
        """Return the start of a replayed batch 0.

        Spark combines the logged end of the batch with a start that it has just
        requested again.
        """
        where = self.options.read.start
        at_end = where.bound == "latest" or LATEST in (where.offsets or {}).values()
        by_time = where.timestamps_ms is not None and where.strategy == "latest"
        if self._initial_is_kept or not (at_end or by_time):
            return before
        reason = (
            f"batch 0 of this query did not finish. It ends at {admission.to_json(ends)}; its start is unknown, "
            "because latest means other offsets now. Start it with a new checkpoint and startingOffsets as JSON. If "
            "the option checkpointLocation names the query's checkpoint from the first start on, the reader stores it"
        )
        if self.options.read.fail_on_data_loss:
            raise FirstBatchError(reason, path=self._origin.location)
        warnings.warn(f"{reason}. Continuing at the end of batch 0", stacklevel=2)
        return {**before, **ends}

    def _report(self, key: TopicPartition, reason: str) -> None:
        report_loss(
            self.options.read.fail_on_data_loss, self._origin.location, *key, reason
        )


def _is_other(before: Bounds | None, now: Bounds) -> bool:
    """Return whether the topic was created again between two refreshes."""
    return before is not None and before.incarnation != now.incarnation
