"""A Kafka broker over a logcore directory, for any unmodified Kafka client, started in
milliseconds.

    import netshim

    with netshim.serve("data") as server:
        print(server.bootstrap_servers)

Inside a running event loop: `async with netshim.Server("data") as server`. From a
shell: `netshim serve data`. docs/netshim.md lists the requests that it answers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netshim.listeners import Listener, TlsSettings
    from netshim.security.service import SecuritySettings
    from netshim.server import Server
    from netshim.server_thread import ServerThread, serve
    from netshim.settings import Settings

#: Public names with their modules, which are imported at the first use: pytest imports
#: this package in every run for its fixtures, and most runs start no broker.
_MODULES = {
    "Listener": "listeners",
    "SecuritySettings": "security.service",
    "Server": "server",
    "ServerThread": "server_thread",
    "Settings": "settings",
    "TlsSettings": "listeners",
    "serve": "server_thread",
}

__all__ = [
    "Listener",
    "SecuritySettings",
    "Server",
    "ServerThread",
    "Settings",
    "TlsSettings",
    "serve",
]


if not TYPE_CHECKING:
    # To a type checker, a module with __getattr__() has every name.
    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import logcore

        if not hasattr(logcore, "open_dir"):
            raise ImportError(
                "the installed package 'logcore' is an unrelated logging library. "
                "Run: pip uninstall -y logcore logcore-db; pip install logcore-db"
            )
        module = importlib.import_module(f"netshim.{_MODULES[name]}")
        return getattr(module, name)
