"""The file `logcore.groups`: what single groups of the consumer protocol are set to.

Rules:
- The file is replaced in one step, with all changes of a request. A change counts when it is on disk.
- The file may come from anywhere. All that it says is checked before any of it counts.

Not here: what may be set (logcore.format.groupsettings), and settings of topics (topicfile.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from logcore import checkpoint
from logcore.errors import CorruptLogError, InvalidConfigError, LogcoreError
from logcore.format import groupsettings
from logcore.format.groupsettings import HEARTBEAT_INTERVAL, SESSION_TIMEOUT, Settings
from logcore.fs import FS


class GroupSettings:
    """Settings of the groups of one directory, read once. Any thread may read; changes are made one after the other.

    Raises CorruptLogError for a file that cannot be believed, and StorageReadError.
    """

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self._path = path
        self._settings = self._read()  # replaced as a whole, by who makes a change

    def names(self) -> list[str]:
        """The groups that have settings of their own, sorted."""
        return sorted(self._settings)

    def of(self, group_id: str) -> Mapping[str, int]:
        """What a group is set to, in ms; it need not exist."""
        return self._settings.get(group_id, {})

    def draft(self, defaults: Mapping[str, int]) -> Draft:
        """A copy to be changed, and then given to write(). defaults: what holds for groups without settings."""
        return Draft(dict(self._settings), defaults)

    def write(self, draft: Draft) -> None:
        """Takes a draft over. Raises what writing raises; then what is on disk counts."""
        if draft.settings == self._settings:
            return
        content = checkpoint.pack_groups(groupsettings.to_rows(draft.settings))
        try:
            checkpoint.write(self._fs, self._path, checkpoint.GROUPS, content)
        except BaseException:
            with contextlib.suppress(LogcoreError):  # where it cannot be read either, what was known goes on
                self._settings = self._read()  # the last sync may fail after the file was replaced
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
            return groupsettings.from_rows(rows)
        except ValueError as error:
            raise CorruptLogError(
                "the file of groups' settings is damaged; restore it from a copy, or remove it and set them again",
                path=os.path.join(self._path, checkpoint.GROUPS),
                expected="names of groups, each with its settings",
                found=str(error),
            ) from error


class Draft:
    """What groups are to be set to. settings: all of them, as they would be written."""

    def __init__(self, settings: Settings, defaults: Mapping[str, int]) -> None:
        self.settings = settings
        self._id_bytes = groupsettings.bytes_of_ids(settings)
        self._defaults = defaults

    def alter(self, group_id: str, changes: Mapping[str, object | None]) -> None:
        """Sets values of a group, in ms, or takes them back (None), all of them or none.

        Raises InvalidConfigError for a name, a value, two values that do not go together, and too many groups.
        """
        own = dict(self.settings.get(group_id, {}))
        for name, value in changes.items():
            own.pop(name, None)
            if value is not None:
                own[name] = groupsettings.value_of(name, value)
        together = {**self._defaults, **own}
        if own and together[HEARTBEAT_INTERVAL] >= together[SESSION_TIMEOUT]:
            raise InvalidConfigError(
                f"{HEARTBEAT_INTERVAL} of {together[HEARTBEAT_INTERVAL]}",
                expected=f"less than {SESSION_TIMEOUT}",
                found=together[SESSION_TIMEOUT],
            )
        before = group_id in self.settings
        count = len(self.settings) + bool(own) - before
        id_bytes = self._id_bytes + (bool(own) - before) * len(group_id.encode())
        groupsettings.check_size(count, id_bytes)
        self._id_bytes = id_bytes
        self.settings.pop(group_id, None)
        if own:
            self.settings[group_id] = own
