"""Groups whose members are in several processes that share a log directory.

The state of a group is a node of the registry, `/consumers/<group>/group`. A step locks
the group's domain, reads the node, calls logcore.coordination, appends the records, and
writes the node. So all processes execute one state machine together.

Rules:
- A record is durable before the node that refers to it, and both are written in one
  step. So no rebalance happens between the check of a commit and its append, and no
  commit of a removed member takes effect.
- The node does not contain commits. A commit is therefore appended within its step and
  synced after it, while other steps run, so that threads and processes share a sync. A
  read of committed offsets, and each step that stores another record, first syncs all
  earlier records. No member continues from a commit that a power loss may undo.
- A member whose process has died is removed by the next process that checks, without a
  timeout. The lock of its session shows that a process is alive. A static member whose
  process died remains a member for its session timeout.
- A live member that does not poll is removed when its session, or the rebalance that
  waits for it, times out. Only a process that has observed the whole duration removes
  it (stall_detector.py). Other deadlines use the monotonic clock of the machine.
- An answer for a member of another process is stored in the node until that process
  fetches it.
- After a reboot no earlier member is alive, so only the generation of the earlier node
  is used. The same applies if the log has a later generation, which a process with
  exclusive access wrote.
- A commit in a transaction takes effect when the transaction commits (stored_offsets.py).

logcore.coordination implements the transitions of a group.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Final

import attrs

from logcore.coordination.classic_group import DEAD, PREPARING, STABLE, Group
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.effects import (
    AppendRecords,
    CancelTimer,
    Effect,
    OffsetsCommitted,
    OffsetsPending,
    Reply,
    SetTimer,
)
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    Joined,
    JoinRefused,
    OffsetKey,
    Result,
    SessionEnds,
    Timeout,
    Waiter,
)
from logcore.coordinators.durable_queue import sync_present
from logcore.coordinators.group_codec import GroupNode
from logcore.coordinators.group_host import GroupRequest, GroupStep, commit_request
from logcore.coordinators.pending_result import PendingResult
from logcore.coordinators.process_groups import (
    ProcessGroups,
    append,
    check_offsets_deleted,
    offsets_partition_of,
)
from logcore.coordinators.stall_detector import StallDetector
from logcore.coordinators.stored_offsets import StoredGroups, stored_groups
from logcore.directory.interface import ClientDirectory
from logcore.errors import LogcoreError, NodeExistsError, NodeNotFoundError
from logcore.format.group_records import (
    Committed,
    StoredGroup,
    partition_of,
    read_assignment,
)
from logcore.fs import FS
from logcore.kernels.layout import RecordInput
from logcore.log import Log
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.reader import aborted_transactions
from logcore.registry import FileRegistry
from logcore.registry.paths import element_name, owner
from logcore.registry.paths import group_state as _path
from logcore.registry.protocol import CONSUMERS
from logcore.registry.views import agree_on_clock

#: The time of a renewal that never happened.
_NEVER_MS: Final = -(2**31)
#: How often to check whether the processes of other members are alive. A check opens a
#: file for each process.
_ALIVE_MS: Final = 50
#: Maximum interval of the checks, in case the report of a change is lost.
_MAX_CHECK_INTERVAL_MS: Final = 1_000
#: Number of checks during the shortest deadline.
_CHECKS: Final = 10
#: A session is renewed when 1/_RENEW_PART of it has passed.
_RENEW_PART: Final = 4


def _ignore(_: Effect) -> None:
    """Ignore an event."""


class SharedGroups(ProcessGroups):
    """The groups of one directory that several processes have open.

    Set `rules` and `on_event` before the first request.
    """

    def __init__(
        self, fs: FS, directory: ClientDirectory, registry: FileRegistry
    ) -> None:
        super().__init__(fs, directory)
        self._registry = registry
        self._session = registry.session.id
        #: Called with each event of a group, in the thread that executes the event.
        self.on_event: Callable[[Effect], None] = _ignore
        #: Numbers for the names of waiters, which are unique within the session.
        self._numbers = itertools.count()
        #: Group -> waiter -> pending answer.
        self._answers: dict[str, dict[str, PendingResult]] = {}
        #: Group -> version and content of its node at the last read.
        self._nodes: dict[str, tuple[int, GroupNode]] = {}
        #: (group, member) -> monotonic time of the last renewal of its session.
        self._renewed: dict[tuple[str, str], int] = {}
        #: Groups with members of this process.
        self._local_groups: set[str] = set()
        self._observed = StallDetector()
        #: Monotonic time of the last check whether the processes of members are alive.
        self._checked_ms = 0
        #: Groups whose nodes this process has created or found.
        self._created: set[str] = set()
        self._offsets = _Offsets(directory)
        self._boot = registry.boot_id
        self._clock_ms = agree_on_clock(
            registry, self._boot, fs.now_ms() - fs.monotonic_ms()
        )

    def close(self) -> None:
        """End the session. Other processes remove the members that did not leave."""
        self._registry.close()

    def now_ms(self) -> int:
        """Return the time of the groups, which is the same in all processes.

        See agree_on_clock().
        """
        return self._clock_ms + self._fs.monotonic_ms()

    def watched(self, group_id: str) -> str:
        """Return the directory to watch for changes of a group."""
        return self._registry.directory_of(_path(group_id))

    def watched_sessions(self) -> str:
        """Return the directory in which files are closed when a process dies."""
        return self._registry.sessions_directory

    def watched_owners(self, group_id: str, topic: str) -> str:
        """Return the directory to watch for changes of partition owners."""
        return self._registry.directory_of(owner(group_id, topic, 0))

    # -- requests

    def request(
        self, group_id: str, request: GroupRequest, done: PendingResult
    ) -> None:
        waiter = f"{self._session}:{next(self._numbers)}"
        with self._lock:
            # Before the step, because the step may deliver the answer.
            self._answers.setdefault(group_id, {})[waiter] = done
            try:
                self.step(
                    group_id,
                    lambda coordinator, now_ms: request(coordinator, waiter, now_ms),
                )
            except BaseException:
                # The caller may withdraw the request later. withdraw() must find it.
                if not done.can_be_withdrawn:
                    self._answers.get(group_id, {}).pop(waiter, None)
                raise

    def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        """Renew a session if a quarter of it has passed.

        Return None if nothing has changed, or the error for the member.
        """
        with self._lock:
            # Most heartbeats need neither a lock in the registry nor a step.
            node = self._read_node(group_id)
            if node is None:
                return GroupError.UNKNOWN_MEMBER_ID
            group = node.group
            error = group.check_generation(member_id, instance_id, generation)
            if error is not None:
                return error
            now_ms = self._fs.monotonic_ms()
            renewed_ms = self._renewed.get((group_id, member_id), _NEVER_MS)
            if (
                now_ms - renewed_ms
                < group.members[member_id].session_timeout_ms // _RENEW_PART
            ):
                # A step would return the same, and only renew the session.
                return (
                    GroupError.REBALANCE_IN_PROGRESS
                    if group.state == PREPARING
                    else None
                )
            errors: list[GroupError | None] = []

            def heartbeat(coordinator: Coordinator, at_ms: int) -> list[Effect]:
                error, effects = coordinator.heartbeat(
                    group_id, member_id, instance_id, generation, at_ms
                )
                errors.append(error)
                return effects

            self.step(group_id, heartbeat)
            self._renewed[group_id, member_id] = now_ms
            # A step may run more than once, see _create_node(). The last run is valid.
            return errors[-1]

    def withdraw(self, group_id: str, joining: PendingResult) -> None:
        with self._lock:
            waiting = self._answers.get(group_id, {})
            waiter = next(
                (waiter for waiter, answer in waiting.items() if answer is joining),
                None,
            )
            if waiter is not None:
                self.step(
                    group_id,
                    lambda coordinator, now_ms: coordinator.withdraw(
                        group_id, waiter, now_ms
                    ),
                )
                waiting.pop(waiter, None)

    def commit(
        self,
        committer: Committer,
        offsets: Mapping[OffsetKey, Committed],
        producer: tuple[int, int] | None = None,
    ) -> GroupError | None:
        commit = _Commit(f"{self._session}:{next(self._numbers)}")

        request = commit_request(committer, offsets, producer)

        def step(coordinator: Coordinator, now_ms: int) -> Iterable[Effect]:
            return request(coordinator, commit.waiter, now_ms)

        with self._lock:
            self._change(committer.group_id, step, commit)
            self._unsynced.add(
                commit.ends,
                lambda failures: self._end_commit(committer.group_id, commit, failures),
            )
        self._unsynced.wait_until_durable()
        return commit.error

    def _end_commit(
        self, group_id: str, commit: _Commit, failures: Mapping[Log, LogcoreError]
    ) -> None:
        """Set the error of a commit after its syncs. The lock is held.

        `failures` contains the logs whose records may not be durable.
        """
        for failure in failures.values():
            commit.error = self._not_stored(group_id, failure)

    @contextlib.contextmanager
    def committing(self, committer: Committer) -> Generator[GroupError | None]:
        errors: list[GroupError | None] = []

        def check(coordinator: Coordinator, now_ms: int) -> list[Effect]:
            error, effects = coordinator.check_commit(committer, now_ms)
            errors.append(error)
            return effects

        with self._lock:
            self._create_node(committer.group_id)
            # No other process changes the group before the caller has stored its
            # offsets.
            with self._registry.holding(_path(committer.group_id)):
                self.step(committer.group_id, check)
                yield errors[-1]

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        """Do nothing: the marker in the log is sufficient."""

    def unstable(self, group_id: str) -> set[OffsetKey]:
        with self._lock, self._registry.holding(_path(group_id)):
            self._offsets.read_new_records(group_id)
            return {
                key
                for keys in self._offsets.unstable(group_id).values()
                for key in keys
            }

    def committed(self, group_id: str) -> dict[OffsetKey, Committed]:
        with self._lock, self._registry.holding(_path(group_id)):
            self._offsets.read_new_records(group_id)
            return {
                (topic, partition): each
                for topic, partitions in self._offsets.of(group_id).items()
                for partition, each in partitions.items()
            }

    def _present(self, group_id: str) -> Group | None:
        node = self._read_node(group_id)
        return None if node is None else node.group

    def forget_topics(self, names: set[str]) -> None:
        def forget(coordinator: Coordinator, waiter: Waiter, _: int) -> list[Effect]:
            return coordinator.forget_topics(names, lambda: waiter) or [
                Reply(waiter, None)
            ]

        with self._lock:
            answers: list[PendingResult] = []
            for group_id in self._offsets.groups_of(names):
                answers.append(PendingResult())
                self.request(group_id, forget, answers[-1])
            check_offsets_deleted([answer.result for answer in answers], self.failure)

    def get(self, group_id: str) -> Group | None:
        """Return a copy of a group in its current state with offsets, or None.

        Raises:
            LogcoreError: the registry or a log could not be read.
        """
        path = _path(group_id)
        with self._lock:
            node = self._read_node(group_id)
            # The step removes dead members first, so that the copy has none of them.
            if node is not None and (
                self._has_due_timeout(node) or any(self._dead(node))
            ):
                self.step(group_id, lambda coordinator, now_ms: ())
            with self._registry.holding(path):
                value = b""
                with contextlib.suppress(NodeNotFoundError):
                    value = self._registry.get(path).value
                self._offsets.read_new_records(group_id)
                group = self._opened(
                    group_id, GroupNode.unpack(group_id, value) if value else None
                ).group
        return None if group.is_forgotten else group

    def all(self) -> list[Group]:
        """Return all groups that have members or committed offsets, sorted by name.

        This raises the errors of get().
        """
        with self._lock:
            nodes = {
                element_name(text) for text in self._registry.children(f"/{CONSUMERS}")
            }
            found = [self.get(name) for name in sorted(nodes | self._offsets.all())]
        return [group for group in found if group is not None]

    @property
    def has_members(self) -> bool:
        """Whether this process has members or pending answers.

        Otherwise, poll() has no work.
        """
        return bool(self._answers or self._local_groups)

    def expire_offsets(self) -> None:
        def expire(coordinator: Coordinator, now_ms: int) -> list[Effect]:
            return coordinator.expire_offsets(self._directory.host.trusted_ms(now_ms))

        for group in self.all():
            self.step(group.group_id, expire)

    def poll(self) -> None:
        """Fetch answers, and act on passed deadlines and dead processes."""
        with self._lock:
            clock_ms = self._fs.monotonic_ms()
            is_due = clock_ms - self._checked_ms >= _ALIVE_MS
            if is_due:
                self._checked_ms = clock_ms
            for group_id in sorted({*self._answers, *self._local_groups}):
                node = self._read_node(group_id)
                self._record_local_members(group_id, node)
                if node is None:
                    continue
                self._observed.observe(node.group, node.timers, clock_ms)
                self._fetch(group_id, node)
                if self._has_due_timeout(node) or (is_due and any(self._dead(node))):
                    self.step(group_id, lambda coordinator, now_ms: ())

    def _has_due_timeout(self, node: GroupNode) -> bool:
        """Return whether a deadline has passed that no process has acted on."""
        return bool(self._due(node))

    def _due(self, node: GroupNode) -> list[Timeout]:
        """Return the timeouts that this process must execute, the earliest first."""
        now_ms = node.clock_ms + self._fs.monotonic_ms()
        # The position decides between equal times, because timeouts have no order.
        passed = sorted(
            (at_ms, at)
            for at, (_, at_ms) in enumerate(node.timers.items())
            if at_ms <= now_ms
        )
        timeouts = list(node.timers)
        return [
            timeouts[at] for _, at in passed if self._may_execute(node, timeouts[at])
        ]

    def _may_execute(self, node: GroupNode, timeout: Timeout) -> bool:
        """Return whether this process may act on a deadline that has passed."""
        if isinstance(timeout, SessionEnds):
            session = node.sessions.get(timeout.member_id, self._session)
            if session != self._session and not self._registry.is_alive(session):
                return True  # the process is dead, so it is not only paused
        return self._observed.is_over(node.group, node.timers, timeout)

    def _record_local_members(self, group_id: str, node: GroupNode | None) -> None:
        """Record whether a group has members of this process.

        Other groups need no polling.
        """
        members = {} if node is None else node.group.members
        if node is not None and self._session in node.sessions.values():
            self._local_groups.add(group_id)
        else:
            self._local_groups.discard(group_id)
            self._observed.forget(group_id)
        for key in [
            key for key in self._renewed if key[0] == group_id and key[1] not in members
        ]:
            del self._renewed[key]

    def next_ms(self) -> int | None:
        """Return the time of the next deadline, in terms of now_ms().

        It is at most _ALIVE_MS away, because another process may die at any time.
        """
        return self._clock_ms + self._next_ms(_ALIVE_MS)

    def _next_ms(self, max_ms: int) -> int:
        """Return the monotonic time of the next deadline, at most max_ms from now."""
        with self._lock:
            times = [
                at_ms - node.clock_ms
                for _, node in self._nodes.values()
                for at_ms in node.timers.values()
            ]
        clock_ms = self._fs.monotonic_ms()
        # A deadline that has passed but must not be acted on yet is checked again
        # later.
        future = [at_ms for at_ms in times if at_ms > clock_ms]
        return min([clock_ms + max_ms, *future])

    def time_until_check_ms(self) -> int:
        """Return the time to the next check, if changes and deaths are reported.

        The time is short while a group rebalances or a request waits. At other times,
        _CHECKS checks fit into the shortest deadline, because a member must renew its
        session, and because the failure detector counts only a part of a long interval.
        """
        with self._lock:
            states = {
                self._nodes[group_id][1].group.state
                for group_id in self._local_groups
                if group_id in self._nodes
            }
            if states - {STABLE} or any(self._answers.values()):
                return _ALIVE_MS
            shortest_ms = self._observed.shortest_ms() or 0
        max_ms = min(_MAX_CHECK_INTERVAL_MS, max(_ALIVE_MS, shortest_ms // _CHECKS))
        return max(1, self._next_ms(max_ms) - self._fs.monotonic_ms())

    @contextlib.contextmanager
    def owning(self, group_id: str) -> Generator[tuple[FileRegistry, Group | None]]:
        """Yield the registry and the group.

        No other process changes the group inside the `with` block. The caller must not
        change the group.
        """
        with self._lock, self._registry.holding(_path(group_id)):
            node = self._read_node(group_id)
            yield self._registry, None if node is None else node.group

    # -- the node

    def _read_node(self, group_id: str) -> GroupNode | None:
        """Return the current node, read without a lock. The caller must not change it."""
        try:
            registry_node = self._registry.get(_path(group_id))
        except NodeNotFoundError:
            self._nodes.pop(group_id, None)
            return None
        cached = self._nodes.get(group_id)
        if cached is None or cached[0] != registry_node.version:
            if not registry_node.value:
                return None  # _create_node() has created it, and no step has written it yet
            cached = (
                registry_node.version,
                GroupNode.unpack(group_id, registry_node.value),
            )
            self._nodes[group_id] = cached
            self._notify_listeners()
        # After a reboot, the node describes members that died with the machine.
        return cached[1] if cached[1].boot == self._boot else None

    def _fetch(self, group_id: str, node: GroupNode) -> None:
        """Fetch the answers in the node for members of this process."""
        waiting = self._answers.get(group_id, {})
        for waiter in [
            waiter for waiter in waiting if waiter in node.unfetched_results
        ]:
            waiting[waiter].set(node.unfetched_results[waiter])
            # This is last, so that after an interrupt the next call finds the answer.
            del waiting[waiter]
            self._notify_listeners()
        if not waiting:
            self._answers.pop(group_id, None)

    def _dead(self, node: GroupNode) -> tuple[list[str], list[str]]:
        """Return the (dynamic, static) members whose processes are dead.

        Static members that are marked absent already are not included.
        """
        # Each session is checked once, because a check opens a file.
        alive = {self._session: True}
        dynamic: list[str] = []
        static: list[str] = []
        for member in node.group.members.values():
            session = node.sessions.get(member.member_id, self._session)
            if session not in alive:
                alive[session] = self._registry.is_alive(session)
            if alive[session]:
                continue
            if member.instance_id is None:
                dynamic.append(member.member_id)
            elif member.absence_ms is not None and not member.is_absent:
                static.append(member.member_id)
        return dynamic, static

    def step(self, group_id: str, step: GroupStep) -> None:
        """Run one step of a group, from reading its node to writing it.

        Raises:
            LogcoreError: the registry could not be read or changed.
        """
        with self._lock:
            self._change(group_id, step, None)
            node = self._read_node(group_id)
            self._record_local_members(group_id, node)
            if node is not None:
                if group_id in self._local_groups:
                    # Observe a deadline from the step that sets it, not only from the
                    # next poll().
                    self._observed.observe(
                        node.group, node.timers, self._fs.monotonic_ms()
                    )
                self._fetch(group_id, node)

    def _change(self, group_id: str, step: GroupStep, commit: _Commit | None) -> None:
        # A node in _created may have been deleted. update() then creates it and runs the
        # step again, which is harmless for a commit.
        if commit is None or group_id not in self._created:
            self._create_node(group_id)
            self._created.add(group_id)
        self._registry.update(
            _path(group_id),
            lambda value: self._run_step(group_id, value or b"", step, commit),
        )

    def _create_node(self, group_id: str) -> None:
        """Create the node before the step.

        If a parent node did not exist, update() would run the step twice.
        """
        path = _path(group_id)
        try:
            self._registry.get(path)
        except NodeNotFoundError:
            with contextlib.suppress(NodeExistsError):
                self._registry.create(path)

    def _run_step(
        self, group_id: str, value: bytes, step: GroupStep, commit: _Commit | None
    ) -> bytes | None:
        """Return the value of the node after a step.

        The lock of the group's domain is held. `commit` is set if the step is a commit.
        A commit does no other work, unless a timeout is due.
        """
        # Step 1: load the node and the offsets.
        node = GroupNode.unpack(group_id, value) if value else None
        skips_maintenance = (
            commit is not None
            and node is not None
            and node.boot == self._boot
            and not self._due(node)
        )
        if skips_maintenance:
            self._offsets.read_once(group_id)
        else:
            self._offsets.read_new_records(group_id)
        node = self._opened(group_id, node)
        coordinator = Coordinator(self.rules, lambda: self._fs.random_bytes(16).hex())
        run = _Run(
            node, coordinator, self._fs.monotonic_ms, self._store, self.on_event, commit
        )
        now_ms = node.clock_ms + self._fs.monotonic_ms()
        if not skips_maintenance:
            # Step 2: remove dead members and act on timeouts. A quick step skips this,
            # because removing a member may leave a group that only its offsets keep
            # alive.
            self._clear_unfetched_results(node)
            self._evict_and_time_out(node, coordinator, run, now_ms)
        # Step 3: run the step, and encode the node if it has changed.
        deadlines = {
            member.member_id: member.deadline_ms
            for member in node.group.members.values()
        }
        run.act(step(coordinator, now_ms))
        if skips_maintenance:
            _keep_deadlines(node.group, deadlines)
        run.record_sessions()
        packed = node.pack()
        return None if packed == value else packed

    def _evict_and_time_out(
        self, node: GroupNode, coordinator: Coordinator, run: _Run, now_ms: int
    ) -> None:
        """Remove or mark members of dead processes, and execute due timeouts."""
        dynamic, static = self._dead(node)
        if dynamic:
            removed: list[tuple[str, str | None]] = [
                (member_id, None) for member_id in dynamic
            ]
            run.act(coordinator.leave(node.group.group_id, removed, now_ms)[1])
        if static:
            run.act(coordinator.absent(node.group.group_id, static, now_ms))
        for timeout in self._due(node):
            if node.timers.pop(timeout, None) is not None:
                run.act(coordinator.timed_out(node.group.group_id, timeout, now_ms))

    def _opened(self, group_id: str, node: GroupNode | None) -> GroupNode:
        """Return the node with its offsets.

        If there is no current node, create one from the group's records in the log.
        """
        offsets = self._offsets.of(group_id)
        stored = self._offsets.group(group_id)
        # A process with exclusive access, or a broker, uses the log alone.
        is_outdated = (
            node is not None
            and stored is not None
            and stored.generation > node.group.generation
        )
        if node is None or node.boot != self._boot or is_outdated:
            before = node
            generation = 0 if before is None else before.group.generation
            node = GroupNode(Group(group_id), self._boot, self._clock_ms)
            if before is not None and before.boot == self._boot:
                node.unfetched_results = before.unfetched_results | _refusals_of(
                    before.group
                )
            if stored is not None:
                node.group.protocol_type = stored.protocol_type
                node.group.state_ms = stored.state_ms
                generation = max(generation, stored.generation)
            node.group.generation = generation
        # Copies, because the coordinator changes them, and a step may run again.
        node.group.offsets = {
            topic: dict(partitions)
            for topic, partitions in offsets.items()
            if partitions
        }
        unstable = self._offsets.unstable(group_id)
        node.group.unstable = {
            producer_id: dict(keys) for producer_id, keys in unstable.items()
        }
        return node

    def _clear_unfetched_results(self, node: GroupNode) -> None:
        """Delete answers that were fetched, and answers for processes that have ended."""
        waiting = self._answers.get(node.group.group_id, {})
        for waiter in list(node.unfetched_results):
            # The name of a waiter begins with its session, see request().
            session = waiter.partition(":")[0]
            is_needed = (
                waiter in waiting
                if session == self._session
                else self._registry.is_alive(session)
            )
            if not is_needed:
                del node.unfetched_results[waiter]

    def _store(
        self, group_id: str, store: AppendRecords, commit: _Commit | None
    ) -> GroupError | None:
        """Append records and wait until they are durable.

        Records of a commit are synced after the step.
        """
        now_ms = self._fs.now_ms()
        rows: list[RecordInput] = [
            (key, value, (), now_ms) for key, value in store.records
        ]
        try:
            log = self._offsets.log(group_id)
            if commit is None:
                append(log, rows, store.producer, "disk")
            else:
                receipt = append(log, rows, store.producer, "os")
                commit.ends[log] = receipt.last_offset + 1
        except (LogcoreError, OSError) as error:
            return self._not_stored(group_id, error)
        return None


def _keep_deadlines(group: Group, before: Mapping[str, int]) -> None:
    """Undo a renewal if less than a quarter of the session has passed.

    heartbeat() has the same rule. So most commits leave the node unchanged, and wake no
    process that watches it.
    """
    for member_id, deadline_ms in before.items():
        member = group.members.get(member_id)
        if (
            member is not None
            and member.deadline_ms - deadline_ms
            < member.session_timeout_ms // _RENEW_PART
        ):
            member.deadline_ms = deadline_ms


def live_members(registry: FileRegistry, group_id: str) -> list[str]:
    """Return the ids of members whose process is alive, from the group's node.

    This changes nothing in the registry.
    """
    return [
        member.member_id
        for member in registered_members(registry, group_id)
        if member.is_alive
    ]


@attrs.frozen(kw_only=True)
class RegisteredMember:
    """A member, as the node of its group describes it."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    #: Whether the process of the member is alive.
    is_alive: bool
    #: None if unknown.
    pid: int | None
    #: Its assignment in the latest generation.
    partitions: tuple[OffsetKey, ...]


def registered_members(registry: FileRegistry, group_id: str) -> list[RegisteredMember]:
    """Return the members in a group's node. This changes nothing in the registry."""
    try:
        value = registry.get(_path(group_id)).value
    except NodeNotFoundError:
        return []
    if not value:
        return []
    node = GroupNode.unpack(group_id, value)
    pids = {
        info.id: info.record.pid
        for info in registry.sessions()
        if info.record is not None
    }
    found = []
    for member in node.group.members.values():
        session = node.sessions.get(member.member_id, "")
        found.append(
            RegisteredMember(
                member_id=member.member_id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                is_alive=registry.is_alive(session),
                pid=pids.get(session),
                partitions=read_assignment(member.assignment) or (),
            )
        )
    return found


def _refusals_of(group: Group) -> dict[str, Result]:
    """Return answers for members that wait in an outdated state. They join again."""
    answers: dict[str, Result] = {}
    for member in group.members.values():
        if isinstance(member.joining, str):
            answers[member.joining] = JoinRefused(
                GroupError.UNKNOWN_MEMBER_ID, member.member_id
            )
        if isinstance(member.syncing, str):
            answers[member.syncing] = GroupError.UNKNOWN_MEMBER_ID
    return answers


@attrs.define
class _Commit:
    """A commit in progress."""

    waiter: str
    #: The reason why it was refused or not stored.
    error: GroupError | None = None
    #: For each log, the offset up to which it must be synced.
    ends: dict[Log, int] = attrs.Factory(dict)

    def owns(self, store: AppendRecords) -> bool:
        return (
            isinstance(store.then, OffsetsCommitted | OffsetsPending)
            and store.then.waiter == self.waiter
        )


class _Run:
    """Executes the effects of one step on a node.

    `store` appends records and returns an error or None. `commit` is set if the step is
    a commit: its answer is stored there instead of the node.
    """

    def __init__(
        self,
        node: GroupNode,
        coordinator: Coordinator,
        monotonic_ms: Callable[[], int],
        store: Callable[[str, AppendRecords, _Commit | None], GroupError | None],
        on_event: Callable[[Effect], None],
        commit: _Commit | None,
    ) -> None:
        self._node = node
        self._coordinator = coordinator
        self._monotonic_ms = monotonic_ms
        self._store = store
        self._on_event = on_event
        self._commit = commit
        self._effects: deque[Effect] = deque()
        if not node.group.is_unused:
            coordinator.adopt(node.group)

    def act(self, effects: Iterable[Effect]) -> None:
        """Execute effects after the earlier ones."""
        node = self._node
        commit = self._commit
        self._effects.extend(effects)
        while self._effects:
            match self._effects.popleft():
                case Reply(str() as waiter, None | GroupError() as error) if (
                    commit and waiter == commit.waiter
                ):
                    commit.error = error
                case Reply(str() as waiter, result):
                    node.unfetched_results[waiter] = result
                    # The id of a new member is not in its request.
                    if isinstance(result, Joined):
                        node.sessions[result.member_id] = waiter.partition(":")[0]
                case AppendRecords() as store:
                    # An unused group was not adopted, so the coordinator has made
                    # another object for it.
                    self._use_group(store.group)
                    is_commit = commit is not None and commit.owns(store)
                    error = self._store(
                        node.group.group_id, store, commit if is_commit else None
                    )
                    now_ms = node.clock_ms + self._monotonic_ms()
                    self._effects.extend(self._coordinator.stored(store, error, now_ms))
                case SetTimer(group_id, timeout, at_ms):
                    group = self._coordinator.get(group_id)
                    if group is not None:
                        self._use_group(group)
                    node.timers[timeout] = at_ms
                case CancelTimer(_, timeout):
                    node.timers.pop(timeout, None)
                case event:
                    self._on_event(event)
        group = self._coordinator.get(node.group.group_id)
        if group is not None:
            self._use_group(group)
        elif node.group.state == DEAD:
            # A group that is created again continues with the generation, so that no
            # earlier member takes part in it.
            self._use_group(
                Group(node.group.group_id, generation=node.group.generation)
            )

    def _use_group(self, group: Group) -> None:
        self._node.group = group

    def record_sessions(self) -> None:
        """Record the session in which each member sent its pending or latest request."""
        node = self._node
        for member in node.group.members.values():
            for waiter in (member.joining, member.syncing):
                if isinstance(waiter, str):
                    node.sessions[member.member_id] = waiter.partition(":")[0]
        node.sessions = {
            member_id: session
            for member_id, session in node.sessions.items()
            if member_id in node.group.members
        }


class _Offsets:
    """The contents of the logs of `__consumer_offsets`, read incrementally.

    It is used under the lock of the groups.
    """

    def __init__(self, directory: ClientDirectory) -> None:
        self._directory = directory
        #: Partition -> the groups in its log.
        self._stored_groups: dict[int, StoredGroups] = {}
        #: Partition -> the log, and the offset up to which it was read.
        self._ends: dict[int, tuple[Log, int]] = {}

    def _number(self, group_id: str) -> int:
        return partition_of(group_id, self._directory.partitions(OFFSETS_TOPIC)[-1] + 1)

    def log(self, group_id: str) -> Log:
        """Return the log of a group's records, and create it if necessary.

        Raises:
            LogcoreError: the log could not be opened.
        """
        return self._opened(offsets_partition_of(self._directory, group_id)[1])

    def _opened(self, number: int) -> Log:
        log = self._directory.partition(OFFSETS_TOPIC, number)
        return (
            self._directory.host.open_again(OFFSETS_TOPIC, number)
            if log.has_failed
            else log
        )

    def read_once(self, group_id: str) -> None:
        """Read the group's log if it was never read.

        Steps that do not need new records call this instead of read_new_records().
        """
        if (
            OFFSETS_TOPIC in self._directory
            and self._number(group_id) not in self._stored_groups
        ):
            self.read_new_records(group_id)

    def read_new_records(self, group_id: str) -> None:
        """Sync the group's log, and read its new records."""
        if OFFSETS_TOPIC in self._directory:
            self._read_new_records(self._number(group_id), self.log(group_id))

    def _read_new_records(self, number: int, log: Log) -> None:
        log.refresh()
        # A process may have died before the sync of its records.
        sync_present(log)
        cached, end = self._ends.pop(number, (None, 0))
        # The entry is missing until the read is complete, so that after an error the
        # whole log is read again.
        high_watermark = log.high_watermark
        # The log was opened again, or records that were read were deleted or truncated.
        is_new = (
            cached is not log
            or end < log.log_start_offset
            or end > high_watermark
            or log.times_truncated > 0
        )
        start = log.log_start_offset if is_new else end
        # The marker of a transaction decides whether earlier records are valid. The whole
        # log is therefore read again until no transaction is open.
        is_undecided = log.last_stable_offset < high_watermark
        if is_undecided or aborted_transactions(log, start, high_watermark):
            self._stored_groups[number] = stored_groups([log])
        else:
            found = StoredGroups() if is_new else self._stored_groups[number]
            for columns in log.scan(start, high_watermark):
                pairs = zip(columns.keys(), columns.values(), strict=True)
                found.add_records(
                    {key: value for key, value in pairs if key is not None}
                )
            self._stored_groups[number] = found
        if not is_undecided:
            self._ends[number] = log, high_watermark

    def of(self, group_id: str) -> Mapping[str, Mapping[int, Committed]]:
        for found in self._stored_groups.values():
            if group_id in found.offsets:
                return found.offsets[group_id]
        return {}

    def unstable(
        self, group_id: str
    ) -> Mapping[int, Mapping[OffsetKey, tuple[int, Committed]]]:
        """Return the offsets in open transactions, by producer id.

        Each has a number that orders it among the offsets of its partition.
        """
        return next(
            (
                found.unstable[group_id]
                for found in self._stored_groups.values()
                if group_id in found.unstable
            ),
            {},
        )

    def group(self, group_id: str) -> StoredGroup | None:
        return next(
            (
                found.groups[group_id]
                for found in self._stored_groups.values()
                if group_id in found.groups
            ),
            None,
        )

    def groups_of(self, topics: set[str]) -> list[str]:
        """Return all groups with offsets of these topics.

        This includes open transactions, and logs that were never read.
        """
        self._read_all_new_records()
        found = [
            (name, topic)
            for each in self._stored_groups.values()
            for name, offsets in each.offsets.items()
            for topic in offsets
        ]
        found += [
            (name, topic)
            for each in self._stored_groups.values()
            for name, producers in each.unstable.items()
            for keys in producers.values()
            for topic, _ in keys
        ]
        return sorted({name for name, topic in found if topic in topics})

    def all(self) -> set[str]:
        """Return all groups in the logs, including logs that were never read."""
        self._read_all_new_records()
        return {
            name
            for found in self._stored_groups.values()
            for name in (*found.offsets, *found.groups)
        }

    def _read_all_new_records(self) -> None:
        if OFFSETS_TOPIC not in self._directory:
            return
        for number in self._directory.partitions(OFFSETS_TOPIC):
            self._read_new_records(number, self._opened(number))
