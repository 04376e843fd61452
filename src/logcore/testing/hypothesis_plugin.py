"""What hypothesis calls when it is imported: from then on st.from_type() knows the types that users annotate with.

    @given(record=...)
    def test_my_codec(record: logcore.Record): ...

`strategies` is imported when a value is drawn, because it imports hypothesis, which is not whole yet at this moment.
Nothing in the library imports this module, so `import logcore` goes without hypothesis.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """The entry point `hypothesis` of the package."""
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
