"""Ships local logs to a Kafka cluster, and mirrors topics of a cluster into a local
log; see docs/shipping.md.

The client of the cluster is confluent-kafka: pip install 'logcore-db[forward]'.
"""

from logcore.shipping.forwarder import Forwarder
from logcore.shipping.kafka import KafkaCluster
from logcore.shipping.mirror import Mirror
from logcore.shipping.settings import (
    ForwardMetrics,
    ForwardOptions,
    MirrorMetrics,
    MirrorOptions,
)

__all__ = [
    "ForwardMetrics",
    "ForwardOptions",
    "Forwarder",
    "KafkaCluster",
    "Mirror",
    "MirrorMetrics",
    "MirrorOptions",
]
