"""A Kafka broker over a logcore directory, for any unmodified Kafka client, started in milliseconds.

    import netshim

    with netshim.serve("data") as server:
        print(server.bootstrap_servers)

In an event loop of one's own: `async with netshim.Server("data") as server`. From a shell: `netshim serve data`.
docs/netshim.md says what is served.
"""

from netshim.server import Server, ServerThread, serve
from netshim.state import Settings

__all__ = ["Server", "ServerThread", "Settings", "serve"]
