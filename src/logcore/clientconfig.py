"""Configurations with Kafka's dotted names, for producers and consumers of a directory.

Rules:
- `config=` accepts dotted names, so that a program can use one configuration here and
  with a client of Kafka. Settings that need a network are ignored there, with one
  warning; as keywords they are refused.
- An unknown name is an error, which contains the nearest known name.

The settings are in producer/settings.py and consumer/settings.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from logcore.errors import InvalidConfigError, nearest_name

#: Settings of both of Kafka's clients that need a network, or threads of their own.
_NETWORK: Final = """
    bootstrap_servers metadata_max_age_ms metadata_max_idle_ms request_timeout_ms connections_max_idle_ms
    receive_buffer_bytes send_buffer_bytes reconnect_backoff_ms reconnect_backoff_max_ms
    socket_connection_setup_timeout_ms socket_connection_setup_timeout_max_ms client_dns_lookup
    metadata_recovery_strategy enable_metrics_push metric_reporters metrics_num_samples metrics_recording_level
    metrics_sample_window_ms security_protocol security_providers statistics_interval_ms
"""
_PREFIXES: Final = ("ssl_", "sasl_", "broker_", "socket_", "topic_metadata_")
#: Types of settings that a configuration may give as text.
_FROM_TEXT: Final = frozenset({"int", "int | None", "bool", "bool | None"})


def words(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


@attrs.frozen
class Vocabulary:
    """The settings of one kind of client."""

    #: The attrs class that contains the settings.
    settings: type[Any]
    #: Names that need a network and that only this kind of client has.
    network: frozenset[str]
    #: Names of other clients, with the name here.
    renamed: Mapping[str, str]
    #: Settings whose text is not converted, because they have a check of their own.
    unconverted: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in attrs.fields(self.settings))

    def is_of_network(self, name: str) -> bool:
        return (
            name in self.network
            or name in _NETWORK.split()
            or name.startswith(_PREFIXES)
        )

    def check_keyword(self, name: str) -> None:
        """Raise InvalidConfigError for a keyword that is not a setting."""
        if self.is_of_network(name):
            expected = f"one of {', '.join(self.names)}"
            raise InvalidConfigError(
                f"{name} needs a network; leave it out", expected=expected
            )
        if name not in self.names:
            raise unknown(name, self.names)

    def of_config(self, config: Mapping[str, object] | None) -> dict[str, Any]:
        """Return the settings of a configuration by our names. Raises
        InvalidConfigError.

        The warning names the line that called the method of the user, which is four
        calls above.
        """
        chosen: dict[str, Any] = {}
        ignored = []
        for dotted, value in (config or {}).items():
            name = str(dotted).replace(".", "_")
            name = self.renamed.get(name, name)
            if self.is_of_network(name):
                ignored.append(str(dotted))
                continue
            if name not in self.names:
                raise unknown(
                    str(dotted), [name.replace("_", ".") for name in self.names]
                )
            chosen[name] = self._typed(name, value)
        if ignored:
            message = f"settings that need a network are ignored: {', '.join(sorted(ignored))}"
            warnings.warn(message, UserWarning, stacklevel=4)
        return chosen

    def _typed(self, name: str, value: object) -> object:
        """Convert a value of a configuration, in which numbers and flags may be text."""
        if not isinstance(value, str):
            return value
        kind = str(getattr(attrs.fields(self.settings), name).type)
        if name in self.unconverted or kind not in _FROM_TEXT:
            return value
        if "bool" in kind:
            if value.lower() not in ("true", "false"):
                raise InvalidConfigError(
                    name, expected="true or false", found=repr(value)
                )
            return value.lower() == "true"
        try:
            return int(value)
        except ValueError:
            raise InvalidConfigError(
                name, expected="a whole number", found=repr(value)
            ) from None


def unknown(
    name: str, known: Iterable[str], kind: str = "setting"
) -> InvalidConfigError:
    """Return the error for an unknown name: it contains the nearest known one, or all.

    `kind` is a noun for the name.
    """
    return InvalidConfigError(
        f"unknown {kind} {name!r}",
        expected=nearest_name(name, known) or ", ".join(known),
    )
