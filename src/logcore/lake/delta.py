"""A Delta table as the target of an export, through the package deltalake (delta-rs).

The progress is stored as transaction identifiers (`txn`), three for each partition:

    logcore/<partition>/next      the next offset
    logcore/<partition>/last      the offset of the last exported record
    logcore/<partition>/crc       the CRC-32 of that record, see record_fingerprint()

Rules:
- delta-rs refuses a commit if a concurrent commit has one of its identifiers. So two
  exports cannot store the same rows, also if delta-rs retries a commit.
- RESTORE keeps the identifiers. A table that was restored is therefore refused.

deltalake is imported in the functions that use it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from logcore.distribution import install_command
from logcore.errors import (
    CommitConflictError,
    LakeTableError,
    MissingDependencyError,
)
from logcore.lake.rules import ExportProgress
from logcore.lake.target import (
    TableOwner,
    TableState,
    conformed,
    owner_of,
    progress_is_lost,
)
from logcore.shipping.forward_rules import fingerprint_offset

if TYPE_CHECKING:
    import pyarrow

_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")
#: Version 1.0 does not compare the transaction identifiers of concurrent commits.
_MIN_VERSION: Final = (1, 1)
#: Key in the metadata of the commits of an export.
_EXPORTED: Final = "logcore.export"
#: Numbers of commits to read, one step after the other, until the commit of an export
#: is found. Each commit is a request to the storage. The last step reads all commits.
_HISTORY_LIMITS: Final = (1, 20)


class DeltaTarget:
    """The Delta table at a path or URL.

    `storage` contains options of deltalake for the storage, such as AWS_ENDPOINT_URL.

    Raises:
        MissingDependencyError: deltalake is not installed.
    """

    needs_day_column = True

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        storage: Mapping[str, str] | None = None,
    ) -> None:
        self.name = os.fspath(table)
        self._storage = dict(storage or {})
        self._deltalake = _deltalake()
        self._table: Any = None
        self._schema: pyarrow.Schema | None = None

    def load(self, partitions: Sequence[int]) -> TableState | None:
        deltalake = self._deltalake
        with self._errors("read"):
            try:
                table = deltalake.DeltaTable(self.name, storage_options=self._storage)
            except deltalake.exceptions.TableNotFoundError:
                return None
            schema = _arrow_schema(table)
            owner = owner_of(table.metadata().configuration, self.name)
            progress = {}
            for number in partitions:
                found = _progress(table, number)
                if found is not None:
                    progress[number] = found
            if progress:
                self._check_history(table)
            elif table.file_uris():
                raise progress_is_lost(self.name)
        self._table = table
        self._schema = schema
        return TableState(owner, schema, progress)

    def create(self, schema: pyarrow.Schema, owner: TableOwner) -> None:
        with self._errors("create"):
            try:
                self._deltalake.DeltaTable.create(
                    self.name,
                    schema,
                    mode="ignore",
                    partition_by=owner.layout.partition_column or None,
                    configuration=owner.as_properties(),
                    raise_if_key_not_exists=False,
                    storage_options=self._storage,
                )
            except self._deltalake.exceptions.CommitFailedError:
                pass  # another process has created it at the same time

    def commit(
        self, rows: pyarrow.Table, progress: Mapping[int, ExportProgress]
    ) -> None:
        deltalake = self._deltalake
        transactions = []
        for number, partition_progress in progress.items():
            for name, version in _versions(partition_progress).items():
                transactions.append(
                    deltalake.Transaction(f"logcore/{number}/{name}", version)
                )
        assert self._schema is not None, "load() comes first"
        rows = conformed(rows, self._schema)
        with self._errors("write"):
            try:
                deltalake.write_deltalake(
                    self._table,
                    rows,
                    mode="append",
                    schema_mode="merge",
                    writer_properties=deltalake.WriterProperties(compression="ZSTD"),
                    commit_properties=deltalake.CommitProperties(
                        custom_metadata={_EXPORTED: _named(progress)},
                        app_transactions=transactions,
                    ),
                )
            except deltalake.exceptions.CommitFailedError as error:
                raise CommitConflictError(
                    f"another writer committed to the table: {_text_of(error)}",
                    path=self.name,
                ) from error
        self._schema = rows.schema

    def _check_history(self, table: Any) -> None:
        """Raise LakeTableError if the table was restored after the last export."""
        for limit in (*_HISTORY_LIMITS, None):
            commits = table.history(limit)
            for commit in commits:
                if _EXPORTED in commit:
                    return
                if commit.get("operation") == "RESTORE":
                    raise LakeTableError(
                        "the table was restored to an earlier version, and its progress belongs to the newer one: "
                        "export the topic to a new table",
                        path=self.name,
                    )
            if limit is not None and len(commits) < limit:
                return

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Generator[None, None, None]:
        try:
            yield
        except (self._deltalake.exceptions.DeltaError, OSError, ValueError) as error:
            raise LakeTableError(
                f"cannot {verb} the Delta table: {_text_of(error)}", path=self.name
            ) from error


def _deltalake() -> Any:
    try:
        import deltalake
        import deltalake.exceptions  # pyright: ignore[reportUnusedImport]
        import pyarrow  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingDependencyError(
            f"Delta tables need deltalake and pyarrow: {install_command('lake')}"
        ) from error
    version = tuple(map(int, deltalake.__version__.split(".")[:2]))
    if version < _MIN_VERSION:
        raise MissingDependencyError(
            f"deltalake {deltalake.__version__} stores the rows of two concurrent exports twice; newer versions refuse "
            f"one of them: {install_command('lake')}"
        )
    return deltalake


def _arrow_schema(table: Any) -> pyarrow.Schema:
    import pyarrow as pa

    return pa.schema(table.schema().to_arrow())


def _text_of(error: Exception) -> str:
    """Return the text of an error on one line, without colors of a terminal."""
    return " ".join(_COLOR.sub("", str(error)).split())


def _named(progress: Mapping[int, ExportProgress]) -> str:
    """Return the partitions of a commit and their next offsets as text, for people."""
    return " ".join(
        f"{n}:{partition_progress.next_offset}"
        for n, partition_progress in sorted(progress.items())
    )


def _versions(export_progress: ExportProgress) -> dict[str, int]:
    versions = {"next": export_progress.next_offset}
    offset = fingerprint_offset(export_progress.fingerprint)
    if offset is not None:
        versions["last"] = offset
        versions["crc"] = int(export_progress.fingerprint.partition(":")[2], 16)
    return versions


def _progress(table: Any, number: int) -> ExportProgress | None:
    next_offset = table.transaction_version(f"logcore/{number}/next")
    if next_offset is None:
        return None
    last = table.transaction_version(f"logcore/{number}/last")
    crc = table.transaction_version(f"logcore/{number}/crc")
    fingerprint = ""
    if last is not None and crc is not None:
        fingerprint = f"{last}:{crc:08x}"
    return ExportProgress(next_offset, fingerprint)
