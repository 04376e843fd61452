"""kafka-python's sockets, as classes with their own names.

A client that is closed while it connects does not close the socket (kafka/net/inet.py
keeps it in a local variable of a coroutine that is never resumed). The garbage collector
then warns in the test that runs at that time. pyproject.toml ignores the warning for
these classes alone, so that an unclosed socket of logcore still fails a test.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from kafka.net.inet import KafkaNetSocket


class KafkaPythonSocket(socket.socket):
    """A socket that kafka-python opened."""


class KafkaPythonTlsSocket(ssl.SSLSocket):
    """A socket that kafka-python wrapped in TLS, with the context of tls_context()."""


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Return a context for kafka-python that trusts one authority."""
    context = ssl.create_default_context(cafile=ca_file)
    context.sslsocket_class = KafkaPythonTlsSocket
    return context


def name_sockets() -> None:
    """Let kafka-python open sockets of KafkaPythonSocket in this process."""
    KafkaNetSocket.socket = _open


def _open(
    _self: Any,
    family: int = socket.AF_UNSPEC,
    kind: int = socket.SOCK_STREAM,
    protocol: int = 0,
) -> Any:
    return KafkaPythonSocket(family, kind, protocol)
