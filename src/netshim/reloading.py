"""The changes of a configuration file that a running broker applies.

A broker reads its file again on SIGHUP. It applies the settings in LIVE and the level of
its log, and creates topics that do not exist yet. Other changes need a restart. Options
on the command line and environment variables have priority over the file, as at the
start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import attrs

from netshim.config_file import ConfiguredTopic, FileSettings
from netshim.settings import Settings

#: Settings that a running broker can change, because no part of it has copied them.
#: Settings of connections apply to new connections.
LIVE: Final = frozenset(
    (
        "auto_create_topics",
        "auto_create_limit",
        "num_partitions",
        "max_partitions_per_request",
        "offset_metadata_max_bytes",
        "fetch_max_bytes",
        "max_request_bytes",
        "max_request_entries",
        "max_connections",
        "max_connections_per_address",
        "max_pipelined_requests",
        "max_unread_bytes",
        "request_timeout_ms",
        "idle_timeout_ms",
    )
)
#: The key of the level of the log, which is not a setting of the broker.
LOG_LEVEL: Final = "log_level"


@attrs.frozen
class FileChanges:
    """The differences of two versions of a configuration file."""

    #: New values by the name of the setting.
    settings: Mapping[str, Any]
    #: The new level of the log, or None if it is the same.
    log_level: str | None
    #: Topics to create. A topic that is missing in the new file is not deleted.
    topics: Sequence[ConfiguredTopic]
    #: Keys that take effect at the next start.
    need_restart: Sequence[str]
    #: The file that the broker follows afterwards: the new one, without these keys.
    applied: FileSettings


def changes_of(
    before: FileSettings, after: FileSettings, fixed: Collection[str]
) -> FileChanges:
    """Return the changes of a file. Options in `fixed` are not set by it.

    The level of the log is "info" if the file does not set it.
    """
    defaults = {field.name: field.default for field in attrs.fields(Settings)}
    defaults[LOG_LEVEL] = "info"
    live = {}
    need_restart = []
    for key in sorted({*before.options, *after.options}):
        # An option that the file no longer contains gets its default.
        default = defaults.get(key)
        new = after.options.get(key, default)
        if key in fixed or new == before.options.get(key, default):
            continue
        if key in LIVE or key == LOG_LEVEL:
            live[key] = new
        else:
            need_restart.append(key)
    if after.directory != before.directory and "directory" not in fixed:
        need_restart.append("directory")
    if after.config != before.config:
        need_restart.append("config")
    known_topics = {topic.name: topic for topic in before.topics}
    new_topics = [topic for topic in after.topics if topic.name not in known_topics]
    need_restart += [
        f"topics.{topic.name}"
        for topic in after.topics
        if topic.name in known_topics and topic != known_topics[topic.name]
    ]
    options = {
        **{key: option for key, option in before.options.items() if key not in live},
        **{key: after.options[key] for key in live if key in after.options},
    }
    topics = (*before.topics, *new_topics)
    applied = attrs.evolve(before, options=options, topics=topics, lines=after.lines)
    log_level = live.pop(LOG_LEVEL, None)
    return FileChanges(live, log_level, new_topics, need_restart, applied)
