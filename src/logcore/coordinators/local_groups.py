"""Groups whose members are consumers of this process.

This module executes the effects of logcore.coordination for one log directory.

Rules:
- One lock guards the groups. It is held while records are appended, so that the log has
  the order of the decisions. It is released while a thread waits for the disk.
- A request returns once its records are durable. If several threads have requests, one
  thread executes all of them (flat_combining.py). Their records share batches and one
  sync.
- The time is the monotonic clock plus the wall clock at the start. A change of the wall
  clock therefore ends no session.
- No thread runs in the background: the next request acts on deadlines that have passed.

logcore.coordination implements the transitions of a group.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Final

from logcore.config import LogConfig
from logcore.coordination.classic_group import Group
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.effects import (
    AppendRecords,
    CancelTimer,
    Effect,
    Reply,
    SetTimer,
)
from logcore.coordination.group_requests import (
    Committer,
    ConsumerHeartbeat,
    GroupError,
    OffsetKey,
    Timeout,
)
from logcore.coordinators.flat_combining import FlatCombiner
from logcore.coordinators.group_host import GroupRequest, GroupStep
from logcore.coordinators.pending_result import PendingResult
from logcore.coordinators.process_groups import (
    ProcessGroups,
    append,
    check_offsets_deleted,
    present_offsets_partition_of,
)
from logcore.coordinators.stored_offsets import stored_groups
from logcore.deadlines import Deadlines
from logcore.directory.interface import ClientDirectory
from logcore.errors import LogcoreError
from logcore.format.group_records import RECORD_HEAD_BYTES, Committed
from logcore.fs import FS
from logcore.kernels.layout import RecordInput
from logcore.log import Log
from logcore.metadata.filenames import OFFSETS_TOPIC

#: Maximum size of a batch that several decisions share: the default batch size of a
#: producer.
_BATCH_BYTES: Final = 16_384


def _size_of(append_effect: AppendRecords) -> int:
    size_bytes = 0
    for (
        key,
        value,
    ) in append_effect.records:  # mostly one, for which sum() takes 0.5 us more
        size_bytes += RECORD_HEAD_BYTES + len(key) + len(value or b"")
    return size_bytes


class LocalGroups(ProcessGroups):
    """The groups of a directory that only this process writes.

    The constructor reads `__consumer_offsets`, and raises LogcoreError if that fails.
    """

    def __init__(self, fs: FS, directory: ClientDirectory) -> None:
        super().__init__(fs, directory)
        self._coordinator = Coordinator(self.rules, self._new_id)
        #: The result of the request that is being executed, for _new_id().
        self._current_result: PendingResult | None = None
        self._timers: Deadlines[tuple[str, Timeout]] = Deadlines()
        #: Effects that are not executed yet. The first one may be in progress.
        self._effects: deque[Effect] = deque()
        self._steps = FlatCombiner(
            self._lock, self._flush, self._unsynced.wait_until_durable
        )
        #: Records that are not appended yet, in the order of the decisions.
        self._unwritten: deque[AppendRecords] = deque()
        #: Added to the monotonic clock to get the time of the groups.
        self._started_ms = fs.now_ms() - fs.monotonic_ms()
        self._load()

    def _load(self) -> None:
        numbers = (
            self._directory.partitions(OFFSETS_TOPIC)
            if OFFSETS_TOPIC in self._directory
            else ()
        )
        found = stored_groups(
            self._directory.partition(OFFSETS_TOPIC, number) for number in numbers
        )
        self._do(
            lambda now_ms: self._coordinator.load(
                found.groups, found.offsets, now_ms, found.unstable, found.consumers
            )
        )
        # This process has exclusive access, so the members of earlier processes are
        # dead and are removed. Static members may return.
        for group in self._coordinator.all():
            inactive_members: list[tuple[str, str | None]] = [
                (member.member_id, None)
                for member in group.members.values()
                if member.instance_id is None
            ]
            if inactive_members:
                self.leave(group.group_id, inactive_members)
            if group.consumers is not None:
                # Members of the classic protocol leave by LeaveGroup, the others by a
                # heartbeat with the epoch -1. A copy, because members are removed.
                classic: list[tuple[str, str | None]] = []
                for member_id, member in [*group.consumers.members.items()]:
                    if member.instance_id is None and member.classic is not None:
                        classic.append((member_id, None))
                    elif member.instance_id is None:
                        self._end_membership(group.group_id, member_id)
                if classic:
                    self.leave(group.group_id, classic)
        self._unsynced.wait_until_durable()

    def _end_membership(self, group_id: str, member_id: str) -> None:
        """Remove a member of the consumer protocol."""
        departure = ConsumerHeartbeat(
            group_id=group_id, member_id=member_id, member_epoch=-1
        )
        self.request(
            group_id,
            lambda coordinator, waiter, now_ms: coordinator.consumer_heartbeat(
                departure, waiter, now_ms
            ),
            PendingResult(),
        )

    def close(self) -> None:
        """Do nothing: the members end with the process."""

    def now_ms(self) -> int:
        return self._started_ms + self._fs.monotonic_ms()

    # -- requests

    def request(
        self, group_id: str, request: GroupRequest, done: PendingResult
    ) -> None:
        def run_request(now_ms: int) -> Iterable[Effect]:
            # withdraw() finds the member by its id, even if the answer was lost.
            self._current_result = done
            try:
                return request(self._coordinator, done, now_ms)
            finally:
                self._current_result = None

        self._do(run_request)

    def step(self, group_id: str, step: GroupStep) -> None:
        self._do(lambda now_ms: step(self._coordinator, now_ms))

    def _new_id(self) -> str:
        new_id = self._fs.random_bytes(16).hex()
        if self._current_result is not None:
            self._current_result.id_end = new_id
        return new_id

    def withdraw(self, group_id: str, joining: PendingResult) -> None:
        def withdraw(now_ms: int) -> list[Effect]:
            effects = self._coordinator.withdraw(group_id, joining, now_ms)
            group = self._coordinator.get(group_id)
            if group is not None and joining.id_end and not joining.is_done:
                # An interrupt discarded the answer of an operation that was executed.
                members = [
                    (name, None)
                    for name in group.members
                    if name.endswith(joining.id_end)
                ]
                effects += self._coordinator.leave(group_id, members, now_ms)[1]
            return effects

        self._do(withdraw)

    def commit(
        self,
        committer: Committer,
        offsets: Mapping[OffsetKey, Committed],
        producer: tuple[int, int] | None = None,
    ) -> GroupError | None:
        # The committing thread waits for the disk and not for changes of the group.
        # When 64 consumers woke one another, a commit took 0.3 ms.
        pending = PendingResult(is_awaited=False)
        self.request_commit(committer, offsets, pending, producer)
        return self._result_of(pending)

    @contextlib.contextmanager
    def committing(self, committer: Committer) -> Generator[GroupError | None]:
        with self._lock:
            error, effects = self._coordinator.check_commit(committer, self.now_ms())
            self._act(effects)
            # Earlier decisions are in the log before the records of the caller.
            self._flush()
            yield error

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        with self._lock:
            self._coordinator.transaction_ended(producer_id, commit=commit)
            self._notify_listeners()

    def unstable(self, group_id: str) -> set[OffsetKey]:
        with self._lock:
            group = self._coordinator.get(group_id)
            return (
                set()
                if group is None
                else {key for keys in group.unstable.values() for key in keys}
            )

    def committed(self, group_id: str) -> dict[OffsetKey, Committed]:
        with self._lock:
            group = self._coordinator.get(group_id)
            if group is None:
                return {}
            return {
                (topic, partition): each
                for topic, partitions in group.offsets.items()
                for partition, each in partitions.items()
            }

    def _present(self, group_id: str) -> Group | None:
        return self._coordinator.get(group_id)

    def forget_topics(self, names: set[str]) -> None:
        answers: list[PendingResult] = []

        def waiter() -> PendingResult:
            answers.append(PendingResult(is_awaited=False))
            return answers[-1]

        self._do(lambda _: self._coordinator.forget_topics(names, waiter))
        check_offsets_deleted(map(self._result_of, answers), self.failure)

    def expire_offsets(self) -> None:
        self._do(
            lambda now_ms: self._coordinator.expire_offsets(
                self._directory.host.trusted_ms(now_ms)
            )
        )

    def poll(self) -> None:
        self._do(lambda _: ())

    def next_ms(self) -> int | None:
        with self._lock:
            return self._timers.next_ms

    # -- effects

    def _do(self, step: Callable[[int], Iterable[Effect]]) -> None:
        def run_step() -> None:
            now_ms = self.now_ms()
            # Before the step, so that no request of an expired member is accepted.
            for group_id, timeout in self._timers.due(now_ms):
                self._act(self._coordinator.timed_out(group_id, timeout, now_ms))
            self._act(step(now_ms))

        self._steps.run(run_step)

    def _act(self, effects: Iterable[Effect]) -> None:
        """Execute effects after the earlier ones. The lock is held."""
        self._effects.extend(effects)
        must_notify = False
        while self._effects:
            # After an interrupt, the next operation executes the effect, possibly a
            # second time.
            effect = self._effects[0]
            match effect:
                case Reply(PendingResult() as pending, result):
                    pending.set(result)
                    must_notify = must_notify or pending.is_awaited
                case AppendRecords() as append_effect:
                    self._unwritten.append(append_effect)
                case SetTimer(group_id, timeout, at_ms):
                    self._timers.at(at_ms, (group_id, timeout))
                case CancelTimer(group_id, timeout):
                    self._timers.cancel((group_id, timeout))
                case _:
                    must_notify = True
            # If the effect is different, a signal handler ran in between.
            if self._effects and self._effects[0] is effect:
                self._effects.popleft()
        # Without this condition, waiting members would wake one another endlessly.
        if must_notify:
            self._notify_listeners()

    def _flush(self) -> None:
        """Append the records of the decisions. The lock is held.

        wait_until_durable() syncs the records.
        """
        while self._unwritten:
            append_effects = [self._unwritten.popleft()]
            try:
                self._write(append_effects)
            except BaseException:
                # After an interrupt, the next operation appends these records. A
                # duplicate is harmless.
                self._unwritten.extendleft(reversed(append_effects))
                raise

    def _write(self, append_effects: list[AppendRecords]) -> None:
        """Append a decision, with the following decisions that may share its batch."""
        try:
            home = self.offsets_partition(append_effects[0].group.group_id)
            log = self._log(home)
            self._collect_next_appends(append_effects, home, log.config)
            now_ms = self._fs.now_ms()
            rows: list[RecordInput] = [
                (key, value, (), now_ms)
                for append_effect in append_effects
                for key, value in append_effect.records
            ]
            receipt = append(log, rows, append_effects[0].producer, "os")
        except (LogcoreError, OSError) as error:
            self._on_stored(append_effects, error)
        else:
            self._unsynced.add(
                {log: receipt.last_offset + 1},
                functools.partial(self._on_durable, append_effects, log),
            )

    def _collect_next_appends(
        self,
        append_effects: list[AppendRecords],
        home: tuple[str, int],
        config: LogConfig,
    ) -> None:
        """Add the following decisions that may share the batch.

        They have the same partition and producer.
        """
        # The partition accepts each decision alone, so it must also accept their batch.
        # Half of its limits leaves room for the headers.
        max_bytes = min(
            _BATCH_BYTES, config.max_message_bytes // 2, config.segment_bytes // 2
        )
        remaining_bytes = max_bytes - _size_of(append_effects[0])
        while self._unwritten:
            following = self._unwritten[0]
            remaining_bytes -= _size_of(following)
            is_of_batch = (
                following.producer == append_effects[0].producer
                and present_offsets_partition_of(
                    self._directory, following.group.group_id
                )
                == home
            )
            if remaining_bytes < 0 or not is_of_batch:
                return
            append_effects.append(self._unwritten.popleft())

    def _on_durable(
        self,
        append_effects: list[AppendRecords],
        log: Log,
        failures: Mapping[Log, LogcoreError],
    ) -> None:
        self._on_stored(append_effects, failures.get(log))
        self._flush()

    def _on_stored(
        self, append_effects: list[AppendRecords], failure: Exception | None
    ) -> None:
        """Pass the result of an append to the coordinator. The lock is held."""
        now_ms = self.now_ms()
        for append_effect in append_effects:
            error = None
            if failure is not None:
                error = self._not_stored(append_effect.group.group_id, failure)
            self._act(self._coordinator.stored(append_effect, error, now_ms))

    def _log(self, home: tuple[str, int]) -> Log:
        log = self._directory.partition(*home)
        return self._directory.host.open_again(*home) if log.has_failed else log
