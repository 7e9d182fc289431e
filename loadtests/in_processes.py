"""Independent runs of an experiment, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

from tqdm import tqdm

Run = TypeVar("Run")
Result = TypeVar("Result")


def in_processes(call: Callable[[Run], Result], runs: Sequence[Run], workers: int) -> list[Result]:
    """What came of each run, in their order, with a progress bar where somebody watches.

    ``call`` and the runs must be picklable: they go to fresh processes, unless there is one worker only.
    """
    watched = partial(tqdm, total=len(runs), unit="run", disable=None)
    if min(workers, len(runs)) <= 1:
        return list(watched(map(call, runs)))
    with get_context("spawn").Pool(min(workers, len(runs))) as pool:
        return list(watched(pool.imap(call, runs, chunksize=1)))


WORKERS = (os.cpu_count() or 1, "runs at the same time")
"""The option ``--workers``."""
