"""Pages of the schemas in the topic `_schemas`: subjects, versions, and differences.

The topic is read for each page, so that a console without a registry shows it too. A user
needs READ on the topic.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Final

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from logcore.format.schema_records import SCHEMAS_TOPIC, SchemaVersion
from logcore.schemas.decoding import load_schemas
from logcore.schemas.state import SchemaState
from netshim.console.directory import OpenDirectory
from netshim.console.rendering import PageRenderer
from netshim.console.requests import number_of
from netshim.console.values import visible

#: Maximum number of rows of a list.
_MAX_ROWS: Final = 500
#: Longest text that is compared or shown, in characters.
_MAX_TEXT: Final = 200_000
#: Ends of the subjects that Confluent's serializers use for a topic by default.
_SUFFIXES: Final = ("-value", "-key")


@attrs.frozen
class SubjectRow:
    """A subject in the list of subjects."""

    subject: str
    #: Also a deleted version, if it is the latest one.
    latest: SchemaVersion
    #: Number of versions that are not deleted.
    versions: int
    #: The compatibility level.
    level: str
    #: The topic that the subject is for; "" if there is no topic of its name.
    topic: str


@attrs.frozen
class DiffLine:
    """A line of a comparison."""

    #: "+", "-", "@" or " ", as in a unified diff.
    kind: str
    text: str


class SchemaPages:
    """The pages of one console."""

    def __init__(self, renderer: PageRenderer) -> None:
        self._renderer = renderer
        self.functions: dict[str, Callable[[Request, OpenDirectory], Response]] = {
            "/schemas": self.subjects,
            "/schema": self.subject,
        }

    def subjects(self, request: Request, directory: OpenDirectory) -> Response:
        """List the subjects whose names contain the filter."""
        name_filter = request.query_params.get("filter", "")
        state = _state(directory)
        names = [
            version
            for version in sorted(state.versions)
            if name_filter.lower() in version.lower()
        ]
        rows = [
            SubjectRow(
                name,
                state.versions[name][max(state.versions[name])],
                len(state.active(name)),
                state.levels.get(name) or state.levels.get(None) or "BACKWARD",
                _topic_of_subject(directory, name),
            )
            for name in names[:_MAX_ROWS]
        ]
        return self._renderer.render(
            "schemas.html",
            request,
            problem=directory.problem,
            rows=rows,
            found=len(names),
            name_filter=name_filter,
            skipped=state.skipped,
            reasons=state.reasons,
        )

    def subject(self, request: Request, directory: OpenDirectory) -> Response:
        """Show a version of a subject, and its differences to another one."""
        name = request.query_params.get("subject", "")
        state = _state(directory)
        versions = state.versions.get(name)
        if not versions:
            raise HTTPException(404, f"There is no subject {visible(name[:80])!r}.")
        numbers = sorted(versions, reverse=True)
        chosen = _selected_version(request, "version", versions, numbers[0])
        assert chosen is not None
        # A comparison begins with the version before the selected one.
        previous = max(
            (number for number in numbers if number < chosen.version), default=None
        )
        other = _selected_version(request, "against", versions, previous)
        lines = None
        if other is not None and other.version != chosen.version:
            lines = _diff(_pretty(other), _pretty(chosen))
        return self._renderer.render(
            "schema.html",
            request,
            problem=directory.problem,
            subject=name,
            topic=_topic_of_subject(directory, name),
            versions=[versions[number] for number in numbers],
            shown=chosen,
            other=other,
            lines=lines,
            text="\n".join(map(visible, _pretty(chosen).splitlines())),
            level=state.levels.get(name) or state.levels.get(None) or "BACKWARD",
        )


def _state(directory: OpenDirectory) -> SchemaState:
    """Return the schemas of a directory; none if it has no topic of schemas.

    Raises:
        HTTPException: the user may not read the topic.
        LogcoreError: the topic cannot be read.
    """
    if SCHEMAS_TOPIC not in directory.topics:
        return SchemaState()
    directory.check_readable(SCHEMAS_TOPIC)
    with directory.open_log(SCHEMAS_TOPIC, 0) as log:
        return load_schemas(log.read(log.log_start_offset, log.high_watermark))


def _topic_of_subject(directory: OpenDirectory, subject: str) -> str:
    # TopicNameStrategy of Confluent's serializers.
    for suffix in _SUFFIXES:
        name = subject.removesuffix(suffix)
        if name != subject and name in directory.topics:
            return name
    return ""


def _selected_version(
    request: Request,
    name: str,
    versions: dict[int, SchemaVersion],
    default: int | None,
) -> SchemaVersion | None:
    """Return the version in a parameter. Raises HTTPException if it does not exist."""
    text = request.query_params.get(name, "")
    number = default
    if text:
        number = number_of(text, name, 2**31 - 1)
    if number is None:
        return None
    if number not in versions:
        raise HTTPException(404, f"There is no version {number}.")
    return versions[number]


def _pretty(schema: SchemaVersion) -> str:
    """Return the text of a schema in several lines."""
    text = schema.text
    # Avro schemas and JSON Schemas are JSON.
    if schema.type != "PROTOBUF":
        try:
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        # Text that is not JSON is shown as it is.
        except (ValueError, RecursionError):
            pass
    return text[:_MAX_TEXT]


def _diff(before: str, after: str) -> list[DiffLine]:
    """Return the lines that differ, with three lines around them."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    # The first two lines name the files.
    return [DiffLine(line[:1], visible(line[1:])) for line in list(lines)[2:]]
