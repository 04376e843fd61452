"""Pages as HTML: the templates, and the functions that they use.

Templates escape every value.
"""

from __future__ import annotations

import functools
from typing import Any, Final
from urllib.parse import quote, urlencode

import jinja2
from starlette.requests import Request
from starlette.responses import Response

import logcore
from logcore.format.html import format_size, format_time
from logcore.kernels.layout import HEADER_NAME_ERRORS
from netshim.console.access import ConsoleViewer
from netshim.console.directory import DirectoryView
from netshim.console.guard import cookie_of
from netshim.console.logins import ConsoleLogins
from netshim.console.values import show, visible

#: Media type of the pages.
_TEXT_TYPE: Final = "text/html; charset=utf-8"
#: Titles of error pages by status.
_TITLES: Final = {
    400: "Not a valid request",
    403: "Not allowed",
    404: "Not found",
    405: "Not a valid request",
    409: "Nothing was changed",
    413: "Not a valid request",
    415: "Not a valid request",
    429: "Too many logins",
    500: "Error",
    501: "A package is missing",
}


class PageRenderer:
    """Renders the pages of one console."""

    def __init__(self, view: DirectoryView, logins: ConsoleLogins) -> None:
        self._view = view
        self._logins = logins
        #: Shared by all consoles of the process, because compiled templates have no
        #: state.
        self.templates = _environment()

    def render(
        self, file: str, request: Request, status: int = 200, /, **variables: Any
    ) -> Response:
        """Return a page. `variables` are passed to its template."""
        view = self._view
        viewer: ConsoleViewer = getattr(request.state, "viewer", ConsoleViewer())
        section = file.removesuffix(".html")
        # The login page shows neither the path of the directory nor the navigation.
        is_inside = section != "login"
        context: dict[str, Any] = {
            "request": request,
            "path": view.path if is_inside else "",
            "section": section,
            "problem": "",
            "has_broker": view.broker is not None and viewer.may_see_cluster(),
            "has_pages": is_inside,
            "can_change": view.changes is not None,
            "user": viewer.principal if view.access.needs_login else "",
            "done": request.query_params.get("done", ""),
            # In the form of the logout and in those of changes.
            "form_token": self._logins.form_token(cookie_of(request)),
            "version": logcore.__version__,
            "now_ms": view.fs.now_ms(),
            # The values of the page replace the common ones.
            **variables,
        }
        text = self.templates.get_template(file).render(context)
        # Names may contain bytes that are not UTF-8.
        return Response(text.encode("utf-8", "replace"), status, media_type=_TEXT_TYPE)

    def address(self, *parts: object, **parameters: object) -> str:
        """Return the address of a page; parameters that are None or "" are left out."""
        return _url(*parts, **parameters)

    def error(self, request: Request, status: int, text: str) -> Response:
        """Return the page of an error."""
        title = "The directory cannot be read"
        if request.method == "POST":
            title = "The change failed"
        title = _TITLES.get(status, title)
        return self.render(
            "error.html", request, status, title=title, text=visible(text)
        )


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the templates, which are compiled once, with the functions that they use."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("netshim.console"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelled variable is an error, not an empty text.
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        number=_number, size=format_size, utc=format_time, iso=_iso, visible=visible,
        age=_age,
    )  # fmt: skip
    functions: dict[str, Any] = {
        "url": _url,
        "show": show,
        "header_bytes": _header_bytes,
    }
    environment.globals.update(functions)
    return environment


def _number(value: int) -> str:
    return f"{value:,}"


def _iso(timestamp_ms: int) -> str:
    return format_time(timestamp_ms).replace(" ", "T") + "Z"


def _age(duration_ms: int) -> str:
    """Return a duration in its largest unit, such as 3 h."""
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        # From two units on, because "1 h" could also mean 119 minutes.
        if abs(duration_ms) >= 2 * size_ms:
            return f"{duration_ms // size_ms} {unit}"
    return f"{duration_ms // 1000} s"


def _url(*parts: object, **parameters: object) -> str:
    """Return the address of a page; parameters that are None or "" are left out."""
    path = "/" + "/".join(quote(str(part), safe="") for part in parts)
    pairs = {
        # `from_` in a template becomes `from`, which is a keyword of Python.
        name.rstrip("_"): parameter
        for name, parameter in parameters.items()
        if parameter not in (None, "")
    }
    return f"{path}?{urlencode(pairs)}" if pairs else path


def _header_bytes(name: str) -> bytes:
    return name.encode("utf-8", HEADER_NAME_ERRORS)
