"""Fair shares over HTTP: a short request beside a long prompt, a client beside another that floods.

Real sockets and a real engine in one process; judged in engine steps.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_server import MODEL, LocalServer, serve_locally

from engine.config import EngineConfig

BUDGET = 128
LONG, FLOOD = 6_000, 1_280  # tokens of a prompt: 47 and 10 steps
START_S = 60.0


@pytest.fixture(scope="module")
def single(small_model: Path) -> Iterator[LocalServer]:
    config = EngineConfig(
        model=str(small_model), dtype="float32", num_blocks=400, token_budget=BUDGET, num_threads=1
    )
    # Few steps pass while a request is on its way, and the processor is free for it.
    with serve_locally(small_model, config, MODEL) as server, server.slow_steps():
        yield server


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return random.Random(seed).choices(range(100, 10_000), k=length)


def asking(prompts: Any, tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompts, "max_tokens": tokens, "ignore_eos": True, "stream": True}


async def read(client: httpx.AsyncClient, body: dict[str, Any], tenant: str, *, whole: bool) -> None:
    """Read a stream to its end, or its first event only."""
    async with client.stream(
        "POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {tenant}"}
    ) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data:") and not whole:
                return


@asynccontextmanager
async def running(
    server: LocalServer, client: httpx.AsyncClient, bodies: list[dict[str, Any]], tenant: str
) -> AsyncIterator[None]:
    """Requests that have begun to run, until the block ends."""
    tasks = [asyncio.create_task(read(client, body, tenant, whole=True)) for body in bodies]
    try:
        deadline = asyncio.get_running_loop().time() + START_S
        while not server.client.engine.stats().scheduler.running:
            assert asyncio.get_running_loop().time() < deadline, "nothing runs"
            await asyncio.sleep(0.01)
        yield
        assert not all(task.done() for task in tasks), "nothing was left to wait for"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def steps_to_first_token(
    server: LocalServer, client: httpx.AsyncClient, body: dict[str, Any], tenant: str
) -> int:
    """At most: steps that began while the request was on its way are among them."""
    before = server.client.engine.stats().steps
    await read(client, body, tenant, whole=False)
    return server.client.engine.stats().steps - before


def test_a_short_request_gets_in_beside_a_long_prompt(single: LocalServer) -> None:
    async def scenario() -> list[int]:
        async with httpx.AsyncClient(base_url=single.url, timeout=300) as client:
            long = [asking(prompt(LONG, 1), 1)]
            async with running(single, client, long, "one"):
                return [
                    await steps_to_first_token(single, client, asking(prompt(16, 10 + number), 1), "one")
                    for number in range(3)
                ]

    # Three steps of those that are counted may pass on the way.
    assert min(asyncio.run(scenario())) <= 3 + 3


def test_a_flood_of_one_client_does_not_delay_another(single: LocalServer) -> None:
    async def scenario() -> list[int]:
        async with httpx.AsyncClient(base_url=single.url, timeout=300) as client:
            flood = [
                asking([prompt(FLOOD, 100 + 16 * half + number) for number in range(16)], 64)
                for half in range(2)
            ]
            async with running(single, client, flood, "flood"):
                return [
                    await steps_to_first_token(single, client, asking(prompt(200, 300 + number), 4), "other")
                    for number in range(5)
                ]

    # Alone it takes two steps; the flood's prompts take ten each, and it is too long to pass for a short one.
    assert sorted(asyncio.run(scenario()))[2] <= 2 * 2 + 3
