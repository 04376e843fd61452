"""Parses the parameters of pages. An invalid parameter is answered with status 400 before
any record is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

from logcore.cli.arguments import timestamp_of
from logcore.cli.filters import Where
from logcore.config import INT64_MAX
from logcore.metadata.filenames import is_topic_name
from netshim.console.directory import OpenDirectory
from netshim.console.messages import DEFAULT_COUNT, MAX_COUNT, MessageQuery
from netshim.console.values import visible

#: Partition and offset pairs, such as 0:17,1:4.
_OFFSETS: Final = re.compile(r"\d{1,10}:\d{1,19}(,\d{1,10}:\d{1,19})*")
#: Longest text of a search, in characters.
_MAX_TEXT: Final = 1_000
#: The last millisecond of the year 9999.
_LAST_MS: Final = 253_402_300_799_999


def bad_request(text: str) -> HTTPException:
    """Return the error for an invalid parameter."""
    return HTTPException(400, text)


def _quoted(text: str) -> str:
    """Return a parameter in a form that is safe in an error."""
    return repr(visible(text[:80]))


def topic_of(request: Request, directory: OpenDirectory) -> str:
    """Return the topic in the path.

    Raises:
        HTTPException: the path contains no valid topic name.
        TopicNotFoundError: the topic does not exist.
    """
    name = request.path_params["topic"]
    if not is_topic_name(name):
        raise bad_request(
            "expected the name of a topic: 1 to 249 letters, digits, '.', '_' "
            f"or '-'; found {_quoted(name)}"
        )
    directory.check(name)
    return str(name)


def number_of(text: str, name: str, maximum: int) -> int:
    """Return a number from 0 to `maximum`. Raises HTTPException."""
    # The length is checked before int(), which takes quadratic time.
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= maximum:
        return int(text)
    raise bad_request(
        f"{name}: expected a number from 0 to {maximum}; found {_quoted(text)}"
    )


def partition_of_request(
    request: Request, directory: OpenDirectory, topic: str
) -> int | None:
    """Return the chosen partition, None for all.

    Raises:
        HTTPException: the parameter is not a number.
        TopicNotFoundError: the partition does not exist.
    """
    text = request.query_params.get("partition", "")
    if not text:
        return None
    number = number_of(text, "partition", 2**31 - 1)
    directory.check(topic, number)
    return number


def query_of(
    request: Request, directory: OpenDirectory, topic: str, now_ms: int
) -> MessageQuery:
    """Return the query that the parameters of a page describe.

    Raises:
        HTTPException: a parameter is invalid.
        TopicNotFoundError: the partition does not exist.
    """
    parameters = request.query_params
    numbers = directory.topics[topic]
    number = partition_of_request(request, directory, topic)
    if number is not None:
        numbers = (number,)
    text = _search_text(parameters, "q")
    count = number_of(parameters.get("count", str(DEFAULT_COUNT)), "count", MAX_COUNT)
    # `until` continues backward, and `since` forward. Both come from links of a page.
    offsets = _parse_offsets(parameters, "until")
    is_backward = offsets is not None
    time_ms = None
    if offsets is None:
        since = _parse_offsets(parameters, "since")
        start = parameters.get("from", "").strip()
        is_backward, offsets, time_ms = _parse_start(start, numbers, now_ms)
        if since is not None:
            # Partitions that the link does not name begin at `from`.
            is_backward = False
            offsets = {**offsets, **since}
    return MessageQuery(
        partitions=numbers,
        is_backward=is_backward,
        start_offsets=offsets,
        time_ms=time_ms,
        text=text,
        where=_parse_where(_search_text(parameters, "where").strip()),
        count=max(1, count),
    )


def _search_text(parameters: Mapping[str, str], name: str) -> str:
    """Return a text to search, which may be empty."""
    text = parameters.get(name, "")
    if len(text) > _MAX_TEXT:
        raise bad_request(
            f"{name}: expected at most {_MAX_TEXT} characters; found {len(text)}"
        )
    if visible(text) != text:
        raise bad_request(f"{name}: expected visible characters; found {_quoted(text)}")
    return text


def _parse_where(text: str) -> Where | None:
    """Return the condition of `logcore read --where`, without regular expressions.

    A regular expression that backtracks would block every thread of the process, and
    Python has no time limit for it.
    """
    if not text:
        return None
    import click

    try:
        where = Where.parse([text])
    except click.BadParameter as error:
        raise bad_request(f"where: {error.message}") from error
    if where is not None and any(condition.pattern for condition in where.conditions):
        raise bad_request(
            "where: expected = or !=, since a page does not search for regular "
            f"expressions; found {_quoted(text)}. Use logcore read --where"
        )
    return where


def _parse_offsets(parameters: Mapping[str, str], name: str) -> dict[int, int] | None:
    """Return the offsets in the link to another page, such as 0:17,1:4."""
    text = parameters.get(name, "")
    if not text:
        return None
    # More than 3,000 partitions with the longest numbers.
    if len(text) > 100_000 or not _OFFSETS.fullmatch(text):
        raise bad_request(
            f"{name}: expected PARTITION:OFFSET,...; found {_quoted(text)}"
        )
    pairs = (number.split(":") for number in text.split(","))
    return {int(number): min(int(offset), INT64_MAX) for number, offset in pairs}


def _parse_start(
    text: str, numbers: tuple[int, ...], now_ms: int
) -> tuple[bool, dict[int, int], int | None]:
    """Return the direction, the offsets and the time for the parameter `from`."""
    if text in ("", "newest", "latest"):
        return True, {}, None
    if text in ("oldest", "earliest"):
        return False, {}, None
    if text.isascii() and text.isdigit():
        offset = number_of(text, "from", INT64_MAX)
        return False, dict.fromkeys(numbers, offset), None
    # A time or an age.
    time_ms = timestamp_of(text, now_ms)
    if time_ms is None or not 0 <= time_ms <= _LAST_MS:
        raise bad_request(
            "from: expected an offset, newest, oldest, a time from 1970 to 9999 such as "
            f"2026-01-31T12:00:00Z, or an age such as -10m; found {_quoted(text)}"
        )
    return False, {}, time_ms
