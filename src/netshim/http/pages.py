"""The pages for operators: `/metrics`, `/health`, `/ready`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from logcore import LogcoreError
from netshim.http.health import why_not_healthy, why_not_ready
from netshim.http.host import BrokerCalls
from netshim.http.metrics import BrokerFacts, collect_facts, group_keys, render
from netshim.scheduling import PendingResponse, chain_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from logcore.metadata.checkpoint import Key
    from netshim.server import Server


def operation_routes(server: Server) -> list[Route]:
    """Return the routes of a broker, which may not have started yet."""

    async def metrics(_: Request) -> Response:
        counts = server.counts
        if server.silent_s is None or counts is None:
            return JSONResponse(
                {"reasons": ["the broker is starting or stopping"]}, 503
            )
        try:
            facts = await BrokerCalls(server.loop).receive(_request_facts(server))
            if isinstance(facts, Exception):  # of a step in the broker's thread
                raise facts
            disk = server.logdir.space()
        except (LogcoreError, OSError, RuntimeError, TimeoutError) as error:
            return JSONResponse({"reasons": [f"no facts: {error}"]}, 503)
        text = render(facts, counts, disk)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def health(_: Request) -> Response:
        return _verdict(why_not_healthy(server))

    async def ready(_: Request) -> Response:
        try:
            reasons = await why_not_ready(server)
        except (LogcoreError, OSError, RuntimeError, TimeoutError) as error:
            reasons = [f"the broker does not answer: {error}"]
        return _verdict(reasons)

    pages = {"/metrics": metrics, "/health": health, "/ready": ready}
    return [Route(path, page) for path, page in pages.items()]


def _verdict(reasons: list[str]) -> Response:
    if reasons:
        return JSONResponse({"ok": False, "reasons": reasons}, 503)
    return JSONResponse({"ok": True})


def _request_facts(
    server: Server,
) -> Callable[[Callable[[BrokerFacts], None]], None]:
    """Return a function for the broker's thread that passes the facts to a callback."""

    def request(callback: Callable[[BrokerFacts], None]) -> None:
        state = server.broker.state

        def open_logs(keys: list[Key]) -> object:
            return state.logs.when_open(
                keys, lambda: state.run_in_steps(collect_facts(server))
            )

        def loaded(_: bool) -> None:
            keys = PendingResponse()
            keys.then(lambda found: chain_response(open_logs(found), pending))
            chain_response(state.run_in_steps(group_keys(state)), keys)

        pending = PendingResponse()
        pending.then(callback)
        if state.is_shared:
            loaded(False)
        else:
            state.groups.load(server.now_ms(), loaded)

    return request
