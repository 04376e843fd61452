"""A fork: a new topic that has another's records below an offset.

Rules:
- The new topic exists whole or not at all. Until it is whole, the file of topics calls it deleting, so that the next
  opening undoes what a crash left.
- Copies are made in directories whose names are not those of partitions, and renamed when all of them are whole.

This module decides no offset and opens no log: the directory (logdir.py) does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from logcore import checkpoint
from logcore.checkpoint import Key
from logcore.directory.copying import copy_log
from logcore.directory.incidents import Incidents
from logcore.directory.topicfile import TopicEntry
from logcore.directory.topics import TopicRegistry
from logcore.fs import FS
from logcore.log import Log
from logcore.names import partition_name


def fork_topic(
    fs: FS,
    registry: TopicRegistry,
    incidents: Incidents,
    made: TopicEntry,
    source: Callable[[int], Log],
    offsets: Mapping[int, int | None],
) -> None:
    """Makes the topic `made`, of which nothing exists yet.

    source: opens the partition of a number of the topic that is forked. offsets: where the copy of each partition
    ends; None for its high watermark. Raises what copy_log() raises.
    """
    registry.save(deleting=[made])  # until it is whole, a crash undoes it
    # No names of partitions: the next opening removes such directories.
    away = {number: registry.doomed_name(partition_name(made.name, number)) for number in made.numbers}
    try:
        _copy_partitions(fs, registry, made, source, offsets, away)
        for number in made.numbers:
            fs.rename(os.path.join(registry.path, away[number]), registry.partition_path(made.name, number))
        fs.sync_dir(registry.path)
        registry.known[made.name] = made
        registry.save()
    except BaseException:
        registry.undo(made)
        with incidents.going_on("deletion", made.name):
            for name in set(away.values()) & set(fs.listdir(registry.path)):
                registry.remove_tree(name)
        raise


def _copy_partitions(
    fs: FS,
    registry: TopicRegistry,
    made: TopicEntry,
    source: Callable[[int], Log],
    offsets: Mapping[int, int | None],
    away: Mapping[int, str],
) -> None:
    """Copies each partition into its directory of `away`, and puts starts and recovery points into the checkpoints."""
    registry.forget({(made.name, number): None for number in made.numbers})
    points: dict[Key, int | None] = {}
    starts: dict[Key, int | None] = {}
    for number in made.numbers:
        log = source(number)
        key = (made.name, number)
        path = os.path.join(registry.path, away[number])
        registry.make_partition(made, path)
        end = copy_log(log, path, offsets[number])
        points[key] = end
        starts[key] = min(log.log_start_offset, end) or None
    fs.sync_dir(registry.path)  # a partition that the checkpoints name has a directory
    registry.note(checkpoint.LOG_START, starts)
    registry.note(checkpoint.RECOVERY_POINT, points)
