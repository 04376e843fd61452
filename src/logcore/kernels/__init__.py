"""The hot loops of the library: compiled if possible, else in plain Python.

Both forms have the same functions, results and errors; plain.py documents them.
LOGCORE_KERNELS=plain selects the plain form if the compiled one is present, for tests
and comparisons.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from logcore.kernels import layout

if TYPE_CHECKING:
    from logcore.kernels import plain as kernel
    from logcore.kernels.appending import Appender, PartitionFields, SegmentFields
    from logcore.kernels.iterating import PositionFields
    from logcore.kernels.layout import Receipt, Record, TopicRecord
    from logcore.kernels.requests import UsualFetch, UsualProduce
    from logcore.kernels.sending import (
        AccumulatorFields,
        BatchFields,
        FutureFields,
        ProducerFields,
        QueueFields,
        RouteFields,
        ThreadStateFields,
    )
else:
    try:
        if os.environ.get("LOGCORE_KERNELS") == "plain":
            raise ImportError("plain kernels asked for")
        from logcore.kernels import _compiled as kernel
        from logcore.kernels._compiled import (
            AccumulatorFields,
            Appender,
            BatchFields,
            FutureFields,
            PartitionFields,
            PositionFields,
            ProducerFields,
            QueueFields,
            Receipt,
            Record,
            RouteFields,
            SegmentFields,
            ThreadStateFields,
            TopicRecord,
            UsualFetch,
            UsualProduce,
        )
    except ImportError:
        from logcore.kernels import plain as kernel
        from logcore.kernels.appending import Appender, PartitionFields, SegmentFields
        from logcore.kernels.iterating import PositionFields
        from logcore.kernels.layout import Receipt, Record, TopicRecord
        from logcore.kernels.requests import UsualFetch, UsualProduce
        from logcore.kernels.sending import (
            AccumulatorFields,
            BatchFields,
            FutureFields,
            ProducerFields,
            QueueFields,
            RouteFields,
            ThreadStateFields,
        )
    # Like a named tuple: `match` can unpack it, and pandas.DataFrame(records) has
    # columns with names.
    Sequence.register(Record)
    Sequence.register(TopicRecord)
    Sequence.register(Receipt)

__all__ = [
    "AccumulatorFields",
    "Appender",
    "BatchFields",
    "FutureFields",
    "PartitionFields",
    "PositionFields",
    "ProducerFields",
    "QueueFields",
    "Receipt",
    "Record",
    "RouteFields",
    "SegmentFields",
    "TopicRecord",
    "UsualFetch",
    "UsualProduce",
    "ThreadStateFields",
    "kernel",
    "layout",
]
