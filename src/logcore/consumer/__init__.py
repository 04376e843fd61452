"""Consumers of a log directory, and the groups they form in this process.

See docs/consumer.md. Made by LogDir.consumer(); what is here is for annotations,
listeners and assignors.
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
