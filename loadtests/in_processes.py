"""Independent runs of an experiment, several at a time."""

from __future__ import annotations

import argparse
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
    if min(workers, len(runs)) == 1:
        return list(watched(map(call, runs)))
    with get_context("spawn").Pool(min(workers, len(runs))) as pool:
        return list(watched(pool.imap(call, runs, chunksize=1)))


def add_count(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    """An option ``name`` that is a number of at least 1."""
    parser.add_argument(name, type=_positive, default=default, metavar="N", help=f"{text} (default: {default})")


def add_workers(parser: argparse.ArgumentParser) -> None:
    """The option ``--workers``."""
    add_count(parser, "--workers", os.cpu_count() or 1, "runs at the same time")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
