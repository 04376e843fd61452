"""CRC-32C, the checksum of batches, producer snapshots, seals and staged segments.

Importing crc32c takes 40-70 ms, as long as the rest of the package together: it is
imported when the first checksum is computed. The compiled kernels load it in the same
way for themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logcore.kernels.layout import Buffer


def crc32c(data: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of bytes that follow the bytes with CRC `crc`."""
    from crc32c import crc32c as compute

    return compute(data, crc)
