"""Consumers of a log directory, which LogDir.consumer() creates; see docs/consumer.md.

Users import this package for annotations, listeners and assignors.
"""

from logcore.consumer.assignors import Assignor
from logcore.consumer.consumer import Consumer
from logcore.consumer.settings import (
    ConsumerInterceptor,
    ConsumerMetrics,
    ConsumerRecords,
    OffsetAndMetadata,
    RebalanceListener,
)
from logcore.consumer.topic_partition import Member, TopicPartition

__all__ = [
    "Assignor",
    "Consumer",
    "ConsumerMetrics",
    "ConsumerRecords",
    "ConsumerInterceptor",
    "Member",
    "OffsetAndMetadata",
    "RebalanceListener",
    "TopicPartition",
]
