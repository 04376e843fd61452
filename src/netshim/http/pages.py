"""The pages for operators: `/metrics`, `/health`, `/ready`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from logcore import LogcoreError
from netshim.http.health import not_ready_reasons, unhealthy_reasons
from netshim.http.host import BrokerCalls
from netshim.http.metrics import BrokerStatus, collect_status, group_keys, render
from netshim.scheduling import PendingResponse, chain_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from logcore.metadata.checkpoint import Key
    from netshim.server import Server


def operation_routes(server: Server) -> list[Route]:
    """Return the routes of a broker, which may not have started yet."""

    async def metrics(_: Request) -> Response:
        counts = server.counts
        if server.stalled_s is None or counts is None:
            return JSONResponse(
                {"reasons": ["the broker is starting or stopping"]}, 503
            )
        try:
            status = await BrokerCalls(server.loop).receive(_request_status(server))
            if isinstance(status, Exception):  # of a step in the broker's thread
                raise status
            # In the HTTP thread, because the call may block on the disk.
            disk = server.logdir.space()
        except (LogcoreError, OSError, RuntimeError, TimeoutError) as error:
            return JSONResponse({"reasons": [f"no metrics: {error}"]}, 503)
        text = render(status, counts, disk)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def health(_: Request) -> Response:
        return _health_response(unhealthy_reasons(server))

    async def ready(_: Request) -> Response:
        try:
            reasons = await not_ready_reasons(server)
        except (LogcoreError, OSError, RuntimeError, TimeoutError) as error:
            reasons = [f"the broker does not answer: {error}"]
        return _health_response(reasons)

    pages = {"/metrics": metrics, "/health": health, "/ready": ready}
    return [Route(path, page) for path, page in pages.items()]


def _health_response(reasons: list[str]) -> Response:
    if reasons:
        return JSONResponse({"ok": False, "reasons": reasons}, 503)
    return JSONResponse({"ok": True})


def _request_status(
    server: Server,
) -> Callable[[Callable[[BrokerStatus], None]], None]:
    """Return a function for the broker's thread that passes the status to a callback."""

    # Steps: load the groups, list the partitions with committed offsets, open their
    # logs, and collect the values.
    def request(callback: Callable[[BrokerStatus], None]) -> None:
        state = server.broker.state

        def open_logs(keys: list[Key]) -> object:
            return state.logs.when_open(
                keys, lambda: state.run_in_steps(collect_status(server))
            )

        def loaded(_: bool) -> None:
            # If the groups cannot be read, the page lacks only the metrics of groups.
            keys = PendingResponse()
            keys.then(
                lambda group_log_keys: chain_response(
                    open_logs(group_log_keys), pending
                )
            )
            chain_response(state.run_in_steps(group_keys(state)), keys)

        pending = PendingResponse()
        pending.then(callback)
        # The groups of a shared directory are not loaded by this broker.
        if state.is_shared:
            loaded(False)
        else:
            state.groups.load(server.now_ms(), loaded)

    return request
