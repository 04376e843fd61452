"""Bugs that can be seeded into the rules of replication and into the simulated broker.

A bug is a list of replacements of source text in functions. Each text must occur exactly
once in its function, so a bug whose line was changed is an error.
"""

from __future__ import annotations
import __future__ as future

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Generator
from typing import Any

import attrs

from logcore.coordination.transactions import TransactionMachine
from logcore.partition.producers import Producers
from logcore.replication import electing, following, identity, leading, state
from netshim.cluster.transaction_shards import TransactionShard, TransactionShards
from netshim.refused_batches import RefusedBatches
from support.replica_topics import TopicsWorld, run_topics
from support.replica_transactions import (
    DataWorld,
    SimulatedPeers,
    StatePartitionWorld,
    run_transactions,
)
from support.replica_world import (
    Disk,
    InvariantBroken,
    Options,
    SimulatedRegistry,
    World,
    run_schedule,
)

Replacement = tuple[Any, str, str]


@attrs.frozen
class Bug:
    """A seeded bug, and the schedules that must find it."""

    name: str
    #: The invariants that may report it.
    rules: str
    #: The number of schedules within which it must be found.
    within: int
    changes: tuple[Replacement, ...]
    #: The parameters of the schedules. If None, each schedule chooses random parameters.
    options: Any = None
    #: run_schedule(seed, options) of one of the simulations.
    run: Callable[..., object] = run_schedule


@contextlib.contextmanager
def seeded(*changes: Replacement) -> Generator[None, None, None]:
    """Replace source text in functions, in every module that uses them."""
    undo: list[tuple[Any, str, Any]] = []
    sources: dict[Any, str] = {}
    for function, old, new in changes:
        source = sources.get(function) or textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, (function, old, source.count(old))
        sources[function] = source.replace(old, new)
    try:
        for function, source in sources.items():
            code = compile(
                source,
                f"<bug in {function.__qualname__}>",
                "exec",
                flags=future.annotations.compiler_flag,
            )
            found: dict[str, Any] = {}
            exec(code, function.__globals__, found)
            name = function.__name__
            for owner in owners(function):
                undo.append((owner, name, getattr(owner, name)))
                setattr(owner, name, found[name])
        yield
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)


def owners(function: Any) -> list[Any]:
    """Return the class of a method, or the modules that contain a function."""
    name = function.__name__
    *classes, _ = function.__qualname__.split(".")
    if classes:
        return [vars(sys.modules[function.__module__])[classes[0]]]
    modules = [
        module
        for each, module in sys.modules.items()
        if each.startswith(("logcore.replication", "support.replica"))
    ]
    return [each for each in modules if getattr(each, name, None) is function]


def find(bug: Bug, schedules: int | None = None) -> tuple[int, str] | None:
    """Return the number of the first schedule that reports the bug, and the invariant."""
    with seeded(*bug.changes):
        for seed in range(bug.within if schedules is None else schedules):
            try:
                bug.run(seed, bug.options)
            except InvariantBroken as error:
                return seed + 1, error.rule
    return None


# Faults that make the rare states of one kind of bug frequent.
LEADER_MOVES = Options(
    faults=(
        "move_leader",
        "pause@leader",
        "lossy_network",
        "leave@leader",
        "kill@leader",
    ),
    fault_count=12,
)
LEADER_MOVES_ONLY = Options(
    faults=("move_leader", "move_leader", "lossy_network"), fault_count=14
)
LOST_RESPONSES = Options(
    faults=("lose_responses@leader", "cut", "cut_one_way", "kill@leader"),
    fault_count=12,
)
LOST_RESPONSES_OFTEN = Options(
    faults=(
        "lose_responses@leader",
        "lose_responses@leader",
        "cut",
        "pause",
        "kill@leader",
    ),
    fault_count=16,
)
#: The leader moves only after its session has expired.
EXPIRED_SESSIONS = Options(
    faults=("long_pause@leader", "lose_responses@leader", "cut"), fault_count=14
)
MOVES_AND_CUTS = Options(faults=("move_leader", "cut"), fault_count=10)
LEAVING = Options(faults=("leave@leader", "lose_responses@leader"), fault_count=10)
POWER_CUTS = Options(faults=("kill", "kill", "power_all"), fault_count=10, sync_ms=200)
ELECTIONS = Options(faults=("power", "kill@leader", "move_leader"), fault_count=12)
ONE_IN_SYNC = Options(faults=("kill", "kill", "wipe"), fault_count=10, min_isr=1)
WIPES = Options(
    faults=("wipe", "wipe", "kill", "kill", "cut"), fault_count=10, loss=0.2
)

RESTARTS = Options(faults=("wipe", "kill", "kill"), fault_count=14, loss=0.1)

DELETIONS = Options(faults=("delete_records", "delete_records", "kill"), fault_count=8)

REASSIGNED = Options(
    brokers=4,
    faults=(
        "reassign",
        "reassign",
        "lose_responses@leader",
        "kill@leader",
        "power_all",
    ),
    fault_count=10,
)

#: A broker loses its replica and gets it back while the leader is paused.
ASSIGNED_AGAIN = Options(
    brokers=3,
    replicas=2,
    min_isr=1,
    faults=("reassign",) * 8 + ("pause@leader",) * 4 + ("move_leader",),
    fault_count=25,
)

#: With a higher loss, few transactions end.
LATE_REQUESTS = Options(faults=("move_leader",), fault_count=1, loss=0.03)

RECREATED_TOPICS = Options(
    faults=("delete_topic", "delete_topic", "move_leader", "pause", "kill"),
    fault_count=14,
)

BUGS = [
    Bug(
        "acks=all is acknowledged at the append",
        "R01",
        10,
        (
            (
                World.produce,
                "process.waiters.append(Waiter(disk.end, record, done))",
                "self.acknowledge(Waiter(disk.end, record, done))",
            ),
        ),
    ),
    Bug(
        "a commit is acknowledged at the append",
        "R13",
        20,
        (
            (
                World.produce,
                "process.commits.append((disk.end, commit))",
                "self.committed_floor = max(self.committed_floor, commit)",
            ),
        ),
    ),
    Bug(
        "a follower truncates to its high watermark at start (KIP-101)",
        "R01 R02 R07",
        20,
        (
            (
                World.evaluate,
                "disk = process.disk\n",
                "disk = process.disk; disk.truncate(process.high_watermark)\n",
            ),
        ),
    ),
    Bug(
        "the leader's state is written without version",
        "R01 R02 R04 R07 R08",
        200,
        (
            (
                World.propose,
                "leader.proposal.version",
                "None",
            ),
        ),
        LEADER_MOVES,
    ),
    Bug(
        "the controller's state is written without version",
        "R01 R02 R04 R07 R08",
        200,
        ((World.run_controller, "new, process.version", "new, None"),),
        LEADER_MOVES,
    ),
    Bug(
        "neither the session nor the version is checked at a write",
        "R01 R02 R04 R07 R08",
        200,
        (
            (World.propose, "leader.proposal.version", "None"),
            (
                World.propose,
                "if process.session is not None:",
                "if True:",
            ),
            (
                SimulatedRegistry.set_state,
                "self.check_session(session)",
                "pass",
            ),
        ),
        EXPIRED_SESSIONS,
    ),
    Bug(
        "a new leader takes its log end for the high watermark",
        "R01 R02 R13",
        300,
        (
            (
                leading.take_over,
                "high_watermark=high_watermark",
                "high_watermark=log_end",
            ),
        ),
    ),
    Bug(
        "unclean election although it is off",
        "R01 R02 R03 R07",
        500,
        (
            (
                electing._elect,
                "settings.is_unclean_allowed and candidates",
                "candidates",
            ),
        ),
    ),
    Bug(
        "election without a new epoch",
        "R04",
        10,
        (
            (
                electing.move_leader,
                "state.leader_epoch + 1",
                "state.leader_epoch",
            ),
        ),
    ),
    Bug(
        "the high watermark moves below min.insync.replicas",
        "R01 R02 R07",
        300,
        (
            (
                leading.advance_high_watermark,
                "if not leader.has_min_isr:",
                "if False:",
            ),
        ),
    ),
    Bug(
        "a follower reports an end that is not synced",
        "R01 R02 R07",
        200,
        (
            (
                following.fetch_offset,
                "min(follower.durable_end, follower.log_end)",
                "follower.log_end",
            ),
            (
                following.next_step,
                "if follower.durable_end < follower.log_end:",
                "if False:",
            ),
        ),
        POWER_CUTS,
    ),
    Bug(
        "a leader does not check for divergence",
        "R01 R02 R03 R05 R07",
        10,
        (
            (
                leading.refuse_fetch,
                "if epoch != fetch.last_epoch or end < fetch.offset:",
                "if False:",
            ),
        ),
    ),
    Bug(
        "a diverging fetch moves the high watermark",
        "R01 R02 R07",
        100,
        (
            (
                leading.fetched,
                "return leader, refusal",
                "progress = FollowerProgress(fetch.offset, now_ms)\n"
                "        followers = {**leader.followers, fetch.replica: progress}\n"
                "        if refusal.diverging:\n"
                "            leader = leader._replace(followers=followers)\n"
                "        return advance_high_watermark(leader), refusal",
            ),
        ),
        LEADER_MOVES_ONLY,
    ),
    Bug(
        "a follower's high watermark is above its end",
        "R03 error",
        10,
        (
            (
                following._follow_high_watermark,
                "min(follower.leader_high_watermark, fetch_offset(follower))",
                "follower.leader_high_watermark",
            ),
        ),
    ),
    Bug(
        "a late response is applied",
        "R02 R03 R05 R07 error",
        50,
        (
            (
                following.is_expected,
                "fetch is follower.outstanding and fetch.offset == follower.log_end",
                "True",
            ),
        ),
    ),
    Bug(
        "a smaller ISR counts before its write is confirmed",
        "R01 R02 R07 R13",
        400,
        (
            (
                leading.maximal_isr,
                "members.update(leader.proposal.state.isr)",
                "members = set(leader.proposal.state.isr)",
            ),
        ),
        LOST_RESPONSES,
    ),
    Bug(
        "a proposed member does not count for the high watermark",
        "R01 R02 R07",
        200,
        (
            (
                leading.maximal_isr,
                "if leader.proposal is not None:",
                "if False:",
            ),
        ),
        LOST_RESPONSES_OFTEN,
    ),
    Bug(
        "a follower joins the ISR below the epoch start (KAFKA-7128)",
        "R01 R02 R07",
        1000,
        (
            (
                leading.expand_isr,
                "max(leader.high_watermark, leader.epoch_start)",
                "leader.high_watermark",
            ),
        ),
        ELECTIONS,
    ),
    Bug(
        "a restarted leader continues in its epoch (KAFKA-7235)",
        "R01 R04",
        100,
        (
            (
                state.role_of,
                "own is None or own.broker_epoch != broker_epoch",
                "own is None",
            ),
        ),
    ),
    Bug(
        "a deposed leader continues",
        "R01 R02 R03 R04 R07",
        50,
        (
            (
                World.evaluate,
                "if role is Role.LEADER and key == self.leader_key(process.leader):",
                "if broker in current_state.isr:",
            ),
        ),
    ),
    Bug(
        "an ISR entry has no broker epoch",
        "R01 R02 R04 R07 R09 R10",
        50,
        (
            (
                electing._remove_dead,
                "if broker in live and live[broker].epoch == member.broker_epoch",
                "if broker in live",
            ),
            (
                state.role_of,
                "own is None or own.broker_epoch != broker_epoch",
                "own is None",
            ),
        ),
    ),
    Bug(
        "an ELR entry has no disk",
        "R01 R02 R07",
        400,
        (
            (
                electing._review_elr,
                "live_broker.disk == disk and (",
                "(",
            ),
        ),
    ),
    Bug(
        "the ELR is kept although the ISR is large enough",
        "R01 R02 R07",
        100,
        ((state.replace_isr, "if len(isr) < min_isr:", "if True:"),),
    ),
    Bug(
        "the ELR is kept although its elected member satisfies min.insync.replicas",
        "R01 R02 R07",
        150,
        (
            (
                electing._elect_single,
                "replace_isr(move_leader(state, broker), isr, settings.min_isr(state))",
                "replace_isr(move_leader(state, broker), isr, 2)",
            ),
        ),
        ONE_IN_SYNC,
    ),
    Bug(
        "the epoch of a registration is not read back",
        "R09 R10",
        100,
        ((World.register, "epoch = registered.epoch", "pass"),),
    ),
    Bug(
        "a reassignment ends while a broker that it removes is in sync",
        "R01 R02 R09 R10",
        100,
        (
            (
                electing._finish_reassignment,
                "state.isr.keys() != set(target) or state.leader not in target",
                "state.leader not in target",
            ),
            (
                state._check,
                "{*state.isr, *state.elr, *state.adding, *state.removing}",
                "set()",
            ),
        ),
        REASSIGNED,
    ),
    Bug(
        "brokers that a replaced reassignment added count as original",
        "R16",
        100,
        (
            (
                electing.reassign,
                "each for each in replicas if each not in original",
                "each for each in target if each not in original",
            ),
        ),
        REASSIGNED,
    ),
    Bug(
        "a reassignment that removes a broker ends without a new epoch",
        "R01 R02",
        300,
        (
            (
                electing._finish_reassignment,
                "state.leader_epoch + 1",
                "state.leader_epoch",
            ),
        ),
        ASSIGNED_AGAIN,
    ),
    Bug(
        "a leaving member is removed before it fetched in the epoch",
        "R13",
        100,
        (
            (
                leading._remains,
                "if is_leaving and is_known:",
                "if is_leaving:",
            ),
        ),
        LEAVING,
    ),
    Bug(
        "a coordinator returns offsets after its lease",
        "R13",
        100,
        (
            (
                World.fetch_offset,
                "if self.now_ms >= process.lease_until_ms:",
                "if False:",
            ),
        ),
        LEAVING,
    ),
    Bug(
        "a lease is extended without a read of the state",
        "R13",
        100,
        (
            (
                World.read_registry,
                "process.state, process.version = current_state, version",
                "if process.leader is None or self.rng.random() < 0.1:\n"
                "        process.state, process.version = current_state, version",
            ),
        ),
        MOVES_AND_CUTS,
    ),
    Bug(
        "a coordinator loads only up to the high watermark",
        "R13",
        20,
        (
            (
                World.load_coordinator,
                "end = process.disk.end",
                "end = process.high_watermark",
            ),
        ),
    ),
    Bug(
        "a coordinator returns commits above the high watermark",
        "R13",
        50,
        ((World.fetch_offset, "if end <= process.high_watermark:", "if True:"),),
    ),
    Bug(
        "a coordinator returns offsets before its epoch start is committed",
        "R13",
        20,
        (
            (
                World.fetch_offset,
                "if process.high_watermark < leader.epoch_start:",
                "if False:",
            ),
        ),
    ),
    Bug(
        "a proposal is forgotten at a timeout",
        "R01 R02 R07",
        300,
        (
            (
                World.propose,
                "self.call_later(150, process, self.propose, process)",
                "def forget():\n"
                "        process.is_proposing = False\n"
                "        now = process.leader\n"
                "        if now is not None and now.proposal is leader.proposal:\n"
                "            process.leader = now._replace(proposal=None)\n"
                "    self.call_later(150, process, forget)",
            ),
        ),
        LOST_RESPONSES_OFTEN,
    ),
    Bug(
        "the first fetch after a start is sent without a sync",
        "R01 R02 R07",
        500,
        (
            (
                following.follow,
                "UNSYNCED if is_durable_first else log_end",
                "log_end",
            ),
        ),
        POWER_CUTS,
    ),
    Bug(
        "a leader counts records that it has not synced",
        "R01 R02 R07",
        500,
        (
            (
                leading.appended,
                "log_end if is_durable else leader.own_end",
                "log_end",
            ),
        ),
        POWER_CUTS,
    ),
    Bug(
        "a fetch of another epoch is served",
        "R01 R02 R03 R07",
        2000,
        ((leading.refuse_fetch, "if error is not None:", "if False:"),),
        LEADER_MOVES,
    ),
    Bug(
        "the broker epoch of a fetch is not checked",
        "R01 R02 R07",
        12_000,
        (
            (
                leading.refuse_fetch,
                "registered is None or registered.epoch != fetch.broker_epoch",
                "registered is None",
            ),
            (
                leading.fetched,
                "member is None or member.broker_epoch == fetch.broker_epoch",
                "True",
            ),
            (
                leading.expand_isr,
                "InSyncReplica(fetch.broker_epoch, registered.disk)",
                "InSyncReplica(registered.epoch, registered.disk)",
            ),
        ),
        RESTARTS,
    ),
    Bug(
        "the registry does not sync the state",
        "R01 R02 R04 R07 R08",
        100,
        (
            (
                World.registry_loses_power,
                '"""Do nothing, because the registry has synced each write."""',
                "self.registry.forget_writes(self.rng)",
            ),
        ),
    ),
    Bug(
        "the controller removes a leaving member from the ISR",
        "R13",
        100,
        (
            (
                electing._remove_dead,
                "live[broker].epoch == member.broker_epoch",
                "live[broker].epoch == member.broker_epoch"
                " and not live[broker].is_leaving",
            ),
        ),
        LEAVING,
    ),
    Bug(
        "an overdue session is expired by registered brokers only",
        "R09 R10",
        50,
        (
            (
                World.expire_sessions,
                "with self.call_registry(process):",
                "if process.epoch is not None:",
            ),
        ),
    ),
    Bug(
        "a truncation keeps the state of the producers",
        "R01 R11 error",
        100,
        ((Disk.truncate, "self._producers = None", "pass"),),
    ),
    Bug(
        "a follower adds no batches to its state of the producers",
        "R11",
        500,
        (
            (
                World.append_records,
                "disk.append(record)",
                "disk.append(record)\n"
                "        if disk._producers is not None:\n"
                "            disk._producers = Producers()",
            ),
        ),
    ),
    Bug(
        "an old sequence is not out of order",
        "R11",
        100,
        (
            (
                Producers.duplicate_of,
                "if first_sequence != expected:",
                "if first_sequence > expected:",
            ),
        ),
    ),
    Bug(
        "a new leader begins without the state of the producers",
        "R11",
        100,
        (
            (
                World.take_over,
                "disk.begin_epoch(current_state.leader_epoch)",
                "disk.begin_epoch(current_state.leader_epoch); disk._producers = Producers()",
            ),
        ),
    ),
    Bug(
        "a batch after a refused one is out of order",
        "R11",
        400,
        (
            (
                RefusedBatches.code_for,
                "if refused is None or epoch < refused.epoch:",
                "if True:",
            ),
        ),
    ),
    Bug(
        "a new producer's batch after a refused one is stored",
        "R11",
        500,
        (
            (
                World.code_of_batch,
                "refused_code and batch.producer_id not in disk.producers",
                "False",
            ),
        ),
    ),
    Bug(
        "a repeated batch is acknowledged before it is committed",
        "R01",
        100,
        (
            (
                World.code_of_batch,
                "bisect.insort(process.waiters, waiter, key=lambda each: each.end)",
                "self.acknowledge(waiter)",
            ),
        ),
    ),
    Bug(
        "a follower does not adopt the log start",
        "R02 R15",
        100,
        (
            (
                following.answered,
                "if answer.log_start > follower.log_start:",
                "if False:",
            ),
        ),
        DELETIONS,
    ),
    Bug(
        "a response with records lacks the log start",
        "R02 R15",
        100,
        (
            (
                World.on_fetch,
                "log_start=disk.start,\n            )\n    self.send",
                "log_start=0,\n            )\n    self.send",
            ),
        ),
        DELETIONS,
    ),
    Bug(
        "a follower that is longer than its leader does not diverge",
        "R02 R05 R15",
        100,
        (
            (
                leading.refuse_fetch,
                "if epoch != fetch.last_epoch or end < fetch.offset:",
                "if epoch != fetch.last_epoch:",
            ),
            (
                leading.refuse_fetch,
                "if fetch.offset > leader.log_end:",
                "if False:",
            ),
        ),
    ),
    Bug(
        "a marker is acknowledged at the append",
        "R12",
        100,
        (
            (
                DataWorld.on_marker,
                "if not self.produce(process, acks_all=True, content=marker, done=done):",
                "if self.produce(process, acks_all=True, content=marker):\n"
                "        done()\n"
                "    else:",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "a record of the coordinator counts as stored at the append",
        "R12",
        100,
        (
            (
                StatePartitionWorld.store,
                "if not self.produce(process, acks_all=True, content=content, done=done):",
                "if self.produce(process, acks_all=True, content=content):\n"
                "        done()\n"
                "    else:",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "a new coordinator does not write the markers of a decision again",
        "R12",
        10,
        (
            (
                TransactionMachine.load,
                "elif stored.status in _PREPARED:",
                "elif False:",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "a request that was given up arrives later",
        "R12",
        3_000,
        (
            (
                SimulatedPeers.call,
                "is_open=lambda: not is_answered",
                "is_open=lambda: True",
            ),
        ),
        LATE_REQUESTS,
        run=run_transactions,
    ),
    Bug(
        "a coordinator loads the records below its first high watermark only",
        "R12",
        150,
        (
            (
                StatePartitionWorld.load,
                "or process.high_watermark < leader.epoch_start",
                "",
            ),
            (
                StatePartitionWorld.load,
                "for record in process.disk.records:",
                "for record in process.disk.records[:process.high_watermark]:",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "a marker that a former leader refuses is not sent again",
        "R12",
        100,
        (
            (
                TransactionShard._send_markers,
                "code_by_partition.get(partition, -1) not in _FINAL",
                "code_by_partition.get(partition, -1) not in "
                "{*_FINAL, codes.NOT_LEADER_OR_FOLLOWER}",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "a partition without a leader gets no marker",
        "R12",
        300,
        (
            (
                TransactionShard._write_markers,
                "failed_partitions = set(by_leader.pop(NO_NODE, ()))",
                "by_leader.pop(NO_NODE, ()); failed_partitions = set()",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "a producer may write after the end of its transaction",
        "R12",
        400,
        (
            (
                TransactionMachine.verify,
                "if stored.status is not Status.ONGOING or partition",
                "if stored.status is Status.ONGOING and partition",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "a leader does not verify a transaction (KIP-890)",
        "R12",
        20,
        (
            (
                TransactionShards._unverified,
                "self._verified.get(partition, {}).get(producer_id) != epoch",
                "False",
            ),
            (
                TransactionShards.verified,
                "self._verified.get(partition, {}).get(producer[1]) == producer[2]",
                "True",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "the end of a transaction is acknowledged before it is stored",
        "R12",
        300,
        (
            (
                TransactionMachine._end,
                "return self._prepare(transaction, request, waiter, now_ms)",
                "identity = ProducerIdAndEpoch(\n"
                "        stored.producer_id,\n"
                "        stored.producer_epoch + (request.client_version >= 2),\n"
                "    )\n"
                "    prepared = self._prepare(transaction, request, None, now_ms)\n"
                "    return [*_reply(waiter, identity), *prepared]",
            ),
        ),
        run=run_transactions,
    ),
    Bug(
        "a truncation below the high watermark is not an error",
        "R07",
        500,
        (
            (
                following._truncate,
                "if offset < follower.high_watermark:",
                "if False:",
            ),
            (
                electing._elect,
                "settings.is_unclean_allowed and candidates",
                "candidates",
            ),
        ),
    ),
    Bug(
        "a replica of a former topic has a role in the next one",
        "R01 R03 R07 R14",
        100,
        (
            (
                identity.is_replica_of,
                "own_id == topic_id",
                "own_id is not None",
            ),
        ),
        run=run_topics,
    ),
    Bug(
        "the replica of a former topic is kept for the next one",
        "R01 R03 R07 R14",
        100,
        (
            (
                identity.replica_treatment,
                "if own_id == present_id:",
                "if present_id is not None:",
            ),
        ),
        run=run_topics,
    ),
    Bug(
        "a leader serves the fetch of another topic",
        "R01 R03 R07 R14",
        100,
        (
            (
                TopicsWorld.on_fetch_of,
                "if topic_id == self.view_of(process).topic_id:",
                "if True:",
            ),
        ),
        run=run_topics,
    ),
    Bug(
        "a view has the former topic and the state of the next one",
        "R01 R03 R07 R14",
        500,
        (
            (
                TopicsWorld.read_registry,
                "if topic_id == registry.topic_id:",
                "if True:",
            ),
        ),
        RECREATED_TOPICS,
        run=run_topics,
    ),
]
