"""The API versions that releases of Apache Kafka serve, for tests of old clients.

The table is that of ApiKeys in the jars of kafka-clients; an interop test compares them.
Kafka 3.9 has ConsumerGroupHeartbeat and ConsumerGroupDescribe too, but they are off by
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from logcore.errors import InvalidConfigError
from netshim import wire

_TABLE: Final = """\
API                           0.11   1.1   2.4   2.8   3.0   3.6   3.9   4.0   4.1
Produce                        0-3   0-5   0-8   0-9   0-9   0-9  0-11  3-12  3-13
Fetch                          0-5   0-7  0-11  0-12  0-12  0-15  0-17  4-17  4-18
ListOffsets                    0-2   0-2   0-5   0-6   0-7   0-8   0-9  1-10  1-10
Metadata                       0-4   0-5   0-9  0-11  0-11  0-12  0-12  0-13  0-13
OffsetCommit                   0-3   0-3   0-8   0-8   0-8   0-8   0-9   2-9   2-9
OffsetFetch                    0-3   0-3   0-6   0-7   0-8   0-8   0-9   1-9   1-9
FindCoordinator                0-1   0-1   0-3   0-3   0-4   0-4   0-6   0-6   0-6
JoinGroup                      0-2   0-2   0-6   0-7   0-7   0-9   0-9   0-9   0-9
Heartbeat                      0-1   0-1   0-4   0-4   0-4   0-4   0-4   0-4   0-4
LeaveGroup                     0-1   0-1   0-4   0-4   0-4   0-5   0-5   0-5   0-5
SyncGroup                      0-1   0-1   0-4   0-5   0-5   0-5   0-5   0-5   0-5
DescribeGroups                 0-1   0-1   0-5   0-5   0-5   0-5   0-5   0-6   0-6
ListGroups                     0-1   0-1   0-3   0-4   0-4   0-4   0-5   0-5   0-5
SaslHandshake                  0-0   0-1   0-1   0-1   0-1   0-1   0-1   0-1   0-1
ApiVersions                    0-1   0-1   0-3   0-3   0-3   0-3   0-4   0-4   0-4
CreateTopics                   0-2   0-2   0-5   0-7   0-7   0-7   0-7   2-7   2-7
DeleteTopics                   0-1   0-1   0-4   0-6   0-6   0-6   0-6   1-6   1-6
DeleteRecords                  0-0   0-0   0-1   0-2   0-2   0-2   0-2   0-2   0-2
InitProducerId                 0-0   0-0   0-2   0-4   0-4   0-4   0-5   0-5   0-5
OffsetForLeaderEpoch           0-0   0-0   0-3   0-4   0-4   0-4   0-4   2-4   2-4
AddPartitionsToTxn             0-0   0-0   0-1   0-3   0-3   0-4   0-5   0-5   0-5
AddOffsetsToTxn                0-0   0-0   0-1   0-3   0-3   0-3   0-4   0-4   0-4
EndTxn                         0-0   0-0   0-1   0-3   0-3   0-3   0-4   0-5   0-5
WriteTxnMarkers                0-0   0-0   0-0   0-1   0-1   0-1   0-1   1-1   1-1
TxnOffsetCommit                0-0   0-0   0-2   0-3   0-3   0-3   0-4   0-5   0-5
DescribeAcls                   0-0   0-0   0-1   0-2   0-2   0-3   0-3   1-3   1-3
CreateAcls                     0-0   0-0   0-1   0-2   0-2   0-3   0-3   1-3   1-3
DeleteAcls                     0-0   0-0   0-1   0-2   0-2   0-3   0-3   1-3   1-3
DescribeConfigs                0-0   0-1   0-2   0-4   0-4   0-4   0-4   1-4   1-4
AlterConfigs                   0-0   0-0   0-1   0-2   0-2   0-2   0-2   0-2   0-2
DescribeLogDirs                  -   0-0   0-1   0-2   0-2   0-4   0-4   1-4   1-4
SaslAuthenticate                 -   0-0   0-1   0-2   0-2   0-2   0-2   0-2   0-2
CreatePartitions                 -   0-0   0-1   0-3   0-3   0-3   0-3   0-3   0-3
DeleteGroups                     -   0-0   0-2   0-2   0-2   0-2   0-2   0-2   0-2
ElectLeaders                     -     -   0-2   0-2   0-2   0-2   0-2   0-2   0-2
IncrementalAlterConfigs          -     -   0-1   0-1   0-1   0-1   0-1   0-1   0-1
AlterPartitionReassignments      -     -   0-0   0-0   0-0   0-0   0-0   0-0   0-1
ListPartitionReassignments       -     -   0-0   0-0   0-0   0-0   0-0   0-0   0-0
OffsetDelete                     -     -   0-0   0-0   0-0   0-0   0-0   0-0   0-0
DescribeClientQuotas             -     -     -   0-1   0-1   0-1   0-1   0-1   0-1
AlterClientQuotas                -     -     -   0-1   0-1   0-1   0-1   0-1   0-1
DescribeUserScramCredentials     -     -     -   0-0   0-0   0-0   0-0   0-0   0-0
AlterUserScramCredentials        -     -     -   0-0   0-0   0-0   0-0   0-0   0-0
DescribeCluster                  -     -     -   0-0   0-0   0-0   0-1   0-2   0-2
DescribeProducers                -     -     -   0-0   0-0   0-0   0-0   0-0   0-0
DescribeTransactions             -     -     -     -   0-0   0-0   0-0   0-0   0-0
ListTransactions                 -     -     -     -   0-0   0-0   0-1   0-1   0-2
ConsumerGroupHeartbeat           -     -     -     -     -     -     -   0-1   0-1
ConsumerGroupDescribe            -     -     -     -     -     -     -   0-1   0-1
ListConfigResources              -     -     -     -     -     -   0-0   0-0   0-1
DescribeTopicPartitions          -     -     -     -     -     -   0-0   0-0   0-0
"""
#: The first release whose ApiVersions contains feature levels.
_FIRST_WITH_FEATURES: Final = (4, 0)
#: The first release that refuses an unknown version of ApiVersions with the known ones
#: (KIP-511).
_FIRST_TO_NAME_VERSIONS: Final = (2, 4)


@attrs.frozen
class KafkaRelease:
    """The versions of APIs that a release serves."""

    name: str
    #: Oldest and latest version by the key of the API.
    ranges: Mapping[int, tuple[int, int]]

    @property
    def has_features(self) -> bool:
        """Whether the release has the features of this broker."""
        return _number(self.name) >= _FIRST_WITH_FEATURES

    @property
    def names_versions(self) -> bool:
        """Whether a refused ApiVersions request gets the versions of this API."""
        return _number(self.name) >= _FIRST_TO_NAME_VERSIONS

    def serves(self, key: int, version: int) -> bool:
        """Return whether the release serves a version of an API."""
        oldest, latest = self.ranges.get(key, (0, -1))
        return oldest <= version <= latest


def release_named(name: str) -> KafkaRelease:
    """Return a release, such as "2.8".

    Raises:
        InvalidConfigError: the table has no such release.
    """
    header, *rows = (line.split() for line in _TABLE.splitlines())
    releases = header[1:]
    if name not in releases:
        raise InvalidConfigError(
            "a release of Kafka", expected=", ".join(releases), found=repr(name)
        )
    column = header.index(name)
    keys = {api.name: api.key for api in wire.APIS.values()}
    ranges = {}
    for row in rows:
        if row[column] != "-":
            oldest, latest = map(int, row[column].split("-"))
            ranges[keys[row[0]]] = oldest, latest
    return KafkaRelease(name, ranges)


def _number(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))
