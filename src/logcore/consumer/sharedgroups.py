"""Groups whose members live in several processes that share a log directory.

The state of a group is a node of the registry, `/consumers/<group>/group`. A step locks the group's domain, reads the
node, lets logcore.coordination decide, appends the records, and writes the node. So all processes run one state
machine together.

Rules:
- A record is on disk before the node that mentions it, and both are written in one step. So no rebalance comes between
  the check of a commit and its append, and no commit of a removed member takes effect.
- The node does not contain commits. So a commit is appended within its step but synced after it, while others take
  their steps: threads and processes share a sync. A read of committed offsets, and each step that stores anything
  else, first syncs all records before it. So no member continues from a commit that a power cut may undo.
- A member whose process has died is removed by the next process that looks, without a time-out. The lock of its session
  shows that a process is alive. A static member whose process died keeps its place for its session timeout.
- A live member that does not poll is removed when its session, or the rebalance that waits for it, times out, by a
  process that has watched it all that time (observing.py). Other deadlines use the monotonic clock of the machine.
- An answer for a member of another process waits in the node until that process fetches it.
- After a power cut no old member lives, so of a node of another boot only the generation counts. The same holds if the
  log has a later generation, which a process wrote that had the directory for itself.
- A commit in a transaction takes effect when the transaction commits, as everywhere (groupoffsets.py).

Not here: the transitions of a group (logcore.coordination), the work of a consumer (consumer.py).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Final

import attrs

from logcore.consumer.groups import Answer, Directory, KeptJoin, answer_of, append, check_forgotten, home_of
from logcore.consumer.observing import Observations
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.effects import (
    At,
    Cancel,
    Committer,
    Effect,
    GroupError,
    Join,
    Joined,
    JoinRefused,
    OffsetKey,
    OffsetsCommitted,
    OffsetsPending,
    Reply,
    Result,
    Rules,
    SessionEnds,
    Store,
    Sync,
    Timeout,
)
from logcore.coordination.group import DEAD, PREPARING, Group
from logcore.coordination.packing import GroupNode
from logcore.errors import LogcoreError, NodeExistsError, NodeNotFoundError
from logcore.format.grouprecords import Committed, StoredGroup, partition_of, read_assignment
from logcore.fs import FS
from logcore.groupoffsets import StoredGroups, stored_groups
from logcore.kernels.layout import RecordInput
from logcore.log import Log
from logcore.names import OFFSETS_TOPIC
from logcore.notices import ERROR, tell
from logcore.reader import aborted_transactions
from logcore.registry import FileRegistry
from logcore.registry.paths import element_name, owner
from logcore.registry.paths import group_state as _path
from logcore.registry.protocol import CONSUMERS
from logcore.registry.views import agree_on_clock
from logcore.settling import Settling, sync_present

_LONGEST_MS: Final = 2**31 - 1
#: How often to check whether the processes of other members live: a check opens a file for each.
_ALIVE_MS: Final = 50
#: A session is renewed when 1/_RENEW_PART of it has passed.
_RENEW_PART: Final = 4

Step = Callable[[Coordinator, int], Iterable[Effect]]


def _unheard(_: Effect) -> None:
    """Ignores news."""


class SharedGroups:
    """The groups of one directory that several processes have open. It has the methods of Groups, in groups.py.

    failure: why records could not be stored the last time; written under the lock. rules: limits for the requests of
    this process. on_news: called with each event worth reporting, in the thread at work. Set rules and on_news before
    the first request.
    """

    def __init__(self, fs: FS, directory: Directory, registry: FileRegistry) -> None:
        self._fs = fs
        self._directory = directory
        self._registry = registry
        self._session = registry.session.id
        self._lock = threading.RLock()
        self.rules = Rules(min_session_timeout_ms=1, max_session_timeout_ms=_LONGEST_MS)
        self.on_news: Callable[[Effect], None] = _unheard
        self._numbers = itertools.count()
        self._answers: dict[str, dict[str, Answer]] = {}  # group -> waiter -> answer that has not come yet
        self._nodes: dict[str, tuple[int, GroupNode]] = {}  # group -> version and content of the node at the last read
        self._renewed: dict[tuple[str, str], int] = {}  # (group, member) -> when its session was renewed
        self._mine: set[str] = set()  # groups with members of this process
        self._observed = Observations()
        self._looked_ms = 0
        self._made: set[str] = set()  # groups whose nodes this process has created or found
        self._offsets = _Offsets(directory)
        self._unsynced = Settling(self._lock)
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._boot = registry.boot_id
        self._clock_ms = agree_on_clock(registry, self._boot, fs.now_ms() - fs.monotonic_ms())
        self.failure: Exception | None = None

    def close(self) -> None:
        """Ends the session. Other processes remove the members that did not leave."""
        self._registry.close()

    def now_ms(self) -> int:
        """The time of the groups, the same in all processes; see agree_on_clock()."""
        return self._clock_ms + self._fs.monotonic_ms()

    def watched(self, group_id: str) -> str:
        """The directory to watch: something in it changes when the group does."""
        return self._registry.directory_of(_path(group_id))

    def watched_owners(self, group_id: str, topic: str) -> str:
        """The directory to watch: something in it changes when a partition of the topic gets another owner."""
        return self._registry.directory_of(owner(group_id, topic, 0))

    # -- listeners

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls listener whenever a group may have changed, in the thread that finds out."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

    # -- requests

    def join(self, request: Join) -> Answer:
        """The answer comes when all members have joined: Joined or JoinRefused. That of a KeptJoin stays known when the
        call is interrupted or fails, so that withdraw() finds it.
        """
        return self.ask(
            request.group_id,
            lambda coordinator, waiter, now_ms: coordinator.join(request, waiter, now_ms),
            answer_of(request),
            is_kept=isinstance(request, KeptJoin),
        )

    def sync(self, request: Sync) -> Answer:
        """The answer comes when the leader has assigned: Synced or a GroupError."""
        return self.ask(request.group_id, lambda coordinator, waiter, now_ms: coordinator.sync(request, waiter, now_ms))

    def ask(
        self,
        group_id: str,
        ask: Callable[[Coordinator, str, int], Iterable[Effect]],
        answer: Answer | None = None,
        *,
        is_kept: bool = False,
    ) -> Answer:
        """A request that gets a reply: ask(coordinator, waiter, now_ms) in one step of a group. answer: see join()."""
        answer = answer or Answer()
        waiter = f"{self._session}:{next(self._numbers)}"
        with self._lock:
            self._answers.setdefault(group_id, {})[waiter] = answer
            try:
                self.step(group_id, lambda coordinator, now_ms: ask(coordinator, waiter, now_ms))
            except BaseException:
                if not is_kept:
                    self._answers.get(group_id, {}).pop(waiter, None)
                raise
        return answer

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> GroupError | None:
        """Renews a session, once a quarter of it has passed. Returns the error for the member; None if nothing has
        changed.
        """
        with self._lock:
            node = self._peek(group_id)
            if node is None:
                return GroupError.UNKNOWN_MEMBER_ID
            group = node.group
            error = group.check_generation(member_id, instance_id, generation)
            if error is not None:
                return error
            now_ms = self._fs.monotonic_ms()
            renewed_ms = self._renewed.get((group_id, member_id), -_LONGEST_MS)
            if now_ms - renewed_ms < group.members[member_id].session_timeout_ms // _RENEW_PART:
                return GroupError.REBALANCE_IN_PROGRESS if group.state == PREPARING else None
            found: list[GroupError | None] = []

            def beat(coordinator: Coordinator, at_ms: int) -> list[Effect]:
                error, effects = coordinator.heartbeat(group_id, member_id, instance_id, generation, at_ms)
                found.append(error)
                return effects

            self.step(group_id, beat)
            self._renewed[group_id, member_id] = now_ms
            return found[-1]

    def leave(self, group_id: str, member_id: str, instance_id: str | None) -> None:
        self.step(
            group_id, lambda coordinator, now_ms: coordinator.leave(group_id, [(member_id, instance_id)], now_ms)[1]
        )

    def absent(self, group_id: str, member_id: str) -> None:
        """Notes that a static member is closed and may come back."""
        self.step(group_id, lambda coordinator, now_ms: coordinator.absent(group_id, [member_id], now_ms))

    def withdraw(self, group_id: str, joining: Answer) -> None:
        """Removes the member whose request to join waits for this answer. Does nothing once it is answered."""
        with self._lock:
            waiting = self._answers.get(group_id, {})
            waiter = next((waiter for waiter, answer in waiting.items() if answer is joining), None)
            if waiter is not None:
                self.step(group_id, lambda coordinator, now_ms: coordinator.withdraw(group_id, waiter, now_ms))
                waiting.pop(waiter, None)

    def commit(
        self, who: Committer, offsets: Mapping[OffsetKey, Committed], producer: tuple[int, int] | None = None
    ) -> GroupError | None:
        """Waits until the offsets are on disk, and returns None; or returns why they are not stored."""
        commit = _Commit(f"{self._session}:{next(self._numbers)}")

        def ask(coordinator: Coordinator, now_ms: int) -> list[Effect]:
            if producer is None:
                return coordinator.commit_as(who, offsets, commit.waiter, now_ms)
            return coordinator.commit_in_transaction_as(who, producer, offsets, commit.waiter)

        with self._lock:
            self._change(who.group_id, ask, commit)
            self._unsynced.add(commit.ends, lambda failures: self._end_commit(who.group_id, commit, failures))
        self._unsynced.settle()
        return commit.error

    def _end_commit(self, group_id: str, commit: _Commit, failures: Mapping[Log, LogcoreError]) -> None:
        """Called under the lock once the syncs have ended. failures: logs whose records may not be on disk."""
        for failure in failures.values():
            commit.error = self._fail(group_id, failure)

    @contextlib.contextmanager
    def committing(self, who: Committer) -> Generator[GroupError | None]:
        """For offsets that are stored elsewhere. Yields why this member may not commit now, or None. Inside the `with`,
        the group does not change.
        """
        found: list[GroupError | None] = []

        def check(coordinator: Coordinator, now_ms: int) -> list[Effect]:
            error, effects = coordinator.check_commit(who, now_ms)
            found.append(error)
            return effects

        with self._lock:
            self._make(who.group_id)
            with self._registry.holding(_path(who.group_id)):
                self.step(who.group_id, check)
                yield found[-1]

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        """Does nothing: the marker in the log is enough."""

    def home(self, group_id: str) -> tuple[str, int]:
        """The partition of a group's offsets, created if it does not exist. Raises what creating it raises."""
        return home_of(self._directory, group_id)

    def unstable(self, group_id: str) -> set[OffsetKey]:
        """The partitions for which an open transaction would commit something."""
        with self._lock, self._registry.holding(_path(group_id)):
            self._offsets.look(group_id)
            return {key for keys in self._offsets.unstable(group_id).values() for key in keys}

    def committed(self, group_id: str) -> dict[OffsetKey, Committed]:
        """All committed offsets of a group that are on disk, from all processes."""
        with self._lock, self._registry.holding(_path(group_id)):
            self._offsets.look(group_id)
            return {
                (topic, partition): each
                for topic, partitions in self._offsets.of(group_id).items()
                for partition, each in partitions.items()
            }

    def common_protocols(self, group_id: str) -> set[str]:
        """The assignors that all members of a group know."""
        with self._lock:
            node = self._peek(group_id)
            return set() if node is None or not node.group.members else node.group.common_protocols()

    def rewind(self, group_id: str, offsets: Mapping[OffsetKey, Committed]) -> GroupError | None:
        """Commits offsets for a group that has members. The same step removes the members, so none of their commits can
        undo it; they join again and begin at these offsets.
        """
        result: GroupError | None = self.ask(
            group_id, lambda coordinator, waiter, now_ms: coordinator.rewind(group_id, offsets, waiter, now_ms)
        ).result
        return result

    def delete(self, group_id: str) -> GroupError | None:
        """Deletes a group without members, with its committed offsets; or returns why not."""
        result: GroupError | None = self.ask(
            group_id, lambda coordinator, waiter, _: coordinator.delete(group_id, waiter)
        ).result
        return result

    def forget_topics(self, names: set[str]) -> None:
        """Deletes the offsets committed for deleted topics, so that a new topic of that name begins without them.

        Raises ConsumerStateError when that could not be stored.
        """

        def ask(coordinator: Coordinator, waiter: str, _: int) -> list[Effect]:
            return coordinator.forget_topics(names, lambda: waiter) or [Reply(waiter, None)]

        with self._lock:
            answers = [self.ask(group_id, ask) for group_id in self._offsets.groups_of(names)]
            check_forgotten([answer.result for answer in answers], self.failure)

    def get(self, group_id: str) -> Group | None:
        """A copy of a group in its present state, with offsets; None if there is none. Raises what reading raises."""
        path = _path(group_id)
        with self._lock:
            node = self._peek(group_id)
            if node is not None and (self._is_over(node) or self._dead(node)):
                self.step(group_id, lambda coordinator, now_ms: ())
            with self._registry.holding(path):
                value = b""
                with contextlib.suppress(NodeNotFoundError):
                    value = self._registry.get(path).value
                self._offsets.look(group_id)
                group = self._opened(group_id, GroupNode.unpack(group_id, value) if value else None).group
        return None if group.is_forgotten else group

    def all(self) -> list[Group]:
        """All groups that have members or committed offsets, sorted by name. Raises what get() raises."""
        with self._lock:
            nodes = {element_name(text) for text in self._registry.children(f"/{CONSUMERS}")}
            found = [self.get(name) for name in sorted(nodes | self._offsets.all())]
        return [group for group in found if group is not None]

    @property
    def has_members(self) -> bool:
        """Whether this process has members or waits for answers. If not, look() has nothing to do."""
        return bool(self._answers or self._mine)

    @property
    def has_waiting(self) -> bool:
        """Whether this process waits for an answer."""
        return bool(self._answers)

    def expire_offsets(self) -> None:
        """Deletes expired offsets. Any process may call it, about every EXPIRY_CHECK_MS."""

        def expire(coordinator: Coordinator, now_ms: int) -> list[Effect]:
            return coordinator.expire_offsets(self._directory.trusted_ms(now_ms))

        for group in self.all():
            self.step(group.group_id, expire)

    def look(self) -> None:
        """Fetches answers, and acts on deadlines that have passed and processes that have died."""
        with self._lock:
            clock_ms = self._fs.monotonic_ms()
            is_due = clock_ms - self._looked_ms >= _ALIVE_MS
            if is_due:
                self._looked_ms = clock_ms
            for group_id in sorted({*self._answers, *self._mine}):
                node = self._peek(group_id)
                self._note_mine(group_id, node)
                if node is None:
                    continue
                self._observed.look(node.group, node.timers, clock_ms)
                self._fetch(group_id, node)
                if self._is_over(node) or (is_due and any(self._dead(node))):
                    self.step(group_id, lambda coordinator, now_ms: ())

    def _is_over(self, node: GroupNode) -> bool:
        """Whether a deadline has passed that no process has acted on."""
        return bool(self._due(node))

    def _due(self, node: GroupNode) -> list[Timeout]:
        """The timeouts that this process has to carry out, the earliest first."""
        now_ms = node.clock_ms + self._fs.monotonic_ms()
        passed = sorted((at_ms, at) for at, (_, at_ms) in enumerate(node.timers.items()) if at_ms <= now_ms)
        timeouts = list(node.timers)
        return [timeouts[at] for _, at in passed if self._counts(node, timeouts[at])]

    def _counts(self, node: GroupNode, timeout: Timeout) -> bool:
        """Whether a deadline that has passed counts for this process."""
        if isinstance(timeout, SessionEnds):
            session = node.sessions.get(timeout.member_id, self._session)
            if session != self._session and not self._registry.is_alive(session):
                return True  # a dead process was not just paused
        return self._observed.is_over(node.group, node.timers, timeout)

    def _note_mine(self, group_id: str, node: GroupNode | None) -> None:
        """Notes whether a group has members of this process. look() skips groups without."""
        members = {} if node is None else node.group.members
        if node is not None and self._session in node.sessions.values():
            self._mine.add(group_id)
        else:
            self._mine.discard(group_id)
            self._observed.forget(group_id)
        for key in [key for key in self._renewed if key[0] == group_id and key[1] not in members]:
            del self._renewed[key]

    def next_ms(self) -> int | None:
        """When the next deadline passes, by now_ms(); at most _ALIVE_MS away, as another process may die any time."""
        with self._lock:
            times = [at_ms - node.clock_ms for _, node in self._nodes.values() for at_ms in node.timers.values()]
        clock_ms = self._fs.monotonic_ms()
        # A deadline that has passed but does not count yet is checked again at the next look.
        coming = [at_ms for at_ms in times if at_ms > clock_ms]
        return self._clock_ms + min([clock_ms + _ALIVE_MS, *coming])

    @contextlib.contextmanager
    def owning(self, group_id: str) -> Generator[tuple[FileRegistry, Group | None]]:
        """Yields the registry and the group, which is not to be changed. No other process changes it meanwhile."""
        with self._lock, self._registry.holding(_path(group_id)):
            node = self._peek(group_id)
            yield self._registry, None if node is None else node.group

    # -- the node

    def _peek(self, group_id: str) -> GroupNode | None:
        """The present node, read without a lock. The caller must not change it."""
        try:
            found = self._registry.get(_path(group_id))
        except NodeNotFoundError:
            self._nodes.pop(group_id, None)
            return None
        known = self._nodes.get(group_id)
        if known is None or known[0] != found.version:
            if not found.value:
                return None
            known = found.version, GroupNode.unpack(group_id, found.value)
            self._nodes[group_id] = known
            self._tell()
        return known[1] if known[1].boot == self._boot else None

    def _fetch(self, group_id: str, node: GroupNode) -> None:
        """Fetches the answers that wait in the node for members of this process."""
        waiting = self._answers.get(group_id, {})
        for waiter in [waiter for waiter in waiting if waiter in node.mail]:
            answer = waiting[waiter]
            answer.result = node.mail[waiter]
            answer.is_there = True
            del waiting[waiter]  # last, so that an interrupt leaves the answer to the next look
            self._tell()
        if not waiting:
            self._answers.pop(group_id, None)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _dead(self, node: GroupNode) -> tuple[list[str], list[str]]:
        """Members whose process has died: (dynamic ones, static ones whose absence is not noted yet)."""
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

    def step(self, group_id: str, step: Step) -> None:
        """Runs one step of a group, from reading its node to writing it. Raises what the registry raises."""
        with self._lock:
            self._change(group_id, step, None)
            node = self._peek(group_id)
            self._note_mine(group_id, node)
            if node is not None:
                if group_id in self._mine:
                    # Watch a deadline from the step that sets it, not only from the next look.
                    self._observed.look(node.group, node.timers, self._fs.monotonic_ms())
                self._fetch(group_id, node)

    def _change(self, group_id: str, step: Step, commit: _Commit | None) -> None:
        # A node in _made may be deleted since. update() then creates it and runs the step again: harmless for a commit.
        if commit is None or group_id not in self._made:
            self._make(group_id)
            self._made.add(group_id)
        self._registry.update(_path(group_id), lambda value: self._changed(group_id, value or b"", step, commit))

    def _make(self, group_id: str) -> None:
        """Creates the node before the step, because update() runs a step again after it has created outer nodes."""
        path = _path(group_id)
        try:
            self._registry.get(path)
        except NodeNotFoundError:
            with contextlib.suppress(NodeExistsError):
                self._registry.create(path)

    def _changed(self, group_id: str, value: bytes, step: Step, commit: _Commit | None) -> bytes | None:
        """The value of the node after a step; under the lock of the group's domain. commit: if the step is a commit. A
        commit does no other work, unless a timeout is due.
        """
        node = GroupNode.unpack(group_id, value) if value else None
        is_quick = commit is not None and node is not None and node.boot == self._boot and not self._due(node)
        if is_quick:
            self._offsets.know(group_id)
        else:
            self._offsets.look(group_id)
        node = self._opened(group_id, node)
        coordinator = Coordinator(self.rules, lambda: self._fs.random_bytes(16).hex())
        run = _Run(node, coordinator, self._fs.monotonic_ms, self._store, self.on_news, commit)
        now_ms = node.clock_ms + self._fs.monotonic_ms()
        if not is_quick:
            # A quick step does not do this: removing a member may leave a group that only its offsets keep alive.
            self._clear_mail(node)
            self._look_after(node, coordinator, run, now_ms)
        deadlines = {member.member_id: member.deadline_ms for member in node.group.members.values()}
        run.act(step(coordinator, now_ms))
        if is_quick:
            _keep_deadlines(node.group, deadlines)
        run.note_sessions()
        packed = node.pack()
        return None if packed == value else packed

    def _look_after(self, node: GroupNode, coordinator: Coordinator, run: _Run, now_ms: int) -> None:
        """Removes members of dead processes, or notes the absence of static ones, and carries out due timeouts."""
        dynamic, static = self._dead(node)
        if dynamic:
            gone: list[tuple[str, str | None]] = [(member_id, None) for member_id in dynamic]
            run.act(coordinator.leave(node.group.group_id, gone, now_ms)[1])
        if static:
            run.act(coordinator.absent(node.group.group_id, static, now_ms))
        for timeout in self._due(node):
            if node.timers.pop(timeout, None) is not None:
                run.act(coordinator.timed_out(node.group, timeout, now_ms))

    def _opened(self, group_id: str, node: GroupNode | None) -> GroupNode:
        """The node with its offsets; if there is none of this boot, one made from the group's records in the log."""
        offsets = self._offsets.of(group_id)
        stored = self._offsets.group(group_id)
        # A process that had the directory for itself, or a broker, uses the log alone.
        is_behind = node is not None and stored is not None and stored.generation > node.group.generation
        if node is None or node.boot != self._boot or is_behind:
            before = node
            generation = 0 if before is None else before.group.generation
            node = GroupNode(Group(group_id), self._boot, self._clock_ms)
            if before is not None and before.boot == self._boot:
                node.mail = before.mail | _turned_away(before.group)
            if stored is not None:
                node.group.protocol_type = stored.protocol_type
                node.group.state_ms = stored.state_ms
                generation = max(generation, stored.generation)
            node.group.generation = generation
        node.group.offsets = {topic: dict(partitions) for topic, partitions in offsets.items() if partitions}
        unstable = self._offsets.unstable(group_id)
        node.group.unstable = {producer_id: dict(keys) for producer_id, keys in unstable.items()}
        return node

    def _clear_mail(self, node: GroupNode) -> None:
        """Drops answers that were fetched, and answers for processes that have ended."""
        waiting = self._answers.get(node.group.group_id, {})
        for waiter in list(node.mail):
            session = waiter.partition(":")[0]
            is_wanted = waiter in waiting if session == self._session else self._registry.is_alive(session)
            if not is_wanted:
                del node.mail[waiter]

    def _store(self, group_id: str, store: Store, commit: _Commit | None) -> GroupError | None:
        """Appends records and waits until they are on disk. Records of a commit are synced after the step."""
        now_ms = self._fs.now_ms()
        rows: list[RecordInput] = [(key, value, (), now_ms) for key, value in store.records]
        try:
            log = self._offsets.log(group_id)
            if commit is None:
                append(log, rows, store.producer, "disk")
            else:
                receipt = append(log, rows, store.producer, "os")
                commit.ends[log] = receipt.last_offset + 1
        except (LogcoreError, OSError) as error:
            return self._fail(group_id, error)
        return None

    def _fail(self, group_id: str, error: Exception) -> GroupError:
        """Notes that a record was not stored."""
        self.failure = error
        tell("groups", ERROR, "%s: a record of group %r was not stored: %s", OFFSETS_TOPIC, group_id, error)
        return GroupError.COORDINATOR_NOT_AVAILABLE


def _keep_deadlines(group: Group, before: Mapping[str, int]) -> None:
    """Renews a session only once a quarter of it has passed, as in heartbeat(). So most commits leave the node
    unchanged, and wake no process that watches it.
    """
    for member_id, deadline_ms in before.items():
        member = group.members.get(member_id)
        if member is not None and member.deadline_ms - deadline_ms < member.session_timeout_ms // _RENEW_PART:
            member.deadline_ms = deadline_ms


def living_members(registry: FileRegistry, group_id: str) -> list[str]:
    """Ids of members whose process is alive, read from the group's node in the registry. Changes nothing."""
    return [one.member_id for one in seen_members(registry, group_id) if one.is_alive]


@attrs.frozen(kw_only=True)
class SeenMember:
    """A member, as its group's node describes it. is_alive: whether its process is alive. pid: None if unknown.
    partitions: its assignment in the last generation.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    is_alive: bool
    pid: int | None
    partitions: tuple[OffsetKey, ...]


def seen_members(registry: FileRegistry, group_id: str) -> list[SeenMember]:
    """The members in a group's node in the registry. Changes nothing."""
    try:
        value = registry.get(_path(group_id)).value
    except NodeNotFoundError:
        return []
    if not value:
        return []
    node = GroupNode.unpack(group_id, value)
    pids = {info.id: info.facts.pid for info in registry.sessions() if info.facts is not None}
    found = []
    for member in node.group.members.values():
        session = node.sessions.get(member.member_id, "")
        found.append(
            SeenMember(
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


def _turned_away(group: Group) -> dict[str, Result]:
    """Answers for members that wait in a state of the group that is no longer valid: they join again."""
    answers: dict[str, Result] = {}
    for member in group.members.values():
        if isinstance(member.joining, str):
            answers[member.joining] = JoinRefused(GroupError.UNKNOWN_MEMBER_ID, member.member_id)
        if isinstance(member.syncing, str):
            answers[member.syncing] = GroupError.UNKNOWN_MEMBER_ID
    return answers


@attrs.define
class _Commit:
    """A commit in progress. error: why it was refused or not stored. ends: log -> the offset up to which to sync it."""

    waiter: str
    error: GroupError | None = None
    ends: dict[Log, int] = attrs.Factory(dict)

    def is_meant_by(self, store: Store) -> bool:
        return isinstance(store.then, OffsetsCommitted | OffsetsPending) and store.then.waiter == self.waiter


class _Run:
    """Carries out the effects of one step on a node. store: appends records, and returns the error, if any. commit: if
    the step is a commit; its answer goes there and not into the node.
    """

    def __init__(
        self,
        node: GroupNode,
        coordinator: Coordinator,
        monotonic_ms: Callable[[], int],
        store: Callable[[str, Store, _Commit | None], GroupError | None],
        on_news: Callable[[Effect], None],
        commit: _Commit | None,
    ) -> None:
        self._node = node
        self._coordinator = coordinator
        self._monotonic_ms = monotonic_ms
        self._store = store
        self._on_news = on_news
        self._commit = commit
        self._effects: deque[Effect] = deque()
        if not node.group.is_unused:
            coordinator.adopt(node.group)

    def act(self, effects: Iterable[Effect]) -> None:
        """Carries out effects, after those that came before them."""
        node = self._node
        commit = self._commit
        self._effects.extend(effects)
        while self._effects:
            match self._effects.popleft():
                case Reply(str() as waiter, None | GroupError() as error) if commit and waiter == commit.waiter:
                    commit.error = error
                case Reply(str() as waiter, result):
                    node.mail[waiter] = result
                    if isinstance(result, Joined):
                        node.sessions[result.member_id] = waiter.partition(":")[0]
                case Store() as store:
                    self._take(store.group)
                    is_mine = commit is not None and commit.is_meant_by(store)
                    error = self._store(node.group.group_id, store, commit if is_mine else None)
                    now_ms = node.clock_ms + self._monotonic_ms()
                    self._effects.extend(self._coordinator.stored(store, error, now_ms))
                case At(group, timeout, at_ms):
                    self._take(group)
                    node.timers[timeout] = at_ms
                case Cancel(_, timeout):
                    node.timers.pop(timeout, None)
                case news:
                    self._on_news(news)
        found = self._coordinator.get(node.group.group_id)
        if found is not None:
            self._take(found)
        elif node.group.state == DEAD:
            self._take(Group(node.group.group_id, generation=node.group.generation))

    def _take(self, group: Group) -> None:
        self._node.group = group

    def note_sessions(self) -> None:
        """Notes the session of each member: the one whose request the member waits for or waited for."""
        node = self._node
        for member in node.group.members.values():
            for waiter in (member.joining, member.syncing):
                if isinstance(waiter, str):
                    node.sessions[member.member_id] = waiter.partition(":")[0]
        node.sessions = {one: session for one, session in node.sessions.items() if one in node.group.members}


class _Offsets:
    """The content of the logs of `__consumer_offsets`, read incrementally. Used under the lock of the groups."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._found: dict[int, StoredGroups] = {}  # by partition
        self._ends: dict[int, tuple[Log, int]] = {}  # by partition: how far it was read

    def _number(self, group_id: str) -> int:
        return partition_of(group_id, self._directory.partitions(OFFSETS_TOPIC)[-1] + 1)

    def log(self, group_id: str) -> Log:
        """The log of a group's records, created if it does not exist. Raises what opening it raises."""
        return self._opened(home_of(self._directory, group_id)[1])

    def _opened(self, number: int) -> Log:
        log = self._directory.partition(OFFSETS_TOPIC, number)
        return self._directory.open_again(OFFSETS_TOPIC, number) if log.has_failed else log

    def know(self, group_id: str) -> None:
        """Calls look() the first time only: for steps that do not need the newest records."""
        if OFFSETS_TOPIC in self._directory and self._number(group_id) not in self._found:
            self.look(group_id)

    def look(self, group_id: str) -> None:
        """Reads the records added to the group's log since, and syncs them first."""
        if OFFSETS_TOPIC in self._directory:
            self._look(self._number(group_id), self.log(group_id))

    def _look(self, number: int, log: Log) -> None:
        log.refresh()
        sync_present(log)  # also what a process appended that died before its sync
        known, end = self._ends.pop(number, (None, 0))
        high_watermark = log.high_watermark
        is_new = known is not log or end < log.log_start_offset or end > high_watermark or log.times_truncated > 0
        start = log.log_start_offset if is_new else end
        # A transaction's marker decides about earlier records, so all is read again until no transaction is open.
        is_undecided = log.last_stable_offset < high_watermark
        if is_undecided or aborted_transactions(log, start, high_watermark):
            self._found[number] = stored_groups([log])
        else:
            found = StoredGroups() if is_new else self._found[number]
            for columns in log.scan(start, high_watermark):
                pairs = zip(columns.keys(), columns.values(), strict=True)
                found.take({key: value for key, value in pairs if key is not None})
            self._found[number] = found
        if not is_undecided:
            self._ends[number] = log, high_watermark

    def of(self, group_id: str) -> Mapping[str, Mapping[int, Committed]]:
        for found in self._found.values():
            if group_id in found.offsets:
                return found.offsets[group_id]
        return {}

    def unstable(self, group_id: str) -> Mapping[int, Mapping[OffsetKey, tuple[int, Committed]]]:
        """Producer id -> the offsets that its open transaction would commit, each with its place."""
        return next((found.unstable[group_id] for found in self._found.values() if group_id in found.unstable), {})

    def group(self, group_id: str) -> StoredGroup | None:
        return next((found.groups[group_id] for found in self._found.values() if group_id in found.groups), None)

    def groups_of(self, topics: set[str]) -> list[str]:
        """All groups with offsets of these topics, also in an open transaction, and even if they were never read."""
        self._look_at_all()
        found = [(name, topic) for each in self._found.values() for name, of in each.offsets.items() for topic in of]
        found += [
            (name, topic)
            for each in self._found.values()
            for name, producers in each.unstable.items()
            for keys in producers.values()
            for topic, _ in keys
        ]
        return sorted({name for name, topic in found if topic in topics})

    def all(self) -> set[str]:
        """All groups in the logs, even if they were never read."""
        self._look_at_all()
        return {name for found in self._found.values() for name in (*found.offsets, *found.groups)}

    def _look_at_all(self) -> None:
        if OFFSETS_TOPIC not in self._directory:
            return
        for number in self._directory.partitions(OFFSETS_TOPIC):
            self._look(number, self._opened(number))
