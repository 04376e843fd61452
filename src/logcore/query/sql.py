"""SQL over the topics of a directory, by DuckDB: for LogDir.sql() and `logcore sql`.

Rules:
- A topic is opened when a query reads it. DuckDB passes the columns and the filter of
  the query; only these columns are built.
- All reads of a topic in one query end at the same offsets.
- No log is written.

This module parses no SQL.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

from logcore.directory.interface import PartitionDirectory
from logcore.distribution import install_command
from logcore.errors import (
    LogNotFoundError,
    MissingDependencyError,
    QueryError,
    nearest_name,
)
from logcore.format.schema_records import SCHEMAS_TOPIC

if TYPE_CHECKING:
    import duckdb
    import pyarrow

    from logcore.schemas import ValueDecoder

#: Columns of a table, the cheapest first: DuckDB reads the first to count rows.
_COLUMNS: Final = ("partition", "offset", "timestamp", "key", "value", "headers")
#: Maximum number of topics that are all registered as tables. With more topics, only
#: topics that the query may name are registered, because each takes a millisecond.
_MAX_TABLES: Final = 100
#: Defines header(headers, 'trace'), the first header of that name.
_MACRO: Final = "create macro header(headers, name) as [one.value for one in headers if one.key = name][1]"


def connect(
    directory: PartitionDirectory,
    query: str,
    *,
    is_text: bool,
    decoder: ValueDecoder | None = None,
) -> Any:
    """Return a DuckDB connection with the topics that a query may name as tables.

    With `is_text`, keys and values are VARCHAR, not BLOB, and `decoder` converts keys
    and values with a schema to JSON.

    Raises:
        MissingDependencyError: duckdb or pyarrow is not installed.
        QueryError: the query names topics whose names differ only in case.
    """
    try:
        import duckdb
        import pyarrow  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingDependencyError(
            f"sql needs duckdb and pyarrow: {install_command('sql')}"
        ) from error
    from logcore.query.topic_dataset import TopicDataset

    connection = duckdb.connect()
    lowered = query.lower()
    topics = directory.topics()
    folded: dict[str, str] = {}
    for topic in topics:
        twin = folded.setdefault(topic.lower(), topic)
        if twin != topic and topic.lower() in lowered:
            raise QueryError(
                f"{twin} and {topic} differ only in case, which SQL does not distinguish",
                path=directory.path,
            )
        if len(topics) <= _MAX_TABLES or topic.lower() in lowered:
            dataset = TopicDataset(
                directory, topic, _COLUMNS, is_text=is_text, decoder=decoder
            )
            connection.register(topic, dataset)
    connection.execute(_MACRO)
    # By default, DuckDB resolves unknown table names to variables of this program.
    connection.execute("set python_enable_replacements = false")
    # Fails if DuckDB's extension for time zones is missing; then the zone is the
    # system's.
    with contextlib.suppress(Exception):
        connection.execute("set TimeZone = 'UTC'")
    return connection


def relation(
    directory: PartitionDirectory,
    query: str,
    *,
    is_text: bool,
    schemas: bool | str = False,
) -> duckdb.DuckDBPyRelation:
    """Return the result of a query as a DuckDB relation. It reads the logs
    when its rows are fetched.

    With `schemas`, values are decoded by the topic `_schemas`, or by the registry with
    this URL.

    Raises:
        LogNotFoundError: there is no topic `_schemas`.
        QueryError: the query is wrong, or returns no rows, such as CREATE TABLE.
        MissingDependencyError: duckdb or pyarrow is not installed.
    """
    decoder = _decoder(directory, schemas)
    connection = connect(directory, query, is_text=is_text, decoder=decoder)
    import duckdb

    result: duckdb.DuckDBPyRelation | None
    try:
        result = connection.sql(query)
    except duckdb.Error as error:
        raise query_error(error, directory) from error
    if result is None:
        raise QueryError("the query returns no rows", expected="SELECT", found=query)
    return result


def read_table(
    directory: PartitionDirectory, query: str, *, is_text: bool, schemas: bool | str
) -> pyarrow.Table:
    """Return the whole result of a query.

    Raises the errors of relation(), and QueryError for a value that cannot be converted.
    """
    result = relation(directory, query, is_text=is_text, schemas=schemas)
    import duckdb

    try:
        return result.to_arrow_table()
    except duckdb.Error as error:
        raise query_error(error, directory) from error


def _decoder(directory: PartitionDirectory, schemas: bool | str) -> ValueDecoder | None:
    if schemas is False:
        return None
    from logcore.schemas import RemoteSchemas, ValueDecoder, load_schemas

    if schemas is not True:
        return ValueDecoder(RemoteSchemas(schemas))
    if SCHEMAS_TOPIC not in directory:
        raise LogNotFoundError(
            f"there is no topic {SCHEMAS_TOPIC}; schemas=URL names a registry",
            path=directory.path,
        )
    log = directory.partition(SCHEMAS_TOPIC, 0)
    return ValueDecoder(load_schemas(log.read(log.log_start_offset)))


def query_error(error: Exception, directory: PartitionDirectory) -> QueryError:
    """Return DuckDB's error in one line, with advice about names of tables."""
    topics = directory.topics()
    text = str(error)
    message = text.split("\n\n", maxsplit=1)[0].replace("\n", " ")
    unknown = re.search(r'Table with name "?([^" ]+)"? does not exist', text)
    advice = None
    if unknown is not None:
        name = unknown[1]
        nearest = nearest_name(name, topics)
        if name in topics:
            advice = f'write the name in double quotes: "{name}"'
        elif nearest is not None:
            message = f"there is no topic {name!r}; did you mean {nearest!r}?"
        else:
            message = f"there is no topic {name!r}"
            advice = "the directory has no topics"
            if topics:
                advice = f"there are {', '.join(topics[:10])}"
    elif any(not re.fullmatch(r"\w+", topic) and topic in text for topic in topics):
        advice = "write names with '-' or '.' in double quotes, and the query in single quotes"
    if advice is not None:
        message = f"{message}; {advice}"
    return QueryError(message)
