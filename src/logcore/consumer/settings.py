"""Values of a consumer: settings, listeners, records by partition, offsets to commit.

Rules:
- Settings are checked when the consumer is created. `config=` also accepts Kafka's
  dotted names; see clientconfig.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, TypedDict

import attrs

from logcore.callbacks import call
from logcore.clientconfig import Vocabulary, words
from logcore.consumer.assignors import ASSIGNORS, Assignor
from logcore.consumer.topic_partition import TopicPartition
from logcore.errors import InvalidConfigError
from logcore.kernels import TopicRecord

IsolationLevel = Literal["read_uncommitted", "read_committed"]
OffsetsStorage = Literal["log", "registry"]
Deserializer = Callable[[bytes], Any]
#: Kafka's limit.
_METADATA_CHARACTERS: Final = 4096


class RebalanceListener:
    """Receives the changes of a consumer's partitions, in the thread that calls poll().

    Subclasses override some of the methods. The methods may call seek(), commit() and
    methods that only read. poll(), subscribe(), assign() and close() are refused.
    """

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """Handle new partitions. Their positions may be set with seek()."""

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """Handle partitions that are about to be revoked. They may still be committed."""

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Handle partitions that another consumer may already have. Commits are
        refused.
        """
        self.on_partitions_revoked(partitions)


class ConsumerInterceptor(Protocol):
    """Processes the records that a consumer returns, and the offsets that it commits.

    An error is reported to sys.unraisablehook. The next interceptor then receives the
    result of the last interceptor that succeeded.
    """

    def on_consume(self, records: ConsumerRecords) -> ConsumerRecords:
        """Return the records that the consumer must return, in the thread that reads.

        In an iteration, each call has one record. Positions also move past the records
        that are left out. Columns are not passed to interceptors.
        """
        ...

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> object:
        """Handle committed offsets."""
        ...


@attrs.frozen
class OffsetAndMetadata:
    """A committed offset of a partition: the offset of the next record to process."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class GroupMetadata(NamedTuple):
    """A member of a group in one generation.

    Without a member, `generation` is -1 and `member_id` is "".
    """

    group_id: str
    generation: int
    member_id: str
    group_instance_id: str | None


@attrs.frozen(kw_only=True)
class ConsumerMetrics:
    """A snapshot of the counters of a consumer since it was created."""

    #: Checks of the group and of due commits. Each poll() makes at least one.
    checks: int
    #: Decoded records, including records that were only read ahead.
    records: int
    #: Stored commits.
    commits: int
    refused_commits: int
    #: Commits of commit_async() that are not stored yet.
    waiting_commits: int
    #: Generations of the group in which the consumer was a member.
    rebalances: int
    #: Partitions that the consumer reads now.
    partitions: int
    paused_partitions: int


class ConsumerRecords(Mapping[TopicPartition, Sequence[TopicRecord]]):
    """The records of one poll(): a list for each partition, in the order of offsets."""

    def __init__(self, records: dict[TopicPartition, list[TopicRecord]]) -> None:
        self._records = records

    def __getitem__(self, partition: TopicPartition) -> Sequence[TopicRecord]:
        return self._records[partition]

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<ConsumerRecords {self.count} of {len(self)} partitions>"

    @property
    def count(self) -> int:
        """Return the number of records."""
        return sum(map(len, self._records.values()))

    def partitions(self) -> list[TopicPartition]:
        """Return the partitions that have records here."""
        return list(self._records)

    def records(
        self, partition: tuple[str, int] | None = None
    ) -> Iterator[TopicRecord]:
        """Return the records of one partition, or of all, one partition after the
        other.
        """
        if partition is not None:
            return iter(self._records.get(TopicPartition(*partition), ()))
        return itertools.chain.from_iterable(self._records.values())

    def next_offsets(self) -> dict[TopicPartition, int]:
        """Return the offsets after the records, for commit()."""
        return {
            partition: records[-1].offset + 1
            for partition, records in self._records.items()
        }


def intercepted(
    interceptors: Iterable[ConsumerInterceptor], records: ConsumerRecords
) -> ConsumerRecords:
    """Return the records after all interceptors, which run one after the other."""
    for interceptor in interceptors:
        replacement = call(interceptor.on_consume, records)
        if isinstance(replacement, ConsumerRecords):
            records = replacement
    return records


class ConsumerOptions(TypedDict, total=False):
    """The settings of LogDir.consumer(), with the names and defaults of Kafka's Java
    client if it has such a setting.

    Attributes:
        group_id: The group. Its members divide the partitions, and it stores committed
            offsets.
        group_instance_id: The id of a static member, which keeps its partitions during
            a restart.
        client_id: A name for the metrics.
        auto_offset_reset: The first position if no offset is committed: "latest"
            (default), "earliest", "by_duration:PT1H" for the first record of the last
            hour, or "none", which raises.
        enable_auto_commit: poll() commits the finished offsets. Default: True.
        auto_commit_interval_ms: The time between these commits. Default: 5,000.
        isolation_level: See Log.read(). Default: "read_uncommitted".
        max_poll_records: Maximum number of records of one poll(). Default: 500.
        max_partition_fetch_bytes: Size of stored batches after which one poll() starts
            no further batches of a partition. Default: 1,048,576.
        fetch_max_bytes: The same limit for all partitions together. Default:
            52,428,800.
        max_poll_interval_ms: A member that does not poll for this time loses its
            partitions. Default: 300,000.
        session_timeout_ms: How long a static member remains in the group after it was
            closed or its process died. Default: 45,000.
        heartbeat_interval_ms: Checked, but without effect, because a member sends no
            heartbeats. Default: 3,000.
        assignors: "range", "roundrobin", "sticky", "cooperative-sticky", or Assignor
            objects. All members must support a common one. Default:
            cooperative-sticky.
        key_deserializer: Called with bytes, and never with None.
        value_deserializer: Called with bytes, and never with None.
        interceptors: Objects with the methods of ConsumerInterceptor.
        exclude_internal_topics: Whether a pattern skips Kafka's internal topics.
            Default: True.
        consumer_timeout_ms: An iteration ends after this time without a record.
            Default: None, never.
        offsets_storage: "log" (default) or "registry"; see consumer/offset_stores.py.
        dual_commit: Commit to both storages, while a group moves from one to the
            other. Default: False.
    """

    group_id: str | None
    group_instance_id: str | None
    client_id: str
    auto_offset_reset: str
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    isolation_level: IsolationLevel
    max_poll_records: int
    max_partition_fetch_bytes: int
    fetch_max_bytes: int
    max_poll_interval_ms: int
    session_timeout_ms: int
    heartbeat_interval_ms: int
    assignors: Iterable[str | Assignor]
    key_deserializer: Deserializer | None
    value_deserializer: Deserializer | None
    interceptors: Iterable[ConsumerInterceptor]
    exclude_internal_topics: bool
    consumer_timeout_ms: int | None
    offsets_storage: OffsetsStorage
    dual_commit: bool


@attrs.frozen(kw_only=True)
class ConsumerSettings:
    """See ConsumerOptions."""

    group_id: str | None = None
    group_instance_id: str | None = None
    client_id: str = ""
    auto_offset_reset: str = "latest"
    enable_auto_commit: bool = True
    auto_commit_interval_ms: int = 5_000
    isolation_level: IsolationLevel = "read_uncommitted"
    max_poll_records: int = 500
    max_partition_fetch_bytes: int = 1_048_576
    fetch_max_bytes: int = 52_428_800
    max_poll_interval_ms: int = 300_000
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    assignors: tuple[Assignor, ...] = (ASSIGNORS["cooperative-sticky"],)
    key_deserializer: Deserializer | None = None
    value_deserializer: Deserializer | None = None
    interceptors: tuple[ConsumerInterceptor, ...] = attrs.field(
        default=(), converter=tuple
    )
    exclude_internal_topics: bool = True
    consumer_timeout_ms: int | None = None
    offsets_storage: OffsetsStorage = "log"
    dual_commit: bool = False

    @property
    def uses_registry(self) -> bool:
        """Whether offsets are stored in the registry, alone or in addition to the log."""
        return self.offsets_storage == "registry" or self.dual_commit

    @property
    def reset_duration_ms(self) -> int | None:
        """The duration of auto_offset_reset="by_duration:...", or None.

        Raises:
            InvalidConfigError: the duration is invalid.
        """
        rule, colon, duration = self.auto_offset_reset.partition(":")
        if rule != "by_duration" or not colon:
            return None
        return duration_ms(duration)

    def __attrs_post_init__(self) -> None:
        self._check_ids()
        choices: dict[str, tuple[str, ...]] = {
            "isolation_level": ("read_uncommitted", "read_committed"),
            "offsets_storage": ("log", "registry"),
        }
        if (
            not isinstance(self.auto_offset_reset, str)
            or self.reset_duration_ms is None
        ):
            choices["auto_offset_reset"] = _RESETS
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidConfigError(
                    name,
                    expected=f"one of {', '.join(allowed)}",
                    found=repr(getattr(self, name)),
                )
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidConfigError(
                    name, expected="a whole number above 0", found=repr(value)
                )
        for name in ("enable_auto_commit", "exclude_internal_topics", "dual_commit"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfigError(
                    name, expected="True or False", found=repr(getattr(self, name))
                )
        self._check_times()

    def _check_ids(self) -> None:
        if self.group_id == "" or self.group_instance_id == "":
            raise InvalidConfigError(
                "an id must not be empty", expected="a text, or None", found="''"
            )
        if self.group_instance_id is not None and self.group_id is None:
            raise InvalidConfigError("group_instance_id needs a group_id")
        if self.uses_registry and self.group_id is None:
            raise InvalidConfigError("offsets_storage and dual_commit need a group_id")

    def _check_times(self) -> None:
        timeout_ms = self.consumer_timeout_ms
        if timeout_ms is not None and (
            not isinstance(timeout_ms, int)
            or isinstance(timeout_ms, bool)
            or timeout_ms < 0
        ):
            raise InvalidConfigError(
                "consumer_timeout_ms",
                expected="a whole number, or None",
                found=repr(timeout_ms),
            )
        # Kafka requires this of clients, so that two of three heartbeats may be lost.
        if self.heartbeat_interval_ms * 3 > self.session_timeout_ms:
            raise InvalidConfigError(
                "heartbeat_interval_ms is above a third of session_timeout_ms",
                expected=f"at most {self.session_timeout_ms // 3}",
                found=self.heartbeat_interval_ms,
            )


_RESETS: Final = ("latest", "earliest", "none", "by_duration:<duration such as PT1H>")
_POSITIVE_INTEGERS: Final = (
    "auto_commit_interval_ms",
    "max_poll_records",
    "max_partition_fetch_bytes",
    "fetch_max_bytes",
    "max_poll_interval_ms",
    "session_timeout_ms",
    "heartbeat_interval_ms",
)
#: A duration in the notation of ISO 8601 and Java, up to days.
_DURATION: Final = re.compile(
    r"P(?:(?P<days>\d{1,9})D)?(?:T(?=\d)(?:(?P<hours>\d{1,9})H)?(?:(?P<minutes>\d{1,9})M)?(?:(?P<seconds>\d{1,9}(?:\.\d{1,9})?)S)?)?"
)
_UNIT_MS: Final = {
    "days": 86_400_000,
    "hours": 3_600_000,
    "minutes": 60_000,
    "seconds": 1_000,
}
#: Settings of Kafka's consumer that need a network and that its producer lacks.
_NETWORK: Final = words("""
    fetch_min_bytes fetch_max_wait_ms fetch_wait_max_ms default_api_timeout_ms client_rack allow_auto_create_topics
    group_protocol group_remote_assignor check_crcs
""")
#: Names of librdkafka and Kafka -> names of this library.
_OTHER_NAMES: Final = {
    "partition_assignment_strategy": "assignors",
    "auto_commit_enable": "enable_auto_commit",
    "fetch_message_max_bytes": "max_partition_fetch_bytes",
}
#: Values of auto_offset_reset in librdkafka and Kafka 0.7 -> our values.
_OTHER_RESETS: Final = {
    "smallest": "earliest",
    "beginning": "earliest",
    "largest": "latest",
    "end": "latest",
}
#: Names of Kafka's assignor classes, without their package -> our names.
_CLASSES: Final = {
    "RangeAssignor": "range",
    "RoundRobinAssignor": "roundrobin",
    "StickyAssignor": "sticky",
    "CooperativeStickyAssignor": "cooperative-sticky",
}
_VOCABULARY: Final = Vocabulary(ConsumerSettings, _NETWORK, _OTHER_NAMES)


def duration_ms(text: str) -> int:
    """Return the milliseconds of a duration such as PT1H or P2DT30M.

    Raises:
        InvalidConfigError: the text is not a duration.
    """
    found = _DURATION.fullmatch(text)
    parts = (
        {}
        if found is None
        else {
            unit: each for unit, each in found.groupdict().items() if each is not None
        }
    )
    if not parts:
        raise InvalidConfigError(
            "a duration", expected="one such as PT1H or P2DT30M", found=repr(text)
        )
    return sum(int(float(each) * _UNIT_MS[unit]) for unit, each in parts.items())


def consumer_settings(
    config: Mapping[str, object] | None, given: Mapping[str, Any]
) -> ConsumerSettings:
    """Return the settings of a configuration with Kafka's names, and of keywords.

    Keywords take precedence.

    Raises:
        InvalidConfigError: a setting is invalid or unknown. For an unknown setting, the
            error contains the nearest known name.
    """
    chosen = _VOCABULARY.of_config(config)
    if isinstance(chosen.get("assignors"), str):
        chosen["assignors"] = [
            _named(each.strip()) for each in chosen["assignors"].split(",")
        ]
    if isinstance(chosen.get("auto_offset_reset"), str):
        chosen["auto_offset_reset"] = _OTHER_RESETS.get(
            chosen["auto_offset_reset"], chosen["auto_offset_reset"]
        )
    for name, value in given.items():
        _VOCABULARY.check_keyword(name)
        chosen[name] = value
    if "assignors" in chosen:
        chosen["assignors"] = chosen_assignors(chosen["assignors"])
    return ConsumerSettings(**chosen)


def _named(assignor: str) -> str:
    """Return our name of an assignor, given by that name or by Kafka's class name."""
    return _CLASSES.get(assignor.rpartition(".")[2], assignor)


def chosen_assignors(assignors: Iterable[str | Assignor]) -> tuple[Assignor, ...]:
    """Return the assignors of a list of names and objects.

    Raises:
        InvalidConfigError: the list is empty, contains an unknown name, or mixes
            cooperative assignors with others.
    """
    if isinstance(assignors, str):
        raise InvalidConfigError(
            "assignors is a list of names",
            expected=f"[{assignors!r}]",
            found=repr(assignors),
        )
    chosen = []
    for assignor in assignors:
        known = ASSIGNORS.get(assignor) if isinstance(assignor, str) else assignor
        if known is None:
            raise InvalidConfigError(
                "unknown assignor",
                expected=f"one of {', '.join(ASSIGNORS)}",
                found=repr(assignor),
            )
        chosen.append(known)
    if not chosen:
        raise InvalidConfigError(
            "a consumer needs an assignor",
            expected=f"some of {', '.join(ASSIGNORS)}",
            found="none",
        )
    if len({assignor.is_cooperative for assignor in chosen}) > 1:
        raise InvalidConfigError(
            "cooperative assignors and others cannot be offered together",
            found=str(chosen),
        )
    return tuple(chosen)


def topic_pattern(subject: str, pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Compile a pattern for topic names.

    Raises:
        InvalidConfigError: the pattern is not a regular expression of text.
    """
    try:
        compiled = re.compile(pattern)
        compiled.fullmatch("")  # raises TypeError for a pattern of bytes
    except (re.error, TypeError) as error:
        raise InvalidConfigError(
            subject, expected="a regular expression", found=f"{pattern!r}: {error}"
        ) from error
    return compiled


def checked_offset(offset: int | OffsetAndMetadata) -> OffsetAndMetadata:
    checked = (
        offset if isinstance(offset, OffsetAndMetadata) else OffsetAndMetadata(offset)
    )
    if checked.offset < 0 or len(checked.metadata) > _METADATA_CHARACTERS:
        raise InvalidConfigError(
            "a committed offset",
            expected=f"from 0, with at most {_METADATA_CHARACTERS} characters of metadata",
            found=f"{checked.offset}, {len(checked.metadata)} characters",
        )
    return checked
