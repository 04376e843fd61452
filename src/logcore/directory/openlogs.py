"""The logs that are open in a directory: each is opened when it is first asked for, and kept until it is closed.

Rules:
- A partition has one log here. A log that its user has closed is opened again when it is next asked for.
- A look at `known` takes no lock. Whatever opens or forgets a log is called under the directory's lock.
- The leader epoch of a partition that is not open is read from its file, once: only its writer may begin another.

This module knows no topics: the directory (logdir.py) says which partitions exist.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Mapping

from logcore import checkpoint
from logcore.checkpoint import Key
from logcore.claim import Claim
from logcore.config import Durability
from logcore.directory.incidents import Incidents
from logcore.directory.topicfile import TopicEntry
from logcore.directory.topics import TopicRegistry
from logcore.directory.upkeep import Upkeeper, high_watermarks
from logcore.errors import DiskFullError, LogcoreError, ResourceError
from logcore.fs import FS
from logcore.log import Log, OnCorruption, open_log
from logcore.names import partition_name


class OpenLogs:
    """The open logs of one directory. known: by topic and partition; its user may have closed some of them since."""

    def __init__(
        self,
        fs: FS,
        registry: TopicRegistry,
        claim: Claim | None,
        upkeeper: Upkeeper,
        incidents: Incidents,
        on_corruption: OnCorruption,
    ) -> None:
        self._fs = fs
        self._registry = registry
        self._claim = claim
        self._upkeeper = upkeeper
        self._incidents = incidents
        self._on_corruption: OnCorruption = on_corruption
        self.known: dict[Key, Log] = {}
        self._topic_ids: dict[Key, uuid.UUID | None] = {}  # of `known`: the topic that each log was opened for
        self.is_released = False  # close_all() has run
        self._leader_epochs: dict[Key, int] = {}  # of logs that are not open, as far as they were asked for

    def opened(self, key: Key) -> Log | None:
        """The log of a partition if it is open now."""
        log = self.known.get(key)
        if log is None or log.is_closed:
            return None
        return log

    def all_open(self) -> dict[Key, Log]:
        # A copy, because another thread may open a log meanwhile.
        return {key: log for key, log in self.known.copy().items() if not log.is_closed}

    def open(
        self,
        topic: TopicEntry,
        number: int,
        durability: Durability,
        committed: Callable[[str, int], Mapping[str, int]],
    ) -> Log:
        """Opens a partition that is not open. Raises what logcore.open() raises.

        committed: consumer group -> committed offset of a partition, for retention that waits for groups.
        """
        key = (topic.name, number)
        path = self._registry.partition_path(*key)
        config = self._registry.settings(topic).as_mapping()
        self._registry.check_directory(path)
        if self._claim is None:
            log = self.known[key] = open_log(path, read_only=True, config=config, fs=self._fs)
        else:
            log = open_log(
                path,
                config=config,
                durability=durability,
                on_corruption=self._on_corruption,
                shared=self._claim.is_shared,
                fs=self._fs,
            )
            try:
                log.upkeep.retain_by(self._upkeeper.settings.retention, lambda: committed(*key))
                self._upkeeper.admit(key, log)
                self._topic_ids[key] = topic.topic_id
                self.known[key] = log
            except BaseException:  # the caller never gets the log, and its claim would be held forever
                log.close()
                raise
        if self._claim is not None:
            self._upkeeper.visit(key, log)  # last: a tick() drops a log that is not among the open ones
        self._leader_epochs.pop(key, None)  # from now on the log knows, and it may rise
        return log

    def stale_topics(self) -> set[str]:
        """Topics with an open log that is not theirs: the topic was deleted, and perhaps created again."""
        return {name for name, number in self.known if self._is_stale(name, number)}

    def _is_stale(self, name: str, number: int) -> bool:
        topic = self._registry.known.get(name)
        if topic is None or number not in topic.numbers:
            return True
        opened_for = self._topic_ids.get((name, number))
        return None not in (opened_for, topic.topic_id) and opened_for != topic.topic_id

    def close_all(self, everything: Collection[Key], before: Callable[[], None], *, is_forked: bool) -> None:
        """Closes and forgets all logs, writes the checkpoints once for all of them, and releases the claim.

        everything: the partitions of the directory. before: called first. is_forked: the claim is that of a parent
        process. Raises the first error, after all logs were closed.
        """
        try:
            before()
            self._close_all(everything, is_forked=is_forked)
        except BaseException:  # also an interrupt at any place: what is still open is closed, and called not clean
            for log in self.known.values():
                with contextlib.suppress(LogcoreError, OSError):
                    log.close()
            if self._claim is not None:
                self._claim.fail()
                self._claim.release()
            self.is_released = True
            raise
        self.is_released = True

    def _close_all(self, everything: Collection[Key], *, is_forked: bool) -> None:
        logs = self.known
        failures: list[BaseException] = []
        try:
            self._upkeeper.stop_compacting(*logs.values())
        except (LogcoreError, OSError) as error:
            failures.append(error)
        ends = high_watermarks(logs)
        claim = self._claim
        if claim is None or is_forked:
            for log in logs.values():
                log.close()
            self.known = {}
            return
        # All partitions were opened, and so checked: the directory may be marked as clean. Before they are closed,
        # because closing syncs the indexes that a clean directory is believed.
        if set(everything) <= set(logs):
            claim.call_clean()
        try:
            with claim.gathering() as recovery_points:
                for log in logs.values():
                    try:
                        log.close()
                    except BaseException as error:  # whatever it is, the others are closed too
                        failures.append(error)
                        claim.fail()
            try:
                claim.checkpoints.set(checkpoint.RECOVERY_POINT, recovery_points, may_use_reserve=True)
                self._upkeeper.save_high_watermarks(ends)
            except (DiskFullError, ResourceError):  # all records are on disk: the next opening only checks more
                claim.fail()
            except (LogcoreError, OSError) as error:
                failures.append(error)
                claim.fail()
            claim.leave()
        finally:
            claim.release()
        self.known = {}
        if failures:
            raise failures[0]

    def close_topics(self, topics: Collection[str]) -> None:
        """Closes and forgets the logs of topics that are being deleted. What fails of it is an incident."""
        for key in [key for key in self.known if key[0] in topics]:
            log = self.known.pop(key)
            self._topic_ids.pop(key, None)
            self._upkeeper.stop_compacting(log)
            with self._incidents.going_on("deletion", partition_name(*key)):
                log.close()
        for key in [key for key in list(self._leader_epochs) if key[0] in topics]:  # threads that read may add some
            self._leader_epochs.pop(key, None)

    # -- leader epochs -----------------------------------------------------------------------------------------------

    def leader_epoch(self, key: Key) -> int:
        """The epoch that records appended to a partition are stamped with; if it is not open, what its file says."""
        log = self.opened(key)
        if log is not None and self._claim is not None:
            return log.leader_epoch
        epoch = self._leader_epochs.get(key)
        if epoch is not None:
            return epoch
        epochs = checkpoint.read_epochs(self._fs, self._registry.partition_path(*key))
        epoch = 0
        if epochs:
            epoch = epochs[-1][0]
        if self._claim is not None:  # else its writer, in another process, may begin another
            self._leader_epochs[key] = epoch
        return epoch

    def knows_leader_epoch(self, key: Key) -> bool:
        """Whether leader_epoch() reads no file."""
        return self._claim is not None and (self.opened(key) is not None or key in self._leader_epochs)
