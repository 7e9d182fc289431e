"""Many requests at once: they begin one by one, clients in turn, and the loop does other things meanwhile."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from starlette.requests import Request

from app.api.request_body import BodyReader
from app.api.turnstile import Turnstile

MANY = 300


def test_clients_pass_in_turn_and_one_in_each_turn_of_the_loop() -> None:
    async def test() -> None:
        turnstile, passed = Turnstile(), []

        async def enter(client: str) -> None:
            await turnstile.enter(client)
            passed.append(client)

        async with asyncio.TaskGroup() as tasks:
            for client in "aaaabbc":
                tasks.create_task(enter(client))
            seen = []
            while len(passed) < 7:
                await asyncio.sleep(0)
                seen.append(len(passed))
        assert "".join(passed) == "aabcaba"
        assert all(after - before <= 1 for before, after in pairwise(seen))
        await enter("a")  # it is free again
        await enter("a")

    asyncio.run(test())


def test_whoever_leaves_takes_no_turn() -> None:
    async def test() -> None:
        turnstile = Turnstile()
        await turnstile.enter("a")
        waiting = [asyncio.ensure_future(turnstile.enter(client)) for client in "abc"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        await asyncio.wait_for(waiting[2], 1.0)
        assert not turnstile._waiting
        await asyncio.wait_for(turnstile.enter("a"), 1.0)

    asyncio.run(test())


def test_a_health_check_and_another_client_overtake_many_requests() -> None:
    """Counted in requests that have begun when the others are answered, whatever these take."""
    begun: list[str] = []
    bodies = BodyReader(lambda request: request.headers["client"])

    def request(client: str) -> Request:
        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"from": "%s"}' % client.encode(), "more_body": False}

        return Request({"type": "http", "headers": [(b"client", client.encode())]}, receive)

    async def begin(client: str) -> int:
        await bodies.read(request(client), lambda body: begun.append(body["from"]))
        return len(begun)

    async def check() -> int:
        for _ in range(10):  # turns that the server itself takes for a request that does nothing
            await asyncio.sleep(0)
        return len(begun)

    async def test() -> None:
        crowd = [asyncio.ensure_future(begin("greedy")) for _ in range(MANY)]
        await asyncio.sleep(0)
        others = asyncio.gather(begin("modest"), begin("modest"), check())
        first, second, checked = await others
        assert first <= 5
        assert second <= first + 2
        assert checked <= 12
        await asyncio.gather(*crowd)
        assert len(begun) == MANY + 2

    asyncio.run(test())
