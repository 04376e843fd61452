"""The state of a partition in the registry: its replicas, leader, epoch, ISR and ELR.

    /brokers/topics/<t>/partitions/<p>/<topic id>
        {"version":3,"controller_epoch":4,"leader":2,"leader_epoch":7,
         "replicas":[2,3,1],"adding":[],"removing":[],
         "isr":{"2":[31,"<disk>"],"3":[30,"<disk>"]},"elr":{"1":"<disk>"},
         "recovering":false}

Rules:
- The members of the ISR and of the ELR are replicas. A broker deletes its replica once
  it is none of them, so an ISR that still named it could elect an empty log.
- An ISR member is a broker in one registration (its broker epoch) with one disk. The
  members of the ISR have all records below the high watermark.
- ELR: eligible leader replicas (KIP-966). They left an ISR that became smaller than
  `min.insync.replicas`. The high watermark does not move while the ISR is that small,
  so they also have all records below it, as long as they keep their disk.
- Each change is a compare-and-set of the node. The value contains everything that the
  change depends on, so no second node must be compared at the same moment.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import attrs

from logcore.errors import CorruptRegistryError
from logcore.registry.paths import pack_json, unpack_json

#: The leader of a partition that has none.
NO_LEADER: Final = -1
#: The version of the node's format.
_VERSION: Final = 3


class ReplicationError(enum.IntEnum):
    """Kafka's codes of the errors that these rules return."""

    OFFSET_OUT_OF_RANGE = 1
    NOT_LEADER_OR_FOLLOWER = 6
    NOT_ENOUGH_REPLICAS = 19
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85


class Role(enum.Enum):
    """The role of a broker in a partition."""

    LEADER = enum.auto()
    FOLLOWER = enum.auto()
    #: There is no leader, or this broker is the leader of an earlier registration.
    NONE = enum.auto()


@attrs.frozen
class InSyncReplica:
    """A member of the ISR, without its broker id."""

    #: The registration of the broker. A broker that registers again must join again.
    broker_epoch: int
    #: The `directory.id` of its log directory.
    disk: str


@attrs.frozen
class LiveBroker:
    """A registered broker, as its ephemeral node describes it."""

    epoch: int
    disk: str
    rack: str | None = None
    #: True while the broker shuts down: it leads and joins nothing any more.
    is_leaving: bool = False
    #: True if its previous run ended with a clean shutdown.
    was_clean: bool = False


@attrs.frozen
class LeaderAndIsr:
    """The value of a partition's state node. Kafka's class has the same name."""

    leader: int
    leader_epoch: int
    isr: Mapping[int, InSyncReplica]
    #: The assigned brokers, the preferred leader first. During a reassignment: the
    #: target, then the brokers that will be removed.
    replicas: tuple[int, ...]
    #: The brokers that the partition did not have before the reassignment. Those that
    #: `removing` names too were added by a reassignment that was replaced or cancelled.
    adding: tuple[int, ...] = ()
    #: The brokers that a reassignment removes.
    removing: tuple[int, ...] = ()
    #: Eligible leader replicas: broker id and disk.
    elr: Mapping[int, str] = attrs.field(factory=dict)
    controller_epoch: int = 0
    #: True from an unclean election until the ISR changes: followers may lose records
    #: below their high watermark.
    is_recovering: bool = False

    @property
    def target(self) -> tuple[int, ...]:
        """The replicas after the reassignment, if there is one."""
        return tuple(each for each in self.replicas if each not in self.removing)


def role_of(state: LeaderAndIsr, broker: int, broker_epoch: int | None) -> Role:
    """Return the role of a broker; `broker_epoch` is None until it registers.

    Call it whenever the state or the epoch changes. A broker leads only in the
    registration that was elected: after a restart its log may have lost records of the
    same leader epoch (KAFKA-7235).
    """
    if broker_epoch is None or state.leader == NO_LEADER:
        return Role.NONE
    if broker not in state.replicas:
        return Role.NONE
    if state.leader != broker:
        return Role.FOLLOWER
    own = state.isr.get(broker)
    if own is None or own.broker_epoch != broker_epoch:
        return Role.NONE
    return Role.LEADER


def replace_isr(
    state: LeaderAndIsr, isr: Mapping[int, InSyncReplica], min_isr: int
) -> LeaderAndIsr:
    """Return the state with another ISR, and the ELR that follows from it.

    If the new ISR has at least `min_isr` members, the high watermark may move, and
    replicas outside the ISR can miss records: the ELR becomes empty. If it is smaller,
    the members that leave enter the ELR.
    """
    elr: dict[int, str] = {}
    if len(isr) < min_isr:
        left = {broker: member.disk for broker, member in state.isr.items()}
        elr = {
            broker: disk
            for broker, disk in {**state.elr, **left}.items()
            if broker not in isr
        }
    return attrs.evolve(state, isr=isr, elr=elr)


def pack_state(state: LeaderAndIsr) -> bytes:
    return pack_json(
        {
            "version": _VERSION,
            "controller_epoch": state.controller_epoch,
            "leader": state.leader,
            "leader_epoch": state.leader_epoch,
            "replicas": list(state.replicas),
            "adding": list(state.adding),
            "removing": list(state.removing),
            "isr": {
                str(broker): [member.broker_epoch, member.disk]
                for broker, member in sorted(state.isr.items())
            },
            "elr": {str(broker): disk for broker, disk in sorted(state.elr.items())},
            "recovering": state.is_recovering,
        }
    )


def unpack_state(data: bytes, path: str) -> LeaderAndIsr:
    """Decode the value of the node `path`. Raises CorruptRegistryError."""
    values = unpack_json(data, path)
    if values.get("version") != _VERSION:
        raise CorruptRegistryError(
            "unknown version of a partition's state",
            path=path,
            expected=str(_VERSION),
            found=repr(values.get("version"))[:200],
        )
    try:
        state = LeaderAndIsr(
            leader=_integer(values["leader"]),
            leader_epoch=_integer(values["leader_epoch"]),
            replicas=_brokers(values["replicas"]),
            adding=_brokers(values["adding"]),
            removing=_brokers(values["removing"]),
            isr={
                _broker(broker): InSyncReplica(_integer(epoch), _text(disk))
                for broker, (epoch, disk) in values["isr"].items()
            },
            elr={
                _broker(broker): _text(disk) for broker, disk in values["elr"].items()
            },
            controller_epoch=_integer(values["controller_epoch"]),
            is_recovering=values["recovering"],
        )
        _check(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRegistryError(
            "not the state of a partition", path=path, found=repr(bytes(data))[:200]
        ) from error
    return state


def _check(state: LeaderAndIsr) -> None:
    """Raise ValueError if the rules never produce this state."""
    if (
        type(state.is_recovering) is not bool
        or state.leader < NO_LEADER
        or state.isr.keys() & state.elr.keys()
        or len({*state.replicas}) < len(state.replicas)
        or not {*state.replicas}
        >= {*state.isr, *state.elr, *state.adding, *state.removing}
        or (state.leader != NO_LEADER and state.leader not in state.isr)
    ):
        raise ValueError


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _brokers(values: list[Any]) -> tuple[int, ...]:
    return tuple(_integer(each) for each in values)


def _broker(name: str) -> int:
    if not (name.isascii() and name.isdigit()) or str(int(name)) != name:
        raise ValueError
    return int(name)
