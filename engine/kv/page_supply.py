"""Pages of RAM that the system supplies before they are first written."""

from __future__ import annotations

import ctypes
import mmap
import sys

SLICE = 2 << 20
"""Bytes of one call: a large page. A virtual machine may take 5 ms for it, since its host finds the memory."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PAGE = mmap.PAGESIZE


class PageSupply:
    """The pages of ``size`` bytes from ``address`` on, an allocation that nobody has written yet.

    The system supplies a page when it is first written, and whoever writes waits: in a virtual machine for a
    tenth of the time that it takes to compute what is written. What lies there stays as it is, and other
    threads may write there meanwhile. Where the system has no such call, nothing happens.
    """

    def __init__(self, address: int, size: int) -> None:
        self._base = address
        self._size = size
        self._advise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
        self.supplied = 0
        """Bytes from the beginning whose pages are there."""

    def extend(self, size: int) -> bool:
        """Have up to a slice of the first ``size`` bytes supplied; returns whether more of them are left."""
        size = min(size, self._size)
        if self._advise is None or self.supplied >= size:
            return False
        start = self._base + self.supplied
        end = min((start // SLICE + 1) * SLICE, self._base + size)
        # The pages that the first and last byte are in belong to the allocation, too.
        first, last = start & -_PAGE, -(-end // _PAGE) * _PAGE
        length = ctypes.c_size_t(last - first)
        if self._advise(ctypes.c_void_p(first), length, _MADV_POPULATE_WRITE):
            self._advise = None  # an older system, or no memory: then pages come with the first write
            return False
        self.supplied = end - self._base
        return self.supplied < size
