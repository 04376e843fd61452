"""The classes of all messages by name: FetchRequest is `wire.FETCH.Request`.

Each class is created at its first use. Type checkers read messages.pyi instead, which
tools/wire_stubs.py writes.
"""

from __future__ import annotations

from typing import Any, Final

from netshim.wire import table
from netshim.wire.codec import Api, Message


def _all_messages() -> list[Message[Any]]:
    entries = [getattr(table, name) for name in table.__all__]
    bodies = [
        message
        for entry in entries
        if isinstance(entry, Api)
        for message in (entry.request, entry.response)
    ]
    return [*bodies, *(entry for entry in entries if isinstance(entry, Message))]


#: By the names in messages.pyi, such as FetchRequest.
_MESSAGES: Final = {message.type_name: message for message in _all_messages()}


def __getattr__(name: str) -> type[Any]:
    # Called by Python for names that the module does not define (PEP 562).
    message = _MESSAGES.get(name)
    if message is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return message.Value
