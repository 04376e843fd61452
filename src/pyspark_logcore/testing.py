"""Helpers for tests of Spark jobs: run a Kafka job over a log directory, and inject
faults.

    with kafka_alias("data"):
        job.main(spark)                        # an unchanged job with format("kafka")

    rows.mapInArrow(failing(task=1), rows.schema)     # the first attempt of that task fails
    forget_commit(checkpoint)                         # the next start replays the last batch

The fixture `spark_session` is in pytest_plugin.py. These helpers patch pyspark in this
process only, and undo the patch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logcore.errors import LogNotFoundError

if TYPE_CHECKING:
    import pyarrow


_CONNECT: Final = {
    "pyspark.sql.connect.readwriter": ("DataFrameReader", "DataFrameWriter"),
    "pyspark.sql.connect.streaming.readwriter": (
        "DataStreamReader",
        "DataStreamWriter",
    ),
}


class FaultError(RuntimeError):
    """The error that failing() raises."""


@contextlib.contextmanager
def kafka_alias(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Replace format("kafka") by format("logcore") over this log directory.

    The alias applies to readers and writers of batches and streams, including Spark
    Connect, until the context ends. Servers and security options of the job are ignored.
    A batch write without a mode appends, as with Spark's Kafka sink. docs/spark.md lists
    all other differences.
    """
    directory = os.path.abspath(path)
    with contextlib.ExitStack() as stack:
        for kind in _readers_and_writers():
            stack.enter_context(_patched(kind, directory))
        yield


def _readers_and_writers() -> list[Any]:
    from pyspark.sql import readwriter
    from pyspark.sql.streaming import readwriter as streaming

    found = [readwriter.DataFrameReader, readwriter.DataFrameWriter]
    found += [streaming.DataStreamReader, streaming.DataStreamWriter]
    # The classes of Spark Connect are imported only if a session of it exists. Importing
    # them without its packages may end the process.
    for module, names in _CONNECT.items():
        loaded = sys.modules.get(module)
        found += [getattr(loaded, name) for name in names if loaded is not None]
    return found


@contextlib.contextmanager
def _patched(kind: Any, directory: str) -> Generator[None, None, None]:
    original = vars(kind).get("format")
    if original is None:  # inherited from a class that is patched as well
        yield
        return

    @functools.wraps(original)
    def chosen(self: Any, source: str) -> Any:
        if source.lower() != "kafka":
            return original(self, source)
        made = (
            original(self, "logcore")
            .option("path", directory)
            .option("ignoreSecurityOptions", "true")
        )
        if kind.__name__ == "DataFrameWriter":
            made = made.mode("append")
        return made

    kind.format = chosen
    try:
        yield
    finally:
        kind.format = original


def failing(
    task: int = 0, attempts: int = 1
) -> Callable[[Iterator[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """Return a function for DataFrame.mapInArrow that fails the first attempts of a task.

    The function passes all rows on and then raises FaultError. Spark retries only if the
    master allows it: local[2,3] allows three attempts.
    """

    def passed(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.partitionId() == task and context.attemptNumber() < attempts:
            raise FaultError(
                f"attempt {context.attemptNumber()} of task {task} fails, as the test requests"
            )

    return passed


def forget_commit(
    checkpoint: str | os.PathLike[str], batch_id: int | None = None
) -> int:
    """Remove the commit of a batch from a checkpoint, so that the query's next start
    replays the batch; return the id of the batch.

    `batch_id` is the last committed batch by default.

    Raises:
        LogNotFoundError: the batch was not committed.
    """
    commits = Path(checkpoint) / "commits"
    if commits.is_dir():
        known = sorted(int(path.name) for path in commits.glob("[0-9]*"))
    else:
        known = []
    if batch_id is not None:
        batch = batch_id
    else:
        batch = max(known, default=-1)
    if batch not in known:
        raise LogNotFoundError(
            "no such batch was committed", path=str(commits), found=known or "none"
        )
    for path in (commits / str(batch), commits / f".{batch}.crc"):
        path.unlink(missing_ok=True)
    return batch
