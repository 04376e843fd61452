"""Settings of a log, under Kafka's names, and the durability policies.

Rules:
- A setting has Kafka's name, Kafka's range (storage format section 13) and Kafka's
  default.
- Values are numbers, or texts that Kafka would accept. An unknown name or an invalid
  value is an error that contains the valid ones.

This module reads no file and keeps no state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from logcore.errors import InvalidConfigError, nearest_name

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
#: Maximum size of one decompressed batch, if no setting limits it.
MAX_DECOMPRESSED_BYTES: Final = 64 << 20
#: Default size of the table of keys of a compaction. Kafka:
#: log.cleaner.dedupe.buffer.size.
DEDUPE_BYTES: Final = 128 << 20
#: The pattern of a list of throttled replicas, and its description.
_REPLICAS: Final = (
    r"\*|(\d+:\d+)?(,(\d+:\d+)?)*",
    "partition:broker, more of these, or *",
)
#: Numbers in Java's syntax. int() and float() accept more, such as 1_000, and less,
#: such as 0.5f.
_INTEGER: Final = re.compile(r"[+-]?\d+")
_DOUBLE: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[fFdD]?", re.ASCII)


def _int(
    name: str,
    default: int,
    low: int,
    high: int = INT32_MAX,
    doc: str = "",
    *,
    also: int | None = None,
    is_extension: bool = False,
) -> Any:
    """Return a field for an int. `also` is a valid value outside of the range."""
    facts = {
        "name": name,
        "type": "int",
        "range": (low, high),
        "also": also,
        "doc": doc,
        "is_extension": is_extension,
    }
    return attrs.field(default=default, metadata=facts)


def _long(name: str, default: int, low: int, *, doc: str = "") -> Any:
    return attrs.field(
        default=default,
        metadata={"name": name, "type": "long", "range": (low, INT64_MAX), "doc": doc},
    )


def _choice(name: str, default: str, choices: tuple[str, ...], doc: str = "") -> Any:
    return attrs.field(
        default=default,
        metadata={"name": name, "type": "string", "choices": choices, "doc": doc},
    )


def _list(name: str, default: str, pattern: str, expected: str) -> Any:
    """Return a field for a comma-separated list, which is empty for the empty text.
    `pattern` matches the whole list without its spaces.
    """
    facts = {
        "name": name,
        "type": "list",
        "pattern": pattern,
        "expected": expected,
        "doc": "",
    }
    return attrs.field(default=default, metadata=facts)


def _boolean(name: str, default: bool, *, only: bool | None = None) -> Any:
    """Return a field for a boolean. `only` is the only valid value."""
    return attrs.field(
        default=default,
        metadata={"name": name, "type": "boolean", "only": only, "doc": ""},
    )


def _text(name: str, default: str, doc: str = "", *, is_extension: bool = False) -> Any:
    return attrs.field(
        default=default,
        metadata={
            "name": name,
            "type": "string",
            "doc": doc,
            "is_extension": is_extension,
        },
    )


def _double(name: str, default: float, low: float, high: float) -> Any:
    return attrs.field(
        default=default,
        metadata={"name": name, "type": "double", "range": (low, high), "doc": ""},
    )


@attrs.frozen(kw_only=True)
class LogConfig:
    """Kafka's topic-level settings. Create one with LogConfig.parse({"segment.bytes": 1
    << 20}).

    Settings for features that this library does not have, such as throttled replicas,
    are checked and kept for a Kafka broker that takes over the directory. Remote
    storage cannot be enabled, as in a Kafka broker without a remote log manager.
    """

    segment_bytes: int = _int(
        "segment.bytes", 1 << 30, 14, doc="roll before a segment grows above this"
    )
    segment_ms: int = _long(
        "segment.ms", 604_800_000, 1, doc="roll when record times span more than this"
    )
    segment_jitter_ms: int = _long("segment.jitter.ms", 0, 0)
    segment_index_bytes: int = _int(
        "segment.index.bytes", 10_485_760, 4, doc="size of a full index file"
    )
    index_interval_bytes: int = _int(
        "index.interval.bytes", 4096, 0, doc="bytes between index entries"
    )
    flush_messages: int = _long(
        "flush.messages",
        INT64_MAX,
        1,
        doc="sync when this many records are not on disk",
    )
    flush_ms: int = _long(
        "flush.ms",
        INT64_MAX,
        0,
        doc="sync when a record has not been on disk for this long",
    )
    retention_bytes: int = _long("retention.bytes", -1, -INT64_MAX - 1)
    retention_ms: int = _long("retention.ms", 604_800_000, -1)
    max_message_bytes: int = _int(
        "max.message.bytes", 1_048_588, 0, doc="largest batch"
    )
    max_decompressed_bytes: int = _int(
        "max.decompressed.message.bytes",
        MAX_DECOMPRESSED_BYTES,
        1,
        doc="most that one batch may inflate to",
        is_extension=True,
    )
    batch_size: int = _int(
        "batch.size",
        16_384,
        1,
        doc="bytes at which append_many closes a batch",
        is_extension=True,
    )
    mirror_source: str = _text(
        "mirror.source",
        "",
        "the mirrored topic, with its offsets; only the mirror may write",
        is_extension=True,
    )
    cleanup_policy: str = _list(
        "cleanup.policy",
        "delete",
        r"((delete|compact)(,(delete|compact))*)?",
        "delete, compact, both or nothing",
    )
    delete_retention_ms: int = _long("delete.retention.ms", 86_400_000, 0)
    min_compaction_lag_ms: int = _long("min.compaction.lag.ms", 0, 0)
    max_compaction_lag_ms: int = _long("max.compaction.lag.ms", INT64_MAX, 1)
    min_cleanable_dirty_ratio: float = _double(
        "min.cleanable.dirty.ratio", 0.5, 0.0, 1.0
    )
    file_delete_delay_ms: int = _long("file.delete.delay.ms", 60_000, 0)
    compression_type: str = _choice(
        "compression.type",
        "producer",
        ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
        "codec of stored batches; producer keeps the producer's codec",
    )
    compression_gzip_level: int = _int("compression.gzip.level", -1, 1, 9, also=-1)
    compression_lz4_level: int = _int("compression.lz4.level", 9, 1, 17)
    compression_zstd_level: int = _int("compression.zstd.level", 3, -131_072, 22)
    preallocate: bool = _boolean("preallocate", False)
    message_timestamp_type: str = _choice(
        "message.timestamp.type", "CreateTime", ("CreateTime", "LogAppendTime")
    )
    message_timestamp_before_max_ms: int = _long(
        "message.timestamp.before.max.ms", INT64_MAX, 0
    )
    message_timestamp_after_max_ms: int = _long(
        "message.timestamp.after.max.ms", INT64_MAX, 0
    )
    min_insync_replicas: int = _int("min.insync.replicas", 1, 1)
    unclean_leader_election_enable: bool = _boolean(
        "unclean.leader.election.enable", False
    )
    leader_replication_throttled_replicas: str = _list(
        "leader.replication.throttled.replicas", "", *_REPLICAS
    )
    follower_replication_throttled_replicas: str = _list(
        "follower.replication.throttled.replicas", "", *_REPLICAS
    )
    remote_storage_enable: bool = _boolean("remote.storage.enable", False, only=False)
    remote_log_copy_disable: bool = _boolean("remote.log.copy.disable", False)
    remote_log_delete_on_disable: bool = _boolean("remote.log.delete.on.disable", False)
    local_retention_ms: int = _long("local.retention.ms", -2, -2)
    local_retention_bytes: int = _long("local.retention.bytes", -2, -2)

    @property
    def max_segment_ms(self) -> int:
        """Time after which the active segment is rolled. The active segment is not
        compacted, so max.compaction.lag.ms limits the time too (Kafka's
        LogConfig.maxSegmentMs).
        """
        if self.is_compacted:
            return min(self.segment_ms, self.max_compaction_lag_ms)
        return self.segment_ms

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def is_append_time(self) -> bool:
        return self.message_timestamp_type == "LogAppendTime"

    @classmethod
    def parse(cls, given: Mapping[str, object] | None) -> LogConfig:
        """Check names and values. Raises InvalidConfigError for the first invalid one."""
        values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            field = known_config(name)
            values[field.name] = _checked(name, value, field.metadata)
        config = cls(**values)
        if config.min_compaction_lag_ms > config.max_compaction_lag_ms:
            raise InvalidConfigError(
                "config 'min.compaction.lag.ms'",
                expected=f"at most max.compaction.lag.ms, {config.max_compaction_lag_ms}",
                found=config.min_compaction_lag_ms,
            )
        return config

    def as_mapping(self) -> dict[str, int | float | bool | str]:
        """Return all settings by Kafka's names."""
        return {name: getattr(self, field.name) for name, field in CONFIGS.items()}


#: Every setting by Kafka's name. The metadata of a field contains its type ("int",
#: "long", "double", "boolean", "string", "list"), its range or choices, its
#: description, and `is_extension`, which is True for settings that Kafka does not have.
CONFIGS: Final[Mapping[str, Any]] = {
    field.metadata["name"]: field for field in attrs.fields(LogConfig)
}


def known_config(name: object) -> Any:
    """Return the field of a setting, by Kafka's name. Raises InvalidConfigError, which
    contains the most similar name.
    """
    field = None
    if isinstance(name, str):
        field = CONFIGS.get(name)
    if field is None:
        nearest = nearest_name(str(name), CONFIGS)
        if nearest is not None:
            hint = f"; did you mean {nearest!r}?"
        else:
            hint = f"; known are {', '.join(sorted(CONFIGS))}"
        raise InvalidConfigError(f"unknown config {name!r}{hint}")
    return field


def config_text(value: float | bool | str) -> str:
    """Return the value of a setting in Kafka's form."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _checked(name: str, value: object, facts: Mapping[str, Any]) -> float | bool | str:
    text = str(value)
    if "choices" in facts:
        text = text.strip()
        if text not in facts["choices"]:
            raise InvalidConfigError(
                f"config {name!r}",
                expected=f"one of {', '.join(facts['choices'])}",
                found=repr(value),
            )
        return text
    if facts["type"] == "list":
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        if not re.fullmatch(facts["pattern"], ",".join(parts)):
            raise InvalidConfigError(
                f"config {name!r}", expected=facts["expected"], found=repr(value)
            )
        return ",".join(parts)
    if facts["type"] == "boolean":
        parsed = {"true": True, "false": False}.get(text.strip().lower())
        if parsed is None or facts["only"] not in (None, parsed):
            expected = (
                "true or false" if facts["only"] is None else config_text(facts["only"])
            )
            raise InvalidConfigError(
                f"config {name!r}", expected=expected, found=repr(value)
            )
        return parsed
    if "range" not in facts:
        return text
    low, high = facts["range"]
    number = _number(value, is_double=facts["type"] == "double")
    if number is None or not (low <= number <= high or number == facts.get("also")):
        kind = "a number" if facts["type"] == "double" else "an integer"
        other = "" if facts.get("also") is None else f", or {facts['also']}"
        raise InvalidConfigError(
            f"config {name!r}",
            expected=f"{kind} from {low} to {high}{other}",
            found=repr(value),
        )
    return number


def _number(value: object, *, is_double: bool) -> float | None:
    """Return a number, or the number that a text means in Java. Return None for any
    other value.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.strip()
        if is_double:
            return float(text.rstrip("fFdD")) if _DOUBLE.fullmatch(text) else None
        return int(text) if _INTEGER.fullmatch(text) else None
    if isinstance(value, (int, float) if is_double else int):
        return value
    return None


#: Settings of logs that were created without settings. Kafka's default, seven days,
#: would delete records, although no retention was chosen.
KEEPS_ALL: Final[Mapping[str, object]] = {"retention.ms": -1, "retention.bytes": -1}


@attrs.frozen
class Durability:
    """When an append is acknowledged, and which acknowledged records a power loss may
    remove.

    | policy      | returns after                                       | power loss loses                          |
    |-------------|-----------------------------------------------------|-------------------------------------------|
    | always      | an fdatasync of this append alone                   | nothing acknowledged                      |
    | group       | an fdatasync that began after it was written        | nothing acknowledged                      |
    | every(m)    | the write; each m-th record syncs                   | at most m-1 records and the sync under way |
    | interval(s) | the write; synced when s milliseconds have passed   | the last s ms and the sync under way      |
    | os          | the write                                           | no bound                                  |

    A killed process loses no acknowledged record under any policy.
    """

    kind: Literal["always", "group", "every", "interval", "os"]
    #: m records or s milliseconds.
    amount: int = 0
    #: Under `group`, the maximum number of written bytes that are not synced yet.
    max_bytes: int = 1 << 20

    @property
    def waits(self) -> bool:
        """Whether an append waits for the disk, so that readers see only durable
        records.
        """
        return self.kind in ("always", "group")

    def __str__(self) -> str:
        if self.kind in ("every", "interval"):
            return f"{self.kind}({self.amount})"
        return self.kind

    @classmethod
    def parse(cls, given: str | Durability) -> Durability:
        """Read "always", "group", "os", "every(100)" or "interval(500)"."""
        if isinstance(given, Durability):
            return given
        found = None
        if isinstance(given, str):
            found = re.fullmatch(r"(always|group|os)|(every|interval)\((\d+)\)", given)
        if found is None or (found[3] is not None and int(found[3]) < 1):
            raise InvalidConfigError(
                "unknown durability",
                expected="'always', 'group', 'os', 'every(M)' records or 'interval(S)' ms",
                found=repr(given),
            )
        return cls(found[1] or found[2], int(found[3] or 0))  # type: ignore[arg-type]


def every(records: int) -> Durability:
    """Return the policy that syncs at each `records`-th record."""
    return Durability.parse(f"every({records})")


def interval(milliseconds: int) -> Durability:
    """Return the policy that syncs when an append or tick() finds that this time has
    passed since the last sync.
    """
    return Durability.parse(f"interval({milliseconds})")
