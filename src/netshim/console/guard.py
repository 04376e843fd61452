"""The checks of each request before its page: host, origin, login and method.

Rules:
- The Host header must name this machine. A page of another site that attacks by DNS
  rebinding sends the name of that site.
- The Origin header, if there is one, must be the console itself.
- Without a login, a request for a page is redirected to the login page.
- Only GET and HEAD are answered, except for the forms of logins and changes. These forms
  need a token that pages of other origins cannot read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import parse_qsl, quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logcore.errors import LogcoreError
from netshim.console.access import ConsoleAccess, ConsoleViewer
from netshim.console.logins import ConsoleLogins
from netshim.http.host import names_this_host
from netshim.session import ANONYMOUS

#: Headers of each response. An attacker may have written a message that a page shows.
#: Therefore scripts run only from files of the console, no other page may frame it, and
#: nothing is cached.
_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
#: Paths of the forms of the login and of the logout.
LOGIN: Final = "/login"
LOGOUT: Final = "/logout"
#: Files that need no login.
_STATIC: Final = "/static/"
#: Largest form, and most fields.
_MAX_BYTES: Final = 1 << 20
_MAX_FIELDS: Final = 100
#: The prefix binds the cookie to this host and to TLS.
_SECURE_COOKIE: Final = "__Host-netshim"
_PLAIN_COOKIE: Final = "netshim"


class ConsoleGuard:
    """Refuses requests, finds their user, and adds the headers of each response."""

    def __init__(
        self,
        app: ASGIApp,
        access: ConsoleAccess,
        logins: ConsoleLogins,
        *,
        accepts_changes: bool,
    ) -> None:
        self._app = app
        self._access = access
        self._logins = logins
        self._accepts_forms = accepts_changes or access.needs_login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The console has no web sockets.
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = await self._refusal(Request(scope))
        app = self._app if refusal is None else refusal
        await app(scope, receive, send_with_headers)

    async def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request that is refused; None if it may pass."""
        reason = self._refusal_reason(request)
        if reason:
            return _text_response(reason, 403)
        path = request.url.path
        if path == LOGIN or path.startswith(_STATIC):
            viewer: ConsoleViewer | None = ConsoleViewer()
        elif self._access.is_open:
            viewer = ConsoleViewer(host=_address(request))
        else:
            # In a thread, because the users are read from the disk.
            try:
                viewer = await run_in_threadpool(self._viewer, request)
            except LogcoreError as error:
                return _text_response(f"the users cannot be read: {error}", 503)
        if viewer is not None:
            # viewer_of() and recheck_viewer() return these to pages.
            request.state.viewer = viewer
            request.state.recheck_viewer = partial(self._viewer, request)
            return None
        # Only a browser can use the login page. Scripts get a status.
        is_page = "text/html" in request.headers.get("accept", "")
        if request.method == "GET" and is_page:
            path = request.url.path
            if request.url.query:
                path += f"?{request.url.query}"
            return RedirectResponse(f"{LOGIN}?next={quote(path, safe='')}", 303)
        return _text_response("log in first", 401)

    def _refusal_reason(self, request: Request) -> str:
        """Return why a request is refused, or ""."""
        # 1. DNS rebinding: a name of another site that resolves to this address would
        # give that site the same origin as the console.
        if not names_this_host(request):
            return f"unknown host {request.headers.get('host', '')!r}"
        # 2. Browsers send the origin with each form. Other programs send none.
        origin = request.headers.get("origin")
        own_origin = f"{request.url.scheme}://{request.headers.get('host', '')}"
        if origin is not None and origin != own_origin:
            return "requests of other origins are refused"
        if request.method in ("GET", "HEAD"):
            return ""
        if request.method != "POST" or not self._accepts_forms:
            return "the console changes nothing: only GET and HEAD are answered"
        return ""

    def _viewer(self, request: Request) -> ConsoleViewer | None:
        """Return the user of a request, or None without a login. May block."""
        principal = ANONYMOUS
        if self._access.needs_login:
            session = self._logins.session(cookie_of(request))
            if session is None:
                return None
            principal = session.principal
        return self._access.viewer(principal, _address(request))


def _text_response(text: str, status: int) -> Response:
    return Response(text + "\n", status, media_type="text/plain")


def _address(request: Request) -> str:
    """Return the address of the browser."""
    return "" if request.client is None else request.client.host


def viewer_of(request: Request) -> ConsoleViewer:
    """Return the user of a request that ConsoleGuard has accepted."""
    viewer: ConsoleViewer = request.state.viewer
    return viewer


def recheck_viewer(request: Request) -> ConsoleViewer | None:
    """Return the user of a long request with the current rules; None after a logout.

    Blocks. Raises LogcoreError if the users cannot be read.
    """
    recheck: Callable[[], ConsoleViewer | None] = request.state.recheck_viewer
    return recheck()


# -- cookies and forms -----------------------------------------------------------------


def _cookie_name(request: Request) -> str:
    return _SECURE_COOKIE if request.url.scheme == "https" else _PLAIN_COOKIE


def cookie_of(request: Request) -> str:
    """Return the cookie of the session, or "" without a login."""
    return request.cookies.get(_cookie_name(request), "")


def set_cookie(request: Request, response: Response, cookie: str) -> None:
    """Set the cookie of a session; "" removes it."""
    response.set_cookie(
        _cookie_name(request),
        cookie,
        max_age=None if cookie else 0,
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        # Not sent with requests that another site begins.
        samesite="strict",
    )


def local_path(text: str) -> str:
    """Return the path to open after a login; "/" if the text is an address elsewhere."""
    # Browsers read "//" and "/\\" as the beginning of another host.
    is_local = text.startswith("/") and not text.startswith(("//", "/\\", LOGIN))
    return text if is_local and text.isascii() and text.isprintable() else "/"


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        HTTPException: it has another media type, or is too large.
    """
    content_type = (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
    )
    if content_type != "application/x-www-form-urlencoded":
        raise HTTPException(415, "expected a form")
    body = bytearray()
    async for chunk in request.stream():
        # Checked while reading: the length in the header may be missing or wrong.
        body += chunk
        if len(body) > _MAX_BYTES:
            raise HTTPException(413, f"a form has at most {_MAX_BYTES:,} bytes")
    try:
        fields = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS
        )
    except ValueError as error:
        raise HTTPException(400, f"expected a form: {error}") from None
    return dict(fields)
