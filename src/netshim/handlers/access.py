"""Access control lists over the wire.

Rules (Apache Kafka 4.1.1, with exceptions that are marked):
- Without an authorizer (--acls), each request is answered with SECURITY_DISABLED.
- A rule is stored unchanged. A rule whose host is not an address matches no client.
- Each rule of a request is created separately, and each filter is applied separately.
- ANY and MATCH in a new rule are refused with INVALID_REQUEST; Kafka answers with
  UNKNOWN_SERVER_ERROR. A number that Kafka does not define closes the connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logcore import LogcoreError
from netshim import wire
from netshim.handlers.failures import fail_results
from netshim.scheduling import CloseConnection, PendingResponse
from netshim.security.acls import (
    CLUSTER_NAME,
    Acl,
    AclFilter,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        CreateAclsRequest,
        CreateAclsResponse,
        DeleteAclsRequest,
        DeleteAclsResponse,
        DescribeAclsRequest,
        DescribeAclsResponse,
    )

#: As in Kafka without authorizer.class.name.
_DISABLED: Final[dict[str, Any]] = {
    "error_code": codes.SECURITY_DISABLED,
    "error_message": "no authorizer is configured; start the broker with --acls",
}
#: Limit of names and principals, which the registry stores as paths and values.
_MAX_NAME_CHARS: Final = 1_024


def _check_enum_numbers(
    resource_type: int, pattern: int, operation: int, permission: int
) -> None:
    """Close the connection for a number that Kafka does not define."""
    for numbers, number in (
        (Pattern, pattern),
        (AclOperation, operation),
        (Permission, permission),
    ):
        if number not in [*numbers]:
            raise CloseConnection(f"{number} is not a {numbers.__name__}")
    if resource_type < ResourceType.ANY:
        raise CloseConnection(f"{resource_type} is not a ResourceType")


def _error_of(acl: Acl) -> str | None:
    """Return why a rule is refused, if it is."""
    # A rule is about one type, one name, one operation. ANY and MATCH select among
    # rules.
    specific = (
        acl.resource_type != ResourceType.ANY
        and acl.pattern in (Pattern.LITERAL, Pattern.PREFIXED)
        and acl.operation != AclOperation.ANY
        and acl.permission != Permission.ANY
    )
    if not specific or acl.resource_type not in [*ResourceType]:
        return "ANY, MATCH and unknown types are for filters only"
    if not acl.name or "\0" in acl.name or len(acl.name) > _MAX_NAME_CHARS:
        return "the name of the resource is empty, too long or contains NUL"
    # A rule about another cluster would never apply.
    if acl.resource_type == ResourceType.CLUSTER and acl.name != CLUSTER_NAME:
        return f"the only cluster is {CLUSTER_NAME}"
    # No client has a principal without a type. A rule that denies would silently have
    # no effect.
    if ":" not in acl.principal or len(acl.principal) > _MAX_NAME_CHARS:
        return "a principal has the form User:name"
    return None


def create_acls(
    request: CreateAclsRequest, call: Call, state: BrokerState
) -> CreateAclsResponse | PendingResponse:
    """Store rules."""
    response_type = wire.CREATE_ACLS.Response
    if state.security.acls is None:
        return response_type(
            results=[response_type.Result(**_DISABLED) for _ in request.creations]
        )
    results = []
    acls = []
    for creation in request.creations:
        _check_enum_numbers(
            creation.resource_type,
            creation.resource_pattern_type,
            creation.operation,
            creation.permission_type,
        )
        acl = Acl(
            creation.resource_type,
            creation.resource_pattern_type,
            creation.resource_name,
            creation.principal,
            creation.host,
            creation.operation,
            creation.permission_type,
        )
        # Results are in the order of the creations, which have no other identity.
        result = response_type.Result()
        results.append(result)
        error = _error_of(acl)
        if error is None:
            acls.append(acl)
        else:
            result.error_code = codes.INVALID_REQUEST
            result.error_message = error
    response = response_type(results=results)
    if not acls:
        return response

    def refuse(error: LogcoreError) -> CreateAclsResponse:
        fail_results(results, error)
        return response

    return state.change_security(
        lambda: state.security.store().add_acls(acls), lambda _: response, refuse
    )


def _filter_of(acl: Any) -> AclFilter:
    _check_enum_numbers(
        acl.resource_type_filter,
        acl.pattern_type_filter,
        acl.operation,
        acl.permission_type,
    )
    return AclFilter(
        acl.resource_type_filter,
        acl.pattern_type_filter,
        acl.resource_name_filter,
        acl.principal_filter,
        acl.host_filter,
        acl.operation,
        acl.permission_type,
    )


def delete_acls(
    request: DeleteAclsRequest, call: Call, state: BrokerState
) -> DeleteAclsResponse | PendingResponse:
    """Remove the rules that filters select, and return them."""
    response_type = wire.DELETE_ACLS.Response
    result_type = response_type.FilterResult
    if state.security.acls is None:
        return response_type(
            filter_results=[result_type(**_DISABLED) for _ in request.filters]
        )
    # Before the work begins, because a wrong number closes the connection.
    filters = [_filter_of(acl_filter) for acl_filter in request.filters]

    def remove() -> list[list[Acl]]:
        store = state.security.store()
        # Read again: another process may have changed the rules.
        current = store.load().acls
        selected = [
            [acl for acl in current if acl_filter.matches(acl)]
            for acl_filter in filters
        ]
        # A rule that several filters select is removed once, and listed for each of
        # them.
        store.remove_acls({acl for group in selected for acl in group})
        return selected

    def respond(selected: list[list[Acl]]) -> DeleteAclsResponse:
        return response_type(
            filter_results=[
                result_type(
                    matching_acls=[
                        result_type.MatchingAcl(
                            resource_type=acl.resource_type,
                            resource_name=acl.name,
                            pattern_type=acl.pattern,
                            principal=acl.principal,
                            host=acl.host,
                            operation=acl.operation,
                            permission_type=acl.permission,
                        )
                        for acl in group
                    ]
                )
                for group in selected
            ]
        )

    def refuse(error: LogcoreError) -> DeleteAclsResponse:
        response = response_type(filter_results=[result_type() for _ in filters])
        fail_results(response.filter_results, error)
        return response

    return state.change_security(remove, respond, refuse)


def describe_acls(
    request: DescribeAclsRequest, call: Call, state: BrokerState
) -> DescribeAclsResponse:
    """Return the rules that a filter selects, by resource."""
    response_type = wire.DESCRIBE_ACLS.Response
    if state.security.acls is None:
        return response_type(**_DISABLED)
    acl_filter = _filter_of(request)
    resources: dict[tuple[int, str, int], list[Acl]] = {}
    # The rules in use, which may be older than the stored ones by a moment.
    for acl in state.security.acls.acls:
        if acl_filter.matches(acl):
            # The response groups rules by resource.
            key = acl.resource_type, acl.name, acl.pattern
            resources.setdefault(key, []).append(acl)
    return response_type(
        resources=[
            response_type.Resource(
                resource_type=resource_type,
                resource_name=name,
                pattern_type=pattern,
                acls=[
                    response_type.Resource.Acl(
                        principal=acl.principal,
                        host=acl.host,
                        operation=acl.operation,
                        permission_type=acl.permission,
                    )
                    for acl in acls
                ],
            )
            for (resource_type, name, pattern), acls in resources.items()
        ]
    )
