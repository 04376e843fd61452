"""The topics to which groups of the consumer protocol may subscribe, and their regular
expressions.

Rules:
- Regular expressions are those of RE2, as in Kafka, and match a whole name. They come
  from clients. In Python's own engine, an expression of 24 bytes may take seconds, in
  which no other client would be served. Without the package google-re2, they are
  refused.
- A regular expression does not match internal topics. A subscription must contain their
  names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from logcore import LogcoreError
from logcore.distribution import install_command
from logcore.metadata.filenames import INTERNAL_TOPICS
from netshim.served_directory import ServedDirectory

#: Memory limit of a compiled expression. A larger one is refused.
_MAX_BYTES: Final = 1 << 20


class ServedTopics:
    """The topics of a directory, in the form that logcore.coordination needs."""

    def __init__(
        self, logdir: ServedDirectory, rules_version: Callable[[], int]
    ) -> None:
        self._logdir = logdir
        self._rules_version = rules_version

    @property
    def version(self) -> int:
        # An access rule may hide or show a topic. Both numbers only rise.
        return self._logdir.host.topics_version + self._rules_version()

    def names(self) -> Iterable[str]:
        return [name for name in self._logdir.topics() if name not in INTERNAL_TOPICS]

    def id_and_count(self, name: str) -> tuple[bytes, int] | None:
        if name not in self._logdir:
            return None
        try:
            return self._logdir.topic_id(name).bytes, len(self._logdir.partitions(name))
        except LogcoreError:  # deleted since then
            return None


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that tests whether a whole name matches.

    Raises:
        ValueError: the text is not a regular expression.
    """
    try:
        import re2
    except ImportError:
        raise ValueError(
            f"regular expressions need google-re2: {install_command('regex')}"
        ) from None
    options = re2.Options()
    # Otherwise, RE2 writes each invalid expression of a client to stderr.
    options.log_errors = False
    options.max_mem = _MAX_BYTES
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        text = error.args[0]
        if isinstance(text, bytes):
            reason = text.decode(errors="replace")
        else:
            reason = str(text)
        raise ValueError(f"not a regular expression of RE2: {reason}") from error
    return lambda name: compiled.fullmatch(name) is not None
