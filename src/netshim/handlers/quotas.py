"""Quotas over the wire: DescribeClientQuotas and AlterClientQuotas.

Rules (Apache Kafka 4.1.1, with exceptions that are marked):
- An entity is a user, a client id, both, or an IP address. A null name is the default.
- Each entry is changed separately. An entity that is named twice is refused, and nothing
  of it is changed.
- NaN is refused; Kafka stores it. The name of an IP quota must be an address.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from logcore import LogcoreError
from netshim import wire
from netshim.handlers.failures import fail_results
from netshim.scheduling import PendingResponse
from netshim.security import quotas
from netshim.security.stored import DEFAULT, Entity
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        AlterClientQuotasRequest,
        AlterClientQuotasResponse,
        DescribeClientQuotasRequest,
        DescribeClientQuotasResponse,
    )

#: The types of entities in the order of Entity.
_TYPES: Final = ("user", "client-id", "ip")
_INT32_MAX: Final = (1 << 31) - 1
_INT64_MAX: Final = (1 << 63) - 1
#: Keys whose bounds may have a fraction.
_FRACTIONS: Final = (quotas.REQUEST, quotas.MUTATION)


class _QuotaError(Exception):
    """An entity or a change that is refused. The text is the reason."""


def _entity_of(parts: list[Any]) -> Entity:
    """Return the entity that a request names.

    Raises:
        _QuotaError: there is no such entity.
    """
    if not parts:
        raise _QuotaError("the entity is empty")
    names: dict[str, str] = {}
    for part in parts:
        if part.entity_type not in _TYPES:
            raise _QuotaError(f"unknown entity type {part.entity_type!r}")
        if part.entity_type in names:
            raise _QuotaError(f"the entity type {part.entity_type!r} is named twice")
        name = part.entity_name
        # null names the default: the quota of all users, or clients, without one of
        # their own.
        if name is None:
            name = DEFAULT
        elif not name or "\0" in name or len(name) > 1_024:
            raise _QuotaError(f"an unusable {part.entity_type}: {name[:40]!r}")
        names[part.entity_type] = name
    address = names.get("ip")
    if address is not None:
        # Connections are counted before the client sends its name, so only its address is
        # known.
        if len(names) > 1:
            raise _QuotaError("an IP address cannot be combined with another entity")
        if address != DEFAULT:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise _QuotaError(f"{address!r} is not an IP address") from None
    return names.get("user"), names.get("client-id"), address


def _change_of(operation: Any, entity: Entity) -> tuple[str, float | None]:
    """Return the key and the bound of one change. The bound None removes the quota.

    Raises:
        _QuotaError: the change is invalid.
    """
    key = operation.key
    if operation.remove:
        return key, None
    valid_keys: tuple[str, ...] = quotas.CLIENT_KEYS
    if entity[2] is not None:
        # KIP-612: an IP address limits new connections only.
        valid_keys = (quotas.CONNECTION,)
    # A quota with an unknown key would be stored and never applied.
    if key not in valid_keys:
        raise _QuotaError(f"unknown quota {key!r}; expected {' or '.join(valid_keys)}")
    value = operation.value
    # A rate of 0 would delay a client forever.
    if math.isnan(value) or value <= 0:
        raise _QuotaError(f"{key}: expected a number above 0, found {value}")
    # The wire has float64 for all quotas. Only shares of time are fractions in Kafka.
    if key not in _FRACTIONS:
        maximum = _INT64_MAX
        if key == quotas.CONNECTION:
            maximum = _INT32_MAX
        if value > maximum or value != int(value):
            raise _QuotaError(
                f"{key}: expected a whole number up to {maximum}, found {value}"
            )
    return key, value


def alter_client_quotas(
    request: AlterClientQuotasRequest, call: Call, state: BrokerState
) -> AlterClientQuotasResponse | PendingResponse:
    """Set or remove quotas."""
    response_type = wire.ALTER_CLIENT_QUOTAS.Response
    entry_type = response_type.Entry
    results = []
    accepted: dict[int, tuple[Entity, dict[str, float | None]]] = {}
    entities: list[Entity | None] = []
    for slot, entry in enumerate(request.entries):
        result = entry_type(
            entity=[
                entry_type.Entity(
                    entity_type=part.entity_type, entity_name=part.entity_name
                )
                for part in entry.entity
            ]
        )
        results.append(result)
        try:
            entity = _entity_of(entry.entity)
            accepted[slot] = (
                entity,
                dict(_change_of(operation, entity) for operation in entry.ops),
            )
        except _QuotaError as error:
            # A slot for each entry, so that the indices agree with the results.
            entities.append(None)
            result.error_code = codes.INVALID_REQUEST
            result.error_message = str(error)
        else:
            entities.append(entity)
    # An entity that is named twice is refused, because its changes have no defined order.
    counts = Counter(entities)
    for slot, other_entity in enumerate(entities):
        if other_entity is not None and counts[other_entity] > 1:
            del accepted[slot]
            results[slot].error_code = codes.INVALID_REQUEST
            results[slot].error_message = "the entity is named twice"
    response = response_type(entries=results)
    if request.validate_only or not accepted:
        return response

    def store() -> None:
        for entity, changes in accepted.values():
            state.security.store().set_quotas(entity, changes)

    def refuse(error: LogcoreError) -> AlterClientQuotasResponse:
        fail_results(results, error)
        return response

    return state.change_security(store, lambda _: response, refuse)


def describe_client_quotas(
    request: DescribeClientQuotasRequest, call: Call, state: BrokerState
) -> DescribeClientQuotasResponse:
    """Return the quotas of the entities that a filter selects."""
    response_type = wire.DESCRIBE_CLIENT_QUOTAS.Response
    entry_type = response_type.Entry
    filters: dict[str, str | bool | None] = {}

    def refuse(code: int, text: str) -> DescribeClientQuotasResponse:
        return response_type(error_code=code, error_message=text, entries=None)

    for component in request.components:
        entity_type = component.entity_type
        if not entity_type:
            return refuse(codes.INVALID_REQUEST, "an empty entity type")
        if entity_type not in _TYPES:
            return refuse(
                codes.UNSUPPORTED_VERSION, f"unknown entity type {entity_type!r}"
            )
        if entity_type in filters:
            return refuse(codes.INVALID_REQUEST, f"{entity_type!r} is named twice")
        # 0 selects a name, 1 the default, 2 every name.
        if component.match_type not in (0, 1, 2) or (component.match_type == 0) != (
            component.match is not None
        ):
            return refuse(codes.INVALID_REQUEST, "an impossible match")
        if component.match_type == 0:
            filters[entity_type] = component.match
        elif component.match_type == 1:
            filters[entity_type] = DEFAULT
        else:
            filters[entity_type] = True
    if "ip" in filters and len(filters) > 1:
        return refuse(
            codes.INVALID_REQUEST,
            "an IP address cannot be combined with another entity",
        )
    entries = []
    # Sorted, so that equal requests get equal responses. None cannot be compared with a
    # text.
    for entity, values in sorted(state.security.snapshot.quotas.items(), key=repr):
        names = {
            entity_type: name
            for entity_type, name in zip(_TYPES, entity, strict=True)
            if name is not None
        }
        if not _is_selected(names, filters, is_strict=request.strict):
            continue
        entries.append(
            entry_type(
                entity=[
                    entry_type.Entity(
                        entity_type=entity_type,
                        entity_name=None if name == DEFAULT else name,
                    )
                    for entity_type, name in names.items()
                ],
                values=[
                    entry_type.Value(key=key, value=value)
                    for key, value in sorted(values.items())
                ],
            )
        )
    return response_type(entries=entries)


def _is_selected(
    names: dict[str, str], filters: dict[str, str | bool | None], *, is_strict: bool
) -> bool:
    # A strict filter excludes entities with further types: `user` does not select
    # quotas of a user's client.
    if is_strict and (names.keys() != filters.keys() or not filters):
        return False
    return all(
        entity_type in names and (selector is True or names[entity_type] == selector)
        for entity_type, selector in filters.items()
    )
