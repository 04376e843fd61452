"""Runs of pytest inside a test, in its own process.

A run that leaves turns the fault handler off, and with it the handler for SIGBUS that
mappings need: it is kept out.
"""

from __future__ import annotations

from typing import Final

#: Options of an inner run that leave no files.
ALONE: Final = ("-p", "no:cacheprovider", "-p", "no:faulthandler")
