"""The open logs of a directory: opens each log on first use.

Rules:
- A partition has one log here. If its user closed it, the next use opens it again.
- Reading `known` takes no lock. Opening or dropping a log requires the directory's
  lock.
- The leader epoch of a partition that is not open is read from its file once, because
  only its writer can start another epoch.

This module does not manage topics: the directory (logdir.py) lists the partitions.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping

import attrs

from logcore.claim import Claim
from logcore.config import Durability
from logcore.directory.incidents import Incidents
from logcore.directory.maintenance import DirectoryMaintenance, high_watermarks
from logcore.directory.topic_file import TopicEntry
from logcore.directory.topics import TopicRegistry
from logcore.errors import DiskFullError, LogcoreError, ResourceError
from logcore.fs import FS
from logcore.log import Log, OnCorruption, open_log
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import partition_name


@attrs.define(eq=False)
class OpenLogs:
    """The open logs of one directory."""

    _fs: FS
    _registry: TopicRegistry
    _claim: Claim | None
    _maintenance: DirectoryMaintenance
    _incidents: Incidents
    _on_corruption: OnCorruption
    _is_replicated: bool = attrs.field(kw_only=True, alias="is_replicated")
    #: By topic and partition. The user may have closed some of them.
    known: dict[Key, Log] = attrs.field(init=False, factory=dict)
    #: For each log in `known`, the topic id that it was opened for.
    _topic_ids: dict[Key, uuid.UUID | None] = attrs.field(init=False, factory=dict)
    #: True after close_all().
    is_released: bool = attrs.field(init=False, default=False)
    #: Cache for partitions that are not open.
    _leader_epochs: dict[Key, int] = attrs.field(init=False, factory=dict)

    def opened(self, key: Key) -> Log | None:
        """Return the log of a partition, or None if it is not open."""
        log = self.known.get(key)
        if log is None or log.is_closed:
            return None
        return log

    def all_open(self) -> dict[Key, Log]:
        # A copy, because another thread may open a log concurrently.
        return {key: log for key, log in self.known.copy().items() if not log.is_closed}

    def open(
        self,
        topic: TopicEntry,
        number: int,
        durability: Durability,
        committed: Callable[[str, int], Mapping[str, int]],
    ) -> Log:
        """Open a partition that is not open.

        `committed` returns consumer group -> committed offset of a partition, for
        retention that waits for groups.

        Raises:
            LogcoreError: see logcore.open().
        """
        key = (topic.name, number)
        path = self._registry.partition_path(*key)
        config = self._registry.settings(topic).as_mapping()
        self._registry.check_directory(path)
        if self._claim is None:
            log = self.known[key] = open_log(
                path, read_only=True, config=config, fs=self._fs
            )
        else:
            log = open_log(
                path,
                config=config,
                durability=durability,
                on_corruption=self._on_corruption,
                shared=self._claim.is_shared,
                replicated=self._is_replicated,
                fs=self._fs,
            )
            try:
                if self._is_replicated:
                    # Imported only by brokers of a cluster.
                    from logcore.partition.replication import begin_to_follow

                    # A replica has no role yet: another broker may lead the partition
                    # in the last epoch of the log.
                    begin_to_follow(log.host.writer)
                log.host.maintenance.retain_by(
                    self._maintenance.settings.retention, lambda: committed(*key)
                )
                self._maintenance.admit(key, log)
                self._topic_ids[key] = topic.topic_id
                self.known[key] = log
            # The caller does not get the log, so its claim would be held forever.
            except BaseException:
                log.close()
                raise
        if self._claim is not None:
            # Last, because tick() drops a log that is not open.
            self._maintenance.visit(key, log)
        # From now on the log has the epoch, which can increase.
        self._leader_epochs.pop(key, None)
        return log

    def stale_topics(self) -> set[str]:
        """Return topics with an open log of a deleted topic with the same name."""
        return {name for name, number in self.known if self._is_stale(name, number)}

    def _is_stale(self, name: str, number: int) -> bool:
        topic = self._registry.known.get(name)
        if topic is None or number not in topic.numbers:
            return True
        opened_for = self._topic_ids.get((name, number))
        return None not in (opened_for, topic.topic_id) and opened_for != topic.topic_id

    def close_all(
        self,
        all_keys: Collection[Key],
        before_close: Callable[[], None],
        *,
        is_forked: bool,
    ) -> None:
        """Close all logs, write their checkpoints at once, and release the claim.

        `all_keys` contains all partitions of the directory. `before_close` is called
        first. `is_forked` means that the claim belongs to the parent process. All logs
        are closed before the first error is raised.
        """
        try:
            before_close()
            self._close_all(all_keys, is_forked=is_forked)
            self.is_released = True
        # After an interrupt too, the remaining logs are closed and the directory is not
        # marked clean.
        except BaseException:
            for log in self.known.values():
                with contextlib.suppress(LogcoreError, OSError):
                    log.close()
            if self._claim is not None:
                self._claim.fail()
                self._claim.release()
            self.is_released = True
            raise

    def _close_all(self, all_keys: Collection[Key], *, is_forked: bool) -> None:
        logs = self.known
        failures: list[BaseException] = []
        try:
            self._maintenance.stop_compacting(*logs.values())
        except (LogcoreError, OSError) as error:
            failures.append(error)
        ends = high_watermarks(logs)
        claim = self._claim
        if claim is None or is_forked:
            for log in logs.values():
                log.close()
            self.known = {}
            return
        # All partitions were opened, and so checked: the directory may be marked as
        # clean. This comes before closing the logs, because closing syncs the indexes
        # that a clean directory relies on.
        if set(all_keys) <= set(logs):
            claim.call_clean()
        try:
            with claim.batched_recovery_points() as recovery_points:
                for log in logs.values():
                    try:
                        log.close()
                    # After any error the other logs are closed too.
                    except BaseException as error:
                        failures.append(error)
                        claim.fail()
                        # If an interrupt stopped close(), the second call completes it.
                        with contextlib.suppress(LogcoreError, OSError):
                            log.close()
            try:
                claim.checkpoints.set(
                    checkpoint.RECOVERY_POINT, recovery_points, may_use_reserve=True
                )
                self._maintenance.save_high_watermarks(ends)
            # All records are durable: the next opening only checks more.
            except (DiskFullError, ResourceError):
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
        """Close and drop the logs of deleted topics. A failure is reported as an
        incident.
        """
        self.close([key for key in self.known if key[0] in topics])
        # Reading threads may add entries concurrently.
        for key in [key for key in list(self._leader_epochs) if key[0] in topics]:
            self._leader_epochs.pop(key, None)

    def close(self, keys: Iterable[Key]) -> None:
        """Close and drop the logs of deleted partitions, like close_topics()."""
        for key in keys:
            log = self.known.get(key)
            if log is None:
                continue
            self._maintenance.stop_compacting(log)
            with self._incidents.reporting_errors("deletion", partition_name(*key)):
                log.close()
            # Last: after an interrupt, close_all() still finds the log.
            self.known.pop(key, None)
            self._topic_ids.pop(key, None)

    # -- leader epochs -----------------------------------------------------------------

    def leader_epoch(self, key: Key) -> int:
        """Return the leader epoch for appends to a partition.

        If the partition is not open, this is the last epoch in its file.
        """
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
        # In a read-only directory, the writer in another process may start another
        # epoch.
        if self._claim is not None:
            self._leader_epochs[key] = epoch
        return epoch

    def knows_leader_epoch(self, key: Key) -> bool:
        """Return whether leader_epoch() works without reading a file."""
        return self._claim is not None and (
            self.opened(key) is not None or key in self._leader_epochs
        )
