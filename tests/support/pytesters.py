"""Inner runs of pytest: a test runs pytest in its own process.

When an inner run ends, pytest disables the fault handler, and with it the handler for
SIGBUS that memory mappings need. So an inner run does not use the fault handler.
"""

from __future__ import annotations

from typing import Final

#: Options of an inner run that leave no files.
ALONE: Final = ("-p", "no:cacheprovider", "-p", "no:faulthandler")
