"""First offsets of a stream, stored in its checkpoint.

Spark's offset log records only the end of a batch. If the first batch fails and the
query restarts, Spark requests the start offsets again. By then, latest means other
offsets, and the records in between would be lost. Spark's Kafka source stores the first
start offsets in the checkpoint. Spark does not pass the checkpoint's path to a Python
source, so the option checkpointLocation supplies it.

Rules:
- The first offsets are durable before they are returned, and are returned from then on.
- The file name is derived from the options that select the records, so that each source
  of one query has its own file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping

from logcore.errors import CorruptLogError
from logcore.fs import OS
from logcore.metadata import checkpoint
from pyspark_logcore.admission import Offsets, from_json, to_json
from pyspark_logcore.ranges import TopicPartition

_FOLDER = "logcore"


class FirstOffsets:
    """File of the first offsets of one source.

    `location` is the checkpoint of the query, on a file system that the driver can
    access. `identity` holds the options that distinguish the sources of a query.
    """

    def __init__(self, location: str, identity: Mapping[str, object]) -> None:
        text = json.dumps(dict(identity), sort_keys=True, default=str)
        self._folder = os.path.join(location, _FOLDER)
        self._name = hashlib.sha256(text.encode()).hexdigest()[:16] + ".json"

    @property
    def path(self) -> str:
        return os.path.join(self._folder, self._name)

    def read(self) -> dict[TopicPartition, int] | None:
        """Return the stored offsets, or None if none are stored yet.

        Raises:
            CorruptLogError: the file is damaged.
        """
        content = checkpoint.read(OS, self._folder, self._name)
        if content is None:
            return None
        facts = checkpoint.unpack_checked(content)
        if facts is None:
            raise CorruptLogError(
                "the first offsets of this stream are damaged; when batch 0 is committed, remove the file",
                path=self.path,
                expected="a line that begins with the CRC-32 of its rest",
                found=repr(content[:40]),
            )
        return from_json(facts.get("offsets"))

    def store_once(self, offsets: Offsets) -> dict[TopicPartition, int]:
        """Store offsets unless some are stored already; return the stored offsets."""
        found = self.read()
        if found is not None:
            return found
        os.makedirs(self._folder, exist_ok=True)
        OS.sync_dir(os.path.dirname(self._folder))
        temporary_name = f"{self._name}.{os.getpid()}.{OS.random_bytes(4).hex()}"
        checkpoint.write(
            OS,
            self._folder,
            temporary_name,
            checkpoint.pack_checked({"offsets": to_json(offsets)}),
        )
        temporary_path = os.path.join(self._folder, temporary_name)
        # Another source with these options stored its offsets first.
        with contextlib.suppress(FileExistsError):
            if not OS.link(temporary_path, self.path):
                OS.rename(temporary_path, self.path)
        with contextlib.suppress(FileNotFoundError):
            OS.unlink(temporary_path)
        OS.sync_dir(self._folder)
        stored = self.read()
        assert stored is not None, "linked above, by this process or another"
        return stored
