"""Simulates Spark: calls the source and the writer like its driver and its tasks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark.sql.types as sql

from pyspark_logcore import columns
from pyspark_logcore.source import LogcoreDataSource


def source(path: Path, **given: object) -> LogcoreDataSource:
    # Spark passes names in lower case.
    texts = {name.lower(): str(value) for name, value in given.items()}
    return LogcoreDataSource({"path": str(path), **texts})


def frame(**given: Any) -> Any:
    """Return columns as an Arrow batch, with the types that Spark would send."""
    types = {
        "partition": pa.int32(),
        "topic": pa.string(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    }
    arrays = {
        name: column
        if isinstance(column, pa.Array)
        else pa.array(column, types.get(name, pa.binary()))
        for name, column in given.items()
    }
    return pa.record_batch(arrays)


def spark_types(batch: Any) -> sql.StructType:
    kinds = {
        "key": sql.BinaryType(),
        "value": sql.BinaryType(),
        "topic": sql.StringType(),
        "partition": sql.IntegerType(),
        "timestamp": sql.TimestampType(),
    }
    kinds["headers"] = columns.spark_schema(["headers"])[0].dataType
    return sql.StructType(
        [
            sql.StructField(name, kinds.get(name, sql.LongType()))
            for name in batch.schema.names
        ]
    )


def write(path: Path, *tasks: Any, **given: object) -> Any:
    """Simulate a write in which each task gets one batch. As in Spark, values are pickled
    if they pass from one process to another.
    """
    writer = source(path, **given).writer(spark_types(tasks[0]), False)
    messages = []
    for task, batch in enumerate(tasks):
        copy = pickle.loads(pickle.dumps(writer))
        messages.append(
            pickle.loads(
                pickle.dumps(copy.planned.stage(iter([batch]), task, task + 100))
            )
        )
    writer.commit(messages)
    return writer
