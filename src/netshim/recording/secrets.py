"""Removes passwords and tokens from frames before they are recorded.

Rules:
- Zeros replace the removed bytes, so that a frame keeps its size.
- Requests of the APIs in SECRET_REQUESTS keep only their header, without its tagged
  fields.
- Before authentication, only ApiVersions is recorded as it is. Tokens without a header,
  and frames of unknown APIs, become zeros as a whole.
- Responses that may contain tokens keep their header and their error code.
- Requests that change the configuration keep only their header if they name a setting
  of Kafka that contains a password or a key.

Records of topics are recorded without a search for secrets.
"""

from __future__ import annotations

from typing import Final

from netshim import wire
from netshim.session import Authentication

#: CreateDelegationToken, RenewDelegationToken, ExpireDelegationToken and
#: DescribeDelegationToken. netshim does not serve them, but clients may send them.
_DELEGATION_TOKENS: Final = frozenset((38, 39, 40, 41))
#: APIs whose requests contain passwords, their salted hashes, or tokens.
SECRET_REQUESTS: Final = _DELEGATION_TOKENS | {
    wire.SASL_HANDSHAKE.key,
    wire.SASL_AUTHENTICATE.key,
    wire.ALTER_USER_SCRAM_CREDENTIALS.key,
}
#: APIs whose responses contain tokens, or values that help to guess a SCRAM password.
SECRET_RESPONSES: Final = _DELEGATION_TOKENS | {wire.SASL_AUTHENTICATE.key}
#: APIs whose requests contain settings, which may be passwords.
_CONFIG_APIS: Final = frozenset(
    (
        wire.CREATE_TOPICS.key,
        wire.ALTER_CONFIGS.key,
        wire.INCREMENTAL_ALTER_CONFIGS.key,
    )
)
#: Parts of the names of Kafka's settings with the type PASSWORD.
_SECRET_SETTINGS: Final = (b"password", b"secret", b"sasl.jaas.config", b"keystore.key")
#: API key, version, correlation id and the size of the client id.
_REQUEST_HEADER_BYTES: Final = 10
#: Size, correlation id, one byte of tagged fields in flexible versions, and the error
#: code, with which the body begins.
_RESPONSE_HEADER_BYTES: Final = 11


def bytes_to_keep(frame: memoryview, authentication: Authentication | None) -> int:
    """Return how many first bytes of a request contain no secret.

    `frame` is the request without its size. `authentication` is the state of the
    connection when the request arrived.
    """
    if authentication is not None and authentication.expects_token:
        return 0
    key = int.from_bytes(frame[:2], "big")
    if key in SECRET_REQUESTS:
        return _request_header_bytes(frame)
    is_unauthenticated = (
        authentication is not None and not authentication.is_authenticated
    )
    if key not in wire.APIS or (is_unauthenticated and key != wire.API_VERSIONS.key):
        return 0
    if key in _CONFIG_APIS:
        # The request is not decoded: a malformed one may contain secrets, too.
        content = bytes(frame)
        if any(setting in content for setting in _SECRET_SETTINGS):
            return _request_header_bytes(frame)
    return len(frame)


def _request_header_bytes(frame: memoryview) -> int:
    """Return the size of a request's header without tagged fields; 0 if malformed."""
    # A size of -1 means that the client has no id.
    client_bytes = max(0, int.from_bytes(frame[8:10], "big", signed=True))
    size = _REQUEST_HEADER_BYTES + client_bytes
    return size if size <= len(frame) else 0


def redacted(frame: bytes | memoryview, kept_bytes: int) -> bytes:
    """Return a frame of which zeros replace all but the first `kept_bytes` bytes."""
    return bytes(frame[:kept_bytes]) + bytes(max(0, len(frame) - kept_bytes))


def redacted_response(frame: bytes, *, is_token: bool) -> bytes:
    """Return a response, with its size in front, without its tokens.

    `is_token` is whether the whole response is a token without a header.
    """
    return redacted(frame, 4 if is_token else _RESPONSE_HEADER_BYTES)
