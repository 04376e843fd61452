"""The state of one connection that a broker keeps while the connection is open.

Each request carries its session in `Call.session`. This module contains no protocol and
no socket: connection.py splits the bytes into frames, broker.py answers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import attrs

#: The user of a connection without authentication.
ANONYMOUS: Final = "User:ANONYMOUS"
#: The name with which the brokers of a cluster log in to each other.
BROKER_USER: Final = "netshim-broker"
#: The principal of these brokers. Principals of users begin with "User:".
BROKER_PRINCIPAL: Final = f"Broker:{BROKER_USER}"
#: Largest frame before authentication, as in Kafka.
MAX_UNAUTHENTICATED_BYTES: Final = 524_288


class Authentication(Protocol):
    """Handles the frames of a connection that must authenticate."""

    @property
    def is_authenticated(self) -> bool:
        """Whether the client is authenticated."""
        ...

    @property
    def expects_token(self) -> bool:
        """Whether the next frame is a token without a header."""
        ...

    def passes_requests(self, now_ms: int) -> bool:
        """Return whether handle() passes a Produce or a Fetch to its handler."""
        ...

    def handle(self, frame: memoryview, now_ms: int) -> Any:
        """Return the response to a frame, or True to pass it to its handler."""
        ...

    def use_state(self, state: Any) -> None:
        """Use the state of another broker."""
        ...

    def record_versions(self) -> None:
        """Record a successful ApiVersions request."""
        ...

    def close(self) -> None:
        """End the authentication, because the connection has ended. A login that is in
        progress has no effect.
        """
        ...


@attrs.define(eq=False)
class ClientSession:
    """One connection of a client. Used by the broker's thread."""

    #: The address for the client in responses.
    host: str
    port: int
    #: The client's own address, without the port.
    client_address: str
    #: Topics that were created because this connection requested them.
    topics_created: int = 0
    #: Name and version of the client library; "" until the client sends them.
    client_software: str = ""
    #: Name of the listener that accepted the connection.
    listener: str = "PLAINTEXT"
    #: The user, such as "User:alice".
    principal: str = ANONYMOUS
    #: Handles the frames of a connection that must authenticate. None if every request
    #: reaches its handler.
    authentication: Authentication | None = None
    #: Largest frame that the connection accepts. None for the broker's setting.
    frame_limit_bytes: int | None = None
    #: Whether the connection is closed after the responses that are ready.
    is_closing: bool = False
    #: Number of reasons to start no request of the connection: each quota that the
    #: client has exceeded, and a broker that is being replaced.
    pause_count: int = 0
    #: Continues to start requests. Set by the connection.
    wake: Callable[[], None] | None = None
