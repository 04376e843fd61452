"""The clients of Kafka 0.7 and 0.8: producer, consumer streams and simple consumer."""

from logcore.legacy.connector import (
    Blacklist,
    Connector,
    Stream,
    TopicFilter,
    Whitelist,
)
from logcore.legacy.producer import Producer
from logcore.legacy.simple_consumer import (
    EARLIEST,
    LATEST,
    Fetched,
    FetchRequest,
    SimpleConsumer,
)

__all__ = [
    "EARLIEST",
    "LATEST",
    "Blacklist",
    "Connector",
    "FetchRequest",
    "Fetched",
    "Producer",
    "SimpleConsumer",
    "Stream",
    "TopicFilter",
    "Whitelist",
]
