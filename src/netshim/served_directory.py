"""The directory of topics and logs that a broker serves, as its parts use it.

logcore.LogDir is an implementation. In a cluster, it is
cluster.directory.ClusterDirectory, which has the topics of the whole cluster and the
logs of this broker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from logcore import LogConfig, TopicDescription
from logcore.coordinators.lookup import Coordinators
from logcore.directory.interface import Host, HostDirectory
from logcore.directory.topic_file import NewTopics
from logcore.fs import FS


class ServedHost(Host, Protocol):
    """Methods that only a broker calls. logcore.directory_host documents them."""

    @property
    def fs(self) -> FS: ...
    @property
    def coordinators(self) -> Coordinators: ...
    def knows_leader_epoch(self, topic: str, number: int) -> bool: ...
    def start_deletion(self, name: str) -> None: ...
    def end_deletion(self, names: Collection[str], *, is_forgotten: bool) -> None: ...


class ServedDirectory(HostDirectory, Protocol):
    """Topics, and the logs of partitions. LogDir documents the methods."""

    @property
    def host(self) -> ServedHost: ...
    @property
    def config(self) -> LogConfig: ...
    @property
    def given_config(self) -> Mapping[str, object]: ...
    def describe_topic(self, name: str) -> TopicDescription: ...
    def space(self) -> tuple[int, int]: ...
    def create_topics(self, wanted: NewTopics, *, check_only: bool = False) -> None: ...
    def add_partitions(
        self, name: str, count: int, *, check_only: bool = False
    ) -> None: ...
    def alter_topic(
        self,
        name: str,
        changes: Mapping[str, object | None],
        *,
        check_only: bool = False,
    ) -> None: ...
    def delete_topic(self, name: str) -> None: ...
