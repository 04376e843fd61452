"""Runs of pytest inside a test, in its own process.

An inner run that ends switches the fault handler off, and with it the handler for
SIGBUS that mappings need. So an inner run does not use the fault handler.
"""

from __future__ import annotations

from typing import Final

#: Options of an inner run that leave no files.
ALONE: Final = ("-p", "no:cacheprovider", "-p", "no:faulthandler")
