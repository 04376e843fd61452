"""Forks: creates a topic with another topic's records below an offset.

Rules:
- The new topic exists completely or not at all. Until it is complete, the file of
  topics marks it as deleting, so that the next opening removes what a crash left.
- Copies are made in directories with names that no partition has. They are renamed when
  all of them are complete.

This module does not choose offsets and does not open logs: the directory (logdir.py)
does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from logcore.directory.copying import copy_log
from logcore.directory.incidents import Incidents
from logcore.directory.topic_file import TopicEntry
from logcore.directory.topics import TopicRegistry
from logcore.fs import FS
from logcore.log import Log
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import partition_name


def fork_topic(
    fs: FS,
    registry: TopicRegistry,
    incidents: Incidents,
    made: TopicEntry,
    source: Callable[[int], Log],
    offsets: Mapping[int, int | None],
) -> None:
    """Create the topic `made`, which must not exist. Raises the same errors as
    copy_log().

    `source` opens a partition of the original topic by number. `offsets` are the ends
    of the copies; None means the high watermark.
    """
    # After a crash before the topic is complete, the next opening deletes it.
    registry.save(deleting=[made])
    # These are not the names of partitions, so the next opening removes such directories.
    away = {
        number: registry.deletion_name(partition_name(made.name, number))
        for number in made.numbers
    }
    try:
        _copy_partitions(fs, registry, made, source, offsets, away)
        for number in made.numbers:
            fs.rename(
                os.path.join(registry.path, away[number]),
                registry.partition_path(made.name, number),
            )
        fs.sync_dir(registry.path)
        registry.known[made.name] = made
        registry.save()
    except BaseException:
        registry.undo(made)
        with incidents.reporting_errors("deletion", made.name):
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
    """Copy each partition into its directory of `away`, and store its checkpoints."""
    registry.forget({(made.name, number): None for number in made.numbers})
    points: dict[Key, int | None] = {}
    starts: dict[Key, int | None] = {}
    for number in made.numbers:
        log = source(number)
        key = (made.name, number)
        path = os.path.join(registry.path, away[number])
        registry.make_partition(made, path)
        end = copy_log(log, path, offsets[number]).end
        points[key] = end
        starts[key] = min(log.log_start_offset, end) or None
    # Each partition in the checkpoints then has a directory.
    fs.sync_dir(registry.path)
    registry.write_offsets(checkpoint.LOG_START, starts)
    registry.write_offsets(checkpoint.RECOVERY_POINT, points)
