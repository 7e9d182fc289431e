"""What tests leave in their process: memory in reference cycles and in threads' arenas, handlers of loggers."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from app.logs import LOGGERS


def give_back() -> None:
    """An engine and its owner are a cycle, and large models are many blocks of malloc: both could stay long."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@contextmanager
def loggers_restored() -> Iterator[None]:
    """Undo at the end what ``logs.configure`` does meanwhile."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    shows = warnings.showwarning
    try:
        yield
    finally:
        warnings.showwarning = shows
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)
