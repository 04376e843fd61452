"""What a consumer is told and tells: its settings, its listener, records by partition, offsets to commit.

Rules:
- Settings are checked when they are given, before anything is read.

Nothing here reads or commits.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypedDict

import attrs

from logcore.consumer.assignors import ASSIGNORS, Assignor
from logcore.consumer.membership import TopicPartition
from logcore.errors import InvalidConfigError
from logcore.kernels import TopicRecord

Reset = Literal["latest", "earliest", "none"]
IsolationLevel = Literal["read_uncommitted", "read_committed"]
OffsetsStorage = Literal["log", "registry"]
Deserializer = Callable[[bytes], Any]
#: As Kafka limits it.
_METADATA_CHARACTERS: Final = 4096


class RebalanceListener:
    """Is told what a consumer gets and gives up, in the thread that calls poll(). Override what is of interest.

    The methods may call seek(), commit() and what only looks; poll(), subscribe(), assign() and close() are refused.
    """

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """These are new; positions may be set with seek()."""

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """These are to be given up, and may still be committed."""

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """These may be another's already; commits are refused."""
        self.on_partitions_revoked(partitions)


@attrs.frozen
class OffsetAndMetadata:
    """What is committed for a partition: the next offset to process."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class GroupMetadata(NamedTuple):
    """A member of a group in one generation. generation: -1 and member_id "": no member."""

    group_id: str
    generation: int
    member_id: str
    group_instance_id: str | None


class ConsumerRecords(Mapping[TopicPartition, Sequence[TopicRecord]]):
    """What one poll() found: lists of records by partition, each in the order of offsets."""

    def __init__(self, found: dict[TopicPartition, list[TopicRecord]]) -> None:
        self._found = found

    def __getitem__(self, partition: TopicPartition) -> Sequence[TopicRecord]:
        return self._found[partition]

    def __iter__(self) -> Iterator[TopicPartition]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"<ConsumerRecords {self.count} of {len(self)} partitions>"

    @property
    def count(self) -> int:
        """How many records there are in all."""
        return sum(map(len, self._found.values()))

    def records(self) -> Iterator[TopicRecord]:
        """All of them, one partition after the other."""
        return itertools.chain.from_iterable(self._found.values())

    def next_offsets(self) -> dict[TopicPartition, int]:
        """The offsets behind them, as commit() takes them."""
        return {partition: records[-1].offset + 1 for partition, records in self._found.items()}


class ConsumerOptions(TypedDict, total=False):
    """What LogDir.consumer() takes, with the names and defaults of Kafka's Java client where it has them.

    group_id: whose members divide the partitions, and which keeps what was committed. group_instance_id: of a static
    member, whose partitions wait for it when it is gone. auto_offset_reset ("latest"): where reading begins without a
    committed offset; "none" raises. enable_auto_commit (True), auto_commit_interval_ms (5,000): poll() commits what is
    finished so often. isolation_level ("read_uncommitted"): see Log.read(). max_poll_records (500): of one poll().
    max_poll_interval_ms (300,000): who polls no more for so long loses its partitions. assignors
    ("cooperative-sticky"): names of range, roundrobin, sticky, cooperative-sticky, or objects; all members need one in
    common. key_deserializer, value_deserializer: called with bytes, never with null. offsets_storage ("log"),
    dual_commit (False): for groups whose offsets move between the registry and the log; see consumer/offsetstores.py.
    """

    group_id: str | None
    group_instance_id: str | None
    client_id: str
    auto_offset_reset: Reset
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    isolation_level: IsolationLevel
    max_poll_records: int
    max_poll_interval_ms: int
    assignors: Iterable[str | Assignor]
    key_deserializer: Deserializer | None
    value_deserializer: Deserializer | None
    offsets_storage: OffsetsStorage
    dual_commit: bool


@attrs.frozen(kw_only=True)
class ConsumerSettings:
    """See ConsumerOptions."""

    group_id: str | None = None
    group_instance_id: str | None = None
    client_id: str = ""
    auto_offset_reset: Reset = "latest"
    enable_auto_commit: bool = True
    auto_commit_interval_ms: int = 5_000
    isolation_level: IsolationLevel = "read_uncommitted"
    max_poll_records: int = 500
    max_poll_interval_ms: int = 300_000
    assignors: tuple[Assignor, ...] = (ASSIGNORS["cooperative-sticky"],)
    key_deserializer: Deserializer | None = None
    value_deserializer: Deserializer | None = None
    offsets_storage: OffsetsStorage = "log"
    dual_commit: bool = False

    @property
    def uses_registry(self) -> bool:
        """Whether offsets are in the registry too, or there alone."""
        return self.offsets_storage == "registry" or self.dual_commit

    def __attrs_post_init__(self) -> None:
        if self.group_id == "" or self.group_instance_id == "":
            raise InvalidConfigError("an id is not empty", expected="a text, or None", found="''")
        if self.group_instance_id is not None and self.group_id is None:
            raise InvalidConfigError("group_instance_id needs a group_id")
        choices: dict[str, tuple[str, ...]] = {
            "auto_offset_reset": ("latest", "earliest", "none"),
            "isolation_level": ("read_uncommitted", "read_committed"),
            "offsets_storage": ("log", "registry"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidConfigError(name, expected=f"one of {', '.join(allowed)}", found=repr(getattr(self, name)))
        if self.uses_registry and self.group_id is None:
            raise InvalidConfigError("offsets_storage and dual_commit need a group_id")
        for name in ("auto_commit_interval_ms", "max_poll_records", "max_poll_interval_ms"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidConfigError(name, expected="a whole number above 0", found=repr(value))


#: The settings by their names.
NAMES: Final = tuple(field.name for field in attrs.fields(ConsumerSettings))


def consumer_settings(given: Mapping[str, Any]) -> ConsumerSettings:
    """Raises InvalidConfigError, which names the nearest setting for an unknown one."""
    for name in given:
        if name not in NAMES:
            nearest = difflib.get_close_matches(name, NAMES, 1)
            raise InvalidConfigError(f"unknown setting {name!r}", expected=nearest[0] if nearest else ", ".join(NAMES))
    chosen = dict(given)
    if "assignors" in chosen:
        chosen["assignors"] = chosen_assignors(chosen["assignors"])
    return ConsumerSettings(**chosen)


def chosen_assignors(given: Iterable[str | Assignor]) -> tuple[Assignor, ...]:
    """Assignors by their names, or as objects of the caller's. Raises InvalidConfigError."""
    if isinstance(given, str):
        raise InvalidConfigError("assignors is a list of names", expected=f"[{given!r}]", found=repr(given))
    found = []
    for one in given:
        known = ASSIGNORS.get(one) if isinstance(one, str) else one
        if known is None:
            raise InvalidConfigError("unknown assignor", expected=f"one of {', '.join(ASSIGNORS)}", found=repr(one))
        found.append(known)
    if not found:
        raise InvalidConfigError(
            "a consumer needs an assignor", expected=f"some of {', '.join(ASSIGNORS)}", found="none"
        )
    if len({one.is_cooperative for one in found}) > 1:
        raise InvalidConfigError("cooperative assignors and others cannot be offered together", found=str(found))
    return tuple(found)


def checked_offset(given: int | OffsetAndMetadata) -> OffsetAndMetadata:
    found = given if isinstance(given, OffsetAndMetadata) else OffsetAndMetadata(given)
    if found.offset < 0 or len(found.metadata) > _METADATA_CHARACTERS:
        raise InvalidConfigError(
            "a committed offset",
            expected=f"from 0, with at most {_METADATA_CHARACTERS} characters of metadata",
            found=f"{found.offset}, {len(found.metadata)} characters",
        )
    return found
