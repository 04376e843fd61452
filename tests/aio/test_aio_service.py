"""examples/orders_service.py, called as by a server, but without a socket. The service
and its clients share one event loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "orders_service.py"


class Call:
    """One request. `body_chunks` contains the sent chunks of the response body."""

    def __init__(
        self,
        app: Any,
        method: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = 0
        self.body_chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]
        self._disconnected = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": "/orders",
            "raw_path": b"/orders",
            "query_string": b"",
            "root_path": "",
            "headers": [
                (name.encode(), value.encode())
                for name, value in (headers or {}).items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._requests:
            return self._requests.pop()
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.body_chunks.put_nowait(message["body"])

    async def disconnect(self) -> None:
        self._disconnected.set()
        await self.task


@asynccontextmanager
async def running_service(app: Any) -> AsyncIterator[None]:
    async with app.router.lifespan_context(app):
        yield


def with_service(
    path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[[Any], Awaitable[None]]
) -> None:
    monkeypatch.setenv("ORDERS", str(path / "orders-0"))
    spec = importlib.util.spec_from_file_location("orders_service", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    asyncio.run(main(module.app))


async def place_order(app: Any, order: bytes) -> int:
    call = Call(app, "POST", order)
    await call.task
    assert call.status == 201
    return json.loads(call.body_chunks.get_nowait())["offset"]


def test_orders_are_stored_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(app: Any) -> None:
        async with running_service(app):
            assert [
                await place_order(app, b"%d apples" % number) for number in range(2)
            ] == [
                0,
                1,
            ]
            follower = Call(app, "GET")
            assert [await follower.body_chunks.get() for _ in range(2)] == [
                b"id: 0\ndata: 0 apples\n\n",
                b"id: 1\ndata: 1 apples\n\n",
            ]
            placing = asyncio.gather(*(place_order(app, b"a\nb") for _ in range(20)))
            assert await follower.body_chunks.get() == b"id: 2\ndata: a\ndata: b\n\n"
            assert sorted(await placing) == list(range(2, 22))
            assert follower.status == 200
            follower_from_20 = Call(app, "GET", headers={"last-event-id": "20"})
            assert (
                await follower_from_20.body_chunks.get()
                == b"id: 21\ndata: a\ndata: b\n\n"
            )
            await follower.disconnect()
        # The end of the service ends the responses that follow a log.
        await follower_from_20.task

    with_service(tmp_path, monkeypatch, main)


def test_missing_topic_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(app: Any) -> None:
        async with running_service(app):
            call = Call(app, "GET", headers={"last-event-id": "7"})
            await call.task
            assert call.status == 416
            too_large = Call(app, "POST", b"x" * 2_000_000)
            await too_large.task
            assert too_large.status == 413

    with_service(tmp_path, monkeypatch, main)
