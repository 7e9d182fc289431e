"""Independent runs of an experiment, several at a time."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

Run = TypeVar("Run")
Result = TypeVar("Result")


def in_processes(
    call: Callable[[Run], Result], runs: Sequence[Run], workers: int
) -> Iterator[tuple[int, Result]]:
    """Yield the place of each run that has ended and what came of it.

    ``call`` and the runs must be picklable: they go to fresh processes, unless there is one worker only.
    """
    numbered = partial(_numbered, call)
    workers = min(workers, len(runs))
    if workers == 1:
        yield from map(numbered, enumerate(runs))
        return
    with get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(numbered, enumerate(runs), chunksize=1)


def _numbered(call: Callable[[Run], Result], place: tuple[int, Run]) -> tuple[int, Result]:
    return place[0], call(place[1])


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
