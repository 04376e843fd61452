"""Settings of a log, under Kafka's names, and the durability policies.

Rules:
- A config is known by Kafka's name, checked against Kafka's range (storage format section 13), and has Kafka's default.
- Values are taken as numbers or as the text Kafka would take. An unknown name or a bad value is an error that names
  what would be right; nothing is guessed.

This module reads no file and keeps no state.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from logcore.errors import InvalidConfigError

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1


def _number(name: str, default: int, low: int, high: int = INT64_MAX, doc: str = "") -> Any:
    return attrs.field(default=default, metadata={"name": name, "range": (low, high), "doc": doc})


def _choice(name: str, default: str, choices: tuple[str, ...], doc: str = "") -> Any:
    return attrs.field(default=default, metadata={"name": name, "choices": choices, "doc": doc})


@attrs.frozen(kw_only=True)
class LogConfig:
    """Topic-level settings that this version acts on. Build one with LogConfig.parse({"segment.bytes": 1 << 20})."""

    segment_bytes: int = _number("segment.bytes", 1 << 30, 14, INT32_MAX, "roll before a segment grows above this")
    segment_ms: int = _number("segment.ms", 604_800_000, 1, doc="roll when record times span more than this")
    segment_index_bytes: int = _number("segment.index.bytes", 10_485_760, 12, INT32_MAX, "size of a full index file")
    index_interval_bytes: int = _number("index.interval.bytes", 4096, 0, INT32_MAX, "bytes between index entries")
    max_message_bytes: int = _number("max.message.bytes", 1_048_588, 0, INT32_MAX, "largest batch")
    max_decompressed_bytes: int = _number(
        "max.decompressed.message.bytes", 64 << 20, 1, INT32_MAX, "most that one batch may inflate to"
    )
    batch_size: int = _number("batch.size", 16_384, 1, INT32_MAX, "bytes at which append_many closes a batch")
    compression_type: str = _choice(
        "compression.type",
        "producer",
        ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
        "codec of what is written; producer keeps what comes",
    )
    compression_gzip_level: int = _number("compression.gzip.level", -1, -1, 9)
    compression_lz4_level: int = _number("compression.lz4.level", 9, 1, 17)
    compression_zstd_level: int = _number("compression.zstd.level", 3, -131_072, 22)
    message_timestamp_type: str = _choice("message.timestamp.type", "CreateTime", ("CreateTime", "LogAppendTime"))
    message_timestamp_before_max_ms: int = _number("message.timestamp.before.max.ms", INT64_MAX, 0)
    message_timestamp_after_max_ms: int = _number("message.timestamp.after.max.ms", INT64_MAX, 0)
    cleanup_policy: str = _choice("cleanup.policy", "delete", ("delete", "compact", "compact,delete", "delete,compact"))

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def is_append_time(self) -> bool:
        return self.message_timestamp_type == "LogAppendTime"

    @classmethod
    def parse(cls, given: Mapping[str, object] | None) -> LogConfig:
        """Checks names and values; raises InvalidConfigError for the first that is wrong."""
        fields = {field.metadata["name"]: field for field in attrs.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            field = fields.get(name)
            if field is None:
                near = difflib.get_close_matches(str(name), fields, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(fields))}"
                raise InvalidConfigError(f"unknown config {name!r}{hint}")
            values[field.name] = _checked(name, value, field.metadata)
        return cls(**values)

    def as_mapping(self) -> dict[str, int | str]:
        """All settings by Kafka's names."""
        return {field.metadata["name"]: getattr(self, field.name) for field in attrs.fields(type(self))}


def _checked(name: str, value: object, facts: Mapping[str, Any]) -> int | str:
    if "choices" in facts:
        text = str(value).replace(" ", "")
        text = {"none": "uncompressed"}.get(text, text)
        if text not in facts["choices"]:
            raise InvalidConfigError(
                f"config {name!r}", expected=f"one of {', '.join(facts['choices'])}", found=repr(value)
            )
        return text
    low, high = facts["range"]
    try:
        number = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or not low <= number <= high:
        raise InvalidConfigError(f"config {name!r}", expected=f"an integer from {low} to {high}", found=repr(value))
    return number


@attrs.frozen
class Durability:
    """When an append is acknowledged, and what a crash may then still lose.

    | policy      | returns after                                       | power loss loses                          |
    |-------------|-----------------------------------------------------|-------------------------------------------|
    | always      | an fdatasync of this append alone                   | nothing acknowledged                      |
    | group       | an fdatasync that began after it was written        | nothing acknowledged                      |
    | every(m)    | the write; each m-th record syncs                   | at most m-1 records and the sync under way |
    | interval(s) | the write; synced when s milliseconds have passed   | the last s ms and the sync under way      |
    | os          | the write                                           | no bound                                  |

    A killed process loses nothing acknowledged under any of them. amount: m records or s milliseconds. max_bytes: under
    group, the most that may be written and not yet synced.
    """

    kind: Literal["always", "group", "every", "interval", "os"]
    amount: int = 0
    max_bytes: int = 1 << 20

    @property
    def waits(self) -> bool:
        """Whether an append waits for the disk, so that readers see only what is on it."""
        return self.kind in ("always", "group")

    def __str__(self) -> str:
        return f"{self.kind}({self.amount})" if self.kind in ("every", "interval") else self.kind

    @classmethod
    def parse(cls, given: str | Durability) -> Durability:
        """From "always", "group", "os", "every(100)" or "interval(500)"."""
        if isinstance(given, Durability):
            return given
        found = re.fullmatch(r"(always|group|os)|(every|interval)\((\d+)\)", given) if isinstance(given, str) else None
        if found is None or (found[3] is not None and int(found[3]) < 1):
            raise InvalidConfigError(
                "unknown durability",
                expected="'always', 'group', 'os', 'every(M)' records or 'interval(S)' ms",
                found=repr(given),
            )
        return cls(found[1] or found[2], int(found[3] or 0))  # type: ignore[arg-type]


def every(records: int) -> Durability:
    """Sync at each records-th record."""
    return Durability.parse(f"every({records})")


def interval(milliseconds: int) -> Durability:
    """Sync when an append or tick() finds that milliseconds have passed since the last sync."""
    return Durability.parse(f"interval({milliseconds})")
