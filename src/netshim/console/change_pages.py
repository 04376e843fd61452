"""The forms that change something, each after a page that shows its effect.

Rules:
- The page of a change has a table with the values before and after. Its form contains
  the new values, so that the change is the one that the user has seen.
- A form has the token of its session. To delete something, the user types its name.
- After a change, the browser is redirected to the page that shows the result, so that a
  reload does not repeat the change.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import attrs
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from logcore.cli.arguments import parse_offset
from logcore.config import INT64_MAX
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import is_topic_name, partition_name
from netshim.console import groups
from netshim.console.changes import ConsoleChanges
from netshim.console.directory import DirectoryView, OpenDirectory, TimeBudget
from netshim.console.guard import cookie_of, read_form, viewer_of
from netshim.console.logins import ConsoleLogins
from netshim.console.rendering import PageRenderer
from netshim.console.requests import (
    bad_request,
    number_of,
    partition_of_request,
    topic_of,
)
from netshim.console.values import visible

Form = Mapping[str, str]
#: Maximum number of characters of a position: an offset, `earliest`, `latest`, a time
#: or an age.
_MAX_POSITION_CHARS: Final = 60


@attrs.frozen
class ConsoleChange:
    """One kind of change."""

    #: Returns the page that shows the effect of the change.
    preview: Callable[[Request, OpenDirectory], Response]
    #: Makes the change, and returns the address of the page that shows its result.
    apply: Callable[[Request, Form], str]


class ChangePages:
    """The forms of one console."""

    def __init__(
        self,
        view: DirectoryView,
        changes: ConsoleChanges,
        renderer: PageRenderer,
        logins: ConsoleLogins,
    ) -> None:
        self._view = view
        self._changes = changes
        self._renderer = renderer
        self._logins = logins
        #: By the path of both the page and its form.
        self.changes = {
            "/group/reset": ConsoleChange(self.preview_reset, self.reset),
            "/transactions/abort": ConsoleChange(self.preview_abort, self.abort),
            "/topics/{topic}/delete": ConsoleChange(
                self.preview_deletion, self.delete_topic
            ),
            "/topics/{topic}/delete-records": ConsoleChange(
                self.preview_record_deletion, self.delete_records
            ),
        }

    def form(self, change: ConsoleChange) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a submitted form.

        The change runs in a worker thread because it writes files.
        """

        async def respond(request: Request) -> Response:
            form = await read_form(request)
            token = form.get("token", "")
            # Another site could otherwise submit the form in the name of the user.
            if not self._logins.is_form_token(cookie_of(request), token):
                raise HTTPException(
                    403, "The form belongs to another session. Open its page again."
                )
            address = await run_in_threadpool(change.apply, request, form)
            # A reload of the page then does not repeat the change.
            return RedirectResponse(address, 303)

        return respond

    def _show(self, request: Request, **variables: Any) -> Response:
        # Defaults, because a template refuses undefined variables.
        context = {"warning": "", "confirm": "", "is_refused": False, **variables}
        return self._renderer.render("change.html", request, **context)

    # -- offsets of a group ------------------------------------------------------------

    def preview_reset(self, request: Request, directory: OpenDirectory) -> Response:
        """Show the offsets of a group before and after a reset."""
        name = request.query_params.get("name", "")
        group_data = groups.read_groups(directory)
        if name not in groups.group_names(directory, group_data):
            raise HTTPException(404, f"There is no group {visible(name[:80])!r}.")
        text = _position_text(request, "to")
        selected_topic = request.query_params.get("topic", "")
        budget = self._budget()
        rows = []
        changes: dict[Key, int] = {}
        for row in groups.offsets_of(directory, group_data, name, budget):
            key = row.topic, row.partition
            # Without the end, the position cannot be determined.
            if row.end is None or (selected_topic and row.topic != selected_topic):
                continue
            after, end = self._offset_at(directory, key, text)
            rows.append(
                (
                    partition_name(*key),
                    row.committed.offset,
                    after,
                    after - row.committed.offset,
                    end - after,
                )
            )
            if after != row.committed.offset:
                changes[key] = after
        members = group_data.member_count(name)
        warning = ""
        # The broker refuses such a commit while the group has members.
        if members:
            warning = (
                f"The group has {members} members. The offsets are set only when the "
                "consumers have stopped."
            )
        return self._show(
            request,
            problem=directory.problem,
            title=f"Reset the offsets of {visible(name)}",
            back=f"group {visible(name)}",
            back_parts=("group",),
            back_parameters={"name": name},
            text=f"Consumers of the group continue at these offsets. To: {text}.",
            warning=warning,
            headers=("Partition", "Committed now", "After", "Change", "Lag after"),
            rows=rows,
            is_refused=not changes,
            refusal="Each partition is at this offset already.",
            action="Set the offsets",
            fields={"name": name, "plan": _plan_text(changes)},
        )

    def reset(self, request: Request, form: Form) -> str:
        """Set the offsets of a group."""
        name = form.get("name", "")
        self._changes.set_offsets(viewer_of(request), name, _plan(form))
        return self._renderer.address("group", name=name, done="reset")

    # -- transactions ------------------------------------------------------------------

    def preview_abort(self, request: Request, directory: OpenDirectory) -> Response:
        """Show the partitions of an open transaction."""
        name = request.query_params.get("id", "")
        data = groups.read_transactions(directory, self._budget())
        # Only transactions that the user may see are in this list.
        stored = dict(data.ids).get(name)
        # The transaction may have ended since the list was displayed.
        if stored is None or not stored.partitions:
            name_text = visible(name[:80])
            raise HTTPException(404, f"There is no open transaction of {name_text!r}.")
        rows = [
            (
                partition_name(part.topic, part.partition),
                part.first_offset,
                part.waiting_records,
            )
            for part in data.parts
            if part.transactional_id == name
        ]
        return self._show(
            request,
            problem=directory.problem,
            title=f"Abort the transaction of {visible(name)}",
            back="transactions",
            back_parts=("transactions",),
            back_parameters={},
            text="The records of the transaction are never shown to read_committed "
            "consumers, and its producer is fenced: its next request fails.",
            headers=("Partition", "First offset", "Offsets held back"),
            rows=rows,
            action="Abort the transaction",
            fields={"id": name, "timeout": str(stored.timeout_ms)},
        )

    def abort(self, request: Request, form: Form) -> str:
        """Abort an open transaction."""
        timeout_ms = number_of(form.get("timeout", ""), "timeout", 2**31 - 1)
        self._changes.abort_transaction(
            viewer_of(request), form.get("id", ""), timeout_ms
        )
        return self._renderer.address("transactions", done="abort")

    # -- topics and records ------------------------------------------------------------

    def preview_deletion(self, request: Request, directory: OpenDirectory) -> Response:
        """Show the records and bytes that a deletion of a topic deletes."""
        topic = topic_of(request, directory)
        rows = []
        for number in directory.topics[topic]:
            size = directory.size(topic, number)
            records = size.end_offset - size.log_start_offset
            rows.append((partition_name(topic, number), records, size.size_bytes))
        return self._show(
            request,
            problem=directory.problem,
            title=f"Delete the topic {topic}",
            back=f"topic {topic}",
            back_parts=("topics", topic),
            back_parameters={},
            text="All records and the committed offsets of all groups in this topic are "
            "deleted. They cannot be restored.",
            headers=("Partition", "Records", "Bytes"),
            rows=rows,
            confirm=topic,
            action="Delete the topic",
            fields={},
        )

    def delete_topic(self, request: Request, form: Form) -> str:
        """Delete a topic."""
        topic = _topic_of_path(request)
        # The user types the name, so that the wrong topic is not deleted by one click.
        _check_typed(form, topic)
        self._changes.delete_topic(viewer_of(request), topic)
        return self._renderer.address(done="delete", topic=topic)

    def preview_record_deletion(
        self, request: Request, directory: OpenDirectory
    ) -> Response:
        """Show the starts of partitions before and after a deletion of records."""
        topic = topic_of(request, directory)
        number = partition_of_request(request, directory, topic)
        # All partitions if the form names none.
        numbers = directory.topics[topic] if number is None else (number,)
        text = _position_text(request, "before")
        rows = []
        changes: dict[Key, int] = {}
        for partition in numbers:
            after, end = self._offset_at(directory, (topic, partition), text)
            start = directory.size(topic, partition).log_start_offset
            name = partition_name(topic, partition)
            rows.append((name, start, after, after - start, end - after))
            # Records below the start are deleted already.
            if after > start:
                changes[topic, partition] = after
        return self._show(
            request,
            problem=directory.problem,
            title=f"Delete records of {topic}",
            back=f"topic {topic}",
            back_parts=("topics", topic),
            back_parameters={},
            text=f"The records below the new start are deleted. They cannot be restored. "
            f"Before: {text}.",
            headers=("Partition", "Start now", "After", "Deleted", "Remaining"),
            rows=rows,
            is_refused=not changes,
            refusal="There are no records before this position.",
            confirm=topic,
            action="Delete the records",
            fields={"plan": _plan_text(changes)},
        )

    def delete_records(self, request: Request, form: Form) -> str:
        """Delete the first records of partitions."""
        topic = _topic_of_path(request)
        _check_typed(form, topic)
        plan = {}
        for (name, number), offset in _plan(form).items():
            # The browser sends the plan, which may name other topics than the confirmed
            # one.
            if name != topic:
                raise bad_request(f"plan: expected partitions of {topic}; found {name}")
            plan[number] = offset
        self._changes.delete_records(viewer_of(request), topic, plan)
        return self._renderer.address("topics", topic, done="records")

    def _budget(self) -> TimeBudget:
        # A partition that is not read is not changed, so these pages have more time.
        return TimeBudget.of(self._view.fs, 10 * self._view.page_s)

    def _offset_at(
        self, directory: OpenDirectory, key: Key, text: str
    ) -> tuple[int, int]:
        """Return the offset of a position in a partition, and the end of the partition."""
        # Imported here, because only changes need the command line's parser.
        from click import BadParameter

        with directory.open_log(*key) as log:
            try:
                position = parse_offset(log, text, self._view.fs.now_ms())
            except BadParameter as error:
                raise bad_request(error.message) from None
            end = log.high_watermark
            # An offset below the start or above the end of the log means that bound.
            return min(max(position, log.log_start_offset), end), end


def _position_text(request: Request, name: str) -> str:
    """Return a position such as `earliest`. Raises HTTPException if it is too long."""
    text = request.query_params.get(name, "").strip()
    if not text or len(text) > _MAX_POSITION_CHARS or visible(text) != text:
        raise bad_request(
            f"{name}: expected an offset, earliest, latest, a time or an age; found "
            f"{visible(text[:_MAX_POSITION_CHARS])!r}"
        )
    return text


def _topic_of_path(request: Request) -> str:
    name: str = request.path_params["topic"]
    if not is_topic_name(name):
        raise bad_request(f"expected the name of a topic; found {visible(name[:80])!r}")
    return name


def _check_typed(form: Form, name: str) -> None:
    """Raise HTTPException unless the user has typed a name."""
    if form.get("confirm", "").strip() != name:
        raise HTTPException(
            409, f"The typed name does not match: type {name} to confirm the deletion."
        )


def _plan_text(offsets: Mapping[Key, int]) -> str:
    """Return the offsets of a change as text, for a hidden field of its form."""
    return ",".join(
        f"{partition_name(*key)}:{offset}" for key, offset in sorted(offsets.items())
    )


def _plan(form: Form) -> dict[Key, int]:
    """Return the offsets in a form. Raises HTTPException if they are malformed."""
    offsets: dict[Key, int] = {}
    for text in form.get("plan", "").split(","):
        name, _, offset = text.rpartition(":")
        # The name of a topic may contain hyphens and no colons.
        topic, _, number = name.rpartition("-")
        if not is_topic_name(topic):
            raise bad_request(f"plan: expected TOPIC-N:OFFSET,...; found {text[:80]!r}")
        key = topic, number_of(number, "partition", 2**31 - 1)
        offsets[key] = number_of(offset, "offset", INT64_MAX)
    return offsets
