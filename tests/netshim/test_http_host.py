"""The thread of the HTTP ports leaves no connection open when it ends."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from netshim.http.host import HttpHost


async def endless(_: Any) -> StreamingResponse:
    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0.01)

    return StreamingResponse(body())


@pytest.mark.long
@pytest.mark.parametrize(
    ("request_bytes", "count"), [(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 1), (b"", 20)]
)
def test_stop_closes_responses_and_connections_that_have_just_been_accepted(
    monkeypatch: pytest.MonkeyPatch, request_bytes: bytes, count: int
) -> None:
    """uvicorn alone leaves them open, so that only the garbage collector would close
    their sockets.
    """
    unraisable: list[Any] = []
    gc.collect()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    for _ in range(count):
        host = HttpHost()
        url = host.add(("127.0.0.1", 0), Starlette(routes=[Route("/", endless)]))
        host.start()
        client = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        with client:
            if request_bytes:
                client.sendall(request_bytes)
                assert client.recv(100)
            host.stop()
        gc.collect()
    assert [str(entry.exc_value) for entry in unraisable] == []
