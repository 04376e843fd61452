"""An Iceberg table as the target of an export, through the package pyiceberg.

The progress is one JSON text in the snapshot summary, under `logcore.progress`, and the
same text in the table property of that name.

Rules:
- The progress of the newest snapshot that has one counts. So a rollback of the table
  also rolls the progress back.
- The table property counts only if no snapshot in the history has a progress, because
  other writers have committed since and the snapshots of the export have expired.
- pyiceberg must not retry a commit. It would append the rows again after the rows of a
  concurrent export, so its retries are switched off for the table object in memory.

pyiceberg is imported in the functions that use it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from logcore.distribution import install_command
from logcore.errors import (
    CommitConflictError,
    InvalidConfigError,
    LakeTableError,
    MissingDependencyError,
)
from logcore.fs import OS
from logcore.lake.rules import ExportProgress
from logcore.lake.target import (
    TableOwner,
    TableState,
    conformed,
    owner_of,
    progress_is_lost,
)

if TYPE_CHECKING:
    import pyarrow

_PROGRESS: Final = "logcore.progress"
_RETRIES: Final = "commit.retry.num-retries"
#: Properties of a new table. Otherwise each commit would leave a metadata file, and the
#: files of an export each minute would add up.
_DEFAULTS: Final = {"write.metadata.delete-after-commit.enabled": "true"}
#: Seconds that a commit waits for another one in a local catalog. The 5 of sqlite3 are
#: too few if many exports begin at once on a busy machine.
_LOCK_WAIT_S: Final = 60
#: Name of the partition field of a partition by day.
_DAY: Final = "timestamp_day"


def local_catalog(directory: str | os.PathLike[str]) -> Any:
    """Return a pyiceberg catalog in a local directory, which is created.

    The catalog is the SQLite file `catalog.db` in the directory. Its tables are stored
    in folders beside the file.

    Raises:
        InvalidConfigError: the path contains # or ?.
        MissingDependencyError: pyiceberg is not installed.
    """
    _pyiceberg()
    from pyarrow.fs import LocalFileSystem
    from pyiceberg.catalog.sql import SqlCatalog
    from sqlalchemy.exc import OperationalError

    path = OS.real_path(os.fspath(directory))
    _check_url(path)
    LocalFileSystem().create_dir(path, recursive=True)
    properties = {
        "uri": f"sqlite:///{os.path.join(path, 'catalog.db')}?timeout={_LOCK_WAIT_S}",
        "warehouse": f"file://{path}",
    }
    try:
        return SqlCatalog("local", **properties)
    except OperationalError:
        # Another process has created the tables of the catalog at the same time.
        return SqlCatalog("local", **properties)


def named_catalog(name: str, properties: Mapping[str, str]) -> Any:
    """Return the catalog that pyiceberg finds under a name in its configuration.

    Raises:
        LakeTableError: there is no such catalog, or it does not answer.
        MissingDependencyError: pyiceberg is not installed.
    """
    _pyiceberg()
    from pyiceberg.catalog import load_catalog

    try:
        return load_catalog(name, **properties)
    except Exception as error:
        raise LakeTableError(
            f"cannot open the catalog {name!r}: {error}. Configure it in .pyiceberg.yaml, or in the environment with "
            f"PYICEBERG_CATALOG__{name.upper()}__URI"
        ) from error


class IcebergTarget:
    """One table of an Iceberg catalog.

    `table` is its name with its namespace, such as "shop.orders". The namespace is
    created. `catalog` is a pyiceberg Catalog, such as local_catalog("lake").

    Raises:
        InvalidConfigError: the name has no namespace, or contains # or ?.
        MissingDependencyError: pyiceberg is not installed.
    """

    needs_day_column = False

    def __init__(self, table: str, *, catalog: Any) -> None:
        _pyiceberg()
        _check_url(table)
        if not all(table.partition(".")):
            raise InvalidConfigError(
                "the name of an Iceberg table must have a namespace",
                expected="NAMESPACE.TABLE, such as shop.orders",
                found=repr(table),
            )
        self.name = table
        self._catalog = catalog
        self._table: Any = None
        self._stored: dict[int, ExportProgress] = {}
        self._schema: pyarrow.Schema | None = None

    def load(self, partitions: Sequence[int]) -> TableState | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with self._errors("read"):
            try:
                table = self._catalog.load_table(self.name)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None
            owner = owner_of(table.properties, self.name)
            self._stored = _stored_progress(table)
            if not self._stored and table.current_snapshot() is not None:
                raise progress_is_lost(self.name)
            self._table = _without_retries(table)
            self._schema = _arrow_schema(table)
        return TableState(owner, self._schema, dict(self._stored))

    def create(self, schema: pyarrow.Schema, owner: TableOwner) -> None:
        """Create the namespace and the table, unless another process creates them now.

        One process may create the namespace and another one the table, so both are
        checked separately.
        """
        from pyiceberg.exceptions import (
            CommitFailedException,
            NamespaceAlreadyExistsError,
            TableAlreadyExistsError,
        )
        from sqlalchemy.exc import IntegrityError

        namespace = self.name.rpartition(".")[0]
        with self._errors("create"):
            with contextlib.suppress(IntegrityError, NamespaceAlreadyExistsError):
                self._catalog.create_namespace_if_not_exists(namespace)
            try:
                with self._catalog.create_table_transaction(
                    self.name,
                    schema,
                    properties={**_DEFAULTS, **owner.as_properties()},
                ) as transaction:
                    _partition(transaction, owner.layout.partition_column)
            except (CommitFailedException, IntegrityError, TableAlreadyExistsError):
                if not self._catalog.table_exists(self.name):
                    raise

    def commit(
        self, rows: pyarrow.Table, progress: Mapping[int, ExportProgress]
    ) -> None:
        from pyiceberg.exceptions import CommitFailedException

        assert self._schema is not None, "load() comes first"
        stored = {**self._stored, **progress}
        text = json.dumps(
            {
                str(number): [
                    partition_progress.next_offset,
                    partition_progress.fingerprint,
                ]
                for number, partition_progress in sorted(stored.items())
            }
        )
        rows = conformed(rows, self._schema)
        with self._errors("write"):
            try:
                with self._table.transaction() as transaction:
                    if not rows.schema.equals(self._schema):
                        with transaction.update_schema() as update:
                            update.union_by_name(rows.schema)
                    transaction.append(rows, snapshot_properties={_PROGRESS: text})
                    transaction.set_properties({_PROGRESS: text})
            except CommitFailedException as error:
                raise CommitConflictError(
                    f"another writer committed to the table: {error}", path=self.name
                ) from error
            _without_retries(self._table)
        self._stored = stored
        self._schema = rows.schema

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            # The errors of pyiceberg and sqlalchemy have no common base class.
            package = type(error).__module__.partition(".")[0]
            known = isinstance(error, (ArithmeticError, OSError, ValueError))
            if not known and package not in ("pyiceberg", "sqlalchemy"):
                raise
            raise LakeTableError(
                f"cannot {verb} the Iceberg table: {error}", path=self.name
            ) from error


def _check_url(text: str) -> None:
    """Check that pyiceberg can use a text in the URL of a file.

    It would end the path at # or ?, and write to another file.
    """
    if "#" in text or "?" in text:
        raise InvalidConfigError(
            "the path and the name of an Iceberg table are parts of a URL",
            expected="a name without # and ?",
            found=repr(text),
        )


def _pyiceberg() -> Any:
    try:
        import pyarrow  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import pyiceberg
        import sqlalchemy  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingDependencyError(
            f"Iceberg tables need pyiceberg and pyarrow: {install_command('lake')}"
        ) from error
    return pyiceberg


def _without_retries(table: Any) -> Any:
    properties = {**table.metadata.properties, _RETRIES: "0"}
    table.metadata = table.metadata.model_copy(update={"properties": properties})
    return table


def _stored_progress(table: Any) -> dict[int, ExportProgress]:
    """Return the progress of the newest snapshot that has one, or the property's."""
    text = None
    snapshot = table.current_snapshot()
    while snapshot is not None and text is None:
        if snapshot.summary is not None:
            text = snapshot.summary.additional_properties.get(_PROGRESS)
        parent = snapshot.parent_snapshot_id
        snapshot = None
        if parent is not None:
            snapshot = table.snapshot_by_id(parent)
    if text is None:
        text = table.properties.get(_PROGRESS, "{}")
    try:
        return {
            int(number): ExportProgress(int(state[0]), str(state[1]))
            for number, state in json.loads(text).items()
        }
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise LakeTableError(
            f"the progress in {_PROGRESS} cannot be read",
            path=".".join(table.name()),
            found=text[:80],
        ) from error


def _partition(transaction: Any, column: str) -> None:
    from pyiceberg.transforms import DayTransform, IdentityTransform

    if not column:
        return
    with transaction.update_spec() as update:
        if column == "day":
            update.add_field("timestamp", DayTransform(), _DAY)
        else:
            update.add_field(column, IdentityTransform(), f"{column}_value")


def _arrow_schema(table: Any) -> pyarrow.Schema:
    """Return the columns of a table, with the types that an export writes."""
    import pyarrow as pa

    return pa.schema(
        [(field.name, _small(field.type)) for field in table.schema().as_arrow()]
    )


def _small(kind: Any) -> Any:
    """Replace Arrow's large types, which pyiceberg returns, by the usual ones."""
    import pyarrow as pa

    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_small(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _small(field.type)) for field in kind.fields])
    if pa.types.is_map(kind):
        return pa.map_(_small(kind.key_type), _small(kind.item_type))
    return kind
