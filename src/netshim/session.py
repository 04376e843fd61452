"""The facts of one connection that a broker keeps while it lasts.

Each request carries its session in `Call.session`. Nothing here knows a protocol or a
socket: connection.py cuts the bytes into frames, broker.py answers them.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class ClientSession:
    """One connection of a client.

    host, port: the address the client reached us by, which is the one to tell it. peer:
    the client's own address.
    topics_made: how many topics were made because it asked for them; the handler of
    Metadata counts, in the broker's thread.
    """

    host: str
    port: int
    peer: str
    topics_made: int = 0
