"""The configuration file of `netshim serve`.

    directory = "data"
    port = 9092
    super_user = ["User:admin"]

    [config]                            # of topics without a setting of their own
    "retention.ms" = 604800000

    [topics.orders]                     # created if it does not exist
    partitions = 4
    "cleanup.policy" = "compact"

Rules:
- A key is the name of an option, with underscores. An unknown key, and a value of
  another type or out of range, raises InvalidConfigError with the file and the line.
- Options on the command line have priority over environment variables, and these have
  priority over the file.

This module does not depend on click: the caller describes the options.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from logcore.clientconfig import unknown
from logcore.config import LogConfig
from logcore.directory.topic_file import MAX_PARTITIONS
from logcore.errors import InvalidConfigError, InvalidNameError, LogcoreError
from logcore.metadata.filenames import check_topic_name

# Keys that are not options.
_DIRECTORY: Final = "directory"
_CONFIG: Final = "config"
_TOPICS: Final = "topics"
_PARTITIONS: Final = "partitions"
#: Maximum size of the file. A larger one is not read.
_MAX_BYTES: Final = 1 << 20


@attrs.frozen
class OptionSpec:
    """The values that an option accepts."""

    #: bool, int or str.
    kind: type
    #: Whether the option may be repeated, so that its value is a list.
    is_list: bool = False
    #: Smallest and largest number.
    low: int | None = None
    high: int | None = None
    #: The accepted texts, if there are only some.
    choices: Sequence[str] = ()

    def expected(self) -> str:
        """Return the accepted values, for an error message."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.low is not None or self.high is not None:
            return f"a number from {self.low} to {self.high}"
        name = {bool: "true or false", int: "a number", str: "a text"}[self.kind]
        if self.is_list:
            return f"a list, each {name}"
        return name

    def accepts(self, value: object) -> bool:
        """Return whether the option may have a value."""
        if self.is_list:
            element_spec = attrs.evolve(self, is_list=False)
            return isinstance(value, list) and all(map(element_spec.accepts, value))
        # type(), because a bool is an int, too.
        if type(value) is not self.kind:
            return False
        if self.choices:
            return value in self.choices
        if isinstance(value, int):
            is_low = self.low is not None and value < self.low
            is_high = self.high is not None and value > self.high
            return not is_low and not is_high
        return True


@attrs.frozen
class ConfiguredTopic:
    """A topic that the broker creates if it does not exist."""

    name: str
    partitions: int
    config: Mapping[str, str]


@attrs.frozen
class FileSettings:
    """The content of a configuration file."""

    path: str
    directory: str | None = None
    #: Values by the name of the option.
    options: Mapping[str, Any] = attrs.field(factory=dict)
    #: Default settings of topics, by Kafka's names.
    config: Mapping[str, str] = attrs.field(factory=dict)
    topics: Sequence[ConfiguredTopic] = ()
    #: The line of each option.
    lines: Mapping[str, int] = attrs.field(factory=dict)


class _Reader:
    """The text of one file, for messages with its lines."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self._lines = text.splitlines()

    def line_of(self, key: str, table: str = "") -> int:
        """Return the line of a key.

        If the key is in a form that this cannot find, return the line of its table, or 1.
        """
        # A key may be quoted.
        written = rf"[\"']?{re.escape(key)}[\"']?"
        inside = not table
        last = 1
        for number, line in enumerate(self._lines, 1):
            header = re.match(r"\s*\[+\s*(.+?)\s*\]+", line)
            if header is not None:
                # [topics."orders"] and [topics.orders] are the same table.
                section = header[1].replace('"', "").replace("'", "")
                inside = section == table
                last = number if inside else last
                # A table such as [config] is a key of the file.
                if section == key and not table:
                    return number
            elif inside and re.match(rf"\s*{written}\s*(=|\.)", line):
                return number
        return last

    def at(self, key: str, error: LogcoreError, table: str = "") -> InvalidConfigError:
        """Return an error with the file and the line of a key."""
        line = self.line_of(key, table)
        return InvalidConfigError(f"{self.path}, line {line}: {error}")

    def error(
        self, key: str, expected: str, found: object, table: str = ""
    ) -> InvalidConfigError:
        """Return the error of a key."""
        name = f"{table}.{key}" if table else key
        return InvalidConfigError(
            f"{self.path}, line {self.line_of(key, table)}: {name}",
            expected=expected,
            found=repr(found),
        )


def read_config_file(path: str, specs: Mapping[str, OptionSpec]) -> FileSettings:
    """Read a configuration file.

    `specs` describes the options by their names.

    Raises:
        InvalidConfigError: the file is not TOML, or a key or a value is invalid.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    if len(data) > _MAX_BYTES:
        raise InvalidConfigError(
            path, expected=f"at most {_MAX_BYTES} bytes", found=len(data)
        )
    try:
        text = data.decode()
        values = tomllib.loads(text)
    except ValueError as error:
        raise InvalidConfigError(
            f"{path} is not TOML: {error}", expected="TOML 1.0 in UTF-8"
        ) from error
    reader = _Reader(path, text)
    options: dict[str, Any] = {}
    directory = None
    config: Mapping[str, str] = {}
    topics: Sequence[ConfiguredTopic] = ()
    for key, value in values.items():
        if key == _DIRECTORY:
            if type(value) is not str:
                raise reader.error(key, "a text", value)
            directory = value
        elif key == _CONFIG:
            config = _settings(reader, key, value)
        elif key == _TOPICS:
            topics = _topics(reader, value)
        elif key not in specs:
            valid_keys = (*specs, _DIRECTORY, _CONFIG, _TOPICS)
            raise reader.at(key, unknown(key, valid_keys, "key"))
        elif not specs[key].accepts(value):
            raise reader.error(key, specs[key].expected(), value)
        else:
            options[key] = value
    # tomllib returns no positions, so the lines are searched in the text.
    lines = {key: reader.line_of(key) for key in values}
    return FileSettings(path, directory, options, config, topics, lines)


def _settings(reader: _Reader, table: str, values: object) -> dict[str, str]:
    """Return Kafka's settings of topics in a table. Their values are texts."""
    if not isinstance(values, dict):
        raise reader.error(table, "a table of settings", values)
    settings = {}
    for key, value in _flat(values).items():
        if type(value) is bool:
            # Kafka writes true and false.
            settings[key] = str(value).lower()
        elif isinstance(value, int | float | str):
            settings[key] = str(value)
        else:
            raise reader.error(key, "a text, a number, true or false", value, table)
        try:
            # Each setting alone, so that the error names its line.
            LogConfig.parse({key: settings[key]})
        except InvalidConfigError as error:
            raise reader.at(key, error, table) from error
    return settings


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join the parts of dotted keys, because TOML reads retention.ms as a table."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _topics(reader: _Reader, values: object) -> list[ConfiguredTopic]:
    if not isinstance(values, dict):
        raise reader.error(_TOPICS, "a table for each topic", values)
    topics = []
    for name, table in values.items():
        if not isinstance(table, dict):
            raise reader.error(name, "a table of settings", table, _TOPICS)
        table_name = f"{_TOPICS}.{name}"
        try:
            check_topic_name(name)
        except InvalidNameError as error:
            raise reader.at(table_name, error) from error
        # The rest of the table consists of settings.
        partitions = table.pop(_PARTITIONS, 1)
        if type(partitions) is not int or not 1 <= partitions <= MAX_PARTITIONS:
            expected = f"a number from 1 to {MAX_PARTITIONS}"
            raise reader.error(_PARTITIONS, expected, partitions, table_name)
        topics.append(
            ConfiguredTopic(name, partitions, _settings(reader, table_name, table))
        )
    return topics
