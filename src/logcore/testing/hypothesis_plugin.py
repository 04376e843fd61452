"""Registers strategies for the types of logcore when hypothesis is imported.

    @given(record=...)
    def test_my_codec(record: logcore.Record): ...

After that, st.from_type() supports these types. hypothesis loads this module while it is
itself being imported. So logcore.testing.strategies, which imports hypothesis, is
imported only when a value is drawn. The library never imports this module, so that
`import logcore` works without hypothesis.
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
