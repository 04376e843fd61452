"""State of a running broker: its parts, which handlers use.

Rules:
- The broker has one thread. Every function here is called from it, except for the work
  that is given to `submit`.
- This module reads no clock and never blocks. The time is an argument of each call, and
  delayed actions use a timer or a PendingResponse (scheduling.py).
- The host passes the current time to advance_clock() before it delivers the result of
  submitted work. The disk may have stalled for longer than a session timeout.
- Work that requires a sync is passed to `submit`. The host may run it in another
  thread, and calls back in the broker's thread.

This module does not implement the protocol (handlers do) and opens no socket (server.py
does).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from logcore import LogcoreError
from logcore.coordination.memory_budget import ClientMemoryBudget
from logcore.directory.group_settings import GroupSettings
from logcore.format.group_records import partition_of
from logcore.metadata.filenames import OFFSETS_TOPIC
from netshim.coordinators import GroupService, TransactionService
from netshim.fetch_sessions import FetchSessions
from netshim.fetch_wakeups import WaitingFetches
from netshim.leadership import Leadership, SoleLeadership
from netshim.logs import BrokerLogs
from netshim.refused_batches import RefusedBatches
from netshim.request_log import Journal
from netshim.request_order import WorkQueues
from netshim.scheduling import (
    CallLater,
    Lifecycle,
    LoopTimers,
    PendingResponse,
    StepRunner,
    Steps,
    Submit,
    Syncs,
)
from netshim.security.service import Security, SecuritySettings
from netshim.security.stored import SecuritySnapshot, SecurityStore
from netshim.served_directory import ServedDirectory
from netshim.session import ClientSession
from netshim.settings import Settings
from netshim.topic_ids import TopicIds
from netshim.topology import SoleTopology, Topology

if TYPE_CHECKING:
    from netshim.kafka_releases import KafkaRelease

_T = TypeVar("_T")


@attrs.frozen
class Call:
    """The properties of a request that a handler may use in addition to its body."""

    session: ClientSession
    api_key: int
    version: int
    client_id: str
    now_ms: int


#: Key of the work on stored users, rules and quotas.
SECURITY: Final = "security"
#: Key of the work that allocates producer ids.
_PRODUCER_IDS: Final = "producer ids"


def _after_work(submit: Submit, action: Callable[[], None]) -> None:
    """Call an action after the work that was submitted earlier.

    It runs in another iteration of the event loop.
    """
    submit(lambda: None, lambda _: action())


class BrokerState:
    """State of one broker.

    The broker sets `groups` and `transactions`, because coordinators depend on the
    state.
    """

    groups: GroupService
    transactions: TransactionService

    def __init__(
        self,
        logdir: ServedDirectory,
        settings: Settings,
        submit: Submit,
        call_later: CallLater | None = None,
        security: Security | None = None,
    ) -> None:
        self.security = security or Security(
            SecuritySettings(),
            open_store=partial(SecurityStore, logdir.path, logdir.host.fs),
            random=logdir.host.fs.random_bytes,
            wall_ms=logdir.host.fs.now_ms,
        )
        #: Runs work of authentication. The host sets it, so that guessed passwords do
        #: not delay the threads that sync.
        self.submit_login = submit
        self.is_shared = logdir.is_shared
        logdir.host.has_coordinator = not self.is_shared
        #: The directory, which is open for writing.
        self.logdir = logdir
        self.settings = settings
        #: submit(work, callback) runs work that may block on the disk. Then, in the
        #: broker's thread, it passes the time to advance_clock() and calls callback(result
        #: or exception).
        self.submit = submit
        #: The release of Kafka that a test has chosen. Without one, the broker serves
        #: all versions.
        self.release: KafkaRelease | None = None
        #: Set if groups of the consumer protocol are served.
        self.group_settings: GroupSettings | None = None
        if not self.is_shared:
            self.group_settings = logdir.host.coordinators.group_settings(logdir)
        #: Limits the memory of groups and transactions.
        self.remembered = ClientMemoryBudget(settings.max_remembered_bytes)
        self.timers = LoopTimers()
        self.journal = Journal()
        self.lifecycle = Lifecycle()
        self.topic_ids = TopicIds(logdir)
        self.refused_batches = RefusedBatches()
        self.work = WorkQueues(submit)
        self.syncs = Syncs(submit, policy_waits=logdir.durability.waits)
        self.fetch_sessions = FetchSessions(
            settings.max_incremental_fetch_session_cache_slots,
            logdir.host.fs.random_bytes,
        )
        self.fetches = WaitingFetches(logdir, self.timers, self.work, self.syncs)
        # The server of a cluster's broker replaces the next two.
        self.leadership: Leadership = SoleLeadership(self.fetches, self.syncs)
        self.topology: Topology = SoleTopology(logdir, settings.max_replication_factor)
        #: Runs large requests in chunks.
        self.step_runner = StepRunner(call_later or partial(_after_work, submit))
        self.logs = BrokerLogs(
            logdir,
            self.lifecycle,
            self.journal,
            work=self.work,
            fetches=self.fetches,
            syncs=self.syncs,
            step_runner=self.step_runner,
        )

    def advance_clock(self, now_ms: int) -> None:
        """Set the latest time. The host calls this before it delivers a result."""
        self.lifecycle.advance_clock(now_ms)

    @property
    def now_ms(self) -> int:
        return self.lifecycle.now_ms

    @property
    def is_stopping(self) -> bool:
        return self.lifecycle.is_stopping

    @property
    def node_id(self) -> int:
        return self.logdir.node_id

    def coordinator_partition(self, topic: str, name: str) -> int:
        """Return the partition of an internal topic that stores a group or a transaction.

        `name` is the id of the group, or the transactional id.
        """
        count = len(self.logs.numbers_of(topic))
        if not count and topic == OFFSETS_TOPIC:
            count = self.settings.offsets_partitions
        return partition_of(name, count or self.settings.transactions_partitions)

    def run_in_steps(self, steps: Steps[_T]) -> _T | PendingResponse:
        """Return the response of a request that runs in steps, or a PendingResponse."""
        return self.logs.run_in_steps(steps)

    def in_background(self, work: Callable[[], Any]) -> PendingResponse:
        """Run work() in a thread. The response is its result, or its exception."""
        pending = PendingResponse()
        self.submit(work, pending.set)
        return pending

    def allocate_producer_id(self, callback: Callable[[Any], None]) -> None:
        """Call callback() with a new producer id, or with the error.

        Allocations run one at a time, because the first one may read all logs.
        """
        self.work.submit(_PRODUCER_IDS, self.logdir.host.next_producer_id, callback)

    def change_security(
        self,
        change: Callable[[], Any],
        respond: Callable[[Any], Any],
        refuse: Callable[[LogcoreError], Any] | None = None,
    ) -> PendingResponse:
        """Change stored users, rules or quotas, and answer once they are in effect.

        `change` runs in a thread, and `respond` turns its result into the response.
        `refuse` turns the error of a change into the response. The change may be in
        effect nevertheless.
        """
        pending = PendingResponse()

        def work() -> tuple[Any, SecuritySnapshot]:
            result = change()
            return result, self.security.store().load()

        def finish(outcome: Any) -> None:
            if isinstance(outcome, LogcoreError) and refuse is not None:
                pending.set(refuse(outcome))
                return
            if isinstance(outcome, BaseException):
                pending.set(outcome)
                return
            result, snapshot = outcome
            self.security.publish(snapshot)
            pending.set(respond(result))

        self.work.submit(SECURITY, work, finish)
        return pending

    def wall_ms(self) -> int:
        """Return the wall clock, which is compared with the times in tokens."""
        return self.security.wall_ms()
