"""Control of a broker over HTTP, for tests in any language.

Rules:
- Each request contains the token of the control API. A request from a web page is
  refused, also if the page's name was bound to this address.
- Errors are `{"error": ..., "known": [...]}`.
- Long polls check their condition periodically, and occupy no thread.

The calls are those of netshim.testing.Kafka. ROUTES lists them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import logcore
from logcore.errors import (
    InvalidConfigError,
    InvalidNameError,
    LogcoreError,
    TopicNotFoundError,
)
from netshim.faults.control import ActiveRule, DiskRule, FaultControl
from netshim.faults.requests import ANY_API, ObservedRequest
from netshim.http.host import refusal_reason
from netshim.rollback import DirectorySnapshot
from netshim.server_thread import ServerHandle
from netshim.testing import BrokerClock, Kafka, VirtualFiles
from netshim.wire import codes

_T = TypeVar("_T")
#: A parameter in the path of a route.
_PARAMETER: Final = re.compile(r"{(\w+)(:int)?}")
#: Largest body of a request.
_MAX_BYTES: Final = 1 << 20
#: Longest long poll.
_MAX_WAIT_S: Final = 60.0
#: Interval at which a long poll checks its condition.
_CHECK_S: Final = 0.05
#: Records in one response.
_MAX_RECORDS: Final = 1_000
#: The actions of rules, with the keys that each one needs.
_ACTIONS: Final = {
    "answer": ("api", "error"),
    "delay": ("api", "delay_ms"),
    "hold": ("api",),
    "lose_answer": ("api",),
    "disconnect": ("api",),
    "observe": ("api",),
    "disk": ("operation",),
}


class _RequestError(Exception):
    """A request that is refused, with its status."""

    def __init__(
        self, status: int, error: str, allowed: list[str] | None = None
    ) -> None:
        super().__init__(error)
        self.status = status
        # Values that the request may contain, for the response. None if they are not a
        # short list.
        self.known = allowed


@attrs.define
class _Rules:
    """The rules that one request has added. They are removed together."""

    control: FaultControl
    rules: list[ActiveRule | DiskRule]

    @property
    def hits(self) -> int:
        return sum(rule.hits for rule in self.rules)


class ControlApi:
    """The calls of one broker."""

    def __init__(self, handle: ServerHandle, token: str = "") -> None:
        """Create the control API. If no token is given, a random token is created."""
        #: The secret of every request. Any program on the machine can reach the port.
        self.token = token or secrets.token_urlsafe(24)
        self._handle = handle
        clock = None
        files = handle.server.files
        # Only these files have a clock that can be moved.
        if isinstance(files, VirtualFiles):
            clock = BrokerClock(handle, files)
        self._kafka = Kafka(handle, clock=clock)
        #: Numbers that identify rules and snapshots in later calls.
        self._numbers = itertools.count(1)
        #: The rules by their numbers. Like _snapshots, only the event loop uses them: a
        #: loop over them in another thread would fail when a request adds one.
        self._rules: dict[int, _Rules] = {}
        #: The snapshots by their numbers.
        self._snapshots: dict[int, DirectorySnapshot] = {}

    def routes(self) -> list[Route]:
        """Return the routes of the control API."""
        return [
            Route(path, self._guarded(getattr(self, name)), methods=[method])
            for method, path, name, _ in ROUTES
        ]

    # -- what every call does ----------------------------------------------------------

    def _guarded(
        self, call: Callable[[Request], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a page that checks the request and converts errors to responses."""

        async def page(request: Request) -> Response:
            allowed = None
            try:
                self._check(request)
                return JSONResponse(await call(request))
            except _RequestError as error:
                status, text, allowed = error.status, str(error), error.known
            except (InvalidConfigError, InvalidNameError) as error:
                status, text = 400, str(error)
            # Kafka's wait functions raise AssertionError when their time has passed.
            except AssertionError as error:
                status, text = 408, str(error)
            except (LogcoreError, OSError, RuntimeError) as error:
                status, text = 503, str(error)
            body: dict[str, object] = {"error": text}
            if allowed is not None:
                body["known"] = allowed
            return JSONResponse(body, status)

        return page

    def _check(self, request: Request) -> None:
        """Refuse a request of a web page, or one without the token."""
        refused = refusal_reason(request)
        if refused is not None:
            raise _RequestError(403, refused)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # The duration of the comparison must not reveal how many characters of the
        # token are correct.
        is_right = secrets.compare_digest(token.encode(), self.token.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise _RequestError(401, "expected the header Authorization: Bearer TOKEN")

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            # Checked for each chunk, because the header may have no length.
            if len(body) > _MAX_BYTES:
                raise _RequestError(413, f"a body has at most {_MAX_BYTES} bytes")
        return bytes(body)

    async def _poll(self, request: Request, check: Callable[[], _T]) -> _T:
        """Return the result of check() once it raises no AssertionError."""
        # The condition is checked at least once, also with a timeout of 0.
        deadline = time.monotonic() + _number(request, "timeout", 10.0, _MAX_WAIT_S)
        while True:
            try:
                # check() waits for the thread of the broker.
                return await asyncio.to_thread(check)
            except AssertionError:
                if time.monotonic() >= deadline or await request.is_disconnected():
                    raise
            await asyncio.sleep(_CHECK_S)

    # -- calls -------------------------------------------------------------------------

    async def index(self, _: Request) -> Any:
        """List the calls."""
        return [
            {"call": f"{method} {path}", "example": example}
            for method, path, _, example in ROUTES
        ]

    async def openapi(self, _: Request) -> Any:
        """Describe the calls for generators of clients, in OpenAPI 3.1."""
        paths: dict[str, dict[str, Any]] = {}
        for method, path, name, example in ROUTES:
            operation = {
                "operationId": name,
                "summary": (getattr(self, name).__doc__ or "").splitlines()[0],
                "description": f"Example: {example}",
                "parameters": [
                    {
                        "name": parameter[1],
                        "in": "path",
                        "required": True,
                        "schema": {"type": "integer" if parameter[2] else "string"},
                    }
                    for parameter in _PARAMETER.finditer(path)
                ],
                "responses": {"200": {"description": "success"}},
            }
            if method == "POST":
                body: dict[str, Any] = {"application/json": {"schema": {}}}
                operation["requestBody"] = {"content": body}
            # OpenAPI has no types in paths: "{number:int}" becomes "{number}".
            template = _PARAMETER.sub(r"{\1}", path)
            paths.setdefault(template, {})[method.lower()] = operation
        bearer = {"token": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "netshim control API", "version": logcore.__version__},
            "components": {"securitySchemes": bearer},
            "security": [{"token": []}],
            "paths": paths,
        }

    async def state(self, _: Request) -> Any:
        """Return topics with their ends, groups, connections and rules."""
        hits = {str(number): rules.hits for number, rules in self._rules.items()}
        return {**await asyncio.to_thread(self._state), "faults": hits}

    def _state(self) -> dict[str, Any]:
        server = self._handle.server
        logdir = self._handle.logdir
        topics = {}
        for name in logdir.topics():
            # A client may delete the topic while this thread reads it.
            with contextlib.suppress(TopicNotFoundError):
                topics[name] = {
                    str(number): logdir.partition(name, number).high_watermark
                    for number in logdir.partitions(name)
                }

        def groups() -> dict[str, str]:
            group_service = server.broker.state.groups
            # Groups are loaded on first use. The next call returns them.
            if not group_service.is_loaded:
                group_service.load(server.now_ms(), lambda _: None)
                return {}
            return {group.group_id: group.state for group in group_service.all()}

        return {
            "bootstrap_servers": self._handle.bootstrap_servers,
            "topics": topics,
            "groups": self._handle.call(groups),
            "connections": self._handle.call(lambda: dict(server.connections())),
        }

    async def add_faults(self, request: Request) -> Any:
        """Add one rule, or a list of rules that are removed together."""
        body = _parsed(await self._body(request))
        rules = body if isinstance(body, list) else [body]
        added = await asyncio.to_thread(self._add_faults, rules)
        # Numbers are not used again, so a late call cannot change another rule.
        number = next(self._numbers)
        self._rules[number] = added
        return {"fault": number}

    def _add_faults(self, descriptions: list[Any]) -> _Rules:
        control = self._kafka.faults()
        try:
            rules = [_add_rule(control, rule) for rule in descriptions]
        except BaseException:
            # A list of rules is added whole or not at all.
            control.clear()
            raise
        return _Rules(control, rules)

    def _rules_of(self, request: Request) -> tuple[int, _Rules]:
        number = request.path_params["number"]
        if number not in self._rules:
            raise _RequestError(404, f"no fault {number}", [*map(str, self._rules)])
        return number, self._rules[number]

    async def show_faults(self, request: Request) -> Any:
        """Return the hits of rules, and the requests on which they have acted."""
        number, rules = self._rules_of(request)
        observed = await asyncio.to_thread(
            lambda: [
                _as_json(observed) for rule in rules.rules for observed in rule.requests
            ]
        )
        return {"fault": number, "hits": rules.hits, "requests": observed}

    async def remove_faults(self, request: Request) -> Any:
        """Remove rules, and release their requests."""
        number, rules = self._rules_of(request)
        del self._rules[number]
        await asyncio.to_thread(rules.control.clear)
        return {"fault": number, "hits": rules.hits}

    async def wait_for_faults(self, request: Request) -> Any:
        """Wait until rules have acted on a number of requests."""
        number, rules = self._rules_of(request)
        hits = int(_number(request, "hits", 1, 1e9))

        def check() -> None:
            # wait() of one rule raises an error that lists the latest requests.
            # The hits of all rules of the request count.
            if rules.hits < hits:
                rules.rules[0].wait(hits, timeout=0)

        await self._poll(request, check)
        return {"fault": number, "hits": rules.hits}

    async def make_snapshot(self, _: Request) -> Any:
        """Make a snapshot, see Kafka.snapshot()."""
        snapshot = await asyncio.to_thread(self._kafka.snapshot)
        number = next(self._numbers)
        self._snapshots[number] = snapshot
        return {"snapshot": number}

    async def roll_back(self, request: Request) -> Any:
        """Restore a snapshot, see Kafka.rollback()."""
        number = request.path_params["number"]
        if number not in self._snapshots:
            raise _RequestError(
                404, f"no snapshot {number}", [*map(str, self._snapshots)]
            )
        await asyncio.to_thread(self._kafka.rollback, self._snapshots[number])
        self._rules.clear()  # the new broker has no rules
        return {"snapshot": number}

    async def advance_clock(self, request: Request) -> Any:
        """Skip time, see BrokerClock.advance()."""
        units = ("milliseconds", "seconds", "minutes", "hours", "days")
        body = await self._object(request, *units)
        if not all(isinstance(value, int | float) for value in body.values()):
            raise _RequestError(400, "expected numbers", list(units))
        clock = self._kafka.clock
        await asyncio.to_thread(lambda: clock.advance(**body))
        return {"now_ms": clock.now_ms}

    async def set_release(self, request: Request) -> Any:
        """Serve the API versions of a release of Kafka, see Kafka.as_version()."""
        body = await self._object(request, "release")
        release = body.get("release")
        if release is not None and not isinstance(release, str):
            raise _RequestError(400, "expected a text or null as release")
        await asyncio.to_thread(self._kafka.as_version, release)
        return {"release": release}

    async def set_nodes(self, request: Request) -> Any:
        """Advertise several nodes, see Kafka.as_node_count()."""
        body = await self._object(request, "count")
        count: Any = body.get("count")
        await asyncio.to_thread(self._kafka.as_node_count, count)
        return {"bootstrap_servers": self._handle.bootstrap_servers}

    async def stop_node(self, request: Request) -> Any:
        """Stop a node, see Kafka.stop_node()."""
        return await self._change_node(self._kafka.stop_node, request)

    async def start_node(self, request: Request) -> Any:
        """Start a stopped node, see Kafka.start_node()."""
        return await self._change_node(self._kafka.start_node, request)

    async def _change_node(
        self, change: Callable[[int], None], request: Request
    ) -> Any:
        await asyncio.to_thread(change, request.path_params["number"])
        return {"bootstrap_servers": self._handle.bootstrap_servers}

    async def move_leader(self, request: Request) -> Any:
        """Move the leader of a partition, see Kafka.move_leader()."""
        names = ("topic", "partition", "node")
        body = await self._object(request, *names)
        topic, number, node = (body.get(name) for name in names)
        if not (isinstance(topic, str) and type(number) is int and type(node) is int):
            raise _RequestError(400, "expected a topic, a partition and a node")
        await asyncio.to_thread(self._kafka.move_leader, topic, number, node)
        return body

    async def create_topic(self, request: Request) -> Any:
        """Create a topic, see Kafka.create_topic()."""
        body = await self._object(request, "partitions", "config")
        name = request.path_params["topic"]
        count, config = body.get("partitions", 1), body.get("config", {})
        if type(count) is not int or not isinstance(config, dict):
            raise _RequestError(400, "expected a number of partitions and settings")
        await asyncio.to_thread(self._kafka.create_topic, name, count, config)
        return {"topic": name, "partitions": count}

    async def _object(self, request: Request, *keys: str) -> dict[str, Any]:
        """Return the JSON object of a body, which may be empty."""
        body = await self._body(request)
        value = _parsed(body) if body.strip() else {}
        if not isinstance(value, dict) or not set(value) <= set(keys):
            raise _RequestError(400, "expected an object with known keys", list(keys))
        return value

    async def requests(self, request: Request) -> Any:
        """Return the latest requests; `since` is the time of an earlier response, in ms."""
        api = request.query_params.get("api", ANY_API)
        since_ms = _number(request, "since", 0, 1e15)
        requests = await asyncio.to_thread(self._kafka.requests, api)
        return [_as_json(request) for request in requests if request.now_ms >= since_ms]

    async def wait_for_group(self, request: Request) -> Any:
        """Wait until a group has a state and a number of members."""
        group = request.path_params["group"]
        state = request.query_params.get("state", "Stable")
        members = None
        if "members" in request.query_params:
            members = int(_number(request, "members", 0, 1e6))
        await self._poll(
            request,
            # _poll() waits, so that the thread is free between two checks.
            lambda: self._kafka.wait_for_group(
                group, state=state, members=members, timeout=0
            ),
        )
        return {"group": group, "state": state}

    async def wait_for_records(self, request: Request) -> Any:
        """Wait until a topic has a number of records."""
        topic = request.path_params["topic"]
        count = int(_number(request, "count", 1, 1e12))

        def check() -> int:
            actual = self._kafka.count_offsets(topic)
            assert actual >= count, f"{topic} has {actual} records, expected {count}"
            return actual

        return {"topic": topic, "count": await self._poll(request, check)}

    async def append(self, request: Request) -> Any:
        """Append records: one JSON object in each line."""
        lines = (await self._body(request)).splitlines()
        # All lines are parsed first, so that a malformed line stores no record.
        rows = [_record(_parsed(line)) for line in lines if line.strip()]
        return await asyncio.to_thread(self._append, request.path_params["topic"], rows)

    def _append(self, topic: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        receipts = []
        for row in rows:
            # An error leaves the earlier records in the topic.
            receipt = self._kafka.append(topic, **row)
            receipts.append({"partition": receipt.partition, "offset": receipt.offset})
        return receipts

    async def records(self, request: Request) -> Any:
        """Return the first records of a topic, at most 1,000."""
        limit = int(_number(request, "limit", _MAX_RECORDS, _MAX_RECORDS))
        return await asyncio.to_thread(
            self._records, request.path_params["topic"], limit
        )

    def _records(self, topic: str, limit: int) -> list[dict[str, Any]]:
        if topic not in self._handle.logdir:
            raise _RequestError(404, f"no topic {topic!r}", self._kafka.topics())
        return [
            {
                "partition": record.partition,
                "offset": record.offset,
                "timestamp_ms": record.timestamp_ms,
                **_field("key", record.key),
                **_field("value", record.value),
            }
            for record in itertools.islice(self._handle.logdir.read(topic), limit)
        ]


#: Method, path, name of the method of ControlApi, and an example.
ROUTES: Final = (
    ("GET", "/", "index", "GET /"),
    ("GET", "/openapi.json", "openapi", "GET /openapi.json"),
    ("GET", "/state", "state", "GET /state"),
    (
        "POST",
        "/faults",
        "add_faults",
        'POST /faults {"action": "answer", "api": "Produce", "error": "NOT_LEADER_OR_FOLLOWER", "times": 2}',
    ),
    ("GET", "/faults/{number:int}", "show_faults", "GET /faults/1"),
    ("DELETE", "/faults/{number:int}", "remove_faults", "DELETE /faults/1"),
    (
        "GET",
        "/faults/{number:int}/wait",
        "wait_for_faults",
        "GET /faults/1/wait?hits=2&timeout=5",
    ),
    ("POST", "/snapshots", "make_snapshot", "POST /snapshots"),
    (
        "POST",
        "/snapshots/{number:int}/rollback",
        "roll_back",
        "POST /snapshots/1/rollback",
    ),
    (
        "POST",
        "/clock/advance",
        "advance_clock",
        'POST /clock/advance {"minutes": 10}',
    ),
    ("POST", "/release", "set_release", 'POST /release {"release": "2.8"}'),
    ("POST", "/nodes", "set_nodes", 'POST /nodes {"count": 3}'),
    ("POST", "/nodes/{number:int}/stop", "stop_node", "POST /nodes/2/stop"),
    ("POST", "/nodes/{number:int}/start", "start_node", "POST /nodes/2/start"),
    (
        "POST",
        "/leaders",
        "move_leader",
        'POST /leaders {"topic": "orders", "partition": 0, "node": 2}',
    ),
    ("GET", "/requests", "requests", "GET /requests?api=Produce"),
    (
        "GET",
        "/groups/{group}/wait",
        "wait_for_group",
        "GET /groups/billing/wait?state=Stable&members=2",
    ),
    (
        "GET",
        "/topics/{topic}/wait",
        "wait_for_records",
        "GET /topics/orders/wait?count=10",
    ),
    (
        "POST",
        "/topics/{topic}",
        "create_topic",
        'POST /topics/orders {"partitions": 3}',
    ),
    (
        "POST",
        "/topics/{topic}/records",
        "append",
        'POST /topics/orders/records {"key": "anna", "value": "4 apples"}',
    ),
    ("GET", "/topics/{topic}/records", "records", "GET /topics/orders/records"),
)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _RequestError(400, f"expected JSON: {error}") from error


def _number(request: Request, name: str, default: float, maximum: float) -> float:
    """Return a number of the query, from 0 to `maximum`."""
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1
    # This is true for NaN, too.
    if not 0 <= value <= maximum:
        raise InvalidConfigError(
            name, expected=f"a number from 0 to {maximum:g}", found=repr(text)
        )
    return value


def _add_rule(control: FaultControl, description: Any) -> ActiveRule | DiskRule:
    """Add a rule by the method of FaultControl that its `action` names."""
    if not isinstance(description, dict):
        raise _RequestError(400, "expected an object for each rule")
    options = dict(description)
    action = options.pop("action", None)
    # Only these methods, because the name is from a request.
    if not isinstance(action, str) or action not in _ACTIONS:
        raise _RequestError(400, f"unknown action {action!r}", [*_ACTIONS])
    for name in _ACTIONS[action]:
        if name not in options:
            raise _RequestError(400, f"a rule to {action} needs {name!r}")
    values = [options.pop(name) for name in _ACTIONS[action]]
    try:
        rule: ActiveRule | DiskRule = getattr(control, action)(*values, **options)
    # The methods of FaultControl check values, but not all types.
    except (TypeError, AttributeError) as error:
        raise _RequestError(400, f"a value has the wrong type: {error}") from error
    return rule


def _record(row: Any) -> dict[str, Any]:
    """Return the arguments of Kafka.append()."""
    keys = ["key", "value", "partition"]
    if not isinstance(row, dict) or not set(row) <= set(keys):
        raise _RequestError(400, "expected an object for each record", keys)
    arguments: dict[str, Any] = {"value": None}
    for name in ("key", "value"):
        if row.get(name) is not None:
            if not isinstance(row[name], str):
                raise _RequestError(400, f"expected a text as {name}")
            arguments[name] = row[name].encode()
    if "partition" in row:
        # A bool is an int, too.
        if type(row["partition"]) is not int:
            raise _RequestError(400, "expected a number as partition")
        arguments["partition"] = row["partition"]
    return arguments


def _field(name: str, value: bytes | None) -> dict[str, str | None]:
    """Return bytes as text, or in base64 if they are not UTF-8."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def _as_json(observed: ObservedRequest) -> dict[str, Any]:
    """Return a request, with the names of the error codes in its response."""
    fields = attrs.asdict(observed)
    if observed.codes is not None:
        fields["codes"] = [codes.name(code) for code in observed.codes]
    return fields
