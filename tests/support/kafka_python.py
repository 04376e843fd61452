"""kafka-python's sockets, as a class with its own name.

A client that is closed while it connects forgets the socket (kafka/net/inet.py keeps it
in a local variable of a coroutine that is never resumed). The garbage collector then
warns in whichever test runs at that moment. pyproject.toml ignores the warning for this
class alone, so that a forgotten socket of ours still fails a test.
"""

from __future__ import annotations

import socket
from typing import Any

from kafka.net.inet import KafkaNetSocket


class KafkaPythonSocket(socket.socket):
    """A socket that kafka-python opened."""


def name_sockets() -> None:
    """Let kafka-python open sockets of the class above in this process."""
    KafkaNetSocket.socket = _open


def _open(
    _self: Any,
    family: int = socket.AF_UNSPEC,
    kind: int = socket.SOCK_STREAM,
    protocol: int = 0,
) -> Any:
    return KafkaPythonSocket(family, kind, protocol)
