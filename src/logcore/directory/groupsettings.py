"""The file `logcore.groups`: what single groups of the consumer protocol are set to, by Kafka's names.

Rules:
- The file is replaced in one step. A change counts when it is on disk.
- The file may come from anywhere. All that it says is checked before any of it counts.

Not here: what a setting does (logcore.coordination.heartbeats), and settings of topics (topicfile.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Final

from logcore import checkpoint
from logcore.config import INT32_MAX
from logcore.errors import CorruptLogError, InvalidConfigError, LogcoreError
from logcore.fs import FS

SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"
#: Name -> the least value. The largest is that of an int32.
_LEAST: Final = {SESSION_TIMEOUT: 300, HEARTBEAT_INTERVAL: 100}
#: Groups that have settings: the file is read and written as a whole.
_MOST_GROUPS: Final = 100_000
#: Of a group's id, as in a record.
_MOST_ID_BYTES: Final = 32_000


class GroupSettings:
    """Settings of the groups of one directory, read once. All methods may be called from several threads.

    Raises CorruptLogError for a file that cannot be believed, and StorageReadError.
    """

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self._path = path
        self._lock = threading.Lock()
        self._by_group = self._read()  # replaced as a whole, under the lock

    def names(self) -> list[str]:
        """The groups that have settings of their own, sorted."""
        return sorted(self._by_group)

    def of(self, group_id: str) -> Mapping[str, int]:
        """What a group is set to; it need not exist."""
        return self._by_group.get(group_id, {})

    def alter(
        self,
        group_id: str,
        changes: Mapping[str, object | None],
        *,
        defaults: Mapping[str, int],
        check_only: bool = False,
    ) -> None:
        """Sets values, in ms, or takes them back (None), all of them or none. defaults: what holds for other groups.

        Raises InvalidConfigError for a name, a value or two values that do not go together, and what writing raises.
        """
        with self._lock:
            own = dict(self.of(group_id))
            for name, value in changes.items():
                if value is None:
                    own.pop(name, None)
                elif name in _LEAST:
                    own[name] = _parsed(name, value)
                else:
                    raise InvalidConfigError(f"unknown setting of a group {name!r:.80}", expected=f"one of {[*_LEAST]}")
            together = {**defaults, **own}
            if own and together[HEARTBEAT_INTERVAL] >= together[SESSION_TIMEOUT]:
                raise InvalidConfigError(
                    f"{HEARTBEAT_INTERVAL} of {together[HEARTBEAT_INTERVAL]}",
                    expected=f"less than {SESSION_TIMEOUT}",
                    found=together[SESSION_TIMEOUT],
                )
            changed = {name: settings for name, settings in self._by_group.items() if name != group_id}
            if own:
                changed[group_id] = own
            _check_size(group_id, changed)
            if check_only or changed == self._by_group:
                return
            rows = [{"group": name, "config": settings} for name, settings in sorted(changed.items())]
            try:
                checkpoint.write(self._fs, self._path, checkpoint.GROUPS, checkpoint.pack_groups(rows))
            except BaseException:
                with contextlib.suppress(LogcoreError):  # where it cannot be read either, what was known goes on
                    self._by_group = self._read()  # the last sync may fail when the file is there
                raise
            self._by_group = changed

    def _read(self) -> dict[str, dict[str, int]]:
        content = checkpoint.read(self._fs, self._path, checkpoint.GROUPS)
        if content is None:
            return {}
        rows = checkpoint.unpack_groups(content)
        try:
            if rows is None:
                raise ValueError("the CRC is that of other rows")
            found = {}
            for row in rows:
                group_id = str(row["group"])
                found[group_id] = {str(name): _parsed(name, value) for name, value in row["config"].items()}
                _check_size(group_id, found)
        except (ValueError, KeyError, TypeError, AttributeError, InvalidConfigError) as error:
            raise CorruptLogError(
                "the file of groups' settings is damaged; restore it from a copy, or remove it and set them again",
                path=os.path.join(self._path, checkpoint.GROUPS),
                expected="names of groups, each with its settings",
                found=str(error),
            ) from error
        return found


def _parsed(name: str, value: object) -> int:
    """The value of a setting. Raises InvalidConfigError."""
    least = _LEAST.get(name)
    text = str(value)
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(INT32_MAX))
    if least is None or not is_number or not least <= int(text) <= INT32_MAX:
        raise InvalidConfigError(
            f"setting {name!r:.80} of a group", expected=f"{least} to {INT32_MAX}", found=repr(text[:80])
        )
    return int(text)


def _check_size(group_id: str, groups: Mapping[str, object]) -> None:
    if len(group_id.encode()) > _MOST_ID_BYTES:
        raise InvalidConfigError("the id of a group is too long", expected=f"at most {_MOST_ID_BYTES} bytes")
    if len(groups) > _MOST_GROUPS:
        raise InvalidConfigError("groups with settings", expected=f"at most {_MOST_GROUPS}", found=len(groups))
