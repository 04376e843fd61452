"""The data source `logcore`, from which Spark gets readers and writers.

Rules:
- Options and schemas are checked here, before any task runs.
- This module imports only pyspark's data source classes. Other modules are imported with
  the first reader or writer.

Spark calls these methods in separate processes, each with a new object, so no state is
kept between calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter
    from pyspark.sql.types import StructType

    from pyspark_logcore.reader import LogcoreReader
    from pyspark_logcore.writer import LogcoreWriter


class LogcoreDataSource(DataSource):
    """Data source format("logcore"): a log directory as a table of records.

    docs/spark.md describes the options and columns.
    """

    @classmethod
    def name(cls) -> str:
        return "logcore"

    def schema(self) -> StructType:
        from pyspark_logcore import columns
        from pyspark_logcore.options import parse_headers

        return columns.spark_schema(
            columns.ALL if parse_headers(self.options) else columns.PLAIN
        )

    def reader(self, schema: StructType) -> LogcoreReader:
        from pyspark_logcore.columns import chosen
        from pyspark_logcore.options import parse_read
        from pyspark_logcore.reader import LogcoreReader

        options = parse_read(self.options)
        return LogcoreReader(
            options, chosen(schema, include_headers=options.include_headers)
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from pyspark_logcore.columns import chosen
        from pyspark_logcore.options import parse_stream
        from pyspark_logcore.stream_reader import LogcoreStreamReader

        options = parse_stream(self.options)
        return LogcoreStreamReader(
            options, chosen(schema, include_headers=options.read.include_headers)
        )

    def streamWriter(
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from pyspark_logcore.stream_writer import LogcoreStreamWriter

        return LogcoreStreamWriter.of(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> LogcoreWriter:
        from pyspark_logcore.writer import LogcoreWriter

        return LogcoreWriter.of(self.options, schema, overwrite)
