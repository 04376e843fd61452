"""The application of the console, and its pages that change nothing.

Rules:
- Pages load nothing from other hosts and have no inline scripts or styles.
- Pages work without JavaScript, except their live parts.

guard.py checks the requests, change_pages.py has the forms that change something, and
the other modules of this package read the data.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import quote, urlencode

import attrs
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from logcore.compaction_estimate import CompactionEstimate, estimate_compaction
from logcore.config import INT64_MAX
from logcore.errors import (
    ConsumerStateError,
    InvalidTransactionStateError,
    LogcoreError,
    LogLockedError,
    MissingDependencyError,
    TopicNotFoundError,
)
from logcore.inspect.segmentmap import PartitionMap, segment_map
from logcore.kernels.layout import HEADER_NAME_ERRORS
from logcore.metadata.filenames import partition_name
from logcore.schemas import ValueDecoder
from netshim.console import groups
from netshim.console.change_pages import ChangePages
from netshim.console.decoding import SchemaCache, content_of
from netshim.console.directory import (
    DirectoryView,
    OpenDirectory,
    TimeBudget,
    is_internal,
)
from netshim.console.drawing import LagPicture, lag_picture, partition_pictures
from netshim.console.exporting import EXPORT_FORMATS, commands_for, export_messages
from netshim.console.guard import (
    LOGIN,
    LOGOUT,
    ConsoleGuard,
    cookie_of,
    local_path,
    read_form,
    recheck_viewer,
    set_cookie,
    viewer_of,
)
from netshim.console.lags import INTERVAL_S, LagSample
from netshim.console.live import (
    MAX_PARTITIONS,
    MAX_ROWS,
    MAX_TAILS,
    LiveTail,
    events,
)
from netshim.console.logins import ConsoleLogins, LoginRefusedError
from netshim.console.messages import (
    MessageDetail,
    MessagePage,
    MessageQuery,
    MessageRow,
    read_message,
    read_page,
)
from netshim.console.rendering import PageRenderer
from netshim.console.requests import (
    bad_request,
    number_of,
    partition_of_request,
    query_of,
    topic_of,
)
from netshim.console.schema_pages import SchemaPages
from netshim.console.values import TextValue, full_value, hex_lines, show, visible
from netshim.http.host import HttpHost
from netshim.listeners import TlsSettings
from netshim.security.acls import AclOperation

_log = logging.getLogger("netshim")

#: HTTP statuses of errors. Other errors have 503.
_STATUSES: Final[dict[type[Exception], int]] = {
    TopicNotFoundError: 404,
    MissingDependencyError: 501,
    LogLockedError: 409,
    ConsumerStateError: 409,
    InvalidTransactionStateError: 409,
}
#: Maximum number of rows of a list of topics or groups.
_PAGE_ROWS: Final = 500


def console_app(view: DirectoryView) -> ASGIApp:
    """Return the application of a console."""
    logins = ConsoleLogins(view.access, view.fs)
    renderer = PageRenderer(view, logins)
    pages = ConsolePages(view, renderer)
    routes = [
        Route(path, pages.page(function)) for path, function in pages.functions.items()
    ]
    if view.access.needs_login:
        forms = LoginPages(renderer, logins)
        routes += [
            Route(LOGIN, forms.show),
            Route(LOGIN, forms.log_in, methods=["POST"]),
            Route(LOGOUT, forms.log_out, methods=["POST"]),
        ]
    # Without this object, the console has no page that changes anything.
    if view.changes is not None:
        change_pages = ChangePages(view, view.changes, renderer, logins)
        for path, change in change_pages.changes.items():
            routes += [
                Route(path, pages.page(change.preview)),
                Route(path, change_pages.form(change), methods=["POST"]),
            ]
    app = Starlette(
        routes=[
            *routes,
            Route("/topics/{topic}/events", pages.live_events),
            Mount("/static", StaticFiles(packages=[("netshim.console", "static")])),
        ],
        exception_handlers={
            HTTPException: pages.show_http_error,
            LogcoreError: pages.show_failure,
            OSError: pages.show_failure,
            Exception: pages.show_bug,
        },
    )
    app.router.redirect_slashes = False
    return ConsoleGuard(
        app, view.access, logins, accepts_changes=view.changes is not None
    )


def add_console(
    host: HttpHost,
    address: tuple[str, int],
    view: DirectoryView,
    tls: TlsSettings | None = None,
) -> str:
    """Add a console to a host, and return its URL.

    Raises:
        OSError: the address is not available.
    """
    url = host.add(address, console_app(view), tls)
    host.repeat(INTERVAL_S, functools.partial(groups.sample_lags, view))
    return url


class LoginPages:
    """The forms of the login and of the logout."""

    def __init__(self, renderer: PageRenderer, logins: ConsoleLogins) -> None:
        self._renderer = renderer
        self._logins = logins

    async def show(self, request: Request) -> Response:
        """Show the form of the login."""
        # Only a path of this console is accepted. Otherwise, a link could lead to another
        # site after the login.
        target_path = local_path(request.query_params.get("next", "/"))
        return self._renderer.render("login.html", request, place=target_path, text="")

    async def log_in(self, request: Request) -> Response:
        """Begin a session."""
        form = await read_form(request)
        target_path = local_path(form.get("next", "/"))
        address = "" if request.client is None else request.client.host
        user = form.get("user", "")
        try:
            cookie = await run_in_threadpool(
                self._logins.log_in, user, form.get("password", ""), address
            )
        except LoginRefusedError as error:
            # The name is from the client, so it is quoted and truncated.
            _log.warning("console: a login as %r from %s failed", user[:80], address)
            # 429 is for too many attempts.
            status = 429 if error.is_limited else 403
            return self._renderer.render(
                "login.html", request, status, place=target_path, text=str(error)
            )
        # 303, so that the browser requests the page with GET and does not send the
        # password again.
        response = RedirectResponse(target_path, 303)
        set_cookie(request, response, cookie)
        return response

    async def log_out(self, request: Request) -> Response:
        """End the session."""
        form = await read_form(request)
        cookie = cookie_of(request)
        # Another site could otherwise log the user out.
        if not self._logins.is_form_token(cookie, form.get("token", "")):
            raise HTTPException(403, "The form belongs to another session.")
        self._logins.log_out(cookie)
        response = RedirectResponse(LOGIN, 303)
        set_cookie(request, response, "")
        return response


class ConsolePages:
    """The pages of one directory. Each page opens the directory."""

    def __init__(self, view: DirectoryView, renderer: PageRenderer) -> None:
        self._view = view
        #: Number of live pages. Only the event loop of the console changes it.
        self._tails = 0
        #: Shared by all pages, so that schemas are parsed once.
        self._schemas = SchemaCache()
        self._renderer = renderer
        self._render = renderer.render
        #: By the path of the page.
        self.functions: dict[str, Callable[[Request, OpenDirectory], Response]] = {
            "/": self.topics,
            "/topics/{topic}": self.topic,
            "/topics/{topic}/messages": self.messages,
            "/topics/{topic}/messages.{suffix}": self.export,
            "/topics/{topic}/messages/{number}/{offset}": self.message,
            "/topics/{topic}/messages/{number}/{offset}/{part}": self.raw,
            "/topics/{topic}/live": self.live,
            "/segments": self.segments,
            "/topics/{topic}/segments/{number}": self.partition_segments,
            "/groups": self.groups,
            "/group": self.group,
            "/transactions": self.transactions,
        }
        self.functions.update(SchemaPages(renderer).functions)
        # The page shows values from the memory of a broker.
        if view.broker is not None:
            self.functions["/broker"] = self.broker

    def page(
        self, function: Callable[[Request, OpenDirectory], Response]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a page that runs in a thread, because it reads files."""

        def run(request: Request) -> Response:
            with self._view.open_directory(viewer_of(request)) as directory:
                return function(request, directory)

        async def respond(request: Request) -> Response:
            try:
                return await run_in_threadpool(run, request)
            # console_app() has handlers for these.
            except (HTTPException, LogcoreError, OSError):
                raise
            except Exception as error:
                return self._bug_page(request, error)

        return respond

    def _budget(self, seconds: float | None = None) -> TimeBudget:
        if seconds is None:
            seconds = self._view.page_s
        return TimeBudget.of(self._view.fs, seconds)

    # -- errors ------------------------------------------------------------------------

    async def show_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = error.detail
        # Starlette's router found no page; errors of this package have texts of their
        # own.
        if text == HTTPStatus.NOT_FOUND.phrase:
            text = "There is no page at this address."
        return self._renderer.error(request, error.status_code, text)

    async def show_failure(self, request: Request, error: Exception) -> Response:
        # The directory may be readable again later.
        status = 503
        for error_type, code in _STATUSES.items():
            if isinstance(error, error_type):
                status = code
        return self._renderer.error(request, status, str(error))

    async def show_bug(self, request: Request, error: Exception) -> Response:
        return self._bug_page(request, error)

    def _bug_page(self, request: Request, error: Exception) -> Response:
        """Log an unexpected error, and return its page."""
        _log.error("console: %s failed", request.url.path, exc_info=error)
        return self._renderer.error(
            request, 500, "The console has a bug. Its log has details."
        )

    # -- topics ------------------------------------------------------------------------

    def topics(self, request: Request, directory: OpenDirectory) -> Response:
        """List the topics whose names contain the filter."""
        name_filter = request.query_params.get("filter", "")
        shows_internal = request.query_params.get("internal") == "1"
        names = [
            name
            for name in directory.topics
            if name_filter.lower() in name.lower()
            and (shows_internal or not is_internal(name))
        ]
        start = number_of(request.query_params.get("start", "0"), "start", 10**9)
        # A row opens a log. When the time is used up, the remaining rows have no sizes.
        budget = self._budget()
        page_names = names[start : start + _PAGE_ROWS]
        rows = [_topic_row(directory, name, budget) for name in page_names]
        return self._render(
            "topics.html",
            request,
            problem=directory.problem,
            rows=rows,
            found=len(names),
            start=start,
            page_rows=_PAGE_ROWS,
            all_topics=len(directory.topics),
            partitions=sum(len(topic) for topic in directory.topics.values()),
            name_filter=name_filter,
            shows_internal=shows_internal,
            is_partial=any(row["is_partial"] for row in rows),
        )

    def topic(self, request: Request, directory: OpenDirectory) -> Response:
        """Show the partitions of a topic, its settings and its groups."""
        topic = topic_of(request, directory)
        budget = self._budget()
        rows = [
            _partition_row(directory, topic, number, budget)
            for number in directory.topics[topic]
        ]
        problems = []
        readers = []
        try:
            group_data = groups.read_groups(directory)
        except LogcoreError as error:
            problems.append(f"the groups cannot be read: {error}")
        else:
            for name in groups.group_names(directory, group_data):
                if topic in group_data.offsets.get(name, {}):
                    offsets = groups.offsets_of(directory, group_data, name, budget)
                    topic_offsets = [
                        offset for offset in offsets if offset.topic == topic
                    ]
                    lag = sum(row.lag or 0 for row in topic_offsets)
                    readers.append(
                        (name, group_data.member_count(name), len(topic_offsets), lag)
                    )
        return self._render(
            "topic.html",
            request,
            problem=directory.problem,
            problems=problems,
            topic=topic,
            rows=rows,
            overrides=sorted(directory.overrides(topic).items()),
            config=directory.config(topic),
            readers=readers,
            is_partial=any(row["size"] is None and not row["error"] for row in rows),
        )

    # -- messages ----------------------------------------------------------------------

    def _read(
        self, request: Request, directory: OpenDirectory
    ) -> tuple[str, MessageQuery, MessagePage]:
        topic = topic_of(request, directory)
        directory.check_readable(topic)
        query = query_of(request, directory, topic, self._view.fs.now_ms())
        budget = self._budget(self._view.search_s if query.is_search else None)
        return topic, query, read_page(directory, topic, query, budget)

    def messages(self, request: Request, directory: OpenDirectory) -> Response:
        """Show messages of a topic."""
        topic, query, page = self._read(request, directory)
        parameters = {
            name: value
            for name, value in request.query_params.items()
            if name in ("partition", "q", "where", "count") and value
        }
        return self._render(
            "messages.html",
            request,
            problem=directory.problem,
            topic=topic,
            numbers=directory.topics[topic],
            chosen=request.query_params.get("partition", ""),
            place=request.query_params.get("from", ""),
            where=request.query_params.get("where", ""),
            query=query,
            page=page,
            content=functools.partial(content_of, self._schemas.decoder(directory)),
            same=parameters,
            following=_offsets_text(page.following),
            before=_before_first(query, page),
        )

    def export(self, request: Request, directory: OpenDirectory) -> Response:
        """Return the messages of a page as a file."""
        suffix = request.path_params["suffix"]
        # The text of the error contains a part of the address, so it is truncated.
        if suffix not in EXPORT_FORMATS:
            raise bad_request(
                f"expected {' or '.join(EXPORT_FORMATS)}; found {suffix[:20]!r}"
            )
        topic, _, page = self._read(request, directory)
        content = export_messages(page.messages, topic, suffix)
        headers = {"content-disposition": f'attachment; filename="{topic}.{suffix}"'}
        # The file itself has only messages.
        if page.problems:
            headers["x-logcore-problems"] = str(len(page.problems))
        return Response(content, media_type=EXPORT_FORMATS[suffix], headers=headers)

    def _message(
        self, request: Request, directory: OpenDirectory
    ) -> tuple[str, int, int, MessageDetail]:
        topic = topic_of(request, directory)
        number = number_of(request.path_params["number"], "partition", 2**31 - 1)
        offset = number_of(request.path_params["offset"], "offset", INT64_MAX)
        directory.check(topic, number)
        directory.check_readable(topic)
        with directory.open_log(topic, number) as log:
            message = read_message(log, offset, self._budget())
        if isinstance(message, MessageDetail):
            return topic, number, offset, message
        hint = "and none after it"
        if message is not None:
            hint = f"the next one is at offset {message}"
        raise HTTPException(404, f"There is no message at offset {offset}; {hint}.")

    def message(self, request: Request, directory: OpenDirectory) -> Response:
        """Show one message in full."""
        topic, number, offset, message = self._message(request, directory)
        record = message.record
        headers = [
            (show(name.encode("utf-8", HEADER_NAME_ERRORS)), full_value(value))
            for name, value in record.headers
        ]
        decoder = self._schemas.decoder(directory)
        key = content_of(decoder, record, is_key=True)
        value = content_of(decoder, record, is_key=False)
        base = str(request.base_url).rstrip("/")
        # The address of an export with this message alone.
        query = urlencode({"partition": number, "from": offset, "count": 1})
        path = directory.path_of(topic, number)
        commands = commands_for(
            path=path,
            directory=self._view.path,
            topic=topic,
            partition=number,
            offset=offset,
            url=f"{base}/topics/{quote(topic)}/messages.ndjson?{query}",
            bootstrap=self._bootstrap(),
        )
        return self._render(
            "message.html",
            request,
            problem=directory.problem,
            topic=topic,
            number=number,
            found=message,
            file=PurePosixPath(str(message.batch.path)).name,
            key=_full_text_value(key.data, record.key),
            value=_full_text_value(value.data, record.value),
            key_note=key.note,
            value_note=value.note,
            key_hex=hex_lines(record.key or b""),
            value_hex=hex_lines(record.value or b""),
            headers=headers,
            commands=commands,
        )

    def _bootstrap(self) -> str:
        """Return the address of the broker for clients, or ""."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            if self._view.broker is not None:
                return self._view.broker().bootstrap_servers
        return ""

    def raw(self, request: Request, directory: OpenDirectory) -> Response:
        """Return the bytes of a key or a value as a file."""
        part = request.path_params["part"]
        if part not in ("key", "value"):
            raise bad_request(f"expected key or value; found {part[:20]!r}")
        topic, number, offset, message = self._message(request, directory)
        data = message.record.key if part == "key" else message.record.value
        name = f"{partition_name(topic, number)}-{offset}.{part}"
        return Response(
            data or b"",
            # Never a type that a browser would display, because a client has written
            # the bytes.
            media_type="application/octet-stream",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )

    def live(self, request: Request, directory: OpenDirectory) -> Response:
        """Show new messages as they arrive."""
        topic = topic_of(request, directory)
        directory.check_readable(topic)
        number = partition_of_request(request, directory, topic)
        return self._render(
            "live.html",
            request,
            problem=directory.problem,
            topic=topic,
            numbers=directory.topics[topic],
            chosen=number,
            most_rows=MAX_ROWS,
            most_partitions=MAX_PARTITIONS,
        )

    async def live_events(self, request: Request) -> Response:
        """Stream new messages as server-sent events."""

        def open_tail() -> tuple[str, LiveTail, ValueDecoder | None]:
            with self._view.open_directory(viewer) as directory:
                decoder = self._schemas.decoder(directory)
                topic = topic_of(request, directory)
                directory.check_readable(topic)
                number = partition_of_request(request, directory, topic)
                numbers = directory.topics[topic] if number is None else (number,)
                tail = LiveTail.open(directory, topic, numbers)
            return topic, tail, decoder

        viewer = viewer_of(request)
        if self._tails >= MAX_TAILS:
            raise HTTPException(503, f"{MAX_TAILS} live pages are open already")
        # Counted before the first await, so that concurrent requests cannot exceed the
        # limit.
        self._tails += 1
        try:
            topic, tail, decoder = await run_in_threadpool(open_tail)
        except BaseException:
            self._tails -= 1
            raise
        rows = self._renderer.templates.get_template("rows.html")
        content = functools.partial(content_of, decoder)

        def render(messages: list[MessageRow]) -> str:
            text = rows.render(
                topic=topic, messages=messages, content=content, search_text=""
            )
            return text.encode("utf-8", "replace").decode()

        def may_continue() -> bool:
            # Rules may change, and sessions may end, while the page is open.
            present = recheck_viewer(request)
            return present is not None and present.may_topic(AclOperation.READ, topic)

        async def stream() -> AsyncIterator[str]:
            try:
                async for event in events(tail, render, may_continue):
                    yield event
            finally:
                self._tails -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    # -- segments ----------------------------------------------------------------------

    def segments(self, request: Request, directory: OpenDirectory) -> Response:
        """Show the segments of all partitions, or of one topic."""
        topic = request.query_params.get("topic", "")
        if topic:
            directory.check(topic)
        names = (
            [topic]
            if topic
            else [name for name in directory.topics if not is_internal(name)]
        )
        budget = self._budget()
        maps: list[PartitionMap] = []
        problems = []
        unread = 0
        for name in names:
            for number in directory.topics[name]:
                # At least one partition is read, so that each page shows something.
                if budget.is_over() and maps:
                    unread += 1
                    continue
                try:
                    maps.append(self._map(directory, name, number, budget))
                except LogcoreError as error:
                    problems.append(f"{partition_name(name, number)}: {error}")
        own_scale = request.query_params.get("scale") == "own"
        return self._render(
            "segments.html",
            request,
            problem=directory.problem,
            problems=problems,
            topic=topic,
            topics=[name for name in directory.topics if not is_internal(name)],
            rows=partition_pictures(maps, own_scale=own_scale),
            own_scale=own_scale,
            unread=unread,
            is_partial=any(not partition_map.is_complete for partition_map in maps),
        )

    def partition_segments(
        self, request: Request, directory: OpenDirectory
    ) -> Response:
        """Show the segments of one partition. On request, check their bytes, or estimate
        what compaction removes.
        """
        topic = topic_of(request, directory)
        number = number_of(request.path_params["number"], "partition", 2**31 - 1)
        directory.check(topic, number)
        # A check reads all bytes, so it happens only on request.
        checks = request.query_params.get("check") == "1"
        budget = self._budget(self._view.search_s if checks else None)
        partition_map = self._map(directory, topic, number, budget, checks_crc=checks)
        estimate = None
        problems = [*partition_map.problems]
        if (
            request.query_params.get("estimate") == "1"
            and partition_map.cleaned_to >= 0
        ):
            try:
                estimate = self._estimate(
                    directory, topic, number, partition_map.cleaned_to
                )
            except LogcoreError as error:
                problems.append(str(error))
        return self._render(
            "partition.html",
            request,
            problem=directory.problem,
            problems=problems,
            estimate=estimate,
            topic=topic,
            number=number,
            row=partition_pictures([partition_map], own_scale=True)[0],
            config=directory.config(topic),
            checks=checks,
            is_partial=not partition_map.is_complete,
        )

    def _estimate(
        self, directory: OpenDirectory, topic: str, number: int, cleaned_to: int
    ) -> CompactionEstimate:
        with directory.open_log(topic, number) as log:
            return estimate_compaction(
                log,
                config=directory.config(topic),
                cleaned_to=cleaned_to,
                # An estimate has two passes.
                pass_ms=int(self._view.search_s * 500),
                fs=self._view.fs,
            )

    def _map(
        self,
        directory: OpenDirectory,
        topic: str,
        number: int,
        budget: TimeBudget,
        *,
        checks_crc: bool = False,
    ) -> PartitionMap:
        return segment_map(
            directory.path_of(topic, number),
            config=directory.config(topic),
            now_ms=self._view.fs.now_ms(),
            checks_crc=checks_crc,
            is_over=budget.is_over,
            fs=self._view.fs,
        )

    # -- groups and transactions -------------------------------------------------------

    def groups(self, request: Request, directory: OpenDirectory) -> Response:
        """List the groups."""
        name_filter = request.query_params.get("filter", "")
        problems = []
        rows = []
        budget = self._budget()
        try:
            group_data = groups.read_groups(directory)
            names = [
                name
                for name in groups.group_names(directory, group_data)
                if name_filter.lower() in name.lower()
            ]
            rows = [
                groups.summary_of(directory, group_data, name, budget)
                for name in names[:_PAGE_ROWS]
            ]
            if len(names) > _PAGE_ROWS:
                problems.append(
                    f"the first {_PAGE_ROWS} of {len(names)} groups: use the filter"
                )
        except LogcoreError as error:
            problems.append(f"the groups cannot be read: {error}")
        return self._render(
            "groups.html",
            request,
            problem=directory.problem,
            problems=problems,
            rows=rows,
            known=directory.topics,
            name_filter=name_filter,
            lags={
                row.name: self._lag(self._view.lags.of_group(row.name, row.topics))
                for row in rows
            },
            is_partial=any(row.is_lag_partial for row in rows) and budget.is_over(),
        )

    def group(self, request: Request, directory: OpenDirectory) -> Response:
        """Show the members and the offsets of a group."""
        name = request.query_params.get("name", "")
        group_data = groups.read_groups(directory)
        if name not in groups.group_names(directory, group_data):
            raise HTTPException(404, f"There is no group {visible(name[:80])!r}.")
        budget = self._budget()
        owners = groups.owners_of(directory, name)
        offsets = groups.offsets_of(directory, group_data, name, budget, owners)
        return self._render(
            "group.html",
            request,
            problem=directory.problem,
            name=name,
            summary=groups.summary_of(directory, group_data, name, budget),
            members=groups.members_of(directory, group_data, name),
            offsets=offsets,
            lags={
                (offset.topic, offset.partition): self._lag(
                    self._view.lags.of_partition((name, offset.topic, offset.partition))
                )
                for offset in offsets
            },
        )

    def _lag(self, samples: list[LagSample]) -> LagPicture:
        return lag_picture(samples, self._view.fs.now_ms())

    def transactions(self, request: Request, directory: OpenDirectory) -> Response:
        """Show open transactions, and the ids that the coordinator has stored."""
        return self._render(
            "transactions.html",
            request,
            problem=directory.problem,
            data=groups.read_transactions(directory, self._budget()),
            may_see=directory.viewer.may_see_topic,
        )

    def broker(self, request: Request, directory: OpenDirectory) -> Response:
        """Show the clients and the requests of the broker."""
        assert self._view.broker is not None
        if not directory.viewer.may_see_cluster():
            raise HTTPException(403, "You may not describe the cluster.")
        try:
            # Waits for the broker's event loop.
            data = self._view.broker()
        except (RuntimeError, TimeoutError) as error:
            raise HTTPException(503, f"The broker does not answer: {error}") from None
        return self._render(
            "broker.html", request, problem=directory.problem, data=data
        )


# -- rows ------------------------------------------------------------------------------


def _topic_row(
    directory: OpenDirectory, topic: str, budget: TimeBudget
) -> dict[str, Any]:
    """Return a row of the list of topics. It is partial if no time is left."""
    numbers = directory.topics[topic]
    sizes = []
    errors = []
    for number in numbers:
        if budget.is_over():
            break
        try:
            sizes.append(directory.size(topic, number))
        except (LogcoreError, OSError) as error:
            errors.append(f"partition {number}: {error}")
    policy = directory.config(topic).cleanup_policy
    return {
        "topic": topic,
        "partitions": len(numbers),
        "records": sum(size.end_offset - size.log_start_offset for size in sizes),
        "size_bytes": sum(size.size_bytes for size in sizes),
        "segments": sum(size.segments for size in sizes),
        "modified_ms": max((size.modified_ms for size in sizes), default=-1),
        "policy": policy,
        "errors": errors,
        "is_partial": len(sizes) + len(errors) < len(numbers),
    }


def _partition_row(
    directory: OpenDirectory, topic: str, number: int, budget: TimeBudget
) -> dict[str, Any]:
    """Return a row of the list of partitions; `size` is None if it is unknown."""
    row: dict[str, Any] = {"number": number, "size": None, "error": ""}
    if not budget.is_over():
        try:
            row["size"] = directory.size(topic, number)
        except (LogcoreError, OSError) as error:
            row["error"] = str(error)
    return row


def _offsets_text(offsets: Mapping[int, int]) -> str:
    """Return the offsets of a page for a link."""
    return ",".join(f"{number}:{offset}" for number, offset in sorted(offsets.items()))


def _before_first(query: MessageQuery, page: MessagePage) -> str:
    """Return the offsets for a link to the messages before the first one of the page."""
    offsets: dict[int, int] = {}
    for message in page.messages:
        offset = message.record.offset
        if query.is_backward:
            offsets.setdefault(message.partition, offset + 1)
        else:
            offsets.setdefault(message.partition, offset)
    # Partitions without a message on this page keep their offset.
    for number, offset in query.start_offsets.items():
        if number in query.partitions:
            offsets.setdefault(number, offset)
    return _offsets_text(offsets)


def _full_text_value(content: bytes | None, stored: bytes | None) -> TextValue:
    """Return a key or value in full, with the size of the stored bytes."""
    return attrs.evolve(full_value(content), size_bytes=len(stored or b""))
