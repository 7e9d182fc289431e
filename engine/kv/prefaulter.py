"""Pages of RAM that the system maps before they are first written."""

from __future__ import annotations

import ctypes
import mmap
import sys

SLICE = 2 << 20
"""Bytes of one call: a huge page. It may take 5 ms in a virtual machine, whose host must find the memory."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PAGE = mmap.PAGESIZE


class Prefaulter:
    """Prefaults an allocation of ``size`` bytes at ``address``, slice by slice from its start.

    Otherwise each first write to a page waits until the system has mapped it: in a virtual machine for a tenth
    of the time that it takes to compute what is written. Contents stay as they are, and other threads may read
    and write them meanwhile. Does nothing on systems without such a call.
    """

    def __init__(self, address: int, size: int) -> None:
        self._base = address
        self._size = size
        self._advise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
        self.prefaulted = 0
        """Bytes from the start whose pages are mapped."""

    def extend(self, size: int) -> bool:
        """Prefault the next slice of the first ``size`` bytes; returns whether more of them are left."""
        size = min(size, self._size)
        if self._advise is None or self.prefaulted >= size:
            return False
        start = self._base + self.prefaulted
        end = min((start // SLICE + 1) * SLICE, self._base + size)
        # The pages of the first and the last byte belong to the allocation, too.
        first, last = start & -_PAGE, -(-end // _PAGE) * _PAGE
        length = ctypes.c_size_t(last - first)
        if self._advise(ctypes.c_void_p(first), length, _MADV_POPULATE_WRITE):
            self._advise = None  # an older kernel, or no memory: first writes map pages as usual
            return False
        self.prefaulted = end - self._base
        return self.prefaulted < size
