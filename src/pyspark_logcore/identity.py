"""Identity of the log directory that a query was planned with, so that no task reads
another directory at the same path.

Rules:
- A plan contains the identity of its directory. A task fails if the directory is
  missing on its machine or has another identity.
- A topic that was deleted and created again is data loss, which failOnDataLoss=false
  turns into a warning. Another directory is always an error.

This module reads identities and no records.
"""

from __future__ import annotations

import os

import attrs

import logcore
from logcore.errors import LogcoreError, LogNotFoundError
from logcore.fs import FS, OS
from logcore.metadata import checkpoint
from logcore.metadata.filenames import partition_name


class OtherDirectoryError(LogcoreError):
    """The log directory of the query's plan is missing on a task's machine, or another
    directory is at its path.
    """


@attrs.frozen
class SourceIdentity:
    """Identity of a log directory and of a topic in it.

    Another directory at the same path, on another machine or at another time, has
    another identity.
    """

    #: Kafka's id in meta.properties; "" if Kafka wrote none.
    directory_id: str = ""
    #: Kafka's id in meta.properties.
    cluster_id: str = ""
    #: Kafka's id in partition.metadata; "" if the file has none.
    topic_id: str = ""
    #: Offset and CRC of the first batch, if no id is known.
    head: tuple[int, int] | None = None

    @classmethod
    def of(cls, path: str, topic: str, partition: int, fs: FS = OS) -> SourceIdentity:
        """Read the present identity on this machine.

        Raises:
            LogcoreError: the files cannot be read.
        """
        where = os.path.join(path, partition_name(topic, partition))
        metadata = checkpoint.read(fs, where, checkpoint.PARTITION_METADATA)
        found = cls(*directory_ids(path, fs), checkpoint.topic_id(metadata or b""))
        if found.directory_id or found.topic_id:
            return found
        return attrs.evolve(found, head=cls._head(where, fs))

    @staticmethod
    def _head(path: str, fs: FS) -> tuple[int, int] | None:
        try:
            with logcore.open(path, read_only=True, fs=fs) as log:
                first = next(iter(log.batches(log.log_start_offset)), None)
                if first is None:
                    return None
                return (first.base_offset, first.crc)
        except LogNotFoundError:
            return None


def directory_ids(path: str, fs: FS = OS) -> tuple[str, str]:
    """Return directory.id and cluster.id of a log directory, "" for a missing id.

    Raises:
        LogcoreError: the file cannot be read.
    """
    properties = checkpoint.properties(
        checkpoint.read(fs, path, checkpoint.META_PROPERTIES) or b""
    )
    return properties.get("directory.id", ""), properties.get("cluster.id", "")


def check_identity(
    planned: SourceIdentity, path: str, topic: str, partition: int, fs: FS = OS
) -> str | None:
    """Check in a task that the directory and the topic are the ones of the query's plan.

    Return the reason if the topic is another one, otherwise None.

    Raises:
        OtherDirectoryError: the directory is missing, or is another one.
    """
    host = os.uname().nodename
    if not fs.is_directory(fs.real_path(path)):
        raise OtherDirectoryError(
            f"the machine {host} does not see the log directory that this query was planned with; share it under this "
            "path, or run the query on a machine that has it",
            path=path,
        )
    found = SourceIdentity.of(path, topic, partition, fs)
    for name in ("directory_id", "cluster_id"):
        expected = getattr(planned, name)
        if expected and getattr(found, name) != expected:
            raise OtherDirectoryError(
                f"the machine {host} has another log directory at this path than the one that this query was planned "
                "with; share that one, or run the query on a machine that has it",
                path=path,
                expected=f"{name} {expected}",
                found=getattr(found, name) or "none",
            )
    if planned.topic_id and found.topic_id and planned.topic_id != found.topic_id:
        return "the topic was deleted and made again since the query was planned"
    head = planned.head
    # A first batch that retention deleted proves nothing.
    if head is None or found.head is None or head[0] != found.head[0]:
        return None
    if head[1] != found.head[1]:
        raise OtherDirectoryError(
            f"the machine {host} has another log at this path than the one that this query was planned with, or it was "
            "compacted since",
            path=path,
            expected=f"a first batch with CRC {head[1]:#010x}",
            found=f"{found.head[1]:#010x}",
        )
    return None
