"""The topic `_schemas` of a broker, and the decisions of its schema registry.

Rules:
- A decision is a pure function of the state. It returns the records to append and the
  result, or raises SchemaRegistryError.
- The records of one decision are appended together, and only if the log still ends at the
  last record of the state. If another record came first, the decision is made again.
- The result is returned once the records are as durable as with acks=all.

The state itself is logcore.schemas.state.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs

from logcore import Log, LogClosedError, LogcoreError, OffsetConflictError
from logcore.format.schema_records import (
    COMPATIBILITY_LEVELS,
    LARGEST_NUMBER,
    MODES,
    SCHEMAS_TOPIC,
    SchemaRecord,
    SchemaReference,
    SchemaVersion,
    deletion_record,
    guid_of,
    level_record,
    mode_record,
    removed_version_record,
    version_record,
)
from logcore.schemas.parsing import check_schema
from logcore.schemas.state import CONTEXT_PREFIX, SchemaState, identity_of
from netshim.schemas.compatibility import (
    ComparedSchema,
    Comparison,
    compare,
    parsed_avro,
)
from netshim.server import Server

_log = logging.getLogger("netshim")
_T = TypeVar("_T")

#: Defaults of Confluent's registry.
DEFAULT_LEVEL: Final = "BACKWARD"
DEFAULT_MODE: Final = "READWRITE"
#: Attempts to read a log that was closed to open another one, or replaced by a
#: rollback.
_ATTEMPTS: Final = 20
#: Time between two attempts.
_PAUSE_S: Final = 0.05
#: Maximum number of characters of the name of a subject. Each record about a subject
#: repeats its name.
_MAX_SUBJECT_CHARS: Final = 1_000
#: Names that Confluent's registry refuses, too.
_RESERVED_SUBJECTS: Final = ("__GLOBAL", "__EMPTY")


class SchemaRegistryError(Exception):
    """The error of a refused request, with the code of Confluent's registry.

    The first three digits of the code are the HTTP status.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@attrs.frozen
class Decision:
    """Records to append together, and the result to return once they are stored."""

    result: Any
    records: Sequence[SchemaRecord] = ()


@attrs.frozen(kw_only=True)
class RequestedSchema:
    """A schema in a request."""

    #: AVRO, JSON or PROTOBUF.
    type: str
    #: As in the request, or in its canonical form with `normalize`.
    text: str
    references: tuple[SchemaReference, ...] = ()
    #: Confluent's metadata of data contracts. A part of the identity of the schema.
    metadata: Mapping[str, Any] | None = None
    #: Only in the mode IMPORT, which copies schemas of another registry with their ids.
    id: int | None = None
    #: Only in the mode IMPORT.
    version: int | None = None


# -- lookups ---------------------------------------------------------------------------


def subject_not_found(subject: str) -> SchemaRegistryError:
    return SchemaRegistryError(40401, f"Subject '{subject}' not found.")


def version_number(text: str) -> int | None:
    """Return the number of a version, or None for the latest one."""
    if text in ("latest", "-1"):
        return None
    if text.isascii() and text.isdecimal() and 0 < int(text[:11]) <= LARGEST_NUMBER:
        return int(text)
    raise SchemaRegistryError(
        42202,
        f"The specified version '{text[:40]}' is not a valid version id: "
        f"expected 1 to {LARGEST_NUMBER}, or latest",
    )


def version_of(
    state: SchemaState, subject: str, text: str, *, include_deleted: bool = False
) -> SchemaVersion:
    """Return a version of a subject.

    Raises SchemaRegistryError if it is deleted or missing.
    """
    number = version_number(text)
    versions = state.versions.get(subject, {})
    candidates = [
        versions[version]
        for version in sorted(versions)
        if include_deleted or not versions[version].is_deleted
    ]
    if not candidates:
        raise subject_not_found(subject)
    if number is None:
        return candidates[-1]
    for version in candidates:
        if version.version == number:
            return version
    raise SchemaRegistryError(40402, f"Version {number} not found.")


def level_of(state: SchemaState, subject: str) -> str:
    """Return the compatibility level of a subject."""
    # A subject without a level of its own has the default of all subjects.
    return state.levels.get(subject, state.levels.get(None, DEFAULT_LEVEL))


def mode_of(state: SchemaState, subject: str) -> str:
    """Return the mode of a subject."""
    # READONLY_OVERRIDE for all subjects also replaces the mode of a single subject.
    everywhere = state.modes.get(None, DEFAULT_MODE)
    if everywhere == "READONLY_OVERRIDE":
        return everywhere
    return state.modes.get(subject, everywhere)


def check_subject(subject: str) -> None:
    """Raise SchemaRegistryError for a name that no subject may have."""
    if subject.startswith(CONTEXT_PREFIX):
        raise SchemaRegistryError(
            42208, f"Subject '{subject[:80]}': contexts are not served"
        )
    if (
        not subject.strip()
        or not subject.isprintable()
        or len(subject) > _MAX_SUBJECT_CHARS
        or subject in _RESERVED_SUBJECTS
    ):
        raise SchemaRegistryError(
            42208,
            f"The specified subject {subject[:80]!r} is not a valid subject: expected "
            f"1 to {_MAX_SUBJECT_CHARS} printable characters",
        )


def check_writable(state: SchemaState, subject: str) -> None:
    """Raise SchemaRegistryError if a subject may only be read."""
    mode = mode_of(state, subject)
    if mode.startswith("READONLY"):
        raise SchemaRegistryError(42205, f"Subject {subject} is in the mode {mode}")


def resolve_schema(state: SchemaState, name: str, schema: Any) -> ComparedSchema:
    """Return a schema with its references, for comparisons."""
    references = state.resolve(schema.references)
    return ComparedSchema(name, schema.type, schema.text, references)


def compare_by_level(
    state: SchemaState,
    subject: str,
    requested: RequestedSchema,
    versions: Sequence[SchemaVersion],
) -> Comparison:
    """Compare a schema with versions of a subject, by the level of the subject."""
    return compare(
        level_of(state, subject),
        resolve_schema(state, "the new schema", requested),
        [
            resolve_schema(state, f"version {version.version}", version)
            for version in versions
        ],
    )


def find_registered(
    state: SchemaState,
    subject: str,
    requested: RequestedSchema,
    *,
    include_deleted: bool,
) -> SchemaVersion | None:
    """Return the latest version of a subject that has this schema, or None."""
    identity = identity_of(
        requested.type, requested.text, requested.references, requested.metadata
    )
    number = state.id_of(identity)
    if number is None:
        return None
    matches = [
        candidate
        for candidate in state.uses(number)
        if candidate.subject == subject
        and (include_deleted or not candidate.is_deleted)
    ]
    return matches[-1] if matches else None


# -- decisions -------------------------------------------------------------------------


def register(state: SchemaState, subject: str, requested: RequestedSchema) -> Decision:
    """Add a schema to a subject. The result is a SchemaVersion and messages."""
    # Serializers register their schema at each start, so an existing one is the normal
    # case. It is not a change, and is allowed in a read-only registry.
    existing = find_registered(state, subject, requested, include_deleted=False)
    if existing is not None and requested.version in (None, existing.version):
        return Decision((existing, ()))
    check_writable(state, subject)
    imports = mode_of(state, subject) == "IMPORT"
    if imports != (requested.id is not None):
        negation = " not" if not imports else ""
        raise SchemaRegistryError(
            42205,
            f"Subject {subject} is{negation} in import mode: expected "
            f"{'an' if imports else 'no'} id in the request",
        )
    # An import copies the history of another registry, which has checked it already.
    messages: tuple[str, ...] = ()
    if not imports:
        comparison = compare_by_level(state, subject, requested, state.active(subject))
        messages = comparison.messages
        if not comparison.is_compatible:
            raise SchemaRegistryError(
                409,
                "Schema being registered is incompatible with an earlier schema for "
                f'subject "{subject}", level {level_of(state, subject)}, '
                f"details: {'; '.join(messages)}",
            )
    identity = identity_of(
        requested.type, requested.text, requested.references, requested.metadata
    )
    # An equal schema has one id in all subjects, as in Confluent's registry.
    number = requested.id or state.id_of(identity) or state.max_id + 1
    # Records name a schema by its id alone. Two schemas with one id would decode the
    # records of one of them as the other.
    same_id = state.find(number)
    if same_id is not None and identity != identity_of(
        same_id.type, same_id.text, same_id.references, same_id.metadata
    ):
        raise SchemaRegistryError(42205, f"id {number} has another schema")
    versions = state.versions.get(subject, {})
    # Softly deleted versions count, because their numbers are still readable.
    version = requested.version or max(versions, default=0) + 1
    if version in versions:
        raise SchemaRegistryError(42205, f"Subject {subject} has a version {version}")
    # Schemas that share an id have the same text. Confluent's registry skips others.
    text = requested.text if same_id is None else same_id.text
    schema = SchemaVersion(
        subject=subject,
        version=version,
        id=number,
        guid=guid_of(requested.type, text, requested.references, requested.metadata)
        if same_id is None
        else same_id.guid,
        text=text,
        type=requested.type,
        references=requested.references,
        metadata=requested.metadata,
    )
    return Decision((schema, messages), [version_record(schema)])


def _check_unused(state: SchemaState, versions: Sequence[SchemaVersion]) -> None:
    for version in versions:
        for referrer in state.users(version.subject, version.version):
            raise SchemaRegistryError(
                42206,
                f"Version {version.version} of {version.subject} is referenced by "
                f"{referrer.subject} version {referrer.version}",
            )


def delete_version(
    state: SchemaState, subject: str, text: str, *, is_permanent: bool
) -> Decision:
    """Delete a version. The result is its number."""
    check_writable(state, subject)
    version = version_of(state, subject, text, include_deleted=True)
    # "latest" is the latest version that is not deleted.
    if version_number(text) is None and not is_permanent:
        version = version_of(state, subject, text)
    name = f"Subject '{subject}' Version {version.version}"
    # Confluent deletes in two steps: a soft deletion hides a version, and its records
    # remain readable by id. Only a second call with permanent=true removes it.
    if not is_permanent:
        if version.is_deleted:
            raise SchemaRegistryError(
                40406,
                f"{name} was soft deleted. Set permanent=true to delete permanently",
            )
        _check_unused(state, [version])
        deleted = attrs.evolve(version, is_deleted=True)
        return Decision(version.version, [version_record(deleted)])
    if not version.is_deleted:
        raise SchemaRegistryError(
            40407, f"{name} was not deleted first before being permanently deleted"
        )
    _check_unused(state, [version])
    return Decision(version.version, [removed_version_record(subject, version.version)])


def delete_subject(state: SchemaState, subject: str, *, is_permanent: bool) -> Decision:
    """Delete all versions of a subject. The result is their numbers."""
    check_writable(state, subject)
    versions = state.versions.get(subject, {})
    active = state.active(subject)
    if not versions:
        raise subject_not_found(subject)
    if is_permanent:
        if active:
            raise SchemaRegistryError(
                40405,
                f"Subject '{subject}' was not deleted first before being permanently deleted",
            )
        _check_unused(state, list(versions.values()))
        numbers = sorted(versions)
        records = [removed_version_record(subject, number) for number in numbers]
        return Decision(numbers, records)
    if not active:
        raise SchemaRegistryError(
            40404,
            f"Subject '{subject}' was soft deleted. Set permanent=true to delete permanently",
        )
    _check_unused(state, active)
    # One record deletes all versions up to this one. The settings of the subject end
    # with it.
    records = [deletion_record(subject, max(versions))]
    if subject in state.levels:
        records.append(level_record(subject, None))
    if subject in state.modes:
        records.append(mode_record(subject, None))
    return Decision([version.version for version in active], records)


def set_level(subject: str | None, level: Any) -> Decision:
    """Set the compatibility level of a subject, or the default for other subjects.

    The result is the level.
    """
    level = level.upper() if isinstance(level, str) else level
    if level not in COMPATIBILITY_LEVELS:
        raise SchemaRegistryError(
            42203,
            "Invalid compatibility level. Valid values are "
            f"{', '.join(COMPATIBILITY_LEVELS).lower()}; found {level!r:.40}",
        )
    return Decision(level, [level_record(subject, level)])


def remove_level(state: SchemaState, subject: str | None) -> Decision:
    """Remove a compatibility level. The result is the former level."""
    if subject is not None and subject not in state.levels:
        raise level_not_set(subject)
    previous = state.levels.get(subject, DEFAULT_LEVEL)
    return Decision(previous, [level_record(subject, None)])


def level_not_set(subject: str) -> SchemaRegistryError:
    return SchemaRegistryError(
        40408,
        f"Subject '{subject}' does not have subject-level compatibility configured",
    )


def set_mode(
    state: SchemaState, subject: str | None, mode: Any, *, is_forced: bool
) -> Decision:
    """Set the mode of a subject, or the default for other subjects.

    The result is the mode.
    """
    mode = mode.upper() if isinstance(mode, str) else mode
    if mode not in MODES:
        raise SchemaRegistryError(
            42204,
            f"Invalid mode. Valid values are {', '.join(MODES)}; found {mode!r:.40}",
        )
    # The ids of imported schemas could conflict with those of existing schemas.
    names = state.versions if subject is None else [subject]
    if mode == "IMPORT" and not is_forced and any(map(state.active, names)):
        raise SchemaRegistryError(
            42205, "Cannot import since found existing schemas; force=true imports them"
        )
    return Decision(mode, [mode_record(subject, mode)])


def remove_mode(state: SchemaState, subject: str | None) -> Decision:
    """Remove a mode. The result is the former mode."""
    if subject is not None and subject not in state.modes:
        raise mode_not_set(subject)
    previous = state.modes.get(subject, DEFAULT_MODE)
    return Decision(previous, [mode_record(subject, None)])


def mode_not_set(subject: str) -> SchemaRegistryError:
    return SchemaRegistryError(
        40409, f"Subject '{subject}' does not have subject-level mode configured"
    )


# -- the log ---------------------------------------------------------------------------


class SchemaStore:
    """The state of a broker's `_schemas`. All methods may block on the disk."""

    def __init__(self, server: Server) -> None:
        self._server = server
        #: Protects the fields below. Held while new records are read.
        self._lock = threading.Lock()
        #: Changed in place by new records, and replaced if the log was replaced.
        self._state = SchemaState()
        #: The log from which the state was read.
        self._log: Log | None = None
        #: Offset of the first record that the state does not include.
        self._end = 0
        #: Responses that depend on the state alone. A new state begins with a new dict.
        self.cached_responses: dict[Any, Any] = {}

    @property
    def is_current(self) -> bool:
        """Whether read() waits neither for the disk nor for another thread."""
        # Read without the lock. If a field changes after the check, read() waits after
        # all.
        log = self._log
        return (
            log is not None
            and not self._lock.locked()
            and not log.is_closed
            and not log.has_failed
            and not self._server.logdir.is_shared
            and log.high_watermark == self._end
        )

    def read(self, function: Callable[[SchemaState], _T]) -> _T:
        """Return the result of a function of the current state.

        Raises:
            SchemaRegistryError: the function has refused, or the broker does not serve.
            LogcoreError: the log cannot be read.
        """
        return self._retry_while_closed(lambda: self._read(function))

    def _read(self, function: Callable[[SchemaState], _T]) -> _T:
        with self._lock:
            self._refresh()
            return function(self._state)

    def check(self, requested: RequestedSchema) -> bool:
        """Parse a schema, and return whether it could be parsed.

        Raises:
            InvalidSchemaError: the schema is invalid.
            MissingDependencyError: a package is missing.
        """
        references = self.read(lambda state: state.resolve(requested.references))
        if requested.type == "AVRO":
            parsed_avro(requested.text, references)
        return check_schema(requested.type, requested.text, references)

    def change(self, decide: Callable[[SchemaState], Decision]) -> Any:
        """Append the records of a decision, and return its result.

        Raises the errors of read() and of Log.append().
        """
        while True:
            # 1. Decide on a state, and keep the offset after the last record in it.
            decision, end = self.read(lambda state: (decide(state), self._end))
            if not decision.records:
                return decision.result
            # 2. Append only if no record came between. Two requests could otherwise get
            # one id for two schemas.
            log = self._retry_while_closed(self._ensure_log)
            try:
                log.append_many(decision.records, expected_offset=end)
                return decision.result
            except OffsetConflictError:
                # The other record becomes visible when it is durable.
                log.flush()
            except LogClosedError:
                time.sleep(_PAUSE_S)

    def _retry_while_closed(self, function: Callable[[], _T]) -> _T:
        """Call a function again while the log is closed, or is replaced by a rollback."""
        for attempt in range(_ATTEMPTS):
            # The server has no event loop before its start and after its end.
            if self._server.stalled_s is None:
                raise SchemaRegistryError(50301, "the broker is starting or stopping")
            try:
                return function()
            except LogClosedError:
                if attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    def _ensure_log(self) -> Log:
        """Return the log of `_schemas`. Create the topic if it does not exist."""
        logdir = self._server.logdir
        logdir.create_topic(
            SCHEMAS_TOPIC, 1, {"cleanup.policy": "compact"}, exist_ok=True
        )
        topic = logdir.describe_topic(SCHEMAS_TOPIC)
        # With several partitions, records have no common order. With deletion, schemas
        # would be lost.
        policy = topic.config.cleanup_policy
        if len(topic.partitions) != 1 or policy != "compact":
            raise SchemaRegistryError(
                50001,
                f"topic {SCHEMAS_TOPIC}: expected one partition and "
                f"cleanup.policy=compact, found {len(topic.partitions)} and {policy}",
            )
        return self._open_log()

    def _open_log(self) -> Log:
        return self._server.broker.state.logs.open(SCHEMAS_TOPIC, 0)

    def _refresh(self) -> None:
        """Read the records that are new, or all if the log was replaced."""
        if SCHEMAS_TOPIC not in self._server.logdir:
            if self._log is not None:
                self._reset(None)
            return
        log = self._open_log()
        end = log.high_watermark
        # A rollback opens another log, which may end earlier.
        if log is not self._log or end < self._end:
            self._reset(log)
        if end == self._end:
            return
        # DeleteRecords may have moved the start of the log.
        skipped = self._state.skipped
        start = max(self._end, log.log_start_offset)
        for offset, _, key, value, _ in log.read(start, end):
            self._state.apply(offset, key, value)
        self._end = end
        self.cached_responses = {}
        if self._state.skipped > skipped:
            _log.warning(
                "%d records of %s cannot be decoded and are skipped: %s",
                self._state.skipped,
                SCHEMAS_TOPIC,
                "; ".join(
                    f"offset {at}: {reason}"
                    for at, reason in self._state.reasons.items()
                ),
            )

    def _reset(self, log: Log | None) -> None:
        self._state = SchemaState()
        self._log = log
        self._end = 0
        self.cached_responses = {}


def missing_packages() -> list[str]:
    """Return the packages that the registry needs and that are not installed."""
    names = ("avro", "fastavro", "google.protobuf", "jsonschema")
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def to_registry_error(error: Exception) -> SchemaRegistryError:
    """Return the refusal that reports an error of a log."""
    if isinstance(error, SchemaRegistryError):
        return error
    if isinstance(error, LogcoreError):
        return SchemaRegistryError(50001, f"Error in the backend data store: {error}")
    return SchemaRegistryError(50001, f"Error in the backend data store: {error!r}")
