"""Topic ids: finds the id of a topic, and the topic of an id.

The names are read again when the topics of the directory have changed.
"""

from __future__ import annotations

import contextlib
from typing import Final

from logcore import TopicNotFoundError
from netshim.served_directory import ServedDirectory

#: The topic id that means "none".
NO_ID: Final = bytes(16)


class TopicIds:
    """The ids of the topics of a directory."""

    def __init__(self, logdir: ServedDirectory) -> None:
        self._logdir = logdir
        #: topic id -> name, when topics_version was _version.
        self._names: dict[bytes, str] = {}
        self._version = -1

    def id_of(self, topic: str) -> bytes:
        """Return the id of a topic.

        Raises:
            TopicNotFoundError: the topic does not exist.
        """
        return self._logdir.topic_id(topic).bytes

    def name_of(self, topic_id: bytes) -> str | None:
        """Return the name of a topic by its id, or None if there is no such topic."""
        if self._logdir.is_shared and topic_id not in self._names:
            self._logdir.refresh()  # another process may have created it
        version = self._logdir.host.topics_version
        if version != self._version:
            names: dict[bytes, str] = {}
            for name in self._logdir.topics():
                # If the topic is deleted concurrently, topics_version changes too.
                with contextlib.suppress(TopicNotFoundError):
                    names[self.id_of(name)] = name
            names.pop(NO_ID, None)
            self._names = names
            self._version = version
        return self._names.get(topic_id)
