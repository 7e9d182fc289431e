"""An ``EngineClient`` over loopback replicas, and what tests of it need."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from loopback import LoopbackHandle
from virtual_time import run_virtually

from app.fleet.engine_client import EngineClient
from app.fleet.generation import Delta, GenerateRequest
from engine.sampling_params import SamplingParams


def request(prompt: list[int], max_tokens: int = 30, name: str = "r") -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


async def collect(client: EngineClient, wanted: GenerateRequest) -> list[int]:
    tokens: list[int] = []
    last: Delta | None = None
    async for delta in client.generate(wanted):
        assert last is None or last.finish_reason is None
        assert delta.index == len(tokens)
        tokens += delta.token_ids
        last = delta
    assert last is not None
    assert last.finish_reason == "length"
    return tokens


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(test())


async def started(replicas: int, **options: Any) -> tuple[LoopbackHandle, EngineClient]:
    handle = LoopbackHandle(replicas)
    client = EngineClient(handle, **{"unavailable_after_s": 60.0, **options})
    await client.start()
    await until(lambda: len(handle.fleet.ledger.routable()) == replicas)
    return handle, client


def quiet(handle: LoopbackHandle, client: EngineClient) -> bool:
    """Nothing is left anywhere."""
    return (
        not any(replica.engine.live for replica in handle.replicas.values() if not replica.dead)
        and client.status()["live_requests"] == 0
        and not any(handle.fleet.ledger.load().values())
        and not client._parts.attempts._answers
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (the condition spans both ends)
        await asyncio.sleep(0.001)


def calls_through_serve(handle: LoopbackHandle) -> list[Any]:
    """What Serve's router is told of each attempt that goes through Serve from now on."""
    seen: list[Any] = []
    send = handle.generate.remote

    def remote(*arguments: Any, **named: Any) -> Any:
        seen.append(named["meta"])
        return send(*arguments, **named)

    handle.generate.remote = remote
    return seen


def connected(client: EngineClient, *but: str) -> bool:
    """Whether all channels are open and have connections of their own, except those of ``but``."""
    status = client.status()
    return set(status["channels"].values()) == {"open"} and set(status["unconnected"]) == set(but)


async def collect_all(client: EngineClient, wanted: GenerateRequest) -> list[list[int]]:
    """The tokens of each sequence."""
    outputs: list[list[int]] = [[] for _ in range(wanted.params.n)]
    ended: set[int] = set()
    async for delta in client.generate(wanted):
        assert delta.sequence not in ended
        assert delta.index == len(outputs[delta.sequence])
        outputs[delta.sequence] += delta.token_ids
        if delta.finish_reason is not None:
            assert delta.finish_reason == "length"
            ended.add(delta.sequence)
        assert delta.final == (len(ended) == wanted.params.n)
    assert len(ended) == wanted.params.n
    return outputs


async def break_at_random(handle: LoopbackHandle, rng: random.Random) -> None:
    """Let replicas leave, and once kill one or break its channels; a new one comes each time.

    If engines died twice under a request, it would be taken for the cause.
    """
    faults = ["leave", "leave", rng.choice(("kill", "break"))]
    rng.shuffle(faults)
    for fault in faults:
        await asyncio.sleep(rng.random() * 0.05)
        members = [name for name, replica in handle.replicas.items() if not replica.dead]
        victim = rng.choice(members)
        if fault == "kill":
            handle.replicas[victim].kill()
            members.remove(victim)
        elif fault == "leave":
            members.remove(victim)
            handle.announce(*members)
        else:
            for channel in list(handle.replicas[victim].hub._channels.values()):
                handle.replicas[victim].hub.close(channel, "a test broke it")
        members.append(handle.add().name)
        handle.announce(*members)
