"""A batch write: see staged.py for how rows get into the log.

Rules:
- A write that has a name is done once. Without one, a repeated job writes again.
- Under the name of a stream only that stream writes.

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
    """The name of a write belongs to another stream, which has written that version."""


class LogcoreWriter(DataSourceArrowWriter):
    """Writes one DataFrame. Made by LogcoreDataSource.writer(); pickled to the tasks as
    it is then.
    """

    def __init__(self, planned: StagedWrite) -> None:
        self.planned = planned

    @classmethod
    def of(
        cls, given: Mapping[str, str], schema: StructType, overwrite: bool
    ) -> LogcoreWriter:
        """Checks options and columns, and makes the staging directory. Raises
        LogcoreError.
        """
        options = parse_write(given)
        if overwrite:
            raise InvalidConfigError(
                'a log is only appended to: write with .mode("append")'
            )
        return cls(StagedWrite.plan(options, schema))

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedMessage:
        """Runs in a worker of Spark."""
        return self.planned.stage_here(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver when every task has succeeded: publishes all of it. Raises
        LogcoreError.
        """
        options = self.planned.options
        staged = [one for one in messages if isinstance(one, StagedMessage)]
        query = next((message.query for message in staged if message.query), None)
        staging = Staging(OS, options.path)
        done = staging.is_done(options.app_id, options.version)
        if done or (not options.given and all(message.is_empty for message in staged)):
            staging.abort_files(self.planned.txid)
            self._check_query(staging, query)
            return
        self.planned.publish(staged, query)
        self._check_query(staging, query)  # another may have written that version first
        if not options.given:
            staging.forget(options.app_id)

    def _check_query(self, staging: Staging, query: str | None) -> None:
        """Raises OtherQueryError when the version that is done was a batch of another
        stream, whose rows are others.
        """
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
        """Runs on the driver when the write failed, also in commit(): removes what was
        staged, unless published.
        """
        options = self.planned.options
        Staging(OS, options.path).abort(
            options.app_id, options.version, self.planned.txid
        )
