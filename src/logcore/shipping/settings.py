"""Settings and metrics of a forwarder and a mirror.

Rules:
- Settings are checked when they are given, before anything is read or connected.
- Metrics are plain numbers, taken when they are requested.

This module reads and ships nothing.
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
#: Suffix of the topic that keeps the refused records of a topic.
QUARANTINE: Final = ".dlq"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


class ForwardOptions(TypedDict, total=False):
    """The settings of a Forwarder.

    Attributes:
        name: Forwarders that ship from one directory to one cluster at the same time
            have different names and different topics. Default: "default".
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
            progress. "noted" continues at the progress recorded here, and "start" ships
            again.
        hold: Commit the progress for the local group `forward-<name>`, so that
            retention can wait for it. The default is true if the directory may be
            written.
        max_records: Maximum number of records of one transaction. Default: 10,000.
        max_bytes: Maximum bytes of one transaction. Default: 8 MiB.
        max_ms: Longest time of one transaction. Default: 1,000.
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
        """Maximum size of a batch. At most one batch is read and not delivered."""
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
            "topics is a list of names", expected=f"[{topics!r}]", found=repr(topics)
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
        quarantined_count, skipped_offsets: Records and offsets that were left out.
        buffered_bytes: Size of the records that were read and are not delivered.
        lag_records: Offsets that are not delivered, including markers.
        lag_bytes: Size of the log files above the delivered offsets.
        lag_age_ms: Age of the oldest undelivered record, 0 if there is none.
        failures: Stopped partitions, with the reason.
        reason: Why the forwarder waits.
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
        return named(self)


def named(metrics: ForwardMetrics | MirrorMetrics) -> dict[str, Any]:
    found = {
        field.name: getattr(metrics, field.name)
        for field in attrs.fields(type(metrics))
    }
    found["failures"] = {
        f"{topic}-{number}": why for (topic, number), why in metrics.failures.items()
    }
    return found


class MirrorOptions(TypedDict, total=False):
    """The settings of a Mirror.

    Attributes:
        topics: Names of topics in the remote cluster.
        offsets: "keep" (default) gives records their remote offsets, and "new" appends
            them.
        name: Mirrors of one cluster into one directory with offsets="new" have
            different names. Default: "default".
        rename: Maps the remote name of a topic to its local name. With "new", several
            may be mapped to one.
        on_gap: "fail" (default) stops the partition if records were deleted remotely
            before they were mirrored. "skip" continues.
        on_divergence: "fail" (default) stops the partition. "truncate" truncates the
            local log to the common part.
        confirm: Called before such a truncation.
        on_error: "fail" (default) stops the partition. "quarantine" writes a record
            that cannot be stored to `<topic>.dlq`, and continues. It needs
            offsets="new", because a copy with the same offsets needs every record.
        groups: Groups whose committed offsets are copied. It needs offsets="keep".
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
                "groups mean the same here with offsets='keep' only",
                found=str(self.groups),
            )
        if self.on_error == "quarantine" and self.offsets == "keep":
            raise InvalidConfigError(
                "a mirror with offsets='keep' takes every record, so on_error needs offsets='new'"
            )
        if self.on_divergence == "truncate" and self.offsets == "new":
            raise InvalidConfigError(
                "on_divergence='truncate' needs offsets='keep': others have records between"
            )


@attrs.frozen(kw_only=True)
class MirrorMetrics:
    """The progress of a mirror.

    Attributes:
        state: "connecting", "shipping", "idle" (everything is mirrored), "waiting" (the
            cluster does not respond) or "stopped" (no partition can be mirrored).
        record_count, size_bytes: Stored since the mirror was created.
        retry_count: Failed attempts.
        quarantined_count, skipped_offsets: Records and offsets that were left out.
        lag_records: Remote offsets that are missing here. The remote ends are some
            seconds old.
        failures: Stopped partitions, with the reason.
        reason: Why the mirror waits.
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
        return named(self)
