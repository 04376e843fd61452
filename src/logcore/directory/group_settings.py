"""The file `logcore.groups`: settings of single groups of the consumer protocol.

Rules:
- The file is replaced atomically, with all changes of a request. A change takes effect
  when it is durable.
- The file may come from any source. All of its content is checked before any of it
  takes effect.

logcore.format.group_settings defines the settings. Topic settings are in topic_file.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from logcore.errors import CorruptLogError, InvalidConfigError, LogcoreError
from logcore.format import group_settings
from logcore.format.group_settings import HEARTBEAT_INTERVAL, SESSION_TIMEOUT, Settings
from logcore.fs import FS
from logcore.metadata import checkpoint


class GroupSettings:
    """Settings of the groups of one directory, read once.

    Any thread may read. Changes must be made one at a time.

    Raises:
        CorruptLogError: the file is damaged.
        StorageReadError: the file cannot be read.
    """

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self._path = path
        # Replaced as a whole by each change.
        self._settings = self._read()

    def names(self) -> list[str]:
        """Return the sorted names of the groups with own settings."""
        return sorted(self._settings)

    def of(self, group_id: str) -> Mapping[str, int]:
        """Return the settings of a group, in ms. The group need not exist."""
        return self._settings.get(group_id, {})

    def draft(self, defaults: Mapping[str, int]) -> Draft:
        """Return a copy to change and then pass to write().

        `defaults` are the values for groups without own settings.
        """
        return Draft(dict(self._settings), defaults)

    def write(self, draft: Draft) -> None:
        """Save a draft and put it into effect.

        If writing raises an error, the settings on disk remain in effect.
        """
        if draft.settings == self._settings:
            return
        content = checkpoint.pack_groups(group_settings.to_rows(draft.settings))
        try:
            checkpoint.write(self._fs, self._path, checkpoint.GROUPS, content)
        except BaseException:
            # If the file cannot be read either, the known settings remain in effect.
            with contextlib.suppress(LogcoreError):
                # The last sync may fail after the file was replaced.
                self._settings = self._read()
            raise
        self._settings = draft.settings

    def _read(self) -> Settings:
        content = checkpoint.read(self._fs, self._path, checkpoint.GROUPS)
        if content is None:
            return {}
        try:
            rows = checkpoint.unpack_groups(content)
            if rows is None:
                raise ValueError("rows of another CRC")
            return group_settings.from_rows(rows)
        except ValueError as error:
            raise CorruptLogError(
                "the file of groups' settings is damaged; restore it from a copy, or remove it and set them again",
                path=os.path.join(self._path, checkpoint.GROUPS),
                expected="names of groups, each with its settings",
                found=str(error),
            ) from error


class Draft:
    """New settings of groups. `settings` contains the settings that write() stores."""

    def __init__(self, settings: Settings, defaults: Mapping[str, int]) -> None:
        self.settings = settings
        self._id_bytes = group_settings.bytes_of_ids(settings)
        self._defaults = defaults

    def alter(self, group_id: str, changes: Mapping[str, object | None]) -> None:
        """Set values of a group in ms, or remove them (None). All changes are made, or
        none.

        Raises:
            InvalidConfigError: a name or value is invalid, two values contradict each
                other, or there are too many groups.
        """
        group_overrides = dict(self.settings.get(group_id, {}))
        for name, value in changes.items():
            group_overrides.pop(name, None)
            if value is not None:
                group_overrides[name] = group_settings.value_of(name, value)
        effective = {**self._defaults, **group_overrides}
        if (
            group_overrides
            and effective[HEARTBEAT_INTERVAL] >= effective[SESSION_TIMEOUT]
        ):
            raise InvalidConfigError(
                f"{HEARTBEAT_INTERVAL} of {effective[HEARTBEAT_INTERVAL]}",
                expected=f"less than {SESSION_TIMEOUT}",
                found=effective[SESSION_TIMEOUT],
            )
        existed = group_id in self.settings
        count = len(self.settings) + bool(group_overrides) - existed
        id_bytes = self._id_bytes + (bool(group_overrides) - existed) * len(
            group_id.encode()
        )
        group_settings.check_size(count, id_bytes)
        self._id_bytes = id_bytes
        self.settings.pop(group_id, None)
        if group_overrides:
            self.settings[group_id] = group_overrides
