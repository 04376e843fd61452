"""Apache Spark reads and writes the partitions of a log directory: `format("logcore")`,
with no jar and no broker.

    import pyspark_logcore
    from pyspark.sql import SparkSession

    spark = pyspark_logcore.tune(SparkSession.builder).getOrCreate()
    flights = spark.read.format("logcore").option("subscribe", "flights").load("data")

Spark finds this package by its name and takes DefaultSource from it. Columns, options
and offset JSON are those of Spark's own `kafka` format; the path is a log directory,
the same that logcore.open_dir() takes. See docs/spark.md.

Rules:
- Importing this package never raises and imports no large library. If one `pyspark_`
  package fails, Spark finds none of them.
- The functions that use the library, pyarrow and numpy import them.

This module holds only the public names. Spark calls source.py; reader.py and writer.py
do the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyspark_logcore.gathering import gather
    from pyspark_logcore.local import write_local

from pyspark_logcore.session import JavaNotFoundError, activate, ensure_java, tune

__all__ = [
    "DefaultSource",
    "JavaNotFoundError",
    "activate",
    "ensure_java",
    "gather",
    "register",
    "tune",
    "write_local",
]

try:
    from pyspark_logcore.source import LogcoreDataSource

    DefaultSource = LogcoreDataSource
except Exception:
    __all__.remove("DefaultSource")


if not TYPE_CHECKING:
    # To a type checker, a module with __getattr__() has every name.
    def __getattr__(name: str) -> Any:
        # These names import the library and numpy, so they are imported on first use.
        if name == "write_local":
            from pyspark_logcore.local import write_local

            return write_local
        if name == "gather":
            from pyspark_logcore.gathering import gather

            return gather
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(spark: SparkSession) -> None:
    """Register format("logcore") in this session, if Spark does not discover the
    package.

    Spark does not discover a package that was sent in a zip (spark.submit.pyFiles,
    addPyFile), nor this package if another `pyspark_` package cannot be imported.
    Registering twice is allowed.

    Raises:
        ImportError: pyspark is older than 4.0.
    """
    from pyspark_logcore.source import LogcoreDataSource

    try:
        spark.dataSource.register(LogcoreDataSource)
    except Exception as error:
        # Spark 4.0 refuses to replace the source that it has discovered. That source is
        # the same class.
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise
