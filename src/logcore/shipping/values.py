"""Settings and metrics of a forwarder and a mirror.

Rules:
- Settings are checked when they are given, before anything is read or connected.
- Metrics are plain numbers, fixed at the moment they were asked for.

Nothing here reads or ships.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, TypedDict

import attrs

from logcore.errors import InvalidConfigError
from logcore.shipping.mirroring import OnDivergence
from logcore.shipping.planning import OnGap, OnLost
from logcore.shipping.remote import Partition

State = Literal["connecting", "shipping", "idle", "waiting", "stopped"]
OnError = Literal["fail", "quarantine"]
Offsets = Literal["keep", "new"]
#: Where records that were refused are kept, behind the name of their topic.
QUARANTINE: Final = ".dlq"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


class ForwardOptions(TypedDict, total=False):
    """The settings of a Forwarder.

    name ("default"): forwarders of one directory and one cluster that ship at the same time have different names and
    different topics. topics: all but internal ones and those of refused records, when none are named. rename: the
    name of a topic in the cluster, by its name here. at_least_once (False): no transactions; after a crash some records
    come twice. create_topics (False): makes what is missing in the cluster. on_error ("fail"): "quarantine" keeps a
    record that the cluster refuses in the local topic `<topic>.dlq`, and goes on. on_gap ("fail"): "skip" goes on where
    records were deleted before they were shipped. on_lost ("fail"): where the cluster has lost the progress, "noted"
    goes on at what was noted here, "start" ships again. hold: whether to commit the progress for the local group
    `forward-<name>`, so that retention can wait for it; by default where the directory may be written. max_records
    (10,000), max_bytes (8 MiB), max_ms (1,000): of one transaction. buffer_memory (32 MiB): most bytes that were read
    and are not delivered.
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
    """See ForwardOptions."""

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
        """The most bytes of one batch: one batch is read and not delivered at a time."""
        return min(self.max_bytes, self.buffer_memory)


def check_name(name: object) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidConfigError("name", expected="1 to 100 letters, digits, '.', '_' and '-'", found=repr(name))


def check_names(topics: object) -> None:
    if isinstance(topics, str):
        raise InvalidConfigError("topics is a list of names", expected=f"[{topics!r}]", found=repr(topics))


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfigError(name, expected=f"one of {', '.join(allowed)}", found=repr(value))


def check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfigError(name, expected="a whole number above 0", found=repr(value))


@attrs.frozen(kw_only=True)
class ForwardMetrics:
    """How far a forwarder is.

    state: "connecting", "shipping", "idle" (all is shipped), "waiting" (the cluster does not answer), "stopped" (no
    partition can be shipped). record_count, size_bytes, batch_count: shipped since it was made; size_bytes of keys,
    values and headers, and 64 for each record. retry_count: attempts that failed. quarantined_count, skipped_offsets:
    left out. buffered_bytes: read and not delivered. lag_records: offsets that are not delivered, those of markers too.
    lag_bytes: of the log files behind what is delivered. lag_age_ms: how old the oldest record is that is not
    delivered, 0 for none. failures: partitions that stand still, and why. reason: why it waits.
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
        """For JSON: partitions as `topic-number`."""
        return named(self)


def named(metrics: ForwardMetrics | MirrorMetrics) -> dict[str, Any]:
    found = {field.name: getattr(metrics, field.name) for field in attrs.fields(type(metrics))}
    found["failures"] = {f"{topic}-{number}": why for (topic, number), why in metrics.failures.items()}
    return found


class MirrorOptions(TypedDict, total=False):
    """The settings of a Mirror.

    topics: their names there. offsets ("keep"): "keep" gives records the offsets they have there, "new" appends them.
    name ("default"): mirrors of one cluster into one directory with offsets="new" have different names. rename: the
    name of a topic here, by its name there; with "new" several may become one. on_gap ("fail"): "skip" goes on where
    records were deleted there before they were mirrored. on_divergence ("fail"): "truncate" cuts the local log to what
    both hold. confirm: asked before that. on_error ("fail"): "quarantine" keeps a record that cannot be stored in
    `<topic>.dlq`, and goes on; with "new" only, since a copy takes every record. groups: whose committed offsets are
    copied, with "keep" only.
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
    """See MirrorOptions."""

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
            raise InvalidConfigError("a mirror needs topics", expected="their names", found="none")
        check_choice("offsets", self.offsets, ("keep", "new"))
        check_choice("on_gap", self.on_gap, ("fail", "skip"))
        check_choice("on_divergence", self.on_divergence, ("fail", "truncate"))
        check_choice("on_error", self.on_error, ("fail", "quarantine"))
        if self.groups and self.offsets == "new":
            raise InvalidConfigError("groups mean the same here with offsets='keep' only", found=str(self.groups))
        if self.on_error == "quarantine" and self.offsets == "keep":
            raise InvalidConfigError("a mirror with offsets='keep' takes every record, so on_error needs offsets='new'")
        if self.on_divergence == "truncate" and self.offsets == "new":
            raise InvalidConfigError("on_divergence='truncate' needs offsets='keep': others have records between")


@attrs.frozen(kw_only=True)
class MirrorMetrics:
    """How far a mirror is.

    state: "connecting", "shipping", "idle" (all is mirrored), "waiting" (the cluster does not answer), "stopped" (no
    partition can be mirrored). record_count, size_bytes: stored since it was made. retry_count: attempts that failed.
    quarantined_count, skipped_offsets: left out. lag_records: offsets there that are not here, by the ends as they were
    some seconds ago. failures: partitions that stand still, and why. reason: why it waits.
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
        """For JSON: partitions as `topic-number`."""
        return named(self)
