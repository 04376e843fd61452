"""A web service with four workers over one directory: POST /orders appends an order,
GET /orders follows all of them by server-sent events, GET /health reports problems, and
each order is confirmed exactly once in the topic `confirmed`.

    pip install fastapi uvicorn
    uvicorn --app-dir examples --workers 4 orders_workers:app
    curl -d '4 apples' 'http://127.0.0.1:8000/orders?customer=anna'
    curl -N http://127.0.0.1:8000/orders

docs/service.md explains the parts.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from logcore import TopicRecord, aio
from logcore.errors import (
    CommitFailedError,
    LogcoreError,
    NodeExistsError,
    ProducerFencedError,
    RebalanceInProgressError,
    RecordTooLargeError,
    TransactionAbortedError,
    WakeupError,
)
from logcore.registry import FileRegistry, open_registry

DIRECTORY = os.environ.get("SHOP", "shop")
PARTITIONS = 4
TICK_S = 1.0
#: The group has changed, or another worker has completed the transaction. The records
#: are read again from the last committed offsets.
REPEATED = (
    CommitFailedError,
    ProducerFencedError,
    RebalanceInProgressError,
    TransactionAbortedError,
)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the directory after the fork of the worker, and run its tasks."""
    with aio.end_on_signals():
        async with aio.open_dir(DIRECTORY, create=True, shared=True) as data:
            await data.create_topic("orders", PARTITIONS, exist_ok=True)
            await data.create_topic("confirmed", PARTITIONS, exist_ok=True)
            app.state.data = data
            with open_registry(DIRECTORY) as registry:
                number = worker_number(registry)
                app.state.tasks = [
                    asyncio.create_task(confirm(data, number)),
                    asyncio.create_task(maintain(data)),
                ]
                yield
                confirming, maintaining = app.state.tasks
                maintaining.cancel()
                # A transaction that has begun is committed or aborted.
                aio.end_waits()
                await asyncio.gather(confirming, maintaining, return_exceptions=True)


def worker_number(registry: FileRegistry) -> int:
    """Return the smallest number that no living worker has.

    The node is ephemeral: it no longer counts when this process ends in any way.
    """
    for number in itertools.count():
        try:
            registry.create(f"/shop/workers/{number}", ephemeral=True)
        except NodeExistsError:
            continue
        return number
    raise AssertionError("count() does not end")


async def confirm(data: aio.LogDir, number: int) -> None:
    """Copy orders to `confirmed`, each exactly once, until end_on_signals() ends the
    waits.
    """
    while True:
        try:
            async with (
                data.consumer(
                    group_id="confirm",
                    auto_offset_reset="earliest",
                    enable_auto_commit=False,
                    isolation_level="read_committed",
                ) as consumer,
                data.producer(transactional_id=f"confirm-{number}") as producer,
            ):
                consumer.subscribe(["orders"])
                while True:
                    found = await consumer.getmany(timeout=1)
                    if not found:
                        continue
                    async with producer.transaction():
                        for order in found.records():
                            place = b"%d:%d" % (order.partition, order.offset)
                            await producer.send(
                                "confirmed",
                                order.value,
                                key=order.key,
                                headers=[("order", place)],
                            )
                        await producer.send_offsets_to_transaction(
                            found.next_offsets(), consumer.group_metadata()
                        )
        except REPEATED:
            continue
        except WakeupError:
            return


async def maintain(data: aio.LogDir) -> None:
    """Call tick() in every worker: the first one works, and another replaces it."""
    while True:
        await data.tick()
        await asyncio.sleep(TICK_S)


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place_order(request: Request, customer: str | None = None) -> dict[str, int]:
    """Append an order. It is durable when the response arrives."""
    data: aio.LogDir = request.app.state.data
    key = None
    if customer is not None:
        key = customer.encode()
    try:
        receipt = await data.append("orders", await request.body(), key=key)
    except RecordTooLargeError as error:
        raise HTTPException(413, str(error)) from error
    except LogcoreError as error:  # a full disk, for instance
        raise HTTPException(503 if error.retriable else 500, str(error)) from error
    return {"partition": receipt.partition, "offset": receipt.offset}


@app.get("/orders")
async def follow(
    request: Request, last_event_id: Annotated[str, Header()] = ""
) -> StreamingResponse:
    """Follow all partitions. The id of an event has the next offset of each of them."""
    data: aio.LogDir = request.app.state.data
    offsets = dict.fromkeys(range(PARTITIONS), 0)
    try:
        for place_text in filter(None, last_event_id.split(",")):
            partition, offset = place_text.split(":")
            offsets[int(partition)] = int(offset)
    except ValueError as error:
        raise HTTPException(400, "Last-Event-ID is not from this service") from error
    try:
        tail = await data.tail("orders", offsets)
    except LogcoreError as error:
        raise HTTPException(416, str(error)) from error
    return StreamingResponse(events(tail, offsets), media_type="text/event-stream")


async def events(
    tail: aio.Lists[TopicRecord], offsets: dict[int, int]
) -> AsyncIterator[str]:
    """Yield each order as an event."""
    async for record in tail:
        offsets[record.partition] = record.offset + 1
        lines = (record.value or b"").decode("utf-8", "replace").splitlines() or [""]
        text = "".join(f"data: {line}\n" for line in lines)
        places = ",".join(f"{number}:{offset}" for number, offset in offsets.items())
        yield f"id: {places}\n{text}\n"


@app.get("/health")
async def health(request: Request, response: Response) -> dict[str, object]:
    """Report failed tasks and incidents, with status 503 if there are any."""
    data: aio.LogDir = request.app.state.data
    failed = [repr(task.exception()) for task in request.app.state.tasks if task.done()]
    incidents = [str(incident) for incident in data.incidents()]
    if failed or incidents:
        response.status_code = 503
    return {"failed": failed, "incidents": incidents}
