"""Settings and metrics of a forwarder and a mirror.

Rules:
- Settings are checked before anything is read and before a connection is opened.
- Metrics are a snapshot of the moment in which they are requested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, TypedDict

import attrs

from logcore.errors import InvalidConfigError
from logcore.shipping.cluster import Partition
from logcore.shipping.forward_rules import OnGap, OnLost
from logcore.shipping.mirror_rules import OnDivergence

State = Literal["connecting", "shipping", "idle", "waiting", "stopped"]
OnError = Literal["fail", "quarantine"]
Offsets = Literal["keep", "new"]
#: Suffix of the local topic to which the refused records of a topic are written.
QUARANTINE_SUFFIX: Final = ".dlq"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


class ForwardOptions(TypedDict, total=False):
    """The settings of a Forwarder.

    Attributes:
        name: Forwarders that ship from one directory to one cluster at the same time
            must have different names and different topics. Default: "default".
        topics: Names of topics. Default: all except internal ones and quarantine
            topics.
        rename: Maps the local name of a topic to its name in the cluster.
        at_least_once: Ship without transactions. After a crash some records are
            duplicated. Default: False.
        create_topics: Create topics that are missing in the cluster. Default: False.
        on_error: "fail" (default) stops the partition. "quarantine" writes a record
            that the cluster refuses to the local topic `<topic>.dlq`, and continues.
        on_gap: "fail" (default) stops the partition if records were deleted before they
            were shipped. "skip" continues.
        on_lost: "fail" (default) stops the partition if the cluster has lost the
            progress. "noted" continues at the progress that is recorded in the local
            directory. "start" ships the records after the cluster's progress again.
        hold: Commit the progress for the local group `forward-<name>`, so that
            retention can keep records until they are shipped. The default is True if
            the directory is open for writing.
        max_records: Maximum number of records of one transaction. Default: 10,000.
        max_bytes: Maximum bytes of one transaction. Default: 8 MiB.
        max_ms: Maximum time for reading one batch. Default: 1,000.
        buffer_memory: Maximum bytes of the records that were read and are not delivered.
            Default: 32 MiB.
    """

    name: str
    topics: Collection[str] | None
    rename: Callable[[str], str] | None
    at_least_once: bool
    create_topics: bool
    on_error: OnError
    on_gap: OnGap
    on_lost: OnLost
    hold: bool | None
    max_records: int
    max_bytes: int
    max_ms: int
    buffer_memory: int


@attrs.frozen(kw_only=True)
class ForwardSettings:
    """The checked settings; see ForwardOptions."""

    name: str = "default"
    topics: Collection[str] | None = None
    rename: Callable[[str], str] | None = None
    at_least_once: bool = False
    create_topics: bool = False
    on_error: OnError = "fail"
    on_gap: OnGap = "fail"
    on_lost: OnLost = "fail"
    hold: bool | None = None
    max_records: int = 10_000
    max_bytes: int = 8 << 20
    max_ms: int = 1_000
    buffer_memory: int = 32 << 20

    def __attrs_post_init__(self) -> None:
        check_name(self.name)
        check_names(self.topics)
        check_choice("on_error", self.on_error, ("fail", "quarantine"))
        check_choice("on_gap", self.on_gap, ("fail", "skip"))
        check_choice("on_lost", self.on_lost, ("fail", "noted", "start"))
        for name in ("max_records", "max_bytes", "max_ms", "buffer_memory"):
            check_positive(name, getattr(self, name))

    @property
    def batch_bytes(self) -> int:
        """Maximum size of a batch. Only one undelivered batch is in memory at a time."""
        return min(self.max_bytes, self.buffer_memory)


def check_name(name: object) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidConfigError(
            "name",
            expected="1 to 100 letters, digits, '.', '_' and '-'",
            found=repr(name),
        )


def check_names(topics: object) -> None:
    if isinstance(topics, str):
        raise InvalidConfigError(
            "topics must be a list of names",
            expected=f"[{topics!r}]",
            found=repr(topics),
        )


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfigError(
            name, expected=f"one of {', '.join(allowed)}", found=repr(value)
        )


def check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfigError(
            name, expected="a whole number above 0", found=repr(value)
        )


@attrs.frozen(kw_only=True)
class ForwardMetrics:
    """The progress of a forwarder.

    Attributes:
        state: "connecting", "shipping", "idle" (everything is shipped), "waiting" (the
            cluster does not respond) or "stopped" (no partition can be shipped).
        record_count, size_bytes, batch_count: Totals since the forwarder was created.
            Sizes are those of keys, values and headers, plus 64 for each record.
        retry_count: Failed attempts.
        quarantined_count: Refused records, which are now in a quarantine topic.
        skipped_offsets: Offsets that were deleted before they were shipped.
        buffered_bytes: Size of the records that were read and are not delivered.
        lag_records: Number of undelivered offsets, including those of control batches.
        lag_bytes: Size of the log files from the first undelivered offset on.
        lag_age_ms: Age of the oldest undelivered record, 0 if there is none.
        failures: Stopped partitions, with the error of each.
        reason: The last error, if the state is "waiting".
    """

    state: State
    record_count: int
    size_bytes: int
    batch_count: int
    retry_count: int
    quarantined_count: int
    skipped_offsets: int
    buffered_bytes: int
    lag_records: int
    lag_bytes: int
    lag_age_ms: int
    failures: Mapping[Partition, str]
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics for JSON, with partitions as `topic-number`."""
        return metrics_dict(self)


def metrics_dict(metrics: ForwardMetrics | MirrorMetrics) -> dict[str, Any]:
    result = {
        field.name: getattr(metrics, field.name)
        for field in attrs.fields(type(metrics))
    }
    result["failures"] = {
        f"{topic}-{number}": reason
        for (topic, number), reason in metrics.failures.items()
    }
    return result


class MirrorOptions(TypedDict, total=False):
    """The settings of a Mirror.

    Attributes:
        topics: Names of topics in the remote cluster.
        offsets: "keep" (default) gives records their remote offsets, and "new" appends
            them.
        name: Mirrors of one cluster into one directory with offsets="new" must have
            different names. Default: "default".
        rename: Maps the remote name of a topic to its local name. With offsets="new",
            several remote topics may have the same local name.
        on_gap: "fail" (default) stops the partition if records were deleted remotely
            before they were mirrored. "skip" continues.
        on_divergence: If the local and the remote log differ, "fail" (default) stops
            the partition. "truncate" truncates the local log to the common part.
        confirm: Called with a question before such a truncation. If it returns False,
            the partition stops.
        on_error: "fail" (default) stops the partition. "quarantine" writes a record
            that cannot be stored to `<topic>.dlq`, and continues. This requires
            offsets="new", because with the same offsets a record would be missing.
        groups: Groups whose committed offsets are copied. This requires offsets="keep".
    """

    topics: Collection[str]
    offsets: Offsets
    name: str
    rename: Callable[[str], str] | None
    on_gap: OnGap
    on_divergence: OnDivergence
    confirm: Callable[[str], bool] | None
    on_error: OnError
    groups: Collection[str]


@attrs.frozen(kw_only=True)
class MirrorSettings:
    """The checked settings; see MirrorOptions."""

    topics: Collection[str]
    offsets: Offsets = "keep"
    name: str = "default"
    rename: Callable[[str], str] | None = None
    on_gap: OnGap = "fail"
    on_divergence: OnDivergence = "fail"
    confirm: Callable[[str], bool] | None = None
    on_error: OnError = "fail"
    groups: Collection[str] = ()

    def __attrs_post_init__(self) -> None:
        check_name(self.name)
        check_names(self.topics)
        check_names(self.groups)
        if not self.topics:
            raise InvalidConfigError(
                "a mirror needs topics", expected="their names", found="none"
            )
        check_choice("offsets", self.offsets, ("keep", "new"))
        check_choice("on_gap", self.on_gap, ("fail", "skip"))
        check_choice("on_divergence", self.on_divergence, ("fail", "truncate"))
        check_choice("on_error", self.on_error, ("fail", "quarantine"))
        if self.groups and self.offsets == "new":
            raise InvalidConfigError(
                "groups needs offsets='keep': other offsets would have another meaning here",
                found=str(self.groups),
            )
        if self.on_error == "quarantine" and self.offsets == "keep":
            raise InvalidConfigError(
                "on_error='quarantine' needs offsets='new': with offsets='keep', no record may be missing"
            )
        if self.on_divergence == "truncate" and self.offsets == "new":
            raise InvalidConfigError(
                "on_divergence='truncate' needs offsets='keep': new offsets cannot be compared with the cluster's"
            )


@attrs.frozen(kw_only=True)
class MirrorMetrics:
    """The progress of a mirror.

    Attributes:
        state: "connecting", "shipping", "idle" (everything is mirrored), "waiting" (the
            cluster does not respond) or "stopped" (no partition can be mirrored).
        record_count, size_bytes: Records stored since the mirror was created.
        retry_count: Failed attempts.
        quarantined_count: Records that could not be stored and are in a quarantine
            topic.
        skipped_offsets: Offsets that were deleted before they were mirrored.
        lag_records: Remote offsets that are missing here, as of the last request for
            the remote ends, at most some seconds ago.
        failures: Stopped partitions, with the error of each.
        reason: The last error, if the state is "waiting".
    """

    state: State
    record_count: int
    size_bytes: int
    retry_count: int
    quarantined_count: int
    skipped_offsets: int
    lag_records: int
    failures: Mapping[Partition, str]
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics for JSON, with partitions as `topic-number`."""
        return metrics_dict(self)
