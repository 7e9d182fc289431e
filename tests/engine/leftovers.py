"""Memory that tests have left: what is in reference cycles, and what threads have freed into their arenas."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """An engine and its owner are a cycle, and large models are many blocks of malloc: both could stay long."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
