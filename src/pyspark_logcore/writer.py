"""Batch writer: writes one DataFrame. staged.py stages and publishes the rows.

Rules:
- A write with a name is done once. Without a name, a repeated job writes again.
- Only the stream itself writes under the name of a stream.

This module does not stage or publish: logcore.staging does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from logcore.errors import InvalidConfigError, LogcoreError
from logcore.fs import OS
from logcore.staging.manifest import read_state
from logcore.staging.publishing import Staging
from pyspark_logcore.options import parse_write
from pyspark_logcore.staged import StagedMessage, StagedWrite

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


class OtherQueryError(LogcoreError):
    """The name of a write belongs to another stream, which has written this version."""


class LogcoreWriter(DataSourceArrowWriter):
    """Writes one DataFrame.

    LogcoreDataSource.writer() creates the object, and Spark pickles it to the tasks.
    """

    def __init__(self, planned: StagedWrite) -> None:
        self.planned = planned

    @classmethod
    def of(
        cls, given: Mapping[str, str], schema: StructType, overwrite: bool
    ) -> LogcoreWriter:
        """Check options and columns, and create the staging directory.

        Raises:
            LogcoreError: an option, a column or the directory is unsuitable.
        """
        options = parse_write(given)
        if overwrite:
            raise InvalidConfigError(
                'the only supported mode is append: write with .mode("append")'
            )
        return cls(StagedWrite.plan(options, schema))

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedMessage:
        """Stage the rows of one task; runs in a worker of Spark."""
        return self.planned.stage_here(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish all staged rows; runs on the driver after all tasks have succeeded.

        Raises:
            LogcoreError: the write was refused, failed or timed out.
        """
        options = self.planned.options
        staged = [message for message in messages if isinstance(message, StagedMessage)]
        query = next((message.query for message in staged if message.query), None)
        staging = Staging(OS, options.path)
        done = staging.is_done(options.app_id, options.version)
        if done or (not options.given and all(message.is_empty for message in staged)):
            staging.abort_files(self.planned.txid)
            self._check_query(staging, query)
            return
        self.planned.publish(staged, query)
        # Another query may have written this version first.
        self._check_query(staging, query)
        if not options.given:
            staging.forget(options.app_id)

    def _check_query(self, staging: Staging, query: str | None) -> None:
        """Raise OtherQueryError if another stream, with other rows, wrote this version."""
        options = self.planned.options
        state = read_state(OS, staging.path, options.app_id)
        other = None
        if state is not None:
            other = state.get("query")
        if (
            state is not None
            and query
            and other
            and other != query
            and options.version <= state["version"]
        ):
            raise OtherQueryError(
                f"version {options.version} of txnAppId {options.app_id!r} was not written: versions up to "
                f"{state['version']} were written by another query. A new checkpoint counts its batches from 0. Give "
                "it another txnAppId, or continue from the old checkpoint",
                path=staging.directory,
                expected=f"query {other}",
                found=f"query {query}",
            )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the staged files, unless they are published; runs on the driver after the
        write failed, also in commit().
        """
        options = self.planned.options
        Staging(OS, options.path).abort(
            options.app_id, options.version, self.planned.txid
        )
