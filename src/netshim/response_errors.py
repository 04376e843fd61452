"""The error codes in a response, wherever its API has them.

Kafka ends the name of each of these fields with `error_code`. They are in the response
and in the entries of its lists, at any depth.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from netshim.wire import codes
from netshim.wire.codec import Api
from netshim.wire.fields import Struct

#: Maximum number of entries of a list that first_error() searches. A search of 100,000
#: partitions would occupy the event loop.
_MAX_ENTRIES: Final = 100


def first_error(api: Api[Any, Any], response: object) -> int:
    """Return the first error code of a response, or 0.

    At most 100 entries of each list are searched.
    """
    if response is None:
        return codes.NONE
    for path in _paths(api):
        code = _first(response, path, 0)
        if code:
            return code
    return codes.NONE


def _first(value: Any, path: tuple[str, ...], depth: int) -> int:
    inner = getattr(value, path[depth], None)
    if depth == len(path) - 1:
        return inner or codes.NONE
    for entry in islice(inner or (), _MAX_ENTRIES):
        code = _first(entry, path, depth + 1)
        if code:
            return code
    return codes.NONE


@functools.cache
def _paths(api: Api[Any, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the fields that lead to each error code of a response.

    The result is cached, because metrics count the first error of every response.
    """
    return tuple(_paths_in(api.response.schema))


def _paths_in(struct: Struct) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for field in struct.fields:
        if field.name.endswith("error_code"):
            paths.append((field.name,))
        elif field.is_array and field.struct is not None:
            paths += [(field.name, *path) for path in _paths_in(field.struct)]
    return paths


def error_fields(response: Any) -> Iterator[tuple[Any, str]]:
    """Yield each struct of a response with an error, and the name of its field.

    `response` may be a part of a response, or a list of parts. A caller may change the
    code that was yielded.
    """
    if isinstance(response, list):
        for entry in response:
            yield from error_fields(entry)
        return
    for name in getattr(response, "__slots__", ()):
        value = getattr(response, name)
        if isinstance(value, list):
            # All elements of a list have one type. Numbers and texts hold no error.
            if value and hasattr(value[0], "__slots__"):
                yield from error_fields(value)
        elif value and name.endswith("error_code"):
            yield response, name


def errors_in(response: Any) -> list[tuple[int, str | None]]:
    """Return the nonzero error codes of a response, each with its message or None.

    CreateTopics reports in a separate field that the user may not read the settings of
    a created topic. This is not a refusal, so it is omitted.
    """
    return [
        (getattr(part, name), getattr(part, "error_message", None))
        for part, name in error_fields(response)
        if name != "topic_config_error_code"
    ]
