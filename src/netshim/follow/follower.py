"""Copies topics of a source into a log directory, and promotes the copy.

Rules:
- The only progress is the end of each copy, so that a crash repeats or loses nothing.
- A copied topic has the setting `mirror.source`, with the ids of the cluster and the
  topic. Other writers are refused.
- The file `logcore.follow` records whether the copy has ever caught up. A partial copy is
  promoted only on request.
- A partition that cannot continue stops with an error, and the others continue.

rules.py decides. step() does a small amount of work in the thread of the caller.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

import attrs

from logcore.config import LogConfig
from logcore.errors import (
    DivergedError,
    InvalidConfigError,
    LogcoreError,
    RemoteTopicError,
    RemoteUnavailableError,
    ShippingError,
)
from logcore.log import Log
from logcore.logdir import LogDir
from logcore.metadata import checkpoint
from logcore.reporting import WARNING, log_line
from netshim.follow import rules
from netshim.follow.rules import (
    Append,
    AwaitMetadata,
    CopyPosition,
    Policies,
    SkipGap,
    StopCopy,
    Truncate,
)
from netshim.follow.source import FetchPosition, Partition, Source, SourceTopic

_PROGRESS_FILE: Final = "logcore.follow"
#: Time between two reads of the source's metadata.
_REFRESH_S: Final = 5.0
#: Delay after the first failure. It doubles up to the maximum.
_FIRST_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 10.0

State = Literal["connecting", "copying", "idle", "waiting", "stopped"]


@attrs.define(eq=False)
class _PartitionCopy:
    """One copied partition."""

    topic_id: bytes
    log: Log
    #: Node id of the source's leader; -1 if there is none.
    leader: int = -1
    #: The source's log start offset.
    source_start: int = 0
    #: The source's high watermark.
    source_end: int = 0
    #: The offset after a gap at which the copy continues.
    skip_to: int | None = None
    #: Why the copy has stopped. None while it continues.
    failure: LogcoreError | None = None

    @property
    def next_offset(self) -> int:
        if self.skip_to is not None:
            return self.skip_to
        # Only a copy that never had a record begins at the source's start. In any
        # other copy, the offsets in between are a gap.
        return self.log.log_end_offset or self.source_start

    @property
    def _is_empty(self) -> bool:
        return self.log.log_start_offset == self.log.log_end_offset

    @property
    def position(self) -> FetchPosition:
        # With an epoch, the source checks whether its log and the copy agree up to the
        # offset (KIP-595). A copy without records, or before a gap, has none to compare.
        epoch = -1
        if self.skip_to is None and not self._is_empty:
            epoch = self.log.leader_epoch
        return FetchPosition(self.topic_id, self.next_offset, epoch)

    @property
    def lag(self) -> int:
        return max(0, self.source_end - self.next_offset)


@attrs.frozen(kw_only=True)
class FollowMetrics:
    """The progress of a follower."""

    state: State
    #: Bytes appended since the follower was created.
    size_bytes: int
    #: Offsets of the source that the copies lack, in total and by partition.
    lag_records: int
    lags: Mapping[Partition, int]
    #: Truncations after an unclean election in the source.
    truncation_count: int
    #: Offsets that the source deleted before they were copied.
    skipped_offsets: int
    #: Stopped partitions, with the reason.
    failures: Mapping[Partition, str]
    #: Why the follower waits.
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics for JSON."""
        fields = attrs.asdict(self)
        for field in ("lags", "failures"):
            fields[field] = {
                f"{topic}-{number}": value
                for (topic, number), value in fields[field].items()
            }
        return fields


class Follower:
    """Copies topics; see the top of this module. Used by one thread."""

    def __init__(
        self,
        logdir: LogDir,
        source: Source,
        *,
        topics: Iterable[str],
        with_internal: bool = False,
        on_divergence: Literal["truncate", "stop"] = "truncate",
        on_gap: Literal["stop", "skip"] = "stop",
    ) -> None:
        """Create a follower of the topics whose names match patterns with * and ?.

        `with_internal` adds `__consumer_offsets` and `__transaction_state`.

        Raises:
            InvalidConfigError: the directory is read-only or shared, or a choice is
                unknown.
        """
        # Other processes could append to the copies, which would then diverge.
        if logdir.is_read_only or logdir.is_shared:
            raise InvalidConfigError(
                "a follower needs a directory of its own, open for writing"
            )
        self._patterns = list(topics)
        if not self._patterns:
            raise InvalidConfigError("at least one topic is needed")
        if on_divergence not in ("truncate", "stop") or on_gap not in ("stop", "skip"):
            raise InvalidConfigError(
                "unknown choice",
                expected="on_divergence truncate or stop, on_gap stop or skip",
                found=f"{on_divergence}, {on_gap}",
            )
        self._logdir = logdir
        self._source = source
        self._with_internal = with_internal
        self._policies = Policies(on_divergence, on_gap)
        #: All copied partitions of the source, including those that have stopped.
        self._copies: dict[Partition, _PartitionCopy] = {}
        #: When the metadata of the source is read again, by time.monotonic().
        self._refresh_at = 0.0
        #: When the source is tried again after a failure, by time.monotonic().
        self._retry_at = 0.0
        #: Number of failures since the last success; each doubles the delay.
        self._retries = 0
        self._state: State = "connecting"
        self._reason = ""
        self._size_bytes = 0
        self._truncation_count = 0
        self._skipped_offsets = 0
        #: The recorded progress, which promote() checks.
        self._progress = _read_progress(logdir)

    # -- work --------------------------------------------------------------------------

    def run(
        self, *, until_end: bool = False, after_step: Callable[[], None] | None = None
    ) -> None:
        """Copy until an exception ends it, such as KeyboardInterrupt.

        With `until_end`, it ends once all records that existed at the beginning are
        copied. `after_step` is called after each step.

        Raises:
            LogcoreError: all partitions have stopped. With `until_end`, one is enough.
        """
        ends: dict[Partition, int] | None = None
        while True:
            self.step()
            if after_step is not None:
                after_step()
            copies = self._copies
            failures = [copy.failure for copy in copies.values() if copy.failure]
            # If only some partitions have stopped, the others continue.
            if failures and len(failures) == len(copies):
                raise failures[0]
            if not until_end or self._state in ("connecting", "waiting"):
                continue
            if ends is None:
                # Later records do not count, because a copy of a busy source would
                # never end.
                ends = {name: copy.source_end for name, copy in copies.items()}
            if all(
                copies[name].failure or copies[name].next_offset >= end
                for name, end in ends.items()
            ):
                if failures:
                    raise failures[0]
                return

    def step(self) -> int:
        """Fetch and append once, and return the number of appended bytes.

        If the source cannot be reached, the step waits for a moment, and the state
        becomes "waiting".

        Raises:
            ShippingError: the source refuses the login or is too old, or a topic was
                created again.
            LogcoreError: the directory cannot be written.
        """
        now = time.monotonic()
        if now < self._retry_at:
            time.sleep(min(0.1, self._retry_at - now))
            return 0
        try:
            if now >= self._refresh_at:
                self._refresh()
                self._refresh_at = time.monotonic() + _REFRESH_S
            count = self._fetch()
        except RemoteUnavailableError as error:
            self._wait(error)
            return 0
        self._retries = 0
        self._reason = ""
        self._state = "copying" if any(copy.lag for copy in self._active()) else "idle"
        if self._copies and not any(True for _ in self._active()):
            self._state = "stopped"
        self._record_progress()
        self._logdir.tick()
        return count

    def _active(self) -> Iterable[_PartitionCopy]:
        return (copy for copy in self._copies.values() if copy.failure is None)

    def _wait(self, error: LogcoreError) -> None:
        """Try again later, with new connections and metadata."""
        # A later request could read an unread response as its own.
        self._source.close()
        # Logged once for each outage, not for each attempt.
        if self._state != "waiting":
            log_line("follow", WARNING, "the source does not answer: %s", error)
        self._state = "waiting"
        self._reason = str(error)
        delay_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2**self._retries)
        self._retries = min(self._retries + 1, 10)
        self._retry_at = time.monotonic() + delay_s
        # Leaders may have moved while the source did not answer.
        self._refresh_at = 0.0

    # -- topics ------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Read the topics, leaders, settings and log starts of the source."""
        topics = self._source.topics(self._patterns, with_internal=self._with_internal)
        missing = [
            name
            for name in self._patterns
            if name not in topics and not set("*?[") & set(name)
        ]
        if missing:
            raise RemoteTopicError(
                f"topics are missing in the source: {', '.join(missing)}"
            )
        if not topics:
            raise RemoteTopicError(
                f"no topic of the source matches {', '.join(self._patterns)}"
            )
        settings = self._source.settings(topics)
        for topic in topics.values():
            self._ensure_topic(topic, settings[topic.name])
            for number, leader in topic.leaders.items():
                copy = self._copies.get((topic.name, number))
                if copy is None:
                    log = self._logdir.partition(topic.name, number)
                    copy = _PartitionCopy(topic.topic_id, log)
                    self._copies[topic.name, number] = copy
                copy.leader = leader
        for partition, copied in self._copies.items():
            if partition[0] not in topics and copied.failure is None:
                # A topic that was deleted by mistake in the source must not be lost
                # here too.
                error = RemoteTopicError(
                    f"topic {partition[0]} no longer exists in the source; "
                    "the copy is kept"
                )
                self._stop(partition, copied, error)
        for partition, offset in self._source.ends(topics).items():
            self._copies[partition].source_end = offset
        for partition, offset in self._source.starts(topics).items():
            self._follow_start(self._copies[partition], offset)

    def _ensure_topic(self, topic: SourceTopic, settings: Mapping[str, str]) -> None:
        """Create or adapt the local topic.

        Raises:
            DivergedError: the local topic is not a copy, or a copy of another topic.
        """
        name = topic.name
        identity = _identity(self._source, topic)
        target_settings = {**_supported_settings(settings), "mirror.source": identity}
        count = max(topic.leaders, default=-1) + 1
        if name not in self._logdir:
            self._logdir.create_topic(name, count, target_settings)
            return
        mirror_source = self._logdir.settings(name).mirror_source
        if mirror_source != identity:
            raise DivergedError(
                f"topic {name!r} of this directory is not a copy of the source's topic",
                expected=f"mirror.source={identity}",
                found=mirror_source
                or "no mirror.source: the topic was created here or promoted",
            )
        if len(self._logdir.partitions(name)) < count:
            self._logdir.add_partitions(name, count)
        overrides = self._logdir.describe_topic(name).overrides
        changes: dict[str, object | None] = dict.fromkeys(
            overrides.keys() - target_settings.keys()
        )
        changes |= {
            key: value
            for key, value in target_settings.items()
            if overrides.get(key) != value
        }
        if changes:
            self._logdir.alter_topic(name, changes)

    def _follow_start(self, copy: _PartitionCopy, offset: int) -> None:
        """Delete the records that the source has deleted."""
        copy.source_start = offset
        if copy.failure is None and (
            # Above the end there is a gap, which rules.decide() handles.
            copy.log.log_start_offset < offset <= copy.log.log_end_offset
        ):
            copy.log.delete_records(offset)

    # -- records -----------------------------------------------------------------------

    def _fetch(self) -> int:
        positions: dict[int, dict[Partition, FetchPosition]] = {}
        for name, copy in self._copies.items():
            if copy.failure is None and copy.leader >= 0:
                positions.setdefault(copy.leader, {})[name] = copy.position
        if not positions:
            # No partition has a leader, so there is no fetch that could wait.
            time.sleep(0.1)
            return 0
        total = 0
        # An interrupt between two responses closes the connections, because the unread
        # responses would be mistaken for responses to the next fetch.
        with contextlib.closing(self._source.fetch(positions)) as responses:
            for name, response in responses:
                copy = self._copies[name]
                if response.high_watermark >= 0:
                    copy.source_end = response.high_watermark
                try:
                    total += self._apply(name, copy, response)
                except LogcoreError as error:
                    # One damaged or full log must not stop the others.
                    self._stop(name, copy, error)
        self._size_bytes += total
        return total

    def _apply(self, name: Partition, copy: _PartitionCopy, response: Any) -> int:
        """Carry out the decision about a response; return the number of appended bytes."""
        position = CopyPosition(
            f"{name[0]}-{name[1]}", copy.next_offset, copy.source_start, copy.source_end
        )
        match rules.decide(response, position, self._policies):
            case Append(data):
                copy.log.append_as_follower(data)
                copy.skip_to = None
                # The batch may begin below the start, because batches are copied whole.
                if copy.log.log_start_offset < copy.source_start:
                    self._follow_start(copy, copy.source_start)
                return len(data)
            case Truncate(epoch, end_offset):
                before = copy.log.log_end_offset
                after = copy.log.truncate_to_epoch(epoch, end_offset)
                if after == before:  # so the next fetch would diverge too
                    raise DivergedError(
                        f"{position.name}: no common part with the source was found",
                        expected=f"epoch {epoch} ends at {end_offset}",
                        found=f"the copy ends at {before}",
                    )
                self._truncation_count += 1
                log_line(
                    "follow",
                    WARNING,
                    "%s: an unclean election in the source; offsets %d to %d were removed",
                    position.name,
                    after,
                    before - 1,
                )
            case SkipGap(offset):
                self._skipped_offsets += offset - copy.next_offset
                copy.skip_to = offset
            case AwaitMetadata():
                self._refresh_at = min(
                    self._refresh_at, time.monotonic() + _FIRST_RETRY_S
                )
            case StopCopy(error):
                self._stop(name, copy, error)
            case None:
                pass
        return 0

    def _stop(self, name: Partition, copy: _PartitionCopy, error: LogcoreError) -> None:
        copy.failure = error
        log_line("follow", WARNING, "%s-%d stopped: %s", *name, error)

    # -- progress ----------------------------------------------------------------------

    def _record_progress(self) -> None:
        """Record the source, and whether the copy has caught up once."""
        is_partial = self._progress.get("partial", True) and not (
            self._copies
            and all(not copy.lag and not copy.failure for copy in self._copies.values())
        )
        progress = {
            "from": self._source.addresses,
            "cluster_id": self._source.cluster_id,
            "topics": self._patterns,
            "with_internal": self._with_internal,
            "partial": is_partial,
        }
        # Each write is synced, and most steps change nothing.
        if progress != self._progress:
            content = checkpoint.pack_checked(progress)
            checkpoint.write(
                self._logdir.host.fs, self._logdir.path, _PROGRESS_FILE, content
            )
            self._progress = progress

    def metrics(self) -> FollowMetrics:
        """Return the progress."""
        lags = {name: copy.lag for name, copy in self._copies.items()}
        return FollowMetrics(
            state=self._state,
            size_bytes=self._size_bytes,
            lag_records=sum(lags.values()),
            lags=lags,
            truncation_count=self._truncation_count,
            skipped_offsets=self._skipped_offsets,
            failures={
                name: str(copy.failure)
                for name, copy in self._copies.items()
                if copy.failure is not None
            },
            reason=self._reason,
        )


def _identity(source: Source, topic: SourceTopic) -> str:
    """Return the value of `mirror.source` for a topic of a source."""
    return f"{source.cluster_id}/{uuid.UUID(bytes=topic.topic_id)}"


def _supported_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Leave out settings that logcore does not have, such as remote storage."""
    supported = {}
    for name, value in settings.items():
        try:
            LogConfig.parse({name: value})
        except InvalidConfigError:
            log_line("follow", WARNING, "the setting %s=%s is not copied", name, value)
        else:
            supported[name] = value
    return supported


def _read_progress(logdir: LogDir) -> dict[str, Any]:
    """Return the stored progress; empty if there is none or it is damaged."""
    content = checkpoint.read(logdir.host.fs, logdir.path, _PROGRESS_FILE)
    return checkpoint.unpack_checked(content or b"") or {}


# -- promotion -------------------------------------------------------------------------


def promote(
    logdir: LogDir, source: Source | None = None, *, anyway: bool = False
) -> list[str]:
    """Make the copies in a directory normal topics; return their names.

    Each partition begins a new leader epoch, so that later records of the source and of
    the promoted copy have different epochs. If `source` is given, it is checked for
    records that were not copied. A promotion that was interrupted can be repeated.

    Raises:
        ShippingError: the source is ahead, cannot be reached, or the copy has never
            caught up, and `anyway` is not set.
        InvalidConfigError: the directory contains no copy.
    """
    names = [name for name in logdir.topics() if logdir.settings(name).mirror_source]
    if not names:
        raise InvalidConfigError(
            "nothing to promote",
            expected="a directory of netshim follow",
            found=logdir.path,
        )
    if not anyway:
        _check_complete(logdir, names, source)
    for name in names:
        for number in logdir.partitions(name):
            log = logdir.partition(name, number)
            # Synced before the setting is removed. After a crash in between, the topic
            # is still a copy, and promote() can be repeated.
            log.begin_epoch(log.leader_epoch + 1)
            log.flush()
        logdir.alter_topic(name, {"mirror.source": None})
    with contextlib.suppress(FileNotFoundError):
        logdir.host.fs.unlink(os.path.join(logdir.path, _PROGRESS_FILE))
    return names


def _check_complete(logdir: LogDir, names: list[str], source: Source | None) -> None:
    advice = "--anyway to promote the copy as it is"
    if _read_progress(logdir).get("partial", True):
        raise ShippingError(
            "the copy has never caught up with its source", expected=advice
        )
    if source is None:
        raise ShippingError("the source is unknown", expected=advice)
    try:
        topics = source.topics(names)
        ends = source.ends(topics)
    except RemoteUnavailableError as error:
        raise ShippingError(
            f"it is unknown whether the source is ahead: {error}", expected=advice
        ) from error
    ahead = []
    for topic in topics.values():
        identity = _identity(source, topic)
        mirror_source = logdir.settings(topic.name).mirror_source
        if mirror_source != identity:
            raise ShippingError(
                f"topic {topic.name} was copied from another topic or cluster",
                expected=mirror_source,
                found=identity,
            )
        for number in topic.leaders:
            # None: its leader did not answer, so it may be ahead.
            end = ends.get((topic.name, number))
            if (
                end is None
                or number not in logdir.partitions(topic.name)
                or logdir.partition(topic.name, number).log_end_offset < end
            ):
                ahead.append(f"{topic.name}-{number}")
    if ahead:
        raise ShippingError(
            f"the source is ahead, or has no leader, in {', '.join(ahead[:5])}{', ...' * (len(ahead) > 5)}",
            expected=f"a follower that has caught up, or {advice}",
        )
