"""The user of a request, and the operations that the user may perform.

A guard is a function of a request and a Requester; see guards.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs

from netshim.security.acls import (
    CLUSTER_NAME,
    LEGAL,
    AclIndex,
    AclOperation,
    ResourceType,
)

#: The authorized operations in a response if the request did not ask for them
#: (KIP-430).
NOT_REQUESTED: Final = -(2**31)


@attrs.define
class Requester:
    """The user of one request."""

    #: Returns the current rules. They may change while the request waits.
    rules: Callable[[], AclIndex]
    principal: str
    #: Address of the client.
    host: str
    version: int
    #: Returns the name of a topic with an id, or None.
    topic_of: Callable[[bytes], str | None]
    #: Returns whether a topic exists.
    exists: Callable[[str], bool]
    #: Returns the names of all topics.
    topics: Callable[[], Iterable[str]]

    @property
    def index(self) -> AclIndex:
        """The current rules."""
        return self.rules()

    def may(
        self, operation: AclOperation, resource_type: ResourceType, name: str
    ) -> bool:
        """Return whether the user may perform an operation."""
        return self.index.allows(
            self.principal, self.host, operation, resource_type, name
        )

    def may_topic(self, operation: AclOperation, name: str) -> bool:
        """Return whether the user may perform an operation on a topic."""
        return self.may(operation, ResourceType.TOPIC, name)

    def may_group(self, operation: AclOperation, name: str) -> bool:
        """Return whether the user may perform an operation on a group."""
        return self.may(operation, ResourceType.GROUP, name)

    def may_transact(self, operation: AclOperation, name: str) -> bool:
        """Return whether the user may perform an operation on a transactional id."""
        return self.may(operation, ResourceType.TRANSACTIONAL_ID, name)

    def may_cluster(self, operation: AclOperation) -> bool:
        """Return whether the user may perform an operation on the cluster."""
        return self.may(operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def operations(self, resource_type: ResourceType, name: str) -> int:
        """Return the bits of the operations that the user may perform."""
        bits = 0
        for operation in LEGAL[resource_type]:
            if self.may(operation, resource_type, name):
                bits |= 1 << operation
        return bits


Guard = Callable[[Any, Requester], Any]


def split(
    parts: Iterable[Any], is_allowed: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """Return the allowed and the refused parts."""
    allowed: list[Any] = []
    refused: list[Any] = []
    for part in parts:
        (allowed if is_allowed(part) else refused).append(part)
    return allowed, refused


def complete_with(
    allowed: list[Any], refused: list[Any], field: str, response: Any
) -> Any:
    """Return a guard's result: refused parts are added to a field of the response.

    `response` has the default values of the API. It is returned if no part is allowed.
    """
    if not refused:
        return None
    if not allowed:
        setattr(response, field, refused)
        return response

    def complete(handler_response: Any) -> Any:
        getattr(handler_response, field).extend(refused)
        return handler_response

    return complete
