"""Coordinators of a broker that shares its log directory with other processes.

The broker's clients and the consumers of these processes are members of the same
groups, and all transactions have one coordinator state.

Rules:
- Requests are executed by logcore.coordinators.shared_groups and
  logcore.coordinators.transactions, which may block on other processes and on the disk.
  Therefore, a request runs, with its handler, in another thread, through
  WorkQueues.submit().
- Callers are answered in the broker's thread, as in every other module.
- Any process may complete the request of a waiting member. Therefore, the broker polls
  at short intervals while a member waits.
- Members that joined through the broker are bound to the broker's session and end with
  it.

This module does not serve groups of the consumer protocol (KIP-848): a broker that
shares its directory has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final, TypeVar

import attrs

from logcore import LogcoreError
from logcore.coordination.classic_group import Group
from logcore.coordination.effects import Effect
from logcore.coordination.group_requests import (
    GroupError,
    Join,
    JoinRefused,
    Result,
)
from logcore.coordination.transaction_effects import (
    Request,
    TransactionError,
)
from logcore.coordination.transaction_effects import Result as TransactionResult
from logcore.coordinators.group_host import GroupRequest, GroupStep
from logcore.coordinators.pending_result import PendingResult
from logcore.coordinators.process_groups import offsets_partition_of
from logcore.coordinators.shared_groups import SharedGroups
from logcore.coordinators.transactions import TransactionCoordinator
from logcore.errors import InvalidNodeError, NodeTooLargeError
from logcore.format.transaction_records import Partition, StoredTransaction
from logcore.metadata.filenames import TRANSACTIONS_TOPIC
from netshim.coordinators import (
    Callback,
    GroupOutcome,
    GroupService,
    TransactionalProducer,
    TransactionsCallback,
    TransactionService,
)
from netshim.groups import group_rules, report
from netshim.scheduling import (
    PendingResponse,
    Steps,
    chain_response,
    guarded,
    run_all_steps,
)
from netshim.state import BrokerState

_log = logging.getLogger("netshim")

_T = TypeVar("_T")
#: Keys of WorkQueues.submit() for requests about groups, and about transactions.
_GROUPS: Final = "groups that are shared"
_TRANSACTIONS: Final = "transactions that are shared"
#: Intervals of polling for changes by other processes: while a member waits for others,
#: and otherwise.
_REBALANCE_POLL_MS: Final = 10
_IDLE_POLL_MS: Final = 50


@attrs.define
class _PendingRequest:
    """A client that waits for an answer. If the broker stops first, it is refused."""

    pending: PendingResult
    #: Called with the result in the broker's thread.
    deliver: Callable[[Any], None]


class SharedDirectoryGroups(GroupService):
    """The groups of a directory that other processes write too.

    A handler calls the methods that take a request, in the thread that when_groups_loaded()
    uses.
    """

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        #: Created by the first request.
        self._groups: SharedGroups | None = None
        #: Written in the worker thread, read between requests.
        self._pending_requests: list[_PendingRequest] = []
        #: Called in the broker's thread after the request.
        self._local_results: list[Callable[[], None]] = []
        #: Events of other processes, to be logged in the broker's thread.
        self._reports: list[Effect] = []
        #: A poll is scheduled or running.
        self._is_polling = False
        self._now_ms = 0

    # -- requests and their answers

    def when_groups_loaded(
        self,
        handle: Callable[[], _T | PendingResponse],
        refuse: Callable[[GroupError], _T],
        now_ms: int,
        group_ids: Iterable[str] = (),
    ) -> _T | PendingResponse:
        """Run handle() in a worker thread, after earlier calls. See GroupService."""
        self._now_ms = max(self._now_ms, now_ms)
        pending = PendingResponse()

        def finish(result: Any) -> None:
            # Other exceptions are errors of the program, and reach the client as
            # UNKNOWN_SERVER_ERROR.
            if isinstance(result, LogcoreError | OSError):
                # An InvalidNodeError is the fault of the client.
                if not isinstance(result, InvalidNodeError):
                    text = "the groups are not available: %s"
                    self._state.journal.log(
                        logging.ERROR, "groups", self._now_ms, text, str(result)
                    )
                result = refuse(_error_of(result))
            chain_response(result, pending)
            self._deliver_results()

        def run() -> object:
            # Opening reads the directory, so the worker thread does it.
            self._open()
            return handle()

        self._state.work.submit(_GROUPS, run, finish)
        return pending

    def run_in_steps(self, steps: Steps[_T]) -> _T:
        """Return the response of all steps.

        The steps run without pauses, because they have a thread of their own.
        """
        return run_all_steps(steps)

    def _open(self) -> SharedGroups:
        if self._groups is None:
            logdir = self._state.logdir
            groups = logdir.host.coordinators.groups(logdir)
            assert isinstance(groups, SharedGroups), "the directory is shared"
            groups.rules = group_rules(self._state.settings)
            # Called in the worker thread. The lines are written in the broker's thread.
            groups.on_event = self._reports.append
            self._groups = groups
        return self._groups

    def _deliver_results(self) -> None:
        """Deliver the available answers and schedule polling for the others.

        This runs in the broker's thread after each request.
        """
        results = self._local_results[:]
        # Only the copied ones: the worker thread may add others now.
        del self._local_results[: len(results)]
        for deliver in results:
            deliver()
        # Another process may have answered, such as the one whose member was the last
        # to join.
        completed = [
            request for request in self._pending_requests if request.pending.is_done
        ]
        for request in completed:
            self._pending_requests.remove(request)
            guarded(request.deliver, request.pending.result)
        reports = self._reports[:]
        del self._reports[: len(reports)]
        for effect in reports:
            report(effect, self._state.journal, self._now_ms)
        self._poll_later()

    def _poll_later(self) -> None:
        groups = self._groups
        if (
            groups is None
            or self._is_polling
            or self._state.is_stopping
            # Without members of this broker, no client waits for another process.
            or not groups.has_members
        ):
            return
        self._is_polling = True
        delay_ms = _IDLE_POLL_MS
        if self._pending_requests:
            # A member waits for a rebalance: its client sees each millisecond of this
            # delay.
            delay_ms = _REBALANCE_POLL_MS
        self._state.timers.at(self._now_ms + delay_ms, self._poll)

    def _poll(self, now_ms: int) -> None:
        self._now_ms = max(self._now_ms, now_ms)

        def finish(result: Any) -> None:
            self._is_polling = False
            if isinstance(result, Exception):
                _log.error("the groups cannot be read: %s", result)
            self._deliver_results()

        self._state.work.submit(_GROUPS, self._open().poll, finish)

    # -- requests, called in the worker thread

    @property
    def is_loaded(self) -> bool:
        return True

    def load(self, now_ms: int, callback: Callable[[bool], None]) -> None:
        """Call callback(True) immediately: each request reads new records."""
        callback(True)

    def create_topic(self) -> None:
        offsets_partition_of(self._state.logdir, "")

    def get(self, group_id: str) -> Group | None:
        if group_id:
            return self._open().get(group_id)
        return None

    def all(self) -> list[Group]:
        return self._open().all()

    def request(self, group_id: str, request: GroupRequest, done: Callback) -> None:
        if not group_id:
            self._local_results.append(partial(done, GroupError.INVALID_GROUP_ID))
            return
        pending = PendingResult()
        self._open().request(group_id, request, pending)
        # The request may be complete already. _deliver_results() checks it after the
        # handler.
        self._pending_requests.append(_PendingRequest(pending, done))

    def step(self, group_id: str, step: GroupStep) -> None:
        self._open().step(group_id, step)

    def join(self, request: Join, done: Callback) -> None:
        def joined(result: Result) -> None:
            if isinstance(result, GroupError):
                result = JoinRefused(result, request.member_id)
            done(result)

        # A refused Join has the member id of its request in the response.
        super().join(request, joined)

    def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        if not group_id:
            return GroupError.INVALID_GROUP_ID
        return self._open().heartbeat(group_id, member_id, instance_id, generation)

    def transaction_ended(self, producer_id: int, number: int, *, commit: bool) -> None:
        """Do nothing: the groups read the marker from the log."""

    def topics_deleted(
        self, names: set[str], now_ms: int, callback: GroupOutcome
    ) -> None:
        """Do nothing: LogDir.delete_topic() deletes the offsets."""
        callback(None)

    def stop(self, now_ms: int) -> None:
        """Answer all requests that wait for other members.

        Their memberships end with the broker's session.
        """
        requests = self._pending_requests[:]
        del self._pending_requests[: len(requests)]
        for request in requests:
            # Clients look up the coordinator again, and join through another process or
            # the next broker.
            guarded(request.deliver, GroupError.NOT_COORDINATOR)


class SharedDirectoryTransactions(TransactionService):
    """The transactions of a directory that other processes write too."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        #: Created by the first request.
        self._coordinator: TransactionCoordinator | None = None
        #: Whether the stored transactions were read once. Later changes are read by
        #: each request.
        self._is_loaded = False

    def _open(self) -> TransactionCoordinator:
        if self._coordinator is None:
            logdir = self._state.logdir
            self._coordinator = logdir.host.coordinators.transactions(logdir)
        return self._coordinator

    @property
    def is_loaded(self) -> bool:
        return self._is_loaded

    def begin(self, now_ms: int) -> None:
        if not self._is_loaded and TRANSACTIONS_TOPIC in self._state.logdir:
            self.load(now_ms, lambda _: None)

    def load(self, now_ms: int, callback: Callable[[bool], None]) -> None:
        if self._is_loaded:
            callback(True)
            return

        def loaded(result: Any) -> None:
            if isinstance(result, Exception):
                _log.error(
                    "%s cannot be read, so no transaction can be served: %s",
                    TRANSACTIONS_TOPIC,
                    result,
                )
            else:
                self._is_loaded = True
            callback(self._is_loaded)

        self._state.work.submit(_TRANSACTIONS, lambda: self._open().all(), loaded)

    def request(
        self,
        request: Request,
        now_ms: int,
        callback: Callable[[TransactionResult], None],
    ) -> None:
        def finish(result: Any) -> None:
            if isinstance(result, Exception):
                _log.error("the transactions are not available: %s", result)
                result = TransactionError.COORDINATOR_NOT_AVAILABLE
            guarded(callback, result)

        self._state.work.submit(
            _TRANSACTIONS, lambda: self._open().request(request), finish
        )

    def create_topic(self) -> None:
        """Do nothing: the first record creates the topic."""

    def verified(
        self,
        producer: TransactionalProducer,
        partition: Partition,
        write: Callable[[], _T],
    ) -> _T | TransactionError:
        """Call TransactionCoordinator.verified(), which blocks, in a worker thread."""
        return self._open().verified(producer, partition, write)

    def find_stored(
        self, names: Collection[str] | None, callback: TransactionsCallback
    ) -> None:
        def work() -> dict[str, StoredTransaction]:
            all_stored = self._open().all()
            if names is None:
                return all_stored
            return {name: all_stored[name] for name in names if name in all_stored}

        def finish(result: Any) -> None:
            if isinstance(result, Exception):
                _log.error("transactions cannot be read: %s", result)
            callback(result)

        self._state.work.submit(_TRANSACTIONS, work, finish)

    def stop(self, now_ms: int) -> None:
        """Do nothing: each request in progress is answered when its work completes."""


def _error_of(error: Exception) -> GroupError:
    """Return the error code of an exception.

    Clients retry, except for requests that are too large for the registry or invalid.
    """
    if isinstance(error, NodeTooLargeError):
        return GroupError.RECORD_TOO_LARGE
    if isinstance(error, InvalidNodeError):
        return GroupError.INVALID_GROUP_ID
    return GroupError.COORDINATOR_NOT_AVAILABLE
