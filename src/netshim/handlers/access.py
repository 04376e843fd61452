"""Access control lists. There is no authorizer, so every operation is allowed.

Requests are answered accordingly, as Kafka does if `authorizer.class.name` is not set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from netshim import wire
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

_TEXT: Final = "no authorizer is configured: everybody may do everything"


def describe_acls(
    request: DescribeAclsRequest, call: Call, state: BrokerState
) -> DescribeAclsResponse:
    return wire.DESCRIBE_ACLS.Response(
        error_code=codes.SECURITY_DISABLED, error_message=_TEXT
    )


def create_acls(
    request: CreateAclsRequest, call: Call, state: BrokerState
) -> CreateAclsResponse:
    response_type = wire.CREATE_ACLS.Response
    refused = [
        response_type.Result(error_code=codes.SECURITY_DISABLED, error_message=_TEXT)
        for _ in request.creations
    ]
    return response_type(results=refused)


def delete_acls(
    request: DeleteAclsRequest, call: Call, state: BrokerState
) -> DeleteAclsResponse:
    response_type = wire.DELETE_ACLS.Response
    refused = [
        response_type.FilterResult(
            error_code=codes.SECURITY_DISABLED, error_message=_TEXT
        )
        for _ in request.filters
    ]
    return response_type(filter_results=refused)
