"""The producer of LogDir.producer(): collects records into batches, and writes them in
the background.
"""

from logcore.producer.futures import RecordFuture
from logcore.producer.producer import Producer
from logcore.producer.settings import (
    ProducerInterceptor,
    ProducerMetrics,
    ProducerRecord,
    RecordMetadata,
)

__all__ = [
    "ProducerInterceptor",
    "Producer",
    "ProducerMetrics",
    "ProducerRecord",
    "RecordFuture",
    "RecordMetadata",
]
