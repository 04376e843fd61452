"""A web service over a log: POST /orders appends an order, GET /orders follows all of
them by server-sent events.

Run it with any ASGI server, such as: pip install fastapi uvicorn && uvicorn --app-dir
examples orders_service:app
    curl -d '4 apples' http://127.0.0.1:8000/orders
    curl -N http://127.0.0.1:8000/orders

An order is durable when the service responds with status 201. Orders that arrive at the
same time share a sync. After a lost connection, a browser sends the id of its last
event, and the service continues after it. All followers share one handle, and no
follower needs a thread.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.responses import StreamingResponse

from logcore import Receipt, Record, aio
from logcore.errors import LogcoreError, OffsetOutOfRangeError, RecordTooLargeError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep the log open while the service runs.

    A server ends the lifespan after all responses, so a signal ends the followers.
    """
    async with aio.open(os.environ.get("ORDERS", "shop/orders-0"), create=True) as log:
        app.state.log = log
        with aio.end_on_signals():
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place(request: Request) -> dict[str, int]:
    log: aio.Log = request.app.state.log
    try:
        receipt: Receipt = await log.append(await request.body())
    except RecordTooLargeError as error:
        raise HTTPException(413, str(error)) from error
    except LogcoreError as error:  # a full disk, for instance
        raise HTTPException(503 if error.retriable else 500, str(error)) from error
    return {"offset": receipt.offset}


@app.get("/orders")
async def follow(
    request: Request, last_event_id: Annotated[int, Header()] = -1
) -> StreamingResponse:
    log: aio.Log = request.app.state.log
    try:
        # Older orders may be deleted.
        tail = log.tail(max(log.log_start_offset, last_event_id + 1))
    except OffsetOutOfRangeError as error:
        raise HTTPException(416, str(error)) from error
    return StreamingResponse(events(tail), media_type="text/event-stream")


async def events(tail: aio.Lists[Record]) -> AsyncIterator[str]:
    """Yield each record as an event; a line break in an order begins another data line."""
    async for record in tail:
        lines = (record.value or b"").decode("utf-8", "replace").splitlines() or [""]
        data = "".join(f"data: {line}\n" for line in lines)
        yield f"id: {record.offset}\n{data}\n"
