"""What Spark talks to: the data source `logcore`, which hands out a reader or a writer.

Rules:
- Options and schemas are checked here, before any task runs.
- Importing this imports only pyspark's data source classes; everything else comes with
  the first reader or writer.

Spark calls these methods in processes of its own, each with a fresh object; nothing is
kept between them.
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
    """format("logcore"): a log directory as a table of records. See docs/spark.md for
    options and columns.
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
