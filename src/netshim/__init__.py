"""A Kafka broker over a logcore directory, for any unmodified Kafka client, started in milliseconds.

    import netshim

    with netshim.serve("data") as server:
        print(server.bootstrap_servers)

In an event loop of one's own: `async with netshim.Server("data") as server`. From a shell: `netshim serve data`.
docs/netshim.md says what is served.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netshim.server import Server, ServerThread, serve
    from netshim.settings import Settings

__all__ = ["Server", "ServerThread", "Settings", "serve"]


def __getattr__(name: str) -> object:
    # At first use: pytest imports this package in every run, for the fixtures in it, and most runs want no broker.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from netshim import server, state

    return getattr(state if name == "Settings" else server, name)
