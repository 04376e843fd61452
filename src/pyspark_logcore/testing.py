"""Helpers for tests of Spark jobs: a Kafka job that runs over a log directory, and
faults to try it with.

    with kafka_alias("data"):
        job.main(spark)                        # says format("kafka"), and is not changed

    rows.mapInArrow(failing(task=1), rows.schema)     # the first attempt of that task fails
    forget_commit(checkpoint)                         # the next start replays the last batch

The fixture `spark_session` is in pytest_plugin.py. What is here changes pyspark in this
process only, and undoes it.
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
    """What failing() raises."""


@contextlib.contextmanager
def kafka_alias(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """While it is open, format("kafka") means format("logcore") over this log
    directory, for readers and writers of batches and streams, also of Spark Connect.

    Servers and security options of the job are ignored. A batch write without a mode
    appends, as with Spark's Kafka sink. Nothing else differs but what docs/spark.md
    lists.
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
    # Those of Spark Connect exist if a session of it exists. Importing them without its
    # packages may end the process.
    for module, names in _CONNECT.items():
        loaded = sys.modules.get(module)
        found += [getattr(loaded, name) for name in names if loaded is not None]
    return found


@contextlib.contextmanager
def _patched(kind: Any, directory: str) -> Generator[None, None, None]:
    ours = vars(kind).get("format")
    if ours is None:  # inherited from one that is patched too
        yield
        return

    @functools.wraps(ours)
    def chosen(self: Any, source: str) -> Any:
        if source.lower() != "kafka":
            return ours(self, source)
        made = (
            ours(self, "logcore")
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
        kind.format = ours


def failing(
    task: int = 0, attempts: int = 1
) -> Callable[[Iterator[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """For DataFrame.mapInArrow: passes rows on, and raises FaultError behind the last
    ones in the first attempts of a task.

    Spark tries again only where it may: local[2,3] allows three attempts.
    """

    def passed(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.partitionId() == task and context.attemptNumber() < attempts:
            raise FaultError(
                f"attempt {context.attemptNumber()} of task {task} fails, as the test says"
            )

    return passed


def forget_commit(
    checkpoint: str | os.PathLike[str], batch_id: int | None = None
) -> int:
    """Removes from a checkpoint that a batch was committed, so that the query's next
    start replays it; returns its id.

    batch_id: the last one by default. Raises LogNotFoundError when there is no such
    commit.
    """
    commits = Path(checkpoint) / "commits"
    if commits.is_dir():
        known = sorted(int(one.name) for one in commits.glob("[0-9]*"))
    else:
        known = []
    if batch_id is not None:
        wanted = batch_id
    else:
        wanted = max(known, default=-1)
    if wanted not in known:
        raise LogNotFoundError(
            "no such batch was committed", path=str(commits), found=known or "none"
        )
    for path in (commits / str(wanted), commits / f".{wanted}.crc"):
        path.unlink(missing_ok=True)
    return wanted
