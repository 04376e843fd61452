"""Topics as tables: for DuckDB, for a lazy query of polars, and as Arrow batches.

This package writes no log. pyarrow, duckdb and polars are imported in functions only.
"""
