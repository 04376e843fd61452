"""Registers strategies for the types of logcore when hypothesis is imported.

    @given(record=...)
    def test_my_codec(record: logcore.Record): ...

After that, st.from_type() supports the types that users annotate with. `strategies` is
imported when a value is drawn, because it imports hypothesis, whose own import has not
finished at this moment. The library never imports this module, so `import logcore`
works without hypothesis.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Register the strategies. This is the entry point `hypothesis` of the package."""
    from hypothesis import strategies as st

    from logcore.kernels import Record
    from logcore.recordbatch import RecordBatch

    def records(_: type[Any]) -> st.SearchStrategy[Record]:
        from logcore.testing import strategies

        return strategies.stored_records()

    def batches(_: type[Any]) -> st.SearchStrategy[RecordBatch]:
        from logcore.testing import strategies

        return strategies.stored_batches()

    st.register_type_strategy(Record, records)
    st.register_type_strategy(RecordBatch, batches)
