"""Runs the broker's group coordinator: executes the effects of logcore.coordination.

Rules:
- Every effect is executed here: replies call their waiters, records are appended to
  `__consumer_offsets`, and timers are set in the state.
- Effects are executed in the order of their transitions, even if one effect causes the
  next transition.
- The stored groups are read once, before any request is executed.

This module does not implement the transitions of a group (logcore.coordination does),
and maps no requests and codes (handlers/group.py does).
"""

from __future__ import annotations

import base64
import hashlib
import logging
import uuid
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final, TypeVar

import attrs

from logcore.coordination.classic_group import Group
from logcore.coordination.coordinator import EXPIRY_CHECK_MS, Coordinator
from logcore.coordination.effects import (
    AppendRecords,
    CancelTimer,
    Effect,
    GroupConverted,
    GroupEmptied,
    GroupFormed,
    GroupRebalances,
    LateMemberRemoved,
    Reply,
    RevocationEnded,
    SessionEnded,
    SetTimer,
    TargetsChanged,
)
from logcore.coordination.group_requests import (
    ConsumerHeartbeat,
    GroupError,
    Rules,
    Timeout,
)
from logcore.coordinators.group_host import GroupRequest, GroupStep
from logcore.directory.group_settings import GroupSettings
from logcore.format.group_records import TopicWithId
from logcore.metadata.filenames import OFFSETS_TOPIC
from netshim.coordinators import Callback, GroupOutcome, GroupService
from netshim.loop_host import LoopHost
from netshim.request_log import Journal, quoted
from netshim.scheduling import PendingResponse, Steps, guarded, resolve_with
from netshim.settings import Settings
from netshim.state import BrokerState
from netshim.stored_offsets import OffsetsTopic
from netshim.topic_patterns import ServedTopics, compile_pattern

_log = logging.getLogger("netshim")

T = TypeVar("T")


def _new_id() -> str:
    return str(uuid.uuid4())


def group_rules(
    settings: Settings, group_settings: GroupSettings | None = None
) -> Rules:
    """Return the limits and delays of groups from the broker's settings.

    `group_settings` contains the settings of single groups, if they are stored.
    """
    optional: dict[str, Any] = {}
    if group_settings is not None:
        # Rules has a default for a broker without stored settings.
        optional["own_settings"] = group_settings.of
    # At most a third of the session, so that setting a short session is sufficient.
    interval_ms = min(
        settings.group_consumer_heartbeat_interval_ms,
        settings.group_consumer_session_timeout_ms // 3,
    )
    return Rules(
        min_session_timeout_ms=settings.min_session_timeout_ms,
        max_session_timeout_ms=settings.max_session_timeout_ms,
        group_max_size=settings.group_max_size,
        rebalance_delay_ms=settings.rebalance_delay_ms,
        consumer_session_timeout_ms=settings.group_consumer_session_timeout_ms,
        consumer_heartbeat_interval_ms=interval_ms,
        consumer_max_size=settings.group_consumer_max_size,
        **optional,
        may_upgrade=settings.group_consumer_migration_policy
        in ("upgrade", "bidirectional"),
        may_downgrade=settings.group_consumer_migration_policy
        in ("downgrade", "bidirectional"),
    )


#: For each kind of event: the kind of its log line, the text, and the fields in it.
_LINES: Final[dict[type, tuple[str, str, tuple[str, ...]]]] = {
    GroupFormed: (
        "formed",
        "group %s formed: generation %d, %d members, %s",
        ("group_id", "generation", "member_count", "protocol"),
    ),
    GroupRebalances: (
        "rebalances",
        "group %s rebalances: members joined, left or changed",
        ("group_id",),
    ),
    GroupEmptied: ("emptied", "group %s has no members any more", ("group_id",)),
    SessionEnded: (
        "session",
        "group %s: the session of member %s ended",
        ("group_id", "member_id"),
    ),
    RevocationEnded: (
        "session",
        "group %s: member %s did not revoke its partitions in time, and is removed",
        ("group_id", "member_id"),
    ),
    LateMemberRemoved: (
        "session",
        "group %s: member %s did not rejoin or sync in time, and is removed",
        ("group_id", "member_id"),
    ),
    GroupConverted: (
        "converted",
        "group %s continues with the %s protocol",
        ("group_id", "to"),
    ),
    TargetsChanged: (
        "formed",
        "group %s: partitions assigned again: epoch %d, %d members, %s",
        ("group_id", "epoch", "member_count", "assignor"),
    ),
}
#: Fields with text from clients.
_CLIENT_FIELDS: Final = frozenset(("group_id", "member_id", "protocol"))


def report(effect: Effect, journal: Journal, now_ms: int) -> None:
    """Log an event of a group. Other effects have no line."""
    if type(effect) not in _LINES:
        return
    line_kind, text, fields = _LINES[type(effect)]
    values = [
        quoted(getattr(effect, name))
        if name in _CLIENT_FIELDS
        else getattr(effect, name)
        for name in fields
    ]
    journal.log(logging.INFO, f"group {line_kind}", now_ms, text, *values)


def _ignore(_: GroupError | None) -> None:
    """Ignore the result, because no request waits for it."""


class _JoinedCallback:
    """Joins several callbacks into one."""

    def __init__(self, callback: GroupOutcome) -> None:
        #: Called once every callback of add_callback() and one final callback have been
        #: called. The argument is the first error, or None.
        self._callback = callback
        #: Number of callbacks that were not called yet, including the final one.
        self._remaining = 1
        #: The first error so far.
        self._error: GroupError | None = None

    def add_callback(self) -> GroupOutcome:
        """Return a callback that must be called before `callback` is called."""
        self._remaining += 1
        return self.count_down

    def count_down(self, error: GroupError | None) -> None:
        """Count one callback."""
        self._remaining -= 1
        self._error = self._error or error
        if not self._remaining:
            self._callback(self._error)


def _no_topics(_: Collection[TopicWithId]) -> Collection[TopicWithId]:
    """Return no former topics: without a cluster, a topic is deleted with its offsets."""
    return ()


class BrokerGroups(LoopHost[Effect], GroupService):
    """All groups of a broker, or in a cluster the groups of one partition, `only`.

    `new_id` returns the unique part of a member id. `former_of` returns the topics that
    do not exist any more; it may block. Call load() first: all other methods require that
    it succeeded.
    """

    def __init__(
        self,
        state: BrokerState,
        new_id: Callable[[], str] = _new_id,
        only: int | None = None,
        former_of: Callable[
            [Collection[TopicWithId]], Collection[TopicWithId]
        ] = _no_topics,
    ) -> None:
        self._former_of = former_of
        self._offsets = OffsetsTopic(state, only)
        super().__init__(state, self._offsets.topic, EXPIRY_CHECK_MS)
        self._coordinator = Coordinator(
            group_rules(state.settings, state.group_settings),
            new_id,
            ServedTopics(state.logdir, lambda: state.security.rules_version),
            compile_pattern,
            state.remembered,
        )
        state.remembered.size_functions.append(self._coordinator.held_bytes)
        #: Returns the unique part of a member id.
        self._new_id = new_id

    # -- effects

    def _execute(self, effect: Effect) -> None:
        match effect:
            case Reply(waiter, result):
                assert callable(waiter), waiter
                guarded(waiter, result)
            case AppendRecords(group, records):
                # The coordinator continues with the group when the record is committed.
                callback = partial(self._on_stored, effect)
                self._offsets.append(
                    group.group_id,
                    [*records],
                    self._state.now_ms,
                    callback,
                    effect.producer,
                )
            case SetTimer(group_id, timeout, at_ms):
                timer = partial(self._time_out, group_id, timeout)
                self._state.timers.set((group_id, timeout), at_ms, timer)
            case CancelTimer(group_id, timeout):
                self._state.timers.cancel((group_id, timeout))
            # The remaining effects are events for the log.
            case event:
                report(event, self._state.journal, self._state.now_ms)

    def _on_stored(self, effect: AppendRecords, error: GroupError | None) -> None:
        self._act(self._coordinator.stored(effect, error, self._state.now_ms))

    def _time_out(self, group_id: str, timeout: Timeout, now_ms: int) -> None:
        self._state.advance_clock(now_ms)
        self._act(self._coordinator.timed_out(group_id, timeout, now_ms))

    # -- loading

    def when_groups_loaded(
        self,
        handle: Callable[[], T | PendingResponse],
        refuse: Callable[[GroupError], T],
        now_ms: int,
        group_ids: Iterable[str] = (),
    ) -> T | PendingResponse:
        self._state.advance_clock(now_ms)
        if self._is_loaded:
            return handle()
        pending = PendingResponse()

        def when_loaded(is_loaded: bool) -> None:
            if is_loaded:
                resolve_with(handle, pending)
            else:
                pending.set(refuse(GroupError.COORDINATOR_NOT_AVAILABLE))

        self.load(now_ms, when_loaded)
        return pending

    def run_in_steps(self, steps: Steps[T]) -> T | PendingResponse:
        return self._state.run_in_steps(steps)

    def _read(self) -> list[Effect]:
        stored = self._offsets.read()
        # Before take(), because it may fail, and the partition is then read again.
        former = self._former_of(stored.topics())
        self._coordinator.take(
            stored.groups, stored.offsets, stored.unstable, stored.consumers
        )
        return self._coordinator.forget_former_topics(former)

    def _begin(self, effects: list[Effect]) -> list[Effect]:
        # Members get a full session timeout, because they could not reach the broker
        # before.
        return [*effects, *self._coordinator.begin_sessions(self._state.now_ms)]

    def _expire(self, trusted_ms: int) -> list[Effect]:
        return self._coordinator.expire_offsets(trusted_ms)

    # -- queries

    def get(self, group_id: str) -> Group | None:
        return self._coordinator.get(group_id)

    def all(self) -> list[Group]:
        return self._coordinator.all()

    def create_topic(self) -> None:
        self._topic.create()

    # -- requests

    def request(self, group_id: str, request: GroupRequest, done: Callback) -> None:
        self._act(request(self._coordinator, done, self._state.now_ms))

    def step(self, group_id: str, step: GroupStep) -> None:
        self._act(step(self._coordinator, self._state.now_ms))

    def consumer_heartbeat(
        self,
        request: ConsumerHeartbeat,
        callback: Callback,
        *,
        may_omit_member_id: bool,
    ) -> None:
        """Process a heartbeat of the consumer protocol.

        Call callback(HeartbeatAccepted or HeartbeatRefused). With `may_omit_member_id`, a new
        member without an id gets an id of 22 characters, as in Kafka.
        """
        # The broker chooses the ids only in version 0 of the heartbeat. Later clients
        # choose their own.
        if may_omit_member_id and not request.member_id and request.member_epoch == 0:
            digest = hashlib.blake2b(self._new_id().encode(), digest_size=16).digest()
            request = attrs.evolve(
                request, member_id=base64.urlsafe_b64encode(digest).decode().rstrip("=")
            )
        self.request(
            request.group_id,
            lambda coordinator, waiter, now_ms: coordinator.consumer_heartbeat(
                request, waiter, now_ms, may_omit_member_id=may_omit_member_id
            ),
            callback,
        )

    def transaction_ended(self, producer_id: int, number: int, *, commit: bool) -> None:
        self._coordinator.transaction_ended(
            producer_id,
            commit=commit,
            # The marker concerns groups in this partition. Groups in other partitions
            # have markers of their own, which may not be written yet.
            has_marker=lambda group_id: self._topic.partition_of(group_id) == number,
        )

    def topics_deleted(
        self,
        names: set[str],
        now_ms: int,
        callback: GroupOutcome = _ignore,
        current: Collection[TopicWithId] = (),
    ) -> None:
        self._state.advance_clock(now_ms)
        # The records of all groups were in this topic. A group that is used again has
        # no offsets.
        if OFFSETS_TOPIC in names:
            self.unload()
            callback(None)
            return

        def forget(is_loaded: bool) -> None:
            if not is_loaded:
                callback(GroupError.COORDINATOR_NOT_AVAILABLE)
                return
            # One deletion for each group: callback() is called after the last of them.
            waiting = _JoinedCallback(callback)
            effects = self._coordinator.forget_topics(
                names, waiting.add_callback, current
            )
            self._act(effects)
            # The final callback, for the case of no deletion.
            waiting.count_down(None)

        self.load(now_ms, forget)

    def unload(self) -> None:
        """Drop all groups, and answer their requests.

        They are no longer stored, or another broker coordinates them.
        """
        self._act(self._coordinator.unload())

    def close(self) -> None:
        """Drop all groups and end this coordinator."""
        self.unload()
        self._stop_expiry()
        # The memory of this coordinator no longer counts for the limit of the broker.
        self._state.remembered.size_functions.remove(self._coordinator.held_bytes)

    def stop(self, now_ms: int) -> None:
        """Answer all requests that wait for other members.

        Requests that wait for the disk are answered when their sync completes.
        """
        self._state.advance_clock(now_ms)
        self._act(self._coordinator.stop())
