"""The offsets at which a stream began, kept beside its checkpoint.

Spark's log of a batch holds only where the batch ends. When the first batch fails and
the query starts again, the source is asked a second time where to begin, and latest
means other offsets by then: what lies between would be lost. Spark's Kafka source keeps
the first answer in the checkpoint. A Python source is not told where that is, so the
option checkpointLocation says it.

Rules:
- The first answer is durable before it is given, and is the answer from then on.
- The name of the file comes from the options that say what is read and from where, so
  that several sources of one query have files of their own.
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
    """location: the checkpoint of the query, on a file system that the driver sees.
    identity: the options that tell this source from others.
    """

    def __init__(self, location: str, identity: Mapping[str, object]) -> None:
        text = json.dumps(dict(identity), sort_keys=True, default=str)
        self._folder = os.path.join(location, _FOLDER)
        self._name = hashlib.sha256(text.encode()).hexdigest()[:16] + ".json"

    @property
    def path(self) -> str:
        return os.path.join(self._folder, self._name)

    def read(self) -> dict[TopicPartition, int] | None:
        """None when there are none yet. Raises CorruptLogError."""
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

    def keep(self, offsets: Offsets) -> dict[TopicPartition, int]:
        """Keeps these unless there are some; returns those that are kept."""
        found = self.read()
        if found is not None:
            return found
        os.makedirs(self._folder, exist_ok=True)
        OS.sync_dir(os.path.dirname(self._folder))
        draft = f"{self._name}.{os.getpid()}.{OS.random_bytes(4).hex()}"
        checkpoint.write(
            OS,
            self._folder,
            draft,
            checkpoint.pack_checked({"offsets": to_json(offsets)}),
        )
        made = os.path.join(self._folder, draft)
        with contextlib.suppress(
            FileExistsError
        ):  # another source with these options came first
            if not OS.link(made, self.path):
                OS.rename(made, self.path)
        with contextlib.suppress(FileNotFoundError):
            OS.unlink(made)
        OS.sync_dir(self._folder)
        kept = self.read()
        assert kept is not None, "linked above, by this process or another"
        return kept
