"""A small tree of named values that several processes share: membership, ownership and
leadership.

    from logcore.registry import open_registry

    with open_registry("data") as registry:
        registry.create("/brokers/ids/1", b'{"host":"localhost"}', ephemeral=True)
        registry.children("/brokers/ids")

docs/registry.md is the introduction; protocol.py has the rules.
"""

from logcore.registry.files import FileRegistry, open_registry, registry_path
from logcore.registry.protocol import ANY, Node, Registry, Session, Watch

__all__ = [
    "ANY",
    "FileRegistry",
    "Node",
    "Registry",
    "Session",
    "Watch",
    "open_registry",
    "registry_path",
]
