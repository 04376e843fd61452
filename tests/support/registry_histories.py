"""Checks whether the results of calls on a registry are possible if each node is an
independent register.

A history contains calls, results, and their times. It is valid if the operations on
each node can be put in one order, each between its call and its result, in which a
plain model gives the same results: linearizability. Specific mistakes are checked
first, so that a failure reports more than "no order fits":

    complete      a value that was read was written as a whole by some process
    monotonic     the versions that one process reads of one incarnation of a node only advance
    one_creator   only one of several creators succeeds, unless there is a deletion between them
    lease         a node of an ended session is never returned, and a node of a running session is never missing
    fenced        an ended session writes nothing
    order         all other mistakes: lost updates, lost or duplicated changes, stale reads
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

UNKNOWN = "unknown"
EXPIRED = "SessionExpiredError"
#: The results of calls that have no effect and contain nothing about the node.
WITHOUT_EFFECT = ("RegistryLockedError",)


@attrs.define(eq=False)
class Call:
    """One operation on one node."""

    #: create, get, set, delete, update, exists, expire or fence.
    kind: str
    path: str
    #: See apply().
    arguments: tuple[Any, ...]
    #: The session of the caller. For expire and fence, the session that ends.
    session: str | None
    process: int
    invoked: int
    #: The last step at which the call may have had its effect.
    returned: float = math.inf
    #: A result, the name of an error, or UNKNOWN if the caller was killed or got no
    #: result.
    result: Any = UNKNOWN

    def __repr__(self) -> str:
        shown = ", ".join(repr(argument)[:40] for argument in self.arguments)
        until = "..." if self.returned == math.inf else int(self.returned)
        return f"[{self.invoked}-{until}] p{self.process} {self.kind} {self.path}({shown}) -> {repr(self.result)[:60]}"


#: The initial state of the model: the node, the ended sessions and the fenced sessions. A
#: node is (value, version, session), or None if it does not exist.
EMPTY: tuple[Any, frozenset[str], frozenset[str]] = (None, frozenset(), frozenset())


def apply(
    call: Call, state: tuple[Any, frozenset[str], frozenset[str]]
) -> tuple[Any, Any]:
    """Apply a call to a state of the model. Return the result and the next state."""
    node, expired, fenced = state
    kind = call.kind
    if kind == "expire":
        assert call.session is not None
        left = None if node is not None and node[2] == call.session else node
        return None, (left, expired | {call.session}, fenced)
    if kind == "fence":
        assert call.session is not None
        return None, (node, expired, fenced | {call.session})
    if kind == "get":
        return ("NodeNotFoundError" if node is None else node), state
    if kind == "exists":
        return node is not None, state
    if call.session in fenced:
        return EXPIRED, state
    if kind == "create":
        value, is_ephemeral = call.arguments
        if node is not None:
            return "NodeExistsError", state
        created = (value, 0, call.session if is_ephemeral else None)
        # The node of an ended session is removed at once.
        return 0, (
            None if is_ephemeral and call.session in expired else created,
            expired,
            fenced,
        )
    if kind == "update":
        tag = call.arguments[0]
        created = (
            (tag, 0, None) if node is None else (node[0] + tag, node[1] + 1, node[2])
        )
        return created, (created, expired, fenced)
    if node is None:
        return "NodeNotFoundError", state
    value, version, session = node
    expected = call.arguments[-1]
    if expected not in (-1, version):
        return "BadVersionError", state
    if kind == "delete":
        return None, (None, expired, fenced)
    assert kind == "set"
    return version + 1, ((call.arguments[0], version + 1, session), expired, fenced)


def has_valid_order(calls: Sequence[Call]) -> bool:
    """Return whether the calls on one node have a valid order. A call with an unknown
    result may be left out.
    """
    calls = sorted(calls, key=lambda call: call.invoked)
    everything = (1 << len(calls)) - 1
    seen: set[tuple[int, Any]] = set()
    unvisited: list[tuple[int, Any]] = [(everything, EMPTY)]
    while unvisited:
        left, state = unvisited.pop()
        if (left, state) in seen:
            continue
        seen.add((left, state))
        open_calls = [at for at in range(len(calls)) if left >> at & 1]
        if all(calls[at].result is UNKNOWN for at in open_calls):
            return True
        first_return = min(calls[at].returned for at in open_calls)
        for at in open_calls:
            call = calls[at]
            if call.invoked > first_return:
                break
            result, after = apply(call, state)
            if call.result is UNKNOWN:
                unvisited.append((left & ~(1 << at), state))
                unvisited.append((left & ~(1 << at), after))
            elif result == call.result:
                unvisited.append((left & ~(1 << at), after))
    return False


def check(calls: Iterable[Call]) -> None:
    """Check the calls of each node. The error contains the mistake and the calls."""
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        if call.result not in WITHOUT_EFFECT:
            by_path.setdefault(call.path, []).append(call)
    for path, found in sorted(by_path.items()):
        listed = "\n".join(
            f"    {call}" for call in sorted(found, key=lambda call: call.invoked)
        )
        name = find_mistake(found)
        assert name is None, f"{name}: {path}\n{listed}"
        assert has_valid_order(found), (
            f"order: no order of these calls gives these results\n{listed}"
        )


def find_mistake(calls: Sequence[Call]) -> str | None:
    """Return the name of an invariant that is clearly violated on one node."""
    written = {call.arguments[0] for call in calls if call.kind in ("create", "set")}
    tags = {call.arguments[0] for call in calls if call.kind == "update"}
    ended_at = {
        call.session: call.returned
        for call in calls
        if call.kind == "expire" and call.result is not UNKNOWN
    }
    fenced = {
        call.session: call.returned
        for call in calls
        if call.kind == "fence" and call.result is not UNKNOWN
    }
    for call in calls:
        if call.kind == "get" and isinstance(call.result, tuple):
            value, _, session = call.result
            if value not in written and not any(value.endswith(tag) for tag in tags):
                return "complete"
            if session is not None and ended_at.get(session, math.inf) < call.invoked:
                return "lease"
        if (
            call.kind in ("create", "set", "delete", "update")
            and not isinstance(call.result, str)
            and fenced.get(call.session, math.inf) < call.invoked
        ):
            return "fenced"
    winners = [call for call in calls if call.kind == "create" and call.result == 0]
    endings = [call for call in calls if call.kind in ("delete", "expire")]
    for winner in winners:
        for other in winners:
            if (
                winner is not other
                and winner.invoked <= other.returned <= math.inf
                and not any(
                    end.invoked <= max(winner.returned, other.returned)
                    and end.returned >= min(winner.invoked, other.invoked)
                    for end in endings
                )
            ):
                return "one_creator"
    return "monotonic" if _moves_back(calls) else None


def _moves_back(calls: Sequence[Call]) -> bool:
    """Return whether a process has read a lower version than before, within one
    incarnation of the node.
    """
    endings = [call for call in calls if call.kind in ("delete", "expire")]
    last: dict[int, Call] = {}
    for call in sorted(calls, key=lambda call: call.invoked):
        if call.kind != "get" or not isinstance(call.result, tuple):
            continue
        before = last.get(call.process)
        if (
            before is not None
            and call.result[1] < before.result[1]
            and not any(
                end.invoked <= call.returned and end.returned >= before.invoked
                for end in endings
            )
        ):
            return True
        last[call.process] = call
    return False
