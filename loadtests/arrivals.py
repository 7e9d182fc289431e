"""When requests are sent: an open loop at given times (Poisson's or a trace's), or a closed loop of users."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def poisson(rate: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Seconds of the arrivals of a Poisson process of ``rate`` per second, from 0 on, up to ``seconds``."""
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)


async def open_loop(
    jobs: Iterable[tuple[float, Job]], send: Callable[[Job, float], Awaitable[Result]], began: float
) -> list[Result]:
    """Send each job at its time, in seconds after ``began``, whatever has become of earlier ones.

    ``began`` is of ``time.perf_counter``; ``send`` also gets the time at which its job was due. Returns the
    results in the order of the jobs once all have ended.
    """
    sent: list[asyncio.Future[Result]] = []
    for at, job in jobs:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        sent.append(asyncio.ensure_future(send(job, began + at)))
    return await asyncio.gather(*sent)


async def closed_loop(
    users: int, jobs: Iterable[Job], send: Callable[[Job], Awaitable[Result]]
) -> list[Result]:
    """``users`` take the jobs in order, each the next one as soon as its last one has ended.

    Returns the results in the order of their ends.
    """
    results: list[Result] = []
    coming = iter(jobs)

    async def user() -> None:
        for job in coming:
            results.append(await send(job))

    await asyncio.gather(*(user() for _ in range(users)))
    return results
