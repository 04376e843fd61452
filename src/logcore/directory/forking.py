"""Forks: creates a topic with another topic's records below an offset.

Rules:
- The new topic exists completely or not at all. Until it is complete, the file of
  topics marks it as deleting, so that after a crash the next opening removes it.
- Copies are written to directories whose names are not partition names. All directories
  are renamed when all copies are complete.

The directory (logdir.py) chooses the offsets and opens the logs.
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
    new_topic: TopicEntry,
    source: Callable[[int], Log],
    offsets: Mapping[int, int | None],
) -> None:
    """Create `new_topic`, which must not exist.

    `source` opens a partition of the original topic by number. `offsets` are the ends
    of the copies; None means the high watermark.

    Raises:
        LogcoreError: copy_log() failed.
    """
    # After a crash before the topic is complete, the next opening deletes it.
    registry.save(deleting=[new_topic])
    # After a crash, the next opening removes directories with such names.
    temporary_names = {
        number: registry.deletion_name(partition_name(new_topic.name, number))
        for number in new_topic.numbers
    }
    try:
        _copy_partitions(fs, registry, new_topic, source, offsets, temporary_names)
        for number in new_topic.numbers:
            fs.rename(
                os.path.join(registry.path, temporary_names[number]),
                registry.partition_path(new_topic.name, number),
            )
        fs.sync_dir(registry.path)
        registry.known[new_topic.name] = new_topic
        registry.save()
    except BaseException:
        registry.undo(new_topic)
        with incidents.reporting_errors("deletion", new_topic.name):
            for name in set(temporary_names.values()) & set(fs.listdir(registry.path)):
                registry.remove_tree(name)
        raise


def _copy_partitions(
    fs: FS,
    registry: TopicRegistry,
    new_topic: TopicEntry,
    source: Callable[[int], Log],
    offsets: Mapping[int, int | None],
    temporary_names: Mapping[int, str],
) -> None:
    """Copy each partition into its temporary directory, and store its checkpoints."""
    registry.forget({(new_topic.name, number): None for number in new_topic.numbers})
    points: dict[Key, int | None] = {}
    starts: dict[Key, int | None] = {}
    for number in new_topic.numbers:
        log = source(number)
        key = (new_topic.name, number)
        path = os.path.join(registry.path, temporary_names[number])
        registry.make_partition(new_topic, path)
        end = copy_log(log, path, offsets[number]).end
        points[key] = end
        starts[key] = min(log.log_start_offset, end) or None
    # Each partition in the checkpoints then has a directory.
    fs.sync_dir(registry.path)
    registry.write_offsets(checkpoint.LOG_START, starts)
    registry.write_offsets(checkpoint.RECOVERY_POINT, points)
