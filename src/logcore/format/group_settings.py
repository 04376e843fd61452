"""Settings of single groups of the consumer protocol, by Kafka's names: allowed values,
and the rows of the file `logcore.groups`.

This module checks settings from a file or a client. logcore.directory.group_settings
reads and writes the file, and logcore.coordination.consumer_transitions applies the
settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from logcore.errors import InvalidConfigError

SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"
_INT32_MAX: Final = 2**31 - 1
#: Minimum value of each setting, in ms. The maximum is the maximum of an int32.
_MINIMUM_MS: Final = {SESSION_TIMEOUT: 300, HEARTBEAT_INTERVAL: 100}
#: Limits of the number of groups and of the bytes in all their ids, because the file is
#: read and written as a whole.
MAX_GROUPS: Final = 10_000
MAX_ID_BYTES: Final = 4 << 20

#: Group id -> name -> value in ms.
Settings = dict[str, dict[str, int]]


def value_of(name: str, value: object) -> int:
    """Return the checked value of a setting.

    Raises:
        InvalidConfigError: the name is unknown, or the value is invalid.
    """
    least = _MINIMUM_MS.get(name)
    if least is None:
        raise InvalidConfigError(
            f"unknown setting of a group {name!r:.80}",
            expected=f"one of {[*_MINIMUM_MS]}",
        )
    text = str(value)
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_INT32_MAX))
    if not is_number or not least <= int(text) <= _INT32_MAX:
        raise InvalidConfigError(
            f"setting {name!r} of a group",
            expected=f"{least} to {_INT32_MAX}",
            found=text[:80],
        )
    return int(text)


def check_size(count: int, id_bytes: int) -> None:
    """Check the number of groups and the bytes of their ids.

    Raises:
        InvalidConfigError: the file may not hold that many groups or bytes.
    """
    if count > MAX_GROUPS:
        raise InvalidConfigError(
            "groups with settings", expected=f"at most {MAX_GROUPS}", found=count
        )
    if id_bytes > MAX_ID_BYTES:
        raise InvalidConfigError(
            "ids of groups with settings",
            expected=f"{MAX_ID_BYTES} bytes",
            found=id_bytes,
        )


def bytes_of_ids(settings: Iterable[str]) -> int:
    """Return the total number of bytes of the ids of groups."""
    return sum(len(group_id.encode()) for group_id in settings)


def to_rows(settings: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """Return one row per group, sorted by group id."""
    return [
        {"group": group_id, "config": dict(own)}
        for group_id, own in sorted(settings.items())
    ]


def from_rows(rows: Iterable[Any]) -> Settings:
    """Reverse to_rows().

    Raises:
        ValueError: a row is invalid; the text is the reason.
    """
    settings: Settings = {}
    try:
        for row in rows:
            group_id = str(row["group"])
            if group_id in settings:
                raise ValueError(f"group {group_id!r:.80} twice")
            settings[group_id] = {
                str(name): value_of(name, value)
                for name, value in row["config"].items()
            }
        check_size(len(settings), bytes_of_ids(settings))
    except (KeyError, TypeError, AttributeError, InvalidConfigError) as error:
        raise ValueError(str(error)) from error
    return settings
