"""Access control lists: rules that allow or deny operations, and a fast index of them.

Rules (as Kafka's StandardAuthorizer):
- A super user may do everything.
- A rule applies if its principal is the user's or `User:*`, its host is the client's
  address or `*`, and its pattern covers the resource.
- Any DENY rule that applies denies. Otherwise, any ALLOW rule that applies allows.
  Without a rule that applies, the operation is denied.
- ALLOW of READ, WRITE, DELETE or ALTER implies DESCRIBE, and ALLOW of ALTER_CONFIGS
  implies DESCRIBE_CONFIGS. DENY implies nothing. ALL covers every operation.

Values are immutable. A change of rules creates another index, with an empty cache.
"""

from __future__ import annotations

import enum
import ipaddress
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

import attrs


class ResourceType(enum.IntEnum):
    """Kinds of resources, with Kafka's numbers."""

    # The hash of an enum is a Python function that takes 0.1 us.
    __hash__ = int.__hash__

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class Pattern(enum.IntEnum):
    """How a rule names resources, with Kafka's numbers."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class AclOperation(enum.IntEnum):
    """Operations, with Kafka's numbers."""

    # The hash of an enum is a Python function that takes 0.1 us.
    __hash__ = int.__hash__

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(enum.IntEnum):
    """Whether a rule allows or denies, with Kafka's numbers."""

    ANY = 1
    DENY = 2
    ALLOW = 3


#: Name of the only resource of the type CLUSTER.
CLUSTER_NAME: Final = "kafka-cluster"
#: Principal in rules for all users.
ANY_USER: Final = "User:*"
#: Name or host in rules for all resources or addresses.
WILDCARD: Final = "*"

#: The operations that exist for each kind of resource. They are the bits of the
#: authorized operations in responses.
LEGAL: Final = {
    ResourceType.TOPIC: (
        AclOperation.READ,
        AclOperation.WRITE,
        AclOperation.CREATE,
        AclOperation.DELETE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        AclOperation.READ,
        AclOperation.DELETE,
        AclOperation.DESCRIBE,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        AclOperation.CREATE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE,
        AclOperation.CLUSTER_ACTION,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
        AclOperation.IDEMPOTENT_WRITE,
    ),
    ResourceType.TRANSACTIONAL_ID: (
        AclOperation.WRITE,
        AclOperation.DESCRIBE,
        AclOperation.TWO_PHASE_COMMIT,
    ),
}
#: AclOperation -> operations whose ALLOW rule allows it too.
_IMPLIED_BY: Final = {
    AclOperation.DESCRIBE: (
        AclOperation.READ,
        AclOperation.WRITE,
        AclOperation.DELETE,
        AclOperation.ALTER,
    ),
    AclOperation.DESCRIBE_CONFIGS: (AclOperation.ALTER_CONFIGS,),
}
#: Maximum number of cached decisions. The cache is emptied when it is full.
_MAX_DECISIONS: Final = 10_000
#: Longest name of a resource whose decisions are cached. Clients choose the names of
#: groups and transactional ids, which may have 32,767 bytes.
_MAX_CACHED_CHARS: Final = 249


@attrs.frozen(order=True)
class Acl:
    """One rule. All fields have the values of Kafka's protocol."""

    resource_type: int
    pattern: int
    name: str
    #: A user, such as "User:alice", or "User:*".
    principal: str
    #: Address of the client, or "*".
    host: str
    operation: int
    permission: int


@attrs.frozen
class AclFilter:
    """A filter for rules, as in DescribeAcls and DeleteAcls."""

    resource_type: int
    pattern: int
    #: None for all.
    name: str | None
    principal: str | None
    host: str | None
    operation: int
    permission: int

    def matches(self, acl: Acl) -> bool:
        """Return whether the filter selects a rule."""
        return (
            self.resource_type in (ResourceType.ANY, acl.resource_type)
            and self._matches_name(acl)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (AclOperation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
        )

    def _matches_name(self, acl: Acl) -> bool:
        if self.pattern == Pattern.MATCH and self.name is not None:
            if acl.pattern == Pattern.PREFIXED:
                return self.name.startswith(acl.name)
            return acl.name in (self.name, WILDCARD)
        if self.pattern not in (Pattern.ANY, Pattern.MATCH, acl.pattern):
            return False
        return self.name in (None, acl.name)


def canonical_address(text: str) -> str:
    """Return an IP address as sockets write it, and any other text unchanged.

    IPv6 addresses have several forms: Kafka's tools write 0:0:0:0:0:0:0:1 for ::1.
    """
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


class AclIndex:
    """All rules, indexed by resource.

    Decisions are cached. The index is used by one thread.
    """

    def __init__(
        self, acls: Iterable[Acl] = (), super_users: Iterable[str] = ()
    ) -> None:
        self.acls = tuple(sorted(set(acls)))
        self.super_users = frozenset(super_users)
        #: The rules with addresses in their canonical form.
        self._rules = [
            acl
            if acl.host == WILDCARD
            else attrs.evolve(acl, host=canonical_address(acl.host))
            for acl in self.acls
        ]
        #: (type, name) -> rules with a literal pattern; the name * included.
        self._literal: dict[tuple[int, str], list[Acl]] = {}
        by_prefix: dict[int, dict[str, list[Acl]]] = {}
        for acl in self._rules:
            if acl.pattern == Pattern.PREFIXED:
                by_name = by_prefix.setdefault(acl.resource_type, {})
                by_name.setdefault(acl.name, []).append(acl)
            else:
                key = (acl.resource_type, acl.name)
                self._literal.setdefault(key, []).append(acl)
        #: Type -> prefix -> rules with this prefix.
        self._prefixed = by_prefix
        #: Type -> the lengths of its prefixes, rising.
        self._lengths = {
            resource_type: sorted({len(prefix) for prefix in by_name})
            for resource_type, by_name in by_prefix.items()
        }
        #: Cached decisions.
        self._decisions: dict[tuple[str, str, int, int, str], bool] = {}

    def is_super(self, principal: str) -> bool:
        """Return whether a user may do everything."""
        return principal in self.super_users

    def allows(
        self, principal: str, host: str, operation: int, resource_type: int, name: str
    ) -> bool:
        """Return whether a user may perform an operation on a resource.

        `host` is the address of the client.
        """
        if principal in self.super_users:
            return True
        key = (principal, host, operation, resource_type, name)
        if len(name) > _MAX_CACHED_CHARS:
            return self._decide(*key)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decide(*key)
            if len(self._decisions) >= _MAX_DECISIONS:
                self._decisions.clear()
            self._decisions[key] = decision
        return decision

    def allows_some_topic(self, principal: str, host: str) -> bool:
        """Return whether a user may write to some topic.

        InitProducerId without a transactional id needs this. A DENY rule counts if it
        covers every resource that an ALLOW rule covers.
        """
        if principal in self.super_users:
            return True
        # Kafka's Authorizer.authorizeByResourceType().
        applying = [
            acl
            for acl in self._rules
            if acl.resource_type == ResourceType.TOPIC
            and acl.principal in (principal, ANY_USER)
            and acl.host in (host, WILDCARD)
            and acl.operation in (AclOperation.WRITE, AclOperation.ALL)
        ]
        denied = [acl for acl in applying if acl.permission == Permission.DENY]
        return any(
            acl.permission == Permission.ALLOW
            and not any(_covers(other, acl) for other in denied)
            for acl in applying
        )

    def _decide(
        self, principal: str, host: str, operation: int, resource_type: int, name: str
    ) -> bool:
        allowing = (operation, AclOperation.ALL, *_IMPLIED_BY.get(operation, ()))  # type: ignore[call-overload]
        is_allowed = False
        # Not ended by an ALLOW rule, because a later DENY rule would have precedence.
        for acl in self._covering(resource_type, name):
            if acl.principal not in (principal, ANY_USER) or acl.host not in (
                host,
                WILDCARD,
            ):
                continue
            if acl.permission == Permission.DENY:
                if acl.operation in (operation, AclOperation.ALL):
                    return False
            elif acl.operation in allowing:
                is_allowed = True
        return is_allowed

    def _covering(self, resource_type: int, name: str) -> Iterable[Acl]:
        yield from self._literal.get((resource_type, name), ())
        # The rules of a resource with the name * are found by the line above.
        if name != WILDCARD:
            yield from self._literal.get((resource_type, WILDCARD), ())
        lengths = self._lengths.get(resource_type, ())
        by_prefix = self._prefixed.get(resource_type, {})
        # One lookup for each length of a prefix, so that the time does not grow with
        # the rules.
        for length in lengths[: bisect_right(lengths, len(name))]:
            yield from by_prefix.get(name[:length], ())


def _covers(deny: Acl, allow: Acl) -> bool:
    """Return whether a DENY rule covers all resources of an ALLOW rule."""
    if deny.pattern == Pattern.PREFIXED:
        # A rule for * covers names without the prefix.
        return allow.name != WILDCARD and allow.name.startswith(deny.name)
    if deny.name == WILDCARD:
        return True
    return allow.pattern == Pattern.LITERAL and deny.name == allow.name
