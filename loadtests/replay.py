"""Replays recorded traffic against a server: an open loop, at the times of a trace."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tqdm import tqdm

from loadtests.arrivals import open_loop
from loadtests.client import Client, Outcome
from loadtests.traces import BLOCK_TOKENS, Record

TOKENS = range(100, 30_000)
"""Ordinary ones in every vocabulary of at least this size."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a trace is replayed: from ``start``, for ``seconds`` of the replay, ``rate`` times as fast.

    Prompts, answers and shared blocks have their lengths divided by ``shrink``.
    """

    start: float
    seconds: float
    rate: float = 1.0
    shrink: int = 1

    def of(self, records: Sequence[Record]) -> list[tuple[float, Record]]:
        """Its requests with their seconds from its start; a trace's own times count from its first request."""
        first = records[0].arrival
        timed = (((one.arrival - first - self.start) / self.rate, one) for one in records)
        return [(at, one) for at, one in timed if 0 <= at < self.seconds]


def prompt_of(record: Record, shrink: int, seed: int, number: int) -> list[int]:
    """Token ids: the same for the same block id, else different for each ``number``."""
    length = max(record.prompt // shrink, 1)
    if not record.blocks:
        return random.Random(f"{seed} request {number}").choices(TOKENS, k=length)
    size = max(BLOCK_TOKENS // shrink, 1)
    return [token for block in record.blocks for token in _block(block, size, seed)][:length]


@functools.lru_cache(4096)
def _block(block: int, size: int, seed: int) -> list[int]:
    return random.Random(f"{seed} block {block}").choices(TOKENS, k=size)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of the requests, how late the last one of a hundred was sent, and the server's samples."""

    outcomes: list[Outcome]
    late: list[float]
    samples: list[dict[str, float]]


async def replay(
    url: str,
    key: str,
    due: Sequence[tuple[float, Record]],
    window: Window,
    scrape: Callable[[], dict[str, float]],
    seed: int = 0,
) -> Replayed:
    """Send the requests that are ``due``, and look at the server each second until all have been answered."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        listed = (await http.get("/v1/models")).raise_for_status()
    late: list[float] = []
    samples = [await asyncio.to_thread(scrape)]

    async def look() -> None:
        while True:
            await asyncio.sleep(1)
            samples.append(await asyncio.to_thread(scrape))

    model = listed.json()["data"][0]["id"]
    async with Client(url, model=model, key=key) as client:
        with tqdm(total=len(due), unit="request") as bar:

            async def send(job: tuple[int, Record], at: float) -> Outcome:
                number, record = job
                fields: dict[str, Any] = {"prompt": prompt_of(record, window.shrink, seed, number)}
                late.append(time.perf_counter() - at)
                tokens = max(record.output // window.shrink, 1)
                outcome = await client.stream("/v1/completions", tokens, ignore_eos=True, **fields)
                bar.update()
                bar.set_postfix_str(f"{len(late) - bar.n} under way")
                return outcome

            looking = asyncio.ensure_future(look())
            jobs = [(at, (number, record)) for number, (at, record) in enumerate(due)]
            outcomes = await open_loop(jobs, send, time.perf_counter())
    looking.cancel()
    await asyncio.wait([looking])
    await asyncio.sleep(2)  # until every ingress has told the one that answers
    return Replayed(outcomes, late, [*samples, await asyncio.to_thread(scrape)])
