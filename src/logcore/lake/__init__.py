"""Exports a topic to a table of a lakehouse, Iceberg or Delta; see docs/lake.md.

The tables are written by pyiceberg and deltalake: pip install 'logcore-db[lake]'.
"""

from logcore.lake.delta import DeltaTarget
from logcore.lake.exporting import ExportOptions, ExportReport, export
from logcore.lake.iceberg import IcebergTarget, local_catalog, named_catalog
from logcore.lake.target import TableLayout

__all__ = [
    "DeltaTarget",
    "ExportOptions",
    "ExportReport",
    "IcebergTarget",
    "TableLayout",
    "export",
    "local_catalog",
    "named_catalog",
]
