"""The offsets of a group: commits, their deletion and their expiry.

Rules:
- A commit is visible, and answered, once its record is durable. Until then it is in
  `storing`, and deleting the group or the topic deletes it too.
- A member may not commit while the leader computes the assignment; it retries. A member
  that leaves may commit: until the assignment is complete, no other member has received
  its partitions.
- A commit in a transaction takes effect when the transaction commits, unless a later
  commit is already in effect.
- A deletion covers all earlier commits, also those in an open transaction, and no later
  commit. Its records are split into batches, because those of a large group do not fit
  into one.
- Requests do not find a group once its deletion has begun. If the deletion cannot be
  stored, coordinator.py restores the remaining state at once, so that the group can be
  deleted again. Otherwise the group would reappear after a restart.

The caller checks which topics exist and how long metadata may be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from logcore.coordination import classic_transitions, consumer_transitions
from logcore.coordination.classic_group import COMPLETING, DEAD, EMPTY, Group
from logcore.coordination.effects import (
    AppendRecords,
    Effect,
    GroupDeleted,
    OffsetsCommitted,
    OffsetsDeleted,
    OffsetsPending,
    Reply,
)
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    OffsetKey,
    Rules,
    Waiter,
)
from logcore.format.group_records import (
    RECORD_HEAD_BYTES,
    Committed,
    GroupRecord,
    TopicWithId,
    commit_key,
    commit_value,
    group_key,
)

#: Maximum size of a batch of records that delete offsets.
_BATCH_BYTES: Final = 65_536


def check_commit(
    group: Group, committer: Committer, now_ms: int, *, rules: Rules
) -> tuple[GroupError | None, list[Effect]]:
    """Check whether this committer may commit now.

    A commit renews the session of a classic member, but not of a member of the consumer
    protocol.
    """
    if group.consumers is not None:
        return _check_consumer(group, committer), []
    if committer.generation < 0:
        # A client that does not use the group protocol. In a group with members it
        # could overwrite their commits.
        if group.state == EMPTY:
            return None, []
        if not committer.member_id and committer.instance_id is None:
            return GroupError.UNKNOWN_MEMBER_ID, []
    error = group.check_generation(
        committer.member_id, committer.instance_id, committer.generation
    )
    if error is not None:
        return error, []
    # The partition may belong to another member in this generation. The client commits
    # again after SyncGroup, which a member that leaves cannot do.
    if group.state == COMPLETING and not committer.is_leaving:
        return GroupError.REBALANCE_IN_PROGRESS, []
    step = classic_transitions.ClassicStep(group, rules, now_ms)
    step.renew(group.members[committer.member_id])
    return None, step.effects


def _check_consumer(group: Group, committer: Committer) -> GroupError | None:
    assert group.consumers is not None
    if committer.generation < 0 and group.state == EMPTY:
        return None
    error = group.consumers.check_epoch(committer.member_id, committer.generation)
    # A member that lost its partitions is fenced by its epoch, which older versions of
    # the request do not contain.
    has_epoch = committer.can_contain_epoch or group.consumers.is_classic(
        committer.member_id
    )
    if error is not GroupError.UNKNOWN_MEMBER_ID and not has_epoch:
        return GroupError.UNSUPPORTED_VERSION
    return error


def commit(
    group: Group, offsets: Mapping[OffsetKey, Committed], waiter: Waiter
) -> list[Effect]:
    """Store offsets that check_commit() accepted; reply once they are durable and
    visible.
    """
    records = tuple(
        (commit_key(group.group_id, *key), commit_value(each))
        for key, each in offsets.items()
    )
    # Until the records are stored, the group must not expire or be forgotten.
    for key in offsets:
        group.storing[key] += 1
    return [
        AppendRecords(
            group, records, OffsetsCommitted(offsets, waiter, group.next_order())
        )
    ]


def commit_in_transaction(
    group: Group,
    producer_id: int,
    producer_epoch: int,
    offsets: Mapping[OffsetKey, Committed],
    waiter: Waiter,
) -> list[Effect]:
    """Store offsets that take effect if the producer's transaction commits.

    The reply follows once they are durable. They are in `unstable` at once, because the
    marker may be reported before this record.
    """
    records = tuple(
        (commit_key(group.group_id, *key), commit_value(each))
        for key, each in offsets.items()
    )
    order = group.next_order()
    unstable = group.unstable.setdefault(producer_id, {})
    for key, each in offsets.items():
        unstable[key] = order, each
    then = OffsetsPending(producer_id, offsets, waiter, order)
    return [AppendRecords(group, records, then, (producer_id, producer_epoch))]


def pending(
    group: Group, done: OffsetsPending, error: GroupError | None
) -> list[Effect]:
    """Handle the outcome of storing the records of a transaction."""
    unstable = group.unstable.get(done.producer_id, {})
    if error is not None:
        for key in done.offsets:
            # A later commit of the same transaction may have replaced this one.
            if key in unstable and unstable[key][0] == done.order:
                del unstable[key]
        if not unstable:
            group.unstable.pop(done.producer_id, None)
    if group.is_unused:
        group.state = DEAD
    return [Reply(done.waiter, error)]


def committed(
    group: Group, done: OffsetsCommitted, error: GroupError | None
) -> list[Effect]:
    for key, each in done.offsets.items():
        remaining = group.storing[key] - 1
        if remaining:
            group.storing[key] = remaining
        else:
            group.storing.pop(key)  # in C; `del` of a Counter runs Python code
        if error is None:
            # apply_record() ignores a commit that completes after a later one.
            group.apply_record(key, each, done.order)
    if group.is_unused:
        group.state = DEAD
    return [Reply(done.waiter, error)]


def delete(
    group: Group, keys: Iterable[OffsetKey], waiter: Waiter | None
) -> list[Effect]:
    """Delete offsets; `waiter` is None if no request waits."""
    batches = _in_batches(group, keys)
    # The waiter is in the last batch, because its answer needs the outcome of all
    # batches.
    if batches:
        order = group.next_order()
        effects = [_deletion(group, batch, order) for batch in batches[:-1]]
        effects.append(_deletion(group, batches[-1], order, waiter, is_last=True))
        return effects
    if waiter is None:
        return []
    return [Reply(waiter, None)]


def _in_batches(group: Group, keys: Iterable[OffsetKey]) -> list[list[OffsetKey]]:
    """Split the keys in order, so that the tombstones of each part fit into one batch."""
    batches: list[list[OffsetKey]] = []
    remaining = 0
    for key in keys:
        size_bytes = len(commit_key(group.group_id, *key)) + RECORD_HEAD_BYTES
        remaining -= size_bytes
        # True for the first key too, because there is no batch yet.
        if remaining < 0:
            batches.append([])
            remaining = _BATCH_BYTES - size_bytes
        batches[-1].append(key)
    return batches


def _deletion(
    group: Group,
    keys: Iterable[OffsetKey],
    order: int,
    waiter: Waiter | None = None,
    *,
    is_last: bool = False,
) -> Effect:
    key_tuple = tuple(keys)
    return AppendRecords(
        group,
        _tombstones(group, key_tuple),
        OffsetsDeleted(key_tuple, waiter, order, is_last),
    )


def deleted(
    group: Group, done: OffsetsDeleted, error: GroupError | None
) -> list[Effect]:
    """Handle the outcome of one batch of a deletion.

    The waiting request gets the first error of all batches.
    """
    if error is None:
        group.forget(done.keys, done.order)
    else:
        group.failed.setdefault(done.order, error)
    if not done.is_last:
        return []
    error = group.failed.pop(done.order, None)
    if done.waiter is None:
        return []
    return [Reply(done.waiter, error)]


def forget_topics(
    group: Group,
    names: set[str],
    new_waiter: Callable[[], Waiter | None] = lambda: None,
    current: Collection[TopicWithId] = (),
) -> list[Effect]:
    """Delete the offsets of deleted topics at once.

    A new topic with such a name starts without offsets, and pending commits never
    become visible. `new_waiter` is called if there is something to delete. Offsets of
    the `current` topics are kept: another coordinator may have stored them already.
    """
    keys = group.keys_of(names)
    if current:
        keys = [key for key in keys if not group.has_commit_of(key, current)]
    if not keys:
        return []
    order = group.next_order()
    group.forget(keys, order)
    # A commit that is being written has a lower order, so it is ignored when it
    # completes.
    group.applied.update((key, order) for key in keys if key in group.storing)
    return delete(group, keys, new_waiter())


def forget_former_topics(group: Group, former: Collection[TopicWithId]) -> list[Effect]:
    """Delete the stored offsets of topics that do not exist any more."""
    keys = group.drop_topics(former)
    # A deletion would include an offset of the current topic with that name, which may be
    # part of an open transaction.
    return delete(group, [key for key in keys if not group.has_offset(*key)], None)


def expire(group: Group, now_ms: int) -> list[Effect]:
    """Delete expired offsets, and the group if it has no members and no other offsets."""
    # Kafka deletes an empty group with its last offset. A group that waits for an
    # outcome is kept.
    keys = group.expired(now_ms)
    is_all = len(keys) == sum(map(len, group.offsets.values()))
    is_busy = group.consumers is not None and group.consumers.is_busy
    if (
        group.state == EMPTY
        and is_all
        and not (group.pending or group.storing or group.unstable or is_busy)
    ):
        return delete_group(group, None)
    return delete(group, keys, None)


def delete_group(group: Group, waiter: Waiter | None) -> list[Effect]:
    """Make an empty group Dead and delete its records."""
    assert group.state == EMPTY, group.state
    *batches, last = _in_batches(group, group.offset_keys()) or [[]]
    own: tuple[GroupRecord, ...] = (
        *group.pending_tombstone_records(),
        (group_key(group.group_id), None),
    )
    if group.consumers is not None:
        # The consumer protocol has a record for each member and target.
        own = group.consumers.tombstones()
    order = group.next_order()
    effects = consumer_transitions.mark_dead(group)
    effects += [_deletion(group, batch, order) for batch in batches]
    # The record of the group is deleted last: until then the deletion can be repeated.
    records = (*_tombstones(group, last), *own)
    effects.append(
        AppendRecords(group, records, GroupDeleted(waiter, order, tuple(last)))
    )
    return effects


def _tombstones(group: Group, keys: Iterable[OffsetKey]) -> tuple[GroupRecord, ...]:
    return tuple((commit_key(group.group_id, *key), None) for key in keys)


def group_deleted(
    group: Group, done: GroupDeleted, error: GroupError | None
) -> tuple[GroupError | None, list[Effect]]:
    """Handle the outcome of the last batch of a group's deletion.

    Return the first error of all batches, or None, and the effects.
    """
    if error is None:
        group.forget(done.keys, done.order)
    error = group.failed.pop(done.order, error)
    if done.waiter is None:
        return error, []
    return error, [Reply(done.waiter, error)]
